"""Models that sleep and wake: the same logits as before, at both levels, with every kind of memory."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from common.errors import ConfigurationError
from common.file_locks import FileLock
from common.settings import WorkerSettings
from common.steps import EngineSpec, SleepLevel, SleepPart
from common.transfers import TransferDirection
from services.worker.__main__ import make_engine
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.encoder.runner import EncoderRunner
from services.worker.engine.execution.device_claim import SharedDevice
from services.worker.engine.grammars.library import GrammarLibrary
from services.worker.engine.kernels.torch.backend import TorchBackend
from services.worker.engine.sleeping import HostBuffers, ParkedTensors, release_host_memory, tensors_of
from tests.services.worker.engine.adapters.peft_adapters import EVERYTHING
from tests.services.worker.engine.adapters.test_products import logits_of, save_four
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.encoder.tiny_bert import save_encoder
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.services.worker.engine.host_tier.test_tier import Engine
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.model_runner import ModelRunner
    from tests.services.worker.engine.parallel.ranks import Ranks

LEVELS = list(SleepLevel)
PROMPT = random_ids(40, VOCABULARY)


def nothing(_fraction: float, _stage: str) -> None:
    """Report nowhere."""


def nap(runner: ModelRunner, level: SleepLevel, *, keeps_host_pages: bool = False) -> None:
    runner.sleep(level, keeps_host_pages=keeps_host_pages)
    runner.wake_weights(nothing)
    runner.wake_cache()


def logits_after(runner: ModelRunner) -> torch.Tensor:
    driver = Driver(runner)
    row = driver.open(len(PROMPT) + 1)
    return torch.cat([driver.run([(row, PROMPT)]), driver.run([(row, [7])])])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("family", "backend", "changes"),
    [
        ("llama", "torch", {}),
        ("llama", "compiled", {}),
        ("llama tied", "compiled", {"quantization": "fp8"}),
        ("qwen3 moe", "compiled", {}),
        ("deepseek v3", "compiled", {}),
        ("gemma3", "compiled", {"window_ratio": 0.25}),
        ("qwen3 next", "torch", {"snapshots": 4}),
        ("llama", "torch", {"kv_dtype": "fp8"}),
    ],
)
def test_a_model_computes_the_same_bits_after_it_has_slept(
    family: str, backend: str, changes: dict[str, Any], level: SleepLevel, tmp_path: Path
) -> None:
    save_family(tmp_path, family)
    runner = load(tmp_path, backend=backend, **changes)
    before, capacity = logits_after(runner), runner.capacity
    nap(runner, level)
    assert torch.equal(logits_after(runner), before)
    assert runner.capacity == capacity


def test_products_are_prepared_for_a_steps_tokens_whenever_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(TorchBackend, "prepare", lambda _backend, most_tokens: prepared.append(most_tokens))
    save_tiny_llama(tmp_path)
    runner = load(tmp_path, backend="torch", max_step_tokens=48)
    assert prepared == [48]
    nap(runner, SleepLevel.HOST)
    assert prepared == [48]
    nap(runner, SleepLevel.DROPPED)
    assert prepared == [48, 48]


@pytest.mark.parametrize("level", LEVELS)
def test_memory_is_given_back_while_it_sleeps(level: SleepLevel, tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    runner = load(tmp_path, host_pages=8)
    pool = weakref.ref(runner.pool.layers[0].keys)
    assert runner.host_pool is not None
    host = weakref.ref(runner.host_pool.memory)
    weights = [weakref.ref(tensor) for tensor in tensors_of(runner._awake)]
    assert len(weights) > 10
    runner.sleep(level, keeps_host_pages=False)
    gc.collect()
    assert pool() is None
    assert host() is None
    assert {weight() is None for weight in weights} == {level is SleepLevel.DROPPED}, "a CPU's weights stay at level 1"
    runner.wake_weights(nothing)
    runner.wake_cache()
    assert runner.host_pool is not None
    assert runner.host_pool.pages == 8


@pytest.mark.parametrize("level", LEVELS)
def test_adapters_outlast_sleep(level: SleepLevel, tmp_path: Path) -> None:
    model, adapters = save_four(tmp_path, "llama", EVERYTHING)
    runner = load(model, backend="compiled", adapter_slots=4)
    before = logits_of(runner, adapters)
    shelf = runner.adapters
    assert shelf is not None
    kept = shelf.kept
    assert {shelf.read(adapter).digest for adapter in adapters if adapter is not None} == kept.keys()
    nap(runner, level)
    assert runner.adapters is not None
    assert runner.adapters.kept == kept
    runner.adapters.reset()
    after = logits_of(runner, adapters)
    assert len(after) == len(before) == len(adapters)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("level", LEVELS)
def test_the_host_tier_keeps_its_pages_if_asked(level: SleepLevel, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    engine = Engine(tmp_path)
    cold = engine.generate([0, 1, 2, 3, 4])
    engine.move(TransferDirection.DEVICE_TO_HOST, [0, 1, 2], [9, 4, 5])
    engine.engine.sleep(level, keeps_host_pages=True)
    assert engine.engine.host_pages is not None
    assert engine.engine.wake(tuple(SleepPart), nothing)
    engine.move(TransferDirection.HOST_TO_DEVICE, [20, 7, 13], [9, 4, 5])
    assert engine.generate([20, 7, 13, 8, 9], computed=48) == cold


@pytest.mark.parametrize("level", LEVELS)
def test_an_engine_is_awake_once_all_parts_are(level: SleepLevel, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    engine = Engine(tmp_path)
    cold = engine.generate([0, 1, 2, 3, 4])
    engine.engine.sleep(SleepLevel.HOST, keeps_host_pages=False)
    engine.engine.sleep(level, keeps_host_pages=False)
    assert not engine.engine.host_pages
    assert not engine.engine.wake((SleepPart.WEIGHTS,), nothing)
    assert not engine.engine.wake((SleepPart.WEIGHTS,), nothing)
    assert engine.engine.wake((SleepPart.KV_CACHE,), nothing)
    assert engine.engine.host_pages
    assert engine.generate([0, 1, 2, 3, 4]) == cold


def test_an_engine_that_sleeps_is_woken_by_its_configuration(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    engine = Engine(tmp_path)
    cold = engine.generate([0, 1, 2, 3, 4])
    engine.engine.sleep(SleepLevel.DROPPED, keeps_host_pages=True)
    spec = EngineSpec(
        str(tmp_path), max_rows=2, max_context=128, max_step_tokens=64, device_pages=24, host_pages=16, dtype="float32"
    )
    assert engine.engine.configure(spec, nothing) == engine.capacity
    assert engine.generate([0, 1, 2, 3, 4]) == cold


def test_other_weights_in_the_files_are_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    runner = load(tmp_path)
    runner.sleep(SleepLevel.DROPPED, keeps_host_pages=False)
    save_family(tmp_path, "llama", seed=1)
    with pytest.raises(ConfigurationError, match="have changed"):
        runner.wake_weights(nothing)


def as_rank(rank: int, world_size: int, rendezvous: str, model: str, level: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of this rank before and after it has slept."""
    runner = load(model, backend="compiled", rank=rank, world_size=world_size, rendezvous=rendezvous)
    try:
        before = logits_after(runner)
        nap(runner, SleepLevel(level))
        return before, logits_after(runner)
    finally:
        runner.close()


