/*  test_saved_plans.c - plans in files. A model of the same registrations that loads the plan of another
    has the same programs and the same bits as that one; what a plan depends on is compared; and a file
    that is damaged, or was made up, is refused or gives the right numbers.
    With MEMSCALE_TEST_PLANS=FOLDER, plans are written there along with what training by them gives; compiled
    with MEMSCALE_NO_PLANNER it loads these, and must get the same. */
#define T_OFFLOADS
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "random_tiles.h"
#include "virtual.h"
#include "late_dag.h"
#include "files.h"
#include "plan_files.h"

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
    if (p->g->seed % 4 == 1) { // a value that must move may be dropped too
        t_rng rng = t_seed(p->g->seed);
        rd_force_moves(n, &rng);
    }
    if (p->codes && p->failure[0] == 0) { // which params have state is known once there is a plan
        t_ok(n->model, ms_detach(n->model));
        rd_force_codes(n, p->g->seed);
    }
    return n;
}

static void check_pair(const pair *p) {
    if (p->failure[0]) {
        fail_msg("seed %llu: %s", (unsigned long long)p->g->seed, p->failure);
    }
}

/* A step of one of both nets, or an eval. Returns its loss. */
static double run_one(pair *p, int k, uint64_t round, bool evals) {
    const uint32_t micros = p->g->accumulation > 1 && !evals ? p->g->accumulation : 1;
    double loss = 0.0;
    for (uint32_t micro = 0; micro < micros; ++micro) {
        p->n[k]->run.micro = micro;
        for (uint32_t i = 0; i < p->g->layer_count; ++i) {
            rd_op *op = &p->n[k]->run.op[i];
            op->forwards = op->backwards = op->recomputes = 0;
        }
        assert_true(rd_net_write(p->n[k], round * 8 + micro, false));
        const ms_result result =
            evals ? ms_eval(p->n[k]->model, &loss) : ms_step(p->n[k]->model, &loss);
        check_pair(p);
        t_ok(p->n[k]->model, result);
        t_ok(p->n[k]->model, ms_synchronize(p->n[k]->model));
    }
    p->n[k]->run.step += !evals;
    return p->g->has_no_loss ? 0.0 : loss;
}

static double step_one(pair *p, int k, uint64_t round) {
    return run_one(p, k, round, p->g->has_no_loss);
}

/* Evaluates at the largest sizes, which may be more than training has. */
static double eval_largest(pair *p, int k) {
    t_ok(p->n[k]->model, ms_reshape(p->n[k]->model, p->g->largest));
    memcpy(p->n[k]->run.size, p->g->largest, sizeof p->g->largest);
    assert_true(rd_net_write(p->n[k], 99, true));
    return run_one(p, k, 99, true);
}

