"""Models in object stores (`s3://bucket/prefix`, `gs://bucket/prefix`), read with fsspec.

Each listing of a prefix has a folder of its own in the cache, named by the digest of all names, sizes and tags, so that
processes that start while the model is replaced never mix two versions. An interrupted file is continued.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import fsspec
from filelock import FileLock
from huggingface_hub import constants

from common.errors import ConfigurationError
from common.logs import get_logger
from common.models.disk import check_space, explain_disk
from common.models.files import ModelFiles, ModelKind
from common.models.selection import Selection, is_inside, select_files, shards_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.models.progress import DownloadReport
    from common.models.references import ObjectReference
    from common.models.selection import TensorChoice

PARALLEL_FILES: Final = 4
CHUNK_BYTES: Final = 8 * 1024 * 1024
# Names that stores give to what identifies the content of an object.
_TAGS: Final = ("ETag", "etag", "md5Hash", "crc32c", "generation")
_CURRENT: Final = "current"

log = get_logger("models")


def cache_root() -> Path:
    """Return the folder of all models from object stores, beside the hub's cache."""
    return Path(constants.HF_HOME).expanduser().resolve() / "object-stores"


def folder_of(reference: ObjectReference) -> Path:
    """Return the folder of a prefix in the cache."""
    return cache_root() / quote(reference.uri, safe="")


def fetch(
    reference: ObjectReference, *, weights: bool, report: DownloadReport, choose: TensorChoice | None = None
) -> ModelFiles:
    """Return the files of a model, downloaded if the cache lacks them.

    The store is asked for its listing each time; if it cannot be reached, or HF_HUB_OFFLINE is set, the version that
    was used last is taken from the cache.

    Args:
        reference: the model.
        weights: whether weights are needed, or only configuration and tokenizer.
        report: receives the progress if something is downloaded.
        choose: the tensors whose files are needed; None: all.

    Raises:
        ConfigurationError: the model cannot be downloaded or served; the message says what to do.
    """
    folder = folder_of(reference)
    if constants.HF_HUB_OFFLINE:
        return _cached(reference, folder, "HF_HUB_OFFLINE forbids a download", weights=weights, choose=choose)
    try:
        filesystem, prefix = _open(reference.uri)
        entries = _listing(filesystem, prefix)
    except ImportError as error:
        raise ConfigurationError(
            f"model {reference}: {error}: pip install '.[object-stores]' in Pando's repository"
        ) from error
    except Exception as error:  # stores raise their own libraries' errors
        if (folder / _CURRENT).is_file() and not _is_refusal(error):
            log.warning("model.store_unreachable", model=str(reference), error=str(error))
            return _cached(reference, folder, f"the store answered {error!r}", weights=weights, choose=choose)
        raise ConfigurationError(f"model {reference}: {_explain(error)}") from error
    if not entries:
        raise ConfigurationError(f"model {reference}: there are no objects below {reference.uri}/")
    version = folder / _digest(entries) / reference.name
    download = _Download(reference, filesystem, entries, version, report)
    try:
        version.mkdir(parents=True, exist_ok=True)
        files = download.run(weights=weights, choose=choose)
        _write(folder / _CURRENT, version.relative_to(folder).as_posix())
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"model {reference}: {_explain(error)}") from error
    return files


def remove(reference: ObjectReference) -> int:
    """Remove a prefix from the cache; return the bytes that become free.

    Raises:
        ConfigurationError: it is not in the cache.
    """
    folder = folder_of(reference)
    if not folder.is_dir():
        raise ConfigurationError(f"model {reference}: not in the cache ({cache_root()})")
    freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return freed


def cached_prefixes() -> dict[str, int]:
    """Return the prefixes in the cache, by their addresses, with their bytes."""
    found = {}
    for current in sorted(cache_root().glob(f"*/{_CURRENT}")):
        address = json.loads((current.parent / "reference.json").read_text(encoding="utf-8"))
        found[address] = sum(path.stat().st_size for path in current.parent.rglob("*") if path.is_file())
    return found


