"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from gapless.server.body import read_body
from gapless.server.errors import ApiError
from gapless.server.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

if TYPE_CHECKING:
    from starlette.requests import Request

    from gapless.server.site import Site


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
