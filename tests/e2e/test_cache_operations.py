"""The user-aware cache with its content check between real processes: what an operator sees and does, and bad input."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from tests.e2e.conftest import fake_steps, serve
from tests.fakes.forked import ForkedProgram
from tests.services.scheduler.content.corpus import drawn
from tests.waiting import TIMEOUT_S, until, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.served import Served

TOKEN = "open-sesame"
ADMIN = (("authorization", f"Bearer {TOKEN}"),)
# Short, but what a busy machine does in minutes still counts together.
EPOCHS = {"epoch_seconds": 0.5, "promotion_epochs": 1000}
GUIDE = "You are the patient guide of a botanical garden, and answer in the language of the question. " * 8
KEEPER = "You are the keeper of a library, and answer in the language of the question. " * 4
KEY = f"sk-proj-{drawn(48)}"


@pytest.fixture(scope="module")
def aware(run_root: Path) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings.model_validate(
            {
                "cache": EPOCHS,
                "content_check": {"enabled": True},
                "admin_token": TOKEN,
                "max_rows": 8,
                "queue": {"policy": "fair", "max_waiting_requests": 64},
            }
        ),
    )
    with fake_steps(1.0):
        yield from serve(settings, run_root)


def chat(served: Served, system: str, user: str | None, question: str = "Hello?", session: str | None = None) -> int:
    """Ask one question; return the number of the prompt's cached tokens."""
    body: dict[str, Any] = {
        "model": served.model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": 4,
    }
    body |= {name: value for name, value in (("user", user), ("session_id", session)) if value is not None}
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def scheduler(served: Served) -> grpc.Channel:
    return grpc.insecure_channel(served.deployment.address_of("scheduler"), options=CHANNEL_OPTIONS)


def pass_epochs(served: Served, count: int) -> None:
    """Wait until so many borders of epochs have passed."""
    until = served.state().cache_accounting.epoch + count
    wait_until(lambda: served.state().cache_accounting.epoch >= until)


def shared_texts(served: Served) -> str:
    """Return the text of all that the tenant shares."""
    with scheduler(served) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        request = scheduler_pb2.DumpTreeRequest(include_token_ids=True)
        nodes = [answer.node for answer in stub.DumpTree(request, timeout=60, metadata=ADMIN)]
    shared = [list(node.token_ids) for node in nodes if node.visibility == scheduler_pb2.VISIBILITY_TENANT]
    with grpc.insecure_channel(served.deployment.address_of("tokenizer"), options=CHANNEL_OPTIONS) as channel:
        tokenizer = tokenizer_pb2_grpc.TokenizerStub(channel)
        return "".join(
            tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(ids=ids), timeout=60).text for ids in shared
        )


