"""Batches: their objects by owner, and the leases of the gateways that work on them."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson

from common.errors import QueueFullError
from common.version_skew import known_fields
from gateway.batches.files import FileOwner
from gateway.identity.caller import Caller
from gateway.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from gateway.batches.documents import Documents

Json: TypeAlias = dict[str, Any]  # Any: free JSON

# Unfinished batches: id -> owner's digest, lease.
OPEN: Final = "batches-open"
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
LEASE_S: Final = 15.0
# A renewal may still be on its way when a lease is given up.
GIVE_UP_TRIES: Final = 3
# Outcomes of lines that are read with one call.
READ_AT_ONCE: Final = 64
RETRY_AFTER_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class BatchOutputs:
    """The files that one gateway has written of a batch's output; those without a line have no id."""

    succeeded: int
    failed: int
    output_id: str | None
    output_bytes: int
    errors_id: str | None
    errors_bytes: int


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch: the object that clients see, and the caller in whose name its lines run."""

    # The object that clients see.
    shown: Json
    caller: Caller
    # The status that it gets when its output files are written; set while it is finalizing.
    end: str | None = None
    # The contents of its output files; None until they are written.
    outputs: BatchOutputs | None = None
    # The ids of output files that a gateway is writing.
    drafts: tuple[str, ...] = ()
    # The whole record as it was stored, perhaps by a newer version, whose fields are kept when it is changed.
    stored: Json = field(default_factory=dict, compare=False)

    @property
    def id(self) -> str:
        """The id."""
        return str(self.shown["id"])

    @property
    def status(self) -> str:
        """The status, one of OpenAI's."""
        return str(self.shown["status"])

    @property
    def owner(self) -> FileOwner:
        """The owner of the batch and its files."""
        return FileOwner(self.caller.tenant, self.caller.subject)

    def changed(self, **fields: object) -> BatchRecord:
        """Return the batch with other fields of its object."""
        return replace(self, shown={**self.shown, **fields})

    def encode(self) -> bytes:
        """Return the batch as JSON."""
        caller = {**self.stored.get("caller", {}), **asdict(self.caller)}
        own = {"object": self.shown, "caller": caller, "end": self.end, "outputs": self.outputs, "drafts": self.drafts}
        return orjson.dumps({**self.stored, **own})

    @classmethod
    def decode(cls, encoded: bytes) -> BatchRecord:
        """Decode the result of `encode`, which may be that of another version."""
        stored = orjson.loads(encoded)
        written = stored.get("outputs")
        outputs = None if written is None else BatchOutputs(**known_fields(BatchOutputs, written))
        drafts = tuple(stored.get("drafts", ()))
        return cls(stored["object"], Caller.from_json(stored["caller"]), stored["end"], outputs, drafts, stored)


