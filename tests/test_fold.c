/*  test_fold.c - planning large graphs by a fold: which blocks are equal, what graph the fold is, what its
    decisions become in the whole; and that plans of 1,500 layers are as good as those of 100. */
#include "private.h"
#include "testing.h"
#include "toy_layers.h"
#include "../bench/nets.h"

enum { FOLD_LAYERS = 1500 };

/* A net on a device with a link of its own, wrapped without a limit. */
static ms_model *fold_net_of(net_kind kind, uint32_t layers, uint64_t seed, double gb_per_s) {
    ms_hardware device = *ms_hardware_find("RTX 3090");
    ms_config config;
    ms_model *m;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.memory_budget_bytes = UINT64_MAX;
    config.max_host_bytes = (uint64_t)1 << 60;
    config.offloading = gb_per_s > 0.0 ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    device.to_device_gb_per_s = device.to_host_gb_per_s = gb_per_s > 0.0 ? gb_per_s : 1.0;
    device.launch_us = 1.0;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    net_register(m, kind, layers, seed);
    ms_set_hardware(m, &device);
    t_ok(m, ms_wrap(m));
    return m;
}

static ms_model *fold_net(net_kind kind, uint32_t layers, double gb_per_s) {
    return fold_net_of(kind, layers, 1, gb_per_s);
}

static bool fold_of(msi_fold *f, const ms_model *m) {
    const bool folds = msi_fold_init(f, &m->graph, &m->config.allocator);
    assert_false(f->out_of_memory);
    return folds;
}

/* The tensor of the whole that an operand of a layer of the fold is, by the layer that it stands for. */
static const msi_tensor *fold_operand(const msi_graph *g, uint32_t layer, uint32_t k) {
    const uint32_t t = g->operands.items[g->layers.items[layer].operand_first + k];
    return t == MSI_NONE ? NULL : &g->tensors.items[t];
}

/* The last layer that reads a tensor in forward, or its producer. */
static uint32_t fold_last_use(const msi_graph *g, uint32_t t) {
    uint32_t last = g->tensors.items[t].producer;
    for (uint32_t i = 0; i < g->layers.count; ++i) {
        for (MSI_EACH(in, g, &g->layers.items[i], MSI_GROUP_IN)) {
            last = in.tensor == t ? i : last;
        }
    }
    return last;
}

static void check_fold(const msi_fold *f) {
    const msi_graph *whole = &f->whole, *g = &f->graph;
    static uint32_t of_fold[2 * FOLD_LAYERS]; // the layer that a layer of the fold is
    uint32_t kept = 0;
    assert_true(whole->layers.count < 2 * FOLD_LAYERS);
    for (uint32_t i = 0; i < whole->layers.count; ++i) {
        of_fold[f->next[i] == MSI_NONE ? 2 * FOLD_LAYERS - 1 : f->next[i]] = i;
    }
    assert_true(4 * g->layers.count <= whole->layers.count && g->layers.count > 40);
    for (uint32_t k = 0; k < f->runs.count; ++k) { // the blocks at both ends decide for themselves
        const msi_repeats *run = &f->runs.items[k];
        const uint32_t last = run->first + (run->count - 1) * run->period;
        for (uint32_t i = 0; i < run->period; ++i) {
            assert_true(f->layer_of[run->first + i] == run->first + i);
            assert_true(f->layer_of[last + i] == last + i);
        }
    }
    for (uint32_t i = 0; i < whole->layers.count; ++i) {
        const uint32_t of = f->layer_of[i];
        assert_true(f->classes[i] == f->classes[of] && f->next[of] != MSI_NONE);
        kept += f->next[i] != MSI_NONE;
        if (f->next[i] == MSI_NONE) {
            continue;
        }
        for (uint32_t k = 0; k < whole->layers.items[i].start[MSI_GROUP_COUNT]; ++k) {
            const msi_tensor *a = fold_operand(whole, i, k), *b = fold_operand(g, f->next[i], k);
            assert_true((a == NULL) == (b == NULL));
            if (a != NULL) {
                assert_true(a->kind == b->kind && a->bytes == b->bytes);
                assert_true(a->updates_early == b->updates_early);
                assert_true((a->producer == MSI_NONE) == (b->producer == MSI_NONE));
                assert_true(b->producer == MSI_NONE || b->producer <= f->next[i]);
                assert_true(b->producer == MSI_NONE ||
                            f->classes[of_fold[b->producer]] == f->classes[a->producer]);
            }
        }
    }
    assert_int_equal(kept, g->layers.count);
    for (uint32_t t = 0; t < g->tensors.count; ++t) {
        assert_int_equal(g->tensors.items[t].last_use, fold_last_use(g, t));
    }
}

