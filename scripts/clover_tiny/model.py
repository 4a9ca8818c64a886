"""PyTorch reference of the Clover model: the causal pass and the block pass, as plainly as they can be written.

Unbatched and cached: a pass takes token ids [n] and a `State`. It is the oracle of the C++ graph; training runs the same
weights through `two_stream.py`. Sources: the backbone is Qwen3.5/3.6-MoE (transformers `qwen3_5_moe`); the gated delta
rule is arXiv 2412.06464, equation 10; the block pass is this project's reading of the public description of Clover.
"""

import dataclasses
import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn


@dataclasses.dataclass
class CloverConfig:
    """Fields named as in config.json: those of `qwen3_5_moe_text`, then Clover's own."""

    vocab_size: int = 1024
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict = dataclasses.field(
        default_factory=lambda: {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        }
    )
    layer_types: list = dataclasses.field(default_factory=lambda: ["linear_attention", "full_attention"] * 3)
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 128
    num_experts: int = 8
    num_experts_per_tok: int = 2
    bos_token_id: int | None = None
    eos_token_id: int = 1020
    pad_token_id: int = 1019
    mask_token_id: int = 1021
    model_type: str = "clover"
    block_size: int = 32
    block_sizes: list = dataclasses.field(default_factory=lambda: [4, 8, 16, 32])
    shift_logits: bool = True
    confidence_threshold: float = 0.95
    has_block_size_head: bool = False  # not in config.json: the tensors say so

    @property
    def is_clover(self):
        """Whether the checkpoint has the tensors of the block pass."""
        return self.model_type == "clover"

    @classmethod
    def load(cls, folder):
        """Read config.json of a checkpoint folder; fields this reference does not use are left out."""
        raw = json.loads((pathlib.Path(folder) / "config.json").read_text())
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in raw.items() if key in known})

    def save(self, folder):
        """Write config.json into a folder; Clover's own fields only for a Clover checkpoint."""
        raw = dataclasses.asdict(self)
        del raw["has_block_size_head"]
        if not self.is_clover:
            for key in ("block_size", "block_sizes", "shift_logits", "confidence_threshold", "mask_token_id"):
                del raw[key]
        name = "CloverForBlockDiffusion" if self.is_clover else "Qwen3_5MoeForCausalLM"
        raw = {"architectures": [name], **raw, "dtype": "bfloat16"}
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def linear(n_in, n_out):
    """A bias-free linear layer whose outputs have unit variance for unit-variance inputs."""
    layer = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(layer.weight, std=n_in**-0.5)
    return layer


class RMSNorm(nn.Module):
    """RMS norm with a zero-centred weight: x / rms(x) * (1 + w)."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], 1 + self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """The norm of a GDN layer's heads: x / rms(x) * w * silu(gate)."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x, gate):
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps) * F.silu(gate.float())


def rope_tables(config, positions):
    """cos and sin [n, rotary dims] of integer positions [n]; text positions are equal in all MRoPE sections."""
    rope = config.rope_parameters
    dim = int(config.head_dim * rope["partial_rotary_factor"])
    frequencies = rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotary embedding of the first dims of x [..., n, head_dim]."""
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)


class Attention(nn.Module):
    """Full attention with an output gate, q/k norm and partial rotary embedding."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.q_proj = linear(c.hidden_size, c.num_attention_heads * c.head_dim * 2)
        self.k_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def project(self, x, cos, sin):
        """x [..., n, hidden] to q [..., heads, n, d], k and v [..., kv heads, n, d], and the gate [..., n, heads * d]."""
        c = self.config
        q, gate = self.q_proj(x).unflatten(-1, (c.num_attention_heads, 2 * c.head_dim)).chunk(2, dim=-1)
        k, v = (p(x).unflatten(-1, (c.num_key_value_heads, c.head_dim)).transpose(-2, -3) for p in (self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q).transpose(-2, -3), cos, sin)
        return q, rotate(self.k_norm(k), cos, sin), v, gate.flatten(-2)

    def attend(self, q, k, v, gate, mask):
        """Attention over the keys that `mask` [..., n_q, n_k] (bool) allows, gated and projected: [..., n_q, hidden]."""
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = (t.repeat_interleave(groups, dim=-3) for t in (k, v))
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        return self.o_proj(out.transpose(-2, -3).flatten(-2) * gate.sigmoid())

    def cached(self, x, past, causal):
        """One pass over x [n, hidden] after `past` (k, v); returns the output and the keys and values with x's added."""
        n, start = x.shape[0], past[0].shape[1]
        q, k, v, gate = self.project(x, *rope_tables(self.config, torch.arange(start, start + n)))
        k, v = (torch.cat([old, new], dim=1) for old, new in zip(past, (k, v), strict=True))
        mask = torch.ones(n, start + n, dtype=torch.bool)
        return self.attend(q, k, v, gate, mask.tril(start) if causal else mask), (k, v)


