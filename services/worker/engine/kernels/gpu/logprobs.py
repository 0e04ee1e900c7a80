"""Log probabilities of sampled tokens on the device, equal to those of `engine/sampling/logprobs.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.engine.sampling.drawing import pad_to_blocks, top_entries

# Limits of one row's log probabilities beside its token: most likely tokens, and requested ids.
MOST_TOP = 20
MOST_NAMED = 128

_CHUNK = 4096


@triton.jit
def _weigh(logits, peaks, masses, vocabulary, chunks, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + index * vocabulary + ids, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)
    peak = tl.max(values, axis=0)
    shares = tl.where(values > -float("inf"), tl.exp(values - peak), 0.0)
    tl.store(peaks + index * chunks + chunk, peak)
    tl.store(masses + index * chunks + chunk, tl.sum(shares, axis=0))


@triton.jit
def _normalise(peaks, masses, normalizers, chunks, CHUNKS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNKS)
    inside = columns < chunks
    tops = tl.load(peaks + index * chunks + columns, mask=inside, other=-float("inf"))
    parts = tl.load(masses + index * chunks + columns, mask=inside, other=0.0)
    peak = tl.max(tops, axis=0)
    mass = tl.sum(tl.where(inside, parts * tl.exp(tops - peak), 0.0), axis=0)
    tl.store(normalizers + index, peak + tl.log(mass))


@dataclass(frozen=True, slots=True)
class LogprobBuffers:
    """Log probabilities on the device, for rows that asked and those that did not alike."""

    # [rows, 1 + top + MOST_NAMED] float32: of the token, of the most likely ones, best first, and of those named.
    values: torch.Tensor
    # [rows, top] int32, the most likely tokens.
    top_ids: torch.Tensor

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device, *, is_pinned: bool = False) -> LogprobBuffers:
        """Make room for `rows` rows."""
        top = min(MOST_TOP, vocabulary)
        return cls(
            torch.empty(rows, 1 + top + MOST_NAMED, dtype=torch.float32, device=device, pin_memory=is_pinned),
            torch.empty(rows, top, dtype=torch.int32, device=device, pin_memory=is_pinned),
        )

    def copy_(self, other: LogprobBuffers) -> None:
        """Begin to copy another of as many rows."""
        self.values.copy_(other.values, non_blocking=True)
        self.top_ids.copy_(other.top_ids, non_blocking=True)


def report(logits: torch.Tensor, token_ids: torch.Tensor, named: torch.Tensor, into: LogprobBuffers) -> None:
    """Compute log probabilities at temperature 1, of the logits before any logits processor.

    Args:
        logits: [rows, vocabulary] of any float type, contiguous.
        token_ids: [rows] int32, what was sampled.
        named: [rows, MOST_NAMED] int64, ids whose log probabilities are computed, too.
        into: filled.
    """
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(peaks)
    _weigh[(rows, chunks)](logits, peaks, masses, vocabulary, chunks, CHUNK=_CHUNK, num_warps=4)
    normalizers = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    _normalise[(rows,)](peaks, masses, normalizers, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    values, ids = top_entries(pad_to_blocks(logits, -torch.inf), into.top_ids.shape[1])
    own = logits.gather(1, token_ids.long()[:, None])
    torch.sub(torch.cat([own, values, logits.gather(1, named)], dim=1).float(), normalizers, out=into.values)
    into.top_ids.copy_(ids)
