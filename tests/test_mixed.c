/*  test_mixed.c - values, gradients and params in 16 bits: against arithmetic in double that rounds
    where a plan does; params with and without a master; the loss scale of F16 against an automaton,
    with overflows injected at every layer; what a trainer reads and writes; and what is refused. */
#include "private.h"
#include "toy_layers.h"
#include "files.h"

// ------------------------------------------------------------------------------------------------
// rounding by arithmetic alone

/* A number rounded to so many significant bits, ties to even, with exponents down to `least`. */
static double rounded(double x, int bits, int least) {
    int e;
    (void)frexp(x, &e);
    const double unit = ldexp(1.0, (e - bits > least ? e - bits : least));
    return nearbyint(x / unit) * unit;
}

static double in_dtype(ms_dtype dtype, double x) {
    return dtype == MS_DTYPE_BF16  ? rounded(x, 8, -133)
           : dtype == MS_DTYPE_F16 ? rounded(x, 11, -24)
                                   : (double)(float)x;
}

static void conversions_are_those_of_arithmetic(void **state) {
    (void)state;
    const ms_dtype dtypes[] = {MS_DTYPE_BF16, MS_DTYPE_F16};
    t_rng rng = t_seed(1);
    for (int k = 0; k < 200000; ++k) {
        const ms_dtype dtype = dtypes[k % 2];
        const float x = (float)(t_unit(&rng) * exp2((double)t_below(&rng, 30) - 15.0));
        uint16_t bits[2]; // room for a float
        msi_store_as(bits, dtype, 0, x);
        assert_true((double)msi_load(bits, dtype, 0) == in_dtype(dtype, (double)x));
    }
}

// ------------------------------------------------------------------------------------------------
// a stack of products: y = x * w, with w (COLS) and x (ROWS, COLS); the loss is a sum of squares

enum { ROWS = 3, COLS = 70, MOST_LAYERS = 6, SCALE = 1024 };

typedef struct stack stack;

typedef struct product {
    stack *of;
    int number;
} product;

struct stack {
    ms_model *m;
    int layers;
    ms_tensor x, w[MOST_LAYERS], y[MOST_LAYERS], loss;
    ms_layer layer[MOST_LAYERS];
    product op[MOST_LAYERS];
    int overflow_at; // the layer whose gradient is infinite in this step, or -1
    uint32_t calls_in_half, calls;
};

static float at(const ms_view *view, int64_t i) {
    return msi_load(view->data, view->dtype, (uint64_t)i);
}

static void put(const ms_view *view, int64_t i, float x) {
    const float old = view->beta == 0.0f ? 0.0f : at(view, i);
    msi_store_as(view->data, view->dtype, (uint64_t)i, old + x);
}

static void count_call(const ms_call *call) {
    stack *s = ((const product *)call->user)->of;
    s->calls += 1;
    s->calls_in_half += call->dtype != MS_DTYPE_F32;
    assert_true(call->in[0].dtype == call->dtype || call->dtype == MS_DTYPE_F32);
}

static uint32_t in_place; // mask of the layers, but the first, that compute in place of grad_out

static int product_forward(const ms_call *call) {
    count_call(call);
    for (int64_t i = 0; i < ROWS * COLS && call->out[0].data; ++i) {
        msi_store_as(call->out[0].data, call->out[0].dtype, (uint64_t)i,
                     at(&call->in[0], i) * at(&call->param[0], i % COLS));
    }
    return 0;
}

static int product_backward(const ms_call *call) {
    const product *op = (const product *)call->user;
    count_call(call);
    assert_true(op->number == 0 || !(in_place >> op->number & 1) ||
                call->grad_in[0].data == call->grad_out[0].data);
    for (int64_t c = 0; c < COLS && call->grad_param[0].data; ++c) {
        float sum = 0.0f;
        for (int64_t r = 0; r < ROWS; ++r) {
            sum += at(&call->grad_out[0], r * COLS + c) * at(&call->in[0], r * COLS + c);
        }
        put(&call->grad_param[0], c, op->of->overflow_at == op->number && c == 7 ? INFINITY : sum);
    }
    for (int64_t i = 0; i < ROWS * COLS && call->grad_in[0].data; ++i) {
        put(&call->grad_in[0], i, at(&call->grad_out[0], i) * at(&call->param[0], i % COLS));
    }
    return 0;
}

static int squares_forward(const ms_call *call) {
    for (int64_t r = 0; r < ROWS; ++r) {
        float sum = 0.0f;
        for (int64_t c = 0; c < COLS; ++c) {
            sum += at(&call->in[0], r * COLS + c) * at(&call->in[0], r * COLS + c);
        }
        t_data(&call->out[0])[r] = 0.5f * sum;
    }
    return 0;
}

static int squares_backward(const ms_call *call) {
    for (int64_t i = 0; i < ROWS * COLS; ++i) {
        put(&call->grad_in[0], i, t_data(&call->grad_out[0])[i / COLS] * at(&call->in[0], i));
    }
    return 0;
}

