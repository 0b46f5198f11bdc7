"""Tensor-parallel ranks above 0: processes that load their part and run the plans of rank 0.

Rank 0 is the process of the engine, with scheduler and runner. It sends each plan down a pipe to
its own children before it launches it. All ranks then make the same calls in the same order and
sample from the same logits, so their slot tables stay equal, and only rank 0 reads results.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gapless.core.heap import freeze_heap
from gapless.core.request import Request
from gapless.engine.process_group import Meeting, ProcessCommunicator
from gapless.errors import InternalError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from gapless.core.plan import StepPlan, StepResult
    from gapless.engine.loop import Handle
    from gapless.layers.placement import Communicator
    from gapless.runner.runner import Runner

Build = Callable[[int, "Communicator"], "Runner"]
"""`(rank, communicator) -> its runner`; travels to the workers, so a partial of a function."""

# reports of a worker
STARTED, READY = "started", "loaded"
# how long a worker may take to import what it needs
START_LIMIT_S = 180.0
# how long workers get to end by themselves, and how long a failed one to say why
GRACE_S = 3.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """A worker's last report."""

    summary: str
    trace: str


class PlanWriter:
    """Packs plans for the workers.

    A request's fields and tokens go along with the first segment that needs them; from then on its
    slot stands for it. So a worker knows a request's tokens as of its last admission.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Request, int]] = {}

    def pack(self, plan: StepPlan) -> bytes:
        """Turn a plan into bytes for `PlanReader`, which reads them in the same order."""
        slot_of = {row.request: row.slot for row in plan.decode}
        for segment in plan.prefill:
            request, slot = segment.request, segment.slot
            known = (request, len(request.token_ids))
            if self._known.get(slot) == known:
                slot_of[request] = slot
            else:
                slot_of.pop(request, None)
                self._known[slot] = known
        for row in plan.decode:
            assert self._known[row.slot][0] is row.request, f"slot {row.slot} is not its request's"
        buffer = io.BytesIO()
        _Pickler(buffer, slot_of).dump(plan)
        return buffer.getvalue()


class PlanReader:
    """Unpacks what a `PlanWriter` packed."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def unpack(self, data: bytes) -> StepPlan:
        """Return the plan, its requests the same objects each time."""
        plan: StepPlan = _Unpickler(io.BytesIO(data), self._requests).load()
        self._requests |= {segment.slot: segment.request for segment in plan.prefill}
        return plan


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, slot_of: dict[Request, int]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._slot_of = slot_of

    def persistent_id(self, obj: Any) -> int | None:
        return self._slot_of.get(obj) if isinstance(obj, Request) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, requests: dict[int, Request]) -> None:
        super().__init__(buffer)
        self._requests = requests

    def persistent_load(self, pid: int) -> Request:
        return self._requests[pid]


@dataclass(frozen=True)
class _Link:
    """Rank 0's end of a worker."""

    rank: int
    process: SpawnProcess
    pipe: Connection

    def why(self, report: object = None) -> str:
        """Why the worker, which ends or has ended, does; `report` is the last one read."""
        while not isinstance(report, Failure) and self.pipe.poll():
            report = _receive(self.pipe)
            if report is None:
                break
        if isinstance(report, Failure):
            logger.error("rank %d failed:\n%s", self.rank, report.trace)
            return f"rank {self.rank} failed: {report.summary}"
        self.process.join(GRACE_S)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"rank {self.rank} was ended by signal {signal.Signals(-code).name}"
        return f"rank {self.rank} ended with exit code {code}"


@dataclass(frozen=True)
class _WatchedHandle:
    """A launched step whose result counts only if all ranks took part."""

    handle: Handle
    workers: Workers

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        result = self.handle.wait()
        self.workers.check()
        return result


