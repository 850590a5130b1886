/*  test_tiles.c - layers that are computed in tiles of rows: random graphs of whole numbers, whose
    plans in tiles give the bits of the plain one. MEMSCALE_TEST_DAGS sets how many graphs there are,
    MEMSCALE_TEST_SEED which is the first. */
#define MEMSCALE_IMPLEMENTATION
#include "../memscale.h"
#include "toy_layers.h"
#include "random_tiles.h"
#include "virtual.h"

enum { QUICK_GRAPHS = 600, GRAPHS = 20000 };

static uint64_t first_seed(void) {
    return t_environment("MEMSCALE_TEST_SEED", 1);
}

static uint64_t end_seed(uint64_t quick, uint64_t full) {
    return first_seed() + t_environment("MEMSCALE_TEST_DAGS", t_sweep(quick, full));
}

// ------------------------------------------------------------------------------------------------
// random graphs: the bits of the plain plan

typedef struct tally {
    uint32_t graphs, tiled, sweeps, again, moved, half;
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
        if (g->value[v].role == RT_TRAINED && g->optimizer.kind == MS_OPTIMIZER_ADAMW) {
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
                OK(nets[k], ms_step(nets[k]->model, &loss[k]));
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
    bool tiled = false, again = false, sweeps = false;
    for (uint32_t i = 0; i < p->instructions.count; ++i) {
        const msi_instruction *at = &p->instructions.items[i];
        tiled |= at->rows.of > 0 && at->rows.count < at->rows.of;
        again |= at->rows.of > 0 && msi_is_again((msi_op)at->op);
        sweeps |= at->rows.of > 0 && i < p->forward_end && at->op == MSI_OP_BACKWARD;
    }
    t->graphs++;
    t->tiled += tiled;
    t->again += again;
    t->sweeps += sweeps;
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
    print_message("%u graphs: %u in tiles, %u recompute tiles, %u sweep; %u values moved, %u in 16 "
                  "bits\n",
                  (unsigned)t->graphs, (unsigned)t->tiled, (unsigned)t->again, (unsigned)t->sweeps,
                  (unsigned)t->moved, (unsigned)t->half);
    assert_true(t->graphs < 100 || (t->tiled * 2 > t->graphs && t->again * 10 > t->graphs &&
                                    t->sweeps * 10 > t->graphs && t->moved > 0 && t->half > 0));
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

/* ms_verify finds no difference, and ms_find_nonfinite nothing, in random plans in tiles. */
static void tiles_are_verified(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS / 4, GRAPHS / 4);
    uint32_t found = 0;
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
        }
        rt_net_destroy(n);
        free(g);
    }
    assert_true(found > 0);
}

static ms_layer_desc run_late(void *layers, uint32_t layer, const ms_layer_desc *desc) {
    return v_wrap(desc, (v_layer *)layers + layer);
}

static void tiles_wait_for_all_they_need(void **state) {
    (void)state;
    static v_layer layers[RT_LAYERS];
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS);
    tally t;
    memset(&t, 0, sizeof t);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        v_device device;
        ms_config config = random_config(seed);
        config.debug = false;
        v_open(&device, seed);
        config.backend = v_backend(&device);
        expect_same_bits(rt_generate(seed), &config, run_late, layers, &t);
        assert_int_equal(device.callback_error, 0);
        assert_int_equal(device.overtaken, 0);
        v_close(&device);
    }
    expect_coverage(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_change_no_sum),
        cmocka_unit_test(tiles_wait_for_all_they_need),
        cmocka_unit_test(tiles_are_verified),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
