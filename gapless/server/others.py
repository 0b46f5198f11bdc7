"""The small endpoints: models, tokens, the cache, aborting, and how the server is."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from gapless.observe.metrics import CONTENT_TYPE
from gapless.server.body import read_body
from gapless.server.errors import ApiError, Unavailable
from gapless.server.schemas import (
    AbortRequest,
    AbortResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    FlushCacheResponse,
    Model,
    ModelList,
    Status,
    TokenizeRequest,
    TokenizeResponse,
)
from gapless.server.site import Phase

if TYPE_CHECKING:
    from starlette.requests import Request

    from gapless.server.site import Site


async def models(site: Site, request: Request) -> ModelList:
    """List the one model."""
    del request
    return ModelList([_model(site)])


async def model(site: Site, request: Request) -> Model:
    """Describe the model by its name."""
    site.check_model(request.path_params["model"])
    return _model(site)


def _model(site: Site) -> Model:
    return Model(site.model_name, site.created, site.ready.limits.max_model_len)


async def tokenize(site: Site, request: Request) -> TokenizeResponse:
    """Return the token ids of a prompt or a chat, whatever their number."""
    body = await read_body(request, TokenizeRequest, site.options)
    site.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(
            HTTPStatus.BAD_REQUEST, "want either a prompt or messages; send one", param="prompt"
        )
    ids = await asyncio.to_thread(_token_ids, site, body)
    return TokenizeResponse(ids, len(ids), site.ready.limits.max_model_len)


def _token_ids(site: Site, body: TokenizeRequest) -> list[int]:
    reader = site.reader
    if body.prompt is not None:
        special = body.add_special_tokens
        return reader.tokenizer.encode(body.prompt, add_special_tokens=special)
    prompt = reader.chat(
        body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    return list(prompt.token_ids)


async def detokenize(site: Site, request: Request) -> DetokenizeResponse:
    """Return the text of token ids."""
    body = await read_body(request, DetokenizeRequest, site.options)
    site.check_model(body.model)
    reader = site.reader
    reader.limits.check_ids("tokens", body.tokens)
    decode = reader.tokenizer.decode
    skips = body.skip_special_tokens
    return DetokenizeResponse(
        await asyncio.to_thread(decode, body.tokens, skip_special_tokens=skips)
    )


async def abort(site: Site, request: Request) -> AbortResponse:
    """End requests that are being answered; those that are not are none of an error."""
    body = await read_body(request, AbortRequest, site.options)
    if (body.request_id is not None) == body.abort_all:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            "want either a request_id or abort_all; send one",
            param="request_id",
        )
    found = [
        running
        for own_id, running in site.running.items()
        if body.abort_all or body.request_id in (own_id, own_id.partition("-")[2])
    ]
    for running in found:
        running.abort()
    return AbortResponse(len(found))


async def flush_cache(site: Site, request: Request) -> FlushCacheResponse:
    """Forget all prefixes that no request is using."""
    del request
    return FlushCacheResponse(await site.engine.flush_cache())


async def health(site: Site, request: Request) -> Status:
    """Say that the server is alive; it is while it loads and drains, too."""
    del request
    if site.engine.gone.done():
        raise Unavailable("the engine has stopped", "engine_dead")
    return Status(site.phase.value)


async def ready(site: Site, request: Request) -> Status:
    """Say whether requests are taken."""
    del request
    if site.engine.gone.done():
        raise Unavailable("the engine has stopped", "engine_dead")
    site.check_phase(takes_work=True)
    return Status(Phase.READY.value)


async def metrics(site: Site, request: Request) -> Response:
    """Return Prometheus metrics."""
    del request
    text = site.metrics.render(len(asyncio.all_tasks()))
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def server_info(site: Site, request: Request) -> dict[str, Any]:
    """Return options, the engine's settings, and what it holds."""
    del request
    return await site.info()
