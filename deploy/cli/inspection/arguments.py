"""Views, subjects and prompts on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import grpc

from common.errors import ConfigurationError
from common.rpc.status import to_error
from deploy.cli.inspection.connection import open_channel
from deploy.supervisor.state import find_state
from protos.gen.pando.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path

TIMEOUT_S = 30.0
# Two questions without a common prefix: their prompts only share the system prompt and the template around it.
QUESTIONS = ("A", "7?")


@dataclass(frozen=True, slots=True)
class Filter:
    """Selection of one view, by its identity or its fingerprint; without either, all nodes are shown."""

    view: common_pb2.View | None = None
    fingerprint: str | None = None

    @staticmethod
    def of(arguments: argparse.Namespace) -> Filter:
        """Return the filter from `--view` and `--salt`, or from `--fingerprint`.

        Raises:
            ConfigurationError: there is a salt without a view, or the view is malformed.
        """
        if arguments.view is None:
            if arguments.salt:
                raise ConfigurationError("--salt requires --view")
            return Filter(None, arguments.fingerprint)
        view = common_pb2.View(subject=parse_subject(arguments.view), salt=arguments.salt)
        return Filter(view, arguments.fingerprint)


def parse_subject(text: str) -> common_pb2.Subject:
    """Parse a subject of the form `tenant/kind/name`; names may contain slashes, in tenants written as %2F.

    Raises:
        ConfigurationError: a part is missing.
    """
    tenant, _, name = text.partition("/")
    if not tenant or not name:
        raise ConfigurationError(
            f"{text!r} is not a TENANT/SUBJECT such as acme/user/ann, acme/key/KEYID or default/local; "
            "without API keys the tenant is `default`"
        )
    return common_pb2.Subject(tenant=tenant.replace("%2F", "/").replace("%25", "%"), name=name)


def subject_text(subject: common_pb2.Subject) -> str:
    """Return a subject in the form that `parse_subject` accepts."""
    tenant = subject.tenant.replace("%", "%25").replace("/", "%2F")
    return f"{tenant}/{subject.name}"


def name_of(view: common_pb2.View | None, fingerprint: str) -> str:
    """Return the text to print for a view: its names if the scheduler returned them, otherwise its fingerprint."""
    if view is None:
        return f"view:{fingerprint}"
    return f"{subject_text(view.subject)} ({view.salt})" if view.salt else subject_text(view.subject)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, whether it is a system prompt, the address of a tokenizer, and a function that connects to it."""

    text: str
    is_system: bool
    tokenizer: str
    connect: Callable[[str], grpc.Channel]

    @staticmethod
    def of(arguments: argparse.Namespace) -> Prompt:
        """Return the prompt from `--system`, `--system-file`, `--text` or `--text-file`.

        Raises:
            ConfigurationError: a file cannot be read, or no tokenizer is given or running.
        """
        is_system = arguments.system is not None or arguments.system_file is not None
        given = arguments.system if is_system else arguments.text
        text = given if given is not None else _read(arguments.system_file if is_system else arguments.text_file)
        address = arguments.tokenizer or find_state(port=arguments.port).address_of("tokenizer", arguments.model)
        return Prompt(text, is_system, address, lambda address: open_channel(address, arguments))

    def token_ids(self) -> Sequence[int]:
        """Return the ids with which every prompt that starts with this text begins, computed by the tokenizer.

        Raises:
            ConfigurationError: the tokenizer is unreachable or refuses the text.
        """
        with self.connect(self.tokenizer) as channel:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            try:
                first, second = (self._encode(stub, question) for question in QUESTIONS)
            except grpc.RpcError as error:
                raise ConfigurationError(f"the tokenizer at {self.tokenizer}: {to_error(error).message}") from error
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]

    def _encode(self, stub: tokenizer_pb2_grpc.TokenizerStub, question: str) -> Sequence[int]:
        if self.is_system:
            return stub.RenderChat(_chat(self.text, question), timeout=TIMEOUT_S).ids
        # The following text may change the tokenization of the last letters.
        request = tokenizer_pb2.TokenizeRequest(text=self.text + question, add_special_tokens=True)
        return stub.Tokenize(request, timeout=TIMEOUT_S).ids


def _chat(system: str, question: str) -> tokenizer_pb2.RenderChatRequest:
    messages = [
        tokenizer_pb2.ChatMessage(role="system", content=system),
        tokenizer_pb2.ChatMessage(role="user", content=question),
    ]
    return tokenizer_pb2.RenderChatRequest(chat=tokenizer_pb2.ChatPrompt(messages=messages, add_generation_prompt=True))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
