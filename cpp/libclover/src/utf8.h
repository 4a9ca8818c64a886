// UTF-8 by the well-formedness table of the Unicode Standard (table 3-7).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace clover {

struct Utf8 {
    enum Kind { VALID, INVALID, INCOMPLETE } kind;
    size_t   size; // bytes of the character; of the invalid part to replace; or of what is left
    uint32_t code; // only of a valid character
};

// The character at the start of n >= 1 bytes. INCOMPLETE: all n bytes begin a character that more bytes could finish.
Utf8 utf8_next(const char * text, size_t n);

void utf8_append(std::string & text, uint32_t code);

// Every invalid part, and an incomplete end, replaced by U+FFFD.
std::string utf8_replace(const std::string & text);

} // namespace clover
