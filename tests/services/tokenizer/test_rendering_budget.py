from __future__ import annotations

import time

import pytest

from common.errors import InvalidRequestError
from common.requests import ChatMessage, ChatPrompt
from services.tokenizer.chat_template import ChatTemplates

HELLO = ChatPrompt((ChatMessage("user", "Hello"),))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(9999) %}{% set y = messages[0].role %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_would_never_end_is_given_up(source: str) -> None:
    templates = ChatTemplates({"default": source}, {}, limit_s=0.2)
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="takes longer than") as refused:
        templates.render(HELLO)
    assert time.monotonic() - started < 20
    assert refused.value.param == "messages"
    assert ChatTemplates({"default": "{{ messages[0].content }}"}, {}, limit_s=20).render(HELLO) == "Hello"


def test_constants_may_be_looked_up_while_a_template_is_compiled() -> None:
    templates = ChatTemplates({"default": "{{ [1, 2][0] }}{{ {'a': 3}.a }}"}, {})
    assert templates.render(HELLO) == "13"


def test_the_assistant_prefix_follows_the_rendered_prompt() -> None:
    templates = ChatTemplates({"default": "{{ messages[0].content }}:"}, {})
    chat = ChatPrompt(HELLO.messages, assistant_prefix="<tool_call>")
    assert templates.render(chat) == "Hello:<tool_call>"
