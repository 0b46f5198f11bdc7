"""Parts of the server by themselves: text of tokens, the listener, the engine's side."""

from __future__ import annotations

import multiprocessing
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from gapless.assets import demo_checkpoint
from gapless.core.counters import CacheCounters, DecodeCounters, LoopCounters
from gapless.core.messages import EngineStats, Submission, TokenLogprob, Update
from gapless.core.request import FinishReason
from gapless.core.sampling_params import SamplingParams
from gapless.engine import wire
from gapless.engine.process import EngineService
from gapless.errors import ConfigError, GaplessError, InternalError, QueueFull
from gapless.server.fields import INERT, NEUTRAL
from gapless.server.lifecycle import listen
from gapless.server.logprobs import CompletionLogprobWriter, chat_logprobs
from gapless.server.options import ServerOptions
from gapless.server.schemas import ChatRequest, CompletionRequest
from gapless.text.detokenizer import Detokenizer
from gapless.text.tokenizer import Tokenizer
from tests.text.test_detokenizer import IDS, byte_fallback_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 4096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_checkpoint())


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer") / "fallback"
    return byte_fallback_tokenizer(folder)


@given(ids=IDS)
def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    known = [token_id for token_id in ids if token_id < VOCAB_SIZE]
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in known)
    assert data.decode(errors="replace") == tokenizer.decode(known, skip_special_tokens=False)
    assert all(tokenizer.token_bytes(i) == b"" for i in ids if i >= VOCAB_SIZE)


def test_bytes_of_a_byte_fallback_vocabulary(fallback: Tokenizer) -> None:
    for text in ("hi a", "é🙂hi", "a"):
        ids = fallback.encode(text, add_special_tokens=False)
        assert b"".join(map(fallback.token_bytes, ids)).decode() == text


PIECES = st.lists(st.sampled_from(["hi", " ", "a", "é", "🙂", "€"]), max_size=30).map("".join)
FALLBACK_STOPS = st.lists(
    st.text(st.sampled_from("hia é🙂"), min_size=1, max_size=3), min_size=1, max_size=3
)


@given(text=PIECES, stop=FALLBACK_STOPS)
def test_byte_fallback_with_stop_strings(fallback: Tokenizer, text: str, stop: list[str]) -> None:
    ids = fallback.encode(text, add_special_tokens=False)
    detok = Detokenizer(fallback, stop=tuple(stop), skip_special_tokens=True, min_tokens=0)
    whole = fallback.decode(ids, skip_special_tokens=True)
    sent = ""
    for token_id in ids:
        update = detok.push([token_id])
        # never a part of a character
        assert "\ufffd" not in update.text
        sent += update.text
        if update.stop is not None:
            break
    else:
        sent += detok.flush()
    starts = [whole.find(s) for s in stop if s in whole]
    assert sent == (whole[: min(starts)] if starts else whole)


@given(
    ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40), cut=st.integers(0, 40)
)
def test_offsets_are_lengths_of_what_is_whole(
    tokenizer: Tokenizer, ids: list[int], cut: int
) -> None:
    entries = [TokenLogprob(token_id, -1.0) for token_id in ids]
    writer = CompletionLogprobWriter(tokenizer, skips_special_tokens=True)
    parts = [writer.write(entries[:cut]), writer.write(entries[cut:])]
    offsets = parts[0].text_offset + parts[1].text_offset
    plain = [i for i in ids if i not in tokenizer.special_ids]
    text = b"".join(map(tokenizer.token_bytes, plain)).decode(errors="replace")
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] <= len(text)


def test_unlikely_and_broken_tokens_can_be_written(tokenizer: Tokenizer) -> None:
    (euro,) = {tokenizer.encode("€", add_special_tokens=False)[0]}
    entry = TokenLogprob(euro, float("-inf"), ((euro, float("-inf")),))
    (found,) = chat_logprobs(tokenizer, [entry]).content
    assert found.logprob == found.top_logprobs[0].logprob == -9999.0
    assert found.token == "bytes:\\xe2"
    assert found.bytes == [0xE2]


def test_fields_are_either_used_or_named(tokenizer: Tokenizer) -> None:
    used = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not used & INERT
    # a chat has no suffix, and nobody's field may be in two tables
    assert not used & set(NEUTRAL)
    assert not INERT & set(NEUTRAL)


