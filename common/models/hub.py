"""Models from the Hugging Face hub, in the cache that all of the hub's tools share.

`huggingface_hub` names, lists, links and locks the files. The large ones are fetched here, because it begins a file
again that was interrupted, and compares sizes only: an interrupted file is continued by range requests, and has its
place in the cache only once its SHA-256 is right.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx2
from filelock import Timeout
from huggingface_hub import (
    HfApi,
    constants,
    get_cached_repo_tree,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import WeakFileLock, build_hf_headers, disable_progress_bars

from common.errors import ConfigurationError
from common.models.disk import check_space
from common.models.files import ModelFiles, ModelKind
from common.models.hub_errors import FAILURES, explain, is_unreachable
from common.models.selection import (
    ADAPTER_CONFIG,
    CONFIG,
    Selection,
    is_inside,
    select_adapter,
    select_files,
    shards_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from common.models.progress import DownloadReport
    from common.models.references import HubReference
    from common.models.selection import TensorChoice

LIBRARY: Final = "pando"
PARALLEL_FILES: Final = 4
# Connections that break while a file is read, without any progress between, before the download fails.
MAX_BREAKS: Final = 5
_LOCK_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model's files in the cache, and the commit that they belong to."""

    files: ModelFiles
    commit: str


def fetch(
    reference: HubReference, *, weights: bool, report: DownloadReport, choose: TensorChoice | None = None
) -> Fetched:
    """Return the files of a model, downloaded if the cache lacks them; a commit that is cached needs no network.

    Args:
        reference: the model.
        weights: whether weights are needed, or only configuration and tokenizer.
        report: receives the progress if something is downloaded.
        choose: the tensors whose files are needed; None: all.

    Raises:
        ConfigurationError: the model cannot be downloaded or served; the message says what to do.
    """
    return _fetch(reference, partial(select_files, reference, weights=weights), report, choose)


def fetch_adapter(reference: HubReference, report: DownloadReport) -> Path:
    """Return the directory of an adapter's files, downloaded if the cache lacks them.

    Args:
        reference: the adapter.
        report: receives the progress if something is downloaded.

    Raises:
        ConfigurationError: it cannot be downloaded, or the repository has no adapter; the message says what to do.
    """
    return _fetch(reference, partial(select_adapter, reference), report).files.path


def _fetch(
    reference: HubReference,
    select: Callable[[Iterable[str]], Selection],
    report: DownloadReport,
    choose: TensorChoice | None = None,
) -> Fetched:
    disable_progress_bars()
    try:
        return _Download(reference, select, report, choose).run()
    except FAILURES as error:
        raise ConfigurationError(explain(error, reference)) from error


def list_files(reference: HubReference) -> dict[str, RepoFile]:
    """Return the files of a repository by their paths, as the hub lists them, without any that lead out of it."""
    entries = _api().list_repo_tree(reference.repository, recursive=True, revision=reference.revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile) and is_inside(entry.path)}


def _api() -> HfApi:
    return HfApi(library_name=LIBRARY)


