/*  model_shape.h - the sizes of a transformer: of a published model, by its name, or from the file
    config.json that is published with its weights.

    Include nn.h, llama_shape.h and options.h first. Compiled with MODEL_SHAPE_CJSON, and linked
    with cJSON (-lcjson), it reads files. */
#ifndef MEMSCALE_ESTIMATE_MODEL_SHAPE_H
#define MEMSCALE_ESTIMATE_MODEL_SHAPE_H

#ifdef MODEL_SHAPE_CJSON
#include <cjson/cJSON.h>
#endif
#include <errno.h>
#include <stddef.h>

typedef enum family { FAMILY_GPT2, FAMILY_BERT, FAMILY_LLAMA, FAMILY_COUNT } family;

static const char *const family_names[FAMILY_COUNT] = {"gpt2", "bert", "llama"};

typedef struct shape {
    char name[NAME_BYTES];
    family kind;
    int64_t layers, channels, heads, kv_heads, feed_forward, vocabulary;
    int64_t positions; // llama: 0, no table
    bool tied, qkv_bias;
} shape;

// ---- by name ------------------------------------------------------------------------------------

static const char *const nn_models[] = {"gpt2-124M",  "gpt2-355M", "gpt2-774M",
                                        "gpt2-1558M", "bert-base", "bert-large"};
enum {
    NN_MODELS = sizeof nn_models / sizeof nn_models[0],
    PUBLISHED_MODELS = (int)NN_MODELS + (int)LLAMA_PRESETS
};

/* The names of all published models: those of nn.h, then those of llama_shape.h. */
static void list_models(const char *names[PUBLISHED_MODELS]) {
    for (int i = 0; i < PUBLISHED_MODELS; i++) {
        names[i] = i < NN_MODELS ? nn_models[i] : llama_presets[i - NN_MODELS].name;
    }
}

/* The sizes of a published model, by its number. */
static void get_model(int number, shape *s) {
    const llama_preset *p = number < NN_MODELS ? NULL : &llama_presets[number - NN_MODELS];
    nn_transformer_config c;
    memset(&c, 0, sizeof c);
    memset(s, 0, sizeof *s);
    snprintf(s->name, sizeof s->name, "%s", p ? p->name : nn_models[number]);
    if (!p && nn_preset(s->name, &c)) {
        s->kind = strncmp(s->name, "bert", 4) == 0 ? FAMILY_BERT : FAMILY_GPT2;
        s->layers = c.layers;
        s->channels = c.channels;
        s->heads = s->kv_heads = c.heads;
        s->feed_forward = 4 * c.channels;
        s->vocabulary = c.vocabulary;
        s->positions = c.context;
        s->tied = true;
    } else if (p) {
        s->kind = FAMILY_LLAMA;
        s->layers = p->layers;
        s->channels = p->channels;
        s->heads = p->heads;
        s->kv_heads = p->kv_heads;
        s->feed_forward = p->feed_forward;
        s->vocabulary = p->vocabulary;
        s->tied = p->tied;
        s->qkv_bias = p->qkv_bias;
    }
}

/* Finds a published model; prints the candidates and returns 1 if it is not one. */
static int find_model(const char *name, shape *s) {
    const char *names[PUBLISHED_MODELS];
    list_models(names);
    const int number = find_name("--model", name, names, PUBLISHED_MODELS, "there are");
    if (number >= 0) {
        get_model(number, s);
    }
    return number < 0;
}

/* Default sizes of a family; 0: there is no default. */
static void start_family(shape *s, family kind) {
    static const int64_t vocabulary[FAMILY_COUNT] = {50257, 30522, 32000};
    static const int64_t positions[FAMILY_COUNT] = {1024, 512, 0};
    memset(s, 0, sizeof *s);
    snprintf(s->name, sizeof s->name, "%s of your own", family_names[kind]);
    s->kind = kind;
    s->vocabulary = vocabulary[kind];
    s->positions = positions[kind];
    s->tied = kind != FAMILY_LLAMA;
}

