/*  test_files.c - checkpoints: what they contain and under which names, runs that go on from them,
    files that are refused, and saves and loads that fail. That runs of random graphs go on with the
    same bits under other plans is tested in test_between.c. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"
#include "toy_layers.h"
#include "files.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEPTH = 3, ROWS = 4, COLS = 24, STEPS = 4 };

static t_file one, two;

/* A file of other software: this header, and zeros or what is given. */
static void t_file_make(t_file *f, const char *header, const void *data, size_t bytes) {
    const uint64_t length = strlen(header);
    t_file_clear(f);
    memcpy(f->data, &length, 8);
    memcpy(f->data + 8, header, (size_t)length);
    memset(f->data + 8 + length, 0, bytes);
    if (data) {
        memcpy(f->data + 8 + length, data, bytes);
    }
    f->bytes = 8 + (size_t)length + bytes;
}

// ------------------------------------------------------------------------------------------------
// runs

typedef struct run {
    t_chain chain;
    uint64_t position; // in its data
} run;

static void run_open(run *r, const ms_config *config, bool coded) {
    memset(r, 0, sizeof *r);
    assert_int_equal(t_chain_create(&r->chain, config, DEPTH, ROWS, COLS), 0);
    ms_model *m = r->chain.model;
    t_ok(m, ms_save_extra(m, "position", &r->position, sizeof r->position));
    for (int i = 0; i < DEPTH && coded; ++i) {
        ms_set_tensor_technique(m, r->chain.weight[i], MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_ON);
    }
    t_ok(m, ms_wrap(m));
}

static double run_step(run *r) {
    double loss;
    ms_model *m = r->chain.model;
    float x[ROWS * COLS];
    t_rng rng = t_seed(r->position);
    t_fill(&rng, x, ROWS * COLS, 1.0f);
    t_ok(m, ms_write(m, r->chain.x, x));
    t_ok(m, ms_step(m, &loss));
    r->position += 1;
    return loss;
}

/* A run that has come some steps far. */
static void run_start(run *r, const ms_config *config, bool coded) {
    run_open(r, config, coded);
    t_ok(r->chain.model, t_chain_write(&r->chain, 7));
    for (int i = 0; i < STEPS; ++i) {
        run_step(r);
    }
}

static void run_same(run *a, run *b, int steps) {
    for (int i = 0; i < steps; ++i) {
        const double x = run_step(a), y = run_step(b);
        assert_memory_equal(&x, &y, sizeof x);
    }
    t_chain_same(&a->chain, &b->chain);
    assert_true(a->position == b->position);
}

static uint64_t steps_of(const run *r) {
    ms_memory_report report;
    t_report(r->chain.model, &report);
    return report.step_count;
}

static void a_run_goes_on(void **state) {
    (void)state;
    const ms_config config = t_config();
    ms_config other = t_config();
    other.seed = 99; // that of the run is in the file
    for (int coded = 0; coded < 2; ++coded) {
        run a, b;
        run_start(&a, &config, coded != 0);
        t_file_clear(&one);
        t_ok(a.chain.model, t_save(a.chain.model, &one));
        run_open(&b, &other, coded != 0);
        t_ok(b.chain.model, t_load(b.chain.model, &one, NULL));
        assert_int_equal(steps_of(&b), STEPS);
        assert_int_equal(ms_update_count(b.chain.model, b.chain.weight[1]), STEPS);
        run_same(&a, &b, STEPS);
        t_file_clear(&one);
        t_file_clear(&two);
        t_ok(a.chain.model, t_save(a.chain.model, &one));
        t_ok(b.chain.model, t_save(b.chain.model, &two));
        assert_int_equal(one.bytes, two.bytes);
        assert_memory_equal(one.data, two.data, one.bytes);
        ms_destroy(a.chain.model);
        ms_destroy(b.chain.model);
    }
}

typedef struct loaded {
    int count, converted, missing;
    char last[64];
} loaded;

static void note_loaded(void *user, const ms_loaded *what) {
    loaded *l = (loaded *)user;
    l->count += 1;
    l->converted += what->converted;
    l->missing += what->missing;
    if (what->converted) {
        snprintf(l->last, sizeof l->last, "%s to %s", what->from, what->to);
    }
}

static void other_formats_are_converted_and_told(void **state) {
    (void)state;
    const ms_config config = t_config();
    for (int coded = 0; coded < 2; ++coded) {
        run a, b;
        loaded seen;
        ms_load_options options;
        memset(&seen, 0, sizeof seen);
        memset(&options, 0, sizeof options);
        options.visit = note_loaded;
        options.user = &seen;
        run_start(&a, &config, coded == 0);
        t_file_clear(&one);
        t_ok(a.chain.model, t_save(a.chain.model, &one));
        run_open(&b, &config, coded != 0);
        t_ok(b.chain.model, t_load(b.chain.model, &one, &options));
        assert_int_equal(seen.count, DEPTH * 4 + 1);
        assert_int_equal(seen.converted, DEPTH * 2);
        assert_int_equal(seen.missing, 0);
        assert_string_equal(seen.last, coded ? "f32 to 8bit" : "8bit to f32");
        t_chain_same(&a.chain, &b.chain); // params are the same
        static float x[COLS * COLS], y[COLS * COLS];
        for (int k = 0; k < 2; ++k) {
            t_ok(
                a.chain.model,
                ms_read(a.chain.model, ms_optimizer_state(a.chain.model, a.chain.weight[0], k), x));
            t_ok(
                b.chain.model,
                ms_read(b.chain.model, ms_optimizer_state(b.chain.model, b.chain.weight[0], k), y));
            double far = 0.0, most = 0.0;
            for (int i = 0; i < COLS * COLS; ++i) {
                far = fmax(far, fabs((double)x[i] - (double)y[i]));
                most = fmax(most, fabs((double)x[i]));
            }
            assert_true(far <= (coded ? 0.05 * most : 0.0)); // decoding rounds nothing
        }
        ms_destroy(a.chain.model);
        ms_destroy(b.chain.model);
    }
}

/* Of the specification of XXH64, and its own: an independent loop over a message of 101 bytes. */
static void sums_are_those_of_the_specification(void **state) {
    (void)state;
    msi_sum s = msi_begin_sum();
    assert_true(msi_end_sum(&s) == 0xef46db3751d8e999u);
    msi_add_to_sum(&s, "abc", 3);
    assert_true(msi_end_sum(&s) == 0x44bc2cf5ad770999u);
    s = msi_begin_sum();
    const char *text = "Nobody inspects the spammish repetition"; // of 39 bytes
    msi_add_to_sum(&s, text, 32);
    msi_add_to_sum(&s, text + 32, 7);
    assert_true(msi_end_sum(&s) == 0xfbcea83c8a378bf1u);
}