static void folds_are_smaller_graphs_of_equal_layers(void **state) {
    (void)state;
    static const net_kind kinds[] = {NET_EQUAL, NET_RESNET, NET_DENSENET, NET_UNET};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; ++k) {
        msi_fold f;
        ms_model *m = fold_net(kinds[k], FOLD_LAYERS, 1.0);
        assert_true(fold_of(&f, m));
        check_fold(&f);
        msi_fold_free(&f);
        ms_destroy(m);
    }
}

static void graphs_without_equal_blocks_are_not_folded(void **state) {
    (void)state;
    static const net_kind kinds[] = {NET_RANDOM, NET_CHAIN};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; ++k) {
        msi_fold f;
        ms_model *m = fold_net(kinds[k], FOLD_LAYERS, 1.0);
        assert_false(fold_of(&f, m));
        msi_fold_free(&f);
        ms_destroy(m);
    }
    msi_fold f;
    ms_model *m = fold_net(NET_EQUAL, 300, 1.0); // too few layers
    assert_false(fold_of(&f, m));
    msi_fold_free(&f);
    ms_destroy(m);
}

/* A layer that differs in one thing stands for itself alone, and no other one for it. */
static void a_layer_that_differs_stands_for_itself(void **state) {
    (void)state;
    for (int how = 0; how < 4; ++how) {
        msi_fold f;
        ms_model *m = fold_net(NET_EQUAL, FOLD_LAYERS, 1.0);
        const ms_layer_time time = {100.0, 200.0, 100.0};
        const msi_layer *layer = &m->graph.layers.items[499];
        if (how == 0) {
            m->graph.layers.items[499].workspace[MSI_WORKSPACE_FORWARD].bytes = 64;
        } else if (how == 1) {
            m->graph.layers.items[499].known = time;
        } else if (how == 2) {
            m->graph.tensors.items[msi_first_output(&m->graph, layer)]
                .technique[MS_TECHNIQUE_OFFLOADING] = MS_SWITCH_OFF;
        } else {
            const uint32_t param = layer->operand_first + layer->start[MSI_GROUP_PARAM];
            msi_set_moves(&m->graph.tensors.items[m->graph.operands.items[param]], MSI_MOVES_STATE,
                          MS_SWITCH_OFF);
        }
        assert_true(fold_of(&f, m));
        check_fold(&f);
        for (uint32_t i = 0; i < m->graph.layers.count; ++i) {
            assert_true((f.layer_of[i] == 499) == (i == 499));
        }
        msi_fold_free(&f);
        ms_destroy(m);
    }
}

/* A model that is only planned, where nothing moves. */
static ms_model *fold_model(void) {
    ms_config config;
    ms_model *m;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.memory_budget_bytes = UINT64_MAX;
    config.offloading = MS_SWITCH_OFF;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    return m;
}

/* Layers that each read three before them, the farthest of them so many as `reach` says. The first read
   the input in its place: a run of their own, unless they are apart. Layer `other` reads another one. */
static ms_model *fold_links(uint32_t other, uint32_t reach, bool apart) {
    static ms_tensor value[FOLD_LAYERS];
    ms_model *m = fold_model();
    net_builder b;
    memset(&b, 0, sizeof b);
    b.model = m;
    const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(4, 1024));
    for (uint32_t i = 0; i < FOLD_LAYERS; ++i) {
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.name = "links";
        d.in[0] = i > 0 ? value[i - 1] : x;
        d.in[1] = i >= 4 ? value[i - (i == other ? 3 : 2)] : x;
        d.in[2] = i >= reach ? value[i - reach] : x;
        d.param[0] = ms_param(m, "weight", MS_DTYPE_F32, ms_shape2(8, 1024));
        d.out[0] = value[i] = net_value(&b, 4);
        d.backward_reads.in = d.backward_reads.param = 1;
        (void)net_layer(&b, &d, apart && i < reach ? 2.0 + i : 1.0);
    }
    ms_set_loss(m, value[FOLD_LAYERS - 1]);
    t_ok(m, ms_wrap(m));
    return m;
}

