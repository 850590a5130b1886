/*  test_simulate.c - time and bytes of programs: timelines against ones that were computed by hand,
    sums by category against the lives of the values, the hash of a plan. */
#define MEMSCALE_IMPLEMENTATION
#include "../memscale.h"
#include "testing.h"
#include "random_dag.h"

static void near(double a, double b) {
    if (!(fabs(a - b) <= 1e-9 * (1.0 + fabs(a)))) {
        print_error("%.12g is not %.12g\n", a, b);
        fail();
    }
}

// ------------------------------------------------------------------------------------------------
// time

/* Speeds of round numbers: a launch takes 1 us, a KB 1 us. */
static ms_hardware round_hardware(ms_device_kind kind) {
    ms_hardware h;
    memset(&h, 0, sizeof h);
    h.kind = kind;
    h.memory_gb_per_s = 1.0;
    h.to_device_gb_per_s = 0.5;
    h.to_host_gb_per_s = 0.25;
    h.f32_tflops = 1.0;
    h.launch_us = 1.0;
    return h;
}

static void set_hardware(ms_model *m, const ms_hardware *h) {
    m->hardware = *h;
    m->has_hardware = true;
}

static void set_times(ms_model *m, double forward_us, double backward_us, double recompute_us) {
    for (uint32_t i = 0; i < m->graph.layers.count; ++i) {
        ms_layer_time time;
        time.forward_us = forward_us + i;
        time.backward_us = backward_us + i;
        time.recompute_us = recompute_us + i;
        m->graph.layers.items[i].known = time;
    }
}

typedef struct timeline {
    uint32_t count;
    ms_event_kind kind[400];
    double start_us[400], us[400];
} timeline;

static void note_event(const ms_event *event, void *user) {
    timeline *t = (timeline *)user;
    if (event->kind == MS_EVENT_DROP) {
        near(event->duration_us, 0.0);
        near(event->start_us, t->start_us[t->count - 1] + t->us[t->count - 1]);
        return;
    }
    assert_true(t->count < 400 && event->stream == MS_STREAM_COMPUTE);
    assert_true(event->measured_us <= 0.0 && event->measured_start_us <= 0.0);
    t->kind[t->count] = event->kind;
    t->start_us[t->count] = event->start_us;
    t->us[t->count] = event->duration_us;
    t->count += 1;
}

/* matmul, squash, loss on 48 x 8: x, W, product, hidden, losses. A param has 256 bytes, the losses
   192. */
static void a_step_by_hand(void **state) {
    (void)state;
    static const struct {
        ms_event_kind kind;
        double us;
    } expected[] = {
        {MS_EVENT_FORWARD, 10.0},                // matmul0
        {MS_EVENT_FORWARD, 11.0},                // squash0
        {MS_EVENT_FORWARD, 12.0},                // loss
        {MS_EVENT_SEED, 1.0 + 0.192},            // behind the sum of the losses
        {MS_EVENT_BACKWARD, 22.0},               // loss
        {MS_EVENT_BACKWARD, 21.0},               // squash0
        {MS_EVENT_BACKWARD, 20.0},               // matmul0
        {MS_EVENT_UPDATE, 1.0 + 0.256 * 28 / 4}, // 28 bytes an element
    };
    const ms_hardware hardware = round_hardware(MS_DEVICE_CPU);
    ms_config config = t_config();
    ms_memory_report report;
    t_chain chain;
    timeline t;
    config.dry_run = true;
    assert_int_equal(t_chain_create(&chain, &config, 1, 48, 8), MS_RESULT_OK);
    set_hardware(chain.model, &hardware);
    set_times(chain.model, 10.0, 20.0, 5.0);
    t_ok(chain.model, ms_wrap(chain.model));
    memset(&t, 0, sizeof t);
    t_ok(chain.model, ms_visit_events(chain.model, MS_PROGRAM_TRAIN, note_event, &t));
    double now = 0.0;
    assert_int_equal(t.count, sizeof expected / sizeof expected[0]);
    for (uint32_t i = 0; i < t.count; ++i) {
        now += i == 3 ? 1.0 + 0.192 : 0.0;
        assert_int_equal(t.kind[i], expected[i].kind);
        near(t.start_us[i], now);
        near(t.us[i], expected[i].us);
        now += expected[i].us;
    }
    t_report(chain.model, &report);
    near(report.step_us, now);
    near(report.plain_step_us, now);
    near(report.stall_us, 0.0);
    near(report.recompute_share, 0.0);
    ms_destroy(chain.model);
}

