// What the fork adds to llama.h.
#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// The shared pass of a Clover model: the first n_causal positions of the batch go on with the context causally and stay in
// memory; the others see the context, those positions and each other, and leave nothing behind. One sequence, consecutive
// positions, 0 <= n_causal < n_tokens <= n_ubatch.
// Returns as llama_decode does; -1 with a logged reason, and nothing evaluated, for a batch that is not as said above.
LLAMA_API int32_t llama_clover_decode(struct llama_context * ctx, struct llama_batch batch, int32_t n_causal);

#ifdef __cplusplus
}
#endif