/* All that the layer with other links reads is still used for as long as elsewhere, so that the layers
   differ in nothing else. */
static void a_layer_with_other_links_stands_for_itself(void **state) {
    (void)state;
    enum { OTHER = FOLD_LAYERS / 2 };
    msi_fold f;
    ms_model *m = fold_links(OTHER, 4, false);
    assert_true(fold_of(&f, m));
    check_fold(&f);
    assert_true(f.classes[OTHER] == f.classes[OTHER - 1]);
    for (uint32_t i = 0; i < FOLD_LAYERS; ++i) {
        assert_true((f.layer_of[i] == OTHER) == (i == OTHER));
    }
    msi_fold_free(&f);
    ms_destroy(m);
}

/* What a layer reads of a block that the fold lacks it has of another one, as far before it: there is no
   fold where that would come before the run, or the layer is of another run. */
static void links_that_reach_too_far_are_not_folded(void **state) {
    (void)state;
    for (uint32_t reach = 20; reach < 50; ++reach) {
        for (int apart = 0; apart < 2; ++apart) {
            msi_fold f;
            ms_model *m = fold_links(MSI_NONE, reach, apart);
            const bool folds = fold_of(&f, m);
            assert_true(folds || !apart || reach > 24);
            assert_true(!folds || (apart && reach < 40));
            if (folds) {
                check_fold(&f);
            }
            msi_fold_free(&f);
            ms_destroy(m);
        }
    }
}

/* Blocks of the whole are decided for by those as far along the run in the fold, and what alternates
   there does so in the whole. */
static void runs_are_stretched_evenly(void **state) {
    (void)state;
    for (uint32_t kept = MSI_FOLD_LEAST; kept <= 60; ++kept) {
        for (uint32_t count = 4 * kept; count <= 2000; count = 2 * count + 3) {
            const msi_repeats run = {0, 1, count, kept};
            uint32_t steps = 0;
            for (uint32_t i = 1; i + 1 < count; ++i) {
                const uint32_t block = msi_stretched(&run, i);
                const double there = (double)i / count, here = (double)block / kept;
                assert_true(block >= 1 && block + 1 < kept);
                assert_true(fabs(there - here) * kept <= 2.0 * MSI_FOLD_WINDOW);
                steps += block == msi_stretched(&run, i - 1) + 1;
            }
            assert_true(2 * steps > count); // most blocks are followed by the next one of the fold
        }
    }
}

