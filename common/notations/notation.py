"""A notation of tool calls: a parser, the text of given calls, and the formats of all outputs that it can read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from common.notations.formats import (
    ANY_TEXT,
    either,
    marked,
    optional,
    regex,
    sequence,
    star,
    text_with_calls,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from common.notations.arguments import Arguments
    from common.notations.formats import Format, Schema
    from common.notations.pieces import Parser
    from common.notations.schemas import Tools

# Stands for the number of a call in `CallNotation.after_name`.
NUMBER = "{number}"


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool with the JSON schema of its arguments, which describes an object."""

    name: str
    schema: Schema


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]  # Any: free JSON


class Notation(Protocol):
    """A notation of tool calls."""

    @property
    def has_special_marks(self) -> bool:
        """Whether its marks are special tokens of models, which are otherwise left out of the text."""

    @property
    def ids_name_calls(self) -> bool:
        """Whether the ids of calls are part of the notation: `functions.{name}:{number}`."""

    def parser(self, tools: Tools) -> Parser:
        """Return a parser for calls of `tools`; other calls are text."""

    def render(self, calls: Sequence[Call]) -> str:
        """Return the text of an output that makes `calls`, at least one."""

    def prefix(self, name: str | None) -> str:
        """Return the beginning of an output that calls `name` (None: any tool)."""

    def forced(self, tools: Sequence[BoundTool], *, named: bool, in_parallel: bool) -> Format:
        """Return the format of an output after `prefix`, which with `named` includes the tool's name."""

    def free(self, tools: Sequence[BoundTool], *, in_parallel: bool, content: Format | None) -> Format:
        """Return the format of an output with or without calls; the text must match `content`, if given."""

    def can_bind(self, schema: Schema) -> bool:
        """Whether the formats enforce all of `schema` on arguments."""


@dataclass(frozen=True, slots=True)
class CallNotation:
    """Implements `Notation` for calls that are written one after the other."""

    make_parser: Callable[[Tools], Parser]
    arguments: Arguments
    # The text before the name of the first call.
    start: str
    # The text between name and arguments.
    after_name: str
    # The text after the arguments.
    close: str
    # The text between `close` and the name of the next call.
    again: str
    # The text after the last call.
    end: str = ""
    # The part of `start` by which calls are recognised; empty: they are an output's beginning.
    mark: str = ""
    # Other marks that parsers look for.
    more_marks: tuple[str, ...] = ()
    # Calls cannot begin with other characters than these; only without a mark.
    first_characters: str = ""
    has_special_marks: bool = False
    ids_name_calls: bool = False
    # Names are written as in a JSON string.
    has_quoted_names: bool = False

    def parser(self, tools: Tools) -> Parser:
        return self.make_parser(tools)

    def render(self, calls: Sequence[Call]) -> str:
        texts = [
            f"{self._name(call.name)}{self.after_name.replace(NUMBER, str(number))}"
            f"{self.arguments.render(call.arguments)}{self.close}"
            for number, call in enumerate(calls)
        ]
        return self.start + self.again.join(texts) + self.end

    def prefix(self, name: str | None) -> str:
        return self.start + (self._name(name) + self.after_name.replace(NUMBER, "0") if name else "")

    def forced(self, tools: Sequence[BoundTool], *, named: bool, in_parallel: bool) -> Format:
        if named:
            return sequence(*self._arguments(tools[0]), *marked(self.end))
        return self._calls(tools, in_parallel=in_parallel)

    def free(self, tools: Sequence[BoundTool], *, in_parallel: bool, content: Format | None) -> Format:
        calls = self._calls(tools, in_parallel=in_parallel)
        if self.mark and content is None:
            # Without an end, each call is announced by a mark of its own, and text may stand between them.
            if not self.end:
                calls = self._calls(tools, in_parallel=False)
            rest = sequence(*marked(self.start.removeprefix(self.mark)), calls)
            return text_with_calls(self.mark, rest, excludes=self.more_marks, repeats=in_parallel and not self.end)
        other = content or optional(sequence(regex(f"[^\\s{self.first_characters}]"), ANY_TEXT))
        return either([sequence(*marked(self.start), calls), other])

    def can_bind(self, schema: Schema) -> bool:
        return self.arguments.can_bind(schema)

    def _calls(self, tools: Sequence[BoundTool], *, in_parallel: bool) -> Format:
        """Return the format of calls, from the name of the first one on."""
        call = either([sequence(*marked(self._name(tool.name)), *self._after_name(tool)) for tool in tools])
        more = [star(sequence(*marked(self.again), call))] if in_parallel else []
        return sequence(call, *more, *marked(self.end))

    def _after_name(self, tool: BoundTool) -> list[Format]:
        before, number, after = self.after_name.partition(NUMBER)
        return [*marked(before), *([regex("[0-9]{1,3}")] if number else []), *marked(after), *self._arguments(tool)]

    def _arguments(self, tool: BoundTool) -> list[Format]:
        return [self.arguments.format(tool.schema), *marked(self.close)]

    def _name(self, name: str) -> str:
        return json.dumps(name, ensure_ascii=False)[1:-1] if self.has_quoted_names else name
