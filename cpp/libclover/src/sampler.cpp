#include "sampler.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace clover {

// A uniform number in [0, 1) that depends on seed and index only: splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
static double uniform(uint64_t seed, uint64_t index) {
    uint64_t z = seed * 0xd1342543de82ef95ull + (index + 1) * 0x9e3779b97f4a7c15ull;
    for (int round = 0; round < 2; round++) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

Candidate Sampler::pick(const float * logits, int32_t n_vocab, int32_t index) const {
    const float highest = *std::max_element(logits, logits + n_vocab);
    double      total   = 0;
    for (int32_t i = 0; i < n_vocab; i++) {
        total += std::exp(logits[i] - highest);
    }
    require(std::isfinite(highest) && std::isfinite(total), CLOVER_ERROR_ENGINE,
            "the model produced logits that are not finite: its weights are damaged or overflow in their type");

    std::vector<float> allowed(logits, logits + n_vocab);
    for (const int32_t token : banned) {
        allowed[token] = -std::numeric_limits<float>::infinity();
    }
    const auto probability = [&](int32_t token) { return std::exp((double)allowed[token] - highest) / total; };
    const auto best        = (int32_t)(std::max_element(allowed.begin(), allowed.end()) - allowed.begin());
    if (params.temperature <= 0) {
        return { best, (float)probability(best) };
    }

    std::vector<int32_t> order;
    const double         floor = params.min_p * probability(best);
    for (int32_t i = 0; i < n_vocab; i++) {
        if (allowed[i] > -std::numeric_limits<float>::infinity() && (params.min_p <= 0 || probability(i) >= floor)) {
            order.push_back(i);
        }
    }
    const auto   likelier = [&](int32_t a, int32_t b) { return allowed[a] != allowed[b] ? allowed[a] > allowed[b] : a < b; };
    const size_t keep     = params.top_k > 0 ? std::min<size_t>(params.top_k, order.size()) : order.size();
    if (keep < order.size()) {
        std::partial_sort(order.begin(), order.begin() + keep, order.end(), likelier);
        order.resize(keep);
    } else if (params.top_p < 1) {
        std::sort(order.begin(), order.end(), likelier);
    }
    if (params.top_p < 1) {
        double mass = 0;
        for (const int32_t token : order) {
            mass += probability(token);
        }
        double sum = 0;
        size_t n   = 0;
        while (n < order.size() && (n == 0 || sum < params.top_p * mass)) {
            sum += probability(order[n++]);
        }
        order.resize(n);
    }

    const auto weight = [&](int32_t token) { return std::exp(((double)allowed[token] - allowed[best]) / params.temperature); };
    double     mass   = 0;
    for (const int32_t token : order) {
        mass += weight(token);
    }
    double  target = uniform(params.seed, (uint64_t)index) * mass;
    int32_t token  = order.back();
    for (const int32_t each : order) {
        target -= weight(each);
        if (target < 0) {
            token = each;
            break;
        }
    }
    return { token, (float)probability(token) };
}

} // namespace clover
