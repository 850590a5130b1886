/*  fuzz_load.c - files, decoded from bytes, that ms_load reads into a small model: two params, one
    of them with its state in 8 bits, a buffer, and memory of the trainer. A file that is refused
    must leave the model as it was, no allocation may be larger than the file gives reason for, and
    what was loaded can be saved and loaded again with the same bits. A sanitizer looks at the rest.

    With clang's fuzzer (make fuzz-load) this is LLVMFuzzerTestOneInput; without FUZZ_LIBRARY, a
    program that runs the files it is given, and with --seeds FOLDER writes inputs to begin with. */
#include "private.h"

#include "fuzz_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ------------------------------------------------------------------------------------------------
// an input: three bytes that say how, then the file

enum {
    HOW_WRITTEN = 1,   // the model has values and has trained
    HOW_VALUES = 2,    // ms_load_options.values_only
    HOW_PARTIAL = 4,   // .partial
    HOW_NONFINITE = 8, // .nonfinite
    HOW_LOCATED = 16,  // .locate, for the transpose of a matrix, or to leave a tensor
    HOW_FRAMED = 32,   // the length of the header is left out: a byte of 0 ends the header
    HOW_MENDED = 64,   // the checksums are made right
    HOW_LEFT = 128     // of HOW_LOCATED: no transpose; one tensor is left as it is
};

enum {
    SEED_BYTES = 3,
    LARGEST_FILE = 1 << 20,
    ROWS = 8,
    COLUMNS = 33,
    WIDE = ROWS * COLUMNS,
    NARROW = 5,
    COUNTERS = 3,
    EXTRA = 24,
    SLACK = 64 << 10 // that an allocation may be larger than the file
};

typedef struct bytes {
    uint8_t *data;
    size_t size, capacity;
} bytes;

static void append(bytes *b, const void *data, size_t size) {
    if (b->size + size > b->capacity) {
        b->capacity = 2 * (b->size + size);
        b->data = (uint8_t *)realloc(b->data, b->capacity);
        CHECK(b->data != NULL);
    }
    if (size > 0) {
        memcpy(b->data + b->size, data, size);
        b->size += size;
    }
}

// ------------------------------------------------------------------------------------------------
// host memory, which may fail

typedef struct host_memory {
    uint64_t blocks, most; // the largest block that is expected
    uint64_t fails_in;     // 0: never
    bool has_failed;
} host_memory;

static void *host_alloc(uint64_t size, void *user) {
    host_memory *h = (host_memory *)user;
    CHECK(size <= h->most);
    if (h->fails_in > 0 && --h->fails_in == 0) {
        h->has_failed = true;
        return NULL;
    }
    void *memory = malloc((size_t)size);
    CHECK(memory != NULL);
    memset(memory, 0xa5, (size_t)size);
    h->blocks += 1;
    return memory;
}

static void host_release(void *memory, uint64_t size, void *user) {
    (void)size;
    ((host_memory *)user)->blocks -= memory != NULL;
    free(memory);
}

// ------------------------------------------------------------------------------------------------
// the model: every element of the output is x times the sums of the params

typedef struct small {
    host_memory host;
    ms_model *model;
    ms_tensor x, wide, narrow, counters;
    uint8_t extra[EXTRA];
} small;

static int forward(const ms_call *call) {
    const float *x = (const float *)call->in[0].data;
    const float *w = (const float *)call->param[0].data, *b = (const float *)call->param[1].data;
    float sum = 0.0f;
    for (int i = 0; i < WIDE; ++i) {
        sum += w[i] * (float)(i % 7 - 3);
    }
    for (int i = 0; i < NARROW; ++i) {
        sum += b[i] * (float)(i - 1);
    }
    for (int i = 0; i < 4; ++i) {
        ((float *)call->out[0].data)[i] = x[i] * sum;
    }
    if (call->phase == MS_PHASE_FORWARD) {
        int32_t *counters = (int32_t *)call->state[0].data;
        counters[0] = (int32_t)((uint32_t)counters[0] + 1u);
    }
    return 0;
}

