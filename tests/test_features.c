/*  test_features.c - each feature of the interface alone, with small layers made for it and numbers
    known in closed form. The values are small whole numbers wherever they can be, so that float32
    is exact and sums may come in any order. Nearly every test runs twice, the second time with
    ms_config.debug: the layers are honest, so it has to pass and to give the same numbers. */
#define MEMSCALE_IMPLEMENTATION
#include "../memscale.h"
#include "toy_layers.h"

enum { ROWS = T_NET_ROWS, COLS = T_NET_COLS, COUNT = ROWS * COLS };

// ------------------------------------------------------------------------------------------------
// gradients: three styles on one fan-out

enum { FAN = 4 };

typedef enum style { STYLE_BETA, STYLE_ADD, STYLE_SET } style;

static uint16_t bit_if(bool holds, int slot) {
    return (uint16_t)((holds ? 1u : 0u) << slot);
}

/* h = x p; y_k = c_k h + h q; z = y_0 + ... + y_3; loss z z / 2. */
static void check_fan(const style *styles, bool smallest) {
    static const float c[FAN] = {1.0f, 2.0f, -1.0f, 3.0f};
    t_net n;
    ms_tensor y[FAN];
    t_net_begin(&n);
    n.config.force_optimize = smallest;
    t_net_create(&n);
    ms_tensor p = t_net_param(&n, "p"), q = t_net_param(&n, "q");
    ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p);
    for (int k = 0; k < FAN; ++k) {
        t_op *o = t_net_op(&n);
        o->c[0] = c[k];
        o->accumulates.in = styles[k] == STYLE_ADD;
        o->overwrites.in = styles[k] == STYLE_SET;
        o->accumulates.param = styles[FAN - 1 - k] == STYLE_ADD;
        o->overwrites.param = styles[FAN - 1 - k] == STYLE_SET;
        y[k] = t_net_activation(&n, "y");
        ms_layer_desc desc = t_net_layer(&n, T_MIX, "consumer", h, y[k]);
        desc.param[0] = q;
        t_net_register(&n, &desc);
    }
    t_op *o = t_net_op(&n);
    for (int k = 0; k < FAN; ++k) {
        o->c[k] = 1.0f;
        o->accumulates.in |= bit_if(styles[k] == STYLE_ADD, k);
        o->overwrites.in |= bit_if(styles[k] == STYLE_SET, k);
    }
    ms_layer_desc desc = t_net_layer(&n, T_MIX, "sum", y[0], t_net_activation(&n, "z"));
    memcpy(desc.in, y, sizeof y);
    t_net_register(&n, &desc);
    t_net_loss(&n, desc.out[0], 1.0f);
    t_net_start(&n);
    t_net_write_param(&n, p, 2.0f);
    t_net_write_param(&n, q, 1.0f);
    double of_p[COLS] = {0}, of_q[COLS] = {0};
    for (int i = 0; i < COUNT; ++i) {
        double hi = (double)t_x_at(i) * ((double)t_p_at(i % COLS) + 2.0);
        double slope = 5.0 + (double)FAN * ((double)t_p_at(i % COLS) + 1.0);
        double zi = hi * slope;
        of_p[i % COLS] += zi * slope * (double)t_x_at(i);
        of_q[i % COLS] += zi * hi * (double)FAN;
    }
    for (int step = 0; step < 2; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        t_net_expect(&n, ms_gradient(n.m, p), of_p, COLS);
        t_net_expect(&n, ms_gradient(n.m, q), of_q, COLS);
    }
    t_net_end(&n);
}

static void styles_mix_on_one_fan_out(void **state) {
    (void)state;
    for (int mix = 0; mix < 81; ++mix) {
        style styles[FAN];
        for (int k = 0, rest = mix; k < FAN; ++k, rest /= 3) {
            styles[k] = (style)(rest % 3);
        }
        check_fan(styles, false);
        check_fan(styles, true);
    }
}

/* h stands in two slots of one layer, y = 2 h + 3 h, and in another layer before or behind it. */
static void check_slots(style first, style second, bool behind) {
    const ms_tensor none = {0};
    t_net n;
    t_net_begin(&n);
    t_net_create(&n);
    ms_tensor p = t_net_param(&n, "p"), y = t_net_activation(&n, "y"), other = none;
    ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p);
    for (int turn = 0; turn < 2; ++turn) {
        if ((turn == 1) == behind) {
            other = t_net_scale(&n, "other", h, 4.0f, none);
            continue;
        }
        t_op *o = t_net_op(&n);
        o->c[0] = 2.0f;
        o->c[1] = 3.0f;
        o->accumulates.in = bit_if(first == STYLE_ADD, 0) | bit_if(second == STYLE_ADD, 1);
        o->overwrites.in = bit_if(first == STYLE_SET, 0) | bit_if(second == STYLE_SET, 1);
        ms_layer_desc desc = t_net_layer(&n, T_MIX, "twice", h, y);
        desc.in[1] = h;
        t_net_register(&n, &desc);
    }
    t_net_loss(&n, t_net_sum(&n, y, other), 1.0f);
    t_net_start(&n);
    t_net_write_param(&n, p, 2.0f);
    double of_p[COLS] = {0};
    for (int i = 0; i < COUNT; ++i) {
        double x = (double)t_x_at(i);
        of_p[i % COLS] += 81.0 * x * x * ((double)t_p_at(i % COLS) + 2.0);
    }
    t_ok(n.m, ms_step(n.m, NULL));
    t_net_expect(&n, ms_gradient(n.m, p), of_p, COLS);
    t_net_end(&n);
}

static void styles_mix_on_the_slots_of_one_layer(void **state) {
    (void)state;
    for (int mix = 0; mix < 18; ++mix) {
        check_slots((style)(mix % 3), (style)(mix / 3 % 3), mix / 9 == 1);
    }
}

// ------------------------------------------------------------------------------------------------
// a layer with a recompute of its own: a = x + 1, b = 2 x, saved s = 3 x, t = x - 1

static int many_make(const ms_call *call) {
    t_op *o = (t_op *)call->user;
    int error = t_enter(call);
    const float factor[4] = {1.0f, 2.0f, 3.0f, 1.0f}, shift[4] = {1.0f, 0.0f, 0.0f, -1.0f};
    for (int k = 0; k < 4; ++k) {
        const ms_view *view = k < 2 ? &call->out[k] : &call->saved[k - 2];
        uint16_t wanted = k < 2 ? call->wanted_out : call->wanted_saved;
        o->faults += (wanted >> k % 2 & 1) != (view->data != NULL);
        for (int64_t i = 0; i < t_rows(view) * t_cols(view) && view->data != NULL; ++i) {
            t_data(view)[i] = factor[k] * t_data(&call->in[0])[i] + shift[k];
        }
    }
    return error;
}

/* Not the true gradient: what matters is that all that is read takes part in it. */
static int many_backward(const ms_call *call) {
    int error = t_enter(call);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]); ++i) {
        t_contribute(&call->grad_in[0], i,
                     t_grad_out(call, 0, i) * t_data(&call->saved[1])[i] +
                         t_grad_out(call, 1, i) * t_data(&call->saved[0])[i]);
    }
    return error;
}

enum { MANY_SCALE, MANY, MANY_A, MANY_B, MANY_SUM, MANY_LOSS };

typedef struct many {
    t_net n;
    ms_tensor p, value[4]; // a, b, s, t
} many;

/* x p -> many -> a a / 2 + b b / 2 -> loss. force: mask of a, b, s, t that are dropped. */
static void many_start(many *m, uint32_t force, uint16_t optional) {
    t_net *n = &m->n;
    t_net_create(n);
    m->p = t_net_param(n, "p");
    m->value[0] = t_net_activation(n, "a");
    m->value[1] = t_net_activation(n, "b");
    m->value[2] = t_net_saved(n, "s");
    m->value[3] = t_net_saved(n, "t");
    ms_tensor h = t_net_scale(n, "scale", n->x, 0.0f, m->p);
    ms_layer_desc desc = t_net_own(n, many_make, many_backward, "many", h, m->value[0]);
    desc.recompute = many_make;
    desc.out[1] = m->value[1];
    desc.saved[0] = m->value[2];
    desc.saved[1] = m->value[3];
    desc.backward_reads.saved = 3;
    desc.optional_saved = optional;
    t_net_register(n, &desc);
    ms_tensor aa = t_net_square(n, "of-a", m->value[0]);
    ms_tensor bb = t_net_square(n, "of-b", m->value[1]);
    t_net_loss(n, t_net_sum(n, aa, bb), 1.0f);
    for (int k = 0; k < 4; ++k) {
        ms_set_tensor_technique(n->m, m->value[k], MS_TECHNIQUE_CHECKPOINTING,
                                force >> k & 1 ? MS_SWITCH_ON : MS_SWITCH_OFF);
    }
    t_net_start(n);
    t_net_write_param(n, m->p, 2.0f);
}

static void recompute_makes_what_is_wanted(void **state) {
    (void)state;
    many plain;
    t_net_begin(&plain.n);
    many_start(&plain, 0, 0);
    t_ok(plain.n.m, ms_step(plain.n.m, NULL));
    t_expect_calls(plain.n.ops[MANY].calls[MS_PHASE_RECOMPUTE], 0);
    assert_int_equal(plain.n.ops[MANY].wanted_out[MS_PHASE_FORWARD], 3);
    assert_int_equal(plain.n.ops[MANY].wanted_saved[MS_PHASE_FORWARD], 3);
    for (uint32_t force = 1; force < 16; ++force) {
        many m;
        t_net_begin(&m.n);
        many_start(&m, force, 0);
        t_ok(m.n.m, ms_step(m.n.m, NULL));
        const t_op *o = &m.n.ops[MANY];
        assert_int_equal(o->wanted_out[MS_PHASE_FORWARD], 3);
        assert_int_equal(o->wanted_saved[MS_PHASE_FORWARD], 3);
        if (!t_debugging) { // which tries a recomputation behind every forward
            assert_int_equal(o->wanted_out[MS_PHASE_RECOMPUTE], force & 3);
            assert_int_equal(o->wanted_saved[MS_PHASE_RECOMPUTE], force >> 2);
        }
        t_net_same(&plain.n, ms_gradient(plain.n.m, plain.p), &m.n, ms_gradient(m.n.m, m.p));
        t_net_end(&m.n);
    }
    t_net_end(&plain.n);
}

/* Saved tensors that nobody will read are not made: in eval, and in a forward that drops them. */
static void optional_saved_tensors(void **state) {
    (void)state;
    for (uint32_t force = 0; force < 16; force += 4) {
        for (uint16_t optional = 0; optional < 4; ++optional) {
            many m;
            t_net_begin(&m.n);
            many_start(&m, force, optional);
            t_ok(m.n.m, ms_step(m.n.m, NULL));
            t_ok(m.n.m, ms_eval(m.n.m, NULL));
            const t_op *o = &m.n.ops[MANY];
            assert_int_equal(o->wanted_saved[MS_PHASE_FORWARD], 3 & ~(optional & force >> 2));
            assert_int_equal(o->wanted_saved[MS_PHASE_EVAL], 3 & ~optional);
            assert_true(t_debugging || o->wanted_saved[MS_PHASE_RECOMPUTE] == force >> 2);
            t_net_end(&m.n);
        }
    }
}

/* Two layers of one kind and size, of which one is cheap to recompute: that one is. Both of their
   saved tensors wait while the layers behind them run. */
static void check_price(bool first_is_cheap) {
    t_net n;
    ms_tensor y[4];
    t_net_begin(&n);
    t_net_create(&n);
    ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, t_net_param(&n, "p")), last = h;
    for (int k = 0; k < 4; ++k) {
        bool twin = k < 2;
        y[k] = t_net_activation(&n, "y");
        ms_layer_desc desc =
            t_net_own(&n, many_make, many_backward, twin ? "twin" : "tail", twin ? h : last, y[k]);
        desc.recompute = many_make;
        desc.out[1] = t_net_activation(&n, "aside");
        desc.saved[0] = ms_saved(n.m, "s", MS_DTYPE_F32, ms_shape2(ROWS, 4 * COLS));
        desc.backward_reads.saved = 1;
        desc.recompute_reads.in = 1;
        desc.flops = 1e9;
        desc.recompute_flops = (k == 0) == first_is_cheap ? 1.0 : 1e9;
        int layer = t_net_register(&n, &desc);
        if (!twin) {
            ms_set_layer_technique(n.m, n.layers[layer], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
        }
        last = k == 1 ? t_net_sum(&n, y[0], y[1]) : y[k];
    }
    t_net_loss(&n, last, 1.0f);
    ms_set_layer_technique(n.m, n.layers[0], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
    t_ok(n.m, ms_wrap(n.m));
    ms_memory_report report;
    t_report(n.m, &report);
    ms_set_budget(n.m, report.plain_bytes - 64);
    t_ok(n.m, ms_wrap(n.m));
    t_tally t = t_net_tally(&n);
    assert_int_equal(t.of_layer[MS_EVENT_RECOMPUTE][first_is_cheap ? 1 : 2] > 0, true);
    assert_int_equal(t.of_layer[MS_EVENT_RECOMPUTE][first_is_cheap ? 2 : 1], 0);
    t_report(n.m, &report);
    assert_true(report.recompute_count > 0 && report.arena_bytes <= report.budget_bytes);
    t_net_end(&n);
}

static void cheap_recomputations_come_first(void **state) {
    (void)state;
    check_price(true);
    check_price(false);
}

// ------------------------------------------------------------------------------------------------
// state: buffers that forward changes

/* y = x (1 + s), and then s += 1: a recomputation has to see the s that forward saw. */
static int counter_forward(const ms_call *call) {
    float *s = t_data(&call->state[0]);
    int error = t_enter(call);
    for (int64_t i = 0; i < t_rows(&call->out[0]) * t_cols(&call->out[0]) && error == 0; ++i) {
        t_data(&call->out[0])[i] = t_data(&call->in[0])[i] * (1.0f + s[0]);
    }
    s[0] += call->phase == MS_PHASE_EVAL ? 0.0f : 1.0f;
    return error;
}

/* As counter, and then s = 2 s. */
static int doubler_forward(const ms_call *call) {
    int error = counter_forward(call);
    float *s = t_data(&call->state[0]);
    s[0] = call->phase == MS_PHASE_EVAL ? s[0] : 2.0f * (s[0] - 1.0f);
    return error;
}

/* A T_MIX that counts its forwards alone, as it promises. */
static int promising_forward(const ms_call *call) {
    t_data(&call->state[0])[0] += call->phase == MS_PHASE_FORWARD ? 1.0f : 0.0f;
    return t_forward(call);
}

static int constant_backward(const ms_call *call) {
    t_op *o = (t_op *)call->user;
    int error = t_enter(call);
    o->faults += call->state[0].data != NULL;
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]) && error == 0; ++i) {
        t_contribute(&call->grad_in[0], i, 0.0625f * t_grad_out(call, 0, i));
    }
    return error;
}

enum { ST_SCALE, ST_COUNTER, ST_DOUBLER, ST_PROMISING, ST_SUM = 7 };

typedef struct stateful {
    t_net n;
    ms_tensor p, shared, own;
    ms_tensor y[3];
} stateful;

/* h = x p; y0 = counter(h), y1 = doubler(y0) of one buffer, y2 = promising(y1) = 2 y1 of another; the
   square of each is read in backward. dropped: the three are recomputed. */
static void stateful_start(stateful *t, bool dropped) {
    static const ms_layer_fn forwards[] = {counter_forward, doubler_forward, promising_forward};
    static const char *const names[] = {"counter", "doubler", "promising"};
    t_net *n = &t->n;
    t_net_begin(n);
    n->config.checkpointing = dropped ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    n->config.early_update = MS_SWITCH_OFF;
    t_net_create(n);
    t_net_optimizer(n, MS_OPTIMIZER_SGD, 0.0009765625f);
    t->p = t_net_param(n, "p");
    t->shared = ms_buffer(n->m, "shared", MS_DTYPE_F32, ms_shape1(1));
    t->own = ms_buffer(n->m, "own", MS_DTYPE_F32, ms_shape1(1));
    ms_tensor last = t_net_scale(n, "scale", n->x, 0.0f, t->p);
    for (int k = 0; k < 3; ++k) {
        t_net_op(n)->c[0] = 2.0f;
        t->y[k] = t_net_activation(n, names[k]);
        ms_layer_desc desc = t_net_own(n, forwards[k], constant_backward, names[k], last, t->y[k]);
        desc.state[0] = k < 2 ? t->shared : t->own;
        desc.keeps_state = k == 2;
        desc.backward_reads.nothing = true;
        last = t->y[k];
        int layer = t_net_register(n, &desc);
        if (dropped) {
            ms_set_layer_technique(n->m, n->layers[layer], MS_TECHNIQUE_CHECKPOINTING,
                                   MS_SWITCH_ON);
        }
    }
    ms_tensor z[3];
    for (int k = 0; k < 3; ++k) {
        z[k] = t_net_square(n, "square", t->y[k]);
    }
    t_net_loss(n, t_net_sum(n, t_net_sum(n, z[0], z[1]), z[2]), 1.0f / 1099511627776.0f);
    t_net_start(n);
    t_net_write_param(n, t->p, 2.0f);
}

