"""The state file of a running deployment, at a well-known path: it lists the services' addresses for other commands."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True)
class ServiceState:
    """One supervised process; `pid` is absent while it restarts."""

    address: str
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """One `pando up`: its own process, the URL for clients, and the services by name."""

    pid: int
    url: str
    model: str
    services: Mapping[str, ServiceState] = field(default_factory=dict)
    # The prefix of service names of each model.
    models: Mapping[str, str] = field(default_factory=dict)

    def address_of(self, name: str, model: str | None = None) -> str:
        """Return the gRPC address of a service, or of the first of its kind; with several models, that of `model`.

        Raises:
            ConfigurationError: this deployment has no such service or model, or several models and `model` is None.
        """
        if model is not None or len(self.models) > 1:
            name = self._prefix_of(model) + name
        if name not in self.services and f"{name}-0" in self.services:
            name = f"{name}-0"
        if name not in self.services:
            raise ConfigurationError(f"the deployment at {self.url} runs no {name}")
        return self.services[name].address

    def workers(self, model: str | None = None) -> tuple[str, ...]:
        """Return the gRPC addresses of the ranks, rank 0 first; with several models, those of `model`.

        Raises:
            ConfigurationError: this deployment has no worker or no such model, or several models and `model` is None.
        """
        prefix = self._prefix_of(model) if model is not None or len(self.models) > 1 else ""
        if f"{prefix}worker" in self.services:
            return (self.services[f"{prefix}worker"].address,)
        first = self.address_of("worker-0", model)
        others = (f"{prefix}worker-{rank}" for rank in range(1, len(self.services)))
        return (first, *(self.services[name].address for name in others if name in self.services))

    def _prefix_of(self, model: str | None) -> str:
        served = ", ".join(self.models)
        if model is None:
            raise ConfigurationError(f"the deployment at {self.url} serves {served}: choose one with --model")
        if model not in self.models:
            raise ConfigurationError(f"the deployment at {self.url} serves {served or self.model}, and no {model}")
        return self.models[model]


def run_root(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory with the run directories of this user's deployments: a short path, private to the user."""
    environ = os.environ if environ is None else environ
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        return Path(runtime) / "pando"
    return Path(tempfile.gettempdir()) / f"pando-{os.getuid()}"


def make_private(directory: Path) -> None:
    """Create `directory` so that only this user can enter it.

    Raises:
        ConfigurationError: it is a link, or belongs to another user.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if directory.is_symlink() or status.st_uid != os.getuid():
        raise ConfigurationError(f"{directory} belongs to another user; choose another one with --run-directory")
    directory.chmod(0o700)


def write_state(directory: Path, state: DeploymentState) -> None:
    """Replace the state file in `directory` atomically, so that readers never see a partial file."""
    fresh = directory / f"{STATE_FILE}.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(state), indent=2) + "\n")
    fresh.replace(directory / STATE_FILE)


def read_state(directory: Path) -> DeploymentState | None:
    """Return the state in `directory`, or None if it has no state of a running deployment."""
    try:
        content = json.loads((directory / STATE_FILE).read_text())
        services = {name: ServiceState(**service) for name, service in content.pop("services").items()}
        state = DeploymentState(**content, services=services)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return state if _is_alive(state.pid) else None


def find_state(root: Path | None = None, port: int | None = None) -> DeploymentState:
    """Return the only deployment that runs on this machine, or the one at HTTP `port`.

    Raises:
        ConfigurationError: there is none, or there are several and `port` is None.
    """
    root = root or run_root()
    found = [state for state in (read_state(folder) for folder in sorted(root.glob("*"))) if state is not None]
    if port is not None:
        found = [state for state in found if state.url.endswith(f":{port}")]
    if not found:
        at_port = f" at port {port}" if port is not None else ""
        raise ConfigurationError(
            f"no deployment runs here{at_port} (looked in {root}): start one with `pando up` (or make serve)"
        )
    if len(found) > 1:
        urls = ", ".join(state.url for state in found)
        raise ConfigurationError(f"several deployments run here ({urls}): choose one with --port")
    return found[0]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
