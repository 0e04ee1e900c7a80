"""The handshake of services: both sides of a connection state their protocol, and refuse one that they do not know.

Clients state theirs in the header `user-agent` of every call, servers in the first metadata of every stream. A release
understands the protocol before its own and the one after it, so that a deployment can be upgraded service by service.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import grpc

from common.version import version

if TYPE_CHECKING:
    from collections.abc import Mapping

# Raise it by 1 in a release whose services need messages, fields or behaviour that the release before does not have.
PROTOCOL = 2
# Peers of before the handshake state none.
FIRST_PROTOCOL = 1
MAX_DIFFERENCE = 1
PROTOCOL_KEY, BUILD_KEY = "pando-protocol", "pando-build"
USER_AGENT_KEY = "user-agent"
# For tests of upgrades: the protocol that this process states.
PROTOCOL_VARIABLE = "PANDO_FAKE_PROTOCOL"
_USER_AGENT = re.compile(r"pando/(?P<version>\S+) protocol/(?P<protocol>\d{1,9})\b")


@dataclass(frozen=True, slots=True)
class Build:
    """A version of Pando and the protocol that it speaks."""

    protocol: int = FIRST_PROTOCOL
    version: str = "of before the handshake"

    def __str__(self) -> str:
        return f"protocol {self.protocol} (version {self.version})"

    @property
    def user_agent(self) -> str:
        return f"pando/{self.version} protocol/{self.protocol}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The entries in the first metadata of a server's streams."""
        return ((PROTOCOL_KEY, str(self.protocol)), (BUILD_KEY, self.version))


def refusal(server: Build, client: Build) -> str | None:
    """Return why two builds cannot work together; None if they can."""
    if abs(server.protocol - client.protocol) <= MAX_DIFFERENCE:
        return None
    return (
        f"the server has {server} and the client {client}, but they may differ by at most {MAX_DIFFERENCE}: "
        f"upgrade the {'server' if server.protocol < client.protocol else 'client'}"
    )


@cache
def own_build() -> Build:
    """Return the build of this process."""
    return Build(int(os.environ.get(PROTOCOL_VARIABLE, PROTOCOL)), version())


def client_build(metadata: Mapping[str, Any]) -> Build:  # Any: text or bytes, by the key
    """Return the build that a client stated with its call."""
    found = _USER_AGENT.search(str(metadata.get(USER_AGENT_KEY, "")))
    return Build(int(found["protocol"]), found["version"]) if found else Build()


def check_server(metadata: Mapping[str, Any]) -> None:
    """Check the build that a server stated in the first metadata of a stream.

    Raises:
        grpc.aio.AioRpcError: it cannot work with this one.
    """
    stated = str(metadata.get(PROTOCOL_KEY, ""))
    peer = Build(int(stated), str(metadata.get(BUILD_KEY, ""))) if stated.isdecimal() else Build()
    reason = refusal(peer, own_build())
    if reason is not None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, nothing, nothing, details=reason)
