"""Programs that were not written here run against the server as they are: lm-eval and guidellm.

They have many requirements of their own, so they live in an environment of their own, made by
`make compat`; where they are missing, these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gapless.assets import demo_checkpoint, heldout
from gapless.eval.accuracy import measure_accuracy
from gapless.eval.data import Document, DocumentSet, ProblemSet, read_set
from gapless.eval.perplexity import encode_documents, measure_perplexity

if TYPE_CHECKING:
    from gapless import LLM
    from tests.server_load.serving import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_PROBLEMS, NUM_TEXTS, MAX_TOKENS = 24, 3, 200
COMPAT = Path(__file__).parents[2] / ".venv-compat" / "bin"

PROBLEMS_TASK = """
task: gapless_problems
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|never|>"], do_sample: false, temperature: 0.0, max_gen_toks: 200}
filter_list:
  - name: last
    filter:
      - {function: regex, regex_pattern: "####[ \\\\t]*([+-]?[0-9]+)", group_select: -1}
      - {function: take_first}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TEXTS_TASK = """
task: gapless_texts
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""


def run_peer(name: str, *arguments: str, folder: Path) -> str:
    """Run a program in `folder` without a network, and return what it printed."""
    program = shutil.which(name, path=f"{COMPAT}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{name} is not installed; run `make compat`")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    environment = {**os.environ, **offline, "OPENAI_API_KEY": "none"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=500, cwd=folder,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_task(
    server: Server, folder: Path, task: str, lines: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Let lm-eval run a task over `lines`; return its scores and samples."""
    data = folder / "data.jsonl"
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    (folder / "task.yaml").write_text(task.replace("FILE", str(data)))
    name = task.split()[1]
    model = {
        "model": "gapless-demo",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(demo_checkpoint()),
        "tokenizer_backend": "huggingface",
        "max_length": 640,
        "num_concurrent": 8,
        "max_retries": 1,
    }
    run_peer(
        "lm_eval", "--model", "local-completions",
        "--model_args", ",".join(f"{key}={value}" for key, value in model.items()),
        "--tasks", name, "--include_path", str(folder),
        "--log_samples", "--output_path", str(folder / "out"),
        folder=folder,
    )  # fmt: skip
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    scores = json.loads(results.read_text())["results"][name]
    return scores, [json.loads(line) for line in samples.read_text().splitlines()]


def test_lm_eval_solves_what_eval_solves(server: Server, llm: LLM, tmp_path: Path) -> None:
    problems = read_set(heldout("level2"), limit=NUM_PROBLEMS)
    assert isinstance(problems, ProblemSet)
    own = measure_accuracy(llm, problems, max_tokens=MAX_TOKENS)
    lines = [
        {
            "prompt": llm.engine.chat_template.render(
                [{"role": "user", "content": problem.question}], add_generation_prompt=True
            ),
            "answer": str(problem.answer),
        }
        for problem in problems.problems
    ]
    scores, samples = run_task(server, tmp_path, PROBLEMS_TASK, lines)
    by_doc = {sample["doc_id"]: sample["resps"][0][0] for sample in samples}
    assert [by_doc[i] for i in range(NUM_PROBLEMS)] == [attempt.text for attempt in own.attempts]
    assert scores["exact_match,last"] == pytest.approx(own.accuracy)
    # neither all right nor all wrong, so that a score says something
    assert 0 < own.num_right < NUM_PROBLEMS


def test_lm_eval_scores_texts_as_eval_does(server: Server, llm: LLM, tmp_path: Path) -> None:
    documents = read_set(heldout("text"), limit=NUM_TEXTS)
    assert isinstance(documents, DocumentSet)
    # of more than a context lm-eval makes windows
    short = DocumentSet("short", tuple(Document(d.text[:1200]) for d in documents.documents))
    _, samples = run_task(
        server, tmp_path, TEXTS_TASK, [{"text": document.text} for document in short.documents]
    )
    # lm-eval predicts the first token too, from the tokenizer's eos token
    (first,) = llm.engine.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    encoded = [[first, *ids] for ids in encode_documents(llm, short, max_tokens=600)]
    own = measure_perplexity(llm, short, encoded)
    found = {sample["doc_id"]: float(sample["resps"][0][0]) for sample in samples}
    assert [found[i] for i in range(NUM_TEXTS)] == pytest.approx(
        [-score.nats for score in own.scores], rel=1e-10
    )


def test_guidellm_runs(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    for kind in ("/v1/chat/completions", "/v1/completions"):
        run_peer(
            "guidellm", "run",
            "--backend", f"kind=openai_http,target={server.url},model=gapless-demo,"
            f"request_format={kind}",
            "--profile", "kind=concurrent,streams=4",
            "--constraint", "kind=max_requests,count=20",
            "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            "--tokenizer", f"kind=hf_auto,model={demo_checkpoint()}",
            "--output", f"kind=json,path={report}",
            "--disable-console-interactive",
            folder=tmp_path,
        )  # fmt: skip
        (found,) = json.loads(report.read_text())["benchmarks"]
        requests = found["requests"]
        assert len(requests["successful"]) == 20
        assert not requests["errored"]
        assert not requests["incomplete"]
