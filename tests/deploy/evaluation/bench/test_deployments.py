from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.cli import main
from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError

if TYPE_CHECKING:
    from pathlib import Path


def test_settings_given_win_over_the_benchmarks_own() -> None:
    deployment = LaunchedDeployment(None, ["scheduler.max_rows=7"], ["scheduler.max_rows=5", "model.load_format=fake"])
    assert deployment.settings.scheduler.max_rows == 7
    assert deployment.settings.gateway.port != 0


def test_a_setting_under_its_old_name_takes_precedence_too(capsys: pytest.CaptureFixture[str]) -> None:
    deployment = LaunchedDeployment(None, ["scheduler.policy=fcfs"], ["scheduler.queue.policy=lpm"])
    assert deployment.settings.scheduler.queue.policy == "fcfs"
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("load_format", "name"), [("fake", "tiny (fake)"), ("dummy", "tiny (dummy)"), ("gguf", "tiny")]
)
def test_fake_and_dummy_models_are_marked_in_the_name(load_format: str, name: str) -> None:
    settings = [f"model.load_format={load_format}", "model.served_name=tiny"]
    assert LaunchedDeployment(None, settings).model == name


def test_a_wrong_setting_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "offline", "--launch", "--set", "scheduler.colour=3"])
    assert ended.value.code == 2
    assert "colour" in capsys.readouterr().err


def test_a_deployment_that_does_not_start_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    with pytest.raises(LaunchError, match=r"missing\.gguf"), LaunchedDeployment(None, [f"model.reference={missing}"]):
        pass
