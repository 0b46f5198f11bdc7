"""Structured output through xgrammar: compiling grammars beside the steps, and following them.

xgrammar is an extra, and imports torch: it is imported by the thread that compiles, so a process
that asks for no grammar never loads it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from gapless.core.grammar import Grammar, GrammarKind
from gapless.errors import InvalidRequest
from gapless.text.json_schema import closed_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from gapless.text.tokenizer import Tokenizer

# how long a grammar may take to compile, waiting for its turn included; the first one also loads
# the library and reads the vocabulary
COMPILE_SECONDS = 30.0
# grammars compiled at once; one that takes for ever keeps its place
MAX_COMPILING = 2
# compiled grammars that are kept for requests to come
MAX_CACHED = 128
# whitespace characters in a row between the tokens of JSON: a model must not pad for ever
MAX_WHITESPACE = 2


class _NoTurn(InvalidRequest):
    """Others were being compiled all the time."""


class Compilation:
    """A grammar that is being compiled, or has been."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar) -> None:
        self._deadline = time.monotonic() + COMPILE_SECONDS
        self._compiled: Any = None
        self._kind = grammar.kind
        self._error: str | None = f"the {grammar.kind} made its compiler fail; change it"
        self._had_no_turn = False
        self._is_done = threading.Event()
        # a thread of the pools that are joined at exit could hold the process back
        threading.Thread(
            target=self._run, args=(compiler, grammar), name="grammar", daemon=True
        ).start()

    @property
    def is_settled(self) -> bool:
        """Whether `state` would not block."""
        return self._is_done.is_set() or time.monotonic() >= self._deadline

    def state(self, stop_ids: Sequence[int]) -> MatcherState:
        """Wait for the grammar, at most until its time is up, and begin a text in it.

        Args: stop_ids: ids that end the text; allowed where it is complete, and nowhere else.

        Raises:
            InvalidRequest: it cannot be compiled, or not in time.
        """
        if not self._is_done.wait(max(0.0, self._deadline - time.monotonic())):
            raise InvalidRequest(
                f"the {self._kind} did not compile within {COMPILE_SECONDS:.0f} s; simplify it"
            )
        if self._error is not None:
            raise InvalidRequest(self._error)
        return MatcherState(self._compiled, stop_ids)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether another attempt would end as this one."""
        return not self._had_no_turn

    def _run(self, compiler: GrammarCompiler, grammar: Grammar) -> None:
        try:
            self._compiled = compiler.compile_now(grammar, self._deadline)
            self._error = None
        except InvalidRequest as error:
            self._had_no_turn = isinstance(error, _NoTurn)
            self._error = str(error)
        # the library raises these, for what it was given
        except (RuntimeError, ValueError) as error:
            self._error = f"the {grammar.kind} does not compile: {_reason(error)}; correct it"
        finally:
            self._is_done.set()


class GrammarCompiler:
    """Compiles grammars for one model's tokens, each once while it is remembered."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Args: vocab_size: V, the model's logits; the tokenizer may know more or fewer."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known: OrderedDict[Grammar, Compilation] = OrderedDict()
        self._places = threading.Semaphore(MAX_COMPILING)
        self._loading = threading.Lock()
        self._backend: Any = None

    def start(self, grammar: Grammar) -> Compilation:
        """Begin to compile a grammar, if it is not known. Called by one thread."""
        found = self._known.get(grammar)
        if found is None or not found.is_worth_keeping:
            found = self._known[grammar] = Compilation(self, grammar)
            if len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        return found

    def compile_now(self, grammar: Grammar, deadline: float) -> Any:
        """Compile in this thread; `deadline` is for having a turn, by the monotonic clock."""
        schema = None
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            schema = closed_schema(grammar.source)
        if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _NoTurn("other grammars take too long to compile; try again later")
        try:
            backend = self._loaded()
            match grammar.kind:
                case GrammarKind.REGEX:
                    return backend.compile_regex(grammar.source)
                case GrammarKind.CHOICE:
                    return backend.compile_grammar(_one_of(json.loads(grammar.source)))
                case GrammarKind.JSON_OBJECT:
                    schema = '{"type": "object"}'
            return backend.compile_json_schema(
                schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
            )
        finally:
            self._places.release()

    def _loaded(self) -> Any:
        with self._loading:
            if self._backend is None:
                self._backend = self._load()
            return self._backend

    def _load(self) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise InvalidRequest(
                "structured output needs xgrammar, which is not installed where the model is "
                f"served ({error}): pip install 'gapless[grammar]'"
            ) from error
        # tokens of no bytes are never allowed
        special_ids, token_bytes = self._tokenizer.special_ids, self._tokenizer.token_bytes
        vocabulary = [
            b"" if token_id in special_ids else token_bytes(token_id)
            for token_id in range(self._vocab_size)
        ]
        info = xgrammar.TokenizerInfo(
            vocabulary, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=[]
        )
        return xgrammar.GrammarCompiler(info, cache_enabled=False)


