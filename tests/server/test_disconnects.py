"""Clients that go away, and requests that are aborted, leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import httpx2

from tests.server.conftest import ServerProcess, is_at_rest, stats, wait_until

LONG = {"prompt": [5, 6, 7], "max_tokens": 250, "ignore_eos": True}
# after which a slot must be free
LIMIT_S = 2.0


def hang_up(server: ServerProcess, http: httpx2.Client, body: dict[str, Any]) -> None:
    """Send a request, wait until it runs, and close the connection."""

    async def run() -> None:
        async with httpx2.AsyncClient(base_url=server.url, timeout=30) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.to_thread(wait_until, lambda: stats(http)["num_running"] > 0)
            asking.cancel()

    asyncio.run(run())


def test_a_client_that_goes_frees_its_slot(server: ServerProcess, http: httpx2.Client) -> None:
    http.post("/flush_cache")
    for body in (LONG, {**LONG, "n": 6}, {**LONG, "stream": True}):
        hang_up(server, http, body)
        assert wait_until(lambda: is_at_rest(http)) < LIMIT_S
    wait_until(lambda: http.get("/server_info").json()["num_open_requests"] == 1)
    assert 'request_cut_total{model_name="gapless-demo",reason="client_gone"}' in (
        http.get("/metrics").text
    )
    http.post("/flush_cache")
    free = stats(http)
    assert free["num_free_pages"] == free["num_pages"]
    assert free["num_free_rows"] == free["num_state_rows"]


def test_leaving_a_stream_frees_its_slot(http: httpx2.Client) -> None:
    body = {**LONG, "stream": True, "n": 4}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    assert wait_until(lambda: is_at_rest(http)) < LIMIT_S


def test_an_abort_ends_choices_where_they_are(server: ServerProcess, http: httpx2.Client) -> None:
    found: list[dict[str, Any]] = []

    def ask() -> None:
        with httpx2.Client(base_url=server.url, timeout=30) as own:
            body = {**LONG, "n": 2, "request_id": "mine"}
            found.append(own.post("/v1/completions", json=body).json())

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: stats(http)["num_running"] == 2)
    again = http.post("/v1/completions", json={**LONG, "request_id": "mine"})
    assert again.status_code == 400
    assert "'cmpl-mine' is in use" in again.json()["error"]["message"]
    assert http.post("/abort", json={"request_id": "other"}).json() == {"num_aborted": 0}
    assert http.post("/abort", json={"request_id": "mine"}).json() == {"num_aborted": 1}
    thread.join()
    assert found[0]["id"] == "cmpl-mine"
    assert [choice["finish_reason"] for choice in found[0]["choices"]] == ["abort"] * 2
    assert http.post("/abort", json={"request_id": "cmpl-mine"}).json() == {"num_aborted": 0}


def test_a_stream_is_told_of_its_abort(http: httpx2.Client) -> None:
    headers = {"x-request-id": "theirs"}
    body = {**LONG, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["id"] == "cmpl-theirs"
        assert httpx2.post(f"{http.base_url}/abort", json={"abort_all": True}).json() == {
            "num_aborted": 1
        }
        *_, last, done = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert done == "data: [DONE]"


def test_a_storm_of_aborts(server: ServerProcess, http: httpx2.Client) -> None:
    rng = random.Random(1)
    tasks_before = http.get("/server_info").json()["num_tasks"]

    async def one(client: httpx2.AsyncClient, index: int) -> int:
        body = {**LONG, "request_id": f"storm-{index}", "stream": index % 3 == 0, "seed": index}
        if index % 4 == 0:
            try:
                await asyncio.wait_for(client.post("/v1/completions", json=body), rng.random())
            except TimeoutError:
                return 0
        return (await client.post("/v1/completions", json=body)).status_code

    async def storm() -> list[int]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            asking = [asyncio.create_task(one(client, i)) for i in range(40)]
            order = list(range(40))
            rng.shuffle(order)
            for index in order:
                await asyncio.sleep(0)
                await client.post("/abort", json={"request_id": f"storm-{index}"})
            await client.post("/abort", json={"abort_all": True})
            done = asyncio.gather(*asking)
            while not done.done():
                await client.post("/abort", json={"abort_all": True})
            return await done

    assert set(asyncio.run(storm())) <= {0, 200}
    assert wait_until(lambda: is_at_rest(http)) < LIMIT_S
    wait_until(lambda: http.get("/server_info").json()["num_tasks"] <= tasks_before)
    assert http.post("/v1/completions", json={"prompt": "Two"}).status_code == 200
