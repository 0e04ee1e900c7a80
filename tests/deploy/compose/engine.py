"""`docker compose` on this repository, as a person at its root would type it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from deploy.supervisor.layout import free_port
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "deploy" / "compose"
BUILD_S, UP_S = 2400.0, 600
SERVICES = ("worker", "detokenizer", "scheduler", "tokenizer", "gateway")


class Project:
    """One deployment in containers, under a name and at a port of its own."""

    def __init__(self, *overlays: str, environment: Mapping[str, str] | None = None) -> None:
        """Deploy compose.yaml with `overlays` on top, and with variables that they ask for."""
        self._environment = environment or {}
        files = [str(COMPOSE / name) for name in ("compose.yaml", *overlays)] if overlays else []
        self._files = [text for file in files for text in ("--file", file)]
        self.name = f"pando-test-{os.getpid()}"
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"

    def has_engine(self) -> bool:
        engine = (("version", "--format", "{{.Server.Version}}"), ("compose", "version"))
        try:
            return all(self._run(*command, check=False).strip() for command in engine)
        except FileNotFoundError:
            return False

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        return self._run("compose", *self._files, "--project-name", self.name, *arguments, timeout_s=timeout_s)

    def inside(self, service: str, program: str) -> str:
        """Run a Python program in a service's container; return its output."""
        return self.compose("exec", "-T", service, "python", "-c", program).strip()

    def inspect(self, what: str, template: str) -> str:
        return self._run("inspect", "--format", template, what).strip()

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def restarts(self, service: str) -> int:
        return int(self.inspect(self.container(service), "{{.RestartCount}}"))

    def kill(self, service: str) -> None:
        """Kill everything in the container but its init, which then ends; as an out-of-memory kill would.

        `docker kill` would not do: Docker takes that for the wish of a person, and restarts nothing.
        """
        before = self.restarts(service)
        program = "import os; os.kill(-1, 9)"
        self._run("exec", self.container(service), "python", "-c", program, check=False)
        wait_until(lambda: self.restarts(service) > before, what=lambda: f"restart of {service}")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5, trust_env=False).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def leftovers(self) -> dict[str, list[str]]:
        """Return the containers, volumes and networks that carry this project's name."""
        mine = f"label=com.docker.compose.project={self.name}"
        kinds = {"containers": ("ps", "--all"), "volumes": ("volume", "ls"), "networks": ("network", "ls")}
        return {kind: self._run(*command, "--quiet", "--filter", mine).split() for kind, command in kinds.items()}

    def images(self) -> dict[str, int]:
        """Return the sizes in bytes of the images in use."""
        names = {service["image"] for service in self.configuration()["services"].values() if "build" in service}
        return {name: int(self._run("image", "inspect", "--format", "{{.Size}}", name)) for name in sorted(names)}

    def configuration(self, *profiles: str) -> dict[str, dict[str, dict[str, str]]]:
        """Return the files as Compose resolves them."""
        flags = [f"--profile={profile}" for profile in profiles]
        found: dict[str, dict[str, dict[str, str]]] = json.loads(self.compose(*flags, "config", "--format", "json"))
        return found

    def _run(self, *arguments: str, timeout_s: float = 60, check: bool = True) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("COMPOSE_")}
        environment |= {"PANDO_PORT": str(self.port), **self._environment}
        done = subprocess.run(
            ["docker", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (
            f"docker {' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
        )
        return done.stdout
