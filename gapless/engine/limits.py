"""What a model accepts of a prompt: checked where requests come in, before they reach a queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.core.sampling_params import MAX_STOP_IDS, SamplingParams
from gapless.errors import ContextTooLong, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class PromptLimits:
    """Bounds of one model."""

    vocab_size: int
    max_model_len: int
    """Most tokens of a request, prompt and output."""
    eos_ids: tuple[int, ...]
    """The model's own end-of-text ids."""

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise if a prompt with these parameters cannot be served.

        Raises:
            InvalidRequest: empty prompt, a token id outside the vocabulary, too many stop ids, or
                none to end a grammar's text.
            ContextTooLong: the prompt leaves no room for a token of output.
        """
        if not prompt_ids:
            raise InvalidRequest("the prompt has no tokens; want at least one: write something")
        self.check_length(len(prompt_ids))
        self.check_ids("prompt", prompt_ids)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", params.logit_bias or ())
        self.stop_ids(params)
        if params.grammar is not None and not (self.eos_ids or params.stop_token_ids):
            raise InvalidRequest(
                "the model has no end-of-text id, which a grammar needs to end its text; pass "
                "stop_token_ids"
            )

    def check_length(self, num_tokens: int) -> None:
        """Raise `ContextTooLong` if prompts of this length leave no room for output."""
        if num_tokens >= self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {num_tokens} tokens and the context holds "
                f"{self.max_model_len}, one of them for output; this model's maximum context "
                f"length is {self.max_model_len} tokens: shorten the prompt"
            )

    def check_ids(self, name: str, ids: Iterable[int]) -> None:
        """Raise `InvalidRequest` if `name` holds what is no token id of this model."""
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequest(f"{name} holds {token_id!r}; want integer token ids")
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"{name} holds token id {token_id}; want 0 to {self.vocab_size - 1}: "
                    "tokenize with this model's tokenizer"
                )

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Ids that end a request with these parameters: its own, and the model's unless ignored.

        Raises:
            InvalidRequest: they are too many together.
        """
        own = () if params.ignore_eos else self.eos_ids
        ids = tuple(dict.fromkeys((*params.stop_token_ids, *own)))
        if len(ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"{len(ids)} stop ids with the model's own {list(own)}, at most {MAX_STOP_IDS} are "
                "held; pass fewer stop_token_ids, or use stop strings"
            )
        return ids
