"""Trees of MTP drafts: the beam against plain Python, and what they are worth on real text."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.assets import heldout
from gapless.core.draft_shape import TreeShape
from gapless.ops.draft_tree import ancestor_bits
from gapless.speculative.tree import DraftTree
from tests.engine_fixtures import runner_of

OPTIONS: dict[str, Any] = {"max_running_requests": 3, "max_model_len": 256, "dtype": "float64"}
QUESTIONS = [
    [{"role": "user", "content": text}]
    for text in (
        "Ann has 4 boxes with 6 pens each. How many pens are there?",
        "What is the capital of France?",
        "Tom has 7 pens and buys 8 more. How many pens does he have now?",
    )
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=28),
    SamplingParams(temperature=1.1, top_p=0.95, seed=5, max_tokens=28),
    SamplingParams(
        temperature=0.8, top_k=30, seed=6, max_tokens=28, repetition_penalty=1.2,
        frequency_penalty=0.3,
    ),
]  # fmt: skip


class Drawn:
    """Scores of what follows a draft: few values, so that many are equal."""

    def __init__(self, shape: TreeShape, num_rows: int, seed: int) -> None:
        self._shape, self._num_rows = shape, num_rows
        self._generator = torch.Generator().manual_seed(seed)

    def next(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (self._num_rows, width, self._shape.topk)
        tokens = torch.randint(1000, size, generator=self._generator)
        scores = -torch.randint(1, 4, size, generator=self._generator).double()
        return tokens, scores.sort(dim=2, descending=True).values


@pytest.mark.parametrize("num_nodes", [6, 9, 14])
@pytest.mark.parametrize(
    "shape", [TreeShape(1, 13), TreeShape(2, 4), TreeShape(4, 2), TreeShape(5, 3)]
)
def test_a_tree_is_the_best_candidates(shape: TreeShape, num_nodes: int) -> None:
    num_rows = 3
    drawn = Drawn(shape, num_rows, num_nodes)
    tree = DraftTree(shape, num_rows, torch.device("cpu"))
    # of each row: token, score, parent, by number; and the beam
    rows: list[list[tuple[int, float, int]]] = [[] for _ in range(num_rows)]
    beams = [[-1] for _ in range(num_rows)]
    storage: list[dict[int, int]] = [{} for _ in range(num_rows)]
    for depth in range(shape.num_steps):
        tokens, scores = drawn.next(len(beams[0]))
        tree.grow(tokens, scores)
        for row, (candidates, beam) in enumerate(zip(rows, beams, strict=True)):
            first = len(candidates)
            for place, parent in enumerate(beam):
                above = candidates[parent][1] if parent >= 0 else 0.0
                candidates += [
                    (int(token), above + float(score), parent)
                    for token, score in zip(tokens[row, place], scores[row, place], strict=True)
                ]
            best = sorted(range(first, len(candidates)), key=lambda i: -candidates[i][1])
            beams[row] = best[: shape.topk]
            storage[row] |= {c: depth * shape.topk + j for j, c in enumerate(beams[row])}
            if depth + 1 < shape.num_steps:
                _check_beam(tree, row, candidates, beams[row], storage[row])
    count = min(num_nodes - 1, shape.num_candidates)
    found = tree.best(count)
    assert found.bits is not None
    for row, candidates in enumerate(rows):
        ranked = sorted(range(len(candidates)), key=lambda i: -candidates[i][1])
        chosen = sorted(ranked[:count])
        assert found.tokens[row].tolist() == [candidates[i][0] for i in chosen]
        node = {-1: 0} | {c: 1 + i for i, c in enumerate(chosen)}
        parents = [0, *(node[candidates[i][2]] for i in chosen)]
        assert torch.equal(found.bits[row], ancestor_bits(torch.tensor([parents]))[0])
    assert found.counts is None, "all of them are proposals"


def _check_beam(
    tree: DraftTree,
    row: int,
    candidates: list[tuple[int, float, int]],
    beam: list[int],
    storage: dict[int, int],
) -> None:
    for place, candidate in enumerate(beam):
        path, above = [], candidate
        while above >= 0:
            path.append(above)
            above = candidates[above][2]
        assert int(tree.beam.tokens[row, place]) == candidates[candidate][0]
        assert int(tree.beam.storage[place]) == storage[candidate]
        assert int(tree.beam.bits[row, place]) == sum(1 << storage[c] for c in path)
        tokens = [candidates[c][0] for c in reversed(path)]
        assert tree.beam.paths[row, place].tolist() == tokens


def _run(**options: Any) -> tuple[list[tuple[int, ...]], LLM]:
    llm = LLM(**{**OPTIONS, **options})
    found = [result.token_ids for result in llm.generate(QUESTIONS, PARAMS)]
    llm.engine.scheduler.check_conserved()
    return found, llm


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return _run(speculative_num_steps=0)[0]


@pytest.mark.parametrize("options", [
    {"speculative_topk": 4, "speculative_num_draft_tokens": 16},
    {"speculative_topk": 2, "speculative_num_steps": 6, "page_size": 1},
    {"speculative_topk": 5, "speculative_num_steps": 1, "linear_replayssm_cache_len": 3},
    {"speculative_topk": 3, "speculative_num_draft_tokens": 4, "chunked_prefill_size": 7},
])  # fmt: skip
def test_bundled_model(plain: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    found, llm = _run(**options)
    assert found == plain
    counters = llm.engine.scheduler.counters
    width = llm.engine.config.max_window
    assert counters.num_proposed == counters.num_steps * (width - 1)
    assert counters.accepted_len > 1.5


def test_the_end_of_the_context() -> None:
    """Drafts must not reach past it, nor past what is reserved."""
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    options = {**OPTIONS, "max_model_len": 64, "page_size": 1}
    prompt = list(range(200, 240))
    trees = LLM(speculative_topk=4, speculative_num_draft_tokens=16, **options)
    found = trees.generate(prompt, params).token_ids
    assert len(found) == 24
    assert found == LLM(speculative_num_steps=0, **options).generate(prompt, params).token_ids


def test_draft_kv_of_a_row_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft pass of a row that runs writes to the null page."""
    llm = LLM(**OPTIONS, speculative_topk=4, speculative_num_steps=5, page_size=1)
    drafter: Any = runner_of(llm).device.drafter
    geometry, honest, seen = runner_of(llm).device.geometry, drafter._tree_batch, []

    def watched(frontier: Any, *rest: Any) -> Any:
        batch = honest(frontier, *rest)
        live = frontier.slots != geometry.null_slot
        written = batch.kv_write.view(live.shape[0], -1)[live]
        seen.append(int((written >= geometry.null_page).sum()))
        return batch

    monkeypatch.setattr(drafter, "_tree_batch", watched)
    llm.generate(QUESTIONS, PARAMS)
    assert len(seen) > 20
    assert sum(seen) == 0


@pytest.mark.parametrize("count", [6, pytest.param(35, marks=pytest.mark.slow)])
def test_trees_foretell_more_than_chains(count: int) -> None:
    """Of prose, of which chains foretell little, half of it greedy and half drawn."""
    lines = heldout("text").read_text().splitlines()[:count]
    found = []
    for options in ({}, {"speculative_topk": 4, "speculative_num_draft_tokens": 16}):
        llm = LLM(max_running_requests=16, speculative_num_steps=3, **options)
        prompts = [llm.encode(json.loads(line)["text"])[:64] for line in lines]
        params = [
            SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=40, ignore_eos=True)
            for i in range(count)
        ]
        llm.generate(prompts, params)
        found.append(llm.engine.scheduler.counters.accepted_len)
    chain, tree = found
    assert tree > chain + 0.3, found
