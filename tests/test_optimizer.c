/*  test_optimizer.c - updates in F32 against float64 formulas, the state that each kind needs, and frozen
    params. Other formats of state are in test_state.c, what a step makes of updates in test_steps.c. */
#include "private.h"
#include "toy_layers.h"

typedef struct optimizer_case {
    ms_optimizer_desc desc;
    float own_decay; // of weight 1; below 0: not set
} optimizer_case;

enum { TRAIN_STEPS = 6, TRAIN_LAYERS = 3, TRAIN_COUNT = 64 };

/* The value of a field, whose 0 means the default unless the desc was filled. */
static double or_else(const ms_optimizer_desc *o, float given, double otherwise) {
    return given == 0.0f && !o->is_filled ? otherwise : (double)given;
}

/* Decoupled weight decay regularization (Loshchilov and Hutter, 2019), algorithm 2. */
static void reference_adamw(const ms_optimizer_desc *o, double rate, double decay, double t,
                            double g, double value[3]) {
    const double b1 = or_else(o, o->beta1, 0.9), b2 = or_else(o, o->beta2, 0.999);
    value[1] = b1 * value[1] + (1.0 - b1) * g;
    value[2] = b2 * value[2] + (1.0 - b2) * g * g;
    const double m = value[1] / (1.0 - pow(b1, t)), v = value[2] / (1.0 - pow(b2, t));
    value[0] -= rate * (m / (sqrt(v) + or_else(o, o->epsilon, 1e-8)) + decay * value[0]);
}

/* Symbolic discovery of optimization algorithms (Chen et al., 2023), algorithm 2. */
static void reference_lion(const ms_optimizer_desc *o, double rate, double decay, double g,
                           double value[3]) {
    const double b1 = or_else(o, o->beta1, 0.9), b2 = or_else(o, o->beta2, 0.99);
    const double c = b1 * value[1] + (1.0 - b1) * g;
    value[0] -= rate * ((c > 0.0) - (c < 0.0) + decay * value[0]);
    value[1] = b2 * value[1] + (1.0 - b2) * g;
}

/* p, m, v after one update with gradient g; the step's number is t, from 1. */
static void reference_update(const ms_optimizer_desc *o, double rate, double decay, double t,
                             double g, double value[3]) {
    switch (o->kind) {
    case MS_OPTIMIZER_ADAMW:
        reference_adamw(o, rate, decay, t, g, value);
        break;
    case MS_OPTIMIZER_SGD:
        value[1] = (double)o->momentum * value[1] + g;
        value[0] -= rate * (value[1] + decay * value[0]);
        break;
    case MS_OPTIMIZER_LION:
        reference_lion(o, rate, decay, g, value);
        break;
    case MS_OPTIMIZER_NESTEROV: {
        const double mu = or_else(o, o->momentum, 0.9);
        value[1] = mu * value[1] + g;
        value[0] -= rate * (g + mu * value[1] + decay * value[0]);
        break;
    }
    default: // not of one element at a time
        fail();
    }
}

static void expect_close(const ms_model *m, double got, double expected, double scale) {
    if (!(fabs(got - expected) <= 2e-5 * (fabs(expected) + scale))) {
        print_error("%.9g, expected %.9g; %s\n", got, expected, ms_last_error(m));
        fail();
    }
}

/* The gradients are those that the model computed; params and state are followed in float64. */
static void check_optimizer(const optimizer_case *c) {
    t_chain chain;
    static double follow[TRAIN_LAYERS][TRAIN_COUNT][3];
    float data[TRAIN_COUNT];
    ms_config config = t_config();
    assert_int_equal(t_chain_create(&chain, &config, TRAIN_LAYERS, T_CHAIN_ROWS, T_CHAIN_COLS),
                     MS_RESULT_OK);
    ms_model *m = chain.model;
    ms_set_optimizer(m, &c->desc);
    if (c->own_decay >= 0.0f) {
        ms_set_weight_decay(m, chain.weight[1], c->own_decay);
    }
    t_ok(m, ms_wrap(m));
    t_ok(m, t_chain_write(&chain, 3));
    memset(follow, 0, sizeof follow);
    for (uint32_t i = 0; i < TRAIN_LAYERS; ++i) {
        t_ok(m, ms_read(m, chain.weight[i], data));
        for (int k = 0; k < TRAIN_COUNT; ++k) {
            follow[i][k][0] = (double)data[k];
        }
    }
    for (int step = 1; step <= TRAIN_STEPS; ++step) {
        const double usual = c->desc.kind == MS_OPTIMIZER_LION ? 1e-4 : 1e-3;
        float rate = (float)or_else(&c->desc, c->desc.learning_rate, usual);
        if (step > 1) { // warm up and down, and one step at zero
            rate = step == 4 ? 0.0f : 0.01f / (float)step;
            ms_set_learning_rate(m, rate);
        }
        t_ok(m, ms_forward(m, NULL));
        t_ok(m, ms_backward(m));
        for (uint32_t i = 0; i < TRAIN_LAYERS; ++i) {
            bool own = i == 1 && c->own_decay >= 0.0f;
            double decay = (double)(own ? c->own_decay : c->desc.weight_decay);
            t_ok(m, ms_read(m, ms_gradient(m, chain.weight[i]), data));
            for (int k = 0; k < TRAIN_COUNT; ++k) {
                reference_update(&c->desc, (double)rate, decay, step, (double)data[k],
                                 follow[i][k]);
            }
        }
        t_ok(m, ms_update(m));
        for (uint32_t i = 0; i < TRAIN_LAYERS; ++i) {
            ms_tensor tensors[3];
            tensors[0] = chain.weight[i];
            tensors[1] = ms_optimizer_state(m, chain.weight[i], 0);
            tensors[2] = ms_optimizer_state(m, chain.weight[i], 1);
            for (int what = 0; what < 3; ++what) {
                if (tensors[what].id == 0) {
                    continue;
                }
                t_ok(m, ms_read(m, tensors[what], data));
                for (int k = 0; k < TRAIN_COUNT; ++k) {
                    expect_close(m, (double)data[k], follow[i][k][what], what == 2 ? 1e-9 : 1e-4);
                }
            }
        }
    }
    ms_destroy(m);
}

