/*  test_tiles.c - layers that are computed in tiles of rows: random graphs of whole numbers, whose
    plans in tiles give the bits of the plain one. MEMSCALE_TEST_DAGS sets how many graphs there are,
    MEMSCALE_TEST_SEED which is the first. */
#include "private.h"
#include "toy_layers.h"
#include "random_tiles.h"
#include "repeats.h"
#include "slices.h"
#include "virtual.h"

enum { QUICK_GRAPHS = 120, GRAPHS = 20000 };

static uint64_t first_seed(void) {
    return t_environment("MEMSCALE_TEST_SEED", 1);
}

static uint64_t end_seed(uint64_t quick, uint64_t full) {
    return first_seed() + t_environment("MEMSCALE_TEST_DAGS", t_sweep(quick, full));
}

// ------------------------------------------------------------------------------------------------
// random graphs: the bits of the plain plan

typedef struct tally {
    uint32_t graphs, tiled, sweeps, again, moved, half, parts;
} tally;

static void same_tensor(const rt_graph *g, const char *what, uint32_t value, ms_model *plain,
                        ms_tensor a, ms_model *tiled, ms_tensor b) {
    static float x[RT_ELEMENTS], y[RT_ELEMENTS];
    const ms_result of_plain = ms_read(plain, a, x), of_tiled = ms_read(tiled, b, y);
    const size_t bytes = (size_t)ms_tensor_bytes(plain, ms_tensor_of(plain, a));
    if (of_tiled == MS_RESULT_ORDER && strcmp(what, "gradient") == 0) {
        return; // gone by an early update
    }
    if (of_plain != of_tiled || (of_plain == MS_RESULT_OK && memcmp(x, y, bytes) != 0)) {
        size_t i = 0;
        while (i + 1 < bytes / sizeof(float) && memcmp(&x[i], &y[i], sizeof(float)) == 0) {
            ++i;
        }
        fail_msg("MEMSCALE_TEST_SEED=%llu: %s of v%u differs: %s, %s (%s); element %u: %g, %g",
                 (unsigned long long)g->seed, what, (unsigned)value, ms_result_name(of_plain),
                 ms_result_name(of_tiled), ms_last_error(tiled), (unsigned)i, (double)x[i],
                 (double)y[i]);
    }
}

static void same_gradients(const rt_graph *g, const rt_net *plain, const rt_net *tiled) {
    for (uint32_t v = 0; v < g->value_count; ++v) {
        if (g->value[v].role == RT_TRAINED) {
            same_tensor(g, "gradient", v, plain->model, ms_gradient(plain->model, plain->handle[v]),
                        tiled->model, ms_gradient(tiled->model, tiled->handle[v]));
        }
    }
}

static void same_values(const rt_graph *g, const rt_net *plain, const rt_net *tiled) {
    for (uint32_t v = 0; v < g->value_count; ++v) {
        const bool kept = g->value[v].is_output || g->value[v].role == RT_TRAINED ||
                          v == g->layer[g->layer_count - 1].out[0];
        if (kept) {
            same_tensor(g, "value", v, plain->model, plain->handle[v], tiled->model,
                        tiled->handle[v]);
        }
        if (g->value[v].role == RT_TRAINED && t_state_count(&g->optimizer) > 0) {
            same_tensor(g, "state", v, plain->model,
                        ms_optimizer_state(plain->model, plain->handle[v], 0), tiled->model,
                        ms_optimizer_state(tiled->model, tiled->handle[v], 0));
        }
    }
}

static void ok(const rt_graph *g, const rt_net *n, ms_result result, const char *what) {
    if (result != MS_RESULT_OK || n->fault) {
        fail_msg("MEMSCALE_TEST_SEED=%llu: %s: %s: %s; layer %u: %s", (unsigned long long)g->seed,
                 what, ms_result_name(result), ms_last_error(n->model), (unsigned)n->fault_layer,
                 n->fault ? n->fault : "no fault");
    }
}

#define OK(n, call) ok((n)->graph, n, call, #call)

static void one_step(const rt_graph *g, rt_net *const *nets, uint64_t round, bool at_once) {
    double loss[2];
    for (uint32_t micro = 0; micro < g->micro_count; ++micro) {
        for (int k = 0; k < 2; ++k) {
            rt_net_write(nets[k], round * 8 + micro, micro == 0);
            if (at_once) {
                OK(nets[k], s_step(nets[k]->model, &loss[k]));
            } else {
                OK(nets[k], ms_forward(nets[k]->model, &loss[k]));
                OK(nets[k], ms_backward(nets[k]->model));
            }
            OK(nets[k], ms_synchronize(nets[k]->model));
        }
        assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
    }
    if (!at_once) {
        same_gradients(g, nets[0], nets[1]);
        for (int k = 0; k < 2; ++k) {
            OK(nets[k], ms_update(nets[k]->model));
            OK(nets[k], ms_synchronize(nets[k]->model));
        }
    }
    same_values(g, nets[0], nets[1]);
    for (int k = 0; k < 2; ++k) {
        rt_net_write(nets[k], round * 8 + 7, true);
        OK(nets[k], ms_eval(nets[k]->model, &loss[k]));
    }
    assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
}

/* Forces random things on the net with tiles. */
static void force(rt_net *n, uint64_t seed, tally *t) {
    const rt_graph *g = n->graph;
    t_rng rng = t_seed(seed + 77);
    const bool moves = t_chance(&rng, 0.5);
    const bool half = g->layer[0].desc.dtypes.accepts != 0 && t_chance(&rng, 0.4);
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        if (g->layer[i].tiled) {
            ms_set_layer_technique(n->model, n->layer[i], MS_TECHNIQUE_TILING, MS_SWITCH_ON);
        }
        if (g->layer[i].desc.recompute_reads.saved) { // without it, forward runs again instead
            ms_set_tensor_technique(n->model, n->handle[g->layer[i].saved],
                                    MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
        }
    }
    for (uint32_t v = 0; v < g->value_count; ++v) {
        const rt_value *value = &g->value[v];
        if (moves && value->role != RT_INPUT && t_chance(&rng, 0.5)) {
            ms_set_tensor_technique(n->model, n->handle[v], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
            t->moved++;
        } else if (value->role >= RT_MADE && t_chance(&rng, 0.2)) {
            ms_set_tensor_technique(n->model, n->handle[v], MS_TECHNIQUE_CHECKPOINTING,
                                    MS_SWITCH_OFF);
        }
        if (half && value->role >= RT_MADE && value->shape != RT_TABLE && t_chance(&rng, 0.6)) {
            ms_set_tensor_technique(n->model, n->handle[v], MS_TECHNIQUE_MIXED_PRECISION,
                                    MS_SWITCH_ON);
            t->half++;
        }
    }
}

/* Un-forces layers whose rows cannot be parted: those say so. */
static void wrap(rt_net *n) {
    ms_result result = ms_wrap(n->model);
    for (uint32_t i = 0; i < n->graph->layer_count && result == MS_RESULT_INVALID; ++i) {
        ms_set_layer_technique(n->model, n->layer[i], MS_TECHNIQUE_TILING, MS_SWITCH_DEFAULT);
        result = ms_wrap(n->model);
    }
    OK(n, result);
}

static void count(const rt_net *n, tally *t) {
    const msi_program *p = &n->model->run.plan->train;
    bool tiled = false, again = false, sweeps = false, parts = false;
    for (uint32_t i = 0; i < p->code.instructions.count; ++i) {
        const msi_instruction *at = &p->code.instructions.items[i];
        tiled |= at->rows.of > 0 && at->rows.count < at->rows.of;
        again |= at->rows.of > 0 && msi_is_again((msi_op)at->op);
        parts |= at->rows.count < at->rows.of && msi_is_issued((msi_op)at->op);
        sweeps |= at->rows.of > 0 && i < p->code.forward_end && at->op == MSI_OP_BACKWARD;
    }
    t->graphs++;
    t->tiled += tiled;
    t->again += again;
    t->sweeps += sweeps;
    t->parts += parts;
}

/* Plans for smaller sizes that follow the largest one, as in a library without the planner: also where
   tiles have no rows, they have the live ranges of that. */
static void follow(const rt_net *n, int64_t largest) {
    ms_model *m = n->model;
    for (int64_t size = 1; size < largest; ++size) {
        const int64_t sizes[MS_LIMIT_AXES] = {size};
        msi_plan *plan = NULL;
        t_ok(m, msi_plan_at(m, m->run.store, MSI_GOAL_FOLLOW, sizes, m->wrapped.largest, &plan));
        assert_int_equal(plan->train.code.ranges.count,
                         m->wrapped.largest->train.code.ranges.count);
        msi_plan_free(m, plan);
    }
}

/* Runs a graph by the plain plan, and in tiles by this config. */
static void expect_same_bits(rt_graph *g, const ms_config *config,
                             ms_layer_desc (*move)(void *, uint32_t, const ms_layer_desc *),
                             void *mover, tally *t) {
    ms_config plain = t_config();
    plain.checkpointing = plain.early_update = MS_SWITCH_OFF;
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        g->layer[i].desc.dtypes.accepts = g->seed % 3 ? 1u << MS_DTYPE_BF16 : 0;
    }
    t_heap heap;
    ms_config tiled = *config;
    memset(&heap, 0, sizeof heap);
    tiled.allocator = t_heap_allocator(&heap);
    if (g->seed % 4 < 3) {
        s_slice(&tiled, g->seed);
    }
    rt_net *const nets[] = {rt_net_create(g, &plain, NULL, NULL),
                            rt_net_create(g, &tiled, move, mover)};
    OK(nets[0], ms_wrap(nets[0]->model));
    force(nets[1], g->seed, t);
    wrap(nets[1]);
    count(nets[1], t);
    for (uint64_t round = 0; round < 2; ++round) {
        one_step(g, nets, round, (g->seed + round) % 2 == 0);
    }
    if (g->has_axis) {
        const int64_t sizes[MS_LIMIT_AXES] = {g->batch > 1 ? g->batch - 1 : g->batch + 1};
        follow(nets[1], g->batch + 1);
        g->batch = sizes[0];
        for (int k = 0; k < 2; ++k) {
            OK(nets[k], ms_reshape(nets[k]->model, sizes));
        }
        one_step(g, nets, 3, false);
    }
    for (int k = 0; k < 2; ++k) {
        rt_net_destroy(nets[k]);
    }
    assert_int_equal(heap.live_count, 0);
    assert_int_equal(heap.wrong_releases, 0);
    free(g);
}

