"""`gapless chat`, driven through pipes and through a terminal of its own, Ctrl-C included."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gapless.cli.chat import COMMANDS, interrupts
from gapless.engine.llm import LLM
from gapless.text.chat import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.conftest import Done, Run

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from gapless.cli import main; sys.exit(main(sys.argv[1:]))"
# the leader of a session without a terminal gets the first that it opens, and its signals
OWN_TERMINAL = "import os; os.close(os.open(os.ttyname(0), os.O_RDWR)); "
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
# an answer without end, as far as a test is concerned
ENDLESS = ("--ignore-eos", "--max-tokens", "4000")
# seconds to wait for what must come
PATIENCE = 60


def chat(run: Run, monkeypatch: pytest.MonkeyPatch, lines: list[str], *argv: str) -> Done:
    """Run a chat over pipes in this process."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return run("chat", *argv)


def program(*argv: str, first: str = "") -> list[str]:
    return [sys.executable, "-c", first + PROGRAM, "chat", "--num-threads", "1", *argv]


def context_used(out: str) -> list[int]:
    return [int(number) for number in re.findall(r"context used: (\d+) of", out)]


def test_answers_go_to_the_output_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat(run, monkeypatch, [QUESTION, "", "   ", f"  {QUESTION} ", "/exit", QUESTION])
    assert done.status == 0
    first, second = done.out.splitlines()
    assert first == ANSWER
    assert second
    assert done.err == ""