static void optimizers_follow_their_formulas(void **state) {
    (void)state;
    static const struct {
        ms_optimizer_kind kind;
        float rate, beta1, beta2, epsilon, momentum, decay, own_decay;
    } cases[] = {{MS_OPTIMIZER_ADAMW, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, -1.0f},
                 {MS_OPTIMIZER_ADAMW, 0.01f, 0.8f, 0.95f, 1e-6f, 0.0f, 0.1f, 0.0f},
                 {MS_OPTIMIZER_ADAMW, 0.003f, 0.9f, 0.99f, 1e-8f, 0.0f, 0.0f, 0.5f},
                 {MS_OPTIMIZER_SGD, 0.05f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, -1.0f},
                 {MS_OPTIMIZER_SGD, 0.05f, 0.0f, 0.0f, 0.0f, 0.9f, 0.1f, 0.3f},
                 {MS_OPTIMIZER_LION, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, -1.0f},
                 {MS_OPTIMIZER_LION, 0.01f, 0.95f, 0.98f, 0.0f, 0.9f, 0.1f, 0.5f},
                 {MS_OPTIMIZER_NESTEROV, 0.05f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, -1.0f},
                 {MS_OPTIMIZER_NESTEROV, 0.01f, 0.0f, 0.0f, 0.0f, 0.7f, 0.1f, 0.3f}};
    bool seen[MS_OPTIMIZER_NONE] = {false};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        optimizer_case c;
        memset(&c, 0, sizeof c);
        c.desc.kind = cases[i].kind;
        c.desc.learning_rate = cases[i].rate;
        c.desc.beta1 = cases[i].beta1;
        c.desc.beta2 = cases[i].beta2;
        c.desc.epsilon = cases[i].epsilon;
        c.desc.momentum = cases[i].momentum;
        c.desc.weight_decay = cases[i].decay;
        c.own_decay = cases[i].own_decay;
        check_optimizer(&c);
        seen[c.desc.kind] = true;
    }
    for (int kind = 0; kind <= MS_OPTIMIZER_NONE; ++kind) {
        assert_true(t_is_built_in(kind) == (kind < MS_OPTIMIZER_CUSTOM));
        assert_true(!t_is_built_in(kind) || seen[kind]);
    }
}

/* In a desc with the defaults in it, each field means what it says: rates and betas that are 0, as
   StyleGAN has for the first moment of Adam, and schedules at the first step of a warm-up. */
static void zeros_are_zeros_in_a_filled_desc(void **state) {
    (void)state;
    for (int kind = 0; kind < MS_OPTIMIZER_CUSTOM; ++kind) {
        for (int zeros = 0; zeros < 16; ++zeros) {
            optimizer_case c;
            c.own_decay = -1.0f;
            c.desc = ms_optimizer_defaults((ms_optimizer_kind)kind);
            c.desc.momentum = kind == MS_OPTIMIZER_SGD ? 0.9f : 0.0f;
            c.desc.learning_rate = zeros & 1 ? 0.0f : c.desc.learning_rate;
            c.desc.beta1 = zeros & 2 ? 0.0f : c.desc.beta1;
            c.desc.beta2 = zeros & 4 ? 0.0f : c.desc.beta2;
            c.desc.momentum = zeros & 8 ? 0.0f : c.desc.momentum;
            check_optimizer(&c);
        }
    }
    const ms_optimizer_desc own = ms_optimizer_defaults(MS_OPTIMIZER_CUSTOM);
    assert_true(own.learning_rate == 0.001f && own.beta1 == 0.9f && own.epsilon == 1e-8f);
}

