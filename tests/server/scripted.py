"""The HTTP server over an engine that says what a test has written down for it."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import uvicorn

from gapless.assets import demo_checkpoint
from gapless.config.options import EngineOptions
from gapless.core.messages import Update
from gapless.core.request import FinishReason
from gapless.core.sampling_params import SamplingParams
from gapless.engine.limits import PromptLimits
from gapless.engine.wire import Ready
from gapless.server.app import make_app
from gapless.server.options import ServerOptions
from gapless.server.prompts import PromptReader
from gapless.server.site import Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gapless.core.messages import Submission
    from gapless.text.tokenizer import Tokenizer

# what a template may do with tools, earlier calls and thoughts
TEMPLATE = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments | items %} {{ key }}={{ value | tojson }}{% endfor %}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking %}<think>\n{% endif %}{% endif %}"""


class ScriptedStream:
    """Updates with the script's pieces, the last of them with the reason to finish."""

    def __init__(self, engine: ScriptedEngine, submission: Submission) -> None:
        self.request_ids = (submission.request_id,)
        self._engine = engine
        self._pieces = list(engine.pieces)
        self._error: BaseException | None = None
        self.is_open = True

    async def accepted(self) -> None:
        """The engine takes all."""

    async def take(self) -> list[Update]:
        """One piece at a time."""
        await asyncio.sleep(0)
        if self._error is None and not self._pieces:
            self._error = self._engine.error if self.is_open else None
        if self._error is not None:
            raise self._error
        if not self.is_open:
            return []
        text = self._pieces.pop(0)
        ends = not self._pieces and self._engine.error is None
        self.is_open = not ends
        finish = self._engine.finish if ends else None
        stop = self._engine.stop if ends else None
        return [Update(self.request_ids[0], 0, text, (5,), finish, stop, cached_tokens=2)]

    def fail(self, error: BaseException) -> None:
        self._error = error

    def close(self) -> None:
        self.is_open = False


class ScriptedEngine:
    """Stands for an engine process."""

    def __init__(self) -> None:
        self.stats = None
        self.gone = SimpleNamespace(done=lambda: False)
        self.submissions: list[Submission] = []
        self.say("")

    def say(
        self,
        *pieces: str,
        finish: FinishReason = FinishReason.STOP,
        stop: str | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Answer so from now on; with an error, that is how the pieces end."""
        self.pieces, self.finish, self.stop, self.error = pieces, finish, stop, error

    def submit(self, submissions: Sequence[Submission]) -> Any:
        (submission,) = submissions
        self.submissions.append(submission)
        return ScriptedStream(self, submission)


class Scripted:
    """A server on a port, its engine, and what that was asked."""

    def __init__(self, url: str, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
        self.url = url
        self.engine = engine
        self.say = engine.say
        self._tokenizer = tokenizer

    @property
    def prompt(self) -> str:
        """The newest prompt."""
        ids = self.engine.submissions[-1].prompt_ids
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@contextmanager
def scripted_server(template: str | None = TEMPLATE, **options: Any) -> Iterator[Scripted]:
    """Serve in a thread."""
    engine = ScriptedEngine()
    site = Site(ServerOptions(**options), EngineOptions(), engine)
    limits = PromptLimits(4096, 4096, (0,))
    params = SamplingParams(temperature=1.0)
    ready = Ready(str(demo_checkpoint()), limits, params, {"decided": True})
    site.open(ready, PromptReader(ready, template, site.options.tool_call_parser))
    config = uvicorn.Config(make_app(site), log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield Scripted(url, engine, site.reader.tokenizer)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def cuts(text: str, size: int) -> list[str]:
    """Return text in pieces of a size."""
    return [text[i : i + size] for i in range(0, len(text), size)]
