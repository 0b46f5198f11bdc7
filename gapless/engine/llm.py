"""The offline interface: prompts in, results out, the engine in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tqdm import tqdm

from gapless.config.options import EngineOptions
from gapless.core.counters import CacheCounters, DecodeCounters
from gapless.core.messages import Completion, GenerationResult, TokenLogprob, Update, Usage
from gapless.core.sampling_params import SamplingParams
from gapless.engine.engine import Engine
from gapless.errors import InvalidRequest, RequestError
from gapless.text.chat import EncodedPrompt

Message = Mapping[str, object]
Prompt = str | Sequence[int] | Sequence[Message] | EncodedPrompt
"""Text, token ids, the messages of a chat, or what `LLM.prepare` made of one of these."""


class LLM:
    """A model that generates in this process.

    ```python
    llm = LLM()  # the bundled model; or LLM(model="Qwen/Qwen3.5-4B", dtype="bfloat16")
    result = llm.generate("Twice two is", SamplingParams(temperature=0, max_tokens=8))
    print(result.text)
    ```

    Options are those of `EngineOptions`. Not for use from several threads at once.

    Raises:
        ConfigError, ModelError, BackendUnavailable: see `gapless.errors`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._engine = Engine(EngineOptions.from_dict({"model": model, **options}))
        self._inboxes: dict[str, deque[Update]] = {}
        self._num_requests = 0

    @property
    def engine(self) -> Engine:
        """The engine underneath: configuration, tokenizer, scheduler."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        shows_progress: bool = False,
    ) -> Any:
        """Continue one prompt, or many in one batch.

        Args:
            prompts: a prompt, or a list of prompts: text, token ids, or chat messages each.
            sampling_params: for all prompts, or one per prompt; the model's own if None.

        Returns:
            A `GenerationResult` for one prompt, a list of them in order for a list.

        Raises:
            RequestError: a prompt or its parameters cannot be served; none was started.
        """
        is_single = _is_prompt(prompts)
        batch = [cast("Prompt", prompts)] if is_single else list(cast("Sequence[Prompt]", prompts))
        params = self._params_of(sampling_params, len(batch))
        jobs = self._jobs(batch, params)
        updates = self._run(jobs, shows_progress=shows_progress)
        results = [_result(job, updates[job.request_id]) for job in jobs]
        return results[0] if is_single else results

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Generator[Update, None, None]:
        """Continue one prompt, yielding text as it comes; several streams may run side by side.

        The request starts at once. Leaving the iteration early aborts it.

        Raises:
            QueueFull: as many requests wait as may.
            RequestError: the prompt or its parameters cannot be served.
        """
        params = sampling_params or self._engine.default_params
        own_id = request_id if request_id is not None else self._next_id()
        self._submit(_Job(own_id, self.prepare(prompt), params))
        following = self._follow(own_id, params.n)
        # a generator that has not begun would not see its end, and leave the request running
        next(following)
        return cast("Generator[Update, None, None]", following)

    def close(self) -> None:
        """End the processes that `tp` above 1 started; they also end with this object."""
        self._engine.close()

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last update with finish reason `abort`."""
        self._deliver(self._engine.abort(request_id))

    def score(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        """Natural log-probability of each token of each prompt given those before it.

        The first token has none, so a list is one shorter than its prompt.
        """
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        jobs = self._jobs(prompts, [params] * len(prompts))
        updates = self._run(jobs, shows_progress=False)
        return [
            [e.logprob for update in updates[job.request_id] for e in update.prompt_logprobs]
            for job in jobs
        ]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the model's chat template.

        Raises:
            InvalidRequest: it is none of the kinds, or the template refuses it.
        """
        return list(self.prepare(prompt).token_ids)

    def prepare(self, prompt: Prompt) -> EncodedPrompt:
        """Encode a prompt once, to be used as one: `encode`, and where a chat's messages end.

        Raises:
            InvalidRequest: as `encode`.
        """
        if isinstance(prompt, EncodedPrompt):
            return prompt
        tokenizer = self._engine.tokenizer
        if isinstance(prompt, str):
            return EncodedPrompt(tokenizer.encode(prompt, add_special_tokens=True))
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self._engine.chat_template.encode(tokenizer, cast("list[Message]", items))
        return EncodedPrompt(cast("list[int]", items))

    def flush_cache(self) -> int:
        """Forget all prefixes that no request is using; return how many tokens they had."""
        return self._engine.flush_cache()

    @property
    def cache_counters(self) -> CacheCounters:
        """What the prefix cache did since the start."""
        return self._engine.cache_counters

    def _params_of(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            return [self._engine.default_params] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise InvalidRequest(
                f"{len(given)} sampling_params for {count} prompts; want one for all, or one each"
            )
        return list(given)

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests}"

    def _jobs(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[_Job]:
        """Encode and check all prompts, so that none starts if one cannot be served."""
        prepared = [self.prepare(prompt) for prompt in prompts]
        for prompt, own in zip(prepared, params, strict=True):
            self._engine.check(prompt.token_ids, own)
        return [
            _Job(self._next_id(), prompt, own) for prompt, own in zip(prepared, params, strict=True)
        ]

    def _submit(self, job: _Job) -> None:
        self._engine.submit(
            job.request_id,
            job.prompt.token_ids,
            job.params,
            message_end=job.prompt.message_end,
        )
        self._inboxes[job.request_id] = deque()

    def _deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            inbox = self._inboxes.get(update.request_id)
            if inbox is not None:
                inbox.append(update)

    def _follow(self, request_id: str, num_open: int) -> Generator[Update | None, None, None]:
        inbox = self._inboxes[request_id]
        try:
            yield None
            while num_open:
                while not inbox:
                    self._deliver(self._engine.step())
                update = inbox.popleft()
                num_open -= update.finish_reason is not None
                if update.error is not None:
                    raise RequestError(update.error)
                yield update
        finally:
            self._engine.abort(request_id)
            self._inboxes.pop(request_id, None)

    def _run(self, jobs: Sequence[_Job], *, shows_progress: bool) -> dict[str, list[Update]]:
        """Submit in order, as the queue has room, and step until all have ended."""
        try:
            return self._collect(jobs, shows_progress=shows_progress)
        finally:
            for job in jobs:
                self.abort(job.request_id)
                self._inboxes.pop(job.request_id, None)

    def _collect(self, jobs: Sequence[_Job], *, shows_progress: bool) -> dict[str, list[Update]]:
        found: dict[str, list[Update]] = {job.request_id: [] for job in jobs}
        num_open: dict[str, int] = {}
        pending = deque(jobs)
        num_tokens = 0
        with tqdm(total=len(jobs), disable=not shows_progress, unit="req") as bar:
            while pending or num_open:
                while pending and self._engine.has_room(pending[0].params):
                    job = pending.popleft()
                    self._submit(job)
                    num_open[job.request_id] = job.params.n
                self._deliver(self._engine.step())
                for request_id in list(num_open):
                    inbox = self._inboxes[request_id]
                    while inbox:
                        update = inbox.popleft()
                        found[request_id].append(update)
                        num_tokens += len(update.token_ids)
                        num_open[request_id] -= update.finish_reason is not None
                    if num_open[request_id] == 0:
                        del num_open[request_id]
                        bar.update()
                        bar.set_postfix(tokens=num_tokens, refresh=False)
        return found


@dataclass(frozen=True)
class _Job:
    """A prompt on its way into the engine."""

    request_id: str
    prompt: EncodedPrompt
    params: SamplingParams


def _is_prompt(prompts: Any) -> bool:
    """Whether it is one prompt: text, encoded, or a list of token ids or of messages."""
    if isinstance(prompts, (str, EncodedPrompt)):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], (int, Mapping))


def _result(job: _Job, updates: Sequence[Update]) -> GenerationResult:
    params, prompt_ids = job.params, tuple(job.prompt.token_ids)
    completions: list[Completion] = []
    cached_tokens = 0
    for index in range(params.n):
        own = [update for update in updates if update.index == index]
        last = own[-1]
        if last.error is not None:
            raise RequestError(last.error)
        assert last.finish_reason is not None, "collected up to the last update"
        if index == 0:
            cached_tokens = last.cached_tokens
        completions.append(
            Completion(
                index=index,
                text="".join(update.text for update in own),
                token_ids=tuple(t for update in own for t in update.token_ids),
                finish_reason=last.finish_reason,
                counters=last.counters or DecodeCounters(),
                stop_reason=last.stop_reason,
                logprobs=_joined(update.logprobs for update in own),
            )
        )
    usage = Usage(len(prompt_ids), sum(len(c.token_ids) for c in completions), cached_tokens)
    prompt_logprobs = None
    if params.prompt_logprobs is not None:
        entries = (entry for update in updates for entry in update.prompt_logprobs)
        prompt_logprobs = (None, *entries)
    return GenerationResult(job.request_id, prompt_ids, tuple(completions), usage, prompt_logprobs)


def _joined(
    parts: Iterable[tuple[TokenLogprob, ...] | None],
) -> tuple[TokenLogprob, ...] | None:
    known = [part for part in parts if part is not None]
    return tuple(entry for part in known for entry in part) if known else None