static void close_pair(pair *p) {
    for (int k = 0; k < 2; ++k) {
        rd_net_destroy(p->n[k]);
        if (p->late && p->n[k]) {
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

/* How a graph is planned, by its seed. */
static ms_config begin_pair(pair *p, uint64_t seed, bool late, t_rng *rng) {
    ms_config config = t_config();
    memset(p, 0, sizeof *p);
    p->g = rd_generate(seed);
    p->late = late;
    p->half = t_chance(rng, 0.3);
    if (t_chance(rng, 0.1)) {
        p->g->has_no_loss = p->g->value[p->g->loss].kept_in_eval = true;
        for (uint32_t i = 0; i < p->g->value_count; ++i) {
            p->g->value[i].wanted = false;
        }
    }
    config.mode = (ms_mode)t_below(rng, MS_MODE_COUNT);
    config.offloading = t_chance(rng, 0.5) ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.master_weights = t_chance(rng, 0.3) ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config.force_optimize = t_chance(rng, 0.2);
    config.auto_policy = t_chance(rng, 0.2);
    p->codes = t_chance(rng, 0.3);
    config.loss_scaling.initial = 16.0f;
    if (t_chance(rng, 0.5)) {
        rd_random_formats(p->g, rng);
    }
    if (p->half) {
        rd_random_dtypes(p->g, seed + 99);
        config.mixed_dtype = seed % 3 == 0 && t_is_built_in((int)p->g->optimizer.kind)
                                 ? MS_DTYPE_F16
                                 : MS_DTYPE_BF16;
    }
    return config;
}

/* What training by a plan gives, before it in its file. */
typedef struct outcome {
    uint64_t budget, plan_hash, values, bytes;
} outcome;

static FILE *plan_file(uint64_t seed, const char *how) {
    char path[512];
    const char *folder = getenv("MEMSCALE_TEST_PLANS");
    snprintf(path, sizeof path, "%s/%llu.plan", folder ? folder : ".", (unsigned long long)seed);
    return folder ? fopen(path, how) : NULL;
}

/* Of all values that can be read. */
static uint64_t hash_values(ms_model *m) {
    static uint64_t data[MOST_BYTES / 8];
    uint64_t hash = 0;
    for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
        for (int role = 0; role < MSI_ROLE_MASTER; ++role) {
            const ms_tensor handle = msi_handle(&m->graph, t, (msi_role)role);
            if (ms_read(m, handle, data) == MS_RESULT_OK) {
                hash = msi_hash_bytes(hash, data, ms_tensor_bytes(m, handle));
            }
        }
    }
    return hash;
}

#ifdef MEMSCALE_NO_PLANNER

static bool trip_without_planner(uint64_t seed, bool late) {
    static pair p;
    t_rng rng = t_seed(seed ^ 0x51a5);
    outcome o;
    ms_memory_report report;
    FILE *from = plan_file(seed, "rb");
    if (!from) {
        return false;
    }
    assert_true(fread(&o, sizeof o, 1, from) == 1 &&
                fread(file.data, 1, (size_t)o.bytes, from) == o.bytes);
    fclose(from);
    file.bytes = (size_t)o.bytes;
    const ms_config config = begin_pair(&p, seed, late, &rng);
    p.n[1] = make_net(&p, 1, &config);
    ms_model *m = p.n[1]->model;
    t_error(m, ms_wrap(m), MS_RESULT_UNSUPPORTED);
    t_text_has(ms_last_error(m), "MEMSCALE_NO_PLANNER");
    ms_set_budget(m, o.budget);
    t_ok(m, load_plan(m, &file));
    t_ok(m, ms_wrap(m));
    t_report(m, &report);
    assert_true(report.plan_hash == o.plan_hash);
    static t_file again;
    t_ok(m, save_plan(m, &again));
    assert_true(again.bytes == file.bytes);
    assert_true(rd_net_write(p.n[1], 0, false));
    for (uint64_t round = 1; round <= STEPS; ++round) {
        (void)step_one(&p, 1, round);
    }
    assert_true(hash_values(m) == o.values);
    if (p.g->axis_count > 0) {
        const int64_t sizes[RD_AXIS_LIMIT] = {1, 1};
        t_ok(m, ms_reshape(m, sizes)); // which follows the plan for the largest
        memcpy(p.n[1]->run.size, sizes, sizeof sizes);
        assert_true(rd_net_write(p.n[1], 99, true));
        (void)step_one(&p, 1, STEPS + 1);
        (void)eval_largest(&p, 1);
        t_ok(m, ms_reshape(m, sizes));
        memcpy(p.n[1]->run.size, sizes, sizeof sizes);
        assert_true(rd_net_write(p.n[1], 100, true));
    }
    t_ok(m, ms_detach(m));
    (void)step_one(&p, 1, STEPS + 2);
    close_pair(&p);
    return true;
}

static void plans_of_another_build_are_loaded(void **state) {
    (void)state;
    uint64_t seed = 1;
    while (trip_without_planner(seed, seed % 3 == 0)) {
        seed += 1;
    }
    print_message("%u plans\n", (unsigned)seed - 1);
    if (seed == 1) {
        skip();
    }
}

/* Passes are compared with the plain plan; what would need a search, or is left out, says so. */
static void what_needs_no_search_is_there(void **state) {
    (void)state;
    static t_op op;
    float data[64];
    ms_model *m;
    ms_config config = t_config();
    config.debug = true;
    t_error(NULL, ms_create(&config, &m), MS_RESULT_INVALID);
    ms_destroy(m);
    config.debug = false;
    t_ok(NULL, ms_create(&config, &m));
    const ms_tensor in = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(8, 8));
    const ms_tensor w = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(8, 8));
    const ms_tensor out = ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(8, 8));
    ms_layer_desc d = t_new_layer("product", t_matmul_forward, t_matmul_backward, &op);
    d.in[0] = in;
    d.param[0] = w;
    d.out[0] = out;
    ms_register_layer(m, &d);
    ms_set_loss(m, out);
    t_error(m, ms_wrap(m), MS_RESULT_UNSUPPORTED);
    t_ok(m, ms_detach(m));
    for (int i = 0; i < 64; ++i) {
        data[i] = (float)(i % 7);
    }
    t_ok(m, ms_write(m, in, data));
    t_ok(m, ms_write(m, w, data));
    t_ok(m, ms_step(m, NULL));
    ms_verify_report verified;
    ms_nonfinite found;
    uint64_t bytes;
    t_ok(m, ms_verify(m, NULL, NULL, &verified));
    assert_true(verified.tensor_count == 1 && verified.differ_count == 0);
    t_ok(m, ms_find_nonfinite(m, &found));
    t_error(m, ms_smallest_budget(m, &bytes), MS_RESULT_UNSUPPORTED);
    t_error(m, ms_read(m, w, NULL), MS_RESULT_INVALID);
    assert_string_equal(ms_last_error(m), ms_result_text(MS_RESULT_INVALID));
    ms_destroy(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_of_another_build_are_loaded),
        cmocka_unit_test(what_needs_no_search_is_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

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
static void expect_same_values(ms_model *a, ms_model *b, bool same_plans, const char *what) {
    static uint64_t of_a[MOST_BYTES / 8], of_b[MOST_BYTES / 8];
    for (uint32_t t = 0; t < a->graph.tensors.count; ++t) {
        for (int role = 0; role < MSI_ROLE_MASTER; ++role) {
            const ms_tensor x = msi_handle(&a->graph, t, (msi_role)role);
            const ms_tensor y = msi_handle(&b->graph, t, (msi_role)role);
            const uint64_t bytes = ms_tensor_bytes(a, x);
            assert_true(bytes <= MOST_BYTES && bytes == ms_tensor_bytes(b, y));
            const ms_result result = ms_read(a, x, of_a);
            const ms_result other = ms_read(b, y, of_b);
            if (role == MSI_ROLE_GRADIENT && !same_plans) {
                continue; // an update may have used its memory
            }
            if ((other != result && same_plans) ||
                (result == MS_RESULT_OK && other == MS_RESULT_OK &&
                 memcmp(of_a, of_b, (size_t)bytes) != 0)) {
                fail_msg("%s: role %d of \"%s\" differs", what, role,
                         msi_tensor_name(&a->graph, t));
            }
        }
    }
}

static void step_both(pair *p, uint64_t round) {
    const double a = step_one(p, 0, round), b = step_one(p, 1, round);
    assert_memory_equal(&a, &b, sizeof a);
}

static void trip_dag(uint64_t seed, bool late, uint32_t *techniques, uint32_t *counts) {
    static pair p;
    t_rng rng = t_seed(seed ^ 0x51a5);
    char what[80];
    const ms_config config = begin_pair(&p, seed, late, &rng);
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
        t_ok(a, ms_reshape(a, p.g->largest));
        t_ok(a, ms_reshape(a, p.g->size));
    }
    t_ok(a, save_plan(a, &file));
    ms_set_budget(b, budget);
    const ms_result loaded = load_plan(b, &file);
    t_ok(b, loaded);
    const uint64_t searched = b->errors.count;
    const ms_result wrapped = ms_wrap(b);
    if (wrapped != MS_RESULT_OK) {
        print_error("%s\n", what);
    }
    t_ok(b, wrapped);
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
        expect_same_values(a, b, true, what);
    }
    FILE *to = plan_file(seed, "wb");
    if (to) {
        ms_memory_report report;
        t_report(b, &report);
        const outcome o = {budget, report.plan_hash, hash_values(b), file.bytes};
        assert_true(fwrite(&o, sizeof o, 1, to) == 1 &&
                    fwrite(file.data, 1, file.bytes, to) == file.bytes && fclose(to) == 0);
    }
    counts[0] += p.g->has_no_loss;
    counts[1] += p.g->seen[RD_LARGER_EVALS];
    counts[2] += p.g->seen[RD_KINDS_MIXED];
    counts[3] += p.g->seen[RD_WANTED_ACTIVATION] && !p.g->has_no_loss;
    if (p.g->axis_count > 0) {
        const double of_a = eval_largest(&p, 0), of_b = eval_largest(&p, 1);
        assert_memory_equal(&of_a, &of_b, sizeof of_a);
        expect_same_values(a, b, true, what);
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
    uint32_t techniques = 0, counts[4] = {0, 0, 0, 0};
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t end = first + t_environment("MEMSCALE_TEST_DAGS", t_sweep(120, 3000));
    for (uint64_t seed = first; seed < end; ++seed) {
        trip_dag(seed, seed % 3 == 0, &techniques, counts);
    }
    print_message("techniques: %x; %u without a loss, %u with larger evals, %u with optimizers of "
                  "several kinds, %u with wanted gradients\n",
                  (unsigned)techniques, (unsigned)counts[0], (unsigned)counts[1],
                  (unsigned)counts[2], (unsigned)counts[3]);
}

