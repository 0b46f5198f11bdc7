"""Chunked prefill of the linear layers: packed segments, each from its own initial state.

The definition, and the CPU path. The recurrences are those of `ops/linear_replay/reference.py`.
Within a chunk that starts in state S [V, K], with G_i the log decay summed over the chunk's tokens
up to i and pair(x)_ij = sum_c x_ic exp(G_i - G_j)_c k_jc for j <= i:

    T = (I + Diag(beta) strict(pair(k)))^-1
    d = T Diag(beta) v - T Diag(beta) (k exp G) S^T     (Mamba-2: d = v)
    o = (q exp G) S^T + pair(q) d
    S <- S Diag(exp G_end) + d^T (k exp(G_end - G))

(Yang et al. 2024, "Gated Delta Networks", section 3.3; the UT transform of "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", section 3.2.) All but the products with S
is computed for all chunks at once. A padded place has zero q, k, v, beta and log decay: it adds
nothing and decays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.core.specs.linear import Recurrence

if TYPE_CHECKING:
    from torch import Tensor

NEG_INF = float("-inf")


@dataclass(frozen=True)
class RoundIndices:
    """Where packed tokens lie in chunks (`plan_chunks`), and each segment's state rows."""

    gather: Tensor
    """[C, chunk] int64: packed token of every place; T for padding."""
    scatter: Tensor
    """[T] int64: place in the flattened chunks of every packed token, any one for padding."""
    active: tuple[int, ...]
    """Segments still running in round j; the chunks are ordered by (round, segment)."""
    init_rows: Tensor
    """[S] int64: checkpoint row to start from, in the plan's order; the zero row: fresh."""
    final_rows: Tensor
    """[S] int64: checkpoint row to write, in the same order."""
    num_cuts: tuple[int, ...]
    """States to store after round j."""
    cut_places: Tensor
    """[N] int64: segments, as numbered in that order, whose state to store, round by round."""
    cut_rows: Tensor
    """[N] int64: checkpoint row of each."""


@dataclass(frozen=True)
class _Chunks:
    """Inputs by chunk, in acc dtype; q and k repeated to the value heads."""

    q: Tensor  # [C, HV, chunk, K] scaled
    k: Tensor  # [C, HV, chunk, K]
    v: Tensor  # [C, HV, chunk, V]
    beta: Tensor | None  # [C, HV, chunk, 1]
    g: Tensor  # [C, HV, chunk, Kd] log decay summed from the chunk's start


@dataclass(frozen=True)
class _Terms:
    """What the loop over rounds needs, M = C HV matrices each."""

    free: Tensor  # [M, chunk, V]: d as it would be with S = 0
    queries: Tensor  # [M, Z, K]: T beta (k exp G), then q exp G; the latter alone for Mamba-2
    keys: Tensor  # [M, chunk, K]: k exp(G_end - G)
    decay: Tensor  # [M, 1, 1 or K]: exp G_end
    pair_q: Tensor  # [M, chunk, chunk]


def chunk_prefill(
    q: Tensor,  # [T, H, K], normalised where the layer does that
    k: Tensor,  # [T, H, K], likewise
    v: Tensor,  # [T, HV, V]
    beta: Tensor | None,  # [T, HV], after the sigmoid; None for Mamba-2
    log_decay: Tensor,  # [T, HV, Kd], at most 0; Kd is 1 or K
    checkpoint: Tensor,  # [rows, HV, V, K] state dtype
    indices: RoundIndices,
    *,
    recurrence: Recurrence,
    scale: float,
) -> Tensor:  # [T, HV, V] in q's dtype
    """Return the outputs of all packed tokens; write states at the cuts and each final state.

    q is multiplied by `scale`. Modified in place: `cut_rows` and `final_rows` of the checkpoint,
    once all `init_rows` are read. Accumulates in q's dtype promoted to at least float32.
    """
    chunks = _chunked(q, k, v, beta, log_decay, indices.gather, scale)
    terms = _terms(chunks, is_per_channel=recurrence is Recurrence.KIMI_DELTA)
    states = checkpoint.index_select(0, indices.init_rows).to(chunks.q.dtype)
    d, out = _run_rounds(terms, states, checkpoint, indices)
    checkpoint.index_copy_(0, indices.final_rows, states.to(checkpoint.dtype))
    out.baddbmm_(terms.pair_q, d)
    places = out.view(chunks.v.shape).transpose(1, 2).flatten(0, 1)  # [C chunk, HV, V]
    return places.index_select(0, indices.scatter).to(q.dtype)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor,
    gather: Tensor,
    scale: float,
) -> _Chunks:
    acc = torch.promote_types(q.dtype, torch.float32)
    group = v.shape[1] // q.shape[1]
    vectors = _laid_out(torch.stack([k, q], 1).to(acc), gather)  # [C, chunk, 2, H, K]
    vectors = vectors.repeat_interleave(group, 3).permute(2, 0, 3, 1, 4)
    return _Chunks(
        q=vectors[1] * scale,
        k=vectors[0].contiguous(),
        v=_laid_out(v.to(acc), gather).transpose(1, 2),
        beta=None if beta is None else _laid_out(beta.to(acc), gather).transpose(1, 2)[..., None],
        g=_laid_out(log_decay.to(acc), gather).transpose(1, 2).cumsum(2),
    )


