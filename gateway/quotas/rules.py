"""Limits of tenants and of each of their users, as a TOML file says them."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


class Quota(BaseModel):
    """What may be used; an absent number sets no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrent: int | None = Field(None, ge=1)
    max_context: int | None = Field(None, ge=1)


class TenantQuota(Quota):
    """A tenant's limits, and those of each of its users."""

    each_user: Quota = Quota()


class Rules(BaseModel):
    """All limits. `default` is for tenants that are not named."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    default: TenantQuota = TenantQuota()
    tenants: dict[str, TenantQuota] = {}

    def of(self, tenant: str) -> TenantQuota:
        """Return the limits of `tenant`."""
        return self.tenants.get(tenant, self.default)


def load_rules(path: Path) -> Rules:
    """Read a limits file: tables `default` and `tenants.NAME`, each with `each_user` inside.

    Raises:
        ConfigurationError: it cannot be read, or a name or number is wrong.
    """
    try:
        return Rules.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ConfigurationError(f"limits file {path}: {where}: {wrong['msg']}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"limits file {path}: {error}") from error
