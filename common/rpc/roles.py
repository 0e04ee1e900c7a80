"""The table of roles that may call each method of each server, enforced where mutual TLS identifies callers.

A method that is not listed is refused. `grpc.health.v1.Health` is open to every certificate of the authority.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

Callers = Mapping[str, frozenset["Role"]]


class Role(StrEnum):
    """The role that a certificate gives to its owner."""

    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    DETOKENIZER = "detokenizer"
    OPERATOR = "operator"


_GATEWAY = frozenset({Role.GATEWAY})
_TOKENIZER = frozenset({Role.TOKENIZER})
_SCHEDULER = frozenset({Role.SCHEDULER})
_WORKER = frozenset({Role.WORKER})
_OPERATOR = frozenset({Role.OPERATOR})

_EVERY_SERVER: Callers = {
    "/pando.v1.Operations/SetLogLevel": _OPERATOR,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
}

# Keyed by the full name of the server's main service, as callers of `Sessions` differ between tokenizer and scheduler.
CALLERS: Mapping[str, Callers] = {
    "pando.v1.Tokenizer": {
        "/pando.v1.Tokenizer/Submit": _GATEWAY,
        "/pando.v1.Tokenizer/FindUnadmitted": _GATEWAY,
        "/pando.v1.Tokenizer/Tokenize": _GATEWAY | _OPERATOR,
        "/pando.v1.Tokenizer/Detokenize": _GATEWAY | _OPERATOR,
        "/pando.v1.Tokenizer/RenderChat": _GATEWAY | _OPERATOR,
        "/pando.v1.Tokenizer/GetModel": _GATEWAY | _OPERATOR,
        "/pando.v1.Sessions/OpenSession": _GATEWAY,
        "/pando.v1.Sessions/CloseSession": _GATEWAY,
        "/pando.v1.Sessions/FindSession": _GATEWAY,
        **_EVERY_SERVER,
    },
    "pando.v1.Scheduler": {
        "/pando.v1.Scheduler/Submit": _TOKENIZER,
        # Of other groups, which leave prompts to this one.
        "/pando.v1.Scheduler/Prefill": _SCHEDULER,
        "/pando.v1.Scheduler/SetRole": _OPERATOR,
        "/pando.v1.Sessions/OpenSession": _TOKENIZER,
        "/pando.v1.Sessions/CloseSession": _TOKENIZER,
        "/pando.v1.Sessions/FindSession": _TOKENIZER,
        # The tokenizer routes by load; the gateway answers /get_server_info, /flush_cache, timelines and the console.
        "/pando.v1.Scheduler/GetState": _TOKENIZER | _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/FlushCache": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/GetTimelines": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/UpdateWeights": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/Sleep": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/WakeUp": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/LoadAdapter": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/UnloadAdapter": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/ListAdapters": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/DumpTree": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/Pause": _OPERATOR,
        "/pando.v1.Scheduler/Resume": _OPERATOR,
        "/pando.v1.Scheduler/WatchCacheEvents": _GATEWAY | _OPERATOR,
        "/pando.v1.Scheduler/Forget": _OPERATOR,
        "/pando.v1.Scheduler/Pin": _OPERATOR,
        "/pando.v1.Scheduler/Unpin": _OPERATOR,
        **_EVERY_SERVER,
    },
    "pando.v1.Worker": {
        "/pando.v1.Worker/Configure": _SCHEDULER,
        "/pando.v1.Worker/Execute": _SCHEDULER,
        "/pando.v1.Worker/PrepareGrammar": _SCHEDULER,
        "/pando.v1.Worker/CheckWeights": _SCHEDULER,
        "/pando.v1.Worker/PrepareWeights": _SCHEDULER,
        "/pando.v1.Worker/ReadAdapter": _SCHEDULER,
        "/pando.v1.Worker/DropAdapter": _SCHEDULER,
        "/pando.v1.Worker/SetAdapters": _SCHEDULER,
        "/pando.v1.Worker/GetAdapters": _SCHEDULER | _OPERATOR,
        "/pando.v1.Worker/Sleep": _SCHEDULER,
        "/pando.v1.Worker/WakeUp": _SCHEDULER,
        "/pando.v1.Worker/GrantPages": _SCHEDULER,
        "/pando.v1.Worker/RevokePages": _SCHEDULER,
        # Of other groups, with a lease from this worker's scheduler.
        "/pando.v1.Worker/ReadPages": _WORKER,
        "/pando.v1.Worker/ReadSnapshot": _WORKER,
        "/pando.v1.Worker/MapPages": _WORKER,
        "/pando.v1.Worker/ReadMappedPages": _WORKER,
        "/pando.v1.Worker/Encode": _SCHEDULER,
        "/pando.v1.Worker/FetchEmbeddings": _SCHEDULER,
        # Of the group for which this worker encodes, with a ticket from its scheduler.
        "/pando.v1.Worker/ReadEmbeddings": _WORKER,
        "/pando.v1.Worker/GetState": _SCHEDULER | _OPERATOR,
        "/pando.v1.Worker/StartProfile": _OPERATOR,
        "/pando.v1.Worker/StopProfile": _OPERATOR,
        **_EVERY_SERVER,
    },
    "pando.v1.Detokenizer": {
        "/pando.v1.Detokenizer/Push": _SCHEDULER,
        "/pando.v1.Detokenizer/Subscribe": _GATEWAY,
        "/pando.v1.Detokenizer/FindUnknown": _GATEWAY,
        **_EVERY_SERVER,
    },
}
