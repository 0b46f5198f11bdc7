"""Window read-out of a linear layer over its checkpoint and replay ring, and its fold.

The definition, and the CPU path. Per value head the state S is [V, K]:

    S_t = S_{t-1} Diag(exp g_t) + d_t k_t^T,    o_t = S_t q_t
    d_t = beta_t (v_t - S_{t-1} Diag(exp g_t) k_t)    delta rules
    d_t = v_t                                         Mamba-2 (v = dt * x, k = B, q = C, g = dt * A)

Unrolled from the checkpoint S_0 over the ring entries j (inclusive cumulative log decay G_j, at
the last one G_end) and the window nodes i (G_i = G_end + sum of g over i and its ancestors):

    past(x_i) = S_0 (x_i exp G_i) + sum_ring d_j sum_c x_ic exp(G_i - G_j)_c k_jc
    pair(x)_ij = sum_c x_ic exp(G_i - G_j)_c k_jc     where j is i or an ancestor of i, else 0
    d = (I + Diag(beta) strict(pair(k)))^-1 Diag(beta) (v - past(k))
    o = past(q) + pair(q) d

which is the WY form of the delta rule (Yang et al. 2024, "Parallelizing Linear Transformers with
the Delta Rule over Sequence Length", section 3; with decay: "Gated Delta Networks", section 3.3)
with a tree's ancestor mask in place of the causal one. Exponents are at most 0 along a path and
positive off it, so the exponent is masked, never the product: exp could overflow.

Addressing is flat. One entry of each ring and one checkpoint row are zero for ever: what does not
exist is read from there. One ring entry per null-slot position and one null row absorb the writes
of padded rows and may hold anything. All arithmetic is per row, so nothing crosses rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.core.specs.linear import Recurrence
from gapless.ops.draft_tree import unpack

if TYPE_CHECKING:
    from torch import Tensor

NEG_INF = float("-inf")


@dataclass(frozen=True)
class ReplayMemory:
    """One linear layer's state; the three rings share their entry numbers."""

    checkpoint: Tensor  # [rows, HV, V, K] state dtype
    d_ring: Tensor  # [entries, HV, V] acc dtype
    k_ring: Tensor  # [entries, H, K] activation dtype, as projected: not normalised
    g_ring: Tensor  # [entries, HV, Kd] acc dtype, log decay of the one token; Kd is 1 or K


@dataclass(frozen=True)
class ReplayIndices:
    """Where one step reads and writes, the same for every layer; N = L - 1 + W_max.

    The zero entry is the rings' last one. A fold leaves at most L - 1 entries. Where W_max exceeds
    L, every window has W_max tokens.
    """

    ring_read: Tensor
    """[B, N] int64: entry of position checkpoint_len + j; the zero entry from seq_lens on."""
    ring_write: Tensor
    """[B, W] int64: entry of each window node."""
    fold_mask: Tensor
    """[B, N] bool: position checkpoint_len + j is below the fold's end."""
    read_rows: Tensor
    """[B] int64: checkpoint row; the zero row where checkpoint_len is 0."""
    fold_rows: Tensor
    """[B] int64: row to fold into; the null row where nothing is to fold."""
    order: Tensor
    """[B] int64: the rows, those that fold first, which take longest."""

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return which ring entries are read, written and folded, contiguous, the mask as bytes."""
        fold_mask = self.fold_mask.contiguous().view(torch.uint8)
        return self.ring_read.contiguous(), self.ring_write.contiguous(), fold_mask


@dataclass(frozen=True)
class _Past:
    """What the committed positions hold, gathered for one step; `state` and `d` are fresh."""

    state: Tensor  # [B, HV, V, K] acc
    d: Tensor  # [B, HV, N, V] acc, contiguous
    g: Tensor  # [B, HV, N, Kd] acc
    keys: Tensor  # [B, H, N, K] acc, normalised


@dataclass(frozen=True)
class _Window:
    """The window's vectors: X per node, k and q for the delta rules, q alone for Mamba-2."""

    x: Tensor  # [B, H, X, W, K] acc, normalised, q scaled
    all_keys: Tensor  # [B, H, N + W, K] acc, normalised: the ring's, then the window's
    g: Tensor  # [B, HV, W, Kd] acc
    ancestors: Tensor | None  # [B, W, W] bool; None is a chain


