/*  test_frozen.c - frozen params of any dtype, and buffers and inputs that no layer changes: with their
    homes on the host, under every technique, the bits are those of the same plan with all of them on the
    device. */
#include "private.h"

#include "testing.h"

#include "files.h"

enum { LAYERS = 4, WIDTH = 32, BATCH = 24, MOST_BATCH = 32, STEPS = 3 };

/* A net of layers y = tanh(x a + frozen + rows + columns): a is trained, frozen is a param of any dtype,
   rows (B, W) a buffer that tiles cut, columns (W) one that they do not. */
typedef struct net {
    ms_model *m;
    ms_tensor x, a[LAYERS], frozen[LAYERS], rows[LAYERS], columns[LAYERS], loss;
    ms_axis batch;
} net;

/* One way to plan; everything is the same in the net whose values stay on the device. */
typedef struct way {
    const char *name;
    ms_dtype half; // what calls are forced into
    ms_switch masters;
    ms_technique forced; // on what the layers make; COUNT: none
    uint32_t micros;
    float clip;
    bool has_axis, codes, early, debug, slices, suspends;
} way;

static const way ways[] = {
    {"plain", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_TECHNIQUE_COUNT, 1, 0, 0, 0, 0, 0, 0, 0},
    {"axis", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_TECHNIQUE_COUNT, 1, 0, 1, 0, 0, 0, 0, 0},
    {"recomputed", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_TECHNIQUE_CHECKPOINTING, 1, 0, 1, 0, 1, 0, 0,
     0},
    {"tiles", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_TECHNIQUE_TILING, 1, 0, 1, 0, 0, 0, 0, 0},
    {"offloaded", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_TECHNIQUE_OFFLOADING, 3, 0, 0, 0, 0, 0, 0, 0},
    {"BF16", MS_DTYPE_BF16, MS_SWITCH_DEFAULT, MS_TECHNIQUE_TILING, 2, 0, 0, 1, 0, 0, 0, 0},
    {"F16", MS_DTYPE_F16, MS_SWITCH_OFF, MS_TECHNIQUE_CHECKPOINTING, 1, 1, 0, 0, 0, 0, 0, 0},
    {"slices", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_TECHNIQUE_TILING, 1, 0, 0, 0, 1, 0, 1, 0},
    {"suspended", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_TECHNIQUE_COUNT, 2, 1, 1, 0, 0, 0, 0, 1},
    {"debug", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_TECHNIQUE_TILING, 1, 0, 0, 0, 0, 1, 0, 0},
};
enum { WAYS = sizeof ways / sizeof ways[0] };

static const ms_dtype dtypes[] = {MS_DTYPE_U8,  MS_DTYPE_I8,  MS_DTYPE_F16, MS_DTYPE_BF16,
                                  MS_DTYPE_F64, MS_DTYPE_I16, MS_DTYPE_I32, MS_DTYPE_I64};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

/* Element i of a frozen param, as a number of about 1. */
static float number_at(const ms_view *v, int64_t i) {
    const uint8_t *at = (const uint8_t *)v->data + (uint64_t)i * ms_dtype_bytes(v->dtype);
    double wide;
    int64_t integer = 0;
    if (msi_is_float(v->dtype) && v->dtype != MS_DTYPE_F64) {
        return msi_load(v->data, v->dtype, (uint64_t)i);
    }
    if (v->dtype == MS_DTYPE_F64) {
        memcpy(&wide, at, sizeof wide);
        return (float)wide;
    }
    memcpy(&integer, at, (size_t)ms_dtype_bytes(v->dtype));
    return (float)(integer & 255) / 128.0f - 1.0f;
}

static int forward(const ms_call *c) {
    const int64_t rows = c->in[0].shape.dim[0];
    const uint8_t *columns = (const uint8_t *)c->in[2].data;
    for (int64_t i = 0; i < rows * WIDTH; ++i) {
        const uint64_t n = (uint64_t)i, k = n % WIDTH;
        const float x = msi_load(c->in[0].data, c->in[0].dtype, n);
        const float a = msi_load(c->param[0].data, c->param[0].dtype, k);
        const float rest = msi_load(c->in[1].data, c->in[1].dtype, n) + (float)columns[k] / 256.0f;
        msi_store_as(c->out[0].data, c->out[0].dtype, n,
                     tanhf(x * a + 0.25f * number_at(&c->param[1], (int64_t)k) + 0.125f * rest));
    }
    return 0;
}

