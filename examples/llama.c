/*  llama - trains a model of the family of Llama inside a byte budget: from scratch on the bytes of text
    files, or from published weights, which it can write again for other software.

        build/examples/llama                                         about a minute, on bytes
        build/examples/llama --from smollm2-135m-instruct-q4_1.gguf --rank 8 --budget smallest book.txt
        build/examples/llama --from SmolLM2-135M --sequence 512 --precision bf16 --state 8bit \
            --budget half --steps 200 --write tuned book.txt
        build/examples/llama --from SmolLM2-135M --base q4_1 --rank 8 --offload on --budget smallest book.txt
        build/examples/llama --preset qwen3-0.6B --sequence 2048 --mode aggressive --dry

    Beyond what gpt2 shows: weights that are read by the names of their files (weights.h), tokens by the
    tokenizer that comes with them (tokenizer.h), adapters beside frozen weights, which lie in the file
    where they can (ms_borrow) or are kept in blocks of codes (--base; Dettmers et al., "QLoRA", 2023),
    which a plan streams from the host, and a folder that transformers loads.

    Compiled with MODEL_SHAPE_CJSON, and linked with cJSON (-lcjson), it reads and writes safetensors;
    without, it reads GGUF alone. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#include "trainer.h"

#include "tokenizer.h"
#include "weights.h"
#include "weights_config.h"

enum { TUNED_BATCHES = 8 /* that are evaluated, where a step takes long */ };
enum { HEAD_ROWS = 64 /* of a tile of head and loss, beside a base in blocks */ };
enum { SAMPLE_TOKENS = 40, SAMPLE_SEQUENCE = 64, MOST_PRESETS = 64 };

typedef struct llama {
    trainer t;
    const char *from, *base, *prompt, *write, *write_type;
    int64_t rank;
    nn_llama_config config;
    weight_file file; // of --from; open as long as the model
    weights_family family;
    weights_layout layout;
    weights_output out;
    uint64_t lent_bytes; // of the file
    bool has_file, has_tokenizer;
    tokenizer tokens;
} llama;

static llama *llama_of(trainer *t) {
    return (llama *)t; // its first member
}

static int list_llama_options(trainer *t, option_spec *specs) {
    llama *l = llama_of(t);
    const option_spec own[] = {
        {"--from", "PATH", OPTION_TEXT, &l->from,
         "start from these weights: a GGUF file, a safetensors file with config.json and\n"
         "tokenizer.json beside it, or a folder of these"},
        {"--rank", "N", OPTION_COUNT, &l->rank,
         "train adapters of this rank beside all matrices, which stay as they are"},
        {"--base", "NAME", OPTION_TEXT, &l->base,
         "keep the matrices beside adapters in blocks of codes: q8_0, q4_1 or nf4"},
        {"--data", "FILE", OPTION_WORD, &t->options.files, "one more text file"},
        {"--prompt", "TEXT", OPTION_TEXT, &l->prompt,
         "let the model go on from this text at the end"},
        {"--write", "FOLDER", OPTION_TEXT, &l->write,
         "write weights, config.json and tokenizer there at the end, as transformers loads them"},
        {"--write-type", "NAME", OPTION_TEXT, &l->write_type, "f32, bf16 (default) or f16"},
    };
    t->options.preset = NULL;
    t->options.warmup = 10;
    memcpy(specs, own, sizeof own);
    return OPTIONS_IN(own);
}

// ---- the model ----------------------------------------------------------------------------------

/* The tokenizer that comes with the weights: in the same GGUF file, or tokenizer.json beside them. */
static int read_tokenizer(llama *l) {
    if (l->file.value_count > 0) {
        l->has_tokenizer = true; // to be closed in any case
        return tokenizer_of_gguf(&l->tokens, &l->file)
                   ? 0
                   : fail("--from %s: %s", l->from, l->tokens.error);
    }
    char path[SAFETENSORS_PATH];
    weight_bytes text;
    memset(&text, 0, sizeof text);
    weight_path_beside(l->from, "tokenizer.json", path);
    if (!weight_slurp(&l->file, path, &text)) {
        return fail("%s", l->file.error);
    }
    l->has_tokenizer = true; // to be closed in any case
    const bool is_read = tokenizer_of_json(&l->tokens, (const char *)text.data, text.size);
    free(text.data);
    return is_read ? 0 : fail("%s: %s", path, l->tokens.error);
}

