"""`gapless bench serve` as a command, against a scripted server in another thread."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from gapless.cli import main
from tests.bench.stub_server import Reply, steady, stub_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.bench.stub_server import Body, Stub


@contextmanager
def stub_thread(script: Callable[[Body], Reply]) -> Iterator[Stub]:
    """A scripted server with an event loop of its own."""
    started, stubs = threading.Event(), []
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def serve() -> None:
        async with stub_server(script) as stub:
            stubs.append(stub)
            started.set()
            await stopping.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(10)
    try:
        yield stubs[0]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def bench(stub: Stub, *flags: str) -> int:
    """Run the command."""
    return main(["bench", "serve", "--base-url", stub.url, *flags])


def test_report_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, plot = tmp_path / "out.json", tmp_path / "out.svg"
    flags = (
        "--num-requests", "6", "--output-len", "3", "--concurrency", "2", "--warmup", "1",
        "--slo", "ttft:30000", "--api-key", "s3cret", "--extra-body", '{"top_k": 5}',
        "--ignore-eos", "--output", str(output), "--plot", str(plot),
    )  # fmt: skip
    monkeypatch.setattr("sys.argv", ["gapless", "bench", "serve", *flags])
    with stub_thread(steady(0.02, 0.01)) as stub:
        assert bench(stub, *flags) == 0
    out = capsys.readouterr().out
    assert "stub at http://127.0.0.1" in out
    for label in ("time to first token, ms", "requests/s within the limits", "sent late by"):
        assert label in out
    text = output.read_text()
    assert "s3cret" not in text
    written = json.loads(text)
    assert {"command", "date", "versions", "cpu", "benchmark", "summary"} <= set(written)
    assert written["summary"]["num_completed"] == len(written["requests"]) == 6
    assert written["summary"]["output_tokens"] == 18
    assert all(len(r["text_times"]) == 3 for r in written["requests"])
    assert plot.read_text().startswith("<svg")
    # two that tell how long words are, one of warm-up
    assert len(stub.bodies) == 2 + 1 + 6
    assert set(stub.keys) == {"Bearer s3cret"}
    body = stub.bodies[-1]
    assert (body["top_k"], body["ignore_eos"], body["temperature"]) == (5, True, 0.0)
    assert body["model"] == "stub"


def prompts_of(script: Callable[[Body], Reply], *flags: str) -> list[Any]:
    """Return what the server was asked, but for the first requests."""
    with stub_thread(script) as stub:
        assert bench(stub, "--warmup", "0", "--concurrency", "1", *flags) == 0
    return [body["messages"] for body in stub.bodies[2:]]


@pytest.mark.parametrize("workload", ["random", "shared-prefix", "chat-turn"])
def test_workloads_reproduce(workload: str) -> None:
    flags = ("--workload", workload, "--num-requests", "3", "--output-len", "1-3")
    first = prompts_of(steady(0, 0), *flags)
    assert len(first) >= 3
    assert prompts_of(steady(0, 0), *flags) == first
    assert prompts_of(steady(0, 0), *flags, "--seed", "1") != first


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two", "max_tokens": 2}\n')
    output = tmp_path / "out.json"
    with stub_thread(steady(0, 0)) as stub:
        status = bench(
            stub, "--workload", "jsonl", "--file", str(file), "--warmup", "0", "--concurrency", "1",
            "--model", "given", "--output", str(output),
        )  # fmt: skip
    assert status == 0
    assert [(b["messages"][0]["content"], b["max_tokens"]) for b in stub.bodies] == [
        ("one", 64), ("two", 2),
    ]  # fmt: skip
    assert stub.bodies[0]["model"] == "given"
    settings = json.loads(output.read_text())["benchmark"]
    assert (settings["file"], settings["request_rate"]) == (str(file), None)


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPLESS_API_KEY", "from-env")
    with stub_thread(steady(0, 0)) as stub:
        assert bench(stub, "--num-requests", "1", "--warmup", "0") == 0
    assert set(stub.keys) == {"Bearer from-env"}


def test_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def script(body: Body) -> Reply:
        seen.append(1)
        # after the two that tell how long words are, every other one
        return Reply(status=500) if len(seen) > 2 and len(seen) % 2 else steady(0, 0)(body)

    with stub_thread(script) as stub:
        assert bench(stub, "--num-requests", "6", "--warmup", "0", "--concurrency", "1") == 0
    rows = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert (rows["requests completed"], rows["requests failed"]) == ("3", "3")
    assert rows["  HTTP 500"] == "3"


def test_nothing_answered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "one"}\n')
    with stub_thread(lambda _: Reply(status=404)) as stub:
        status = bench(stub, "--workload", "jsonl", "--file", str(file))
    assert status == 2
    assert "no request was answered; the first one: HTTP 404" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--request-rate", "5", "--concurrency", "2"), "want one of them"),
        (("--workload", "jsonl"), "want both jsonl and a file"),
        (("--file", "x"), "want both jsonl and a file"),
        (("--concurrency", "0"), "concurrency=0: want at least 1"),
        (("--request-rate", "0"), "want more than 0"),
        (("--turns", "x"), "turns='x'"),
        (("--slo", "x"), "slo='x'"),
        (("--plot", "x.png"), "ends in .svg"),
        (("--output", "/no/such/folder/x"), "want a file in a folder that exists"),
        (("--extra-body", "[]"), "want a JSON object"),
        (("--base-url", "http://127.0.0.1:1"), "start the server"),
    ],
)
def test_wrong_flags(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert message in capsys.readouterr().err
