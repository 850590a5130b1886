/*  model.h - which model is planned: a published one, one from a file, or one of the given sizes. */
#ifndef MEMSCALE_ESTIMATE_MODEL_H
#define MEMSCALE_ESTIMATE_MODEL_H

#include "model_config.h"
#include "settings.h"

typedef struct shape {
    char name[NAME_BYTES];
    model_config of;
} shape;

// ---- published models ---------------------------------------------------------------------------

enum { MOST_MODELS = 128 };

/* The names of all published models, those of GPT-2 and BERT first; returns how many there are. */
static int list_models(const char *names[MOST_MODELS]) {
    static const char *const first[] = {"gpt2-124M",  "gpt2-355M", "gpt2-774M",
                                        "gpt2-1558M", "bert-base", "bert-large"};
    int count = sizeof first / sizeof first[0];
    memcpy(names, first, sizeof first);
    for (int i = 0; nn_llama_name(i) && count < MOST_MODELS; i++) {
        names[count++] = nn_llama_name(i);
    }
    return count;
}

/* The settings of a published model. */
static void get_model(const char *name, shape *s) {
    nn_llama_config *c = &s->of.llama;
    nn_transformer_config sizes;
    memset(&sizes, 0, sizeof sizes);
    memset(s, 0, sizeof *s);
    snprintf(s->name, sizeof s->name, "%s", name);
    s->of.family = MODEL_LLAMA;
    if (!nn_llama_preset(name, c) && nn_preset(name, &sizes)) {
        s->of.family = strncmp(name, "bert", 4) == 0 ? MODEL_BERT : MODEL_GPT2;
        s->of.positions = sizes.context;
        c->vocabulary = sizes.vocabulary;
        c->layers = sizes.layers;
        c->channels = sizes.channels;
        c->heads = c->kv_heads = sizes.heads;
        c->head_size = c->channels / c->heads;
        c->feed_forward = 4 * c->channels;
        c->tied = true;
    }
}

/* Finds a published model; prints the candidates and returns 1 if it is not one. */
static int find_model(const char *name, shape *s) {
    const char *names[MOST_MODELS];
    const int number = find_name("--model", name, names, list_models(names), "there are");
    if (number >= 0) {
        get_model(names[number], s);
    }
    return number < 0;
}

// ---- models of the user's own -------------------------------------------------------------------

/* Default sizes of a family; 0: there is no default. */
static void start_family(shape *s, model_family family) {
    static const int64_t vocabulary[MODEL_FAMILIES] = {50257, 30522, 32000};
    static const int64_t positions[MODEL_FAMILIES] = {1024, 512, 0};
    memset(s, 0, sizeof *s);
    snprintf(s->name, sizeof s->name, "%s of your own", model_family_names[family]);
    s->of.family = family;
    s->of.positions = positions[family];
    s->of.llama.vocabulary = vocabulary[family];
    s->of.llama.tied = family != MODEL_LLAMA;
}

/* MODEL_FAMILIES after an error. */
static model_family find_family(const char *name) {
    int k = 0;
    while (k < MODEL_FAMILIES && !has_suffix(name, model_family_names[k])) {
        k++;
    }
    if (k == MODEL_FAMILIES) {
        fail("--family %s: there are gpt2, bert and llama", name);
    }
    return (model_family)k;
}

/* The path of a file as the name of its model: the end of it, from the start of a character on. */
static void name_file(const char *path, shape *s) {
    const size_t length = strlen(path), most = sizeof s->name - 1;
    const char *name = length > most ? path + (length - most) : path;
    while (name > path && ((unsigned char)*name & 0xc0) == 0x80) { // within a character of UTF-8
        name++;
    }
    snprintf(s->name, sizeof s->name, "%s", name);
}

/* A config.json, as what it says or as a model of another family. */
static int read_model(const char *path, const char *family, shape *s) {
    char error[MODEL_CONFIG_ERROR];
    const model_family k = family ? find_family(family) : MODEL_FAMILIES;
    if (family && k == MODEL_FAMILIES) {
        return 1;
    }
    name_file(path, s);
    return model_config_read(path, family ? model_family_names[k] : NULL, &s->of, error)
               ? 0
               : fail("%s", error);
}

static int start_shape(const settings *o, shape *s) {
    const bool has_file = o->files.count > 0;
    if (o->files.count > 1 || (o->model && (o->family || has_file))) {
        return fail("--model, --family and a file: give one of them, or a file and its family");
    }
    if (has_file) {
        return read_model(o->files.items[0], o->family, s);
    }
    if (o->family) {
        const model_family family = find_family(o->family);
        if (family != MODEL_FAMILIES) {
            start_family(s, family);
        }
        return family == MODEL_FAMILIES;
    }
    return find_model(o->model ? o->model : "gpt2-124M", s);
}

// ---- sizes --------------------------------------------------------------------------------------

