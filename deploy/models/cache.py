"""The models in the hub's cache: what is there, and its removal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.file_download import repo_folder_name

from common.errors import ConfigurationError
from common.models.references import DEFAULT_REVISION
from common.models.selection import CONFIG, is_gguf_model, quantizations

if TYPE_CHECKING:
    from collections.abc import Iterable

    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

    from common.models.references import HubReference


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A repository in the cache: its size in bytes, its revisions, and its GGUF files."""

    repository: str
    size: int
    revisions: tuple[str, ...]
    gguf_files: tuple[str, ...]


def cached_models() -> list[CachedModel]:
    """Return the repositories in the cache that hold a model, or a part of one, by name."""
    return sorted((_model(repo) for repo in _repositories(_scan()) if _holds_model(repo)), key=lambda m: m.repository)


def remove(reference: HubReference) -> int:
    """Remove a repository, one of its revisions or GGUF files from the cache; return the bytes that become free.

    Raises:
        ConfigurationError: it is not in the cache.
    """
    scanned = _scan()
    repositories = frozenset(repo for repo in _repositories(scanned) if repo.repo_id == reference.repository)
    revisions = [
        revision
        for repo in repositories
        for revision in repo.revisions
        if reference.revision in (DEFAULT_REVISION, revision.commit_hash, *revision.refs)
    ]
    is_whole = reference.quantization is None and reference.revision == DEFAULT_REVISION
    partial = _remove_partial_files(reference) if is_whole else 0
    if scanned is None or not revisions:
        if partial:
            return partial
        raise ConfigurationError(_absent(reference))
    # Copies of a repository have the same commits.
    scanned = replace(scanned, repos=repositories)
    if reference.quantization is None:
        strategy = scanned.delete_revisions(*(revision.commit_hash for revision in revisions))
    else:
        files = _files_of(reference.quantization, revisions)
        if not files:
            raise ConfigurationError(_absent(reference))
        strategy = scanned.delete_files(*files)
    strategy.execute()
    return partial + strategy.expected_freed_size


def _files_of(quantization: str, revisions: Iterable[CachedRevisionInfo]) -> list[CachedFileInfo]:
    """Return the GGUF files of a quantization: those of F16, but not of BF16; or those whose names end with the tag."""
    tag = quantization.lower()
    files = [file for revision in revisions for file in revision.files if is_gguf_model(file.file_name)]
    exact = [file for file in files if quantizations([file.file_name])[0].lower() == tag]
    return exact or [file for file in files if file.file_name.lower().endswith(f"{tag}.gguf")]


def _remove_partial_files(reference: HubReference) -> int:
    """Remove the files of a repository whose download was interrupted; return their bytes."""
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=reference.repository, repo_type="model")
    freed = 0
    for path in (folder / "blobs").glob("*.incomplete"):
        freed += path.stat().st_size
        path.unlink()
    return freed


def _scan() -> HFCacheInfo | None:
    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _repositories(scanned: HFCacheInfo | None) -> list[CachedRepoInfo]:
    return [repo for repo in scanned.repos if repo.repo_type == "model"] if scanned is not None else []


def _holds_model(repo: CachedRepoInfo) -> bool:
    names = {file.file_name for revision in repo.revisions for file in revision.files}
    return CONFIG in names or any(map(is_gguf_model, names))


def _model(repo: CachedRepoInfo) -> CachedModel:
    return CachedModel(
        repo.repo_id,
        repo.size_on_disk,
        tuple(sorted(ref for revision in repo.revisions for ref in revision.refs or {revision.commit_hash[:12]})),
        tuple(
            sorted({f.file_name for revision in repo.revisions for f in revision.files if is_gguf_model(f.file_name)})
        ),
    )


def _absent(reference: HubReference) -> str:
    return f"model {reference}: not in the cache ({constants.HF_HUB_CACHE}); `pando models list` shows what is"
