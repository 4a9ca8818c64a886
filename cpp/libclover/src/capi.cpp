// The C API over Model and Session: exceptions become codes, structs of older and newer callers are met by their size.
#include "clover.h"
#include "error.h"
#include "imatrix.h"
#include "model.h"
#include "session.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <string>

struct clover_model {
    std::shared_ptr<clover::Model> model;
};

struct clover_session {
    clover::Session session;
};

struct clover_imatrix {
    std::shared_ptr<clover::Imatrix> imatrix;
};

namespace {

using clover::Error;
using clover::require;

thread_local std::string last_error;

clover_status fail(clover_status status, const char * message) noexcept {
    try {
        last_error = message;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

template <typename F> clover_status guarded(F && body) noexcept {
    try {
        body();
        return CLOVER_OK;
    } catch (const Error & error) {
        return fail(error.status, error.what());
    } catch (const std::bad_alloc &) {
        return fail(CLOVER_ERROR_MEMORY, "out of memory");
    } catch (const std::exception & error) {
        return fail(CLOVER_ERROR_ENGINE, error.what());
    } catch (...) {
        return fail(CLOVER_ERROR_ENGINE, "unknown failure");
    }
}

void require_given(const void * pointer, const char * name) {
    require(pointer != nullptr, CLOVER_ERROR_ARGUMENT, std::string(name) + " is NULL");
}

// Writes the fields that the caller's struct of `size` bytes has; what it has beyond ours becomes zero.
template <typename T> void write_struct(T * out, size_t size, T value) {
    if (out != nullptr && size >= sizeof(size_t)) {
        value.size = size;
        std::memset(static_cast<void *>(out), 0, size);
        std::memcpy(static_cast<void *>(out), &value, std::min(size, sizeof(T)));
    }
}

// The caller's fields over the defaults; NULL: the defaults.
template <typename T> T read_struct(const T * given, T value) {
    if (given != nullptr) {
        require(given->size >= sizeof(size_t), CLOVER_ERROR_ARGUMENT, "a struct's size is not set");
        std::memcpy(static_cast<void *>(&value), given, std::min(given->size, sizeof(T)));
    }
    return value;
}

clover_model_params model_defaults() {
    clover_model_params params = {};
    params.n_gpu_layers        = -1;
    params.use_mmap            = true;
    return params;
}

clover_session_params session_defaults() {
    clover_session_params params = {};
    params.n_ctx                 = 4096;
    params.n_batch               = 512;
    params.kv_type               = CLOVER_KV_F16;
    params.flash_attn            = CLOVER_FLASH_ATTN_AUTO;
    return params;
}

clover_generate_params generate_defaults() {
    clover_generate_params params = {};
    params.mode                   = CLOVER_MODE_BLOCK;
    params.max_tokens             = -1;
    params.threshold              = -1;
    params.top_p                  = 1;
    return params;
}

// Copies n values if they fit; what the counting functions return.
template <typename T> int32_t copy_out(const T * values, size_t n, T * out, int32_t capacity) {
    require(n <= INT32_MAX, CLOVER_ERROR_ARGUMENT, "the result is too long");
    if (capacity < (int32_t)n) {
        return -(int32_t)n;
    }
    std::copy_n(values, n, out);
    return (int32_t)n;
}

} // namespace

const char * clover_last_error(void) {
    return last_error.c_str();
}

const char * clover_version(void) {
    return CLOVER_VERSION;
}

int32_t clover_api_number(void) {
    return CLOVER_API_NUMBER;
}

void clover_model_default_params(clover_model_params * params, size_t size) {
    write_struct(params, size, model_defaults());
}

clover_status clover_model_load(const char * path, const clover_model_params * params, clover_model ** model) {
    return guarded([&] {
        require_given(model, "model");
        *model = nullptr;
        require_given(path, "path");
        *model = new clover_model{ std::make_shared<clover::Model>(path, read_struct(params, model_defaults())) };
    });
}

void clover_model_free(clover_model * model) {
    delete model;
}

void clover_model_get_info(const clover_model * model, clover_model_info * info, size_t size) {
    write_struct(info, size, model ? model->model->info() : clover_model_info{});
}

const char * clover_model_metadata(clover_model * model, const char * key) {
    const char * value = nullptr;
    guarded([&] {
        require_given(model, "model");
        require_given(key, "key");
        value = model->model->metadata(key);
    });
    return value;
}

int32_t clover_tokenize(const clover_model * model, const char * text, size_t n_text, bool parse_special, int32_t * tokens,
                        int32_t capacity) {
    int32_t n = INT32_MIN;
    guarded([&] {
        require_given(model, "model");
        require(text != nullptr || n_text == 0, CLOVER_ERROR_ARGUMENT, "text is NULL");
        require(capacity == 0 || (capacity > 0 && tokens != nullptr), CLOVER_ERROR_ARGUMENT, "there is no room for the tokens");
        const auto found = model->model->tokenize(std::string(text ? text : "", n_text), parse_special);
        n                = copy_out(found.data(), found.size(), tokens, capacity);
    });
    return n;
}

int32_t clover_detokenize(const clover_model * model, const int32_t * tokens, int32_t n_tokens, bool special, char * text,
                          int32_t capacity) {
    int32_t n = INT32_MIN;
    guarded([&] {
        require_given(model, "model");
        require(n_tokens == 0 || (n_tokens > 0 && tokens != nullptr), CLOVER_ERROR_ARGUMENT, "the tokens are missing");
        require(capacity == 0 || (capacity > 0 && text != nullptr), CLOVER_ERROR_ARGUMENT, "there is no room for the text");
        std::string found;
        for (int32_t i = 0; i < n_tokens; i++) {
            found += model->model->text(tokens[i], i > 0 ? tokens[i - 1] : clover::NO_TOKEN, special);
        }
        n = copy_out(found.data(), found.size(), text, capacity);
    });
    return n;
}

bool clover_token_is_end(const clover_model * model, int32_t token) {
    return model != nullptr && model->model->is_end(token);
}

void clover_session_default_params(clover_session_params * params, size_t size) {
    write_struct(params, size, session_defaults());
}

clover_status clover_session_new(clover_model * model, const clover_session_params * params, clover_session ** session) {
    return guarded([&] {
        require_given(session, "session");
        *session = nullptr;
        require_given(model, "model");
        const clover_session_params given   = read_struct(params, session_defaults());
        const auto                  imatrix = given.imatrix ? given.imatrix->imatrix : nullptr;
        *session                            = new clover_session{ { model->model, given, imatrix } };
    });
}

void clover_session_free(clover_session * session) {
    delete session;
}

clover_status clover_session_feed(clover_session * session, const int32_t * tokens, int32_t n_tokens) {
    return guarded([&] {
        require_given(session, "session");
        const clover::Session::Use use(session->session);
        session->session.feed(tokens, n_tokens);
    });
}

clover_status clover_session_clear(clover_session * session) {
    return guarded([&] {
        require_given(session, "session");
        const clover::Session::Use use(session->session);
        session->session.clear();
    });
}

int32_t clover_session_tokens(clover_session * session, int32_t * tokens, int32_t capacity) {
    int32_t n = INT32_MIN;
    guarded([&] {
        require_given(session, "session");
        require(capacity == 0 || (capacity > 0 && tokens != nullptr), CLOVER_ERROR_ARGUMENT, "there is no room for the tokens");
        const clover::Session::Use use(session->session);
        const auto &               all = session->session.tokens();
        std::copy_n(all.begin(), std::min<size_t>(all.size(), capacity), tokens);
        n = (int32_t)all.size();
    });
    return n;
}

int32_t clover_session_n_ctx(const clover_session * session) {
    return session ? session->session.n_ctx() : 0;
}

clover_status clover_session_evaluate(clover_session * session, const int32_t * tokens, int32_t n_tokens, int32_t pass,
                                      float * logits) {
    return guarded([&] {
        require_given(session, "session");
        const clover::Session::Use use(session->session);
        session->session.evaluate(tokens, n_tokens, pass, logits);
    });
}

clover_status clover_imatrix_new(clover_imatrix ** imatrix) {
    return guarded([&] {
        require_given(imatrix, "imatrix");
        *imatrix = nullptr;
        *imatrix = new clover_imatrix{ std::make_shared<clover::Imatrix>() };
    });
}

void clover_imatrix_free(clover_imatrix * imatrix) {
    delete imatrix;
}

void clover_imatrix_pause(clover_imatrix * imatrix, bool paused) {
    if (imatrix != nullptr) {
        imatrix->imatrix->paused = paused;
    }
}

int32_t clover_imatrix_count(const clover_imatrix * imatrix) {
    return imatrix ? (int32_t)imatrix->imatrix->all.size() : 0;
}

clover_status clover_imatrix_get(const clover_imatrix * imatrix, int32_t i, clover_imatrix_entry * entry, size_t size) {
    return guarded([&] {
        require_given(imatrix, "imatrix");
        require_given(entry, "entry");
        const auto & all = imatrix->imatrix->all;
        require(i >= 0 && i < (int32_t)all.size(), CLOVER_ERROR_ARGUMENT,
                "entry " + std::to_string(i) + " of " + std::to_string(all.size()));
        const auto & [name, matrices] = *std::next(all.begin(), i);
        clover_imatrix_entry found    = {};
        found.name                    = name.c_str();
        found.n_columns               = matrices.n_columns;
        found.n_matrices              = (int64_t)matrices.counts.size();
        found.sums                    = matrices.sums.data();
        found.counts                  = matrices.counts.data();
        write_struct(entry, size, found);
    });
}

void clover_generate_default_params(clover_generate_params * params, size_t size) {
    write_struct(params, size, generate_defaults());
}

clover_status clover_session_check(clover_session * session, const clover_generate_params * params) {
    return guarded([&] {
        require_given(session, "session");
        session->session.check(read_struct(params, generate_defaults()));
    });
}

clover_status clover_session_generate(clover_session * session, const clover_generate_params * params) {
    return guarded([&] {
        require_given(session, "session");
        const clover::Session::Use use(session->session);
        session->session.begin(read_struct(params, generate_defaults()));
        while (!session->session.step()) {}
    });
}

clover_status clover_session_begin(clover_session * session, const clover_generate_params * params) {
    return guarded([&] {
        require_given(session, "session");
        const clover::Session::Use use(session->session);
        session->session.begin(read_struct(params, generate_defaults()));
    });
}

clover_status clover_session_step(clover_session * session, bool * done) {
    return guarded([&] {
        require_given(session, "session");
        require_given(done, "done");
        *done = false;
        const clover::Session::Use use(session->session);
        *done = true; // also where the step fails
        *done = session->session.step();
    });
}

void clover_session_cancel(clover_session * session) {
    if (session != nullptr) {
        session->session.cancel();
    }
}

void clover_session_get_stats(const clover_session * session, clover_stats * stats, size_t size) {
    write_struct(stats, size, session ? session->session.stats() : clover_stats{});
}
