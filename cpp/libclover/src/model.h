// A loaded model file: llama.cpp's model, the metadata of block decoding, and the tokenizer.
#pragma once

#include "clover.h"
#include "llama.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace clover {

constexpr int32_t NO_TOKEN = -1;

class Model {
  public:
    Model(const std::string & path, const clover_model_params & params);

    llama_model *             llama() const { return model.get(); }
    const clover_model_info & info() const { return facts; }
    bool                      is_end(int32_t token) const;
    bool                      is_valid(int32_t token) const { return token >= 0 && token < facts.n_vocab; }

    // The tokens that are never produced: mask, padding, and unused ids.
    const std::vector<int32_t> & banned() const { return banned_tokens; }

    std::vector<int32_t> tokenize(const std::string & text, bool parse_special) const;

    // Bytes of a token after another (NO_TOKEN: at the start), "" for a control token unless `special`. The space that the
    // tokenizer itself puts before a text is left out.
    std::string text(int32_t token, int32_t before, bool special) const;

    // Metadata value as text, nullptr if the key is not there.
    const char * metadata(const std::string & key);

  private:
    struct Special {
        std::string text;
        int32_t     token;
        bool        control;
    };

    // Where the tokenizer puts a space of its own: nowhere, before the whole text, or also after every added token.
    enum SpacePrefix { NEVER, FIRST, ALWAYS };

    std::string     piece(int32_t token, bool special) const;
    bool            is_plain(int32_t token) const; // a token that stands for part of a text, not an added one
    bool            find_metadata(const std::string & key, std::string & value) const;
    void            read_facts(const std::string & architecture);
    void            read_space_prefix(const std::string & architecture);
    void            read_special_tokens();
    const Special * special_at(const std::string & text, size_t i, bool parse_special) const;
    void            tokenize_plain(const std::string & text, std::vector<int32_t> & tokens) const;

    std::unique_ptr<llama_model, void (*)(llama_model *)> model;
    const llama_vocab *                                   vocab = nullptr;
    clover_model_info                                     facts = {};
    bool                                                  nfc   = false;
    SpacePrefix                                           space = NEVER;
    std::vector<int32_t>                                  banned_tokens;
    std::vector<std::vector<Special>>                     specials; // by first byte, longest first
    std::map<std::string, std::string>                    values;   // metadata handed out
    std::mutex                                            values_lock;
};

} // namespace clover
