"""The audit log of a deployment: one of each act, kills of its writers, and a check of both chains afterwards."""

from __future__ import annotations

import os
import re
import shutil
import signal
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import orjson
import pytest
import tokenizers

from common.audit.chain import files_of
from common.rpc.options import CHANNEL_OPTIONS
from common.settings import (
    AuditSettings,
    GatewaySettings,
    LimitsSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
)
from deploy.cli import main
from deploy.supervisor.layout import free_port
from gateway.identity.keys import ApiKey, hash_of, save_keys
from protos.gen.pando.v1 import common_pb2, operations_pb2, operations_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.conftest import serve
from tests.e2e.test_restarts import kill_and_wait_until_replaced
from tests.services.worker.engine.adapters.peft_adapters import ATTENTION, save_adapter
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.slow

TOKEN = "open-sesame"
ADMIN = {"authorization": "Bearer root-secret"}
APPLICATION = {"authorization": "Bearer app-secret"}
METADATA = (("authorization", f"Bearer {TOKEN}"),)
PROMPT = list(range(40, 104))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("audited")
    model = save_family(root / "model", "llama")
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0")).save(str(model / "tokenizer.json"))
    shutil.copytree(model, root / "newer")
    (root / "limits.toml").write_text("[tenants.acme]\nweight = 2.0\n")
    keys = [
        ApiKey("root", hash_of("root-secret"), "ops", admin=True),
        ApiKey("app", hash_of("app-secret"), "acme", vouches_for_users=True),
    ]
    save_keys(root / "keys.toml", keys)
    return {
        "root": root,
        "model": model,
        "newer": root / "newer",
        "adapter": save_adapter(model, root / "adapter", ATTENTION, r=8),
        "audit": root / "audit",
    }


@pytest.fixture(scope="module")
def audited(files: dict[str, Path], run_root: Path) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(reference=str(files["model"]), served_name="tiny", dtype="float32"),
        gateway=GatewaySettings(port=0, keys_file=files["root"] / "keys.toml", metrics_port=free_port("127.0.0.1")),
        scheduler=SchedulerSettings.model_validate(
            {
                "max_rows": 8,
                "device_pages": 256,
                "admin_token": TOKEN,
                "adapters": {"slots": 2},
                "cache": {"epoch_seconds": 0.5, "promotion_epochs": 1000},
            }
        ),
        limits=LimitsSettings(file=files["root"] / "limits.toml"),
        audit=AuditSettings(directory=files["audit"]),
    )
    yield from serve(settings, run_root)


def records(files: dict[str, Path], service: str, action: str) -> list[dict[str, Any]]:
    lines = [line for path in files_of(files["audit"] / service) for line in path.read_bytes().splitlines()]
    found = [orjson.loads(line) for line in lines]
    return [each for each in found if each["action"] == action]


def outcomes(files: dict[str, Path], service: str, action: str) -> list[str]:
    return [each["outcome"] for each in records(files, service, action)]


def ask(served: Served, user: str) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "user": user}
    with served.http() as http:
        http.post("/v1/completions", json=body, headers=APPLICATION).raise_for_status()


def administer(served: Served, path: str, body: dict[str, Any] | None = None) -> None:
    with served.http() as http:
        answer = http.post(path, json=body, headers=ADMIN)
    assert answer.status_code == httpx.codes.OK, answer.text


def test_every_act_is_in_the_chains_of_gateway_and_scheduler(audited: Served, files: dict[str, Path]) -> None:
    for user in ("ann", "bob", "cid"):
        ask(audited, user)
    wait_until(lambda: records(files, "scheduler", "cache.promoted"))
    address = audited.deployment.address_of("scheduler")
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        stub.Pin(scheduler_pb2.PinRequest(token_ids=PROMPT), metadata=METADATA)
        stub.Unpin(scheduler_pb2.UnpinRequest(token_ids=PROMPT), metadata=METADATA)
        subject = common_pb2.Subject(tenant="acme", name="user/ann")
        stub.Forget(scheduler_pb2.ForgetRequest(subject=subject), metadata=METADATA)
        level = operations_pb2.SetLogLevelRequest(level=operations_pb2.LOG_LEVEL_INFO)
        operations_pb2_grpc.OperationsStub(channel).SetLogLevel(level)
    administer(audited, "/v1/load_lora_adapter", {"lora_name": "first", "lora_path": str(files["adapter"])})
    administer(audited, "/v1/unload_lora_adapter", {"lora_name": "first"})
    administer(audited, "/update_weights_from_disk", {"model_path": str(files["newer"]), "weight_version": "2"})
    administer(audited, "/sleep?level=1")
    administer(audited, "/wake_up")
    administer(audited, "/flush_cache")
    administer(audited, "/abort_request", {"abort_all": True})
    for action in ("adapter.load", "adapter.unload", "weights.update", "model.sleep", "model.wake_up", "cache.flush"):
        for service in ("gateway", "scheduler"):
            assert outcomes(files, service, action) == ["begun", "done"], (service, action)
        of_gateway, of_scheduler = (records(files, service, action)[0] for service in ("gateway", "scheduler"))
        assert of_gateway["actor"] == {"tenant": "ops", "subject": "key/root", "credential": "key/root"}
        # The same request, so the scheduler's record names the administrator, too.
        assert of_gateway["request_id"] == of_scheduler["request_id"]
    assert outcomes(files, "gateway", "requests.abort") == ["begun", "done"]
    for action in ("cache.pin", "cache.unpin", "cache.forget", "log.set_level"):
        assert outcomes(files, "scheduler", action) == ["begun", "done"], action
    [*_, loaded] = records(files, "scheduler", "weights.loaded")
    assert loaded["what"] == {"model": str(files["newer"]), "version": "2"}
    assert main(["audit", "verify", str(files["audit"])]) == 0


