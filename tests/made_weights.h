/*  made_weights.h - small files of published weights, made in memory. After memscale.h, nn.h
    and weights_config.h. */
#ifndef MADE_WEIGHTS_H
#define MADE_WEIGHTS_H

#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define MADE_API static __attribute__((unused))
#else
#define MADE_API static
#endif

// ------------------------------------------------------------------------------------------------
// bytes

typedef struct made {
    uint8_t *data;
    size_t size, capacity;
} made;

MADE_API void made_add(made *m, const void *data, size_t size) {
    if (m->size + size > m->capacity) {
        m->capacity = 2 * (m->size + size);
        m->data = (uint8_t *)realloc(m->data, m->capacity);
        if (!m->data) {
            abort();
        }
    }
    if (size > 0) {
        memcpy(m->data + m->size, data, size);
        m->size += size;
    }
}

MADE_API void made_number(made *m, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) {
        const uint8_t byte = (uint8_t)(value >> (8 * i));
        made_add(m, &byte, 1);
    }
}

MADE_API void made_text(made *m, const char *text) {
    made_number(m, strlen(text), 8);
    made_add(m, text, strlen(text));
}

MADE_API void made_pad(made *m, size_t alignment) {
    while (m->size % alignment != 0) {
        made_add(m, "", 1);
    }
}

MADE_API weight_bytes made_bytes(const made *m) {
    weight_bytes bytes;
    memset(&bytes, 0, sizeof bytes);
    bytes.data = m->data;
    bytes.size = m->size;
    return bytes;
}

// ------------------------------------------------------------------------------------------------
// GGUF

typedef struct made_gguf {
    made values, tensors, data;
    uint64_t value_count, tensor_count;
} made_gguf;

MADE_API void made_key(made_gguf *g, const char *key, gguf_type type) {
    made_text(&g->values, key);
    made_number(&g->values, (uint64_t)type, 4);
    g->value_count++;
}

MADE_API void made_u32(made_gguf *g, const char *key, uint32_t value) {
    made_key(g, key, GGUF_U32);
    made_number(&g->values, value, 4);
}

MADE_API void made_f32(made_gguf *g, const char *key, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    made_key(g, key, GGUF_F32);
    made_number(&g->values, bits, 4);
}

MADE_API void made_string(made_gguf *g, const char *key, const char *text) {
    made_key(g, key, GGUF_STRING);
    made_text(&g->values, text);
}

MADE_API void made_strings(made_gguf *g, const char *key, const char *const *texts,
                           uint64_t count) {
    made_key(g, key, GGUF_ARRAY);
    made_number(&g->values, (uint64_t)GGUF_STRING, 4);
    made_number(&g->values, count, 8);
    for (uint64_t i = 0; i < count; i++) {
        made_text(&g->values, texts[i]);
    }
}

MADE_API void made_i32s(made_gguf *g, const char *key, const int32_t *values, uint64_t count) {
    made_key(g, key, GGUF_ARRAY);
    made_number(&g->values, (uint64_t)GGUF_I32, 4);
    made_number(&g->values, count, 8);
    for (uint64_t i = 0; i < count; i++) {
        made_number(&g->values, (uint32_t)values[i], 4);
    }
}

/* Dims as in C. */
MADE_API void made_tensor(made_gguf *g, const char *name, uint32_t type, int rank,
                          const int64_t *dim, const void *data, size_t bytes) {
    made_pad(&g->data, GGUF_ALIGNMENT);
    made_text(&g->tensors, name);
    made_number(&g->tensors, (uint64_t)rank, 4);
    for (int i = rank; i > 0; i--) {
        made_number(&g->tensors, (uint64_t)dim[i - 1], 8);
    }
    made_number(&g->tensors, type, 4);
    made_number(&g->tensors, g->data.size, 8);
    made_add(&g->data, data, bytes);
    g->tensor_count++;
}

/* The file; g is empty again. */
MADE_API made made_gguf_file(made_gguf *g) {
    made file;
    memset(&file, 0, sizeof file);
    made_add(&file, "GGUF", 4);
    made_number(&file, 3, 4);
    made_number(&file, g->tensor_count, 8);
    made_number(&file, g->value_count, 8);
    made_add(&file, g->values.data, g->values.size);
    made_add(&file, g->tensors.data, g->tensors.size);
    made_pad(&file, GGUF_ALIGNMENT);
    made_add(&file, g->data.data, g->data.size);
    free(g->values.data);
    free(g->tensors.data);
    free(g->data.data);
    memset(g, 0, sizeof *g);
    return file;
}

// ------------------------------------------------------------------------------------------------
// safetensors

MADE_API made made_safetensors(const char *header, const void *data, size_t bytes) {
    made file;
    memset(&file, 0, sizeof file);
    made_text(&file, header);
    made_add(&file, data, bytes);
    return file;
}

// ------------------------------------------------------------------------------------------------
// a small model as a GGUF file

MADE_API nn_llama_config made_llama_config(void) {
    nn_llama_config c;
    memset(&c, 0, sizeof c);
    c.vocabulary = 7;
    c.layers = 2;
    c.channels = 32;
    c.feed_forward = 64;
    c.heads = 4;
    c.kv_heads = 2;
    c.head_size = 8;
    c.epsilon = 1e-5f;
    c.theta = 10000.0f;
    c.batch = 1;
    c.sequence = 4;
    return c;
}

