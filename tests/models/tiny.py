"""Tiny random models as transformers objects, and checkpoints of them in the styles of the hub.

Sizes are chosen so that mixed-up dimensions show: K != V, H != HV, nothing square.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN = 64
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 112
NUM_EXPERTS = 8

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 4,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}

EXPERTS: dict[str, Any] = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}
SHARED_EXPERT: dict[str, Any] = {"shared_expert_intermediate_size": 48}

# buffers, not parameters
ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")

# of seeds 0 to 4, scaled, the one where transformers' float32 is closest to its float64: 1e-4 at
# most for qwen3_5 over 70 tokens, where others reach 5e-4; those without linear layers stay below
# 1e-5 with all of them
VETTED_SEED = 2


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    # the base differs from every class default, so that one who assumes a default is found out
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


@dataclass(frozen=True)
class TinyModel:
    """Which transformers classes make a tiny model, and from what."""

    config_class: str
    model_class: str
    options: dict[str, Any]


def _tiny(stem: str, *options: dict[str, Any], config: str = "Config", **more: Any) -> TinyModel:
    merged = {name: value for part in options for name, value in part.items()}
    return TinyModel(f"{stem}{config}", f"{stem}ForCausalLM", merged | more)


QWEN3 = {**COMMON, **_rope(20_000.0)}
QWEN3_5 = {**COMMON, **DELTA_NET, **_rope(30_000.0, partial_rotary_factor=0.25)}
TIED = {"tie_word_embeddings": True}

# the head's size follows from its parts
LATENT: dict[str, Any] = {
    **{name: value for name, value in COMMON.items() if name != "head_dim"},
    "num_key_value_heads": NUM_HEADS,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
KIMI: dict[str, Any] = {
    **LATENT,
    "linear_head_dim": 24,
    "linear_num_heads": 3,
    "layer_types": DELTA_NET["layer_types"],
    "num_local_experts": NUM_EXPERTS,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 2,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    **ROUTED,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 16, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.2,
}  # fmt: skip

MAMBA: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}
# binary fractions, which transformers' float32 buffers of them hold exactly
FACTORS: dict[str, Any] = {
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.625,
    "key_multiplier": 0.75,
    "attention_in_multiplier": 1.125,
    "attention_out_multiplier": 0.875,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.75,
    "mlp_multipliers": [0.875, 0.75],
    "ssm_multipliers": [0.875, 0.75, 0.625, 1.125, 1.25],
}
NEMOTRON: dict[str, Any] = {
    **{name: value for name, value in COMMON.items() if name != "num_hidden_layers"},
    **ROUTED,
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "moe_shared_expert_intermediate_size": 48,
}
LFM2: dict[str, Any] = {
    **{name: value for name, value in COMMON.items() if name != "head_dim"},
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}

MODELS = {
    "qwen3": _tiny("Qwen3", QWEN3),
    "qwen3_tied": _tiny("Qwen3", QWEN3, TIED),
    "qwen3_5": _tiny("Qwen3_5", QWEN3_5, config="TextConfig"),
    "qwen3_5_tied": _tiny("Qwen3_5", QWEN3_5, TIED, config="TextConfig"),
    # layer 1 has a dense block
    "qwen3_moe": _tiny("Qwen3Moe", QWEN3, EXPERTS, mlp_only_layers=[1], norm_topk_prob=False),
    "qwen3_next": _tiny("Qwen3Next", QWEN3_5, EXPERTS, SHARED_EXPERT, mlp_only_layers=[1]),
    "qwen3_5_moe": _tiny("Qwen3_5Moe", QWEN3_5, EXPERTS, SHARED_EXPERT, config="TextConfig"),
    "deepseek_v2": _tiny(
        "DeepseekV2",
        DEEPSEEK,
        _rope(50_000.0, **YARN),
        q_lora_rank=None,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
    ),
    "deepseek_v3": _tiny(
        "DeepseekV3", DEEPSEEK, _rope(60_000.0), q_lora_rank=44, num_nextn_predict_layers=0
    ),
    "glm4_moe": _tiny(
        "Glm4Moe",
        {**COMMON, **_rope(70_000.0), **ROUTED},
        use_qk_norm=True,
        attention_bias=True,
        first_k_dense_replace=2,
        num_nextn_predict_layers=0,
    ),
    # layer 1 has a dense block
    "glm4_moe_lite": _tiny(
        "Glm4MoeLite",
        LATENT,
        _rope(80_000.0),
        ROUTED,
        q_lora_rank=44,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
    ),
    # layer 0 has a dense block, as in DeepSeek's
    "kimi_linear": _tiny("KimiLinear", KIMI),
    "llama": _tiny("Llama", COMMON, _rope(40_000.0), TIED, attention_bias=True),
    # time steps meet both bounds
    "bamba": _tiny(
        "Bamba",
        MAMBA,
        _rope(90_000.0),
        attn_layer_indices=[1],
        mamba_n_groups=2,
        mamba_proj_bias=True,
        time_step_limit=[0.9, 1.6],
    ),
    "granitemoehybrid": _tiny(
        "GraniteMoeHybrid",
        MAMBA,
        TIED,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        intermediate_size=40,
        shared_intermediate_size=48,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        mamba_n_groups=1,
        mamba_conv_bias=False,
        embedding_multiplier=2.0,
        logits_scaling=1.5,
        residual_multiplier=0.6,
        attention_multiplier=0.3,
    ),
    "falcon_h1": _tiny(
        "FalconH1",
        MAMBA,
        FACTORS,
        _rope(100_000.0),
        num_hidden_layers=2,
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_rms_norm=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
    ),
    "nemotron_h": _tiny("NemotronH", NEMOTRON),
    "nemotron_h_latent": _tiny(
        "NemotronH",
        NEMOTRON,
        layers_block_type=["moe", "linear_attention", "full_attention"],
        moe_latent_size=28,
        use_bias=True,
        use_conv_bias=False,
    ),
    "lfm2": _tiny("Lfm2", LFM2, _rope(110_000.0), conv_L_cache=3, block_multiple_of=24),
    "lfm2_moe": _tiny(
        "Lfm2Moe",
        LFM2,
        EXPERTS,
        _rope(120_000.0),
        conv_L_cache=4,
        conv_bias=True,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
}

OLMO: dict[str, Any] = {
    **{name: value for name, value in COMMON.items() if name != "head_dim"},
    **DELTA_NET,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MODELS |= {
    "olmo_hybrid": _tiny("OlmoHybrid", OLMO, _rope(140_000.0)),
    # layer 0 attends: transformers' positions start anew where it does not
    "minimax": _tiny(
        "MiniMax",
        COMMON,
        _rope(130_000.0),
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_local_experts=NUM_EXPERTS,
        block_size=16,
        full_attn_alpha_factor=1.75,
        full_attn_beta_factor=0.75,
        linear_attn_alpha_factor=2.5,
        linear_attn_beta_factor=1.25,
        mlp_alpha_factor=0.625,
        mlp_beta_factor=1.5,
    ),
}


def build(name: str, *, scaled: bool, seed: int) -> tuple[Any, Any]:
    """Return a tiny model's transformers config and float32 model, in evaluation mode.

    Args:
        name: a key of `MODELS`.
        scaled: spread the weights, so that every parameter matters and greedy decoding does not
            repeat itself; else transformers' own initialization, whose small activations show
            other mistakes (the place of an epsilon).
        seed: decides all weights; the global generator is left as it was.
    """
    tiny = MODELS[name]
    config = getattr(transformers, tiny.config_class)(**tiny.options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, tiny.model_class)(config).eval().float()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # Nemotron-H's takes the bounds that its biases are initialised within
            module.time_step_limit = tuple(config.time_step_limit)
    # what transformers prefers for experts has no float64
    model.set_experts_implementation("eager")
    if scaled:
        spread(model, torch.Generator().manual_seed(seed + 1))
    return config, model


def spread(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Redraw matrices with variance 1 / fan-in and jitter vectors; A_log and dt_bias stay.

    Routers' biases, which are buffers of zeros, are drawn too.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.add_(noise * 0.1)
            else:
                weight.copy_(noise * (0.4 if "conv" in name else weight.shape[-1] ** -0.5))
        for name, buffer in model.named_buffers():
            if name.endswith(ROUTER_BIASES):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)


def save(model: Any, directory: Path) -> Path:
    """Write a model as transformers does, one safetensors file, and return the directory."""
    model.save_pretrained(directory)
    if model.config.model_type == "olmo_hybrid":
        _split_convolutions(directory, model.config)
    return directory


def _split_convolutions(directory: Path, config: Any) -> None:
    """Cut OLMo Hybrid's convolutions into those of q, k and v: transformers cuts in equal parts."""
    weights = stored_weights(directory)
    key_size = config.linear_num_key_heads * config.linear_key_head_dim
    value_size = config.linear_num_value_heads * config.linear_value_head_dim
    prefixes = {name.removesuffix("q_conv1d.weight") for name in weights if "q_conv1d" in name}
    for prefix in prefixes:
        names = [f"{prefix}{kind}_conv1d.weight" for kind in "qkv"]
        joined = torch.cat([weights[name] for name in names])
        parts = joined.split([key_size, key_size, value_size])
        weights |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def next_layer(model: Any, *, seed: int) -> Any:
    """Return transformers' MTP model of one layer behind a tiny model, its weights spread."""
    model.config.num_mtp_layers = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MtpModel(model, 1).eval().float()
    layer.set_experts_implementation("eager")
    spread(layer.layers, torch.Generator().manual_seed(seed + 1))
    return layer


