"""Triton's interpreter without most of its bookkeeping, which took longer than the kernels' work.

What a kernel computes stays as it is. The names are private ones of the version that the test extra
pins.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from triton import language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

if TYPE_CHECKING:
    import numpy as np


def quicken() -> None:
    """Change the interpreter of this process."""
    # overflow is worked out at each operation on integers, and told in debug mode only
    interpreter.interpreter_builder.options.__dict__["sanitize_overflow"] = False
    _patch_the_language_once_per_launch()
    _remember_numpy_types()
    _remember_shapes()


def _patch_the_language_once_per_launch() -> None:
    """Each call of a device function patches the whole language again, `tl.sum` as any."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[int] = set()

    def patch_new(fn: Any) -> Any:
        if id(fn.__globals__) in seen:
            return None
        seen.add(id(fn.__globals__))
        return patch(fn)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        # the end of the launch before took its patches back
        seen.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_new
    interpreter.GridExecutor.__call__ = launch_afresh


def _remember_numpy_types() -> None:
    """Each question makes a dictionary of all types."""
    of_scalar = cache(interpreter._get_np_dtype)
    of_pointer = interpreter._get_np_dtype(tl.pointer_type(tl.int8))

    def dtype_of(kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        return of_pointer if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = dtype_of


def _remember_shapes() -> None:
    """Each tensor makes its shape anew: several objects for a dimension."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_scalars = {"shape": tl.tuple([]), "numel": tl.constexpr(1)}

    @cache
    def known(shape: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any], str]:
        block = core.block_type.__new__(core.block_type)
        make_block(block, tl.int8, list(shape))
        tensor = core.tensor.__new__(core.tensor)
        make_tensor(tensor, None, block)
        own = {"shape": block.shape, "numel": block.numel}
        return own, {"shape": tensor.shape, "numel": tensor.numel}, str(block.shape)

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (n.value if isinstance(n, tl.constexpr) else n for n in shape)
        own, self.of_tensors, text = known(tuple(sizes))
        self.__dict__.update(own, element_ty=element_ty, name=f"<{text}, {element_ty}>")

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        sizes = type.of_tensors if type.is_block() else of_scalars
        self.__dict__.update(sizes, handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = block_init, tensor_init
    _leave_equal_shapes_alone()


def _leave_equal_shapes_alone() -> None:
    """Broadcasting compares shapes by their dimensions, of which each is made into an object."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        # there is one dictionary per shape
        one, other = (vars(x.type).get("of_tensors") for x in (lhs, rhs))
        if one is not None and one is other:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_others