static void note_doubt(ms_log_level level, const char *tag, const char *text, void *user) {
    if (level == MS_LOG_WARNING && strcmp(tag, "optimizer") == 0) {
        (void)snprintf((char *)user, 200, "%s", text);
    }
}

/* A 0 in a zeroed desc is a default, which is said where it is likely to have been meant. */
static void zeros_that_mean_defaults_are_doubted(void **state) {
    (void)state;
    static const struct {
        float rate, beta1, beta2;
        bool is_filled;
        const char *says[2];
    } cases[] = {{0.01f, 0.0f, 0.0f, false, {NULL, NULL}},
                 {0.01f, 0.9f, 0.99f, false, {NULL, NULL}},
                 {0.0f, 0.0f, 0.0f, true, {NULL, NULL}},
                 {0.0f, 0.0f, 0.0f, false, {"learning_rate is 0", "0.001"}},
                 {0.01f, 0.0f, 0.99f, false, {"beta1 is 0", "here, 0.9:"}},
                 {0.01f, 0.9f, 0.0f, false, {"beta2 is 0", "here, 0.999:"}}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        char text[200] = "";
        ms_config config = t_config();
        ms_optimizer_desc o = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
        ms_model *m;
        config.log = note_doubt;
        config.log_user = text;
        o.learning_rate = cases[i].rate;
        o.beta1 = cases[i].beta1;
        o.beta2 = cases[i].beta2;
        o.is_filled = cases[i].is_filled;
        t_ok(NULL, ms_create(&config, &m));
        ms_set_optimizer(m, &o);
        assert_int_equal(text[0] != 0, cases[i].says[0] != NULL);
        for (int k = 0; k < 2 && cases[i].says[0]; ++k) {
            t_text_has(text, cases[i].says[k]);
        }
        ms_destroy(m);
    }
}

/* The first step of a fresh moment goes by the rate in the direction of the gradient, whatever its
   size, and not at all where the gradient is 0. */
static void lion_goes_by_signs(void **state) {
    (void)state;
    static const float gradients[] = {1e-30f, -1e-40f, 0.0f, -0.0f, 3e18f, -2.0f, INFINITY, NAN};
    enum { COUNT = sizeof gradients / sizeof gradients[0] };
    float value[COUNT], gradient[COUNT], moment[COUNT];
    const ms_backend cpu = ms_backend_cpu();
    ms_update_args args;
    memset(&args, 0, sizeof args);
    for (int i = 0; i < COUNT; ++i) {
        value[i] = 1.0f;
        moment[i] = 0.0f;
        gradient[i] = gradients[i];
    }
    args.kind = MS_OPTIMIZER_LION;
    args.count = COUNT;
    args.value = value;
    args.gradient = gradient;
    args.state[0] = moment;
    args.learning_rate = 0.25f;
    args.beta1 = args.beta2 = 0.5f;
    args.t = 1;
    assert_int_equal(t_update(&cpu, &args), 0);
    static const float expected[] = {0.75f, 1.25f, 1.0f, 1.0f, 0.75f, 1.25f, 0.75f};
#ifdef __FAST_MATH__ // subnormal numbers are 0
    value[1] = expected[1];
#endif
    for (int i = 0; i < COUNT - 1; ++i) {
        assert_true(value[i] == expected[i]);
    }
    assert_true(t_is_nan(value[COUNT - 1])); // and not hidden
}

static void sgd_without_momentum_has_no_state(void **state) {
    (void)state;
    static const float momenta[] = {0.0f, 0.5f};
    for (int i = 0; i < 2; ++i) {
        t_chain chain;
        ms_memory_report report;
        ms_optimizer_desc sgd;
        ms_config config = t_config();
        memset(&sgd, 0, sizeof sgd);
        sgd.kind = MS_OPTIMIZER_SGD;
        sgd.momentum = momenta[i];
        assert_int_equal(t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS),
                         MS_RESULT_OK);
        ms_set_optimizer(chain.model, &sgd);
        t_ok(chain.model, ms_wrap(chain.model));
        t_report(chain.model, &report);
        assert_true(report.peak_bytes[MS_CATEGORY_OPTIMIZER] == (uint64_t)i * 3 * 256);
        assert_int_equal(ms_optimizer_state(chain.model, chain.weight[0], 0).id != 0, i);
        assert_int_equal(ms_optimizer_state(chain.model, chain.weight[0], 1).id, 0);
        ms_destroy(chain.model);
    }
}

