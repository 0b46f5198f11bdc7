"""What a speculative step launches beside the model: its kernels, and hardly anything else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.ops.sampling import SamplingMode
from gapless.runner import decode
from gapless.runner.graphs import StepGraph
from tests.runner.launches import count_launches

PROMPTS = [[5, 6, 7, 8, 9], [20, 21, 22]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
# over the window, and over each of three drafts
SAMPLING = ("_maximum_kernel", "_survey_kernel", "_collect_kernel", "_choose_kernel")
EXPECTED = Counter(dict.fromkeys(SAMPLING, 4)) + Counter(
    {
        "_window_indices_kernel": 1,
        "_settle_windows_kernel": 1,
        "_extend_indices_kernel": 1,
        "_draft_indices_kernel": 1,
        # hidden states are kept, and drafts stored
        "index_copy_": 2,
        # hidden states of the newest tokens
        "index_select": 1,
        # drafts side by side
        "stack": 1,
    }
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted here")
def test_a_step_launches_no_more_than_this(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(max_running_requests=2, max_model_len=200, dtype="float32")
    expected = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
    llm.flush_cache()
    launches, launch, found = count_launches(monkeypatch), StepGraph.launch, []

    def counted(graph: StepGraph) -> Any:
        launches.found.clear()
        with launches:
            out = launch(graph)
        found.append(launches.by_name())
        return out

    monkeypatch.setattr(StepGraph, "launch", counted)
    # as on a GPU, where graphs for drawn rows serve greedy ones too
    monkeypatch.setattr(decode, "sampling_mode", lambda _: SamplingMode.DRAWN)
    tokens = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
    monkeypatch.undo()
    assert tokens == expected
    assert found
    for names in found:
        assert names == EXPECTED
