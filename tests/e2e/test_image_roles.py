"""Images where groups have roles: prefill groups encode them, and decode groups go on from their pages of KV."""

from __future__ import annotations

import base64
import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import (
    GatewaySettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    TokenizerSettings,
)
from common.settings.scheduler import HostTierSettings
from common.settings.tokenizer import ImageDecodingSettings
from common.types import GroupRole
from deploy.supervisor.layout import PlannedGroup, Replicas, free_port
from tests.e2e.conftest import serve
from tests.e2e.seeing_model import chat_prompt, continued, prompt_of, save_seeing_model
from tests.e2e.test_disaggregation import DECODE, PREFILL, is_quiet, state
from tests.e2e.test_encoders import count
from tests.e2e.test_images import SMALL, TOKENS, WIDE, ask, body_of, cached, message
from tests.services.tokenizer.images.pictures import file_of, picture
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

PAGE_TOKENS = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Return free ports for the metrics of both schedulers, of which the second follows the first."""
    while True:
        first = free_port("127.0.0.1")
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first, first + 1


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.extended)], ids=["", "with-encoders"])
def divided(
    request: pytest.FixtureRequest, directory: Path, ports: tuple[int, int], run_root: Path
) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(reference=str(directory), dtype="float32", images="on"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            host_tier=HostTierSettings(pages=512), metrics_port=ports[0], max_rows=16, max_step_tokens=96
        ),
        tokenizer=TokenizerSettings(images=ImageDecodingSettings(processes=1)),
    )
    groups = (PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE))
    with contextmanager(serve)(settings, run_root, replicas=Replicas(groups=groups, encoders=request.param)) as served:
        wait_until(lambda: all(count(port, "encoders") == request.param for port in ports))
        # The gateway serves as soon as the decode group does.
        wait_until(lambda: ask(served, "first", message("Hello, ", SMALL)) and asked_for(served))
        yield served


def asked_for(served: Served) -> int:
    """Return the number of prompts that the decode group has asked the other for."""
    return state(served, DECODE).disaggregation.remote_prefills


def encoded(served: Served) -> tuple[int, int]:
    """Return the numbers of images that the prefill group and the decode group have encoded, once nothing runs."""
    wait_until(lambda: is_quiet(served, PREFILL) and is_quiet(served, DECODE))
    return state(served, PREFILL).encoded_images, state(served, DECODE).encoded_images


def has_leases(served: Served) -> bool:
    """Return whether pages of a prompt are lent now."""
    return state(served, PREFILL).disaggregation.open_leases > 0


@pytest.mark.parametrize(
    "parts",
    [
        (SMALL, "What is it?"),
        ("What is it? ", SMALL),
        ("Two: ", WIDE, " and ", SMALL, "Compare them."),
        ("Four: ", WIDE, SMALL, picture(64, 64, seed=3), "text between them that fills pages", picture(48, 80, seed=4)),
    ],
    ids=["first", "last", "two", "four"],
)
def test_images_are_encoded_where_prompts_are_computed(
    divided: Served, directory: Path, parts: tuple[Any, ...], request: pytest.FixtureRequest
) -> None:
    before = encoded(divided)
    answer = ask(divided, f"ada {request.node.name}", message(*parts))
    prompt = chat_prompt(*parts)
    assert answer["choices"][0]["token_ids"] == continued(directory, prompt, TOKENS)
    assert cached(answer) == 0
    assert encoded(divided) == (before[0] + len(prompt.images), before[1])


def test_a_later_turn_finds_the_image_where_it_is_decoded_and_another_user_finds_nothing(divided: Served) -> None:
    first = message(WIDE, "Describe it at some length.")
    turns = first, {"role": "assistant", "content": "A picture."}, message("What else?")
    ask(divided, "bea", first)
    before = encoded(divided)
    later = ask(divided, "bea", *turns)
    assert cached(later) >= len(chat_prompt(WIDE).ids) - 16
    assert encoded(divided) == before
    other = ask(divided, "carl", *turns)
    assert cached(other) == 0
    assert other["choices"][0]["token_ids"] == later["choices"][0]["token_ids"]
    assert encoded(divided) == (before[0] + 1, before[1])


def test_an_image_that_ends_on_the_last_page_is_not_encoded_again_where_it_is_decoded(
    divided: Served, directory: Path
) -> None:
    # Whole pages alone would cut the image in two; those of the second question are found up to there.
    texts = ("See " + "e" * number for number in range(PAGE_TOKENS))
    text = next(text for text in texts if len(prompt_of(text, WIDE, ": a").ids) % PAGE_TOKENS == PAGE_TOKENS // 2)
    before = encoded(divided)
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    for end in (": a", ": b", ": a"):
        coded = base64.b64encode(file_of(WIDE)).decode()
        body = {"text": f"{text}<|image_pad|>{end}", "image_data": coded, "sampling_params": sampling}
        with divided.http() as http:
            answer = http.post("/generate", json=body).json()
        assert answer["output_ids"] == continued(directory, prompt_of(text, WIDE, end), TOKENS)
    assert encoded(divided) == (before[0] + 1, before[1])


def test_several_choices_after_an_image_are_those_of_one_group(divided: Served, directory: Path) -> None:
    parts = "See: ", SMALL, "?"
    body = body_of(divided, "kim", message(*parts)) | {"n": 3}
    with divided.http() as http:
        answer = http.post("/v1/chat/completions", json=body).json()
    expected = continued(directory, chat_prompt(*parts), TOKENS)
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * 3
    wait_until(lambda: is_quiet(divided, PREFILL) and is_quiet(divided, DECODE))


@pytest.mark.extended
@pytest.mark.parametrize("name", ["worker-0", "scheduler-0", "worker-1"])
def test_a_service_that_dies_while_images_are_transferred_changes_no_token(
    divided: Served, directory: Path, name: str
) -> None:
    prompts = [
        (f"{name} {number}. " + "Words before it. " * 8, WIDE, picture(200, 120, seed=number), "And?")
        for number in range(4)
    ]
    expected = [continued(directory, chat_prompt(*parts), TOKENS) for parts in prompts]
    before = divided.deployment.pid_of(name)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, divided, f"gus {name}", message(*parts)) for parts in prompts]
        wait_until(lambda: has_leases(divided) or all(answer.done() for answer in answers), step_s=0.005)
        divided.deployment.kill(name)
        assert [answer.result()["choices"][0]["token_ids"] for answer in answers] == expected
    wait_until(lambda: divided.deployment.pid_of(name) not in (None, before))
    wait_until(lambda: divided.is_ready() and is_quiet(divided, PREFILL) and is_quiet(divided, DECODE))
