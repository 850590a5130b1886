/*  model_config.h - the settings of a model from the file config.json that is published with its
    weights, as transformers reads it: GPT-2, BERT, and the family of Llama.

        model_config c;
        char error[MODEL_CONFIG_ERROR];
        if (!model_config_read("config.json", NULL, &c, error)) { ... what is wrong is in error ... }

    Include nn.h first. Compiled with MODEL_SHAPE_CJSON, and linked with cJSON (-lcjson), it reads
    files. What a file leaves out has the value that transformers gives it (configuration_*.py of the
    model in its source, version 5.24). What no net of nn_models.h has is an error: experts, latent
    attention, images, weights in codes. What changes no size, but is not what nn_llama computes, is
    in model_config.untrained: such a model can be planned, but a trainer must refuse it. */
#ifndef MEMSCALE_MODEL_CONFIG_H
#define MEMSCALE_MODEL_CONFIG_H

#ifdef MODEL_SHAPE_CJSON
#include <cjson/cJSON.h>
#endif
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define CONFIG_API static __attribute__((unused))
#else
#define CONFIG_API static
#endif

typedef enum model_family { MODEL_GPT2, MODEL_BERT, MODEL_LLAMA, MODEL_FAMILIES } model_family;

static const char *const model_family_names[MODEL_FAMILIES] = {"gpt2", "bert", "llama"};

typedef struct model_config {
    model_family family;
    int64_t positions; // rows of the position table; MODEL_LLAMA: 0, there is none
    /* GPT-2 and BERT have vocabulary, layers, channels, heads, kv_heads, feed_forward and tied. */
    nn_llama_config llama;
    char untrained[128]; // what nn_llama does not compute; empty: nothing
} model_config;

enum { MODEL_CONFIG_ERROR = 512 };

/* The family of a name, in lower case; MODEL_FAMILIES: there is none. */
CONFIG_API model_family model_family_of(const char *name) {
    int k = 0;
    while (k < MODEL_FAMILIES && strcmp(name, model_family_names[k]) != 0) {
        k++;
    }
    return (model_family)k;
}

#ifdef MODEL_SHAPE_CJSON

enum { CONFIG_BYTES = 1 << 20 };

// ---- families -----------------------------------------------------------------------------------

enum {
    CONFIG_TIED = 1,     // the head is the token table, unless the file says otherwise
    CONFIG_QKV_BIAS = 2, // which no key mentions
    CONFIG_QK_NORM = 4,
    CONFIG_GEMMA = 8,
    CONFIG_SWITCHED = 16, // its window is off unless use_sliding_window is true
    CONFIG_GEMMA2 = CONFIG_TIED | CONFIG_GEMMA,
    CONFIG_GEMMA3 = CONFIG_GEMMA2 | CONFIG_QK_NORM
};

/* A value of "model_type", how the names in "architectures" begin, and what holds where a key is
   absent. 0: no default; kv_heads: as many as heads; head_size: channels / heads. A window below 0:
   there is none, whatever the file says. */
typedef struct config_type {
    const char *type, *architecture;
    model_family family;
    int64_t vocabulary, heads, kv_heads, head_size, window, full_every;
    float epsilon, theta, local_theta, attention_cap, logit_cap;
    int flags;
} config_type;

static const config_type config_types[] = {
    {"gpt2", "GPT2", MODEL_GPT2, 0, 0, 0, 0, -1, 0, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, CONFIG_TIED},
    {"bert", "Bert", MODEL_BERT, 0, 0, 0, 0, -1, 0, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, CONFIG_TIED},
    {"llama", "LlamaFor", MODEL_LLAMA, 0, 0, 0, 0, -1, 0, 1e-6f, 1e4f, 0.0f, 0.0f, 0.0f, 0},
    {"mistral", "MistralFor", MODEL_LLAMA, 0, 0, 8, 0, 4096, 0, 1e-6f, 1e4f, 0.0f, 0.0f, 0.0f, 0},
    {"qwen2", "Qwen2For", MODEL_LLAMA, 0, 0, 32, 0, 4096, 0, 1e-6f, 1e4f, 0.0f, 0.0f, 0.0f,
     CONFIG_QKV_BIAS | CONFIG_SWITCHED},
    {"qwen3", "Qwen3For", MODEL_LLAMA, 0, 0, 32, 128, 4096, 0, 1e-6f, 1e4f, 0.0f, 0.0f, 0.0f,
     CONFIG_QK_NORM | CONFIG_SWITCHED},
    {"gemma2", "Gemma2For", MODEL_LLAMA, 256000, 8, 4, 256, 4096, 2, 1e-6f, 1e4f, 0.0f, 50.0f,
     30.0f, CONFIG_GEMMA2},
    {"gemma3_text", "Gemma3For", MODEL_LLAMA, 262208, 8, 4, 256, 4096, 6, 1e-6f, 1e6f, 1e4f, 0.0f,
     0.0f, CONFIG_GEMMA3},
    {"phi3", "Phi3For", MODEL_LLAMA, 0, 0, 0, 0, 0, 0, 1e-5f, 1e4f, 0.0f, 0.0f, 0.0f, 0},
};
enum { CONFIG_TYPES = sizeof config_types / sizeof config_types[0] };

