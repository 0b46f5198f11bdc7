"""Errors as clients see them: status codes and bodies of OpenAI's API."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Literal

import msgspec
from starlette.responses import Response

from gapless.engine.client import EngineGone
from gapless.errors import ContextTooLong, GaplessError, Overloaded, QueueFull, RequestError

# seconds after which a client should try again
RETRY_AFTER_S = {HTTPStatus.TOO_MANY_REQUESTS: 1, HTTPStatus.SERVICE_UNAVAILABLE: 5}

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "server_error",
}
MESSAGES_PATH = "/v1/messages"
# where Anthropic's names differ
_MESSAGES_TYPES = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
# a parameter that an error message begins with
_PARAM = re.compile(r"(\w+)(?:=|\[| holds )")


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every answer that is not a success, and of an event that ends a stream early."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, in Anthropic's form."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True):
    """Body of every answer of /v1/messages that is not a success, and of a stream's error event."""

    error: MessagesErrorDetail
    type: Literal["error"] = "error"


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> bytes:
        """JSON of the error."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorDetail(str(self), kind, self.param, self.code)))

    @property
    def messages_body(self) -> bytes:
        """JSON of the error in the form of /v1/messages."""
        kind = _MESSAGES_TYPES.get(self.status, _TYPES.get(self.status, "invalid_request_error"))
        return msgspec.json.encode(MessagesError(MessagesErrorDetail(kind, str(self))))

    def response(self, path: str) -> Response:
        """Make the whole answer to a request for `path`."""
        headers = {}
        if self.status in RETRY_AFTER_S:
            headers["retry-after"] = str(RETRY_AFTER_S[self.status])
        if self.status is HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        if self.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.REQUEST_TIMEOUT):
            headers["connection"] = "close"
        body = self.messages_body if path.startswith(MESSAGES_PATH) else self.body
        return Response(
            body, status_code=self.status, headers=headers, media_type="application/json"
        )


class TimeLimit(ApiError):
    """A request ran longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"the request took longer than {seconds:g} s and was ended; ask for fewer tokens, or "
            "raise --request-timeout-seconds",
            code="request_timeout",
        )


class Unavailable(ApiError):
    """The server does not take requests, or no longer."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code)


class ClientGone(ApiError):
    """The client has closed its connection; nobody will read this."""

    def __init__(self) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, "the client has gone", code="client_gone")


def wrong(param: str, what: str) -> ApiError:
    """Make the error for a malformed part of a request."""
    return ApiError(HTTPStatus.BAD_REQUEST, f"{param} {what}", param=param)


def as_api_error(error: GaplessError) -> ApiError:
    """Say to a client what the engine or the text side found."""
    message = str(error)
    match error:
        case QueueFull():
            return ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full")
        case Overloaded():
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="overloaded")
        case ContextTooLong():
            code = "context_length_exceeded"
            return ApiError(HTTPStatus.BAD_REQUEST, message, code=code)
        case RequestError():
            found = _PARAM.match(message)
            return ApiError(HTTPStatus.BAD_REQUEST, message, param=found[1] if found else None)
        case EngineGone():
            return ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "the engine has stopped, and with it this request; the server ends too: send the "
                "request again when it is back",
                code="engine_dead",
            )
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message)
