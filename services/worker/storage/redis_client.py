"""Clients of one Redis or Valkey server, of a cluster, or of the master that sentinels name, by URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

if TYPE_CHECKING:
    from collections.abc import Callable

# Any: redis-py has no types for these.
_node_of: Any = ClusterNode
_sentinel_of: Any = Sentinel
_parse_url: Any = parse_url

_CLUSTER_PORT, _SENTINEL_PORT = 6379, 26379
# Before each retry the client of a cluster asks another node for the slots: one that it knows may be gone.
_CLUSTER_RETRIES = 2
# Options of a URL that `parse_url` derives from its scheme and host.
_OF_HOST = ("host", "port", "connection_class")


def client_of(url: str, timeout_s: float, connections: int) -> Callable[[], redis.Redis | RedisCluster]:
    """Return a function that makes a client; that of a cluster or of sentinels connects at once.

    Args:
        url: `redis://`, `rediss://` or `unix://` for a server. `redis+cluster://HOST:PORT,HOST:PORT` names some nodes
            of a cluster; `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DATABASE` the sentinels of a service, which may
            have credentials of their own (`?sentinel_username=…&sentinel_password=…`). `rediss+…` uses TLS. User,
            password and options (`?ssl_ca_certs=…`) are written as in redis-py's URLs.
        timeout_s: Limit on connecting, and on each part of an answer.
        connections: Maximum number of connections to a server.

    Raises:
        ValueError: the URL is invalid.
    """
    scheme, _, rest = url.partition("://")
    base, _, kind = scheme.partition("+")
    common: dict[str, Any] = {  # Any: the types of the client's options
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # Retries are left to callers, which have deadlines.
        "retry": Retry(NoBackoff(), 0),
    }
    if not kind:
        client = redis.Redis.from_url(url, max_connections=connections, **common)
        return lambda: client
    if base not in ("redis", "rediss") or kind not in ("cluster", "sentinel"):
        raise ValueError(f"unknown scheme {scheme}")
    credentials, _, hosts = rest.partition("?")[0].partition("/")[0].rpartition("@")
    path, _, query = rest.partition("/")[2].partition("?") if "/" in rest else ("", "", rest.partition("?")[2])
    common |= {"max_connections": connections, "ssl": base == "rediss"}
    if kind == "cluster":
        nodes = [_node_of(*each) for each in _addresses(hosts, _CLUSTER_PORT)]
        common |= _options(base, credentials, path, query) | {"retry": Retry(NoBackoff(), _CLUSTER_RETRIES)}
        if common.pop("db", 0):
            raise ValueError("a cluster has no databases other than 0")
        return lambda: RedisCluster(startup_nodes=nodes, require_full_coverage=False, **common)
    service, _, database = path.partition("/")
    if not service:
        raise ValueError("the name of the service that the sentinels watch is missing: redis+sentinel://HOST:PORT/NAME")
    options = _options(base, credentials, database, query)
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    sentinels = _addresses(hosts, _SENTINEL_PORT)
    return lambda: _sentinel_of(sentinels, sentinel_kwargs=common | own, **common, **options).master_for(service)


def _addresses(hosts: str, default_port: int) -> list[tuple[str, int]]:
    found = [urlsplit(f"//{host}") for host in hosts.split(",")]
    if not all(each.hostname for each in found):
        raise ValueError("a host is missing")
    return [(each.hostname or "", each.port or default_port) for each in found]


def _options(scheme: str, credentials: str, database: str, query: str) -> dict[str, Any]:
    """Return the client's options in a URL with one host."""
    parsed = _parse_url(f"{scheme}://{credentials and credentials + '@'}host/{database}{query and '?' + query}")
    return {name: value for name, value in parsed.items() if name not in _OF_HOST}
