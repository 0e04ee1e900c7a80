from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deploy.evaluation.bench.client import EventSplitter

BODY = b': ping\n\ndata: {"a": 1}\n\nevent: error\r\ndata: {"b": 2}\r\n\r\nerror: {"c": 3}\n\nid: 7\ndata:[DONE]\n\n'
PAYLOADS = [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}', b"[DONE]"]


@given(st.lists(st.integers(0, len(BODY)), max_size=12))
def test_payloads_do_not_depend_on_how_the_body_is_cut(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(BODY)]
    splitter = EventSplitter()
    payloads = [payload for start, end in pairwise(borders) for payload in splitter.feed(BODY[start:end])]
    assert payloads == PAYLOADS


def test_an_unfinished_line_is_kept_back() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: half") == []
    assert splitter.feed(b" done\n") == [b"half done"]
