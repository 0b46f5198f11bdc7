"""Structured output over HTTP: every way to ask for it, streams, and grammars that are wrong."""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Any

import httpx2
import jsonschema_rs
import pytest

from gapless import LLM, SamplingParams
from gapless.core.grammar import Grammar

if TYPE_CHECKING:
    import openai

pytest.importorskip("xgrammar")

MODEL = "gapless-demo"
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Ann has 4 boxes with 6 pens each. How many pens?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "pens": {"type": "integer", "minimum": 0, "maximum": 999},
        "names": {"type": "array", "items": {"enum": ["Ann", "Bob"]}, "maxItems": 2},
    },
    "required": ["pens", "names"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pens", "strict": True, "schema": SCHEMA}}
SAMPLING = {"temperature": 1.0, "seed": 10, "max_tokens": 60}


def test_the_official_client_gets_json(client: openai.OpenAI) -> None:
    for response_format in (FORMAT, {"type": "json_object"}):
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, response_format=response_format, n=2, **SAMPLING
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            found = json.loads(choice.message.content)
            assert isinstance(found, dict)
            assert response_format is not FORMAT or jsonschema_rs.is_valid(SCHEMA, found)


def test_a_stream_joins_to_the_text_that_the_engine_gives(client: openai.OpenAI, llm: LLM) -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format=FORMAT, stream=True, **SAMPLING
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    params = SamplingParams(**SAMPLING, grammar=Grammar.json_schema(SCHEMA))
    assert text == llm.generate(HELLO, params).text
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(text))


FIELDS = [
    ({"guided_regex": "[a-d]{2,5}"}, "[a-d]{2,5}"),
    ({"structured_outputs": {"regex": "[a-d]{2,5}"}}, "[a-d]{2,5}"),
    ({"guided_choice": ["red", "green"]}, "red|green"),
    ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
    ({"guided_json": {"type": "integer", "minimum": 1, "maximum": 9}}, "[1-9]"),
    ({"guided_json": '{"const": 7}'}, "7"),
    ({"structured_outputs": {"json": {"enum": [True, False]}}}, "true|false"),
    ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, "a"),
]


@pytest.mark.parametrize(("fields", "pattern"), FIELDS)
def test_fields_of_completions(http: httpx2.Client, fields: dict[str, Any], pattern: str) -> None:
    answer = http.post(COMPLETE, json={"prompt": "A colour:", **SAMPLING, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["text"], re.DOTALL), choice["text"]


REFUSED = [
    ({"guided_regex": "(a"}, "the regex does not compile: "),
    ({"response_format": {"type": "json_schema"}}, "missing required field `json_schema`"),
    ({"response_format": {"type": "yaml"}}, "Invalid value 'yaml'"),
    ({"guided_json": {"not": {}}}, "json_schema # has 'not', which is not enforced"),
    ({"guided_json": "{"}, "the json_schema is no JSON"),
    ({"guided_json": {"type": "frob"}}, 'Unsupported type "frob"'),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"grammar": "root"}}, "unknown field `grammar`"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "set one of them"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens=2 with a grammar"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_wrong_grammars_are_refused(
    http: httpx2.Client, fields: dict[str, Any], reason: str
) -> None:
    answer = http.post(CHAT, json={"messages": HELLO, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert reason in error["message"]


def test_all_completions_of_a_request_are_refused_together(http: httpx2.Client) -> None:
    answer = http.post(COMPLETE, json={"prompt": ["a", "b"], "n": 2, "guided_regex": "["})
    assert answer.status_code == 400
    answer = http.post(COMPLETE, json={"prompt": ["a", "b"], "n": 2, "guided_regex": "[xy]"})
    assert [c["text"] in ("x", "y") for c in answer.json()["choices"]] == [True] * 4


def slow_chat(name: str) -> dict[str, Any]:
    """Return a request whose grammar takes seconds to compile, another for each name."""
    rule = {"type": "string", "pattern": "^([a-z]{1,90}x){1,40}$"}
    schema = {"type": "object", "properties": {f"{name}{i}": rule for i in range(6)}}
    return {"messages": HELLO, "guided_json": schema, "max_tokens": 1}


def test_clients_that_go_while_their_grammar_compiles(http: httpx2.Client) -> None:
    # the fixture sees that nothing is left of it
    with pytest.raises(httpx2.ReadTimeout):
        http.post(CHAT, json=slow_chat("gone"), timeout=0.3)


def test_others_stream_on_while_a_grammar_compiles(
    http: httpx2.Client, client: openai.OpenAI
) -> None:
    body = slow_chat("waits")
    answers: list[httpx2.Response] = []
    thread = threading.Thread(target=lambda: answers.append(http.post(CHAT, json=body)))
    thread.start()
    chunks = client.completions.create(
        model=MODEL, prompt="a", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
    )
    num_chunks = sum(1 for _ in chunks)
    thread.join()
    assert num_chunks > 10
    assert answers[0].status_code == 200, answers[0].text
