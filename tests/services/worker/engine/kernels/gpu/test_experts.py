"""The GPU's mixture of experts against the loop over plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.kernels.composed import ExpertLoop
from services.worker.engine.kernels.interface import ExpertMatrices
from services.worker.engine.kernels.torch.kernels import TorchKernels
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization import grouped, mxfp4
from services.worker.engine.quantization.fp8 import quantise, quantise_blocks

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu.experts import GpuExperts, _PackedStack

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.quantization.grouped import GroupedMatrix
    from services.worker.engine.quantization.matrices import Matrix

HAS_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
TOLERANCE = 2e-2 if HAS_GPU else 1e-4
HIDDEN, COLUMNS, CHOSEN = 80, 48, 3


def matrices(
    experts: int, hidden: int = HIDDEN, columns: int = COLUMNS, *, has_biases: bool = False
) -> list[ExpertMatrices]:
    generator = torch.Generator().manual_seed(experts)

    def random(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator).mul(width**-0.5).to(DTYPE)

    def biases(expert: ExpertMatrices) -> ExpertMatrices:
        gate, up = random(1, columns)[0], random(1, columns)[0]
        return replace(expert, gate_up_biases=(gate, up), down_bias=random(1, hidden)[0])

    made = [
        ExpertMatrices(random(columns, hidden), random(columns, hidden), random(hidden, columns))
        for _ in range(experts)
    ]
    return list(map(biases, made)) if has_biases else made


def routed(tokens: int, experts: int, skew: float, hidden: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    """Return inputs, expert ids and shares; the larger `skew`, the more tokens go to the first experts."""
    generator = torch.Generator().manual_seed(tokens)
    inputs = torch.randn(tokens, hidden, generator=generator)
    logits = torch.randn(tokens, experts, generator=generator) - skew * torch.arange(experts)
    routing_weights, ids = torch.topk(torch.softmax(logits, dim=-1), CHOSEN)
    return inputs.to(DTYPE), ids, routing_weights.to(DTYPE)


def quantise_statically(weight: torch.Tensor) -> Matrix:
    return replace(quantise(weight), input_scale=torch.tensor([0.02]))


def check(
    experts: int, tokens: int, skew: float, activation: Activation, device: torch.device, *, has_biases: bool = False
) -> None:
    cpu = torch.device("cpu")
    inputs, ids, routing_weights = routed(tokens, experts, skew)
    expected = ExpertLoop(
        TorchKernels(torch.float32, cpu), experts, iter(matrices(experts, has_biases=has_biases)), activation
    )
    moe = GpuExperts(experts, iter(matrices(experts, has_biases=has_biases)), activation, DTYPE, device)
    got = moe(inputs.to(device), ids.to(device), routing_weights.to(device))
    wanted = expected(inputs.float(), ids, routing_weights.float())
    torch.testing.assert_close(got.cpu().float(), wanted, atol=TOLERANCE, rtol=TOLERANCE)


@settings(max_examples=60 if HAS_GPU else 6, deadline=None)
@given(
    st.sampled_from([3, 5, 16]), st.integers(1, 300 if HAS_GPU else 40), st.sampled_from([0.0, 0.5, 10.0]),
    st.sampled_from(Activation), st.booleans(),
)  # fmt: skip
def test_any_routing_gives_the_same_as_the_expert_loop(
    device: torch.device, experts: int, tokens: int, skew: float, activation: Activation, has_biases: bool
) -> None:
    check(experts, tokens, skew, activation, device, has_biases=has_biases)


@pytest.mark.parametrize("quantiser", [quantise, quantise_blocks, quantise_statically])
@pytest.mark.parametrize(("experts", "tokens", "activation"), [(5, 24, Activation.SILU), (3, 97, Activation.GELU_TANH)])
def test_fp8_experts_give_the_same_as_the_expert_loop(
    device: torch.device,
    quantiser: Callable[[torch.Tensor], Matrix],
    experts: int,
    tokens: int,
    activation: Activation,
) -> None:
    if HAS_GPU and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU does not multiply FP8")
    made = [
        ExpertMatrices(*(quantiser(matrix.float()) for matrix in (each.gate, each.up, each.down)))  # type: ignore[union-attr]  # made so
        for each in matrices(experts)
    ]
    inputs, ids, routing_weights = routed(tokens, experts, 0.5)
    moe = GpuExperts(experts, iter(made), activation, DTYPE, device)
    got = moe(inputs.to(device), ids.to(device), routing_weights.to(device)).cpu().float()
    loop = ExpertLoop(TorchKernels(torch.float32, torch.device("cpu")), experts, iter(made), activation)
    expected = loop(inputs.float(), ids, routing_weights.float())
    # What lies between two values may be rounded the other way between the products.
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < (2e-2 if HAS_GPU else 1e-5)
    # By a scale for all tokens, small values are rounded more coarsely, and rounding the other way costs more.
    assert float(error.max()) < (0.12 if quantiser is quantise_statically else 5e-2)


PACKED: dict[str, Callable[[torch.Tensor], GroupedMatrix]] = {
    "mxfp4": mxfp4.quantise,
    "4 bits": lambda weight: grouped.quantise(weight, 4, 32, has_zero_points=False),
    "4 bits with zero points": lambda weight: grouped.quantise(weight, 4, 16, has_zero_points=True),
    "6 bits": lambda weight: grouped.quantise(weight, 6, 16, has_zero_points=False),
    "8 bits": lambda weight: grouped.quantise(weight, 8, 32, has_zero_points=True),
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("tokens", "has_biases"), [(5, True), (20, False), (97, False), (130, True)])
def test_packed_experts_stay_packed_and_give_the_same_as_the_expert_loop(
    device: torch.device, kind: str, tokens: int, has_biases: bool
) -> None:
    def pack(expert: ExpertMatrices) -> ExpertMatrices:
        assert isinstance(expert.gate, torch.Tensor)
        assert isinstance(expert.up, torch.Tensor)
        assert isinstance(expert.down, torch.Tensor)
        gate, up, down = (PACKED[kind](each.float()) for each in (expert.gate, expert.up, expert.down))
        return replace(expert, gate=gate, up=up, down=down)

    made = [pack(each) for each in matrices(3, 96, 64, has_biases=has_biases)]
    # The first expert alone has its zero points in the middle.
    if kind == "4 bits with zero points":
        made[0] = replace(made[0], gate=replace(made[0].gate, shifts=None))  # type: ignore[type-var]  # made so
    inputs, ids, routing_weights = routed(tokens, 3, 0.5, 96)
    moe = GpuExperts(3, iter(made), Activation.CLAMPED_SWIGLU, DTYPE, device)
    held = [stack for stack in (moe._gate_up, moe._down) if isinstance(stack, _PackedStack)]
    assert len(held) == 2
    if kind == "mxfp4":
        assert sum(each.nbytes for stack in held for each in (stack._low, stack._scales)) == 3 * 3 * 96 * 64 * 17 // 32
    got = moe(inputs.to(device), ids.to(device), routing_weights.to(device)).cpu().float()
    loop = ExpertLoop(TorchKernels(torch.float32, torch.device("cpu")), 3, iter(made), Activation.CLAMPED_SWIGLU)
    expected = loop(inputs.float(), ids, routing_weights.float())
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_many_tokens_take_larger_blocks(device: torch.device) -> None:
    check(4, 130, 0.5, Activation.SILU, device)


def test_no_tokens_give_nothing(device: torch.device) -> None:
    moe = GpuExperts(4, iter(matrices(4)), Activation.SILU, DTYPE, device)
    inputs, ids, routing_weights = (tensor[:0].to(device) for tensor in routed(1, 4, 0.0))
    assert moe(inputs, ids, routing_weights).shape == (0, HIDDEN)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 8, 256, 4096])
def test_a_captured_moe_layer_handles_any_routing(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    experts, hidden = 128, 2048
    made = matrices(experts, hidden, 192)
    moe = GpuExperts(experts, iter(made), Activation.SILU, dtype, device)
    reference = ExpertLoop(TorchKernels(torch.float32, device), experts, iter(made), Activation.SILU)
    places = [tensor.to(device) for tensor in routed(tokens, experts, 0.0, hidden)]
    places[0], places[2] = places[0].to(dtype), places[2].to(dtype)
    moe(*places)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe(*places)
    for skew in (0.0, 0.01, 1.0):
        for place, new in zip(places, routed(tokens, experts, skew, hidden), strict=True):
            place.copy_(new)
        graph.replay()
        expected = reference(places[0].float(), places[1], places[2].float())
        error = (captured.float() - expected).norm() / expected.norm()
        assert float(error) < 1e-2


@pytest.mark.parametrize("held", [range(3), range(3, 8), range(7, 8)])
def test_experts_on_other_ranks_add_nothing(device: torch.device, held: range) -> None:
    inputs, ids, routing_weights = routed(70 if HAS_GPU else 24, 8, 0.3)
    local = torch.where((ids >= held.start) & (ids < held.stop), ids - held.start, len(held))
    assert len(held) in local
    of_rank = routing_weights * (local < len(held))
    cpu, activation = torch.device("cpu"), Activation.SILU
    every, own = matrices(8), matrices(8)[held.start : held.stop]
    wanted = ExpertLoop(TorchKernels(torch.float32, cpu), 8, iter(every), activation)(
        inputs.float(), ids, of_rank.float()
    )
    moe = GpuExperts(len(held), iter(own), activation, DTYPE, device, are_all=False)
    got = moe(inputs.to(device), local.to(device), routing_weights.to(device))
    torch.testing.assert_close(got.cpu().float(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    loop = ExpertLoop(TorchKernels(torch.float32, cpu), len(held), iter(own), activation)
    torch.testing.assert_close(loop(inputs.float(), local, routing_weights.float()), wanted)
