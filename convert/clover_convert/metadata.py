"""The model's metadata keys in the GGUF, as llama.cpp's `qwen35moe` reads them, and Clover's own."""

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION

# key after the architecture's prefix, kind, field of `Config`
FIELDS = [
    ("block_count", "u32", "num_hidden_layers"),
    ("context_length", "u32", "max_position_embeddings"),
    ("embedding_length", "u32", "hidden_size"),
    ("attention.head_count", "u32", "num_attention_heads"),
    ("attention.head_count_kv", "u32", "num_key_value_heads"),
    ("attention.key_length", "u32", "head_dim"),
    ("attention.value_length", "u32", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "f32", "rms_norm_eps"),
    ("rope.dimension_count", "u32", "rope_dims"),
    ("rope.dimension_sections", "[i32]", "rope_sections"),
    ("rope.freq_base", "f32", "rope_theta"),
    ("expert_count", "u32", "num_experts"),
    ("expert_used_count", "u32", "num_experts_per_tok"),
    ("expert_feed_forward_length", "u32", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "u32", "shared_expert_intermediate_size"),
    ("ssm.conv_kernel", "u32", "linear_conv_kernel_dim"),
    ("ssm.inner_size", "u32", "value_dim"),
    ("ssm.state_size", "u32", "linear_key_head_dim"),
    ("ssm.time_step_rank", "u32", "linear_num_value_heads"),
    ("ssm.group_count", "u32", "linear_num_key_heads"),
]


def model_metadata(config, name, file_type):
    """Metadata (key, kind, value) of a `Config`, for a file named `name`; file_type: llama.cpp's number (enum llama_ftype)."""
    prefix = config.architecture
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    metadata = [
        ("general.architecture", "str", prefix),
        ("general.type", "str", "model"),
        ("general.name", "str", name),
        ("general.file_type", "u32", file_type),
        ("general.quantization_version", "u32", QUANTIZATION_VERSION),
    ]
    metadata += [(f"{prefix}.{key}", kind, getattr(config, field)) for key, kind, field in FIELDS]
    metadata.append((f"{prefix}.attention.recurrent_layers", "[bool]", recurrent))
    interval = recurrent.index(False) + 1 if False in recurrent else len(recurrent) + 1
    if recurrent == [(i + 1) % interval != 0 for i in range(len(recurrent))]:
        metadata.append((f"{prefix}.full_attention_interval", "u32", interval))
    if config.block:
        metadata += [
            (f"{prefix}.block.size", "u32", config.block.size),
            (f"{prefix}.block.sizes", "[u32]", config.block.sizes),
            (f"{prefix}.block.threshold", "f32", config.block.threshold),
            ("diffusion.shift_logits", "bool", config.block.shift_logits),
        ]
    return metadata
