"""Every family that the registry finds is compared with `transformers`, also from GGUF files, and documented."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.checks.families import ROOT, TABLES, table_of_families, table_of_formats, with_table
from services.worker.engine.families.registry import (
    aliased_families,
    families_by_architecture,
    families_by_name,
    wrapped_families,
)
from tests.services.worker.engine.execution.test_families import OWN
from tests.services.worker.engine.families import (
    ALSO_INTERPRETED,
    FAMILIES,
    IN_GGUF,
    INTERPRETED,
    OTHERS,
    SHARED,
    UNREAD_ARCHITECTURES,
    config_class,
    tiny_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


def test_every_family_is_compared_with_transformers() -> None:
    compared = {config_class(name).model_type for name, _ in FAMILIES.values()}
    assert set(families_by_name()) == compared


def test_every_architecture_of_gguf_files_is_compared() -> None:
    compared = {config_class(FAMILIES[each][0]).model_type for each in IN_GGUF}
    assert {family.name for family, _ in families_by_architecture().values()} <= compared
    assert {each.gguf_name for each in families_by_name().values()} <= {*families_by_architecture(), None}


def test_families_without_gguf_files_say_what_these_would_be_called() -> None:
    unread = {each.name for each in families_by_name().values() if each.gguf_architecture is None}
    assert set(UNREAD_ARCHITECTURES) == unread


@pytest.mark.parametrize("name", OTHERS)
def test_what_runs_through_transformers_has_no_implementation(name: str) -> None:
    config = tiny_config(*OTHERS[name]).to_dict()
    family = families_by_name().get(config["model_type"])
    assert family is None or not family.covers(config)


def test_every_family_runs_on_two_ranks() -> None:
    assert {model_type for model_type, _ in map(kind_of, SHARED)} == set(families_by_name())


def test_families_with_and_without_experts_run_on_two_ranks_as_both() -> None:
    assert set(map(kind_of, SHARED)) == set(map(kind_of, FAMILIES))


@pytest.mark.parametrize("variants", [(*INTERPRETED, *ALSO_INTERPRETED), OWN], ids=["interpreted", "on a GPU"])
def test_every_family_runs_through_the_programs_of_gpus(variants: Iterable[str]) -> None:
    assert {model_type for model_type, _ in map(kind_of, variants)} == set(families_by_name())


def kind_of(variant: str) -> tuple[str, bool]:
    """Return a tiny model's `model_type`, and whether it has experts."""
    name, options = FAMILIES[variant]
    return config_class(name).model_type, any(options.get(each) for each in options if each.endswith("_experts"))


def test_a_wrapper_is_no_family_of_its_own() -> None:
    assert wrapped_families()["gemma3"].name == "gemma3_text"
    assert not set(wrapped_families()) & set(families_by_name())


def test_an_alias_is_no_family_of_its_own() -> None:
    assert aliased_families()["kimi_k2"].name == "deepseek_v3"
    assert not set(aliased_families()) & {*families_by_name(), *wrapped_families()}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_families_are_up_to_date(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert with_table(page, TABLES[name](families_by_name().values())) == page


def test_tables_name_families_and_what_becomes_of_their_formats() -> None:
    page = "\n".join(table_of_families(families_by_name().values()))
    assert "| Mixtral | `mixtral` | `llama` |" in page
    assert "| Gemma 3 | `gemma3_text`, `gemma3` | `gemma3` |" in page
    rows = table_of_formats(families_by_name().values())
    [row] = [row for row in rows if "GLM-4 (9B of 2024)" in row]
    assert row.endswith("| no | no |")
