from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from deploy.evaluation.experiments.gguf_quantization import MIXTURE, kind_of, quantise

# Of normally distributed weights: the error of the nearest of the integers, as a share of the deviation, at most.
ERRORS = {Kind.Q4_K: 0.075, Kind.Q6_K: 0.019, Kind.Q8_0: 0.006, Kind.MXFP4: 0.125}


def error(values: np.ndarray, kind: Kind) -> float:
    return float(np.sqrt(((dequantize(quantise(values, kind), kind) - values) ** 2).mean()) / values.std())


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("deviation", [0.02, 3.0])
def test_weights_are_near_those_that_the_library_dequantises(kind: Kind, deviation: float) -> None:
    values = np.random.default_rng(0).normal(0, deviation, (64, 512)).astype(np.float32)
    assert error(values, kind) < ERRORS[kind]


def test_groups_with_other_means_and_sizes_keep_their_own_scales() -> None:
    random = np.random.default_rng(1)
    means, sizes = random.normal(0, 1, (64, 16, 1)), random.uniform(0.2, 1, (64, 16, 1))
    values = (means + sizes * random.normal(0, 1, (64, 16, 32))).reshape(64, 512).astype(np.float32)
    assert error(values, Kind.Q4_K) < 0.075
    assert error(values, Kind.Q4_K) < error(values, Kind.Q4_0)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_zeros_stay_zeros(kind: Kind) -> None:
    values = np.zeros((2, 256), np.float32)
    values[1, 7] = -1.0
    read = dequantize(quantise(values, kind), kind)
    assert (read[0] == 0).all()
    assert read[1, 7] == pytest.approx(-1, rel=0.02)


def test_the_mixture_has_the_kinds_that_llama_cpp_chooses() -> None:
    def kind(name: str, columns: int = 4096, *, is_tied: bool = False) -> Kind:
        return kind_of(MIXTURE, name, columns, 32, is_tied=is_tied)

    assert kind("token_embd.weight") == kind("blk.0.attn_q.weight") == kind("blk.4.ffn_down.weight") == Kind.Q4_K
    assert kind("output.weight") == kind("token_embd.weight", is_tied=True) == Kind.Q6_K
    wider = [i for i in range(32) if kind(f"blk.{i}.ffn_down.weight") is Kind.Q6_K]
    assert wider == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    # Rows of SmolLM2.
    assert (kind("blk.4.attn_v.weight", 576), kind("blk.0.attn_v.weight", 576)) == (Kind.Q5_0, Kind.Q8_0)
    assert kind_of("Q8_0", "blk.0.attn_v.weight", 576, 30, is_tied=True) is Kind.Q8_0


@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight"])
def test_embedding_and_head_may_have_eight_bits(name: str) -> None:
    def kind(mixture: str, name: str) -> Kind:
        return kind_of(mixture, name, 576, 30, is_tied=True)

    assert (kind("MXFP4", name), kind("MXFP4 layers", name)) == (Kind.MXFP4, Kind.Q8_0)
    assert kind("MXFP4 layers", "blk.0.attn_v.weight") is Kind.MXFP4