/* The tensors of a header, by name. */
static bool has_tensor(const t_file *f, const char *name, const char *dtype, const char *shape) {
    char what[256];
    uint64_t length;
    memcpy(&length, f->data, 8);
    snprintf(what, sizeof what, "\"%s\":{\"dtype\":\"%s\",\"shape\":[%s]", name, dtype, shape);
    for (uint64_t at = 8; at + strlen(what) <= 8 + length; ++at) {
        if (memcmp(f->data + at, what, strlen(what)) == 0) {
            return true;
        }
    }
    print_error("no %s\n", what);
    return false;
}

enum { NAMES = 10 };

static int sum_forward(const ms_call *call) {
    float *out = (float *)call->out[0].data;
    out[0] = 0.0f;
    for (int i = 0; i < NAMES; ++i) {
        out[0] += ((const float *)call->param[i].data)[0];
    }
    return 0;
}

static int sum_backward(const ms_call *call) {
    for (int i = 0; i < NAMES; ++i) {
        ((float *)call->grad_param[i].data)[0] = ((const float *)call->grad_out[0].data)[0];
        ((float *)call->grad_param[i].data)[1] = 0.0f;
    }
    return 0;
}

static const char *const saved[NAMES] = {
    "w",     "w#2", "tensor.", "tensor.memscale.state0.w", "a\\\"b\\\\", "caf\xc3\xa9", "_",
    "w#2#2", "w#3", "_#2"};
static int located[NAMES];

static bool note_names(void *user, ms_tensor tensor, const char *name, ms_located *at) {
    (void)user;
    (void)tensor;
    (void)at;
    for (int i = 0; i < NAMES; ++i) {
        located[i] += strcmp(name, i == 4 ? "a\"b\\" : saved[i]) == 0;
    }
    return true;
}

/* The sums, which have as many bytes, are no value. */
static bool find_sums(void *user, ms_tensor tensor, const char *name, ms_located *at) {
    (void)user;
    (void)tensor;
    at->name = strcmp(name, "bytes") == 0 ? "memscale.checksums" : at->name;
    return true;
}

static void names_are_unique_and_as_written(void **state) {
    (void)state;
    static const char *const given[] = {
        "w", "w", "", "memscale.state0.w", "a\"b\\", "caf\xc3\xa9", "\xff", "w#2", "w", "\x01"};
    const ms_config config = t_config();
    ms_model *m, *n;
    for (int turn = 0; turn < 2; ++turn) {
        ms_model **to = turn ? &n : &m;
        ms_layer_desc desc;
        memset(&desc, 0, sizeof desc);
        assert_int_equal(ms_create(&config, to), MS_RESULT_OK);
        for (int i = 0; i < NAMES; ++i) {
            desc.param[i] = ms_param(*to, given[i], MS_DTYPE_F32, ms_shape1(2));
        }
        desc.state[0] = ms_buffer(*to, "bytes", MS_DTYPE_U8, ms_shape1(8 * (4 * NAMES + 2)));
        desc.out[0] = ms_activation(*to, "loss", MS_DTYPE_F32, ms_shape1(1));
        desc.forward = sum_forward;
        desc.backward = sum_backward;
        (void)ms_register_layer(*to, &desc);
        ms_set_loss(*to, desc.out[0]);
        t_ok(*to, ms_wrap(*to));
    }
    t_write_zeros(m);
    t_file_clear(&one);
    t_ok(m, t_save(m, &one));
    for (int i = 0; i < NAMES; ++i) {
        assert_true(has_tensor(&one, saved[i], "F32", "2"));
    }
    assert_true(has_tensor(&one, "memscale.state0.w", "F32", "2"));
    ms_load_options options;
    memset(&options, 0, sizeof options);
    options.locate = note_names;
    t_ok(n, t_load(n, &one, &options));
    for (int i = 0; i < NAMES; ++i) { // of the value, two states and the updates
        assert_int_equal(located[i], 4);
    }
    options.locate = find_sums;
    t_error(n, t_load(n, &one, &options), MS_RESULT_INVALID);
    t_text_has(ms_last_error(n), "has no tensor \"memscale.checksums\", U8 [336]");
    ms_destroy(m);
    ms_destroy(n);
}

// ------------------------------------------------------------------------------------------------
// what is refused

static void expect_unchanged(run *r, const t_file *before, const char *what) {
    t_file_clear(&two);
    t_ok(r->chain.model, t_save(r->chain.model, &two));
    if (two.bytes != before->bytes || memcmp(two.data, before->data, two.bytes) != 0) {
        fail_msg("%s: the model has changed", what);
    }
}

/* One byte of a file is another, or it ends before its end: an error, and both a model that has values
   and one that has none are as before. */
static void damage_is_found(void **state) {
    (void)state;
    static t_file original, damaged;
    const ms_config config = t_config();
    run a, b, blank;
    run_start(&a, &config, true);
    run_start(&b, &config, true);
    run_open(&blank, &config, true);
    t_file_clear(&original);
    t_ok(a.chain.model, t_save(a.chain.model, &original));
    run_step(&b);
    t_file_clear(&one);
    t_ok(b.chain.model, t_save(b.chain.model, &one));
    t_rng rng = t_seed(3);
    const uint32_t cases = (uint32_t)t_sweep(300, 20000);
    for (uint32_t k = 0; k < cases; ++k) {
        memcpy(damaged.data, original.data, original.bytes);
        damaged.bytes = original.bytes;
        damaged.writes = damaged.fails_at = damaged.reads = 0;
        if (k % 4 == 0) {
            damaged.bytes = t_below(&rng, (uint32_t)original.bytes);
        } else {
            const uint32_t at = t_below(&rng, k % 4 == 1 ? 2048 : (uint32_t)original.bytes);
            damaged.data[at] = (uint8_t)(damaged.data[at] ^ (1u << t_below(&rng, 8)));
        }
        const ms_result result = t_load(b.chain.model, &damaged, NULL);
        assert_true(result == MS_RESULT_INVALID);
        assert_int_equal(t_load(blank.chain.model, &damaged, NULL), MS_RESULT_INVALID);
        if (k % 16 == 0) {
            expect_unchanged(&b, &one, ms_last_error(b.chain.model));
            double loss;
            t_error(blank.chain.model, ms_step(blank.chain.model, &loss), MS_RESULT_ORDER);
        }
    }
    t_ok(blank.chain.model, t_load(blank.chain.model, &original, NULL));
    run_same(&a, &blank, 2);
    ms_destroy(a.chain.model);
    ms_destroy(b.chain.model);
    ms_destroy(blank.chain.model);
}

