/*  weights_config.h - the settings of nn_llama, from the metadata of a GGUF file or from the config.json
    beside other weights, and such a config.json for weights that were written, with the tokens at both
    ends of a text as they were.

    Llama, Mistral, Qwen2, Qwen3, SmolLM2, Gemma 2 and 3, and Phi-3. Batch, sequence and adapters are not
    a model's and are left as they are.

    Include weights.h first. It is C and C++. */
#ifndef MEMSCALE_WEIGHTS_CONFIG_H
#define MEMSCALE_WEIGHTS_CONFIG_H

#include "model_config.h"

// ---- what models there are ----------------------------------------------------------------------

enum {
    WEIGHTS_QKV_BIAS = 1,
    WEIGHTS_QK_NORM = 2,
    WEIGHTS_IS_GEMMA = 4,
    WEIGHTS_IS_GEMMA3 = 8,
    WEIGHTS_WINDOW_ASKED = 16 // in config.json, by use_sliding_window
};

typedef struct weights_model {
    const char *type, *architecture; // of config.json
    const char *gguf;                // NULL: it is another one there
    weights_family family;           // of the names of transformers
    uint32_t flags;
} weights_model;

static const weights_model weights_models[] = {
    {"llama", "LlamaForCausalLM", "llama", WEIGHTS_LLAMA, 0},
    {"mistral", "MistralForCausalLM", NULL, WEIGHTS_LLAMA, 0},
    {"qwen2", "Qwen2ForCausalLM", "qwen2", WEIGHTS_LLAMA, WEIGHTS_QKV_BIAS | WEIGHTS_WINDOW_ASKED},
    {"qwen3", "Qwen3ForCausalLM", "qwen3", WEIGHTS_LLAMA, WEIGHTS_QK_NORM | WEIGHTS_WINDOW_ASKED},
    {"gemma2", "Gemma2ForCausalLM", "gemma2", WEIGHTS_GEMMA, WEIGHTS_IS_GEMMA},
    {"gemma3_text", "Gemma3ForCausalLM", "gemma3", WEIGHTS_GEMMA,
     WEIGHTS_IS_GEMMA | WEIGHTS_IS_GEMMA3 | WEIGHTS_QK_NORM},
    {"phi3", "Phi3ForCausalLM", NULL, WEIGHTS_PHI3, 0},
};
enum { WEIGHTS_MODELS = sizeof weights_models / sizeof weights_models[0] };

typedef enum weights_number {
    WEIGHTS_COUNT, // int64_t
    WEIGHTS_REAL,  // float; in config.json it has a point: transformers is strict about that
    WEIGHTS_WHOLE  // float, and has none there
} weights_number;

/* A number of the settings; the keys of GGUF follow the name of the architecture and a point. */
typedef struct weights_key {
    const char *json, *gguf; // NULL: not there
    size_t offset;           // in nn_llama_config
    weights_number type;
    bool is_needed;
} weights_key;

static const weights_key weights_keys[] = {
    {"vocab_size", "vocab_size", offsetof(nn_llama_config, vocabulary), WEIGHTS_COUNT, false},
    {"num_hidden_layers", "block_count", offsetof(nn_llama_config, layers), WEIGHTS_COUNT, true},
    {"hidden_size", "embedding_length", offsetof(nn_llama_config, channels), WEIGHTS_COUNT, true},
    {"intermediate_size", "feed_forward_length", offsetof(nn_llama_config, feed_forward),
     WEIGHTS_COUNT, true},
    {"num_attention_heads", "attention.head_count", offsetof(nn_llama_config, heads), WEIGHTS_COUNT,
     true},
    {"num_key_value_heads", "attention.head_count_kv", offsetof(nn_llama_config, kv_heads),
     WEIGHTS_COUNT, false},
    {"head_dim", "attention.key_length", offsetof(nn_llama_config, head_size), WEIGHTS_COUNT,
     false},
    {"max_position_embeddings", "context_length", offsetof(nn_llama_config, positions),
     WEIGHTS_COUNT, false},
    {NULL, "rope.dimension_count", offsetof(nn_llama_config, turned), WEIGHTS_COUNT, false},
    {"rms_norm_eps", "attention.layer_norm_rms_epsilon", offsetof(nn_llama_config, epsilon),
     WEIGHTS_REAL, true},
    {"rope_theta", "rope.freq_base", offsetof(nn_llama_config, theta), WEIGHTS_REAL, false},
    {"rope_local_base_freq", "rope.freq_base_swa", offsetof(nn_llama_config, local_theta),
     WEIGHTS_REAL, false},
    {"sliding_window", "attention.sliding_window", offsetof(nn_llama_config, window), WEIGHTS_COUNT,
     false},
    {"attn_logit_softcapping", "attn_logit_softcapping", offsetof(nn_llama_config, attention_cap),
     WEIGHTS_REAL, false},
    {"final_logit_softcapping", "final_logit_softcapping", offsetof(nn_llama_config, logit_cap),
     WEIGHTS_REAL, false},
    {"query_pre_attn_scalar", NULL, offsetof(nn_llama_config, query_scale), WEIGHTS_WHOLE, false},
};
enum { WEIGHTS_SETTINGS = sizeof weights_keys / sizeof weights_keys[0] };

