#ifndef CLOVER_H
#define CLOVER_H

/*
 * libclover: answers by block diffusion (and autoregressively) from a GGUF file of a Clover model.
 *
 *     clover_model   * model   = NULL;
 *     clover_session * session = NULL;
 *
 *     if (clover_model_load("clover.gguf", NULL, &model) || clover_session_new(model, NULL, &session)) {
 *         fprintf(stderr, "%s\n", clover_last_error());
 *         return 1;
 *     }
 *
 *     int32_t prompt[512];
 *     int32_t n = clover_tokenize(model, text, strlen(text), true, prompt, 512);    // INT32_MIN: failed; < 0: -n are needed
 *     if (n < 0 || clover_session_feed(session, prompt, n)) {
 *         return 1;
 *     }
 *
 *     struct clover_generate_params params;
 *     clover_generate_default_params(&params, sizeof(params));
 *     params.on_text = print_text;                                                 // your function
 *     if (clover_session_generate(session, &params)) {
 *         fprintf(stderr, "%s\n", clover_last_error());
 *     }
 *
 *     clover_session_free(session);
 *     clover_model_free(model);
 *
 * Every function that can fail returns a clover_status; clover_last_error() then has the message. No exception leaves
 * the library and nothing is printed. All text is UTF-8, with its length in bytes where the caller passes it.
 *
 * Chat templates are not applied here: clover_model_metadata(model, "tokenizer.chat_template") is the file's own, in Jinja.
 *
 * Threads: a model may be shared by sessions on several threads. A session is used by one thread at a time (a second
 * one gets CLOVER_ERROR_BUSY), except for clover_session_cancel and clover_session_get_stats. A model may be freed before
 * its sessions. Freeing is not guarded: no other thread, and no callback, may be inside what is freed.
 *
 * Growth: each struct that crosses the border starts with its size; pass sizeof. Fields are only ever added at the end.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    if defined(CLOVER_BUILD)
#        define CLOVER_API __declspec(dllexport)
#    elif defined(CLOVER_SHARED)
#        define CLOVER_API __declspec(dllimport)
#    else
#        define CLOVER_API
#    endif
#else
#    define CLOVER_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct clover_model   clover_model;
typedef struct clover_session clover_session;
typedef struct clover_imatrix clover_imatrix;

typedef enum clover_status {
    CLOVER_OK                 = 0,
    CLOVER_ERROR_ARGUMENT     = 1, /* a parameter is out of its range */
    CLOVER_ERROR_FILE         = 2, /* the model file is missing, damaged, truncated or of another architecture */
    CLOVER_ERROR_UNSUPPORTED  = 3, /* this model cannot do that (block decoding of an autoregressive model) */
    CLOVER_ERROR_CONTEXT_FULL = 4, /* the tokens do not fit into what is left of the context */
    CLOVER_ERROR_MEMORY       = 5, /* out of memory */
    CLOVER_ERROR_BUSY         = 6, /* another thread is inside this session */
    CLOVER_ERROR_ENGINE       = 7, /* evaluating the model failed; the message has the cause */
} clover_status;

/* Message of the last failure on this thread; "" before the first one. Valid until the next call on this thread. */
CLOVER_API const char * clover_last_error(void);

/* Version of this library, "major.minor.patch". */
CLOVER_API const char * clover_version(void);

/* The number of this interface. It is raised by every change that callers compiled for the one before would not survive. */
#define CLOVER_API_NUMBER 1

/* CLOVER_API_NUMBER of the header that the library was built with: one loaded at run time should be asked. */
CLOVER_API int32_t clover_api_number(void);

/* ---- model -------------------------------------------------------------------------------------------------- */

struct clover_model_params {
    size_t  size;
    int32_t n_gpu_layers;  /* layers on the GPU, -1: all; without a GPU there is nothing to choose (default -1) */
    bool    use_mmap;      /* map the file instead of reading it (default true) */
    bool    check_tensors; /* look for NaN and Inf in all weights while loading (default false) */
};

