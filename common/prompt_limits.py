"""The bound on log probabilities of a prompt's tokens, which tokenizer and scheduler check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from common.errors import InvalidRequestError

if TYPE_CHECKING:
    from common.prompt_logprobs import PromptLogprobs

# Per prompt; the gateway renders this many as JSON in about a tenth of a second.
MAX_PROMPT_LOGPROBS: Final = 131_072


def check_prompt_logprobs(wanted: PromptLogprobs, prompt_tokens: int) -> None:
    """Check a request for log probabilities of a prompt of `prompt_tokens` tokens, earlier turns included.

    Raises:
        InvalidRequestError: `start` lies after the prompt, or there would be more than `MAX_PROMPT_LOGPROBS`.
    """
    if wanted.start > prompt_tokens:
        message = f"log probabilities from token {wanted.start} on, of a prompt of {prompt_tokens} tokens"
        raise InvalidRequestError(message, param="logprob_start_len")
    values = wanted.reported(prompt_tokens) * wanted.values_per_token
    if values > MAX_PROMPT_LOGPROBS:
        message = (
            f"the prompt has {prompt_tokens} tokens, of which {values} log probabilities are requested; at most "
            f"{MAX_PROMPT_LOGPROBS} are possible: request fewer per token, or start at a later token"
        )
        raise InvalidRequestError(message, param="prompt_logprobs")