/* FAMILY_COUNT after an error. */
static family find_family(const char *name) {
    int k = 0;
    while (k < FAMILY_COUNT && !has_suffix(name, family_names[k])) {
        k++;
    }
    if (k == FAMILY_COUNT) {
        fail("--family %s: there are gpt2, bert and llama", name);
    }
    return (family)k;
}

// ---- from a file --------------------------------------------------------------------------------

#ifdef MODEL_SHAPE_CJSON

enum { CONFIG_BYTES = 1 << 20 };

/* Values of "model_type", and how the names in "architectures" begin. Qwen2.5 is of type qwen2: it
   has biases of queries, keys and values, which no key of the file mentions. */
typedef struct config_type {
    const char *type, *architecture;
    family kind;
    bool qkv_bias;
} config_type;

static const config_type config_types[] = {{"gpt2", "GPT2", FAMILY_GPT2, false},
                                           {"bert", "Bert", FAMILY_BERT, false},
                                           {"llama", "Llama", FAMILY_LLAMA, false},
                                           {"mistral", "Mistral", FAMILY_LLAMA, false},
                                           {"qwen2", "Qwen2For", FAMILY_LLAMA, true}};
enum { CONFIG_TYPES = sizeof config_types / sizeof config_types[0] };

/* The keys of a family; where is_optional, a missing one or null leaves 0. */
typedef struct config_key {
    const char *name, *older; // older: another name, or NULL
    size_t offset;            // in a shape
    bool is_optional;
} config_key;

enum { CONFIG_KEYS = 6 };
static const config_key config_keys[FAMILY_COUNT][CONFIG_KEYS] = {
    {{"n_layer", NULL, offsetof(shape, layers), false},
     {"n_embd", NULL, offsetof(shape, channels), false},
     {"n_head", NULL, offsetof(shape, heads), false},
     {"vocab_size", NULL, offsetof(shape, vocabulary), false},
     {"n_positions", "n_ctx", offsetof(shape, positions), false},
     {"n_inner", NULL, offsetof(shape, feed_forward), true}},
    {{"num_hidden_layers", NULL, offsetof(shape, layers), false},
     {"hidden_size", NULL, offsetof(shape, channels), false},
     {"num_attention_heads", NULL, offsetof(shape, heads), false},
     {"vocab_size", NULL, offsetof(shape, vocabulary), false},
     {"max_position_embeddings", NULL, offsetof(shape, positions), false},
     {"intermediate_size", NULL, offsetof(shape, feed_forward), false}},
    {{"num_hidden_layers", NULL, offsetof(shape, layers), false},
     {"hidden_size", NULL, offsetof(shape, channels), false},
     {"num_attention_heads", NULL, offsetof(shape, heads), false},
     {"vocab_size", NULL, offsetof(shape, vocabulary), false},
     {"num_key_value_heads", NULL, offsetof(shape, kv_heads), true},
     {"intermediate_size", NULL, offsetof(shape, feed_forward), false}}};

/* Keys whose values the nets of nn.h and llama_shape.h have no choice of: what they must be where
   they are given. */
static const struct {
    family kind;
    const char *name;
    double value; // 0 and 1 also as false and true
} config_fixed[] = {{FAMILY_GPT2, "tie_word_embeddings", 1.0},
                    {FAMILY_BERT, "tie_word_embeddings", 1.0},
                    {FAMILY_BERT, "type_vocab_size", 2.0},
                    {FAMILY_LLAMA, "attention_bias", 0.0},
                    {FAMILY_LLAMA, "mlp_bias", 0.0}};

/* Keys of parts that no net of this program has, in any family, and the largest number with which
   they mean that there is none. */
