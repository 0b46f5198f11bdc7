"""What a step launches outside the model's layers, counted on a CPU.

Tensors say that they are on a GPU while the runner and the drafter run, so that operations take
the kernels that they take there, in the interpreter. The model itself runs on its definitions, and
is not counted.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

import gapless
from gapless.attention.reference import ReferenceAttention
from gapless.models.decoder import Decoder
from gapless.models.mtp import MtpHead
from gapless.ops import chaining, step_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

# allocations, which launch nothing
_NO_LAUNCH = ("empty", "new_empty", "empty_like")
_PACKAGE = str(Path(gapless.__file__).parent) + os.sep
# frames that stand between a call and those who watch for it
_BETWEEN = (__file__, *(str(Path(module.__file__).parent) for module in (torch, triton)))


class Launches(TorchDispatchMode):
    """Counts kernels and torch operations by name and by the line of ours that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self.is_apart = False
        """Whether what runs is not counted: the model, or the inside of an interpreted kernel."""

    def by_name(self) -> Counter[str]:
        """Count launches by name, wherever they were made."""
        counts: Counter[str] = Counter()
        for (name, _), count in self.found.items():
            counts[name] += count
        return counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count an operation that is neither a view nor an allocation."""
        returned = [value.alias_info for value in func._schema.returns]
        is_view = any(info is not None and not info.is_write for info in returned)
        name = func.overloadpacket.__name__
        if not (self.is_apart or is_view or name in _NO_LAUNCH):
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        """Count a launch by the package; what tests do to fresh memory is none."""
        frames = traceback.extract_stack()
        caller = next(f for f in reversed(frames) if not f.filename.startswith(_BETWEEN))
        if caller.filename.startswith(_PACKAGE):
            site = f"{caller.filename.removeprefix(_PACKAGE)}:{caller.lineno}"
            self.found[name, site] += 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run what is not counted."""
        before, self.is_apart = self.is_apart, True
        try:
            yield
        finally:
            self.is_apart = before


def count_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Patch the package so that launches are counted within the mode that is returned."""
    launches = Launches()

    def apart(honest: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with launches.apart():
                return honest(*args, **kwargs)

        return run

    for owner, name in (
        (Decoder, "forward"),
        (Decoder, "_project"),
        (MtpHead, "forward"),
        (ReferenceAttention, "plan_window"),
    ):
        monkeypatch.setattr(owner, name, apart(getattr(owner, name)))
    interpret = apart(GridExecutor.__call__)

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if not launches.is_apart:
            launches.note(executor.fn.__name__)
        return interpret(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    is_cuda = property(lambda _: not launches.is_apart)
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda)
    monkeypatch.setattr(chaining, "_can_chain", lambda _: False)
    monkeypatch.setattr(step_metadata, "has_kernel", lambda _: True)
    return launches
