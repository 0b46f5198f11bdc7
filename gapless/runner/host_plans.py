"""What the seams of a decode step run for backends that plan on the host.

Lengths before a step are those after the step before it, so its verify waits for that step's
accept, and extend counts from there too. Draft passes go on from what is accepted, so they wait for
the accept of their own step, beside extend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gapless.runner.mirror import LengthMirror
from gapless.runner.plan_stream import PlanStream
from gapless.speculative.mtp import EXTEND_PLAN, FIRST_INDEX, draft_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.attention.backend import AttentionBackend
    from gapless.config.config import Config
    from gapless.core.counters import LaunchCounters
    from gapless.core.plan import PrefillSegment
    from gapless.runner.accept import Accepted
    from gapless.runner.device import Device

VERIFY_PLAN = "verify"


@dataclass(frozen=True)
class Seams:
    """Host work before each stage; None: there is none."""

    verify: Callable[[], None] | None = None
    extend: Callable[[], None] | None = None
    draft: Callable[[], None] | None = None


class HostPlans:
    """Plans attention on the host, from the mirror of the lengths."""

    def __init__(self, device: Device, config: Config, counters: LaunchCounters) -> None:
        self._target = _if_host_planned(device.backend)
        self._draft = _if_host_planned(device.draft_backend)
        self._mirror = LengthMirror(
            device.geometry.num_slots, config.max_running_requests, device.device
        )
        self._stream = PlanStream(device.device) if config.switches.uses_plan_stream else None
        self._has_drafter = device.drafter is not None
        self._has_tree = device.tree is not None
        # the passes over a tree are planned on the device
        self._num_passes = 0 if self._has_tree else config.max_window - 1
        self._window = config.max_window
        self._most_emitted = device.most_emitted
        self._null_slot = device.geometry.null_slot
        self._counters = counters
        self._slots = np.zeros(0, np.int64)
        self._lens = self._slots
        self._is_dummy = False

    def admit(self, segments: tuple[PrefillSegment, ...]) -> None:
        """Take note of a prefill chunk that was launched."""
        self._mirror.admit(segments)

    def begin(self, slots: np.ndarray, *, is_dummy: bool = False) -> None:
        """Name the rows [B] of the step that is launched next, or captured, which is a dummy."""
        self._slots, self._is_dummy = slots, is_dummy

    def end(self) -> None:
        """Bring down the lengths of a step whose last stage has been launched."""
        if not self._has_drafter:
            self._mirror.fetch(self._slots)

    def store(self, accepted: Accepted) -> None:
        """Keep, on the device, the lengths that accept has settled."""
        self._mirror.store(accepted.seq_lens, accepted.live_slots, self._null_slot)

    def seams(self, kv_len: int) -> Seams:
        """Return the host work of a step whose positions are below `kv_len`."""
        drafts = self._draft is not None and self._num_passes > 1
        return Seams(
            verify=lambda: self._plan_verify(kv_len),
            extend=(lambda: self._plan_extend(kv_len)) if self._has_drafter else None,
            draft=(lambda: self._plan_draft(kv_len)) if drafts else None,
        )

    def _plan_verify(self, kv_len: int) -> None:
        self._lens = self._mirror.lens(self._slots)
        if self._target is None:
            return
        target, ends = self._target, self._lens + self._window

        def plan() -> None:
            target.plan_host(VERIFY_PLAN, ends, width=self._window, kv_len=kv_len)

        self._counters.num_plans += 1
        if self._stream is None or self._is_dummy:
            plan()
            return
        self._stream.run(plan)
        self._counters.num_planned_beside += 1
        if self._has_tree:
            # the plan was made while the tree was being drafted
            target.update_verify_buffers_to_fill_after_draft(VERIFY_PLAN)
            self._counters.num_refills += 1

    def _plan_extend(self, kv_len: int) -> None:
        self._mirror.fetch(self._slots)
        if self._draft is not None:
            width = self._most_emitted
            self._plan_head(self._draft, EXTEND_PLAN, self._lens + width + 1, width, kv_len)

    def _plan_draft(self, kv_len: int) -> None:
        assert self._draft is not None, "a step without its plans has no seam for them"
        lens = self._mirror.lens(self._slots)
        for depth in range(1, self._num_passes):
            self._plan_head(self._draft, draft_plan(depth), lens + depth + 1, 1, kv_len)

    def _plan_head(
        self, backend: AttentionBackend, name: str, ends: np.ndarray, width: int, kv_len: int
    ) -> None:
        self._counters.num_plans += 1
        backend.plan_host(name, ends, width=width, kv_len=kv_len, first=FIRST_INDEX)


def _if_host_planned(backend: AttentionBackend | None) -> AttentionBackend | None:
    return backend if backend is not None and backend.needs_cpu_seq_lens else None
