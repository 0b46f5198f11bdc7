"""Pieces of text join to the full decode, characters stay whole, stop strings cut exactly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from gapless.assets import demo_checkpoint
from gapless.text.detokenizer import Detokenizer
from gapless.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
# the byte-level alphabet: printable latin-1 stands for itself, the rest moves up from U+0100
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_MOVED = [byte for byte in range(256) if byte not in _PRINTABLE]
_VOCAB = json.loads((demo_checkpoint() / "tokenizer.json").read_text())["model"]["vocab"]
BYTE_IDS = [
    _VOCAB[chr(byte if byte in _PRINTABLE else 0x100 + _MOVED.index(byte))] for byte in range(256)
]
# ids of the 256 single bytes, of any token, of special tokens, and beyond the vocabulary
IDS = st.lists(
    st.integers(0, 255)
    | st.integers(0, VOCAB_SIZE - 1)
    | st.integers(4080, VOCAB_SIZE - 1)
    | st.integers(VOCAB_SIZE, VOCAB_SIZE + 2),
    max_size=90,
)
# text whose characters have 1 to 4 bytes, as single-byte tokens
TEXT = st.text(st.sampled_from("ab é€🙂"), max_size=40)
AT_ONCE = st.integers(1, 9)
STOPS = st.lists(st.text(st.sampled_from("abé€🙂"), min_size=1, max_size=4), max_size=3)


def byte_ids(data: bytes) -> list[int]:
    """Return one single-byte token of the demo model for each byte."""
    return [BYTE_IDS[byte] for byte in data]


def detokenizer(
    tokenizer: Tokenizer, *, stop: tuple[str, ...] = (), skip: bool = True, min_tokens: int = 0
) -> Detokenizer:
    return Detokenizer(tokenizer, stop=stop, skip_special_tokens=skip, min_tokens=min_tokens)


def run(detok: Detokenizer, ids: list[int], at_once: int = 1) -> tuple[list[str], str | None]:
    """Return the pieces, flushed, and the stop string."""
    pieces: list[str] = []
    for first in range(0, len(ids), at_once):
        update = detok.push(ids[first : first + at_once])
        pieces.append(update.text)
        if update.stop is not None:
            assert detok.flush() == ""
            return pieces, update.stop
    return [*pieces, detok.flush()], None


def expected(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], skip: bool, min_tokens: int
) -> tuple[str, str | None]:
    """Decode every prefix in full and look for stop strings in what is whole; the definition."""
    text = ""
    for count in range(1, len(ids) + 1):
        before, text = text, tokenizer.decode(ids[:count], skip_special_tokens=skip)
        text = text.rstrip("\ufffd")
        found = [
            (start, len(s), s)
            for s in stop
            for start in range(len(text))
            if text.startswith(s, start) and start + len(s) > len(before)
        ]
        if found and count >= min_tokens:
            start, _, s = min(found)
            return text[:start], s
    return tokenizer.decode(ids, skip_special_tokens=skip), None


@given(ids=IDS, skip=st.booleans(), at_once=AT_ONCE)
def test_joined_pieces_equal_full_decode(
    tokenizer: Tokenizer,
    hf_tokenizer: PreTrainedTokenizerFast,
    ids: list[int],
    skip: bool,
    at_once: int,
) -> None:
    pieces, stop = run(detokenizer(tokenizer, skip=skip), ids, at_once)
    assert stop is None
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == hf_tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.binary(max_size=120) | TEXT.map(lambda text: text.encode()), at_once=AT_ONCE)
@example(data=b"\x80" * 100, at_once=1)
@example(data=b"\x80" * 100, at_once=7)
@example(data=b"\xf0\x9f\x98" * 40, at_once=1)
@example(data="🙂".encode() * 30, at_once=1)
@example(data="🙂".encode() * 30, at_once=5)
@example(data=b"\xe2" + "€".encode() * 40 + b"\xe2\x82", at_once=1)
def test_any_bytes_join_to_their_decode(tokenizer: Tokenizer, data: bytes, at_once: int) -> None:
    pieces, _ = run(detokenizer(tokenizer), byte_ids(data), at_once)
    assert "".join(pieces) == data.decode(errors="replace")


@given(ids=IDS, stop=STOPS, skip=st.booleans(), min_tokens=st.integers(0, 12), at_once=AT_ONCE)
def test_stop_strings_in_random_tokens(
    tokenizer: Tokenizer,
    ids: list[int],
    stop: list[str],
    skip: bool,
    min_tokens: int,
    at_once: int,
) -> None:
    detok = detokenizer(tokenizer, stop=tuple(stop), skip=skip, min_tokens=min_tokens)
    pieces, hit = run(detok, ids, at_once)
    assert ("".join(pieces), hit) == expected(tokenizer, ids, tuple(stop), skip, min_tokens)


@given(text=TEXT, stop=STOPS, min_tokens=st.integers(0, 40), split=st.booleans())
def test_stop_strings_in_crowded_text(
    tokenizer: Tokenizer, text: str, stop: list[str], min_tokens: int, split: bool
) -> None:
    whole = tokenizer.encode(text, add_special_tokens=False)
    ids = byte_ids(text.encode()) if split else whole
    pieces, hit = run(detokenizer(tokenizer, stop=tuple(stop), min_tokens=min_tokens), ids)
    assert ("".join(pieces), hit) == expected(tokenizer, ids, tuple(stop), True, min_tokens)


@given(text=TEXT, stop=STOPS)
def test_no_more_is_held_than_a_stop_string_needs(
    tokenizer: Tokenizer, text: str, stop: list[str]
) -> None:
    detok = detokenizer(tokenizer, stop=tuple(stop))
    sent, ids = "", byte_ids(text.encode())
    for count, token_id in enumerate(ids, 1):
        update = detok.push([token_id])
        sent += update.text
        if update.stop is not None:
            return
        whole = text.encode()[:count].decode(errors="ignore")
        held = whole[len(sent) :]
        ends = {whole[-n:] for n in range(1, len(whole) + 1)}
        begun = [end for end in ends if any(s.startswith(end) and s != end for s in stop)]
        assert held == max(begun, key=len, default="")


@given(text=TEXT)
def test_pieces_never_split_a_character(tokenizer: Tokenizer, text: str) -> None:
    pieces, _ = run(detokenizer(tokenizer), byte_ids(text.encode()))
    assert "\ufffd" not in "".join(pieces)
    # each character comes with its last byte
    ends = {len(text[: n + 1].encode()) - 1: char for n, char in enumerate(text)}
    assert pieces[:-1] == [ends.get(index, "") for index in range(len(text.encode()))]


class WordTokenizer:
    """Ids are indices of words."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self.vocab_size = len(words)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return "".join(self._words[token_id] for token_id in ids)