static int backward(const ms_call *call) {
    const float *x = (const float *)call->in[0].data, *g = (const float *)call->grad_out[0].data;
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) {
        sum += x[i] * g[i];
    }
    for (int k = 0; k < 2; ++k) {
        const ms_view *grad = &call->grad_param[k];
        float *to = (float *)grad->data;
        for (int i = 0; to != NULL && i < (k == 0 ? WIDE : NARROW); ++i) {
            const float old = grad->beta == 0.0f ? 0.0f : to[i];
            to[i] = old + sum * (float)(k == 0 ? i % 7 - 3 : i - 1);
        }
    }
    return 0;
}

static void make(small *s) {
    ms_config config;
    ms_layer_desc layer;
    ms_optimizer_desc adam;
    memset(s, 0, sizeof *s);
    memset(&config, 0, sizeof config);
    memset(&layer, 0, sizeof layer);
    s->host.most = UINT64_MAX;
    config.allocator.alloc = host_alloc;
    config.allocator.release = host_release;
    config.allocator.user = &s->host;
    config.memory_budget_bytes = 1 << 20;
    config.seed = 7;
    CHECK(ms_create(&config, &s->model) == MS_RESULT_OK);
    ms_model *m = s->model;
    s->x = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(4));
    s->wide = ms_param(m, "wide", MS_DTYPE_F32, ms_shape2(ROWS, COLUMNS));
    s->narrow = ms_param(m, "na\"r\\row", MS_DTYPE_F32, ms_shape1(NARROW));
    s->counters = ms_buffer(m, "z\xc3\xa4hler", MS_DTYPE_I32, ms_shape1(COUNTERS));
    layer.forward = forward;
    layer.backward = backward;
    layer.in[0] = s->x;
    layer.param[0] = s->wide;
    layer.param[1] = s->narrow;
    layer.state[0] = s->counters;
    layer.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape1(4));
    ms_register_layer(m, &layer);
    ms_set_loss(m, layer.out[0]);
    adam = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
    ms_set_optimizer(m, &adam);
    ms_set_tensor_technique(m, s->wide, MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_ON);
    CHECK(ms_save_extra(m, "position", s->extra, sizeof s->extra) == MS_RESULT_OK);
    CHECK(ms_wrap(m) == MS_RESULT_OK);
    const float x[4] = {0.5f, -0.25f, 1.0f, 0.125f};
    CHECK(ms_write(m, s->x, x) == MS_RESULT_OK);
}

static void train(small *s) {
    float wide[WIDE], narrow[NARROW];
    const int32_t counters[COUNTERS] = {5, -6, 7};
    for (int i = 0; i < WIDE; ++i) {
        wide[i] = 0.01f * (float)(i % 13 - 6);
    }
    for (int i = 0; i < NARROW; ++i) {
        narrow[i] = 0.1f * (float)i;
    }
    for (int i = 0; i < EXTRA; ++i) {
        s->extra[i] = (uint8_t)(3 * i);
    }
    CHECK(ms_write(s->model, s->wide, wide) == MS_RESULT_OK);
    CHECK(ms_write(s->model, s->narrow, narrow) == MS_RESULT_OK);
    CHECK(ms_write(s->model, s->counters, counters) == MS_RESULT_OK);
    CHECK(ms_step(s->model, NULL) == MS_RESULT_OK && ms_step(s->model, NULL) == MS_RESULT_OK);
}

static void end(small *s) {
    ms_destroy(s->model);
    CHECK(s->host.blocks == 0);
}

/* All that a load may change. */
typedef struct values {
    uint8_t wide[4 * WIDE], narrow[4 * NARROW], counters[4 * COUNTERS], extra[EXTRA];
    uint8_t states[4][4 * WIDE];
    uint64_t steps, updates[2];
    ms_result result[2]; // of reading the params
} values;

