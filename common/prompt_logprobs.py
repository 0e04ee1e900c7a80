"""Log probabilities of a prompt's own tokens: the request for them, and the parts in which they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from common.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

# Log probabilities in one part; with all other fields, a part has some hundreds of kilobytes on the wire.
MAX_PART_VALUES = 16_384
# Per prompt; the gateway renders this many as JSON in about a tenth of a second.
MAX_PROMPT_LOGPROBS: Final = 131_072


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A request for log probabilities of the tokens after position `start`, each with the `top` most likely ids.

    For each token, the log probabilities of `token_ids` are reported too. Positions from `start` on are computed even
    if their KV is cached.
    """

    start: int = 0
    top: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def values_per_token(self) -> int:
        """Number of log probabilities that are reported for each token."""
        return 1 + self.top + len(self.token_ids)

    def reported(self, prompt_tokens: int) -> int:
        """Return the number of tokens of a prompt for which log probabilities are reported."""
        return max(prompt_tokens - 1 - self.start, 0)


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobSpan:
    """Log probabilities of the prompt's tokens [first, first + tokens), natural logarithms at temperature 1.

    `token_ids` [tokens] int32 are the tokens, `logprobs` [tokens] float32 their log probabilities, `ranks` [tokens]
    int32 their ranks among all ids, from 1; `top_ids` [tokens, top] int32 and `top_logprobs` [tokens, top] float32 are
    the most likely ids, best first; `asked` [tokens, asked] float32 are those of the ids that the request named.
    """

    first: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    asked: NDArray[np.float32]

    @property
    def tokens(self) -> int:
        """Number of tokens in the span."""
        return self.logprobs.size

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first + self.tokens

    @property
    def values(self) -> int:
        """Number of log probabilities in the span."""
        return self.logprobs.size + self.top_logprobs.size + self.asked.size

    def parts(self, max_values: int = MAX_PART_VALUES) -> Iterator[PromptLogprobSpan]:
        """Yield the span in parts of at most `max_values` log probabilities, but at least one token each."""
        width = 1 + self.top_logprobs.shape[1] + self.asked.shape[1]
        size = max(max_values // width, 1)
        for start in range(0, self.tokens, size):
            yield self.slice(start, min(start + size, self.tokens))

    def slice(self, start: int, stop: int) -> PromptLogprobSpan:
        """Return the part with tokens [start, stop), counted from the first token of this span."""
        return PromptLogprobSpan(
            self.first + start,
            self.token_ids[start:stop],
            self.logprobs[start:stop],
            self.ranks[start:stop],
            self.top_ids[start:stop],
            self.top_logprobs[start:stop],
            self.asked[start:stop],
        )


def no_span(first: int, top: int = 0, asked: int = 0) -> PromptLogprobSpan:
    """Return a span without tokens at position `first`."""
    ids, values = np.empty(0, np.int32), np.empty(0, np.float32)
    return PromptLogprobSpan(
        first, ids, values, ids, ids.reshape(0, top), values.reshape(0, top), values.reshape(0, asked)
    )


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
