/*  test_models.c - losses, logits and gradients of whole models against those that transformers
    computes in float64 (tests/reference). */
#include "private.h"
#include "testing.h"
#include "nn.h"
#include "testing_nn.h"
#include "reference/models.h"

/* How a model is planned and computed. */
typedef struct way {
    const char *name;
    ms_dtype dtype;
    int64_t tile_rows; // 0: as the plan sees fit
    bool is_tight;     // the least memory, by recomputing
    bool evaluates;    // first
    bool is_other;     // blocks are layers and scores are kept, in models that can be told so
    double share;      // how far values may be off
} way;

/* Shares of the size of a tensor. The largest that were seen are 3e-6 in float32, where sums round;
   0.06 in BF16 and 0.01 in F16, whose roundings add up over the layers. */
static const way ways[] = {
    {"the plain plan", MS_DTYPE_F32, 0, false, false, false, 1e-5},
    {"blocks, after an evaluation", MS_DTYPE_F32, 0, false, true, true, 1e-5},
    {"the smallest budget", MS_DTYPE_F32, 0, true, true, false, 1e-5},
    {"tiles", MS_DTYPE_F32, 5, false, true, false, 1e-5},
    {"BF16", MS_DTYPE_BF16, 0, false, true, false, 0.16},
    {"BF16 in tiles", MS_DTYPE_BF16, 5, false, false, false, 0.16},
    {"F16", MS_DTYPE_F16, 0, false, true, false, 0.02},
    {"F16, the smallest budget", MS_DTYPE_F16, 0, true, false, false, 0.02},
};

/* Of gradients, so that in F16 they are no subnormal numbers. */
static const float f16_scale = 1024.0f;

typedef struct trained {
    const r_model *what;
    const way *how;
    ms_model *model;
    nn_net *net;
    nn_transformer t;
} trained;

// ---- the formulas of models.py

/* FNV-1a. */
static uint64_t key_of(const char *name) {
    uint64_t key = 0xcbf29ce484222325u;
    for (; *name != '\0'; name++) {
        key = (key ^ (uint64_t)(unsigned char)*name) * 0x100000001b3u;
    }
    return key;
}

static uint64_t bits(uint64_t key, int i) {
    return nn_mix(key ^ nn_mix((uint64_t)i));
}

static float unit(uint64_t key, int i) {
    return (float)((int64_t)(bits(key, i) >> 40) - 8388608) / 8388608.0f;
}

static int32_t below(const char *name, uint64_t limit, int i) {
    return (int32_t)(bits(key_of(name), i) % limit);
}

// ---- a model

static void register_model(trained *n) {
    if (n->what->set_llama != NULL) {
        nn_llama_config config;
        memset(&config, 0, sizeof config);
        n->what->set_llama(&config);
        n->t = nn_llama(n->net, &config);
        return;
    }
    nn_transformer_config config;
    memset(&config, 0, sizeof config);
    n->what->set_transformer(&config);
    config.granularity = n->how->is_other ? NN_BLOCKS : NN_OPERATORS;
    config.save_scores = n->how->is_other;
    n->t = n->what->is_bert ? nn_bert(n->net, &config) : nn_gpt2(n->net, &config);
}

static float *floats(uint64_t count) {
    float *values = (float *)malloc((size_t)count * sizeof(float));
    assert_non_null(values);
    return values;
}

static const nn_param_info *find(const trained *n, const r_param *param) {
    const nn_param_info *info = nn_find_param(n->net, param->name);
    if (info == NULL) {
        fail_msg("%s has no %s", n->what->name, param->name);
    }
    assert_int_equal(ms_tensor_count(n->model, info->tensor), param->count);
    return info;
}

static void write_values(const trained *n) {
    assert_int_equal(nn_param_count(n->net), n->what->param_count);
    for (int k = 0; k < n->what->param_count; k++) {
        const r_param *param = &n->what->params[k];
        const uint64_t key = key_of(param->name);
        float *values = floats((uint64_t)param->count);
        for (int i = 0; i < param->count; i++) {
            values[i] = param->base + param->scale * unit(key, i);
        }
        t_ok(n->model, ms_write(n->model, find(n, param)->tensor, values));
        free(values);
    }
}

static void write_batch(const trained *n) {
    enum { ROWS = R_BATCH * R_SEQUENCE };
    int32_t tokens[ROWS], segments[ROWS], targets[ROWS];
    for (int i = 0; i < ROWS; i++) {
        tokens[i] = below("tokens", R_VOCABULARY, i);
        segments[i] = below("segments", 2, i);
        targets[i] = below("ignored", 5, i) == 0 ? -1 : below("targets", R_VOCABULARY, i);
    }
    t_ok(n->model, ms_write(n->model, n->t.tokens, tokens));
    t_ok(n->model, ms_write(n->model, n->t.targets, targets));
    if (n->t.segments.id != 0) {
        t_ok(n->model, ms_write(n->model, n->t.segments, segments));
    }
}

