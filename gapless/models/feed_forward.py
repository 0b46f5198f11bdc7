"""Reads the feed-forward blocks of a model, one per layer, from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.core.specs.feed_forward import GroupedMoeSpec, MlpSpec, MoeSpec
from gapless.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.specs.feed_forward import Scoring


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
    check_blocks(hf)
    sparse = MoeSpec(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=hf.integer("moe_intermediate_size", low=1),
        shared_size=hf.integer("shared_expert_intermediate_size", 0),
        renormalises=renormalises,
    )
    # configs of models without dense layers give no size for them
    return tuple(sparse if chosen else _dense_mlp(hf) for chosen in is_sparse)


@dataclass(frozen=True)
class RouterKeys:
    """What a family's config calls the sizes of a router of groups."""

    num_experts: str = "n_routed_experts"
    num_active: str = "num_experts_per_tok"
    num_shared: str = "n_shared_experts"
    num_groups: str = "n_group"
    renormalises: str = "norm_topk_prob"


def grouped_moe(
    hf: HfConfig, scoring: Scoring, *, limits_groups: bool = True, keys: RouterKeys | None = None
) -> GroupedMoeSpec:
    """Return the sparse block of a model of the DeepSeek family.

    Args:
        limits_groups: whether experts are chosen from the best groups only.
        keys: the config's names, where they are not DeepSeek's.

    Raises:
        ModelError: the groups do not divide the experts, or hold fewer than are active.
        UnsupportedModel: the blocks are not gated by SiLU, or have biases.
    """
    check_blocks(hf)
    keys = keys or RouterKeys()
    num_experts = hf.integer(keys.num_experts, low=1)
    num_active = hf.integer(keys.num_active, low=1)
    size = hf.integer("moe_intermediate_size", low=1)
    num_groups = hf.integer(keys.num_groups, 1, low=1) if limits_groups else 1
    num_open = hf.integer("topk_group", 1, low=1) if limits_groups else 1
    if num_experts % num_groups or num_open > num_groups:
        raise ModelError(
            f"{hf.path}: {num_experts} experts in {keys.num_groups}={num_groups} groups, "
            f"topk_group={num_open} of them; want equal groups: the config is damaged"
        )
    if num_active > num_open * (num_experts // num_groups):
        raise ModelError(
            f"{hf.path}: {keys.num_active} is {num_active}, want at most the experts of the open "
            f"groups, which are {num_open * (num_experts // num_groups)}; the config is damaged"
        )
    return GroupedMoeSpec(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=size,
        shared_size=size * hf.integer(keys.num_shared, 0),
        renormalises=hf.boolean(keys.renormalises, default=False),
        scoring=scoring,
        num_groups=num_groups,
        num_active_groups=num_open,
        scale=hf.number("routed_scaling_factor"),
    )


def sparse_behind_dense(hf: HfConfig, sparse: MoeSpec) -> tuple[MlpSpec | MoeSpec, ...]:
    """Return a block per layer: by `mlp_layer_types`, else the first `first_k_dense_replace` dense.

    Raises:
        ModelError: the list does not have `num_hidden_layers` entries, each "dense" or "sparse".
        UnsupportedModel: only some of the layers behind the dense ones are sparse.
    """
    num_layers = hf.integer("num_hidden_layers", low=1)
    kinds = hf.strings("mlp_layer_types")
    if kinds is None:
        num_dense = hf.integer("first_k_dense_replace")
        kinds = tuple("dense" if index < num_dense else "sparse" for index in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise ModelError(
            f"{hf.path}: mlp_layer_types is {list(kinds)}, want 'dense' or 'sparse' for each of "
            f"{num_layers} layers; the config is damaged"
        )
    if hf.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedModel(
            f"{hf.path}: moe_layer_freq is {hf.integer('moe_layer_freq')}, want 1: this kind of "
            f"{hf.model_type} is not supported, serve another model"
        )
    # configs of models without dense layers may give no size for them
    return tuple(sparse if kind == "sparse" else _dense_mlp(hf) for kind in kinds)


def _dense_mlp(hf: HfConfig) -> MlpSpec:
    check_blocks(hf)
    return MlpSpec(hf.integer("intermediate_size", low=1))


def check_blocks(hf: HfConfig) -> None:
    """Check that feed-forward blocks are of the kind that the descriptions say.

    Raises:
        UnsupportedModel: they are not gated by SiLU, or have biases.
    """
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
