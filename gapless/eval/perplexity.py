"""Perplexity on documents: the first tokens of each, every token given all before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.engine.llm import LLM
    from gapless.eval.data import DocumentSet


@dataclass(frozen=True)
class DocumentScore:
    """What one document cost."""

    num_tokens: int
    """Tokens predicted: all but the first."""
    nats: float
    """Sum of -log p over them."""


@dataclass(frozen=True)
class Perplexity:
    """All documents of one set."""

    name: str
    scores: tuple[DocumentScore, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens predicted."""
        return sum(score.num_tokens for score in self.scores)

    @property
    def nats_per_token(self) -> float:
        """Mean of -log p over all tokens of all documents."""
        return math.fsum(score.nats for score in self.scores) / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp of the nats per token; infinite where that overflows."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf


def encode_documents(llm: LLM, documents: DocumentSet, *, max_tokens: int) -> list[list[int]]:
    """Return the first `max_tokens` token ids of each document.

    Raises:
        InvalidRequest: no document has 2 tokens, so that there is nothing to predict.
    """
    encoded = [llm.encode(document.text)[:max_tokens] for document in documents.documents]
    if all(len(ids) < 2 for ids in encoded):
        raise InvalidRequest(
            f"no text of {documents.name} has 2 tokens, so none to predict; want longer ones"
        )
    return encoded


def measure_perplexity(
    llm: LLM, documents: DocumentSet, encoded: Sequence[list[int]]
) -> Perplexity:
    """Score documents that `encode_documents` made token ids of.

    Raises:
        RequestError: a document does not fit the context.
    """
    return perplexity_of(documents, llm.score(encoded))


def perplexity_of(documents: DocumentSet, logprobs: Sequence[Sequence[float]]) -> Perplexity:
    """Sum up log-probabilities, natural, of the tokens of each document."""
    scores = tuple(DocumentScore(len(own), -math.fsum(own)) for own in logprobs)
    return Perplexity(documents.name, scores)