static void frozen_params_stand_still(void **state) {
    (void)state;
    t_chain chain;
    float before[64], after[64], moment[64];
    ms_memory_report trained, frozen;
    ms_config config = t_config();
    t_chain_start(&chain, &config, 3);
    ms_model *m = chain.model;
    t_report(m, &trained);
    t_ok(m, ms_step(m, NULL));
    ms_set_frozen(m, chain.weight[1], true);
    t_ok(m, ms_wrap(m));
    t_report(m, &frozen);
    assert_true(frozen.plain_bytes < trained.plain_bytes);
    assert_true(frozen.peak_bytes[MS_CATEGORY_OPTIMIZER] ==
                trained.peak_bytes[MS_CATEGORY_OPTIMIZER] - 2 * 256);
    assert_true(ms_read(m, ms_gradient(m, chain.weight[1]), moment) != MS_RESULT_OK);
    assert_true(ms_read(m, ms_optimizer_state(m, chain.weight[1], 0), moment) != MS_RESULT_OK);
    t_ok(m, ms_read(m, chain.weight[1], before));
    t_ok(m, ms_step(m, NULL));
    t_ok(m, ms_read(m, chain.weight[1], after));
    assert_memory_equal(before, after, sizeof before);
    ms_set_frozen(m, chain.weight[1], false);
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_read(m, ms_optimizer_state(m, chain.weight[1], 0), moment));
    for (int k = 0; k < 64; ++k) {
        assert_true(moment[k] == 0.0f);
    }
    t_ok(m, ms_step(m, NULL));
    t_ok(m, ms_read(m, chain.weight[1], after));
    assert_true(memcmp(before, after, sizeof before) != 0);
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// speed

#if defined(__GNUC__) && defined(__OPTIMIZE__) && (defined(__SSE__) || defined(__aarch64__)) &&    \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define T_FAST 1
#endif

enum { SPEED_COUNT = 16384, SPEED_ROUNDS = 41 };

#ifdef T_FAST
static float one_root(float x) {
    return sqrtf(x);
}

static float (*volatile root)(float) = one_root; // so that the loop is not vectorized

static void update_one_by_one(const ms_update_args *a) {
    const ms_update_factors *f = a->factors;
    for (uint64_t i = 0; i < a->count; ++i) {
        msi_adamw_moments(f, a->gradient[i], &a->state[0][i], &a->state[1][i]);
        a->value[i] = msi_adamw_value(f, a->value[i], a->state[0][i], root(a->state[1][i]));
    }
}

/* The least time of an update, of many. */
static double least_us(const ms_update_args *args, bool one_by_one) {
    const ms_backend cpu = ms_backend_cpu();
    double least = 1e300;
    for (int round = 0; round < SPEED_ROUNDS; ++round) {
        const double start = t_hook.platform_us();
        if (one_by_one) {
            update_one_by_one(args);
        } else {
            assert_int_equal(cpu.update(cpu.user, args), 0);
        }
        const double us = t_hook.platform_us() - start;
        least = us < least ? us : least;
    }
    return least;
}
#endif

/* The update in F32 is made of vectors at any level of optimization, with errno or without. */
static void updates_are_vectorized(void **state) {
    (void)state;
#ifndef T_FAST
    print_message("skipped: this build is not for speed\n");
    skip();
#else
    static float memory[4][SPEED_COUNT];
    const ms_update_factors factors = {-1e-3f, 0.9999f, 0.9f,  0.999f, 0.1f,
                                       1e-3f,  1.0f,    1e-8f, 0.0f,   0};
    ms_step_state step;
    ms_update_args args;
    memset(&step, 0, sizeof step);
    memset(&args, 0, sizeof args);
    for (int i = 0; i < SPEED_COUNT; ++i) {
        memory[0][i] = (float)i * 1e-4f;
        memory[1][i] = (float)(i % 97) * 1e-3f;
    }
    args.kind = MS_OPTIMIZER_ADAMW;
    args.count = SPEED_COUNT;
    args.value = memory[0];
    args.gradient = memory[1];
    args.state[0] = memory[2];
    args.state[1] = memory[3];
    args.factors = &factors;
    args.state_of_step = &step;
    const double one_us = least_us(&args, true), us = least_us(&args, false);
    print_message("one by one %.1f us, by the library %.1f us\n", one_us, us);
    assert_true(us < 0.6 * one_us);
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(optimizers_follow_their_formulas),
        cmocka_unit_test(zeros_are_zeros_in_a_filled_desc),
        cmocka_unit_test(zeros_that_mean_defaults_are_doubted),
        cmocka_unit_test(lion_goes_by_signs),
        cmocka_unit_test(sgd_without_momentum_has_no_state),
        cmocka_unit_test(frozen_params_stand_still),
        cmocka_unit_test(updates_are_vectorized),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
