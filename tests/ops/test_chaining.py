"""Every kernel of a step is chained, and waits before it does anything else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gapless.ops

KERNEL_FILES = sorted(Path(gapless.ops.__file__).parent.glob("*/*kernel*.py"))
# what they read before is older than the kernel that they wait for, which has itself waited
READ_AHEAD = {
    "_token_kernel", "_token_weights_kernel", "_channel_token_kernel", "_token_stream_kernel",
    "_window_scores_kernel", "_channel_window_kernel", "_window_stream_kernel",
    "_fold_stream_kernel",
}  # fmt: skip
# between GPUs a kernel waits for others' stores while it runs: the next one must not take its place
UNCHAINED = {"_peer_sum_kernel", "_peer_gather_kernel"}


def kernels_of(path: Path) -> list[ast.FunctionDef]:
    return [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]


def calls(body: list[ast.stmt], name: str) -> tuple[set[int], set[int]]:
    """How often a function is called on the ways through statements, and on those that return."""
    counts, returned = {0}, set()
    for statement in body:
        if isinstance(statement, ast.Return):
            return set(), returned | counts
        own, own_returned = {ast.unparse(statement).count(f"{name}(CHAINED)")}, set()
        if isinstance(statement, ast.If):
            ways = [calls(branch, name) for branch in (statement.body, statement.orelse)]
            own, own_returned = ways[0][0] | ways[1][0], ways[0][1] | ways[1][1]
        returned |= {before + more for before in counts for more in own_returned}
        counts = {before + more for before in counts for more in own}
    return counts, returned


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
        holds = "await_inputs_only(CHAINED)" in lines
        ends, returns = calls(body, "await_inputs_only" if holds else "await_inputs")
        assert ends | returns == {1}, f"{kernel.name} waits once"
        # what returns lets go
        assert calls(body, "let_next_start")[0] == {int(holds)}, f"{kernel.name} lets go once"
        is_first = lines[0].startswith("await_inputs")
        assert is_first or kernel.name in READ_AHEAD, f"{kernel.name} waits first"


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_launch_says_whether_its_kernel_is_chained(path: Path) -> None:
    launchers = "".join(other.read_text() for other in path.parent.glob("*.py"))
    for kernel in kernels_of(path):
        if kernel.name not in UNCHAINED and f"{kernel.name}[" in launchers:
            assert "chained(" in launchers, f"{kernel.name} is launched without its settings"
