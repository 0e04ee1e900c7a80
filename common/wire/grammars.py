"""Grammars, to and from protobuf."""

from __future__ import annotations

from common.errors import InvalidRequestError
from common.grammars import MAX_GRAMMAR_BYTES, NO_SCOPE, Grammar, GrammarKind, GrammarScope
from common.types import Subject, View
from common.wire.identity import view_from_wire, view_to_wire
from protos.gen.pando.v1 import common_pb2

_KINDS = {kind: common_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind}
_KINDS_BACK = {wire: kind for kind, wire in _KINDS.items()}


def grammar_to_wire(grammar: Grammar | None) -> common_pb2.Grammar | None:
    """Encode a grammar, if there is one."""
    if grammar is None:
        return None
    scope = grammar.scope
    view = None if scope == NO_SCOPE else view_to_wire(View(Subject(scope.tenant, scope.subject), scope.salt))
    return common_pb2.Grammar(kind=_KINDS[grammar.kind], text=grammar.text, param=grammar.param, view=view)


def grammar_from_wire(message: common_pb2.Grammar) -> Grammar:
    """Decode a grammar; callers check HasField first.

    Raises:
        InvalidRequestError: its kind is unknown, its text is too long, or its view is incomplete.
    """
    kind = _KINDS_BACK.get(message.kind)
    if kind is None:
        raise InvalidRequestError("The grammar's kind is not supported.", param=message.param)
    if len(message.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"A grammar must have at most {MAX_GRAMMAR_BYTES} bytes.", param=message.param)
    if not message.HasField("view"):
        return Grammar(kind, message.text, message.param)
    view = view_from_wire(message.view)
    return Grammar(kind, message.text, message.param, GrammarScope(view.tenant, view.subject.name, view.salt))