/* Random decisions of a fold make sound plans of the whole. */
static void decisions_of_folds_are_sound_for_the_whole(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= t_sweep(8, 200); ++seed) {
        static const net_kind kinds[] = {NET_EQUAL, NET_RESNET, NET_DENSENET, NET_UNET};
        msi_fold f;
        msi_store *store;
        msi_plan *plan;
        msi_lowering lowering;
        msi_shortage shortage;
        msi_scorer scorer;
        t_rng rng = t_seed(seed);
        ms_model *m = fold_net(kinds[seed % 4], FOLD_LAYERS, 1.0);
        assert_true(fold_of(&f, m));
        t_ok(m, msi_make_plans(m, MSI_GOAL_PLAIN, &store, &plan));
        assert_true(msi_scorer_init(&scorer, m, store, plan, &lowering, &shortage));
        scorer.checks_layouts = true;
        msi_tensor_decision *folded =
            (msi_tensor_decision *)calloc(1, (size_t)msi_decisions_bytes(&f.graph));
        assert_non_null(folded);
        msi_decide_plain(&f.graph, folded);
        for (uint32_t t = 0; t < f.graph.tensors.count; ++t) {
            const bool drops = msi_is_choice(&f.graph, t) && t_chance(&rng, 0.5);
            folded[t].pass = drops ? 1 + t_below(&rng, 3) : folded[t].pass;
            folded[t].moves =
                (uint8_t)(folded[t].pass == 0 && t_chance(&rng, 0.5) ? msi_may_choose(&f.graph, t)
                                                                     : folded[t].moves);
        }
        const bool early = t_chance(&rng, 0.5);
        folded[f.graph.tensors.count].room = t_chance(&rng, 0.5);
        msi_unfold(&f, folded, early, plan->decisions);
        assert_int_equal(plan->decisions[m->graph.tensors.count].room,
                         folded[f.graph.tensors.count].room);
        for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
            const msi_origin at = f.origins[t];
            if (at.layer != MSI_NONE && f.next[at.layer] != MSI_NONE &&
                f.layer_of[at.layer] == at.layer) {
                assert_true(plan->decisions[t].pass == folded[f.tensor_of[t]].pass &&
                            plan->decisions[t].moves == folded[f.tensor_of[t]].moves);
            }
            const bool updates = early && m->graph.tensors.items[t].updates_early; // of one layer
            assert_true(plan->decisions[t].update_after == (updates ? at.layer : MSI_NONE));
        }
        const msi_score score = msi_score_of(&scorer, plan->decisions);
        assert_true(!msi_is_short(&scorer) && score.bytes >= score.live_bytes && score.us < 1e12);
        free(folded);
        msi_lowering_free(&lowering);
        msi_plans_free(m, plan);
        msi_store_free(m, store);
        msi_fold_free(&f);
        ms_destroy(m);
    }
}

/* Blocks of layers in tiles, of which the first reads that of the block before as a whole, so that
   these two cannot be in one group; the first block differs, so that runs begin with such a layer.
   With heads, it reads an input, and each block has a loss of its own. */
static ms_model *fold_tiles(bool heads) {
    const ms_shape shape = ms_shape2(16, 8);
    ms_model *m = fold_model();
    ms_layer_desc d;
    ms_tensor last = ms_input(m, "x", MS_DTYPE_F32, shape);
    ms_tensor before = ms_input(m, "y", MS_DTYPE_F32, shape);
    for (uint32_t i = 0; i < FOLD_LAYERS; i += heads ? 4 : 3) {
        for (int k = 0; k < (heads ? 4 : 3); ++k) {
            const ms_tensor none = {0};
            memset(&d, 0, sizeof d);
            d.forward = net_nothing;
            d.in[0] = last;
            d.in[1] = k == 0 ? before : none;
            const ms_shape weight = ms_shape1(i > 0 || heads ? 64 : 32);
            d.param[0] = k < 3 ? ms_param(m, "weight", MS_DTYPE_F32, weight) : none;
            d.out[0] = ms_activation(m, "out", MS_DTYPE_F32, k == 3 ? ms_shape1(16) : shape);
            d.backward_reads.in = 1;
            d.backward = k < 3 ? net_nothing : NULL;
            d.grads_in_forward = k < 3 ? 0 : 1;
            d.tile.axes = 1;
            d.tile.whole_in = k == 0 ? 2 : 0;
            ms_register_layer(m, &d);
            before = k == 0 && !heads ? d.out[0] : before;
            last = k == 3 ? last : d.out[0];
        }
    }
    ms_set_loss(m, d.out[0]);
    t_ok(m, ms_wrap(m));
    return m;
}

/* Random groups of a fold, the last of which ends in the loss. */
static void fold_groups(const msi_graph *g, t_rng *rng, msi_tensor_decision *d) {
    const uint32_t last = g->layers.count - 10;
    for (uint32_t i = 0; i < g->layers.count;) {
        uint32_t end = i < last ? i + 1 + t_below(rng, 6) : g->layers.count;
        end = i < last && end > last ? last : end;
        while (end > i && !msi_can_group(g, i, end)) {
            end--;
        }
        if (end > i && (i == last || t_chance(rng, 0.8))) {
            msi_decide_group(g, d, i, end, 2);
        }
        i = end > i ? end : i + 1;
    }
}

