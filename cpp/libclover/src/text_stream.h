// Turns the bytes of final tokens into text that can be shown: whole UTF-8 characters, nothing of a stop string.
#pragma once

#include <string>
#include <vector>

namespace clover {

class TextStream {
  public:
    explicit TextStream(std::vector<std::string> stop) : stop(std::move(stop)) {}

    // Adds the bytes of the next token. Bytes that are not UTF-8 become U+FFFD, as Unicode recommends (section 3.9).
    // Returns true if a stop string is complete: what precedes it can still be taken, the rest is dropped.
    bool push(const std::string & bytes);

    // The answer is over: text held back because it could have begun a stop string is released; the bytes of an
    // unfinished character are dropped.
    void finish();

    // Bytes of all text so far, shown or held back; after a stop string: up to it.
    size_t length() const { return total; }

    // Text that is ready to be shown.
    std::string take();

  private:
    std::vector<std::string> stop;
    std::string              bytes; // of an unfinished character
    std::string              held;  // may begin a stop string
    std::string              ready;
    size_t                   total = 0;
};

} // namespace clover
