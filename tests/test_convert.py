"""clover-convert: metadata and tensors of the GGUF against values worked out by hand from the model's own weights."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import TINY, tiny_clover, tiny_qwen
from clover_convert import convert

KEPT_F32 = (
    "norm",
    "conv1d",
    "ffn_gate_inp",
    "ssm_alpha",
    "ssm_beta",
    "ssm_a",
    "ssm_dt",
    "ssm_mem_gate",
    "ssm_block_scale",
    "block_size",
)


def read(path):
    """(metadata, tensors as float32 numpy arrays, tensor types) of a GGUF file, through the `gguf` package."""
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = rows.reshape([int(n) for n in reversed(tensor.shape)])
    return metadata, tensors, {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}


def converted(checkpoint, type="f32"):
    output = checkpoint.with_suffix(f".{type}.gguf")
    size = convert(checkpoint, output, type=type).size
    assert size == output.stat().st_size
    assert not list(output.parent.glob("*.part"))
    return output


def rewrite(folder, change):
    """Let `change` edit the dict of a checkpoint's tensors, in a single file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def edit_config(folder, change, name="config.json"):
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))


def tiled(x, heads=(2, 3)):
    """Value heads (first axis) from the checkpoint's order, grouped by key head, to llama.cpp's, key heads innermost."""
    return x.unflatten(0, heads).transpose(0, 1).flatten(0, 1)


def tiled_rows(x):
    return tiled(x.unflatten(0, (6, -1))).flatten(0, 1)


def expected(state, clover, calibrated=False):
    """GGUF tensors of a state dict with fused experts, written out by hand."""
    inner, keys = TINY["moe_intermediate_size"], 2 * 2 * 32
    out = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"] + 1,
        "output.weight": state["lm_head.weight"],
    }
    if calibrated:
        out["block_size_head.weight"] = state["model.block_size_head.weight"]
        out["block_size_head.bias"] = state["model.block_size_head.bias"]
    for layer in range(4):
        source = {name.split(".", 3)[3]: value for name, value in state.items() if name.startswith(f"model.layers.{layer}.")}
        gate_up = source["mlp.experts.gate_up_proj"]
        target = {
            "attn_norm.weight": source["input_layernorm.weight"] + 1,
            "post_attention_norm.weight": source["post_attention_layernorm.weight"] + 1,
            "ffn_gate_inp.weight": source["mlp.gate.weight"],
            "ffn_gate_exps.weight": gate_up[:, :inner],
            "ffn_up_exps.weight": gate_up[:, inner:],
            "ffn_down_exps.weight": source["mlp.experts.down_proj"],
            "ffn_gate_inp_shexp.weight": source["mlp.shared_expert_gate.weight"][0],
            "ffn_gate_shexp.weight": source["mlp.shared_expert.gate_proj.weight"],
            "ffn_up_shexp.weight": source["mlp.shared_expert.up_proj.weight"],
            "ffn_down_shexp.weight": source["mlp.shared_expert.down_proj.weight"],
        }
        if layer == 3:
            target["attn_q.weight"] = source["self_attn.q_proj.weight"]
            target["attn_k.weight"] = source["self_attn.k_proj.weight"]
            target["attn_v.weight"] = source["self_attn.v_proj.weight"]
            target["attn_output.weight"] = source["self_attn.o_proj.weight"]
            target["attn_q_norm.weight"] = source["self_attn.q_norm.weight"] + 1
            target["attn_k_norm.weight"] = source["self_attn.k_norm.weight"] + 1
        else:
            gdn = {name.removeprefix("linear_attn."): value for name, value in source.items() if name.startswith("linear_attn.")}
            qkv, conv = gdn["in_proj_qkv.weight"], gdn["conv1d.weight"].squeeze(1)
            target["attn_qkv.weight"] = torch.cat([qkv[:keys], tiled_rows(qkv[keys:])])
            target["ssm_conv1d.weight"] = torch.cat([conv[:keys], tiled_rows(conv[keys:])])
            target["attn_gate.weight"] = tiled_rows(gdn["in_proj_z.weight"])
            target["ssm_alpha.weight"] = tiled(gdn["in_proj_a.weight"])
            target["ssm_beta.weight"] = tiled(gdn["in_proj_b.weight"])
            target["ssm_a"] = tiled(-gdn["A_log"].exp())
            target["ssm_dt.bias"] = tiled(gdn["dt_bias"])
            target["ssm_norm.weight"] = gdn["norm.weight"]
            target["ssm_out.weight"] = tiled_rows(gdn["out_proj.weight"].T).T
            if clover:
                target["ssm_mem_gate.weight"] = tiled(gdn["mem_gate.weight"])
                target["ssm_mem_gate.bias"] = tiled(gdn["mem_gate.bias"])
                target["ssm_block_scale"] = tiled(gdn["block_scale"])
        out.update({f"blk.{layer}.{name}": value for name, value in target.items()})
    return {name: value.detach().float().numpy() for name, value in out.items()}