/* Sets one; an error if it is not a number that can be meant. */
GGUF_API bool weights_set(char *error, nn_llama_config *c, const weights_key *key, double value) {
    const bool fits = key->type != WEIGHTS_COUNT ? value >= 0.0 && value <= 1e12
                                                 : value >= 1.0 && value <= (double)INT32_MAX &&
                                                       value - (double)(int64_t)value <= 0.0;
    if (!fits) {
        return weight_fail(
            error, "%s is %g, which is no %s", key->json ? key->json : key->gguf, value,
            key->type != WEIGHTS_COUNT ? "such number" : "whole number from 1 to 2147483647");
    }
    if (key->type != WEIGHTS_COUNT) {
        const float real = (float)value;
        memcpy((char *)c + key->offset, &real, sizeof real);
    } else {
        const int64_t count = (int64_t)value;
        memcpy((char *)c + key->offset, &count, sizeof count);
    }
    return true;
}

/* The shortest decimal number that is this float: 1e-5 rather than 9.99999974737875e-06. */
GGUF_API double weights_decimal(float value) {
    char text[32];
    double decimal = 0.0;
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        decimal = strtod(text, NULL);
        const float back = (float)decimal;
        if (memcmp(&value, &back, sizeof value) == 0) {
            break;
        }
    }
    return decimal;
}

GGUF_API double weights_get(const nn_llama_config *c, const weights_key *key) {
    float real;
    int64_t count;
    if (key->type != WEIGHTS_COUNT) {
        memcpy(&real, (const char *)c + key->offset, sizeof real);
        return weights_decimal(real);
    }
    memcpy(&count, (const char *)c + key->offset, sizeof count);
    return (double)count;
}

/* What is not a model's. */
GGUF_API void weights_keep_run(nn_llama_config *to, const nn_llama_config *from) {
    to->batch = from->batch;
    to->sequence = from->sequence;
    to->largest_batch = from->largest_batch;
    to->largest_sequence = from->largest_sequence;
    to->adapter_rank = from->adapter_rank;
}

/* What a model has by its kind, before its numbers are read. */
GGUF_API void weights_start_config(const weights_model *m, nn_llama_config *c) {
    const nn_llama_config given = *c;
    const bool is_gemma = (m->flags & WEIGHTS_IS_GEMMA) != 0;
    const bool is_gemma3 = (m->flags & WEIGHTS_IS_GEMMA3) != 0;
    memset(c, 0, sizeof *c);
    weights_keep_run(c, &given);
    c->qkv_bias = (m->flags & WEIGHTS_QKV_BIAS) != 0;
    c->qk_norm = (m->flags & WEIGHTS_QK_NORM) != 0;
    c->post_norms = c->offset_norms = c->scaled_tokens = c->gelu = c->tied = is_gemma;
    c->full_every = is_gemma3 ? 6 : is_gemma ? 2 : 0;
    c->local_theta = is_gemma3 ? 10000.0f : 0.0f;
    c->theta = is_gemma3 ? 1e6f : 10000.0f;
}