static void expect_state(const stateful *t, int steps) {
    double shared = 0.0, own = steps;
    for (int i = 0; i < steps; ++i) {
        shared = 2.0 * (shared + 1.0);
    }
    t_net_expect(&t->n, t->shared, &shared, 1);
    t_net_expect(&t->n, t->own, &own, 1);
}

static void state_is_changed_once_a_step(void **state) {
    (void)state;
    stateful plain, dropped;
    stateful_start(&plain, false);
    stateful_start(&dropped, true);
    for (int step = 1; step <= 5; ++step) {
        double losses[2];
        t_ok(plain.n.m, ms_step(plain.n.m, &losses[0]));
        t_ok(dropped.n.m, ms_step(dropped.n.m, &losses[1]));
        assert_true(losses[0] == losses[1]);
        t_net_same(&plain.n, plain.p, &dropped.n, dropped.p);
        expect_state(&plain, step);
        expect_state(&dropped, step);
        t_ok(dropped.n.m, ms_eval(dropped.n.m, NULL));
        expect_state(&dropped, step);
    }
    for (int k = ST_COUNTER; k <= ST_PROMISING; ++k) {
        t_expect_calls(plain.n.ops[k].calls[MS_PHASE_RECOMPUTE], 0);
        assert_true(dropped.n.ops[k].calls[MS_PHASE_RECOMPUTE] >= 5);
    }
    t_net_end(&plain.n);
    t_net_end(&dropped.n);
}

/* A failing recomputation leaves the state that forward left, whichever of the layers fails. */
static void state_survives_a_failing_recomputation(void **state) {
    (void)state;
    for (int k = ST_COUNTER; k <= ST_PROMISING; ++k) {
        stateful t, twin;
        stateful_start(&t, true);
        stateful_start(&twin, true);
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t_ok(twin.n.m, ms_step(twin.n.m, NULL));
        t.n.ops[k].failing = 1u << MS_PHASE_RECOMPUTE;
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_CALLBACK);
        t.n.ops[k].failing = 0;
        twin.n.ops[ST_SUM].failing = 1u << MS_PHASE_BACKWARD;
        t_error(twin.n.m, ms_step(twin.n.m, NULL), MS_RESULT_CALLBACK);
        twin.n.ops[ST_SUM].failing = 0;
        expect_state(&t, 2);
        expect_state(&twin, 2);
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t_ok(twin.n.m, ms_step(twin.n.m, NULL));
        expect_state(&t, 3);
        t_net_same(&t.n, t.p, &twin.n, twin.p);
        t_net_end(&t.n);
        t_net_end(&twin.n);
    }
}

// ------------------------------------------------------------------------------------------------
// layers that run once

enum { LONG = 12 };

static uint32_t recomputations_of(bool odd_ones_run_once, uint64_t *arena_bytes) {
    t_net n;
    t_op ops[LONG];
    ms_memory_report report;
    uint32_t sum = 0;
    t_net_begin(&n);
    n.config.force_optimize = true;
    t_net_create(&n);
    memset(ops, 0, sizeof ops);
    ms_tensor p = t_net_param(&n, "p"), q = t_net_param(&n, "q"), last = n.x;
    for (int i = 0; i < LONG; ++i) {
        const ms_tensor y = t_net_activation(&n, "y");
        ms_layer_desc desc = t_layer(&ops[i], i % 3 == 0 ? T_AFFINE : T_SQUASH, "once", last, y);
        last = y;
        if (ops[i].kind == T_AFFINE) {
            desc.param[0] = p;
            desc.param[1] = q;
        }
        desc.no_recompute = odd_ones_run_once && i % 2 == 1;
        assert_true(ms_register_layer(n.m, &desc).id != 0);
    }
    t_net_loss(&n, last, 1.0f);
    t_net_start(&n);
    t_ok(n.m, ms_step(n.m, NULL));
    for (int i = 0; i < LONG; ++i) {
        t_expect_calls(ops[i].calls[MS_PHASE_FORWARD], 1);
        if (odd_ones_run_once && i % 2 == 1) { // once it is, even in debug
            assert_int_equal(ops[i].calls[MS_PHASE_FORWARD], 1);
            assert_int_equal(ops[i].calls[MS_PHASE_RECOMPUTE], 0);
        }
        sum += ops[i].calls[MS_PHASE_RECOMPUTE];
    }
    t_report(n.m, &report);
    *arena_bytes = report.arena_bytes;
    t_net_end(&n);
    return sum;
}

static void a_layer_that_runs_once_is_never_recomputed(void **state) {
    (void)state;
    uint64_t free_bytes = 0, bound_bytes = 0;
    assert_true(recomputations_of(false, &free_bytes) > 0);
    assert_true(recomputations_of(true, &bound_bytes) > 0);
    assert_true(free_bytes <= bound_bytes);
}

// ------------------------------------------------------------------------------------------------
// what backward destroys

typedef enum around { NOBODY, BEFORE, BEHIND, KEPT_IN, KEPT_OUT } around;

/* What comes after the layer from h to y: another reader of h, and the loss of y, or of y + z. */
static void net_finish_around(t_net *n, around other, ms_tensor h, ms_tensor y, ms_tensor z) {
    ms_tensor last = y;
    if (other == BEHIND) {
        z = t_net_square(n, "behind", h);
    }
    if (other == BEFORE || other == BEHIND) {
        last = t_net_sum(n, y, z);
    }
    t_net_loss(n, last, 1.0f);
    if (other == KEPT_IN || other == KEPT_OUT) {
        ms_set_output(n->m, other == KEPT_IN ? h : y);
    }
}

/* h = x p; y = h h / 2 by a layer that clobbers, z = h h / 2 by another one before or behind it. The
   number of real copies in a step. */
static uint32_t check_clobbers(around other, ms_overwrites clobbers, bool smallest) {
    const ms_tensor none = {0};
    t_net n;
    t_net_begin(&n);
    n.config.force_optimize = smallest;
    t_net_create(&n);
    ms_tensor p = t_net_param(&n, "p"), y = t_net_activation(&n, "y"), z = none;
    bool has_other = other == BEFORE || other == BEHIND;
    ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p);
    if (other == BEFORE) {
        z = t_net_square(&n, "before", h);
    }
    t_net_op(&n)->clobbers = clobbers;
    ms_layer_desc desc = t_net_layer(&n, T_SQUARE, "clobbers", h, y);
    desc.backward_reads.out = 1;
    t_net_register(&n, &desc);
    net_finish_around(&n, other, h, y, z);
    t_net_start(&n);
    t_net_write_param(&n, p, 2.0f);
    double of_p[COLS] = {0}, of_h[COUNT], of_y[COUNT];
    for (int i = 0; i < COUNT; ++i) {
        of_h[i] = (double)t_x_at(i) * ((double)t_p_at(i % COLS) + 2.0);
        of_y[i] = 0.5 * of_h[i] * of_h[i];
        double slope = has_other ? 2.0 : 1.0;
        of_p[i % COLS] += slope * of_y[i] * slope * of_h[i] * (double)t_x_at(i);
    }
    for (int step = 0; step < 2; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        t_net_expect(&n, ms_gradient(n.m, p), of_p, COLS);
        if (other == KEPT_IN || other == KEPT_OUT) {
            t_net_expect(&n, other == KEPT_IN ? h : y, other == KEPT_IN ? of_h : of_y, COUNT);
        }
    }
    uint32_t moves = t_net_tally(&n).moves;
    t_net_end(&n);
    return moves;
}

static void clobbered_values_are_copied_where_others_need_them(void **state) {
    (void)state;
    for (int smallest = 0; smallest < 2; ++smallest) {
        for (int mask = 0; mask < 8; ++mask) {
            for (int other = NOBODY; other <= KEPT_OUT; ++other) {
                ms_overwrites clobbers = {0, 0, 0, 0};
                clobbers.in = (mask & 1) != 0;
                clobbers.out = (mask & 2) != 0;
                clobbers.grad_out = (mask & 4) != 0;
                uint32_t moves = check_clobbers((around)other, clobbers, smallest != 0);
                /* h is read later by "before" alone (its backward comes after that of the layer that
                   clobbers), or kept; y is read by the loss, before that layer. */
                uint32_t needed =
                    (uint32_t)((mask & 1) != 0 && (other == BEFORE || other == KEPT_IN)) +
                    (uint32_t)((mask & 2) != 0 && other == KEPT_OUT);
                if (smallest == 0 && moves != needed) {
                    fail_msg("mask %d, around %d: %u copies, expected %u", mask, other,
                             (unsigned)moves, (unsigned)needed);
                }
                assert_true(moves <= needed);
            }
        }
    }
}

/* An input of the model keeps its value until it is written again. */
static void a_clobbered_input_is_copied(void **state) {
    (void)state;
    t_net n;
    double x[COUNT];
    t_net_begin(&n);
    t_net_create(&n);
    t_net_op(&n)->clobbers.in = 1;
    ms_layer_desc desc = t_net_layer(&n, T_MIX, "clobbers", n.x, t_net_activation(&n, "y"));
    desc.param[0] = t_net_param(&n, "p");
    t_net_register(&n, &desc);
    t_net_loss(&n, t_net_square(&n, "square", desc.out[0]), 1.0f);
    t_net_start(&n);
    for (int i = 0; i < COUNT; ++i) {
        x[i] = (double)t_x_at(i);
    }
    for (int step = 0; step < 2; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        t_net_expect(&n, n.x, x, COUNT);
    }
    assert_int_equal(t_net_tally(&n).moves, 1);
    t_net_end(&n);
}

// ------------------------------------------------------------------------------------------------
// what can only be computed in place

/* h = x p; y = 3 h, once or twice, in place; another layer, z = h h / 2, before or behind; loss of
   y + z. */
static uint32_t check_place(around other, bool smallest, int depth) {
    const ms_tensor none = {0};
    t_net n;
    t_net_begin(&n);
    n.config.force_optimize = smallest;
    t_net_create(&n);
    ms_tensor p = t_net_param(&n, "p"), z = none;
    ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p), y = h;
    bool has_other = other == BEFORE || other == BEHIND;
    if (other == BEFORE) {
        z = t_net_square(&n, "before", h);
    }
    for (int k = 0; k < depth; ++k) {
        t_net_op(&n)->scalar = 3.0f;
        t_net_op(&n)->must_in_place = true;
        const ms_layer_desc desc = t_net_layer(&n, T_SCALE, "place", y, t_net_activation(&n, "y"));
        t_net_register(&n, &desc);
        y = desc.out[0];
    }
    net_finish_around(&n, other, h, y, z);
    t_net_start(&n);
    t_net_write_param(&n, p, 2.0f);
    double of_p[COLS] = {0}, of_h[COUNT], of_y[COUNT];
    const double factor = depth == 1 ? 3.0 : 9.0;
    for (int i = 0; i < COUNT; ++i) {
        of_h[i] = (double)t_x_at(i) * ((double)t_p_at(i % COLS) + 2.0);
        of_y[i] = factor * of_h[i];
        double g = of_y[i] + (has_other ? 0.5 * of_h[i] * of_h[i] : 0.0);
        double slope = factor + (has_other ? of_h[i] : 0.0);
        of_p[i % COLS] += g * slope * (double)t_x_at(i);
    }
    for (int step = 0; step < 2; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        t_net_expect(&n, ms_gradient(n.m, p), of_p, COLS);
        if (other == KEPT_IN || other == KEPT_OUT) {
            t_net_expect(&n, other == KEPT_IN ? h : y, other == KEPT_IN ? of_h : of_y, COUNT);
        }
        t_ok(n.m, ms_eval(n.m, NULL));
    }
    uint32_t moves = t_net_tally(&n).moves;
    t_net_end(&n);
    return moves;
}

