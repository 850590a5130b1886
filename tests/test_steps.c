/*  test_steps.c - what a step does beside running the layers: updates, micro-batches, clipping,
    memory that is borrowed or shared with other models, and steps that fail, with numbers known
    in closed form. Nearly every test runs twice, the second time with ms_config.debug. */
#include "private.h"
#include "toy_layers.h"

enum { ROWS = T_NET_ROWS, COLS = T_NET_COLS, COUNT = ROWS * COLS };

// ------------------------------------------------------------------------------------------------
// borrowed memory

/* y = x p, and the loss. */
static ms_tensor add_product(t_net *n) {
    const ms_tensor p = t_net_param(n, "p");
    t_net_loss(n, t_net_scale(n, "scale", n->x, 0.0f, p), 1.0f);
    return p;
}

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
    t_write_zeros(borrowed.m);
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
        ms_tensor p = add_product(&n);
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

/* Debug mode tries the first update of a step on copies, before it runs, if it has declared state. */
static uint32_t update_trials(void) {
    return t_debugging ? 2 : 0;
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
        ms_tensor p = own.p = add_product(&n);
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
        assert_true(own.calls == 3 * (1 + update_trials()) && own.faults == 0);
        own.fail_at = own.calls + 1 + update_trials();
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
        const uint32_t done = drop_step(&n, by); // of the next step
        if (micro_count > 1) {
            expect_near(&n, param, p); // no update yet
        }
        if (done == 0) {
            t_error(n.m, ms_update(n.m), MS_RESULT_ORDER);
        }
        if (done == 1 && (by == BY_FORWARD || (micro_count > 1 && step == 1))) {
            t_ok(n.m, ms_update(n.m));
        } else {
            for (uint32_t k = done; k < micro_count; ++k) {
                t_ok(n.m, ms_step(n.m, NULL));
            }
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

/* y = x p + x q, started. */
static void two_products_start(t_net *n, bool is_q_frozen, ms_tensor *p, ms_tensor *q) {
    *p = t_net_param(n, "p");
    *q = t_net_param(n, "q");
    ms_tensor a = t_net_scale(n, "p", n->x, 0.0f, *p);
    ms_tensor b = t_net_scale(n, "q", n->x, 0.0f, *q);
    t_net_loss(n, t_net_sum(n, a, b), 1.0f);
    ms_set_frozen(n->m, *q, is_q_frozen);
    t_net_start(n);
    t_net_write_param(n, *p, 2.0f);
    t_net_write_param(n, *q, 1.0f);
}

/* A param that begins to learn between two micro-batches has missed the first, so that is refused,
   with nothing lost. A re-wrap that changes no gradient counts on. */
static void a_rewrap_between_micro_batches(void **state) {
    (void)state;
    for (int thaws = 0; thaws < 2; ++thaws) {
        t_net n;
        ms_tensor of_p, of_q;
        float before[COLS], after[COLS];
        t_net_begin(&n);
        n.config.accumulation_steps = 2;
        t_net_create(&n);
        t_net_optimizer(&n, MS_OPTIMIZER_SGD, 0.0f);
        two_products_start(&n, true, &of_p, &of_q);
        t_ok(n.m, ms_read(n.m, of_p, before));
        t_ok(n.m, ms_step(n.m, NULL));
        ms_set_frozen(n.m, of_q, thaws == 0);
        if (thaws) {
            t_error(n.m, ms_wrap(n.m), MS_RESULT_ORDER);
            t_text_has(ms_last_error(n.m), "1 of the 2 micro-batches");
            ms_set_frozen(n.m, of_q, true);
        }
        t_ok(n.m, ms_wrap(n.m));
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_read(n.m, of_p, after));
        assert_true(memcmp(before, after, sizeof before) != 0);
        t_net_end(&n);
    }
}

/* Nor may the count of micro-batches change inside a step: it can be ended, or given up. */
static void a_count_does_not_change_inside_a_step(void **state) {
    (void)state;
    for (int how = 0; how < 3; ++how) {
        t_net n;
        ms_tensor of_p, of_q;
        float before[COLS], after[COLS];
        t_net_begin(&n);
        n.config.accumulation_steps = 4;
        t_net_create(&n);
        t_net_optimizer(&n, MS_OPTIMIZER_SGD, 0.0f);
        two_products_start(&n, true, &of_p, &of_q);
        t_ok(n.m, ms_read(n.m, of_p, before));
        for (int k = 0; k < 3; ++k) {
            t_ok(n.m, ms_step(n.m, NULL));
        }
        ms_set_accumulation(n.m, 3);
        t_error(n.m, ms_wrap(n.m), MS_RESULT_ORDER);
        t_text_has(ms_last_error(n.m), "3 of the 4 micro-batches");
        t_text_has(ms_last_error(n.m), "ms_update");
        if (how == 0) {
            t_ok(n.m, ms_update(n.m));
        } else if (how == 1) {
            ms_cancel(n.m);
            t_error(n.m, ms_step(n.m, NULL), MS_RESULT_CANCELLED);
        } else {
            t_ok(n.m, ms_step(n.m, NULL)); // the fourth
        }
        t_ok(n.m, ms_read(n.m, of_p, after));
        assert_int_equal(memcmp(before, after, sizeof before) != 0, how != 1);
        t_ok(n.m, ms_wrap(n.m));
        t_ok(n.m, ms_read(n.m, of_p, before));
        for (int k = 0; k < 3; ++k) {
            t_ok(n.m, ms_read(n.m, of_p, after));
            assert_memory_equal(before, after, sizeof before);
            t_ok(n.m, ms_step(n.m, NULL));
        }
        t_ok(n.m, ms_read(n.m, of_p, after));
        assert_true(memcmp(before, after, sizeof before) != 0);
        t_net_end(&n);
    }
}

/* A param that begins to learn after others has had fewer updates than they: by Adam's bias
   corrections its first one moves it by the learning rate, whatever its gradient is. */
static void updates_are_counted_by_param(void **state) {
    (void)state;
    t_net n;
    ms_tensor of_p, of_q;
    float before[COLS], after[COLS];
    t_net_begin(&n);
    t_net_create(&n);
    t_net_optimizer(&n, MS_OPTIMIZER_ADAMW, 0.0625f);
    two_products_start(&n, true, &of_p, &of_q);
    for (int step = 0; step < 4; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
    }
    ms_set_frozen(n.m, of_q, false);
    t_ok(n.m, ms_wrap(n.m));
    t_ok(n.m, ms_read(n.m, of_q, before));
    t_ok(n.m, ms_step(n.m, NULL));
    t_ok(n.m, ms_read(n.m, of_q, after));
    for (int c = 0; c < COLS; ++c) {
        assert_true(fabs(fabs((double)(after[c] - before[c])) - 0.0625) < 1e-4);
    }
    t_net_end(&n);
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
    ms_tensor of_p, of_q;
    two_products_start(&n, custom, &of_p, &of_q);
    own.p = of_p;
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
    t_ok(n.m, ms_forward(n.m, NULL)); // the next step: there is none until its update
    assert_int_equal(ms_gradient_norm(n.m, &norm), MS_RESULT_ORDER);
    t_ok(n.m, ms_backward(n.m));
    assert_int_equal(ms_gradient_norm(n.m, &norm),
                     micro_count > 1 ? MS_RESULT_ORDER : MS_RESULT_OK);
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
        const float limits[] = {5.0f, 50.0f};
        ms_norm norm = {100.0, 0.0f};
        double expected = 100.0;
        uint32_t nonfinite = 0;
        ms_step_state step;
        for (uint64_t i = 0; i < 40; ++i) {
            a[i] = b[i] = (float)(i % 7) - 2.5f;
            expected += i < count ? (double)a[i] * (double)a[i] : 0.0;
        }
        assert_int_equal(
            cpu.add_squares(cpu.user, a, MS_DTYPE_F32, count, &norm.sum, 1, &nonfinite), 0);
        assert_true(norm.sum == expected);
        memset(&step, 0, sizeof step);
        assert_int_equal(cpu.clip_scale(cpu.user, &norm, &limits[0], 1, &step, NULL, 0), 0);
        assert_true(step.norm == sqrt(expected) && step.halted == (uint32_t)MS_HALT_NONE);
        assert_true(fabs((double)norm.scale - 5.0 / sqrt(expected)) < 1e-6);
        assert_int_equal(cpu.clip_scale(cpu.user, &norm, &limits[1], 1, &step, NULL, 0), 0);
        assert_true(norm.scale == 1.0f);
        assert_int_equal(cpu.add(cpu.user, a, MS_DTYPE_F32, b, MS_DTYPE_F32, count), 0);
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
        p[i] = add_product(nets[i]);
        t_net_start(nets[i]);
        t_net_write_param(nets[i], p[i], 2.0f);
        t_ok(nets[i]->m, ms_step(nets[i]->m, NULL));
    }
    for (int k = 0; k < 2; ++k) {
        t_ok(n.m, ms_synchronize(n.m)); // earlier steps are not to be poisoned
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

/* Another model that makes the arena larger ends a step as well: the values of forward are gone, and
   the outputs with them. */
static void a_larger_arena_ends_what_was_begun(void **state) {
    (void)state;
    for (int stage = 0; stage < 2; ++stage) {
        t_net shared[2], apart;
        ms_tensor p[2], twin;
        ms_arena *arena = NULL;
        float losses[COUNT];
        assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
        alternating_create(&shared[0], arena, 1, MS_SWITCH_OFF, &p[0]);
        alternating_create(&apart, NULL, 1, MS_SWITCH_OFF, &twin);
        ms_model *m = shared[0].m;
        const uint64_t before = ms_arena_bytes(arena);
        t_ok(m, ms_forward(m, NULL));
        t_ok(m, ms_read(m, shared[0].loss, losses));
        t_ok(m, stage == 1 ? ms_backward(m) : MS_RESULT_OK);
        alternating_create(&shared[1], arena, 3, MS_SWITCH_OFF, &p[1]);
        assert_true(ms_arena_bytes(arena) > before);
        t_error(m, ms_read(m, shared[0].loss, losses), MS_RESULT_ORDER);
        t_error(m, stage == 1 ? ms_update(m) : ms_backward(m), MS_RESULT_ORDER);
        t_text_has(ms_last_error(m), "another model has used the shared arena");
        t_ok(m, ms_step(m, NULL));
        t_ok(apart.m, ms_step(apart.m, NULL));
        t_net_same(&shared[0], p[0], &apart, twin);
        t_net_end(&shared[0]);
        t_net_end(&shared[1]);
        t_net_end(&apart);
        ms_arena_destroy(arena);
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
        t_write_zeros(t.n.m);
        uint32_t updates = t.updates;
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        assert_int_equal(t.updates, updates + 2);
        t_ok(t.n.m, ms_detach(t.n.m));
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t_net_end(&t.n);
    }
}

/* What ms_wrap must refuse, because it was forced, is nothing to ms_detach. */
static void the_plain_plan_ignores_force(void **state) {
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

/* What a new model with the values, the moments and the counts of another makes of the next step. */
static void expect_same_step(two_params *t) {
    two_params fresh;
    float value[COLS];
    two_params_create(&fresh, NULL, MS_OPTIMIZER_ADAMW);
    t_ok(fresh.n.m, ms_wrap(fresh.n.m));
    two_params_write(&fresh);
    for (int k = 0; k < 2; ++k) {
        t_ok(t->n.m, ms_read(t->n.m, t->p[k], value));
        t_ok(fresh.n.m, ms_write(fresh.n.m, fresh.p[k], value));
        for (int of = 0; of < 2; ++of) {
            t_ok(t->n.m, ms_read(t->n.m, ms_optimizer_state(t->n.m, t->p[k], of), value));
            t_ok(fresh.n.m,
                 ms_write(fresh.n.m, ms_optimizer_state(fresh.n.m, fresh.p[k], of), value));
        }
        const uint64_t count = ms_update_count(t->n.m, t->p[k]);
        t_ok(fresh.n.m, ms_set_update_count(fresh.n.m, fresh.p[k], count));
    }
    t_ok(t->n.m, ms_step(t->n.m, NULL));
    t_ok(fresh.n.m, ms_step(fresh.n.m, NULL));
    two_params_same(t, &fresh);
    t_net_end(&fresh.n);
}

/* Trained, frozen and trained again, at any time: a param counts the updates of its own state, which
   ends with a plan that does not train it, unless it is the trainer's. A trainer may set the count. */
static void each_param_counts_its_own_updates(void **state) {
    (void)state;
    t_rng rng = t_seed(31);
    for (uint64_t run = 0; run < t_sweep(12, 200); ++run) {
        static moments memory;
        const bool is_lent = t_chance(&rng, 0.5), starts_frozen = t_chance(&rng, 0.5);
        uint64_t expected[2] = {0, 0};
        bool frozen = starts_frozen;
        two_params t;
        memset(memory, 0, sizeof memory);
        two_params_create(&t, is_lent ? &memory : NULL, MS_OPTIMIZER_ADAMW);
        if (t_chance(&rng, 0.3)) { // of state that comes from elsewhere
            expected[0] = 1 + t_below(&rng, 2000);
            t_ok(t.n.m, ms_set_update_count(t.n.m, t.p[0], expected[0]));
        }
        ms_set_frozen(t.n.m, t.p[0], frozen);
        t_ok(t.n.m, ms_wrap(t.n.m));
        two_params_write(&t);
        for (int action = 0; action < 12; ++action) {
            if (t_chance(&rng, 0.3)) {
                frozen = !frozen;
                freeze(&t, frozen);
                expected[0] = frozen && !is_lent ? 0 : expected[0];
            } else if (t_chance(&rng, 0.2)) {
                expected[1] = t_below(&rng, 2000);
                t_ok(t.n.m, ms_set_update_count(t.n.m, t.p[1], expected[1]));
            } else {
                if (frozen) {
                    t_ok(t.n.m, ms_step(t.n.m, NULL));
                } else {
                    expect_same_step(&t);
                }
                expected[0] += !frozen;
                expected[1] += 1;
            }
            assert_int_equal(ms_update_count(t.n.m, t.p[0]), expected[0]);
            assert_int_equal(ms_update_count(t.n.m, t.p[1]), expected[1]);
        }
        t_error(t.n.m, ms_set_update_count(t.n.m, t.p[1], (uint64_t)1 << 31), MS_RESULT_INVALID);
        t_error(t.n.m, ms_set_update_count(t.n.m, t.n.x, 1), MS_RESULT_INVALID);
        assert_int_equal(ms_update_count(t.n.m, t.n.x) + ms_update_count(NULL, t.p[1]), 0);
        assert_int_equal(ms_update_count(t.n.m, t.p[1]), expected[1]);
        t_net_end(&t.n);
    }
}

/* How a step is ended after some of its micro-batches, and its params updated. */
typedef struct early_end {
    uint32_t of, done; // micro-batches
    ms_optimizer_kind kind;
    float clip, factor; // 0: none, the mean
    bool smallest, evals, three_calls;
} early_end;

static int update_scaled(const ms_update_args *args) {
    const float scale = args->gradient_scale != NULL ? *args->gradient_scale : 1.0f;
    for (uint64_t i = 0; i < args->count; ++i) {
        args->value[i] -= args->learning_rate * (scale * args->gradient[i]);
    }
    return 0;
}

static void early_end_create(two_params *t, const early_end *e, uint32_t micro_count) {
    memset(t, 0, sizeof *t);
    t_net_begin(&t->n);
    t->n.config.accumulation_steps = micro_count;
    t->n.config.force_optimize = e->smallest;
    t->n.config.offloading = e->smallest ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    t_net_create(&t->n);
    ms_optimizer_desc optimizer = t_optimizer(e->kind, 0.0078125f);
    optimizer.momentum = e->kind == MS_OPTIMIZER_SGD ? 0.9f : 0.0f;
    optimizer.grad_clip_norm = e->clip;
    optimizer.update = e->kind == MS_OPTIMIZER_CUSTOM ? update_scaled : NULL;
    ms_set_optimizer(t->n.m, &optimizer);
    t->p[0] = t_net_param(&t->n, "p");
    t->p[1] = t_net_param(&t->n, "q");
    ms_tensor y = t_net_scale(&t->n, "scale", t->n.x, 0.0f, t->p[0]);
    t_net_loss(&t->n, t_net_scale(&t->n, "again", y, 0.0f, t->p[1]), e->factor);
    t_ok(t->n.m, ms_wrap(t->n.m));
    two_params_write(t);
}

static void early_end_micro(two_params *t, const early_end *e, uint64_t number) {
    float x[COUNT];
    t_rng rng = t_seed(500 + number);
    t_fill(&rng, x, COUNT, 1.0f);
    t_ok(t->n.m, ms_write(t->n.m, t->n.x, x));
    t_ok(t->n.m, e->evals ? ms_eval(t->n.m, NULL) : MS_RESULT_OK);
    t_ok(t->n.m, e->three_calls ? ms_forward(t->n.m, NULL) : ms_step(t->n.m, NULL));
    t_ok(t->n.m, e->three_calls ? ms_backward(t->n.m) : MS_RESULT_OK);
}

/* Two steps of e->done micro-batches: ended by ms_update, and as long as they are. */
static void check_early_end(const early_end *e) {
    two_params t, whole;
    ms_memory_report report;
    early_end_create(&t, e, e->of);
    early_end_create(&whole, e, e->done);
    for (uint64_t step = 0; step < 2; ++step) {
        for (uint32_t k = 0; k < e->done; ++k) {
            early_end_micro(&t, e, 10 * step + k);
            early_end_micro(&whole, e, 10 * step + k);
        }
        t_ok(t.n.m, e->evals ? ms_eval(t.n.m, NULL) : MS_RESULT_OK);
        t_ok(t.n.m, ms_update(t.n.m));
        t_ok(whole.n.m, e->three_calls ? ms_update(whole.n.m) : MS_RESULT_OK);
        t_error(t.n.m, ms_update(t.n.m), MS_RESULT_ORDER);
        t_ok(t.n.m, ms_report(t.n.m, &report));
        assert_int_equal(report.step_count, step + 1);
    }
    for (int k = 0; k < 2; ++k) { // e->of is a power of 2, so only thirds are rounded otherwise
        double expected[COLS];
        float values[COLS];
        t_ok(whole.n.m, ms_read(whole.n.m, whole.p[k], values));
        for (int c = 0; c < COLS; ++c) {
            expected[c] = (double)values[c];
        }
        t_net_expect_near(&t.n, t.p[k], expected, COLS,
                          e->done == 3 && e->factor == 0.0f ? 1e-6 : 0.0);
    }
    t_net_end(&t.n);
    t_net_end(&whole.n);
}

static void a_step_may_end_early(void **state) {
    (void)state;
    static const ms_optimizer_kind kinds[] = {MS_OPTIMIZER_ADAMW, MS_OPTIMIZER_SGD,
                                              MS_OPTIMIZER_CUSTOM};
    for (int how = 0; how < 96; ++how) {
        early_end e;
        e.of = how & 1 ? 4 : 8;
        e.done = 1 + (uint32_t)(how / 2 % 4) % 3;
        e.kind = kinds[how % 3];
        e.clip = how & 4 ? 0.02f : 0.0f;
        e.factor = how & 8 ? 0.0625f : 0.0f;
        e.smallest = how & 16;
        e.evals = how & 32;
        e.three_calls = how % 5 < 2;
        check_early_end(&e);
    }
}

// ------------------------------------------------------------------------------------------------
// recipes of docs/porting.md

/* A batch is left out after its forward, after its backward, or, of several micro-batches, with all
   before it by ms_cancel, or by itself: params, state and counts are as if it had never been. */
static void a_batch_is_left_out(void **state) {
    (void)state;
    for (int way = 0; way < 4; ++way) {
        const int micro_count = way >= 2 ? 2 : 1;
        two_params both[2];
        for (int i = 0; i < 2; ++i) {
            two_params *t = &both[i];
            two_params_create(t, NULL, MS_OPTIMIZER_ADAMW);
            ms_set_accumulation(t->n.m, (uint32_t)micro_count);
            t_ok(t->n.m, ms_wrap(t->n.m));
            two_params_write(t);
            for (int step = 0; step < 2; ++step) {
                for (int micro = 0; micro < micro_count; ++micro) {
                    t_ok(t->n.m, ms_step(t->n.m, NULL));
                    if (way == 3 && i == 0 && micro == 0) {
                        t_ok(t->n.m, ms_forward(t->n.m, NULL));
                    }
                }
                if (i == 1 || step > 0 || way == 3) {
                    continue;
                }
                if (way == 2) {
                    t_ok(t->n.m, ms_step(t->n.m, NULL));
                }
                t_ok(t->n.m, ms_forward(t->n.m, NULL));
                if (way == 1) {
                    t_ok(t->n.m, ms_backward(t->n.m));
                } else if (way == 2) {
                    ms_cancel(t->n.m);
                    t_error(t->n.m, ms_forward(t->n.m, NULL), MS_RESULT_CANCELLED);
                }
            }
            assert_int_equal(ms_update_count(t->n.m, t->p[0]), 2);
        }
        two_params_same(&both[0], &both[1]);
        t_net_end(&both[0].n);
        t_net_end(&both[1].n);
    }
}

/* In a plan that updates after backward, gradients may be changed through ms_data before ms_update,
   also those of accumulated micro-batches, and the norm is taken afterwards. */
static void gradients_are_changed_before_the_update(void **state) {
    (void)state;
#ifdef T_CUDA
    skip(); // they are on the device
#endif
    for (int clips = 0; clips < 2; ++clips) {
        two_params t;
        float before[2][COLS], after[2][COLS], of_q[COLS];
        two_params_create(&t, NULL, MS_OPTIMIZER_SGD);
        ms_optimizer_desc sgd = ms_optimizer_defaults(MS_OPTIMIZER_SGD);
        sgd.learning_rate = 0.0078125f;
        sgd.grad_clip_norm = clips ? 1e6f : 0.0f;
        ms_set_optimizer(t.n.m, &sgd);
        ms_set_accumulation(t.n.m, 2);
        t_ok(t.n.m, ms_wrap(t.n.m));
        two_params_write(&t);
        for (int k = 0; k < 2; ++k) {
            t_ok(t.n.m, ms_read(t.n.m, t.p[k], before[k]));
            t_ok(t.n.m, ms_forward(t.n.m, NULL));
            t_ok(t.n.m, ms_backward(t.n.m));
        }
        float *p = (float *)ms_data(t.n.m, ms_gradient(t.n.m, t.p[0]));
        float *q = (float *)ms_data(t.n.m, ms_gradient(t.n.m, t.p[1]));
        assert_true(p != NULL && q != NULL);
        double squares = 0.0;
        for (int c = 0; c < COLS; ++c) {
            p[c] = 0.0f;
            of_q[c] = q[c] *= 0.5f;
            squares += (double)of_q[c] * of_q[c];
        }
        t_ok(t.n.m, ms_update(t.n.m));
        for (int k = 0; k < 2; ++k) {
            t_ok(t.n.m, ms_read(t.n.m, t.p[k], after[k]));
        }
        assert_memory_equal(before[0], after[0], sizeof before[0]);
        for (int c = 0; c < COLS; ++c) {
            assert_true(of_q[c] != 0.0f);
            assert_true(after[1][c] == fmaf(-sgd.learning_rate, of_q[c], before[1][c]) ||
                        fabs((double)after[1][c] - (before[1][c] - sgd.learning_rate * of_q[c])) <
                            1e-6);
        }
        if (clips) {
            double norm;
            t_ok(t.n.m, ms_gradient_norm(t.n.m, &norm));
            assert_true(fabs(norm - sqrt(squares)) < 1e-5 * norm);
        }
        t_net_end(&t.n);
    }
}

/* A param that sits out a step goes on with its own moments, written back with their count, as one
   with borrowed moments does. */
static void a_param_sits_out_a_step(void **state) {
    (void)state;
    static moments memory;
    two_params t, twin;
    float m[COLS], v[COLS];
    memset(memory, 0, sizeof memory);
    two_params_create(&t, NULL, MS_OPTIMIZER_ADAMW);
    two_params_create(&twin, &memory, MS_OPTIMIZER_ADAMW);
    two_params *const both[] = {&t, &twin};
    for (int i = 0; i < 2; ++i) {
        ms_model *of = both[i]->n.m;
        const ms_tensor p = both[i]->p[0];
        const ms_tensor first = ms_optimizer_state(of, p, 0), second = ms_optimizer_state(of, p, 1);
        t_ok(of, ms_wrap(of));
        two_params_write(both[i]);
        for (int step = 0; step < 3; ++step) {
            t_ok(of, ms_step(of, NULL));
        }
        const uint64_t count = ms_update_count(of, p);
        assert_int_equal(count, 3);
        t_ok(of, ms_read(of, first, m));
        t_ok(of, ms_read(of, second, v));
        freeze(both[i], true);
        t_ok(of, ms_step(of, NULL));
        freeze(both[i], false);
        if (i == 0) {
            t_ok(of, ms_write(of, first, m));
            t_ok(of, ms_write(of, second, v));
            t_ok(of, ms_set_update_count(of, p, count));
        }
        t_ok(of, ms_step(of, NULL));
        assert_int_equal(ms_update_count(of, p), 4);
    }
    two_params_same(&t, &twin);
    t_net_end(&t.n);
    t_net_end(&twin.n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T_TWICE(borrowed_memory_is_used_where_it_lies),
        T_TWICE(a_borrowed_gradient_is_never_zeroed),
        T_TWICE(custom_updates),
        T_TWICE(micro_batches_are_one_batch),
        T_TWICE(a_failing_micro_batch_starts_the_step_again),
        T_TWICE(a_step_without_its_update_starts_again),
        T_TWICE(a_rewrap_between_micro_batches),
        T_TWICE(a_count_does_not_change_inside_a_step),
        T_TWICE(a_step_may_end_early),
        T_TWICE(updates_are_counted_by_param),
        T_TWICE(gradients_are_clipped_by_their_common_norm),
        cmocka_unit_test(sums_of_squares),
        T_TWICE(a_norm_that_is_not_finite),
        T_TWICE(models_take_turns_in_one_arena),
        T_TWICE(an_early_update_keeps_the_arena),
        T_TWICE(a_larger_arena_ends_what_was_begun),
        T_TWICE(a_failed_model_stays_failed_until_it_is_wrapped),
        T_TWICE(the_plain_plan_ignores_force),
        T_TWICE(a_frozen_param_with_a_forced_update),
        T_TWICE(moments_of_a_param_that_is_thawed),
        T_TWICE(each_param_counts_its_own_updates),
        T_TWICE(a_batch_is_left_out),
        cmocka_unit_test(gradients_are_changed_before_the_update),
        T_TWICE(a_param_sits_out_a_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
