"""Reasoning in a model's output: the marks of each style, a parser, and the format of reasoned answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from common.notations.formats import const, either, marked, optional, regex, sequence
from common.notations.harmony import ANALYSIS, CHANNEL, END, MESSAGE, NEXT
from common.notations.pieces import Reasoning, TextPiece, overlap
from common.types import ReasoningStyle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.notations.formats import Format
    from common.notations.pieces import Piece


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around reasoning, and those around the answer after it."""

    opening: str
    closing: str
    answer: tuple[str, str] = ("", "")
    # Whether the marks are special tokens, which are otherwise left out of the text.
    are_special: bool = False


MARKS: Final[dict[ReasoningStyle, ReasoningMarks]] = {
    ReasoningStyle.RESPONSE: ReasoningMarks("<think>", "</think>", ("<response>", "</response>")),
    ReasoningStyle.THINK: ReasoningMarks("<think>", "</think>"),
    ReasoningStyle.BRACKETS: ReasoningMarks("[THINK]", "[/THINK]", are_special=True),
    ReasoningStyle.SEED: ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningStyle.KIMI: ReasoningMarks("◁think▷", "◁/think▷"),
    ReasoningStyle.GEMMA: ReasoningMarks("<|channel>thought", "<channel|>", are_special=True),
    ReasoningStyle.HARMONY: ReasoningMarks(ANALYSIS, END, are_special=True),
}


class ReasoningParser:
    """Parses one block at the beginning of an output; later blocks are left in the text.

    White space around the block belongs to neither part. Harmony's messages have a parser of their own.
    """

    def __init__(self, marks: ReasoningMarks, *, begins_inside: bool) -> None:
        """`begins_inside`: the prompt has opened the block."""
        self._opening, self._closing = marks.opening, marks.closing
        self._answer = _AnswerMarks(*marks.answer) if marks.answer[0] else None
        self._held = ""
        self._is_open = begins_inside
        # A model may repeat the opening mark that the prompt contains.
        self._may_open_again = begins_inside
        self._is_over = False
        self._is_at_edge = True

    @property
    def is_thinking(self) -> bool:
        """Whether the parser is inside the block."""
        return self._is_open

    def feed(self, text: str) -> Sequence[Piece]:
        """Return the pieces that are complete enough to be shown."""
        if self._is_over and not self._is_at_edge:
            return [TextPiece(self._shown(text))]
        self._held += text
        pieces: list[Piece] = []
        if not self._is_open and not self._is_over:
            self._look_for_opening()
        if self._is_open:
            self._take_reasoning(pieces)
        if self._is_over:
            self._held = self._held.lstrip() if self._is_at_edge else self._held
            self._is_at_edge = self._is_at_edge and not self._held
            pieces.append(TextPiece(self._shown(self._held)))
            self._held = ""
        return pieces

    def flush(self) -> Sequence[Piece]:
        held, self._held = self._held, ""
        if self._is_open:
            return [Reasoning(held.rstrip())]
        return [TextPiece(self._shown(held) + (self._answer.flush() if self._answer is not None else ""))]

    def _shown(self, text: str) -> str:
        return text if self._answer is None else self._answer.feed(text)

    def _look_for_opening(self) -> None:
        start = self._held.lstrip()
        if start.startswith(self._opening):
            self._held = start.removeprefix(self._opening)
            self._is_open = True
        elif not self._opening.startswith(start):
            # There is no block; leading white space belongs to the text.
            self._is_over, self._is_at_edge = True, False

    def _take_reasoning(self, pieces: list[Piece]) -> None:
        opening, closing = self._opening, self._closing
        if self._is_at_edge:
            self._held = self._held.lstrip()
            if self._may_open_again and len(self._held) < len(opening) and opening.startswith(self._held):
                return
            if self._may_open_again:
                self._held, self._may_open_again = self._held.removeprefix(opening).lstrip(), False
            self._is_at_edge = not self._held
        thought, mark, rest = self._held.partition(closing)
        if mark:
            pieces.append(Reasoning(thought.rstrip()))
            self._held, self._is_open, self._is_over, self._is_at_edge = rest, False, True, True
            return
        body = thought[: len(thought) - overlap(thought, closing)].rstrip()
        pieces.append(Reasoning(body))
        self._held = thought[len(body) :]


class _AnswerMarks:
    """Removes the marks around an answer: one at its beginning, and one at its end."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._closing = closing
        self._held = ""
        self._has_begun = False
        self._has_mark = False

    def feed(self, text: str) -> str:
        self._held += text
        if not self._has_begun:
            start = self._held.lstrip()
            if self._opening.startswith(start):
                if start == self._opening:
                    self._held, self._has_begun, self._has_mark = "", True, True
                return ""
            self._has_begun, self._has_mark = True, start.startswith(self._opening)
            if self._has_mark:
                self._held = start.removeprefix(self._opening)
        if not self._has_mark:
            shown, self._held = self._held, ""
            return shown
        # The mark and white space after it may be the end.
        end = self._held.rfind(self._closing)
        if end >= 0 and not self._held[end + len(self._closing) :].strip():
            cut = end
        else:
            cut = len(self._held) - overlap(self._held, self._closing)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self._has_mark and held.rstrip() == self._closing else held


def answered(style: ReasoningStyle | None, content: Format) -> Format:
    """Return the format of an answer that consists of `content`."""
    if style is ReasoningStyle.HARMONY:
        return sequence(*marked(f"{CHANNEL}final{MESSAGE}"), content)
    if style is not None and (answer := MARKS[style].answer)[0]:
        return either([sequence(*const(answer[0]), content, *const(answer[1])), content])
    return content


def reasoned(style: ReasoningStyle, answer: Format, *, is_open: bool, budget: int | None = None) -> Format:
    """Return the format of reasoning, then `answer`. With `is_open`, the prompt has opened the block.

    Otherwise reasoning is optional, but not with a `budget`, its maximum number of tokens: a model might open the block
    as a part of its answer.
    """
    marks = MARKS[style]
    if style is ReasoningStyle.HARMONY and budget == 0:
        return answer
    thought: Format = {"type": "any_text", "excludes": [marks.closing]}
    if budget is not None:
        thought["max_tokens"] = budget
    after = marked(NEXT) if style is ReasoningStyle.HARMONY else [regex(r"\n{0,2}")]
    block = sequence(*([] if is_open else marked(marks.opening)), thought, *marked(marks.closing), *after)
    return sequence(block if is_open or budget is not None else optional(block), answer)
