/*  repeats.h - decisions of a model that change one after another by chance: the program that is
    lowered from the one before, whose blocks are repeated where nothing that they depend on has
    changed, is compared with one that is lowered from nothing. Include it after "private.h" and
    "testing.h". */
#ifndef REPEATS_H
#define REPEATS_H

typedef struct repeats {
    msi_store *store;
    msi_plan *plan;
    msi_scorer scorer;
    msi_lowering lowering;
    msi_shortage shortage;
    t_rng rng;
    uint64_t ranges, repeated; // live ranges in all programs, and those in repeated blocks
} repeats;

/* Other decisions for the whole model: roundings, early updates, and perhaps a group in tiles. */
static inline void repeats_begin(repeats *r, const ms_model *m, msi_tensor_decision *d) {
    const msi_graph *g = &m->graph;
    msi_search search;
    memset(&search, 0, sizeof search);
    search.scorer = &r->scorer;
    search.how.rounding = t_below(&r->rng, MSI_ROUNDINGS);
    search.how.early = msi_early_fault(m) == NULL && t_chance(&r->rng, 0.5);
    msi_decide_base(&search, d);
    const uint32_t first = t_below(&r->rng, g->layers.count), end = msi_longest_group(g, first);
    if (end > first && t_chance(&r->rng, 0.7)) {
        const uint32_t most = msi_most_tiles(g, first, end);
        msi_decide_tiles(g, d, first, end, most < 3 ? most : 2 + t_below(&r->rng, most - 1));
    }
}

/* Changes what is decided for one tensor, or how late params are updated inside backward. */
static inline void repeats_change(repeats *r, const ms_model *m, msi_tensor_decision *d) {
    const msi_graph *g = &m->graph;
    if (msi_early_fault(m) == NULL && t_chance(&r->rng, 0.05)) {
        msi_place_updates(g, d, true, false, t_below(&r->rng, 4000));
    }
    const uint32_t t = t_below(&r->rng, g->tensors.count);
    const uint8_t may = msi_may_choose(g, t);
    if (g->tensors.items[t].kind == MSI_KIND_PARAM) {
        d[t].moves = (uint8_t)(t_below(&r->rng, MSI_MOVES_ALL + 1) & may);
        if ((d[t].moves & MSI_MOVES_STATE) && t_chance(&r->rng, 0.3)) {
            d[t].moves |= MSI_IN_PLACE;
        }
        return;
    }
    if (g->tensors.items[t].not_narrow == (uint8_t)MSI_NARROW_MAY_BE && t_chance(&r->rng, 0.3)) {
        d[t].format = (uint8_t)msi_format_of_value(g, t, t_chance(&r->rng, 0.5));
    }
    const bool moves = (may & MSI_MOVES_VALUE) && t_chance(&r->rng, 0.5);
    if (moves || msi_is_choice(g, t)) {
        d[t].moves = (uint8_t)(moves ? MSI_MOVES_VALUE : 0);
        d[t].pass = moves ? 0 : t_below(&r->rng, 4);
    }
}

static inline void repeats_compare(const msi_program *a, const msi_program *b) {
    const msi_code *x = &a->code, *y = &b->code;
    assert_int_equal(x->instructions.count, y->instructions.count);
    assert_int_equal(x->operands.count, y->operands.count);
    assert_int_equal(x->ranges.count, y->ranges.count);
    assert_memory_equal(x->instructions.items, y->instructions.items,
                        x->instructions.count * sizeof *x->instructions.items);
    assert_memory_equal(x->operands.items, y->operands.items,
                        x->operands.count * sizeof *x->operands.items);
    assert_memory_equal(x->ranges.items, y->ranges.items,
                        x->ranges.count * sizeof *x->ranges.items);
    assert_int_equal(x->recompute_count, y->recompute_count);
    assert_int_equal(x->norm, y->norm);
    assert_int_equal(x->loss, y->loss);
    assert_int_equal(x->sweeps, y->sweeps);
    assert_int_equal(a->layout.sent_bytes, b->layout.sent_bytes);
    assert_memory_equal(&a->predicted.step, &b->predicted.step, sizeof a->predicted.step);
}

/* The score of decisions, after others were scored and by itself. */
static inline void repeats_score(repeats *r, const ms_model *m, const msi_tensor_decision *d) {
    msi_program train, eval;
    msi_lowering lowering;
    msi_scorer apart = r->scorer;
    memset(&train, 0, sizeof train);
    memset(&eval, 0, sizeof eval);
    assert_true(
        msi_lowering_init(&lowering, &m->graph, r->store, &m->optimizers, &m->config.allocator));
    apart.lowering = &lowering;
    apart.program = &train;
    apart.eval = &eval;
    const msi_score alone = msi_estimate(&apart, d), after = msi_estimate(&r->scorer, d);
    assert_memory_equal(&alone, &after, sizeof alone);
    repeats_compare(r->scorer.program, &train);
    msi_make_eval(&apart);
    msi_make_eval(&r->scorer);
    assert_int_equal(r->scorer.eval->layout.peak_bytes, eval.layout.peak_bytes);
    assert_memory_equal(&r->scorer.eval->predicted.step, &eval.predicted.step,
                        sizeof eval.predicted.step);
    const msi_repeating *made = &r->lowering.repeating;
    for (uint32_t k = r->store->residents.count; made->before && k < made->renamed.count; ++k) {
        r->repeated += made->renamed.items[k] != MSI_NONE;
    }
    r->ranges += train.code.ranges.count - r->store->residents.count;
    msi_program_free(&m->config.allocator, &train);
    msi_program_free(&m->config.allocator, &eval);
    msi_lowering_free(&lowering);
}

/* Adds to the counts. The graph of the model was checked, by ms_wrap or another call. */
static inline void repeats_check(repeats *r, ms_model *m, uint64_t seed, uint32_t changes) {
    msi_tensor_decision *d =
        (msi_tensor_decision *)calloc(1, (size_t)msi_decisions_bytes(&m->graph));
    assert_non_null(d);
    r->rng = t_seed(seed);
    t_ok(m, msi_make_plans(m, MSI_GOAL_PLAIN, &r->store, &r->plan));
    memset(&r->scorer, 0, sizeof r->scorer);
    assert_true(msi_scorer_init(&r->scorer, m, r->store, r->plan, &r->lowering, &r->shortage));
    for (uint32_t k = 0; k < changes; ++k) {
        if (k % 12 == 0) {
            repeats_begin(r, m, d);
        }
        for (uint32_t n = 1 + t_below(&r->rng, 3); n > 0; --n) {
            repeats_change(r, m, d);
        }
        repeats_score(r, m, d);
    }
    msi_lowering_free(&r->lowering);
    msi_plans_free(m, r->plan);
    msi_store_free(m, r->store);
    free(d);
}

#endif
