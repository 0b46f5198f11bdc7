"""The server's OpenAPI document, made of its table of endpoints and its types."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

import gapless

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gapless.server.app import Endpoint

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
# what each status means; which ones an endpoint has is below
_MEANINGS = {
    "400": "The request is wrong: malformed, out of range, unsupported or too long.",
    "401": "The API key is wrong or missing.",
    "404": "There is no such model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not declared as application/json.",
    "429": "As many requests wait as may; try again after the time that Retry-After says.",
    "500": "The engine has stopped, or the server failed.",
    "503": "The model is being loaded, or the server is shutting down.",
    "504": "The request took longer than it may.",
}
_ALWAYS = ("401", "500", "503")
_WITH_BODY = ("400", "408", "413", "415")


def document(endpoints: Sequence[Endpoint], *, open_paths: Collection[str]) -> dict[str, Any]:
    """Return the document; `open_paths` need no key."""
    types: list[type[msgspec.Struct]] = []
    for endpoint in endpoints:
        types += [
            kind
            for kind in (endpoint.request, endpoint.response, endpoint.chunk, endpoint.error)
            if kind is not None
        ]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint)
        if endpoint.path not in open_paths:
            operation["security"] = [{"bearer": []}]
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "gapless", "version": gapless.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": (endpoint.handler.__doc__ or "").strip(),
        "operationId": endpoint.handler.__module__.rpartition(".")[2]
        + "_"
        + endpoint.handler.__name__,
        "responses": _responses(endpoint),
    }
    names = _PARAMETER.findall(endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if endpoint.request is not None:
        content = {"application/json": {"schema": _reference(endpoint.request)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    statuses = set(_ALWAYS)
    if endpoint.request is not None:
        statuses |= {*_WITH_BODY, "404"}
    if endpoint.is_work:
        statuses |= {"429", "504"}
    if _PARAMETER.search(endpoint.path):
        statuses.add("404")
    error = {"application/json": {"schema": _reference(endpoint.error)}}
    found: dict[str, Any] = {"200": {"description": "Done.", "content": _content(endpoint)}}
    for status in sorted(statuses):
        found[status] = {"description": _MEANINGS[status], "content": error}
    return found


def _content(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.response is None:
        is_text = endpoint.path == "/metrics"
        kind = ("text/plain", "string") if is_text else ("application/json", "object")
        return {kind[0]: {"schema": {"type": kind[1]}}}
    content = {"application/json": {"schema": _reference(endpoint.response)}}
    if endpoint.chunk is None and endpoint.is_work:
        content["text/event-stream"] = {}
    if endpoint.chunk is not None:
        chunk = endpoint.chunk.__name__
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": f"Events whose data is a {chunk} or an ErrorBody; then [DONE].",
            }
        }
    return content


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
