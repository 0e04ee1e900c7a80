"""Adapters of real services: loaded, used by those who may, kept when services die, and never lost in a race."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tokenizers

from common.settings import GatewaySettings, LimitsSettings, ModelSettings, SchedulerSettings, Settings
from common.settings.scheduler import AdapterSettings
from deploy.cli import main
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.e2e.conftest import serve
from tests.services.worker.engine.adapters.peft_adapters import ATTENTION, FEED_FORWARD, save_adapter
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.slow

ADMIN, ENTITLED, OTHER = "admin-secret", "entitled-secret", "other-secret"
PROMPT = list(range(40, 80))
RECOVERY_S = 120.0


@pytest.fixture(scope="module")
def adapters(run_root: Path) -> dict[str, Path]:
    """A tiny model, and adapters for it."""
    root = run_root / "adapters"
    model = save_family(root / "model", "llama")
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.save(str(model / "tokenizer.json"))
    made = {"model": model}
    for seed, name in enumerate(("first", "second", "third"), start=1):
        made[name] = save_adapter(model, root / name, (*ATTENTION, *FEED_FORWARD), seed=seed, r=8 * seed)
    return made


@pytest.fixture(scope="module")
def served_adapters(adapters: dict[str, Path], run_root: Path) -> Iterator[Served]:
    keys, limits = run_root / "adapters" / "keys.toml", run_root / "adapters" / "limits.toml"
    save_keys(
        keys,
        [
            ApiKey("admin", hash_of(ADMIN), "operators", admin=True),
            ApiKey("entitled", hash_of(ENTITLED), "acme"),
            ApiKey("other", hash_of(OTHER), "globex"),
        ],
    )
    limits.write_text('[tenants.acme]\nadapters = ["first", "sec*"]\n')
    settings = Settings(
        model=ModelSettings(reference=str(adapters["model"]), served_name="tiny", dtype="float32"),
        gateway=GatewaySettings(port=0, keys_file=keys, adapter_aliases={"acme-first": "tiny:first"}),
        scheduler=SchedulerSettings(
            max_rows=8, device_pages=256, adapters=AdapterSettings(slots=2, load={"first": str(adapters["first"])})
        ),
        limits=LimitsSettings(file=limits),
    )
    yield from serve(settings, run_root)


def ask(served: Served, model: str, key: str = ENTITLED, tokens: int = 12, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields}  # fmt: skip
    with served.http() as http:
        return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def tokens_of(served: Served, model: str, key: str = ENTITLED, tokens: int = 12, **fields: Any) -> list[int]:
    answer = ask(served, model, key, tokens, **fields)
    assert answer.status_code == httpx.codes.OK, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def post(served: Served, path: str, body: Mapping[str, object], key: str = ADMIN) -> httpx.Response:
    with served.http() as http:
        return http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def load(served: Served, name: str, path: Path | str) -> None:
    answer = post(served, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    assert answer.status_code == httpx.codes.OK, answer.text


def serves(served: Served) -> bool:
    try:
        return ask(served, "tiny:first", tokens=1).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def test_an_adapter_of_the_settings_is_served_under_its_names(served_adapters: Served) -> None:
    base, adapted = tokens_of(served_adapters, "tiny"), tokens_of(served_adapters, "tiny:first")
    assert base != adapted
    assert tokens_of(served_adapters, "acme-first") == adapted
    assert tokens_of(served_adapters, "tiny", lora_path="first") == adapted
    # A prefix that the other one has computed is never used.
    assert tokens_of(served_adapters, "tiny") == base


def test_adapters_are_loaded_replaced_and_unloaded_while_serving(
    served_adapters: Served, adapters: dict[str, Path]
) -> None:
    load(served_adapters, "second", adapters["second"])
    second = tokens_of(served_adapters, "tiny:second")
    load(served_adapters, "second", adapters["third"])
    third = tokens_of(served_adapters, "tiny:second")
    assert third != second
    load(served_adapters, "second", adapters["second"])
    assert tokens_of(served_adapters, "tiny:second") == second
    assert post(served_adapters, "/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == httpx.codes.OK
    assert ask(served_adapters, "tiny:second").status_code == httpx.codes.NOT_FOUND
    assert post(served_adapters, "/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 404


def test_others_find_neither_adapters_nor_their_administration(served_adapters: Served) -> None:
    hidden, missing = ask(served_adapters, "tiny:first", OTHER), ask(served_adapters, "tiny:never", OTHER)
    assert hidden.status_code == missing.status_code == httpx.codes.NOT_FOUND
    assert hidden.json()["error"]["message"].replace("first", "never") == missing.json()["error"]["message"]
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "first", "lora_path": "/nowhere"}
        assert post(served_adapters, path, body, ENTITLED).status_code == httpx.codes.FORBIDDEN
    with served_adapters.http() as http:
        listed = {
            key: [
                model["id"]
                for model in http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).json()["data"]
            ]
            for key in (ENTITLED, OTHER)
        }
    assert listed == {ENTITLED: ["tiny", "tiny:first"], OTHER: ["tiny"]}


def test_what_cannot_be_loaded_is_refused_and_the_rest_serves_on(
    served_adapters: Served, adapters: dict[str, Path]
) -> None:
    for path, reason in ((adapters["model"], "adapter_config.json"), ("/nowhere/at/all", "no such directory")):
        answer = post(served_adapters, "/v1/load_lora_adapter", {"lora_name": "wrong", "lora_path": str(path)})
        assert answer.status_code == httpx.codes.BAD_REQUEST
        assert reason in answer.json()["error"]["message"]
    assert serves(served_adapters)


@pytest.mark.parametrize(
    "name",
    ["worker", "scheduler", *(pytest.param(name, marks=pytest.mark.extended) for name in ("tokenizer", "detokenizer"))],
)
def test_an_answer_goes_on_with_the_same_tokens_when_a_service_dies(served_adapters: Served, name: str) -> None:
    wait_until(lambda: serves(served_adapters), RECOVERY_S)
    wanted = tokens_of(served_adapters, "tiny:first", tokens=400)
    found: list[list[int]] = []

    def run() -> None:
        found.append(tokens_of(served_adapters, "tiny:first", tokens=400))

    running = threading.Thread(target=run)
    running.start()
    wait_until(lambda: served_adapters.state().running_rows > 0 or bool(found))
    before = served_adapters.deployment.pid_of(name)
    served_adapters.deployment.kill(name)
    wait_until(lambda: served_adapters.deployment.pid_of(name) not in (None, before), RECOVERY_S)
    running.join(timeout=RECOVERY_S)
    assert found == [wanted]
    wait_until(lambda: serves(served_adapters), RECOVERY_S)


def test_what_was_loaded_is_loaded_again_when_scheduler_and_workers_die_together(
    served_adapters: Served, adapters: dict[str, Path]
) -> None:
    wait_until(lambda: serves(served_adapters), RECOVERY_S)
    load(served_adapters, "second", adapters["second"])
    wanted = tokens_of(served_adapters, "tiny:second")
    names = ("scheduler", "worker")
    before = [served_adapters.deployment.pid_of(name) for name in names]
    for name in names:
        served_adapters.deployment.kill(name)
    for name, pid in zip(names, before, strict=True):
        wait_until(lambda: served_adapters.deployment.pid_of(name) not in (None, pid), RECOVERY_S)  # noqa: B023
    wait_until(lambda: serves(served_adapters), RECOVERY_S)
    assert tokens_of(served_adapters, "tiny:second") == wanted
    assert post(served_adapters, "/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == httpx.codes.OK


def listed(output: str, name: str) -> str:
    """Return the adapter's row of the table; the output may have the deployment's log lines, too."""
    (row,) = [line for line in output.splitlines() if line.strip().startswith(f"{name} ")]
    return row


def test_the_command_lists_loads_pins_and_unloads(
    served_adapters: Served, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: serves(served_adapters), RECOVERY_S)
    scheduler = ("--scheduler", served_adapters.deployment.address_of("scheduler"))

    def pando(*arguments: str) -> tuple[int, str]:
        status = main(["adapters", *arguments, *scheduler])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    status, told = pando("load", "third", str(adapters["third"]))
    assert status == 0
    assert "third: rank 24" in told
    tokens_of(served_adapters, "tiny:third", ADMIN)
    status, told = pando("list")
    assert status == 0
    assert "2 adapters, 2 slots" in told
    assert "yes" in listed(told, "third")
    assert pando("pin", "third")[0] == 0
    assert "pinned" in listed(pando("list")[1], "third")
    assert pando("unpin", "third")[0] == 0
    assert "pinned" not in listed(pando("list")[1], "third")
    assert pando("unload", "third")[0] == 0
    assert ask(served_adapters, "tiny:third", ADMIN).status_code == httpx.codes.NOT_FOUND
    status, told = pando("unload", "third")
    assert (status, "not loaded" in told) == (1, True)
    status, told = pando("load", "third", "/nowhere/at/all")
    assert status != 0
    assert "no such directory" in told
    assert pando("pin", "third")[0] != 0


@pytest.mark.extended
def test_nothing_is_lost_while_a_thousand_loads_race_with_requests(
    served_adapters: Served, adapters: dict[str, Path]
) -> None:
    wait_until(lambda: serves(served_adapters), RECOVERY_S)
    load(served_adapters, "second", adapters["second"])
    right = {name: tokens_of(served_adapters, f"tiny:{name}") for name in ("first", "second")}
    load(served_adapters, "second", adapters["third"])
    right["third"] = tokens_of(served_adapters, "tiny:second")
    is_over = threading.Event()
    wrong: list[str] = []
    # By name: the number of answers, and the tokens of the newest one.
    answered, newest = Counter[str](), dict[str, list[int]]()

    def run(name: str, allowed: list[list[int]]) -> None:
        while not is_over.is_set():
            answer = ask(served_adapters, f"tiny:{name}")
            if answer.status_code == httpx.codes.OK:
                newest[name] = answer.json()["choices"][0]["token_ids"]
                answered[name] += 1
                if newest[name] not in allowed:
                    wrong.append(answer.text)
            elif not (name == "second" and answer.status_code == httpx.codes.NOT_FOUND):
                wrong.append(f"{answer.status_code} {answer.text}")

    running = [
        threading.Thread(target=run, args=arguments)
        for arguments in (("first", [right["first"]]), ("second", [right["second"], right["third"]]))
    ]
    for thread in running:
        thread.start()
    try:
        for number in range(500):
            file = "second" if number % 2 else "third"
            load(served_adapters, "second", adapters[file])
            if number % 9 == 0:
                # Now and then it stays until each has answered a request that was sent after the load: the second one
                # from here on. So the number of answers does not depend on the machine's speed.
                wanted = {name: answered[name] + 2 for name in ("first", "second")}
                wait_until(lambda: bool(wrong) or all(answered[name] >= wanted[name] for name in wanted), RECOVERY_S)  # noqa: B023
                assert newest["second"] == right[file]
            unloaded = post(served_adapters, "/v1/unload_lora_adapter", {"lora_name": "second"})
            assert unloaded.status_code == httpx.codes.OK
    finally:
        is_over.set()
        for thread in running:
            thread.join(timeout=RECOVERY_S)
    assert wrong == []
    # Also the adapter that is loaded and unloaded has answered.
    assert min(answered[name] for name in ("first", "second")) >= 100, answered
    wait_until(served_adapters.is_idle)
