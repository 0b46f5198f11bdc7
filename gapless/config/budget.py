"""One budget of memory, divided: weights, running requests, snapshots of prefixes, pages.

Running requests come first, with the pages of one of them at full length; the prefix cache gets
what they leave. Bytes are those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gapless.core.footprint import human
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.core.footprint import Footprint

# full sets of running requests whose pages are worth keeping; without a prefix cache it is 1
CACHED_REQUESTS = 2
# snapshots worth keeping for each running request
CACHED_SNAPSHOTS = 16
DEFAULT_SNAPSHOT_FRACTION = 0.25
SHORTEST_REQUEST = 2


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What memory is wanted for."""

    budget_bytes: int
    max_running: int
    """Running requests; fewer will do."""
    max_model_len: int
    """Most tokens of one request."""
    keeps_len: bool
    """Whether that many it must be."""
    uses_prefix_cache: bool
    snapshot_fraction: float = DEFAULT_SNAPSHOT_FRACTION
    """Share of what running requests leave that goes to snapshots, where a model needs them."""


@dataclass(frozen=True)
class Part:
    """One of the parts of a budget."""

    name: str
    num_bytes: int
    num_items: int | None = None
    """How many pages, rows or slots it is."""
    unit: str = ""

    def __str__(self) -> str:
        size = human(self.num_bytes)
        return size if self.num_items is None else f"{size} ({self.num_items:,}{self.unit})"


@dataclass(frozen=True, kw_only=True)
class Division:
    """A budget as it is divided; null and zero entries are in `fixed`."""

    footprint: Footprint
    budget_bytes: int
    max_running: int
    max_model_len: int
    num_pages: int
    num_snapshots: int
    uses_prefix_cache: bool

    @property
    def num_state_rows(self) -> int:
        """Rows of the state pool: of running requests, and of snapshots."""
        return self.max_running + self.num_snapshots

    @property
    def useful_pages(self) -> int:
        """Pages beyond which more are of no use."""
        num_sets = CACHED_REQUESTS if self.uses_prefix_cache else 1
        return num_sets * self.max_running * self.footprint.num_pages(self.max_model_len)

    @property
    def taken_bytes(self) -> int:
        """Bytes of weights and pools."""
        return self.footprint.weight_bytes + self.footprint.pool_bytes(
            num_requests=self.max_running,
            num_pages=self.num_pages,
            num_snapshots=self.num_snapshots,
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts of the budget, which add up to it."""
        sizes, running, snapshots = self.footprint, self.max_running, self.num_snapshots
        pages, unit = self.num_pages, f" x {self.footprint.page_size} tokens"
        return (
            Part("weights", sizes.weight_bytes),
            Part("pages", pages * sizes.page_bytes, pages, unit),
            Part("running rows", running * sizes.row_bytes, running),
            Part("snapshot rows", snapshots * sizes.row_bytes, snapshots),
            Part("rings", running * sizes.ring_bytes, running),
            Part("fixed", sizes.fixed_bytes),
            Part("free", self.budget_bytes - self.taken_bytes),
        )


def divide(footprint: Footprint, demand: Demand) -> Division:
    """Divide a budget.

    Fewer requests run where the wanted number would leave no room for the pages of one at full
    length. A length that need not be kept counts for at most half of what weights leave; it gives
    way to snapshots too, which a length that is kept precedes. Pages and snapshots are no more
    than can be of use, and what one of them has no use for goes to the other. A prefix cache that
    needs snapshots and gets none is off.

    Raises:
        ConfigError: not even one request fits.
    """
    left = demand.budget_bytes - footprint.weight_bytes - footprint.fixed_bytes
    full = footprint.num_pages(demand.max_model_len) * footprint.page_bytes
    running = _num_running(footprint, demand, left, full)
    left -= running * footprint.request_bytes
    shortest = footprint.num_pages(SHORTEST_REQUEST) * footprint.page_bytes
    if left < (full if demand.keeps_len else shortest):
        raise _too_little(footprint, demand)
    found = Division(
        footprint=footprint,
        budget_bytes=demand.budget_bytes,
        max_running=running,
        max_model_len=demand.max_model_len,
        num_pages=0,
        num_snapshots=0,
        uses_prefix_cache=demand.uses_prefix_cache,
    )
    row_bytes = footprint.row_bytes
    if not demand.uses_prefix_cache or row_bytes == 0:
        return _with_pages(found, left)
    share = int(left * demand.snapshot_fraction)
    first = full if demand.keeps_len else max(shortest, min(full, left - share))
    most = CACHED_SNAPSHOTS * running
    snapshots = min(most, share // row_bytes, (left - first) // row_bytes)
    found = _with_pages(found, left - snapshots * row_bytes)
    if found.num_pages == found.useful_pages:
        snapshots = min(most, (left - found.num_pages * footprint.page_bytes) // row_bytes)
    if snapshots == 0:
        return _with_pages(replace(found, uses_prefix_cache=False), left)
    return replace(found, num_snapshots=snapshots)


def _num_running(footprint: Footprint, demand: Demand, left: int, full: int) -> int:
    """Requests that can run beside the pages of one, at least 1."""
    if footprint.request_bytes == 0:
        return demand.max_running
    first = full if demand.keeps_len else min(full, left // 2)
    return max(1, min(demand.max_running, (left - first) // footprint.request_bytes))


def _with_pages(found: Division, num_bytes: int) -> Division:
    """Add the pages that are affordable and of use, and the length that they hold."""
    sizes = found.footprint
    if sizes.page_bytes == 0:
        return replace(found, num_pages=found.useful_pages)
    affordable = num_bytes // sizes.page_bytes
    length = min(found.max_model_len, sizes.longest_request(affordable))
    found = replace(found, max_model_len=length)
    return replace(found, num_pages=min(affordable, found.useful_pages))


def _too_little(footprint: Footprint, demand: Demand) -> ConfigError:
    length = demand.max_model_len if demand.keeps_len else SHORTEST_REQUEST
    weights, budget = footprint.weight_bytes, demand.budget_bytes
    pools = footprint.pool_bytes(num_requests=1, num_pages=footprint.num_pages(length))
    remedy = "lower max_model_len" if demand.keeps_len else "split the model with tp"
    return ConfigError(
        f"one request of {length} tokens needs {human(weights + pools)}, {human(weights)} of them "
        f"for weights, and the budget is {human(budget)}; raise mem_fraction, or {remedy}"
    )
