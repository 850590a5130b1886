/*  test_saved_plans.c - plans in files. A model of the same registrations that loads the plan of another
    has the same programs and the same bits as that one; what a plan depends on is compared; and a file
    that is damaged, or was made up, is refused or gives the right numbers. */
#define T_OFFLOADS
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "random_tiles.h"
#include "virtual.h"
#include "late_dag.h"
#include "files.h"

enum { STEPS = 3, MOST_BYTES = 1 << 16 };

static t_file file; // the plan at hand

static ms_result save_plan(ms_model *m, t_file *to) {
    ms_sink sink;
    t_file_clear(to);
    sink.write = t_file_write;
    sink.user = to;
    return ms_plan_save(m, &sink);
}

static ms_result load_plan(ms_model *m, t_file *from) {
    ms_source source;
    source.read = t_file_read;
    source.user = from;
    source.size = from->bytes;
    return ms_plan_load(m, &source);
}

// ------------------------------------------------------------------------------------------------
// two models

/* All that a report says of a plan, and of what it is predicted to take. */
static void expect_same_plans(const ms_model *a, const ms_model *b, const char *what) {
    ms_memory_report x, y;
    t_report(a, &x);
    t_report(b, &y);
    const bool same = x.plan_hash == y.plan_hash && x.arena_bytes == y.arena_bytes &&
                      x.plain_bytes == y.plain_bytes &&
                      x.lower_bound_bytes == y.lower_bound_bytes && x.host_bytes == y.host_bytes &&
                      x.budget_bytes == y.budget_bytes && x.recompute_count == y.recompute_count &&
                      memcmp(x.peak_bytes, y.peak_bytes, sizeof x.peak_bytes) == 0 &&
                      memcmp(x.freed_bytes, y.freed_bytes, sizeof x.freed_bytes) == 0 &&
                      memcmp(&x.step_us, &y.step_us, sizeof x.step_us) == 0 &&
                      memcmp(&x.stall_us, &y.stall_us, sizeof x.stall_us) == 0 &&
                      memcmp(&x.plain_step_us, &y.plain_step_us, sizeof x.plain_step_us) == 0 &&
                      memcmp(&x.longest_us, &y.longest_us, sizeof x.longest_us) == 0 &&
                      strcmp(x.found_by, y.found_by) == 0 && x.mode == y.mode &&
                      x.decision_source == y.decision_source;
    if (!same) {
        static const char *const names[] = {"saved", "loaded"};
        for (int k = 0; k < 2; ++k) {
            const ms_memory_report *r = k ? &y : &x;
            print_error("%s: hash %llx, arena %llu, host %llu, budget %llu, step %.17g us, stalls "
                        "%.17g us, "
                        "longest %.17g us; plain %llu, %.17g us; by %s, mode %d, source %d\n",
                        names[k], (unsigned long long)r->plan_hash,
                        (unsigned long long)r->arena_bytes, (unsigned long long)r->host_bytes,
                        (unsigned long long)r->budget_bytes, r->step_us, r->stall_us, r->longest_us,
                        (unsigned long long)r->plain_bytes, r->plain_step_us, r->found_by,
                        (int)r->mode, (int)r->decision_source);
        }
        fail_msg("%s", what);
    }
}

/* Every value that can be read, of any role. */
static void expect_same_values(ms_model *a, ms_model *b, const char *what) {
    static uint64_t of_a[MOST_BYTES / 8], of_b[MOST_BYTES / 8];
    for (uint32_t t = 0; t < a->graph.tensors.count; ++t) {
        for (int role = 0; role < MSI_ROLE_MASTER; ++role) {
            const ms_tensor x = msi_handle(&a->graph, t, (msi_role)role);
            const ms_tensor y = msi_handle(&b->graph, t, (msi_role)role);
            const uint64_t bytes = ms_tensor_bytes(a, x);
            assert_true(bytes <= MOST_BYTES && bytes == ms_tensor_bytes(b, y));
            const ms_result result = ms_read(a, x, of_a);
            if (ms_read(b, y, of_b) != result ||
                (result == MS_RESULT_OK && memcmp(of_a, of_b, (size_t)bytes) != 0)) {
                fail_msg("%s: role %d of \"%s\" differs", what, role,
                         msi_tensor_name(&a->graph, t));
            }
        }
    }
}

/* Budgets between the smallest and that of the plain plan; the last one is more. */
enum { BUDGETS = 4 };

static uint64_t budget_of(ms_model *m, int number) {
    uint64_t least, plain;
    ms_memory_report report;
    ms_set_budget(m, (uint64_t)1 << 40);
    t_ok(m, ms_wrap(m));
    t_report(m, &report);
    plain = report.plain_bytes;
    t_ok(m, ms_smallest_budget(m, &least));
    return least + (plain > least ? (plain - least) * (uint64_t)number / (BUDGETS - 1) : 0);
}

// ------------------------------------------------------------------------------------------------
// random graphs

typedef struct pair {
    rd_graph *g;
    rd_net *n[2]; // the one that plans, and the one that loads
    v_device device[2];
    v_layer layers[2][RD_LAYERS];
    t_heap heap[2];
    bool late, half, codes;
    char failure[RD_TEXT];
} pair;

/* One of both nets, registered but not wrapped, with all that is forced. */
static rd_net *make_net(pair *p, int k, const ms_config *config) {
    ms_config own = *config;
    own.allocator = t_heap_allocator(&p->heap[k]);
    p->g->move = NULL;
    if (p->late) {
        v_open(&p->device[k], p->g->seed);
        own.backend = v_backend(&p->device[k]);
        (void)ld_make_late(p->g, p->layers[k]);
    }
    rd_net *n = rd_net_create(p->g, &own, k ? "loads" : "plans", p->failure, false);
    if (p->half) {
        rd_force_half(n, p->g->seed);
    }
    return n;
}

