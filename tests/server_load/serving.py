"""`gapless serve` in a process of its own, seen from outside: HTTP and /proc."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_START_SECONDS = 90.0
_SETTLE_SECONDS = 0.3


class Server:
    """A running server."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.http = httpx2.Client(base_url=url, timeout=30.0)

    def info(self) -> dict[str, Any]:
        """What it says of itself."""
        response = self.http.get("/server_info")
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of one metric's samples."""
        text = self.http.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:{{(.*?)}})? (\S+)$", text, re.MULTILINE)
        return [(dict(re.findall(r'(\w+)="(.*?)"', own)), float(value)) for own, value in found]

    def holdings(self) -> dict[str, int]:
        """What requests and the prefix cache hold once the cache has forgotten, and what both
        processes have open."""
        self.http.post("/flush_cache").raise_for_status()
        info = self.info()
        stats, pids = info["stats"], {"http": self.pid, "engine": info["engine_pid"]}
        names = ("num_running", "num_waiting", "num_free_pages", "num_free_rows")
        files = {f"{name} files": len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}
        return {**{name: stats[name] for name in names}, **files, "tasks": info["num_tasks"]}

    def settled_holdings(self) -> dict[str, int]:
        """Holdings that do not change any more: the last connections close after their answers,
        and the engine tells its numbers some times per second."""
        found = [self.holdings()]

        def is_settled() -> bool:
            time.sleep(_SETTLE_SECONDS)
            found.append(self.holdings())
            return found[-1] == found[-2]

        until(is_settled, 10.0)
        return found[-1]

    def wait_until_idle(self, seconds: float) -> float:
        """Return how long it took until nothing ran, waited or was being answered."""

        def is_idle() -> bool:
            info = self.info()
            # the question itself may count as a request
            busy = info["stats"]["num_running"] + info["stats"]["num_waiting"]
            return busy == 0 and info["num_open_requests"] <= 1

        return until(is_idle, seconds)


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Ask until `condition` holds and return how long it took.

    Raises:
        AssertionError: it does not within `seconds`.
    """
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not so within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - start


def flags_of(options: dict[str, Any]) -> list[str]:
    """Options as flags."""
    found: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        found += [flag] if value is True else [flag, str(value)]
    return found


@contextmanager
def serving(log: Path, **options: Any) -> Iterator[Server]:
    """Serve the bundled model on a free port; what the server logs goes to a file."""
    command = [sys.executable, "-c", "from gapless.cli import main; raise SystemExit(main())"]
    command += ["serve", "--port", "0", *flags_of(options)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    environment.pop("GAPLESS_API_KEY", None)
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert found is not None, log.read_text()
        server = Server(found[0], process.pid)
        until(lambda: server.http.get("/ready").status_code == 200, _START_SECONDS)
        yield server
        server.http.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
