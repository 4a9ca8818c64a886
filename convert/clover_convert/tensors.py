"""Which checkpoint tensor becomes which GGUF tensor, and how: the name table, and the plan made from it.

Names, shapes and transforms of the backbone follow llama.cpp's `qwen35moe`; those of Clover's own tensors are this
project's reading (see the README): a real checkpoint that differs is met by editing the tables here.
"""

import collections
import dataclasses
import re
from collections.abc import Callable

import numpy as np

from clover_convert import fp8
from clover_convert.folding import folded
from clover_convert.safetensors import READABLE
from clover_cpp.errors import CheckpointError

PREFIX = re.compile(r"model\.language_model\.|language_model\.model\.|language_model\.|model\.|")
# what a checkpoint may hold beyond the text model's weights -> names of its tensors
MTP = "the multi-token-prediction layers"
SKIPPED = {
    "the vision tower": r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.",
    MTP: r"(model\.|language_model\.)*mtp\.",
    "rotary frequencies (computed anew)": r".*\.rotary_emb\.inv_freq$",
    "scales of activations and of the cache (which stay as they are)": r".*([._](input|activation)_scale(_inv)?|\.[kv]_scale)$",
}
ANY_SKIPPED = re.compile("|".join(f"({pattern})" for pattern in SKIPPED.values()))
CONV = "linear_attn.conv1d.weight"  # MLX turns its last two dimensions round, and then stores the norms with the 1 added
LAYER_NUMBER = re.compile(r"layers\.([0-9]{1,9})\.")


def skipped(tensors, config):
    """What of a checkpoint's tensors (by name) is not converted, as lines of text."""
    counts = collections.Counter(_skipped(name, config) for name in tensors)
    return [f"{what} ({counts[what]} tensors)" for what in SKIPPED if counts[what]]


def _skipped(name, config):
    """Why a tensor is not converted (a key of `SKIPPED`), or None."""
    number = LAYER_NUMBER.match(_short(name))
    if number and 0 <= int(number[1]) - config.num_hidden_layers < config.mtp_layers:
        return MTP
    if not ANY_SKIPPED.match(name):
        return None
    return next(what for what, pattern in SKIPPED.items() if re.match(pattern, name))


def _short(name):
    """A name without what goes before the text model's names."""
    return name[PREFIX.match(name).end() :]


def value_head_order(c):
    """Value heads in llama.cpp's order: checkpoints pair value head h with key head h // r, llama.cpp with h % n_k."""
    per_key = c.linear_num_value_heads // c.linear_num_key_heads
    return [key * per_key + i for i in range(per_key) for key in range(c.linear_num_key_heads)]


def head_ranges(c, size, first=0):
    """Row ranges of the value heads, `size` rows each from row `first` on, in llama.cpp's order."""
    return [(first + head * size, first + (head + 1) * size) for head in value_head_order(c)]


# Row orders: config -> ranges of source rows, in the order in which they are written.
def value_heads(c):
    return head_ranges(c, 1)


def value_rows(c):
    return head_ranges(c, c.linear_value_head_dim)


def qkv_rows(c):
    return [(0, 2 * c.key_dim), *head_ranges(c, c.linear_value_head_dim, 2 * c.key_dim)]


# Value transforms: (float32 rows, config) -> float32 rows.
def plus_one(rows, c):
    return rows + np.float32(1)


def minus_exp(rows, c):
    return -np.exp(rows)


