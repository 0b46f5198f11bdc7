"""`gapless serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import tyro  # noqa: TC002 (annotations are read when parsing)

from gapless.config.options import EngineOptions
from gapless.errors import ConfigError
from gapless.observe.logging import configure
from gapless.server.options import ServerOptions


@dataclass(frozen=True)
class Serve:
    """Serve a model with OpenAI's API. SIGTERM lets running requests finish, a second one ends."""

    path: tyro.conf.Positional[str | None] = None
    """Directory or hub id of the checkpoint, as --model."""
    log_level: str = "info"
    """Least severe messages to show: debug, info, warning or error."""
    server: ServerOptions = field(default_factory=ServerOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def run(self) -> int:
        """Run the command."""
        from gapless.server.lifecycle import run

        configure(self.log_level)
        engine, server = self.engine, self.server
        if self.path is not None:
            if engine.model is not None:
                raise ConfigError(
                    f"{self.path!r} and model={engine.model!r} were both given; give one of them"
                )
            engine = replace(engine, model=self.path)
        if server.api_key is None:
            server = replace(server, api_key=os.environ.get("GAPLESS_API_KEY"))
        return run(server, engine, self.log_level)
