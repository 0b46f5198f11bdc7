"""What all endpoints share: the engine, the text side, the options, and how far the server is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import gapless
from gapless.observe.metrics import Metrics
from gapless.server.engine_samples import engine_samples
from gapless.server.errors import ApiError, Unavailable

if TYPE_CHECKING:
    from gapless.config.options import EngineOptions
    from gapless.engine.client import EngineClient
    from gapless.engine.wire import Ready
    from gapless.server.options import ServerOptions
    from gapless.server.prompts import PromptReader
    from gapless.server.running import Running

DEMO_NAME = "gapless-demo"


class Phase(StrEnum):
    """How far the server is."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Site:
    """One server's shared state; everything here belongs to the event loop."""

    def __init__(
        self, options: ServerOptions, engine_options: EngineOptions, engine: EngineClient
    ) -> None:
        self.options = options
        self.engine = engine
        self.model_name = options.served_model_name or engine_options.model or DEMO_NAME
        self.phase = Phase.LOADING
        self.created = int(time.time())
        self.metrics = Metrics(self.model_name, lambda: engine_samples(engine.stats))
        self.running: dict[str, Running] = {}
        """By the response's id."""
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._text: tuple[Ready, PromptReader] | None = None

    def open(self, ready: Ready, reader: PromptReader) -> None:
        """Begin to serve."""
        self._text = ready, reader
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    @property
    def ready(self) -> Ready:
        """What the engine said when it was ready."""
        return self._opened()[0]

    @property
    def reader(self) -> PromptReader:
        """The text side."""
        return self._opened()[1]

    def check_phase(self, *, takes_work: bool) -> None:
        """Raise if this is no time for a request.

        Args: takes_work: whether the request is new work, which a server that drains refuses.

        Raises:
            Unavailable: the model is being loaded, or the server ends.
        """
        if self.phase is Phase.LOADING:
            raise Unavailable("the model is being loaded; try again soon", "loading")
        if self.phase is Phase.DRAINING and takes_work:
            raise Unavailable("the server is shutting down; ask another one", "draining")

    def check_model(self, name: str) -> None:
        """Raise if a request asks for another model; none is as good as the right one.

        Raises:
            ApiError: with status 404.
        """
        if name and name != self.model_name:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"the model {name!r} does not exist; want {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def enter(self) -> None:
        """Note that a request is being answered."""
        self._num_open += 1
        self._is_idle.clear()

    def leave(self) -> None:
        """Note that one has been."""
        self._num_open -= 1
        if self._num_open == 0:
            self._is_idle.set()

    async def idle(self) -> None:
        """Block until no request is being answered."""
        await self._is_idle.wait()

    async def info(self) -> dict[str, Any]:
        """Return what there is to know, the key apart."""
        stats = await self.engine.inspect()
        options = asdict(self.options)
        options.pop("api_key")
        return {
            "version": gapless.__version__,
            "model": self.model_name,
            "phase": self.phase,
            "server": options,
            "engine": self.ready.config,
            "engine_pid": self.engine.pid,
            "num_open_requests": self._num_open,
            "num_tasks": len(asyncio.all_tasks()),
            "stats": asdict(stats),
        }

    def _opened(self) -> tuple[Ready, PromptReader]:
        assert self._text is not None, "requests are refused while loading"
        return self._text
