"""Models from S3 and Google Cloud Storage, read by their own clients from servers of their APIs.

They need packages of their own: `make stores`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from common.models.object_store import CHUNK_BYTES
from tests.common.models.store_servers import S3, STORES, Google, Read, Store, service_account, serving
from tests.waiting import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
FOLDER = "/models/team/tiny"
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
    pytest.mark.skipif(not STORES.is_dir(), reason="servers of stores' APIs are NOT installed: run `make stores`"),
]


GGUF = "/models/one/tiny-Q8_0.gguf"
S3_ONLY = pytest.mark.parametrize("server", [S3()], indirect=True, ids=["s3"])
GOOGLE_ONLY = pytest.mark.parametrize("server", [Google()], indirect=True, ids=["gs"])


@pytest.fixture(scope="module", params=[S3(), Google()], ids=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[Store]:
    with serving(request.param) as store:
        store.put("/models")
        for name, content in {**OBJECTS, "pytorch_model.bin": b"pickle"}.items():
            store.put(f"{FOLDER}/{name}", content)
        store.put("/models/torn/config.json", b"{}")
        store.put("/models/torn/tokenizer.json", b"{}")
        store.put("/models/torn/model.safetensors.index.json", OBJECTS["model.safetensors.index.json"])
        store.put(GGUF, b"eight")
        yield store


@pytest.fixture
def store(server: Store) -> Iterator[Store]:
    server.reads.clear()
    server.tokens.clear()
    server.cut = server.held = server.refusal = None
    server.holds.clear()
    server.release.clear()
    yield server
    server.release.set()


class Pulling:
    """`pando models pull` in a process."""

    def __init__(self, store: Store, home: Path, path: str = FOLDER, **changes: str | None) -> None:
        self.model = f"{store.api.scheme}:/{path}"
        clouds = ("AWS_", "GOOGLE_", "CLOUDSDK_", "STORAGE_", "HF_")
        environment: dict[str, str | None] = {
            **{name: value for name, value in os.environ.items() if not name.startswith(clouds)},
            "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **store.api.environment(store.url), **changes,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [str(STORES / "python"), "-m", "deploy.cli", "models", "pull", self.model],
            env={name: value for name, value in environment.items() if value is not None},
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def path(self) -> Path:
        """Wait for the end; return the path of the files. Nothing but the progress is reported."""
        output, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0, errors
        assert [line for line in errors.splitlines() if not line.startswith("downloading ")] == []
        return Path(output.strip())

    def refusal(self) -> str:
        """Wait for the end; return the message, which is one line."""
        output, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert (self.process.returncode, output) == (2, ""), errors
        [line] = [line for line in errors.splitlines() if not line.startswith("downloading ")]
        return line


def check_files(path: Path) -> None:
    assert {file.name: file.read_bytes() for file in path.iterdir()} == OBJECTS


def test_a_model_is_read_once_and_no_pickles(store: Store, tmp_path: Path) -> None:
    path = Pulling(store, tmp_path).path()
    check_files(path)
    assert store.starts_of(LARGE) == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    store.reads.clear()
    assert Pulling(store, tmp_path).path() == path
    assert {read.path for read in store.reads} == {"/models"}


def test_a_part_whose_connection_breaks_is_read_again(store: Store, tmp_path: Path) -> None:
    store.cut = Read(LARGE, CHUNK_BYTES)
    check_files(Pulling(store, tmp_path).path())
    assert store.starts_of(LARGE) == [0, CHUNK_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES]


def test_a_killed_download_is_continued(store: Store, tmp_path: Path) -> None:
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


def test_two_processes_at_once_read_each_file_once(store: Store, tmp_path: Path) -> None:
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


def test_a_single_object_is_a_model(store: Store, tmp_path: Path) -> None:
    assert Pulling(store, tmp_path, GGUF).path().read_bytes() == b"eight"
    assert Pulling(store, tmp_path, "/models/one:Q8_0").path().read_bytes() == b"eight"


def test_what_is_missing_is_named(store: Store, tmp_path: Path) -> None:
    scheme = store.api.scheme
    missing, none, torn = (Pulling(store, tmp_path, path) for path in ("/missing/tiny", "/models/none", "/models/torn"))
    problems = {
        "s3": "there is no such bucket or prefix (The specified bucket does not exist)",
        "gs": "there is no such bucket or prefix (b/missing/o)",
    }
    assert missing.refusal() == f"pando models: model {missing.model}: {problems[scheme]}"
    assert none.refusal() == f"pando models: model {none.model}: there are no objects below {none.model}/"
    assert torn.refusal() == (
        f"pando models: model {torn.model}: model.safetensors.index.json names objects that the store lacks: "
        f"{', '.join(SHARDS)}"
    )


@S3_ONLY
def test_keys_that_the_store_does_not_know_are_refused(store: Store, tmp_path: Path) -> None:
    api = S3()
    api.check_keys(store, checks=True)
    try:
        pulling = Pulling(store, tmp_path)
        refusal = pulling.refusal()
    finally:
        api.check_keys(store, checks=False)
    assert refusal.startswith(f"pando models: model {pulling.model}: the store refuses access (")
    assert "; check the credentials in the environment (AWS_ACCESS_KEY_ID, " in refusal
    assert "secret" not in refusal


@S3_ONLY
def test_without_keys_the_error_names_them(store: Store, tmp_path: Path) -> None:
    refusal = Pulling(store, tmp_path, AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None).refusal()
    assert "(Unable to locate credentials); check the credentials in the environment (AWS_ACCESS_KEY_ID, " in refusal
    assert store.reads == []


@GOOGLE_ONLY
@pytest.mark.parametrize("status", [401, 403])
def test_without_rights_the_error_says_which_and_the_cache_is_not_used(
    store: Store, tmp_path: Path, status: int
) -> None:
    Pulling(store, tmp_path).path()
    message = "Anonymous caller does not have storage.objects.list access to the Google Cloud Storage bucket."
    store.refusal = (status, message)
    refusal = Pulling(store, tmp_path).refusal()
    assert f"the store refuses access ({'Forbidden: ' if status == 403 else ''}" in refusal
    assert message in refusal
    assert "check the credentials in the environment (" in refusal
    assert "GOOGLE_APPLICATION_CREDENTIALS" in refusal


@GOOGLE_ONLY
def test_a_service_account_is_used(store: Store, tmp_path: Path) -> None:
    store.refusal = (401, "Anonymous caller")
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    (tmp_path / "account.json").write_text(service_account(store.url, pem))
    account = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "account.json")}
    # With an account, the client would ask for the kind of the bucket by gRPC, which the emulator does not speak.
    pulling = Pulling(store, tmp_path / "home", **account, GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false")
    check_files(pulling.path())
    assert None not in store.tokens
    assert len(store.tokens) == 1