static const struct {
    const char *name, *part;
    double none;
} config_refused[] = {{"num_local_experts", "experts", 1.0},
                      {"num_experts", "experts", 1.0},
                      {"n_routed_experts", "experts", 1.0},
                      {"moe_num_experts", "experts", 1.0},
                      {"num_experts_per_tok", "experts", 1.0},
                      {"n_shared_experts", "experts", 0.0},
                      {"num_shared_experts", "experts", 0.0},
                      {"moe_intermediate_size", "experts", 0.0},
                      {"shared_expert_intermediate_size", "experts", 0.0},
                      {"ffn_config", "experts", 0.0},
                      {"kv_lora_rank", "latent attention", 0.0},
                      {"q_lora_rank", "latent attention", 0.0},
                      {"qk_nope_head_dim", "latent attention", 0.0},
                      {"qk_rope_head_dim", "latent attention", 0.0},
                      {"v_head_dim", "latent attention", 0.0},
                      {"is_encoder_decoder", "encoder beside a decoder", 0.0},
                      {"encoder", "encoder beside a decoder", 0.0},
                      {"decoder", "encoder beside a decoder", 0.0},
                      {"encoder_layers", "encoder beside a decoder", 0.0},
                      {"decoder_layers", "encoder beside a decoder", 0.0},
                      {"num_encoder_layers", "encoder beside a decoder", 0.0},
                      {"num_decoder_layers", "encoder beside a decoder", 0.0},
                      {"add_cross_attention", "attention to another sequence", 0.0},
                      {"cross_attention_layers", "attention to another sequence", 0.0},
                      {"cross_attention_hidden_size", "attention to another sequence", 0.0},
                      {"text_config", "model within another one", 0.0},
                      {"vision_config", "net for images", 0.0},
                      {"vision_tower", "net for images", 0.0},
                      {"mm_vision_tower", "net for images", 0.0},
                      {"visual", "net for images", 0.0},
                      {"audio_config", "net for sound", 0.0},
                      {"speech_config", "net for sound", 0.0},
                      {"num_nextn_predict_layers", "layers that predict several tokens", 0.0},
                      {"mtp_num_hidden_layers", "layers that predict several tokens", 0.0},
                      {"num_mtp_layers", "layers that predict several tokens", 0.0},
                      {"mamba_d_state", "layers with a state instead of attention", 0.0},
                      {"ssm_cfg", "layers with a state instead of attention", 0.0},
                      {"state_size", "layers with a state instead of attention", 0.0},
                      {"attn_layer_period", "layers with a state instead of attention", 0.0},
                      {"hybrid_override_pattern", "layers with a state instead of attention", 0.0},
                      {"layers_block_type", "layers with a state instead of attention", 0.0},
                      {"linear_num_value_heads", "layers with a state instead of attention", 0.0},
                      {"block_configs", "layers of different sizes", 0.0},
                      {"num_kv_shared_layers", "layers that share keys", 0.0},
                      {"hidden_size_per_layer_input", "token tables of layers", 0.0},
                      {"embedding_size", "token table of another width", 0.0},
                      {"word_embed_proj_dim", "token table of another width", 0.0},
                      {"num_hidden_groups", "layers that share params", 0.0},
                      {"pruned_heads", "layers of different sizes", 0.0},
                      {"use_qk_norm", "norms of queries and keys", 0.0},
                      {"qk_layernorm", "norms of queries and keys", 0.0},
                      {"use_bias", "other choice of biases", 0.0},
                      {"quantization_config", "weights in codes", 0.0}};

static const cJSON *config_item(const cJSON *config, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, name);
    return cJSON_IsNull(item) ? NULL : item;
}

static int read_count(const char *path, const cJSON *config, const config_key *key, shape *s) {
    const cJSON *item = config_item(config, key->name);
    item = item || !key->older ? item : config_item(config, key->older);
    if (!item) {
        return key->is_optional ? 0
                                : fail("%s: \"%s\" is missing, which a model of the family %s has",
                                       path, key->name, family_names[s->kind]);
    }
    const double value = cJSON_IsNumber(item) ? item->valuedouble : 0.0;
    if (!(value >= 1.0 && value <= (double)INT32_MAX) || value - (double)(int64_t)value > 0.0) {
        return fail("%s: \"%s\" is not a whole number from 1 to %ld", path, key->name,
                    (long)INT32_MAX);
    }
    const int64_t count = (int64_t)value;
    memcpy((char *)s + key->offset, &count, sizeof count);
    return 0;
}

