// greedy MODEL TOKENS < prompts: the greedy continuation of each prompt by llama.cpp, one JSON object a line.
//
// A prompt is a line of standard input with \n escaped as the two characters \ and n. The object holds the prompt's tokens,
// the chosen tokens, and at each step the difference of the two largest logits, by which a reader can tell a real
// disagreement from a tie. Keys and values are kept in half precision, as the engine under test keeps them.
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

static void fail(const char * what) {
    fprintf(stderr, "greedy: %s\n", what);
    exit(1);
}

static std::string unescape(const std::string & line) {
    std::string text;
    for (size_t i = 0; i < line.size(); i++) {
        bool newline = line[i] == '\\' && i + 1 < line.size() && line[i + 1] == 'n';
        text += newline ? '\n' : line[i];
        i += newline;
    }
    return text;
}

static std::vector<llama_token> tokenize(const llama_vocab * vocab, const std::string & text) {
    std::vector<llama_token> tokens(text.size() + 1);
    int n = llama_tokenize(vocab, text.data(), text.size(), tokens.data(), tokens.size(), false, true);
    if (n <= 0) fail("a prompt does not tokenize");
    tokens.resize(n);
    return tokens;
}

// The token of the largest logit, and the distance to the second largest.
static std::pair<llama_token, float> greedy(const float * logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) if (logits[i] > logits[best]) best = i;
    float second = -1e30f;
    for (int i = 0; i < n; i++) if (i != best && logits[i] > second) second = logits[i];
    return {best, logits[best] - second};
}

template <class T> static void print_array(const char * name, const std::vector<T> & values, const char * format) {
    printf("\"%s\":[", name);
    for (size_t i = 0; i < values.size(); i++) {
        if (i) printf(",");
        printf(format, values[i]);
    }
    printf("]");
}

int main(int argc, char ** argv) {
    if (argc != 3) fail("usage: greedy MODEL TOKENS < prompts");
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) fputs(text, stderr);
    }, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("the model does not load");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = 1024;
    params.n_threads = params.n_threads_batch = 2;
    params.type_k = params.type_v = GGML_TYPE_F16;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) fail("no context");
    const llama_vocab * vocab = llama_model_get_vocab(model);

    std::string line;
    while (std::getline(std::cin, line)) {
        std::vector<llama_token> prompt = tokenize(vocab, unescape(line)), chosen, next = prompt;
        std::vector<float> gaps;
        llama_memory_clear(llama_get_memory(context), true);
        for (int step = 0; step < atoi(argv[2]); step++) {
            if (llama_decode(context, llama_batch_get_one(next.data(), next.size()))) fail("decode");
            auto [token, gap] = greedy(llama_get_logits_ith(context, -1), llama_vocab_n_tokens(vocab));
            chosen.push_back(token);
            gaps.push_back(gap);
            next = {token};
        }
        printf("{");
        print_array("prompt", prompt, "%d");
        printf(",");
        print_array("tokens", chosen, "%d");
        printf(",");
        print_array("gaps", gaps, "%.4f");
        printf("}\n");
        fflush(stdout);
    }
}
