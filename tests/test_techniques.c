/*  test_techniques.c - five techniques at once: plans of small graphs against all combinations of what
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
        msi_place_updates(g, c->base, early, false, 0);
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
        c->search.how.rounding = mask;
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

// ------------------------------------------------------------------------------------------------
// the search for groups, step by step

enum { SOUGHT_GRAPHS = 60, SOUGHT_LAYERS = 12 };

/* A chain of equal blocks of `period` layers, and the search for its groups. */
typedef struct sought {
    ms_model *model;
    uint32_t period, layers;
    msi_scorer scorer;
    msi_lowering lowering;
    msi_shortage shortage;
    msi_store *store;
    msi_plan *plan;
    msi_search search;
    msi_grouping c;
} sought;

/* With these bytes where no field is. */
static ms_shape padded_shape(int64_t rows, int64_t cols, int padding) {
    const ms_shape fields = ms_shape2(rows, cols);
    ms_shape shape;
    memset(&shape, padding, sizeof shape);
    memcpy(shape.dim, fields.dim, sizeof shape.dim);
    memcpy(shape.axes, fields.axes, sizeof shape.axes);
    shape.rank = fields.rank;
    shape.axes_of = fields.axes_of;
    return shape;
}

/* No two layers of a block have the same width, which may be large. in_eval: only the last layer
   trains, and eval keeps some values, so that it may have more bytes than training. */
static void sought_model(sought *s, uint64_t seed, bool in_eval) {
    t_rng rng = t_seed(seed * 57 + 1);
    ms_config config = all_techniques();
    ms_model *m;
    int64_t width[3];
    bool by_rows[3], product[3];
    config.dry_run = true;
    t_ok(m, ms_create(&config, &m));
    s->model = m;
    s->period = 1 + t_below(&rng, 3);
    s->layers = s->period * (2 + t_below(&rng, SOUGHT_LAYERS / s->period - 1));
    for (uint32_t k = 0; k < s->period; ++k) {
        width[k] = (1 + (int64_t)k) * (8 << t_below(&rng, 7));
        width[k] += (k > 0 && width[k] == width[0]) || (k > 1 && width[k] == width[1]) ? 8 : 0;
        by_rows[k] = t_chance(&rng, 0.85);
        product[k] = k == 0 || t_chance(&rng, 0.3);
    }
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(64, width[s->period - 1]));
    for (uint32_t i = 0; i < s->layers; ++i) {
        const uint32_t k = i % s->period, before = (i + s->period - 1) % s->period;
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.tile.axes = by_rows[k];
        d.in[0] = x;
        d.backward_reads.in = 1;
        if (in_eval ? i + 1 == s->layers : product[k]) {
            d.param[0] =
                ms_param(m, "w", MS_DTYPE_F32, padded_shape(width[before], width[k], (int)i));
            d.backward_reads.param = 1;
        }
        d.out[0] = x = ms_activation(m, "a", MS_DTYPE_F32, padded_shape(64, width[k], (int)i));
        ms_register_layer(m, &d);
        if (in_eval && t_chance(&rng, 0.3)) {
            ms_add_eval_output(m, x);
        }
    }
    ms_set_loss(m, x);
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.1f);
    ms_set_optimizer(m, &adamw);
    ms_set_hardware(m, ms_hardware_find("RTX 3090"));
}

static void sought_open(sought *s, uint64_t seed, bool in_eval) {
    memset(s, 0, sizeof *s);
    sought_model(s, seed, in_eval);
    ms_model *m = s->model;
    t_ok(m, msi_check_graph(m, MSI_GOAL_PLAIN));
    t_ok(m, msi_make_plans(m, MSI_GOAL_PLAIN, &s->store, &s->plan));
    assert_true(msi_scorer_init(&s->scorer, m, s->store, s->plan, &s->lowering, &s->shortage));
    s->search.scorer = &s->scorer;
    assert_true(msi_grouping_init(&s->c, &s->search));
    msi_decide_base(&s->search, s->c.decisions);
    msi_find_peak(&s->c);
}

static void sought_close(sought *s) {
    assert_false(msi_is_short(&s->scorer));
    msi_grouping_free(&s->c);
    msi_lowering_free(&s->lowering);
    msi_plans_free(s->model, s->plan);
    msi_store_free(s->model, s->store);
    ms_destroy(s->model);
}

/* The live bytes of what was scored last, where it has most: in training or in eval. */
static uint64_t live_bytes(const sought *s) {
    const uint64_t train = s->scorer.program->layout.peak_bytes,
                   eval = s->scorer.eval->layout.peak_bytes;
    return s->scorer.program->layout.resident_bytes + (train > eval ? train : eval);
}

