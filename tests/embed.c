/* A C99 program on clover.h alone: prints the layout of its structs, then the answer to a prompt. Usage: embed MODEL PROMPT */

#include "clover.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIZE(name) printf("%s %lu\n", #name, (unsigned long)sizeof(struct name))

static bool print_text(const char * text, size_t n_text, void * user_data) {
    fwrite(text, 1, n_text, (FILE *)user_data);
    return true;
}

static bool count_step(const struct clover_step * step, void * user_data) {
    (void)user_data;
    return step->n_fixed > 0;
}

static int fail(const char * what) {
    fprintf(stderr, "%s: %s\n", what, clover_last_error());
    return 1;
}

int main(int argc, char ** argv) {
    clover_model *                model   = NULL;
    clover_session *              session = NULL;
    struct clover_session_params  session_params;
    struct clover_generate_params params;
    struct clover_stats           stats;
    int32_t                       tokens[512];
    int32_t                       n;

    if (argc != 3) {
        return 2;
    }
    SIZE(clover_model_params);
    SIZE(clover_model_info);
    SIZE(clover_session_params);
    SIZE(clover_step);
    SIZE(clover_generate_params);
    SIZE(clover_stats);

    if (clover_model_load(argv[1], NULL, &model)) {
        return fail("load");
    }
    clover_session_default_params(&session_params, sizeof(session_params));
    session_params.n_ctx     = 256;
    session_params.n_threads = 1;
    if (clover_session_new(model, &session_params, &session)) {
        return fail("session");
    }
    n = clover_tokenize(model, argv[2], strlen(argv[2]), true, tokens, 512);
    clover_model_free(model); /* sessions keep what they need */
    if (n < 0 || clover_session_feed(session, tokens, n)) {
        return fail("feed");
    }
    clover_generate_default_params(&params, sizeof(params));
    params.max_tokens = 20;
    params.on_text    = print_text;
    params.on_step    = count_step;
    params.user_data  = stdout;
    printf("answer ");
    if (clover_session_generate(session, &params)) {
        return fail("generate");
    }
    clover_session_get_stats(session, &stats, sizeof(stats));
    printf("\ntokens %d\n", (int)stats.tokens);
    clover_session_free(session);
    return 0;
}