static ms_config random_config(uint64_t seed) {
    ms_config config = t_config();
    config.master_weights = seed % 5 == 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config.force_optimize = seed % 4 == 0;
    config.offloading = seed % 8 == 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.tiling = seed % 8 == 4 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.debug = seed % 5 == 3;
    return config;
}

static void expect_coverage(const tally *t) {
    print_message("%u graphs: %u in tiles, %u recompute tiles, %u sweep, %u copy them; %u values "
                  "moved, %u in 16 bits\n",
                  (unsigned)t->graphs, (unsigned)t->tiled, (unsigned)t->again, (unsigned)t->sweeps,
                  (unsigned)t->parts, (unsigned)t->moved, (unsigned)t->half);
    assert_true(t->graphs < 100 || (t->tiled * 2 > t->graphs && t->again * 10 > t->graphs &&
                                    t->sweeps * 10 > t->graphs && t->parts * 10 > t->graphs &&
                                    t->moved > 0 && t->half > 0));
}

static void tiles_change_no_sum(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS);
    tally t;
    memset(&t, 0, sizeof t);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        const ms_config config = random_config(seed);
        expect_same_bits(rt_generate(seed), &config, NULL, NULL, &t);
    }
    expect_coverage(&t);
}

static rt_graph *empty_graph(uint64_t seed, int64_t batch, int64_t tokens) {
    rt_graph *g = (rt_graph *)calloc(1, sizeof *g);
    assert_non_null(g);
    g->rng = t_seed(seed);
    g->seed = seed;
    g->batch = batch;
    g->tokens = tokens;
    g->micro_count = 1 + seed % 2;
    g->optimizer.kind = MS_OPTIMIZER_SGD;
    g->optimizer.learning_rate = 0.25f;
    return g;
}

/* Two groups, one after the other, of 10 rows in tiles of 4, 4, 2 and none: the first layer of the
   second also reads, whole, what the first layer of all makes. */
static rt_graph *two_groups(uint64_t seed) {
    enum { IN, PARAM, CUT, LAST, OUT, LOSS };
    rt_graph *g = empty_graph(seed, 5, 2);
    for (uint32_t v = IN; v <= LOSS; ++v) {
        rt_new(g,
               v == IN      ? RT_INPUT
               : v == PARAM ? RT_TRAINED
                            : RT_MADE,
               v == PARAM ? RT_VECTOR : RT_TOKENS);
        g->value[v].cols = 2;
    }
    for (uint32_t i = 0; i < 4; ++i) {
        rt_layer *l = &g->layer[g->layer_count++];
        l->axes = 2;
        l->in[0] = i == 0 ? (uint32_t)IN : PARAM + i;
        l->in[1] = CUT;
        l->in_count = i == 2 ? 2 : 1;
        l->out[0] = CUT + i;
        l->out_count = 1;
        l->saved = UINT32_MAX;
        l->param[0] = PARAM;
        l->param_count = i == 0;
        l->factor[0] = l->factor[1] = 1.0f;
        l->is_loss = i == 3;
        l->salt = 3;
        l->tiled = i < 3 || seed % 4 < 2; // with the loss, it sweeps
        l->reads.in = l->reads.param = i == 0;
        l->whole = i == 2 ? 2 : 0;
        l->desc.tile.axes = 2;
        l->desc.tile.multiple = 2;
        l->desc.tile.whole_in = l->whole;
        l->desc.dtypes.f32_in = t_chance(&g->rng, 0.5) ? l->whole : 0;
        l->desc.backward_reads.in = l->desc.backward_reads.param = i == 0;
        l->desc.backward_reads.nothing = i > 0;
        l->desc.forward_workspace.row_bytes = l->desc.backward_workspace.row_bytes = 4;
    }
    g->layer[0].desc.overwrites.param = 1;
    return g;
}

static void what_a_group_cuts_is_whole_in_the_next(void **state) {
    (void)state;
    tally t;
    memset(&t, 0, sizeof t);
    for (uint64_t seed = 1; seed <= 16; ++seed) {
        const ms_config config = random_config(seed);
        expect_same_bits(two_groups(seed), &config, NULL, NULL, &t);
    }
    assert_true(t.tiled == t.graphs && t.sweeps > 0 && t.sweeps < t.graphs && t.half > 0);
}

/* Layers that each keep a value of their own; the loss is the last of them. */
static rt_graph *equal_stages(uint64_t seed) {
    enum { IN, PARAM, STAGES = 11 };
    rt_graph *g = empty_graph(seed, 16, 8);
    rt_new(g, RT_INPUT, RT_TOKENS);
    rt_new(g, RT_TRAINED, RT_VECTOR);
    for (uint32_t i = 0; i < STAGES; ++i) {
        rt_layer *l = &g->layer[g->layer_count++];
        l->axes = 2;
        l->in[0] = i == 0 ? (uint32_t)IN : g->layer[i - 1].out[0];
        l->in_count = l->out_count = 1;
        l->out[0] = rt_new(g, RT_MADE, RT_TOKENS);
        l->saved = i + 1 < STAGES ? rt_new(g, RT_KEPT, RT_TOKENS) : UINT32_MAX;
        l->param[0] = PARAM;
        l->param_count = i == 0;
        l->factor[0] = 1.0f;
        l->is_loss = i + 1 == STAGES;
        l->salt = 3;
        l->reads.saved = !l->is_loss;
        l->desc.tile.axes = 2;
        l->desc.backward_reads.saved = l->reads.saved;
        l->desc.backward_reads.nothing = l->is_loss;
    }
    for (uint32_t v = 0; v < g->value_count; ++v) {
        g->value[v].cols = 8;
    }
    return g;
}

/* A device whose link takes as long for what a layer keeps as its forward does. */
static void take_link(rt_net *n) {
    ms_hardware h;
    ms_layer_time time;
    memset(&h, 0, sizeof h);
    snprintf(h.name, sizeof h.name, "linked");
    h.kind = MS_DEVICE_DISCRETE;
    h.total_bytes = h.free_bytes = (uint64_t)1 << 34;
    h.memory_gb_per_s = h.f32_tflops = 1e3;
    h.launch_us = 1e-6;
    h.to_device_gb_per_s = h.to_host_gb_per_s = 4.096; // 4 KiB in a microsecond
    ms_set_hardware(n->model, &h);
    time.forward_us = time.recompute_us = 1.0;
    time.backward_us = 2.0;
    for (uint32_t i = 0; i < n->graph->layer_count; ++i) {
        ms_set_layer_time(n->model, n->layer[i], &time);
    }
}

/* What only ms_eval is to keep has all its rows, as a net that keeps everything has them. */
static void outputs_of_eval_are_kept(void **state) {
    (void)state;
    const uint64_t end = end_seed(12, 400);
    tally t;
    memset(&t, 0, sizeof t);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        rt_graph *g = rt_generate(seed), *kept = rt_generate(seed);
        const ms_config config = t_config();
        t_rng rng = t_seed(seed);
        double loss;
        for (uint32_t v = 0; v < g->value_count; ++v) {
            g->value[v].is_output = false;
            g->value[v].is_eval_output = g->value[v].role == RT_MADE && t_chance(&rng, 0.3);
            kept->value[v].is_output = g->value[v].role == RT_MADE;
            kept->value[v].is_eval_output = false;
        }
        rt_net *const nets[] = {rt_net_create(kept, &config, NULL, NULL),
                                rt_net_create(g, &config, NULL, NULL)};
        force(nets[1], seed, &t);
        for (int k = 0; k < 2; ++k) {
            wrap(nets[k]);
            rt_net_write(nets[k], seed, true);
            OK(nets[k], ms_eval(nets[k]->model, &loss));
        }
        for (uint32_t v = 0; v < g->value_count; ++v) {
            if (g->value[v].is_eval_output) {
                same_tensor(g, "output of eval", v, nets[0]->model, nets[0]->handle[v],
                            nets[1]->model, nets[1]->handle[v]);
            }
        }
        rt_net_destroy(nets[0]);
        rt_net_destroy(nets[1]);
        free(g);
        free(kept);
    }
}

