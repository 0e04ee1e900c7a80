"""Views and subjects, from and to protobuf."""

from __future__ import annotations

from common.errors import InvalidRequestError
from common.names import check_name
from common.types import Subject, View
from protos.gen.pando.v1 import common_pb2


def view_to_wire(view: View) -> common_pb2.View:
    """Encode a view."""
    return common_pb2.View(subject=subject_to_wire(view.subject), salt=view.salt)


def view_from_wire(message: common_pb2.View) -> View:
    """Decode a view.

    Raises:
        InvalidRequestError: its subject is missing, or a part is not a valid name.
    """
    return View(subject_from_wire(message.subject), check_name("view.salt", message.salt))


def subject_to_wire(subject: Subject) -> common_pb2.Subject:
    """Encode a subject."""
    return common_pb2.Subject(tenant=subject.tenant, name=subject.name)


def subject_from_wire(message: common_pb2.Subject) -> Subject:
    """Decode a subject.

    Raises:
        InvalidRequestError: a part is missing or not a valid name; there is no default identity.
    """
    if not message.tenant or not message.name:
        raise InvalidRequestError("subject: tenant and name must both be set", param="subject")
    return Subject(check_name("subject.tenant", message.tenant), check_name("subject.name", message.name))
