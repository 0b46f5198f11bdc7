"""Models, tokens, the cache, metrics, the OpenAPI document."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from gapless.server import schemas
from gapless.server.app import ENDPOINTS
from tests.server.conftest import MODEL, QUESTION, stats

if TYPE_CHECKING:
    import httpx2
    import openai

    from gapless import LLM

CHAT = {"messages": QUESTION, "max_tokens": 20}


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "gapless")
    assert model.max_model_len == 256
    assert client.models.retrieve(MODEL) == model


def test_tokens_there_and_back(http: httpx2.Client, llm: LLM) -> None:
    text = "Ann has 4 boxes, é🙂<|im_end|>"
    found = http.post("/tokenize", json={"prompt": text}).json()
    assert found == {"tokens": llm.encode(text), "count": len(llm.encode(text)),
                     "max_model_len": 256}  # fmt: skip
    back = http.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": text}
    plain = {"tokens": found["tokens"], "skip_special_tokens": True}
    assert http.post("/detokenize", json=plain).json()["prompt"] == text.removesuffix("<|im_end|>")
    chat = http.post("/tokenize", json={"messages": QUESTION}).json()
    assert chat["tokens"] == llm.encode(QUESTION)
    bare = {"messages": QUESTION, "add_generation_prompt": False}
    assert http.post("/tokenize", json=bare).json()["count"] < chat["count"]
    assert http.post("/tokenize", json={"prompt": "a" * 5000}).json()["count"] > 256


def test_flushing_empties_the_pools(http: httpx2.Client) -> None:
    http.post("/v1/chat/completions", json=CHAT)
    held = stats(http)
    assert held["num_free_pages"] < held["num_pages"]
    assert http.post("/flush_cache").json()["num_tokens"] > 16
    free = stats(http)
    assert free["num_free_pages"] == free["num_pages"]
    assert free["num_free_rows"] == free["num_state_rows"]
    assert http.post("/flush_cache").json() == {"num_tokens": 0}


def metrics(http: httpx2.Client) -> dict[str, float]:
    """Return the values of all metrics, those with labels of their own under name{label=value}."""
    values = {}
    for line in http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[re.sub(r',?model_name="[^"]*"|{}', "", name).replace("{,", "{")] = float(value)
    return {name.removesuffix("{}"): value for name, value in values.items()}


def test_metrics_count_what_happened(http: httpx2.Client, client: openai.OpenAI) -> None:
    stats(http)
    before = metrics(http)
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, n=2, seed=1)
    stats(http)
    after = metrics(http)

    def grown(name: str) -> float:
        return after[f"gapless:{name}"] - before.get(f"gapless:{name}", 0)

    usage = answer.usage
    assert grown("prompt_tokens_total") == usage.prompt_tokens
    assert grown("generation_tokens_total") == usage.completion_tokens
    assert grown("request_generation_tokens_sum") == usage.completion_tokens
    assert grown('request_success_total{finished_reason="stop"}') == 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds",
                 "request_queue_time_seconds"):  # fmt: skip
        assert grown(f"{name}_count") == 2
    # those that come with the first are none's successors
    assert 0 < grown("inter_token_latency_seconds_count") <= usage.completion_tokens - 2
    assert 0 < grown("time_to_first_token_seconds_sum") < grown("e2e_request_latency_seconds_sum")
    assert grown("prefix_cache_queries_total") == 2 * usage.prompt_tokens
    drafted, accepted = (
        grown(f"spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted")
    )
    assert 0 < accepted < drafted == 3 * grown("spec_decode_num_drafts_total")
    assert grown("ring_flushes_total") > 0
    assert grown("engine_plan_seconds_total") > 0
    assert after["gapless:num_requests_running"] == after["gapless:num_requests_waiting"] == 0
    assert 0 < after["gapless:kv_cache_usage_perc"] < 1
    assert after["gapless:event_loop_lag_seconds_count"] > 0


def test_reasons_to_wait_are_labels(http: httpx2.Client, client: openai.OpenAI) -> None:
    name = 'gapless:request_wait_steps_total{reason="slots"}'
    before = metrics(http)[name]
    client.completions.create(model=MODEL, prompt=["One", "Two"], n=4, max_tokens=8)
    stats(http)
    assert metrics(http)[name] > before


def test_server_info_keeps_no_secret_and_no_option_back(http: httpx2.Client) -> None:
    found = http.get("/server_info").json()
    assert found["engine"]["max_model_len"] == 256
    assert found["server"]["drain_seconds"] == 30
    assert "api_key" not in found["server"]
    assert found["phase"] == "ready"
    assert found["num_open_requests"] == 1


def test_health_and_readiness(http: httpx2.Client) -> None:
    assert http.get("/health").json() == http.get("/ready").json() == {"status": "ready"}


def test_the_document_names_every_endpoint(http: httpx2.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    found = {(m.upper(), path) for path, item in document["paths"].items() for m in item}
    assert found == {(e.method, e.path.replace(":path", "")) for e in ENDPOINTS}
    text = http.get("/openapi.json").text
    names = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert names <= set(document["components"]["schemas"])
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False


def strict(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a type that has the fields of another, and refuses all others."""
    fields = [(f.name, f.type, f.default) if f.default is not msgspec.NODEFAULT
              else (f.name, f.type) for f in msgspec.structs.fields(kind)]  # fmt: skip
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True, kw_only=True)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1},
         schemas.ChatResponse),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True},
         schemas.CompletionResponse),
        ("/tokenize", {"prompt": "a"}, schemas.TokenizeResponse),
        ("/abort", {"abort_all": True}, schemas.AbortResponse),
    ],
)  # fmt: skip
def test_answers_are_what_the_document_says(
    http: httpx2.Client, path: str, body: dict[str, Any], kind: type[msgspec.Struct]
) -> None:
    answer = http.post(path, json=body)
    msgspec.json.decode(answer.content, type=strict(kind))


def test_optional_packages_are_optional() -> None:
    script = """
import sys
for name in ("fla", "flashinfer", "causal_conv1d", "transformers", "openai", "uvloop"):
    sys.modules[name] = None
import gapless.server.lifecycle
from gapless import LLM, SamplingParams
llm = LLM(max_running_requests=1, max_model_len=64)
assert llm.generate("Two", SamplingParams(max_tokens=4)).text
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_server_loads_no_torch() -> None:
    modules = "gapless.cli.serve, gapless.server.lifecycle"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
