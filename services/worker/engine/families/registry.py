"""Finds the families: `FAMILIES` of all modules of this folder."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from services.worker.engine import families

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.worker.engine.model.family import Family, GgufFamily


@cache
def families_by_name() -> Mapping[str, Family]:
    """Return all families by `model_type`."""
    names = [info.name for info in pkgutil.iter_modules(families.__path__) if info.name != "registry"]
    modules = [import_module(f"{families.__name__}.{name}") for name in names]
    return MappingProxyType({family.name: family for module in modules for family in module.FAMILIES})


@cache
def aliased_families() -> Mapping[str, Family]:
    """Return the families by their other `model_type`s."""
    return MappingProxyType({name: family for family in families_by_name().values() for name in family.aliases})


@cache
def wrapped_families() -> Mapping[str, Family]:
    """Return the families of text models by the `model_type` of checkpoints that contain them beside other models."""
    return MappingProxyType({name: family for family in families_by_name().values() for name in family.wrappers})


@cache
def families_by_architecture() -> Mapping[str, tuple[Family, GgufFamily]]:
    """Return the families that GGUF files may have, by their name there."""
    found = families_by_name().values()
    return MappingProxyType({each.gguf.architecture: (each, each.gguf) for each in found if each.gguf is not None})