static void stack_register(stack *s, int layers, bool half_gradients) {
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    s->layers = layers;
    s->overflow_at = -1;
    s->x = ms_input(s->m, "x", MS_DTYPE_F32, ms_shape2(ROWS, COLS));
    d.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
    for (int k = 0; k < layers; ++k) {
        char name[32];
        snprintf(name, sizeof name, "product%d", k);
        s->op[k].of = s;
        s->op[k].number = k;
        s->w[k] = ms_param(s->m, "w", MS_DTYPE_F32, ms_shape1(COLS));
        s->y[k] = ms_activation(s->m, "y", MS_DTYPE_F32, ms_shape2(ROWS, COLS));
        d.name = name;
        d.forward = product_forward;
        d.backward = product_backward;
        d.user = &s->op[k];
        d.in[0] = k == 0 ? s->x : s->y[k - 1];
        d.out[0] = s->y[k];
        d.param[0] = s->w[k];
        d.dtypes.half_gradients = half_gradients;
        d.must_grad_in_place = d.grad_in_place[0].grad_out = k > 0 && in_place >> k & 1;
        s->layer[k] = ms_register_layer(s->m, &d);
        ms_set_layer_technique(s->m, s->layer[k], MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
    }
    s->loss = ms_activation(s->m, "losses", MS_DTYPE_F32, ms_shape1(ROWS));
    d.must_grad_in_place = d.grad_in_place[0].grad_out = 0;
    d.name = "squares";
    d.forward = squares_forward;
    d.backward = squares_backward;
    d.in[0] = s->y[layers - 1];
    d.out[0] = s->loss;
    d.param[0].id = 0;
    d.dtypes.half_gradients = 0;
    d.dtypes.f32_out = 1;
    ms_register_layer(s->m, &d);
    ms_set_loss(s->m, s->loss);
}

/* Params around 1, or far from what 16 bits can hold exactly. */
static void stack_write(stack *s, uint64_t seed) {
    float w[COLS], x[ROWS * COLS];
    t_rng rng = t_seed(seed);
    for (int k = 0; k < s->layers; ++k) {
        for (int c = 0; c < COLS; ++c) {
            w[c] = 1.0f + 0.3f * (float)t_unit(&rng);
        }
        t_ok(s->m, ms_write(s->m, s->w[k], w));
    }
    t_fill(&rng, x, ROWS * COLS, 1.0f);
    t_ok(s->m, ms_write(s->m, s->x, x));
}

static void stack_create(stack *s, const ms_config *config, const ms_optimizer_desc *optimizer,
                         int layers, bool half_gradients) {
    memset(s, 0, sizeof *s);
    assert_int_equal(ms_create(config, &s->m), MS_RESULT_OK);
    stack_register(s, layers, half_gradients);
    ms_set_optimizer(s->m, optimizer);
}

static ms_config mixed_config(ms_dtype dtype) {
    ms_config config = t_config();
    config.mixed_dtype = dtype;
    config.loss_scaling.initial = SCALE; // gradients are around 1
    return config;
}

// ------------------------------------------------------------------------------------------------
// a step against arithmetic in double

typedef struct expected {
    double y[MOST_LAYERS + 1][ROWS * COLS], g[ROWS * COLS], w[MOST_LAYERS][COLS];
    double grad[MOST_LAYERS][COLS];
} expected;

/* Forward and backward where each value, and each gradient of one, is rounded to the dtype of its
   layer, of[k]. A layer is called in that of its input, if that is in 16 bits. */
static void expect_step(const stack *s, const ms_dtype *of, bool half_gradients, double factor,
                        expected *e) {
    float w[COLS], x[ROWS * COLS];
    t_ok(s->m, ms_read(s->m, s->x, x));
    for (int i = 0; i < ROWS * COLS; ++i) {
        e->y[0][i] = in_dtype(of[0], (double)x[i]);
    }
    for (int k = 0; k < s->layers; ++k) {
        const ms_dtype call = of[k > 0 ? k - 1 : 0];
        t_ok(s->m, ms_read(s->m, s->w[k], w));
        for (int c = 0; c < COLS; ++c) {
            e->w[k][c] = in_dtype(call, in_dtype(of[k], (double)w[c]));
        }
        for (int i = 0; i < ROWS * COLS; ++i) {
            e->y[k + 1][i] = in_dtype(of[k], in_dtype(call, e->y[k][i] * e->w[k][i % COLS]));
        }
    }
    for (int i = 0; i < ROWS * COLS; ++i) {
        e->g[i] = in_dtype(of[s->layers - 1], factor * e->y[s->layers][i]);
    }
    for (int k = s->layers; k-- > 0;) {
        const ms_dtype call = of[k > 0 ? k - 1 : 0];
        for (int c = 0; c < COLS; ++c) {
            double sum = 0.0;
            for (int r = 0; r < ROWS; ++r) {
                sum += in_dtype(call, e->g[r * COLS + c]) * e->y[k][r * COLS + c];
            }
            e->grad[k][c] = half_gradients ? in_dtype(call, sum) : sum;
        }
        for (int i = 0; i < ROWS * COLS; ++i) {
            e->g[i] = in_dtype(call, in_dtype(call, e->g[i]) * e->w[k][i % COLS]);
        }
    }
}

/* Gradients as ms_read gives them after ms_backward, against those in double: sums in F32 of three
   products, which can be off by as many roundings; in 16 bits by one step of these, `unit`, more. */
static void check_step(stack *s, const ms_dtype *of, bool half_gradients, double scale,
                       double unit) {
    static expected e;
    stack_write(s, 3);
    expect_step(s, of, half_gradients, scale / ROWS, &e);
    t_ok(s->m, ms_forward(s->m, NULL));
    t_ok(s->m, ms_backward(s->m));
    float grad[MOST_LAYERS][COLS], before[MOST_LAYERS][COLS], after[COLS];
    for (int k = 0; k < s->layers; ++k) {
        t_ok(s->m, ms_read(s->m, s->w[k], before[k]));
        t_ok(s->m, ms_read(s->m, ms_gradient(s->m, s->w[k]), grad[k]));
        for (int c = 0; c < COLS; ++c) {
            const double most = fabs(e.grad[k][c]) * (unit + exp2(-20.0)) + scale * exp2(-22.0);
            assert_true(fabs((double)grad[k][c] - e.grad[k][c]) <= most);
        }
    }
    assert_true(s->calls_in_half == s->calls && s->calls > 0);
    t_ok(s->m, ms_update(s->m));
    for (int k = 0; k < s->layers; ++k) { // the master: p - rate * g, without the loss scale
        t_ok(s->m, ms_read(s->m, s->w[k], after));
        for (int c = 0; c < COLS; ++c) {
            const double exact = (double)before[k][c] - 0.5 * (double)grad[k][c] / scale;
            assert_true(fabs((double)after[c] - exact) <= 1e-6 * (1.0 + fabs(exact)));
        }
    }
}

static void steps_round_where_plans_do(void **state) {
    (void)state;
    for (int how = 0; how < 8; ++how) {
        const ms_dtype dtype = how % 2 ? MS_DTYPE_F16 : MS_DTYPE_BF16;
        const ms_dtype of[MOST_LAYERS] = {dtype, dtype, dtype, dtype, dtype, dtype};
        const bool half_gradients = how / 2 % 2, small = how / 4;
        const double unit = !half_gradients          ? 0.0
                            : dtype == MS_DTYPE_BF16 ? exp2(-7.0)
                                                     : exp2(-10.0);
        const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.5f);
        ms_config config = mixed_config(dtype);
        config.early_update = MS_SWITCH_OFF;
        config.force_optimize = small; // with recomputation
        stack s;
        stack_create(&s, &config, &sgd, MOST_LAYERS, half_gradients);
        t_ok(s.m, ms_wrap(s.m));
        check_step(&s, of, half_gradients, dtype == MS_DTYPE_F16 ? (double)SCALE : 1.0, unit);
        ms_destroy(s.m);
    }
}

/* Each value has a format of its own. What one config names is one format, so that the analysis is
   changed before the plans are made. */
