"""Deployments that benchmarks start or find."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from common.settings import load_settings
from deploy.supervisor.deployment import Deployment
from deploy.supervisor.events import format_event, parse_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from deploy.supervisor.layout import Layout


class QuietReporter:
    """Shows only what has gone wrong: a benchmark's output is its table."""

    LOUD = frozenset({"error", "critical"})

    def line(self, service: str, text: str) -> None:
        """Show a service's errors."""
        event = parse_line(text)
        if event.level in self.LOUD:
            sys.stderr.write(format_event(service, event) + "\n")

    def note(self, text: str) -> None:
        """Show what the supervisor remarks, such as a death."""
        sys.stderr.write(f"pando: {text}\n")

    def alive(self, service: str) -> None:
        """Say nothing."""

    def ready(self, layout: Layout) -> None:
        """Say nothing."""


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that configure a deployment that the benchmark starts itself."""
    group = parser.add_argument_group("deployment that is started")
    group.add_argument("--config", metavar="FILE", help="TOML file with settings")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="NAME=VALUE",
        help="a setting, such as scheduler.max_rows=256; may be repeated",
    )


def make_deployment(
    config: str | None,
    overrides: Sequence[str],
    defaults: Sequence[str] = (),
    *,
    ranks: int = 1,
    root: Path | None = None,
) -> Deployment:
    """Return a deployment on a free port; `overrides` are stronger than `defaults`, both are NAME=VALUE.

    Raises:
        SystemExit: a setting is wrong.
    """
    argv = [f"--{setting}" for setting in ("gateway.port=0", *defaults, *overrides)]
    if config is not None:
        argv += ["--config", config]
    return Deployment(load_settings("pando bench", "", argv), ranks, root=root, reporter=QuietReporter())


def described_model(deployment: Deployment) -> str:
    """Return the model's name for results, which must not pass for those of a real model if there is none."""
    spec = deployment.layout.services[0]
    load_format = spec.settings.model.load_format
    return f"{deployment.layout.model} ({load_format})" if load_format in ("dummy", "fake") else deployment.layout.model
