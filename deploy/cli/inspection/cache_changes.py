"""The actions of `pando cache` that change the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from deploy.cli.inspection.connection import TIMEOUT_S
from deploy.cli.inspection.identities import subject_text
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    from deploy.cli.inspection.connection import Connection
    from deploy.cli.inspection.prompts import Prompt
    from protos.gen.pando.v1 import common_pb2


def flush(connection: Connection) -> None:
    """Drop all entries that no running request needs."""
    request = scheduler_pb2.FlushCacheRequest()
    answer = connection.scheduler.FlushCache(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(f"{answer.freed_pages:,} pages freed")


def forget(connection: Connection, *, subject: common_pb2.Subject, session: str | None) -> None:
    """Drop all private entries of a subject, or those of one of its conversations."""
    request = scheduler_pb2.ForgetRequest(subject=subject, session=session)
    answer = connection.scheduler.Forget(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(f"{escape(subject_text(subject))} is forgotten: {answer.freed_pages:,} pages freed")


def pin(connection: Connection, *, prompt: Prompt) -> None:
    """Declare a prompt public."""
    ids = prompt.token_ids()
    request = scheduler_pb2.PinRequest(token_ids=ids)
    answer = connection.scheduler.Pin(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    if answer.pinned_tokens:
        console_text = f"{answer.pinned_tokens:,} of {len(ids):,} tokens are public from the next epoch on"
    else:
        console_text = f"nothing pinned: {len(ids):,} tokens are less than a page, or this cache does not support pins"
    connection.console.print(console_text)


def unpin(connection: Connection, *, prompt: Prompt) -> None:
    """Undo a pin."""
    request = scheduler_pb2.UnpinRequest(token_ids=prompt.token_ids())
    answer = connection.scheduler.Unpin(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print("unpinned; cached entries stay public" if answer.was_pinned else "there is no such pin")
