"""One exact server for all tests that can share it, and the same engine offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from gapless import LLM
from tests.server_load.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

# in float64 the same request and seed give the same tokens in any batch
ENGINE: dict[str, Any] = {
    "dtype": "float64",
    "num_threads": 1,
    "max_running_requests": 16,
    "max_model_len": 640,
}


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A small exact server."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, **ENGINE, served_model_name="gapless-demo") as running:
        yield running


@pytest.fixture(scope="package")
def llm() -> LLM:
    """The same engine offline."""
    return LLM(**ENGINE)
