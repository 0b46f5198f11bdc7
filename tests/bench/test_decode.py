"""Runs through the engine, timed by a clock that counts its readings."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from gapless import LLM
from gapless.bench.decode import PeerSide, ServedSide, time_requests
from gapless.bench.prompts import PromptSet
from gapless.errors import ContextTooLong, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPTS = [list(range(100, 100 + n)) for n in (3, 7, 5)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The bundled model, small pools."""
    return LLM(max_running_requests=4, max_model_len=128, speculative_num_steps=0)


def ticks() -> Callable[[], float]:
    """A clock that is one second later whenever it is read."""
    counter = itertools.count()
    return lambda: float(next(counter))


def test_decoding_starts_when_every_request_has_a_token(llm: LLM) -> None:
    found = time_requests(llm, PROMPTS, 6, ticks())
    # one prefill step emits all first tokens, then each step one of each; steps are ticks apart
    assert found.num_tokens == 18
    assert found.first_token_seconds == 1.0
    assert found.seconds == found.first_token_seconds + found.decode_seconds
    assert found.decode_tokens == 3 * found.decode_seconds


def test_waiting_requests_put_off_the_start_of_decoding() -> None:
    llm = LLM(max_running_requests=1, max_model_len=128, speculative_num_steps=0)
    found = time_requests(llm, PROMPTS, 6, ticks())
    assert found.num_tokens == 18
    # only the last request is left to decode
    assert 0 < found.decode_tokens <= 5
    assert found.first_token_seconds > 2 * 4


def test_nothing_is_left_behind(llm: LLM) -> None:
    time_requests(llm, PROMPTS, 3)
    assert not llm.engine.has_work
    with pytest.raises(ContextTooLong):
        time_requests(llm, [PROMPTS[0], [5] * 200], 3)
    assert not llm.engine.has_work
    stopping = iter([0.0, 1.0])
    # in the middle, with a step in flight
    with pytest.raises(StopIteration):
        time_requests(llm, PROMPTS, 9, lambda: next(stopping))
    assert not llm.engine.has_work
    assert time_requests(llm, PROMPTS, 3).num_tokens == 9


def test_end_of_text_does_not_end_a_run(llm: LLM) -> None:
    prompt = llm.encode([{"role": "user", "content": "What is the capital of France?"}])
    assert len(llm.generate(prompt).token_ids) < 20
    assert time_requests(llm, [prompt], 20).num_tokens == 20


def test_short_outputs_are_not_compared(llm: LLM) -> None:
    with pytest.raises(InternalError, match=r"gave \[28\] tokens, want 40 each"):
        time_requests(llm, [[5] * 100], 40)


class FakePeer:
    """Says what it is given."""

    def __init__(self, extra: int = 0) -> None:
        self.calls: list[list[int]] = []
        self.threads: list[int] = []
        self._extra = extra

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Zeros."""
        self.calls.append([len(prompt) for prompt in prompts])
        self.threads.append(torch.get_num_threads())
        return [[0] * (max_tokens + self._extra) for _ in prompts]


def test_peer_modes(llm: LLM) -> None:
    peer = FakePeer()
    found = PeerSide("peer", peer, llm, 4).measure(PromptSet("a b", ("c", "d e f")))
    lengths = [
        len(llm.encode([{"role": "user", "content": text}])) for text in ("a b", "c", "d e f")
    ]
    assert peer.calls == [lengths[:1], [lengths[1]], [lengths[2]], lengths[1:]]
    assert {mode: t.num_tokens for mode, t in found.items()} == {
        "single": 4, "sequential": 8, "batch": 8,
    }  # fmt: skip
    with pytest.raises(InternalError, match=r"gave \[5\] tokens, want 4"):
        PeerSide("peer", FakePeer(extra=1), llm, 4).measure(PromptSet("a", ("b",)))


def test_raw_prompts_go_without_the_chat_template(llm: LLM) -> None:
    peer = FakePeer()
    PeerSide("peer", peer, llm, 4, is_raw=True).measure(PromptSet("a b", ("c",)))
    assert peer.calls[0] == [len(llm.encode("a b"))]


def test_served_modes(llm: LLM) -> None:
    found = ServedSide("gapless", llm, 3).measure(PromptSet("a", ("b", "c")))
    assert {mode: t.num_tokens for mode, t in found.items()} == {"single": 3, "concurrent": 6}
    with pytest.raises(ContextTooLong, match="want 127; lower output_len"):
        ServedSide("gapless", llm, 127).measure(PromptSet("a", ("b",)))


def test_each_side_runs_with_its_own_threads(llm: LLM) -> None:
    wide = LLM(num_threads=2, max_running_requests=1, max_model_len=128)
    prompts = PromptSet("a", ("b",))
    peer = FakePeer()
    try:
        PeerSide("peer", peer, wide, 2).measure(prompts)
        assert set(peer.threads) == {2}
        ServedSide("own", llm, 2).measure(prompts)
        assert torch.get_num_threads() == 1
        torch.set_num_threads(2)
        PeerSide("peer", peer, llm, 2).measure(prompts)
        assert set(peer.threads[3:]) == {1}
    finally:
        torch.set_num_threads(1)