static void headers_are_not_trusted(void **state) {
    (void)state;
    static const struct {
        const char *header, *text;
        uint32_t bytes;
    } cases[] = {
        {"", "from byte 8", 0},
        {"[]", "from byte 8", 0},
        {"{", "not that of a safetensors", 0},
        {"{}x", "not that of a safetensors", 0},
        {"{}", "has no tensor \"", 0},
        {"{\"weight0\":{\"dtype\":\"F32\",\"shape\":[24,23],\"data_offsets\":[0,2208]}}",
         "is F32 [24, 23] in the file and F32 [24, 24] here", 2208},
        {"{\"weight0\":{\"dtype\":\"I32\",\"shape\":[24,24],\"data_offsets\":[0,2304]}}",
         "is I32 [24, 24] in the file and F32 [24, 24] here", 2304},
        {"{\"weight0\":{\"dtype\":\"F32\",\"shape\":[24,24],\"data_offsets\":[0,2300]}}",
         "not that of a safetensors", 2300},
        {"{\"weight0\":{\"dtype\":\"F32\",\"shape\":[24,24],\"data_offsets\":[4,2308]}}",
         "there is a gap", 2308},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[4,12]}}",
         "tensors overlap", 12},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", "cut off", 7},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", "too long", 9},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,12]}}",
         "not that of a safetensors", 12},
        {"{\"\\ud800\\u0041\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}",
         "not that of a safetensors", 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551615,2],\"data_offsets\":[0,8]}}",
         "not that of a safetensors", 8},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]}}",
         "not that of a safetensors", 8},
        {"{\"a\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
         "not that of a safetensors", 0},
        {"{\"__metadata__\":{\"memscale.version\":\"1\"}}", "are damaged", 0},
        {"{\"sixteen or more\\u", "not that of a safetensors", 0},
        {"{\"\\ud800\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}",
         "not that of a safetensors", 1},
        {"{\"weight0\":{\"dtype\":\"F32\",\"shape\":[24,24],\"data_offsets\":[0,2304]},"
         "\"weight0\":{\"dtype\":\"F32\",\"shape\":[24,24],\"data_offsets\":[2304,4608]}}",
         "two tensors", 4608},
    };
    const ms_config config = t_config();
    run r;
    run_open(&r, &config, false);
    ms_model *m = r.chain.model;
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; ++k) {
        char header[512], text[512];
        snprintf(header, sizeof header, "%s", cases[k].header);
        snprintf(text, sizeof text, "%s", cases[k].text);
        t_file_make(&one, header, NULL, cases[k].bytes);
        t_error(m, t_load(m, &one, NULL), MS_RESULT_INVALID);
        if (!strstr(ms_last_error(m), text)) {
            fail_msg("case %u: \"%s\" is not in \"%s\"", (unsigned)k, text, ms_last_error(m));
        }
    }
    for (one.bytes = 0; one.bytes < 8; ++one.bytes) {
        t_error(m, t_load(m, &one, NULL), MS_RESULT_INVALID);
    }
    memset(one.data, 0xff, 16);
    one.bytes = 16;
    t_error(m, t_load(m, &one, NULL), MS_RESULT_INVALID);
    ms_destroy(m);
}

/* What a file may have besides what is looked for. */
static void unusual_headers_are_read(void **state) {
    (void)state;
    static const struct {
        const char *header;
        uint32_t bytes;
    } cases[] = {
        {"{}", 0},
        {" { \"__metadata__\" : null } ", 0},
        {"{\"__metadata__\":{}}", 0},
        {"{\"__metadata__\":{\"a\":\"\\u00e9\\ud83d\\ude00\"}}", 0},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
         "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]}}",
         8},
        {"{\"b\":{\"data_offsets\":[8,12],\"dtype\":\"C64\",\"shape\":[1,1,1,1,1,1,1,1,4]},"
         "\"a\":{\"shape\":[],\"dtype\":\"F64\",\"data_offsets\":[0,8]}}",
         12},
    };
    const ms_config config = t_config();
    ms_load_options options;
    run r;
    memset(&options, 0, sizeof options);
    options.partial = true;
    run_open(&r, &config, false);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; ++k) {
        t_file_make(&one, cases[k].header, NULL, cases[k].bytes);
        t_ok(r.chain.model, t_load(r.chain.model, &one, &options));
    }
    ms_destroy(r.chain.model);
}

static void note_warning(ms_log_level level, const char *tag, const char *text, void *user) {
    if (level <= MS_LOG_WARNING && strcmp(tag, "file") == 0) {
        snprintf((char *)user, 256, "%s", text);
    }
}

static void other_runs_are_refused(void **state) {
    (void)state;
    ms_config config = t_config();
    run a, b;
    run_start(&a, &config, false);
    t_file_clear(&one);
    t_ok(a.chain.model, t_save(a.chain.model, &one));
    // a deeper graph
    t_chain deeper;
    assert_int_equal(t_chain_create(&deeper, &config, DEPTH + 1, ROWS, COLS), 0);
    t_ok(deeper.model, ms_wrap(deeper.model));
    t_error(deeper.model, t_load(deeper.model, &one, NULL), MS_RESULT_INVALID);
    assert_non_null(strstr(ms_last_error(deeper.model), "has no tensor"));
    ms_load_options options;
    memset(&options, 0, sizeof options);
    options.partial = true;
    t_ok(deeper.model, t_load(deeper.model, &one, &options));
    ms_destroy(deeper.model);
    // other memory of the trainer
    run_open(&b, &config, false);
    t_ok(b.chain.model, ms_save_extra(b.chain.model, "position", &b.position, 4));
    t_error(b.chain.model, t_load(b.chain.model, &one, NULL), MS_RESULT_INVALID);
    assert_non_null(strstr(ms_last_error(b.chain.model), "U8 [8] in the file and U8 [4] here"));
    t_ok(b.chain.model, ms_save_extra(b.chain.model, "position", NULL, 0));
    ms_destroy(b.chain.model);
    char warning[256] = "";
    ms_config logs = config;
    logs.log = note_warning;
    logs.log_user = warning;
    run_open(&b, &logs, false);
    t_ok(b.chain.model, t_load(b.chain.model, &one, NULL));
    assert_string_equal(warning, "");
    t_ok(b.chain.model, ms_save_extra(b.chain.model, "position", NULL, 0));
    t_ok(b.chain.model, t_load(b.chain.model, &one, NULL));
    t_text_has(warning, "1 extras of the file are not loaded");
    ms_destroy(b.chain.model);
    // numbers that are not finite
    float *w = t_chain_weights(&a.chain);
    const uint32_t nan = 0x7fc00000u;
    memcpy(&w[5], &nan, 4);
    t_ok(a.chain.model, ms_write(a.chain.model, a.chain.weight[0], w));
    free(w);
    t_file_clear(&one);
    t_ok(a.chain.model, t_save(a.chain.model, &one));
    run_open(&b, &config, false);
    t_error(b.chain.model, t_load(b.chain.model, &one, NULL), MS_RESULT_INVALID);
    assert_non_null(strstr(ms_last_error(b.chain.model), "not finite"));
    memset(&options, 0, sizeof options);
    options.nonfinite = true;
    t_ok(b.chain.model, t_load(b.chain.model, &one, &options));
    ms_destroy(a.chain.model);
    ms_destroy(b.chain.model);
}