static void two_formats_in_one_plan(void **state) {
    (void)state;
    for (uint32_t mask = 1; mask < 1u << MOST_LAYERS; ++mask) { // of the layers in F16
        for (int small = 0; small < 2; ++small) {
            const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.5f);
            ms_config config = mixed_config(MS_DTYPE_BF16);
            const msi_goal goal = small ? MSI_GOAL_SMALLEST : MSI_GOAL_BUDGET;
            ms_dtype of[MOST_LAYERS];
            msi_store *store;
            msi_plan *plans;
            stack s;
            stack_create(&s, &config, &sgd, MOST_LAYERS, false);
            t_ok(s.m, msi_check_all(s.m, goal));
            for (int k = 0; k < MOST_LAYERS; ++k) {
                const ms_tensor both[] = {s.w[k], s.y[k]};
                of[k] = mask >> k & 1 ? MS_DTYPE_F16 : MS_DTYPE_BF16;
                for (int i = 0; i < 2; ++i) {
                    s.m->graph.tensors.items[msi_index(&s.m->graph, both[i])].narrow =
                        (uint8_t)msi_format_of_dtype(of[k]);
                }
            }
            assert_string_equal(msi_early_fault(s.m), "a loss scale needs all gradients");
            msi_get_hardware(s.m);
            s.m->wrapped.choice = msi_config_choice(s.m);
            t_ok(s.m, msi_make_plans(s.m, goal, &store, &plans));
            t_ok(s.m, msi_adopt_and_log(s.m, store, plans, goal));
            check_step(&s, of, false, (double)SCALE, 0.0);
            ms_destroy(s.m);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// params

static void begin_update(ms_step_state *step, ms_update_factors *factors, ms_update_args *args) {
    memset(step, 0, sizeof *step);
    memset(factors, 0, sizeof *factors);
    memset(args, 0, sizeof *args);
}

/* The update of a master is that of a param in F32, which compilers may fuse in other ways, and the
   value is its nearest. */
static void masters_are_updated_as_in_f32(void **state) {
    (void)state;
    enum { COUNT = 1000 };
    static float master[COUNT], plain[COUNT], gradient[COUNT], m[4][COUNT];
    static uint16_t value[COUNT], half_gradient[COUNT];
    const ms_backend cpu = ms_backend_cpu();
    ms_step_state step;
    ms_update_factors factors;
    ms_update_args args;
    t_rng rng = t_seed(5);
    begin_update(&step, &factors, &args);
    factors.rate = -0.01f;
    factors.decay = 0.999f;
    factors.beta1 = 0.9f;
    factors.beta2 = 0.99f;
    factors.rest1 = 0.1f;
    factors.rest2 = 0.01f;
    factors.scale2 = 1.0f;
    factors.epsilon = 1e-8f;
    for (int round = 0; t_is_built_in(round / 20); ++round) {
        const ms_optimizer_kind kind = (ms_optimizer_kind)(round / 20);
        const bool has_second = msi_optimizer_of(kind).states > 1;
        if (round % 20 == 0) {
            memset(m, 0, sizeof m);
            t_fill(&rng, master, COUNT, 1.0f);
            memcpy(plain, master, sizeof master);
        }
        t_fill(&rng, gradient, COUNT, 1.0f);
        for (int i = 0; i < COUNT; ++i) {
            msi_store_as(half_gradient, MS_DTYPE_F16, (uint64_t)i, gradient[i]);
            gradient[i] = msi_load(half_gradient, MS_DTYPE_F16, (uint64_t)i);
        }
        args.kind = kind;
        args.count = COUNT;
        args.factors = &factors;
        args.state_of_step = &step;
        args.value = plain;
        args.gradient = gradient;
        args.state[0] = m[0];
        args.state[1] = has_second ? m[1] : NULL;
        assert_int_equal(cpu.update(cpu.user, &args), 0);
        args.value = (float *)(void *)value;
        args.value_dtype = MS_DTYPE_BF16;
        args.gradient = (float *)(void *)half_gradient;
        args.gradient_dtype = MS_DTYPE_F16;
        args.master = master;
        args.state[0] = m[2];
        args.state[1] = has_second ? m[3] : NULL;
        assert_int_equal(cpu.update(cpu.user, &args), 0);
        memset(&args, 0, sizeof args);
        for (int i = 0; i < COUNT; ++i) {
            assert_true(fabsf(master[i] - plain[i]) <= 1e-6f * fabsf(plain[i]) + 1e-9f);
            assert_true(value[i] == msi_bf16_of_f32(master[i]));
        }
    }
}

/* The distance to the next larger number of a dtype. */
static double unit_of(ms_dtype dtype, double x) {
    const int bits = dtype == MS_DTYPE_BF16 ? 7 : 10, least = dtype == MS_DTYPE_BF16 ? -133 : -24;
    const int e = (int)floor(log2(fabs(x))) - bits;
    return exp2(e > least ? e : least);
}

/* Without a master a value moves to one of its neighbours, in the mean to where it should. */
static void check_values_alone(ms_dtype dtype, float size) {
    enum { COUNT = 256, DRAWS = 4000 };
    static uint16_t value[COUNT];
    static float gradient[COUNT], before[COUNT];
    static double sum[COUNT];
    const ms_backend cpu = ms_backend_cpu();
    ms_step_state step;
    ms_update_factors factors;
    ms_update_args args;
    t_rng rng = t_seed(6);
    begin_update(&step, &factors, &args);
    factors.rate = -1.0f;
    t_fill(&rng, gradient, COUNT, 0.001f * size);
    memset(sum, 0, sizeof sum);
    args.kind = MS_OPTIMIZER_SGD;
    args.count = COUNT;
    args.gradient = gradient;
    args.value = (float *)(void *)value;
    args.value_dtype = dtype;
    args.factors = &factors;
    args.state_of_step = &step;
    for (int draw = 0; draw < DRAWS; ++draw) {
        step.seed = (uint64_t)draw + 1;
        for (int i = 0; i < COUNT; ++i) {
            const float sign = i % 2 ? -size : size;
            msi_store_as(value, dtype, (uint64_t)i, sign * (0.3f + 0.01f * (float)i));
            before[i] = msi_load(value, dtype, (uint64_t)i);
        }
        assert_int_equal(cpu.update(cpu.user, &args), 0);
        for (int i = 0; i < COUNT; ++i) {
            const double exact = (double)(before[i] - gradient[i]);
            const double now = (double)msi_load(value, dtype, (uint64_t)i);
            assert_true(fabs(now - exact) < unit_of(dtype, exact) * 1.0001);
            sum[i] += now - exact;
        }
    }
    for (int i = 0; i < COUNT; ++i) { // five standard deviations of a mean of DRAWS
        const double unit = unit_of(dtype, (double)before[i]);
        assert_true(fabs(sum[i] / DRAWS) < 5.0 * 0.5 * unit * 2.0 / sqrt((double)DRAWS));
    }
}

static void values_alone_move_right_in_the_mean(void **state) {
    (void)state;
    check_values_alone(MS_DTYPE_BF16, 1.0f);
    check_values_alone(MS_DTYPE_F16, 1.0f);
    check_values_alone(MS_DTYPE_F16, 2e-5f); // subnormal numbers and others
    check_values_alone(MS_DTYPE_F16, 1e-7f);
    check_values_alone(MS_DTYPE_F16, 2e4f);
    /* What F16 cannot hold, and numbers that it can. */
    for (uint32_t k = 0; k <= 256; ++k) {
        const uint32_t random = k * 0xffffffu;
        assert_int_equal(msi_f16_at_random(65504.0f, random), 0x7bff);
        assert_int_equal(msi_f16_at_random(-1e30f, random), 0xfbff);
        assert_int_equal(msi_f16_at_random(0.0f, random), 0);
        assert_int_equal(msi_f16_at_random(-1.5f, random), 0xbe00);
        for (uint16_t bits = 0; bits < 0x7c00; bits = (uint16_t)(bits + 37)) {
            assert_int_equal(msi_f16_at_random(msi_f32_of_f16(bits), random), bits);
        }
    }
}

/* A trainer reads what it wrote, where there is a master; a param alone in 16 bits is rounded once.
   Another ms_wrap without 16 bits goes on with the same values. */
static void trainers_see_f32(void **state) {
    (void)state;
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.001f);
    for (int how = 0; how < 4; ++how) {
        const bool alone = how % 2;
        const ms_dtype dtype = how / 2 ? MS_DTYPE_F16 : MS_DTYPE_BF16;
        float written[COLS], before[COLS], after[COLS], y[ROWS * COLS];
        ms_config config = mixed_config(dtype);
        config.master_weights = alone ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        stack s;
        t_rng rng = t_seed(9);
        stack_create(&s, &config, &adamw, 3, true);
        ms_add_output(s.m, s.y[1]);
        stack_write(&s, 4);
        t_fill(&rng, written, COLS, 2.0f);
        t_ok(s.m, ms_write(s.m, s.w[2], written)); // before there is a plan
        t_ok(s.m, ms_wrap(s.m));
        t_ok(s.m, ms_read(s.m, s.w[2], before));
        for (int c = 0; c < COLS; ++c) {
            const double kept = alone ? in_dtype(dtype, (double)written[c]) : (double)written[c];
            assert_true((double)before[c] == kept);
        }
        assert_null(ms_data(s.m, s.w[2]));
        t_ok(s.m, ms_step(s.m, NULL));
        t_ok(s.m, ms_read(s.m, s.y[1], y));
        for (int i = 0; i < ROWS * COLS; ++i) {
            assert_true((double)y[i] == in_dtype(dtype, (double)y[i]));
        }
        t_ok(s.m, ms_read(s.m, s.w[2], before));
        t_ok(s.m, ms_detach(s.m)); // everything is in F32 again
        t_ok(s.m, ms_read(s.m, s.w[2], after));
        assert_memory_equal(before, after, sizeof before);
        s.calls_in_half = 0;
        t_ok(s.m, ms_step(s.m, NULL));
        assert_int_equal(s.calls_in_half, 0);
        t_ok(s.m, ms_read(s.m, s.w[2], before));
        t_ok(s.m, ms_wrap(s.m)); // and back
        t_ok(s.m, ms_read(s.m, s.w[2], after));
        for (int c = 0; c < COLS; ++c) {
            const double kept = alone ? in_dtype(dtype, (double)before[c]) : (double)before[c];
            assert_true((double)after[c] == kept);
        }
        ms_destroy(s.m);
    }
}

/* Frozen params are in 16 bits where there are no masters. */
static void frozen_params_keep_f32_with_masters(void **state) {
    (void)state;
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.001f);
    for (int alone = 0; alone < 2; ++alone) {
        ms_config config = mixed_config(MS_DTYPE_BF16);
        config.master_weights = alone ? MS_SWITCH_OFF : MS_SWITCH_ON;
        stack s;
        stack_create(&s, &config, &adamw, 3, false);
        ms_set_frozen(s.m, s.w[0], true);
        stack_write(&s, 4);
        t_ok(s.m, ms_wrap(s.m));
        t_ok(s.m, ms_step(s.m, NULL));
        const msi_resident *r =
            msi_find_resident(s.m->run.store, msi_index(&s.m->graph, s.w[0]), MSI_ROLE_VALUE);
        assert_int_equal(r->format, alone ? MSI_FORMAT_BF16 : MSI_FORMAT_F32);
        ms_destroy(s.m);
    }
}

