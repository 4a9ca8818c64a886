#include "log.h"

#include "llama.h"

#include <vector>

namespace clover {

static thread_local std::vector<std::string> errors;
static thread_local std::string              warning;
static thread_local bool                     last_was_error = false;

static void keep(ggml_log_level level, const char * text, void *) {
    std::string line = text;
    while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) {
        line.pop_back();
    }
    if (line.empty()) {
        return;
    }
    if (level == GGML_LOG_LEVEL_ERROR && errors.size() < 4) {
        errors.push_back(line);
    } else if (level == GGML_LOG_LEVEL_CONT && last_was_error && !errors.empty()) {
        errors.back() += line;
    } else if (level == GGML_LOG_LEVEL_WARN) {
        warning = line;
    }
    if (level != GGML_LOG_LEVEL_CONT) {
        last_was_error = level == GGML_LOG_LEVEL_ERROR;
    }
}

LogCapture::LogCapture() {
    errors.clear();
    warning.clear();
    llama_log_set(keep, nullptr);
}

std::string LogCapture::cause() const {
    std::string text;
    for (const std::string & line : errors) {
        text += (text.empty() ? ": " : "; ") + line;
    }
    if (text.empty() && !warning.empty()) {
        text = ": " + warning;
    }
    return text;
}

} // namespace clover
