/*  test_slices.c - steps in slices, and steps that are cancelled: how far a slice goes, what may be
    done between slices, and that a step which is cancelled anywhere counts as not begun. That
    slices change no bit of random graphs is tested beside what else changes none: in
    test_contract.c, test_offload.c and test_tiles.c. MEMSCALE_TEST_DAGS sets how many random graphs
    there are, MEMSCALE_TEST_SEED which is the first. */
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "virtual.h"
#include "late_dag.h"

enum { QUICK_GRAPHS = 30, GRAPHS = 400 };

static uint64_t first_seed(void) {
    return t_environment("MEMSCALE_TEST_SEED", 1);
}

static uint64_t end_seed(void) {
    return first_seed() + t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
}

/* A clock that layers move on by their cost, and each look at it by `look_us`. */
typedef struct turned_clock {
    double now_us, look_us;
    uint64_t looks;
} turned_clock;

static double clock_now(void *user) {
    turned_clock *c = (turned_clock *)user;
    c->now_us += c->look_us;
    c->looks += 1;
    return c->now_us;
}

/* Of models that are not timed, also where the library has no clock of its own. */
static void give_clock(ms_config *config) {
    static turned_clock clock;
    clock.look_us = 1.0;
    config->clock = clock_now;
    config->clock_user = &clock;
}

// ------------------------------------------------------------------------------------------------
// how far a slice goes

enum { LAYERS = 6 };

/* A chain whose layer i takes cost[i] microseconds, in both directions, by the clock. */
typedef struct costly {
    t_net n;
    turned_clock clock;
    ms_tensor p;
    double cost[LAYERS], extra_us;
    uint32_t calls;
} costly;

static costly *the_costly;

static int costly_forward(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    the_costly->clock.now_us += the_costly->cost[op - the_costly->n.ops] + the_costly->extra_us;
    the_costly->calls += 1;
    return t_forward(call);
}

static int costly_backward(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    the_costly->clock.now_us += the_costly->cost[op - the_costly->n.ops] + the_costly->extra_us;
    the_costly->calls += 1;
    return t_backward(call);
}

static void costly_start(costly *c, double cost) {
    memset(c, 0, sizeof *c);
    the_costly = c;
    t_net_begin(&c->n);
    c->n.config.clock = clock_now;
    c->n.config.clock_user = &c->clock;
    t_net_create(&c->n);
    t_net_optimizer(&c->n, MS_OPTIMIZER_SGD, 0.0009765625f);
    c->p = t_net_param(&c->n, "p");
    ms_tensor at = c->n.x;
    for (int i = 0; i < LAYERS; ++i) {
        ms_layer_desc d = t_net_own(&c->n, costly_forward, costly_backward, "costly", at,
                                    t_net_like(&c->n, "y", at));
        c->cost[i] = cost;
        c->n.ops[i].c[0] = 1.0f;
        if (i == 0) {
            d.param[0] = c->p;
            c->n.ops[i].c[0] = 0.0f;
        }
        t_net_register(&c->n, &d);
        at = d.out[0];
    }
    t_net_loss(&c->n, at, 0.125f);
    t_net_start(&c->n);
    t_net_write_param(&c->n, c->p, 2.0f);
}

/* One step in slices of so many microseconds. Returns how many slices it took; *most_us is the
   longest. */
static uint32_t step_in(costly *c, uint64_t microseconds, double *most_us) {
    ms_result result = MS_RESULT_MORE;
    uint32_t slices = 0;
    double loss;
    *most_us = 0.0;
    while (result == MS_RESULT_MORE) {
        const double begin_us = c->clock.now_us;
        result = ms_step_slice(c->n.m, microseconds, &loss);
        const double us = c->clock.now_us - begin_us;
        *most_us = us > *most_us ? us : *most_us;
        ++slices;
        assert_true(slices < 1000);
    }
    t_ok(c->n.m, result);
    return slices;
}

static void instructions_run_while_they_fit(void **state) {
    (void)state;
    costly c;
    double most_us;
    costly_start(&c, 100.0);
    (void)step_in(&c, 100, &most_us); // learns
    c.calls = 0;
    (void)step_in(&c, 100, &most_us);
    assert_true(most_us <= 100.0 && c.calls == 2 * LAYERS);
    assert_int_equal(step_in(&c, 250, &most_us), LAYERS); // two layers in each
    assert_true(most_us <= 250.0);
    assert_int_equal(step_in(&c, 1200, &most_us), 1);
    assert_int_equal(step_in(&c, UINT64_MAX, &most_us), 1);
    assert_in_range(step_in(&c, 1, &most_us), 2 * LAYERS, 2 * LAYERS + 4); // each is longer
    c.cost[3] = 400.0;
    (void)step_in(&c, 250, &most_us); // does not know yet
    assert_true(most_us > 250.0);
    (void)step_in(&c, 450, &most_us);
    assert_true(most_us <= 450.0);
    c.cost[3] = 100.0;
    for (int i = 0; i < 40; ++i) { // forgets slowly
        (void)step_in(&c, 250, &most_us);
    }
    assert_int_equal(step_in(&c, 250, &most_us), LAYERS);
    t_net_end(&c.n);
}

/* One instruction that took long by chance must not keep others of its layer from running. */
static void a_hiccup_is_forgotten(void **state) {
    (void)state;
    costly c;
    double most_us;
    costly_start(&c, 100.0);
    (void)step_in(&c, 100, &most_us);
    c.extra_us = 1e6;
    (void)step_in(&c, 100, &most_us);
    c.extra_us = 0.0;
    for (int i = 0; i < 100; ++i) {
        (void)step_in(&c, 1000, &most_us);
        assert_true(most_us <= 1000.0);
    }
    assert_true(step_in(&c, 1250, &most_us) == 1);
    t_net_end(&c.n);
}

static void no_time_runs_nothing(void **state) {
    (void)state;
    costly c;
    double loss = 0.0;
    costly_start(&c, 100.0);
    for (int i = 0; i < 5; ++i) {
        assert_int_equal(ms_step_slice(c.n.m, 0, &loss), MS_RESULT_MORE);
    }
    msi_program *p = &c.n.m->run.plan->train;
    for (uint32_t k = 0; k < p->predicted.expected.count; ++k) {
        p->predicted.expected.items[k] = 0.0f; // and takes no time, as it is thought
    }
    assert_int_equal(ms_step_slice(c.n.m, 0, &loss), MS_RESULT_MORE);
    assert_int_equal(c.calls, 0);
    t_ok(c.n.m, ms_step_slice(c.n.m, UINT64_MAX, &loss));
    t_net_end(&c.n);
}

/* How many times as long as predicted layers really take. */
typedef struct pace {
    double factor, jump; // 0: none
} pace;

/* Layers are predicted to take 100 us and take something else. A slice is late by one instruction
   at most; where the pace is steady, none is late once each has run. Bits stay. */
