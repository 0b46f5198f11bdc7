"""A server in a process of its own, its clients, and the same model offline."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from gapless import LLM

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from gapless.cli import main; sys.exit(main(sys.argv[1:]))"
MODEL = "gapless-demo"
OPTIONS = {"max_running_requests": 4, "max_model_len": 256, "dtype": "float64"}
QUESTION = [{"role": "user", "content": "Ann has 4 boxes with 6 pens each. How many pens?"}]
# how long a test waits for what must happen; nothing here takes a tenth of it on an idle machine
PATIENCE_S = 60.0


class ServerProcess:
    """`gapless serve` on a free port."""

    def __init__(self, *args: str, log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = self._popen(errors, args, env)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.url = self.line("listening on ").removeprefix("listening on ")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _popen(errors: Any, args: tuple[str, ...], env: dict[str, str] | None) -> Any:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "serve", "--port", "0", "--num-threads", "1", *args],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    def line(self, beginning: str) -> str:
        """Wait for a line of output that begins so."""
        while (line := self._lines.get(timeout=PATIENCE_S)) is not None:
            if line.startswith(beginning):
                return line
        raise AssertionError(f"no line {beginning!r}: {self.log.read_text()[-2000:]}")

    def wait(self) -> int:
        """Wait for the end, and return the exit status."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join()
        self.process.stdout.close()
        return status

    def close(self) -> None:
        """End it, whatever it is doing."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


Start = Callable[..., ServerProcess]


def flags(options: dict[str, Any]) -> list[str]:
    """Return options as arguments of the command."""
    return [part for k, v in options.items() for part in (f"--{k.replace('_', '-')}", str(v))]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers that end with the module."""
    servers: list[ServerProcess] = []

    def start_one(*args: str, env: dict[str, str] | None = None) -> ServerProcess:
        log = tmp_path_factory.mktemp("server") / "log"
        servers.append(ServerProcess(*args, log=log, env=env))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the bundled model that all modules share."""
    log = tmp_path_factory.mktemp("server") / "log"
    process = ServerProcess(*flags(OPTIONS), log=log)
    try:
        process.line("ready")
        yield process
    finally:
        process.close()


@pytest.fixture(scope="session")
def plain_client(server: ServerProcess) -> Iterator[httpx2.Client]:
    """One client for all tests, since making one takes longer than most of them."""
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def http(plain_client: httpx2.Client) -> Iterator[httpx2.Client]:
    """Plain HTTP to the shared server; afterwards it holds nothing of the test's."""
    yield plain_client
    wait_until(lambda: is_at_rest(plain_client))


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model offline."""
    return LLM(**OPTIONS, num_threads=1)


def stats(http: httpx2.Client) -> dict[str, Any]:
    """Return what the engine holds at this moment."""
    return http.get("/server_info").json()["stats"]


def is_at_rest(http: httpx2.Client) -> bool:
    """Whether the engine runs nothing."""
    found = stats(http)
    return found["num_running"] == found["num_waiting"] == 0


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE_S) -> float:
    """Ask until it holds, and return how long that took."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds, f"not so after {seconds} s"
    return time.monotonic() - start
