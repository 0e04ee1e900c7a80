"""Storage in a Redis or Valkey server or cluster."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import redis
from redis.exceptions import RedisClusterException

from services.worker.storage.interface import StorageError, StorageTimeoutError
from services.worker.storage.redis_client import client_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from services.worker.storage.interface import Blob

_PREFIX = "pando:kv:"


class RedisStorage:
    """Keeps each object as one string; see `Storage`. In a cluster, objects are spread over all nodes by name.

    The server's settings decide which objects are evicted (`maxmemory`, `maxmemory-policy allkeys-lru`).
    """

    def __init__(self, url: str, timeout_s: float, connections: int) -> None:
        """Use the server at `url`; it is connected to when it is first needed.

        Args:
            url: Where it is, and how to log in; see `client_of`.
            timeout_s: How long to wait for a connection, and for each part of an answer.
            connections: At most so many at the same time.

        Raises:
            StorageError: the URL makes no sense.
        """
        try:
            self._make_client = client_of(url, timeout_s, connections)
        except ValueError as error:
            raise StorageError(f"not the URL of a Redis server: {error}") from error
        self._client: Any = None  # Any: Redis or RedisCluster, whose methods have different types
        self._connecting = threading.Lock()

    def exists_many(self, names: Sequence[str]) -> list[bool]:
        """Ask for all names in one round trip."""
        answers = self._run("EXISTS", lambda pipeline: [pipeline.exists(_PREFIX + name) for name in names])
        return [bool(answer) for answer in answers]

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Read all names in one round trip."""
        return self._run("GET", lambda pipeline: [pipeline.get(_PREFIX + name) for name in names])

    def put_many(self, objects: Mapping[str, Blob]) -> None:
        """Write all objects in one round trip."""
        self._run("SET", lambda pipeline: [pipeline.set(_PREFIX + name, data) for name, data in objects.items()])

    def delete_many(self, names: Sequence[str]) -> None:
        """Drop all names in one round trip."""
        self._run("UNLINK", lambda pipeline: [pipeline.unlink(_PREFIX + name) for name in names])

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def _run(self, command: str, add: Callable[[Any], object]) -> list[Any]:
        """Run the commands that `add` adds to a pipeline; return their answers."""
        try:
            with self._connected().pipeline(transaction=False) as pipeline:
                add(pipeline)
                return list(pipeline.execute())
        except redis.TimeoutError as error:
            raise StorageTimeoutError(f"{command}: {error}") from error
        except (redis.RedisError, RedisClusterException) as error:
            raise StorageError(f"{command} failed: {error}") from error

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = self._make_client()
            return self._client
