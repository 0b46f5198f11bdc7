"""Counters of decoding and speculation, for a request or a whole engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DecodeCounters:
    """What decode steps did. Prefill, and the first token that it samples, are not counted."""

    num_steps: int = 0
    """Decode rows run, one per request and step."""
    num_emitted: int = 0
    """Tokens emitted by them."""
    proposed_at: list[int] = field(default_factory=list)
    """Drafts proposed, by their place in the window."""
    accepted_at: list[int] = field(default_factory=list)
    """Drafts accepted, by their place in the window."""
    num_flushes: int = 0
    """Steps that folded replay ring entries into a checkpoint."""
    ring_entries: int = 0
    """Committed replay ring entries found by all steps together."""

    def record(self, *, emitted: int, proposed: int, flushes: bool, ring_entries: int) -> None:
        """Count one row of one decode step."""
        self.num_steps += 1
        self.num_emitted += emitted
        self.num_flushes += flushes
        self.ring_entries += ring_entries
        for counts, reached in ((self.proposed_at, proposed), (self.accepted_at, emitted - 1)):
            counts.extend([0] * (proposed - len(counts)))
            for place in range(min(reached, len(counts))):
                counts[place] += 1

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
