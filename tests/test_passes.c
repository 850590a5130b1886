/*  test_passes.c - recomputation in passes: plans whose values come back at depths drawn by chance,
    on random graphs and on chains. Their programs are walked with a table of what every life holds,
    and compared with passes that are found in another way; their steps give the bits of the plain
    plan, and the numbers of a reference that has no plan. MEMSCALE_TEST_DAGS sets how many graphs
    are run, MEMSCALE_TEST_SEED which is the first. */
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "virtual.h"
#include "late_dag.h"
#include "repeats.h"

enum { QUICK_GRAPHS = 300, QUICK_LATE_GRAPHS = 60, QUICK_SOLVED_GRAPHS = 50 };
enum { GRAPHS = 1500, LATE_GRAPHS = 200, SOLVED_GRAPHS = 1000 };

enum { MOST_DEPTH = 6, TEXT = 256 };

// ------------------------------------------------------------------------------------------------
// plans with depths of our own

/* Depths per tensor, for all sizes of the axes. */
typedef struct depths {
    uint8_t *of;
    bool early_update;
    uint64_t update_lag_bytes;
} depths;

static bool is_dropped_anyway(const msi_graph *g, uint32_t t) {
    return !msi_is_read_again(&g->tensors.items[t]);
}

/* A depth up to `most`: by chance, by halves, or rising with the layers. */
static uint32_t depth_of(uint32_t layer, uint32_t layers, uint32_t most, int style, t_rng *rng) {
    const uint32_t odd = msi_lowest_bit(layer + 1);
    return style == 1   ? most - (odd < most ? odd : most - 1)
           : style == 2 ? 1 + layer * most / layers
                        : 1 + t_below(rng, most);
}

/* Each value that may be dropped is, by some chance, at some depth. The graph has been checked. */
static void draw_depths(const ms_model *m, t_rng *rng, depths *to) {
    static const double shares[] = {0.3, 0.7, 1.0, 1.0};
    const msi_graph *g = &m->graph;
    const double share = shares[t_below(rng, 4)];
    const uint32_t most = t_chance(rng, 0.1) ? UINT8_MAX : 1 + t_below(rng, MOST_DEPTH);
    const int style = (int)t_below(rng, 4);
    for (uint32_t t = 0; t < g->tensors.count; ++t) {
        const uint32_t layer = g->tensors.items[t].producer;
        const bool drops =
            msi_is_droppable(g, t) && (is_dropped_anyway(g, t) || t_chance(rng, share));
        to->of[t] = (uint8_t)(drops ? depth_of(layer, g->layers.count, most, style, rng) : 0);
    }
    const bool may_be_early = msi_early_fault(m) == NULL;
    to->early_update = may_be_early && t_chance(rng, 0.5);
    to->update_lag_bytes = t_chance(rng, 0.5) ? t_below(rng, 2000) : 0;
}

/* The training program of a plan, made once more for these depths. */
static ms_result lower_again(ms_model *m, const msi_store *store, msi_plan *plan,
                             const depths *with) {
    const ms_allocator *a = &m->config.allocator;
    msi_program *p = &plan->train;
    const msi_graph *g = &m->graph;
    msi_lowering w;
    for (uint32_t t = 0; t < g->tensors.count; ++t) {
        plan->decisions[t].pass = with->of[t];
        plan->decisions[t].update_after = MSI_NONE;
    }
    if (with->early_update) {
        msi_place_updates(g, plan->decisions, true, false, with->update_lag_bytes);
    }
    bool fine = msi_lowering_init(&w, g, store, &m->optimizers, a);
    if (fine) {
        msi_lower_train(&w, plan->decisions, p);
        msi_schedule(g, &m->costs, store, a, &w.spare, p);
        msi_lowering_free(&w);
        fine = !p->out_of_memory;
    }
    if (fine) {
        msi_share_memory(g, p);
        msi_simulate(g, &m->costs, store, a, p);
        fine = !p->out_of_memory && msi_make_blocks(a, p, store->residents.count) &&
               msi_layout(a, p->layout.blocks.items, p->layout.blocks.count, MSI_LAYOUT_EFFORT, 0,
                          &p->layout.height) == MS_RESULT_OK;
    }
    if (!fine) {
        return msi_fail_memory(m, "the nested plan", p->code.ranges.count);
    }
    msi_resolve(store, p);
    plan->arena_bytes = msi_arena_of(&plan->train, &plan->eval);
    return MS_RESULT_OK;
}

/* Plans, that for the largest sizes among them, with a store that has room for
   each. Depths are drawn here where `rng` is given. */
static ms_result make_nested(ms_model *m, t_rng *rng, depths *with, msi_store **store,
                             msi_plan **plans) {
    int64_t sizes[MS_LIMIT_AXES];
    ms_result result = msi_check_graph(m, MSI_GOAL_PLAIN);
    result = result == MS_RESULT_OK ? msi_make_plans(m, MSI_GOAL_PLAIN, store, plans) : result;
    if (result != MS_RESULT_OK) {
        return result;
    }
    if (rng != NULL) {
        draw_depths(m, rng, with);
    }
    msi_get_sizes(&m->graph, sizes);
    uint64_t arena_bytes = 0;
    for (msi_plan *plan = *plans; plan != NULL && result == MS_RESULT_OK; plan = plan->next) {
        msi_set_sizes(&m->graph, plan->sizes);
        result = lower_again(m, *store, plan, with);
        arena_bytes = msi_larger(arena_bytes, plan->arena_bytes);
    }
    msi_set_sizes(&m->graph, sizes);
    if (result != MS_RESULT_OK) {
        msi_plans_free(m, *plans);
        msi_store_free(m, *store);
        return result;
    }
    (*store)->transient_bytes = arena_bytes - (*store)->resident_bytes;
    return MS_RESULT_OK;
}

// ------------------------------------------------------------------------------------------------
// a walk through a program, with a table of what every life holds

/* What a life holds: the value of a tensor, by its number; a buffer as it was at some time; or one
   of these. */
enum { HOLDS_VERSION = 1 << 30 };
static const uint32_t HOLDS_NOTHING = UINT32_MAX, HOLDS_RUBBISH = UINT32_MAX - 1,
                      HOLDS_NUMBERS = UINT32_MAX - 2; // gradients, scratch

typedef struct walk {
    const msi_graph *g;
    const msi_store *store;
    const msi_program *p;
    uint32_t *holds;              // per life
    uint32_t *seen;               // per operand of the graph: the state that forward saw
    uint32_t *after;              // per slot: what it held at the end of forward
    uint32_t *runs[MSI_OP_COUNT]; // per layer
    uint32_t versions, now;
    uint32_t pending[4 * MS_LIMIT_STATE], pending_count; // both ends of copies not awaited yet
    char *text;
} walk;

static bool wrong(walk *w, uint32_t operand, const char *what) {
    const msi_instruction *i = &w->p->code.instructions.items[w->now];
    snprintf(w->text, TEXT, "instruction %u (op %d, target %u), operand %u: %s", (unsigned)w->now,
             (int)i->op, (unsigned)i->target, (unsigned)operand, what);
    return false;
}

static uint32_t life_at(const walk *w, uint32_t operand) {
    const msi_instruction *i = &w->p->code.instructions.items[w->now];
    return w->p->code.operands.items[i->operand_first + operand].range;
}

static uint32_t *holds_at(const walk *w, uint32_t operand) {
    return &w->holds[life_at(w, operand)];
}

static bool is_slot(const walk *w, uint32_t range) {
    return range < w->store->residents.count;
}

/* Every operand lives now, and lives no longer than to its last use. */
static bool walk_lives(walk *w) {
    const msi_instruction *i = &w->p->code.instructions.items[w->now];
    for (uint32_t k = 0; k < i->operand_count; ++k) {
        const uint32_t at = life_at(w, k);
        const msi_range *range =
            at == MSI_NONE || is_slot(w, at) ? NULL : &w->p->code.ranges.items[at];
        if (range != NULL && (w->now < range->first || w->now > range->last)) {
            return wrong(w, k, "is not alive");
        }
    }
    return true;
}

static bool walk_read(walk *w, uint32_t operand, uint32_t expected) {
    const uint32_t holds = *holds_at(w, operand);
    if (holds == HOLDS_NOTHING) {
        return wrong(w, operand, "is read, but was not written");
    }
    return holds == expected || wrong(w, operand, "is read, but holds something else");
}

