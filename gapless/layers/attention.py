"""Full attention over pages, with optional q/k norm, partial rotary embedding and output gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from gapless.core.parallel import attention_of_rank
from gapless.layers.linear import Linear, PartialLinear
from gapless.ops.gates import sigmoid_gate
from gapless.ops.qk_norm_rope import qk_norm_rope

if TYPE_CHECKING:
    from gapless.core.specs.attention import AttentionSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class Attention:
    """Grouped-query attention; q, k, v and the gate come from one projection.

    Checkpoints interleave the gate with q, head by head; `finalize` reorders the rows to
    `[gate | q | k | v]`, so that q and k are normalised and rotated together. A rank keeps a share
    of the heads.
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
        q_dim = spec.head_dim * (2 if spec.has_output_gate else 1)
        kv_share = place.head_share(spec.num_kv_heads, spec.head_dim)
        self._in_shares = {
            "q_proj": place.share(spec.num_heads * q_dim),
            "k_proj": kv_share,
            "v_proj": kv_share,
        }
        out_share = place.share(spec.num_heads * spec.head_dim)
        self._spec = spec = attention_of_rank(spec, place.world_size)
        self._eps = eps
        self._communicator = place.communicator
        self._q_size, self._kv_size = out_share.length, kv_share.length
        in_rows = sum(share.length for share in self._in_shares.values())
        self._in_proj = Linear(hidden_size, in_rows, place, has_bias=spec.has_bias)
        self._out_proj = PartialLinear(out_share, hidden_size, place, has_bias=spec.has_output_bias)
        self._norm_shift = 1.0 if is_zero_centred else 0.0
        self._q_norm = place.acc_weight(spec.head_dim)
        self._k_norm = place.acc_weight(spec.head_dim)
        self._qk_norm = place.acc_weight(spec.num_heads + spec.num_kv_heads, spec.head_dim)

    def __call__(
        self, x: Tensor, rotary: Tensor, memory: LayerMemory, batch: AttentionBatch
    ) -> Tensor:
        """Attend `[T, D]` to `[T, D]`, writing this forward's keys and values into the pages."""
        return self._communicator.all_reduce(self.term(x, rotary, memory, batch))

    def term(self, x: Tensor, rotary: Tensor, memory: LayerMemory, batch: AttentionBatch) -> Tensor:
        """Do the same up to this rank's term `[T, D]` of the output."""
        assert isinstance(memory, Tensor), "an attention layer's memory is a KV pool"
        spec = self._spec
        projected = self.project(x)
        gate_size = self._q_size if spec.has_output_gate else 0
        gate, qkv = projected.split([gate_size, self._q_size + 2 * self._kv_size], dim=-1)
        q = qk_norm_rope(
            qkv,
            rotary,
            memory,
            batch.kv_write,
            norm_weight=self._qk_norm if spec.has_qk_norm else None,
            eps=self._eps,
        )
        out = batch.attention.run(q, memory, spec.scale).flatten(1)
        if spec.has_output_gate:
            out = sigmoid_gate(out, gate)
        return self._out_proj(out)

    def project(self, x: Tensor) -> Tensor:
        """Map `[T, D]` to the gate, if there is one, queries, keys and values side by side."""
        return self._in_proj(x)

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        found = self._in_proj.targets(prefix, self._in_shares)
        found |= self._out_proj.targets(f"{prefix}o_proj")
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
