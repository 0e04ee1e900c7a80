"""What the gateway records in its audit log: acts of administrators, and changes of keys and limits."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from common.audit.chain import AuditChain, files_of
from common.audit.log import AuditLog
from common.audit.records import AuditRecord, read_records
from common.audit.verification import verify_chain
from common.errors import UnavailableError
from common.settings import GatewaySettings
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.fakes.pipeline import FakePipeline, says
from tests.gateway.support import FakedGateway
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx

ROOT = {"authorization": "Bearer root-secret"}
ANN = {"authorization": "Bearer ann-secret"}
KEYS = [
    ApiKey("root", hash_of("root-secret"), "ops", user="olga", admin=True),
    ApiKey("ann", hash_of("ann-secret"), "acme"),
]
ACTS: list[tuple[str, str, dict[str, Any] | None, str]] = [
    ("POST", "/flush_cache", None, "cache.flush"),
    ("GET", "/flush_cache", None, "cache.flush"),
    ("POST", "/abort_request", {"abort_all": True}, "requests.abort"),
    ("POST", "/abort_request", {"rid": "one"}, "requests.abort"),
    ("POST", "/update_weights_from_disk", {"model_path": "/weights"}, "weights.update"),
    ("POST", "/sleep?level=1", None, "model.sleep"),
    ("POST", "/wake_up?tags=weights", None, "model.wake_up"),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, "adapter.load"),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}, "adapter.unload"),
]


@pytest.fixture
def chain(tmp_path: Path) -> AuditChain:
    return AuditChain(tmp_path / "audit", "gateway", 1 << 20)


@pytest.fixture
def gateway(tmp_path: Path, chain: AuditChain) -> Iterator[FakedGateway]:
    save_keys(tmp_path / "keys.toml", KEYS)
    (tmp_path / "limits.toml").write_text("[default]\nconcurrent = 9\n")
    log = AuditLog(chain, "gateway")
    yield FakedGateway(
        FakePipeline(says("x")),
        GatewaySettings(keys_file=tmp_path / "keys.toml"),
        limits_file=tmp_path / "limits.toml",
        audit=log,
    )
    log.close()
    files = files_of(chain.directory)
    assert verify_chain(files).broken is None
    content = b"".join(path.read_bytes() for path in files).decode()
    assert "secret" not in content
    assert not any(key.sha256 in content for key in KEYS)


@pytest.fixture
def recorded(chain: AuditChain) -> Callable[[str], list[dict[str, Any]]]:
    def read(action: str) -> list[dict[str, Any]]:
        parts = [part for path in files_of(chain.directory) for part in read_records(path.read_bytes())]
        fields = [dict(part.fields) for part in parts if isinstance(part, AuditRecord)]
        return [each for each in fields if each["action"] == action]

    return read


@pytest.mark.parametrize(("method", "path", "body", "action"), ACTS)
async def test_an_administrators_act_is_recorded_with_its_caller(
    gateway: FakedGateway,
    recorded: Callable[[str], list[dict[str, Any]]],
    method: str,
    path: str,
    body: dict[str, Any] | None,
    action: str,
) -> None:
    async with gateway.client() as client:
        response = await client.request(method, path, json=body, headers={**ROOT, "x-request-id": "r1"})
        assert response.status_code in (200, 404), response.text
        refused = await client.request(method, path, json=body, headers=ANN)
    assert (refused.status_code == 403) == (body != {"rid": "one"})
    begun, done = recorded(action)
    assert (begun["outcome"], done["outcome"], done["began"]) == ("begun", "done", begun["sequence"])
    assert begun["actor"] == {"tenant": "ops", "subject": "user/olga", "credential": "key/root"}
    assert begun["request_id"] == "r1"


async def test_an_act_that_fails_is_recorded(
    gateway: FakedGateway, recorded: Callable[[str], list[dict[str, Any]]]
) -> None:
    gateway.administration.refusal = UnavailableError("away")
    response = await gateway.post("/update_weights_from_disk", {"model_path": "/weights"}, ROOT)
    assert response.status_code == 503
    await until(lambda: len(recorded("weights.update")) == 2)
    assert [each["outcome"] for each in recorded("weights.update")] == ["begun", "failed"]


async def test_an_act_is_refused_while_the_disk_is_full(
    gateway: FakedGateway, chain: AuditChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: files_of(chain.directory))

    def full(_descriptor: int, _content: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("common.audit.chain.os.write", full)
        response = await gateway.post("/flush_cache", None, ROOT)
        assert response.status_code == 503
        assert "audit log" in response.json()["error"]["message"]
        assert gateway.administration.flushes == 0
        # Requests of others are served.
        assert (await gateway.post("/v1/completions", {"model": "tiny", "prompt": "Hi"}, ANN)).status_code == 200
    assert (await gateway.post("/flush_cache", None, ROOT)).status_code == 200
    assert gateway.administration.flushes == 1


async def test_changed_keys_are_recorded_without_their_hashes(
    gateway: FakedGateway, recorded: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    await until(lambda: recorded("keys.loaded"))
    assert recorded("keys.loaded")[0]["what"] == {"ids": ["root", "ann"]}
    changed = [KEYS[0], ApiKey("bea", hash_of("bea-secret"), "acme", vouches_for_users=True)]
    save_keys(tmp_path / "keys.toml", changed)
    async with gateway.client() as client:
        await until_status(client, {"authorization": "Bearer bea-secret"}, 200)
    await until(lambda: recorded("keys.changed"))
    [change] = recorded("keys.changed")
    assert change["what"] == {
        "added": [{"id": "bea", "tenant": "acme", "vouches_for_users": True}],
        "removed": [{"id": "ann", "tenant": "acme"}],
        "changed": [],
    }
    save_keys(tmp_path / "keys.toml", [KEYS[0], ApiKey("bea", hash_of("other-secret"), "acme")])
    async with gateway.client() as client:
        await until_status(client, {"authorization": "Bearer other-secret"}, 200)
    await until(lambda: len(recorded("keys.changed")) == 2)
    assert recorded("keys.changed")[1]["what"]["changed"] == [{"id": "bea", "tenant": "acme"}]


async def test_changed_limits_are_recorded(
    gateway: FakedGateway, recorded: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "limits.toml").write_text("[default]\nconcurrent = 8\n")

    async def changed() -> list[dict[str, Any]]:
        await gateway.post("/v1/completions", {"model": "tiny", "prompt": "Hi"}, ANN)
        return recorded("limits.changed")

    found: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while not found:
            found = await changed()
    assert found[0]["what"] == {"default": {"before": {"concurrent": 9}, "after": {"concurrent": 8}}}


async def until_status(client: httpx.AsyncClient, headers: dict[str, str], status: int) -> None:
    async with asyncio.timeout(60):
        while (await client.get("/v1/models", headers=headers)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