def pando(served: Served, *arguments: str, admin: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a subcommand of `pando cache` as a person would."""
    command = ["cache", *arguments]
    command += ["--scheduler", served.deployment.address_of("scheduler")]
    if arguments[0] in ("pin", "unpin"):
        command += ["--tokenizer", served.deployment.address_of("tokenizer")]
    if admin:
        command += ["--admin-token", TOKEN]
    status, output, log = ForkedProgram("deploy.cli", command, {"COLUMNS": "200"}).communicate()
    return subprocess.CompletedProcess(command, status, output, log)


def test_a_prompt_is_shared_only_up_to_a_secret(aware: Served) -> None:
    secret = f"{KEEPER}Use the key {KEY} for the catalogue. {KEEPER}"
    with aware.leaving_nothing_behind():
        for number in range(5):
            chat(aware, GUIDE, f"visitor-{number}")
            chat(aware, secret, f"reader-{number}")
        wait_until(lambda: GUIDE[:200] in shared_texts(aware), 120, lambda: shared_texts(aware))
        wait_until(lambda: aware.state().cache_accounting.verdicts["cut"] > 0, 120, lambda: str(aware.state()))
        # Evidence goes on, and so do epochs.
        for number in range(5):
            chat(aware, secret, f"reader-{number}", question="And now?")
        pass_epochs(aware, 4)
    text = shared_texts(aware)
    assert KEY not in text
    assert KEY[:12] not in text
    # What stands before the key is harmless, and is shared as far as whole pages go.
    assert KEEPER[:100] in text
    # A newcomer finds all of the harmless prompt, and nothing of the other from the key on.
    assert chat(aware, GUIDE, "newcomer") >= 128
    before_key = chat(aware, KEEPER, "measuring")
    assert chat(aware, secret, "newcomer") <= before_key + 16
    # The readers themselves still find their own.
    assert chat(aware, secret, "reader-0") > before_key + 16


@contextmanager
def watched(served: Served, output: Path) -> Iterator[Callable[[], list[list[str]]]]:
    """Run `pando cache watch` within the block; yield a function that returns the words of its lines so far."""
    command = [sys.executable, "-m", "deploy.cli", "cache", "watch"]
    with output.open("wb") as sink:
        watching = subprocess.Popen(
            [*command, "--scheduler", served.deployment.address_of("scheduler")],
            stdout=sink,
            env={"COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        )
    try:
        # The last line may not be whole yet.
        yield lambda: [line.split() for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")]
    finally:
        watching.terminate()
        watching.wait(TIMEOUT_S)


def kinds_of(lines: list[list[str]]) -> list[str]:
    """Return the kinds of the events after the first snapshot, and of its end."""
    kinds = [words[1] for words in lines if len(words) > 1]
    return kinds[kinds.index("snapshot_end") :] if "snapshot_end" in kinds else []


def test_the_commands_show_the_cache_and_change_it(aware: Served, tmp_path: Path) -> None:
    with watched(aware, tmp_path / "watched") as lines:
        show_and_change(aware, lambda: bool(kinds_of(lines())))
        wait_until(lambda: {"inserted", "reclaimed", "flushed"} <= set(kinds_of(lines())), what=lambda: str(lines()))
        seen = lines()
    sequences = [int(words[0]) for words in seen[-len(kinds_of(seen)) :]]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


def show_and_change(aware: Served, is_watched: Callable[[], bool]) -> None:
    """Use each of the commands; what the cache holds is changed once `is_watched`."""
    for number in range(3):
        chat(aware, GUIDE, f"visitor-{number}")
    chat(aware, "What I alone ask for. " * 12, "diarist")
    wait_until(lambda: GUIDE[:200] in shared_texts(aware), 120)
    assert chat(aware, GUIDE, "passer-by") >= 128
    wait_until(is_watched)
    tree = pando(aware, "tree", admin=False).stdout
    assert "users in epoch" in tree
    assert "private of view:" in tree
    assert "diarist" not in tree
    assert "default/user/diarist" in pando(aware, "tree", "--max-nodes", "0").stdout
    stats = pando(aware, "stats", "--owners", "100").stdout
    for text in ("device/tenant", "promoted", "content check", "commit", "default/user/diarist"):
        assert text in stats
    named = pando(aware, "tree", "--view", "default/user/diarist", admin=False)
    assert named.returncode == 1
    assert "admin token" in named.stderr
    # Pinned, a prompt is public after the first who asks.
    pinned = "Answer as the gardener of this place would, and in verse. " * 8
    assert pando(aware, "pin", "--system", pinned, admin=False).returncode == 1
    assert "tokens are public from the next boundary on" in pando(aware, "pin", "--system", pinned).stdout
    pass_epochs(aware, 3)
    assert chat(aware, pinned, "poet-1") == 0
    assert chat(aware, pinned, "poet-2") >= 64
    assert "unpinned" in pando(aware, "unpin", "--system", pinned).stdout
    assert "there is no such pin" in pando(aware, "unpin", "--system", pinned).stdout
    assert pando(aware, "flush", admin=False).returncode == 1
    wait_until(aware.is_idle)
    assert "pages freed" in pando(aware, "flush").stdout
    with aware.http() as http:  # the gateway knows the token, too
        assert http.post("/flush_cache").status_code == httpx.codes.OK
    assert aware.state().cache_accounting.nodes == 0


def test_a_user_or_one_conversation_can_be_forgotten(aware: Served) -> None:
    private = "My diary of this week, which is nobody's business. " * 12
    assert chat(aware, private, "ann") == 0
    assert chat(aware, private, "ann") > 64
    assert "is forgotten" in pando(aware, "forget", "default/user/ann").stdout
    assert "default/user/ann" not in pando(aware, "tree", "--max-nodes", "0").stdout
    assert chat(aware, private, "ann") < 32
    # One of two conversations, and only that.
    for day in ("monday", "tuesday"):
        chat(aware, f"What I noted on {day}. " * 20, "bob", session=day)
    assert "is forgotten" in pando(aware, "forget", "default/user/bob", "--session", "monday").stdout
    assert chat(aware, "What I noted on monday. " * 20, "bob") < 32
    assert chat(aware, "What I noted on tuesday. " * 20, "bob") > 64


BAD_USERS: dict[str, tuple[bytes, int]] = {
    "a control character": (b'"a\\nb"', 400),
    "a zero": (b'"a\\u0000b"', 400),
    "a lone surrogate": (b'"\\ud800"', 400),
    "no UTF-8": (b'"\xff\xfe"', 400),
    "a number": (b"7", 400),
    "257 letters": (b'"' + b"x" * 257 + b'"', 400),
    "5 MB": (b'"' + b"x" * 5_000_000 + b'"', 400),
    "10 MB": (b'"' + b"x" * 10_000_000 + b'"', 413),
}


@pytest.mark.parametrize(("user", "status"), BAD_USERS.values(), ids=BAD_USERS.keys())
def test_an_invalid_user_id_is_refused_at_the_gateway(aware: Served, user: bytes, status: int) -> None:
    body = b'{"model": "%s", "prompt": "Hi", "max_tokens": 2, "user": %s}' % (aware.model.encode(), user)
    views = aware.state().cache_accounting.views
    with aware.leaving_nothing_behind(), aware.http() as http:
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert len(answer.text) < 1000
    assert aware.state().cache_accounting.views <= views


@pytest.mark.parametrize("user", [None, ""], ids=["absent", "empty"])
def test_unnamed_requests_share_with_each_other_and_with_no_named_user(aware: Served, user: str | None) -> None:
    prompt = f"A question of mine, asked with {user!r}. " * 12
    with aware.leaving_nothing_behind():
        first, second, named = chat(aware, prompt, user), chat(aware, prompt, user), chat(aware, prompt, "a stranger")
    assert (first, named) == (0, 0)
    assert second > 0


@pytest.mark.parametrize(
    ("tenant", "user", "words"),
    [
        ("", "ann", "both be set"),
        ("default", "", "both be set"),
        ("default", "a\nb", "control"),
        ("default", "x" * 10_000_000, "256 bytes"),
    ],
    ids=["no tenant", "no user", "control character", "10 MB"],
)
def test_tokenizer_and_scheduler_refuse_invalid_identities_of_direct_callers(
    aware: Served, tenant: str, user: str, words: str
) -> None:
    view = common_pb2.View(subject=common_pb2.Subject(tenant=tenant, name=user))
    reply_to = common_pb2.ReplyTo(subscriber_id="nobody")
    with aware.leaving_nothing_behind(), scheduler(aware) as channel:
        request = scheduler_pb2.ScheduleRequest(request_id="direct", view=view, reply_to=reply_to, token_ids=[5, 6])
        call = scheduler_pb2_grpc.SchedulerStub(channel).Submit(
            iter([scheduler_pb2.SchedulerSubmitRequest(schedules=[request])]), timeout=60
        )
        # Messages with the scheduler's load may come before.
        admission = next(each for message in call for each in message.admissions)
        assert words in admission.rejected.message
    address = aware.deployment.address_of("tokenizer")
    with aware.leaving_nothing_behind(), grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        generate = tokenizer_pb2.GenerateRequest(
            request_id="direct", view=view, reply_to=reply_to, model=aware.model, text="Hi"
        )
        answers = tokenizer_pb2_grpc.TokenizerStub(channel).Submit(
            iter([tokenizer_pb2.TokenizerSubmitRequest(generates=[generate])]), timeout=60
        )
        (admission,) = next(answers).admissions
        assert words in admission.rejected.message


def test_invalid_utf_8_ends_only_its_own_stream(aware: Served) -> None:
    good = scheduler_pb2.ScheduleRequest(
        request_id="direct",
        view=common_pb2.View(subject=common_pb2.Subject(tenant="default", name="USER")),
        token_ids=[5, 6],
    )
    broken = scheduler_pb2.SchedulerSubmitRequest(schedules=[good]).SerializeToString().replace(b"USER", b"\xff\xfeER")
    with aware.leaving_nothing_behind(), scheduler(aware) as channel:
        submit: Any = channel.stream_stream("/pando.v1.Scheduler/Submit")
        with pytest.raises(grpc.RpcError):
            list(submit(iter([broken]), timeout=60))
        state = scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=60)
        assert state.worker_group == "READY"
    assert chat(aware, "Be brief.", "still-here") >= 0


async def test_one_user_s_flood_is_limited_and_others_are_served(aware: Served) -> None:
    body = {"model": aware.model, "max_tokens": 200, "ignore_eos": True}

    async def ask(http: httpx.AsyncClient, user: str, number: int) -> httpx.Response:
        prompt = f"Number {number} of many questions. " * 20
        return await http.post("/v1/completions", json={**body, "prompt": prompt, "user": user})

    limits = httpx.Limits(max_connections=300)
    with aware.leaving_nothing_behind():
        async with httpx.AsyncClient(base_url=aware.url, timeout=120, trust_env=False, limits=limits) as http:
            flood = [asyncio.create_task(ask(http, "flooder", number)) for number in range(120)]
            await until(lambda: sum(task.done() for task in flood) >= 120 - 8 - 32)
            others = await asyncio.gather(*(ask(http, f"modest-{number}", number) for number in range(4)))
            answers = await asyncio.gather(*flood)
    assert [answer.status_code for answer in others] == [200] * 4
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    # 8 run, half of the queue of 64 waits; the rest are told when to come back.
    assert statuses.count(200) >= 32
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "retry-after" in refused.headers
    assert "of this user" in refused.json()["error"]["message"]
