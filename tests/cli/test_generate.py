"""`gapless generate`: where prompts come from and what is printed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from gapless.assets import heldout

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

SMALL = ("--max-running-requests", "32", "--max-model-len", "256")
QUESTION = (
    "Mia earns $15 an hour. She works 3 days, 2 hours each day, and then pays $50 for rent. "
    "How much money is left?"
)
SUMMARY = r"(\d+) tokens for (\d+) prompts in [\d.]+ s: [\d.]+ tokens/s\n"


def test_without_arguments_the_demo_runs(run: Run) -> None:
    done = run("generate", "--max-tokens", "2", *SMALL)
    assert done.status == 0
    questions = [
        json.loads(line)["question"] for line in heldout("level1").read_text().splitlines()[:32]
    ]
    assert [line[2:] for line in done.out.splitlines() if line.startswith("> ")] == questions
    assert re.search(SUMMARY, done.out).groups() == ("64", "32")
    # the progress bar
    assert "32/32" in done.err


def test_answers_and_speed_are_printed(run: Run) -> None:
    done = run("generate", QUESTION, *SMALL)
    assert done.status == 0
    assert done.out.startswith(f"> {QUESTION}\n")
    assert "= 90 dollars." in done.out
    assert "\n#### 40\n\n" in done.out
    assert re.search(SUMMARY + "$", done.out)
    assert done.err == ""


def test_json_is_one_object_a_line(run: Run) -> None:
    done = run("generate", "a", QUESTION, "--json", "--max-tokens", "3", "--n", "2", *SMALL)
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [item["prompt"] for item in found] == ["a", QUESTION]
    assert [[len(c["token_ids"]) for c in item["completions"]] for item in found] == [[3, 3]] * 2
    assert found[1]["completions"][0]["text"].startswith("Mia")
    assert re.fullmatch(SUMMARY, done.err).groups() == ("12", "2")


def test_raw_prompts_go_without_the_chat_template(run: Run) -> None:
    chat, raw = (
        json.loads(run("generate", "The", "--json", "--max-tokens", "1", *flags, *SMALL).out)
        for flags in ((), ("--raw",))
    )
    assert len(raw["prompt_token_ids"]) < len(chat["prompt_token_ids"])
    assert raw["prompt_token_ids"][0] in chat["prompt_token_ids"][1:]


def test_file_of_prompts_and_chats(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat.append({"role": "user", "content": "The"})
    items = [{"prompt": "The"}, {"messages": chat[-1:]}, {"messages": chat}]
    file.write_text("\n\n".join(json.dumps(item) for item in items))
    done = run("generate", "--file", str(file), "--json", "--max-tokens", "1", *SMALL)
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [item["prompt"] for item in found] == ["The"] * 3
    assert found[0]["prompt_token_ids"] == found[1]["prompt_token_ids"]
    assert len(found[2]["prompt_token_ids"]) > len(found[1]["prompt_token_ids"])


def test_seed_repeats_samples_that_differ_by_prompt(run: Run) -> None:
    argv = ("generate", "The", "The", "--raw", "--json", "--temperature", "1", "--max-tokens", "6")

    def texts(seed: str) -> list[str]:
        lines = run(*argv, "--seed", seed, *SMALL).out.splitlines()
        return [json.loads(line)["completions"][0]["text"] for line in lines]

    first = texts("3")
    assert first == texts("3")
    assert first != texts("4")
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no line"),
        ("{", "p.jsonl:1 is not JSON"),
        ('{"prompt": "a"}\n{"text": "a"}', "p.jsonl:2: want an object with either `prompt`"),
        ('{"prompt": 3}', "p.jsonl:1: want"),
        ('{"messages": []}', "p.jsonl:1: want"),
        ('{"messages": ["a"]}', "p.jsonl:1: want"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "p.jsonl:1: want"),
        ('["a"]', "p.jsonl:1: want"),
    ],
)
def test_bad_files(run: Run, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    done = run("generate", "--file", str(file))
    assert done.status == 2
    assert message in done.err


def test_contradictions(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    assert "both given" in run("generate", "a", "--file", str(file)).err
    assert "--raw was given" in run("generate", "--raw", "--file", str(file)).err
    assert "no prompt was given" in run("generate", "--model", "somewhere").err
