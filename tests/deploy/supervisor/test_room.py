"""Deployments that are too large for their host are refused before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from deploy.supervisor import room
from deploy.supervisor.command import EXIT_CONFIGURATION, main, read_arguments
from deploy.supervisor.layout import Replicas
from deploy.supervisor.room import Host, check_room, count_gpus, find_host

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
LARGE = Host(cores=64, memory_bytes=256 * GIB, gpus=8)


def check(host: Host, *flags: str) -> None:
    settings, own = read_arguments(flags)
    check_room(settings, own.tp, Replicas(own.tokenizers, own.detokenizers, own.roles, own.encoders), host)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--worker.device", "cpu", "--roles", "both=1000"), "^1000 workers on 64 cores .*: start at most 512 groups"),
        (
            ("--worker.device", "cpu", "--roles", "prefill=300x2,decode=300x2"),
            "^1200 workers on 64 cores .*most 256 gr",
        ),
        (
            ("--worker.device", "cuda", "--roles", "both=9"),
            "^9 workers need a GPU each, and there are 8 GPUs: .* 8 groups",
        ),
        (("--worker.device", "cuda", "--roles", "both=2", "--tp", "2", "--encoders", "3"), "^10 workers .* 1 group of"),
        (("--worker.device", "cuda", "--tp", "8", "--worker.device_index", "1"), "7 GPUs from 1 on: start fewer ranks"),
        (("--worker.device", "cuda", "--roles", "both=1x4", "--pp", "3"), "^12 workers"),
        (
            ("--model.load_format", "fake", "--roles", "both=9000"),
            "^9000 workers and 9003 other services take at least 8",
        ),
        (
            ("--model.load_format", "fake", "--tokenizers", "9000"),
            "and 256.0 GiB are free: start fewer ranks .*tokenizers",
        ),
    ],
)
def test_more_processes_than_fit_are_refused_with_what_there_is(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check(LARGE, *flags)


def test_memory_counts_what_each_process_takes_at_least() -> None:
    flags = ("--worker.device", "cpu", "--roles", "both=4")
    check(Host(cores=2, memory_bytes=3 * GIB, gpus=None), *flags)
    with pytest.raises(ConfigurationError, match=r"^4 workers and 7 other services take at least 1\.9 GiB .* 2 groups"):
        check(Host(cores=2, memory_bytes=GIB, gpus=None), *flags)


def test_what_fits_is_accepted() -> None:
    check(LARGE, "--worker.device", "cuda", "--roles", "prefill=1x4,decode=4")
    check(LARGE, "--worker.device", "cpu", "--roles", "both=16")
    check(Host(cores=2, memory_bytes=2 * GIB, gpus=None), "--worker.device", "cuda", "--roles", "both=3")
    check(find_host())


def test_models_that_share_a_device_need_one_gpu() -> None:
    flags = (
        "--worker.device",
        "cuda",
        "--share-device",
        "--models",
        '{"a": {"reference": "x"}, "b": {"reference": "y"}}',
    )
    check(Host(cores=8, memory_bytes=64 * GIB, gpus=1), *flags)
    with pytest.raises(ConfigurationError, match=r"^2 workers need a GPU each, and there are 1 GPU"):
        check(Host(cores=8, memory_bytes=64 * GIB, gpus=1), *flags[:2], *flags[3:])


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        (None, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], 2),
        (None, [], None),
        ("0,3,5", ["nvidia0"], 3),
        ("", ["nvidia0"], 0),
    ],
)
def test_gpus_are_those_that_are_visible(
    visible: str | None, devices: list[str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.setattr(room, "_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == expected


def test_pando_up_refuses_a_thousand_groups_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--worker.device", "cpu", "--roles", "both=1000"]) == EXIT_CONFIGURATION
    error = capsys.readouterr().err
    assert error.startswith("pando up: 1000 workers ")
    assert error.endswith(" groups of this size (--roles)\n")