/* Larger sizes make no sense, and their products would not fit 64 bits. */
static int check_sizes(const settings *o, const shape *s) {
    const nn_llama_config *c = &s->of.llama;
    const struct {
        const char *name;
        int64_t value, most;
    } sizes[] = {{"--layers", c->layers, 1000},
                 {"--channels", c->channels, 1 << 20},
                 {"--heads", c->heads, 1 << 16},
                 {"--kv-heads", c->kv_heads, 1 << 16},
                 {"--head-size", s->of.family == MODEL_LLAMA ? c->head_size : 0, 256},
                 {"--feed-forward", c->feed_forward, 1 << 22},
                 {"--vocabulary", c->vocabulary, 1 << 24},
                 {"--positions", s->of.positions, 1 << 24},
                 {"--batch", o->batch, 1 << 20},
                 {"--sequence", o->sequence, 1 << 22},
                 {"--accumulate", o->accumulate, 1 << 20},
                 {"--rank", o->rank, 1 << 16}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value > sizes[i].most) {
            return fail("%s %lld: at most %lld", sizes[i].name, (long long)sizes[i].value,
                        (long long)sizes[i].most);
        }
    }
    const long long count = (long long)batches_of_step(o, o->batch);
    return count <= 1 << 20
               ? 0
               : fail("--tokens %lld: %lld batches of %lld tokens, and a step has at most %d",
                      (long long)o->tokens, count, (long long)(o->batch * o->sequence), 1 << 20);
}

static int check_shape(const settings *o, const shape *s) {
    const nn_llama_config *c = &s->of.llama;
    const long long heads = (long long)c->heads;
    if (check_sizes(o, s) != 0) {
        return 1;
    }
    if (c->head_size == 0) {
        return fail("--heads %lld: the %lld channels are not a multiple", heads,
                    (long long)c->channels);
    }
    if (c->heads % c->kv_heads != 0) {
        return fail("--kv-heads %lld: the %lld heads are not a multiple", (long long)c->kv_heads,
                    heads);
    }
    if (s->of.family == MODEL_LLAMA && c->head_size % 2 != 0) {
        return fail(
            "--heads %lld: a head of %lld channels has no pairs for rotary positions to turn",
            heads, (long long)c->head_size);
    }
    if (s->of.positions && o->sequence > s->of.positions) {
        return fail("--sequence %lld: the position table of %s has %lld rows; --positions sets "
                    "another number",
                    (long long)o->sequence, s->name, (long long)s->of.positions);
    }
    return 0;
}

/* Takes a given size; returns whether it differs from that of the model. */
static bool take_size(int64_t given, int64_t *size) {
    const bool differs = given != 0 && given != *size;
    *size = given ? given : *size;
    return differs;
}

/* The size of a head follows from channels and heads, unless the model has one of its own. 0: the
   channels are no multiple of the heads. */
static bool take_head_size(const settings *o, const nn_llama_config *named, nn_llama_config *c) {
    const bool is_own = named->heads && named->head_size * named->heads != named->channels;
    const int64_t follows = c->channels % c->heads == 0 ? c->channels / c->heads : 0;
    c->head_size = is_own ? named->head_size : follows;
    const bool differs = take_size(o->head_size, &c->head_size);
    c->turned = c->head_size == named->head_size ? c->turned : 0;
    return differs;
}

/* Takes the given sizes; those that are not given follow. Returns whether any differs. */
static bool take_sizes(const settings *o, shape *s) {
    nn_llama_config *c = &s->of.llama;
    const nn_llama_config named = *c;
    const bool is_llama = s->of.family == MODEL_LLAMA;
    bool differs = take_size(o->layers, &c->layers);
    differs |= take_size(o->channels, &c->channels);
    differs |= take_size(o->heads, &c->heads);
    differs |= take_size(o->vocabulary, &c->vocabulary);
    differs |= take_size(o->positions, &s->of.positions);
    c->kv_heads = named.kv_heads != named.heads ? c->kv_heads : c->heads;
    if (c->channels != named.channels) {
        c->feed_forward = is_llama ? (8 * c->channels / 3 + 255) / 256 * 256 : 4 * c->channels;
    }
    differs |= take_size(o->kv_heads, &c->kv_heads);
    differs |= take_size(o->feed_forward, &c->feed_forward);
    return differs;
}

static int choose_shape(settings *o, shape *s) {
    if (start_shape(o, s) != 0) {
        return 1;
    }
    const bool is_llama = s->of.family == MODEL_LLAMA;
    if (!is_llama && (o->kv_heads || o->feed_forward || o->head_size)) {
        return fail(
            "--kv-heads, --head-size and --feed-forward are for llama: gpt2 and bert of nn.h "
            "have as many heads of keys as of queries, which share the channels, and 4 times "
            "the channels");
    }
    if (is_llama && o->positions) {
        return fail("--positions is for gpt2 and bert: llama has no table of positions");
    }
    const nn_llama_config named = s->of.llama;
    bool differs = take_sizes(o, s);
    if (s->of.llama.layers == 0 || s->of.llama.channels == 0 || s->of.llama.heads == 0) {
        return fail("--family %s: give --layers, --channels and --heads",
                    model_family_names[s->of.family]);
    }
    differs |= take_head_size(o, &named, &s->of.llama);
    if (differs && !(o->family && o->files.count == 0)) {
        const shape before = *s;
        snprintf(s->name, sizeof s->name, "like %.58s", before.name);
    }
    o->batch = o->batch ? o->batch : 4;
    if (o->sequence == 0) {
        o->sequence = s->of.positions && s->of.positions < 512 ? s->of.positions : 512;
    }
    return check_shape(o, s);
}

#endif // MEMSCALE_ESTIMATE_MODEL_H