/* Weights of other software: other names, a transposed matrix, 16 bits. */
static bool find_weight(void *user, ms_tensor tensor, const char *name, ms_located *at) {
    (void)user;
    (void)tensor;
    at->transposed = true;
    at->name = strcmp(name, "weight0") == 0 ? "layers.0.w" : at->name;
    return strcmp(name, "weight2") != 0;
}

static void values_of_other_software(void **state) {
    (void)state;
    const ms_config config = t_config();
    static uint16_t data[3][COLS][COLS];
    ms_load_options options;
    run r;
    run_start(&r, &config, false);
    ms_model *m = r.chain.model;
    float *before = t_chain_weights(&r.chain);
    for (int i = 0; i < COLS * COLS; ++i) {
        (&data[0][0][0])[i] = msi_bf16_of_f32((float)(i - 77) * 0.125f);
        (&data[1][0][0])[i] = msi_bf16_of_f32((float)(i + 5) * -0.25f);
    }
    t_file_make(
        &one,
        "{ \"layers.0.w\" : {\"shape\": [24, 24], \"dtype\" : \"BF16\", \"data_offsets\":[0,"
        "1152]}, \"other\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[2304,2307]},"
        " \"weigh\\u00741\":{\"dtype\":\"BF16\",\"shape\":[24,24],\"data_offsets\":[1152,2304]}}",
        data, 2 * sizeof data[0] + 3);
    memset(&options, 0, sizeof options);
    options.locate = find_weight;
    t_ok(m, t_load(m, &one, &options));
    float *after = t_chain_weights(&r.chain);
    for (int i = 0; i < COLS; ++i) {
        for (int k = 0; k < COLS; ++k) {
            for (int n = 0; n < 2; ++n) {
                const float x = after[n * COLS * COLS + i * COLS + k];
                const float y = msi_f32_of_bf16(data[n][k][i]);
                assert_memory_equal(&x, &y, 4);
            }
        }
    }
    assert_memory_equal(after + 2 * COLS * COLS, before + 2 * COLS * COLS, COLS * COLS * 4);
    assert_int_equal(steps_of(&r), STEPS);
    free(before);
    free(after);
    ms_destroy(m);
}

/* More rows than fit into one piece. */
static void large_matrices_are_transposed(void **state) {
    (void)state;
    enum { SIDE = 600 };
    static uint16_t data[SIDE * SIDE];
    const ms_config config = t_config();
    ms_load_options options;
    t_chain c;
    for (uint32_t i = 0; i < SIDE * SIDE; ++i) {
        data[i] = msi_bf16_of_f32((float)(i * 2654435761u >> 16));
    }
    t_file_make(&one,
                "{\"layers.0.w\":{\"dtype\":\"BF16\",\"shape\":[600,600],\"data_offsets\":"
                "[0,720000]}}",
                data, sizeof data);
    assert_int_equal(t_chain_create(&c, &config, 1, 1, SIDE), MS_RESULT_OK);
    t_ok(c.model, ms_wrap(c.model));
    memset(&options, 0, sizeof options);
    options.locate = find_weight;
    t_ok(c.model, t_load(c.model, &one, &options));
    float *w = t_chain_weights(&c);
    for (int i = 0; i < SIDE * SIDE; ++i) {
        const float expected = msi_f32_of_bf16(data[i % SIDE * SIDE + i / SIDE]);
        assert_memory_equal(&w[i], &expected, sizeof expected);
    }
    free(w);
    ms_destroy(c.model);
}

static bool find_two(void *user, ms_tensor tensor, const char *name, ms_located *at) {
    (void)user;
    (void)tensor;
    (void)at;
    return strcmp(name, "weight2") != 0;
}

static bool find_transposed(void *user, ms_tensor tensor, const char *name, ms_located *at) {
    (void)user;
    (void)tensor;
    (void)name;
    at->transposed = true;
    return true;
}

/* What is left out keeps its value, its state and its count. */
static void a_part_of_a_run(void **state) {
    (void)state;
    const ms_config config = t_config();
    ms_load_options options;
    run a, b;
    run_start(&a, &config, false);
    t_file_clear(&one);
    t_ok(a.chain.model, t_save(a.chain.model, &one));
    run_start(&b, &config, false);
    run_step(&b);
    float *before = t_chain_weights(&b.chain);
    memset(&options, 0, sizeof options);
    options.locate = find_two;
    t_ok(b.chain.model, t_load(b.chain.model, &one, &options));
    float *after = t_chain_weights(&b.chain), *there = t_chain_weights(&a.chain);
    const size_t each = (size_t)COLS * COLS;
    assert_memory_equal(after, there, 2 * each * sizeof(float));
    assert_memory_equal(after + 2 * each, before + 2 * each, each * sizeof(float));
    assert_int_equal(ms_update_count(b.chain.model, b.chain.weight[1]), STEPS);
    assert_int_equal(ms_update_count(b.chain.model, b.chain.weight[2]), STEPS + 1);
    options.locate = find_transposed;
    t_error(b.chain.model, t_load(b.chain.model, &one, &options), MS_RESULT_INVALID);
    options.values_only = true;
    t_ok(b.chain.model, t_load(b.chain.model, &one, &options));
    // a second moment that is negative
    static float moment[COLS * COLS];
    moment[3] = -1e-9f;
    t_ok(a.chain.model,
         ms_write(a.chain.model, ms_optimizer_state(a.chain.model, a.chain.weight[0], 1), moment));
    t_file_clear(&one);
    t_ok(a.chain.model, t_save(a.chain.model, &one));
    t_error(b.chain.model, t_load(b.chain.model, &one, NULL), MS_RESULT_INVALID);
    free(before);
    free(after);
    free(there);
    ms_destroy(a.chain.model);
    ms_destroy(b.chain.model);
}