static void check_pair(const pair *p) {
    if (p->failure[0]) {
        fail_msg("seed %llu: %s", (unsigned long long)p->g->seed, p->failure);
    }
}

static void step_both(pair *p, uint64_t round) {
    const uint32_t micros = p->g->accumulation > 1 ? p->g->accumulation : 1;
    double loss[2];
    for (int k = 0; k < 2; ++k) {
        for (uint32_t micro = 0; micro < micros; ++micro) {
            p->n[k]->run.micro = micro;
            for (uint32_t i = 0; i < p->g->layer_count; ++i) {
                rd_op *op = &p->n[k]->run.op[i];
                op->forwards = op->backwards = op->recomputes = 0;
            }
            assert_true(rd_net_write(p->n[k], round * 8 + micro, false));
            const ms_result result = ms_step(p->n[k]->model, &loss[k]);
            check_pair(p);
            t_ok(p->n[k]->model, result);
            t_ok(p->n[k]->model, ms_synchronize(p->n[k]->model));
        }
        p->n[k]->run.step += 1;
    }
    assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
}

static void close_pair(pair *p) {
    for (int k = 0; k < 2; ++k) {
        rd_net_destroy(p->n[k]);
        if (p->late) {
            assert_int_equal(p->device[k].engine.pending, 0);
            assert_int_equal(p->device[k].callback_error, 0);
            assert_int_equal(p->device[k].overtaken, 0);
            v_close(&p->device[k]);
        }
        assert_int_equal(p->heap[k].live_count, 0);
        assert_int_equal(p->heap[k].wrong_releases, 0);
    }
    free(p->g);
}

static void trip_dag(uint64_t seed, bool late, uint32_t *techniques) {
    static pair p;
    t_rng rng = t_seed(seed ^ 0x51a5);
    ms_config config = t_config();
    char what[80];
    memset(&p, 0, sizeof p);
    p.g = rd_generate(seed);
    p.late = late;
    p.half = t_chance(&rng, 0.3);
    config.mode = (ms_mode)t_below(&rng, MS_MODE_COUNT);
    config.offloading = t_chance(&rng, 0.5) ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.master_weights = t_chance(&rng, 0.3) ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config.force_optimize = t_chance(&rng, 0.2);
    config.debug = !late && t_chance(&rng, 0.1);
    config.auto_policy = t_chance(&rng, 0.2);
    config.loss_scaling.initial = 16.0f;
    if (t_chance(&rng, 0.5)) {
        rd_random_formats(p.g, &rng);
    }
    if (p.half) {
        rd_random_dtypes(p.g, seed + 99);
        config.mixed_dtype =
            seed % 3 == 0 && t_is_built_in((int)p.g->optimizer.kind) ? MS_DTYPE_F16 : MS_DTYPE_BF16;
    }
    for (int k = 0; k < 2; ++k) {
        p.n[k] = make_net(&p, k, &config);
    }
    check_pair(&p);
    ms_model *a = p.n[0]->model, *b = p.n[1]->model;
    const uint64_t budget = budget_of(a, (int)t_below(&rng, BUDGETS));
    snprintf(what, sizeof what, "seed %llu, budget %llu%s", (unsigned long long)seed,
             (unsigned long long)budget, late ? ", late" : "");
    ms_set_budget(a, budget);
    t_ok(a, ms_wrap(a));
    if (p.g->axis_count > 0 && t_chance(&rng, 0.5)) { // plans for other sizes are saved too
        int64_t sizes[RD_AXIS_LIMIT] = {1, 1};
        t_ok(a, ms_reshape(a, sizes));
        t_ok(a, ms_reshape(a, p.g->size));
    }
    t_ok(a, save_plan(a, &file));
    ms_set_budget(b, budget);
    const ms_result loaded = load_plan(b, &file);
    t_ok(b, loaded);
    const uint64_t searched = b->errors.count;
    t_ok(b, ms_wrap(b));
    assert_int_equal(b->errors.count, searched);
    expect_same_plans(a, b, what);
    uint32_t plans[2] = {0, 0};
    for (int k = 0; k < 2; ++k) {
        for (const msi_plan *plan = p.n[k]->model->run.plan; plan; plan = plan->next) {
            plans[k] += 1;
        }
        assert_true(rd_net_write(p.n[k], 0, false));
    }
    assert_int_equal(plans[0], plans[1]);
    for (uint64_t round = 1; round <= STEPS; ++round) {
        step_both(&p, round);
        expect_same_values(a, b, what);
    }
    for (int k = 0; k < MS_TECHNIQUE_COUNT; ++k) {
        for (uint32_t t = 0; t < a->graph.tensors.count; ++t) {
            msi_tensor_decision d = a->wrapped.largest->decisions[t], without = d;
            msi_take_out((ms_technique)k, &a->graph.tensors.items[t], &without);
            *techniques |= (uint32_t)(memcmp(&d, &without, sizeof d) != 0) << k;
        }
    }
    close_pair(&p);
}

static void a_loaded_plan_is_the_plan_that_was_saved(void **state) {
    (void)state;
    uint32_t techniques = 0;
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t end = first + t_environment("MEMSCALE_TEST_DAGS", t_sweep(120, 3000));
    for (uint64_t seed = first; seed < end; ++seed) {
        trip_dag(seed, seed % 3 == 0, &techniques);
    }
    print_message("techniques: %x\n", (unsigned)techniques);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_loaded_plan_is_the_plan_that_was_saved),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
