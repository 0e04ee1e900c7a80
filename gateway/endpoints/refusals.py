"""Fields that would change the output and are not supported: refused by name instead of silently ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that is accepted only with values that have no effect."""

    field: str
    is_harmless: Callable[[object], bool]
    supported: str


def check(body: Mapping[str, object], refusals: Iterable[Refusal]) -> None:
    """Raise InvalidRequestError for the first field with an unsupported value."""
    for refusal in refusals:
        value = body.get(refusal.field)
        if value is not None and not refusal.is_harmless(value):
            message = f"'{refusal.field}' is not supported by this server with this value; {refusal.supported}."
            raise InvalidRequestError(message, param=refusal.field)


def _never(_value: object) -> bool:
    return False


def _is_empty(value: object) -> bool:
    return value in (False, "", 0) or value == [] or value == {}


def _is_optional_choice(value: object) -> bool:
    return value in ("none", "auto")


def _is_text_modality(value: object) -> bool:
    return value in ([], ["text"])


LEAVE_OUT = "leave it out"
# Additional data that SGLang and vLLM can return.
RETURNED = (
    "return_cached_tokens_details",
    "return_meta_info",
    "return_prompt_text",
    "return_prompt_token_ids",
    "return_routed_experts",
    "return_token_ids",
    "return_tokens_as_token_ids",
)
NATIVE_RETURNED = (
    "return_entropy",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "return_indexer_topk",
    "return_prompt_token_ids",
    "return_routed_experts",
    "return_sampling_mask",
)

COMMON = (
    Refusal("use_beam_search", _is_empty, LEAVE_OUT),
    Refusal("logits_processors", _is_empty, LEAVE_OUT),
    Refusal("lora_path", _is_empty, LEAVE_OUT),
    Refusal("session_params", _is_empty, "use 'session_id', or /generate"),
    Refusal("return_hidden_states", _is_empty, LEAVE_OUT),
    Refusal("custom_logit_processor", _is_empty, LEAVE_OUT),
    Refusal("moderation", _never, LEAVE_OUT),
    Refusal("custom_params", _is_empty, LEAVE_OUT),
    Refusal("vllm_xargs", _is_empty, LEAVE_OUT),
    Refusal("logprob_token_ids", _is_empty, "use 'token_ids_logprob' of /generate"),
    Refusal("repetition_detection", _is_empty, LEAVE_OUT),
    Refusal("thinking_token_budget", lambda value: value == -1, LEAVE_OUT),
    Refusal("truncation_side", lambda value: value == "left", '"left" is'),
    Refusal("watermarking", _is_empty, LEAVE_OUT),
    *(Refusal(name, _is_empty, LEAVE_OUT) for name in RETURNED),
)

CHAT = (
    *COMMON,
    Refusal("functions", _is_empty, "use 'tools'"),
    Refusal("function_call", _is_optional_choice, "use 'tools'"),
    Refusal("modalities", _is_text_modality, 'only ["text"] is'),
    Refusal("audio", _never, LEAVE_OUT),
    Refusal("add_special_tokens", lambda value: value is False, "the chat template brings them"),
    Refusal("web_search_options", _never, LEAVE_OUT),
    Refusal("chat_template", _never, "the model's own template is used"),
    Refusal("echo", _is_empty, LEAVE_OUT),
    Refusal("best_of", lambda value: value == 1, "use 'n'"),
    Refusal("input_ids", _is_empty, "use /v1/completions or /generate"),
    Refusal("documents", _is_empty, "use 'chat_template_kwargs'"),
    Refusal("reasoning", _is_empty, "use 'reasoning_effort'"),
    Refusal("include_reasoning", lambda value: value is True, LEAVE_OUT),
    Refusal("stream_reasoning", lambda value: value is True, LEAVE_OUT),
    Refusal("verbosity", lambda value: value == "medium", 'only "medium" is'),
)

RESPONSES = (
    Refusal("background", _is_empty, LEAVE_OUT),
    Refusal("moderation", _never, LEAVE_OUT),
    Refusal("image", _never, LEAVE_OUT),
    Refusal("conversation", _never, "use 'previous_response_id'"),
    Refusal("prompt", _never, "use 'instructions' and 'input'"),
    Refusal("max_tool_calls", _never, LEAVE_OUT),
    Refusal("truncation", lambda value: value == "disabled", '"disabled" is'),
    Refusal("context_management", _is_empty, LEAVE_OUT),
)

MESSAGES = (
    Refusal(
        "thinking", lambda value: isinstance(value, dict) and value.get("type") in ("disabled", "adaptive"), LEAVE_OUT
    ),
    Refusal("output_config", _is_empty, LEAVE_OUT),
    Refusal("output_format", _is_empty, LEAVE_OUT),
    Refusal("mcp_servers", _is_empty, LEAVE_OUT),
    Refusal("container", _is_empty, LEAVE_OUT),
)

NATIVE = (
    Refusal("input_embeds", _is_empty, "use 'text' or 'input_ids'"),
    Refusal("image_data", _is_empty, LEAVE_OUT),
    Refusal("audio_data", _is_empty, LEAVE_OUT),
    Refusal("video_data", _is_empty, LEAVE_OUT),
    Refusal("lora_path", _is_empty, LEAVE_OUT),
    Refusal("custom_logit_processor", _is_empty, LEAVE_OUT),
    Refusal("return_hidden_states", _is_empty, LEAVE_OUT),
    Refusal("positional_embed_overrides", _is_empty, LEAVE_OUT),
    Refusal("max_thinking_tokens", _is_empty, LEAVE_OUT),
    Refusal("multi_item_delimiter_indices", _is_empty, LEAVE_OUT),
    *(Refusal(name, _is_empty, LEAVE_OUT) for name in NATIVE_RETURNED),
)

NATIVE_SAMPLING = tuple(Refusal(name, _is_empty, LEAVE_OUT) for name in ("custom_params", "beam_width"))

COMPLETIONS = (
    *COMMON,
    Refusal("suffix", _is_empty, LEAVE_OUT),
    Refusal("prompt_embeds", _is_empty, LEAVE_OUT),
)

SCORE = (
    Refusal("truncate_prompt_tokens", _never, "shorten the texts"),
    Refusal(
        "add_special_tokens", lambda value: value is True, "special tokens are added as the model's tokenizer does"
    ),
    Refusal("mm_processor_kwargs", _is_empty, LEAVE_OUT),
    Refusal("activation", _never, LEAVE_OUT),
)

RERANK = (
    *SCORE,
    Refusal("max_tokens_per_doc", _never, "shorten the documents"),
    Refusal("max_chunks_per_doc", _never, "shorten the documents"),
    Refusal("rank_fields", _is_empty, "only 'text' is ranked"),
)

EMBEDDINGS = (
    *SCORE,
    Refusal("messages", _is_empty, "use 'input'"),
    Refusal("normalize", lambda value: value is True, "embeddings have length 1"),
    Refusal("embed_dtype", lambda value: value == "float32", '"float32" is'),
    Refusal("endianness", lambda value: value in ("native", "little"), '"little" is'),
)
