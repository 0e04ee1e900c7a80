"""Any decoder of `transformers`, with its attention replaced by ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from common.errors import ConfigurationError
from services.worker.engine.model.batch import ForwardBatch
from services.worker.engine.parallel.shards import Span, split_evenly
from services.worker.engine.transformers_models.capturing import replayed, waiting_line
from services.worker.engine.transformers_models.library import import_transformers
from services.worker.engine.transformers_models.sharing import LayerSharing
from services.worker.engine.transformers_models.tracing import Tracer, trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.kernels.interface import AttentionBackend, KvLayout
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.parallel.group import RankGroup
    from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint

_CHECKED_TOKENS = 8
# Relative errors of logits that roundings explain, by bytes of a number.
_TOLERANCE = {2: 0.1, 4: 1e-3}


class TransformersDecoder:
    """Computes logits and fills the KV pool; see `Decoder`.

    A batch of rows goes through the model as one long sequence without a mask: attention alone looks at other tokens,
    and ours knows which of them are whose. Queries and keys arrive there with their positions in them. The pool has the
    shape of the widest layer: narrower heads are filled up with zeros, and fewer KV heads repeated.
    """

    def __init__(
        self, checkpoint: TransformersCheckpoint, dtype: torch.dtype, device: torch.device, group: RankGroup
    ) -> None:
        """Load the model, find out what it asks of attention, and keep this rank's part of it.

        Raises:
            ConfigurationError: `transformers` cannot load it, or it cannot be run here.
        """
        library = import_transformers(checkpoint.config.family)
        # The registry is one for the whole process, a name in it is this model's own.
        self._name = f"pando-{id(self)}"
        self._registry: Any = library.modeling_utils.ALL_ATTENTION_FUNCTIONS
        tracer = Tracer()
        self._registry[self._name] = tracer.attend
        self._model: Any = checkpoint.load(dtype, self._name)
        # The library would look for padding among the ids of every pass, which waits for the device.
        for part in (self._model, self._model.get_decoder()):
            part.config.pad_token_id = None
        self._group = group
        if group.world_size == 1:
            # Of several ranks, each has memory for its part on the device only.
            self._model.to(device)
        self._decoder: Any = self._model.get_decoder()
        self.config: ModelConfig = trace(self._decoder, tracer, checkpoint.config, self._model.device)
        self._registry[self._name] = self._attend
        self._layer_of = {module: i for i, module in enumerate(tracer.modules)}
        self._layers = tracer.layers
        self._expected = self._own_logits()
        if group.world_size > 1:
            self._share(tracer.modules)
        self._model.to(device)
        self._output_type: type | None = None
        self._attention: Sequence[AttentionBackend] = ()
        self._activation_dtype = dtype
        self._pass: tuple[ForwardBatch, ForwardBatch, KvPool] | None = None

    @property
    def expert_counts(self) -> None:
        """None: experts are not distributed."""

    @property
    def exchange(self) -> None:
        """None, for the same reason."""

    @property
    def kv_layout(self) -> KvLayout:
        """Layout of pages in memory."""
        return self._attention[0].layout

    def use(self, attention: Sequence[AttentionBackend], activation_dtype: torch.dtype) -> None:
        """Attend with the `attention` of each layer, which computes in `activation_dtype`."""
        self._attention = attention
        self._activation_dtype = activation_dtype

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Return logits [samples, vocabulary] in the type of the activations."""
        return self.logits(self.hidden_states(batch, pool))

    def hidden_states(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Return the final, normalized hidden states of the samples, [samples, hidden]."""
        # Sliding-window layers may have pages of their own; they share one object, since kernels plan once per object.
        self._pass = batch, batch.in_window(), pool
        try:
            output = self._decoder(input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False)
        finally:
            self._pass = None
        self._output_type = type(output)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden[batch.sample_indices]

    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of some of the hidden states [samples, hidden] on rank 0; the head is not shared."""
        if hidden.shape[0] == 0 or self._group.rank > 0:
            return hidden.new_empty(0, self.config.vocabulary_size)
        assert self._output_type is not None, "hidden states come from a pass"
        given = self._output_type(last_hidden_state=hidden[None])
        # Families scale and softcap logits after the head in their own code, which runs here on given hidden states.
        self._decoder.forward = lambda *_arguments, **_options: given
        try:
            places = torch.arange(hidden.shape[0], device=hidden.device)[None]
            logits: torch.Tensor = self._model(input_ids=places, position_ids=places, use_cache=False).logits[0]
        finally:
            del self._decoder.forward
        return logits[:, : self.config.vocabulary_size]

    def check(self, pool: KvPool) -> None:
        """Compare a prompt and a decoded token with the model's own attention; the first pages of `pool` are used.

        Raises:
            ConfigurationError: logits differ by more than rounding: something there is unknown here.
        """
        token_ids, last = self._checked_ids(), _CHECKED_TOKENS - 1
        try:
            self.forward(_one_row(token_ids, 0, last, pool.page_size), pool)
            got = self.forward(_one_row(token_ids, last, _CHECKED_TOKENS, pool.page_size), pool).cpu().float()
        except RuntimeError as error:
            if self._group.world_size == 1:
                raise
            raise ConfigurationError(
                f"model family {self.config.family!r} runs through transformers, and not on {self._group.world_size} "
                f"ranks: {error}; use one rank (--tp 1)"
            ) from error
        if not self._group.minimum(int(self._is_expected(got))):
            raise ConfigurationError(
                f"model family {self.config.family!r} cannot be served through transformers: with paged attention on "
                f"{self._group.world_size} ranks its logits are off by {self._error_share(got):.1%}"
            )

    def obstacle_to_graphs(self, pool: KvPool) -> str | None:
        """Return why decode passes cannot be captured in CUDA graphs on this GPU; None: they can.

        A pass is captured and replayed with another token, whose logits must be those that `check` compares with. All
        ranks call it together, after `check`, whose keys and values it reads.
        """
        token_ids, last = self._checked_ids(), _CHECKED_TOKENS - 1
        captured, replaced = (
            _one_row(token_ids, place, place + 1, pool.page_size, _CHECKED_TOKENS) for place in (last - 1, last)
        )
        line = waiting_line(lambda: self.forward(captured, pool))
        if not self._group.minimum(int(line is None)):
            return f"it waits for the GPU ({line or 'on another rank'})"

        def change() -> None:
            for one, other in zip(_inputs(captured), _inputs(replaced), strict=True):
                one.copy_(other)

        try:
            got: torch.Tensor | None = replayed(lambda: self.forward(captured, pool), change).cpu().float()
            reason = "replayed passes compute something else"
        except RuntimeError as error:
            got, reason = None, str(error)
        is_same = got is not None and self._is_expected(got)
        return None if self._group.minimum(int(is_same)) else reason

    def _is_expected(self, got: torch.Tensor) -> bool:
        """Whether logits [1, vocabulary] after the checked tokens are right; ranks but the first one have none."""
        return self._group.rank > 0 or self._error_share(got) < _TOLERANCE[self._model.dtype.itemsize]

    def _error_share(self, got: torch.Tensor) -> float:
        return float((got - self._expected[: got.shape[1]]).norm() / self._expected.norm())

    def _checked_ids(self) -> torch.Tensor:
        ids = torch.arange(1, _CHECKED_TOKENS + 1, device=self._model.device)
        return ids * 7 % self.config.vocabulary_size

    def _own_logits(self) -> torch.Tensor:
        """Return [vocabulary] float32 after the checked tokens, with the model's own attention."""
        self._model.set_attn_implementation("eager")
        logits: torch.Tensor = self._model(input_ids=self._checked_ids()[None], use_cache=False).logits[0, -1]
        self._model.set_attn_implementation(self._name)
        return logits.float().cpu()

    def _share(self, modules: Sequence[torch.nn.Module]) -> None:
        """Keep this rank's part of the layers, whose attention `modules` are."""
        world_size, config = self._group.world_size, self.config
        names = {module: name for name, module in self._decoder.named_modules()}
        heads, kv_heads = {}, {}
        spans = split_evenly(config.kv_heads, world_size)
        if config.kv_heads < world_size:
            raise ConfigurationError(
                f"model family {config.family!r} runs through transformers, on at most as many ranks as it has KV "
                f"heads, {config.kv_heads}, not on {world_size}"
            )
        for module, layer in zip(modules, self._layers, strict=True):
            copies, span = config.kv_heads // layer.kv_heads, spans[self._group.rank]
            if span.start % copies or span.stop % copies:
                raise ConfigurationError(
                    f"model family {config.family!r} runs through transformers, and a layer with {layer.kv_heads} KV "
                    f"heads cannot be shared by {world_size} ranks; use one rank (--tp 1)"
                )
            heads[names[module]] = Span(span.start // copies, span.stop // copies)
            kv_heads[names[module]] = layer.kv_heads
        sharing = LayerSharing(config.family, heads, kv_heads, self._group)
        sharing.apply(self._decoder, self._decoder.config.base_model_tp_plan)

    def close(self) -> None:
        """Take back what the library knows of this model."""
        self._registry.pop(self._name, None)

    def _attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        _attention_mask: torch.Tensor | None, **_options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attend as models ask for it: heads [1, heads, tokens, head_dim] in, [1, tokens, heads, head_dim] out."""
        assert self._pass is not None, "only passes attend"
        whole, local, pool = self._pass
        i = self._layer_of[module]
        batch = whole if self.config.window_of(i) is None else local
        layer, tokens, query_heads = self._layers[i], query.shape[2], query.shape[1]
        parts = [query, key, value]
        if layer.scale != self.config.attention_scale:
            parts[0] = query * (layer.scale / (self.config.attention_scale or 1.0))
        if layer.kv_heads != self.config.kv_heads:
            copies = self.config.kv_heads // layer.kv_heads
            parts[1:] = [heads.repeat_interleave(copies, dim=1) for heads in (key, value)]
        if layer.head_dim != self.config.head_dim:
            parts = [pad(heads, (0, self.config.head_dim - layer.head_dim)) for heads in parts]
        # [tokens, (query_heads + 2 kv_heads) * head_dim]
        qkv = torch.cat([heads[0].transpose(0, 1).flatten(1) for heads in parts], dim=1)
        attended = self._attention[i].store_and_attend(qkv.to(self._activation_dtype), pool.layers[i], None, batch)
        return attended.view(1, tokens, query_heads, -1)[..., : layer.head_dim].to(query.dtype), None


def _one_row(token_ids: torch.Tensor, start: int, end: int, page_size: int, longest: int | None = None) -> ForwardBatch:
    """Return tokens [start, end) of one row on the first pages, the last of them sampled; it may grow to `longest`."""
    device, count, most = token_ids.device, end - start, longest or end
    positions = torch.arange(start, end, device=device)
    return ForwardBatch(
        token_ids=token_ids[start:end].clone(),
        positions=positions,
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        key_lengths=torch.tensor([end], dtype=torch.int32, device=device),
        page_table=torch.arange(-(-most // page_size), dtype=torch.int32, device=device)[None],
        write_slots=positions.clone(),
        sample_indices=torch.tensor([count - 1], device=device),
        decode_rows=int(count == 1),
        max_query_length=count,
        max_key_length=most,
    )


def _inputs(batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
    """Return all in which batches of one token of one row differ."""
    return batch.token_ids, batch.positions, batch.key_lengths, batch.write_slots


def pages_to_check(page_size: int) -> int:
    """Return the number of pages that `TransformersDecoder.check` uses."""
    return -(-_CHECKED_TOKENS // page_size)
