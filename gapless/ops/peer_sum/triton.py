"""`reference.peer_sum` and `peer_gather` in one launch on each rank, the same bits on all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from gapless.ops.peer_sum.kernels import _peer_gather_kernel, _peer_sum_kernel
from gapless.ops.peer_sum.reference import PROGRAM_WORDS, WORD_BYTES, is_gathered, is_served

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.peer_sum.reference import Mailboxes

# polls, of about a microsecond, between two looks whether waiting is of no use
POLLS_PER_LOOK = 1024
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def peer_sum(
    x: Tensor,  # a message that `is_served`
    mailboxes: Mailboxes,
) -> Tensor:  # new, of the same shape and dtype
    """Return the sum of all ranks' `x`; every rank makes the same calls in one stream, in order.

    Once `is_stopped` is set, a call whose terms do not come ends with anything as its result.
    """
    assert is_served(x, mailboxes.capacity), "the message goes into the mailboxes"
    out = torch.empty_like(x)
    words = x.view(-1).view(torch.int32)
    num_words = words.numel()
    _peer_sum_kernel[(triton.cdiv(num_words, PROGRAM_WORDS),)](
        words,
        out.view(-1).view(torch.int32),
        mailboxes.addresses,
        mailboxes.num_calls,
        mailboxes.is_stopped,
        num_words,
        DTYPE=_DTYPES[x.dtype],
        **_settings(mailboxes),
    )
    return out


def peer_gather(
    x: Tensor,  # [N, C], a message that `is_gathered`
    mailboxes: Mailboxes,
) -> Tensor:  # [N, world_size * C], new
    """Return all ranks' `x` side by side; every rank makes the same calls in one stream, in order.

    Once `is_stopped` is set, a call whose parts do not come ends with anything as its result.
    """
    assert is_gathered(x, mailboxes.capacity), "the message goes into the mailboxes"
    num_rows, num_columns = x.shape
    out = x.new_empty(num_rows, mailboxes.world_size * num_columns)
    words = x.view(-1).view(torch.int32)
    num_words = words.numel()
    _peer_gather_kernel[(triton.cdiv(num_words, PROGRAM_WORDS),)](
        words,
        out.view(-1).view(torch.int32),
        mailboxes.addresses,
        mailboxes.num_calls,
        mailboxes.is_stopped,
        num_words,
        num_columns * x.element_size() // WORD_BYTES,
        **_settings(mailboxes),
    )
    return out


def _settings(mailboxes: Mailboxes) -> dict[str, Any]:
    return {
        "RANK": mailboxes.rank,
        "WORLD": mailboxes.world_size,
        "CAPACITY": mailboxes.capacity,
        "BLOCK": PROGRAM_WORDS,
        "POLLS": POLLS_PER_LOOK,
        "num_warps": 4,
    }
