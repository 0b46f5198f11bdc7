"""Checkpoint directories without weights, in the shapes of published models."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from gapless.assets import demo_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

HYBRID = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25
    },
    "attention_bias": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mtp_num_hidden_layers": 1,
    "vocab_size": 248_320,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}

# DeepSeek-V2-Lite's layers and sizes, with V3's router and MTP layer: it has none of its own
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "attention_bias": False,
    "vocab_size": 102_400,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def _layer_types(count: int) -> list[str]:
    return ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (
        count // 4
    )


MODELS: dict[str, dict[str, Any]] = {
    "35b-a3b": {
        **HYBRID,
        **EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "layer_types": _layer_types(40),
        "tie_word_embeddings": False,
    },
    # more than one GPU of 141 GB holds in bfloat16
    "80b-a3b": {
        **HYBRID,
        **EXPERTS,
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 5120,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "vocab_size": 151_936,
        "layer_types": _layer_types(48),
        "tie_word_embeddings": False,
    },
    "4b": {
        **HYBRID,
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 9216,
        "layer_types": _layer_types(32),
        "tie_word_embeddings": True,
    },
    "v2-lite-mtp": LATENT,
    "small-latent": {
        **LATENT,
        "hidden_size": 512,
        "num_hidden_layers": 3,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "vocab_size": 32_000,
    },
    # a model that captures in seconds, for trying the script
    "small": {
        **HYBRID,
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 3072,
        "layer_types": _layer_types(8),
        "tie_word_embeddings": True,
        "vocab_size": 32_000,
    },
}


def write_checkpoint(name: str, root: Path) -> Path:
    """Write config and the bundled tokenizer; weights are to be made up."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODELS[name]))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_checkpoint() / file, directory / file)
    return directory
