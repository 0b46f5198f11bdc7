"""What all linear layers do between their projections: short convolution, then recurrence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.layers.batch import LinearMemory, PrefillBatch, WindowBatch
from gapless.ops.causal_conv import causal_conv, convolve_window
from gapless.ops.linear_chunk import chunk_prefill
from gapless.ops.linear_replay import replay_window

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.architecture import LinearSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory


def linear_inputs(
    memory: LayerMemory, batch: AttentionBatch
) -> tuple[LinearMemory, WindowBatch | PrefillBatch]:
    """Return a linear layer's memory and batch as what they are."""
    assert isinstance(memory, LinearMemory), "a linear layer's memory is rings and checkpoints"
    assert isinstance(batch, WindowBatch | PrefillBatch), "a linear layer's indices are needed"
    return memory, batch


def convolve(
    mixed: Tensor,  # [T, C]
    weight: Tensor,  # [C, width]
    memory: LinearMemory,
    batch: WindowBatch | PrefillBatch,
) -> Tensor:  # [T, C]
    """Convolve with SiLU behind it, and keep in the rings what later steps read."""
    ring = memory.conv_ring
    if isinstance(batch, WindowBatch):
        return convolve_window(
            mixed, ring, batch.conv_write, batch.conv_taps, weight, None,
            num_rows=batch.num_rows, activation="silu",
        )  # fmt: skip
    source = torch.cat((mixed, ring.index_select(0, batch.conv_prefix)))
    ring.index_copy_(0, batch.conv_write, source.index_select(0, batch.conv_keep))
    return causal_conv(source, batch.conv_taps, weight, None, activation="silu")


def recur(
    mixed: Tensor,  # [T, C]: all q, all k, all v, as the convolution gives them
    beta: Tensor,  # [T, HV] acc dtype
    log_decay: Tensor,  # [T, HV, Kd] acc dtype
    spec: LinearSpec,
    memory: LinearMemory,
    batch: WindowBatch | PrefillBatch,
    *,
    l2norm_eps: float,
) -> Tensor:  # [T, HV, V]
    """Run a delta rule over windows (writing rings) or segments (writing checkpoints)."""
    num_tokens, scale = mixed.shape[0], spec.key_dim**-0.5
    key_size = spec.num_key_heads * spec.key_dim
    value_size = spec.num_value_heads * spec.value_dim
    q, k, v = mixed.split([key_size, key_size, value_size], dim=-1)
    lead = (batch.num_rows, -1) if isinstance(batch, WindowBatch) else (num_tokens,)
    inputs = (
        q.view(*lead, spec.num_key_heads, spec.key_dim),
        k.view(*lead, spec.num_key_heads, spec.key_dim),
        v.view(*lead, spec.num_value_heads, spec.value_dim),
        beta.view(*lead, spec.num_value_heads),
        log_decay.view(*lead, spec.num_value_heads, spec.decay_dim),
    )
    if isinstance(batch, WindowBatch):
        out = replay_window(
            *inputs, memory.replay, batch.replay,
            recurrence=spec.recurrence, l2norm_eps=l2norm_eps, scale=scale,
        )  # fmt: skip
    else:
        out = chunk_prefill(
            *inputs, memory.replay.checkpoint, batch.chunks,
            recurrence=spec.recurrence, l2norm_eps=l2norm_eps, scale=scale,
        )  # fmt: skip
    return out.reshape(num_tokens, spec.num_value_heads, spec.value_dim)
