"""Renders conversations with a model's chat templates, by the conventions of `transformers`.

Templates are code from a model's files: they run in jinja's immutable sandbox and have access to JSON values only.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from common.errors import ConfigurationError, InvalidRequestError
from common.requests import ChatMessage, ChatPrompt
from common.types import ToolStyle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from jinja2.parser import Parser

# A value decoded from JSON; templates read free-form schemas.
Json: TypeAlias = Any

RENDER_LIMIT_S: Final = 5.0
MAX_RENDERED_CHARACTERS: Final = 64 * 1024 * 1024
_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt"})
# Appended to a message that is to be continued, to find its end in the rendered text. If the trailing blank is missing
# there, the template trims messages.
_MARK: Final = "\ue000pando:continue\ue000 "
# Errors that a template may raise on input that its author did not expect.
_TEMPLATE_FAILURES: Final = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
# Conversations of which a usable template renders at least one; some require a system's message.
_GREETING: Final = "probed-greeting"
_GREETINGS: Final = (
    (ChatMessage("user", _GREETING),),
    (ChatMessage("system", "Be brief."), ChatMessage("user", _GREETING)),
)
# A message as templates read it.
JsonObject: TypeAlias = dict[str, Any]  # Any: free JSON

# Mistral's templates accept nine letters and digits; Kimi's write the id in place of the tool's name.
_ACCEPTED: Final = {
    ToolStyle.MISTRAL: re.compile(r"[A-Za-z0-9]{9}"),
    ToolStyle.MISTRAL_ARGS: re.compile(r"[A-Za-z0-9]{9}"),
    ToolStyle.KIMI_K2: re.compile(r"functions\.\S+:[0-9]+"),
}


class ChatTemplates:
    """The chat templates of one model, compiled on first use."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        limit_s: float = RENDER_LIMIT_S,
    ) -> None:
        """Prepare `sources` by name; a template with syntax errors fails when it is used.

        Rendering is aborted after `limit_s` seconds: some templates take quadratic time.
        """
        self._budget = RenderingBudget(limit_s, MAX_RENDERED_CHARACTERS)
        self._environment = _environment(now, self._budget)
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    def __bool__(self) -> bool:
        """Whether the model has any chat template."""
        return bool(self._sources)

    def render(
        self,
        chat: ChatPrompt,
        shield: Callable[[Json], Json] = lambda value: value,
        *,
        takes_arguments_as_text: bool = False,
        has_single_calls: bool = False,
        takes_parts: bool = False,
        tool_style: ToolStyle | None = None,
    ) -> str:
        """Return the prompt for `chat`; `shield` transforms the values that the template reads.

        The arguments of calls are objects, or with `takes_arguments_as_text` JSON; their ids are those of `tool_style`.
        With `has_single_calls`, the template reads one call of a message: each gets a message of its own. With
        `takes_parts`, it reads texts as lists of one part.

        Raises:
            InvalidRequestError: the template refuses the conversation, or cannot render it.
        """
        tools = shield([_parse_object(tool, "tools") for tool in chat.tools_json]) or None
        plain = [_plain_message(message, as_text=takes_arguments_as_text) for message in chat.messages]
        if has_single_calls:
            plain = with_single_calls(plain)
        if tool_style is ToolStyle.HARMONY:
            plain = [_with_one_text(message) for message in plain]
        messages = shield(with_accepted_ids(plain, tool_style))
        variables = shield(_parse_object(chat.template_variables_json or "{}", "chat_template_kwargs"))
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        if clashing := _RESERVED & variables.keys():
            raise InvalidRequestError(f"reserved: {', '.join(sorted(clashing))}", param="chat_template_kwargs")
        if chat.continue_final_message:
            _mark_final(messages, add_generation_prompt=chat.add_generation_prompt)
        final = messages[-1].get("content")
        if takes_parts:
            messages = [_with_parts(message) for message in messages]
        context = {"documents": None} | self._special_tokens | variables
        try:
            pieces = self._template(has_tools=tools is not None).generate(
                messages=messages, tools=tools, add_generation_prompt=chat.add_generation_prompt, **context
            )
            text = self._budget.collect(pieces)
        except _TEMPLATE_FAILURES as error:
            cause = "" if takes_arguments_as_text else _texts_as_arguments(plain)
            raise InvalidRequestError(f"the model's chat template refused: {error}{cause}", param="messages") from error
        if chat.continue_final_message:
            text = _cut_at_mark(text, final)
        return text + (chat.assistant_prefix or "")

    def check(self) -> None:
        """Compile the templates and render a greeting.

        Raises:
            ConfigurationError: a template has an error of syntax, refuses a greeting, or leaves its text out.
        """
        for source in self._sources.values():
            try:
                self._environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigurationError(f"model.chat_template: line {error.lineno}: {error.message}") from error
        problems = [self._problem_with(greeting) for greeting in _GREETINGS]
        if all(problems):
            raise ConfigurationError(f"model.chat_template cannot render a user's message: {problems[0]}")

    def _problem_with(self, greeting: tuple[ChatMessage, ...]) -> str | None:
        problem = "the message's text is left out"
        for takes_parts in (False, True):
            try:
                if _GREETING in self.render(ChatPrompt(greeting), takes_parts=takes_parts):
                    return None
            except InvalidRequestError as error:
                problem = str(error)
        return problem

    def _template(self, *, has_tools: bool) -> jinja2.Template:
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise InvalidRequestError("the model has no chat template; use completions instead", param="messages")
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._sources[name])
        return self._compiled[name]