def assert_tensors(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=0, err_msg=name)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen") / "tiny-qwen"
    return folder, tiny_qwen(folder)


@pytest.fixture(scope="module")
def clover(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clover") / "tiny-clover"
    return folder, tiny_clover(folder, shift_logits=False, block_size_head=True)


@pytest.fixture
def copy(tmp_path, qwen):
    """A copy of the Qwen checkpoint that a test may change."""
    return shutil.copytree(qwen[0], tmp_path / "tiny-qwen")


def test_qwen_tensors(qwen):
    folder, model = qwen
    _, tensors, types = read(converted(folder))
    assert_tensors(tensors, expected(model.state_dict(), clover=False))
    assert set(types.values()) == {"F32"}


def test_clover_tensors(clover):
    folder, model = clover
    _, tensors, _ = read(converted(folder))
    assert_tensors(tensors, expected(model.state_dict(), clover=True, calibrated=True))


MODEL_KEYS = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [3, 3, 2, 0],
    "rope.freq_base": 10000.0,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 96,
    "expert_shared_feed_forward_length": 32,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 192,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 6,
    "ssm.group_count": 2,
    "attention.recurrent_layers": [True, True, True, False],
    "full_attention_interval": 4,
    "tokenizer.normalizer": "nfc",
}


def test_qwen_metadata(qwen):
    metadata, *_ = read(converted(qwen[0]))
    for key, value in MODEL_KEYS.items():
        assert metadata.pop(f"qwen35moe.{key}") == value, key
    assert metadata.pop("qwen35moe.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert metadata["general.architecture"] == "qwen35moe"
    assert metadata["general.name"] == "tiny-qwen"
    assert metadata["general.file_type"] == 0
    assert not [key for key in metadata if key.startswith(("qwen35moe.", "clover.", "diffusion.")) or "mask" in key]


def test_clover_metadata(clover):
    metadata, *_ = read(converted(clover[0], "q8_0"))
    for key, value in MODEL_KEYS.items():
        assert metadata.pop(f"clover.{key}") == value, key
    assert metadata["general.architecture"] == "clover"
    assert metadata["general.file_type"] == 7
    assert metadata["clover.block.size"] == 32
    assert metadata["clover.block.sizes"] == [4, 8, 16, 32]
    assert metadata["clover.block.threshold"] == pytest.approx(0.95)
    assert metadata["diffusion.shift_logits"] is False
    assert metadata["tokenizer.ggml.mask_token_id"] == 1017


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0"])
def test_matrices_have_the_type_and_the_rest_stays_f32(clover, type):
    folder, model = clover
    _, tensors, types = read(converted(folder, type))
    wanted = expected(model.state_dict(), clover=True, calibrated=True)
    qtype = gguf.GGMLQuantizationType[type.upper()]
    for name, value in wanted.items():
        kept = value.ndim == 1 or any(part in name for part in KEPT_F32)
        assert types[name] == ("F32" if kept else type.upper()), name
        if not kept:
            rows = gguf.quants.quantize(value.reshape(-1, value.shape[-1]), qtype)
            value = gguf.quants.dequantize(rows, qtype).reshape(value.shape)
        np.testing.assert_allclose(tensors[name], value, rtol=1e-6, atol=0, err_msg=name)


def test_rows_that_do_not_fill_a_block_become_f16(tmp_path):
    model = tiny_qwen(tmp_path / "odd", moe_intermediate_size=40)
    _, tensors, types = read(converted(tmp_path / "odd", "q8_0"))
    assert types["blk.0.ffn_down_exps.weight"] == "F16"
    assert types["blk.0.ffn_up_exps.weight"] == "Q8_0"
    down = model.state_dict()["model.layers.0.mlp.experts.down_proj"].numpy()
    assert np.array_equal(tensors["blk.0.ffn_down_exps.weight"], down.astype(np.float16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_source_in_half_precision(tmp_path, dtype):
    model = tiny_clover(tmp_path / "half", dtype=dtype)
    _, tensors, _ = read(converted(tmp_path / "half"))
    assert_tensors(tensors, expected(model.state_dict(), clover=True))


@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_many_files_give_the_same_bytes_as_one(qwen, copy, type):
    _, model = qwen
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="300KB")
    assert len(list(copy.glob("model-*.safetensors"))) > 3
    assert (copy / "model.safetensors.index.json").exists()
    assert converted(copy, type).read_bytes() == converted(qwen[0], type).read_bytes()


def test_fused_experts_give_the_same_bytes_as_single_ones(qwen, copy):
    _, model = qwen
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, copy / "model.safetensors")
    assert converted(copy).read_bytes() == converted(qwen[0]).read_bytes()


def test_hub_layout_with_vision_and_mtp(qwen, copy):
    """As on the hub: text_config in a wrapper, `model.language_model.`, a vision tower, one MTP layer of any dtype."""

    def rename(tensors):
        for name in list(tensors):
            if name.startswith("model."):
                tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(3, 3, dtype=torch.int64)
        tensors["mtp.layers.0.input_layernorm.weight"] = torch.zeros(64)
        tensors["mtp.fc.weight"] = torch.zeros(64, 128)

    def wrap(config):
        text = {**config, "mtp_num_hidden_layers": 1}
        config.clear()
        config.update(model_type="qwen3_5_moe", text_config=text, vision_config={}, tie_word_embeddings=False)

    rewrite(copy, rename)
    edit_config(copy, wrap)
    assert converted(copy).read_bytes() == converted(qwen[0]).read_bytes()


def test_mtp_declared_but_not_stored(copy):
    edit_config(copy, lambda config: config.update(mtp_num_hidden_layers=1))
    metadata, *_ = read(converted(copy))
    assert metadata["qwen35moe.block_count"] == 4
    assert "qwen35moe.nextn_predict_layers" not in metadata


def test_tied_embeddings_need_no_head(tmp_path):
    tiny_qwen(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    _, tensors, _ = read(converted(tmp_path / "tied"))
    assert "output.weight" not in tensors


def test_rope_in_older_fields(qwen, copy):
    def older(config):
        rope = config.pop("rope_parameters")
        config["rope_theta"], config["partial_rotary_factor"] = rope.pop("rope_theta"), rope.pop("partial_rotary_factor")
        config["rope_scaling"] = {"type": "default", "mrope_section": rope["mrope_section"]}

    edit_config(copy, older)
    assert converted(copy).read_bytes() == converted(qwen[0]).read_bytes()


def test_layers_in_any_order(tmp_path):
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    tiny_qwen(tmp_path / "mixed", layer_types=kinds)
    metadata, tensors, _ = read(converted(tmp_path / "mixed"))
    assert metadata["qwen35moe.attention.recurrent_layers"] == [False, True, True, False]
    assert "qwen35moe.full_attention_interval" not in metadata
    assert "blk.0.attn_q.weight" in tensors and "blk.1.ssm_a" in tensors


def test_equal_head_counts_keep_their_order(tmp_path):
    model = tiny_qwen(tmp_path / "equal", linear_num_value_heads=2)
    _, tensors, _ = read(converted(tmp_path / "equal"))
    assert np.array_equal(
        tensors["blk.0.attn_qkv.weight"], model.state_dict()["model.layers.0.linear_attn.in_proj_qkv.weight"].numpy()
    )


def test_progress_reaches_the_end(qwen, tmp_path):
    calls = []
    convert(qwen[0], tmp_path / "model.gguf", progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] == (tmp_path / "model.gguf").stat().st_size
