"""What the greedy tests ask: English, Chinese, code, emoji, chats, one token, 2,000 tokens, lengths around pages.

A prompt is fit for this only if the model is sure of its answer; `reference.py` says how sure, and refuses others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue: as it is, or as a user's message in a chat; `cut_to` shortens its ids to so many."""

    name: str
    text: str
    is_chat: bool = False
    cut_to: int | None = None


def _diary(days: int) -> str:
    keepers = ("Anna", "Boris", "Chen", "Dalia", "Emeka")
    doings = ("cleaned the great lamp", "painted the northern door", "counted the passing ships", "mended the old nets")
    skies = ("clear", "grey", "stormy", "foggy", "bright", "cold", "windy")
    lines = [
        f"Day {day}. {keepers[day % 5]} {doings[day % 4]}. "
        f"The sky was {skies[day % 7]}, and {day * 3 % 11} ships came by."
        for day in range(1, days + 1)
    ]
    return "The diary of the lighthouse.\n\n" + "\n".join(lines)


def _module(functions: int) -> str:
    verbs = ("add", "scale", "shift", "clip", "fold")
    signs = ("+", "*", "-", "//", "%")
    return "\n\n".join(
        f"def {verbs[i % 5]}_{i}(values: list[int], amount: int = {i + 2}) -> list[int]:\n"
        f'    """Return each value {signs[i % 5]} amount."""\n'
        f"    return [value {signs[i % 5]} amount for value in values]"
        for i in range(functions)
    )


def _almanac(days: int) -> str:
    cities = ("北京", "上海", "广州", "成都", "杭州", "西安")
    skies = ("晴", "多云", "小雨", "大风", "雪")
    return "天气记录\n" + "\n".join(
        f"第{day}天,{cities[day % 6]}的天气是{skies[day % 5]},气温{day * 7 % 30}度。" for day in range(1, days + 1)
    )


PROMPTS: tuple[Prompt, ...] = (
    Prompt("english-capital", "The capital of France is"),
    Prompt("english-counting", "1, 2, 3, 4, 5,"),
    Prompt("english-alphabet", "A B C D E F G"),
    Prompt("english-week", "The days of the week are Monday, Tuesday,"),
    Prompt("english-physics", "Newton's first law of motion states that"),
    Prompt("english-recipe", "To bake bread you need flour, water, salt and"),
    Prompt("english-planets", "The planets of the solar system are Mercury, Venus,"),
    Prompt("chinese-greeting", "你好,我叫"),
    Prompt("chinese-capitals", "中国的首都是北京。日本的首都是东京。法国的首都是"),
    Prompt("chinese-numbers", "一、二、三、四、五、"),
    Prompt(
        "code-python", "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    ),
    Prompt("code-c", "for (int i = 0; i < 10; i++) {\n    printf("),
    Prompt("code-sql", "SELECT name, COUNT(*) FROM users GROUP BY"),
    Prompt("code-json", '{"name": "Alice", "age": 30, "friends": [{"name": "Bob", "age": 31}, {"name": "Carol",'),
    Prompt("emoji-faces", "😀 😃 😄 😁 😆 😅 😂"),
    Prompt("emoji-flags", "🇫🇷 France 🇩🇪 Germany 🇯🇵"),
    Prompt("emoji-sentence", "I love pizza 🍕 and ice cream 🍦 and"),
    Prompt("one-token-word", "Hello"),
    Prompt("one-token-code", "import"),
    Prompt("one-token-newline", "\n"),
    Prompt("chat-colors", "Name three primary colors.", is_chat=True),
    Prompt("chat-sum", "What is 2+2?", is_chat=True),
    Prompt("chat-chinese", "请用中文写一句问候语。", is_chat=True),
    Prompt("length-16", _diary(3), cut_to=16),
    Prompt("length-33", _diary(5), cut_to=33),
    Prompt("length-63", _module(3), cut_to=63),
    Prompt("length-65", _diary(6), cut_to=65),
    Prompt("length-300", _module(12), cut_to=300),
    Prompt("length-512", _diary(30), cut_to=512),
    Prompt("length-2000-english", _diary(100), cut_to=2000),
    Prompt("length-2000-chinese", _almanac(100), cut_to=2000),
)
