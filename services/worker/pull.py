"""Downloads what the ranks of one pod need of a model that several pods compute as stages of a pipeline.

A container runs this once before the workers of the pod start, as others run `common.models.pull` for whole models.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.logs import configure_logging, get_logger
from common.settings import LogSettings
from common.steps import EngineSpec
from services.worker.engine.checkpoints.replacing import weights_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> int:
    """Download what the arguments name; return the exit status."""
    arguments = parse(sys.argv[1:])
    configure_logging("pull", LogSettings(format="json"))
    stages = stages_of(arguments.pod, arguments.ranks_per_pod, arguments.tensor_parallel)
    try:
        for stage in stages:
            ranks = arguments.tensor_parallel * arguments.pipeline_parallel
            rank = stage * arguments.tensor_parallel
            spec = EngineSpec(arguments.model, rank=rank, world_size=ranks, stages=arguments.pipeline_parallel)
            path = weights_of(spec).path
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    get_logger("models").info("model.ready", model=arguments.model, path=str(path), stages=list(stages))
    return 0


def stages_of(pod: int, ranks_per_pod: int, tensor_parallel: int) -> range:
    """Return the stages whose ranks are in a pod of a group, of which each has `ranks_per_pod` ranks in their order."""
    first = pod * ranks_per_pod
    return range(first // tensor_parallel, (first + ranks_per_pod - 1) // tensor_parallel + 1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line; ends the process if a pod has ranks that there are not."""
    parser = argparse.ArgumentParser(prog="python -m services.worker.pull", description=__doc__)
    parser.add_argument("model", metavar="NAME", help="a model's reference")
    parser.add_argument("--tensor-parallel", type=int, required=True, help="ranks of each stage")
    parser.add_argument("--pipeline-parallel", type=int, required=True, help="stages")
    parser.add_argument("--ranks-per-pod", type=int, required=True, help="ranks of each pod of a group, in their order")
    parser.add_argument("--pod", type=int, required=True, help="number of the pod in its group, from 0")
    parsed = parser.parse_args(arguments)
    ranks = parsed.tensor_parallel * parsed.pipeline_parallel
    if min(parsed.tensor_parallel, parsed.pipeline_parallel, parsed.ranks_per_pod) < 1:
        parser.error("numbers of ranks and stages must be at least 1")
    if not 0 <= parsed.pod < ranks // parsed.ranks_per_pod:
        parser.error(f"with {parsed.ranks_per_pod} of {ranks} ranks in each pod, there is no pod {parsed.pod}")
    return parsed


if __name__ == "__main__":
    sys.exit(main())
