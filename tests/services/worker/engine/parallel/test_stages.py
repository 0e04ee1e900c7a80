"""Stages of a pipeline, in processes of their own: the same numbers as on one rank."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.errors import ConfigurationError
from common.steps import EngineSpec, MicroBatch, StepPlan
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from services.worker.engine.model.config import ModelConfig, RotaryConfig
from services.worker.engine.parallel.shards import Span
from services.worker.engine.parallel.stages import layers_of_stages
from tests.services.scheduler.core.harness import Harness
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, reference_logits, save_family, save_model
from tests.services.worker.engine.speculated_lives import (
    CONTEXT,
    PAGE_SIZE,
    ROWS,
    EngineWorker,
    Library,
    Life,
    Lives,
    Setting,
    random_world,
)
from tests.services.worker.engine.speculated_lives import VOCABULARY as LIVES_VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from common.steps import StepResult
    from services.worker.engine.execution.engine import ModelEngine
    from tests.services.worker.engine.parallel.ranks import Ranks

PAGES = 400
# Layers with which every stage has some of each kind.
DEEP = {"gemma2": 4, "gemma4": 12, "gpt-oss": 4, "qwen3.5": 8}
SHAPE = ModelConfig(
    family="llama", vocabulary_size=100, hidden_size=10, intermediate_size=30, layers=6, query_heads=2, kv_heads=1,
    head_dim=4, max_context=64, norm_epsilon=1e-5, rotary=RotaryConfig(1e5), tied_embeddings=True,
)  # fmt: skip
PROMPT = random_ids(40, VOCABULARY)


def compute(
    rank: int, world_size: int, rendezvous: str, model: str, stages: int, backend: str
) -> tuple[torch.Tensor, int]:
    """Prefill in two chunks, then decode four given tokens; return all logits and the pages that ranks agreed on."""
    runner = load(
        model, backend=backend, rank=rank, world_size=world_size, rendezvous=rendezvous, stages=stages,
        device_pages=40 + 5 * rank,
    )  # fmt: skip
    driver = Driver(runner)
    row = driver.open(44)
    parts = [PROMPT[:23], PROMPT[23:36], *([token] for token in PROMPT[36:])]
    logits = torch.cat([driver.run([(row, part)], all_tokens=True) for part in parts])
    # A rank that leaves takes with it what the next stage has not received yet.
    assert runner.agree(True)
    runner.close()
    return logits, runner.capacity.device_pages


def test_layers_are_divided_by_weights_with_embedding_and_head() -> None:
    # A layer has about as many weights as the embedding and the head each.
    assert layers_of_stages(SHAPE, 1) == (Span(0, 6),)
    assert layers_of_stages(SHAPE, 2) == (Span(0, 3), Span(3, 6))
    assert layers_of_stages(SHAPE, 4) == (Span(0, 1), Span(1, 3), Span(3, 5), Span(5, 6))
    assert layers_of_stages(replace(SHAPE, vocabulary_size=10_000), 3) == (Span(0, 1), Span(1, 5), Span(5, 6))


def test_every_stage_has_a_layer_and_all_layers_are_held() -> None:
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            spans = layers_of_stages(replace(SHAPE, layers=layers), stages)
            assert len(spans) == stages
            assert all(len(span) for span in spans)
            assert [i for span in spans for i in range(span.start, span.stop)] == list(range(layers))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="7 stages, but llama has 6 layers"):
        layers_of_stages(SHAPE, 7)


def test_stages_with_one_kind_of_layers_only_are_refused() -> None:
    mixed = replace(SHAPE, windows=(20, 20, 20, 20, None, None))
    with pytest.raises(ConfigurationError, match="layers with a window and others, but layers 0 to 2"):
        layers_of_stages(mixed, 2)
    assert len(layers_of_stages(replace(SHAPE, windows=(20, None) * 3), 2)) == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"adapter_slots": 2}, "scheduler.pipeline_parallel=2 and scheduler.adapters.slots=2"),
        ({"stages": 4, "world_size": 4}, "4 stages, but llama has 3 layers"),
    ],
)
def test_what_stages_do_not_support_is_refused_by_name(changes: dict[str, object], named: str, tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    with pytest.raises(ConfigurationError, match=named):
        load(tmp_path, **{"rank": 0, "world_size": 2, "stages": 2, **changes})  # type: ignore[arg-type]  # spec fields


def test_micro_batches_are_disjoint_and_complete() -> None:
    rows = np.arange(11)
    parts = [MicroBatch(index, 3).of(rows).tolist() for index in range(3)]
    assert sorted(row for part in parts for row in part) == rows.tolist()
    assert MicroBatch().of(rows).tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("family", "ranks_per_stage", "stages", "backend"),
    [
        ("llama tied", 1, 2, "compiled"),
        ("qwen3 moe partly dense", 1, 3, "torch"),
    ],
)
def test_stages_compute_the_same_as_one_rank(
    ranks: Ranks, family: str, ranks_per_stage: int, stages: int, backend: str, tmp_path: Path
) -> None:
    expected = reference_logits(save_family(tmp_path, family), PROMPT)
    world_size = ranks_per_stage * stages
    results = ranks.run(compute, world_size, str(tmp_path), stages, backend)
    sampler = world_size - ranks_per_stage
    torch.testing.assert_close(results[sampler][0], expected, atol=3e-4, rtol=1e-4)
    others = [logits for rank, (logits, _) in enumerate(results) if rank != sampler]
    assert [tuple(logits.shape) for logits in others] == [(0, VOCABULARY)] * (world_size - 1)
    assert [pages for _, pages in results] == [40] * world_size


def micro_batched(random: Random) -> Setting:
    """Return a setting of the scheduler with micro-batches, and with as many plans in flight as there may be."""
    micro_batches = random.choice([2, 3])
    return Setting(
        pages=random.choice([34, 60, 200]),
        rows=random.choice([3, 4, ROWS]),
        depth=random.randint(1, micro_batches + 1),
        cache=random.choice(["isolated", "shared", "chunk"]),
        preemptions=random.choice([None, 2]),
        jump=random.choice([0, 1, 7]),
        micro_batches=micro_batches,
    )


def assert_same(found: dict[tuple[str, int], Life], expected: dict[tuple[str, int], Life]) -> None:
    """Assert that choices got the same, as far as they lived."""
    assert found.keys() == expected.keys()
    for name, life in found.items():
        whole = expected[name]
        assert life.tokens == (whole.tokens if life.is_whole else whole.tokens[: len(life.tokens)]), name
        assert not life.is_whole or life.finish == whole.finish, name
        for got, wanted in zip(life.logprobs, whole.logprobs, strict=life.is_whole):
            assert got.logprob == pytest.approx(wanted.logprob, abs=2e-3)
            assert got.top_logprobs == pytest.approx(wanted.top_logprobs, abs=2e-3)


def test_micro_batches_change_neither_tokens_nor_log_probabilities() -> None:
    counts: Counter[int] = Counter()
    for seed in range(12):
        random = Random(seed)
        events = random_world(random, 16)
        lived = Lives(micro_batched(random))
        found = lived.run(events, with_accidents=True)
        assert_same(found, Lives(Setting()).run(events, with_accidents=False))
        counts.update(plan.micro_batch.index for plan in lived.harness.plans)
    assert len(counts) == 3
    assert min(counts.values()) > 100


class LaggingHarness(Harness):
    """Computes a plan only when its result is awaited: earlier stages, which have it already, run ahead."""

    def result(self) -> bool:
        worker = self.worker
        assert isinstance(worker, LastStage)
        if not self.results and worker.waiting:
            self.results.extend(worker.compute_oldest())
        return super().result()


class Mail:
    """Messages of the rank that samples to all others, which read them when they like, as they do from gRPC."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._store = torch.distributed.FileStore(str(path), world_size)  # type: ignore[attr-defined]  # not in its stubs
        self._count = 0

    def send(self, message: StepPlan | str) -> None:
        self._store.set(str(self._count), pickle.dumps(message).hex())
        self._count += 1

    def receive(self) -> StepPlan | str:
        self._count += 1
        message: StepPlan | str = pickle.loads(bytes.fromhex(self._store.get(str(self._count - 1)).decode()))
        return message