/* What a layer reads of its values. A buffer that some layer changes may hold any state. */
static bool walk_values_read(walk *w, const msi_layer *l, int group, uint32_t mask) {
    const uint32_t *operands = msi_group(w->g, l, group);
    const uint32_t start = l->start[group];
    for (uint32_t k = 0; k < l->count[group]; ++k) {
        const uint32_t t = operands[k];
        if (t == MSI_NONE || !(mask >> k & 1)) {
            continue;
        }
        if (life_at(w, start + k) == MSI_NONE) {
            return wrong(w, start + k, "is read, but not there");
        }
        const bool is_buffer = w->g->tensors.items[t].kind == MSI_KIND_BUFFER;
        if (!is_buffer && !walk_read(w, start + k, t)) {
            return false;
        }
    }
    return true;
}

/* State: forward sees it and changes it; a recomputation sees what forward saw; backward what is
   there after the last forward. */
static bool walk_state(walk *w, const msi_layer *l, msi_op op) {
    const uint32_t *state = msi_group(w->g, l, MSI_GROUP_STATE);
    uint32_t *seen = w->seen + (state - w->g->operands.items);
    const uint32_t start = l->start[MSI_GROUP_STATE];
    for (uint32_t k = 0; k < l->count[MSI_GROUP_STATE]; ++k) {
        if (state[k] == MSI_NONE) {
            continue;
        }
        const uint32_t slot = w->store->resident_of[state[k]];
        const uint32_t range = op == MSI_OP_BACKWARD ? slot : life_at(w, start + k);
        if (range != slot) {
            return wrong(w, start + k, "is not the buffer itself");
        }
        if (op == MSI_OP_FORWARD) {
            seen[k] = w->holds[slot];
            w->holds[slot] = HOLDS_VERSION + w->versions++;
        } else if (op == MSI_OP_BACKWARD && w->holds[slot] != w->after[slot]) {
            return wrong(w, start + k, "is not restored");
        } else if (msi_is_again(op) && !l->recompute_keeps_state) {
            if (w->holds[slot] != seen[k]) {
                return wrong(w, start + k, "is not the state that forward saw");
            }
            w->holds[slot] = HOLDS_VERSION + w->versions++;
        }
    }
    return true;
}

/* Whether a value lives in another place too. */
static bool is_twice(const walk *w, uint32_t tensor, uint32_t here) {
    for (uint32_t i = w->store->residents.count; i < w->p->code.ranges.count; ++i) {
        const msi_range *range = &w->p->code.ranges.items[i];
        if (i != here && range->tensor == tensor && range->role == MSI_ROLE_VALUE &&
            range->first < w->now && w->now <= range->last) {
            return true;
        }
    }
    return false;
}

static bool walk_written(walk *w, const msi_layer *l, msi_op op) {
    const bool own = op == MSI_OP_RECOMPUTE && l->recompute != NULL;
    for (int group = MSI_GROUP_OUT; group <= MSI_GROUP_SAVED; ++group) {
        const uint32_t *operands = msi_group(w->g, l, group);
        const uint32_t start = l->start[group];
        const uint32_t read = own ? l->recompute_masks[group] : 0;
        for (uint32_t k = 0; k < l->count[group]; ++k) {
            const bool is_there = operands[k] != MSI_NONE && life_at(w, start + k) != MSI_NONE;
            if (!is_there || (read >> k & 1)) {
                continue;
            }
            *holds_at(w, start + k) = operands[k];
            if (msi_is_again(op) && is_twice(w, operands[k], life_at(w, start + k))) {
                return wrong(w, start + k, "is in memory twice");
            }
        }
    }
    return true;
}

/* Gradients of inputs and params, from operand `first` on. */
static bool walk_edges(walk *w, uint32_t first, uint32_t count) {
    const msi_instruction *i = &w->p->code.instructions.items[w->now];
    for (uint32_t k = first; k < first + count; ++k) {
        const msi_operand *o = &w->p->code.operands.items[i->operand_first + k];
        if (o->range == MSI_NONE) {
            continue;
        }
        if (o->accumulate && !walk_read(w, k, HOLDS_NUMBERS)) {
            return false;
        }
        w->holds[o->range] = HOLDS_NUMBERS;
    }
    return true;
}

static bool walk_forward(walk *w, const msi_layer *l, msi_op op) {
    const bool own = op == MSI_OP_RECOMPUTE && l->recompute != NULL;
    for (int group = 0; group < MSI_GROUP_STATE; ++group) {
        const bool written = group == MSI_GROUP_OUT || group == MSI_GROUP_SAVED;
        const uint32_t reads = own ? l->recompute_masks[group] : written ? 0 : UINT32_MAX;
        if (!walk_values_read(w, l, group, reads)) {
            return false;
        }
    }
    const bool ends = op == MSI_OP_FORWARD && l->grads_in_forward != 0;
    const uint32_t edges = l->start[MSI_GROUP_COUNT];
    return walk_state(w, l, op) && walk_written(w, l, op) &&
           (!ends || walk_edges(w, edges, l->count[MSI_GROUP_IN]));
}

static bool walk_backward(walk *w, const msi_layer *l) {
    const uint32_t clobbered[] = {l->clobbers.in, l->clobbers.out, l->clobbers.saved};
    const uint32_t grad_out = l->start[MSI_GROUP_COUNT];
    const uint32_t edges = grad_out + l->count[MSI_GROUP_OUT];
    for (int group = 0; group < MSI_GROUP_STATE; ++group) {
        if (!walk_values_read(w, l, group, l->backward_masks[group])) {
            return false;
        }
    }
    for (uint32_t k = 0; k < l->count[MSI_GROUP_OUT]; ++k) {
        if (life_at(w, grad_out + k) != MSI_NONE && !walk_read(w, grad_out + k, HOLDS_NUMBERS)) {
            return false;
        }
    }
    for (int group = 0; group <= MSI_GROUP_SAVED; ++group) {
        for (uint32_t k = 0; k < l->count[group]; ++k) {
            const uint32_t operand = l->start[group] + k;
            if ((clobbered[group] >> k & 1) && life_at(w, operand) != MSI_NONE) {
                *holds_at(w, operand) = HOLDS_RUBBISH;
            }
        }
    }
    return walk_state(w, l, MSI_OP_BACKWARD) &&
           walk_edges(w, edges, (uint32_t)l->count[MSI_GROUP_IN] + l->count[MSI_GROUP_PARAM]);
}

/* What calls no layer. */
static bool walk_other(walk *w, const msi_instruction *i) {
    const bool reads_first = i->op == MSI_OP_ADD || i->op == MSI_OP_NORM || i->op == MSI_OP_CLIP;
    if (reads_first && !walk_read(w, 0, HOLDS_NUMBERS)) {
        return false;
    }
    switch ((msi_op)i->op) {
    case MSI_OP_SEED:
    case MSI_OP_ZERO:
        *holds_at(w, 0) = HOLDS_NUMBERS;
        return true;
    case MSI_OP_COPY:
    case MSI_OP_COPY_IN:
    case MSI_OP_COPY_OUT:
        if (*holds_at(w, 1) == HOLDS_NOTHING || *holds_at(w, 1) == HOLDS_RUBBISH) {
            return wrong(w, 1, "is copied, but holds nothing");
        }
        *holds_at(w, 0) = *holds_at(w, 1);
        return true;
    case MSI_OP_ADD:
    case MSI_OP_NORM:
        return walk_read(w, 1, HOLDS_NUMBERS);
    case MSI_OP_UPDATE:
        if (!walk_read(w, 1, HOLDS_NUMBERS)) {
            return false;
        }
        *holds_at(w, 0) = HOLDS_RUBBISH; // no layer may see the new values in this step
        return true;
    default:
        return true;
    }
}

/* No instruction has an end of a copy between host and device as an operand before its wait. */
static bool walk_pending(walk *w, const msi_instruction *i) {
    uint32_t left = 0;
    for (uint32_t k = 0; k < w->pending_count; k += 2) {
        const uint32_t *ends = &w->pending[k];
        bool awaited = false;
        for (uint32_t j = 0; j < i->operand_count; ++j) {
            const bool is_end = life_at(w, j) == ends[0] || life_at(w, j) == ends[1];
            if (is_end && i->op != MSI_OP_WAIT) {
                return wrong(w, j, "is an end of a copy that nobody has awaited");
            }
            awaited |= is_end;
        }
        if (!awaited) {
            memmove(&w->pending[left], ends, 2 * sizeof *ends);
            left += 2;
        }
    }
    w->pending_count = left;
    if (i->op == MSI_OP_COPY_IN || i->op == MSI_OP_COPY_OUT) {
        w->pending[w->pending_count++] = life_at(w, 0);
        w->pending[w->pending_count++] = life_at(w, 1);
    }
    return true;
}

