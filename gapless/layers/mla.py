"""Multi-head latent attention over pages of latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapless.core.parallel import latent_of_rank
from gapless.layers.linear import Linear, PartialLinear
from gapless.layers.shard import Share, target
from gapless.ops.norm import rms_norm
from gapless.ops.rope import apply_rotary

if TYPE_CHECKING:
    from gapless.core.specs.attention import LatentSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target

# Of the latents' norms, fixed by the model families whatever rms_norm_eps says: their own modelling
# code and transformers leave these two norms at the class default. Engines that take rms_norm_eps
# (1e-5 in Kimi-Linear and GLM) compute another function where latents are small.
LATENT_NORM_EPS = 1e-6


class LatentAttention:
    """Queries absorb the key projection, and the value projection follows the mix.

    So decode, verify and prefill all attend to the latents in the pages as they are, formulas in
    `ops/mla/reference.py`. A rank keeps a share of the heads; projections to latents are whole, and
    so every rank writes the same pages.
    """

    def __init__(self, hidden_size: int, spec: LatentSpec, place: Placement) -> None:
        head_dim = spec.nope_dim + spec.rope_dim
        self._q_share = place.share(spec.num_heads * head_dim)
        self._kv_share = place.share(spec.num_heads * (spec.nope_dim + spec.value_dim))
        out_share = place.share(spec.num_heads * spec.value_dim)
        self._spec = spec = latent_of_rank(spec, place.world_size)
        self._communicator = place.communicator
        latents = Share.whole(spec.kv_lora_rank + spec.rope_dim)
        if spec.q_lora_rank:
            queries = {"q_a_proj": Share.whole(spec.q_lora_rank)}
            self._q_up = Linear(spec.q_lora_rank, self._q_share.length, place)
        else:
            queries = {"q_proj": self._q_share}
        self._in_shares = {**queries, "kv_a_proj_with_mqa": latents}
        self._sizes = [share.length for share in self._in_shares.values()]
        self._in_proj = Linear(hidden_size, sum(self._sizes), place)
        self._out_proj = PartialLinear(out_share, hidden_size, place)
        self._q_norm = place.acc_weight(spec.q_lora_rank)
        self._kv_norm = place.acc_weight(spec.kv_lora_rank)
        self._kv_up = place.weight(self._kv_share.length, spec.kv_lora_rank)
        # of each head [N, R], for keys, and [V, R], for values
        self._key_up, self._value_up = self._kv_up.view(
            spec.num_heads, spec.nope_dim + spec.value_dim, spec.kv_lora_rank
        ).split([spec.nope_dim, spec.value_dim], dim=1)

    def __call__(
        self, x: Tensor, rotary: Tensor, memory: LayerMemory, batch: AttentionBatch
    ) -> Tensor:
        """Attend `[T, D]` to `[T, D]`, writing this forward's latents into the pages."""
        assert isinstance(memory, Tensor), "a latent-attention layer's memory is a pool of entries"
        spec = self._spec
        queries, entry = self._in_proj(x).split(self._sizes, dim=-1)
        if spec.q_lora_rank:
            queries = self._q_up(rms_norm(queries, self._q_norm, LATENT_NORM_EPS))
        q = queries.unflatten(1, (spec.num_heads, -1))
        q_nope, q_rope = q.split([spec.nope_dim, spec.rope_dim], dim=-1)
        latent, k_rope = entry.split([spec.kv_lora_rank, spec.rope_dim], dim=-1)
        if spec.rotary is not None:
            q_rope = apply_rotary(q_rope, rotary)
            k_rope = apply_rotary(k_rope[:, None], rotary)[:, 0]
        latent = rms_norm(latent, self._kv_norm, LATENT_NORM_EPS)
        memory.index_copy_(0, batch.kv_write, torch.cat([latent, k_rope], dim=-1))
        absorbed = torch.bmm(q_nope.transpose(0, 1), self._key_up).transpose(0, 1)
        mixed = batch.attention.run_latent(
            torch.cat([absorbed, q_rope], dim=-1), memory, spec.scale, value_dim=spec.kv_lora_rank
        )
        out = torch.bmm(mixed.transpose(0, 1), self._value_up.transpose(1, 2)).transpose(0, 1)
        return self._communicator.all_reduce(self._out_proj(out.flatten(1)))

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        found = self._in_proj.targets(prefix, self._in_shares)
        found |= self._out_proj.targets(f"{prefix}o_proj")
        found[f"{prefix}kv_a_layernorm.weight"] = self._kv_norm
        found[f"{prefix}kv_b_proj.weight"] = target(self._kv_up, 0, self._kv_share)
        if self._spec.q_lora_rank:
            found[f"{prefix}q_a_layernorm.weight"] = self._q_norm
            found |= self._q_up.targets(prefix, {"q_b_proj": self._q_share})
        return found

    def finalize(self) -> None:
        """Put rotated channels that are stored in pairs into two halves, once, after loading.

        Scores are sums over channels, so any order serves that queries and keys share.
        """
        spec = self._spec
        if spec.rotary is None or not spec.is_interleaved:
            return
        queries = self._q_up.weight if spec.q_lora_rank else self._in_proj.weight[: self._sizes[0]]
        per_head = queries.view(spec.num_heads, spec.nope_dim + spec.rope_dim, -1)
        for rows in (*per_head[:, spec.nope_dim :], self._in_proj.weight[-spec.rope_dim :]):
            rows.copy_(torch.cat([rows[0::2], rows[1::2]]))
