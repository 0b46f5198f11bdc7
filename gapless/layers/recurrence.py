"""What all linear layers do between their projections: short convolution, then recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gapless.layers.batch import LinearMemory, PrefillBatch, WindowBatch
from gapless.ops.causal_conv import convolve_segments, convolve_segments_qkv, convolve_window
from gapless.ops.linear_chunk import chunk_prefill
from gapless.ops.linear_replay import replay_window

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.linear import LinearSpec
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
    *,
    bias: Tensor | None = None,  # [C]
    activation: Literal["silu", "none"] = "silu",
) -> Tensor:  # [T, C]
    """Convolve, and keep in the rings what later steps read."""
    ring = memory.conv_ring
    if isinstance(batch, PrefillBatch):
        return convolve_segments(mixed, ring, batch.conv, weight, bias, activation=activation)
    # the batch has those of the model's widest convolution, the nearest last
    taps = batch.conv_taps[-weight.shape[1] :]
    return convolve_window(
        mixed, ring, batch.conv_write, taps, weight, bias,
        num_rows=batch.num_rows, activation=activation,
    )  # fmt: skip


def convolve_qkv(
    mixed: Tensor,  # [T, C]: all q, all k, all v
    weight: Tensor,  # [C, width]
    spec: LinearSpec,
    memory: LinearMemory,
    batch: WindowBatch | PrefillBatch,
) -> tuple[Tensor, Tensor, Tensor]:  # [T, H * K] twice, [T, HV * V]
    """Do the same for a delta rule, and give q, k and v as `run_recurrence` wants them.

    Those of segments are normalised: nothing else reads them. The ring of a window holds keys as
    the convolution gives them, and its recurrence normalises.
    """
    key_size = spec.num_key_heads * spec.key_dim
    if isinstance(batch, WindowBatch):
        mixed = convolve(mixed, weight, memory, batch)
        q, k, v = mixed.split([key_size, key_size, mixed.shape[1] - 2 * key_size], dim=1)
        return q, k, v
    assert spec.l2norm_eps is not None, "delta rules normalise"
    return convolve_segments_qkv(
        mixed, memory.conv_ring, batch.conv, weight,
        num_heads=spec.num_key_heads, key_dim=spec.key_dim, l2norm_eps=spec.l2norm_eps,
    )  # fmt: skip


@dataclass(frozen=True)
class RecurrentInputs:
    """What a recurrence reads of each token, heads side by side.

    A delta rule's q and k are normalised in prefill alone: `convolve_qkv`.
    """

    q: Tensor  # [T, H * K]
    k: Tensor  # [T, H * K]
    v: Tensor  # [T, HV * V]
    beta: Tensor | None  # [T, HV] acc dtype; None for Mamba-2
    log_decay: Tensor  # [T, HV] or [T, HV, Kd] acc dtype
    scale: float


def run_recurrence(
    inputs: RecurrentInputs,
    spec: LinearSpec,
    memory: LinearMemory,
    batch: WindowBatch | PrefillBatch,
) -> Tensor:  # [T, HV, V]
    """Run a recurrence over windows (writing rings) or segments (writing checkpoints)."""
    num_tokens = inputs.q.shape[0]
    lead = (batch.num_rows, -1) if isinstance(batch, WindowBatch) else (num_tokens,)
    heads = (*lead, spec.num_value_heads)
    arguments = (
        inputs.q.view(*lead, spec.num_key_heads, spec.key_dim),
        inputs.k.view(*lead, spec.num_key_heads, spec.key_dim),
        inputs.v.view(*heads, spec.value_dim),
        None if inputs.beta is None else inputs.beta.view(heads),
        inputs.log_decay.view(*heads, spec.decay_dim),
    )
    if isinstance(batch, WindowBatch):
        out = replay_window(
            *arguments, memory.replay, batch.replay,
            recurrence=spec.recurrence, l2norm_eps=spec.l2norm_eps, scale=inputs.scale,
            ancestors=batch.ancestors,
        )  # fmt: skip
    else:
        out = chunk_prefill(
            *arguments, memory.replay.checkpoint, batch.chunks,
            recurrence=spec.recurrence, scale=inputs.scale,
        )  # fmt: skip
    return out.reshape(num_tokens, spec.num_value_heads, spec.value_dim)
