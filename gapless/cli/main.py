"""Choose a command, run it, and turn errors meant for people into one line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import tyro

from gapless.cli.bench import Bench
from gapless.cli.chat import Chat
from gapless.cli.eval import Eval
from gapless.cli.generate import Generate
from gapless.cli.inspect import Inspect
from gapless.cli.profile import Profile
from gapless.cli.serve import Serve
from gapless.errors import GaplessError

if TYPE_CHECKING:
    from collections.abc import Sequence

Command = (
    Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Profile, tyro.conf.subcommand("profile")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 where the user has to change something.

    Raises:
        SystemExit: the command line cannot be parsed (2), or help was asked for (0).
    """
    try:
        command: Serve | Generate | Chat | Eval | Bench | Profile | Inspect = tyro.cli(
            Command,
            prog="gapless",
            description="Serve hybrid linear-attention language models.",
            args=argv,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
        return command.run()
    except GaplessError as error:
        print(f"gapless: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gapless: interrupted", file=sys.stderr)
        return 130
