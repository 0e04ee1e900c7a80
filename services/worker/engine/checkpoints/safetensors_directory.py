"""Directories as `save_pretrained` writes them: config.json and one or more safetensors files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from common.models.rope import with_rope_parameters
from common.models.selection import read_index
from services.worker.engine.checkpoints.safetensors_file import SafetensorsFile
from services.worker.engine.checkpoints.tensor_names import StoredTensor, stored_tensor
from services.worker.engine.checkpoints.weight_digest import WeightDigest, block_name
from services.worker.engine.families.registry import families_by_name
from services.worker.engine.model.config_json import config_from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from common.models.selection import TensorChoice
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.quantization.gguf_blocks import RowBlocks
    from services.worker.engine.quantization.grouped import GroupedMatrix

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FIRST = "model.embed_tokens.weight"
# What `model.` and `lm_head.` are called in a checkpoint: of a text model, of one with a vision tower beside it as
# transformers 4 and 5 write it, and of a text model without any head.
_TEXT_PARTS = (
    ("model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
    ("model.text_model.", "lm_head."),
    ("", "lm_head."),
)


class SafetensorsCheckpoint:
    """A decoder's weights; see `Checkpoint`."""

    def __init__(
        self, directory: Path, rope: Mapping[str, Any] | None = None, choose: TensorChoice | None = None
    ) -> None:
        """Read config and index of `directory`, no weights yet; for `rope` see `read_config`.

        Only the files of tensors that `choose` chooses have to be there; None: all.
        """
        self.config = read_config(directory, rope)
        self._names = families_by_name()[self.config.family].tensors
        self._tensors = SafetensorsTensors(directory, choose)
        self._prefixes = text_prefixes(self._tensors.has)

    def identity(self) -> str:
        """Return the digest of all blocks read; see `Checkpoint.identity`."""
        return self._tensors.identity()

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Return a tensor or a block of a matrix; see `Checkpoint.read`."""
        return self._tensors.read_stored(self._stored(name), rows, columns)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return self._tensors.has(self._stored(name).name)

    def packed(self, name: str, rows: slice | None = None, columns: slice | None = None) -> GroupedMatrix | None:
        """Return None: what is packed here consists of several tensors; see `PackedReader`."""
        return None

    def row_blocks(self, name: str, rows: slice) -> RowBlocks | None:
        """Return None: these files have no such blocks."""
        return None

    def has_beside(self, name: str) -> bool:
        """Whether there is a tensor of this name in the files; see `Checkpoint.has_beside`."""
        return self._tensors.has(name)

    def read_beside(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor by its name in the files; see `Checkpoint.read_beside`."""
        tensor = self._tensors.read(name)
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"tensor {name!r} has the shape {tuple(tensor.shape)} where the model's configuration says {shape}"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise ConfigurationError(f"tensor {name!r} is stored as {tensor.dtype}, which is not supported")
        return tensor

    def _stored(self, name: str) -> StoredTensor:
        stored = self._placed(stored_tensor(name, self._names))
        if self._names and not self._tensors.has(stored.name):
            # Some families are published with other names than `transformers` writes.
            plain = self._placed(stored_tensor(name, {}))
            return plain if self._tensors.has(plain.name) else stored
        return stored

    def _placed(self, stored: StoredTensor) -> StoredTensor:
        return replace(stored, name=_renamed(stored.name, self._prefixes))


class SafetensorsTensors:
    """Reads single tensors out of the shards of any model; one shard is open at a time."""

    def __init__(self, directory: Path, choose: TensorChoice | None = None) -> None:
        """Read the index of `directory`, no weights yet; `choose` chooses the tensors that will be read, None: all.

        Raises:
            ConfigurationError: files are missing.
        """
        self._directory = directory
        self._files = _files_by_tensor(directory, choose)
        self._digest = WeightDigest()
        self._open_name = ""
        self._open_file: SafetensorsFile | None = None

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Return a tensor or a block of a matrix; see `Checkpoint.read`."""
        return self.read_stored(StoredTensor(name), rows, columns)

    def read_stored(
        self, stored: StoredTensor, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return a tensor or a block of a matrix, which may be that of one expert; see `Checkpoint.read`."""
        name, part = stored.name, stored.part
        if name not in self._files:
            raise ConfigurationError(f"{self._directory}: no tensor {name!r} in the safetensors files")
        if part is not None and rows is not None:
            rows = slice(rows.start * part.step, rows.stop * part.step)
        if part is not None and part.is_transposed:
            rows, columns = columns, rows
        try:
            block = self._file(self._files[name], name).read(name, stored.expert, rows, columns)
        except OSError as error:
            path = self._directory / self._files[name]
            raise ConfigurationError(f"{path}: tensor {name!r} cannot be read: {error}") from error
        label = name if stored.expert is None else f"{name}[{stored.expert}]"
        self._digest.add(block_name(label, rows, columns), block)
        if part is None:
            return block
        return (block.t() if part.is_transposed else block)[part.first :: part.step]

    def identity(self) -> str:
        """Return the digest of all blocks read; see `Checkpoint.identity`."""
        return self._digest.hexdigest()

    def _file(self, file: str, name: str) -> SafetensorsFile:
        """Return the shard `file`, which the index says has the tensor `name`."""
        if self._open_file is None or file != self._open_name:
            self._open_file = SafetensorsFile(self._directory / file)
            self._open_name = file
        if name not in self._open_file.arrays:
            path = self._directory / file
            raise ConfigurationError(f"{path}: tensor {name!r} cannot be read: the file has none of this name")
        return self._open_file


def text_prefixes(has: Callable[[str], bool]) -> tuple[str, str]:
    """Return the prefixes that stand for `model.` and `lm_head.` in the checkpoint whose tensors `has` knows."""
    return next((part for part in _TEXT_PARTS if has(_renamed(_FIRST, part))), _TEXT_PARTS[0])


def _renamed(name: str, prefixes: tuple[str, str]) -> str:
    for plain, prefix in zip(_TEXT_PARTS[0], prefixes, strict=True):
        if name.startswith(plain):
            return prefix + name.removeprefix(plain)
    return name


def read_config(directory: Path, rope: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read config.json and, where there is one, generation_config.json; `rope`: see `with_rope_parameters`."""
    raw = read_json(directory / "config.json")
    return config_from_json(with_rope_parameters(raw, rope) if rope else raw, read_generation(directory))


def read_generation(directory: Path) -> dict[str, Any]:
    """Read generation_config.json; empty where there is none."""
    path = directory / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigurationError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: not a JSON object")
    return content


def files_in_index(directory: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index in `directory` names it.

    Raises:
        ConfigurationError: the index cannot be read, is damaged, or names files outside the directory.
    """
    try:
        return read_index((directory / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{directory / INDEX}: {error}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{directory}: {error}") from error


def _files_by_tensor(directory: Path, choose: TensorChoice | None) -> dict[str, str]:
    if (directory / INDEX).is_file():
        mapping = files_in_index(directory)
        needed = {mapping[name] for name in (mapping if choose is None else choose(mapping))}
        missing = [name for name in sorted(needed) if not (directory / name).is_file()]
        if missing:
            raise ConfigurationError(f"{directory}: {INDEX} names files that are not there: {', '.join(missing)}")
        return mapping
    if not (directory / WHOLE).is_file():
        raise ConfigurationError(f"{directory}: neither {WHOLE} nor {INDEX}; use load_format=dummy for random weights")
    return dict.fromkeys(SafetensorsFile(directory / WHOLE).arrays, WHOLE)
