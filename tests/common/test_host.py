from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from common import host

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of four processors, pairs of which share a core, without control group."""
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cgroup").mkdir()
    for cpu in range(4):
        (tmp_path / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
        siblings = "0,2" if cpu % 2 == 0 else "1,3"
        (tmp_path / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    return tmp_path


def test_twins_of_a_core_count_once(system: Path) -> None:
    assert host.available_cores() == 2


def test_twins_count_as_processors(system: Path) -> None:
    assert host.available_processors() == 4
    (system / "cgroup" / "cpu.max").write_text("300000 100000\n")
    assert host.available_processors() == 3


def test_processors_this_process_may_not_use_do_not_count(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2}, raising=False)
    assert host.available_cores() == 1


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 2), ("100000 100000", 1), ("50000 100000", 1)])
def test_a_quota_of_processor_time_limits_the_cores(system: Path, quota: str, cores: int) -> None:
    (system / "cgroup" / "cpu.max").write_text(f"{quota}\n")
    assert host.available_cores() == cores


def test_available_memory_is_the_part_of_a_limit_that_is_unused_or_reclaimable(system: Path) -> None:
    unlimited = host.available_memory()
    assert unlimited > 0
    (system / "cgroup" / "memory.max").write_text("3000\n")
    (system / "cgroup" / "memory.current").write_text("1000\n")
    assert host.available_memory() == 2000
    (system / "cgroup" / "memory.stat").write_text("anon 300\nactive_file 200\ninactive_file 500\n")
    assert host.available_memory() == 2500
    (system / "cgroup" / "memory.max").write_text("max\n")
    assert host.available_memory() > 2500


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_kept_for_the_next_use() -> None:
    program = """
import resource
from common.host import keep_freed_memory

def touched_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytes([number]) * 2**22 for number in range(8)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
first = touched_pages()
print(first, sum(touched_pages() for _ in range(4)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, later = map(int, ran.stdout.split())
    assert later < first // 4
