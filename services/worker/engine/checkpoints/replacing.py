"""Whether other weights can take the place of those that are loaded, and the identity of a model by its files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import ConfigurationError
from common.gguf_header import read_header
from common.models import ModelFiles, ModelKind, resolve_model
from services.worker.engine.checkpoints.file_identity import identity_of_files
from services.worker.engine.checkpoints.opening import open_checkpoint, read_rope
from services.worker.engine.checkpoints.safetensors_directory import files_in_index, read_json
from services.worker.engine.checkpoints.safetensors_file import SafetensorsFile
from services.worker.engine.checkpoints.stage_tensors import tensors_of_stage
from services.worker.engine.checkpoints.stored_values import check_values

if TYPE_CHECKING:
    from pathlib import Path

    from common.models.selection import TensorChoice
    from common.steps import EngineSpec

    # By name: type and shape.
    Shapes = dict[str, tuple[str, tuple[int, ...]]]

# Keys of config.json that say where the weights come from, and nothing about the architecture.
_ORIGIN = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
# Differences that an error names.
_NAMED = 3


def check_replacement(loaded: EngineSpec, replacement: EngineSpec) -> int:
    """Check that `replacement` has the architecture and the tensors of `loaded`; return the bytes of its files.

    Each rank of a stage reads a part of the tensors, to see that all values are numbers; together they read all.

    Raises:
        ConfigurationError: it has not, a file is damaged or has values that are no numbers, or it changes while it is
            read.
    """
    if "dummy" in (loaded.load_format, replacement.load_format):
        _check_configs(loaded, replacement)
        return 0
    files, old = weights_of(replacement), weights_of(loaded)
    if files.kind is not old.kind:
        raise ConfigurationError(
            f"{replacement.model} is a {files.kind.value}, and the loaded model a {old.kind.value}"
        )
    before = states_of(files)
    _check_configs(loaded, replacement)
    found = _shapes(files)
    _check_states(replacement.model, files, before)
    choose = _choice(replacement)
    _compare(replacement.model, _chosen(_shapes(old), old, choose), _chosen(found, files, choose))
    try:
        for path in weight_files(files):
            check_values(path, replacement.tensor_rank, replacement.tensor_ranks)
    except OSError as error:
        raise ConfigurationError(f"{replacement.model}: {error}") from error
    finally:
        # A file that changes is the reason for all that is found in it.
        _check_states(replacement.model, files, before)
    return sum(state.size for state in before)


def _check_states(model: str, files: ModelFiles, before: list[FileState]) -> None:
    if states_of(files) != before:
        raise ConfigurationError(f"{model}: its files change while they are read; retry when they are whole")


def _check_configs(loaded: EngineSpec, replacement: EngineSpec) -> None:
    """Compare what the engine reads of both configurations."""
    old, new = _described(loaded), _described(replacement)
    different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if different:
        shown = ", ".join(f"{key} is {new.get(key)!r}, not {old.get(key)!r}" for key in different[:_NAMED])
        raise ConfigurationError(f"{replacement.model} has another architecture than the loaded model: {shown}")


def _described(spec: EngineSpec) -> dict[str, Any]:
    """Return the configuration of a decoder as it is read, of any other model as it is written."""
    files = resolve_model(spec.model, weights=False)
    if files.kind is ModelKind.DIRECTORY:
        written = read_json(files.path / "config.json")
        return {key: value for key, value in written.items() if key not in _ORIGIN}
    return asdict(open_checkpoint(spec.model, spec.load_format, None, read_rope(spec.rope_parameters)).config)


def weights_of(spec: EngineSpec) -> ModelFiles:
    """Return the files of a model with those weights that the stage of `spec` reads."""
    return resolve_model(spec.model, choose=_choice(spec))


def _choice(spec: EngineSpec) -> TensorChoice | None:
    return tensors_of_stage(spec, read_rope(spec.rope_parameters))


def identity_by_samples(reference: str) -> str:
    """Return the identity of a model's weights by samples of its files; see `identity_of_files`."""
    return identity_of_files(weight_files(resolve_model(reference)))


def weight_files(files: ModelFiles) -> list[Path]:
    """Return the files with a model's weights, or those that were chosen, by name."""
    if files.kind is ModelKind.GGUF:
        return [files.path]
    if files.shards is not None:
        return [files.path / name for name in files.shards]
    return sorted(files.path.glob("*.safetensors"))


class FileState(NamedTuple):
    """A file by what changes when another process writes it or puts another one in its place."""

    name: str
    size: int
    modified_ns: int
    device: int
    number: int


def states_of(files: ModelFiles) -> list[FileState]:
    """Return the state of each file with weights.

    Raises:
        ConfigurationError: there is none, or one has gone.
    """
    try:
        states = [_state_of(path) for path in weight_files(files)]
    except OSError as error:
        raise ConfigurationError(f"{files.path}: a file of its weights is gone: {error}") from error
    if not states:
        raise ConfigurationError(f"{files.path}: no safetensors files")
    return states


def _state_of(path: Path) -> FileState:
    found = path.stat()
    return FileState(path.name, found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)


def _chosen(shapes: Shapes, files: ModelFiles, choose: TensorChoice | None) -> Shapes:
    """Leave out the tensors of other stages, which files that are divided elsewhere have, too."""
    if choose is None:
        return shapes
    chosen = choose(shapes if files.shards is None else files_in_index(files.path))
    return {name: shape for name, shape in shapes.items() if name in chosen}


def _shapes(files: ModelFiles) -> Shapes:
    """Return type and shape of each tensor; the headers also say how long a file must be.

    Raises:
        ConfigurationError: a file is damaged.
    """
    if files.kind is ModelKind.GGUF:
        return _shapes_of_gguf(files.path)
    shapes: Shapes = {}
    for path in weight_files(files):
        for name, array in SafetensorsFile(path).arrays.items():
            shapes[name] = array.dtype, array.shape
    return shapes


def _shapes_of_gguf(path: Path) -> Shapes:
    try:
        header, size = read_header(path), path.stat().st_size
    except OSError as error:
        raise ConfigurationError(f"{path} is damaged: {error}") from error
    if any(entry.offset >= size for entry in header.tensors.values()):
        raise ConfigurationError(f"{path} is damaged: it ends before its last tensor")
    return {name: (f"kind {entry.kind}", entry.shape) for name, entry in header.tensors.items()}


def _compare(model: str, old: Shapes, new: Shapes) -> None:
    for problem, names in (
        ("lacks tensors of the loaded model", old.keys() - new.keys()),
        ("has tensors that the loaded model has not", new.keys() - old.keys()),
        ("has tensors of another type or shape", {name for name in old.keys() & new.keys() if old[name] != new[name]}),
    ):
        if names:
            shown = ", ".join(repr(name) for name in sorted(names)[:_NAMED])
            raise ConfigurationError(f"{model} {problem}: {shown}{', …' if len(names) > _NAMED else ''}")
