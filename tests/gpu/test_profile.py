"""`gapless profile` on a GPU: what a decode step asks of it, and where a planted wait shows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from gapless.cli import main
from gapless.runner.prefill import PrefillRunner

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

FLAGS = (
    "profile", "--device", "cuda", "--num-prompts", "3", "--input-len", "40", "--steps", "12",
    "--max-running-requests", "4", "--max-model-len", "256",
)  # fmt: skip


def profiled(folder: Path, *flags: str) -> dict[str, Any]:
    assert main([*FLAGS, "--output-dir", str(folder), *flags]) == 0
    return json.loads((folder / "profile.json").read_text())


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_decode_step_is_one_launch(num_drafts: int, tmp_path: Path) -> None:
    found = profiled(tmp_path, "--speculative-num-steps", str(num_drafts))
    assert found["sees_kernels"]
    assert found["summary"]["decode"]["number"] == 12
    for iteration in found["iterations"]:
        rest = iteration["rest"]
        assert (rest["graph"], rest["copy up"], rest["copy down"]) == (1, 1, 1)
        assert rest["blocking"] == {}
        assert rest["device_ms"] > 0
        assert iteration["queued_ms"] > 0
        assert iteration["seams"] == []
    assert found["iterations"][0]["prefill"]["kernel"] > 0
    assert 0 <= found["summary"]["seam_share"] < 1
    assert 0 <= found["summary"]["gap_share"] < 1
    assert found["summary"]["run_ahead"] == [0] + [1] * 11
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "s" for e in events) >= 12


def test_a_planted_wait_shows_at_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefillRunner._settle

    def reading(self: PrefillRunner, segments: Any, layout: Any, inputs: Any, hidden: Any) -> Any:
        assert hidden.sum().item() == hidden.sum().item()
        return honest(self, segments, layout, inputs, hidden)

    monkeypatch.setattr(PrefillRunner, "_settle", reading)
    found = profiled(tmp_path)
    (call,) = [c for c in found["blocking"] if "prefill.py:" in c["call"]]
    assert call["call"].startswith("cudaStreamSynchronize at gapless/runner/prefill.py:")
    assert (call["decode"], call["prefill"]) == (0, 2)
