"""Philox against published vectors, noise and sampling against their exact distributions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gapless.ops.sampling import (
    EditRows,
    SamplingColumns,
    SamplingMode,
    SamplingRows,
    edit_logits,
    edit_windows,
    gumbel_noise,
    packed_logprobs,
    sample,
)
from gapless.ops.sampling.philox import philox

ONES = 0xFFFFFFFF
NUM_STOP_IDS = 8


def make_rows(num_rows: int, **values: Any) -> SamplingRows:
    """Return rows without filters at temperature 1, with seeds of their own; values broadcast."""
    columns = SamplingColumns(
        temperature=torch.ones(num_rows),
        top_k=torch.zeros(num_rows, dtype=torch.int64),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        seeds=torch.arange(num_rows) * 0x9E3779B97F4A7C1 - 12345,
        min_len=torch.zeros(num_rows, dtype=torch.int64),
        stop_ids=torch.full((num_rows, NUM_STOP_IDS), -1),
    )
    for name, value in values.items():
        column = getattr(columns, name)
        column.copy_(torch.as_tensor(value, dtype=column.dtype).expand_as(column))
    return SamplingRows(columns, torch.arange(num_rows))


def take(rows: SamplingRows, index: list[int]) -> SamplingRows:
    """Return some of the rows."""
    return replace(rows, slots=rows.slots[index])


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    words = philox((c0, c1, c2, c3), (k0, k1))
    assert tuple(int(word) for word in words) == wanted


def test_noise_is_a_function_of_seed_position_and_id() -> None:
    seeds, positions = torch.tensor([5, -(2**62), 5, 5 + (1 << 32)]), torch.tensor([9, 9, 10, 9])
    noise = gumbel_noise(seeds, positions, 11)
    assert noise.dtype is torch.float32
    assert noise.shape == (4, 11)
    assert torch.isfinite(noise).all()
    # a longer vocabulary and another batch leave every value where it is
    assert torch.equal(gumbel_noise(seeds[[1]], positions[[1]], 31)[:, :11], noise[1:2])
    assert len(noise.flatten().unique()) == noise.numel()


def test_noise_takes_word_and_counter_of_its_id() -> None:
    seed, position = 0x0123456789ABCDEF, 77
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 10)[0]
    for token_id in (0, 3, 4, 9):
        counter = [torch.tensor([x]) for x in (token_id // 4, position, 0, 0)]
        key = torch.tensor([seed & ONES]), torch.tensor([seed >> 32])
        word = int(philox((counter[0], counter[1], counter[2], counter[3]), key)[token_id % 4])
        wanted = -np.log(-np.log1p(-(word + 0.5) * 2.0**-32))
        np.testing.assert_allclose(float(noise[token_id]), wanted, rtol=1e-5)


def test_noise_has_the_gumbel_distribution() -> None:
    noise = (
        gumbel_noise(torch.arange(200), torch.arange(200), 1000).double().flatten().sort().values
    )
    empirical = (torch.arange(len(noise)) + 0.5) / len(noise)
    distance = (torch.exp(-torch.exp(-noise)) - empirical).abs().max()
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand
    assert distance < 1.95 / len(noise) ** 0.5


def exact(logits: np.ndarray, **options: float) -> np.ndarray:
    """Filter and normalise one row plainly: sort, cut, extend to ties."""
    z = logits / options.get("temperature", 1.0)
    top_k = int(options.get("top_k", 0))
    if 0 < top_k < len(z):
        z = np.where(z >= np.sort(z)[-top_k], z, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    total, least = 0.0, 0.0
    for share in np.sort(p)[::-1]:
        least = share
        total += share
        if total >= options.get("top_p", 1.0):
            break
    p = np.where(p >= max(least, options.get("min_p", 0.0) * p.max()), p, 0)
    kept: np.ndarray = p / p.sum()
    return kept


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_samples_have_the_exact_distribution(options: dict[str, float]) -> None:
    num_draws = 20_000
    logits = torch.tensor([0.3, 1.0, -1.0, 1.0, 0.2, -0.4, 2.0, 0.9, -2.0])
    wanted = exact(logits.double().numpy(), **options)
    rows = make_rows(num_draws, **options)
    ids = sample(
        logits.expand(num_draws, -1), torch.arange(num_draws) % 50, rows, mode=SamplingMode.SAMPLED
    )
    counts = np.bincount(ids.numpy(), minlength=len(wanted))
    kept = wanted > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - num_draws * wanted)[kept] ** 2 / (num_draws * wanted[kept])).sum()
    # eight degrees of freedom or fewer: 26.1 is exceeded once in a thousand
    assert chi_square < 26.1


@pytest.mark.parametrize("options", FILTERS[2:], ids=str)
def test_filters_keep_what_the_naive_ones_keep(options: dict[str, float]) -> None:
    # values on a coarse grid: many ties, at thresholds too
    logits = (torch.randn(40, 23, dtype=torch.float64) * 4).round() / 2
    seen = torch.zeros(40, 23, dtype=torch.bool)
    rows = make_rows(40, **options)
    # a token with a share of 0.05 stays away from 250 draws three times in a million
    for position in range(250):
        ids = sample(logits, torch.full((40,), position), rows, mode=SamplingMode.SAMPLED)
        seen[torch.arange(40), ids] = True
    for row in range(40):
        wanted = exact(logits[row].numpy(), **options)
        assert not seen[row][torch.from_numpy(wanted == 0)].any()
        assert seen[row][torch.from_numpy(wanted > 0.05)].all()


def test_ties_at_a_threshold_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]).expand(300, -1)
    for options in ({"top_k": 2.0}, {"top_p": 0.4}, {"min_p": 1.0}):
        ids = sample(
            logits, torch.arange(300), make_rows(300, **options), mode=SamplingMode.SAMPLED
        )
        assert set(ids.tolist()) == {1, 2, 4}


def test_row_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, 101)
    positions = torch.arange(6) + 30
    rows = make_rows(
        6,
        temperature=[1.0, 0.0, 0.7, 2.0, 1.0, 0.0],
        top_k=20,
        top_p=0.9,
        min_p=[0.0, 0.1, 0.0, 0.2, 0.05, 0.0],
    )
    together = sample(logits, positions, rows, mode=SamplingMode.SAMPLED)
    for index in ([0], [4, 2], [5, 4, 3, 2, 1, 0]):
        part = sample(logits[index], positions[index], take(rows, index), mode=SamplingMode.SAMPLED)
        assert torch.equal(part, together[index])
    poisoned = logits.clone()
    poisoned[3] = float("nan")
    kept = [0, 1, 2, 4, 5]
    after = sample(poisoned, positions, rows, mode=SamplingMode.SAMPLED)
    assert torch.equal(after[kept], together[kept])


@pytest.mark.parametrize("mode", list(SamplingMode))
@pytest.mark.parametrize("vocab_size", [7, 5001])
def test_greedy_ties_go_to_the_lowest_id(vocab_size: int, mode: SamplingMode) -> None:
    logits = torch.randn(30, vocab_size)
    ties = torch.stack([torch.randperm(vocab_size)[:3] for _ in range(30)])
    logits.scatter_(1, ties, 9.0)
    rows = make_rows(30, temperature=0.0)
    ids = sample(logits, torch.arange(30), rows, mode=mode)
    assert torch.equal(ids, ties.min(1).values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_masked_below_the_minimum_length(temperature: float) -> None:
    logits = torch.tensor([[0.0, 50.0, 1.0, 40.0, 20.0]]).expand(3, -1)
    rows = make_rows(3, temperature=temperature, min_len=10, stop_ids=[1, 3] + [-1] * 6)
    ids = sample(
        logits,
        torch.tensor([9, 10, 3]),
        rows,
        mode=SamplingMode.GREEDY if temperature == 0 else SamplingMode.SAMPLED,
    )
    assert ids.tolist() == [4, 1, 4]


def test_unused_stop_ids_touch_no_logit() -> None:
    # the last id is what -1 would hit, the first what a clamped -1 would
    logits = torch.tensor([[0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
    before = logits.clone()
    rows = make_rows(2, temperature=0.0, min_len=100)
    assert sample(logits, torch.tensor([1, 1]), rows, mode=SamplingMode.GREEDY).tolist() == [2, 0]
    assert torch.equal(logits, before)


def test_modes_leave_out_what_no_row_needs() -> None:
    logits = torch.randn(20, 31)
    rows = make_rows(20, top_k=4, top_p=0.9)
    drawn = sample(logits, torch.arange(20), rows, mode=SamplingMode.DRAWN)
    assert torch.equal(drawn, sample(logits, torch.arange(20), rows, mode=SamplingMode.SAMPLED))
    rows = make_rows(20, temperature=1.3)
    plain, drawn = (
        sample(logits, torch.arange(20), rows, mode=mode)
        for mode in (SamplingMode.PLAIN, SamplingMode.DRAWN)
    )
    assert torch.equal(plain, drawn)


def no_edits(num_rows: int, vocab_size: int) -> EditRows:
    """Return rows without bias, penalties and history."""
    return EditRows(
        repetition=torch.ones(num_rows),
        frequency=torch.zeros(num_rows),
        presence=torch.zeros(num_rows),
        bias_ids=torch.full((num_rows, 64), -1),
        bias=torch.zeros(num_rows, 64),
        in_prompt=torch.zeros(num_rows, vocab_size, dtype=torch.bool),
        output_counts=torch.zeros(num_rows, vocab_size, dtype=torch.int32),
    )


def random_edits(num_rows: int, vocab_size: int, generator: torch.Generator) -> EditRows:
    """Return rows with penalties, bias and histories, some of them without."""

    def one_of(*values: float) -> torch.Tensor:
        index = torch.randint(len(values), (num_rows,), generator=generator)
        return torch.tensor(values)[index]

    bias_ids = torch.full((num_rows, 64), -1)
    for row in range(num_rows):
        count = int(torch.randint(7, (1,), generator=generator))
        bias_ids[row, :count] = torch.randperm(vocab_size, generator=generator)[:count]
    counts = torch.randint(4, (num_rows, vocab_size), generator=generator) - 1
    return EditRows(
        repetition=one_of(1.0, 1.0, 1.3, 0.4),
        frequency=one_of(0.0, 0.7, -1.1, 2.0),
        presence=one_of(0.0, 0.6, -2.0),
        bias_ids=bias_ids,
        bias=torch.randn(num_rows, 64, generator=generator) * 5,
        in_prompt=torch.rand(num_rows, vocab_size, generator=generator) < 0.3,
        output_counts=counts.clamp(min=0).to(torch.int32),
    )


def naive_edits(logits: np.ndarray, rows: EditRows, row: int, drafts: list[int]) -> np.ndarray:
    """Edit one row token by token."""
    edited = logits.astype(np.float64).copy()
    for token, value in zip(rows.bias_ids[row].tolist(), rows.bias[row].tolist(), strict=True):
        if token >= 0:
            edited[token] += value
    for token in range(len(edited)):
        count = int(rows.output_counts[row, token]) + drafts.count(token)
        if count or rows.in_prompt[row, token]:
            factor = float(rows.repetition[row])
            edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
        edited[token] -= float(rows.frequency[row]) * count
        edited[token] -= float(rows.presence[row]) * (count > 0)
    return edited


@pytest.mark.parametrize("vocab_size", [11, 37])
def test_edits_are_those_of_a_plain_loop(vocab_size: int) -> None:
    rows = random_edits(30, vocab_size, torch.Generator().manual_seed(vocab_size))
    logits = torch.randn(30, vocab_size, dtype=torch.float64) * 3
    before = logits.clone()
    edited = edit_logits(logits, rows)
    for row in range(30):
        wanted = naive_edits(logits[row].numpy(), rows, row, [])
        np.testing.assert_allclose(edited[row].numpy(), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(logits, before)


def test_windows_count_the_drafts_before_each_position() -> None:
    rows = random_edits(25, 13, torch.Generator().manual_seed(1))
    logits = torch.randn(25, 5, 13, dtype=torch.float64) * 3
    # few ids, so that drafts repeat themselves, the output and the prompt
    window = torch.randint(4, (25, 5))
    counts = rows.output_counts.clone()
    edited = edit_windows(logits, window, rows)
    assert torch.equal(rows.output_counts, counts)
    for row in range(25):
        for position in range(5):
            drafts = window[row, 1 : position + 1].tolist()
            wanted = naive_edits(logits[row, position].numpy(), rows, row, drafts)
            np.testing.assert_allclose(
                edited[row, position].numpy(), wanted, rtol=1e-12, atol=1e-12
            )


def test_rows_without_edits_keep_their_values_beside_others() -> None:
    rows = random_edits(3, 19, torch.Generator().manual_seed(2))
    for name in ("repetition", "frequency", "presence", "bias_ids"):
        getattr(rows, name)[1] = getattr(no_edits(3, 19), name)[1]
    logits = torch.randn(3, 19)
    assert torch.equal(edit_logits(logits, rows)[1], logits[1])
    poisoned = logits.clone()
    poisoned[0] = float("nan")
    assert torch.equal(edit_logits(poisoned, rows)[1:], edit_logits(logits, rows)[1:])


def naive_choice(logits: np.ndarray, noise: np.ndarray, stops: list[int], **options: float) -> int:
    """Go plainly through what is behind the edits: stop ids, temperature, filters, noise."""
    masked = logits.copy()
    masked[stops] = -np.inf
    if options["temperature"] == 0:
        return int(masked.argmax())
    kept = exact(masked, **options) > 0
    perturbed = masked / np.float64(np.float32(options["temperature"])) + noise
    return int(np.where(kept, perturbed, -np.inf).argmax())


CHAINS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 5},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.75, "min_p": 0.0625},
]


@pytest.mark.parametrize("options", CHAINS, ids=str)
def test_order_of_the_whole_chain(options: dict[str, float]) -> None:
    num_rows, vocab_size = 300, 17
    edits = random_edits(num_rows, vocab_size, torch.Generator().manual_seed(3))
    logits = torch.randn(num_rows, vocab_size, dtype=torch.float64) * 4
    positions = torch.arange(num_rows)
    rows = make_rows(num_rows, min_len=200, stop_ids=[4, 9] + [-1] * 6, **options)
    mode = SamplingMode.GREEDY if options["temperature"] == 0 else SamplingMode.SAMPLED
    found = sample(edit_logits(logits, edits), positions, rows, mode=mode)
    noise = gumbel_noise(rows.columns.seeds, positions, vocab_size).double().numpy()
    for row in range(num_rows):
        edited = naive_edits(logits[row].numpy(), edits, row, [])
        stops = [4, 9] if row < 200 else []
        assert int(found[row]) == naive_choice(edited, noise[row], stops, **options), row


def test_order_shows_in_the_choice() -> None:
    """Cases in which one step put before its neighbour would choose otherwise."""

    def changed(**values: Any) -> EditRows:
        return replace(
            no_edits(1, 3), **{name: torch.tensor(value) for name, value in values.items()}
        )

    # bias, then repetition: -1 + 4 = 3, halved; repetition first gives -2 + 4
    biased = changed(
        bias_ids=[[1] + [-1] * 63], bias=[[4.0] + [0.0] * 63], repetition=[2.0],
        in_prompt=[[False, True, False]],
    )  # fmt: skip
    assert edit_logits(torch.tensor([[0.0, -1.0, 0.0]]), biased).tolist() == [[0.0, 1.5, 0.0]]
    # repetition, then frequency: 4 / 2 - 3; frequency first gives (4 - 3) / 2
    counted = changed(
        repetition=[2.0], frequency=[1.0],
        output_counts=np.array([[0, 3, 0]], np.int32),
    )  # fmt: skip
    assert edit_logits(torch.tensor([[0.0, 4.0, 0.0]]), counted).tolist() == [[0.0, -1.0, 0.0]]


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab_size", [20, 33, 1000])
def test_logprobs_and_ties_of_the_most_likely(num_top: int, vocab_size: int) -> None:
    # a coarse grid: ties everywhere, at the last place too
    logits = (torch.randn(40, vocab_size, dtype=torch.float64) * 1.5).round()
    logits[0] = 2.0
    logits[1, 3:] = float("-inf")
    tokens = torch.randint(vocab_size, (40,))
    tokens[1] = 0
    packed = packed_logprobs(logits, tokens, num_top)
    assert packed.dtype is torch.float64
    assert packed.shape == (40, 1 + 2 * num_top)
    z = logits.numpy()
    wanted = z - np.log(np.exp(z).sum(1, keepdims=True))
    np.testing.assert_allclose(packed[:, 0].numpy(), wanted[np.arange(40), tokens], atol=1e-12)
    order = np.argsort(-z, axis=1, kind="stable")[:, :num_top]
    assert np.array_equal(packed[:, 1 : 1 + num_top].numpy(), order)
    top = np.take_along_axis(wanted, order, axis=1)
    np.testing.assert_allclose(packed[:, 1 + num_top :].numpy(), top, atol=1e-12)
