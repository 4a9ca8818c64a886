// The one exception of libclover: a status and a message for the caller of the C API.
#pragma once

#include "clover.h"

#include <stdexcept>
#include <string>

namespace clover {

struct Error : std::runtime_error {
    clover_status status;

    Error(clover_status status, const std::string & message) : std::runtime_error(message), status(status) {}
};

inline void require(bool ok, clover_status status, const std::string & message) {
    if (!ok) {
        throw Error(status, message);
    }
}

} // namespace clover