/* A whole number of a file, and where it belongs. */
typedef struct config_key {
    const char *name, *older; // older: another name, or NULL
    size_t offset;            // in a model_config
    bool is_optional;         // a missing one without a default leaves 0
} config_key;

enum { CONFIG_KEYS = 8 };
#define CONFIG_AT(member) offsetof(model_config, member)
static const config_key config_keys[MODEL_FAMILIES][CONFIG_KEYS] = {
    {{"n_layer", NULL, CONFIG_AT(llama.layers), false},
     {"n_embd", NULL, CONFIG_AT(llama.channels), false},
     {"n_head", NULL, CONFIG_AT(llama.heads), false},
     {"vocab_size", NULL, CONFIG_AT(llama.vocabulary), false},
     {"n_positions", "n_ctx", CONFIG_AT(positions), false},
     {"n_inner", NULL, CONFIG_AT(llama.feed_forward), true},
     {NULL, NULL, 0, true},
     {NULL, NULL, 0, true}},
    {{"num_hidden_layers", NULL, CONFIG_AT(llama.layers), false},
     {"hidden_size", NULL, CONFIG_AT(llama.channels), false},
     {"num_attention_heads", NULL, CONFIG_AT(llama.heads), false},
     {"vocab_size", NULL, CONFIG_AT(llama.vocabulary), false},
     {"max_position_embeddings", NULL, CONFIG_AT(positions), false},
     {"intermediate_size", NULL, CONFIG_AT(llama.feed_forward), false},
     {NULL, NULL, 0, true},
     {NULL, NULL, 0, true}},
    {{"num_hidden_layers", NULL, CONFIG_AT(llama.layers), false},
     {"hidden_size", NULL, CONFIG_AT(llama.channels), false},
     {"num_attention_heads", NULL, CONFIG_AT(llama.heads), false},
     {"vocab_size", NULL, CONFIG_AT(llama.vocabulary), false},
     {"intermediate_size", NULL, CONFIG_AT(llama.feed_forward), false},
     {"num_key_value_heads", NULL, CONFIG_AT(llama.kv_heads), true},
     {"head_dim", NULL, CONFIG_AT(llama.head_size), true},
     {"max_position_embeddings", NULL, CONFIG_AT(llama.positions), true}}};

/* Keys whose values the nets have no choice of: what they must be where they are given. */
static const struct {
    model_family family;
    const char *name;
    double value; // 0 and 1 also as false and true
} config_fixed[] = {{MODEL_GPT2, "tie_word_embeddings", 1.0},
                    {MODEL_BERT, "tie_word_embeddings", 1.0},
                    {MODEL_BERT, "type_vocab_size", 2.0},
                    {MODEL_LLAMA, "attention_bias", 0.0},
                    {MODEL_LLAMA, "mlp_bias", 0.0}};

/* Keys of parts that no net has, in any family, and the largest number with which they mean that
   there is none. What is beside a text model, whose settings are in "text_config", is left out. */
