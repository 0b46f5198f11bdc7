"""Latent attention against its formula with every head's keys and values expanded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gapless.ops.mla import prefill_latent_attention, window_latent_attention

HEADS, RANK, NOPE, ROPE, VALUE = 3, 10, 6, 4, 5
ENTRIES, SCALE = 40, 0.3


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


KEY_UP = random(HEADS, NOPE, RANK, seed=1)
VALUE_UP = random(HEADS, VALUE, RANK, seed=2)


def absorbed(q: Tensor) -> Tensor:
    """Turn queries [..., H, N + rope_dim] into what meets the latents, [..., H, R + rope_dim]."""
    nope, rope = q.split([NOPE, ROPE], -1)
    return torch.cat([torch.einsum("...hn,hnr->...hr", nope, KEY_UP), rope], -1)


def expanded(q: Tensor, entries: Tensor) -> Tensor:
    """Attend with one query [H, N + rope_dim] to entries [S, R + rope_dim], head by head."""
    outputs = []
    for head in range(HEADS):
        latent, shared = entries[:, :RANK], entries[:, RANK:]
        keys = torch.cat([latent @ KEY_UP[head].T, shared], -1)
        weights = (SCALE * (keys @ q[head])).softmax(0)
        outputs.append(weights @ (latent @ VALUE_UP[head].T))
    return torch.stack(outputs)


def values_of(mixed: Tensor) -> Tensor:
    return torch.einsum("...hr,hvr->...hv", mixed, VALUE_UP)


@pytest.mark.parametrize("window", [1, 4])
def test_windows_read_their_own_pages(window: int) -> None:
    pool = random(ENTRIES, RANK + ROPE, seed=3)
    q = random(2, window, HEADS, NOPE + ROPE, seed=4)
    order = torch.randperm(ENTRIES, generator=torch.Generator().manual_seed(5))
    lengths = (17, 9)
    kv_read, mask = torch.zeros(2, 17, dtype=torch.int64), torch.zeros(2, window, 17).bool()
    for row, length in enumerate(lengths):
        own = order[20 * row :][:length]
        kv_read[row] = own[0]  # past the row, its first entry
        kv_read[row, :length] = own
        for i in range(window):
            mask[row, i, : length - window + 1 + i] = True
    # what belongs to nobody may be anything
    used = torch.cat([order[:17], order[20:29]])
    spoilt = torch.full_like(pool, torch.nan)
    spoilt[used] = pool[used]
    found = values_of(
        window_latent_attention(absorbed(q), spoilt, kv_read, mask, SCALE, value_dim=RANK)
    )
    for row, length in enumerate(lengths):
        for i in range(window):
            entries = pool[order[20 * row :][: length - window + 1 + i]]
            assert (found[row, i] - expanded(q[row, i], entries)).abs().max() < 1e-12


def test_a_row_of_nan_stays_alone() -> None:
    pool = random(ENTRIES, RANK + ROPE, seed=3)
    pool[30:] = torch.nan
    q = absorbed(random(2, 1, HEADS, NOPE + ROPE, seed=4))
    kv_read = torch.stack([torch.arange(5), torch.arange(30, 35)])
    mask = torch.ones(2, 1, 5, dtype=torch.bool)
    both = window_latent_attention(q, pool, kv_read, mask, SCALE, value_dim=RANK)
    alone = window_latent_attention(q[:1], pool, kv_read[:1], mask[:1], SCALE, value_dim=RANK)
    assert (both[0] - alone[0]).abs().max() < 1e-14
    assert both[1].isnan().all()


def test_segments_are_causal_and_aligned_to_their_ends() -> None:
    pool = random(ENTRIES, RANK + ROPE, seed=6)
    q = random(9, HEADS, NOPE + ROPE, seed=7)
    kv_read = torch.randperm(ENTRIES, generator=torch.Generator().manual_seed(8))[:20]
    # a whole prompt of 4, the last 5 of 16
    segments = ((0, 4, 0, 4), (4, 9, 4, 20))
    found = values_of(
        prefill_latent_attention(absorbed(q), pool, kv_read, segments, SCALE, value_dim=RANK)
    )
    for q_start, q_end, kv_start, kv_end in segments:
        for token in range(q_start, q_end):
            last = kv_end - (q_end - 1 - token)
            expected = expanded(q[token], pool[kv_read[kv_start:last]])
            assert (found[token] - expected).abs().max() < 1e-12


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_narrow_types_accumulate_in_float32(dtype: torch.dtype, bound: float) -> None:
    pool = random(ENTRIES, RANK + ROPE, seed=3, dtype=dtype)
    q = random(1, 2, HEADS, RANK + ROPE, seed=4, dtype=dtype)
    kv_read, mask = torch.arange(12)[None], torch.ones(1, 2, 12, dtype=torch.bool)
    found = window_latent_attention(q, pool, kv_read, mask, SCALE, value_dim=RANK)
    wide = window_latent_attention(q.double(), pool.double(), kv_read, mask, SCALE, value_dim=RANK)
    assert found.dtype == dtype
    assert (found.double() - wide).abs().max() < bound
