#include "normalise.h"

#include "utf8.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

namespace clover {
namespace {

#include "nfc_table.inc"

constexpr uint32_t RAW_BYTE      = 0x110000; // + the byte: not UTF-8, kept as it is
constexpr uint32_t FIRST_CHANGED = 0x300;    // every code point below is its own NFC

// Hangul syllables are L + V (+ T) jamo.
constexpr uint32_t S = 0xac00, L = 0x1100, V = 0x1161, T = 0x11a7;
constexpr uint32_t N_L = 19, N_V = 21, N_T = 28, N_S = N_L * N_V * N_T;

uint32_t combining_class(uint32_t code) {
    const auto * run = std::upper_bound(std::begin(COMBINING_CLASSES), std::end(COMBINING_CLASSES), code,
                                        [](uint32_t c, const uint32_t(&row)[3]) { return c < row[0]; });
    return run != std::begin(COMBINING_CLASSES) && code <= run[-1][1] ? run[-1][2] : 0;
}

void decompose(uint32_t code, std::vector<uint32_t> & out) {
    if (code - S < N_S) {
        const uint32_t i = code - S;
        out.insert(out.end(), { L + i / (N_V * N_T), V + i % (N_V * N_T) / N_T });
        if (i % N_T) {
            out.push_back(T + i % N_T);
        }
        return;
    }
    const auto * row = std::lower_bound(std::begin(DECOMPOSITIONS), std::end(DECOMPOSITIONS), code,
                                        [](const uint32_t(&r)[3], uint32_t c) { return r[0] < c; });
    if (row == std::end(DECOMPOSITIONS) || (*row)[0] != code) {
        out.push_back(code);
        return;
    }
    decompose((*row)[1], out);
    if ((*row)[2]) {
        decompose((*row)[2], out);
    }
}

// The primary composite of two code points, 0 if there is none.
uint32_t compose(uint32_t a, uint32_t b) {
    if (a - L < N_L && b - V < N_V) {
        return S + ((a - L) * N_V + (b - V)) * N_T;
    }
    if (a - S < N_S && (a - S) % N_T == 0 && b - T - 1 < N_T - 1) {
        return a + (b - T);
    }
    const auto * row = std::lower_bound(
        std::begin(COMPOSITIONS), std::end(COMPOSITIONS), std::make_pair(a, b),
        [](const uint32_t(&r)[3], const std::pair<uint32_t, uint32_t> & pair) { return std::make_pair(r[0], r[1]) < pair; });
    return row != std::end(COMPOSITIONS) && (*row)[0] == a && (*row)[1] == b ? (*row)[2] : 0;
}

// Canonical ordering: runs of marks by combining class, stable.
void reorder(std::vector<uint32_t> & codes) {
    for (size_t i = 0; i < codes.size();) {
        size_t end = i;
        while (end < codes.size() && combining_class(codes[end])) {
            end++;
        }
        std::stable_sort(codes.begin() + i, codes.begin() + end,
                         [](uint32_t a, uint32_t b) { return combining_class(a) < combining_class(b); });
        i = end + 1;
    }
}

void compose_all(std::vector<uint32_t> & codes) {
    size_t   starter = SIZE_MAX; // index of the last starter written
    uint32_t last    = 0;        // combining class of the last code written after it
    size_t   n       = 0;
    for (const uint32_t code : codes) {
        const uint32_t ccc      = combining_class(code);
        const bool     adjacent = starter + 1 == n;
        if (starter != SIZE_MAX && (adjacent || (last < ccc))) {
            if (const uint32_t joined = compose(codes[starter], code)) {
                codes[starter] = joined;
                continue;
            }
        }
        if (ccc == 0) {
            starter = n;
        }
        last       = ccc;
        codes[n++] = code;
    }
    codes.resize(n);
}

} // namespace

std::string normalise_nfc(const std::string & text) {
    std::vector<uint32_t> codes;
    bool                  changes = false;
    for (size_t i = 0; i < text.size();) {
        const Utf8 next = utf8_next(text.data() + i, text.size() - i);
        if (next.kind == Utf8::VALID) {
            changes |= next.code >= FIRST_CHANGED;
            decompose(next.code, codes);
        } else {
            for (size_t j = 0; j < next.size; j++) {
                codes.push_back(RAW_BYTE + (uint8_t)text[i + j]);
            }
        }
        i += next.size;
    }
    if (!changes) {
        return text;
    }
    reorder(codes);
    compose_all(codes);
    std::string out;
    for (const uint32_t code : codes) {
        if (code >= RAW_BYTE) {
            out += (char)(code - RAW_BYTE);
        } else {
            utf8_append(out, code);
        }
    }
    return out;
}

} // namespace clover
