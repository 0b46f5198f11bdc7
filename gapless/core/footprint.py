"""Bytes of device memory that a model takes on each rank: its weights, and its pools' parts.

The one set of formulas behind the memory budget (`config/memory.py`) and `gapless inspect`. They
say what `runner/pools.py` allocates, byte for byte, and what loading fills; activations, rotary
tables, workspaces and the slot table live in the memory that the budget leaves over
(`runner/reserve.py`). Most of the slot table is the token counts of penalties: 5 bytes per slot and
entry of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.core.draft_shape import TreeShape, draft_reach
from gapless.core.dtypes import DTYPE_BYTES
from gapless.core.parallel import architecture_of_rank, head_rows
from gapless.core.specs.attention import PagedSpec
from gapless.core.specs.feed_forward import MoeSpec

if TYPE_CHECKING:
    from gapless.core.architecture import Architecture, LayerSpec


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one model takes under the settings that its sizes depend on."""

    architecture: Architecture
    device: str  # "cpu" or "cuda"
    dtype: str
    ssm_dtype: str
    page_size: int
    replay_len: int  # L
    max_window: int  # W_max
    tree: TreeShape | None = None  # None: drafts in a row
    uses_mtp: bool = True
    """Whether a window above 1 is drafted by the model's MTP layers, where it has some."""
    has_float8_head: bool = False
    """Whether drafts of MTP layers are read from a copy of the vocabulary head in float8."""
    world_size: int = 1
    """Ranks that the model is split over; all sizes are those of one rank, of the largest one."""

    @property
    def own(self) -> Architecture:
        """Sizes of one rank's part of the model; its embedding and head are given whole."""
        return architecture_of_rank(self.architecture, self.world_size)

    @property
    def acc_dtype(self) -> str:
        """Type of norms and decays: at least float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def has_mtp(self) -> bool:
        """Whether MTP layers are loaded and keep KV."""
        return self.uses_mtp and self.max_window > 1 and self.architecture.num_mtp_layers > 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all loaded weights."""
        return sum(self.weight_bytes_by_dtype.values())

    @property
    def weight_bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of the loaded weights by the type that they are kept in."""
        spec = self.own
        count, acc_count = spec.num_parameters, spec.hidden_size
        head = head_rows(spec.vocab_size, self.world_size) * spec.hidden_size
        if not spec.ties_embeddings:
            count += head - spec.vocab_size * spec.hidden_size
        elif self.device == "cpu" or spec.vocab_size % self.world_size:
            # a CPU wants the head input-major, the embedding row by row
            count += head
        acc_count += sum(layer.num_acc_parameters(spec.hidden_size) for layer in spec.layers)
        if self.has_mtp:
            count += num_mtp_parameters(spec)
            acc_count += 3 * spec.hidden_size
            per_layer = mtp_layer(spec).num_acc_parameters(spec.hidden_size)
            acc_count += spec.num_mtp_layers * per_layer
        found = dict.fromkeys((self.dtype, self.acc_dtype), 0)
        found[self.dtype] += (count - acc_count) * DTYPE_BYTES[self.dtype]
        found[self.acc_dtype] += acc_count * DTYPE_BYTES[self.acc_dtype]
        if self.draft_head_bytes:
            found["float8"] = self.draft_head_bytes
        return found

    @property
    def draft_head_bytes(self) -> int:
        """Bytes of the head's copy in float8, scales included: a byte an entry, four a row."""
        if not (self.has_float8_head and self.has_mtp):
            return 0
        own = self.own
        return head_rows(own.vocab_size, self.world_size) * (own.hidden_size + 4)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers but the MTP layers."""
        return self.own.kv_bytes_per_token(self.dtype)

    @property
    def mtp_kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in the MTP layers that are in use."""
        if not self.has_mtp:
            return 0
        mixer = mtp_mixer(self.own)
        return self.architecture.num_mtp_layers * mixer.kv_bytes_per_token(self.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.page_size * (self.kv_bytes_per_token + self.mtp_kv_bytes_per_token)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state in one row of the state pool."""
        return self.own.state_bytes_per_row(self.ssm_dtype)

    @property
    def tail_bytes(self) -> int:
        """Bytes of the convolution tail in one row: the inputs that its next token's taps reach."""
        own = self.own
        return sum(spec.ring_bytes(self.dtype, 0, own.conv_width - 1) for spec in own.linear_layers)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden state that the MTP layers continue from, of one position."""
        return self.architecture.hidden_size * DTYPE_BYTES[self.dtype] if self.has_mtp else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the state pool: what a request resumes from, but for its pages.

        0 where pages alone are enough.
        """
        return self.state_bytes + self.tail_bytes + self.hidden_bytes

    @property
    def ring_bytes(self) -> int:
        """Bytes of one slot's rings: replay, convolution, and hidden states for the MTP layers."""
        rings = self.own.ring_bytes_per_slot(self.dtype, self.replay_len, self.max_window)
        return rings + (self.max_window + 1) * self.hidden_bytes

    @property
    def request_bytes(self) -> int:
        """Bytes that a running request takes beside its pages."""
        return self.row_bytes + self.ring_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the pools with no request: the null page, the null slot's rings, the null row,
        the zero row, which is a recurrent state alone, and one zero entry of each ring."""
        zero_entries = sum(spec.ring_bytes(self.dtype, 1, 1) for spec in self.own.linear_layers)
        zeros = self.state_bytes + zero_entries
        return self.page_bytes + self.ring_bytes + self.row_bytes + zeros

    def pool_bytes(self, *, num_requests: int, num_pages: int, num_snapshots: int = 0) -> int:
        """Bytes of pools for running requests, pages that they share, and snapshots."""
        return (
            self.fixed_bytes
            + num_requests * self.request_bytes
            + num_pages * self.page_bytes
            + num_snapshots * self.row_bytes
        )

    def num_pages(self, limit_len: int) -> int:
        """Pages that a request of `limit_len` tokens, prompt and output, holds at its end.

        `CacheManager.num_pages_at_limit` gives out that many; the derivation is in `cache/pages`.
        """
        return -(-(limit_len + self._overshoot) // self.page_size)

    def longest_request(self, num_pages: int) -> int:
        """Most tokens, prompt and output, of a request that holds `num_pages` pages."""
        return num_pages * self.page_size - self._overshoot

    @property
    def _overshoot(self) -> int:
        """Positions past its limit that a request's last steps reach."""
        return max(self.max_window - 2, draft_reach(self.max_window, self.tree) - 1)


def human(size: int) -> str:
    """Show a size in the largest binary unit that it fills, such as "1.5 GiB"."""
    power = min(4, max(0, size.bit_length() - 1) // 10)
    if power == 0:
        return f"{size} B"
    return f"{size / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def mtp_layer(spec: Architecture) -> LayerSpec:
    """The layer that MTP layers are built like."""
    if spec.own_mtp_layer is not None:
        return spec.own_mtp_layer
    return next(layer for layer in reversed(spec.layers) if isinstance(layer.mixer, PagedSpec))


def mtp_mixer(spec: Architecture) -> PagedSpec:
    """What such a layer attends with."""
    mixer = mtp_layer(spec).mixer
    assert isinstance(mixer, PagedSpec), "an MTP layer attends"
    return mixer


def num_active_parameters(spec: Architecture) -> int:
    """Weights that one token uses: all but those of the experts that it is not routed to."""
    d = spec.hidden_size
    blocks = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    idle = sum((b.num_experts - b.num_active) * b.expert_parameters(d) for b in blocks)
    return spec.num_parameters - idle


def num_mtp_parameters(spec: Architecture) -> int:
    """Weights of the MTP layers and of the merge before them; embedding and head are the trunk's.

    The merge takes two vectors to one, with a norm of each of them and one behind the layers.
    """
    if not spec.num_mtp_layers:
        return 0
    d, layer = spec.hidden_size, mtp_layer(spec)
    return 2 * d * d + 3 * d + spec.num_mtp_layers * layer.num_parameters(d)
