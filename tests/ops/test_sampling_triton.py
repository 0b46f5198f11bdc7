"""The sampling kernels against the definition: noise, greedy ties, filters with ties, mixtures."""

from __future__ import annotations

import os
from dataclasses import fields, replace

import pytest
import torch

from gapless.ops.sampling import SamplingColumns, SamplingMode, SamplingRows, philox, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

SAMPLED, DRAWN = SamplingMode.SAMPLED, SamplingMode.DRAWN


def make_rows(num_rows: int, **values: float | list[float]) -> SamplingRows:
    """Return rows without filters at temperature 1, with seeds of their own."""
    columns = SamplingColumns(
        temperature=torch.ones(num_rows),
        top_k=torch.zeros(num_rows, dtype=torch.int64),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        seeds=torch.arange(num_rows) * 0x9E3779B97F4A7C1 - 12345,
        min_len=torch.zeros(num_rows, dtype=torch.int64),
        stop_ids=torch.full((num_rows, 8), -1),
    )
    for name, value in values.items():
        column = getattr(columns, name)
        new = torch.tensor(value, dtype=column.dtype).expand(num_rows).clone()
        columns = replace(columns, **{name: new})
    columns = SamplingColumns(
        **{f.name: getattr(columns, f.name).to(DEVICE) for f in fields(columns)}
    )
    return SamplingRows(columns, torch.arange(num_rows, device=DEVICE))