/* What the fold has decided for a layer of the whole. */
static const msi_tensor_decision *fold_decision(const msi_fold *f, const msi_tensor_decision *d,
                                                uint32_t layer) {
    const msi_graph *g = &f->graph;
    return &d[msi_first_output(g, &g->layers.items[f->next[f->layer_of[layer]]])];
}

/* Whether a layer is in tiles in the fold with one that has a loss of its own. */
static bool fold_has_loss(const msi_fold *f, const msi_tensor_decision *d, uint32_t layer) {
    uint32_t first = layer;
    bool has = false;
    while (first > 0 && !fold_decision(f, d, first)->begins_group) {
        first--;
    }
    for (uint32_t i = first; i < f->whole.layers.count && fold_decision(f, d, i)->tiles > 0 &&
                             (i == first || !fold_decision(f, d, i)->begins_group);
         ++i) {
        has |= f->whole.layers.items[i].ends_in_loss;
    }
    return has;
}

/* Groups of a fold make groups of the whole: these end where a layer cannot join, or where the fold
   has an end. What is whole all the same has a loss of its own, but does not go on to the last one. */
static void groups_of_folds_are_sound_for_the_whole(void **state) {
    (void)state;
    uint32_t whole = 0, tiled = 0;
    for (uint64_t seed = 1; seed <= t_sweep(8, 200); ++seed) {
        t_rng rng = t_seed(seed);
        msi_fold f;
        ms_model *m = fold_tiles(seed % 2 == 1);
        const msi_graph *g = &m->graph;
        assert_true(fold_of(&f, m));
        msi_tensor_decision *folded =
            (msi_tensor_decision *)calloc(1, (size_t)msi_decisions_bytes(&f.graph));
        msi_tensor_decision *d = (msi_tensor_decision *)calloc(1, (size_t)msi_decisions_bytes(g));
        assert_true(folded != NULL && d != NULL);
        msi_decide_plain(&f.graph, folded);
        fold_groups(&f.graph, &rng, folded);
        msi_unfold(&f, folded, false, d);
        for (uint32_t i = 0, end; i < g->layers.count; i = end) {
            end = msi_tiles_of(g, d, i) > 0 ? msi_group_at(g, d, i).end : i + 1;
            if (msi_tiles_of(g, d, i) > 0) {
                assert_true(msi_can_group(g, i, end));
                assert_true(d[msi_first_output(g, &g->layers.items[i])].begins_group);
                tiled += end - i;
            } else if (fold_decision(&f, folded, i)->tiles > 0) {
                assert_true(fold_has_loss(&f, folded, i));
                whole++;
            }
        }
        free(folded);
        free(d);
        msi_fold_free(&f);
        ms_destroy(m);
    }
    print_message("%u in tiles, %u are whole\n", (unsigned)tiled, (unsigned)whole);
    assert_true(tiled > 1000 && whole > 0);
}

/* The step over the plain one, for a share of the plain arena; 0: refused. */
static double fold_step(net_kind kind, uint32_t layers, double gb_per_s, double share) {
    ms_memory_report r;
    ms_model *m = fold_net(kind, layers, gb_per_s);
    t_report(m, &r);
    ms_set_budget(m, (uint64_t)(share * (double)r.plain_bytes));
    const ms_result result = ms_wrap(m);
    assert_true(result == MS_RESULT_OK || result == MS_RESULT_BUDGET);
    t_report(m, &r);
    ms_destroy(m);
    return result == MS_RESULT_OK ? r.step_us / r.plain_step_us : 0.0;
}

/* Nets whose layouts have gaps, so that a plan is found in one way and laid out again in another. */
static void all_budgets_from_the_smallest_on_have_plans(void **state) {
    (void)state;
    static const struct {
        net_kind kind;
        uint32_t layers;
        uint64_t seed;
        double gb_per_s;
    } rows[] = {{NET_CHAIN, 150, 3, 0.0},
                {NET_CHAIN, 100, 3, 0.0},
                {NET_CHAIN, 220, 1, 0.0},
                {NET_UNET, 130, 4, 0.1},
                {NET_DENSENET, 180, 1, 0.1}};
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; ++k) {
        ms_model *m = fold_net_of(rows[k].kind, rows[k].layers, rows[k].seed, rows[k].gb_per_s);
        uint64_t least;
        t_ok(m, ms_smallest_budget(m, &least));
        for (uint64_t i = 0; i <= 8; ++i) {
            ms_memory_report r;
            const uint64_t budget = least + i * least / 8;
            ms_set_budget(m, budget);
            t_ok(m, ms_wrap(m));
            t_report(m, &r);
            assert_true(r.arena_bytes <= budget && (i > 0 || r.arena_bytes == least));
        }
        ms_set_budget(m, least - 1);
        assert_int_equal(ms_wrap(m), MS_RESULT_BUDGET);
        ms_destroy(m);
    }
}

