from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hub import serve_hub
from tests.fakes.hub_client import HubClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fakes.hub import FakeHub

NAME = "acme/tiny"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SHARD_BYTES = 1 << 20


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve_hub() as served:
        yield served


@pytest.fixture
def client(hub: FakeHub, tmp_path: Path) -> HubClient:
    return HubClient(hub.url, tmp_path / "home")


@pytest.fixture
def repository(hub: FakeHub, tmp_path: Path) -> Path:
    """The files of `NAME`, with many that nobody needs."""
    folder = tmp_path / "published"
    (folder / "onnx").mkdir(parents=True)
    (folder / "1_Pooling").mkdir()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "1_Pooling/config.json",
    ):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    index = {"weight_map": {"model.embed_tokens.weight": SHARDS[0], "lm_head.weight": SHARDS[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    noise = random.Random(0)
    for name in (*SHARDS, "pytorch_model.bin", "consolidated.safetensors", "onnx/model.bin"):
        (folder / name).write_bytes(noise.randbytes(SHARD_BYTES))
    (folder / "README.md").write_text("# tiny")
    (folder / "picture.png").write_bytes(b"png")
    hub.add(NAME, folder)
    return folder
