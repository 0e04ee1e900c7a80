"""Back ends of the storage tier: objects by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# An object: a header and an encrypted page or snapshot of recurrent states, see `objects.py`.
Blob = bytes | bytearray | memoryview


class StorageError(Exception):
    """The storage cannot be reached, or a call of it has failed."""


class StorageTimeoutError(StorageError):
    """The storage has not answered in time."""


class Storage(Protocol):
    """Keeps objects by name, each whole or not at all, as long as it likes.

    Names are at most 128 characters out of `[0-9a-f-]`. Objects are pages of up to some megabytes, all of a deployment
    nearly the same size; of models with recurrent layers also snapshots of up to some hundred. Methods block and may be
    called from several threads at once. They try to end within the time limit of the storage, but callers have
    deadlines of their own. Callers check what they read, as anyone may have written it, and name up to `BATCH_PAGES`
    objects in a call, or more of those to look for or to delete.

    A package adds a back end by an entry point in the group `pando.storage`, named like the scheme of its URLs, that
    refers to a `StorageFactory`. `services/worker/README.md` says what a back end for Mooncake or NIXL has to do.
    """

    def exists_many(self, names: Sequence[str]) -> list[bool]:
        """Return for each of `names` whether it exists. Raises StorageError."""

    def get_many(self, names: Sequence[str]) -> Sequence[Blob | None]:
        """Return each object, None where there is none. Raises StorageError."""

    def put_many(self, objects: Mapping[str, Blob]) -> None:
        """Store objects, in place of those with the same names. Raises StorageError."""

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete those of `names` that exist. Raises StorageError."""

    def close(self) -> None:
        """Close connections."""


class StorageFactory(Protocol):
    """Makes the back end of a URL scheme."""

    def __call__(self, url: str, timeout_s: float, threads: int) -> Storage:
        """Return a storage that is used from at most `threads` threads, with the time limit `timeout_s` for a call.

        A server that is down is no error here: it may be back when it is first called.

        Raises:
            StorageError: the URL is invalid.
        """
