"""The notation of a model is what its chat template writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from common.requests import ChatMessage, ChatPrompt, ImageFile
from common.types import ReasoningStyle, ToolStyle
from services.tokenizer.chat_template import ChatTemplates
from services.tokenizer.template_style import TemplateStyle, style_of
from tests.common.notations.templates import TEMPLATES, chatml

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
OPENED = "{%- if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
SWITCHED = (
    PLAIN
    + "{% if add_generation_prompt %}{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}"
)


def style(source: str, tools: str = "auto", reasoning: str = "auto") -> TemplateStyle:
    sources = {"default": source}
    return style_of(sources, ChatTemplates(sources, {}), tools, reasoning)


def test_every_notation_has_a_template() -> None:
    assert set(TEMPLATES) == set(ToolStyle)


@pytest.mark.parametrize("wanted", list(TEMPLATES))
def test_the_notation_is_found_by_reading_a_rendered_call_back(wanted: ToolStyle) -> None:
    found = style(TEMPLATES[wanted])
    assert (found.tools, found.tools_problem) == (wanted, None)
    assert found.takes_arguments_as_text is (wanted in (ToolStyle.DEEPSEEK_V3, ToolStyle.DEEPSEEK_V31))
    assert found.has_single_calls is (wanted in (ToolStyle.LLAMA3, ToolStyle.HARMONY))


@pytest.mark.parametrize(
    ("calls", "wanted"),
    [
        ("{{ '[TOOL_CALLS]' + f.name + f.arguments | tojson }}", ToolStyle.MISTRAL_ARGS),
        ("{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]abc[ARGS]' + f.arguments | tojson }}", ToolStyle.MISTRAL_ARGS),
        ("{{ '<tool_call>' + {'name': f.name, 'arguments': f.arguments} | tojson }}</tool_call>", ToolStyle.HERMES),
        ("{{ '<tool_call>[' + {'name': f.name, 'arguments': f.arguments} | tojson + ']' }}", ToolStyle.GRANITE),
        ("{{ '<|python_start|>[' + f.name + '(' }}{% for key, value in f.arguments.items() %}{{ key + '=' }}"
         "{{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ')]<|python_end|>' }}", ToolStyle.PYTHONIC),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' }}"
         "{{ f.arguments | tojson + '\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}", ToolStyle.DEEPSEEK_V3),
    ],
)  # fmt: skip
def test_variants_of_a_notation_are_read(calls: str, wanted: ToolStyle) -> None:
    one = "{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    found = style(chatml(one + "{%- set f = message.tool_calls[0].function %}" + calls))
    assert (found.tools, found.takes_arguments_as_text) == (wanted, False)


def test_templates_without_tools_have_no_notation_and_no_problem() -> None:
    for source in (PLAIN, "<tool_call> without the variable", PLAIN + "{# no tools #}"):
        assert style(source) == TemplateStyle()


@pytest.mark.parametrize(
    "calls",
    [
        "{{ '<call>' + message.tool_calls | tojson + '</call>' }}",
        "{{ '<tool_call>' + message.tool_calls[0].function.name + ' with ' + "
        "message.tool_calls[0].function.arguments | tojson + '</tool_call>' }}",
        "",
        # Known but for the marks around it, which would be left in the text.
        "{{ '<TOOLCALL>[' + message.tool_calls[0].function.name + '()]</TOOLCALL>' }}",
        "{{ '<x:call><function=' + message.tool_calls[0].function.name + '><parameter=word>pro bed</parameter>"
        "<parameter=count>7</parameter><parameter=flag>true</parameter></function></x:call>' }}",
    ],
)
def test_a_notation_that_cannot_be_read_back_is_refused_with_the_reason(calls: str) -> None:
    found = style(chatml(calls))
    assert found.tools is None
    assert found.tools_problem is not None
    assert "model.tool_style" in found.tools_problem


def test_a_template_that_refuses_calls_is_said_to() -> None:
    found = style(chatml("{%- set _ = tools.append(1) %}{{ message.tool_calls[0].function.name }}"))
    assert found.tools is None
    assert found.tools_problem is not None
    assert "a conversation with a tool call cannot be rendered (" in found.tools_problem
    assert "'append' of 'list' object is unsafe); set model.tool_style" in found.tools_problem


def test_the_settings_take_precedence() -> None:
    assert style(TEMPLATES[ToolStyle.HERMES], "none", "think") == TemplateStyle(None, ReasoningStyle.THINK)
    assert style(TEMPLATES[ToolStyle.HERMES], "pythonic", "none").tools is ToolStyle.PYTHONIC
    unreadable = style(chatml("{{ message.tool_calls | tojson }}"), "glm")
    assert (unreadable.tools, unreadable.tools_problem) == (ToolStyle.GLM, None)
    # The setting also decides how the template gets arguments.
    assert style(TEMPLATES[ToolStyle.DEEPSEEK_V31], "deepseek_v31").takes_arguments_as_text


def test_the_template_for_tools_takes_precedence_over_the_default() -> None:
    sources = {"default": PLAIN, "tool_use": TEMPLATES[ToolStyle.HERMES]}
    assert style_of(sources, ChatTemplates(sources, {}), "auto", "auto").tools is ToolStyle.HERMES


def test_arguments_are_rendered_as_the_template_needs_them() -> None:
    sources = {"default": TEMPLATES[ToolStyle.DEEPSEEK_V31]}
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = (ChatMessage("user", "Hi"), ChatMessage("assistant", None, tool_calls_json=json.dumps([call])))
    text = ChatTemplates(sources, {}).render(ChatPrompt(messages), takes_arguments_as_text=True)
    assert '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>' in text


def shows(opening: str, closing: str) -> str:
    """Return a template that writes reasoning between marks."""
    thought = (
        "{% if message.reasoning_content %}" + opening + "{{ message.reasoning_content }}" + closing + "{% endif %}"
    )
    return "{% for message in messages %}" + thought + "{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (PLAIN, None),
        (shows("<think>\n", "\n</think>\n\n"), ReasoningStyle.THINK),
        (shows("[THINK]", "[/THINK]"), ReasoningStyle.BRACKETS),
        (shows("<seed:think>", "</seed:think>"), ReasoningStyle.SEED),
        (shows("◁think▷", "◁/think▷"), ReasoningStyle.KIMI),
        (shows("<|channel>thought\n", "\n<channel|>"), ReasoningStyle.GEMMA),
        (shows("<think>", "</think><response>"), ReasoningStyle.RESPONSE),
        # Marks around the results of tools, as MiniMax M2 has them.
        (shows("<think>", "</think>") + "{% if false %}<response></response>{% endif %}", ReasoningStyle.THINK),
        # Marks of an instruction, as Granite 3 has them.
        (PLAIN + "{% if thinking %}between <think></think>, then between <response></response>{% endif %}",
         ReasoningStyle.RESPONSE),
        (TEMPLATES[ToolStyle.HARMONY], ReasoningStyle.HARMONY),
        ("{{ messages[0].content.split('</think>')[-1] }}", ReasoningStyle.THINK),
        (PLAIN + "{# <think> #}", None),
    ],
)  # fmt: skip
def test_the_marks_of_reasoning_are_read_from_the_template(source: str, wanted: ReasoningStyle | None) -> None:
    assert style(source).reasoning is wanted


def test_whether_the_prompt_opens_reasoning_may_depend_on_the_request() -> None:
    always = style(PLAIN + OPENED)
    assert (always.reasoning, always.begins_with_reasoning) == (ReasoningStyle.THINK, True)
    assert (always.begins_with_reasoning_on_request, always.begins_with_reasoning_although_off) == (True, True)
    asked = style(SWITCHED)
    assert (asked.reasoning, asked.begins_with_reasoning) == (ReasoningStyle.THINK, False)
    assert (asked.begins_with_reasoning_on_request, asked.begins_with_reasoning_although_off) == (True, False)


def test_whether_the_template_reads_the_effort_is_known() -> None:
    assert style(PLAIN + "{{ reasoning_effort }}").reads_reasoning_effort
    assert not style(PLAIN).reads_reasoning_effort


IN_PARTS = (
    "{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>{% endif %}{% endfor %};"
    "{% endfor %}"
)


def test_templates_that_read_parts_only_get_texts_as_parts() -> None:
    assert not style(PLAIN).takes_parts
    assert style(IN_PARTS).takes_parts
    templates = ChatTemplates({"default": IN_PARTS}, {})
    chat = ChatPrompt(
        (
            ChatMessage("system", "be brief"),
            ChatMessage("user", parts=("see ", ImageFile(b"1"), "?")),
            ChatMessage("assistant", "It"),
        ),
        add_generation_prompt=False,
    )
    assert templates.render(chat, takes_parts=True) == "system:be brief;user:see <image>?;assistant:It;"
    opened = replace(chat, continue_final_message=True)
    assert templates.render(opened, takes_parts=True) == "system:be brief;user:see <image>?;assistant:It"
