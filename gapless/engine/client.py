"""The engine process as seen by asyncio code: prompts in, streams of updates out.

Imports no torch. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import tempfile
from itertools import count
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from gapless.engine import process, wire
from gapless.errors import ConfigError, GaplessError, InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gapless.config.options import EngineOptions
    from gapless.core.messages import EngineStats, Submission, Update

# how long the engine process gets to end by itself
GRACE_S = 5.0
# how long its last words may be under way when it has ended
LAST_WORDS_S = 0.5

logger = logging.getLogger(__name__)


class EngineGone(InternalError):
    """The engine process has ended, and with it all requests."""


class UpdateStream:
    """Updates of submissions that belong together; `close` it in any case."""

    def __init__(self, client: EngineClient, submissions: Sequence[Submission]) -> None:
        self._client = client
        self._open = {submission.request_id: submission.params.n for submission in submissions}
        self.request_ids = tuple(self._open)
        self._updates: list[Update] = []
        self._error: BaseException | None = None
        self._is_accepted = False
        self._has_news = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a continuation has not ended."""
        return bool(self._open)

    async def accepted(self) -> None:
        """Block until the engine has queued the submissions.

        Raises:
            RequestError: it refuses them.
            EngineGone: it has ended.
        """
        while not self._is_accepted:
            await self._news()

    async def take(self) -> list[Update]:
        """Block until there are updates, and take all; empty once every continuation has ended.

        Raises:
            EngineGone, or what the stream was made to `fail` with.
        """
        while not self._updates and (self._open or self._error is not None):
            await self._news()
        updates, self._updates = self._updates, []
        return updates

    def fail(self, error: BaseException) -> None:
        """End all continuations, and have those who wait for the stream see `error`."""
        if self._error is None:
            self._error = error
            self._has_news.set()
            self.close()

    def close(self) -> None:
        """Let go of the stream, and free what the engine holds for it."""
        self._client._leave(self, tuple(self._open))
        self._open.clear()

    def _accept(self, fault: wire.Fault | None) -> None:
        if fault is not None:
            self._open.clear()
            self.fail(fault.error())
        self._is_accepted = True
        self._has_news.set()

    def _put(self, update: Update) -> None:
        self._updates.append(update)
        self._has_news.set()
        if update.finish_reason is None:
            return
        self._open[update.request_id] -= 1
        if self._open[update.request_id] == 0:
            del self._open[update.request_id]

    async def _news(self) -> None:
        if self._error is None:
            await self._has_news.wait()
            self._has_news.clear()
        if self._error is not None:
            raise self._error


