/*  test_combined.c - five techniques at once: plans of small graphs against all combinations of what
    each technique can do, and against those with some techniques switched off. MEMSCALE_TEST_DAGS
    sets how many graphs there are, MEMSCALE_TEST_SEED which is the first. */
#define T_OFFLOADS
#include "private.h"
#include "toy_layers.h"

enum { QUICK_GRAPHS = 3, GRAPHS = 120, BUDGETS = 4, MOST_LAYERS = 6, MOST_VALUES = 7 };

static uint64_t first_seed(void) {
    return t_environment("MEMSCALE_TEST_SEED", 1);
}

static uint64_t end_seed(uint64_t quick, uint64_t full) {
    return first_seed() + t_environment("MEMSCALE_TEST_DAGS", t_sweep(quick, full));
}

// ------------------------------------------------------------------------------------------------
// random graphs, to be planned and not run

/* Products, of which some are wide, functions of one input, and sums, all of independent rows; the
   last layer makes a loss for each row. */
static ms_model *random_model(uint64_t seed, ms_config config) {
    t_rng rng = t_seed(seed * 31 + 7);
    ms_model *m;
    config.dry_run = true;
    config.max_host_bytes = (uint64_t)1 << 40;
    t_ok(m, ms_create(&config, &m));
    const int64_t rows = 64 << t_below(&rng, 4);
    const uint32_t layers = 2 + t_below(&rng, MOST_LAYERS - 2);
    int64_t width = 32 << t_below(&rng, 4);
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(rows, width)), before = x;
    for (uint32_t i = 0; i < layers; ++i) {
        ms_layer_desc d;
        const bool last = i + 1 == layers;
        const bool product = i == 0 || (!last && t_chance(&rng, 0.5));
        const int64_t old = width;
        memset(&d, 0, sizeof d);
        d.tile.axes = 1;
        d.dtypes.accepts = 1u << MS_DTYPE_BF16;
        d.in[0] = x;
        width = last ? 1 : product ? 32 << t_below(&rng, 6) : width;
        if (product) {
            d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(old, width));
            d.backward_reads.in = d.backward_reads.param = 1;
        } else if (!last && t_chance(&rng, 0.3) &&
                   ms_tensor_bytes(m, before) == ms_tensor_bytes(m, x) && before.id != x.id) {
            d.in[1] = before;
            d.backward_reads.nothing = true;
        } else {
            d.backward_reads.in = 1;
        }
        before = x;
        d.out[0] = x = ms_activation(m, "a", MS_DTYPE_F32, ms_shape2(rows, width));
        ms_register_layer(m, &d);
    }
    ms_set_loss(m, x);
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.1f);
    ms_set_optimizer(m, &adamw);
    ms_hardware device = *ms_hardware_find("RTX 3090");
    device.launch_us = 0.05; // the graphs are small
    ms_set_hardware(m, &device);
    return m;
}

static ms_config all_techniques(void) {
    ms_config config = t_config();
    config.mode = MS_MODE_AGGRESSIVE;
    config.memory_budget_bytes = (uint64_t)1 << 40;
    return config;
}

// ------------------------------------------------------------------------------------------------
// all combinations

/* The fastest of all combinations for each budget, and the smallest of all. */
typedef struct census {
    ms_model *model;
    msi_scorer scorer;
    msi_lowering lowering;
    msi_shortage shortage;
    msi_plan *plan;
    msi_search search;
    msi_tensor_decision *base, *at;
    uint32_t values[MOST_VALUES], value_count;
    uint64_t budget[BUDGETS];
    double best_us[BUDGETS];
    uint64_t least_bytes, tried;
} census;

static void census_try(census *c) {
    msi_score score = msi_estimate(&c->scorer, c->at);
    bool worth = score.live_bytes < c->least_bytes;
    c->tried++;
    for (int k = 0; k < BUDGETS; ++k) {
        worth |= score.live_bytes <= c->budget[k] && score.us < c->best_us[k];
    }
    if (!worth) {
        return;
    }
    (void)msi_fits(&c->scorer, &score, MSI_NO_BUDGET, 0);
    c->least_bytes = score.bytes < c->least_bytes ? score.bytes : c->least_bytes;
    for (int k = 0; k < BUDGETS; ++k) {
        c->best_us[k] =
            score.bytes <= c->budget[k] && score.us < c->best_us[k] ? score.us : c->best_us[k];
    }
}

/* Keeps, drops or moves each value. */
static void census_values(census *c) {
    uint32_t choices = 1;
    for (uint32_t k = 0; k < c->value_count; ++k) {
        choices *= 3;
    }
    for (uint32_t choice = 0; choice < choices; ++choice) {
        memcpy(c->at, c->base, msi_decisions_bytes(&c->model->graph));
        uint32_t left = choice;
        bool changes = true;
        for (uint32_t k = 0; k < c->value_count; ++k, left /= 3) {
            msi_tensor_decision *d = &c->at[c->values[k]];
            const bool fixed = c->base[c->values[k]].pass > 0; // inner values of tiles
            changes &= !fixed || left % 3 == 0;
            d->pass = left % 3 == 1 ? 1 : d->pass;
            if (left % 3 == 2) {
                d->moves = MSI_MOVES_VALUE;
            }
        }
        if (changes) {
            census_try(c);
        }
    }
}

