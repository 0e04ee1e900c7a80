"""The interfaces of an engine, the compute of one rank: configured once, then fed with plans; and of its transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from common.steps import EngineCapacity, EngineSpec, SleepLevel, SleepPart, StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from common.steps import AdapterLoad, ExpertLoad, PageIds
    from common.transfers import Transfer, TransferAck
    from common.types import EncoderOutputId, RowImage
    from services.worker.engine.host_tier.page_form import PageForm
    from services.worker.engine.host_tier.shared_pages import MappedPages, SharedPages
    from services.worker.engine.parallel.shards import Span
    from services.worker.engine.plans.rows import RowStates

# Fraction of the work done in [0, 1], and a readable stage.
ProgressReport = Callable[[float, str], None]
Emit = Callable[[StepResult], None]
# Whether the passes of a plan with `can_abandon` are abandoned, or those of one with `can_shorten` left out. Other
# plans do not ask. Any thread may ask.
IsOvertaken = Callable[[], bool]
# Waits until some passes are over. Any thread may call it.
AfterPasses = Callable[[], None]
# Called between parts of a pass that may be abandoned; raises PassAbandonedError if it is.
Checkpoint = Callable[[], None]


def never_overtaken() -> bool:
    """Return false: no plan is abandoned."""
    return False


class PassAbandonedError(Exception):
    """The pass under way is abandoned: what it wrote is not used, and its rows are closed by a later plan."""


class InvalidPlanError(Exception):
    """A plan contradicts the rows it is about. The weights are unharmed, the rows are undefined until `reset`."""


class OutOfMemoryError(Exception):
    """Memory does not suffice for a step, and it cannot be made smaller here. The weights are unharmed."""


class ExpertGroupError(Exception):
    """A rank that shares experts with this one has left, or does not answer: all of them have to meet again."""


class HostStateBytes(Protocol):
    """Snapshots of recurrent states on the host as bytes; see `HostPageBytes`."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one snapshot."""

    def read(self, slot: int) -> bytes:
        """Return a copy of a snapshot's bytes."""

    def write(self, slot: int, content: memoryview) -> None:
        """Overwrite a snapshot with `slot_bytes` bytes."""


class HostPageBytes(Protocol):
    """Pages of a rank's host tier as bytes; page p holds the same tokens of all layers.

    Any thread may call the methods; the caller ensures that no other one uses the page or slot at the same time.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""

    def read_page(self, page: int) -> bytes:
        """Return a copy of a page's bytes."""

    def write_page(self, page: int, content: memoryview) -> None:
        """Overwrite a page with `page_bytes` bytes."""

    @property
    def states(self) -> HostStateBytes | None:
        """Snapshots of recurrent states beside the pages; None without any."""


class DevicePageBytes(Protocol):
    """Pages of the KV memory as bytes, laid out as those of the host tier; to and from workers of other groups."""

    @property
    def form(self) -> PageForm:
        """Where heads lie in a page."""

    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        """Return copies of some heads of pages one after the other; nothing once the model has been closed.

        Any thread may call this. The caller ensures that the pages are not written meanwhile, and that an earlier plan,
        whose results are known, wrote them.
        """

    def after_passes(self) -> AfterPasses | None:
        """Return a wait for the passes launched by now, None if they are over; in the engine's thread."""

    def write_pages(self, pages: Sequence[int], content: memoryview) -> None:
        """Overwrite pages, and wait until that is done.

        `content` is one page after the other. Any thread may call this. The caller ensures that neither a pass nor
        another writer uses the pages meanwhile. Once the model has been closed, nothing is written.
        """

    @property
    def snapshots(self) -> SnapshotBytes | None:
        """Snapshots of the states after pages; None: there are no recurrent layers."""

    @property
    def shared_name(self) -> bytes | None:
        """Name of the memory that `lend` has returned."""

    def lend(
        self, recall: Callable[[], None], *, is_here: bool = True, reads_over_nixl: bool = False
    ) -> SharedPages | None:
        """Return the memory of the pages for another worker; None if it cannot be shared, or is about to go.

        `is_here`: the worker is on the same host, and of the same user. Any thread may call this.

        The memory is there until `take_back`, as far as that comes within seconds after `recall`, which any thread
        calls.
        """

    def take_back(self, recall: Callable[[], None]) -> None:
        """Note that the worker that `recall` belongs to has unmapped the memory."""