/* Whether a key says that there is something: a number above `none`, true, or what is not empty. */
static bool config_says(const cJSON *item, double none) {
    const char *text = cJSON_GetStringValue(item);
    return cJSON_IsNumber(item) ? item->valuedouble > none
           : text               ? *text != 0
                                : cJSON_IsTrue(item) || cJSON_GetArraySize(item) > 0;
}

/* The kind of each layer, where a file lists them: attention, whatever its window. */
static int check_layer_types(const char *path, const cJSON *config) {
    const cJSON *types = config_item(config, "layer_types");
    for (int i = 0; i < cJSON_GetArraySize(types); i++) {
        const char *type = cJSON_GetStringValue(cJSON_GetArrayItem(types, i));
        const size_t length = type ? strlen(type) : 0, end = strlen("attention");
        if (length < end || strcmp(type + length - end, "attention") != 0 ||
            strncmp(type, "linear", 6) == 0) {
            return fail("%s: \"layer_types\" has %s, and this program plans attention alone", path,
                        type ? type : "what is no name");
        }
    }
    return 0;
}

/* Whether a file describes parts that the nets of this program do not have. */
static int check_parts(const char *path, const cJSON *config) {
    for (size_t i = 0; i < sizeof config_refused / sizeof config_refused[0]; i++) {
        const cJSON *item = config_item(config, config_refused[i].name);
        if (config_says(item, config_refused[i].none)) {
            char *value = cJSON_PrintUnformatted(item);
            const int failed =
                fail("%s: \"%s\" is %.40s%s, and this program plans no %s", path,
                     config_refused[i].name, value ? value : "given",
                     value && strlen(value) > 40 ? "..." : "", config_refused[i].part);
            cJSON_free(value);
            return failed;
        }
    }
    return check_layer_types(path, config);
}

static int check_fixed(const char *path, const cJSON *config, family kind) {
    for (size_t i = 0; i < sizeof config_fixed / sizeof config_fixed[0]; i++) {
        const cJSON *item = config_item(config, config_fixed[i].name);
        const double value = cJSON_IsNumber(item) ? item->valuedouble : (double)cJSON_IsTrue(item);
        if (item && config_fixed[i].kind == kind &&
            (value < config_fixed[i].value || value > config_fixed[i].value)) {
            return fail("%s: \"%s\": this program plans %s models with %g only", path,
                        config_fixed[i].name, family_names[kind], config_fixed[i].value);
        }
    }
    return 0;
}

/* What the nets of this program cannot be. */
static int check_config(const char *path, const cJSON *config, shape *s) {
    const bool is_llama = s->kind == FAMILY_LLAMA;
    const config_key key = {"head_dim", NULL, offsetof(shape, kv_heads), true};
    shape head; // kv_heads: the size of a head
    memset(&head, 0, sizeof head);
    if (read_count(path, config, &key, &head) != 0 || check_fixed(path, config, s->kind) != 0) {
        return 1;
    }
    if (head.kv_heads != 0 && head.kv_heads * s->heads != s->channels) {
        return fail("%s: \"head_dim\" %lld times \"num_attention_heads\" %lld is not "
                    "\"hidden_size\" %lld, and this program plans no other heads",
                    path, (long long)head.kv_heads, (long long)s->heads, (long long)s->channels);
    }
    s->kv_heads = s->kv_heads ? s->kv_heads : s->heads;
    s->feed_forward = s->feed_forward ? s->feed_forward : 4 * s->channels;
    s->tied = !is_llama || cJSON_IsTrue(config_item(config, "tie_word_embeddings"));
    return is_llama || s->feed_forward == 4 * s->channels
               ? 0
               : fail("%s: the feed-forward net is %lld wide: gpt2 and bert of nn.h have 4 times "
                      "the %lld channels",
                      path, (long long)s->feed_forward, (long long)s->channels);
}