CLOVER_API void clover_model_default_params(struct clover_model_params * params, size_t size);

/* Load a GGUF file of architecture `clover` or `qwen35moe`. params NULL: defaults. *model is NULL on failure. */
CLOVER_API clover_status clover_model_load(const char * path, const struct clover_model_params * params, clover_model ** model);
CLOVER_API void          clover_model_free(clover_model * model);

struct clover_model_info {
    size_t   size;
    int32_t  n_vocab;
    int32_t  n_ctx_train;  /* longest context the model was made for */
    bool     can_block;    /* has the block pass; false: autoregressive decoding only */
    int32_t  block_size;   /* positions of a block, 0 without a block pass */
    float    threshold;    /* confidence above which a position is fixed */
    bool     shift_logits; /* position i is predicted by the hidden state at i - 1 */
    int32_t  mask_token;   /* -1: none */
    int32_t  eos_token;    /* -1: none */
    uint64_t n_params;
    uint64_t n_bytes; /* of all tensors */
};

CLOVER_API void clover_model_get_info(const clover_model * model, struct clover_model_info * info, size_t size);

/* A metadata value of the file as text; NULL if there is no such key. Valid as long as the model. */
CLOVER_API const char * clover_model_metadata(clover_model * model, const char * key);

/* ---- tokens ------------------------------------------------------------------------------------------------- */

/*
 * Text to tokens, as the checkpoint's own tokenizer does it (Unicode NFC included where it applies it).
 * parse_special: control tokens such as <|im_start|> written in the text become that token; else they stay text.
 * Returns the number of tokens. If they do not fit into capacity, nothing is written and -(number) is returned.
 * INT32_MIN: failed, see clover_last_error.
 */
CLOVER_API int32_t clover_tokenize(const clover_model * model, const char * text, size_t n_text, bool parse_special,
                                   int32_t * tokens, int32_t capacity);

/*
 * Tokens to bytes (a token may hold part of a UTF-8 character). special: control tokens are written too, else left out.
 * Returns the number of bytes, without a closing zero; -(number) and INT32_MIN as above.
 */
CLOVER_API int32_t clover_detokenize(const clover_model * model, const int32_t * tokens, int32_t n_tokens, bool special,
                                     char * text, int32_t capacity);

/* Whether the token ends an answer. */
CLOVER_API bool clover_token_is_end(const clover_model * model, int32_t token);

/* ---- session: one context with its state --------------------------------------------------------------------- */

enum clover_kv_type { CLOVER_KV_F16 = 0, CLOVER_KV_F32 = 1, CLOVER_KV_Q8_0 = 2 };

enum clover_flash_attn { CLOVER_FLASH_ATTN_AUTO = -1, CLOVER_FLASH_ATTN_OFF = 0, CLOVER_FLASH_ATTN_ON = 1 };

struct clover_session_params {
    size_t           size;
    int32_t          n_ctx;      /* most tokens of prompt and answers; 0, or above the model's limit or 2^24: that (default 4096) */
    int32_t          n_batch;    /* most prompt tokens evaluated in one pass (default 512) */
    int32_t          n_threads;  /* 0: all cores (default) */
    int32_t          kv_type;    /* enum clover_kv_type (default F16) */
    int32_t          flash_attn; /* enum clover_flash_attn (default auto; it works on F16 keys and values whatever kv_type) */
    clover_imatrix * imatrix;    /* gathers from all passes of the session, which are slower then (default NULL: none) */
};

CLOVER_API void clover_session_default_params(struct clover_session_params * params, size_t size);

CLOVER_API clover_status clover_session_new(clover_model * model, const struct clover_session_params * params,
                                            clover_session ** session);

/* Must not run while another thread, or a callback of this session, is inside it: cancel, and wait for the call's end. */
CLOVER_API void clover_session_free(clover_session * session);

