// The shared pass: what the attention layers and the memory need for it.
#pragma once

#include <cstdint>

struct ggml_tensor;

// Makes the first n_causal rows of a non-causal attention mask [n_kv, tokens] (F16 or F32) causal. cells: I64 [tokens], the
// column of each token of the pass, in the order of its positions.
void clover_mask_causal_rows(ggml_tensor * mask, const ggml_tensor * cells, int32_t n_causal);