/* Inside a step of several micro-batches: what is left out has no part of the step that it was in, and
   a step of another number of them does not go on. */
static void a_part_of_a_step(void **state) {
    (void)state;
    static float of_new[COLS * COLS], of_warm[COLS * COLS];
    ms_config config = t_config();
    ms_load_options options;
    memset(&options, 0, sizeof options);
    options.locate = find_two;
    config.accumulation_steps = 3;
    run a;
    run_start(&a, &config, false); // 4 micro-batches
    t_file_clear(&one);
    t_ok(a.chain.model, t_save(a.chain.model, &one));
    for (int warm = 0; warm < 2; ++warm) {
        run b;
        run_open(&b, &config, false);
        for (int i = 0; i < (warm ? 5 : 0); ++i) {
            t_ok(b.chain.model, i == 0 ? t_chain_write(&b.chain, 9) : MS_RESULT_OK);
            run_step(&b);
        }
        t_ok(b.chain.model, t_chain_write(&b.chain, 7));
        t_ok(b.chain.model, t_load(b.chain.model, &one, &options));
        float *w = t_chain_weights(&b.chain);
        memcpy(w + 2 * COLS * COLS, w, COLS * COLS * sizeof(float));
        t_ok(b.chain.model, ms_write(b.chain.model, b.chain.weight[2], w + 2 * COLS * COLS));
        free(w);
        run_step(&b);
        t_ok(b.chain.model, ms_read(b.chain.model, ms_gradient(b.chain.model, b.chain.weight[2]),
                                    warm ? of_warm : of_new));
        ms_destroy(b.chain.model);
    }
    assert_memory_equal(of_new, of_warm, sizeof of_new);
    config.accumulation_steps = 2;
    run c;
    run_open(&c, &config, false);
    t_error(c.chain.model, t_load(c.chain.model, &one, NULL), MS_RESULT_INVALID);
    t_text_has(ms_last_error(c.chain.model),
               "of 3 micro-batches, of which 1 are done; here a step has 2");
    ms_destroy(a.chain.model);
    ms_destroy(c.chain.model);
}

/* Each write of a sink and each read of a source fails once. */
static void failing_sinks_and_sources(void **state) {
    (void)state;
    const ms_config config = t_config();
    run a, b;
    size_t writes = 1, reads = 1;
    run_start(&a, &config, false);
    run_start(&b, &config, false);
    for (size_t k = 1; k <= writes; ++k) {
        t_file_clear(&one);
        one.fails_at = k;
        const ms_result result = t_save(a.chain.model, &one);
        writes = result == MS_RESULT_OK ? 0 : k + 1;
        if (result != MS_RESULT_OK) {
            assert_int_equal(result, MS_RESULT_FILE);
        }
    }
    run_same(&a, &b, 1);
    for (size_t k = 1; k <= reads; ++k) {
        run c;
        run_open(&c, &config, false);
        one.reads = 0;
        one.fails_at = k;
        const ms_result result = t_load(c.chain.model, &one, NULL);
        reads = result == MS_RESULT_OK ? 0 : k + 1;
        if (result != MS_RESULT_OK) {
            assert_int_equal(result, MS_RESULT_FILE);
            assert_int_equal(c.position, 0);
            one.fails_at = 0;
            t_error(c.chain.model, ms_step(c.chain.model, NULL), MS_RESULT_ORDER);
            t_ok(c.chain.model, t_load(c.chain.model, &one, NULL));
            assert_int_equal(c.position, STEPS);
        }
        ms_destroy(c.chain.model);
    }
    ms_destroy(a.chain.model);
    ms_destroy(b.chain.model);
}

