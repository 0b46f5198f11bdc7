"""What Triton's interpreter does not show: the kernels compile for sm_90, and to what.

No GPU is needed. They are compiled in a process of their own, where Triton does not interpret.
"""

from __future__ import annotations

import json

import pytest

from tests.ops.compiling import found_by

PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gapless.ops.mla import kernels

name, values, options = json.loads(sys.argv[1])
kernel = getattr(kernels, name)
POINTERS = dict(
    q="bf16", pool="bf16", out="bf16", partial="fp32", partial_lse="fp32", slots="i64",
    positions="i64", tree_start="i64", tree_bits="i64", page_table="i64", kv_read="i64",
    tiles="i32",
)
ALIGNED = ("stride_q_token", "stride_q_head", "stride_entry")
signature, constants, hints = {}, {}, {}
for index, argument in enumerate(kernel.arg_names):
    if argument in POINTERS:
        signature[argument] = "*" + POINTERS[argument]
        hints[(index,)] = [["tt.divisibility", 16]]
    elif argument in values:
        signature[argument], constants[(index,)] = "constexpr", values[argument]
    else:
        signature[argument] = "fp32" if argument == "scale_log2" else "i32"
        if argument in ALIGNED:
            hints[(index,)] = [["tt.divisibility", 16]]
source = ASTSource(kernel, signature, constants, hints)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(json.dumps({"shared": made.metadata.shared, "ttgir": made.asm["ttgir"]}))
"""
SHARED_BYTES = 232448
CHANNELS = {"RANK": 512, "ROPE": 64, "BLOCK_C": 512, "BLOCK_R": 64, "PRECISION": "tf32"}


def compiled(name: str, values: dict[str, object], **options: int) -> dict[str, str | int]:
    """Return a kernel's shared memory in bytes and its code in Triton's GPU dialect."""
    asked = json.dumps([name, values | {"CHAINED": True}, options])
    found: dict[str, str | int] = found_by(PROGRAM, asked)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("window", "has_tree"), [(1, False), (4, False), (4, True)])
def test_windows_load_ahead_and_compute_scores_once(window: int, has_tree: bool) -> None:
    import torch

    from gapless.ops.mla.tuning import window_tiling

    tiling = window_tiling(16 * window, torch.bfloat16)
    splits = {
        "MIN_SPLIT": tiling.min_split, "FEW_SPLITS": tiling.few_splits,
        "FULL_SPLIT": tiling.full_split, "MAX_SPLITS": tiling.max_splits,
    }  # fmt: skip
    sizes = {"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "HAS_TREE": has_tree}
    window_of = {"HEADS": 16, "WINDOW": window, "PAGE_SIZE": 16}
    found = compiled(
        "_window_kernel", CHANNELS | splits | sizes | window_of,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    assert int(found["shared"]) <= SHARED_BYTES
    code = str(found["ttgir"])
    assert "async_copy_global_to_local" in code
    if window > 1:
        # half the warps take half the positions of the scores
        assert "warpsPerCTA = [4, 2], instrShape = [16, 16, 16]" in code
        # and nothing that a block's copies are waited for with is the newest block's
        assert "{num = 2 : i32}" in code
    joined = splits | {"WINDOW": window, "RANK": 512, "BLOCK_C": 512}
    compiled("_window_combine_kernel", joined, num_warps=8)


@pytest.mark.slow
def test_prefill_fits() -> None:
    import torch

    from gapless.ops.mla.tuning import prefill_tiling

    tiling = prefill_tiling(torch.bfloat16)
    sizes = {"HEADS": 16, "GROUP": 16, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n}
    found = compiled(
        "_prefill_kernel", CHANNELS | sizes,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    assert int(found["shared"]) <= SHARED_BYTES