static void look(small *s, values *v) {
    memset(v, 0, sizeof *v);
    v->result[0] = ms_read(s->model, s->wide, v->wide);
    v->result[1] = ms_read(s->model, s->narrow, v->narrow);
    CHECK(ms_read(s->model, s->counters, v->counters) == MS_RESULT_OK);
    for (int k = 0; k < 4; ++k) {
        const ms_tensor t = ms_optimizer_state(s->model, k < 2 ? s->wide : s->narrow, k % 2);
        CHECK(ms_tensor_bytes(s->model, t) <= sizeof v->states[k]);
        CHECK(ms_read(s->model, t, v->states[k]) == MS_RESULT_OK);
    }
    memcpy(v->extra, s->extra, EXTRA);
    v->steps = s->model->run.step;
    v->updates[0] = ms_update_count(s->model, s->wide);
    v->updates[1] = ms_update_count(s->model, s->narrow);
}

// ------------------------------------------------------------------------------------------------
// files

typedef struct memory_file {
    const uint8_t *data;
    size_t size;
    uint64_t fails_in; // 0: never
    bool has_failed;
} memory_file;

static int read_memory(void *user, uint64_t offset, void *data, size_t size) {
    memory_file *f = (memory_file *)user;
    CHECK(offset <= f->size && size <= f->size - offset && size > 0);
    if (f->fails_in > 0 && --f->fails_in == 0) {
        memset(data, 0xee, size / 2);
        f->has_failed = true;
        return 1;
    }
    memcpy(data, f->data + offset, size);
    return 0;
}

static int write_memory(void *user, const void *data, size_t size) {
    append((bytes *)user, data, size);
    return 0;
}

static bytes save(small *s) {
    bytes b = {NULL, 0, 0};
    ms_sink sink;
    sink.write = write_memory;
    sink.user = &b;
    CHECK(ms_save(s->model, &sink) == MS_RESULT_OK);
    return b;
}

/* Makes the checksums of a file right, if its header can be parsed. */
static void mend(small *s, bytes *file) {
    msi_checkpoint c;
    uint64_t length = 0;
    memset(&c, 0, sizeof c);
    c.m = s->model;
    c.function = "mend";
    if (file->size < 8) {
        return;
    }
    memcpy(&length, file->data, 8);
    if (length == 0 || length > file->size - 8) {
        return;
    }
    const msi_errors errors = s->model->errors;
    MSI_ROOM(char, &c, c.header, length);
    memcpy(c.header.items, file->data + 8, (size_t)length);
    c.header.count = (uint32_t)length;
    msi_parse_header(&c, file->size - 8 - length);
    for (uint32_t k = 0; k < c.entries.count && c.result == MS_RESULT_OK; ++k) {
        const msi_entry *sums = &c.entries.items[k];
        const bool is_it = strcmp(c.header.items + sums->name, "memscale.checksums") == 0;
        uint8_t *to = file->data + 8 + length + sums->begin;
        for (uint64_t i = 0; is_it && i < (sums->end - sums->begin) / 8; ++i) {
            const msi_entry *e = i > 0 && i - 1 < c.entries.count ? &c.entries.items[i - 1] : NULL;
            msi_sum sum = msi_begin_sum();
            if (i == 0) {
                msi_add_to_sum(&sum, file->data + 8, length);
            } else if (e != NULL && e->end > e->begin) {
                msi_add_to_sum(&sum, file->data + 8 + length + e->begin, e->end - e->begin);
            }
            const uint64_t whole = msi_end_sum(&sum);
            memcpy(to + 8 * i, &whole, 8);
        }
    }
    msi_close_checkpoint(&c);
    s->model->errors = errors;
}

