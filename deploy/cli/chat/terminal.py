"""The user interface of the chat: prompt, streamed answer, figures, commands."""

from __future__ import annotations

import contextlib
import unicodedata
from typing import TYPE_CHECKING

from deploy.cli.chat.client import ChatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from deploy.cli.chat.client import ChatClient, ChatHistory, ChatOptions, StreamedAnswer

HELP = """/reset          clear the conversation
/system TEXT    set the system prompt (without TEXT: remove it) and clear the conversation
/quit           quit, like Ctrl-D. Ctrl-C stops an answer"""


class Terminal:
    """One session at the terminal."""

    def __init__(
        self,
        client: ChatClient,
        options: ChatOptions,
        conversation: ChatHistory,
        console: Console,
        read_line: Callable[[], str],
    ) -> None:
        """Chat on `console` with lines from `read_line`, which raises EOFError at the end."""
        self._client = client
        self._options = options
        self._conversation = conversation
        self._console = console
        self._read_line = read_line

    def run(self) -> None:
        """Chat until the user quits."""
        self._note(f"{self._options.model} at {self._client.url}; /help shows the commands")
        while True:
            try:
                line = self._read_line().strip()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
                self._note("press Ctrl-D or type /quit to quit")
                continue
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._ask(line)

    def _command(self, line: str) -> bool:
        """Run a command; return whether the chat continues."""
        name, _, rest = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._conversation.reset()
                self._note("conversation cleared")
            case "/system":
                self._conversation.system = rest.strip() or None
                self._conversation.reset()
                self._note("system prompt set" if self._conversation.system else "no system prompt")
            case "/help":
                self._note(HELP)
            case _:
                self._note(f"unknown command {name}; /help shows the commands")
        return True

    def _ask(self, text: str) -> None:
        received: list[str] = []

        def on_text(piece: str) -> None:
            received.append(piece)
            self._console.out(printable(piece), end="", highlight=False)

        try:
            answer = self._client.ask(self._conversation.ask(text), self._options, on_text)
        except KeyboardInterrupt:
            self._console.print()
            self._note("stopped")
        except ChatError as error:
            self._console.print()
            self._console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        else:
            self._console.print()
            self._note(describe(answer))
        finally:
            # A stopped answer stays in the conversation: the next turn continues from it.
            self._conversation.answer("".join(received))

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def read_from_terminal() -> str:
    """Read a line, with editing and history if the platform supports them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (its import enables editing)
    return input("\n> ")


def describe(answer: StreamedAnswer) -> str:
    """Return the figures of an answer in one line, without those that the server does not report."""
    parts: list[str] = []
    if answer.completion_tokens is not None:
        parts.append(f"{answer.completion_tokens} tokens")
    if (rate := answer.tokens_per_s) is not None:
        parts.append(f"{rate:.1f} tokens/s")
    if (first := answer.time_to_first_s) is not None:
        parts.append(f"first token after {first * 1000:.0f} ms")
    if answer.prompt_tokens is not None:
        cached = "" if answer.cached_tokens is None else f", {answer.cached_tokens} of them cached"
        parts.append(f"prompt {answer.prompt_tokens} tokens{cached}")
    if answer.finish_reason == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts)


def printable(text: str) -> str:
    """Return `text` without control characters: a model's output must not control the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
