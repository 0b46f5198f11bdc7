"""gapless: a serving engine for hybrid linear-attention language models.

The public names are imported on first use, so that the torch-free packages stay torch-free.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.config.options import EngineOptions
    from gapless.core.grammar import Grammar
    from gapless.core.sampling_params import SamplingParams
    from gapless.engine.llm import LLM
    from gapless.errors import (
        BackendUnavailable,
        ConfigError,
        ContextTooLong,
        GaplessError,
        InternalError,
        InvalidRequest,
        ModelError,
        Overloaded,
        QueueFull,
        RequestError,
        UnsupportedModel,
        WeightMismatch,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BackendUnavailable",
    "ConfigError",
    "ContextTooLong",
    "EngineOptions",
    "GaplessError",
    "Grammar",
    "InternalError",
    "InvalidRequest",
    "ModelError",
    "Overloaded",
    "QueueFull",
    "RequestError",
    "SamplingParams",
    "UnsupportedModel",
    "WeightMismatch",
]

_HOMES = {
    "LLM": "gapless.engine.llm",
    "EngineOptions": "gapless.config.options",
    "Grammar": "gapless.core.grammar",
    "SamplingParams": "gapless.core.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'gapless' has no attribute {name!r}")
    return vars(importlib.import_module(_HOMES.get(name, "gapless.errors")))[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