@dataclass(frozen=True)
class _Scores:
    """Weights of checkpoint, ring and window in the read-out of every vector."""

    x: Tensor  # [B, HV, X, W, K]: x_i exp G_i
    ring: Tensor  # [B, HV, X, W, N]
    pair: Tensor  # [B, HV, X, W, W]; zero where j is neither i nor an ancestor of i


def replay_window(
    q: Tensor,  # [B, W, H, K]
    k: Tensor,  # [B, W, H, K]
    v: Tensor,  # [B, W, HV, V]
    beta: Tensor | None,  # [B, W, HV], after the sigmoid; None for Mamba-2
    log_decay: Tensor,  # [B, W, HV, Kd], at most 0
    memory: ReplayMemory,
    indices: ReplayIndices,
    *,
    recurrence: Recurrence,
    l2norm_eps: float | None,
    scale: float,
    ancestors: Tensor | None = None,  # [B, W] int64 bits, i itself included; None is a chain
) -> Tensor:  # [B, W, HV, V] in q's dtype
    """Return the outputs of a window of each row, fold, and put the window into the ring.

    H divides HV; key head h serves value heads h*HV/H to (h+1)*HV/H - 1. With `l2norm_eps`, q and
    k are x * rsqrt(sum(x^2) + eps); q is then multiplied by `scale`. The outputs come from the
    checkpoint as it is at entry and from every valid ring entry, folded or not. Modified in
    place: `fold_rows` of the checkpoint, `ring_write` of the rings. A node comes after its
    ancestors. Accumulates in d_ring's dtype, which is q's promoted to at least float32.
    """
    acc = memory.d_ring.dtype
    num_ring, width = indices.ring_read.shape[1], q.shape[1]
    vectors = _vectors(q, k, memory.k_ring, indices.ring_read, l2norm_eps, scale)
    past = _Past(
        memory.checkpoint.index_select(0, indices.read_rows).to(acc),
        _at(memory.d_ring, indices.ring_read).transpose(1, 2).contiguous(),
        _at(memory.g_ring, indices.ring_read).transpose(1, 2),
        vectors[:, :, :num_ring],
    )
    x = vectors[:, :, num_ring + (width if beta is None else 0) :].unflatten(2, (-1, width))
    window = _Window(
        x,
        vectors[:, :, : num_ring + width],
        log_decay.to(acc).transpose(1, 2),
        None if ancestors is None else unpack(ancestors, width),
    )
    is_per_channel = recurrence is Recurrence.KIMI_DELTA
    scores = _channel_scores(past, window) if is_per_channel else _head_scores(past, window)
    carried = _carried(past, scores)
    d = v.to(acc).transpose(1, 2)  # [B, HV, W, V]
    if beta is not None:
        d = _solve(carried[:, :, 0], scores.pair[:, :, 0], d, beta.to(acc))
    out = _output(carried[:, :, -1], scores.pair[:, :, -1], d)
    _fold(memory.checkpoint, past, indices.fold_mask, indices.fold_rows)
    _write_ring(memory, indices.ring_write, d.transpose(1, 2), k, log_decay)
    return out.transpose(1, 2).to(q.dtype)


def materialize(
    memory: ReplayMemory,
    ring_read: Tensor,  # [B, N] int64 entries from checkpoint_len on
    mask: Tensor,  # [B, N] bool: the prefix wanted
    *,
    read_rows: Tensor,  # [B] int64, the zero row where checkpoint_len is 0
    out_rows: Tensor,  # [B] int64
    l2norm_eps: float | None,
) -> None:
    """Write the state after the masked prefix of the ring into `out_rows` of the checkpoint.

    Serves any position from checkpoint_len to the committed length; the same for the three
    recurrences. Entries outside the mask may hold anything. Only `out_rows` change; a row may be
    its own `out_row`.
    """
    outside = ~mask[:, :, None, None]
    acc = memory.d_ring.dtype
    keys = _at(memory.k_ring, ring_read).masked_fill(outside, 0).transpose(1, 2)
    past = _Past(
        memory.checkpoint.index_select(0, read_rows).to(acc),
        _at(memory.d_ring, ring_read).masked_fill(outside, 0).transpose(1, 2).contiguous(),
        _at(memory.g_ring, ring_read).masked_fill(outside, 0).transpose(1, 2),
        _normalised(keys.to(acc), l2norm_eps),
    )
    _fold(memory.checkpoint, past, mask, out_rows)