@pytest.mark.parametrize(
    ("stop", "tokens", "text", "hit"),
    [
        (("lo w",), ["hel", "lo", " wor"], "hel", "lo w"),  # spans tokens
        (("ell",), ["hello"], "h", "ell"),  # lies inside one
        (("bc", "abcd"), ["abcd"], "", "abcd"),  # of one token's matches the first
        (("bc", "abcd"), ["abc", "d"], "a", "bc"),  # the one completed by an earlier token
        (("abc", "ab"), ["abc"], "", "ab"),  # the shortest of one beginning
        (("aab",), ["a", "a", "a", "b"], "a", "aab"),  # a false start overlaps the match
        (("xyz",), ["ax", "y"], "axy", None),  # held text comes at the end
    ],
)
def test_stop_string_examples(
    stop: tuple[str, ...], tokens: list[str], text: str, hit: str | None
) -> None:
    pieces, found = run(detokenizer(WordTokenizer(tokens), stop=stop), list(range(len(tokens))))
    assert ("".join(pieces), found) == (text, hit)


def test_tokens_after_a_stop_add_nothing(tokenizer: Tokenizer) -> None:
    detok = detokenizer(tokenizer, stop=("b",))
    updates = [detok.push([token_id]) for token_id in byte_ids(b"abcd")]
    assert [(u.text, u.stop) for u in updates] == [("a", None), ("", "b"), ("", "b"), ("", "b")]
    assert detok.flush() == ""


def test_min_tokens_boundary(tokenizer: Tokenizer) -> None:
    ids = byte_ids(b"aXbXc")
    texts = {n: "".join(run(detokenizer(tokenizer, stop=("X",), min_tokens=n), ids)[0])
             for n in range(6)}  # fmt: skip
    assert texts == {0: "a", 1: "a", 2: "a", 3: "aXb", 4: "aXb", 5: "aXbXc"}


