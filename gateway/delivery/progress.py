"""How far a reader of an answer has come, so that it goes on from there where the answer begins again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.generation.journal import ChoiceUpdate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import PromptLogprobsText

# An update's fields after its log probabilities, if they say nothing.
PLAIN = ChoiceUpdate(0, "")[4:]


@dataclass(slots=True)
class _Place:
    """A place in the output of one choice."""

    tokens: int = 0
    characters: int = 0
    # Of the prompt's log probabilities.
    prompt_entries: int = 0
    has_usage: bool = False
    has_prompt_ids: bool = False
    has_ended: bool = False

    def pass_over(self, update: ChoiceUpdate) -> None:
        """Move to the end of an update."""
        self.tokens += len(update.token_ids)
        self.characters += len(update.text)
        if update[4:] == PLAIN:
            return
        if update.prompt_logprobs is not None:
            self.prompt_entries = update.prompt_logprobs.first - 1 + len(update.prompt_logprobs.entries)
        self.has_usage = self.has_usage or update.prompt_usage is not None
        self.has_prompt_ids = self.has_prompt_ids or bool(update.prompt_ids)
        self.has_ended = self.has_ended or update.finish is not None


class Progress:
    """The part of each choice that a reader has returned, in tokens and characters.

    An answer may begin again in other portions: a record that another gateway has continued, or a generation that
    continues a record which lacks the newest tokens. The same tokens come again, as requests have seeds.
    """

    def __init__(self) -> None:
        self._returned: defaultdict[int, _Place] = defaultdict(_Place)
        # Where the answer that is being read has come; None: it has not begun again.
        self._read: defaultdict[int, _Place] | None = None
        # Updates that have been returned, and how many there are up to there where the answer has begun again.
        self._count = self._count_again = 0
        # Whether the former stand in the answer as they were returned.
        self._keeps_portions = True

    @property
    def keeps_portions(self) -> bool:
        """Whether the answer that is being read, so far, has as many updates as were returned, in the same order."""
        return self._keeps_portions and (self._read is None or self._count == self._count_again)

    def rewind(self) -> None:
        """Expect the whole answer from its beginning."""
        self._read = defaultdict(_Place)
        self._count_again = 0

    def news(self, updates: Sequence[ChoiceUpdate]) -> Sequence[ChoiceUpdate]:
        """Return the next updates, without what has been returned before."""
        if self._read is None:
            for update in updates:
                self._returned[update.index].pass_over(update)
            self._count += len(updates)
            return updates
        new = []
        for update in updates:
            read, returned = self._read[update.index], self._returned[update.index]
            rest = _rest(update, read, returned)
            read.pass_over(update)
            if rest is not None:
                is_whole = len(rest.token_ids) == len(update.token_ids) and len(rest.text) == len(update.text)
                self._keeps_portions &= is_whole and self._count == self._count_again
                self._count += 1
                returned.pass_over(rest)
                new.append(rest)
            self._count_again += 1
        return new


def _rest(update: ChoiceUpdate, read: _Place, returned: _Place) -> ChoiceUpdate | None:
    """Return the part of an update that begins at `read` which comes after `returned`; None: there is none."""
    if returned.has_ended:
        return None
    tokens = update.token_ids[max(returned.tokens - read.tokens, 0) :]
    rest = update._replace(
        text=update.text[max(returned.characters - read.characters, 0) :],
        token_ids=tokens,
        logprobs=update.logprobs[max(returned.tokens - read.tokens, 0) :],
        prompt_usage=None if returned.has_usage else update.prompt_usage,
        prompt_logprobs=_rest_of_prompt(update.prompt_logprobs, returned.prompt_entries),
        prompt_ids=() if returned.has_prompt_ids else update.prompt_ids,
        forced_tokens=min(update.forced_tokens, len(tokens)),
        drafted_tokens=min(update.drafted_tokens, len(tokens)),
    )
    says = rest.text, rest.token_ids, rest.finish, rest.prompt_usage, rest.prompt_logprobs, rest.prompt_ids
    return rest if any(says) else None


def _rest_of_prompt(part: PromptLogprobsText | None, returned: int) -> PromptLogprobsText | None:
    if part is None or returned < part.first:
        return part
    entries = part.entries[returned - part.first + 1 :]
    return part._replace(first=returned + 1, entries=entries, lead=None) if entries else None
