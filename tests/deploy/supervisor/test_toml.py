from __future__ import annotations

import argparse
import tomllib
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from common.settings import Settings, parse_settings
from deploy.supervisor.process import dump_settings

if TYPE_CHECKING:
    from pathlib import Path


def read_back(path: Path, settings: Settings) -> Settings:
    path.write_text(dump_settings(settings))
    return parse_settings(argparse.ArgumentParser(), ["--config", str(path)], environ={})[0]


def test_defaults_read_back_equal(tmp_path: Path) -> None:
    assert read_back(tmp_path / "settings.toml", Settings()).model_dump() == Settings().model_dump()


def test_changed_values_and_secrets_read_back_equal(tmp_path: Path) -> None:
    settings = Settings()
    settings = settings.model_copy(
        update={
            "model": settings.model.model_copy(update={"reference": 'C:\\models\\"x" äß 模型'}),
            "scheduler": settings.scheduler.model_copy(
                update={"workers": ("unix:/a", "unix:/b"), "target_plan_ms": 1.5, "admin_token": SecretStr("s3cret")}
            ),
        }
    )
    again = read_back(tmp_path / "settings.toml", settings)
    assert again.model_dump() == settings.model_dump()
    assert again.scheduler.admin_token is not None
    assert again.scheduler.admin_token.get_secret_value() == "s3cret"


# Lone surrogates are no text: neither the environment nor a file can carry them.
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_reads_back_equal(text: str) -> None:
    settings = Settings()
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"served_name": text})})
    assert tomllib.loads(dump_settings(settings))["model"]["served_name"] == text