static const struct {
    const char *name, *part;
    double none;
    bool is_beside;
} config_refused[] = {
    {"num_local_experts", "experts", 1.0, false},
    {"num_experts", "experts", 1.0, false},
    {"n_routed_experts", "experts", 1.0, false},
    {"moe_num_experts", "experts", 1.0, false},
    {"num_experts_per_tok", "experts", 1.0, false},
    {"n_shared_experts", "experts", 0.0, false},
    {"num_shared_experts", "experts", 0.0, false},
    {"moe_intermediate_size", "experts", 0.0, false},
    {"shared_expert_intermediate_size", "experts", 0.0, false},
    {"ffn_config", "experts", 0.0, false},
    {"enable_moe_block", "experts", 0.0, false},
    {"kv_lora_rank", "latent attention", 0.0, false},
    {"q_lora_rank", "latent attention", 0.0, false},
    {"qk_nope_head_dim", "latent attention", 0.0, false},
    {"qk_rope_head_dim", "latent attention", 0.0, false},
    {"v_head_dim", "latent attention", 0.0, false},
    {"is_encoder_decoder", "encoder beside a decoder", 0.0, false},
    {"encoder", "encoder beside a decoder", 0.0, false},
    {"decoder", "encoder beside a decoder", 0.0, false},
    {"encoder_layers", "encoder beside a decoder", 0.0, false},
    {"decoder_layers", "encoder beside a decoder", 0.0, false},
    {"num_encoder_layers", "encoder beside a decoder", 0.0, false},
    {"num_decoder_layers", "encoder beside a decoder", 0.0, false},
    {"add_cross_attention", "attention to another sequence", 0.0, false},
    {"cross_attention_layers", "attention to another sequence", 0.0, false},
    {"cross_attention_hidden_size", "attention to another sequence", 0.0, false},
    {"text_config", "model within another one", 0.0, true},
    {"vision_config", "net for images", 0.0, true},
    {"vision_tower", "net for images", 0.0, true},
    {"mm_vision_tower", "net for images", 0.0, true},
    {"visual", "net for images", 0.0, true},
    {"audio_config", "net for sound", 0.0, true},
    {"speech_config", "net for sound", 0.0, true},
    {"num_nextn_predict_layers", "layers that predict several tokens", 0.0, false},
    {"mtp_num_hidden_layers", "layers that predict several tokens", 0.0, false},
    {"num_mtp_layers", "layers that predict several tokens", 0.0, false},
    {"mamba_d_state", "layers with a state instead of attention", 0.0, false},
    {"ssm_cfg", "layers with a state instead of attention", 0.0, false},
    {"state_size", "layers with a state instead of attention", 0.0, false},
    {"attn_layer_period", "layers with a state instead of attention", 0.0, false},
    {"hybrid_override_pattern", "layers with a state instead of attention", 0.0, false},
    {"layers_block_type", "layers with a state instead of attention", 0.0, false},
    {"linear_num_value_heads", "layers with a state instead of attention", 0.0, false},
    {"block_configs", "layers of different sizes", 0.0, false},
    {"num_kv_shared_layers", "layers that share keys", 0.0, false},
    {"hidden_size_per_layer_input", "token tables of layers", 0.0, false},
    {"embedding_size", "token table of another width", 0.0, false},
    {"word_embed_proj_dim", "token table of another width", 0.0, false},
    {"num_hidden_groups", "layers that share params", 0.0, false},
    {"pruned_heads", "layers of different sizes", 0.0, false},
    {"use_qk_norm", "such norms of queries and keys", 0.0, false},
    {"qk_layernorm", "such norms of queries and keys", 0.0, false},
    {"use_bias", "other choice of biases", 0.0, false},
    {"quantization_config", "weights in codes", 0.0, false}};

// ---- values -------------------------------------------------------------------------------------

/* A file that is being read. */
typedef struct config_reader {
    const char *path;
    const cJSON *config, *whole; // of the text model; of what it is within, or the same
    const config_type *type;
    model_config *to;
    char *error;
} config_reader;

CONFIG_API bool config_fail(const config_reader *r, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int used = snprintf(r->error, MODEL_CONFIG_ERROR, "%.300s: ", r->path);
    vsnprintf(r->error + used, (size_t)(MODEL_CONFIG_ERROR - used), format, args);
    va_end(args);
    return false;
}

/* The first thing that a trainer must refuse is kept. */
CONFIG_API void config_differs(const config_reader *r, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (r->to->untrained[0] == 0) {
        vsnprintf(r->to->untrained, sizeof r->to->untrained, format, args);
    }
    va_end(args);
}

CONFIG_API bool config_is_null(const cJSON *object, const char *name) {
    return cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(object, name)) != 0;
}