class LastStage(EngineWorker):
    """The rank that samples, which sends its plans to the other ranks."""

    def __init__(self, engine: ModelEngine, compute_us: int, mail: Mail) -> None:
        super().__init__(engine, compute_us)
        self.waiting: deque[StepPlan] = deque()
        self._mail = mail

    def run(self, plan: StepPlan) -> list[StepResult]:
        self._mail.send(plan)
        self.waiting.append(plan)
        return []

    def compute_oldest(self) -> list[StepResult]:
        return super().run(self.waiting.popleft())


def live(rank: int, world_size: int, rendezvous: str, spec: EngineSpec, seeds: Sequence[int], mailbox: Path) -> int:
    """Live worlds through with stages, and on one rank; return the number of tokens, on the rank that samples."""
    torch.set_num_threads(1)
    spec = replace(spec, rank=rank, world_size=world_size, rendezvous=rendezvous)
    options, mail = RunnerOptions(device="cpu", threads=1), Mail(mailbox, world_size)

    def engine_of(its: EngineSpec) -> ModelEngine:
        engine = torch_engine(lambda spec, report: load_decoder(spec, report, options), Library())  # type: ignore[arg-type]  # a fake
        engine.configure(its, lambda *_: None)
        return engine

    engine = engine_of(spec)
    if not spec.samples:
        while message := mail.receive():
            if isinstance(message, str):
                engine.settle(lambda: False)
                engine.reset()
            else:
                engine.execute(message, lambda _result: None)
                engine.settle(lambda: True)
        engine.close()
        return 0
    alone = engine_of(replace(spec, rank=0, world_size=1, stages=1, expert_parallel=False))
    try:
        return sum(compare_world(seed, engine, alone, mail, spec.stages) for seed in seeds)
    finally:
        # Also if the comparison failed, so that the others do not wait.
        mail.send("")
        alone.close()
        engine.close()


