"""`gapless bench decode`: what is printed and written, alone and compared."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from gapless.cli.report import table, to_json

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

TINY = ("--num-prompts", "2", "--output-len", "3", "--rounds", "2")
SMALL = (
    "--max-running-requests", "2", "--max-model-len", "512", "--speculative-num-steps", "0",
)  # fmt: skip


def test_alone(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = run("bench", "decode", *TINY, "--output", str(output), *SMALL)
    assert done.status == 0
    for label in ("decode tokens/s", "decode ms per token", "time to first token, ms"):
        assert f"gapless single: {label}" in done.out
    assert "gapless concurrent: decode tokens/s" in done.out
    assert "gapless concurrent: tokens/s with prefill" in done.out
    assert " / " not in done.out
    written = json.loads(output.read_text())
    assert {"command", "date", "versions", "cpu", "dtype", "num_threads"} <= set(written)
    assert set(written["versions"]) == {"gapless", "python", "torch", "transformers"}
    modes = [(r["round"], r["mode"], r["num_tokens"]) for r in written["rounds"]]
    assert modes == [(1, "single", 3), (1, "concurrent", 6), (2, "single", 3), (2, "concurrent", 6)]
    assert all(0 < r["first_token_seconds"] < r["seconds"] for r in written["rounds"])


def test_changed_options_against_those_given(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    changes = ("--ab", "linear_replayssm_cache_len=1", "--ab", "page-size=8")
    done = run("bench", "decode", *TINY, *changes, "--output", str(output), *SMALL)
    assert done.status == 0
    assert "B: with linear_replayssm_cache_len=1, page-size=8" in done.out
    assert "B / A concurrent: decode tokens/s" in done.out
    written = json.loads(output.read_text())
    configs = [
        (c["replay_len"], c["page_size"], c["max_model_len"]) for c in written["configs"].values()
    ]
    assert configs == [(16, 16, 512), (1, 8, 512)]
    order = [(r["round"], r["side"]) for r in written["rounds"] if r["mode"] == "single"]
    assert order == [(1, "B"), (1, "A"), (2, "A"), (2, "B")]
    rates = {
        (r["round"], r["side"]): r["num_tokens"] / r["seconds"]
        for r in written["rounds"]
        if r["mode"] == "concurrent"
    }
    (summary,) = (
        s for s in written["summary"] if s["figure"] == "B / A concurrent: tokens/s with prefill"
    )
    assert summary["rounds"] == pytest.approx([rates[i, "B"] / rates[i, "A"] for i in (1, 2)])


def test_against_transformers(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    flags = ("--against", "transformers", "--warmup", "0", "--output", str(output))
    done = run("bench", "decode", *TINY, *flags, *SMALL)
    assert done.status == 0
    for ours, theirs in (
        ("single", "single"),
        ("concurrent", "sequential"),
        ("concurrent", "batch"),
    ):
        label = f"gapless {ours} / transformers {theirs}: tokens/s with prefill"
        assert label in done.out
    found = json.loads(output.read_text())["rounds"]
    tokens = {(r["side"], r["mode"]): r["num_tokens"] for r in found if r["round"] == 1}
    assert tokens == {
        ("gapless", "single"): 3,
        ("gapless", "concurrent"): 6,
        ("transformers", "single"): 3,
        ("transformers", "sequential"): 6,
        ("transformers", "batch"): 6,
    }


def test_table() -> None:
    assert table([("", "a", "bb"), ("long", "1.5", "2")]) == "        a  bb\nlong  1.5   2"


def test_lists_of_numbers_are_on_one_line() -> None:
    value = {"a": [1, -2.5, 3e-9], "b": ["[\n 1\n]", {"c": [7]}], "d": [], "e": [[1, 2], [3]]}
    text = to_json(value)
    assert json.loads(text) == value
    assert '"a": [1, -2.5, 3e-09]' in text
    assert '"c": [7]' in text
    assert text.count("\n") > 10
