"""Tiny checkpoints with a tokenizer, and engines over them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from gapless import LLM
from gapless.assets import demo_checkpoint
from tests.models import tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gapless.runner.runner import Runner


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a scaled tiny model with the bundled model's tokenizer, by name."""
    root = tmp_path_factory.mktemp("tiny")

    def saved(name: str) -> Path:
        directory = root / name
        if not directory.exists():
            _, model = tiny.build(name, scaled=True, seed=tiny.VETTED_SEED)
            tiny.save(model, directory)
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(demo_checkpoint() / file, directory / file)
        return directory

    return saved


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_model: Callable[[str], Path]) -> Path:
    """A scaled tiny Qwen3.5."""
    return tiny_model("qwen3_5")


@pytest.fixture
def make_llm(tiny_checkpoint: Path) -> Callable[..., LLM]:
    """Make small float64 engines: any difference between two of them is a bug."""

    def make(**options: Any) -> LLM:
        defaults = {"dtype": "float64", "max_running_requests": 8, "max_model_len": 200}
        return LLM(str(tiny_checkpoint), **{**defaults, **options})

    return make


def runner_of(llm: LLM) -> Runner:
    """Return the runner of an engine's own rank, whose device and graphs tests look into."""
    return llm.engine._loaded.runner