def _open(uri: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path of its prefix there."""
    # Google's client logs what it raises, too, and for each file that it may not look up the kind of its bucket.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        # Its packages announce what versions of gRPC they will need some day.
        warnings.simplefilter("ignore", FutureWarning)
        filesystem, prefix = fsspec.url_to_fs(uri)
    return filesystem, prefix


def _listing(filesystem: Any, prefix: str) -> dict[str, dict[str, Any]]:
    """Return the objects below a prefix by their paths below it; for a single object, by its name."""
    found = filesystem.find(prefix, detail=True)
    root = prefix.rstrip("/") + "/"
    names = {path: path[len(root) :] if path.startswith(root) else path.rpartition("/")[2] for path in found}
    # A key may contain "..", which would lead out of the cache.
    return {
        name: {**found[path], "path": path}
        for path, name in names.items()
        if found[path]["type"] == "file" and is_inside(name)
    }


def _identity(entry: Mapping[str, Any]) -> list[str]:
    return [str(entry["size"]), *(str(entry[tag]) for tag in _TAGS if tag in entry)]


def _digest(entries: Mapping[str, Mapping[str, Any]]) -> str:
    identities = sorted((name, *_identity(entry)) for name, entry in entries.items())
    return hashlib.sha256(json.dumps(identities).encode()).hexdigest()[:16]


def _cached(
    reference: ObjectReference, folder: Path, reason: str, *, weights: bool, choose: TensorChoice | None
) -> ModelFiles:
    """Return the files of the version that was used last.

    Raises:
        ConfigurationError: a file is missing.
    """
    try:
        version = folder / (folder / _CURRENT).read_text(encoding="utf-8")
        names = [path.relative_to(version).as_posix() for path in version.rglob("*") if path.is_file()]
        selection = select_files(reference, names, weights=weights)
        shards = _shards(version, selection, choose)
        missing = [name for name in shards if name not in names]
    except FileNotFoundError:
        missing = ["all files"]
    if missing:
        raise ConfigurationError(
            f"model {reference}: it is not completely in the cache ({folder}; missing: {', '.join(missing)}), and "
            f"{reason}"
        )
    return _files(version, selection.gguf, None if choose is None or selection.index is None else shards)


def _shards(version: Path, selection: Selection, choose: TensorChoice | None) -> tuple[str, ...]:
    if selection.index is None:
        return ()
    return shards_of((version / selection.index).read_text(encoding="utf-8"), choose)


def _files(version: Path, gguf: str | None, shards: tuple[str, ...] | None) -> ModelFiles:
    if gguf is None:
        return ModelFiles(version.name, ModelKind.DIRECTORY, version, shards)
    return ModelFiles(Path(gguf).name, ModelKind.GGUF, version / gguf)


class _Download:
    """The download of one version of a model."""

    def __init__(
        self,
        reference: ObjectReference,
        filesystem: Any,  # Any: fsspec has no types
        entries: Mapping[str, dict[str, Any]],
        version: Path,
        report: DownloadReport,
    ) -> None:
        self._reference = reference
        self._filesystem = filesystem
        self._entries = entries
        self._version = version
        self._report = report

    def run(self, *, weights: bool, choose: TensorChoice | None) -> ModelFiles:
        # Other processes that want the same model wait.
        with FileLock(self._version.parent / "lock"):
            selection = select_files(self._reference, self._entries, weights=weights)
            names, shards = list(selection.files), None
            if selection.index is not None:
                self._fetch([selection.index])
                shards = _shards(self._version, selection, choose)
                if missing := [name for name in shards if name not in self._entries]:
                    raise ConfigurationError(
                        f"model {self._reference}: {selection.index} names objects that the store lacks: "
                        f"{', '.join(missing)}"
                    )
                names += shards
            self._fetch(names)
            folder = self._version.parents[1]
            _write(folder / "reference.json", json.dumps(self._reference.uri))
        return _files(self._version, selection.gguf, None if choose is None else shards)

    def _fetch(self, names: Sequence[str]) -> None:
        missing = [name for name in names if not (self._version / name).is_file()]
        if not missing:
            return
        total = sum(self._entries[name]["size"] for name in names)
        needed = sum(self._entries[name]["size"] - _size_of(self._partial(name)) for name in missing)
        check_space(str(self._reference), self._version, needed)
        self._report.begin(str(self._reference), len(names), total)
        try:
            self._report.advance(total - needed)
            with ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="download") as pool:
                list(pool.map(self._fetch_one, missing))
        finally:
            self._report.end()

    def _fetch_one(self, name: str) -> None:
        entry, partial, path = self._entries[name], self._partial(name), self._version / name
        partial.parent.mkdir(parents=True, exist_ok=True)
        start = _size_of(partial)
        with self._filesystem.open(entry["path"], "rb", cache_type="none") as source, partial.open("ab") as target:
            source.seek(start)
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
                self._report.advance(len(chunk))
        now = self._filesystem.info(entry["path"], refresh=True)
        if _identity(now) != _identity(entry) or _size_of(partial) != entry["size"]:
            partial.unlink()
            raise ConfigurationError(
                f"model {self._reference}: {name} was replaced in the store while it was downloaded; run the command "
                "again"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(path)

    def _partial(self, name: str) -> Path:
        return self._version.parent / "incomplete" / name


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _write(path: Path, text: str) -> None:
    # A complete model needs no room.
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _is_refusal(error: Exception) -> bool:
    """Whether the store knows the caller, but not the right to read, or does not know the caller."""
    # gcsfs has no error of its own for 403, and raises one with a code for 401.
    return (
        isinstance(error, PermissionError)
        or "credentials" in str(error).lower()
        or str(error).startswith("Forbidden: ")
        or getattr(error, "code", None) == 401
    )


def _explain(error: Exception) -> str:
    if (problem := explain_disk(error, cache_root())) is not None:
        return problem
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket or prefix ({error})"
    if _is_refusal(error):
        problem = " ".join(str(error).split())
        return (
            f"the store refuses access ({problem}); check the credentials in the environment (AWS_ACCESS_KEY_ID, "
            "AWS_PROFILE or GOOGLE_APPLICATION_CREDENTIALS, …) and their rights on the bucket"
        )
    return f"the store cannot be read: {type(error).__name__}: {error}"
