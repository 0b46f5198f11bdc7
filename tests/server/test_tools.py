"""Tool calls in text: found whole, at every cut of the text the same, and never an exception."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.core.request import FinishReason
from gapless.server.errors import ApiError
from gapless.server.toolbox import chosen
from gapless.text.tools import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Text,
    ToolParser,
    style_of_template,
)
from tests.server.conftest import OPTIONS, flags
from tests.server.scripted import TEMPLATE, Scripted, cuts, scripted_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import Start

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
    'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nRom "<b>\n\n🙂\n</parameter>\n'
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
    pieces = [source[a:b] for a, b in pairwise(edges)]
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


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
CHAT_TOOLS = [{"type": "function", "function": tool} for tool in TOOLS]
ASK = [{"role": "user", "content": "Will it rain?"}]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripted_server() as running:
        yield running


@pytest.fixture(scope="module")
def chat(scripted: Scripted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def ask(chat: openai.OpenAI, messages: Any = ASK, **fields: Any) -> Any:
    fields = {"tools": CHAT_TOOLS, **fields}
    return chat.chat.completions.create(model="", messages=messages, **fields)


def streamed(chat: openai.OpenAI, **fields: Any) -> Any:
    """Return the message that the client's own helper makes of a stream."""
    fields = {"tools": CHAT_TOOLS, **fields}
    with chat.chat.completions.stream(model="", messages=ASK, **fields) as stream:
        return stream.get_final_completion().choices[0]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_chat_s_calls_streamed_and_whole(
    scripted: Scripted, chat: openai.OpenAI, size: int
) -> None:
    scripted.say(*cuts(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}", size))
    arguments = '{"city": "Rome", "days": 3}'
    for choice in (ask(chat).choices[0], streamed(chat)):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.reasoning_content == "Hm."
        assert calls_of(choice) == [("weather", arguments)] * 2
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2
    assert '"name": "weather"' in scripted.prompt
    chunks = [c.choices[0] for c in ask(chat, stream=True)]
    deltas = [call for c in chunks for call in c.delta.tool_calls or []]
    assert [d.function.name for d in deltas if d.id] == ["weather", "weather"]
    assert {d.index for d in deltas} == {0, 1}
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]
    if size == 1:
        assert len(deltas) > len(arguments)


def test_calls_alone_have_no_content_and_one_may_be_enough(
    scripted: Scripted, chat: openai.OpenAI
) -> None:
    scripted.say(CALL, CALL, "and so on")
    message = ask(chat, parallel_tool_calls=False).choices[0].message
    assert (message.content, len(message.tool_calls)) == (None, 1)
    assert len(streamed(chat, parallel_tool_calls=False).message.tool_calls) == 1


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_call_that_is_cut_off_is_text(
    scripted: Scripted, chat: openai.OpenAI, finish: FinishReason
) -> None:
    cut = CALL[:60]
    scripted.say(*cuts(cut, 3), finish=finish)
    choice = ask(chat).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (cut, None)
    assert choice.finish_reason == finish.value
    chunks = [c.choices[0] for c in ask(chat, stream=True)]
    assert "".join(c.delta.content or "" for c in chunks) == cut
    assert chunks[-1].finish_reason == finish.value


def test_tools_may_be_kept_from_the_model(scripted: Scripted, chat: openai.OpenAI) -> None:
    scripted.say(CALL)
    for fields in ({"tool_choice": "none"}, {"tools": openai.omit}):
        choice = ask(chat, **fields).choices[0]
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
        assert "<tools>" not in scripted.prompt


