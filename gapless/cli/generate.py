"""`gapless generate`: continue prompts and print the text."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path  # noqa: TC003 (annotations are read when parsing)
from typing import TYPE_CHECKING

import tyro  # noqa: TC002 (annotations are read when parsing)

from gapless.assets import heldout
from gapless.config.options import EngineOptions
from gapless.core.grammar import Grammar  # noqa: TC001 (annotations are read when parsing)
from gapless.core.sampling_params import SamplingParams
from gapless.errors import InvalidRequest
from gapless.observe.logging import configure

if TYPE_CHECKING:
    from gapless.core.messages import GenerationResult

# word problems that the bundled model is shown with where no prompt is given
NUM_DEMO_PROMPTS = 32


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingParams):
    """How tokens are chosen; --seed, an option of the engine, makes it reproducible."""

    temperature: float = 0.0
    """Divides the logits; 0, the default, is greedy."""
    # the engine's --seed gives every prompt a seed of its own
    seed: tyro.conf.SuppressFixed[tyro.conf.Fixed[int | None]] = None
    grammar: tyro.conf.Suppress[Grammar | None] = None


@dataclass(frozen=True)
class Conversation:
    """A prompt, and the part of it to show."""

    shown: str
    prompt: str | list[dict[str, object]]


@dataclass(frozen=True)
class Generate:
    """Continue prompts in one batch. With no prompt, the bundled model solves word problems."""

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    """Prompts; each becomes the user's turn of a chat unless --raw is given."""
    file: Path | None = None
    """JSON lines with a `prompt` (text) or `messages` (a chat) each, instead of prompts."""
    raw: bool = False
    """Continue each prompt as it is, without the chat template."""
    json: bool = False
    """Print one JSON object per prompt."""
    log_level: str = "warning"
    """Least severe messages to show: debug, info, warning or error."""
    sampling: Sampling = field(default_factory=Sampling)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def run(self) -> int:
        """Run the command."""
        from gapless.engine.llm import LLM, Prompt

        configure(self.log_level)
        conversations = self._read()
        llm = LLM(**asdict(self.engine))
        start = time.perf_counter()
        batch: list[Prompt] = [conversation.prompt for conversation in conversations]
        results: list[GenerationResult] = llm.generate(
            batch, self.sampling, shows_progress=not self.json and len(batch) > 1
        )
        seconds = time.perf_counter() - start
        for conversation, result in zip(conversations, results, strict=True):
            self._print(conversation.shown, result)
        tokens = sum(result.usage.completion_tokens for result in results)
        cached = sum(result.usage.cached_tokens for result in results)
        asked = sum(result.usage.prompt_tokens for result in results)
        print(
            f"{tokens} tokens for {len(results)} prompts in {seconds:.2f} s: "
            f"{tokens / seconds:.1f} tokens/s"
            + (f", {cached} of {asked} prompt tokens cached" if cached else ""),
            file=sys.stderr if self.json else sys.stdout,
        )
        return 0

    def _read(self) -> list[Conversation]:
        """Chats to continue, or with --raw texts."""
        if self.file is not None:
            if self.prompts:
                raise InvalidRequest("prompts and --file were both given; give one of them")
            found = [self._parse(f"{self.file}:{i}", line) for i, line in _lines(self.file)]
            if not found:
                raise InvalidRequest(f"{self.file} has no line; want a `prompt` or `messages` each")
            return found
        questions = list(self.prompts)
        if not questions:
            if self.engine.model is not None:
                raise InvalidRequest("no prompt was given; pass one or more, or --file")
            lines = _lines(heldout("level1"))[:NUM_DEMO_PROMPTS]
            questions = [json.loads(line)["question"] for _, line in lines]
        return [self._wrap(question) for question in questions]

    def _parse(self, where: str, line: str) -> Conversation:
        try:
            value = json.loads(line)
        # also for integers that are too long to convert
        except ValueError as error:
            raise InvalidRequest(f"{where} is not JSON: {error}; correct the line") from error
        match value:
            case {"prompt": str(prompt)} if "messages" not in value:
                return self._wrap(prompt)
            case {"messages": [*messages, dict(last)]} if "prompt" not in value:
                if self.raw:
                    raise InvalidRequest(f"{where} has a chat, and --raw was given; want `prompt`")
                return Conversation(str(last.get("content")), [*messages, last])
        raise InvalidRequest(
            f"{where}: want an object with either `prompt`, a text, or `messages`, a list of at "
            "least one chat message"
        )

    def _wrap(self, text: str) -> Conversation:
        return Conversation(text, text if self.raw else [{"role": "user", "content": text}])

    def _print(self, question: str, result: GenerationResult) -> None:
        if self.json:
            print(json.dumps({"prompt": question, **asdict(result)}))
            return
        print(f"> {question}")
        for completion in result.completions:
            print(f"{completion.text}\n")


def _lines(file: Path) -> list[tuple[int, str]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}; want JSON lines in UTF-8") from error
    # JSON strings may hold U+2028 and the like, at which splitlines() would cut
    return [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
