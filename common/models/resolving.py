"""From a model's reference to its files."""

from __future__ import annotations

import os
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.models.bundled import BUNDLED_MODELS, find_bundled
from common.models.files import ModelFiles, ModelKind
from common.models.progress import LogReport
from common.models.references import HUB, is_object_address, is_web_address, parse_hub_reference, parse_object_reference
from common.models.selection import INDEX, shards_of

if TYPE_CHECKING:
    from types import ModuleType

    from common.models.progress import DownloadReport
    from common.models.references import HubReference, ObjectReference
    from common.models.selection import TensorChoice

ACCEPTED = (
    f"Give a bundled model's name ({', '.join(BUNDLED_MODELS)}), a directory with config.json, a .gguf file, or a "
    "model on the Hugging Face hub as organisation/repository[@revision][:quantization] or the address of its page, or "
    "the address of one in an object store (s3://bucket/prefix, gs://bucket/prefix)"
)


def resolve_model(reference: str, *, weights: bool = True, choose: TensorChoice | None = None) -> ModelFiles:
    """Find the files that `reference` names; those of a hub are downloaded if the cache lacks them.

    A bundled model's name takes precedence over a path of the same name, for which `./name` can be written; a path that
    exists takes precedence over a model on a hub.

    Args:
        reference: a bundled model's name, a path, `organisation/repository[@revision][:quantization]` or the address of
            its page, or an address in an object store.
        weights: whether weights are needed, or only configuration and tokenizer.
        choose: of a model with an index of its safetensors files, the tensors that are needed; None: all.

    Raises:
        ConfigurationError: there is no usable model, or it cannot be downloaded; the message says what to do.
    """
    local = find_local(reference)
    if local is None:
        return _fetch(reference, LogReport(), weights=weights, choose=choose)
    if weights and choose is not None and (local.path / INDEX).is_file():
        return replace(local, shards=shards_of((local.path / INDEX).read_text(encoding="utf-8"), choose))
    return local


def pin(reference: str, report: DownloadReport, *, weights: bool = True) -> str:
    """Return a reference to the same model at its present commit, after its files have been downloaded.

    A reference to local files is returned unchanged.

    Raises:
        ConfigurationError: as for `resolve_model`.
    """
    if find_local(reference) is not None:
        return reference
    if is_object_address(reference):
        # All processes must use one version, and the address may soon be that of another.
        return str(_fetch(reference, report, weights=weights).path)
    named = hub_reference(reference)
    return str(named.at(_import(reference, "hub").fetch(named, weights=weights, report=report).commit))


def _fetch(reference: str, report: DownloadReport, *, weights: bool, choose: TensorChoice | None = None) -> ModelFiles:
    files: ModelFiles
    if is_object_address(reference):
        stored = object_reference(reference)
        files = _import(reference, "object_store").fetch(stored, weights=weights, report=report, choose=choose)
    else:
        named = hub_reference(reference)
        files = _import(reference, "hub").fetch(named, weights=weights, report=report, choose=choose).files
    return files


def find_local(reference: str) -> ModelFiles | None:
    """Return the files of a bundled model or a path; None if `reference` can only be on a hub or in an object store.

    Raises:
        ConfigurationError: it is neither of them.
    """
    bundled = find_bundled(reference)
    if bundled is not None:
        return bundled
    if is_object_address(reference):
        object_reference(reference)
        return None
    path = Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"model {reference!r}: the directory has no config.json")
        return ModelFiles(path.resolve().name, ModelKind.DIRECTORY, path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return ModelFiles(path.name, ModelKind.GGUF, path)
    if path.is_file():
        raise ConfigurationError(f"model {reference!r}: the file is not a .gguf file. {ACCEPTED}")
    hub_reference(reference)
    return None


def hub_reference(reference: str) -> HubReference:
    """Return the parts of a reference to a model on a hub.

    Raises:
        ConfigurationError: it is not written as one, or as a bundled model's name with a mistake.
    """
    hub = parse_hub_reference(reference)
    if hub is None and is_web_address(reference):
        hubs = " or ".join(sorted({HUB, os.environ.get("HF_ENDPOINT", HUB).rstrip("/")}))
        raise ConfigurationError(
            f"model {reference!r}: not the address of a model on the hub; write organisation/repository[@revision]"
            f"[:quantization], or the address of its page at {hubs}, with /tree/revision or without"
        )
    if hub is None:
        raise ConfigurationError(f"model {reference!r}: no such model, file or directory. {ACCEPTED}")
    if "/" not in hub.repository and (meant := _bundled_like(hub.repository)) is not None:
        raise ConfigurationError(
            f"model {reference!r}: no such model, file or directory; did you mean {meant}? {ACCEPTED}"
        )
    return hub


def _bundled_like(name: str) -> str | None:
    """Return the bundled model that `name` may be meant to be: the beginning of its name, or nearly all of it."""
    written = name.lower()
    begun = [bundled for bundled in BUNDLED_MODELS if bundled.startswith(written) and len(written) > 3]
    return next(iter(begun or get_close_matches(written, BUNDLED_MODELS, n=1, cutoff=0.7)), None)


def object_reference(reference: str) -> ObjectReference:
    """Return the parts of a reference to a model in an object store.

    Raises:
        ConfigurationError: it is not written as one.
    """
    stored = parse_object_reference(reference)
    if stored is None:
        raise ConfigurationError(f"model {reference!r}: write s3://bucket/prefix or gs://bucket/prefix[:quantization]")
    return stored


def _import(reference: str, name: str) -> ModuleType:
    # The imports take half a second, which a local model need not wait for.
    try:
        return import_module(f"common.models.{name}")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"model {reference}: models on a hub need the package {error.name}, which is not installed: "
            "pip install '.[hub]' in Pando's repository"
        ) from error
