// A conversation: the context's tokens, and at most one answer in the making.
#pragma once

#include "answer.h"
#include "clover.h"
#include "context.h"
#include "model.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace clover {

class Session {
  public:
    Session(std::shared_ptr<const Model> model, const clover_session_params & params, std::shared_ptr<Imatrix> imatrix);

    void feed(const int32_t * more, int32_t n);
    void clear();
    void check(const clover_generate_params & params) const { Answer::check(*model, context, params); }

    // logits [n, n_vocab], or NULL: not wanted. If it fails while evaluating, the session is cleared.
    void evaluate(const int32_t * more, int32_t n, int32_t pass, float * logits);

    void begin(const clover_generate_params & params);
    bool step(); // true: the answer is finished
    void cancel() { cancelled = true; }

    const std::vector<int32_t> & tokens() const { return all; }
    int32_t                      n_ctx() const { return context.size(); }
    clover_stats                 stats() const;

    // Held by the thread that is inside the session; throws CLOVER_ERROR_BUSY if there is one already.
    class Use {
      public:
        explicit Use(Session & session);
        ~Use() { session.busy = false; }
        Use(const Use &)             = delete;
        Use & operator=(const Use &) = delete;

      private:
        Session & session;
    };

  private:
    void require_valid(const int32_t * more, int32_t n) const;
    void evaluate_causal(float * logits, int32_t n);
    void evaluate_block(const int32_t * more, int32_t n, float * logits);
    void publish(const clover_stats & stats);

    std::shared_ptr<const Model> model;
    Context                      context;
    std::vector<int32_t>         all; // the first context.n_past() of them are evaluated
    std::unique_ptr<Answer>      answer;
    int32_t                      n_fed = 0; // since the last answer
    std::atomic<bool>            cancelled{ false };
    std::atomic<bool>            busy{ false };
    mutable std::mutex           stats_lock;
    clover_stats                 published = {};
};

} // namespace clover
