"""Chunked prefill of the delta rules: fla-core's Triton kernels within chunks, `scan.py` over them.

The package's own entry points would derive chunk numbers in every layer, copy them to the device
and wait. So the functions below them are called, which take those as arguments; they are those of
version 0.6, and no other version is accepted. Nothing here depends on how segments lie but tensors
of fixed shapes, so a call can be captured.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from gapless.core.specs.linear import Recurrence
from gapless.ops.linear_chunk.scan import scan_chunks

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.linear_chunk.segments import ScanIndices

CHUNK = 64
_VERSION = "0.6"
_REMEDY = "pip install 'gapless[cuda]' brings it"
_ACTIVATIONS = (torch.bfloat16, torch.float16)
_MAX_KEY_DIM = 256


@cache
def _missing() -> str | None:
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"fla-core is not installed; {_REMEDY}"
    if found.split(".")[:2] != _VERSION.split("."):
        return f"fla-core {found} is installed, want {_VERSION}; {_REMEDY}"
    return None


def unsupported(dtype: torch.dtype, key_dim: int, chunk: int, recurrence: Recurrence) -> str | None:
    """Return why the kernels cannot serve a layer, None if they can."""
    if recurrence is Recurrence.MAMBA2:
        return "Mamba-2"
    if dtype not in _ACTIVATIONS:
        return f"{dtype}, whose products would be TF32"
    if chunk != CHUNK:
        return f"chunks of {chunk} tokens, want {CHUNK}"
    if key_dim > _MAX_KEY_DIM:
        return f"key dim {key_dim}, want at most {_MAX_KEY_DIM}"
    return _missing()


def chunk_prefill(
    q: Tensor,  # [T, H, K]
    k: Tensor,  # [T, H, K]
    v: Tensor,  # [T, HV, V]
    beta: Tensor,  # [T, HV]
    log_decay: Tensor,  # [T, HV, Kd]
    checkpoint: Tensor,  # [rows, HV, V, K]
    indices: ScanIndices,
    *,
    recurrence: Recurrence,
    scale: float,
) -> Tensor:  # [T, HV, V] in q's dtype
    """Do what `reference.chunk_prefill` does, without a sync; tokens of no segment get anything.

    Products are of q's type, accumulated in float32; states between chunks are float32, and the
    copies of them that outputs are read from are of q's type. All inputs are contiguous: copies of
    q, k and v would take a tenth of the time. No segment may write a row that another one starts
    from.
    """
    inputs = (q, k, v, beta, log_decay)
    assert all(x.is_contiguous() for x in inputs), "inputs of the kernels are contiguous"
    if recurrence is Recurrence.KIMI_DELTA:
        return _kimi_delta(*inputs, checkpoint, indices, scale)
    return _gated_delta(*inputs, checkpoint, indices, scale)


def _gated_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, checkpoint: Tensor,
    indices: ScanIndices, scale: float,
) -> Tensor:  # fmt: skip
    """g: [T, HV, 1]."""
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    chunked = {"cu_seqlens": indices.bounds, "chunk_indices": indices.chunks, "chunk_size": CHUNK}
    # the kernels' exponentials are powers of two
    g = chunk_local_cumsum(g[None, :, :, 0], scale=RCP_LN2, **chunked)
    w, u, _ = chunk_gated_delta_rule_fwd_intra(
        k=k[None], v=v[None], g=g, beta=beta[None], **chunked
    )
    h, d = scan_chunks(k, None, w[0], u[0], g[0], checkpoint, indices, chunk=CHUNK)
    out: Tensor = chunk_fwd_o(
        q=q[None], k=k[None], v=d[None], h=h[None], g=g, scale=scale, state_v_first=True, **chunked
    )
    return out[0]


def _kimi_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, checkpoint: Tensor,
    indices: ScanIndices, scale: float,
) -> Tensor:  # fmt: skip
    """g: [T, HV, K]."""
    from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
    from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    chunked = {"cu_seqlens": indices.bounds, "chunk_indices": indices.chunks, "chunk_size": CHUNK}
    g = chunk_local_cumsum(g[None], scale=RCP_LN2, **chunked)
    w, u, _, decayed_k, pair_q, _ = chunk_kda_fwd_intra(
        q=q[None], k=k[None], v=v[None], gk=g, beta=beta[None], scale=scale, **chunked
    )
    h, d = scan_chunks(k, decayed_k[0], w[0], u[0], g[0], checkpoint, indices, chunk=CHUNK)
    out: Tensor = chunk_gla_fwd_o_gk(
        q=q[None], v=d[None], g=g, A=pair_q, h=h[None], scale=scale, state_v_first=True, **chunked
    )
    return out[0]
