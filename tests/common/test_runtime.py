"""Signals that end a service, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from common.runtime import REFUSED_EXIT

PROGRAM = """
import asyncio, select, signal, sys
from common import runtime
from common.errors import ConfigurationError
from common.settings import Settings

async def main(stopping):
    print("up", flush=True)
    await stopping.wait()
    print("draining", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        await asyncio.sleep(0.02)
    print("drained", flush=True)

if "patient" in sys.argv:
    runtime.SAME_INTERRUPT_S = 600
if "ignores" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "refused" in sys.argv:
    async def main(stopping):
        print("up", flush=True)
        raise ConfigurationError("no experts")
runtime.run_service("test", Settings.model_validate({"log": {"level": "error"}}), None, main)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_repeated_termination_signals_do_not_cut_the_drain_short() -> None:
    process = start()
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.communicate("\n", timeout=60)[0] == "draining\ndrained\n"
    assert process.returncode == 0


@pytest.mark.parametrize(("person", "output"), [("patient", "drained\n"), ("usual", "")])
def test_a_second_interrupt_by_a_person_ends_the_service_at_once(person: str, output: str) -> None:
    process = start(person)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "draining\n"
    if not output:
        time.sleep(1.2)
    process.send_signal(signal.SIGINT)
    if not output:
        process.wait(60)
    assert process.communicate("\n", timeout=60)[0] == output


def test_a_termination_signal_that_is_ignored_from_the_start_stays_ignored() -> None:
    process = start("ignores")
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert process.communicate("\n", timeout=60)[0] == "draining\ndrained\n"


def test_a_refused_configuration_has_an_exit_status_of_its_own() -> None:
    assert start("refused").wait(30) == REFUSED_EXIT


def test_a_service_does_not_look_for_garbage_among_its_modules_and_open_requests() -> None:
    program = """
import gc
from common.runtime import collect_garbage_rarely
from common.settings import Settings

collect_garbage_rarely()
before = [generation["collections"] for generation in gc.get_stats()]
requests = [[number] for number in range(10_000)]
assert [generation["collections"] for generation in gc.get_stats()] == before
gc.collect()
assert len(gc.get_objects()) < gc.get_freeze_count(), "modules are frozen"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
