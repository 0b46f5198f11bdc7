"""What results are held against: transformers' logits, and the chain of sampling in plain numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gapless.ops.sampling import gumbel_noise
from tests.models.reference import logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless import SamplingParams
    from gapless.core.messages import GenerationResult, TokenLogprob


class Oracle:
    """A transformers model, run once over each text."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float64) -> None:
        self._model = model
        self._dtype = dtype
        self._found: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits [T, V] after each token, as float64."""
        key = tuple(ids)
        if key not in self._found:
            found = logits(self._model, torch.tensor([key]), self._dtype)[0]
            self._found[key] = found.double().numpy()
        return self._found[key]

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """Natural log-probabilities [T, V] of what follows each token."""
        z = self.logits(ids)
        z = z - z.max(axis=1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=1, keepdims=True))

    def check_logprobs(
        self, result: GenerationResult, params: SamplingParams, tolerance: float
    ) -> None:
        """Compare all log-probabilities of a result, those of its prompt included."""
        prompt = result.prompt_token_ids
        for completion in result.completions:
            rows = self.logprobs(prompt + completion.token_ids)[len(prompt) - 1 :]
            if params.logprobs is None:
                assert completion.logprobs is None
            else:
                assert completion.logprobs is not None
                assert len(completion.logprobs) == len(completion.token_ids)
                for token_id, entry, row in zip(
                    completion.token_ids, completion.logprobs, rows, strict=False
                ):
                    check_entry(entry, token_id, row, params.logprobs, tolerance)
        if params.prompt_logprobs is None:
            assert result.prompt_logprobs is None
            return
        assert result.prompt_logprobs is not None
        first, *others = result.prompt_logprobs
        assert first is None
        assert len(others) == len(prompt) - 1
        for token_id, entry, row in zip(
            prompt[1:], others, self.logprobs(prompt + result.token_ids), strict=False
        ):
            assert entry is not None
            check_entry(entry, token_id, row, params.prompt_logprobs, tolerance)

    def check_tokens(
        self, result: GenerationResult, params: SamplingParams, stop_ids: Sequence[int] = ()
    ) -> None:
        """Choose every token of a seeded or greedy result again, given those before it."""
        prompt, output = result.prompt_token_ids, result.token_ids
        rows = self.logits(prompt + output)[len(prompt) - 1 :]
        for count, (token_id, row) in enumerate(zip(output, rows, strict=False)):
            stops = list(stop_ids) if count < params.min_tokens else []
            wanted = choose(row, params, prompt, output[:count], stops)
            assert token_id == wanted, f"token {count} is {token_id}, want {wanted}"


def check_entry(
    entry: TokenLogprob, token_id: int, row: np.ndarray, num_top: int, tolerance: float
) -> None:
    """Compare one entry with the log-probabilities [V] that it speaks of."""
    assert entry.token_id == token_id
    assert abs(entry.logprob - row[token_id]) < tolerance
    assert len(entry.top) == num_top
    ids = [top_id for top_id, _ in entry.top]
    assert len(set(ids)) == num_top
    values = np.array([value for _, value in entry.top])
    np.testing.assert_allclose(values, row[ids], atol=tolerance, rtol=0)
    np.testing.assert_allclose(values, np.sort(row)[::-1][:num_top], atol=tolerance, rtol=0)
    assert (np.diff(values) <= 0).all()


def choose(
    row: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stops: Sequence[int],
) -> int:
    """Choose from logits [V]: bias, penalties, stop ids, temperature, filters, noise."""
    z = edited(row, params, prompt, output)
    z[list(stops)] = -np.inf
    if params.temperature == 0:
        return int(z.argmax())
    z = z / np.float64(np.float32(params.temperature))
    z = np.where(z >= threshold(z, params), z, -np.inf)
    assert params.seed is not None
    position = torch.tensor([len(prompt) + len(output)])
    noise = gumbel_noise(torch.tensor([params.seed]), position, len(z))[0]
    return int((z + noise.double().numpy()).argmax())


def edited(
    row: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Bias and penalties, one after the other."""
    z = row.copy()
    for token_id, value in (params.logit_bias or {}).items():
        z[token_id] += np.float32(value)
    seen = sorted({*prompt, *output})
    factor = np.float64(np.float32(params.repetition_penalty))
    z[seen] = np.where(z[seen] > 0, z[seen] / factor, z[seen] * factor)
    counts = np.bincount(np.array(output, np.int64), minlength=len(z))
    z -= np.float64(np.float32(params.frequency_penalty)) * counts
    z -= np.float64(np.float32(params.presence_penalty)) * (counts > 0)
    return z


def threshold(z: np.ndarray, params: SamplingParams) -> float:
    """The least of the scaled logits [V] that all filters keep."""
    descending = np.sort(z)[::-1]
    least = descending[min(params.top_k, len(z)) - 1] if params.top_k > 0 else -np.inf
    shares = np.exp(descending - descending[0]) * (descending >= least)
    shares /= shares.sum()
    if params.top_p < 1:
        num_kept = int((np.cumsum(shares) - shares < np.float32(params.top_p)).sum())
        least = max(least, descending[max(num_kept, 1) - 1])
    if params.min_p > 0:
        least = max(least, descending[0] + np.log(np.float64(np.float32(params.min_p))))
    return float(least)
