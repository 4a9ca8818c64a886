// Importance of the columns of weight matrices: sums of the squared inputs that a model's passes multiply them with.
#pragma once

#include "ggml.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace clover {

class Imatrix {
  public:
    struct Matrices {
        int64_t              n_columns = 0;
        std::vector<float>   sums;   // [matrices, n_columns]
        std::vector<int64_t> counts; // [matrices], inputs seen
    };

    std::atomic<bool> paused{ false };

    // A ggml_backend_sched_eval_callback; user_data: the Imatrix.
    static bool observe(ggml_tensor * product, bool ask, void * user_data) noexcept;

    // Throws what went wrong while a pass was observed.
    void check();

    // By tensor name. Not while a session that it was given to evaluates.
    std::map<std::string, Matrices> all;

  private:
    void add(const ggml_tensor * product);

    std::mutex  lock;
    std::string failure;
};

} // namespace clover
