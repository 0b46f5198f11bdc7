"""Gated DeltaNet: short convolution, gated delta recurrence, gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.core.parallel import linear_of_rank
from gapless.layers.linear import Linear, PartialLinear
from gapless.layers.recurrence import (
    RecurrentInputs,
    convolve_qkv,
    linear_inputs,
    run_recurrence,
)
from gapless.layers.shard import target
from gapless.ops.gates import delta_gates
from gapless.ops.norm import gated_rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.linear import LinearSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Share, Target


@dataclass(frozen=True)
class _Shares:
    """What one rank keeps of each stored axis."""

    channels: Share  # under the convolution: of q, of k and of v
    values: Share  # value features
    heads: Share  # value heads
    inputs: dict[str, Share]  # rows of the input projections, by name

    @classmethod
    def of(cls, spec: LinearSpec, place: Placement) -> _Shares:
        key_size = spec.num_key_heads * spec.key_dim
        value_size = spec.num_value_heads * spec.value_dim
        channels = place.share(key_size, key_size, value_size)
        values, heads = place.share(value_size), place.share(spec.num_value_heads)
        if spec.has_grouped_rows:
            # each key head's rows stand together
            inputs = {
                "in_proj_qkvz": place.share(spec.conv_channels + value_size),
                "in_proj_ba": place.share(2 * spec.num_value_heads),
            }
        else:
            inputs = {
                "in_proj_qkv": channels,
                "in_proj_z": values,
                "in_proj_b": heads,
                "in_proj_a": heads,
            }
        return cls(channels, values, heads, inputs)


class GatedDeltaNet:
    """`beta = sigmoid(b)`, `log_decay = -exp(A_log) softplus(a + dt_bias)`, float32 or more.

    A rank keeps a share of the key heads and the value heads that belong to them.
    """

    def __init__(self, hidden_size: int, spec: LinearSpec, place: Placement, *, eps: float) -> None:
        self._shares = _Shares.of(spec, place)
        self._spec = spec = linear_of_rank(spec, place.world_size)
        self._eps = eps
        self._beta_scale = 1.0
        self._communicator = place.communicator
        heads = spec.num_value_heads
        self._sizes = [spec.conv_channels, heads * spec.value_dim, heads, heads]
        self._in_proj = Linear(hidden_size, sum(self._sizes), place)
        self._out_proj = PartialLinear(self._shares.values, hidden_size, place)
        self._conv = place.weight(spec.conv_channels, spec.conv_width)
        self._neg_decay_rate = place.acc_weight(spec.num_value_heads)
        self._dt_bias = place.acc_weight(spec.num_value_heads)
        self._norm = place.acc_weight(spec.value_dim)

    def __call__(self, x: Tensor, memory: LayerMemory, batch: AttentionBatch) -> Tensor:
        """Map `[T, D]` to `[T, D]`, writing rings (decode) or rings and checkpoints (prefill)."""
        memory, batch = linear_inputs(memory, batch)
        spec = self._spec
        mixed, gate, b, a = self._in_proj(x).split(self._sizes, dim=-1)
        q, k, v = convolve_qkv(mixed, self._conv, spec, memory, batch)
        beta, log_decay = delta_gates(
            b, a, self._dt_bias, self._neg_decay_rate, beta_scale=self._beta_scale
        )
        inputs = RecurrentInputs(q, k, v, beta, log_decay, scale=spec.key_dim**-0.5)
        out = run_recurrence(inputs, spec, memory, batch)
        out = gated_rms_norm(out, gate.reshape(out.shape), self._norm, self._eps, activation="silu")
        return self._communicator.all_reduce(self._out_proj(out.flatten(1)))

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        shares = self._shares
        return (
            self._in_proj.targets(prefix, shares.inputs)
            | self._out_proj.targets(f"{prefix}out_proj")
            | {
                f"{prefix}conv1d.weight": target(self._conv.unsqueeze(1), 0, shares.channels),
                f"{prefix}A_log": target(self._neg_decay_rate, 0, shares.heads),
                f"{prefix}dt_bias": target(self._dt_bias, 0, shares.heads),
                f"{prefix}norm.weight": self._norm,
            }
        )

    def finalize(self) -> None:
        """Turn the loaded `A_log` into `-exp(A_log)` and order grouped rows by kind, once."""
        self._neg_decay_rate.exp_().neg_()
        if self._spec.has_grouped_rows:
            self._ungroup_rows()

    def _ungroup_rows(self) -> None:
        """Reorder rows `[q | k | v.. | z..]` then `[b.. | a..]` of each key head: all q first."""
        spec = self._spec
        group = spec.num_value_heads // spec.num_key_heads
        values = group * spec.value_dim
        num_qkvz = spec.conv_channels + self._sizes[1]
        for rows, sizes in (
            (self._in_proj.weight[:num_qkvz], [spec.key_dim, spec.key_dim, values, values]),
            (self._in_proj.weight[num_qkvz:], [group, group]),
        ):
            per_head = rows.view(spec.num_key_heads, sum(sizes), -1)
            by_kind = [part.flatten(0, 1) for part in per_head.split(sizes, dim=1)]
            rows.copy_(torch.cat(by_kind))
