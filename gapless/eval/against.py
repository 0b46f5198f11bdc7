"""A second run of the same sets by another implementation, with the same token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gapless.eval.accuracy import Accuracy, compare_transcripts, grade

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.engine.llm import LLM
    from gapless.eval.data import ProblemSet

# prompts that the peer continues at once
_BATCH_SIZE = 32


class Peer(Protocol):
    """Another implementation of the model, greedy."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Continue prompts in one batch, up to and with the first stop id of each."""
        ...

    def margin(self, prompt: Sequence[int]) -> float:
        """Difference between the two largest logits after `prompt`."""
        ...


@dataclass(frozen=True)
class Parting:
    """Where the two transcripts of one problem part."""

    problem: int
    """Index in the set."""
    position: int
    """Index of the first generated token that differs, or that only one side has."""
    token_id: int | None
    """The engine's token there; None past its end."""
    peer_token_id: int | None
    margin: float
    """The peer's two largest logits are this far apart there: rounding flips close ones."""


def peer_accuracy(
    llm: LLM, peer: Peer, problems: ProblemSet, own: Accuracy, *, max_tokens: int
) -> Accuracy:
    """Let the peer continue the prompts of `own`, in batches of similar length."""
    prompts = [attempt.prompt_token_ids for attempt in own.attempts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    token_ids: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), _BATCH_SIZE):
        chunk = order[start : start + _BATCH_SIZE]
        for i, ids in zip(
            chunk, peer.generate([prompts[i] for i in chunk], max_tokens), strict=True
        ):
            # the engine ends a transcript where the context does
            token_ids[i] = ids[: llm.engine.config.max_model_len - len(prompts[i])]
    decode = llm.engine.tokenizer.decode
    texts = [decode(ids, skip_special_tokens=True) for ids in token_ids]
    return grade(problems, prompts, token_ids, texts)


def partings(peer: Peer, own: Accuracy, other: Accuracy) -> tuple[Parting, ...]:
    """Return where the peer's run `other` generated other tokens than `own`."""
    found = []
    for difference in compare_transcripts(own, other):
        attempt = other.attempts[difference.problem]
        before = (*attempt.prompt_token_ids, *attempt.token_ids[: difference.position])
        found.append(
            Parting(
                difference.problem,
                difference.position,
                *difference.token_ids,
                margin=peer.margin(before),
            )
        )
    return tuple(found)
