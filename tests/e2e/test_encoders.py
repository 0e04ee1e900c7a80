"""Images that workers of their own encode: the same answers, also while these are away."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx
import pytest

from common.settings import (
    GatewaySettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    TokenizerSettings,
    WorkerSettings,
)
from common.settings.tokenizer import ImageDecodingSettings
from deploy.supervisor.layout import Replicas, free_port
from tests.e2e.conftest import serve
from tests.e2e.seeing_model import chat_prompt, continued, save_seeing_model
from tests.e2e.test_images import TOKENS, ask, message
from tests.services.tokenizer.images.pictures import picture
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def port() -> int:
    return free_port("127.0.0.1")


@pytest.fixture(scope="module")
def worker_ports() -> int:
    """Return the first of three free ports: of up to two ranks and the encoder."""
    return free_port("127.0.0.1", 3)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.extended)])
def apart(
    request: pytest.FixtureRequest, directory: Path, port: int, worker_ports: int, run_root: Path
) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(reference=str(directory), dtype="float32", images="on"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(metrics_port=port),
        worker=WorkerSettings(metrics_port=worker_ports),
        tokenizer=TokenizerSettings(images=ImageDecodingSettings(processes=1)),
    )
    yield from serve(settings, run_root, request.param, Replicas(encoders=1))


def count(port: int, name: str, service: str = "scheduler") -> int:
    """Return the value of a service's metric, or 0."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60, trust_env=False).text
    found = re.search(rf"^pando_{service}_{re.escape(name)} ([0-9.]+)$", text, re.MULTILINE)
    return round(float(found[1])) if found else 0


def test_an_encoder_encodes_images_and_the_workers_do_while_it_is_away(
    apart: Served, directory: Path, port: int
) -> None:
    wait_until(lambda: count(port, "encoders") == 1, timeout_s=120)
    small, wide, done = picture(40, 56, seed=1), picture(200, 60, seed=2), 'remotely_encoded_images{outcome="done"}'
    parts = ("Two: ", wide, " and ", small, "Compare.")
    with apart.leaving_nothing_behind():
        answer = ask(apart, "ada", message(*parts))
        assert answer["choices"][0]["token_ids"] == continued(directory, chat_prompt(*parts), TOKENS)
        wait_until(lambda: count(port, done) == 2)
        # The view has its images in another context, and no other view has.
        for user in ("ada", "bob"):
            other = "Other text. ", wide
            answer = ask(apart, user, message(*other))
            assert answer["choices"][0]["token_ids"] == continued(directory, chat_prompt(*other), TOKENS)
        wait_until(lambda: count(port, done) == 3)
        wait_until(lambda: count(port, "reused_images") == 1)
        assert count(port, "encoded_images") == 0
        # Within one host, the ranks copied all embeddings from the encoder's memory.
        ranks = [each for each in apart.deployment.layout.services if each.name.startswith("worker")]
        assert ranks
        for rank in ranks:
            own = rank.settings.worker.metrics_port
            assert own is not None
            assert count(own, 'fetched_images_total{way="copied"}', "worker") == 3
            assert count(own, 'fetched_images_total{way="sent"}', "worker") == 0
        restarts = apart.deployment.restarts_of("encoder")
        apart.deployment.kill("encoder")
        mine = picture(64, 64, seed=3), "Which one?"
        answer = ask(apart, "eve", message(*mine))
        assert answer["choices"][0]["token_ids"] == continued(directory, chat_prompt(*mine), TOKENS)
    wait_until(lambda: apart.deployment.restarts_of("encoder") > restarts)
    wait_until(lambda: count(port, done) + count(port, "encoded_images") == 4)
    wait_until(lambda: count(port, "encoders") == 1, timeout_s=120)
    before = count(port, done)
    answer = ask(apart, "fay", message(*mine))
    assert answer["choices"][0]["token_ids"] == continued(directory, chat_prompt(*mine), TOKENS)
    wait_until(lambda: count(port, done) == before + 1)