static bool walk_instruction(walk *w) {
    const msi_instruction *i = &w->p->code.instructions.items[w->now];
    if (i->op == MSI_OP_NOTHING) {
        return true;
    }
    if (!walk_pending(w, i)) {
        return false;
    }
    if (!walk_lives(w)) {
        return false;
    }
    if (!msi_calls_layer((msi_op)i->op)) {
        return walk_other(w, i);
    }
    const msi_layer *l = &w->g->layers.items[i->target];
    const bool again = msi_is_again((msi_op)i->op);
    const bool own = i->op == MSI_OP_RECOMPUTE && l->recompute != NULL;
    const bool once = !again || (!own && l->no_recompute) || l->grads_in_forward != 0;
    const uint32_t runs = w->runs[i->op][i->target]++;
    if (once && (runs > 0 || again)) {
        return wrong(w, 0, "its layer runs once more");
    }
    return i->op == MSI_OP_BACKWARD ? walk_backward(w, l) : walk_forward(w, l, (msi_op)i->op);
}

/* No two blocks that live at the same time overlap; a life that goes on in the memory of another
   begins where that one ends. */
static bool walk_memory(walk *w) {
    const msi_program *p = w->p;
    for (uint32_t i = 0; i < p->layout.blocks.count; ++i) {
        const msi_block *a = &p->layout.blocks.items[i];
        for (uint32_t k = 0; k < i; ++k) {
            const msi_block *b = &p->layout.blocks.items[k];
            const bool apart_in_time = a->last < b->first || b->last < a->first;
            const bool apart =
                a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset;
            if (!apart_in_time && !apart) {
                snprintf(w->text, TEXT, "blocks %u and %u overlap", (unsigned)i, (unsigned)k);
                return false;
            }
        }
    }
    for (uint32_t i = w->store->residents.count; i < p->code.ranges.count; ++i) {
        const msi_range *range = &p->code.ranges.items[i];
        const msi_range *old =
            range->alias_of == MSI_NONE ? NULL : &p->code.ranges.items[range->alias_of];
        if (old != NULL && (old->last != range->first || old->outlives || !old->aliased)) {
            snprintf(w->text, TEXT, "life %u takes over memory that is in use", (unsigned)i);
            return false;
        }
    }
    return true;
}

/* Live bytes of an instruction, by adding up: the slow way. */
static bool walk_bytes(walk *w) {
    const msi_program *p = w->p;
    uint64_t bytes = 0;
    for (uint32_t i = w->store->residents.count; i < p->code.ranges.count; ++i) {
        const msi_range *range = &p->code.ranges.items[i];
        const bool is_given_on = range->aliased && range->last == w->now;
        bytes += range->first <= w->now && w->now <= range->last && !is_given_on
                     ? (range->bytes + 63) & ~(uint64_t)63
                     : 0;
    }
    return bytes == p->layout.live_bytes.items[w->now] || wrong(w, 0, "has other live bytes");
}

static bool walk_whole(walk *w) {
    bool fine = walk_memory(w);
    for (uint32_t i = 0; i < w->p->code.ranges.count; ++i) {
        const msi_resident *slot = is_slot(w, i) ? &w->store->residents.items[i] : NULL;
        w->holds[i] = slot == NULL                   ? HOLDS_NOTHING
                      : slot->role != MSI_ROLE_VALUE ? HOLDS_NUMBERS
                                                     : slot->tensor;
    }
    for (w->now = 0; w->now < w->p->code.instructions.count && fine; ++w->now) {
        if (w->now == w->p->code.forward_end) {
            memcpy(w->after, w->holds, w->store->residents.count * sizeof *w->after);
        }
        fine = walk_instruction(w) && walk_bytes(w);
    }
    for (uint32_t i = 0; i < w->g->layers.count && fine; ++i) {
        fine = w->runs[MSI_OP_FORWARD][i] == 1 &&
               w->runs[MSI_OP_BACKWARD][i] == (w->g->layers.items[i].has_backward ? 1u : 0u);
        if (!fine) {
            snprintf(w->text, TEXT, "layer %u does not run forward and backward", (unsigned)i);
        }
    }
    if (fine && w->pending_count > 0) {
        snprintf(w->text, TEXT, "a copy is never awaited");
        fine = false;
    }
    if (fine && w->holds[w->p->code.loss] != w->g->loss) {
        snprintf(w->text, TEXT, "the loss is lost");
        fine = false;
    }
    return fine;
}

static uint32_t *counters(uint64_t count) {
    uint32_t *memory = (uint32_t *)calloc((size_t)count + 1, sizeof(uint32_t));
    assert_non_null(memory);
    return memory;
}

static bool walk_program(const msi_graph *g, const msi_store *store, const msi_program *p,
                         char *text) {
    walk w;
    memset(&w, 0, sizeof w);
    w.g = g;
    w.store = store;
    w.p = p;
    w.text = text;
    w.holds = counters(p->code.ranges.count);
    w.seen = counters(g->operands.count);
    w.after = counters(store->residents.count);
    for (int op = 0; op < MSI_OP_COUNT; ++op) {
        w.runs[op] = counters(g->layers.count);
    }
    const bool fine = walk_whole(&w);
    free(w.holds);
    free(w.seen);
    free(w.after);
    for (int op = 0; op < MSI_OP_COUNT; ++op) {
        free(w.runs[op]);
    }
    return fine;
}

// ------------------------------------------------------------------------------------------------
// passes, found in another way: by closures over sets of tensors

typedef struct passes {
    const msi_graph *g;
    const msi_tensor_decision *decisions;
    const msi_program *p;
    uint32_t *last_reader;          // per tensor, lowest layer + 1; 0: none
    bool *there, *missing, *wanted; // per tensor
    bool *made, *leaves;            // per tensor, in this pass
    msi_op *ran;                    // per layer, in this pass; or MSI_OP_COUNT
    uint32_t now;                   // in the program
    uint32_t pass_count, longest;   // passes for one value
    char *text;
} passes;

static bool is_always_there(const passes *s, uint32_t t) {
    return msi_is_resident(&s->g->tensors.items[t]);
}

static const msi_layer *producer_of(const passes *s, uint32_t t) {
    return &s->g->layers.items[s->g->tensors.items[t].producer];
}

/* Whether a layer comes back by its own callback: all is there that this reads of its values. */
static bool comes_back_alone(const passes *s, const msi_layer *l) {
    bool alone = l->recompute != NULL;
    for (int group = MSI_GROUP_OUT; group <= MSI_GROUP_SAVED && alone; ++group) {
        const uint32_t *operands = msi_group(s->g, l, group);
        for (uint32_t k = 0; k < l->count[group]; ++k) {
            const bool is_read = l->recompute_masks[group] >> k & 1;
            alone = alone && (operands[k] == MSI_NONE || !is_read || s->there[operands[k]]);
        }
    }
    return alone;
}

/* Marks a tensor and what of `among` (NULL: anything) leads to it and is not there. */
static void close_over(const passes *s, uint32_t t, const bool *among, bool *marks) {
    if (is_always_there(s, t) || s->there[t] || marks[t] || (among != NULL && !among[t])) {
        return;
    }
    marks[t] = true;
    const msi_layer *l = producer_of(s, t);
    const uint32_t *in = msi_group(s->g, l, MSI_GROUP_IN);
    const uint32_t reads = comes_back_alone(s, l) ? l->recompute_masks[MSI_GROUP_IN] : UINT32_MAX;
    for (uint32_t k = 0; k < l->count[MSI_GROUP_IN]; ++k) {
        if (in[k] != MSI_NONE && (reads >> k & 1)) {
            close_over(s, in[k], among, marks);
        }
    }
}

static bool is_held_for_backward(const passes *s, uint32_t t, uint32_t depth, uint32_t reader) {
    const uint32_t last = s->last_reader[t];
    return s->g->tensors.items[t].is_output || t == s->g->loss ||
           (last != 0 && last - 1 <= reader && s->decisions[t].pass <= depth);
}

/* Whether a layer can run again without making this value. */
static bool may_be_left_out(const msi_layer *l, bool own, int group, uint32_t slot) {
    return own || (group == MSI_GROUP_SAVED && (l->optional_saved >> slot & 1) != 0);
}

/* What a layer makes when it runs again. */
static void run_again(passes *s, uint32_t layer, uint32_t depth, uint32_t reader) {
    const msi_layer *l = &s->g->layers.items[layer];
    const bool own = comes_back_alone(s, l);
    s->ran[layer] = own || l->recompute == NULL ? MSI_OP_RECOMPUTE : MSI_OP_REPEAT;
    for (int group = MSI_GROUP_OUT; group <= MSI_GROUP_SAVED; ++group) {
        const uint32_t *operands = msi_group(s->g, l, group);
        for (uint32_t k = 0; k < l->count[group]; ++k) {
            const uint32_t t = operands[k];
            if (t != MSI_NONE && !s->there[t] &&
                (!may_be_left_out(l, own, group, k) || s->wanted[t] ||
                 is_held_for_backward(s, t, depth, reader))) {
                s->there[t] = s->made[t] = true;
                s->leaves[t] = s->decisions[t].pass > depth;
            }
        }
    }
}