@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_sleep_and_wake_without_meeting_anew(ranks: Ranks, level: SleepLevel, tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    first, second = ranks.run(as_rank, 2, str(tmp_path), int(level))
    assert torch.equal(*first)
    assert len(first[0]) == 2
    assert second[0].numel() == 0


@pytest.mark.parametrize("level", LEVELS)
def test_an_encoder_sleeps_too(level: SleepLevel, tmp_path: Path) -> None:
    save_encoder(tmp_path)
    runner = EncoderRunner.load(tmp_path, EngineSpec(str(tmp_path)), nothing, RunnerOptions(threads=1))
    token_ids, positions = torch.arange(5, 17), torch.arange(12)
    lengths = np.array([12])
    before = runner.encoder.forward(token_ids, positions, lengths, None)
    runner.sleep(level, keeps_host_pages=False)
    runner.wake_weights(nothing)
    runner.wake_cache()
    assert torch.equal(runner.encoder.forward(token_ids, positions, lengths, None), before)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["llama", "qwen3 moe", "deepseek v3"])
def test_a_gpu_gives_its_memory_back_and_captures_its_graphs_again(
    level: SleepLevel, family: str, tmp_path: Path
) -> None:
    save_family(tmp_path, family)
    pages = 2**16
    engine = Engine(tmp_path, dtype="bfloat16", device_pages=pages)
    cold = engine.generate([0, 1, 2, 3, 4])
    before = torch.cuda.memory_allocated()
    freed = engine.engine.sleep(level, keeps_host_pages=True)
    assert freed > 0
    # Libraries keep their workspaces; a page takes more than this.
    assert before - torch.cuda.memory_allocated() > pages * 1024
    assert engine.engine.wake(tuple(SleepPart), nothing)
    assert engine.generate([0, 1, 2, 3, 4]) == cold
    # Its host memory is page-locked until then, and may not be freed before.
    engine.engine.close()