/* Nets with a link, at budgets where what is recomputed together has to be split, or where only the
   local search of 140 layers finds such a plan; with one on which each copy takes less time than its
   launch; where climbs of the local search have to go on for long, the last of them by moves in exchange;
   where the best plan of a fold is found by another search than that of the whole; and where the last climb
   begins at what fits the budget itself. */
static void small_budgets_take_little_longer(void **state) {
    (void)state;
    static const struct {
        net_kind kind;
        uint32_t layers;
        double gb_per_s, share, most;
    } rows[] = {{NET_RESNET, 90, 0.1, 0.2, 1.4},     {NET_RESNET, 180, 0.1, 0.2, 1.3},
                {NET_RESNET, 400, 0.1, 0.1, 1.5},    {NET_UNET, 60, 0.1, 0.3, 1.4},
                {NET_UNET, 90, 0.1, 0.2, 1.6},       {NET_RANDOM, 140, 0.1, 0.5, 1.03},
                {NET_RANDOM, 140, 0.1, 0.46, 1.05},  {NET_DENSENET, 90, 0.1, 0.24, 2.5},
                {NET_EQUAL, 60, 1000.0, 0.35, 1.01}, {NET_RESNET, 60, 1000.0, 0.35, 1.01},
                {NET_CHAIN, 20, 0.1, 0.25, 1.85},    {NET_UNET, 61, 0.1, 0.25, 1.4},
                {NET_RESNET, 43, 0.1, 0.25, 1.2},    {NET_DENSENET, 61, 0.1, 0.25, 1.5},
                {NET_INCEPTION, 43, 0.1, 0.35, 2.4}, {NET_INCEPTION, 20, 0.1, 0.7, 1.49},
                {NET_RESNET, 1000, 0.1, 0.3, 1.08},  {NET_DENSENET, 61, 0.1, 0.4, 1.09},
                {NET_RESNET, 61, 0.1, 0.2, 1.18}};
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; ++k) {
        const double step =
            fold_step(rows[k].kind, rows[k].layers, rows[k].gb_per_s, rows[k].share);
        if (!(step >= 1.0) || step > rows[k].most) {
            fail_msg("row %d: %.3f", (int)k, step);
        }
    }
}

/* Segments are searched in the whole, though in the fold another search finds a smaller plan. */
static void segments_have_the_smallest_plan_of_deep_nets(void **state) {
    (void)state;
    ms_memory_report r;
    uint64_t least;
    ms_model *m = fold_net(NET_UNET, 1000, 0.0);
    t_report(m, &r);
    t_ok(m, ms_smallest_budget(m, &least));
    assert_in_range(least, 1, r.plain_bytes / 100 * 33);
    ms_destroy(m);
}

static void fold_count_plans(ms_log_level level, const char *tag, const char *text, void *user) {
    if (level == MS_LOG_DEBUG && strcmp(tag, "plan") == 0 && strstr(text, "stand for all")) {
        *(uint32_t *)user += 1;
    }
}

/* Where the squeezed plan hardly fits the smallest is searched first, and a budget below it is refused
   when that has failed: the fold is planned once. Above it, once more, and where a squeezed plan fits only
   once. */
