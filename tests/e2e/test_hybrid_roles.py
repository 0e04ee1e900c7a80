"""A model with recurrent layers in groups with roles, which compute prompts or generate: the tokens of one group."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.settings.scheduler import HostTierSettings
from common.types import GroupRole
from deploy.supervisor.layout import PlannedGroup, Replicas
from tests.e2e.byte_models import continued, save_byte_model
from tests.e2e.conftest import serve
from tests.e2e.test_disaggregation import DECODE, PREFILL, is_quiet, state
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

TOKENS = 24
DIVIDED = (PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE))

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("hybrid"), "qwen3.5")


@contextmanager
def served_by(model: Path, run_root: Path, groups: tuple[PlannedGroup, ...]) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(host_tier=HostTierSettings(pages=512), prefill_min_tokens=64),
    )
    with contextmanager(serve)(settings, run_root, replicas=Replicas(groups=groups)) as served:
        if len(groups) > 1:
            await_both(served)
        yield served


def await_both(served: Served) -> None:
    """Send prompts until one is left to the prefill group, which may be ready later than the other one."""
    random = Random(0)

    def is_left() -> bool:
        answer(served, [random.randrange(256) for _ in range(100)])
        return state(served, DECODE).disaggregation.remote_prefills > 0

    wait_until(is_left)


@pytest.fixture(scope="module")
def divided(model: Path, run_root: Path) -> Iterator[Served]:
    with served_by(model, run_root, DIVIDED) as served:
        yield served


@pytest.fixture(scope="module")
def single(model: Path, run_root: Path) -> Iterator[Served]:
    with served_by(model, run_root, (PlannedGroup(),)) as served:
        yield served


def prompts_of(seed: int, count: int = 6) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(256) for _ in range(90 + 40 * number)] for number in range(count)]


def answer(
    served: Served, prompt: list[int], user: str = "alice", **options: Any
) -> tuple[list[int], int]:  # Any: JSON
    """Return the ids of a continuation, and the number of cached tokens."""
    body = {
        "model": served.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "user": user, **options,
    }  # fmt: skip
    with served.http() as http:
        response = http.post("/v1/completions", json=body)
    response.raise_for_status()
    content = response.json()
    return content["choices"][0]["token_ids"], content["usage"]["prompt_tokens_details"]["cached_tokens"]


def are_quiet(served: Served) -> bool:
    return served.is_ready() and is_quiet(served, PREFILL) and is_quiet(served, DECODE)


def test_greedy_answers_are_those_of_the_model_and_states_were_read(divided: Served, model: Path) -> None:
    prompts = prompts_of(1)
    assert [answer(divided, prompt)[0] for prompt in prompts] == continued(model, prompts, TOKENS)
    # Once the link is measured, prompts are computed where that is faster.
    assert state(divided, DECODE).disaggregation.fetched_pages > 0
    assert divided.deployment.logged["peer.failed"] == 0
    wait_until(lambda: are_quiet(divided))
    tiers = {tier.tier: tier for tier in state(divided, DECODE).tiers}
    assert tiers["device_snapshots"].evictable_pages > 0


def test_seeded_answers_and_later_turns_are_those_of_one_group(divided: Served, single: Served) -> None:
    sampled: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    for number, prompt in enumerate(prompts_of(2, 4)):
        texts = [answer(served, prompt, **sampled)[0] for served in (divided, single)]
        assert texts[0] == texts[1]
        turn = [*prompt, *texts[0], *prompts_of(3 + number, 1)[0]]
        (later, cached), (expected, _) = (answer(served, turn, **sampled) for served in (divided, single))
        assert later == expected
        # The turn before is found, also where its states came from the other group.
        assert cached >= len(prompt) // 16 * 16
        # What alice has is not found by bob, who gets the same tokens.
        assert answer(divided, turn, "bob", **sampled) == (expected, 0)
    wait_until(lambda: are_quiet(divided))


@pytest.mark.parametrize("name", [PREFILL, DECODE, "worker-0", "worker-1"])
def test_a_killed_service_of_either_group_changes_no_token(divided: Served, model: Path, name: str) -> None:
    prompts = prompts_of(sum(name.encode()))
    expected = continued(model, prompts, TOKENS)
    wait_until(lambda: are_quiet(divided))
    before = divided.deployment.pid_of(name)
    timer = threading.Timer(0.1, divided.deployment.kill, (name,))
    timer.start()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: answer(divided, prompt)[0], prompts))
    timer.join()
    assert answers == expected
    wait_until(lambda: divided.deployment.pid_of(name) not in (None, before))
    wait_until(lambda: are_quiet(divided))


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_groups_with_other_numbers_of_ranks_read_each_others_states(
    model: Path, run_root: Path, prefill: int, decode: int
) -> None:
    prompts = prompts_of(10 + prefill)
    groups = (PlannedGroup(GroupRole.PREFILL, prefill), PlannedGroup(GroupRole.DECODE, decode))
    with served_by(model, run_root, groups) as served:
        assert [answer(served, prompt)[0] for prompt in prompts] == continued(model, prompts, TOKENS)
        assert state(served, DECODE).disaggregation.fetched_pages > 0
        wait_until(lambda: are_quiet(served))
