"""Every notation reads the calls that it writes, however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common.notations.notation import Call
from common.notations.pieces import merged
from common.notations.registry import NOTATIONS
from common.types import ToolStyle
from tests.common.notations.cases import MARKS, TOOLS, calls_in, calls_of, can_write, fed, text_in
from tests.examples import examples

STYLES = list(ToolStyle)
AROUND = {
    # The text before and after calls, where the notation allows any.
    style: (
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant", "")
        if style is ToolStyle.HARMONY
        else ("", "")
        if style in (ToolStyle.LLAMA3, ToolStyle.PYTHONIC)
        else ("I look.\n", "")
    )
    for style in STYLES
}


def test_all_styles_have_a_notation() -> None:
    assert set(NOTATIONS) == set(ToolStyle)


@pytest.mark.parametrize("style", STYLES)
@examples(15)
@given(data=st.data())
def test_calls_are_read_as_they_were_written(style: ToolStyle, data: st.DataObject) -> None:
    calls = data.draw(calls_of(style))
    before, after = AROUND[style]
    text = before + NOTATIONS[style].render(calls) + after
    pieces = fed(NOTATIONS[style].parser(TOOLS), [text])
    assert calls_in(pieces) == calls
    assert text_in(pieces) == ("I look." if before else "")
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    parts: list[str] = []
    position = 0
    while position < len(text):
        size = sizes[len(parts) % len(sizes)]
        parts.append(text[position : position + size])
        position += size
    assert merged(fed(NOTATIONS[style].parser(TOOLS), parts)) == merged(pieces)


TRICKY = [
    Call("get_weather", {"word": 'Pa"r}is\n</par</tool_cal', "list": [1, {"x": "]"}], "flag": True}),
    Call("get_weather", {}),
    Call("get_weather", {"word": "\n\nlines\n", "object": {"a b": None, "c": [-1.5, "é🦜"]}, "count": -3}),
]


@pytest.mark.parametrize("style", STYLES)
def test_every_cut_gives_the_same_pieces(style: ToolStyle) -> None:
    assert_no_cut_matters(style, TRICKY)


# Without making a failing example smaller, which takes minutes with so many cuts.
@pytest.mark.extended
@pytest.mark.parametrize("style", STYLES)
@settings(examples(40), phases=[Phase.generate])
@given(data=st.data())
def test_every_cut_of_any_calls_gives_the_same_pieces(style: ToolStyle, data: st.DataObject) -> None:
    assert_no_cut_matters(style, data.draw(calls_of(style)))


@pytest.mark.extended
@pytest.mark.parametrize("style", STYLES)
def test_every_cut_of_marks_within_texts_gives_the_same_pieces(style: ToolStyle) -> None:
    written = 0
    for mark in MARKS:
        calls = [
            Call("get_weather", {"word": f"a {mark}\n", "list": [mark]}),
            Call("get_weather", {"object": {mark: 1}}),
        ]
        if can_write(style, calls):
            assert_no_cut_matters(style, calls)
            written += 1
    assert written >= len(MARKS) - 3


def assert_no_cut_matters(style: ToolStyle, calls: list[Call]) -> None:
    text = AROUND[style][0] + NOTATIONS[style].render(calls)
    whole = merged(fed(NOTATIONS[style].parser(TOOLS), [text]))
    assert calls_in(whole) == calls
    for parts in (list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        assert merged(fed(NOTATIONS[style].parser(TOOLS), parts)) == whole, parts[0]


@pytest.mark.parametrize("style", STYLES)
def test_a_truncated_output_is_read_the_same_however_it_is_cut(style: ToolStyle) -> None:
    text = NOTATIONS[style].render(TRICKY)
    for end in range(len(text)):
        whole = merged(fed(NOTATIONS[style].parser(TOOLS), [text[:end]]))
        if end % 7 == 0:
            assert merged(fed(NOTATIONS[style].parser(TOOLS), list(text[:end]))) == whole


@pytest.mark.parametrize("style", [style for style in STYLES if style is not ToolStyle.HARMONY])
def test_calls_of_unknown_tools_are_text(style: ToolStyle) -> None:
    text = NOTATIONS[style].render([Call("unknown", {"word": "x"})])
    for parts in ([text], list(text)):
        pieces = fed(NOTATIONS[style].parser(TOOLS), parts)
        assert calls_in(pieces) == []
        assert "unknown" in text_in(pieces)


@pytest.mark.parametrize("style", STYLES)
def test_the_prefix_of_a_forced_call_begins_its_text(style: ToolStyle) -> None:
    notation = NOTATIONS[style]
    text = notation.render([TRICKY[0]])
    assert text.startswith(notation.prefix("get_weather"))
    assert notation.prefix("get_weather").startswith(notation.prefix(None))


@pytest.mark.parametrize("style", [ToolStyle.QWEN3_CODER, ToolStyle.SEED, ToolStyle.GLM, ToolStyle.MINIMAX])
def test_a_text_may_contain_the_mark_at_its_end_unless_more_of_a_call_follows(style: ToolStyle) -> None:
    mark = "</arg_value>" if style is ToolStyle.GLM else "</parameter>"
    calls = [Call("get_weather", {"word": f"a {mark} b {mark}{mark} c", "count": 1})]
    text = NOTATIONS[style].render(calls)
    for parts in ([text], list(text)):
        assert calls_in(fed(NOTATIONS[style].parser(TOOLS), parts)) == calls


@pytest.mark.parametrize("cut", range(1, 40))
def test_deepseeks_attribute_says_which_values_are_texts(cut: int) -> None:
    text = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="word" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="unknown" string="true">[1]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="other" string="false">[1]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="count" string="false">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    parts = [text[start : start + cut] for start in range(0, len(text), cut)]
    [call] = calls_in(fed(NOTATIONS[ToolStyle.DEEPSEEK_V32].parser(TOOLS), parts))
    assert call.arguments == {"word": "5", "unknown": "[1]", "other": [1], "count": 5}


def test_texts_are_streamed_as_they_come() -> None:
    parser = NOTATIONS[ToolStyle.QWEN3_CODER].parser(TOOLS)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=word>\nOnce upon")
    [piece] = parser.feed(" a time")
    assert piece.text == " a time"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("style", "text", "id_"),
    [
        (ToolStyle.KIMI_K2, NOTATIONS[ToolStyle.KIMI_K2].render(TRICKY[:1]), "functions.get_weather:0"),
        (ToolStyle.MISTRAL_ARGS, "[TOOL_CALLS]get_weather[CALL_ID]abc123xyz[ARGS]{}", "abc123xyz"),
    ],
)
def test_the_ids_of_calls_are_read(style: ToolStyle, text: str, id_: str) -> None:
    [start, *_] = fed(NOTATIONS[style].parser(TOOLS), [text])
    assert start.id == id_  # type: ignore[union-attr]
