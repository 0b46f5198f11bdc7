"""Many streams at once, some of which leave and some of which are nonsense.

The streams that stay get what the same requests get offline, and afterwards nothing is left over.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from gapless import LLM, SamplingParams
from gapless.assets import heldout
from gapless.bench.serve_client import Client, Endpoint, Record

if TYPE_CHECKING:
    from gapless.core.messages import GenerationResult
    from tests.server_load.serving import Server

# bytes that are no request, and what each gets; none: the connection ends before an answer
NONSENSE: list[tuple[bytes, str]] = [
    (b"{", "application/json"),
    (b"", "application/json"),
    (b"\xff\xfe{}", "application/json"),
    (b'{"model": "gapless-demo"}', "application/json"),
    (b'{"model": "gapless-demo", "prompt": 7}', "application/json"),
    (b'{"model": "gapless-demo", "prompt": "a", "temperature": -1}', "application/json"),
    (b'{"model": "gapless-demo", "prompt": "a", "max_tokens": 1e99}', "application/json"),
    (b'{"model": "gapless-demo", "prompt": [99999999]}', "application/json"),
    (b"[" * 5000, "application/json"),
    (b"prompt=a", "application/x-www-form-urlencoded"),
]


@dataclass(frozen=True)
class Ask:
    """A request whose answer is known offline."""

    kind: str
    """`chat` or `completions`."""
    question: str
    params: SamplingParams
    leaves_after: int | None
    """Events after which the client goes away; None where it stays."""


def drawn_asks(count: int, share_leaving: float, seed: int) -> list[Ask]:
    """Draw requests of both kinds, some of which begin alike; the wanted share leaves early."""
    rng = random.Random(seed)
    lines = heldout("level1").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in rng.sample(lines, count)]
    leaving = set(rng.sample(range(count), round(count * share_leaving)))
    asks = []
    for i, question in enumerate(questions):
        max_tokens = rng.randint(8, 40)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), seed=1000 + i,
            max_tokens=max_tokens, ignore_eos=True,
        )  # fmt: skip
        prefix = "Think step by step, and check each step. " * 2 if i % 3 == 0 else ""
        asks.append(
            Ask(
                rng.choice(["chat", "completions"]),
                prefix + question,
                params,
                rng.randint(0, max_tokens // 4) if i in leaving else None,
            )
        )
    return asks


def offline_texts(llm: LLM, asks: list[Ask]) -> list[str]:
    """What the requests get without a server."""
    prompts = [
        [{"role": "user", "content": ask.question}] if ask.kind == "chat" else ask.question
        for ask in asks
    ]
    results: list[GenerationResult] = llm.generate(prompts, [ask.params for ask in asks])
    return [result.text for result in results]


def fields_of(ask: Ask) -> dict[str, Any]:
    """The request's sampling fields."""
    params = ask.params
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "ignore_eos": params.ignore_eos,
    }


async def stay(client: Client, index: int, ask: Ask) -> Record:
    """Read a stream to its end."""
    record = Record(job=index, turn=0, due=0.0)
    await client.send(record, ask.question, ask.params.max_tokens, fields_of(ask))
    return record


async def leave(http: httpx2.AsyncClient, endpoint: Endpoint, ask: Ask) -> None:
    """Close the connection after some events."""
    body = endpoint.body(ask.question, ask.params.max_tokens, fields_of(ask))
    count = 0
    async with http.stream("POST", endpoint.url, json=body) as response:
        async for line in response.aiter_lines():
            count += line.startswith("data:")
            if count > ask.leaves_after:
                break


async def send_nonsense(http: httpx2.AsyncClient, url: str, body: bytes, kind: str) -> int:
    """Return the status of an answer to something that is no request."""
    response = await http.post(url, content=body, headers={"content-type": kind})
    assert response.json()["error"]["message"]
    return response.status_code