class SnapshotBytes(Protocol):
    """Snapshots of recurrent states as bytes, laid out as those of the host tier; to and from workers of other groups.

    The methods' callers are bound as those of `DevicePageBytes` are.
    """

    @property
    def form(self) -> PageForm:
        """Where key heads lie in a snapshot."""

    def read(self, snapshot: int, heads: Span) -> bytes:
        """Return a copy of some heads of a snapshot; nothing once the model has been closed."""

    def write(self, snapshot: int, content: memoryview) -> None:
        """Overwrite a snapshot, and wait until that is done. Once the model has been closed, nothing is written."""


class PeerPageCopies(Protocol):
    """Copies pages from memory of workers of other groups to the host tier or the device.

    The memory is mapped, or read over NIXL. Any thread may call the methods.
    """

    @property
    def reads_over_nixl(self) -> bool:
        """Whether memory can be read over NIXL, of any host."""

    @property
    def slice_pages(self) -> int:
        """Most pages to copy to the host at a time."""

    @property
    def direct_slice_pages(self) -> int:
        """The same for copies to the device."""

    def can_write(self, host_pages: PageIds) -> bool:
        """Whether these host pages, [pages] int32, are ready for copies."""

    def map(self, memory: SharedPages) -> MappedPages:
        """Map memory of another process.

        Raises:
            SharingError: it cannot be mapped here, or its pages have another form.
        """

    def copy(self, source: MappedPages, pages: PageIds, host_pages: PageIds) -> None:
        """Copy pages [pages] int32 of `source` to `host_pages`, [pages] int32, and wait until that is done.

        Raises:
            SharingError: its pages have another form, or there are no such pages.
            BrokenReadError: the other process does not answer, or does not lend the memory any more.
        """

    def copy_to_device(self, source: MappedPages, pages: PageIds, device_pages: PageIds) -> None:
        """Do the same to pages of the device; see `copy` and `DevicePageBytes.write_pages`."""


class AdapterStore(Protocol):
    """A rank's adapters (LoRA): those in host memory, by their digests, and those in slots of the device."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def kept(self) -> dict[str, AdapterSize]:
        """The adapters in host memory, by their digests; any thread may ask, and read, keep and drop adapters."""

    def read(self, directory: Path, expected: str = "") -> AdapterSize:
        """Read an adapter, which plans can load once it is kept.

        Raises:
            ConfigurationError: it cannot be read, does not fit the model, or has another digest than `expected`.
        """

    def keep(self, adapter: AdapterSize) -> None:
        """Have what `read` has returned in host memory, for plans."""

    def drop(self, digest: str) -> None:
        """Forget an adapter that no later plan loads."""

    def load(self, loads: Iterable[AdapterLoad]) -> None:
        """Fill slots as a plan says, in the engine's thread.

        Raises:
            InvalidPlanError: an adapter is not in host memory.
        """

    def reset(self) -> None:
        """Empty the slots: a new stream of plans begins."""


class ImageStore(Protocol):
    """The images of open rows, as far as passes still need them."""

    def admit(self, plan: StepPlan, rows: RowStates) -> StepPlan:
        """Take over the images of the rows that `plan` opens; return it with ids of the vocabulary only.

        Images that earlier plans have computed, or whose rows are closed, are dropped.

        Raises:
            InvalidPlanError: images do not fit the ids of their row, or the model.
        """

    def keep(self, output: EncoderOutputId, content: memoryview) -> None:
        """Keep embeddings that another process has encoded as an output; the bytes, which are writable, are taken over.

        They lie one after the other, in the type of the activations. In the engine's thread, between plans.
        """

    def reset(self) -> None:
        """Drop everything: all rows are free."""


class ImageEncoder(Protocol):
    """Encodes images for the ranks of other processes."""

    def encode(self, images: Sequence[RowImage]) -> list[memoryview]:
        """Return the embeddings of each image, as `ImageStore.keep` takes them. In the engine's thread.

        Raises:
            InvalidRequestError: one is no image of the model, or has another number of embeddings.
        """


class AdapterSize(Protocol):
    """Digest and size of an adapter that was read."""

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides about results, in hexadecimal digits."""

    @property
    def rank(self) -> int:
        """The largest rank of its factors."""

    @property
    def bytes(self) -> int:
        """Memory that it takes on this rank."""


class PassCalls(Protocol):
    """Calls to passes in which other ranks need the experts of this one."""

    def next_call(self) -> int | None:
        """Wait for a call to a pass that this rank has not begun; return its number, None once the engine is closed.

        Raises:
            ExpertGroupError: another rank was lost.
        """


