"""Stages of a pipeline: which layers each has, and what passes between them.

Hidden states travel from a stage to the next one, rank to rank of equal number; sampled tokens travel from the last
stage to all ranks, over the host, where rows live.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from common.errors import ConfigurationError
from services.worker.engine.parallel.meeting import RENDEZVOUS_TIMEOUT
from services.worker.engine.parallel.shards import Span

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.model.config import ModelConfig

# Sends in a row that may be under way: far more than plans, so a stage hardly ever waits for the next one to receive.
_OPEN_SENDS = 8


class PendingTokens(Protocol):
    """The tokens of a pass, which the last stage still computes."""

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> torch.Tensor:
        """Return them, on the host."""
        ...


class StageLinks(Protocol):
    """The connections of a rank to the other stages. All ranks pass through the same passes in the same order."""

    stage: int
    stages: int

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        ...

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return the residual stream [tokens, hidden] that the stage before has sent."""
        ...

    def receive_into(self, hidden: torch.Tensor) -> None:
        """Overwrite `hidden` [tokens, hidden] with the residual stream that the stage before has sent."""
        ...

    def send(self, hidden: torch.Tensor) -> None:
        """Send the residual stream to the next stage, which does not have to be ready; it must not change any more."""
        ...

    def return_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sampling rank's `tokens` on all ranks of the last stage, and send them to the stages before."""
        ...

    def expect_tokens(self, shape: tuple[int, int]) -> PendingTokens:
        """Return the int64 tokens that the last stage will return for the pass that has just been launched."""
        ...

    def close(self) -> None:
        """Forget what is under way: nothing keeps connections open any more."""
        ...


class NoStages:
    """The links of a rank that has all layers."""

    stage, stages = 0, 1
    is_first = is_last = True

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Never be called."""
        raise AssertionError("there is no stage before")

    def receive_into(self, hidden: torch.Tensor) -> None:
        """Never be called."""
        raise AssertionError("there is no stage before")

    def send(self, hidden: torch.Tensor) -> None:
        """Never be called."""
        raise AssertionError("there is no stage after")

    def return_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `tokens`."""
        return tokens

    def expect_tokens(self, shape: tuple[int, int]) -> PendingTokens:
        """Never be called."""
        raise AssertionError("this rank samples itself, or gets tokens in the pass")

    def close(self) -> None:
        """Do nothing."""


class DistributedStageLinks:
    """Links over `torch.distributed`, which has been initialised: gloo or NCCL, and gloo alone for tokens."""

    def __init__(
        self, rank: int, world_size: int, stages: int, device: torch.device, tokens: dist.ProcessGroup
    ) -> None:
        """Link `rank` of all ranks; `tokens` is a group of all of them on the host."""
        self._ranks = world_size // stages
        self._rank = rank
        self._sampler = world_size - self._ranks
        self._device = device
        self._tokens: dist.ProcessGroup | None = tokens
        self._expected: deque[_PendingBroadcast] = deque()
        # With the tensors, which must last until they are sent.
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.stage = rank // self._ranks
        self.stages = stages

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        self.receive_into(hidden)
        return hidden

    def receive_into(self, hidden: torch.Tensor) -> None:
        work = dist.irecv(hidden, src=self._rank - self._ranks)
        assert work is not None, "this rank belongs to the group"
        self._wait(work)

    def send(self, hidden: torch.Tensor) -> None:
        if len(self._sends) == _OPEN_SENDS:
            self._wait(self._sends.popleft()[0])
        work = dist.isend(hidden.contiguous(), dst=self._rank + self._ranks)
        assert work is not None, "this rank belongs to the group"
        self._sends.append((work, hidden))

    def return_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        on_host = tokens.cpu()
        dist.broadcast(on_host, src=self._sampler, group=self._tokens)
        return on_host.to(tokens.device)

    def expect_tokens(self, shape: tuple[int, int]) -> PendingTokens:
        tokens = torch.empty(shape, dtype=torch.int64)
        work = dist.broadcast(tokens, src=self._sampler, group=self._tokens, async_op=True)
        assert work is not None, "this rank belongs to the group"
        while self._expected and self._expected[0].is_over:
            self._expected.popleft()
        self._expected.append(_PendingBroadcast(work, tokens))
        return self._expected[-1]

    def _wait(self, work: dist.Work) -> None:
        # Gloo would wait as long as ranks have to connect; with a timeout, NCCL would block the host.
        if self._device.type == "cpu":
            work.wait(RENDEZVOUS_TIMEOUT)
        else:
            work.wait()

    def close(self) -> None:
        # Works keep the connections that they use, which are to break now; a traceback may keep the works.
        for pending in self._expected:
            pending.drop()
        self._expected.clear()
        self._sends.clear()
        self._tokens = None


