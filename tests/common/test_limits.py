from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.limits import Limits, SubjectLimits, load_limits
from common.types import Sharing, Subject

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
[default]
concurrent = 4
weight = 2
[default.each_subject]
requests_per_minute = 60
[tenants.acme]
max_context = 9
sharing = "none"
cache_share = 0.5
cache_floor = 0.1
[tenants.acme.each_subject]
concurrent = 1
[tenants.acme.subjects."user/ann"]
weight = 3
waiting = 5
"""


def load(tmp_path: Path, text: str) -> Limits:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    return load_limits(path)


def test_a_table_inherits_the_fields_that_it_omits(tmp_path: Path) -> None:
    limits = load(tmp_path, FILE)
    acme = limits.of("acme")
    assert (acme.max_context, acme.concurrent, acme.weight) == (9, 4, 2.0)
    assert (acme.cache_share, acme.cache_floor, acme.sharing) == (0.5, 0.1, Sharing.NONE)
    assert limits.of("anyone").max_context is None
    assert (limits.of("anyone").concurrent, limits.sharing_of("anyone")) == (4, Sharing.TENANT)
    assert limits.of_subject(Subject("anyone", "user/ann")) == SubjectLimits(requests_per_minute=60)
    assert limits.of_subject(Subject("acme", "key/1")) == SubjectLimits(requests_per_minute=60, concurrent=1)
    ann = SubjectLimits(requests_per_minute=60, concurrent=1, weight=3, waiting=5)
    assert limits.of_subject(Subject("acme", "user/ann")) == ann


def test_a_tenant_s_own_cache_share_and_weight_do_not_apply_to_its_subjects(tmp_path: Path) -> None:
    limits = load(tmp_path, FILE)
    assert limits.of_subject(Subject("acme", "key/1")).cache_share is None
    assert limits.of_subject(Subject("acme", "key/1")).weight == 1.0


def test_the_old_name_of_each_subject_is_understood(tmp_path: Path) -> None:
    limits = load(tmp_path, "[tenants.acme.each_user]\nconcurrent = 1\n")
    assert limits.of_subject(Subject("acme", "key/1")).concurrent == 1


def test_stated_limits_survive_a_round_trip_through_json(tmp_path: Path) -> None:
    limits = load(tmp_path, FILE)
    again = Limits.model_validate(limits.described())
    assert again == limits
    assert again.of_subject(Subject("acme", "user/ann")) == limits.of_subject(Subject("acme", "user/ann"))
    assert again.sharing_of("acme") is Sharing.NONE
    assert Limits().described() == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x", "limits.toml"),
        ("[default]\nrequests = 1", "default.requests"),
        ("[default]\nconcurrent = 0", "default.concurrent"),
        ("[default]\nconcurrent = '4'", "default.concurrent"),
        ("[default]\nweight = 0", "default.weight"),
        ("[default]\nweight = inf", "default.weight"),
        ("[tenants.acme]\ncache_share = 1.5", "tenants.acme.cache_share"),
        ("[tenants.acme]\ncache_share = 0.1\ncache_floor = 0.2", "cache_floor .0.2. must be at most cache_share"),
        ("[tenants.acme]\nsharing = 'all'", "tenants.acme.sharing"),
        ("[tenants.acme.subjects.'user/ann']\nsharing = 'none'", "tenants.acme.subjects.user/ann.sharing"),
        ("[default.each_user]\n[default.each_subject]\n", "default.each_user"),
    ],
)
def test_an_error_of_malformed_limits_names_the_field(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        load(tmp_path, text)
