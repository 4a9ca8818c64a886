#include "gguf_check.h"

#include "error.h"
#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <unordered_set>
#include <vector>

namespace clover {
namespace {

// What llama.cpp can hold; its own limits are asserts (LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS).
constexpr uint64_t MAX_LAYERS  = 512;
constexpr uint64_t MAX_EXPERTS = 512;
constexpr uint64_t MAX_DIM     = 1u << 24;
constexpr uint64_t MAX_ENTRIES = 1u << 20; // keys, or tensors, of a file

struct Range {
    const char * key; // after "<architecture>."
    uint64_t     low, high;
    bool         required;
};

const Range RANGES[] = {
    { "block_count", 1, MAX_LAYERS, true },
    { "context_length", 1, 1u << 30, true },
    { "embedding_length", 1, MAX_DIM, true },
    { "attention.head_count", 1, 1u << 16, true },
    { "attention.head_count_kv", 1, 1u << 16, false },
    { "attention.key_length", 1, 1u << 16, false },
    { "attention.value_length", 1, 1u << 16, false },
    { "rope.dimension_count", 1, 1u << 16, false },
    { "expert_count", 1, MAX_EXPERTS, true },
    { "expert_used_count", 1, MAX_EXPERTS, true },
    { "expert_group_count", 0, 0, false },
    { "expert_group_used_count", 0, 0, false },
    { "feed_forward_length", 0, MAX_DIM, false },
    { "expert_feed_forward_length", 1, MAX_DIM, false },
    { "expert_shared_feed_forward_length", 1, MAX_DIM, false },
    { "ssm.conv_kernel", 2, 64, true },
    { "ssm.inner_size", 1, MAX_DIM, true },
    { "ssm.state_size", 1, 1u << 16, true },
    { "ssm.time_step_rank", 1, 1u << 16, true },
    { "ssm.group_count", 1, 1u << 16, true },
    { "full_attention_interval", 1, MAX_LAYERS, false },
    { "nextn_predict_layers", 0, MAX_LAYERS - 1, false },
    { "block.size", 1, 4096, false },
};

struct RealRange {
    const char * key; // after "<architecture>."
    double       low, high;
};

const RealRange REAL_RANGES[] = {
    { "attention.layer_norm_rms_epsilon", 0, 1 },
    { "rope.freq_base", 1e-6, 1e30 },
    { "rope.scaling.factor", 0, 1e6 },
    { "block.threshold", 0, 1 },
};

const char * const ROPE_SCALING    = "rope.scaling.type";
const char * const ROPE_SCALINGS[] = { "none", "linear", "yarn", "longrope" };

// Keys that we read ourselves, whose type llama.cpp does not check.
struct KeyType {
    const char * key;
    gguf_type    type;
    const char * name;
};

const KeyType KEY_TYPES[] = {
    { "clover.block.threshold", GGUF_TYPE_FLOAT32, "a float" },
    { "clover.tokenizer.normalizer", GGUF_TYPE_STRING, "a string" },
    { "clover.tokenizer.space_prefix", GGUF_TYPE_STRING, "a string" },
    { "diffusion.shift_logits", GGUF_TYPE_BOOL, "a bool" },
    { "qwen35moe.tokenizer.normalizer", GGUF_TYPE_STRING, "a string" },
    { "qwen35moe.tokenizer.space_prefix", GGUF_TYPE_STRING, "a string" },
    { "tokenizer.chat_template", GGUF_TYPE_STRING, "a string" },
    { "tokenizer.ggml.add_space_prefix", GGUF_TYPE_BOOL, "a bool" },
};

const char * const TOKEN_IDS[] = { "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask" };

class Reader {
  public:
    explicit Reader(const std::string & path) : path(path), file(std::fopen(path.c_str(), "rb"), &std::fclose) {
        if (!file) {
            fail(std::strerror(errno));
        }
        std::error_code ignored;
        if (std::filesystem::is_directory(path, ignored)) {
            fail("is a folder, not a GGUF file");
        }
        buffer.resize(1 << 20);
        std::setvbuf(file.get(), buffer.data(), _IOFBF, buffer.size());
        if (seek(0, SEEK_END) != 0 || (total = tell()) == UINT64_MAX || seek(0, SEEK_SET) != 0) {
            fail("not a regular file");
        }
    }

    [[noreturn]] void fail(const std::string & message) const { throw Error(CLOVER_ERROR_FILE, path + ": " + message); }

    uint64_t left() const { return total - at; }
    uint64_t position() const { return at; }
    uint64_t size() const { return total; }

