"""One engine with the bundled model for all tests of evaluation."""

from __future__ import annotations

import pytest

from gapless import LLM


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The bundled model, small pools."""
    return LLM(max_running_requests=4, max_model_len=512)
