"""The engine's statistics as samples of metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.counters import WaitReason
from gapless.observe.metrics import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless.core.messages import EngineStats

# stable names of the reasons to wait, for labels
_WAITS = {reason: reason.name.lower() for reason in WaitReason}


def engine_samples(stats: EngineStats | None) -> Iterator[Sample]:
    """Yield a sample for every number; none before the engine has sent any."""
    if stats is None:
        return
    yield from _gauges(stats)
    yield from _cache(stats)
    yield from _decode(stats)
    loop = stats.loop
    yield Sample("engine_steps", "Steps launched.", loop.num_steps)
    yield Sample("engine_plan_seconds", "Time spent planning and launching.", loop.plan_seconds)
    yield Sample("engine_host_wait_seconds", "Time spent waiting for results.", loop.wait_seconds)


def _gauges(stats: EngineStats) -> Iterator[Sample]:
    pages, rows = stats.num_pages, stats.num_state_rows
    used_pages, used_rows = pages - stats.num_free_pages, rows - stats.num_free_rows
    for name, meaning, value in (
        ("num_requests_running", "Continuations that hold a slot.", stats.num_running),
        ("num_requests_waiting", "Continuations that wait for one.", stats.num_waiting),
        ("num_kv_pages", "KV pages.", pages),
        ("num_kv_pages_used", "KV pages that requests or the prefix cache hold.", used_pages),
        ("kv_cache_usage_perc", "Their share, 0 to 1.", used_pages / pages),
        ("num_state_rows", "State rows.", rows),
        ("num_state_rows_used", "State rows that requests or the prefix cache hold.", used_rows),
    ):
        yield Sample(name, meaning, value, "gauge")


def _cache(stats: EngineStats) -> Iterator[Sample]:
    cache = stats.cache
    for name, meaning, value in (
        ("prefix_cache_queries", "Tokens of admitted requests.", cache.num_tokens),
        ("prefix_cache_hits", "Those of them that needed no prefill.", cache.num_cached_tokens),
        ("num_preemptions", "Running requests sent back to the queue.", cache.num_retractions),
        ("snapshots", "State snapshots stored.", cache.num_snapshots),
        (
            "snapshots_skipped",
            "Snapshots for which no row was free.",
            cache.num_snapshots_skipped,
        ),
        ("host_cache_stores", "Keys copied to the host tier.", cache.num_stores),
        ("host_cache_loads", "Keys brought back from there.", cache.num_loads),
    ):
        yield Sample(name, meaning, value)
    meaning = "Cache entries dropped, by what was needed."
    yield Sample("evictions", meaning, cache.num_rows_evicted, labels={"kind": "row"})
    yield Sample("evictions", meaning, cache.num_leaves_evicted, labels={"kind": "page"})
    meaning = "Steps at which the first in the queue had to wait, by reason."
    for reason, label in _WAITS.items():
        waits = cache.waits.get(reason, 0)
        yield Sample("request_wait_steps", meaning, waits, labels={"reason": label})


def _decode(stats: EngineStats) -> Iterator[Sample]:
    decode = stats.decode
    drafts = decode.proposed_at[0] if decode.proposed_at else 0
    for name, meaning, value in (
        ("decode_rows", "Rows of decode steps.", decode.num_steps),
        ("decode_tokens", "Tokens that they emitted.", decode.num_emitted),
        ("ring_flushes", "Steps that folded ring entries into a checkpoint.", decode.num_flushes),
        ("spec_decode_num_drafts", "Rows with drafts.", drafts),
        ("spec_decode_num_draft_tokens", "Tokens drafted.", decode.num_proposed),
        ("spec_decode_num_accepted_tokens", "Drafts accepted.", decode.num_accepted),
    ):
        yield Sample(name, meaning, value)
    for place, accepted in enumerate(decode.accepted_at):
        yield Sample(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by their place in the window.",
            accepted,
            labels={"position": str(place)},
        )
