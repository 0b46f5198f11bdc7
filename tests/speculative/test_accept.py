"""Acceptance against a loop over the window, and the distribution of what is emitted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gapless.ops.acceptance import accept_chain
from gapless.ops.sampling import SamplingColumns, SamplingMode, SamplingRows, sample

tokens = st.integers(0, 3)
rows = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.tuples(
            st.lists(tokens, min_size=width, max_size=width),  # sampled
            st.lists(tokens, min_size=width, max_size=width),  # window
            st.integers(1, 9),  # tokens before the step
            st.integers(1, 6),  # tokens left
            st.lists(tokens, max_size=2),  # stop ids
            st.integers(0, 5),  # proposals
        ),
        min_size=1,
        max_size=4,
    )
)


def _loop(
    sampled: list[int], window: list[int], total: int, left: int, stop: list[int], proposed: int
) -> tuple[list[int], bool]:
    emitted: list[int] = []
    for i, token in enumerate(sampled):
        emitted.append(token)
        if token in stop or len(emitted) >= left:
            return emitted, True
        if i + 1 >= len(window) or i >= proposed or window[i + 1] != token:
            break
    return emitted, False


@given(rows)
def test_acceptance_equals_a_loop(
    batch: list[tuple[list[int], list[int], int, int, list[int], int]],
) -> None:
    sampled, window, total, left, stop, proposed = zip(*batch, strict=True)
    padded = [[*ids, *[-1] * (2 - len(ids))] for ids in stop]
    outcome = accept_chain(
        torch.tensor(sampled),
        torch.tensor(window),
        torch.tensor(total),
        torch.tensor(total) + torch.tensor(left),
        torch.tensor(padded),
        torch.tensor(proposed),
    )
    for i, row in enumerate(batch):
        emitted, ends = _loop(*row)
        assert outcome.lens[i] == len(emitted)
        assert outcome.newest[i] == emitted[-1]
        assert outcome.ends[i] == ends


def test_forced_acceptance_ignores_the_drafts() -> None:
    sampled, window = torch.tensor([[1, 2, 3, 4]] * 3), torch.zeros(3, 4, dtype=torch.int64)
    outcome = accept_chain(
        sampled, window, torch.tensor([5] * 3), torch.tensor([99] * 3),
        torch.full((3, 2), -1), torch.tensor([3, 3, 3]), torch.tensor([0, 2, 3]),
    )  # fmt: skip
    assert outcome.lens.tolist() == [1, 3, 4]


def _assert_fits(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square within five standard deviations of its mean."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), f"{statistic:.1f} for {freedom}"


VOCAB = 6
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.3
DRAFT = TARGET + 0.8 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))


def _rows(seeds: Tensor) -> SamplingRows:
    count = seeds.shape[0]
    columns = SamplingColumns(
        temperature=torch.full((count,), 0.9), top_k=torch.full((count,), 5),
        top_p=torch.full((count,), 0.95), min_p=torch.zeros(count), seeds=seeds,
        min_len=torch.zeros(count, dtype=torch.int64),
        stop_ids=torch.full((count, 8), -1),
    )  # fmt: skip
    return SamplingRows(columns, torch.arange(count))


def _probabilities(logits: Tensor) -> np.ndarray:
    z = logits.double().numpy() / 0.9
    z = np.where(z >= np.sort(z)[-5], z, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.zeros(VOCAB, bool)
    kept[order[np.cumsum(p[order]) - p[order] < 0.95]] = True
    p = np.where(kept, p, 0)
    return p / p.sum()


def _generate(num_rows: int, num_tokens: int, num_drafts: int) -> tuple[np.ndarray, float]:
    """Run an order-1 Markov model with drafts; [rows, num_tokens] and the share accepted."""
    seeds = torch.arange(num_rows) * 7919 + 12345
    params = _rows(seeds)
    out = torch.zeros(num_rows, num_tokens + num_drafts + 2, dtype=torch.int64)
    lens = torch.ones(num_rows, dtype=torch.int64)
    accepted, proposed = 0, 0
    while int(lens.min()) <= num_tokens:
        window = [out.gather(1, (lens - 1).clamp(max=num_tokens)[:, None])[:, 0]]
        for depth in range(num_drafts):
            window.append(
                sample(DRAFT[window[-1]], lens + depth, params, mode=SamplingMode.SAMPLED)
            )
        tokens = torch.stack(window, 1)
        target = torch.stack(
            [
                sample(TARGET[tokens[:, i]], lens + i, params, mode=SamplingMode.SAMPLED)
                for i in range(num_drafts + 1)
            ],
            1,
        )
        limit = torch.full_like(lens, 10**6)
        outcome = accept_chain(
            target, tokens, lens, limit, torch.full((num_rows, 1), -1),
            torch.full_like(lens, num_drafts),
        )  # fmt: skip
        running = lens <= num_tokens
        accepted += int((outcome.lens - 1)[running].sum())
        proposed += int(running.sum()) * num_drafts
        for i in range(num_drafts + 1):
            write = running & (i < outcome.lens) & (lens + i < out.shape[1])
            out[write, (lens + i)[write]] = target[write, i]
        lens = torch.where(running, lens + outcome.lens, lens)
    return out[:, 1 : num_tokens + 1].numpy(), accepted / max(proposed, 1)


def test_emitted_distribution_is_the_target_s() -> None:
    found, share = _generate(20_000, 3, 3)
    assert 0.3 < share < 0.98
    table = np.array([_probabilities(TARGET[i]) for i in range(VOCAB)])
    for place, expected in enumerate((table[0], table[0] @ table, table[0] @ table @ table)):
        counts = np.bincount(found[:, place], minlength=VOCAB)
        support = expected > 0
        assert counts[~support].sum() == 0
        _assert_fits(counts[support], expected[support] * len(found))
    # consecutive tokens follow the chain: no memory of accepted or rejected drafts
    joint = np.zeros((VOCAB, VOCAB))
    np.add.at(joint, (found[:, 0], found[:, 1]), 1)
    expected = table[0][:, None] * table * len(found)
    support = expected > 5
    scaled = expected[support] * joint[support].sum() / expected[support].sum()
    _assert_fits(joint[support], scaled)


def test_same_tokens_with_and_without_drafts() -> None:
    with_drafts, _ = _generate(500, 12, 3)
    without, _ = _generate(500, 12, 0)
    assert (with_drafts == without).all()


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_positions_and_samples_are_independent(num_drafts: int) -> None:
    found, _ = _generate(20_000, 3, num_drafts)
    # rows differ by seed only: neighbours must not agree more often than chance
    chance = float((_probabilities(TARGET[0]) ** 2).sum())
    agree = (found[1:, 0] == found[:-1, 0]).mean()
    assert abs(agree - chance) < 4 * np.sqrt(chance * (1 - chance) / len(found))
