"""What fla-core's kernels compute within chunks, with torch operations, chunk by chunk.

Written from the formulas in `ops/linear_chunk/reference.py`, with fla-core's arguments; logarithms
of decays are to base 2. Tokens of no chunk come out as NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def _chunks(
    cu_seqlens: Tensor, chunk_indices: Tensor, chunk_size: int
) -> Iterator[tuple[int, slice]]:
    """Number and tokens of each chunk that holds some."""
    for number, (piece, i) in enumerate(chunk_indices.tolist()):
        start, end = (int(x) for x in cu_seqlens[piece : piece + 2])
        tokens = slice(start + i * chunk_size, min(start + (i + 1) * chunk_size, end))
        if tokens.start < tokens.stop:
            yield number, tokens


def _nan_like(x: Tensor, *last: int) -> Tensor:
    return x.new_full((*x.shape[: x.dim() - len(last)], *last), math.nan)


def _heads_first(x: Tensor, tokens: slice, heads: int) -> Tensor:
    """[1, T, H, ...] to [HV, n, ...], each key head repeated to its value heads."""
    part = x[0, tokens].transpose(0, 1)
    return part.repeat_interleave(heads // part.shape[0], 0)


def chunk_local_cumsum(g: Tensor, *, scale: float, **pieces: Any) -> Tensor:
    out = _nan_like(g)
    for _, tokens in _chunks(**pieces):
        out[0, tokens] = g[0, tokens].cumsum(0) * scale
    return out


def _pairs(x: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """sum_c x_ic 2^(g_i - g_j)_c k_jc, j <= i; g: [HV, n, 1 or K]."""
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    exponent = (g[:, :, None] - g[:, None]).masked_fill(later[None, :, :, None], -math.inf)
    return (x[:, :, None] * exponent.exp2() * k[:, None]).sum(-1)


def _solved(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """w and u of one chunk."""
    system = torch.eye(k.shape[1]) + beta[..., None] * _pairs(k, k, g).tril(-1)
    right = torch.cat([k * g.exp2(), v], -1) * beta[..., None]
    found = torch.linalg.solve_triangular(system, right, upper=False)
    return found[..., : k.shape[2]], found[..., k.shape[2] :]


def chunk_gated_delta_rule_fwd_intra(
    *, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **pieces: Any
) -> tuple[Tensor, Tensor, None]:
    w, u = _nan_like(v, k.shape[3]), _nan_like(v)
    for _, t in _chunks(**pieces):
        key = _heads_first(k, t, v.shape[2])
        found = _solved(key, v[0, t].transpose(0, 1), g[0, t].T[..., None], beta[0, t].T)
        w[0, t], u[0, t] = (x.transpose(0, 1) for x in found)
    return w, u, None


def chunk_fwd_o(
    *, q: Tensor, k: Tensor, v: Tensor, h: Tensor, g: Tensor, scale: float,
    state_v_first: bool, **pieces: Any,
) -> Tensor:  # fmt: skip
    assert state_v_first
    out, heads = _nan_like(v), v.shape[2]
    for number, t in _chunks(**pieces):
        query, key = (_heads_first(x, t, heads) for x in (q, k))
        decay = g[0, t].T[..., None]
        read = (query * decay.exp2()) @ h[0, number].transpose(1, 2)
        found = read + _pairs(query, key, decay) @ v[0, t].transpose(0, 1)
        out[0, t] = scale * found.transpose(0, 1)
    return out


def chunk_kda_fwd_intra(
    *, q: Tensor, k: Tensor, v: Tensor, gk: Tensor, beta: Tensor, scale: float, **pieces: Any
) -> tuple[Tensor, Tensor, None, Tensor, Tensor, None]:
    heads, key_dim = v.shape[2], k.shape[3]
    w, u, decayed_k = _nan_like(v, key_dim), _nan_like(v), _nan_like(v, key_dim)
    pair_q = _nan_like(v, pieces["chunk_size"])
    for _, t in _chunks(**pieces):
        query, key = (_heads_first(x, t, heads) for x in (q, k))
        decay = gk[0, t].transpose(0, 1)
        found = _solved(key, v[0, t].transpose(0, 1), decay, beta[0, t].T)
        w[0, t], u[0, t] = (x.transpose(0, 1) for x in found)
        decayed_k[0, t] = (key * (decay[:, -1:] - decay).exp2()).transpose(0, 1)
        pairs = scale * _pairs(query, key, decay)
        pair_q[0, t, :, : pairs.shape[2]] = pairs.transpose(0, 1)
    return w, u, None, decayed_k, pair_q, None


def chunk_gla_fwd_o_gk(
    *, q: Tensor, v: Tensor, g: Tensor, A: Tensor, h: Tensor, scale: float,
    state_v_first: bool, **pieces: Any,
) -> Tensor:  # fmt: skip
    assert state_v_first
    out, heads = _nan_like(v), v.shape[2]
    for number, t in _chunks(**pieces):
        query, decay = _heads_first(q, t, heads), g[0, t].transpose(0, 1)
        pairs = A[0, t, :, : t.stop - t.start].transpose(0, 1)
        read = scale * (query * decay.exp2()) @ h[0, number].transpose(1, 2)
        out[0, t] = (read + pairs @ v[0, t].transpose(0, 1)).transpose(0, 1)
    return out


STAND_INS: dict[str, dict[str, Any]] = {
    "fla": {},
    "fla.ops": {},
    "fla.ops.common": {},
    "fla.ops.common.chunk_o": {"chunk_fwd_o": chunk_fwd_o},
    "fla.ops.gated_delta_rule": {},
    "fla.ops.gated_delta_rule.chunk_fwd": {
        "chunk_gated_delta_rule_fwd_intra": chunk_gated_delta_rule_fwd_intra
    },
    "fla.ops.gla": {},
    "fla.ops.gla.chunk": {"chunk_gla_fwd_o_gk": chunk_gla_fwd_o_gk},
    "fla.ops.kda": {},
    "fla.ops.kda.chunk_intra": {"chunk_kda_fwd_intra": chunk_kda_fwd_intra},
    "fla.ops.utils": {"chunk_local_cumsum": chunk_local_cumsum},
    "fla.ops.utils.constant": {"RCP_LN2": 1 / math.log(2)},
}