static void what_must_be_in_place_is(void **state) {
    (void)state;
    for (int depth = 1; depth < 3; ++depth) {
        for (int other = NOBODY; other <= KEPT_OUT; ++other) {
            uint32_t moves = check_place((around)other, false, depth);
            bool needed = other == BEFORE || other == BEHIND || other == KEPT_IN;
            /* "before" and "behind" also share the gradients of the sum. */
            assert_true(needed ? moves >= 1 && moves <= 2 : moves == 0);
            (void)check_place((around)other, true, depth);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// workspace

typedef struct scratch_op {
    t_op base; // first, for the callbacks of toy_layers.h
    ms_workspace expected[MS_PHASE_COUNT];
    int64_t rows;
    uint32_t checked;
} scratch_op;

static void check_workspace(const ms_call *call) {
    scratch_op *s = (scratch_op *)call->user;
    const ms_workspace *w = &s->expected[call->phase];
    uint64_t bytes = w->bytes + w->row_bytes * (uint64_t)s->rows;
    s->base.faults += call->workspace_bytes != bytes;
    s->base.faults += bytes != 0 && call->workspace == NULL;
    s->base.faults += ((uintptr_t)call->workspace & 63u) != 0;
    if (call->workspace == NULL) {
        return;
    }
    unsigned char *memory = (unsigned char *)call->workspace;
    for (uint64_t i = 0; i < bytes && w->contents == MS_CONTENTS_ZERO; ++i) {
        s->base.faults += memory[i] != 0;
    }
    for (uint64_t i = 0; i + 4 <= bytes && w->contents == MS_CONTENTS_FINITE; i += 4) {
        float value;
        memcpy(&value, memory + i, sizeof value);
        s->base.faults += isfinite(value) ? 0u : 1u;
    }
    memset(memory, 0xff, (size_t)bytes); // NaN, for the next who finds it
    s->checked += 1;
}

static int scratch_forward(const ms_call *call) {
    check_workspace(call);
    return t_forward(call);
}

static int scratch_backward(const ms_call *call) {
    check_workspace(call);
    return t_backward(call);
}

static void check_contents(ms_contents contents, bool own_recompute) {
    t_net n;
    scratch_op s[3];
    t_net_begin(&n);
    n.largest = 3 * ROWS;
    t_net_create(&n);
    memset(s, 0, sizeof s);
    ms_tensor p = t_net_param(&n, "p");
    ms_tensor last = t_net_scale(&n, "scale", n.x, 0.0f, p);
    for (int k = 0; k < 3; ++k) {
        ms_layer_desc desc =
            t_layer(&s[k].base, T_SQUARE, "scratch", last, t_net_activation(&n, "y"));
        last = desc.out[0];
        desc.forward = scratch_forward;
        desc.backward = scratch_backward;
        desc.recompute = own_recompute ? scratch_forward : NULL;
        desc.forward_workspace.bytes = 100;
        desc.forward_workspace.row_bytes = 28;
        desc.forward_workspace.contents = contents;
        desc.backward_workspace.bytes = k == 1 ? 0 : 4096;
        desc.backward_workspace.contents = (ms_contents)((contents + 1) % 3);
        if (own_recompute) {
            desc.recompute_workspace.row_bytes = 12;
            desc.recompute_workspace.contents = (ms_contents)((contents + 2) % 3);
        }
        s[k].rows = ROWS;
        s[k].expected[MS_PHASE_FORWARD] = s[k].expected[MS_PHASE_EVAL] = desc.forward_workspace;
        s[k].expected[MS_PHASE_BACKWARD] = desc.backward_workspace;
        s[k].expected[MS_PHASE_RECOMPUTE] =
            own_recompute ? desc.recompute_workspace : desc.forward_workspace;
        int layer = t_net_register(&n, &desc);
        if (k < 2) {
            ms_set_layer_technique(n.m, n.layers[layer], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        }
    }
    t_net_loss(&n, last, 1.0f);
    t_net_start(&n);
    for (int step = 0; step < 3; ++step) {
        int64_t rows = step == 2 ? ROWS : ROWS * (step + 2);
        s[0].rows = s[1].rows = s[2].rows = rows;
        t_ok(n.m, ms_reshape(n.m, &rows));
        t_net_write_x(&n);
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_eval(n.m, NULL));
    }
    for (int k = 0; k < 3; ++k) {
        assert_int_equal(s[k].base.faults, 0);
        assert_true(s[k].checked >= (k == 1 ? 6u : 9u));
        assert_true(s[k].base.calls[MS_PHASE_RECOMPUTE] >= (k < 2 ? 3u : 0u));
    }
    t_net_end(&n);
}

static void workspace_has_its_size_and_contents(void **state) {
    (void)state;
    for (int contents = MS_CONTENTS_ANY; contents <= MS_CONTENTS_ZERO; ++contents) {
        check_contents((ms_contents)contents, false);
        check_contents((ms_contents)contents, true);
    }
}

// ------------------------------------------------------------------------------------------------
// gradients that forward writes

/* The loss of T_SQUARES, and its gradient at once. */
static int fused_forward(const ms_call *call) {
    t_op *o = (t_op *)call->user;
    int error = t_forward(call);
    bool trains = call->phase == MS_PHASE_FORWARD;
    o->faults += trains && call->grad_in == NULL;
    o->faults += !trains && call->grad_in != NULL && call->grad_in[0].data != NULL;
    int64_t count = t_rows(&call->in[0]) * t_cols(&call->in[0]);
    for (int64_t i = 0; i < count && trains && error == 0; ++i) {
        t_contribute(&call->grad_in[0], i, t_data(&call->in[0])[i] * call->loss_factor);
    }
    return error;
}

typedef struct fused {
    t_net n;
    ms_tensor p;
    int last;
} fused;

static void fused_start(fused *f, bool is_fused, bool smallest, uint32_t micro_count) {
    t_net *n = &f->n;
    t_net_begin(n);
    n->config.force_optimize = smallest;
    n->config.accumulation_steps = micro_count;
    t_net_create(n);
    t_net_optimizer(n, MS_OPTIMIZER_SGD, 0.015625f);
    f->p = t_net_param(n, "p");
    ms_tensor h = t_net_scale(n, "scale", n->x, 0.0f, f->p);
    ms_tensor y = t_net_scale(n, "again", h, 0.0f, f->p);
    if (!is_fused) {
        f->last = t_net_loss(n, y, 1.0f);
    } else {
        ms_layer_desc desc = t_net_layer(n, T_SQUARES, "fused", y, t_losses_of(n->m, y));
        desc.forward = fused_forward;
        desc.backward = NULL;
        desc.backward_reads.in = 0;
        desc.grads_in_forward = 1;
        f->last = t_net_register(n, &desc);
        ms_set_loss(n->m, desc.out[0]);
    }
    t_net_start(n);
    t_net_write_param(n, f->p, 2.0f);
}

static void check_fused(bool smallest, uint32_t micro_count) {
    fused of[2];
    for (int i = 0; i < 2; ++i) {
        fused_start(&of[i], i == 1, smallest, micro_count);
    }
    static const float factors[] = {0.0f, 0.25f, 0.0f, -0.5f};
    for (int step = 0; step < 4; ++step) {
        double losses[2];
        for (int i = 0; i < 2; ++i) {
            ms_set_loss_factor(of[i].n.m, factors[step]);
            for (uint32_t k = 0; k < micro_count; ++k) {
                t_ok(of[i].n.m, ms_step(of[i].n.m, &losses[i]));
            }
            t_ok(of[i].n.m, ms_eval(of[i].n.m, NULL));
        }
        assert_true(losses[0] == losses[1]);
        t_net_same(&of[0].n, of[0].p, &of[1].n, of[1].p);
        const t_op *o = &of[1].n.ops[of[1].last];
        float mean = 1.0f / (float)(ROWS * (int)micro_count);
        assert_true(o->loss_factor == (factors[step] == 0.0f ? mean : factors[step]));
        assert_int_equal(o->calls[MS_PHASE_FORWARD], (step + 1) * (int)micro_count);
        assert_int_equal(o->calls[MS_PHASE_RECOMPUTE] + o->calls[MS_PHASE_BACKWARD], 0);
    }
    t_net_end(&of[0].n);
    t_net_end(&of[1].n);
}

static void a_loss_may_write_gradients_in_forward(void **state) {
    (void)state;
    for (uint32_t micro_count = 1; micro_count < 5; micro_count *= 2) {
        check_fused(false, micro_count);
        check_fused(true, micro_count);
    }
}

// ------------------------------------------------------------------------------------------------
// tensors that are not floats, tensors on the host

/* best[r] = column of the largest h; mask = h > 0; count (i64, saved) = how many are. */
static int choose_forward(const ms_call *call) {
    int error = t_enter(call);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t r = 0; r < t_rows(&call->in[0]); ++r) {
        const float *h = t_data(&call->in[0]) + r * cols;
        int64_t count = 0;
        int32_t best = 0;
        for (int64_t c = 0; c < cols; ++c) {
            best = h[c] > h[best] ? (int32_t)c : best;
            ((int8_t *)call->out[1].data)[r * cols + c] = h[c] > 0.0f;
            count += h[c] > 0.0f;
        }
        ((int32_t *)call->out[0].data)[r] = best;
        ((int64_t *)call->saved[0].data)[r] = count;
        for (int64_t c = 0; c < cols; ++c) {
            t_data(&call->out[2])[r * cols + c] = h[c] * (float)count;
        }
    }
    return error;
}

static int choose_backward(const ms_call *call) {
    t_op *o = (t_op *)call->user;
    int error = t_enter(call);
    int64_t cols = t_cols(&call->in[0]);
    o->faults += call->grad_out[0].data != NULL || call->grad_out[1].data != NULL;
    for (int64_t i = 0; i < t_rows(&call->in[0]) * cols; ++i) {
        float count = (float)((const int64_t *)call->saved[0].data)[i / cols];
        t_contribute(&call->grad_in[0], i, count * t_grad_out(call, 2, i));
    }
    return error;
}

/* y = mask h + scale[r] table[best[r]], with a scale of u8 that lies on the host. */
static int gather_forward(const ms_call *call) {
    int error = t_enter(call);
    int64_t cols = t_cols(&call->out[0]);
    const uint8_t *scale = (const uint8_t *)call->in[3].data;
    for (int64_t i = 0; i < t_rows(&call->out[0]) * cols; ++i) {
        int32_t best = ((const int32_t *)call->in[1].data)[i / cols];
        float mask = (float)((const int8_t *)call->in[2].data)[i];
        float row = t_data(&call->param[0])[best * cols + i % cols];
        t_data(&call->out[0])[i] = mask * t_data(&call->in[0])[i] + (float)scale[i / cols] * row;
    }
    return error;
}

static int gather_backward(const ms_call *call) {
    t_op *o = (t_op *)call->user;
    int error = t_enter(call);
    int64_t cols = t_cols(&call->out[0]);
    o->faults += call->grad_in[1].data != NULL || call->grad_in[3].data != NULL;
    if (call->grad_param[0].beta == 0.0f) {
        memset(call->grad_param[0].data, 0,
               (size_t)ms_shape_count(&call->grad_param[0].shape) * sizeof(float));
    }
    for (int64_t i = 0; i < t_rows(&call->out[0]) * cols; ++i) {
        int32_t best = ((const int32_t *)call->in[1].data)[i / cols];
        float scale = (float)((const uint8_t *)call->in[3].data)[i / cols];
        float mask = (float)((const int8_t *)call->in[2].data)[i];
        float g = t_grad_out(call, 0, i);
        t_contribute(&call->grad_in[0], i, mask * g);
        t_data(&call->grad_param[0])[best * cols + i % cols] += scale * g;
    }
    return error;
}

static void expect_gathered(const t_net *n, ms_tensor p, ms_tensor table, const uint8_t *scale) {
    double of_p[COLS] = {0}, of_table[COLS * COLS] = {0};
    for (int r = 0; r < ROWS; ++r) {
        int best = 0, count = 0;
        double h[COLS];
        for (int c = 0; c < COLS; ++c) {
            h[c] = (double)t_x_at(r * COLS + c) * ((double)t_p_at(c) + 2.0);
            best = h[c] > h[best] ? c : best;
            count += h[c] > 0.0;
        }
        for (int c = 0; c < COLS; ++c) {
            double mask = h[c] > 0.0 ? 1.0 : 0.0;
            double row = (double)t_p_at((best * COLS + c) % 7);
            double y = mask * h[c] * count + (double)scale[r] * row;
            of_p[c] += y * mask * count * (double)t_x_at(r * COLS + c);
            of_table[best * COLS + c] += y * (double)scale[r];
        }
    }
    t_net_expect(n, ms_gradient(n->m, p), of_p, COLS);
    t_net_expect(n, ms_gradient(n->m, table), of_table, COLS * COLS);
}

static void integers_and_host_tensors(void **state) {
    (void)state;
    for (int smallest = 0; smallest < 2; ++smallest) {
        t_net n;
        ms_memory_report report;
        t_net_begin(&n);
        n.config.force_optimize = smallest != 0;
        t_net_create(&n);
        ms_tensor p = t_net_param(&n, "p");
        ms_tensor table = ms_param(n.m, "table", MS_DTYPE_F32, ms_shape2(COLS, COLS));
        ms_tensor best = ms_activation(n.m, "best", MS_DTYPE_I32, ms_shape1(ROWS));
        ms_tensor mask = ms_activation(n.m, "mask", MS_DTYPE_I8, ms_shape2(ROWS, COLS));
        ms_tensor z = t_net_activation(&n, "z"), y = t_net_activation(&n, "y");
        ms_tensor counts = ms_saved(n.m, "counts", MS_DTYPE_I64, ms_shape1(ROWS));
        ms_tensor scale = ms_input(n.m, "scale", MS_DTYPE_U8, ms_shape1(ROWS));
        ms_set_on_host(n.m, scale);
        ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p);
        ms_layer_desc desc = t_net_own(&n, choose_forward, choose_backward, "choose", h, best);
        desc.out[1] = mask;
        desc.out[2] = z;
        desc.saved[0] = counts;
        desc.backward_reads.saved = 1;
        t_net_register(&n, &desc);
        desc = t_net_own(&n, gather_forward, gather_backward, "gather", z, y);
        desc.in[1] = best;
        desc.in[2] = mask;
        desc.in[3] = scale;
        desc.param[0] = table;
        desc.backward_reads.in = 2 | 4 | 8;
        int gather = t_net_register(&n, &desc);
        t_net_loss(&n, y, 1.0f);
        assert_int_equal(ms_gradient(n.m, best).id, 0);
        t_net_start(&n);
        t_net_write_param(&n, p, 2.0f);
        float rows[COLS * COLS];
        const uint8_t scales[ROWS] = {1, 2, 0, 3};
        for (int i = 0; i < COLS * COLS; ++i) {
            rows[i] = t_p_at(i % 7);
        }
        t_ok(n.m, ms_write(n.m, table, rows));
        t_ok(n.m, ms_write(n.m, scale, scales));
        t_ok(n.m, ms_step(n.m, NULL));
        expect_gathered(&n, p, table, scales);
        assert_true(n.ops[gather].calls[MS_PHASE_FORWARD] > 0);
        uint8_t *in_place = (uint8_t *)ms_data(n.m, scale); // fed where it lies
        assert_non_null(in_place);
        const uint8_t others[ROWS] = {5, 0, 1, 1};
        memcpy(in_place, others, sizeof others);
        t_ok(n.m, ms_step(n.m, NULL));
        expect_gathered(&n, p, table, others);
        t_report(n.m, &report);
        assert_true(report.host_bytes >= ROWS && report.host_bytes <= 64);
        assert_true(report.peak_bytes[MS_CATEGORY_INPUT] == COUNT * sizeof(float));
        t_net_end(&n);
    }
}

/* State on the host: a counter that the callback keeps there. */
static int host_forward(const ms_call *call) {
    ((int64_t *)call->state[0].data)[0] += call->phase == MS_PHASE_FORWARD ? 3 : 0;
    return t_forward(call);
}

static void find_outside(const ms_event *event, void *user) {
    uint32_t *found = (uint32_t *)user;
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        *found += event->operands[i].kind == MS_OPERAND_STATE && event->operands[i].is_outside;
    }
}

static void state_on_the_host(void **state) {
    (void)state;
    t_net n;
    uint32_t found = 0;
    int64_t count = 40;
    t_net_begin(&n);
    n.config.force_optimize = true;
    t_net_create(&n);
    ms_tensor p = t_net_param(&n, "p"), y = t_net_activation(&n, "y");
    ms_tensor counter = ms_buffer(n.m, "counter", MS_DTYPE_I64, ms_shape1(1));
    ms_set_on_host(n.m, counter);
    t_ok(n.m, ms_write(n.m, counter, &count)); // before ms_wrap
    ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p);
    ms_layer_desc desc = t_net_layer(&n, T_SQUARE, "host", h, y);
    desc.forward = host_forward;
    desc.backward_reads.in = 0; // no word of it
    desc.state[0] = counter;
    desc.keeps_state = true;
    t_net_register(&n, &desc);
    t_net_loss(&n, y, 1.0f);
    t_net_start(&n);
    for (int step = 1; step < 4; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_eval(n.m, NULL));
        t_ok(n.m, ms_read(n.m, counter, &count));
        assert_int_equal((int)count, 40 + 3 * step);
        t_ok(n.m, ms_wrap(n.m)); // keeps it
    }
    t_ok(n.m, ms_visit_events(n.m, MS_PROGRAM_TRAIN, find_outside, &found));
    assert_true(found > 0);
    t_net_end(&n);
}

// ------------------------------------------------------------------------------------------------
// gradients that nobody wants

/* h = x p; a = h h / 2, stopped; y = a + h + x q: the loss y y / 2 counts a as a constant. */
static void a_stopped_gradient_goes_nowhere(void **state) {
    (void)state;
    for (int stopped = 0; stopped < 2; ++stopped) {
        t_net n;
        t_net_begin(&n);
        t_net_create(&n);
        ms_tensor p = t_net_param(&n, "p"), q = t_net_param(&n, "q");
        ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p);
        int square = n.count;
        ms_tensor a = t_net_square(&n, "square", h);
        ms_tensor b = t_net_scale(&n, "other", n.x, 0.0f, q);
        ms_tensor sum = t_net_sum(&n, a, h);
        ms_tensor y = t_net_sum(&n, sum, b);
        t_net_loss(&n, y, 1.0f);
        if (stopped != 0) {
            ms_stop_gradient(n.m, a);
        }
        t_net_start(&n);
        t_net_write_param(&n, p, 2.0f);
        t_net_write_param(&n, q, 1.0f);
        t_ok(n.m, ms_step(n.m, NULL));
        double of_p[COLS] = {0}, of_q[COLS] = {0};
        for (int i = 0; i < COUNT; ++i) {
            double x = (double)t_x_at(i), hi = x * ((double)t_p_at(i % COLS) + 2.0);
            double yi = 0.5 * hi * hi + hi + x * ((double)t_p_at(i % COLS) + 1.0);
            of_p[i % COLS] += yi * (stopped != 0 ? 1.0 : 1.0 + hi) * x;
            of_q[i % COLS] += yi * x;
        }
        t_net_expect(&n, ms_gradient(n.m, p), of_p, COLS);
        t_net_expect(&n, ms_gradient(n.m, q), of_q, COLS);
        assert_int_equal(n.ops[square].calls[MS_PHASE_BACKWARD] > 0, stopped == 0);
        t_net_end(&n);
    }
}

enum { CHAIN = 8 };

/* h_0 = x p_0, and then a scale and a square in turn; a param for each scale. */
static void chain_create(t_net *n, ms_tensor *h, ms_tensor *p) {
    t_net_create(n);
    ms_tensor last = n->x;
    for (int i = 0; i < CHAIN; ++i) {
        if (i % 2 == 0) {
            p[i / 2] = t_net_param(n, "p");
            h[i] = t_net_scale(n, "scale", last, 0.0f, p[i / 2]);
        } else {
            h[i] = t_net_square(n, "square", last);
        }
        last = h[i];
    }
    t_net_loss(n, last, 1.0f / 1048576.0f);
}

static void chain_start(t_net *n, const ms_tensor *p) {
    t_net_start(n);
    for (int i = 0; i < CHAIN / 2; ++i) {
        t_net_write_param(n, p[i], 1.5f);
    }
}

/* Params below the first that is trained: no backward there, and nothing kept for it. */
static void a_frozen_prefix_costs_nothing(void **state) {
    (void)state;
    for (int frozen = 0; frozen < CHAIN / 2; ++frozen) {
        t_net n, twin;
        ms_tensor h[CHAIN], p[CHAIN / 2], twin_h[CHAIN], twin_p[CHAIN / 2];
        ms_memory_report report, whole;
        t_net_begin(&n);
        t_net_begin(&twin);
        chain_create(&n, h, p);
        chain_create(&twin, twin_h, twin_p);
        for (int i = 0; i < frozen; ++i) {
            ms_set_frozen(n.m, p[i], true);
        }
        chain_start(&n, p);
        chain_start(&twin, twin_p);
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(twin.m, ms_step(twin.m, NULL));
        for (int i = 0; i < CHAIN; ++i) {
            assert_int_equal(n.ops[i].calls[MS_PHASE_BACKWARD] > 0, i >= 2 * frozen);
        }
        for (int i = frozen; i < CHAIN / 2; ++i) {
            t_net_same(&n, ms_gradient(n.m, p[i]), &twin, ms_gradient(twin.m, twin_p[i]));
        }
        t_report(n.m, &report);
        t_report(twin.m, &whole);
        /* A frozen pair of layers drops its scale, which the square reads in backward, and its
           square, which the next scale reads for the gradient of its param: all but the last. */
        uint64_t bytes = COUNT * sizeof(float), kept = whole.activation_peak_bytes;
        assert_true(report.activation_peak_bytes + (uint64_t)frozen * bytes <= kept);
        t_net_end(&n);
        t_net_end(&twin);
    }
}

// ------------------------------------------------------------------------------------------------
// techniques by force