def value_columns(rows, c):
    heads = rows.reshape(len(rows), c.linear_num_value_heads, c.linear_value_head_dim)
    return heads[:, value_head_order(c)].reshape(len(rows), c.value_dim)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table. Shapes are fields of `Config`, or numbers; `stored` is the GGUF's shape where it differs.

    `f32`: never stored in a smaller type.
    """

    source: str
    target: str
    shape: tuple
    f32: bool = False
    rows: Callable | None = None
    values: Callable | None = None
    stored: tuple | None = None


H, NV, E = "hidden_size", "linear_num_value_heads", "num_experts"
FF, SHARED = "moe_intermediate_size", "shared_expert_intermediate_size"

MODEL = [
    Rule("embed_tokens.weight", "token_embd.weight", ("vocab_size", H)),
    Rule("norm.weight", "output_norm.weight", (H,), f32=True, values=plus_one),
]
LM_HEAD = Rule("lm_head.weight", "output.weight", ("vocab_size", H))
BLOCK_SIZE_HEAD = [
    Rule("block_size_head.weight", "block_size_head.weight", ("block_size_count", H), f32=True),
    Rule("block_size_head.bias", "block_size_head.bias", ("block_size_count",), f32=True),
]

# The rest is per layer: "layers.N." and "blk.N." go before the names.
LAYER = [
    Rule("input_layernorm.weight", "attn_norm.weight", (H,), f32=True, values=plus_one),
    Rule("post_attention_layernorm.weight", "post_attention_norm.weight", (H,), f32=True, values=plus_one),
    Rule("mlp.gate.weight", "ffn_gate_inp.weight", (E, H), f32=True),
    Rule("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", (1, H), f32=True, stored=(H,)),
    Rule("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight", (SHARED, H)),
    Rule("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight", (SHARED, H)),
    Rule("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight", (H, SHARED)),
]
ATTENTION = {
    "full_attention": [
        Rule("self_attn.q_proj.weight", "attn_q.weight", ("query_gate_dim", H)),
        Rule("self_attn.k_proj.weight", "attn_k.weight", ("kv_dim", H)),
        Rule("self_attn.v_proj.weight", "attn_v.weight", ("kv_dim", H)),
        Rule("self_attn.o_proj.weight", "attn_output.weight", (H, "attention_dim")),
        Rule("self_attn.q_norm.weight", "attn_q_norm.weight", ("head_dim",), f32=True, values=plus_one),
        Rule("self_attn.k_norm.weight", "attn_k_norm.weight", ("head_dim",), f32=True, values=plus_one),
    ],
    "linear_attention": [
        Rule("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", ("conv_channels", H), rows=qkv_rows),
        Rule("linear_attn.in_proj_z.weight", "attn_gate.weight", ("value_dim", H), rows=value_rows),
        Rule("linear_attn.in_proj_a.weight", "ssm_alpha.weight", (NV, H), f32=True, rows=value_heads),
        Rule("linear_attn.in_proj_b.weight", "ssm_beta.weight", (NV, H), f32=True, rows=value_heads),
        Rule("linear_attn.A_log", "ssm_a", (NV,), f32=True, rows=value_heads, values=minus_exp),
        Rule("linear_attn.dt_bias", "ssm_dt.bias", (NV,), f32=True, rows=value_heads),
        Rule(
            "linear_attn.conv1d.weight", "ssm_conv1d.weight", ("conv_channels", 1, "linear_conv_kernel_dim"),
            f32=True, rows=qkv_rows, stored=("conv_channels", "linear_conv_kernel_dim"),
        ),
        Rule("linear_attn.norm.weight", "ssm_norm.weight", ("linear_value_head_dim",), f32=True),
        Rule("linear_attn.out_proj.weight", "ssm_out.weight", (H, "value_dim"), values=value_columns),
    ],
}  # fmt: skip
CLOVER = [
    Rule("linear_attn.mem_gate.weight", "ssm_mem_gate.weight", (NV, H), f32=True, rows=value_heads),
    Rule("linear_attn.mem_gate.bias", "ssm_mem_gate.bias", (NV,), f32=True, rows=value_heads),
    Rule("linear_attn.block_scale", "ssm_block_scale", (NV,), f32=True, rows=value_heads),
]
# GGUF name, shape of one expert's matrix, the tensors over all experts that may hold it (name, which part of the rows of each
# expert, of how many: Hugging Face's, and MLX's), and the name of one expert's tensor where each has its own.
EXPERTS = [
    (
        "ffn_gate_exps.weight", (FF, H), "experts.{}.gate_proj.weight",
        [("experts.gate_up_proj", 0, 2), ("experts.gate_proj", 0, 1), ("switch_mlp.gate_proj.weight", 0, 1)],
    ),
    (
        "ffn_up_exps.weight", (FF, H), "experts.{}.up_proj.weight",
        [("experts.gate_up_proj", 1, 2), ("experts.up_proj", 0, 1), ("switch_mlp.up_proj.weight", 0, 1)],
    ),
    (
        "ffn_down_exps.weight", (H, FF), "experts.{}.down_proj.weight",
        [("experts.down_proj", 0, 1), ("switch_mlp.down_proj.weight", 0, 1)],
    ),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Output:
    """A tensor to write: its pieces are ranges of source rows (tensor, start, stop), joined in order.

    `f32`: never stored in a smaller type. `values`: None, or a function (float32 rows, config) -> float32 rows as stored.
    """

    name: str
    shape: tuple
    pieces: list
    f32: bool = False
    values: Callable | None = None


def plan(tensors, config):
    """The list of :class:`Output` for a checkpoint, in file order.

    `tensors` maps checkpoint names to `safetensors.Tensor`. Raises CheckpointError for tensors that are missing or unknown (all of
    them), of the wrong shape or dtype, or stored twice, and for FP8 tensors and scales that do not fit together.
    """
    return _Plan(tensors, config).outputs()


class _Plan:
    """Takes the checkpoint's tensors one by one; what is left at the end is unknown."""

    def __init__(self, tensors, config):
        self.config = config
        self.left = {}
        self.taken = {}
        self.missing = []
        self.prefix = "model."
        wanted = {name: tensor for name, tensor in tensors.items() if _skipped(name, config) is None}
        convolutions = [tensor for name, tensor in wanted.items() if name.endswith(CONV)]
        self.from_mlx = bool(convolutions) and all(len(t.shape) == 3 and t.shape[2] == 1 for t in convolutions)
        if self.from_mlx:
            wanted |= {t.name: dataclasses.replace(t, shape=(t.shape[0], 1, t.shape[1])) for t in convolutions}
        for name, tensor in fp8.scaled(wanted, config.scale_block).items():
            short = _short(name)
            if short in self.left:
                raise CheckpointError(f"tensors {self.left[short].name!r} and {name!r} are the same tensor under two names")
            self.left[short] = tensor
            if short.startswith("layers."):
                self.prefix = name.removesuffix(short)

    def outputs(self):
        c = self.config
        self.check_layer_count()
        out = self.rules(MODEL)
        if not c.tie_word_embeddings or LM_HEAD.source in self.left:
            out += self.rules([LM_HEAD])
        if c.block and any(rule.source in self.left for rule in BLOCK_SIZE_HEAD):
            out += self.rules(BLOCK_SIZE_HEAD)
        for layer, kind in enumerate(c.layer_types):
            extra = CLOVER if c.block and kind == "linear_attention" else []
            out += self.rules(LAYER + ATTENTION[kind] + extra, f"layers.{layer}.", f"blk.{layer}.")
            out += self.experts(f"layers.{layer}.mlp.", f"blk.{layer}.")
        faults = [("missing from the checkpoint", self.missing)]
        faults.append(("unknown in a checkpoint of this kind", [tensor.name for tensor in self.left.values()]))
        if any(names for _, names in faults):
            raise CheckpointError("; ".join(f"{fault}: {folded(names)}" for fault, names in faults if names))
        return out

    def check_layer_count(self):
        layers = {int(match[1]) for match in map(LAYER_NUMBER.match, self.left) if match}
        declared = self.config.num_hidden_layers
        for layer in range(max(declared, max(layers, default=0) + 1)):
            if layer >= declared or layer not in layers:
                stored = "not stored" if layer < declared else "stored"
                raise CheckpointError(f"layer {layer} is {stored}, but config.json has num_hidden_layers {declared}")

    def rules(self, rules, source_prefix="", target_prefix=""):
        outputs = []
        for rule in rules:
            shape = self.dims(rule.shape)
            tensor = self.take(source_prefix + rule.source, shape)
            if tensor is not None:
                ranges = rule.rows(self.config) if rule.rows else [(0, shape[0])]
                pieces = [(tensor, start, stop) for start, stop in ranges]
                stored = self.dims(rule.stored) if rule.stored else shape
                values = None if self.from_mlx and rule.values is plus_one else rule.values
                outputs.append(Output(target_prefix + rule.target, stored, pieces, rule.f32, values))
        return outputs

    def experts(self, source_prefix, target_prefix):
        """The stacked tensors of one layer's experts, from tensors of one expert each or over all experts."""
        count = self.config.num_experts
        outputs = []
        for target, dims, single, joined in EXPERTS:
            rows, columns = self.dims(dims)
            stored = (way for way in joined if source_prefix + way[0] in self.left or source_prefix + way[0] in self.taken)
            name, part, parts = next(stored, (None, 0, 0))
            if name:
                tensor = self.take(source_prefix + name, (count, parts * rows, columns))
                starts = [(expert * parts + part) * rows for expert in range(count)]
                pieces = [(tensor, start, start + rows) for start in starts]
            else:
                names = [source_prefix + single.format(expert) for expert in range(count)]
                pieces = [(self.take(name, (rows, columns)), 0, rows) for name in names]
            outputs.append(Output(target_prefix + target, (count, rows, columns), pieces))
        return outputs

    def take(self, short, shape):
        """The tensor of a name without its prefix, or None where it is missing (all missing ones are reported together)."""
        tensor = self.left.pop(short, None) or self.taken.get(short)
        if tensor is None:
            self.missing.append(short if short == LM_HEAD.source else self.prefix + short)
            return None
        self.taken[short] = tensor
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {tensor.name!r} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
        if tensor.dtype not in READABLE:
            raise CheckpointError(f"tensor {tensor.name!r} is {tensor.dtype}; only {', '.join(READABLE)} can be converted")
        return tensor

    def dims(self, shape):
        return tuple(n if isinstance(n, int) else getattr(self.config, n) for n in shape)
