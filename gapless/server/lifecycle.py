"""A server from start to end: listening, loading, serving, draining, leaving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from gapless.core.heap import freeze_heap
from gapless.engine.client import EngineClient
from gapless.errors import ConfigError
from gapless.server.app import make_app
from gapless.server.errors import Unavailable
from gapless.server.prompts import PromptReader, read_template
from gapless.server.site import Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless.config.options import EngineOptions
    from gapless.engine.wire import Ready
    from gapless.server.options import ServerOptions

BACKLOG = 2048
# idle connections are kept longer than most proxies and clients keep theirs, so that it is not the
# server that closes one while a request is on its way
KEEP_ALIVE_S = 75
# threads that read prompts
NUM_READERS = 32
# between two looks at the event loop's lateness
LAG_INTERVAL_S = 0.1
# how long answers may take to leave once their work has ended
FAREWELL_S = 3.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a server is made of, checked before anything is started."""

    options: ServerOptions
    engine: EngineOptions
    log_level: str
    listener: socket.socket
    chat_template: str | None

    @property
    def url(self) -> str:
        """Where the server is reached."""
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(options: ServerOptions, engine: EngineOptions, log_level: str) -> int:
    """Serve until a signal or a failure; return the process's exit status.

    0: ended by a signal; 1: the engine ended by itself.

    Raises:
        GaplessError: the options cannot be honoured, or the engine cannot start.
    """
    template = read_template(options.chat_template)
    plan = Plan(options, engine, log_level, listen(options), template)
    return asyncio.run(_serve(plan))


async def _serve(plan: Plan) -> int:
    # more than cores, so that a few long prompts do not hold up the short ones
    readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="prompts")
    asyncio.get_running_loop().set_default_executor(readers)
    with _signals() as stops:
        engine = EngineClient(plan.engine, plan.log_level)
        site = Site(plan.options, plan.engine, engine)
        http = _HttpServer(plan, site)
        serving = asyncio.create_task(http.serve(sockets=[plan.listener]))
        watching = asyncio.create_task(_watch_lag(site))
        loading = asyncio.create_task(_load(plan, site))
        try:
            print(f"listening on {plan.url}", flush=True)
            return await _live(site, stops, loading)
        finally:
            watching.cancel()
            loading.cancel()
            http.should_exit = True
            done, _ = await asyncio.wait((serving,), timeout=2 * FAREWELL_S)
            if not done:
                http.force_exit = True
                await serving
            await engine.close()


async def _live(site: Site, stops: asyncio.Queue[int], loading: asyncio.Task[None]) -> int:
    """Serve until it is time to leave, and say with which status."""
    stop = asyncio.create_task(stops.get())
    await asyncio.wait((stop, loading), return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        # a fault of the start is the caller's to tell
        await loading
        await asyncio.wait((stop, site.engine.gone), return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        return await _drain(site, stops)
    logger.error("the engine is gone: %s", site.engine.gone.result())
    stop.cancel()
    await _farewell(site)
    return 1


async def _drain(site: Site, stops: asyncio.Queue[int]) -> int:
    """Refuse new work, and wait until what runs has ended, time is up or a second signal comes."""
    is_loading = site.phase is Phase.LOADING
    site.phase = Phase.DRAINING
    if is_loading:
        return 0
    limit = site.options.drain_seconds
    logger.info("draining: %d requests run, %g s for them", len(site.running), limit)
    idle, again = asyncio.create_task(site.idle()), asyncio.create_task(stops.get())
    await asyncio.wait(
        (idle, again, site.engine.gone), timeout=limit, return_when=asyncio.FIRST_COMPLETED
    )
    again.cancel()
    is_done = idle.done()
    idle.cancel()
    if not is_done:
        logger.warning("%d requests are ended before their time", len(site.running))
        for running in list(site.running.values()):
            running.fail(Unavailable("the server has shut down", "draining"))
        await _farewell(site)
    return 1 if site.engine.gone.done() else 0


async def _farewell(site: Site) -> None:
    """Let answers whose work has ended reach their clients."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await site.idle()


async def _load(plan: Plan, site: Site) -> None:
    """Wait for the engine, read the text side, and open the doors."""
    ready = await site.engine.ready()
    reader = await asyncio.to_thread(
        PromptReader, ready, plan.chat_template, plan.options.tool_call_parser
    )
    freeze_heap()
    site.open(ready, reader)
    logger.info("%s", _summary(site, ready))
    print(f"ready: {site.model_name} at {plan.url}", flush=True)


def _summary(site: Site, ready: Ready) -> str:
    config = ready.config
    cache = "off"
    if config["uses_prefix_cache"]:
        unit = "at snapshots of state" if config["row_bytes"] else "at full pages"
        cache = f"on, prefixes are resumed {unit}"
    drafts = config["max_window"] - 1
    shape = "drafts in a tree" if config["tree"] else "drafts"
    drafter = f"{config['drafter']}, {drafts} {shape}" if drafts else "none"
    return (
        f"serving {site.model_name}: context {ready.limits.max_model_len} tokens, "
        f"{config['max_running_requests']} requests at once, {config['num_pages']} pages of "
        f"{config['page_size']} tokens, prefix cache {cache}, speculation {drafter}"
    )


async def _watch_lag(site: Site) -> None:
    """Measure how late the event loop is, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        site.metrics.lagged(max(0.0, loop.time() - due))


class _HttpServer(uvicorn.Server):
    """uvicorn without its own handling of signals, which ends connections at once."""

    def __init__(self, plan: Plan, site: Site) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(site),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(FAREWELL_S),
            )
        )

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Capture none."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Queue[int]]:
    """Put signals that ask to stop into a queue."""
    loop = asyncio.get_running_loop()
    found: asyncio.Queue[int] = asyncio.Queue()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, found.put_nowait, number)
    try:
        yield found
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def listen(options: ServerOptions) -> socket.socket:
    """Bind the address, so that a port in use is seen before a model is loaded.

    Raises:
        ConfigError: it cannot be bound.
    """
    try:
        # the protocol must be named: asyncio sends without delay only where it reads TCP here, and
        # else every small answer waits 40 ms for the client's acknowledgement of the last
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP,
            flags=socket.AI_PASSIVE,
        )  # fmt: skip
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            undo.pop_all()
    except OSError as error:
        raise ConfigError(
            f"host={options.host!r}, port={options.port} cannot be listened on: {error}; choose "
            "another port, or 0 for a free one"
        ) from error
    return listener