def compare_world(seed: int, engine: ModelEngine, alone: ModelEngine, mail: Mail, stages: int) -> int:
    """Live a world through with stages, and on one rank; return the number of tokens."""

    def reset_alone(_pages: int) -> ModelEngine:
        alone.reset()
        return alone

    current: list[LastStage] = []

    def reset_all(_pages: int) -> ModelEngine:
        # Earlier stages have computed their part of these plans, and wait for the rest.
        while current and current[-1].waiting:
            current[-1].compute_oldest()
        mail.send("reset")
        engine.reset()
        return engine

    def worker_of(its: ModelEngine, compute_us: int) -> LastStage:
        current.append(LastStage(its, compute_us, mail))
        return current[-1]

    random = Random(seed)
    events = random_world(random, 12)
    expected = Lives(Setting(pages=PAGES), reset_alone).run(events, with_accidents=False)
    setting = replace(micro_batched(random), pages=PAGES, micro_batches=stages, depth=stages + 1)
    lived = Lives(setting, reset_all, LaggingHarness, worker_of)
    found = lived.run(events, with_accidents=True)
    assert_same(found, expected)
    return sum(len(each.tokens) for each in found.values())


def save_living(directory: Path, family: str) -> None:
    """Write a model with the vocabulary of the random requests."""
    name, options = FAMILIES[family]
    options = {**options, "vocab_size": LIVES_VOCABULARY}
    if family in DEEP:
        options = {**options, "num_hidden_layers": DEEP[family]}
        options.pop("layer_types", None)
    save_model(directory, name, options)


def lived_tokens(
    ranks: Ranks, model: Path, family: str, world_size: int, stages: int, worlds: int, **changes: object
) -> int:
    """Live worlds through with a model of a family; return the number of tokens that were the same."""
    save_living(model, family)
    fields: dict[str, object] = {
        "dtype": "float32", "max_rows": ROWS, "max_context": CONTEXT, "page_size": PAGE_SIZE, "device_pages": PAGES,
        "max_step_tokens": 48, "stages": stages, **changes,
    }  # fmt: skip
    spec = EngineSpec(str(model), **fields)  # type: ignore[arg-type]  # whatever a test wants to change
    return sum(ranks.run(live, world_size, spec, range(worlds), model / "mail"))


def test_random_requests_get_the_same_from_two_stages(ranks: Ranks, tmp_path: Path) -> None:
    assert lived_tokens(ranks, tmp_path, "qwen3", 2, 2, worlds=3) > 300


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "world_size", "stages"),
    [
        ("llama", 3, 3),
        ("llama biased", 4, 2),
        ("gemma2", 2, 2),
        ("gemma4", 2, 2),
        ("gpt-oss", 2, 2),
        ("deepseek v3", 2, 2),
        ("qwen3.5", 2, 2),
        ("olmo2", 4, 2),
    ],
)
def test_random_requests_get_the_same_from_stages_of_every_kind(
    ranks: Ranks, family: str, world_size: int, stages: int, tmp_path: Path
) -> None:
    assert lived_tokens(ranks, tmp_path, family, world_size, stages, worlds=2) > 150