// ------------------------------------------------------------------------------------------------
// the loss scale

/* The reference: powers of two and counts. */
typedef struct automaton {
    int exponent;
    uint32_t clean, skipped;
} automaton;

static void follow(automaton *a, bool overflow, uint32_t growth_steps) {
    a->clean = overflow ? 0 : a->clean + 1;
    a->exponent -= overflow && a->exponent > 0;
    a->skipped += overflow;
    if (a->clean == growth_steps) {
        a->exponent += 1;
        a->clean = 0;
    }
}

static void the_scale_follows_an_automaton(void **state) {
    (void)state;
    enum { OUTCOMES = 10000, GROWTH = 17 };
    const ms_backend cpu = ms_backend_cpu();
    t_rng rng = t_seed(7);
    automaton a = {16, 0, 0};
    ms_step_state s;
    memset(&s, 0, sizeof s);
    s.loss_scale = 65536.0f;
    s.scaling.growth = 2.0f;
    s.scaling.backoff = 0.5f;
    s.scaling.least = 1.0f;
    s.scaling.growth_steps = GROWTH;
    s.scaling.most_skipped = UINT32_MAX;
    for (int i = 0; i < OUTCOMES; ++i) {
        /* Overflows are the likelier the larger the scale is. */
        const bool overflow =
            t_chance(&rng, 0.02 + (a.exponent > 20 ? 0.5 : 0.0) + (i / 1000 % 4 == 3 ? 0.5 : 0.0));
        const float before = s.loss_scale, loss = 1.0f;
        const float limit = FLT_MAX;
        float gradient[2];
        ms_norm norm = {0.0, 0.0f};
        gradient[0] = before * 0.75f;
        gradient[1] = overflow ? (i % 2 ? INFINITY : NAN) : 0.0f;
        s.step = (uint64_t)i;
        assert_int_equal(cpu.loss(cpu.user, &loss, 1, 1.0, &s), 0);
        assert_int_equal(s.halted, MS_HALT_NONE);
        assert_int_equal(
            cpu.add_squares(cpu.user, gradient, MS_DTYPE_F32, 1, &norm.sum, 4, &s.nonfinite), 0);
        assert_int_equal(
            cpu.add_squares(cpu.user, gradient + 1, MS_DTYPE_F32, 1, &norm.sum, 9, &s.nonfinite),
            0);
        assert_int_equal(cpu.clip_scale(cpu.user, &norm, &limit, 1, &s, NULL, 0), 0);
        follow(&a, overflow, GROWTH);
        assert_true(s.loss_scale == ldexpf(1.0f, a.exponent));
        assert_true(s.clean_steps == a.clean && s.skipped_steps == a.skipped);
        assert_int_equal(s.halted, overflow ? MS_HALT_OVERFLOW : MS_HALT_NONE);
        if (overflow) {
            assert_int_equal(s.overflow, 9);
        } else {
            assert_true(norm.scale == 1.0f / before && fabs(s.norm - 0.75) < 1e-12);
        }
    }
    assert_true(a.skipped > 500 && a.exponent < 25);
}

typedef struct warnings {
    int count;
    char text[300];
} warnings;

static void count_warnings(ms_log_level level, const char *tag, const char *text, void *user) {
    warnings *w = (warnings *)user;
    if (level == MS_LOG_WARNING && strcmp(tag, "overflow") == 0) {
        w->count += 1;
        (void)snprintf(w->text, sizeof w->text, "%s", text);
    }
}

/* Gradients that are infinite at any scale: a warning when the scale is at its least, once, and an
   error after so many steps, at each step until one is finite; that one goes on as if the others
   had not been. */
