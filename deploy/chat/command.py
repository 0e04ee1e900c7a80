"""`pando chat`: a conversation in the terminal, or one question from a script."""

from __future__ import annotations

import os
import sys
import uuid
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.chat.client import ChatClient, ChatError, ChatOptions, tls_context
from deploy.chat.conversation import Conversation
from deploy.chat.terminal import Terminal, describe, printable, read_from_terminal
from deploy.supervisor.state import read_state, run_root

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8000"
# At the API's own default of 1 a small model, which is what is served at first, talks in riddles.
DEFAULT_TEMPERATURE = 0.3
API_KEY_VARIABLE = "PANDO_API_KEY"
INTERRUPTED = 130  # what shells report for a process that SIGINT ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando chat`."""
    parser.add_argument("--url", help=f"server; default: the deployment running here, else {DEFAULT_URL}")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", default=os.environ.get(API_KEY_VARIABLE), help=f"(or {API_KEY_VARIABLE})")
    parser.add_argument(
        "--authority", metavar="FILE", help="who signs the server's certificate, if nobody public (PEM)"
    )
    parser.add_argument("--certificate", metavar="FILE", help="to show, where the server asks for one (PEM)")
    parser.add_argument("--key", metavar="FILE", help="the private key that belongs to it (PEM)")
    parser.add_argument("--user", help="who asks; default: somebody new in each session")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=float, default=DEFAULT_TEMPERATURE, help="0 to 2 (%(default)s)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer; default: the server's")
    parser.add_argument("--prompt", metavar="TEXT", help="ask this, print the answer, and end; so does text on stdin")


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
    """Chat with the server of `client` until there is nothing more to ask.

    Raises:
        ChatError: there is no answer to be had.
    """
    options = ChatOptions(
        model=arguments.model or client.find_model(),
        user=arguments.user or f"chat-{uuid.uuid4()}",
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
    )
    conversation = Conversation(arguments.system)
    if arguments.prompt is not None:
        ask_once(client, options, conversation, arguments.prompt)
    elif sys.stdin.isatty():
        Terminal(client, options, conversation, Console(), read_from_terminal).run()
    else:
        ask_once(client, options, conversation, sys.stdin.read().strip())


def ask_once(client: ChatClient, options: ChatOptions, conversation: Conversation, question: str) -> None:
    """Write the answer to `question` on standard output, its figures on standard error.

    Raises:
        ChatError: there is no question, or no whole answer.
    """
    if not question:
        raise ChatError("nothing to ask: standard input is empty")
    to_terminal = sys.stdout.isatty()

    def on_text(piece: str) -> None:
        sys.stdout.write(printable(piece) if to_terminal else piece)
        sys.stdout.flush()

    answer = client.ask(conversation.ask(question), options, on_text)
    sys.stdout.write("\n")
    sys.stderr.write(describe(answer) + "\n")


def running_url(root: Path | None = None) -> str:
    """Return the URL of the deployment that runs on this machine; without one, the default.

    Raises:
        ChatError: several run, none of them at the default URL.
    """
    found = (read_state(folder) for folder in sorted((root or run_root()).glob("*")))
    urls = [state.url for state in found if state is not None]
    if not urls or DEFAULT_URL in urls:
        return DEFAULT_URL
    if len(urls) > 1:
        raise ChatError(f"several deployments run here ({', '.join(urls)}): choose one with --url")
    return urls[0]
