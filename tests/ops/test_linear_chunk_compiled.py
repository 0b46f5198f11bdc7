"""What Triton's interpreter does not show: the scan compiles for sm_90, and its loads come ahead.

No GPU is needed. It is compiled in a process of its own, where Triton does not interpret.
"""

from __future__ import annotations

import pytest

from tests.ops.compiling import found_by

PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gapless.ops.linear_chunk.kernels import _scan_kernel
from gapless.ops.linear_chunk.scan import tiling_of

is_per_channel, state, num_segments = sys.argv[1] == "channel", sys.argv[2], int(sys.argv[3])
tiling = tiling_of(num_segments, is_per_channel=is_per_channel)
values = dict(
    H=32 if is_per_channel else 16, HV=32, K=128, V=128, BT=64, BK=128, BV=tiling.block_v,
    IS_PER_CHANNEL=is_per_channel, CHAINED=True,
)
types = dict.fromkeys(("k", "decayed_k", "w", "u", "h", "d"), "bf16")
types |= dict(g="fp32", checkpoint=state)
signature, constants, hints = {}, {}, {}
for index, name in enumerate(_scan_kernel.arg_names):
    if name in values:
        signature[name], constants[(index,)] = "constexpr", values[name]
    else:
        signature[name] = "*" + types.get(name, "i64")
        hints[(index,)] = [["tt.divisibility", 16]]
made = triton.compile(
    ASTSource(_scan_kernel, signature, constants, hints), target=GPUTarget("cuda", 90, 32),
    options=dict(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
)
print(json.dumps({"shared": made.metadata.shared, "ttgir": made.asm["ttgir"]}))
"""
# of a multiprocessor, which programs of several segments share in twos
SHARED_BYTES = 233472


@pytest.mark.slow
@pytest.mark.parametrize("num_segments", [1, 8])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_scan_loads_ahead_though_states_are_stored_on_the_way(
    decay: str, state: str, num_segments: int
) -> None:
    found = found_by(PROGRAM, decay, state, str(num_segments))
    assert min(num_segments, 2) * (found["shared"] + 1024) <= SHARED_BYTES
    before, loop = found["ttgir"].split("= scf.for", 1)
    assert loop.count("= scf.while") == 1, "stops on the way are in the loop over chunks"
    # w, u and keys of a first chunk, and in the loop those of the next
    for code in (before, loop):
        assert code.count("async_copy_global_to_local") >= 3
