from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from deploy.supervisor.state import (
    DeploymentState,
    ServiceState,
    find_state,
    make_private,
    read_state,
    run_root,
    write_state,
)

if TYPE_CHECKING:
    from pathlib import Path


def state_at(port: int, pid: int | None = None) -> DeploymentState:
    services = {"scheduler": ServiceState("unix:/run/s.sock", 12, 1)}
    return DeploymentState(pid or os.getpid(), f"http://127.0.0.1:{port}", "a-model", services)


def put(root: Path, state: DeploymentState) -> None:
    folder = root / state.url.rpartition(":")[2]
    folder.mkdir(parents=True)
    write_state(folder, state)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_written_state_reads_back_equal(tmp_path: Path) -> None:
    write_state(tmp_path, state_at(8000))
    assert read_state(tmp_path) == state_at(8000)


def test_the_only_deployment_is_found(tmp_path: Path) -> None:
    put(tmp_path, state_at(8000))
    assert find_state(tmp_path).address_of("scheduler") == "unix:/run/s.sock"


def test_a_deployment_whose_supervisor_is_dead_does_not_count(tmp_path: Path) -> None:
    put(tmp_path, state_at(8000, dead_pid()))
    with pytest.raises(ConfigurationError, match=f"looked in {tmp_path}.*pando up"):
        find_state(tmp_path)


def test_several_deployments_need_a_port_to_choose(tmp_path: Path) -> None:
    put(tmp_path, state_at(8000))
    put(tmp_path, state_at(8001))
    with pytest.raises(ConfigurationError, match="--port"):
        find_state(tmp_path)
    assert find_state(tmp_path, port=8001) == state_at(8001)


def test_a_damaged_or_foreign_state_file_is_ignored(tmp_path: Path) -> None:
    for content in ("", "{", "[]", '{"pid": 1}', '{"services": 3}'):
        (tmp_path / "state.json").write_text(content)
        assert read_state(tmp_path) is None


def test_an_unknown_service_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="runs no router"):
        state_at(8000).address_of("router")


def test_one_of_several_models_must_be_chosen(tmp_path: Path) -> None:
    services = {f"{model}/scheduler": ServiceState(f"unix:/run/{model}.s.sock") for model in ("small", "large")}
    models = {"small": "small/", "org/large": "large/"}
    put(tmp_path, DeploymentState(os.getpid(), "http://127.0.0.1:8000", "small", services, models))
    state = find_state(tmp_path)
    assert state.address_of("scheduler", "org/large") == "unix:/run/large.s.sock"
    with pytest.raises(ConfigurationError, match="small, org/large: choose one with --model"):
        state.address_of("scheduler")
    with pytest.raises(ConfigurationError, match="no huge"):
        state.address_of("scheduler", "huge")


def test_the_only_model_may_be_named() -> None:
    services = {"scheduler": ServiceState("unix:/run/s.sock")}
    state = DeploymentState(1, "http://127.0.0.1:8000", "small", services, {"small": ""})
    assert state.address_of("scheduler") == state.address_of("scheduler", "small") == "unix:/run/s.sock"


def test_the_run_root_is_below_the_session_directory_where_there_is_one(tmp_path: Path) -> None:
    assert run_root({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "pando"
    assert run_root({"XDG_RUNTIME_DIR": "/does/not/exist"}).name == f"pando-{os.getuid()}"


def test_a_run_directory_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "pando"
    folder.mkdir(mode=0o777)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_run_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigurationError, match="another user"):
        make_private(tmp_path / "link")
