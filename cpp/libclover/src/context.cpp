#include "context.h"

#include "error.h"
#include "log.h"

#include <algorithm>
#include <string>
#include <thread>

namespace clover {
namespace {

constexpr int32_t CONTEXT = 0;
constexpr int32_t SCRATCH = 1;

constexpr int32_t MAX_CONTEXT = 1 << 24; // llama.cpp's own bookkeeping of 2^30 tokens takes all memory before anything fails
constexpr int32_t MAX_BATCH   = 1 << 16;
constexpr int32_t MIN_ROWS    = 32;  // their logits fit into what the layers' buffers take anyway
constexpr int32_t MAX_THREADS = 512; // GGML_MAX_N_THREADS

ggml_type cache_type(int32_t kv_type) {
    switch (kv_type) {
        case CLOVER_KV_F16: return GGML_TYPE_F16;
        case CLOVER_KV_F32: return GGML_TYPE_F32;
        case CLOVER_KV_Q8_0: return GGML_TYPE_Q8_0;
    }
    throw Error(CLOVER_ERROR_ARGUMENT, "kv_type " + std::to_string(kv_type) + " is not one of enum clover_kv_type");
}

llama_flash_attn_type attention_type(int32_t flash_attn) {
    switch (flash_attn) {
        case CLOVER_FLASH_ATTN_AUTO: return LLAMA_FLASH_ATTN_TYPE_AUTO;
        case CLOVER_FLASH_ATTN_OFF: return LLAMA_FLASH_ATTN_TYPE_DISABLED;
        case CLOVER_FLASH_ATTN_ON: return LLAMA_FLASH_ATTN_TYPE_ENABLED;
    }
    throw Error(CLOVER_ERROR_ARGUMENT, "flash_attn " + std::to_string(flash_attn) + " is not one of enum clover_flash_attn");
}

void require_range(const char * name, int32_t value, int32_t low, int32_t high) {
    require(value >= low && value <= high, CLOVER_ERROR_ARGUMENT,
            std::string(name) + " is " + std::to_string(value) + ", allowed are " + std::to_string(low) + " to " +
                std::to_string(high));
}

} // namespace

Context::Context(const Model & model, const clover_session_params & params, std::shared_ptr<Imatrix> given) :
    imatrix(std::move(given)), context(nullptr, llama_free) {
    require_range("n_ctx", params.n_ctx, 0, INT32_MAX);
    require_range("n_batch", params.n_batch, 1, MAX_BATCH);
    require_range("n_threads", params.n_threads, 0, MAX_THREADS);
    const int32_t limit = std::min(model.info().n_ctx_train, MAX_CONTEXT);
    n_ctx               = params.n_ctx == 0 ? limit : std::min(params.n_ctx, limit);
    n_batch             = params.n_batch;
    n_window            = std::max(2 * model.info().block_size, 1);
    n_rows              = std::max(n_window, MIN_ROWS);
    vocab_size          = model.info().n_vocab;

    llama_context_params p = llama_context_default_params();
    p.n_ctx                = n_ctx;
    p.n_batch = p.n_ubatch = std::max({ n_batch, n_window, n_rows }); // a block is never split
    p.n_seq_max            = 2;
    p.kv_unified           = true; // the copy of the context shares its keys and values
    p.n_rs_seq             = 0;
    p.n_outputs_max        = n_rows;
    p.n_threads = params.n_threads ? params.n_threads : std::clamp((int32_t)std::thread::hardware_concurrency(), 1, MAX_THREADS);
    p.n_threads_batch = p.n_threads;
    p.type_k = p.type_v = cache_type(params.kv_type);
    p.flash_attn_type   = attention_type(params.flash_attn);
    if (imatrix) {
        p.cb_eval           = Imatrix::observe;
        p.cb_eval_user_data = imatrix.get();
    }
    require(params.kv_type != CLOVER_KV_Q8_0 || params.flash_attn != CLOVER_FLASH_ATTN_OFF, CLOVER_ERROR_ARGUMENT,
            "kv_type Q8_0 needs flash attention");

    const LogCapture log;
    context.reset(llama_init_from_model(model.llama(), p));
    require(context != nullptr, CLOVER_ERROR_MEMORY,
            "a context of " + std::to_string(n_ctx) + " tokens cannot be made" + log.cause());
}

void Context::decode(const int32_t * tokens, const bool * wanted, int32_t n, int32_t sequence) {
    std::vector<llama_pos>      positions(n);
    std::vector<int32_t>        counts(n, 1);
    std::vector<llama_seq_id *> sequences(n, &sequence);
    std::vector<int8_t>         outputs(wanted, wanted + n);
    for (int32_t i = 0; i < n; i++) {
        positions[i] = past + i;
    }
    llama_batch batch = {};
    batch.n_tokens    = n;
    batch.token       = const_cast<int32_t *>(tokens);
    batch.pos         = positions.data();
    batch.n_seq_id    = counts.data();
    batch.seq_id      = sequences.data();
    batch.logits      = outputs.data();

    const LogCapture log;
    const int32_t    status = llama_decode(context.get(), batch);
    if (imatrix) {
        imatrix->check();
    }
    require(status == 0, status == -2 ? CLOVER_ERROR_MEMORY : CLOVER_ERROR_ENGINE,
            "evaluating " + std::to_string(n) + " tokens failed (llama_decode: " + std::to_string(status) + ")" + log.cause());
}

void Context::causal(const int32_t * tokens, int32_t n, bool logits, bool rows) {
    const std::unique_ptr<bool[]> wanted(new bool[n]());
    std::fill_n(wanted.get(), n, rows);
    wanted[n - 1] |= logits;
    following.clear();
    llama_set_causal_attn(context.get(), true);
    decode(tokens, wanted.get(), n, CONTEXT);
    past += n;
    if (logits) {
        const float * last = row(n - 1);
        following.assign(last, last + vocab_size);
    }
}

void Context::block(const int32_t * tokens, const bool * wanted, int32_t n) {
    llama_memory_t memory = llama_get_memory(context.get());
    llama_memory_seq_cp(memory, CONTEXT, SCRATCH, -1, -1);
    llama_set_causal_attn(context.get(), false);
    decode(tokens, wanted, n, SCRATCH);
    llama_memory_seq_rm(memory, SCRATCH, -1, -1);
}

const float * Context::row(int32_t i) const {
    const float * logits = llama_get_logits_ith(context.get(), i);
    require(logits != nullptr, CLOVER_ERROR_ENGINE, "no logits of position " + std::to_string(i));
    return logits;
}

void Context::clear() {
    llama_memory_clear(llama_get_memory(context.get()), /*data=*/true);
    following.clear();
    past = 0;
}

} // namespace clover
