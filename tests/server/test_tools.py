"""Tool calls in text: found whole, at every cut of the text the same, and never an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.text.tools import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Text,
    ToolParser,
    style_of_template,
)

TOOLS = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"enum": ["C", "F"]},
                "places": {"type": "array"},
                "exact": {"type": ["boolean", "null"]},
                "id": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "near": {"anyOf": [{"$ref": "#/x"}, {"type": "null"}]},
            },
        },
    },
    {"name": "now"},
]


def read(style: Any, *pieces: str) -> tuple[str, list[tuple[str, str]], int]:
    """Return text, complete calls, and how many pieces of arguments came."""
    parser = ToolParser(style, TOOLS)
    text, calls, count = "", [], 0
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    name, arguments, is_open = "", "", False
    for event in events:
        match event:
            case Text(words):
                assert not is_open
                text += words
            case CallBegin(name):
                assert not is_open
                arguments, is_open = "", True
            case CallArguments(piece):
                assert is_open
                arguments += piece
                count += 1
            case CallEnd():
                calls.append((name, arguments))
                is_open = False
            case CallBroken(source):
                assert is_open
                text += source
                is_open = False
    assert not is_open
    return text, calls, count


HERMES = (
    'I look.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom \\"}\\u00e9🙂", '
    '"l": [1, {"a": "</b>"}]}}\n</tool_call>\n<tool_call>\n{"arguments": {}, "name": "now"}\n'
    "</tool_call>\n"
)
XML = (
    "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nRom \"<b>\n\n🙂\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=units>\nC\n</parameter>\n<parameter=places>\n"
    '[1, {"a": null}]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=id>\n12x\n'
    "</parameter>\n<parameter=near>\nNone\n</parameter>\n<parameter=other>\n\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call><function=now></function></tool_call>\nDone. "
)
WANTED = {
    "hermes": ("I look.", [
        ("weather", {"city": 'Rom "}é🙂', "l": [1, {"a": "</b>"}]}), ("now", {}),
    ]),
    "qwen3_coder": ("I look.\nDone.", [
        ("weather", {"city": 'Rom "<b>\n\n🙂', "days": 3, "units": "C",
                     "places": [1, {"a": None}], "exact": True, "id": "12x", "near": None,
                     "other": ""}),
        ("now", {}),
    ]),
}  # fmt: skip
SOURCES = {"hermes": HERMES, "qwen3_coder": XML}
STYLES = pytest.mark.parametrize("style", ["hermes", "qwen3_coder"])


@STYLES
def test_calls_and_the_text_around_them(style: str) -> None:
    text, calls, count = read(style, SOURCES[style])
    assert (text, [(name, json.loads(args)) for name, args in calls]) == WANTED[style]
    by_character = read(style, *SOURCES[style])
    assert by_character[:2] == (text, calls)
    assert by_character[2] > count


@STYLES
def test_every_cut_gives_the_same(style: str) -> None:
    source = SOURCES[style]
    whole = read(style, source)[:2]
    for place in range(len(source) + 1):
        assert read(style, source[:place], source[place:])[:2] == whole
    for step in range(1, 9):
        pieces = [source[i : i + step] for i in range(0, len(source), step)]
        assert read(style, *pieces)[:2] == whole


@pytest.mark.parametrize(
    ("style", "beginning"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>\n"),
    ],
)
def test_arguments_come_while_they_are_written(style: str, beginning: str) -> None:
    parser = ToolParser(style, TOOLS)
    begun = parser.push(beginning)
    assert begun[0] == CallBegin("weather")
    for word in ("Rome ", "or ", "Bari "):
        assert parser.push(word) == [CallArguments(word)]


PARTS = [
    "<tool_call>", "</tool_call>", "\n", " ", '{"name": "weather", "arguments": {', '{"name": "',
    '"a": ', '"', "{", "}", "}}", "[", "]", "\\", "\\u00", "\\ud800", ",", "1", "NaN", "true", "é",
    "🙂", "x", "<", ">", "<function=", "weather>", "</function>", "<parameter=", "city>", "days>",
    "</parameter>", "exact>", '"arguments": "{}"', '"name": "now"',
]  # fmt: skip


@given(data=st.data(), parts=st.lists(st.sampled_from(PARTS), max_size=24))
@STYLES
def test_any_text_is_read_alike_however_it_is_cut(style: str, data: Any, parts: list[str]) -> None:
    source = "".join(parts)
    whole = read(style, source)[:2]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(source)), max_size=6)))
    edges = [0, *cuts, len(source)]
    pieces = [source[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert read(style, *pieces)[:2] == whole
    assert read(style, *source)[:2] == whole
    for _, arguments in whole[1]:
        arguments.encode()
        assert isinstance(json.loads(arguments), dict)
    if not whole[1]:
        # nothing is lost that was no call
        assert whole[0] == source


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(arguments=st.dictionaries(st.text(), VALUES, max_size=4), ascii_only=st.booleans())
def test_any_json_arguments_come_through(arguments: dict[str, Any], ascii_only: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    source = f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>'
    for pieces in ([source], list(source)):
        text, calls, _ = read("hermes", *pieces)
        assert (text, calls) == ("", [("now", written)])


TEXTS = st.text().filter(lambda text: "</parameter>" not in text)


@given(city=TEXTS, days=st.integers(-(10**30), 10**30), places=st.lists(VALUES, max_size=3))
def test_any_xml_values_come_through(city: str, days: int, places: list[Any]) -> None:
    written = json.dumps(places)
    if "</parameter>" in written:
        return
    source = (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n"
        f"<parameter=days>\n{days}\n</parameter>\n<parameter=places>\n{written}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    for pieces in ([source], list(source)):
        text, calls, _ = read("qwen3_coder", *pieces)
        assert text == ""
        assert json.loads(calls[0][1]) == {"city": city, "days": days, "places": places}


@pytest.mark.parametrize(
    ("style", "source"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>no</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b\\'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 200_000),
        ("qwen3_coder", "<tool_call><function=>"),
        ("qwen3_coder", "<tool_call><function=now>\n<parameter=a>\n1"),
        ("qwen3_coder", "<function=now><parameter=a>1</parameter><parameter=a>"),
        ("qwen3_coder", "<function=now>so</function>"),
    ],
)
def test_malformed_calls_are_text(style: str, source: str) -> None:
    assert read(style, f"Well \n{source}")[:2] == (f"Well \n{source}", [])


def test_ends_that_are_left_out_and_line_breaks_in_strings() -> None:
    source = '<tool_call>{"name": "now", "arguments": {"a": "b\nc\t"}'
    for tail in ("", "}", "}\n"):
        text, calls, _ = read("hermes", source + tail)
        assert (text, json.loads(calls[0][1])) == ("", {"a": "b\nc\t"})
    bare = "<function=now>\n<parameter=a>\n1\n</parameter>\n</function>"
    assert read("qwen3_coder", bare)[1] == [("now", '{"a": "1"}')]
    as_text = '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read("hermes", as_text)[1] == [("now", '{"a": 1}')]


def test_the_style_is_what_the_template_teaches() -> None:
    assert style_of_template("{{ messages }}") is None
    assert style_of_template("{% if tools %}<tool_call>{}</tool_call>") == "hermes"
    assert style_of_template("{{ tools }}<tool_call><function=x>") == "qwen3_coder"