def test_the_listener_is_known_to_be_of_tcp() -> None:
    # or asyncio leaves small packets to wait for each other
    with listen(ServerOptions(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
        assert listener.getsockname()[0] == "127.0.0.1"
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}"):
            listen(ServerOptions(port=port))


@pytest.mark.parametrize("error", [QueueFull("full"), ConfigError("wrong"), InternalError("oh")])
def test_errors_cross_processes(error: GaplessError) -> None:
    found = wire.Fault.of(error).error()
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_an_error_of_another_kind_is_internal() -> None:
    found = wire.Fault.of(KeyError("x")).error()
    assert type(found) is InternalError
    assert str(found) == "KeyError: 'x'"
    assert type(wire.Fault("Exception", "x").error()) is InternalError
    assert type(wire.Fault("annotations", "x").error()) is InternalError


def test_messages_cross_processes_whole() -> None:
    params = SamplingParams(n=2, stop=("a",), logit_bias={5: 1.5}, logprobs=1, seed=-(2**63))
    submit = wire.Submit(3, (Submission("x", (1, 2), params, 1),))
    assert wire.decode_call(wire.encode(submit)) == submit
    logprob = TokenLogprob(5, float("-inf"), ((5, -0.5),))
    update = Update("x", 1, "é", (5,), FinishReason.STOP, "a", None, DecodeCounters(3), 2, 0.5,
                    (logprob,), (logprob,))  # fmt: skip
    report = wire.Report([wire.Answer(3, fault=wire.Fault("QueueFull", "full"))], [update], STATS)
    found = wire.decode_news(wire.encode(report))
    assert found == report
    assert found.updates[0].finish_reason is FinishReason.STOP


STATS = EngineStats(0, 0, None, 4, 4, 4, 4, DecodeCounters(), CacheCounters(), LoopCounters())


class Socket:
    """Holds calls, and records what is sent and how long a poll would block."""

    def __init__(self, *calls: Any) -> None:
        self.calls = deque(map(wire.encode, calls))
        self.sent: list[wire.Report] = []
        self.waits: list[int | None] = []

    def poll(self, timeout: int | None) -> int:
        self.waits.append(timeout)
        return len(self.calls)

    def recv(self, flags: int) -> bytes:
        import zmq

        if not self.calls:
            raise zmq.Again
        return self.calls.popleft()

    def send(self, data: bytes) -> None:
        self.sent.append(wire.decode_news(data))


class Refusing:
    """An engine whose pools are too small for anything."""

    has_work = False
    stats = STATS
    sentinels: tuple[int, ...] = ()

    def check_ranks(self) -> None:
        pass

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def enqueue(self, submissions: Any) -> None:
        self.refused = [Update("a", 0, "", (), FinishReason.ERROR, error="needs 9 pages, 4 exist")]

    def take_refused(self) -> list[Update]:
        return self.refused

    def abort(self, request_id: str) -> list[Update]:
        self.aborted.append(request_id)
        return []


def test_what_can_never_run_is_refused_with_its_sizes() -> None:
    engine = Refusing()
    submissions = tuple(Submission(name, (1,), SamplingParams()) for name in "ab")
    socket = Socket(wire.Submit(7, submissions), wire.Stop())
    EngineService(engine, socket).run()
    (answer,) = socket.sent[0].answers
    assert (answer.call, answer.fault) == (
        7,
        wire.Fault("ContextTooLong", "needs 9 pages, 4 exist"),
    )
    assert engine.aborted == ["a", "b"]


def test_an_engine_at_rest_hears_that_a_rank_has_ended() -> None:
    class Losing(Refusing):
        def check_ranks(self) -> None:
            if is_lost:
                raise InternalError("rank 1 was ended")

    end, far_end = multiprocessing.Pipe()
    engine, is_lost = Losing(), False
    engine.sentinels = (end.fileno(),)
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as near,
        context.socket(zmq.PAIR) as far,
    ):
        near.bind("inproc://engine")
        far.connect("inproc://engine")
        service = EngineService(engine, near)
        far.send(wire.encode(wire.Inspect(1)))
        service._take_calls()
        service._send()
        assert wire.decode_news(far.recv()).answers == [wire.Answer(1)]
        is_lost = True
        far_end.close()
        with pytest.raises(InternalError, match="rank 1 was ended"):
            service.run()


def test_an_engine_at_rest_sends_its_last_statistics_and_sleeps() -> None:
    socket = Socket(wire.Inspect(1), wire.Inspect(2))
    service = EngineService(Refusing(), socket)
    service._take_calls()
    service._send()
    assert socket.sent[0].stats == STATS
    service._take_calls()
    assert socket.waits[0] <= 0
    assert socket.waits[-1] is None
