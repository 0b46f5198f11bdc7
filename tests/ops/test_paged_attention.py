"""Attention over the flat pool against a loop over queries and heads; unread entries are NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gapless.ops.paged_attention import prefill_attention, window_attention

HEADS, KV_HEADS, HEAD_DIM, ENTRIES = 6, 2, 5, 60
SCALE = 0.3
NAN = float("nan")
DTYPES = [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2**-7)]


def make_pool(used: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a pool that is NaN except for the used entries."""
    pool = torch.full((ENTRIES, 2, KV_HEADS, HEAD_DIM), NAN, dtype=dtype)
    used = used.unique()
    values = torch.randn(len(used), 2, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    pool[used] = values.to(dtype)
    return pool


def naive(q: torch.Tensor, pool: torch.Tensor, entries: list[int]) -> np.ndarray:
    """Attend with one query [H, D] to a list of entries, head by head, in float64."""
    keys = pool[entries, 0].double().numpy()
    values = pool[entries, 1].double().numpy()
    out = []
    for h, x in enumerate(q.double().numpy()):
        kv_head = h // (HEADS // KV_HEADS)
        score = keys[:, kv_head] @ x * SCALE
        weight = np.exp(score - score.max())
        out.append(weight @ values[:, kv_head] / weight.sum())
    return np.stack(out)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_window_agrees_with_loop(dtype: torch.dtype, tolerance: float, width: int) -> None:
    lengths = [1, 17, 9]  # committed
    kv_read = torch.empty(4, 17 + width, dtype=torch.int64)
    mask = torch.zeros(4, width, kv_read.shape[1], dtype=torch.bool)
    free = torch.randperm(ENTRIES - 1)
    for b, length in enumerate(lengths):
        mine, free = free[: length + width], free[length + width :]
        kv_read[b] = mine[0]
        kv_read[b, : length + width] = mine
        for w in range(width):
            # a tree: the window's second node is not an ancestor of its third
            mask[b, w, : length + w + 1] = True
            mask[b, w, length + 1 : length + w] = False
    pool = make_pool(kv_read[:3], dtype)
    # a padded row sees one entry, which holds NaN
    kv_read[3] = ENTRIES - 1
    mask[3, :, 0] = True
    q = torch.randn(4, width, HEADS, HEAD_DIM, dtype=torch.float64).to(dtype)
    out = window_attention(q, pool, kv_read, mask, SCALE)
    assert out.dtype is dtype
    assert out.shape == q.shape
    for b in range(3):
        for w in range(width):
            seen = kv_read[b][mask[b, w]].tolist()
            got = out[b, w].double().numpy()
            np.testing.assert_allclose(
                got, naive(q[b, w], pool, seen), rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_prefill_agrees_with_loop(dtype: torch.dtype, tolerance: float) -> None:
    # (queries, keys): a whole prompt, a continuation, one last token
    sizes = [(7, 7), (4, 11), (1, 13), (1, 1)]
    segments, q_start, kv_start = [], 0, 0
    for num_queries, num_keys in sizes:
        segments.append((q_start, q_start + num_queries, kv_start, kv_start + num_keys))
        q_start, kv_start = q_start + num_queries, kv_start + num_keys
    kv_read = torch.randperm(ENTRIES)[:kv_start]
    pool = make_pool(kv_read, dtype)
    q = torch.randn(q_start, HEADS, HEAD_DIM, dtype=torch.float64).to(dtype)
    out = prefill_attention(q, pool, kv_read, tuple(segments), SCALE)
    assert out.dtype is dtype
    for start, end, kv_from, kv_to in segments:
        for t in range(start, end):
            seen = kv_read[kv_from : kv_to - (end - 1 - t)].tolist()
            got = out[t].double().numpy()
            np.testing.assert_allclose(got, naive(q[t], pool, seen), rtol=tolerance, atol=tolerance)


def test_row_alone_equals_row_in_batch() -> None:
    kv_read = torch.randint(0, ENTRIES, (5, 40))
    pool = make_pool(torch.arange(ENTRIES), torch.float32)
    mask = torch.rand(5, 2, 40) < 0.7
    q = torch.randn(5, 2, HEADS, HEAD_DIM)
    together = window_attention(q, pool, kv_read, mask, SCALE)
    alone = window_attention(q[3:4], pool, kv_read[3:4], mask[3:4], SCALE)
    assert torch.equal(together[3:4], alone)
