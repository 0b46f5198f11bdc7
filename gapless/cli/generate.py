"""`gapless generate`: continue prompts and print the text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro

from gapless.assets import heldout
from gapless.config.options import EngineOptions
from gapless.core.messages import GenerationResult
from gapless.core.sampling_params import SamplingParams
from gapless.errors import InvalidRequest
from gapless.observe.logging import configure

# word problems that the bundled model is shown with where no prompt is given
NUM_DEMO_PROMPTS = 32


@dataclass(frozen=True)
class Generate:
    """Continue prompts in one batch. With no prompt, the bundled model solves word problems."""

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    """Prompts; each becomes the user's turn of a chat unless --raw is given."""
    file: Path | None = None
    """JSON lines with a `prompt` (text) or `messages` (a chat) each, instead of prompts."""
    raw: bool = False
    """Continue the prompts as they are, without the chat template."""
    json: bool = False
    """Print one JSON object per prompt."""
    log_level: str = "warning"
    """Least severe messages to show: debug, info, warning or error."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    """How tokens are chosen; greedy by default."""
    engine: EngineOptions = field(default_factory=EngineOptions)

    def run(self) -> int:
        """Run the command."""
        from gapless.engine.llm import LLM, Prompt

        configure(self.log_level)
        questions, prompts = self._read()
        llm = LLM(**asdict(self.engine))
        start = time.perf_counter()
        batch: list[Prompt] = list(prompts)
        results: list[GenerationResult] = llm.generate(
            batch, self.sampling, shows_progress=not self.json and sys.stderr.isatty() or len(batch) > 1
        )
        seconds = time.perf_counter() - start
        for question, result in zip(questions, results, strict=True):
            self._print(question, result)
        tokens = sum(result.usage.completion_tokens for result in results)
        print(
            f"{tokens} tokens for {len(results)} prompts in {seconds:.2f} s: "
            f"{tokens / seconds:.1f} tokens/s",
            file=sys.stderr if self.json else sys.stdout,
        )
        return 0

    def _read(self) -> tuple[list[str], Sequence[str | list[dict[str, object]]]]:
        """Questions to show, and prompts to run."""
        if self.file is not None:
            if self.prompts:
                raise InvalidRequest("prompts and --file were both given; give one of them")
            prompts = [_read_line(self.file, i, line) for i, line in _lines(self.file)]
            return [p if isinstance(p, str) else str(p[-1].get("content")) for p in prompts], prompts
        questions = list(self.prompts)
        if not questions:
            if self.engine.model is not None:
                raise InvalidRequest("no prompt was given; pass one or more, or --file")
            lines = _lines(heldout("level1"))[:NUM_DEMO_PROMPTS]
            questions = [json.loads(line)["question"] for _, line in lines]
        if self.raw:
            return questions, questions
        return questions, [[{"role": "user", "content": question}] for question in questions]

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
        raise InvalidRequest(f"{file} cannot be read: {error}; want JSON lines") from error
    return [(i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _read_line(file: Path, number: int, line: str) -> str | list[dict[str, object]]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{file}:{number} is not JSON: {error}; correct the line") from error
    found = value.get("prompt", value.get("messages")) if isinstance(value, dict) else None
    if not isinstance(found, (str, list)):
        raise InvalidRequest(f"{file}:{number}: want an object with `prompt` or `messages`")
    return found
