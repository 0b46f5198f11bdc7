"""Where the bundled demo model and its held-out data lie."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_DEMO = Path(__file__).parent / "demo"


def demo_checkpoint() -> Path:
    """Return the folder of the demo model, in the Hugging Face layout."""
    return _DEMO / "checkpoint"


def heldout(name: Literal["level1", "level2", "text"]) -> Path:
    """Return a JSON-lines file of data the demo model was never trained on.

    `level1` and `level2` hold word problems (`question`, `answer`, `n`), `text` documents (`text`).
    """
    return _DEMO / "heldout" / f"{name}.jsonl"