class MatcherState:
    """How far one output has come; see `core.grammar.GrammarState`."""

    def __init__(self, compiled: Any, stop_ids: Sequence[int]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        self._stop_ids = frozenset(stop_ids)
        self._num_read = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as None: other ranks get masks, not the grammar."""
        return type(None), ()

    def fill(
        self,
        output_ids: Sequence[int],
        drafts: Sequence[int],
        masks: np.ndarray,
        parents: Sequence[int] | None = None,
    ) -> None:
        """See `core.grammar.GrammarState.fill`.

        Ids that stop are allowed where the text is complete. Elsewhere too where nothing else can
        follow: the vocabulary has no token for what the grammar wants, or that token is one.
        """
        for token_id in output_ids[self._num_read :]:
            is_read = self._accepts(token_id) or token_id in self._stop_ids
            assert is_read, f"token {token_id} was sampled, and the grammar refuses it"
        self._num_read = len(output_ids)
        self._fill_one(masks, 0)
        # drafts that lead to each mask, as far as the grammar goes along, and those gone ahead over
        paths: dict[int, tuple[int, ...]] = {0: ()}
        ahead: tuple[int, ...] = ()
        for index, draft in enumerate(drafts, 1):
            path = paths.get(index - 1 if parents is None else parents[index - 1])
            if path is None:
                continue
            self._go(ahead, path)
            ahead = path
            if not self._matcher.is_terminated() and self._accepts(draft):
                ahead = paths[index] = (*path, draft)
                self._fill_one(masks, index)
        self._go(ahead, ())

    def _go(self, ahead: tuple[int, ...], path: tuple[int, ...]) -> None:
        """Go from the end of one path of drafts to that of another, all of them accepted before."""
        num_common = 0
        while num_common < min(len(ahead), len(path)) and ahead[num_common] == path[num_common]:
            num_common += 1
        if len(ahead) > num_common:
            self._matcher.rollback(len(ahead) - num_common)
        for draft in path[num_common:]:
            is_read = self._accepts(draft)
            assert is_read, f"draft {draft} was accepted before"

    def _accepts(self, token_id: int) -> bool:
        """Take in a token; past its end a text that goes on is left alone."""
        if self._matcher.is_terminated():
            return token_id in self._stop_ids
        is_accepted: bool = self._matcher.accept_token(token_id)
        return is_accepted

    def _fill_one(self, masks: np.ndarray, index: int) -> None:
        words = masks[index].view("uint32")
        if self._matcher.is_terminated():
            words[:] = 0
        else:
            self._matcher.fill_next_token_bitmask(masks, index)
            if self._matcher.is_completed():
                return
            for token_id in self._stop_ids:
                words[token_id // 32] &= ~(1 << token_id % 32) & 0xFFFFFFFF
            if words.any():
                return
        for token_id in self._stop_ids:
            words[token_id // 32] |= 1 << token_id % 32


def _one_of(texts: Sequence[str]) -> str:
    """EBNF of a choice; its literals escape as those of JSON do."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _reason(error: Exception) -> str:
    """The library's message without its source file and line."""
    return str(error).strip().partition(": ")[2] or str(error)
