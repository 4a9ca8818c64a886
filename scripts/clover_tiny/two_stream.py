"""The training pass: a clean causal stream and a noisy block stream through the same weights, in one forward.

Layout of a batch: prompts are padded on the left to P, answers on the right to M, so that every answer begins at index P.
The clean stream holds all T = P + M tokens; the noisy stream holds the M answer positions again, cut into blocks, some
tokens replaced by the mask; several noisy copies of one answer may stand one after the other, each cut and masked in its
own way. A noisy position sees the clean context before its block's start, and its own block. It is what `model.py`
computes with a cached state, without any cache (checked by the tests). Padding is all zeros: a zero row stays zero through
every layer, writes nothing into a state, and is masked in the attention.
"""

import torch
import torch.nn.functional as F

from .model import rope_tables

CHUNK = 32


def chunked_delta_rule(q, k, v, g, beta):
    """The gated delta rule over whole sequences from the zero state, in chunks (WY form, arXiv 2412.06464, section 3.3).

    q, k, v [B, heads, T, d], g, beta [B, heads, T], float32. Returns the outputs o, and u, the delta-corrected values with
    S_t = sum_{i<=t} exp(G_t - G_i) k_i u_i^T, where G is the running sum of g: both [B, heads, T, d].
    """
    T = q.shape[2]
    size = min(CHUNK, T)
    pad = -T % size
    q, k, v = (F.pad(t, (0, 0, 0, pad)).unflatten(2, (-1, size)) for t in (q, k, v))
    g, beta = (F.pad(t, (0, pad)).unflatten(2, (-1, size)) for t in (g, beta))
    q = q * q.shape[-1] ** -0.5
    G = g.cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = (G[..., :, None] - G[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    kb = k * beta[..., None]
    system = (kb @ k.transpose(-1, -2) * decay).tril(-1)
    right = torch.cat([v * beta[..., None], kb * G.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system.float(), right, upper=False, unitriangular=True)
    value, erase = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = q @ k.transpose(-1, -2) * decay
    q = q * G.exp()[..., None]
    last = G[..., -1:]
    k = k * (last - G).exp()[..., None]
    S = None
    us, os = [], []
    for c in range(q.shape[2]):
        u = value[:, :, c] if S is None else value[:, :, c] - erase[:, :, c] @ S
        o = scores[:, :, c] @ u
        added = k[:, :, c].transpose(-1, -2) @ u
        if S is not None:
            o = o + q[:, :, c] @ S
            added = added + S * last[:, :, c, :, None].exp()
        S = added
        us.append(u)
        os.append(o)
    return torch.cat(os, dim=2)[:, :, :T], torch.cat(us, dim=2)[:, :, :T]


class Layout:
    """Positions and masks of a batch, shared by all layers.

    real: bool [B, T], the clean tokens that are not padding. starts: int64 [B, copies * M], index (in the clean stream) where
    the block of each noisy position begins, or None for the causal stream alone.
    """

    def __init__(self, config, real, starts, copies=1):
        B, T = real.shape
        self.T, self.starts = T, starts
        position = torch.arange(T)
        mask = real[:, None, :] & (position[None, :, None] >= position[None, None, :])
        if starts is not None:
            self.copies, self.M = copies, starts.shape[1] // copies
            self.P = T - self.M
            own = torch.arange(self.P, T).repeat(copies)
            copy = torch.arange(copies).repeat_interleave(self.M)
            self.in_block = (starts[:, :, None] == starts[:, None, :]) & (copy[:, None] == copy)
            self.before = (position[None, None, :] < starts[:, :, None]) & real[:, None, :]
            bottom = torch.cat([self.before, self.in_block], dim=2)
            mask = torch.cat([F.pad(mask, (0, starts.shape[1])), bottom], dim=1)
            position = torch.cat([position, own])
            self.in_block = self.in_block[:, None]
            self.before = self.before[:, None]
            # lag i reads the noisy stream inside the block and the clean one before it
            self.lag_inside = [(own - lag)[None, :] >= starts for lag in range(config.linear_conv_kernel_dim)]
        self.mask = (mask | torch.eye(mask.shape[1], dtype=torch.bool))[:, None]
        self.cos, self.sin = rope_tables(config, position)


def gdn_two_stream(gdn, h, layout):
    """A GDN layer over h [B, T (+ M), hidden]: the clean part causally, the noisy part as blocks."""
    T = layout.T
    inputs = gdn.in_proj_qkv(h)
    taps = gdn.conv1d.weight[:, 0]
    width = taps.shape[1]
    clean = F.pad(inputs[:, :T], (0, 0, width - 1, 0))
    mixed = gdn.convolve(clean)
    if layout.starts is not None:
        noisy, P, M = inputs[:, T:], layout.P, layout.M
        total = 0
        for lag in range(width):
            shifted = F.pad(noisy[:, : noisy.shape[1] - lag], (0, 0, lag, 0))
            context = clean[:, width - 1 + P - lag : width - 1 + P - lag + M].repeat(1, layout.copies, 1)
            total = total + torch.where(layout.lag_inside[lag][..., None], shifted, context) * taps[:, width - 1 - lag]
        mixed = torch.cat([mixed, F.silu(total)], dim=1)
    q, k, v = gdn.heads(mixed)
    g, beta = gdn.gates(h[:, :T])
    o, u = chunked_delta_rule(q[:, :, :T], k[:, :, :T], v[:, :, :T], g, beta)
    if layout.starts is not None:
        G = g.cumsum(-1)
        until = G.gather(2, (layout.starts - 1).clamp(min=0)[:, None].expand(-1, G.shape[1], -1))
        decay = (until[..., :, None] - G[..., None, :]).masked_fill(~layout.before, float("-inf")).exp()
        qn, kn, vn = q[:, :, T:], k[:, :, T:], v[:, :, T:]
        read = (qn @ k[:, :, :T].transpose(-1, -2) * decay) @ u * gdn.d_k**-0.5
        o = torch.cat([o, gdn.mix(h[:, T:], qn, kn, vn, read, layout.in_block)], dim=2)
    return gdn.finish(o, h)


def attention_two_stream(attention, h, layout):
    """A full-attention layer over both streams."""
    q, k, v, gate = attention.project(h, layout.cos, layout.sin)
    return attention.attend(q, k, v, gate, layout.mask)


def layer_two_stream(layer, x, layout):
    """One decoder layer; returns the residual and the router's choices and probabilities."""
    h = layer.input_layernorm(x)
    if layer.is_linear:
        x = x + gdn_two_stream(layer.linear_attn, h, layout)
    else:
        x = x + attention_two_stream(layer.self_attn, h, layout)
    out, routing = layer.mlp(layer.post_attention_layernorm(x))
    return x + out, routing


def hidden_two_stream(model, clean, real, noisy=None, starts=None, layer_pass=layer_two_stream, copies=1):
    """Final-norm hidden states of both streams, and the routing of every layer.

    clean int64 [B, T]; real bool [B, T]; noisy int64 [B, copies * M] (None: the causal stream alone); starts as noisy.
    `layer_pass` computes one layer (training hands in a compiled one). Returns [B, T (+ copies * M), hidden] and a list of
    (weights, probabilities) [B, T (+ copies * M), experts].
    """
    layout = Layout(model.config, real, starts, copies)
    x = model.model.embed_tokens(clean) * real[..., None]
    if noisy is not None:
        x = torch.cat([x, model.model.embed_tokens(noisy)], dim=1)
    routings = []
    for layer in model.model.layers:
        x, routing = layer_pass(layer, x, layout)
        routings.append(routing)
    return model.model.norm(x), routings
