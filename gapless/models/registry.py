"""Which file serves which `model_type`: one line per model."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from gapless.errors import UnsupportedModel

if TYPE_CHECKING:
    from types import ModuleType

    from gapless.config.hf import HfConfig
    from gapless.core.architecture import Architecture

MODELS = {
    "bamba": "gapless.models.bamba",
    "deepseek_v2": "gapless.models.deepseek_v2",
    "deepseek_v3": "gapless.models.deepseek_v3",
    "falcon_h1": "gapless.models.falcon_h1",
    "glm4_moe": "gapless.models.glm4_moe",
    "glm4_moe_lite": "gapless.models.glm4_moe_lite",
    "granitemoehybrid": "gapless.models.granitemoehybrid",
    "kimi_linear": "gapless.models.kimi_linear",
    "lfm2": "gapless.models.lfm2",
    "lfm2_moe": "gapless.models.lfm2_moe",
    "llama": "gapless.models.llama",
    "minimax": "gapless.models.minimax",
    "nemotron_h": "gapless.models.nemotron_h",
    "olmo_hybrid": "gapless.models.olmo_hybrid",
    "qwen3": "gapless.models.qwen3",
    "qwen3_5": "gapless.models.qwen3_5",
    "qwen3_5_moe": "gapless.models.qwen3_5_moe",
    "qwen3_5_moe_text": "gapless.models.qwen3_5_moe",
    "qwen3_5_text": "gapless.models.qwen3_5",
    "qwen3_moe": "gapless.models.qwen3_moe",
    "qwen3_next": "gapless.models.qwen3_next",
}


def model_module(model_type: str) -> ModuleType:
    """Return the file of a model: `architecture(hf)`, `build(...)`, `ignore_rules(...)`.

    Raises:
        UnsupportedModel: no file serves this type.
    """
    if model_type not in MODELS:
        near = difflib.get_close_matches(model_type, MODELS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported; {hint}"
            f"supported: {', '.join(sorted(MODELS))}"
        )
    return importlib.import_module(MODELS[model_type])


def read_architecture(hf: HfConfig) -> Architecture:
    """Describe the model that a config is for."""
    spec: Architecture = model_module(hf.model_type).architecture(hf)
    return spec