/* NULL: there is none, or null. */
CONFIG_API const cJSON *config_item(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNull(item) ? NULL : item;
}

/* What is absent stays, and null is 0. */
CONFIG_API bool config_count(const config_reader *r, const char *name, int64_t *count) {
    const cJSON *item = config_item(r->config, name);
    if (!item) {
        *count = config_is_null(r->config, name) ? 0 : *count;
        return true;
    }
    const double value = cJSON_IsNumber(item) ? item->valuedouble : 0.0;
    if (!(value >= 1.0 && value <= (double)INT32_MAX) || value - (double)(int64_t)value > 0.0) {
        return config_fail(r, "\"%s\" is not a whole number from 1 to %ld", name, (long)INT32_MAX);
    }
    *count = (int64_t)value;
    return true;
}

CONFIG_API bool config_real(const config_reader *r, const cJSON *object, const char *name,
                            float *real) {
    const cJSON *item = config_item(object, name);
    if (!item) {
        *real = config_is_null(object, name) ? 0.0f : *real;
        return true;
    }
    const double value = cJSON_IsNumber(item) ? item->valuedouble : 0.0;
    *real = (float)value;
    return (value > 1e-30 && value < 1e30) ||
           config_fail(r, "\"%s\" is not a number above 0", name);
}

/* Whether a key says that there is something: a number above `none`, true, or what is not empty. */
CONFIG_API bool config_says(const cJSON *item, double none) {
    const char *text = cJSON_GetStringValue(item);
    return cJSON_IsNumber(item) ? item->valuedouble > none
           : text               ? *text != 0
                                : cJSON_IsTrue(item) || cJSON_GetArraySize(item) > 0;
}

// ---- what there is not --------------------------------------------------------------------------

/* The name of a layer's kind, by a suffix: "attention" of "full_attention". */
CONFIG_API bool config_ends(const char *text, const char *end) {
    const size_t length = strlen(text), most = strlen(end);
    return length >= most && strcmp(text + length - most, end) == 0;
}

/* The kind of each layer, where a file lists them: attention, whatever its window. */
CONFIG_API bool config_check_layers(const config_reader *r) {
    const cJSON *types = config_item(r->config, "layer_types");
    for (int i = 0; i < cJSON_GetArraySize(types); i++) {
        const char *type = cJSON_GetStringValue(cJSON_GetArrayItem(types, i));
        if (!type || !config_ends(type, "attention") || strncmp(type, "linear", 6) == 0) {
            return config_fail(r, "\"layer_types\" has %s, and there is a net for attention alone",
                               type ? type : "what is no name");
        }
    }
    return true;
}

CONFIG_API bool config_check_parts(const config_reader *r, const cJSON *config, bool is_around) {
    for (size_t i = 0; i < sizeof config_refused / sizeof config_refused[0]; i++) {
        const cJSON *item = config_item(config, config_refused[i].name);
        if ((!is_around || !config_refused[i].is_beside) &&
            config_says(item, config_refused[i].none)) {
            char *value = cJSON_PrintUnformatted(item);
            config_fail(r, "\"%s\" is %.40s%s, and there is no net with %s", config_refused[i].name,
                        value ? value : "given", value && strlen(value) > 40 ? "..." : "",
                        config_refused[i].part);
            cJSON_free(value);
            return false;
        }
    }
    return true;
}

/* A mixture of experts is not taken for a dense model, even where its keys are left to defaults. */
CONFIG_API bool config_check_name(const config_reader *r, const char *name) {
    static const char *const of_experts[] = {"moe", "Moe", "MoE", "mixtral", "Mixtral"};
    for (size_t i = 0; name && i < sizeof of_experts / sizeof of_experts[0]; i++) {
        if (strstr(name, of_experts[i])) {
            return config_fail(
                r, "\"%s\" is a mixture of experts, and there is no net with experts", name);
        }
    }
    return true;
}

CONFIG_API bool config_check_fixed(const config_reader *r) {
    for (size_t i = 0; i < sizeof config_fixed / sizeof config_fixed[0]; i++) {
        const cJSON *item = config_item(r->config, config_fixed[i].name);
        const double value = cJSON_IsNumber(item) ? item->valuedouble : (double)cJSON_IsTrue(item);
        if (item && config_fixed[i].family == r->to->family &&
            (value < config_fixed[i].value || value > config_fixed[i].value)) {
            return config_fail(r, "\"%s\": the nets of %s have %g only", config_fixed[i].name,
                               model_family_names[r->to->family], config_fixed[i].value);
        }
    }
    return true;
}

