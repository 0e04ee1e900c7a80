"""Resolves a model's reference in a process of its own, whose environment says which hub and which cache."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from common.logs import configure_logging
from common.models import resolve_model
from common.settings import LogSettings
from tests.fakes.forked import ForkedProgram

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class HubClient:
    """The environment of processes that download from one hub into one cache."""

    endpoint: str
    home: Path

    def environment(self, **changes: str) -> dict[str, str]:
        """Return this process's environment without settings for a hub, but for this one's and `changes`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        local = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        return {
            **kept,
            **local,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home),
            **changes,
        }

    def start(
        self, reference: str, *, weights: bool = True, tensors: Sequence[str] = (), **changes: str
    ) -> ForkedProgram:
        """Start to resolve `reference`; of the weights, those whose names are in `tensors`, or all without any."""
        arguments = (reference, str(int(weights)), *tensors)
        return ForkedProgram("tests.fakes.hub_client", arguments, self.environment(**changes))

    def resolve_on_full_disk(self, reference: str, room: int) -> dict[str, Any]:
        """Resolve `reference` where the cache's disk has room for `room` bytes more than a look at it tells."""
        arguments = (str(room), reference, "1")
        return result_of(ForkedProgram("tests.fakes.full_disk", arguments, self.environment()))

    def resolve(
        self, reference: str, *, weights: bool = True, tensors: Sequence[str] = (), **changes: str
    ) -> dict[str, Any]:
        """Return what `reference` is found to be, or {"error": …}."""
        return result_of(self.start(reference, weights=weights, tensors=tensors, **changes))

    def cached(self, repository: str) -> Path:
        """Return the repository's folder in the cache."""
        return self.home / "hub" / f"models--{repository.replace('/', '--')}"


def result_of(process: ForkedProgram) -> dict[str, Any]:
    """Wait for a process of `HubClient.start`; its log is under "log"."""
    status, output, log = process.communicate()
    assert status == 0, log
    result: dict[str, Any] = json.loads(output)
    return {**result, "log": log}


def main(reference: str, weights: str, *tensors: str) -> None:
    """Write what is found as JSON."""
    configure_logging("worker", LogSettings(format="json"))
    try:
        choose = set(tensors).intersection if tensors else None
        files = resolve_model(reference, weights=bool(int(weights)), choose=choose)
        found: dict[str, Any] = {"path": str(files.path), "kind": files.kind.value, "name": files.name}
        found |= {"shards": files.shards}
    except ConfigurationError as error:
        found = {"error": str(error)}
    json.dump({**found, "imports_hub": "huggingface_hub" in sys.modules}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
