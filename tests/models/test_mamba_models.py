"""What the files of Mamba-2 and short-convolution models make of configs and of stored names."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.config.hf import read_hf_config
from gapless.core.architecture import ParallelSpec
from gapless.core.parallel import check_world_size
from gapless.core.specs.attention import AttentionSpec
from gapless.core.specs.feed_forward import GroupedMoeSpec, MlpSpec
from gapless.core.specs.linear import GateOrder, SsmSpec
from gapless.errors import ConfigError, ModelError, UnsupportedModel
from gapless.models.registry import read_architecture
from gapless.runner import snapshots
from tests.engine_fixtures import tiny_model
from tests.models import tiny
from tests.models.comparison import Case, assert_served_right, token_ids
from tests.models.driver import TeacherForced
from tests.models.reference import logits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gapless.core.architecture import Architecture

    CheckpointOf = Callable[[str, bool], Path]

__all__ = ["tiny_model"]

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 130_000.0}}


def read(source: Path, directory: Path, drop: tuple[str, ...] = (), **changes: Any) -> Architecture:
    """Describe a saved model with its config changed."""
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in drop} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return read_architecture(read_hf_config(directory))


# the branches that the tiny models of the matrix do not take
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1 without a norm": ("falcon_h1", {"mamba_rms_norm": False, "attention_bias": False}),
    "falcon_h1 with the gate first": ("falcon_h1", {"mamba_norm_before_gate": False}),
    "granite without experts": ("granitemoehybrid", {"num_local_experts": 0}),
    "granite with positions": ("granitemoehybrid", {"position_embedding_type": "rope", **ROPE}),
    "granite with biases": (
        "granitemoehybrid",
        {"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": True},
    ),
    "lfm2 with the size as it is": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe without a sum": ("lfm2_moe", {"norm_topk_prob": False}),
    "olmo_hybrid without positions": (
        "olmo_hybrid",
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "olmo_hybrid with plain betas": (
        "olmo_hybrid",
        {"linear_allow_neg_eigval": False, "attention_bias": True},
    ),
    "minimax of one factor": ("minimax", {"mlp_alpha_factor": 1, "linear_attn_beta_factor": 1}),
    "nemotron_h without groups": ("nemotron_h", {"n_group": 1, "norm_topk_prob": False}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_agree_with_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    base, changes = VARIANTS[name]
    model = tiny.MODELS[base]
    varied = replace(model, options=model.options | changes)
    monkeypatch.setitem(tiny.MODELS, "varied", varied)
    _, oracle = tiny.build("varied", scaled=True, seed=tiny.VETTED_SEED)
    tiny.save(oracle, tmp_path)
    tokens = token_ids()[0][:40]
    expected = logits(oracle, torch.tensor([tokens]), torch.float64)[0]
    forced = TeacherForced(tmp_path, dtype="float64")
    forced.prefill((0, tokens[:30], 0))
    for token in tokens[30:]:
        forced.decode({0: token})
    assert (forced.all_logits(0) - expected).abs().max() <= 1e-10


def test_nemotron_checkpoints_of_the_authors(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    """Layers as letters, and none of the names that transformers gives their kinds."""
    source = checkpoint_of("nemotron_h", True)
    weights = tiny.stored_weights(source)
    assert all(name.startswith(("backbone.", "lm_head.")) for name in weights)
    renamed = {name.replace("backbone.", "model."): w for name, w in weights.items()}
    tiny.save_sharded(renamed, tmp_path, 2)
    drop = ("layers_block_type", "mtp_layers_block_type", "time_step_limit")
    changed = read(source, tmp_path, drop, hybrid_override_pattern="MEM*-", num_hidden_layers=5)
    assert changed == read_architecture(read_hf_config(source))
    case = Case("nemotron_h", "float64", scaled=True)
    forced = TeacherForced(tmp_path, dtype=case.dtype)
    forced.prefill((0, token_ids()[0][:25], 0))
    assert_served_right(forced, case, slot=0)


def test_nemotron_layers_have_one_part_each(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    source = checkpoint_of("nemotron_h", False)
    spec = read(source, tmp_path, layers_block_type=["mamba", "moe", "attention", "mlp"])
    assert [layer.mixer is None for layer in spec.layers] == [False, True, False, True]
    assert [layer.mlp is None for layer in spec.layers] == [True, False, True, False]
    assert spec.layers[2].mixer == spec.attention_layers[0]
    assert spec.attention_layers[0].rotary is None


def test_lfm2_configs_of_the_authors(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    source = checkpoint_of("lfm2", False)
    spec = read_architecture(read_hf_config(source))
    # 2/3 of 112, rounded up to a multiple of 24
    assert spec.layers[0].mlp == MlpSpec(96)
    changed = read(
        source, tmp_path, ("layer_types", "tie_word_embeddings", "intermediate_size"),
        full_attn_idxs=[1], tie_embedding=True, block_ff_dim=112,
    )  # fmt: skip
    assert changed == spec
    assert not read(source, tmp_path, tie_embedding=False).ties_embeddings


def test_granite_layer_types_by_their_older_names(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    source = checkpoint_of("granitemoehybrid", False)
    expected = read_architecture(read_hf_config(source))
    found = read(source, tmp_path, layer_types=["mamba", "attention", "mamba"])
    assert found == expected
    assert [spec.rotary for spec in found.attention_layers] == [None]
    block = found.layers[0].mlp
    assert isinstance(block, GroupedMoeSpec)
    assert (block.shared_size, block.renormalises, block.scale) == (48, True, 1.0)


def test_bamba_rotates_half_of_each_head(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    spec = read(
        checkpoint_of("bamba", False), tmp_path, ("rope_parameters", "time_step_limit"),
        rope_theta=1e4, mamba_d_head="auto",
    )  # fmt: skip
    (attention,) = spec.attention_layers
    assert isinstance(attention, AttentionSpec)
    assert (attention.rotary_dim, attention.head_dim) == (16, 32)
    mamba = spec.layers[0].mixer
    assert isinstance(mamba, SsmSpec)
    assert mamba.time_step_limit == (0.0, float("inf"))
    assert mamba.value_dim == 16


def test_falcon_defaults(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    factors = [*tiny.FACTORS, "mamba_rms_norm", "projectors_bias", "mamba_proj_bias"]
    spec = read(checkpoint_of("falcon_h1", False), tmp_path, tuple(factors))
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, ParallelSpec)
    assert mixer.ssm.gate_order is GateOrder.GATE_ALONE
    assert mixer.attention.scale == 32**-0.5
    assert (spec.embedding_scale, spec.logit_scale) == (1.0, 1.0)
    assert {factor for scale in spec.weight_scales for factor in scale.factors} == {1.0}


def test_minimax_rotates_as_many_channels_as_its_authors_key_says(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    source = checkpoint_of("minimax", False)
    for changes, wanted in (({}, 32), ({"rotary_dim": 16}, 16)):
        (attention,) = read(source, tmp_path, **changes).attention_layers
        assert isinstance(attention, AttentionSpec)
        assert attention.rotary_dim == wanted


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        ("bamba", {"mamba_n_heads": 7}, ModelError, "equal groups of equal heads"),
        ("bamba", {"mamba_d_head": 17}, ModelError, "mamba_d_head=17"),
        ("bamba", {"mamba_n_groups": 3}, ModelError, "mamba_n_groups=3"),
        ("bamba", {"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
        ("bamba", {"mlp_bias": True}, UnsupportedModel, "mlp_bias is true"),
        ("bamba", {"time_step_limit": [0.0]}, ModelError, "a list of 2 numbers"),
        ("bamba", {"time_step_limit": [0.0, "x"]}, ModelError, "a list of 2 numbers"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, ModelError, "a list of 5 numbers"),
        ("granitemoehybrid", {"num_experts_per_tok": 9}, ModelError, "num_local_experts"),
        ("granitemoehybrid", {"layer_types": ["conv"] * 3}, UnsupportedModel, "has conv"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, UnsupportedModel, "want 'relu2'"),
        ("nemotron_h", {"attention_bias": True}, UnsupportedModel, "attention_bias is True"),
        ("nemotron_h", {"layers_block_type": []}, ModelError, "has no layer"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, ModelError, "has 'conv'"),
        ("nemotron_h", {"n_groups": 4}, ModelError, "want a multiple of n_groups"),
        ("minimax", {"sliding_window": 32}, UnsupportedModel, "sliding_window is 32, want null"),
        ("minimax", {"mlp_alpha_factor": 0}, UnsupportedModel, "mlp_alpha_factor is 0"),
        ("minimax", {"layer_types": None}, ModelError, "layer_types is missing"),
        ("minimax", {"num_experts_per_tok": 9}, ModelError, "at most num_local_experts"),
        ("olmo_hybrid", {"linear_num_value_heads": 3}, ModelError, "want a multiple of"),
        ("lfm2_moe", {"use_expert_bias": False}, UnsupportedModel, "use_expert_bias is false"),
        ("lfm2_moe", {"num_experts_per_tok": 9}, ModelError, "at most num_experts"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(
    checkpoint_of: CheckpointOf, tmp_path: Path, name: str, changes: Any, error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        read(checkpoint_of(name, False), tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("granitemoehybrid", {}, "mamba_n_groups=1 of granitemoehybrid; use tp=1"),
        ("nemotron_h", {"moe_shared_expert_intermediate_size": 47},
         "shared_expert_intermediate_size=47 of nemotron_h; use tp=1"),
        ("lfm2", {"hidden_size": 63, "head_dim": 16}, "hidden_size=63"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_over_ranks(
    checkpoint_of: CheckpointOf, tmp_path: Path, name: str, changes: Any, words: str
) -> None:
    spec = read(checkpoint_of(name, False), tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        check_world_size(spec, 2)


def test_states_are_folded_as_their_layers_say(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba-2's keys are not normalised; a snapshot that normalises them gives other tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)

    def second_turn() -> list[float]:
        llm = LLM(str(tiny_model("bamba")), dtype="float64", max_running_requests=1,
                  max_model_len=200, speculative_algorithm="none")  # fmt: skip
        first = llm.generate(token_ids()[0][:20], params)
        again = llm.generate([*token_ids()[0][:20], *first.token_ids, 7], params)
        assert again.usage.cached_tokens == 39
        return [entry.logprob for entry in again.completions[0].logprobs or ()]

    honest, right = snapshots.materialize, second_turn()

    def normalising(*args: Any, l2norm_eps: float | None, **others: Any) -> None:
        honest(*args, l2norm_eps=1e-6, **others)

    monkeypatch.setattr(snapshots, "materialize", normalising)
    assert second_turn() != pytest.approx(right, abs=1e-9)
