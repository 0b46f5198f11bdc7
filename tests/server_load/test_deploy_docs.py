"""docs/deploy.md and the Dockerfile name what there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from gapless.cli.bench_serve import BenchServe
from gapless.config.options import EngineOptions
from gapless.server.options import ServerOptions

if TYPE_CHECKING:
    from tests.server_load.serving import Server

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
# of docker
FOREIGN_FLAGS = {"build-arg", "gpus", "read-only", "tmpfs", "stop-timeout", "shm-size", "ulimit"}


def test_flags_exist() -> None:
    options = (ServerOptions, EngineOptions, BenchServe)
    known = {field.name.replace("_", "-") for own in options for field in fields(own)}
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", PAGE))
    assert {"drain-seconds", "disable-prefix-cache", "slo"} <= named
    assert named <= known | FOREIGN_FLAGS


def test_paths_are_served(server: Server) -> None:
    served = set(server.http.get("/openapi.json").json()["paths"])
    named = set(re.findall(r"(?:GET |`)(/[a-z_]+)`", PAGE)) - {"/cache", "/tmp"}
    assert {"/health", "/ready", "/metrics"} <= named
    assert named <= served


def test_metrics_are_exported(server: Server) -> None:
    server.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 8})
    exported = set(re.findall(r"^(gapless:\w+)", server.http.get("/metrics").text, re.MULTILINE))
    named = set(re.findall(r"gapless:\w+", PAGE))
    assert len(named) > 8
    assert named <= exported


def test_image_copies_what_there_is() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    sources = [name for names in copied for name in names if not name.startswith(("-", "/"))]
    assert {"pyproject.toml", "constraints.txt", "gapless"} <= set(sources)
    assert all((ROOT / name).exists() for name in sources)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert all(f"!{name}" in ignored for name in sources)
