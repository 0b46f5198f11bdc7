"""`gapless profile`: counts are exact, what is planted shows where it is, and files can be read."""

from __future__ import annotations

import json
import re
import shutil
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch.nn.functional as F

from gapless.bench.profile_page import page
from gapless.cli import main
from gapless.observe.trace import Kind, Trace
from gapless.runner.decode import DecodeRunner
from gapless.runner.stages import Stage
from tests.conftest import unconfigured

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

LOAD = ("--num-prompts", "2", "--input-len", "5", "--output-len", "20", "--steps", "6")
SMALL = ("--max-running-requests", "2", "--max-model-len", "64", "--speculative-num-steps", "0")


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


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run wrote."""
    folder = tmp_path_factory.mktemp("profile") / "made" / "<here>"
    with unconfigured():
        assert main(["profile", "--model", str(tiny_checkpoint), *LOAD, *SMALL,
                     "--output-dir", str(folder)]) == 0  # fmt: skip
    return folder


def test_table_and_files_say_the_same(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny_checkpoint), *LOAD, *SMALL, "--output-dir", str(tmp_path))
    done = run("profile", *flags)
    assert done.status == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        "profile.json", "trace.json", "profile.html"
    }  # fmt: skip
    found = json.loads((tmp_path / "profile.json").read_text())
    assert {"command", "date", "versions", "config", "summary"} <= set(found)
    assert re.search(r"^graph launches +1\.00 +0\.00", done.out, re.MULTILINE)
    assert f"seam share: {found['summary']['seam_share']:.2%}" in done.out
    assert "run-ahead: 0.83 steps" in done.out
    page = (tmp_path / "profile.html").read_text()
    assert f"seam share: {found['summary']['seam_share']:.2%}" in page
    assert '<th scope="row">graph launches</th><td>1.00</td><td>0.00</td>' in page


def test_trace_is_in_chromes_format(folder: Path) -> None:
    trace = json.loads((folder / "trace.json").read_text())
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert event["ph"] in "XMisf"
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"host", "engine loop"} <= names
    # slices of one row lie beside or inside each other
    for row in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        ends: list[float] = []
        slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == row]
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 0.002:
                ends.pop()
            ends.append(event["ts"] + event["dur"])
            assert ends == sorted(ends, reverse=True) or ends[-1] <= ends[-2] + 0.002
    arrows = [[e["id"] for e in events if e["ph"] == ph] for ph in "sf"]
    assert sorted(arrows[0]) == sorted(arrows[1])
    # one for each graph and one for the prefill
    assert len(set(arrows[0])) == len(arrows[0]) == 7
    graphs = [e for e in events if e["ph"] == "X" and e["cat"] == "graph"]
    assert [g["name"] for g in graphs] == ["verify+accept"] * 6


def test_page_needs_nothing_else(folder: Path) -> None:
    page = (folder / "profile.html").read_text()
    assert not re.search(r"(?:src|href)=\"(?!data:,)|https?://|innerHTML|eval\(", page)
    assert "default-src 'none'" in page
    assert "<!--" not in page


def test_text_becomes_no_markup() -> None:
    trace = Trace()
    with trace.span(Kind.ITERATION, "</script><b>"):
        trace.note("<i>", "<u>")
    text = page(trace, "<s>", ["<em>"], {"<q>": [["<p>"], ["<k>"]]})
    assert not re.search(r"<(?:b|i|u|s|em|q|k)>|<p><", text)
    assert text.count("</script>") == 2


def test_page_by_keyboard(folder: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or find_spec("playwright") is None:
        pytest.skip("needs chromium on the path and the package playwright")
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            opened = browser.new_page(color_scheme=scheme)
            opened.on("pageerror", lambda error: complaints.append(str(error)))
            opened.on("console", lambda said: complaints.append(said.text))
            opened.goto((folder / "profile.html").as_uri())
            chosen = opened.locator("#chosen")
            assert chosen.inner_text().startswith("iteration 1 of 6: iteration, at 0.0 µs, ")
            opened.keyboard.press("Tab")
            for _ in range(3):
                opened.keyboard.press("Tab")
            assert opened.evaluate("document.activeElement.id") == "timeline"
            opened.keyboard.press("ArrowRight")
            assert chosen.inner_text().startswith("iteration 2 of 6: ")
            opened.keyboard.press("ArrowDown")
            opened.keyboard.press("ArrowDown")
            assert re.match(r"part \d+ of \d+: ", chosen.inner_text())
            opened.keyboard.press("End")
            assert "decode (part)" in chosen.inner_text() or "decode, at" in chosen.inner_text()
            everything = opened.evaluate("view.to - view.from")
            opened.keyboard.press("+")
            assert opened.evaluate("view.to - view.from") == pytest.approx(everything / 2)
            opened.keyboard.press("0")
            assert opened.evaluate("view.to - view.from") == everything
            background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(17, 20, 24)"}[scheme]
            colours = opened.evaluate(
                "new Set(new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height)"
                ".data.buffer)).size"
            )
            # of bars, text and lines
            assert colours > 10
        browser.close()
    assert complaints == []
