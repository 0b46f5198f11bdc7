"""What is wrong with a request is said with status 400 and harms nobody."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx2
import openai
import pytest

from gapless import LLM, SamplingParams
from tests.server.conftest import QUESTION, ServerProcess

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
VOCAB = 4096
CONTEXT = 256


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


BAD = [
    # ids that the model does not have
    (COMPLETE, {"prompt": [5, VOCAB]}, "token id 4096; want 0 to 4095", "prompt"),
    (COMPLETE, {"prompt": [-1]}, "token id -1", "prompt"),
    (COMPLETE, {"prompt": [2**70]}, "token id 1180591620717411303424", "prompt"),
    (COMPLETE, {"prompt": [[5], [VOCAB]]}, "token id 4096", "prompt"),
    (COMPLETE, {"prompt": "a", "stop_token_ids": [VOCAB]}, "stop_token_ids holds",
     "stop_token_ids"),
    (COMPLETE, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids=-1", "stop_token_ids"),
    (COMPLETE, {"prompt": "a", "stop_token_ids": list(range(9))}, "at most 8", None),
    (COMPLETE, {"prompt": "a", "logit_bias": {"4096": 1}}, "logit_bias holds", "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias=-1", "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias[5]=101", "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
    ("/detokenize", {"tokens": [VOCAB]}, "token id 4096", "tokens"),
    ("/detokenize", {"tokens": [2**40]}, "tokens holds", "tokens"),
    # nothing
    (COMPLETE, {"prompt": ""}, "no tokens", None),
    (COMPLETE, {"prompt": []}, "prompt is empty", "prompt"),
    (COMPLETE, {"prompt": [""]}, "no tokens", None),
    (COMPLETE, {"prompt": [[]]}, "no tokens", None),
    (COMPLETE, {"prompt": None}, "required field `prompt`", "prompt"),
    (COMPLETE, {}, "required field `prompt`", "prompt"),
    (COMPLETE, {"prompt": "a", "max_tokens": 0}, "max_tokens=0", "max_tokens"),
    (CHAT, {"messages": []}, "length >= 1", "messages"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens=0", "max_tokens"),
    (CHAT, {}, "required field `messages`", "messages"),
    # too much
    (COMPLETE, {"prompt": [5] * CONTEXT}, "256 tokens and the context holds 256", None),
    (COMPLETE, {"prompt": [5] * CONTEXT, "stream": True}, "the context holds 256", None),
    (COMPLETE, {"prompt": "a", "n": 2049}, "`int` <= 2048", "n"),
    (COMPLETE, {"prompt": ["a"] * 100, "n": 100}, "10000 continuations", "n"),
    (COMPLETE, {"prompt": "a", "stop": ["x"] * 33}, "length <= 32", "stop"),
    (COMPLETE, {"prompt": "a", "stop": "x" * 257}, "length <= 256", "stop"),
    (COMPLETE, {"prompt": "a", "logprobs": 21}, "`int` <= 20", "logprobs"),
    # kinds and ranges
    (COMPLETE, {"prompt": 5}, "Expected", "prompt"),
    (COMPLETE, {"prompt": ["a", 5]}, "mixes", "prompt"),
    (COMPLETE, {"prompt": ["a", [5]]}, "mixes", "prompt"),
    (COMPLETE, {"prompt": [True]}, "got `bool`", "prompt[0]"),
    (COMPLETE, {"prompt": "a", "n": 0}, "`int` >= 1", "n"),
    (COMPLETE, {"prompt": "a", "n": "2"}, "got `str`", "n"),
    (COMPLETE, {"prompt": "a", "max_tokens": 1.5}, "got `float`", "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": 2**40}, "max_tokens=1099511627776", "max_tokens"),
    (COMPLETE, {"prompt": "a", "temperature": -1}, ">= 0.0", "temperature"),
    (COMPLETE, {"prompt": "a", "top_p": 0}, "top_p=0", "top_p"),
    (COMPLETE, {"prompt": "a", "top_p": 1.1}, "<= 1.0", "top_p"),
    (COMPLETE, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty=0",
     "repetition_penalty"),
    (COMPLETE, {"prompt": "a", "presence_penalty": 3}, "<= 2.0", "presence_penalty"),
    (COMPLETE, {"prompt": "a", "seed": 2**63}, "seed=9223372036854775808", "seed"),
    (COMPLETE, {"prompt": "a", "stop": [""]}, "length >= 1", "stop[0]"),
    (COMPLETE, {"prompt": "a", "min_tokens": 17}, "min_tokens=17", "min_tokens"),
    (COMPLETE, {"prompt": "\ud800"}, "no JSON in UTF-8", None),
    (COMPLETE, {"prompt": "a", "request_id": "a b"}, "request_id='a b'", "request_id"),
    (COMPLETE, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream is not",
     "stream_options"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "logprobs is not", "top_logprobs"),
    (CHAT, {"messages": "Hi"}, "got `str`", "messages"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "role", "messages[0].role"),
    (CHAT, message(role=5), "role", "messages[0].role"),
    (CHAT, message(content=None), "is missing", "messages[0].content"),
    (CHAT, message(content=5), "is a int", "messages[0].content"),
    (CHAT, message(content=[{"type": "text"}]), "malformed", "messages[0].content[0]"),
    (CHAT, message(content=["Hi"]), "malformed", "messages[0].content[0]"),
    (CHAT, message(content=[{"type": "image_url", "image_url": {"url": "http://localhost"}}]),
     "reads text only", "messages[0].content[0]"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "is no variable",
     "chat_template_kwargs.messages"),
    ("/tokenize", {}, "either a prompt or messages", "prompt"),
    ("/abort", {}, "either a request_id or abort_all", "request_id"),
    # what is not there
    (COMPLETE, {"prompt": "a", "suffix": "b"}, "suffix='b' is not supported", "suffix"),
    (COMPLETE, {"prompt": "a", "best_of": 4}, "best_of=4 is not supported", "best_of"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "is not supported", "tools"),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "or send ['text']", "modalities"),
    (CHAT, {"messages": HELLO, "temprature": 1}, "did you mean 'temperature'?", "temprature"),
    (CHAT, {"messages": HELLO, "stream_options": {"x": 1}, "stream": True}, "unknown field `x`",
     "stream_options"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "text", "param"), BAD)
def test_bad_requests(
    http: httpx2.Client, path: str, body: dict[str, Any], text: str, param: str | None
) -> None:
    # json.dumps, for it can write a lone surrogate
    answer = http.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert text in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


JSON = {"content-type": "application/json"}
DEEP = b"[" * 5000 + b"]" * 5000
BODIES = [
    (b"", "no JSON"),
    (b"{", "no JSON"),
    (b"[]", "want a JSON object"),
    (b'{"prompt": "\xff"}', "no JSON in UTF-8"),
    (b"\xff\xfe", "no JSON"),
    (b'{"prompt": NaN}', "no JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
    (b'{"prompt": "a", "temperature": Infinity}', "no JSON"),
    (DEEP, "no JSON"),
    (b'{"prompt": ' + DEEP + b"}", "no JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "text"), BODIES)
def test_bodies_that_are_no_json(http: httpx2.Client, body: bytes, text: str) -> None:
    answer = http.post(COMPLETE, content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert text in answer.text


@pytest.mark.parametrize("depth", [100, 700, 900, 980])
def test_nesting_that_only_the_parser_can_follow(http: httpx2.Client, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    body = b'{"messages": [{"role": "user", "content": "a", "x": ' + deep + b"}]}"
    assert http.post(CHAT, content=body, headers=JSON).status_code == (200 if depth < 200 else 400)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_says_that_it_is_json(http: httpx2.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post(COMPLETE, content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    typed = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post(COMPLETE, content=b'{"prompt": "a"}', headers=typed).status_code == 200


def test_fields_without_effect_pass(http: httpx2.Client) -> None:
    inert = {
        "user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False,
        "safety_identifier": "x", "prompt_cache_key": "y", "parallel_tool_calls": True,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1,
        "use_beam_search": False, "guided_json": None, "suffix": None, "nobody_knows_it": None,
        "temperature": None, "stop": None, "n": None, "stream": None, "stream_options": None,
    }  # fmt: skip
    plain = http.post(CHAT, json={"messages": HELLO}).json()
    answer = http.post(CHAT, json={"messages": HELLO, **inert})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]


def test_other_models_and_paths(http: httpx2.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist") as caught:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert caught.value.code == "model_not_found"
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
    ):
        answer = http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"].startswith(f"{method} {path}")
    assert http.post("/v1/completions", json={"prompt": "a", "model": ""}).status_code == 200


def test_a_prompt_that_is_too_long_is_told_as_clients_expect(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256") as caught:
        client.completions.create(model="gapless-demo", prompt=[5] * 300)
    assert caught.value.code == "context_length_exceeded"
    assert "300 tokens" in caught.value.message
    longest = client.completions.create(model="gapless-demo", prompt=[5] * (CONTEXT - 1))
    assert longest.usage.completion_tokens == 1


def test_neighbours_are_not_harmed(server: ServerProcess, http: httpx2.Client, llm: LLM) -> None:
    fields = {"temperature": 1.0, "seed": 7, "max_tokens": 100}
    found: list[str] = []

    def neighbour() -> None:
        with httpx2.Client(base_url=server.url, timeout=30) as own:
            body = {"messages": QUESTION, **fields, "ignore_eos": True}
            answer = own.post(CHAT, json=body).json()
            found.append(answer["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=neighbour) for _ in range(3)]
    for thread in threads:
        thread.start()
    for path, body, _, _ in BAD[:20]:
        assert http.post(path, json=body).status_code == 400
    for thread in threads:
        thread.join()
    expected = llm.generate(QUESTION, SamplingParams(**fields, ignore_eos=True)).text
    assert found == [expected] * 3
