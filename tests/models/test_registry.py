"""What a model's file makes of configs and checkpoints, and that one file is all of a model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import gapless
from gapless.config.hf import read_hf_config
from gapless.core.specs.feed_forward import MlpSpec, MoeSpec
from gapless.core.specs.linear import LinearSpec
from gapless.errors import ModelError, UnsupportedModel, WeightMismatch
from gapless.models.registry import MODELS, model_module, read_architecture
from tests.models import tiny
from tests.models.comparison import Case, assert_served_right, tiny_model, token_ids
from tests.models.driver import TeacherForced

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gapless.core.architecture import Architecture

    CheckpointOf = Callable[[str, bool], Path]

PACKAGE = Path(gapless.__file__).parent
SPARSE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 2e4,
    "max_position_embeddings": 512, "intermediate_size": 112, "moe_intermediate_size": 40,
    "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip
DENSE = {**SPARSE, "model_type": "llama"}


def read(directory: Path, config: dict[str, Any], **changes: Any) -> Architecture:
    (directory / "config.json").write_text(json.dumps(config | changes))
    return read_architecture(read_hf_config(directory))


def with_extra(source: Path, target: Path, extra: dict[str, Tensor], drop: str = "") -> Path:
    """Copy a checkpoint with some tensors more, and those that start with `drop` left out."""
    weights = tiny.stored_weights(source)
    if drop:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(drop)}
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(weights | extra, target / "model.safetensors")
    return target


def test_llama_is_one_file_one_line_and_one_tiny_model() -> None:
    mentions = {
        path.relative_to(PACKAGE).as_posix(): [line for line in lines if "llama" in line.lower()]
        for path in PACKAGE.rglob("*.py")
        for lines in [path.read_text().splitlines()]
    }
    mentions = {name: lines for name, lines in mentions.items() if lines}
    assert mentions.keys() == {"models/llama.py", "models/registry.py"}
    assert mentions["models/registry.py"] == ['    "llama": "gapless.models.llama",']
    for name in ("tiny.py", "test_equivalence.py"):
        lines = (Path(__file__).parent / name).read_text().splitlines()
        assert len([line for line in lines if "llama" in line.lower()]) == 1
    assert (Path(__file__).parents[2] / "docs" / "adding-a-model.md").is_file()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_file_has_the_three_functions(name: str) -> None:
    assert {"architecture", "build", "ignore_rules"} <= vars(model_module(name)).keys()


@pytest.mark.parametrize("name", tiny.MODELS)
def test_parameters_are_counted(checkpoint_of: CheckpointOf, name: str) -> None:
    spec = read_architecture(read_hf_config(checkpoint_of(name, False)))
    model = tiny_model(name, False)
    weights = [*model.parameters()]
    weights += [b for n, b in model.named_buffers() if n.endswith(tiny.ROUTER_BIASES)]
    assert spec.num_parameters == sum(weight.numel() for weight in weights)


def test_experts_and_dense_layers_are_told_apart(tmp_path: Path) -> None:
    sparse = MoeSpec(8, 2, 40, 0, renormalises=True)
    dense = MlpSpec(112)

    def mlps(**changes: Any) -> list[MlpSpec | MoeSpec]:
        return [layer.mlp for layer in read(tmp_path, SPARSE, **changes).layers]

    assert mlps() == mlps(mlp_only_layers=[], intermediate_size=None) == [sparse] * 4
    assert mlps(mlp_only_layers=[0, 3]) == [dense, sparse, sparse, dense]
    assert mlps(decoder_sparse_step=2) == [dense, sparse] * 2
    assert mlps(decoder_sparse_step=2, mlp_only_layers=[1]) == [dense, dense, dense, sparse]
    assert mlps(num_experts=0) == [dense] * 4
    assert mlps(num_experts=None, num_local_experts=8) == [sparse] * 4
    assert mlps(norm_topk_prob=None) == [MoeSpec(8, 2, 40, 0, renormalises=False)] * 4
    with_shared = MoeSpec(8, 2, 40, 48, renormalises=True)
    assert mlps(shared_expert_intermediate_size=48) == [with_shared] * 4


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "qwen3_5"])
def test_hybrids_differ_in_stored_rows_and_experts(checkpoint_of: CheckpointOf, name: str) -> None:
    spec = read_architecture(read_hf_config(checkpoint_of(name, False)))
    assert {linear.has_grouped_rows for linear in spec.linear_layers} == {name == "qwen3_next"}
    assert [isinstance(layer.mixer, LinearSpec) for layer in spec.layers] == [True] * 3 + [False]
    sparse = [isinstance(layer.mlp, MoeSpec) for layer in spec.layers]
    assert sparse == [name != "qwen3_5", name == "qwen3_5_moe", *[name != "qwen3_5"] * 2]
    # always, in Qwen3.5, and by default in Qwen3-Next
    assert all(s.mlp.renormalises for s in spec.layers if isinstance(s.mlp, MoeSpec))


@pytest.mark.parametrize(
    ("config", "changes", "error", "words"),
    [
        (DENSE, {"hidden_act": "gelu"}, UnsupportedModel, "hidden_act is 'gelu', want 'silu'"),
        (DENSE, {"mlp_bias": True}, UnsupportedModel, "mlp_bias is true"),
        (DENSE, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, UnsupportedModel,
         "'llama3'"),
        (DENSE, {"layer_types": ["sliding_attention"] * 4}, UnsupportedModel, "sliding_attention"),
        (SPARSE, {"hidden_act": "relu2"}, UnsupportedModel, "relu2"),
        (SPARSE, {"use_sliding_window": True}, UnsupportedModel, "use_sliding_window"),
        (SPARSE, {"num_experts_per_tok": 9}, ModelError, "is 9, want at most num_experts"),
        (SPARSE, {"num_experts_per_tok": 0}, ModelError, "num_experts_per_tok"),
        (SPARSE, {"num_experts": None}, ModelError, "num_local_experts"),
        (SPARSE, {"mlp_only_layers": 1}, ModelError, "mlp_only_layers"),
        (SPARSE, {"mlp_only_layers": ["1"]}, ModelError, "mlp_only_layers"),
        (SPARSE, {"norm_topk_prob": 1}, ModelError, "norm_topk_prob"),
        (SPARSE, {"moe_intermediate_size": None}, ModelError, "moe_intermediate_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, config: dict[str, Any], changes: Any, error: type[ModelError], words: str
) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path, config, **changes)


# tensors, and what each rule's line in the log names
SKIPPED = {
    "qwen3_next": {"mtp.*": ["mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"]},
    "qwen3_5_moe": {
        "mtp.*": ["mtp.norm.weight", "mtp.layers.0.mlp.experts.gate_up_proj"],
        "model.visual.x": ["model.visual.x"],
    },
    "llama": {
        "model.layers.*": [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in (0, 3)]
    },
}


@pytest.mark.parametrize("name", SKIPPED)
def test_known_tensors_that_do_not_serve_are_skipped(
    checkpoint_of: CheckpointOf, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    extra = {stored: torch.ones(3) for names in SKIPPED[name].values() for stored in names}
    directory = with_extra(checkpoint_of(name, False), tmp_path / "more", extra)
    with caplog.at_level(logging.INFO):
        TeacherForced(directory, dtype="float32", speculative_algorithm="none")
    skipped = {r.message for r in caplog.records if r.message.startswith("skipped")}
    assert len(skipped) == len(SKIPPED[name])
    for shared, names in SKIPPED[name].items():
        assert any(f"skipped {len(names)} tensors ({shared})" in line for line in skipped)


def test_a_tied_head_must_equal_the_embedding(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    source = checkpoint_of("llama", False)
    embedding = tiny.stored_weights(source)["model.embed_tokens.weight"]
    same = with_extra(source, tmp_path / "same", {"lm_head.weight": embedding.clone()})
    TeacherForced(same, dtype="float32")
    for name in ("qwen3_tied", "qwen3_5_tied", "llama"):
        other = {"lm_head.weight": embedding + 1}
        directory = with_extra(checkpoint_of(name, False), tmp_path / name, other)
        with pytest.raises(WeightMismatch, match=r"differs from model\.embed_tokens\.weight"):
            TeacherForced(directory, dtype="float32")


@pytest.mark.parametrize(
    ("drop", "extra", "words"),
    [
        ("model.layers.2.mlp.experts.7.up_proj", {}, r"1 missing: .*experts\.7\.up_proj"),
        ("", {"model.layers.2.mlp.experts.8.up_proj.weight": torch.ones(40, 64)},
         r"1 unexpected: .*experts\.8\.up_proj"),
        ("", {"model.layers.2.mlp.experts.down_proj": torch.ones(8, 64, 40)},
         r"1 missing: .*experts\.gate_up_proj; 24 unexpected"),
        ("model.layers.2.mlp.gate.", {}, r"1 missing: model\.layers\.2\.mlp\.gate\.weight"),
    ],
)  # fmt: skip
def test_loading_experts_is_strict(
    checkpoint_of: CheckpointOf, tmp_path: Path, drop: str, extra: dict[str, Tensor], words: str
) -> None:
    source = checkpoint_of("qwen3_next", False)
    directory = with_extra(source, tmp_path / "odd", extra, drop)
    with pytest.raises(WeightMismatch, match=words):
        TeacherForced(directory, dtype="float32")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("is_fused", [True, False])
def test_multimodal_wrapper_of_experts(
    checkpoint_of: CheckpointOf, tmp_path: Path, *, is_fused: bool, prefix: str
) -> None:
    source = checkpoint_of("qwen3_5_moe", True)
    if is_fused:
        source = tiny.fuse_experts(source, tmp_path / "fused")
    hub = tiny.hub_style(source, tmp_path / "hub", text_prefix=prefix, has_mtp=False)
    case = Case("qwen3_5_moe", "float64", scaled=True)
    forced = TeacherForced(hub, dtype=case.dtype)
    forced.prefill((0, token_ids()[0][:20], 0))
    assert_served_right(forced, case, slot=0)


@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_made_up_weights_run(checkpoint_of: CheckpointOf, name: str) -> None:
    forced = TeacherForced(checkpoint_of(name, False), dtype="float32", load_format="dummy")
    forced.prefill((0, token_ids()[0][:20], 0))
    logits = forced.all_logits(0)
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10