def test_match_completed_too_early_is_sent_at_once(tokenizer: Tokenizer) -> None:
    pieces, hit = run(detokenizer(tokenizer, stop=("XY",), min_tokens=4), byte_ids(b"XYab"))
    assert (pieces, hit) == (["", "XY", "a", "b", ""], None)


def test_match_completed_too_early_does_not_count_while_held(tokenizer: Tokenizer) -> None:
    # "abc" is held for "abcd" when "bc" begins to count
    detok = detokenizer(tokenizer, stop=("bc", "abcd"), min_tokens=4)
    pieces, hit = run(detok, byte_ids(b"abcxbc"))
    assert ("".join(pieces), hit) == ("abcx", "bc")


def test_tokens_without_text_may_stand_inside_a_character(tokenizer: Tokenizer) -> None:
    first, *rest = byte_ids("€".encode())
    for silent in [4082, VOCAB_SIZE + 7]:
        assert run(detokenizer(tokenizer), [first, *[silent] * 99, *rest])[0][-2:] == ["€", ""]


def test_special_tokens_count_and_may_be_stops(tokenizer: Tokenizer) -> None:
    ids = [4082, *byte_ids(b"ab"), 4082]
    kept = run(detokenizer(tokenizer, skip=False), ids)[0]
    assert kept == ["<|im_end|>", "a", "b", "<|im_end|>", ""]
    assert run(detokenizer(tokenizer, min_tokens=2, stop=("a",)), ids)[1] == "a"
    assert run(detokenizer(tokenizer, skip=False, min_tokens=1, stop=("|im",)), ids) == (
        ["<"],
        "|im",
    )


def test_replacement_character_may_be_a_stop(tokenizer: Tokenizer) -> None:
    pieces, hit = run(detokenizer(tokenizer, stop=("\ufffd",)), byte_ids(b"a\xffb"))
    assert ("".join(pieces), hit) == ("a", "\ufffd")
    pieces, hit = run(detokenizer(tokenizer, stop=("\ufffd",)), byte_ids(b"a\xff"))
    assert ("".join(pieces), hit) == ("a", None)


def test_flush_twice_gives_text_once(tokenizer: Tokenizer) -> None:
    detok = detokenizer(tokenizer, stop=("bc",))
    for token_id in byte_ids(b"ab\xe2"):
        detok.push([token_id])
    assert detok.flush() == "b\ufffd"
    assert detok.flush() == ""


class CountingTokenizer(Tokenizer):
    """Counts the ids that it decodes."""

    num_decoded = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("data", [b"word ", "🙂".encode(), b"\x80", b"\xf0\x9f\x98"])
def test_cost_of_a_token_is_bounded(data: bytes) -> None:
    tokenizer = CountingTokenizer(demo_checkpoint())
    ids = (byte_ids(data) * 1000)[:1000]
    tokenizer.num_decoded = 0
    run(detokenizer(tokenizer), ids)
    assert tokenizer.num_decoded <= 40 * len(ids)


@given(text=st.lists(st.sampled_from(["hi ", "a", "é", "🙂", "€", " "]), max_size=40).map("".join))
@example(text="🙂" * 30)
@example(text=" a hi  a")
@example(text="hi hi 🙂hi 🙂hi hi ahi 🙂é🙂🙂é")
def test_byte_fallback_vocabulary(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = byte_fallback_tokenizer(tmp_path_factory.getbasetemp() / "byte_fallback")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, _ = run(detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def byte_fallback_tokenizer(folder: Path) -> Tokenizer:
    """Save and load a small tokenizer in the manner of Llama 2: words begin with U+2581."""
    if not folder.exists():
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
        vocab |= {"▁": 256, "a": 257, "h": 258, "i": 259, "hi": 260, "▁hi": 261, "<unk>": 262}
        model = tokenizers.models.BPE(
            vocab=vocab, merges=[("h", "i"), ("▁", "hi")], byte_fallback=True, unk_token="<unk>"
        )
        backend = tokenizers.Tokenizer(model)
        backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        decoders = tokenizers.decoders
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        folder.mkdir()
        backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)
