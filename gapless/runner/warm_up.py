"""Makes a GPU ready: every kernel compiled, every step captured before the first request.

Steps of made-up requests run through the runner itself, in slot 0 and with pages and rows that
nobody holds yet; what they leave there is overwritten before it is read.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from gapless.core.draft_shape import step_reach
from gapless.core.footprint import human
from gapless.core.plan import PageCopy, PrefillSegment, SlotSave, Snapshot, StepPlan
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams
from gapless.runner.reserve import StepMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless.config.config import Config
    from gapless.runner.runner import Runner

logger = logging.getLogger(__name__)

# a request for each mode of sampling
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, min_tokens=1, max_tokens=1),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1),
)


def warm_up(runner: Runner, config: Config) -> None:
    """Run one step of each kind launch by launch, then capture what can be."""
    started, before = time.perf_counter(), torch.cuda.mem_get_info()[0]
    runner.compiles.stop()
    logger.info(
        "memory: %s left for steps, of which the largest take %s",
        human(before),
        _step_memory(runner),
    )
    for plan in _plans(config):
        runner.run(plan).wait()
    torch.cuda.synchronize()
    compiled = time.perf_counter()
    runner.capture()
    runner.compiles.start()
    left = torch.cuda.mem_get_info()[0]
    logger.info(
        "ready: kernels in %.1f s, graphs in %.1f s and %s; %s left",
        compiled - started,
        time.perf_counter() - compiled,
        human(max(0, before - left)),
        human(left),
    )


def _step_memory(runner: Runner) -> StepMemory:
    device = runner.device
    return StepMemory.of(
        device.geometry,
        device.backend,
        device.pools.linear_specs,
        vocab_size=device.model.architecture.vocab_size,
        max_len=device.num_page_columns * device.geometry.page_size,
        device=device.device.type,
    )


def _plans(config: Config) -> Iterator[StepPlan]:
    """Prefill of various lengths, packed, resumed and with snapshots; saves and page copies."""
    room = config.num_pages * config.page_size - step_reach(config.max_window, config.tree)
    longest = min(config.chunked_prefill_size, config.max_model_len - 1, room)
    # longest first: that is what kernels are tuned for, where they are
    known = {min(n, longest) for n in (1, 4, 7, 16, 32, 64, 100, 512, 2048, longest)}
    lengths = sorted(known, reverse=True)
    # sampling is divided by the number of rows, and so is what surrounds it
    most = min(config.max_running_requests, config.chunked_prefill_size, config.num_pages)
    counts = [2**exponent for exponent in range(9) if 2**exponent <= most]
    chunks: list[tuple[PrefillSegment, ...]] = [
        (_segment(config, KINDS[0], length),) for length in lengths
    ]
    for params, count in product(KINDS, counts):
        shortest = _segment(config, params, 1)
        chunks.append(
            tuple(replace(shortest, slot=i, state_row=i, pages=(i,)) for i in range(count))
        )
    for chunk in chunks:
        yield StepPlan(step_id=0, prefill=chunk, decode=(), page_entries=(), max_seq_len=0)
    if not (config.uses_prefix_cache and config.row_bytes) or config.num_state_rows < 4:
        return
    if longest < 4:
        # no room for a snapshot on the way
        return
    # in one chunk, one request that resumes and one that does not, each with a snapshot on its way
    half = min(40, longest // 2)
    start = min(33, longest - half)
    resumed = replace(
        _segment(config, KINDS[0], start + half), start=start, resumed_row=2,
        snapshots=(Snapshot(start + half // 2, 3),),
    )  # fmt: skip
    fresh = replace(
        _segment(config, KINDS[0], half), slot=min(1, config.max_running_requests - 1), state_row=1,
        snapshots=(Snapshot(half // 2, 3),),
    )  # fmt: skip
    for segments in ((resumed,), (resumed, fresh) if fresh.slot else (fresh,)):
        yield StepPlan(
            step_id=0,
            prefill=segments,
            decode=(),
            page_entries=(),
            max_seq_len=0,
            saves=(SlotSave(0, lengths[-1], 0),),
            page_copies=(PageCopy(0, min(1, config.num_pages - 1)),),
        )


def _segment(config: Config, params: SamplingParams, length: int) -> PrefillSegment:
    request = Request(
        request_id="warm-up",
        prompt_ids=(0,) * length,
        params=params,
        seed=0,
        stop_ids=(),
        limit_len=length + 1,
    )
    reach = length + step_reach(config.max_window, config.tree)
    pages = tuple(range(-(-reach // config.page_size)))
    return PrefillSegment(request, 0, 0, pages, 0, length, is_last=True)
