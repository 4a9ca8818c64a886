#include "imatrix.h"

#include "error.h"
#include "ggml-backend.h"

#include <cmath>
#include <cstring>
#include <exception>

namespace clover {
namespace {

// Name of the layer's weight that a product multiplies with; "" for other products. Copies on a device are NAME of
// "DEVICE#NAME#COPY". The output matrix is left out, as llama-imatrix does it.
std::string weight_name(const ggml_tensor * product) {
    const ggml_tensor * weight = product->src[0];
    if ((product->op != GGML_OP_MUL_MAT && product->op != GGML_OP_MUL_MAT_ID) || product->src[1]->type != GGML_TYPE_F32 ||
        (product->op == GGML_OP_MUL_MAT && weight->ne[2] * weight->ne[3] != 1)) {
        return "";
    }
    std::string  name  = weight->name;
    const size_t begin = name.find('#');
    if (begin != std::string::npos) {
        name = name.substr(begin + 1, name.find('#', begin + 1) - begin - 1);
    }
    const std::string suffix = ".weight";
    const bool        ends   = name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
    return ends && name.compare(0, 4, "blk.") == 0 ? name : "";
}

// The bytes of a tensor, copied only if they lie on a device.
class Bytes {
  public:
    explicit Bytes(const ggml_tensor * tensor) : data((const char *)tensor->data) {
        if (!ggml_backend_buffer_is_host(tensor->view_src ? tensor->view_src->buffer : tensor->buffer)) {
            copy.resize(ggml_nbytes(tensor));
            ggml_backend_tensor_get(tensor, copy.data(), 0, copy.size());
            data = copy.data();
        }
    }

    template <typename T> const T * at(size_t offset) const { return reinterpret_cast<const T *>(data + offset); }

  private:
    std::vector<char> copy;
    const char *      data;
};

} // namespace

bool Imatrix::observe(ggml_tensor * product, bool ask, void * user_data) noexcept {
    auto & self = *static_cast<Imatrix *>(user_data);
    if (self.paused) {
        return !ask;
    }
    try {
        if (ask) {
            return !weight_name(product).empty();
        }
        self.add(product);
    } catch (const std::exception & error) {
        const std::lock_guard<std::mutex> guard(self.lock);
        try {
            self.failure = error.what();
        } catch (...) {
            self.failure = "?"; // fits without memory being asked for
        }
    }
    return true;
}

void Imatrix::add(const ggml_tensor * product) {
    const ggml_tensor * weight = product->src[0];
    const ggml_tensor * input  = product->src[1];
    const ggml_tensor * ids    = product->op == GGML_OP_MUL_MAT_ID ? product->src[2] : nullptr;
    const int64_t       n      = input->ne[0];
    const std::string   name   = weight_name(product);
    const Bytes         values(input);

    const std::lock_guard<std::mutex> guard(lock);
    Matrices &                        found = all[name];
    if (found.counts.empty()) {
        const int64_t matrices = ids ? weight->ne[2] : 1;
        found.sums.resize(matrices * n);
        found.n_columns = n;
        found.counts.resize(matrices); // last: it says that the others are there
    }
    require(found.n_columns == n && (int64_t)found.counts.size() == (ids ? weight->ne[2] : 1), CLOVER_ERROR_ARGUMENT,
            "the importance matrix was begun with another model: " + name + " has another shape");

    bool       finite = true;
    const auto count  = [&](int64_t matrix, const float * row) {
        float * sums = found.sums.data() + matrix * n;
        for (int64_t i = 0; i < n; i++) {
            sums[i] += row[i] * row[i];
            finite &= std::isfinite(sums[i]);
        }
        found.counts[matrix]++;
    };
    if (ids) { // ids [used, tokens]: the experts of each token; input [n, used or 1, tokens]
        const Bytes chosen(ids);
        for (int64_t token = 0; token < ids->ne[1]; token++) {
            for (int64_t k = 0; k < ids->ne[0]; k++) {
                const int32_t expert = *chosen.at<int32_t>(token * ids->nb[1] + k * ids->nb[0]);
                require(expert >= 0 && expert < weight->ne[2], CLOVER_ERROR_ENGINE, name + ": an expert out of range was chosen");
                count(expert, values.at<float>(token * input->nb[2] + k % input->ne[1] * input->nb[1]));
            }
        }
    } else {
        for (int64_t k = 0; k < input->ne[3]; k++) {
            for (int64_t j = 0; j < input->ne[2]; j++) {
                for (int64_t i = 0; i < input->ne[1]; i++) {
                    count(0, values.at<float>(i * input->nb[1] + j * input->nb[2] + k * input->nb[3]));
                }
            }
        }
    }
    require(finite, CLOVER_ERROR_ENGINE, name + ": its inputs, or the sums of their squares, are not finite");
}

void Imatrix::check() {
    const std::lock_guard<std::mutex> guard(lock);
    if (!failure.empty()) {
        const std::string message = failure;
        failure.clear();
        throw Error(CLOVER_ERROR_ENGINE, message);
    }
}

} // namespace clover
