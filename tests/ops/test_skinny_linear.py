"""Products of few rows against float64; which kernel serves which shape.

On a CPU kernels run in Triton's interpreter, which multiplies no bfloat16: float16 stands in.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from gapless.layers.linear import Linear
from gapless.layers.placement import Placement
from gapless.ops.skinny_linear import Float8Matrix, reference, skinny_linear
from gapless.ops.skinny_linear.float8 import CONVERTED_ROWS
from gapless.ops.skinny_linear.tuning import (
    FLOAT8_TILES,
    MAX_ROWS,
    TABLE,
    Matrix,
    Tile,
    Vector,
    Wide,
    guess,
    tile_of,
)

if TYPE_CHECKING:
    from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# of the output's rounding; and of its sums in float32
ROUNDING = {HALF: 2**-8 if DEVICE == "cuda" else 2**-11, torch.float32: 2e-6}
TILES: list[Tile] = [
    Vector(4, 16, 4),
    Vector(4, 32, 2, 3),
    Matrix(16, 32, 1, 2),
    Matrix(16, 16, 4, 3),
    Wide(16, 16, 2),
]
# those that take a weight in float8
BYTE_TILES = [tile for tile in TILES if not isinstance(tile, Vector)]
# sizes that blocks divide, and sizes that they do not
SIZES = [(32, 64), (37, 72)]


def run(
    x: Tensor, weight: Tensor | Float8Matrix, bias: Tensor | None, tile: Tile, **options: Any
) -> Tensor:
    from gapless.ops.skinny_linear import triton

    return triton.skinny_linear(x, weight, bias, tile, **options)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def draw_product(rows: int, size: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x in wider rows, weight and bias."""
    x = draw(rows, inner + 16, dtype=dtype)[:, 8:-8]
    return x, draw(size, inner, dtype=dtype) / 8, draw(size, dtype=dtype)


