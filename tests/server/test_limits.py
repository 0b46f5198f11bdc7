"""Keys, bodies, queues and time: what goes beyond a limit is told, and nobody else is harmed."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.server.conftest import (
    PATIENCE_S,
    QUESTION,
    ServerProcess,
    Start,
    flags,
    stats,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "secret-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
TIME_LIMIT_S = 1.0
# raises for one word, and for one variable
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% if 'boom' in m.content %}{{ 1 // 0 }}{% endif %}"
    "{% if 'plead' in m.content %}{{ raise_exception('no pleading') }}{% endif %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System first') }}{% endif %}"
    "{% endfor %}{% if shout %}LOUD{% endif %}"
)
LONG = {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True}
OPTIONS = {
    "max_running_requests": 1,
    "max_model_len": 4096,
    "max_queued_requests": 2,
    "request_timeout_seconds": TIME_LIMIT_S,
    "speculative_num_steps": 0,
    "max_body_bytes": 200_000,
    "served_model_name": "my/model",
}


@pytest.fixture(scope="module")
def narrow(start: Start) -> ServerProcess:
    """A server with room for one, two to wait, and little time."""
    process = start(*flags(OPTIONS), "--chat-template", TEMPLATE, env={"GAPLESS_API_KEY": KEY})
    process.line("ready")
    return process


@pytest.fixture
def http(narrow: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=narrow.url, timeout=PATIENCE_S, headers=HEADERS) as client:
        yield client
        wait_until(lambda: stats(client)["num_running"] + stats(client)["num_waiting"] == 0)


def post(http: httpx2.Client, **fields: Any) -> httpx2.Response:
    return http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2, **fields})


def error(answer: httpx2.Response) -> dict[str, Any]:
    return answer.json()["error"]


@pytest.mark.parametrize("key", [None, "secret", KEY + "x", "é" * 3000])
def test_a_key_is_wanted(narrow: ServerProcess, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    with httpx2.Client(base_url=narrow.url, headers=headers) as client:
        for path in ("/v1/models", "/server_info", "/openapi.json", "/nope"):
            answer = client.get(path)
            assert (answer.status_code, error(answer)["code"]) == (401, "invalid_api_key")
        assert post(client).status_code == 401
        assert client.post("/flush_cache").status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert client.get(path).status_code == 200


def test_the_official_client_sends_the_key(narrow: ServerProcess) -> None:
    options = {"base_url": f"{narrow.url}/v1", "max_retries": 0}
    with (
        openai.OpenAI(**options, api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    with openai.OpenAI(**options, api_key=KEY) as client:
        assert len(client.models.list().data) == 1


def test_the_key_is_told_to_nobody(narrow: ServerProcess, http: httpx2.Client) -> None:
    assert KEY not in http.get("/server_info").text
    assert KEY not in narrow.log.read_text()


def test_a_model_may_have_another_name(http: httpx2.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["id"] == "my/model"
    assert http.get("/v1/models/my/model").json() == model
    assert post(http, model="my/model").json()["model"] == "my/model"
    assert post(http, model="gapless-demo").status_code == 404


@pytest.mark.parametrize("size", [200_001, 1_000_000, 10_000_000])
def test_a_body_that_is_too_large(http: httpx2.Client, size: int) -> None:
    body = b'{"prompt": "' + b"a" * size + b'"}'
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 413
    assert "larger than 200000 bytes" in error(answer)["message"]
    # in pieces of unknown number, too
    pieces = iter([body[i : i + 50_000] for i in range(0, len(body), 50_000)])
    if size < 8 * 200_000:
        answer = http.post("/v1/completions", content=pieces, headers=headers)
        assert answer.status_code == 413
    assert post(http).status_code == 200


def test_a_template_that_raises(http: httpx2.Client) -> None:
    def chat(content: str, **fields: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": 1, **fields}
        return http.post("/v1/chat/completions", json=body)

    plain = chat("Hi")
    assert plain.status_code == 200
    loud = chat("Hi", chat_template_kwargs={"shout": True})
    assert loud.json()["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"]
    for name in ("self", "tokenizer", "name", "add_generation_prompts"):
        assert chat("Hi", chat_template_kwargs={name: 1}).status_code == 200
    for content, text in (("boom", "division or modulo"), ("plead", "no pleading")):
        for stream in (False, True):
            answer = chat(content, stream=stream)
            assert answer.status_code == 400
            assert text in error(answer)["message"]
    late = [*QUESTION, {"role": "developer", "content": "Be brief."}]
    answer = http.post("/v1/chat/completions", json={"messages": late})
    assert answer.status_code == 400
    assert "System first" in error(answer)["message"]


def test_a_full_queue_says_when_to_come_again(narrow: ServerProcess, http: httpx2.Client) -> None:
    answers: list[httpx2.Response] = []

    def ask() -> None:
        with httpx2.Client(base_url=narrow.url, timeout=PATIENCE_S, headers=HEADERS) as client:
            answers.append(client.post("/v1/completions", json={**LONG, "seed": 1}))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: stats(http)["num_waiting"] == 2)
    for fields in ({}, {"stream": True}, {"n": 2}):
        refused = post(http, **fields)
        assert (refused.status_code, error(refused)["code"]) == (429, "queue_full")
        assert error(refused)["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
    for thread in threads:
        thread.join()
    # their time ran out, for each by itself
    assert [answer.status_code for answer in answers] == [504] * 3
    assert post(http).status_code == 200


def test_a_request_has_so_much_time(http: httpx2.Client) -> None:
    start = time.monotonic()
    answer = http.post("/v1/completions", json=LONG)
    assert (answer.status_code, error(answer)["code"]) == (504, "request_timeout")
    assert TIME_LIMIT_S <= time.monotonic() - start < TIME_LIMIT_S + 2
    assert wait_until(lambda: stats(http)["num_running"] == 0) < 2


def test_a_stream_has_so_much_time(narrow: ServerProcess, http: httpx2.Client) -> None:
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        assert answer.status_code == 200
        *lines, last, done = [line for line in answer.iter_lines() if line]
    assert len(lines) > 1
    assert '"code":"request_timeout"' in last
    assert done == "data: [DONE]"
    with (
        openai.OpenAI(base_url=f"{narrow.url}/v1", api_key=KEY, max_retries=0) as client,
        pytest.raises(openai.APIError, match="took longer than 1 s"),
    ):
        list(
            client.completions.create(
                model="",
                prompt=[5, 6],
                max_tokens=4000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )


def test_a_body_has_so_much_time(narrow: ServerProcess) -> None:
    def dribble() -> Iterator[bytes]:
        yield b'{"prompt": '
        released.wait(PATIENCE_S)

    released = threading.Event()
    headers = {**HEADERS, "content-type": "application/json"}
    timer = threading.Timer(TIME_LIMIT_S + 1, released.set)
    timer.start()
    with httpx2.Client(base_url=narrow.url, headers=headers) as client:
        answer = client.post("/v1/completions", content=dribble())
    timer.join()
    assert answer.status_code == 408