static bool unlike(const passes *s, uint32_t layer, const char *what) {
    snprintf(s->text, TEXT, "instruction %u, layer %u: %s", (unsigned)s->now, (unsigned)layer,
             what);
    return false;
}

/* What could be left out, is, unless the pass is for it. What its layer's own recomputation reads
   is there in any case. */
static bool made_for_something(const passes *s, const msi_instruction *i) {
    const msi_layer *l = &s->g->layers.items[i->target];
    const bool own = i->op == MSI_OP_RECOMPUTE && l->recompute != NULL;
    for (int group = MSI_GROUP_OUT; group <= MSI_GROUP_SAVED; ++group) {
        const uint32_t *operands = msi_group(s->g, l, group);
        for (uint32_t k = 0; k < l->count[group]; ++k) {
            const uint32_t operand = i->operand_first + l->start[group] + k;
            const bool is_given = s->p->code.operands.items[operand].range != MSI_NONE;
            const bool is_read = own && (l->recompute_masks[group] >> k & 1);
            if (operands[k] != MSI_NONE && may_be_left_out(l, own, group, k) && !is_read &&
                is_given != s->made[operands[k]]) {
                return false;
            }
        }
    }
    return true;
}

/* The program has to run the same layers in this pass, and what leaves after it lives no longer.
   */
static bool compare_pass(passes *s) {
    const msi_program *p = s->p;
    uint32_t left = 0, first = s->now;
    for (uint32_t i = 0; i < s->g->layers.count; ++i) {
        left += s->ran[i] != MSI_OP_COUNT;
    }
    for (; left > 0 && s->now < p->code.backward_end; ++s->now) {
        const msi_instruction *i = &p->code.instructions.items[s->now];
        if (i->op == MSI_OP_BACKWARD) {
            break;
        }
        if (msi_is_again((msi_op)i->op)) {
            if (s->ran[i->target] == MSI_OP_COUNT) {
                return unlike(s, i->target, "runs again for nothing");
            }
            if (s->ran[i->target] != (msi_op)i->op) {
                return unlike(s, i->target, "comes back the other way");
            }
            if (!made_for_something(s, i)) {
                return unlike(s, i->target, "makes what nobody wants");
            }
            s->ran[i->target] = MSI_OP_COUNT;
            left--;
        }
    }
    if (left > 0) {
        return unlike(s, 0, "something does not run again");
    }
    for (uint32_t k = 0; k < p->code.ranges.count; ++k) {
        const msi_range *range = &p->code.ranges.items[k];
        const bool is_of_pass =
            range->role == MSI_ROLE_VALUE && range->first >= first && range->first < s->now;
        if (is_of_pass && !is_always_there(s, range->tensor) && s->leaves[range->tensor] &&
            range->last >= s->now) {
            return unlike(s, s->g->tensors.items[range->tensor].producer,
                          "its value stays behind its pass");
        }
    }
    return true;
}

/* One pass: what its depth holds, and what leads there. */
static bool one_pass(passes *s, uint32_t depth, uint32_t reader) {
    const uint32_t tensors = s->g->tensors.count, layers = s->g->layers.count;
    memset(s->wanted, 0, tensors * sizeof *s->wanted);
    memset(s->made, 0, tensors * sizeof *s->made);
    memset(s->leaves, 0, tensors * sizeof *s->leaves);
    for (uint32_t i = 0; i < layers; ++i) {
        s->ran[i] = MSI_OP_COUNT;
    }
    for (uint32_t t = 0; t < tensors; ++t) {
        if (s->missing[t] && s->decisions[t].pass <= depth) {
            close_over(s, t, s->missing, s->wanted);
        }
    }
    for (uint32_t t = 0; t < tensors; ++t) {
        if (s->wanted[t]) {
            s->ran[s->g->tensors.items[t].producer] = MSI_OP_RECOMPUTE;
        }
    }
    for (uint32_t layer = 0; layer < layers; ++layer) {
        if (s->ran[layer] != MSI_OP_COUNT) {
            run_again(s, layer, depth, reader);
        }
    }
    for (uint32_t t = 0; t < tensors; ++t) {
        s->there[t] &= !s->leaves[t];
    }
    s->pass_count++;
    return compare_pass(s);
}

static bool bring_back(passes *s, uint32_t t, uint32_t reader) {
    uint32_t count = 0;
    while (!is_always_there(s, t) && !s->there[t]) {
        uint32_t depth = UINT32_MAX;
        memset(s->missing, 0, s->g->tensors.count * sizeof *s->missing);
        close_over(s, t, NULL, s->missing);
        for (uint32_t k = 0; k < s->g->tensors.count; ++k) {
            depth = s->missing[k] && s->decisions[k].pass < depth ? s->decisions[k].pass : depth;
        }
        if (depth == 0) {
            return unlike(s, 0, "what is kept is missing");
        }
        count++;
        if (!one_pass(s, depth, reader)) {
            return false;
        }
    }
    s->longest = count > s->longest ? count : s->longest;
    return true;
}

/* Before the backward of a layer: all that it reads comes back; then nothing else runs again. */
static bool before_backward(passes *s, uint32_t layer) {
    const msi_layer *l = &s->g->layers.items[layer];
    for (int group = 0; group < MSI_GROUP_PARAM; ++group) {
        const uint32_t *operands = msi_group(s->g, l, group);
        for (uint32_t k = 0; k < l->count[group]; ++k) {
            if (operands[k] != MSI_NONE && (l->backward_masks[group] >> k & 1) &&
                !bring_back(s, operands[k], layer)) {
                return false;
            }
        }
    }
    while (s->p->code.instructions.items[s->now].op != MSI_OP_BACKWARD) {
        const msi_instruction *i = &s->p->code.instructions.items[s->now];
        if (msi_is_again((msi_op)i->op)) {
            return unlike(s, i->target, "runs again once too often");
        }
        s->now++;
    }
    return s->p->code.instructions.items[s->now++].target == layer ||
           unlike(s, layer, "its backward is out of order");
}

static void find_last_readers(passes *s) {
    for (uint32_t i = s->g->layers.count; i-- > 0;) {
        const msi_layer *l = &s->g->layers.items[i];
        for (int group = 0; group < MSI_GROUP_PARAM && l->has_backward; ++group) {
            for (uint32_t k = 0; k < l->count[group]; ++k) {
                const uint32_t t = msi_group(s->g, l, group)[k];
                if (t != MSI_NONE && (l->backward_masks[group] >> k & 1)) {
                    s->last_reader[t] = i + 1;
                }
            }
        }
    }
}

static bool *flags(uint64_t count) {
    bool *memory = (bool *)calloc((size_t)count + 1, sizeof(bool));
    assert_non_null(memory);
    return memory;
}

/* Whether a program recomputes as its depths say. *longest becomes the largest number of passes
   for one value. */
static bool passes_agree(const msi_graph *g, const msi_tensor_decision *decisions,
                         const msi_program *p, uint32_t *longest, char *text) {
    passes s;
    memset(&s, 0, sizeof s);
    s.g = g;
    s.decisions = decisions;
    s.p = p;
    s.text = text;
    s.last_reader = counters(g->tensors.count);
    s.there = flags(g->tensors.count);
    s.missing = flags(g->tensors.count);
    s.wanted = flags(g->tensors.count);
    s.made = flags(g->tensors.count);
    s.leaves = flags(g->tensors.count);
    s.ran = (msi_op *)calloc(g->layers.count + 1u, sizeof *s.ran);
    assert_non_null(s.ran);
    find_last_readers(&s);
    for (uint32_t t = 0; t < g->tensors.count; ++t) {
        s.there[t] = decisions[t].pass == 0;
    }
    s.now = p->code.forward_end;
    bool fine = true;
    for (uint32_t i = g->layers.count; i-- > 0 && fine;) {
        fine = !g->layers.items[i].has_backward || before_backward(&s, i);
    }
    *longest = s.longest > *longest ? s.longest : *longest;
    free(s.last_reader);
    free(s.there);
    free(s.missing);
    free(s.wanted);
    free(s.made);
    free(s.leaves);
    free(s.ran);
    return fine;
}

