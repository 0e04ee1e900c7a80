"""The files of a repository that a service needs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, TypeAlias

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from common.models.references import HubReference, ObjectReference

    Reference: TypeAlias = HubReference | ObjectReference
    # Returns the names of those tensors that are needed, of the names of all tensors of a model.
    TensorChoice: TypeAlias = Callable[[Collection[str]], Collection[str]]

CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
# Configuration, tokenizer, chat templates, the files of sentence-transformers that define an embedding, and those of
# processors of images and videos.
_TEXT_FILES: Final = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja", "modules.json", "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
# Files of other tools in repositories with GGUF files: vision towers, and statistics of quantization.
_NOT_MODELS: Final = ("mmproj", "imatrix")
_QUANTIZATION: Final = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+(?:_[A-Za-z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|FP16|F32))"
    r"(?:-\d{5}-of-\d{5})?\.gguf$",
    re.IGNORECASE,
)
_SPLIT: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_PICKLES: Final = (".bin", ".pth", ".pt", ".ckpt")


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen files of a repository; `index` still names further ones, the shards."""

    files: tuple[str, ...]
    gguf: str | None = None
    index: str | None = None


def select_files(reference: Reference, files: Iterable[str], *, weights: bool) -> Selection:
    """Choose the files that are needed, `weights` or not; a GGUF file has everything in one.

    Raises:
        ConfigurationError: the repository has no model that can be served, or several and none is named.
    """
    present = sorted(files)
    models = [name for name in present if is_gguf_model(name)]
    if reference.quantization is not None:
        chosen = _find_quantization(reference, reference.quantization, models)
        return Selection((chosen,), gguf=chosen)
    has_safetensors = WEIGHTS in present or INDEX in present
    if CONFIG in present and (has_safetensors or not (models or weights)):
        text = tuple(name for name in present if any(_matches(name, pattern) for pattern in _TEXT_FILES))
        if not weights:
            return Selection(text)
        return Selection((*text, INDEX), index=INDEX) if INDEX in present else Selection((*text, WEIGHTS))
    if len(models) == 1:
        return Selection((_whole(reference, models[0]),), gguf=models[0])
    if models:
        raise ConfigurationError(
            f"model {reference}: the repository has several GGUF files; name a quantization, as in "
            f"{reference}:{quantizations(models)[0]} (there are {', '.join(quantizations(models))})"
        )
    raise ConfigurationError(f"model {reference}: {_missing(present)}")


def select_adapter(reference: Reference, files: Iterable[str]) -> Selection:
    """Choose the files of an adapter.

    Raises:
        ConfigurationError: the repository has no adapter that can be served.
    """
    present = set(files)
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if name not in present]
    if missing:
        raise ConfigurationError(
            f"adapter {reference}: the repository has no {missing[0]}; adapters are served as PEFT writes them, in "
            "safetensors"
        )
    return Selection((ADAPTER_CONFIG, ADAPTER_WEIGHTS))


def is_gguf_model(name: str) -> bool:
    """Whether a file of a repository is a model in GGUF."""
    stem = name.rpartition("/")[2].lower()
    return stem.endswith(".gguf") and not any(word in stem for word in _NOT_MODELS)


def quantizations(files: Iterable[str]) -> list[str]:
    """Return the names of the quantizations of GGUF files; for a file without one, the file's name."""
    return sorted({_quantization_of(name) or name for name in files})


def shards_of(index: str, choose: TensorChoice | None = None) -> tuple[str, ...]:
    """Return the files that the content of a safetensors index names, or those of them with chosen tensors.

    Raises:
        ConfigurationError: as for `read_index`.
    """
    files = read_index(index)
    chosen = files if choose is None else choose(files)
    return tuple(sorted({files[name] for name in chosen}))


def read_index(index: str) -> dict[str, str]:
    """Return the file of each tensor, as the content of a safetensors index names it.

    Raises:
        ConfigurationError: it is damaged, or names files outside the model's directory.
    """
    try:
        files = dict(json.loads(index)["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{INDEX} is damaged: {error!r}") from error
    for tensor, file in files.items():
        if not isinstance(file, str):
            raise ConfigurationError(f"{INDEX} is damaged: the file of tensor {tensor!r} is {file!r}, which is no name")
        if not is_inside(file):
            raise ConfigurationError(f"{INDEX} names the file {file!r}, which is outside the model's directory")
    return files


def is_inside(name: str) -> bool:
    """Whether the path of a file, relative to a directory, names something in that directory, whatever is there."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _find_quantization(reference: Reference, wanted: str, models: list[str]) -> str:
    if not models:
        raise ConfigurationError(
            f"model {reference}: the repository has no GGUF files; leave out `:{wanted}` to serve its safetensors"
        )
    exact = [name for name in models if (_quantization_of(name) or "").lower() == wanted.lower()]
    # llama.cpp's rule: the tag anywhere in the name, followed by a dot or dash.
    tag = re.compile(re.escape(wanted) + r"[.-]", re.IGNORECASE)
    found = exact or [name for name in models if tag.search(name)]
    if not found:
        available = ", ".join(quantizations(models))
        raise ConfigurationError(f"model {reference}: no quantization {wanted!r} in the repository; it has {available}")
    if len(found) > 1 and not _SPLIT.search(found[0]):
        raise ConfigurationError(
            f"model {reference}: {wanted!r} matches several files: {', '.join(found)}; write more of the name"
        )
    return _whole(reference, found[0])


def _whole(reference: Reference, name: str) -> str:
    if _SPLIT.search(name):
        raise ConfigurationError(
            f"model {reference}: {name} is one part of a split file, which is not supported; download all parts and "
            "join them with `llama-gguf-split --merge`, or choose a quantization that is one file"
        )
    return name


def _quantization_of(name: str) -> str | None:
    match = _QUANTIZATION.search(name)
    return match[1].upper() if match else None


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _missing(present: list[str]) -> str:
    if CONFIG not in present and ADAPTER_CONFIG in present:
        return "the repository holds an adapter (LoRA), which cannot be served without its base model"
    if CONFIG not in present:
        return "the repository has neither config.json nor a GGUF file, so it holds no model that can be served"
    if any(name.endswith(_PICKLES) for name in present):
        return (
            "the repository has its weights as Python pickles only, which are not loaded; convert them to safetensors "
            "(https://huggingface.co/spaces/safetensors/convert)"
        )
    return f"the repository has neither {WEIGHTS} nor {INDEX}, so it holds no weights that can be served"
