"""Stand-ins for what the supervisor runs, asks and tells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.settings import Settings
from deploy.supervisor.layout import Layout, ServiceSpec, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS = "tests.deploy.supervisor.programs"


class RecordingReporter:
    """Keeps all that the supervisor tells."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.alive_services: list[str] = []
        self.announced: list[Layout] = []

    def line(self, service: str, text: str) -> None:
        self.lines.append((service, text))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def alive(self, service: str) -> None:
        self.alive_services.append(service)

    def ready(self, layout: Layout) -> None:
        self.announced.append(layout)


class FileProbes:
    """A service is alive once its program has made its file (its address), and ready is what the test says."""

    def __init__(self, answers: Callable[[str], bool] = lambda _address: True) -> None:
        self.answers = answers
        self.is_serving = True

    async def is_alive(self, address: str) -> bool:
        return _exists(address) and self.answers(address)

    async def is_ready(self, _url: str) -> bool:
        return self.is_serving


def _exists(path: str) -> bool:
    return Path(path).exists()


def service(
    directory: Path, name: str, program: str, stage: Stage = Stage.COMPUTE, *, group: str = "", stop_s: float = 30.0
) -> ServiceSpec:
    """Return a service that runs one of the programs beside this file; its address is a file that it makes."""
    address = str(directory / f"{name}.alive")
    settings = Settings()
    settings = settings.model_copy(update={"worker": settings.worker.model_copy(update={"address": address})})
    return ServiceSpec(name, f"{PROGRAMS}.{program}", address, stage, settings, group or name, stop_s)


def layout_of(*services: ServiceSpec) -> Layout:
    """Return a layout of exactly these services."""
    return Layout(services, "http://127.0.0.1:1", "a-model")