def wanted_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def close(out: Tensor, wanted: Tensor, tolerance: float) -> None:
    atol = tolerance * float(wanted.abs().max())
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("size", "inner"), SIZES)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_kernels_agree_with_float64(
    dtype: torch.dtype, tile: Tile, size: int, inner: int, rows: int
) -> None:
    x, weight, bias = draw_product(rows, size, inner, dtype)
    out = run(x, weight, bias, tile)
    assert out.dtype is dtype
    close(out, wanted_of(x, weight, bias), ROUNDING[dtype])
    close(run(x, weight, None, tile), wanted_of(x, weight, None), ROUNDING[dtype])


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_wider_output_keeps_the_sums_bits(tile: Tile) -> None:
    x, weight, bias = draw_product(5, 37, 72, HALF)
    out = run(x, weight, bias, tile, out_dtype=torch.float32)
    close(out, wanted_of(x, weight, bias), ROUNDING[torch.float32])


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("size", "inner"), SIZES)
@pytest.mark.parametrize("tile", BYTE_TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_float8_kernels_agree_with_float64(
    dtype: torch.dtype, tile: Tile, size: int, inner: int, rows: int
) -> None:
    x, weight, bias = draw_product(rows, size, inner, dtype)
    # rows as far apart as scales can be of use for, and one of padding
    weight *= torch.logspace(-2, 2, size, device=DEVICE).to(dtype)[:, None]
    weight[size - 2] = 0
    copy = Float8Matrix.of(weight)
    for added in (bias, None):
        wanted = wanted_of(x, exactly(copy), added)
        close(run(x, copy, added, tile), wanted, ROUNDING[dtype])
        close(run(x, copy, added, tile, out_dtype=torch.float32), wanted, ROUNDING[torch.float32])


def exactly(copy: Float8Matrix) -> Tensor:
    """The matrix that a copy in float8 stands for, in float64."""
    return copy.values.double() * copy.scales.double()[:, None]


def test_float8_copy_is_rounded_row_by_row() -> None:
    weight = torch.randn(CONVERTED_ROWS + 3, 8).to(torch.bfloat16)
    weight[5] *= 1e-6
    weight[6] = 0
    copy = Float8Matrix.of(weight)
    assert copy.shape == weight.shape
    scales = weight.float().abs().amax(dim=1) / 448
    scales[6] = 1
    assert torch.equal(copy.scales, scales)
    # torch's own cast is the definition
    rounded = (weight.float() / scales[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(copy.values.view(torch.uint8), rounded.view(torch.uint8))
    # three bits after the leading one; below the least normal number, steps of 2^-9
    error = (exactly(copy) - weight.double()).abs()
    bound = torch.maximum(weight.double().abs() / 16, scales.double()[:, None] * 2**-10)
    assert bool((error <= bound * (1 + 1e-6)).all())


def test_definition_of_products_in_float8() -> None:
    x, weight, bias = (t.double().cpu() for t in draw_product(3, 7, 8, torch.float32))
    copy = Float8Matrix.of(weight)
    for shaped in (x, x.view(3, 1, 8)):
        out = reference.skinny_linear(shaped, copy, bias)
        assert out.dtype is torch.float64
        wanted = wanted_of(shaped, exactly(copy), bias)
        torch.testing.assert_close(out, wanted, rtol=1e-13, atol=1e-13)
        assert torch.equal(skinny_linear(shaped, copy, bias), out)
    x = x.to(torch.bfloat16)
    assert reference.skinny_linear(x, copy).dtype is torch.bfloat16
    assert reference.skinny_linear(x, copy, out_dtype=torch.float32).dtype is torch.float32


@pytest.mark.skipif(DEVICE == "cuda", reason="the operation's own choice is seen without one")
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_float8_goes_to_a_kernel_as_long_as_rows_are_few(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gapless.ops import chaining
    from gapless.ops.skinny_linear import triton

    seen: list[int] = []

    def counted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.append(len(x))
        return kernel(x, *args, **options)

    kernel = triton.skinny_linear
    monkeypatch.setattr(triton, "skinny_linear", counted)
    monkeypatch.setattr(chaining, "_can_chain", lambda _: False)
    most = MAX_ROWS[-1]
    x, weight, _ = draw_product(most + 1, 37, 72, dtype)
    copy = Float8Matrix.of(weight)
    wanted = wanted_of(x, exactly(copy), None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    for rows in (1, most, most + 1):
        out = skinny_linear(x[:rows], copy, out_dtype=torch.float32)
        close(out, wanted[:rows], ROUNDING[torch.float32 if rows <= most else dtype])
    assert seen == [1, most]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_row_does_not_depend_on_the_others(tile: Tile) -> None:
    x, weight, bias = draw_product(16, 37, 72, HALF)
    together = run(x, weight, bias, tile)
    assert torch.equal(run(x[5:], weight, bias, tile), together[5:])
    # the interpreter's products of another shape may add up in another order
    if DEVICE == "cuda" and not isinstance(tile, Vector):
        assert torch.equal(run(x[5:6], weight, bias, tile), together[5:6])
    x[6] = float("nan")
    poisoned = run(x, weight, bias, tile)
    is_other = torch.arange(16, device=DEVICE) != 6
    assert torch.equal(poisoned[is_other], together[is_other])
    assert poisoned[6].isnan().all()


def test_tensors_that_no_kernel_serves() -> None:
    from gapless.ops.skinny_linear import triton

    x, weight, _ = draw_product(2, 32, 64, torch.float32)
    assert triton.unsupported(x, weight) is None
    assert "float64" in str(triton.unsupported(x.double(), weight.double()))
    assert "float64" in str(triton.unsupported(x, weight.double()))
    assert "contiguous" in str(triton.unsupported(x, weight.t().contiguous().t()))
    assert "contiguous" in str(triton.unsupported(x.t().contiguous().t(), weight))
    copy = Float8Matrix.of(weight)
    assert triton.unsupported(x, copy) is None
    assert "float64" in str(triton.unsupported(x.double(), copy))
    assert "float8" in str(triton.unsupported(x, copy.values))
    with pytest.raises(AssertionError, match="float8"):
        run(x, copy, None, Vector(4, 16, 4))


def test_definition_is_the_product() -> None:
    x, weight, bias = (t.double() for t in draw_product(3, 7, 5, torch.float32))
    wanted = (x[:, None] * weight).sum(-1) + bias
    for shaped in (x, x.view(3, 1, 5)):
        out = skinny_linear(shaped, weight, bias)
        assert out.shape == (*shaped.shape[:-1], 7)
        torch.testing.assert_close(out.view(3, 7), wanted, rtol=1e-13, atol=1e-13)
    assert skinny_linear(x.float(), weight.float(), out_dtype=torch.float64).dtype is torch.float64


def test_table_covers_its_buckets_and_more_rows_go_to_the_library() -> None:
    assert list(MAX_ROWS) == sorted(set(MAX_ROWS))
    for tiles in (*TABLE.values(), FLOAT8_TILES):
        assert len(tiles) == len(MAX_ROWS)
    for shape in [(9999, 4096), (2048, 512), *TABLE]:
        assert tile_of(0, *shape) is None
        assert tile_of(MAX_ROWS[-1] + 1, *shape) is None


def test_few_rows_read_the_copy_in_float8() -> None:
    copy = Float8Matrix.of(torch.randn(37, 72))
    assert [copy.serves(rows) for rows in (0, 1, 33, MAX_ROWS[-1], MAX_ROWS[-1] + 1)] == [
        False, True, True, True, False
    ]  # fmt: skip


def test_bucket_holds_its_upper_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = tuple(Matrix(16, 64, 1, stages) for stages in range(len(MAX_ROWS)))
    monkeypatch.setitem(TABLE, (37, 72), tiles)
    for bucket, most in enumerate(MAX_ROWS):
        assert tile_of(most, 37, 72) is tiles[bucket]
        if bucket + 1 < len(MAX_ROWS):
            assert tile_of(most + 1, 37, 72) is tiles[bucket + 1]
    assert tile_of(3, 72, 37) == guess(3, 72, 37)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize(("size", "inner"), [(12352, 2048), (2048, 4096), (257, 2048), (2048, 512)])
def test_tiles_fit_their_kernels(rows: int, size: int, inner: int) -> None:
    for tile in (tile_of(rows, size, inner), guess(rows, size, inner)):
        if isinstance(tile, Vector):
            # products on ordinary units, for few rows only
            assert rows <= 4
            assert tile.block_n >= tile.num_warps
        if isinstance(tile, Matrix | Wide):
            assert tile.block_n >= 16
            # stages of weight and x in the shared memory of a multiprocessor
            entries = tile.step * (tile.block_n + max(8, rows))
            assert 2 * entries * (tile.num_stages - 1) <= 227 << 10


@pytest.mark.parametrize("rows", MAX_ROWS)
def test_float8_tiles_fit_their_kernels(rows: int) -> None:
    tile = FLOAT8_TILES[MAX_ROWS.index(rows)]
    assert tile.block_n >= 16
    # beside a byte of the weight, x may be in float32
    taken = tile.step * (tile.block_n + 4 * max(8, rows))
    assert taken * (tile.num_stages - 1) <= 227 << 10


def test_layers_multiply_by_their_weight() -> None:
    place = Placement(torch.device("cpu"), torch.float64)
    layer = Linear(6, 10, place, has_bias=True)
    layer.weight.copy_(torch.randn(10, 6, dtype=torch.float64))
    assert layer.bias is not None
    layer.bias.copy_(torch.randn(10, dtype=torch.float64))
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    wanted = torch.einsum("bti,oi->bto", x, layer.weight) + layer.bias
    torch.testing.assert_close(layer(x), wanted, rtol=1e-13, atol=1e-13)