static bytes file_of(small *s, uint8_t how, const uint8_t *data, size_t size) {
    bytes file = {NULL, 0, 0};
    if ((how & HOW_FRAMED) != 0) {
        const uint8_t *zero = size > 0 ? (const uint8_t *)memchr(data, 0, size) : NULL;
        const uint64_t length = zero != NULL ? (uint64_t)(zero - data) : size;
        append(&file, &length, sizeof length);
        append(&file, data, (size_t)length);
        data += length + (zero != NULL);
        size -= (size_t)length + (zero != NULL);
    }
    append(&file, data, size);
    if ((how & HOW_MENDED) != 0) {
        mend(s, &file);
    }
    return file;
}

// ------------------------------------------------------------------------------------------------
// one input

typedef struct locating {
    small *s;
    bool leaves_one;
} locating;

static bool locate(void *user, ms_tensor tensor, const char *name, ms_located *at) {
    const locating *l = (const locating *)user;
    CHECK(name != NULL && at->name != NULL && !at->transposed);
    at->transposed = tensor.id == l->s->wide.id && !l->leaves_one;
    return !l->leaves_one || tensor.id != l->s->narrow.id;
}

/* What was loaded is the same after it was saved and loaded once more. */
static void repeat(small *s, const values *loaded, bool nonfinite) {
    static values repeated; // large
    small again;
    ms_load_options options;
    ms_source source;
    bytes saved = save(s);
    memory_file file = {saved.data, saved.size, 0, false};
    make(&again);
    memset(&options, 0, sizeof options);
    options.nonfinite = nonfinite;
    source.read = read_memory;
    source.user = &file;
    source.size = saved.size;
    CHECK(ms_load(again.model, &source, &options) == MS_RESULT_OK);
    look(&again, &repeated);
    CHECK(memcmp(&repeated, loaded, sizeof repeated) == 0);
    bytes twice = save(&again);
    CHECK(twice.size == saved.size && memcmp(twice.data, saved.data, saved.size) == 0);
    free(twice.data);
    free(saved.data);
    end(&again);
}

static bool has_all(const small *s) {
    const msi_graph *g = &s->model->graph;
    return g->tensors.items[msi_index(g, s->wide)].written &&
           g->tensors.items[msi_index(g, s->narrow)].written;
}

static ms_result load(small *s, const uint8_t *data, memory_file *file, const bytes *whole) {
    ms_load_options options;
    ms_source source;
    locating where = {s, (data[0] & HOW_LEFT) != 0};
    memset(&options, 0, sizeof options);
    options.values_only = (data[0] & HOW_VALUES) != 0;
    options.partial = (data[0] & HOW_PARTIAL) != 0;
    options.nonfinite = (data[0] & HOW_NONFINITE) != 0;
    options.locate = (data[0] & HOW_LOCATED) != 0 ? locate : NULL;
    options.user = &where;
    file->data = whole->data;
    file->size = whole->size;
    file->fails_in = data[1];
    file->has_failed = false;
    source.read = read_memory;
    source.user = file;
    source.size = whole->size;
    s->host.most = whole->size + SLACK;
    s->host.fails_in = data[2];
    const ms_result result = ms_load(s->model, &source, &options);
    s->host.most = UINT64_MAX;
    s->host.fails_in = 0;
    return result;
}

