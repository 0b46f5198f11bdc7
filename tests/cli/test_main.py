"""The command line as a whole: commands, help, mistakes."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

from gapless.config.options import EngineOptions

if TYPE_CHECKING:
    from tests.cli.conftest import Run

COMMANDS = [("generate",), ("eval",), ("serve",), ("bench", "decode"), ("profile",)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_lists_every_engine_option(run: Run, command: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert done.status == 0
    for field in fields(EngineOptions):
        assert re.search(rf"--{field.name.replace('_', '-')}[ ,]", done.out), field.name


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_unknown_flag_suggests_a_known_one(run: Run, command: tuple[str, ...]) -> None:
    done = run(*command, "--page-sise", "4")
    assert done.status == 2
    assert "--page-size" in done.err + done.out


def test_commands_are_listed(run: Run) -> None:
    assert all(command[0] in run("--help").out for command in COMMANDS)
    assert run("bench").status == 2
    assert "decode" in run("bench", "--help").out
    assert run("serv").status == 2


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("generate", "a", "--temperature", "-1"), "InvalidRequest: temperature=-1.0: want a"),
        (("generate", "a", "--page-size", "0"), "ConfigError: page_size=0: want an integer"),
        (("generate", "a", "--log-level", "loud"), "ConfigError: log level 'loud'"),
        (("eval", "--limit", "0"), "InvalidRequest: limit=0: want at least 1"),
        (("eval", "--max-text-tokens", "1"), "InvalidRequest: max_text_tokens=1: want at least 2"),
        (("eval", "--max-tokens", "0"), "InvalidRequest: max_tokens=0: want an integer from 1"),
        (("eval", "--file", "/none.jsonl"), "InvalidRequest: /none.jsonl cannot be read"),
        (("eval", "--output", "/none/x.json"), "ConfigError: output='/none/x.json': want a file"),
        (("bench", "decode", "--num-prompts", "0"), "ConfigError: num_prompts=0: want at least 1"),
        (("bench", "decode", "--output-len", "1"), "ConfigError: output_len=1: want at least 2"),
        (("bench", "decode", "--rounds", "0"), "ConfigError: rounds=0: want at least 1"),
        (("bench", "decode", "--warmup", "-1"), "ConfigError: warmup=-1: want at least 0"),
        (("bench", "decode", "--ab", "page_sise=4"), "unknown option 'page_sise'; did you mean"),
        (("bench", "decode", "--output", "/"), "ConfigError: output='/': want a file"),
        (("profile", "--steps", "0"), "ConfigError: steps=0: want at least 1"),
        (("profile", "--output-len", "1"), "ConfigError: output_len=1: want at least 2"),
        (
            ("profile", "--output-dir", "/proc/x"),
            "ConfigError: output_dir='/proc/x' cannot be made",
        ),
    ],
)
def test_mistakes_are_one_line(run: Run, argv: tuple[str, ...], line: str) -> None:
    done = run(*argv)
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("gapless: ")
    assert done.err.count("\n") == 1
    assert line in done.err


def test_interruption_has_its_own_status(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(level: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gapless.cli.generate.configure", interrupt)
    done = run("generate", "a")
    assert (done.status, done.err) == (130, "gapless: interrupted\n")
