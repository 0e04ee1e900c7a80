"""Downloads from a hub by the real client: which files, how often, and what a failure says."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE

from tests.common.models.conftest import NAME, SHARD_BYTES, SHARDS
from tests.fakes.hub import COMMIT, TOKEN, Repository
from tests.fakes.hub_client import HubClient, result_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.fakes.hub import FakeHub

TEXT = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "1_Pooling/config.json",
}  # fmt: skip
# The client writes a file in pieces of so many bytes.
CHUNK_BYTES = DOWNLOAD_CHUNK_SIZE
LARGE_BYTES = 3 * CHUNK_BYTES + 12_345
EVERYTHING = TEXT | {"model.safetensors.index.json", *SHARDS}


def files_of(folder: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def large(hub: FakeHub) -> bytes:
    """The weights of `acme/large`."""
    weights = random.Random(1).randbytes(LARGE_BYTES)
    hub.repositories["acme/large"] = Repository({"config.json": b"{}", "model.safetensors": weights})
    return weights


@pytest.fixture
def quantized(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    (folder / "BF16").mkdir(parents=True)
    for name in ("tiny-Q4_K_M.gguf", "tiny-UD-Q4_K_XL.gguf", "tiny.Q8_0.gguf", "mmproj-tiny-f16.gguf"):
        (folder / name).write_bytes(name.encode())
    for part in (1, 2):
        (folder / "BF16" / f"tiny-BF16-0000{part}-of-00002.gguf").write_bytes(b"part")
    hub.add("acme/tiny-GGUF", folder)


def test_services_without_weights_get_text_files_only(hub: FakeHub, client: HubClient, repository: Path) -> None:
    found = client.resolve(NAME, weights=False)
    assert (found["kind"], found["name"]) == ("directory", NAME)
    assert files_of(found["path"]) == TEXT
    assert sum(hub.requests.values()) == 0


def test_workers_get_shards_of_the_index_besides_and_nothing_else(
    hub: FakeHub, client: HubClient, repository: Path
) -> None:
    found = client.resolve(NAME)
    assert Path(found["path"]) == client.cached(NAME) / "snapshots" / COMMIT
    assert files_of(found["path"]) == EVERYTHING
    assert dict(hub.requests) == dict.fromkeys(SHARDS, 1)
    for name in SHARDS:
        assert (Path(found["path"]) / name).read_bytes() == (repository / name).read_bytes()
    events = [json.loads(line) for line in found["log"].splitlines() if line.startswith("{")]
    states = [(each["done"], each["files"]) for each in events if each["event"] == "model.download"]
    total = sum((Path(found["path"]) / name).stat().st_size for name in EVERYTHING)
    assert (states[0][1], states[-1]) == (9, (total, 9))


def test_what_is_cached_is_not_fetched_again(hub: FakeHub, client: HubClient, repository: Path) -> None:
    first = client.resolve(NAME)
    hub.paths.clear()
    assert client.resolve(NAME)["path"] == first["path"]
    # Whether the branch has moved, and no more.
    assert hub.paths == [f"GET /api/models/{NAME}/revision/main"]
    hub.paths.clear()
    assert client.resolve(f"{NAME}@{COMMIT}")["path"] == first["path"]
    assert client.resolve(NAME, HF_HUB_OFFLINE="1")["path"] == first["path"]
    assert hub.paths == []
    hub.status = 503
    assert client.resolve(NAME)["path"] == first["path"]


def test_a_download_that_was_killed_continues_where_it_stopped(hub: FakeHub, client: HubClient, large: bytes) -> None:
    hub.bytes_per_s = LARGE_BYTES / 2
    process = client.start("acme/large")
    partials = client.cached("acme/large") / "blobs"
    wait_until(lambda: any(path.stat().st_size >= CHUNK_BYTES for path in partials.glob("*.incomplete")), 60)
    process.kill()
    (partial,) = partials.glob("*.incomplete")
    kept = partial.stat().st_size
    assert large.startswith(partial.read_bytes())
    hub.bytes_per_s = 0
    hub.sent.clear()
    found = client.resolve("acme/large")
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == large
    assert hub.sent["model.safetensors"] == LARGE_BYTES - kept <= LARGE_BYTES - CHUNK_BYTES
    assert not partial.exists()


def test_cut_connections_are_opened_again_for_the_rest(hub: FakeHub, client: HubClient, large: bytes) -> None:
    hub.cut_after = [CHUNK_BYTES + CHUNK_BYTES // 2, CHUNK_BYTES + CHUNK_BYTES // 2]
    found = client.resolve("acme/large")
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == large
    assert hub.requests["model.safetensors"] == 3
    # Of each cut connection, at most what had not been written yet arrives twice.
    assert LARGE_BYTES <= hub.sent["model.safetensors"] <= LARGE_BYTES + 2 * (CHUNK_BYTES // 2 + 1)


def test_a_server_without_ranges_sends_everything_again(hub: FakeHub, client: HubClient, repository: Path) -> None:
    hub.cut_after = [SHARD_BYTES // 2]
    hub.ignores_ranges = True
    found = client.resolve(NAME)
    for name in SHARDS:
        assert (Path(found["path"]) / name).read_bytes() == (repository / name).read_bytes()


def test_a_file_with_another_digest_never_reaches_the_cache(hub: FakeHub, client: HubClient, repository: Path) -> None:
    hub.corrupted = {SHARDS[1]}
    refused = client.resolve(NAME)["error"]
    assert f"{SHARDS[1]} arrived damaged (SHA-256" in refused
    assert "run the command again" in refused
    blobs = [path for path in (client.cached(NAME) / "blobs").iterdir() if path.stat().st_size == SHARD_BYTES]
    assert len(blobs) <= 1
    hub.corrupted = set()
    assert files_of(client.resolve(NAME)["path"]) == EVERYTHING


def test_processes_at_once_fetch_each_file_once(hub: FakeHub, client: HubClient, repository: Path) -> None:
    hub.bytes_per_s = SHARD_BYTES
    # Two ranks and the tokenizer service.
    running = [client.start(NAME), client.start(NAME), client.start(NAME, weights=False)]
    found = [result_of(process) for process in running]
    assert len({each["path"] for each in found}) == 1
    assert dict(hub.requests) == dict.fromkeys(SHARDS, 1)
    assert dict(hub.sent) == dict.fromkeys(SHARDS, SHARD_BYTES)
    assert files_of(found[0]["path"]) == EVERYTHING


def divide(hub: FakeHub, repository: Path) -> tuple[str, ...]:
    """Publish a third file with weights; return tensors of each file."""
    tensors = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.weight")
    third = "model-third.safetensors"
    (repository / third).write_bytes(random.Random(3).randbytes(SHARD_BYTES))
    weight_map = dict(zip(tensors, (*SHARDS, third), strict=True))
    (repository / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hub.add(NAME, repository)
    return tensors


def test_of_chosen_tensors_only_their_files_are_fetched(hub: FakeHub, client: HubClient, repository: Path) -> None:
    first, last, _ = divide(hub, repository)
    alone = client.resolve(NAME, tensors=[first])
    assert alone["shards"] == [SHARDS[0]]
    assert files_of(alone["path"]) == TEXT | {"model.safetensors.index.json", SHARDS[0]}
    events = [json.loads(line) for line in alone["log"].splitlines() if line.startswith("{")]
    total = sum((Path(alone["path"]) / name).stat().st_size for name in files_of(alone["path"]))
    assert [each["done"] for each in events if each["event"] == "model.download"][-1] == total
    assert dict(hub.requests) == {SHARDS[0]: 1}
    # What is there is enough for this part, and for no other one.
    assert client.resolve(NAME, tensors=[first], HF_HUB_OFFLINE="1")["path"] == alone["path"]
    assert "not completely in the cache" in client.resolve(NAME, tensors=[last], HF_HUB_OFFLINE="1")["error"]
    whole = client.resolve(NAME)
    assert (whole["path"], whole["shards"]) == (alone["path"], None)
    assert set(hub.requests.values()) == {1}
    assert len(hub.requests) == 3


def test_parts_that_are_fetched_at_once_are_each_fetched_once(
    hub: FakeHub, client: HubClient, repository: Path
) -> None:
    first, last, _ = divide(hub, repository)
    hub.bytes_per_s = SHARD_BYTES
    running = [client.start(NAME, tensors=tensors) for tensors in ([first], [first, last], [last])]
    found = [result_of(process) for process in running]
    assert [each["shards"] for each in found] == [[SHARDS[0]], [*SHARDS], [SHARDS[1]]]
    # No part has the third one.
    assert dict(hub.requests) == dict.fromkeys(SHARDS, 1)
    assert dict(hub.sent) == dict.fromkeys(SHARDS, SHARD_BYTES)
    assert files_of(found[0]["path"]) == EVERYTHING


def test_a_file_that_is_missing_in_another_part_does_not_matter(
    hub: FakeHub, client: HubClient, repository: Path
) -> None:
    first, last, _ = divide(hub, repository)
    del hub.repositories[NAME].files[SHARDS[1]]
    assert client.resolve(NAME, tensors=[first])["shards"] == [SHARDS[0]]
    assert f"names files that the repository lacks: {SHARDS[1]}" in client.resolve(NAME, tensors=[last])["error"]


def test_a_rate_limit_is_waited_for(hub: FakeHub, client: HubClient, repository: Path) -> None:
    # Of the model's own pages, the client asks for files with patience.
    hub.refused_files = 1
    found = client.resolve(NAME)
    assert files_of(found["path"]) == EVERYTHING
    assert "Rate limited" in found["log"]
    hub.refused_files = 0
    hub.status = 429
    assert "limits your rate (429); try again" in client.resolve("acme/other")["error"]


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q8_0", "tiny.Q8_0.gguf"),
        ("UD-Q4_K_XL", "tiny-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "tiny-UD-Q4_K_XL.gguf"),
    ],
)
def test_a_quantization_is_one_file(hub: FakeHub, client: HubClient, quantized: None, tag: str, file: str) -> None:
    found = client.resolve(f"acme/tiny-GGUF:{tag}", weights=False)
    assert (found["kind"], found["name"]) == ("gguf", file)
    assert Path(found["path"]).read_bytes() == file.encode()
    assert dict(hub.requests) == {file: 1}


def test_other_quantizations_are_refused_with_those_there_are(client: HubClient, quantized: None) -> None:
    there = "BF16, Q4_K_M, Q8_0, UD-Q4_K_XL"
    assert (
        f"no quantization 'Q5_K_M' in the repository; it has {there}"
        in client.resolve("acme/tiny-GGUF:Q5_K_M")["error"]
    )
    assert (
        f"name a quantization, as in acme/tiny-GGUF:BF16 (there are {there})"
        in client.resolve("acme/tiny-GGUF")["error"]
    )
    assert "llama-gguf-split --merge" in client.resolve("acme/tiny-GGUF:BF16")["error"]


def test_a_missing_repository_says_what_to_check(client: HubClient) -> None:
    refused = client.resolve("acme/nothing")["error"]
    assert refused.startswith("model acme/nothing: neither a local path nor a public model at http://127.0.0.1")
    assert "HF_TOKEN" in refused
    assert "your token can read" in client.resolve("acme/nothing", HF_TOKEN=TOKEN)["error"]


def test_a_missing_revision_is_named(client: HubClient, repository: Path) -> None:
    assert "no revision 'v9'; see" in client.resolve(f"{NAME}@v9")["error"]


def test_a_gated_repository_says_how_to_get_access(hub: FakeHub, client: HubClient, repository: Path) -> None:
    hub.repositories[NAME].gated = True
    refused = client.resolve(NAME)["error"]
    assert f"gated: accept its licence at {hub.url}/{NAME}, create a token" in refused
    assert "set HF_TOKEN" in refused
    assert "your token has no access: accept its licence" in client.resolve(NAME, HF_TOKEN="hf_other")["error"]
    assert sum(hub.requests.values()) == 0
    assert files_of(client.resolve(NAME, HF_TOKEN=TOKEN)["path"]) == EVERYTHING


def test_the_token_goes_to_the_hub_and_to_no_other_host(hub: FakeHub, client: HubClient, repository: Path) -> None:
    hub.repositories[NAME].private = True
    assert "set HF_TOKEN if the model is private" in client.resolve(NAME)["error"]
    hub.authorizations.clear()
    assert "path" in client.resolve(NAME, HF_TOKEN=TOKEN)
    sent = {token for path, token in hub.authorizations if path.startswith("/cdn/")}
    assert sent == {None}
    assert {token for path, token in hub.authorizations if "/resolve/" in path} == {f"Bearer {TOKEN}"}


def test_a_wrong_token_is_called_wrong(client: HubClient, repository: Path) -> None:
    assert "the hub rejects your token (401); create one at" in client.resolve(NAME, HF_TOKEN="hf_wrong")["error"]


def test_a_refusal_without_a_token_blames_no_token(hub: FakeHub, client: HubClient, repository: Path) -> None:
    hub.status = 403
    refused = client.resolve(NAME)["error"]
    assert f"{hub.url} refuses access (403); check HF_ENDPOINT and proxies, or create a token at" in refused
    assert "rejects your token" not in refused


def test_without_a_network_the_endpoint_is_named(client: HubClient, repository: Path) -> None:
    unreachable = HubClient("http://127.0.0.1:9", client.home)
    refused = unreachable.resolve(NAME)["error"]
    assert "http://127.0.0.1:9 cannot be reached" in refused
    assert "set HF_ENDPOINT to a mirror" in refused


def test_offline_what_is_not_cached_says_so(client: HubClient, repository: Path) -> None:
    assert "path" in client.resolve(NAME, weights=False)
    assert "path" in client.resolve(NAME, weights=False, HF_HUB_OFFLINE="1")
    for name in (NAME, "acme/other"):
        refused = client.resolve(name, HF_HUB_OFFLINE="1")["error"]
        assert f"not completely in the cache ({client.home}/hub), and HF_HUB_OFFLINE forbids a download" in refused
        assert f"pando models pull {name}" in refused


def test_a_disk_that_is_too_small_is_noticed_before_the_download(
    hub: FakeHub, client: HubClient, repository: Path
) -> None:
    hub.repositories[NAME].listed_sizes[SHARDS[0]] = 10**18
    refused = client.resolve(NAME)["error"]
    assert "1000000000.0 GB are to be downloaded" in refused
    assert "set HF_HOME to a larger disk" in refused
    assert sum(hub.requests.values()) == 0


def test_a_server_that_is_down_is_named(hub: FakeHub, client: HubClient, repository: Path) -> None:
    hub.status = 500
    assert "answers with status 500; try again later" in client.resolve(NAME)["error"]


def test_repositories_without_a_model_say_what_they_lack(hub: FakeHub, client: HubClient, repository: Path) -> None:
    served = hub.repositories[NAME]
    whole = dict(served.files)

    def without(*names: str) -> str:
        served.files = {name: content for name, content in whole.items() if name not in names}
        shutil.rmtree(client.home, ignore_errors=True)
        error: str = client.resolve(NAME)["error"]
        return error

    assert f"names files that the repository lacks: {SHARDS[1]}" in without(SHARDS[1])
    assert "Python pickles only" in without("model.safetensors.index.json", *SHARDS)
    assert "neither config.json nor a GGUF file" in without("config.json")
    served.files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    assert "adapter (LoRA)" in client.resolve(NAME)["error"]


def test_a_local_directory_takes_precedence_over_the_hub(
    hub: FakeHub, client: HubClient, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / "config.json").write_text("{}")
    found = client.resolve(NAME)
    assert (found["path"], found["name"]) == (NAME, "tiny")
    assert not found["imports_hub"]
    assert hub.paths == []


def test_a_name_without_an_organisation_is_followed_to_the_model_that_has_it_now(
    hub: FakeHub, client: HubClient, repository: Path
) -> None:
    hub.renamed = {"tiny-2": NAME}
    hub.cut_after = [SHARD_BYTES // 2]
    found = client.resolve("tiny-2")
    assert found["name"] == "tiny-2"
    assert files_of(found["path"]) == EVERYTHING
    for name in SHARDS:
        assert (Path(found["path"]) / name).read_bytes() == (repository / name).read_bytes()
    assert client.resolve("tiny-2@main", HF_HUB_OFFLINE="1")["path"] == found["path"]


def test_a_local_directory_takes_precedence_over_a_name_without_an_organisation(
    hub: FakeHub, client: HubClient, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-2").mkdir()
    hub.renamed = {"tiny-2": NAME}
    assert "the directory has no config.json" in client.resolve("tiny-2")["error"]
    (tmp_path / "tiny-2" / "config.json").write_text("{}")
    assert client.resolve("tiny-2")["path"] == "tiny-2"
    assert hub.paths == []


def test_a_private_model_under_an_earlier_name_gets_the_token(
    hub: FakeHub, client: HubClient, repository: Path
) -> None:
    hub.renamed = {"acme-before/tiny": NAME}
    hub.repositories[NAME].private = True
    assert "HF_TOKEN" in client.resolve("acme-before/tiny")["error"]
    assert files_of(client.resolve("acme-before/tiny", HF_TOKEN=TOKEN)["path"]) == EVERYTHING


def test_the_address_of_a_models_page_is_its_name(hub: FakeHub, client: HubClient, repository: Path) -> None:
    path = client.resolve(NAME)["path"]
    for address in (f"{hub.url}/{NAME}", f"https://huggingface.co/{NAME}/tree/main", f"{hub.url}/{NAME}/tree/{COMMIT}"):
        found = client.resolve(address)
        assert (found["path"], found["name"]) == (path, NAME)


def test_a_name_that_is_nothing_says_how_names_look(client: HubClient) -> None:
    refused = client.resolve("nothing")["error"]
    assert refused.startswith("model nothing: neither a bundled model, a local path nor a model at http://127.0.0.1")
    assert "named organisation/repository" in refused


def test_local_models_do_not_import_the_client(client: HubClient) -> None:
    assert not client.resolve("smollm2-135m-instruct")["imports_hub"]


def test_downloads_of_other_tools_are_used_without_a_network(hub: FakeHub, client: HubClient, repository: Path) -> None:
    path = client.resolve(NAME)["path"]
    # Tools of other versions leave no list of the repository's files.
    shutil.rmtree(client.cached(NAME) / "trees")
    assert client.resolve(NAME, HF_HUB_OFFLINE="1")["path"] == path
    (Path(path) / SHARDS[0]).unlink()
    assert "not completely in the cache" in client.resolve(NAME, HF_HUB_OFFLINE="1")["error"]
    hub.requests.clear()
    assert files_of(client.resolve(NAME)["path"]) == EVERYTHING
    # Its content is still there.
    assert sum(hub.requests.values()) == 0


def test_a_listed_digest_names_no_path(hub: FakeHub, client: HubClient, repository: Path) -> None:
    hub.listed_digests = {SHARDS[0]: "../../outside"}
    assert f"SHA-256 of {SHARDS[0]} is '../../outside'" in client.resolve(NAME)["error"]


def test_a_damaged_index_is_called_so(hub: FakeHub, client: HubClient, repository: Path) -> None:
    hub.repositories[NAME].files["model.safetensors.index.json"] = json.dumps({"metadata": {}}).encode()
    assert "model.safetensors.index.json is damaged" in client.resolve(NAME)["error"]


def test_an_index_cannot_name_files_outside_the_model(hub: FakeHub, client: HubClient, repository: Path) -> None:
    index = {"weight_map": {"w": "../../../outside.safetensors"}}
    hub.repositories[NAME].files["model.safetensors.index.json"] = json.dumps(index).encode()
    # All other files are there, and the file outside, too: nothing has to be downloaded.
    client.resolve(NAME, weights=False)
    (client.cached(NAME).parent / "outside.safetensors").write_bytes(b"another model's")
    for _ in range(2):
        assert "'../../../outside.safetensors', which is outside" in client.resolve(NAME)["error"]