/* ms_verify finds no difference, and ms_find_nonfinite nothing, in random plans in tiles. */
static void tiles_are_verified(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS / 4, GRAPHS / 4);
    uint32_t found = 0, named = 0;
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        ms_config config = random_config(seed);
        rt_graph *g = rt_generate(seed);
        config.debug = false;
        tally t;
        memset(&t, 0, sizeof t);
        rt_net *n = rt_net_create(g, &config, NULL, NULL);
        for (uint32_t i = 0; i < g->layer_count; ++i) {
            g->layer[i].desc.dtypes.accepts = 0;
        }
        force(n, seed, &t);
        wrap(n);
        rt_net_write(n, 3, true);
        ms_verify_report report;
        ms_nonfinite nonfinite;
        OK(n, ms_verify(n->model, NULL, NULL, &report));
        if (report.differ_count != 0 || report.plain_loss != report.wrapped_loss) {
            fail_msg("MEMSCALE_TEST_SEED=%llu: %u tensors differ", (unsigned long long)seed,
                     (unsigned)report.differ_count);
        }
        OK(n, ms_find_nonfinite(n->model, &nonfinite));
        assert_int_equal(nonfinite.count, 0);
        uint32_t input = 0; // NaN in the last element of the first input
        while (g->value[input].role != RT_INPUT) {
            ++input;
        }
        static float data[RT_ELEMENTS];
        const uint64_t count = ms_tensor_count(n->model, n->handle[input]);
        memset(data, 0, sizeof data);
        data[count - 1] = NAN;
        OK(n, ms_write(n->model, n->handle[input], data));
        OK(n, ms_find_nonfinite(n->model, &nonfinite));
        found += nonfinite.count > 0;
        if (nonfinite.count > 0 && nonfinite.is_read &&
            ms_tensor_of(n->model, nonfinite.tensor).id == n->handle[input].id) {
            assert_int_equal(nonfinite.element, count - 1);
            named += 1;
        }
        rt_net_destroy(n);
        free(g);
    }
    assert_true(found > 0 && named > 0);
}

static ms_layer_desc run_late(void *layers, uint32_t layer, const ms_layer_desc *desc) {
    return v_wrap(desc, (v_layer *)layers + layer);
}

static void expect_waits(uint64_t seed, tally *t) {
    static v_layer layers[RT_LAYERS];
    v_device device;
    ms_config config = random_config(seed);
    config.debug = false;
    v_open(&device, seed);
    config.backend = v_backend(&device);
    expect_same_bits(rt_generate(seed), &config, run_late, layers, t);
    assert_int_equal(device.callback_error, 0);
    assert_int_equal(device.overtaken, 0);
    v_close(&device);
}

static void tiles_wait_for_all_they_need(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS);
    tally t;
    memset(&t, 0, sizeof t);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        expect_waits(seed, &t);
    }
    expect_coverage(&t);
}

/* Plans that have values leave and land in parts, by choice: the bits of the plain plan, in any
   order of the streams. */
static void what_the_planner_moves_in_parts_keeps_its_bits(void **state) {
    (void)state;
    tally t;
    memset(&t, 0, sizeof t);
    for (uint64_t seed = 1; seed <= t_sweep(16, 400); ++seed) {
        static v_layer layers[RT_LAYERS];
        t_heap heap;
        v_device device;
        ms_memory_report report;
        rt_graph *g = equal_stages(seed);
        ms_config config = t_config();
        memset(&heap, 0, sizeof heap);
        rt_net *nets[2] = {rt_net_create(g, &config, NULL, NULL), NULL};
        OK(nets[0], ms_wrap(nets[0]->model));
        OK(nets[0], ms_report(nets[0]->model, &report));
        v_open(&device, seed);
        config.backend = v_backend(&device);
        config.allocator = t_heap_allocator(&heap);
        config.tiling = config.offloading = MS_SWITCH_ON;
        config.max_host_bytes = (uint64_t)1 << 30;
        config.memory_budget_bytes = report.plain_bytes * (11 + seed % 3) / 32;
        nets[1] = rt_net_create(g, &config, run_late, layers);
        take_link(nets[1]);
        OK(nets[1], ms_wrap(nets[1]->model));
        count(nets[1], &t);
        for (uint64_t round = 0; round < 2; ++round) {
            one_step(g, nets, round, (seed + round) % 2 == 0);
        }
        rt_net_destroy(nets[0]);
        rt_net_destroy(nets[1]);
        free(g);
        assert_int_equal(heap.live_count, 0);
        assert_int_equal(device.callback_error, 0);
        assert_int_equal(device.overtaken, 0);
        v_close(&device);
    }
    print_message("%u of %u plans move values in parts\n", (unsigned)t.parts, (unsigned)t.graphs);
    assert_true(t.parts * 2 > t.graphs);
}

// ------------------------------------------------------------------------------------------------
// groups of layers, as they are defined

enum { PART_LAYERS = 7, PART_VALUES = 32, PART_GRAPHS = 400 };

/* What a layer declares of its rows, and what it reads and makes: values by their numbers. */
typedef struct part {
    uint64_t rows, multiple;
    bool by_rows, cuts[2], writes, is_lent;
    uint32_t in[2], in_count, out, saved; // saved: or UINT32_MAX
    ms_switch force[2];                   // of the output, and of what is saved
} part;

typedef struct parts {
    part layer[PART_LAYERS];
    uint64_t rows[PART_VALUES];
    uint32_t producer[PART_VALUES]; // or UINT32_MAX
    ms_tensor handle[PART_VALUES];
    uint32_t count, value_count, loss;
    ms_model *model;
} parts;

static uint32_t parts_value(parts *p, uint64_t rows, uint32_t producer, ms_tensor handle) {
    assert_true(p->value_count < PART_VALUES);
    p->rows[p->value_count] = rows;
    p->producer[p->value_count] = producer;
    p->handle[p->value_count] = handle;
    return p->value_count++;
}

static void parts_add(parts *p, t_rng *rng, bool *forced) {
    static const uint64_t rows[] = {2, 4, 4, 6, 8, 8, 8, 12, 24};
    part *l = &p->layer[p->count];
    ms_model *m = p->model;
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    memset(l, 0, sizeof *l);
    l->rows = rows[t_below(rng, 9)];
    l->by_rows = !t_chance(rng, 0.05);
    l->in_count = 1 + t_below(rng, 2);
    for (uint32_t k = 0; k < l->in_count; ++k) {
        const uint32_t all = p->value_count;
        const bool is_new = all == 0 || t_chance(rng, 0.1);
        l->in[k] = is_new ? parts_value(p, rows[t_below(rng, 9)], UINT32_MAX, d.in[k])
                          : all - 1 - t_below(rng, all < 4 ? all : 4);
        if (is_new) {
            p->handle[l->in[k]] =
                ms_input(m, "in", MS_DTYPE_F32, ms_shape2((int64_t)p->rows[l->in[k]], 4));
        }
        const uint64_t own = p->rows[l->in[k]];
        l->cuts[k] =
            l->by_rows && (own % l->rows == 0 || l->rows % own == 0) && !t_chance(rng, 0.1);
        d.tile.whole_in |= l->by_rows && !l->cuts[k] ? 1u << k : 0u;
        d.in[k] = p->handle[l->in[k]];
    }
    l->multiple = l->by_rows && t_chance(rng, 0.3) ? 2 : 1;
    l->writes = t_chance(rng, 0.1);
    l->is_lent = t_chance(rng, 0.1);
    d.tile.axes = l->by_rows;
    d.tile.multiple = l->multiple > 1 ? (int64_t)l->multiple : 0;
    d.forward = t_nothing;
    d.backward = l->writes ? NULL : t_nothing;
    d.grads_in_forward = l->writes ? 1 : 0;
    d.backward_reads.nothing = l->writes;
    if (!l->writes) {
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(4));
    }
    l->is_lent &= !l->writes;
    d.out[0] = ms_activation(m, "out", MS_DTYPE_F32, ms_shape2((int64_t)l->rows, 4));
    l->out = parts_value(p, l->rows, p->count, d.out[0]);
    l->saved = UINT32_MAX;
    if (!l->writes && t_chance(rng, 0.3)) {
        d.saved[0] = ms_saved(m, "saved", MS_DTYPE_F32, ms_shape2((int64_t)l->rows, 4));
        l->saved = 0;
    }
    ms_register_layer(m, &d);
    t_ok(m, (ms_result)m->errors.sticky);
    for (int k = 0; k < 2; ++k) {
        const ms_tensor t = k == 0 ? d.out[0] : d.saved[0];
        const bool rarely = t_chance(rng, 0.15);
        *forced ^= k == 0 && t_chance(rng, 0.2);
        l->force[k] = rarely ? MS_SWITCH_OFF : *forced && k == 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        if (k == 0 || l->saved == 0) {
            m->graph.tensors.items[msi_index(&m->graph, t)].technique[MS_TECHNIQUE_TILING] =
                (uint8_t)l->force[k];
        }
    }
    if (l->is_lent) {
        m->graph.tensors.items[msi_index(&m->graph, d.param[0])].borrowed |=
            (uint8_t)(1u << MSI_ROLE_GRADIENT);
    }
    p->count++;
}

static void parts_open(parts *p, uint64_t seed) {
    ms_config config = t_config();
    t_rng rng = t_seed(seed * 71 + 3);
    const uint32_t count = 2 + t_below(&rng, PART_LAYERS - 1);
    bool forced = false;
    memset(p, 0, sizeof *p);
    config.dry_run = true;
    t_ok(p->model, ms_create(&config, &p->model));
    while (p->count < count) {
        parts_add(p, &rng, &forced);
    }
    p->loss = count - 1 - (t_chance(&rng, 0.3) ? t_below(&rng, count) : 0);
    ms_set_loss(p->model, p->handle[p->layer[p->loss].out]);
    msi_analyze(&p->model->graph);
    msi_analyze_backward(&p->model->graph);
}

/* Whether so many of the rows of a group are whole rows, as many as it wants, of a layer. */
static bool is_whole(const parts *p, const part *l, uint64_t some, uint64_t rows) {
    const uint64_t own = some * l->rows / rows;
    bool whole = some * l->rows % rows == 0 && own % l->multiple == 0;
    for (uint32_t k = 0; k < l->in_count; ++k) {
        whole &= !l->cuts[k] || own * p->rows[l->in[k]] % l->rows == 0;
    }
    return whole;
}