    void read(void * out, uint64_t n) {
        if (n > left() || std::fread(out, 1, n, file.get()) != n) {
            fail("truncated: the header goes past the file's end at byte " + std::to_string(total));
        }
        at += n;
    }

    template <typename T> T value() {
        T out;
        read(&out, sizeof(out));
        return out;
    }

    std::string string() {
        const uint64_t n = value<uint64_t>();
        if (n > left()) {
            fail("truncated or damaged: a string of " + std::to_string(n) + " bytes starts at byte " + std::to_string(at));
        }
        std::string out(n, '\0');
        read(&out[0], n);
        return out;
    }

    void skip(uint64_t n) {
        char scratch[4096];
        while (n > 0) {
            const uint64_t part = std::min<uint64_t>(n, sizeof(scratch));
            read(scratch, part);
            n -= part;
        }
    }

  private:
    int seek(int64_t offset, int whence) {
#ifdef _WIN32
        return _fseeki64(file.get(), offset, whence);
#else
        return fseeko(file.get(), offset, whence);
#endif
    }

    uint64_t tell() {
#ifdef _WIN32
        return (uint64_t)_ftelli64(file.get());
#else
        return (uint64_t)ftello(file.get());
#endif
    }

    std::string                            path;
    std::vector<char>                      buffer;
    std::unique_ptr<FILE, int (*)(FILE *)> file;
    uint64_t                               total = 0;
    uint64_t                               at    = 0;
};

uint64_t type_size(uint32_t type) {
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_INT8:
        case GGUF_TYPE_BOOL: return 1;
        case GGUF_TYPE_UINT16:
        case GGUF_TYPE_INT16: return 2;
        case GGUF_TYPE_UINT32:
        case GGUF_TYPE_INT32:
        case GGUF_TYPE_FLOAT32: return 4;
        case GGUF_TYPE_UINT64:
        case GGUF_TYPE_INT64:
        case GGUF_TYPE_FLOAT64: return 8;
        default: return 0;
    }
}

struct Metadata {
    std::map<std::string, std::vector<uint64_t>> integers; // scalars and arrays; negative values become huge
    std::map<std::string, std::vector<double>>   reals;    // likewise
    std::map<std::string, std::string>           strings;
    std::map<std::string, uint32_t>              types;
    uint64_t                                     n_tokens = 0;
    int                                          n_bytes  = 0; // tokens <0x00> to <0xFF>
};

// An integer of any width as uint64, sign extended; non-integers give 0.
uint64_t widen(uint32_t type, const void * data) {
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_BOOL: return *(const uint8_t *)data;
        case GGUF_TYPE_INT8: return (uint64_t)(int64_t)*(const int8_t *)data;
        case GGUF_TYPE_UINT16: return *(const uint16_t *)data;
        case GGUF_TYPE_INT16: return (uint64_t)(int64_t)*(const int16_t *)data;
        case GGUF_TYPE_UINT32: return *(const uint32_t *)data;
        case GGUF_TYPE_INT32: return (uint64_t)(int64_t)*(const int32_t *)data;
        case GGUF_TYPE_UINT64:
        case GGUF_TYPE_INT64: return *(const uint64_t *)data;
        default: return 0;
    }
}

bool is_real(uint32_t type) {
    return type == GGUF_TYPE_FLOAT32 || type == GGUF_TYPE_FLOAT64;
}

bool is_integer(uint32_t type) {
    return type_size(type) != 0 && !is_real(type) && type != GGUF_TYPE_BOOL;
}

// Keeps n numbers; bools are not looked at.
void keep_numbers(Metadata & meta, const std::string & key, uint32_t type, const char * data, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        const char * at = data + i * type_size(type);
        if (type == GGUF_TYPE_FLOAT32) {
            meta.reals[key].push_back(*(const float *)at);
        } else if (type == GGUF_TYPE_FLOAT64) {
            meta.reals[key].push_back(*(const double *)at);
        } else if (is_integer(type)) {
            meta.integers[key].push_back(widen(type, at));
        }
    }
}

void read_tokens(Reader & in, uint64_t n, Metadata & meta) {
    std::unordered_set<std::string> seen;
    for (uint64_t i = 0; i < n; i++) {
        std::string token = in.string();
        if (token.empty() || token.find('\0') != std::string::npos) {
            in.fail("damaged: token " + std::to_string(i) + (token.empty() ? " is empty" : " holds a zero byte"));
        }
        if (!seen.insert(token).second) {
            in.fail("damaged: token " + std::to_string(i) + " ('" + token + "') is there twice");
        }
    }
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        std::snprintf(name, sizeof name, "<0x%02X>", byte);
        meta.n_bytes += seen.count(name);
    }
    meta.n_tokens = n;
}

