"""Finds the notation of a model's tool calls and reasoning by rendering some, and reading them back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from common.errors import InvalidRequestError
from common.logs import get_logger
from common.notations.notation import Call
from common.notations.pieces import CallArguments, CallStart, TextPiece
from common.notations.reasoning import MARKS
from common.notations.registry import NOTATIONS
from common.requests import ChatMessage, ChatPrompt
from common.types import ReasoningStyle, ToolStyle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from common.notations.pieces import Piece
    from services.tokenizer.chat_template import ChatTemplates

_QUESTION: Final = ChatMessage("user", "Hello")
_ANSWER: Final = "probed-answer"
_THOUGHT: Final = "probed-thought"
_NAME: Final = "probed_tool"
_PARAMETERS: Final = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "description": "A word"},
        "count": {"type": "integer", "description": "A number"},
        "flag": {"type": "boolean", "description": "A flag"},
    },
    "required": ["word", "count", "flag"],
}
_TOOL: Final = json.dumps(
    {"type": "function", "function": {"name": _NAME, "description": "A tool", "parameters": _PARAMETERS}}
)
_CALLS: Final = (
    Call(_NAME, {"word": "pro bed", "count": 7, "flag": True}),
    Call(_NAME, {"word": "second", "count": 8, "flag": False}),
)
# Mistral's templates accept only ids of nine letters and digits; Kimi's have the name in the id.
_IDS: Final = (("callAAAA0", "callAAAA1"), (f"functions.{_NAME}:0", f"functions.{_NAME}:1"))
_REASON: Final = json.dumps({"enable_thinking": True, "thinking": True})
_DO_NOT_REASON: Final = json.dumps({"enable_thinking": False, "thinking": False})
# Marks of a notation that is not known would be left in the text: <…> or […] in one word.
_MARK: Final = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]")
# Ends of turns, which templates may choose by the kind of the turn.
_ENDS: Final = frozenset({
    "</s>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<eos>",
    # Where Gemma 4 waits for results.
    "<|tool_response>",
})  # fmt: skip
_HAS_TOOLS: Final = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """The notation of outputs for a template's prompts."""

    tools: ToolStyle | None = None
    reasoning: ReasoningStyle | None = None
    # The prompt ends inside the reasoning, so the output does not open it: by itself, if a request asks for reasoning,
    # and if it asks for none.
    begins_with_reasoning: bool = False
    begins_with_reasoning_on_request: bool = False
    begins_with_reasoning_although_off: bool = False
    reads_reasoning_effort: bool = False
    # Templates get the arguments of calls as JSON texts, because they cannot render objects.
    takes_arguments_as_text: bool = False
    # Templates render one call of a message: they refuse several, or leave all but the first one out.
    has_single_calls: bool = False
    # Templates read texts as lists of one part.
    takes_parts: bool = False
    # Why requests with tools are refused, although the template reads them.
    tools_problem: str | None = None


def style_of(sources: Mapping[str, str], templates: ChatTemplates, tools: str, reasoning: str) -> TemplateStyle:
    """Return the style of the templates `sources`; the settings `tools` and `reasoning` override it unless "auto"."""
    source = sources.get("tool_use") or sources.get("default", "")
    style = _reasoning_of(source, templates, reasoning)
    style = replace(style, reads_reasoning_effort="reasoning_effort" in source, takes_parts=_takes_parts(templates))
    if tools == "none" or (tools == "auto" and not _HAS_TOOLS.search(source)):
        return style
    wanted = list(ToolStyle) if tools == "auto" else [ToolStyle(tools)]
    found = [
        _Found(style_, as_text=as_text, distance=distance, count=count)
        for as_text in (False, True)
        for style_, distance, count in _readable(templates, wanted, as_text=as_text)
    ]
    best = min(found, key=lambda one: one.rank, default=None)
    if best is not None:
        return replace(style, tools=best.style, takes_arguments_as_text=best.as_text, has_single_calls=best.count == 1)
    if tools != "auto":
        # The operator knows better; such templates often do not show earlier calls at all.
        return replace(style, tools=ToolStyle(tools))
    return replace(style, tools_problem=_unreadable(templates))


def _takes_parts(templates: ChatTemplates) -> bool:
    """Whether texts are lost unless they are parts, as in templates that are made for images."""
    plain, in_parts = (_greeting(templates, takes_parts=takes_parts) for takes_parts in (False, True))
    return _ANSWER not in plain and _ANSWER in in_parts


