"""The decoder that every registered model is built from: embedding, pre-norm layers, head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.core.parallel import head_rows
from gapless.core.specs.attention import AttentionSpec
from gapless.layers.logits import LogitShard
from gapless.layers.norm import RmsNorm
from gapless.layers.shard import target
from gapless.models.loader import IgnoreRule
from gapless.models.mixers import NormStyle, make_block, make_mixer
from gapless.models.scaling import scale_weights
from gapless.ops.rope import rotary_table
from gapless.ops.rope.yarn import yarn_table
from gapless.ops.skinny_linear import Float8Matrix, skinny_linear

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gapless.core.architecture import Architecture, LayerSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target
    from gapless.models.mixers import Block, Mixer


class Loadable(Protocol):
    """A part of a model that has weights."""

    def finalize(self) -> None:
        """Derive what is derived from weights, once, after loading."""
        ...


class DecoderLayer:
    """`x + mixer(norm(x))`, then `x + block(norm(x))`, with the names that most families share;
    either may be missing."""

    def __init__(
        self, hidden_size: int, spec: LayerSpec, place: Placement, norm: NormStyle
    ) -> None:
        self._mixer: Mixer | None = None
        self._mlp: Block | None = None
        if spec.mixer is not None:
            self._input_norm = _norm(hidden_size, place, norm)
            self._mixer_prefix, self._mixer = make_mixer(hidden_size, spec.mixer, place, norm)
        if spec.mlp is not None:
            self._mlp_norm = _norm(hidden_size, place, norm)
            self._mlp = make_block(hidden_size, spec.mlp, place)

    def __call__(
        self,
        x: Tensor,
        term: Tensor | None,
        rotary: Tensor,
        memory: LayerMemory,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor | None]:
        """Map `x + term` `[T, D]` to such a pair: the next norm adds it up."""
        if self._mixer is not None:
            x, normed = self._input_norm.of_sum(x, term)
            term = self._mixer(normed, rotary, memory, batch)
        if self._mlp is not None:
            x, normed = self._mlp_norm.of_sum(x, term)
            term = self._mlp(normed, batch.live)
        return x, term

    def targets(self, prefix: str, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and where they go, see `Decoder.targets`."""
        found: dict[str, Target] = {}
        if self._mixer is not None:
            found[f"{prefix}input_layernorm.weight"] = self._input_norm.weight
            found |= self._mixer.targets(f"{prefix}{self._mixer_prefix}")
        if self._mlp is not None:
            found[f"{prefix}post_attention_layernorm.weight"] = self._mlp_norm.weight
            found |= self._mlp.targets(f"{prefix}mlp.", stored_names)
        return found

    def finalize(self) -> None:
        """Finalize the parts."""
        if self._mixer is not None:
            self._input_norm.finalize()
            self._mixer.finalize()
        if self._mlp is not None:
            self._mlp_norm.finalize()