static int open_weights(llama *l) {
    if (!weight_open(&l->file, l->from) || !weights_config(&l->file, l->from, &l->config) ||
        !weights_read_ends(&l->file, l->from, &l->out) ||
        !weights_find_family(&l->file, &l->family)) {
        l->has_file = true;
        return fail("--from %s: %s", l->from, l->file.error);
    }
    l->has_file = true;
    l->layout = weights_layout_of(&l->config, l->family);
    return l->t.options.random ? 0 : read_tokenizer(l);
}

/* small and tiny are sizes for bytes; others are those of nn_models.h, at random. */
static int choose_preset(llama *l) {
    const char *names[MOST_PRESETS] = {"small", "tiny"};
    nn_llama_config *c = &l->config;
    int count = 2;
    while (count < MOST_PRESETS && nn_llama_name(count - 2)) {
        names[count] = nn_llama_name(count - 2);
        count++;
    }
    const char *preset = l->t.options.preset ? l->t.options.preset : names[0];
    const int found = find_name("--preset", preset, names, count, "there are");
    const bool tiny = found == 1;
    if (found < 0) {
        return 1;
    }
    l->t.options.preset = names[found];
    if (found > 1) {
        nn_llama_preset(names[found], c);
    } else {
        c->vocabulary = BYTE_COUNT;
        c->layers = tiny ? 2 : 4;
        c->channels = tiny ? 32 : 128;
        c->heads = 4;
        c->kv_heads = 2;
        c->feed_forward = tiny ? 96 : 384;
        c->tied = true;
    }
    l->family = c->post_norms ? WEIGHTS_GEMMA : WEIGHTS_LLAMA;
    l->layout = weights_layout_of(c, l->family);
    return 0;
}

/* Before training, which may take long. */
static int check_folder(llama *l) {
    return ranks_job.comm.rank > 0 || weights_check_folder(&l->out, l->write)
               ? 0
               : fail("--write %s: %s", l->write, l->out.error);
}

/* With a large vocabulary most of the memory would be logits, so that head and loss are in tiles. */
static int choose_base(llama *l) {
    nn_llama_config *c = &l->config;
    if (!blocks_find(l->base, &c->base)) {
        return fail("--base %s: there are q8_0, q4_1 and nf4", l->base);
    }
    const int64_t size = c->head_size || c->heads < 1 ? c->head_size : c->channels / c->heads;
    const int64_t widths[] = {c->channels, c->feed_forward, c->heads * size}; // of matrices
    for (int i = 0; i < 3; i++) {
        if (widths[i] % blocks_length(c->base) != 0) {
            return fail("--base %s: rows of %lld numbers are not whole blocks of %d", l->base,
                        (long long)widths[i], blocks_length(c->base));
        }
    }
    c->head_rows = HEAD_ROWS;
    return l->rank > 0 ? 0 : fail("--base %s needs --rank: what is in blocks is frozen", l->base);
}

