#include "session.h"

#include "error.h"

#include <string>

namespace clover {

Session::Use::Use(Session & session) : session(session) {
    require(!session.busy.exchange(true), CLOVER_ERROR_BUSY,
            "the session is in use (by another thread, or by the caller of this callback)");
}

Session::Session(std::shared_ptr<const Model> given, const clover_session_params & params) :
    model(std::move(given)), context(*model, params) {}

void Session::feed(const int32_t * more, int32_t n) {
    require(n >= 0 && (more != nullptr || n == 0), CLOVER_ERROR_ARGUMENT, "the tokens to feed are missing");
    for (int32_t i = 0; i < n; i++) {
        require(model->is_valid(more[i]), CLOVER_ERROR_ARGUMENT,
                "token " + std::to_string(more[i]) + " is not in the vocabulary of " + std::to_string(model->info().n_vocab));
    }
    require(n <= context.size() - (int32_t)all.size(), CLOVER_ERROR_CONTEXT_FULL,
            std::to_string(n) + " tokens do not fit: the context of " + std::to_string(context.size()) + " tokens already holds " +
                std::to_string(all.size()));
    answer.reset();
    all.insert(all.end(), more, more + n);
    n_fed += n;
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
