// Checks a GGUF file before llama.cpp reads it: llama.cpp asserts where we want a message.
#pragma once

#include <string>

namespace clover {

// Throws Error(CLOVER_ERROR_FILE) unless the file is a whole GGUF of an architecture we run: header readable, every tensor
// inside the file, the numbers that llama.cpp divides by or asserts on in range, tokens unique.
// Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Returns the architecture.
std::string check_gguf(const std::string & path);

} // namespace clover