static void run_input(const uint8_t *data, size_t size) {
    static values before, after; // large
    small s;
    memory_file file;
    if (size < SEED_BYTES || size > LARGEST_FILE) {
        return;
    }
    make(&s);
    if ((data[0] & HOW_WRITTEN) != 0) {
        train(&s);
    }
    bytes whole = file_of(&s, data[0], data + SEED_BYTES, size - SEED_BYTES);
    look(&s, &before);
    const ms_result result = load(&s, data, &file, &whole);
    look(&s, &after);
    CHECK((result == MS_RESULT_FILE) == file.has_failed);
    CHECK((result == MS_RESULT_OUT_OF_MEMORY) == s.host.has_failed);
    const bool is_same = memcmp(&before, &after, sizeof before) == 0;
    const bool leaves_one = (data[0] & HOW_LOCATED) != 0 && (data[0] & HOW_LEFT) != 0;
    if (result == MS_RESULT_OK && leaves_one) { // with its state, and its count of updates
        CHECK(memcmp(before.narrow, after.narrow, sizeof before.narrow) == 0);
        CHECK(memcmp(before.states[2], after.states[2], 2 * sizeof before.states[2]) == 0);
        CHECK(before.updates[1] == after.updates[1]);
    }
    if (result == MS_RESULT_OK && has_all(&s)) {
        repeat(&s, &after, (data[0] & HOW_NONFINITE) != 0);
    }
    const bool had_all = has_all(&s);
    const ms_result step = ms_step(s.model, NULL);
    CHECK(had_all || step != MS_RESULT_OK);
    if (result == MS_RESULT_OK) {
        CHECK(step != MS_RESULT_FAILED && (step == MS_RESULT_ORDER) == !had_all);
    } else if (step == MS_RESULT_FAILED) { // the source has failed when it was read again
        CHECK(file.has_failed && before.steps == after.steps);
    } else {
        CHECK(is_same && step == (had_all ? MS_RESULT_OK : MS_RESULT_ORDER));
    }
    free(whole.data);
    end(&s);
}

#include "fuzz.h"

#ifndef FUZZ_LIBRARY

// ------------------------------------------------------------------------------------------------
// inputs to begin with

static const char *folder;
static int seed_count;

static void write_seed(int how, int read_fails, int allocation_fails, const void *data,
                       size_t size) {
    char path[512];
    const uint8_t head[SEED_BYTES] = {(uint8_t)how, (uint8_t)read_fails, (uint8_t)allocation_fails};
    snprintf(path, sizeof path, "%s/seed-%03d", folder, seed_count++);
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(head, 1, sizeof head, file) == sizeof head);
    CHECK(fwrite(data, 1, size, file) == size && fclose(file) == 0);
}

/* Both of a blank model and of one with values. */
static void write_framed(int how, const char *header, const void *data, size_t size) {
    bytes b = {NULL, 0, 0};
    append(&b, header, strlen(header) + 1);
    append(&b, data, size);
    write_seed(HOW_FRAMED | how, 0, 0, b.data, b.size);
    write_seed(HOW_FRAMED | HOW_WRITTEN | how, 0, 0, b.data, b.size);
    free(b.data);
}

/* A file of ours with one text of its header replaced, and the checksums made right. */
static void write_replaced(const bytes *whole, const char *from, const char *to) {
    bytes b = {NULL, 0, 0};
    uint64_t length;
    memcpy(&length, whole->data, sizeof length);
    char *header = (char *)calloc(1, (size_t)length + 1);
    CHECK(header != NULL);
    memcpy(header, whole->data + 8, (size_t)length);
    const char *at = strstr(header, from);
    CHECK(at != NULL);
    append(&b, header, (size_t)(at - header));
    append(&b, to, strlen(to));
    append(&b, at + strlen(from), strlen(at + strlen(from)) + 1);
    append(&b, whole->data + 8 + length, whole->size - 8 - (size_t)length);
    write_seed(HOW_FRAMED | HOW_MENDED, 0, 0, b.data, b.size);
    write_seed(HOW_FRAMED | HOW_MENDED | HOW_WRITTEN, 0, 0, b.data, b.size);
    free(header);
    free(b.data);
}

