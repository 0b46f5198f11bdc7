"""The demo model's tokenizer, ours and the one of transformers."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gapless.assets import demo_checkpoint
from gapless.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_checkpoint())


@pytest.fixture(scope="session")
def hf_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo_checkpoint())
