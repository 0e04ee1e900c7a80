"""Log probabilities of a prompt's own tokens: the request for them, and the parts in which they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


# Log probabilities in one part; with all other fields, a part has some hundreds of kilobytes on the wire.
MAX_PART_VALUES = 16_384


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
