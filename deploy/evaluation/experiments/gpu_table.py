"""Every row of the GPU table, each part with one deployment.

Run as `python -m deploy.evaluation.experiments.gpu_table --json FILE`.

Parts can be chosen by name and are measured in the order in which `--list` prints them with their commands; `--seconds`
begins no load after that time, and says what is left; `--label` keeps another run's figures beside those of the first.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError
from deploy.evaluation.bench.results import current_commit, read_results, rounded, write_results
from deploy.evaluation.experiments.formats import FORMATS, shape_in
from deploy.evaluation.experiments.remote_prefills import PrefillCounts, read_remote_prefills
from deploy.supervisor.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SHAPES = "deploy/evaluation/shapes"
DUMMY = ("model.load_format=dummy", "model.max_context=4096", "scheduler.max_rows=256")
OFFLINE = (*DUMMY, "scheduler.max_step_tokens=16384")
FP8 = (*OFFLINE, "model.quantization=fp8")
# Two prompts in one step: with less, decoding rows take too much of each step to keep up with 16 requests/s.
ONLINE = (*DUMMY, "scheduler.max_step_tokens=3584")


@dataclass(frozen=True, slots=True)
class TablePart:
    """Loads that share a deployment; one without a shape starts by itself what it needs.

    In each load, `{url}`, `{tp}` and `{json}` are filled in; `pando` and `python` are this environment's.
    """

    name: str
    loads: tuple[str, ...]
    shape: str | None = None
    ranks: int = 1
    settings: tuple[str, ...] = OFFLINE
    roles: str | None = None
    weights: str | None = None
    """Format of the weights, of `FORMATS`, if it is not what the shape says."""

    @contextmanager
    def deployment(self) -> Iterator[LaunchedDeployment | None]:
        """Give the deployment for the loads, which serves."""
        if self.shape is None:
            yield None
            return
        with ExitStack() as stack:
            shape = Path(SHAPES, self.shape)
            if self.weights is not None:
                shape = stack.enter_context(shape_in(shape, self.weights))
            settings = (f"model.reference={shape}", *self.settings)
            if self.roles is not None:
                settings += (f"scheduler.metrics_port={free_port('127.0.0.1')}",)
            yield stack.enter_context(LaunchedDeployment(None, settings, ranks=self.ranks, roles=self.roles))


OFFLINE_LOAD = "pando bench offline --tp {tp} --no-cache --repeats 3 --json {json}"
THROUGHPUT = (f"{OFFLINE_LOAD} --workload w1", f"{OFFLINE_LOAD} --workload batch1")
# Near what a GPU can do, when requests happen to come decides how long they wait: they come alike in every run.
POISSON_LOAD = "pando bench serve --url {url} --input-tokens %d --output-tokens 256 --warmup 16 --seed %d"
ONLINE_RATES = (8, 12, 14, 16)
# Tokens of the prompts, arrivals per second, and requests in about 25 s. Each load has a seed of its own, as prompts of
# the same one would be cached.
GROUP_LOADS = ((8192, 3, 75), (1784, 16, 400), (8192, 4.5, 110), (1784, 22, 540))
GROUPS = (
    "model.load_format=dummy", "model.max_context=16384", "scheduler.max_rows=256", "scheduler.max_step_tokens=8192",
    "scheduler.mixed_step_tokens=1024", "scheduler.host_tier.gigabytes=24",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Two groups on a GPU each, by what they do with prompts, and their loads; labels of results begin with `name`."""

    name: str
    roles: str
    loads: tuple[tuple[int, float, int], ...] = GROUP_LOADS
    settings: tuple[str, ...] = ()

    @property
    def part(self) -> TablePart:
        """The part of the table."""
        loads = tuple(
            f"{POISSON_LOAD % (tokens, seed)} --json {{json}} --rate {rate} --requests {requests}"
            f" --label '{self.name}, {tokens:,} in, {rate} requests/s'"
            for seed, (tokens, rate, requests) in enumerate(self.loads, 1)
        )
        name = self.name.replace(" ", "-").replace(",", "")
        return TablePart(name, loads, "llama-3.1-8b", settings=GROUPS + self.settings, roles=self.roles)


def _rising(tokens: int, *rates: float) -> tuple[tuple[int, float, int], ...]:
    return tuple((tokens, rate, round(25 * rate)) for rate in rates)


