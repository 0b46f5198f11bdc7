"""Masks of tokens: the definition by hand, the kernel against it, sampling from what is left."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gapless.ops.sampling import (
    MaskRows,
    SamplingColumns,
    SamplingMode,
    SamplingRows,
    masks,
    reference,
)

triton = pytest.importorskip("gapless.ops.sampling.triton")

INF = float("inf")
ROWS, VOCAB = 5, 1100
MASK_OF = torch.tensor([0, 2, 1, 0, 2], dtype=torch.int32)


def allowed_sets() -> list[set[int]]:
    """Tokens that each mask allows, ends of words and of the vocabulary among them."""
    return [set(range(VOCAB)), {0, 31, 32, 63, 1024, VOCAB - 1}, {7, 33, 34, 900}]


def mask_rows(device: str = "cpu") -> MaskRows:
    """Pack the sets, with a word more than needed, and the positions' choice among them."""
    bits = np.zeros((3, 36 * 32), np.uint8)
    for row, allowed in enumerate(allowed_sets()):
        bits[row, sorted(allowed)] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return MaskRows(MASK_OF.to(device), torch.from_numpy(words).to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forbidden_tokens_become_minus_infinity(dtype: torch.dtype) -> None:
    logits = torch.randn(ROWS, VOCAB, dtype=dtype)
    before = logits.clone()
    masked = masks.mask_logits(logits, mask_rows())
    assert torch.equal(logits, before)
    for row, index in enumerate(MASK_OF.tolist()):
        kept = sorted(allowed_sets()[index])
        assert torch.equal(masked[row, kept], logits[row, kept])
        others = torch.ones(VOCAB, dtype=torch.bool)
        others[kept] = False
        assert (masked[row, others] == -INF).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_is_the_definition(dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wide = torch.randn(ROWS, VOCAB + 60, dtype=dtype, device=device)
    logits, rows = wide[:, :VOCAB], mask_rows(device)
    assert torch.equal(triton.mask_logits(logits, rows), masks.mask_logits(logits, rows))


@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.SAMPLED])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1, 0), (50, 1, 0), (3, 0.9, 0.02)])
def test_sampling_from_a_handful(
    mode: SamplingMode, top_k: int, top_p: float, min_p: float
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = masks.mask_logits(torch.randn(ROWS, VOCAB, device=device), mask_rows(device))
    temperature = 0.0 if mode.is_greedy else 0.8
    columns = SamplingColumns(
        temperature=torch.full((ROWS,), temperature, device=device),
        top_k=torch.full((ROWS,), top_k, device=device),
        top_p=torch.full((ROWS,), float(top_p), device=device),
        min_p=torch.full((ROWS,), float(min_p), device=device),
        seeds=torch.arange(ROWS, device=device),
        min_len=torch.zeros(ROWS, dtype=torch.int64, device=device),
        stop_ids=torch.full((ROWS, 8), -1, device=device),
    )
    positions = torch.arange(ROWS, device=device)
    rows = SamplingRows(columns, positions)
    found = triton.sample(logits, positions, rows, mode=mode).tolist()
    assert found == reference.sample(logits, positions, rows, mode=mode).tolist()
    assert all(t in allowed_sets()[i] for t, i in zip(found, MASK_OF.tolist(), strict=True))