/* The rows of a group, and the fewest that are whole in each of its layers. 0: there are none. */
static uint64_t parts_rows(const parts *p, uint32_t first, uint32_t end, uint64_t *unit) {
    uint64_t rows = 0;
    bool have = true, whole = false;
    for (uint32_t i = first; i < end; ++i) {
        rows = p->layer[i].rows > rows ? p->layer[i].rows : rows;
    }
    for (uint32_t i = first; i < end; ++i) {
        have &= p->layer[i].by_rows && rows % p->layer[i].rows == 0;
    }
    for (*unit = 0; have && !whole && *unit < rows;) {
        *unit += 1;
        whole = true;
        for (uint32_t i = first; i < end; ++i) {
            whole &= is_whole(p, &p->layer[i], *unit, rows);
        }
    }
    return whole ? rows : 0;
}

/* Whether each input is either cut by all that read it, or whole for all and made before. */
static bool parts_read_alike(const parts *p, uint32_t first, uint32_t end) {
    bool cut[PART_VALUES] = {false}, whole[PART_VALUES] = {false}, alike = true;
    for (uint32_t i = first; i < end; ++i) {
        for (uint32_t k = 0; k < p->layer[i].in_count; ++k) {
            const uint32_t v = p->layer[i].in[k];
            const bool inside = p->producer[v] != UINT32_MAX && p->producer[v] >= first;
            cut[v] |= p->layer[i].cuts[k];
            whole[v] |= !p->layer[i].cuts[k];
            alike &= !(cut[v] && whole[v]) && !(whole[v] && inside);
        }
    }
    return alike;
}

static bool parts_end_in_loss(const parts *p, uint32_t first, uint32_t end) {
    const msi_layer *layers = p->model->graph.layers.items;
    bool has = false, others = false;
    for (uint32_t i = first; i < p->count; ++i) {
        const bool writes = layers[i].ends_in_loss;
        const bool runs = writes || layers[i].has_backward;
        has |= i < end && (writes || (i == p->loss && layers[i].has_backward));
        others |= i < end ? p->layer[i].is_lent : runs;
    }
    return has && !others;
}

static bool parts_can_group(const parts *p, uint32_t first, uint32_t end) {
    bool can = true, writes = false;
    for (uint32_t i = first; i < end; ++i) {
        uint64_t unit;
        const uint64_t rows = parts_rows(p, first, i + 1, &unit);
        can &= rows > 0 && rows >= 2 * unit && parts_read_alike(p, first, i + 1);
        writes |= p->model->graph.layers.items[i].ends_in_loss;
    }
    return can && (!writes || parts_end_in_loss(p, first, end));
}

static ms_switch parts_force(const parts *p, uint32_t layer) {
    const part *l = &p->layer[layer];
    const ms_switch saved = l->saved == UINT32_MAX ? MS_SWITCH_DEFAULT : l->force[1];
    return l->force[0] == MS_SWITCH_OFF || saved == MS_SWITCH_OFF ? MS_SWITCH_OFF
           : l->force[0] == MS_SWITCH_ON || saved == MS_SWITCH_ON ? MS_SWITCH_ON
                                                                  : MS_SWITCH_DEFAULT;
}

/* The tiles of a group have all rows, each once, and whole ones in all of its layers. */
static void expect_whole_tiles(const parts *p, const msi_tiling *group) {
    uint32_t rows = 0;
    for (uint32_t k = 0; k < group->tiles; ++k) {
        const msi_rows tile = msi_rows_of_tile(group, k);
        assert_true(tile.begin == rows && tile.of == group->rows);
        rows += tile.count;
        for (uint32_t i = group->first; i < group->end; ++i) {
            assert_true(is_whole(p, &p->layer[i], tile.count, tile.of));
        }
    }
    assert_int_equal(rows, group->rows);
}

/* Any layers of random graphs: whether they can be in tiles together, whether they sweep, and how far
   a group goes that is forced. */
static void groups_are_as_defined(void **state) {
    (void)state;
    uint32_t groups = 0, sweeping = 0, refused = 0;
    for (uint64_t seed = 1; seed <= PART_GRAPHS; ++seed) {
        static parts p;
        parts_open(&p, seed);
        const msi_graph *g = &p.model->graph;
        for (uint32_t first = 0; first < p.count; ++first) {
            uint32_t longest = first;
            bool alike = true;
            assert_int_equal(msi_tiling_force(g, &g->layers.items[first]), parts_force(&p, first));
            for (uint32_t end = first + 1; end <= p.count; ++end) {
                uint64_t units[2];
                const bool can = parts_can_group(&p, first, end);
                const uint64_t rows = parts_rows(&p, first, end, &units[0]);
                assert_true(msi_common_rows(g, first, end, &units[1]) == rows);
                assert_true(rows == 0 || units[0] == units[1]);
                assert_int_equal(msi_ends_in_loss(g, first, end),
                                 parts_end_in_loss(&p, first, end));
                assert_int_equal(msi_can_group(g, first, end), can);
                alike &= parts_force(&p, end - 1) == parts_force(&p, first);
                longest = alike && can ? end : longest;
                groups += can;
                sweeping += can && parts_end_in_loss(&p, first, end);
                refused += !can;
            }
            assert_int_equal(msi_longest_group(g, first), longest);
        }
        ms_destroy(p.model);
    }
    assert_true(groups > PART_GRAPHS && sweeping > PART_GRAPHS / 4 && refused > PART_GRAPHS);
}

/* Decided groups, one after the other, are found again where they begin; a group may take the place
   of whole ones, where nothing is forced. */
static void decided_groups_are_found(void **state) {
    (void)state;
    uint32_t beside = 0, taken = 0;
    for (uint64_t seed = 1; seed <= PART_GRAPHS; ++seed) {
        static parts p;
        parts_open(&p, seed);
        const msi_graph *g = &p.model->graph;
        t_rng rng = t_seed(seed);
        uint32_t ends[PART_LAYERS] = {0}; // of the group that begins with a layer
        bool borders[PART_LAYERS + 1];    // no group goes on here
        msi_tensor_decision d[PART_VALUES * 2];
        assert_true(g->tensors.count <= PART_VALUES * 2);
        memset(d, 0, sizeof d);
        for (uint32_t first = 0; first < p.count;) {
            uint32_t end = p.count;
            while (end > first && (!parts_can_group(&p, first, end) || t_chance(&rng, 0.3))) {
                --end;
            }
            ends[first] = end;
            if (end > first) {
                beside += first > 0 && msi_tiles_of(g, d, first - 1) > 0;
                msi_decide_group(g, d, first, end, 2 + t_below(&rng, 2));
            }
            first = end > first ? end : first + 1;
        }
        memset(borders, true, sizeof borders);
        for (uint32_t first = 0; first < p.count; ++first) {
            for (uint32_t i = first + 1; i < ends[first]; ++i) {
                borders[i] = false;
            }
            if (ends[first] > first) {
                const msi_tiling group = msi_group_at(g, d, first);
                assert_int_equal(group.end, ends[first]);
                assert_int_equal(group.sweeps, parts_end_in_loss(&p, first, group.end));
                expect_whole_tiles(&p, &group);
            }
        }
        for (uint32_t first = 0; first < p.count; ++first) {
            bool may = borders[first];
            for (uint32_t end = first + 1; end <= p.count; ++end) {
                may &= parts_force(&p, end - 1) == MS_SWITCH_DEFAULT;
                const bool does = may && borders[end] && parts_can_group(&p, first, end);
                assert_int_equal(msi_may_group(g, d, first, end), does);
                taken += does;
            }
        }
        ms_destroy(p.model);
    }
    assert_true(beside > PART_GRAPHS / 4 && taken > PART_GRAPHS);
}

// ------------------------------------------------------------------------------------------------
// one program after another

/* A model with its plain plan, and what scores decisions about it. */
typedef struct scored_net {
    rt_net *net;
    msi_store *store;
    msi_plan *plan;
    msi_lowering lowering;
    msi_shortage shortage;
    msi_scorer scorer;
} scored_net;

static void scored_open(scored_net *s, const rt_graph *g) {
    const ms_config config = t_config();
    s->net = rt_net_create(g, &config, NULL, NULL);
    ms_model *m = s->net->model;
    assert_int_equal(msi_check_graph(m, MSI_GOAL_PLAIN), MS_RESULT_OK);
    assert_int_equal(msi_make_plans(m, MSI_GOAL_PLAIN, &s->store, &s->plan), MS_RESULT_OK);
    assert_true(msi_scorer_init(&s->scorer, m, s->store, s->plan, &s->lowering, &s->shortage));
}

static void scored_close(scored_net *s) {
    msi_lowering_free(&s->lowering);
    msi_plans_free(s->net->model, s->plan);
    msi_store_free(s->net->model, s->store);
    rt_net_destroy(s->net);
}

/* The longest groups, or none in their place, in a random number of tiles, and values in 16 bits. */
static void decide(const msi_graph *g, t_rng *rng, msi_tensor_decision *d) {
    const bool tiles = t_chance(rng, 0.7), half = t_chance(rng, 0.5);
    for (uint32_t i = 0; i < g->layers.count && tiles; ++i) {
        const uint32_t end = msi_longest_group(g, i);
        const uint32_t most = end > i ? msi_most_tiles(g, i, end) : 1;
        if (most > 1 && t_chance(rng, 0.8)) {
            msi_decide_tiles(g, d, i, end, 2 + t_below(rng, most - 1));
        }
        i = most > 1 && d[msi_first_output(g, &g->layers.items[i])].tiles ? end - 1 : i;
    }
    for (uint32_t t = 0; t < g->tensors.count && half; ++t) {
        const bool may = g->tensors.items[t].not_narrow == (uint8_t)MSI_NARROW_MAY_BE;
        d[t].format = may && t_chance(rng, 0.5) ? (uint8_t)MSI_FORMAT_BF16 : d[t].format;
    }
}

