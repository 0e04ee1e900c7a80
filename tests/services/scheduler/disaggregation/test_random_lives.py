"""Random requests through a prefill and a decode group, with workers that die: always the tokens of one group."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from common.types import CacheMode
from tests.services.scheduler.disaggregation.test_two_groups import LONG, Groups, output

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

TOKENS = 6
WAVE = 12


class Lives:
    """Waves of requests of few users, whose prompts begin alike, and a fault beside some of them."""

    def __init__(self, groups: Groups, seed: int) -> None:
        self._groups = groups
        self._random = random.Random(seed)
        self._number = 0

    async def wave(self) -> None:
        prompts = dict(self._new_prompt() for _ in range(WAVE))
        fault = asyncio.create_task(self._fault())
        aborted = set()
        for name, prompt in prompts.items():
            mode = self._random.choice([CacheMode.DEFAULT, CacheMode.DEFAULT, CacheMode.PRIVATE, CacheMode.NONE])
            admission = await self._groups.decode.submit(
                name,
                prompt,
                prefill_group=self._groups.prefill.address("scheduler"),
                user=f"user-{self._random.randrange(4)}",
                max_tokens=TOKENS,
                cache_mode=mode,
            )
            assert not admission.HasField("rejected"), admission
            if self._random.random() < 0.05:
                aborted.add(name)
                await self._groups.decode.abort(name)
        await self._groups.decode.finished(*prompts)
        await fault
        for name in prompts.keys() - aborted:
            assert self._groups.decode.detokenizer.output_of(name) == output(prompts[name], TOKENS), name

    def _new_prompt(self) -> tuple[str, list[int]]:
        self._number += 1
        shared = LONG[: self._random.randrange(0, 56)]
        own = [self._random.randrange(10, 900) for _ in range(self._random.randrange(1, 32))]
        return f"r{self._number}", shared + own

    async def _fault(self) -> None:
        faults: list[Callable[[], Awaitable[None]]] = [self._kill_prefill, self._kill_decode, self._silence]
        if self._random.random() < 0.4:
            await asyncio.sleep(self._random.random() * 0.2)
            await self._random.choice(faults)()

    async def _kill_prefill(self) -> None:
        await self._groups.prefill.stop_workers()
        await asyncio.sleep(self._random.random() * 0.1)
        await self._groups.prefill.start_workers()

    async def _kill_decode(self) -> None:
        await self._groups.decode.stop_workers()
        await asyncio.sleep(self._random.random() * 0.1)
        await self._groups.decode.start_workers()

    async def _silence(self) -> None:
        self._groups.silent = {self._random.randrange(2)}
        await asyncio.sleep(self._random.random() * 0.1)
        self._groups.silent = set()


@pytest.mark.parametrize(
    ("seed", "waves"), [(1, 3), *(pytest.param(seed, 84, marks=pytest.mark.extended) for seed in range(2, 12))]
)
async def test_random_lives_give_the_tokens_of_one_group_and_leak_nothing(
    tmp_path: Path, seed: int, waves: int
) -> None:
    groups = Groups(tmp_path)
    await groups.start()
    lives = Lives(groups, seed)
    try:
        for _ in range(waves):
            await lives.wave()
        await groups.released()
    finally:
        await groups.stop()