def _online_load(rate: int) -> str:
    """Return the command of a minute at `rate`, which is also its seed: prompts of another one would be cached."""
    return f"{POISSON_LOAD % (1784, rate)} --json {{json}} --rate {rate} --requests {60 * rate}"


GROUP_LAYOUTS = (
    GroupLayout("two groups", "both=2"),
    GroupLayout("prefill and decode", "prefill=1,decode=1"),
    # Up to the rates at which tokens come too late, with steps that suit each layout: larger ones delay tokens by more
    # than 50 ms in groups that do both; and of a prompt that takes several, the first pages move during the next ones.
    GroupLayout(
        "two groups small steps",
        "both=2",
        _rising(8192, 3.5, 4.5, 6.5) + _rising(1784, 16, 22, 28),
        ("scheduler.max_step_tokens=1024",),
    ),
    GroupLayout(
        "prefill and decode small steps",
        "prefill=1,decode=1",
        _rising(8192, 3.5, 4, 4.5) + _rising(1784, 8, 12, 16),
        ("scheduler.max_step_tokens=2048",),
    ),
)
SHARES = "python -m deploy.evaluation.experiments.pipeline_shares --json {json}"
STEPS = f"python -m deploy.evaluation.experiments.decode_steps {SHAPES}/%s --prompt 500 --json {{json}}"
PARTS = (
    *(TablePart(shape, THROUGHPUT, shape) for shape in ("qwen3-0.6b", "llama-3.1-8b", "qwen3-14b")),
    TablePart("qwen3-14b-tp2", THROUGHPUT, "qwen3-14b", 2),
    TablePart("qwen3-14b-tp4", THROUGHPUT, "qwen3-14b", 4),
    TablePart(
        "online",
        (
            *(f"{_online_load(rate)} --label '{rate} requests/s'" for rate in (8, 16)),
            f"{SHARES} --label '256 streams' -- {POISSON_LOAD % (1784, 1)} --concurrency 256 --requests 512",
        ),
        "llama-3.1-8b",
        settings=ONLINE,
    ),
    *(
        TablePart(
            f"online-{name}",
            tuple(f"{_online_load(rate)} --label '{rate} requests/s, {when}'" for rate in ONLINE_RATES),
            "llama-3.1-8b",
            settings=(*ONLINE, *settings),
        )
        for name, when, settings in (
            ("ahead", "planned a pass ahead", ()),
            ("late", "planned late", ("scheduler.late_planning=true",)),
        )
    ),
    *(layout.part for layout in GROUP_LAYOUTS),
    TablePart("w1-shares", (f"{SHARES} --label w1 -- pando bench offline --no-cache",), "llama-3.1-8b"),
    TablePart(
        "steps", tuple(f"{STEPS % shape} --rows 1 64 256" for shape in ("qwen3-0.6b", "llama-3.1-8b", "qwen3-14b"))
    ),
    TablePart("steps-tp2", (f"{STEPS % 'qwen3-14b'} --rows 1 64 256 --tp {{tp}}",), ranks=2),
    TablePart("steps-tp4", (f"{STEPS % 'qwen3-14b'} --rows 1 64 256 --tp {{tp}}",), ranks=4),
    *(
        TablePart(f"{shape}-fp8", tuple(f"{load} --label fp8" for load in THROUGHPUT), shape, settings=FP8)
        for shape in ("llama-3.1-8b", "qwen3-14b")
    ),
    *(
        TablePart(
            f"{shape}-{weights}", tuple(f"{load} --label {weights}" for load in THROUGHPUT), shape, weights=weights
        )
        for weights in FORMATS
        for shape in ("llama-3.1-8b", "qwen3-14b")
    ),
    TablePart(
        "llama-3.1-8b-deterministic",
        (f"{OFFLINE_LOAD} --workload w1 --label deterministic",),
        "llama-3.1-8b",
        settings=(*OFFLINE, "model.deterministic=true"),
    ),
    TablePart(
        "fp8",
        (
            "python -m deploy.evaluation.experiments.quantization speed --device cuda --json {json}",
            *(f"{STEPS % shape} --rows 1 64 256 --quantization fp8" for shape in ("llama-3.1-8b", "qwen3-14b")),
        ),
    ),
    TablePart(
        "host-tier",
        (
            f"python -m deploy.evaluation.experiments.host_tier --device cuda --model {SHAPES}/llama-3.1-8b"
            " --load-format dummy --rows 64 --lengths 512 2048 8192 --json {json}",
        ),
    ),
    TablePart(
        "tenants",
        # One mode at a time has the GPU's memory: 40,000 pages are 640,000 tokens.
        tuple(
            f"pando bench tenants --modes {mode} --mix s1 --scale 1 --users 512 --apps 16 --concurrency 64 --rounds 2"
            " --json {json} "
            + " ".join(
                f"--set {setting}"
                for setting in (f"model.reference={SHAPES}/llama-3.1-8b", *ONLINE, "scheduler.device_pages=40000")
            )
            for mode in ("shared", "user_aware", "isolated")
        ),
    ),
)


