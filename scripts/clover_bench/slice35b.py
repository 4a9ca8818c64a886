"""A slice of the 35B-A3B shape as a checkpoint: few layers, real widths, all 256 experts, random weights.

    python -m clover_bench.slice35b FOLDER [--layers 4] [--fp8] [--model qwen]

Weights are stretches of one pool of Gaussian numbers, so a slice of 8 GB is written in seconds. Layout as the published
checkpoints have it: BF16 with fused experts, FP8 with one tensor pair an expert (E4M3, scales of 128 x 128 blocks). The tokenizer
is the bundled model's, its vocabulary padded.
"""

import argparse
import json
import math
import pathlib
import shutil

import numpy as np

from clover_convert.safetensors import E4M3
from clover_cpp import ggml

CHECKPOINT = pathlib.Path(__file__).parents[2] / "models" / "clover-tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARD_BYTES = 2_000_000_000
POOL = (1 << 24) + 12_345  # elements, no multiple of a row: neighbouring tensors differ
BLOCK = 128

TEXT = {
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "eos_token_id": 1016,
    "pad_token_id": 1014,
}
IN_FP8 = ("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
CLOVER = {"block_size": 32, "block_sizes": [4, 8, 16, 32], "mask_token_id": 1017, "shift_logits": True}


def config(layers, model, fp8):
    """config.json of the slice; model: "clover" or "qwen"."""
    kinds = ["full_attention" if (i + 1) % TEXT["full_attention_interval"] == 0 else "linear_attention" for i in range(layers)]
    text = {**TEXT, "num_hidden_layers": layers, "layer_types": kinds}
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}} if fp8 else {}
    if model == "clover":
        return {"architectures": ["CloverForBlockDiffusion"], "model_type": "clover", **text, **CLOVER, **quantised}
    return {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", **text, **quantised}


def tensors(layers, model, fp8):
    """(name, shape) of every weight, in the order of the file. fp8: experts one by one instead of fused."""
    c = TEXT
    hidden, experts, ff = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    heads = c["num_attention_heads"] * c["head_dim"]
    kv = c["num_key_value_heads"] * c["head_dim"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        if (layer + 1) % c["full_attention_interval"]:
            at += "linear_attn."
            yield at + "in_proj_qkv.weight", (2 * keys + values, hidden)
            yield at + "in_proj_z.weight", (values, hidden)
            for name in "ab":
                yield f"{at}in_proj_{name}.weight", (c["linear_num_value_heads"], hidden)
            yield at + "A_log", (c["linear_num_value_heads"],)
            yield at + "dt_bias", (c["linear_num_value_heads"],)
            yield at + "conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"])
            yield at + "norm.weight", (c["linear_value_head_dim"],)
            yield at + "out_proj.weight", (hidden, values)
            if model == "clover":
                yield at + "mem_gate.weight", (c["linear_num_value_heads"], hidden)
                yield at + "mem_gate.bias", (c["linear_num_value_heads"],)
                yield at + "block_scale", (c["linear_num_value_heads"],)
        else:
            at += "self_attn."
            yield at + "q_proj.weight", (2 * heads, hidden)
            yield at + "k_proj.weight", (kv, hidden)
            yield at + "v_proj.weight", (kv, hidden)
            yield at + "o_proj.weight", (hidden, heads)
            yield at + "q_norm.weight", (c["head_dim"],)
            yield at + "k_norm.weight", (c["head_dim"],)
        at = f"model.layers.{layer}.mlp."
        yield at + "gate.weight", (experts, hidden)
        yield at + "shared_expert_gate.weight", (1, hidden)
        shared = c["shared_expert_intermediate_size"]
        single = {"gate_proj": (ff, hidden), "up_proj": (ff, hidden), "down_proj": (hidden, ff)}
        for name, shape in single.items():
            yield f"{at}shared_expert.{name}.weight", tuple(shared if n == ff else n for n in shape)
        if fp8:
            for expert in range(experts):
                for name, shape in single.items():
                    yield f"{at}experts.{expert}.{name}.weight", shape
        else:
            yield at + "experts.gate_up_proj", (experts, 2 * ff, hidden)
            yield at + "experts.down_proj", (experts, hidden, ff)


def bf16(values):
    """float32 to bfloat16 bits, rounded to nearest even: uint16."""
    return ggml.quantize(ggml.types()["bf16"], values.reshape(1, -1)).view(np.uint16)[0]


def e4m3(values):
    """float32 to the nearest float8 e4m3 (finite ones only): uint8."""
    positive = E4M3[:0x7F]
    nearest = np.searchsorted((positive[1:] + positive[:-1]) / 2, np.abs(values)).astype(np.uint8)
    return nearest | (np.signbit(values).astype(np.uint8) << 7)


class Pool:
    """Endless numbers of one dtype, the same ones again and again."""

    def __init__(self, values):
        self.values, self.at = values, 0

    def stretches(self, n):
        """The next n numbers, as arrays."""
        while n:
            stretch = self.values[self.at : self.at + n]
            yield stretch
            n -= len(stretch)
            self.at = (self.at + len(stretch)) % len(self.values)


def make(folder, layers=4, model="clover", fp8=False, seed=0):
    """Write the slice into a new folder and return its bytes of weights."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(layers, model, fp8), indent=1))
    for name in TOKENIZER_FILES:
        shutil.copy(CHECKPOINT / name, folder)
    noise = np.random.default_rng(seed).standard_normal(POOL, np.float32)
    pools = {
        "weights": Pool(bf16(noise * np.float32(0.02))),  # 0.02: about one over the root of the width
        "fp8": Pool(e4m3(noise * np.float32(100))) if fp8 else None,
        "scales": Pool((1 + np.abs(noise)) * np.float32(1e-4)) if fp8 else None,
    }
    entries = []
    for name, shape in tensors(layers, model, fp8):
        if fp8 and name.endswith(IN_FP8):
            entries.append((name, "F8_E4M3", shape, pools["fp8"]))
            scales = tuple(-(-n // BLOCK) for n in shape)
            entries.append((f"{name}_scale_inv", "F32", scales, pools["scales"]))
        else:
            entries.append((name, "BF16", shape, pools["weights"]))
    return _write_shards(folder, entries)


def _write_shards(folder, entries):
    shards, size = [[]], 0
    for entry in entries:
        _, dtype, shape, _ = entry
        n_bytes = math.prod(shape) * {"BF16": 2, "F8_E4M3": 1, "F32": 4}[dtype]
        if shards[-1] and size + n_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((*entry, n_bytes))
        size += n_bytes
    where = {}
    for i, shard in enumerate(shards):
        file_name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        header, at = {}, 0
        for name, dtype, shape, _, n_bytes in shard:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n_bytes]}
            at += n_bytes
            where[name] = file_name
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with open(folder / file_name, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for _, _, shape, pool, _ in shard:
                for stretch in pool.stretches(math.prod(shape)):
                    file.write(stretch.data)
    total = sum(n_bytes for shard in shards for *_, n_bytes in shard)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main():
    """Command line."""
    parser = argparse.ArgumentParser(prog="slice35b", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model", choices=["clover", "qwen"], default="clover", help="qwen: plain, for an unmodified llama.cpp")
    parser.add_argument("--fp8", action="store_true")
    args = parser.parse_args()
    if args.layers < 1:
        parser.error("--layers must be 1 or more")
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    print(f"{args.folder}: {make(args.folder, args.layers, args.model, args.fp8) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