static void late_slices_are_late_by_one_instruction(void **state) {
    (void)state;
    static const pace paces[] = {{1.0, 0.0}, {0.1, 0.0}, {10.0, 0.0}, {1.0, 10.0}, {0.1, 100.0}};
    enum { BUDGET = 250, STEPS = 40 };
    for (size_t k = 0; k < sizeof paces / sizeof paces[0]; ++k) {
        static costly whole, c;
        const ms_layer_time predicted = {100.0, 100.0, 100.0};
        t_rng rng = t_seed(k);
        double loss[2];
        costly_start(&whole, 100.0);
        costly_start(&c, 100.0);
        for (int i = 0; i < LAYERS; ++i) {
            ms_set_layer_time(c.n.m, c.n.layers[i], &predicted);
        }
        t_ok(c.n.m, ms_wrap(c.n.m));
        for (int step = 0; step < STEPS; ++step) {
            double longest_us = 0.0;
            the_costly = &c;
            c.calls = 0;
            for (int i = 0; i < LAYERS; ++i) {
                const bool jumps = paces[k].jump > 0.0 && t_chance(&rng, 0.3);
                c.cost[i] = 100.0 * (jumps ? paces[k].jump : paces[k].factor);
                longest_us = c.cost[i] > longest_us ? c.cost[i] : longest_us;
            }
            ms_result result = MS_RESULT_MORE;
            for (uint32_t slices = 0; result == MS_RESULT_MORE; ++slices) {
                const double begin_us = c.clock.now_us;
                const uint32_t calls = c.calls;
                result = ms_step_slice(c.n.m, BUDGET, &loss[0]);
                const double us = c.clock.now_us - begin_us;
                const bool is_one = c.calls <= calls + 1;
                const bool learned = step > 0 && !(paces[k].jump > 0.0);
                assert_true(us <= BUDGET + longest_us && slices < 100);
                assert_true(!learned || us <= BUDGET || is_one);
            }
            t_ok(c.n.m, result);
            the_costly = &whole;
            t_ok(whole.n.m, ms_step(whole.n.m, &loss[1]));
            assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
            t_net_same(&c.n, c.p, &whole.n, whole.p);
        }
        t_net_end(&c.n);
        t_net_end(&whole.n);
    }
}

// ------------------------------------------------------------------------------------------------
// the longest instruction

typedef struct last_warning {
    char text[512];
    uint32_t count;
} last_warning;

static void take_warning(ms_log_level level, const char *tag, const char *text, void *user) {
    last_warning *w = (last_warning *)user;
    if (level == MS_LOG_WARNING && strcmp(tag, "plan") == 0) {
        snprintf(w->text, sizeof w->text, "%s", text);
        w->count += 1;
    }
}

/* Rows of 16 numbers through three layers that take 100 us each way; the second may be without
   rows. */
typedef struct long_net {
    t_net n;
    ms_tensor p;
    last_warning warning;
    ms_layer layers[3];
} long_net;

static void long_net_start(long_net *l, double most_us, bool cuts_all) {
    memset(l, 0, sizeof *l);
    t_net_begin(&l->n);
    l->n.rows = l->n.largest = 64;
    give_clock(&l->n.config);
    l->n.config.max_instruction_us = most_us;
    l->n.config.log = take_warning;
    l->n.config.log_user = &l->warning;
    t_net_create(&l->n);
    t_net_optimizer(&l->n, MS_OPTIMIZER_SGD, 0.0009765625f);
    ms_hardware device = *ms_hardware_find("RTX 3090");
    device.launch_us = 0.001;
    ms_set_hardware(l->n.m, &device);
    l->p = t_net_param(&l->n, "p");
    ms_tensor at = l->n.x;
    for (int i = 0; i < 3; ++i) {
        const ms_layer_time time = {100.0, 100.0, 100.0};
        l->n.ops[l->n.count].c[0] = i ? 1.0f : 0.0f;
        ms_layer_desc d = t_net_own(&l->n, t_forward, t_backward, i == 1 ? "second" : "other", at,
                                    t_net_like(&l->n, "y", at));
        d.tile.axes = cuts_all || i != 1 ? 1 : 0;
        if (i == 0) {
            d.param[0] = l->p;
        }
        l->layers[i] = ms_register_layer(l->n.m, &d);
        l->n.ops[l->n.count].in_count = 1;
        l->n.ops[l->n.count].param_count = i == 0;
        l->n.layers[l->n.count++] = l->layers[i];
        ms_set_layer_time(l->n.m, l->layers[i], &time);
        at = d.out[0];
    }
    t_net_loss(&l->n, at, 0.125f);
    t_ok(l->n.m, ms_wrap(l->n.m));
    t_net_write_x(&l->n);
    t_net_write_param(&l->n, l->p, 2.0f);
}

static void long_instructions_are_split(void **state) {
    (void)state;
    static const double limits[] = {0.0, 120.0, 60.0, 30.0, 10.0};
    for (int cuts_all = 0; cuts_all < 2; ++cuts_all) {
        for (size_t k = 0; k < sizeof limits / sizeof limits[0]; ++k) {
            static long_net l, whole;
            ms_memory_report report;
            double loss[2];
            const double most_us = limits[k];
            long_net_start(&whole, 0.0, true);
            long_net_start(&l, most_us, cuts_all != 0);
            t_report(l.n.m, &report);
            const bool fits = most_us == 0.0 || most_us > 100.0 || cuts_all;
            if (most_us > 0.0 && fits) {
                if (report.longest_us > most_us)
                    fail_msg("%g of %g: %s", report.longest_us, most_us, l.warning.text);
                assert_int_equal(l.warning.count, 0);
            } else {
                assert_true(report.longest_us >= 100.0 && report.longest_us < 101.0);
                assert_true(report.longest_layer.id != 0);
            }
            if (!fits) {
                assert_true(l.warning.count == 1);
                assert_int_equal(report.longest_layer.id, l.layers[1].id);
                t_text_has(l.warning.text, "second");
                t_text_has(l.warning.text, "declares no rows");
            }
            for (int step = 0; step < 3; ++step) { // the numbers are small and whole
                ms_result result = MS_RESULT_MORE;
                while (result == MS_RESULT_MORE) {
                    result = ms_step_slice(l.n.m, 1, &loss[0]);
                }
                t_ok(l.n.m, result);
                t_ok(whole.n.m, ms_step(whole.n.m, &loss[1]));
                assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
                t_net_same(&l.n, l.p, &whole.n, whole.p);
            }
            t_net_end(&l.n);
            t_net_end(&whole.n);
        }
    }
}

/* What is not split is named all the same: here the layer whose workspace takes long to be cleared. */
static void a_long_fill_is_named(void **state) {
    (void)state;
    t_net n;
    last_warning warning;
    ms_memory_report report;
    const ms_layer_time time = {0.1, 0.1, 0.1};
    memset(&warning, 0, sizeof warning);
    t_net_begin(&n);
    n.config.max_instruction_us = 3.0;
    n.config.log = take_warning;
    n.config.log_user = &warning;
    t_net_create(&n);
    ms_hardware device = *ms_hardware_find("RTX 3090");
    device.launch_us = 0.001;
    ms_set_hardware(n.m, &device);
    t_net_optimizer(&n, MS_OPTIMIZER_SGD, 0.125f);
    const ms_tensor y = t_net_scale(&n, "scale", n.x, 0.0f, t_net_param(&n, "p"));
    ms_layer_desc d = t_net_own(&n, t_forward, t_backward, "clears", y, t_net_like(&n, "z", y));
    d.forward_workspace.bytes = 8 << 20; // some 9 us at 936 GB/s
    d.forward_workspace.contents = MS_CONTENTS_ZERO;
    t_net_register(&n, &d);
    ms_set_layer_time(n.m, n.layers[n.count - 1], &time);
    t_net_loss(&n, d.out[0], 1.0f);
    t_ok(n.m, ms_wrap(n.m));
    t_report(n.m, &report);
    assert_true(report.longest_us > 3.0 && report.longest_layer.id == 0);
    assert_int_equal(warning.count, 1);
    t_text_has(warning.text, "zero of layer 1 \"clears\"");
    t_text_has(warning.text, "does not split it");
    t_net_end(&n);
}

