"""`model.deterministic`: a request gets the same bits in every batch, division of its prompt, cache state and draft."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.errors import ConfigurationError
from common.steps import EngineSpec
from common.types import SamplingParams, StopConditions
from services.worker.engine import rank_model
from services.worker.engine.backends import DTYPES as DTYPES_OF_ENGINES
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.checkpoints.opening import open_checkpoint
from services.worker.engine.determinism import check_deterministic
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.kernels.cpu.build import build_library, find_openmp
from services.worker.engine.kernels.cpu.library import CpuLibrary
from services.worker.engine.kernels.interface import AttentionShape
from services.worker.engine.kernels.torch.backend import TorchBackend
from services.worker.engine.loader import load_decoder, load_model
from tests.services.scheduler.core.harness import Harness, make_request, with_options
from tests.services.worker.engine.driving import Driver, Row, load, random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, save_family, save_model
from tests.services.worker.engine.speculated_lives import SLOW_US, EngineWorker
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from common.types import TokenLogprob
    from services.worker.engine.execution.engine import ModelEngine

PROMPT = 90
ROWS = 256
REFUSED = ("deepseek", "qwen3 next", "qwen3.5")
REFUSED_ON_GPUS = (*REFUSED, "olmo")
DTYPES = ("bfloat16", "float32", "float16")
FEW = ("smol", "qwen3 moe", "glm4 moe", "gpt-oss", "mistral windowed")

OTHERS = [name for name in FAMILIES if not name.startswith(REFUSED) and name not in FEW]


def logits_of(driver: Driver, borders: list[int]) -> torch.Tensor:
    """Return the logits of all tokens of a prompt that is computed in parts."""
    ids, row = random_ids(PROMPT, VOCABULARY), driver.open(PROMPT)
    spans = itertools.pairwise(borders)
    parts = [driver.run([(row, ids[first:last])], all_tokens=True).clone() for first, last in spans]
    release(driver, row)
    return torch.cat(parts)


def logits_among(driver: Driver, rows: int) -> torch.Tensor:
    """Return the logits of all tokens of a prompt, the last of which is computed alone, in passes of so many rows."""
    ids, row = random_ids(PROMPT, VOCABULARY), driver.open(PROMPT)
    others = [driver.open(6) for _ in range(rows - 1)]
    chunks = [(other, random_ids(3, VOCABULARY, seed)) for seed, other in enumerate(others)]
    before = sum(len(chunk) for _, chunk in chunks[::2])
    first = driver.run([*chunks[::2], (row, ids[:-1]), *chunks[1::2]], all_tokens=True)[before:][: PROMPT - 1].clone()
    decoding = [(other, [5 + seed % 90]) for seed, other in enumerate(others)]
    last = driver.run([*decoding[::2], (row, ids[-1:]), *decoding[1::2]], all_tokens=True)
    release(driver, row, *others)
    return torch.cat((first, last[len(decoding[::2])][None]))


def release(driver: Driver, *rows: Row) -> None:
    driver._free += [page for row in rows for page in row.pages]


def check_family(directory: Path, family: str, dtype: str, device: str = "cpu") -> None:
    model = save_family(directory, family)
    runner = load(
        model, threads=2, device=device, dtype=dtype, device_pages=ROWS + 40, max_rows=ROWS, deterministic=True
    )
    driver = Driver(runner)
    with torch.inference_mode():
        whole = logits_of(driver, [0, PROMPT])
        assert whole.shape == (PROMPT, VOCABULARY)
        for borders in ([0, 7, PROMPT], [0, 16, 17, 18, 80, PROMPT], list(range(PROMPT + 1))):
            assert torch.equal(logits_of(driver, borders), whole), borders
        for rows in (2, 7, 64, ROWS):
            assert torch.equal(logits_among(driver, rows), whole), rows


@pytest.mark.parametrize(("family", "dtype"), list(zip(FEW, itertools.cycle(DTYPES), strict=False)))
def test_logits_depend_neither_on_the_batch_nor_on_chunks(tmp_path: Path, family: str, dtype: str) -> None:
    check_family(tmp_path, family, dtype)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "dtype"),
    list(zip(OTHERS, itertools.cycle(DTYPES), strict=False)),
)
def test_logits_of_other_families_depend_on_neither(tmp_path: Path, family: str, dtype: str) -> None:
    check_family(tmp_path, family, dtype)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith(REFUSED)])
def test_logits_of_every_family_depend_on_neither(tmp_path: Path, family: str, dtype: str) -> None:
    check_family(tmp_path, family, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith(REFUSED_ON_GPUS)])
def test_logits_of_every_family_depend_on_neither_on_a_gpu(tmp_path: Path, family: str) -> None:
    check_family(tmp_path, family, "bfloat16", "cuda")


@dataclass(frozen=True, slots=True)
class Life:
    """All numbers that one request got."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt: dict[int, float | None] | None


