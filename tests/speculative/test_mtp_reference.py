"""The MTP layer's drafts against a plain computation from the stored weights (report B27)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from gapless import LLM, SamplingParams
from gapless.assets import demo_checkpoint
from tests.engine_fixtures import runner_of

HEADS, KV_HEADS, HEAD_DIM, ROTARY, THETA, EPS = 4, 2, 64, 16, 1e5, 1e-6
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class PlainMtp:
    """One pass after another over the whole sequence, no cache, float64."""

    def __init__(self) -> None:
        file = demo_checkpoint() / "model.safetensors"
        self.w = {name: tensor.double() for name, tensor in load_file(file).items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return x * scale * (1 + self.w[name])

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:  # [T, H, D]
        steps = torch.arange(0, ROTARY, 2, dtype=torch.float64) / ROTARY
        angle = positions[:, None] / THETA**steps
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second, rest = x.split([ROTARY // 2, ROTARY // 2, HEAD_DIM - ROTARY], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def attend(self, x: Tensor) -> Tensor:  # [T, D]
        p, count = "mtp.layers.0.self_attn.", x.shape[0]
        both = (x @ self.w[p + "q_proj.weight"].T).view(count, HEADS, 2, HEAD_DIM)
        q, gate = both[:, :, 0], both[:, :, 1]
        k = (x @ self.w[p + "k_proj.weight"].T).view(count, KV_HEADS, HEAD_DIM)
        v = (x @ self.w[p + "v_proj.weight"].T).view(count, KV_HEADS, HEAD_DIM)
        at = torch.arange(count, dtype=torch.float64)
        q = self.rotate(self.norm(q, p + "q_norm.weight"), at)
        k = self.rotate(self.norm(k, p + "k_norm.weight"), at).repeat_interleave(2, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(2, 1))
        return (mixed * gate.sigmoid()).flatten(1) @ self.w[p + "o_proj.weight"].T

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """`hidden[i]` stands one position before `tokens[i]`; hidden states after the norm."""
        embedded = self.w["model.embed_tokens.weight"][tokens]
        joined = torch.cat(
            [
                self.norm(embedded, "mtp.pre_fc_norm_embedding.weight"),
                self.norm(hidden, "mtp.pre_fc_norm_hidden.weight"),
            ],
            -1,
        )
        p = "mtp.layers.0."
        x = joined @ self.w["mtp.fc.weight"].T
        x = x + self.attend(self.norm(x, p + "input_layernorm.weight"))
        y = self.norm(x, p + "post_attention_layernorm.weight")
        gate, up = y @ self.w[p + "mlp.gate_proj.weight"].T, y @ self.w[p + "mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ self.w[p + "mlp.down_proj.weight"].T
        return self.norm(x, "mtp.norm.weight")

    def chain(self, tokens: list[int], hidden: Tensor, count: int) -> list[int]:
        """Draft `count` tokens after `tokens`, whose hidden states [n - 1, D] the trunk gave."""
        ids, states, drafts = list(tokens[1:]), hidden, []
        for _ in range(count):
            out = self(torch.tensor(ids), states)
            drafts.append(int((out[-1] @ self.w["model.embed_tokens.weight"].T).argmax()))
            # further passes feed the layer its own hidden state
            ids, states = [*ids, drafts[-1]], torch.cat([states, out[-1:]])
        return drafts


def test_drafts_of_every_step_equal_a_plain_chain() -> None:
    options = {"max_running_requests": 1, "max_model_len": 128, "dtype": "float64"}
    llm = LLM(**options)
    prompt = llm.encode(QUESTION)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    tokens = [*prompt, *LLM(speculative_num_steps=0, **options).generate(prompt, params).token_ids]
    hidden = _hidden_states(tokens)
    device = runner_of(llm).device
    plain, stream = PlainMtp(), llm.stream(prompt, params)
    num_checked = 0
    for _ in range(5):
        next(stream)
        committed = int(device.table.columns.seq_lens[0])
        found = device.table.window_tokens[0].tolist()
        assert found[0] == tokens[committed]
        expected = plain.chain(tokens[: committed + 1], hidden[:committed], 3)
        assert found[1:] == expected
        num_checked += 1
    stream.close()
    assert num_checked == 5


def _hidden_states(tokens: list[int]) -> Tensor:
    """The trunk's post-final-norm hidden states, from a one-shot prefill."""
    llm = LLM(max_running_requests=1, max_model_len=128, dtype="float64", speculative_num_steps=0)
    device = runner_of(llm).device
    kept: list[Tensor] = []
    forward = device.model.forward

    def keeping(*args: object) -> Tensor:
        kept.append(forward(*args))
        return kept[-1]

    device.model.forward = keeping
    llm.generate(tokens, SamplingParams(temperature=0.0, max_tokens=1))
    return kept[0].clone()