/* Once the numbers are read: those that are left out, and what must agree. */
GGUF_API bool weights_end_config(char *error, nn_llama_config *c) {
    c->kv_heads = c->kv_heads ? c->kv_heads : c->heads;
    c->head_size = c->head_size ? c->head_size : c->channels / c->heads;
    c->turned = c->turned == c->head_size ? 0 : c->turned;
    c->full_every = c->window ? c->full_every : 0;
    if (c->head_size < 1 || c->heads % c->kv_heads != 0 || c->turned > c->head_size) {
        return weight_fail(
            error, "%lld heads of %lld elements, %lld of them turned, for %lld of keys and values",
            (long long)c->heads, (long long)c->head_size, (long long)c->turned,
            (long long)c->kv_heads);
    }
    return c->vocabulary > 0 ? true
                             : weight_fail(error, "it does not say how many tokens there are");
}

// ---- from GGUF ----------------------------------------------------------------------------------

/* The factors that convert_hf_to_gguf.py writes for Llama 3.1 and later; see nn_rotary_scaling. */
GGUF_API double weights_llama3_factor(const nn_rotary_scaling *s, double theta, int64_t pair,
                                      int64_t size) {
    const double length = 6.283185307179586 * pow(theta, 2.0 * (double)pair / (double)size);
    const double turns = (double)s->original / length;
    const double share = (turns - (double)s->low) / ((double)s->high - (double)s->low);
    return turns > (double)s->high  ? 1.0
           : turns < (double)s->low ? (double)s->factor
                                    : 1.0 / ((1.0 - share) / (double)s->factor + share);
}

/* Finds the scaling of which a file has the factors alone. */
GGUF_API bool weights_read_factors(weight_file *f, nn_llama_config *c) {
    const weight_entry *e = weight_find(f, "rope_freqs.weight");
    const nn_rotary_scaling scaling = {NN_ROTARY_LLAMA3, 1.0f, 1.0f, 4.0f, 8192};
    const int64_t size = c->turned ? c->turned : c->head_size;
    float factors[128];
    if (!e) {
        return true;
    }
    if (e->count < 1 || e->count > 128 || e->count != size / 2) {
        return weight_fail(f->error, "%s has %lld elements: %lld pairs are turned", e->name,
                           (long long)e->count, (long long)(size / 2));
    }
    if (!weight_decode(f, e, 0, e->count, factors)) {
        return false;
    }
    c->scaling = scaling;
    c->scaling.factor = factors[e->count - 1];
    for (int64_t i = 0; i < e->count; i++) {
        const double wanted = weights_llama3_factor(&c->scaling, (double)c->theta, i, size);
        if (!(fabs((double)factors[i] - wanted) <= 1e-3 * wanted)) {
            return weight_fail(f->error,
                               "%s is no scaling of Llama 3: factor %lld is %g instead of %g",
                               e->name, (long long)i, (double)factors[i], wanted);
        }
    }
    return true;
}

GGUF_API const gguf_value *weights_find_key(const weight_file *f, const weights_model *m,
                                            const char *key) {
    char name[128];
    snprintf(name, sizeof name, "%s.%s", m->gguf, key);
    return gguf_find(f, name);
}

GGUF_API bool weights_read_scaling(weight_file *f, const weights_model *m, nn_llama_config *c) {
    const gguf_text type = gguf_text_of(weights_find_key(f, m, "rope.scaling.type"));
    const double factor = gguf_number_at(weights_find_key(f, m, "rope.scaling.factor"), 0);
    if (gguf_equals(type, "linear") && factor > 0.0) {
        c->scaling.kind = NN_ROTARY_LINEAR;
        c->scaling.factor = (float)factor;
    } else if (type.length > 0 && !gguf_equals(type, "none")) {
        return weight_fail(f->error,
                           "rotary positions are scaled as %.*s, which nn_llama does not do",
                           (int)(type.length < 32 ? type.length : 32), type.data);
    }
    return weights_read_factors(f, c);
}

/* The largest models of Gemma scale scores by the channels of a head
   (llama.cpp tells them by their layers). */