static void forced_techniques_change_the_plan(void **state) {
    (void)state;
    t_net n, plain;
    ms_tensor h[CHAIN], p[CHAIN / 2], of_plain[CHAIN], plain_p[CHAIN / 2];
    t_net_begin(&plain);
    chain_create(&plain, of_plain, plain_p);
    chain_start(&plain, plain_p);
    t_ok(plain.m, ms_step(plain.m, NULL));
    t_net_begin(&n);
    chain_create(&n, h, p);
    chain_start(&n, p);
    assert_int_equal(t_net_tally(&n).count[MS_EVENT_RECOMPUTE], 0);
    for (int i = 0; i < CHAIN - 1; ++i) { // one at a time; the last is read at once
        ms_set_tensor_technique(n.m, h[i], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        assert_int_equal(t_net_tally(&n).count[MS_EVENT_RECOMPUTE], 0); // not before ms_wrap
        t_ok(n.m, ms_wrap(n.m));
        t_tally t = t_net_tally(&n);
        assert_true(t.of_layer[MS_EVENT_RECOMPUTE][i] == 1 && t.count[MS_EVENT_RECOMPUTE] == 1);
        t_ok(n.m, ms_step(n.m, NULL));
        for (int k = 0; k < CHAIN / 2; ++k) {
            t_net_same(&n, ms_gradient(n.m, p[k]), &plain, ms_gradient(plain.m, plain_p[k]));
        }
        t_ok(n.m, ms_detach(n.m)); // heeds none of it
        assert_int_equal(t_net_tally(&n).count[MS_EVENT_RECOMPUTE], 0);
        ms_set_tensor_technique(n.m, h[i], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_DEFAULT);
    }
    t_net_end(&n);
    t_net_begin(&n);
    n.config.force_optimize = true;
    chain_create(&n, h, p);
    chain_start(&n, p);
    uint32_t before = t_net_tally(&n).count[MS_EVENT_RECOMPUTE];
    assert_true(before > 0);
    for (int i = 0; i < CHAIN; ++i) {
        ms_set_layer_technique(n.m, n.layers[i], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
        t_ok(n.m, ms_wrap(n.m));
        t_tally t = t_net_tally(&n);
        for (int k = 0; k <= i; ++k) {
            assert_int_equal(t.of_layer[MS_EVENT_RECOMPUTE][k], 0);
        }
    }
    assert_int_equal(t_net_tally(&n).count[MS_EVENT_RECOMPUTE], 0);
    t_net_end(&n);
    t_net_end(&plain);
}

static void forced_early_updates(void **state) {
    (void)state;
    t_net n;
    ms_tensor h[CHAIN], p[CHAIN / 2];
    ms_memory_report report;
    t_net_begin(&n);
    chain_create(&n, h, p);
    t_net_optimizer(&n, MS_OPTIMIZER_SGD, 0.01f);
    ms_set_tensor_technique(n.m, p[2], MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
    chain_start(&n, p);
    t_tally t = t_net_tally(&n);
    assert_true(t.first_update < t.last_backward && t.last_update > t.last_backward);
    assert_int_equal(t.updated.id, p[2].id);
    t_report(n.m, &report);
    assert_true(report.early_update);
    ms_set_layer_technique(n.m, n.layers[4], MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_OFF);
    t_ok(n.m, ms_wrap(n.m));
    t = t_net_tally(&n);
    assert_true(t.first_update > t.last_backward);
    t_net_end(&n);
    t_net_begin(&n);
    n.config.early_update = MS_SWITCH_ON;
    chain_create(&n, h, p);
    t_net_optimizer(&n, MS_OPTIMIZER_SGD, 0.01f);
    ms_set_tensor_technique(n.m, p[3], MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_OFF);
    chain_start(&n, p);
    t = t_net_tally(&n);
    assert_int_equal(t.count[MS_EVENT_UPDATE], CHAIN / 2);
    assert_true(t.first_update < t.last_backward && t.updated.id == p[2].id);
    t_ok(n.m, ms_detach(n.m));
    t = t_net_tally(&n);
    assert_true(t.first_update > t.last_backward);
    t_net_end(&n);
}

// ------------------------------------------------------------------------------------------------
// borrowed memory

typedef struct lent {
    float x[COUNT], p[COLS], gradient[COLS], velocity[COLS], buffer[COLS];
} lent;

/* y = x p, SGD with momentum: all that lives is the trainer's own. */
static void borrowed_create(t_net *n, lent *memory, ms_tensor *p) {
    ms_optimizer_desc optimizer = t_optimizer(MS_OPTIMIZER_SGD, 0.0078125f);
    optimizer.momentum = 0.5f;
    t_net_create(n);
    ms_set_optimizer(n->m, &optimizer);
    *p = t_net_param(n, "p");
    ms_tensor frozen = t_net_param(n, "frozen");
    ms_tensor y = t_net_scale(n, "scale", n->x, 0.0f, *p);
    ms_tensor z = t_net_scale(n, "frozen", y, 1.0f, frozen);
    t_net_loss(n, z, 1.0f);
    ms_set_frozen(n->m, frozen, true);
    if (memory != NULL) {
        t_ok(n->m, ms_borrow(n->m, n->x, memory->x));
        t_ok(n->m, ms_borrow(n->m, *p, memory->p));
        t_ok(n->m, ms_borrow(n->m, ms_gradient(n->m, *p), memory->gradient));
        t_ok(n->m, ms_borrow(n->m, ms_optimizer_state(n->m, *p, 0), memory->velocity));
        t_ok(n->m, ms_borrow(n->m, frozen, memory->buffer));
    }
}

static void lent_fill(lent *memory) {
    memset(memory, 0, sizeof *memory);
    for (int i = 0; i < COUNT; ++i) {
        memory->x[i] = t_x_at(i);
    }
    for (int i = 0; i < COLS; ++i) {
        memory->p[i] = t_p_at(i) + 2.0f;
    }
}

static void borrowed_memory_is_used_where_it_lies(void **state) {
    (void)state;
    static lent memory, moved;
    t_net own, borrowed;
    ms_tensor of_own, of_borrowed;
    ms_memory_report of[2];
    lent_fill(&memory);
    t_net_begin(&own);
    t_net_begin(&borrowed);
    borrowed_create(&own, NULL, &of_own);
    borrowed_create(&borrowed, &memory, &of_borrowed);
    t_net_start(&own);
    t_net_write_param(&own, of_own, 2.0f);
    t_ok(borrowed.m, ms_wrap(borrowed.m));
    assert_true(memory.x[1] == t_x_at(1) && memory.p[0] == t_p_at(0) + 2.0f); // not filled
    assert_ptr_equal(ms_data(borrowed.m, of_borrowed), memory.p);
    t_report(own.m, &of[0]);
    t_report(borrowed.m, &of[1]);
    assert_true(of[0].borrowed_bytes == 0);
    assert_true(of[1].borrowed_bytes == sizeof(float) * (COUNT + 4 * COLS));
    assert_true(of[1].arena_bytes + COUNT * sizeof(float) + 3 * 64 <= of[0].arena_bytes);
    assert_true(of[1].peak_bytes[MS_CATEGORY_PARAM] == 0);
    for (int step = 0; step < 3; ++step) {
        memset(memory.gradient, 0, sizeof memory.gradient); // the trainer's own zeroing
        t_ok(own.m, ms_step(own.m, NULL));
        t_ok(borrowed.m, ms_step(borrowed.m, NULL));
        t_net_same(&own, of_own, &borrowed, of_borrowed);
        float value[COLS];
        t_ok(own.m, ms_read(own.m, of_own, value));
        assert_memory_equal(value, memory.p, sizeof value);
        if (step == 1) { // to other memory, between steps
            moved = memory;
            t_ok(borrowed.m, ms_borrow(borrowed.m, borrowed.x, moved.x));
            t_ok(borrowed.m, ms_borrow(borrowed.m, of_borrowed, moved.p));
            memset(memory.x, 0xff, sizeof memory.x);
            memset(memory.p, 0xff, sizeof memory.p);
            moved.p[0] = memory.p[0];
            t_ok(own.m, ms_read(own.m, of_own, moved.p));
            t_net_same(&own, of_own, &borrowed, of_borrowed);
            memcpy(memory.p, moved.p, sizeof memory.p);
            t_ok(borrowed.m, ms_borrow(borrowed.m, of_borrowed, memory.p));
        }
    }
    t_ok(borrowed.m, ms_detach(borrowed.m));
    t_ok(borrowed.m, ms_wrap(borrowed.m));
    t_net_same(&own, of_own, &borrowed, of_borrowed);
    t_net_end(&own);
    t_net_end(&borrowed);
}

/* Every step adds to a borrowed gradient; with no optimizer it is the trainer's to use. */
static void a_borrowed_gradient_is_never_zeroed(void **state) {
    (void)state;
    for (int early = 0; early < 2; ++early) {
        t_net n;
        float gradient[COLS];
        double expected[COLS] = {0}, once[COLS] = {0};
        t_net_begin(&n);
        n.config.force_optimize = early != 0;
        t_net_create(&n);
        ms_tensor p = t_net_param(&n, "p");
        ms_tensor y = t_net_scale(&n, "scale", n.x, 0.0f, p);
        t_net_loss(&n, y, 1.0f);
        t_ok(n.m, ms_borrow(n.m, ms_gradient(n.m, p), gradient));
        for (int c = 0; c < COLS; ++c) {
            gradient[c] = (float)c;
            expected[c] = c;
        }
        t_net_start(&n);
        t_net_write_param(&n, p, 2.0f);
        for (int i = 0; i < COUNT; ++i) {
            once[i % COLS] +=
                (double)t_x_at(i) * (double)t_x_at(i) * ((double)t_p_at(i % COLS) + 2.0);
        }
        for (int step = 0; step < 3; ++step) {
            t_ok(n.m, ms_step(n.m, NULL));
            for (int c = 0; c < COLS; ++c) {
                expected[c] += once[c];
                assert_true((double)gradient[c] == expected[c]);
            }
            t_net_expect(&n, ms_gradient(n.m, p), expected, COLS);
        }
        t_net_end(&n);
    }
}

// ------------------------------------------------------------------------------------------------
// the trainer's own update

typedef struct own_update {
    const ms_model *m;
    ms_tensor p;
    uint32_t calls, faults;
    uint32_t fail_at;
} own_update;

/* state0 += g; state1 = t; p -= rate * state0. Then the gradient is spent. */
static int update_own(const ms_update_args *args) {
    own_update *own = (own_update *)args->user;
    own->calls += 1;
    if (own->calls == own->fail_at) {
        return 23;
    }
    own->faults += args->param.id != own->p.id || args->count != COLS ||
                   args->kind != MS_OPTIMIZER_CUSTOM || args->state[0] == NULL ||
                   args->state[1] == NULL || args->state[0] == args->state[1];
    float scale = args->gradient_scale != NULL ? *args->gradient_scale : 1.0f;
    for (uint64_t i = 0; i < args->count; ++i) {
        args->state[0][i] += scale * args->gradient[i];
        args->state[1][i] = (float)args->t;
        args->value[i] -= args->learning_rate * args->state[0][i];
        args->gradient[i] = NAN;
    }
    return 0;
}

static void custom_updates(void **state) {
    (void)state;
    for (int early = 0; early < 2; ++early) {
        t_net n;
        own_update own;
        ms_optimizer_desc optimizer = t_optimizer(MS_OPTIMIZER_CUSTOM, 0.0078125f);
        t_net_begin(&n);
        n.config.early_update = early != 0 ? MS_SWITCH_ON : MS_SWITCH_OFF;
        t_net_create(&n);
        memset(&own, 0, sizeof own);
        optimizer.update = update_own;
        optimizer.user = &own;
        optimizer.state_count = 2;
        ms_set_optimizer(n.m, &optimizer);
        ms_tensor p = own.p = t_net_param(&n, "p");
        ms_tensor y = t_net_scale(&n, "scale", n.x, 0.0f, p);
        t_net_loss(&n, y, 1.0f);
        t_net_start(&n);
        t_net_write_param(&n, p, 2.0f);
        assert_true(ms_optimizer_state(n.m, p, 1).id != 0);
        assert_true(ms_optimizer_state(n.m, p, 2).id == 0);
        double value[COLS], sum[COLS] = {0}, t[COLS];
        for (int c = 0; c < COLS; ++c) {
            value[c] = (double)t_p_at(c) + 2.0;
        }
        for (int step = 1; step < 4; ++step) {
            for (int c = 0; c < COLS; ++c) {
                double g = 0.0;
                for (int r = 0; r < ROWS; ++r) {
                    g += (double)t_x_at(r * COLS + c) * (double)t_x_at(r * COLS + c) * value[c];
                }
                sum[c] += g;
                value[c] -= 0.0078125 * sum[c];
                t[c] = step;
            }
            t_ok(n.m, ms_step(n.m, NULL));
            t_net_expect(&n, p, value, COLS);
            t_net_expect(&n, ms_optimizer_state(n.m, p, 0), sum, COLS);
            t_net_expect(&n, ms_optimizer_state(n.m, p, 1), t, COLS);
        }
        assert_true(own.calls == 3 && own.faults == 0);
        own.fail_at = 4;
        ms_result result = ms_step(n.m, NULL);
        assert_true(result == MS_RESULT_CALLBACK);
        t_text_has(ms_last_error(n.m), "23");
        t_text_has(ms_last_error(n.m), "\"p\"");
        t_net_end(&n);
    }
}

// ------------------------------------------------------------------------------------------------
// accumulation: n micro-batches are one batch of n times the rows

enum { MICRO_MAX = 4, MICRO_STEPS = 3 };

typedef struct micro_seen {
    uint64_t seed[MICRO_STEPS * MICRO_MAX];
    uint32_t count, faults, micro_count;
} micro_seen;

static micro_seen seen; // by the layer "target"

static void note_micro(const ms_call *call) {
    uint32_t at = (uint32_t)call->step * seen.micro_count + call->micro;
    seen.faults += call->micro >= seen.micro_count || call->micro_count != seen.micro_count ||
                   call->last_micro != (call->micro + 1 == seen.micro_count);
    if (at < MICRO_STEPS * MICRO_MAX) {
        seen.faults += at + 1 != seen.count && at != seen.count; // in order; in debug, again
        seen.faults += at + 1 == seen.count && seen.seed[at] != call->seed;
        seen.seed[at] = call->seed;
        seen.count = at + 1;
    }
}

/* A T_MIX that notes what the call says of the micro-batch. */
static int target_forward(const ms_call *call) {
    if (call->phase == MS_PHASE_FORWARD) {
        note_micro(call);
    }
    return t_forward(call);
}

/* The loss is that of x p against the target x + 1. */
static ms_tensor linear_create(t_net *n, uint32_t micro_count, bool by_call) {
    n->config.accumulation_steps = by_call ? 0 : micro_count;
    t_net_create(n);
    t_net_optimizer(n, MS_OPTIMIZER_SGD, 0.05f);
    if (by_call) {
        ms_set_accumulation(n->m, micro_count);
    }
    ms_tensor p = t_net_param(n, "p");
    ms_tensor y = t_net_scale(n, "scale", n->x, 0.0f, p);
    t_op *o = t_net_op(n);
    o->c[0] = 1.0f;
    o->c[1] = o->shift = -1.0f;
    ms_layer_desc desc = t_net_layer(n, T_MIX, "target", y, t_net_activation(n, "d"));
    desc.forward = target_forward;
    desc.in[1] = n->x;
    desc.backward_reads.nothing = true;
    t_net_register(n, &desc);
    t_net_loss(n, desc.out[0], 0.0f); // the mean
    return p;
}

/* p after one step over `rows` rows of x, in float64; returns the loss before. */
static double linear_step(double *p, int rows, double factor) {
    double loss = 0.0;
    for (int c = 0; c < COLS; ++c) {
        double g = 0.0;
        for (int r = 0; r < rows; ++r) {
            double x = (double)t_x_at(r * COLS + c), d = x * p[c] - x - 1.0;
            loss += 0.5 * d * d * factor;
            g += d * x * factor;
        }
        p[c] -= (double)0.05f * g;
    }
    return loss;
}

static void expect_near(const t_net *n, ms_tensor tensor, const double *expected) {
    t_net_expect_near(n, tensor, expected, COLS, 1e-5);
}

static ms_result micro_step(t_net *n, bool three_calls, bool last, double *loss) {
    if (!three_calls) {
        return ms_step(n->m, loss);
    }
    ms_result result = ms_forward(n->m, loss);
    result = result == MS_RESULT_OK ? ms_backward(n->m) : result;
    return result == MS_RESULT_OK && last ? ms_update(n->m) : result;
}

static void check_accumulation(uint32_t micro_count, bool three_calls, bool smallest,
                               bool own_factor) {
    t_net n;
    double p[COLS];
    float x[MICRO_MAX * COUNT];
    memset(&seen, 0, sizeof seen);
    seen.micro_count = micro_count;
    t_net_begin(&n);
    n.config.force_optimize = smallest;
    ms_tensor param = linear_create(&n, micro_count, three_calls);
    t_net_start(&n);
    t_net_write_param(&n, param, 2.0f);
    for (int i = 0; i < MICRO_MAX * COUNT; ++i) {
        x[i] = t_x_at(i);
    }
    for (int c = 0; c < COLS; ++c) {
        p[c] = (double)t_p_at(c) + 2.0;
    }
    int rows = ROWS * (int)micro_count;
    double factor = own_factor ? 0.0625 : 1.0 / rows;
    if (own_factor) {
        ms_set_loss_factor(n.m, 0.0625f);
    }
    for (int step = 0; step < MICRO_STEPS; ++step) {
        double sum = 0.0;
        for (uint32_t k = 0; k < micro_count; ++k) {
            double loss = 0.0;
            t_ok(n.m, ms_write(n.m, n.x, x + k * COUNT));
            t_ok(n.m, micro_step(&n, three_calls, k + 1 == micro_count, &loss));
            sum += loss;
        }
        double expected = linear_step(p, rows, factor);
        double scale = sum / expected;
        /* A micro-batch reports its part of the loss, or its own mean. */
        assert_true(fabs(scale - 1.0) < 1e-5 ||
                    (!own_factor && fabs(scale - (double)micro_count) < 1e-4));
        expect_near(&n, param, p);
    }
    assert_true(seen.count == MICRO_STEPS * micro_count && seen.faults == 0);
    for (uint32_t i = 0; i < seen.count; ++i) {
        for (uint32_t k = 0; k < i; ++k) {
            assert_true(seen.seed[i] != seen.seed[k]);
        }
    }
    t_net_end(&n);
}

static void micro_batches_are_one_batch(void **state) {
    (void)state;
    for (uint32_t micro_count = 1; micro_count <= MICRO_MAX; ++micro_count) {
        for (int mix = 0; mix < 8; ++mix) {
            check_accumulation(micro_count, (mix & 1) != 0, (mix & 2) != 0, (mix & 4) != 0);
        }
    }
}

/* A failure gives up the micro-batches before it too. */
static void a_failing_micro_batch_starts_the_step_again(void **state) {
    (void)state;
    static const ms_phase phases[] = {MS_PHASE_FORWARD, MS_PHASE_BACKWARD};
    for (int i = 0; i < 2; ++i) {
        t_net n, twin;
        t_net_begin(&n);
        t_net_begin(&twin);
        ms_tensor p = linear_create(&n, 3, false), twin_p = linear_create(&twin, 3, false);
        memset(&seen, 0, sizeof seen);
        seen.micro_count = 3;
        t_net_start(&n);
        t_net_start(&twin);
        t_net_write_param(&n, p, 2.0f);
        t_net_write_param(&twin, twin_p, 2.0f);
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_step(n.m, NULL));
        n.ops[0].failing = 1u << phases[i];
        t_error(n.m, ms_step(n.m, NULL), MS_RESULT_CALLBACK);
        n.ops[0].failing = 0;
        t_net_same(&n, p, &twin, twin_p);
        for (int k = 0; k < 6; ++k) {
            t_ok(n.m, ms_step(n.m, NULL));
            t_ok(twin.m, ms_step(twin.m, NULL));
            t_net_same(&n, p, &twin, twin_p);
        }
        t_net_end(&n);
        t_net_end(&twin);
    }
}

/* Ways to drop a step that lacks only its update. */
typedef enum dropped_by {
    BY_EVAL,
    BY_FORWARD,
    BY_STEP,
    BY_WRAP,
    BY_DETACH,
    BY_RESHAPE,
    DROPPED_BY_COUNT
} dropped_by;

/* Returns how many micro-batches of the new step it has done. */
static uint32_t drop_step(t_net *n, dropped_by by) {
    int64_t rows = ROWS;
    switch (by) {
    case BY_EVAL:
        t_ok(n->m, ms_eval(n->m, NULL));
        return 0;
    case BY_FORWARD:
        t_ok(n->m, ms_forward(n->m, NULL));
        t_ok(n->m, ms_backward(n->m));
        return 1;
    case BY_STEP:
        t_ok(n->m, ms_step(n->m, NULL));
        return 1;
    case BY_WRAP:
        t_ok(n->m, ms_wrap(n->m));
        return 0;
    case BY_DETACH:
        t_ok(n->m, ms_detach(n->m));
        return 0;
    default:
        t_ok(n->m, ms_reshape(n->m, &rows));
        return 0;
    }
}

/* All micro-batches are done, but not the update: none of them is counted in the next step. */
static void check_dropped_update(uint32_t micro_count, dropped_by by, bool smallest) {
    t_net n;
    double p[COLS];
    t_net_begin(&n);
    n.config.force_optimize = smallest;
    ms_tensor param = linear_create(&n, micro_count, false);
    memset(&seen, 0, sizeof seen);
    seen.micro_count = micro_count;
    t_net_start(&n);
    t_net_write_param(&n, param, 2.0f);
    for (int c = 0; c < COLS; ++c) {
        p[c] = (double)t_p_at(c) + 2.0;
    }
    for (int step = 0; step < 2; ++step) {
        for (uint32_t k = 0; k < micro_count; ++k) {
            t_ok(n.m, ms_forward(n.m, NULL));
            t_ok(n.m, ms_backward(n.m));
        }
        uint32_t done = drop_step(&n, by);
        if (micro_count > 1) {
            expect_near(&n, param, p); // no update yet
            t_error(n.m, ms_update(n.m), MS_RESULT_ORDER);
        } else if (by == BY_FORWARD) {
            t_ok(n.m, ms_update(n.m));
        }
        for (uint32_t k = done; k < micro_count; ++k) {
            t_ok(n.m, ms_step(n.m, NULL));
        }
        (void)linear_step(p, ROWS, 1.0 / ROWS); // equal micro-batches: the mean of one
        expect_near(&n, param, p);
    }
    t_net_end(&n);
}

static void a_step_without_its_update_starts_again(void **state) {
    (void)state;
    for (uint32_t micro_count = 1; micro_count < 4; ++micro_count) {
        for (int by = 0; by < DROPPED_BY_COUNT; ++by) {
            check_dropped_update(micro_count, (dropped_by)by, false);
            check_dropped_update(micro_count, (dropped_by)by, true);
        }
    }
}

/* A param that begins to learn between two micro-batches has missed the first: the step starts
   again. A re-wrap that changes no gradient counts on. */
static void a_rewrap_between_micro_batches(void **state) {
    (void)state;
    for (int thaws = 0; thaws < 2; ++thaws) {
        t_net n;
        float before[COLS], after[COLS];
        t_net_begin(&n);
        n.config.accumulation_steps = 2;
        t_net_create(&n);
        t_net_optimizer(&n, MS_OPTIMIZER_SGD, 0.0f);
        ms_tensor of_p = t_net_param(&n, "p"), of_q = t_net_param(&n, "q");
        ms_tensor a = t_net_scale(&n, "p", n.x, 0.0f, of_p);
        ms_tensor b = t_net_scale(&n, "q", n.x, 0.0f, of_q);
        ms_tensor y = t_net_sum(&n, a, b);
        t_net_loss(&n, y, 1.0f);
        ms_set_frozen(n.m, of_q, true);
        t_net_start(&n);
        t_net_write_param(&n, of_p, 2.0f);
        t_net_write_param(&n, of_q, 1.0f);
        t_ok(n.m, ms_read(n.m, of_p, before));
        t_ok(n.m, ms_step(n.m, NULL));
        ms_set_frozen(n.m, of_q, thaws == 0);
        t_ok(n.m, ms_wrap(n.m));
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_read(n.m, of_p, after));
        assert_int_equal(memcmp(before, after, sizeof before) != 0, thaws == 0);
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_read(n.m, of_p, after));
        assert_true(memcmp(before, after, sizeof before) != 0);
        t_net_end(&n);
    }
}

