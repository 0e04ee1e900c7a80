"""The notations of tool calls that are known, by style."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from common.notations.arguments import GemmaArguments, JsonArguments, KeyedArguments, PythonArguments
from common.notations.gemma_calls import GemmaCallParser
from common.notations.harmony import HarmonyNotation
from common.notations.keyed_calls import KeyedCallParser, KeyedMarks
from common.notations.notation import NUMBER, CallNotation, Notation
from common.notations.object_calls import ObjectCallParser, ObjectMarks
from common.notations.python_calls import PythonCallParser
from common.types import ToolStyle

_JSON: Final = JsonArguments()
_NAME: Final = '{"name": "'

_HERMES: Final = CallNotation(
    partial(ObjectCallParser, ObjectMarks(("<tool_call>",), "</tool_call>")),
    _JSON,
    f"<tool_call>\n{_NAME}",
    '", "arguments": ',
    "}\n</tool_call>",
    f"\n<tool_call>\n{_NAME}",
    mark="<tool_call>",
    has_quoted_names=True,
)
_LLAMA3: Final = CallNotation(
    partial(ObjectCallParser, ObjectMarks(("<|python_tag|>",), separators=";,", may_be_bare=True)),
    _JSON,
    _NAME,
    '", "parameters": ',
    "}",
    f"; {_NAME}",
    first_characters="{",
    has_special_marks=True,
    has_quoted_names=True,
)
_PYTHONIC: Final = CallNotation(
    PythonCallParser,
    PythonArguments(),
    "[",
    "(",
    ")",
    ", ",
    "]",
    first_characters=r"\[<",
    has_special_marks=True,
)
_MISTRAL_MARKS: Final = ObjectMarks(
    ("[TOOL_CALLS]",),
    lead="[",
    separators=",",
    end="]",
    header=re.compile(r"(?P<name>[^\[\]{]+?)\s*(\[CALL_ID\]\s*(?P<id>\w+)\s*)?(\[ARGS\])?\s*"),
)
_MISTRAL: Final = CallNotation(
    partial(ObjectCallParser, _MISTRAL_MARKS),
    _JSON,
    f"[TOOL_CALLS] [{_NAME}",
    '", "arguments": ',
    "}",
    f", {_NAME}",
    "]",
    mark="[TOOL_CALLS]",
    has_special_marks=True,
    has_quoted_names=True,
)
_MISTRAL_ARGS: Final = CallNotation(
    partial(ObjectCallParser, _MISTRAL_MARKS),
    _JSON,
    "[TOOL_CALLS]",
    "[ARGS]",
    "",
    "[TOOL_CALLS]",
    mark="[TOOL_CALLS]",
    has_special_marks=True,
)
_GRANITE: Final = CallNotation(
    partial(ObjectCallParser, ObjectMarks(("<|tool_call|>", "<tool_call>"), lead="[", separators=",", end="]")),
    _JSON,
    f"<|tool_call|>[{_NAME}",
    '", "arguments": ',
    "}",
    f", {_NAME}",
    "]",
    mark="<|tool_call|>",
    more_marks=("<tool_call>",),
    has_special_marks=True,
    has_quoted_names=True,
)
_QWEN3_CODER: Final = CallNotation(
    partial(
        KeyedCallParser,
        KeyedMarks(
            section=("<tool_call>", "</tool_call>"),
            opening="<function=",
            after_name=re.compile(">"),
            before_key="<parameter=",
            after_key=re.compile(">"),
            after_value="</parameter>",
            closing="</function>",
            has_lines=True,
        ),
    ),
    KeyedArguments("<parameter=", ">\n", "\n</parameter>\n", "</parameter>", ">\n"),
    "<tool_call>\n<function=",
    ">\n",
    "</function>\n</tool_call>",
    "\n<tool_call>\n<function=",
    mark="<tool_call>",
    more_marks=("<function=",),
)
_SEED: Final = CallNotation(
    partial(
        KeyedCallParser,
        KeyedMarks(
            section=("<seed:tool_call>", "</seed:tool_call>"),
            opening="<function=",
            after_name=re.compile(">"),
            before_key="<parameter=",
            after_key=re.compile(">"),
            after_value="</parameter>",
            closing="</function>",
        ),
    ),
    KeyedArguments("<parameter=", ">", "</parameter>\n", "</parameter>", ">\n"),
    "<seed:tool_call>\n<function=",
    ">\n",
    "</function>\n</seed:tool_call>",
    "\n<seed:tool_call>\n<function=",
    mark="<seed:tool_call>",
    more_marks=("<function=",),
)
_GLM_MARKS: Final = KeyedMarks(
    section=("", ""),
    opening="<tool_call>",
    after_name=re.compile(r"\n|\s*(?=<arg_key>|</tool_call>)"),
    before_key="<arg_key>",
    after_key=re.compile(r"</arg_key>\s*<arg_value>"),
    after_value="</arg_value>",
    closing="</tool_call>",
)
_GLM: Final = CallNotation(
    partial(KeyedCallParser, _GLM_MARKS),
    KeyedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>", "<\n"),
    "<tool_call>",
    "\n",
    "</tool_call>",
    "\n<tool_call>",
    mark="<tool_call>",
)
_GLM47: Final = CallNotation(
    partial(KeyedCallParser, _GLM_MARKS),
    KeyedArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</arg_value>", "<\n"),
    "<tool_call>",
    "",
    "</tool_call>",
    "<tool_call>",
    mark="<tool_call>",
)
_MINIMAX: Final = CallNotation(
    partial(
        KeyedCallParser,
        KeyedMarks(
            section=("<minimax:tool_call>", "</minimax:tool_call>"),
            opening='<invoke name="',
            after_name=re.compile('">'),
            before_key='<parameter name="',
            after_key=re.compile('">'),
            after_value="</parameter>",
            closing="</invoke>",
        ),
    ),
    KeyedArguments('<parameter name="', '">', "</parameter>\n", "</parameter>", '">\n'),
    '<minimax:tool_call>\n<invoke name="',
    '">\n',
    "</invoke>\n",
    '<invoke name="',
    "</minimax:tool_call>",
    mark="<minimax:tool_call>",
    more_marks=('<invoke name="',),
)
_MINIMAX_M1: Final = CallNotation(
    partial(ObjectCallParser, ObjectMarks(("<tool_calls>",), "</tool_calls>", separators=",")),
    _JSON,
    f"<tool_calls>\n{_NAME}",
    '", "arguments": ',
    "}",
    f"\n{_NAME}",
    "\n</tool_calls>",
    mark="<tool_calls>",
    has_quoted_names=True,
)
_DEEPSEEK_SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V3: Final = CallNotation(
    partial(
        ObjectCallParser,
        ObjectMarks(
            ("<｜tool▁call▁begin｜>",),
            "```<｜tool▁call▁end｜>",
            section=_DEEPSEEK_SECTION,
            header=re.compile(r"\s*function<｜tool▁sep｜>(?P<name>[^\n{]+)\n```json\n\s*"),
        ),
    ),
    _JSON,
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "<｜tool▁calls▁end｜>",
    mark="<｜tool▁calls▁begin｜>",
    more_marks=("<｜tool▁call▁begin｜>",),
    has_special_marks=True,
)
_DEEPSEEK_V31: Final = CallNotation(
    partial(
        ObjectCallParser,
        ObjectMarks(
            ("<｜tool▁call▁begin｜>",),
            "<｜tool▁call▁end｜>",
            section=_DEEPSEEK_SECTION,
            header=re.compile(r"\s*(?P<name>[^\n{<]+)<｜tool▁sep｜>\s*"),
        ),
    ),
    _JSON,
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁calls▁end｜>",
    mark="<｜tool▁calls▁begin｜>",
    more_marks=("<｜tool▁call▁begin｜>",),
    has_special_marks=True,
)
_DEEPSEEK_V32: Final = CallNotation(
    partial(
        KeyedCallParser,
        KeyedMarks(
            section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            opening='<｜DSML｜invoke name="',
            after_name=re.compile('">'),
            before_key='<｜DSML｜parameter name="',
            after_key=re.compile('" string="(?P<is_text>true|false)">'),
            after_value="</｜DSML｜parameter>",
            closing="</｜DSML｜invoke>",
        ),
    ),
    KeyedArguments(
        '<｜DSML｜parameter name="',
        '" string="true">',
        "</｜DSML｜parameter>\n",
        "</｜DSML｜parameter>",
        '">\n',
        after_key_of_others='" string="false">',
    ),
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="',
    '">\n',
    "</｜DSML｜invoke>\n",
    '<｜DSML｜invoke name="',
    "</｜DSML｜function_calls>",
    mark="<｜DSML｜function_calls>",
    more_marks=('<｜DSML｜invoke name="',),
    has_special_marks=True,
)
_KIMI_K2: Final = CallNotation(
    partial(
        ObjectCallParser,
        ObjectMarks(
            ("<|tool_call_begin|>",),
            "<|tool_call_end|>",
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            header=re.compile(
                r"\s*(?P<id>(functions\.)?(?P<name>[^\s{<]+?):[0-9]+)\s*<\|tool_call_argument_begin\|>\s*"
            ),
        ),
    ),
    _JSON,
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    f":{NUMBER}<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_begin|>functions.",
    "<|tool_calls_section_end|>",
    mark="<|tool_calls_section_begin|>",
    more_marks=("<|tool_call_begin|>",),
    has_special_marks=True,
    ids_name_calls=True,
)
_GEMMA: Final = CallNotation(
    partial(GemmaCallParser, ("<|tool_call>", "<tool_call|>", '<|"|>')),
    GemmaArguments('<|"|>'),
    "<|tool_call>call:",
    "",
    "<tool_call|>",
    "<|tool_call>call:",
    mark="<|tool_call>",
    has_special_marks=True,
)

# Where several can read a template's calls, the first one whose own text is the template's is taken, or the first one.
NOTATIONS: Final[dict[ToolStyle, Notation]] = {
    ToolStyle.HERMES: _HERMES,
    ToolStyle.QWEN3_CODER: _QWEN3_CODER,
    ToolStyle.SEED: _SEED,
    ToolStyle.GLM: _GLM,
    ToolStyle.GLM47: _GLM47,
    ToolStyle.DEEPSEEK_V3: _DEEPSEEK_V3,
    ToolStyle.DEEPSEEK_V31: _DEEPSEEK_V31,
    ToolStyle.DEEPSEEK_V32: _DEEPSEEK_V32,
    ToolStyle.KIMI_K2: _KIMI_K2,
    ToolStyle.MINIMAX: _MINIMAX,
    ToolStyle.MINIMAX_M1: _MINIMAX_M1,
    ToolStyle.HARMONY: HarmonyNotation(),
    ToolStyle.GRANITE: _GRANITE,
    ToolStyle.GEMMA: _GEMMA,
    ToolStyle.MISTRAL: _MISTRAL,
    ToolStyle.MISTRAL_ARGS: _MISTRAL_ARGS,
    ToolStyle.LLAMA3: _LLAMA3,
    ToolStyle.PYTHONIC: _PYTHONIC,
}
