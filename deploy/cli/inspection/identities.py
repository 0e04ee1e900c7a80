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
    """Selection of one view, by its identity or its fingerprint; without either, all nodes are shown."""

    view: common_pb2.View | None = None
    fingerprint: str | None = None

    @staticmethod
    def of(arguments: argparse.Namespace) -> Filter:
        """Return the filter from `--view` and `--salt`, or from `--fingerprint`.

        Raises:
            ConfigurationError: there is a salt without a view, or the view is malformed.
        """
        if arguments.view is None:
            if arguments.salt:
                raise ConfigurationError("--salt requires --view")
            return Filter(None, arguments.fingerprint)
        view = common_pb2.View(subject=parse_subject(arguments.view), salt=arguments.salt)
        return Filter(view, arguments.fingerprint)


def parse_subject(text: str) -> common_pb2.Subject:
    """Parse a subject of the form `tenant/kind/name`; names may contain slashes, in tenants written as %2F.

    Raises:
        ConfigurationError: a part is missing.
    """
    tenant, _, name = text.partition("/")
    if not tenant or not name:
        raise ConfigurationError(
            f"{text!r} is not a TENANT/SUBJECT such as acme/user/ann, acme/key/KEYID or default/local; "
            "without API keys the tenant is `default`"
        )
    return common_pb2.Subject(tenant=tenant.replace("%2F", "/").replace("%25", "%"), name=name)


def subject_text(subject: common_pb2.Subject) -> str:
    """Return a subject in the form that `parse_subject` accepts."""
    tenant = subject.tenant.replace("%", "%25").replace("/", "%2F")
    return f"{tenant}/{subject.name}"


def name_of(view: common_pb2.View | None, fingerprint: str) -> str:
    """Return the text to print for a view: its names if the scheduler returned them, otherwise its fingerprint."""
    if view is None:
        return f"view:{fingerprint}"
    return f"{subject_text(view.subject)} ({view.salt})" if view.salt else subject_text(view.subject)
