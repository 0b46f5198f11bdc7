"""Requests made from the server's own OpenAPI document find no server error, and it is true."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.server_load.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# no 5xx, and answers that the document describes
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
CHECKS += ",response_schema_conformance"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose requests are short, whatever they ask for."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(
        log, max_model_len=64, max_running_requests=8, num_threads=1, speculative_num_steps=0
    ) as running:
        yield running


def fuzz(server: Server, folder: Path, phases: str, num_examples: int, seconds: int) -> None:
    """Let schemathesis look for answers that it should not get."""
    if find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed; it is part of the test extra")
    document = server.http.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        # the schema of a whole stream, which schemathesis takes for that of each event
        answer = document["paths"][path]["post"]["responses"]["200"]
        del answer["content"]["text/event-stream"]["schema"]
    file = folder / "openapi.json"
    file.write_text(json.dumps(document))
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()",
        "run", str(file), "--url", server.url, "--checks", CHECKS,
        "--phases", phases, "--max-examples", str(num_examples),
        "--mode", "all", "--seed", "1", "--generation-database", "none",
        "--request-timeout", "60", "--no-color", "--continue-on-failure",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check_alive(server: Server) -> None:
    """The server still serves, and nothing runs on."""
    server.wait_until_idle(10.0)
    body = {"model": server.info()["model"], "prompt": "Once", "max_tokens": 2}
    assert server.http.post("/v1/completions", json=body).status_code == 200


def test_no_server_error(server: Server, tmp_path: Path) -> None:
    fuzz(server, tmp_path, "fuzzing", num_examples=20, seconds=100)
    check_alive(server)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_no_server_error_among_many(server: Server, tmp_path: Path) -> None:
    fuzz(server, tmp_path, "coverage,fuzzing", num_examples=300, seconds=900)
    check_alive(server)
