"""Uploaded files and the outputs of batches: their metadata, by owner; `contents.py` has what is in them."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from common.errors import InvalidRequestError, QueueFullError
from gateway.identity.caller import ANONYMOUS, ANONYMOUS_TENANT
from gateway.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gateway.batches.contents import ContentWriter, FileContents
    from gateway.batches.documents import Documents
    from gateway.identity.caller import Caller

Json: TypeAlias = dict[str, Any]  # Any: free JSON

# The room that a file takes in addition to its content.
ENTRY_BYTES = 1024
# Index of files and new files: "<time of expiry, seconds>-<id>" -> owner's folder, tenant's digest, bytes.
INDEX = "file-index"
# Seconds within which the content of a new file must be written.
RESERVED_S = 3600
FULL_RETRY_MS = 60_000
NO_OWNER = "Requests without a credential are anonymous, and cannot own files and batches; send an API key."


@dataclass(frozen=True, slots=True)
class FileOwner:
    """The tenant and subject that a file or batch belongs to."""

    tenant: str
    subject: str

    @classmethod
    def of(cls, caller: Caller) -> FileOwner:
        """Return the owner of what `caller` creates.

        Raises:
            InvalidRequestError: the caller is anonymous.
        """
        if caller.subject == ANONYMOUS or caller.tenant == ANONYMOUS_TENANT:
            raise InvalidRequestError(NO_OWNER)
        return cls(caller.tenant, caller.subject)

    @property
    def digest(self) -> str:
        """Name of the owner in folders."""
        return _digest(self.tenant, self.subject)

    @property
    def tenant_digest(self) -> str:
        """Name of the tenant in the index."""
        return _digest(self.tenant)


def _digest(*names: str) -> str:
    return hashlib.sha256(orjson.dumps(names)).hexdigest()[:32]


def file_missing(file_id: str) -> HttpError:
    """Return the error for a file that does not exist or is another's."""
    return HttpError(404, f"No such File object: {file_id}")


