"""Every layout of a group gives the answers of a single rank: random requests to tiny models, while services die."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
import torch

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings, WorkerSettings
from common.settings.scheduler import DataParallelSettings, HostTierSettings
from common.types import GroupRole
from deploy.supervisor.layout import PlannedGroup, Replicas
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.byte_models import save_byte_model
from tests.e2e.conftest import serve
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.e2e.served import Served

# Variables that set the number of requests to all layouts together, and what draws them.
REQUESTS, SEED = "LAYOUT_REQUESTS", "LAYOUT_SEED"
CLIENTS = 6
# A service is killed once so many requests have been answered since the kill before, so that no request sees three.
REQUESTS_PER_KILL = 60
RECOVERY_S = 180.0
# Requests that are refused while a service restarts are repeated for so long, as SDKs do.
PATIENCE_S = 120.0
# Longer prompts of groups with roles are computed in the group for that.
PREFILL_TOKENS = 48
# Ranks add the parts of a product in another order than one alone. Two tokens may change places if they are as likely
# as each other to within this much: differences of logits, and of cumulative probabilities.
TIE_LOGIT, TIE_PROBABILITY = 1e-3, 1e-3
LOGPROB_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a model is laid out over ranks and groups; `is_exact`: it computes all sums in the order of a single rank."""

    family: str
    ranks: int = 1
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[PlannedGroup, ...] = (PlannedGroup(),)
    is_exact: bool = False


ONE = {"dense": "qwen3", "mixture": "qwen3 moe"}
DIVIDED = (PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE))
WIDE_PREFILL = (PlannedGroup(GroupRole.PREFILL, 2), PlannedGroup(GroupRole.DECODE, 1))
WIDE_DECODE = (PlannedGroup(GroupRole.PREFILL, 1), PlannedGroup(GroupRole.DECODE, 2))
EXPERTS = {"expert_parallel": True}
GROUPS_OF_TWO = {"data_parallel": DataParallelSettings(size=2)}
ARRANGEMENTS = {
    "dense, prefill and decode apart": Arrangement("dense", groups=DIVIDED, is_exact=True),
    "dense, prefill with two ranks": Arrangement("dense", groups=WIDE_PREFILL),
    "dense, decode with two ranks": Arrangement("dense", groups=WIDE_DECODE),
    "dense, two stages": Arrangement("dense", scheduler={"pipeline_parallel": 2}, is_exact=True),
    "dense, tensor parallel": Arrangement("dense", ranks=2),
    "dense, tensor parallel in two stages": Arrangement("dense", 2, {"pipeline_parallel": 2}),
    "mixture, prefill and decode apart": Arrangement("mixture", groups=DIVIDED, is_exact=True),
    "mixture, two stages": Arrangement("mixture", scheduler={"pipeline_parallel": 2}, is_exact=True),
    "mixture, tensor parallel": Arrangement("mixture", ranks=2),
    "mixture, prefill with two ranks": Arrangement("mixture", groups=WIDE_PREFILL),
    "mixture, expert parallel": Arrangement("mixture", ranks=2, scheduler=EXPERTS),
    "mixture, expert parallel, prefill and decode apart": Arrangement("mixture", 2, EXPERTS, DIVIDED),
    "mixture, data parallel": Arrangement("mixture", scheduler=GROUPS_OF_TWO, groups=(PlannedGroup(), PlannedGroup())),
    "mixture, data parallel, prefill and decode apart": Arrangement("mixture", 1, GROUPS_OF_TWO, DIVIDED),
    "mixture, expert parallel in two stages": Arrangement("mixture", 2, {**EXPERTS, "pipeline_parallel": 2}),
}


