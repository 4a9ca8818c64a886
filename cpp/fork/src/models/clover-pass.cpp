#include "clover-pass.h"

#include "llama-clover.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <cmath>

void clover_mask_causal_rows(ggml_tensor * mask, const ggml_tensor * cells, int32_t n_causal) {
    const auto *  column = static_cast<const int64_t *>(cells->data);
    const int64_t tokens = cells->ne[0];
    for (int64_t row = 0; row < n_causal; ++row) {
        char * data = static_cast<char *>(mask->data) + row * mask->nb[1];
        for (int64_t later = row + 1; later < tokens; ++later) {
            if (mask->type == GGML_TYPE_F16) {
                reinterpret_cast<ggml_fp16_t *>(data)[column[later]] = ggml_fp32_to_fp16(-INFINITY);
            } else {
                reinterpret_cast<float *>(data)[column[later]] = -INFINITY;
            }
        }
    }
}

void llama_context::clover_set_n_causal(int32_t n) {
    cparams.clover_n_causal = n;
}

namespace {

const char * refusal(llama_context & ctx, const llama_batch & batch, int32_t n_causal) {
    if (ctx.get_model().arch != LLM_ARCH_CLOVER) {
        return "the model has no block pass";
    }
    if (!batch.token || !batch.pos || !batch.seq_id || !batch.n_seq_id) {
        return "tokens, positions and sequence ids must be given";
    }
    if (n_causal < 0 || n_causal >= batch.n_tokens || batch.n_tokens > int32_t(ctx.n_ubatch())) {
        return "the numbers of positions are out of range";
    }
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        if (batch.n_seq_id[i] != 1 || batch.seq_id[i][0] != batch.seq_id[0][0] || batch.pos[i] != batch.pos[0] + i) {
            return "it takes consecutive positions of one sequence";
        }
    }
    return nullptr;
}

// Forgets the positions from `end` on, whose recurrent state was never written.
void forget(llama_context & ctx, llama_seq_id sequence, llama_pos end) {
    auto * memory = dynamic_cast<llama_memory_hybrid *>(ctx.get_memory());
    GGML_ASSERT(memory != nullptr);
    memory->get_mem_attn()->seq_rm(sequence, end, -1);
    for (auto & cell : memory->get_mem_recr()->cells) {
        if (cell.has_seq_id(sequence)) {
            cell.pos = end - 1;
        }
    }
}

} // namespace

int32_t llama_clover_decode(llama_context * ctx, llama_batch batch, int32_t n_causal) {
    if (const char * reason = refusal(*ctx, batch, n_causal)) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, reason);
        return -1;
    }
    const bool causal = ctx->get_causal_attn();
    ctx->set_causal_attn(false);
    ctx->clover_set_n_causal(n_causal);
    const int32_t status = llama_decode(ctx, batch);
    ctx->clover_set_n_causal(0);
    ctx->set_causal_attn(causal);
    if (status == 0) {
        forget(*ctx, batch.seq_id[0][0], batch.pos[0] + n_causal);
    }
    return status;
}