static void calls_out_of_turn(void **state) {
    (void)state;
    const ms_config config = t_config();
    run r;
    memset(&r, 0, sizeof r);
    assert_int_equal(t_chain_create(&r.chain, &config, DEPTH, ROWS, COLS), 0);
    ms_model *m = r.chain.model;
    t_file_clear(&one);
    t_error(m, t_save(m, &one), MS_RESULT_ORDER);
    t_error(m, t_load(m, &one, NULL), MS_RESULT_ORDER);
    t_ok(m, ms_wrap(m));
    t_error(m, t_save(m, &one), MS_RESULT_ORDER); // params have no value
    assert_int_equal(one.bytes, 0);
    t_error(m, ms_save(m, NULL), MS_RESULT_INVALID);
    t_error(m, ms_load(m, NULL, NULL), MS_RESULT_INVALID);
    t_error(m, ms_save_extra(m, "", &r, 4), MS_RESULT_INVALID);
    t_error(m, ms_save_extra(m, NULL, &r, 4), MS_RESULT_INVALID);
    t_error(m, ms_save_extra(m, "a\x01", &r, 4), MS_RESULT_INVALID);
    t_error(m, ms_save_extra(m, "a\xff", &r, 4), MS_RESULT_INVALID);
    t_error(m, ms_save_extra(m, "x", &r, 0), MS_RESULT_INVALID);
    t_error(m, ms_save_begin(m, NULL, NULL), MS_RESULT_INVALID);
    t_error(m, ms_set_step_count(m, UINT64_MAX), MS_RESULT_INVALID);
    t_ok(m, t_chain_write(&r.chain, 1));
    t_ok(m, ms_suspend(m, NULL));
    t_error(m, t_save(m, &one), MS_RESULT_ORDER);
    t_ok(m, ms_resume(m));
    t_ok(m, t_save(m, &one));
    assert_int_equal(ms_save(NULL, NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_load_file(NULL, "x", NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_snapshot_write(NULL, NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_snapshot_write_file(NULL, "x"), MS_RESULT_INVALID);
    ms_snapshot_free(NULL);
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// on disk

static void scratch(char *path, const char *name) {
    static char folder[64];
    if (folder[0] == 0) {
        snprintf(folder, sizeof folder, "/tmp/memscale-files-%ld", (long)getpid());
        assert_int_equal(mkdir(folder, 0700), 0);
    }
    snprintf(path, 128, "%s%s%s", folder, name[0] ? "/" : "", name);
}

static bool is_there(const char *path) {
    FILE *f = fopen(path, "rb");
    if (f) {
        fclose(f);
    }
    return f != NULL;
}

static void checkpoints_of_a_folder(void **state) {
    (void)state;
    const ms_config config = t_config();
    char folder[128], path[128];
    ms_checkpoints where;
    bool found = true;
    run a, b;
    scratch(folder, "");
    where.folder = folder;
    where.keep = 3;
    run_start(&a, &config, true);
    run_open(&b, &config, true);
    t_ok(b.chain.model, ms_load_checkpoint(b.chain.model, &where, NULL, &found));
    assert_false(found);
    for (int k = 0; k < 7; ++k) {
        run_step(&a);
        t_ok(a.chain.model, ms_save_checkpoint(a.chain.model, &where));
    }
    for (int k = 0; k < 5; ++k) {
        char name[64];
        snprintf(name, sizeof name, "checkpoint-%d.safetensors", k);
        scratch(path, name);
        assert_true(is_there(path) == (k < 3));
    }
    // the newest, in place 0, is cut off: the one before it is loaded
    scratch(path, "checkpoint-0.safetensors");
    assert_int_equal(truncate(path, 3000), 0);
    t_ok(b.chain.model, ms_load_checkpoint(b.chain.model, &where, NULL, &found));
    assert_true(found);
    assert_int_equal(steps_of(&b), STEPS + 6);
    run_step(&b);
    run_same(&a, &b, 2);
    where.keep = 1; // and those beyond it are removed
    t_ok(a.chain.model, ms_save_checkpoint(a.chain.model, &where));
    scratch(path, "checkpoint-2.safetensors");
    assert_false(is_there(path));
    scratch(path, "checkpoint-0.safetensors");
    assert_true(is_there(path));
    assert_int_equal(truncate(path, 30), 0);
    t_error(b.chain.model, ms_load_checkpoint(b.chain.model, &where, NULL, &found), MS_RESULT_FILE);
    assert_false(found);
    // one that is there and cannot be read is no reason to begin anew, nor is it replaced
    assert_int_equal(remove(path), 0);
    assert_int_equal(symlink("checkpoint-0.safetensors", path), 0);
    t_error(b.chain.model, ms_load_checkpoint(b.chain.model, &where, NULL, &found), MS_RESULT_FILE);
    t_text_has(ms_last_error(b.chain.model), "cannot be read");
    t_error(b.chain.model, ms_save_checkpoint(b.chain.model, &where), MS_RESULT_FILE);
    where.folder = "";
    t_error(b.chain.model, ms_save_checkpoint(b.chain.model, &where), MS_RESULT_INVALID);
    where.folder = folder;
    where.keep = 65;
    t_error(b.chain.model, ms_save_checkpoint(b.chain.model, &where), MS_RESULT_INVALID);
    remove(path);
    ms_destroy(a.chain.model);
    ms_destroy(b.chain.model);
    rmdir(folder);
}

/* Snapshots take turns with files in a folder of two; each is written while the run goes on. */
static void snapshots_are_checkpoints_of_a_folder(void **state) {
    (void)state;
    const ms_config config = t_config();
    char folder[128], path[128];
    ms_checkpoints where;
    ms_snapshot *snapshot;
    run a, b;
    bool found;
    scratch(folder, "");
    mkdir(folder, 0700);
    where.folder = folder;
    where.keep = 0;
    run_start(&a, &config, true);
    for (uint64_t k = 0; k < 5; ++k) {
        if (k == 2) {
            t_ok(a.chain.model, ms_save_checkpoint(a.chain.model, &where));
            run_step(&a);
        } else {
            t_ok(a.chain.model, ms_save_begin(a.chain.model, &where, &snapshot));
            run_step(&a);
            assert_int_equal(ms_snapshot_write_file(snapshot, NULL), MS_RESULT_OK);
            ms_snapshot_free(snapshot);
        }
        run_open(&b, &config, true);
        t_ok(b.chain.model, ms_load_checkpoint(b.chain.model, &where, NULL, &found));
        assert_true(found && steps_of(&b) == STEPS + k);
        run_step(&b);
        run_same(&a, &b, 0);
        ms_destroy(b.chain.model);
    }
    for (int k = 0; k < 3; ++k) {
        char name[64];
        snprintf(name, sizeof name, "checkpoint-%d.safetensors", k);
        scratch(path, name);
        assert_int_equal(remove(path) == 0, k < 2);
    }
    where.folder = "";
    t_error(a.chain.model, ms_save_begin(a.chain.model, &where, &snapshot), MS_RESULT_INVALID);
    assert_null(snapshot);
    ms_destroy(a.chain.model);
    rmdir(folder);
}

static void a_snapshot_is_the_file(void **state) {
    (void)state;
    const ms_config config = t_config();
    char path[128];
    ms_snapshot *snapshot;
    ms_sink sink;
    run a, b;
    scratch(path, "");
    mkdir(path, 0700);
    scratch(path, "snapshot");
    run_start(&a, &config, true);
    t_file_clear(&one);
    t_ok(a.chain.model, t_save(a.chain.model, &one));
    t_ok(a.chain.model, ms_save_begin(a.chain.model, NULL, &snapshot));
    run_step(&a);
    t_file_clear(&two);
    sink.write = t_file_write;
    sink.user = &two;
    assert_int_equal(ms_snapshot_write(snapshot, &sink), MS_RESULT_OK);
    assert_int_equal(one.bytes, two.bytes);
    assert_memory_equal(one.data, two.data, one.bytes);
    two.fails_at = two.writes + 1;
    assert_int_equal(ms_snapshot_write(snapshot, &sink), MS_RESULT_FILE);
    assert_int_equal(ms_snapshot_write_file(snapshot, NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_snapshot_write_file(snapshot, "/nowhere/x"), MS_RESULT_FILE);
    assert_int_equal(ms_snapshot_write_file(snapshot, path), MS_RESULT_OK);
    ms_snapshot_free(snapshot);
    run_open(&b, &config, true);
    t_ok(b.chain.model, ms_load_file(b.chain.model, path, NULL));
    run_step(&b);
    run_same(&a, &b, 1);
    t_error(b.chain.model, ms_load_file(b.chain.model, "/nowhere/x", NULL), MS_RESULT_FILE);
    t_error(b.chain.model, ms_save_file(b.chain.model, "/nowhere/x"), MS_RESULT_FILE);
    t_error(b.chain.model, ms_save_file(b.chain.model, NULL), MS_RESULT_INVALID);
    t_ok(b.chain.model, ms_save_file(b.chain.model, path));
    remove(path);
    ms_destroy(a.chain.model);
    ms_destroy(b.chain.model);
    scratch(path, "");
    rmdir(path);
}

/* A trainer that keeps its own files: params, state, counts, step. */
static void a_run_of_own_files_goes_on(void **state) {
    (void)state;
    const ms_config config = t_config();
    static float data[COLS * COLS];
    run a, b;
    run_start(&a, &config, false);
    run_open(&b, &config, false);
    for (int i = 0; i < DEPTH; ++i) {
        ms_model *from = a.chain.model, *to = b.chain.model;
        const ms_tensor p = a.chain.weight[i], q = b.chain.weight[i];
        t_ok(from, ms_read(from, p, data));
        t_ok(to, ms_write(to, q, data));
        for (int k = 0; k < 2; ++k) {
            t_ok(from, ms_read(from, ms_optimizer_state(from, p, k), data));
            t_ok(to, ms_write(to, ms_optimizer_state(to, q, k), data));
        }
        t_ok(to, ms_set_update_count(to, q, ms_update_count(from, p)));
    }
    t_ok(b.chain.model, ms_set_step_count(b.chain.model, steps_of(&a)));
    assert_int_equal(ms_update_count(b.chain.model, b.chain.weight[0]), STEPS);
    b.position = a.position;
    run_same(&a, &b, 3);
    assert_int_equal(steps_of(&b), STEPS + 3);
    ms_destroy(a.chain.model);
    ms_destroy(b.chain.model);
}

static bool find_of_python(void *user, ms_tensor tensor, const char *name, ms_located *at) {
    (void)user;
    (void)tensor;
    at->transposed = strcmp(name, "weight1") == 0;
    at->name = at->transposed ? "model.w1" : name;
    return true;
}

/* With MEMSCALE_TEST_SAFETENSORS, a folder: its from_python.safetensors is loaded, and saved again as
   to_python.safetensors. tests/safetensors_files.py writes the one and reads the other. */
static void files_of_python(void **state) {
    (void)state;
    const char *folder = getenv("MEMSCALE_TEST_SAFETENSORS");
    char path[1024];
    ms_load_options options;
    const ms_config config = t_config();
    run r;
    if (!folder) {
        print_message("MEMSCALE_TEST_SAFETENSORS names no folder\n");
        skip();
    }
    memset(&options, 0, sizeof options);
    options.locate = find_of_python;
    run_open(&r, &config, false);
    snprintf(path, sizeof path, "%s/from_python.safetensors", folder);
    t_ok(r.chain.model, ms_load_file(r.chain.model, path, &options));
    float *w = t_chain_weights(&r.chain);
    for (int i = 0; i < DEPTH * COLS * COLS; ++i) {
        const float expected =
            (float)(i % (COLS * COLS) % 251) * 0.125f - (float)(i / (COLS * COLS));
        assert_memory_equal(&w[i], &expected, sizeof expected);
    }
    free(w);
    snprintf(path, sizeof path, "%s/to_python.safetensors", folder);
    t_ok(r.chain.model, ms_save_file(r.chain.model, path));
    ms_destroy(r.chain.model);
}

// ------------------------------------------------------------------------------------------------
// what a save or a load that fails leaves: everything as it was

/* On disk before: two checkpoints, and a file of the same state as the second. `one` has it too. */
static const char *const old_files[] = {"checkpoint-0.safetensors", "checkpoint-1.safetensors",
                                        "file"};
enum { OLD_FILES = sizeof old_files / sizeof old_files[0] };

static ms_checkpoints old_folder(void) {
    static char folder[128];
    ms_checkpoints where;
    scratch(folder, "");
    where.folder = folder;
    where.keep = 2;
    return where;
}

static void old_files_make(void) {
    const ms_config config = t_config();
    const ms_checkpoints where = old_folder();
    char path[128];
    run r;
    mkdir(where.folder, 0700);
    run_start(&r, &config, true);
    t_ok(r.chain.model, ms_save_checkpoint(r.chain.model, &where));
    run_step(&r);
    t_ok(r.chain.model, ms_save_checkpoint(r.chain.model, &where));
    scratch(path, old_files[2]);
    t_ok(r.chain.model, ms_save_file(r.chain.model, path));
    t_file_clear(&one);
    t_ok(r.chain.model, t_save(r.chain.model, &one));
    ms_destroy(r.chain.model);
}

/* They are whole and still the old ones, and nothing is beside them. */
static void old_files_expect(const char *what) {
    const ms_config config = t_config();
    char path[128], beside[160];
    run r;
    run_open(&r, &config, true);
    for (int k = 0; k < OLD_FILES; ++k) {
        scratch(path, old_files[k]);
        snprintf(beside, sizeof beside, "%s.tmp", path);
        const ms_result result = ms_load_file(r.chain.model, path, NULL);
        if (result != MS_RESULT_OK || steps_of(&r) != STEPS + (k > 0) || is_there(beside)) {
            fail_msg("%s: \"%s\" is not as before, or \"%s\" is there", what, path, beside);
        }
    }
    expect_unchanged(&r, &one, what);
    ms_destroy(r.chain.model);
}

static void old_files_remove(void) {
    char path[128];
    for (int k = 0; k < OLD_FILES; ++k) {
        scratch(path, old_files[k]);
        assert_int_equal(remove(path), 0);
    }
    assert_int_equal(rmdir(old_folder().folder), 0); // or something else is in it
}

static ms_result act_save(run *r) {
    t_file_clear(&two);
    return t_save(r->chain.model, &two);
}

static ms_result act_save_file(run *r) {
    char path[128];
    scratch(path, old_files[2]);
    return ms_save_file(r->chain.model, path);
}

static ms_result act_save_checkpoint(run *r) {
    const ms_checkpoints where = old_folder();
    return ms_save_checkpoint(r->chain.model, &where);
}

static ms_result act_snapshot(run *r) {
    char path[128];
    ms_snapshot *snapshot;
    ms_result result = ms_save_begin(r->chain.model, NULL, &snapshot);
    assert_true((snapshot != NULL) == (result == MS_RESULT_OK));
    if (snapshot) {
        scratch(path, old_files[2]);
        result = ms_snapshot_write_file(snapshot, path);
    }
    ms_snapshot_free(snapshot);
    return result;
}

static ms_result act_load(run *r) {
    return t_load(r->chain.model, &one, NULL);
}

static ms_result act_load_checkpoint(run *r) {
    const ms_checkpoints where = old_folder();
    bool found;
    const ms_result result = ms_load_checkpoint(r->chain.model, &where, NULL, &found);
    assert_true(found == (result == MS_RESULT_OK));
    return result;
}

typedef struct act {
    const char *name;
    ms_result (*run)(run *r);
    bool loads, of_new; // model
    const char *text;   // of a full disk; NULL: nothing is written to it
} act;

static const act acts[] = {
    {"ms_save", act_save, false, false, NULL},
    {"ms_save_file", act_save_file, false, false, "disk full"},
    {"ms_save_checkpoint", act_save_checkpoint, false, false, "disk full"},
    {"ms_save_begin, ms_snapshot_write_file", act_snapshot, false, false, ""},
    {"ms_load", act_load, true, false, NULL},
    {"ms_load into a new model", act_load, true, true, NULL},
    {"ms_load_checkpoint", act_load_checkpoint, true, false, NULL},
    {"ms_load_checkpoint into a new model", act_load_checkpoint, true, true, NULL},
};
enum { ACTS = sizeof acts / sizeof acts[0] };

/* A model for an act: new, or of a run that is further than what is on disk. */
static void act_start(const act *what, run *r, const ms_config *config) {
    if (what->of_new) {
        run_open(r, config, true);
    } else {
        run_start(r, config, true);
        for (int i = 0; i < 3; ++i) {
            run_step(r);
        }
    }
}

/* After an act of `a`. If it has failed, what was on disk is there, and `a` has the values of its
   twin, for which nothing has failed, and trains on like it. Loads are then done again, by both. */
static void act_check(const act *what, run *a, bool failed) {
    static t_file expected;
    const ms_config config = t_config();
    run twin;
    act_start(what, &twin, &config);
    if (failed && what->of_new) {
        t_error(a->chain.model, ms_step(a->chain.model, NULL), MS_RESULT_ORDER);
        assert_true(a->position == 0);
    } else if (failed || !what->loads) {
        t_file_clear(&expected);
        t_ok(twin.chain.model, t_save(twin.chain.model, &expected));
        expect_unchanged(a, &expected, what->name);
        run_same(a, &twin, 2);
    }
    if (failed) {
        old_files_expect(what->name);
    }
    if (what->loads) {
        t_ok(a->chain.model, failed ? what->run(a) : MS_RESULT_OK);
        t_ok(twin.chain.model, what->run(&twin));
        expect_unchanged(a, &one, what->name);
        run_same(a, &twin, 2);
    }
    ms_destroy(twin.chain.model);
}

static void every_allocation_fails_once(void **state) {
    (void)state;
    for (int k = 0; k < ACTS; ++k) {
        t_heap heap;
        memset(&heap, 0, sizeof heap);
        ms_config config = t_config();
        config.allocator = t_heap_allocator(&heap);
        t_failing f = t_failing_heap(&heap);
        old_files_make();
        while (t_next_failure(&f, 1)) {
            run a;
            act_start(&acts[k], &a, &config);
            const uint64_t bytes = heap.live_bytes, count = heap.live_count;
            t_arm(&f);
            const ms_result result = acts[k].run(&a);
            const bool failed = t_failed(&f, a.chain.model, result);
            if (heap.live_bytes != bytes || heap.live_count != count) {
                fail_msg("%s leaks after allocation %u", acts[k].name, (unsigned)f.at);
            }
            act_check(&acts[k], &a, failed);
            ms_destroy(a.chain.model);
        }
        old_files_remove();
        assert_true(f.error_count >= 5); // names, header, items, sums and more
    }
}

/* Runs an act on a disk where no file gets more bytes than these. */
static ms_result act_within(const act *what, run *r, uint64_t bytes) {
    struct rlimit all, less;
    void (*const handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &all), 0);
    less = all;
    less.rlim_cur = (rlim_t)bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &less), 0);
    const ms_result result = what->run(r); // nothing is printed meanwhile
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &all), 0);
    signal(SIGXFSZ, handler);
    return result;
}

