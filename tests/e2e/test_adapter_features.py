"""What requests with adapters share with all others: grammars, log probabilities, sessions, preemption; and a hub."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.settings.scheduler import AdapterSettings, SessionSettings
from services.worker.engine.checkpoints.opening import open_checkpoint
from services.worker.engine.checkpoints.tensor_shapes import tensor_shape
from tests.e2e.conftest import require_model, serve
from tests.fakes.hub import serve_hub
from tests.fakes.hub_client import HubClient
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
NAMES = ("first", "second")
PAGES = 40
# Products of adapters are computed for all rows of a pass together (docs/determinism.md), so rounding depends on the
# batch. Two tokens may change places if their log probabilities are this close.
TIE = 0.15
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


def save_adapter(target: Path, seed: int, rank: int = 8) -> Path:
    """Write an adapter of the bundled model that changes its answers, and leaves them text."""
    config = open_checkpoint(ModelSettings().reference, "auto", torch.device("cpu")).config
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config.layers):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            height, width = tensor_shape(f"{name}.weight", config)
            for side, shape in (("A", (rank, width)), ("B", (height, rank))):
                factor = torch.randn(shape, generator=generator) * 0.06
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = factor.bfloat16()
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(MODULES)}
    (target / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    require_model()
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(root / name, seed) for seed, name in enumerate(NAMES, start=1)}


@pytest.fixture(scope="module")
def served_adapted(sources: dict[str, Path], run_root: Path) -> Iterator[Served]:
    """Few pages, so that rows are retracted."""
    settings = Settings(
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            max_rows=8,
            device_pages=PAGES,
            sessions=SessionSettings(share=0.4, share_total=0.9),
            adapters=AdapterSettings(slots=2, load={name: str(path) for name, path in sources.items()}, tenant_share=1),
        ),
    )
    yield from serve(settings, run_root)


def generate(
    served: Served, prompt: str | list[int], adapter: str | None, tokens: int = 24, **fields: Any
) -> dict[str, Any]:
    """Return the answer to a text, or to ids."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, **fields.pop("sampling_params", {})}
    asked = {"text" if isinstance(prompt, str) else "input_ids": prompt}
    body = {**asked, "sampling_params": sampling, **({"lora_path": adapter} if adapter else {}), **fields}
    with served.http() as http:
        answer = http.post("/generate", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids_of(served: Served, text: str) -> list[int]:
    with served.http() as http:
        answer = http.post("/tokenize", json={"prompt": text})
    answer.raise_for_status()
    ids: list[int] = answer.json()["tokens"]
    return ids


def log_probability(served: Served, ids: Sequence[int], adapter: str | None) -> float:
    """Return the log probability of the last of `ids` after the others."""
    body = {
        "input_ids": list(ids), "return_logprob": True, "logprob_start_len": len(ids) - 2,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0}, **({"lora_path": adapter} if adapter else {}),
    }  # fmt: skip
    with served.http() as http:
        answer = http.post("/generate", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    value, token, _ = answer.json()["meta_info"]["input_token_logprobs"][-1]
    assert token == ids[-1]
    return float(value)


def check_equal(
    served: Served, prompt: Sequence[int], adapter: str | None, found: Sequence[int], expected: Sequence[int]
) -> None:
    """Check that two greedy answers to a prompt are equal, at least up to a tie.

    What adapters add to products depends in its last digits on what is computed together (docs/determinism.md).
    """
    differing = next((i for i, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other), None)
    if differing is None:
        assert found == expected
        return
    before = [*prompt, *expected[:differing]]
    weighed = [log_probability(served, [*before, ids[differing]], adapter) for ids in (found, expected)]
    assert weighed[0] == pytest.approx(weighed[1], abs=TIE), f"{adapter}: {found} is not {expected}"


def test_adapters_change_what_the_model_says(served_adapted: Served) -> None:
    said = {generate(served_adapted, "The capital of France is", adapter)["text"] for adapter in (None, *NAMES)}
    assert len(said) == 3


def test_grammars_hold_and_jump_in_a_batch_of_several_adapters(served_adapted: Served) -> None:
    grammars: list[dict[str, Any]] = [
        {"json_schema": json.dumps(CITY)},
        {"regex": r"The answer is (yes|no)\. [0-9]{3}"},
    ]
    cases = [(adapter, grammar) for adapter in (None, *NAMES) for grammar in grammars]
    question = "Is Paris a capital?"
    jumped = served_adapted.state().jumped_tokens

    def run(case: tuple[str | None, dict[str, Any]]) -> dict[str, Any]:
        adapter, grammar = case
        return generate(served_adapted, question, adapter, 60, sampling_params=grammar)

    alone = [run(case) for case in cases]
    assert served_adapted.state().jumped_tokens > jumped
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(run, cases))
    asked = ids_of(served_adapted, question)
    for (adapter, grammar), *answers in zip(cases, together, alone, strict=True):
        check_equal(served_adapted, asked, adapter, *(answer["output_ids"] for answer in answers))
        for text in (answer["text"] for answer in answers):
            if "regex" in grammar:
                assert re.fullmatch(grammar["regex"], text)
            else:
                assert json.loads(text).keys() == CITY["properties"].keys()  # type: ignore[attr-defined]  # a dictionary