// ------------------------------------------------------------------------------------------------
// clipping

/* Two params, y = x p + x q: clipped SGD against float64. */
static void check_clipping(float limit, uint32_t micro_count, bool custom) {
    t_net n;
    own_update own;
    ms_optimizer_desc optimizer =
        t_optimizer(custom ? MS_OPTIMIZER_CUSTOM : MS_OPTIMIZER_SGD, 0.05f);
    double p[COLS], q[COLS], state[COLS] = {0}, norm = 0.0;
    t_net_begin(&n);
    n.config.accumulation_steps = micro_count;
    t_net_create(&n);
    memset(&own, 0, sizeof own);
    optimizer.update = custom ? update_own : NULL;
    optimizer.user = &own;
    optimizer.state_count = custom ? 2 : 0;
    optimizer.grad_clip_norm = limit;
    ms_set_optimizer(n.m, &optimizer);
    ms_tensor of_p = own.p = t_net_param(&n, "p"), of_q = t_net_param(&n, "q");
    ms_tensor a = t_net_scale(&n, "p", n.x, 0.0f, of_p);
    ms_tensor b = t_net_scale(&n, "q", n.x, 0.0f, of_q);
    ms_tensor y = t_net_sum(&n, a, b);
    t_net_loss(&n, y, 1.0f);
    ms_set_frozen(n.m, of_q, custom);
    t_net_start(&n);
    t_net_write_param(&n, of_p, 2.0f);
    t_net_write_param(&n, of_q, 1.0f);
    assert_int_equal(ms_gradient_norm(n.m, &norm), MS_RESULT_ORDER); // no update yet
    for (int c = 0; c < COLS; ++c) {
        p[c] = (double)t_p_at(c) + 2.0;
        q[c] = (double)t_p_at(c) + 1.0;
    }
    for (int step = 0; step < 4; ++step) {
        double g[COLS], squares = 0.0;
        for (int c = 0; c < COLS; ++c) {
            g[c] = 0.0;
            for (int r = 0; r < ROWS; ++r) {
                double x = (double)t_x_at(r * COLS + c);
                g[c] += x * x * (p[c] + q[c]) * micro_count;
            }
            squares += (custom ? 1.0 : 2.0) * g[c] * g[c];
        }
        double scale = fmin(1.0, (double)limit / sqrt(squares));
        for (int c = 0; c < COLS; ++c) {
            state[c] = (custom ? state[c] : 0.0) + scale * g[c];
            p[c] -= (double)0.05f * state[c];
            q[c] -= custom ? 0.0 : (double)0.05f * state[c];
        }
        for (uint32_t k = 0; k < micro_count; ++k) {
            t_ok(n.m, ms_step(n.m, NULL));
        }
        expect_near(&n, of_p, p);
        expect_near(&n, of_q, q);
        t_ok(n.m, ms_gradient_norm(n.m, &norm));
        assert_true(fabs(norm - sqrt(squares)) <= 1e-5 * sqrt(squares));
    }
    t_tally t = t_net_tally(&n);
    assert_int_equal(t.count[MS_EVENT_NORM], custom ? 1 : 2);
    assert_int_equal(t.count[MS_EVENT_CLIP], 1);
    assert_int_equal(own.faults, 0);
    t_net_end(&n);
}

static void gradients_are_clipped_by_their_common_norm(void **state) {
    (void)state;
    static const float limits[] = {0.5f, 7.0f, 1e6f};
    for (int i = 0; i < 3; ++i) {
        for (uint32_t micro_count = 1; micro_count < 4; micro_count += 2) {
            check_clipping(limits[i], micro_count, false);
            check_clipping(limits[i], micro_count, true);
        }
    }
}

/* The sums of the CPU backend, of any length. */
static void sums_of_squares(void **state) {
    (void)state;
    ms_backend cpu = ms_backend_cpu();
    float a[40], b[40];
    for (uint64_t count = 1; count <= 40; ++count) {
        double sum = 100.0, expected = 100.0;
        float scale = 0.0f;
        ms_step_state step;
        for (uint64_t i = 0; i < 40; ++i) {
            a[i] = b[i] = (float)(i % 7) - 2.5f;
            expected += i < count ? (double)a[i] * (double)a[i] : 0.0;
        }
        assert_int_equal(cpu.add_squares_f32(cpu.user, a, count, &sum), 0);
        assert_true(sum == expected);
        memset(&step, 0, sizeof step);
        assert_int_equal(cpu.clip_scale(cpu.user, &sum, 5.0f, &scale, &step), 0);
        assert_true(step.norm == sqrt(expected) && step.halted == (uint32_t)MS_HALT_NONE);
        assert_true(fabs((double)scale - 5.0 / sqrt(expected)) < 1e-6);
        assert_int_equal(cpu.clip_scale(cpu.user, &sum, 50.0f, &scale, &step), 0);
        assert_true(scale == 1.0f);
        assert_int_equal(cpu.add_f32(cpu.user, a, b, count), 0);
        for (uint64_t i = 0; i < 40; ++i) {
            assert_true(a[i] == (i < count ? 2.0f * b[i] : b[i]));
        }
    }
}

/* A gradient that is no number: nothing is updated, and the next step is an ordinary one. */
static void a_norm_that_is_not_finite(void **state) {
    (void)state;
    t_net n, twin;
    ms_tensor p[2];
    t_net *const nets[] = {&n, &twin};
    for (int i = 0; i < 2; ++i) {
        ms_optimizer_desc optimizer = t_optimizer(MS_OPTIMIZER_ADAMW, 0.0f); // t, and two moments
        optimizer.grad_clip_norm = 1.0f;
        t_net_begin(nets[i]);
        t_net_create(nets[i]);
        ms_set_optimizer(nets[i]->m, &optimizer);
        p[i] = t_net_param(nets[i], "p");
        ms_tensor y = t_net_scale(nets[i], "scale", nets[i]->x, 0.0f, p[i]);
        t_net_loss(nets[i], y, 1.0f);
        t_net_start(nets[i]);
        t_net_write_param(nets[i], p[i], 2.0f);
        t_ok(nets[i]->m, ms_step(nets[i]->m, NULL));
    }
    for (int k = 0; k < 2; ++k) {
        n.ops[0].poisons = true;
        t_error(n.m, t_settled(n.m, ms_step(n.m, NULL)), MS_RESULT_NONFINITE);
        t_text_has(ms_last_error(n.m), "norm");
        n.ops[0].poisons = false;
        for (int of = -1; of < 2; ++of) {
            t_net_same(&n, of < 0 ? p[0] : ms_optimizer_state(n.m, p[0], of), &twin,
                       of < 0 ? p[1] : ms_optimizer_state(twin.m, p[1], of));
        }
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(twin.m, ms_step(twin.m, NULL));
        t_net_same(&n, p[0], &twin, p[1]);
    }
    t_net_end(&n);
    t_net_end(&twin);
}

// ------------------------------------------------------------------------------------------------
// several models, one arena

/* Chains of squares and scales; deeper ones need more. */
static void alternating_create(t_net *n, ms_arena *arena, int depth, ms_switch early,
                               ms_tensor *p) {
    t_net_begin(n);
    n->config.arena = arena;
    n->config.early_update = early;
    t_net_create(n);
    t_net_optimizer(n, MS_OPTIMIZER_SGD, 0.001f);
    *p = t_net_param(n, "p");
    t_net_loss(n, t_net_pairs(n, n->x, *p, depth), 0.125f); // |y| is at most 2
    t_net_start(n);
    t_net_write_param(n, *p, 0.0f);
}

static uint64_t arena_of_one(int depth) {
    t_net n;
    ms_tensor p;
    ms_arena *arena = NULL;
    assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
    alternating_create(&n, arena, depth, MS_SWITCH_DEFAULT, &p);
    uint64_t bytes = ms_arena_bytes(arena);
    t_net_end(&n);
    ms_arena_destroy(arena);
    return bytes;
}

static void models_take_turns_in_one_arena(void **state) {
    (void)state;
    static const int depths[] = {1, 3};
    for (int order = 0; order < 2; ++order) {
        t_net shared[2], apart[2];
        ms_tensor p[2], twin[2];
        ms_arena *arena = NULL;
        assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
        for (int i = 0; i < 2; ++i) {
            alternating_create(&shared[i], arena, depths[i ^ order], MS_SWITCH_DEFAULT, &p[i]);
            alternating_create(&apart[i], NULL, depths[i ^ order], MS_SWITCH_DEFAULT, &twin[i]);
        }
        uint64_t small = arena_of_one(depths[0]), large = arena_of_one(depths[1]);
        assert_true(0 < small && small < large && ms_arena_bytes(arena) == large);
        for (int step = 0; step < 4; ++step) {
            for (int i = 0; i < 2; ++i) {
                double losses[2];
                t_ok(shared[i].m, ms_step(shared[i].m, &losses[0]));
                t_ok(apart[i].m, ms_step(apart[i].m, &losses[1]));
                assert_true(losses[0] == losses[1]);
                t_ok(shared[1 - i].m, ms_eval(shared[1 - i].m, &losses[0]));
                t_ok(apart[1 - i].m, ms_eval(apart[1 - i].m, &losses[1]));
                assert_true(losses[0] == losses[1]);
                t_net_same(&shared[i], p[i], &apart[i], twin[i]);
            }
        }
        ms_arena_destroy(arena); // its memory goes with the last model
        for (int i = 0; i < 2; ++i) {
            t_ok(shared[i].m, ms_step(shared[i].m, NULL));
            t_ok(apart[i].m, ms_step(apart[i].m, NULL));
            t_net_same(&shared[i], p[i], &apart[i], twin[i]);
            t_net_end(&shared[i]);
            t_net_end(&apart[i]);
        }
    }
}

static void expect_waiting(const t_net *n, ms_result result) {
    assert_int_equal(result, MS_RESULT_ORDER);
    t_text_has(ms_last_error(n->m), "arena");
    t_text_has(ms_last_error(n->m), "ms_update");
}

