"""Expert parallelism by all-to-all: tokens go to the ranks that hold their experts, and the outputs come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.worker.engine.parallel.expert_load import ExpertCounts
from services.worker.engine.parallel.shards import split_evenly

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import Experts
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.parallel.expert_group import ExpertGroup
    from services.worker.engine.parallel.shards import Span


@dataclass(frozen=True, slots=True)
class RowForm:
    """Form of what a token brings to another rank: `hidden` components, and ids and weights of `choices` experts."""

    hidden: int
    choices: int
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs, ids and weights of no tokens."""
        inputs = torch.empty(0, self.hidden, dtype=self.dtype, device=self.device)
        ids = torch.empty(0, self.choices, dtype=torch.int64, device=self.device)
        return inputs, ids, torch.empty(0, self.choices, dtype=self.dtype, device=self.device)

    def pack(self, inputs: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return all three as bytes, [tokens, bytes] uint8, so that one message carries them."""
        return torch.cat([part.contiguous().view(torch.uint8) for part in (inputs, ids.int(), weights)], dim=1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Undo `pack`."""
        if len(rows) == 0:
            return self.empty()
        size = self.dtype.itemsize
        inputs, ids, weights = torch.split(rows, [self.hidden * size, self.choices * 4, self.choices * size], dim=1)
        return (
            inputs.contiguous().view(self.dtype),
            ids.contiguous().view(torch.int32).long(),
            weights.contiguous().view(self.dtype),
        )


class ExchangedExperts:
    """All experts of a layer, of which each rank of the group holds some; see `Experts`. All ranks call it together."""

    def __init__(self, experts: Experts, exchange: ExpertExchange, counts: torch.Tensor) -> None:
        """Compute with `experts`, which this rank holds; `counts` [experts] get the choices of all ranks."""
        self._experts = experts
        self._exchange = exchange
        self._counts = counts

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the chosen experts' outputs, computed where the experts are."""
        group, form, owners = self._exchange.group, self._exchange.form, self._exchange.owners
        wanted = torch.zeros(len(inputs), group.expert_ranks, dtype=torch.bool, device=inputs.device)
        wanted.scatter_(1, owners[expert_ids], True)
        # Sorted by rank, then by token. A token goes to a rank once, whichever of its experts are there.
        _, tokens = wanted.t().nonzero(as_tuple=True)
        choices = torch.bincount(expert_ids.flatten(), minlength=len(owners))
        told = group.gather(torch.cat([choices, wanted.sum(dim=0)]))
        self._counts += told[:, : len(owners)].sum(dim=0)
        sizes = told[:, len(owners) :]
        sent, received = sizes[group.expert_rank].tolist(), sizes[:, group.expert_rank].tolist()
        packed = form.pack(inputs[tokens], expert_ids[tokens], routing_weights[tokens])
        arrived = group.exchange(packed, sent, received)
        parts = group.exchange(self._compute(*form.unpack(arrived)), received, sent)
        return _added(parts, tokens, sent, len(inputs))

    def take_part(self) -> None:
        """Compute what other ranks send, without tokens of this one."""
        self(*self._exchange.form.empty())

    def _compute(self, inputs: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 0:
            return inputs
        held = self._exchange.held
        count, local = len(held), expert_ids - held.start
        return self._experts(inputs, local.where((local >= 0) & (local < count), count), weights)


class ExpertExchange:
    """The exchanges of all layers of a model with the other ranks of an expert group."""

    @torch.inference_mode()
    def __init__(self, group: ExpertGroup, spans: tuple[Span, ...], layers: int, form: RowForm) -> None:
        """Exchange with `group`, whose ranks hold the experts in `spans`, in `layers` mixtures."""
        self.group = group
        self.form = form
        self.held = spans[group.expert_rank]
        # [experts] int64: the rank that holds each.
        self.owners = torch.cat([torch.full((len(span),), rank) for rank, span in enumerate(spans)]).to(form.device)
        self.counts = ExpertCounts(layers, len(self.owners), spans, group.expert_rank, torch.device("cpu"))
        self._layers: list[ExchangedExperts] = []

    def share(self, experts: Experts) -> ExchangedExperts:
        """Return all experts of the next layer, of which this rank holds `experts`."""
        self._layers.append(ExchangedExperts(experts, self, self.counts.of_next_layer()))
        return self._layers[-1]

    def begin_pass(self) -> None:
        """Call the other ranks to a pass with tokens of this one."""
        self.group.calls.begin()

    def skip_last_layer(self) -> None:
        """Take part in the last layer without tokens."""
        self._layers[-1].take_part()

    def join_pass(self, number: int) -> bool:
        """Take part in a pass without tokens; return False if this rank has taken part in it already."""
        if not self.group.calls.try_join(number):
            return False
        for layer in self._layers:
            layer.take_part()
        return True


def exchange_with(
    group: ExpertGroup | None, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> ExpertExchange | None:
    """Return the exchange with `group` for the model of `config`, with activations of `dtype` on `device`."""
    if group is None:
        return None
    moe = config.moe
    assert moe is not None, "`share_experts` has refused dense models"
    layers = sum(config.moe_of(layer) is not None for layer in range(config.layers))
    spans = split_evenly(moe.experts, group.expert_ranks)
    # Weighted inputs make every choice a token of its own.
    form = RowForm(config.hidden_size, 1 if moe.weights_inputs else moe.experts_per_token, dtype, device)
    return ExpertExchange(group, spans, layers, form)


def _added(parts: torch.Tensor, tokens: torch.Tensor, sent: list[int], count: int) -> torch.Tensor:
    """Return sums [count, hidden] of the parts from each rank; `tokens` has the place of each row of `parts`."""
    sums = torch.zeros(count, parts.shape[1], dtype=torch.float32, device=parts.device)
    # Rank by rank: a rank's tokens are all different, so sums have the same order each time, on a GPU as well.
    for part, places in zip(torch.split(parts, sent), torch.split(tokens, sent), strict=True):
        sums.index_add_(0, places, part.float())
    return sums.to(parts.dtype)