/* The same in tiles, with budgets of all sizes. */
static void a_loaded_plan_has_the_same_tiles(void **state) {
    (void)state;
    uint32_t tiled = 0;
    const uint64_t graphs = t_sweep(60, 1000);
    for (uint64_t seed = 1; seed <= graphs; ++seed) {
        t_rng rng = t_seed(seed ^ 0x711e);
        ms_config config = t_config();
        rt_graph *g = rt_generate(seed);
        rt_net *n[2];
        char what[32];
        config.mode = MS_MODE_AGGRESSIVE;
        config.offloading = t_chance(&rng, 0.3) ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        for (int k = 0; k < 2; ++k) {
            n[k] = rt_net_create(g, &config, NULL, NULL);
        }
        ms_model *a = n[0]->model, *b = n[1]->model;
        const uint64_t budget = budget_of(a, (int)t_below(&rng, BUDGETS));
        ms_set_budget(a, budget);
        ms_set_budget(b, budget);
        t_ok(a, ms_wrap(a));
        t_ok(a, save_plan(a, &file));
        t_ok(b, load_plan(b, &file));
        t_ok(b, ms_wrap(b));
        snprintf(what, sizeof what, "rows, seed %llu", (unsigned long long)seed);
        expect_same_plans(a, b, what);
        for (uint64_t round = 0; round < STEPS; ++round) {
            for (int k = 0; k < 2; ++k) {
                rt_net_write(n[k], round, round == 0);
                t_ok(n[k]->model, ms_step(n[k]->model, NULL));
            }
            expect_same_values(a, b, true, what);
        }
        for (uint32_t t = 0; t < a->graph.tensors.count; ++t) {
            tiled += a->run.plan->decisions[t].begins_group;
        }
        rt_net_destroy(n[0]);
        rt_net_destroy(n[1]);
        free(g);
    }
    print_message("%u groups in tiles\n", (unsigned)tiled);
    assert_true(tiled > 0);
}