def test_history_is_what_later_turns_see(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [QUESTION, "/stats", QUESTION, "/stats", "/reset", "/stats", QUESTION, "/stats"]
    done = chat(run, monkeypatch, lines, "--max-tokens", "30")
    assert done.err == "(a new conversation)\n"
    first, second, third, fourth = context_used(done.out)
    llm = LLM(max_running_requests=1)
    turn = [{"role": "user", "content": QUESTION}]
    answered = [*turn, {"role": "assistant", "content": ANSWER}]
    num_first = len(llm.generate(turn).token_ids)
    assert first == len(llm.encode(turn)) + num_first
    assert second > len(llm.encode([*answered, *turn]))
    assert (third, fourth) == (0, first)
    # and the second answer is that of the whole conversation
    expected = llm.generate([*answered, *turn]).text
    assert done.out.split("\n", 2)[2].startswith(expected)
    assert re.match(
        rf"answers: 1, tokens: {num_first}, tokens/s: [\d.]+, context used: {first} of 4096 ",
        done.out.split("\n")[1],
    )


def test_system_message(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    encode = ChatTemplate.encode

    def record(template: ChatTemplate, tokenizer: Any, messages: Any) -> Any:
        seen.append(messages)
        return encode(template, tokenizer, messages)

    monkeypatch.setattr(ChatTemplate, "encode", record)
    lines = [QUESTION, "/system  Speak French. ", QUESTION, "/reset", QUESTION, "/system", QUESTION]
    done = chat(run, monkeypatch, lines, "--system", "Be brief.", "--max-tokens", "2")
    assert [prompt[0]["content"] for prompt in seen] == [
        "Be brief.",
        "Speak French.",
        "Speak French.",
        QUESTION,
    ]
    roles = [[message["role"] for message in prompt] for prompt in seen]
    turn = ["user", "assistant"]
    assert roles == [
        ["system", "user"], ["system", *turn, "user"], ["system", "user"], [*turn, "user"]
    ]  # fmt: skip
    assert "(system message set)\n" in done.err
    assert "(no system message)\n" in done.err


def test_unknown_commands_name_the_known_ones(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat(run, monkeypatch, ["/rest now", "/", "/resetting", "/HELP"])
    assert done.status == 0
    assert done.out == ""
    lines = done.err.splitlines()
    known = "known: /reset, /system, /stats, /help, /exit; begin with a space to send it as text"
    assert lines == [f"unknown command {n}; {known}" for n in ("/rest", "/", "/resetting", "/HELP")]


def test_help_explains_every_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat(run, monkeypatch, ["/help"])
    assert [line.split()[0] for line in done.out.splitlines()] == list(COMMANDS)


def test_a_slash_behind_a_space_is_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat(run, monkeypatch, [" /exit", "/stats"], "--max-tokens", "1")
    assert "answers: 1," in done.out


def test_outgrown_context_offers_a_reset(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [QUESTION, QUESTION, QUESTION, "/stats", "/reset", QUESTION]
    done = chat(run, monkeypatch, lines, "--max-model-len", "50")
    assert done.status == 0
    # the first answer fits, the second runs into the end, the third turn has no room
    full, left_out, reset = done.err.splitlines()
    assert full == "(the context of 50 tokens is full; /reset begins a new conversation)"
    assert left_out.startswith("this turn is left out: the prompt has ")
    assert left_out.endswith("; /reset begins a new conversation")
    assert reset == "(a new conversation)"
    assert context_used(done.out) == [50]
    assert done.out.splitlines()[-1] == ANSWER


def test_answers_that_break_off_say_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat(run, monkeypatch, [QUESTION], "--max-tokens", "3")
    assert done.out == "The capital of\n"
    assert done.err == "(stopped at --max-tokens 3)\n"


def test_sampling_flags(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat(run, monkeypatch, [QUESTION], "--stop", " of France")
    assert done.out == "The capital\n"
    hot = ("--temperature", "3", "--max-tokens", "8", "--ignore-eos")
    outs = [
        chat(run, monkeypatch, [QUESTION], *hot, "--seed", seed).out for seed in ("1", "1", "2")
    ]
    assert outs[0] == outs[1] != outs[2]
    assert chat(run, monkeypatch, [], "--n", "2").status == 2


def test_mistakes_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat(run, monkeypatch, [], "--model", "/nowhere")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("gapless: ModelError: /nowhere does not exist; want a directory")
    assert done.err.count("\n") == 1


def test_the_first_interrupt_is_kept_and_the_second_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as asked:
        assert not asked
        signal.raise_signal(signal.SIGINT)
        assert asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_over_pipes() -> None:
    lines = f"{QUESTION}\nna\u00efve \x1b[2J\n/nothing\n".encode() + b"\xff\xfe\n/stats"
    done = subprocess.run(
        program("--max-tokens", "12"), input=lines, cwd=ROOT, capture_output=True, check=False,
        timeout=PATIENCE,
    )  # fmt: skip
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert out.startswith(f"{ANSWER}\n")
    assert "> " not in out
    assert "lists the commands" not in out
    assert "answers: 3," in out
    assert "unknown command /nothing; known: " in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_interrupt_over_pipes_goes_on_with_the_next_turn() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        program(*ENDLESS), cwd=ROOT, env=buffered,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            process.stdin.write(f"{QUESTION}\n/stats\n".encode())
            process.stdin.flush()
            # the answer is streamed: its beginning is here long before its end
            assert process.stdout.read(len(ANSWER)).decode() == ANSWER
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 0
    assert err.decode() == "(stopped)\n"
    # a full buffer of text, which is what comes without flushing, is about 2000
    assert 0 < int(re.search(r"answers: 1, tokens: (\d+),", out.decode())[1]) < 1000


class Screen:
    """A terminal with a program in it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C until `text` shows up: readline misses one between looking and waiting."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._seen:
            assert time.monotonic() < deadline, f"on the screen: {self.text!r}"
            self.type("\x03")
            if select.select([self._descriptor], [], [], 1.0)[0]:
                self._read()
        self.wait_for(text)

    def wait_for(self, text: str) -> str:
        """Read until `text` shows up; return what came up to its end since the last call."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._seen:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, left))
            assert ready, f"{text!r} does not come; on the screen: {self.text!r}"
            self._read()
        end = self._seen.index(text) + len(text)
        found, self._seen = self._seen[:end], self._seen[end:]
        return found

    def _read(self) -> None:
        try:
            chunk = os.read(self._descriptor, 4096).decode(errors="replace")
        except OSError:  # how the end of a terminal shows on Linux
            chunk = ""
        assert chunk, f"the program has ended; on the screen: {self.text!r}"
        self._seen += chunk
        self.text += chunk


@contextmanager
def terminal(*argv: str) -> Iterator[tuple[Screen, subprocess.Popen[bytes]]]:
    """Run a chat in a terminal of its own, whose Ctrl-C and Ctrl-D reach it as a user's would."""
    control, device = pty.openpty()
    process = subprocess.Popen(
        program(*argv, first=OWN_TERMINAL), cwd=ROOT, stdin=device, stdout=device, stderr=device,
        env={**os.environ, "TERM": "dumb"}, start_new_session=True,
    )  # fmt: skip
    os.close(device)
    try:
        yield Screen(control), process
    finally:
        process.kill()
        process.wait()
        os.close(control)


def test_in_a_terminal() -> None:
    with terminal(*ENDLESS, "--stop", "Paris.") as (screen, process):
        screen.wait_for("/help lists the commands, Ctrl-D leaves")
        screen.wait_for("> ")
        # at the prompt Ctrl-C leaves nothing and loses nothing
        screen.type("half a line")
        screen.wait_for("half a line")
        screen.interrupt("Ctrl-D or /exit leaves")
        screen.type(f"{QUESTION}\r")
        screen.wait_for("The capital of France is \r\n")
        screen.wait_for("> ")
        screen.type("Tell me a story.\r")
        screen.wait_for("Tell me a story.\r\n")
        screen.wait_for(" ")
        screen.type("\x03")
        screen.wait_for("(stopped)")
        screen.wait_for("> ")
        # the chat goes on, and so does the engine
        screen.type("/stats\r")
        screen.wait_for("answers: 2, ")
        screen.type("/reset\r")
        screen.wait_for("(a new conversation)")
        screen.type(f"{QUESTION}\r")
        screen.wait_for("The capital of France is \r\n")
        screen.wait_for("> ")
        screen.type("\x04")
        assert process.wait(timeout=PATIENCE) == 0
        assert "Traceback" not in screen.text