/* Updates in parts, of params that nothing moves. */
static void long_updates_are_split(void **state) {
    (void)state;
    t_chain whole, split;
    const ms_config plain = t_config();
    ms_config config = plain;
    ms_memory_report report;
    config.max_instruction_us = 0.05;
    config.tiling = MS_SWITCH_OFF;
    assert_int_equal(t_chain_create(&whole, &plain, 3, 4, 256), MS_RESULT_OK);
    assert_int_equal(t_chain_create(&split, &config, 3, 4, 256), MS_RESULT_OK);
    ms_hardware device = *ms_hardware_find("RTX 3090");
    device.launch_us = 0.001;
    ms_set_hardware(split.model, &device);
    t_ok(whole.model, ms_wrap(whole.model));
    t_ok(split.model, ms_wrap(split.model));
    t_ok(whole.model, t_chain_write(&whole, 1));
    t_ok(split.model, t_chain_write(&split, 1));
    t_report(split.model, &report);
    t_net n;
    memset(&n, 0, sizeof n);
    n.m = split.model;
    const t_tally tally = t_net_tally(&n);
    assert_true(tally.count[MS_EVENT_UPDATE] > 3 * 8);
    for (int step = 0; step < 3; ++step) {
        t_ok(whole.model, ms_step(whole.model, NULL));
        t_ok(split.model, ms_step(split.model, NULL));
        t_chain_same(&whole, &split);
    }
    ms_destroy(whole.model);
    ms_destroy(split.model);
}

// ------------------------------------------------------------------------------------------------
// between slices

static void the_model_cannot_change_between_slices(void **state) {
    (void)state;
    costly c;
    double loss, eval_loss;
    float p[T_NET_COLS], now[T_NET_COLS];
    uint64_t bytes;
    ms_verify_report verified;
    ms_nonfinite nonfinite;
    ms_memory_report report;
    costly_start(&c, 100.0);
    ms_model *m = c.n.m;
    t_ok(m, ms_read(m, c.p, p));
    ms_result result = ms_step_slice(m, 100, &loss);
    uint32_t slices = 1, hidden = 0, losses = 0;
    for (; result == MS_RESULT_MORE; ++slices) {
        t_error(m, ms_step(m, &loss), MS_RESULT_ORDER);
        t_text_has(ms_last_error(m), "ms_step_slice");
        t_error(m, ms_forward(m, &loss), MS_RESULT_ORDER);
        t_error(m, ms_backward(m), MS_RESULT_ORDER);
        t_error(m, ms_update(m), MS_RESULT_ORDER);
        t_error(m, ms_eval(m, &eval_loss), MS_RESULT_ORDER);
        t_error(m, ms_wrap(m), MS_RESULT_ORDER);
        t_error(m, ms_detach(m), MS_RESULT_ORDER);
        t_error(m, ms_smallest_budget(m, &bytes), MS_RESULT_ORDER);
        t_error(m, ms_verify(m, NULL, NULL, &verified), MS_RESULT_ORDER);
        t_error(m, ms_find_nonfinite(m, &nonfinite), MS_RESULT_ORDER);
        t_error(m, ms_reshape(m, &c.n.rows), MS_RESULT_ORDER);
        t_error(m, ms_write(m, c.p, p), MS_RESULT_ORDER);
        t_error(m, ms_write(m, c.n.x, p), MS_RESULT_ORDER);
        t_ok(m, ms_report(m, &report));
        const ms_result read = ms_read(m, c.p, now);
        if (read == MS_RESULT_OK) { // until the update
            assert_memory_equal(now, p, sizeof p);
            assert_non_null(ms_data(m, c.p));
        } else {
            t_error(m, read, MS_RESULT_ORDER);
            assert_null(ms_data(m, c.p));
            ++hidden;
        }
        float rows[T_NET_ROWS * 4];
        losses += ms_read(m, c.n.loss, rows) == MS_RESULT_OK;
        t_error(m, ms_read(m, ms_gradient(m, c.p), now), MS_RESULT_ORDER);
        result = ms_step_slice(m, 100, &loss);
    }
    t_ok(m, result);
    assert_true(slices >= 2 * LAYERS && losses >= LAYERS - 1 && hidden <= 1);
    t_ok(m, ms_read(m, c.p, now));
    assert_true(memcmp(now, p, sizeof p) != 0);
    t_net_end(&c.n);
}

/* While the others are updated. */
/* Wherever it is set: the step under way has the factor with which it began, in its loss and in its
   gradients. */
static void a_loss_factor_waits_for_the_next_step(void **state) {
    (void)state;
    costly expected;
    double most_us, loss = 0.0;
    costly_start(&expected, 100.0);
    t_ok(expected.n.m, ms_step(expected.n.m, &loss));
    for (uint32_t after = 1; after < 2 * LAYERS; ++after) {
        costly c;
        double found = 0.0;
        ms_result result = MS_RESULT_MORE;
        costly_start(&c, 100.0);
        for (uint32_t k = 0; result == MS_RESULT_MORE; ++k) {
            if (k == after) {
                ms_set_loss_factor(c.n.m, 8.0f);
            }
            result = ms_step_slice(c.n.m, 1, &found);
        }
        t_ok(c.n.m, result);
        assert_true(found == loss);
        t_net_same(&c.n, c.p, &expected.n, expected.p);
        (void)step_in(&c, UINT64_MAX, &most_us);
        t_net_end(&c.n);
    }
    t_net_end(&expected.n);
}

