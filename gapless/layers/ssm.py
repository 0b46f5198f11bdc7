"""Mamba-2: short convolution, scalar-decay recurrence without a correction, gate and norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.parallel import linear_of_rank
from gapless.core.specs.linear import GateOrder
from gapless.layers.linear import Linear, PartialLinear
from gapless.layers.recurrence import RecurrentInputs, convolve, linear_inputs, run_recurrence
from gapless.layers.shard import target
from gapless.ops.ssm_gates import discretise, skip_gate_norm

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.linear import SsmSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class Mamba2:
    """`dt = clamp(softplus(dt + dt_bias))`, `log_decay = -exp(A_log) dt`, `v = dt x`, `k = B`,
    `q = C`; the output is `S C + D x`, with x as the convolution gives it.

    Dao and Gu 2024, "Transformers are SSMs", section 7 and listing 1. The time step is clamped on
    every path alike: what a token does to the state cannot depend on how it came in. A rank keeps a
    share of the groups and the heads that belong to them.
    """

    def __init__(self, hidden_size: int, spec: SsmSpec, place: Placement, *, eps: float) -> None:
        inner, group_size = spec.inner_size, spec.num_key_heads * spec.key_dim
        self._channels = place.share(inner, group_size, group_size)
        self._in_share = place.share(inner, inner, group_size, group_size, spec.num_value_heads)
        self._inner = place.share(inner)
        self._heads = place.share(spec.num_value_heads)
        self._spec = spec = linear_of_rank(spec, place.world_size)
        self._eps = eps
        self._communicator = place.communicator
        self._in_proj = Linear(hidden_size, spec.num_rows, place, has_bias=spec.has_bias)
        self._out_proj = PartialLinear(
            self._inner, hidden_size, place, has_bias=spec.has_output_bias
        )
        self._conv = place.weight(spec.conv_channels, spec.conv_width)
        self._conv_bias = place.weight(spec.conv_channels) if spec.has_conv_bias else None
        self._neg_decay_rate, self._dt_bias, self._skip = (
            place.acc_weight(spec.num_value_heads) for _ in range(3)
        )
        self._norm = place.acc_weight(spec.inner_size)

    def __call__(self, x: Tensor, memory: LayerMemory, batch: AttentionBatch) -> Tensor:
        """Map `[T, D]` to `[T, D]`, writing rings (decode) or rings and checkpoints (prefill)."""
        return self._communicator.all_reduce(self.term(x, memory, batch))

    def term(self, x: Tensor, memory: LayerMemory, batch: AttentionBatch) -> Tensor:
        """Do the same up to this rank's term `[T, D]` of the output."""
        memory, batch = linear_inputs(memory, batch)
        spec = self._spec
        sizes = [spec.inner_size, spec.conv_channels, spec.num_value_heads]
        z, mixed, dt = self._in_proj(x).split(sizes, dim=-1)
        mixed = convolve(mixed, self._conv, memory, batch, bias=self._conv_bias)
        group_size = spec.num_key_heads * spec.key_dim
        values, keys, queries = mixed.split([spec.inner_size, group_size, group_size], dim=-1)
        discrete, log_decay = discretise(
            values, dt, self._dt_bias, self._neg_decay_rate, limit=spec.time_step_limit
        )
        inputs = RecurrentInputs(
            q=queries, k=keys, v=discrete, beta=None, log_decay=log_decay, scale=1.0
        )
        out = run_recurrence(inputs, spec, memory, batch)
        out = skip_gate_norm(
            out.flatten(1),
            values,
            z,
            self._skip,
            self._norm,
            eps=self._eps,
            num_groups=spec.num_key_heads,
            order=spec.gate_order,
        )
        return self._out_proj(out)

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        found = self._in_proj.targets(prefix, {"in_proj": self._in_share})
        found |= self._out_proj.targets(f"{prefix}out_proj")
        found |= {
            f"{prefix}conv1d.weight": target(self._conv.unsqueeze(1), 0, self._channels),
            f"{prefix}A_log": target(self._neg_decay_rate, 0, self._heads),
            f"{prefix}dt_bias": target(self._dt_bias, 0, self._heads),
            f"{prefix}D": target(self._skip, 0, self._heads),
        }
        if self._conv_bias is not None:
            found[f"{prefix}conv1d.bias"] = target(self._conv_bias, 0, self._channels)
        if self._spec.gate_order is not GateOrder.GATE_ALONE:
            found[f"{prefix}norm.weight"] = target(self._norm, 0, self._inner)
        return found

    def finalize(self) -> None:
        """Turn the loaded `A_log` into `-exp(A_log)`, once."""
        self._neg_decay_rate.exp_().neg_()