def _at(pool: Tensor, index: Tensor) -> Tensor:  # [entries, ...], [B, N] -> [B, N, ...]
    # on CPU index_select takes a quarter of the time of pool[index]
    return pool.index_select(0, index.reshape(-1)).view(*index.shape, *pool.shape[1:])


def _normalised(x: Tensor, l2norm_eps: float | None) -> Tensor:
    if l2norm_eps is None:
        return x
    return x * (x * x).sum(-1, keepdim=True).add_(l2norm_eps).rsqrt_()


def _vectors(
    q: Tensor,
    k: Tensor,
    k_ring: Tensor,
    ring_read: Tensor,
    l2norm_eps: float | None,
    scale: float,
) -> Tensor:  # [B, H, N + 2W, K]: ring keys, window keys, window queries
    """Put all key-space vectors side by side: one normalisation, one product for all scores."""
    parts = (_at(k_ring, ring_read), k, q)
    joined = torch.cat([part.transpose(1, 2) for part in parts], dim=2)
    acc = torch.promote_types(q.dtype, torch.float32)
    vectors = _normalised(joined.to(acc), l2norm_eps)
    # `joined` is fresh, so scaling in place touches nobody's memory
    vectors[:, :, -q.shape[1] :].mul_(scale)
    return vectors


def _head_scores(past: _Past, window: _Window) -> _Scores:
    """Score under one decay per value head: products per key head, then decays."""
    batch, key_heads, num_x, width, key_dim = window.x.shape
    value_heads, num_ring = past.g.shape[1:3]
    grouped = (batch, key_heads, value_heads // key_heads, 1, width)
    cumulative = past.g.cumsum(2)
    node = cumulative[:, :, -1:] + _along_path(window)  # [B, HV, W, 1]
    exponent = node - torch.cat([cumulative, node], 2).transpose(2, 3)  # [B, HV, W, N + W]
    if width > 1:
        exponent[..., num_ring:].masked_fill_(_unrelated(window), NEG_INF)
    products = torch.bmm(
        window.x.reshape(batch * key_heads, num_x * width, key_dim),
        window.all_keys.flatten(0, 1).transpose(1, 2),
    )
    products = products.view(batch, key_heads, 1, num_x, width, -1)
    scores = (products * exponent.exp_().view(*grouped, -1)).flatten(1, 2)
    x = (window.x[:, :, None] * node.exp().view(*grouped, 1)).flatten(1, 2)
    return _Scores(x, scores[..., :num_ring], scores[..., num_ring:])


def _channel_scores(past: _Past, window: _Window) -> _Scores:
    """Score under one decay per key channel.

    Ring terms factor through G_end, exp(G_i - G_end) exp(G_end - G_j), both at most 1. Window
    nodes of a tree have no such common point, so their decays are pairwise.
    """
    group = past.g.shape[1] // window.x.shape[1]
    num_ring, width = past.g.shape[2], window.g.shape[2]
    keys = window.all_keys.repeat_interleave(group, 1)  # [B, HV, N + W, K]
    ring_keys, node_keys = keys[:, :, :num_ring], keys[:, :, num_ring:]
    cumulative = past.g.cumsum(2)
    end = cumulative[:, :, -1:]  # [B, HV, 1, K]
    node = _along_path(window)  # [B, HV, W, K], counted from G_end
    x = window.x.repeat_interleave(group, 1)  # [B, HV, X, W, K]
    since_end = x * node.exp()[:, :, None]
    ring_keys = ring_keys * (end - cumulative).exp()
    ring = since_end.flatten(2, 3) @ ring_keys.transpose(2, 3)
    ring = ring.unflatten(2, (-1, width))
    if width == 1:
        pair = (x * node_keys[:, :, None]).sum(-1, keepdim=True)
    else:
        exponent = node[:, :, :, None] - node[:, :, None]  # [B, HV, W, W, K]
        exponent = exponent.masked_fill_(_unrelated(window)[..., None], NEG_INF)
        decayed = exponent.exp_() * node_keys[:, :, None]
        pair = (decayed @ x.permute(0, 1, 3, 4, 2)).permute(0, 1, 4, 2, 3)
    return _Scores(since_end * end.exp()[:, :, None], ring, pair)


def _along_path(window: _Window) -> Tensor:  # [B, HV, W, Kd]
    """Sum the log decay of every node and its ancestors within the window."""
    if window.ancestors is not None:
        return window.ancestors[:, None].to(window.g.dtype) @ window.g
    return window.g if window.g.shape[2] == 1 else window.g.cumsum(2)


def _unrelated(window: _Window) -> Tensor:  # [B or 1, 1, W, W] bool
    """Return where j is neither i nor an ancestor of i."""
    if window.ancestors is not None:
        return ~window.ancestors[:, None]
    width = window.g.shape[2]
    ones = torch.ones(1, 1, width, width, dtype=torch.bool, device=window.g.device)
    return ones.triu(1)


def _carried(past: _Past, scores: _Scores) -> Tensor:  # [B, HV, X, W, V]
    """Read every vector out of checkpoint and ring."""
    lead = scores.x.shape[:4]
    state, d = past.state.flatten(0, 1), past.d.flatten(0, 1)
    num_heads = state.shape[0]
    carried = torch.bmm(scores.x.reshape(num_heads, -1, state.shape[2]), state.transpose(1, 2))
    carried.baddbmm_(scores.ring.flatten(0, 1).flatten(1, 2), d)
    return carried.view(*lead, -1)


def _solve(
    carried: Tensor,  # [B, HV, W, V]
    pair: Tensor,  # [B, HV, W, W]
    v: Tensor,  # [B, HV, W, V]
    beta: Tensor,  # [B, W, HV]
) -> Tensor:  # [B, HV, W, V]
    """Return d of the delta rules: a unit lower-triangular solve over the window."""
    beta = beta.transpose(1, 2)[..., None]
    right = (v - carried).mul_(beta)
    if right.shape[2] == 1:
        return right
    # neither the diagonal nor what lies above it is read
    system = beta * pair
    d: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return d


def _output(carried: Tensor, pair: Tensor, d: Tensor) -> Tensor:  # [B, HV, W, V]
    if d.shape[2] == 1:
        return torch.addcmul(carried, pair, d)
    return carried + pair @ d


def _fold(checkpoint: Tensor, past: _Past, mask: Tensor, out_rows: Tensor) -> None:
    """Write S_0 exp(G_fold) + sum_mask d_j (k_j exp(G_fold - G_j))^T; uses up `past.state`."""
    batch, key_heads, num_ring, key_dim = past.keys.shape
    value_heads = past.d.shape[1]
    outside = ~mask[:, None, :, None]
    g = past.g.masked_fill(outside, 0)
    total = g.sum(2, keepdim=True)  # [B, HV, 1, Kd]
    weight = (total - g.cumsum(2)).masked_fill_(outside, NEG_INF).exp_()
    weight = weight.reshape(batch, key_heads, -1, num_ring, weight.shape[3])
    keys = (past.keys[:, :, None] * weight).reshape(batch * value_heads, num_ring, key_dim)
    past.state.mul_(total.exp_())
    past.state.flatten(0, 1).baddbmm_(past.d.flatten(0, 1).transpose(1, 2), keys)
    checkpoint.index_copy_(0, out_rows, past.state.to(checkpoint.dtype))


def _write_ring(
    memory: ReplayMemory, ring_write: Tensor, d: Tensor, k: Tensor, log_decay: Tensor
) -> None:
    entries = ring_write.reshape(-1)
    for ring, value in ((memory.d_ring, d), (memory.k_ring, k), (memory.g_ring, log_decay)):
        ring.index_copy_(0, entries, value.reshape(-1, *ring.shape[1:]).to(ring.dtype))
