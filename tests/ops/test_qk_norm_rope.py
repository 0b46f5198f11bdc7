"""Norm, rotation and store of q, k and v against loops over heads; the kernel against both."""

from __future__ import annotations

import os

import pytest
import torch

from gapless.ops.qk_norm_rope import qk_norm_rope, reference
from gapless.ops.rope import rotary_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

TOKENS, ENTRIES, EPS = 5, 9, 1e-6
POSITIONS = [0, 7, 3, 400, 401]
KV_WRITE = [4, 0, 8, 2, 8]  # two padded tokens write the last entry


class Case:
    """Inputs of one call, rows and entries strided, the pool full of NaN."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
    ) -> None:
        acc = torch.promote_types(dtype, torch.float32)
        size = (heads + 2 * kv_heads) * head_dim
        self.projected = torch.randn(TOKENS, 16 + size, dtype=torch.float64).to(dtype)
        table = rotary_table(402, rotary_dim, 1e4, dtype, torch.device("cpu"))
        self.rotary = table[POSITIONS]
        self.stacked = torch.full((ENTRIES, 2, 2, kv_heads, head_dim), float("nan"), dtype=dtype)
        self.norm_weight = torch.randn(heads + kv_heads, head_dim, dtype=acc)
        self.kv_write = torch.tensor(KV_WRITE)

    @property
    def pool(self) -> torch.Tensor:
        return self.stacked[:, 1]

    @property
    def qkv(self) -> torch.Tensor:
        return self.projected[:, 16:]

    def on(self, device: str) -> Case:
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        return self


def naive(case: Case, *, has_norm: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v [T, heads, D] in float64, one head at a time."""
    kv_heads, head_dim = case.pool.shape[2:]
    heads = case.qkv.double().unflatten(1, (-1, head_dim))
    out = heads.clone()
    half = case.rotary.shape[1] // 2
    for t in range(TOKENS):
        cos, sin = case.rotary[t].double().split(half)
        for h in range(heads.shape[1] - kv_heads):
            x = heads[t, h]
            if has_norm:
                x = x / (x.pow(2).mean() + EPS).sqrt() * case.norm_weight[h]
            out[t, h] = x
            out[t, h, :half] = x[:half] * cos - x[half : 2 * half] * sin
            out[t, h, half : 2 * half] = x[half : 2 * half] * cos + x[:half] * sin
    q, k, v = out.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    return q, k, v


# heads, kv heads, head dim, rotary dim
SHAPES = [(3, 1, 20, 6), (2, 2, 64, 64), (4, 2, 256, 64)]
DTYPES = [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2**-6)]


def check(case: Case, q: torch.Tensor, tolerance: float, *, has_norm: bool) -> None:
    wanted_q, wanted_k, wanted_v = naive(case, has_norm=has_norm)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(q.double(), wanted_q, **close)
    # of the tokens that share an entry any may win: none of them is real
    for token in (0, 1, 3):
        entry = KV_WRITE[token]
        torch.testing.assert_close(case.pool[entry, 0].double(), wanted_k[token], **close)
        assert torch.equal(case.pool[entry, 1].double(), wanted_v[token])
    untouched = torch.tensor([e for e in range(ENTRIES) if e not in KV_WRITE])
    assert case.pool[untouched].isnan().all()
    assert case.stacked[:, 0].isnan().all()


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_reference_agrees_with_loop(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], has_norm: bool
) -> None:
    case = Case(*shape, dtype)
    weight = case.norm_weight if has_norm else None
    q = qk_norm_rope(case.qkv, case.rotary, case.pool, case.kv_write, norm_weight=weight, eps=EPS)
    assert q.dtype is dtype
    check(case, q, tolerance, has_norm=has_norm)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES[1:])
def test_kernel_agrees_with_loop_and_reference(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], has_norm: bool
) -> None:
    from gapless.ops.qk_norm_rope import triton

    case = Case(*shape, dtype).on(DEVICE)
    weight = case.norm_weight if has_norm else None
    inputs = (case.qkv, case.rotary, case.pool, case.kv_write)
    by_reference = reference.qk_norm_rope(*inputs, norm_weight=weight, eps=EPS)
    stored = case.stacked.clone()
    case.stacked.fill_(float("nan"))
    q = triton.qk_norm_rope(*inputs, norm_weight=weight, eps=EPS)
    # the roundings are the same, so that only the sum of squares can move one of them
    ulp = 2.0**-7 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(q, by_reference, rtol=2 * ulp, atol=2 * ulp)
    torch.testing.assert_close(
        case.stacked[:8], stored[:8], rtol=2 * ulp, atol=2 * ulp, equal_nan=True
    )
    check(case.on("cpu"), q.cpu(), tolerance, has_norm=has_norm)