static void same_program(uint64_t seed, const msi_program *a, const msi_program *b) {
    bool same = a->code.sweeps == b->code.sweeps && a->layout.peak_bytes == b->layout.peak_bytes &&
                a->code.instructions.count == b->code.instructions.count &&
                a->code.ranges.count == b->code.ranges.count;
    for (uint32_t k = 0; same && k < a->code.ranges.count; ++k) {
        same = a->code.ranges.items[k].bytes == b->code.ranges.items[k].bytes &&
               a->code.ranges.items[k].format == b->code.ranges.items[k].format;
    }
    if (!same) {
        fail_msg("MEMSCALE_TEST_SEED=%llu: a program is not that of its decisions",
                 (unsigned long long)seed);
    }
}

/* Programs are lowered one after another into the same memory, and that for eval only where it
   changes: each is as if it were the first. */
static void programs_are_those_of_their_decisions(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        rt_graph *g = rt_generate(seed);
        t_rng rng = t_seed(seed);
        scored_net one, first;
        for (uint32_t i = 0; i < g->layer_count; ++i) {
            g->layer[i].desc.dtypes.accepts = 1u << MS_DTYPE_BF16;
        }
        scored_open(&one, g);
        const msi_graph *graph = &one.net->model->graph;
        const size_t bytes = (size_t)msi_decisions_bytes(graph);
        msi_tensor_decision *plain = (msi_tensor_decision *)malloc(bytes);
        assert_non_null(plain);
        memcpy(plain, one.plan->decisions, bytes);
        for (int k = 0; k < 6; ++k) {
            memcpy(one.plan->decisions, plain, bytes);
            decide(graph, &rng, one.plan->decisions);
            scored_open(&first, g);
            memcpy(first.plan->decisions, one.plan->decisions, bytes);
            (void)msi_estimate(&one.scorer, one.plan->decisions);
            (void)msi_estimate(&first.scorer, first.plan->decisions);
            msi_make_eval(&one.scorer);
            msi_make_eval(&first.scorer);
            same_program(seed, one.scorer.program, first.scorer.program);
            same_program(seed, one.scorer.eval, first.scorer.eval);
            scored_close(&first);
        }
        scored_close(&one);
        free(plain);
        free(g);
    }
}

/* At sizes with fewer rows the last tile may have none; its wait is for copies of others too. */
static void tiles_without_rows_wait_for_others(void **state) {
    (void)state;
    static const uint64_t seeds[] = {127, 378}; // wrong without it
    tally t;
    memset(&t, 0, sizeof t);
    for (size_t k = 0; k < sizeof seeds / sizeof seeds[0]; ++k) {
        expect_waits(seeds[k], &t);
    }
}

// ------------------------------------------------------------------------------------------------
// a head with a loss: products, and a loss for each row

enum { HEAD_ROWS = 24, HEAD_IN = 4, HEAD_OUT = 64, HEAD_WIDE = HEAD_ROWS * HEAD_OUT };

/* What a layer of the head does wrong. */
typedef enum lie {
    TELLS_TRUTH,
    READS_NEXT_ROW,  // beyond its tile
    KEEPS_SIZES,     // of the whole layer, in place of those of the views
    COUNTS_FROM_0,   // numbers its rows without row_begin
    IS_A_MEAN,       // over all rows
    DROPS_OTHER_SUMS // of the gradient of its param: sets it where beta is 1
} lie;

typedef struct head {
    ms_model *model;
    ms_tensor in, mid, logits, loss, target, w0, w1;
    ms_layer first, second, last;
    lie tells;
} head;

/* out = in W, and, of the second layer, what the lie adds to it. */
static int head_product(const ms_call *call) {
    const head *h = (const head *)call->user;
    const ms_matrix in = ms_matrix_of(&call->in[0]), out = ms_matrix_of(&call->out[0]);
    const float *x = t_data(&call->in[0]), *w = t_data(&call->param[0]);
    const bool wide = out.cols == HEAD_OUT;
    const int64_t rows = wide && h->tells == KEEPS_SIZES ? (int64_t)HEAD_ROWS : out.rows;
    float sum = 0.0f;
    for (int64_t i = 0; i < in.rows * in.cols; ++i) {
        sum += x[i];
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < out.cols; ++c) {
            float y = 0.0f;
            for (int64_t k = 0; k < in.cols; ++k) {
                const int64_t row = wide && h->tells == READS_NEXT_ROW ? (r + 1) % HEAD_ROWS : r;
                y += x[row * in.cols + k] * w[k * out.cols + c];
            }
            y += wide && h->tells == COUNTS_FROM_0 ? (float)r : 0.0f;
            y += wide && h->tells == IS_A_MEAN ? sum / (float)in.rows : 0.0f;
            t_data(&call->out[0])[r * out.cols + c] = y;
        }
    }
    return 0;
}

static int head_product_backward(const ms_call *call) {
    const head *h = (const head *)call->user;
    const ms_matrix in = ms_matrix_of(&call->in[0]), dy = ms_matrix_of(&call->grad_out[0]);
    const float *x = t_data(&call->in[0]), *w = t_data(&call->param[0]);
    const float *d = t_data(&call->grad_out[0]);
    const bool forgets = dy.cols == HEAD_OUT && h->tells == DROPS_OTHER_SUMS;
    for (int64_t k = 0; k < in.cols; ++k) {
        for (int64_t c = 0; c < dy.cols; ++c) {
            float sum = 0.0f;
            for (int64_t r = 0; r < dy.rows; ++r) {
                sum += x[r * in.cols + k] * d[r * dy.cols + c];
            }
            if (forgets) {
                t_data(&call->grad_param[0])[k * dy.cols + c] = sum;
            } else {
                t_contribute(&call->grad_param[0], k * dy.cols + c, sum);
            }
        }
    }
    for (int64_t r = 0; r < dy.rows; ++r) {
        for (int64_t k = 0; k < in.cols; ++k) {
            float sum = 0.0f;
            for (int64_t c = 0; c < dy.cols; ++c) {
                sum += d[r * dy.cols + c] * w[k * dy.cols + c];
            }
            t_contribute(&call->grad_in[0], r * in.cols + k, sum);
        }
    }
    return 0;
}

/* The loss of a row: the squares of its elements, less the target. */
static int head_loss(const ms_call *call) {
    const ms_matrix in = ms_matrix_of(&call->in[0]);
    for (int64_t r = 0; r < in.rows; ++r) {
        float sum = 0.0f;
        for (int64_t c = 0; c < in.cols; ++c) {
            const float x = t_data(&call->in[0])[r * in.cols + c] - t_data(&call->in[1])[r];
            sum += 0.5f * x * x;
        }
        t_data(&call->out[0])[r] = sum;
    }
    return 0;
}

static int head_loss_backward(const ms_call *call) {
    const ms_matrix in = ms_matrix_of(&call->in[0]);
    for (int64_t r = 0; r < in.rows; ++r) {
        for (int64_t c = 0; c < in.cols; ++c) {
            const int64_t i = r * in.cols + c;
            const float x = t_data(&call->in[0])[i] - t_data(&call->in[1])[r];
            t_contribute(&call->grad_in[0], i, x * t_data(&call->grad_out[0])[r]);
        }
    }
    return 0;
}

static void head_create(head *h, const ms_config *config, lie told) {
    memset(h, 0, sizeof *h);
    h->tells = told;
    t_ok(h->model, ms_create(config, &h->model));
    ms_model *m = h->model;
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    h->in = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(HEAD_ROWS, HEAD_IN));
    h->target = ms_input(m, "target", MS_DTYPE_F32, ms_shape1(HEAD_ROWS));
    h->w0 = ms_param(m, "w0", MS_DTYPE_F32, ms_shape2(HEAD_IN, HEAD_IN));
    h->w1 = ms_param(m, "w1", MS_DTYPE_F32, ms_shape2(HEAD_IN, HEAD_OUT));
    h->mid = ms_activation(m, "mid", MS_DTYPE_F32, ms_shape2(HEAD_ROWS, HEAD_IN));
    h->logits = ms_activation(m, "logits", MS_DTYPE_F32, ms_shape2(HEAD_ROWS, HEAD_OUT));
    h->loss = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(HEAD_ROWS));
    d.user = h;
    d.name = "body";
    d.forward = head_product;
    d.backward = head_product_backward;
    d.backward_reads.in = d.backward_reads.param = 1;
    d.in[0] = h->in;
    d.param[0] = h->w0;
    d.out[0] = h->mid;
    h->first = ms_register_layer(m, &d);
    d.name = "head";
    d.tile.axes = 1;
    d.tile.preferred = 4;
    d.in[0] = h->mid;
    d.param[0] = h->w1;
    d.out[0] = h->logits;
    h->second = ms_register_layer(m, &d);
    memset(&d, 0, sizeof d);
    d.user = h;
    d.name = "loss";
    d.tile.axes = 1;
    d.tile.preferred = 4;
    d.forward = head_loss;
    d.backward = head_loss_backward;
    d.in[0] = h->logits;
    d.in[1] = h->target;
    d.out[0] = h->loss;
    d.grad_in_place[0].in = 1;
    h->last = ms_register_layer(m, &d);
    ms_set_loss(m, h->loss);
    const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
    ms_set_optimizer(m, &sgd);
}

static void head_force(head *h) {
    ms_set_layer_technique(h->model, h->second, MS_TECHNIQUE_TILING, MS_SWITCH_ON);
    ms_set_layer_technique(h->model, h->last, MS_TECHNIQUE_TILING, MS_SWITCH_ON);
}

