"""Counters of decoding and speculation, for a request or a whole engine, and of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass
class DecodeCounters:
    """What decode steps did. Prefill, and the first token that it samples, are not counted."""

    num_steps: int = 0
    """Decode rows run, one per request and step."""
    num_emitted: int = 0
    """Tokens emitted by them."""
    proposed_at: list[int] = field(default_factory=list)
    """Drafts proposed, by their place in the window; of a tree, by their node."""
    accepted_at: list[int] = field(default_factory=list)
    """Drafts accepted, by their place in the window; of a tree, by their depth."""
    num_flushes: int = 0
    """Steps that folded replay ring entries into a checkpoint."""
    ring_entries: int = 0
    """Committed replay ring entries found by all steps together."""

    def record(self, emitted: int, proposed: int, num_rows: int) -> None:
        """Count decode rows of as many tokens emitted and drafts proposed."""
        self.num_steps += num_rows
        self.num_emitted += emitted * num_rows
        proposed_at, accepted_at = self.proposed_at, self.accepted_at
        while len(proposed_at) < proposed:
            proposed_at.append(0)
            accepted_at.append(0)
        for place in range(proposed):
            proposed_at[place] += num_rows
        for place in range(min(emitted - 1, len(accepted_at))):
            accepted_at[place] += num_rows

    @property
    def num_proposed(self) -> int:
        """Drafts proposed."""
        return sum(self.proposed_at)

    @property
    def num_accepted(self) -> int:
        """Drafts accepted."""
        return sum(self.accepted_at)

    @property
    def accepted_len(self) -> float:
        """Mean tokens emitted per step; 0 before the first."""
        return self.num_emitted / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_by_place(self) -> tuple[float, ...]:
        """Share of the drafts at each place of the window that were accepted."""
        return tuple(
            accepted / proposed if proposed else 0.0
            for accepted, proposed in zip(self.accepted_at, self.proposed_at, strict=True)
        )

    @property
    def ring_occupancy(self) -> float:
        """Mean committed ring entries that a step found; 0 before the first."""
        return self.ring_entries / self.num_steps if self.num_steps else 0.0

    def __str__(self) -> str:
        places = " ".join(f"{share:.2f}" for share in self.acceptance_by_place)
        drafts = f", drafts accepted by place {places}" if places else ""
        return (
            f"{self.num_steps} steps, {self.accepted_len:.2f} tokens per step{drafts}, "
            f"{self.num_flushes} flushes, {self.ring_occupancy:.1f} ring entries"
        )


class WaitReason(StrEnum):
    """Why the first request in the queue was not admitted at a step."""

    SLOTS = "max_running_requests are running"
    ROWS = "no state row is free"
    PAGES = "too few pages are free"
    PREFIX = "the step before computes its prefix"
    UNREAD = "a step that names it is unread"


@dataclass
class CacheCounters:
    """What the prefix cache did, and what memory pressure did to requests."""

    num_admissions: int = 0
    """Requests that were given memory, retracted ones again."""
    num_hits: int = 0
    """Those of them that found a prefix cached."""
    num_tokens: int = 0
    """Tokens that admitted requests had."""
    num_cached_tokens: int = 0
    """Those of them that needed no prefill."""
    num_snapshots: int = 0
    """Snapshots stored."""
    num_snapshots_skipped: int = 0
    """Snapshots not taken, since every state row was in use."""
    num_rows_evicted: int = 0
    """Snapshots dropped for their row."""
    num_leaves_evicted: int = 0
    """Ends of cached sequences dropped for their pages."""
    num_stores: int = 0
    """Keys copied to the host tier."""
    num_loads: int = 0
    """Keys brought back from there."""
    num_retractions: int = 0
    """Times that a running request went back to the queue."""
    waits: dict[WaitReason, int] = field(default_factory=dict)
    """Steps at which the first in the queue had to wait, by reason."""

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that needed no prefill; 0 before the first request."""
        return self.num_cached_tokens / self.num_tokens if self.num_tokens else 0.0

    def __str__(self) -> str:
        waits = "".join(f", {count} waits: {reason}" for reason, count in self.waits.items())
        return (
            f"{self.num_cached_tokens} of {self.num_tokens} tokens cached ({self.hit_rate:.0%}), "
            f"{self.num_snapshots} snapshots, {self.num_rows_evicted} rows and "
            f"{self.num_leaves_evicted} leaves evicted, {self.num_retractions} retractions{waits}"
        )


@dataclass
class LoopCounters:
    """What the step loop did on the host."""

    num_steps: int = 0
    """Steps launched."""
    num_ahead: int = 0
    """Those of them that were launched before the one before was read."""
    plan_seconds: float = 0.0
    """Time that planning and launching them took."""
    wait_seconds: float = 0.0
    """Time that the host was blocked, waiting for results."""

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps launched, {self.num_ahead} of them ahead, in "
            f"{self.plan_seconds:.3f} s of host time, {self.wait_seconds:.3f} s spent waiting for "
            "results"
        )


@dataclass
class LaunchCounters:
    """What decode steps asked of the device; capturing counts too."""

    num_steps: int = 0
    """Decode steps launched."""
    num_launches: int = 0
    """Graphs launched by them, or as many groups of stages that were not captured."""
    num_setups: int = 0
    """Times that a step's stages were set up: once per kind of step, or each time."""
    num_fused: int = 0
    """Steps whose index tensors one kernel made."""
    num_plans: int = 0
    """Attention plans that the host made."""
    num_planned_beside: int = 0
    """Those of them that ran on the plan stream."""
    num_refills: int = 0
    """Times that a plan's buffers were filled again after drafting."""

    def __str__(self) -> str:
        return (
            f"{self.num_steps} decode steps in {self.num_launches} launches, set up "
            f"{self.num_setups} times, {self.num_fused} with fused metadata, {self.num_plans} host "
            f"plans, {self.num_planned_beside} of them on a stream of their own"
        )
