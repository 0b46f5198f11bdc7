"""Tiny checkpoints without transformers, and all ranks of a model as threads of one process."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file

from gapless.assets import demo_checkpoint
from gapless.config.hf import read_hf_config
from gapless.config.options import EngineOptions
from gapless.engine import load as load_module
from gapless.engine.worker import PlanReader, PlanWriter
from gapless.layers.placement import Alone, Placement
from gapless.models.loader import dummy_weights
from gapless.models.mtp import MtpHead
from gapless.models.registry import model_module, read_architecture

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from gapless.core.plan import StepPlan
    from gapless.runner.runner import Runner, StepHandle

T = TypeVar("T")

# an odd vocabulary, so that the head is padded
COMMON: dict[str, Any] = {
    "vocab_size": 251, "hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "eos_token_id": None, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 30_000.0, "partial_rotary_factor": 0.5
    },
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
FULL = {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SHARED = {"shared_expert_intermediate_size": 28}
MTP = {"mtp_num_hidden_layers": 1}
LATENT = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "moe_intermediate_size": 20, "routed_scaling_factor": 1.5, "topk_group": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 3,
    "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
KIMI = {
    "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1, "num_expert_group": 3,
    "moe_renormalize": True, "model_max_length": 512, "layer_types": HYBRID["layer_types"],
    "linear_num_heads": 6, "linear_head_dim": 12, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": "auto", "mamba_d_state": 12,
    "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
NEMOTRON = {
    "hybrid_override_pattern": "EM*M-", "mamba_num_heads": 6, "mamba_head_dim": 12,
    "ssm_state_size": 20, "n_groups": 2, "conv_kernel": 4, "use_bias": True,
    "layer_norm_epsilon": 1e-5, "moe_intermediate_size": 20, "moe_latent_size": 28,
    "moe_shared_expert_intermediate_size": 36, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
SHORT_CONV = {
    "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "conv_bias": True,
    "norm_eps": 1e-5, "block_multiple_of": 4, "num_dense_layers": 1, "tie_embedding": False,
}  # fmt: skip
FOUR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5_text", **COMMON, **HYBRID, **MTP},
    "qwen3_5_tied": {
        "model_type": "qwen3_5_text", **COMMON, **HYBRID, **MTP, "tie_word_embeddings": True
    },
    "qwen3_5_four": {"model_type": "qwen3_5_text", **COMMON, **HYBRID, **MTP, **FOUR},
    "qwen3": {"model_type": "qwen3", **COMMON, **FULL, "vocab_size": 252},
    "qwen3_one_kv_head": {
        "model_type": "qwen3", **COMMON, **FULL, "num_key_value_heads": 1, "attention_bias": True
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **COMMON, **FULL, **EXPERTS, "mlp_only_layers": [1]},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **COMMON, **HYBRID, **EXPERTS, **SHARED},
    "qwen3_next": {"model_type": "qwen3_next", **COMMON, **HYBRID, **EXPERTS, **SHARED},
    "deepseek_v3": {
        "model_type": "deepseek_v3", **COMMON, **FULL, **LATENT, **ROUTED, "q_lora_rank": 28
    },
    "kimi_linear": {"model_type": "kimi_linear", **COMMON, **LATENT, **KIMI},
    "bamba": {
        "model_type": "bamba", **COMMON, **MAMBA, "attn_layer_indices": [1],
        "mamba_proj_bias": True,
    },
    "falcon_h1": {
        "model_type": "falcon_h1", **COMMON, **MAMBA, "mamba_d_ssm": 96, "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.8], "mamba_proj_bias": True,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **COMMON, **MAMBA, "layer_types": HYBRID["layer_types"],
        "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 28,
        "attention_multiplier": 0.3,
    },
    "nemotron_h": {"model_type": "nemotron_h", **COMMON, **ROUTED, **NEMOTRON},
    "lfm2": {"model_type": "lfm2", **COMMON, **SHORT_CONV},
    "lfm2_moe": {"model_type": "lfm2_moe", **COMMON, **EXPERTS, **SHORT_CONV},
    # both ranks keep the one KV head, and the norm's mean counts it twice
    "olmo_hybrid": {
        "model_type": "olmo_hybrid", **COMMON, **HYBRID, "num_key_value_heads": 1,
    },
    "minimax": {
        "model_type": "minimax", **COMMON, **FULL, "num_local_experts": 6,
        "num_experts_per_tok": 2, "layer_types": HYBRID["layer_types"],
        "linear_attn_alpha_factor": 2.5, "mlp_beta_factor": 1.5,
    },
    "llama": {
        "model_type": "llama", **COMMON, **FULL, "attention_bias": True,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
# whose files hold all experts of a layer, or two projections, in one tensor
FUSED = {
    "qwen3_5_moe": ["mlp.experts.gate_up_proj"],
    "granitemoehybrid": [
        "block_sparse_moe.input_linear.weight", "shared_mlp.input_linear.weight"
    ],
}  # fmt: skip


def write_checkpoint(name: str, directory: Path) -> Path:
    """Write a model of `CONFIGS` with made-up weights, and the bundled model's tokenizer."""
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_checkpoint() / file, directory / file)
    hf = read_hf_config(directory)
    spec, place = read_architecture(hf), Placement(torch.device("cpu"), torch.float32)
    model = model_module(hf.model_type).build(spec, place, num_positions=1)
    stored = {
        f"model.layers.{index}.{fused}"
        for index in range(len(spec.layers))
        for fused in FUSED.get(name, ())
    }
    targets = model.targets(stored)
    if spec.num_mtp_layers:
        targets |= MtpHead(spec, place).targets(stored)
    dummy_weights(targets, 5)
    weights = {key: weight.contiguous() for key, weight in targets.items()}
    save_file(weights, directory / "model.safetensors")
    return directory


