// One answer in the making: settings, the window of undecided positions, the text held back, counts.
#pragma once

#include "clover.h"
#include "context.h"
#include "model.h"
#include "sampler.h"
#include "text_stream.h"

#include <vector>

namespace clover {

class Answer {
  public:
    // Throws unless params are in range and the model can do it. `tokens`, the session's, grow as positions become final.
    Answer(const Model & model, Context & context, std::vector<int32_t> & tokens, const clover_generate_params & params,
           int32_t n_fed);

    // Throws unless params are in range and the model can do it.
    static void check(const Model & model, const Context & context, const clover_generate_params & params);

    // At most one pass of the model.
    void step();
    void cancel() { end(CLOVER_FINISH_CANCELLED); }

    bool                 done() const { return stats.finish != CLOVER_FINISH_NONE; }
    const clover_stats & counts() const { return stats; }

  private:
    struct Slot {
        bool      fixed;
        Candidate candidate;
    };

    int32_t   room() const;
    int32_t   first_end() const;
    bool      evaluate_pending();
    void      open_window();
    void      denoise();
    Candidate pick(const float * logits, int32_t position) const;
    void      fix(const std::vector<int32_t> & positions);
    void      deliver();
    void      send_text();
    void      end(clover_finish finish);

    const Model &          model;
    Context &              context;
    std::vector<int32_t> & tokens;
    clover_generate_params params;
    Sampler                sampler;
    TextStream             text;
    clover_stats           stats = {};
    std::vector<size_t>    starts;          // in the text, of each token
    size_t                 prompt_end;      // tokens before the answer
    std::vector<Slot>      window;          // empty: none is open
    size_t                 delivered   = 0; // positions of the window that are in `tokens`
    int32_t                start       = 0; // index in the answer of the window's first position
    int32_t                block_index = -1;
    int32_t                step_index  = 0;
};

} // namespace clover
