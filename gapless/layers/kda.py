"""Kimi Delta Attention: short convolutions, delta recurrence with a decay per key channel, norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from gapless.core.parallel import linear_of_rank
from gapless.layers.linear import Linear, PartialLinear
from gapless.layers.recurrence import (
    RecurrentInputs,
    convolve_qkv,
    linear_inputs,
    run_recurrence,
)
from gapless.layers.shard import Share, target
from gapless.ops.norm import gated_rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.linear import KdaSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class KimiDeltaAttention:
    """`beta = sigmoid(b)`, `log_decay = -exp(A_log) softplus(f_b(f_a(x)) + dt_bias)` by channel.

    Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 4. The
    output is normalised by head and gated by `sigmoid(g_b(g_a(x)))`. A rank keeps a share of the
    heads; `f_a` and `g_a` are whole.
    """

    def __init__(self, hidden_size: int, spec: KdaSpec, place: Placement, *, eps: float) -> None:
        key_share = place.share(spec.num_key_heads * spec.key_dim)
        value_share = place.share(spec.num_value_heads * spec.value_dim)
        self._head_share = place.share(spec.num_value_heads)
        gate_share = Share.whole(spec.gate_rank)
        self._in_shares = {
            "q_proj": key_share,
            "k_proj": key_share,
            "v_proj": value_share,
            "b_proj": self._head_share,
            "f_a_proj": gate_share,
            "g_a_proj": gate_share,
        }
        self._decay_share, self._value_share = key_share, value_share
        self._spec = spec = linear_of_rank(spec, place.world_size)
        self._eps = eps
        self._communicator = place.communicator
        heads, rank = spec.num_value_heads, spec.gate_rank
        self._sizes = [spec.conv_channels, heads, rank, rank]
        self._in_proj = Linear(hidden_size, sum(self._sizes), place)
        self._decay_proj = Linear(rank, key_share.length, place)
        self._gate_proj = Linear(rank, value_share.length, place)
        self._out_proj = PartialLinear(value_share, hidden_size, place)
        self._conv = place.weight(spec.conv_channels, spec.conv_width)
        self._neg_decay_rate = place.acc_weight(heads)
        self._dt_bias = place.acc_weight(key_share.length)
        self._norm = place.acc_weight(spec.value_dim)

    def __call__(self, x: Tensor, memory: LayerMemory, batch: AttentionBatch) -> Tensor:
        """Map `[T, D]` to `[T, D]`, writing rings (decode) or rings and checkpoints (prefill)."""
        memory, batch = linear_inputs(memory, batch)
        spec, acc = self._spec, self._dt_bias.dtype
        mixed, b, decay, gate = self._in_proj(x).split(self._sizes, dim=-1)
        q, k, v = convolve_qkv(mixed, self._conv, spec, memory, batch)
        log_decay = F.softplus(self._decay_proj(decay).to(acc) + self._dt_bias)
        log_decay = log_decay.view(-1, spec.num_value_heads, spec.key_dim)
        inputs = RecurrentInputs(
            q, k, v, b.to(acc).sigmoid(), log_decay * self._neg_decay_rate[:, None],
            scale=spec.key_dim**-0.5,
        )  # fmt: skip
        out = run_recurrence(inputs, spec, memory, batch)
        gates = self._gate_proj(gate).view(out.shape)
        out = gated_rms_norm(out, gates, self._norm, self._eps, activation="sigmoid")
        return self._communicator.all_reduce(self._out_proj(out.flatten(1)))

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        heads = self._head_share
        found = self._in_proj.targets(prefix, self._in_shares)
        found |= self._decay_proj.targets(prefix, {"f_b_proj": self._decay_share})
        found |= self._gate_proj.targets(prefix, {"g_b_proj": self._value_share})
        found |= self._out_proj.targets(f"{prefix}o_proj")
        start = 0
        for name in ("q", "k", "v"):
            share = self._in_shares[f"{name}_proj"]
            rows = self._conv.narrow(0, start, share.length).unsqueeze(1)
            found[f"{prefix}{name}_conv1d.weight"] = target(rows, 0, share)
            start += share.length
        return found | {
            f"{prefix}A_log": target(self._neg_decay_rate.view(1, 1, -1, 1), 2, heads),
            f"{prefix}dt_bias": target(self._dt_bias, 0, self._decay_share),
            f"{prefix}o_norm.weight": self._norm,
        }

    def finalize(self) -> None:
        """Turn the loaded `A_log` into `-exp(A_log)`, once."""
        self._neg_decay_rate.exp_().neg_()