void read_array(Reader & in, const std::string & key, Metadata & meta) {
    const uint32_t type = in.value<uint32_t>();
    const uint64_t n    = in.value<uint64_t>();
    if (type == GGUF_TYPE_STRING) {
        if (n > in.left() / 8) {
            in.fail("truncated or damaged: " + key + " claims " + std::to_string(n) + " strings");
        }
        if (key == "tokenizer.ggml.tokens") {
            return read_tokens(in, n, meta);
        }
        for (uint64_t i = 0; i < n; i++) {
            const uint64_t length = in.value<uint64_t>();
            if (length > in.left()) {
                in.fail("truncated or damaged: string " + std::to_string(i) + " of " + key);
            }
            in.skip(length);
        }
        return;
    }
    const uint64_t size = type_size(type);
    if (size == 0) {
        in.fail("damaged: " + key + " is an array of unknown type " + std::to_string(type));
    }
    if (n > in.left() / size) {
        in.fail("truncated or damaged: " + key + " claims " + std::to_string(n) + " values");
    }
    std::vector<char> data(n * size);
    in.read(data.data(), data.size());
    keep_numbers(meta, key, type, data.data(), n);
}

Metadata read_metadata(Reader & in, uint64_t n_kv) {
    Metadata meta;
    for (uint64_t i = 0; i < n_kv; i++) {
        const std::string key = in.string();
        if (key.empty()) {
            in.fail("damaged: a metadata key is empty");
        }
        const uint32_t type = in.value<uint32_t>();
        if (!meta.types.emplace(key, type).second) {
            in.fail("damaged: metadata key " + key + " is there twice");
        }
        if (type == GGUF_TYPE_STRING) {
            meta.strings[key] = in.string();
        } else if (type == GGUF_TYPE_ARRAY) {
            read_array(in, key, meta);
        } else if (type_size(type) != 0) {
            alignas(8) char data[8];
            in.read(data, type_size(type));
            keep_numbers(meta, key, type, data, 1);
        } else {
            in.fail("damaged: metadata key " + key + " has unknown type " + std::to_string(type));
        }
    }
    return meta;
}

void check_numbers(const Reader & in, const Metadata & meta, const std::string & architecture) {
    for (const Range & range : RANGES) {
        const std::string key   = architecture + "." + range.key;
        const auto        found = meta.integers.find(key);
        if (found == meta.integers.end()) {
            if (range.required || meta.types.count(key)) {
                in.fail("metadata key " + key + (meta.types.count(key) ? " is not a number" : " is missing"));
            }
            continue;
        }
        for (const uint64_t value : found->second) {
            if (value < range.low || value > range.high) {
                in.fail("metadata key " + key + " is " + std::to_string((int64_t)value) + ", allowed are " +
                        std::to_string(range.low) + " to " + std::to_string(range.high));
            }
            if (value != found->second[0]) { // llama.cpp takes a value for each layer
                in.fail("metadata key " + key + " is not the same in all layers");
            }
        }
        if (key == "clover.block.size" && meta.types.at(key) == GGUF_TYPE_ARRAY) {
            in.fail("metadata key " + key + " is an array, not a number");
        }
    }
}

void check_reals(const Reader & in, const Metadata & meta, const std::string & architecture) {
    for (const auto & [key, values] : meta.reals) {
        if (!std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); })) {
            in.fail("metadata key " + key + " is not finite");
        }
    }
    for (const RealRange & range : REAL_RANGES) {
        const std::string key   = architecture + "." + range.key;
        const auto        found = meta.reals.find(key);
        if (found == meta.reals.end()) {
            if (meta.types.count(key)) {
                in.fail("metadata key " + key + " is not a float");
            }
            continue;
        }
        for (const double value : found->second) {
            if (value < range.low || value > range.high) {
                in.fail("metadata key " + key + " is " + std::to_string(value) + ", which is out of range");
            }
        }
    }
}

void check_types(const Reader & in, const Metadata & meta, const std::string & architecture) {
    for (const KeyType & expected : KEY_TYPES) {
        const auto found = meta.types.find(expected.key);
        if (found != meta.types.end() && found->second != expected.type) {
            in.fail(std::string("metadata key ") + expected.key + " is not " + expected.name);
        }
    }
    const auto scaling = meta.strings.find(architecture + "." + ROPE_SCALING);
    if (scaling != meta.strings.end() &&
        std::find(std::begin(ROPE_SCALINGS), std::end(ROPE_SCALINGS), scaling->second) == std::end(ROPE_SCALINGS)) {
        in.fail("metadata key " + scaling->first + " is '" + scaling->second + "', which is unknown");
    }
}