static int backward(const ms_call *c) {
    const int64_t rows = c->in[0].shape.dim[0];
    float sum[WIDTH] = {0};
    for (int64_t i = 0; i < rows * WIDTH; ++i) {
        const uint64_t n = (uint64_t)i, k = n % WIDTH;
        const uint8_t *columns = (const uint8_t *)c->in[2].data; // read again: fetched again
        const float x = msi_load(c->in[0].data, c->in[0].dtype, n);
        const float a = msi_load(c->param[0].data, c->param[0].dtype, k);
        const float rest = msi_load(c->in[1].data, c->in[1].dtype, n) + (float)columns[k] / 256.0f;
        const float y = tanhf(x * a + 0.25f * number_at(&c->param[1], (int64_t)k) + 0.125f * rest);
        const float slope = (1.0f - y * y) * msi_load(c->grad_out[0].data, c->grad_out[0].dtype, n);
        if (c->grad_in[0].data) {
            const float old = c->grad_in[0].beta != 0.0f
                                  ? msi_load(c->grad_in[0].data, c->grad_in[0].dtype, n)
                                  : 0.0f;
            msi_store_as(c->grad_in[0].data, c->grad_in[0].dtype, n, old + slope * a);
        }
        sum[k] += slope * x;
    }
    for (int k = 0; k < WIDTH && c->grad_param[0].data; ++k) {
        float *to = (float *)c->grad_param[0].data + k;
        *to = (c->grad_param[0].beta != 0.0f ? *to : 0.0f) + sum[k];
    }
    return 0;
}

static int loss_forward(const ms_call *c) {
    for (int64_t r = 0; r < c->in[0].shape.dim[0]; ++r) {
        float sum = 0.0f;
        for (int64_t k = 0; k < WIDTH; ++k) {
            const float x = msi_load(c->in[0].data, c->in[0].dtype, (uint64_t)(r * WIDTH + k));
            sum += (x - 0.5f) * (x - 0.5f);
        }
        ((float *)c->out[0].data)[r] = sum;
    }
    return 0;
}

static int loss_backward(const ms_call *c) {
    for (int64_t i = 0; i < c->in[0].shape.dim[0] * WIDTH; ++i) {
        const float x = msi_load(c->in[0].data, c->in[0].dtype, (uint64_t)i);
        msi_store_as(c->grad_in[0].data, c->grad_in[0].dtype, (uint64_t)i,
                     2.0f * (x - 0.5f) * ((const float *)c->grad_out[0].data)[i / WIDTH]);
    }
    return 0;
}

static ms_shape by_rows(const net *n, int64_t cols) {
    const ms_shape shape = ms_shape2(BATCH, cols);
    return n->batch.id ? ms_along(shape, 0, n->batch) : shape;
}