// ------------------------------------------------------------------------------------------------
// what a plan depends on

typedef struct setting {
    ms_config config;
    bool frozen, forced, forbidden, borrowed, output, wider, clips, skips, momentum, bf16_state;
    bool grouped, own_norm, own_update, takes_formats, wanted, gradient_dtype, no_loss, table, home;
    uint32_t micros, layers, workspace, states;
    int64_t rows, most_rows, most_eval_rows;
} setting;

static float lent[64];

static int update_nothing(const ms_update_args *args) {
    (void)args;
    return 0;
}

static uint64_t update_workspace(const ms_shape *shape, void *user) {
    (void)shape;
    return *(const uint32_t *)user;
}

/* The optimizer of a setting. */
static ms_optimizer_desc optimizer_of(const setting *s) {
    ms_optimizer_desc o = ms_optimizer_defaults(s->own_update ? MS_OPTIMIZER_CUSTOM
                                                : s->momentum ? MS_OPTIMIZER_SGD
                                                              : MS_OPTIMIZER_ADAMW);
    o.momentum = s->momentum ? 0.5f : 0.0f;
    o.grad_clip_norm = s->clips ? 1.0f : 0.0f;
    o.skip_above_norm = s->skips ? 100.0f : 0.0f;
    o.state_format[0] = s->bf16_state ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
    if (s->own_update) {
        o.update = update_nothing;
        o.state_count = s->states;
        o.takes_formats = s->takes_formats;
        o.user = (void *)(size_t)&s->workspace;
        o.workspace = s->workspace > 0 ? update_workspace : NULL;
    }
    return o;
}

/* Layers of a product, each with a weight; forced and so on is what belongs to the second one. */
static ms_model *make_chain(const setting *s) {
    static t_op op;
    ms_model *m;
    const ms_optimizer_desc o = optimizer_of(s);
    t_ok(NULL, ms_create(&s->config, &m));
    const ms_axis batch = ms_add_axis(m, "batch", s->rows, s->most_rows);
    if (s->most_eval_rows > 0) {
        ms_set_eval_largest(m, batch, s->most_eval_rows);
    }
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_along(ms_shape2(s->rows, 8), 0, batch));
    ms_tensor table = {0};
    if (s->table) {
        table = ms_buffer(m, "table", MS_DTYPE_F32, ms_shape2(8, 8));
    }
    if (s->home) {
        ms_set_tensor_technique(m, table, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
    }
    for (uint32_t i = 0; i < s->layers; ++i) {
        const int64_t columns = s->wider && i + 2 == s->layers ? 16 : 8;
        const int64_t before = s->wider && i + 1 == s->layers ? 16 : 8;
        ms_layer_desc d = t_new_layer("product", t_matmul_forward, t_matmul_backward, &op);
        d.in[0] = x;
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(before, columns));
        d.in[1] = table;
        d.out[0] = x =
            ms_activation(m, "y", MS_DTYPE_F32, ms_along(ms_shape2(s->rows, columns), 0, batch));
        if (i == 1 && s->gradient_dtype) {
            ms_set_gradient_dtype(m, x, MS_DTYPE_BF16);
        }
        d.backward_reads.in = d.backward_reads.param = 1;
        const ms_layer layer = ms_register_layer(m, &d);
        if (i == 1) {
            ms_set_frozen(m, d.param[0], s->frozen);
            ms_set_layer_technique(m, layer, MS_TECHNIQUE_CHECKPOINTING,
                                   s->forced      ? MS_SWITCH_ON
                                   : s->forbidden ? MS_SWITCH_OFF
                                                  : MS_SWITCH_DEFAULT);
            if (s->borrowed) {
                t_ok(m, ms_borrow(m, d.param[0], lent));
            }
            if (s->output) {
                ms_add_output(m, x);
            }
            if (s->wanted) {
                ms_want_gradient(m, x);
            }
            if (s->grouped || s->own_norm) {
                ms_optimizer_desc apart = o;
                apart.kind = s->grouped ? MS_OPTIMIZER_LION : o.kind;
                apart.grad_clip_norm = s->own_norm ? 2.0f : o.grad_clip_norm;
                ms_set_param_group(m, d.param[0], ms_optimizer_group(m, &apart));
            }
        }
    }
    if (!s->no_loss) {
        ms_set_loss(m, x);
    }
    ms_add_eval_output(m, x);
    ms_set_accumulation(m, s->micros);
    ms_set_optimizer(m, &o);
    return m;
}