static void overflows_do_not_go_on_for_ever(void **state) {
    (void)state;
    for (int how = 0; how < 8; ++how) {
        const uint32_t most = how & 1 ? 9 : 3, until_least = 6; // halvings from 64 to 1
        ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        ms_config config = mixed_config(MS_DTYPE_F16);
        warnings heard = {0, ""};
        ms_memory_report report;
        stack s[2];
        float values[2][COLS];
        config.loss_scaling.initial = 64.0f;
        config.loss_scaling.most_skipped = most;
        config.accumulation_steps = how & 4 ? 2 : 1;
        adamw.grad_clip_norm = how & 2 ? 0.5f : 0.0f;
        for (int i = 0; i < 2; ++i) {
            config.log = i == 0 ? count_warnings : NULL;
            config.log_user = &heard;
            stack_create(&s[i], &config, &adamw, 3, false);
            stack_write(&s[i], 11);
            t_ok(s[i].m, ms_wrap(s[i].m));
        }
        ms_model *m = s[0].m;
        s[0].overflow_at = 1;
        for (uint32_t step = 0; step < most + 3; ++step) {
            ms_result result = MS_RESULT_OK;
            for (uint32_t k = 0; k < (how & 4 ? 2u : 1u); ++k) {
                t_ok(m, result);
                result = ms_step(m, NULL);
            }
            if (step < most) {
                t_ok(m, result);
            } else {
                t_error(m, result, MS_RESULT_NONFINITE);
                t_text_has(ms_last_error(m), "\"w\"");
                t_text_has(ms_last_error(m), "ms_find_nonfinite");
            }
            t_report(m, &report);
            assert_int_equal(report.step_count, step < most ? step + 1 : most);
            assert_int_equal(report.skipped_steps, step < most ? step + 1 : most);
            assert_int_equal(heard.count, most > until_least && step + 1 >= until_least);
            if (how & 2) {
                double norm;
                t_error(m, ms_gradient_norm(m, &norm),
                        step < most ? MS_RESULT_NONFINITE : MS_RESULT_ORDER);
            }
        }
        if (heard.count > 0) {
            t_text_has(heard.text, "6 steps in a row");
            t_text_has(heard.text, "\"w\"");
        }
        s[0].overflow_at = -1;
        for (int k = 0; k < (how & 4 ? 2 : 1); ++k) {
            t_ok(m, ms_step(m, NULL));
            t_ok(s[1].m, ms_step(s[1].m, NULL));
        }
        for (int w = 0; w < 3; ++w) {
            for (int i = 0; i < 2; ++i) {
                t_ok(s[i].m, ms_read(s[i].m, s[i].w[w], values[i]));
            }
            assert_memory_equal(values[0], values[1], sizeof values[0]);
        }
        ms_destroy(s[0].m);
        ms_destroy(s[1].m);
    }
}

/* A step of either of two models; of the second one it overflows first, so many times. */
static void step_after_overflows(stack *plain, stack *skips, int overflows) {
    float of_plain[COLS], of_skips[COLS];
    t_ok(plain->m, ms_step(plain->m, NULL));
    for (int k = 0; k <= overflows; ++k) {
        skips->overflow_at = k < overflows ? k % skips->layers : -1;
        t_ok(skips->m, ms_step(skips->m, NULL));
    }
    for (int k = 0; k < plain->layers; ++k) {
        t_ok(plain->m, ms_read(plain->m, plain->w[k], of_plain));
        t_ok(skips->m, ms_read(skips->m, skips->w[k], of_skips));
        assert_memory_equal(of_plain, of_skips, sizeof of_plain);
    }
}

static void stack_plain(stack *s) {
    for (int k = 0; k < s->layers; ++k) {
        ms_set_layer_technique(s->m, s->layer[k], MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_OFF);
    }
}

/* The gradients of a step that is half done are saved with the loss scale, and loaded with that of the
   plan that goes on: powers of 2, so that nothing is rounded. */
static void a_half_step_is_saved_with_its_scale(void **state) {
    (void)state;
    static t_file file;
    for (int how = 0; how < 4; ++how) {
        const bool scales[2] = {how % 2 != 0, how / 2 != 0};
        const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.5f);
        ms_config config = mixed_config(MS_DTYPE_F16);
        config.accumulation_steps = 2;
        stack s[2];
        float grad[2][COLS];
        for (int i = 0; i < 2; ++i) {
            stack_create(&s[i], &config, &sgd, 3, false);
            if (!scales[i]) {
                stack_plain(&s[i]);
            }
            t_ok(s[i].m, ms_wrap(s[i].m));
        }
        stack_write(&s[0], 5);
        t_ok(s[0].m, ms_step(s[0].m, NULL));
        t_file_clear(&file);
        t_ok(s[0].m, t_save(s[0].m, &file));
        t_ok(s[1].m, t_load(s[1].m, &file, NULL));
        for (int k = 0; k < 3; ++k) {
            for (int i = 0; i < 2; ++i) {
                t_ok(s[i].m, ms_read(s[i].m, ms_gradient(s[i].m, s[i].w[k]), grad[i]));
                for (int c = 0; c < COLS; ++c) {
                    grad[i][c] /= scales[i] ? (float)SCALE : 1.0f;
                }
            }
            assert_true(fabs((double)grad[0][k]) > 1e-3);
            assert_memory_equal(grad[0], grad[1], sizeof grad[0]);
        }
        ms_destroy(s[0].m);
        ms_destroy(s[1].m);
    }
}

/* A trainer sets the step back to one before those that were skipped, and saves. */
static void skipped_steps_are_saved(void **state) {
    (void)state;
    static t_file file;
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    const ms_config config = mixed_config(MS_DTYPE_F16);
    stack s[2];
    for (int i = 0; i < 2; ++i) {
        stack_create(&s[i], &config, &adamw, 3, false);
        t_ok(s[i].m, ms_wrap(s[i].m));
        stack_write(&s[i], 5);
    }
    for (int k = 0; k < 5; ++k) {
        s[0].overflow_at = k < 3 ? 0 : -1;
        t_ok(s[0].m, ms_step(s[0].m, NULL));
    }
    for (uint64_t step = 5; step-- > 0;) {
        ms_memory_report report;
        t_ok(s[0].m, ms_set_step_count(s[0].m, step));
        assert_int_equal(ms_update_count(s[0].m, s[0].w[1]), 2);
        t_file_clear(&file);
        t_ok(s[0].m, t_save(s[0].m, &file));
        t_ok(s[1].m, t_load(s[1].m, &file, NULL));
        assert_int_equal(ms_update_count(s[1].m, s[1].w[1]), 2);
        t_report(s[1].m, &report);
        assert_int_equal(report.step_count, step);
    }
    for (int k = 0; k < 3; ++k) {
        step_after_overflows(&s[0], &s[1], k);
    }
    ms_destroy(s[0].m);
    ms_destroy(s[1].m);
}

/* Training with steps that overflow gives the bits of training without them: they do not count in
   AdamW's bias correction either, whether the device subtracts them or, in plans without loss
   scaling and for new optimizer state, the host. */