class _Download:
    """The download of one model: what it needs, and what is there."""

    def __init__(
        self,
        reference: HubReference,
        select: Callable[[Iterable[str]], Selection],
        report: DownloadReport,
        choose: TensorChoice | None,
    ) -> None:
        self._given = reference
        self._select = select
        self._report = report
        self._choose = choose
        self._repository = reference.repository
        self._cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
        self._folder = self._cache / repo_folder_name(repo_id=reference.repository, repo_type="model")

    def run(self) -> Fetched:
        commit = _api().resolve_revision(self._repository, revision=self._given.revision).resolved
        snapshot = self._folder / "snapshots" / commit
        selection = self._cached(snapshot, commit)
        if selection is None:
            try:
                selection = self._download(commit)
            except FAILURES as error:
                # Other tools' downloads leave no list of the repository's files.
                if not is_unreachable(error) or (selection := self._present(snapshot)) is None:
                    raise
        if selection.gguf is None:
            shards = self._shards(snapshot, selection) if self._choose is not None else None
            files = ModelFiles(self._repository, ModelKind.DIRECTORY, snapshot, shards)
        else:
            files = ModelFiles(Path(selection.gguf).name, ModelKind.GGUF, snapshot / selection.gguf)
        return Fetched(files, commit)

    def _cached(self, snapshot: Path, commit: str) -> Selection | None:
        """Return the files that are needed if the cache has all of them, by the hub's list of the commit's files."""
        try:
            names = [entry.path for entry in get_cached_repo_tree(self._repository, revision=commit)]
        except CachedRepoTreeNotFoundError:
            return None
        return self._complete(snapshot, self._select(names))

    def _present(self, snapshot: Path) -> Selection | None:
        """Return the files that are needed, chosen from those that the cache has."""
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
        try:
            return self._complete(snapshot, self._select(names))
        except ConfigurationError:
            return None

    def _shards(self, snapshot: Path, selection: Selection) -> tuple[str, ...] | None:
        """Return the files that the index in `snapshot` names, as far as they are needed; None without one."""
        if selection.index is None:
            return None
        return shards_of((snapshot / selection.index).read_text(encoding="utf-8"), self._choose)

    def _complete(self, snapshot: Path, selection: Selection) -> Selection | None:
        """Return `selection` with its shards; None if a file is missing in `snapshot`."""
        if not all((snapshot / name).is_file() for name in selection.files):
            return None
        if shards := self._shards(snapshot, selection):
            selection = Selection((*selection.files, *shards), index=selection.index)
        return selection if all((snapshot / name).is_file() for name in selection.files) else None

    def _download(self, commit: str) -> Selection:
        pinned = self._given.at(commit)
        tree = list_files(pinned)
        selection = self._select(tree)
        # Small, and refused first where a repository is gated.
        configurations = [name for name in (CONFIG, ADAPTER_CONFIG) if name in selection.files]
        first = selection.index or (configurations[0] if configurations else None)
        path = Path(hf_hub_download(self._repository, first, revision=commit, library_name=LIBRARY)) if first else None
        if selection.index is not None and path is not None:
            shards = shards_of(path.read_text(encoding="utf-8"), self._choose)
            if missing := [name for name in shards if name not in tree]:
                raise ConfigurationError(
                    f"model {self._given}: {selection.index} names files that the repository lacks: "
                    f"{', '.join(missing)}"
                )
            selection = Selection((*selection.files, *shards), index=selection.index)
        wanted = {name: tree[name] for name in selection.files}
        snapshot = self._folder / "snapshots" / commit
        missing_files = [name for name in wanted if not (snapshot / name).is_file()]
        if missing_files:
            self._fetch(pinned, wanted, missing_files)
        return selection

    def _fetch(self, pinned: HubReference, wanted: Mapping[str, RepoFile], missing: Sequence[str]) -> None:
        total = sum(entry.size for entry in wanted.values())
        large = [_Blob(self._folder, name, entry) for name in missing if (entry := wanted[name]).lfs is not None]
        small = [name for name in missing if wanted[name].lfs is None]
        needed = sum(wanted[name].size for name in small) + sum(blob.missing_bytes() for blob in large)
        check_space(str(self._given), self._cache, needed)
        self._report.begin(str(self._given), len(wanted), total)
        try:
            self._report.advance(total - sum(wanted[name].size for name in missing))
            # Larger files come through the library's own protocol only.
            _fetch_all(pinned, [blob for blob in large if blob.size <= constants.MAX_HTTP_DOWNLOAD_SIZE], self._report)
            snapshot_download(
                self._repository,
                revision=pinned.revision,
                allow_patterns=[glob.escape(name) for name in wanted],
                library_name=LIBRARY,
                max_workers=PARALLEL_FILES,
            )
            self._report.advance(sum(wanted[name].size for name in small))
            self._report.advance(sum(blob.size for blob in large if blob.size > constants.MAX_HTTP_DOWNLOAD_SIZE))
        finally:
            self._report.end()