static void inputs_and_frozen_params_can_be_read_all_the_time(void **state) {
    (void)state;
    t_chain chain;
    double loss;
    float x[T_CHAIN_ROWS * T_CHAIN_COLS], weight[T_CHAIN_COLS * T_CHAIN_COLS];
    uint32_t updating = 0;
    ms_config config = t_config();
    give_clock(&config);
    config.early_update = MS_SWITCH_OFF;
    assert_int_equal(t_chain_create(&chain, &config, 4, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    ms_model *m = chain.model;
    ms_set_frozen(m, chain.weight[0], true);
    t_ok(m, ms_wrap(m));
    t_ok(m, t_chain_write(&chain, 1));
    while (ms_step_slice(m, 1, &loss) == MS_RESULT_MORE) {
        const bool is_hidden = ms_read(m, chain.weight[1], weight) != MS_RESULT_OK;
        updating += is_hidden;
        t_ok(m, ms_read(m, chain.x, x));
        t_ok(m, ms_read(m, chain.weight[0], weight));
        assert_non_null(ms_data(m, chain.x));
    }
    assert_true(updating >= 2); // of three updates the last is in the slice that ends the step
    ms_destroy(m);
}

/* A net whose running state is moved once more while its layer is recomputed: meanwhile the state has
   its older value. Slices are of one instruction. */
typedef struct running_net {
    t_net n;
    turned_clock clock;
    ms_tensor running;
} running_net;

static void running_start(running_net *r, bool on_host) {
    memset(r, 0, sizeof *r);
    t_net *n = &r->n;
    r->clock.look_us = 10.0; // what has run once takes 10 and does not fit into 1
    t_net_begin(n);
    n->config.clock = clock_now;
    n->config.clock_user = &r->clock;
    t_net_create(n);
    r->running = ms_buffer(n->m, "running", MS_DTYPE_F32, ms_shape1(T_NET_COLS));
    if (on_host) {
        ms_set_on_host(n->m, r->running);
    }
    const ms_tensor p = t_net_param(n, "p"), scaled = t_net_scale(n, "scale", n->x, 0.0f, p);
    ms_layer_desc d = t_net_layer(n, T_RUNNING, "running", scaled, t_net_like(n, "y", scaled));
    d.state[0] = r->running;
    t_net_register(n, &d);
    ms_set_tensor_technique(n->m, d.out[0], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
    t_net_loss(n, t_net_square(n, "square", t_net_square(n, "square", d.out[0])), 0.125f);
    t_net_start(n);
    t_net_write_param(n, p, 2.0f);
}

/* From forward on, whoever can read the state reads what forward has made of it, also where the step
   is suspended and cancelled. */
static void old_state_is_never_seen(void **state) {
    (void)state;
    for (int on_host = 0; on_host < 2; ++on_host) {
        running_net r;
        double loss;
        uint32_t hidden = 0, cancelled = 0;
        running_start(&r, on_host != 0);
        ms_model *m = r.n.m;
        t_ok(m, ms_step(m, &loss));
        for (uint32_t at = 1, more = 1; more; ++at) {
            float before[T_NET_COLS], made[T_NET_COLS], now[T_NET_COLS];
            ms_result result = MS_RESULT_MORE;
            bool is_made = false;
            t_ok(m, ms_read(m, r.running, before));
            for (uint32_t i = 0; i < at && result == MS_RESULT_MORE; ++i) {
                result = ms_step_slice(m, 1, &loss);
                const ms_result read = ms_read(m, r.running, now);
                assert_true((ms_data(m, r.running) != NULL) == (read == MS_RESULT_OK));
                hidden += read != MS_RESULT_OK;
                if (read != MS_RESULT_OK) {
                    t_error(m, read, MS_RESULT_ORDER);
                } else if (is_made) {
                    assert_memory_equal(now, made, sizeof now);
                } else if (memcmp(now, before, sizeof now) != 0) {
                    memcpy(made, now, sizeof made);
                    is_made = true;
                }
            }
            more = result == MS_RESULT_MORE;
            if (more) {
                t_ok(m, ms_suspend(m, NULL));
                ms_cancel(m);
                result = ms_step_slice(m, 1, &loss);
                cancelled += result == MS_RESULT_CANCELLED;
                t_ok(m, ms_resume(m));
                result = result == MS_RESULT_ORDER ? ms_step_slice(m, 1, &loss) : result;
                t_error(m, result, MS_RESULT_CANCELLED);
                t_ok(m, ms_read(m, r.running, now));
                assert_memory_equal(now, is_made ? made : before, sizeof now);
            }
        }
        assert_true(hidden > 0 && cancelled > 0);
        t_net_end(&r.n);
    }
}

static void a_model_can_be_destroyed_between_slices(void **state) {
    (void)state;
    for (uint32_t after = 0; after < 2 * LAYERS + 2; ++after) {
        costly c;
        double loss;
        costly_start(&c, 100.0);
        for (uint32_t i = 0; i < after; ++i) {
            (void)!ms_step_slice(c.n.m, 1, &loss);
        }
        t_net_end(&c.n);
    }
}

static void a_failure_ends_the_slices(void **state) {
    (void)state;
    costly c, twin;
    double loss, most_us;
    costly_start(&twin, 100.0);
    (void)step_in(&twin, 100, &most_us);
    costly_start(&c, 100.0);
    c.n.ops[2].failing = 1u << MS_PHASE_BACKWARD;
    ms_result result = MS_RESULT_MORE;
    while (result == MS_RESULT_MORE) {
        result = ms_step_slice(c.n.m, 100, &loss);
    }
    t_error(c.n.m, result, MS_RESULT_CALLBACK);
    c.n.ops[2].failing = 0;
    t_ok(c.n.m, ms_step(c.n.m, &loss));
    t_net_same(&c.n, c.p, &twin.n, twin.p);
    t_net_end(&c.n);
    t_net_end(&twin.n);
}

static void wrong_calls_are_errors(void **state) {
    (void)state;
    double loss;
    ms_model *m;
    ms_config config = t_config();
    give_clock(&config);
    assert_int_equal(ms_step_slice(NULL, 100, &loss), MS_RESULT_INVALID);
    ms_cancel(NULL);
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    t_error(m, ms_step_slice(m, 100, &loss), MS_RESULT_ORDER);
    ms_destroy(m);
    t_chain chain;
    config.dry_run = true;
    assert_int_equal(t_chain_create(&chain, &config, 2, 4, 4), MS_RESULT_OK);
    t_ok(chain.model, ms_wrap(chain.model));
    t_error(chain.model, ms_step_slice(chain.model, 100, &loss), MS_RESULT_DRY_RUN);
    ms_destroy(chain.model);
}

/* That of the system, unless there is none. */
static void slices_need_a_clock(void **state) {
    (void)state;
    t_chain chain;
    double loss;
    ms_config config = t_config();
    t_chain_start(&chain, &config, 3);
    ms_result result = ms_step_slice(chain.model, 1, &loss);
#ifdef MEMSCALE_NO_SYSTEM
    t_error(chain.model, result, MS_RESULT_UNSUPPORTED);
    t_text_has(ms_last_error(chain.model), "set ms_config.clock");
    ms_hardware hardware;
    t_ok(chain.model, ms_hardware_report(chain.model, &hardware));
    assert_true(!hardware.is_measured && hardware.host_total_bytes == 0);
    result = ms_step(chain.model, &loss);
#else
    while (result == MS_RESULT_MORE) {
        result = ms_step_slice(chain.model, 1, &loss);
    }
#endif
    t_ok(chain.model, result);
    ms_destroy(chain.model);
}

static double no_time(void *user) {
    return *(double *)user;
}

/* By a clock that stands still a slice takes no time, and nothing can be measured. */
static void a_clock_that_stands_still(void **state) {
    (void)state;
    t_chain chain;
    double loss, now_us = 5.0;
    ms_hardware hardware;
    ms_config config = t_config();
    config.clock = no_time;
    config.clock_user = &now_us;
    t_chain_start(&chain, &config, 3);
    t_ok(chain.model, ms_hardware_report(chain.model, &hardware));
    assert_true(!hardware.is_measured);
    for (ms_result result = MS_RESULT_MORE; result == MS_RESULT_MORE;) { // the first are expected
        result = ms_step_slice(chain.model, 1000, &loss);
        assert_true(result == MS_RESULT_OK || result == MS_RESULT_MORE);
    }
    t_ok(chain.model, ms_step_slice(chain.model, 1, &loss));
    ms_destroy(chain.model);
}

static void many_slices_take_no_memory(void **state) {
    (void)state;
    costly c;
    double loss;
    costly_start(&c, 1.0);
    t_ok(c.n.m, ms_step(c.n.m, &loss));
    const uint64_t calls = c.n.heap.calls, bytes = c.n.heap.live_bytes;
    for (int i = 0; i < 100000; ++i) {
        const ms_result result = ms_step_slice(c.n.m, 2, i % 2 ? &loss : NULL);
        assert_true(result == MS_RESULT_OK || result == MS_RESULT_MORE);
    }
    assert_true(c.n.heap.calls == calls && c.n.heap.live_bytes == bytes);
    t_net_end(&c.n);
}

// ------------------------------------------------------------------------------------------------
// cancel

/* What outlasts a step, of a net of a random graph. */
typedef struct lasting {
    uint8_t *data;
    size_t used;
} lasting;

static lasting take_lasting(rd_net *n) {
    const rd_graph *g = n->run.graph;
    lasting l = {(uint8_t *)malloc(RD_VALUES * (1 + RD_STATES) * RD_ELEMENTS * sizeof(double)), 0};
    assert_non_null(l.data);
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        const int states = v->frozen ? 0 : (int)rd_state_count(g, i);
        for (int k = -1; k < states && v->role == RD_PARAM; ++k) {
            const ms_tensor t =
                k < 0 ? n->handle[i] : ms_optimizer_state(n->model, n->handle[i], k);
            if (ms_read(n->model, t, l.data + l.used) == MS_RESULT_OK) {
                l.used += (size_t)ms_tensor_bytes(n->model, t);
            }
        }
    }
    return l;
}

static void write_buffers(rd_net *n, const lasting *l) {
    const rd_graph *g = n->run.graph;
    size_t at = 0;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        if (v->role == RD_BUFFER) {
            t_ok(n->model, ms_write(n->model, n->handle[i], l->data + at));
            at += (size_t)ms_tensor_bytes(n->model, n->handle[i]);
        }
    }
}

static lasting take_buffers(rd_net *n) {
    const rd_graph *g = n->run.graph;
    lasting l = {(uint8_t *)malloc(RD_VALUES * RD_ELEMENTS * sizeof(double)), 0};
    assert_non_null(l.data);
    for (uint32_t i = 0; i < g->value_count; ++i) {
        if (g->value[i].role == RD_BUFFER) {
            t_ok(n->model, ms_read(n->model, n->handle[i], l.data + l.used));
            l.used += (size_t)ms_tensor_bytes(n->model, n->handle[i]);
        }
    }
    return l;
}

static void expect_lasting(rd_net *n, const lasting *expected, const char *what, uint64_t where) {
    lasting now = take_lasting(n);
    if (now.used != expected->used || memcmp(now.data, expected->data, now.used) != 0) {
        fail_msg("MEMSCALE_TEST_SEED=%llu: %s at slice %llu: params or state differ",
                 (unsigned long long)n->run.graph->seed, what, (unsigned long long)where);
    }
    free(now.data);
}

static void begin_pass(rd_net *n, uint32_t micro) {
    n->run.micro = micro;
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        n->run.op[i].forwards = n->run.op[i].backwards = n->run.op[i].recomputes = 0;
    }
}