class EngineClient:
    """Starts an engine process and talks to it."""

    def __init__(self, options: EngineOptions, log_level: str) -> None:
        """Start it; `ready` says when it can serve.

        Raises:
            ConfigError: there is no place for its socket.
        """
        # mkdtemp's directories are the owner's alone, and so is the socket in it
        self._directory = tempfile.TemporaryDirectory(prefix="gapless-")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self._directory.name}/engine"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{address} cannot be a socket: {error}; set TMPDIR to a short path that can be "
                "written"
            ) from error
        self._calls = count()
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._accepting: dict[int, UpdateStream] = {}
        self._streams: dict[str, UpdateStream] = {}
        self.stats: EngineStats | None = None
        """The newest that have come."""
        self.gone: asyncio.Future[GaplessError] = asyncio.get_running_loop().create_future()
        """Done when the engine process has ended by itself, with the reason."""
        self._ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self._fault: asyncio.Future[wire.Fault] = asyncio.get_running_loop().create_future()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=process.serve, args=(options, address, log_level), name="gapless engine"
        )
        self._process.start()
        receiving = asyncio.create_task(self._receive())
        receiving.add_done_callback(self._on_deaf)
        self._tasks = [receiving, asyncio.create_task(self._watch())]

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._process.pid is not None, "the process was started"
        return self._process.pid

    async def ready(self) -> wire.Ready:
        """Block until the engine can serve.

        Raises:
            GaplessError: it could not start, for the reason that it gives.
        """
        await asyncio.wait((self._ready, self.gone), return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        raise self.gone.result()

    def submit(self, submissions: Sequence[Submission]) -> UpdateStream:
        """Send submissions; the engine takes all or none, which the stream tells.

        Prompts have passed `PromptLimits.check`; ids are of no request that is alive.

        Raises:
            EngineGone: there is none.
        """
        stream = UpdateStream(self, submissions)
        self._check()
        call = next(self._calls)
        self._accepting[call] = stream
        self._streams |= dict.fromkeys(stream.request_ids, stream)
        self._send(wire.Submit(call, tuple(submissions)))
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their streams get last updates with finish reason `abort`."""
        if not self.gone.done():
            self._send(wire.Abort(tuple(request_ids)))

    async def flush_cache(self) -> int:
        """Forget prefixes that no request is using; return how many tokens they had.

        Raises:
            EngineGone: there is none.
        """
        return await self._call(wire.FlushCache)

    async def inspect(self) -> EngineStats:
        """Return statistics as of a moment after the call.

        Raises:
            EngineGone: there is none.
        """
        await self._call(wire.Inspect)
        assert self.stats is not None, "they come with the answer"
        return self.stats

    async def close(self) -> None:
        """End the process, and with it what still runs; harmless when it has ended."""
        for task in self._tasks:
            task.cancel()
        if self._process.is_alive():
            if self._ready.done():
                self._send(wire.Stop())
                await asyncio.to_thread(self._process.join, GRACE_S)
            if self._process.is_alive():
                self._process.kill()
                await asyncio.to_thread(self._process.join)
        self._socket.close()
        self._context.term()
        self._directory.cleanup()

    async def _call(self, kind: type[wire.FlushCache | wire.Inspect]) -> int:
        self._check()
        call = next(self._calls)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._answers[call] = answer
        self._send(kind(call))
        return await answer

    def _check(self) -> None:
        if self.gone.done():
            raise EngineGone(str(self.gone.result()))

    def _send(self, call: wire.ToEngine) -> None:
        # without a high-water mark a message is always taken at once
        self._socket.send(wire.encode(call))

    def _leave(self, stream: UpdateStream, open_ids: tuple[str, ...]) -> None:
        for request_id in stream.request_ids:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
        if open_ids:
            self.abort(open_ids)

    async def _receive(self) -> None:
        while True:
            news = wire.decode_news(await self._socket.recv())
            match news:
                case wire.Report():
                    self._deliver(news)
                case wire.Ready():
                    self._ready.set_result(news)
                case wire.Ended():
                    self._fault.set_result(news.fault)

    def _on_deaf(self, receiving: asyncio.Task[None]) -> None:
        """End the process if its news cannot be read: nobody must wait for what never comes."""
        if not receiving.cancelled():
            logger.error("the engine's news cannot be read", exc_info=receiving.exception())
            self._process.kill()

    def _deliver(self, report: wire.Report) -> None:
        if report.stats is not None:
            self.stats = report.stats
        for answer in report.answers:
            stream = self._accepting.pop(answer.call, None)
            if stream is not None:
                stream._accept(answer.fault)
            elif not (waiting := self._answers.pop(answer.call)).done():
                waiting.set_result(answer.value)
        for update in report.updates:
            found = self._streams.get(update.request_id)
            if found is not None:
                found._put(update)

    async def _watch(self) -> None:
        """Tell everybody when the process has ended."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        await asyncio.wait((self._fault,), timeout=LAST_WORDS_S)
        self._process.join()
        self.gone.set_result(self._reason())
        error = EngineGone(str(self.gone.result()))
        for stream in set(self._streams.values()):
            stream.fail(error)
        for answer in self._answers.values():
            answer.set_exception(error)

    def _reason(self) -> GaplessError:
        if self._fault.done():
            return self._fault.result().error()
        code = self._process.exitcode
        if code is not None and code < 0:
            return InternalError(
                f"the engine process was ended by signal {signal.Signals(-code).name}"
            )
        return InternalError(f"the engine process ended with exit code {code}")
