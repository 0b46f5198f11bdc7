"""Full attention over pages, with optional q/k norm, partial rotary embedding and output gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapless.layers.linear import Linear
from gapless.ops.norm import rms_norm
from gapless.ops.rope import apply_rotary

if TYPE_CHECKING:
    from gapless.core.architecture import AttentionSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement


class Attention:
    """Grouped-query attention; q, k, v and the gate come from one projection.

    Checkpoints interleave the gate with q, head by head; `finalize` reorders the rows to
    `[gate | q | k | v]`, so that q and k are normalised and rotated together.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        place: Placement,
        *,
        eps: float,
        is_zero_centred: bool,
    ) -> None:
        self._spec = spec
        self._eps = eps
        self._q_size = spec.num_heads * spec.head_dim
        self._kv_size = spec.num_kv_heads * spec.head_dim
        q_rows = self._q_size * (2 if spec.has_output_gate else 1)
        self._in_proj = Linear(
            hidden_size, q_rows + 2 * self._kv_size, place, has_bias=spec.has_bias
        )
        self._out_proj = Linear(self._q_size, hidden_size, place, has_bias=spec.has_bias)
        self._norm_shift = 1.0 if is_zero_centred else 0.0
        self._q_norm = place.acc_weight(spec.head_dim)
        self._k_norm = place.acc_weight(spec.head_dim)
        self._qk_norm = place.acc_weight(spec.num_heads + spec.num_kv_heads, spec.head_dim)
        self._unit = torch.ones(spec.head_dim, dtype=place.acc_dtype, device=place.device)

    def __call__(
        self, x: Tensor, rotary: Tensor, memory: LayerMemory, batch: AttentionBatch
    ) -> Tensor:
        """Attend `[T, D]` to `[T, D]`, writing this forward's keys and values into the pages."""
        assert isinstance(memory, Tensor), "an attention layer's memory is a KV pool"
        spec, tokens = self._spec, x.shape[0]
        projected = self._in_proj(x)
        gate_size = self._q_size if spec.has_output_gate else 0
        gate, qk, v = projected.split(
            [gate_size, self._q_size + self._kv_size, self._kv_size], dim=-1
        )
        qk = qk.reshape(tokens, -1, spec.head_dim)
        if spec.has_qk_norm:
            qk = (rms_norm(qk, self._unit, self._eps) * self._qk_norm).to(x.dtype)
        qk = apply_rotary(qk, rotary)
        q, k = qk.split([spec.num_heads, spec.num_kv_heads], dim=1)
        memory.select(1, 0).index_copy_(0, batch.kv_write, k)
        memory.select(1, 1).index_copy_(0, batch.kv_write, v.view(k.shape))
        out = batch.attention.run(q, memory, spec.head_dim**-0.5).reshape(tokens, -1)
        if spec.has_output_gate:
            out = out * gate.sigmoid()
        return self._out_proj(out)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names and where they go."""
        found = self._in_proj.targets(
            prefix,
            {
                "q_proj": self._in_proj.weight.shape[0] - 2 * self._kv_size,
                "k_proj": self._kv_size,
                "v_proj": self._kv_size,
            },
        ) | self._out_proj.targets(prefix, {"o_proj": self._out_proj.weight.shape[0]})
        if self._spec.has_qk_norm:
            found[f"{prefix}q_norm.weight"] = self._q_norm
            found[f"{prefix}k_norm.weight"] = self._k_norm
        return found

    def finalize(self) -> None:
        """Reorder the gate's rows and join the norms, once, after loading."""
        spec = self._spec
        if spec.has_output_gate:
            for loaded in (self._in_proj.weight, self._in_proj.bias):
                if loaded is not None:
                    rows = loaded[: 2 * self._q_size]
                    per_head = rows.view(spec.num_heads, 2, spec.head_dim, *rows.shape[1:])
                    rows.copy_(per_head.flip(1).transpose(0, 1).reshape(rows.shape))
        self._qk_norm[: spec.num_heads] = self._q_norm + self._norm_shift
        self._qk_norm[spec.num_heads :] = self._k_norm + self._norm_shift
