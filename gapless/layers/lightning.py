"""Lightning attention: linear attention with a fixed decay per head, one norm, an output gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from gapless.core.parallel import linear_of_rank
from gapless.layers.linear import Linear, PartialLinear
from gapless.layers.recurrence import RecurrentInputs, linear_inputs, run_recurrence
from gapless.layers.wide_norm import WideNorms
from gapless.ops.gates import sigmoid_gate

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.linear import LightningSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class LightningAttention:
    """`S_t = exp(-s) S_{t-1} + v k^T`, `o = S q`, with q, k and v behind SiLU; the output is
    `norm(o) * sigmoid(gate)`, all heads one row of the norm.

    Qin et al. 2024, "Various Lengths, Constant Speed: Efficient Language Modeling with Lightning
    Attention", section 3. Checkpoints store the rows of q, k and v head by head; `finalize`
    reorders them. A rank keeps a share of the heads.
    """

    def __init__(self, hidden_size: int, spec: LightningSpec, place: Placement) -> None:
        heads, inner = place.share(spec.num_value_heads), place.share(spec.inner_size)
        self._in_shares = {"qkv_proj": place.share(3 * spec.inner_size), "output_gate": inner}
        ((first, count),) = heads.ranges
        log_decays = spec.log_decays[first : first + count]
        self._spec = spec = linear_of_rank(spec, place.world_size)
        self._communicator = place.communicator
        self._in_proj = Linear(hidden_size, 4 * spec.inner_size, place)
        self._out_proj = PartialLinear(inner, hidden_size, place)
        self._norms = WideNorms((inner,), spec.norm_eps, place)
        self._log_decay = torch.tensor(log_decays, dtype=place.acc_dtype, device=place.device)

    def __call__(self, x: Tensor, memory: LayerMemory, batch: AttentionBatch) -> Tensor:
        """Map `[T, D]` to `[T, D]`, writing rings (decode) or checkpoints (prefill)."""
        memory, batch = linear_inputs(memory, batch)
        inner = self._spec.inner_size
        mixed, gate = self._in_proj(x).split([3 * inner, inner], dim=-1)
        q, k, v = F.silu(mixed).chunk(3, dim=-1)
        inputs = RecurrentInputs(
            q, k, v, None, self._log_decay.expand(len(x), -1), scale=1.0
        )  # fmt: skip
        out = run_recurrence(inputs, self._spec, memory, batch)
        (normed,) = self._norms(out.flatten(1))
        return self._communicator.all_reduce(self._out_proj(sigmoid_gate(normed, gate)))

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        found = self._in_proj.targets(prefix, self._in_shares)
        found |= self._out_proj.targets(f"{prefix}out_proj")
        return found | self._norms.targets((f"{prefix}norm",))

    def finalize(self) -> None:
        """Reorder rows `[q | k | v]` of each head to all q, all k, all v, once."""
        spec = self._spec
        rows = self._in_proj.weight[: 3 * spec.inner_size]
        per_head = rows.view(spec.num_value_heads, 3, spec.value_dim, -1)
        rows.copy_(per_head.transpose(0, 1).reshape(rows.shape))
