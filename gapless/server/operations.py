"""What clients and operators ask of the server itself: its model, work, cache and health."""

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
    FlushCacheResponse,
    Model,
    ModelList,
    Status,
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