/* All homes: none, of state, of values and state, of all; updates inside backward or after it. */
static void census_homes(census *c) {
    static const uint8_t homes[] = {0, MSI_MOVES_STATE, MSI_MOVES_VALUE | MSI_MOVES_STATE,
                                    MSI_MOVES_ALL};
    const msi_graph *g = &c->model->graph;
    for (int early = 0; early < 2; ++early) {
        msi_place_updates(g, c->base, early, 0);
        for (size_t k = 0; k < sizeof homes / sizeof homes[0]; ++k) {
            for (uint32_t t = 0; t < g->tensors.count; ++t) {
                if (g->tensors.items[t].kind == MSI_KIND_PARAM) {
                    c->base[t].moves = homes[k];
                }
            }
            census_values(c);
        }
    }
}

/* All groups, from a layer on. */
static void census_groups(census *c, uint32_t layer) {
    static const uint32_t tiles[] = {2, 8};
    const msi_graph *g = &c->model->graph;
    if (layer == g->layers.count) {
        census_homes(c);
        return;
    }
    census_groups(c, layer + 1);
    for (uint32_t end = layer + 1; end <= g->layers.count; ++end) {
        if (!msi_can_group(g, layer, end)) {
            continue;
        }
        msi_tensor_decision saved[64];
        memcpy(saved, c->base, msi_decisions_bytes(g));
        for (size_t k = 0; k < sizeof tiles / sizeof tiles[0]; ++k) {
            msi_decide_tiles(g, c->base, layer, end, tiles[k]);
            census_groups(c, end);
            memcpy(c->base, saved, msi_decisions_bytes(g));
        }
    }
}

static void census_take(census *c) {
    const msi_graph *g = &c->model->graph;
    for (uint32_t t = 0; t < g->tensors.count; ++t) {
        if (msi_is_choice(g, t) && c->value_count < MOST_VALUES) {
            c->values[c->value_count++] = t;
        }
    }
    for (uint32_t mask = 0; mask < MSI_ROUNDINGS; ++mask) {
        c->search.rounding = mask;
        msi_decide_base(&c->search, c->base);
        census_groups(c, 0);
    }
}

static void census_open(census *c, uint64_t seed) {
    memset(c, 0, sizeof *c);
    c->model = random_model(seed, all_techniques());
    ms_model *m = c->model;
    t_ok(m, ms_wrap(m));
    c->plan = msi_new_plan(m);
    assert_non_null(c->plan);
    assert_true(msi_scorer_init(&c->scorer, m, m->run.store, c->plan, &c->lowering, &c->shortage));
    msi_make_eval(&c->scorer, c->plan->decisions);
    c->base = (msi_tensor_decision *)calloc(2, (size_t)msi_decisions_bytes(&m->graph));
    assert_non_null(c->base);
    assert_true(m->graph.tensors.count < 64);
    c->at = c->base + m->graph.tensors.count + 1;
    c->search.scorer = &c->scorer;
    c->least_bytes = UINT64_MAX;
    for (int k = 0; k < BUDGETS; ++k) {
        c->best_us[k] = 1e300;
    }
}

static void census_close(census *c) {
    free(c->base);
    msi_lowering_free(&c->lowering);
    msi_plan_free(c->model, c->plan);
    ms_destroy(c->model);
}

static uint64_t smallest_of(uint64_t seed, ms_config config, uint64_t *plain) {
    ms_model *m = random_model(seed, config);
    ms_memory_report report;
    uint64_t bytes;
    t_ok(m, ms_wrap(m));
    t_report(m, &report);
    *plain = report.plain_bytes;
    t_ok(m, ms_smallest_budget(m, &bytes));
    ms_destroy(m);
    return bytes;
}

/* The predicted time of the plan for a budget; 0: none fits. */
static double planned_us(uint64_t seed, ms_config config, uint64_t budget) {
    config.memory_budget_bytes = budget;
    ms_model *m = random_model(seed, config);
    ms_memory_report report;
    memset(&report, 0, sizeof report);
    if (ms_wrap(m) == MS_RESULT_OK) {
        t_report(m, &report);
        assert_true(report.arena_bytes <= budget);
    }
    ms_destroy(m);
    return report.step_us;
}

