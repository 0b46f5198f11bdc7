"""A footprint's bytes are those that the device allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gapless import LLM, EngineOptions
from gapless.core.footprint import Footprint
from gapless.engine.load import decide
from tests.engine_fixtures import runner_of
from tests.pool_bytes import num_bytes, pool_bytes, tensors

OPTIONS: list[dict[str, Any]] = [
    {"speculative_num_steps": 3},
    {"speculative_num_steps": 3, "dtype": "bfloat16", "linear_replayssm_cache_len": 5},
    {"speculative_num_steps": 0, "dtype": "float64", "page_size": 3},
    {"speculative_algorithm": "ngram", "ssm_dtype": "bfloat16"},
    {"speculative_num_steps": 1, "disable_prefix_cache": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bytes_are_those_of_the_device(options: dict[str, Any]) -> None:
    options = {"max_running_requests": 3, "max_model_len": 50, **options}
    llm = LLM(**options)
    device, config = runner_of(llm).device, llm.engine.config
    has_mtp = config.drafter == "mtp"
    footprint = Footprint(
        architecture=decide(EngineOptions(**options)).architecture,
        device="cpu", dtype=config.dtype, ssm_dtype=config.ssm_dtype, page_size=config.page_size,
        replay_len=config.replay_len, max_window=config.max_window, uses_mtp=has_mtp,
    )  # fmt: skip
    allocated = num_bytes(
        [*device.pools.kv, *(t for memory in device.pools.linear for t in tensors(memory))]
    )
    if has_mtp:
        allocated += num_bytes(v for v in vars(device.drafter).values() if is_own(v))
    snapshots = 0 if "disable_prefix_cache" in options else 16 * 3
    assert config.num_state_rows == 3 + snapshots
    assert allocated == footprint.pool_bytes(
        num_requests=3, num_pages=config.num_pages, num_snapshots=snapshots
    )
    assert (footprint.page_bytes, footprint.row_bytes) == (config.page_bytes, config.row_bytes)


def is_own(value: object) -> bool:
    """Whether it is memory of the drafter's own, not a page table that it looks into."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_bytes_of_a_rank(tp: int, num_drafts: int) -> None:
    recipe = decide(EngineOptions(tp=tp, speculative_num_steps=num_drafts, max_model_len=50))
    config = recipe.config
    footprint = Footprint(
        architecture=recipe.architecture, device="cpu", dtype="float32", ssm_dtype="float32",
        page_size=16, replay_len=16, max_window=1 + num_drafts, world_size=tp,
    )  # fmt: skip
    assert pool_bytes(recipe.architecture, config) == footprint.pool_bytes(
        num_requests=config.max_running_requests,
        num_pages=config.num_pages,
        num_snapshots=config.num_state_rows - config.max_running_requests,
    )