def _environment(now: Callable[[], datetime], budget: RenderingBudget) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = BoundedEnvironment(
        budget, trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    # Functions instead of types, because fewer attributes can be reached from them.
    environment.globals["dict"] = lambda *pairs, **entries: dict(*pairs, **entries)
    del environment.globals["lipsum"]
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """Return the tag's body, with its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like the standard filter, but without escaping HTML, since models are trained on unescaped JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _plain_message(message: ChatMessage, *, as_text: bool) -> dict[str, Json]:
    """Return the message in the form that templates expect: no absent fields, arguments of calls as objects or text.

    Beside calls, an absent content is an empty one.
    """
    plain: dict[str, Json] = {"role": message.role}
    if message.reasoning_content is not None:
        # Some templates read it under its older name.
        plain["thinking"] = message.reasoning_content
    for key in ("content", "name", "tool_call_id", "reasoning_content"):
        value = getattr(message, key)
        if value is not None:
            plain[key] = value
    if message.parts:
        plain["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "video" if part.is_video else "image"}
            for part in message.parts
        ]
    if message.tool_calls_json is not None:
        calls = _parse(message.tool_calls_json, "messages")
        if not isinstance(calls, list):
            raise InvalidRequestError("tool_calls must be an array", param="messages")
        plain["tool_calls"] = calls if as_text else [_with_parsed_arguments(call) for call in calls]
        # Some templates, as Qwen3's, search the text beside calls without asking whether there is one.
        plain.setdefault("content", "")
    return plain


def _with_parts(message: dict[str, Json]) -> dict[str, Json]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_one_text(message: dict[str, Json]) -> dict[str, Json]:
    """Move the content of a message with calls to its reasoning: harmony's templates refuse both beside calls."""
    thought, content = message.get("thinking"), message.get("content")
    if not (thought and content and "tool_calls" in message and isinstance(content, str)):
        return message
    joined = f"{thought}\n\n{content}"
    others = {key: value for key, value in message.items() if key != "content"}
    return others | {"thinking": joined, "reasoning_content": joined}


def _with_parsed_arguments(call: Json) -> Json:
    """Decode arguments, which the API sends as JSON in a string; templates would escape that string again."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _texts_as_arguments(messages: Iterable[JsonObject]) -> str:
    """Name the first call whose arguments could not be decoded, which templates may not be able to write."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                return f"; the arguments of a call of {function.get('name')!r} are not a JSON object"
    return ""


def _parse_object(text: str, param: str) -> dict[str, Json]:
    value = _parse(text, param)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param}: a JSON object is expected", param=param)
    return value


