"""Settings of the gateway for authentication, identity and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from common.section import Section

# Asymmetric algorithms only: a party that can verify a token must not be able to create one.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# Without scheme, port and wildcards.
HostName = Annotated[
    str, StringConstraints(to_lower=True, max_length=253, pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")
]


class IdentitySettings(Section):
    """The gateway's API keys, tokens, trusted proxies and limits."""

    keys_file: Path | None = None
    """TOML file of API keys, written by `pando keys`; reloaded when it changes. Absent: no key is required."""
    limits_file: Path | None = None
    """TOML file with limits of tenants and subjects; reloaded when it changes. Absent: no limits. Schedulers read the
    same file through scheduler.limits_file."""
    max_priority: int = 0
    """Highest `priority` that a request may set, unless its key has another limit (`pando keys create --max-priority`);
    administrators may set any."""
    default_tenant: str = Field(default="default", min_length=1, max_length=64)
    """Tenant of all callers while no keys are required."""
    anonymous: Literal["auto", "local", "isolated", "vouched", "refuse"] = "auto"
    """How requests without a credential are treated while neither keys nor tokens are configured. local: as requests of
    one person at this machine. isolated: as one subject that finds only public text and is no evidence for sharing.
    auto: local for direct connections over loopback, isolated otherwise. vouched: as auto, but users named in requests
    count as separate people; for tests and benchmarks on closed networks. refuse: they are answered with 401."""
    allowed_hosts: tuple[HostName, ...] = ()
    """Host names besides localhost that are accepted in requests over loopback (in all requests if `anonymous` is
    local) while no keys are required, for example those of a reverse proxy on the gateway's machine. Requests for these
    names have no administrator rights."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks (CIDR) whose direct connections may name tenant and user in the two headers below."""
    tenant_header: str = "x-pando-tenant"
    """Header in which a trusted proxy names the tenant; such requests need no API key."""
    user_header: str = "x-pando-user"
    """Header in which a trusted proxy names the user."""
    jwt_keys: str | None = None
    """JSON Web Key Set that tokens are verified with: a file or an https URL. Absent: tokens are not accepted."""
    jwt_issuer: str | None = None
    """Required value of a token's claim `iss`; mandatory with jwt_keys."""
    jwt_audience: str | None = None
    """Value that a token's claim `aud` must contain; mandatory with jwt_keys."""
    jwt_algorithms: tuple[Algorithm, ...] = ("RS256", "ES256", "EdDSA")
    """Accepted signature algorithms."""
    jwt_tenant_claim: str | None = None
    """Claim that names the tenant; absent: all users belong to default_tenant."""
    jwt_user_claim: str = "sub"
    """Claim that names the user."""
    jwt_admin_scope: str | None = None
    """Tokens with this word in `scope` have administrator rights; absent: no token has."""
    jwt_cache_s: float = Field(default=300.0, ge=1)
    """Seconds for which keys from a URL are cached."""
