/*  test_declarations.c - each thing that a layer can declare alone, with toy layers and numbers
    known in closed form. The values are small whole numbers wherever they can be, so that
    float32 is exact and sums may come in any order. Nearly every test runs twice, the second
    time with ms_config.debug: the layers are honest, so it has to pass and to give the same
    numbers. What steps do is in test_steps.c, other shapes are in test_shapes.c. */
#include "private.h"
#include "toy_layers.h"

enum { ROWS = T_NET_ROWS, COLS = T_NET_COLS, COUNT = ROWS * COLS };

// ------------------------------------------------------------------------------------------------
// gradients: three styles on one fan-out

enum { FAN = 4 };

typedef enum style { STYLE_BETA, STYLE_ADD, STYLE_SET } style;

static uint32_t bit_if(bool holds, int slot) {
    return (holds ? 1u : 0u) << slot;
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

/* h is in two slots of one layer, y = 2 h + 3 h, and in one of another layer before or after it. */
static void check_slots(style first, style second, bool other_first) {
    const ms_tensor none = {0};
    t_net n;
    t_net_begin(&n);
    t_net_create(&n);
    ms_tensor p = t_net_param(&n, "p"), y = t_net_activation(&n, "y"), other = none;
    ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p);
    for (int turn = 0; turn < 2; ++turn) {
        if ((turn == 0) == other_first) {
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
        check_slots((style)(mix % 3), (style)(mix / 3 % 3), mix / 9 == 0);
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
        uint32_t wanted = k < 2 ? call->wanted_out : call->wanted_saved;
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
static void many_start(many *m, uint32_t force, uint32_t optional) {
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
        if (!t_debugging) { // which tries a recomputation after every forward
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
        for (uint32_t optional = 0; optional < 4; ++optional) {
            many m;
            t_net_begin(&m.n);
            many_start(&m, force, optional);
            t_ok(m.n.m, ms_step(m.n.m, NULL));
            t_ok(m.n.m, ms_eval(m.n.m, NULL));
            const t_op *o = &m.n.ops[MANY];
            if (!t_debugging) { // which tries both
                assert_int_equal(o->wanted_saved[MS_PHASE_FORWARD], 3 & ~(optional & force >> 2));
            }
            assert_int_equal(o->wanted_saved[MS_PHASE_EVAL], 3 & ~optional);
            assert_true(t_debugging || o->wanted_saved[MS_PHASE_RECOMPUTE] == force >> 2);
            t_net_end(&m.n);
        }
    }
}

/* Two layers of one kind and size, of which one is cheap to recompute: that one is. Both of their
   saved tensors wait while the layers after them run. */
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
    o->faults += call->state[0].data != NULL && !t_debugging; // there it is poison
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

/* h = x p; y0 = counter(h), y1 = doubler(y0) of one buffer, y2 = promising(y1) = 2 y1 of another;
   the square of each is read in backward. dropped: the three are recomputed. */
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
        desc.recompute_keeps_state = k == 2;
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
    t_tally eval; // recomputes nothing: no copy of state is made for it
    memset(&eval, 0, sizeof eval);
    t_ok(dropped.n.m, ms_visit_events(dropped.n.m, MS_PROGRAM_EVAL, t_count_event, &eval));
    assert_true(t_net_tally(&dropped.n).count[MS_EVENT_COPY] > 0 && eval.count[MS_EVENT_COPY] == 0);
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

typedef enum around { NOBODY, BEFORE, AFTER, KEPT_IN, KEPT_OUT } around;

/* What comes after the layer from h to y: another reader of h, and the loss of y, or of y + z. */
static void net_finish_around(t_net *n, around other, ms_tensor h, ms_tensor y, ms_tensor z) {
    ms_tensor last = y;
    if (other == AFTER) {
        z = t_net_square(n, "after", h);
    }
    if (other == BEFORE || other == AFTER) {
        last = t_net_sum(n, y, z);
    }
    t_net_loss(n, last, 1.0f);
    if (other == KEPT_IN || other == KEPT_OUT) {
        ms_add_output(n->m, other == KEPT_IN ? h : y);
    }
}

/* h = x p; y = h h / 2 by a layer that clobbers, z = h h / 2 by another one before or after it. The
   number of real copies in a step. */
static uint32_t check_clobbers(around other, ms_slot_masks clobbers, bool smallest) {
    const ms_tensor none = {0};
    t_net n;
    t_net_begin(&n);
    n.config.force_optimize = smallest;
    t_net_create(&n);
    ms_tensor p = t_net_param(&n, "p"), y = t_net_activation(&n, "y"), z = none;
    bool has_other = other == BEFORE || other == AFTER;
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
                ms_slot_masks clobbers = {0, 0, 0, 0};
                clobbers.in = (mask & 1) != 0;
                clobbers.out = (mask & 2) != 0;
                clobbers.grad_out = (mask & 4) != 0;
                uint32_t moves = check_clobbers((around)other, clobbers, smallest != 0);
                /* h is read later by "before" alone (its backward comes after that of the layer
                   that clobbers), or kept; y is read by the loss, before that layer. */
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

/* h = x p; y = 3 h, once or twice, in place; another layer, z = h h / 2, before or after; loss of
   y + z. */
static uint32_t check_place(around other, bool smallest, int depth) {
    const ms_tensor none = {0};
    t_net n;
    t_net_begin(&n);
    n.config.force_optimize = smallest;
    t_net_create(&n);
    ms_tensor p = t_net_param(&n, "p"), z = none;
    ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p), y = h;
    bool has_other = other == BEFORE || other == AFTER;
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
            bool needed = other == BEFORE || other == AFTER || other == KEPT_IN;
            /* "before" and "after" also share the gradients of the sum. */
            assert_true(needed ? moves >= 1 && moves <= 2 : moves == 0);
            (void)check_place((around)other, true, depth);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// workspace

typedef struct scratch_op {
    t_op base;                                  // first, for the callbacks of toy_layers.h
    ms_workspace expected[MS_PHASE_COUNT], own; // that of the recompute callback
    int64_t rows;
    uint32_t checked;
} scratch_op;

static void check_workspace(const ms_call *call, bool own) {
    scratch_op *s = (scratch_op *)call->user;
    const ms_workspace *w = own ? &s->own : &s->expected[call->phase];
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
        s->base.faults += msi_is_finite((double)value) ? 0u : 1u;
    }
    memset(memory, 0xff, (size_t)bytes); // NaN, for the next who finds it
    s->checked += 1;
}

static int scratch_forward(const ms_call *call) {
    check_workspace(call, false);
    return t_forward(call);
}

static int scratch_recompute(const ms_call *call) {
    check_workspace(call, true);
    return t_forward(call);
}

static int scratch_backward(const ms_call *call) {
    check_workspace(call, false);
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
        s[k].base.skips_out = true;
        desc.forward = scratch_forward;
        desc.backward = scratch_backward;
        desc.recompute = own_recompute ? scratch_recompute : NULL;
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
        s[k].expected[MS_PHASE_RECOMPUTE] = desc.forward_workspace;
        s[k].own = desc.recompute_workspace;
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
            t_set_loss_factor(of[i].n.m, factors[step]);
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
        assert_true(t_debugging || // which tries other factors of the loss
                    o->calls[MS_PHASE_FORWARD] == (uint32_t)(step + 1) * micro_count);
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
    desc.backward_reads.in = 0; // undeclared: all of them
    desc.state[0] = counter;
    desc.recompute_keeps_state = true;
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
        t_ok(n.m, ms_detach(n.m)); // forces nothing
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
    desc.backward_reads.in = 0; // undeclared: all of them
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
    const ms_layer_desc *desc = &p->desc[event->layer_index];
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
            call.wanted_out |= bit_if(o->kind == MS_OPERAND_OUT, (int)o->slot);
            call.wanted_saved |= bit_if(o->kind == MS_OPERAND_SAVED, (int)o->slot);
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
    bool drops = event->kind == MS_EVENT_DROP; // follows the instruction after which they are dead
    if (event->kind > MS_EVENT_DROP) {
        p->faults += event->index != UINT32_MAX || event->layer.id != 0;
        return;
    }
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

static void data_has_one_aligned_address(void **state) {
    (void)state;
    t_net n;
    ms_tensor h[CHAIN], p[CHAIN / 2];
    float value[COLS];
    t_net_begin(&n);
    chain_create(&n, h, p);
    ms_add_output(n.m, h[3]);
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

// ------------------------------------------------------------------------------------------------
// an output that does not lead to the loss

/* y = 2 x, for the loss, and a wide copy of x that only a sampler reads. */
static int sampled_forward(const ms_call *call) {
    const int64_t cols = t_cols(&call->in[0]), wide = t_cols(&call->out[1]);
    for (int64_t r = 0; r < t_rows(&call->in[0]); ++r) {
        for (int64_t c = 0; c < wide; ++c) {
            t_data(&call->out[1])[r * wide + c] = t_data(&call->in[0])[r * cols + c % cols];
        }
        for (int64_t c = 0; c < cols; ++c) {
            t_data(&call->out[0])[r * cols + c] = 2.0f * t_data(&call->in[0])[r * cols + c];
        }
    }
    return t_enter(call);
}

static int sampled_backward(const ms_call *call) {
    t_op *o = (t_op *)call->user;
    o->faults += call->grad_out[1].data != NULL || t_cols(&call->grad_out[1]) != 64 * COLS;
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]); ++i) {
        t_contribute(&call->grad_in[0], i, 2.0f * t_grad_out(call, 0, i));
    }
    return t_enter(call);
}

typedef struct sampled_events {
    const ms_model *model;
    ms_tensor wide;
    int gradients;
} sampled_events;

static void count_gradients(const ms_event *event, void *user) {
    sampled_events *e = (sampled_events *)user;
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        e->gradients += event->operands[k].tensor.id == ms_gradient(e->model, e->wide).id;
    }
}

static void no_gradient_without_a_path_to_the_loss(void **state) {
    (void)state;
    for (int sampled = 0; sampled < 2; ++sampled) {
        t_net n;
        double of_p[COLS] = {0};
        t_net_begin(&n);
        n.config.force_optimize = sampled == 1;
        t_net_create(&n);
        const ms_tensor p = t_net_param(&n, "p"), h = t_net_scale(&n, "scale", n.x, 0.0f, p);
        ms_layer_desc desc =
            t_net_own(&n, sampled_forward, sampled_backward, "head", h, t_net_activation(&n, "y"));
        sampled_events events = {n.m, {0}, 0};
        desc.out[1] = events.wide =
            ms_activation(n.m, "wide", MS_DTYPE_F32, ms_shape2(ROWS, 64 * COLS));
        desc.backward_reads.nothing = true;
        const int head = t_net_register(&n, &desc);
        if (sampled == 1) {
            ms_add_output(n.m, events.wide);
        }
        t_net_loss(&n, desc.out[0], 1.0f);
        t_net_start(&n);
        t_net_write_param(&n, p, 2.0f);
        for (int i = 0; i < COUNT; ++i) {
            const double x = (double)t_x_at(i);
            of_p[i % COLS] += 4.0 * x * x * ((double)t_p_at(i % COLS) + 2.0);
        }
        t_ok(n.m, ms_step(n.m, NULL));
        t_net_expect(&n, ms_gradient(n.m, p), of_p, COLS);
        t_ok(n.m, ms_visit_events(n.m, MS_PROGRAM_TRAIN, count_gradients, &events));
        assert_int_equal(events.gradients, 0);
        assert_int_equal(n.ops[head].faults, 0);
        assert_true(n.ops[head].calls[MS_PHASE_BACKWARD] > 0);
        t_net_end(&n);
    }
}

// ------------------------------------------------------------------------------------------------
// slots: as many as there can be, and those that are empty

enum { SLOTS = MS_LIMIT_IN };

static bool is_zero(const ms_view *view) {
    ms_view zero;
    memset(&zero, 0, sizeof zero);
    return view->data == NULL && view->dtype == zero.dtype && view->beta == zero.beta &&
           memcmp(&view->shape, &zero.shape, sizeof zero.shape) == 0;
}

/* Views beyond the first `used` of an array that are not zero. */
static int count_leftovers(const ms_view *views, int used) {
    int count = 0;
    for (int k = used; k < SLOTS; ++k) {
        count += !is_zero(&views[k]);
    }
    return count;
}

/* x * p + bias, where param[1] may be empty; in `used` slots of each group. */
typedef struct slots_op {
    int used, calls, leftovers;
    bool has_bias;
} slots_op;

static void slots_enter(const ms_call *call, bool backward) {
    slots_op *o = (slots_op *)call->user;
    const ms_view *const all[] = {call->in,    call->out,      call->saved,   call->param,
                                  call->state, call->grad_out, call->grad_in, call->grad_param};
    o->calls++;
    for (int k = 0; k < 8; ++k) {
        const bool has_bias = o->has_bias && (k == 3 || k == 7);
        const int used = k < 5 || backward ? has_bias ? 2 : o->used : 0;
        o->leftovers += count_leftovers(all[k], used);
    }
}

static int slots_forward(const ms_call *call) {
    slots_op *o = (slots_op *)call->user;
    slots_enter(call, false);
    for (int k = 0; k < o->used; ++k) {
        const float *bias = o->used == 1 ? (const float *)call->param[1].data : NULL;
        *(float *)call->out[k].data =
            *(const float *)call->in[k].data * *(const float *)call->param[k].data +
            (bias != NULL ? *bias : 0.0f);
        *(float *)call->saved[k].data = *(const float *)call->param[k].data;
        *(float *)call->state[k].data += 1.0f;
    }
    return 0;
}

static int slots_backward(const ms_call *call) {
    slots_op *o = (slots_op *)call->user;
    slots_enter(call, true);
    for (int k = 0; k < o->used; ++k) {
        const float by = *(const float *)call->grad_out[k].data;
        const float p = *(const float *)call->saved[k].data, x = *(const float *)call->in[k].data;
        t_contribute(&call->grad_param[k], 0, by * x);
        if (call->grad_in[k].data != NULL) {
            t_contribute(&call->grad_in[k], 0, by * p);
        }
    }
    if (o->used == 1 && call->grad_param[1].data != NULL) {
        t_contribute(&call->grad_param[1], 0, *(const float *)call->grad_out[0].data);
    }
    return 0;
}

/* A layer in `used` slots of every group, from the tensors in `value`, which become its outputs. */
static void slots_add(ms_model *m, slots_op *o, int used, bool has_bias, ms_tensor *value,
                      ms_tensor *param) {
    const float initial = 2.0f;
    const ms_shape one = ms_shape1(1);
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    o->used = used;
    o->has_bias = has_bias;
    d.forward = slots_forward;
    d.backward = slots_backward;
    d.user = o;
    d.backward_reads.in = d.backward_reads.saved = MS_ALL_SLOTS;
    for (int k = 0; k < used; ++k) {
        d.in[k] = value[k];
        d.param[k] = param[k] = ms_param(m, "p", MS_DTYPE_F32, one);
        d.saved[k] = ms_saved(m, "saved", MS_DTYPE_F32, one);
        d.state[k] = ms_buffer(m, "state", MS_DTYPE_F32, one);
        d.out[k] = value[k] = ms_activation(m, "value", MS_DTYPE_F32, one);
        t_ok(m, ms_write(m, param[k], &initial));
    }
    if (has_bias) {
        d.param[1] = ms_param(m, "bias", MS_DTYPE_F32, one);
    }
    ms_register_layer(m, &d);
}

static int slots_sum(const ms_call *call) {
    const bool backward = call->phase == MS_PHASE_BACKWARD;
    float sum = 0.0f;
    for (int k = 0; k < SLOTS; ++k) {
        sum += backward ? 0.0f : *(const float *)call->in[k].data;
        if (backward) {
            t_contribute(&call->grad_in[k], 0, *(const float *)call->grad_out[0].data);
        }
    }
    if (!backward) {
        *(float *)call->out[0].data = sum;
    }
    return 0;
}

/* Two layers in all slots, a sum, one layer with a bias and one without: that one must not find what
   the others have left behind them. */
static void check_slots_in(const ms_config *config) {
    slots_op ops[4];
    ms_tensor value[SLOTS], first[SLOTS], param[SLOTS];
    ms_layer_desc sum;
    ms_model *m;
    const float x = 3.0f;
    float gradient = 0.0f;
    double loss = 0.0;
    memset(ops, 0, sizeof ops);
    t_ok(NULL, ms_create(config, &m));
    for (int k = 0; k < SLOTS; ++k) {
        value[k] = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(1));
        t_ok(m, ms_write(m, value[k], &x));
    }
    slots_add(m, &ops[0], SLOTS, false, value, first);
    slots_add(m, &ops[1], SLOTS, false, value, param);
    memset(&sum, 0, sizeof sum);
    sum.forward = sum.backward = slots_sum;
    memcpy(sum.in, value, sizeof value);
    sum.out[0] = value[0] = ms_activation(m, "sum", MS_DTYPE_F32, ms_shape1(1));
    ms_register_layer(m, &sum);
    slots_add(m, &ops[2], 1, true, value, param);
    slots_add(m, &ops[3], 1, false, value, param);
    ms_set_loss(m, value[0]);
    t_ok(m, ms_wrap(m));
    t_write_zeros(m);
    t_ok(m, ms_eval(m, &loss));
    assert_true(loss == 4.0 * 4.0 * 3.0 * SLOTS);
    t_ok(m, ms_forward(m, &loss));
    t_ok(m, ms_backward(m));
    assert_true(loss == 4.0 * 4.0 * 3.0 * SLOTS);
    t_ok(m, ms_read(m, ms_gradient(m, first[SLOTS - 1]), &gradient));
    assert_true(gradient == 8.0f * 3.0f);
    t_ok(m, ms_update(m));
    for (int k = 0; k < 4; ++k) {
        assert_true(ops[k].calls >= 3);
        assert_int_equal(ops[k].leftovers, 0);
    }
    ms_destroy(m);
}

