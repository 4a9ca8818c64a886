#include "session.h"

#include "error.h"

#include <algorithm>
#include <climits>
#include <string>

namespace clover {

Session::Use::Use(Session & session) : session(session) {
    require(!session.busy.exchange(true), CLOVER_ERROR_BUSY,
            "the session is in use (by another thread, or by the caller of this callback)");
}

Session::Session(std::shared_ptr<const Model> given, const clover_session_params & params, std::shared_ptr<Imatrix> imatrix) :
    model(std::move(given)), context(*model, params, std::move(imatrix)) {}

void Session::feed(const int32_t * more, int32_t n) {
    require(n >= 0 && (more != nullptr || n == 0), CLOVER_ERROR_ARGUMENT, "the tokens to feed are missing");
    require_valid(more, n);
    answer.reset();
    all.insert(all.end(), more, more + n);
    n_fed += n;
}

// Throws unless n tokens are in the vocabulary and fit behind the context's.
void Session::require_valid(const int32_t * more, int32_t n) const {
    for (int32_t i = 0; i < n; i++) {
        require(model->is_valid(more[i]), CLOVER_ERROR_ARGUMENT,
                "token " + std::to_string(more[i]) + " is not in the vocabulary of " + std::to_string(model->info().n_vocab));
    }
    require(n <= context.size() - (int32_t)all.size(), CLOVER_ERROR_CONTEXT_FULL,
            std::to_string(n) + " tokens do not fit: the context of " + std::to_string(context.size()) + " tokens already holds " +
                std::to_string(all.size()));
}

void Session::evaluate(const int32_t * more, int32_t n, int32_t pass, float * logits) {
    require(pass == CLOVER_PASS_CAUSAL || pass == CLOVER_PASS_BLOCK, CLOVER_ERROR_ARGUMENT,
            "pass " + std::to_string(pass) + " is not one of enum clover_pass");
    require(n > 0 && more != nullptr, CLOVER_ERROR_ARGUMENT, "the tokens to evaluate are missing");
    const bool block = pass == CLOVER_PASS_BLOCK;
    if (block) {
        require(model->info().can_block, CLOVER_ERROR_UNSUPPORTED, "this model has no block pass");
        require(n <= context.max_window(), CLOVER_ERROR_ARGUMENT,
                std::to_string(n) + " positions are too many for a block pass, which takes " +
                    std::to_string(context.max_window()));
        require(!all.empty(), CLOVER_ERROR_ARGUMENT, "a block pass follows a context: feed or evaluate at least one token first");
    }
    require_valid(more, n);
    answer.reset();
    try {
        if (block) {
            evaluate_causal(nullptr, 0);
            evaluate_block(more, n, logits);
        } else {
            all.insert(all.end(), more, more + n);
            n_fed += n;
            evaluate_causal(logits, n);
        }
    } catch (...) {
        clear();
        throw;
    }
}

// Evaluates what is pending of the context; logits [n, n_vocab] of its last n tokens, or NULL.
void Session::evaluate_causal(float * logits, int32_t n) {
    const int32_t size = (int32_t)all.size();
    while (context.n_past() < size) {
        const int32_t past  = context.n_past();
        const bool    rows  = logits != nullptr && past >= size - n;
        const int32_t end   = rows || logits == nullptr ? size : size - n;
        const int32_t chunk = std::min({ end - past, context.max_chunk(), rows ? context.max_rows() : INT32_MAX });
        context.causal(all.data() + past, chunk, past + chunk == size, rows);
        for (int32_t i = 0; rows && i < chunk; i++) {
            logits = std::copy_n(context.row(i), context.n_vocab(), logits);
        }
    }
}

void Session::evaluate_block(const int32_t * more, int32_t n, float * logits) {
    const std::unique_ptr<bool[]> wanted(new bool[n]());
    std::fill_n(wanted.get(), n, logits != nullptr);
    context.block(more, wanted.get(), n);
    for (int32_t i = 0; logits != nullptr && i < n; i++) {
        logits = std::copy_n(context.row(i), context.n_vocab(), logits);
    }
}

void Session::clear() {
    answer.reset();
    context.clear();
    all.clear();
    n_fed = 0;
}

void Session::begin(const clover_generate_params & params) {
    std::unique_ptr<Answer> next(new Answer(*model, context, all, params, n_fed));
    answer    = std::move(next);
    n_fed     = 0;
    cancelled = false;
    publish(answer->counts());
}

bool Session::step() {
    require(answer != nullptr, CLOVER_ERROR_ARGUMENT, "no answer was begun");
    if (!answer->done() && cancelled) {
        answer->cancel();
    }
    if (!answer->done()) {
        try {
            answer->step();
        } catch (...) {
            clear();
            throw;
        }
    }
    publish(answer->counts());
    return answer->done();
}

void Session::publish(const clover_stats & stats) {
    const std::lock_guard<std::mutex> guard(stats_lock);
    published = stats;
}

clover_stats Session::stats() const {
    const std::lock_guard<std::mutex> guard(stats_lock);
    return published;
}

} // namespace clover
