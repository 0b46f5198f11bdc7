"""Launches a plan on the device and hands back its result, to be read one step late."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gapless.config.switches import Graphs
from gapless.core.counters import LaunchCounters
from gapless.core.plan import PrefillSegment, StepPlan, StepResult
from gapless.observe.trace import Kind, Trace
from gapless.runner.compiles import CompileCounter
from gapless.runner.decode import DecodeRunner
from gapless.runner.graphs import Capture
from gapless.runner.host_plans import HostPlans
from gapless.runner.host_tier import HostTier
from gapless.runner.inputs import Download, Ticket
from gapless.runner.masks import MaskUpload
from gapless.runner.prefill import PrefillRunner
from gapless.runner.snapshots import Saver

if TYPE_CHECKING:
    from gapless.config.config import Config
    from gapless.runner.device import Device
    from gapless.runner.logprobs import LogprobTicket, PrefillLogprobs


@dataclass(frozen=True)
class StepHandle:
    """A launched step. Read it before two more steps are launched."""

    _plan: StepPlan
    _tokens: Ticket
    _num_emitted: int
    _window: int
    _prefill_logprobs: PrefillLogprobs | None
    _decode_logprobs: LogprobTicket | None
    _tier: HostTier | None

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        tokens = self._tokens.read()
        emitted = tokens[: self._num_emitted].reshape(-1, 2 + self._window)
        emitted = emitted[: len(self._plan.decode)]
        first = tokens[self._num_emitted :][: len(self._plan.sampled)]
        return StepResult(
            prefill_tokens=first.astype(np.int32),
            decode_tokens=emitted[:, 2:].astype(np.int32),
            decode_lens=emitted[:, 0].astype(np.int32),
            decode_proposed=emitted[:, 1].astype(np.int32),
            num_stored=self._num_stored(),
            prefill_logprobs=self._first_logprobs(),
            decode_logprobs=self._window_logprobs(),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _num_stored(self) -> int:
        if self._tier is None:
            return 0
        return self._tier.num_arrived(waits=self._plan.awaits_stores)

    def _first_logprobs(self) -> np.ndarray | None:
        found = self._prefill_logprobs.sampled if self._prefill_logprobs is not None else None
        return found.read() if found is not None else None

    def _window_logprobs(self) -> np.ndarray | None:
        if self._decode_logprobs is None:
            return None
        rows = self._decode_logprobs.read()
        return rows.reshape(-1, self._window, rows.shape[1])[: len(self._plan.decode)]

    def _prompt_logprobs(self) -> tuple[np.ndarray | None, ...]:
        found = self._prefill_logprobs.prompt if self._prefill_logprobs is not None else None
        if found is None:
            return (None,) * len(self._plan.prefill)
        logprobs = found.read()
        bounds = np.cumsum([0, *(s.end - s.start for s in self._plan.prefill)])
        return tuple(
            _own_logprobs(segment, logprobs[low:high])
            for segment, low, high in zip(self._plan.prefill, bounds, bounds[1:], strict=False)
        )


def _own_logprobs(segment: PrefillSegment, logprobs: np.ndarray) -> np.ndarray | None:
    if not segment.request.wants_prompt_logprobs:
        return None
    if segment.is_last:
        logprobs[-1] = np.nan
    return logprobs


class Runner:
    """Runs steps in the order they are given, without waiting for any of them."""

    def __init__(self, device: Device, config: Config) -> None:
        self.device = device
        self.compiles = CompileCounter()
        self._window = config.max_window
        rows = config.max_running_requests
        segments = min(config.chunked_prefill_size, rows)
        self._num_emitted = rows * (2 + self._window)
        # one buffer, so that one copy brings a step's results down
        results = torch.zeros(self._num_emitted + segments, dtype=torch.int64, device=device.device)
        emitted = results[: self._num_emitted].view(rows, 2 + self._window)
        masks = MaskUpload(device, rows, self._window)
        self.launches = LaunchCounters()
        self._host_plans = (
            HostPlans(device, config, self.launches) if device.needs_cpu_seq_lens else None
        )
        self._is_captured = config.switches.graphs is not Graphs.NONE
        capture = Capture.on(device.device) if self._is_captured else None
        self._decode = DecodeRunner(
            device, config, emitted, masks, self._host_plans, self.launches, capture
        )
        self._saver = Saver(device)
        first_tokens = results[self._num_emitted :]
        self._prefill = PrefillRunner(device, config, first_tokens, masks, capture)
        self._tier = HostTier(device, config) if config.num_host_pages else None
        self._results = Download(results)
        self._trace: Trace | None = None
        # stages hold the runners that hold them: graphs go with this object, and with them their
        # memory, not when a collector of cycles comes by, which may be within another's capture
        for owner in (self._prefill, self._decode):
            weakref.finalize(self, owner.forget_graphs).atexit = False

    def watch(self, trace: Trace | None) -> None:
        """Record the parts of each step from now on; None ends it."""
        self._trace = trace
        self._prefill.watch(trace)
        self._decode.watch(trace)

    def run(self, plan: StepPlan) -> StepHandle:
        """Launch a step, its parts in the order that `StepPlan` gives."""
        prefill = decode = None
        with torch.inference_mode():
            self._begin("move")
            self._move(plan)
            self._end()
            if plan.prefill:
                self._begin("prefill")
                prefill = self._prefill.run(plan.prefill)
                if self._host_plans is not None:
                    self._host_plans.admit(plan.prefill)
                self._end()
            if plan.decode:
                self._begin("decode")
                decode = self._decode.run(plan)
                self._end()
            tokens = self._results.fetch(self._num_emitted + len(plan.sampled))
        return StepHandle(
            plan, tokens, self._num_emitted, self._window, prefill, decode, self._tier
        )

    def _begin(self, part: str) -> None:
        if self._trace is not None:
            self._trace.begin(Kind.PART, part)

    def _end(self) -> None:
        if self._trace is not None:
            self._trace.end()

    def _move(self, plan: StepPlan) -> None:
        """Save, load, store and copy what changes its owner."""
        if plan.saves:
            self._saver.save(plan.saves)
        if self._tier is not None:
            self._tier.run(plan)
        if plan.page_copies:
            self._saver.copy_pages(plan.page_copies)

    def capture(self) -> None:
        """Capture prefill chunks and decode steps, on CUDA."""
        if not self._is_captured:
            return
        with torch.inference_mode():
            self._prefill.capture()
            self._decode.capture()

    def forget_graphs(self) -> None:
        """Destroy what was captured; what runs again runs launch by launch."""
        self._prefill.forget_graphs()
        self._decode.forget_graphs()