def test_log_probabilities_are_those_of_the_adapter(served_adapted: Served) -> None:
    """Tokens that were generated have the log probabilities of the same tokens in a prompt."""
    prompt = "Once upon a time there was"
    by_adapter = {}
    for adapter in (None, *NAMES):
        said = generate(served_adapted, prompt, adapter, return_logprob=True, logprob_start_len=0)
        meta = said["meta_info"]
        ids = [token for _, token, _ in meta["input_token_logprobs"]] + [
            token for _, token, _ in meta["output_token_logprobs"]
        ]
        with served_adapted.http() as http:
            body = {
                "input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": True,
                "logprob_start_len": 0, **({"lora_path": adapter} if adapter else {}),
            }  # fmt: skip
            scored = http.post("/generate", json=body).json()["meta_info"]["input_token_logprobs"]
        generated = [value for value, _, _ in meta["output_token_logprobs"]]
        assert len(generated) == 24
        assert [value for value, _, _ in scored[-24:]] == pytest.approx(generated, abs=0.05)
        assert log_probability(served_adapted, ids, adapter) == pytest.approx(generated[-1], abs=0.05)
        by_adapter[adapter] = [value for value, _, _ in meta["input_token_logprobs"][1:]]
    assert by_adapter["first"] != pytest.approx(by_adapter[None], abs=0.05)
    assert by_adapter["first"] != pytest.approx(by_adapter["second"], abs=0.05)


def test_sessions_go_on_with_their_adapter_and_never_with_pages_of_another(served_adapted: Served) -> None:
    first, second = "The first of many long stories begins " * 6, " and then everybody went home, because"
    with served_adapted.http() as http:
        session = http.post("/open_session", json={"capacity_of_str_len": 200}).json()

    def turn(text: str, adapter: str, **params: Any) -> dict[str, Any]:
        return generate(served_adapted, text, adapter, 8, session_params={"id": session, **params})

    began = turn(first, "first")
    went_on = turn(second, "first", rid=began["meta_info"]["id"])
    assert went_on["meta_info"]["cached_tokens"] >= 32
    other = turn(second, "second", rid=began["meta_info"]["id"])
    assert other["meta_info"]["cached_tokens"] == 0, "KV of another adapter"
    assert other["text"] != went_on["text"]
    prompt = [*ids_of(served_adapted, first), *began["output_ids"], *ids_of(served_adapted, second)]
    for adapter, answer in (("first", went_on), ("second", other)):
        whole = generate(served_adapted, prompt, adapter, 8)
        check_equal(served_adapted, prompt, adapter, answer["output_ids"], whole["output_ids"])
    with served_adapted.http() as http:
        assert http.post("/close_session", json={"session_id": session}).status_code == httpx.codes.OK


def test_rows_that_are_retracted_go_on_with_the_same_tokens(served_adapted: Served) -> None:
    """More tokens than pages hold: rows give theirs back and continue later, each with its adapter."""
    cases = [(f"Story number {number} is about", adapter) for number in range(4) for adapter in (None, *NAMES)]

    def run(case: tuple[str, str | None]) -> list[int]:
        text, adapter = case
        answer = generate(served_adapted, text, adapter, 100, sampling_params={"ignore_eos": True})
        ids: list[int] = answer["output_ids"]
        return ids

    alone = [run(case) for case in cases]
    before = served_adapted.state().retractions
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(run, cases))
    assert served_adapted.state().retractions > before
    for (text, adapter), found, expected in zip(cases, together, alone, strict=True):
        assert len(found) == 100
        check_equal(served_adapted, ids_of(served_adapted, text), adapter, found, expected)
    wait_until(served_adapted.is_idle)


def test_an_adapter_on_a_hub_is_downloaded_and_loaded_again_without_the_hub(
    sources: dict[str, Path], run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub() as hub:
        hub.add("acme/style", sources["first"])
        for name, value in HubClient(hub.url, tmp_path / "home").environment().items():
            monkeypatch.setenv(name, value)
        settings = Settings(
            gateway=GatewaySettings(port=0, anonymous="vouched"),
            scheduler=SchedulerSettings(
                max_rows=4, device_pages=PAGES, adapters=AdapterSettings(slots=2, load={"local": str(sources["first"])})
            ),
        )
        for served in serve(settings, run_root):
            with served.http() as http:
                body = {"lora_name": "style", "lora_path": "acme/style"}
                answer = http.post("/v1/load_lora_adapter", json=body)
                assert answer.status_code == httpx.codes.OK, answer.text
                missing = http.post("/v1/load_lora_adapter", json={"lora_name": "none", "lora_path": "acme/none"})
                assert missing.status_code == httpx.codes.BAD_REQUEST, missing.text
            wanted = generate(served, "The capital of France is", "local")["text"]
            assert generate(served, "The capital of France is", "style")["text"] == wanted
            hub.status = 503
            before = served.deployment.pid_of("worker")
            served.deployment.kill("worker")
            wait_until(lambda: served.deployment.pid_of("worker") not in (None, before))  # noqa: B023
            wait_until(served.is_ready, 120)
            assert generate(served, "The capital of France is", "style")["text"] == wanted
