"""The offline interface on the bundled model: stopping, streaming, aborting, kinds of prompts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from gapless import LLM, EngineOptions, InvalidRequest, QueueFull, SamplingParams
from gapless.config.hf import GenerationDefaults
from gapless.core.request import FinishReason
from gapless.engine.engine import Engine, _default_params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless.core.messages import Update
    from gapless.core.plan import Delta
    from gapless.core.request import Request

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(max_running_requests=4, max_model_len=256)
    yield llm
    # whatever a test did, nothing is left behind
    assert not llm.engine.has_work
    llm.engine.scheduler.check_conserved()
    assert llm.engine.scheduler.num_running == llm.engine.scheduler.num_waiting == 0


def _greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **changes})


def test_answers(llm: LLM) -> None:
    result = llm.generate(QUESTION)
    assert "Paris" in result.text
    assert result.finish_reason is FinishReason.STOP
    assert result.completions[0].stop_reason == result.token_ids[-1] == 4082
    assert result.usage.prompt_tokens == len(result.prompt_token_ids)
    assert result.usage.completion_tokens == len(result.token_ids)
    assert result.usage.total_tokens == len(result.prompt_token_ids) + len(result.token_ids)


def test_kinds_of_prompts_mean_the_same(llm: LLM) -> None:
    ids = llm.encode(QUESTION)
    text = llm.engine.chat_template.render(QUESTION)
    results = llm.generate([QUESTION, ids, text], GREEDY)
    assert len({result.token_ids for result in results}) == 1
    assert llm.generate([]) == []
    prepared = llm.prepare(QUESTION)
    assert llm.prepare(prepared) is prepared
    assert llm.encode(prepared) == ids
    assert llm.generate(prepared, GREEDY).token_ids == results[0].token_ids
    assert llm.generate([prepared], GREEDY)[0].prompt_token_ids == tuple(ids)


def test_a_chat_s_messages_end_before_the_generation_prompt(llm: LLM) -> None:
    prepared = llm.prepare(QUESTION)
    assert prepared.message_end is not None
    tail = prepared.token_ids[prepared.message_end :]
    assert llm.engine.tokenizer.decode(tail, skip_special_tokens=False) == "<|im_start|>assistant\n"
    # whatever the answer, the next turn begins with the same tokens
    chat = [*QUESTION, {"role": "assistant", "content": "!"}, {"role": "user", "content": "?"}]
    shared = prepared.token_ids[: prepared.message_end]
    assert llm.encode(chat)[: prepared.message_end] == shared
    for prompt in ("text", [5, 6], llm.encode(QUESTION)):
        assert llm.prepare(prompt).message_end is None


def test_requests_know_where_their_messages_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, found = llm.engine.scheduler, []
    submit = scheduler.submit

    def record(request: Request) -> Delta | None:
        found.append(request.message_end)
        return submit(request)

    monkeypatch.setattr(scheduler, "submit", record)
    llm.generate([QUESTION, "text"], _greedy(n=2, max_tokens=1))
    list(llm.stream(QUESTION, _greedy(max_tokens=1)))
    end = llm.prepare(QUESTION).message_end
    assert found == [end, end, None, None, end]


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_tokens_is_exact(llm: LLM, limit: int) -> None:
    result = llm.generate(QUESTION, _greedy(max_tokens=limit, ignore_eos=True))
    assert len(result.token_ids) == limit
    assert result.finish_reason is FinishReason.LENGTH


def test_context_limit_ends_generation(llm: LLM) -> None:
    prompt = list(range(100, 350))
    result = llm.generate(prompt, _greedy(max_tokens=None, ignore_eos=True))
    assert len(result.token_ids) == 6
    assert result.finish_reason is FinishReason.LENGTH


def test_ignore_eos_and_min_tokens(llm: LLM) -> None:
    plain = llm.generate(QUESTION, GREEDY).token_ids
    beyond = llm.generate(QUESTION, _greedy(ignore_eos=True)).token_ids
    assert beyond[: len(plain)] == plain
    assert len(beyond) == 60
    longer = llm.generate(QUESTION, _greedy(min_tokens=len(plain) + 3)).token_ids
    assert len(longer) >= len(plain) + 3
    assert 4082 not in longer[: len(plain) + 2]


def test_stop_token_id_is_kept_in_the_ids_and_not_in_the_text(llm: LLM) -> None:
    plain = llm.generate(QUESTION, GREEDY)
    stop = plain.token_ids[3]
    result = llm.generate(QUESTION, _greedy(stop_token_ids=(stop,)))
    assert result.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert result.completions[0].stop_reason == stop
    kept = llm.engine.tokenizer.decode(result.token_ids[:-1], skip_special_tokens=True)
    assert result.text == kept


@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_string_cuts_text_and_ids_together(llm: LLM, length: int) -> None:
    plain = llm.generate(QUESTION, GREEDY)
    stop = plain.text[4 : 4 + length]
    result = llm.generate(QUESTION, _greedy(stop=("\x00", stop)))
    assert result.text == plain.text[: plain.text.index(stop)]
    assert result.completions[0].stop_reason == stop
    assert result.finish_reason is FinishReason.STOP
    # the ids end with the token that completed the stop string, and usage agrees
    assert plain.token_ids[: len(result.token_ids)] == result.token_ids
    decoded = llm.engine.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert stop in decoded
    assert stop not in llm.engine.tokenizer.decode(result.token_ids[:-1], skip_special_tokens=True)
    assert result.usage.completion_tokens == len(result.token_ids)


def test_stop_string_on_the_last_token_wins_over_the_limit(llm: LLM) -> None:
    plain = llm.generate(QUESTION, GREEDY)
    first = llm.engine.tokenizer.decode(plain.token_ids[:1], skip_special_tokens=True)
    result = llm.generate(QUESTION, _greedy(stop=(first,), max_tokens=1))
    assert result.finish_reason is FinishReason.STOP
    assert result.text == ""


def test_n_completions_share_a_prompt(llm: LLM) -> None:
    result = llm.generate(QUESTION, SamplingParams(temperature=5.0, seed=1, n=3, max_tokens=12))
    assert [c.index for c in result.completions] == [0, 1, 2]
    assert len({c.token_ids for c in result.completions}) == 3
    assert result.usage.completion_tokens == sum(len(c.token_ids) for c in result.completions)


def test_usage_says_what_was_cached(llm: LLM) -> None:
    llm.flush_cache()
    text = "A prompt that is longer than a page of sixteen tokens, and so can be found again. " * 2
    params = _greedy(n=2, max_tokens=4)
    cold, warm = llm.generate(text, params), llm.generate(text, params)
    assert cold.usage.cached_tokens == 0
    assert 16 <= warm.usage.cached_tokens < warm.usage.prompt_tokens
    assert cold.token_ids == warm.token_ids
    before = llm.cache_counters.num_cached_tokens
    stream = list(llm.stream(text, params))
    (first,) = [u for u in stream if u.finish_reason is not None and u.index == 0]
    assert first.cached_tokens == warm.usage.cached_tokens
    assert all(u.cached_tokens == 0 for u in stream if u.finish_reason is None)
    assert llm.cache_counters.num_cached_tokens > before
    # what was flushed is not there, and what runs goes on
    assert llm.flush_cache() >= 16
    assert llm.flush_cache() == 0
    assert llm.generate(text, params).usage.cached_tokens == 0


def test_without_prefix_cache_nothing_is_kept() -> None:
    llm = LLM(max_running_requests=2, max_model_len=128, disable_prefix_cache=True)
    results = [llm.generate(QUESTION, _greedy(max_tokens=3)) for _ in range(2)]
    assert [r.usage.cached_tokens for r in results] == [0, 0]
    assert llm.flush_cache() == 0
    assert llm.engine.config.num_state_rows == 2


@pytest.fixture(scope="module")
def narrow() -> LLM:
    """Three requests may wait, and one runs."""
    return LLM(max_running_requests=1, max_model_len=128, max_queued_requests=3)


def test_a_full_queue_refuses(narrow: LLM) -> None:
    engine = narrow.engine
    params = _greedy(max_tokens=2)
    engine.submit("a", [5, 6, 7], _greedy(max_tokens=2, n=2))
    engine.submit("b", [5, 6, 7], params)
    assert not engine.has_room(params)
    message = "3 requests wait, 1 more are sent, and 3 may wait; send it again later"
    with pytest.raises(QueueFull, match=message):
        engine.submit("c", [5, 6, 7], params)
    with pytest.raises(QueueFull):
        narrow.stream([5, 6, 7], params)
    ended = {u.request_id for u in _drain(engine) if u.finish_reason is not None}
    assert ended == {"a", "b"}
    # refused ids are free, and an empty queue takes more continuations than may wait
    engine.submit("c", [5, 6, 7], _greedy(max_tokens=2, n=5))
    assert sum(u.finish_reason is not None for u in _drain(engine)) == 5
    assert not engine.scheduler.num_waiting


def _drain(engine: Engine) -> list[Update]:
    updates = []
    while engine.has_work:
        updates += engine.step()
    return updates


def test_batches_are_fed_in_order_as_the_queue_has_room(
    narrow: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, submit = narrow.engine.scheduler, narrow.engine.scheduler.submit
    order, waiting = [], []

    def record(request: Request) -> Delta | None:
        refused = submit(request)
        order.append(request.prompt_ids)
        waiting.append(scheduler.num_waiting)
        return refused

    monkeypatch.setattr(scheduler, "submit", record)
    prompts = [[5, 6, 7 + i] for i in range(10)]
    params = [_greedy(max_tokens=1 + i % 3, n=1 + 4 * (i == 5)) for i in range(10)]
    results = narrow.generate(prompts, params)
    assert [len(r.completions) for r in results] == [p.n for p in params]
    assert [len(r.token_ids) for r in results] == [p.max_tokens for p in params]
    assert list(dict.fromkeys(order)) == [tuple(p) for p in prompts]
    assert max(waiting) == 5  # of the one with 5 continuations, alone
    assert sorted(waiting)[-2] <= 4
    scores = narrow.score(prompts)
    assert [len(s) for s in scores] == [2] * 10
    # all are checked before the first starts
    count = len(order)
    with pytest.raises(InvalidRequest, match="token id 4096"):
        narrow.generate([*prompts, [4096]], GREEDY)
    with pytest.raises(InvalidRequest, match="token id 4096"):
        narrow.score([*prompts, [4096]])
    assert len(order) == count


def test_batches_wait_for_a_queue_that_streams_have_filled(narrow: LLM) -> None:
    streams = [narrow.stream([5, 6], _greedy(max_tokens=3, ignore_eos=True)) for _ in range(3)]
    assert len(narrow.generate([[7, 8]] * 5, _greedy(max_tokens=2))) == 5
    for stream in streams:
        assert sum(len(u.token_ids) for u in stream) == 3


def test_closing_tells_what_the_cache_did(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(EngineOptions(max_running_requests=1, max_model_len=64))
    with caplog.at_level(logging.DEBUG, logger="gapless"):
        engine.close()
    assert f"prefix cache: {engine.cache_counters}" in caplog.text


def test_streams_side_by_side_join_to_the_whole(llm: LLM) -> None:
    prompts = [QUESTION, "Mia has 4 apples", [{"role": "user", "content": "What is 2 + 3?"}]]
    whole = llm.generate(prompts, GREEDY)
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    updates: list[list[Any]] = [[], [], []]
    open_streams = dict(enumerate(streams))
    while open_streams:
        for i, stream in list(open_streams.items()):
            update = next(stream, None)
            if update is None:
                del open_streams[i]
            else:
                updates[i].append(update)
    for result, own in zip(whole, updates, strict=True):
        assert "".join(u.text for u in own) == result.text
        assert tuple(t for u in own for t in u.token_ids) == result.token_ids
        assert [u.finish_reason for u in own if u.finish_reason] == [result.finish_reason]


def test_abort_ends_a_stream_once(llm: LLM) -> None:
    stream = llm.stream(QUESTION, _greedy(ignore_eos=True), request_id="mine")
    first = [next(stream) for _ in range(3)]
    llm.abort("mine")
    llm.abort("mine")
    rest = list(stream)
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert [u.finish_reason for u in first + rest].count(None) == len(first + rest) - 1


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_leaving_a_stream_aborts_it(llm: LLM, taken: int) -> None:
    stream = llm.stream(QUESTION, _greedy(ignore_eos=True))
    for _ in range(taken):
        next(stream)
    stream.close()
    assert llm.engine.scheduler.num_running + llm.engine.scheduler.num_waiting == 0
    llm.generate(QUESTION, _greedy(max_tokens=2))


def test_request_id_in_use_is_refused(llm: LLM) -> None:
    stream = llm.stream(QUESTION, GREEDY, request_id="twice")
    with pytest.raises(InvalidRequest, match="'twice' is in use"):
        llm.stream(QUESTION, GREEDY, request_id="twice")
    assert "Paris" in "".join(update.text for update in stream)


def test_score_agrees_with_itself_in_chunks(llm: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog, and then it does so again."
    ids = llm.encode(text)
    (whole,) = llm.score([text])
    assert len(whole) == len(ids) - 1
    assert all(value < 0 for value in whole)
    chunked = LLM(max_running_requests=2, max_model_len=256, chunked_prefill_size=5)
    batch = chunked.score([text, "Something else", text])
    assert batch[0] == pytest.approx(whole, abs=1e-4)
    assert batch[2] == pytest.approx(whole, abs=1e-4)
    assert len(batch[1]) == len(llm.encode("Something else")) - 1


def test_one_sampling_params_per_prompt(llm: LLM) -> None:
    short, long = _greedy(max_tokens=2), _greedy(max_tokens=5)
    results = llm.generate([QUESTION, QUESTION], [short, long])
    assert [len(r.token_ids) for r in results] == [2, 5]
    with pytest.raises(InvalidRequest, match="1 sampling_params for 2 prompts"):
        llm.generate([QUESTION, QUESTION], [short])


BAD_PROMPTS = [
    ("", "no tokens"),
    ([], "no tokens"),
    ([5, 4096], "token id 4096; want 0 to 4095"),
    ([5, -1], "token id -1; want 0 to 4095"),
    ([5, True], "holds True"),
    ([5, "x"], "holds 'x'"),
    (list(range(256)), "256 tokens and the context holds 256"),
    ([{"content": "no role"}], "role"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_bad_prompt_is_refused_and_the_engine_serves_on(
    llm: LLM, prompt: Any, message: str
) -> None:
    running = llm.stream(QUESTION, GREEDY)
    first = next(running)
    with pytest.raises(InvalidRequest if "context" not in message else Exception, match=message):
        llm.generate([QUESTION, prompt], GREEDY)
    with pytest.raises(Exception, match=message):
        llm.stream(prompt, GREEDY)
    assert "Paris" in first.text + "".join(update.text for update in running)


def test_stop_ids_outside_the_vocabulary_or_too_many(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids holds token id 4096"):
        llm.generate(QUESTION, _greedy(stop_token_ids=(4096,)))
    with pytest.raises(InvalidRequest, match="9 stop ids with the model's own"):
        llm.generate(QUESTION, _greedy(stop_token_ids=tuple(range(7))))
    llm.generate(QUESTION, _greedy(stop_token_ids=tuple(range(7)), ignore_eos=True, max_tokens=2))


def test_requests_that_name_no_sampling_take_the_checkpoint_s() -> None:
    own = GenerationDefaults(True, 0.6, 20, 0.95, 0.05, 1.05)
    assert _default_params(own) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05
    )
    assert _default_params(GenerationDefaults()) == SamplingParams()
    assert _default_params(GenerationDefaults(do_sample=False)).is_greedy
