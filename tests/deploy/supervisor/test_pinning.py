"""The models of a deployment on a hub: all of its services use one commit."""

from __future__ import annotations

from typing import Any

import pytest

from common import models
from common.models.progress import PeriodicReport
from common.settings import Settings
from deploy.supervisor.layout import plan_layout
from deploy.supervisor.models import pin_models
from deploy.supervisor.process import child_environment


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What has been asked for, with weights or not."""
    found: list[tuple[str, bool]] = []

    def pin(reference: str, report: object, *, weights: bool = True) -> str:
        found.append((reference, weights))
        return f"{reference}@c0ffee" if "/" in reference else reference

    monkeypatch.setattr(models, "pin", pin)
    return found


def pinned(settings: dict[str, Any]) -> Settings:
    return pin_models(Settings.model_validate(settings), 1, PeriodicReport(lambda _: None))


def test_a_single_model_keeps_its_name(asked: list[tuple[str, bool]], tmp_path: Any) -> None:
    settings = pinned({"model": {"reference": "org/model"}})
    assert (settings.model.reference, settings.model.name) == ("org/model@c0ffee", "org/model")
    layout = plan_layout(settings, tmp_path)
    services = [spec for spec in layout.services if spec.name != "gateway"]
    assert {spec.settings.model.reference for spec in services} == {"org/model@c0ffee"}
    assert layout.model == "org/model"
    assert asked == [("org/model", True)]


def test_each_of_several_models_is_pinned(asked: list[tuple[str, bool]]) -> None:
    settings = pinned(
        {
            "model": {"reference": "org/shared"},
            "models": {
                "own": "org/own",
                "shared": {"max_context": 512},
                "random": {"reference": "org/random", "load_format": "dummy"},
                "fake": {"load_format": "fake", "reference": "org/fake"},
                "bundled": "smollm2-135m-instruct",
            },
        }
    )
    assert asked == [
        ("org/own", True), ("org/shared", True), ("org/random", False), ("smollm2-135m-instruct", True),
    ]  # fmt: skip
    assert settings.model.reference == "org/shared@c0ffee"
    assert settings.models["own"].reference == "org/own@c0ffee"
    assert settings.models["random"].reference == "org/random@c0ffee"
    assert settings.models["fake"].reference == "org/fake"
    assert "reference" not in settings.models["shared"].model_fields_set


def test_services_get_the_settings_of_the_hub() -> None:
    environ = {
        "HF_TOKEN": "hf_x", "HF_HOME": "/cache", "HF_ENDPOINT": "https://mirror", "HF_HUB_OFFLINE": "1",
        "PANDO_MODEL__REFERENCE": "x",
    }  # fmt: skip
    kept = child_environment(environ)
    assert {name: value for name, value in kept.items() if name.startswith("HF_")} == {
        name: value for name, value in environ.items() if name.startswith("HF_")
    }
    assert "PANDO_MODEL__REFERENCE" not in kept


def test_services_get_the_text_that_chat_templates_have_at_the_start(
    asked: list[tuple[str, bool]], tmp_path: Any
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    template = str(file)
    settings = pinned({"model": {"chat_template": template}, "models": {"a": {"chat_template": template}, "b": {}}})
    file.unlink()
    layout = plan_layout(settings, tmp_path)
    own = {spec.model: spec.settings.model.chat_template for spec in layout.services if spec.model}
    assert own == {"a": "{{ messages }}", "b": "{{ messages }}"}
    assert asked