GGUF_API void weights_settle_gemma(const weights_model *m, nn_llama_config *c) {
    const int64_t largest = (m->flags & WEIGHTS_IS_GEMMA3) != 0 ? 62 : 46;
    if ((m->flags & WEIGHTS_IS_GEMMA) != 0) {
        c->query_scale = c->layers == largest ? (float)(c->channels / c->heads) : 0.0f;
    }
}

GGUF_API bool weights_config_of_gguf(weight_file *f, nn_llama_config *c) {
    const gguf_text name = gguf_text_of(gguf_find(f, "general.architecture"));
    const weights_model *m = NULL;
    for (int i = 0; i < WEIGHTS_MODELS; i++) {
        const char *gguf = weights_models[i].gguf;
        m = gguf && gguf_equals(name, gguf) ? &weights_models[i] : m;
    }
    if (!m) {
        return weight_fail(
            f->error, "its architecture is %.*s: there are llama, qwen2, qwen3, gemma2 and gemma3",
            (int)(name.length < 64 ? name.length : 64), name.data);
    }
    weights_start_config(m, c);
    for (int i = 0; i < WEIGHTS_SETTINGS; i++) {
        const weights_key *key = &weights_keys[i];
        const gguf_value *v = key->gguf ? weights_find_key(f, m, key->gguf) : NULL;
        if (v ? !gguf_is_number(v) : key->gguf && key->is_needed) {
            return weight_fail(f->error, "%s.%s is %s", m->gguf, key->gguf,
                               v ? "no number" : "missing");
        }
        if (v && !weights_set(f->error, c, key, gguf_number_at(v, 0))) {
            return false;
        }
    }
    const weight_entry *tokens = weight_find(f, "token_embd.weight");
    c->vocabulary = tokens && tokens->rank == 2 ? tokens->dim[0] : c->vocabulary;
    c->tied = !weight_find(f, "output.weight");
    weights_settle_gemma(m, c);
    return weights_end_config(f->error, c) && weights_read_scaling(f, m, c);
}

// ---- from config.json ---------------------------------------------------------------------------

/* The config.json beside a file, or in a folder. */
GGUF_API bool weights_config_beside(weight_file *f, const char *path, nn_llama_config *c) {
    char beside[SAFETENSORS_PATH];
    model_config found;
    memset(&found, 0, sizeof found);
    weight_path_beside(path, "config.json", beside);
    if (!model_config_read(beside, NULL, &found, f->error)) {
        return false;
    }
    if (found.family != MODEL_LLAMA || found.untrained[0]) {
        return weight_fail(f->error, "%.300s: nn_llama does not compute %s%s", beside,
                           found.untrained[0] ? found.untrained : "models of the family ",
                           found.untrained[0] ? "" : model_family_names[found.family]);
    }
    weights_keep_run(&found.llama, c);
    *c = found.llama;
    return weights_end_config(f->error, c);
}

/* The settings of the model in a file that was opened at this path. f->error says why it cannot. */
GGUF_API bool weights_config(weight_file *f, const char *path, nn_llama_config *c) {
    return f->value_count > 0 ? weights_config_of_gguf(f, c) : weights_config_beside(f, path, c);
}

// ---- the tokens at both ends of a text ----------------------------------------------------------

static const struct {
    const char *json, *gguf;
} weights_end_keys[WEIGHTS_ENDS] = {
    {"bos_token_id", "tokenizer.ggml.bos_token_id"},
    {"eos_token_id", "tokenizer.ggml.eos_token_id"},
};

#ifdef MODEL_SHAPE_CJSON

/* null, a token, or several of which each is one. */
GGUF_API bool weights_is_end(const cJSON *item) {
    bool is_end = cJSON_IsArray(item) || cJSON_IsNumber(item) || cJSON_IsNull(item);
    for (const cJSON *i = cJSON_IsArray(item) ? item->child : NULL; i && is_end; i = i->next) {
        is_end = cJSON_IsNumber(i);
    }
    return is_end;
}