static void head_write(head *h, uint64_t seed) {
    float values[HEAD_WIDE];
    t_rng rng = t_seed(seed);
    const ms_tensor all[] = {h->in, h->target, h->w0, h->w1};
    for (int k = 0; k < 4; ++k) {
        t_fill(&rng, values, ms_tensor_count(h->model, all[k]), 1.0f);
        t_ok(h->model, ms_write(h->model, all[k], values));
    }
}

/* Six tiles of four rows: what the head hands to the loss has memory for one of them, and the group
   recomputes nothing. Its gradients are those of the plain plan up to rounding. */
static void a_group_that_ends_in_the_loss_sweeps(void **state) {
    (void)state;
    head plain, tiled;
    ms_config config = t_config();
    ms_memory_report a, b;
    head_create(&plain, &config, TELLS_TRUTH);
    head_create(&tiled, &config, TELLS_TRUTH);
    head_force(&tiled);
    t_ok(plain.model, ms_wrap(plain.model));
    t_ok(tiled.model, ms_wrap(tiled.model));
    t_report(plain.model, &a);
    t_report(tiled.model, &b);
    const uint64_t logits = HEAD_WIDE * sizeof(float);
    assert_int_equal(b.recompute_count, 0);
    assert_true(b.arena_bytes < a.arena_bytes - logits * 3 / 4);
    const msi_program *p = &tiled.model->run.plan->train;
    for (uint32_t k = 0; k < p->code.ranges.count; ++k) { // values, and gradients in their place
        const bool of_logits =
            p->code.ranges.items[k].tensor == msi_index(&tiled.model->graph, tiled.logits);
        assert_true(!of_logits || p->code.ranges.items[k].role == MSI_ROLE_WORKSPACE ||
                    p->code.ranges.items[k].bytes == logits / 6);
    }
    double x, y;
    for (uint64_t step = 0; step < 3; ++step) {
        head_write(&plain, step);
        head_write(&tiled, step);
        t_ok(plain.model, ms_forward(plain.model, &x));
        t_ok(tiled.model, ms_forward(tiled.model, &y));
        assert_true(x == y); // rows are not summed within a tile
        t_ok(plain.model, ms_backward(plain.model));
        t_ok(tiled.model, ms_backward(tiled.model));
        float g0[HEAD_WIDE], g1[HEAD_WIDE];
        t_ok(plain.model, ms_read(plain.model, ms_gradient(plain.model, plain.w1), g0));
        t_ok(tiled.model, ms_read(tiled.model, ms_gradient(tiled.model, tiled.w1), g1));
        for (int i = 0; i < HEAD_IN * HEAD_OUT; ++i) {
            assert_true(fabsf(g0[i] - g1[i]) <= 1e-5f * (1.0f + fabsf(g0[i])));
        }
        t_ok(plain.model, ms_update(plain.model));
        t_ok(tiled.model, ms_update(tiled.model));
    }
    ms_verify_report verified;
    t_ok(tiled.model, ms_verify(tiled.model, NULL, NULL, &verified));
    assert_true(verified.absolute < 1e-4 && verified.plain_loss == verified.wrapped_loss);
    ms_destroy(plain.model);
    ms_destroy(tiled.model);
}

/* A forward of a later micro-batch that no backward follows has added to the gradients. */
static void a_forward_given_up_is_told(void **state) {
    (void)state;
    head h;
    double loss;
    ms_config config = t_config();
    config.accumulation_steps = 3;
    head_create(&h, &config, TELLS_TRUTH);
    head_force(&h);
    t_ok(h.model, ms_wrap(h.model));
    head_write(&h, 1);
    t_ok(h.model, ms_forward(h.model, &loss));
    t_ok(h.model, ms_forward(h.model, &loss)); // the first begins anew
    t_ok(h.model, ms_backward(h.model));
    t_ok(h.model, ms_forward(h.model, &loss));
    head_write(&h, 2); // ends it
    t_error(h.model, ms_forward(h.model, &loss), MS_RESULT_ORDER);
    t_text_has(ms_last_error(h.model), "begins anew");
    float gradient[HEAD_WIDE], expected[HEAD_WIDE];
    t_ok(h.model, ms_forward(h.model, &loss));
    t_ok(h.model, ms_backward(h.model));
    t_ok(h.model, ms_forward(h.model, &loss));
    t_ok(h.model, ms_eval(h.model, &loss)); // ends the forward too
    t_error(h.model, ms_forward(h.model, &loss), MS_RESULT_ORDER);
    for (int micro = 0; micro < 3; ++micro) { // the step that follows is as if nothing had been
        t_ok(h.model, ms_forward(h.model, &loss));
        t_ok(h.model, ms_backward(h.model));
    }
    t_ok(h.model, ms_read(h.model, ms_gradient(h.model, h.w1), gradient));
    head other;
    head_create(&other, &config, TELLS_TRUTH);
    head_force(&other);
    t_ok(other.model, ms_wrap(other.model));
    head_write(&other, 2);
    for (int micro = 0; micro < 3; ++micro) {
        t_ok(other.model, ms_forward(other.model, &loss));
        t_ok(other.model, ms_backward(other.model));
    }
    t_ok(other.model, ms_read(other.model, ms_gradient(other.model, other.w1), expected));
    assert_memory_equal(gradient, expected, HEAD_IN * HEAD_OUT * sizeof(float));
    ms_destroy(other.model);
    ms_destroy(h.model);
}

/* Debug mode names a layer whose rows are not independent, whatever the plan. */
static void layers_that_lie_about_rows_are_named(void **state) {
    (void)state;
    static const struct {
        lie told;
        const char *text;
    } lies[] = {{READS_NEXT_ROW, "out[0]"},
                {KEEPS_SIZES, ""},
                {COUNTS_FROM_0, "makes other numbers in tiles of"},
                {IS_A_MEAN, "makes other numbers in tiles of"},
                {DROPS_OTHER_SUMS, "grad_param[0]"}};
    for (size_t k = 0; k < sizeof lies / sizeof lies[0]; ++k) {
        for (int forced = 0; forced < 2; ++forced) {
            head h;
            ms_config config = t_config();
            config.debug = true;
            head_create(&h, &config, lies[k].told);
            if (forced && lies[k].told != KEEPS_SIZES) {
                ms_set_layer_technique(h.model, h.last, MS_TECHNIQUE_TILING, MS_SWITCH_ON);
            }
            t_ok(h.model, ms_wrap(h.model));
            head_write(&h, 5);
            double loss;
            const ms_result result = ms_step(h.model, &loss);
            assert_int_equal(result, MS_RESULT_CONTRACT);
            t_text_has(ms_last_error(h.model), "\"head\"");
            t_text_has(ms_last_error(h.model), lies[k].text);
            ms_destroy(h.model);
        }
    }
}

static void honest_layers_pass_debug_mode(void **state) {
    (void)state;
    for (int forced = 0; forced < 2; ++forced) {
        head h;
        double loss;
        ms_config config = t_config();
        config.debug = true;
        head_create(&h, &config, TELLS_TRUTH);
        if (forced) {
            head_force(&h);
        }
        t_ok(h.model, ms_wrap(h.model));
        for (uint64_t step = 0; step < 2; ++step) {
            head_write(&h, step);
            t_ok(h.model, ms_step(h.model, &loss));
        }
        ms_destroy(h.model);
    }
}

// ------------------------------------------------------------------------------------------------
// what plans say, and what is refused

typedef struct seen {
    uint32_t tiles, groups, events, rows;
} seen;

static void see_decision(const ms_decision *d, void *user) {
    seen *s = (seen *)user;
    if (d->technique == MS_TECHNIQUE_TILING && d->is_applied) {
        s->tiles += d->tile_count == 6 && d->tile_rows == 4;
        s->groups += d->group_first.id == d->layer.id;
        assert_string_equal(d->rule->id, "forced");
    }
}

static void see_event(const ms_event *event, void *user) {
    seen *s = (seen *)user;
    if (event->row_total > 0 && event->layer.id) {
        s->events++;
        s->rows += (uint32_t)event->row_count;
        assert_int_equal(event->row_total, HEAD_ROWS);
        for (uint32_t k = 0; k < event->operand_count; ++k) {
            const ms_event_operand *o = &event->operands[k];
            const bool param = o->kind == MS_OPERAND_PARAM || o->kind == MS_OPERAND_GRAD_PARAM;
            assert_true(o->tensor.id == 0 || o->is_part == !param);
        }
    }
}

static void plans_say_what_is_in_tiles(void **state) {
    (void)state;
    head h;
    seen s;
    const ms_config config = t_config();
    memset(&s, 0, sizeof s);
    head_create(&h, &config, TELLS_TRUTH);
    head_force(&h);
    t_ok(h.model, ms_wrap(h.model));
    t_ok(h.model, ms_visit_decisions(h.model, see_decision, &s));
    assert_int_equal(s.tiles, 2);
    assert_int_equal(s.groups, 1);
    t_ok(h.model, ms_visit_events(h.model, MS_PROGRAM_TRAIN, see_event, &s));
    assert_int_equal(s.events, 4 * 6); // both layers, forward and backward
    assert_int_equal(s.rows, 4 * HEAD_ROWS);
    t_text text;
    memset(&text, 0, sizeof text);
    t_ok(h.model, ms_print_plan(h.model, t_append, &text));
    t_text_has(text.data, "6 x 4");
    t_text_has(text.data, "^6 x 4");
    t_ok(h.model, ms_print_program(h.model, MS_PROGRAM_TRAIN, t_append, &text));
    t_text_has(text.data, "rows 20+4 of 24");
    free(text.data);
    ms_destroy(h.model);
}

