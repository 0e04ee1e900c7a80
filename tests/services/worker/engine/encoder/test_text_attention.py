"""Bidirectional attention of texts of equal and of different lengths, each against its text alone in float64."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from services.worker.engine.encoder.model import TextAttention, import_flash_attention
from services.worker.engine.vision import registry

DEVICES = (("cpu", torch.float32), pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu))
HEADS = 3
LENGTHS = ((64, 64, 64), (5,), (64, 16, 64, 32, 1), (100, 3, 129, 4))


def expected_of(qkv: torch.Tensor, lengths: tuple[int, ...], window: int | None) -> torch.Tensor:
    """Attention text by text."""
    parts = []
    for text in torch.split(qkv.double().cpu(), list(lengths)):
        queries, keys, values = text.view(len(text), 3, HEADS, -1).permute(1, 2, 0, 3)
        scores = queries @ keys.mT / keys.shape[-1] ** 0.5
        if window is not None:
            places = torch.arange(len(text))
            scores[:, (places[:, None] - places).abs() > window] = float("-inf")
        parts.append((scores.softmax(-1) @ values).transpose(0, 1).flatten(1))
    return torch.cat(parts)


# A head of 20 components is none that FlashAttention takes.
@pytest.mark.parametrize("head_dim", [16, 80, 20])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", DEVICES)
def test_each_text_sees_itself_alone(
    kind: tuple[str, torch.dtype], lengths: tuple[int, ...], window: int | None, head_dim: int
) -> None:
    name, dtype = kind
    device = torch.device(name)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3 * HEADS * head_dim, generator=generator).to(device, dtype)
    attention = TextAttention(np.array(lengths), HEADS, device, window=window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = expected_of(qkv, lengths, window)
    torch.testing.assert_close(attention(qkv).double().cpu(), expected, atol=tolerance, rtol=tolerance)
    # Nothing is kept from one call to the next.
    torch.testing.assert_close(attention(qkv).double().cpu(), expected, atol=tolerance, rtol=tolerance)


def test_there_may_be_no_texts() -> None:
    attention = TextAttention(np.array([], np.int64), HEADS, torch.device("cpu"))
    assert attention(torch.empty(0, 3 * HEADS * 16)).shape == (0, HEADS * 16)


@pytest.mark.parametrize(("device", "capability"), [("cpu", (9, 0)), ("cuda", (7, 5)), ("cuda", (9, 0))])
def test_flash_attention_is_imported_ahead_only_where_the_device_has_it(
    device: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    # An import of it raises now.
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    has_it = device == "cuda" and capability >= (8, 0)
    with pytest.raises(ImportError) if has_it else nullcontext():
        import_flash_attention(torch.device(device))


def test_loading_an_encoder_of_images_imports_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    family = SimpleNamespace(load=lambda *_: events.append("weights"))
    monkeypatch.setattr(registry, "vision_families", lambda: {"any": family})
    monkeypatch.setattr(registry, "import_flash_attention", events.append)
    device = torch.device("cpu")
    registry.load_vision(None, SimpleNamespace(family="any"), None, device)  # type: ignore[arg-type]  # not looked at
    assert events == [device, "weights"]
