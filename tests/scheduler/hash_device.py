"""A runner without numbers: it executes step plans on a model that is a hash of all it reads.

State, KV and convolution taps are integers, and the next token is a hash of them, so one stale
entry, wrong page or miscounted length changes the tokens. Everything that the design keeps on
the device is here: the slot table, pages by page table with a null page, replay and convolution
rings, checkpoint rows, MTP KV, done rows. Nothing is ever cleared, as on the device: what a
former tenant left lies there until it is overwritten, and unwritten memory holds junk.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gapless.core import architecture
from gapless.core.draft_shape import draft_reach, most_emitted
from gapless.core.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gapless.core.plan import PrefillSegment, SlotSave, Transfer
    from gapless.core.request import Request
    from gapless.scheduler.limits import SchedulerLimits

VOCAB_SIZE = 11
CONV_WIDTH = 4
# a draft pass's MTP KV: a guess that extend overwrites
DRAFTED = -7


class Divergence(AssertionError):
    """The device did something that the design rules out."""


class Flaw(Enum):
    """A way to break the device's side of the design."""

    DONE_ROW_FOLDS = auto()  # a done row keeps its slot: layers fold, the counters stay
    DONE_ROW_RUNS = auto()  # a done row keeps its slot and runs on, counted
    STOP_IS_NOT_COUNTED = auto()  # a step that stops adds one token less to seq_lens
    COUNTS_PAST_STOP = auto()  # a step that stops also adds the accepted drafts after the stop
    SAVES_COME_LATE = auto()  # a slot is saved once the step's prefill has run
    PAGES_ARE_NOT_COPIED = auto()  # a page that a prefix fills in part is not copied
    LOADS_COME_LATE = auto()  # what the host holds arrives once the step's prefill has run
    TAIL_IS_NOT_SAVED = auto()  # the convolution tail of a snapshot stays what it was
    HIDDEN_IS_NOT_SAVED = auto()  # so does the last hidden state
    PATH_IS_LEFT_WHERE_IT_IS = auto()  # a tree's accepted path is not moved together
    PATH_MOVES_ENTRY_BY_ENTRY = auto()  # it is, but last entries first, each before others are read
    FIRST_MTP_KV_IS_KEPT = auto()  # a resumed request keeps its prefix's MTP KV at its start


def state_input(token: int, state: int) -> int:
    """Replay ring entry of a token."""
    return hash((1, token, state))


def fold(state: int, entry: int) -> int:
    """State after a ring entry."""
    return hash((2, state, entry))


def kv_value(token: int, state: int) -> int:
    """KV entry of a token."""
    return hash((3, token, state))


def mtp_value(hidden: int, token: int) -> int:
    """The MTP layer's KV at p, of the trunk's hidden state at p - 1 and the token at p."""
    return hash((4, hidden, token))


def next_token(
    state: int, kv: tuple[int, ...], taps: tuple[int | None, ...], *, masked: tuple[int, ...]
) -> int:
    """The token at position `len(kv)`; stop ids that may not come yet are masked."""
    token = hash((5, state, kv, tuple(-1 if tap is None else tap for tap in taps))) % VOCAB_SIZE
    while token in masked:
        token = (token + 1) % VOCAB_SIZE
    return token


def prompt_logprob(state: int, token: int) -> float:
    """Log-probability of a prompt token after a state."""
    return -(hash((6, state, token)) % 997) / 100.0


