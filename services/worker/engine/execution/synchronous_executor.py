"""The synchronous executor: runs one forward pass after the other and samples, on any device, without CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from services.worker.engine.execution.out_of_memory import compute_in_parts
from services.worker.engine.execution.pass_output import PassOutput, join
from services.worker.engine.execution.pooler import Pooler, PoolerHead, with_pooled
from services.worker.engine.model.batch import ForwardBatch, StateSlots
from services.worker.engine.plans.drafts import NO_TOKEN, as_accepted, following_of, split_tokens, verify
from services.worker.engine.plans.passes import ForwardPass, HostBatch, gather
from services.worker.engine.plans.scoring import RowSpans, ScoringTable, with_scored
from services.worker.engine.sampling.logprobs import score
from services.worker.engine.sampling.sampler import Samples, sample
from services.worker.engine.sampling.table import Needs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from common.steps import EngineCapacity, RowOpen
    from common.types import TokenIds
    from services.worker.engine.execution.interface import Checkpoint, Transfers
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.plans.drafts import RowLogprobs
    from services.worker.engine.plans.rows import RowIndices, RowStates
    from services.worker.engine.sampling.table import SamplingTable
    from services.worker.engine.vision.row_images import RowImages

# Alignment in bytes of arrays that are packed into one copy.
_ALIGNMENT = 16


class Runner(Protocol):
    """One rank's model, as `ModelRunner` implements it."""

    capacity: EngineCapacity
    device: torch.device
    host_pool: HostPool | None
    transfers: Transfers | None
    head: PoolerHead | None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits of the batch's samples, [samples, vocabulary] float32; the caller may overwrite them."""

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a pass, but return the final hidden states of the samples, [samples, hidden]."""

    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of hidden states [samples, hidden], as `forward` does, in any float type.

        `adapters` [samples] int32 are the samples' slots, as in `ForwardBatch.adapters`.
        """

    def broadcast_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `token_ids` on every rank of this stage."""

    def return_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Do the same, and send the tokens to the stages before, of which there are some."""

    def close(self) -> None:
        """Give everything back."""


class SynchronousExecutor:
    """Computes passes with a model runner. The first rank of the last stage samples and broadcasts the tokens."""

    def __init__(
        self, runner: Runner, table: SamplingTable, rank: int, *, is_shared: bool = False,
        images: RowImages | None = None, has_earlier_stages: bool = False,
    ) -> None:  # fmt: skip
        """Use `runner`, which `is_shared` with other ranks; rows' sampling parameters go into `table`.

        `rank` is that of this process in its stage. `images` has those of the rows; None: the model sees none. With
        `has_earlier_stages`, these are told about passes without tokens, too.
        """
        self._runner = runner
        self._table = table
        self._scoring = ScoringTable()
        self._pooler = Pooler(runner.head)
        self._rank = rank
        self._is_shared = is_shared
        self._images = images
        self._has_earlier_stages = has_earlier_stages

    def open(self, opened: RowOpen) -> None:
        self._table.open(opened)
        self._scoring.open(opened)
        self._pooler.open(opened)

    def step(self, rows: RowStates, forward: ForwardPass, checkpoint: Checkpoint | None = None) -> PassOutput:
        """Run one pass, in parts if memory does not suffice; `checkpoint` is called between layers."""
        is_whole = self._images is not None and self._images.have_blocks(forward)
        made = compute_in_parts(
            forward, lambda part: self._step(rows, part, checkpoint), is_shared=self._is_shared or is_whole
        )
        return join(forward, [sampled for _, sampled in made.parts], made.failed)

    def _step(self, rows: RowStates, forward: ForwardPass, checkpoint: Checkpoint | None) -> PassOutput:
        logits, prompt_logprobs = self._compute(rows, forward, checkpoint)
        embeddings = self._pooler.finish(forward.pooled_rows) if self._rank == 0 else ()
        slots = forward.sampled_rows
        if slots.size == 0:
            if self._has_earlier_stages:
                self._runner.return_tokens(torch.zeros(1, 1, dtype=torch.int64))
            return PassOutput(embeddings=embeddings, prompt_logprobs=prompt_logprobs)
        room, drafted = rows.jump_room(slots), forward.drafted
        if self._rank == 0:
            samples = self._sample(logits, forward, rows)
            block = with_jump_forward(samples.token_ids, slots, rows, self._table, room)
        else:
            block = empty_token_block(slots, drafted, room, self._runner.device)
            samples = Samples(block)
        share = self._runner.return_tokens if self._has_earlier_stages else self._runner.broadcast_tokens
        values = share(block).cpu().numpy().astype(np.int32)
        width = 1 + int(drafted.max())
        chosen, accepted = split_tokens(values[:, :width], slots)
        forced = following_of(values[:, width:], slots)
        return PassOutput(
            chosen, samples.logprobs, embeddings, prompt_logprobs=prompt_logprobs, accepted=accepted, forced=forced
        )

    def _sample(self, logits: torch.Tensor, forward: ForwardPass, rows: RowStates) -> Samples:
        """Return each row's tokens, [rows, 1 + longest draft] int64 padded with NO_TOKEN, and log probabilities."""
        if not forward.drafted.any():
            samples = sample(logits, forward.sampled_rows, rows, self._table)
            return Samples(samples.token_ids[:, None], samples.logprobs)

        def choose(samples: NDArray[np.int64], slots: RowIndices) -> tuple[TokenIds, RowLogprobs]:
            chosen = sample(logits[torch.from_numpy(samples).to(logits.device)], slots, rows, self._table)
            return chosen.token_ids.cpu().numpy().astype(np.int32), chosen.logprobs

        tokens, logprobs = verify(forward, rows, choose)
        return Samples(torch.from_numpy(tokens).to(logits.device), logprobs)

    def _compute(
        self, rows: RowStates, forward: ForwardPass, checkpoint: Checkpoint | None
    ) -> tuple[torch.Tensor, RowSpans]:
        """Return logits of the pass's samples and log probabilities of prompt tokens; pool the pooled tokens."""
        batch, scored = gather(rows, forward), self._scoring.of(rows, forward)
        if not scored and not batch.pooled_indices.size:
            return self._runner.forward(self._on_device(batch, forward, checkpoint)), ()
        samples, pooled = batch.sample_indices.size, batch.pooled_indices.size
        wanted = with_pooled(with_scored(batch, scored))
        on_device = self._on_device(wanted, forward, checkpoint)
        hidden, adapters = self._runner.hidden_states(on_device), on_device.sampled_adapters
        sampled_adapters = None if adapters is None else adapters[:samples]
        if pooled and self._rank == 0:
            self._pooler.add(batch.pooled_slots, hidden[-pooled:])
        if not scored:
            return self._runner.logits(hidden[:samples], sampled_adapters).float(), ()
        vocabulary_size, is_first = self._table.vocabulary_size, self._rank == 0
        part = slice(samples, len(hidden) - pooled)
        of_part = None if adapters is None else adapters[part]
        spans = score(hidden[part], scored, vocabulary_size, self._runner.logits, is_first=is_first, adapters=of_part)
        return self._runner.logits(hidden[:samples], sampled_adapters).float(), spans

    def _on_device(self, batch: HostBatch, forward: ForwardPass, checkpoint: Checkpoint | None) -> ForwardBatch:
        """Return a pass's batch on the device, with embeddings of images."""
        on_device = to_device(batch, self._runner.device)
        if checkpoint is not None:
            on_device = replace(on_device, checkpoint=checkpoint)
        return on_device if self._images is None else self._images.into(on_device, forward)


