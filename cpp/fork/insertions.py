"""What the fork inserts into llama.cpp's own files; everything else of it lies in src/.

Each entry: file, anchor (text that must occur exactly once in that file), where our text goes relative to the anchor, our text.
An anchor is as short as being unique allows, so that it survives upstream's changes around it.
"""

BEFORE, AFTER = "before", "after"

INSERTIONS = (
    # the architecture and its name
    ("src/llama-arch.h", "LLM_ARCH_QWEN35MOE,\n", AFTER, "    LLM_ARCH_CLOVER,\n"),
    (
        "src/llama-arch.cpp",
        '    { LLM_ARCH_UNKNOWN,          "(unknown)"        },\n',
        BEFORE,
        '    { LLM_ARCH_CLOVER, "clover" },\n',
    ),
    # the tensors that the block pass adds
    (
        "src/llama-arch.h",
        "    LLM_TENSOR_SSM_ALPHA, ",
        BEFORE,
        "    LLM_TENSOR_SSM_MEM_GATE,\n    LLM_TENSOR_SSM_BLOCK_SCALE,\n    LLM_TENSOR_BLOCK_SIZE_HEAD,\n",
    ),
    (
        "src/llama-arch.cpp",
        '"blk.%d.ssm_alpha" },\n',
        AFTER,
        '    { LLM_TENSOR_SSM_MEM_GATE, "blk.%d.ssm_mem_gate" },\n'
        '    { LLM_TENSOR_SSM_BLOCK_SCALE, "blk.%d.ssm_block_scale" },\n'
        '    { LLM_TENSOR_BLOCK_SIZE_HEAD, "block_size_head" },\n',
    ),
    (
        "src/llama-arch.cpp",
        "    {LLM_TENSOR_SSM_ALPHA, ",
        BEFORE,
        "    { LLM_TENSOR_SSM_MEM_GATE, { LLM_TENSOR_LAYER_REPEATING, GGML_OP_MUL_MAT } },\n"
        "    { LLM_TENSOR_SSM_BLOCK_SCALE, { LLM_TENSOR_LAYER_REPEATING, GGML_OP_MUL } },\n"
        "    { LLM_TENSOR_BLOCK_SIZE_HEAD, { LLM_TENSOR_LAYER_OUTPUT, GGML_OP_MUL_MAT } },\n",
    ),
    # it has recurrent and attention layers; one tensor is not split over several devices
    (
        "src/llama-arch.cpp",
        "bool llm_arch_is_hybrid(const llm_arch & arch) {\n    switch (arch) {\n",
        AFTER,
        "        case LLM_ARCH_CLOVER:\n",
    ),
    (
        "src/llama-arch.cpp",
        "bool llm_arch_supports_sm_tensor(const llm_arch & arch) {\n    switch (arch) {\n",
        AFTER,
        "        case LLM_ARCH_CLOVER:\n",
    ),
    # the model
    ("src/llama-model.cpp", '#include "models/models.h"\n', AFTER, '#include "models/clover.h"\n'),
    (
        "src/llama-model.cpp",
        "            return new llama_model_qwen35moe(params);\n",
        AFTER,
        "        case LLM_ARCH_CLOVER:\n            return new llama_model_clover(params);\n",
    ),
    # as qwen35moe: interleaved MRoPE, and as many graph nodes
    (
        "src/llama-model.cpp",
        "        case LLM_ARCH_QWEN35MOE:\n        case LLM_ARCH_QWEN4EXP:\n",
        BEFORE,
        "        case LLM_ARCH_CLOVER:\n",
    ),
    ("src/llama-context.cpp", "        model.arch == LLM_ARCH_QWEN35MOE ||\n", AFTER, "        model.arch == LLM_ARCH_CLOVER ||\n"),
    # the block pass of a GDN layer: declared as a member of upstream's graph, whose helpers it uses, and taken when not causal
    (
        "src/models/models.h",
        "struct llama_model_qwen35moe : public llama_model_base {\n"
        "    llama_model_qwen35moe(const struct llama_model_params & params) : llama_model_base(params) {}\n"
        "    void load_arch_hparams(llama_model_loader & ml) override;\n"
        "    void load_arch_tensors(llama_model_loader & ml) override;\n\n"
        "    struct graph : public llm_build_delta_net_base {\n",
        AFTER,
        "        ggml_tensor * build_layer_attn_linear_block(llm_graph_input_rs * inp, ggml_tensor * cur, int il);\n\n",
    ),
    (
        "src/models/qwen35moe.cpp",
        "    const auto * mctx_cur = inp->mctx;\n",
        BEFORE,
        "    if (!cparams.causal_attn && model.arch == LLM_ARCH_CLOVER) {\n"
        "        return build_layer_attn_linear_block(inp, cur, il);\n"
        "    }\n",
    ),
    # llama-quantize leaves the small tensors of the block pass alone
    (
        "src/llama-quant.cpp",
        '    quantize &= name.find("ssm_conv1d") == std::string::npos;\n',
        AFTER,
        '    quantize &= name.find("ssm_mem_gate") == std::string::npos;\n'
        '    quantize &= name.find("block_size_head") == std::string::npos;\n',
    ),
)