class GatedDeltaNet(nn.Module):
    """Gated delta net: a recurrent state in the causal pass, a memory read-out beside in-block attention in the block pass."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.n_k, self.n_v = c.linear_num_key_heads, c.linear_num_value_heads
        self.d_k, self.d_v = c.linear_key_head_dim, c.linear_value_head_dim
        self.key_dim, self.value_dim = self.n_k * self.d_k, self.n_v * self.d_v
        self.channels = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = linear(c.hidden_size, self.channels)
        self.in_proj_z = linear(c.hidden_size, self.value_dim)
        self.in_proj_b = linear(c.hidden_size, self.n_v)
        self.in_proj_a = linear(c.hidden_size, self.n_v)
        self.conv1d = nn.Conv1d(self.channels, self.channels, c.linear_conv_kernel_dim, groups=self.channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.n_v))
        self.A_log = nn.Parameter(torch.empty(self.n_v).uniform_(0.1, 8).log())
        self.norm = GatedRMSNorm(self.d_v, c.rms_norm_eps)
        self.out_proj = linear(self.value_dim, c.hidden_size)
        if c.is_clover:
            self.mem_gate = nn.Linear(c.hidden_size, self.n_v)
            self.block_scale = nn.Parameter(torch.full((self.n_v,), 4.0))

    def convolve(self, inputs):
        """Causal short convolution and SiLU: inputs [..., kernel - 1 + n, channels] to [..., n, channels]."""
        taps = self.conv1d.weight[:, 0]
        n = inputs.shape[-2] - taps.shape[1] + 1
        return F.silu(sum(inputs[..., i : i + n, :] * taps[:, i] for i in range(taps.shape[1])))

    def heads(self, mixed):
        """Convolved channels [..., n, channels] to q, k (L2-normalised, one per value head) and v: [..., heads, n, d], float32."""
        q, k, v = mixed.float().split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k = (t.unflatten(-1, (self.n_k, self.d_k)).transpose(-2, -3) for t in (q, k))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(self.n_v // self.n_k, dim=-3) for t in (q, k))
        return q, k, v.unflatten(-1, (self.n_v, self.d_v)).transpose(-2, -3)

    def gates(self, x):
        """Log decay g <= 0 and write strength beta of each position: [..., heads, n], float32."""
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return g.transpose(-1, -2), self.in_proj_b(x).float().sigmoid().transpose(-1, -2)

    def finish(self, o, x):
        """Gated norm and output projection of head outputs o [..., heads, n, d_v]."""
        z = self.in_proj_z(x).unflatten(-1, (self.n_v, self.d_v))
        return self.out_proj(self.norm(o.transpose(-2, -3), z).flatten(-2))

    def mix(self, x, q, k, v, read, mask=None):
        """Softmax mix of the memory read-out [..., heads, n, d_v] and the block's own values.

        Logits: mem_gate of x for the read-out, block_scale * (q . k_j) for position j of the block, where `mask` allows it.
        """
        memory = self.mem_gate(x).float().transpose(-1, -2).unsqueeze(-1)
        scores = self.block_scale[:, None, None] * (q @ k.transpose(-1, -2))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        p = torch.cat([memory, scores], dim=-1).softmax(-1)
        return p[..., :1] * read + p[..., 1:] @ v

    def causal(self, x, past):
        """Causal pass over x [n, hidden] from `past` = (conv inputs [kernel - 1, channels], S [heads, d_k, d_v])."""
        conv, S = past
        inputs = torch.cat([conv, self.in_proj_qkv(x)])
        q, k, v = self.heads(self.convolve(inputs))
        g, beta = self.gates(x)
        out = []
        for t in range(x.shape[0]):
            S = S * g[:, t, None, None].exp()
            delta = beta[:, t, None] * (v[:, t] - torch.einsum("hkv,hk->hv", S, k[:, t]))
            S = S + k[:, t, :, None] * delta[:, None, :]
            out.append(torch.einsum("hkv,hk->hv", S, q[:, t]) * self.d_k**-0.5)
        return self.finish(torch.stack(out, dim=1), x), (inputs[-conv.shape[0] :], S)

    def block(self, x, past):
        """Block pass over x [N, hidden]: the state is read, never written."""
        conv, S = past
        q, k, v = self.heads(self.convolve(torch.cat([conv, self.in_proj_qkv(x)])))
        return self.finish(self.mix(x, q, k, v, q @ S * self.d_k**-0.5), x)


class Router(nn.Module):
    """Softmax over all experts; the top k keep their probabilities, renormalised to sum to one."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size) * config.hidden_size**-0.5)

    def forward(self, x):
        """x [..., hidden] to (expert weights [..., experts], zero where not chosen; all probabilities [..., experts])."""
        probabilities = F.linear(x, self.weight).float().softmax(-1)
        top, index = probabilities.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, index, top / top.sum(-1, keepdim=True))
        return weights, probabilities


