"""The choice of a token's experts; definition in `reference.py`, launch in `triton.py`."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.moe.arithmetic import NO_EXPERT


@triton.jit
def _route_kernel(
    logits,
    bias,
    weights,
    experts,
    stride_token,
    scale,
    sum_eps,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,  # that experts may be chosen from
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_BIASED_SIGMOID: tl.constexpr,  # else a softmax
    HAS_RENORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Choose a token's experts, and store them in ascending order."""
    await_inputs(CHAINED)
    i_token = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, BLOCK_G)
    o_i = tl.arange(0, BLOCK_E)[None, :]
    m_e = (o_g < GROUPS)[:, None] & (o_i < GROUP_SIZE)
    o_e = tl.where(m_e, o_g[:, None] * GROUP_SIZE + o_i, NO_EXPERT)
    p_logit = logits + i_token * stride_token + o_e
    b_logit = tl.load(p_logit, mask=m_e, other=float("-inf")).to(tl.float32)
    if IS_BIASED_SIGMOID:
        b_score = 1.0 / (1.0 + tl.exp(-b_logit))
        b_left = b_score + tl.load(bias + o_e, mask=m_e, other=0.0)
    else:
        b_score = tl.exp(b_logit - tl.max(b_logit))
        b_score /= tl.sum(b_score)
        b_left = b_score
    # what is NaN comes after all scores, then closed groups, then what is chosen or no expert
    b_left = tl.where(b_left > -1e36, b_left, -1e37)
    b_left = tl.where(m_e, b_left, float("-inf"))
    if OPEN_GROUPS < GROUPS:
        b_worth = tl.max(b_left, axis=1)
        if IS_BIASED_SIGMOID:
            is_best = b_left == b_worth[:, None]
            best = tl.min(tl.where(is_best, o_e, NO_EXPERT), axis=1)[:, None]
            b_worth += tl.max(tl.where(o_e == best, float("-inf"), b_left), axis=1)
        b_is_open = o_g < 0
        for _ in range(OPEN_GROUPS):
            most = tl.max(b_worth)
            group = tl.min(tl.where(b_worth == most, o_g, GROUPS))
            b_is_open |= o_g == group
            b_worth = tl.where(o_g == group, float("-inf"), b_worth)
        b_left = tl.where(m_e & (b_is_open == 0)[:, None], -1e38, b_left)
    for _ in range(K):
        most = tl.max(b_left)
        expert = tl.min(tl.where(b_left == most, o_e, NO_EXPERT))
        b_left = tl.where(o_e == expert, float("-inf"), b_left)
    m_chosen = m_e & (b_left == float("-inf"))
    b_count = m_chosen.to(tl.int32)
    b_place = tl.cumsum(b_count, axis=1) - 1
    if GROUPS > 1:
        is_before = o_g[None, :] < o_g[:, None]
        b_before = tl.where(is_before, tl.sum(b_count, axis=1)[None, :], 0)
        b_place += tl.sum(b_before, axis=1)[:, None]
    b_weight = tl.where(m_chosen, b_score, 0.0)
    if HAS_RENORM:
        b_weight /= tl.sum(b_weight) + sum_eps
    tl.store(weights + i_token * K + b_place, b_weight * scale, mask=m_chosen)
    tl.store(experts + i_token * K + b_place, o_e.to(tl.int64), mask=m_chosen)
