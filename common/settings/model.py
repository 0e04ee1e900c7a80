"""The model section of the configuration, and the section of each of several models."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from common.models.references import default_name
from common.section import Section


class ModelSettings(Section):
    """The model to serve."""

    reference: str = "smollm2-135m-instruct"
    """Name of a bundled model, path of a directory with config.json, path of a GGUF file, or a model on the Hugging
    Face hub: `org/repository`, with a revision `org/repository@v1.0`, or one of its GGUF files by quantization
    `org/repository:Q4_K_M`; or an address in a store, `s3://bucket/prefix` or `gs://bucket/prefix`. A path that exists
    takes precedence over the hub; paths must be valid on every host. Downloads go to the hub's cache; HF_TOKEN,
    HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE have their usual meaning."""
    served_name: str | None = None
    """Name by which clients request the model; by default the repository's name on the hub, or the last part of a
    path."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy", "fake"] = "auto"
    """`dummy`: random weights in the shapes of config.json. `fake`: no model at all, for tests of the protocol."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Element type of the weights; auto: that of the checkpoint, except on CPUs: bfloat16 if the processor can
    multiply it; otherwise float32 if the checkpoint is quantised. CPUs that cannot multiply a type widen it to float32
    in each product, which is exact."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3"] = "auto"
    """Element type of the KV pool; auto: that of the activations, except on CPUs with AMX: bfloat16 beside such
    weights, as its tiles multiply it. fp8, the same as fp8_e4m3, takes half of bfloat16's memory, so that twice as many
    tokens fit. Keys and values have a scale for each KV head: the checkpoint's, or else measured on fixed tokens when
    the model is loaded. GPUs need compute capability 8.9 or later."""
    quantization: Literal["auto", "fp8"] = "auto"
    """Quantization of the layers' matrices; auto: that of the checkpoint. fp8: weights are quantised when they are
    loaded, with one scale per output channel, and activations before each product, with one scale per token; for GPUs
    that multiply FP8 (compute capability 8.9 and later). Embedding, head and norms are not quantised."""
    deterministic: bool = False
    """Whether answers must not depend, to the last bit, on which requests run beside theirs, cache hits, the division
    of prompts into chunks, or drafts. Refused where that cannot be had; see
    docs/determinism.md."""
    tool_style: Literal[
        "auto", "none", "hermes", "llama3", "pythonic", "mistral", "mistral_args", "qwen3_coder", "glm", "glm47",
        "deepseek_v3", "deepseek_v31", "deepseek_v32", "kimi_k2", "minimax", "minimax_m1", "harmony", "granite",
        "gemma", "seed",
    ] = "auto"  # fmt: skip
    """Notation of the model's tool calls; auto: found by rendering a call with its chat template and reading it back.
    If no notation can read it, a warning is logged at the start, and requests with tools are refused."""
    reasoning_style: Literal["auto", "none", "think", "brackets", "response", "seed", "kimi", "gemma", "harmony"] = (
        "auto"
    )
    """How the model marks its reasoning: think: <think> blocks; brackets: [THINK] (Mistral); response: <think>, then
    <response> (Granite); seed: <seed:think>; kimi: ◁think▷; gemma: the channel thought; harmony: the channel analysis
    (gpt-oss); auto: as in the chat template."""
    chat_template: str = ""
    """Chat template in place of the model's own: the path of a file with Jinja, or the text itself, which contains
    {{ or {%. It writes conversations as templates on the Hugging Face hub do, and the notation of tool calls and
    reasoning is found from it. Empty: the model's own."""
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """Hidden states that become embeddings, unless a request chooses: the last token's, the mean over all tokens, or
    the first token's (encoders only). auto: by the model's files; without an entry there, mean for encoders and last
    for other models."""
    classifier_from_token: tuple[str, ...] = ()
    """Makes a reranker of a model that generates: two tokens such as `["no", "yes"]`; the score of a pair is the
    probability of the second one against the first (Qwen3-Reranker). Empty: as in config.json."""
    pair_style: Literal["auto", "tokenizer", "qwen3_reranker"] = "auto"
    """Notation of the pairs of texts that a classifier scores. tokenizer: as the tokenizer joins two texts.
    qwen3_reranker: the prompt of Qwen3-Reranker, with an instruction. auto: qwen3_reranker for decoders of Qwen3 with
    one label and for classifier_from_token, otherwise tokenizer."""
    images: Literal["auto", "on", "off"] = "auto"
    """Whether a model with an encoder of images is served with it. auto: if the encoder and its processor are
    supported; on: anything that prevents it is an error; off: texts only, which leaves the encoder's memory to the KV
    pool."""
    # Any: as config.json has them; checked where the model is read.
    rope_parameters: dict[str, Any] = Field(default_factory=dict)
    """Stretches the rotary embedding of a model for longer contexts, as in config.json: `{"rope_type": "yarn",
    "factor": 4, "original_max_position_embeddings": 32768}`, or llama3, or linear. The context length is the original
    one times the factor. Not for GGUF files, and models that run through transformers."""
    max_context: int = Field(default=0, ge=0)
    """Most tokens of prompt and output together; 0: the model's own limit."""

    @property
    def name(self) -> str:
        """The model name that clients use."""
        return self.served_name or default_name(self.reference)


class ServedModelSettings(ModelSettings):
    """One of several models: its settings that differ from the sections that all models share."""

    aliases: tuple[str, ...] = ()
    """Other names by which clients may request the model."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel worker processes."""
    # Any: each section validates its values after they are merged into the shared ones.
    tokenizer: dict[str, Any] = Field(default_factory=dict)
    """Settings of this model's tokenizer that differ from the section `tokenizer`."""
    scheduler: dict[str, Any] = Field(default_factory=dict)
    """Settings of its scheduler that differ from the section `scheduler`."""
    worker: dict[str, Any] = Field(default_factory=dict)
    """Settings of its workers that differ from the section `worker`."""
    detokenizer: dict[str, Any] = Field(default_factory=dict)
    """Settings of its detokenizer that differ from the section `detokenizer`."""

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_reference(cls, value: object) -> object:
        return {"reference": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_called_by_its_key(self) -> Self:
        if self.served_name is not None:
            raise ValueError("a model is served by its name in `models`; list other names in aliases")
        return self