static void full_disks(void **state) {
    (void)state;
    const ms_config config = t_config();
    for (int k = 0; k < ACTS; ++k) {
        if (!acts[k].text) {
            continue;
        }
        old_files_make();
        bool fails = true;
        for (int at = 0; fails; ++at) {
            run a;
            uint64_t header;
            act_start(&acts[k], &a, &config);
            t_ok(a.chain.model, act_save(&a));
            memcpy(&header, two.data, 8);
            const uint64_t whole = two.bytes;
            // ends before and in the length of the header, in it, in the data, at the last byte
            const uint64_t room[] = {0,         3,    8 + header / 2, (8 + header + whole) / 2,
                                     whole - 1, whole};
            fails = room[at] < whole;
            const ms_result result = act_within(&acts[k], &a, room[at]);
            if (result != (fails ? MS_RESULT_FILE : MS_RESULT_OK)) {
                fail_msg("%s with room for %u of %u bytes: %s", acts[k].name, (unsigned)room[at],
                         (unsigned)whole, ms_result_name(result));
            }
            t_text_has(ms_last_error(a.chain.model), fails ? acts[k].text : "");
            act_check(&acts[k], &a, fails);
            ms_destroy(a.chain.model);
        }
        old_files_remove();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_run_goes_on),
        cmocka_unit_test(other_formats_are_converted_and_told),
        cmocka_unit_test(sums_are_those_of_the_specification),
        cmocka_unit_test(names_are_unique_and_as_written),
        cmocka_unit_test(damage_is_found),
        cmocka_unit_test(headers_are_not_trusted),
        cmocka_unit_test(unusual_headers_are_read),
        cmocka_unit_test(other_runs_are_refused),
        cmocka_unit_test(values_of_other_software),
        cmocka_unit_test(large_matrices_are_transposed),
        cmocka_unit_test(a_part_of_a_run),
        cmocka_unit_test(a_part_of_a_step),
        cmocka_unit_test(failing_sinks_and_sources),
        cmocka_unit_test(calls_out_of_turn),
        cmocka_unit_test(checkpoints_of_a_folder),
        cmocka_unit_test(snapshots_are_checkpoints_of_a_folder),
        cmocka_unit_test(a_snapshot_is_the_file),
        cmocka_unit_test(a_run_of_own_files_goes_on),
        cmocka_unit_test(files_of_python),
        cmocka_unit_test(every_allocation_fails_once),
        cmocka_unit_test(full_disks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