/* What has updated half of its params keeps the arena until it is done. */
static void an_early_update_keeps_the_arena(void **state) {
    (void)state;
    t_net shared[2], apart[2];
    ms_tensor p[2], twin[2];
    ms_arena *arena = NULL;
    uint64_t bytes;
    int64_t rows = ROWS;
    assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
    for (int i = 0; i < 2; ++i) {
        alternating_create(&shared[i], arena, 2 + i, MS_SWITCH_ON, &p[i]);
        alternating_create(&apart[i], NULL, 2 + i, MS_SWITCH_ON, &twin[i]);
    }
    for (int step = 0; step < 3; ++step) {
        t_net *first = &shared[step & 1], *other = &shared[1 - (step & 1)];
        t_ok(first->m, ms_forward(first->m, NULL));
        t_ok(other->m, ms_eval(other->m, NULL)); // nothing is updated yet
        t_ok(first->m, ms_forward(first->m, NULL));
        t_ok(first->m, ms_backward(first->m));
        expect_waiting(other, ms_step(other->m, NULL));
        expect_waiting(other, ms_forward(other->m, NULL));
        expect_waiting(other, ms_eval(other->m, NULL));
        expect_waiting(other, ms_wrap(other->m));
        expect_waiting(other, ms_detach(other->m));
        expect_waiting(other, ms_reshape(other->m, &rows));
        expect_waiting(other, ms_smallest_budget(other->m, &bytes));
        t_ok(first->m, ms_update(first->m));
        t_ok(other->m, ms_step(other->m, NULL));
        for (int i = 0; i < 2; ++i) {
            t_ok(apart[i].m, ms_step(apart[i].m, NULL));
            t_net_same(&shared[i], p[i], &apart[i], twin[i]);
        }
    }
    t_ok(shared[0].m, ms_forward(shared[0].m, NULL));
    t_ok(shared[0].m, ms_backward(shared[0].m));
    expect_waiting(&shared[1], ms_step(shared[1].m, NULL));
    t_net_end(&shared[0]); // waits no longer
    t_ok(shared[1].m, ms_step(shared[1].m, NULL));
    t_ok(apart[1].m, ms_step(apart[1].m, NULL));
    t_net_same(&shared[1], p[1], &apart[1], twin[1]);
    t_net_end(&shared[1]);
    t_net_end(&apart[0]);
    t_net_end(&apart[1]);
    ms_arena_destroy(arena);
}

// ------------------------------------------------------------------------------------------------
// other shapes

typedef struct shaped {
    t_net n;
    t_device device;
    ms_tensor p, buffer;
} shaped;

static void shaped_create(shaped *s, int64_t rows, bool tight) {
    t_net_begin(&s->n);
    s->n.rows = rows;
    s->n.largest = 3 * ROWS;
    s->n.config.backend = t_device_backend(&s->device);
    s->n.config.force_optimize = tight;
    t_net_create(&s->n);
    t_net_optimizer(&s->n, MS_OPTIMIZER_SGD, 0.001f);
    s->p = t_net_param(&s->n, "p");
    s->buffer = ms_buffer(s->n.m, "buffer", MS_DTYPE_F32, ms_shape1(3));
    t_net_loss(&s->n, t_net_pairs(&s->n, s->n.x, s->p, 3), 0.125f);
}

static void check_reshape(bool tight) {
    static const int64_t sizes[] = {1, 2 * ROWS, 3 * ROWS, ROWS, 5, 3 * ROWS, 1, ROWS};
    static const float kept[3] = {1.0f, 2.0f, 3.0f};
    shaped s;
    float data[3];
    shaped_create(&s, ROWS, tight);
    t_net_start(&s.n);
    t_net_write_param(&s.n, s.p, 0.0f);
    t_ok(s.n.m, ms_write(s.n.m, s.buffer, kept));
    uint64_t allocations = s.device.allocations, live = s.device.live_bytes;
    for (int turn = 0; turn < 2; ++turn) {
        for (int i = 0; i < 8; ++i) {
            uint64_t calls = s.n.heap.calls;
            float before[COLS];
            double losses[2];
            ms_memory_report report;
            t_ok(s.n.m, ms_read(s.n.m, s.p, before));
            t_ok(s.n.m, ms_reshape(s.n.m, &sizes[i]));
            assert_int_equal((int)ms_tensor_shape(s.n.m, s.n.x).dim[0], (int)sizes[i]);
            assert_true(ms_tensor_count(s.n.m, s.n.x) == (uint64_t)sizes[i] * COLS);
            t_net_write_x(&s.n);
            t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
            if (turn == 1 || i > 4) { // a shape that has been before
                assert_true(s.n.heap.calls == calls);
            }
            shaped fresh;
            shaped_create(&fresh, sizes[i], tight);
            t_net_start(&fresh.n);
            t_ok(fresh.n.m, ms_write(fresh.n.m, fresh.p, before));
            t_ok(fresh.n.m, ms_step(fresh.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            t_net_same(&s.n, s.p, &fresh.n, fresh.p);
            t_report(s.n.m, &report);
            assert_true(report.arena_bytes <= live);
            t_net_end(&fresh.n);
        }
    }
    assert_true(s.device.allocations == allocations && s.device.live_bytes == live);
    t_ok(s.n.m, ms_read(s.n.m, s.buffer, data));
    assert_memory_equal(data, kept, sizeof kept);
    t_net_end(&s.n);
    assert_true(s.device.live_count == 0 && s.device.wrong_releases == 0);
}

static void shapes_change_between_steps(void **state) {
    (void)state;
    check_reshape(false);
    check_reshape(true);
}

enum { GUARD = 8192 };

/* t_heap, with a strip behind each block that nobody may write. */
typedef struct guarded {
    t_heap heap;
    uint64_t spoiled;
} guarded;

static void *guarded_alloc(uint64_t bytes, void *user) {
    return t_heap_alloc(bytes + GUARD, &((guarded *)user)->heap); // filled with 0xa5
}

static void guarded_release(void *memory, uint64_t bytes, void *user) {
    guarded *g = (guarded *)user;
    for (uint64_t i = 0; memory != NULL && i < GUARD; ++i) {
        g->spoiled += ((const uint8_t *)memory)[bytes + i] != 0xa5;
    }
    t_heap_release(memory, memory != NULL ? bytes + GUARD : 0, &g->heap);
}

static uint32_t fits_in_place;

/* z = y / 2 as far as y goes, and 1 behind: right in place of y where both have one size. */
static int fit_forward(const ms_call *call) {
    int error = t_enter(call);
    int64_t from = t_rows(&call->in[0]) * t_cols(&call->in[0]);
    fits_in_place += call->in[0].data == call->out[0].data;
    for (int64_t i = 0; i < t_rows(&call->out[0]) * t_cols(&call->out[0]) && error == 0; ++i) {
        t_data(&call->out[0])[i] = i < from ? 0.5f * t_data(&call->in[0])[i] : 1.0f;
    }
    return error;
}

static int fit_backward(const ms_call *call) {
    int error = t_enter(call);
    int64_t to = t_rows(&call->grad_out[0]) * t_cols(&call->grad_out[0]);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]) && error == 0; ++i) {
        t_contribute(&call->grad_in[0], i, i < to ? 0.5f * t_grad_out(call, 0, i) : 0.0f);
    }
    return error;
}

typedef struct two_axes {
    t_net n;
    guarded memory;
    ms_tensor p[T_NET_OPS];
    bool bulges;
    ms_shape shape[2];
} two_axes;

static ms_tensor add_fit(t_net *n, ms_tensor y, ms_shape shape) {
    const ms_tensor z = ms_activation(n->m, "z", MS_DTYPE_F32, shape);
    ms_layer_desc desc = t_net_own(n, fit_forward, fit_backward, "fit", y, z);
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    t_net_register(n, &desc);
    return desc.out[0];
}

/* x -> [scale, square, fit to the other shape] twice. */
static ms_tensor two_axes_deep(two_axes *t) {
    t_net *n = &t->n;
    ms_tensor last = n->x;
    for (int i = 0; i < 2; ++i) {
        t->p[i] = ms_param(n->m, "p", MS_DTYPE_F32, ms_shape1(t->shape[i].dim[1]));
        last = add_fit(n, t_net_pairs(n, last, t->p[i], 1), t->shape[1 - i]);
    }
    return last;
}

/* x -> fit to one shape, to the other, and to a row -> scale twice: the peak is where one of the
   shapes is in place of the other, or both stand there. */
static ms_tensor two_axes_bulge(two_axes *t) {
    t_net *n = &t->n;
    const ms_shape row = ms_shape2(1, COLS);
    ms_tensor last = add_fit(n, add_fit(n, n->x, t->shape[0]), t->shape[1]);
    last = add_fit(n, last, row);
    for (int i = 0; i < 2; ++i) {
        t->p[i] = t_net_param(n, "p");
        last = t_net_scale(n, "scale", last, 0.0f, t->p[i]);
    }
    return last;
}

static void two_axes_create(two_axes *t, const int64_t *sizes, const int64_t *largest,
                            const int64_t *cols, bool smallest, bool bulges) {
    memset(t, 0, sizeof *t);
    t->bulges = bulges;
    t_net *n = &t->n;
    t_net_begin(n);
    n->config.force_optimize = smallest;
    n->config.allocator.alloc = guarded_alloc;
    n->config.allocator.release = guarded_release;
    n->config.allocator.user = &t->memory;
    assert_int_equal(ms_create(&n->config, &n->m), MS_RESULT_OK);
    ms_axis axes[2];
    axes[0] = ms_add_axis(n->m, "a", sizes[0], largest[0]);
    axes[1] = largest[1] != 0 ? ms_add_axis(n->m, "b", sizes[1], largest[1]) : axes[0];
    for (int i = 0; i < 2; ++i) {
        const int64_t rows = largest[1] != 0 ? sizes[i] : sizes[0];
        t->shape[i] = ms_along(ms_shape2(rows, cols[i]), 0, axes[i]);
    }
    n->x = ms_input(n->m, "x", MS_DTYPE_F32, bulges ? ms_shape2(1, COLS) : t->shape[0]);
    t_net_optimizer(n, MS_OPTIMIZER_SGD, 0.001f);
    t_net_loss(n, bulges ? two_axes_bulge(t) : two_axes_deep(t), 0.125f);
    t_net_start(n);
    for (int i = 0; i < 2; ++i) {
        t_net_write_param(n, t->p[i], 0.0f);
    }
}

static void two_axes_end(two_axes *t) {
    t_net_end(&t->n);
    assert_true(t->memory.heap.live_count == 0 && t->memory.heap.wrong_releases == 0);
    assert_true(t->memory.spoiled == 0);
}

