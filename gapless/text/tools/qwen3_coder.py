"""Calls of the style `qwen3_coder`: a tag per function and per parameter.

Values are plain text, so the schema of a parameter decides its type.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from gapless.text.tools.events import CallArguments, CallEnd
from gapless.text.tools.source import CALL, CALL_END, Malformed, overlap, parse_json, refuse

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from gapless.text.tools.source import Source

FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (f"\n{_PARAMETER_END}", _PARAMETER_END)
_TAG_NAME = re.compile(r"([^<>\n]+)>")


def read_call(
    source: Source, opener: str, schemas: Mapping[str, object]
) -> Generator[None, None, None]:
    """Read a call, whose opening tag is consumed; `schemas` are those of functions' parameters."""
    if opener == CALL and (yield from source.expect(FUNCTION)) is None:
        refuse()
    name = (yield from _name(source)).strip()
    if not name:
        refuse()
    source.begin(name)
    properties = _properties(schemas.get(name))
    source.events.append(CallArguments("{"))
    seen: set[str] = set()
    while True:
        tag = yield from source.expect(_PARAMETER, _FUNCTION_END)
        if tag is None:
            refuse()
        if tag == _FUNCTION_END:
            break
        key = (yield from _name(source)).strip()
        if key in seen:
            refuse()
        source.events.append(CallArguments(f"{', ' if seen else ''}{_quoted(key)}: "))
        seen.add(key)
        types = _types(properties.get(key))
        if types <= {"string"}:
            yield from _string(source)
        else:
            yield from _value(source, types)
    source.events += [CallArguments("}"), CallEnd()]
    yield from source.expect(CALL_END)


def _name(source: Source) -> Generator[None, None, str]:
    """Consume a name up to its `>`."""
    while True:
        found = _TAG_NAME.match(source.buffer)
        if found is not None:
            source.take(found.end())
            return found[1]
        if source.is_ended or re.search(r"[<>\n]", source.buffer):
            refuse()
        yield


def _string(source: Source) -> Generator[None, None, None]:
    """Pass a value on as a JSON string, a piece at a time."""
    yield from _line_break(source)
    source.events.append(CallArguments('"'))
    while True:
        end = source.buffer.find(_PARAMETER_END)
        if end >= 0:
            break
        if source.is_ended:
            source.take(len(source.buffer))
            refuse()
        piece = source.take(len(source.buffer) - overlap(source.buffer, _VALUE_ENDS))
        if piece:
            source.events.append(CallArguments(_quoted(piece)[1:-1]))
        yield
    rest = source.take(end).removesuffix("\n")
    source.take(len(_PARAMETER_END))
    source.events.append(CallArguments(_quoted(rest)[1:]))


def _value(source: Source, types: set[str]) -> Generator[None, None, None]:
    """Pass a value of another type on, whole."""
    yield from _line_break(source)
    while (end := source.buffer.find(_PARAMETER_END)) < 0:
        if source.is_ended:
            source.take(len(source.buffer))
            refuse()
        yield
    text = source.take(end).removesuffix("\n")
    source.take(len(_PARAMETER_END))
    source.events.append(CallArguments(_as_json(text, types)))


def _line_break(source: Source) -> Generator[None, None, None]:
    """Consume the one line break that a value may begin with."""
    while not source.buffer and not source.is_ended:
        yield
    if source.buffer.startswith("\n"):
        source.take(1)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: object) -> Mapping[str, object]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def _types(schema: object) -> set[str]:
    """Return the JSON types that a schema allows, as far as it says so at its top."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(item) for item in kind}
    alternatives = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(alternatives, list):
        return set().union(*(_types(item) or {"object"} for item in alternatives))
    values = schema.get("enum")
    if isinstance(values, list):
        return {_type_of(value) for value in values}
    return {"object"} if "$ref" in schema else set()


def _type_of(value: object) -> str:
    names = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _as_json(text: str, types: set[str]) -> str:
    """Return a value as JSON: of one of the types if it is, else a string."""
    plain = text.strip()
    # as Python, and so some models, spell them
    plain = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    try:
        kind = _type_of(parse_json(plain))
    except Malformed:
        return _quoted(text)
    is_right = kind in types or (kind == "integer" and "number" in types)
    # where no string is wanted, JSON of another type is nearer to it than a string
    return plain if is_right or "string" not in types else _quoted(text)