@dataclass(frozen=True, slots=True)
class Tally:
    """Requests, kills, refusals and ties of one layout, or of several together."""

    requests: int
    kills: int
    refusals: int
    ties: int

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(own + its for own, its in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.kills} kills, {self.refusals} refusals, {self.ties} ties"


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish: str

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Answer:
        choice = content["choices"][0]
        told = choice.get("logprobs") or {}
        ids, text = tuple(choice["token_ids"]), choice["text"]
        return cls(ids, text, tuple(told.get("token_logprobs") or ()), choice["finish_reason"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model and a mixture of experts, with a tokenizer of bytes."""
    return {kind: save_byte_model(tmp_path_factory.mktemp(kind), family) for kind, family in ONE.items()}


@pytest.fixture(scope="module")
def tallies() -> list[Tally]:
    """Those of the layouts that have passed."""
    return []


@contextmanager
def served_as(arrangement: Arrangement, checkpoint: Path, root: Path) -> Iterator[Served]:
    scheduler: dict[str, Any] = {**arrangement.scheduler, "max_rows": 8, "max_step_tokens": 96}
    if len(arrangement.groups) > 1:
        scheduler |= {"host_tier": HostTierSettings(pages=512), "prefill_min_tokens": PREFILL_TOKENS}
    settings = Settings(
        model=ModelSettings(reference=str(checkpoint), dtype="float32", kv_dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(**scheduler),
        worker=WorkerSettings(threads=1),
    )
    yield from serve(settings, root, arrangement.ranks, Replicas(groups=arrangement.groups))


def requests_of(arrangement: str, count: int) -> list[dict[str, Any]]:
    """Return random requests: greedy and seeded, some with common beginnings, stops and log probabilities."""
    draw = random.Random(f"{os.environ.get(SEED, '0')} {arrangement}")
    beginnings = [_ids(draw, draw.randint(16, 160)) for _ in range(12)]
    return [_request(draw, beginnings) for _ in range(count)]


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(256) for _ in range(count)]


def _request(draw: random.Random, beginnings: Sequence[list[int]]) -> dict[str, Any]:
    prompt = (draw.choice(beginnings) if draw.random() < 0.6 else []) + _ids(draw, draw.randint(1, 96))
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": draw.randint(1, 24), "user": draw.choice("abc"), "return_token_ids": True,
    }  # fmt: skip
    body |= {"temperature": 0} if draw.random() < 0.5 else {"temperature": draw.choice((0.5, 0.8, 1.0, 1.5))}
    body["seed"] = draw.randrange(1 << 31)
    if draw.random() < 0.3:
        body["stop"] = [chr(draw.randrange(32, 127)) for _ in range(4)]
    if draw.random() < 0.3:
        body["stop_token_ids"] = _ids(draw, 8)
    if draw.random() < 0.3:
        body["ignore_eos"] = True
    if draw.random() < 0.4:
        body["logprobs"] = draw.randint(0, 3)
    return body


class Load:
    """Clients that send requests at the same time, each of which begins with the next one."""

    def __init__(self, served: Served, bodies: Sequence[Mapping[str, Any]]) -> None:
        self.answers: list[Answer | None] = [None] * len(bodies)
        self.refusals = 0
        self._has_ended = False
        self._served = served
        self._bodies = bodies
        self._lock = threading.Lock()

    @property
    def answered(self) -> int:
        return sum(answer is not None for answer in self.answers)

    def run(self, disturb: Callable[[Load], None] = lambda _: None) -> list[Answer]:
        """Send all requests while `disturb` runs."""
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            disturbing = pool.submit(disturb, self)
            try:
                answers = list(pool.map(self._send, range(len(self._bodies))))
            finally:
                self._has_ended = True
            disturbing.result()
        return answers

    def wait_for(self, answered: int) -> bool:
        """Wait for a number of answers; return False if the load has ended before."""
        wait_until(lambda: self._has_ended or self.answered >= answered, timeout_s=3600)
        return not self._has_ended

    def _send(self, index: int) -> Answer:
        body = {"model": self._served.model, **self._bodies[index]}
        patient_until = time.monotonic() + PATIENCE_S
        with self._served.http() as http:
            while True:
                answer = http.post("/v1/completions", json=body)
                if answer.status_code not in (429, 503) or time.monotonic() > patient_until:
                    break
                with self._lock:
                    self.refusals += 1
                time.sleep(float(answer.headers.get("Retry-After", "1")))
        assert answer.status_code == httpx.codes.OK, f"request {index}: {answer.status_code} {answer.text}"
        read = self.answers[index] = Answer.read(answer.json())
        return read


class Killer:
    """Kills workers and schedulers, one after the other, each once all groups serve again."""

    def __init__(self, served: Served, seed: str) -> None:
        self.killed: list[str] = []
        # Most pages that the last group has read from others in one life of its scheduler.
        self.fetched = 0
        self._served = served
        self._random = random.Random(seed)
        names = [spec.name for spec in served.deployment.layout.services]
        self.schedulers = [name for name in names if name.startswith("scheduler")]
        self._names = [*self.schedulers, *(name for name in names if name.startswith("worker"))]

    def disturb(self, load: Load) -> None:
        next_at = REQUESTS_PER_KILL // 2
        left: list[str] = []
        while load.wait_for(next_at):
            self.until_ready()
            if not left:
                left = self._random.sample(self._names, len(self._names))
            self._kill(left.pop())
            next_at = load.answered + REQUESTS_PER_KILL
        self.until_ready()

    def _kill(self, name: str) -> None:
        deployment = self._served.deployment
        before = deployment.pid_of(name)
        self.note_fetched()
        deployment.kill(name)
        self.killed.append(name)
        wait_until(lambda: deployment.pid_of(name) not in (None, before), RECOVERY_S)
        self.until_ready()

    def note_fetched(self) -> None:
        state = state_of(self._served, self.schedulers[-1])
        self.fetched = max(self.fetched, state.disaggregation.fetched_pages if state else 0)

    def until_ready(self) -> None:
        wait_until(self._is_ready, RECOVERY_S, what=lambda: f"ready after killing {self.killed[-1:]}")

    def is_quiet(self) -> bool:
        return all(is_quiet(self._served, name) for name in self.schedulers)

    def _is_ready(self) -> bool:
        states = [state_of(self._served, name) for name in self.schedulers]
        return self._served.is_ready() and all(state and state.worker_group == "READY" for state in states)


def state_of(served: Served, name: str) -> scheduler_pb2.GetStateResponse | None:
    with grpc.insecure_channel(served.deployment.address_of(name), options=CHANNEL_OPTIONS) as channel:
        try:
            return scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=10)
        except grpc.RpcError:
            return None


def is_quiet(served: Served, name: str) -> bool:
    """Whether a group holds nothing for requests, and has lost nothing."""
    state = state_of(served, name)
    if state is None:
        return False
    busy = state.running_rows + state.waiting_requests + state.disaggregation.open_leases
    return not busy + state.host_tier.open_transfers + state.leaked_pages and all(
        tier.protected_pages == 0 for tier in state.tiers
    )


class Judge:
    """Compares answers with those of a single rank."""

    def __init__(self, checkpoint: Path, *, is_exact: bool) -> None:
        self.ties = 0
        self._checkpoint = checkpoint
        self._is_exact = is_exact
        self._model: Any = None  # of transformers, loaded when two tokens have to be weighed

    def differences(self, bodies: Sequence[Mapping[str, Any]], own: Sequence[Answer], one: Sequence[Answer]) -> str:
        found = [
            f"request {index}: {why}; {bodies[index]}\n  {own[index]}\n  {one[index]}"
            for index in range(len(bodies))
            if (why := self._difference(bodies[index], own[index], one[index]))
        ]
        return "\n".join([f"{len(found)} of {len(bodies)} differ", *found[:5]]) if found else ""

    def _difference(self, body: Mapping[str, Any], own: Answer, one: Answer) -> str:
        pairs = list(zip(own.token_ids, one.token_ids, strict=False))
        first = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
        if first is not None and not self._is_tie(body, own.token_ids[:first], pairs[first]):
            return f"another token {first}"
        if first is not None:
            self.ties += 1
        if len(own.logprobs) != len(one.logprobs) and first is None:
            return "other log probabilities"
        pairs_of = list(zip(own.logprobs, one.logprobs, strict=False))[:first]
        if any(abs(left - right) > LOGPROB_TOLERANCE for left, right in pairs_of):
            return "other log probabilities"
        if first is None and (own.token_ids, own.text, own.finish) != (one.token_ids, one.text, one.finish):
            return "another end"
        return ""

    def _is_tie(self, body: Mapping[str, Any], before: Sequence[int], tokens: tuple[int, int]) -> bool:
        """Whether rounding decides between two tokens after `before`."""
        if self._is_exact:
            return False
        logits = self._logits([*body["prompt"], *before])
        low, high = sorted(tokens)
        if not body["temperature"]:
            return float(logits.max() - logits[[low, high]].min()) < TIE_LOGIT
        # A token is drawn where the cumulative probability exceeds a uniform number.
        cumulative = torch.softmax(logits / body["temperature"], dim=-1).cumsum(-1)
        return float(cumulative[high - 1] - cumulative[low]) < TIE_PROBABILITY

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        from transformers import AutoModelForCausalLM

        if self._model is None:
            # Grouped products of experts are for smaller types only.
            model = AutoModelForCausalLM.from_pretrained(self._checkpoint, experts_implementation="eager")
            self._model = model.double().eval()
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([ids])).logits[0, -1]
        return logits


@pytest.mark.soak
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_random_requests_are_answered_as_by_one_rank_while_services_die(
    name: str, checkpoints: dict[str, Path], run_root: Path, tallies: list[Tally], capsys: pytest.CaptureFixture[str]
) -> None:
    arrangement = ARRANGEMENTS[name]
    checkpoint = checkpoints[arrangement.family]
    count = int(os.environ.get(REQUESTS, "600")) // len(ARRANGEMENTS)
    bodies = requests_of(name, count)
    with served_as(Arrangement(arrangement.family), checkpoint, run_root) as served:
        expected = Load(served, bodies).run()
    with served_as(arrangement, checkpoint, run_root) as served:
        killer, load = Killer(served, name), Load(served, bodies)
        answers = load.run(killer.disturb)
        wait_until(killer.is_quiet, what=lambda: "without requests, leases or pages in use")
        killer.note_fetched()
    judge = Judge(checkpoint, is_exact=arrangement.is_exact)
    assert len(answers) == len(expected) == count
    assert not (differences := judge.differences(bodies, answers, expected)), differences
    assert killer.killed
    # Whatever the sizes of both groups.
    assert killer.fetched or all(group.role is GroupRole.BOTH for group in arrangement.groups)
    assert judge.ties <= 1 + count // 500
    tallies.append(Tally(count, len(killer.killed), load.refusals, judge.ties))
    together = sum(tallies[1:], tallies[0])
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: {tallies[-1]}; {len(tallies)} layouts so far: {together}\n")
