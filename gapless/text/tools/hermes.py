"""Calls of the style `hermes`: a JSON object between tags."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from gapless.text.tools.events import CallArguments, CallEnd
from gapless.text.tools.source import CALL_END, Malformed, parse_json, refuse

if TYPE_CHECKING:
    from collections.abc import Generator

    from gapless.text.tools.source import Source

# without `<`, so that no match can hold the end of the call
_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\<]|\\[^<])*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_QUOTE_OR_BRACKET = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\\x00-\x1f]')


def read_call(source: Source) -> Generator[None, None, None]:
    """Read a call, whose opening tag is consumed."""
    while True:
        header = _HEADER.match(source.buffer)
        if header is not None:
            break
        begins = source.buffer.lstrip()
        is_whole = source.is_ended or CALL_END in source.buffer
        if is_whole or (begins and begins[0] != "{"):
            _whole_call(source)
            return
        yield
    name = _name(parse_json(header[1]))
    source.take(header.end())
    source.begin(name)
    yield from _arguments(source)
    source.events.append(CallEnd())
    # the arguments are what matters: an end that is left out takes nothing from them
    yield from source.expect("}")
    yield from source.expect(CALL_END)


def _whole_call(source: Source) -> None:
    """Read a call whose entries come in another order, or one that is none."""
    end = source.buffer.find(CALL_END)
    if source.buffer.lstrip()[:1] != "{":
        refuse()
    text = source.take(len(source.buffer) if end < 0 else end)
    if end >= 0:
        source.take(len(CALL_END))
    call = parse_json(text)
    if not isinstance(call, dict) or "name" not in call:
        refuse()
    name = _name(call["name"])
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        refuse()
    source.begin(name)
    try:
        # escaped, for a lone surrogate could not be sent otherwise
        source.events += [CallArguments(json.dumps(arguments)), CallEnd()]
    except RecursionError:
        refuse()


def _arguments(source: Source) -> Generator[None, None, None]:
    """Pass a JSON object, whose first bracket is consumed, on up to its last."""
    pieces = ["{"]
    source.events.append(CallArguments("{"))
    depth, is_string = 1, False
    while True:
        piece, used = "", 0
        while depth and used < len(source.buffer):
            pattern = _IN_STRING if is_string else _QUOTE_OR_BRACKET
            found = pattern.search(source.buffer, used)
            place = len(source.buffer) if found is None else found.start()
            piece += source.buffer[used:place]
            used = place
            if found is None:
                break
            mark = found[0]
            if mark == "\\":
                mark = source.buffer[place : place + 2]
                if len(mark) < 2:
                    break
            elif mark < " ":
                # models write line breaks as they are
                mark = json.dumps(mark)[1:-1]
            elif mark == '"':
                is_string = not is_string
            else:
                depth += 1 if mark in "{[" else -1
            piece += mark
            used = place + (2 if found[0] == "\\" else 1)
        source.take(used)
        if piece:
            pieces.append(piece)
            source.events.append(CallArguments(piece))
        if not depth:
            break
        if source.is_ended:
            refuse()
        yield
    if not isinstance(parse_json("".join(pieces)), dict):
        refuse()


def _name(name: object) -> str:
    """Return a function's name if it can be one."""
    if not isinstance(name, str) or not name:
        refuse()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise Malformed from error
    return name
