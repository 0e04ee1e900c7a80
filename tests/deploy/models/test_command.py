"""`pando models` against a hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.forked import ForkedProgram
from tests.fakes.hub import COMMIT, Repository, serve_hub
from tests.fakes.hub_client import HubClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.hub import FakeHub

NAME = "acme/llama"
CONFIG = json.loads((Path(__file__).parent / "configs" / "llama-3.1-8b.json").read_text())["config"]
WEIGHTS = b"weights" * 1000


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve_hub() as served:
        files = {
            "config.json": json.dumps(CONFIG).encode(),
            "tokenizer.json": b"{}",
            "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
            "model.safetensors": WEIGHTS,
            "original/consolidated.00.pth": b"pickle",
        }
        served.repositories[NAME] = Repository(files, refs=("main", "v1"))
        quantized = {"llama-Q4_K_M.gguf": b"four bits", "llama-Q8_0.gguf": b"eight bits"}
        about = {"gguf": {"total": 8_030_261_312, "architecture": "llama", "context_length": 131_072}}
        served.repositories["acme/llama-GGUF"] = Repository(quantized, about=about)
        yield served


@pytest.fixture
def client(hub: FakeHub, tmp_path: Path) -> HubClient:
    return HubClient(hub.url, tmp_path / "home")


def pando(client: HubClient, *arguments: str, status: int = 0) -> str:
    ended, output, log = ForkedProgram("deploy.cli", ("models", *arguments), client.environment()).communicate()
    assert ended == status, log
    return log if status else output


def test_inspection_fetches_no_weights(hub: FakeHub, client: HubClient) -> None:
    shown = pando(client, "inspect", NAME)
    assert [line.split()[0] for line in shown.splitlines()] == [
        "family", "served", "tasks", "parameters", "files", "weights", "keys", "context", "tokenizer", "chat",
    ]  # fmt: skip
    assert "own implementation" in shown
    assert "8.03 billion" in shown
    assert "16.1 GB at bf16, 9.1 GB at fp8, 5.7 GB at 4 bits" in shown
    assert "131,072 bytes per token" in shown
    facts = json.loads(pando(client, "inspect", NAME, "--json"))
    assert (facts["service"], facts["has_tokenizer"], facts["has_chat_template"]) == ("own", True, True)
    assert not hub.requests
    assert not any("pth" in path for path in hub.paths)


def test_inspection_of_a_quantization_needs_no_file_at_all(hub: FakeHub, client: HubClient) -> None:
    facts = json.loads(pando(client, "inspect", "acme/llama-GGUF:Q8_0", "--json"))
    assert (facts["service"], facts["family"], facts["parameters"]) == ("own", "llama", 8_030_261_312)
    assert (facts["download_bytes"], facts["max_context"]) == (len(b"eight bits"), 131_072)
    assert not hub.requests
    assert "it has Q4_K_M, Q8_0" in pando(client, "inspect", "acme/llama-GGUF:Q2_K", status=2)


def test_models_are_pulled_listed_and_removed(hub: FakeHub, client: HubClient) -> None:
    path = Path(pando(client, "pull", NAME).strip())
    assert path.name == COMMIT
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert Path(pando(client, "pull", "acme/llama-GGUF:Q4_K_M").strip()).read_bytes() == b"four bits"
    pando(client, "pull", "acme/llama-GGUF:Q8_0")
    rows = {row["name"]: row for row in json.loads(pando(client, "list", "--json"))}
    assert {"smollm2-135m-instruct", "all-minilm-l6-v2", NAME, "acme/llama-GGUF"} == set(rows)
    assert rows[NAME]["bytes"] >= len(WEIGHTS)
    assert rows["acme/llama-GGUF"]["gguf_files"] == ["llama-Q4_K_M.gguf", "llama-Q8_0.gguf"]
    assert rows["smollm2-135m-instruct"]["source"] == "bundled"
    assert NAME in pando(client, "list")
    assert pando(client, "remove", "acme/llama-GGUF:Q4_K_M") == "removed acme/llama-GGUF:Q4_K_M, 9 B\n"
    rows = {row["name"]: row for row in json.loads(pando(client, "list", "--json"))}
    assert rows["acme/llama-GGUF"]["gguf_files"] == ["llama-Q8_0.gguf"]
    assert pando(client, "remove", NAME).startswith(f"removed {NAME}, 7.")
    assert not client.cached(NAME).exists()
    # It has the same commit.
    assert Path(pando(client, "pull", "acme/llama-GGUF:Q8_0").strip()).read_bytes() == b"eight bits"
    assert hub.requests["llama-Q8_0.gguf"] == 1
    assert NAME not in {row["name"] for row in json.loads(pando(client, "list", "--json"))}


def test_a_quantization_is_removed_without_those_whose_names_end_alike(hub: FakeHub, client: HubClient) -> None:
    hub.repositories["acme/two"] = Repository({"llama-F16.gguf": b"half", "llama-BF16.gguf": b"brain"})
    for quantization in ("F16", "BF16"):
        pando(client, "pull", f"acme/two:{quantization}")
    assert pando(client, "remove", "acme/two:F16") == "removed acme/two:F16, 4 B\n"
    rows = {row["name"]: row for row in json.loads(pando(client, "list", "--json"))}
    assert rows["acme/two"]["gguf_files"] == ["llama-BF16.gguf"]


def test_a_revision_is_removed_alone(hub: FakeHub, client: HubClient) -> None:
    pando(client, "pull", f"{NAME}@v1")
    hub.repositories[NAME].commit = "f" * 40
    hub.repositories[NAME].files = {**hub.repositories[NAME].files, "model.safetensors": b"later"}
    pando(client, "pull", NAME)
    (row,) = [row for row in json.loads(pando(client, "list", "--json")) if row["name"] == NAME]
    assert row["revisions"] == ["main", "v1"]
    pando(client, "remove", f"{NAME}@v1")
    (row,) = [row for row in json.loads(pando(client, "list", "--json")) if row["name"] == NAME]
    assert row["revisions"] == ["main"]
    assert (client.cached(NAME) / "snapshots" / ("f" * 40) / "model.safetensors").read_bytes() == b"later"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("remove", "acme/absent"), "not in the cache"),
        (("remove", "acme/absent:Q8_0"), "not in the cache"),
        (("remove", "smollm2-135m-instruct"), "remove it with pip"),
        (("inspect", "nothing"), "neither a bundled model, a local path nor a model at http://127.0.0.1"),
        (("inspect", "smollm2"), "did you mean smollm2-135m-instruct?"),
        (("pull", "acme/absent"), "neither a local path nor a public model"),
    ],
)
def test_mistakes_are_one_sentence(client: HubClient, arguments: tuple[str, str], complaint: str) -> None:
    (line,) = pando(client, *arguments, status=2).splitlines()
    assert line.startswith("pando models: ")
    assert complaint in line
