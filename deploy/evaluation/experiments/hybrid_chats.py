"""Chats of several turns with models that have recurrent layers: which share of what could be cached is found.

Run as `python -m deploy.evaluation.experiments.hybrid_chats`. By default, a small model in which three of four layers
are recurrent and one of the same size whose layers all are attention, both with random weights, on a CPU: what is found
depends on the tokens of prompts and on the sizes of states and pages, and not on weights. Other models are named by
directories with their config.json:

    python -m deploy.evaluation.experiments.hybrid_chats deploy/evaluation/shapes/qwen3.5-9b-4-layers --repeats 1

Users of one application, whose system prompt they share, have chats of several turns; all that are there send their
turns at the same time. Some begin when the first ones have ended, so that the system prompt has become shared before.
Tokens that could be cached are those with which a prompt begins as what was computed of the chat's last turn does,
prompt and answer; in the first turn of those who begin later, the system prompt. Prompts are token ids, so that answers
come back as they were. Chats are of two kinds, with users of their own:

- `answers repeated`: each prompt begins with all of the last one and its answer.
- `reasoning left out`: prompts end with two tokens that open the answer's reasoning, and later prompts contain neither
  these nor the first half of the answer, as chat templates have it. So they continue within the last prompt.

Beside what a model with recurrent layers finds, it is computed what it would find if states were saved in regular
distances alone, and not at the ends of prompts and answers as well.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError, add_setting_arguments
from deploy.evaluation.bench.partial_results import Deadline, PartialResults, report, within_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHAPES = Path(__file__).parents[1] / "shapes"
DEFAULT_MODELS = tuple(SHAPES / name for name in ("qwen3.5-tiny", "qwen3-tiny"))
KINDS = REPEATED, LEFT_OUT = ("answers repeated", "reasoning left out")
# Ids of random prompts, and of the tokens that open reasoning.
TEXT_IDS, OPENING = range(16, 4096), (8, 9)
# So many users begin first: what they have in common becomes shared by default.
FIRST_USERS = 3
# Longer than the time between boundaries at which prompts become shared.
SHARING_S = 2.5
# Of the prompt by which regular snapshots are found.
PROBE_TOKENS = 6000
# For stopping.
RESERVE_S = 10.0


class Chat:
    """A user's chat: its next prompt, and which tokens of that the server has computed before."""

    def __init__(self, user: str, system: Sequence[int], kind: str, *, is_system_known: bool) -> None:
        """Begin with a system prompt; `is_system_known`: others have computed it."""
        self.user = user
        self._kind = kind
        self._history = list(system)
        self._computed = list(system) if is_system_known else []
        self._opening = list(OPENING) if kind == LEFT_OUT else []
        self.prompt: list[int] = []

    def ask(self, message: Sequence[int]) -> int:
        """Set the next prompt; return how many of its tokens could be cached."""
        self._history += message
        self.prompt = [*self._history, *self._opening]
        return common_length(self.prompt[:-1], self._computed)

    def take(self, answer: Sequence[int]) -> None:
        """Take the answer in; its last token is not computed yet."""
        self._computed = [*self.prompt, *answer[:-1]]
        self._history += answer[len(answer) // 2 if self._kind == LEFT_OUT else 0 :]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass
class ChatHits:
    """Tokens of a round, by turn: those that could be cached, and those that were; only turns where some could."""

    possible: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, list[int]] = field(default_factory=dict)

    def add(self, turn: int, possible: int, cached: int) -> None:
        """Add a prompt."""
        if possible:
            self.possible.setdefault(turn, []).append(possible)
            self.cached.setdefault(turn, []).append(cached)

    def share(self, turns: Iterable[int]) -> float:
        """Return the percentage that was cached of what could be."""
        turns = list(turns)
        return _percentage((self.cached[turn] for turn in turns), (self.possible[turn] for turn in turns))

    def share_at_intervals(self, turns: Iterable[int], interval: int) -> float:
        """Return the percentage that would be cached with states after each `interval` tokens alone."""
        possible = [self.possible[turn] for turn in turns]
        return _percentage(([each // interval * interval for each in row] for row in possible), possible)


def _percentage(parts: Iterable[Iterable[int]], wholes: Iterable[Iterable[int]]) -> float:
    return 100 * sum(sum(row) for row in parts) / sum(sum(row) for row in wholes)


class ChatLoad:
    """The chats of one deployment, in rounds with users and a system prompt of their own."""

    def __init__(self, client: httpx.AsyncClient, model: str, arguments: argparse.Namespace) -> None:
        self._client = client
        self._model = model
        self._arguments = arguments
        self._random = random.Random(arguments.seed)
        self._rounds = 0

    async def interval(self) -> int | None:
        """Return the distance of regular snapshots in tokens; None if any page can be continued from.

        Raises:
            httpx.HTTPError: a request failed.
        """
        prompt = self._text(PROBE_TOKENS)
        await self._send("probe", prompt, 1)
        # Two pages before the snapshot at the end; then before each one that was found.
        length, found = len(prompt) - 64, 0
        _, cached = await self._send("probe", prompt[:length], 1)
        if cached > length - 64:
            return None
        while cached:
            found, length = cached, cached
            _, cached = await self._send("probe", prompt[:length], 1)
        return found or None

    async def round(self, kind: str) -> ChatHits:
        """Have all chats of one kind.

        Raises:
            httpx.HTTPError: a request failed.
        """
        self._rounds += 1
        found, system = ChatHits(), self._text(self._arguments.system_tokens)
        users = [f"user {number} of round {self._rounds}" for number in range(self._arguments.users)]
        await self._have([Chat(user, system, kind, is_system_known=False) for user in users[:FIRST_USERS]], found)
        await asyncio.sleep(SHARING_S)
        await self._have([Chat(user, system, kind, is_system_known=True) for user in users[FIRST_USERS:]], found)
        return found

    async def _have(self, chats: Sequence[Chat], found: ChatHits) -> None:
        for turn in range(1, self._arguments.turns + 1):
            await asyncio.gather(*(self._take_turn(chat, turn, found) for chat in chats))

    async def _take_turn(self, chat: Chat, turn: int, found: ChatHits) -> None:
        least = self._arguments.message_tokens // 2
        possible = chat.ask(self._text(self._random.randint(least, 3 * least)))
        answer, cached = await self._send(chat.user, chat.prompt, self._arguments.answer_tokens)
        chat.take(answer)
        found.add(turn, possible, cached)

    def _text(self, tokens: int) -> list[int]:
        return self._random.choices(TEXT_IDS, k=tokens)

    async def _send(self, user: str, prompt: Sequence[int], tokens: int) -> tuple[list[int], int]:
        """Return the answer to a prompt, and how many tokens of this were cached."""
        body = {
            "model": self._model, "user": user, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
            "temperature": 1, "seed": self._random.randrange(1 << 31), "return_token_ids": True,
        }  # fmt: skip
        content = (await self._client.post("/v1/completions", json=body)).raise_for_status().json()
        answer: list[int] = content["choices"][0]["token_ids"]
        return answer, content["usage"]["prompt_tokens_details"]["cached_tokens"]


def main() -> int:
    """Measure and print; write results where asked; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=DEFAULT_MODELS, help="directories with config.json")
    parser.add_argument("--users", type=int, default=8, help=f"of whom {FIRST_USERS} begin first (%(default)s)")
    parser.add_argument("--turns", type=int, default=10, help="of each chat (%(default)s)")
    parser.add_argument("--system-tokens", type=int, default=500, help="(%(default)s)")
    parser.add_argument("--message-tokens", type=int, default=150, help="of a user, on average (%(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for all of it (%(default)s)")
    parser.add_argument("--json", type=Path)
    add_setting_arguments(parser)
    arguments = parser.parse_args()
    if arguments.users <= FIRST_USERS or arguments.turns < 2:
        parser.error(f"more than {FIRST_USERS} users and two turns or more are needed")
    deadline = Deadline.after(arguments.time_limit)
    return max(measure_model(path, arguments, deadline) for path in arguments.models)


def measure_model(path: Path, arguments: argparse.Namespace, deadline: Deadline) -> int:
    """Start a deployment of a model and measure it; return the exit status."""
    settings = (f"model.reference={path}", "model.load_format=dummy", "scheduler.device_pages=4096")
    began_at = time.monotonic()
    try:
        with LaunchedDeployment(
            arguments.config, arguments.overrides, settings, start_timeout_s=deadline.left_s
        ) as deployment:
            report(f"{path.name} serves after {time.monotonic() - began_at:.1f} s")
            asyncio.run(measure(deployment.url, path.name, arguments, deadline))
    except (LaunchError, httpx.HTTPError) as error:
        report(f"{type(error).__name__}: {error}")
        return 1
    return 0


async def measure(url: str, model: str, arguments: argparse.Namespace, deadline: Deadline) -> None:
    """Have chats of both kinds in turns.

    Raises:
        httpx.HTTPError: a request failed, or took longer than there was time.
    """
    async with httpx.AsyncClient(base_url=url, timeout=deadline.left_s, trust_env=False) as client:
        load = ChatLoad(client, model, arguments)
        interval = await load.interval()
        results = {kind: PartialResults("hybrid_chats", model, arguments.json, label=kind) for kind in KINDS}
        for kind in within_time(KINDS * arguments.repeats, deadline, RESERVE_S):
            report(f"{model}, {kind}:")
            add(results[kind], await load.round(kind), arguments.turns, interval)


def add(results: PartialResults, found: ChatHits, turns: int, interval: int | None) -> None:
    """Add the figures of a round."""
    for turn in range(1, turns + 1):
        results.add(f"turn {turn}: found", "%", [found.share([turn])])
    later = range(2, turns + 1)
    results.add(f"turns 2 to {turns}: found", "%", [found.share(later)])
    if interval is not None:
        results.add("distance of regular snapshots", "tokens", [interval])
        results.add(f"turns 2 to {turns}: found with these alone", "%", [found.share_at_intervals(later, interval)])


if __name__ == "__main__":
    sys.exit(main())