// Relations between numbers that llama.cpp's graph divides by or asserts.
void check_relations(const Reader & in, const Metadata & meta, const std::string & architecture) {
    const auto find = [&](const std::string & key, uint64_t fallback) {
        const auto found = meta.integers.find(architecture + "." + key);
        return found == meta.integers.end() ? fallback : found->second.at(0);
    };
    const auto need = [&](bool ok, const char * rule) {
        if (!ok) {
            in.fail("the metadata of " + architecture + " contradict each other: " + rule);
        }
    };
    const uint64_t heads       = find("attention.head_count", 1);
    const uint64_t value_heads = find("ssm.time_step_rank", 1);
    const uint64_t head_size   = find("attention.key_length", find("embedding_length", 0) / heads);
    const uint64_t rotated     = find("rope.dimension_count", head_size);
    need(find("expert_used_count", 0) <= find("expert_count", 0), "more experts are used than there are");
    need(find("nextn_predict_layers", 0) < find("block_count", 0), "there are more prediction layers than layers");
    need(heads % find("attention.head_count_kv", heads) == 0, "attention heads do not divide into key heads");
    need(value_heads % find("ssm.group_count", 1) == 0, "linear attention's value heads do not divide into key heads");
    need(find("ssm.inner_size", 0) == value_heads * find("ssm.state_size", 0),
         "linear attention's inner size is not its value heads times its state size");
    need(rotated <= head_size && rotated % 2 == 0, "the rotated dimensions are odd, or more than a head has");

    const auto sections = meta.integers.find(architecture + ".rope.dimension_sections");
    if (sections != meta.integers.end()) {
        uint64_t sum = 0;
        for (const uint64_t section : sections->second) {
            need(section <= rotated, "a rope section is longer than the rotated dimensions");
            sum += section;
        }
        need(sum > 0 && sum <= rotated, "the rope sections do not fit the rotated dimensions");
    }
}

void check_vocabulary(const Reader & in, const Metadata & meta) {
    const auto model = meta.strings.find("tokenizer.ggml.model");
    if (model == meta.strings.end() || (model->second != "gpt2" && model->second != "llama")) {
        in.fail("the tokenizer is " + (model == meta.strings.end() ? "missing" : "'" + model->second + "'") +
                ", needed is 'gpt2' (byte-level BPE) or 'llama' (sentencepiece)");
    }
    if (meta.n_tokens == 0) {
        in.fail("the vocabulary is missing");
    }
    if (model->second == "llama") {
        const auto scores = meta.reals.find("tokenizer.ggml.scores");
        if (scores == meta.reals.end() || scores->second.size() != meta.n_tokens) {
            in.fail("the scores of the tokens are missing, or not as many as the tokens");
        }
        if (meta.n_bytes != 256) {
            in.fail("the vocabulary lacks some of the byte tokens <0x00> to <0xFF>");
        }
    }
    for (const char * name : TOKEN_IDS) {
        const auto id = meta.integers.find(std::string("tokenizer.ggml.") + name + "_token_id");
        if (id != meta.integers.end() && id->second.at(0) >= meta.n_tokens) {
            in.fail("metadata key " + id->first + " is " + std::to_string((int64_t)id->second.at(0)) + ", the vocabulary has " +
                    std::to_string(meta.n_tokens) + " tokens");
        }
    }
}

// Whether the kernels take weights of this type: plain numbers and quantised ones; there are codes for intermediate values too.
bool is_weight_type(uint32_t type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ||
           (ggml_is_quantized((ggml_type)type) && ggml_get_type_traits((ggml_type)type)->to_float != nullptr);
}

// Norms, biases and the short convolution are used as they lie in the file.
bool must_be_f32(const std::string & name, const std::vector<uint64_t> & shape) {
    const bool vector = shape.empty() || std::all_of(shape.begin() + 1, shape.end(), [](uint64_t dim) { return dim == 1; });
    return vector || name.find("ssm_conv1d") != std::string::npos;
}

// Bytes of a tensor; 0 if its shape or type is impossible.
uint64_t tensor_bytes(const std::vector<uint64_t> & shape, uint32_t type) {
    if (type >= GGML_TYPE_COUNT || ggml_blck_size((ggml_type)type) == 0 || ggml_type_size((ggml_type)type) == 0) {
        return 0;
    }
    const uint64_t block = ggml_blck_size((ggml_type)type);
    uint64_t       n     = 1;
    for (const uint64_t dim : shape) {
        if (dim == 0 || dim > INT64_MAX / n) {
            return 0;
        }
        n *= dim;
    }
    const uint64_t row = shape.empty() ? 1 : shape[0];
    if (row % block != 0 || n / block > (uint64_t)INT64_MAX / ggml_type_size((ggml_type)type)) {
        return 0;
    }
    return n / block * ggml_type_size((ggml_type)type);
}

