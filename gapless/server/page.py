"""GET /: a page to chat on and to watch the server by, in one file that needs no other."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request

PATH = "/"
_SOURCE = resources.files("gapless.server").joinpath("page.html").read_text(encoding="utf-8")


def _hash(tag: str) -> str:
    """Return the hash by which a policy admits the page's one element of a kind."""
    (text,) = re.findall(f"(?s)<{tag}>(.*?)</{tag}>", _SOURCE)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_HEADERS = {
    # the page's own code alone runs, and talks to this server alone
    "content-security-policy": (
        f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # a new version of the server has a new page
    "cache-control": "no-cache",
}


async def show(request: Request) -> Response:
    """Return the page; it holds nothing that is secret."""
    del request
    return Response(_SOURCE, headers=_HEADERS, media_type="text/html; charset=utf-8")
