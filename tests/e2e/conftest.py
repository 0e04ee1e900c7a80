"""The five real services as processes: with the bundled model, or with an engine that computes nothing."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common import models
from common.errors import ConfigurationError
from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from deploy.supervisor.layout import ONE_OF_EACH, Replicas
from services.worker.engine.execution.fake_model import STEP_VARIABLE
from tests.e2e.deployment import Deployment
from tests.e2e.served import Served

if TYPE_CHECKING:
    from collections.abc import Iterator

START_TIMEOUT_S = 300.0


@pytest.fixture(scope="session")
def run_root() -> Iterator[Path]:
    """A directory with a path short enough for sockets, which pytest's own are not always."""
    root = Path(tempfile.mkdtemp(prefix="pando-e2e-"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def served(run_root: Path) -> Iterator[Served]:
    """A deployment with the real model."""
    require_model()
    yield from serve(Settings(gateway=GatewaySettings(port=0, anonymous="vouched")), run_root)


@pytest.fixture(scope="session")
def served_fake(run_root: Path) -> Iterator[Served]:
    """A deployment whose worker makes tokens up: same protocol, no model."""
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(max_rows=32),
    )
    yield from serve(settings, run_root)


def serve(settings: Settings, root: Path, ranks: int = 1, replicas: Replicas = ONE_OF_EACH) -> Iterator[Served]:
    """Run a deployment as long as the caller keeps this iterator."""
    deployment = Deployment(settings, ranks, root, replicas)
    deployment.start(START_TIMEOUT_S)
    try:
        yield Served(deployment)
    finally:
        deployment.stop()


@contextmanager
def fake_steps(step_ms: float) -> Iterator[None]:
    """Let forward passes of fake models take `step_ms` in deployments that start within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STEP_VARIABLE, str(step_ms))
        yield


def require_model() -> None:
    """Fail with the remedy if the bundled model is not installed."""
    try:
        models.resolve_model(ModelSettings().reference)
    except ConfigurationError as error:
        pytest.fail(str(error))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts processes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.e2e)