void check_tensors(Reader & in, uint64_t n_tensors, uint64_t alignment) {
    struct Tensor {
        std::string name;
        uint64_t    offset, bytes;
    };

    std::vector<Tensor>             tensors;
    std::unordered_set<std::string> names;
    for (uint64_t i = 0; i < n_tensors; i++) {
        Tensor tensor;
        tensor.name           = in.string();
        const uint32_t n_dims = in.value<uint32_t>();
        if (n_dims > GGML_MAX_DIMS) {
            in.fail("damaged: tensor " + tensor.name + " has " + std::to_string(n_dims) + " dimensions");
        }
        std::vector<uint64_t> shape(n_dims);
        for (uint64_t & dim : shape) {
            dim = in.value<uint64_t>();
        }
        const uint32_t type = in.value<uint32_t>();
        tensor.offset       = in.value<uint64_t>();
        tensor.bytes        = tensor_bytes(shape, type);
        if (tensor.bytes == 0 || !names.insert(tensor.name).second) {
            in.fail("damaged: tensor " + tensor.name + (tensor.bytes ? " is there twice" : " has an impossible shape or type"));
        }
        if (!is_weight_type(type) || (type != GGML_TYPE_F32 && must_be_f32(tensor.name, shape))) {
            in.fail("tensor " + tensor.name + " has type " + ggml_type_name((ggml_type)type) +
                    (is_weight_type(type) ? ", needed is f32" : ", which no weight may have"));
        }
        tensors.push_back(tensor);
    }
    const uint64_t start = (in.position() + alignment - 1) / alignment * alignment;
    for (const Tensor & tensor : tensors) {
        if (start > in.size() || tensor.offset > in.size() - start || tensor.bytes > in.size() - start - tensor.offset) {
            in.fail("truncated: tensor " + tensor.name + " ends at byte " + std::to_string(start + tensor.offset + tensor.bytes) +
                    ", the file has " + std::to_string(in.size()) + " bytes");
        }
    }
}

} // namespace

std::string check_gguf(const std::string & path) {
    Reader in(path);
    char   magic[4];
    if (in.size() < sizeof(magic)) {
        in.fail("not a GGUF file (too short)");
    }
    in.read(magic, sizeof(magic));
    if (std::memcmp(magic, GGUF_MAGIC, sizeof(magic)) != 0) {
        in.fail("not a GGUF file");
    }
    const uint32_t version = in.value<uint32_t>();
    if (version != 2 && version != 3) {
        in.fail("GGUF version " + std::to_string(version) + " is not supported (needed: 2 or 3)");
    }
    const uint64_t n_tensors = in.value<uint64_t>();
    const uint64_t n_kv      = in.value<uint64_t>();
    if (n_tensors > MAX_ENTRIES || n_kv > MAX_ENTRIES) {
        in.fail("damaged: it claims " + std::to_string(n_tensors) + " tensors and " + std::to_string(n_kv) + " metadata keys");
    }
    const Metadata meta         = read_metadata(in, n_kv);
    const auto     architecture = meta.strings.find("general.architecture");
    if (architecture == meta.strings.end()) {
        const auto number = meta.integers.find("split.no");
        const bool later  = number != meta.integers.end() && number->second.at(0) > 0;
        in.fail(later ? "a later file of several: give the first one's name" : "it names no architecture");
    }
    if (architecture->second != "clover" && architecture->second != "qwen35moe") {
        in.fail("architecture '" + architecture->second + "' is not supported (needed: clover or qwen35moe)");
    }
    check_numbers(in, meta, architecture->second);
    check_reals(in, meta, architecture->second);
    check_types(in, meta, architecture->second);
    check_relations(in, meta, architecture->second);
    check_vocabulary(in, meta);
    uint64_t   alignment = GGUF_DEFAULT_ALIGNMENT;
    const auto given     = meta.integers.find(GGUF_KEY_GENERAL_ALIGNMENT);
    if (given != meta.integers.end()) {
        alignment = given->second.at(0);
        if (alignment == 0 || alignment > (1u << 20) || (alignment & (alignment - 1)) != 0) {
            in.fail("damaged: alignment " + std::to_string(alignment));
        }
    }
    check_tensors(in, n_tensors, alignment);
    return architecture->second;
}

} // namespace clover