// ---- what there is ------------------------------------------------------------------------------

CONFIG_API bool config_read_counts(const config_reader *r) {
    const config_key *keys = config_keys[r->to->family];
    for (int i = 0; i < CONFIG_KEYS && keys[i].name; i++) {
        const bool is_older = keys[i].older && !config_item(r->config, keys[i].name);
        int64_t count;
        memcpy(&count, (char *)r->to + keys[i].offset, sizeof count); // the default
        if (!config_count(r, is_older ? keys[i].older : keys[i].name, &count)) {
            return false;
        }
        if (count == 0 && !keys[i].is_optional) {
            return config_fail(r, "\"%s\" is missing, which a model of the family %s has",
                               keys[i].name, model_family_names[r->to->family]);
        }
        memcpy((char *)r->to + keys[i].offset, &count, sizeof count);
    }
    return true;
}

CONFIG_API bool config_check_counts(const config_reader *r) {
    nn_llama_config *c = &r->to->llama;
    const long long heads = (long long)c->heads, channels = (long long)c->channels;
    c->kv_heads = c->kv_heads ? c->kv_heads : c->heads;
    c->feed_forward = c->feed_forward ? c->feed_forward : 4 * c->channels;
    if (c->heads % c->kv_heads != 0) {
        return config_fail(r, "\"num_key_value_heads\" %lld: the %lld heads are not a multiple",
                           (long long)c->kv_heads, heads);
    }
    if (c->head_size == 0 && c->channels % c->heads != 0) {
        return config_fail(r, "\"num_attention_heads\" %lld: the %lld channels are not a multiple",
                           heads, channels);
    }
    c->head_size = c->head_size ? c->head_size : c->channels / c->heads;
    return r->to->family == MODEL_LLAMA || c->feed_forward == 4 * c->channels ||
           config_fail(r,
                       "the feed-forward net is %lld wide: gpt2 and bert have 4 times the %lld "
                       "channels",
                       (long long)c->feed_forward, channels);
}

/* The gate of the feed-forward net. */
CONFIG_API void config_read_gate(const config_reader *r) {
    nn_llama_config *c = &r->to->llama;
    const bool is_gemma = (r->type->flags & CONFIG_GEMMA) != 0;
    const char *name =
        cJSON_GetStringValue(config_item(r->config, is_gemma ? "hidden_activation" : "hidden_act"));
    const char *gate = name ? name : is_gemma ? "gelu_pytorch_tanh" : "silu";
    c->gelu = strcmp(gate, "gelu_pytorch_tanh") == 0 || strcmp(gate, "gelu_new") == 0;
    if (!c->gelu && strcmp(gate, "silu") != 0 && strcmp(gate, "swish") != 0) {
        config_differs(r, "the gate %.40s: there are silu and gelu_pytorch_tanh", gate);
    }
}

CONFIG_API bool config_read_norms(const config_reader *r) {
    nn_llama_config *c = &r->to->llama;
    const int flags = r->type->flags;
    const cJSON *own = config_item(r->config, "tie_word_embeddings");
    const cJSON *tied = own ? own : config_item(r->whole, "tie_word_embeddings");
    c->tied = tied ? config_says(tied, 0.0) : (flags & CONFIG_TIED) != 0;
    c->qkv_bias = (flags & CONFIG_QKV_BIAS) != 0;
    c->qk_norm = (flags & CONFIG_QK_NORM) != 0;
    c->epsilon = r->type->epsilon;
    c->post_norms = c->offset_norms = c->scaled_tokens = (flags & CONFIG_GEMMA) != 0;
    if (!config_real(r, r->config, "rms_norm_eps", &c->epsilon)) {
        return false;
    }
    if ((flags & CONFIG_GEMMA) == 0) {
        return true;
    }
    c->query_scale = 256.0f;
    c->attention_cap = r->type->attention_cap;
    c->logit_cap = r->type->logit_cap;
    if (config_says(config_item(r->config, "use_bidirectional_attention"), 0.0)) {
        config_differs(r, "attention to later tokens");
    }
    return config_real(r, r->config, "query_pre_attn_scalar", &c->query_scale) &&
           config_real(r, r->config, "attn_logit_softcapping", &c->attention_cap) &&
           config_real(r, r->config, "final_logit_softcapping", &c->logit_cap);
}

