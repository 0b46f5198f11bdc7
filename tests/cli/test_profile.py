"""`gapless profile`: counts are exact, what is planted shows where it is, and files can be read."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from gapless.runner.decode import DecodeRunner
from gapless.runner.stages import Stage

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.cli.conftest import Run

LOAD = ("--num-prompts", "2", "--input-len", "5", "--output-len", "20", "--steps", "6")
SMALL = ("--max-running-requests", "2", "--max-model-len", "64", "--speculative-num-steps", "0")
STAGES_OF_A_STEP = ("verify", "accept", "extend", "draft")


def profile_json(run: Run, checkpoint: Path, *flags: str) -> dict[str, Any]:
    done = run("profile", "--json", "--model", str(checkpoint), *LOAD, *SMALL, *flags)
    assert done.status == 0, done.err
    return json.loads(done.out)


def test_counts_are_exact(run: Run, tiny_checkpoint: Path) -> None:
    found = profile_json(run, tiny_checkpoint)
    assert found["load"] == {"num_prompts": 2, "input_len": 5, "output_len": 20, "steps": 6}
    assert len(found["iterations"]) == 6
    assert [i["has_prefill"] for i in found["iterations"]] == [True] + [False] * 5
    for iteration in found["iterations"]:
        assert iteration["has_decode"]
        rest = iteration["rest"]
        assert (rest["graph"], rest["copy up"], rest["copy down"]) == (1, 1, 1)
        assert rest["blocking"] == iteration["prefill"]["blocking"] == {}
        assert iteration["seams"] == []
    first, *others = found["iterations"]
    assert (first["prefill"]["copy up"], first["prefill"]["copy down"]) == (1, 0)
    assert all(other["prefill"]["copy up"] == 0 for other in others)
    assert found["summary"]["run_ahead"] == [0, 1, 1, 1, 1, 1]
    assert found["summary"]["prefill"]["number"] == 1
    assert 0 < found["summary"]["seam_share"] < 1
    assert found["summary"]["gap_share"] == 0
    assert (found["blocking"], found["seams"]) == ([], [])


def test_a_planted_read_shows_at_its_call_site(
    run: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, silu = DecodeRunner._accept, F.silu

    def reading(self: DecodeRunner, key: Any, verified: Any, hidden: Any) -> Any:
        assert verified.seq_lens.sum().item() >= 0
        return honest(self, key, verified, hidden)

    monkeypatch.setattr(DecodeRunner, "_accept", reading)
    found = profile_json(run, tiny_checkpoint)
    (call,) = found["blocking"]
    assert call["call"].startswith("Tensor.item at gapless/runner/decode.py:")
    assert (call["decode"], call["prefill"], call["moves"]) == (6, 0, 0)
    for iteration in found["iterations"]:
        assert iteration["rest"]["blocking"] == {call["call"]: 1}
        # what is read comes down
        assert iteration["rest"]["copy down"] == 2
    monkeypatch.setattr(DecodeRunner, "_accept", honest)

    def asking(x: Any) -> Any:
        return silu(x) if x.isfinite().any() else x

    monkeypatch.setattr(F, "silu", asking)
    calls = profile_json(run, tiny_checkpoint)["blocking"]
    assert all(
        re.match(r"Tensor.__bool__ at gapless/(ops|layers)/.*:\d+$", c["call"]) for c in calls
    )
    assert all(c["decode"] % 6 == 0 for c in calls)
    assert sum(c["decode"] for c in calls) >= 6 <= 6 * sum(c["prefill"] for c in calls)


def test_a_plan_shows_as_a_seam(
    run: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, seconds = DecodeRunner._stages, 0.004

    def plan() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def planned(self: DecodeRunner, key: Any) -> list[Stage]:
        first, *rest = honest(self, key)
        return [first, *(Stage(stage.name, stage.run, plan) for stage in rest)]

    monkeypatch.setattr(DecodeRunner, "_stages", planned)
    found = profile_json(run, tiny_checkpoint)
    (seam,) = found["seams"]
    assert (seam["stage"], seam["count"]) == ("accept", 6)
    assert 1e3 * seconds <= seam["median_ms"] <= seam["max_ms"]
    spent = 0.0
    for iteration in found["iterations"]:
        assert iteration["rest"]["graph"] == 2
        (own,) = iteration["seams"]
        assert iteration["start_ms"] < own["start_ms"]
        assert own["start_ms"] + own["ms"] < iteration["start_ms"] + iteration["ms"]
        spent += own["ms"]
    # of the time that a share is of, the last step is no part
    whole = sum(i["ms"] for i in found["iterations"])
    assert found["summary"]["seam_share"] > 5 / 6 * spent / whole > 0