GGUF_API bool weights_ends_beside(weight_file *f, const char *path, weights_output *out) {
    char beside[SAFETENSORS_PATH];
    weight_bytes text;
    memset(&text, 0, sizeof text);
    weight_path_beside(path, "config.json", beside);
    const bool is_read = weight_slurp(f, beside, &text);
    cJSON *json =
        is_read ? cJSON_ParseWithLength((const char *)text.data, (size_t)text.size) : NULL;
    const char *wrong = NULL;
    for (int i = 0; i < WEIGHTS_ENDS; i++) {
        const char *key = weights_end_keys[i].json;
        cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
        if (item && !(weights_is_end(item) &&
                      cJSON_PrintPreallocated(item, out->ends[i], WEIGHTS_END_TEXT, false))) {
            wrong = key;
        }
    }
    cJSON_Delete(json);
    free(text.data);
    return wrong ? weight_fail(f->error, "%.300s: %s is no token", beside, wrong) : is_read;
}

#else

GGUF_API bool weights_ends_beside(weight_file *f, const char *path, weights_output *out) {
    (void)out;
    return safetensors_refuse(f->error, path);
}

#endif

/* Which tokens begin and end a text, of a file whose settings weights_config has read: for the config.json
   that is to be written. What a GGUF file does not have is null there, for transformers has tokens of its
   own for what is left out. f->error says why it cannot. */
GGUF_API bool weights_read_ends(weight_file *f, const char *path, weights_output *out) {
    if (f->value_count == 0) {
        return weights_ends_beside(f, path, out);
    }
    for (int i = 0; i < WEIGHTS_ENDS; i++) {
        const gguf_value *v = gguf_find(f, weights_end_keys[i].gguf);
        const double id = gguf_is_number(v) ? gguf_number_at(v, 0) : -1.0;
        if (id >= 0.0 && id <= (double)INT32_MAX) {
            snprintf(out->ends[i], WEIGHTS_END_TEXT, "%ld", (long)id);
        } else {
            snprintf(out->ends[i], WEIGHTS_END_TEXT, "null");
        }
    }
    return true;
}

// ---- to config.json -----------------------------------------------------------------------------

#ifdef MODEL_SHAPE_CJSON

/* Which of the models such settings are. */
GGUF_API const weights_model *weights_model_of(const nn_llama_config *c, weights_family family) {
    const char *type = family == WEIGHTS_PHI3 ? "phi3"
                       : c->post_norms        ? (c->qk_norm ? "gemma3_text" : "gemma2")
                       : c->qk_norm           ? "qwen3"
                       : c->qkv_bias          ? "qwen2"
                       : c->window            ? "mistral"
                                              : "llama";
    const weights_model *m = weights_models;
    while (strcmp(m->type, type) != 0) {
        m++;
    }
    return m;
}

GGUF_API void weights_json_add_real(cJSON *json, const char *name, double value) {
    char text[40];
    snprintf(text, sizeof text, "%.9g", value);
    if (!strpbrk(text, ".e")) {
        snprintf(text + strlen(text), 4, ".0");
    }
    cJSON_AddRawToObject(json, name, text);
}

/* null for what there is none of, if it has a default. */
GGUF_API void weights_json_add(cJSON *json, const nn_llama_config *c, const weights_key *key,
                               bool has_defaults) {
    const double value = weights_get(c, key);
    if (!key->json || (value <= 0.0 && !has_defaults && !key->is_needed)) {
        return;
    }
    if (value <= 0.0 && !key->is_needed) {
        cJSON_AddNullToObject(json, key->json);
    } else if (key->type == WEIGHTS_REAL) {
        weights_json_add_real(json, key->json, value);
    } else {
        cJSON_AddNumberToObject(json, key->json, value);
    }
}

GGUF_API void weights_json_add_scaling(cJSON *json, const nn_rotary_scaling *s) {
    if (s->kind == NN_ROTARY_PLAIN) {
        return;
    }
    cJSON *rope = cJSON_AddObjectToObject(json, "rope_scaling");
    cJSON_AddStringToObject(rope, "rope_type", s->kind == NN_ROTARY_LINEAR ? "linear" : "llama3");
    weights_json_add_real(rope, "factor", weights_decimal(s->factor));
    if (s->kind == NN_ROTARY_LLAMA3) {
        weights_json_add_real(rope, "low_freq_factor", weights_decimal(s->low));
        weights_json_add_real(rope, "high_freq_factor", weights_decimal(s->high));
        cJSON_AddNumberToObject(rope, "original_max_position_embeddings", (double)s->original);
    }
}

