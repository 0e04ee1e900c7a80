"""The process in which detectors run: real processes, some of which misbehave."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.settings import ModelSettings
from services.scheduler.content.desk import ContentChecker
from tests.services.scheduler.content.corpus import drawn
from tests.waiting import is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.tokenization import TextModel
    from common.types import TokenIds

HERE = "tests.services.scheduler.content.detectors"


@asynccontextmanager
async def checking(
    *detectors: str, rules: Path | None = None, deadline_s: float = 120.0, **model: Any
) -> AsyncIterator[ContentChecker]:
    configuration = {
        "model": ModelSettings(**model).model_dump(mode="json"),
        "detectors": list(detectors or ("patterns",)),
        "rules": str(rules) if rules else None,
    }
    checker = ContentChecker(configuration, deadline_s)
    try:
        yield checker
    finally:
        await checker.close()


@pytest.fixture(scope="module")
def harmless(model: TextModel) -> TokenIds:
    return ids_of(model, "You are a guide.")


@pytest.fixture(scope="module")
def secret(model: TextModel) -> TokenIds:
    return ids_of(model, f"You are a guide. Use sk-{drawn(48)} for it.")


def ids_of(model: TextModel, text: str) -> TokenIds:
    return np.array(model.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


async def test_verdicts_come_back_and_rules_are_reloaded(tmp_path: Path, harmless: TokenIds, secret: TokenIds) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rules]]\nname = 'key'\npattern = 'sk-[A-Za-z0-9]{20,}'\n")
    async with checking(rules=rules) as checker:
        first = await checker.examine(harmless)
        assert (first.allowed_tokens, first.failure) == (len(harmless), None)
        vetoed = await checker.examine(secret)
        assert vetoed.rule == "key"
        assert vetoed.allowed_tokens is not None
        assert 0 < vetoed.allowed_tokens < len(secret)
        rules.write_text("[[rules]]\nname = 'guide'\npattern = 'guide'\n")
        reloaded = await checker.examine(harmless)
        assert reloaded.rule == "guide"
        assert reloaded.rules != first.rules
        rules.write_text("[[rules]]\nname = 'broken'\npattern = '('\n")
        kept = await checker.examine(harmless)
        assert kept.rule == "guide"
        assert kept.complaint is not None
        assert "broken" in kept.complaint
        assert (await checker.look()).complaint == kept.complaint


async def test_a_detector_that_raises_gives_no_verdict_and_quotes_nothing(harmless: TokenIds) -> None:
    async with checking(f"{HERE}:RaisingDetector") as checker:
        answer = await checker.examine(harmless)
    assert answer.allowed_tokens is None
    assert answer.failure == "a detector raised ValueError"


async def test_a_detector_that_never_ends_is_ended_by_the_deadline(harmless: TokenIds) -> None:
    async with checking(f"{HERE}:EndlessDetector", deadline_s=2.0) as checker:
        await checker.look()
        answer = await checker.examine(harmless)
        assert answer.allowed_tokens is None
        assert answer.failure == "no answer within 2 s"
        # The next question is put to a new process; a busy machine may need more than one.
        async with asyncio.timeout(120):
            while (await checker.look()).rules is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_dead_checker_process_is_restarted(harmless: TokenIds) -> None:
    async with checking(f"{HERE}:DyingDetector") as checker:
        for _ in range(2):
            answer = await checker.examine(harmless)
            assert answer.allowed_tokens is None
            assert answer.failure is not None
            assert "ended" in answer.failure


async def test_text_printed_by_a_detector_is_not_taken_for_a_verdict(model: TextModel) -> None:
    async with checking(f"{HERE}:ChattyDetector") as checker:
        answer = await checker.examine(ids_of(model, "A purple cow."))
    assert answer.allowed_tokens == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rules": "nowhere.toml"}, "nowhere.toml"),
        ({"detectors": ("paterns",)}, "paterns"),
        ({"reference": "./no-such-model"}, "no-such-model"),
    ],
)
async def test_invalid_checker_options_are_reported_at_once(
    tmp_path: Path, harmless: TokenIds, options: dict[str, Any], words: str
) -> None:
    rules = tmp_path / options["rules"] if "rules" in options else None
    model = {"reference": options["reference"]} if "reference" in options else {}
    async with checking(*options.get("detectors", ()), rules=rules, **model) as checker:
        first = await checker.look()
        assert words in str(first.failure or first.complaint)
        assert (await checker.examine(harmless)).allowed_tokens is None


async def test_a_prompt_of_a_hundred_thousand_tokens_is_judged(model: TextModel) -> None:
    ids = np.resize(ids_of(model, "Words, words and more words. "), 100_000).astype(np.int32)
    async with checking() as checker:
        answer = await checker.examine(ids)
    assert answer.allowed_tokens == len(ids)


HANGING = """
import asyncio, sys
import numpy as np
from common.settings import ModelSettings
from services.scheduler.content.desk import ContentChecker

async def main():
    configuration = {
        "model": ModelSettings().model_dump(mode="json"),
        "detectors": ["tests.services.scheduler.content.detectors:EndlessDetector"],
        "rules": None,
    }
    checker = ContentChecker(configuration, 600.0)
    await checker.look()
    print(checker._process.pid, flush=True)
    await checker.examine(np.array([100, 101], np.int32))

asyncio.run(main())
"""


def test_a_detector_that_hangs_ends_with_the_scheduler_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    time.sleep(0.3)  # until it hangs
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(child))
