"""Text to token ids and back, over the `tokenizer.json` of a checkpoint."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING

import tokenizers

from gapless.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# the names under which tokenizer_config.json gives single special tokens
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# how a byte-fallback vocabulary writes a byte
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# how vocabularies in SentencePiece's manner write a space
_SPACE = "\u2581"


class Tokenizer:
    """The tokenizer of one checkpoint; ids equal those of `transformers.AutoTokenizer`."""

    vocab_size: int
    """Every id of the tokenizer is below this; a model's embedding may have more rows."""
    special_tokens: Mapping[str, str]
    """The named special tokens of tokenizer_config.json, such as `eos_token`."""
    special_ids: frozenset[int]
    """Ids that `skip_special_tokens` leaves out of text."""
    eos_id: int | None
    """Id of `eos_token`, None where the checkpoint names none."""

    def __init__(self, checkpoint: Path) -> None:
        """Read `tokenizer.json` and, where there is one, `tokenizer_config.json`.

        Raises:
            ModelError: a file is missing or malformed, or `eos_token` has no id.
        """
        self._backend = _load_backend(checkpoint / "tokenizer.json")
        self.special_tokens = _named_tokens(read_tokenizer_config(checkpoint))
        eos = self.special_tokens.get("eos_token")
        self.eos_id = None if eos is None else self._backend.token_to_id(eos)
        if eos is not None and self.eos_id is None:
            raise ModelError(
                f"{checkpoint}/tokenizer_config.json names eos_token={eos!r}, which is not in "
                "tokenizer.json; take both files from the same checkpoint"
            )
        self._mark_special()
        self.special_ids = frozenset(
            token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.vocab_size = 1 + max(self._backend.get_vocab().values())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become their single ids.

        `add_special_tokens` adds what the tokenizer puts around a plain prompt; text made by a
        chat template carries its own.

        Raises:
            InvalidRequest: `text` has a surrogate without its partner, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has the lone surrogate {text[error.start]!r} at index {error.start}; "
                "want text that can be encoded as UTF-8; remove or replace it"
            ) from error
        # the call for batches lets other threads run, the one for a single text does not
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; bytes that form no character become U+FFFD.

        Ids that the tokenizer does not know give no text.
        """
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, which may be a part of a character.

        Those of a special token spell its name; ids that the tokenizer does not know have none.
        """
        added = self._added_tokens.get(token_id)
        if added is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes.fromhex(byte[1])
        return str(token).replace(_SPACE, " ").encode()

    @cached_property
    def _added_tokens(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items()}

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether the vocabulary writes every byte as one printable character."""
        decoder = self._backend.decoder
        # the decoder's own JSON, which the library gives for pickling
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def _mark_special(self) -> None:
        """Make every named special token special, also where tokenizer.json does not say so."""
        added = self._backend.get_added_tokens_decoder()
        is_special = {token.content for token in added.values() if token.special}
        self._backend.add_special_tokens(
            [
                tokenizers.AddedToken(content, special=True, normalized=False)
                for content in self.special_tokens.values()
                if content not in is_special and self._backend.token_to_id(content) is not None
            ]
        )


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that stand for bytes in byte-level vocabularies.

    Printable ones of Latin-1 stand for themselves, the others in order for U+0100 and up
    (Radford et al. 2019, GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


def read_tokenizer_config(checkpoint: Path) -> dict[str, object]:
    """Return `tokenizer_config.json` of a checkpoint folder, empty where there is none.

    Raises:
        ModelError: the file is not a JSON object.
    """
    path = checkpoint / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: want a JSON object, found {error}; fetch it again") from error
    if not isinstance(config, dict):
        raise ModelError(
            f"{path}: want a JSON object, found {type(config).__name__}; fetch it again"
        )
    return config


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(
            f"{path} is not there; gapless reads fast tokenizers only: save one there with "
            "transformers (`AutoTokenizer.from_pretrained(...).save_pretrained(...)`)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    # the library raises bare Exception, nothing narrower
    except Exception as error:
        raise ModelError(
            f"{path}: want a file of the tokenizers library, found one that it cannot read "
            f"({error}); fetch it again"
        ) from error
    # prompts are neither cut nor filled, whatever the file was saved with
    backend.no_truncation()
    backend.no_padding()
    return backend


def _named_tokens(config: dict[str, object]) -> dict[str, str]:
    """Return name -> content of the special tokens; a value is a string or an AddedToken's dict."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
        elif value is not None:
            raise ModelError(
                f"tokenizer_config.json: {name}={value!r}; want a string, or an object with "
                "`content`; mend or drop the entry"
            )
    return tokens