static void start(trained *n, const r_model *what, const way *how) {
    ms_config config = t_device_config();
    config.early_update = MS_SWITCH_OFF;
    config.force_optimize = how->is_tight;
    config.mixed_dtype = how->dtype;
    config.mixed_precision = how->dtype != MS_DTYPE_F32 ? MS_SWITCH_ON : MS_SWITCH_OFF;
    config.loss_scaling.initial = f16_scale;
    memset(n, 0, sizeof *n);
    n->what = what;
    n->how = how;
    assert_int_equal(ms_create(&config, &n->model), MS_RESULT_OK);
    n->net = nn_create_on(n->model, t_nn_device());
    assert_non_null(n->net);
    nn_force_half(n->net, how->dtype != MS_DTYPE_F32);
    nn_force_tiles(n->net, how->tile_rows);
    register_model(n);
    if (how->evaluates) {
        ms_add_eval_output(n->model, n->t.logits);
    } else {
        ms_add_output(n->model, n->t.logits);
    }
    t_ok(n->model, ms_wrap(n->model));
    assert_int_equal(t_is_half(n->model), how->dtype != MS_DTYPE_F32);
    write_values(n);
    write_batch(n);
}

static void stop(trained *n) {
    ms_destroy(n->model);
    nn_destroy(n->net);
}

// ---- what is compared

static void expect_near(const trained *n, const char *name, const char *part, double value,
                        double expected, double size) {
    if (!(fabs(value - expected) <= n->how->share * size)) { // a NaN is far
        fail_msg("%s, %s: the %s of %s is %.9g, not %.9g; off by %.2g of %.3g", n->what->name,
                 n->how->name, part, name, value, expected, fabs(value - expected) / size, size);
    }
}

static int spread(int k, int places, int count) {
    return (int)((int64_t)k * (count - 1) / (places - 1));
}

/* A norm and elements, among which may be some that cancel to nothing: these have no digits. */
static void expect_values(const trained *n, const char *name, const float *values, int count,
                          double norm, const double *elements, int places) {
    double squares = 0.0;
    for (int i = 0; i < count; i++) {
        squares += (double)values[i] * (double)values[i];
    }
    expect_near(n, name, "norm", sqrt(squares), norm, norm);
    const double usual = norm / sqrt((double)count);
    for (int k = 0; k < places; k++) {
        expect_near(n, name, "element", (double)values[spread(k, places, count)], elements[k],
                    3.0 * usual + fabs(elements[k]));
    }
}

static void expect_logits(const trained *n) {
    const int count = R_BATCH * R_SEQUENCE * R_VOCABULARY;
    assert_int_equal(ms_tensor_count(n->model, n->t.logits), count);
    float *values = floats((uint64_t)count);
    t_ok(n->model, ms_read(n->model, n->t.logits, values));
    expect_values(n, "the logits", values, count, n->what->logits_norm, n->what->logits, R_LOGITS);
    free(values);
}

static void expect_gradient(const trained *n, const r_param *param) {
    const float scale = n->how->dtype == MS_DTYPE_F16 ? f16_scale : 1.0f;
    const uint64_t key = ~key_of(param->name);
    double projection = 0.0;
    float *values = floats((uint64_t)param->count);
    t_ok(n->model, ms_read(n->model, ms_gradient(n->model, find(n, param)->tensor), values));
    for (int i = 0; i < param->count; i++) {
        values[i] /= scale;
        projection += (double)unit(key, i) * (double)values[i];
    }
    expect_near(n, param->name, "projection", projection, param->projection, param->norm);
    expect_values(n, param->name, values, param->count, param->norm, param->elements, R_ELEMENTS);
    free(values);
}

static void expect_loss(const trained *n, double loss) {
    const double expected = n->what->losses / (R_BATCH * R_SEQUENCE);
    expect_near(n, "the losses", "mean", loss, expected, expected);
}

static void expect_plan(const trained *n) {
    ms_memory_report report;
    t_report(n->model, &report);
    assert_true(report.recompute_count > 0 || !n->how->is_tight);
    assert_int_equal(t_is_applied(n->model, MS_TECHNIQUE_TILING), n->how->tile_rows > 0);
}

static void check(const r_model *what, const way *how) {
    double loss = 0.0;
    trained n;
    start(&n, what, how);
    expect_plan(&n);
    if (how->evaluates) {
        t_ok(n.model, ms_eval(n.model, &loss));
        expect_loss(&n, loss);
        expect_logits(&n);
    }
    t_ok(n.model, ms_forward(n.model, &loss));
    expect_loss(&n, loss);
    t_ok(n.model, ms_backward(n.model));
    if (!how->evaluates) {
        expect_logits(&n);
    }
    for (int k = 0; k < what->param_count; k++) {
        expect_gradient(&n, &what->params[k]);
    }
    stop(&n);
}

static void check_all(int first, int last) {
    for (size_t m = 0; m < sizeof r_models / sizeof r_models[0]; m++) {
        for (int k = first; k <= last; k++) {
            check(&r_models[m], &ways[k]);
        }
    }
}

static void models_in_f32(void **state) {
    (void)state;
    check_all(0, 3);
}

static void models_in_16_bits(void **state) {
    (void)state;
    check_all(4, 7);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_in_f32),
        cmocka_unit_test(models_in_16_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
