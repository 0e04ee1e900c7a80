"""Disks that fill while a model is downloaded, although there was room enough when the download began."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE as CHUNK_BYTES

from tests.common.models.conftest import NAME, SHARD_BYTES, SHARDS
from tests.fakes.hub import Repository

if TYPE_CHECKING:
    from tests.fakes.hub import FakeHub
    from tests.fakes.hub_client import HubClient

LARGE = "acme/large"
WEIGHTS = "model.safetensors"
LARGE_BYTES = 2 * CHUNK_BYTES + 12_345
CONFIG = json.dumps({"model_type": "llama", "padding": "x" * 1000}).encode()
# Mounts a file system of 15 MB as $1, runs the rest of the command there, waits for a line, and runs it with room.
ON_A_SMALL_DISK = """
home=$1; shift
mount -t tmpfs -o size=15m tmpfs "$home" || exit 3
"$@"; echo; read -r _
mount -o remount,size=100m "$home"
"$@"; echo
cp -L "$home"/hub/*/snapshots/*/model.safetensors "$home".copy
"""


@pytest.fixture
def large(hub: FakeHub) -> bytes:
    """The weights of `LARGE`."""
    weights = random.Random(1).randbytes(LARGE_BYTES)
    hub.repositories[LARGE] = Repository({"config.json": CONFIG, WEIGHTS: weights})
    return weights


def message(client: HubClient, model: str) -> str:
    return (
        f"model {model}: the disk of the cache ({client.home}/hub) is full; delete models (`pando models list`, "
        "`pando models remove NAME`), or set HF_HOME to a larger disk; the next download continues where this one "
        "stopped"
    )


def complete_files(client: HubClient, model: str) -> set[str]:
    snapshots = client.cached(model) / "snapshots"
    return {path.name for path in snapshots.rglob("*") if path.is_file()}


@pytest.mark.parametrize("written", [1, CHUNK_BYTES // 2, CHUNK_BYTES, CHUNK_BYTES + 4321, LARGE_BYTES - 1])
def test_what_is_written_when_the_disk_is_full_is_kept_and_the_rest_fetched_once_there_is_room(
    hub: FakeHub, client: HubClient, large: bytes, written: int
) -> None:
    refused = client.resolve_on_full_disk(LARGE, len(CONFIG) + written)
    assert refused["error"] == message(client, LARGE)
    [partial] = (client.cached(LARGE) / "blobs").glob("*.incomplete")
    assert partial.read_bytes() == large[:written]
    assert complete_files(client, LARGE) == {"config.json"}
    assert "not completely in the cache" in client.resolve(LARGE, HF_HUB_OFFLINE="1")["error"]
    hub.sent.clear()
    found = client.resolve(LARGE)
    assert (Path(found["path"]) / WEIGHTS).read_bytes() == large
    assert hub.sent[WEIGHTS] == LARGE_BYTES - written
    assert not partial.exists()


@pytest.mark.parametrize("room", [0, len(CONFIG) - 1])
def test_a_small_file_that_does_not_fit_is_not_taken_as_complete(client: HubClient, large: bytes, room: int) -> None:
    assert client.resolve_on_full_disk(LARGE, room)["error"] == message(client, LARGE)
    assert complete_files(client, LARGE) == set()
    found = Path(client.resolve(LARGE)["path"])
    assert (found / "config.json").read_bytes() == CONFIG
    assert (found / WEIGHTS).read_bytes() == large


def test_files_that_are_fetched_at_once_share_the_room(hub: FakeHub, client: HubClient, repository: Path) -> None:
    room = SHARD_BYTES + SHARD_BYTES // 2
    assert client.resolve_on_full_disk(NAME, room)["error"] == message(client, NAME)
    kept = sum(path.stat().st_size for path in (client.cached(NAME) / "blobs").iterdir())
    assert SHARD_BYTES <= kept <= room
    hub.sent.clear()
    found = Path(client.resolve(NAME)["path"])
    for name in SHARDS:
        assert (found / name).read_bytes() == (repository / name).read_bytes()
    assert sum(hub.sent.values()) < SHARD_BYTES


def test_a_model_that_is_in_the_cache_needs_no_room(client: HubClient, repository: Path) -> None:
    path = client.resolve(NAME)["path"]
    assert client.resolve_on_full_disk(NAME, 0)["path"] == path


def can_mount(folder: Path) -> bool:
    """Whether this user may mount file systems in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(folder)],
        capture_output=True, check=False,
    )  # fmt: skip
    return tried.returncode == 0


def test_a_file_system_that_is_full_is_continued_once_it_is_larger(
    hub: FakeHub, client: HubClient, large: bytes
) -> None:
    client.home.mkdir()
    if not can_mount(client.home):
        pytest.skip("NOT tested on a file system: this user may not mount one (user namespaces)")
    # The look at the disk before the download is told that the file fits.
    hub.repositories[LARGE].listed_sizes[WEIGHTS] = 1000
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", ON_A_SMALL_DISK, "sh", str(client.home)]
    resolving = [sys.executable, "-m", "tests.fakes.hub_client", LARGE, "1"]
    with subprocess.Popen(
        [*command, *resolving], env=client.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["error"] == message(client, LARGE)
        hub.repositories[LARGE].listed_sizes.clear()
        hub.sent.clear()
        found, _ = process.communicate("\n")
        assert "path" in json.loads(found)
    assert client.home.with_name(f"{client.home.name}.copy").read_bytes() == large
    assert 0 < hub.sent[WEIGHTS] < LARGE_BYTES - CHUNK_BYTES


def test_a_limit_of_file_sizes_is_named(client: HubClient, large: bytes) -> None:
    # Shells count blocks of 512 or 1024 bytes.
    command = [
        "sh",
        "-c",
        'ulimit -f 5000; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "tests.fakes.hub_client",
        LARGE,
        "1",
    ]
    ended = subprocess.run(command, env=client.environment(), capture_output=True, text=True, check=True)
    refused = json.loads(ended.stdout)["error"]
    assert "a file is larger than the disk of the cache (" in refused
    assert "or `ulimit -f` permits; set HF_HOME to another disk, or raise the limit" in refused
    assert (Path(client.resolve(LARGE)["path"]) / WEIGHTS).read_bytes() == large
