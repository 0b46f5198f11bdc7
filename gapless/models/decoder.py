"""The decoder that every registered model is built from: embedding, pre-norm layers, head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.core.architecture import Architecture, LayerSpec, MoeSpec
from gapless.core.parallel import head_rows
from gapless.layers.mlp import GatedMlp
from gapless.layers.moe import SparseMlp
from gapless.layers.norm import RmsNorm
from gapless.layers.shard import target
from gapless.models.loader import IgnoreRule
from gapless.models.mixers import SPARSE_BLOCKS, NormStyle, make_mixer
from gapless.ops.rope import rotary_table
from gapless.ops.rope.yarn import yarn_table

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class Loadable(Protocol):
    """A part of a model that has weights."""

    def finalize(self) -> None:
        """Derive what is derived from weights, once, after loading."""
        ...


class DecoderLayer:
    """`x + mixer(norm(x))`, then `x + block(norm(x))`, with the names that most families share."""

    def __init__(
        self, hidden_size: int, spec: LayerSpec, place: Placement, norm: NormStyle
    ) -> None:
        self._mixer_name, self._mixer = make_mixer(hidden_size, spec.mixer, place, norm)
        self._mlp = (
            SPARSE_BLOCKS[type(spec.mlp)](hidden_size, spec.mlp, place)
            if isinstance(spec.mlp, MoeSpec)
            else GatedMlp(hidden_size, spec.mlp, place)
        )
        self._input_norm, self._mlp_norm = (
            RmsNorm(hidden_size, norm.eps, place, is_zero_centred=norm.is_zero_centred)
            for _ in range(2)
        )

    def __call__(
        self,
        x: Tensor,
        term: Tensor | None,
        rotary: Tensor,
        memory: LayerMemory,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """Map `x + term` `[T, D]` to such a pair: the next norm adds it up."""
        x, normed = self._input_norm.of_sum(x, term)
        x, normed = self._mlp_norm.of_sum(x, self._mixer(normed, rotary, memory, batch))
        if isinstance(self._mlp, SparseMlp):
            return x, self._mlp(normed, batch.live)
        return x, self._mlp(normed)

    def targets(self, prefix: str, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and where they go, see `Decoder.targets`."""
        found: dict[str, Target] = {
            f"{prefix}input_layernorm.weight": self._input_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self._mlp_norm.weight,
        }
        found |= self._mixer.targets(f"{prefix}{self._mixer_name}.")
        if isinstance(self._mlp, SparseMlp):
            return found | self._mlp.targets(f"{prefix}mlp.", stored_names)
        return found | self._mlp.targets(f"{prefix}mlp.")

    def finalize(self) -> None:
        """Finalize the parts."""
        self._input_norm.finalize()
        self._mlp_norm.finalize()
        self._mixer.finalize()


class Decoder:
    """A causal language model over the memory that the runner owns.

    The vocabulary head's rows are split over the ranks and the logits gathered, so that all ranks
    sample from the same bits.
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
        norm = NormStyle(spec.norm_eps, is_zero_centred)
        self._layers = [DecoderLayer(spec.hidden_size, layer, place, norm) for layer in spec.layers]
        self._norm = RmsNorm(
            spec.hidden_size, spec.norm_eps, place, is_zero_centred=is_zero_centred
        )
        rows = head_rows(spec.vocab_size, place.world_size)
        self._head_share = place.padded_share(spec.vocab_size, rows)
        # a tied head is part of the embedding, unless its products want the other layout
        self._copies_embedding = spec.ties_embeddings and (
            place.is_input_major or self._head_share.length < rows
        )
        if spec.ties_embeddings and not self._copies_embedding:
            self._head = self._own_embeddings()
        else:
            self._head = place.matrix(rows, spec.hidden_size)
            self._head[self._head_share.length :].zero_()
        self._communicator = place.communicator
        self._rotary = _rotary(architecture, num_positions, place)

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
        return F.embedding(token_ids, self._embedding)

    def rotary_at(self, positions: Tensor) -> Tensor:
        """Return the rotary table's rows at `positions` [T]."""
        return self._rotary.index_select(0, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project `[N, D]` to vocabulary logits `[N, V]`, float32 or more."""
        logits = self._communicator.all_gather(F.linear(hidden, self._head))
        return logits[:, : self.architecture.vocab_size].to(self._acc_dtype)

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


def head_rules(spec: Architecture) -> list[IgnoreRule]:
    """Rules for a stored head that is a copy of the embedding."""
    if not spec.ties_embeddings:
        return []
    copied = "model.embed_tokens.weight"
    return [IgnoreRule(r"lm_head\.weight", "the head is the embedding", copy_of=copied)]


def _rotary(architecture: Architecture, num_positions: int, place: Placement) -> Tensor:
    specs = {spec.rotary for spec in architecture.attention_layers} - {None}
    if not specs:
        return torch.empty(num_positions, 0, dtype=place.acc_dtype, device=place.device)
    assert len(specs) == 1, "all attention layers rotate alike"
    spec = specs.pop()
    assert spec is not None, "what rotates has a rotary embedding"
    if spec.yarn is not None:
        return yarn_table(num_positions, spec, spec.yarn, place.acc_dtype, place.device)
    return rotary_table(num_positions, spec.dim, spec.theta, place.acc_dtype, place.device)