/* Append tokens to the context. They are evaluated when the next answer is generated. All or nothing. */
CLOVER_API clover_status clover_session_feed(clover_session * session, const int32_t * tokens, int32_t n_tokens);

/* Forget everything. */
CLOVER_API clover_status clover_session_clear(clover_session * session);

/*
 * The tokens of the context, answers included; returns their number and writes the first `capacity` of them.
 * INT32_MIN: another thread is inside this session.
 */
CLOVER_API int32_t clover_session_tokens(clover_session * session, int32_t * tokens, int32_t capacity);
CLOVER_API int32_t clover_session_n_ctx(const clover_session * session);

/* ---- one pass, for measurements ------------------------------------------------------------------------------ */

enum clover_pass { CLOVER_PASS_BLOCK = 0, CLOVER_PASS_CAUSAL = 1 };

/*
 * Evaluate n tokens (n >= 1) after the context, which is evaluated first where it was not yet. logits: [n, n_vocab] of each of
 * them, row-major, or NULL.
 * CLOVER_PASS_CAUSAL: the tokens become part of the context, as if fed; row i is of what follows token i.
 * CLOVER_PASS_BLOCK: up to twice the model's block size of positions, each a token or the mask token, after at least one token;
 * nothing is kept. Row i is of position i itself or, where the model has shift_logits, of position i + 1.
 * Drops an unfinished answer's undecided positions. Wrong arguments change nothing; if a pass fails, the session is cleared.
 */
CLOVER_API clover_status clover_session_evaluate(clover_session * session, const int32_t * tokens, int32_t n_tokens, int32_t pass,
                                                 float * logits);

/* ---- importance of the weights' columns ---------------------------------------------------------------------- */

/*
 * What an importance matrix for quantisation is made of: for each matrix of the layers (name blk.*.weight), how large the
 * inputs are that passes multiply it with. Give it to sessions of one model, evaluate, then read it. It is kept until it and
 * all its sessions are freed.
 */
CLOVER_API clover_status clover_imatrix_new(clover_imatrix ** imatrix);
CLOVER_API void          clover_imatrix_free(clover_imatrix * imatrix);

/* paused: passes are not gathered from, until it is called with false. */
CLOVER_API void clover_imatrix_pause(clover_imatrix * imatrix, bool paused);

struct clover_imatrix_entry {
    size_t          size;
    const char *    name;       /* of the weight tensor */
    int64_t         n_columns;  /* of each matrix */
    int64_t         n_matrices; /* experts; 1 for a plain matrix */
    const float *   sums;       /* [n_matrices, n_columns] sums of the squared inputs */
    const int64_t * counts;     /* [n_matrices] inputs seen */
};

/* The number of entries, and entry i, in order of names. Not during a call on its sessions; pointers are valid until the next. */
CLOVER_API int32_t       clover_imatrix_count(const clover_imatrix * imatrix);
CLOVER_API clover_status clover_imatrix_get(const clover_imatrix * imatrix, int32_t i, struct clover_imatrix_entry * entry,
                                            size_t size);

/* ---- generation ---------------------------------------------------------------------------------------------- */

enum clover_mode { CLOVER_MODE_BLOCK = 0, CLOVER_MODE_AR = 1 };

enum clover_finish {
    CLOVER_FINISH_NONE        = 0, /* not finished */
    CLOVER_FINISH_STOP        = 1, /* the model ended its answer */
    CLOVER_FINISH_STOP_STRING = 2, /* a stop string appeared: not delivered, but its tokens stay in the session */
    CLOVER_FINISH_LENGTH      = 3, /* max_tokens or the context's limit is reached */
    CLOVER_FINISH_CANCELLED   = 4, /* cancelled by a callback or by clover_session_cancel */
};

