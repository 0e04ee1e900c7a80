"""Limits of tenants and subjects, read from one TOML file by the gateway and the schedulers.

The tables `[default]` and `[tenants.NAME]` hold a tenant's limits; within either, `each_subject` holds the limits of
each of its subjects and `subjects."KIND/NAME"` those of one subject. Values that a table leaves out are inherited: a
tenant's from `[default]`, its `each_subject` from `[default.each_subject]`, a named subject's from its tenant's
`each_subject`.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from common.errors import ConfigurationError
from common.types import Sharing

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from common.types import Subject


class ShareWeights(NamedTuple):
    """The weights of a tenant and of one of its subjects at one time."""

    tenant: float
    subject: float


class SubjectLimits(BaseModel):
    """Limits of one subject; where a number is absent, there is no limit, or the default below applies.

    `weight`: its share under policy `fair`, relative to the tenant's other subjects. `cache_share`: its quota of each
    cache tier's pages; default: `scheduler.cache.quota_share`. `cache_floor`: pages, as a share of each tier, that its
    tenant evicts last while the subject is active; default: 1/1024. `waiting`: requests in a
    scheduler's queue; default: as many as its tenant's limit still allows. `max_context`: tokens of prompt and output
    together. `tokens_per_day`, `tokens_per_month`: budgets of a calendar day and month, in UTC, as the ledger counts
    tokens; the gateway refuses further requests. `throttle_at`: the part of a budget from which on only
    `throttled_requests_per_minute` and `throttled_tokens_per_minute` are allowed, and `throttled_weight` is its share,
    where they are lower than the limits without `throttled_`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    cache_share: float | None = Field(None, gt=0, le=1)
    cache_floor: float | None = Field(None, ge=0, le=1)
    waiting: int | None = Field(None, ge=1)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrent: int | None = Field(None, ge=1)
    max_context: int | None = Field(None, ge=1)
    tokens_per_day: int | None = Field(None, ge=1)
    tokens_per_month: int | None = Field(None, ge=1)
    throttle_at: float | None = Field(None, gt=0, lt=1)
    throttled_requests_per_minute: int | None = Field(None, ge=1)
    throttled_tokens_per_minute: int | None = Field(None, ge=1)
    throttled_weight: float | None = Field(None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _floor_is_within_the_quota(self) -> Self:
        if self.cache_share is not None and self.cache_floor is not None and self.cache_floor > self.cache_share:
            raise ValueError(f"cache_floor ({self.cache_floor}) must be at most cache_share ({self.cache_share})")
        return self

    def weight_while(self, *, throttled: bool) -> float:
        """Return the weight, lower if a budget is nearly used up."""
        return min(self.weight, self.throttled_weight or self.weight) if throttled else self.weight


L = TypeVar("L", bound=SubjectLimits)


class TenantLimits(SubjectLimits):
    """Limits of all subjects of a tenant together, and of each of them.

    Defaults that differ from a subject's: `cache_share`: an equal part of the pages that remain after the shares of
    active tenants with a `cache_share`. `cache_floor`: 1/64. `waiting`: three times
    the number of free places. `sharing`: which other subjects may reuse text that this tenant's subjects computed.
    `adapters`: names or patterns (`team-*`) of the adapters that its requests may use; default: none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sharing: Annotated[Sharing, Field(strict=False)] = Sharing.TENANT
    adapters: list[Annotated[str, Field(min_length=1)]] = []
    # The old name is `each_user`.
    each_subject: SubjectLimits = Field(SubjectLimits(), validation_alias=AliasChoices("each_subject", "each_user"))
    subjects: dict[str, SubjectLimits] = {}


class Limits(BaseModel):
    """All limits. `default` applies to tenants that `tenants` does not name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    default: TenantLimits = TenantLimits()
    tenants: dict[str, TenantLimits] = {}
    _resolved: dict[str, TenantLimits] = PrivateAttr(default_factory=dict)
    _default: TenantLimits = PrivateAttr(default=TenantLimits())

    def model_post_init(self, context: Any) -> None:  # pydantic's type
        """Resolve inherited values once."""
        self._default = _with_subjects(self.default, self.default.each_subject)
        for name, own in self.tenants.items():
            each = _inherit(own.each_subject, self.default.each_subject)
            self._resolved[name] = _with_subjects(_inherit(own, self.default), each)

    def of(self, tenant: str) -> TenantLimits:
        """Return the limits of `tenant`, inherited values included."""
        return self._resolved.get(tenant, self._default)

    def of_subject(self, subject: Subject) -> SubjectLimits:
        """Return the subject's own limits; its tenant's limits apply in addition."""
        tenant = self.of(subject.tenant)
        return tenant.subjects.get(subject.name, tenant.each_subject)

    def sharing_of(self, tenant: str) -> Sharing:
        """Return the tenant's sharing level for text that its subjects computed."""
        return self.of(tenant).sharing

    def described(self) -> dict[str, Any]:  # JSON
        """Return the limits that the file sets, as JSON that `model_validate` accepts."""
        return self.model_dump(mode="json", exclude_unset=True)


def changes(before: Limits, after: Limits) -> dict[str, Any]:  # JSON
    """Return the tables that differ, by their names (`default`, `tenants.NAME`), each before and after."""
    old, new = _tables(before), _tables(after)
    names = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
    return {name: {"before": old.get(name), "after": new.get(name)} for name in names}


def _tables(limits: Limits) -> dict[str, Any]:  # JSON
    found = limits.described()
    tenants = {f"tenants.{name}": table for name, table in found.get("tenants", {}).items()}
    return {"default": found.get("default"), **tenants}


def _inherit(own: L, base: SubjectLimits) -> L:
    """Return `own`, with unset values taken from `base`."""
    left_out = {
        name: getattr(base, name)
        for name in base.model_fields_set - own.model_fields_set
        if name not in ("each_subject", "subjects")
    }
    return own.model_copy(update=left_out)


def _with_subjects(tenant: TenantLimits, each: SubjectLimits) -> TenantLimits:
    subjects = {name: _inherit(own, each) for name, own in tenant.subjects.items()}
    return tenant.model_copy(update={"each_subject": each, "subjects": subjects})


def load_limits(path: Path) -> Limits:
    """Read a limits file.

    Raises:
        ConfigurationError: the file cannot be read, or has an unknown name or an invalid number.
    """
    try:
        return Limits.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ConfigurationError(f"limits file {path}: {where}: {wrong['msg']}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"limits file {path}: {error}") from error
