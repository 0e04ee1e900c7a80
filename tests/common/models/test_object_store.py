"""Models in object stores: fsspec's file system in memory stands in for S3."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import constants

from common.errors import ConfigurationError
from common.models import ModelKind, object_store, pin, resolve_model
from common.models.progress import DownloadState, PeriodicReport
from common.models.references import ObjectReference, default_name, parse_object_reference
from tests.fakes.full_disk import filling_disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.models import ModelFiles

ADDRESS = "s3://models/team/qwen"
SHARDS = {f"model-{number}-of-2.safetensors": bytes([number]) * 100_000 for number in (1, 2)}
INDEX = json.dumps({"weight_map": {f"w{number}": name for number, name in enumerate(SHARDS)}}).encode()
OBJECTS = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": INDEX,
    **SHARDS,
    "pytorch_model.bin": b"pickle",
}


class Store(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store whose reads can fail; its objects' tags are the digests of their content."""

    protocol = "s3"
    store: dict[str, Any] = {}  # noqa: RUF012  (as fsspec declares it)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    breaks: dict[str, int] = {}  # noqa: RUF012
    reads: list[tuple[str, int]] = []  # noqa: RUF012
    failure: Exception | None = None

    def find(self, path: str, **options: Any) -> Any:
        if Store.failure is not None:
            raise Store.failure
        return super().find(path, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode != "rb":
            return file
        name = path.rpartition("/")[2]
        read = file.read

        def limited(count: int = -1) -> Any:
            Store.reads.append((name, file.tell()))
            allowed = Store.breaks.pop(name, None)
            if allowed is None:
                return read(count)
            if file.tell() >= allowed:
                raise OSError("connection reset")
            Store.breaks[name] = allowed
            return read(min(count, allowed - file.tell()))

        file.read = limited
        return file


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fsspec.register_implementation("s3", Store, clobber=True)
    Store.store.clear()
    Store.breaks.clear()
    Store.reads.clear()
    Store.failure = None
    made: Store = fsspec.filesystem("s3", skip_instance_cache=True)
    for name, content in OBJECTS.items():
        made.pipe_file(f"{ADDRESS}/{name}", content)
    yield made
    fsspec.register_implementation("s3", "s3fs.S3FileSystem", clobber=True)


def read_names() -> set[str]:
    return {name for name, _ in Store.reads}


@pytest.mark.parametrize(
    ("written", "uri", "quantization"),
    [
        (ADDRESS, ADDRESS, None),
        (f"{ADDRESS}/", ADDRESS, None),
        ("gs://bucket/a.gguf", "gs://bucket/a.gguf", None),
        ("s3://bucket/q:Q4_K_M", "s3://bucket/q", "Q4_K_M"),
    ],
)
def test_addresses_name_a_prefix_and_a_quantization(written: str, uri: str, quantization: str | None) -> None:
    assert parse_object_reference(written) == ObjectReference(uri, quantization)


@pytest.mark.parametrize("written", ["s3://bucket", "s3://bucket/", "s3:///x", "gs://"])
def test_an_address_without_bucket_or_prefix_is_refused(written: str) -> None:
    with pytest.raises(ConfigurationError, match="write s3://bucket/prefix"):
        resolve_model(written)


def test_the_model_is_served_under_the_last_part_of_its_address() -> None:
    assert default_name(ADDRESS) == "qwen"
    assert resolve_model(ADDRESS).name == "qwen"


def test_services_without_weights_get_text_files_and_workers_the_shards_besides() -> None:
    text = resolve_model(ADDRESS, weights=False)
    assert text.kind is ModelKind.DIRECTORY
    assert read_names() == {"config.json", "tokenizer.json"}
    whole = resolve_model(ADDRESS)
    assert whole.path == text.path
    assert read_names() == OBJECTS.keys() - {"pytorch_model.bin"}
    for name, content in SHARDS.items():
        assert (whole.path / name).read_bytes() == content


def test_of_chosen_tensors_only_their_objects_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = json.loads(OBJECTS["model.safetensors.index.json"])["weight_map"].items()

    def part(tensor: str) -> ModelFiles:
        return resolve_model(ADDRESS, choose={tensor}.intersection)

    assert part(first[0]).shards == (first[1],)
    assert read_names() & SHARDS.keys() == {first[1]}
    Store.reads.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert part(first[0]).shards == (first[1],)
    with pytest.raises(ConfigurationError, match="not completely in the cache"):
        part(last[0])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert resolve_model(ADDRESS).shards is None
    assert read_names() == {last[1]}


def test_present_files_are_not_read_again() -> None:
    resolve_model(ADDRESS)
    Store.reads.clear()
    resolve_model(ADDRESS)
    assert Store.reads == []


def test_an_interrupted_file_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(SHARDS))
    monkeypatch.setattr(object_store, "CHUNK_BYTES", 10_000)
    Store.breaks[name] = 30_000
    with pytest.raises(ConfigurationError, match="connection reset"):
        resolve_model(ADDRESS)
    Store.reads.clear()
    states: list[DownloadState] = []
    path = pin(ADDRESS, PeriodicReport(states.append))
    assert min(start for read, start in Store.reads if read == name) == 30_000
    assert (states[-1].done, states[-1].total) == (states[-1].total, states[-1].total)
    assert resolve_model(path).path.joinpath(name).read_bytes() == SHARDS[name]


def test_a_replaced_model_gets_a_folder_of_its_own(store: Store) -> None:
    first = resolve_model(ADDRESS)
    store.pipe_file(f"{ADDRESS}/config.json", b'{"version": 2}')
    second = resolve_model(ADDRESS)
    assert (first.path / "config.json").read_bytes() == b"{}"
    assert (second.path / "config.json").read_bytes() == b'{"version": 2}'


