from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.cli.chat.client import ChatClient, ChatError, ChatOptions, UnreachableError
from tests.fakes.openai_server import free_url
from tests.waiting import wait_until

if TYPE_CHECKING:
    from deploy.cli.chat.client import StreamedAnswer
    from tests.fakes.openai_server import FakeOpenAIServer

MESSAGES = [{"role": "user", "content": "one two three"}]


def ask(server: FakeOpenAIServer, model: str = "good", pieces: list[str] | None = None) -> StreamedAnswer:
    client = ChatClient(server.url)
    received: list[str] = [] if pieces is None else pieces
    try:
        options = ChatOptions(model, user="ann", max_tokens=4)
        return client.ask(MESSAGES, options, received.append)
    finally:
        client.close()


def test_an_answer_comes_in_pieces_with_its_figures(server: FakeOpenAIServer) -> None:
    server.chunk_interval_s = 0.02
    pieces: list[str] = []
    answer = ask(server, pieces=pieces)
    assert pieces == [" w0", " w1", " w2", " w3"]
    assert answer.text == " w0 w1 w2 w3"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (3, 4, "length")
    assert answer.time_to_first_s is not None
    assert answer.time_to_first_s >= 0.02
    assert answer.tokens_per_s is not None
    assert 0 < answer.tokens_per_s < 60


def test_the_second_question_of_a_user_finds_the_first(server: FakeOpenAIServer) -> None:
    assert ask(server).cached_tokens == 0
    assert ask(server).cached_tokens == 3
    assert {body["user"] for body in server.bodies} == {"ann"}


def test_a_server_without_usage_still_chats(server: FakeOpenAIServer) -> None:
    answer = ask(server, "no-usage")
    assert answer.text
    assert (answer.completion_tokens, answer.tokens_per_s) == (None, None)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("overloaded", "429: come back later"),
        ("unheard-of", "404: no model"),
        ("error-midway", "the worker died"),
        ("no-done", "the answer is incomplete"),
        ("breaks-off", "failed"),
        ("not-json", "unreadable"),
    ],
)
def test_failures_are_explained(server: FakeOpenAIServer, model: str, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        ask(server, model)


def test_pieces_before_a_failure_are_kept(server: FakeOpenAIServer) -> None:
    pieces: list[str] = []
    with pytest.raises(ChatError):
        ask(server, "error-midway", pieces)
    assert pieces == [" w0", " w1"]


def test_an_interrupt_closes_the_connection(server: FakeOpenAIServer) -> None:
    server.chunk_interval_s = 0.05

    def interrupt(_piece: str) -> None:
        raise KeyboardInterrupt

    client = ChatClient(server.url)
    with pytest.raises(KeyboardInterrupt):
        client.ask(MESSAGES, ChatOptions("good", "ann", max_tokens=1000), interrupt)
    wait_until(lambda: server.disconnects, what=lambda: "the server saw the client leave")
    client.close()


def test_the_error_of_an_unreachable_server_names_it_and_the_remedy() -> None:
    url = free_url()
    with pytest.raises(UnreachableError, match=rf"{url}.*pando up.*--url"):
        ChatClient(url).find_model()


def test_the_first_listed_model_is_taken_and_none_is_explained(server: FakeOpenAIServer) -> None:
    server.listed = ["b", "a"]
    for url in (server.url, f"{server.url}/v1/", server.url.removeprefix("http://")):
        assert ChatClient(url).find_model() == "b"
    server.listed = []
    with pytest.raises(ChatError, match="lists no model"):
        ChatClient(server.url).find_model()


@pytest.mark.parametrize("url", ["ftp://host", "http://h:port"])
def test_an_invalid_url_is_reported(url: str) -> None:
    with pytest.raises(ChatError, match="not a URL"):
        ChatClient(url).find_model()
