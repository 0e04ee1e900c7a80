"""Ranks and groups on two hosts with a slow network: the tokens of one rank, also after cut links and dead workers."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest

from deploy.supervisor.layout import free_port
from tests.e2e.byte_models import LAYERS, continued, save_byte_model
from tests.e2e.hosts import Host, NoHostsError, hosts
from tests.e2e.sites import START_S, Site, holds_nothing, is_serving, state_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.slow, pytest.mark.extended]

# Of the hosts' network, in Mbit/s: a page of the model's takes 13 ms.
BANDWIDTH = 20
# Of a packet at each interface that it goes through, in ms: two of them between two hosts.
DELAYS = (0, 5)
# How long a host is off the network: heartbeats are sent twice per second.
CUT_S = 4.0
TOKENS, LONG_TOKENS = 12, 160
PREFILL_TOKENS = 48
LENGTHS = [60 + 40 * number for number in range(5)]
# Each round has prompts of its own, as those of earlier rounds are cached.
ROUNDS = 4


def prompts(number: int) -> list[list[int]]:
    """Return the prompts of a round."""
    draw = random.Random(number)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


def bodies(tokens: int, number: int = 0) -> list[dict[str, Any]]:
    """Return a greedy request for each prompt of a round, and then a sampled one."""
    greedy = [{"prompt": prompt, "temperature": 0} for prompt in prompts(number)]
    sampled = [{"prompt": prompt, "temperature": 1.0, "seed": len(prompt)} for prompt in prompts(number)]
    return [{"max_tokens": tokens, **each} for each in (*greedy, *sampled)]


FAMILIES = {"dense": "qwen3", "mixture": "qwen3 moe"}
# Tokens of each answer, by model and round.
Expected = dict[str, list[list[list[int]]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_byte_model(tmp_path_factory.mktemp(name), family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], run_root: Path) -> Expected:
    """Return the answers of one rank to the long requests of each round, by model."""
    answers: Expected = {}
    for name, model in models.items():
        site = Site(Path(mkdtemp(dir=run_root)), model, [])
        try:
            site.start([site.start_scheduler(None, site.start_workers())], free_port("127.0.0.1"))
            answers[name] = [
                [answer.result() for answer in site.send(bodies(LONG_TOKENS, number))] for number in range(ROUNDS)
            ]
        finally:
            site.stop()
        assert first_tokens(answers[name])[: len(LENGTHS)] == continued(model, prompts(0), TOKENS)
    return answers


@pytest.fixture(params=DELAYS, ids=lambda delay_ms: f"{2 * delay_ms} ms apart")
def two_hosts(request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    delay_ms: int = request.param
    try:
        with hosts(2, BANDWIDTH, delay_ms) as made:
            # There and back, through the interface of that host.
            assert made[0].round_trip_s() >= 2 * delay_ms / 1000
            yield made
    except NoHostsError as error:
        pytest.skip(str(error))


@pytest.fixture
def new_site(run_root: Path, models: dict[str, Path], two_hosts: list[Host]) -> Iterator[Callable[[str], Site]]:
    made: list[Site] = []

    def make(name: str) -> Site:
        made.append(Site(Path(mkdtemp(dir=run_root)), models[name], two_hosts))
        return made[-1]

    yield make
    for site in made:
        site.stop()


def answers(site: Site, tokens: int = TOKENS) -> list[list[int]]:
    return [answer.result() for answer in site.send(bodies(tokens))]


def first_tokens(expected: list[list[list[int]]]) -> list[list[int]]:
    return [each[:TOKENS] for each in expected[0]]


def start_ranks(site: Site, first: Host, **settings: object) -> str:
    """Start a group of two ranks, whose scheduler is on a host; return its address."""
    scheduler = site.start_scheduler(first, site.start_workers(), rendezvous=f"{first.address}:29500", **settings)
    site.start([scheduler], free_port("127.0.0.1"))
    return scheduler


def start_roles(site: Site, on: list[Host]) -> list[str]:
    """Start a prefill group on the first host and a decode group on the second; return their addresses."""
    roles = {"host_tier.pages": 256, "prefill_min_tokens": PREFILL_TOKENS}
    workers = site.start_workers()
    schedulers = [
        site.start_scheduler(host, [worker], role=role, **roles)
        for host, worker, role in zip(on, workers, ("prefill", "decode"), strict=True)
    ]
    site.start(schedulers, free_port("127.0.0.1"))
    return schedulers


def test_stages_on_two_hosts_answer_as_one_rank(
    new_site: Callable[[str], Site], two_hosts: list[Host], expected: Expected
) -> None:
    site = new_site("dense")
    start_ranks(site, two_hosts[0], pipeline_parallel=2)
    before = two_hosts[0].sent_bytes()
    assert answers(site) == first_tokens(expected["dense"])
    # Hidden states go from the first stage to the second one: 48 numbers of 4 bytes for each token.
    tokens = sum(LENGTHS) + 2 * len(LENGTHS) * (TOKENS - 1)
    assert two_hosts[0].sent_bytes() - before > 4 * 48 * tokens


@pytest.mark.parametrize("two_hosts", DELAYS[1:], indirect=True)
def test_experts_on_two_hosts_answer_as_one_rank(
    new_site: Callable[[str], Site], two_hosts: list[Host], expected: Expected
) -> None:
    site = new_site("mixture")
    start_ranks(site, two_hosts[0], expert_parallel="true")
    before = [host.sent_bytes() for host in two_hosts]
    assert answers(site) == first_tokens(expected["mixture"])
    # Each rank adds its part to the other's twice in each layer: 48 numbers of 4 bytes for each token.
    tokens = sum(LENGTHS) + 2 * len(LENGTHS) * (TOKENS - 1)
    assert all(
        host.sent_bytes() - sent > 4 * 48 * tokens * 2 * LAYERS for host, sent in zip(two_hosts, before, strict=True)
    )


def test_groups_with_roles_on_two_hosts_answer_as_one_rank(
    new_site: Callable[[str], Site], two_hosts: list[Host], expected: Expected
) -> None:
    site = new_site("dense")
    schedulers = start_roles(site, two_hosts)
    before = two_hosts[0].sent_bytes()
    assert answers(site) == first_tokens(expected["dense"])
    state = state_of(schedulers[1])
    # On a busy machine, computing a prompt where it is decoded may be faster than waiting for its pages.
    assert state.disaggregation.remote_prefills
    assert state.disaggregation.fetched_pages
    page_bytes = 16 * LAYERS * 2 * 2 * 32 * 4
    assert two_hosts[0].sent_bytes() - before > state.disaggregation.fetched_pages * page_bytes
    wait_until(lambda: all(holds_nothing(state_of(address)) for address in schedulers))


def disturbed(site: Site, number: int, is_due: Callable[[], object], fault: Callable[[], None]) -> list[list[int]]:
    """Return the answers to the long requests of a round, during which a fault happens once it is due."""
    sent = site.send(bodies(LONG_TOKENS, number))
    wait_until(is_due)
    assert not any(each.done() for each in sent), "the fault came too late"
    fault()
    return [each.result() for each in sent]


def cut_off(host: Host) -> None:
    assert host.is_reachable()
    with host.cut_off():
        assert not host.is_reachable()
        time.sleep(CUT_S)


@pytest.mark.parametrize("two_hosts", DELAYS[:1], indirect=True)
def test_stages_on_two_hosts_go_on_after_a_cut_link_and_a_killed_worker(
    new_site: Callable[[str], Site], two_hosts: list[Host], expected: Expected
) -> None:
    site = new_site("dense")
    scheduler = start_ranks(site, two_hosts[0], pipeline_parallel=2)
    faults = (partial(cut_off, two_hosts[1]), partial(site.kill_worker, two_hosts[1]))
    for number, fault in enumerate(faults):
        answered = disturbed(site, number, lambda: state_of(scheduler).running_rows, fault)
        assert answered == expected["dense"][number]
        wait_until(lambda: is_serving(scheduler), START_S)
    wait_until(lambda: holds_nothing(state_of(scheduler)))


@pytest.mark.parametrize("two_hosts", DELAYS[:1], indirect=True)
def test_groups_with_roles_on_two_hosts_go_on_after_cut_links_and_killed_workers(
    new_site: Callable[[str], Site], two_hosts: list[Host], expected: Expected
) -> None:
    site = new_site("dense")
    prefill, decode = start_roles(site, two_hosts)

    def has_leases() -> bool:
        return state_of(prefill).disaggregation.open_leases > 0

    def is_busy() -> bool:
        # Over a link that was measured to be slow, few prompts are read.
        return has_leases() or state_of(decode).running_rows > 0

    faults = [partial(act, host) for host in two_hosts for act in (cut_off, site.kill_worker)]
    for number, fault in enumerate(faults):
        answered = disturbed(site, number, is_busy if number else has_leases, fault)
        assert answered == expected["dense"][number]
        wait_until(lambda: is_serving(prefill) and is_serving(decode), START_S)
    assert len(faults) == ROUNDS
    wait_until(lambda: all(holds_nothing(state_of(address)) for address in (prefill, decode)))