class Decoder:
    """A causal language model over the memory that the runner owns.

    The vocabulary head's rows are split over the ranks: each makes the logits of its own tokens.
    """

    def __init__(
        self,
        architecture: Architecture,
        place: Placement,
        *,
        num_positions: int,
        is_zero_centred: bool,
    ) -> None:
        """Args: num_positions: rows of the rotary table, beyond the context limit where steps run
        ahead of it."""
        spec = architecture
        self.architecture = architecture
        self._acc_dtype = place.acc_dtype
        self._embedding = place.weight(spec.vocab_size, spec.hidden_size)
        style = NormStyle(spec.norm_eps, is_zero_centred)
        self._layers = [self.make_layer(layer, place, style) for layer in spec.layers]
        self._norm = _norm(spec.hidden_size, place, style)
        rows = head_rows(spec.vocab_size, place.world_size)
        self._head_share = place.padded_share(spec.vocab_size, rows)
        self._first_id = place.rank * rows
        # a tied head is part of the embedding, unless its products want the other layout
        self._copies_embedding = spec.ties_embeddings and (
            place.is_input_major or self._head_share.length < rows
        )
        if spec.ties_embeddings and not self._copies_embedding:
            self._head = self._own_embeddings()
        else:
            self._head = place.matrix(rows, spec.hidden_size)
            self._head[self._head_share.length :].zero_()
        self._draft_head: Float8Matrix | None = None
        self._communicator = place.communicator
        self._rotary = _rotary(architecture, num_positions, place)

    def make_layer(self, spec: LayerSpec, place: Placement, norm: NormStyle) -> DecoderLayer:
        """Make a layer; families that put the norms elsewhere make their own."""
        return DecoderLayer(self.architecture.hidden_size, spec, place, norm)

    def forward(
        self, token_ids: Tensor, memory: Sequence[LayerMemory], batch: AttentionBatch
    ) -> Tensor:
        """Run `token_ids` [T] and return their post-final-norm hidden states [T, D]."""
        x: Tensor = self.embed(token_ids)
        term: Tensor | None = None
        rotary = self.rotary_at(batch.positions)
        for layer, layer_memory in zip(self._layers, memory, strict=True):
            x, term = layer(x, term, rotary, layer_memory, batch)
        return self._norm.of_sum(x, term)[1]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, D] of `token_ids` [T]."""
        found = F.embedding(token_ids, self._embedding)
        scale = self.architecture.embedding_scale
        return found if scale == 1.0 else found * scale

    def rotary_at(self, positions: Tensor) -> Tensor:
        """Return the rotary table's rows at `positions` [T]."""
        return self._rotary.index_select(0, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project `[N, D]` to vocabulary logits `[N, V]`, float32 or more."""
        return self.logit_shard(hidden).whole()

    def logit_shard(self, hidden: Tensor) -> LogitShard:
        """Project `[N, D]` to the logits of this rank's tokens, float32 or more."""
        return self._project(hidden, self._head)

    def draft_logit_shard(self, hidden: Tensor) -> LogitShard:
        """Return about the same, good enough for drafts: few rows read the copy that is kept."""
        copy = self._draft_head
        if copy is not None and copy.serves(len(hidden)):
            return self._project(hidden, copy)
        return self.logit_shard(hidden)

    def keep_draft_head(self) -> None:
        """Keep a copy of this rank's head in float8 for drafts; once, after loading."""
        self._draft_head = Float8Matrix.of(self._head)

    def _project(self, hidden: Tensor, head: Tensor | Float8Matrix) -> LogitShard:
        part = skinny_linear(hidden, head, out_dtype=self._acc_dtype)
        scale = self.architecture.logit_scale
        return LogitShard(
            part if scale == 1.0 else part * scale,
            self._first_id,
            self.architecture.vocab_size,
            self._communicator,
        )

    def targets(self, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and the tensors they fill.

        Args: stored_names: canonical names that the files hold; they decide only where one weight
        is stored in several ways. Empty without files.
        """
        found: dict[str, Target] = {
            "model.embed_tokens.weight": self._embedding,
            "model.norm.weight": self._norm.weight,
        }
        for index, layer in enumerate(self._layers):
            found |= layer.targets(f"model.layers.{index}.", stored_names)
        if not self.architecture.ties_embeddings:
            found["lm_head.weight"] = target(self._own_head(), 0, self._head_share)
        return found

    def finalize(self) -> None:
        """Derive what is derived from weights, once, after loading."""
        scale_weights(Decoder.targets(self, ()), self.architecture.weight_scales)
        if self._copies_embedding:
            self._own_head().copy_(self._own_embeddings())
        parts: list[Loadable] = [self._norm, *self._layers]
        for part in parts:
            part.finalize()

    def _own_head(self) -> Tensor:
        """The head's rows without padding."""
        return self._head[: self._head_share.length]

    def _own_embeddings(self) -> Tensor:
        """Embeddings of the tokens whose logits this rank makes."""
        if self._head_share.length == self.architecture.vocab_size:
            return self._embedding
        ((start, length),) = self._head_share.ranges
        return self._embedding[start : start + length]


def _norm(size: int, place: Placement, style: NormStyle) -> RmsNorm:
    return RmsNorm(size, style.eps, place, is_zero_centred=style.is_zero_centred)


def head_rules(
    spec: Architecture, *, embedding: str = "model.embed_tokens.weight"
) -> list[IgnoreRule]:
    """Rules for a stored head that is a copy of the embedding, whose name in the files is given."""
    if not spec.ties_embeddings:
        return []
    return [IgnoreRule(r"lm_head\.weight", "the head is the embedding", copy_of=embedding)]


def _rotary(architecture: Architecture, num_positions: int, place: Placement) -> Tensor:
    specs = {spec.rotary for spec in architecture.attention_layers}
    kept = specs - {None}
    plain = {s.rotary for s in architecture.attention_layers if isinstance(s, AttentionSpec)}
    assert max(len(kept), len(plain)) <= 1, "all attention layers rotate alike"
    spec = next(iter(kept), None)
    if spec is None:
        # attention knows one path: two channels are turned by an angle of 0
        still = torch.tensor([1.0, 0.0], dtype=place.acc_dtype, device=place.device)
        return still.repeat(num_positions, 1)
    if spec.yarn is not None:
        return yarn_table(num_positions, spec, spec.yarn, place.acc_dtype, place.device)
    return rotary_table(num_positions, spec.dim, spec.theta, place.acc_dtype, place.device)
