"""What holds for every test: no settings from the developer's environment, no spinning, no GPU tests without a GPU."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import HealthCheck, is_hypothesis_test, settings

from deploy.supervisor.process import child_environment
from services.worker.engine.host import limit_spinning
from tests.examples import EXPLORING, is_exploring

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_DIRECTORY = 16

# Times mean nothing on a shared machine, and how much is thrown away is chance: neither is a failure.
HASTE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": HASTE}
# The same examples every time, so that a change is refused for what it does; new ones, and more, are looked for by
# `make soak`.
settings.register_profile("pando", **PATIENT, derandomize=True, max_examples=50)
settings.register_profile(EXPLORING, **PATIENT, print_blob=True)
settings.load_profile("pando")

for name in os.environ.keys() - child_environment(os.environ).keys():
    del os.environ[name]

# Without bytecode, pytest's workers rewrite all asserts in each run, and every process that tests start compiles
# all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests keep sockets in temporary directories, and a socket's path may have about a hundred characters.
if len(tempfile.gettempdir()) > LONGEST_DIRECTORY and os.access("/tmp", os.W_OK):
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

# Shells start what they run in the background without SIGINT, and processes inherit that: a service that is asked to
# end while it starts would not notice.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything loads torch: with two threads that spin, a parallel region took 8 ms on a shared machine.
limit_spinning()


# What is imported and collected stays until the end: searching it for cycles again and again takes a quarter of the
# collection's time, and some of every test's.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--chat-templates`."""
    parser.addoption(
        "--chat-templates", metavar="FOLDER", type=Path, help="real chat templates, *.jinja, to test besides our own"
    )


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Undo what a test changes in the process's logging, on which later tests' captured events depend."""
    level, configuration = logging.getLogger().level, structlog.get_config()
    yield
    logging.getLogger().setLevel(level)
    structlog.configure(**configuration)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is none; run files with slow tests first, so that none is left over for the end.

    Property tests count as `soak` where new examples are looked for.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
    if is_exploring():
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker(pytest.mark.soak)
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


def pytest_collection_finish() -> None:
    """Search for cycles only among what tests make, from now on."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _has_gpu() -> bool:
    # Only now: without GPU tests nothing here needs torch, and importing it takes seconds.
    import torch

    return torch.cuda.is_available()
