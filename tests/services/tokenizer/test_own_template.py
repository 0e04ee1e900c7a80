"""A chat template in place of the model's own: found notations, and broken templates."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, cast

import pytest
from structlog.testing import capture_logs

from common.errors import ConfigurationError
from common.requests import ChatMessage, ChatPrompt
from common.settings import ModelSettings, Settings
from common.types import ToolStyle
from services.tokenizer.__main__ import build
from services.tokenizer.chat_template import ChatTemplates
from services.tokenizer.images.prompts import NoImages
from tests.common.notations.templates import CHATML, TEMPLATES, chatml

if TYPE_CHECKING:
    from pathlib import Path

    from common.tokenization import TextModel
    from services.tokenizer.encoding import PromptEncoder
    from services.tokenizer.relay import Scheduler

    ToolSetting = Literal["auto", "glm", "none"]

TOOL = json.dumps({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}})
CHAT = ChatPrompt((ChatMessage("user", "Hi"),), (TOOL,))


def encoder_with(model: TextModel, chat_template: str, tool_style: ToolSetting = "auto") -> PromptEncoder:
    """Return the encoder that the service has with these settings."""
    settings = Settings(model=ModelSettings(chat_template=chat_template, tool_style=tool_style))

    async def built() -> PromptEncoder:
        with ThreadPoolExecutor(1) as executor:
            scheduler = cast("Scheduler", None)  # nothing is submitted
            return build(settings, model, scheduler, executor, NoImages())[1]._pool.encoder

    return asyncio.run(built())


@pytest.mark.parametrize("style", [ToolStyle.HERMES, ToolStyle.QWEN3_CODER, ToolStyle.PYTHONIC])
def test_a_model_without_tools_gets_them_from_a_template(model: TextModel, tmp_path: Path, style: ToolStyle) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATES[style], encoding="utf-8")
    assert encoder_with(model, "").style.tools is None
    for given in (str(file), TEMPLATES[style]):
        encoder = encoder_with(model, given)
        assert encoder.style.tools is style
        text, ids = encoder.render(CHAT)
        assert text.startswith("<|im_start|>system\n")
        assert "look" in text
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert model.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("tool_style", ["auto", "glm", "none"])
def test_a_notation_that_cannot_be_read_back_is_in_the_log_of_the_start(
    model: TextModel, tool_style: ToolSetting
) -> None:
    template = chatml("{{ '<call>' + message.tool_calls | tojson + '</call>' }}")
    with capture_logs() as logged:
        problem = encoder_with(model, template, tool_style).style.tools_problem
    warning = {
        "event": "tools.refused", "log_level": "warning", "component": "template", "reason": problem,
        "tool_style": tool_style,
    }  # fmt: skip
    assert (problem is not None) is (tool_style == "auto")
    assert logged == ([] if problem is None else [warning])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for message in messages %}{{ message.content }}", "line 1: .*endfor"),
        ("{{ messages }}\n{% unknown %}", "line 2: .*unknown"),
        ("{{ messages | backwards }}", "backwards"),
        ("{% for message in messages %}{{ message.role }}{% endfor %}", "text is left out"),
        ("{{ raise_exception('not today') }}", "not today"),
        ("{{ messages[9].content }}", "cannot render a user's message"),
        ("{{ messages[0].content.__class__.mro() }}", "cannot render"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}", "too long"),
    ],
)
def test_a_broken_template_ends_the_start(model: TextModel, template: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"model\.chat_template.*{problem}"):
        encoder_with(model, template)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        # Require a system's message, and parts.
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[-1].content }}",
        "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}",
    ],
)
def test_templates_that_render_some_greeting_are_usable(template: str) -> None:
    ChatTemplates({"default": template}, {}).check()