/* What other models than Llama have besides. */
GGUF_API void weights_json_add_kind(cJSON *json, const nn_llama_config *c, const weights_model *m) {
    const bool is_gemma = (m->flags & WEIGHTS_IS_GEMMA) != 0;
    const char *act = is_gemma ? "hidden_activation" : "hidden_act";
    cJSON_AddStringToObject(json, act, c->gelu ? "gelu_pytorch_tanh" : "silu");
    if ((m->flags & WEIGHTS_WINDOW_ASKED) != 0) {
        cJSON_AddBoolToObject(json, "use_sliding_window", c->window > 0);
        cJSON_AddNumberToObject(json, "max_window_layers", 0.0);
    }
    if (is_gemma && c->query_scale <= 0.0f) {
        cJSON_AddNumberToObject(json, "query_pre_attn_scalar", (double)c->head_size);
    }
    if ((m->flags & WEIGHTS_IS_GEMMA3) != 0) {
        cJSON_AddNumberToObject(json, "sliding_window_pattern", (double)c->full_every);
    }
    if (c->turned > 0) {
        weights_json_add_real(json, "partial_rotary_factor",
                              (double)c->turned / (double)c->head_size);
    }
    if (m->family == WEIGHTS_PHI3) {
        cJSON_AddNullToObject(json, "pad_token_id"); // else it may be beyond the tokens
    }
}

/* Which layers have a window, where not all of them do. */
GGUF_API void weights_json_add_layers(cJSON *json, const nn_llama_config *c) {
    const bool differ = c->full_every > 0 && c->full_every <= c->layers;
    cJSON *types = differ ? cJSON_AddArrayToObject(json, "layer_types") : NULL;
    for (int64_t i = 1; i <= c->layers && types; i++) {
        cJSON_AddItemToArray(
            types,
            cJSON_CreateString(i % c->full_every == 0 ? "full_attention" : "sliding_attention"));
    }
}

/* Whether a model has all that the settings ask for: what it does not know, transformers would leave
   out without a word. */
GGUF_API bool weights_has_all(const weights_model *m, const nn_llama_config *c) {
    const bool is_gemma = (m->flags & WEIGHTS_IS_GEMMA) != 0;
    const bool is_gemma3 = (m->flags & WEIGHTS_IS_GEMMA3) != 0;
    const bool has_layers = is_gemma || (m->flags & WEIGHTS_WINDOW_ASKED) != 0;
    nn_llama_config usual;
    memset(&usual, 0, sizeof usual);
    weights_start_config(m, &usual);
    return c->qkv_bias == usual.qkv_bias && c->qk_norm == usual.qk_norm &&
           c->post_norms == usual.post_norms && c->offset_norms == usual.offset_norms &&
           c->scaled_tokens == usual.scaled_tokens && (has_layers || c->full_every == 0) &&
           (is_gemma3 || c->local_theta <= 0.0f) &&
           (is_gemma ||
            (c->attention_cap <= 0.0f && c->logit_cap <= 0.0f && c->query_scale <= 0.0f));
}

