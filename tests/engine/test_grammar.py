"""Structured output: valid texts, the same with any drafts, and nothing changed for others."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import numpy as np
import pytest

from gapless import LLM, InvalidRequest, SamplingParams
from gapless.assets import demo_checkpoint
from gapless.core.grammar import Grammar
from gapless.core.request import FinishReason
from gapless.text import grammar as grammar_module
from gapless.text.grammar import GrammarCompiler, MatcherState
from gapless.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.core.messages import GenerationResult
    from gapless.core.plan import StepPlan

pytest.importorskip("xgrammar")

OPTIONS = {"dtype": "float64", "max_running_requests": 8, "max_model_len": 256, "num_threads": 1}
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
OFF: dict[str, Any] = {"speculative_algorithm": "none"}
MTP = {"speculative_algorithm": "mtp", "speculative_num_steps": 3}
NGRAM = {**MTP, "speculative_algorithm": "ngram"}
TREE = {**MTP, "speculative_topk": 3, "speculative_num_draft_tokens": 10}
DRAWN = SamplingParams(temperature=1.0, max_tokens=40)
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 6},
            "pens": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "kind": {"enum": ["a", "bb", None]},
        },
        "required": ["name", "pens"],
    }
)
GRAMMARS = [
    PERSON,
    Grammar.regex(r"(ab|ba){2,6}[0-9]{1,4}\."),
    Grammar.choice(["red", "green", 'q"\\é\n']),
    Grammar.json_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 1}),
]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose values are short."""
    simple: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "integer", "minimum": rng.randrange(-50, 0), "maximum": rng.randrange(99)},
        lambda: {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 7)},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-f]{1,4}$", "^(on|off)$"])},
        lambda: {"type": rng.choice(["boolean", "null"])},
        lambda: {"enum": rng.sample(["x", "yy", 3, None, True, {"a": 1}], rng.randrange(1, 4))},
        lambda: {"const": rng.choice(["fixed", 12, [1, 2]])},
        lambda: {"type": "string", "format": rng.choice(["date", "ipv4"])},
    ]
    nested: list[Callable[[], dict[str, Any]]] = [
        lambda: random_object(rng, depth + 1),
        lambda: {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": rng.randrange(2),
            "maxItems": rng.randrange(2, 4),
        },
        lambda: {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]},
        lambda: {
            "type": "array",
            "prefixItems": [random_schema(rng, depth + 1)],
            "items": False,
            "minItems": 1,
        },
    ]
    return rng.choice(simple if depth >= 2 else simple + nested)()


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of an object, some of its properties required."""
    names = rng.sample(["a", "bc", "the name", "é", "x_1"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
    }


def generate(llm: LLM, grammars: list[Grammar], **changed: Any) -> list[GenerationResult]:
    """Sample one text per grammar, each with its own prompt and seed."""
    prompts = [[5 + i % 50, 9, 40 + i % 7] for i in range(len(grammars))]
    params = [replace(DRAWN, seed=i, grammar=g, **changed) for i, g in enumerate(grammars)]
    return llm.generate(prompts, params)


def make(**options: Any) -> LLM:
    """Make an engine of the bundled model in float64: any difference between two is a bug."""
    return LLM(**{**OPTIONS, **options})


def outcomes(results: list[GenerationResult]) -> list[tuple[Any, ...]]:
    """Tokens and ends."""
    return [(r.token_ids, r.finish_reason) for r in results]


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=SLOW)])
def test_random_schemas_are_followed_with_and_without_drafts(count: int) -> None:
    rng = random.Random(1)
    schemas = [random_object(rng) for _ in range(count)]
    grammars = [Grammar.json_schema(schema) for schema in schemas]
    plain, drafted = (make(**spec) for spec in (OFF, MTP))
    found = generate(plain, grammars, max_tokens=120)
    assert outcomes(generate(drafted, grammars, max_tokens=120)) == outcomes(found)
    assert plain.engine.scheduler.counters.num_accepted == 0
    assert drafted.engine.scheduler.counters.num_accepted > count
    ended = [(s, r) for s, r in zip(schemas, found, strict=True) if r.finish_reason == "stop"]
    assert len(ended) > 0.8 * count
    for schema, result in ended:
        assert jsonschema_rs.is_valid(schema, json.loads(result.text)), (schema, result.text)


@pytest.fixture(scope="module")
def of_each_kind() -> list[GenerationResult]:
    """Texts of `GRAMMARS` without drafts."""
    return generate(make(**OFF), GRAMMARS, min_p=0.001)


@pytest.mark.parametrize("spec", [MTP, NGRAM, TREE])
def test_other_kinds_are_followed_with_any_drafter(
    spec: dict[str, Any], of_each_kind: list[GenerationResult]
) -> None:
    found = of_each_kind
    assert outcomes(generate(make(**spec), GRAMMARS, min_p=0.001)) == outcomes(found)
    assert re.fullmatch(r"(ab|ba){2,6}[0-9]{1,4}\.", found[1].text)
    assert found[2].text in ("red", "green", 'q"\\é\n')
    assert all(r.finish_reason is FinishReason.STOP for r in found[1:3])


@pytest.mark.parametrize("spec", [OFF, MTP])
def test_penalties_bias_and_logprobs_go_along(spec: dict[str, Any]) -> None:
    edits = {
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {70: 50.0},
        "max_tokens": 24,
    }  # fmt: skip
    llm, others = make(**spec), make(**OFF)
    found = generate(llm, GRAMMARS, **edits, logprobs=2)
    assert outcomes(found) == outcomes(generate(others, GRAMMARS, **edits))
    assert all(len(r.completions[0].logprobs or ()) == len(r.token_ids) for r in found)
    # those are of the model alone: what a grammar forbids may be the most likely
    tops = [entry.top[0][1] for r in found for entry in r.completions[0].logprobs or ()]
    chosen = [entry.logprob for r in found for entry in r.completions[0].logprobs or ()]
    assert any(top > own for top, own in zip(tops, chosen, strict=True))


@pytest.mark.parametrize("spec", [OFF, MTP])
def test_others_in_the_batch_keep_their_tokens(spec: dict[str, Any]) -> None:
    prompts = [[11 + i, 30, 7 * i + 2] for i in range(8)]
    params = [replace(DRAWN, seed=i, temperature=i % 2, max_tokens=20) for i in range(8)]
    free = make(**spec).generate(prompts, params)
    params[3] = replace(params[3], grammar=PERSON)
    mixed = make(**spec).generate(prompts, params)
    assert mixed[3].token_ids != free[3].token_ids
    for place in (0, 1, 2, 4, 5, 6, 7):
        assert mixed[place].token_ids == free[place].token_ids


def test_retracted_requests_go_on_where_they_were() -> None:
    expected = outcomes(generate(make(**MTP), GRAMMARS * 2))
    llm = make(**MTP, chunked_prefill_size=16)
    scheduler, calls = llm.engine.scheduler, []
    schedule = scheduler.schedule

    def retracting() -> StepPlan | None:
        calls.append(None)
        if len(calls) % 5 == 0 and scheduler.num_running > 1:
            scheduler._retract(list(scheduler._running)[-1])
        return schedule()

    scheduler.schedule = retracting  # type: ignore[method-assign]
    assert outcomes(generate(llm, GRAMMARS * 2)) == expected
    assert scheduler.cache_counters.num_retractions > 5


def test_only_steps_with_constrained_rows_wait_for_the_one_before() -> None:
    llm = make(**MTP)
    engine, scheduler = llm.engine, llm.engine.scheduler

    def unread_after_steps(params: SamplingParams) -> list[int]:
        engine.submit("r", [3, 4, 5], params)
        found = []
        while engine.has_work:
            engine.step()
            found.append(len(scheduler._unread))
        return found

    free = unread_after_steps(replace(DRAWN, max_tokens=20))
    assert set(free[:-1]) == {1}
    constrained = unread_after_steps(replace(DRAWN, grammar=PERSON, seed=1))
    assert len(constrained) > 6
    assert constrained == [1, 0] * (len(constrained) // 2)


def test_a_constrained_row_is_in_every_step_of_its_batch() -> None:
    engine = make(**MTP).engine
    launch, rows = engine._loop._run, []

    def recorded(plan: StepPlan) -> Any:
        rows.append([row.request.is_constrained for row in plan.decode])
        return launch(plan)

    engine._loop._run = recorded  # type: ignore[assignment]
    engine.submit("free", [3, 4, 5], replace(DRAWN, max_tokens=60, ignore_eos=True))
    engine.submit("held", [3, 4, 6], replace(DRAWN, grammar=PERSON, seed=1))
    while engine.has_work:
        engine.step()
    steps = [any(step) for step in rows]
    first, count = steps.index(True), sum(steps)
    assert count > 3
    assert all(steps[first : first + count])


def test_samples_of_one_prompt_each_follow_the_grammar() -> None:
    params = replace(DRAWN, n=4, seed=3, temperature=2.0, grammar=Grammar.regex("[a-d]{2,8}"))
    (first, again) = (make(**MTP).generate([5, 6], params) for _ in range(2))
    texts = [completion.text for completion in first.completions]
    assert texts == [completion.text for completion in again.completions]
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[a-d]{2,8}", text) for text in texts)


def test_a_text_may_go_on_past_its_end_with_end_tokens_alone() -> None:
    params = replace(DRAWN, grammar=Grammar.choice(["no"]), ignore_eos=True, max_tokens=9, seed=1)
    llm = make(**MTP)
    result = llm.generate([5, 6], params)
    assert (result.finish_reason, result.text) == (FinishReason.LENGTH, "no")
    assert set(result.token_ids[2:]) <= set(llm.engine.limits.eos_ids)


def test_processes_share_masks() -> None:
    llm = make(**MTP, tp=2)
    try:
        found = outcomes(generate(llm, GRAMMARS[:2]))
    finally:
        llm.close()
    assert found == outcomes(generate(make(**OFF), GRAMMARS[:2]))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_checkpoint())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def begin(compiler: GrammarCompiler, grammar: Grammar, stop_ids: tuple[int, ...]) -> MatcherState:
    """Begin a text."""
    return compiler.start(grammar).state(stop_ids)


def empty_masks(tokenizer: Tokenizer, count: int) -> np.ndarray:
    """Return masks that allow everything."""
    return np.full((count, -(-tokenizer.vocab_size // 32)), -1, np.int32)


def test_masks_of_a_window_are_those_of_each_state(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    eos = tokenizer.eos_id
    grammar = Grammar.regex(r"(ab|ba){2,6}[0-9]{1,4}\.")
    text = [*tokenizer.encode("abbaab12.", add_special_tokens=False), eos]
    state = begin(compiler, grammar, (eos,))
    for start in range(len(text)):
        for width in range(len(text) - start):
            masks = empty_masks(tokenizer, width + 1)
            state.fill(text[:start], text[start : start + width], masks)
            for index in range(width + 1):
                own = empty_masks(tokenizer, 1)
                begin(compiler, grammar, (eos,)).fill(text[: start + index], (), own)
                assert np.array_equal(masks[index], own[0]), (start, width, index)


def test_masks_of_a_tree_are_those_of_each_path(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    eos = tokenizer.eos_id
    grammar = Grammar.regex(r"(ab|ba){2,3}[0-9]{1,4}\.")
    alphabet = [*tokenizer.encode("ab7.", add_special_tokens=False), eos]
    text = tokenizer.encode("abba", add_special_tokens=False)
    rng = random.Random(8)
    num_refused = 0
    state = begin(compiler, grammar, (eos,))
    for start in range(len(text)):
        for _ in range(6):
            drafts = [rng.choice(alphabet) for _ in range(9)]
            parents = [rng.randrange(place) for place in range(1, 10)]
            masks = empty_masks(tokenizer, 10)
            state.fill(text[:start], drafts, masks, parents)
            for node in range(10):
                path, above = [], node
                while above:
                    path.insert(0, drafts[above - 1])
                    above = parents[above - 1]
                # alone, a path is a chain; its last mask is left where the grammar refuses it
                own = empty_masks(tokenizer, 1 + len(path))
                begin(compiler, grammar, (eos,)).fill(text[:start], path, own)
                assert np.array_equal(masks[node], own[-1]), (start, drafts, parents, node)
                num_refused += bool((own[-1] == -1).all())
    assert 0 < num_refused < 6 * 9 * len(text)


def test_a_refused_draft_leaves_the_rest_of_the_window(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    grammar = Grammar.choice(["abc"])
    a, z, b = (tokenizer.encode(c, add_special_tokens=False)[0] for c in "azb")
    state = begin(compiler, grammar, (tokenizer.eos_id,))
    masks = empty_masks(tokenizer, 4)
    state.fill((), (a, z, b), masks)
    assert (masks[2:] == -1).all()
    assert not masks[1, z // 32] >> (z % 32) & 1
    after, own = empty_masks(tokenizer, 1), empty_masks(tokenizer, 1)
    state.fill((a,), (), after)
    begin(compiler, grammar, (tokenizer.eos_id,)).fill((a,), (), own)
    assert np.array_equal(after, own)


def test_tokens_that_stop_stand_at_the_end_only(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    (b,) = tokenizer.encode("b", add_special_tokens=False)
    state = begin(compiler, Grammar.regex("a[bc]{2,3}"), (b,))
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    (c,) = tokenizer.encode("c", add_special_tokens=False)
    for text, is_allowed in (((), False), ((a,), False), ((a, c), False), ((a, c, c), True)):
        masks = empty_masks(tokenizer, 1)
        state.fill(text, (), masks)
        assert bool(masks[0, b // 32] >> (b % 32) & 1) is is_allowed
        assert not masks[0, tokenizer.eos_id // 32] >> (tokenizer.eos_id % 32) & 1


def test_a_text_that_cannot_go_on_may_stop(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    (a,), (b,) = (tokenizer.encode(c, add_special_tokens=False) for c in "ab")
    state = begin(compiler, Grammar.choice(["ab"]), (b,))
    for output in ((a,), (a, b)):
        masks = empty_masks(tokenizer, 1)
        state.fill(output, (), masks)
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        assert b in np.nonzero(bits)[0]


WRONG = [
    (Grammar.regex("(a"), "the regex does not compile: .*parenthesis"),
    (Grammar.regex("(?=a)b"), "the regex does not compile: .*Lookahead"),
    (Grammar.json_schema("{"), "no JSON"),
    (Grammar.json_schema("[]"), "want an object"),
    (Grammar.json_schema({"type": "frob"}), 'does not compile: .*"frob"'),
    (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 1}), "Invalid range"),
    (Grammar.json_schema({"$ref": "#/$defs/x"}), "does not compile"),
    (Grammar.json_schema({"$ref": "http://a/b"}), "# refers to 'http://a/b'"),
    (Grammar.json_schema({"properties": {"a": {"not": {}}}}), "#/properties/a has 'not'"),
    (Grammar.json_schema({"items": {"multipleOf": 2}}), "#/items has 'multipleOf'"),
    (Grammar.json_schema({"type": "object", "anyOf": [{}]}), "has 'anyOf' beside"),
    (Grammar.json_schema({"allOf": [{}, {}]}), "merge them"),
    (Grammar.json_schema({"type": "string", "format": "zork"}), "the format 'zork'"),
    (Grammar.json_schema({"type": "string", "pattern": "a", "minLength": 3}), "a pattern beside"),
    (Grammar.json_schema({"items": [3]}), r"#/items is \[3\]"),
]


@pytest.mark.parametrize(("grammar", "reason"), WRONG)
def test_grammars_that_do_not_compile_say_why(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        compiler.start(grammar).state((1,))


def test_deep_schemas_are_refused(compiler: GrammarCompiler) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="nests deeper"):
        compiler.start(Grammar.json_schema(deep)).state((1,))


def test_compiling_has_its_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.05)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    with compiler._places, compiler._places:
        started = time.monotonic()
        compilation = compiler.start(Grammar.json_object())
        assert not compilation.is_settled
        with pytest.raises(InvalidRequest, match=r"within 0 s|take too long"):
            compilation.state((1,))
        assert time.monotonic() - started < 5
        assert compilation._is_done.wait(5)
    monkeypatch.undo()
    # there was no fault in the grammar
    compiler.start(Grammar.json_object()).state((1,))


def test_a_grammar_compiles_once(compiler: GrammarCompiler) -> None:
    assert compiler.start(PERSON) is compiler.start(replace(PERSON))
    assert compiler.start(PERSON) is not compiler.start(Grammar.json_object())


def test_parameters_that_contradict_a_grammar() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens=3 with a grammar"):
        replace(DRAWN, grammar=PERSON, min_tokens=3)
    with pytest.raises(InvalidRequest, match="want at most 131072"):
        Grammar.regex("a" * 200_000)
    for texts in ([], ["a", ""]):
        with pytest.raises(InvalidRequest, match="at least one text"):
            Grammar.choice(texts)
    with pytest.raises(InvalidRequest, match="does not compile"):
        make().generate([5], replace(DRAWN, grammar=Grammar.regex("(")))
