#include "utf8.h"

namespace clover {

Utf8 utf8_next(const char * text, size_t n) {
    const auto    byte = [&](size_t i) { return (uint8_t)text[i]; };
    const uint8_t head = byte(0);
    if (head < 0x80) {
        return { Utf8::VALID, 1, head };
    }
    if (head < 0xc2 || head > 0xf4) {
        return { Utf8::INVALID, 1, 0 };
    }
    const size_t  size = head < 0xe0 ? 2 : head < 0xf0 ? 3 : 4;
    const uint8_t low  = head == 0xe0 ? 0xa0 : head == 0xf0 ? 0x90 : 0x80; // no overlong forms
    const uint8_t high = head == 0xed ? 0x9f : head == 0xf4 ? 0x8f : 0xbf; // no surrogates, nothing above U+10FFFF
    uint32_t      code = head & (0x7f >> size);
    for (size_t i = 1; i < size; i++) {
        if (i == n) {
            return { Utf8::INCOMPLETE, n, 0 };
        }
        if (byte(i) < (i == 1 ? low : 0x80) || byte(i) > (i == 1 ? high : 0xbf)) {
            return { Utf8::INVALID, i, 0 };
        }
        code = code << 6 | (byte(i) & 0x3f);
    }
    return { Utf8::VALID, size, code };
}

void utf8_append(std::string & text, uint32_t code) {
    if (code < 0x80) {
        text += (char)code;
        return;
    }
    const int size = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    text += (char)((0xf00 >> size & 0xff) | code >> 6 * (size - 1));
    for (int i = size - 2; i >= 0; i--) {
        text += (char)(0x80 | (code >> 6 * i & 0x3f));
    }
}

std::string utf8_replace(const std::string & text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        const Utf8 next = utf8_next(text.data() + i, text.size() - i);
        if (next.kind == Utf8::VALID) {
            out.append(text, i, next.size);
        } else {
            utf8_append(out, 0xfffd);
        }
        i += next.size;
    }
    return out;
}

} // namespace clover