/* Both checks, of the training program in force. */
static bool plan_is_sound(const ms_model *m, uint32_t *longest, char *text) {
    const msi_plan *plan = m->run.plan;
    return walk_program(&m->graph, m->run.store, &plan->train, text) &&
           passes_agree(&m->graph, plan->decisions, &plan->train, longest, text);
}

// ------------------------------------------------------------------------------------------------
// chains without memory: numbers of recomputations and peaks, by formula and by hand

enum { CHAIN_LIMIT = 1024, UNIT = 4096 };

/* x[0], an input, to x[layers], the loss; backward reads the input of its layer. */
typedef struct bare_chain {
    ms_model *model;
    uint32_t layers;
    uint64_t bytes[CHAIN_LIMIT + 1]; // of x[i]
    uint32_t tensor[CHAIN_LIMIT + 1];
    uint8_t depth[CHAIN_LIMIT + 1]; // of x[i]
} bare_chain;

static void chain_make(bare_chain *c) {
    ms_config config = t_config();
    ms_tensor last = {0};
    config.dry_run = true;
    assert_int_equal(ms_create(&config, &c->model), MS_RESULT_OK);
    const ms_tensor weight = ms_param(c->model, "weight", MS_DTYPE_F32, ms_shape1(16));
    for (uint32_t i = 0; i <= c->layers; ++i) {
        const ms_shape shape = ms_shape1((int64_t)(c->bytes[i] / sizeof(float)));
        const ms_tensor x = i == 0 ? ms_input(c->model, "x", MS_DTYPE_F32, shape)
                                   : ms_activation(c->model, "x", MS_DTYPE_F32, shape);
        if (i > 0) {
            ms_layer_desc d;
            memset(&d, 0, sizeof d);
            d.in[0] = last;
            d.out[0] = x;
            d.param[0] = i == 1 ? weight : d.param[0];
            d.backward_reads.in = 1;
            ms_register_layer(c->model, &d);
        }
        c->tensor[i] = msi_index(&c->model->graph, x);
        last = x;
    }
    ms_set_loss(c->model, last);
    t_ok(c->model, ms_wrap(c->model));
}

/* Puts the depths into force, and checks the program. */
static const msi_program *chain_nest(bare_chain *c) {
    depths with;
    msi_store *store;
    msi_plan *plans;
    char text[TEXT] = "";
    uint32_t longest = 0;
    const ms_model *m = c->model;
    memset(&with, 0, sizeof with);
    with.of = (uint8_t *)calloc(m->graph.tensors.count, 1);
    assert_non_null(with.of);
    for (uint32_t i = 1; i < c->layers; ++i) {
        with.of[c->tensor[i]] = c->depth[i];
    }
    t_ok(c->model, make_nested(c->model, NULL, &with, &store, &plans));
    t_ok(c->model, msi_adopt_and_log(c->model, store, plans, MSI_GOAL_PLAIN));
    if (!plan_is_sound(c->model, &longest, text)) {
        fail_msg("%s", text);
    }
    free(with.of);
    return &m->run.plan->train;
}

static uint32_t count_ops(const msi_program *p, msi_op op) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->code.instructions.count; ++i) {
        count += p->code.instructions.items[i].op == (uint8_t)op;
    }
    return count;
}

static void chain_start(bare_chain *c, uint32_t layers) {
    memset(c, 0, sizeof *c);
    c->layers = layers;
    for (uint32_t i = 0; i <= layers; ++i) {
        c->bytes[i] = UNIT;
    }
    chain_make(c);
}

/* Halves: the middle of 2^k layers comes back first, then the middle of each half, and so on. To
   reach the middle of n layers takes n / 2 of them, so R(n) = n / 2 + 2 R(n / 2) = n k / 2. At the
   peak there are k values, the loss, and two gradients. */
static void halves_take_n_log_n(void **state) {
    (void)state;
    static bare_chain c;
    for (uint32_t k = 1; k <= 10; ++k) {
        const uint32_t n = 1u << k;
        chain_start(&c, n);
        for (uint32_t i = 1; i < n; ++i) {
            c.depth[i] = (uint8_t)(k - msi_lowest_bit(i));
        }
        const msi_program *p = chain_nest(&c);
        assert_int_equal(p->code.recompute_count, n / 2 * k);
        assert_int_equal(count_ops(p, MSI_OP_RECOMPUTE), n / 2 * k);
        assert_int_equal(p->layout.peak_bytes, (uint64_t)UNIT * (k + 3));
        ms_destroy(c.model);
    }
}

/* The last value first: each is made from the very beginning, n (n - 1) / 2 times a layer in all,
   and beside the loss and two gradients there is never more than one. */
static void last_first_takes_n_squared(void **state) {
    (void)state;
    static bare_chain c;
    for (uint32_t n = 3; n <= 256; n += n < 20 ? 1 : 59) {
        chain_start(&c, n);
        for (uint32_t i = 1; i < n; ++i) {
            c.depth[i] = (uint8_t)(n - i);
        }
        const msi_program *p = chain_nest(&c);
        assert_int_equal(p->code.recompute_count, n * (n - 1) / 2);
        assert_int_equal(p->layout.peak_bytes, 4 * (uint64_t)UNIT);
        ms_destroy(c.model);
    }
}

/* At one depth, and where each is held before the next is needed, a layer runs again once. */
static void one_pass_runs_each_layer_once(void **state) {
    (void)state;
    static bare_chain c;
    for (int deepening = 0; deepening < 2; ++deepening) {
        chain_start(&c, 200);
        for (uint32_t i = 1; i < 200; ++i) {
            c.depth[i] = (uint8_t)(deepening ? i : 255);
        }
        const msi_program *p = chain_nest(&c);
        assert_int_equal(p->code.recompute_count, 199);
        assert_int_equal(p->layout.peak_bytes, (uint64_t)UNIT * (199 + 3));
        ms_destroy(c.model);
    }
}

/* What a step of the chain needs and how often layers run again, on the back of an envelope. */
typedef struct envelope {
    const bare_chain *c;
    bool held[CHAIN_LIMIT + 1];
    uint64_t peak, gradients;
    uint32_t runs;
} envelope;

/* Live: the loss if there is one yet, gradients, what is held, and up to two values more. */
static void envelope_note(envelope *e, bool has_loss, uint32_t in, uint32_t out) {
    uint64_t live = e->gradients + (has_loss ? e->c->bytes[e->c->layers] : 0);
    for (uint32_t i = 1; i < e->c->layers; ++i) {
        live += e->held[i] || i == in || i == out ? e->c->bytes[i] : 0;
    }
    e->peak = live > e->peak ? live : e->peak;
}

static void envelope_bring_back(envelope *e, uint32_t target) {
    const bare_chain *c = e->c;
    while (target > 0 && !e->held[target]) {
        uint32_t from = target, depth = 255, to = 0;
        for (; from > 0 && !e->held[from]; --from) {
            depth = c->depth[from] < depth ? c->depth[from] : depth;
        }
        for (uint32_t i = from + 1; i <= target; ++i) {
            to = c->depth[i] <= depth ? i : to;
        }
        for (uint32_t i = from + 1; i <= to; ++i) {
            envelope_note(e, true, i - 1, i);
            e->held[i] = c->depth[i] <= depth;
            e->runs++;
        }
    }
}

static void envelope_fill(envelope *e, const bare_chain *c) {
    memset(e, 0, sizeof *e);
    e->c = c;
    for (uint32_t i = 1; i <= c->layers; ++i) {
        envelope_note(e, i == c->layers, i - 1, i);
        e->held[i] = i < c->layers && c->depth[i] == 0;
    }
    for (uint32_t i = c->layers; i-- > 0;) {
        e->gradients = c->bytes[i + 1];
        envelope_bring_back(e, i);
        e->gradients += i > 0 ? c->bytes[i] : 16 * sizeof(float); // of x[i], or of the weight
        envelope_note(e, true, i, i);
        e->held[i] = false;
    }
}

static void random_chains_need_what_the_envelope_says(void **state) {
    (void)state;
    static bare_chain c;
    static envelope e;
    t_rng rng = t_seed(77);
    uint32_t deeper = 0;
    for (int round = 0; round < 300; ++round) {
        memset(&c, 0, sizeof c);
        c.layers = 2 + t_below(&rng, round < 290 ? 40 : 300);
        const uint32_t most = 1 + t_below(&rng, MOST_DEPTH);
        const double kept = t_below(&rng, 3) * 0.15;
        for (uint32_t i = 0; i <= c.layers; ++i) {
            c.bytes[i] = 64 * (1 + t_below(&rng, 30));
            c.depth[i] = (uint8_t)(t_chance(&rng, kept) ? 0 : 1 + t_below(&rng, most));
        }
        chain_make(&c);
        const msi_program *p = chain_nest(&c);
        envelope_fill(&e, &c);
        assert_int_equal(p->code.recompute_count, e.runs);
        assert_int_equal(p->layout.peak_bytes, e.peak);
        deeper += e.runs >= c.layers;
        ms_destroy(c.model);
    }
    assert_true(deeper > 100);
}