def _parse(text: str, param: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from error


def _mark_final(messages: list[dict[str, Json]], *, add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message needs add_generation_prompt to be false", param="continue_final_message"
        )
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise InvalidRequestError("the final message has no content to continue", param="continue_final_message")
    messages[-1]["content"] = content + _MARK


def _cut_at_mark(text: str, marked_content: str) -> str:
    """Return `text` up to the end of the content that is to be continued."""
    content = marked_content.removesuffix(_MARK)
    end = text.rfind(_MARK.strip())
    if end < 0 or content.strip() not in text:
        raise InvalidRequestError(
            "the model's chat template leaves out the final message, so it cannot be continued",
            param="continue_final_message",
        )
    is_trimmed = not text.startswith(_MARK, end)
    text = text[:end].replace(_MARK, "").replace(_MARK.strip(), "")  # a template may show a message more than once
    return text.rstrip() if is_trimmed else text


def with_single_calls(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return `messages` with one call in each, followed by its result."""
    divided: list[JsonObject] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            divided.append(message)
            continue
        results = list(takewhile(lambda following: following["role"] == "tool", left))
        del left[: len(results)]
        for number, call in enumerate(calls):
            divided.append(
                (message if number == 0 else {"role": message["role"], "content": ""}) | {"tool_calls": [call]}
            )
            is_last = number == len(calls) - 1
            given = [each for each in results if is_last or each.get("tool_call_id") == _id_of(call)]
            results = [each for each in results if each not in given]
            divided += given
    return divided


def _id_of(call: object) -> object:
    return call.get("id") if isinstance(call, dict) else None


def with_accepted_ids(messages: Sequence[JsonObject], style: ToolStyle | None) -> list[JsonObject]:
    """Return `messages` with ids of calls, and of their results, that the templates of `style` accept."""
    accepted = _ACCEPTED.get(style) if style is not None else None
    if style is None or accepted is None:
        return list(messages)
    ids: dict[object, str] = {}
    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = message | {"tool_calls": [_with_id(call, style, accepted, ids) for call in calls]}
        if message.get("tool_call_id") in ids:
            message = message | {"tool_call_id": ids[message["tool_call_id"]]}
        changed.append(message)
    return changed


def _with_id(call: object, style: ToolStyle, accepted: re.Pattern[str], ids: dict[object, str]) -> object:
    if not isinstance(call, dict) or not isinstance(id_ := call.get("id"), str):
        return call
    if accepted.fullmatch(id_):
        ids[id_] = id_
        return call
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if style is ToolStyle.KIMI_K2:
        ids[id_] = f"functions.{name}:{len(ids)}"
    else:
        ids[id_] = hashlib.sha256(id_.encode()).hexdigest()[:9]
    return call | {"id": ids[id_]}


class RenderingBudget:
    """Time and characters of a rendering; each thread has one rendering at a time."""

    def __init__(self, limit_s: float, max_characters: int) -> None:
        """Allow `limit_s` seconds and `max_characters` per rendering."""
        self._limit_s = limit_s
        self._max_characters = max_characters
        self._local = threading.local()

    def collect(self, pieces: Iterable[str]) -> str:
        """Return the text that a template yields in `pieces`.

        Raises:
            InvalidRequestError: rendering takes too long, or the text becomes too long.
        """
        self._local.deadline = time.monotonic() + self._limit_s
        collected, size = [], 0
        for piece in pieces:
            self.check()
            size += len(piece)
            if size > self._max_characters:
                raise InvalidRequestError("the model's chat template makes too long a text of this", param="messages")
            collected.append(piece)
        return "".join(collected)

    def check(self) -> None:
        """Raise InvalidRequestError if this thread's rendering exceeds its time."""
        # There is no deadline during compilation, which looks up constants.
        if time.monotonic() > getattr(self._local, "deadline", float("inf")):
            message = f"the model's chat template takes longer than {self._limit_s:g} s for this conversation"
            raise InvalidRequestError(message, param="messages")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Checks a budget at every call and look-up, at least one of which occurs in every long loop."""

    def __init__(self, budget: RenderingBudget, **options: Any) -> None:  # Any: jinja's own options
        super().__init__(**options)
        self._budget = budget

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:  # Any: a template's values
        self._budget.check()
        return super().call(context, function, *arguments, **named)

    def getattr(self, value: Any, attribute: str) -> Any:  # Any: a template's values
        self._budget.check()
        return super().getattr(value, attribute)

    def getitem(self, value: Any, argument: Any) -> Any:  # Any: a template's values
        self._budget.check()
        return super().getitem(value, argument)