/* Windows by a list of all layers: all of them, none, or all but every so many-th. */
CONFIG_API bool config_read_layers(const config_reader *r, const cJSON *types) {
    nn_llama_config *c = &r->to->llama;
    const int count = cJSON_GetArraySize(types);
    int64_t first = count, differing = 0; // the first layer that sees all keys
    if (count != c->layers) {
        return config_fail(r, "\"layer_types\" has %d layers, and \"num_hidden_layers\" is %lld",
                           count, (long long)c->layers);
    }
    for (int i = count - 1; i >= 0; i--) {
        first = strcmp(cJSON_GetArrayItem(types, i)->valuestring, "full_attention") ? first : i;
    }
    c->full_every = first == count ? 0 : first + 1;
    for (int i = 0; i < count; i++) {
        const char *type = cJSON_GetArrayItem(types, i)->valuestring;
        const bool is_full = c->full_every != 0 && (i + 1) % c->full_every == 0;
        differing += strcmp(type, is_full ? "full_attention" : "sliding_attention") != 0;
    }
    if (differing > 0) {
        config_differs(r, "\"layer_types\" that do not repeat: every so many-th has no window");
    }
    return true;
}

/* Qwen's windows without such a list: in the layers from max_window_layers on. */
CONFIG_API void config_skip_layers(const config_reader *r) {
    nn_llama_config *c = &r->to->llama;
    const cJSON *item = config_item(r->config, "max_window_layers");
    const double whole = cJSON_IsNumber(item) ? item->valuedouble : 28.0;
    if (c->window > 0 && whole > 0.0 && whole < (double)c->layers) {
        config_differs(r, "a window from layer %.0f on", whole);
    }
    c->window = whole > 0.0 ? 0 : c->window;
}

CONFIG_API bool config_read_window(const config_reader *r) {
    nn_llama_config *c = &r->to->llama;
    const cJSON *types = config_item(r->config, "layer_types");
    const bool is_switched = (r->type->flags & CONFIG_SWITCHED) != 0;
    const bool has_pattern = r->type->local_theta > 0.0f; // of Gemma 3; that of Gemma 2 is fixed
    if (r->type->window < 0 ||
        (is_switched && !config_says(config_item(r->config, "use_sliding_window"), 0.0))) {
        return true;
    }
    c->window = r->type->window;
    c->full_every = r->type->full_every;
    if (!config_count(r, "sliding_window", &c->window) ||
        (has_pattern && !config_count(r, "sliding_window_pattern", &c->full_every)) ||
        (types && !config_read_layers(r, types))) {
        return false;
    }
    if (is_switched && !types) {
        config_skip_layers(r);
    }
    c->window = c->full_every == 1 ? 0 : c->window;
    c->full_every = c->window > 0 ? c->full_every : 0;
    return true;
}

/* The scaling of angles; `from` has the keys of the file's "rope_scaling". */
CONFIG_API bool config_read_scaling(const config_reader *r, const cJSON *from) {
    nn_rotary_scaling *s = &r->to->llama.scaling;
    const char *type = cJSON_GetStringValue(config_item(from, "rope_type"));
    const char *older = cJSON_GetStringValue(config_item(from, "type"));
    type = type ? type : older ? older : "default";
    const bool is_linear = strcmp(type, "linear") == 0, is_llama3 = strcmp(type, "llama3") == 0;
    if (!is_linear && !is_llama3) {
        if (strcmp(type, "default") != 0) {
            config_differs(r, "rotary positions scaled by %.40s: there are linear and llama3",
                           type);
        }
        return true;
    }
    float original = 0.0f;
    s->kind = is_linear ? NN_ROTARY_LINEAR : NN_ROTARY_LLAMA3;
    if (!config_real(r, from, "factor", &s->factor) ||
        !config_real(r, from, "low_freq_factor", &s->low) ||
        !config_real(r, from, "high_freq_factor", &s->high) ||
        !config_real(r, from, "original_max_position_embeddings", &original)) {
        return false;
    }
    s->original = original < 1e9f ? (int64_t)original : 0;
    return nn_is_scaling(s) ||
           config_fail(r, "\"rope_scaling\" of the type %s lacks %s", type,
                       is_linear ? "\"factor\""
                                 : "\"factor\", \"low_freq_factor\", a larger "
                                   "\"high_freq_factor\" or \"original_max_position_embeddings\"");
}