static setting plain_setting(void) {
    setting s;
    memset(&s, 0, sizeof s);
    s.config = t_config();
    s.config.dry_run = true;
    s.layers = 8;
    s.rows = 24;
    s.most_rows = 32;
    return s;
}

/* The plan of a model for a budget between the smallest and the plain one, in the file. */
static uint64_t save_chain(const setting *s) {
    ms_model *m = make_chain(s);
    const uint64_t budget = budget_of(m, 1);
    ms_set_budget(m, budget);
    t_ok(m, ms_wrap(m));
    t_ok(m, save_plan(m, &file));
    ms_destroy(m);
    return budget;
}

/* Loads the plan in the file into a model of another setting, and wraps it. */
static void expect_loaded(setting s, uint64_t budget, ms_result expected, const char *text) {
    ms_model *m = make_chain(&s);
    ms_set_budget(m, budget);
    ms_result result = load_plan(m, &file);
    result = result == MS_RESULT_OK ? ms_wrap(m) : result;
    t_error(m, result, expected);
    if (expected != MS_RESULT_OK) {
        t_text_has(ms_last_error(m), text);
        assert_null(m->run.plan);
        ms_set_budget(m, (uint64_t)1 << 30); // the model is as before: the next ms_wrap plans
        t_ok(m, ms_wrap(m));
    }
    ms_destroy(m);
}

static void a_plan_is_for_one_graph_and_one_config(void **state) {
    (void)state;
    const setting s = plain_setting();
    const uint64_t budget = save_chain(&s);
    setting other;
    expect_loaded(s, budget, MS_RESULT_OK, "");
    expect_loaded(s, budget + 4096, MS_RESULT_OK, "");
    expect_loaded(s, budget / 2, MS_RESULT_BUDGET, "the loaded plan needs ");
#define WITH(change, text)                                                                         \
    other = s;                                                                                     \
    other.change;                                                                                  \
    expect_loaded(other, budget, MS_RESULT_INVALID, text)
#define ALSO(change)                                                                               \
    other = s;                                                                                     \
    other.change;                                                                                  \
    expect_loaded(other, budget, MS_RESULT_OK, "")
    WITH(layers = 9, "another graph");
    WITH(wider = true, "another graph");
    WITH(most_rows = 48, "another largest size of an axis");
    WITH(frozen = true, "another set of frozen params");
    WITH(forced = true, "another set of forced");
    WITH(forbidden = true, "another set of forced");
    WITH(borrowed = true, "another set of borrowed");
    WITH(output = true, "another set of outputs");
    WITH(clips = true, "another clipping");
    WITH(skips = true, "another clipping");
    WITH(own_norm = true, "another clipping");
    WITH(wanted = true, "another set of gradients");
    WITH(gradient_dtype = true, "another set of gradients");
    WITH(no_loss = true, "another graph");
    WITH(most_eval_rows = 64, "another largest size of evals");
    WITH(grouped = true, "another optimizer");
    WITH(own_update = true, "another optimizer");
    WITH(momentum = true, "another optimizer");
    WITH(bf16_state = true, "another optimizer");
    WITH(micros = 2, "another accumulation_steps");
    WITH(config.backend = ms_backend_cpu();
         other.config.backend.workspace_bytes = 512, "another backend");
    ALSO(config.mixed_precision = MS_SWITCH_ON); // nothing is rounded
    WITH(config.checkpointing = MS_SWITCH_OFF, "it uses checkpointing for \"y\"");
    ALSO(config.seed = 77);
    ALSO(config.async_offload = MS_SWITCH_OFF); // nothing is moved
    ALSO(config.debug = true);
    ALSO(config.mode = MS_MODE_CONSERVATIVE);
    ALSO(rows = 8); // planned for, at this size
}

