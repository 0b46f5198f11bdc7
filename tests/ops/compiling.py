"""Kernels compiled for sm_90 on machines without a GPU: what Triton's interpreter does not show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]


def found_by(program: str, *args: str) -> Any:
    """Run the text of a program where Triton does not interpret, and return the JSON it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def catch_launches(*ops: ModuleType) -> list[Any]:
    """Return a list that holds the kernel of each launch to come, compiled and not run.

    Args: ops: modules whose kernels are to be chained, as on that GPU.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    caught: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        del warmup
        caught.append(run(kernel, *args, grid=grid, warmup=True, **settings))

    # of this process alone, which nothing else shares
    JITFunction.run = compile_only
    triton.runtime.driver.set_active(Driver())
    for module in ops:
        vars(module)["chained"] = lambda _: {"CHAINED": True, "launch_pdl": True}
    return caught


def stack_of(kernel: Any) -> int:
    """Return the bytes that each thread of a compiled kernel spills."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(usage.split("STACK:")[1].split()[0])