def _fetch_all(pinned: HubReference, blobs: Sequence[_Blob], report: DownloadReport) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="download") as pool:
        try:
            for future in as_completed([pool.submit(blob.fetch, pinned, report, stop) for blob in blobs]):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Blob:
    """A large file, in the cache under its SHA-256."""

    def __init__(self, folder: Path, name: str, entry: RepoFile) -> None:
        assert entry.lfs is not None
        self.name, self.size, self.digest = name, entry.size, entry.lfs.sha256
        if re.fullmatch(r"[0-9a-f]{64}", self.digest) is None:
            raise ConfigurationError(f"the server's SHA-256 of {name} is {self.digest[:80]!r}, which is not one")
        self._path = folder / "blobs" / self.digest
        self._partial = self._path.with_name(f"{self.digest}.incomplete")
        # The library's own lock of this file.
        self._lock = folder.parent / ".locks" / folder.name / f"{self.digest}.lock"

    def missing_bytes(self) -> int:
        """Count the bytes that are not on disk yet."""
        return 0 if self._path.exists() else self.size - _size_of(self._partial)

    def fetch(self, pinned: HubReference, report: DownloadReport, stop: threading.Event) -> None:
        """Download what is missing; other processes that want the same file wait meanwhile.

        Raises:
            ConfigurationError: the file that arrived is another one.
        """
        for path in (self._path, self._lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self._lock, stop):
            if self._path.exists():
                report.advance(self.size)
                return
            report.advance(_size_of(self._partial))
            self._download(pinned, report, stop)
            with self._partial.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != self.digest:
                self._partial.unlink()
                raise ConfigurationError(
                    f"model {pinned}: {self.name} arrived damaged (SHA-256 {digest[:12]}…, not {self.digest[:12]}…) "
                    "and was deleted; run the command again, and check proxies and mirrors if it happens again"
                )
            self._partial.replace(self._path)

    def _download(self, pinned: HubReference, report: DownloadReport, stop: threading.Event) -> None:
        url = hf_hub_url(pinned.repository, self.name, revision=pinned.revision)
        headers = build_hf_headers(library_name=LIBRARY)
        breaks = 0
        while True:
            start = _size_of(self._partial)
            with self._partial.open("ab") as file:
                counting: Any = _CountingFile(file, report, stop)  # Any: it has what http_get uses of a BinaryIO
                try:
                    http_get(
                        url,
                        counting,
                        resume_size=start,
                        headers=headers,
                        expected_size=self.size,
                        displayed_filename=self.name,
                    )
                    return
                except httpx2.ReadError:
                    breaks = 0 if file.tell() > start else breaks + 1
                    if breaks > MAX_BREAKS:
                        raise


class _CountingFile:
    """Counts the bytes that are written to a file, and ends the writer's work once `stop` is set."""

    def __init__(self, file: Any, report: DownloadReport, stop: threading.Event) -> None:  # Any: see above
        self._file, self._report, self._stop = file, report, stop

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise ConfigurationError("the download was stopped")
        written: int = self._file.write(data)
        self._report.advance(written)
        return written

    def tell(self) -> int:
        position: int = self._file.tell()
        return position

    def seek(self, position: int) -> int:
        moved: int = self._file.seek(position)
        return moved

    def truncate(self) -> int:
        """Cut the file off at its position; what is lost will come again."""
        self._file.flush()
        self._report.advance(self._file.tell() - os.fstat(self._file.fileno()).st_size)
        size: int = self._file.truncate()
        return size


@contextmanager
def _locked(path: Path, stop: threading.Event) -> Iterator[None]:
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(WeakFileLock(path, timeout=_LOCK_POLL_S))
                break
            except Timeout:
                if stop.is_set():
                    raise ConfigurationError("the download was stopped") from None
        yield


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
