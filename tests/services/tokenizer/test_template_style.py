from __future__ import annotations

import pytest

from common.types import ToolStyle
from services.tokenizer.chat_template import ChatTemplates
from services.tokenizer.template_style import TemplateStyle, style_of

HERMES = "{% if tools %}Return <tool_call>{}</tool_call>{% endif %}"
THINKS = "{{ messages[0].content }}{% if x %}</think>{% endif %}{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("no functions here", TemplateStyle()),
        ("<tool_call> without the variable", TemplateStyle()),
        (HERMES, TemplateStyle(ToolStyle.HERMES)),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", TemplateStyle(ToolStyle.MISTRAL)),
        ("{% if tools %}<|python_tag|>{% endif %}", TemplateStyle(ToolStyle.LLAMA3)),
        ("{% if tools %}[func_name1(a=1)] <|python_tag|>{% endif %}", TemplateStyle(ToolStyle.PYTHONIC)),
        ("{{ messages[0].content.split('</think>') }}", TemplateStyle(None, has_reasoning=True)),
        (THINKS, TemplateStyle(None, has_reasoning=True, begins_with_reasoning=True)),
    ],
)
def test_style_is_read_from_the_template(source: str, style: TemplateStyle) -> None:
    sources = {"default": source}
    assert style_of(sources, ChatTemplates(sources, {}), "auto", "auto") == style


def test_the_style_of_a_tool_template_takes_precedence_over_the_default() -> None:
    sources = {"default": "plain", "tool_use": HERMES}
    assert style_of(sources, ChatTemplates(sources, {}), "auto", "auto").tools is ToolStyle.HERMES


def test_settings_win() -> None:
    sources = {"default": HERMES}
    templates = ChatTemplates(sources, {})
    assert style_of(sources, templates, "none", "think") == TemplateStyle(None, has_reasoning=True)
    assert style_of(sources, templates, "pythonic", "none") == TemplateStyle(ToolStyle.PYTHONIC)
