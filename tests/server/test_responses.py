"""OpenAI's responses through its own client: text, thoughts, tools, streams, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from gapless import SamplingParams
from gapless.core.grammar import Grammar
from gapless.core.request import FinishReason
from gapless.server.errors import TimeLimit
from tests.server.conftest import MODEL
from tests.server.scripted import Scripted, cuts, scripted_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless import LLM

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
ARGUMENTS = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripted_server() as running:
        yield running


@pytest.fixture(scope="module")
def api(scripted: Scripted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def ask(api: openai.OpenAI, given: Any = "Will it rain?", **fields: Any) -> Any:
    return api.responses.create(model="", input=given, **{"tools": TOOLS, **fields})


def parts(response: Any) -> list[tuple[str, str]]:
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_thoughts_words_and_calls(scripted: Scripted, api: openai.OpenAI, size: int) -> None:
    pieces = cuts(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}", size)
    scripted.say(*pieces)
    events = list(ask(api, stream=True))
    call = ("function_call", ARGUMENTS)
    for response in (ask(api), events[-1].response):
        assert parts(response) == [("reasoning", "Hm."), ("message", "I look."), call, call]
        assert response.output_text == "I look."
        assert response.status == "completed"
        assert response.output[2].name == "weather"
        assert response.output[2].call_id != response.output[3].call_id
        usage = response.usage
        assert usage.input_tokens == len(scripted.engine.submissions[-1].prompt_ids)
        assert usage.output_tokens == len(pieces)
        assert usage.input_tokens_details.cached_tokens == 2
    assert '"name": "weather"' in scripted.prompt


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_events_build_the_answer(scripted: Scripted, api: openai.OpenAI, size: int) -> None:
    scripted.say(*cuts(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}", size))
    events = list(ask(api, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    items: dict[int, Any] = {}
    texts: dict[int, str] = {}
    for event in events[2:-1]:
        index = event.output_index
        if event.type == "response.output_item.added":
            # one is open at a time
            assert index == len(items) == len(texts)
            items[index], texts[index] = None, ""
        elif event.type.endswith(".delta"):
            texts[index] += event.delta
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == texts[index]
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == texts[index]
        elif event.type == "response.output_item.done":
            items[index] = event.item
    assert list(items.values()) == events[-1].response.output
    assert list(texts.values()) == ["Hm.", "I look.", ARGUMENTS]


def test_the_client_s_own_helper_reads_the_stream(scripted: Scripted, api: openai.OpenAI) -> None:
    scripted.say(*cuts(f"I look.\n{CALL}", 3))
    with api.responses.stream(model="", input="Rain?", tools=TOOLS) as stream:
        response = stream.get_final_response()
    assert parts(response) == [("message", "I look."), ("function_call", ARGUMENTS)]


@pytest.mark.parametrize(
    ("finish", "status", "last"),
    [
        (FinishReason.STOP, "completed", "response.completed"),
        (FinishReason.LENGTH, "incomplete", "response.incomplete"),
        (FinishReason.ABORT, "cancelled", "response.incomplete"),
    ],
)
def test_why_an_answer_ended(
    scripted: Scripted, api: openai.OpenAI, finish: FinishReason, status: str, last: str
) -> None:
    scripted.say(*cuts(CALL[:60], 9), finish=finish)
    events = list(ask(api, stream=True))
    assert events[-1].type == last
    for response in (ask(api), events[-1].response):
        assert response.status == status
        assert parts(response) == [("message", CALL[:60])]
        is_long = response.incomplete_details is not None
        assert is_long == (finish is FinishReason.LENGTH)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_forced_call(scripted: Scripted, api: openai.OpenAI, choice: Any) -> None:
    scripted.say(*cuts(f'{{"name": "weather", "arguments": {ARGUMENTS}}}', 4))
    *_, last = ask(api, tool_choice=choice, stream=True)
    for response in (ask(api, tool_choice=choice), last.response):
        assert parts(response) == [("function_call", ARGUMENTS)]
    assert scripted.engine.submissions[-1].params.grammar is not None


def test_the_form_of_the_words(scripted: Scripted, api: openai.OpenAI) -> None:
    scripted.say("{}")
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    ask(api, text={"format": form})
    assert scripted.engine.submissions[-1].params.grammar == Grammar.json_schema(schema)
    ask(api, text={"format": {"type": "json_object"}})
    assert scripted.engine.submissions[-1].params.grammar == Grammar.json_object()


def test_a_stream_that_ends_early_says_why(scripted: Scripted, api: openai.OpenAI) -> None:
    scripted.say("Yes", " and", error=TimeLimit(5.0))
    *_, last = ask(api, stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "longer than 5 s" in last.response.error.message


def test_fields_and_earlier_items_reach_the_engine(scripted: Scripted, api: openai.OpenAI) -> None:
    scripted.say("No.")
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "dry"},
        {"type": "function_call_output", "call_id": "2",
         "output": [{"type": "input_text", "text": "warm"}]},
        {"role": "developer", "content": "Answer."},
    ]  # fmt: skip
    response = ask(
        api, history, tools=openai.omit, instructions="Be brief.", max_output_tokens=9,
        temperature=0.5, top_p=0.9, store=False, truncation="disabled",
        text={"format": {"type": "text"}},
    )  # fmt: skip
    assert scripted.prompt == (
        "[system]Be brief.[user]Rain?[assistant]<think>Hm.</think>I look.<tool_call>weather "
        'city="Rome"<tool_call>weather[tool]dry[tool]warm[system]Answer.[assistant]'
    )
    params = scripted.engine.submissions[-1].params
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.5, 0.9)
    assert (response.temperature, response.max_output_tokens) == (0.5, 9)
    assert (response.instructions, response.object) == ("Be brief.", "response")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"given": []}, "input"),
        ({"given": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"given": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
def test_what_is_refused(api: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(api, **fields)
    assert caught.value.param == param


def test_the_bundled_model_answers_as_offline(client: openai.OpenAI, llm: LLM) -> None:
    question = "Ann has 4 boxes with 6 pens each. How many pens?"
    expected = llm.generate(
        [{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=None)
    )
    found = client.responses.create(model=MODEL, input=question)
    assert found.output_text == expected.text
    *_, last = client.responses.create(model=MODEL, input=question, stream=True)
    assert last.response.output_text == expected.text
