"""Which JSON schemas can be enforced token by token: the others are refused, not half obeyed."""

from __future__ import annotations

import json
from typing import Any

from gapless.errors import InvalidRequest

# keywords that say nothing about which values are valid
_SILENT = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
        "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    }
)  # fmt: skip
# keywords that stand for the whole value: beside them others would be passed over
_WHOLE = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
_ENFORCED = _WHOLE | frozenset(
    {
        "type", "enum", "const", "properties", "required", "additionalProperties", "minProperties",
        "maxProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength",
        "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format",
    }
)  # fmt: skip
_FORMATS = frozenset({"date", "time", "date-time", "email", "uuid", "ipv4", "ipv6"})
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
MAX_DEPTH = 64


def closed_schema(source: str) -> str:
    """Check a schema's text, and close its objects: of those that list properties no others pass.

    `oneOf` is read as `anyOf` where more than one of its branches may admit a value.

    Raises:
        InvalidRequest: it is no schema, or a keyword cannot be enforced.
    """
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the json_schema is no JSON: {error}; correct it") from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the json_schema is {schema!r}; want an object")
    return json.dumps(_closed(schema, "#", 0), ensure_ascii=False)


def _closed(schema: Any, where: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise InvalidRequest(f"json_schema {where} is {schema!r}; want an object")
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"json_schema nests deeper than {MAX_DEPTH} levels; flatten it")
    _check(schema, where)
    found = dict(schema)
    for name in _MAPS:
        if isinstance(found.get(name), dict):
            found[name] = {
                key: _closed(value, f"{where}/{name}/{key}", depth + 1)
                for key, value in found[name].items()
            }
    for name in _LISTS:
        if isinstance(found.get(name), list):
            found[name] = [
                _closed(value, f"{where}/{name}/{index}", depth + 1)
                for index, value in enumerate(found[name])
            ]
    for name in _SINGLES:
        if name in found:
            found[name] = _closed(found[name], f"{where}/{name}", depth + 1)
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def _check(schema: dict[str, Any], where: str) -> None:
    """Raise if something in a schema itself, those inside it apart, cannot be enforced."""
    asked = [name for name in schema if name not in _SILENT]
    for name in asked:
        if name not in _ENFORCED:
            raise _refusal(where, f"has {name!r}", "leave it out")
        if name in _WHOLE and len(asked) > 1:
            others = [other for other in asked if other != name]
            raise _refusal(where, f"has {name!r} beside {others}", "leave out one of them")
    if len(schema.get("allOf") or ()) > 1:
        raise _refusal(where, "has 'allOf' of several schemas", "merge them")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _refusal(where, f"refers to {reference!r}", "copy it into $defs")
    if schema.get("format", "date") not in _FORMATS:
        raise _refusal(where, f"has the format {schema['format']!r}", f"use {sorted(_FORMATS)}")
    if "pattern" in schema and {"minLength", "maxLength", "format"} & schema.keys():
        raise _refusal(where, "has a pattern beside lengths or a format", "put them in the pattern")


def _refusal(where: str, what: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"json_schema {where} {what}, which is not enforced; {remedy}")
