#include "clover.h"

#include "llama-memory-recurrent.h"

void llama_model_clover::load_arch_tensors(llama_model_loader & ml) {
    llama_model_qwen35moe::load_arch_tensors(ml);

    const LLM_TN  names(arch);
    const int64_t hidden = hparams.n_embd;
    const int64_t heads  = hparams.ssm_dt_rank;

    block_layers.resize(hparams.n_layer());
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (hparams.is_recr(il)) {
            block_layer & block = block_layers[il];
            block.mem_gate      = create_tensor(names(LLM_TENSOR_SSM_MEM_GATE, "weight", il), { hidden, heads }, 0);
            block.mem_gate_b    = create_tensor(names(LLM_TENSOR_SSM_MEM_GATE, "bias", il), { heads }, 0);
            block.block_scale   = create_tensor(names(LLM_TENSOR_SSM_BLOCK_SCALE, il), { heads }, 0);
        }
    }

    // The calibrator: the engine reads it from the file, the graph has no use for it.
    const LLM_TN_IMPL weight = names(LLM_TENSOR_BLOCK_SIZE_HEAD, "weight");
    if (const ggml_tensor * meta = ml.get_tensor_meta(weight.str().c_str())) {
        create_tensor(weight, { hidden, meta->ne[1] }, TENSOR_SKIP);
        create_tensor(names(LLM_TENSOR_BLOCK_SIZE_HEAD, "bias"), { meta->ne[1] }, TENSOR_SKIP);
    }
}

// Block pass of a GDN layer. cur: [n_embd, tokens], the layer's normed input. Per value head, with S the state at the end of
// the context, d the head dimension, j over the block's positions:
//
//     r_t = S^T q_t / sqrt(d);   p_t = softmax(mem_gate(x_t), block_scale * (q_t . k_j));   o_t = p_t0 r_t + sum_j p_tj v_j
//
// Shapes below: N positions of each of B sequences, K key heads and H value heads of dimension d.
ggml_tensor * llama_model_qwen35moe::graph::build_layer_attn_linear_block(llm_graph_input_rs * inp, ggml_tensor * cur, int il) {
    const auto & layer = model.layers[il];
    const auto & block = static_cast<const llama_model_clover &>(model).block_layers[il];

    const int64_t N = ubatch.n_seq_tokens;
    const int64_t B = ubatch.n_seqs;
    const int64_t K = hparams.ssm_n_group;
    const int64_t H = hparams.ssm_dt_rank;
    const int64_t d = hparams.ssm_d_state;

    GGML_ASSERT(ubatch.equal_seqs() && hparams.ssm_d_inner == d * H);

    const auto [qkv, z] = build_qkvz(cur, il);

    // the short convolution goes on from the context's last inputs
    ggml_tensor * past = build_rs(inp, inp->mctx->get_r_l(il), hparams.n_embd_r(), B);
    past               = ggml_reshape_3d(ctx0, past, hparams.ssm_d_conv - 1, qkv->ne[0], B);

    ggml_tensor * mixed = ggml_concat(ctx0, past, ggml_transpose(ctx0, qkv), 0);
    mixed               = ggml_silu(ctx0, ggml_ssm_conv(ctx0, mixed, layer.ssm_conv1d)); // [(2 K + H) d, N, B]

    const auto heads = [&](int64_t first, int64_t n) { // heads first .. first + n of all channels: [d, n, N, B]
        const size_t size = mixed->nb[0];
        return ggml_view_4d(ctx0, mixed, d, n, N, B, d * size, mixed->nb[1], mixed->nb[2], first * d * size);
    };
    const auto per_value_head = [&](ggml_tensor * x) { // value head h goes with key head h % K: [d, K, N, B] to [d, N, H, B]
        x = build_gdn_l2_norm(ctx0, x, hparams.f_norm_rms_eps);
        x = K == H ? x : ggml_repeat_4d(ctx0, x, d, H, N, B);
        return ggml_cont(ctx0, ggml_permute(ctx0, x, 0, 2, 1, 3));
    };
    ggml_tensor * q = per_value_head(heads(0, K));
    ggml_tensor * k = per_value_head(heads(K, K));
    ggml_tensor * v = ggml_cont(ctx0, ggml_permute(ctx0, heads(2 * K, H), 1, 2, 0, 3)); // [N, d, H, B]

    // llama.cpp keeps S transposed: [d_k, d_v] with d_k fastest
    ggml_tensor * state = build_rs(inp, inp->mctx->get_s_l(il), hparams.n_embd_s(), B);
    state               = ggml_reshape_4d(ctx0, state, d, d, H, B);

    ggml_tensor * read = ggml_scale(ctx0, ggml_mul_mat(ctx0, state, q), 1.0f / sqrtf(float(d))); // [d, N, H, B]
    cb(read, "block_read", il);

    ggml_tensor * gate = ggml_add(ctx0, build_lora_mm(block.mem_gate, cur), block.mem_gate_b); // [H, N B]
    gate               = ggml_reshape_4d(ctx0, gate, 1, H, N, B);
    gate               = ggml_cont(ctx0, ggml_permute(ctx0, gate, 0, 2, 1, 3)); // [1, N, H, B]

    ggml_tensor * scores = ggml_mul_mat(ctx0, k, q); // [N, N, H, B]
    scores               = ggml_mul(ctx0, scores, ggml_reshape_3d(ctx0, block.block_scale, 1, 1, H));

    ggml_tensor * p = ggml_soft_max(ctx0, ggml_concat(ctx0, gate, scores, 0)); // [1 + N, N, H, B]
    cb(p, "block_weights", il);

    const auto weights = [&](int64_t first, int64_t n) { // a contiguous copy: several times faster in the product below
        return ggml_cont(ctx0, ggml_view_4d(ctx0, p, n, N, H, B, p->nb[1], p->nb[2], p->nb[3], first * p->nb[0]));
    };
    ggml_tensor * out = ggml_mul(ctx0, read, weights(0, 1));
    out               = ggml_add(ctx0, out, ggml_mul_mat(ctx0, v, weights(1, N))); // [d, N, H, B]
    out               = ggml_cont(ctx0, ggml_permute(ctx0, out, 0, 2, 1, 3));      // [d, H, N, B]
    cb(out, "block_out", il);

    out = build_norm_gated(out, layer.ssm_norm, ggml_reshape_4d(ctx0, z, d, H, N, B), il);
    out = ggml_reshape_2d(ctx0, out, d * H, N * B);
    return build_lora_mm(layer.ssm_out, out, layer.ssm_out_s);
}