/* The micro-batches of a step, from the first on. */
static void whole_step(rd_net *n, double *loss) {
    for (uint32_t micro = 0; micro < n->run.graph->accumulation; ++micro) {
        begin_pass(n, micro);
        assert_true(rd_net_write(n, 1 + micro, false));
        t_ok(n->model, ms_step(n->model, loss));
        t_ok(n->model, ms_synchronize(n->model));
    }
    n->run.step += 1;
}

/* Cancels a step after so many slices of one instruction each; false if it was done before that. A
   step that has begun to update is completed, and the next one cancelled. */
static bool cancel_after(rd_net *n, uint64_t slices, bool *completed) {
    ms_result result = MS_RESULT_OK;
    double loss;
    *completed = false;
    for (uint32_t micro = 0; micro < n->run.graph->accumulation; ++micro) {
        begin_pass(n, micro);
        assert_true(rd_net_write(n, 1 + micro, false));
        do {
            if (slices-- == 0) {
                const bool updates = n->model->run.updates_done > 0;
                const bool was_enqueued = n->model->run.slices.is_enqueued;
                ms_cancel(n->model);
                ms_cancel(n->model);
                do {
                    result = ms_step_slice(n->model, 1, &loss);
                } while (result == MS_RESULT_MORE);
                assert_true(result != MS_RESULT_OK || updates || was_enqueued);
                *completed = result == MS_RESULT_OK && micro + 1 == n->run.graph->accumulation;
                t_ok(n->model, ms_synchronize(n->model)); // layers that run late look at the pass
                n->run.step += *completed;
                if (result == MS_RESULT_OK) {
                    begin_pass(n, *completed ? 0 : micro + 1);
                    result = ms_step_slice(n->model, 1, &loss);
                }
                t_error(n->model, result, MS_RESULT_CANCELLED);
                return true;
            }
            result = ms_step_slice(n->model, 1, &loss);
        } while (result == MS_RESULT_MORE);
        t_ok(n->model, result);
        t_ok(n->model, ms_synchronize(n->model));
    }
    n->run.step += 1;
    *completed = true;
    return false;
}

/* A layer with several buffers: each forward adds 1 to the first, 2 to the second and so on, and
   y = x + the sum of what they were. A recomputation reads them, and fails if it is told to. */
typedef struct counting {
    uint32_t buffers, forwards;
    bool fails;
} counting;

static int count_forward(const ms_call *call) {
    counting *of = (counting *)call->user;
    const bool again = call->phase == MS_PHASE_RECOMPUTE;
    float sum = 0.0f;
    for (uint32_t k = 0; k < of->buffers; ++k) {
        float *count = t_data(&call->state[k]);
        sum += *count;
        *count += again ? 0.0f : (float)(k + 1);
    }
    of->forwards += !again;
    for (int64_t i = 0; i < t_count(&call->out[0]); ++i) {
        t_data(&call->out[0])[i] = t_data(&call->in[0])[i] + sum;
    }
    return again && of->fails ? T_CALLBACK_ERROR : 0;
}

static int count_backward(const ms_call *call) {
    for (int64_t i = 0; i < t_count(&call->grad_out[0]); ++i) {
        t_contribute(&call->grad_in[0], i, t_grad_out(call, 0, i));
    }
    return 0;
}

static void expect_counts(const t_net *n, const counting *of, const ms_tensor *buffer) {
    for (uint32_t k = 0; k < of->buffers; ++k) {
        float count = 0.0f;
        t_ok(n->m, ms_read(n->m, buffer[k], &count));
        assert_true(count == (float)((k + 1) * of->forwards));
    }
}

/* Whether a recomputation has old state in place or has put some of it back: where the step is
   cancelled, or the recomputation fails, all buffers have what forward left. */
