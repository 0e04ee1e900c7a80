"""Sums over ranks, with the other rank played by memory in which everything has arrived; see also test_gpu_group."""

from __future__ import annotations

import pytest
import torch

from services.worker.engine.kernels.torch.kernels import rms_norm

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu.rank_sums import RankSums

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
ROWS, WIDTH = 5, 48
LATE = 1000


def by_rank(rank: int, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the addresses of both, in the order of ranks."""
    addresses = [own.data_ptr(), other.data_ptr()]
    return torch.tensor(addresses if rank == 0 else addresses[::-1], device=own.device)


def wrapped(number: int) -> int:
    """Return what int32 makes of a number."""
    return (number + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("met_before", [0, 2**31 - 2])
def test_partial_sums_join_the_residual_stream_and_are_normalised(
    rank: int, met_before: int, device: torch.device
) -> None:
    torch.manual_seed(rank)
    mine, theirs = (torch.zeros(2, ROWS, WIDTH, dtype=DTYPE, device=device) for _ in range(2))
    theirs.normal_()
    # The other rank is ahead of us in every meeting.
    pad = torch.full((ROWS, 2), wrapped(met_before + LATE), dtype=torch.int32, device=device)
    other_pad = torch.zeros_like(pad)
    pad[:, rank] = met_before
    turns = [(mine[turn].view(-1), by_rank(rank, mine[turn], theirs[turn])) for turn in range(2)]
    sums = RankSums(rank, turns, (pad, by_rank(rank, pad, other_pad)), ROWS)
    sums._epochs.fill_(met_before)
    weight = torch.rand(WIDTH, device=device).to(DTYPE)
    for meeting, tokens in enumerate((ROWS, 2, ROWS), start=1):
        partial = torch.randn(tokens, WIDTH, device=device).to(DTYPE)
        hidden = torch.randn(tokens, WIDTH, device=device).to(DTYPE)
        turn = meeting % 2
        expected = hidden.float() + partial.float() + theirs[turn, :tokens].float()
        sums.place(hidden).copy_(partial)
        normed = sums.add(hidden, weight, 1e-5)
        tolerance = 2e-2 if DTYPE is torch.bfloat16 else 1e-5
        torch.testing.assert_close(hidden.float(), expected, atol=tolerance, rtol=tolerance)
        reference = rms_norm(hidden, weight, 1e-5)
        torch.testing.assert_close(normed, reference, atol=tolerance, rtol=tolerance)
        # What the other rank reads by turns, and what tells it so.
        assert torch.equal(mine[turn, :tokens], partial)
        assert other_pad[:tokens, rank].tolist() == pad[:tokens, rank].tolist()
    assert other_pad[:, rank].tolist() == [wrapped(met_before + meetings) for meetings in (3, 3, 2, 2, 2)]
