"""Who is let in over TCP: peers with a certificate of our authority, and the token where one is asked for."""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import ValidationError

from common.errors import ConfigurationError
from common.rpc.channel import is_serving, open_channel
from common.rpc.security import Security, read_security
from common.rpc.server import RpcServer
from common.settings import RpcSettings
from tests.fakes.certificates import Authority, Identity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAME = "pando.v1.Worker"
TOKEN = "a-secret-of-all-services"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def serving(identity: Identity, **more: Any) -> AsyncIterator[RpcServer]:
    server = RpcServer(NAME, "127.0.0.1:0", read_security(identity.settings(**more)))
    await server.start()
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop(0)


async def reaches(port: int, security: Security, certified_as: str | None = None) -> bool:
    async with open_channel(f"127.0.0.1:{port}", security, certified_as) as channel:
        return await is_serving(channel, NAME, timeout_s=30)


async def test_a_peer_with_a_certificate_of_our_authority_is_let_in(authority: Authority) -> None:
    async with serving(authority.issue("worker")) as server:
        assert await reaches(server.port, read_security(authority.issue("scheduler").settings()))


async def test_other_clients_are_refused(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "other", "somebody").issue("scheduler", believes=authority.path)
    expired = authority.issue("late", expired=True)
    async with serving(authority.issue("worker")) as server:
        assert not await reaches(server.port, read_security(stranger.settings()))
        assert not await reaches(server.port, read_security(expired.settings()))
        assert not await reaches(server.port, Security(plaintext=True))
        bare = grpc.ssl_channel_credentials(authority.path.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", bare) as channel:
            assert not await is_serving(channel, NAME, timeout_s=30)


async def test_a_server_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    impostor = Authority(tmp_path / "other", "somebody").issue("worker", believes=authority.path)
    async with serving(impostor) as server:
        assert not await reaches(server.port, read_security(authority.issue("scheduler").settings()))


async def test_a_server_found_by_a_name_shows_a_certificate_of_that_name(authority: Authority) -> None:
    client = read_security(authority.issue("tokenizer").settings())
    async with serving(authority.issue("scheduler", hosts=["schedulers.llm.svc"])) as server:
        assert not await reaches(server.port, client)
        assert await reaches(server.port, client, "schedulers.llm.svc")
        assert not await reaches(server.port, client, "workers.llm.svc")


async def test_a_renewed_server_certificate_is_shown_without_a_restart(authority: Authority) -> None:
    worker = authority.issue("worker", expired=True)
    client = read_security(authority.issue("scheduler").settings())
    async with serving(worker) as server:
        assert not await reaches(server.port, client)
        replace(worker, authority.issue("renewed"))
        assert await reaches(server.port, client)


async def test_a_renewed_client_certificate_is_used_by_the_next_call(authority: Authority) -> None:
    scheduler = authority.issue("scheduler", expired=True)
    async with (
        serving(authority.issue("worker")) as server,
        open_channel(f"127.0.0.1:{server.port}", read_security(scheduler.settings())) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=30)
        replace(scheduler, authority.issue("renewed"))
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_briefly_missing_certificate_files_change_nothing(authority: Authority) -> None:
    worker = authority.issue("worker")
    security = read_security(worker.settings())
    before = security.load()
    worker.certificate.unlink()
    assert security.load() == before


async def test_without_the_token_only_health_is_answered(authority: Authority) -> None:
    client = authority.issue("person", roles=["operator"])
    async with serving(authority.issue("worker"), token=TOKEN) as server:
        assert await reflects(server.port, read_security(client.settings(token=TOKEN))) is None
        for settings in (client.settings(), client.settings(token="another-secret-of-someone")):
            assert await reflects(server.port, read_security(settings)) is grpc.StatusCode.UNAUTHENTICATED
        assert await reaches(server.port, read_security(client.settings()))


async def test_probes_are_answered_in_plaintext_at_a_separate_port_and_learn_only_health(
    authority: Authority,
) -> None:
    async with serving(authority.issue("worker"), probe_port=0) as server:
        assert server.probe_port
        assert await reaches(server.probe_port, Security(plaintext=True))
        assert await reflects(server.probe_port, Security(plaintext=True)) is grpc.StatusCode.UNIMPLEMENTED


async def test_plaintext_over_tcp_has_to_be_asked_for() -> None:
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:0 is TCP: .*rpc\.plaintext"):
        await RpcServer(NAME, "127.0.0.1:0").start()
    with pytest.raises(ConfigurationError, match=r"rpc\.plaintext"):
        open_channel("127.0.0.1:50053")


async def test_a_file_that_is_not_there_is_named(authority: Authority, tmp_path: Path) -> None:
    settings = RpcSettings(certificate=tmp_path / "missing.pem", key=authority.path, authority=authority.path)
    with pytest.raises(ConfigurationError, match=r"missing\.pem"):
        read_security(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"certificate": "a.pem"},
        {"certificate": "a.pem", "key": "a.key", "authority": "ca.pem", "plaintext": True},
        {"token": TOKEN, "plaintext": True},
        {"certificate": "a.pem", "key": "a.key", "authority": "ca.pem", "token": "short"},
    ],
)
def test_settings_that_contradict_themselves_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RpcSettings.model_validate(settings)


async def reflects(port: int, security: Security) -> grpc.StatusCode | None:
    """Ask what services there are; return the status of a refusal."""
    async with open_channel(f"127.0.0.1:{port}", security) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # its stubs know no aio
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        # A stream that is refused while the client still writes sometimes ends as INTERNAL there, whatever the status.
        for _ in range(5):
            call = stub.ServerReflectionInfo(iter([question]), timeout=60)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                code = error.code()
            else:
                return None
            finally:
                call.cancel()
            if code is not grpc.StatusCode.INTERNAL:
                break
    return code


def replace(identity: Identity, by: Identity) -> None:
    """Put other files in the place of an identity's, as whoever renews certificates does."""
    for old, new in ((identity.certificate, by.certificate), (identity.key, by.key)):
        before = old.stat().st_mtime_ns
        shutil.copy(new, old)
        os.utime(old, ns=(before + 1_000_000, before + 1_000_000))