// ------------------------------------------------------------------------------------------------
// random graphs: chains too, of layers that declare as much

/* As rd_add_ordinary, with the last output as the first input. */
static uint32_t add_link(rd_graph *g, uint32_t last) {
    rd_layer *l = rd_begin_layer(g);
    rd_put(g, l, RD_GROUP_IN, last);
    rd_add_inputs(g, l, t_below(&g->rng, 8) / 7);
    rd_add_outputs(g, l, 1);
    const uint32_t out = l->slot[RD_GROUP_OUT][0] - 1u;
    rd_add_saved(g, l);
    rd_add_params(g, l, t_below(&g->rng, 4) / 2);
    rd_add_states(g, l);
    l->has_backward = true;
    l->desc.no_recompute = rd_spiced(g, 0.03);
    rd_random_in_place(g, l);
    rd_random_recompute(g, l);
    const uint32_t own = l->desc.recompute_reads.saved;
    l->desc.optional_saved = rd_some(g, rd_used(l, RD_GROUP_SAVED) & ~own, rd_spiced(g, 0.5) * 0.7);
    l->desc.forward_workspace = rd_random_workspace(g, l);
    if (l->has_recompute) {
        l->desc.recompute_workspace = rd_random_workspace(g, l);
    }
    rd_random_backward(g, l);
    return out;
}

static rd_graph *generate_chain(uint64_t seed) {
    rd_graph *g = (rd_graph *)calloc(1, sizeof(rd_graph));
    assert_non_null(g);
    g->rng = t_seed(seed ^ 0xc4a1);
    g->seed = seed;
    g->spice = t_unit(&g->rng);
    g->axis_count = t_below(&g->rng, 3);
    for (uint32_t i = 0; i < RD_AXIS_LIMIT; ++i) {
        g->largest[i] = 1 + (int64_t)t_below(&g->rng, 4);
        g->size[i] = 1 + (int64_t)t_below(&g->rng, (uint32_t)g->largest[i]);
    }
    uint32_t last = rd_new_input(g);
    for (uint32_t i = 8 + t_below(&g->rng, 20); i > 0; --i) {
        last = add_link(g, last);
    }
    rd_add_head(g);
    rd_add_loss(g, false);
    rd_random_optimizer(g);
    rd_count_features(g);
    return g;
}

/* Every third graph is a chain. */
static rd_graph *generate(uint64_t seed) {
    return seed % 3 == 0 ? generate_chain(seed) : rd_generate(seed);
}

// ------------------------------------------------------------------------------------------------
// one graph: the plain plan, a nested one, and a reference

enum { ROUNDS = 3 };

typedef struct trial {
    rd_graph *graph;
    t_rng rng;
    rd_net *plain, *nested;
    rd_reference *reference;
    t_heap heap;
    depths with;
    uint64_t round;
    uint32_t longest; // passes for one value
    char failure[RD_TEXT];
} trial;

static bool works(const rd_net *n, ms_result result, const char *call) {
    return result == MS_RESULT_OK ||
           rd_fail(&n->run, "%s: %s: %s", call, ms_result_name(result), ms_last_error(n->model));
}

#define TRY(n, call) works((n), (call), #call)

/* Other depths for the nested net, which keeps all that lasts. */
static ms_result nest_quietly(trial *t) {
    msi_store *store;
    msi_plan *plans;
    ms_model *m = t->nested->model;
    const ms_result result = make_nested(m, &t->rng, &t->with, &store, &plans);
    return result == MS_RESULT_OK ? msi_adopt_and_log(m, store, plans, MSI_GOAL_PLAIN) : result;
}

static bool is_sound(trial *t) {
    char text[TEXT] = "";
    return plan_is_sound(t->nested->model, &t->longest, text) ||
           rd_fail(&t->nested->run, "%s", text);
}

static bool nest(trial *t) {
    return TRY(t->nested, nest_quietly(t)) && is_sound(t);
}

/* Both nets and the reference, with their first values; the nested net has no plan yet. */
static bool trial_begin(trial *t, rd_graph *g, const ms_config *nested) {
    ms_config plain = t_config();
    ms_config config = *nested;
    plain.checkpointing = MS_SWITCH_OFF;
    plain.early_update = MS_SWITCH_OFF;
    memset(t, 0, sizeof *t);
    t->graph = g;
    t->rng = t_seed(g->seed ^ 0x9e57);
    t->with.of = (uint8_t *)malloc(RD_VALUES);
    assert_non_null(t->with.of);
    config.allocator = t_heap_allocator(&t->heap);
    t->nested = rd_net_create(g, &config, "nested", t->failure, false);
    g->move = NULL;
    t->plain = rd_net_create(g, &plain, "plain", t->failure, false);
    t->reference = rd_reference_create(g, t->failure);
    t->round = 1;
    return t->failure[0] == 0 && TRY(t->plain, ms_wrap(t->plain->model)) &&
           rd_net_write(t->plain, 0, false) && rd_net_write(t->nested, 0, false);
}

static void trial_end(trial *t) {
    rd_net_destroy(t->plain);
    rd_net_destroy(t->nested);
    rd_reference_destroy(t->reference);
    free(t->with.of);
    free(t->graph);
    if (t->failure[0] == 0 && (t->heap.live_count != 0 || t->heap.wrong_releases != 0)) {
        snprintf(t->failure, RD_TEXT, "%u allocations are left", (unsigned)t->heap.live_count);
    }
}

/* One tensor of both nets, bit for bit, and as numbers the reference's. A gradient whose param was
   updated inside backward cannot be read. */
static bool same(trial *t, const char *what, uint32_t value, ms_tensor plain, ms_tensor nested,
                 const void *reference) {
    uint64_t a[RD_ELEMENTS] = {0}, b[RD_ELEMENTS] = {0};
    const rd_value *v = &t->graph->value[value];
    const uint64_t bytes = rd_bytes(v, t->plain->run.size);
    const ms_result of_plain = ms_read(t->plain->model, plain, a);
    const ms_result of_nested = ms_read(t->nested->model, nested, b);
    const bool is_gradient = ms_gradient(t->plain->model, t->plain->handle[value]).id == plain.id;
    const msi_tensor_decision *decisions = t->nested->model->run.plan->decisions;
    const bool may_be_gone =
        is_gradient &&
        decisions[msi_index(&t->nested->model->graph, nested)].update_after != MSI_NONE;
    if (of_plain != of_nested && !(of_nested == MS_RESULT_ORDER && may_be_gone)) {
        return rd_fail(&t->nested->run, "reading %s %u: %s, plain %s", what, (unsigned)value,
                       ms_result_name(of_nested), ms_result_name(of_plain));
    }
    if (of_plain != MS_RESULT_OK || of_nested != MS_RESULT_OK) {
        return is_gradient || of_plain == MS_RESULT_ORDER; // the loss does not depend on it
    }
    if (memcmp(a, b, (size_t)bytes) != 0) {
        return rd_fail(&t->nested->run, "%s %u differs from the plain plan's", what,
                       (unsigned)value);
    }
    bool agrees = true;
    const float *found = (const float *)(const void *)b, *expected = (const float *)reference;
    for (uint32_t i = 0; reference != NULL && v->dtype == MS_DTYPE_F32 && i < bytes / 4; ++i) {
        agrees &= found[i] == expected[i];
    }
    if (reference != NULL && v->dtype != MS_DTYPE_F32) {
        agrees = memcmp(b, reference, (size_t)bytes) == 0;
    }
    return agrees ||
           rd_fail(&t->nested->run, "%s %u differs from the reference's", what, (unsigned)value);
}

static bool same_gradients(trial *t) {
    bool fine = true;
    for (uint32_t i = 0; i < t->graph->value_count && fine; ++i) {
        const rd_value *v = &t->graph->value[i];
        if (v->role == RD_PARAM && !v->frozen) {
            fine = same(t, "gradient", i, ms_gradient(t->plain->model, t->plain->handle[i]),
                        ms_gradient(t->nested->model, t->nested->handle[i]),
                        t->reference->gradient[i]);
        }
    }
    return fine;
}