class ThreadCommunicator:
    """One rank's exchange with the threads of the others."""

    def __init__(self, rank: int, barrier: threading.Barrier, shown: list[Any]) -> None:
        self._rank, self._barrier, self._shown = rank, barrier, shown
        self.num_sums = 0
        self.gathered: list[torch.Size] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator`; `x` is spoilt, as it may be."""
        self.num_sums += 1
        total = torch.stack(self._exchange(x)).sum(0)
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        self.gathered.append(x.shape)
        return torch.cat(self._exchange(x), dim=1)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._shown[self._rank] = x
        self._barrier.wait(timeout=60)
        found = [tensor.clone() for tensor in self._shown]
        self._barrier.wait(timeout=60)
        return found


class ThreadRanks:
    """All ranks of a model; each call happens on all of them at once."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        shown: list[Any] = [None] * world_size
        self.communicators = [
            ThreadCommunicator(rank, self._barrier, shown) for rank in range(world_size)
        ]
        self._pool = ThreadPoolExecutor(world_size)

    def each(self, call: Callable[[int], T]) -> list[T]:
        """Return `call(rank)` of every rank."""

        def guarded(rank: int) -> T:
            try:
                return call(rank)
            except BaseException:
                self._barrier.abort()
                raise

        futures = [self._pool.submit(guarded, rank) for rank in range(self.world_size)]
        errors = [future.exception() for future in futures]
        own = [e for e in errors if e and not isinstance(e, threading.BrokenBarrierError)]
        if own:
            raise own[0]
        return [future.result() for future in futures]


class ThreadRunners:
    """Runners of all ranks, which get their plans as worker processes do."""

    def __init__(self, recipe: load_module.Recipe, world_size: int) -> None:
        self.ranks = ThreadRanks(world_size)
        recipe = replace(recipe, config=replace(recipe.config, tp=world_size))
        self.runners: list[Runner] = self.ranks.each(
            lambda rank: load_module.build(recipe, rank, self.ranks.communicators[rank])
        )
        self._writer = PlanWriter()
        self._readers = [PlanReader() for _ in range(world_size)]

    def run(self, plan: StepPlan) -> StepHandle:
        """Run a plan on all ranks; the handle is rank 0's."""
        data = self._writer.pack(plan)

        def step(rank: int) -> StepHandle:
            return self.runners[rank].run(plan if rank == 0 else self._readers[rank].unpack(data))

        return self.ranks.each(step)[0]


def make_recipe(checkpoint: Path, **options: Any) -> load_module.Recipe:
    """Decide everything for a float64 engine of one rank."""
    defaults = {
        "model": str(checkpoint), "dtype": "float64", "max_running_requests": 4,
        "max_model_len": 200, "mem_fraction": 0.1,
    }  # fmt: skip
    return load_module.decide(EngineOptions.from_dict({**defaults, **options}))


def make_runner(recipe: load_module.Recipe) -> Runner:
    """Build the model on one rank."""
    return load_module.build(recipe, 0, Alone())


CheckpointOf = Callable[[str], "Path"]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> CheckpointOf:
    """Return the directory of a model of `CONFIGS`; for reading only."""
    root = tmp_path_factory.mktemp("ranks")

    def written(name: str) -> Path:
        directory = root / name
        if not directory.exists():
            directory.mkdir()
            write_checkpoint(name, directory)
        return directory

    return written
