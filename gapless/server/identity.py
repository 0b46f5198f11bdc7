"""Ids of responses, by which requests are aborted and found in logs."""

from __future__ import annotations

import re
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING

from gapless.server.errors import ApiError

if TYPE_CHECKING:
    from starlette.requests import Request

HEADER = "x-request-id"
_VALID = re.compile(r"[\w.:+=@-]{1,128}", re.ASCII)


def response_id(kind: str, given: str | None, request: Request) -> str:
    """Return `KIND-ID`, of the id in the body, that in the header, or a fresh one.

    Raises:
        ApiError: the given one is no plain name.
    """
    wanted = given if given is not None else request.headers.get(HEADER)
    if wanted is None:
        return f"{kind}-{uuid.uuid4().hex}"
    if not _VALID.fullmatch(wanted):
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"request_id={wanted!r}: want 1 to 128 letters, digits or any of _.:+=@-",
            param="request_id",
        )
    return f"{kind}-{wanted}"