MADE_API void made_settings(made_gguf *g, const char *architecture, const nn_llama_config *c) {
    const struct {
        const char *key;
        int64_t value;
    } counts[] = {
        {"block_count", c->layers},
        {"embedding_length", c->channels},
        {"feed_forward_length", c->feed_forward},
        {"attention.head_count", c->heads},
        {"attention.head_count_kv", c->kv_heads},
        {"attention.key_length", c->head_size},
        {"attention.sliding_window", c->window},
    };
    char key[64];
    made_string(g, "general.architecture", architecture);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        snprintf(key, sizeof key, "%s.%s", architecture, counts[i].key);
        if (counts[i].value > 0) {
            made_u32(g, key, (uint32_t)counts[i].value);
        }
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", architecture);
    made_f32(g, key, c->epsilon);
    snprintf(key, sizeof key, "%s.rope.freq_base", architecture);
    made_f32(g, key, c->theta);
}

/* Element i of a tensor that is the n-th of its file. */
MADE_API float made_value(int64_t n, int64_t i) {
    return (float)(n * 1000 + i) * 0.25f - 100.0f;
}

/* The blocks of all matrices that are made from now on; NONE: float32. */
static blocks_kind made_kind;

MADE_API void made_floats(made_gguf *g, const char *name, int64_t rows, int64_t columns) {
    const int64_t dim[2] = {rows, columns}, count = rows * (columns > 0 ? columns : 1);
    float *values = (float *)malloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count && values; i++) {
        values[i] = made_value((int64_t)g->tensor_count, i);
    }
    const blocks_kind kind = columns > 0 ? made_kind : BLOCKS_NONE;
    const int64_t bytes = blocks_row_bytes(kind, count);
    uint8_t *blocks = (uint8_t *)malloc((size_t)bytes);
    if (values && blocks) {
        blocks_encode(kind, values, count, blocks);
    }
    const uint32_t type = kind == BLOCKS_Q8_0 ? 8 : kind == BLOCKS_Q4_1 ? 3 : 0;
    made_tensor(g, name, type, columns > 0 ? 2 : 1, dim, blocks, (size_t)bytes);
    free(blocks);
    free(values);
}

typedef struct made_row {
    const char *name;
    int64_t rows, columns;
} made_row;

/* The tensors of a model in GGUF's names, float32. */
MADE_API void made_gguf_tensors(made_gguf *g, const nn_llama_config *c) {
    const int64_t width = c->heads * c->head_size, keys = c->kv_heads * c->head_size;
    const made_row rows[] = {
        {"attn_norm.weight", c->channels, 0},
        {"attn_q.weight", width, c->channels},
        {"attn_k.weight", keys, c->channels},
        {"attn_v.weight", keys, c->channels},
        {"attn_output.weight", c->channels, width},
        {"ffn_norm.weight", c->channels, 0},
        {"ffn_gate.weight", c->feed_forward, c->channels},
        {"ffn_up.weight", c->feed_forward, c->channels},
        {"ffn_down.weight", c->channels, c->feed_forward},
        {"attn_q.bias", c->qkv_bias ? width : 0, 0},
        {"attn_k.bias", c->qkv_bias ? keys : 0, 0},
        {"attn_v.bias", c->qkv_bias ? keys : 0, 0},
        {"attn_q_norm.weight", c->qk_norm ? c->head_size : 0, 0},
        {"attn_k_norm.weight", c->qk_norm ? c->head_size : 0, 0},
        {"post_attention_norm.weight", c->post_norms ? c->channels : 0, 0},
        {"post_ffw_norm.weight", c->post_norms ? c->channels : 0, 0},
    };
    char name[64];
    made_floats(g, "token_embd.weight", c->vocabulary, c->channels);
    for (int64_t block = 0; block < c->layers; block++) {
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            snprintf(name, sizeof name, "blk.%lld.%s", (long long)block, rows[i].name);
            if (rows[i].rows > 0) {
                made_floats(g, name, rows[i].rows, rows[i].columns);
            }
        }
    }
    made_floats(g, "output_norm.weight", c->channels, 0);
    if (!c->tied) {
        made_floats(g, "output.weight", c->vocabulary, c->channels);
    }
}

/* A tokenizer of all printable characters, the newline, and some merges. */
MADE_API void made_tokenizer(made_gguf *g, const char *pre) {
    static const char *const more[] = {
        "\xc4\x8a", "\xc4\xa0",         "he",        "ll",      "hell",
        "hello",    "\xc4\xa0\xc4\xa0", "\xc4\xa0h", "<|end|>", "<added>"};
    static const char *const merges[] = {"h e",       "l l", "he ll", "hell o", "\xc4\xa0 \xc4\xa0",
                                         "\xc4\xa0 h"};
    enum { PRINTABLE = 94, MORE = 10 };
    char letters[PRINTABLE][2];
    const char *texts[PRINTABLE + MORE];
    int32_t types[PRINTABLE + MORE];
    for (int i = 0; i < PRINTABLE + MORE; i++) {
        if (i < PRINTABLE) {
            letters[i][0] = (char)(33 + i);
            letters[i][1] = 0;
        }
        texts[i] = i < PRINTABLE ? letters[i] : more[i - PRINTABLE];
        types[i] = i == PRINTABLE + 8 ? 3 : i == PRINTABLE + 9 ? 4 : 1;
    }
    made_string(g, "tokenizer.ggml.model", "gpt2");
    made_string(g, "tokenizer.ggml.pre", pre);
    made_strings(g, "tokenizer.ggml.tokens", texts, PRINTABLE + MORE);
    made_i32s(g, "tokenizer.ggml.token_type", types, PRINTABLE + MORE);
    made_strings(g, "tokenizer.ggml.merges", merges, sizeof merges / sizeof merges[0]);
    made_u32(g, "tokenizer.ggml.eos_token_id", PRINTABLE + 8);
}

#endif // MADE_WEIGHTS_H