static void empty_slots_are_zeroed_views(void **state) {
    (void)state;
    ms_config config = t_config();
    config.early_update = MS_SWITCH_OFF;
    check_slots_in(&config);
    config.force_optimize = true;
    check_slots_in(&config);
}

// ------------------------------------------------------------------------------------------------
// truncated backpropagation: state that backward changes and carries to the next batch

enum { CELLS = 6, UNITS = 256 };

typedef struct recurrent {
    ms_model *m;
    ms_tensor x, w, h[CELLS], carry[CELLS];
    uint32_t recomputed;
} recurrent;

/* y = x w / 2 + h; then h = y. */
static int cell_forward(const ms_call *call) {
    recurrent *r = (recurrent *)call->user;
    const float *x = t_data(&call->in[0]), *w = t_data(&call->param[0]);
    float *h = t_data(&call->state[0]), *y = t_data(&call->out[0]);
    r->recomputed += call->phase == MS_PHASE_RECOMPUTE;
    for (int i = 0; i < UNITS; ++i) {
        y[i] = 0.5f * x[i] * w[i] + h[i];
        h[i] = call->phase == MS_PHASE_EVAL ? h[i] : y[i];
    }
    return 0;
}

/* The gradient of y also has a quarter of what the batch before left in `carry`, and h is halved. */
static int cell_backward(const ms_call *call) {
    const float *x = t_data(&call->in[0]), *w = t_data(&call->param[0]);
    float *h = t_data(&call->state[0]), *carry = t_data(&call->state[1]);
    for (int i = 0; i < UNITS; ++i) {
        const float g = t_grad_out(call, 0, i) + 0.25f * carry[i] + 0.001f * h[i];
        carry[i] = g;
        h[i] *= 0.5f;
        t_contribute(&call->grad_param[0], i, 0.5f * g * x[i]);
        if (call->grad_in[0].data != NULL) {
            t_contribute(&call->grad_in[0], i, 0.5f * g * w[i]);
        }
    }
    return 0;
}

