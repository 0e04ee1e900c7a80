"""Prompts on the command line, converted to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import grpc

from common.errors import ConfigurationError
from common.rpc.status import to_error
from deploy.cli.inspection.connection import open_channel
from deploy.supervisor.state import find_state
from protos.gen.pando.v1 import tokenizer_pb2, tokenizer_pb2_grpc

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path

TIMEOUT_S = 30.0
# Two questions without a common prefix: their prompts only share the system prompt and the template around it.
QUESTIONS = ("A", "7?")


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
