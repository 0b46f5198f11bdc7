"""Anthropic's API through its own client: text, thoughts, tools, streams, errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import httpx2
import pytest

from gapless import SamplingParams
from gapless.core.request import FinishReason
from gapless.server.errors import TimeLimit
from tests.server.conftest import MODEL, ServerProcess
from tests.server.scripted import Scripted, cuts, scripted_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless import LLM

KEY = "secret"
ASK = [{"role": "user", "content": "Will it rain?"}]
TOOLS = [
    {
        "name": "weather",
        "description": "Looks.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripted_server(api_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def messenger(scripted: Scripted) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scripted.url, api_key=KEY, max_retries=0) as client:
        yield client


def ask(messenger: anthropic.Anthropic, messages: Any = ASK, **fields: Any) -> Any:
    fields = {"max_tokens": 50, "tools": TOOLS, **fields}
    return messenger.messages.create(model="", messages=messages, **fields)


def streamed(messenger: anthropic.Anthropic, **fields: Any) -> Any:
    fields = {"max_tokens": 50, "tools": TOOLS, **fields}
    with messenger.messages.stream(model="", messages=ASK, **fields) as stream:
        return stream.get_final_message()


def parts(message: Any) -> list[tuple[str, Any]]:
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in message.content]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_thoughts_words_and_calls(
    scripted: Scripted, messenger: anthropic.Anthropic, size: int
) -> None:
    pieces = cuts(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}", size)
    scripted.say(*pieces)
    call = ("tool_use", {"city": "Rome"})
    for message in (ask(messenger), streamed(messenger)):
        assert parts(message) == [("thinking", "Hm."), ("text", "I look."), call, call]
        assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
        assert message.content[2].name == "weather"
        assert message.content[2].id != message.content[3].id
        usage = message.usage
        assert usage.cache_read_input_tokens == 2
        prompt = len(scripted.engine.submissions[-1].prompt_ids)
        assert usage.input_tokens + usage.cache_read_input_tokens == prompt
        assert usage.output_tokens == len(pieces)
    assert '"description": "Looks."' in scripted.prompt
    assert '"city"' in scripted.prompt


def test_events_stand_in_blocks(scripted: Scripted, messenger: anthropic.Anthropic) -> None:
    scripted.say("Well ", f"then {CALL[:60]}", CALL[60:])
    events = list(ask(messenger, stream=True))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event.index for event in events[1:-2]] == [0] * 4 + [1] * 5
    assert json.loads("".join(event.delta.partial_json for event in events[6:9])) == {
        "city": "Rome"
    }


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, "###", ("stop_sequence", "###")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.ABORT, None, ("end_turn", None)),
    ],
)
def test_why_an_answer_ended(
    scripted: Scripted, messenger: anthropic.Anthropic, finish: Any, stop: Any, expected: Any
) -> None:
    scripted.say("Yes", finish=finish, stop=stop)
    for message in (ask(messenger), streamed(messenger)):
        assert (message.stop_reason, message.stop_sequence) == expected


def test_fields_reach_the_engine(scripted: Scripted, messenger: anthropic.Anthropic) -> None:
    scripted.say("Yes")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    fields = {"extra_body": sampling, "thinking": thinking}
    ask(messenger, max_tokens=9, stop_sequences=["a", "b"], system="Be brief.", **fields)
    params = scripted.engine.submissions[-1].params
    assert (params.max_tokens, params.stop, params.n) == (9, ("a", "b"), 1)
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert "[system]Be brief.[user]" in scripted.prompt
    assert scripted.prompt.endswith("[assistant]<think>\n")
    ask(messenger, thinking={"type": "disabled"}, tool_choice={"type": "none"}, metadata={})
    assert scripted.prompt == "[user]Will it rain?[assistant]"


def test_earlier_turns_reach_the_template(
    scripted: Scripted, messenger: anthropic.Anthropic
) -> None:
    scripted.say("No.")
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "1"}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."}, use,
        ]},
        {"role": "user", "content": [
            {**result, "content": [{"type": "text", "text": "dry"}]},
            {**result, "content": "warm"}, {**result},
            {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    ask(messenger, history, tools=anthropic.omit, system=[{"type": "text", "text": "Be brief."}])
    assert scripted.prompt == (
        "[system]Be brief.[user]Rain?[assistant]<think>Hm.</think>I look.<tool_call>weather "
        'city="Rome"[tool]dry[tool]warm[tool][user]So?[assistant]'
    )
    counted = messenger.messages.count_tokens(
        model="", messages=history, system=[{"type": "text", "text": "Be brief."}]
    )
    assert counted.input_tokens == len(scripted.engine.submissions[-1].prompt_ids)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": []}, "length >= 1"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role is 'system'"),
        (
            {"system": "a", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0] is of type 'image'; this model reads text only",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "content": [{"type": "image"}],
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0] is of type 'image'",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is a int"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "malformed"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "web", "type": "web_search_20250305"}]}, "functions of your own"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "want one of the tools"),
        ({"tool_choice": {"type": "tool", "name": "nobody"}}, "want one of the tools"),
        ({"tool_choice": {"type": "tool"}}, "want one of the tools"),
        ({"tool_choice": {}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temprature": 1}}, "did you mean 'temperature'?"),
        ({"extra_body": {"mcp_servers": [{}]}}, "not supported"),
    ],
)
def test_errors_have_anthropic_s_form(
    messenger: anthropic.Anthropic, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(messenger, **fields)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert text in body["error"]["message"]


def test_keys_models_and_paths(scripted: Scripted, messenger: anthropic.Anthropic) -> None:
    scripted.say("Yes")
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        messenger.messages.create(model="some-other-name", messages=ASK, max_tokens=5)
    for wrong in ({"api_key": "no"}, {"api_key": None, "auth_token": f"{KEY}x"}):
        with (
            anthropic.Anthropic(base_url=scripted.url, max_retries=0, **wrong) as other,
            pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
        ):
            ask(other)
    with anthropic.Anthropic(base_url=scripted.url, auth_token=KEY, max_retries=0) as other:
        assert parts(ask(other)) == [("text", "Yes")]
    answer = httpx2.get(f"{scripted.url}/v1/messages", headers={"x-api-key": KEY})
    assert (answer.status_code, answer.json()["type"]) == (405, "error")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call(scripted: Scripted, messenger: anthropic.Anthropic, choice: Any) -> None:
    scripted.say(*cuts('{"name": "weather", "arguments": {"city": "Rome"}}', 4))
    for message in (ask(messenger, tool_choice=choice), streamed(messenger, tool_choice=choice)):
        assert parts(message) == [("tool_use", {"city": "Rome"})]
        assert message.stop_reason == "tool_use"
    assert scripted.engine.submissions[-1].params.grammar is not None


def test_a_stream_that_ends_early_says_why(
    scripted: Scripted, messenger: anthropic.Anthropic
) -> None:
    scripted.say("Yes", " and", error=TimeLimit(5.0))
    with pytest.raises(anthropic.APIStatusError, match="longer than 5 s"):
        list(ask(messenger, stream=True))
    with pytest.raises(anthropic.APIStatusError, match="timeout_error") as caught:
        ask(messenger)
    assert caught.value.status_code == 504


def test_a_call_that_is_cut_off_is_text(scripted: Scripted, messenger: anthropic.Anthropic) -> None:
    scripted.say(*cuts(CALL[:60], 5), finish=FinishReason.LENGTH)
    assert parts(ask(messenger)) == [("text", CALL[:60])]
    message = streamed(messenger)
    assert [kind for kind, _ in parts(message)] == ["tool_use", "text"]
    assert parts(message)[1] == ("text", CALL[:60])
    assert message.stop_reason == "max_tokens"


def test_the_bundled_model_answers_as_offline(server: ServerProcess, llm: LLM) -> None:
    fields = {"model": MODEL, "messages": ASK, "max_tokens": 30}
    expected = llm.generate(ASK, SamplingParams(temperature=0.0, max_tokens=30))
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        greedy = {"temperature": 0.0}
        whole = client.messages.create(**fields, extra_body=greedy)
        with client.messages.stream(**fields, extra_body=greedy) as stream:
            message = stream.get_final_message()
    for found in (whole, message):
        assert parts(found) == [("text", expected.text)]
        assert found.usage.output_tokens == len(expected.token_ids)
