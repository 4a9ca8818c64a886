#include "model.h"

#include "error.h"
#include "gguf_check.h"
#include "log.h"
#include "normalise.h"
#include "utf8.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdlib>

namespace clover {

static const char * const KEY_BLOCK_SIZE   = "clover.block.size";
static const char * const KEY_THRESHOLD    = "clover.block.threshold";
static const char * const KEY_SHIFT_LOGITS = "diffusion.shift_logits";
static const char * const KEY_NORMALIZER   = ".tokenizer.normalizer";           // after the architecture
static const char * const KEY_SPACE_PREFIX = ".tokenizer.space_prefix";         // likewise
static const char * const KEY_ADD_SPACE    = "tokenizer.ggml.add_space_prefix"; // llama.cpp's default for SPM: true

static const int ADDED = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;

static constexpr float DEFAULT_THRESHOLD = 0.95f; // the release's own acceptance rule

Model::Model(const std::string & path, const clover_model_params & params) : model(nullptr, llama_model_free) {
    require(params.n_gpu_layers >= -1, CLOVER_ERROR_ARGUMENT, "n_gpu_layers is out of range: -1 (all) or more");
    const LogCapture      log;
    static std::once_flag backend;
    std::call_once(backend, llama_backend_init);

    const std::string  architecture = check_gguf(path);
    llama_model_params p            = llama_model_default_params();
    p.n_gpu_layers                  = params.n_gpu_layers;
    p.load_mode                     = params.use_mmap ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    p.check_tensors                 = params.check_tensors;
    model.reset(llama_model_load_from_file(path.c_str(), p));
    require(model != nullptr, CLOVER_ERROR_FILE, path + ": loading failed" + log.cause());
    vocab = llama_model_get_vocab(model.get());
    read_facts(architecture);
    read_special_tokens();
}

bool Model::find_metadata(const std::string & key, std::string & value) const {
    const int32_t n = llama_model_meta_val_str(model.get(), key.c_str(), nullptr, 0);
    if (n < 0) {
        return false;
    }
    value.resize(n + 1);
    llama_model_meta_val_str(model.get(), key.c_str(), &value[0], value.size());
    value.resize(n);
    return true;
}

const char * Model::metadata(const std::string & key) {
    const std::lock_guard<std::mutex> guard(values_lock);
    std::string                       value;
    if (!values.count(key) && find_metadata(key, value)) {
        values[key] = value;
    }
    const auto found = values.find(key);
    return found == values.end() ? nullptr : found->second.c_str();
}

void Model::read_facts(const std::string & architecture) {
    facts.n_vocab     = llama_vocab_n_tokens(vocab);
    facts.n_ctx_train = llama_model_n_ctx_train(model.get());
    facts.mask_token  = llama_vocab_mask(vocab);
    facts.eos_token   = llama_vocab_eos(vocab);
    facts.n_params    = llama_model_n_params(model.get());
    facts.n_bytes     = llama_model_size(model.get());
    facts.threshold   = DEFAULT_THRESHOLD;
    facts.can_block   = architecture == "clover";

    std::string value;
    if (facts.can_block) {
        require(is_valid(facts.mask_token), CLOVER_ERROR_FILE, "the model file names no mask token (tokenizer.ggml.mask_token_id)");
        require(!is_end(facts.mask_token), CLOVER_ERROR_FILE, "the mask token of the model file also ends answers");
        require(find_metadata(KEY_BLOCK_SIZE, value), CLOVER_ERROR_FILE, std::string("the model file lacks ") + KEY_BLOCK_SIZE);
        facts.block_size = std::atoi(value.c_str());
        require(find_metadata(KEY_SHIFT_LOGITS, value), CLOVER_ERROR_FILE, std::string("the model file lacks ") + KEY_SHIFT_LOGITS);
        facts.shift_logits = value == "true";
        if (find_metadata(KEY_THRESHOLD, value)) {
            facts.threshold = std::strtof(value.c_str(), nullptr);
        }
        require(facts.threshold >= 0 && facts.threshold <= 1, CLOVER_ERROR_FILE, std::string(KEY_THRESHOLD) + " is not in 0 to 1");
    }
    const std::string normalizer = architecture + KEY_NORMALIZER;
    if (find_metadata(normalizer, value)) {
        require(value == "nfc", CLOVER_ERROR_FILE, normalizer + " is '" + value + "', only 'nfc' is known");
        nfc = true;
    }
    read_space_prefix(architecture);
}

void Model::read_space_prefix(const std::string & architecture) {
    if (llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_SPM) {
        return;
    }
    std::string       value;
    const std::string key = architecture + KEY_SPACE_PREFIX;
    if (!find_metadata(KEY_ADD_SPACE, value) || value == "true") {
        space = ALWAYS; // llama.cpp does it
    } else if (find_metadata(key, value)) {
        require(value == "first", CLOVER_ERROR_FILE, key + " is '" + value + "', only 'first' is known");
        space = FIRST;
    }
}

void Model::read_special_tokens() {
    specials.resize(256);
    const int32_t pad = llama_vocab_pad(vocab);
    for (int32_t token = 0; token < facts.n_vocab; token++) {
        const auto attr = llama_vocab_get_attr(vocab, token);
        if (token == facts.mask_token || (token == pad && token != facts.eos_token) || (attr & LLAMA_TOKEN_ATTR_UNUSED)) {
            banned_tokens.push_back(token);
        }
        const std::string text = llama_vocab_get_text(vocab, token);
        if ((attr & ADDED) && !text.empty()) {
            specials[(uint8_t)text[0]].push_back({ text, token, !(attr & LLAMA_TOKEN_ATTR_USER_DEFINED) });
        }
    }
    require((int32_t)banned_tokens.size() < facts.n_vocab, CLOVER_ERROR_FILE, "the vocabulary has no token that may be produced");
    for (auto & list : specials) {
        std::sort(list.begin(), list.end(), [](const Special & a, const Special & b) { return a.text.size() > b.text.size(); });
    }
}

bool Model::is_end(int32_t token) const {
    return is_valid(token) && llama_vocab_is_eog(vocab, token);
}

const Model::Special * Model::special_at(const std::string & text, size_t i, bool parse_special) const {
    for (const Special & special : specials[(uint8_t)text[i]]) {
        if ((parse_special || !special.control) && text.compare(i, special.text.size(), special.text) == 0) {
            return &special;
        }
    }
    return nullptr;
}

void Model::tokenize_plain(const std::string & text, std::vector<int32_t> & tokens) const {
    if (text.empty()) {
        return;
    }
    const std::string plain = nfc ? normalise_nfc(text) : text;
    const size_t      start = tokens.size();
    tokens.resize(start + plain.size() + 8);
    const int32_t n =
        llama_tokenize(vocab, plain.data(), (int32_t)plain.size(), tokens.data() + start, (int32_t)(tokens.size() - start),
                       /*add_special=*/false, /*parse_special=*/false);
    require(n >= 0, CLOVER_ERROR_ENGINE, "tokenizing failed");
    tokens.resize(start + n);
}

std::vector<int32_t> Model::tokenize(const std::string & given, bool parse_special) const {
    // The checkpoint's tokenizer looks for added tokens first and normalises only what lies between them.
    require(given.size() <= INT_MAX / 4, CLOVER_ERROR_ARGUMENT, "the text is too long to tokenize");
    const std::string    text = utf8_replace(given);
    std::vector<int32_t> tokens;
    std::string          plain;
    if (space == FIRST && !text.empty() && special_at(text, 0, parse_special) == nullptr) {
        plain = " ";
    }
    for (size_t i = 0; i < text.size();) {
        const Special * special = special_at(text, i, parse_special);
        if (special == nullptr) {
            plain += text[i++];
            continue;
        }
        tokenize_plain(plain, tokens);
        plain.clear();
        tokens.push_back(special->token);
        i += special->text.size();
    }
    tokenize_plain(plain, tokens);
    return tokens;
}

std::string Model::piece(int32_t token, bool special) const {
    require(is_valid(token), CLOVER_ERROR_ARGUMENT,
            "token " + std::to_string(token) + " is not in the vocabulary of " + std::to_string(facts.n_vocab));
    std::string text(64, '\0');
    int32_t     n = llama_token_to_piece(vocab, token, &text[0], (int32_t)text.size(), 0, special);
    if (n < 0) {
        text.resize(-n);
        n = llama_token_to_piece(vocab, token, &text[0], (int32_t)text.size(), 0, special);
    }
    text.resize(std::max(n, 0));
    return text;
}

bool Model::is_plain(int32_t token) const {
    return is_valid(token) && !(llama_vocab_get_attr(vocab, token) & ADDED);
}

std::string Model::text(int32_t token, int32_t before, bool special) const {
    const std::string bytes = piece(token, special);
    const bool        own   = is_plain(token) && (before == NO_TOKEN ? space != NEVER : space == ALWAYS && !is_plain(before));
    return own && bytes[0] == ' ' ? bytes.substr(1) : bytes;
}

} // namespace clover
