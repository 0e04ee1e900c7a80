"""`pando chat`: a conversation in the terminal, or one question from a script."""

from __future__ import annotations

import os
import sys
import uuid
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.cli.chat.client import ChatClient, ChatError, ChatHistory, ChatOptions, tls_context
from deploy.cli.chat.terminal import Terminal, describe, printable, read_from_terminal
from deploy.supervisor.state import read_state, run_root

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8000"
# At the API's default of 1, the output of a small model, such as the default one, is mostly incoherent.
DEFAULT_TEMPERATURE = 0.3
API_KEY_VARIABLE = "PANDO_API_KEY"
INTERRUPTED = 130  # the exit status of a process ended by SIGINT


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
    conversation = ChatHistory(arguments.system)
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