class Served:
    """An engine in deterministic mode, and schedulers that send it plans."""

    def __init__(self, model: Path, dtype: str, device: str = "cpu") -> None:
        spec = EngineSpec(
            str(model), dtype=dtype, max_rows=ROWS, max_context=256, page_size=16, device_pages=1200, deterministic=True
        )
        options = RunnerOptions(device=device, threads=2)
        self._engine: ModelEngine = torch_engine(lambda its, report: load_decoder(its, report, options))
        self._engine.configure(spec, lambda *_: None)

    def lives(self, beside: int = 0, *, step: int = 512, draft: int = 0) -> list[dict[str, Life]]:
        """Return what three requests get beside others: at first, and when the cache has their prompts."""
        harness = Harness(
            pages=1200, page_size=16, max_rows=ROWS, max_context=256, max_step_tokens=step, cache="shared",
            draft_tokens=draft, max_waiting=1000,
        )  # fmt: skip
        harness.worker = EngineWorker(self._engine, SLOW_US)
        lives = []
        for time in range(2):
            for number in range(beside):
                ids = [3 + (number + 11 * i) % 90 for i in range(1 + number % 37)]
                other = make_request(f"other{time}-{number}", ids, user="bob", max_tokens=20)
                # More alternatives than GPUs report: the host samples these rows.
                sampling = SamplingParams(top_logprobs=30 if number % 5 == 3 else 0)
                harness.core.submit(with_options(other, sampling=sampling), 0.0)
            names = {name: f"{name}{time}" for name in ("greedy", "warm", "scored")}
            for number, (kind, name) in enumerate(names.items()):
                ids = [3 + (7 * number + 5 * i) % 90 for i in range(PROMPT)]
                request = make_request(name, ids, scored_from=1 if kind == "scored" else None)
                sampling = SamplingParams(temperature=0.9 if kind == "warm" else 0.0, seed=4, top_logprobs=3)
                # All tokens are asked for: whether a random model ends earlier depends on the processor.
                stop = StopConditions(max_tokens=40, ignore_eos=True)
                harness.core.submit(with_options(request, sampling=sampling, stop=stop), 0.0)
            harness.run()
            assert (harness.cached["greedy1", 0] >= 80) if time else not harness.cached["greedy0", 0]
            lives.append({kind: _life(harness, name) for kind, name in names.items()})
        assert (harness.core.speculation.accepted_tokens > 20) == (draft > 0)
        self._engine.reset()
        return lives


def _life(harness: Harness, name: str) -> Life:
    return Life(harness.outputs[name, 0], harness.logprobs[name, 0], harness.scores.get((name, 0)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_depend_neither_on_others_nor_on_chunks_nor_on_hits_nor_on_drafts(tmp_path: Path, dtype: str) -> None:
    check_answers(tmp_path, dtype)


@pytest.mark.gpu
def test_answers_on_a_gpu_depend_on_neither(tmp_path: Path) -> None:
    check_answers(tmp_path, "bfloat16", "cuda")


def check_answers(directory: Path, dtype: str, device: str = "cpu") -> None:
    save_tiny_llama(directory, hidden_size=64)
    served = Served(directory, dtype, device)
    first, again = served.lives()
    assert first == again
    assert all(len(life.tokens) == len(life.logprobs) > 20 for life in first.values())
    prompt = first["scored"].prompt
    assert prompt is not None
    assert len(prompt) == PROMPT - 1
    # With three of its own requests, batches of up to 7, 64 and 256 rows.
    for beside, step in ((4, 512), (61, 512), (253, 512), (4, 16), (0, 33), (9, PROMPT)):
        assert served.lives(beside, step=step) == [first, again], (beside, step)
    assert served.lives(7, draft=9) == [first, again]


@pytest.mark.parametrize(
    ("family", "changes", "backend", "reason"),
    [
        ("deepseek v3", {}, "auto", r"latent attention \(deepseek_v3\)"),
        ("qwen3.5", {}, "auto", "recurrent layers"),
        ("llama", {}, "torch", "plain torch"),
        ("llama", {"page_size": 20}, "auto", "page_size 20 and heads of 16"),
        ("llama", {"adapter_slots": 1}, "auto", "adapters: set scheduler.adapters.slots to 0"),
        ("llama", {"world_size": 2, "rendezvous": "127.0.0.1:1"}, "auto", "several tensor-parallel ranks"),
    ],
)
def test_what_cannot_be_deterministic_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, object], backend: str, reason: str
) -> None:
    model = save_family(tmp_path, family)
    with pytest.raises(ConfigurationError, match=rf"model\.deterministic is not available with .*{reason}"):
        load(model, backend=backend, device="cpu", deterministic=True, **changes)  # type: ignore[arg-type]  # fields of its spec


