"""`gapless chat`: a conversation in the terminal, or over pipes, one line per turn."""

from __future__ import annotations

import io
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import tyro  # noqa: TC002 (annotations are read when parsing)

from gapless.cli.generate import Sampling
from gapless.config.options import EngineOptions
from gapless.core.request import FinishReason
from gapless.errors import ContextTooLong, RequestError
from gapless.observe.logging import configure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless.core.messages import Update
    from gapless.engine.llm import LLM
    from gapless.text.chat import EncodedPrompt

COMMANDS = {
    "/reset": "forget the conversation, but for the system message",
    "/system": "set the system message to the text that follows; without text, drop it",
    "/stats": "tokens, tokens per second, and how much of the context is used",
    "/help": "list these commands",
    "/exit": "leave, as does Ctrl-D; Ctrl-C stops an answer",
}


@dataclass(frozen=True, kw_only=True)
class ChatSampling(Sampling):
    """How tokens are chosen; --seed, an option of the engine, makes it reproducible."""

    n: tyro.conf.SuppressFixed[tyro.conf.Fixed[int]] = 1


@dataclass(frozen=True)
class Chat:
    """Talk with a model. Lines are turns; those that begin with a slash are commands, see /help."""

    system: str | None = None
    """System message to begin with."""
    log_level: str = "warning"
    """Least severe messages to show: debug, info, warning or error."""
    sampling: ChatSampling = field(default_factory=ChatSampling)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def run(self) -> int:
        """Run the command."""
        from gapless.engine.llm import LLM

        configure(self.log_level)
        options = self.engine
        if options.max_running_requests is None:
            # all the memory is for the one conversation
            options = replace(options, max_running_requests=1)
        llm = LLM(**asdict(options))
        Session(llm, self.sampling, self.system).run(Terminal.of_process())
        return 0


@dataclass(frozen=True)
class Terminal:
    """Where turns come from: a person at a terminal, who is prompted, or a pipe."""

    is_interactive: bool

    @classmethod
    def of_process(cls) -> Terminal:
        """Look at the standard streams, and make undecodable input harmless."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if is_interactive:
            # its import gives `input` line editing and a history
            with suppress(ImportError):
                import readline  # noqa: F401
        return cls(is_interactive)

    def lines(self) -> Iterator[str]:
        """Yield the turns until the input ends."""
        if not self.is_interactive:
            for line in sys.stdin:
                yield line.rstrip("\n")
            return
        print("/help lists the commands, Ctrl-D leaves")
        while True:
            try:
                line = input("> ")
            except KeyboardInterrupt:
                print("\nCtrl-D or /exit leaves")
                continue
            except EOFError:
                print()
                return
            yield line


@dataclass
class Stats:
    """What a conversation cost so far."""

    num_answers: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    context_len: int = 0
    """Tokens of the conversation with its last answer; 0 at its start."""


class Session:
    """One conversation with one model."""

    def __init__(self, llm: LLM, sampling: Sampling, system: str | None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._system = system
        self._history: list[dict[str, object]] = []
        self._stats = Stats()

    def run(self, terminal: Terminal) -> None:
        """Answer turns until there are none, or one says to leave."""
        for line in terminal.lines():
            if line.startswith("/"):
                if line.strip() == "/exit":
                    return
                self._obey(line)
            elif line.strip():
                self._answer(line.strip())

    def _obey(self, line: str) -> None:
        name, _, text = line.strip().partition(" ")
        match name:
            case "/reset":
                self._history.clear()
                self._stats.context_len = 0
                notice("(a new conversation)")
            case "/system":
                self._system = text.strip() or None
                notice("(no system message)" if self._system is None else "(system message set)")
            case "/stats":
                print(self._summary())
            case "/help":
                width = max(map(len, COMMANDS))
                for command, meaning in COMMANDS.items():
                    print(f"{command.ljust(width)}  {meaning}")
            case _:
                notice(
                    f"unknown command {name}; known: {', '.join(COMMANDS)}; begin with a space to "
                    "send it as text"
                )

    def _answer(self, text: str) -> None:
        """Print an answer as it comes; a turn that gets none is not kept."""
        turn: dict[str, object] = {"role": "user", "content": text}
        messages = [*self._history, turn]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        try:
            prompt = self._llm.prepare(messages)
            updates = self._stream(prompt)
        except ContextTooLong as error:
            notice(f"this turn is left out: {error}; /reset begins a new conversation")
            return
        except RequestError as error:
            notice(f"this turn is left out: {error}")
            return
        answer = "".join(update.text for update in updates)
        num_tokens = sum(len(update.token_ids) for update in updates)
        if answer:
            self._history += [turn, {"role": "assistant", "content": answer}]
        self._stats.context_len = len(prompt.token_ids) + num_tokens
        self._remark(updates[-1].finish_reason)

    def _stream(self, prompt: EncodedPrompt) -> list[Update]:
        """Print an answer's text until it ends or Ctrl-C ends it; return its updates."""
        start = time.perf_counter()
        request_id = f"answer-{self._stats.num_answers}"
        found: list[Update] = []
        with interrupts() as asked:
            for update in self._llm.stream(prompt, self._sampling, request_id=request_id):
                print(update.text, end="", flush=True)
                found.append(update)
                if asked and update.finish_reason is None:
                    # the stream goes on to a last update with the text that was held back
                    self._llm.abort(request_id)
        print(flush=True)
        self._stats.num_answers += 1
        self._stats.num_tokens += sum(len(update.token_ids) for update in found)
        self._stats.seconds += time.perf_counter() - start
        return found

    def _remark(self, reason: FinishReason | None) -> None:
        """Say why an answer breaks off."""
        limit = self._llm.engine.config.max_model_len
        if reason is FinishReason.ABORT:
            notice("(stopped)")
        elif reason is FinishReason.LENGTH and self._stats.context_len >= limit:
            notice(f"(the context of {limit} tokens is full; /reset begins a new conversation)")
        elif reason is FinishReason.LENGTH:
            notice(f"(stopped at --max-tokens {self._sampling.max_tokens})")

    def _summary(self) -> str:
        stats = self._stats
        rate = stats.num_tokens / stats.seconds if stats.seconds else 0.0
        limit = self._llm.engine.config.max_model_len
        return (
            f"answers: {stats.num_answers}, tokens: {stats.num_tokens}, tokens/s: {rate:.1f}, "
            f"context used: {stats.context_len} of {limit} tokens"
        )


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it, since half a step would leave the engine broken.

    The list that is yielded is empty until the first; the second is raised, as ever.
    """
    asked: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def notice(text: str) -> None:
    """Tell the user something that is no part of the conversation."""
    print(text, file=sys.stderr, flush=True)
