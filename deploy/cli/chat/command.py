"""`pando chat`: a conversation in the terminal, or one question from a script."""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.cli.chat.client import ChatClient, ChatError, ChatHistory, ChatImage, ChatOptions, tls_context
from deploy.supervisor.state import read_state, run_root

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from deploy.cli.chat.client import StreamedAnswer

DEFAULT_URL = "http://127.0.0.1:8000"
# At the API's default of 1, the output of a small model, such as the default one, is mostly incoherent.
DEFAULT_TEMPERATURE = 0.3
API_KEY_VARIABLE = "PANDO_API_KEY"
INTERRUPTED = 130  # the exit status of a process ended by SIGINT
HELP = """/image FILE     send an image with the next message (repeatable)
/reset          clear the conversation
/system TEXT    set the system prompt (without TEXT: remove it) and clear the conversation
/quit           quit, like Ctrl-D. Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando chat`."""
    parser.add_argument("--url", help=f"server; default: the deployment on this machine, otherwise {DEFAULT_URL}")
    parser.add_argument("--model", help="default: the first in the server's list")
    parser.add_argument("--api-key", default=os.environ.get(API_KEY_VARIABLE), help=f"(or {API_KEY_VARIABLE})")
    parser.add_argument(
        "--authority", metavar="FILE", help="authority of the server's certificate, if it is not a public one (PEM)"
    )
    parser.add_argument("--certificate", metavar="FILE", help="client certificate, if the server requires one (PEM)")
    parser.add_argument("--key", metavar="FILE", help="private key of the client certificate (PEM)")
    parser.add_argument("--user", help="name of the user; default: a new one in each session")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=float, default=DEFAULT_TEMPERATURE, help="0 to 2 (%(default)s)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer; default: the server's")
    parser.add_argument(
        "--image",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="image to send with the prompt, or with the first message; repeatable",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="send this prompt (or text on stdin), print the answer, exit")


def run(arguments: argparse.Namespace) -> int:
    """Chat; return the exit status."""
    try:
        tls = tls_context(arguments.authority, arguments.certificate, arguments.key)
        client = ChatClient(arguments.url or running_url(), arguments.api_key, tls=tls)
        try:
            chat(client, arguments)
        finally:
            client.close()
    except ChatError as error:
        sys.stderr.write(f"pando chat: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return INTERRUPTED
    return 0


def chat(client: ChatClient, arguments: argparse.Namespace) -> None:
    """Chat with the server of `client` until the user quits, or send one prompt.

    Raises:
        ChatError: the server cannot be reached, or does not answer a single prompt.
    """
    options = ChatOptions(
        model=arguments.model or client.find_model(),
        user=arguments.user or f"chat-{uuid.uuid4()}",
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
    )
    conversation = ChatHistory(arguments.system, images=[ChatImage.read(path) for path in arguments.image])
    if arguments.prompt is not None:
        ask_once(client, options, conversation, arguments.prompt)
    elif sys.stdin.isatty():
        Terminal(client, options, conversation, Console(), read_from_terminal).run()
    else:
        ask_once(client, options, conversation, sys.stdin.read().strip())


def ask_once(client: ChatClient, options: ChatOptions, conversation: ChatHistory, question: str) -> None:
    """Write the answer to `question` to standard output, and its figures to standard error.

    Raises:
        ChatError: the question is empty, or the answer is incomplete.
    """
    if not question:
        raise ChatError("there is no prompt: standard input is empty")
    to_terminal = sys.stdout.isatty()

    def on_text(piece: str) -> None:
        sys.stdout.write(printable(piece) if to_terminal else piece)
        sys.stdout.flush()

    answer = client.ask(conversation.ask(question), options, on_text)
    sys.stdout.write("\n")
    sys.stderr.write(describe(answer) + "\n")


def running_url(root: Path | None = None) -> str:
    """Return the URL of the deployment that runs on this machine; without one, the default URL.

    Raises:
        ChatError: several deployments run, none of them at the default URL.
    """
    found = (read_state(folder) for folder in sorted((root or run_root()).glob("*")))
    urls = [state.url for state in found if state is not None]
    if not urls or DEFAULT_URL in urls:
        return DEFAULT_URL
    if len(urls) > 1:
        raise ChatError(f"several deployments run here ({', '.join(urls)}): choose one with --url")
    return urls[0]


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
            case "/image":
                self._attach(rest.strip())
            case "/help":
                self._note(HELP)
            case _:
                self._note(f"unknown command {name}; /help shows the commands")
        return True

    def _attach(self, name: str) -> None:
        if not name:
            self._note("/image needs the name of a file")
            return
        try:
            image = ChatImage.read(Path(name).expanduser())
        except ChatError as error:
            self._show_error(error)
            return
        self._conversation.images.append(image)
        self._note(f"{printable(image.name)} goes with the next message")

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
            self._show_error(error)
        else:
            self._console.print()
            self._note(describe(answer))
        finally:
            # A stopped answer stays in the conversation: the next turn continues from it.
            self._conversation.answer("".join(received))

    def _show_error(self, error: ChatError) -> None:
        self._console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)

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