typedef struct tile_counts {
    uint32_t events[2];
    ms_decision of[2];
} tile_counts;

static void count_tiles(const ms_event *event, void *user) {
    tile_counts *c = (tile_counts *)user;
    if (event->kind == MS_EVENT_FORWARD) {
        c->events[event->layer_index] += 1;
    }
}

static void keep_tiling(const ms_decision *d, void *user) {
    if (d->technique == MS_TECHNIQUE_TILING) {
        ((tile_counts *)user)->of[d->layer_index] = *d;
    }
}

/* A product and its loss with any number of rows, in tiles of any: the plan says as many tiles as there
   are calls in forward, whether or not the last is smaller. */
static void plans_count_the_last_tile(void **state) {
    (void)state;
    for (int64_t rows = 2; rows <= 24; rows += 1 + rows % 3) {
        for (int64_t tile = 1; tile <= 7; tile += 2) {
            tile_counts c;
            ms_config config = t_config();
            ms_model *m;
            ms_layer_desc d;
            config.dry_run = true;
            memset(&c, 0, sizeof c);
            memset(&d, 0, sizeof d);
            t_ok(m, ms_create(&config, &m));
            d.name = "layer";
            d.forward = d.backward = t_nothing;
            d.tile.axes = 1;
            d.tile.preferred = tile;
            d.in[0] = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(rows, 4));
            d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(4));
            d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(rows, 4));
            ms_set_layer_technique(m, ms_register_layer(m, &d), MS_TECHNIQUE_TILING, MS_SWITCH_ON);
            d.in[0] = d.out[0];
            d.param[0].id = 0;
            d.out[0] = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(rows));
            ms_set_layer_technique(m, ms_register_layer(m, &d), MS_TECHNIQUE_TILING, MS_SWITCH_ON);
            ms_set_loss(m, d.out[0]);
            t_ok(m, ms_wrap(m));
            t_ok(m, ms_visit_decisions(m, keep_tiling, &c));
            t_ok(m, ms_visit_events(m, MS_PROGRAM_TRAIN, count_tiles, &c));
            for (int i = 0; i < 2; ++i) {
                const uint64_t count = c.of[i].tile_count, size = c.of[i].tile_rows;
                assert_true(c.of[i].is_applied && count == c.events[i] && size <= (uint64_t)tile);
                assert_true(count * size >= (uint64_t)rows && (count - 1) * size < (uint64_t)rows);
            }
            ms_destroy(m);
        }
    }
}

/* In as many tiles as leave each the smallest number of rows, rounded up to those that stay together. */
static void tiles_are_never_smaller_than_declared(void **state) {
    (void)state;
    for (int64_t multiple = 1; multiple <= 4; ++multiple) {
        for (int64_t smallest = 0; smallest <= 12; ++smallest) {
            ms_model *m;
            ms_layer_desc d;
            ms_config config = t_config();
            config.dry_run = true;
            t_ok(m, ms_create(&config, &m));
            memset(&d, 0, sizeof d);
            d.forward = d.backward = t_nothing;
            d.tile.axes = 1;
            d.tile.multiple = multiple;
            d.tile.smallest = smallest;
            d.in[0] = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(24, 4));
            d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(24, 4));
            ms_register_layer(m, &d);
            int64_t least = multiple;
            while (least < smallest) {
                least += multiple;
            }
            assert_int_equal(msi_most_tiles(&m->graph, 0, 1), 24 / least);
            ms_destroy(m);
        }
    }
}

/* Which rows of a layer were computed in forward, and in backward. */
typedef struct computed {
    int64_t rows;
    uint64_t done[2];
    uint32_t calls[2], faults;
} computed;

static int compute_rows(const ms_call *call) {
    computed *c = (computed *)call->user;
    const bool back = call->phase == MS_PHASE_BACKWARD;
    const bool inside =
        call->row_begin >= 0 && call->row_count > 0 && call->row_begin + call->row_count <= c->rows;
    const uint64_t rows = inside ? (((uint64_t)1 << call->row_count) - 1) << call->row_begin : 0;
    c->faults += !inside || (call->phase != MS_PHASE_RECOMPUTE && (c->done[back] & rows) != 0);
    c->done[back] |= rows;
    c->calls[back]++;
    for (int64_t i = 0; !back && i < t_count(&call->out[0]); ++i) {
        t_data(&call->out[0])[i] = 0.0f;
    }
    for (int64_t i = 0; call->grad_in[0].data != NULL && i < t_count(&call->grad_in[0]); ++i) {
        t_contribute(&call->grad_in[0], i, 0.0f);
    }
    for (int64_t i = 0; call->grad_param[0].data != NULL && i < t_count(&call->grad_param[0]);
         ++i) {
        t_contribute(&call->grad_param[0], i, 0.0f);
    }
    return 0;
}

/* Tokens, then whole sequences, of which there are fewer, in one group: each is told which of its own
   rows it computes, and all are computed once. */
static void rows_are_numbered_by_layer(void **state) {
    (void)state;
    for (int64_t sequences = 2; sequences <= 7; ++sequences) {
        enum { TOKENS = 4 };
        computed of[2];
        ms_config config = t_config();
        ms_model *m;
        ms_layer_desc d;
        memset(of, 0, sizeof of);
        memset(&d, 0, sizeof d);
        t_ok(m, ms_create(&config, &m));
        d.name = "layer";
        d.forward = d.backward = compute_rows;
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(4));
        d.in[0] = ms_input(m, "x", MS_DTYPE_F32, ms_shape3(sequences, TOKENS, 4));
        for (int i = 0; i < 2; ++i) {
            of[i].rows = i == 0 ? sequences * TOKENS : sequences;
            d.user = &of[i];
            d.tile.axes = i == 0 ? 2 : 1;
            d.out[0] =
                ms_activation(m, "y", MS_DTYPE_F32,
                              i == 0 ? ms_shape3(sequences, TOKENS, 4) : ms_shape1(sequences));
            ms_set_layer_technique(m, ms_register_layer(m, &d), MS_TECHNIQUE_TILING, MS_SWITCH_ON);
            d.in[0] = d.out[0];
            d.param[0].id = 0;
        }
        ms_set_loss(m, d.out[0]);
        t_ok(m, ms_wrap(m));
        t_write_zeros(m);
        t_ok(m, ms_step(m, NULL));
        for (int i = 0; i < 2; ++i) {
            const uint64_t all = ((uint64_t)1 << of[i].rows) - 1;
            assert_true(of[i].faults == 0 && of[i].done[0] == all && of[i].done[1] == all);
            assert_true(of[i].calls[0] > 1 && of[i].calls[1] > 1);
        }
        ms_destroy(m);
    }
}

/* How often a training program brings a param from the host as it is lowered. What lands may stay for
   later uses, which hides it in a schedule, unless these are far away. */
static uint32_t fetches_of(const ms_model *m, ms_tensor param) {
    const msi_plan *plan = m->run.plan;
    const uint32_t t = msi_index(&m->graph, param), home = m->run.store->resident_of[t];
    msi_program *p = &m->run.plan->train;
    msi_lowering w;
    uint32_t fetches = 0;
    assert_true(
        msi_lowering_init(&w, &m->graph, m->run.store, &m->optimizers, &m->config.allocator));
    msi_lower_train(&w, plan->decisions, p);
    assert_false(p->out_of_memory);
    msi_lowering_free(&w);
    for (uint32_t k = 0; k < p->code.instructions.count; ++k) {
        const msi_instruction *i = &p->code.instructions.items[k];
        fetches += i->op == MSI_OP_COPY && i->target == t && i->operand_count >= 2 &&
                   p->code.operands.items[i->operand_first + 1].range == home;
    }
    return fetches;
}

/* Groups in tiles are blocks of a program too, which are repeated where decisions change elsewhere. */
static void changed_decisions_lead_to_the_same_program(void **state) {
    (void)state;
    static repeats r;
    memset(&r, 0, sizeof r);
    for (uint64_t seed = first_seed(); seed < end_seed(QUICK_GRAPHS, GRAPHS / 10); ++seed) {
        const ms_config config = t_config();
        rt_graph *g = rt_generate(seed);
        for (uint32_t i = 0; i < g->layer_count; ++i) {
            g->layer[i].desc.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
        }
        rt_net *n = rt_net_create(g, &config, NULL, NULL);
        t_ok(n->model, ms_wrap(n->model));
        repeats_check(&r, n->model, seed, 24);
        rt_net_destroy(n);
        free(g);
    }
    assert_true(r.repeated > r.ranges / 2);
}

/* A param on the host comes once for all tiles: for forward and for backward, or for the sweep; and
   for the update. */