/* Blocks are alike up to the last one, but for the first, which reads an input. */
static void windows_are_alike_from_block_to_block(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= SOUGHT_GRAPHS; ++seed) {
        static sought s;
        sought_open(&s, seed, false);
        for (uint32_t first = 0; first < s.layers; ++first) {
            for (uint32_t end = first + 1; end <= s.layers; ++end) {
                const msi_window w = {first, end, 0};
                for (uint32_t at = 0; at < s.layers; ++at) {
                    const bool fits = at + (end - first) <= s.layers;
                    const bool repeats =
                        first > 0 && at > 0 && (at + s.layers - first) % s.period == 0;
                    assert_int_equal(msi_is_window_alike(&s.model->graph, &w, at),
                                     at == first || (fits && repeats));
                }
            }
        }
        sought_close(&s);
    }
}

/* A window that is tried becomes a group, and all that are alike and do not overlap it; its bytes are
   those of training or eval, whichever has more. */
static void a_window_is_tried_with_its_like(void **state) {
    (void)state;
    uint32_t others = 0, in_eval = 0;
    for (uint64_t seed = 1; seed <= SOUGHT_GRAPHS; ++seed) {
        static sought s;
        sought_open(&s, seed, seed % 2 == 0);
        const msi_graph *g = &s.model->graph;
        for (uint32_t first = 0; first < s.layers; ++first) {
            for (uint32_t end = first + 1; end <= s.layers && end <= first + 4; ++end) {
                const msi_window w = {first, end, 0};
                double us;
                if (!msi_may_group(g, s.c.decisions, first, end)) {
                    continue;
                }
                assert_true(msi_try_window(&s.c, &w, 2, &us) == live_bytes(&s));
                in_eval += s.scorer.eval->layout.peak_bytes > s.scorer.program->layout.peak_bytes;
                for (uint32_t i = 0; i < s.layers; ++i) {
                    if (msi_tiles_of(g, s.c.trial, i) == 0) {
                        assert_true(i < first || i >= end);
                        continue;
                    }
                    const msi_tiling group = msi_group_at(g, s.c.trial, i);
                    assert_int_equal(group.end - i, end - first);
                    assert_true(i == first || group.end <= first || i >= end);
                    others += i != first;
                    i = group.end - 1;
                }
            }
        }
        sought_close(&s);
    }
    assert_true(others > SOUGHT_GRAPHS && in_eval > SOUGHT_GRAPHS);
}

/* The windows of a layer are those with the fewest bytes of all that have it. */
static void windows_have_the_layer_of_the_peak(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= SOUGHT_GRAPHS; ++seed) {
        static sought s;
        sought_open(&s, seed, seed % 2 == 0);
        const msi_graph *g = &s.model->graph;
        for (s.c.peak = 0; s.c.peak < s.layers; ++s.c.peak) {
            msi_window list[MSI_GROUPING_TRIES];
            const uint32_t count = msi_list_windows(&s.c, list);
            uint32_t all = 0, fewer = 0;
            for (uint32_t first = 0; first <= s.c.peak; ++first) {
                for (uint32_t end = s.c.peak + 1; end <= s.layers; ++end) {
                    const bool reaches = s.c.peak - first <= MSI_GROUPING_REACH &&
                                         end - s.c.peak <= MSI_GROUPING_REACH;
                    if (reaches && msi_may_group(g, s.c.decisions, first, end)) {
                        ++all;
                        fewer +=
                            count > 0 && msi_whole_in_window(g, first, end) < list[count - 1].bytes;
                    }
                }
            }
            assert_int_equal(count, all < MSI_GROUPING_TRIES ? all : (uint32_t)MSI_GROUPING_TRIES);
            assert_true(count == 0 || fewer < count);
        }
        sought_close(&s);
    }
}

/* The peak is that of training or of eval, whichever has more; the group that is found there has
   fewer bytes, in as few tiles as do. */
