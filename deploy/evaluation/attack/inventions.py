"""Ways in which one credential may try to pass for several people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.evaluation.attack.prober import COMPLETIONS, MESSAGES, Disguise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deploy.evaluation.attack.scene import VictimKeys

# Body fields that hold a name, a conversation or a salt. Whether one of them names a person is the credential's affair.
PERSON_FIELDS = ("user", "safety_identifier")
CONVERSATION_FIELDS = ("session_id", "prompt_cache_key", "cache_salt")
UNNAMED = "no name"
MESSAGE_USER = "metadata.user_id"
FIELDS = (*PERSON_FIELDS, *CONVERSATION_FIELDS, MESSAGE_USER, UNNAMED)
# Of one credential that vouches for its users, these make no people.
IMPERSONAL_FIELDS = (*CONVERSATION_FIELDS, UNNAMED)
# As a reverse proxy passes on what a client elsewhere asks. The address is one for documentation (RFC 5737).
REMOTE: Mapping[str, str] = {"x-forwarded-for": "203.0.113.7"}


@dataclass(frozen=True, slots=True)
class Power:
    """A credential; `name` stands in tables. `fields` are those in which it may invent."""

    name: str
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = FIELDS


@dataclass(frozen=True, slots=True)
class Invention:
    """One power that writes made-up values to one field."""

    power: Power
    field: str

    @property
    def label(self) -> str:
        """For notes."""
        return f"{self.power.name}, {self.field}"

    @property
    def endpoint(self) -> str:
        """The endpoint that knows the field."""
        return MESSAGES if self.field == MESSAGE_USER else COMPLETIONS

    def worn(self, value: str) -> Disguise:
        """Return the identity of a request that says `value`."""
        return Disguise(_fields(self.field, value), self.power.headers, self.power.api_key, self.endpoint)


def inventions(powers: list[Power]) -> Iterator[Invention]:
    """Yield all ways of all powers."""
    for power in powers:
        for name in power.fields:
            yield Invention(power, name)


def person(name: str, endpoint: str, api_key: str | None = None) -> Disguise:
    """Return the identity of a user whom a vouching key names, at an endpoint."""
    return Disguise(_fields(MESSAGE_USER if endpoint == MESSAGES else "user", name), {}, api_key, endpoint)


def rivals(credentials: VictimKeys) -> list[Power]:
    """Return the keys of another tenant."""
    powers = []
    if credentials.rival is not None:
        powers.append(Power("rival key", credentials.rival))
    if credentials.rival_app is not None:
        powers.append(Power("rival's vouching key", credentials.rival_app, fields=("user", *IMPERSONAL_FIELDS)))
    return powers


def colleagues(credentials: VictimKeys) -> list[Power]:
    """Return keys of the victims' tenant that are one subject each."""
    powers = [Power("vouching key", fields=IMPERSONAL_FIELDS)]
    if credentials.plain is not None:
        powers.append(Power("ordinary key", credentials.plain))
    if credentials.personal is not None:
        powers.append(Power("personal key", credentials.personal))
    return powers


def _fields(name: str, value: str) -> dict[str, object]:
    if name == UNNAMED:
        return {}
    return {"metadata": {"user_id": value}} if name == MESSAGE_USER else {name: value}
