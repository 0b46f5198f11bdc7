"""Every registered model against transformers, on every path that serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gapless.models.registry import MODELS as REGISTERED
from tests.models import tiny
from tests.models.comparison import Case, assert_served_right, token_ids
from tests.models.driver import TeacherForced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# rows of the matrix: tiny model -> the registered types that it proves
ROWS = {
    "qwen3": ["qwen3"],
    "qwen3_tied": ["qwen3"],
    "qwen3_5": ["qwen3_5_text", "qwen3_5"],
    "qwen3_5_tied": ["qwen3_5_text"],
    "qwen3_moe": ["qwen3_moe"],
    "qwen3_next": ["qwen3_next"],
    "qwen3_5_moe": ["qwen3_5_moe_text", "qwen3_5_moe"],
    "deepseek_v2": ["deepseek_v2"],
    "deepseek_v3": ["deepseek_v3"],
    "glm4_moe": ["glm4_moe"],
    "glm4_moe_lite": ["glm4_moe_lite"],
    "kimi_linear": ["kimi_linear"],
    "llama": ["llama"],
    "bamba": ["bamba"],
    "granitemoehybrid": ["granitemoehybrid"],
    "falcon_h1": ["falcon_h1"],
    "nemotron_h": ["nemotron_h"],
    "nemotron_h_latent": ["nemotron_h"],
    "lfm2": ["lfm2"],
    "lfm2_moe": ["lfm2_moe"],
    "olmo_hybrid": ["olmo_hybrid"],
    "minimax": ["minimax"],
}
CASES = [Case(n, *c) for n in ROWS for c in (("float64", True), ("float32", False))]
# weights as transformers draws them run whole prompts and a mixed batch; the rest of it is slow
MOST_IN_FLOAT64 = [
    pytest.param(case, marks=() if case.scaled else pytest.mark.slow, id=str(case))
    for case in CASES
]
in_float64 = pytest.mark.parametrize("case", MOST_IN_FLOAT64, indirect=True)


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def forced(case: Case, serve: Callable[[Case], TeacherForced]) -> TeacherForced:
    return serve(case)


def test_every_registered_model_has_a_row() -> None:
    assert {kind for kinds in ROWS.values() for kind in kinds} == set(REGISTERED)
    assert set(ROWS) == set(tiny.MODELS)


def test_one_shot_prefill(forced: TeacherForced, case: Case) -> None:
    forced.prefill((1, token_ids()[0], 0))
    assert_served_right(forced, case, slot=1)


@in_float64
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunked_prefill(forced: TeacherForced, case: Case, chunk: int) -> None:
    end = 40 if chunk > 1 else 12
    for start in range(0, end, chunk):
        forced.prefill((2, token_ids()[0][: min(start + chunk, end)], start))
    assert_served_right(forced, case, slot=2)


@in_float64
def test_token_by_token_over_two_flushes(forced: TeacherForced, case: Case) -> None:
    tokens = token_ids()[0]
    forced.prefill((0, tokens[:21], 0))
    for token in tokens[21:]:
        forced.decode({0: token})
    assert_served_right(forced, case, slot=0)


def test_mixed_batch_with_padding(forced: TeacherForced, case: Case) -> None:
    lengths = (3, 17, 30)
    forced.prefill(*((slot, token_ids()[slot][:n], 0) for slot, n in enumerate(lengths)))
    for step in range(20):
        rows = {2: 30 + step, 0: 3 + step}
        if step % 2:
            rows[1] = 17 + step // 2
        forced.decode({slot: token_ids()[slot][position] for slot, position in rows.items()})
    for slot in range(3):
        assert_served_right(forced, case, slot=slot, row=slot)


@in_float64
def test_slot_used_before(forced: TeacherForced, case: Case) -> None:
    first, second = token_ids()[1], token_ids()[0]
    forced.prefill((0, first[:50], 0))
    for token in first[50:60]:
        forced.decode({0: token})
    forced.prefill((0, second[:2], 0))
    for token in second[2:30]:
        forced.decode({0: token})
    assert_served_right(forced, case, slot=0)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe"])
def test_fused_experts(
    name: str, checkpoint_of: Callable[[str, bool], Path], tmp_path: Path
) -> None:
    case = Case(name, "float64", scaled=True)
    forced = TeacherForced(tiny.fuse_experts(checkpoint_of(name, True), tmp_path), dtype=case.dtype)
    forced.prefill((0, token_ids()[0][:30], 0))
    for token in token_ids()[0][30:40]:
        forced.decode({0: token})
    assert_served_right(forced, case, slot=0)