static void no_buffer_stays_old(void **state) {
    (void)state;
    for (uint32_t buffers = 1; buffers <= 4; ++buffers) {
        t_net n;
        ms_tensor buffer[4];
        counting of = {buffers, 0, false};
        double loss;
        uint32_t old = 0;
        t_net_begin(&n);
        give_clock(&n.config);
        t_net_create(&n);
        const ms_tensor scaled = t_net_scale(&n, "scale", n.x, 0.0f, t_net_param(&n, "p"));
        ms_layer_desc d = t_net_own(&n, count_forward, count_backward, "counting", scaled,
                                    t_net_like(&n, "y", scaled));
        d.recompute = count_forward;
        d.user = &of;
        d.backward_reads.nothing = true;
        for (uint32_t k = 0; k < buffers; ++k) {
            d.state[k] = buffer[k] = ms_buffer(n.m, "count", MS_DTYPE_F32, ms_shape1(1));
        }
        n.layers[n.count++] = ms_register_layer(n.m, &d);
        ms_set_tensor_technique(n.m, d.out[0], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        (void)t_net_loss(&n, t_net_square(&n, "square", d.out[0]), 1.0f);
        t_net_start(&n);
        for (uint32_t after = 1, more = true; more; ++after) {
            ms_result result = MS_RESULT_MORE;
            for (uint32_t k = 0; k < after && result == MS_RESULT_MORE; ++k) {
                result = ms_step_slice(n.m, 1, &loss);
            }
            more = result == MS_RESULT_MORE;
            old += n.m->run.state_is_old;
            if (more) {
                ms_cancel(n.m);
                t_error(n.m, ms_step_slice(n.m, 1, &loss), MS_RESULT_CANCELLED);
            }
            expect_counts(&n, &of, buffer);
        }
        assert_in_range(old, buffers, UINT32_MAX);
        of.fails = true;
        t_error(n.m, ms_step(n.m, &loss), MS_RESULT_CALLBACK);
        expect_counts(&n, &of, buffer);
        t_net_end(&n);
    }
}

/* Gradients that the trainer lends go on adding up, whatever becomes of a step. */
static bool is_suitable(const rd_graph *g) {
    bool lent = g->optimizer.kind == MS_OPTIMIZER_NONE;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        lent |= g->value[i].borrowed_gradient;
    }
    return !lent;
}

/* A net of a random graph with random moves, after its first step. */
static rd_net *moved_net(rd_graph *g, const ms_config *config, char *failure) {
    t_rng moves = t_seed(g->seed);
    double loss;
    rd_net *n = rd_net_create(g, config, "moved", failure, false);
    rd_force_moves(n, &moves);
    t_ok(n->model, ms_wrap(n->model));
    assert_true(rd_net_write(n, 0, false));
    whole_step(n, &loss);
    return n;
}

/* Two nets alike, of which one runs whole steps. Steps of the other are cancelled, one at each
   instruction, and then run whole. */
static void cancel_everywhere(rd_graph *g, ms_config config) {
    char failure[RD_TEXT] = "";
    turned_clock clock = {0.0, 10.0, 0}; // what has run once takes 10 and does not fit into 1
    t_rng rng = t_seed(g->seed);
    double loss;
    t_heap heap;
    memset(&heap, 0, sizeof heap);
    config.allocator = t_heap_allocator(&heap);
    config.clock = clock_now;
    config.clock_user = &clock;
    config.force_optimize = t_chance(&rng, 0.5);
    config.early_update = t_chance(&rng, 0.5) ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    rd_net *whole = moved_net(g, &config, failure);
    g->mover = g->mover ? (v_layer *)g->mover + RD_LAYERS : NULL; // has a place for each net
    rd_net *n = moved_net(g, &config, failure);
    bool completed = false;
    for (uint64_t at = 0, more = true; more; ++at) {
        lasting before = take_lasting(n), buffers = take_buffers(n);
        more = cancel_after(n, at, &completed);
        if (!completed) {
            expect_lasting(n, &before, "cancelled", at);
            write_buffers(n, &buffers);
            whole_step(n, &loss);
        } else if (more) { // the next step had begun
            write_buffers(n, &buffers);
        }
        lasting once = take_lasting(n);
        whole_step(whole, &loss);
        expect_lasting(whole, &once, completed ? "completed" : "after", at);
        lasting of_whole = take_buffers(whole);
        write_buffers(n, &of_whole);
        free(before.data);
        free(buffers.data);
        free(once.data);
        free(of_whole.data);
    }
    rd_net_destroy(n);
    rd_net_destroy(whole);
    assert_true(failure[0] == 0 && heap.live_count == 0 && heap.wrong_releases == 0);
}

static void a_cancelled_step_counts_as_not_begun(void **state) {
    (void)state;
    for (uint64_t seed = first_seed(); seed < end_seed(); ++seed) {
        rd_graph *g = rd_generate(seed);
        if (is_suitable(g)) {
            cancel_everywhere(g, t_config());
        }
        free(g);
    }
}

static void a_cancelled_step_leaves_no_work(void **state) {
    (void)state;
    static v_layer layers[2 * RD_LAYERS];
    for (uint64_t seed = first_seed(); seed < end_seed(); ++seed) {
        v_device device;
        ms_config config = t_config();
        rd_graph *g = ld_make_late(rd_generate(seed), layers);
        v_open(&device, seed);
        config.backend = v_backend(&device);
        if (is_suitable(g)) {
            cancel_everywhere(g, config);
        }
        assert_int_equal(device.engine.pending, 0);
        assert_int_equal(device.callback_error, 0);
        v_close(&device);
        free(g);
    }
}

static int cancelling_forward(const ms_call *call) {
    ms_cancel(call->model);
    return t_forward(call);
}

static void a_callback_can_cancel(void **state) {
    (void)state;
    t_net n;
    double loss, eval_loss;
    t_net_begin(&n);
    t_net_create(&n);
    t_net_optimizer(&n, MS_OPTIMIZER_SGD, 0.125f);
    const ms_tensor p = t_net_param(&n, "p");
    const ms_tensor y = t_net_scale(&n, "scale", n.x, 0.0f, p);
    n.ops[n.count].c[0] = 1.0f;
    const ms_layer_desc d =
        t_net_own(&n, cancelling_forward, t_backward, "cancels", y, t_net_like(&n, "z", y));
    t_net_register(&n, &d);
    t_net_loss(&n, d.out[0], 1.0f);
    t_net_start(&n);
    t_net_write_param(&n, p, 2.0f);
    t_error(n.m, ms_step(n.m, &loss), MS_RESULT_CANCELLED);
    t_text_has(ms_last_error(n.m), "ms_cancel");
    t_error(n.m, ms_eval(n.m, &eval_loss), MS_RESULT_CANCELLED);
    t_error(n.m, ms_forward(n.m, &loss), MS_RESULT_CANCELLED);
    t_net_end(&n);
}

