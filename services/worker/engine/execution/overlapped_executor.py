"""The overlapped executor: launches passes over the device batch without waiting for them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.execution.device_batch import DeviceBatch
from services.worker.engine.execution.device_sampler import DeviceSampler, LaunchedLogprobs
from services.worker.engine.execution.interface import OutOfMemoryError
from services.worker.engine.execution.out_of_memory import compute_in_parts, is_out_of_memory
from services.worker.engine.execution.pass_graphs import PassGraphs
from services.worker.engine.execution.pass_output import NO_ROWS, PassOutput
from services.worker.engine.execution.pooler import Pooler, encoded, with_pooled
from services.worker.engine.execution.stage_ends import NoEnds
from services.worker.engine.execution.synchronous_executor import to_device as batch_to_device
from services.worker.engine.kernels.gpu.logprobs import LogprobBuffers
from services.worker.engine.plans.drafts import NO_TOKEN, split_tokens, verify
from services.worker.engine.plans.passes import ForwardPass, gather
from services.worker.engine.plans.rows import NOTHING_FOLLOWS, FollowingTokens
from services.worker.engine.plans.scoring import RowSpans, ScoringTable, with_scored
from services.worker.engine.sampling.logprobs import score
from services.worker.engine.sampling.sampler import Samples, sample
from services.worker.engine.sampling.table import SamplingTable
from services.worker.engine.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from common.steps import EngineSpec, StepPlan
    from common.types import RowSlot, TokenIds, TokenLogprob
    from services.worker.engine.execution.decode_graphs import OverlappedModel
    from services.worker.engine.execution.stage_ends import StageEnds
    from services.worker.engine.grammars.row_masks import RowMasks
    from services.worker.engine.plans.drafts import RowLogprobs
    from services.worker.engine.plans.rows import RowIndices, RowStates
    from services.worker.engine.vision.row_images import RowImages

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedOutput:
    """Tokens on their way to the host; `order[i]` is where the i-th sampled row's token lies."""

    token_ids: torch.Tensor
    order: RowIndices
    event: torch.cuda.Event | None
    logprobs: tuple[tuple[RowSlot, TokenLogprob], ...] = ()
    # Those that the device computes.
    reports: tuple[LaunchedLogprobs, ...] = ()
    failed: RowIndices = field(default_factory=lambda: NO_ROWS)
    # Rows whose embeddings are complete, and the vectors being copied, [rows, hidden] float32.
    pooled: RowIndices = field(default_factory=lambda: NO_ROWS)
    vectors: torch.Tensor | None = None
    prompt_logprobs: RowSpans = ()
    # Tokens that rows got after their first one of the pass.
    accepted: FollowingTokens = NOTHING_FOLLOWS

    def is_ready(self) -> bool:
        """Whether they have arrived."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def wait(self) -> PassOutput:
        if self.event is not None:
            self.event.synchronize()
        embeddings = () if self.vectors is None else encoded(self.pooled, self.vectors)
        token_ids = self.token_ids.numpy()[self.order]
        logprobs = (*self.logprobs, *(entry for report in self.reports for entry in report.entries()))
        return PassOutput(token_ids, logprobs, embeddings, self.failed, self.prompt_logprobs, self.accepted)


@dataclass(frozen=True, slots=True)
class _Part:
    """The output of a pass or a part of one: tokens [samples] int32, not in the rows yet, and log probabilities."""

    token_ids: torch.Tensor
    prompt_logprobs: RowSpans
    logprobs: tuple[tuple[RowSlot, TokenLogprob], ...] = ()
    reports: tuple[LaunchedLogprobs, ...] = ()


class OverlappedExecutor:
    """Decode passes replay CUDA graphs, passes with few prompt tokens piecewise ones; others run kernel by kernel."""

    def __init__(self, runner: OverlappedModel, spec: EngineSpec, ends: StageEnds | NoEnds | None = None) -> None:
        """Use `runner`, with rows as `spec` says; `ends` are those of its stage, if it is the last of several."""
        capacity, device = runner.capacity, runner.device
        self._runner = runner
        self._is_first = spec.samples
        self._samples_apart = spec.deterministic
        self._is_shared = spec.world_size > 1
        # A pass that has advanced some recurrent states cannot be computed again in parts.
        self._is_final = self._is_shared or capacity.recurrent_states is not None
        self._table = SamplingTable(spec.max_rows, capacity.vocabulary_size)
        self._scoring = ScoringTable()
        self._pooler = Pooler()
        # Those of the rows; None: the model sees none.
        self._images: RowImages | None = None
        self._rows = DeviceBatch.of(spec, capacity, device)
        self._sampler = DeviceSampler(spec, self._rows, self._table)
        self._graphs = PassGraphs(runner, spec, self._rows, self._sampler, ends or NoEnds())

    def use_grammars(self, grammars: RowMasks | None) -> None:
        """Hold rows to their grammars from now on."""
        self._table.grammars = grammars

    def use_images(self, images: RowImages | None) -> None:
        """Compute these images of rows from now on."""
        self._images = images

    def capture(self, report: Callable[[float], None]) -> None:
        """Capture passes as graphs."""
        self._graphs.capture(report)

    def mirror(self, plan: StepPlan, rows: RowStates) -> None:
        """Copy a plan's changes; see `OverlappedPassExecutor`."""
        for opened in plan.opens:
            self._table.open(opened)
            self._sampler.open(opened)
            self._scoring.open(opened)
            self._pooler.open(opened)
        self._rows.mirror(plan, rows, self._table.needs)

    def launch(
        self, rows: RowStates, forward: ForwardPass, catch_up: Callable[[], None], report_ready: Callable[[], None]
    ) -> LaunchedOutput:
        """Start a pass; see `OverlappedPassExecutor`."""
        self._sampler.upload()
        if not forward.chunks.rows.size:
            try:
                return self._launch_decoding(rows, forward.decode_rows, catch_up)
            except Exception as error:
                # No token is appended to rows yet. The pass is retried outside of this block: the error holds memory.
                if not is_out_of_memory(error):
                    raise
                if self._is_final:
                    # The other ranks would be in the middle of their pass.
                    raise OutOfMemoryError(f"memory does not suffice for a step: {error}") from error
        if forward.chunks.drafted.any():
            launched = self._try_drafts(rows, forward, report_ready)
            if launched is not None:
                return launched
            forward = forward.without_drafts()
        return self._launch_parts(rows, forward, catch_up, report_ready)

    def _launch_decoding(self, rows: RowStates, members: RowIndices, catch_up: Callable[[], None]) -> LaunchedOutput:
        one = self._graphs.decode(members.size)
        order = one.take(members, rows.lengths[members], rows.adapters[members])
        # Allocated before tokens are appended: no operation that can fail may follow that.
        host = self._host_memory(one.size)
        reports = self._is_first and self._sampler.reports(members)
        host_logprobs = self._host_report(one.size) if reports else None
        one.compute()
        # While the device computes.
        if self._sampler.needs_history(members):
            catch_up()
        if not self._sampler.can_choose(members):
            at = to_device(order, self._runner.device)
            samples = self._sample_on_host(one.logits, at, members, rows)
            padded = torch.zeros(one.size, dtype=torch.int32, device=self._runner.device)
            padded[at] = samples.token_ids.to(torch.int32)
            one.take_tokens(padded, counts=self._sampler.counts(members))
            return self._fetch(one.token_ids, host, order, logprobs=samples.logprobs)
        self._sampler.follow(members, rows)
        one.choose(self._sampler.mode_of(members, rows), with_logprobs=reports)
        if host_logprobs is None:
            return self._fetch(one.token_ids, host, order)
        host_logprobs.copy_(one.report)
        return self._fetch(one.token_ids, host, order, reports=(self._sampler.launched(host_logprobs, members, order),))

    def _try_drafts(
        self, rows: RowStates, forward: ForwardPass, report_ready: Callable[[], None]
    ) -> LaunchedOutput | None:
        """Compute a pass with drafts and verify these; return None if memory does not suffice for them."""
        try:
            logits, prompt_logprobs = self._compute_mixed(rows, forward, report_ready)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self._is_final:
                raise OutOfMemoryError(f"memory does not suffice for a step: {error}") from error
            log.warning("Memory does not suffice for a pass of %d tokens: its drafts are dropped", forward.tokens)
            return None
        pooled = forward.pooled_rows if self._is_first else NO_ROWS
        vectors = self._fetch_vectors(pooled)
        try:
            tokens, logprobs = self._verify(rows, forward, logits)
        except Exception as error:
            # Some tokens are appended already.
            if is_out_of_memory(error):
                raise OutOfMemoryError(f"memory does not suffice to verify drafts: {error}") from error
            raise
        first, accepted = split_tokens(tokens, forward.sampled_rows)
        return LaunchedOutput(
            torch.from_numpy(first), np.arange(first.size), None if vectors is None else self._record(), logprobs,
            pooled=pooled, vectors=vectors, prompt_logprobs=prompt_logprobs, accepted=accepted,
        )  # fmt: skip

    def _verify(
        self, rows: RowStates, forward: ForwardPass, logits: torch.Tensor
    ) -> tuple[NDArray[np.int32], RowLogprobs]:
        """Sample and append the tokens of a pass with drafts, as `verify` returns them, and wait for them."""
        sampled, device = forward.sampled_rows, self._runner.device

        def choose(samples: NDArray[np.int64], slots: RowIndices) -> tuple[TokenIds, RowLogprobs]:
            of = logits[to_device(samples, device)]
            on_device = to_device(slots.astype(np.int32), device)
            if not self._sampler.can_choose(slots):
                made = self._sampled_on_host(of, slots, rows)
                token_ids, logprobs = made.token_ids.to(torch.int32), made.logprobs
            else:
                self._sampler.follow(slots, rows)
                token_ids, logprobs = torch.empty(slots.size, dtype=torch.int32, device=device), ()
                self._sampler.choose(of, on_device, token_ids, self._sampler.mode_of(slots, rows))
            reports = self._report(of, slots, on_device, token_ids) if self._sampler.can_choose(slots) else ()
            self._sampler.append(on_device, token_ids, counts=self._sampler.counts(slots))
            known: TokenIds = token_ids.cpu().numpy()
            return known, (*logprobs, *(entry for report in reports for entry in report.entries()))

        logprobs: RowLogprobs = ()
        tokens = np.full((sampled.size, 1 + int(forward.drafted.max())), NO_TOKEN, np.int32)
        if self._is_first:
            verified, logprobs = verify(forward, rows, choose)
            tokens[:] = verified
        told = self._runner.broadcast_tokens(to_device(tokens, device)).cpu().numpy()
        if not self._is_first:
            for number in range(told.shape[1]):
                having = (told[:, number] != NO_TOKEN).nonzero()[0]
                slots = to_device(sampled[having].astype(np.int32), device)
                if having.size:
                    self._sampler.append(slots, to_device(told[having, number], device), counts=False)
        return told, logprobs

    def _launch_parts(
        self, rows: RowStates, forward: ForwardPass, catch_up: Callable[[], None], report_ready: Callable[[], None]
    ) -> LaunchedOutput:
        """Run a pass kernel by kernel, in parts if memory does not suffice."""
        is_whole = self._images is not None and self._images.have_blocks(forward)
        made = compute_in_parts(
            forward,
            lambda part: self._compute_part(rows, part, catch_up, report_ready),
            is_shared=self._is_final or is_whole,
        )
        sampled = forward.sampled_rows
        got_token = np.flatnonzero(~np.isin(sampled, made.failed)) if made.failed.size else np.arange(sampled.size)
        prompt_logprobs = tuple(entry for _, part in made.parts for entry in part.prompt_logprobs)
        pooled = np.setdiff1d(forward.pooled_rows, made.failed) if self._is_first else NO_ROWS
        vectors = self._fetch_vectors(pooled)
        if got_token.size == 0:
            nothing = torch.zeros(sampled.size, dtype=torch.int32)
            event = None if vectors is None else self._record()
            launched = LaunchedOutput(nothing, np.arange(sampled.size), event, failed=made.failed)
            return replace(launched, pooled=pooled, vectors=vectors, prompt_logprobs=prompt_logprobs)
        host = self._host_memory(got_token.size)
        token_ids = torch.cat([part.token_ids for _, part in made.parts])
        having = sampled[got_token]
        slots = to_device(having.astype(np.int32), self._runner.device)
        self._sampler.append(slots, token_ids, counts=self._sampler.counts(having))
        order = np.zeros(sampled.size, np.int64)
        order[got_token] = np.arange(got_token.size)
        launched = self._fetch(
            token_ids, host, order,
            logprobs=tuple(entry for _, part in made.parts for entry in part.logprobs),
            reports=tuple(report for _, part in made.parts for report in part.reports),
        )  # fmt: skip
        return replace(launched, failed=made.failed, pooled=pooled, vectors=vectors, prompt_logprobs=prompt_logprobs)

    def _compute_part(
        self, rows: RowStates, forward: ForwardPass, catch_up: Callable[[], None], report_ready: Callable[[], None]
    ) -> _Part:
        """Compute a pass, or a part of one, and sample."""
        logits, prompt_logprobs = self._compute_mixed(rows, forward, report_ready)
        sampled, device = forward.sampled_rows, self._runner.device
        token_ids = torch.empty(sampled.size, dtype=torch.int32, device=device)
        if sampled.size == 0:
            return _Part(token_ids, prompt_logprobs)
        if self._sampler.needs_history(sampled):
            catch_up()
        if not self._sampler.can_choose(sampled):
            samples = self._sample_on_host(logits, torch.arange(sampled.size, device=device), sampled, rows)
            return _Part(samples.token_ids.to(torch.int32), prompt_logprobs, samples.logprobs)
        reports: tuple[LaunchedLogprobs, ...] = ()
        if self._is_first:
            self._sampler.follow(sampled, rows)
            slots = to_device(sampled.astype(np.int32), device)
            self._sampler.choose(logits, slots, token_ids, self._sampler.mode_of(sampled, rows))
            reports = self._report(logits, sampled, slots, token_ids)
        return _Part(self._runner.broadcast_tokens(token_ids), prompt_logprobs, reports=reports)

    def _report(
        self, logits: torch.Tensor, sampled: RowIndices, slots: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[LaunchedLogprobs, ...]:
        """Launch the computation of log probabilities of rows `sampled`, if any of them wants some."""
        if not self._sampler.reports(sampled):
            return ()
        report = LogprobBuffers.empty(sampled.size, self._table.vocabulary_size, self._runner.device)
        self._sampler.report(logits, slots, token_ids, report)
        host_logprobs = self._host_report(sampled.size)
        host_logprobs.copy_(report)
        return (self._sampler.launched(host_logprobs, sampled, np.arange(sampled.size)),)

    def _compute_mixed(
        self, rows: RowStates, forward: ForwardPass, report_ready: Callable[[], None]
    ) -> tuple[torch.Tensor, RowSpans]:
        """Return the logits of a pass's samples, and the log probabilities of prompts, which it waits for."""
        host = with_pooled(gather(rows, forward))
        scored = self._scoring.of(rows, forward)
        others = host.sample_indices.size
        host = with_scored(host, scored) if scored else host
        batch = replace(batch_to_device(host, self._runner.device), host=host)
        if self._images is not None:
            batch = self._images.into(batch, forward)
        decoding = forward.decode_rows
        if decoding.size:
            # The host may not have read the last tokens of these rows yet.
            slots = to_device(decoding.astype(np.int32), self._runner.device)
            batch.token_ids[: decoding.size] = self._rows.last_tokens[slots.long()].long()
        adapters = batch.sampled_adapters
        # Products of adapters are not captured with prompts.
        captured = self._graphs.prompt(batch.token_ids.shape[0]) if adapters is None else None
        if captured is None and not (host.pooled_indices.size or scored):
            return self._runner.compute(batch), ()
        hidden = self._runner.hidden_states(batch) if captured is None else captured.hidden_states(batch, report_ready)
        samples = others - host.pooled_indices.size
        if self._is_first and samples < others:
            self._pooler.add(host.pooled_slots, hidden[samples:others])
        vocabulary_size, logits_of = self._table.vocabulary_size, self._runner.logits
        of_scored = None if adapters is None else adapters[others:]
        spans = score(hidden[others:], scored, vocabulary_size, logits_of, is_first=self._is_first, adapters=of_scored)
        return logits_of(hidden[:samples], None if adapters is None else adapters[:samples]), spans

    def _sample_on_host(
        self, logits: torch.Tensor, places: torch.Tensor, slots: RowIndices, rows: RowStates
    ) -> Samples:
        """Choose with the sampler that knows every parameter, and waits."""
        if self._is_first:
            samples = self._sampled_on_host(logits[places], slots, rows)
        else:
            samples = Samples(torch.empty(slots.size, dtype=torch.int64, device=self._runner.device))
        return Samples(self._runner.broadcast_tokens(samples.token_ids), samples.logprobs)

    def _sampled_on_host(self, logits: torch.Tensor, slots: RowIndices, rows: RowStates) -> Samples:
        """Return the tokens of rows of which the device cannot choose some.

        If answers must not depend on other rows, the others' tokens are chosen as without these, and these one by one.
        """
        if not self._samples_apart:
            return sample(logits.float(), slots, rows, self._table)
        is_beyond = np.array([not self._sampler.can_choose(slots[i : i + 1]) for i in range(slots.size)])
        token_ids = torch.empty(slots.size, dtype=torch.int64, device=logits.device)
        logprobs: RowLogprobs = ()
        within = np.flatnonzero(~is_beyond)
        if within.size:
            chosen = torch.empty(within.size, dtype=torch.int32, device=logits.device)
            at, on_device = (to_device(each, logits.device) for each in (within, slots[within].astype(np.int32)))
            of = logits[at]
            self._sampler.follow(slots[within], rows)
            self._sampler.choose(of, on_device, chosen, self._sampler.mode_of(slots[within], rows))
            reports = self._report(of, slots[within], on_device, chosen)
            token_ids[at] = chosen.long()
            if reports:
                chosen.cpu()  # waits for what is copied
            logprobs = tuple(entry for report in reports for entry in report.entries())
        for i in np.flatnonzero(is_beyond).tolist():
            alone = sample(logits[i : i + 1].float().clone(), slots[i : i + 1], rows, self._table)
            token_ids[i] = alone.token_ids[0]
            logprobs += alone.logprobs
        return Samples(token_ids, logprobs)

    def _host_memory(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=self._runner.device.type != "cpu")

    def _host_report(self, rows: int) -> LogprobBuffers:
        cpu, is_pinned = torch.device("cpu"), self._runner.device.type != "cpu"
        return LogprobBuffers.empty(rows, self._table.vocabulary_size, cpu, is_pinned=is_pinned)

    def _fetch(
        self,
        token_ids: torch.Tensor,
        host: torch.Tensor,
        order: RowIndices,
        *,
        logprobs: tuple[tuple[RowSlot, TokenLogprob], ...] = (),
        reports: tuple[LaunchedLogprobs, ...] = (),
    ) -> LaunchedOutput:
        """Start to copy tokens into `host`, in stream order."""
        host.copy_(token_ids, non_blocking=True)
        return LaunchedOutput(host, order, self._record(), logprobs, reports)

    def _fetch_vectors(self, pooled: RowIndices) -> torch.Tensor | None:
        """Start to copy the embeddings of `pooled` rows to the host; None if there are none."""
        if not pooled.size:
            return None
        vectors = self._pooler.take(pooled)
        host = torch.empty(vectors.shape, dtype=torch.float32, pin_memory=self._runner.device.type != "cpu")
        return host.copy_(vectors, non_blocking=True)

    def _record(self) -> torch.cuda.Event | None:
        """Return an event that completes after all launched work; None on a CPU, where launching waits."""
        if self._runner.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return event
