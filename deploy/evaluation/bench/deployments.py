"""Deployments that benchmarks start, as `pando up` in a separate process.

They do not run in this process, because the supervisor's work would be measured as the client's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx

from common.settings import PREFIX, load_settings
from common.settings.renamed import OldNames
from deploy.supervisor.layout import free_port
from deploy.supervisor.state import read_state, run_root
from services.worker.engine.execution.fake_model import STEP_VARIABLE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from types import TracebackType

    from deploy.supervisor.state import DeploymentState

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1
SHOWN_LINES = 15


class LaunchError(Exception):
    """The deployment does not start; the message ends with the last lines of its log."""


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that configure a deployment that the benchmark starts."""
    group = parser.add_argument_group("launched deployment")
    group.add_argument("--config", metavar="FILE", help="TOML file with settings")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="NAME=VALUE",
        help="a setting, such as scheduler.max_rows=256; may be repeated",
    )


class LaunchedDeployment:
    """All services, with the gateway on a free port; entering waits until requests are served, leaving stops them."""

    def __init__(  # noqa: PLR0913  (settings of one start, most of them with defaults)
        self,
        config: str | None,
        overrides: Sequence[str],
        defaults: Sequence[str] = (),
        *,
        ranks: int = 1,
        roles: str | None = None,
        encoders: int = 0,
        fake_step_ms: float | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Prepare a deployment; `overrides` take precedence over `defaults`, both are NAME=VALUE.

        `roles` are its groups, as `pando up --roles` takes them; None: one that does both. `encoders` are workers of
        each that only encode images. `fake_step_ms` is the duration of a forward pass with model.load_format=fake; the
        deployment is given up if it does not serve within `start_timeout_s`.

        Raises:
            SystemExit: a setting is invalid; the message is on standard error.
        """
        port = free_port("127.0.0.1")
        # Each user that a benchmark names must be a separate subject.
        own = (f"gateway.port={port}", "gateway.anonymous=vouched")
        # One by one, so that an override under an old name takes precedence over a default under the new one.
        names = OldNames(PREFIX)
        chosen = [flag for setting in overrides for flag in names.in_arguments([f"--{setting}"])]
        names.report("pando bench")
        self._argv = [*(f"--{setting}" for setting in (*own, *defaults)), *chosen]
        self._argv += ["--config", config] if config is not None else []
        self.settings = load_settings("pando bench", "", self._argv)
        self._groups = ["--tp", str(ranks), *(() if roles is None else ("--roles", roles))]
        self._groups += ["--encoders", str(encoders)] if encoders else []
        self._start_timeout_s = start_timeout_s
        self._variables = {} if fake_step_ms is None else {STEP_VARIABLE: str(fake_step_ms)}
        self._root: Path | None = None

    @property
    def model(self) -> str:
        """The model's name for results, marked if weights are random or there is no model."""
        model = self.settings.model
        return f"{model.name} ({model.load_format})" if model.load_format in ("dummy", "fake") else model.name

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return self._state.url

    def address_of(self, name: str) -> str:
        """Return the gRPC address of a service."""
        return self._state.address_of(name)

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, changed so that commands find only this deployment."""
        return {**os.environ, "XDG_RUNTIME_DIR": str(self._root)}

    @property
    def process_ids(self) -> dict[str, int]:
        """The process ids of the services, by name."""
        return {name: service.pid for name, service in self._state.services.items() if service.pid is not None}

    def last_lines(self) -> str:
        """Return the end of the log."""
        log = self._root / "log" if self._root else None
        if log is None or not log.exists():
            return "(it was not started, or is stopped)"
        return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])

    def __enter__(self) -> Self:
        """Start the deployment.

        Raises:
            LaunchError: it ends, or does not serve in time.
        """
        self._root = Path(tempfile.mkdtemp(prefix="pando-bench-"))
        command = [sys.executable, "-m", "deploy.cli", "up", "--run-directory", str(self._run_root)]
        with (self._root / "log").open("wb") as log:
            # In a new session, so that Ctrl-C does not reach it before the benchmark has stopped it.
            self._process = subprocess.Popen(
                [*command, *self._groups, *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._variables},
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def _run_root(self) -> Path:
        return run_root({"XDG_RUNTIME_DIR": str(self._root)})

    @property
    def _state(self) -> DeploymentState:
        state = read_state(self._run_root / str(self.settings.gateway.port)) if self._root else None
        if state is None:
            raise LaunchError(f"the deployment has ended:\n{self.last_lines()}")
        return state

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        url = f"http://127.0.0.1:{self.settings.gateway.port}/ready"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise LaunchError(f"the deployment does not start:\n{self.last_lines()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=5.0).status_code == httpx.codes.OK:
                    return
            time.sleep(POLL_S)
        raise LaunchError(f"the deployment does not serve after {self._start_timeout_s:g} s:\n{self.last_lines()}")

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # The second signal makes the supervisor kill its services before it ends.
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
