"""A request's body: read up to its limit, parsed, checked against its type."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect

from gapless.server.errors import ApiError, ClientGone
from gapless.server.fields import known_fields

if TYPE_CHECKING:
    from starlette.requests import Request

    from gapless.server.options import ServerOptions

# a body that is too large is read on up to this many times its limit, since a client that is still
# sending would not see an answer
DISCARD_FACTOR = 8

_PLACE = re.compile(r"(?s)(.*) - at (?:`key` in )?`\$\.?(.*)`")
_UNKNOWN = re.compile(r"(?:unknown|required) field `(\w+)`")

T = TypeVar("T", bound=msgspec.Struct)


async def read_body(request: Request, kind: type[T], options: ServerOptions) -> T:
    """Return the JSON body as a `kind`.

    Raises:
        ApiError: it is no JSON, too large, too slow to come, or not as `kind` has it.
        ClientGone: the client has closed the connection meanwhile.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # also what a web page of another site cannot send without the user's consent
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"content-type is {content_type!r}; want application/json",
        )
    deadline: float = request.state.arrived + options.request_timeout_seconds
    try:
        async with asyncio.timeout_at(deadline):
            data = await _read(request, options.max_body_bytes)
    except TimeoutError as error:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT, "the body did not come in time; send it faster"
        ) from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return parse(data, kind)


async def _read(request: Request, max_bytes: int) -> bytes:
    data, num_bytes = bytearray(), 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            data += chunk
        elif num_bytes > DISCARD_FACTOR * max_bytes:
            break
    if num_bytes > max_bytes:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {max_bytes} bytes; send less, or raise --max-body-bytes",
        )
    return bytes(data)


def parse(data: bytes, kind: type[T]) -> T:
    """Return a JSON object as a `kind`.

    Raises:
        ApiError: it is none.
    """
    try:
        body: Any = msgspec.json.decode(data)
        if not isinstance(body, dict):
            raise ApiError(
                HTTPStatus.BAD_REQUEST, f"the body is a {type(body).__name__}; want a JSON object"
            )
        known = known_fields(body, kind.__struct_fields__)
        return msgspec.convert(known, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _at_place(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, f"the body is no JSON in UTF-8: {error}; correct it"
        ) from error


def _at_place(message: str) -> ApiError:
    """Name the field that a validation error is about."""
    found = _PLACE.fullmatch(message)
    if found is not None:
        text, place = found.groups()
        return ApiError(HTTPStatus.BAD_REQUEST, f"{place}: {text}; correct it", param=place)
    unknown = _UNKNOWN.search(message)
    param = unknown[1] if unknown is not None else None
    return ApiError(HTTPStatus.BAD_REQUEST, f"{message}; correct it", param=param)
