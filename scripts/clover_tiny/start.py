"""The start of training: weights from which copying is learned in minutes instead of hours.

Tied embeddings of a small standard deviation, scaled up at the input; one embedding dimension constant, as a bias for the
gates; and an induction-like ("mimetic", arXiv 2305.09828) first pair of layers: the first GDN layer hands on the tokens
one and two places back and remembers what followed what; the first attention layer looks for the place where the token
before equals the current one.
"""

import torch
import torch.nn.functional as F
from torch import nn

EMBEDDING_STD = 0.03
INPUT_SCALE = 30.0


class TiedEmbedding(nn.Module):
    """Input embedding that is the output matrix times INPUT_SCALE."""

    def __init__(self, head):
        super().__init__()
        self.head = [head]  # in a list: the head's weight is a parameter of the model once, not twice

    def forward(self, tokens):
        return F.embedding(tokens, self.head[0].weight) * INPUT_SCALE


def tie(model):
    """Tie the model's input embedding to its output matrix, for training."""
    model.model.embed_tokens = TiedEmbedding(model.lm_head)


def untied_weights(model):
    """The state dict of a tied model in checkpoint form: the input embedding written out."""
    weights = dict(model.state_dict())
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] * INPUT_SCALE
    return weights


def lagged(conv, channels, weights):
    """Set a short convolution's taps for a slice of channels: weights {lag: value}."""
    taps = torch.zeros(conv.kernel_size[0])
    for lag, value in weights.items():
        taps[-1 - lag] = value
    conv.weight.data[channels, 0] = taps


@torch.no_grad()
def initialise(model):
    """Overwrite a fresh model's weights with the start described above. The first two layers must be GDN, attention."""
    head = model.lm_head.weight
    head.normal_(std=EMBEDDING_STD)
    head[:, 0] = 4 * EMBEDDING_STD
    for layer in model.model.layers:
        layer.mlp.gate.weight.mul_(0.5)
        layer.mlp.experts.down_proj.mul_(0.5)
        layer.mlp.shared_expert.down_proj.weight.mul_(0.5)
        if not layer.is_linear:
            layer.self_attn.o_proj.weight.mul_(0.5)
            continue
        gdn = layer.linear_attn
        gdn.out_proj.weight.mul_(0.5)
        gdn.in_proj_a.weight.mul_(0.1)
        gdn.in_proj_b.weight.mul_(0.1)
        gdn.in_proj_z.weight[:, 0] = 0.3
        gdn.A_log.copy_(torch.linspace(0.03, 0.5, gdn.n_v).log())
        gdn.dt_bias.fill_(-4.0)
        gdn.mem_gate.weight.mul_(0.3)
        lagged(gdn.conv1d, slice(None), {0: 0.8, 1: 0.3, 2: 0.2, 3: 0.1})
        gdn.conv1d.weight.add_(0.05 * torch.randn_like(gdn.conv1d.weight))
    gdn, attention = model.model.layers[0].linear_attn, model.model.layers[1].self_attn
    d, hidden = gdn.d_v, gdn.config.hidden_size
    q, k, v = gdn.in_proj_qkv.weight.split([gdn.key_dim, gdn.key_dim, gdn.value_dim])
    k.copy_(q)
    half_keys, half_values = gdn.key_dim // 2, gdn.n_v // 2
    offset = 2 * gdn.key_dim
    lagged(gdn.conv1d, slice(0, 2 * gdn.key_dim), {0: 1.0})
    for base, shift in ((half_keys, 0), (gdn.key_dim + half_keys, 1)):
        lagged(gdn.conv1d, slice(base, base + half_keys), {shift: 0.8, shift + 1: 0.6, shift + 2: 0.4})
    for h in range(gdn.n_v):
        lagged(gdn.conv1d, slice(offset + h * d, offset + (h + 1) * d), {h + 1 if h < half_values else 0: 1.0})
    gdn.A_log[:half_values] = 1.4
    gdn.dt_bias[:half_values] = 2.0
    gdn.in_proj_z.weight.mul_(0.3)
    gdn.in_proj_z.weight[:, 0] = 0.6
    out = gdn.out_proj.weight.view(hidden, gdn.n_v, d)
    values = v.view(gdn.n_v, d, hidden)
    for h in range(gdn.n_v):
        if h < half_values:
            nn.init.orthogonal_(out[:, h])
        else:
            out[:, h] = values[h].T
    # the first key/value head of the attention layer matches "the token before me" against "myself"; its unrotated dims do
    c = gdn.config
    turned = int(c.head_dim * c.rope_parameters["partial_rotary_factor"])
    content = torch.randn(c.head_dim - turned, hidden) * hidden**-0.5
    attention.k_proj.weight[:turned] *= 0.3
    attention.k_proj.weight[turned : c.head_dim] = 4 * content @ values[0].T @ out[:, 0].T
    queries = attention.q_proj.weight.view(c.num_attention_heads, 2, c.head_dim, hidden)
    outputs = attention.o_proj.weight.view(hidden, c.num_attention_heads, c.head_dim)
    attention.v_proj.weight[:, 0] = 0
    for h in range(c.num_attention_heads // c.num_key_value_heads):
        queries[h, 0, :turned] *= 0.3
        queries[h, 0, turned:] = content
        queries[h, 1] *= 0.3
        queries[h, 1, :, 0] = 0.5
        outputs[:, h] = attention.v_proj.weight[: c.head_dim].T
