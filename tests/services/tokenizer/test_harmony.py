"""gpt-oss: from a request to the prompt, and from the output to reasoning, text and calls.

The template has the structure of the published one, with its refusals; it does not describe tools as fully.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.requests import ChatMessage, ChatPrompt
from common.types import ReasoningStyle, ToolStyle
from gateway.parsing import ParsingRules
from services.tokenizer.chat_template import ChatTemplates
from services.tokenizer.template_style import style_of

SOURCE = """
{%- macro system() -%}
{{- 'You are ChatGPT.\n' }}
{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}
{{- 'Reasoning: ' + reasoning_effort + '\n\n# Valid channels: analysis, commentary, final.' }}
{%- if tools %}{{ "\nCalls to these tools must go to the commentary channel: 'functions'." }}{% endif %}
{%- endmacro -%}
{{- '<|start|>system<|message|>' + system() + '<|end|>' }}
{%- if messages[0].role in ('developer', 'system') %}
{%- set instructions, turns = messages[0].content, messages[1:] %}
{%- else %}
{%- set instructions, turns = '', messages %}
{%- endif %}
{%- if instructions or tools %}
{{- '<|start|>developer<|message|>' }}
{%- if instructions %}{{ '# Instructions\n\n' + instructions }}{% endif %}
{%- for tool in tools or [] %}
{{- '\n\n// ' + tool.function.description + '\ntype ' + tool.function.name + ' = (_: {' }}
{%- for name, value in tool.function.parameters.properties.items() %}{{ name + ': ' + value.type + ',' }}{% endfor %}
{{- '}) => any;' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
{%- if message.role == 'assistant' %}
{%- for field in ('content', 'thinking') if field in message %}
{%- if '<|channel|>analysis<|message|>' in message[field] %}{{ raise_exception('channel in ' + field) }}{% endif %}
{%- endfor %}
{%- if 'tool_calls' in message %}
{%- set call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}
{%- elif message.content or message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- set last.name = call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if 'thinking' in message %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- set last.name = none %}
{%- endif %}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- else %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}}
TOOL = json.dumps(
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}
)
CALLS = json.dumps(
    [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}]
)


@pytest.fixture
def templates() -> ChatTemplates:
    return ChatTemplates({"default": SOURCE}, {})


def rendered(templates: ChatTemplates, *messages: ChatMessage, **variables: Any) -> str:
    chat = ChatPrompt(messages, (TOOL,), add_generation_prompt=True, template_variables_json=json.dumps(variables))
    return templates.render(chat, tool_style=ToolStyle.HARMONY)


def test_the_notation_of_calls_and_reasoning_is_harmony(templates: ChatTemplates) -> None:
    found = style_of({"default": SOURCE}, templates, "auto", "auto")
    assert (found.tools, found.reasoning) == (ToolStyle.HARMONY, ReasoningStyle.HARMONY)
    assert (found.takes_arguments_as_text, found.tools_problem, found.begins_with_reasoning) == (False, None, False)
    assert found.reads_reasoning_effort


def test_the_effort_is_in_the_prompt(templates: ChatTemplates) -> None:
    hello = ChatMessage("user", "Hi")
    assert "Reasoning: medium" in rendered(templates, hello)
    assert "Reasoning: high" in rendered(templates, hello, reasoning_effort="high")
    assert rendered(templates, hello).endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")


@pytest.mark.parametrize(
    ("content", "reasoning", "thought"),
    [(None, None, None), ("", "Hm", "Hm"), ("I look.", None, "I look."), ("I look.", "Hm", "Hm\n\nI look.")],
)
def test_earlier_calls_keep_their_reasoning_and_results(
    templates: ChatTemplates, content: str | None, reasoning: str | None, thought: str | None
) -> None:
    call = ChatMessage("assistant", content, tool_calls_json=CALLS, reasoning_content=reasoning)
    prompt = rendered(templates, ChatMessage("user", "Hi"), call, ChatMessage("tool", "12 C", tool_call_id="c1"))
    analysis = f"<|start|>assistant<|channel|>analysis<|message|>{thought}<|end|>" if thought else ""
    assert prompt.endswith(
        f"<|message|>Hi<|end|>{analysis}"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Ulm"}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"12 C"'
        "<|end|><|start|>assistant"
    )


def test_several_calls_of_a_message_are_rendered_one_after_the_other_with_their_results(
    templates: ChatTemplates,
) -> None:
    style = style_of({"default": SOURCE}, templates, "auto", "auto")
    assert style.has_single_calls
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps({"city": city})}}
        for i, (name, city) in enumerate([("get_weather", "Ulm"), ("get_time", "Bonn"), ("get_weather", "Kiel")])
    ]
    chat = ChatPrompt(
        (
            ChatMessage("user", "Hi"),
            ChatMessage("assistant", None, tool_calls_json=json.dumps(calls), reasoning_content="Hm"),
            ChatMessage("tool", "2 C", tool_call_id="c2"),
            ChatMessage("tool", "noon", tool_call_id="c1"),
            ChatMessage("tool", "12 C", tool_call_id="c0"),
            ChatMessage("user", "And?"),
        ),
        (TOOL,),
        add_generation_prompt=True,
    )
    prompt = templates.render(chat, has_single_calls=True, tool_style=style.tools)
    turns = "".join(
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>"
        f'{{"city": "{city}"}}<|call|>'
        f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{result}"<|end|>'
        for name, city, result in [
            ("get_weather", "Ulm", "12 C"), ("get_time", "Bonn", "noon"), ("get_weather", "Kiel", "2 C"),
        ]
    )  # fmt: skip
    assert prompt.endswith(
        f"Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Hm<|end|>{turns}"
        "<|start|>user<|message|>And?<|end|><|start|>assistant"
    )


def test_results_without_a_call_are_refused(templates: ChatTemplates) -> None:
    with pytest.raises(InvalidRequestError, match="a result without a call"):
        rendered(templates, ChatMessage("user", "Hi"), ChatMessage("tool", "12 C", tool_call_id="c1"))


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>",
    ],
)
@pytest.mark.parametrize("size", [1, 7, 500])
def test_outputs_are_read_as_the_template_writes_them(header: str, size: int) -> None:
    rules = ParsingRules(ToolStyle.HARMONY, {"get_weather": PARAMETERS}, ReasoningStyle.HARMONY)
    assert rules.needs_special_tokens
    parser = rules.parser()
    # <|call|> ends the output, and is not a part of it.
    output = f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{header.removeprefix('<|start|>assistant')}"
    output += '{"city": "Ulm"}'
    pieces = [piece for at in range(0, len(output), size) for piece in parser.feed(output[at : at + size])]
    pieces += parser.flush()
    texts: dict[str, str] = {}
    for piece in pieces:
        kind = type(piece).__name__
        texts[kind] = texts.get(kind, "") + getattr(piece, "text", getattr(piece, "name", ""))
    assert texts == {"Reasoning": "Hm", "CallStart": "get_weather", "CallArguments": '{"city": "Ulm"}'}