class Engine(Protocol):
    """One tensor-parallel rank, used from one thread."""

    @property
    def host_pages(self) -> HostPageBytes | None:
        """The host tier's pages, None without one; other threads may touch them until `reset` or `close`."""

    @property
    def device_pages(self) -> DevicePageBytes | None:
        """The pages of the KV memory; None without one, or if not all layers have the same pages."""

    @property
    def peer_copies(self) -> PeerPageCopies | None:
        """Copies from memory of other processes; None without a GPU or a host tier."""

    @property
    def adapters(self) -> AdapterStore | None:
        """The loaded model's adapters; None: it is to have none, or cannot."""

    @property
    def images(self) -> ImageStore | None:
        """The images of open rows; None: the model sees none, or sleeps."""

    @property
    def encoder(self) -> ImageEncoder | None:
        """The loaded vision encoder, if that is all of the model that is loaded; else None."""

    @property
    def open_rows(self) -> int:
        """Number of row slots that are taken."""

    def read_expert_load(self) -> ExpertLoad | None:
        """Return the tokens of this rank's experts, in the engine's thread; None without expert parallelism."""

    @property
    def pass_calls(self) -> PassCalls | None:
        """Calls of ranks of other groups with which this one shares experts; None: it shares none."""

    def join_pass(self, number: int) -> bool:
        """Compute what other ranks need in their pass `number`, in the engine's thread, unless that is done already.

        Returns whether it was to be done. After an error only `close` may follow.

        Raises:
            ExpertGroupError: another rank was lost.
        """

    @property
    def ends_with_group(self) -> bool:
        """Whether the group of ranks that this engine is in can only be left by ending the process."""

    def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        """Load the model of `spec` and return the capacity; all rows are free afterwards.

        An equal spec finds the weights already there, of which no file is opened. Raises whatever keeps the model from
        loading; the engine is then as if closed.
        """

    def execute(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        """Run a plan and emit one result per forward pass, the final one with `last` set.

        Once `is_overtaken`, what is left of a plan with `can_abandon` is abandoned, and the passes of one with
        `can_shorten` that have not begun are left out, if the capacity says so.

        Results that the device still computes are emitted by the next `execute` or by `settle`.

        Anything raised, by `emit` too, leaves the rows undefined until `reset`.

        Raises:
            InvalidPlanError: the plan contradicts the rows; nothing was computed for it.
            OutOfMemoryError: memory does not suffice, and other ranks take part; a rank alone computes in parts, and
                stops rows that do not fit even so (`RowStop` with ERROR).
        """

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """Emit the outstanding results as they arrive; return early once `is_wanted`, for the next `execute`."""

    def prepare(self, spec: EngineSpec) -> bool:
        """Read the weights of `spec` beside the loaded ones, for the next `configure`; any thread may do that.

        `spec` differs from the loaded one in nothing but its weights. Nothing happens, and the result is false, where
        memory does not suffice for both, or where `configure` has to read them itself.

        Raises:
            ConfigurationError: they cannot be read, or their files have changed meanwhile.
        """

    def drop_prepared(self) -> None:
        """Forget the weights that `prepare` has read; any thread may do that."""

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        """Give back KV memory and weights, with no row open; return how many bytes became free.

        The host tier's pages stay if `keeps_host_pages`, adapters stay in host memory, and the group of ranks lasts. A
        model that sleeps at level 1 may go on to level 2. After an error only `close` may follow.
        """

    def wake(self, parts: Collection[SleepPart], report: ProgressReport) -> bool:
        """Restore these parts of a sleeping model; return whether it is awake, which takes all of them.

        All rows are free then. After an error only `close` may follow.

        Raises:
            ConfigurationError: the weights were dropped, and their files have changed since.
        """

    def keep_warm(self) -> None:
        """Let an idle device do a little, so that it does not slow down; delays no plan and touches no page."""

    def reset(self) -> None:
        """Free all rows: a new stream of plans begins. The weights stay."""

    def close(self) -> None:
        """Give back weights, memory and the tensor-parallel group; `configure` may follow."""


class Transfers(Protocol):
    """Copies between the tiers beside forward passes; `common/transfers.py` has the contract of a copy.

    All methods belong to the engine's thread.
    """

    def begin(self, transfers: Iterable[Transfer]) -> None:
        """Take in a plan's transfers, before its first pass; they see what earlier passes wrote."""

    def poll(self) -> tuple[TransferAck, ...]:
        """Return the acknowledgements of finished transfers after a pass; takes a bounded time."""

    def wait(self) -> tuple[TransferAck, ...]:
        """Return the acknowledgements of finished transfers while no pass runs; waits a short time for one."""

    def reset(self) -> None:
        """Cancel the open transfers: when this returns, no page is read or written any more."""

    def close(self) -> None:
        """Give everything back."""