/* What a file says it is; NULL after an error. */
static const config_type *find_type(const char *path, const cJSON *config) {
    const cJSON *type = config_item(config, "model_type");
    const cJSON *first = cJSON_GetArrayItem(config_item(config, "architectures"), 0);
    const char *name = type ? cJSON_GetStringValue(type) : cJSON_GetStringValue(first);
    for (int i = 0; i < CONFIG_TYPES && name; i++) {
        const char *start = config_types[i].architecture;
        if (type ? strcmp(name, config_types[i].type) == 0
                 : strncmp(name, start, strlen(start)) == 0) {
            return &config_types[i];
        }
    }
    fail("%s: \"model_type\" is %s%s%s: there are gpt2, bert, llama, mistral and qwen2; --family "
         "gpt2, bert or llama takes it as one of these",
         path, name ? "\"" : "", name ? name : "missing", name ? "\"" : "");
    return NULL;
}

static int read_config(const char *path, const cJSON *config, const char *family_name, shape *s) {
    if (!cJSON_IsObject(config)) {
        return fail("%s: no object of JSON, as a config.json is", path);
    }
    const config_type *type = family_name ? NULL : find_type(path, config);
    const family kind = family_name ? find_family(family_name) : type ? type->kind : FAMILY_COUNT;
    if (kind == FAMILY_COUNT) {
        return 1;
    }
    memset(s, 0, sizeof *s);
    s->qkv_bias = type && type->qkv_bias;
    const size_t length = strlen(path), most = sizeof s->name - 1;
    const char *name = length > most ? path + (length - most) : path;
    while (name > path && ((unsigned char)*name & 0xc0) == 0x80) { // within a character of UTF-8
        name++;
    }
    snprintf(s->name, sizeof s->name, "%s", name);
    s->kind = kind;
    if (check_parts(path, config) != 0) {
        return 1;
    }
    for (int i = 0; i < CONFIG_KEYS; i++) {
        if (read_count(path, config, &config_keys[kind][i], s) != 0) {
            return 1;
        }
    }
    return check_config(path, config, s);
}

/* The text of a file, to be freed; NULL after an error. */
static char *read_text_file(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    char *text = file ? (char *)malloc((size_t)CONFIG_BYTES + 1) : NULL;
    if (!file) {
        fail("cannot read %s: %s", path, strerror(errno));
        return NULL;
    }
    *length = text ? fread(text, 1, (size_t)CONFIG_BYTES + 1, file) : 0;
    const bool is_read = text && !ferror(file);
    const int error = errno;
    fclose(file);
    if (is_read && *length <= (size_t)CONFIG_BYTES) {
        text[*length] = 0;
        return text;
    }
    fail("cannot read %s: %s", path,
         is_read ? "it is larger than 1 MiB"
         : text  ? strerror(error)
                 : "no memory");
    free(text);
    return NULL;
}

/* Reads a config.json as a model of the family it names, or of another one (NULL: it says). Prints
   the reason and returns 1 if it cannot. */
static int read_model(const char *path, const char *family_name, shape *s) {
    size_t length = 0;
    char *text = read_text_file(path, &length);
    if (!text) {
        return 1;
    }
    const char *end = text;
    cJSON *config = cJSON_ParseWithLengthOpts(text, length, &end, false);
    int line = 1, status = 1;
    end += strspn(end, " \t\r\n");
    const bool is_whole = config && end == text + length;
    for (const char *c = text; c < end; c++) {
        line += *c == '\n';
    }
    if (is_whole) {
        status = read_config(path, config, family_name, s);
    } else {
        fail("%s: line %d is not JSON", path, line);
    }
    cJSON_Delete(config);
    free(text);
    return status;
}

#else

static int read_model(const char *path, const char *family_name, shape *s) {
    (void)family_name, (void)s;
    return fail("%s: this program was built without cJSON (libcjson-dev), which reads it; give "
                "--family and sizes",
                path);
}

#endif
#endif // MEMSCALE_ESTIMATE_MODEL_SHAPE_H