def test_earlier_calls_and_their_results_reach_the_template(
    scripted: Scripted, chat: openai.OpenAI
) -> None:
    scripted.say("No.")
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    history = [
        *ASK,
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
    ]
    assert ask(chat, history).choices[0].message.content == "No."
    assert scripted.prompt.endswith(
        '[user]Will it rain?[assistant]<tool_call>weather city="Rome"[tool]dry[assistant]'
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "a", "parameters": {"$defs": 5}}}]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ],
)  # fmt: skip
def test_malformed_tools_are_refused(
    chat: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(chat, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_forced_call_is_read_without_tags(
    scripted: Scripted, chat: openai.OpenAI, size: int
) -> None:
    arguments = '{"city": "Rome"}'
    scripted.say(*cuts(f'{{"name": "weather", "arguments": {arguments}}}', size))
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        for found in (ask(chat, tool_choice=choice).choices[0], streamed(chat, tool_choice=choice)):
            assert calls_of(found) == [("weather", arguments)]
            assert (found.message.content or None, found.finish_reason) == (None, "tool_calls")
        grammar = scripted.engine.submissions[-1].params.grammar
        names = [one["properties"]["name"]["const"] for one in json.loads(grammar.source)["anyOf"]]
        assert names == (["weather", "now"] if choice == "required" else ["weather"])
    scripted.say('{"name": "wea', finish=FinishReason.LENGTH)
    cut = ask(chat, tool_choice="required").choices[0]
    assert (cut.message.content, cut.finish_reason) == ('{"name": "wea', "length")


def test_definitions_are_shared_by_forced_calls() -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        parameters = {"properties": {"at": {"$ref": "#/$defs/at"}}, "$defs": {"at": {"type": kind}}}
        return {"name": name, "parameters": parameters}

    grammar = chosen(
        [tool("a", "string"), tool("b", "string")], "required", is_single=False
    ).grammar
    schema = json.loads(grammar.source)
    assert schema["$defs"] == {"at": {"type": "string"}}
    assert all("$defs" not in one["properties"]["arguments"] for one in schema["anyOf"])
    with pytest.raises(ApiError, match="in two ways"):
        chosen([tool("a", "string"), tool("b", "integer")], "required", is_single=False)


def test_the_bundled_model_calls_what_it_must(start: Start) -> None:
    pytest.importorskip("xgrammar")
    places = {"city": {"enum": ["Rome", "Bari"]}, "days": {"enum": [1, 2]}}
    parameters = {"type": "object", "properties": places, "required": ["city", "days"]}
    function = {"name": "weather", "parameters": {**parameters, "additionalProperties": False}}
    tools = [{"type": "function", "function": function}]
    server = start(*flags({**OPTIONS, "chat_template": TEMPLATE, "tool_call_parser": "hermes"}))
    server.line("ready")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        fields = {"tools": tools, "temperature": 1.0}
        plain, told = ask(client, tools=openai.omit), ask(client, tools=tools)
        assert told.usage.prompt_tokens > plain.usage.prompt_tokens + 20
        for seed in range(3):
            forced = {**fields, "tool_choice": "required", "seed": seed}
            found, again = ask(client, **forced).choices[0], streamed(client, **forced)
            assert calls_of(found) == calls_of(again)
            ((name, arguments),) = calls_of(found)
            assert (name, found.finish_reason) == ("weather", "tool_calls")
            values = json.loads(arguments)
            assert set(values) == {"city", "days"}
            assert values["city"] in places["city"]["enum"]
            assert values["days"] in places["days"]["enum"]


THOUGHTS = pytest.mark.parametrize("size", [1, 3, 1000])


@THOUGHTS
def test_thoughts_that_the_prompt_opens(scripted: Scripted, chat: openai.OpenAI, size: int) -> None:
    opened = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    for text, thoughts, answer in (
        ("So it is.\n</think>\n\nYes", "So it is.", "Yes"),
        ("So it", "So it", ""),
    ):
        scripted.say(*cuts(text, size), finish=FinishReason.LENGTH)
        message = ask(chat, **opened).choices[0].message
        assert (message.reasoning_content, message.content) == (thoughts, answer)
        deltas = [c.choices[0].delta for c in ask(chat, stream=True, **opened)]
        assert "".join(getattr(d, "reasoning_content", "") or "" for d in deltas) == thoughts
        assert "".join(d.content or "" for d in deltas) == answer
    scripted.say("Yes")
    plain = ask(chat).choices[0].message
    assert (plain.content, getattr(plain, "reasoning_content", None)) == ("Yes", None)
    kept = {"extra_body": {"separate_reasoning": False}}
    scripted.say("<think>a</think>b")
    assert ask(chat, **kept).choices[0].message.content == "<think>a</think>b"


def test_the_style_can_be_given_and_is_needed() -> None:
    template = "{{ tools }}{{ messages[0].content }}"
    xml = "<tool_call><function=now></function></tool_call>"
    for style, param in (("qwen3_coder", None), (None, "tools")):
        with (
            scripted_server(template, tool_call_parser=style) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
        ):
            server.say(xml)
            if param is None:
                assert calls_of(ask(client).choices[0]) == [("now", "{}")]
                continue
            with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
                ask(client)
            assert caught.value.param == param