/* Rotary positions: in "rope_parameters" as transformers 5 writes them, for each kind of layer where
   they differ, or in keys of their own and "rope_scaling". */
CONFIG_API bool config_read_rotary(const config_reader *r) {
    nn_llama_config *c = &r->to->llama;
    const cJSON *newer = config_item(r->config, "rope_parameters");
    const cJSON *full = config_item(newer, "full_attention");
    const cJSON *local = config_item(newer, "sliding_attention");
    const cJSON *older = config_item(r->config, "rope_scaling"); // which wins in transformers, too
    const cJSON *scaling = older ? older : full ? full : newer;
    float turned = 1.0f; // of a head
    if (scaling && !cJSON_IsObject(scaling)) {
        return config_fail(r, "\"%s\" is no object", scaling->string);
    }
    c->theta = r->type->theta;
    c->local_theta = r->type->local_theta;
    if (!config_real(r, r->config, "rope_theta", &c->theta) ||
        !config_real(r, scaling, "rope_theta", &c->theta) ||
        !config_real(r, r->config, "partial_rotary_factor", &turned) ||
        !config_real(r, scaling, "partial_rotary_factor", &turned) ||
        (c->local_theta > 0.0f &&
         (!config_real(r, r->config, "rope_local_base_freq", &c->local_theta) ||
          !config_real(r, local, "rope_theta", &c->local_theta)))) {
        return false;
    }
    const int64_t part = (int64_t)((double)turned * (double)c->head_size);
    c->turned = turned > 0.0f && turned < 1.0f ? part : 0;
    if ((c->turned ? c->turned : c->head_size) % 2 != 0) {
        return config_fail(r, "a head of %lld channels has no pairs for rotary positions to turn",
                           (long long)(c->turned ? c->turned : c->head_size));
    }
    return config_read_scaling(r, scaling);
}

CONFIG_API void config_start(const config_reader *r) {
    nn_llama_config *c = &r->to->llama;
    memset(r->to, 0, sizeof *r->to);
    r->to->family = r->type->family;
    c->vocabulary = r->type->vocabulary;
    c->heads = r->type->heads;
    c->kv_heads = r->type->kv_heads;
    c->head_size = r->type->head_size;
    c->tied = (r->type->flags & CONFIG_TIED) != 0;
}

CONFIG_API bool config_read_all(const config_reader *r) {
    config_start(r);
    if (!config_check_fixed(r) || !config_read_counts(r) || !config_check_counts(r)) {
        return false;
    }
    if (r->to->family != MODEL_LLAMA) {
        return true;
    }
    config_read_gate(r);
    return config_read_norms(r) && config_read_rotary(r) && config_read_window(r);
}

// ---- the file -----------------------------------------------------------------------------------

/* "gemma3" is also what "gemma3_text" is within. */
CONFIG_API bool config_is_type(const char *name, const char *type) {
    const size_t length = strlen(name);
    return strncmp(name, type, length) == 0 &&
           (type[length] == 0 || strcmp(type + length, "_text") == 0);
}

CONFIG_API const char *config_type_name(const cJSON *config) {
    return cJSON_GetStringValue(config_item(config, "model_type"));
}

CONFIG_API const char *config_first_architecture(const cJSON *config) {
    return cJSON_GetStringValue(cJSON_GetArrayItem(config_item(config, "architectures"), 0));
}

/* What a file says it is; NULL after an error. */
CONFIG_API const config_type *config_find_type(const config_reader *r) {
    const cJSON *of = config_item(r->config, "model_type") ? r->config : r->whole;
    const bool has_type = config_item(of, "model_type") != NULL;
    const char *name = has_type ? config_type_name(of) : config_first_architecture(of);
    char all[256] = "";
    for (int i = 0; i < CONFIG_TYPES; i++) {
        const char *start = config_types[i].architecture;
        if (name && (has_type ? config_is_type(name, config_types[i].type)
                              : strncmp(name, start, strlen(start)) == 0)) {
            return &config_types[i];
        }
        const size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s",
                 i == 0                  ? ""
                 : i + 1 == CONFIG_TYPES ? " and "
                                         : ", ",
                 config_types[i].type);
    }
    config_fail(r, "\"model_type\" is %s%.60s%s: there are %s", name ? "\"" : "",
                name ? name : "missing", name ? "\"" : "", all);
    return NULL;
}

