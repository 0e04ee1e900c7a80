from __future__ import annotations

import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from common.errors import ConfigurationError
from common.settings import CacheSettings
from services.scheduler.cache.config import CacheConfig, EvictionPolicy, Mode, PrivacyProfile
from services.scheduler.cache.factory import CacheName, make_cache, resolve_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from tests.services.scheduler.cache.driver import with_rules


def test_every_name_of_the_settings_makes_a_cache() -> None:
    names = get_args(CacheSettings.model_fields["mode"].annotation)
    assert set(names) == set(get_args(CacheName))
    for name in names:
        assert make_cache(name, PageAllocator(4), 16).page_size == 16


def test_defaults_of_the_settings_are_those_of_the_cache() -> None:
    assert resolve_cache(CacheSettings()) == CacheConfig()
    # These settings are no rules of the cache.
    rules = set(CacheSettings.model_fields) - {"epoch_seconds", "sharing_seconds", "decision_log"}
    assert rules <= {field.name for field in fields(CacheConfig)}


def test_every_rule_in_the_settings_has_an_effect() -> None:
    given = CacheSettings(
        eviction="lfu",
        promotion_subjects=5,
        promotion_epochs=7,
        share_across_tenants=True,
        quota_share=0.5,
        strict_numerics=True,
    )
    assert resolve_cache(given, content_check=True) == CacheConfig(
        profile=PrivacyProfile(few_creators=10),
        eviction=EvictionPolicy.LFU,
        promotion_subjects=5,
        promotion_epochs=7,
        share_across_tenants=True,
        content_check=True,
        quota_share=0.5,
        strict_numerics=True,
    )


def test_a_floor_is_at_most_the_quota() -> None:
    assert resolve_cache(CacheSettings(quota_share=0.0001)).floor_share == 0.0001


def test_settings_reach_the_cache() -> None:
    config = resolve_cache(CacheSettings(promotion_subjects=5, eviction="slru", quota_share=0.5))
    cache = make_cache("isolated_pinned", PageAllocator(8), 16, config)
    assert isinstance(cache, RadixCache)
    assert (cache.config.mode, cache.config.eviction) == (Mode.ISOLATED_PINNED, EvictionPolicy.SLRU)
    assert (cache.config.promotion_subjects, cache.config.quota_share) == (5, 0.5)


def test_settings_leave_the_constants_of_the_privacy_bounds_alone() -> None:
    names = {field.name for field in fields(PrivacyProfile)}
    assert names.isdisjoint(CacheSettings.model_fields)
    assert resolve_cache(CacheSettings()).profile == PrivacyProfile()


def test_the_privacy_model_lists_every_constant_with_its_value() -> None:
    page = (Path(__file__).parents[4] / "docs" / "privacy.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| B", page, re.MULTILINE)
    assert listed == [(name, f"{value:.6g}") for name, value in asdict(PrivacyProfile()).items()]


@pytest.mark.parametrize(
    ("subjects", "few_creators", "creators_limit"), [(1, 6, 32), (3, 6, 32), (4, 8, 32), (16, 32, 32), (32, 64, 64)]
)
def test_limits_on_creators_grow_with_the_required_evidence(
    subjects: int, few_creators: int, creators_limit: int
) -> None:
    config = resolve_cache(CacheSettings(promotion_subjects=subjects))
    assert config.profile == replace(PrivacyProfile(), few_creators=few_creators, creators_limit=creators_limit)


@pytest.mark.parametrize(
    "wrong",
    [
        {"promotion_subjects": 0},
        {"promotion_subjects": 33},
        {"quota_share": 0.1, "floor_share": 0.2},
        {"headroom_share": 1.0},
        {"creators_limit": 5},
        {"demotion_tenants": 1},
        {"diversity_min": 1.5},
    ],
)
def test_constants_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        with_rules(CacheConfig(), **wrong)


@pytest.mark.parametrize(
    ("wanted", "device", "strict"),
    [
        ("auto", "cpu", False),
        ("auto", "fake", False),
        ("auto", "cuda:0", True),
        ("auto", "cuda", True),
        (True, "cpu", True),
        (False, "cuda", False),
    ],
)
def test_strict_numerics_are_the_default_on_gpus_only(wanted: Any, device: str, strict: bool) -> None:
    """Point 1.13: there KV may depend on what else was in the batch."""
    settings = CacheSettings(strict_numerics=wanted)
    assert resolve_cache(settings, device).strict_numerics is strict
