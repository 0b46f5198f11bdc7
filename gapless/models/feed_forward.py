"""Reads the feed-forward blocks of a model, one per layer, from its config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.architecture import MlpSpec, MoeSpec
from gapless.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig


def dense_mlps(hf: HfConfig) -> tuple[MlpSpec, ...]:
    """Return the same dense block for every layer.

    Raises:
        UnsupportedModel: the blocks are not gated by SiLU, or have biases.
    """
    return (_dense_mlp(hf),) * hf.integer("num_hidden_layers", low=1)


def sparse_mlps(hf: HfConfig, *, renormalises: bool) -> tuple[MlpSpec | MoeSpec, ...]:
    """Return experts for every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`.

    Args:
        renormalises: whether chosen weights are divided by their sum; the model's code says so,
            or its config.

    Raises:
        ModelError: the config activates more experts than there are.
        UnsupportedModel: the blocks are not gated by SiLU, or have biases.
    """
    # transformers saves qwen3_moe with the second name
    many = "num_experts" if hf.values.get("num_experts") is not None else "num_local_experts"
    num_experts, num_active = hf.integer(many), hf.integer("num_experts_per_tok", low=1)
    step = hf.integer("decoder_sparse_step", 1, low=1)
    dense_layers = hf.integers("mlp_only_layers")
    is_sparse = [
        num_experts > 0 and (index + 1) % step == 0 and index not in dense_layers
        for index in range(hf.integer("num_hidden_layers", low=1))
    ]
    if not any(is_sparse):
        return dense_mlps(hf)
    if num_active > num_experts:
        raise ModelError(
            f"{hf.path}: num_experts_per_tok is {num_active}, want at most {many}, which is "
            f"{num_experts}; the config is damaged"
        )
    _check_blocks(hf)
    sparse = MoeSpec(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=hf.integer("moe_intermediate_size", low=1),
        shared_size=hf.integer("shared_expert_intermediate_size", 0),
        renormalises=renormalises,
    )
    # configs of models without dense layers give no size for them
    return tuple(sparse if chosen else _dense_mlp(hf) for chosen in is_sparse)


def _dense_mlp(hf: HfConfig) -> MlpSpec:
    _check_blocks(hf)
    return MlpSpec(hf.integer("intermediate_size", low=1))


def _check_blocks(hf: HfConfig) -> None:
    activation = hf.optional_string("hidden_act")
    if activation not in (None, "silu"):
        raise UnsupportedModel(
            f"{hf.path}: hidden_act is {activation!r}, want 'silu': this kind of {hf.model_type} "
            "is not supported, serve another model"
        )
    if hf.boolean("mlp_bias", default=False):
        raise UnsupportedModel(
            f"{hf.path}: mlp_bias is true, want false: this kind of {hf.model_type} is not "
            "supported, serve another model"
        )