def to_device(batch: HostBatch, device: torch.device) -> ForwardBatch:
    """Return the batch as tensors on `device`, in two transfers for all fields."""
    # Fields of one type are packed into one buffer.
    longs = (batch.token_ids, batch.positions, batch.write_slots, batch.sample_indices)
    ints = (batch.query_starts, batch.key_lengths, batch.page_table)
    window_longs = () if batch.window_slots is None else (batch.window_slots,)
    window_ints = () if batch.window_table is None else (batch.window_table,)
    state_longs = () if batch.row_slots is None else (batch.row_slots,)
    adapters = () if batch.adapters is None else (batch.adapters,)
    sent = _transfer((*longs, *window_longs, *state_longs), device)
    token_ids, positions, write_slots, sample_indices = sent[:4]
    window_slots, row_slots = sent[4 : 4 + len(window_longs)], sent[4 + len(window_longs) :]
    query_starts, key_lengths, page_table, *more = _transfer((*ints, *window_ints, *adapters), device)
    window_table, token_adapters = more[: len(window_ints)], more[len(window_ints) :]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        key_lengths=key_lengths,
        page_table=page_table,
        write_slots=write_slots,
        sample_indices=sample_indices,
        decode_rows=batch.decode_rows,
        max_query_length=batch.max_query_length,
        max_key_length=batch.max_key_length,
        window_table=window_table[0] if window_table else None,
        window_slots=window_slots[0] if window_slots else None,
        states=None if batch.row_slots is None else StateSlots.of(batch, batch.row_slots, row_slots[0]),
        adapters=token_adapters[0] if token_adapters else None,
    )


def _transfer(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # Each starts at a fixed alignment: programs are compiled for the alignment of their arguments.
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT // array.itemsize for array in arrays]).tolist()
    packed = torch.empty(ends[-1], dtype=torch.from_numpy(arrays[0]).dtype, pin_memory=True)
    starts = [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = torch.from_numpy(array.ravel())
    sent = packed.to(device, non_blocking=True)
    return [sent[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=True)]


def with_jump_forward(
    token_ids: torch.Tensor, slots: RowIndices, rows: RowStates, table: SamplingTable, room: NDArray[np.int64]
) -> torch.Tensor:
    """Return a block [slots, tokens + most forced] of each row's tokens and then its forced ones, padded with NO_TOKEN.

    Args:
        token_ids: [slots, tokens] int64, what they sampled and do not know yet, padded likewise.
        slots: the rows.
        rows: what they know.
        table: their parameters.
        room: [slots] how many tokens may be forced on each at most, if it sampled one token only.
    """
    if not room.any():
        return token_ids
    sampled = token_ids.cpu().numpy()
    forced = np.full((slots.size, int(room.max())), NO_TOKEN, np.int64)
    accepted = (sampled != NO_TOKEN).sum(axis=1) - 1
    room = np.maximum(room - accepted, 0)
    if table.grammars is not None:
        with as_accepted(rows, slots, accepted):
            for index in np.flatnonzero(room):
                # A row with log probabilities does not jump: those of its tokens come from logits.
                if table.needs[slots[index]] & (Needs.GRAMMAR | Needs.LOGPROBS) == Needs.GRAMMAR:
                    last = int(sampled[index, accepted[index]])
                    found = table.grammars.forced(int(slots[index]), last, int(room[index]), rows)
                    forced[index, : len(found)] = found
    return torch.from_numpy(np.concatenate([sampled, forced], axis=1)).to(token_ids.device)


def empty_token_block(
    slots: RowIndices, drafted: NDArray[np.int64], room: NDArray[np.int64], device: torch.device
) -> torch.Tensor:
    """Return an array of the shape of `with_jump_forward`'s, for another rank's to come in."""
    return torch.empty(slots.size, 1 + int(drafted.max()) + int(room.max()), dtype=torch.int64, device=device)