class Experts(nn.Module):
    """The experts' weights, stacked as hub checkpoints have them. All experts are computed: simple, and exact."""

    def __init__(self, config):
        super().__init__()
        n, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.randn(n, 2 * inner, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(n, hidden, inner) * inner**-0.5)

    def forward(self, x, weights):
        gate, up = F.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (weights.shape[-1], -1)).chunk(2, dim=-1)
        inner = F.silu(gate) * up * weights[..., None].to(up.dtype)
        return F.linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class SharedExpert(nn.Module):
    """The expert that every token passes through."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.shared_expert_intermediate_size)
        self.up_proj = linear(config.hidden_size, config.shared_expert_intermediate_size)
        self.down_proj = linear(config.shared_expert_intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoe(nn.Module):
    """Top-k experts, and the shared expert behind its sigmoid gate."""

    def __init__(self, config):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_expert = SharedExpert(config)
        self.shared_expert_gate = linear(config.hidden_size, 1)

    def forward(self, x):
        """x [..., hidden] to the output [..., hidden] and the router's probabilities and choices."""
        weights, probabilities = self.gate(x)
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return self.experts(x, weights) + shared, (weights, probabilities)


class Layer(nn.Module):
    """One decoder layer: token mixer, then experts, both behind a norm and added to the residual."""

    def __init__(self, config, kind):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.is_linear = kind == "linear_attention"
        self.mlp = SparseMoe(config)

    def cached(self, x, past, causal):
        """One pass over the residual x [n, hidden]; returns it updated, and what a causal pass would leave as the state."""
        h = self.input_layernorm(x)
        if not self.is_linear:
            out, new = self.self_attn.cached(h, past, causal)
        elif causal:
            out, new = self.linear_attn.causal(h, past)
        else:
            out, new = self.linear_attn.block(h, past), past
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x))[0], new


@dataclasses.dataclass
class State:
    """What a context leaves behind: per layer (conv inputs, S) or (k, v), and the number of tokens."""

    layers: list
    length: int = 0


class Backbone(nn.Module):
    """Embedding, layers and final norm, named as in the checkpoint (`model.`)."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_clover and config.has_block_size_head:
            self.block_size_head = nn.Linear(config.hidden_size, len(config.block_sizes))


class CloverModel(nn.Module):
    """The whole model. `causal` and `block` are the two passes; both run in the weights' dtype (float32 when loaded)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def new_state(self):
        """The empty state."""
        c = self.config
        layers = []
        for layer in self.model.layers:
            if layer.is_linear:
                gdn = layer.linear_attn
                layers.append((torch.zeros(c.linear_conv_kernel_dim - 1, gdn.channels), torch.zeros(gdn.n_v, gdn.d_k, gdn.d_v)))
            else:
                layers.append((torch.zeros(c.num_key_value_heads, 0, c.head_dim),) * 2)
        return State(layers)

    def hidden(self, tokens, state, causal):
        """Final-norm hidden states [n, hidden] of tokens [n] after a state; a causal pass updates the state in place."""
        x = self.model.embed_tokens(tokens)
        for i, layer in enumerate(self.model.layers):
            x, new = layer.cached(x, state.layers[i], causal)
            if causal:
                state.layers[i] = new
        if causal:
            state.length += len(tokens)
        return self.model.norm(x)

    @torch.no_grad()
    def causal(self, tokens, state):
        """Causal pass: tokens int64 [n] to logits float32 [n, vocab]; the state then ends after these tokens."""
        return self.lm_head(self.hidden(tokens, state, True)).float()

    @torch.no_grad()
    def block(self, tokens, state):
        """Block pass: tokens int64 [N], undecided ones as the mask id, to logits float32 [N, vocab]; the state stays."""
        return self.lm_head(self.hidden(tokens, state, False)).float()

    def save_pretrained(self, folder, dtype=torch.bfloat16):
        """Write config.json and model.safetensors (all floating tensors in `dtype`) into a folder."""
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        self.config.save(folder)
        tensors = {key: value.detach().to(dtype).contiguous() for key, value in self.state_dict().items()}
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file(tensors, str(pathlib.Path(folder) / "model.safetensors"), metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder):
        """Read a checkpoint folder written by `save_pretrained` (one safetensors file), as float32."""
        config = CloverConfig.load(folder)
        tensors = {key: value.float() for key, value in load_file(str(pathlib.Path(folder) / "model.safetensors")).items()}
        config.has_block_size_head = "model.block_size_head.weight" in tensors
        model = cls(config)
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        model.load_state_dict(tensors)
        return model.eval()
