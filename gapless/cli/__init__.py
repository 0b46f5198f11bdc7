"""The command line: one file per command, flags generated from dataclasses."""

from gapless.cli.main import main

__all__ = ["main"]
