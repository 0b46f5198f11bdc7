"""A watch on what the engine allocates outside its step graphs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Counts operations outside step graphs that return memory which no input has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.in_graph = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.in_graph and isinstance(out, Tensor):
            known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            if out.untyped_storage().data_ptr() not in known:
                self.found.append(str(func))
        return out
