from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.models import resolve_model
from common.models.references import HubReference, default_name, parse_hub_reference
from common.models.selection import select_files
from common.settings import ModelSettings

if TYPE_CHECKING:
    from pathlib import Path

FILES = ("config.json", "tokenizer.json", "model.safetensors", "model-Q8_0.gguf")


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("Qwen/Qwen3-8B", HubReference("Qwen/Qwen3-8B")),
        ("Qwen/Qwen3-8B@v1.0", HubReference("Qwen/Qwen3-8B", "v1.0")),
        ("a/b@refs/pr/1", HubReference("a/b", "refs/pr/1")),
        ("a/b-GGUF:Q4_K_M", HubReference("a/b-GGUF", "main", "Q4_K_M")),
        ("a/b@0123:UD-Q4_K_XL", HubReference("a/b", "0123", "UD-Q4_K_XL")),
        ("gpt2", HubReference("gpt2")),
        ("t5-v1.1-base@v2", HubReference("t5-v1.1-base", "v2")),
    ],
)
def test_references_are_read_and_written(reference: str, parts: HubReference) -> None:
    assert parse_hub_reference(reference) == parts
    assert str(parts) == reference


@pytest.mark.parametrize(
    "reference",
    [
        "model.gguf",
        "model.safetensors",
        "./a/b",
        "/a/b",
        "../a/b",
        "~/a",
        "a/b/c",
        "a/model.gguf",
        "a/b@",
        "a/b:",
        "a /b",
        "a/",
        "/b",
        ".a/b",
        "",
        ".",
        "~",
        "https://huggingface.co",
        "https://huggingface.co/",
        "https://huggingface.co/a/b/blob/main/c.gguf",
        "https://huggingface.co/a/b/tree/main/folder",
        "https://huggingface.co/a/b/discussions/1",
        "https://huggingface.co.example.com/a/b",
        "https://example.com/a/b",
        "ftp://huggingface.co/a/b",
    ],
)
def test_other_forms_are_paths_or_names(reference: str) -> None:
    assert parse_hub_reference(reference) is None


@pytest.mark.parametrize(
    ("address", "written"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/", "Qwen/Qwen3-8B"),
        ("https://hf.co/Qwen/Qwen3-8B?library=vllm#use", "Qwen/Qwen3-8B"),
        ("HTTPS://HuggingFace.co/gpt2", "gpt2"),
        ("https://huggingface.co/a/b/tree/main", "a/b"),
        ("https://huggingface.co/a/b/tree/v1.0:Q4_K_M", "a/b@v1.0:Q4_K_M"),
        ("https://huggingface.co/a/b-GGUF:Q8_0", "a/b-GGUF:Q8_0"),
        ("https://huggingface.co/a/b/tree/refs%2Fpr%2F1", "a/b@refs/pr/1"),
        ("https://huggingface.co/a/b/tree/refs/pr/1", "a/b@refs/pr/1"),
        ("http://mirror.example:8080/hub/a/b/tree/v1", "a/b@v1"),
    ],
)
def test_addresses_of_pages_are_the_names_that_they_hold(
    address: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/hub/")
    parsed = parse_hub_reference(address)
    assert parsed is not None
    assert str(parsed) == written
    assert default_name(address) == parsed.repository


def test_other_addresses_say_which_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")
    with pytest.raises(
        ConfigurationError, match=r"page at http://mirror\.example or https://huggingface\.co, with /tree"
    ):
        resolve_model("https://example.com/a/b")


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M", "smollm2-135m-instrct", "all-minilm"])
def test_a_name_like_that_of_a_bundled_model_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no such model, file or directory; did you mean (smollm2-135m|all-mini)"
    ):
        resolve_model(name)


def test_models_are_served_by_their_name_on_the_hub_without_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for reference in ("org/model", "org/model@abc", "org/model@abc:Q8_0"):
        assert ModelSettings(reference=reference).name == "org/model"
    assert ModelSettings(reference="org/model", served_name="mine").name == "mine"
    assert default_name("/models/tiny.gguf") == "tiny.gguf"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert ModelSettings(reference="org/model").name == "model"


def test_a_repository_with_both_formats_is_served_from_safetensors_unless_a_quantization_is_named() -> None:
    assert select_files(HubReference("a/b"), FILES, weights=True).files == FILES[:3]
    assert select_files(HubReference("a/b", quantization="q8_0"), FILES, weights=False).gguf == FILES[3]


def test_a_single_gguf_file_needs_no_name() -> None:
    assert select_files(HubReference("a/b"), ("README.md", FILES[3], "mmproj-F16.gguf"), weights=True).gguf == FILES[3]
    both = ("x-Q8_0.gguf", "y-Q8_0.gguf")
    with pytest.raises(ConfigurationError, match=r"'Q8_0' matches several files: x-Q8_0\.gguf, y-Q8_0\.gguf"):
        select_files(HubReference("a/b", quantization="Q8_0"), both, weights=True)


def test_without_the_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "common.models.hub", raising=False)
    monkeypatch.delattr("common.models.hub", raising=False)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(ConfigurationError, match=r"models on a hub need the package .*pip install '\.\[hub\]'"):
        resolve_model("org/model")