/* Likewise of updates of the trainer's own, of norms, and of models and sizes that are only evaluated. */
static void a_plan_is_for_one_optimizer_and_one_kind_of_evals(void **state) {
    (void)state;
    setting s = plain_setting(), other;
    s.own_update = true;
    s.states = 1;
    s.workspace = 64;
    uint64_t budget = save_chain(&s);
    expect_loaded(s, budget, MS_RESULT_OK, "");
    WITH(states = 2, "another optimizer");
    WITH(workspace = 0, "another optimizer");
    WITH(workspace = 128, "another optimizer");
    WITH(takes_formats = true, "another optimizer");
    s = plain_setting();
    s.clips = true;
    budget = save_chain(&s);
    expect_loaded(s, budget, MS_RESULT_OK, "");
    WITH(own_norm = true, "another optimizer");
    ALSO(skips = true);
    s = plain_setting();
    s.most_eval_rows = 64;
    budget = save_chain(&s);
    expect_loaded(s, budget, MS_RESULT_OK, "");
    WITH(most_eval_rows = 80, "another largest size of evals");
    WITH(most_eval_rows = 0, "another largest size of evals");
    ALSO(rows = 8);
    s = plain_setting();
    s.table = true; // which all layers read, and which may have its home on the host
    budget = save_chain(&s);
    expect_loaded(s, budget, MS_RESULT_OK, "");
    WITH(table = false, "another graph");
    WITH(home = true, "another set of forced");
    s = plain_setting();
    s.no_loss = true;
    budget = save_chain(&s);
    expect_loaded(s, budget, MS_RESULT_OK, "");
    WITH(no_loss = false, "another graph");
    ALSO(rows = 8);
}

/* Copies are where the times of the file put them, whatever times the model has now; what a step is
   predicted to take follows from these. */
static void other_times_are_other_predictions_of_the_same_programs(void **state) {
    (void)state;
    setting s = plain_setting();
    ms_memory_report reports[3];
    uint64_t budget = 0;
    s.config.offloading = MS_SWITCH_ON;
    s.config.checkpointing = MS_SWITCH_OFF;
    for (int k = 0; k < 3; ++k) {
        ms_model *m = make_chain(&s);
        ms_hardware h = *ms_hardware_find("RTX 3090");
        if (k == 2) {
            h.to_device_gb_per_s *= 0.2;
            h.f32_tflops *= 3.0;
        }
        ms_set_hardware(m, &h);
        budget = k == 0 ? budget_of(m, 0) : budget;
        ms_set_budget(m, budget);
        if (k > 0) {
            t_ok(m, load_plan(m, &file));
        }
        t_ok(m, ms_wrap(m));
        t_report(m, &reports[k]);
        if (k == 0) {
            t_ok(m, save_plan(m, &file));
        }
        ms_destroy(m);
    }
    assert_true(reports[0].to_device_bytes > 0);
    assert_true(reports[0].plan_hash == reports[1].plan_hash);
    assert_true(reports[0].plan_hash == reports[2].plan_hash);
    assert_memory_equal(&reports[0].step_us, &reports[1].step_us, sizeof reports[0].step_us);
    assert_true(reports[2].step_us > reports[0].step_us);
    setting waits = s;
    waits.config.async_offload = MS_SWITCH_OFF;
    expect_loaded(waits, budget, MS_RESULT_INVALID, "another way to copy");
    waits = s;
    waits.config.prefetch_depth = 2;
    expect_loaded(waits, budget, MS_RESULT_INVALID, "another way to copy");
    waits = s;
    waits.config.offloading = MS_SWITCH_DEFAULT; // which there means OFF
    expect_loaded(waits, budget, MS_RESULT_INVALID, "it uses offloading for \"");
}

/* After a loaded plan the model plans as any other. */
static void a_loaded_plan_is_followed_by_others(void **state) {
    (void)state;
    const setting s = plain_setting();
    const uint64_t budget = save_chain(&s);
    ms_memory_report loaded, report;
    const int64_t small = 4;
    ms_model *m = make_chain(&s), *planned = make_chain(&s);
    t_error(m, save_plan(m, &file), MS_RESULT_ORDER);
    save_chain(&s);
    ms_set_budget(m, budget);
    t_ok(m, load_plan(m, &file));
    t_ok(m, ms_wrap(m));
    t_report(m, &loaded);
    t_ok(m, ms_reshape(m, &small));
    t_ok(m, ms_detach(m));
    t_report(m, &report);
    assert_true(report.arena_bytes > loaded.arena_bytes && strcmp(report.found_by, "plain") == 0);
    t_ok(m, ms_wrap(m));
    const uint64_t more = budget + budget / 4;
    ms_set_budget(m, more);
    ms_set_budget(planned, more);
    t_error(m, save_plan(m, &file) == MS_RESULT_OK ? MS_RESULT_OK : MS_RESULT_ORDER, MS_RESULT_OK);
    t_ok(m, ms_wrap(m));
    t_ok(planned, ms_wrap(planned));
    t_ok(planned, ms_reshape(planned, &small));
    expect_same_plans(planned, m, "another budget");
    ms_set_budget(m, budget);
    save_chain(&s);
    t_ok(m, load_plan(m, &file)); // of a model that has a plan
    t_error(m, ms_reshape(m, &s.rows), MS_RESULT_ORDER);
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_reshape(m, &s.rows));
    t_report(m, &report);
    assert_true(report.plan_hash == loaded.plan_hash);
    ms_destroy(planned);
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// faults, and files that are damaged or made up

