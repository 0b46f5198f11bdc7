"""DeepSeek-V3: V2's layers with a sigmoid router that has a bias, and an MTP layer behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, MtpNames
from gapless.core.specs.feed_forward import Scoring
from gapless.errors import UnsupportedModel
from gapless.models.decoder import head_rules
from gapless.models.deepseek_v2 import build, latent_model
from gapless.models.feed_forward import grouped_moe, sparse_behind_dense
from gapless.models.mtp import next_layer_rules

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.models.loader import IgnoreRule

__all__ = ["architecture", "build", "ignore_rules"]


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    for key, wanted in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        found = hf.optional_string(key) or wanted
        if found != wanted:
            raise UnsupportedModel(
                f"{hf.path}: {key} is {found!r}, want {wanted!r}: this kind of {hf.model_type} is "
                "not supported, serve another model"
            )
    sparse = grouped_moe(hf, Scoring.BIASED_SIGMOID)
    spec = latent_model(hf, sparse_behind_dense(hf, sparse))
    return with_next_layer(hf, spec)


def with_next_layer(hf: HfConfig, spec: Architecture) -> Architecture:
    """Add the MTP layer that the config announces."""
    num_layers = hf.integer("num_nextn_predict_layers", 0)
    return replace(spec, num_mtp_layers=num_layers, mtp_names=MtpNames.NEXT_LAYER)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return [*head_rules(spec), *next_layer_rules(spec)]
