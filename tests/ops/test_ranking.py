"""What drafts in trees need of sampling: edits along paths, and the likeliest tokens."""

from __future__ import annotations

import pytest
import torch

from gapless.ops.draft_tree import ancestor_bits
from gapless.ops.sampling import (
    EditRows,
    SamplingColumns,
    SamplingMode,
    SamplingRows,
    edit_logits,
    edit_trees,
    gumbel_noise,
    rank_tokens,
    sample,
)
from tests.ops.trees import ancestry, random_parents


@pytest.mark.parametrize("width", [1, 2, 7])
def test_edits_of_a_tree_count_each_path(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows, vocab = 3, 11
    parents = random_parents(rows, width, generator)
    window = torch.randint(vocab, (rows, width), generator=generator)
    logits = torch.randn(rows, width, vocab, generator=generator, dtype=torch.float64)
    edits = EditRows(
        repetition=torch.tensor([1.0, 1.3, 0.8]),
        frequency=torch.tensor([0.5, 0.0, -0.7]),
        presence=torch.tensor([0.0, 0.3, 0.2]),
        bias_ids=torch.tensor([[3], [-1], [0]]),
        bias=torch.tensor([[2.0], [0.0], [-1.0]]),
        in_prompt=torch.rand(rows, vocab, generator=generator) < 0.3,
        output_counts=torch.randint(3, (rows, vocab), generator=generator, dtype=torch.int32),
    )
    found = edit_trees(logits, window, ancestor_bits(parents), edits)
    for row in range(rows):
        one = EditRows(**{name: part[row : row + 1] for name, part in vars(edits).items()})
        for node in range(width):
            drafts = [window[row, n] for n in ancestry(parents[row].tolist(), node)[:-1]]
            counted = one
            for draft in drafts:
                counted = counted.after(draft.view(1, 1))
            expected = edit_logits(logits[row : row + 1, node], counted)
            assert torch.equal(found[row, node], expected[0])


def test_ranked_tokens_begin_with_the_sampled_one() -> None:
    """Best first; what filters remove above the sampled one is not among them."""
    generator = torch.Generator().manual_seed(3)
    num_rows, vocab = 40, 50
    logits = torch.randn(num_rows, vocab, generator=generator) * 2
    positions = torch.arange(num_rows)
    columns = SamplingColumns(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.4]).repeat(10),
        top_k=torch.tensor([0, 3, 8, 0, 5]).repeat(8),
        top_p=torch.tensor([1.0, 0.6, 0.9, 1.0]).repeat(10),
        min_p=torch.zeros(num_rows),
        seeds=torch.arange(num_rows) * 7919,
        min_len=torch.zeros(num_rows, dtype=torch.int64),
        stop_ids=torch.full((num_rows, 8), -1),
    )
    rows = SamplingRows(columns, torch.arange(num_rows))
    noise = gumbel_noise(columns.seeds, positions, vocab)
    for mode in (SamplingMode.DRAWN, SamplingMode.ARGMAX):
        sampled = sample(logits, positions, rows, mode=mode)
        tokens, logprobs = rank_tokens(logits, positions, rows, mode=mode, count=4)
        assert torch.equal(tokens[:, 0], sampled)
        is_greedy = (columns.temperature == 0) | (mode is SamplingMode.ARGMAX)
        perturbed = torch.where(
            is_greedy[:, None],
            logits,
            logits / columns.temperature.masked_fill(is_greedy, 1.0)[:, None] + noise,
        )
        for row in range(num_rows):
            kept = perturbed[row] <= perturbed[row, sampled[row]]
            left = perturbed[row].masked_fill(~kept, float("-inf"))
            assert tokens[row].tolist() == left.argsort(descending=True)[:4].tolist()
            expected = left.log_softmax(-1)[tokens[row]]
            assert torch.allclose(logprobs[row], expected, atol=1e-6)


def test_ranked_tokens_of_equal_logits_come_lowest_id_first() -> None:
    columns = SamplingColumns(
        temperature=torch.zeros(1), top_k=torch.zeros(1, dtype=torch.int64),
        top_p=torch.ones(1), min_p=torch.zeros(1), seeds=torch.zeros(1, dtype=torch.int64),
        min_len=torch.zeros(1, dtype=torch.int64), stop_ids=torch.full((1, 8), -1),
    )  # fmt: skip
    rows = SamplingRows(columns, torch.zeros(1, dtype=torch.int64))
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    tokens, _ = rank_tokens(
        logits, torch.zeros(1, dtype=torch.int64), rows, mode=SamplingMode.ARGMAX, count=4
    )
    assert tokens.tolist() == [[1, 3, 2, 4]]
