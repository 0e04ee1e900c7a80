"""Health check of the service in this container: `python -m deploy.health scheduler` exits with 0 if it can serve.

It reads the same settings as the service, from the environment and the file that PANDO_CONFIG names.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import httpx

from common.errors import ConfigurationError
from common.rpc.channel import is_serving, open_channel
from common.rpc.security import Security, read_security
from common.settings import SettingsParser, parse_settings

if TYPE_CHECKING:
    from common.settings import Settings

SERVICES = ("tokenizer", "scheduler", "worker", "detokenizer")
TIMEOUT_S = 4.0


def main() -> int:
    """Check the service that the command line names; return 0 if it can serve a request, otherwise 1."""
    parser = SettingsParser(prog="python -m deploy.health", description=__doc__, allow_abbrev=False)
    parser.add_argument("service", choices=("gateway", *SERVICES))
    try:
        settings, arguments = parse_settings(parser, sys.argv[1:], os.environ)
    except ConfigurationError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return 0 if asyncio.run(is_healthy(settings, arguments.service)) else 1


async def is_healthy(settings: Settings, service: str) -> bool:
    """Whether `service`, configured by `settings` and running on this host, can serve a request."""
    if service == "gateway" and settings.gateway.tls.client_authority is not None and settings.rpc.probe_port:
        return await _answers(f"http://{local(f'{settings.gateway.host}:{settings.rpc.probe_port}')}/ready")
    if service == "gateway":
        scheme = "http" if settings.gateway.tls.certificate is None else "https"
        return await _answers(f"{scheme}://{local(f'{settings.gateway.host}:{settings.gateway.port}')}/ready")
    address, security = local(getattr(settings, service).address), read_security(settings.rpc)
    if security.probe_port and security.needs_tls(address):
        # The certificate's name is the service's host name, not the loopback address.
        address, security = f"{address.rpartition(':')[0]}:{security.probe_port}", Security(plaintext=True)
    async with open_channel(address, security) as channel:
        return await is_serving(channel, f"pando.v1.{service.capitalize()}", TIMEOUT_S)


async def _answers(url: str) -> bool:
    try:
        # The server is this host, at an address that is not in its certificate.
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=False) as client:
            return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def local(address: str) -> str:
    """Return the address at which this host reaches a server that listens on `address`, even on all interfaces."""
    host, colon, port = address.rpartition(":")
    if not colon or host == "unix":
        return address
    return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]', '::': '[::1]', '': '127.0.0.1'}.get(host, host) }:{port}"


if __name__ == "__main__":
    sys.exit(main())
