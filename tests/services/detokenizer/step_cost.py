"""What a step of 256 rows costs the detokenizer: `python -m tests.services.detokenizer.step_cost`.

A measurement for people; nothing asserts times.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import TYPE_CHECKING

from common.models import resolve_model
from common.tokenization import load_text_model
from common.types import SubscriberId
from protos.gen.pando.v1 import detokenizer_pb2
from services.detokenizer.decoding import DecoderFactory
from services.detokenizer.session import Hub
from services.detokenizer.wire import deltas_to_wire, push_from_wire

if TYPE_CHECKING:
    from services.detokenizer.mailbox import Mailbox
    from services.detokenizer.session import PushSession

ROWS = 256
STEPS = 400


def main() -> None:
    """Print the median time of a step for plain rows, rows with stop strings and rows with log probabilities."""
    model = load_text_model(resolve_model("smollm2-135m-instruct"))
    decoders = DecoderFactory(model)
    ids = model.tokenizer.encode("The quick brown fox jumps over the lazy dog. 我能吞下玻璃而不伤身体。😀 " * 40).ids
    for name, stops, top in (
        ("plain", (), None),
        ("4 stop strings", ("\n\nUser:", "END", "<stop>", "###"), None),
        ("5 log probabilities", (), 5),
    ):
        times = asyncio.run(measure(Hub(decoders), ids, stops, top))
        parts = ", ".join(f"{part} {statistics.median(values) * 1e6:.0f}" for part, values in times.items())
        total = sum(statistics.median(values) for values in times.values())
        sys.stdout.write(f"{name}: {total * 1e6:.0f} µs per step of {ROWS} rows (µs: {parts})\n")


async def measure(hub: Hub, ids: list[int], stops: tuple[str, ...], top: int | None) -> dict[str, list[float]]:
    """Run steps through everything but the socket; return the seconds of each part."""
    session, mailbox = hub.open_session(), hub.subscribe(SubscriberId("gateway"))
    opens = [
        detokenizer_pb2.ChoiceOpen(
            handle=row, request_id=f"request-{row}", subscriber_id="gateway", stop_strings=stops, prompt_tokens=100
        )
        for row in range(ROWS)
    ]
    times: dict[str, list[float]] = {"parse": [], "apply": [], "encode": []}
    await step(session, mailbox, detokenizer_pb2.PushRequest(opens=opens).SerializeToString(), times)
    for index in range(STEPS):
        message = detokenizer_pb2.PushRequest(
            handles=range(ROWS), token_ids=[ids[(index + row) % len(ids)] for row in range(ROWS)]
        )
        if top is not None:
            for row in range(ROWS):
                logprob = message.logprobs.add(index=row).logprob
                logprob.top_token_ids.extend(range(top))
                logprob.top_logprobs.extend([-1.0] * top)
        await step(session, mailbox, message.SerializeToString(), times)
    return times


async def step(session: PushSession, mailbox: Mailbox, data: bytes, times: dict[str, list[float]]) -> None:
    """Take one message in and one out."""
    start = time.perf_counter()
    push = push_from_wire(detokenizer_pb2.PushRequest.FromString(data))
    parsed = time.perf_counter()
    session.apply(push)
    applied = time.perf_counter()
    if push.handles:
        deltas_to_wire(await mailbox.take()).SerializeToString()
        done = time.perf_counter()
        for name, value in (("parse", parsed - start), ("apply", applied - parsed), ("encode", done - applied)):
            times[name].append(value)


if __name__ == "__main__":
    main()
