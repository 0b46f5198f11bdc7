"""The same checkpoint run by `transformers`, to compare with: greedy batches and scores.

Not used for serving. `transformers` is imported here only, when a peer is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from gapless.assets import demo_checkpoint
from gapless.config.hf import read_hf_config
from gapless.errors import BackendUnavailable, ConfigError
from gapless.models.checkpoint import resolve_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gapless.config.options import EngineOptions
    from gapless.engine.llm import LLM

# fills short prompts on the left; any id does, since the attention mask leaves it out
_PAD_ID = 0


class TransformersPeer:
    """A causal language model of `transformers` that stops at `stop_ids`, and only there."""

    name = "transformers"

    def __init__(
        self, checkpoint: Path, *, device: str, dtype: str, stop_ids: Sequence[int]
    ) -> None:
        """Load `checkpoint`, weights converted to `dtype`.

        Raises:
            BackendUnavailable: transformers is not installed.
        """
        transformers = _import_transformers()
        self.version: str = transformers.__version__
        self._stop_ids = frozenset(stop_ids)
        self._device = torch.device(device)
        transformers.utils.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=vars(torch)[dtype]
        )
        self._model.eval().to(self._device)
        # replaces what the checkpoint says of sampling: the comparison is greedy
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, pad_token_id=_PAD_ID, eos_token_id=sorted(self._stop_ids) or None
        )

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Continue prompts greedily in one left-padded batch.

        Returns: per prompt at most `max_tokens` tokens, up to and with the first stop id.
        """
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), _PAD_ID)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        output = self._model.generate(
            ids.to(self._device), attention_mask=mask.to(self._device), max_new_tokens=max_tokens
        )
        return [self._until_stop(row) for row in output[:, longest:].tolist()]

    @torch.inference_mode()
    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural log-probability of each token of each prompt given those before it."""
        scores = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self._device)
            logprobs = self._logits(ids)[:-1].log_softmax(-1)
            scores.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return scores

    @torch.inference_mode()
    def margin(self, prompt: Sequence[int]) -> float:
        """Difference between the two largest logits after `prompt`."""
        top = self._logits(torch.tensor([prompt], device=self._device))[-1].topk(2).values
        return float(top[0] - top[1])

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of one prompt `[1, T]`, as `[T, vocabulary]` in at least float32."""
        logits: torch.Tensor = self._model(ids, use_cache=False).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _until_stop(self, ids: list[int]) -> list[int]:
        ends = [i for i, token_id in enumerate(ids, start=1) if token_id in self._stop_ids]
        return ids[: ends[0]] if ends else ids


def make_peer(options: EngineOptions, llm: LLM, *, ignores_eos: bool = False) -> TransformersPeer:
    """Load the checkpoint that `llm` was made from, on its device and in its dtype.

    With `ignores_eos` it generates as many tokens as it is asked for.

    Raises:
        BackendUnavailable: transformers is not installed.
        ConfigError: the weights of `llm` are made up.
    """
    if options.load_format == "dummy":
        raise ConfigError(
            "load_format=dummy makes weights up, and transformers would make up others; compare "
            "with --load-format safetensors"
        )
    _import_transformers()
    if options.model is None:
        checkpoint = demo_checkpoint()
    else:
        checkpoint = resolve_checkpoint(options.model, revision=options.revision)
    stop_ids = set(read_hf_config(checkpoint).eos_token_ids)
    if llm.engine.tokenizer.eos_id is not None:
        stop_ids.add(llm.engine.tokenizer.eos_id)
    config = llm.engine.config
    return TransformersPeer(
        checkpoint,
        device=config.device,
        dtype=config.dtype,
        stop_ids=() if ignores_eos else sorted(stop_ids),
    )


def check_peer() -> None:
    """Raise BackendUnavailable where transformers is not installed."""
    _import_transformers()


def _import_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise BackendUnavailable(
            f"comparing against transformers needs it installed, and it is not ({error}); "
            "pip install 'gapless[test]'"
        ) from error
