"""Random tiny checkpoints for tests: weights of useful scale, each norm and gate away from its neutral value.

Outputs depend on the whole context, logits have about unit scale, and a transform that a converter forgets shows. There
are three value heads per key head, so that the value-head order and its inverse differ.
"""

import pathlib
import shutil

import torch

from clover_tiny.model import CloverConfig, CloverModel

TOKENIZER = pathlib.Path(__file__).parent.parent / "models" / "clover-tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

TINY = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "eos_token_id": 1016,
    "pad_token_id": 1014,
}


def add_tokenizer(folder):
    """Copy the tokenizer files of the bundled model (vocabulary 1,024) into a checkpoint folder."""
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder)


def randomize(model, seed):
    """Draw all weights of a Qwen3.5-MoE or Clover module anew, in place; the draw depends on names and seed only."""
    for i, (name, parameter) in enumerate(sorted(model.named_parameters())):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 * seed + i))
        if name.endswith("linear_attn.norm.weight"):
            value = 1 + 0.3 * noise
        elif name.endswith("norm.weight"):
            value = 0.3 * noise
        elif name.endswith("A_log"):
            value = noise - 1
        elif name.endswith("block_scale"):
            value = 4 + noise
        elif parameter.dim() == 1 or name.endswith("conv1d.weight"):
            value = 0.5 * noise
        elif name.endswith("embed_tokens.weight"):
            value = noise
        else:
            value = noise * parameter.shape[-1] ** -0.5
        parameter.data.copy_(value)
    return model.eval()


def tiny_qwen(folder, seed=1, dtype=torch.float32, **overrides):
    """Save a random transformers `Qwen3_5MoeForCausalLM` with a tokenizer; returns the model (float32, weights as saved).

    `overrides` are fields of its configuration, over those of `TINY`.
    """
    import transformers

    config = transformers.Qwen3_5MoeTextConfig(**{**TINY, **overrides})
    config._attn_implementation = "eager"
    model = randomize(transformers.Qwen3_5MoeForCausalLM(config), seed).to(dtype)
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model.float()


def tiny_clover(folder, seed=1, shift_logits=True, dtype=torch.float32, block_size_head=False, **overrides):
    """Save a random `CloverModel` with a tokenizer; returns the model (float32, weights as saved).

    `overrides` are fields of `CloverConfig`, over those of `TINY`.
    """
    config = CloverConfig(**{"mask_token_id": 1017, "shift_logits": shift_logits, **TINY, **overrides})
    config.has_block_size_head = block_size_head
    model = randomize(CloverModel(config), seed)
    model.save_pretrained(folder, dtype)
    add_tokenizer(folder)
    return model.to(dtype).float()