static void every_allocation_may_fail(void **state) {
    (void)state;
    setting s = plain_setting();
    s.config.offloading = MS_SWITCH_ON;
    const uint64_t budget = save_chain(&s);
    for (int what = 0; what < 2; ++what) {
        bool failed = true;
        for (uint64_t at = 1; failed; ++at) {
            t_heap heap;
            static t_file to;
            memset(&heap, 0, sizeof heap);
            s.config.allocator = t_heap_allocator(&heap);
            ms_model *m = make_chain(&s);
            ms_set_budget(m, budget);
            if (what == 0) {
                t_ok(m, load_plan(m, &file));
                t_ok(m, ms_wrap(m));
            }
            heap.has_failed = false;
            heap.fail_at = heap.calls + at;
            const ms_result result = what == 0 ? save_plan(m, &to)
                                     : load_plan(m, &file) == MS_RESULT_OK
                                         ? ms_wrap(m)
                                         : MS_RESULT_OUT_OF_MEMORY;
            failed = heap.has_failed;
            t_error(m, result, failed ? MS_RESULT_OUT_OF_MEMORY : MS_RESULT_OK);
            heap.fail_at = 0;
            if (what == 0) {
                t_ok(m, save_plan(m, &to));
                assert_true(to.bytes == file.bytes && memcmp(to.data, file.data, to.bytes) == 0);
            } else {
                t_ok(m, load_plan(m, &file));
                t_ok(m, ms_wrap(m));
            }
            ms_destroy(m);
            assert_int_equal(heap.live_count, 0);
            assert_int_equal(heap.wrong_releases, 0);
        }
    }
    memset(&s.config.allocator, 0, sizeof s.config.allocator);
    ms_model *m = make_chain(&s);
    t_ok(m, ms_wrap(m));
    t_file_clear(&file);
    file.fails_at = 1;
    ms_sink sink = {t_file_write, NULL};
    sink.user = &file;
    t_error(m, ms_plan_save(m, &sink), MS_RESULT_FILE);
    t_error(m, ms_plan_save(m, NULL), MS_RESULT_INVALID);
    t_error(m, ms_plan_load(m, NULL), MS_RESULT_INVALID);
    t_ok(m, save_plan(m, &file));
    file.fails_at = 1;
    t_error(m, load_plan(m, &file), MS_RESULT_FILE);
    ms_destroy(m);
}

static void a_file_that_is_damaged_is_refused(void **state) {
    (void)state;
    const setting s = plain_setting();
    (void)save_chain(&s);
    ms_model *m = make_chain(&s);
    for (size_t i = 0; i < file.bytes; ++i) {
        const uint8_t was = file.data[i];
        for (int bit = 0; bit < 8; ++bit) {
            file.data[i] = (uint8_t)(was ^ 1u << bit);
            t_error(m, load_plan(m, &file), MS_RESULT_INVALID);
        }
        file.data[i] = was;
    }
    const size_t whole = file.bytes;
    for (file.bytes = 0; file.bytes < whole; ++file.bytes) {
        t_error(m, load_plan(m, &file), MS_RESULT_INVALID);
    }
    t_ok(m, load_plan(m, &file));
    ms_destroy(m);
}

/* Puts a block of a training program elsewhere, with what lies in it. */
static void move_block(msi_program *p, uint32_t block, uint64_t offset) {
    msi_block *b = &p->layout.blocks.items[block];
    for (uint32_t k = 0; k < p->code.ranges.count; ++k) {
        msi_range *r = &p->code.ranges.items[k];
        r->offset = r->block == block ? r->offset - b->offset + offset : r->offset;
    }
    b->offset = offset;
}

/* Files that no library would write, with the right checksum and the right hash of programs: two values
   overlap; a plan for other sizes has a value beyond the memory that there is; a layer without rows is in
   tiles. */
static void a_plan_that_is_impossible_is_refused(void **state) {
    (void)state;
    static const char *const texts[] = {"two of its values overlap", "needs more memory",
                                        "cannot be a group"};
    setting s = plain_setting();
    s.config.tiling = MS_SWITCH_ON;
    for (int what = 0; what < 3; ++what) {
        ms_model *m = make_chain(&s);
        const uint64_t budget = budget_of(m, 1);
        ms_set_budget(m, budget);
        t_ok(m, ms_wrap(m));
        msi_plan *plan = what == 1 ? m->run.plan : m->wrapped.largest;
        msi_placement *l = &plan->train.layout;
        const msi_block *blocks = l->blocks.items;
        uint32_t before = 0, k; // two blocks that live at one time
        while (blocks[before].bytes == 0) {
            before += 1;
        }
        for (k = before + 1; k < l->blocks.count; ++k) {
            if (blocks[k].bytes > 0 && blocks[k].first <= blocks[before].last &&
                blocks[before].first <= blocks[k].last) {
                break;
            }
        }
        assert_true(k < l->blocks.count);
        if (what == 0) {
            move_block(&plan->train, k, blocks[before].offset);
        } else if (what == 1) {
            assert_true(plan != m->wrapped.largest);
            plan->follows = false;
            plan->decisions[m->graph.tensors.count].room ^= 1; // so that it is saved by itself
            move_block(&plan->train, k, (uint64_t)1 << 20);
        } else {
            plan->decisions[m->graph.loss].tiles = 2;
            plan->decisions[m->graph.loss].begins_group = true;
        }
        t_ok(m, save_plan(m, &file));
        ms_destroy(m);
        expect_loaded(s, budget, MS_RESULT_INVALID, texts[what]);
    }
}