CONFIG_API const config_type *config_type_of_family(const config_reader *r, const char *name) {
    for (int i = 0; i < CONFIG_TYPES; i++) {
        if (strcmp(config_types[i].type, name) == 0 && model_family_of(name) != MODEL_FAMILIES) {
            return &config_types[i];
        }
    }
    config_fail(r, "the family %s: there are gpt2, bert and llama", name);
    return NULL;
}

CONFIG_API bool config_read(config_reader *r, const char *family) {
    if (!cJSON_IsObject(r->config)) {
        return config_fail(r, "no object of JSON, as a config.json is");
    }
    const cJSON *inner = config_item(r->config, "text_config");
    r->whole = r->config;
    r->config = cJSON_GetArraySize(inner) > 0 && !cJSON_IsArray(inner) ? inner : r->config;
    if (!config_check_name(r, config_type_name(r->whole)) ||
        !config_check_name(r, config_type_name(r->config)) ||
        !config_check_name(r, config_first_architecture(r->whole)) ||
        !config_check_parts(r, r->whole, r->whole != r->config) ||
        !config_check_parts(r, r->config, false) || !config_check_layers(r)) {
        return false;
    }
    r->type = family ? config_type_of_family(r, family) : config_find_type(r);
    return r->type && config_read_all(r);
}

/* The text of a file, to be freed; NULL after an error. */
CONFIG_API char *config_text(const char *path, size_t *length, char *error) {
    FILE *file = fopen(path, "rb");
    char *text = file ? (char *)malloc((size_t)CONFIG_BYTES + 1) : NULL;
    if (!file) {
        snprintf(error, MODEL_CONFIG_ERROR, "cannot read %.300s: %s", path, strerror(errno));
        return NULL;
    }
    *length = text ? fread(text, 1, (size_t)CONFIG_BYTES + 1, file) : 0;
    const bool is_read = text && !ferror(file);
    const int number = errno;
    fclose(file);
    if (is_read && *length <= (size_t)CONFIG_BYTES) {
        text[*length] = 0;
        return text;
    }
    snprintf(error, MODEL_CONFIG_ERROR, "cannot read %.300s: %s", path,
             is_read ? "it is larger than 1 MiB"
             : text  ? strerror(number)
                     : "no memory");
    free(text);
    return NULL;
}

/* The settings in the text of a config.json, which errors call `path`, as of the model that it names or
   of a family ("gpt2", "bert" or "llama"; NULL: the text says). False: there are none, and `error` says
   why. */
CONFIG_API bool model_config_of_json(const cJSON *object, const char *path, const char *family,
                                     model_config *config, char error[MODEL_CONFIG_ERROR]) {
    config_reader r = {path, object, object, NULL, config, error};
    return config_read(&r, family);
}

/* The same of a file. */
CONFIG_API bool model_config_read(const char *path, const char *family, model_config *config,
                                  char error[MODEL_CONFIG_ERROR]) {
    size_t length = 0;
    char *text = config_text(path, &length, error);
    if (!text) {
        return false;
    }
    const char *end = text;
    cJSON *object = cJSON_ParseWithLengthOpts(text, length, &end, false);
    int line = 1;
    end += strspn(end, " \t\r\n");
    for (const char *c = text; c < end; c++) {
        line += *c == '\n';
    }
    const bool is_whole = object && end == text + length;
    if (!is_whole) {
        snprintf(error, MODEL_CONFIG_ERROR, "%.300s: line %d is not JSON", path, line);
    }
    const bool is_read = is_whole && model_config_of_json(object, path, family, config, error);
    cJSON_Delete(object);
    free(text);
    return is_read;
}

#else

CONFIG_API bool model_config_read(const char *path, const char *family, model_config *config,
                                  char error[MODEL_CONFIG_ERROR]) {
    (void)family, (void)config;
    snprintf(error, MODEL_CONFIG_ERROR,
             "%.300s: this program was built without cJSON (libcjson-dev), which reads it", path);
    return false;
}

#endif
#endif // MEMSCALE_MODEL_CONFIG_H
