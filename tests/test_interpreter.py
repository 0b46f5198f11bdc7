"""What the quickened interpreter remembers is what Triton's own makes each time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton
from triton import language as tl
from triton.runtime import interpreter


@pytest.mark.parametrize("sizes", [[4], [8, 4], [4, 8]])
def test_types_and_tensors_of_a_shape(sizes: list[int]) -> None:
    for kind, width in ((tl.float16, 2), (tl.int64, 8), (tl.float16, 2)):
        block = tl.block_type(kind, [tl.constexpr(n) for n in sizes])
        assert list(block.shape) == sizes
        assert (block.numel, block.nbytes) == (np.prod(sizes), np.prod(sizes) * width)
        assert str(block) == f"<{[str(n) for n in sizes]}, {kind}>"
        assert block == tl.block_type(kind, sizes)
        tensor = tl.tensor("handle", block)
        assert [n.value for n in tensor.shape] == sizes
        assert (tensor.handle, tensor.type, tensor.dtype) == ("handle", block, kind)
        assert tensor.numel.value == block.numel
    scalar = tl.tensor("handle", tl.int32)
    assert (len(scalar.shape), scalar.numel.value, scalar.dtype) == (0, 1, tl.int32)


def test_wrong_shapes_are_refused() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="Shape element 1 must be a power of 2"):
            tl.block_type(tl.int32, [4, 3])
        with pytest.raises(TypeError, match="0d block_type"):
            tl.block_type(tl.int32, [])


def test_numpy_types() -> None:
    wanted = [
        (tl.int1, bool), (tl.float16, "f2"), (tl.bfloat16, "u2"), (tl.int64, "i8"),
        (tl.uint8, "u1"), (tl.pointer_type(tl.float32), "u8"),
    ]  # fmt: skip
    for kind, name in wanted:
        for own in (kind, tl.block_type(kind, [4])):
            assert interpreter._get_np_dtype(own) == np.dtype(name)


@triton.jit
def _halved(x):
    return x // 2


@triton.jit
def _sum_kernel(out, count: tl.constexpr):
    x = tl.arange(0, count)
    tl.store(out, tl.sum(_halved(x) + _halved(x)))


def test_a_launch_patches_the_language_however_many_calls_it_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patched: list[object] = []
    honest = interpreter._patch_builtin

    def counted(package: object, *rest: object) -> None:
        patched.append(package)
        honest(package, *rest)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    counts = []
    for programs in (1, 1, 5):
        out = torch.zeros(1, dtype=torch.int32)
        _sum_kernel[(programs,)](out, 8)
        assert out.item() == 24
        counts.append(len(patched))
        patched.clear()
    # the first of a process also patches what no launch takes back
    assert counts[1] == counts[2] > 0