@dataclass(frozen=True, slots=True)
class BatchLease:
    """The right to work on a batch until a time (Unix seconds)."""

    owner: str
    holder: str
    until: float

    def encode(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def decode(cls, encoded: bytes) -> BatchLease:
        return cls(**known_fields(cls, orjson.loads(encoded)))


class Batches:
    """All batches. Those of other owners do not exist for a caller."""

    def __init__(self, documents: Documents, max_open: int, clock: Callable[[], float] = time.time) -> None:
        """An owner may have `max_open` unfinished batches."""
        self._documents = documents
        self._max_open = max_open
        self.clock = clock
        # Set when a batch is created at this gateway.
        self.created = asyncio.Event()

    async def create(self, caller: Caller, fields: Json, window_s: int) -> Json:
        """Create a batch that runs in the name of `caller`; return its object.

        Raises:
            QueueFullError: the owner has too many unfinished batches.
        """
        owner = FileOwner.of(caller).digest
        entries = await self._documents.get_many(OPEN, await self._documents.names(OPEN))
        unfinished = sum(entry is not None and orjson.loads(entry)["owner"] == owner for entry in entries)
        if unfinished >= self._max_open:
            message = f"You have {unfinished} unfinished batches, of which {self._max_open} may be at a time."
            raise QueueFullError(message, retry_after_ms=RETRY_AFTER_MS)
        now = int(self.clock())
        batch: Json = {
            "id": f"batch_{secrets.token_hex(16)}",
            "object": "batch",
            "errors": None,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + window_s,
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            **fields,
        }
        made = BatchRecord(batch, replace(caller, is_admin=False, is_batch=True))
        await self._documents.put(_folder(owner), made.id, made.encode())
        await self._documents.put(OPEN, made.id, BatchLease(owner, "", 0.0).encode())
        self.created.set()
        return batch

    async def get(self, owner: FileOwner, batch_id: str) -> BatchRecord:
        """Return a batch.

        Raises:
            HttpError: 404: there is none, or it is another owner's.
        """
        found = await self.find(owner.digest, batch_id)
        if found is None:
            raise HttpError(404, f"No batch found with id '{batch_id}'.")
        return found

    async def find(self, owner: str, batch_id: str) -> BatchRecord | None:
        """Return a batch by the digest of its owner."""
        found = await self._documents.get(_folder(owner), batch_id)
        return None if found is None else BatchRecord.decode(found)

    async def all_of(self, owner: FileOwner) -> list[Json]:
        """Return all batches of an owner, newest first."""
        folder = _folder(owner.digest)
        found = await self._documents.get_many(folder, await self._documents.names(folder))
        batches = [BatchRecord.decode(each).shown for each in found if each is not None]
        return sorted(batches, key=lambda batch: (-batch["created_at"], batch["id"]))

    async def update(self, batch: BatchRecord, change: Callable[[BatchRecord], BatchRecord | None]) -> BatchRecord:
        """Apply `change` to the stored batch, again if another gateway has changed it meanwhile; None: no change."""
        folder = _folder(batch.owner.digest)
        while True:
            found = await self._documents.get(folder, batch.id)
            if found is None:
                return batch
            current = BatchRecord.decode(found)
            changed = change(current)
            if changed is None:
                return current
            if await self._documents.exchange(folder, batch.id, found, changed.encode()):
                return changed

    async def uses(self, owner: FileOwner, file_id: str) -> bool:
        """Whether a file is the input of an unfinished batch."""
        return any(
            batch["input_file_id"] == file_id and batch["status"] not in ENDED for batch in await self.all_of(owner)
        )

    async def cancel(self, owner: FileOwner, batch_id: str) -> Json:
        """Begin to cancel a batch; return its object.

        Raises:
            HttpError: 404: there is none; 409: it has ended.
        """
        now = int(self.clock())

        def change(batch: BatchRecord) -> BatchRecord | None:
            if batch.status in {"cancelling", "finalizing", *ENDED}:
                return None
            return batch.changed(status="cancelling", cancelling_at=now)

        batch = await self.update(await self.get(owner, batch_id), change)
        if batch.status in ENDED - {"cancelled"}:
            raise HttpError(409, f"Cannot cancel a batch with status '{batch.status}'.")
        return batch.shown

    async def open_ids(self) -> list[str]:
        """Return the ids of unfinished batches."""
        return await self._documents.names(OPEN)

    async def claim(self, batch_id: str, holder: str) -> BatchLease | None:
        """Take the lease of an unfinished batch whose former holder has let it run out; None if there is none."""
        found = await self._documents.get(OPEN, batch_id)
        if found is None:
            return None
        former = BatchLease.decode(found)
        now = self.clock()
        # A lease that ends later than any new one would is of a clock that has been set back since.
        if now < former.until <= now + LEASE_S:
            return None
        lease = BatchLease(former.owner, holder, now + LEASE_S)
        return lease if await self._documents.exchange(OPEN, batch_id, found, lease.encode()) else None

    async def renew(self, batch_id: str, lease: BatchLease) -> BatchLease | None:
        """Extend a lease; None if it was lost."""
        longer = replace(lease, until=self.clock() + LEASE_S)
        return longer if await self._documents.exchange(OPEN, batch_id, lease.encode(), longer.encode()) else None

    async def give_up(self, batch_id: str, lease: BatchLease) -> None:
        """End a lease, so that any gateway may continue the batch at once.

        Its holder may have been cancelled while it renewed it, and not know of its last renewal.
        """
        free = BatchLease(lease.owner, "", 0.0).encode()
        for _ in range(GIVE_UP_TRIES):
            found = await self._documents.get(OPEN, batch_id)
            if found is None or BatchLease.decode(found).holder != lease.holder:
                return
            if await self._documents.exchange(OPEN, batch_id, found, free):
                return

    async def close(self, batch_id: str) -> None:
        """Remove a batch that has ended from the unfinished ones."""
        await self._documents.delete(OPEN, batch_id)

    # The outcomes of single lines.

    async def outcomes(self, batch_id: str) -> dict[int, bool]:
        """Return the lines that have an outcome, by index, and whether it is a success."""
        found = await self._documents.names(_outcomes(batch_id))
        return {int(name): content[:1] == b"+" async for name, content in self._read(batch_id, found)}

    async def note_outcome(self, batch_id: str, index: int, *, succeeded: bool, output: bytes) -> bool:
        """Store the outcome of a line; return False if it has one."""
        content = (b"+" if succeeded else b"-") + output
        return await self._documents.exchange(_outcomes(batch_id), _name(index), None, content)

    async def outcome(self, batch_id: str, index: int) -> tuple[bool, bytes] | None:
        """Return whether a line succeeded, and its output line; None if it has no outcome."""
        content = await self._documents.get(_outcomes(batch_id), _name(index))
        return None if content is None else (content[:1] == b"+", content[1:])

    async def forget_outcomes(self, batch_id: str) -> None:
        """Remove the outcomes of all lines."""
        await self._documents.delete(_outcomes(batch_id))

    async def _read(self, batch_id: str, names: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        for start in range(0, len(names), READ_AT_ONCE):
            part = names[start : start + READ_AT_ONCE]
            for name, content in zip(part, await self._documents.get_many(_outcomes(batch_id), part), strict=True):
                if content is not None:
                    yield name, content


def _folder(owner: str) -> str:
    return f"batches:{owner}"


def _outcomes(batch_id: str) -> str:
    return f"outcomes:{batch_id}"


def _name(index: int) -> str:
    return f"{index:08d}"