/* Before a step, and of one that was begun by ms_forward. */
static void cancel_waits_for_a_step(void **state) {
    (void)state;
    costly c;
    double loss;
    costly_start(&c, 1.0);
    ms_cancel(c.n.m);
    t_error(c.n.m, ms_step(c.n.m, &loss), MS_RESULT_CANCELLED);
    assert_int_equal(c.calls, 0);
    t_ok(c.n.m, ms_forward(c.n.m, &loss));
    ms_cancel(c.n.m);
    t_error(c.n.m, ms_backward(c.n.m), MS_RESULT_CANCELLED);
    t_error(c.n.m, ms_backward(c.n.m), MS_RESULT_ORDER);
    t_ok(c.n.m, ms_forward(c.n.m, &loss));
    t_ok(c.n.m, ms_backward(c.n.m));
    ms_cancel(c.n.m);
    t_error(c.n.m, ms_update(c.n.m), MS_RESULT_CANCELLED);
    t_ok(c.n.m, ms_step(c.n.m, &loss));
    t_net_end(&c.n);
}

// ------------------------------------------------------------------------------------------------
// a device that works later

#ifndef T_CUDA
/* A chain of layers that run late. */
typedef struct late_net {
    v_device device;
    t_net n;
    ms_tensor p;
    v_layer layers[LAYERS + 1];
} late_net;

static void late_start(late_net *l, ms_layer_fn forward, ms_layer_fn backward) {
    const ms_layer_time predicted = {100.0, 100.0, 100.0};
    t_net *n = &l->n;
    t_net_create(n);
    t_net_optimizer(n, MS_OPTIMIZER_SGD, 0.0009765625f);
    l->p = t_net_param(n, "p");
    ms_tensor at = n->x;
    for (int i = 0; i <= LAYERS; ++i) {
        ms_layer_desc d;
        n->ops[n->count].c[0] = i ? 1.0f : 0.0f;
        if (i == LAYERS) {
            n->loss = t_losses_of(n->m, at);
            d = t_layer(&n->ops[n->count], T_SQUARES, "loss", at, n->loss);
        } else {
            d = t_net_own(n, t_forward, t_backward, "late", at, t_net_like(n, "y", at));
            d.param[0] = i ? d.param[0] : l->p;
            at = d.out[0];
        }
        d = v_wrap(&d, &l->layers[i]);
        d.forward = forward;
        d.backward = backward;
        n->layers[n->count] = ms_register_layer(n->m, &d);
        ms_set_layer_time(n->m, n->layers[n->count++], &predicted);
    }
    ms_set_loss(n->m, n->loss);
    t_ok(n->m, ms_wrap(n->m));
    t_net_write_x(n);
    t_net_write_param(n, l->p, 2.0f);
    t_ok(n->m, ms_synchronize(n->m));
}

/* Slices enqueue and look, and never wait, unless they cannot look: then for the slice before. */
static void steps_on_a_device(bool can_look) {
    static late_net l;
    double loss;
    v_open(&l.device, 7);
    t_net_begin(&l.n);
    l.n.config.backend = v_backend(&l.device);
    give_clock(&l.n.config);
    l.n.config.backend.query = can_look ? l.n.config.backend.query : NULL;
    late_start(&l, v_forward, v_backward);
    const uint64_t waits = l.device.waits_of_host;
    uint32_t slices = 0, steps = 0;
    while (steps < 20) {
        const ms_result result = ms_step_slice(l.n.m, 300, steps % 2 ? &loss : NULL);
        assert_true(result == MS_RESULT_OK || result == MS_RESULT_MORE);
        steps += result == MS_RESULT_OK;
        ++slices;
        assert_true(slices < 100000);
    }
    assert_true(can_look == (l.device.waits_of_host == waits));
    assert_true(slices > steps || !can_look);
    t_net_end(&l.n);
    v_close(&l.device);
}

static void slices_do_not_wait_for_a_device(void **state) {
    (void)state;
    steps_on_a_device(true);
    steps_on_a_device(false);
}

/* A step that is enqueued whole needs the arena no more: another model may use it before the loss has come.
   Before that, the step begins anew. */
static void a_shared_arena_is_needed_until_all_is_enqueued(void **state) {
    (void)state;
    static late_net net[3]; // alone, and two that share an arena
    enum { COUNT = 40 };
    double expected[COUNT], loss;
    ms_arena *arena = NULL;
    uint32_t early = 0, late = 0;
    v_open(&net[0].device, 7);
    const ms_backend backend = v_backend(&net[0].device);
    t_ok(NULL, ms_arena_create(&backend, NULL, &arena));
    for (int k = 0; k < 3; ++k) {
        t_net_begin(&net[k].n);
        net[k].n.config.backend = backend;
        net[k].n.config.arena = k ? arena : NULL;
        give_clock(&net[k].n.config);
        late_start(&net[k], v_forward, v_backward);
    }
    for (uint32_t step = 0; step < COUNT; ++step) {
        t_ok(net[0].n.m, ms_step(net[0].n.m, &expected[step]));
    }
    ms_model *m = net[1].n.m, *other = net[2].n.m;
    for (uint32_t step = 0; step < COUNT; ++step) {
        ms_result result = MS_RESULT_MORE;
        uint32_t slice = 0;
        bool ends = false;
        while (result == MS_RESULT_MORE) {
            result = ms_step_slice(m, 300, &loss);
            const bool enqueued = m->run.slices.is_enqueued;
            if (result == MS_RESULT_MORE && (enqueued || (step % 4 == 3 && ++slice == 2))) {
                t_ok(other, ms_step(other, NULL));
                late += enqueued;
                ends |= !enqueued;
            }
        }
        if (ends) {
            early += 1;
            t_error(m, result, MS_RESULT_ORDER);
            t_ok(m, ms_step(m, &loss));
        } else {
            t_ok(m, result);
        }
        assert_true(loss == expected[step]);
        assert_int_equal(m->run.step, step + 1);
    }
    assert_true(early > 0 && late > 0);
    for (int k = 2; k >= 0; --k) {
        t_net_end(&net[k].n);
    }
    ms_arena_destroy(arena);
    v_close(&net[0].device);
}

/* A device that works in time: what layers enqueue takes its time after what was enqueued before, and
   an event has come when that has passed. */
typedef struct timed_device {
    late_net l;
    turned_clock clock;
    double free_us; // when all that is enqueued is done
    double factor;  // how many times as long as predicted layers take
    double *event_us;
    bool is_busy; // for ever, as far as it tells
    uint64_t asked;
} timed_device;

static timed_device the_timed;

static void take_time(timed_device *t) {
    const double now_us = t->clock.now_us;
    t->free_us = (t->free_us > now_us ? t->free_us : now_us) + 100.0 * t->factor;
}

static int timed_forward(const ms_call *call) {
    take_time(&the_timed);
    return v_forward(call);
}

static int timed_backward(const ms_call *call) {
    take_time(&the_timed);
    return v_backward(call);
}

enum { TIMED_EVENTS = 4096 };

static int timed_record(void *state, ms_stream_kind stream, uint32_t event) {
    assert_true(event < TIMED_EVENTS);
    the_timed.event_us[event] =
        the_timed.free_us > the_timed.clock.now_us ? the_timed.free_us : the_timed.clock.now_us;
    return v_record(state, stream, event);
}

static int timed_query(void *state, uint32_t event, bool *has_come) {
    the_timed.asked += 1;
    *has_come = !the_timed.is_busy && the_timed.event_us[event] <= the_timed.clock.now_us;
    return *has_come ? v_wait_on_host(state, event) : 0;
}

