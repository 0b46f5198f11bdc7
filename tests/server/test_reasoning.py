"""Thoughts are split from the answer alike, however the text is cut."""

from __future__ import annotations

import pytest

from gapless.text.reasoning import ReasoningSplitter, thinks_at_end


def split(is_open: bool, *pieces: str) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
    found = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(a for a, _ in found), "".join(b for _, b in found)


@pytest.mark.parametrize(
    ("is_open", "text", "thoughts", "answer"),
    [
        # the model opens
        (False, "<think>\nWell,\n\nso.\n</think>\n\nFour. ", "Well,\n\nso.", "Four. "),
        (False, "\n <think>a</think>b", "a", "b"),
        (False, "<think>\n\n</think>\n\nFour.", "", "Four."),
        (False, "<think>\nWell, ", "Well,", ""),
        # the prompt has opened
        (True, "Well, <i> so.\n</think>\n\nFour.", "Well, <i> so.", "Four."),
        (True, "<think>\nWell\n</think>Four.", "Well", "Four."),
        (True, "\nWell, so </thi", "Well, so </thi", ""),
        (True, "</think>\n\nFour.", "", "Four."),
        # nobody has
        (False, "Four.", "", "Four."),
        (False, " \n", "", " \n"),
        (False, "<thin", "", "<thin"),
        (False, "Say <think>x</think>", "", "Say <think>x</think>"),
        (False, "a</think>b", "", "a</think>b"),
        # one pair of tags counts
        (True, "a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_every_cut_gives_the_same(is_open: bool, text: str, thoughts: str, answer: str) -> None:
    for place in range(len(text) + 1):
        assert split(is_open, text[:place], text[place:]) == (thoughts, answer)
    assert split(is_open, *text) == (thoughts, answer)


def test_thoughts_come_while_they_are_written() -> None:
    splitter = ReasoningSplitter(is_open=True)
    assert splitter.push("I think ") == ("I think", "")
    assert splitter.push("that") == (" that", "")
    assert splitter.push("\n</think>\n\nYes") == ("", "Yes")


def test_what_a_prompt_ends_with() -> None:
    assert thinks_at_end("<|im_start|>assistant\n<think>\n")
    assert not thinks_at_end("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not thinks_at_end("<|im_start|>assistant\n")
