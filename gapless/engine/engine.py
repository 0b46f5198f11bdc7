"""Requests in, updates out: text on one side, the scheduler's integers on the other."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from gapless.core.messages import EngineStats, Submission, Update
from gapless.core.request import FinishReason, Request, Status
from gapless.core.sampling_params import SamplingParams
from gapless.engine.continuation import Continuation
from gapless.engine.limits import PromptLimits
from gapless.engine.load import load
from gapless.engine.loop import EngineLoop
from gapless.errors import InvalidRequest, QueueFull
from gapless.scheduler.limits import SchedulerLimits
from gapless.scheduler.scheduler import Scheduler
from gapless.text.chat import ChatTemplate
from gapless.text.detokenizer import Detokenizer
from gapless.text.grammar import GrammarCompiler
from gapless.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gapless.config.config import Config
    from gapless.config.hf import GenerationDefaults
    from gapless.config.options import EngineOptions
    from gapless.core.counters import CacheCounters, LoopCounters
    from gapless.core.grammar import GrammarState
    from gapless.core.plan import Delta
    from gapless.observe.trace import Trace

logger = logging.getLogger(__name__)

_MASK = 2**64 - 1

Number = TypeVar("Number", int, float)


class Engine:
    """One model, its scheduler and its text side, driven step by step by the caller."""

    def __init__(self, options: EngineOptions) -> None:
        loaded = load(options)
        self.config = loaded.config
        self.checkpoint = loaded.checkpoint
        self.tokenizer = Tokenizer(loaded.checkpoint)
        self.chat_template = ChatTemplate.from_checkpoint(loaded.checkpoint, self.tokenizer)
        vocab_size = loaded.hf.integer("vocab_size")
        eos = {*loaded.hf.eos_token_ids}
        if self.tokenizer.eos_id is not None:
            eos.add(self.tokenizer.eos_id)
        self.limits = PromptLimits(
            vocab_size=vocab_size,
            max_model_len=self.config.max_model_len,
            # a tokenizer may know more tokens than the model has logits
            eos_ids=tuple(sorted(token_id for token_id in eos if token_id < vocab_size)),
        )
        self.grammars = GrammarCompiler(self.tokenizer, vocab_size)
        self.default_params = _default_params(loaded.hf.generation)
        self._seeds = random.Random(options.seed)
        self.scheduler = Scheduler(_limits(self.config))
        self._loop = EngineLoop(
            self.scheduler, loaded.run, runs_ahead=self.config.switches.runs_ahead
        )
        self.launch_counters = loaded.runner.launches
        self._loaded = loaded
        # by the scheduler's id, and the ids of all continuations by that of their request
        self._live: dict[str, Continuation] = {}
        self._open: dict[str, list[str]] = {}
        # in order of arrival, those that have not been seen to run
        self._queued: deque[Continuation] = deque()
        self._refused: list[Update] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._loop.has_work or bool(self._refused)

    @property
    def cache_counters(self) -> CacheCounters:
        """What the prefix cache did since the start."""
        return self.scheduler.cache_counters

    @property
    def loop_counters(self) -> LoopCounters:
        """What stepping cost the host since the start."""
        return self._loop.counters

    def watch(self, trace: Trace | None) -> None:
        """Record each iteration from now on, on this rank; None ends it."""
        self._loop.watch(trace)
        self._loaded.runner.watch(trace)

    def flush_cache(self) -> int:
        """Forget all prefixes that no request is using; return how many tokens they had."""
        return self.scheduler.flush_cache()

    def close(self) -> None:
        """End the worker processes, if there are any; nothing can run afterwards."""
        logger.debug("prefix cache: %s", self.cache_counters)
        logger.debug("host: %s", self.loop_counters)
        logger.debug("device: %s", self.launch_counters)
        self._loaded.close()

    @property
    def sentinels(self) -> Sequence[int]:
        """File descriptors that can be read once the engine cannot go on; see `check_ranks`."""
        return self._loaded.sentinels

    def check_ranks(self) -> None:
        """Raise if the engine cannot go on, also while it has nothing to do.

        Raises:
            InternalError: a process that holds a part of the model has ended.
        """
        self._loaded.check()

    @property
    def stats(self) -> EngineStats:
        """What it holds, and has done since the start; the counters go on counting."""
        scheduler, config = self.scheduler, self.config
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            wait_reason=scheduler.wait_reason,
            num_pages=config.num_pages,
            num_free_pages=scheduler.num_free_pages,
            num_state_rows=config.num_state_rows,
            num_free_rows=scheduler.num_free_rows,
            decode=scheduler.counters,
            cache=self.cache_counters,
            loop=self.loop_counters,
        )

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what `submit` would of a prompt and its parameters; see `PromptLimits.check`.

        Blocks until a grammar is compiled, at most as long as one may take.
        """
        self.limits.check(prompt_ids, params)
        self._grammar_states(params, 1)

    def has_room(self, *params: SamplingParams) -> bool:
        """Whether the queue takes requests with these parameters; an empty one takes any."""
        waiting, wanted = self.scheduler.num_waiting, sum(own.n for own in params)
        return waiting == 0 or waiting + wanted <= self.config.max_queued_requests

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        message_end: int | None = None,
    ) -> None:
        """Queue `params.n` continuations of a prompt.

        `message_end` is that of `EncodedPrompt`: a state is kept there for the chat's next turn.

        Raises:
            QueueFull: see `has_room`; nothing was queued.
            RequestError: as `check`; nothing was queued.
        """
        self.check(prompt_ids, params)
        self.enqueue([Submission(request_id, tuple(prompt_ids), params, message_end)])

    def enqueue(self, submissions: Sequence[Submission]) -> None:
        """Queue prompts that `check` has passed, all or none.

        Blocks for a grammar that has not been compiled; see `grammars`.

        Raises:
            QueueFull: see `has_room`.
            InvalidRequest: an id is in use, or a grammar does not compile.
        """
        params = [submission.params for submission in submissions]
        if not self.has_room(*params):
            raise QueueFull(
                f"{self.scheduler.num_waiting} requests wait, {sum(own.n for own in params)} more "
                f"are sent, and {self.config.max_queued_requests} may wait; send it again later, "
                "or raise max_queued_requests"
            )
        for submission in submissions:
            if submission.request_id in self._open:
                raise InvalidRequest(
                    f"request id {submission.request_id!r} is in use; choose another"
                )
        states = [self._grammar_states(own, own.n) for own in params]
        for submission, own_states in zip(submissions, states, strict=True):
            self._enqueue(submission, own_states)

    def _grammar_states(self, params: SamplingParams, count: int) -> Sequence[GrammarState | None]:
        """Begin `count` texts in the grammar of a request; without one, as many times None.

        Raises:
            InvalidRequest: it does not compile, or is not served here.
        """
        if params.grammar is None:
            return [None] * count
        if self.config.simulated_acceptance is not None:
            raise InvalidRequest(
                "speculative_simulate_acceptance keeps drafts that a grammar refuses; leave out "
                "one of them"
            )
        compilation = self.grammars.start(params.grammar)
        # where nothing is to end the text, it goes on with the model's own
        stop_ids = self.limits.stop_ids(params) or self.limits.eos_ids
        return [compilation.state(stop_ids) for _ in range(count)]

    def _enqueue(
        self, submission: Submission, grammar_states: Sequence[GrammarState | None]
    ) -> None:
        prompt_ids, params = submission.prompt_ids, submission.params
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        room = self.config.max_model_len - len(prompt_ids)
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        now = time.perf_counter()
        own_ids = [f"{submission.request_id}/{index}" for index in range(params.n)]
        self._open[submission.request_id] = list(own_ids)
        for index, own_id in enumerate(own_ids):
            request = Request(
                request_id=own_id,
                prompt_ids=prompt_ids,
                params=params,
                seed=derived_seed(seed, index),
                stop_ids=self.limits.stop_ids(params),
                limit_len=len(prompt_ids) + wanted,
                # those of the others would be the same
                wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                message_end=submission.message_end,
                grammar=grammar_states[index],
            )
            detokenizer = Detokenizer(
                self.tokenizer,
                stop=params.stop,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            live = Continuation(request, submission.request_id, index, detokenizer, now)
            self._live[own_id] = live
            self._queued.append(live)
            refused = self.scheduler.submit(request)
            if refused is not None:
                self._refused += self._updates([refused])

    def take_refused(self) -> list[Update]:
        """Last updates of continuations that were queued and could never run; `step` gives them."""
        refused, self._refused = self._refused, []
        return refused

    def step(self) -> list[Update]:
        """Run one iteration and return its news."""
        refused = self.take_refused()
        deltas = self._loop.step()
        self._note_admissions()
        return refused + self._updates(deltas)

    def abort(self, request_id: str) -> list[Update]:
        """End a request's continuations; their last updates, empty if it is not alive."""
        found = [self._live[own_id] for own_id in self._open.get(request_id, ())]
        deltas = [self.scheduler.finish(live.request, FinishReason.ABORT) for live in found]
        return self._updates(deltas)

    def _note_admissions(self) -> None:
        """Time those that have left the queue; none overtakes another."""
        now = time.perf_counter()
        while self._queued and self._queued[0].request.status is not Status.WAITING:
            live = self._queued.popleft()
            live.queue_seconds = now - live.submitted_at

    def _updates(self, deltas: Iterable[Delta]) -> list[Update]:
        updates: list[Update] = []
        for delta in deltas:
            live = self._live[delta.request.request_id]
            update = live.read(delta)
            if update.finish_reason is not None:
                if delta.finish_reason is None:
                    # by a stop string, which the scheduler does not see
                    self.scheduler.finish(live.request, FinishReason.STOP)
                logger.debug("%s: %s", delta.request.request_id, delta.request.counters)
                self._forget(live)
            updates.append(update)
        return updates

    def _forget(self, live: Continuation) -> None:
        own_id = live.request.request_id
        del self._live[own_id]
        open_ids = self._open[live.request_id]
        open_ids.remove(own_id)
        if not open_ids:
            del self._open[live.request_id]


def derived_seed(seed: int, index: int) -> int:
    """Seed of a request's sample `index`; the first keeps the request's own.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014) over seed and index, as a signed integer.
    """
    if index == 0:
        return seed
    x = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _limits(config: Config) -> SchedulerLimits:
    return SchedulerLimits(
        max_running_requests=config.max_running_requests,
        max_model_len=config.max_model_len,
        num_pages=config.num_pages,
        page_size=config.page_size,
        num_state_rows=config.num_state_rows,
        chunked_prefill_size=config.chunked_prefill_size,
        max_window=config.max_window,
        tree=config.tree,
        replay_len=config.replay_len,
        uses_prefix_cache=config.uses_prefix_cache,
        needs_snapshots=config.row_bytes > 0,
        page_bytes=config.page_bytes,
        row_bytes=config.row_bytes,
        num_host_pages=config.num_host_pages,
        num_host_rows=config.num_host_rows,
    )


def _default_params(generation: GenerationDefaults) -> SamplingParams:
    """Sampling of requests that name none: the checkpoint's own, greedy where it says so."""
    if generation.do_sample is False:
        return SamplingParams(temperature=0.0)
    params = SamplingParams()
    return replace(
        params,
        temperature=_or(generation.temperature, params.temperature),
        top_k=_or(generation.top_k, params.top_k),
        top_p=_or(generation.top_p, params.top_p),
        min_p=_or(generation.min_p, params.min_p),
        repetition_penalty=_or(generation.repetition_penalty, params.repetition_penalty),
    )


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
