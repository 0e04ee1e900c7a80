"""A model that computes nothing and needs no torch: same protocol, for tests and benchmarks of the control plane."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.errors import ConfigurationError
from common.prompt_logprobs import PromptLogprobSpan
from common.steps import EngineCapacity, EngineSpec, RowOpen, SleepLevel, SleepPart
from common.transfers import Transfer, TransferAck, TransferDirection, TransferId
from common.types import RowSlot, TokenLogprob
from services.worker.engine.execution.engine import ModelEngine
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.pass_output import PassOutput
from services.worker.engine.execution.synchronous_runner import SynchronousRunner
from services.worker.engine.host_tier.page_form import PageForm
from services.worker.engine.parallel.shards import Span
from services.worker.engine.plans.drafts import split_tokens, verify
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.plans.scoring import ScoringTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from common.steps import AdapterLoad
    from common.types import SamplingParams, TokenIds
    from services.worker.engine.execution.interface import (
        AdapterSize,
        AfterPasses,
        Checkpoint,
        ProgressReport,
        SnapshotBytes,
    )
    from services.worker.engine.plans.drafts import RowLogprobs
    from services.worker.engine.plans.passes import ForwardPass
    from services.worker.engine.plans.rows import RowIndices
    from services.worker.engine.plans.scoring import Scored

# The load format that selects the fake.
LOAD_FORMAT = "fake"
# Environment variable with the duration of a pass in milliseconds, for tests and benchmarks.
STEP_VARIABLE = "PANDO_FAKE_STEP_MS"
# Environment variable with sequences of tokens that end the engine, for tests: "kill 5 6 7, raise 8 9".
FATAL_VARIABLE = "PANDO_FAKE_FATAL"
# Environment variable with the duration of loading in seconds, for tests.
LOAD_VARIABLE = "PANDO_FAKE_LOAD_S"
DEFAULT_CONTEXT = 8192
# Parts of a pass between which it can be abandoned.
LAYERS = 32
# Small ids are control tokens and single bytes in most vocabularies; words make readable text.
FIRST_WORD = 1024

_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """Behaviour of the fake.

    `step_s` is how long a pass takes, `load_s` how long the weights take to load; `eos_probability` how likely it
    generates the end of the sequence; `transfer_passes` after how many passes a transfer is done;
    `embedding_dimensions` are those of the default model. A pass that samples for a row with one of the sequences in
    `fatal` kills the process or raises.
    """

    vocabulary_size: int = 49_152
    eos_token_id: int = 2
    eos_probability: float = 0.0
    step_s: float = 0.0
    load_s: float = 0.0
    transfer_passes: int = 2
    embedding_dimensions: int = 576
    fatal: tuple[tuple[str, tuple[int, ...]], ...] = ()


def options_from_environment() -> FakeOptions:
    """Return the options that tests and benchmarks set by environment variables."""
    fatal = []
    for entry in os.environ.get(FATAL_VARIABLE, "").split(",") if os.environ.get(FATAL_VARIABLE) else ():
        effect, *tokens = entry.split()
        assert effect in ("kill", "raise"), effect
        fatal.append((effect, tuple(map(int, tokens))))
    return FakeOptions(
        step_s=float(os.environ.get(STEP_VARIABLE, "0")) / 1000,
        load_s=float(os.environ.get(LOAD_VARIABLE, "0")),
        fatal=tuple(fatal),
    )


def fake_engine(options: FakeOptions | None = None, sleep: Callable[[float], None] = time.sleep) -> ModelEngine:
    """Return an engine that behaves as `options` say; `sleep` passes the time of a step."""
    return ModelEngine(lambda spec, report: FakeModel(spec, report, options or FakeOptions(), sleep))


class FakeModel:
    """Generates tokens that depend only on a row's seed and the token's position; see `LoadedModel`.

    Unless the spec says otherwise, there is room for every row at full length.
    """

    ends_with_group = False
    images = encoder = None

    def __init__(
        self,
        spec: EngineSpec,
        report: ProgressReport,
        options: FakeOptions,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._spec = spec
        self._options = options
        self._sleep = sleep
        self._load(report)
        self.capacity = _capacity(spec, options)
        self._asleep: set[SleepPart] = set()
        self._level: SleepLevel | None = None
        self.host_pages: FakeHostPages | None = None
        self._allocate_host_pages()
        self.device_pages = FakeDevicePages(spec.page_size)
        self.peer_copies = None
        self.adapters = FakeAdapters(spec.adapter_slots) if spec.adapter_slots else None
        report(1.0, "ready")

    def make_runner(self) -> SynchronousRunner:
        spec, capacity = self._spec, self.capacity
        rows = RowStates(spec.max_rows, capacity.max_context, capacity.page_size)
        limits = PlanLimits(
            capacity.vocabulary_size,
            capacity.device_pages,
            spec.max_step_tokens,
            capacity.host_pages,
            adapters=spec.adapter_slots,
        )
        if self.adapters is not None:
            self.adapters.reset()
        executor = FakeExecutor(self._options, spec.max_rows, self._sleep)
        transfers = FakeTransfers(self._options.transfer_passes) if capacity.host_pages else None
        return SynchronousRunner(
            rows, limits, executor, transfers=transfers, reports_tokens=spec.samples, adapters=self.adapters
        )

    def computing(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def read_expert_load(self) -> None:
        """Return None: there are no experts."""

    @property
    def pass_calls(self) -> None:
        """None, for the same reason."""

    def join_pass(self, number: int) -> bool:
        """Return False: no pass is called."""
        del number
        return False

    def keep_warm(self) -> None:
        """Do nothing: there is no device."""

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        """Give nothing back but host pages."""
        self._asleep, self._level = set(SleepPart), level
        if not keeps_host_pages:
            self.host_pages = None
        return 0

    def wake(self, parts: Collection[SleepPart], report: ProgressReport) -> bool:
        """Take as long as loading, if weights were dropped."""
        if SleepPart.WEIGHTS in self._asleep.intersection(parts) and self._level is SleepLevel.DROPPED:
            self._load(report)
        self._asleep.difference_update(parts)
        if not self._asleep:
            self._allocate_host_pages()
        return not self._asleep

    def _load(self, report: ProgressReport) -> None:
        report(0.0, "nothing to load")
        if self._options.load_s > 0:
            self._sleep(self._options.load_s)

    def _allocate_host_pages(self) -> None:
        if self.capacity.host_pages and self.host_pages is None:
            self.host_pages = FakeHostPages(self.capacity.host_pages, self._spec.page_size)

    def close(self) -> None:
        """Do nothing: there are no weights."""


def _capacity(spec: EngineSpec, options: FakeOptions) -> EngineCapacity:
    max_context = spec.max_context or DEFAULT_CONTEXT
    enough = spec.max_rows * -(-max_context // spec.page_size)
    return EngineCapacity(
        device_pages=spec.device_pages or enough,
        page_size=spec.page_size,
        max_context=max_context,
        vocabulary_size=options.vocabulary_size,
        eos_token_ids=(options.eos_token_id,),
        kv_bytes_per_token=1,
        fingerprint=f"fake-{spec.page_size} {spec.rank}/{spec.world_size}",
        kv_identity=f"fake-{spec.page_size}",
        device="fake",
        layers=1,
        host_pages=spec.host_bytes // spec.page_size if spec.host_pages is None else spec.host_pages,
        verifies_drafts=True,
        abandons_passes=spec.world_size == 1,
    )


class FakeExecutor:
    """Computes passes from the rows' seeds."""

    def __init__(
        self,
        options: FakeOptions,
        max_rows: int,
        sleep: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare for rows 0 to `max_rows` - 1."""
        self._options = options
        self._sleep = sleep
        self._clock = clock
        self._seeds = np.zeros(max_rows, np.uint64)
        # Of rows with log probabilities.
        self._reported: dict[int, SamplingParams] = {}
        self._scoring = ScoringTable()

    def open(self, opened: RowOpen) -> None:
        self._seeds[opened.row] = opened.sampling.seed
        self._reported.pop(opened.row, None)
        if opened.sampling.top_logprobs is not None:
            self._reported[opened.row] = opened.sampling
        self._scoring.open(opened)

    def step(self, rows: RowStates, forward: ForwardPass, checkpoint: Checkpoint | None = None) -> PassOutput:
        """Take a step's time and make up its tokens."""
        if checkpoint is not None:
            self._sleep_in_layers(checkpoint)
        elif self._options.step_s > 0:
            self._sleep(self._options.step_s)
        slots = forward.sampled_rows
        for row in slots.tolist() if self._options.fatal else ():
            self._fail_for(rows.token_ids[row, : rows.lengths[row]])
        embeddings = tuple(
            (RowSlot(row), fake_embedding(rows.token_ids[row, : rows.lengths[row]], self._options.embedding_dimensions))
            for row in forward.pooled_rows.tolist()
        )
        scores = tuple((run.row, fake_scores(run)) for run in self._scoring.of(rows, forward))
        tokens, logprobs = verify(forward, rows, lambda _samples, of: self._choose(rows, of))
        first, accepted = split_tokens(tokens.astype(np.int32), slots)
        return PassOutput(first, logprobs, embeddings=embeddings, prompt_logprobs=scores, accepted=accepted)

    def _sleep_in_layers(self, checkpoint: Checkpoint) -> None:
        ends_at = self._clock() + self._options.step_s
        checkpoint()
        while (left := ends_at - self._clock()) > 0:
            self._sleep(min(left, self._options.step_s / LAYERS))
            checkpoint()

    def _choose(self, rows: RowStates, slots: RowIndices) -> tuple[TokenIds, RowLogprobs]:
        tokens = fake_tokens(self._seeds[slots], rows.lengths[slots], self._options)
        logprobs = tuple(
            (RowSlot(row), fake_logprob(token, self._reported[row]))
            for row, token in zip(slots.tolist(), tokens.tolist(), strict=True)
            if row in self._reported
        )
        return tokens, logprobs

    def _fail_for(self, token_ids: TokenIds) -> None:
        for effect, sequence in self._options.fatal:
            if len(token_ids) < len(sequence):
                continue
            if (np.lib.stride_tricks.sliding_window_view(token_ids, len(sequence)) == sequence).all(axis=1).any():
                if effect == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("a fatal sequence of tokens")


class FakeTransfers:
    """Copies nothing, but takes some passes and refuses races; see `Transfers`."""

    def __init__(self, passes: int) -> None:
        """Be done with each transfer after `passes` passes."""
        self._passes = passes
        self._open: dict[TransferId, tuple[Transfer, int]] = {}

    def begin(self, transfers: Iterable[Transfer]) -> None:
        """Take in a plan's transfers.

        Raises:
            InvalidPlanError: one writes what another reads or writes, or has the id of one that is open.
        """
        for transfer in transfers:
            reads, writes = _accesses(transfer)
            for other, _ in self._open.values():
                other_reads, other_writes = _accesses(other)
                if transfer.transfer_id == other.transfer_id or writes & (other_reads | other_writes):
                    raise InvalidPlanError(f"transfer {transfer.transfer_id} races with {other.transfer_id}")
                if reads & other_writes:
                    raise InvalidPlanError(f"transfer {transfer.transfer_id} reads what {other.transfer_id} writes")
            self._open[transfer.transfer_id] = transfer, self._passes

    def poll(self) -> tuple[TransferAck, ...]:
        self._open = {key: (transfer, passes - 1) for key, (transfer, passes) in self._open.items()}
        done = [transfer for transfer, passes in self._open.values() if passes <= 0]
        for transfer in done:
            del self._open[transfer.transfer_id]
        return tuple(TransferAck(transfer.transfer_id, transfer.pages) for transfer in done)

    def wait(self) -> tuple[TransferAck, ...]:
        return self.poll()

    def reset(self) -> None:
        """Forget what is open."""
        self._open.clear()

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class FakeAdapter:
    """An adapter that changes nothing."""

    digest: str
    rank: int = 8
    bytes: int = 1


class FakeAdapters:
    """Adapters of which only the files' digests are known; see `AdapterStore`."""

    def __init__(self, slots: int) -> None:
        """Start without any."""
        self.slots = slots
        self._known: dict[str, FakeAdapter] = {}

    @property
    def kept(self) -> dict[str, AdapterSize]:
        return {**self._known}

    def read(self, directory: Path, expected: str = "") -> FakeAdapter:
        """Read a directory with adapter_config.json."""
        try:
            parts = [path.read_bytes() for path in sorted(directory.iterdir())]
        except OSError as error:
            raise ConfigurationError(f"adapter {directory}: {error}") from error
        if not (directory / "adapter_config.json").is_file():
            raise ConfigurationError(f"adapter {directory}: there is no adapter_config.json")
        adapter = FakeAdapter(hashlib.sha256(b"".join(parts)).hexdigest())
        if expected and adapter.digest != expected:
            raise ConfigurationError(f"adapter {directory}: the files have changed since it was loaded")
        return adapter

    def keep(self, adapter: AdapterSize) -> None:
        self._known[adapter.digest] = FakeAdapter(adapter.digest)

    def drop(self, digest: str) -> None:
        self._known.pop(digest, None)

    def load(self, loads: Iterable[AdapterLoad]) -> None:
        """Check that the adapters are there."""
        for load in loads:
            if load.digest not in self._known:
                raise InvalidPlanError(f"the adapter {load.digest} was not read")

    def reset(self) -> None:
        """Do nothing."""


class FakeHostPages:
    """Host pages of which nothing but storage takes notice; see `HostPages`."""

    states = None

    def __init__(self, pages: int, page_bytes: int) -> None:
        self._bytes = np.zeros((pages, page_bytes), np.uint8)

    @property
    def page_bytes(self) -> int:
        return int(self._bytes.shape[1])

    def read_page(self, page: int) -> bytes:
        content: bytes = self._bytes[page].tobytes()
        return content

    def write_page(self, page: int, content: memoryview) -> None:
        self._bytes[page] = content


class FakeDevicePages:
    """Device pages of zeros; see `DevicePageBytes`."""

    def __init__(self, page_bytes: int) -> None:
        # All ranks hold the one head.
        self.form = PageForm(((1, page_bytes),), Span(0, 1), 1)
        self.shared_name = None
        self.snapshots: SnapshotBytes | None = None

    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        return bytes(self.form.bytes_of(heads) * len(pages))

    def after_passes(self) -> AfterPasses | None:
        return None

    def write_pages(self, pages: Sequence[int], content: memoryview) -> None:
        """Do nothing."""

    def lend(self, recall: Callable[[], None], *, is_here: bool = True, reads_over_nixl: bool = False) -> None:
        """Return nothing: there is no memory."""

    def take_back(self, recall: Callable[[], None]) -> None:
        """Do nothing."""


def _accesses(transfer: Transfer) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Return the pages that a transfer reads and those that it writes, by tier."""
    device = {("device", page) for page in transfer.device_pages.tolist()}
    host = {("host", page) for page in transfer.host_pages.tolist()}
    return (device, host) if transfer.direction is TransferDirection.DEVICE_TO_HOST else (host, device)


def fake_tokens(seeds: NDArray[np.uint64], positions: NDArray[np.int64], options: FakeOptions) -> TokenIds:
    """Return a token for each seed and position, [rows] int32: words only, and the end as often as asked."""
    hashed = _mix(_mix(seeds) + positions.astype(np.uint64) * _GAMMA)
    first = min(FIRST_WORD, options.vocabulary_size // 2)
    tokens = (first + (hashed >> np.uint64(32)) % np.uint64(options.vocabulary_size - first)).astype(np.int32)
    if options.eos_probability > 0:
        share = (hashed & np.uint64(0xFFFF_FFFF)).astype(np.float64) * 2.0**-32
        tokens[share < options.eos_probability] = options.eos_token_id
    return tokens


def fake_logprob(token_id: int, sampling: SamplingParams) -> TokenLogprob:
    """Return made-up log probabilities, which depend only on the token: it was the most likely one."""
    logprob = -(token_id % 1000) / 1000
    places = range(sampling.top_logprobs or 0)
    return TokenLogprob(
        logprob,
        tuple(token_id - place for place in places),
        tuple(logprob - place for place in places),
        tuple(-9.0 for _ in sampling.logprob_token_ids),
    )


def fake_embedding(token_ids: TokenIds, dimensions: int) -> bytes:
    """Return a vector of length 1 that depends on all of `token_ids`, as `Finish.embedding` has it."""
    vector = np.random.default_rng(zlib.crc32(token_ids.tobytes())).standard_normal(dimensions, np.float32)
    embedding: bytes = (vector / np.linalg.norm(vector)).astype("<f4").tobytes()
    return embedding


def fake_scores(run: Scored) -> PromptLogprobSpan:
    """Return made-up log probabilities of a prompt: every token was the most likely one, and the ids are its own."""
    tokens, wanted = run.targets.size, run.wanted
    values = -(run.targets % 8).astype(np.float32) - 1
    tops = run.targets[:, None] + np.zeros(wanted.top, np.int32)
    asked = np.full((tokens, len(wanted.token_ids)), -9.0, np.float32)
    ranks = np.ones(tokens, np.int32)
    return PromptLogprobSpan(
        run.first, run.targets, values, ranks, tops, np.repeat(values[:, None], wanted.top, 1), asked
    )


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread the bits of 64-bit numbers (the finaliser of splitmix64: Steele, Lea, Flood, OOPSLA 2014, figure 16)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))
