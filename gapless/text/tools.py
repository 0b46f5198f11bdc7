"""Tool calls in a model's text, found as the text comes.

Two styles: `hermes`, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and `qwen3_coder`,
`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`. Arguments come
out as the text of one JSON object, in pieces, as soon as they are certain. However the text is cut,
the events say the same. Text that is no call after all stays text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

ToolStyle = Literal["hermes", "qwen3_coder"]

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (f"\n{_PARAMETER_END}", _PARAMETER_END)
# without `<`, so that no match can hold the end of the call
_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\<]|\\[^<])*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_XML_NAME = re.compile(r"([^<>\n]+)>")
_QUOTE_OR_BRACKET = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\\x00-\x1f]')


@dataclass(frozen=True)
class Text:
    """Words for the reader."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call begins; what follows up to its end belongs to it."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the arguments' JSON."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete, and its arguments are a JSON object."""


@dataclass(frozen=True)
class CallBroken:
    """The call that had begun is none; `source` is its whole text, to be shown as such."""

    source: str


ToolEvent = Text | CallBegin | CallArguments | CallEnd | CallBroken


class _Malformed(Exception):
    """What was read is no call."""


def style_of_template(source: str) -> ToolStyle | None:
    """Return the style that a chat template teaches, None where it teaches neither."""
    if "tools" not in source or _CALL not in source:
        return None
    return "qwen3_coder" if _FUNCTION in source else "hermes"


