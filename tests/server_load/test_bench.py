"""`gapless bench serve` on the real server: its counts, and what the prefix cache spares."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from gapless.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server_load.serving import Server


def bench(server: Server, output: Path, *flags: str) -> dict[str, Any]:
    """Run the command and return its summary."""
    common = ("--base-url", server.url, "--warmup", "1", "--output", str(output))
    assert main(["bench", "serve", *common, *flags]) == 0
    summary: dict[str, Any] = json.loads(output.read_text())["summary"]
    assert summary["num_failed"] == summary["num_uncounted"] == 0
    return summary


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_counts_are_the_server_s(server: Server, tmp_path: Path, endpoint: str) -> None:
    ((_, before),) = server.samples("gapless:generation_tokens_total")
    found = bench(
        server, tmp_path / "out.json", "--endpoint", endpoint, "--num-requests", "6",
        "--concurrency", "3", "--input-len", "60", "--output-len", "8", "--ignore-eos",
    )  # fmt: skip
    ((_, after),) = server.samples("gapless:generation_tokens_total")
    assert found["num_completed"] == 6
    assert found["output_tokens"] == 6 * 8
    # two requests of one token tell how long words are, one is the warm-up
    assert after - before == 6 * 8 + 2 + 8
    assert found["prompt_tokens"] == pytest.approx(6 * 60, rel=0.15)
    assert found["cached_tokens"] == 0


def test_shared_prefixes_are_cached(server: Server, tmp_path: Path) -> None:
    found = bench(
        server, tmp_path / "out.json", "--workload", "shared-prefix", "--num-requests", "8",
        "--num-groups", "1", "--prefix-len", "200", "--input-len", "20", "--output-len", "2",
        "--concurrency", "1",
    )  # fmt: skip
    # a branch is kept when prompts part there for the second time
    assert found["cached_tokens"] >= 5 * 150


def test_chats_resume(server: Server, tmp_path: Path) -> None:
    found = bench(
        server, tmp_path / "out.json", "--workload", "chat-turn", "--num-requests", "2",
        "--turns", "3", "--input-len", "40", "--output-len", "8", "--concurrency", "2",
    )  # fmt: skip
    assert found["num_completed"] == 6
    assert found["cached_tokens"] >= 0.4 * found["prompt_tokens"]