def _greeting(templates: ChatTemplates, *, takes_parts: bool) -> str:
    chat = ChatPrompt((ChatMessage("user", _ANSWER),), add_generation_prompt=False)
    try:
        return templates.render(chat, takes_parts=takes_parts)
    except InvalidRequestError:
        return ""


def warn_of_problems(style: TemplateStyle, setting: str) -> None:
    """Log a warning if requests with tools will be refused."""
    if style.tools_problem is not None:
        get_logger("template").warning("tools.refused", reason=style.tools_problem, tool_style=setting)


@dataclass(frozen=True, slots=True)
class _Found:
    style: ToolStyle
    as_text: bool
    # See `_distance`.
    distance: int
    # Calls in one message that were read.
    count: int

    @property
    def rank(self) -> tuple[bool, int, int]:
        return self.as_text, self.distance, list(NOTATIONS).index(self.style)


def _readable(
    templates: ChatTemplates, styles: Sequence[ToolStyle], *, as_text: bool
) -> Iterator[tuple[ToolStyle, int, int]]:
    """Yield the notations that read the rendered calls, with their distance from the template's text.

    The last item is the number of calls in one message.
    """
    answer = _turn(templates, ChatMessage("assistant", _ANSWER)) or ""
    opened = _rendered(templates, (_QUESTION,), opens=True) or ""
    marks = _ENDS | _marks_in(answer) | _marks_in(opened[opened.rfind(_QUESTION.content or "") :])
    # Some templates allow one call per message.
    for count in (2, 1):
        calls = _CALLS[:count]
        outputs = [output for ids in _IDS for output in _outputs(templates, calls, ids, as_text=as_text)]
        found = [style for style in styles if any(_reads(style, output, calls, marks) for output in outputs)]
        for style in found:
            yield style, min(_distance(style, output, calls) for output in outputs), count
        if found:
            return


def _distance(style: ToolStyle, output: str, calls: Sequence[Call]) -> int:
    """Return 0 if the notation writes the calls as the template does, 1 if their beginning is the same, else 2."""
    if NOTATIONS[style].render(calls).strip() in output:
        return 0
    beginning = NOTATIONS[style].prefix(None) + _NAME
    return 1 if "".join(beginning.split()) in "".join(output.split()) else 2


def _outputs(templates: ChatTemplates, calls: Sequence[Call], ids: Sequence[str], *, as_text: bool) -> Iterator[str]:
    """Yield the text of a turn with calls: without the template's beginning of a turn, and with it."""
    entries = _entries(calls, ids, as_text=as_text)
    for content in ("", None):
        message = ChatMessage("assistant", content, tool_calls_json=json.dumps(entries))
        turn = _turn(templates, message, as_text=as_text)
        if turn is not None:
            for beginning in _beginnings(templates):
                if beginning and turn.startswith(beginning):
                    yield turn.removeprefix(beginning)
            yield turn
            return


def _entries(calls: Sequence[Call], ids: Sequence[str], *, as_text: bool) -> list[Any]:  # Any: free JSON
    """Return calls as messages have them."""
    return [
        {
            "id": id_,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments) if as_text else dict(call.arguments),
            },
        }
        for call, id_ in zip(calls, ids, strict=False)
    ]


def _turn(templates: ChatTemplates, message: ChatMessage, *, as_text: bool = False) -> str | None:
    """Return the text that `message` adds to a conversation; None if the template refuses it."""
    before = _rendered(templates, (_QUESTION,), opens=False)
    whole = _rendered(templates, (_QUESTION, message), opens=False, as_text=as_text)
    if whole is None:
        return None
    if before is None:
        # Some templates demand that an assistant's turn follows.
        before = _rendered(templates, (_QUESTION,), opens=True) or ""
    return whole[len(_common_beginning(before, whole)) :]


def _beginnings(templates: ChatTemplates) -> Iterator[str]:
    """Yield the texts that may begin an assistant's turn."""
    answer = _turn(templates, ChatMessage("assistant", _ANSWER))
    if answer is not None and _ANSWER in answer:
        yield answer.partition(_ANSWER)[0]
    closed = _rendered(templates, (_QUESTION,), opens=False)
    opened = _rendered(templates, (_QUESTION,), opens=True)
    if closed is not None and opened is not None and opened.startswith(closed):
        yield opened.removeprefix(closed)


def _rendered(
    templates: ChatTemplates,
    messages: tuple[ChatMessage, ...],
    *,
    opens: bool,
    as_text: bool = False,
    variables: str | None = None,
    has_tools: bool = True,
) -> str | None:
    chat = ChatPrompt(
        messages, (_TOOL,) if has_tools else (), add_generation_prompt=opens, template_variables_json=variables
    )
    try:
        return templates.render(chat, takes_arguments_as_text=as_text)
    except InvalidRequestError:
        return None