/* The same on a device with copies: x, 1536 bytes at 0.5 GB/s, is waited for. */
static void copies_in_are_waited_for(void **state) {
    (void)state;
    const ms_hardware hardware = round_hardware(MS_DEVICE_DISCRETE);
    ms_config config = t_config();
    ms_memory_report report;
    t_chain chain;
    timeline t;
    config.dry_run = true;
    assert_int_equal(t_chain_create(&chain, &config, 1, 48, 8), MS_RESULT_OK);
    set_hardware(chain.model, &hardware);
    set_times(chain.model, 10.0, 20.0, 5.0);
    t_ok(chain.model, ms_wrap(chain.model));
    memset(&t, 0, sizeof t);
    t_ok(chain.model, ms_visit_events(chain.model, MS_PROGRAM_TRAIN, note_event, &t));
    const double copy_us = 1.0 + 1.536 / 0.5;
    near(t.start_us[0], copy_us);
    t_report(chain.model, &report);
    near(report.stall_us, copy_us);
    near(report.step_us, t.start_us[t.count - 1] + t.us[t.count - 1]);
    /* The verdict, 128 bytes at 0.25 GB/s, leaves beside backward; slow enough it is the end. */
    ms_hardware slow = hardware;
    slow.to_host_gb_per_s = 1e-4;
    set_hardware(chain.model, &slow);
    t_ok(chain.model, ms_wrap(chain.model));
    t_report(chain.model, &report);
    near(report.step_us, copy_us + 33.0 + (1.0 + 0.192) + (1.0 + 0.128 / 1e-4));
    near(report.stall_us, copy_us);
    ms_destroy(chain.model);
}

/* What instructions other than layers and updates take. */
static void the_library_has_its_price(void **state) {
    (void)state;
    const ms_hardware hardware = round_hardware(MS_DEVICE_CPU);
    ms_config config = t_config();
    ms_optimizer_desc optimizer;
    ms_memory_report report;
    t_chain chain;
    memset(&optimizer, 0, sizeof optimizer);
    config.dry_run = true;
    config.accumulation_steps = 2;
    optimizer.kind = MS_OPTIMIZER_SGD;
    optimizer.grad_clip_norm = 1.0f;
    assert_int_equal(t_chain_create(&chain, &config, 1, 48, 8), MS_RESULT_OK);
    set_hardware(chain.model, &hardware);
    ms_set_optimizer(chain.model, &optimizer);
    set_times(chain.model, 10.0, 20.0, 5.0);
    t_ok(chain.model, ms_wrap(chain.model));
    t_report(chain.model, &report);
    const double gradient = 0.256, sum_of_losses = 1.192, seed = 1.192, layers = 33.0 + 63.0;
    const double zeros = 1.0 + gradient + 1.0 + sizeof(msi_norm) * 1e-3, norm = 1.0 + gradient;
    const double clip = 1.0, update = 1.0 + 3.0 * gradient; // SGD without momentum: 12 bytes
    near(report.step_us, layers + sum_of_losses + seed + zeros + norm + clip + update);
    ms_destroy(chain.model);
}

/* Recomputations take time, and nothing else does: what is recomputed more than in the plain plan
   is the difference of the two. */
static void recomputation_has_its_price(void **state) {
    (void)state;
    ms_config config = t_config();
    uint64_t smallest;
    t_chain chain;
    config.dry_run = true;
    config.early_update = MS_SWITCH_OFF;
    assert_int_equal(t_chain_create(&chain, &config, 12, 48, 8), MS_RESULT_OK);
    set_times(chain.model, 10.0, 20.0, 5.0);
    t_ok(chain.model, ms_smallest_budget(chain.model, &smallest));
    ms_set_budget(chain.model, smallest);
    t_ok(chain.model, ms_wrap(chain.model));
    const msi_program *p = &chain.model->plan->train;
    ms_memory_report report;
    double sum = 0.0;
    for (uint32_t i = 0; i < p->instructions.count; ++i) {
        const msi_instruction *at = &p->instructions.items[i];
        sum += at->op == MSI_OP_RECOMPUTE ? 5.0 + at->target : 0.0;
    }
    t_report(chain.model, &report);
    assert_true(sum > 0.0);
    near(report.step_us - report.plain_step_us, sum);
    near(report.recompute_share, sum / report.plain_step_us);
    ms_destroy(chain.model);
}