async def cut_in_the_body(server: Server) -> None:
    """Promise a longer body than is sent, and go."""
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b'content-length: 500\r\n\r\n{"model": '
    )
    await writer.drain()
    writer.close()


async def put_load(
    server: Server, asks: list[Ask], num_nonsense: int
) -> tuple[list[Record], list[int]]:
    """Send everything at once; return the streams that stayed, and the statuses of nonsense."""
    chat = Endpoint(server.url, "chat", "gapless-demo", timeout=300.0)
    texts = Endpoint(server.url, "completions", "gapless-demo", timeout=300.0)
    async with (
        Client(chat) as chat_client,
        Client(texts) as text_client,
        httpx2.AsyncClient(timeout=300.0, limits=httpx2.Limits(max_connections=None)) as http,
    ):
        staying, leaving = [], []
        for i, ask in enumerate(asks):
            is_chat = ask.kind == "chat"
            if ask.leaves_after is None:
                staying.append(stay(chat_client if is_chat else text_client, i, ask))
            else:
                leaving.append(leave(http, chat if is_chat else texts, ask))
        nonsense = [
            send_nonsense(http, texts.url, *NONSENSE[i % len(NONSENSE)])
            for i in range(num_nonsense)
        ]
        records, statuses, *_ = await asyncio.gather(
            asyncio.gather(*staying),
            asyncio.gather(*nonsense),
            asyncio.gather(*leaving),
            cut_in_the_body(server),
        )
    return records, statuses


def check_load(server: Server, llm: LLM, asks: list[Ask], num_nonsense: int) -> None:
    """Put the load on the server, compare with offline, and look for what is left over."""
    wanted = offline_texts(llm, asks)
    # first answers load modules and open sockets that stay
    asyncio.run(put_load(server, asks[:2], len(NONSENSE)))
    before = server.settled_holdings()

    records, statuses = asyncio.run(put_load(server, asks, num_nonsense))

    assert len(records) == sum(ask.leaves_after is None for ask in asks)
    for record in records:
        assert record.failure is None, record.detail
        assert record.text == wanted[record.job], f"stream {record.job}"
        assert record.completion_tokens == asks[record.job].params.max_tokens
    assert set(statuses) <= {400, 415}
    assert len(statuses) == num_nonsense
    server.wait_until_idle(2.0)
    assert server.settled_holdings() == before
    report_lag(server)


def report_lag(server: Server) -> None:
    """Print how late the server's event loop was: a bound on its 99th percentile."""
    name = "gapless:event_loop_lag_seconds"
    ((_, count),) = server.samples(f"{name}_count")
    ((_, total),) = server.samples(f"{name}_sum")
    buckets = server.samples(f"{name}_bucket")
    bound = next(own["le"] for own, below in buckets if below >= 0.99 * count)
    assert count > 0
    print(f"\nevent loop: mean lag {1e3 * total / count:.2f} ms, p99 at most {bound} s")


def test_some_streams(server: Server, llm: LLM) -> None:
    check_load(server, llm, drawn_asks(24, 0.125, seed=1), num_nonsense=len(NONSENSE))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_streams(server: Server, llm: LLM) -> None:
    check_load(server, llm, drawn_asks(200, 0.1, seed=2), num_nonsense=10)


def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    async def leave_all(count: int) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=250, ignore_eos=True, seed=3)
        ask = Ask("completions", "Once", params, leaves_after=0)
        endpoint = Endpoint(server.url, "completions", "gapless-demo")
        async with httpx2.AsyncClient(timeout=60.0) as http:
            await asyncio.gather(*(leave(http, endpoint, ask) for _ in range(count)))

    for count in (1, 8):
        before = server.info()["stats"]["decode"]["num_emitted"]
        asyncio.run(leave_all(count))
        assert server.wait_until_idle(2.0) < 2.0
        # they were ended, and did not just run to their end quickly
        assert server.info()["stats"]["decode"]["num_emitted"] - before < 100 * count
