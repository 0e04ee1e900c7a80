from __future__ import annotations

import pytest

from deploy.evaluation.experiments.fleet_simulation import simulate
from tests.fakes.redis_process import temporary_redis

USERS = 100


@pytest.mark.parametrize("groups", [16, pytest.param(125, marks=pytest.mark.soak)])
async def test_nine_of_ten_users_find_their_application_s_prompt_on_many_groups(groups: int) -> None:
    alone = await simulate(groups, USERS, 1, None)
    with temporary_redis() as server:
        together = await simulate(groups, USERS, 1, server.url)
    assert together.found >= 0.9
    assert alone.found < 0.6
