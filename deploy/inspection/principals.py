"""Users on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from protos.gen.pando.v1 import common_pb2

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class View:
    """Whose view of the cache is asked for; everything without either."""

    principal: common_pb2.Principal | None = None
    fingerprint: str | None = None

    @staticmethod
    def of(arguments: argparse.Namespace) -> View:
        """Return what `--principal` or `--fingerprint` says."""
        named = arguments.principal
        return View(parse_principal(named) if named else None, arguments.fingerprint)


def parse_principal(text: str) -> common_pb2.Principal:
    """Return the principal in `tenant/user`; a user's name may have slashes.

    Raises:
        ConfigurationError: a part is missing.
    """
    tenant, _, user = text.partition("/")
    if not tenant or not user:
        raise ConfigurationError(f"{text!r} is no TENANT/USER; without API keys the tenant is `default`")
    return common_pb2.Principal(tenant=tenant, user=user)


def name_of(principal: common_pb2.Principal | None, fingerprint: str) -> str:
    """Return what to print for a principal: its name where the scheduler has told it."""
    return f"{principal.tenant}/{principal.user}" if principal is not None else f"user:{fingerprint}"
