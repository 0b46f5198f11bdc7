"""Every registered model against transformers, on every path that serves it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from gapless.models.registry import MODELS as REGISTERED
from tests.models import tiny
from tests.models.driver import TeacherForced
from tests.models.reference import logits

if TYPE_CHECKING:
    from pathlib import Path

# rows of the matrix: tiny model -> the registered types that it proves
ROWS = {
    "qwen3": ["qwen3"],
    "qwen3_tied": ["qwen3"],
    "qwen3_5": ["qwen3_5_text", "qwen3_5"],
    "qwen3_5_tied": ["qwen3_5_text"],
}
NUM_TOKENS = 70
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
CASES = [("float64", True), ("float32", False)]


@cache
def _oracle(name: str, dtype: str, scaled: bool) -> tuple[Any, list[list[int]], Tensor]:
    _, model = tiny.build(name, scaled=scaled, seed=tiny.VETTED_SEED)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, 256, (3, NUM_TOKENS), generator=generator)
    return model, ids.tolist(), logits(model, ids, getattr(torch, dtype))


@pytest.fixture(params=[(n, *c) for n in ROWS for c in CASES], ids=lambda p: f"{p[0]}-{p[1]}")
def case(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[TeacherForced, list[list[int]], Tensor, float]:
    name, dtype, scaled = request.param
    model, ids, expected = _oracle(name, dtype, scaled)
    forced = TeacherForced(tiny.save(model, tmp_path), dtype=dtype)
    return forced, ids, expected, TOLERANCE[dtype]


def _assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected[: found.shape[0]].double()).abs().max()
    assert error <= tolerance, f"logits differ by {error:.2e}, at most {tolerance:.0e} is allowed"


def test_every_registered_model_has_a_row() -> None:
    assert {kind for kinds in ROWS.values() for kind in kinds} == set(REGISTERED)
    assert set(ROWS) == set(tiny.MODELS)


def test_one_shot_prefill(case: Any) -> None:
    forced, ids, expected, tolerance = case
    forced.prefill((1, ids[0], 0))
    _assert_close(forced.all_logits(1), expected[0], tolerance)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunked_prefill(case: Any, chunk: int) -> None:
    forced, ids, expected, tolerance = case
    for start in range(0, 40, chunk):
        forced.prefill((2, ids[0][: min(start + chunk, 40)], start))
    _assert_close(forced.all_logits(2), expected[0], tolerance)


def test_token_by_token_over_two_flushes(case: Any) -> None:
    forced, ids, expected, tolerance = case
    forced.prefill((0, ids[0][:21], 0))
    for token in ids[0][21:]:
        forced.decode({0: token})
    _assert_close(forced.all_logits(0), expected[0], tolerance)


def test_mixed_batch_with_padding(case: Any) -> None:
    forced, ids, expected, tolerance = case
    lengths = (3, 17, 30)
    forced.prefill(*((slot, ids[slot][:n], 0) for slot, n in enumerate(lengths)))
    for step in range(20):
        rows = {2: 30 + step, 0: 3 + step}
        if step % 2:
            rows[1] = 17 + step // 2
        forced.decode({slot: ids[slot][position] for slot, position in rows.items()})
    for slot in range(3):
        _assert_close(forced.all_logits(slot), expected[slot], tolerance)


def test_slot_used_before(case: Any) -> None:
    forced, ids, expected, tolerance = case
    forced.prefill((0, ids[1][:50], 0))
    for token in ids[1][50:60]:
        forced.decode({0: token})
    forced.prefill((0, ids[0][:2], 0))
    for token in ids[0][2:30]:
        forced.decode({0: token})
    _assert_close(forced.all_logits(0), expected[0], tolerance)