static void groups_are_found_at_the_peak(void **state) {
    (void)state;
    uint32_t found = 0, in_eval = 0, fewer = 0;
    for (uint64_t seed = 1; seed <= SOUGHT_GRAPHS; ++seed) {
        static sought s;
        sought_open(&s, seed, seed % 2 == 0);
        const msi_graph *g = &s.model->graph;
        const bool of_eval = s.scorer.eval->layout.peak_bytes > s.scorer.program->layout.peak_bytes;
        const msi_program *p = of_eval ? s.scorer.eval : s.scorer.program;
        const uint64_t before = live_bytes(&s);
        const msi_instruction *at = &p->code.instructions.items[p->layout.peak];
        assert_true(s.c.live_bytes == before);
        if (msi_calls_layer((msi_op)at->op)) {
            assert_int_equal(s.c.peak, at->target);
        }
        if (s.c.peak == MSI_NONE || !msi_find_group(&s.c)) {
            sought_close(&s);
            continue;
        }
        const uint64_t after = live_bytes(&s);
        const uint32_t tiles = msi_tiles_of(g, s.c.trial, s.c.peak);
        uint32_t first = s.c.peak;
        while (!s.c.trial[msi_first_output(g, &g->layers.items[first])].begins_group) {
            --first;
        }
        const msi_window w = {first, msi_group_at(g, s.c.trial, first).end, 0};
        assert_true(after < before);
        for (uint32_t k = 2; k < tiles; k *= 2) {
            double us;
            assert_true(msi_try_window(&s.c, &w, k, &us) > after);
        }
        ++found;
        in_eval += of_eval;
        fewer += tiles < MSI_GROUPING_TILES && tiles < msi_most_tiles(g, w.first, w.end);
        sought_close(&s);
    }
    assert_true(found > SOUGHT_GRAPHS / 2 && in_eval > 0 && fewer > 0);
}

static bool has_set(const msi_tilings *all, const msi_tilings *of, uint32_t set) {
    bool has = false;
    const uint32_t count = of->end[set] - of->end[set - 1];
    for (uint32_t k = 1; k <= all->count; ++k) {
        bool same = all->end[k] - all->end[k - 1] == count;
        for (uint32_t i = 0; i < count && same; ++i) {
            const msi_tiling *x = &all->groups.items[all->end[k - 1] + i];
            const msi_tiling *y = &of->groups.items[of->end[set - 1] + i];
            same = x->first == y->first && x->end == y->end && x->tiles == y->tiles;
        }
        has |= same && (all != of || k != set);
    }
    return has;
}

/* Sets of groups that do not overlap, no two of them the same: those from the plan that keeps
   everything and from the squeezed one, each of which goes on until no group at the peak has fewer
   bytes; and of a small graph these in fewer tiles. */
static void sets_of_groups_differ(void **state) {
    (void)state;
    uint32_t sets = 0, rounds = 0;
    for (uint64_t seed = 1; seed <= SOUGHT_GRAPHS / 2; ++seed) {
        static sought s;
        msi_tilings all, part;
        sought_open(&s, seed, seed % 2 == 0);
        s.search.techniques = MSI_CHECKPOINTING; // or the squeezed plan keeps everything too
        memset(&all, 0, sizeof all);
        msi_find_tilings(&s.search, 0, &all);
        for (int squeezed = 0; squeezed < 2; ++squeezed) {
            memset(&part, 0, sizeof part);
            msi_find_tilings_from(&s.c, squeezed, &part);
            const uint64_t bytes = s.c.live_bytes;
            const uint32_t peak = s.c.peak;
            msi_find_peak(&s.c);
            assert_true(s.c.live_bytes == bytes && s.c.peak == peak);
            for (uint32_t k = 1; k <= part.count; ++k) {
                assert_true(has_set(&all, &part, k));
            }
            rounds += part.count > 1;
            MSI_LIST_FREE(msi_tiling, s.scorer.allocator, part.groups);
        }
        for (uint32_t k = 1; k <= all.count; ++k) {
            assert_false(has_set(&all, &all, k));
            for (uint32_t i = all.end[k - 1]; i < all.end[k]; ++i) {
                const msi_tiling *group = &all.groups.items[i];
                assert_true(i == all.end[k - 1] || group[-1].end <= group->first);
                assert_true(msi_can_group(&s.model->graph, group->first, group->end));
            }
        }
        sets += all.count;
        MSI_LIST_FREE(msi_tiling, s.scorer.allocator, all.groups);
        sought_close(&s);
    }
    assert_true(sets > SOUGHT_GRAPHS && rounds > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_are_close_to_the_best_of_all),
        cmocka_unit_test(fewer_techniques_are_not_better),
        cmocka_unit_test(budgets_from_the_smallest_on_have_plans),
        cmocka_unit_test(windows_are_alike_from_block_to_block),
        cmocka_unit_test(a_window_is_tried_with_its_like),
        cmocka_unit_test(windows_have_the_layer_of_the_peak),
        cmocka_unit_test(groups_are_found_at_the_peak),
        cmocka_unit_test(sets_of_groups_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