def add_next_layer(directory: Path, layer: Any) -> None:
    """Add an MTP layer to a saved model as the hub has it: as one more layer, with its own copies
    of embedding and head, in a file of its own."""
    config = json.loads((directory / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    prefix = f"model.layers.{config['num_hidden_layers']}."
    weights = {
        f"{prefix}embed_tokens.weight": layer.embed_tokens.weight,
        f"{prefix}shared_head.head.weight": layer.shared_head.weight,
    }
    for name, tensor in layer.layers[0].state_dict().items():
        kind = name.replace("post_norm", "shared_head.norm").removeprefix("mtp_block.")
        if kind.endswith("experts.gate_up_proj"):
            for expert, fused in enumerate(tensor):
                gate, up = fused.chunk(2)
                stem = f"{prefix}mlp.experts.{expert}."
                weights |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif kind.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                weights[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = down
        else:
            weights[prefix + kind] = tensor
    weights |= stored_weights(directory)
    (directory / "model.safetensors").unlink()
    save_sharded({name: tensor.detach().clone() for name, tensor in weights.items()}, directory, 2)


def stored_weights(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, by stored name."""
    weights: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def fuse_experts(source: Path, target: Path) -> Path:
    """Rewrite a saved checkpoint with one tensor for all experts' matrices of a kind, per layer."""
    weights = stored_weights(source)
    prefixes = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for prefix in prefixes:
        kinds = {
            kind: torch.stack(
                [
                    weights.pop(f"{prefix}.experts.{expert}.{kind}_proj.weight")
                    for expert in range(NUM_EXPERTS)
                ]
            )
            for kind in ("gate", "up", "down")
        }
        fused = torch.cat([kinds["gate"], kinds["up"]], dim=1)
        weights[f"{prefix}.experts.gate_up_proj"] = fused
        weights[f"{prefix}.experts.down_proj"] = kinds["down"]
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def hub_style(
    source: Path,
    target: Path,
    *,
    text_prefix: str = "model.language_model.",
    num_shards: int = 3,
    has_mtp: bool = True,
) -> Path:
    """Rewrite a saved Qwen3.5 text checkpoint as the hub's multimodal ones are laid out.

    The config wraps `text_config`; text tensors get `text_prefix`; vision and MTP tensors, whose
    values are random, are added; everything is sharded under an index.

    Args:
        text_prefix: what replaces "model." in text tensors; with "language_model.model." the head
            moves along, to "language_model.lm_head.".
        has_mtp: whether there are `mtp.*` tensors and the config announces them.
    """
    weights = {
        _hub_name(name, text_prefix): tensor for name, tensor in stored_weights(source).items()
    }
    generator = torch.Generator().manual_seed(17)
    extra = VISION_SHAPES | (mtp_shapes() if has_mtp else {})
    weights |= {
        name: torch.randn(shape, generator=generator) * 0.1 for name, shape in extra.items()
    }
    target.mkdir(parents=True, exist_ok=True)
    text = json.loads((source / "config.json").read_text())
    (architecture,) = text.pop("architectures")
    if has_mtp:
        text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    wrapper_type = text["model_type"].removesuffix("_text")
    wrapper = {
        "architectures": [architecture.replace("CausalLM", "ConditionalGeneration")],
        "model_type": wrapper_type,
        "image_token_id": 250,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {"model_type": f"{wrapper_type}_vision", "depth": 2, "hidden_size": 8},
    }
    (target / "config.json").write_text(json.dumps(wrapper, indent=2))
    save_sharded(weights, target, num_shards)
    return target


def save_sharded(weights: dict[str, Tensor], directory: Path, num_shards: int) -> None:
    """Write tensors round-robin over shards, with the index that names them."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {
            name: tensor.contiguous()
            for index, (name, tensor) in enumerate(sorted(weights.items()))
            if index % num_shards == shard
        }
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(
        json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": weight_map}, indent=2)
    )


VISION_SHAPES: dict[str, tuple[int, ...]] = {
    "model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4),
    "model.visual.pos_embed.weight": (9, 8),
    **{f"model.visual.blocks.{i}.attn.qkv.weight": (24, 8) for i in range(2)},
    **{f"model.visual.blocks.{i}.norm1.bias": (8,) for i in range(2)},
    "model.visual.merger.linear_fc2.weight": (HIDDEN, 32),
}


def mtp_shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of a dense Qwen3.5 MTP layer: a merge, one attention layer, norms."""
    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (2 * queries, HIDDEN),  # each head's query, then its output gate
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    return {
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
        "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
        "mtp.norm.weight": (HIDDEN,),
        **{f"mtp.layers.0.{name}.weight": shape for name, shape in layer.items()},
    }


def _hub_name(name: str, text_prefix: str) -> str:
    if name.startswith("model."):
        return text_prefix + name.removeprefix("model.")
    return "language_model." + name if text_prefix.startswith("language_model.") else name
