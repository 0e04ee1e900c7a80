"""Texts on which tokenizers like to differ."""

from __future__ import annotations

import itertools

_SENTENCES = (
    "The capital of France is Paris.",
    "Don't you think it's what we've been waiting for? I'll say they'd agree.",
    "DON'T SHOUT, I'M HERE, WE'LL SEE",
    "naïve café résumé coöperate façade Ångström",
    "Der schnelle braune Fuchs springt über den faulen Hund. Größe, Straße, Füße.",
    "我能吞下玻璃而不伤身体。今天天气很好,我们去公园吧!",
    "日本語のテキスト:ひらがな、カタカナ、漢字。",
    "안녕하세요 세계, 오늘은 날씨가 좋네요.",
    "مرحبا بالعالم، كيف حالك اليوم؟ ١٢٣٤٥",
    "שלום עולם, מה שלומך?",
    "Привет, мир! Как дела? Всё хорошо.",
    "Γειά σου Κόσμε, τι κάνεις;",
    "नमस्ते दुनिया, आप कैसे हैं? १२३",
    "สวัสดีชาวโลก",
    "Xin chào thế giới, hôm nay trời đẹp quá",
    "😀 😃 😄 🎉🎊 👩‍👩‍👧‍👦 🇫🇷🇩🇪 👍🏽 ❤️‍🔥",
    "a\u0301e\u0308 vs áë; \ufb01nd ﬁ; Å vs A\u030a",
    "x² + y² = z², ∑_{i=0}^{n} αᵢ ≤ ∞, ∀ε>0 ∃δ: |x−a|<δ ⇒ |f(x)−L|<ε",
    "½ ⅓ ² ³ Ⅳ ④ ٣ ৪ 五",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", i);\n}\r\n',
    "SELECT * FROM users WHERE id = 42 AND name LIKE '%o\\'brien%';",
    '<html><body class="x">&nbsp;</body></html>',
    '{"key": [1, 2.5e-10, null, true], "nested": {"ключ": "значение"}}',
    "https://example.com/path?query=1&other=%20#frag user@example.org",
    "#!/bin/bash\nset -euo pipefail\ncat <<'EOF' | grep -v '^$'\nEOF",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE __dunder__",
    "....!!!???---===***~~~```\"\"\"'''",
)
_NUMBERS = (
    "0", "7", "42", "123", "1234", "12345", "123456", "1234567890123456789", "3.14159", "-273.15", "1,000,000.00",
    "0x1F600", "1e10", "2024-02-29T23:59:59Z", "192.168.0.1", "+49 (0)30 123456", "abc123def456", "1st 2nd 3rd 4th",
    "v1.2.3-rc4", "100%", "$5.99", "8 bits", " 8", "8 ", "１２３", "007",
)  # fmt: skip
_SPACES = (
    " ", "  ", "   ", "    ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", " \n", "\n ", "\r\n", "\r", " \t \n \t ",
    "a b", "a  b", "a   b", "a\nb", "a\n\nb", "a \n b", "  leading", "trailing  ", " both ", "\u00a0nbsp\u00a0",
    "\u2003em\u2003space", "\u200bzero\u200bwidth", "\ufeffbom", "tab\tstop", "x" + " " * 64 + "y", "line\n" * 8,
)  # fmt: skip
_SPECIAL = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "a<|im_end|>b",
    "a <|im_end|> b",
    "<|im_end|><|im_end|>",
    "<|im_end",
    "<|im_end |>",
    "|im_end|>",
    "<repo_name>pando<file_sep>README.md",
    "<file_sep",
    "<|unknown|>",
    "<s></s><unk><0x41>",
)
_ODD = (
    "\x00", "a\x00b", "\x1b[31mred\x1b[0m", "\x7f", "\U0010ffff", "\ue000private", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𐍈𐌰", "e" * 300,
    "ab" * 150, "!" * 100, "é" * 50, "漢" * 50, "😀" * 20, "a\u0300" * 20, "Ａｆｕｌｌｗｉｄｔｈ", "ſtraße İi ıI",
    "ﷺ", "\u202eright-to-left\u202c", "�replacement�",
)  # fmt: skip
_JOINED = tuple(f"{left} {right}" for left, right in itertools.pairwise(_SENTENCES))

TEXTS: tuple[str, ...] = (*_SENTENCES, *_NUMBERS, *_SPACES, *_SPECIAL, *_ODD, *_JOINED, "\n".join(_SENTENCES) * 3)
