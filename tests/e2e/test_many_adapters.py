"""Hundreds of adapters on the host and dozens on the device: every answer, and what is on the device."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.settings.scheduler import AdapterSettings
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.conftest import serve
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.soak

ADAPTERS, SLOTS, TOKENS, RANK = 300, 24, 6, 8
NAMES = tuple(f"a{number}" for number in range(ADAPTERS))
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def model(run_root: Path) -> Path:
    target = save_family(run_root / "many adapters" / "model", "llama")
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.save(str(target / "tokenizer.json"))
    return target


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[str, list[int]]:
    """Write all adapters; return what `transformers` answers with each of them merged."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    bases = {name: weight for name, weight in reference.named_parameters() if name.endswith(".weight")}
    adapted = [name for name in bases if name.removesuffix(".weight").endswith(MODULES)]
    originals = {name: bases[name].detach().clone() for name in adapted}
    assert len(adapted) >= 2 * len(MODULES)
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(MODULES)}
    generator, found = torch.Generator().manual_seed(0), {}
    for name in NAMES:
        tensors: dict[str, torch.Tensor] = {}
        for weight in adapted:
            height, width = originals[weight].shape
            a, b = (torch.randn(shape, generator=generator) * 0.15 for shape in ((RANK, width), (height, RANK)))
            with torch.no_grad():
                bases[weight].copy_(originals[weight] + b @ a)
            module = f"base_model.model.{weight.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        directory = model.parent / name
        directory.mkdir()
        save_file(tensors, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
        found[name] = greedy(reference)
    return found


def greedy(model: torch.nn.Module) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        for _ in range(TOKENS):
            following = model(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, following), 1)
    tokens: list[int] = ids[0, len(PROMPT) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def served_many(model: Path, answers: dict[str, list[int]], run_root: Path) -> Iterator[Served]:
    sources = {name: str(model.parent / name) for name in answers}
    settings = Settings(
        model=ModelSettings(reference=str(model), served_name="tiny", dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            max_rows=32, device_pages=256, adapters=AdapterSettings(slots=SLOTS, load=sources, tenant_share=1)
        ),
    )
    yield from serve(settings, run_root)


def answer_of(served: Served, name: str) -> list[int]:
    body = {"model": f"tiny:{name}", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    with served.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@contextmanager
def scheduler_of(served: Served) -> Iterator[scheduler_pb2_grpc.SchedulerStub]:
    with grpc.insecure_channel(served.deployment.address_of("scheduler"), options=CHANNEL_OPTIONS) as channel:
        yield scheduler_pb2_grpc.SchedulerStub(channel)


def test_all_answers_are_those_of_merged_weights_and_the_least_recently_used_adapter_makes_room(
    served_many: Served, answers: dict[str, list[int]]
) -> None:
    assert len({tuple(answer) for answer in answers.values()}) > ADAPTERS / 2
    draw = random.Random(0)
    resident: OrderedDict[str, None] = OrderedDict()
    pinned: set[str] = set()
    with scheduler_of(served_many) as scheduler:

        def ask(name: str) -> None:
            assert answer_of(served_many, name) == answers[name]
            if name not in resident and len(resident) == SLOTS:
                del resident[next(each for each in resident if each not in pinned)]
            resident[name] = None
            resident.move_to_end(name)
            states = scheduler.ListAdapters(scheduler_pb2.ListAdaptersRequest(), timeout=60).adapters
            assert len(states) == ADAPTERS
            assert {state.adapter.name for state in states if state.resident} == set(resident)

        for name in NAMES:
            ask(name)
        for name in ("a290", "a299"):
            scheduler.LoadAdapter(scheduler_pb2.LoadAdapterRequest(name=name, pinned=True), timeout=60)
            pinned.add(name)
        # Those that were used before, and others.
        for _ in range(120):
            ask(draw.choice(list(resident)) if draw.random() < 0.5 else draw.choice(NAMES))
        assert pinned <= set(resident)


def test_more_adapters_at_once_than_there_are_slots_take_turns(
    served_many: Served, answers: dict[str, list[int]]
) -> None:
    names = random.Random(1).sample(NAMES, 4 * SLOTS)
    with ThreadPoolExecutor(2 * SLOTS) as pool:
        found = list(pool.map(lambda name: answer_of(served_many, name), names))
    assert found == [answers[name] for name in names]
    wait_until(served_many.is_idle)