@pytest.mark.gpu
def test_parked_tensors_come_back_with_their_views() -> None:
    whole = torch.arange(1000.0, device="cuda")
    parts = [whole[:10], whole[500:].view(50, 10)]
    wanted = [part.clone() for part in parts]
    parked = ParkedTensors({"parts": parts, "other": torch.ones(3, device="cuda")}, HostBuffers(keeps=False))
    assert parked.bytes == 4012
    assert whole.untyped_storage().nbytes() == 0
    parked.restore()
    for part, copy in zip(parts, wanted, strict=True):
        assert torch.equal(part, copy)
    assert parts[0].data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("shares", [False, True])
def test_models_that_take_turns_keep_their_host_memory(
    shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between naps as well, so that its pages need not be locked again."""
    kept: list[bool] = []

    class Recorded(ParkedTensors):
        def __init__(self, model: object, buffers: HostBuffers) -> None:
            kept.append(buffers.keeps)
            super().__init__(model, buffers)

    monkeypatch.setattr("services.worker.engine.model_runner.ParkedTensors", Recorded)
    monkeypatch.setattr("services.worker.engine.encoder.runner.ParkedTensors", Recorded)
    save_tiny_llama(tmp_path / "decoder")
    save_encoder(tmp_path / "encoder", "bert")
    device = SharedDevice(FileLock(tmp_path / "device")) if shares else None
    for name in ("decoder", "encoder"):
        engine = make_engine(WorkerSettings(threads=1), GrammarLibrary(), device)
        engine.configure(EngineSpec(str(tmp_path / name), device_pages=8, dtype="float32"), nothing)
        engine.sleep(SleepLevel.HOST, keeps_host_pages=False)
        assert engine.wake(tuple(SleepPart), nothing)
        engine.close()
    assert kept == [shares, shares]


def test_host_buffers_are_used_again_for_copies_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.engine.sleeping._lock", partial(torch.empty, dtype=torch.uint8))
    kept, dropped = HostBuffers(keeps=True), HostBuffers(keeps=False)
    for buffers, is_same in ((kept, True), (dropped, False)):
        first, other = buffers.take(5), buffers.take(7)
        buffers.put_back(first)
        buffers.put_back(other)
        assert buffers.take(6).shape == (6,)
        assert (buffers.take(5) is first) is is_same
        assert buffers.take(5) is not first
        assert (buffers.take(7) is other) is is_same
        buffers.put_back(first)
        buffers.clear()
        assert buffers.take(5) is not first


def test_memory_that_was_locked_is_kept_if_parking_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def lock(size: int) -> torch.Tensor:
        if len(locked) == 2:
            raise RuntimeError("no more memory can be locked")
        locked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr("services.worker.engine.sleeping._lock", lock)
    # As if they were on a GPU.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    tensors, buffers = [torch.full((size,), 3.0) for size in (5, 6, 7)], HostBuffers(keeps=True)
    with pytest.raises(RuntimeError, match="no more memory"):
        ParkedTensors(tensors, buffers)
    assert [tensor.sum().item() for tensor in tensors] == [15.0, 18.0, 21.0]
    assert [len(buffers.take(size)) for size in locked] == locked == [28, 24]


def page_locked() -> int:
    """Return the bytes in use, as torch returns others whenever CUDA graphs are captured."""
    release_host_memory()
    current: int = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return current


@pytest.mark.gpu
@pytest.mark.parametrize("keeps", [False, True])
def test_host_memory_stays_page_locked_if_it_is_kept(keeps: bool) -> None:
    tensor, buffers = torch.ones(2**24, dtype=torch.uint8, device="cuda"), HostBuffers(keeps=keeps)
    before = page_locked()
    for _ in range(2):
        parked = ParkedTensors([tensor], buffers)
        assert page_locked() == before + 2**24
        parked.restore()
        assert page_locked() == before + 2**24 * keeps
    assert int(tensor.sum()) == 2**24
    buffers.clear()
    assert page_locked() == before


@pytest.mark.gpu
def test_a_gpus_deeper_sleep_and_its_end_free_host_memory(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    engine = make_engine(WorkerSettings(), GrammarLibrary(), SharedDevice(FileLock(tmp_path / "device")))
    engine.configure(EngineSpec(str(tmp_path / "model"), device_pages=8, dtype="bfloat16"), nothing)
    released = page_locked()
    for level in (SleepLevel.HOST, SleepLevel.DROPPED):
        engine.sleep(level, keeps_host_pages=False)
        assert (page_locked() > released) is (level is SleepLevel.HOST)
    assert engine.wake(tuple(SleepPart), nothing)
    engine.sleep(SleepLevel.HOST, keeps_host_pages=False)
    assert engine.wake(tuple(SleepPart), nothing)
    assert page_locked() > released
    engine.close()
    assert page_locked() <= released