static void what_hardly_fits_is_refused_at_once(void **state) {
    (void)state;
    static const net_kind kinds[] = {NET_EQUAL, NET_RESNET};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; ++k) {
        uint32_t plans = 0;
        uint64_t least;
        ms_memory_report r;
        ms_model *m = fold_net(kinds[k], 700, 0.1);
        m->config.log = fold_count_plans;
        m->config.log_user = &plans;
        t_report(m, &r);
        t_ok(m, ms_smallest_budget(m, &least));
        const struct {
            uint64_t budget;
            ms_result result;
            uint32_t plans;
        } rows[] = {{least - least / 10, MS_RESULT_BUDGET, 1},
                    {least - 1, MS_RESULT_BUDGET, 1},
                    {least, MS_RESULT_OK, 2},
                    {r.plain_bytes / 2, MS_RESULT_OK, 1}};
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
            plans = 0;
            ms_set_budget(m, rows[i].budget);
            assert_int_equal(ms_wrap(m), rows[i].result);
            if (plans != rows[i].plans) {
                fail_msg("%s, row %d: %u plans of a fold", net_names[kinds[k]], (int)i,
                         (unsigned)plans);
            }
        }
        ms_destroy(m);
    }
}

/* Whatever a fold guides to, there is a plan that needs no more of the host than there is. */
static void a_host_too_small_for_what_a_fold_guides_to(void **state) {
    (void)state;
    uint64_t least[2], host_bytes = 0;
    for (int moves = 0; moves < 2; ++moves) {
        ms_model *m = fold_net(NET_EQUAL, 416, moves ? 0.1 : 0.0);
        m->config.mode = MS_MODE_AGGRESSIVE;
        t_ok(m, ms_smallest_budget(m, &least[moves]));
        ms_destroy(m);
    }
    for (uint64_t share = 1; share <= 64; share *= 2) {
        ms_memory_report r;
        ms_model *m = fold_net(NET_EQUAL, 416, 0.1);
        m->config.mode = MS_MODE_AGGRESSIVE;
        m->config.max_host_bytes = share > 1 ? host_bytes / share : m->config.max_host_bytes;
        ms_set_budget(m, least[1] + (least[0] - least[1]) / 8 * 5);
        const ms_result result = ms_wrap(m);
        assert_true(result == MS_RESULT_OK || (result == MS_RESULT_BUDGET && share > 2));
        t_report(m, &r);
        host_bytes = share > 1 ? host_bytes : r.host_bytes;
        assert_true(result != MS_RESULT_OK || r.host_bytes <= m->config.max_host_bytes);
        ms_destroy(m);
    }
}

static void many_layers_are_planned_like_a_hundred(void **state) {
    (void)state;
    static const net_kind kinds[] = {NET_EQUAL, NET_RESNET, NET_UNET, NET_DENSENET};
    static const double shares[] = {0.7, 0.5, 0.3};
    uint32_t compared = 0;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; ++k) {
        for (int way = 0; way < 6; ++way) {
            const double link = way % 2 ? 0.1 : 0.0, share = shares[way / 2];
            const double small_step = fold_step(kinds[k], 100, link, share);
            if (small_step > 0.0 && (t_sweep(0, 1) || share < 0.6)) {
                const double step = fold_step(kinds[k], FOLD_LAYERS, link, share);
                if (!(step > 0.0 && step <= 1.01 * small_step)) {
                    print_error("%s, link %.1f, budget %.1f: step %.4f, of 100 layers %.4f\n",
                                net_names[kinds[k]], link, share, step, small_step);
                }
                assert_true(step > 0.0 && step <= 1.01 * small_step);
                compared++;
            }
        }
    }
    assert_true(compared > 10);
}

/* A deep perceptron that computes, with as many layers as a fold needs. */
enum { FOLD_DEPTH = 450, FOLD_ROWS = 8, FOLD_COLS = 8, FOLD_WEIGHT = FOLD_COLS * FOLD_COLS };

typedef struct fold_run {
    ms_model *m;
    ms_tensor x, weight[FOLD_DEPTH];
    t_op ops[2 * FOLD_DEPTH + 1];
} fold_run;

