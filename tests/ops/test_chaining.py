"""Every kernel of a step is chained, and waits before it does anything else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gapless.ops

KERNEL_FILES = sorted(Path(gapless.ops.__file__).parent.glob("*/*kernel*.py"))
# what they read before is older than the kernel that they wait for, which has itself waited
STREAMS = {"_token_stream_kernel", "_fold_stream_kernel", "_window_stream_kernel"}
# between GPUs a kernel waits for others' stores while it runs: the next one must not take its place
UNCHAINED = {"_peer_sum_kernel", "_peer_gather_kernel"}


def kernels_of(path: Path) -> list[ast.FunctionDef]:
    return [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]


def releases(body: list[ast.stmt]) -> set[int]:
    """How often the ways through statements let the next kernel start; those that return do so."""
    counts = {0}
    for statement in body:
        if isinstance(statement, ast.Return):
            return set()
        if isinstance(statement, ast.If):
            own = releases(statement.body) | releases(statement.orelse)
        else:
            own = {ast.unparse(statement).count("let_next_start(CHAINED)")}
        counts = {before + more for before in counts for more in own}
    return counts


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_kernel_waits_for_those_before_it_first(path: Path) -> None:
    kernels = kernels_of(path)
    assert kernels, "a file of kernels has some"
    for kernel in kernels:
        if kernel.name in UNCHAINED:
            continue
        names = [argument.arg for argument in kernel.args.args]
        assert "CHAINED" in names, f"{kernel.name} takes CHAINED"
        body = kernel.body[ast.get_docstring(kernel) is not None :]
        lines = [ast.unparse(statement) for statement in body]
        waits = [line.startswith("await_inputs") for line in lines]
        assert sum(waits) == 1, f"{kernel.name} waits once"
        holds = "await_inputs_only(CHAINED)" in lines
        assert releases(body) == {int(holds)}, f"{kernel.name} lets go once"
        assert waits[0] or kernel.name in STREAMS, f"{kernel.name} waits first"


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_launch_says_whether_its_kernel_is_chained(path: Path) -> None:
    launchers = "".join(other.read_text() for other in path.parent.glob("*.py"))
    for kernel in kernels_of(path):
        if kernel.name not in UNCHAINED and f"{kernel.name}[" in launchers:
            assert "chained(" in launchers, f"{kernel.name} is launched without its settings"