class Workers:
    """The processes of ranks 1 and up. They end with `close`, with this object, or with Python."""

    def __init__(self, *, device: str, world_size: int, build: Build) -> None:
        """Start them, and meet them.

        Raises:
            InternalError: one ended meanwhile.
        """
        context = multiprocessing.get_context("spawn")
        # mkdtemp's directories are the owner's alone
        directory = tempfile.TemporaryDirectory(prefix="gapless-")
        self._links: list[_Link] = []
        self._writer = PlanWriter()
        self._closing = threading.Event()
        # what rank 0 has to do for its part once the others have ended
        self._leaving: list[Callable[[], None]] = []
        self._finalizer = weakref.finalize(
            self, _end, self._links, directory, self._closing, self._leaving, os.getpid()
        )
        file = Path(directory.name) / "ranks"
        try:
            for rank in range(1, world_size):
                pipe, far_end = context.Pipe()
                process = context.Process(
                    target=serve,
                    args=(far_end, Meeting(device, file, rank, world_size), build),
                    name=f"gapless rank {rank}",
                    daemon=True,
                )
                process.start()
                far_end.close()
                self._links.append(_Link(rank, process, pipe))
            self._await(STARTED, START_LIMIT_S)
            meeting = Meeting(device, file, 0, world_size)
            self.communicator = ProcessCommunicator(meeting, self.check)
        except BaseException:
            self.close()
            raise
        self._is_on_gpu = device == "cuda"
        self._runner: Runner | None = None
        self._forgetting: list[Callable[[], None]] = []
        if self._is_on_gpu:
            self._leaving.append(partial(_leave_group, self.communicator, self._forgetting))
            self._watch()

    def lead(self, runner: Runner) -> None:
        """Take `runner` as rank 0's, and block until every rank has loaded its part.

        Raises:
            InternalError: one could not.
        """
        self._await(READY, None)
        self._runner = runner
        if self._is_on_gpu:
            self._forgetting.append(runner.forget_graphs)

    def run(self, plan: StepPlan) -> Handle:
        """Have all ranks run a plan.

        Raises:
            InternalError: a worker has ended. The others are ended too.
        """
        self.check()
        assert self._runner is not None, "rank 0 leads"
        try:
            message = self._writer.pack(plan)
            for link in self._links:
                link.pipe.send_bytes(message)
            handle = self._runner.run(plan)
        except BaseException as error:
            # ranks that have not made the same calls never meet again
            self.give_up(error)
            raise
        return _WatchedHandle(handle, self)

    def check(self) -> None:
        """Raise if not all ranks are there.

        Raises:
            InternalError: a worker has ended. The others are ended too.
        """
        if self._closing.is_set():
            raise InternalError("the ranks of this engine were ended; make another engine")
        self._raise_if_ended(0)

    def give_up(self, error: BaseException) -> None:
        """End all workers after an error of rank 0.

        Raises:
            InternalError: a worker had ended, which is what the error comes from.
        """
        if not isinstance(error, InternalError):
            self._raise_if_ended(GRACE_S if isinstance(error, (OSError, RuntimeError)) else 0)
        self.close()

    @property
    def sentinels(self) -> Sequence[int]:
        """File descriptors that can be read once a worker has ended."""
        return [link.process.sentinel for link in self._links]

    def close(self) -> None:
        """End all workers; harmless when they have ended."""
        self._finalizer()

    def _await(self, wanted: str, limit_s: float | None) -> None:
        """Read one report of each worker."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for link in self._links:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            found = connection.wait([link.pipe, *self.sentinels], left)
            report = _receive(link.pipe) if link.pipe in found else None
            if report == wanted:
                continue
            if link.pipe in found:
                reason = link.why(report)
            elif found:
                reason = self._why(found)
            else:
                reason = f"rank {link.rank} has not {wanted} after {limit_s} s"
            if wanted == STARTED:
                reason += (
                    "; a script that makes an engine with tp above 1 must do so below "
                    "`if __name__ == '__main__':`, since its workers import it"
                )
            self.close()
            raise InternalError(reason)

    def _why(self, sentinels: Sequence[object]) -> str:
        """Why those workers ended whose sentinels are given."""
        ended = [link for link in self._links if link.process.sentinel in sentinels]
        return " and ".join(link.why() for link in ended)

    def _raise_if_ended(self, patience_s: float) -> None:
        ended = connection.wait(self.sentinels, patience_s)
        if not ended:
            return
        reason = self._why(ended)
        self.close()
        raise InternalError(f"{reason}; this engine cannot go on, make another one")

    def _watch(self) -> None:
        """Free the device from waiting for a rank that has ended; nothing else would."""
        threading.Thread(
            target=_abort_at_end,
            args=(list(self.sentinels), self.communicator, self._closing),
            name="gapless ranks",
            daemon=True,
        ).start()


def serve(pipe: Connection, meeting: Meeting, build: Build) -> None:
    """Run one rank until the pipe ends: the main function of a worker process."""
    # an interrupt from the terminal reaches all processes; rank 0 decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    # rank 0 speaks for all
    logging.getLogger("gapless").setLevel(logging.ERROR)
    try:
        if meeting.device == "cuda":
            torch.cuda.set_device(meeting.rank)
        pipe.send(STARTED)
        runner = build(meeting.rank, ProcessCommunicator(meeting))
        freeze_heap()
        pipe.send(READY)
        reader = PlanReader()
        while (data := _receive_bytes(pipe)) is not None:
            runner.run(reader.unpack(data))
        if meeting.device == "cuda":
            # rank 0's part of the last step waits for this rank's
            torch.cuda.synchronize()
    except Exception as error:
        pipe.send(Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))
        os._exit(1)
    # there is nothing to put in order, and no peer to do it with
    os._exit(0)


def _receive(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _receive_bytes(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        return None


def _end_with_parent() -> None:
    """End this process as soon as its parent has, whatever it is waiting for then."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _abort_at_end(
    sentinels: list[int], communicator: ProcessCommunicator, closing: threading.Event
) -> None:
    connection.wait(sentinels)
    if not closing.is_set():
        communicator.abort()


def _leave_group(
    communicator: ProcessCommunicator, forgetting: Sequence[Callable[[], None]]
) -> None:
    """Free the GPU from waiting for other ranks, and leave their group.

    NCCL aborts what is under way at once, and then waits until no graph uses the group any more.
    """
    thread = threading.Thread(target=communicator.abort, name="gapless leave", daemon=True)
    thread.start()
    for forget_graphs in forgetting:
        forget_graphs()
    thread.join(GRACE_S)
    communicator.close()


def _end(
    links: Sequence[_Link],
    directory: tempfile.TemporaryDirectory[str],
    closing: threading.Event,
    leaving: Sequence[Callable[[], None]],
    owner: int,
) -> None:
    """End workers and forget where they met; not in a fork of the process that made them."""
    if os.getpid() != owner:
        return
    closing.set()
    for link in links:
        link.pipe.close()
    deadline = time.monotonic() + GRACE_S
    for link in links:
        link.process.join(max(0.0, deadline - time.monotonic()))
        if link.process.is_alive():
            link.process.kill()
            link.process.join()
    for leave in leaving:
        leave()
    directory.cleanup()