/* Reshaped again and again, with the numbers of a fresh model, inside of what was allocated. */
static void check_two_axes(const int64_t *largest, const int64_t *cols, bool smallest,
                           bool bulges) {
    two_axes t;
    two_axes_create(&t, largest, largest, cols, smallest, bulges);
    ms_memory_report report;
    t_report(t.n.m, &report);
    const uint64_t room = report.arena_bytes;
    for (int64_t i = 2 * largest[0] * (largest[1] != 0 ? largest[1] : 1); i-- > 0;) {
        const int64_t sizes[2] = {1 + i % largest[0],
                                  1 + i / largest[0] % (largest[1] != 0 ? largest[1] : 1)};
        two_axes fresh;
        double losses[2];
        t_ok(t.n.m, ms_reshape(t.n.m, sizes));
        t_report(t.n.m, &report);
        assert_true(report.arena_bytes >= report.lower_bound_bytes && report.arena_bytes <= room);
        two_axes_create(&fresh, sizes, largest, cols, smallest, bulges);
        t_net_write_x(&t.n);
        for (int k = 0; k < 2; ++k) {
            t_net_write_param(&t.n, t.p[k], 0.0f);
        }
        for (int step = 0; step < 2; ++step) {
            t_ok(t.n.m, ms_step(t.n.m, &losses[0]));
            t_ok(fresh.n.m, ms_step(fresh.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            t_ok(t.n.m, ms_eval(t.n.m, &losses[0]));
            t_ok(fresh.n.m, ms_eval(fresh.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
        }
        for (int k = 0; k < 2; ++k) {
            t_net_same(&t.n, t.p[k], &fresh.n, fresh.p[k]);
        }
        two_axes_end(&fresh);
    }
    two_axes_end(&t);
}

/* Two shapes that are equal at some sizes of their axes only, by chance or by rounding. */
static void takeovers_hold_at_all_sizes(void **state) {
    (void)state;
    static const int64_t squares[] = {4, 4}, uneven[] = {2, 4}, one[] = {3, 0};
    static const int64_t equal[] = {16, 16}, twice[] = {16, 8};
    static const int64_t longer[] = {8, 9}, shorter[] = {9, 8}; // 96 and 108 bytes of 128
    static const int64_t wide[] = {512, 512}, wide_twice[] = {512, 256};
    static const int64_t wide_longer[] = {504, 505}, wide_shorter[] = {505, 504};
    for (int smallest = 0; smallest < 2; ++smallest) {
        check_two_axes(squares, equal, smallest != 0, false);
        check_two_axes(uneven, twice, smallest != 0, false);
        check_two_axes(one, longer, smallest != 0, false);
        check_two_axes(one, shorter, smallest != 0, false);
        check_two_axes(one, equal, smallest != 0, false);
        check_two_axes(squares, wide, smallest != 0, true);
        check_two_axes(uneven, wide_twice, smallest != 0, true);
        check_two_axes(one, wide_longer, smallest != 0, true);
        check_two_axes(one, wide_shorter, smallest != 0, true);
        check_two_axes(one, wide, smallest != 0, true);
    }
}

/* Along one axis both have one size always: then it is done in place, whatever the size. */
static void takeovers_along_one_axis(void **state) {
    (void)state;
    static const int64_t largest[] = {4, 0}, cols[] = {16, 16};
    for (int smallest = 0; smallest < 2; ++smallest) {
        two_axes t;
        two_axes_create(&t, largest, largest, cols, smallest != 0, false);
        for (int64_t rows = 1; rows <= 4; ++rows) {
            t_ok(t.n.m, ms_reshape(t.n.m, &rows));
            fits_in_place = 0;
            t_ok(t.n.m, ms_forward(t.n.m, NULL));
            assert_int_equal(fits_in_place, 2);
            t_ok(t.n.m, ms_eval(t.n.m, NULL));
            assert_int_equal(fits_in_place, 4);
        }
        two_axes_end(&t);
    }
}

enum { MANY_SHAPES = 70 };

typedef struct many_shapes {
    t_net n;
    ms_tensor p;
} many_shapes;

static void many_shapes_create(many_shapes *s, int64_t rows) {
    t_net_begin(&s->n);
    s->n.rows = rows;
    s->n.largest = MANY_SHAPES;
    t_net_create(&s->n);
    t_net_optimizer(&s->n, MS_OPTIMIZER_SGD, 0.0078125f);
    s->p = t_net_param(&s->n, "p");
    t_net_loss(&s->n, t_net_pairs(&s->n, s->n.x, s->p, 1), 0.015625f);
    t_net_start(&s->n);
    t_net_write_param(&s->n, s->p, 0.0f);
}

/* There and back through more shapes than plans are kept; their number stays bounded. */
static void more_shapes_than_plans_are_kept(void **state) {
    (void)state;
    many_shapes s;
    double losses[MANY_SHAPES];
    uint64_t live = 0;
    many_shapes_create(&s, MANY_SHAPES);
    for (int turn = 0; turn < 4; ++turn) {
        for (int i = 0; i < MANY_SHAPES; ++i) {
            int64_t rows = turn % 2 != 0 ? MANY_SHAPES - i : i + 1;
            double loss;
            t_ok(s.n.m, ms_reshape(s.n.m, &rows));
            t_ok(s.n.m, ms_eval(s.n.m, &loss));
            if (turn == 0) {
                many_shapes fresh;
                many_shapes_create(&fresh, rows);
                t_ok(fresh.n.m, ms_eval(fresh.n.m, &losses[rows - 1]));
                t_net_end(&fresh.n);
            }
            assert_true(loss == losses[rows - 1]);
            t_ok(s.n.m, ms_forward(s.n.m, &loss)); // by the other program
            assert_true(loss == losses[rows - 1]);
            t_ok(s.n.m, ms_backward(s.n.m));
            live = turn == 0 && i < 64 ? s.n.heap.live_count : live;
            assert_true(s.n.heap.live_count <= live); // 64 plans, or what they took
        }
    }
    int64_t largest = MANY_SHAPES, other = 1;
    t_ok(s.n.m, ms_reshape(s.n.m, &other));
    uint64_t calls = s.n.heap.calls;
    t_ok(s.n.m, ms_reshape(s.n.m, &largest)); // is never forgotten
    assert_true(s.n.heap.calls == calls);
    t_ok(s.n.m, ms_step(s.n.m, NULL));
    t_net_end(&s.n);
}

/* A new shape after a change that asks for a new plan: refused until ms_wrap. */
static void a_reshape_behind_a_change_waits_for_a_wrap(void **state) {
    (void)state;
    shaped s, fresh;
    int64_t more = ROWS + 1, first = ROWS;
    double losses[2];
    shaped_create(&s, ROWS, false);
    t_net_start(&s.n);
    t_net_write_param(&s.n, s.p, 0.0f);
    ms_set_frozen(s.n.m, s.p, true); // takes effect at ms_wrap
    t_error(s.n.m, ms_reshape(s.n.m, &more), MS_RESULT_ORDER);
    t_text_has(ms_last_error(s.n.m), "ms_reshape");
    t_text_has(ms_last_error(s.n.m), "ms_wrap");
    assert_int_equal((int)ms_tensor_shape(s.n.m, s.n.x).dim[0], ROWS);
    t_ok(s.n.m, ms_reshape(s.n.m, &first)); // a plan that is there
    shaped_create(&fresh, ROWS, false);
    t_net_start(&fresh.n);
    t_net_write_param(&fresh.n, fresh.p, 0.0f);
    for (int turn = 0; turn < 2; ++turn) {
        t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
        t_ok(fresh.n.m, ms_step(fresh.n.m, &losses[1]));
        assert_true(losses[0] == losses[1]);
        t_net_same(&s.n, s.p, &fresh.n, fresh.p);
        if (turn == 0) {
            ms_set_frozen(s.n.m, s.p, false);
            t_ok(s.n.m, ms_wrap(s.n.m));
            t_ok(s.n.m, ms_reshape(s.n.m, &more));
            t_ok(fresh.n.m, ms_reshape(fresh.n.m, &more));
            t_net_write_x(&s.n);
            t_net_write_x(&fresh.n);
        }
    }
    t_net_end(&s.n);
    t_net_end(&fresh.n);
}

/* An impossible budget or a lack of memory between steps: plan, sizes and values stay, and what can
   be done with them. */
static void a_failing_wrap_leaves_the_model_as_it_was(void **state) {
    (void)state;
    static const int64_t sizes[] = {ROWS, 1, 3 * ROWS, 5, ROWS};
    for (int tight = 0; tight < 2; ++tight) {
        shaped s, twin;
        shaped *const both[] = {&s, &twin};
        for (int i = 0; i < 2; ++i) {
            shaped_create(both[i], ROWS, tight != 0);
            t_net_start(&both[i]->n);
            t_net_write_param(&both[i]->n, both[i]->p, 0.0f);
        }
        for (int k = 0; k < 5; ++k) {
            ms_memory_report before, after;
            double losses[2];
            for (int i = 0; i < 2; ++i) {
                t_ok(both[i]->n.m, ms_reshape(both[i]->n.m, &sizes[k]));
                t_net_write_x(&both[i]->n);
            }
            t_report(s.n.m, &before);
            uint64_t live = s.n.heap.live_bytes, allocations = s.device.allocations;
            void *const of_p = ms_data(s.n.m, s.p);
            ms_set_budget(s.n.m, 1);
            s.n.heap.fail_at = tight != 0 ? s.n.heap.calls + 5 : 0;
            t_error(s.n.m, ms_wrap(s.n.m), tight != 0 ? MS_RESULT_OUT_OF_MEMORY : MS_RESULT_BUDGET);
            t_report(s.n.m, &after);
            assert_memory_equal(&before, &after, sizeof before);
            assert_true(s.n.heap.live_bytes == live && s.device.allocations == allocations);
            assert_ptr_equal(ms_data(s.n.m, s.p), of_p);
            assert_int_equal((int)ms_tensor_shape(s.n.m, s.n.x).dim[0], (int)sizes[k]);
            t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
            t_ok(twin.n.m, ms_step(twin.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            t_net_same(&s.n, s.p, &twin.n, twin.p);
        }
        ms_set_budget(s.n.m, s.n.config.memory_budget_bytes);
        t_ok(s.n.m, ms_wrap(s.n.m));
        t_net_end(&s.n);
        t_net_end(&twin.n);
    }
}

// ------------------------------------------------------------------------------------------------
// two params: failures between their updates, techniques that they cannot have, state that is lent

typedef struct two_params {
    t_net n;
    ms_tensor p[2];
    uint32_t updates, fail_at;
} two_params;

static int update_counted(const ms_update_args *args) {
    two_params *t = (two_params *)args->user;
    if (++t->updates == t->fail_at) {
        return 29;
    }
    for (uint64_t i = 0; i < args->count; ++i) {
        args->value[i] -= args->learning_rate * args->gradient[i];
    }
    return 0;
}

/* The moments of both params, if they are the trainer's own. */
typedef float moments[2][2][COLS];

/* y = (x p) q */
static void two_params_create(two_params *t, moments *lent_state, ms_optimizer_kind kind) {
    memset(t, 0, sizeof *t);
    t_net_begin(&t->n);
    t_net_create(&t->n);
    ms_optimizer_desc optimizer = t_optimizer(kind, 0.0078125f);
    optimizer.update = kind == MS_OPTIMIZER_CUSTOM ? update_counted : NULL;
    optimizer.user = t;
    ms_set_optimizer(t->n.m, &optimizer);
    t->p[0] = t_net_param(&t->n, "p");
    t->p[1] = t_net_param(&t->n, "q");
    ms_tensor y = t_net_scale(&t->n, "scale", t->n.x, 0.0f, t->p[0]);
    ms_tensor z = t_net_scale(&t->n, "again", y, 0.0f, t->p[1]);
    t_net_loss(&t->n, z, 0.015625f);
    for (int k = 0; k < 2 && lent_state != NULL; ++k) {
        for (int of = 0; of < 2; ++of) {
            t_ok(t->n.m,
                 ms_borrow(t->n.m, ms_optimizer_state(t->n.m, t->p[k], of), (*lent_state)[k][of]));
        }
    }
}

static void two_params_write(two_params *t) {
    t_net_write_x(&t->n);
    t_net_write_param(&t->n, t->p[0], 2.0f);
    t_net_write_param(&t->n, t->p[1], 1.5f);
}

/* A step that was cut between two updates: FAILED until ms_wrap, whatever comes in between. */
static void a_failed_model_stays_failed_until_it_is_wrapped(void **state) {
    (void)state;
    for (int in_block = 0; in_block < 2; ++in_block) {
        two_params t;
        two_params_create(&t, NULL, MS_OPTIMIZER_CUSTOM);
        t_ok(t.n.m, ms_wrap(t.n.m));
        two_params_write(&t);
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t.fail_at = t.updates + 2;
        if (in_block) {
            MS_OPTIMIZE(t.n.m) {
                t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_CALLBACK);
                t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
            }
        } else {
            t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_CALLBACK);
        }
        int64_t rows = ROWS - 1;
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
        t_ok(t.n.m, ms_detach(t.n.m));
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
        t_ok(t.n.m, ms_detach(t.n.m));
        t_error(t.n.m, ms_eval(t.n.m, NULL), MS_RESULT_FAILED);
        ms_set_budget(t.n.m, 1);
        t_error(t.n.m, ms_wrap(t.n.m), MS_RESULT_BUDGET);
        t_error(t.n.m, ms_forward(t.n.m, NULL), MS_RESULT_FAILED);
        ms_set_budget(t.n.m, t.n.config.memory_budget_bytes);
        two_params_write(&t);
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
        t_ok(t.n.m, ms_reshape(t.n.m, &rows));
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
        t_text_has(ms_last_error(t.n.m), "ms_wrap");
        t_ok(t.n.m, ms_wrap(t.n.m));
        uint32_t updates = t.updates;
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        assert_int_equal(t.updates, updates + 2);
        t_ok(t.n.m, ms_detach(t.n.m));
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t_net_end(&t.n);
    }
}

/* What ms_wrap must refuse, because it was forced, is nothing to ms_detach. */
static void the_plain_plan_heeds_no_force(void **state) {
    (void)state;
    for (int by_config = 0; by_config < 2; ++by_config) {
        t_net n;
        ms_memory_report report;
        double p[COLS];
        t_net_begin(&n);
        n.config.early_update = by_config != 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        ms_tensor param = linear_create(&n, 1, false);
        if (by_config == 0) {
            ms_set_tensor_technique(n.m, param, MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
        }
        memset(&seen, 0, sizeof seen);
        seen.micro_count = 2;
        t_net_start(&n);
        t_net_write_param(&n, param, 2.0f);
        for (int c = 0; c < COLS; ++c) {
            p[c] = (double)t_p_at(c) + 2.0;
        }
        t_ok(n.m, ms_step(n.m, NULL));
        (void)linear_step(p, ROWS, 1.0 / ROWS);
        expect_near(&n, param, p);
        ms_set_accumulation(n.m, 2);
        t_error(n.m, ms_wrap(n.m), MS_RESULT_INVALID);
        t_text_has(ms_last_error(n.m), "early");
        t_ok(n.m, ms_detach(n.m));
        t_report(n.m, &report);
        assert_false(report.early_update);
        t_ok(n.m, ms_step(n.m, NULL));
        expect_near(&n, param, p); // now the first of two micro-batches
        t_error(n.m, ms_wrap(n.m), MS_RESULT_INVALID);
        t_ok(n.m, ms_step(n.m, NULL));
        (void)linear_step(p, ROWS, 1.0 / ROWS);
        expect_near(&n, param, p);
        t_net_end(&n);
    }
}

/* The same for a param that is frozen though its early update is forced. */
static void a_frozen_param_with_a_forced_update(void **state) {
    (void)state;
    two_params t;
    float before[COLS], after[COLS];
    two_params_create(&t, NULL, MS_OPTIMIZER_SGD);
    ms_set_tensor_technique(t.n.m, t.p[0], MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
    t_ok(t.n.m, ms_wrap(t.n.m));
    two_params_write(&t);
    t_ok(t.n.m, ms_step(t.n.m, NULL));
    ms_set_frozen(t.n.m, t.p[0], true);
    t_error(t.n.m, ms_wrap(t.n.m), MS_RESULT_INVALID);
    t_text_has(ms_last_error(t.n.m), "\"p\"");
    t_text_has(ms_last_error(t.n.m), "frozen");
    t_ok(t.n.m, ms_detach(t.n.m));
    for (int k = 0; k < 2; ++k) {
        t_ok(t.n.m, ms_read(t.n.m, t.p[k], before));
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t_ok(t.n.m, ms_read(t.n.m, t.p[k], after));
        assert_true((memcmp(before, after, sizeof after) == 0) == (k == 0));
    }
    t_net_end(&t.n);
}

static void two_params_same(const two_params *a, const two_params *b) {
    for (int k = 0; k < 2; ++k) {
        t_net_same(&a->n, a->p[k], &b->n, b->p[k]);
        for (int of = 0; of < 2; ++of) {
            t_net_same(&a->n, ms_optimizer_state(a->n.m, a->p[k], of), &b->n,
                       ms_optimizer_state(b->n.m, b->p[k], of));
        }
    }
}

static void freeze(two_params *t, bool frozen) {
    ms_set_frozen(t->n.m, t->p[0], frozen);
    t_ok(t->n.m, ms_wrap(t->n.m));
}

/* AdamW, whose bias correction counts updates: a param that was frozen for a while goes on with
   borrowed moments where it was, as one that never was; with moments of the model's own it starts
   again, as one whose moments are zero. */
static void moments_of_a_param_that_is_thawed(void **state) {
    (void)state;
    for (int is_lent = 0; is_lent < 2; ++is_lent) {
        static moments memory[2];
        two_params t, twin;
        float value[COLS], zero[COLS] = {0};
        memset(memory, 0, sizeof memory);
        two_params_create(&t, is_lent ? &memory[0] : NULL, MS_OPTIMIZER_ADAMW);
        two_params_create(&twin, is_lent ? &memory[1] : NULL, MS_OPTIMIZER_ADAMW);
        two_params *const both[] = {&t, &twin};
        for (int i = 0; i < 2; ++i) {
            t_ok(both[i]->n.m, ms_wrap(both[i]->n.m));
            two_params_write(both[i]);
            for (int step = 0; step < 3; ++step) {
                t_ok(both[i]->n.m, ms_step(both[i]->n.m, NULL));
            }
        }
        two_params_same(&t, &twin);
        freeze(&t, true);
        freeze(&t, false);
        if (is_lent) {
            two_params_same(&t, &twin);
        }
        for (int of = 0; of < 2 && !is_lent; ++of) {
            t_ok(t.n.m, ms_read(t.n.m, ms_optimizer_state(t.n.m, t.p[0], of), value));
            assert_memory_equal(value, zero, sizeof value);
        }
        for (int step = 0; step < 3; ++step) {
            float old[COLS];
            t_ok(t.n.m, ms_read(t.n.m, t.p[0], old));
            t_ok(t.n.m, ms_step(t.n.m, NULL));
            t_ok(t.n.m, ms_read(t.n.m, t.p[0], value));
            for (int c = 0; c < COLS && step == 0 && !is_lent; ++c) { // at t = 1: by the rate
                assert_true(fabs(fabs((double)value[c] - (double)old[c]) - 0.0078125) < 1e-5);
            }
            t_ok(twin.n.m, ms_step(twin.n.m, NULL));
            if (is_lent) {
                two_params_same(&t, &twin);
            }
        }
        t_net_end(&t.n);
        t_net_end(&twin.n);
    }
}

// ------------------------------------------------------------------------------------------------
// plans for others: the events of a dry run, carried out here, train as the library does

enum { PLAN_LAYERS = T_NET_OPS, PLAN_PARAMS = 3 };
enum { PLAN_RATE_SHIFT = 27 };

typedef struct plan_net {
    t_net n;
    ms_layer_desc desc[PLAN_LAYERS];
    ms_tensor p[PLAN_PARAMS];
    unsigned char *arena;
    uint64_t arena_bytes;
    bool placing; // the first walk: where do the fixed values lie?
    uint32_t index, faults;
    uint32_t callbacks[MS_PHASE_COUNT];
} plan_net;

static float plan_rate(void) {
    return 1.0f / (float)(1 << PLAN_RATE_SHIFT);
}

/* Registers the desc, without its callbacks if the model is to plan alone. */
static void plan_layer(plan_net *p, const ms_layer_desc *desc) {
    ms_layer_desc bare = *desc;
    p->desc[p->n.count] = *desc;
    if (p->n.config.dry_run) {
        bare.forward = bare.backward = NULL;
        bare.user = NULL;
        bare.no_backward = desc->backward == NULL;
    }
    t_net_register(&p->n, &bare);
}

static void plan_scale(plan_net *p, ms_tensor a, ms_tensor param, bool sets, ms_tensor y) {
    t_op *o = t_net_op(&p->n);
    o->c[0] = 0.5f;
    o->accumulates.in = !sets;
    o->overwrites.in = sets;
    ms_layer_desc desc = t_net_layer(&p->n, T_MIX, "scale", a, y);
    desc.param[0] = param;
    desc.backward_reads.in = desc.backward_reads.param = 1;
    desc.forward_workspace.bytes = 256;
    plan_layer(p, &desc);
}

/* scale, many, squares of both outputs, their sum in place, scale and scale of one value, sum, an
   eater of its input, the loss. */
static void plan_create(plan_net *p, bool dry, bool smallest) {
    t_net *n = &p->n;
    ms_tensor t[12];
    memset(p, 0, sizeof *p);
    t_net_begin(n);
    n->config.dry_run = dry;
    n->config.force_optimize = smallest;
    t_net_create(n);
    t_net_optimizer(n, MS_OPTIMIZER_SGD, plan_rate());
    for (int i = 0; i < PLAN_PARAMS; ++i) {
        p->p[i] = t_net_param(n, "p");
    }
    for (int i = 0; i < 12; ++i) {
        t[i] = t_net_activation(n, "t");
    }
    plan_scale(p, n->x, p->p[0], true, t[0]);
    ms_layer_desc desc = t_net_own(n, many_make, many_backward, "many", t[0], t[1]);
    desc.out[1] = t[2];
    desc.saved[0] = t_net_saved(n, "s");
    desc.saved[1] = t_net_saved(n, "t");
    desc.backward_reads.saved = 3;
    plan_layer(p, &desc);
    for (int k = 0; k < 2; ++k) {
        desc = t_net_layer(n, T_SQUARE, "square", t[1 + k], t[3 + k]);
        plan_layer(p, &desc);
    }
    t_net_op(n)->c[0] = t_net_op(n)->c[1] = 0.25f;
    desc = t_net_layer(n, T_MIX, "sum", t[3], t[5]);
    desc.in[1] = t[4];
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 3;
    plan_layer(p, &desc);
    plan_scale(p, t[5], p->p[1], true, t[6]);
    plan_scale(p, t[5], p->p[2], false, t[7]);
    t_net_op(n)->c[0] = t_net_op(n)->c[1] = t_net_op(n)->c[2] = 0.25f;
    desc = t_net_layer(n, T_MIX, "sum", t[6], t[8]);
    desc.in[1] = t[7];
    desc.in[2] = t[5];
    desc.backward_reads.nothing = true;
    plan_layer(p, &desc);
    t_net_op(n)->scalar = 0.5f;
    t_net_op(n)->must_in_place = true;
    desc = t_net_layer(n, T_SCALE, "place", t[8], t[9]);
    plan_layer(p, &desc);
    t_op *o = t_net_op(n);
    o->clobbers.in = o->clobbers.out = o->clobbers.grad_out = 1;
    desc = t_net_layer(n, T_SQUARE, "clobbers", t[9], t[10]);
    desc.backward_reads.in = 0; // no word of it
    plan_layer(p, &desc);
    desc = t_net_layer(n, T_SQUARES, "loss", t[10], t_losses_of(n->m, t[10]));
    plan_layer(p, &desc);
    n->loss = desc.out[0];
    ms_set_loss(n->m, n->loss);
    t_ok(n->m, ms_wrap(n->m));
}

static float *plan_memory(plan_net *p, const ms_event_operand *o) {
    p->faults += o->is_outside || o->bytes == 0 || (o->offset & 63u) != 0 ||
                 o->offset + o->bytes > p->arena_bytes;
    return (float *)(void *)(p->arena + o->offset);
}

/* The fixed values are found at the first operand that names them. */
static void plan_place(plan_net *p, const ms_event_operand *o) {
    float *memory = plan_memory(p, o);
    if (o->tensor.id == p->n.x.id) {
        for (int i = 0; i < COUNT; ++i) {
            memory[i] = t_x_at(i);
        }
    }
    for (int k = 0; k < PLAN_PARAMS; ++k) {
        for (int i = 0; i < COLS && o->tensor.id == p->p[k].id; ++i) {
            memory[i] = t_p_at(i) + 1.5f + (float)k;
        }
    }
}

typedef struct plan_views {
    ms_view of[MS_OPERAND_GRAD_PARAM + 1][MS_LIMIT_IN];
} plan_views;

static void plan_shapes(const plan_net *p, plan_views *v, ms_operand_kind kind,
                        ms_operand_kind gradient, const ms_tensor *slots, int limit) {
    for (int i = 0; i < limit; ++i) {
        if (slots[i].id != 0) {
            v->of[kind][i].shape = ms_tensor_shape(p->n.m, slots[i]);
            v->of[gradient][i].shape = v->of[kind][i].shape;
        }
    }
}

/* The call that the event describes. */
static void plan_call(plan_net *p, const ms_event *event, ms_phase phase) {
    static plan_views v;
    ms_call call;
    const ms_layer_desc *desc = &p->desc[event->layer.id - 1];
    memset(&v, 0, sizeof v);
    memset(&call, 0, sizeof call);
    plan_shapes(p, &v, MS_OPERAND_IN, MS_OPERAND_GRAD_IN, desc->in, MS_LIMIT_IN);
    plan_shapes(p, &v, MS_OPERAND_OUT, MS_OPERAND_GRAD_OUT, desc->out, MS_LIMIT_OUT);
    plan_shapes(p, &v, MS_OPERAND_SAVED, MS_OPERAND_SAVED, desc->saved, MS_LIMIT_SAVED);
    plan_shapes(p, &v, MS_OPERAND_PARAM, MS_OPERAND_GRAD_PARAM, desc->param, MS_LIMIT_PARAM);
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        const ms_event_operand *o = &event->operands[i];
        float *memory = plan_memory(p, o);
        if (o->kind == MS_OPERAND_WORKSPACE) {
            call.workspace = memory;
            call.workspace_bytes = o->bytes;
            continue;
        }
        if (o->kind > MS_OPERAND_GRAD_PARAM || o->slot >= MS_LIMIT_IN) {
            p->faults += 1;
            continue;
        }
        v.of[o->kind][o->slot].data = memory;
        v.of[o->kind][o->slot].beta = o->accumulate ? 1.0f : 0.0f;
        if (phase != MS_PHASE_BACKWARD) {
            call.wanted_out |= (uint16_t)((o->kind == MS_OPERAND_OUT) << o->slot);
            call.wanted_saved |= (uint16_t)((o->kind == MS_OPERAND_SAVED) << o->slot);
        }
    }
    call.user = desc->user;
    call.phase = phase;
    call.in = v.of[MS_OPERAND_IN];
    call.out = v.of[MS_OPERAND_OUT];
    call.saved = v.of[MS_OPERAND_SAVED];
    call.param = v.of[MS_OPERAND_PARAM];
    call.grad_out = v.of[MS_OPERAND_GRAD_OUT];
    call.grad_in = v.of[MS_OPERAND_GRAD_IN];
    call.grad_param = v.of[MS_OPERAND_GRAD_PARAM];
    p->callbacks[phase] += 1;
    p->faults +=
        (uint32_t)(phase == MS_PHASE_BACKWARD ? desc->backward(&call) : desc->forward(&call));
}

static void plan_update(plan_net *p, const ms_event *event) {
    float *value = NULL;
    const float *gradient = NULL;
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        const ms_event_operand *o = &event->operands[i];
        if (o->tensor.id == event->tensor.id) {
            value = plan_memory(p, o);
        } else if (o->tensor.id == ms_gradient(p->n.m, event->tensor).id) {
            gradient = plan_memory(p, o);
        }
    }
    if (value == NULL || gradient == NULL) {
        p->faults += 1;
        return;
    }
    for (int i = 0; i < COLS; ++i) {
        value[i] -= plan_rate() * (gradient[i] + 0.0f * value[i]);
    }
}

static void plan_fill(plan_net *p, const ms_event_operand *o, float value) {
    float *memory = plan_memory(p, o);
    for (uint64_t i = 0; i < o->bytes / sizeof(float); ++i) {
        memory[i] = value;
    }
}

static void plan_event(const ms_event *event, void *user) {
    static const ms_phase phases[] = {MS_PHASE_FORWARD, MS_PHASE_RECOMPUTE, MS_PHASE_BACKWARD,
                                      MS_PHASE_EVAL};
    plan_net *p = (plan_net *)user;
    const ms_event_operand *o = event->operands;
    bool drops = event->kind == MS_EVENT_DROP; // behind the instruction after which they are dead
    p->faults += event->index != p->index - drops || event->size != sizeof *event ||
                 event->name == NULL || event->live_bytes > p->arena_bytes ||
                 (event->kind <= MS_EVENT_EVAL && event->layer.id == 0);
    p->index += !drops;
    for (uint32_t i = 0; i < event->operand_count && p->placing; ++i) {
        plan_place(p, &o[i]);
    }
    if (p->placing) {
        return;
    }
    switch (event->kind) {
    case MS_EVENT_FORWARD:
    case MS_EVENT_RECOMPUTE:
    case MS_EVENT_BACKWARD:
    case MS_EVENT_EVAL:
        plan_call(p, event, phases[event->kind]);
        break;
    case MS_EVENT_SEED:
        plan_fill(p, &o[0], 1.0f / (float)ROWS);
        break;
    case MS_EVENT_ZERO:
        plan_fill(p, &o[0], 0.0f);
        break;
    case MS_EVENT_COPY:
        memmove(plan_memory(p, &o[0]), plan_memory(p, &o[1]), (size_t)o[1].bytes);
        break;
    case MS_EVENT_ADD:
        for (uint64_t i = 0; i < o[0].bytes / sizeof(float); ++i) {
            plan_memory(p, &o[0])[i] += plan_memory(p, &o[1])[i];
        }
        break;
    case MS_EVENT_UPDATE:
        plan_update(p, event);
        break;
    case MS_EVENT_DROP:
        for (uint32_t i = 0; i < event->operand_count; ++i) {
            plan_fill(p, &o[i], NAN);
        }
        break;
    default:
        p->faults += 1;
        break;
    }
}

static void plan_find(const ms_event *event, void *user) {
    plan_net *p = (plan_net *)user;
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        for (int k = 0; k < PLAN_PARAMS; ++k) {
            if (event->operands[i].tensor.id == p->p[k].id) {
                p->callbacks[k] = (uint32_t)event->operands[i].offset;
            }
        }
    }
}

static void check_plan(bool smallest) {
    static plan_net real, dry;
    ms_memory_report report;
    int learned = 0;
    plan_create(&real, false, smallest);
    plan_create(&dry, true, smallest);
    t_net_write_x(&real.n);
    for (int k = 0; k < PLAN_PARAMS; ++k) {
        t_net_write_param(&real.n, real.p[k], 1.5f + (float)k);
    }
    t_report(dry.n.m, &report);
    dry.arena_bytes = report.arena_bytes;
    dry.arena = (unsigned char *)malloc((size_t)report.arena_bytes);
    assert_non_null(dry.arena);
    memset(dry.arena, 0xff, (size_t)report.arena_bytes); // NaN
    dry.placing = true;
    t_ok(dry.n.m, ms_visit_events(dry.n.m, MS_PROGRAM_TRAIN, plan_event, &dry));
    dry.placing = false;
    assert_int_equal(dry.index, report.instruction_count);
    for (int step = 0; step < 4; ++step) {
        dry.index = 0;
        memset(dry.callbacks, 0, sizeof dry.callbacks);
        t_ok(dry.n.m, ms_visit_events(dry.n.m, MS_PROGRAM_TRAIN, plan_event, &dry));
        assert_int_equal(dry.faults, 0);
        assert_int_equal(dry.callbacks[MS_PHASE_RECOMPUTE], report.recompute_count);
        assert_int_equal(dry.callbacks[MS_PHASE_FORWARD], dry.n.count);
        assert_int_equal(dry.callbacks[MS_PHASE_BACKWARD], dry.n.count);
        if (step == 2) { // an eval in between changes nothing
            dry.index = 0;
            t_ok(dry.n.m, ms_visit_events(dry.n.m, MS_PROGRAM_EVAL, plan_event, &dry));
            assert_int_equal(dry.callbacks[MS_PHASE_EVAL], dry.n.count);
        }
        t_ok(real.n.m, ms_step(real.n.m, NULL));
        t_ok(dry.n.m, ms_visit_events(dry.n.m, MS_PROGRAM_TRAIN, plan_find, &dry));
        for (int k = 0; k < PLAN_PARAMS; ++k) {
            float data[COLS];
            t_ok(real.n.m, ms_read(real.n.m, real.p[k], data));
            assert_memory_equal(dry.arena + dry.callbacks[k], data, sizeof data);
            learned += data[5] != t_p_at(5) + 1.5f + (float)k;
        }
    }
    assert_int_equal(smallest, report.recompute_count > 0);
    assert_true(learned > 0);
    free(dry.arena);
    t_net_end(&real.n);
    t_net_end(&dry.n);
}

static void a_plan_can_be_carried_out_elsewhere(void **state) {
    (void)state;
    check_plan(false);
    check_plan(true);
}

// ------------------------------------------------------------------------------------------------
// callbacks that read fields; addresses

typedef struct fields {
    t_op base;
    const float *x, *g;
    float *y, *gx;
    uint32_t binds;
} fields;

static int fields_bind(const ms_call *call) {
    fields *f = (fields *)call->user;
    bool backward = call->phase == MS_PHASE_BACKWARD;
    f->x = t_data(&call->in[0]);
    f->y = backward ? NULL : t_data(&call->out[0]);
    f->g = backward ? t_data(&call->grad_out[0]) : NULL;
    f->gx = backward ? t_data(&call->grad_in[0]) : NULL;
    f->binds += 1;
    return (f->base.failing >> call->phase & 1u) != 0 ? T_CALLBACK_ERROR : 0;
}

static int fields_forward(const ms_call *call) {
    fields *f = (fields *)call->user;
    f->base.calls[call->phase] += 1;
    for (int i = 0; i < COUNT; ++i) {
        f->y[i] = 0.5f * f->x[i] * f->x[i];
    }
    return 0;
}

static int fields_backward(const ms_call *call) {
    fields *f = (fields *)call->user;
    f->base.calls[call->phase] += 1;
    for (int i = 0; i < COUNT && f->gx != NULL; ++i) {
        f->gx[i] = f->x[i] * f->g[i];
    }
    return 0;
}

static ms_tensor add_bound(t_net *n, fields *f, ms_tensor in, bool is_recomputed) {
    const ms_tensor out = t_net_activation(n, "y");
    ms_layer_desc desc = t_net_own(n, fields_forward, fields_backward, "bound", in, out);
    desc.user = f;
    desc.bind = fields_bind;
    desc.backward_reads.in = 1;
    desc.overwrites.in = 1;
    int layer = t_net_register(n, &desc);
    ms_set_layer_technique(n->m, n->layers[layer], MS_TECHNIQUE_CHECKPOINTING,
                           is_recomputed ? MS_SWITCH_ON : MS_SWITCH_DEFAULT);
    return out;
}

static void callbacks_may_be_bound(void **state) {
    (void)state;
    t_net n, twin;
    fields f[2];
    ms_tensor p[2];
    t_net *const nets[] = {&n, &twin};
    memset(f, 0, sizeof f);
    for (int i = 0; i < 2; ++i) {
        t_net_begin(nets[i]);
        t_net_create(nets[i]);
        p[i] = t_net_param(nets[i], "p");
        ms_tensor last = t_net_scale(nets[i], "scale", nets[i]->x, 0.0f, p[i]);
        for (int k = 0; k < 2; ++k) {
            last =
                i == 0 ? add_bound(&n, &f[k], last, k == 0) : t_net_square(&twin, "square", last);
        }
        t_net_loss(nets[i], last, 1.0f);
        t_net_start(nets[i]);
        t_net_write_param(nets[i], p[i], 2.0f);
        t_ok(nets[i]->m, ms_eval(nets[i]->m, NULL));
        t_ok(nets[i]->m, ms_step(nets[i]->m, NULL));
    }
    t_net_same(&n, ms_gradient(n.m, p[0]), &twin, ms_gradient(twin.m, p[1]));
    for (int k = 0; k < 2; ++k) {
        uint32_t calls = 0;
        for (int phase = 0; phase < MS_PHASE_COUNT; ++phase) {
            calls += f[k].base.calls[phase];
        }
        assert_int_equal(f[k].binds, calls);
        t_expect_calls(f[k].base.calls[MS_PHASE_RECOMPUTE], k == 0);
    }
    f[0].base.failing = 1u << MS_PHASE_FORWARD;
    t_error(n.m, ms_step(n.m, NULL), MS_RESULT_CALLBACK);
    t_text_has(ms_last_error(n.m), "bound");
    t_text_has(ms_last_error(n.m), "bind");
    t_net_end(&n);
    t_net_end(&twin);
}

static void addresses(void **state) {
    (void)state;
    t_net n;
    ms_tensor h[CHAIN], p[CHAIN / 2];
    float value[COLS];
    t_net_begin(&n);
    chain_create(&n, h, p);
    ms_set_output(n.m, h[3]);
    chain_start(&n, p);
    float *x = (float *)ms_data(n.m, n.x);
    float *of_p = (float *)ms_data(n.m, p[1]);
    assert_non_null(x);
    assert_true(((uintptr_t)x & 63u) == 0 && ((uintptr_t)of_p & 63u) == 0);
    assert_null(ms_data(n.m, h[3]));
    assert_null(ms_data(n.m, ms_gradient(n.m, p[1])));
    t_open_device(true);
    assert_true(x[1] == t_x_at(1) && of_p[0] == t_p_at(0) + 1.5f);
    x[1] = 7.0f;
    t_open_device(false);
    t_ok(n.m, ms_step(n.m, NULL));
    assert_true(ms_data(n.m, n.x) == x && ms_data(n.m, p[1]) == of_p);
    assert_true(n.ops[0].calls[MS_PHASE_FORWARD] > 0);
    const float *kept = (const float *)ms_data(n.m, h[3]);
    const float *gradient = (const float *)ms_data(n.m, ms_gradient(n.m, p[1]));
    assert_true(kept != NULL && gradient != NULL);
    t_ok(n.m, ms_read(n.m, ms_gradient(n.m, p[1]), value));
    double h1 = 7.0 * (t_p_at(1) + 1.5), h3 = 0.5 * h1 * h1 * (t_p_at(1) + 1.5);
    t_open_device(true);
    assert_memory_equal(value, gradient, sizeof value);
    assert_true((double)kept[1] == 0.5 * h3 * h3);
    t_open_device(false);
    assert_null(ms_data(n.m, h[2]));
    ms_tensor wrong = {4711};
    assert_null(ms_data(n.m, wrong));
    t_net_end(&n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T_TWICE(styles_mix_on_one_fan_out),
        T_TWICE(styles_mix_on_the_slots_of_one_layer),
        T_TWICE(recompute_makes_what_is_wanted),
        T_TWICE(optional_saved_tensors),
        T_TWICE(cheap_recomputations_come_first),
        T_TWICE(state_is_changed_once_a_step),
        cmocka_unit_test(state_survives_a_failing_recomputation),
        T_TWICE(a_layer_that_runs_once_is_never_recomputed),
        T_TWICE(clobbered_values_are_copied_where_others_need_them),
        T_TWICE(a_clobbered_input_is_copied),
        T_TWICE(what_must_be_in_place_is),
        T_TWICE(workspace_has_its_size_and_contents),
        T_TWICE(a_loss_may_write_gradients_in_forward),
        T_TWICE(integers_and_host_tensors),
        T_TWICE(state_on_the_host),
        T_TWICE(a_stopped_gradient_goes_nowhere),
        T_TWICE(a_frozen_prefix_costs_nothing),
        T_TWICE(forced_techniques_change_the_plan),
        T_TWICE(forced_early_updates),
        T_TWICE(borrowed_memory_is_used_where_it_lies),
        T_TWICE(a_borrowed_gradient_is_never_zeroed),
        T_TWICE(custom_updates),
        T_TWICE(micro_batches_are_one_batch),
        T_TWICE(a_rewrap_between_micro_batches),
        T_TWICE(a_failing_micro_batch_starts_the_step_again),
        T_TWICE(a_step_without_its_update_starts_again),
        T_TWICE(gradients_are_clipped_by_their_common_norm),
        cmocka_unit_test(sums_of_squares),
        T_TWICE(a_norm_that_is_not_finite),
        T_TWICE(models_take_turns_in_one_arena),
        T_TWICE(an_early_update_keeps_the_arena),
        T_TWICE(shapes_change_between_steps),
        T_TWICE(takeovers_hold_at_all_sizes),
        cmocka_unit_test(takeovers_along_one_axis),
        T_TWICE(more_shapes_than_plans_are_kept),
        T_TWICE(a_reshape_behind_a_change_waits_for_a_wrap),
        T_TWICE(a_failing_wrap_leaves_the_model_as_it_was),
        T_TWICE(a_failed_model_stays_failed_until_it_is_wrapped),
        T_TWICE(the_plain_plan_heeds_no_force),
        T_TWICE(a_frozen_param_with_a_forced_update),
        T_TWICE(moments_of_a_param_that_is_thawed),
        T_TWICE(a_plan_can_be_carried_out_elsewhere),
        T_TWICE(callbacks_may_be_bound),
        T_TWICE(addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
