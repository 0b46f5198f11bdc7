"""Perplexity against the same computed with transformers directly, and the sums."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless.assets import demo_checkpoint, heldout
from gapless.config.options import EngineOptions
from gapless.errors import BackendUnavailable, ConfigError, InvalidRequest
from gapless.eval.data import Document, DocumentSet, read_set
from gapless.eval.perplexity import encode_documents, measure_perplexity, perplexity_of
from gapless.eval.transformers_peer import TransformersPeer, make_peer

if TYPE_CHECKING:
    from gapless import LLM

TWO = DocumentSet("two", (Document("a"), Document("b")))


@pytest.fixture(scope="module")
def peer(llm: LLM) -> TransformersPeer:
    """The bundled model in transformers."""
    return make_peer(EngineOptions(), llm)


@pytest.fixture(scope="module")
def model() -> Any:
    """The bundled model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32).eval()


def test_mean_is_over_tokens_not_documents() -> None:
    found = perplexity_of(TWO, [[-1.0, -2.0, -3.0], [-6.0]])
    assert [(s.num_tokens, s.nats) for s in found.scores] == [(3, 6.0), (1, 6.0)]
    assert found.nats_per_token == 3.0
    assert found.perplexity == math.exp(3.0)
    assert perplexity_of(TWO, [[-1e4], []]).perplexity == math.inf


def test_only_the_first_tokens_are_used(llm: LLM) -> None:
    text = "How many lemons did she have at first?"
    documents = DocumentSet("d", (Document(text), Document("a")))
    whole = llm.encode(text)
    assert encode_documents(llm, documents, max_tokens=4) == [whole[:4], llm.encode("a")]
    assert encode_documents(llm, documents, max_tokens=999)[0] == whole
    with pytest.raises(InvalidRequest, match="no text of one has 2 tokens"):
        encode_documents(llm, DocumentSet("one", (Document("a"),)), max_tokens=9)


def test_perplexity_is_that_of_transformers(llm: LLM, peer: TransformersPeer, model: Any) -> None:
    from transformers import AutoTokenizer

    documents = read_set(heldout("text"), limit=2)
    assert isinstance(documents, DocumentSet)
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint())
    nats, count = 0.0, 0
    for document, length in zip(documents.documents, (150, 150), strict=True):
        ids = tokenizer(document.text, return_tensors="pt").input_ids[:, :length]
        with torch.inference_mode():
            # the mean over the predicted tokens
            nats += float(model(ids, labels=ids).loss) * (length - 1)
        count += length - 1
    encoded = encode_documents(llm, documents, max_tokens=150)
    found = measure_perplexity(llm, documents, encoded)
    assert found.num_tokens == count == 298
    assert found.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
    theirs = perplexity_of(documents, peer.score(encoded))
    assert theirs.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)


def test_padding_changes_nothing_for_the_peer(llm: LLM, peer: TransformersPeer) -> None:
    chat = llm.encode([{"role": "user", "content": "What is the capital of France?"}])
    prose = llm.encode("It was the duty of every man in the house to")
    prompts = [chat, llm.encode("Mia has 3 lemons. " * 12), prose, prose[:2], prose[:5]]
    assert min(map(len, prompts)) + 60 < max(map(len, prompts))
    together = peer.generate(prompts, 12)
    assert together == [peer.generate([prompt], 12)[0] for prompt in prompts]
    assert together[0][-1] == 4082, "it comes to its end"
    assert all(ids.index(4082) == len(ids) - 1 for ids in together if 4082 in ids)


def test_margin_is_between_the_two_best(llm: LLM, peer: TransformersPeer, model: Any) -> None:
    prompt = llm.encode("The capital of")
    with torch.inference_mode():
        best, second, *_ = model(torch.tensor([prompt])).logits[0, -1].sort(descending=True).values
    assert peer.margin(prompt) == pytest.approx(float(best - second), abs=1e-4)
    assert peer.margin(prompt) > 1e-3


def test_a_peer_can_generate_past_the_end(llm: LLM) -> None:
    peer = make_peer(EngineOptions(), llm, ignores_eos=True)
    prompt = llm.encode([{"role": "user", "content": "What is the capital of France?"}])
    found = peer.generate([prompt], 20)[0]
    assert len(found) == 20
    assert 4082 in found[:-1]


def test_no_peer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="load_format=dummy"):
        make_peer(EngineOptions(load_format="dummy"), llm)
    # what an import of a missing module does
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'gapless\[test\]'"):
        make_peer(EngineOptions(), llm)