class OutOfTimeError(Exception):
    """The next load would begin after the time that was given."""


def measure(
    part: TablePart, results: Path | None, deadline: float, label: str | None = None
) -> Iterator[tuple[str, int]]:
    """Run the loads of `part` and add what they write to `results`; yield each command with its exit code.

    Raises:
        LaunchError: the deployment does not come up.
        OutOfTimeError: `deadline`, by the monotonic clock, is over.
    """
    with part.deployment() as deployment:
        url, environment = (deployment.url, deployment.environment) if deployment else ("", None)
        remote_prefills = _reader_of(deployment)
        for load in part.loads:
            if time.monotonic() > deadline:
                raise OutOfTimeError
            with tempfile.TemporaryDirectory() as directory:
                found = Path(directory) / "found.json"
                command = load.format(url=url, tp=part.ranks, json=found)
                before = remote_prefills()
                code = subprocess.run(list(words(command)), check=False, env=environment).returncode
                if results is not None and code == 0:
                    add_figures(found, remote_prefills().since(before))
                    add(found, results, part, deployment.model if deployment else None, label)
            yield command, code


def words(command: str) -> Iterator[str]:
    """Split a load's command; our own programs are taken from this environment."""
    for word in shlex.split(command):
        yield from {"pando": (sys.executable, "-m", "deploy.cli"), "python": (sys.executable,)}.get(word, (word,))


def _reader_of(deployment: LaunchedDeployment | None) -> Callable[[], PrefillCounts]:
    """Return a function that counts a deployment's remote prefills, by the metrics of its schedulers if it has any."""
    first = deployment.settings.scheduler.metrics_port if deployment else None
    if deployment is None or not first:
        return PrefillCounts
    schedulers = sum(name.startswith("scheduler") for name in deployment.process_ids)
    return lambda: read_remote_prefills(range(first, first + schedulers))


def add_figures(found: Path, prefills: PrefillCounts) -> None:
    """Add to a load's results those of its prompts that other groups computed, with the ones of its warm-up."""
    for result in read_results(found)[:1]:
        figures = (
            replace(result, metric=metric, value=rounded(value), unit=unit, low=None, high=None, repeats=None)
            for metric, value, unit in prefills.figures()
        )
        write_results(found, figures)


def add(found: Path, results: Path, part: TablePart, model: str | None, label: str | None) -> None:
    """Move what a load has found to the table, with the command that repeats it."""
    commit, command = current_commit(), f"python -m deploy.evaluation.experiments.gpu_table {part.name}"
    entries = []
    for result in read_results(found):
        labels = ", ".join(one for one in (result.label, label) if one)
        entry = replace(result, command=command, commit=commit, tp=part.ranks, label=labels or None)
        entries.append(replace(entry, model=model) if model else entry)
    write_results(results, entries)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the parts; return 1 if one of the loads failed or was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_name = {part.name: part for part in PARTS}
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(by_name)} (all)")
    parser.add_argument("--list", action="store_true", help="print the parts with their commands and end")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after that time")
    parser.add_argument("--label", metavar="TEXT", help="added to what results are labelled, such as 'second run'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.parts if name not in by_name]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(by_name)}")
    chosen = [by_name[name] for name in options.parts] or list(PARTS)
    if options.list:
        sys.stdout.writelines(f"{part.name}\n" + "".join(f"    {load}\n" for load in part.loads) for part in chosen)
        return 0
    deadline, failed = time.monotonic() + options.seconds, []
    for part in chosen:
        try:
            failed += [command for command, code in measure(part, options.json, deadline, options.label) if code]
        except LaunchError as error:
            failed.append(f"{part.name}: {error}")
        except OutOfTimeError:
            failed.append(f"{part.name}: no time left")
    sys.stderr.writelines(f"not measured: {what}\n" for what in failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