/* Within 2 % of the fastest of all, wherever one fits. */
static void plans_are_close_to_the_best_of_all(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS);
    double worst = 1.0, least = 1.0;
    uint64_t tried = 0;
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        static census c;
        uint64_t plain;
        const uint64_t smallest = smallest_of(seed, all_techniques(), &plain);
        census_open(&c, seed);
        for (int k = 0; k < BUDGETS; ++k) {
            c.budget[k] = smallest + (plain - smallest) * (uint64_t)k / (2 * BUDGETS);
        }
        census_take(&c);
        tried += c.tried;
        for (int k = 0; k < BUDGETS; ++k) {
            const double us = planned_us(seed, all_techniques(), c.budget[k]);
            const double over = us / c.best_us[k];
            if (c.best_us[k] < 1e300 && (!(us > 0.0) || over > 1.02)) {
                print_message(
                    "MEMSCALE_TEST_SEED=%llu: budget %d of %llu: %.2f us, %.3f of the best, "
                    "%.2f\n",
                    (unsigned long long)seed, k, (unsigned long long)c.budget[k], us, over,
                    c.best_us[k]);
            }
            worst = c.best_us[k] < 1e300 && over > worst ? over : worst;
        }
        const double size = (double)smallest / (double)c.least_bytes;
        least = size > least ? size : least;
        if (size > 1.02) {
            print_message("MEMSCALE_TEST_SEED=%llu: smallest %llu, of all %llu\n",
                          (unsigned long long)seed, (unsigned long long)smallest,
                          (unsigned long long)c.least_bytes);
        }
        census_close(&c);
    }
    print_message("%llu combinations; at worst %.4f of the fastest, %.4f of the smallest\n",
                  (unsigned long long)tried, worst, least);
    assert_true(worst <= 1.02);
    assert_true(least <= 1.02);
}

/* How many techniques are in a mask. */
static int techniques_in(uint32_t mask) {
    int count = 0;
    for (; mask != 0; mask &= mask - 1) {
        ++count;
    }
    return count;
}

/* One technique alone, or two, never give a faster plan than all, nor a smaller one; more of them
   hardly ever do, and then by 2 % at most. */
static void fewer_techniques_are_not_better(void **state) {
    (void)state;
    const uint64_t end = end_seed(2, GRAPHS);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        uint64_t plain, other;
        const uint64_t smallest = smallest_of(seed, all_techniques(), &plain);
        for (uint32_t mask = 0; mask < 31; ++mask) {
            const double most = techniques_in(mask) <= 2 ? 1.0 + 1e-9 : 1.02;
            ms_config config = all_techniques();
            ms_switch *const switches[] = {&config.checkpointing, &config.offloading,
                                           &config.tiling, &config.mixed_precision,
                                           &config.optimizer_8bit};
            for (int k = 0; k < 5; ++k) {
                *switches[k] = mask >> k & 1 ? MS_SWITCH_ON : MS_SWITCH_OFF;
            }
            const uint64_t bytes = smallest_of(seed, config, &other);
            const uint64_t budget = bytes + (plain - bytes) / 4;
            const double us = planned_us(seed, config, budget);
            const double all = planned_us(seed, all_techniques(), budget);
            if ((double)smallest > (double)bytes * most || !(all > 0.0) || all > us * most) {
                fail_msg(
                    "MEMSCALE_TEST_SEED=%llu: techniques %x: smallest %llu, with all %llu; within "
                    "%llu %.2f us, with all %.2f",
                    (unsigned long long)seed, (unsigned)mask, (unsigned long long)bytes,
                    (unsigned long long)smallest, (unsigned long long)budget, us, all);
            }
        }
    }
}

/* What the error of a budget that is too small calls the smallest is what ms_smallest_budget says,
   and that budget and all above it have a plan. */
static void budgets_from_the_smallest_on_have_plans(void **state) {
    (void)state;
    const uint64_t end = end_seed(2, GRAPHS);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        uint64_t plain;
        char number[32];
        ms_config config = all_techniques();
        const uint64_t smallest = smallest_of(seed, config, &plain);
        snprintf(number, sizeof number, "(%llu bytes)", (unsigned long long)smallest);
        for (uint64_t k = 0; k < 8; k += t_size(3, 1)) {
            const uint64_t budget = smallest + (plain - smallest) * k / 16;
            if (!(planned_us(seed, config, budget) > 0.0)) {
                fail_msg("MEMSCALE_TEST_SEED=%llu: smallest %llu, but no plan in %llu",
                         (unsigned long long)seed, (unsigned long long)smallest,
                         (unsigned long long)budget);
            }
        }
        config.memory_budget_bytes = smallest - 1;
        ms_model *m = random_model(seed, config);
        t_error(m, ms_wrap(m), MS_RESULT_BUDGET);
        t_text_has(ms_last_error(m), number);
        ms_destroy(m);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_are_close_to_the_best_of_all),
        cmocka_unit_test(fewer_techniques_are_not_better),
        cmocka_unit_test(budgets_from_the_smallest_on_have_plans),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
