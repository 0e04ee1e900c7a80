"""The GPU's mixture of experts against the loop over plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.kernels.composed import ExpertLoop
from services.worker.engine.kernels.interface import ExpertMatrices
from services.worker.engine.kernels.torch.kernels import TorchKernels
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization import grouped, int8, mxfp4
from services.worker.engine.quantization.fp8 import quantise, quantise_blocks
from services.worker.engine.quantization.int8 import Int8Matrix

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu.experts import GpuExperts, _PackedStack, _Stack

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


def quantised(expert: ExpertMatrices, quantiser: Callable[[torch.Tensor], Matrix]) -> ExpertMatrices:
    assert isinstance(expert.gate, torch.Tensor)
    assert isinstance(expert.up, torch.Tensor)
    assert isinstance(expert.down, torch.Tensor)
    gate, up, down = (quantiser(matrix.float()) for matrix in (expert.gate, expert.up, expert.down))
    return replace(expert, gate=gate, up=up, down=down)


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
    made = [quantised(each, quantiser) for each in matrices(experts)]
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


def int8_errors(got: torch.Tensor, made: list[ExpertMatrices], activation: Activation, *routing: torch.Tensor) -> Any:
    """Return the errors of tokens, as parts of their norm; sums of the loop, in float64, are exact."""
    loop = ExpertLoop(TorchKernels(torch.float64, torch.device("cpu")), len(made), iter(made), activation)
    inputs, ids, routing_weights = routing
    expected = loop(inputs.double(), ids, routing_weights.double())
    return (got.cpu().double() - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.parametrize(
    ("experts", "tokens", "activation", "has_biases"),
    [
        (5, 24, Activation.SILU, False),
        (5, 3, Activation.CLAMPED_SWIGLU, True),
        (3, 97, Activation.GELU_TANH, False),
        (3, 97, Activation.SILU, True),
    ],
)
def test_int8_experts_give_the_same_as_the_expert_loop(
    device: torch.device, experts: int, tokens: int, activation: Activation, has_biases: bool
) -> None:
    made = [quantised(each, int8.quantise) for each in matrices(experts, has_biases=has_biases)]
    inputs, ids, routing_weights = routed(tokens, experts, 0.5)
    # Each token has a scale of its own, also one that is large in a single place.
    inputs = (inputs * torch.logspace(-1, 1, tokens)[:, None]).to(DTYPE)
    inputs[1, 7] = 50
    moe = GpuExperts(experts, iter(made), activation, DTYPE, device)
    assert isinstance(moe._gate_up, _Stack)
    assert moe._gate_up._values.dtype == torch.int8
    got = moe(inputs.to(device), ids.to(device), routing_weights.to(device))
    error = int8_errors(got, made, activation, inputs, ids, routing_weights)
    assert float(error.median()) < (2e-2 if HAS_GPU else 1e-5)
    assert float(error.max()) < 5e-2


def test_sums_of_int8_experts_are_exact(device: torch.device) -> None:
    # Partial sums have more than the 24 bits of float32, and cancel out.
    hidden, columns = 4096, 16
    generator = torch.Generator().manual_seed(0)

    def cancelling() -> Int8Matrix:
        half = torch.randint(64, 128, (columns, hidden // 2), generator=generator)
        rest = torch.randint(1, 9, (columns, 1), generator=generator)
        values = torch.cat([half, -half.flip(1)], dim=1)
        return Int8Matrix(torch.cat([values[:, :-1], values[:, -1:] + rest], dim=1).to(torch.int8), torch.ones(columns))

    down = int8.quantise(torch.randn(hidden, columns, generator=generator))
    made = [ExpertMatrices(cancelling(), cancelling(), down) for _ in range(CHOSEN)]
    inputs = torch.ones(2, hidden, dtype=DTYPE)
    ids, routing_weights = torch.arange(CHOSEN).expand(2, -1).contiguous(), torch.ones(2, CHOSEN, dtype=DTYPE)
    moe = GpuExperts(CHOSEN, iter(made), Activation.SILU, DTYPE, device)
    got = moe(inputs.to(device), ids.to(device), routing_weights.to(device))
    error = int8_errors(got, made, Activation.SILU, inputs, ids, routing_weights)
    assert float(error.max()) < (2e-2 if HAS_GPU else 1e-5)


def test_what_is_not_a_number_spoils_only_its_own_token_in_int8(device: torch.device) -> None:
    made = [quantised(each, int8.quantise) for each in matrices(4)]
    inputs, ids, routing_weights = routed(9, 4, 0.0)
    inputs[3, 5] = float("nan")
    got = GpuExperts(4, iter(made), Activation.SILU, DTYPE, device)(
        inputs.to(device), ids.to(device), routing_weights.to(device)
    )
    assert got.isnan().any(dim=1).tolist() == [i == 3 for i in range(9)]


def test_columns_of_int8_experts_on_two_ranks_add_up(device: torch.device) -> None:
    def columns(expert: ExpertMatrices, part: slice) -> ExpertMatrices:
        assert isinstance(expert.gate, Int8Matrix)
        assert isinstance(expert.up, Int8Matrix)
        assert isinstance(expert.down, Int8Matrix)
        gate, up = (Int8Matrix(each.values[part], each.scales[part]) for each in (expert.gate, expert.up))
        return ExpertMatrices(gate, up, expert.down.columns(part))

    made = [quantised(each, int8.quantise) for each in matrices(5)]
    inputs, ids, routing_weights = routed(24, 5, 0.5)
    places = [each.to(device) for each in (inputs, ids, routing_weights)]
    parts = [
        GpuExperts(5, (columns(each, part) for each in made), Activation.SILU, DTYPE, device)(*places)
        for part in (slice(16), slice(16, COLUMNS))
    ]
    # Ranks scale their own parts of the activations.
    error = int8_errors(parts[0].float() + parts[1].float(), made, Activation.SILU, inputs, ids, routing_weights)
    assert float(error.max()) < 3e-2


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
    made: list[Any] = [quantised(each, PACKED[kind]) for each in matrices(3, 96, 64, has_biases=has_biases)]
    # The first expert alone has its zero points in the middle.
    if kind == "4 bits with zero points":
        made[0] = replace(made[0], gate=replace(made[0].gate, shifts=None))
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
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_captured_moe_layer_handles_any_routing(
    device: torch.device, dtype: torch.dtype, tokens: int, is_int8: bool
) -> None:
    experts, hidden = 128, 2048
    made = matrices(experts, hidden, 192)
    if is_int8:
        made = [quantised(each, int8.quantise) for each in made]
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
        # Results of the first product are rounded before INT8 is, some of them the other way.
        assert float(error) < (2e-2 if is_int8 else 1e-2)


@pytest.mark.parametrize("held", [range(3), range(3, 8), range(7, 8)])
@pytest.mark.parametrize("is_int8", [False, True])
def test_experts_on_other_ranks_add_nothing(device: torch.device, held: range, is_int8: bool) -> None:
    inputs, ids, routing_weights = routed(70 if HAS_GPU else 24, 8, 0.3)
    local = torch.where((ids >= held.start) & (ids < held.stop), ids - held.start, len(held))
    assert len(held) in local
    of_rank = routing_weights * (local < len(held))
    cpu, activation = torch.device("cpu"), Activation.SILU
    every = [quantised(each, int8.quantise) if is_int8 else each for each in matrices(8)]
    own = every[held.start : held.stop]
    wanted = ExpertLoop(TorchKernels(torch.float32, cpu), 8, iter(every), activation)(
        inputs.float(), ids, of_rank.float()
    )
    moe = GpuExperts(len(held), iter(own), activation, DTYPE, device, are_all=False)
    got = moe(inputs.to(device), local.to(device), routing_weights.to(device))
    torch.testing.assert_close(got.cpu().float(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    loop = ExpertLoop(TorchKernels(torch.float32, cpu), len(held), iter(own), activation)
    torch.testing.assert_close(loop(inputs.float(), local, routing_weights.float()), wanted)