class ToolParser:
    """Reads one answer. White space before a call, and after the last one, is dropped."""

    def __init__(
        self,
        style: ToolStyle,
        tools: Sequence[Mapping[str, object]],
        *,
        begins_in_call: bool = False,
    ) -> None:
        """`tools` are functions: `name`, and `parameters` as a JSON schema.

        The style `qwen3_coder` writes every value as plain text, so the schema decides its type.
        `begins_in_call`: the text is a call from its first character, without an opening tag.
        """
        self._begins_in_call = begins_in_call
        self._style = style
        self._schemas = {str(tool["name"]): tool.get("parameters") for tool in tools}
        self._openers = (_CALL,) if style == "hermes" else (_CALL, _FUNCTION)
        self._buffer = ""
        self._taken: list[str] = []
        """What the call under way has consumed."""
        self._events: list[ToolEvent] = []
        self._has_begun = self._has_calls = self._is_ended = False
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> list[ToolEvent]:
        """Return what is certain now that `text` has come."""
        if text:
            self._buffer += text
            next(self._reading)
        return self._take_events()

    def finish(self) -> list[ToolEvent]:
        """Return what is left, the text being at its end."""
        self._is_ended = True
        next(self._reading, None)
        return self._take_events()

    def _take_events(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _read(self) -> Generator[None, None, None]:
        """Work through the buffer; a bare `yield` waits for more of it, or for the end."""
        yield
        opener = _CALL if self._begins_in_call else (yield from self._text())
        while opener is not None:
            self._has_begun = False
            try:
                if self._style == "hermes":
                    yield from self._json_call()
                else:
                    yield from self._xml_call(opener)
            except _Malformed:
                source = "".join(self._taken)
                self._events.append(CallBroken(source) if self._has_begun else Text(source))
            else:
                self._has_calls = True
            opener = yield from self._text()

    def _text(self) -> Generator[None, None, str | None]:
        """Pass text on up to a call, whose opening is consumed; None at the end."""
        while True:
            places = [(i, o) for o in self._openers if (i := self._buffer.find(o)) >= 0]
            if places:
                place, opener = min(places)
                words = self._buffer[:place].rstrip()
                self._say(words)
                self._taken = []
                self._buffer = self._buffer[len(words) :]
                self._take(place - len(words) + len(opener))
                return opener
            held = 0 if self._is_ended else _overlap(self._buffer, self._openers)
            words = self._buffer[: len(self._buffer) - held]
            if not self._is_ended or self._has_calls:
                words = words.rstrip()
            self._say(words)
            self._buffer = self._buffer[len(words) :]
            if self._is_ended:
                return None
            yield

    def _json_call(self) -> Generator[None, None, None]:
        while True:
            header = _HEADER.match(self._buffer)
            if header is not None:
                break
            begins = self._buffer.lstrip()
            is_whole = self._is_ended or _CALL_END in self._buffer
            if is_whole or (begins and begins[0] != "{"):
                self._whole_json_call()
                return
            yield
        name = _name(_json(header[1]))
        self._take(header.end())
        self._begin(name)
        yield from self._json_arguments()
        self._events.append(CallEnd())
        # the arguments are what matters: an end that is left out takes nothing from them
        yield from self._expect("}")
        yield from self._expect(_CALL_END)

    def _whole_json_call(self) -> None:
        """Read a call whose entries come in another order, or one that is none."""
        end = self._buffer.find(_CALL_END)
        if self._buffer.lstrip()[:1] != "{":
            _refuse()
        text = self._take(len(self._buffer) if end < 0 else end)
        if end >= 0:
            self._take(len(_CALL_END))
        call = _json(text)
        if not isinstance(call, dict) or "name" not in call:
            _refuse()
        name = _name(call["name"])
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json(arguments)
        if not isinstance(arguments, dict):
            _refuse()
        self._begin(name)
        try:
            # escaped, for a lone surrogate could not be sent otherwise
            self._events += [CallArguments(json.dumps(arguments)), CallEnd()]
        except RecursionError:
            _refuse()

    def _json_arguments(self) -> Generator[None, None, None]:
        """Pass a JSON object, whose first bracket is consumed, on up to its last."""
        pieces = ["{"]
        self._events.append(CallArguments("{"))
        depth, is_string = 1, False
        while True:
            piece, used = "", 0
            while depth and used < len(self._buffer):
                pattern = _IN_STRING if is_string else _QUOTE_OR_BRACKET
                found = pattern.search(self._buffer, used)
                place = len(self._buffer) if found is None else found.start()
                piece += self._buffer[used:place]
                used = place
                if found is None:
                    break
                mark = found[0]
                if mark == "\\":
                    mark = self._buffer[place : place + 2]
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
            self._take(used)
            if piece:
                pieces.append(piece)
                self._events.append(CallArguments(piece))
            if not depth:
                break
            if self._is_ended:
                _refuse()
            yield
        if not isinstance(_json("".join(pieces)), dict):
            _refuse()

    def _xml_call(self, opener: str) -> Generator[None, None, None]:
        if opener == _CALL and (yield from self._expect(_FUNCTION)) is None:
            _refuse()
        name = (yield from self._xml_name()).strip()
        if not name:
            _refuse()
        self._begin(name)
        schemas = _properties(self._schemas.get(name))
        self._events.append(CallArguments("{"))
        seen: set[str] = set()
        while True:
            tag = yield from self._expect(_PARAMETER, _FUNCTION_END)
            if tag is None:
                _refuse()
            if tag == _FUNCTION_END:
                break
            key = (yield from self._xml_name()).strip()
            if key in seen:
                _refuse()
            self._events.append(CallArguments(f"{', ' if seen else ''}{_quoted(key)}: "))
            seen.add(key)
            types = _types(schemas.get(key))
            if types <= {"string"}:
                yield from self._xml_string()
            else:
                yield from self._xml_value(types)
        self._events += [CallArguments("}"), CallEnd()]
        yield from self._expect(_CALL_END)

    def _xml_name(self) -> Generator[None, None, str]:
        """Consume a name up to its `>`."""
        while True:
            found = _XML_NAME.match(self._buffer)
            if found is not None:
                self._take(found.end())
                return found[1]
            if self._is_ended or re.search(r"[<>\n]", self._buffer):
                _refuse()
            yield

    def _xml_string(self) -> Generator[None, None, None]:
        """Pass a value on as a JSON string, a piece at a time."""
        yield from self._line_break()
        self._events.append(CallArguments('"'))
        while True:
            end = self._buffer.find(_PARAMETER_END)
            if end >= 0:
                break
            if self._is_ended:
                self._take(len(self._buffer))
                _refuse()
            piece = self._take(len(self._buffer) - _overlap(self._buffer, _VALUE_ENDS))
            if piece:
                self._events.append(CallArguments(_quoted(piece)[1:-1]))
            yield
        rest = self._take(end).removesuffix("\n")
        self._take(len(_PARAMETER_END))
        self._events.append(CallArguments(_quoted(rest)[1:]))

    def _xml_value(self, types: set[str]) -> Generator[None, None, None]:
        """Pass a value of another type on, whole."""
        yield from self._line_break()
        while (end := self._buffer.find(_PARAMETER_END)) < 0:
            if self._is_ended:
                self._take(len(self._buffer))
                _refuse()
            yield
        text = self._take(end).removesuffix("\n")
        self._take(len(_PARAMETER_END))
        self._events.append(CallArguments(_as_json(text, types)))

    def _line_break(self) -> Generator[None, None, None]:
        """Consume the one line break that a value may begin with."""
        while not self._buffer and not self._is_ended:
            yield
        if self._buffer.startswith("\n"):
            self._take(1)

    def _expect(self, *tags: str) -> Generator[None, None, str | None]:
        """Consume white space and a tag, and return it; None, with nothing consumed, if it is
        none of `tags`."""
        while True:
            rest = self._buffer.lstrip()
            for tag in tags:
                if rest.startswith(tag):
                    self._take(len(self._buffer) - len(rest) + len(tag))
                    return tag
            if self._is_ended or not any(tag.startswith(rest) for tag in tags):
                return None
            yield

    def _begin(self, name: str) -> None:
        self._has_begun = True
        self._events.append(CallBegin(name))

    def _say(self, words: str) -> None:
        if words:
            self._events.append(Text(words))

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._taken.append(text)
        return text


def _refuse() -> NoReturn:
    raise _Malformed


def _overlap(text: str, ends: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `ends`."""
    longest = min(len(text), max(map(len, ends)) - 1)
    for length in range(longest, 0, -1):
        if any(end.startswith(text[-length:]) for end in ends):
            return length
    return 0


def _json(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _Malformed from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _name(name: object) -> str:
    """Return a function's name if it can be one."""
    if not isinstance(name, str) or not name:
        _refuse()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise _Malformed from error
    return name


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
        kind = _type_of(_json(plain))
    except _Malformed:
        return _quoted(text)
    is_right = kind in types or (kind == "integer" and "number" in types)
    # where no string is wanted, JSON of another type is nearer to it than a string
    return plain if is_right or "string" not in types else _quoted(text)
