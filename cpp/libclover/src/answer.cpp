#include "answer.h"

#include "error.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

namespace clover {
namespace {

SamplerParams sampling(const clover_generate_params & p) {
    SamplerParams out;
    out.temperature = p.temperature;
    out.top_k       = p.top_k;
    out.top_p       = p.top_p;
    out.min_p       = p.min_p;
    out.seed        = p.seed;
    return out;
}

const clover_generate_params & checked(const Model & model, const Context & context, const clover_generate_params & p) {
    Answer::check(model, context, p);
    return p;
}

// Adds the time until its end to a count of seconds.
class Timer {
  public:
    explicit Timer(double & seconds) : seconds(seconds), began(std::chrono::steady_clock::now()) {}
    ~Timer() { seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(); }

  private:
    double &                              seconds;
    std::chrono::steady_clock::time_point began;
};

} // namespace

void Answer::check(const Model & model, const Context & context, const clover_generate_params & p) {
    const auto in_range = [](const char * name, bool ok, const char * allowed) {
        require(ok, CLOVER_ERROR_ARGUMENT, std::string(name) + " is out of range: " + allowed);
    };
    in_range("mode", p.mode == CLOVER_MODE_BLOCK || p.mode == CLOVER_MODE_AR, "one of enum clover_mode");
    in_range("max_tokens", p.max_tokens >= -1, "-1 (as many as fit) or more");
    in_range("threshold", (p.threshold >= 0 && p.threshold <= 1) || p.threshold == -1, "0 to 1, or -1 for the model's");
    in_range("temperature", p.temperature >= 0 && std::isfinite(p.temperature), "0 or more");
    in_range("top_k", p.top_k >= 0, "0 (all) or more");
    in_range("top_p", p.top_p > 0 && p.top_p <= 1, "above 0, up to 1");
    in_range("min_p", p.min_p >= 0 && p.min_p <= 1, "0 to 1");
    require(p.mode != CLOVER_MODE_BLOCK || model.info().can_block, CLOVER_ERROR_UNSUPPORTED,
            "this model has no block pass: it decodes autoregressively only");
    in_range("window", p.window >= 0 && (p.mode != CLOVER_MODE_BLOCK || p.window <= context.max_window()),
             ("0 (the model's block size) to " + std::to_string(context.max_window())).c_str());
    require(p.n_stop == 0 || p.stop != nullptr, CLOVER_ERROR_ARGUMENT, "stop is NULL");
    for (size_t i = 0; i < p.n_stop; i++) {
        in_range("stop", p.stop[i] != nullptr && p.stop[i][0] != '\0', "a stop string is not NULL and not empty");
    }
}

Answer::Answer(const Model & model, Context & context, std::vector<int32_t> & tokens, const clover_generate_params & given,
               int32_t n_fed) :
    model(model), context(context), tokens(tokens), params(checked(model, context, given)),
    sampler(sampling(given), model.banned()), text(std::vector<std::string>(given.stop, given.stop + given.n_stop)),
    prompt_end(tokens.size()) {
    require(!tokens.empty(), CLOVER_ERROR_ARGUMENT, "there is nothing to answer: feed at least one token first");
    params.stop = nullptr; // the caller's memory
    if (params.window == 0) {
        params.window = model.info().block_size;
    }
    if (params.threshold == -1) {
        params.threshold = model.info().threshold;
    }
    stats.size          = sizeof(stats);
    stats.prompt_tokens = n_fed;
    if (room() == 0) {
        end(CLOVER_FINISH_LENGTH);
    }
}

// How many more tokens the answer may have.
int32_t Answer::room() const {
    const auto left = context.size() - (int32_t)tokens.size();
    return params.max_tokens < 0 ? left : std::min(left, params.max_tokens - (int32_t)(tokens.size() - prompt_end));
}

// Index of the first end token in the window, or its size: what stands after it does not matter any more.
int32_t Answer::first_end() const {
    const auto found = std::find_if(window.begin(), window.end(),
                                    [&](const Slot & slot) { return slot.fixed && model.is_end(slot.candidate.token); });
    return (int32_t)(found - window.begin());
}

void Answer::step() {
    const Timer timer(stats.seconds);
    if (window.empty() && evaluate_pending()) {
        return;
    }
    if (window.empty()) {
        open_window();
    } else {
        denoise();
    }
    const int32_t steps   = params.mode == CLOVER_MODE_AR ? block_index + 1 : stats.block_passes;
    stats.tokens_per_step = steps ? (double)stats.tokens / steps : 0;
}

// Evaluates the next tokens of the context that were not yet; true if others are left for the next step.
bool Answer::evaluate_pending() {
    const bool used = params.mode == CLOVER_MODE_AR || model.info().shift_logits; // the logits of what follows
    if (used && context.n_past() == (int32_t)tokens.size() && context.next() == nullptr) {
        context.clear(); // a cancelled block answer left none: evaluate anew
    }
    const int32_t past = context.n_past();
    const int32_t left = (int32_t)tokens.size() - past;
    if (left == 0) {
        return false;
    }
    const bool    prompt = past < (int32_t)prompt_end;
    const bool    commit = params.mode == CLOVER_MODE_BLOCK;
    const int32_t n      = std::min(left, context.max_chunk());
    {
        const Timer timer(prompt ? stats.prompt_seconds : commit ? stats.commit_seconds : stats.causal_seconds);
        context.causal(tokens.data() + past, n, used && n == left);
    }
    (prompt ? stats.prompt_passes : commit ? stats.commit_passes : stats.causal_passes)++;
    return n < left;
}

// Begins the next block (autoregressive decoding: the next token, a block of one).
void Answer::open_window() {
    const bool block = params.mode == CLOVER_MODE_BLOCK;
    window.assign(block ? std::min(params.window, room()) : 1, Slot{});
    delivered  = 0;
    step_index = 0;
    start      = (int32_t)(tokens.size() - prompt_end);
    block_index++;
    if (!block || model.info().shift_logits) {
        window[0].candidate = pick(context.next(), 0);
        fix({ 0 });
    }
}

Candidate Answer::pick(const float * logits, int32_t position) const {
    require(logits != nullptr, CLOVER_ERROR_ENGINE, "the logits after the context were not computed");
    return sampler.pick(logits, context.n_vocab(), start + position);
}

// One block pass: fixes every undecided position that is sure enough, or the surest one.
void Answer::denoise() {
    const int32_t           n     = (int32_t)window.size();
    const int32_t           shift = model.info().shift_logits ? 1 : 0;
    const int32_t           end   = first_end();
    std::vector<int32_t>    inputs(n, model.info().mask_token);
    std::unique_ptr<bool[]> wanted(new bool[n]());
    for (int32_t i = 0; i < n; i++) {
        if (window[i].fixed) {
            inputs[i] = window[i].candidate.token;
        } else if (i < end) {
            wanted[i - shift] = true;
        }
    }
    {
        const Timer timer(stats.block_seconds);
        context.block(inputs.data(), wanted.get(), n);
    }
    stats.block_passes++;
    step_index++;

    std::vector<int32_t> sure;
    int32_t              best = -1;
    for (int32_t i = 0; i < end; i++) {
        if (window[i].fixed) {
            continue;
        }
        window[i].candidate = pick(context.row(i - shift), i);
        if (window[i].candidate.confidence > params.threshold) {
            sure.push_back(i);
        }
        if (best < 0 || window[i].candidate.confidence > window[best].candidate.confidence) {
            best = i;
        }
    }
    fix(sure.empty() ? std::vector<int32_t>{ best } : sure);
}

void Answer::fix(const std::vector<int32_t> & positions) {
    std::vector<int32_t> fixed;
    std::vector<float>   confidences;
    for (const int32_t i : positions) {
        window[i].fixed = true;
        fixed.push_back(window[i].candidate.token);
        confidences.push_back(window[i].candidate.confidence);
    }
    if (params.on_step) {
        clover_step event = {};
        event.size        = sizeof(event);
        event.block       = block_index;
        event.step        = step_index;
        event.start       = start;
        event.block_size  = (int32_t)window.size();
        event.n_fixed     = (int32_t)positions.size();
        event.positions   = positions.data();
        event.tokens      = fixed.data();
        event.confidences = confidences.data();
        if (!params.on_step(&event, params.user_data)) {
            return cancel();
        }
    }
    deliver();
}

// Hands out the positions that have become final: all before them are decided.
void Answer::deliver() {
    while (delivered < window.size() && window[delivered].fixed) {
        const int32_t token  = window[delivered++].candidate.token;
        const int32_t before = tokens.empty() ? NO_TOKEN : tokens.back();
        tokens.push_back(token);
        if (model.is_end(token)) {
            return end(CLOVER_FINISH_STOP);
        }
        stats.tokens++;
        starts.push_back(text.length());
        if (text.push(model.text(token, before, params.special))) {
            stats.tokens = (int32_t)(std::lower_bound(starts.begin(), starts.end(), text.length()) - starts.begin());
            return end(CLOVER_FINISH_STOP_STRING);
        }
    }
    if (room() == 0) {
        return end(CLOVER_FINISH_LENGTH);
    }
    if (delivered == window.size()) {
        window.clear();
    }
    send_text();
}

void Answer::send_text() {
    const std::string ready = text.take();
    if (!ready.empty() && params.on_text && !params.on_text(ready.data(), ready.size(), params.user_data) && !done()) {
        cancel();
    }
}

void Answer::end(clover_finish finish) {
    stats.finish = finish;
    window.clear();
    if (finish != CLOVER_FINISH_CANCELLED) {
        text.finish();
        send_text();
    }
}

} // namespace clover
