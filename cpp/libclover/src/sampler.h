// The candidate of one position: which token its logits propose, and how sure they are.
#pragma once

#include <cstdint>
#include <vector>

namespace clover {

struct Candidate {
    int32_t token;
    float   confidence; // softmax probability before the temperature, over the whole vocabulary
};

struct SamplerParams {
    float    temperature = 0;
    int32_t  top_k       = 0;
    float    top_p       = 1;
    float    min_p       = 0;
    uint64_t seed        = 0;
};

class Sampler {
  public:
    Sampler(const SamplerParams & params, std::vector<int32_t> banned) : params(params), banned(std::move(banned)) {}

    // The candidate for the answer's position `index` from logits [n_vocab]. Temperature 0: the most likely token (the first
    // of equals). Else: sampled from the softmax cut by top-k, top-p, min-p, in that order, then tempered. One position
    // always gets the same random number, whatever the step, the window or the mode. Throws on logits that are not finite.
    Candidate pick(const float * logits, int32_t n_vocab, int32_t index) const;

  private:
    SamplerParams        params;
    std::vector<int32_t> banned;
};

} // namespace clover
