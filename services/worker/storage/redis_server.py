"""Storage in a Redis or Valkey server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.worker.storage.interface import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.worker.storage.interface import Blob

_PREFIX = "pando:kv:"


class RedisStorage:
    """Keeps each object as one string; see `Storage`.

    The server's settings decide which objects are evicted (`maxmemory`, `maxmemory-policy allkeys-lru`).
    """

    def __init__(self, url: str, timeout_s: float, connections: int) -> None:
        """Use the server at `url` (redis://, rediss:// or unix://); it is connected to when it is first needed.

        Args:
            url: Where it is, and how to log in.
            timeout_s: How long to wait for a connection, and for each part of an answer.
            connections: At most so many at the same time.

        Raises:
            StorageError: the URL makes no sense.
        """
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                max_connections=connections,
                # Retries are left to callers, which have deadlines.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise StorageError(f"not the URL of a Redis server: {error}") from error

    def exists_many(self, names: Sequence[str]) -> list[bool]:
        """Ask for all names in one round trip."""
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.exists(_PREFIX + name)
                return [bool(answer) for answer in pipeline.execute()]
        except redis.RedisError as error:
            raise StorageError(f"EXISTS failed: {error}") from error

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Read all names in one round trip."""
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.get(_PREFIX + name)
                return list(pipeline.execute())
        except redis.RedisError as error:
            raise StorageError(f"GET failed: {error}") from error

    def put_many(self, objects: Mapping[str, Blob]) -> None:
        """Write all objects in one round trip."""
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for name, data in objects.items():
                    pipeline.set(_PREFIX + name, data)
                pipeline.execute()
        except redis.RedisError as error:
            raise StorageError(f"SET failed: {error}") from error

    def delete_many(self, names: Sequence[str]) -> None:
        """Drop all names in one round trip."""
        try:
            self._client.unlink(*(_PREFIX + name for name in names))
        except redis.RedisError as error:
            raise StorageError(f"UNLINK failed: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