def test_an_object_that_is_replaced_during_its_download_is_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = Store.info
    monkeypatch.setattr(Store, "info", lambda self, path, **_: {**info(self, path), "ETag": "another"})
    with pytest.raises(ConfigurationError, match=r"was replaced in the store while it was downloaded"):
        resolve_model(ADDRESS, weights=False)


def test_without_a_connection_the_version_used_last_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model(ADDRESS).path
    Store.failure = ConnectionError("no route")
    assert resolve_model(ADDRESS).path == path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    Store.failure = AssertionError("asked")
    assert resolve_model(ADDRESS).path == path
    with pytest.raises(ConfigurationError, match=r"missing: all files.*HF_HUB_OFFLINE forbids a download"):
        resolve_model("s3://models/team/other")


def test_without_weights_in_the_cache_a_worker_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_model(ADDRESS, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    resolve_model(ADDRESS, weights=False)
    with pytest.raises(ConfigurationError, match=r"no weights|model\.safetensors"):
        resolve_model(ADDRESS)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (PermissionError("Forbidden"), r"refuses access \(Forbidden\); check the credentials"),
        (FileNotFoundError("models"), "no such bucket or prefix"),
        (RuntimeError("Unable to locate credentials"), "check the credentials"),
        (ImportError("Install s3fs to access S3"), r"pip install '\.\[object-stores\]'"),
    ],
)
def test_failures_say_what_to_do(failure: Exception, message: str) -> None:
    Store.failure = failure
    with pytest.raises(ConfigurationError, match=message):
        resolve_model(ADDRESS)


def test_prefixes_whose_names_are_similar_have_folders_of_their_own() -> None:
    folders = {object_store.folder_of(ObjectReference(uri)) for uri in ("s3://a/b/c", "s3://a/b--c", "gs://a/b/c")}
    assert len(folders) == 3


def test_a_key_that_leads_out_of_the_cache_is_ignored(store: Store, tmp_path: Path) -> None:
    store.pipe_file(f"{ADDRESS}/../../../outside.safetensors", b"x")
    index = {"weight_map": {"w": "../../../outside.safetensors"}}
    store.pipe_file(f"{ADDRESS}/model.safetensors.index.json", json.dumps(index).encode())
    with pytest.raises(ConfigurationError, match="outside the model's directory"):
        resolve_model(ADDRESS)
    assert not list(tmp_path.rglob("outside.safetensors"))


def test_an_empty_prefix_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"no objects below s3://models/none/"):
        resolve_model("s3://models/none")


def test_a_single_gguf_file_and_a_named_quantization(store: Store) -> None:
    store.pipe_file("s3://models/gguf/tiny-Q4_K_M.gguf", b"four")
    store.pipe_file("s3://models/gguf/tiny-Q8_0.gguf", b"eight")
    assert resolve_model("s3://models/gguf/tiny-Q8_0.gguf").path.read_bytes() == b"eight"
    chosen = resolve_model("s3://models/gguf:Q4_K_M")
    assert (chosen.kind, chosen.path.read_bytes()) == (ModelKind.GGUF, b"four")
    with pytest.raises(ConfigurationError, match="several GGUF files; name a quantization"):
        resolve_model("s3://models/gguf")


def test_cached_prefixes_are_listed_and_removed() -> None:
    resolve_model(ADDRESS)
    reference = ObjectReference(ADDRESS)
    [(address, count)] = object_store.cached_prefixes().items()
    assert address == ADDRESS
    assert count > 200_000
    assert object_store.remove(reference) == count
    assert object_store.cached_prefixes() == {}
    with pytest.raises(ConfigurationError, match="not in the cache"):
        object_store.remove(reference)


def test_what_is_written_when_the_disk_is_full_is_kept_and_the_rest_read_once_there_is_room(tmp_path: Path) -> None:
    name, cache = next(iter(SHARDS)), object_store.cache_root()
    room = sum(len(content) for file, content in OBJECTS.items() if file not in (*SHARDS, "pytorch_model.bin"))
    with filling_disk(tmp_path, room + 30_000), pytest.raises(ConfigurationError) as refused:
        resolve_model(ADDRESS, choose=lambda tensors: [tensor for tensor in tensors if tensor == "w0"])
    assert str(refused.value) == (
        f"model {ADDRESS}: the disk of the cache ({cache}) is full; delete models (`pando models list`, `pando models "
        "remove NAME`), or set HF_HOME to a larger disk; the next download continues where this one stopped"
    )
    [partial] = tmp_path.rglob("incomplete/*.safetensors")
    written = partial.stat().st_size
    # The small files are read at the same time.
    assert 30_000 <= written <= room + 30_000
    assert partial.read_bytes() == SHARDS[name][:written]
    Store.reads.clear()
    found = resolve_model(ADDRESS)
    for shard, content in SHARDS.items():
        assert (found.path / shard).read_bytes() == content
    assert min(start for read, start in Store.reads if read == name) == written


def test_a_model_that_is_in_the_cache_needs_no_room(tmp_path: Path) -> None:
    path = resolve_model(ADDRESS).path
    with filling_disk(tmp_path, 0):
        assert resolve_model(ADDRESS).path == path


def test_a_cache_that_cannot_be_written_does_not_blame_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(
        ConfigurationError, match=r"the cache cannot be written \(.*set HF_HOME to a directory of yours"
    ):
        resolve_model(ADDRESS)
