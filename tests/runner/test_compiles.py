"""The counter of kernels compiled while serving."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from triton import knobs

from gapless.runner.compiles import CompileCounter

if TYPE_CHECKING:
    import pytest


def test_counts_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    counter = CompileCounter()
    before = knobs.runtime.jit_post_compile_hook
    try:
        counter.start()
        hook = knobs.runtime.jit_post_compile_hook
        assert hook is not None
        with caplog.at_level(logging.WARNING, logger="gapless"):
            hook(repr="_some_kernel[num_warps=4]", key="k", fn=None, compile={})  # type: ignore[call-arg, typeddict-item, arg-type]
        assert counter.count == 1
        assert "_some_kernel" in caplog.text
        counter.start()
        assert counter.count == 0
        counter.stop()
        assert knobs.runtime.jit_post_compile_hook is None
    finally:
        knobs.runtime.jit_post_compile_hook = before