@dataclass(frozen=True, slots=True)
class FileBounds:
    """Bounds on files: of one, of all together (a tenant may use half), and the seconds for which one is kept."""

    file_bytes: int
    all_bytes: int
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is being written. `reservation`: the entry in the index that keeps its room; empty: there is none."""

    id: str
    reservation: str = ""


class Files:
    """All files. Those of other owners do not exist for a caller."""

    def __init__(
        self, documents: Documents, contents: FileContents, bounds: FileBounds, clock: Callable[[], float] = time.time
    ) -> None:
        self.bounds = bounds
        self._documents = documents
        self._contents = contents
        self._clock = clock

    def writer(self, file_id: str) -> ContentWriter:
        """Return a writer of a new file's content; the file exists once it is added."""
        return self._contents.writer(file_id)

    async def reserve(self, owner: FileOwner, size: int) -> NewFile:
        """Take room for a new file of `size` bytes, which must be added within `RESERVED_S`.

        Otherwise, for example if its gateway dies, `sweep` drops what has been written. Reserved room counts as used,
        so that uploads at the same time cannot exceed the bounds together.

        Raises:
            QueueFullError: there is no room; the message says whose.
        """
        file_id = new_file_id()
        new = NewFile(file_id, _index_name(int(self._clock()) + RESERVED_S, file_id))
        await self._documents.put(INDEX, new.reservation, _entry(owner, size))
        try:
            await self._check_room(owner)
        except BaseException:
            await self._documents.delete(INDEX, new.reservation)
            raise
        return new

    async def _check_room(self, owner: FileOwner) -> None:
        used = of_tenant = 0
        names = await self._documents.names(INDEX)
        for entry in await self._documents.get_many(INDEX, names):
            if entry is not None:
                _, tenant, taken = orjson.loads(entry)
                used += taken
                of_tenant += taken if tenant == owner.tenant_digest else 0
        if of_tenant > self.bounds.all_bytes // 2:
            message = (
                f"Your organization's files would have {of_tenant} bytes, and may have {self.bounds.all_bytes // 2}"
            )
        elif used > self.bounds.all_bytes:
            message = "The server has no room for the file"
        else:
            return
        raise QueueFullError(f"{message}; delete files that are not needed.", retry_after_ms=FULL_RETRY_MS)

    async def add(self, owner: FileOwner, new: NewFile, name: str, purpose: str, size: int) -> Json:
        """Make a file whose content has been written exist; return its object. Idempotent."""
        created = int(self._clock())
        expires = created + int(self.bounds.lifetime_s)
        file: Json = {
            "id": new.id,
            "object": "file",
            "bytes": size,
            "created_at": created,
            "expires_at": expires,
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        await self._documents.put(INDEX, _index_name(expires, new.id), _entry(owner, size))
        if not await self._documents.exchange(_folder(owner.digest), new.id, None, orjson.dumps(file)):
            file = await self.get(owner, new.id)
            if file["expires_at"] != expires:
                await self._documents.delete(INDEX, _index_name(expires, new.id))
        await self._release(new)
        return file

    async def get(self, owner: FileOwner, file_id: str) -> Json:
        """Return a file's object.

        Raises:
            HttpError: 404: there is none, or it is another owner's.
        """
        found = await self._documents.get(_folder(owner.digest), file_id)
        if found is None or orjson.loads(found)["expires_at"] <= self._clock():
            raise file_missing(file_id)
        file: Json = orjson.loads(found)
        return file

    async def all_of(self, owner: FileOwner) -> list[Json]:
        """Return all files of an owner, newest first."""
        folder = _folder(owner.digest)
        found = await self._documents.get_many(folder, await self._documents.names(folder))
        files = [orjson.loads(each) for each in found if each is not None]
        alive = [file for file in files if file["expires_at"] > self._clock()]
        return sorted(alive, key=lambda file: (-file["created_at"], file["id"]))

    def content(self, file_id: str) -> AsyncIterator[bytes]:
        """Yield the content of a file that exists; less of it if the file is deleted meanwhile."""
        return self._contents.read(file_id)

    async def delete(self, owner: FileOwner, file_id: str) -> None:
        """Delete a file.

        Raises:
            HttpError: 404: there is none, or it is another owner's.
        """
        file = await self.get(owner, file_id)
        await self._remove(owner.digest, file_id, _index_name(file["expires_at"], file_id))

    async def discard(self, new: NewFile) -> None:
        """Delete the content of a file that was never added, and give its room back."""
        await self._contents.delete(new.id)
        await self._release(new)

    async def sweep(self) -> None:
        """Delete the files whose lifetime is over, and contents that were not added in time."""
        now = f"{int(self._clock()):012d}"
        for name in await self._documents.names(INDEX):
            expiry, _, file_id = name.partition("-")
            if expiry > now:
                return
            entry = await self._documents.get(INDEX, name)
            if entry is None:
                continue
            owner = orjson.loads(entry)[0]
            stored = await self._documents.get(_folder(owner), file_id)
            if stored is not None and orjson.loads(stored)["expires_at"] > self._clock():
                # The reservation of a file whose gateway died just after it had added it.
                await self._documents.delete(INDEX, name)
            else:
                await self._remove(owner, file_id, name)

    async def _release(self, new: NewFile) -> None:
        if new.reservation:
            await self._documents.delete(INDEX, new.reservation)

    async def _remove(self, owner: str, file_id: str, index_name: str) -> None:
        # Last comes the entry that `sweep` would try again by.
        await self._contents.delete(file_id)
        await self._documents.delete(_folder(owner), file_id)
        await self._documents.delete(INDEX, index_name)

    async def close(self) -> None:
        """Release the contents; the documents stay open."""
        await self._contents.close()


def new_file_id() -> str:
    """Return the id of a new file."""
    return f"file-{secrets.token_hex(16)}"


def _folder(owner: str) -> str:
    return f"files:{owner}"


def _index_name(expires: int, file_id: str) -> str:
    return f"{expires:012d}-{file_id}"


def _entry(owner: FileOwner, size: int) -> bytes:
    return orjson.dumps([owner.digest, owner.tenant_digest, size + ENTRY_BYTES])