def both(
    logits: torch.Tensor,
    rows: SamplingRows,
    *,
    mode: SamplingMode = SAMPLED,
    capacity: int = 8192,
    split: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample with the kernels and with the definition."""
    from gapless.ops.sampling import triton

    positions = torch.arange(len(logits), device=logits.device) + 30
    found = triton.sample(logits, positions, rows, mode=mode, capacity=capacity, split=split)
    return found, reference.sample(logits, positions, rows, mode=mode)


def test_noise_is_the_definitions() -> None:
    from gapless.ops.sampling import triton

    seeds = torch.tensor([5, -(2**62), 5 + (1 << 32), -1], device=DEVICE)
    positions = torch.tensor([9, 0, 2**31 + 5, 131071], device=DEVICE)
    noise = triton.gumbel_noise(seeds, positions, 1501)
    wanted = philox.gumbel_noise(seeds, positions, 1501)
    if DEVICE == "cuda":
        assert torch.equal(noise, wanted)
    # the logarithms of a CPU differ from the interpreter's by a rounding
    torch.testing.assert_close(noise, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", list(SamplingMode))
@pytest.mark.parametrize("vocab_size", [7, 2501])
def test_greedy_ties_go_to_the_lowest_id(vocab_size: int, mode: SamplingMode) -> None:
    wide = torch.randn(9, vocab_size + 3)
    ties = torch.stack([torch.randperm(vocab_size)[:3] for _ in range(9)])
    wide.scatter_(1, ties, 9.0)
    wide[:, vocab_size:] = 99.0
    logits = wide.to(DEVICE)[:, :vocab_size]
    found, wanted = both(logits, make_rows(9, temperature=0.0), mode=mode)
    assert torch.equal(found, wanted)
    assert torch.equal(found.cpu(), ties.min(1).values)


FILTERS: list[dict[str, float | list[float]]] = [
    {},
    {"temperature": 0.5, "min_p": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"top_p": 0.0},
    {"top_k": 400, "top_p": 0.99999},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
]


# with room for all that is kept, and for few of them, which only these fill
ROOMS = [
    *((options, 8192) for options in FILTERS),
    *((options, 16) for options in FILTERS if {"top_k", "top_p"} & options.keys()),
]


@pytest.mark.parametrize("num_pairs", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("options", "capacity"), ROOMS, ids=str)
def test_filters_keep_what_the_definition_keeps(
    options: dict[str, float | list[float]], capacity: int, num_pairs: int
) -> None:
    # on a coarse grid there are many ties, at thresholds too
    smooth = torch.randn(num_pairs, 1301) * 3
    logits = torch.cat([smooth, (smooth * 2).round() / 2 - 20.0]).to(DEVICE)
    found, wanted = both(logits, make_rows(2 * num_pairs, **options), capacity=capacity)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 1.0}], ids=str)
def test_ties_at_a_threshold_are_all_kept(options: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 3.0]]).expand(8, -1).contiguous().to(DEVICE)
    found, wanted = both(logits, make_rows(8, **options))
    assert torch.equal(found, wanted)
    assert set(found.tolist()) == {1, 2, 4}


MIXTURE: dict[str, list[float]] = {
    "temperature": [1.0, 0.0, 0.7, 2.0, 1.0, 0.0],
    "top_k": [20, 3, 0, 5000, 0, 0],
    "top_p": [0.9, 0.5, 1.0, 1.0, 0.95, 1.0],
    "min_p": [0.0, 0.1, 0.0, 0.2, 0.05, 0.0],
}


def test_mixed_rows_do_not_depend_on_the_batch_the_split_or_nan() -> None:
    from gapless.ops.sampling import triton

    logits = torch.randn(6, 2300).to(DEVICE) * 2
    rows = make_rows(6, **MIXTURE)
    together, wanted = both(logits, rows, mode=DRAWN)
    assert torch.equal(together, wanted)
    positions = torch.arange(6, device=DEVICE) + 30
    assert triton.SPLITS[0] < 2300, "a small batch is split"
    found = triton.sample(logits, positions, rows, mode=DRAWN, split=8192)
    assert torch.equal(found, together)
    for index in ([0], [4]):
        part = replace(rows, slots=rows.slots[index])
        found = triton.sample(logits[index], positions[index], part, mode=DRAWN)
        assert torch.equal(found, together[index])
    logits[3] = float("nan")
    logits[2, 5] = float("nan")
    poisoned = triton.sample(logits, positions, rows, mode=DRAWN)
    kept = [0, 1, 4, 5]
    assert torch.equal(poisoned[kept], together[kept])
    assert ((poisoned >= 0) & (poisoned < 2300)).all()


@pytest.mark.parametrize("mode", list(SamplingMode))
@pytest.mark.parametrize("repeat", [1, 3])
def test_rows_take_the_parameters_of_their_slots(repeat: int, mode: SamplingMode) -> None:
    from gapless.ops.sampling import triton

    slots = torch.tensor([4, 0, 5, 2], device=DEVICE)
    logits = torch.randn(4 * repeat, 1301).to(DEVICE) * 2
    # positions begin at 30
    values: dict[str, float | list[float]] = {**MIXTURE, "min_len": [40, 0, 36, 0, 33, 30]}
    if mode.is_greedy:
        values["temperature"] = 0.0
    if mode is SamplingMode.PLAIN:
        values |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = make_rows(6, **values).columns
    # a few likely tokens of each slot may not come early
    columns.stop_ids[:, :4] = torch.randint(1301, (6, 4), device=DEVICE)
    logits.scatter_add_(
        1, columns.stop_ids[slots, :4].repeat_interleave(repeat, 0), torch.full_like(logits, 9.0)
    )
    rows = SamplingRows(columns, slots, repeat)
    found, wanted = both(logits, rows, mode=mode)
    assert torch.equal(found, wanted)
    gathered = make_rows(4 * repeat)
    for field in fields(SamplingColumns):
        getattr(gathered.columns, field.name).copy_(rows.of(getattr(columns, field.name)))
    assert torch.equal(both(logits, gathered, mode=mode)[0], found)
    if mode.is_plain:
        positions = torch.arange(4 * repeat, device=DEVICE) + 30
        pairs = triton.shard_best(logits, positions, rows, mode=mode, first=0)
        assert torch.equal(triton.best_of_all(pairs, 1301), found)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("capacity", [2, 8192])
def test_stop_ids_are_masked_below_the_minimum_length(
    options: dict[str, float], capacity: int
) -> None:
    logits = torch.tensor([[0.0, 90.0, 1.0, 80.0, 50.0]]).expand(3, -1).contiguous().to(DEVICE)
    stop_ids = torch.tensor([[1, 3] + [-1] * 6] * 3, device=DEVICE)
    rows = make_rows(3, min_len=[40, 31, 40], **options)
    rows = replace(rows, columns=replace(rows.columns, stop_ids=stop_ids))
    mode = SamplingMode.GREEDY if options.get("temperature") == 0 else SAMPLED
    found, wanted = both(logits, rows, mode=mode, capacity=capacity)
    assert torch.equal(found, wanted)
    assert found.tolist() == [4, 1, 4]


def test_reasons_name_what_is_not_served() -> None:
    from gapless.ops.sampling import triton

    assert triton.unsupported(torch.zeros(1, 9)) is None
    assert "float64" in str(triton.unsupported(torch.zeros(1, 9, dtype=torch.float64)))
    wide = torch.zeros(1).expand(1, triton.MAX_VOCAB_SIZE + 1)
    assert "tokens" in str(triton.unsupported(wide))
