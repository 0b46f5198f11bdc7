"""Tokens settled from shards are those of whole rows: ties, noise, padding, ranked drafts."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.layers.logits import LogitShard
from gapless.ops import chaining
from gapless.ops.sampling import (
    SamplingMode,
    SamplingRows,
    philox,
    ranking,
    reference,
    shard_best,
    shards,
)
from gapless.runner.choice import choose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

NEG_INF = float("-inf")
SHAPES = [(251, 2), (251, 4), (1023, 2), (37, 8), (2054, 3)]
AT = pytest.mark.parametrize(("vocab_size", "world_size"), SHAPES)
MODES = pytest.mark.parametrize("mode", [SamplingMode.ARGMAX, SamplingMode.PLAIN])


def make_rows(num_rows: int, temperature: Tensor) -> SamplingRows:
    return SamplingRows(
        temperature=temperature.to(DEVICE),
        top_k=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
        top_p=torch.ones(num_rows, device=DEVICE),
        min_p=torch.zeros(num_rows, device=DEVICE),
        seeds=torch.arange(num_rows, device=DEVICE) * 0x9E3779B97F4A7C1 - 12345,
        min_len=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
        stop_ids=torch.full((num_rows, 8), -1, device=DEVICE),
    )


def rows_of(mode: SamplingMode, num_rows: int) -> SamplingRows:
    """Rows of several temperatures, greedy ones among them."""
    several = torch.tensor([0.0, 0.6, 1.0, 1.9]).repeat(num_rows)[:num_rows]
    return make_rows(num_rows, several if mode is SamplingMode.PLAIN else torch.zeros(num_rows))


def make_logits(num_rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Smooth logits, and some on a coarse grid: many ties, at the top too."""
    smooth = torch.randn(num_rows, vocab_size, dtype=torch.float64) * 2
    smooth[::3] = (smooth[::3] / 2).round() * 2
    return smooth.to(DEVICE, dtype)


