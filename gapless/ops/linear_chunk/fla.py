"""Chunked prefill of the delta rules on fla-core's Triton kernels, in waves (`waves.py`).

The package's own entry points would derive chunk numbers in every layer, copy them to the device
and wait, and fix the normalisation's epsilon. So the functions below them are called, which take
all of that as arguments; they are those of version 0.6, and no other version is accepted.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from gapless.core.architecture import Recurrence
from gapless.ops.linear_chunk.waves import Wave, WaveIndices, run_waves

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Scan = Callable[[Wave, Tensor], tuple[Tensor, Tensor]]

CHUNK = 64
_VERSION = "0.6"
_REMEDY = "pip install 'gapless[cuda]' brings it"
_ACTIVATIONS = (torch.bfloat16, torch.float16)
_MAX_KEY_DIM = 256
_NORM_TOKENS = 16


@cache
def _missing() -> str | None:
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"fla-core is not installed; {_REMEDY}"
    if found.split(".")[:2] != _VERSION.split("."):
        return f"fla-core {found} is installed, want {_VERSION}; {_REMEDY}"
    return None


def unsupported(q: Tensor, chunk: int, recurrence: Recurrence) -> str | None:
    """Return why the kernels cannot serve a layer, None if they can; the shapes alone decide."""
    if recurrence is Recurrence.MAMBA2:
        return "Mamba-2"
    if q.dtype not in _ACTIVATIONS:
        return f"{q.dtype}, whose products would be TF32"
    if chunk != CHUNK:
        return f"chunks of {chunk} tokens, want {CHUNK}"
    if q.shape[2] > _MAX_KEY_DIM:
        return f"key dim {q.shape[2]}, want at most {_MAX_KEY_DIM}"
    return _missing()


def chunk_prefill(
    q: Tensor,  # [T, H, K]
    k: Tensor,  # [T, H, K]
    v: Tensor,  # [T, HV, V]
    beta: Tensor,  # [T, HV]
    log_decay: Tensor,  # [T, HV, Kd]
    checkpoint: Tensor,  # [rows, HV, V, K]
    indices: WaveIndices,
    *,
    recurrence: Recurrence,
    l2norm_eps: float | None,
    scale: float,
) -> Tensor:  # [T, HV, V] in q's dtype
    """Do what `reference.chunk_prefill` does, without a sync.

    Products are of q's type, accumulated in float32; states between chunks are float32, and the
    copies of them that outputs are read from are of q's type. q, k and v may be views whose last
    two axes are contiguous.
    """
    if l2norm_eps is None:
        q, k = _placed(q, indices.gather), _placed(k, indices.gather)
    else:
        q, k = normalized(q, k, indices.gather, eps=l2norm_eps)
    v, beta, log_decay = (_placed(x, indices.gather) for x in (v, beta, log_decay))
    inputs = (q[None], k[None], v[None], beta[None])
    if recurrence is Recurrence.KIMI_DELTA:
        scan = _kimi_delta(*inputs, log_decay[None], indices, scale)
    else:
        scan = _gated_delta(*inputs, log_decay[None, :, :, 0], indices, scale)
    return run_waves(scan, checkpoint, indices, acc=torch.float32)


def normalized(
    q: Tensor,  # [T, H, K]
    k: Tensor,  # [T, H, K]
    gather: Tensor | None,  # [T] int64
    *,
    eps: float,
) -> tuple[Tensor, Tensor]:  # [T, H, K] each, contiguous
    """Return x * rsqrt(sum(x^2) + eps) of both, of the gathered tokens; one launch, float32 sums.

    The last two axes are contiguous, as in a view of q, k and v side by side.
    """
    from gapless.ops.linear_chunk.kernels import _normalize_kernel

    num_tokens, num_heads, key_dim = q.shape
    assert q.stride()[1:] == k.stride()[1:] == (key_dim, 1), "heads and channels are contiguous"
    q_out, k_out = (
        torch.empty((num_tokens, num_heads, key_dim), dtype=x.dtype, device=x.device)
        for x in (q, k)
    )
    _normalize_kernel[-(-num_tokens // _NORM_TOKENS), num_heads](
        q, k, q_out, k_out, gather, eps, num_tokens, q.stride(0), k.stride(0),
        H=num_heads, K=key_dim, BT=_NORM_TOKENS, BK=1 << (key_dim - 1).bit_length(),
        HAS_GATHER=gather is not None,
    )  # fmt: skip
    return q_out, k_out


def _placed(x: Tensor, gather: Tensor | None) -> Tensor:
    return x.contiguous() if gather is None else x.index_select(0, gather)


def _gated_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, indices: WaveIndices, scale: float
) -> Scan:
    """Solve all chunks; return what runs the states through one wave. g: [1, T, HV]."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    pieces = {"cu_seqlens": indices.bounds, "chunk_indices": indices.chunks, "chunk_size": CHUNK}
    # the kernels' exponentials are powers of two
    g = chunk_local_cumsum(g, scale=RCP_LN2, **pieces)
    w, u, _ = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, **pieces)

    def scan(wave: Wave, states: Tensor) -> tuple[Tensor, Tensor]:
        h, d, after = chunk_gated_delta_rule_fwd_h(
            k=k, w=w, u=u, g=g, initial_state=states, output_final_state=True, state_v_first=True,
            cu_seqlens=wave.bounds, chunk_indices=wave.chunks, chunk_offsets=wave.chunk_starts,
            chunk_size=CHUNK,
        )  # fmt: skip
        out = chunk_fwd_o(
            q=q, k=k, v=d, h=h, g=g, scale=scale, state_v_first=True,
            cu_seqlens=indices.bounds, chunk_indices=wave.chunks, chunk_size=CHUNK,
        )  # fmt: skip
        return out[0, wave.places], after

    return scan


def _kimi_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, indices: WaveIndices, scale: float
) -> Scan:
    """Solve all chunks; return what runs the states through one wave. g: [1, T, HV, K]."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
    from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    pieces = {"cu_seqlens": indices.bounds, "chunk_indices": indices.chunks, "chunk_size": CHUNK}
    g = chunk_local_cumsum(g, scale=RCP_LN2, **pieces)
    w, u, _, decayed_k, pair_q, _ = chunk_kda_fwd_intra(
        q=q, k=k, v=v, gk=g, beta=beta, scale=scale, **pieces
    )

    def scan(wave: Wave, states: Tensor) -> tuple[Tensor, Tensor]:
        h, d, after = chunk_gated_delta_rule_fwd_h(
            k=decayed_k, w=w, u=u, gk=g, initial_state=states, output_final_state=True,
            state_v_first=True, cu_seqlens=wave.bounds, chunk_indices=wave.chunks,
            chunk_offsets=wave.chunk_starts, chunk_size=CHUNK,
        )  # fmt: skip
        out = chunk_gla_fwd_o_gk(
            q=q, v=d, g=g, A=pair_q, h=h, scale=scale, state_v_first=True,
            cu_seqlens=indices.bounds, chunk_indices=wave.chunks, chunk_size=CHUNK,
        )  # fmt: skip
        return out[0, wave.places], after

    return scan
