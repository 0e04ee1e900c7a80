"""Defaults of `pando up` for GPUs and for roles."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.settings import Settings, load_settings
from deploy.supervisor import layout
from deploy.supervisor.command import read_roles
from deploy.supervisor.layout import (
    HOST_GIGABYTES,
    HOST_GIGABYTES_ON_GPUS,
    ON_GPUS,
    Replicas,
    plan_layout,
    runs_on_gpu,
    suited,
)

if TYPE_CHECKING:
    from pathlib import Path


def settings_of(*flags: str) -> Settings:
    return load_settings("test", "", list(flags))


def sizes(settings: Settings) -> tuple[int, int]:
    return settings.scheduler.max_rows, settings.scheduler.max_step_tokens


def test_steps_are_larger_on_gpus_unless_configured() -> None:
    on_gpu = "--worker.device=cuda"
    assert sizes(suited(settings_of(on_gpu))) == tuple(ON_GPUS.values())
    assert sizes(suited(settings_of(on_gpu, "--scheduler.max_rows=64"))) == (64, ON_GPUS["max_step_tokens"])
    both = (on_gpu, "--scheduler.max_rows=8", "--scheduler.max_step_tokens=512")
    assert sizes(suited(settings_of(*both))) == (8, 512)
    assert sizes(suited(settings_of("--worker.device=cpu"))) == sizes(settings_of())


@pytest.mark.parametrize(("has_driver", "build", "expected"), [
    (True, "2.13.0", True), (True, "2.11.0+cu130", True), (True, "2.13.0+cpu", False), (False, "2.13.0", False),
    (True, None, False),
])  # fmt: skip
def test_a_gpu_is_used_if_driver_and_torch_build_allow_it(
    has_driver: bool, build: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def version(_name: str) -> str:
        if build is None:
            raise metadata.PackageNotFoundError
        return build

    monkeypatch.setattr(layout, "DRIVER", tmp_path if has_driver else tmp_path / "none")
    monkeypatch.setattr(layout, "version", version)
    assert runs_on_gpu(settings_of().worker) == expected


def test_all_services_of_a_deployment_get_the_sizes_for_gpus(tmp_path: Path) -> None:
    layout = plan_layout(settings_of("--worker.device=cuda"), tmp_path)
    for name in ("scheduler", "worker"):
        assert sizes(layout.find(name).settings) == tuple(ON_GPUS.values())


def host_gigabytes(folder: Path, roles: str, *flags: str) -> list[float]:
    layout = plan_layout(settings_of(*flags), folder, 1, Replicas(groups=read_roles(roles)))
    schedulers = [spec for spec in layout.services if spec.module == "services.scheduler"]
    return [spec.settings.scheduler.host_tier.gigabytes for spec in schedulers]


def test_groups_that_read_pages_of_others_have_a_host_tier_unless_it_is_configured(tmp_path: Path) -> None:
    cpu, gpu = "--worker.device=cpu", "--worker.device=cuda"
    assert host_gigabytes(tmp_path, "prefill=1,decode=1", cpu) == [HOST_GIGABYTES] * 2
    assert host_gigabytes(tmp_path, "prefill=1,decode=1", gpu) == [HOST_GIGABYTES_ON_GPUS] * 2
    assert host_gigabytes(tmp_path, "prefill=1,decode=1", cpu, "--scheduler.host_tier.gigabytes=3") == [3, 3]
    # The prefill group may generate later.
    assert host_gigabytes(tmp_path, "prefill=1,both=1", cpu) == [0, 0]
    assert host_gigabytes(tmp_path, "prefill=1,both=1", cpu, "--scheduler.automatic_role.enabled=true") == [1, 1]
    assert host_gigabytes(tmp_path, "prefill=1,decode=1", cpu, "--scheduler.host_tier.pages=8") == [0, 0]
    assert host_gigabytes(tmp_path, "both=2", cpu) == [0, 0]
    for size in ("gigabytes", "pages"):
        with pytest.raises(ConfigurationError, match=f"host_tier.{size} is 0: leave it out for 1 GiB"):
            host_gigabytes(tmp_path, "prefill=1,decode=1", cpu, f"--scheduler.host_tier.{size}=0")
