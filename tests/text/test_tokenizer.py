"""The tokenizer against `transformers`, and its refusals."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gapless.assets import demo_checkpoint, heldout
from gapless.errors import InvalidRequest, ModelError
from gapless.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

EOS = "<|im_end|>"
TEXTS = [
    "",
    "Mia earns $15 an hour.",
    "  leading and trailing  \n\n",
    "naïve café — 東京 🙂👩‍👩‍👧",
    "e\u0301 is composed",
    f"<|im_start|>user\nhi{EOS}<think></think>",
    "\ufffd\x00\x7f",
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the demo model's tokenizer files, to be spoiled."""
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(demo_checkpoint() / name, tmp_path / name)
    return tmp_path


def change_config(checkpoint: Path, **entries: object) -> None:
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_encode_equals_transformers(
    tokenizer: Tokenizer, hf_tokenizer: PreTrainedTokenizerFast, text: str, add_special_tokens: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert ids == hf_tokenizer.encode(text, add_special_tokens=add_special_tokens)


def test_heldout_text_equals_transformers(
    tokenizer: Tokenizer, hf_tokenizer: PreTrainedTokenizerFast
) -> None:
    for line in heldout("text").read_text().splitlines()[:10]:
        text = json.loads(line)["text"]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == hf_tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(
    ids=st.lists(st.integers(0, 4095) | st.integers(4080, 4095) | st.integers(0, 255)),
    skip=st.booleans(),
)
def test_decode_equals_transformers(
    tokenizer: Tokenizer, hf_tokenizer: PreTrainedTokenizerFast, ids: list[int], skip: bool
) -> None:
    ours = tokenizer.decode(ids, skip_special_tokens=skip)
    assert ours == hf_tokenizer.decode(ids, skip_special_tokens=skip)


def test_properties(tokenizer: Tokenizer, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.vocab_size == len(hf_tokenizer) == 4096
    assert tokenizer.eos_id == hf_tokenizer.eos_token_id == 4082
    assert tokenizer.special_ids == frozenset(range(4080, 4096))
    assert tokenizer.special_tokens == {"eos_token": EOS, "pad_token": "<|endoftext|>"}


def test_unknown_ids_give_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.decode([99_999, *ids, 4096], skip_special_tokens=True) == "ab"


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"\\ud800' at index 2"):
        tokenizer.encode("ab\ud800", add_special_tokens=False)


def test_saved_truncation_and_padding_are_ignored(checkpoint: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(checkpoint / "tokenizer.json"))
    tokenizer = Tokenizer(checkpoint)
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1
    assert len(tokenizer.encode("1 2 3 4 5 6", add_special_tokens=False)) > 9


def test_named_tokens_are_special_as_in_transformers(checkpoint: Path) -> None:
    change_config(checkpoint, eos_token={"content": "a", "__type": "AddedToken"}, bos_token="b")
    ours, theirs = Tokenizer(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    ids = ours.encode("bar ab", add_special_tokens=False)
    assert ours.eos_id == theirs.eos_token_id
    assert ids == theirs.encode("bar ab", add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=True) == "r "


def test_checkpoint_without_config_has_no_eos(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(checkpoint)
    assert tokenizer.eos_id is None
    assert tokenizer.special_tokens == {}


def test_missing_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is not there; .*save_pretrained"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{]", '{"version": "1.0"}'])
def test_malformed_tokenizer_is_a_model_error(checkpoint: Path, content: str) -> None:
    (checkpoint / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: want .* fetch it again"):
        Tokenizer(checkpoint)


@pytest.mark.parametrize("content", ["", "[1]", "{]"])
def test_malformed_config_is_a_model_error(checkpoint: Path, content: str) -> None:
    (checkpoint / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match="want a JSON object, found"):
        Tokenizer(checkpoint)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"eos_token": "<gone>"}, "eos_token='<gone>', which is not in tokenizer.json"),
        ({"bos_token": 7}, "bos_token=7; want a string"),
        ({"pad_token": {"id": 1}}, "pad_token=.*; want a string"),
    ],
)
def test_bad_named_tokens_are_model_errors(
    checkpoint: Path, entries: dict[str, object], message: str
) -> None:
    change_config(checkpoint, **entries)
    with pytest.raises(ModelError, match=message):
        Tokenizer(checkpoint)
