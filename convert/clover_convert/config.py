"""config.json of a Clover or Qwen3.5/3.6-MoE checkpoint: its fields, checked, and the dimensions that follow from them."""

import dataclasses
import reprlib

from clover_cpp.errors import CheckpointError

# model_type of config.json -> architecture of the GGUF
ARCHITECTURES = {"clover": "clover", "qwen3_5_moe": "qwen35moe", "qwen3_5_moe_text": "qwen35moe"}

COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
)

# fields that change the computation, with the only value that the engine computes
FIXED = {"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True, "norm_topk_prob": True}

# the largest values that the engine takes (gguf_check.cpp); where nothing is said, 2^16
LIMITS = {
    "vocab_size": 1 << 20,
    "hidden_size": 1 << 24,
    "num_hidden_layers": 512,
    "max_position_embeddings": 1 << 30,
    "linear_conv_kernel_dim": 64,
    "moe_intermediate_size": 1 << 24,
    "shared_expert_intermediate_size": 1 << 24,
    "num_experts": 512,
    "block_size": 4096,
    "block_sizes": 4096,
}
# fields that say how many layers for multi-token prediction there are
MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")

FLOAT32 = (1.2e-38, 3.4e38)

LAYER_TYPES = ("linear_attention", "full_attention")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Clover's own fields: `size` and `sizes` in tokens, `threshold` a probability."""

    size: int
    sizes: list
    threshold: float
    shift_logits: bool


@dataclasses.dataclass(frozen=True)
class Config:
    """The text model's fields under their names in config.json; `block` is None for a plain Qwen checkpoint.

    `mtp_layers`: layers for multi-token prediction that may be stored after the others. `scale_block`: rows and columns of a block
    of FP8 weights that shares a scale.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layer_types: list
    rope_theta: float
    rope_dims: int
    rope_sections: list
    mtp_layers: int
    scale_block: tuple
    block: BlockConfig | None

    @property
    def key_dim(self):
        """Rows of all key heads of a GDN layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self):
        """Rows of all value heads of a GDN layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self):
        """Channels of a GDN layer's convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def query_gate_dim(self):
        """Rows of q_proj: each head's query, then its gate."""
        return 2 * self.num_attention_heads * self.head_dim

    @property
    def attention_dim(self):
        """Columns of o_proj."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self):
        """Rows of k_proj and v_proj."""
        return self.num_key_value_heads * self.head_dim

    @property
    def block_size_count(self):
        """Rows of the block-size head."""
        return len(self.block.sizes)


def read_config(raw):
    """The :class:`Config` of a config.json read as a dict. Raises CheckpointError naming the field at fault."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(f"config.json: unknown model_type {reprlib.repr(model_type)}; known: {', '.join(ARCHITECTURES)}")
    text = raw.get("text_config", raw)
    if not isinstance(text, dict):
        raise CheckpointError("config.json: 'text_config' is not an object")
    for field, value in FIXED.items():
        if text.get(field, value) != value:
            raise CheckpointError(f"config.json: {field} {reprlib.repr(text[field])} is not supported, only {value!r}")
    counts = {field: _count(field, _required(text, field)) for field in COUNTS}
    config = Config(
        architecture=ARCHITECTURES[model_type],
        **counts,
        rms_norm_eps=_real("rms_norm_eps", _required(text, "rms_norm_eps")),
        tie_word_embeddings=_flag("tie_word_embeddings", text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
        layer_types=_layer_types(text, counts["num_hidden_layers"]),
        **_rope(text, counts["head_dim"]),
        mtp_layers=_mtp_layers(text),
        scale_block=_scale_block({**text, **raw}),
        block=_block({**text, **raw}) if model_type == "clover" else None,
    )
    _check_relations(config)
    return config


def _required(fields, name):
    if fields.get(name) is None:
        raise CheckpointError(f"config.json: {name!r} is missing")
    return fields[name]


def _count(name, value):
    limit = LIMITS.get(name, 1 << 16)
    if type(value) is not int or not 0 < value <= limit:
        raise CheckpointError(f"config.json: {name} must be a whole number from 1 to {limit}, not {reprlib.repr(value)}")
    return value


def _real(name, value):
    if type(value) not in (int, float) or not FLOAT32[0] <= value <= FLOAT32[1]:
        raise CheckpointError(f"config.json: {name} must be a number above 0 that float32 holds, not {reprlib.repr(value)}")
    return float(value)


def _flag(name, value):
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, not {reprlib.repr(value)}")
    return value


def _layer_types(text, n_layers):
    kinds = text.get("layer_types")
    if kinds is None:
        interval = _count("full_attention_interval", text.get("full_attention_interval", 4))
        return [LAYER_TYPES[(i + 1) % interval == 0] for i in range(n_layers)]
    if not isinstance(kinds, list) or any(kind not in LAYER_TYPES for kind in kinds):
        raise CheckpointError(f"config.json: layer_types may only hold {' and '.join(LAYER_TYPES)}")
    if len(kinds) != n_layers:
        raise CheckpointError(f"config.json: {len(kinds)} layer_types, but num_hidden_layers is {n_layers}")
    return kinds


def _rope(text, head_dim):
    rope = {"rope_theta": text.get("rope_theta"), "partial_rotary_factor": text.get("partial_rotary_factor", 0.25)}
    for field in ("rope_scaling", "rope_parameters"):
        if text.get(field) is not None:
            if not isinstance(text[field], dict):
                raise CheckpointError(f"config.json: {field} is not an object")
            rope.update(text[field])
    if rope.get("mrope_interleaved", True) is not True:
        raise CheckpointError(
            f"config.json: mrope_interleaved {reprlib.repr(rope['mrope_interleaved'])} is not supported, only True"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"config.json: rope_type {reprlib.repr(kind)} is not supported, only 'default'")
    factor = _real("partial_rotary_factor", rope["partial_rotary_factor"])
    if factor > 1:
        raise CheckpointError(f"config.json: partial_rotary_factor must be at most 1, not {factor}")
    dims = int(head_dim * factor)
    pairs = dims // 2
    sections = rope.get("mrope_section", [-(-(pairs - i) // 3) for i in range(3)])
    if dims % 2 or not 0 < dims <= head_dim:
        raise CheckpointError(f"config.json: {dims} rotary dimensions of {head_dim}; must be even, and not more than head_dim")
    if not isinstance(sections, list) or len(sections) != 3 or any(type(n) is not int or n < 0 for n in sections):
        raise CheckpointError("config.json: mrope_section must be three whole numbers")
    # llama.cpp gives pair i to section i % 3, as far as the section reaches; what is left over would not be rotated at all
    if sum(sections) != pairs or any(i // 3 >= sections[i % 3] for i in range(pairs)):
        raise CheckpointError(f"config.json: mrope_section {sections} does not interleave over {pairs} rotary pairs")
    return {"rope_theta": _real("rope_theta", _required(rope, "rope_theta")), "rope_dims": dims, "rope_sections": [*sections, 0]}


def _mtp_layers(text):
    name = next((name for name in MTP_LAYERS if text.get(name)), None)  # 0 and null: none
    return _count(name, text[name]) if name else 0


def _scale_block(fields):
    """Of an FP8 checkpoint; where nothing is said, 128 x 128, as in transformers' FineGrainedFP8Config."""
    found = fields.get("quantization_config") or fields.get("quantization") or {"quant_method": "fp8"}
    if not isinstance(found, dict):
        raise CheckpointError("config.json: quantization_config is not an object")
    method = found.get("quant_method", "of MLX" if "group_size" in found else None)
    if method != "fp8":
        raise CheckpointError(f"config.json: quantization {reprlib.repr(method)} cannot be converted, only 'fp8'")
    if found.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(f"config.json: quantization_config: fmt {reprlib.repr(found['fmt'])} is not supported, only 'e4m3'")
    block = found.get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or len(block) != 2:
        raise CheckpointError(f"config.json: weight_block_size must be two whole numbers, not {reprlib.repr(block)}")
    return tuple(_count("weight_block_size", n) for n in block)


def _block(fields):
    sizes = fields.get("block_sizes", [4, 8, 16, 32])
    if not isinstance(sizes, list) or not sizes:
        raise CheckpointError("config.json: block_sizes must be a list of whole numbers")
    threshold = _real("confidence_threshold", fields.get("confidence_threshold", 0.95))
    if threshold > 1:
        raise CheckpointError(f"config.json: confidence_threshold must be at most 1, not {threshold}")
    return BlockConfig(
        size=_count("block_size", fields.get("block_size", 32)),
        sizes=[_count("block_sizes", n) for n in sizes],
        threshold=threshold,
        shift_logits=_flag("shift_logits", fields.get("shift_logits", True)),
    )


def _check_relations(c):
    if c.linear_key_head_dim != c.linear_value_head_dim:
        dims = f"linear_key_head_dim {c.linear_key_head_dim} and linear_value_head_dim {c.linear_value_head_dim}"
        raise CheckpointError(f"config.json: {dims} must be equal")
    for many, few in (("linear_num_value_heads", "linear_num_key_heads"), ("num_attention_heads", "num_key_value_heads")):
        if getattr(c, many) % getattr(c, few):
            raise CheckpointError(f"config.json: {many} {getattr(c, many)} is not a multiple of {few} {getattr(c, few)}")
    if c.linear_conv_kernel_dim < 2:
        raise CheckpointError("config.json: linear_conv_kernel_dim must be at least 2")
    if c.num_experts_per_tok > c.num_experts:
        raise CheckpointError(f"config.json: num_experts_per_tok {c.num_experts_per_tok} is above num_experts {c.num_experts}")
