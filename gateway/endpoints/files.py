"""/v1/files: its routes, and how an upload is read."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from common.errors import InvalidRequestError, UnavailableError
from common.names import check_name
from gateway.batches.contents import PIECE_BYTES
from gateway.batches.files import FileOwner
from gateway.endpoints.routing import PAUSE_S, ClientGoneError
from gateway.identity.caller import Caller, identify
from gateway.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.types import Message, Receive

    from gateway.batches.files import Json
    from gateway.endpoints.context import Context

# Purposes that a file may be uploaded for; evals have no effect.
PURPOSES: Final = ("batch", "user_data", "evals", "vision")
# Of a multipart body, in addition to the file.
FORM_BYTES: Final = 64 * 1024
MOST_LISTED: Final = 10_000
UPLOAD: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                    },
                }
            }
        },
    }
}


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/v1/files", openapi_extra=UPLOAD)
    async def upload_file(request: Request, caller: Caller = Depends(context.caller)) -> Response:
        """Upload a file."""
        owner = FileOwner.of(caller)
        async with (
            context.charged(request, identify(caller).subject),
            _form(request, context.files.bounds.file_bytes) as (file, purpose),
        ):
            return await _store(context, owner, file, purpose)

    @router.get("/v1/files")
    async def list_files(
        request: Request,
        caller: Caller = Depends(context.caller),
        after: str | None = None,
        limit: int = Query(MOST_LISTED, ge=1, le=MOST_LISTED),
        order: str = Query("desc", pattern="^(asc|desc)$"),
        purpose: str | None = None,
    ) -> Response:
        """List the caller's files."""
        owner = FileOwner.of(caller)
        async with context.charged(request, identify(caller).subject):
            files = await context.files.all_of(owner)
        chosen = [file for file in files if purpose in (None, file["purpose"])]
        return json_response(page(chosen if order == "desc" else chosen[::-1], after, limit))

    @router.get("/v1/files/{file_id}")
    async def retrieve_file(request: Request, file_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """Return a file's object."""
        owner = FileOwner.of(caller)
        async with context.charged(request, identify(caller).subject):
            return json_response(await context.files.get(owner, file_id))

    @router.get("/v1/files/{file_id}/content")
    async def retrieve_content(request: Request, file_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """Return a file's content."""
        owner = FileOwner.of(caller)
        async with context.charged(request, identify(caller).subject):
            file = await context.files.get(owner, file_id)
            pieces = context.files.content(file_id)
            # While an error can still be answered.
            first = await anext(pieces, b"")
        headers = {
            "content-length": str(file["bytes"]),
            # Browsers neither show nor guess what users have uploaded.
            "content-disposition": "attachment",
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(_after(first, pieces), headers=headers, media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """Delete a file."""
        owner = FileOwner.of(caller)
        await context.charge_for_ending(request, identify(caller).subject)
        if await context.batches.uses(owner, file_id):
            raise HttpError(409, f"The file {file_id} is the input of an unfinished batch; cancel the batch first.")
        await context.files.delete(owner, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


def json_response(value: Json) -> Response:
    """Return a response with a JSON body."""
    return Response(orjson.dumps(value), media_type="application/json")


def page(found: Sequence[Json], after: str | None, limit: int) -> Json:
    """Return the part of a list that follows the object with the id `after`, in the shape of OpenAI's lists."""
    ids = [each["id"] for each in found]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"'after' is not the id of an object in the list: {after}", param="after")
    start = 0 if after is None else ids.index(after) + 1
    data = found[start : start + limit]
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(found),
    }


@asynccontextmanager
async def _form(request: Request, limit: int) -> AsyncIterator[tuple[UploadFile, str]]:
    """Yield the file and the purpose of a multipart body with a file of up to `limit` bytes."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise HttpError(415, "Upload a file as multipart/form-data with the fields 'file' and 'purpose'.")
    too_large = HttpError(413, f"The file is larger than the limit of {limit} bytes.", close=True)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit + FORM_BYTES:
        raise too_large
    bounded = Request(request.scope, _bounded(request.receive, limit + FORM_BYTES, too_large))
    try:
        form = await bounded.form(max_files=1, max_fields=8, max_part_size=FORM_BYTES)
    except HTTPException as error:
        raise InvalidRequestError(f"The form cannot be read: {error.detail}") from error
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidRequestError("The form needs a file in the field 'file'.", param="file")
        if purpose not in PURPOSES:
            raise InvalidRequestError(f"'purpose' must be one of {', '.join(PURPOSES)}.", param="purpose")
        if (file.size or 0) > limit:
            raise too_large
        yield file, str(purpose)
    finally:
        await form.close()


def _bounded(receive: Receive, limit: int, too_large: HttpError) -> Receive:
    """Return `receive` with bounds on the body's size and on the pause before each part."""
    size = 0

    async def receive_bounded() -> Message:
        nonlocal size
        try:
            async with asyncio.timeout(PAUSE_S):
                message = await receive()
        except TimeoutError:
            raise HttpError(408, "The end of the request body did not arrive in time.", close=True) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large
        return message

    return receive_bounded


async def _store(context: Context, owner: FileOwner, file: UploadFile, purpose: str) -> Response:
    name = check_name("file", file.filename or "file")
    new = await context.files.reserve(owner, file.size or 0)
    writer = context.files.writer(new.id)
    try:
        while piece := await file.read(PIECE_BYTES):
            await writer.write(piece)
        await writer.finish()
        return json_response(await context.files.add(owner, new, name, purpose, writer.size))
    except BaseException:
        await writer.discard()
        with suppress(UnavailableError):
            await context.files.discard(new)
        raise


async def _after(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece
