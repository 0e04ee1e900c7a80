"""Models from S3, read by its own client from a server of its API. They need packages of their own: `make stores`."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.models.object_store import CHUNK_BYTES
from tests.common.models.s3_server import S3, STORES, Read, serving_s3
from tests.waiting import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
FOLDER = "/models/team/tiny"
ADDRESS = f"s3:/{FOLDER}"
SHARDS = {
    f"model-{number}-of-2.safetensors": random.Random(number).randbytes(size)
    for number, size in ((1, 2 * CHUNK_BYTES + 1000), (2, 1000))
}
LARGE = f"{FOLDER}/{next(iter(SHARDS))}"
OBJECTS = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {name[:7]: name for name in SHARDS}}).encode(),
    **SHARDS,
}

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not STORES.is_dir(), reason="a server of S3's API is NOT installed: run `make stores`"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving_s3() as s3:
        s3.put("/models")
        for name, content in {**OBJECTS, "pytorch_model.bin": b"pickle"}.items():
            s3.put(f"{FOLDER}/{name}", content)
        s3.put("/models/torn/config.json", b"{}")
        s3.put("/models/torn/tokenizer.json", b"{}")
        s3.put("/models/torn/model.safetensors.index.json", OBJECTS["model.safetensors.index.json"])
        yield s3


@pytest.fixture
def store(server: S3) -> Iterator[S3]:
    server.reads.clear()
    server.cut = server.held = None
    server.holds.clear()
    server.release.clear()
    yield server
    server.release.set()


class Pulling:
    """`pando models pull` in a process."""

    def __init__(self, store: S3, home: Path, model: str = ADDRESS, **changes: str | None) -> None:
        environment: dict[str, str | None] = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            "HF_HOME": str(home), "PYTHONPATH": str(ROOT), "AWS_ENDPOINT_URL": store.url,
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            # Where there are no keys, the client would ask the cloud that it runs in.
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull, **changes,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [str(STORES / "python"), "-m", "deploy.cli", "models", "pull", model],
            env={name: value for name, value in environment.items() if value is not None},
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def path(self) -> Path:
        """Wait for the end; return the folder of the files."""
        output, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0, errors
        return Path(output.strip())

    def refusal(self) -> str:
        """Wait for the end; return the message, which is one line."""
        output, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert (self.process.returncode, output) == (2, ""), errors
        [line] = [line for line in errors.splitlines() if not line.startswith("downloading ")]
        return line


def check_files(path: Path) -> None:
    assert {file.name: file.read_bytes() for file in path.iterdir()} == OBJECTS


def test_a_model_is_read_once_and_no_pickles(store: S3, tmp_path: Path) -> None:
    path = Pulling(store, tmp_path).path()
    check_files(path)
    assert store.starts_of(LARGE) == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    store.reads.clear()
    assert Pulling(store, tmp_path).path() == path
    assert {read.path for read in store.reads} == {"/models"}


def test_a_part_whose_connection_breaks_is_read_again(store: S3, tmp_path: Path) -> None:
    store.cut = Read(LARGE, CHUNK_BYTES)
    check_files(Pulling(store, tmp_path).path())
    assert store.starts_of(LARGE) == [0, CHUNK_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES]


def test_a_killed_download_is_continued(store: S3, tmp_path: Path) -> None:
    store.held = Read(LARGE, CHUNK_BYTES)
    killed = Pulling(store, tmp_path)
    assert store.holds.wait(TIMEOUT_S)
    killed.process.kill()
    killed.process.communicate()
    store.held = None
    store.release.set()
    store.reads.clear()
    check_files(Pulling(store, tmp_path).path())
    assert store.starts_of(LARGE) == [CHUNK_BYTES, 2 * CHUNK_BYTES]


def test_two_processes_at_once_read_each_file_once(store: S3, tmp_path: Path) -> None:
    store.held = Read(LARGE, 0)
    first = Pulling(store, tmp_path)
    assert store.holds.wait(TIMEOUT_S)
    second = Pulling(store, tmp_path)
    wait_until(lambda: store.starts_of("/models") == [0, 0])
    store.release.set()
    path = first.path()
    assert second.path() == path
    check_files(path)
    parts = [read for read in store.reads if read.path != "/models"]
    assert len(set(parts)) == len(parts) == 4 + 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("s3://missing/team/tiny", "there is no such bucket or prefix (The specified bucket does not exist)"),
        ("s3://models/none", "there are no objects below s3://models/none/"),
        (
            "s3://models/torn",
            f"model.safetensors.index.json names objects that the store lacks: {', '.join(SHARDS)}",
        ),
    ],
)
def test_what_is_missing_is_named(store: S3, tmp_path: Path, model: str, message: str) -> None:
    assert Pulling(store, tmp_path, model).refusal() == f"pando models: model {model}: {message}"


def test_keys_that_the_store_does_not_know_are_refused(store: S3, tmp_path: Path) -> None:
    store.check_keys(checks=True)
    try:
        refusal = Pulling(store, tmp_path).refusal()
    finally:
        store.check_keys(checks=False)
    assert refusal.startswith(f"pando models: model {ADDRESS}: the store refuses access (")
    assert "; check the credentials in the environment (AWS_ACCESS_KEY_ID, " in refusal
    assert "secret" not in refusal


def test_without_keys_the_error_names_them(store: S3, tmp_path: Path) -> None:
    refusal = Pulling(store, tmp_path, AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None).refusal()
    assert "(Unable to locate credentials); check the credentials in the environment (AWS_ACCESS_KEY_ID, " in refusal
    assert store.reads == []
