"""Random lives of requests on the real scheduler core and the real engine, of which only the model's layers are fake.

A world is a random sequence of requests, aborts, interruptions and losses of the workers. With drafts, each request
must get the same tokens, log probabilities and finish as without drafts, jump-forward, cached prefixes, accidents and
lack of memory.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.grammars import Grammar, GrammarKind
from common.steps import EngineCapacity, StepPlan, StepResult
from common.types import (
    CacheMode,
    Finish,
    FinishReason,
    RequestId,
    Resume,
    SamplingParams,
    StopConditions,
    TokenLogprob,
)
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.grammars.matcher import mask_words
from tests.fakes.grammar_library import FakeLibrary
from tests.fakes.model_runner import CheckingRunner, spec
from tests.fakes.simulated_worker import SimulatedWorker
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request, with_options
from tests.services.worker.engine.execution.asked import random_sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from common.types import ScheduleRequest
    from services.scheduler.cache.factory import CacheName
    from services.worker.engine.execution.engine import ModelEngine
    from services.worker.engine.grammars.matcher import Mask
    from services.worker.engine.model.batch import ForwardBatch

VOCABULARY = 128
CONTEXT = 64
PAGE_SIZE = 4
ROWS = 6
# Tokens that alone may follow under a `CERTAIN` grammar; stop ids are below.
FIRST_CERTAIN = 100
LIKELY = range(40, 52)
CERTAIN = Grammar(GrammarKind.REGEX, "certain", "regex")
# Passes take long enough for drafts to pay.
SLOW_US = 20_000
_MULTIPLIER, _INCREMENT = np.uint64(6364136223846793005), np.uint64(1442695040888963407)
_TABLES = np.random.default_rng(3)
# [last token, next token]: few tokens are likely, so that outputs repeat themselves, and often not to the end.
_LINES = _TABLES.uniform(-4, 4, (VOCABULARY, VOCABULARY)).astype(np.float32)
_LINES[:, LIKELY] += 4
# [hash of all tokens, next token]: a small part, such that a wrong page shows in every later log probability.
_NOISE = _TABLES.uniform(-0.02, 0.02, (512, VOCABULARY)).astype(np.float32)


class HistoryRunner(CheckingRunner):
    """A model whose logits depend on the last token, and a little on all tokens before, as its KV memory has them."""

    def __init__(self, capacity: EngineCapacity) -> None:
        super().__init__(capacity)
        self._hashes = np.zeros(capacity.device_pages * PAGE_SIZE, np.uint64)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """Return [samples, vocabulary]: logits, as `logits` returns its argument."""
        tokens, positions = batch.token_ids.numpy(), batch.positions.numpy()
        starts, slots, pages = batch.query_starts.numpy(), batch.write_slots.numpy(), batch.page_table.numpy()
        lengths = np.diff(starts)
        for number in range(batch.max_query_length):
            rows = (lengths > number).nonzero()[0]
            queries = starts[rows] + number
            last = np.maximum(positions[queries] - 1, 0)
            before = self._hashes[pages[rows, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE]
            before = np.where(positions[queries] > 0, before, np.uint64(0))
            self._hashes[slots[queries]] = (before + tokens[queries].astype(np.uint64)) * _MULTIPLIER + _INCREMENT
        sampled = batch.sample_indices.numpy()
        noise: NDArray[np.float32] = _NOISE[(self._hashes[slots[sampled]] >> np.uint64(40)) % len(_NOISE)]
        return torch.from_numpy(_LINES[tokens[sampled]] + noise)


class _Choices:
    """A matcher that allows a third of the tokens, by the output so far, or under `CERTAIN` sometimes one only."""

    is_terminated = False

    def __init__(self, *, is_certain: bool) -> None:
        self._is_certain = is_certain
        self._output: list[int] = []

    def accept(self, token_id: int) -> bool:
        self._output.append(token_id)
        return True

    def mask(self) -> Mask:
        only, flags = self._only(), np.zeros(mask_words(VOCABULARY) * 32, np.uint8)
        if only is None:
            flags[self._digest() % 3 : VOCABULARY : 3] = 1
        else:
            flags[only] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)

    def _only(self) -> int | None:
        digest = self._digest()
        if not self._is_certain or digest % 5 < 2:
            return None
        return FIRST_CERTAIN + digest // 5 % (VOCABULARY - FIRST_CERTAIN)

    def spelling(self, mask: Mask) -> None:
        return None

    def _digest(self) -> int:
        # The last tokens alone, such that outputs under a grammar repeat themselves as well.
        return zlib.crc32(np.array(self._output[-2:], np.int32).tobytes())


class Library(FakeLibrary):
    def matcher(self, grammar: Grammar) -> _Choices:
        return _Choices(is_certain=grammar == CERTAIN)


def history_engine(pages: int) -> ModelEngine:
    """Return an engine whose model is a `HistoryRunner`."""
    capacity = EngineCapacity(pages, PAGE_SIZE, CONTEXT, VOCABULARY, (STOP_ID,), 8, "history", "cpu", 1)
    engine = torch_engine(lambda _spec, _report: HistoryRunner(capacity), Library())  # type: ignore[arg-type]  # a fake
    asked = spec(max_rows=ROWS, max_step_tokens=48)
    assert engine.configure(asked, lambda *_: None).verifies_drafts
    return engine


class EngineWorker(SimulatedWorker):
    """Runs plans on an engine; all passes seem to take as long."""

    def __init__(self, engine: ModelEngine, compute_us: int) -> None:
        super().__init__(0, PAGE_SIZE)
        self._engine = engine
        self._pass_us = compute_us

    def run(self, plan: StepPlan) -> list[StepResult]:
        results: list[StepResult] = []
        self._engine.execute(plan, results.append)
        self._engine.settle(lambda: False)
        return [replace(result, compute_us=self._pass_us) for result in results]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the scheduler is set to in a world."""

    pages: int = 400
    rows: int = ROWS
    depth: int = 1
    target_plan_s: float = 0.0
    cache: CacheName = "chunk"
    preemptions: int | None = None
    jump: int = 0
    draft: int = 0
    compute_us: int = SLOW_US
    micro_batches: int = 1