/* Writes the config.json of what weights_write has written. Errors are in out->error. */
GGUF_API bool weights_write_config(weights_output *out, const char *path,
                                   const nn_llama_config *config, weights_family family) {
    nn_llama_config c = nn_llama_filled(config);
    if (!weights_end_config(out->error, &c)) {
        return false;
    }
    const weights_model *m = weights_model_of(&c, family);
    if (!weights_has_all(m, &c)) {
        return weight_fail(out->error, "no model of transformers has these settings: %s lacks some",
                           m->type);
    }
    cJSON *json = cJSON_CreateObject();
    cJSON_AddItemToArray(cJSON_AddArrayToObject(json, "architectures"),
                         cJSON_CreateString(m->architecture));
    cJSON_AddStringToObject(json, "model_type", m->type);
    for (int i = 0; i < WEIGHTS_SETTINGS; i++) {
        weights_json_add(json, &c, &weights_keys[i], (m->flags & WEIGHTS_IS_GEMMA) != 0);
    }
    for (int i = 0; i < WEIGHTS_ENDS; i++) {
        if (out->ends[i][0]) {
            cJSON_AddRawToObject(json, weights_end_keys[i].json, out->ends[i]);
        }
    }
    cJSON_AddBoolToObject(json, "tie_word_embeddings", c.tied);
    cJSON_AddStringToObject(json, "torch_dtype",
                            strcmp(out->type, "F32") == 0   ? "float32"
                            : strcmp(out->type, "F16") == 0 ? "float16"
                                                            : "bfloat16");
    weights_json_add_scaling(json, &c.scaling);
    weights_json_add_kind(json, &c, m);
    weights_json_add_layers(json, &c);
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    const bool is_written = text ? weights_write_bytes(out->error, path, text, strlen(text))
                                 : weight_fail(out->error, "no memory");
    cJSON_free(text);
    return is_written;
}

#else

GGUF_API bool weights_write_config(weights_output *out, const char *path,
                                   const nn_llama_config *config, weights_family family) {
    (void)config, (void)family;
    return safetensors_refuse(out->error, path);
}

#endif

// ---- a folder -----------------------------------------------------------------------------------

/* Sets out->type by a name in lower case: f32, bf16 or f16. An error if weights cannot be written. */
GGUF_API bool weights_choose_type(weights_output *out, const char *name) {
    static const char *const types[][2] = {{"f32", "F32"}, {"bf16", "BF16"}, {"f16", "F16"}};
    for (int i = 0; i < 3; i++) {
        if (strcmp(types[i][0], name) == 0) {
            out->type = types[i][1];
#ifdef MODEL_SHAPE_CJSON
            return true;
#else
            return safetensors_refuse(out->error, name);
#endif
        }
    }
    return weight_fail(out->error, "there are f32, bf16 and f16, not %s", name);
}

/* Whether weights_write_folder could make or use this folder, for before a run that takes long. */
GGUF_API bool weights_check_folder(weights_output *out, const char *folder) {
#ifdef GGUF_MMAP
    const bool is_made = mkdir(folder, 0777) == 0, is_there = !is_made && errno == EEXIST;
    if (is_there && !weight_is_folder(folder)) {
        return weight_fail(out->error, "it is a file, not a folder");
    }
    if (is_made ? rmdir(folder) != 0 : !is_there || access(folder, W_OK | X_OK) != 0) {
        return weight_fail(out->error, "cannot write to this folder: %s", strerror(errno));
    }
#endif
    (void)out, (void)folder;
    return true;
}

/* Writes model.safetensors and config.json to a folder, which is made where it is not there and its
   parent is: names are those of transformers, also of what came from a GGUF file. Without a folder,
   params are read and nothing is written. out->path is not used. */
GGUF_API bool weights_write_folder(ms_model *model, const nn_net *net, const weights_layout *l,
                                   const nn_llama_config *c, const char *folder,
                                   weights_output *out) {
    char path[SAFETENSORS_PATH];
    weights_layout layout = *l;
    layout.family = l->family == WEIGHTS_GGUF_GEMMA   ? WEIGHTS_GEMMA
                    : l->family >= WEIGHTS_GGUF_LLAMA ? WEIGHTS_LLAMA
                                                      : l->family;
    out->path = NULL;
    if (!folder) {
        return weights_write(model, net, &layout, out);
    }
#ifdef GGUF_MMAP
    if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
        return weight_fail(out->error, "cannot make %s: %s", folder, strerror(errno));
    }
#endif
    if (strlen(folder) + 32 > sizeof path) {
        return weight_fail(out->error, "the name of the folder is too long");
    }
    out->path = path;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    const bool is_written = weights_write(model, net, &layout, out);
    out->path = NULL;
    snprintf(path, sizeof path, "%s/config.json", folder);
    nn_llama_config own = *c;
    own.positions = c->positions > 0 ? c->positions : c->sequence;
    return is_written && weights_write_config(out, path, &own, layout.family);
}

#endif // MEMSCALE_WEIGHTS_CONFIG_H
