"""Gathers what there is to know of a model: on a hub without its weights, or on this host."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from common.gguf_header import read_header
from common.models import ModelFiles, ModelKind
from common.models.references import is_object_address
from common.models.resolving import find_local, hub_reference
from common.models.selection import CONFIG, INDEX, WEIGHTS, is_gguf_model, select_files
from deploy.models.facts import Evidence
from services.worker.engine.model.config_gguf import config_from_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from huggingface_hub.hf_api import RepoFile

    from common.models.references import HubReference
    from services.worker.engine.model.config import ModelConfig


def gather(reference: str) -> Evidence:
    """Collect the facts of the model `reference`; of a hub's model, configuration and index are downloaded.

    Raises:
        ConfigurationError: there is no such model.
    """
    local = find_local(reference)
    if local is None and is_object_address(reference):
        raise ConfigurationError(f"model {reference}: download it to inspect it: pando models pull {reference}")
    return gather_local(local) if local is not None else gather_from_hub(hub_reference(reference))


def gather_local(files: ModelFiles) -> Evidence:
    """Collect the facts of a model on this host."""
    if files.kind is ModelKind.GGUF:
        return _gguf_on_disk(files.path)
    sizes = {
        path.relative_to(files.path).as_posix(): path.stat().st_size
        for path in sorted(files.path.rglob("*"))
        if path.is_file()
    }
    documents = {name: _read(files.path / name) for name in _documents(sizes)}
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    return _evidence(documents, sizes, weights, None)


def gather_from_hub(reference: HubReference) -> Evidence:
    """Collect the facts of a model on a hub.

    Raises:
        ConfigurationError: it cannot be asked for; the message says what to do.
    """
    # Half a second, which other models need not wait for.
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    from common.models.hub import LIBRARY, list_files
    from common.models.hub_errors import FAILURES, explain

    disable_progress_bars()
    try:
        api = HfApi(library_name=LIBRARY)
        about = api.model_info(reference.repository, revision=reference.revision, expand=["sha", "safetensors", "gguf"])
        pinned = reference.at(about.sha or reference.revision)
        tree = list_files(pinned)
        sizes = {name: entry.size for name, entry in tree.items()}
        if reference.quantization is None and CONFIG in sizes and not _is_gguf_only(sizes):
            documents = {
                name: _read(
                    Path(hf_hub_download(reference.repository, name, revision=pinned.revision, library_name=LIBRARY))
                )
                for name in _documents(sizes)
            }
            stated = about.safetensors.total if about.safetensors else None
            used = select_files(reference, sizes, weights=False).files
            weights = {name: size for name, size in sizes.items() if _is_weight(name, documents)}
            return _evidence(documents, {name: sizes[name] for name in used} | weights, weights, stated)
        return _gguf_on_hub(reference, tree, about.gguf or {})
    except FAILURES as error:
        raise ConfigurationError(explain(error, reference)) from error


def _gguf_on_hub(reference: HubReference, tree: Mapping[str, RepoFile], about: Mapping[str, Any]) -> Evidence:
    selection = select_files(reference, tree, weights=True)
    assert selection.gguf is not None
    return Evidence(
        files={selection.gguf: tree[selection.gguf].size},
        stated_parameters=about.get("total"),
        architecture=str(about.get("architecture", "unknown")),
        gguf_context=about.get("context_length"),
        has_tokenizer=True,
        has_chat_template=bool(about.get("chat_template")),
    )


def _gguf_on_disk(path: Path) -> Evidence:
    header = read_header(path)
    fields = header.metadata
    config: ModelConfig | None
    try:
        config = config_from_gguf(fields, tensors=header.tensors, divisors=())
    except ConfigurationError:
        config = None
    return Evidence(
        files={path.name: path.stat().st_size},
        stated_parameters=sum(math.prod(entry.shape) for entry in header.tensors.values()),
        architecture=str(fields.get("general.architecture")),
        gguf_config=config,
        has_tokenizer="tokenizer.ggml.tokens" in fields,
        has_chat_template="tokenizer.chat_template" in fields,
    )


def _evidence(
    documents: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, int],
    weights: Mapping[str, int],
    stated: int | None,
) -> Evidence:
    total = (documents.get(INDEX, {}).get("metadata") or {}).get("total_size")
    tokenizer = documents.get("tokenizer_config.json", {})
    has_template = any(name.endswith(".jinja") for name in sizes) or bool(tokenizer.get("chat_template"))
    return Evidence(
        config=documents.get(CONFIG, {}),
        generation=documents.get("generation_config.json", {}),
        files=dict(sizes),
        weight_bytes=int(total) if isinstance(total, int | float) else sum(weights.values()) or None,
        stated_parameters=stated,
        has_tokenizer="tokenizer.json" in sizes,
        has_chat_template=has_template,
        has_pooling=any(name.endswith("_Pooling/config.json") for name in sizes),
    )


def _documents(sizes: Mapping[str, int]) -> list[str]:
    return [name for name in (CONFIG, "generation_config.json", "tokenizer_config.json", INDEX) if name in sizes]


def _is_gguf_only(sizes: Mapping[str, int]) -> bool:
    return any(map(is_gguf_model, sizes)) and WEIGHTS not in sizes and INDEX not in sizes


def _is_weight(name: str, documents: Mapping[str, Mapping[str, Any]]) -> bool:
    return name == WEIGHTS or name in (documents.get(INDEX, {}).get("weight_map") or {}).values()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: a JSON object is expected")
    return content