// ------------------------------------------------------------------------------------------------
// bytes by category

/* The bytes of a category that are live at an instruction: every slot in the arena, every life that
   spans it, and what is reserved. */
static uint64_t live_of(const ms_model *m, const msi_program *p, uint32_t now, ms_category c) {
    uint64_t sum = c == MS_CATEGORY_WORKSPACE ? m->store->reserved_bytes : 0;
    for (uint32_t i = 0; i < p->lives.count; ++i) {
        const msi_life *life = &p->lives.items[i];
        const msi_slot *slot = i < m->store->slots.count ? &m->store->slots.items[i] : NULL;
        const bool there = slot ? !slot->on_host && !slot->borrowed
                                : life->first <= now && now + life->taken <= life->last;
        sum += there && life->category == c ? (life->bytes + 63) / 64 * 64 : 0;
    }
    return sum;
}

typedef struct category_check {
    const ms_model *model;
    const msi_program *program;
    uint32_t events;
} category_check;

static void check_event(const ms_event *event, void *user) {
    category_check *check = (category_check *)user;
    uint64_t sum = 0;
    for (int c = 0; c < MS_CATEGORY_COUNT; ++c) {
        const uint64_t live = live_of(check->model, check->program, event->index, (ms_category)c);
        assert_true(event->live_bytes_of[c] == live);
        sum += live;
    }
    assert_true(sum == event->live_bytes);
    check->events += 1;
}

static void categories_add_up(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 40; ++seed) {
        char failure[RD_TEXT] = "";
        ms_config config = t_config();
        config.dry_run = true;
        rd_graph *g = rd_generate(seed);
        rd_net *n = rd_net_create(g, &config, "simulated", failure, true);
        ms_memory_report report;
        uint64_t smallest = 0;
        t_ok(n->model, ms_smallest_budget(n->model, &smallest));
        for (int round = 0; round < 2; ++round) {
            t_ok(n->model, ms_wrap(n->model));
            for (int program = 0; program < 2; ++program) {
                category_check check;
                check.model = n->model;
                check.program = program ? &n->model->plan->eval : &n->model->plan->train;
                check.events = 0;
                t_ok(n->model, ms_visit_events(n->model, (ms_program)program, check_event, &check));
                assert_true(check.events >= n->model->graph.layers.count);
            }
            t_report(n->model, &report);
            assert_true(report.step_us > 0.0 && report.plain_step_us > 0.0);
            ms_set_budget(n->model, smallest);
        }
        rd_net_destroy(n);
        free(g);
    }
}

// ------------------------------------------------------------------------------------------------
// the hash of a plan

static uint64_t hash_of(uint64_t budget, uint32_t depth, int64_t rows, ms_switch early) {
    ms_config config = t_config();
    ms_memory_report report;
    t_chain chain;
    config.dry_run = true;
    config.early_update = early;
    config.memory_budget_bytes = budget;
    assert_int_equal(t_chain_create(&chain, &config, depth, rows, 8), MS_RESULT_OK);
    t_ok(chain.model, ms_wrap(chain.model));
    t_report(chain.model, &report);
    ms_destroy(chain.model);
    return report.plan_hash;
}

static void hashes_tell_plans_apart(void **state) {
    (void)state;
    const uint64_t all = (uint64_t)1 << 40, plain = hash_of(all, 4, 48, MS_SWITCH_OFF);
    assert_true(plain == hash_of(all, 4, 48, MS_SWITCH_OFF));
    assert_true(plain == hash_of(all / 2, 4, 48, MS_SWITCH_OFF)); // the same plan
    assert_true(plain != hash_of(all, 4, 48, MS_SWITCH_ON));
    assert_true(plain != hash_of(all, 5, 48, MS_SWITCH_OFF));
    assert_true(plain != hash_of(all, 4, 49, MS_SWITCH_OFF));
    assert_true(plain != hash_of(12u << 10, 4, 48, MS_SWITCH_OFF));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_by_hand),
        cmocka_unit_test(copies_in_are_waited_for),
        cmocka_unit_test(the_library_has_its_price),
        cmocka_unit_test(recomputation_has_its_price),
        cmocka_unit_test(categories_add_up),
        cmocka_unit_test(hashes_tell_plans_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