/* What forward leaves, or a whole step, of which the reference knows too. */
static bool same_values(trial *t, bool whole) {
    bool fine = true;
    for (uint32_t i = 0; i < t->graph->value_count && fine; ++i) {
        const rd_value *v = &t->graph->value[i];
        if (v->role < RD_ACTIVATION || v->kept || i == t->graph->loss) {
            fine = same(t, "value", i, t->plain->handle[i], t->nested->handle[i],
                        whole ? t->reference->data[i] : NULL);
        }
        for (uint32_t k = 0;
             whole && k < rd_state_count(t->graph, i) && v->role == RD_PARAM && !v->frozen && fine;
             ++k) {
            fine = same(t, "state", i,
                        ms_optimizer_state(t->plain->model, t->plain->handle[i], (int)k),
                        ms_optimizer_state(t->nested->model, t->nested->handle[i], (int)k),
                        t->reference->state[i][k]);
        }
    }
    return fine;
}

static void begin_pass(rd_net *n, uint32_t micro) {
    n->run.micro = micro;
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        n->run.op[i].forwards = n->run.op[i].backwards = n->run.op[i].recomputes = 0;
    }
}

static bool forward_net(trial *t, rd_net *n, uint32_t micro, double *loss) {
    begin_pass(n, micro);
    return rd_net_write(n, t->round + micro, false) && TRY(n, ms_forward(n->model, loss));
}

static bool backward_net(rd_net *n) {
    return TRY(n, ms_backward(n->model)) && TRY(n, ms_synchronize(n->model));
}

static bool reference_micro(trial *t, uint32_t micro) {
    rd_reference *r = t->reference;
    rd_reference_write(r, t->round + micro, false);
    r->run.micro = micro;
    for (uint32_t i = 0; i < t->graph->layer_count; ++i) {
        r->run.op[i].seed = t->plain->run.op[i].seed;
    }
    return rd_reference_forward(r, MS_PHASE_FORWARD) && rd_reference_backward(r);
}

/* One micro-batch of all three, up to their gradients. */
static bool one_micro(trial *t, uint32_t micro) {
    double plain = 0.0, nested = 0.0;
    if (!forward_net(t, t->plain, micro, &plain) || !forward_net(t, t->nested, micro, &nested)) {
        return false;
    }
    if (memcmp(&plain, &nested, sizeof plain) != 0) {
        return rd_fail(&t->nested->run, "a loss of %.17g, plain %.17g", nested, plain);
    }
    return same_values(t, false) && backward_net(t->plain) && backward_net(t->nested) &&
           reference_micro(t, micro);
}

static bool step_all(trial *t) {
    const uint32_t micros = t->graph->accumulation;
    for (uint32_t micro = 0; micro < micros; ++micro) {
        if (!one_micro(t, micro)) {
            return rd_fail(&t->nested->run, "a step failed");
        }
    }
    if (!same_gradients(t) || !TRY(t->plain, ms_update(t->plain->model)) ||
        !TRY(t->nested, ms_update(t->nested->model))) {
        return false;
    }
    rd_reference_update(t->reference);
    if (!TRY(t->nested, ms_synchronize(t->nested->model))) {
        return false;
    }
    t->round += micros;
    t->plain->run.step += 1;
    t->nested->run.step += 1;
    t->reference->run.step += 1;
    return same_values(t, true);
}

static bool reshape_all(trial *t) {
    int64_t size[RD_AXIS_LIMIT];
    for (uint32_t i = 0; i < RD_AXIS_LIMIT; ++i) {
        size[i] = i < t->graph->axis_count
                      ? 1 + (int64_t)t_below(&t->rng, (uint32_t)rd_largest_trained(t->graph, i))
                      : t->graph->size[i];
    }
    rd_net *const nets[] = {t->plain, t->nested};
    for (int k = 0; k < 2; ++k) {
        if (!TRY(nets[k], ms_reshape(nets[k]->model, size))) {
            return false;
        }
        memcpy(nets[k]->run.size, size, sizeof size);
        if (!rd_net_write(nets[k], t->round + 1000, true)) {
            return false;
        }
    }
    memcpy(t->reference->run.size, size, sizeof size);
    rd_reference_write(t->reference, t->round + 1000, true);
    return true;
}

/* Steps, with other sizes and other depths in between. */
static bool run_trial(trial *t, rd_graph *g, const ms_config *config) {
    bool fine = trial_begin(t, g, config) && nest(t);
    for (int step = 0; step < ROUNDS && fine; ++step) {
        fine = step_all(t);
        if (fine && g->axis_count > 0 && t_chance(&t->rng, 0.4)) {
            fine = reshape_all(t); // to a plan without depths, in the room of one with them
            fine = fine && (t_chance(&t->rng, 0.5) || step_all(t));
        }
        fine = fine && (t_chance(&t->rng, 0.3) || nest(t));
    }
    return fine && t->failure[0] == 0;
}

typedef struct totals {
    uint64_t graphs, recomputations, passes;
    uint32_t longest;
} totals;

/* What random graphs have seen, for a test that the net has meshes. */
static totals covered;
static uint64_t features[RD_FEATURE_COUNT];

static void expect_trial(uint64_t seed, rd_graph *g, const ms_config *config) {
    static trial t;
    memset(g->trains, 0, sizeof g->trains); // its plans of several passes are made for one size
    const bool fine = run_trial(&t, g, config);
    for (int i = 0; i < RD_FEATURE_COUNT; ++i) {
        features[i] += g->seen[i];
    }
    if (!fine) {
        print_error("%s\nfailed: MEMSCALE_TEST_SEED=%llu MEMSCALE_TEST_DAGS=1\n", t.failure,
                    (unsigned long long)seed);
        rd_print(g);
        fail();
    }
    covered.graphs += 1;
    covered.passes += t.longest;
    covered.longest = t.longest > covered.longest ? t.longest : covered.longest;
    trial_end(&t);
    if (t.failure[0] != 0) {
        fail_msg("seed %llu: %s", (unsigned long long)seed, t.failure);
    }
}

static void for_all_graphs(bool debug, uint64_t share) {
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t count =
        t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS) / share);
    for (uint64_t seed = first; seed < first + count; ++seed) {
        ms_config config = t_config();
        config.debug = debug;
        expect_trial(seed, generate(seed), &config);
    }
}

static void nested_plans_change_no_bit(void **state) {
    (void)state;
    for_all_graphs(false, 1);
}

static void nested_plans_pass_debug_mode(void **state) {
    (void)state;
    for_all_graphs(true, 5);
}

static void nested_plans_wait_for_all_they_need(void **state) {
    (void)state;
    static v_layer layers[RD_LAYERS];
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t count =
        t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_LATE_GRAPHS, LATE_GRAPHS));
    for (uint64_t seed = first; seed < first + count; ++seed) {
        v_device device;
        ms_config config = t_config();
        rd_graph *g = generate(seed);
        v_open(&device, seed);
        config.backend = v_backend(&device);
        ld_make_late(g, layers);
        expect_trial(seed, g, &config);
        assert_int_equal(device.engine.pending, 0);
        assert_int_equal(device.callback_error, 0);
        v_close(&device);
    }
}

/* A program that is lowered from the one before is the one that its decisions lead to. */
static void changed_decisions_lead_to_the_same_program(void **state) {
    (void)state;
    static trial t;
    static repeats r;
    memset(&r, 0, sizeof r);
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t count = t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
    for (uint64_t seed = first; seed < first + count; ++seed) {
        ms_config config = t_config();
        rd_graph *g = generate(seed);
        rd_random_dtypes(g, seed);
        if (!trial_begin(&t, g, &config)) {
            fail_msg("seed %llu: %s", (unsigned long long)seed, t.failure);
        }
        repeats_check(&r, t.plain->model, seed, 24);
        trial_end(&t);
    }
    assert_true(r.repeated > r.ranges / 4 * 3 || count < QUICK_GRAPHS);
    print_message("%llu of %llu live ranges are in blocks that were repeated\n",
                  (unsigned long long)r.repeated, (unsigned long long)r.ranges);
}

// ------------------------------------------------------------------------------------------------
// plans of the solver

typedef struct solved {
    uint32_t plans, nested, deepest; // all of them; those that go deeper than 1; the depth
} solved;

static void note_plan(const ms_model *m, solved *to) {
    uint32_t deepest = 0;
    for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
        const uint32_t pass = m->run.plan->decisions[t].pass;
        deepest = pass > deepest ? pass : deepest;
    }
    to->plans += 1;
    to->nested += deepest > 1;
    to->deepest = deepest > to->deepest ? deepest : to->deepest;
}