static void fold_run_create(fold_run *r, uint64_t budget) {
    static float data[FOLD_WEIGHT];
    const ms_shape shape = ms_shape2(FOLD_ROWS, FOLD_COLS);
    t_rng rng = t_seed(5);
    ms_config config;
    memset(r, 0, sizeof *r);
    memset(&config, 0, sizeof config);
    config.memory_budget_bytes = budget;
    assert_int_equal(ms_create(&config, &r->m), MS_RESULT_OK);
    ms_tensor last = r->x = ms_input(r->m, "x", MS_DTYPE_F32, shape);
    for (uint32_t i = 0; i < FOLD_DEPTH; ++i) {
        const ms_tensor product = ms_activation(r->m, "product", MS_DTYPE_F32, shape);
        r->weight[i] = ms_param(r->m, "weight", MS_DTYPE_F32, ms_shape2(FOLD_COLS, FOLD_COLS));
        ms_layer_desc d = t_layer(&r->ops[2 * i], T_MATMUL, "matmul", last, product);
        d.param[0] = r->weight[i];
        ms_register_layer(r->m, &d);
        last = ms_activation(r->m, "hidden", MS_DTYPE_F32, shape);
        d = t_layer(&r->ops[2 * i + 1], T_SQUASH, "squash", product, last);
        ms_register_layer(r->m, &d);
    }
    (void)t_set_loss(r->m, &r->ops[2 * FOLD_DEPTH], T_LOSS, last);
    t_ok(r->m, ms_wrap(r->m));
    t_fill(&rng, data, FOLD_ROWS * FOLD_COLS, 1.0f);
    t_ok(r->m, ms_write(r->m, r->x, data));
    for (uint32_t i = 0; i < FOLD_DEPTH; ++i) {
        t_fill(&rng, data, FOLD_WEIGHT, 1.7f / sqrtf((float)FOLD_COLS));
        t_ok(r->m, ms_write(r->m, r->weight[i], data));
    }
}

static void plans_by_a_fold_change_no_bit(void **state) {
    (void)state;
    static fold_run plain, small_one;
    static float a[FOLD_WEIGHT], b[FOLD_WEIGHT];
    ms_memory_report r;
    uint64_t least = 0;
    msi_fold f;
    double losses[2];
    fold_run_create(&plain, UINT64_MAX);
    assert_true(fold_of(&f, plain.m));
    msi_fold_free(&f);
    t_report(plain.m, &r);
    t_ok(plain.m, ms_smallest_budget(plain.m, &least));
    assert_true(least < r.plain_bytes);
    ms_destroy(plain.m);
    for (int quarters = 0; quarters < 4; ++quarters) {
        fold_run_create(&plain, UINT64_MAX);
        fold_run_create(&small_one, least + (r.plain_bytes - least) / 4 * (uint64_t)quarters);
        for (int step = 0; step < 2; ++step) {
            t_ok(plain.m, ms_step(plain.m, &losses[0]));
            t_ok(small_one.m, ms_step(small_one.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
        }
        for (uint32_t i = 0; i < FOLD_DEPTH; ++i) {
            t_ok(plain.m, ms_read(plain.m, plain.weight[i], a));
            t_ok(small_one.m, ms_read(small_one.m, small_one.weight[i], b));
            assert_memory_equal(a, b, sizeof a);
        }
        ms_destroy(plain.m);
        ms_destroy(small_one.m);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(folds_are_smaller_graphs_of_equal_layers),
        cmocka_unit_test(graphs_without_equal_blocks_are_not_folded),
        cmocka_unit_test(a_layer_that_differs_stands_for_itself),
        cmocka_unit_test(a_layer_with_other_links_stands_for_itself),
        cmocka_unit_test(links_that_reach_too_far_are_not_folded),
        cmocka_unit_test(runs_are_stretched_evenly),
        cmocka_unit_test(decisions_of_folds_are_sound_for_the_whole),
        cmocka_unit_test(groups_of_folds_are_sound_for_the_whole),
        cmocka_unit_test(all_budgets_from_the_smallest_on_have_plans),
        cmocka_unit_test(small_budgets_take_little_longer),
        cmocka_unit_test(segments_have_the_smallest_plan_of_deep_nets),
        cmocka_unit_test(what_hardly_fits_is_refused_at_once),
        cmocka_unit_test(a_host_too_small_for_what_a_fold_guides_to),
        cmocka_unit_test(many_layers_are_planned_like_a_hundred),
        cmocka_unit_test(plans_by_a_fold_change_no_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
