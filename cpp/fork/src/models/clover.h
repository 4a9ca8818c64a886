// Clover: qwen35moe with a second, non-causal pass that reads the recurrent state and never writes it.
#pragma once

#include "models.h"

struct llama_model_clover : public llama_model_qwen35moe {
    // What a GDN layer has for the block pass.
    struct block_layer {
        ggml_tensor * mem_gate    = nullptr; // [n_embd, n_v_heads], logit of the memory read-out
        ggml_tensor * mem_gate_b  = nullptr; // [n_v_heads]
        ggml_tensor * block_scale = nullptr; // [n_v_heads], factor on the in-block scores
    };

    std::vector<block_layer> block_layers;

    using llama_model_qwen35moe::llama_model_qwen35moe;

    void load_arch_tensors(llama_model_loader & ml) override;
};
