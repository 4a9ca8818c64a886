// llama.cpp's context behind the two passes that decoding is made of.
#pragma once

#include "clover.h"
#include "imatrix.h"
#include "llama.h"
#include "model.h"

#include <memory>
#include <vector>

namespace clover {

// Sequence 0 holds the context. A block pass runs on sequence 1, a copy of it that is dropped afterwards: whatever was
// denoised, the context's state stays as the last causal pass left it.
class Context {
  public:
    // imatrix: observes the passes; may be NULL.
    Context(const Model & model, const clover_session_params & params, std::shared_ptr<Imatrix> imatrix);

    int32_t size() const { return n_ctx; }          // most tokens it holds
    int32_t max_chunk() const { return n_batch; }   // most tokens of a causal pass
    int32_t max_window() const { return n_window; } // most positions of a block pass
    int32_t max_rows() const { return n_rows; }     // most positions of a pass whose logits are wanted
    int32_t n_past() const { return past; }         // tokens evaluated
    int32_t n_vocab() const { return vocab_size; }

    // Evaluates the next n tokens of the context, n <= max_chunk(). `logits`: next() is wanted. `rows`: row() of every position
    // too, then n <= max_rows().
    void causal(const int32_t * tokens, int32_t n, bool logits, bool rows = false);

    // Logits [n_vocab] of what follows the context; nullptr if the last causal pass was not asked for them.
    const float * next() const { return following.empty() ? nullptr : following.data(); }

    // Evaluates n positions after the context, n <= max_window(), with attention in both directions; nothing is kept.
    // wanted [n]: row(i) is needed.
    void block(const int32_t * tokens, const bool * wanted, int32_t n);

    // Logits [n_vocab] of position i of the last pass.
    const float * row(int32_t i) const;

    void clear();

  private:
    void decode(const int32_t * tokens, const bool * wanted, int32_t n, int32_t sequence);

    std::shared_ptr<Imatrix>                                  imatrix; // longer than the context that calls it
    std::unique_ptr<llama_context, void (*)(llama_context *)> context;
    std::vector<float>                                        following;
    int32_t                                                   vocab_size = 0;
    int32_t                                                   n_ctx      = 0;
    int32_t                                                   n_batch    = 0;
    int32_t                                                   n_window   = 0;
    int32_t                                                   n_rows     = 0;
    int32_t                                                   past       = 0;
};

} // namespace clover
