"""A guard that turns hidden host-device synchronisation into an error, on any device.

On CUDA the driver reports it. On a CPU, where nothing blocks, a dispatch mode rejects operations
that would, and the tensor methods that dispatch nothing on CPU tensors are patched.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class HiddenSync(InternalError):
    """An operation that would make the host wait for the device ran under `forbid_syncs`."""


class _Guard(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func)
        if name in _ALWAYS_SYNCS:
            raise HiddenSync(f"{name} waits for the device")
        by_tensor = name in ("aten.repeat_interleave.Tensor", "aten.repeat_interleave.self_Tensor")
        if by_tensor and (kwargs or {}).get("output_size") is None:
            raise HiddenSync(f"{name} without output_size waits for the device")
        if name.startswith(("aten.index.", "aten.index_put", "aten._index_put_impl")):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise HiddenSync(f"{name} with a mask waits for the device")
        return func(*args, **(kwargs or {}))


def _forbidden(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if method == "to" and not _moves(args, kwargs):
            return original(self, *args, **kwargs)
        raise HiddenSync(f"Tensor.{method} waits for the device")

    return call


def _moves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `Tensor.to` was asked for a device; a change of type alone is fine."""
    places = (str, torch.device, Tensor)
    return any(isinstance(value, places) for value in (*args, kwargs.get("device")))


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
    patches = [
        mock.patch.object(Tensor, name, _forbidden(name, getattr(Tensor, name)))
        for name in _METHODS
    ]
    for patch in patches:
        patch.start()
    try:
        with _Guard():  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            yield
    finally:
        for patch in patches:
            patch.stop()