/* As time steps of one cell (shared state), or as cells of their own; with outputs that are dropped
   in any case, or as the budget requires. */
static void recurrent_start(recurrent *r, bool shared, bool dropped, const ms_config *config) {
    float values[UNITS];
    const ms_shape shape = ms_shape2(1, UNITS);
    ms_layer_desc d;
    memset(r, 0, sizeof *r);
    t_ok(NULL, ms_create(config, &r->m));
    r->x = ms_input(r->m, "x", MS_DTYPE_F32, shape);
    r->w = ms_param(r->m, "w", MS_DTYPE_F32, ms_shape1(UNITS));
    ms_tensor last = r->x;
    for (int k = 0; k < CELLS; ++k) {
        const bool first = k == 0 || !shared;
        memset(&d, 0, sizeof d);
        d.forward = cell_forward;
        d.backward = cell_backward;
        d.user = r;
        d.in[0] = last;
        d.param[0] = r->w;
        d.out[0] = last = ms_activation(r->m, "y", MS_DTYPE_F32, shape);
        r->h[k] = first ? ms_buffer(r->m, "h", MS_DTYPE_F32, shape) : r->h[0];
        r->carry[k] = first ? ms_buffer(r->m, "carry", MS_DTYPE_F32, shape) : r->carry[0];
        d.state[0] = r->h[k];
        d.state[1] = r->carry[k];
        d.backward_state = 3;
        d.backward_reads.in = d.backward_reads.param = 1;
        const ms_layer layer = ms_register_layer(r->m, &d);
        if (dropped && k < CELLS - 1) {
            ms_set_layer_technique(r->m, layer, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        }
    }
    ms_set_loss(r->m, last);
    t_ok(r->m, ms_wrap(r->m));
    for (int i = 0; i < UNITS; ++i) {
        values[i] = 1.0f + (float)(i % 7) / 16.0f;
    }
    t_ok(r->m, ms_write(r->m, r->w, values));
}

/* Three steps, each verified first; then all values that last. */
static void recurrent_train(recurrent *r, float *values) {
    for (int step = 0; step < 3; ++step) {
        float x[UNITS];
        ms_verify_report report;
        for (int i = 0; i < UNITS; ++i) {
            x[i] = (float)((i * 5 + step * 3) % 11 - 5) / 8.0f;
        }
        t_ok(r->m, ms_write(r->m, r->x, x));
        t_ok(r->m, ms_verify(r->m, NULL, NULL, &report));
        assert_int_equal(report.differ_count, 0);
        t_ok(r->m, ms_step(r->m, NULL));
        t_ok(r->m, ms_eval(r->m, NULL));
    }
    t_ok(r->m, ms_read(r->m, r->w, values));
    for (int k = 0; k < CELLS; ++k) {
        t_ok(r->m, ms_read(r->m, r->h[k], values + (1 + 2 * k) * UNITS));
        t_ok(r->m, ms_read(r->m, r->carry[k], values + (2 + 2 * k) * UNITS));
    }
}

/* The first step, compared with loops. Gradients are those of a mean. */
static void recurrent_first(recurrent *r, bool shared) {
    static float h[CELLS][UNITS], carry[CELLS][UNITS], y[CELLS + 1][UNITS], g[UNITS];
    float values[2][UNITS];
    memset(h, 0, sizeof h);
    memset(carry, 0, sizeof carry);
    for (int i = 0; i < UNITS; ++i) {
        y[0][i] = (float)(i % 11 - 5) / 8.0f;
        g[i] = 1.0f / UNITS;
    }
    t_ok(r->m, ms_write(r->m, r->x, y[0]));
    t_ok(r->m, ms_step(r->m, NULL));
    for (int k = 0; k < CELLS; ++k) {
        float *at = h[shared ? 0 : k];
        for (int i = 0; i < UNITS; ++i) {
            at[i] = y[k + 1][i] = 0.5f * y[k][i] * (1.0f + (float)(i % 7) / 16.0f) + at[i];
        }
    }
    for (int k = CELLS; k-- > 0;) {
        float *at = h[shared ? 0 : k], *to = carry[shared ? 0 : k];
        for (int i = 0; i < UNITS; ++i) {
            to[i] = g[i] + 0.25f * to[i] + 0.001f * at[i];
            at[i] *= 0.5f;
            g[i] = 0.5f * to[i] * (1.0f + (float)(i % 7) / 16.0f);
        }
    }
    for (int k = 0; k < CELLS; ++k) {
        t_ok(r->m, ms_read(r->m, r->h[k], values[0]));
        t_ok(r->m, ms_read(r->m, r->carry[k], values[1]));
        for (int i = 0; i < UNITS; ++i) {
            assert_true(fabsf(values[0][i] - h[shared ? 0 : k][i]) <= 1e-5f);
            assert_true(fabsf(values[1][i] - carry[shared ? 0 : k][i]) <= 1e-5f);
        }
    }
}

static void check_recurrent(bool shared) {
    static float plain[(1 + 2 * CELLS) * UNITS], wrapped[(1 + 2 * CELLS) * UNITS];
    ms_config config = t_config();
    ms_memory_report report;
    recurrent r;
    uint64_t smallest = 0;
    uint32_t recomputed = 0;
    recurrent_start(&r, shared, false, &config);
    t_report(r.m, &report);
    t_ok(r.m, ms_smallest_budget(r.m, &smallest));
    recurrent_first(&r, shared);
    ms_destroy(r.m);
    recurrent_start(&r, shared, false, &config);
    recurrent_train(&r, plain);
    ms_destroy(r.m);
    for (int part = 0; part < 5; ++part) { // the last one has room, and drops all the same
        const uint64_t more = (report.plain_bytes - smallest) * (uint64_t)part / 3;
        config.memory_budget_bytes = part == 4 ? 1u << 20 : smallest + more;
        recurrent_start(&r, shared, part == 4, &config);
        recurrent_train(&r, wrapped);
        assert_memory_equal(plain, wrapped, sizeof plain);
        recomputed += r.recomputed;
        ms_destroy(r.m);
    }
    assert_true(recomputed > 0);
}

static void backward_may_change_state(void **state) {
    (void)state;
    check_recurrent(false);
    check_recurrent(true);
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
        T_TWICE(a_plan_can_be_carried_out_elsewhere),
        T_TWICE(callbacks_may_be_bound),
        T_TWICE(data_has_one_aligned_address),
        T_TWICE(no_gradient_without_a_path_to_the_loss),
        T_TWICE(backward_may_change_state),
        T_TWICE(empty_slots_are_zeroed_views),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
