"""The ledger with all services: it equals the usage that clients were told, whichever services are killed meanwhile.

An answer that begins while the state server does not answer in time has no record, and no ids of events: if its gateway
is killed, its connection breaks, and the ledger has what was written of it; a request that is sent again before its
first event is a new one then. All other answers are complete, and counted once. What a gateway could not write, because
the state server was late, dies with it; so gateways are killed once they have written.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest
from pydantic import SecretStr

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.settings.gateway import LedgerSettings, StateSettings
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.chaos.load import Case, Client, Exchange
from tests.e2e.conftest import fake_steps, serve
from tests.fakes.redis_process import temporary_redis
from tests.waiting import until, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.e2e.served import Served
    from tests.fakes.redis_process import RedisProcess

# Sets another number of requests for the soak.
REQUESTS = "LEDGER_REQUESTS"
SERVICES = ("worker", "scheduler", "detokenizer", "tokenizer", "gateway")
STEP_MS = 5.0
RECOVERY_S = 120.0
TENANTS = ("acme", "globex")
USERS = 5
CLIENTS = 24
# More than half a minute's, so that it is not whole before its gateway is killed.
UNRECORDED_TOKENS = 7000
INSTRUCTIONS = "You are the assistant of a large shop, and answer politely, briefly and truthfully. " * 3
Account = tuple[str, str]


@pytest.fixture(scope="module")
def state_server() -> Iterator[RedisProcess]:
    with temporary_redis() as process:
        yield process


@pytest.fixture(scope="module")
def served_ledger(run_root: Path, state_server: RedisProcess) -> Iterator[Served]:
    """A deployment of several tenants, whose ledger and open answers outlast its gateway."""
    keys = run_root / "ledger-keys.toml"
    applications = [ApiKey(name, hash_of(name), name, vouches_for_users=True) for name in TENANTS]
    save_keys(keys, [*applications, ApiKey("boss", hash_of("boss"), "operators", "boss", admin=True)])
    state = StateSettings(
        url=SecretStr(state_server.url), secret=SecretStr("a secret of more than thirty-two characters")
    )
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(
            port=0, keys_file=keys, state=state, ledger=LedgerSettings(log_directory=run_root / "usage-log")
        ),
        scheduler=SchedulerSettings(max_rows=16),
    )
    with fake_steps(STEP_MS):
        yield from serve(settings, run_root)


def case(model: str, number: int) -> Case:
    """Return a request; some have several choices or prompts, or begin as others do."""
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": 3 + number * 7 % 30,
        "seed": number,
        "n": 2 if number % 11 == 0 else 1,
    }
    text = f"{INSTRUCTIONS if number % 3 else ''}Question {number}?"
    if number % 2:
        body["messages"] = [{"role": "user", "content": text}]
        return Case(f"chat {number}", "/v1/chat/completions", body, has_key=True)
    body["prompt"] = [text, "And another one?"] if number % 7 == 0 else text
    return Case(f"completion {number}", "/v1/completions", body, has_key=True)


class Campaign:
    """Clients of several tenants that send requests one after the other, and what their answers said was used.

    `lost` is what answers that ended early for want of a record would have used to their end: what their requests, sent
    again, were told.
    """

    def __init__(self, served: Served, requests: int) -> None:
        self.told: dict[Account, Counter[str]] = {}
        self.lost: dict[Account, Counter[str]] = {}
        self.done = 0
        self._served = served
        self._numbers = iter(range(requests))
        self._clients = {
            tenant: Client(served.url, expects_replacement=True, headers={"authorization": f"Bearer {tenant}"})
            for tenant in TENANTS
        }

    async def run(self) -> None:
        try:
            await asyncio.gather(*(self._repeat() for _ in range(CLIENTS)))
        finally:
            for client in self._clients.values():
                await client.close()

    async def _repeat(self) -> None:
        for number in self._numbers:
            tenant, user = TENANTS[number % 2], f"user-{number % USERS}"
            lost = 0
            while True:
                exchange = Exchange(case(self._served.model, number))
                await self._clients[tenant].exchange(exchange, user)
                if self.was_state_late:
                    lost += exchange.is_cut + exchange.sent_again
                if not (exchange.is_cut and self.was_state_late):
                    break
            assert exchange.failure is None, f"{exchange.case.name}: {exchange.failure}"
            assert exchange.usage is not None
            prompts = exchange.case.body.get("prompt", "")
            used = {
                "requests": len(prompts) if isinstance(prompts, list) else 1,
                "prompt_tokens": exchange.usage[0],
                "output_tokens": exchange.usage[1],
            }
            account = tenant, f"user/{user}"
            self.told.setdefault(account, Counter()).update(used)
            for _ in range(lost):
                self.lost.setdefault(account, Counter()).update(used)
            self.done += 1

    @property
    def was_state_late(self) -> bool:
        """Whether the state server has been late for a gateway, so that there may be answers without a record."""
        return self._served.deployment.logged["state.away"] > 0

    def check(self, counted: Mapping[Account, Counter[str]]) -> None:
        """Check that the ledger has counted what all answers said, and of lost ones no more than `lost`."""
        assert counted.keys() == self.told.keys()
        for account, told in self.told.items():
            if account in self.lost:
                assert told <= counted[account] <= told + self.lost[account], (account, self.lost[account])
            else:
                assert counted[account] == told, account


def ledger_of(served: Served, key: str = "boss") -> dict[Account, Counter[str]]:
    """Return the ledger's totals by tenant and subject, as soon as they can be read."""
    headers = {"authorization": f"Bearer {key}"}
    with served.http() as http:
        answer = http.get("/v1/usage", params={"group_by": "tenant,subject"}, headers=headers)
        # A state server that has just been late counts as away until it has been probed again.
        give_up_at = time.monotonic() + RECOVERY_S
        while answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < give_up_at:
            time.sleep(0.1)
            answer = http.get("/v1/usage", params={"group_by": "tenant,subject"}, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    found: dict[Account, Counter[str]] = {}
    for line in answer.json()["data"]:
        amounts = {name: line[name] for name in ("requests", "prompt_tokens", "output_tokens")}
        found.setdefault((line["tenant"], line["subject"]), Counter()).update(amounts)
    return found


def increase(after: dict[Account, Counter[str]], before: dict[Account, Counter[str]]) -> dict[Account, Counter[str]]:
    """Return the differences of accounts that have any."""
    found = {account: amounts - before.get(account, Counter()) for account, amounts in after.items()}
    return {account: amounts for account, amounts in found.items() if amounts}


def has_written(served: Served) -> bool:
    """Return whether the gateway has written all that it knew of, or is not there."""
    try:
        with served.http() as http:
            # It writes before it answers.
            answer = http.get("/v1/usage", headers={"authorization": "Bearer boss"})
    except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
        return True
    return answer.status_code == httpx.codes.OK


async def count(served: Served, requests: int, order: Iterator[str]) -> None:
    """Send requests while services are killed in `order`, and compare the ledger with the answers' usage."""
    before = ledger_of(served)
    campaign = Campaign(served, requests)
    running = asyncio.create_task(campaign.run())
    chance = random.Random(20)
    for name in order:
        goal = campaign.done + chance.uniform(5, 40)
        await until(lambda goal=goal: running.done() or campaign.done >= goal, timeout_s=RECOVERY_S)  # type: ignore[misc]
        if running.done():
            break
        if name == "gateway":
            await asyncio.to_thread(wait_until, lambda: has_written(served), RECOVERY_S)
        served.deployment.kill(name)
    await running
    assert campaign.done == requests
    await asyncio.to_thread(wait_until, served.is_ready, RECOVERY_S)
    after = await asyncio.to_thread(ledger_of, served)
    campaign.check(increase(after, before))
    check_log(served, after)
    with served.leaving_nothing_behind():
        pass


def logged(served: Served) -> dict[Account, Counter[str]]:
    """Return the sums of the usage log's lines, which are numbered without gaps."""
    directory = served.deployment.layout.find("gateway").settings.gateway.ledger.log_directory
    assert directory is not None
    lines = [
        orjson.loads(line) for path in sorted(directory.glob("*.jsonl")) for line in path.read_bytes().splitlines()
    ]
    assert [line["number"] for line in lines] == list(range(1, len(lines) + 1))
    found: dict[Account, Counter[str]] = {}
    for line in lines:
        assert line["operation"] == ("chat" if line["request_id"].startswith("chatcmpl") else "completions")
        assert sum(line["cached"].values()) == line["cached_tokens"]
        amounts = {name: line[name] for name in ("requests", "prompt_tokens", "output_tokens")}
        found.setdefault((line["tenant"], line["subject"]), Counter()).update(amounts)
    return found


def check_log(served: Served, ledger: dict[Account, Counter[str]]) -> None:
    """Check that the usage log gets all that the ledger has; requests without an end come after a minute."""
    wait_until(lambda: logged(served) == ledger, RECOVERY_S, what=lambda: f"{logged(served)} is not {ledger}")


@pytest.mark.slow
async def test_it_equals_the_usage_of_all_answers_though_every_service_is_killed(served_ledger: Served) -> None:
    await count(served_ledger, 300, iter(SERVICES))


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_it_equals_the_usage_of_ten_thousand_answers_across_random_kills(served_ledger: Served) -> None:
    chance = random.Random(21)

    def kills() -> Iterator[str]:
        yield from SERVICES
        while True:
            yield chance.choice(SERVICES)

    await count(served_ledger, int(os.environ.get(REQUESTS, "10000")), kills())


@pytest.mark.extended
async def test_an_answer_without_a_record_ends_with_its_gateway_and_is_counted_as_far_as_it_was_written(
    served_ledger: Served, state_server: RedisProcess
) -> None:
    before = ledger_of(served_ledger)
    body = {**case(served_ledger.model, 2).body, "max_tokens": UNRECORDED_TOKENS}
    exchange = Exchange(Case("unrecorded", "/v1/completions", body, has_key=True))
    client = Client(served_ledger.url, expects_replacement=True, headers={"authorization": "Bearer acme"})

    def spent() -> Counter[str]:
        return increase(ledger_of(served_ledger), before).get(("acme", "user/unlucky"), Counter())

    state_server.signal(signal.SIGSTOP)
    try:
        asking = asyncio.create_task(client.exchange(exchange, "unlucky"))
        await until(lambda: asking.done() or bool(exchange.choices), timeout_s=RECOVERY_S)
    finally:
        state_server.signal(signal.SIGCONT)
    try:
        await asyncio.to_thread(wait_until, lambda: spent()["output_tokens"] > 0, RECOVERY_S)
        written = await asyncio.to_thread(spent)
        served_ledger.deployment.kill("gateway")
        await asking
    finally:
        await client.close()
    assert (exchange.is_cut, exchange.event_ids) == (True, [])
    await asyncio.to_thread(wait_until, served_ledger.is_ready, RECOVERY_S)
    assert written <= spent()
    assert spent()["requests"] == 1
    assert spent()["output_tokens"] < UNRECORDED_TOKENS
    with served_ledger.leaving_nothing_behind():
        pass


async def test_answers_that_their_clients_give_up_are_counted_as_far_as_they_came(served_ledger: Served) -> None:
    before = ledger_of(served_ledger)
    headers = {"authorization": "Bearer acme"}
    body = {**case(served_ledger.model, 1).body, "max_tokens": 2000, "user": "hasty", "return_token_ids": True}
    seen = 0
    async with (
        httpx.AsyncClient(base_url=served_ledger.url, trust_env=False, timeout=RECOVERY_S) as http,
        http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        async for line in answer.aiter_lines():
            seen += line.startswith("data: {")
            if seen > 20:
                break
    with served_ledger.leaving_nothing_behind():
        pass

    def spent() -> Counter[str]:
        return increase(ledger_of(served_ledger), before).get(("acme", "user/hasty"), Counter())

    wait_until(lambda: spent()["output_tokens"] >= 20, RECOVERY_S, what=lambda: str(spent()))
    assert spent()["requests"] == 1
    assert spent()["output_tokens"] < 2000
    settled = spent()
    assert increase(ledger_of(served_ledger, "acme"), before) == {("acme", "user/hasty"): settled}, (
        "a tenant sees its own"
    )
    assert spent() == settled