static int choose_llama(trainer *t) {
    llama *l = llama_of(t);
    const settings *o = &t->options;
    l->out.merges = true;
    if (l->from && o->preset) {
        return fail("--preset %s: --from has the sizes of a model already", o->preset);
    }
    if (l->write_type && !l->write) {
        return fail("--write-type needs --write FOLDER");
    }
    if (l->write && !weights_choose_type(&l->out, l->write_type ? l->write_type : "bf16")) {
        return fail("--write-type: %s", l->out.error);
    }
    if ((l->from ? open_weights(l) : choose_preset(l)) != 0) {
        return 1;
    }
    nn_llama_config *c = &l->config;
    const bool is_small = c->channels < 512;
    c->batch = o->batch ? o->batch : is_small ? 8 : 1;
    c->sequence = o->sequence;
    c->adapter_rank = l->rank;
    if (l->base && choose_base(l) != 0) {
        return 1;
    }
    c->largest_sequence = l->prompt && o->sequence > SAMPLE_SEQUENCE ? o->sequence : 0;
    t->shape.batch = c->batch;
    t->shape.sequence = c->sequence;
    t->shape.vocabulary = c->vocabulary;
    t->shape.layers = c->layers;
    t->shape.heads = c->heads;
    t->shape.channels = c->channels;
    t->model_name = l->from ? l->from : o->preset;
    t->evaluates_at_once = l->from != NULL;
    t->held_out_batches = l->from ? TUNED_BATCHES : 0;
    t->usual_rate = l->from ? (l->rank > 0 ? 2e-4 : 2e-5) : is_small ? 1e-3 : 3e-4;
    if (c->positions > 0 && c->sequence > c->positions) {
        return fail("--sequence %lld: the model is for up to %lld tokens", (long long)c->sequence,
                    (long long)c->positions);
    }
    if (o->dropout > 0.0f) {
        return fail("--dropout: models of this family have none");
    }
    if (l->prompt && !*l->prompt) {
        return fail("--prompt: there is no text to go on from");
    }
    return l->write && !o->dry && !o->verify ? check_folder(l) : 0;
}

/* Frozen params can stay in the file: on the CPU, whose memory that is, and in F32, since what is lent
   is never rounded. */
static bool lends(const llama *l) {
    const char *precision = l->t.options.precision;
    return l->from && l->rank > 0 && strcmp(l->t.options.device, "cpu") == 0 &&
           (!precision || strcmp(precision, "f32") == 0);
}

static nn_transformer build_llama(trainer *t) {
    llama *l = llama_of(t);
    const nn_transformer built = nn_llama(t->net, &l->config);
    if (lends(l) && !weights_lend(t->model, t->net, &l->file, &l->layout, &l->lent_bytes)) {
        ms_refuse(t->model, l->file.error);
    }
    return built;
}

static bool keeps_logits(const trainer *t) {
    return ((const llama *)t)->prompt != NULL;
}

/* A tokenizer may be that of another model. */
static int check_tokens(const llama *l, const tokenizer_ids *ids) {
    for (int64_t i = 0; i < ids->count; i++) {
        if (ids->ids[i] >= l->config.vocabulary) {
            return fail("--from %s: the tokenizer gives token %ld, and the model has %lld tokens",
                        l->from, (long)ids->ids[i], (long long)l->config.vocabulary);
        }
    }
    return 0;
}

/* Now, rather than after training. */
static int check_prompt(llama *l) {
    tokenizer_ids ids;
    memset(&ids, 0, sizeof ids);
    const bool is_encoded =
        !l->prompt || tokenizer_encode(&l->tokens, l->prompt, strlen(l->prompt), true, &ids);
    const int result = is_encoded ? check_tokens(l, &ids) : fail("%s", l->tokens.error);
    free(ids.ids);
    return result;
}

static int encode_text(trainer *t) {
    llama *l = llama_of(t);
    if (!l->has_tokenizer) {
        return encode_bytes(t);
    }
    tokenizer_ids ids;
    memset(&ids, 0, sizeof ids);
    if (!tokenizer_encode(&l->tokens, (const char *)t->text, (uint64_t)t->text_bytes, false,
                          &ids)) {
        free(ids.ids);
        return fail("%s", l->tokens.error);
    }
    t->data = ids.ids;
    t->data_count = ids.count;
    return check_tokens(l, &ids) != 0 || check_prompt(l) != 0;
}