def test_changed_keys_and_limits_are_in_the_chains(
    audited: Served, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    keys = str(files["root"] / "keys.toml")
    main(["keys", "create", "--file", keys, "--tenant", "acme"])
    secret = capsys.readouterr().out.strip()
    ask_as = {"authorization": f"Bearer {secret}"}

    def status() -> int:
        with audited.http() as http:
            return http.get("/v1/models", headers=ask_as).status_code

    wait_until(lambda: status() == 200)
    key_id = secret.split("-")[1]
    main(["keys", "revoke", "--file", keys, key_id])
    wait_until(lambda: status() == 401)
    (files["root"] / "limits.toml").write_text("[tenants.acme]\nweight = 3.0\n")
    wait_until(lambda: records(files, "scheduler", "limits.changed"))

    def recorded() -> list[dict[str, Any]]:
        ask(audited, "ann")
        return records(files, "gateway", "limits.changed")

    wait_until(recorded)
    changed = records(files, "gateway", "keys.changed")
    assert [(list(map(_id, each["what"]["added"])), list(map(_id, each["what"]["removed"]))) for each in changed] == [
        ([key_id], []),
        ([], [key_id]),
    ]
    difference = {"tenants.acme": {"before": {"weight": 2.0}, "after": {"weight": 3.0}}}
    assert records(files, "scheduler", "limits.changed")[0]["what"] == difference
    content = b"".join(path.read_bytes() for path in files["audit"].glob("*/*.jsonl")).decode()
    for text in (secret, hash_of(secret), TOKEN, "root-secret", ", ".join(map(str, PROMPT[:3]))):
        assert text not in content


def test_chains_continue_after_kill_9_and_a_truncated_one_is_noticed(
    audited: Served, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    chain = files["audit"] / "gateway"
    administer(audited, "/flush_cache")
    head = head_of(audited)
    for service in ("gateway", "scheduler"):
        kill_and_wait_until_replaced(audited, service)
        wait_until(audited.is_ready)
    # A line that was being written when its process was killed.
    newest = files_of(chain)[-1]
    pid = audited.deployment.pid_of("gateway")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with newest.open("ab") as file:
        file.write(b'{"sequence":99,"act')
    kill_and_wait_until_replaced(audited, "gateway")
    wait_until(audited.is_ready)
    administer(audited, "/flush_cache")
    assert len(records_that_parse(chain, "audit.repaired")) == 1
    capsys.readouterr()
    assert main(["audit", "verify", str(chain), "--head", head]) == 0
    assert "1 unfinished lines" in capsys.readouterr().out
    assert main(["audit", "verify", str(files["audit"] / "scheduler")]) == 0
    cut = files["root"] / "cut"
    shutil.copytree(chain, cut)
    number = int(head.partition(":")[0])
    for path in files_of(cut):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: number - 1]))
    assert main(["audit", "verify", str(cut)]) == 0
    assert main(["audit", "verify", str(cut), "--head", head]) == 1


def head_of(served: Served) -> str:
    """Return number and hash of the last record, as the gateway's metrics show them."""
    with served.http() as http:
        text = http.get("/metrics", headers=ADMIN).text
    sequence, head = (
        int(float(match[1]))
        for name in ("pando_audit_records", "pando_audit_head")
        if (match := re.search(rf"^{name} (\S+)$", text, re.MULTILINE))
    )
    assert sequence > 0
    return f"{sequence}:{head:012x}"


def records_that_parse(chain: Path, action: str) -> list[dict[str, Any]]:
    found = []
    for line in (line for path in files_of(chain) for line in path.read_bytes().splitlines()):
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if fields["action"] == action:
            found.append(fields)
    return found


def _id(key: dict[str, Any]) -> str:
    return str(key["id"])