static void skipped_steps_leave_no_trace(void **state) {
    (void)state;
    for (int clips = 0; clips < 2; ++clips) {
        ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        ms_config config = mixed_config(MS_DTYPE_F16);
        stack s[2];
        adamw.grad_clip_norm = clips ? 0.5f : 0.0f;
        for (int i = 0; i < 2; ++i) {
            stack_create(&s[i], &config, &adamw, 3, false);
            stack_write(&s[i], 11);
            t_ok(s[i].m, ms_wrap(s[i].m));
        }
        for (int k = 0; k < 6; ++k) {
            step_after_overflows(&s[0], &s[1], k % 3);
        }
        for (int i = 0; i < 2; ++i) {
            t_ok(s[i].m, ms_detach(s[i].m)); // in F32
        }
        for (int k = 0; k < 3; ++k) {
            step_after_overflows(&s[0], &s[1], 0);
        }
        for (int i = 0; i < 2; ++i) { // a param that is thawed has new state
            ms_set_frozen(s[i].m, s[i].w[1], true);
            t_ok(s[i].m, ms_wrap(s[i].m));
            ms_set_frozen(s[i].m, s[i].w[1], false);
            t_ok(s[i].m, ms_wrap(s[i].m));
        }
        for (int k = 0; k < 6; ++k) {
            step_after_overflows(&s[0], &s[1], k % 2);
        }
        ms_destroy(s[0].m);
        ms_destroy(s[1].m);
    }
}

/* With gradients that are scaled, a step of 4 micro-batches that ends after 2 is one of 2, also where
   one overflows; and a plan without a loss scale does not take over its sums. */
static void a_scaled_step_may_end_early(void **state) {
    (void)state;
    float values[2][COLS];
    for (int how = 0; how < 4; ++how) {
        ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        ms_config config = mixed_config(MS_DTYPE_F16);
        ms_memory_report report[2];
        stack s[2];
        adamw.grad_clip_norm = how & 1 ? 0.5f : 0.0f;
        for (int i = 0; i < 2; ++i) {
            config.accumulation_steps = i == 0 ? 4 : 2;
            stack_create(&s[i], &config, &adamw, 3, false);
            stack_write(&s[i], 11);
            t_ok(s[i].m, ms_wrap(s[i].m));
        }
        for (int step = 0; step < 4; ++step) {
            for (int k = 0; k < 2; ++k) {
                for (int i = 0; i < 2; ++i) {
                    s[i].overflow_at = (how & 2) && step % 2 == 1 && k == 0 ? 1 : -1;
                    t_ok(s[i].m, ms_step(s[i].m, NULL));
                }
            }
            t_error(s[0].m, ms_detach(s[0].m), MS_RESULT_ORDER); // to F32
            t_text_has(ms_last_error(s[0].m), "2 of the 4 micro-batches");
            t_ok(s[0].m, ms_update(s[0].m));
            for (int w = 0; w < 3; ++w) {
                for (int i = 0; i < 2; ++i) {
                    t_ok(s[i].m, ms_read(s[i].m, s[i].w[w], values[i]));
                }
                assert_memory_equal(values[0], values[1], sizeof values[0]);
            }
        }
        for (int i = 0; i < 2; ++i) {
            t_ok(s[i].m, ms_synchronize(s[i].m));
            t_ok(s[i].m, ms_report(s[i].m, &report[i]));
            assert_int_equal(ms_update_count(s[i].m, s[i].w[0]), how & 2 ? 2 : 4);
        }
        assert_int_equal(report[0].skipped_steps, how & 2 ? 2 : 0);
        assert_int_equal(report[0].skipped_steps, report[1].skipped_steps);
        assert_true(report[0].loss_scale == report[1].loss_scale);
        for (int k = 0; k < 4; ++k) {
            t_ok(s[0].m, ms_forward(s[0].m, NULL));
            t_ok(s[0].m, ms_backward(s[0].m));
        }
        t_ok(s[0].m, ms_detach(s[0].m)); // only the update is missing: the step is dropped
        t_error(s[0].m, ms_update(s[0].m), MS_RESULT_ORDER);
        t_ok(s[0].m, ms_read(s[0].m, s[0].w[0], values[0]));
        t_ok(s[1].m, ms_read(s[1].m, s[1].w[0], values[1]));
        assert_memory_equal(values[0], values[1], sizeof values[0]);
        ms_destroy(s[0].m);
        ms_destroy(s[1].m);
    }
}

/* Gradients are measured in the format that they have: where they are clipped, a step of SGD changes
   the params by what was asked for. */
static void clipped_steps_are_as_long_as_asked_for(void **state) {
    (void)state;
    enum { LAYERS = 3 };
    for (int how = 0; how < 8; ++how) {
        const float limit = how / 4 ? 0.5f : 0.01f;
        ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 1.0f);
        ms_config config = mixed_config(how % 2 ? MS_DTYPE_BF16 : MS_DTYPE_F16);
        float before[LAYERS][COLS], after[COLS];
        double squares = 0.0;
        stack s;
        sgd.grad_clip_norm = limit;
        stack_create(&s, &config, &sgd, LAYERS, how / 2 % 2 == 1);
        stack_write(&s, 5);
        t_ok(s.m, ms_wrap(s.m));
        for (int k = 0; k < LAYERS; ++k) {
            t_ok(s.m, ms_read(s.m, s.w[k], before[k]));
        }
        t_ok(s.m, ms_step(s.m, NULL));
        for (int k = 0; k < LAYERS; ++k) {
            t_ok(s.m, ms_read(s.m, s.w[k], after));
            for (int c = 0; c < COLS; ++c) {
                const double change = (double)after[c] - (double)before[k][c];
                squares += change * change;
            }
        }
        assert_true(fabs(sqrt(squares) - (double)limit) <= 1e-3 * (double)limit);
        ms_destroy(s.m);
    }
}

/* Whatever happens to the memory of a model between its steps: the loss scale, what it is going to be
   and how many steps were skipped are as without that. */
static void the_scale_outlasts_what_happens_between_steps(void **state) {
    (void)state;
    enum { WRAPS, MOVES, IS_SUSPENDED, MOVES_SUSPENDED, RUNS_IN_F32, WAYS };
    for (int way = 0; way < WAYS; ++way) {
        const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        ms_config config = mixed_config(MS_DTYPE_F16);
        ms_memory_report report[2];
        stack s[2];
        config.loss_scaling.growth_steps = 4;
        for (int i = 0; i < 2; ++i) {
            stack_create(&s[i], &config, &adamw, 3, false);
            stack_write(&s[i], 11);
            t_ok(s[i].m, ms_wrap(s[i].m));
        }
        for (int step = 0; step < 24; ++step) {
            for (int i = 0; i < 2; ++i) {
                s[i].overflow_at = step % 11 == 0 ? step % 3 : -1;
                t_ok(s[i].m, ms_step(s[i].m, NULL));
                t_ok(s[i].m, ms_synchronize(s[i].m));
                t_report(s[i].m, &report[i]);
            }
            assert_true(report[0].loss_scale == report[1].loss_scale);
            assert_int_equal(report[0].skipped_steps, report[1].skipped_steps);
            ms_model *m = s[1].m;
            if (way == IS_SUSPENDED || way == MOVES_SUSPENDED) {
                t_ok(m, ms_suspend(m, NULL));
            }
            if (way == MOVES || way == MOVES_SUSPENDED) {
                ms_set_budget(m, (1u << 20) + (uint64_t)step % 5 * 4096);
            }
            if (way == RUNS_IN_F32) {
                t_ok(m, ms_detach(m));
            }
            t_ok(m, way == IS_SUSPENDED ? ms_resume(m) : ms_wrap(m));
        }
        for (int k = 0; k < 3; ++k) {
            float w[2][COLS];
            for (int i = 0; i < 2; ++i) {
                t_ok(s[i].m, ms_read(s[i].m, s[i].w[k], w[i]));
            }
            assert_memory_equal(w[0], w[1], sizeof w[0]);
        }
        ms_destroy(s[0].m);
        ms_destroy(s[1].m);
    }
}

