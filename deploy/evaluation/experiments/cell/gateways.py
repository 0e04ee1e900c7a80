"""Gateways without clients: they subscribe, and send a request for each answer that has ended."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING

import orjson
import structlog
import uvloop

from common.errors import UnavailableError
from common.requests import GenerateRequest
from common.rpc.channel import open_channel
from common.rpc.stream import StreamLink, StreamSource, wait_until_accepted
from common.types import ReplyTo, RequestId, RequestOptions, StopConditions, Subject, SubscriberId, View
from deploy.evaluation.bench.prompts import WORDS
from deploy.evaluation.experiments.cell.plan import CellPlan, subscriber
from gateway.pipeline.wire import generate_to_wire
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "smollm2-135m-instruct"
COUNT_S = 0.5
RETRY_S = 1.0
# Applications, of which each has a prompt in common to all of its users: half of what they send.
APPLICATIONS = 20


@dataclass(slots=True)
class Counts:
    """The output that a simulated gateway has received."""

    messages: int = 0
    tokens: int = 0
    finishes: int = 0
    rejections: int = 0


class Prompts:
    """Draws prompts of a number of words, the first half of which is that of an application."""

    def __init__(self, words: int, seed: str) -> None:
        """Draw from `seed`; applications are the same for all seeds."""
        self._chance = random.Random(seed)
        shared, self._own = words // 2, words - words // 2
        self._shared = [" ".join(random.Random(number).choices(WORDS, k=shared)) for number in range(APPLICATIONS)]

    def draw(self) -> str:
        """Return the next prompt."""
        return f"{self._chance.choice(self._shared)} {' '.join(self._chance.choices(WORDS, k=self._own))}"


class SimulatedGateway:
    """One gateway."""

    def __init__(self, plan: CellPlan, number: int) -> None:
        """Prepare its streams to all tokenizers and detokenizers, which `run` opens."""
        self.counts = Counts()
        self._plan = plan
        self._number = number
        self._sent = count()
        # Where the output of requests goes that have not been admitted.
        self._waiting: dict[str, ReplyTo] = {}
        self._prompts = Prompts(plan.prompt_words, f"{number}")
        self._tokenizers = [self._link(plan.tokenizer(each)) for each in range(plan.tokenizers)]

    async def run(self) -> None:
        """Receive and send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self._tokenizers:
                tasks.create_task(link.run())
            for each in range(self._plan.detokenizers):
                tasks.create_task(self._subscribe(self._plan.detokenizer(each)))

    def _link(
        self, address: str
    ) -> StreamLink[tokenizer_pb2.TokenizerSubmitRequest, tokenizer_pb2.TokenizerSubmitResponse]:
        stub = tokenizer_pb2_grpc.TokenizerStub(open_channel(address))
        source = StreamSource(lambda: stub.Submit(), lambda: tokenizer_pb2.TokenizerSubmitRequest(heartbeat=True))
        return StreamLink("tokenizer", source, self._on_admissions)

    async def _subscribe(self, address: str) -> None:
        async with open_channel(address) as channel:
            stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
            name = SubscriberId(subscriber(self._number))
            call = stub.Subscribe(detokenizer_pb2.SubscribeRequest(subscriber_id=name), wait_for_ready=True)
            reply_to = ReplyTo(name, (await wait_until_accepted(call)).process)
            counts = self.counts
            async for message in call:
                counts.messages += bool(message.deltas)
                for delta in message.deltas:
                    counts.tokens += len(delta.token_ids)
                    if delta.HasField("finish"):
                        counts.finishes += 1
                        self._send(reply_to)

    def _send(self, reply_to: ReplyTo) -> None:
        """Send a request of a new user, to the tokenizers in turn."""
        number = next(self._sent)
        name = f"{self._number}-{number}"
        options = RequestOptions(stop=StopConditions(max_tokens=self._plan.answer_tokens, ignore_eos=True))
        view = View(Subject("tenant", name))
        request = GenerateRequest(RequestId(name), view, MODEL, self._prompts.draw(), options)
        message = tokenizer_pb2.TokenizerSubmitRequest(generates=[generate_to_wire(request, reply_to)])
        self._waiting[name] = reply_to
        try:
            self._tokenizers[number % len(self._tokenizers)].send(message)
        except UnavailableError:
            self._send_again(name)

    def _send_again(self, name: str) -> None:
        self.counts.rejections += 1
        asyncio.get_running_loop().call_later(RETRY_S, self._send, self._waiting.pop(name))

    def _on_admissions(self, message: tokenizer_pb2.TokenizerSubmitResponse) -> None:
        for admission in message.admissions:
            if admission.HasField("rejected"):
                self._send_again(admission.request_id)
            else:
                del self._waiting[admission.request_id]


def run_gateways(plan: CellPlan, first: int, number: int) -> None:
    """Be some gateways until the process ends."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    uvloop.run(_run(plan, range(first, first + number)))


async def _run(plan: CellPlan, numbers: range) -> None:
    gateways = {number: SimulatedGateway(plan, number) for number in numbers}
    async with asyncio.TaskGroup() as tasks:
        for gateway in gateways.values():
            tasks.create_task(gateway.run())
        while True:
            for number, gateway in gateways.items():
                _write(plan.counts(number), gateway.counts)
            await asyncio.sleep(COUNT_S)


def _write(path: Path, counts: Counts) -> None:
    """Replace a file as a whole."""
    part = path.with_suffix(".part")
    part.write_bytes(orjson.dumps(asdict(counts)))
    part.replace(path)


def read_counts(plan: CellPlan) -> Counts:
    """Return the sums over all simulated gateways."""
    total = Counts()
    for number in range(plan.gateways - 1):
        for name, value in orjson.loads(plan.counts(number).read_bytes()).items():
            setattr(total, name, getattr(total, name) + value)
    return total