static void write_damaged(const bytes *whole) {
    static const struct {
        const char *from, *to;
    } replaced[] = {
        {"\"F32\"", "\"F16\""},
        {"\"F32\"", "\"F64\""},
        {"\"I32\"", "\"F32\""},
        {"\"I32\"", "\"BOOL\""},
        {"[8,33]", "[33,8]"},
        {"[8,33]", "[264]"},
        {"[8,33]", "[8,33,1]"},
        {"[8,33]", "[18446744073709551615,33]"},
        {"[8,33]", "[]"},
        {"\"wide\"", "\"na\\\"r\\\\row\""},
        {"\"wide\"", "\"w\\u0069de\""},
        {"\"wide\"", "\"memscale.wide\""},
        {"memscale.state0.wide", "memscale.state1.wide"},
        {"memscale.updates.wide", "memscale.update.wide"},
        {"memscale.extra.position", "memscale.extra.other"},
        {"memscale.checksums", "memscale.checksum"},
        {"z\xc3\xa4hler", "z\\u00e4hler"},
        {"memscale.step\":\"2", "memscale.step\":\"1099511627775"},
        {"memscale.step\":\"2", "memscale.step\":\"-1"},
        {"memscale.version\":\"1", "memscale.version\":\"2"},
        {"memscale.micro_count\":\"1", "memscale.micro_count\":\"0"},
        {"memscale.loss_scale\":\"0", "memscale.loss_scale\":\"2139095040"},
        {"memscale.loss_scale\":\"0", "memscale.loss_scale\":\"1073741824"},
        {"memscale.overflow\":\"0", "memscale.overflow\":\"99"},
        {"memscale.seed\":\"7", "memscale.seed\":\"18446744073709551615"},
    };
    for (size_t k = 0; k < sizeof replaced / sizeof replaced[0]; ++k) {
        write_replaced(whole, replaced[k].from, replaced[k].to);
    }
    for (size_t at = 0; at < whole->size; at += 1 + whole->size / 6) {
        write_seed((int)(at & 1), 0, 0, whole->data, at); // cut off
    }
    bytes b = {NULL, 0, 0};
    uint64_t length;
    append(&b, whole->data, whole->size);
    memcpy(&length, b.data, sizeof length);
    for (uint64_t at = 0; at < b.size; at += b.size / 9) { // a byte, and the right checksums
        b.data[at] ^= 0x80;
        write_seed(0, 0, 0, b.data, b.size);
        write_seed(HOW_WRITTEN | HOW_MENDED, 0, 0, b.data, b.size);
        b.data[at] ^= 0x80;
    }
    const uint32_t nan = 0x7fc00000u; // in the params and in all scales of state
    for (uint64_t at = 8 + length; at + 4 <= b.size; at += 4) {
        memcpy(b.data + at, &nan, sizeof nan);
    }
    write_seed(HOW_MENDED, 0, 0, b.data, b.size);
    write_seed(HOW_MENDED | HOW_WRITTEN, 0, 0, b.data, b.size);
    write_seed(HOW_MENDED | HOW_NONFINITE, 0, 0, b.data, b.size);
    static const uint64_t lengths[] = {0, 1, 99999999, 100000001, UINT64_MAX, UINT64_MAX - 7};
    for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; ++k) {
        memcpy(b.data, &lengths[k], sizeof lengths[k]);
        write_seed(HOW_WRITTEN, 0, 0, b.data, b.size);
    }
    free(b.data);
}

#define WIDE_AT(begin, end)                                                                        \
    "\"wide\":{\"dtype\":\"F32\",\"shape\":[8,33],\"data_offsets\":[" begin "," end "]}"
#define NARROW_AT(begin, end)                                                                      \
    "\"na\\\"r\\\\row\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[" begin "," end "]}"
#define COUNTERS_AT(begin, end)                                                                    \
    "\"z\\u00e4hler\":{\"dtype\":\"I32\",\"shape\":[3],\"data_offsets\":[" begin "," end "]}"

#define EMPTY(name) "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"

