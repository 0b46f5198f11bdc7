"""What Triton's interpreter does not show: convolutions of prefill move sixteen bytes at a time.

No GPU is needed. The launches are those of the ops themselves, stopped once their kernels are
compiled, in a process of their own, where Triton does not interpret.
"""

from __future__ import annotations

import pytest

from tests.ops.compiling import found_by

PROGRAM = """
import json, re
import torch
from gapless.ops.causal_conv import triton as conv
from tests.ops.compiling import catch_launches

compiled = catch_launches(conv)
source = torch.zeros(9, 8192, dtype=torch.bfloat16)
args = source, torch.zeros(4, 8, dtype=torch.int64), torch.zeros(8192, 4, dtype=torch.bfloat16)
conv.causal_conv(*args, None, activation="silu")
conv.causal_conv_qkv(*args, num_heads=16, key_dim=128, l2norm_eps=1e-6)
found = []
for kernel in compiled:
    ptx = kernel.asm["ptx"]
    stores = set(re.findall(r"st\\.global\\S*", ptx))
    wide_loads = len(re.findall(r"ld\\.global\\S*v4\\.b32", ptx))
    found.append([kernel.name, "griddepcontrol.wait" in ptx, sorted(stores), wide_loads])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_rows_are_read_and_written_in_wide_pieces_by_chained_kernels() -> None:
    found = found_by(PROGRAM)
    assert [name for name, *_ in found] == ["_causal_conv_kernel", "_causal_conv_qkv_kernel"]
    for _, waits, stores, wide_loads in found:
        assert waits
        assert stores == ["st.global.v4.b32"]
        # 16 of a thread's tokens and taps, beside the weights'
        assert wide_loads >= 16