def random_setting(random: Random) -> Setting:
    """Return one with drafts."""
    return Setting(
        pages=random.choice([20, 34, 60, 200]),
        rows=random.choice([2, 4, ROWS]),
        depth=random.randint(1, 3),
        target_plan_s=random.choice([0.0, 0.0, 0.1]),
        cache=random.choice(["isolated", "shared", "shared", "chunk"]),
        preemptions=random.choice([None, 0, 2, 2]),
        jump=random.choice([0, 1, 7]),
        draft=random.choice([1, 3, 8, 16]),
        compute_us=random.choice([SLOW_US, SLOW_US, 1_000]),
    )


@dataclass(frozen=True, slots=True)
class Event:
    """A request that comes, or what happens to earlier ones (or, without a name, to the workers), and passes after."""

    kind: str
    passes: int
    name: str = ""
    request: ScheduleRequest | None = None


def random_world(random: Random, requests: int) -> list[Event]:
    """Return events with `requests` requests, of which many repeat others' prompts and parameters."""
    stems = [[random.randrange(8, VOCABULARY) for _ in range(random.randint(3, 20))] for _ in range(3)]
    made: list[ScheduleRequest] = []
    events: list[Event] = []
    for number in range(requests):
        name = f"r{number}"
        if made and random.random() < 0.45:
            request = replace(random.choice(made), request_id=RequestId(name))
            if random.random() < 0.4:
                # The cache has what follows where this one stops.
                request = with_options(request, stop=_random_stop(random))
        else:
            request = _random_request(random, name, stems)
        made.append(request)
        events.append(Event("submit", random.choice([0, 0, 1, 3, 9, 25]), name, request))
        earlier, chance = f"r{random.randrange(number + 1)}", random.random()
        if chance < 0.05:
            events.append(Event("abort", random.choice([0, 2]), earlier))
        elif chance < 0.2:
            events.append(Event("interrupt", random.choice([0, 2]), earlier))
        elif chance < 0.24:
            events.append(Event("lose workers", random.choice([0, 2])))
    return events


def _random_request(random: Random, name: str, stems: list[list[int]]) -> ScheduleRequest:
    stem = random.choice(stems)
    prompt = (stem * random.choice([1, 1, 2, 3]))[:38] + [random.randrange(8, 12) for _ in range(random.randint(0, 2))]
    sampling: SamplingParams = random_sampling(random, VOCABULARY)
    sampling = replace(sampling, seed=random.choice([1, 2, sampling.seed]))
    if random.random() < 0.4:
        # Greedy outputs repeat themselves, so drafts of their own tokens are right.
        sampling = replace(sampling, temperature=0.0)
    is_plain = not sampling.allowed_token_ids and not sampling.banned_sequences
    if is_plain and random.random() < 0.3:
        sampling = replace(sampling, grammar=CERTAIN)
    request = make_request(
        name,
        prompt,
        user=random.choice(["alice", "alice", "bob"]),
        n=random.choice([1, 1, 1, 2]),
        priority=random.randint(0, 2),
        cache_mode=random.choice([CacheMode.DEFAULT, CacheMode.DEFAULT, CacheMode.NONE]),
    )
    return with_options(request, sampling=sampling, stop=_random_stop(random))


def _random_stop(random: Random) -> StopConditions:
    return StopConditions(
        max_tokens=random.choice([1, 2, 5, 12, 20, 30]),
        min_tokens=random.choice([0, 0, 4]),
        stop_token_ids=tuple(random.sample(LIKELY, random.choice([0, 0, 1, 3]))),
        ignore_eos=random.random() < 0.3,
    )


