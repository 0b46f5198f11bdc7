"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gapless.errors import InvalidRequest

# stop ids a request may carry, end-of-text ids included: the width of the slot table's column
MAX_STOP_IDS = 8


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping options of a request; names and meanings as in vLLM and SGLang.

    Raises:
        InvalidRequest: a value is out of its range or not finite.
    """

    max_tokens: int | None = 256
    """Most tokens to generate; None fills the context."""
    min_tokens: int = 0
    """Tokens to generate before any stop condition is honoured."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k largest logits; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this much probability."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability."""
    seed: int | None = None
    """Makes the noise reproducible; None draws a fresh seed."""
    n: int = 1
    """Completions per prompt, each with a seed of its own."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, beside the model's own."""
    ignore_eos: bool = False
    """Generate past the model's own end-of-text ids."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_is_open=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_integer("top_k", self.top_k, low=-1)
        _check_integer("min_tokens", self.min_tokens, low=0)
        _check_integer("n", self.n, low=1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, low=1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                    "lower the one or raise the other"
                )
        if self.seed is not None:
            _check_integer("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest(
                f"stop={self.stop!r}: want non-empty strings; leave empty ones out"
            )
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, low=0)
        if len(set(self.stop_token_ids)) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {len(set(self.stop_token_ids))} ids, at most {MAX_STOP_IDS} "
                "are held; pass fewer, or use stop strings"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _check_number(
    name: str, value: object, *, low: float, high: float = math.inf, low_is_open: bool = False
) -> None:
    wanted = f"a finite number {'above' if low_is_open else 'of at least'} {low}" + (
        f" and at most {high}" if high < math.inf else ""
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name}={value!r}: want {wanted}")
    if value < low or value > high or (low_is_open and value == low):
        raise InvalidRequest(f"{name}={value!r}: want {wanted}")


def _check_integer(name: str, value: object, *, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name}={value!r}: want an integer from {low} to {high}")
