r"""Images: how many a second, first tokens after them, a chat about one, and text streams beside a load of them.

Text streams are watched alone, beside prompts of text and beside images, which come at the same times and have as many
prompt tokens: gaps beside images that are longer than those beside texts are due to encoding.

Run as `python -m deploy.evaluation.experiments.images deploy/evaluation/shapes/qwen2.5-vl-7b`, with
`--set model.load_format=dummy` where there are no weights; a directory that has no tokenizer gets a made-up one. On a
CPU, `deploy/evaluation/shapes/qwen2.5-vl-tiny` with `--size 224x224`. With `--roles prefill=1,decode=1`, images and
prompts are computed in one group, and the streams go on in another.

With `--url LABEL=URL`, once or more, servers are measured that run already, such as one of vLLM; they take turns at
each part. Each must serve the model under its directory's name; `--write-model` writes files that all can read:

    python -m deploy.evaluation.experiments.images deploy/evaluation/shapes/qwen2.5-vl-tiny --write-model model
    pando up --model model --model.served_name qwen2.5-vl-tiny --model.load_format dummy --model.dtype bfloat16 \
        --gateway.port 8401
    vllm serve model --served-model-name qwen2.5-vl-tiny --load-format dummy --dtype bfloat16 --port 8402 \
        --max-model-len 4096 --skip-mm-profiling --enable-prompt-tokens-details
    python -m deploy.evaluation.experiments.images deploy/evaluation/shapes/qwen2.5-vl-tiny --size 224x224 \
        --streams 4 --images 32 --concurrency 4 --url pando=http://localhost:8401 --url vllm=http://localhost:8402

Of a deployment that is started here, the processor time of each service for a new picture, and for a request about
known ones, is measured, too, with that of the processes that it has started: the tokenizer's includes decoding. The
system counts it in hundredths of a second, so that several samples and rounds are needed.

Pictures are random, sent as PNG in data URLs, and new in each request unless it is about the same one again. Parts take
turns: each round has one of each, or of `--parts`. Figures are printed, and written, after each part; no part begins
that would end after `--time-limit`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from deploy.evaluation.attack.seeing_model import save_shape
from deploy.evaluation.bench.client import AnswerReader
from deploy.evaluation.bench.cpu import parse_target
from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError, add_setting_arguments
from deploy.evaluation.bench.partial_results import Deadline, PartialResults, report, within_time
from deploy.evaluation.bench.transport import HttpClient
from deploy.evaluation.experiments.image_client import ImageClient, OtherProcess, RequestError
from deploy.evaluation.experiments.pipeline_shares import processor_seconds

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from deploy.evaluation.experiments.image_client import Message, PreparedRequest, TimedAnswer

SEVERAL = 4
# They begin alike, as instructions of an application do: pages of KV are found whole.
QUESTION, OTHER_QUESTION = (f"Look closely at what is to be seen: {end}?" for end in ("what is it", "which colours"))
# Ids of random prompts: bytes, or letters, of every tokenizer with bytes.
TEXT_IDS = range(32, 256)
TURNS = 10
ANSWER_TOKENS = 16
STREAM_PROMPT_BYTES = 128
STREAM_TOKENS = 1024
# Pixels of a picture whose colours are drawn together: photographs, too, change little from one to the next.
GRAIN = 8
POLL_S = 0.01
# For stopping the deployment.
RESERVE_S = 8.0
PARTS = (
    "images per second", "first tokens", "chat", "streams alone", "streams beside texts", "streams beside images",
)  # fmt: skip


def main() -> int:
    """Measure and print; write results where asked; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with config.json; with --url, or the name that is served")
    parser.add_argument("--size", type=size_of, default="1024x768", help="width and height in pixels (%(default)s)")
    parser.add_argument("--images", type=int, default=64, help="for images per second (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="of these requests (%(default)s)")
    parser.add_argument("--samples", type=int, default=5, help="single requests of each kind in a round (%(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="of text, with and without images (%(default)s)")
    parser.add_argument("--rate", type=float, default=4.0, help="images or texts a second beside them (%(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="for which they are watched (%(default)s)")
    parser.add_argument(
        "--url", action="append", default=[], metavar="[LABEL=]URL",
        help="a running server with OpenAI's API, in place of a deployment; repeat it to measure several in turns",
    )  # fmt: skip
    parser.add_argument("--encoders", type=int, default=0, help="workers that only encode images (%(default)s)")
    parser.add_argument(
        "--roles", help="groups of the deployment, as `pando up --roles` takes them: prefill=1,decode=1"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--repeats", type=int, default=3, help="rounds (%(default)s)")
    parser.add_argument("--write-model", type=Path, metavar="DIRECTORY", help="only write the files that are served")
    parser.add_argument("--label", help="name of the variant in the results file, such as that of other settings")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for all of it (%(default)s)")
    parser.add_argument("--json", type=Path)
    add_setting_arguments(parser)
    arguments = parser.parse_args()
    deadline = Deadline.after(arguments.time_limit)
    if arguments.write_model is not None:
        arguments.write_model.mkdir(parents=True, exist_ok=True)
        save_shape(json.loads((arguments.model / "config.json").read_text(encoding="utf-8")), arguments.write_model)
        return 0
    if arguments.url:
        if arguments.encoders or arguments.roles or arguments.config or arguments.overrides:
            of_launched = "--encoders, --roles, --config and --set"
            parser.error(f"{of_launched} are of a deployment that is started here: leave out --url")
        return measure_running(arguments, deadline)
    return measure_launched(arguments, deadline)


def measure_running(arguments: argparse.Namespace, deadline: Deadline) -> int:
    """Measure servers that run already; return the exit status."""
    # Of a directory, the deployments of this experiment serve its name.
    name = arguments.model.name if arguments.model.is_dir() else str(arguments.model)
    try:
        servers = [
            ImageServer(label or url, url, HttpClient(url), label or url)
            for label, url in map(parse_target, arguments.url)
        ]
    except ValueError as error:
        report(str(error))
        return 2
    return 1 if failures(measure(arguments, name, servers, deadline)) else 0


def failures(measurement: Coroutine[Any, Any, None]) -> bool:
    """Measure, and report requests that failed; return whether any did."""
    try:
        asyncio.run(measurement)
    except* RequestError as errors:
        report("\n".join(map(str, errors.exceptions)))
        failed = True
    else:
        failed = False
    return failed


def measure_launched(arguments: argparse.Namespace, deadline: Deadline) -> int:
    """Start a deployment and measure it; return the exit status."""
    encoders = f"encoders: {arguments.encoders}" if arguments.encoders else None
    roles = f"roles: {arguments.roles}" if arguments.roles else None
    label = ", ".join(filter(None, (roles, encoders, arguments.label))) or None
    with TemporaryDirectory(prefix="pando-images-") as folder:
        directory = served_directory(arguments.model, Path(folder))
        settings = (f"model.reference={directory}", f"model.served_name={arguments.model.name}", "model.images=on")
        deployment = LaunchedDeployment(
            arguments.config, arguments.overrides, settings, roles=arguments.roles, encoders=arguments.encoders,
            start_timeout_s=deadline.left_s,
        )  # fmt: skip
        began_at, failed = time.monotonic(), False
        try:
            with deployment:
                report(f"a deployment serves after {time.monotonic() - began_at:.1f} s")
                url = deployment.url
                servers = [ImageServer("the deployment", url, HttpClient(url), label, deployment.process_ids)]
                if failed := failures(measure(arguments, arguments.model.name, servers, deadline)):
                    report(deployment.last_lines())
        except LaunchError as error:
            report(str(error))
            return 1
    return 1 if failed else 0


@dataclass(frozen=True, slots=True)
class ImageServer:
    """A server under test; `label` distinguishes its results from those of others.

    `process_ids` are those of its services, by name, if it was started here.
    """

    name: str
    url: str
    http: HttpClient
    label: str | None
    process_ids: Mapping[str, int] = field(default_factory=dict)


async def measure(
    arguments: argparse.Namespace, model: str, servers: Sequence[ImageServer], deadline: Deadline
) -> None:
    """Warm up, then run all parts of all rounds for which there is time; servers take turns at each part.

    Raises:
        RequestError: a request failed, or did not end in time; alone or in an exception group.
    """
    measurements: dict[str, ImageMeasurement] = {}
    async with AsyncExitStack() as stack:
        for server in servers:
            client = ImageClient(server.http, model, deadline)
            results = PartialResults("images", arguments.model.name, arguments.json, label=server.label)
            other = await stack.enter_async_context(OtherProcess(server.url, model, deadline))
            measurements[server.name] = ImageMeasurement(arguments, client, other, results, server.process_ids)
        for name, measurement in measurements.items():
            began_at = time.monotonic()
            await measurement.warm_up()
            report(f"warm-up of {name}: {time.monotonic() - began_at:.1f} s")
        chosen = [name for name in PARTS if name in arguments.parts]
        for part in within_time(chosen * arguments.repeats, deadline, RESERVE_S):
            for name, measurement in measurements.items():
                if len(measurements) > 1:
                    report(f"{name}:")
                await measurement.run(part)


class ImageMeasurement:
    """The parts of a round. Each user is new, unless a part is about what it finds of its own requests."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        client: ImageClient,
        other: OtherProcess,
        results: PartialResults,
        process_ids: Mapping[str, int],
    ) -> None:
        """Stream with `client`; `other` sends what is asked beside the streams."""
        self._arguments = arguments
        self._process_ids = process_ids
        self._client = client
        self._other = other
        self._results = results
        self._users = (f"user {number}" for number in count())
        # The p99 of gaps beside texts, if they have been watched since the last gaps beside images.
        self._beside_texts_ms: float | None = None

    async def warm_up(self) -> None:
        """Send requests of all kinds, so that what is compiled or captured at their first use is ready."""
        pictures = self._pictures(self._arguments.concurrency + SEVERAL)
        await self._ask_all(pictures[SEVERAL:])
        await self._client.ask(next(self._users), [about(pictures[:SEVERAL])], 1)
        await self._watch_streams((), self._arguments.seconds / 4)

    async def run(self, part: str) -> None:
        """Measure one of `PARTS`."""
        measure_part = (
            self.throughput, self.first_tokens, self.chat, self.streams_alone, self.streams_beside_texts,
            self.streams_beside_images,
        )  # fmt: skip
        await dict(zip(PARTS, measure_part, strict=True))[part]()

    async def throughput(self) -> None:
        """Requests of one image and one output token each, as many at once as asked."""
        pictures = self._pictures(self._arguments.images)
        used, began_at = processor_seconds(self._process_ids), time.monotonic()
        await self._ask_all(pictures)
        rate = len(pictures) / (time.monotonic() - began_at)
        self._results.add(f"throughput, {self._arguments.concurrency} at once", "images/s", [rate])
        self._add_processor_time(_since(used, self._process_ids), len(pictures), "throughput", "ms/image")

    def _add_processor_time(self, spent_s: Mapping[str, float], count: int, part: str, unit: str) -> None:
        """Add the processor time that each service has spent for each of `count` pictures or requests."""
        for name, seconds in spent_s.items():
            self._results.add(f"processor time of the {name}, {part}", unit, [seconds / count * 1e3])

    async def first_tokens(self) -> None:
        """Single requests with new images, and with the same ones and another question."""
        for number, title in ((1, "1 image"), (SEVERAL, f"{SEVERAL} images")):
            kinds: dict[str, list[TimedAnswer]] = {f"{title}, new": [], f"{title}, again": []}
            spent: Counter[str] = Counter()
            for _ in range(self._arguments.samples):
                pictures, user = self._pictures(number), next(self._users)
                kinds[f"{title}, new"].append(await self._client.ask(user, [about(pictures)], 1))
                used = processor_seconds(self._process_ids)
                kinds[f"{title}, again"].append(await self._client.ask(user, [about(pictures, OTHER_QUESTION)], 1))
                spent.update(_since(used, self._process_ids))
            self._add_processor_time(spent, self._arguments.samples, f"{title}, again", "ms/request")
            for kind, answers in kinds.items():
                self._results.add(f"TTFT, {kind}", "ms", [answer.first_token_ms for answer in answers])
                self._results.add(f"prompt, {kind}", "tokens", [answer.prompt_tokens for answer in answers])
                self._results.add(f"cached, {kind}", "tokens", [answer.cached_tokens for answer in answers])

    async def chat(self) -> None:
        """Ask ten questions about one image, each with all that was said before."""
        user, turn = next(self._users), about(self._pictures(1))
        messages, answers = [turn], []
        for number in range(TURNS):
            answer = await self._client.ask(user, messages, ANSWER_TOKENS)
            answers.append(answer)
            said = {"role": "assistant", "content": answer.text or "Nothing."}
            messages += [said, {"role": "user", "content": f"What else, apart from these {number + 1} things?"}]
        title = f"turns 2 to {TURNS} of a chat"
        self._results.add(f"TTFT, {title}", "ms", [answer.first_token_ms for answer in answers[1:]])
        self._results.add(f"prompt, {title}", "tokens", [answer.prompt_tokens for answer in answers[1:]])
        self._results.add(f"cached, {title}", "tokens", [answer.cached_tokens for answer in answers[1:]])

    async def streams_alone(self) -> None:
        """Watch text streams without other requests."""
        gaps, _ = await self._watch_streams((), self._arguments.seconds)
        self._add_gaps("alone", gaps)

    async def streams_beside_texts(self) -> None:
        """Watch text streams beside prompts of text that have as many tokens as one image with its question.

        They come when images do otherwise, have one output token each, and are random, so that nothing of them is
        cached.
        """
        like = await self._client.ask(next(self._users), [about(self._pictures(1))], 1)
        requests = [
            self._client.completion(next(self._users), random_ids(like.prompt_tokens), 1) for _ in range(self._arrivals)
        ]
        gaps, answers = await self._watch_streams(requests, self._arguments.seconds)
        self._beside_texts_ms = self._add_gaps(f"beside {self._arguments.rate:g} texts/s", gaps)
        self._add_answers("text", answers)

    async def streams_beside_images(self) -> None:
        """Watch text streams beside requests of one image and one output token each, at the rate that was asked."""
        requests = [
            self._client.chat(next(self._users), [about([picture])], 1) for picture in self._pictures(self._arrivals)
        ]
        gaps, answers = await self._watch_streams(requests, self._arguments.seconds)
        beside_images_ms = self._add_gaps(f"beside {self._arguments.rate:g} images/s", gaps)
        self._add_answers("1 image", answers)
        if self._beside_texts_ms is not None:
            metric = f"ITL p99, {self._arguments.streams} streams, beside images / beside texts"
            self._results.add(metric, "x", [beside_images_ms / self._beside_texts_ms])
        self._beside_texts_ms = None

    @property
    def _arrivals(self) -> int:
        """Requests that come while streams are watched."""
        return max(int(self._arguments.rate * self._arguments.seconds), 1)

    def _add_gaps(self, title: str, gaps: Sequence[float]) -> float:
        """Add percentiles of gaps, given in seconds; return the last one in ms."""
        for percent in (50, 90, 99):
            metric = f"ITL p{percent}, {self._arguments.streams} streams {title}"
            value = float(np.percentile(gaps, percent)) * 1e3
            self._results.add(metric, "ms", [value])
        return value

    def _add_answers(self, title: str, answers: Sequence[TimedAnswer]) -> None:
        beside = f"{title}, new, beside {self._arguments.streams} streams"
        self._results.add(f"TTFT, {beside}", "ms", [answer.first_token_ms for answer in answers])
        self._results.add(f"prompt, {beside}", "tokens", [answer.prompt_tokens for answer in answers])
        self._results.add(f"cached, {beside}", "tokens", [answer.cached_tokens for answer in answers])

    async def _ask_all(self, pictures: Sequence[str]) -> None:
        """Ask about each of the pictures, some at once."""
        left = iter(pictures)

        async def ask_next() -> None:
            for picture in left:
                await self._client.ask(next(self._users), [about([picture])], 1)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._arguments.concurrency):
                group.create_task(ask_next())

    async def _watch_streams(
        self, requests: Sequence[PreparedRequest], seconds: float
    ) -> tuple[list[float], list[TimedAnswer]]:
        """Return the seconds between chunks of text streams, and the answers to requests that are sent meanwhile.

        All streams have begun when the first request is sent, by another process; one that ends is followed by another.
        """
        await self._other.hold(requests)
        readers: list[AnswerReader] = []

        async def stream() -> None:
            while True:
                readers.append(reader := AnswerReader(time.monotonic))
                text = base64.b85encode(np.random.default_rng().bytes(STREAM_PROMPT_BYTES * 4 // 5)).decode()
                await self._client.ask(next(self._users), [{"role": "user", "content": text}], STREAM_TOKENS, reader)

        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(stream()) for _ in range(self._arguments.streams)]
            while len(readers) < len(streams) or not all(reader.chunks_s for reader in readers[: len(streams)]):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            began_at = time.monotonic()
            answers = group.create_task(self._other.send(self._arguments.rate, began_at))
            await asyncio.sleep(began_at + seconds - time.monotonic())
            ended_at = time.monotonic()
            for each in streams:
                each.cancel()
        gaps = [
            later - earlier
            for reader in readers
            for earlier, later in pairwise(reader.chunks_s)
            if began_at <= earlier and later <= ended_at
        ]
        return gaps, answers.result()

    def _pictures(self, number: int) -> list[str]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(picture_url, [self._arguments.size] * number))


def _since(used: Mapping[str, float], process_ids: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds of a processor that each service has spent since it had `used` so many."""
    return {name: seconds - used[name] for name, seconds in processor_seconds(process_ids).items()}


def random_ids(count: int) -> list[int]:
    """Return so many random ids of tokens."""
    return [int(number) for number in np.random.default_rng().integers(TEXT_IDS.start, TEXT_IDS.stop, count)]


def about(pictures: Sequence[str], question: str = QUESTION) -> Message:
    """Return a message with pictures, by their data URLs, and a question after them."""
    parts: list[Message] = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def picture_url(size: tuple[int, int]) -> str:
    """Return a random picture of a width and a height in pixels as a PNG file in a data URL."""
    width, height = size
    shape = (-(-height // GRAIN), -(-width // GRAIN), 3)
    drawn = Image.fromarray(np.random.default_rng().integers(0, 256, shape, np.uint8))
    file = io.BytesIO()
    drawn.resize(size, Image.Resampling.BICUBIC).save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def served_directory(model: Path, folder: Path) -> Path:
    """Return the directory of a model; one with nothing but config.json is completed in `folder`."""
    if (model / "tokenizer.json").exists():
        return model
    save_shape(json.loads((model / "config.json").read_text(encoding="utf-8")), folder)
    return folder


def size_of(text: str) -> tuple[int, int]:
    """Read WIDTHxHEIGHT.

    Raises:
        ValueError: it is not two numbers.
    """
    width, height = map(int, text.split("x"))
    return width, height


if __name__ == "__main__":
    sys.exit(main())