@dataclass(frozen=True, slots=True)
class Life:
    """What a choice got; `is_whole` unless it was aborted."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish: Finish
    is_whole: bool = True


class Lives:
    """Lives a world through under one setting."""

    def __init__(
        self,
        setting: Setting,
        make_engine: Callable[[int], ModelEngine] = history_engine,
        make_harness: Callable[..., Harness] = Harness,
        make_worker: Callable[[ModelEngine, int], EngineWorker] = EngineWorker,
    ) -> None:
        self._setting = setting
        self._make_engine = make_engine
        self._make_worker = make_worker
        fields: dict[str, Any] = {
            "pages": setting.pages, "page_size": PAGE_SIZE, "max_rows": setting.rows, "max_step_tokens": 48,
            "max_context": CONTEXT, "depth": setting.depth, "target_plan_s": setting.target_plan_s,
            "cache": setting.cache, "policy": None if setting.preemptions is None else "priority",
            "max_preemptions": setting.preemptions or 0, "jump_tokens": setting.jump, "draft_tokens": setting.draft,
            "micro_batches": setting.micro_batches,
        }  # fmt: skip
        self.harness = make_harness(**fields)
        self._renew_worker()
        # The requests that continue each one, in order.
        self._parts: dict[str, list[str]] = {}
        self._aborted: set[str] = set()

    def run(self, events: list[Event], *, with_accidents: bool) -> dict[tuple[str, int], Life]:
        """Return the life of each choice; without accidents, nothing but requests happens."""
        requests = {event.name: event.request for event in events if event.request is not None}
        for event in events:
            if event.request is not None:
                self._parts[event.name] = [event.name]
                assert self.harness.core.submit(event.request, 0.0).rejected is None
            elif with_accidents:
                self._happen(event, requests.get(event.name))
            for _ in range(event.passes):
                self.harness.plan()
                self.harness.result()
        self.harness.run()
        self.harness.audit()
        return {
            (name, index): self._life(name, index)
            for name, request in requests.items()
            for index in range(request.options.n)
        }

    def _happen(self, event: Event, request: ScheduleRequest | None) -> None:
        if event.kind == "lose workers":
            self.harness.lose_workers()
            self._renew_worker()
            return
        assert request is not None, "only requests are aborted and interrupted"
        current = self._parts[event.name][-1]
        if event.kind == "abort":
            if self.harness.core.abort(RequestId(current)):
                self._aborted.add(event.name)
        elif request.options.n == 1 and event.name not in self._aborted:
            self._interrupt(event.name, current, request)
        self.harness.collect()

    def _interrupt(self, name: str, current: str, request: ScheduleRequest) -> None:
        """Submit a request again with the tokens that its client has, as after a failure."""
        if not self.harness.core.abort(RequestId(current)):
            return
        self.harness.collect()
        resumed = f"{current}'"
        known = tuple(self.harness.outputs[current, 0])
        again = with_options(replace(request, request_id=RequestId(resumed)), resume=Resume(known, 0))
        assert self.harness.core.submit(again, 0.0).rejected is None
        self._parts[name].append(resumed)

    def _life(self, name: str, index: int) -> Life:
        parts = self._parts[name]
        logprobs = [logprob for part in parts for logprob in self.harness.logprobs.get((part, index), [])]
        finish = self.harness.finishes[parts[-1], index]
        is_whole = finish.reason is not FinishReason.ABORT
        assert is_whole or name in self._aborted, "only what is aborted ends early"
        return Life(self.harness.outputs[parts[-1], index], logprobs, finish, is_whole)

    def _renew_worker(self) -> None:
        engine = self._make_engine(self._setting.pages)
        self.harness.worker = self._make_worker(engine, self._setting.compute_us)


@dataclass
class Tally:
    """What came up in the lives so far."""

    lives: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, lived: Lives, lives: dict[tuple[str, int], Life]) -> None:
        core = lived.harness.core
        self.lives += len(lives)
        self.counts["tokens"] += sum(len(life.tokens) for life in lives.values())
        self.counts["drafted"] += core.speculation.drafted_tokens
        self.counts["accepted"] += core.speculation.accepted_tokens
        self.counts["jumped"] += core.jumped_tokens
        self.counts["preempted"] += core.preemptions
        self.counts["retracted"] += core.memory.retractions
        self.counts["logprobs"] += sum(len(life.logprobs) for life in lives.values())


def compare_world(seed: int, tally: Tally, requests: int = 16) -> None:
    """Live one world with drafts and without, and assert that its requests get the same."""
    random = Random(seed)
    events = random_world(random, requests)
    expected = Lives(Setting()).run(events, with_accidents=False)
    lived = Lives(random_setting(random))
    found = lived.run(events, with_accidents=True)
    assert found.keys() == expected.keys()
    for name, life in found.items():
        whole = expected[name]
        assert whole.is_whole
        if life.is_whole:
            assert life == whole, (seed, name)
        else:
            assert life.tokens == whole.tokens[: len(life.tokens)], (seed, name)
            assert life.logprobs == whole.logprobs[: len(life.logprobs)], (seed, name)
    tally.add(lived, found)
