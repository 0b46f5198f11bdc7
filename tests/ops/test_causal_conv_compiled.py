"""What Triton's interpreter does not show: prefill's convolutions copy no inputs, and read wide.

No GPU is needed. The launches are those of the ops themselves, stopped once their kernels are
compiled, in a process of their own, where Triton does not interpret.
"""

from __future__ import annotations

import pytest

from tests.ops.compiling import found_by

PROGRAM = """
import json, re
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from gapless.ops.causal_conv import SegmentIndices
from gapless.ops.causal_conv import triton as conv
from tests.ops.compiling import catch_launches

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        ops.append(str(op))
        return op(*args, **(kwargs or {}))

compiled, ops = catch_launches(conv), []
inputs, ring = torch.zeros(2, 8, 8192, dtype=torch.bfloat16)
rows, taps = torch.zeros(3, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.int64)
args = inputs, ring, SegmentIndices(rows, taps, rows, rows), torch.zeros(8192, 4).bfloat16()
with Watch():
    conv.convolve_segments(*args, None, activation="silu")
    conv.convolve_segments_qkv(*args, num_heads=16, key_dim=128, l2norm_eps=1e-6)
found = []
for kernel in compiled:
    ptx = kernel.asm["ptx"]
    stores = set(re.findall(r"st\\.global\\S*", ptx))
    wide_loads = len(re.findall(r"ld\\.global\\S*v4\\.b32", ptx))
    found.append([kernel.name, "griddepcontrol.wait" in ptx, sorted(stores), wide_loads])
print(json.dumps([found, sorted(set(ops))]))
"""


@pytest.mark.slow
def test_rows_are_moved_in_wide_pieces_by_chained_kernels_and_not_copied() -> None:
    found, ops = found_by(PROGRAM)
    # what index_select copies is the prefix
    assert ops == ["aten.empty.memory_format", "aten.index_select.default", "aten.slice.Tensor"]
    names = ["_keep_rows_kernel", "_convolve_segments_kernel"]
    names += ["_keep_rows_kernel", "_convolve_segments_qkv_kernel"]
    assert [name for name, *_ in found] == names
    for name, waits, stores, wide_loads in found:
        assert waits
        assert stores == ["st.global.v4.b32"]
        # 16 of a thread's tokens and taps, beside the weights'
        assert wide_loads >= (1 if name == "_keep_rows_kernel" else 16)
