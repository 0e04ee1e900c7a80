"""HTTPS by the gateway itself, with a certificate that may be renewed."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from typing import TYPE_CHECKING

import httpx
import pytest

from common.errors import ConfigurationError
from common.settings import TlsSettings
from gateway.app import create_probe_app
from gateway.server.http_server import HttpsFiles, ProbeServer, https_files, keep_renewing
from tests.fakes.certificates import Authority, Identity
from tests.gateway.listening import listening
from tests.gateway.support import gateway_saying
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def subject_shown(context: ssl.SSLContext, authority: Authority) -> str:
    """Return the common name in the certificate that a server with `context` shows."""
    client_context = ssl.create_default_context(cafile=str(authority.path))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(incoming, outgoing, server_side=True)
    client_in, client_out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(client_in, client_out, server_hostname="localhost")
    while True:
        done = [_step(client), _step(server)]
        incoming.write(client_out.read())
        client_in.write(outgoing.read())
        if all(done):
            break
    certificate = client.getpeercert()
    assert certificate is not None
    return dict(pair for group in certificate["subject"] for pair in group)["commonName"]  # type: ignore[misc]  # as typeshed has it, groups may hold anything


def _step(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def files_of(identity: Identity) -> HttpsFiles:
    found = https_files(TlsSettings(certificate=identity.certificate, key=identity.key))
    assert found is not None
    return found


async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first, second = authority.issue("first"), authority.issue("second")
    files, context = files_of(first), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    files.load_into(context)
    assert subject_shown(context, authority) == "first"
    renewing = asyncio.create_task(keep_renewing(files, context, interval_s=0.01))
    try:
        await asyncio.sleep(0.02)
        # A certificate without its key does not fit: the old pair stays.
        replace(first.certificate, second.certificate)
        await asyncio.sleep(0.05)
        assert subject_shown(context, authority) == "first"
        replace(first.key, second.key)
        await until(lambda: subject_shown(context, authority) == "second")
    finally:
        renewing.cancel()


def test_without_files_there_is_no_https() -> None:
    assert https_files(TlsSettings()) is None


def test_a_certificate_and_the_key_of_another_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first, second = authority.issue("first"), authority.issue("second")
    with pytest.raises(ConfigurationError, match=r"gateway\.tls\.certificate"):
        https_files(TlsSettings(certificate=first.certificate, key=second.key))
    with pytest.raises(ConfigurationError, match="belong together"):
        https_files(TlsSettings(certificate=first.certificate))
    with pytest.raises(ConfigurationError, match=r"missing\.pem"):
        https_files(TlsSettings(certificate=tmp_path / "missing.pem", key=first.key))


def test_clients_certificates_are_asked_for_only_over_tls(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gateway\.tls\.client_authority"):
        https_files(TlsSettings(client_authority=Authority(tmp_path).path))


async def test_a_client_shows_a_certificate_of_the_authority_or_is_refused(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path / "other", "somebody")
    own = authority.issue("gateway")
    files = https_files(TlsSettings(certificate=own.certificate, key=own.key, client_authority=authority.path))
    gateway = gateway_saying("x")
    async with listening(gateway, https=files) as port:
        shown = authority.issue("client"), authority.issue("late", expired=True), stranger.issue("guest"), None
        assert [await is_let_in(port, authority, each) for each in shown] == [True, False, False, False]


async def is_let_in(port: int, authority: Authority, shown: Identity | None) -> bool:
    context = ssl.create_default_context(cafile=str(authority.path))
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    try:
        async with httpx.AsyncClient(verify=context, timeout=60, trust_env=False) as http:
            return (await http.get(f"https://127.0.0.1:{port}/health")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


async def test_without_a_client_certificate_only_health_and_readiness_are_served() -> None:
    gateway = gateway_saying("x")
    probes = ProbeServer(create_probe_app(gateway.context), "127.0.0.1", 0)
    running = asyncio.create_task(probes.run())
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{probes.port}", timeout=60, trust_env=False) as http:
            answers = [await http.get(path) for path in ("/health", "/ready", "/metrics", "/v1/models", "/flush_cache")]
        assert [answer.status_code for answer in answers] == [200, 200, 404, 404, 404]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def replace(old: Path, new: Path) -> None:
    before = old.stat().st_mtime_ns
    shutil.copy(new, old)
    os.utime(old, ns=(before + 1_000_000, before + 1_000_000))
