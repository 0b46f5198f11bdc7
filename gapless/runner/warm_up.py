"""Makes a GPU ready: every kernel compiled and every decode step captured before the first request.

Steps of made-up requests run through the runner itself, in slot 0 and with pages and rows that
nobody holds yet; what they leave there is overwritten before it is read.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from gapless.core.plan import PageCopy, PrefillSegment, SlotSave, Snapshot, StepPlan
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless.config.resolve import Config
    from gapless.runner.runner import Runner

logger = logging.getLogger(__name__)


def warm_up(runner: Runner, config: Config) -> None:
    """Run one step of each kind, then capture the decode steps."""
    started, before = time.perf_counter(), torch.cuda.mem_get_info()[0]
    for plan in _plans(config):
        runner.run(plan).wait()
    torch.cuda.synchronize()
    compiled = time.perf_counter()
    runner.capture()
    logger.info(
        "ready: kernels in %.1f s, graphs in %.1f s and %.2f GiB",
        compiled - started,
        time.perf_counter() - compiled,
        (before - torch.cuda.mem_get_info()[0]) / 2**30,
    )


def _plans(config: Config) -> Iterator[StepPlan]:
    """Prefill of various lengths, packed, resumed and with snapshots; saves and page copies."""
    room = config.num_pages * config.page_size - config.max_window
    longest = min(config.chunked_prefill_size, config.max_model_len - 1, room)
    lengths = sorted({min(n, longest) for n in (1, 7, 16, 64, 100, 512, 2048, longest)})
    spare_row = min(1, config.num_state_rows - 1)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9)):
        for step, length in enumerate(lengths):
            yield StepPlan(
                step_id=step,
                prefill=(_segment(config, params, length),),
                decode=(),
                page_entries=(),
                max_seq_len=0,
            )
    if not (config.uses_prefix_cache and config.row_bytes and spare_row) or longest < 100:
        return
    params = SamplingParams(temperature=0.0)
    last = _segment(config, params, 100)
    yield StepPlan(
        step_id=len(lengths),
        prefill=(
            PrefillSegment(
                last.request, last.slot, last.state_row, last.pages, start=33, end=100,
                is_last=True, resumed_row=spare_row,
                snapshots=(Snapshot(80, spare_row + 1),) if config.num_state_rows > 2 else (),
            ),
        ),
        decode=(),
        page_entries=(),
        max_seq_len=0,
        saves=(SlotSave(0, 100, 0),),
        page_copies=(PageCopy(0, min(1, config.num_pages - 1)),),
    )  # fmt: skip


def _segment(config: Config, params: SamplingParams, length: int) -> PrefillSegment:
    request = Request(
        request_id="warm-up",
        prompt_ids=(0,) * length,
        params=params,
        seed=0,
        stop_ids=(),
        limit_len=length + 1,
    )
    pages = tuple(range(-(-(length + config.max_window) // config.page_size)))
    return PrefillSegment(request, 0, 0, pages, 0, length, is_last=True)
