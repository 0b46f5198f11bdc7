"""`gapless eval`: tasks, tables, JSON, and the comparison with transformers."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

from gapless.assets import heldout

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Done, Run

SMALL = ("--max-running-requests", "8", "--max-model-len", "512")


def rows(done: Done) -> list[list[str]]:
    """Cells of the printed table; words are two or more blanks apart."""
    return [re.split(r" {2,}", line) for line in done.out.splitlines()]


def sets(output: Path) -> dict[str, Any]:
    """Results by the name of their set."""
    return {found["name"]: found for found in json.loads(output.read_text())["sets"]}


def test_bundled_sets(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    flags = (
        "--limit",
        "1",
        "--max-tokens",
        "60",
        "--max-text-tokens",
        "30",
        "--output",
        str(output),
    )
    done = run("eval", *flags, *SMALL)
    assert done.status == 0
    table = rows(done)
    assert table[0] == ["set", "measure", "gapless"]
    assert ["level1", "right, of 1", "1"] in table
    assert ["text", "tokens predicted", "29"] in table
    found = sets(output)
    assert set(found) == {"level1", "level2", "text"}
    (attempt,) = found["level1"]["gapless"]["attempts"]
    assert (attempt["expected"], attempt["answer"], attempt["is_right"]) == (40, 40, True)
    assert attempt["text"].endswith("#### 40")
    assert len(attempt["token_ids"]) > 20
    written = json.loads(output.read_text())
    assert {"command", "date", "versions", "cpu", "dtype", "num_threads"} <= set(written)
    assert "transformers" not in found["level1"]


def test_files_and_limits(run: Run, tmp_path: Path) -> None:
    problems, texts = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    problems.write_text('{"question": "What is 1 + 1?", "answer": "#### 2"}\n' * 3)
    texts.write_text('{"text": "The capital of"}\n' * 3)
    done = run("eval", "--file", str(texts), str(problems), "--limit", "2", "--max-tokens", "2",
               *SMALL)  # fmt: skip
    assert done.status == 0
    assert [row[0] for row in rows(done)[1:]] == ["t"] * 4 + ["p"] * 3
    assert ["p", "right, of 2", "0"] in rows(done)
    (predicted,) = (row[2] for row in rows(done) if row[1] == "tokens predicted")
    assert int(predicted) % 2 == 0


def test_against_transformers(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    flags = ("--limit", "2", "--max-tokens", "8", "--max-text-tokens", "20")
    files = ("--file", str(heldout("level2")), str(heldout("text")))
    done = run("eval", *files, *flags, "--against", "transformers", "--output", str(output), *SMALL)
    assert done.status == 0
    assert rows(done)[0] == ["set", "measure", "gapless", "transformers"]
    assert ["level2", "right, of 2", "0", "0"] in rows(done)
    assert "level2: 0 of 2 transcripts differ" in done.out
    assert re.search(
        r"text: perplexity is (1\.00000|0\.99999)\d* of that by transformers", done.out
    )
    found = sets(output)
    ours, theirs = (found["level2"][side]["attempts"] for side in ("gapless", "transformers"))
    assert ours == theirs
    assert [len(attempt["token_ids"]) for attempt in ours] == [8, 8]
    assert found["text"]["perplexity_ratio"] == pytest.approx(1.0, abs=1e-5)


def test_without_transformers_nothing_is_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for command in (("eval",), ("bench", "decode")):
        done = run(*command, "--against", "transformers")
        assert done.status == 2
        assert "BackendUnavailable" in done.err
        assert "pip install 'gapless[test]'" in done.err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_bundled_sets_against_transformers(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    assert run("eval", "--against", "transformers", "--output", str(output)).status == 0
    found = sets(output)
    assert found["level1"]["gapless"]["num_problems"] == 500
    assert found["level1"]["gapless"]["num_right"] >= 495
    assert found["level2"]["gapless"]["num_problems"] == 200
    assert found["level2"]["gapless"]["num_right"] >= 185
    for name, most in (("level1", 2), ("level2", 1)):
        assert len(found[name]["partings"]) <= most, found[name]["partings"]
    assert found["text"]["perplexity_ratio"] == pytest.approx(1.0, abs=1e-3)
