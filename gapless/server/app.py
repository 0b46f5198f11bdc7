"""The HTTP application: a table of endpoints, and what holds for all of them."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gapless.errors import GaplessError
from gapless.server import (
    chat,
    completions,
    message_schemas,
    messages,
    operations,
    page,
    response_schemas,
    responses,
    schemas,
    tokens,
)
from gapless.server.errors import (
    MESSAGES_PATH,
    ApiError,
    ErrorBody,
    MessagesError,
    as_api_error,
)
from gapless.server.openapi import document
from gapless.server.sse import EventStream

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from gapless.server.site import Site

logger = logging.getLogger(__name__)

Answer = msgspec.Struct | dict[str, Any] | Response | EventStream
Handler = Callable[["Site", Request], Awaitable[Answer]]

# what anybody may ask, and at any time
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", page.PATH})


@dataclass(frozen=True)
class Endpoint:
    """A path with its method, handler and types."""

    method: str
    path: str
    handler: Handler
    response: type[msgspec.Struct] | None
    """None: no JSON object of a fixed form."""
    request: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    """Of the events of a stream, where there may be one of events of one type."""
    is_work: bool = False
    """Whether it makes the engine work, and may stream."""
    error: type[msgspec.Struct] = ErrorBody


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat.create, schemas.ChatResponse,
             schemas.ChatRequest, schemas.ChatChunk, is_work=True),
    Endpoint("POST", "/v1/completions", completions.create, schemas.CompletionResponse,
             schemas.CompletionRequest, schemas.CompletionResponse, is_work=True),
    Endpoint("POST", MESSAGES_PATH, messages.create, message_schemas.MessagesResponse,
             message_schemas.MessagesRequest, is_work=True, error=MessagesError),
    Endpoint("POST", f"{MESSAGES_PATH}/count_tokens", messages.count_tokens,
             message_schemas.CountTokensResponse, message_schemas.CountTokensRequest,
             error=MessagesError),
    Endpoint("POST", "/v1/responses", responses.create, response_schemas.ResponsesResponse,
             response_schemas.ResponsesRequest, is_work=True),
    Endpoint("GET", "/v1/models", operations.models, schemas.ModelList),
    Endpoint("GET", "/v1/models/{model:path}", operations.model, schemas.Model),
    Endpoint("POST", "/tokenize", tokens.tokenize, schemas.TokenizeResponse,
             schemas.TokenizeRequest),
    Endpoint("POST", "/detokenize", tokens.detokenize, schemas.DetokenizeResponse,
             schemas.DetokenizeRequest),
    Endpoint("POST", "/abort", operations.abort, schemas.AbortResponse, schemas.AbortRequest),
    Endpoint("POST", "/flush_cache", operations.flush_cache, schemas.FlushCacheResponse),
    Endpoint("GET", "/health", operations.health, schemas.Status),
    Endpoint("GET", "/ready", operations.ready, schemas.Status),
    Endpoint("GET", "/metrics", operations.metrics, None),
    Endpoint("GET", "/server_info", operations.server_info, None),
)  # fmt: skip


def make_app(site: Site) -> ASGIApp:
    """Return the application of one server."""
    routes = [
        Route(endpoint.path, _bind(site, endpoint.handler), methods=[endpoint.method])
        for endpoint in ENDPOINTS
    ]
    openapi = msgspec.json.encode(document(ENDPOINTS, open_paths=OPEN_PATHS))

    async def describe(request: Request) -> Response:
        del request
        return Response(openapi, media_type="application/json")

    routes.append(Route("/openapi.json", describe, methods=["GET"]))
    routes.append(Route(page.PATH, page.show, methods=["GET"]))
    return Starlette(
        routes=routes,
        middleware=[Middleware(Gate, site=site)],
        exception_handlers={
            HTTPException: _on_http_error,
            ApiError: _on_api_error,
            GaplessError: _on_own_error,
            Exception: _on_other_error,
        },
    )


def _bind(site: Site, handler: Handler) -> Callable[[Request], Awaitable[Any]]:
    async def endpoint(request: Request) -> Response | EventStream:
        answer = await handler(site, request)
        if isinstance(answer, (Response, EventStream)):
            return answer
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return endpoint


class Gate:
    """What every request passes: the key, whether this is the time for it, and the count."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app = app
        self._site = site
        key = site.options.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["arrived"] = asyncio.get_running_loop().time()
        site = self._site

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                # a path of the table, so that clients cannot make up labels
                path = getattr(scope.get("route"), "path", "other")
                site.metrics.responded(path, message["status"])
                logger.debug("%s %s: %d", scope["method"], scope["path"], message["status"])
            await send(message)

        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, count)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, count)
            return
        site.enter()
        try:
            await self._app(scope, receive, count)
        finally:
            site.leave()

    def _check(self, scope: Scope) -> None:
        if self._key is not None:
            headers = dict(scope["headers"])
            bearer = headers.get(b"authorization", b"")
            # takes as long for a wrong key as for a right one
            is_bearer = hmac.compare_digest(bearer, b"Bearer " + self._key)
            is_own = hmac.compare_digest(headers.get(b"x-api-key", b""), self._key)
            if not (is_bearer or is_own):
                raise ApiError(
                    HTTPStatus.UNAUTHORIZED,
                    "the API key is wrong or missing; send `Authorization: Bearer KEY` or "
                    "`x-api-key: KEY`",
                    code="invalid_api_key",
                )
        takes_work = scope["method"] == "POST" and scope["path"] != "/abort"
        self._site.check_phase(takes_work=takes_work)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "handlers are chosen by type"
    return error.response(request.url.path)


async def _on_own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GaplessError), "handlers are chosen by type"
    return as_api_error(error).response(request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "handlers are chosen by type"
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path}: {status.phrase}; see /openapi.json"
    response = ApiError(status, message).response(request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _on_other_error(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = "the server failed at this request; its log says why"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message).response(request.url.path)
