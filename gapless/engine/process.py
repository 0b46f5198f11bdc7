"""The engine's own process: takes calls from a socket between two steps, and sends the news back.

It ends at `Stop`, with its parent, or when the engine cannot go on.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import asdict
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import zmq

from gapless.core.heap import freeze_heap
from gapless.engine import wire
from gapless.errors import (
    ContextTooLong,
    GaplessError,
    InternalError,
    InvalidRequest,
    RequestError,
)
from gapless.observe.logging import configure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.config.options import EngineOptions
    from gapless.core.messages import Update
    from gapless.engine.engine import Engine
    from gapless.text.grammar import Compilation

# calls taken between two steps, so that a flood of them cannot stop the steps
MAX_CALLS_PER_STEP = 256
# statistics are sent no more often than this, and always before the engine rests
STATS_INTERVAL_S = 0.2
# how often an idle engine looks whether a grammar has been compiled
COMPILE_POLL_MS = 5
# how long the last message may take to leave
LINGER_MS = 2000

logger = logging.getLogger(__name__)


def serve(options: EngineOptions, address: str, log_level: str) -> None:
    """Make an engine and run it until told to stop: the main function of the process."""
    # a signal reaches the whole group; the parent decides what it means, also for tp's ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent()
    configure(log_level)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(address)
    try:
        # imports torch, which the parent must not
        from gapless.engine.engine import Engine

        engine = Engine(options)
        freeze_heap()
        socket.send(wire.encode(_ready(engine)))
        EngineService(engine, socket).run()
        engine.close()
        status = 0
    except Exception as error:
        # others are the user's to mend, and say how
        if isinstance(error, InternalError) or not isinstance(error, GaplessError):
            logger.exception("the engine process ends")
        socket.send(wire.encode(wire.Ended(wire.Fault.of(error))))
        status = 1
    socket.close()
    context.term()
    # nothing is left to put in order, and threads of libraries must not hold the process back
    os._exit(status)


class EngineService:
    """Runs an engine for the calls that come in on a socket."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._poller = _poller(socket, engine.sentinels)
        self._answers: list[wire.Answer] = []
        # calls whose grammars are being compiled
        self._compiling: list[tuple[wire.Submit, list[Compilation]]] = []
        self._updates: list[Update] = []
        # when the statistics may be sent again, and whether they have changed since
        self._stats_due = 0.0
        self._has_stats = True
        self._is_stopping = False

    def run(self) -> None:
        """Serve until `Stop`."""
        while not self._is_stopping:
            self._take_calls()
            self._queue_compiled()
            # callers wait for these, and a step may take long
            if self._answers:
                self._send()
            if self._engine.has_work:
                self._updates += self._engine.step()
                self._has_stats = True
            self._send()

    def _take_calls(self) -> None:
        """Handle the calls that wait; without work, block until there is something to do."""
        if not self._poller.poll(self._patience_ms()):
            return
        # of a rank that ends, an idle engine hears here
        self._engine.check_ranks()
        for _ in range(MAX_CALLS_PER_STEP):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(wire.decode_call(data))
            self._has_stats = True

    def _patience_ms(self) -> int | None:
        if self._engine.has_work:
            return 0
        if self._compiling:
            return COMPILE_POLL_MS
        if not self._has_stats:
            return None
        return max(0, round(1000 * (self._stats_due - time.monotonic())))

    def _handle(self, call: wire.ToEngine) -> None:
        match call:
            case wire.Submit():
                self._compile(call)
            case wire.Abort():
                self._drop_compiling(call.request_ids)
                for request_id in call.request_ids:
                    self._updates += self._engine.abort(request_id)
            case wire.FlushCache():
                self._answers.append(wire.Answer(call.call, value=self._engine.flush_cache()))
                self._stats_due = 0.0
            case wire.Inspect():
                self._answers.append(wire.Answer(call.call))
                self._stats_due = 0.0
            case wire.Stop():
                self._is_stopping = True

    def _compile(self, call: wire.Submit) -> None:
        """Begin to compile a call's grammars beside the steps; the call is queued once they are."""
        grammars = {submission.params.grammar for submission in call.submissions}
        started = [self._engine.grammars.start(own) for own in grammars if own is not None]
        if started:
            self._compiling.append((call, started))
        else:
            self._answers.append(self._submit(call))

    def _queue_compiled(self) -> None:
        waiting = []
        for call, started in self._compiling:
            if all(compilation.is_settled for compilation in started):
                self._answers.append(self._submit(call))
            else:
                waiting.append((call, started))
        self._compiling = waiting

    def _drop_compiling(self, request_ids: Sequence[str]) -> None:
        """Refuse what is aborted before it was queued."""
        for call, started in list(self._compiling):
            if any(submission.request_id in request_ids for submission in call.submissions):
                self._compiling.remove((call, started))
                fault = wire.Fault.of(InvalidRequest("aborted while its grammar was compiled"))
                self._answers.append(wire.Answer(call.call, fault=fault))

    def _submit(self, call: wire.Submit) -> wire.Answer:
        try:
            self._engine.enqueue(call.submissions)
        except RequestError as error:
            return wire.Answer(call.call, fault=wire.Fault.of(error))
        refused = self._engine.take_refused()
        if not refused:
            return wire.Answer(call.call)
        for submission in call.submissions:
            self._engine.abort(submission.request_id)
        return wire.Answer(call.call, fault=wire.Fault.of(ContextTooLong(refused[0].error)))

    def _send(self) -> None:
        stats = None
        if self._has_stats and time.monotonic() >= self._stats_due:
            stats = self._engine.stats
            self._has_stats = False
            self._stats_due = time.monotonic() + STATS_INTERVAL_S
        if self._answers or self._updates or stats is not None:
            self._socket.send(wire.encode(wire.Report(self._answers, self._updates, stats)))
            self._answers, self._updates = [], []


def _poller(socket: zmq.Socket[bytes], sentinels: Sequence[int]) -> zmq.Socket[bytes] | zmq.Poller:
    """What says whether there are calls, or whether a rank has ended."""
    if not sentinels:
        return socket
    poller = zmq.Poller()
    for source in (socket, *sentinels):
        poller.register(source, zmq.POLLIN)
    return poller


def _ready(engine: Engine) -> wire.Ready:
    settings: dict[str, Any] = asdict(engine.config)
    return wire.Ready(str(engine.checkpoint), engine.limits, engine.default_params, settings)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "the engine process has a parent"

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
