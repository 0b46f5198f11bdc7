"""The multi-token-prediction layer that checkpoints carry beside the model.

Three families store the same computation under other names: Qwen in `mtp.*`, with norms around
zero, DeepSeek and GLM as layer N behind the model's N layers (NextN), with plain norms, Nemotron-H
in `mtp.*` with plain norms, the layer's mixer as layer 0 and its block as layer 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.core.architecture import MtpNames
from gapless.core.footprint import mtp_layer
from gapless.layers.linear import Linear
from gapless.layers.norm import RmsNorm
from gapless.models.decoder import DecoderLayer
from gapless.models.loader import IgnoreRule
from gapless.models.mixers import NormStyle
from gapless.models.naming import StoredNames, spell

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from gapless.core.architecture import Architecture
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target
    from gapless.models.decoder import Decoder
    from gapless.models.naming import Spelling


MTP_RULE = IgnoreRule(r"mtp\..*", "MTP tensors: speculation is off")

# the mixer is layer 0, the block layer 1
PARTS_SPELLING: Spelling = (
    (r"layers\.0\.input_layernorm\.", "layers.0.norm."),
    (r"layers\.0\.self_attn\.", "layers.0.mixer."),
    (r"layers\.0\.post_attention_layernorm\.", "layers.1.norm."),
    (r"layers\.0\.mlp\.", "layers.1.mixer."),
)


def num_stored_layers(names: Collection[str]) -> int:
    """Count the MTP layers among canonical tensor names."""
    merges = [name for name in names if name.endswith(".eh_proj.weight")]
    if merges:
        return len(merges)
    return len({name.split(".")[2] for name in names if name.startswith("mtp.layers.")})


def next_layer_rules(spec: Architecture) -> list[IgnoreRule]:
    """Rules for MTP layers that are stored behind the model's own."""
    assert spec.mtp_names is MtpNames.NEXT_LAYER, "these are beside the model"
    first = len(spec.layers)
    numbers = "|".join(str(first + index) for index in range(max(1, spec.num_mtp_layers)))
    layer = rf"model\.layers\.({numbers})\."
    return [
        IgnoreRule(
            rf"{layer}(embed_tokens|shared_head\.head)\..*",
            "the MTP layer shares the model's embedding and head",
        ),
        IgnoreRule(rf"{layer}.*", MTP_RULE.reason),
    ]


@dataclass(frozen=True)
class _Names:
    """Where a family stores what."""

    layer: str  # prefix of the first layer's tensors
    merge: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    is_zero_centred: bool
    spelling: Spelling = ()

    @classmethod
    def of(cls, spec: Architecture) -> _Names:
        if spec.mtp_names is MtpNames.SEPARATE:
            return cls(
                layer="mtp.layers.0.",
                merge="mtp.fc",
                embedding_norm="mtp.pre_fc_norm_embedding",
                hidden_norm="mtp.pre_fc_norm_hidden",
                norm="mtp.norm",
                is_zero_centred=True,
            )
        if spec.mtp_names is MtpNames.PARTS:
            return cls(
                layer="mtp.layers.0.",
                merge="mtp.layers.0.eh_proj",
                embedding_norm="mtp.layers.0.enorm",
                hidden_norm="mtp.layers.0.hnorm",
                norm="mtp.layers.1.final_layernorm",
                is_zero_centred=False,
                spelling=PARTS_SPELLING,
            )
        layer = f"model.layers.{len(spec.layers)}."
        return cls(
            layer=layer,
            merge=f"{layer}eh_proj",
            embedding_norm=f"{layer}enorm",
            hidden_norm=f"{layer}hnorm",
            norm=f"{layer}shared_head.norm",
            is_zero_centred=False,
        )


class MtpHead:
    """A layer behind a merge of a token's embedding with the hidden state before it.

    The layer is like the model's last that attends over pages. Embedding and vocabulary head are
    the trunk's. The hidden state is the trunk's after its final norm, and for further passes this
    head's own after its norm.
    """

    def __init__(self, spec: Architecture, place: Placement) -> None:
        assert spec.num_mtp_layers == 1, "further passes run the one layer again"
        size = spec.hidden_size
        self._names = _Names.of(spec)
        style = NormStyle(spec.norm_eps, self._names.is_zero_centred)
        self._merge = Linear(2 * size, size, place)
        self._embedding_norm, self._hidden_norm, self._norm = (
            RmsNorm(size, style.eps, place, is_zero_centred=style.is_zero_centred) for _ in range(3)
        )
        self._layer = DecoderLayer(size, mtp_layer(spec), place, style)

    def forward(
        self,
        trunk: Decoder,
        token_ids: Tensor,  # [T]: the tokens at the batch's positions
        hidden: Tensor,  # [T, D]: hidden states one position before
        memory: Sequence[LayerMemory],
        batch: AttentionBatch,
    ) -> Tensor:  # [T, D]
        """Return hidden states whose logits propose the tokens one position later."""
        embedded = self._embedding_norm(trunk.embed(token_ids))
        x = self._merge(torch.cat((embedded, self._hidden_norm(hidden)), dim=-1))
        (layer_memory,) = memory
        x, term = self._layer(x, None, trunk.rotary_at(batch.positions), layer_memory, batch)
        return self._norm.of_sum(x, term)[1]

    def targets(self, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and the tensors they fill, see `Decoder.targets`."""
        names = self._names
        found: dict[str, Target] = {
            f"{names.merge}.weight": self._merge.weight,
            f"{names.embedding_norm}.weight": self._embedding_norm.weight,
            f"{names.hidden_norm}.weight": self._hidden_norm.weight,
            f"{names.norm}.weight": self._norm.weight,
        }
        own = StoredNames(stored_names, names.spelling)
        layer = self._layer.targets(names.layer, own)
        return found | {spell(name, names.spelling): target for name, target in layer.items()}

    def finalize(self) -> None:
        """Derive what is derived from weights, once, after loading."""
        for part in (self._embedding_norm, self._hidden_norm, self._norm, self._layer):
            part.finalize()