def _reads(style: ToolStyle, output: str, calls: Sequence[Call], marks: AbstractSet[str]) -> bool:
    """Whether the notation's parser finds exactly `calls` in `output`, and beside them no marks except `marks`."""
    parser = NOTATIONS[style].parser({_NAME: _PARAMETERS})
    pieces = [*parser.feed(output), *parser.flush()]
    beside = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    return _calls_in(pieces) == list(calls) and _marks_in(beside) <= marks


def _marks_in(text: str) -> frozenset[str]:
    return frozenset(_MARK.findall(text))


def _calls_in(pieces: Sequence[Piece]) -> list[Call]:
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    texts = [""] * len(names)
    for piece in pieces:
        if isinstance(piece, CallArguments):
            texts[piece.call] += piece.text
    try:
        return [Call(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]
    except ValueError:
        return []


def _unreadable(templates: ChatTemplates) -> str | None:
    """Return why the template's calls cannot be read; None if it shows neither tools nor calls."""
    shown = _rendered(templates, (_QUESTION,), opens=True)
    outputs = [output for ids in _IDS for output in _outputs(templates, _CALLS[:1], ids, as_text=False)]
    writes_calls = any(_NAME in output for output in outputs)
    if shown is not None and _NAME not in shown and not writes_calls:
        return None
    known = ", ".join(style.value for style in NOTATIONS)
    refusal = _refusal(templates)
    if refusal is not None:
        problem = f"a conversation with a tool call cannot be rendered ({refusal})"
    elif writes_calls:
        problem = "the chat template writes tool calls in a notation that is not known here"
    else:
        problem = "the chat template leaves earlier tool calls out, so that their notation is not found"
    return f"{problem}; set model.tool_style to the model's notation if it is one of {known}"


def _refusal(templates: ChatTemplates) -> str | None:
    """Return why the template renders no call, by the last error; None if it renders one."""
    refusal = None
    for ids, as_text in product(_IDS, (True, False)):
        message = ChatMessage("assistant", "", tool_calls_json=json.dumps(_entries(_CALLS[:1], ids, as_text=as_text)))
        chat = ChatPrompt((_QUESTION, message), (_TOOL,), add_generation_prompt=False)
        try:
            templates.render(chat, takes_arguments_as_text=as_text)
        except InvalidRequestError as error:
            refusal = str(error).rstrip(".")
        else:
            return None
    return refusal


def _reasoning_of(source: str, templates: ChatTemplates, setting: str) -> TemplateStyle:
    if setting == "none":
        return TemplateStyle()
    style = ReasoningStyle(setting) if setting != "auto" else _found_reasoning(source, templates)
    if style is None:
        return TemplateStyle()
    opening = MARKS[style].opening
    prompts = [_prompt(templates, variables) for variables in (None, _REASON, _DO_NOT_REASON)]
    begins, on_request, although_off = (prompt.rstrip().endswith(opening) for prompt in prompts)
    return TemplateStyle(None, style, begins, on_request, although_off)


def _found_reasoning(source: str, templates: ChatTemplates) -> ReasoningStyle | None:
    """Return the first style whose marks stand around rendered reasoning, or, if none is shown, in the template.

    Marks around answers count only where they are rendered: other templates have them around the results of tools.
    """
    answer = ChatMessage("assistant", _ANSWER, reasoning_content=_THOUGHT)
    turn = _rendered(templates, (_QUESTION, answer), opens=False, has_tools=False) or ""
    prompts = [_prompt(templates), _prompt(templates, _REASON)]
    possible = {
        style: marks for style, marks in MARKS.items() if any(marks.answer[0] in text for text in (turn, *prompts))
    }
    for style, marks in possible.items():
        around = rf"{re.escape(marks.opening)}\s*{_THOUGHT}\s*{re.escape(marks.closing)}"
        if re.search(around, turn):
            return style
    for style, marks in possible.items():
        if any(prompt.rstrip().endswith(marks.opening) for prompt in prompts):
            return style
    for style, marks in possible.items():
        if style is not ReasoningStyle.HARMONY and marks.closing in source:
            return style
    return ReasoningStyle.HARMONY if "<|channel|>analysis" in source else None


def _prompt(templates: ChatTemplates, variables: str | None = None) -> str:
    return _rendered(templates, (_QUESTION,), opens=True, variables=variables, has_tools=False) or ""


def _common_beginning(one: str, other: str) -> str:
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]