def split(logits: Tensor, world_size: int) -> list[tuple[Tensor, int]]:
    """Shards of one size and their first ids; what is beyond the vocabulary holds -inf."""
    size = -(-logits.shape[1] // world_size)
    padded = F.pad(logits, (0, size * world_size - logits.shape[1]), value=NEG_INF)
    return [(padded[:, rank * size :][:, :size], rank * size) for rank in range(world_size)]


@AT
@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_best_of_all_shards_is_the_sampled_token(
    vocab_size: int, world_size: int, mode: SamplingMode, dtype: torch.dtype
) -> None:
    num_rows = 24
    logits, rows = make_logits(num_rows, vocab_size, dtype), rows_of(mode, num_rows)
    positions = torch.arange(num_rows, device=DEVICE) + 30
    pairs = [
        shards.shard_best(own, positions, rows, mode=mode, first=first)
        for own, first in split(logits, world_size)
    ]
    assert {pair.shape for pair in pairs} == {(num_rows, 1, 2)}
    found = shards.best_of_all(torch.cat(pairs, dim=1), vocab_size)
    assert torch.equal(found, reference.sample(logits, positions, rows, mode=SamplingMode.SAMPLED))


@AT
@MODES
@pytest.mark.parametrize("tokens_per_program", [None, 1024])
def test_kernels_settle_on_the_token_of_whole_rows(
    vocab_size: int, world_size: int, mode: SamplingMode, tokens_per_program: int | None
) -> None:
    from gapless.ops.sampling import triton

    num_rows = 10
    logits = make_logits(num_rows, vocab_size, torch.float32)
    # NaN is never chosen; a row without a finite logit has its first token
    logits[0, vocab_size // 2] = float("nan")
    logits[4] = NEG_INF
    logits[5, 1:] = NEG_INF
    logits[6, :-1] = NEG_INF
    rows = rows_of(mode, num_rows)
    positions = torch.arange(num_rows, device=DEVICE) + 30
    pairs = [
        triton.shard_best(own, positions, rows, mode=mode, first=first, split=tokens_per_program)
        for own, first in split(logits, world_size)
    ]
    assert len({pair.shape for pair in pairs}) == 1
    gathered = torch.cat(pairs, dim=1)
    found = triton.best_of_all(gathered, vocab_size)
    # not the definition's, of which the interpreter's noise is a rounding away
    assert torch.equal(found, triton.sample(logits, positions, rows, mode=SamplingMode.DRAWN))
    assert torch.equal(found, shards.best_of_all(gathered, vocab_size))
    assert found[4:7].tolist() == [0, 0, vocab_size - 1]


class Prepared:
    """A communicator that has everyone's parts already."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is summed")

    def all_gather(self, x: Tensor) -> Tensor:
        assert any(torch.equal(x, part) for part in self._parts)
        return torch.cat(self._parts, dim=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_choice_among_shards_takes_the_kernels_where_they_serve(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose float64 is for the definition."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(chaining, "_can_chain", lambda _: False)
    mode, num_rows, vocab_size = SamplingMode.PLAIN, 7, 251
    logits, rows = make_logits(num_rows, vocab_size, dtype), rows_of(mode, num_rows)
    positions = torch.arange(num_rows, device=DEVICE) + 30
    parts = split(logits, 4)
    pairs = [
        shard_best(own, positions, rows, mode=mode, first=first).flatten(1) for own, first in parts
    ]
    whole = LogitShard(logits, 0, vocab_size, Prepared([]))
    wanted = choose(whole, positions, rows, mode=SamplingMode.DRAWN)
    for own, first in parts:
        shard = LogitShard(own, first, vocab_size, Prepared(pairs))
        assert torch.equal(choose(shard, positions, rows, mode=mode), wanted)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 126, 1021])
def test_noise_of_a_shard_is_a_part_of_the_whole(first: int) -> None:
    from gapless.ops.sampling import triton

    seeds = torch.tensor([5, -(2**62), -1], device=DEVICE)
    positions = torch.tensor([9, 0, 2**31 + 5], device=DEVICE)
    for noise in (philox.gumbel_noise, triton.gumbel_noise):
        whole = noise(seeds, positions, first + 1103)
        for num_ids in (1, 5, 1103):
            found = noise(seeds, positions, num_ids, first)
            assert torch.equal(found, whole[:, first : first + num_ids])


@AT
@MODES
@pytest.mark.parametrize("count", [1, 4])
def test_ranked_tokens_are_those_of_whole_rows(
    vocab_size: int, world_size: int, mode: SamplingMode, count: int
) -> None:
    num_rows = 24
    logits, rows = make_logits(num_rows, vocab_size, torch.float64), rows_of(mode, num_rows)
    before = logits.clone()
    positions = torch.arange(num_rows, device=DEVICE) + 30
    noise = None
    if mode is SamplingMode.PLAIN:
        noise = philox.gumbel_noise(rows.seeds, positions, vocab_size)
    sampled = reference.sample(logits, positions, rows, mode=mode)
    wanted = ranking.rank_tokens(logits, sampled, rows.temperature, noise, count=count)
    found = []
    for own, first in split(logits, world_size):
        part = None
        if noise is not None:
            part = philox.gumbel_noise(rows.seeds, positions, own.shape[1], first)
        found.append(shards.shard_ranked(own, rows.temperature, part, count=count, first=first))
    tokens, logprobs = shards.ranked_of_all(torch.stack(found, dim=1), vocab_size, count=count)
    assert torch.equal(tokens, wanted[0])
    torch.testing.assert_close(logprobs, wanted[1], rtol=0, atol=1e-12)
    assert torch.equal(logits, before)


def test_a_shard_without_tokens_changes_nothing() -> None:
    """Five tokens over three ranks of two, and four of which the last has none."""
    logits = torch.tensor([[0.5, 3.0, 3.0, 1.0, 2.0]], dtype=torch.float64, device=DEVICE)
    rows, positions = rows_of(SamplingMode.ARGMAX, 1), torch.zeros(1, device=DEVICE).long()
    nothing = torch.full((1, 2), NEG_INF, dtype=torch.float64, device=DEVICE)
    parts = [*split(logits, 3), (nothing, 6)]
    pairs = [
        shards.shard_best(own, positions, rows, mode=SamplingMode.ARGMAX, first=first)
        for own, first in parts
    ]
    assert shards.best_of_all(torch.cat(pairs, dim=1), 5).tolist() == [1]
    found = [
        shards.shard_ranked(own, rows.temperature, None, count=2, first=first)
        for own, first in parts
    ]
    tokens, logprobs = shards.ranked_of_all(torch.stack(found, dim=1), 5, count=2)
    assert tokens.tolist() == [[1, 2]]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 1:3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), NEG_INF, 1e30, -1e30])
def test_what_a_lost_rank_leaves_makes_a_token_of_the_vocabulary(value: float) -> None:
    from gapless.ops.sampling import triton

    lost = torch.full((1, 2, 2), value, device=DEVICE)
    mixed = torch.tensor([[[1.0, 3.0], [value, value]]], device=DEVICE)
    found = torch.full((1, 2, 3), value, device=DEVICE)
    for pairs in (lost, mixed):
        for best_of_all in (shards.best_of_all, triton.best_of_all):
            assert 0 <= best_of_all(pairs, 5).item() < 5
    assert 0 <= shards.ranked_of_all(found, 5, count=1)[0].item() < 5
