"""Settings about who may ask, and how much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from common.section import Section

# All of them asymmetric: who can check a token must not be able to make one.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# Without scheme, port and wildcards.
HostName = Annotated[
    str, StringConstraints(to_lower=True, max_length=253, pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")
]


class IdentitySettings(Section):
    """Keys, tokens, trusted proxies and limits of the gateway."""

    keys_file: Path | None = None
    """TOML file of API keys, written by `pando keys`; read again when it changes. Absent: no key is asked for."""
    limits_file: Path | None = None
    """TOML file with limits of tenants and subjects; read again when it changes. Absent: no limits. Schedulers read
    their part of it by scheduler.limits_file."""
    max_priority: int = 0
    """Highest `priority` that requests may ask for whose key does not say another (`pando keys create --max-priority`);
    administrators may ask for any."""
    default_tenant: str = Field(default="default", min_length=1, max_length=64)
    """Tenant of every caller while no keys are asked for."""
    anonymous: Literal["auto", "local", "isolated", "vouched", "refuse"] = "auto"
    """Requests without credential, while neither keys nor tokens are configured. local: all are one local person.
    isolated: together they are one subject, which finds public text only and proves nothing. auto: local for direct
    connections over loopback, isolated otherwise. vouched: as auto, but users named in requests are taken for people,
    for tests and benchmarks on closed networks. refuse: 401."""
    allowed_hosts: tuple[HostName, ...] = ()
    """Host names, beside localhost, for which requests over loopback (all requests, if `anonymous` is local) are
    answered while no keys are asked for, such as those that a reverse proxy on the gateway's machine passes on.
    Requests for these names are not an administrator's."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks (CIDR) whose direct connections may name tenant and user in the two headers below."""
    tenant_header: str = "x-pando-tenant"
    """Header in which a trusted proxy names the tenant; it makes an API key unnecessary."""
    user_header: str = "x-pando-user"
    """Header in which a trusted proxy names the user."""
    jwt_keys: str | None = None
    """JSON Web Key Set that signs tokens: a file or an https URL. Absent: tokens are not accepted."""
    jwt_issuer: str | None = None
    """What `iss` of a token must be; needed with jwt_keys."""
    jwt_audience: str | None = None
    """What `aud` of a token must contain; needed with jwt_keys."""
    jwt_algorithms: tuple[Algorithm, ...] = ("RS256", "ES256", "EdDSA")
    """Signatures that are accepted."""
    jwt_tenant_claim: str | None = None
    """Claim that names the tenant; absent: everybody belongs to default_tenant."""
    jwt_user_claim: str = "sub"
    """Claim that names the user."""
    jwt_admin_scope: str | None = None
    """Tokens whose `scope` has this word may administrate; absent: no token may."""
    jwt_cache_s: float = Field(default=300.0, ge=1)
    """How long keys that came from a URL are kept before they are asked for again."""
