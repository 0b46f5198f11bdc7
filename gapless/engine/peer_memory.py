"""Mailboxes that the GPUs of one host write to: allocated, shared and tried out.

A rank's mailboxes are memory of its own that the others map through CUDA's handles between
processes. Some hosts refuse that, and links may be slow to show what was written; so each rank says
what it found, and the mailboxes are used by all ranks or by none.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gapless.errors import BackendUnavailable
from gapless.ops.peer_sum.reference import Mailboxes, num_bytes, num_programs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# 32-bit words that one rank sends to all others together: of two ranks each may send 1 MiB, a step
# of 256 rows of 2048 features in bfloat16
SENT_WORDS = 1 << 18
HANDLE_BYTES = 64
# how often a rank looks whether the others have left something
LOOK_INTERVAL_S = 0.002
LAZY_PEER_ACCESS = 1
# how long the first sum may take, beside compiling it, which ranks may do at different times
TRIAL_LIMIT_S = 90.0
# words of the sums that are tried: one program's part of a message, and several programs
TRIAL_SIZES = (40, 5000)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class _Driver:
    """The few calls of the CUDA driver that torch has no words for, on the current context."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def allocate(self, size: int) -> int:
        """Allocate zeros; return the address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        # another process is not ordered behind the stream that fills it
        self._call("cuCtxSynchronize")
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle_of(self, address: int) -> bytes:
        """Return what another process maps the memory by."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        """Map another process's memory; return the address here."""
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(LAZY_PEER_ACCESS),
        )
        return address.value

    def unmap(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status != 0:
            raise BackendUnavailable(f"{name} answers {status}")


@dataclass(frozen=True)
class Table:
    """Where ranks leave a few bytes for each other; every rank makes the same calls in order."""

    store: Any
    rank: int
    world_size: int
    check: Callable[[], None]
    """Called while this rank waits; raises if another has ended."""

    def exchange(self, name: str, own: bytes) -> list[bytes]:
        """Return what all ranks left under a name, in their order; blocks until they have."""
        self.store.set(f"{name}/{self.rank}", own)
        return [self._await(f"{name}/{rank}") for rank in range(self.world_size)]

    def _await(self, key: str) -> bytes:
        while not self.store.check([key]):
            self.check()
            time.sleep(LOOK_INTERVAL_S)
        return bytes(self.store.get(key))

    def complaint(self, name: str, own: str) -> str:
        """Return the complaint of the first rank that has one, empty where none has."""
        found = self.exchange(name, own.encode() or b"-")
        return next((text.decode() for text in found if text != b"-"), "")


@dataclass
class PeerMemory:
    """One rank's mailboxes, and those of the others as it sees them."""

    mailboxes: Mailboxes
    _free: list[Callable[[], None]] = field(default_factory=list)

    def stop(self) -> None:
        """Have the device wait for no other rank any more, whatever the sums are then."""
        self.mailboxes.is_stopped.fill_(1)

    def close(self) -> None:
        """Give the memory back, from any thread; nothing may use it any more."""
        with torch.cuda.device(self.mailboxes.addresses.device):
            _undo(self._free)


def open_peer_memory(table: Table) -> PeerMemory | str:
    """Set up the current device's mailboxes among all ranks', or say why there are none."""
    device = torch.device("cuda", torch.cuda.current_device())
    # makes the device's context this thread's
    torch.zeros(1, device=device)
    undo: list[Callable[[], None]] = []
    capacity = SENT_WORDS // (table.world_size - 1)
    handle, reason = b"-", ""
    try:
        driver = _Driver()
        own = driver.allocate(num_bytes(table.world_size, capacity))
        undo.append(lambda: driver.free(own))
        handle = driver.handle_of(own)
    except (OSError, BackendUnavailable) as error:
        reason = str(error)
    handles = table.exchange("mailbox", handle)
    reason = table.complaint("allocated", reason)
    addresses: list[int] = []
    if not reason:
        try:
            for rank, theirs in enumerate(handles):
                addresses.append(own if rank == table.rank else driver.map(theirs))
                if rank != table.rank:
                    undo.append(_call_with(driver.unmap, addresses[-1]))
        except BackendUnavailable as error:
            reason = str(error)
        reason = table.complaint("mapped", reason)
    if not reason:
        mailboxes = Mailboxes(
            table.rank,
            torch.tensor(addresses, device=device),
            torch.zeros(num_programs(capacity), dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, pin_memory=True),
            capacity,
        )
        memory = PeerMemory(mailboxes, undo)
        reason = table.complaint("tried", _trial(mailboxes))
        if not reason:
            return memory
        memory.stop()
        torch.cuda.synchronize()
    _undo(undo)
    return reason


def _undo(steps: list[Callable[[], None]]) -> None:
    """Take the last step back first; after a fault of the device that does nothing."""
    while steps:
        with suppress(BackendUnavailable):
            steps.pop()()


def _call_with(call: Callable[[int], None], address: int) -> Callable[[], None]:
    return lambda: call(address)


def _trial(mailboxes: Mailboxes) -> str:
    """Sum known numbers, and say what is wrong with the result; empty if nothing is."""
    from gapless.ops.peer_sum.triton import peer_sum

    device, world_size = mailboxes.addresses.device, mailboxes.world_size
    sums: list[tuple[Tensor, Tensor]] = []
    for size in TRIAL_SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            # whole numbers below 256 have no rounding
            own = torch.arange(size, device=device) % 16 + mailboxes.rank
            wanted = torch.arange(size, device=device) % 16 * world_size
            wanted += world_size * (world_size - 1) // 2
            sums.append((peer_sum(own.to(dtype), mailboxes), wanted.to(dtype)))
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + TRIAL_LIMIT_S
    while not done.query():
        if time.monotonic() > deadline:
            return f"rank {mailboxes.rank} found nothing in its mailboxes"
        time.sleep(0.001)
    if all(torch.equal(found, wanted) for found, wanted in sums):
        return ""
    return f"rank {mailboxes.rank} got a wrong sum"