static ms_tensor add_layer(net *n, const way *w, int i, ms_tensor x, ms_dtype dtype) {
    ms_layer_desc d = t_new_layer("mix", forward, backward, NULL);
    d.in[0] = x;
    d.in[1] = n->rows[i] = ms_buffer(n->m, "rows", MS_DTYPE_F32, by_rows(n, WIDTH));
    d.in[2] = n->columns[i] = ms_buffer(n->m, "columns", MS_DTYPE_U8, ms_shape1(WIDTH));
    d.param[0] = n->a[i] = ms_param(n->m, "a", MS_DTYPE_F32, ms_shape2(1, WIDTH));
    d.param[1] = n->frozen[i] = ms_param(n->m, "frozen", dtype, ms_shape1(WIDTH));
    d.out[0] = ms_activation(n->m, "y", MS_DTYPE_F32, by_rows(n, WIDTH));
    ms_set_frozen(n->m, n->frozen[i], true);
    d.backward_reads.in = 7;
    d.backward_reads.param = 3;
    d.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
    d.tile.axes = 1;
    d.tile.whole_in = 4;
    d.tile.preferred = 7;
    const ms_layer layer = ms_register_layer(n->m, &d);
    if (w->forced != MS_TECHNIQUE_COUNT) {
        ms_set_tensor_technique(n->m, d.out[0], w->forced, MS_SWITCH_ON);
    }
    if (w->half != MS_DTYPE_F32) {
        ms_set_layer_technique(n->m, layer, MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
    }
    if (w->early) {
        ms_set_tensor_technique(n->m, n->a[i], MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
    }
    return d.out[0];
}

static void write_values(net *n, int64_t batch) {
    static uint8_t bytes[8 * WIDTH];
    static float floats[MOST_BATCH * WIDTH];
    t_rng rng = t_seed(9);
    for (int i = 0; i < LAYERS; ++i) {
        const ms_dtype dtype = ms_tensor_dtype(n->m, n->frozen[i]);
        t_fill(&rng, floats, WIDTH, 0.7f);
        t_ok(n->m, ms_write(n->m, n->a[i], floats));
        for (uint64_t k = 0; k < WIDTH; ++k) {
            const double wide = t_unit(&rng) - 0.5;
            const uint64_t bits = t_next(&rng);
            memcpy(bytes + 8 * k, &bits, sizeof bits);
            if (dtype == MS_DTYPE_F64) {
                memcpy(bytes + 8 * k, &wide, sizeof wide);
            } else if (msi_is_float(dtype)) {
                msi_store_as(bytes, dtype, k, (float)wide);
            }
        }
        t_ok(n->m, ms_write(n->m, n->frozen[i], bytes));
        for (int k = 0; k < WIDTH; ++k) {
            bytes[k] = (uint8_t)t_below(&rng, 256);
        }
        t_ok(n->m, ms_write(n->m, n->columns[i], bytes));
        t_fill(&rng, floats, (uint64_t)batch * WIDTH, 1.0f);
        t_ok(n->m, ms_write(n->m, n->rows[i], floats));
    }
}

/* Forces all that can have its home on the host to be there; `some` leaves half of it to the plan. */
static void move_all(net *n, bool some) {
    for (int i = 0; i < LAYERS; ++i) {
        const ms_tensor all[] = {n->frozen[i], n->rows[i], n->columns[i], n->a[i]};
        for (int k = 0; k < 4; ++k) {
            if (!some || (i + k) % 2 == 0) {
                ms_set_tensor_technique(n->m, all[k], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
            }
        }
    }
    ms_set_tensor_technique(n->m, n->x, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
}

/* The device of the nets that are made; NULL: the CPU. */
static t_device *their_device;

static void make_net(net *n, const way *w, ms_dtype first, bool moves) {
    ms_config config = t_config();
    config.backend = their_device ? t_device_backend(their_device) : config.backend;
    memset(n, 0, sizeof *n);
    config.memory_budget_bytes = UINT64_MAX;
    config.mixed_dtype = w->half;
    config.master_weights = w->masters;
    config.accumulation_steps = w->micros;
    config.debug = w->debug;
    config.optimizer_8bit = MS_SWITCH_OFF;
    assert_int_equal(ms_create(&config, &n->m), MS_RESULT_OK);
    if (w->has_axis) {
        n->batch = ms_add_axis(n->m, "batch", BATCH, MOST_BATCH);
    }
    ms_optimizer_desc o = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
    o.grad_clip_norm = w->clip;
    o.learning_rate = 0.01f;
    o.state_format[0] = w->codes ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
    ms_set_optimizer(n->m, &o);
    ms_tensor x = n->x = ms_input(n->m, "x", MS_DTYPE_F32, by_rows(n, WIDTH));
    for (int i = 0; i < LAYERS; ++i) {
        x = add_layer(n, w, i, x, dtypes[((size_t)first + (size_t)i) % DTYPES]);
    }
    ms_layer_desc d = t_new_layer("loss", loss_forward, loss_backward, NULL);
    d.in[0] = x;
    d.out[0] = n->loss = ms_activation(n->m, "losses", MS_DTYPE_F32, by_rows(n, 1));
    d.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
    d.dtypes.f32_out = 1;
    d.overwrites.in = 1;
    d.tile.axes = 1;
    ms_register_layer(n->m, &d);
    ms_set_loss(n->m, n->loss);
    if (moves) {
        move_all(n, false);
    }
    write_values(n, BATCH); // before there is a plan
    t_ok(n->m, ms_wrap(n->m));
}

static double take_step(net *n, const way *w, int64_t batch, uint64_t seed) {
    static float x[MOST_BATCH * WIDTH];
    double loss = 0.0;
    t_rng rng = t_seed(seed);
    for (uint32_t micro = 0; micro < w->micros; ++micro) {
        t_fill(&rng, x, (uint64_t)batch * WIDTH, 1.0f);
        t_ok(n->m, ms_write(n->m, n->x, x));
        if (w->slices) {
            ms_result r = MS_RESULT_MORE;
            while ((r = ms_step_slice(n->m, 1, &loss)) == MS_RESULT_MORE) {
            }
            t_ok(n->m, r);
        } else if (w->suspends) {
            t_ok(n->m, ms_forward(n->m, &loss));
            t_ok(n->m, ms_suspend(n->m, NULL));
            t_ok(n->m, ms_resume(n->m));
            t_ok(n->m, ms_backward(n->m));
        } else {
            t_ok(n->m, ms_step(n->m, &loss));
        }
    }
    if (w->suspends) {
        t_ok(n->m, ms_update(n->m));
    }
    return loss;
}

static void expect_equal(net *a, net *b, ms_tensor of_a, ms_tensor of_b) {
    static uint8_t bytes[2][MOST_BATCH * WIDTH * 8];
    t_ok(a->m, ms_read(a->m, of_a, bytes[0]));
    t_ok(b->m, ms_read(b->m, of_b, bytes[1]));
    assert_memory_equal(bytes[0], bytes[1], (size_t)ms_tensor_bytes(a->m, of_a));
}

static void expect_same(net *a, net *b) {
    for (int i = 0; i < LAYERS; ++i) {
        expect_equal(a, b, a->a[i], b->a[i]);
        expect_equal(a, b, a->frozen[i], b->frozen[i]);
        expect_equal(a, b, a->rows[i], b->rows[i]);
        expect_equal(a, b, a->columns[i], b->columns[i]);
        expect_equal(a, b, ms_optimizer_state(a->m, a->a[i], 1),
                     ms_optimizer_state(b->m, b->a[i], 1));
    }
}

static void expect_steps_alike(net *a, net *b, const way *w, int64_t batch, uint64_t seed) {
    for (uint64_t i = 0; i < STEPS; ++i) {
        const double one = take_step(a, w, batch, seed + i),
                     other = take_step(b, w, batch, seed + i);
        if (memcmp(&one, &other, sizeof one) != 0) {
            print_error("%s: %.17g here, %.17g there\n", w->name, one, other);
            fail();
        }
    }
    expect_same(a, b);
}

/* How many values of each category are on the host. */
static void count_homes(const ms_lifetime *l, void *user) {
    uint32_t *homes = (uint32_t *)user;
    homes[l->category] += l->is_resident && l->is_on_host;
}

static void homes_change_no_bit(void **state) {
    (void)state;
    for (int k = 0; k < WAYS; ++k) {
        for (int first = 0; first < DTYPES; first += k == 0 ? 1 : 3) {
            const way *w = &ways[k];
            net still, moved;
            make_net(&still, w, (ms_dtype)first, false);
            make_net(&moved, w, (ms_dtype)first, true);
            uint32_t homes[MS_CATEGORY_COUNT] = {0};
            t_ok(moved.m, ms_visit_lifetimes(moved.m, MS_PROGRAM_TRAIN, count_homes, homes));
            assert_int_equal(homes[MS_CATEGORY_PARAM], 2 * LAYERS);
            assert_int_equal(homes[MS_CATEGORY_BUFFER], 2 * LAYERS);
            assert_int_equal(homes[MS_CATEGORY_INPUT], 1);
            expect_steps_alike(&still, &moved, w, BATCH, 100);
            double losses[2];
            t_ok(still.m, ms_eval(still.m, &losses[0]));
            t_ok(moved.m, ms_eval(moved.m, &losses[1]));
            assert_memory_equal(&losses[0], &losses[1], sizeof losses[0]);
            if (w->has_axis) {
                const int64_t most[MS_LIMIT_AXES] = {MOST_BATCH};
                t_ok(still.m, ms_reshape(still.m, most));
                t_ok(moved.m, ms_reshape(moved.m, most));
                write_values(&still, MOST_BATCH);
                write_values(&moved, MOST_BATCH);
                expect_steps_alike(&still, &moved, w, MOST_BATCH, 200);
            }
            ms_destroy(still.m);
            ms_destroy(moved.m);
        }
    }
}

/* From a plan to the next: nothing is lost, nothing changes. */
static void plans_may_change_between_steps(void **state) {
    (void)state;
    const way *w = &ways[0];
    net still, moved;
    make_net(&still, w, MS_DTYPE_F32, false);
    make_net(&moved, w, MS_DTYPE_F32, false);
    for (int k = 0; k < 4; ++k) {
        if (k < 2) {
            move_all(&moved, k == 0);
        }
        t_ok(moved.m, k == 2 ? ms_detach(moved.m) : ms_wrap(moved.m));
        expect_steps_alike(&still, &moved, w, BATCH, 300 + 10 * (uint64_t)k);
    }
    ms_verify_report report;
    t_ok(moved.m, ms_verify(moved.m, NULL, NULL, &report));
    assert_int_equal(report.differ_count, 0);
    ms_destroy(still.m);
    ms_destroy(moved.m);
}

/* Of a file every dtype comes back, under any plan; what is not finite is refused only of floats. */
static void runs_are_saved_and_loaded(void **state) {
    (void)state;
    const way *w = &ways[0];
    for (int first = 0; first < DTYPES; ++first) {
        net still, moved;
        static t_file file;
        t_file_clear(&file);
        make_net(&still, w, (ms_dtype)first, false);
        make_net(&moved, w, (ms_dtype)first, true);
        (void)take_step(&moved, w, BATCH, 400);
        t_ok(moved.m, t_save(moved.m, &file));
        uint8_t zeros[8 * WIDTH] = {0};
        for (int i = 0; i < LAYERS; ++i) {
            t_ok(still.m, ms_write(still.m, still.frozen[i], zeros));
        }
        t_ok(still.m, t_load(still.m, &file, NULL));
        expect_same(&still, &moved);
        expect_steps_alike(&still, &moved, w, BATCH, 500);
        memset(zeros, 0xff, sizeof zeros); // a NaN, or -1
        t_ok(moved.m, ms_write(moved.m, moved.frozen[0], zeros));
        t_file_clear(&file);
        t_ok(moved.m, t_save(moved.m, &file));
        const bool is_float = msi_is_float(dtypes[first]);
        t_error(still.m, t_load(still.m, &file, NULL), is_float ? MS_RESULT_INVALID : MS_RESULT_OK);
        ms_destroy(still.m);
        ms_destroy(moved.m);
    }
}

/* A step, an eval, and values of homes that are written and read; the first error. */
static ms_result live(net *n) {
    static float x[BATCH * WIDTH];
    uint8_t bytes[WIDTH * 8] = {1}, rows[BATCH * WIDTH * 4];
    double loss;
    ms_result result = ms_write(n->m, n->x, x);
    result = result == MS_RESULT_OK ? ms_step(n->m, &loss) : result;
    result = result == MS_RESULT_OK ? ms_write(n->m, n->frozen[0], bytes) : result;
    result = result == MS_RESULT_OK ? ms_read(n->m, n->rows[1], rows) : result;
    result = result == MS_RESULT_OK ? ms_eval(n->m, &loss) : result;
    return result == MS_RESULT_OK ? ms_read(n->m, n->frozen[1], bytes) : result;
}

/* What fails says so, and nothing is lost: homes are as they were, and unless an update was cut short the
   net lives on. */
static void every_call_of_the_device_fails_once(void **state) {
    (void)state;
    t_device device;
    memset(&device, 0, sizeof device);
    t_failing f = t_failing_device(&device);
    uint32_t lived_on = 0;
    while (t_next_failure(&f, t_stride(7))) {
        net n, still;
        memset(&device, 0, sizeof device);
        their_device = &device;
        make_net(&n, &ways[0], MS_DTYPE_F32, true);
        t_arm(&f);
        const ms_result result = live(&n);
        (void)t_failed(&f, n.m, result);
        const ms_result again = live(&n);
        assert_true(again == MS_RESULT_OK || again == MS_RESULT_FAILED);
        lived_on += result != MS_RESULT_OK && again == MS_RESULT_OK;
        their_device = NULL;
        make_net(&still, &ways[0], MS_DTYPE_F32, false);
        for (int i = 0; i < LAYERS; ++i) {
            expect_equal(&n, &still, n.rows[i], still.rows[i]);
            expect_equal(&n, &still, n.columns[i], still.columns[i]);
            if (i > 0) { // which nobody has written since
                expect_equal(&n, &still, n.frozen[i], still.frozen[i]);
            }
        }
        ms_destroy(still.m);
        ms_destroy(n.m);
    }
    assert_true(lived_on > 0);
}

/* What the decisions say about the values that are moved. */
static void add_decision(const ms_decision *d, void *user) {
    uint64_t *bytes = (uint64_t *)user;
    for (int c = 0; c < MS_CATEGORY_COUNT && d->technique == MS_TECHNIQUE_OFFLOADING; ++c) {
        bytes[c] += d->saved_bytes_of[c];
    }
}

static void moved_values_are_explained(void **state) {
    (void)state;
    net moved;
    make_net(&moved, &ways[0], MS_DTYPE_F32, true);
    uint64_t bytes[MS_CATEGORY_COUNT] = {0};
    t_ok(moved.m, ms_visit_decisions(moved.m, add_decision, bytes));
    uint64_t params = 0, buffers = 0;
    for (int i = 0; i < LAYERS; ++i) {
        params += msi_align(ms_tensor_bytes(moved.m, moved.frozen[i])) + msi_align(4 * WIDTH);
        buffers += msi_align(4 * BATCH * WIDTH) + msi_align(WIDTH);
    }
    assert_int_equal(bytes[MS_CATEGORY_PARAM], params);
    assert_int_equal(bytes[MS_CATEGORY_BUFFER], buffers);
    assert_int_equal(bytes[MS_CATEGORY_INPUT], msi_align(4 * BATCH * WIDTH));
    ms_destroy(moved.m);
}

enum { MANY = 8, LARGE = 1 << 20 };

static int pass(const ms_call *c) {
    float *to = (float *)(c->phase == MS_PHASE_BACKWARD ? c->grad_in[0].data : c->out[0].data);
    const float *from =
        (const float *)(c->phase == MS_PHASE_BACKWARD ? c->grad_out[0].data : c->in[0].data);
    for (int i = 0; i < WIDTH && to; ++i) {
        to[i] = from[i] * ((const float *)c->param[0].data)[i];
    }
    for (int i = 0; i < WIDTH && c->phase == MS_PHASE_BACKWARD; ++i) {
        ((float *)c->grad_param[0].data)[i] = from[i];
    }
    return 0;
}

/* Adapters beside U8 matrices or buffers of 1 MiB each: by itself a plan for a small budget has as many of
   these on the device as one layer needs. Buffers that layers change stay. */
static void plans_stream_them_of_their_own_accord(void **state) {
    (void)state;
    for (int kind = 0; kind < 3; ++kind) {
        ms_config config = t_config();
        ms_model *m;
        config.offloading = MS_SWITCH_ON;
        config.memory_budget_bytes = 3 * LARGE;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(WIDTH));
        for (int i = 0; i < MANY; ++i) {
            ms_layer_desc d = t_new_layer("pass", pass, pass, NULL);
            const ms_shape shape = ms_shape2(1024, LARGE / 1024);
            d.in[0] = x;
            d.param[0] = ms_param(m, "a", MS_DTYPE_F32, ms_shape1(WIDTH));
            if (kind == 0) {
                d.param[1] = ms_param(m, "base", MS_DTYPE_U8, shape);
                ms_set_frozen(m, d.param[1], true);
            } else {
                *(kind == 1 ? &d.in[1] : &d.state[0]) = ms_buffer(m, "base", MS_DTYPE_U8, shape);
                d.recompute_keeps_state = kind == 2;
            }
            d.out[0] = x = ms_activation(m, "y", MS_DTYPE_F32, ms_shape1(WIDTH));
            d.overwrites.in = d.overwrites.param = 1;
            ms_register_layer(m, &d);
        }
        ms_set_loss(m, x);
        t_error(m, ms_wrap(m), kind < 2 ? MS_RESULT_OK : MS_RESULT_BUDGET);
        uint64_t smallest;
        t_ok(m, ms_smallest_budget(m, &smallest));
        assert_true(kind < 2 ? smallest < LARGE + LARGE / 8 : smallest > MANY * LARGE);
        if (kind < 2) {
            ms_memory_report r;
            t_report(m, &r);
            assert_true(r.arena_bytes <= 3 * LARGE && r.host_bytes >= (MANY - 3) * LARGE);
        }
        ms_destroy(m);
    }
}

/* 2 flops per weight and vector, where the bytes of a matrix in blocks are no weights. */
static void flops_of_matrices_in_blocks_are_those_of_their_elements(void **state) {
    (void)state;
    static const ms_dtype of[] = {MS_DTYPE_F32, MS_DTYPE_U8, MS_DTYPE_U8};
    for (int k = 0; k < 3; ++k) {
        ms_config config = t_config();
        ms_model *m;
        config.dry_run = true;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        ms_layer_desc d = t_new_layer("linear", NULL, NULL, NULL);
        d.in[0] = k < 2 ? ms_input(m, "x", MS_DTYPE_F32, ms_shape2(10, 64))
                        : ms_input(m, "ids", MS_DTYPE_I32, ms_shape1(10));
        d.param[0] = ms_param(m, "w", of[k], ms_shape2(48, k == 0 ? 64 : 36));
        d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(10, 48));
        ms_register_layer(m, &d);
        const double flops = msi_derived_flops(&m->graph, &m->graph.layers.items[0]);
        assert_true(flops == (k < 2 ? 2.0 * 48 * 64 * 10 : 10.0 * 48));
        ms_destroy(m);
    }
}

/* There is nothing to write or read beside its value. */
static void a_param_that_is_not_f32_has_no_gradient_or_state(void **state) {
    (void)state;
    net n;
    make_net(&n, &ways[0], MS_DTYPE_F32, false);
    for (int i = 0; i < LAYERS; ++i) {
        assert_int_equal(ms_gradient(n.m, n.frozen[i]).id, 0);
        assert_int_equal(ms_optimizer_state(n.m, n.frozen[i], 0).id, 0);
        assert_non_null(ms_data(n.m, n.frozen[i]));
    }
    ms_set_frozen(n.m, n.frozen[1], false);
    t_error(n.m, ms_wrap(n.m), MS_RESULT_UNSUPPORTED);
    t_text_has(ms_last_error(n.m), "has dtype i8, and only f32 can be trained");
    t_ok(n.m, ms_wrap(n.m)); // the error was told, and nothing has changed
    ms_destroy(n.m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(homes_change_no_bit),
        cmocka_unit_test(plans_may_change_between_steps),
        cmocka_unit_test(runs_are_saved_and_loaded),
        cmocka_unit_test(every_call_of_the_device_fails_once),
        cmocka_unit_test(moved_values_are_explained),
        cmocka_unit_test(plans_stream_them_of_their_own_accord),
        cmocka_unit_test(flops_of_matrices_in_blocks_are_those_of_their_elements),
        cmocka_unit_test(a_param_that_is_not_f32_has_no_gradient_or_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
