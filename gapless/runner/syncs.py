"""Hidden host-device synchronisation, turned into an error or counted, on any device.

On CUDA the driver and the profiler report it. On a CPU, where nothing blocks, a dispatch mode meets
operations that would, and the tensor methods that dispatch nothing on CPU tensors are patched.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gapless.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_ALWAYS_SYNCS = frozenset(
    {
        "aten._local_scalar_dense.default",
        "aten.nonzero.default",
        "aten.nonzero_numpy.default",
        "aten.masked_select.default",
        "aten.lift_fresh.default",
        "aten._unique2.default",
        "aten.unique_dim.default",
        "aten.bincount.default",
        "aten.equal.default",
        "aten.is_nonzero.default",
        "aten.where.default",
        "aten.argwhere.default",
    }
)
# these dispatch nothing on CPU tensors
_METHODS = (
    "item", "tolist", "cpu", "numpy", "__array__", "to",
    "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip
_PACKAGE = Path(__file__).parent.parent
# frames that stand between a call and those who watch for it
_WATCHERS = {__file__, str(_PACKAGE / "runner" / "recorder.py"), warnings.__file__}
_TORCH = Path(torch.__file__).parent
# calls of the CUDA runtime by which the host waits for the device
BLOCKING_CALLS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMemcpy2D", "cudaMalloc",
    "cudaFree", "cudaHostAlloc", "cudaFreeHost",
)  # fmt: skip
KERNEL_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


class HiddenSync(InternalError):
    """An operation that would make the host wait for the device ran under `forbid_syncs`."""


@dataclass
class CallCounts:
    """What a piece of host code asked of the device."""

    blocking: Counter[str] = field(default_factory=Counter)
    """Calls by which the host waited for the device: on a CPU, operations that would wait, by call
    site; on CUDA, calls of the runtime by name."""
    graph_launches: int = 0
    kernel_launches: int = 0
    """Kernels launched one by one; those in a graph count with it. On CUDA only."""
    event_waits: int = 0
    """Times that the host waited for an event, as it does for the result of the step before."""
    kernels: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, start and end in microseconds of everything that ran on the device. On CUDA only."""


class _Guard(TorchDispatchMode):
    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._report = report

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func)
        if name in _ALWAYS_SYNCS:
            self._report(name)
        by_tensor = name in ("aten.repeat_interleave.Tensor", "aten.repeat_interleave.self_Tensor")
        if by_tensor and (kwargs or {}).get("output_size") is None:
            self._report(f"{name} without output_size")
        if name.startswith(("aten.index.", "aten.index_put", "aten._index_put_impl")):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self._report(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


def _watched(
    method: str, original: Callable[..., Any], report: Callable[[str], None]
) -> Callable[..., Any]:
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if method == "to" and not _moves(args, kwargs):
            return original(self, *args, **kwargs)
        report(f"Tensor.{method}")
        # what it dispatches is the same wait, reported once
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    return call


def _moves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `Tensor.to` was asked for a device; a change of type alone is fine."""
    places = (str, torch.device, Tensor)
    return any(isinstance(value, places) for value in (*args, kwargs.get("device")))


@contextmanager
def watch_host(report: Callable[[str], None]) -> Iterator[None]:
    """Report what would make the host wait, were the CPU a device."""
    patches = [
        mock.patch.object(Tensor, name, _watched(name, getattr(Tensor, name), report))
        for name in _METHODS
    ]
    for patch in patches:
        patch.start()
    try:
        with _Guard(report):
            yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def forbid_syncs() -> Iterator[None]:
    """Raise `HiddenSync` where the code inside would make the host wait for the device.

    Scalar reads, `nonzero`, boolean and list indexing, `torch.tensor(list)`, `repeat_interleave`
    without output size, and `Tensor.item/tolist/cpu/numpy/__array__/to(device)`.
    """
    if torch.cuda.is_available():
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # torch says once that it does not see every synchronising call
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return
    with watch_host(_raise):
        yield


def _raise(what: str) -> None:
    raise HiddenSync(f"{what} waits for the device")


@contextmanager
def count_calls() -> Iterator[CallCounts]:
    """Count blocking calls and launches of the code inside; complete once the block has ended."""
    counts = CallCounts()
    if not torch.cuda.is_available():
        with watch_host(lambda what: counts.blocking.update([f"{what} at {call_site()}"])):
            yield counts
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield counts
    for event in profile.events() or ():
        name = event.name
        if event.device_type.name == "CUDA":
            span = event.time_range
            counts.kernels.append((name, span.start, span.end))
            continue
        counts.graph_launches += name == "cudaGraphLaunch"
        counts.kernel_launches += name in KERNEL_LAUNCHES
        counts.event_waits += name == "cudaEventSynchronize"
        if name in BLOCKING_CALLS:
            counts.blocking[name] += 1


def call_site() -> str:
    """The innermost line of the package, watchers left out; the caller's where there is none."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if frame.filename not in _WATCHERS and _TORCH not in Path(frame.filename).parents
    ]
    own = [frame for frame in frames if _PACKAGE in Path(frame.filename).parents]
    file = Path((own or frames)[-1].filename)
    name = file.relative_to(_PACKAGE.parent).as_posix() if own else file.name
    return f"{name}:{(own or frames)[-1].lineno}"