class _Gpu(TorchBackend):
    """A back end with the name of the GPU's, on a machine that has none."""

    name = "gpu"


@pytest.mark.parametrize(
    ("family", "changes", "capability", "reason"),
    [
        ("llama", {}, (8, 9), "GPUs of compute capability 8.9, which have other matrix instructions than 9.0"),
        ("llama", {"dtype": "float16"}, (9, 0), "torch.float16 on GPUs: set model.dtype to bfloat16"),
        ("llama", {"kv_dtype": "fp8"}, (9, 0), "keys and values in fp8 on GPUs"),
        ("llama", {"quantization": "fp8"}, (9, 0), "quantised matrices on GPUs"),
        ("olmo2", {}, (9, 0), r"norms over all heads of a token on GPUs \(olmo2\)"),
        ("deepseek v3", {}, (9, 0), r"latent attention \(deepseek_v3\)"),
    ],
)
def test_what_cannot_be_deterministic_on_a_gpu_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any],
    capability: tuple[int, int], reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: capability)
    spec = EngineSpec(str(save_family(tmp_path, family)), **{"dtype": "bfloat16", **changes}, deterministic=True)
    config = open_checkpoint(spec.model, "auto", torch.device("cpu")).config
    backend = _Gpu(DTYPES_OF_ENGINES[spec.dtype], torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=rf"model\.deterministic is not available with .*{reason}"):
        check_deterministic(spec, config, backend, AttentionShape(4, 2, 16, 16), is_own=True, sees=False)


def test_a_gpu_that_has_all_it_takes_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    spec = EngineSpec(str(save_family(tmp_path, "qwen3 moe")), dtype="bfloat16", deterministic=True)
    config = open_checkpoint(spec.model, "auto", torch.device("cpu")).config
    backend = _Gpu(torch.bfloat16, torch.device("cpu"))
    check_deterministic(spec, config, backend, AttentionShape(4, 2, 16, 16), is_own=True, sees=False)
    with pytest.raises(ConfigurationError, match=r"images, .*: set model\.images to off"):
        check_deterministic(spec, config, backend, AttentionShape(4, 2, 16, 16), is_own=True, sees=True)


def test_classification_heads_and_encoders_are_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path, *FAMILIES["llama"], task="SequenceClassification")
    with pytest.raises(ConfigurationError, match="not available with classification heads"):
        load(model, device="cpu", deterministic=True)
    spec = EngineSpec("all-minilm-l6-v2", deterministic=True)
    with pytest.raises(ConfigurationError, match="not available with encoders"):
        load_model(spec, lambda *_: None, RunnerOptions())


def test_products_are_not_chosen_by_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def select(wanted: str, *_: object) -> None:
        asked.append(wanted)

    monkeypatch.setattr(rank_model, "select_products", select)
    model = save_family(tmp_path, "llama")
    load(model, device="cpu", deterministic=True)
    load(model, device="cpu", deterministic=True, products="onednn")
    load(model, device="cpu")
    assert asked == ["own", "onednn", "auto"]


def test_weights_of_the_checkpoints_type_give_the_bits_of_float32(tmp_path: Path) -> None:
    library = CpuLibrary(build_library(find_openmp()))
    if library.rounds_inputs:
        pytest.skip("this processor multiplies bfloat16, and rounds inputs to it")
    model = save_family(tmp_path, "smol", dtype=torch.bfloat16)
    logits = [logits_of(Driver(load(model, device="cpu", dtype=dtype)), [0, PROMPT]) for dtype in ("auto", "float32")]
    assert torch.equal(*logits)