/* An overflow at any layer skips the step: no param and no state changes, the scale is halved, and
   the report names the layer. The next step goes on. */
static void overflows_at_every_layer_skip_a_step(void **state) {
    (void)state;
    for (int how = 0; t_is_built_in(how / 4); ++how) {
        const bool clips = how % 2, micro = how / 2 % 2;
        ms_optimizer_desc optimizer = t_optimizer((ms_optimizer_kind)(how / 4), 0.001f);
        optimizer.momentum = 0.9f; // SGD
        optimizer.grad_clip_norm = clips ? 10.0f : 0.0f;
        ms_config config = mixed_config(MS_DTYPE_F16);
        config.accumulation_steps = micro ? 2 : 1;
        stack s;
        stack_create(&s, &config, &optimizer, MOST_LAYERS, how % 3 == 0);
        stack_write(&s, 8);
        t_ok(s.m, ms_wrap(s.m));
        double scale = SCALE;
        for (int k = -1; k < s.layers; ++k) {
            static float before[MOST_LAYERS][3][COLS], after[COLS];
            ms_memory_report report;
            const int states = (int)t_state_count(&optimizer);
            for (int p = 0; p < s.layers; ++p) {
                t_ok(s.m, ms_read(s.m, s.w[p], before[p][0]));
                for (int i = 0; i < states; ++i) {
                    t_ok(s.m, ms_read(s.m, ms_optimizer_state(s.m, s.w[p], i), before[p][1 + i]));
                }
            }
            for (uint32_t n = 0; n < (micro ? 2u : 1u); ++n) {
                double loss = 0.0;
                s.overflow_at = n == 0 ? k : -1; // an infinity stays one when more is added
                t_ok(s.m, ms_step(s.m, &loss));
                assert_true(msi_is_finite(loss));
            }
            t_ok(s.m, ms_synchronize(s.m));
            t_report(s.m, &report);
            scale *= k < 0 ? 1.0 : 0.5;
            assert_true(report.loss_scale == scale);
            assert_int_equal(report.skipped_steps, k + 1);
            if (k >= 0) {
                char name[32];
                snprintf(name, sizeof name, "product%d", k);
                assert_string_equal(report.overflow_layer, name);
            }
            for (int p = 0; p < s.layers; ++p) {
                t_ok(s.m, ms_read(s.m, s.w[p], after));
                assert_true((memcmp(before[p][0], after, sizeof after) == 0) == (k >= 0));
                for (int i = 0; i < states && k >= 0; ++i) {
                    t_ok(s.m, ms_read(s.m, ms_optimizer_state(s.m, s.w[p], i), after));
                    assert_memory_equal(before[p][1 + i], after, sizeof after);
                }
            }
        }
        s.overflow_at = -1;
        t_ok(s.m, ms_step(s.m, NULL));
        t_ok(s.m, ms_wrap(s.m)); // the scale outlasts it
        t_ok(s.m, ms_step(s.m, NULL));
        ms_memory_report report;
        t_ok(s.m, ms_synchronize(s.m));
        t_report(s.m, &report);
        assert_true(report.loss_scale == scale);
        char last[32]; // steps without an overflow do not take its name away
        snprintf(last, sizeof last, "product%d", s.layers - 1);
        assert_string_equal(report.overflow_layer, last);
        ms_destroy(s.m);
    }
}

/* The plain pass of ms_verify reads the masters, on the device or on the host: its loss is that of
   training in F32, which the 16 bits of params, all rounded downwards here, would miss. */
static void verify_reads_masters(void **state) {
    (void)state;
    for (int how = 0; how < 4; ++how) {
        const bool moves = how % 2, f32 = how / 2;
        const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.001f);
        ms_config config = mixed_config(MS_DTYPE_BF16);
        ms_verify_report report;
        stack s;
        float w[COLS];
        double loss;
        stack_create(&s, &config, &adamw, 4, false);
        stack_write(&s, 11);
        for (int c = 0; c < COLS; ++c) {
            w[c] = 1.0f + 0.003f; // 1 in BF16
        }
        for (int k = 0; k < s.layers; ++k) {
            t_ok(s.m, ms_write(s.m, s.w[k], w));
            if (moves) {
                ms_set_tensor_technique(s.m, s.w[k], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
                const ms_tensor moment = ms_optimizer_state(s.m, s.w[k], 0);
                ms_set_tensor_technique(s.m, moment, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
            }
        }
        t_ok(s.m, ms_wrap(s.m));
        const msi_resident *master =
            msi_find_resident(s.m->run.store, msi_index(&s.m->graph, s.w[1]), MSI_ROLE_MASTER);
        assert_true(master != NULL && master->on_host == moves);
        if (f32) { // what is read is what the model has, in any plan
            t_ok(s.m, ms_detach(s.m));
        }
        t_ok(s.m, ms_verify(s.m, NULL, NULL, &report));
        const double wrapped = report.wrapped_loss, plain = report.plain_loss;
        t_ok(s.m, ms_detach(s.m));
        t_ok(s.m, ms_forward(s.m, &loss));
        assert_true(fabs(plain - loss) <= 1e-6 * loss);
        assert_true(f32 ? fabs(wrapped - loss) <= 1e-6 * loss : wrapped < 0.99 * loss);
        ms_destroy(s.m);
    }
}

/* What ms_verify finds in BF16 is its rounding, in F16 less, with the loss scale undone. */
static void verify_measures_rounding(void **state) {
    (void)state;
    double relative[2];
    for (int k = 0; k < 2; ++k) {
        const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.001f);
        ms_config config = mixed_config(k == 0 ? MS_DTYPE_BF16 : MS_DTYPE_F16);
        ms_verify_report report;
        stack s;
        stack_create(&s, &config, &adamw, 4, k == 1);
        stack_write(&s, 11);
        t_ok(s.m, ms_wrap(s.m));
        t_ok(s.m, ms_verify(s.m, NULL, NULL, &report));
        assert_int_equal(report.tensor_count, 4);
        assert_true(report.differ_count > 0 && report.absolute < 1.0);
        relative[k] = report.absolute;
        t_ok(s.m, ms_step(s.m, NULL)); // as before
        ms_destroy(s.m);
    }
    assert_true(relative[1] < 0.5 * relative[0]);
}