static int timed_elapsed(void *state, uint32_t begin, uint32_t end, double *us) {
    (void)state;
    *us = the_timed.event_us[end] - the_timed.event_us[begin];
    return 0;
}

static void timed_start(double factor) {
    static double event_us[TIMED_EVENTS];
    timed_device *t = &the_timed;
    memset(t, 0, sizeof *t);
    t->factor = factor;
    t->event_us = event_us;
    v_open(&t->l.device, 7);
    t_net_begin(&t->l.n);
    ms_backend *b = &t->l.n.config.backend;
    *b = v_backend(&t->l.device);
    b->record = timed_record;
    b->query = timed_query;
    b->elapsed = timed_elapsed;
    t->l.n.config.clock = clock_now;
    t->l.n.config.clock_user = &t->clock;
    late_start(&t->l, timed_forward, timed_backward);
    t->free_us = t->clock.now_us;
}

static void timed_end(void) {
    t_net_end(&the_timed.l.n);
    v_close(&the_timed.l.device);
}

/* What the instructions from `first` to before `end` are predicted to take together. */
static double predicted_us(const ms_model *m, uint32_t first, uint32_t end) {
    double us = 0.0;
    for (uint32_t now = first; now < end; ++now) {
        us += msi_expected_us(&m->run.slices, &m->run.plan->train, now);
    }
    return us;
}

/* As long as it has not said that a slice is done, slices together are given what fits into the
   present one: nothing more in one that is not longer than those before. */
static void a_busy_device_is_given_what_fits(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 40; ++seed) {
        t_rng rng = t_seed(seed);
        double given_us = 0.0, loss;
        uint32_t idle = 0;
        timed_start(1.0);
        ms_model *m = the_timed.l.n.m;
        the_timed.is_busy = true;
        ms_result result = MS_RESULT_MORE;
        for (uint32_t k = 0; k < 60 && result == MS_RESULT_MORE; ++k) {
            const uint64_t most_us = t_below(&rng, 4) == 0 ? t_below(&rng, 3) : t_below(&rng, 900);
            const uint32_t first = k ? m->run.position : 0;
            result = ms_step_slice(m, most_us, k % 2 ? NULL : &loss);
            const double us = predicted_us(m, first, m->run.position);
            const double least_us = given_us > 0.0 || most_us == 0 || !(us > 0.0)
                                        ? 0.0
                                        : predicted_us(m, first, first + 1); // runs in any case
            const double room_us = least_us > (double)most_us ? least_us : (double)most_us;
            given_us += us;
            idle += m->run.position == first;
            if (given_us > room_us + 1e-6 && us > 0.0) {
                fail_msg("seed %u, slice %u of %u us: %g us more, %g us in all", (unsigned)seed,
                         (unsigned)k, (unsigned)most_us, us, given_us);
            }
        }
        assert_true(idle > 0 && the_timed.asked > 0);
        the_timed.is_busy = false;
        timed_end();
    }
}

/* A device that is slower or faster than predicted, steadily or by turns, gets a slice in each
   frame. What it has to do beyond the frame is bounded: at first as the prediction is wrong, and
   after some steps at a steady pace by a quarter of a frame and one instruction. Steps end, with the
   bits of whole ones. */
static void a_device_of_another_pace_is_given_no_more(void **state) {
    (void)state;
    static const pace paces[] = {{1.0, 0.0}, {0.1, 0.0}, {10.0, 0.0}, {1.0, 10.0}, {0.3, 3.0}};
    enum { FRAME = 1600, STEPS = 60 };
    for (size_t k = 0; k < sizeof paces / sizeof paces[0]; ++k) {
        static late_net whole; // on a device that does all at once
        t_rng rng = t_seed(k);
        double loss[2];
        v_open(&whole.device, 0);
        t_net_begin(&whole.n);
        whole.n.config.backend = v_backend(&whole.device);
        late_start(&whole, v_forward, v_backward);
        timed_start(paces[k].factor);
        timed_device *t = &the_timed;
        const double slowest = paces[k].jump > paces[k].factor ? paces[k].jump : paces[k].factor;
        for (int step = 0; step < STEPS; ++step) {
            ms_result result = MS_RESULT_MORE;
            for (uint32_t frames = 0; result == MS_RESULT_MORE; ++frames) {
                const bool jumps = paces[k].jump > 0.0 && t_chance(&rng, 0.3);
                const bool learned = step >= STEPS / 2 && !(paces[k].jump > 0.0);
                t->factor = jumps ? paces[k].jump : paces[k].factor;
                result = ms_step_slice(t->l.n.m, FRAME, &loss[0]);
                const double backlog_us = t->free_us - t->clock.now_us;
                const double bound_us =
                    learned ? 1.25 * FRAME + 100.0 * slowest : 2.0 * slowest * (FRAME + 100.0);
                if (backlog_us > bound_us || frames > 1000) {
                    fail_msg("pace %u, step %d, frame %u: %g us are enqueued", (unsigned)k, step,
                             (unsigned)frames, backlog_us);
                }
                t->clock.now_us += FRAME;
            }
            t_ok(t->l.n.m, result);
            t_ok(whole.n.m, ms_step(whole.n.m, &loss[1]));
            assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
            t_net_same(&t->l.n, t->l.p, &whole.n, whole.p);
        }
        timed_end();
        t_net_end(&whole.n);
        v_close(&whole.device);
    }
}
#endif

int main(void) {
    t_hook.part_bytes = 128; // so that state comes in parts
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(instructions_run_while_they_fit),
        cmocka_unit_test(a_hiccup_is_forgotten),
        cmocka_unit_test(late_slices_are_late_by_one_instruction),
        cmocka_unit_test(no_time_runs_nothing),
        cmocka_unit_test(long_instructions_are_split),
        cmocka_unit_test(a_long_fill_is_named),
        cmocka_unit_test(long_updates_are_split),
        cmocka_unit_test(the_model_cannot_change_between_slices),
        cmocka_unit_test(a_loss_factor_waits_for_the_next_step),
        cmocka_unit_test(inputs_and_frozen_params_can_be_read_all_the_time),
        cmocka_unit_test(old_state_is_never_seen),
        cmocka_unit_test(a_model_can_be_destroyed_between_slices),
        cmocka_unit_test(a_failure_ends_the_slices),
        cmocka_unit_test(wrong_calls_are_errors),
        cmocka_unit_test(slices_need_a_clock),
        cmocka_unit_test(a_clock_that_stands_still),
        cmocka_unit_test(many_slices_take_no_memory),
        cmocka_unit_test(no_buffer_stays_old),
        cmocka_unit_test(a_cancelled_step_counts_as_not_begun),
        cmocka_unit_test(a_cancelled_step_leaves_no_work),
        cmocka_unit_test(a_callback_can_cancel),
        cmocka_unit_test(cancel_waits_for_a_step),
#ifndef T_CUDA
        cmocka_unit_test(slices_do_not_wait_for_a_device),
        cmocka_unit_test(a_shared_arena_is_needed_until_all_is_enqueued),
        cmocka_unit_test(a_busy_device_is_given_what_fits),
        cmocka_unit_test(a_device_of_another_pace_is_given_no_more),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
