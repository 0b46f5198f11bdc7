"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# ruff: noqa: TC001 (annotations are read at run time)
from gapless.core.grammar import Grammar
from gapless.errors import InvalidRequest

# stop ids a request may carry, end-of-text ids included: the width of the slot table's column
MAX_STOP_IDS = 8
# entries of a request's logit bias: the width of the slot table's column
MAX_LOGIT_BIAS = 64
# most likely tokens that may be asked for at a position
MAX_LOGPROBS = 20


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
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or output, and multiplies negative ones."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it is in the output; -2 to 2."""
    presence_penalty: float = 0.0
    """Taken from a token's logit if it is in the output; -2 to 2."""
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these token ids before all else; -100 to 100, 64 ids at most."""
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
    logprobs: int | None = None
    """Return each token's natural log-probability under the model alone, before bias, penalties,
    temperature and filters, and those of this many most likely tokens, at most 20."""
    prompt_logprobs: int | None = None
    """The same for each prompt token after the first."""
    grammar: Grammar | None = None
    """What the whole output must follow, such as `Grammar.json_schema(...)`; it ends where that is
    complete. Needs xgrammar, of the extra `grammar`."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_is_open=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_number(
            "repetition_penalty", self.repetition_penalty, low=0.0, high=1e6, low_is_open=True
        )
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        self._set_logit_bias()
        for name, asked in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if asked is not None:
                _check_integer(name, asked, low=0, high=MAX_LOGPROBS)
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
        if self.grammar is not None and self.min_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} with a grammar, which alone decides where its text "
                "may end; leave out one of them"
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

    @property
    def has_filters(self) -> bool:
        """Whether a draw is from some of the tokens only."""
        filters = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return filters and not self.is_greedy

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens weigh on later ones."""
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties != (1.0, 0.0, 0.0)

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before temperature and filters."""
        return bool(self.logit_bias or self.min_tokens or self.has_penalties)

    def _set_logit_bias(self) -> None:
        """Check the bias, and keep a copy of it."""
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias={self.logit_bias!r}: want a mapping of token ids to numbers"
            )
        bias = dict(self.logit_bias)
        for token_id, value in bias.items():
            _check_integer("logit_bias", token_id, low=0)
            _check_number(f"logit_bias[{token_id}]", value, low=-100.0, high=100.0)
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias has {len(bias)} ids, at most {MAX_LOGIT_BIAS} are held; keep the "
                "largest ones"
            )
        object.__setattr__(self, "logit_bias", bias)


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