class _PendingBroadcast:
    """See `PendingTokens`."""

    def __init__(self, work: dist.Work, tokens: torch.Tensor) -> None:
        self._work: dist.Work | None = work
        self._tokens = tokens

    @property
    def is_over(self) -> bool:
        """Whether the tokens were waited for."""
        return self._work is None

    @property
    def is_ready(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        assert self._work is not None, "tokens are waited for once, before the group is left"
        self._work.wait()
        self._work = None
        return self._tokens

    def drop(self) -> None:
        """Never wait."""
        self._work = None


def layers_of_stages(config: ModelConfig, stages: int) -> tuple[Span, ...]:
    """Divide the layers such that the stage with most weights has as few as possible; earlier stages are smaller.

    The embedding counts for the first stage, and the head for the last one, also where they are the same tensor.

    Raises:
        ConfigurationError: there are fewer layers than stages, or a stage would lack a kind of layers.
    """
    if stages == 1:
        return (Span(0, config.layers),)
    if stages > config.layers:
        raise ConfigurationError(
            f"scheduler.pipeline_parallel: {stages} stages, but {config.family} has {config.layers} layers; each "
            "stage needs at least one"
        )
    weights = [_layer_weights(config, layer) for layer in range(config.layers)]
    weights[0] += config.vocabulary_size * config.hidden_size
    weights[-1] += config.vocabulary_size * config.hidden_size
    spans = _divide(weights, stages)
    _check_kinds(config, spans)
    return spans


def kept_bytes(spec: EngineSpec, hidden_size: int, element_bytes: int) -> int:
    """Return the bytes that a stage keeps beside a pass: residual streams being sent, and those at its ends."""
    if spec.stages == 1:
        return 0
    return (_OPEN_SENDS + 2) * max(spec.max_step_tokens, spec.max_rows) * hidden_size * element_bytes


def check_stages(spec: EngineSpec, config: ModelConfig, *, is_own: bool) -> None:
    """Raise ConfigurationError for what stages do not support; `is_own`: the model has an implementation here."""
    layers_of_stages(config, spec.stages)
    setting = f"scheduler.pipeline_parallel={spec.stages}"
    if not is_own:
        raise ConfigurationError(
            f"{setting}: {config.family} runs through transformers, without stages; use tensor parallelism"
        )
    if spec.adapter_slots:
        raise ConfigurationError(
            f"{setting} and scheduler.adapters.slots={spec.adapter_slots}: adapters are not divided into stages yet; "
            "use tensor parallelism, or serve adapters from another group"
        )
    if spec.vision:
        raise ConfigurationError(
            f"{setting}: a model with images cannot be cut into stages yet; use tensor parallelism"
        )


def _divide(weights: list[int], parts: int) -> tuple[Span, ...]:
    """Cut `weights` into `parts` runs, none empty, whose largest sum is as small as possible."""
    count = len(weights)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # least[i]: the largest sum of the first i weights in as many parts as were considered; cuts: where the last begins.
    least = [float(each) for each in sums]
    cuts: list[list[int]] = []
    for part in range(1, parts):
        best, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(part + 1, count + 1):
            for start in range(part, end):
                largest = max(least[start], float(sums[end] - sums[start]))
                if largest < best[end]:
                    best[end], cut[end] = largest, start
        least = best
        cuts.append(cut)
    borders = [count]
    for cut in reversed(cuts):
        borders.append(cut[borders[-1]])
    borders.append(0)
    borders.reverse()
    return tuple(Span(start, end) for start, end in itertools.pairwise(borders))


def _layer_weights(config: ModelConfig, layer: int) -> int:
    """Return about how many weights a layer has."""
    hidden, recurrent = config.hidden_size, config.recurrent
    if recurrent is not None and config.is_recurrent(layer):
        mixing = hidden * (recurrent.conv_width + 2 * recurrent.value_heads * recurrent.value_dim)
    else:
        own = config.at(layer)
        mixing = hidden * (2 * own.query_heads * own.head_dim + own.kv_width)
    moe = config.moe_of(layer)
    if moe is None:
        return mixing + 3 * hidden * config.intermediate_size
    shared = moe.shared.intermediate_size if moe.shared else config.intermediate_size * moe.is_beside_dense
    return mixing + 3 * hidden * (moe.experts * moe.intermediate_size + shared)


def _check_kinds(config: ModelConfig, spans: tuple[Span, ...]) -> None:
    """Check that each stage has layers of each kind of memory that the model has: they share out the same pages."""
    kinds = {
        "recurrent layers": [config.is_recurrent(layer) for layer in range(config.layers)],
        "layers with a window": [config.window_of(layer) is not None for layer in range(config.layers)],
    }
    for name, has in kinds.items():
        for span in spans:
            held = has[span.scaled(1)]
            if any(has) and not all(has) and (not any(held) or all(held)):
                raise ConfigurationError(
                    f"scheduler.pipeline_parallel: {config.family} has {name} and others, but layers {span.start} to "
                    f"{span.stop - 1}, one of {len(spans)} stages, are of one kind only; use fewer stages"
                )