static void params_come_once_for_a_group(void **state) {
    (void)state;
    static const uint32_t expected[] = {3, 3, 2};
    for (int tiled = 0; tiled < 3; ++tiled) {
        head h;
        const ms_config config = t_config();
        head_create(&h, &config, TELLS_TRUTH);
        ms_set_layer_technique(h.model, h.second, MS_TECHNIQUE_TILING,
                               tiled > 0 ? MS_SWITCH_ON : MS_SWITCH_OFF);
        ms_set_layer_technique(h.model, h.last, MS_TECHNIQUE_TILING,
                               tiled > 1 ? MS_SWITCH_ON : MS_SWITCH_OFF);
        ms_set_tensor_technique(h.model, h.w1, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        t_ok(h.model, ms_wrap(h.model));
        assert_int_equal(h.model->run.plan->train.code.sweeps, tiled == 2);
        assert_int_equal(fetches_of(h.model, h.w1), expected[tiled]);
        ms_destroy(h.model);
    }
}

static void wrong_declarations_are_refused(void **state) {
    (void)state;
    static const char *const texts[] = {
        "tile.axes is 0",    "larger than the rank",      "numbers of rows", "a layer with state",
        "not a multiple of", "cannot be cut into 8 rows", "whole_in",        "names slot"};
    for (size_t k = 0; k < sizeof texts / sizeof texts[0]; ++k) {
        ms_model *m;
        ms_config config = t_config();
        ms_layer_desc d;
        config.dry_run = true;
        t_ok(m, ms_create(&config, &m));
        memset(&d, 0, sizeof d);
        d.in[0] = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(k == 5 ? 3 : 8, 4));
        d.in[1] = ms_input(m, "y", MS_DTYPE_F32, ms_shape2(8, 4));
        d.out[0] = ms_activation(m, "out", MS_DTYPE_F32, ms_shape2(8, 4));
        d.tile.axes = k == 0 ? 0 : k == 1 ? 3 : 1;
        d.tile.multiple = k == 0 ? 2 : k == 4 ? 3 : 0;
        d.tile.smallest = k == 2 ? -1 : 0;
        d.state[0] = k == 3 ? ms_buffer(m, "state", MS_DTYPE_F32, ms_shape1(4)) : d.state[0];
        d.must_in_place = k == 6;
        d.in_place[0] = k == 6 ? 2 : 0;
        d.tile.whole_in = k == 6 ? 2 : k == 7 ? 8 : 0;
        ms_register_layer(m, &d);
        t_text_has(ms_last_error(m), texts[k]);
        ms_destroy(m);
    }
}

/* Layers of rows that take 10 us each way for each row, and make zeros. */
typedef struct timed_net {
    ms_model *model;
    ms_layer layers[3];
    double now_us;
} timed_net;

enum { TIMED_ROWS = 32, TIMED_COLS = 8 };

static double timed_clock(void *user) {
    return ((const timed_net *)user)->now_us;
}

static void make_zeros(const ms_view *view) {
    if (view->data != NULL) {
        memset(view->data, 0, (size_t)((uint64_t)t_count(view) * ms_dtype_bytes(view->dtype)));
    }
}

static int timed_call(const ms_call *call) {
    const bool backward = call->phase == MS_PHASE_BACKWARD;
    ((timed_net *)call->user)->now_us += 10.0 * (double)call->row_count;
    make_zeros(backward ? &call->grad_in[0] : &call->out[0]);
    if (backward) {
        make_zeros(&call->grad_param[0]);
    }
    return 0;
}

static void timed_start(timed_net *n, const ms_config *with, int64_t smallest) {
    ms_config config = *with;
    memset(n, 0, sizeof *n);
    config.clock = timed_clock;
    config.clock_user = n;
    t_ok(n->model, ms_create(&config, &n->model));
    ms_tensor in = ms_input(n->model, "in", MS_DTYPE_F32, ms_shape2(TIMED_ROWS, TIMED_COLS));
    for (int i = 0; i < 3; ++i) {
        const int64_t rows = i == 1 ? TIMED_ROWS / 4 : TIMED_ROWS; // of one group, in other shapes
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.user = n;
        d.forward = d.backward = timed_call;
        d.in[0] = in;
        d.param[0] = ms_param(n->model, "w", MS_DTYPE_F32, ms_shape2(TIMED_COLS, TIMED_COLS));
        d.out[0] = in = ms_activation(n->model, "out", MS_DTYPE_F32,
                                      i == 2 ? ms_shape1(rows)
                                             : ms_shape2(rows, TIMED_COLS * TIMED_ROWS / rows));
        d.tile.axes = 1;
        d.tile.multiple = 1 + (i == 1);
        d.tile.smallest = i == 1 ? smallest : 0;
        d.dtypes.accepts = i < 2 ? 1u << MS_DTYPE_BF16 : 0;
        n->layers[i] = ms_register_layer(n->model, &d);
    }
    ms_set_loss(n->model, in);
    const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
    ms_set_optimizer(n->model, &sgd);
}

static void timed_force(timed_net *n, ms_technique technique) {
    for (int i = 0; i < 2; ++i) {
        ms_set_layer_technique(n->model, n->layers[i], technique, MS_SWITCH_ON);
    }
}

/* What is measured of calls in 16 bits is kept as if of one call in F32, however many tiles there
   are; so a call in 16 bits is predicted to take what it took. */
static void times_that_are_measured_in_tiles_are_scaled_once(void **state) {
    (void)state;
    double forward_us[2][2];
    for (int in_tiles = 0; in_tiles < 2; ++in_tiles) {
        timed_net n;
        ms_config config = t_config();
        double loss;
        config.empirical_profiling = MS_SWITCH_ON;
        config.mixed_precision = MS_SWITCH_ON;
        timed_start(&n, &config, 0);
        timed_force(&n, MS_TECHNIQUE_MIXED_PRECISION);
        if (in_tiles) {
            timed_force(&n, MS_TECHNIQUE_TILING);
        }
        t_ok(n.model, ms_wrap(n.model));
        const msi_program *p = &n.model->run.plan->train;
        uint32_t tiles = 0;
        for (uint32_t k = 0; k < p->code.instructions.count; ++k) {
            const msi_instruction *i = &p->code.instructions.items[k];
            tiles += i->op == MSI_OP_FORWARD && i->target == 1;
            assert_true(i->op != MSI_OP_FORWARD || i->target == 2 ||
                        msi_is_narrow((msi_format)i->format));
        }
        assert_true(in_tiles ? tiles > 1 : tiles == 1);
        t_write_zeros(n.model);
        for (int step = 0; step < 6; ++step) {
            t_ok(n.model, ms_step(n.model, &loss));
        }
        for (int i = 0; i < 2; ++i) {
            const msi_layer *l = &n.model->graph.layers.items[i];
            const double rows = i == 1 ? TIMED_ROWS / 4 : TIMED_ROWS;
            forward_us[in_tiles][i] = l->measured.forward_us;
            assert_true(forward_us[in_tiles][i] > 0.0);
            assert_true(fabs(l->time[MSI_FORMAT_BF16].forward_us / (10.0 * rows) - 1.0) < 1e-9);
            assert_true(fabs(l->time[MSI_FORMAT_BF16].backward_us / (10.0 * rows) - 1.0) < 1e-9);
        }
        ms_destroy(n.model);
    }
    for (int i = 0; i < 2; ++i) {
        assert_true(fabs(forward_us[1][i] / forward_us[0][i] - 1.0) < 1e-9);
    }
}

/* A layer that wants more rows in a tile than there are is in no more tiles for that. */
static void tiles_of_more_rows_than_there_are(void **state) {
    (void)state;
    static const int64_t smallest[] = {TIMED_ROWS / 4, TIMED_ROWS, (int64_t)1 << 62, INT64_MAX};
    for (size_t k = 0; k < sizeof smallest / sizeof smallest[0]; ++k) {
        timed_net n;
        ms_config config = t_config();
        config.dry_run = true;
        timed_start(&n, &config, smallest[k]);
        timed_force(&n, MS_TECHNIQUE_TILING);
        assert_int_equal(msi_most_tiles(&n.model->graph, 0, 2), 1);
        t_ok(n.model, ms_wrap(n.model));
        ms_destroy(n.model);
    }
}

/* Every allocation of ms_wrap fails once: it says so, and what comes after is as if it had not been
   called. */
static void plans_in_tiles_fail_cleanly(void **state) {
    (void)state;
    t_heap heap;
    t_failing f = t_failing_heap(&heap);
    memset(&heap, 0, sizeof heap);
    while (t_next_failure(&f, 1 + f.at / 64)) { // all of the first, some of many
        head h;
        double loss;
        ms_config config = t_config();
        config.allocator = t_heap_allocator(&heap);
        config.tiling = MS_SWITCH_ON;
        config.force_optimize = true;
        head_create(&h, &config, TELLS_TRUTH);
        t_arm(&f);
        const ms_result result = ms_wrap(h.model);
        t_failed(&f, h.model, result);
        t_ok(h.model, ms_wrap(h.model));
        head_write(&h, 1);
        t_ok(h.model, ms_step(h.model, &loss));
        ms_destroy(h.model);
    }
    assert_true(f.error_count > 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_change_no_sum),
        cmocka_unit_test(what_a_group_cuts_is_whole_in_the_next),
        cmocka_unit_test(tiles_wait_for_all_they_need),
        cmocka_unit_test(what_the_planner_moves_in_parts_keeps_its_bits),
        cmocka_unit_test(outputs_of_eval_are_kept),
        cmocka_unit_test(tiles_without_rows_wait_for_others),
        cmocka_unit_test(tiles_are_verified),
        cmocka_unit_test(groups_are_as_defined),
        cmocka_unit_test(decided_groups_are_found),
        cmocka_unit_test(programs_are_those_of_their_decisions),
        cmocka_unit_test(a_group_that_ends_in_the_loss_sweeps),
        cmocka_unit_test(a_forward_given_up_is_told),
        cmocka_unit_test(layers_that_lie_about_rows_are_named),
        cmocka_unit_test(honest_layers_pass_debug_mode),
        cmocka_unit_test(plans_say_what_is_in_tiles),
        cmocka_unit_test(plans_count_the_last_tile),
        cmocka_unit_test(tiles_are_never_smaller_than_declared),
        cmocka_unit_test(rows_are_numbered_by_layer),
        cmocka_unit_test(params_come_once_for_a_group),
        cmocka_unit_test(changed_decisions_lead_to_the_same_program),
        cmocka_unit_test(wrong_declarations_are_refused),
        cmocka_unit_test(times_that_are_measured_in_tiles_are_scaled_once),
        cmocka_unit_test(tiles_of_more_rows_than_there_are),
        cmocka_unit_test(plans_in_tiles_fail_cleanly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