/* Initial values: at random, and then, except for adapters, those of the file. */
static int init_llama(trainer *t) {
    llama *l = llama_of(t);
    const uint64_t seed = (uint64_t)t->options.seed;
    if ((l->from ? nn_init_adapters(t->net, seed) : nn_init(t->net, seed)) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    if (l->lent_bytes > 0) {
        printf("lent      %9.1f MiB of frozen weights, which stay in their file\n",
               mebibytes(l->lent_bytes));
    }
    return !l->from || weights_read(t->model, t->net, &l->file, &l->layout)
               ? 0
               : fail("--from %s: %s", l->from, l->file.error);
}

// ---- what it writes -----------------------------------------------------------------------------

/* Copies a file that lies beside the weights that were read, if there is one. */
static int copy_beside(llama *l, const char *name) {
    char from[SAFETENSORS_PATH], to[SAFETENSORS_PATH];
    weight_bytes text;
    memset(&text, 0, sizeof text);
    weight_path_beside(l->from, name, from);
    snprintf(to, sizeof to, "%s/%s", l->write, name);
    if (!weight_is_file(from)) {
        return 0;
    }
    const bool is_copied = weight_slurp(&l->file, from, &text) &&
                           weights_write_bytes(l->out.error, to, text.data, (size_t)text.size);
    free(text.data);
    if (is_copied) {
        printf("written   %s\n", to);
    }
    return is_copied ? 0 : fail("cannot copy %s to %s", from, l->write);
}

/* Weights in safetensors have their tokenizer in files beside them. */
static int copy_tokenizer(llama *l) {
    static const char *const others[] = {"tokenizer.json", "tokenizer_config.json",
                                         "special_tokens_map.json", "chat_template.jinja",
                                         "generation_config.json"};
    for (int i = 0; i < OPTIONS_IN(others); i++) {
        if (copy_beside(l, others[i]) != 0) {
            return 1;
        }
    }
    return 0;
}

/* Writes and frees a text; NULL: the reason for which there is none is in the error. */
static int write_made(llama *l, const char *name, char *text) {
    char path[SAFETENSORS_PATH];
    snprintf(path, sizeof path, "%s/%s", l->write, name);
    const bool is_written = text && weights_write_bytes(l->out.error, path, text, strlen(text));
    free(text);
    return is_written ? 0 : fail("--write %s: %s: %s", l->write, name, l->out.error);
}

/* A GGUF file has its tokenizer within it. */
static int write_tokenizer(llama *l) {
    if (write_made(l, "tokenizer.json", tokenizer_write_json(&l->tokens, l->out.error)) != 0 ||
        write_made(l, "tokenizer_config.json",
                   tokenizer_write_config(&l->tokens, &l->file, l->out.error)) != 0) {
        return 1;
    }
    printf("written   %s/tokenizer.json and tokenizer_config.json\n", l->write);
    return 0;
}

/* What ranks share out among them all have to read, and the first one writes it. */
static int write_weights(llama *l) {
    const char *folder = ranks_job.comm.rank == 0 ? l->write : NULL;
    if (!weights_write_folder(l->t.model, l->t.net, &l->layout, &l->config, folder, &l->out)) {
        return fail("--write %s: %s", l->write, l->out.error);
    }
    if (!folder) {
        return 0;
    }
    printf("written   %s/model.safetensors and config.json, in %s\n", l->write, l->out.type);
    if (l->from && l->file.value_count == 0) {
        return copy_tokenizer(l);
    }
    return l->has_tokenizer ? write_tokenizer(l) : 0;
}

static int finish_llama(trainer *t) {
    llama *l = llama_of(t);
    return l->write ? write_weights(l) : 0;
}

/* One token from softmax(logits / 0.7). */
static int32_t draw_token(trainer *t, const float *logits) {
    const int64_t count = t->shape.vocabulary;
    double sum = 0.0;
    float highest = logits[0];
    for (int64_t i = 1; i < count; i++) {
        highest = logits[i] > highest ? logits[i] : highest;
    }
    for (int64_t i = 0; i < count; i++) {
        sum += exp((double)(logits[i] - highest) / 0.7);
    }
    double mark = (double)(next_random(t) >> 11) / 9007199254740992.0 * sum;
    for (int64_t i = 0; i < count; i++) {
        mark -= exp((double)(logits[i] - highest) / 0.7);
        if (mark < 0.0) {
            return (int32_t)i;
        }
    }
    return (int32_t)count - 1;
}

static void print_token(const llama *l, int32_t token) {
    if (l->has_tokenizer) {
        const gguf_text text = tokenizer_text(&l->tokens, token);
        fwrite(text.data, 1, (size_t)text.length, stdout);
    } else {
        putchar(token == '\n' || (token >= 32 && token < 127) ? (int)token : '?');
    }
    fflush(stdout);
}

/* The tokens of the prompt, at the beginning of t->tokens; how many there are. At most half of the
   window, so that there is room to go on. */
static int64_t place_prompt(llama *l, int64_t window) {
    trainer *t = &l->t;
    const size_t length = strlen(l->prompt);
    int64_t used = 0;
    tokenizer_ids ids;
    memset(&ids, 0, sizeof ids);
    if (l->has_tokenizer) {
        tokenizer_encode(&l->tokens, l->prompt, length, true, &ids);
    }
    const int64_t count = l->has_tokenizer ? ids.count : (int64_t)length;
    for (int64_t i = count > window / 2 ? count - window / 2 : 0; i < count; i++) {
        t->tokens[used++] = l->has_tokenizer ? ids.ids[i] : (int32_t)(unsigned char)l->prompt[i];
    }
    free(ids.ids);
    return used;
}

/* Lets the model go on from the prompt, in the first row of a batch, at a short sequence. */
static int sample(trainer *t) {
    llama *l = llama_of(t);
    if (l->config.largest_sequence > 0) {
        const int64_t sizes[MS_LIMIT_AXES] = {SAMPLE_SEQUENCE};
        if (ms_reshape(t->model, sizes) != MS_RESULT_OK) {
            return fail("%s", ms_last_error(t->model));
        }
        t->shape.sequence = SAMPLE_SEQUENCE;
    }
    const int64_t window = t->shape.sequence, rows = t->shape.batch * window;
    memset(t->tokens, 0, (size_t)rows * sizeof *t->tokens);
    for (int64_t i = 0; i < rows; i++) {
        t->targets[i] = -1;
    }
    int64_t used = place_prompt(l, window);
    printf("\n%s", l->prompt);
    for (int n = 0; n < SAMPLE_TOKENS && used > 0; n++) {
        if (read_logits(t) != 0) {
            return 1;
        }
        const int32_t token = draw_token(t, t->logits + (used - 1) * t->shape.vocabulary);
        if (l->has_tokenizer && token == l->tokens.end) {
            break;
        }
        print_token(l, token);
        if (used == window) {
            memmove(t->tokens, t->tokens + 1, (size_t)(window - 1) * sizeof *t->tokens);
            used--;
        }
        t->tokens[used++] = token;
    }
    printf("\n");
    return 0;
}

static const trainer_own llama_own = {
    "[options] [text file ...]\n"
    "Trains on text inside a byte budget, from scratch or from published weights: on this\n"
    "repository's own text, if it is run there, or on files.",
    list_llama_options,
    choose_llama,
    build_llama,
    keeps_logits,
    encode_text,
    init_llama,
    finish_llama,
};

static const trainer_kind llama_kind = {"the family of Llama",
                                        "",
                                        "small, tiny or a published model",
                                        BYTE_COUNT,
                                        0.95f,
                                        NULL,
                                        draw_next_tokens,
                                        sample,
                                        &llama_own};

int main(int argc, char **argv) {
    static llama l;
    const int result = train_as(&l.t, &llama_kind, argc, argv);
    if (l.has_file) {
        weight_close(&l.file);
    }
    if (l.has_tokenizer) {
        tokenizer_close(&l.tokens);
    }
    return result;
}
