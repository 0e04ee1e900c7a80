"""Prompts on the command line, as the model sees them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import grpc

from common.errors import ConfigurationError
from common.rpc.status import to_error
from deploy.inspection.connection import open_channel
from deploy.supervisor.state import find_state
from protos.gen.pando.v1 import tokenizer_pb2, tokenizer_pb2_grpc

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path

TIMEOUT_S = 30.0
# Two questions that have nothing in common: what their prompts share is the system prompt with the template around it.
QUESTIONS = ("A", "7?")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, whether it is a system prompt, the tokenizer that turns it into ids, and how to connect to that."""

    text: str
    is_system: bool
    tokenizer: str
    connect: Callable[[str], grpc.Channel]

    @staticmethod
    def of(arguments: argparse.Namespace) -> Prompt:
        """Return what `--system`, `--text` and their like say.

        Raises:
            ConfigurationError: a file cannot be read, or no tokenizer is known.
        """
        is_system = arguments.system is not None or arguments.system_file is not None
        given = arguments.system if is_system else arguments.text
        text = given if given is not None else _read(arguments.system_file if is_system else arguments.text_file)
        address = arguments.tokenizer or find_state(port=arguments.port).address_of("tokenizer", arguments.model)
        return Prompt(text, is_system, address, lambda address: open_channel(address, arguments))

    def token_ids(self) -> Sequence[int]:
        """Ask the tokenizer for the ids that every prompt with this one in front begins with.

        Raises:
            ConfigurationError: the tokenizer is away, or refuses the text.
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
        # What follows may take the last letters into its own first token.
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