@lru_cache(maxsize=1 << 16)
def reference(tokens: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """State after `tokens`, and the KV of all their positions."""
    if not tokens:
        return 0, ()
    for length in range(100, len(tokens), 100):
        reference(tokens[:length])  # all at once would nest too deeply
    state, kv = reference(tokens[:-1])
    return fold(state, state_input(tokens[-1], state)), (*kv, kv_value(tokens[-1], state))


def taps_of(tokens: tuple[int, ...]) -> tuple[int | None, ...]:
    """Convolution taps of the last token."""
    tail = tokens[-CONV_WIDTH:]
    return (None,) * (CONV_WIDTH - len(tail)) + tail


def reference_next(request: Request, tokens: tuple[int, ...]) -> int:
    """The token that follows `tokens` in a request, as a pure function."""
    masked = request.stop_ids if len(tokens) < request.min_len else ()
    return next_token(*reference(tokens), taps_of(tokens), masked=masked)


def reference_output(request: Request) -> tuple[int, ...]:
    """All tokens that a request generates if nobody ends it early."""
    tokens = request.prompt_ids
    while len(tokens) < request.limit_len:
        token = reference_next(request, tokens)
        is_stop = token in request.stop_ids and len(tokens) >= request.min_len
        tokens = (*tokens, token)
        if is_stop:
            break
    return tokens[len(request.prompt_ids) :]


@dataclass
class Slot:
    """One row of the slot table, and the rings of that slot."""

    page_table: list[int]
    window: list[int]
    parents: list[int]
    ring: list[int]
    conv_ring: list[int]
    hidden_ring: list[int]
    seq_len: int = 0
    checkpoint_len: int = 0
    state_row: int = 0
    is_done: bool = True
    limit_len: int = 0
    min_len: int = 0
    stop_ids: tuple[int, ...] = ()
    # not of the design: what the scripted drafter and the frozen-state check need
    request: Request | None = None
    history: tuple[int, ...] = ()
    when_done: object = None


@dataclass(frozen=True)
class Row:
    """What one row of the state pool holds; a request that runs uses the state alone."""

    state: int
    conv_tail: tuple[int | None, ...]
    hidden: int


@dataclass(frozen=True)
class Sizes:
    """How a device is built."""

    limits: SchedulerLimits
    accept_rate: float
    seed: int
    flaws: frozenset[Flaw] = field(default_factory=frozenset)


class HashDevice:
    """Executes plans at once, in order; the caller decides when to look at the results."""

    def __init__(self, sizes: Sizes) -> None:
        limits = sizes.limits
        self.window = limits.max_window
        self.replay_len = limits.replay_len
        self.page_size = limits.page_size
        self.null_page = limits.num_pages
        self.null_slot = limits.max_running_requests
        self.flaws = sizes.flaws
        self.needs_snapshots = limits.needs_snapshots
        self._accept_rate = sizes.accept_rate
        self._random = random.Random(sizes.seed)
        self._junk = -1000
        ring_len = architecture.ring_capacity(self.replay_len, self.window)
        conv_len = architecture.conv_ring_capacity(CONV_WIDTH, self.window)
        # windows, drafts and reservations reach past the context's end
        self.tree = limits.tree
        self.reach = draft_reach(self.window, self.tree)
        ahead = 4 * self.window + 2 * self.reach
        num_entries = -(-(limits.max_model_len + ahead) // self.page_size)
        self.slots = [
            Slot(
                page_table=[self.null_page] * num_entries,
                window=[0] * self.window,
                # a chain, until drafts come
                parents=list(range(-1, self.window - 1)),
                ring=[self._unwritten() for _ in range(ring_len)],
                conv_ring=[self._unwritten() for _ in range(conv_len)],
                hidden_ring=[self._unwritten() for _ in range(self.window + 1)],
            )
            for _ in range(self.null_slot + 1)
        ]
        self.slots[self.null_slot].state_row = limits.num_state_rows
        self.rows = [self._unwritten_row() for _ in range(limits.num_state_rows + 1)]
        num_positions = (self.null_page + 1) * self.page_size
        self.kv = [self._unwritten() for _ in range(num_positions)]
        self.mtp_kv = [self._unwritten() for _ in range(num_positions)]
        num_host = limits.num_host_pages * self.page_size
        self.host_kv = [self._unwritten() for _ in range(num_host)]
        self.host_mtp_kv = [self._unwritten() for _ in range(num_host)]
        self.host_rows = [self._unwritten_row() for _ in range(limits.num_host_rows)]
        self._storing: deque[Transfer] = deque()
        self._num_stored = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one step: saves, loads, stores, page copies, prefill, decode."""
        if Flaw.SAVES_COME_LATE not in self.flaws:
            self._save(plan.saves)
        if Flaw.LOADS_COME_LATE not in self.flaws:
            self._load(plan.loads)
        self._storing += plan.stores
        self._finish_stores(all_of_them=plan.awaits_stores)
        self._copy_pages(plan)
        self._check_races(plan.prefill)
        firsts: list[int] = []
        logprobs: list[np.ndarray | None] = []
        for segment in plan.prefill:
            logprobs.append(self._prefill(segment))
            if segment.is_last:
                firsts.append(self._sample_first(segment))
        if Flaw.SAVES_COME_LATE in self.flaws:
            self._save(plan.saves)
        if Flaw.LOADS_COME_LATE in self.flaws:
            self._load(plan.loads)
        for entry in plan.page_entries:
            self.slots[entry.slot].page_table[entry.index] = entry.page
        tokens = np.full((len(plan.decode), self.window), -1, dtype=np.int32)
        lens = np.zeros(len(plan.decode), dtype=np.int32)
        for i, row in enumerate(plan.decode):
            if self.slots[row.slot].seq_len > plan.max_seq_len:
                raise Divergence(f"slot {row.slot} is longer than {plan.max_seq_len=}")
            emitted = self._decode(row.slot)
            tokens[i, : len(emitted)] = emitted
            lens[i] = len(emitted)
        has_logprobs = any(values is not None for values in logprobs)
        return StepResult(
            prefill_tokens=np.array(firsts, dtype=np.int32),
            decode_tokens=tokens,
            decode_lens=lens,
            decode_proposed=np.full(len(plan.decode), self.window - 1, dtype=np.int32),
            num_stored=self._num_stored,
            prompt_logprobs=tuple(logprobs) if has_logprobs else (),
        )

    def check_snapshot(self, index: int, tokens: tuple[int, ...], position: int) -> None:
        """Materialize a slot's state at `position`, and compare all that a snapshot holds."""
        slot, prefix = self.slots[index], tokens[:position]
        if not slot.checkpoint_len <= position <= slot.seq_len:
            raise Divergence(
                f"slot {index}: no state at {position}, only at "
                f"{slot.checkpoint_len}..{slot.seq_len}"
            )
        state, kv = reference(prefix)
        if self._state_at(slot, position) != state:
            raise Divergence(f"slot {index}: wrong state at {position}")
        # the taps of the token that may follow, which is itself the last of CONV_WIDTH
        if self._taps(slot, range(position))[1:] != taps_of(prefix)[1:]:
            raise Divergence(f"slot {index}: wrong convolution tail at {position}")
        if self._read_kv(slot, range(position)) != kv:
            raise Divergence(f"slot {index}: wrong KV before {position}")
        if position and self._hidden(slot, position - 1) != state:
            raise Divergence(f"slot {index}: wrong hidden state before {position}")
        if self.window > 1:
            self._check_mtp(slot, prefix)

    def check_frozen(self, index: int, committed_len: int) -> None:
        """Compare a done slot with what it was when it became done."""
        slot = self.slots[index]
        if slot.seq_len != committed_len:
            raise Divergence(f"slot {index}: seq_len {slot.seq_len}, want {committed_len}")
        if not slot.is_done or slot.when_done != self._contents(slot):
            raise Divergence(f"slot {index}: its state moved on after it was done")

    def _unwritten(self) -> int:
        self._junk -= 1
        return self._junk

    def _unwritten_row(self) -> Row:
        tail = tuple(self._unwritten() for _ in range(CONV_WIDTH - 1))
        return Row(self._unwritten(), tail, self._unwritten())

    def _save(self, saves: Sequence[SlotSave]) -> None:
        for save in saves:
            slot, position = self.slots[save.slot], save.position
            if not slot.checkpoint_len <= position <= slot.seq_len:
                raise Divergence(
                    f"slot {save.slot}: no state at {position}, only at "
                    f"{slot.checkpoint_len}..{slot.seq_len}"
                )
            self._store(slot, save.row, position, self._state_at(slot, position))

    def _store(self, slot: Slot, row: int, position: int, state: int) -> None:
        """Put a slot's state, convolution tail and hidden state at a position into a row."""
        old = self.rows[row]
        tail = self._taps(slot, range(position))[1:]
        hidden = slot.hidden_ring[(position - 1) % len(slot.hidden_ring)]
        self.rows[row] = Row(
            state,
            old.conv_tail if Flaw.TAIL_IS_NOT_SAVED in self.flaws else tail,
            old.hidden if Flaw.HIDDEN_IS_NOT_SAVED in self.flaws else hidden,
        )

    def _load(self, loads: Sequence[Transfer]) -> None:
        for load in loads:
            for source, target in zip(load.host_pages, load.device_pages, strict=True):
                for kv, host_kv in ((self.kv, self.host_kv), (self.mtp_kv, self.host_mtp_kv)):
                    kv[self._span(target)] = host_kv[self._span(source)]
            if load.device_row is not None:
                assert load.host_row is not None
                self.rows[load.device_row] = self.host_rows[load.host_row]

    def _finish_stores(self, *, all_of_them: bool) -> None:
        """Let some stores under way arrive; they read the device only then."""
        while self._storing and (all_of_them or self._random.random() < 0.4):
            store = self._storing.popleft()
            self._num_stored += 1
            for source, target in zip(store.device_pages, store.host_pages, strict=True):
                for kv, host_kv in ((self.kv, self.host_kv), (self.mtp_kv, self.host_mtp_kv)):
                    host_kv[self._span(target)] = kv[self._span(source)]
            if store.host_row is not None:
                assert store.device_row is not None
                self.host_rows[store.host_row] = self.rows[store.device_row]

    def _span(self, page: int) -> slice:
        return slice(page * self.page_size, (page + 1) * self.page_size)

    def _copy_pages(self, plan: StepPlan) -> None:
        targets = [copy.target for copy in plan.page_copies]
        if len(set(targets)) != len(targets):
            raise Divergence(f"pages are copied to {targets}")
        if Flaw.PAGES_ARE_NOT_COPIED in self.flaws:
            return
        for kv in (self.kv, self.mtp_kv):
            read = [kv[self._span(copy.source)] for copy in plan.page_copies]
            for target, values in zip(targets, read, strict=True):
                kv[self._span(target)] = values

    def _check_races(self, segments: Sequence[PrefillSegment]) -> None:
        """What one segment of a forward writes no other may read or write."""
        rows = [s.state_row for s in segments]
        rows += [snapshot.row for s in segments for snapshot in s.snapshots]
        if len(set(rows)) != len(rows):
            raise Divergence(f"segments write the rows {rows}")
        resumed = {s.resumed_row for s in segments}
        if resumed & set(rows):
            raise Divergence(f"segments resume from {resumed} and write {rows}")
        for segment in segments:
            written = {
                page
                for other in segments
                if other is not segment
                for page in other.pages[other.start // self.page_size :]
            }
            if written & set(segment.pages[: -(-segment.end // self.page_size)]):
                raise Divergence("a segment reads pages that another writes")

    def _address(self, slot: Slot, position: int) -> int:
        page = slot.page_table[position // self.page_size]
        return page * self.page_size + position % self.page_size

    def _write(self, kv: list[int], slot: Slot, position: int, value: int) -> None:
        """Write KV that the design reserves; only the null slot may hit the null page."""
        address = self._address(slot, position)
        if address >= self.null_page * self.page_size:
            if slot is not self.slots[self.null_slot]:
                raise Divergence(f"position {position} is beyond the reservation")
            value = self._unwritten()
        kv[address] = value

    def _read_kv(self, slot: Slot, positions: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.kv[self._address(slot, p)] for p in positions)

    def _taps(self, slot: Slot, positions: Sequence[int]) -> tuple[int | None, ...]:
        ring, nearest = slot.conv_ring, positions[-CONV_WIDTH:]
        return (None,) * (CONV_WIDTH - len(nearest)) + tuple(ring[p % len(ring)] for p in nearest)

    def _state_at(self, slot: Slot, position: int) -> int:
        state = self.rows[slot.state_row].state if slot.checkpoint_len > 0 else 0
        for p in range(slot.checkpoint_len, position):
            state = fold(state, slot.ring[p % len(slot.ring)])
        return state

    def _prefill(self, segment: PrefillSegment) -> np.ndarray | None:
        slot, request = self.slots[segment.slot], segment.request
        spare = len(slot.page_table) - len(segment.pages)
        slot.page_table = [*segment.pages, *[self.null_page] * spare]
        slot.state_row = segment.state_row
        slot.is_done = True
        state = self._start(slot, segment)
        snapshots = {snapshot.position: snapshot.row for snapshot in segment.snapshots}
        if snapshots and not segment.start < min(snapshots) <= max(snapshots) <= segment.end:
            raise Divergence(f"snapshots at {sorted(snapshots)} of {segment.start}..{segment.end}")
        logprobs = np.full(segment.end - segment.start, np.nan)
        keeps = segment.resumed_row is not None and Flaw.FIRST_MTP_KV_IS_KEPT in self.flaws
        for p in range(segment.start, segment.end):
            token = request.token_ids[p]
            self._write(self.kv, slot, p, kv_value(token, state))
            if self.window > 1 and p > 0 and not (keeps and p == segment.start):
                self._write(self.mtp_kv, slot, p, mtp_value(self._hidden(slot, p - 1), token))
            slot.conv_ring[p % len(slot.conv_ring)] = token
            state = fold(state, state_input(token, state))
            slot.hidden_ring[p % len(slot.hidden_ring)] = state
            if p + 1 in snapshots:
                self._store(slot, snapshots[p + 1], p + 1, state)
            if p + 1 < len(request.token_ids):
                logprobs[p - segment.start] = prompt_logprob(state, request.token_ids[p + 1])
        self.rows[slot.state_row] = replace(self.rows[slot.state_row], state=state)
        slot.seq_len = slot.checkpoint_len = segment.end
        return logprobs if request.wants_prompt_logprobs else None

    def _start(self, slot: Slot, segment: PrefillSegment) -> int:
        """The state that a segment starts from; what is cached must be what its key says."""
        start, is_cached = segment.start, not self.needs_snapshots and segment.is_first
        if start == 0:
            return 0
        if segment.resumed_row is None and not is_cached:
            if slot.checkpoint_len != start:
                raise Divergence(f"segment from {start}, checkpoint {slot.checkpoint_len}")
            return self.rows[slot.state_row].state
        prefix = tuple(segment.request.token_ids[:start])
        state, kv = reference(prefix)
        tail = taps_of(prefix)[1:]
        # a model without recurrent state needs its KV only; here the rest is simply known
        row = Row(state, tail, state) if is_cached else self.rows[segment.resumed_row or 0]
        if (row.state, row.conv_tail) != (state, tail):
            raise Divergence(f"resumed at {start} from the state of something else")
        if self.window > 1 and row.hidden != state:
            raise Divergence(f"resumed at {start} from the hidden state of something else")
        if self._read_kv(slot, range(start)) != kv:
            raise Divergence(f"resumed at {start} with the KV of something else")
        for back, token in enumerate(reversed(row.conv_tail), start=1):
            if token is not None:
                slot.conv_ring[(start - back) % len(slot.conv_ring)] = token
        slot.hidden_ring[(start - 1) % len(slot.hidden_ring)] = row.hidden
        return row.state

    def _hidden(self, slot: Slot, position: int) -> int:
        return slot.hidden_ring[position % len(slot.hidden_ring)]

    def _sample_first(self, segment: PrefillSegment) -> int:
        slot, request, n = self.slots[segment.slot], segment.request, segment.end
        slot.limit_len, slot.min_len = request.limit_len, request.min_len
        slot.stop_ids, slot.request = request.stop_ids, request
        token = self._target(slot, range(n), self.rows[slot.state_row].state)
        slot.is_done = self._is_end(slot, token, n + 1)
        slot.history = (*request.token_ids[:n], token)
        if self.window > 1:
            self._write(self.mtp_kv, slot, n, mtp_value(self._hidden(slot, n - 1), token))
        self._settle(slot, token)
        return token

    def _target(self, slot: Slot, positions: Sequence[int], state: int) -> int:
        """Sample the next token from all before it, given where those are stored."""
        masked = slot.stop_ids if len(positions) < slot.min_len else ()
        kv = self._read_kv(slot, positions)
        return next_token(state, kv, self._taps(slot, positions), masked=masked)

    def _path(self, slot: Slot, node: int) -> list[int]:
        """Nodes from the newest token to one of the window."""
        path = [node]
        while path[0]:
            path.insert(0, slot.parents[path[0]])
        return path

    def _is_end(self, slot: Slot, token: int, total_len: int) -> bool:
        is_stop = token in slot.stop_ids and total_len > slot.min_len
        return is_stop or total_len >= slot.limit_len

    def _decode(self, index: int) -> list[int]:
        was_done = self.slots[index].is_done
        keeps_slot = self.flaws & {Flaw.DONE_ROW_FOLDS, Flaw.DONE_ROW_RUNS}
        slot = self.slots[self.null_slot if was_done and not keeps_slot else index]
        nodes = self._verify(slot)
        if was_done and Flaw.DONE_ROW_RUNS not in self.flaws:
            return []
        return self._accept(slot, nodes)

    def _verify(self, slot: Slot) -> list[tuple[int, int]]:
        """Target token and hidden state of each window token.

        All window entries are written before anything that a ring may have lost is read: the
        order least kind to a ring that is too short.
        """
        q = slot.seq_len
        before, after, entries = [], [], []
        for i, token in enumerate(slot.window):
            before.append(after[slot.parents[i]] if i else self._state_at(slot, q))
            entries.append(state_input(token, before[i]))
            after.append(fold(before[i], entries[i]))
        for i, token in enumerate(slot.window):
            slot.conv_ring[(q + i) % len(slot.conv_ring)] = token
            slot.ring[(q + i) % len(slot.ring)] = entries[i]
            self._write(self.kv, slot, q + i, kv_value(token, before[i]))
        folded_len = max(slot.checkpoint_len, q // self.replay_len * self.replay_len)
        folded = replace(self.rows[slot.state_row], state=self._state_at(slot, folded_len))
        self.rows[slot.state_row] = folded
        if not slot.is_done or Flaw.DONE_ROW_RUNS in self.flaws:
            slot.checkpoint_len = folded_len
        stored = [[*range(q), *(q + n for n in self._path(slot, i))] for i in range(self.window)]
        return [
            (self._target(slot, positions, h), h)
            for positions, h in zip(stored, after, strict=True)
        ]

    def _accept(self, slot: Slot, nodes: list[tuple[int, int]]) -> list[int]:
        q, window, emitted, is_end = slot.seq_len, slot.window, [], False
        path: list[int] = []
        following: int | None = 0
        while following is not None:
            path.append(following)
            token = nodes[following][0]
            emitted.append(token)
            is_end = self._is_end(slot, token, q + 1 + len(emitted))
            children = (
                n for n in range(1, self.window)
                if slot.parents[n] == path[-1] and window[n] == token
            )  # fmt: skip
            following = None if is_end else next(children, None)
        self._close_up(slot, path)
        for i in range(most_emitted(self.window, self.tree)):
            # of a chain all its nodes have a hidden state there; past a path there is none
            node = path[i] if i < len(path) else i
            slot.hidden_ring[(q + i) % len(slot.hidden_ring)] = nodes[node][1]
        counted = len(emitted)
        if is_end and Flaw.STOP_IS_NOT_COUNTED in self.flaws:
            counted -= 1
        if is_end and Flaw.COUNTS_PAST_STOP in self.flaws:
            while counted < self.window and window[counted] == nodes[counted - 1][0]:
                counted += 1
        slot.seq_len += counted
        slot.is_done = is_end
        slot.history += tuple(emitted)
        if self.window > 1:
            for i, token in enumerate(emitted):
                self._write(self.mtp_kv, slot, q + 1 + i, mtp_value(nodes[path[i]][1], token))
        self._settle(slot, emitted[-1])
        return emitted

    def _close_up(self, slot: Slot, path: Sequence[int]) -> None:
        """Move what was stored for the nodes of a path to consecutive positions."""
        if Flaw.PATH_IS_LEFT_WHERE_IT_IS in self.flaws:
            return
        q = slot.seq_len
        moves = [(q + node, q + i) for i, node in enumerate(path)]
        batches = [moves]
        if Flaw.PATH_MOVES_ENTRY_BY_ENTRY in self.flaws:
            batches = [[move] for move in reversed(moves)]
        for batch in batches:
            kv = self._read_kv(slot, (source for source, _ in batch))
            for value, (_, target) in zip(kv, batch, strict=True):
                self._write(self.kv, slot, target, value)
            for ring in (slot.ring, slot.conv_ring):
                read = [ring[source % len(ring)] for source, _ in batch]
                for value, (_, target) in zip(read, batch, strict=True):
                    ring[target % len(ring)] = value

    def _settle(self, slot: Slot, token: int) -> None:
        """End a step with its newest token: draft the rest of the window, or freeze."""
        slot.window[0] = token
        if slot.is_done:
            slot.when_done = self._contents(slot)
            return
        for i in range(1, self.reach + 1):
            self._write(self.mtp_kv, slot, slot.seq_len + i, DRAFTED)
        assert slot.request is not None, "a drafting slot has a tenant"
        if self.tree is not None:
            self._branch(slot, self.tree.num_steps)
        for i in range(1, self.window):
            path = self._path(slot, slot.parents[i])
            tokens = (*slot.history, *(slot.window[node] for node in path[1:]))
            draft = reference_next(slot.request, tokens)
            if self._random.random() >= self._accept_rate:
                draft = self._random.randrange(VOCAB_SIZE)
            slot.window[i] = draft

    def _branch(self, slot: Slot, deepest: int) -> None:
        """Draw a tree."""
        depths = [0]
        for i in range(1, self.window):
            parent = self._random.choice([n for n in range(i) if depths[n] < deepest])
            slot.parents[i] = parent
            depths.append(depths[parent] + 1)

    def _contents(self, slot: Slot) -> object:
        addresses = [self._address(slot, p) for p in range(slot.seq_len)]
        return (
            (slot.seq_len, slot.checkpoint_len, self.rows[slot.state_row].state),
            (tuple(slot.ring), tuple(slot.conv_ring)),
            tuple((self.kv[a], self.mtp_kv[a]) for a in addresses),
        )

    def _check_mtp(self, slot: Slot, prefix: tuple[int, ...]) -> None:
        for p in range(1, len(prefix)):
            wanted = mtp_value(reference(prefix[:p])[0], prefix[p])
            if self.mtp_kv[self._address(slot, p)] != wanted:
                raise Divergence(f"wrong MTP KV at {p} of {len(prefix)}")