/* A file with the right checksum and wrong numbers is refused, and the model plans as before; or it is
   a plan, by which training has the same bits. */
static void a_file_that_was_made_up_is_refused_or_right(void **state) {
    (void)state;
    const uint64_t graphs = t_sweep(12, 200), tries = t_size(150, 600);
    uint32_t refused = 0, taken = 0, mended = 0;
    char what[80];
    for (uint64_t seed = 1; seed <= graphs; ++seed) {
        static pair p;
        static t_file made;
        t_rng rng = t_seed(seed ^ 0xfa12);
        ms_config config = t_config();
        memset(&p, 0, sizeof p);
        p.g = rd_generate(seed);
        config.offloading = seed % 2 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        for (int k = 0; k < 2; ++k) {
            p.n[k] = make_net(&p, k, &config);
        }
        ms_model *a = p.n[0]->model, *b = p.n[1]->model;
        ms_set_budget(a, budget_of(a, 1));
        t_ok(a, ms_wrap(a));
        if (p.g->axis_count > 0) {
            const int64_t sizes[RD_AXIS_LIMIT] = {1, 1};
            t_ok(a, ms_reshape(a, sizes));
            t_ok(a, ms_reshape(a, p.g->largest));
            t_ok(a, ms_reshape(a, p.g->size));
        }
        t_ok(a, save_plan(a, &file));
        t_ok(b, ms_wrap(b));
        for (int k = 0; k < 2; ++k) {
            assert_true(rd_net_write(p.n[k], 0, false));
        }
        for (uint64_t k = 0; k < tries; ++k) {
            made = file;
            for (uint32_t changes = 1 + t_below(&rng, 3); changes > 0; --changes) {
                const size_t first = t_chance(&rng, 0.3) ? 60 : made.bytes / 2;
                const size_t at = first + t_below(&rng, (uint32_t)(made.bytes - 10 - first));
                made.data[at] =
                    (uint8_t)(t_chance(&rng, 0.5) ? made.data[at] ^ 1u << t_below(&rng, 7)
                                                  : t_below(&rng, 256));
            }
            plan_file_mend(made.data, made.bytes);
            ms_result result = load_plan(b, &made);
            result = result == MS_RESULT_OK ? ms_wrap(b) : result;
            for (int mends = 0; mends < 4 && result == MS_RESULT_INVALID &&
                                plan_file_mend_programs(made.data, &made.bytes, ms_last_error(b));
                 ++mends) {
                result = load_plan(b, &made);
                result = result == MS_RESULT_OK ? ms_wrap(b) : result;
                mended += result == MS_RESULT_OK;
            }
            assert_true(result == MS_RESULT_OK || result == MS_RESULT_INVALID ||
                        result == MS_RESULT_BUDGET);
            refused += result != MS_RESULT_OK;
            taken += result == MS_RESULT_OK;
            if (result == MS_RESULT_OK || k + 1 == tries) {
                snprintf(what, sizeof what, "a made up plan, seed %llu, try %llu",
                         (unsigned long long)seed, (unsigned long long)k);
                step_both(&p, k + 1);
                expect_same_values(a, b, false, what);
            }
        }
        close_pair(&p);
    }
    print_message("%u files were refused, %u taken, %u of them with other programs\n",
                  (unsigned)refused, (unsigned)taken, (unsigned)mended);
    assert_true(refused > 0 && taken > mended && mended > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_loaded_plan_is_the_plan_that_was_saved),
        cmocka_unit_test(a_loaded_plan_has_the_same_tiles),
        cmocka_unit_test(a_plan_is_for_one_graph_and_one_config),
        cmocka_unit_test(a_plan_is_for_one_optimizer_and_one_kind_of_evals),
        cmocka_unit_test(other_times_are_other_predictions_of_the_same_programs),
        cmocka_unit_test(a_loaded_plan_is_followed_by_others),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(a_file_that_is_damaged_is_refused),
        cmocka_unit_test(a_plan_that_is_impossible_is_refused),
        cmocka_unit_test(a_file_that_was_made_up_is_refused_or_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif // MEMSCALE_NO_PLANNER
