"""The section of the configuration that says what is served, and one of several models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from common.section import Section


class ModelSettings(Section):
    """What is served."""

    reference: str = "smollm2-135m-instruct"
    """A bundled model's name, a directory with config.json, or a GGUF file, as each host sees it."""
    served_name: str | None = None
    """The name clients use; by default the reference's last part."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy", "fake"] = "auto"
    """`dummy`: random weights from config.json. `fake`: no model at all, for tests of the protocol."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Element type of the weights; auto: the checkpoint's own on a GPU, on a CPU bfloat16 if it can multiply that,
    else float32."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Element type of the KV pool; auto follows dtype."""
    quantization: Literal["auto", "fp8"] = "auto"
    """How the layers' matrices are held; auto: as the checkpoint stores them. fp8: quantised as they are read, a scale
    for each output channel, and activations at each product, one for each token: for GPUs that multiply FP8 (from
    compute capability 8.9 on). Embedding, head and norms stay as they are."""
    tool_style: Literal["auto", "none", "hermes", "llama3", "mistral", "pythonic"] = "auto"
    """How the model writes tool calls; auto: as its chat template does."""
    reasoning_style: Literal["auto", "none", "think"] = "auto"
    """think: reasoning stands in <think> blocks; auto: if the chat template knows them."""
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """Which hidden states become embeddings, unless a request says otherwise: the last token's, the mean of all, or the
    first token's (encoders only); auto: as the model's files say, else the mean in encoders and the last in others."""
    max_context: int = Field(default=0, ge=0)
    """Tokens of prompt and output together; 0: the model's own limit."""

    @property
    def name(self) -> str:
        """The model name that clients use."""
        return self.served_name or Path(self.reference).name


class ServedModelSettings(ModelSettings):
    """One of several models: what differs from the sections that all of them share."""

    aliases: tuple[str, ...] = ()
    """What else clients may call it."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel worker processes."""
    # Any: each section checks its own values once they are put on top of the shared ones.
    tokenizer: dict[str, Any] = Field(default_factory=dict)
    """Settings of this model's tokenizer that differ from the section `tokenizer`."""
    scheduler: dict[str, Any] = Field(default_factory=dict)
    """Settings of its scheduler that differ from the section `scheduler`."""
    worker: dict[str, Any] = Field(default_factory=dict)
    """Settings of its workers that differ from the section `worker`."""
    detokenizer: dict[str, Any] = Field(default_factory=dict)
    """What its detokenizer sets differently from the section `detokenizer`."""

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_reference(cls, value: object) -> object:
        return {"reference": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_called_by_its_key(self) -> Self:
        if self.served_name is not None:
            raise ValueError("a model is called by its name in `models`; give others in aliases")
        return self