/* Files of other software. */
static void write_foreign(void) {
    static const char *const headers[] = {
        "{" WIDE_AT("0", "1056") "," NARROW_AT("1056", "1076") "," COUNTERS_AT("1076", "1088") "}",
        " { \"__metadata__\" : { } , " WIDE_AT("0", "1056") " , " NARROW_AT("1056", "1076") //
        " , " COUNTERS_AT("1076", "1088") " } \n",
        "{" WIDE_AT("0", "1056") "," NARROW_AT("1052", "1072") "," COUNTERS_AT("1076", "1088") "}",
        "{" WIDE_AT("0", "1056") "," NARROW_AT("1060", "1080") "," COUNTERS_AT("1080", "1092") "}",
        "{" WIDE_AT("0", "1056") "," NARROW_AT("1076", "1056") "," COUNTERS_AT("1076", "1088") "}",
        "{" WIDE_AT("0", "18446744073709551616") "}",
        "{" WIDE_AT("0", "1056") "," WIDE_AT("1056", "2112") "}",
        "{" WIDE_AT("0", "1056") "}",
        "{\"wide\":{\"shape\":[33,8],\"data_offsets\":[0,528],\"dtype\":\"BF16\"}," //
        NARROW_AT("528", "548") "," COUNTERS_AT("548", "560") "}",
        "{\"wide\":{\"shape\":[33,8],\"data_offsets\":[0,528],\"dtype\":\"F16\"}}",
        EMPTY("\\ud83d\\ude00\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041"),
        EMPTY("\\ud83d"),
        EMPTY("\\udc00\\ud800"),
        EMPTY("\\u0000"),
        "{\"memscale.checksums\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}",
        "{\"__metadata__\":{\"memscale.step\":\"1\"}}",
        "{\"__metadata__\":{\"memscale.step\":1}}",
        "{\"\":{\"dtype\":\"\",\"shape\":[],\"data_offsets\":[0,0]}}",
        "{}",
        "[]",
        "{\"",
        "{\"a\\",
        "{\"a\\u12",
        "{\"sixteen or more\\u",
        "",
    };
    uint8_t data[4 * WIDE + 4 * NARROW + 4 * COUNTERS];
    for (size_t i = 0; i < sizeof data; ++i) {
        data[i] = (uint8_t)(i % 4 == 3 ? 0x3d : 5 * i);
    }
    for (size_t k = 0; k < sizeof headers / sizeof headers[0]; ++k) {
        write_framed(0, headers[k], data, sizeof data);
    }
    write_framed(HOW_LOCATED, headers[8], data, 560);
    write_framed(HOW_LOCATED | HOW_LEFT | HOW_PARTIAL, headers[9], data, 528);
    write_framed(HOW_PARTIAL, headers[7], data, 1056);
    memset(data + 100, 0xff, 4);
    write_framed(0, headers[0], data, sizeof data);
    write_framed(HOW_NONFINITE, headers[0], data, sizeof data);
    bytes deep = {NULL, 0, 0};
    append(&deep, "{\"a\":", 5);
    for (int i = 0; i < 3000; ++i) {
        append(&deep, i % 2 == 0 ? "{" : "[", 1);
    }
    append(&deep, "", 1);
    write_framed(0, (const char *)deep.data, data, sizeof data);
    free(deep.data);
}

static void write_seeds(const char *to) {
    small s;
    folder = to;
    make(&s);
    train(&s);
    bytes whole = save(&s);
    end(&s);
    for (int how = 0; how < 32; ++how) {
        write_seed(how, 0, 0, whole.data, whole.size);
    }
    for (int n = 1; n < 30; ++n) { // reads, and allocations, that fail
        write_seed(0, n, 0, whole.data, whole.size);
        write_seed(HOW_WRITTEN, n, 0, whole.data, whole.size);
        write_seed(n & 1, 0, n, whole.data, whole.size);
    }
    write_seed(HOW_WRITTEN | HOW_LOCATED | HOW_LEFT, 0, 0, whole.data, whole.size);
    write_damaged(&whole);
    write_foreign();
    free(whole.data);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--seeds") == 0) {
        write_seeds(argv[2]);
        return 0;
    }
    return fuzz_files(argv + 1, argc - 1);
}

#endif
