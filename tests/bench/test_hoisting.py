"""The measurement of hoisted metadata: both ways are the same model, and one of them waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.gpu import hoisting
from gapless.config.hf import read_hf_config
from gapless.models.registry import read_architecture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gapless import LLM

SMALL: dict[str, Any] = {
    **hoisting.MODEL, "vocab_size": 256, "hidden_size": 48, "intermediate_size": 56,
    "hybrid_override_pattern": "M-M*-M", "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 20,
    "n_groups": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"max_running_requests": 2, "max_model_len": 256}
    with hoisting.engine(SMALL, device="cpu", dtype="float64", **options) as served:
        yield served


def test_both_ways_agree_and_one_waits_twice_a_layer(llm: LLM) -> None:
    rows = hoisting.check(llm, SMALL, (40, 70))
    assert all(row["ok"] for row in rows), rows


def test_a_derivation_that_is_wrong_is_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = hoisting._deriving

    def fresh(*args: Any) -> Any:
        found, batch = honest(*args)
        if isinstance(batch, hoisting.PrefillBatch):
            batch.chunks.init_rows.fill_(found.replay.checkpoint.shape[0] - 1)
        return found, batch

    monkeypatch.setattr(hoisting, "_deriving", fresh)
    assert not hoisting.check(llm, SMALL, (40, 70))[0]["ok"]


def test_figures_of_both_ways(llm: LLM) -> None:
    rows = hoisting.bench(llm, SMALL, (40,), rounds=2)
    assert [row["prompts"] for row in rows] == [1, hoisting.BATCH]
    for row in rows:
        assert row["least"] <= row["hoisted/derived"] <= row["most"]
        assert {len(found) for found in row["rounds"].values()} == {2}


def test_the_model_has_the_published_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(hoisting.json.dumps(hoisting.MODEL))
    spec = read_architecture(read_hf_config(tmp_path))
    assert len(spec.linear_layers) == 24
    assert spec.num_parameters == pytest.approx(8.1e9, rel=0.02)