// ------------------------------------------------------------------------------------------------
// layers in 16 bits beside others in F32

/* The layers of a mask are forced to F32: these calls alone are. */
static void layers_compute_in_f32_where_that_is_forced(void **state) {
    (void)state;
    for (uint32_t f32 = 0; f32 < 16; ++f32) {
        const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.001f);
        const ms_config config = mixed_config(MS_DTYPE_BF16);
        uint32_t forced = 0;
        stack s;
        stack_create(&s, &config, &sgd, 4, false);
        for (int k = 0; k < s.layers; ++k) {
            if (f32 >> k & 1) {
                ms_set_layer_technique(s.m, s.layer[k], MS_TECHNIQUE_MIXED_PRECISION,
                                       MS_SWITCH_OFF);
                forced += 2; // forward and backward
            }
        }
        t_ok(s.m, ms_wrap(s.m));
        stack_write(&s, f32);
        t_ok(s.m, ms_step(s.m, NULL));
        assert_int_equal(s.calls, 2 * s.layers);
        assert_int_equal(s.calls_in_half, s.calls - forced);
        ms_destroy(s.m);
    }
}

/* Gradients computed in place of those of the outputs, which are kept in F32 or in 16 bits. */
static void gradients_in_place_are_the_same(void **state) {
    (void)state;
    for (uint32_t mask = 0; mask < 64; ++mask) { // of outputs that need not be in 16 bits; in place
        const ms_optimizer_desc none = t_optimizer(MS_OPTIMIZER_NONE, 0.0f);
        const ms_config config = mixed_config(MS_DTYPE_BF16);
        stack s[2];
        for (int n = 0; n < 2; ++n) {
            in_place = n ? mask >> 2 & 14 : 0;
            stack_create(&s[n], &config, &none, 4, false);
            for (int k = 0; k < s[n].layers; ++k) {
                const bool half = k == 0 || !(mask >> (k - 1) & 1);
                ms_set_layer_technique(s[n].m, s[n].layer[k], MS_TECHNIQUE_MIXED_PRECISION,
                                       MS_SWITCH_DEFAULT);
                ms_set_tensor_technique(s[n].m, s[n].y[k], MS_TECHNIQUE_MIXED_PRECISION,
                                        half ? MS_SWITCH_ON : MS_SWITCH_DEFAULT);
            }
            t_ok(s[n].m, ms_wrap(s[n].m));
            stack_write(&s[n], mask);
            t_ok(s[n].m, ms_step(s[n].m, NULL));
        }
        for (int k = 0; k < s[0].layers; ++k) {
            float g[2][COLS];
            for (int n = 0; n < 2; ++n) {
                t_ok(s[n].m, ms_read(s[n].m, ms_gradient(s[n].m, s[n].w[k]), g[n]));
            }
            assert_memory_equal(g[0], g[1], sizeof g[0]);
        }
        ms_destroy(s[0].m);
        ms_destroy(s[1].m);
    }
    in_place = 0;
}

// ------------------------------------------------------------------------------------------------
// what is refused

static void wrong_precision_is_refused(void **state) {
    (void)state;
    ms_model *m;
    ms_config config = t_config();
    config.mixed_dtype = MS_DTYPE_I32;
    t_not_created(&m, ms_create(&config, &m));
    config = t_config();
    config.loss_scaling.backoff = 1.0f;
    t_not_created(&m, ms_create(&config, &m));
    config = t_config();
    config.loss_scaling.least = 1e6f; // above the initial scale
    t_not_created(&m, ms_create(&config, &m));
    config = t_config();
    config.loss_scaling.growth = -1.0f;
    t_not_created(&m, ms_create(&config, &m));
    config = mixed_config(MS_DTYPE_F16);
    const ms_optimizer_desc none = t_optimizer(MS_OPTIMIZER_NONE, 0.0f);
    stack s;
    stack_create(&s, &config, &none, 2, false);
    t_error(s.m, ms_wrap(s.m), MS_RESULT_UNSUPPORTED);
    t_text_has(ms_last_error(s.m), "F16");
    ms_destroy(s.m);
    config = mixed_config(MS_DTYPE_F16);
    config.early_update = MS_SWITCH_ON;
    const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.1f);
    stack_create(&s, &config, &sgd, 2, false);
    t_error(s.m, ms_wrap(s.m), MS_RESULT_INVALID);
    t_text_has(ms_last_error(s.m), "loss scale");
    ms_destroy(s.m);
}

static void wrong_dtypes_of_layers_are_refused(void **state) {
    (void)state;
    static const char *const texts[] = {"dtypes.accepts is", "half_gradients", "computed in place",
                                        "dtypes.f32_in is"};
    for (int k = 0; k < 4; ++k) {
        ms_config config = t_config();
        ms_layer_desc d;
        ms_model *m;
        memset(&d, 0, sizeof d);
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        d.forward = product_forward;
        d.backward = product_backward;
        d.in[0] = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(ROWS, COLS));
        d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(ROWS, COLS));
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(COLS));
        d.dtypes.accepts = 1u << (k == 0 ? MS_DTYPE_I8 : MS_DTYPE_BF16);
        if (k == 1) {
            d.dtypes.half_gradients = d.dtypes.f32_param = 1;
        } else if (k == 2) {
            d.must_in_place = d.in_place[0] = 1;
            d.dtypes.f32_out = 1;
        } else if (k == 3) {
            d.dtypes.f32_in = 4;
        }
        assert_int_equal(ms_register_layer(m, &d).id, 0);
        t_text_has(ms_last_error(m), texts[k]);
        ms_destroy(m);
    }
}

int main(void) {
    t_hook.part_bytes = 256; // so that params and state come in parts
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conversions_are_those_of_arithmetic),
        cmocka_unit_test(steps_round_where_plans_do),
        cmocka_unit_test(two_formats_in_one_plan),
        cmocka_unit_test(masters_are_updated_as_in_f32),
        cmocka_unit_test(values_alone_move_right_in_the_mean),
        cmocka_unit_test(trainers_see_f32),
        cmocka_unit_test(frozen_params_keep_f32_with_masters),
        cmocka_unit_test(the_scale_follows_an_automaton),
        cmocka_unit_test(overflows_do_not_go_on_for_ever),
        cmocka_unit_test(overflows_at_every_layer_skip_a_step),
        cmocka_unit_test(a_half_step_is_saved_with_its_scale),
        cmocka_unit_test(skipped_steps_are_saved),
        cmocka_unit_test(skipped_steps_leave_no_trace),
        cmocka_unit_test(a_scaled_step_may_end_early),
        cmocka_unit_test(the_scale_outlasts_what_happens_between_steps),
        cmocka_unit_test(clipped_steps_are_as_long_as_asked_for),
        cmocka_unit_test(verify_measures_rounding),
        cmocka_unit_test(verify_reads_masters),
        cmocka_unit_test(layers_compute_in_f32_where_that_is_forced),
        cmocka_unit_test(gradients_in_place_are_the_same),
        cmocka_unit_test(wrong_precision_is_refused),
        cmocka_unit_test(wrong_dtypes_of_layers_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