/* A plan for a budget from the smallest one up, and a step with it. */
static bool solve_and_step(trial *t, uint64_t smallest, solved *to) {
    rd_net *n = t->nested;
    ms_memory_report report;
    memset(&report, 0, sizeof report);
    const uint64_t span = t->plain->model->run.plan->arena_bytes - smallest + 1;
    const uint64_t more = t_chance(&t->rng, 0.4) || span > smallest ? 0 : t_next(&t->rng) % span;
    ms_set_budget(n->model, smallest + more);
    if (!TRY(n, ms_wrap(n->model)) || !TRY(n, ms_report(n->model, &report)) || !is_sound(t)) {
        return false;
    }
    if (report.arena_bytes > smallest + more) {
        return rd_fail(&n->run, "an arena of %u bytes for a budget of %u",
                       (unsigned)report.arena_bytes, (unsigned)(smallest + more));
    }
    note_plan(n->model, to);
    return step_all(t);
}

static bool run_solved(trial *t, rd_graph *g, const ms_config *config, solved *to) {
    uint64_t smallest = 0;
    bool fine = trial_begin(t, g, config) &&
                TRY(t->nested, ms_smallest_budget(t->nested->model, &smallest));
    for (int step = 0; step < ROUNDS && fine; ++step) {
        fine = solve_and_step(t, smallest, to);
        if (fine && g->axis_count > 0 && t_chance(&t->rng, 0.4)) {
            fine = reshape_all(t) && is_sound(t) && step_all(t);
        }
    }
    return fine && t->failure[0] == 0;
}

/* The solver nests by itself where budgets are small. */
static void plans_of_the_solver_change_no_bit(void **state) {
    (void)state;
    static trial t;
    solved all = {0, 0, 0};
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t count =
        t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_SOLVED_GRAPHS, SOLVED_GRAPHS));
    for (uint64_t seed = first; seed < first + count; ++seed) {
        ms_config config = t_config();
        config.debug = seed % 16 == 0;
        if (!run_solved(&t, generate(seed), &config, &all)) {
            print_error("%s\nfailed: MEMSCALE_TEST_SEED=%llu MEMSCALE_TEST_DAGS=1\n", t.failure,
                        (unsigned long long)seed);
            rd_print(t.graph);
            fail();
        }
        trial_end(&t);
        assert_string_equal(t.failure, "");
    }
    print_message("%u plans, %u of them nested, the deepest %u passes\n", (unsigned)all.plans,
                  (unsigned)all.nested, (unsigned)all.deepest);
    assert_true(count < 100 || all.nested * 50 > all.plans);
}

/* The smallest budget of a deep network, on data whose every bit counts. */
static void a_deep_network_trains_in_passes(void **state) {
    (void)state;
    static t_chain plain, tight;
    ms_config config = t_config();
    solved all = {0, 0, 0};
    uint64_t budget = 0;
    uint32_t longest = 0;
    char text[TEXT] = "";
    t_chain_start(&plain, &config, T_CHAIN_LAYERS);
    t_chain_start(&tight, &config, T_CHAIN_LAYERS);
    t_ok(tight.model, ms_smallest_budget(tight.model, &budget));
    ms_set_budget(tight.model, budget);
    t_ok(tight.model, ms_wrap(tight.model));
    note_plan(tight.model, &all);
    assert_true(all.deepest > 1);
    if (!plan_is_sound(tight.model, &longest, text)) {
        fail_msg("%s", text);
    }
    for (int step = 0; step < 3; ++step) {
        double a = 0.0, b = 0.0;
        t_ok(plain.model, ms_step(plain.model, &a));
        t_ok(tight.model, ms_step(tight.model, &b));
        assert_memory_equal(&a, &b, sizeof a);
        t_chain_same(&plain, &tight);
    }
    ms_destroy(plain.model);
    ms_destroy(tight.model);
}

/* A net without a mesh catches no fish. */
static void the_graphs_recompute_in_passes(void **state) {
    (void)state;
    static const int needed[] = {RD_DID_OWN_RECOMPUTE,
                                 RD_DID_PARTIAL_RECOMPUTE,
                                 RD_DID_RESTORE_STATE,
                                 RD_DID_SKIP_STATE,
                                 RD_DID_SKIP_OPTIONAL,
                                 RD_DID_IN_PLACE,
                                 RD_MUST_IN_PLACE,
                                 RD_CLOBBERS,
                                 RD_AXES,
                                 RD_MICRO_BATCHES};
    if (covered.graphs < 300) {
        print_message("skipped: %u graphs are too few\n", (unsigned)covered.graphs);
        skip();
    }
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; ++i) {
        if (features[needed[i]] * 20 < covered.graphs) {
            fail_msg("%s in %u of %u graphs", rd_feature_name(needed[i]),
                     (unsigned)features[needed[i]], (unsigned)covered.graphs);
        }
    }
    assert_true(covered.longest >= MOST_DEPTH - 1);
    assert_true(covered.passes > 2 * covered.graphs);
}

// ------------------------------------------------------------------------------------------------
// failures

enum { FAULTY_GRAPHS = 6 };

/* There is an error, the plan before stays in force, and nothing is lost. */
static void every_allocation_fails_once(void **state) {
    (void)state;
    static trial t;
    for (uint64_t seed = 3; seed < 3 + 3 * FAULTY_GRAPHS; seed += 3) {
        for (int solves = 0; solves < 2; ++solves) {
            ms_config config = t_config();
            uint64_t budget = 0;
            assert_true(trial_begin(&t, generate(seed), &config));
            assert_true(nest(&t));
            ms_model *m = t.nested->model;
            if (solves) {
                t_ok(m, ms_smallest_budget(m, &budget));
                ms_set_budget(m, budget);
            }
            t_failing f = t_failing_heap(&t.heap);
            f.heap = NULL; // the model lives on
            while (t_next_failure(&f, 1 + f.at / 20)) {
                t_arm(&f);
                const ms_result result = solves ? ms_wrap(m) : nest_quietly(&t);
                t_failed(&f, m, result);
                if (!is_sound(&t) || !step_all(&t)) {
                    fail_msg("behind a failing allocation: %s", t.failure);
                }
            }
            assert_true(f.error_count > 3);
            trial_end(&t);
            assert_string_equal(t.failure, "");
        }
    }
}

static bool has_all_forwards(const rd_net *n) {
    bool all = true;
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        all &= n->run.op[i].forwards > 0;
    }
    return all;
}

/* After forward, buffers are as forward has left them, though a recomputation may have had old ones in
   place. */
static void expect_buffers(trial *t, uint64_t at) {
    for (uint32_t i = 0; i < t->graph->value_count && has_all_forwards(t->nested); ++i) {
        if (t->graph->value[i].role == RD_BUFFER &&
            !same(t, "buffer", i, t->plain->handle[i], t->nested->handle[i], NULL)) {
            fail_msg("callback %u: %s", (unsigned)at, t->failure);
        }
    }
}

static void every_callback_fails_once(void **state) {
    (void)state;
    static trial t;
    uint32_t graphs = 0;
    for (uint64_t seed = 3; graphs < FAULTY_GRAPHS; seed += 3) {
        t_failing f = t_failing_of(NULL, NULL, 1u << MS_RESULT_CALLBACK);
        rd_graph *g = generate(seed);
        const bool fits = g->seen[RD_STATE_SNAPSHOT] != 0;
        free(g);
        graphs += fits;
        while (fits && t_next_failure(&f, 1 + f.at / 10)) {
            double loss = 0.0;
            const ms_config config = t_config();
            g = generate(seed);
            g->accumulation = 1;
            assert_true(trial_begin(&t, g, &config));
            assert_true(nest(&t));
            assert_true(forward_net(&t, t.plain, 0, &loss));
            rd_net *n = t.nested;
            begin_pass(n, 0);
            assert_true(rd_net_write(n, t.round, false));
            f.calls = &n->run.calls;
            f.fail_at = &n->run.fail_at;
            t_arm(&f);
            const ms_result result = ms_step(n->model, &loss);
            if (t_failed(&f, n->model, result)) {
                expect_buffers(&t, f.at);
            }
            trial_end(&t);
            assert_string_equal(t.failure, "");
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(halves_take_n_log_n),
        cmocka_unit_test(last_first_takes_n_squared),
        cmocka_unit_test(one_pass_runs_each_layer_once),
        cmocka_unit_test(random_chains_need_what_the_envelope_says),
        cmocka_unit_test(nested_plans_change_no_bit),
        cmocka_unit_test(nested_plans_pass_debug_mode),
        cmocka_unit_test(nested_plans_wait_for_all_they_need),
        cmocka_unit_test(plans_of_the_solver_change_no_bit),
        cmocka_unit_test(a_deep_network_trains_in_passes),
        cmocka_unit_test(the_graphs_recompute_in_passes),
        cmocka_unit_test(changed_decisions_lead_to_the_same_program),
        cmocka_unit_test(every_allocation_fails_once),
        cmocka_unit_test(every_callback_fails_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
