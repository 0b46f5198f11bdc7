"""What the files of models with latent attention make of configs and of stored names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from gapless.config.hf import read_hf_config
from gapless.core.specs.attention import LatentSpec, YarnSpec
from gapless.core.specs.feed_forward import GroupedMoeSpec, MlpSpec
from gapless.errors import ModelError, UnsupportedModel
from gapless.models.registry import read_architecture
from tests.models import tiny
from tests.models.comparison import Case, assert_served_right, token_ids
from tests.models.driver import TeacherForced
from tests.models.reference import logits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gapless.core.architecture import Architecture

    CheckpointOf = Callable[[str, bool], Path]

# what the authors' configs have in place of transformers' keys
KIMI_HUB: dict[str, Any] = {
    "linear_attn_config": {
        "num_heads": 3, "head_dim": 24, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3], "full_attn_layers": [4],
    },
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None, "use_grouped_topk": True,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
OURS = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads",
        "linear_conv_kernel_dim")  # fmt: skip


def read(source: Path, directory: Path, drop: tuple[str, ...] = (), **changes: Any) -> Architecture:
    """Describe a saved model with its config changed."""
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in drop} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return read_architecture(read_hf_config(directory))


def test_the_authors_kimi_checkpoint_is_the_same_model(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    source = checkpoint_of("kimi_linear", True)
    weights = tiny.stored_weights(source)
    dense = "model.layers.0.block_sparse_moe."
    assert f"{dense}gate_proj.weight" in weights
    renamed = {name.replace(dense, "model.layers.0.mlp."): w for name, w in weights.items()}
    tiny.save_sharded(renamed, tmp_path, 2)
    changed = read(source, tmp_path, drop=OURS, **KIMI_HUB)
    assert changed == read_architecture(read_hf_config(source))
    case = Case("kimi_linear", "float64", scaled=True)
    forced = TeacherForced(tmp_path, dtype=case.dtype)
    forced.prefill((0, token_ids()[0][:25], 0))
    assert_served_right(forced, case, slot=0)


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        ("kimi_linear", {"mla_use_nope": False}, UnsupportedModel, "mla_use_nope is False"),
        ("kimi_linear", {"attention_bias": True}, UnsupportedModel, "attention_bias is True"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, UnsupportedModel, "'softmax'"),
        ("kimi_linear", {"moe_layer_freq": 2}, UnsupportedModel, "moe_layer_freq is 2"),
        ("kimi_linear", {"mlp_layer_types": ["dense"] * 3}, ModelError, "for each of 4 layers"),
        ("kimi_linear", {"mlp_layer_types": ["wide"] * 4}, ModelError, "'dense' or 'sparse'"),
        ("kimi_linear", {"linear_attn_config": 3}, ModelError, "linear_attn_config is 3"),
        ("kimi_linear", {"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedModel, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedModel, "topk_method is 'noaux_tc'"),
        ("deepseek_v2", {"attention_bias": True}, UnsupportedModel, "attention_bias is true"),
        ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedModel, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, UnsupportedModel, "want 'noaux_tc'"),
        ("deepseek_v3", {"n_group": 3}, ModelError, "8 experts in n_group=3 groups"),
        ("deepseek_v3", {"topk_group": 5}, ModelError, "topk_group=5 of them"),
        ("deepseek_v3", {"topk_group": 1}, ModelError, "num_experts_per_tok is 3, want at most"),
        ("deepseek_v3", {"routed_scaling_factor": None}, ModelError, "routed_scaling_factor"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(
    checkpoint_of: CheckpointOf, tmp_path: Path, name: str, changes: Any, error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        read(checkpoint_of(name, False), tmp_path, **changes)


@pytest.mark.parametrize("full", [[], [3, 4], [5], [0]])
def test_kimi_layers_are_each_of_one_kind(
    checkpoint_of: CheckpointOf, tmp_path: Path, full: list[int]
) -> None:
    lists = KIMI_HUB["linear_attn_config"] | {"full_attn_layers": full}
    hub = KIMI_HUB | {"linear_attn_config": lists}
    with pytest.raises(ModelError, match="want each of 1 to 4 once"):
        read(checkpoint_of("kimi_linear", False), tmp_path, drop=OURS, **hub)


def test_deepseek_hub_configs(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    """Flat rotary keys, a `type` in place of a `rope_type`, no groups, a dense layer of its own."""
    scaling = {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    spec = read(
        checkpoint_of("deepseek_v3", False), tmp_path, drop=("rope_parameters",),
        rope_theta=10000, rope_scaling=scaling, n_group=None, topk_group=None,
        first_k_dense_replace=3, topk_method="noaux_tc", num_nextn_predict_layers=1,
    )  # fmt: skip
    mixer, block = spec.layers[3].mixer, spec.layers[3].mlp
    assert isinstance(mixer, LatentSpec)
    assert mixer.rotary is not None
    assert mixer.rotary.yarn == YarnSpec(40.0, 4096, 32.0, 1.0, attention_factor=1.0)
    mscale = 0.1 * torch.tensor(40.0, dtype=torch.float64).log().item() + 1
    assert mixer.scale == pytest.approx(40**-0.5 * mscale**2, rel=1e-14)
    assert isinstance(block, GroupedMoeSpec)
    assert (block.num_groups, block.num_active_groups, block.scale) == (1, 1, 2.5)
    assert [isinstance(layer.mlp, MlpSpec) for layer in spec.layers] == [True] * 3 + [False]
    assert spec.num_mtp_layers == 1


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 4.0, "original_max_position_embeddings": 16},
        {"factor": 2.5, "original_max_position_embeddings": 64, "attention_factor": 1.3,
         "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    ],
)  # fmt: skip
def test_yarn_stretches_full_attention_too(tmp_path: Path, scaling: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 20_000.0, **scaling}
    config = transformers.Qwen3Config(**tiny.QWEN3 | {"rope_parameters": rope})
    torch.manual_seed(tiny.VETTED_SEED)
    model = transformers.Qwen3ForCausalLM(config).eval()
    tiny.save(model, tmp_path)
    forced = TeacherForced(tmp_path, dtype="float64")
    tokens = token_ids()[0]
    forced.prefill((0, tokens, 0))
    expected = logits(model, torch.tensor([tokens]), torch.float64)[0]
    assert (forced.all_logits(0) - expected).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({}, "original_max_position_embeddings is missing"),
        ({"original_max_position_embeddings": 64, "factor": 0.5}, "factor is 0.5"),
        ({"original_max_position_embeddings": 64, "factor": "4"}, "factor is '4'"),
        ({"original_max_position_embeddings": 64, "truncate": 1}, "truncate is 1"),
    ],
)
def test_wrong_yarn_values(
    checkpoint_of: CheckpointOf, tmp_path: Path, scaling: dict[str, Any], words: str
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, **scaling}
    with pytest.raises(ModelError, match=words):
        read(checkpoint_of("qwen3", False), tmp_path, rope_parameters=rope)


def test_yarn_without_a_factor_reaches_the_context(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 128}
    spec = read(checkpoint_of("qwen3", False), tmp_path, rope_parameters=rope)
    (rotary,) = {layer.rotary for layer in spec.attention_layers}
    assert rotary is not None
    assert rotary.yarn is not None
    assert rotary.yarn.factor == 512 / 128
