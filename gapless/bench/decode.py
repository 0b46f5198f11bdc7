"""How fast requests of fixed output length are decoded, one alone and many at once.

The engine is driven as a server drives it: requests submitted, then steps until the last token
has arrived, detokenized. Peers are timed by the whole call, prefill included, and compared so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from gapless.core.counters import DecodeCounters
from gapless.core.sampling_params import SamplingParams
from gapless.errors import ContextTooLong, InternalError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gapless.bench.prompts import PromptSet
    from gapless.engine.llm import LLM


@dataclass(frozen=True)
class Timing:
    """One measured call."""

    num_tokens: int
    """Tokens generated."""
    seconds: float
    """From the start to the last token, prefill included."""


@dataclass(frozen=True)
class ServedTiming(Timing):
    """One measured run of requests through the engine."""

    first_token_seconds: float
    """From the start until every request has its first token."""
    decode_tokens: int
    """Tokens that arrived after that."""
    counters: DecodeCounters
    """What the decode steps of this run did."""

    @property
    def decode_seconds(self) -> float:
        """From the last request's first token to the last token of all."""
        return self.seconds - self.first_token_seconds


class Side(Protocol):
    """One of the things compared."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def measure(self, prompts: PromptSet) -> Mapping[str, Timing]:
        """Run every mode once and return its timing."""
        ...


class Peer(Protocol):
    """Another implementation of the model, which generates past end-of-text ids."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Continue prompts greedily in one batch."""
        ...


class Encoder:
    """Questions to token ids, as the commands that serve do it."""

    def __init__(self, llm: LLM, output_len: int, *, is_raw: bool) -> None:
        self._llm = llm
        self._output_len = output_len
        self._is_raw = is_raw

    def encode(self, question: str) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            ContextTooLong: prompt and output together do not fit.
        """
        prompt = question if self._is_raw else [{"role": "user", "content": question}]
        ids = self._llm.encode(prompt)
        room = self._llm.engine.config.max_model_len - len(ids)
        if room < self._output_len:
            raise ContextTooLong(
                f"a prompt of {len(ids)} tokens leaves room for {max(room, 0)} of output, want "
                f"{self._output_len}; lower output_len or raise max_model_len"
            )
        return ids


class ServedSide:
    """gapless with one choice of options. Modes: `single` and `concurrent`."""

    def __init__(self, name: str, llm: LLM, output_len: int, *, is_raw: bool = False) -> None:
        self.name = name
        self._llm = llm
        self._output_len = output_len
        self._encoder = Encoder(llm, output_len, is_raw=is_raw)

    def measure(self, prompts: PromptSet) -> dict[str, ServedTiming]:
        """Run one request alone, then all of the batch at once."""
        _set_threads(self._llm)
        single = [self._encoder.encode(prompts.single)]
        batch = [self._encoder.encode(question) for question in prompts.batch]
        return {
            "single": time_requests(self._llm, single, self._output_len),
            "concurrent": time_requests(self._llm, batch, self._output_len),
        }


class PeerSide:
    """Another implementation. Modes: `single`, `sequential` (one by one) and `batch`."""

    def __init__(
        self, name: str, peer: Peer, llm: LLM, output_len: int, *, is_raw: bool = False
    ) -> None:
        """`llm` makes the token ids and says how many threads to use."""
        self.name = name
        self._peer = peer
        self._llm = llm
        self._output_len = output_len
        self._encoder = Encoder(llm, output_len, is_raw=is_raw)

    def measure(self, prompts: PromptSet) -> dict[str, Timing]:
        """Run one prompt, then those of the batch one after another, then as one padded batch."""
        _set_threads(self._llm)
        single = [self._encoder.encode(prompts.single)]
        batch = [self._encoder.encode(question) for question in prompts.batch]
        return {
            "single": self._time([single]),
            "sequential": self._time([[ids] for ids in batch]),
            "batch": self._time([batch]),
        }

    def _time(self, calls: Sequence[Sequence[Sequence[int]]]) -> Timing:
        start = time.perf_counter()
        outputs = [ids for call in calls for ids in self._peer.generate(call, self._output_len)]
        seconds = time.perf_counter() - start
        _check_lengths([len(ids) for ids in outputs], sum(map(len, calls)), self._output_len)
        return Timing(sum(len(ids) for ids in outputs), seconds)


def time_requests(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> ServedTiming:
    """Submit all prompts, run the engine until each has `output_len` tokens, and time it.

    Raises:
        RequestError: a request cannot be served.
    """
    engine = llm.engine
    # every round prefills its prompts
    engine.flush_cache()
    engine.scheduler.counters = counters = DecodeCounters()
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    request_ids = [f"bench-{index}" for index in range(len(prompts))]
    counts = dict.fromkeys(request_ids, 0)
    waiting = set(request_ids)
    running = set(request_ids)
    first_token_time = last_time = start = clock()
    decode_tokens = 0
    try:
        for request_id, ids in zip(request_ids, prompts, strict=True):
            engine.submit(request_id, ids, params)
        while running:
            updates = engine.step()
            last_time = clock() if updates else last_time
            for update in updates:
                if update.error is not None:
                    raise RequestError(update.error)
                counts[update.request_id] += len(update.token_ids)
                if update.finish_reason is not None:
                    running.discard(update.request_id)
            if waiting:
                waiting -= {update.request_id for update in updates if update.token_ids}
                first_token_time = last_time
            else:
                decode_tokens += sum(len(update.token_ids) for update in updates)
    finally:
        for request_id in request_ids:
            engine.abort(request_id)
        # a step in flight belongs to no one, and the next measurement must not wait for it
        while engine.has_work:
            engine.step()
    _check_lengths(list(counts.values()), len(prompts), output_len)
    return ServedTiming(
        sum(counts.values()), last_time - start, first_token_time - start, decode_tokens, counters
    )


def _check_lengths(lengths: Sequence[int], count: int, output_len: int) -> None:
    if list(lengths) != [output_len] * count:
        raise InternalError(
            f"{count} prompts gave {list(lengths)} tokens, want {output_len} each: the times "
            "cannot be compared"
        )


def _set_threads(llm: LLM) -> None:
    """Threads are a setting of the process, and the sides may differ in it."""
    config = llm.engine.config
    if config.device == "cpu":
        torch.set_num_threads(config.num_threads)
