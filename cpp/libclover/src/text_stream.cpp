#include "text_stream.h"

#include "utf8.h"

#include <algorithm>

namespace clover {

bool TextStream::push(const std::string & more) {
    bytes += more;
    total -= held.size();
    size_t done = 0;
    while (done < bytes.size()) {
        const Utf8 next = utf8_next(bytes.data() + done, bytes.size() - done);
        if (next.kind == Utf8::INCOMPLETE) {
            break;
        }
        if (next.kind == Utf8::VALID) {
            held.append(bytes, done, next.size);
        } else {
            utf8_append(held, 0xfffd);
        }
        done += next.size;
    }
    bytes.erase(0, done);
    total += held.size();

    size_t found = std::string::npos;
    for (const std::string & each : stop) {
        found = std::min(found, held.find(each));
    }
    if (found != std::string::npos) {
        ready.append(held, 0, found);
        total -= held.size() - found;
        held.clear();
        bytes.clear();
        return true;
    }
    size_t keep = 0; // longest end of the text that begins a stop string
    for (const std::string & each : stop) {
        for (size_t n = std::min(each.size() - 1, held.size()); n > keep; n--) {
            if (held.compare(held.size() - n, n, each, 0, n) == 0) {
                keep = n;
            }
        }
    }
    ready.append(held, 0, held.size() - keep);
    held.erase(0, held.size() - keep);
    return false;
}

void TextStream::finish() {
    ready += held;
    held.clear();
    bytes.clear();
}

std::string TextStream::take() {
    std::string out;
    out.swap(ready);
    return out;
}

} // namespace clover
