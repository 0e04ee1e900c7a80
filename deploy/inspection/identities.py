"""Views and subjects on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from protos.gen.pando.v1 import common_pb2

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class Filter:
    """Which view of the cache to show; all nodes without either."""

    view: common_pb2.View | None = None
    fingerprint: str | None = None

    @staticmethod
    def of(arguments: argparse.Namespace) -> Filter:
        """Return the filter that `--view` and `--salt`, or `--fingerprint`, give."""
        if arguments.view is None:
            if arguments.salt:
                raise ConfigurationError("--salt narrows --view, which is missing")
            return Filter(None, arguments.fingerprint)
        view = common_pb2.View(subject=parse_subject(arguments.view), salt=arguments.salt)
        return Filter(view, arguments.fingerprint)


def parse_subject(text: str) -> common_pb2.Subject:
    """Return the subject in `tenant/kind/name`; names may have slashes.

    Raises:
        ConfigurationError: a part is missing.
    """
    tenant, _, name = text.partition("/")
    if not tenant or not name:
        raise ConfigurationError(
            f"{text!r} is no TENANT/SUBJECT such as acme/user/ann, acme/key/KEYID or default/local; "
            "without API keys the tenant is `default`"
        )
    return common_pb2.Subject(tenant=tenant, name=name)


def subject_text(subject: common_pb2.Subject) -> str:
    """Return a subject as `parse_subject` reads it."""
    return f"{subject.tenant}/{subject.name}"


def name_of(view: common_pb2.View | None, fingerprint: str) -> str:
    """Return what to print for a view: its names where the scheduler shows them, else its fingerprint."""
    if view is None:
        return f"view:{fingerprint}"
    return f"{subject_text(view.subject)} ({view.salt})" if view.salt else subject_text(view.subject)
