// llama.cpp's log, kept instead of printed: its last error is the cause that our messages name.
#pragma once

#include <string>

namespace clover {

// From construction on, errors and warnings that llama.cpp logs on this thread are kept.
class LogCapture {
  public:
    LogCapture();

    // ": " and the last errors logged, or (where there are none) the last warning; "" if nothing was logged.
    std::string cause() const;
};

} // namespace clover
