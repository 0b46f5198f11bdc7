"""What the measuring commands share: a plain table, and a JSON file that says how it was made."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import gapless
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gapless.config.config import Config

_NUMBERS = re.compile(r"\[\n\s+([-+.,0-9eE\s]+)\n\s+\]")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows of equal length: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def check_output(file: Path | None) -> None:
    """Refuse a file that cannot be written, before there is anything to lose.

    Raises:
        ConfigError: its folder does not exist, or it is a folder.
    """
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ConfigError(
            f"output={str(file)!r}: want a file in a folder that exists; make it first"
        )


def write_json(file: Path, results: Mapping[str, object], config: Config | None) -> None:
    """Write results after the circumstances they were made in; no config: no engine of its own.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(file, to_json({**circumstances(config), **results}), "output")


def write_text(file: Path, text: str, option: str) -> None:
    """Write the file that `option` names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option}={str(file)!r} cannot be written: {error}; name another"
        ) from error


def to_json(value: Mapping[str, object]) -> str:
    """Return indented JSON with every list of numbers on one line, for diffs that can be read."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    # strings hold no bare line feed, so that only real lists match
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def circumstances(config: Config | None) -> dict[str, object]:
    """Command line, versions, date, machine and the settings that the engine decided on."""
    versions = {"gapless": gapless.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    found: dict[str, object] = {
        "command": shlex.join(["gapless", *without_key(sys.argv[1:])]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "cpu": _cpu_model(),
    }
    if config is not None:
        found |= {
            "device": _device_model(config.device),
            "dtype": config.dtype,
            "num_threads": config.num_threads,
            "config": asdict(config),
        }
    return found


def without_key(argv: Sequence[str]) -> list[str]:
    """Return a command line with the value of --api-key left out."""
    hidden = list(argv)
    for i, word in enumerate(argv):
        name, equals, _ = word.partition("=")
        if name in ("--api-key", "--api_key"):
            if equals:
                hidden[i] = f"{name}=..."
            elif i + 1 < len(argv):
                hidden[i + 1] = "..."
    return hidden


def _device_model(device: str) -> str:
    if device != "cuda":
        return device
    import torch

    return torch.cuda.get_device_name()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
