from __future__ import annotations

from typing import get_args

from common.settings import SchedulerSettings
from services.scheduler.cache.factory import CacheName, make_cache
from services.scheduler.cache.pages import PageAllocator


def test_every_name_of_the_settings_makes_a_cache() -> None:
    names = get_args(SchedulerSettings.model_fields["cache"].annotation)
    assert set(names) == set(get_args(CacheName))
    for name in names:
        assert make_cache(name, PageAllocator(4), 16).page_size == 16
