"""The multi-token-prediction head of the Qwen family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.core.footprint import mtp_layer
from gapless.layers.linear import Linear
from gapless.layers.norm import RmsNorm
from gapless.models.decoder import DecoderLayer, Loadable
from gapless.models.loader import IgnoreRule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch import Tensor

    from gapless.core.architecture import Architecture
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target
    from gapless.models.decoder import Decoder


MTP_RULE = IgnoreRule(r"mtp\..*", "MTP tensors: speculation is off")


def num_stored_layers(names: Iterable[str]) -> int:
    """Count the MTP layers among canonical tensor names."""
    return len({name.split(".")[2] for name in names if name.startswith("mtp.layers.")})


class MtpHead:
    """Full-attention layers behind a merge of a token's embedding with the hidden state before it.

    Embedding and vocabulary head are the trunk's. Norms are zero-centred. The hidden state is the
    trunk's after its final norm, and for further passes this head's own after its norm.
    """

    def __init__(self, spec: Architecture, place: Placement) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        layer = mtp_layer(spec)
        self._merge = Linear(2 * size, size, place)
        self._norms = {
            name: RmsNorm(size, eps, place, is_zero_centred=True)
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        }
        self._layers = [
            DecoderLayer(size, layer, place, eps=eps, is_zero_centred=True)
            for _ in range(spec.num_mtp_layers)
        ]

    def forward(
        self,
        trunk: Decoder,
        token_ids: Tensor,  # [T]: the tokens at the batch's positions
        hidden: Tensor,  # [T, D]: hidden states one position before
        memory: Sequence[LayerMemory],
        batch: AttentionBatch,
    ) -> Tensor:  # [T, D]
        """Return hidden states whose logits propose the tokens one position later."""
        embedded = self._norms["pre_fc_norm_embedding"](trunk.embed(token_ids))
        normed = self._norms["pre_fc_norm_hidden"](hidden)
        x = self._merge(torch.cat((embedded, normed), dim=-1))
        rotary = trunk.rotary_at(batch.positions)
        for layer, layer_memory in zip(self._layers, memory, strict=True):
            x = layer(x, rotary, layer_memory, batch)
        return self._norms["norm"](x)

    def targets(self, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and the tensors they fill, see `Decoder.targets`."""
        found: dict[str, Target] = {
            f"mtp.{name}.weight": norm.weight for name, norm in self._norms.items()
        }
        found["mtp.fc.weight"] = self._merge.weight
        for index, layer in enumerate(self._layers):
            found |= layer.targets(f"mtp.layers.{index}.", stored_names)
        return found

    def finalize(self) -> None:
        """Derive what is derived from weights, once, after loading."""
        parts: list[Loadable] = [*self._norms.values(), *self._layers]
        for part in parts:
            part.finalize()
