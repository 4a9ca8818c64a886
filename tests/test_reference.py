"""The PyTorch reference: its causal pass against transformers, its training pass against its cached passes."""

import pytest
import torch

from clover_tiny.model import CloverConfig, CloverModel
from clover_tiny.two_stream import chunked_delta_rule, hidden_two_stream


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(7)
    return CloverModel(
        CloverConfig(vocab_size=200, hidden_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    ).eval()


def test_causal_pass_equals_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = CloverConfig(vocab_size=200, hidden_size=64, model_type="qwen3_5_moe_text", eos_token_id=1, pad_token_id=0)
    model = CloverModel(config).eval()
    for name, parameter in model.named_parameters():
        if "norm.weight" in name:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path, torch.float32)
    theirs = transformers.Qwen3_5MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, 200, (70,))
    state = model.new_state()
    ours = torch.cat([model.causal(tokens[:33], state), model.causal(tokens[33:], state)])
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    assert (ours - expected).abs().max() < 1e-4


def test_block_pass_leaves_the_state(model):
    state = model.new_state()
    model.causal(torch.arange(20), state)
    before = [[t.clone() for t in pair] for pair in state.layers]
    model.block(torch.arange(32), state)
    assert state.length == 20
    assert all(torch.equal(a, b) for old, new in zip(before, state.layers, strict=True) for a, b in zip(old, new, strict=True))


def test_chunked_rule_equals_recurrence():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 150, 16)
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    g, beta = -torch.rand(2, 3, 150), torch.rand(2, 3, 150)
    o, u = chunked_delta_rule(q, k, v, g, beta)
    S = torch.zeros(2, 3, 16, 16)
    for t in range(150):
        S = S * g[:, :, t, None, None].exp()
        delta = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, :, t]))
        S = S + k[:, :, t, :, None] * delta[:, :, None, :]
        assert torch.allclose(u[:, :, t], delta, atol=1e-4)
        assert torch.allclose(o[:, :, t], torch.einsum("bhkv,bhk->bhv", S, q[:, :, t]) / 4, atol=1e-4)


@pytest.mark.parametrize("prompt", [1, 2, 5, 70])
def test_training_pass_equals_cached_passes(model, prompt):
    """Two noisy copies with different block starts, with left padding, against one cached block pass per block."""
    torch.manual_seed(prompt)
    P, M, copies = 75, 40, 2
    sequence = torch.randint(0, 200, (prompt + M,))
    clean = torch.cat([torch.zeros(P - prompt, dtype=torch.int64), sequence])
    real = torch.arange(P + M) >= P - prompt
    cuts = [0, 3, 4, 20, 36], [0, 32]
    noisy = torch.stack([torch.where(torch.rand(M) < 0.5, 199, sequence[prompt:]) for _ in cuts])
    starts = torch.tensor([[max(c for c in each if c <= i) for i in range(M)] for each in cuts]) + P
    with torch.no_grad():
        hidden, _ = hidden_two_stream(model, clean[None], real[None], noisy.view(1, -1), starts.view(1, -1), copies=copies)
        for copy, each in enumerate(cuts):
            for begin, end in zip(each, [*each[1:], M], strict=True):
                state = model.new_state()
                context = model.hidden(sequence[: prompt + begin], state, True)
                block = model.hidden(noisy[copy, begin:end], state, False)
                offset = P + M + copy * M
                assert torch.allclose(hidden[0, P - prompt : P + begin], context, atol=2e-4)
                assert torch.allclose(hidden[0, offset + begin : offset + end], block, atol=2e-4)