def _laid_out(x: Tensor, gather: Tensor) -> Tensor:  # [T, ...], [C, chunk] -> [C, chunk, ...]
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded.index_select(0, gather.reshape(-1)).view(*gather.shape, *x.shape[1:])


def _terms(chunks: _Chunks, *, is_per_channel: bool) -> _Terms:
    pair_k, pair_q = (_channel_pairs if is_per_channel else _head_pairs)(chunks)
    end = chunks.g[:, :, -1:]
    decay = chunks.g.exp()
    queries = chunks.q * decay
    free = chunks.v
    if chunks.beta is not None:
        value_dim = chunks.v.shape[3]
        right = torch.cat([chunks.v, chunks.k * decay], -1) * chunks.beta
        # neither the diagonal nor what lies above it is read
        system = chunks.beta * pair_k
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        free = solved[..., :value_dim]
        queries = torch.cat([solved[..., value_dim:], queries], 2)
    return _Terms(
        free=free.flatten(0, 1),
        queries=queries.flatten(0, 1),
        keys=(chunks.k * (end - chunks.g).exp()).flatten(0, 1),
        decay=end.exp().flatten(0, 1),
        pair_q=pair_q.flatten(0, 1),
    )


def _later(size: int, device: torch.device) -> Tensor:  # [chunk, chunk] bool: j > i
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def _head_pairs(chunks: _Chunks) -> tuple[Tensor, Tensor]:  # [C, HV, chunk, chunk] each
    """Return pair(k) and pair(q) under one decay per value head."""
    exponent = chunks.g - chunks.g.transpose(2, 3)
    exponent.masked_fill_(_later(exponent.shape[-1], exponent.device), NEG_INF)
    decay = exponent.exp_()
    keys = chunks.k.transpose(2, 3)
    return (chunks.k @ keys).mul_(decay), (chunks.q @ keys).mul_(decay)


def _channel_pairs(chunks: _Chunks) -> tuple[Tensor, Tensor]:  # [C, HV, chunk, chunk] each
    """Return pair(k) and pair(q) under one decay per key channel, pairwise: chunk^2 K exponents."""
    exponent = chunks.g[:, :, :, None] - chunks.g[:, :, None]
    exponent.masked_fill_(_later(exponent.shape[2], exponent.device)[..., None], NEG_INF)
    decayed = exponent.exp_().mul_(chunks.k[:, :, None])
    both = decayed @ torch.stack([chunks.k, chunks.q], -1)  # [C, HV, chunk, chunk, 2]
    return both[..., 0], both[..., 1]


def _run_rounds(
    terms: _Terms,
    states: Tensor,  # [S, HV, V, K]
    checkpoint: Tensor,
    indices: RoundIndices,
) -> tuple[Tensor, Tensor]:  # d and (q exp G) S^T, [M, chunk, V] each
    """Carry the states through their chunks, in place, and store them at the cuts."""
    num_heads = states.shape[1]
    running = states.flatten(0, 1)
    size, num_queries = terms.free.shape[1], terms.queries.shape[1]
    has_delta = num_queries > size
    parts: list[tuple[Tensor, Tensor]] = []
    start, first_cut = 0, 0
    for num_active, num_cuts in zip(indices.active, indices.num_cuts, strict=True):
        stop = start + num_active * num_heads
        state = running[: stop - start]
        read = torch.bmm(terms.queries[start:stop], state.transpose(1, 2))
        d = terms.free[start:stop]
        if has_delta:
            d = d - read[:, :size]
        state.mul_(terms.decay[start:stop]).baddbmm_(d.transpose(1, 2), terms.keys[start:stop])
        parts.append((d, read[:, num_queries - size :]))
        start = stop
        if num_cuts:
            cuts = slice(first_cut, first_cut + num_cuts)
            wanted = states.index_select(0, indices.cut_places[cuts])
            checkpoint.index_copy_(0, indices.cut_rows[cuts], wanted.to(checkpoint.dtype))
            first_cut += num_cuts
    return torch.cat([d for d, _ in parts]), torch.cat([read for _, read in parts])