/* What one step has fixed. Step 0 is the position that the last causal pass predicts; step s >= 1 is the s-th block pass. */
struct clover_step {
    size_t          size;
    int32_t         block;      /* index of the block in this answer; autoregressive: of the token */
    int32_t         step;       /* index of the step in its block */
    int32_t         start;      /* index in this answer of the block's first position */
    int32_t         block_size; /* positions of the block; autoregressive: 1 */
    int32_t         n_fixed;
    const int32_t * positions;   /* [n_fixed], in the block, ascending */
    const int32_t * tokens;      /* [n_fixed] */
    const float *   confidences; /* [n_fixed], probability before the temperature */
};

/* Both return true to go on, false to cancel. They run on the generating thread; pointers are valid during the call. */
typedef bool (*clover_step_callback)(const struct clover_step * step, void * user_data);
typedef bool (*clover_text_callback)(const char * text, size_t n_text, void * user_data); /* whole UTF-8 characters, final */

struct clover_generate_params {
    size_t               size;
    int32_t              mode;        /* enum clover_mode (default block) */
    int32_t              max_tokens;  /* most tokens of the answer, -1: as many as fit (default) */
    int32_t              window;      /* positions denoised together, up to twice the model's block size, 0: that size (default) */
    float                threshold;   /* confidence above which a position is fixed, in [0, 1]; -1: the model's (default) */
    float                temperature; /* 0: the most likely token (default) */
    int32_t              top_k;       /* 0: all (default) */
    float                top_p;       /* in (0, 1], 1: all (default) */
    float                min_p;       /* in [0, 1], relative to the most likely token; 0: all (default) */
    uint64_t             seed;        /* of sampling (default 0) */
    bool                 special;     /* control tokens are written as text (default false); the end token never is */
    const char * const * stop;        /* [n_stop] stop strings (default none) */
    size_t               n_stop;
    clover_step_callback on_step; /* may be NULL */
    clover_text_callback on_text; /* may be NULL */
    void *               user_data;
};

CLOVER_API void clover_generate_default_params(struct clover_generate_params * params, size_t size);

/* Whether these params are in range and the model can do it, so that begin would take them; changes nothing. */
CLOVER_API clover_status clover_session_check(clover_session * session, const struct clover_generate_params * params);

/*
 * Generate one answer after the session's tokens; it becomes part of them (end token included). The answer's tokens are
 * evaluated when they are needed, the last ones by the next call.
 */
CLOVER_API clover_status clover_session_generate(clover_session * session, const struct clover_generate_params * params);

/*
 * The same in small steps, each at most one pass of the model: begin, then step until *done. The callbacks run inside
 * step. params and its strings are copied by begin. Feeding, clearing or beginning anew drops an unfinished answer's
 * undecided positions. If a step fails, the session is cleared.
 */
CLOVER_API clover_status clover_session_begin(clover_session * session, const struct clover_generate_params * params);
CLOVER_API clover_status clover_session_step(clover_session * session, bool * done);

/*
 * From any thread: the generation in progress ends before its next pass, as CLOVER_FINISH_CANCELLED. Without one it has no
 * effect: begin and generate start uncancelled.
 */
CLOVER_API void clover_session_cancel(clover_session * session);

/* Of the last answer: counts, and wall seconds. They are of its last finished step: inside a callback, of the step before. */
struct clover_stats {
    size_t  size;
    int32_t finish;        /* enum clover_finish */
    int32_t prompt_tokens; /* fed since the answer before */
    int32_t tokens;        /* delivered: without the end token, and those of which a stop string left no text */
    int32_t prompt_passes; /* causal passes over the prompt */
    int32_t block_passes;  /* denoising passes */
    int32_t commit_passes; /* causal passes over finished blocks */
    int32_t causal_passes; /* passes of autoregressive decoding */
    double  prompt_seconds;
    double  block_seconds;
    double  commit_seconds;
    double  causal_seconds;
    double  seconds;         /* of all steps, sampling and callbacks included */
    double  tokens_per_step; /* tokens / block_passes; autoregressive: / tokens chosen, so at most 1; 0 if there were none */
};

CLOVER_API void clover_session_get_stats(const clover_session * session, struct clover_stats * stats, size_t size);

#ifdef __cplusplus
}
#endif

#endif
