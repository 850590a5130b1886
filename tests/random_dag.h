/*  random_dag.h - random graphs that mix all that a layer can declare, with callbacks that do what
    they declare and check what they are given. A graph (rd_graph) is plain data: it is registered
    with any number of models (rd_net), and run by a reference that has no plan, one allocation for
    each tensor (rd_reference). Include it after toy_layers.h. */
#ifndef RANDOM_DAG_H
#define RANDOM_DAG_H

#if defined(__GNUC__)
#define RD_NOINLINE     __attribute__((noinline)) // one copy, one way of rounding
#define RD_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define RD_NOINLINE
#define RD_PRINTF(a, b)
#endif

// ------------------------------------------------------------------------------------------------
// what is covered: name, share of the graphs (in per cent) that must have it

#define RD_FEATURES(X)                                                                             \
    X(EMPTY_SLOT, 30)                                                                              \
    X(SAME_TENSOR_TWICE, 30)                                                                       \
    X(SEVERAL_OUTPUTS, 50)                                                                         \
    X(FAN_OUT, 80)                                                                                 \
    X(TIED_PARAM, 30)                                                                              \
    X(FROZEN_PARAM, 20)                                                                            \
    X(FROZEN_PREFIX, 5)                                                                            \
    X(PARAM_OF_OTHER_DTYPE, 10)                                                                    \
    X(READ_ONLY_BUFFER, 20)                                                                        \
    X(KEPT_OUTPUT, 20)                                                                             \
    X(EVAL_OUTPUT, 10)                                                                             \
    X(ACCUMULATES, 30)                                                                             \
    X(OVERWRITES, 30)                                                                              \
    X(OWN_RECOMPUTE, 20)                                                                           \
    X(RECOMPUTE_READS, 10)                                                                         \
    X(RECOMPUTE_READS_OWN, 5)                                                                      \
    X(STATE_PROMISED, 10)                                                                          \
    X(STATE_SNAPSHOT, 10)                                                                          \
    X(STATE_SHARED, 5)                                                                             \
    X(STATE_READ_ELSEWHERE, 3)                                                                     \
    X(NO_RECOMPUTE, 10)                                                                            \
    X(NO_BACKWARD, 20)                                                                             \
    X(CLOBBERS, 20)                                                                                \
    X(IN_PLACE, 30)                                                                                \
    X(GRAD_IN_PLACE, 30)                                                                           \
    X(MUST_IN_PLACE, 10)                                                                           \
    X(MUST_GRAD_IN_PLACE, 9)                                                                       \
    X(WORKSPACE_ANY, 20)                                                                           \
    X(WORKSPACE_FINITE, 20)                                                                        \
    X(WORKSPACE_ZERO, 20)                                                                          \
    X(WORKSPACE_ROWS, 20)                                                                          \
    X(OPTIONAL_SAVED, 15)                                                                          \
    X(DROPOUT, 30)                                                                                 \
    X(INTEGER_INPUT, 20)                                                                           \
    X(INTEGER_OUTPUT, 10)                                                                          \
    X(INTEGER_SAVED, 20)                                                                           \
    X(STOP_GRADIENT, 10)                                                                           \
    X(WANTED_INPUT, 5)                                                                             \
    X(WANTED_ACTIVATION, 10)                                                                       \
    X(WANTED_ALONE, 1)                                                                             \
    X(ON_HOST, 10)                                                                                 \
    X(BORROWED_INPUT, 5)                                                                           \
    X(BORROWED_PARAM, 5)                                                                           \
    X(BORROWED_BUFFER, 2)                                                                          \
    X(BORROWED_GRADIENT, 5)                                                                        \
    X(BORROWED_STATE, 3)                                                                           \
    X(BORROWED_ELSEWHERE, 3)                                                                       \
    X(LOSS_WRITES_GRADIENTS, 10)                                                                   \
    X(AUXILIARY_LOSS, 5)                                                                           \
    X(BIND, 20)                                                                                    \
    X(ADAMW, 10)                                                                                   \
    X(SGD, 10)                                                                                     \
    X(LION, 10)                                                                                    \
    X(NESTEROV, 10)                                                                                \
    X(CUSTOM, 10)                                                                                  \
    X(NO_OPTIMIZER, 3)                                                                             \
    X(MICRO_BATCHES, 15)                                                                           \
    X(CLIPPING, 15)                                                                                \
    X(GROUPS_OF_PARAMS, 15)                                                                        \
    X(OWN_NORM, 5)                                                                                 \
    X(KINDS_MIXED, 10)                                                                             \
    X(LOSS_FACTOR, 10)                                                                             \
    X(AXES, 20)                                                                                    \
    X(LARGER_EVALS, 5)                                                                             \
    X(RESHAPED, 5)                                                                                 \
    X(SHARED_ARENA, 5)                                                                             \
    X(DEBUG_MODE, 3)                                                                               \
    X(PROFILED, 25)                                                                                \
    X(FORCED_ON, 3)                                                                                \
    X(FORCED_OFF, 5)                                                                               \
    X(EVALUATED, 20)                                                                               \
    X(ABANDONED_STEP, 5)                                                                           \
    X(WRAPPED_AGAIN, 5)                                                                            \
    X(FROZEN_MEANWHILE, 5)                                                                         \
    X(DETACHED, 5)                                                                                 \
    X(REFERENCE, 50)                                                                               \
    X(REPLAYED, 10)                                                                                \
    X(DID_RECOMPUTE, 40)                                                                           \
    X(DID_OWN_RECOMPUTE, 10)                                                                       \
    X(DID_REPEAT, 2)                                                                               \
    X(DID_PARTIAL_RECOMPUTE, 3)                                                                    \
    X(DID_RESTORE_STATE, 3)                                                                        \
    X(DID_SKIP_STATE, 3)                                                                           \
    X(DID_SKIP_OPTIONAL, 5)                                                                        \
    X(DID_IN_PLACE, 20)                                                                            \
    X(DID_GRAD_IN_PLACE, 20)                                                                       \
    X(DID_UPDATE_EARLY, 20)                                                                        \
    X(DID_CLIP, 5)                                                                                 \
    X(MUON, 5)                                                                                     \
    X(ADAFACTOR, 5)                                                                                \
    X(UPDATE_WORKSPACE, 8)                                                                         \
    X(SKIPPING, 5)                                                                                 \
    X(GRADIENT_FACTOR, 15)                                                                         \
    X(PAUSED, 10)                                                                                  \
    X(LOADED_PLAN, 10)                                                                             \
    X(DID_SKIP_STEP, 2)

#define RD_X(name, share) RD_##name,
typedef enum rd_feature { RD_FEATURES(RD_X) RD_FEATURE_COUNT } rd_feature;
#undef RD_X

static inline const char *rd_feature_name(int feature) {
#define RD_X(name, share) #name,
    static const char *const names[] = {RD_FEATURES(RD_X)};
#undef RD_X
    return names[feature];
}

static inline uint32_t rd_feature_share(int feature) {
#define RD_X(name, share) share,
    static const uint8_t shares[] = {RD_FEATURES(RD_X)};
#undef RD_X
    return shares[feature];
}

// ------------------------------------------------------------------------------------------------
// graphs

enum {
    RD_SLOTS = 5, // of one group of one layer
    RD_LAYERS = 32,
    RD_VALUES = 512,
    RD_ELEMENTS = 256, // of the largest tensor
    RD_STATES = MS_LIMIT_OPTIMIZER_STATE,
    RD_GROUPS = 5, // at most 3 by rd_random_groups, and 2 by rd_random_matrices
    RD_AXIS_LIMIT = 2,
    RD_TEXT = 512,
    RD_CALLBACK_ERROR = 77
};

typedef enum rd_role { RD_INPUT, RD_PARAM, RD_BUFFER, RD_ACTIVATION, RD_SAVED } rd_role;

typedef enum rd_group {
    RD_GROUP_IN,
    RD_GROUP_OUT,
    RD_GROUP_SAVED,
    RD_GROUP_PARAM,
    RD_GROUP_STATE,
    RD_GROUP_COUNT
} rd_group;

typedef struct rd_value {
    rd_role role;
    ms_dtype dtype;
    int rank;      // 0, 1 or 2
    int64_t rows;  // without the axes
    uint32_t axes; // mask of those that multiply the rows
    int64_t cols;
    uint8_t group; // of a param, with an optimizer of its own; 0: none
    bool frozen, on_host, stopped, kept, kept_in_eval;
    bool wanted;       // its gradient, by ms_want_gradient
    bool f32_gradient; // by ms_set_gradient_dtype
    bool borrowed, borrowed_gradient, borrowed_state;
    bool is_state;  // of some layer
    bool is_sealed; // an auxiliary loss that no layer may read
    uint32_t readers;
} rd_value;

typedef struct rd_layer {
    uint32_t slot[RD_GROUP_COUNT][RD_SLOTS]; // a value + 1; 0: empty
    uint8_t count[RD_GROUP_COUNT];
    ms_layer_desc desc; // without tensors and callbacks
    bool has_backward, has_recompute, has_bind, dropout, state_in_eval;
    uint32_t salt; // of its coefficients
} rd_layer;

typedef struct rd_graph {
    t_rng rng;
    uint64_t seed;
    double spice; // how likely the unusual is
    uint32_t axis_count, value_count, layer_count, loss, accumulation;
    int64_t size[RD_AXIS_LIMIT], largest[RD_AXIS_LIMIT];
    int64_t trains[RD_AXIS_LIMIT]; // the largest in training; 0: the largest
    rd_value value[RD_VALUES];
    rd_layer layer[RD_LAYERS];
    ms_optimizer_desc optimizer;        // of params in no group
    ms_optimizer_desc group[RD_GROUPS]; // of the others; rd_value.group counts these from 1
    uint32_t group_count;
    bool has_update_space; // the trainer's own update has scratch memory
    bool varies; // the factor of the gradients, and which params are paused, from step to step
    uint8_t seen[RD_FEATURE_COUNT];
    bool has_no_loss; // nothing is minimised: it is only evaluated
    /* NULL, or makes the desc of a layer one for where the next net is to run. */
    ms_layer_desc (*move)(void *mover, uint32_t layer, const ms_layer_desc *desc);
    void *mover;
} rd_graph;

static inline bool rd_bit(uint32_t mask, int slot) {
    return (mask >> (uint32_t)slot & 1u) != 0;
}

static inline int64_t rd_rows(const rd_value *v, const int64_t *size) {
    int64_t rows = v->rank == 0 ? 1 : v->rows;
    for (int i = 0; i < RD_AXIS_LIMIT; ++i) {
        rows *= rd_bit(v->axes, i) ? size[i] : 1;
    }
    return rows;
}

static inline uint32_t rd_count(const rd_value *v, const int64_t *size) {
    return (uint32_t)(rd_rows(v, size) * (v->rank == 2 ? v->cols : 1));
}

static inline uint64_t rd_bytes(const rd_value *v, const int64_t *size) {
    return rd_count(v, size) * ms_dtype_bytes(v->dtype);
}

static inline bool rd_is_float(const rd_value *v) {
    return v->dtype == MS_DTYPE_F32;
}

/* Can take a gradient, as far as the tensor itself goes. */
static inline bool rd_is_differentiable(const rd_value *v) {
    return (v->role == RD_ACTIVATION && rd_is_float(v) && !v->stopped) ||
           (v->role == RD_PARAM && !v->frozen) || v->wanted;
}

static inline bool rd_same_shape(const rd_value *a, const rd_value *b) {
    return a->dtype == b->dtype && a->rank == b->rank && a->rows == b->rows && a->axes == b->axes &&
           a->cols == b->cols;
}

/* The value in a slot, or NULL. */
static inline const rd_value *rd_at(const rd_graph *g, const rd_layer *l, int group, int slot) {
    uint32_t value = l->slot[group][slot];
    return value == 0 ? NULL : &g->value[value - 1];
}

static inline uint32_t rd_used(const rd_layer *l, int group) {
    uint32_t mask = 0;
    for (int i = 0; i < l->count[group]; ++i) {
        mask |= l->slot[group][i] != 0 ? 1u << i : 0;
    }
    return mask;
}

static inline bool rd_reads_are_given(const ms_reads *r) {
    return r->nothing || (r->in | r->out | r->saved | r->param) != 0;
}

static inline uint32_t rd_mask_of(const ms_reads *r, int group) {
    const uint32_t masks[] = {r->in, r->out, r->saved, r->param, 0};
    return masks[group];
}

/* What backward reads of a group. */
static inline uint32_t rd_backward_reads(const rd_layer *l, int group) {
    const ms_reads *r = &l->desc.backward_reads;
    uint32_t mask = rd_reads_are_given(r) ? rd_mask_of(r, group) : UINT32_MAX;
    return group == RD_GROUP_STATE ? 0 : mask & rd_used(l, group);
}

/* What the layer's own recompute reads of a group. */
static inline uint32_t rd_recompute_reads(const rd_layer *l, int group) {
    const ms_reads *r = &l->desc.recompute_reads;
    bool all = group == RD_GROUP_IN || group == RD_GROUP_PARAM;
    uint32_t mask = rd_reads_are_given(r) ? rd_mask_of(r, group) : all ? UINT32_MAX : 0;
    return mask & rd_used(l, group);
}

// ------------------------------------------------------------------------------------------------
// the generator

static inline bool rd_spiced(rd_graph *g, double probability) {
    return t_chance(&g->rng, probability * g->spice);
}

static inline uint32_t rd_some(rd_graph *g, uint32_t mask, double probability) {
    uint32_t some = 0;
    for (uint32_t bit = 1; bit <= mask; bit <<= 1) {
        some |= (mask & bit) != 0 && t_chance(&g->rng, probability) ? bit : 0;
    }
    return some;
}

/* The same mask, perhaps as "every slot". */
static inline uint32_t rd_maybe_all(rd_graph *g, uint32_t mask, uint32_t used) {
    bool all = mask != 0 && mask == used && t_chance(&g->rng, 0.5);
    return all ? MS_ALL_SLOTS : mask;
}

static inline uint32_t rd_new(rd_graph *g, rd_role role, ms_dtype dtype) {
    assert_true(g->value_count < RD_VALUES);
    rd_value *v = &g->value[g->value_count];
    memset(v, 0, sizeof *v);
    v->role = role;
    v->dtype = dtype;
    v->rows = v->cols = 1;
    return g->value_count++;
}

static inline void rd_shape_rows(rd_graph *g, rd_value *v) {
    static const int64_t widths[] = {1, 2, 3, 4, 8};
    uint32_t axes = t_chance(&g->rng, 0.8) ? g->axis_count : 0;
    v->axes = axes == 2 ? 1 + t_below(&g->rng, 3) : axes;
    v->rows = 1 + (int64_t)t_below(&g->rng, v->axes != 0 ? 2 : 6);
    v->rank = t_chance(&g->rng, 0.85) ? 2 : 1;
    v->cols = v->rank == 2 ? widths[t_below(&g->rng, 5)] : 1;
}

static inline void rd_shape_like(rd_value *v, const rd_value *like) {
    v->rank = like->rank;
    v->rows = like->rows;
    v->axes = like->axes;
    v->cols = like->cols;
}

static inline void rd_shape_small(rd_graph *g, rd_value *v) {
    v->rank = (int)t_below(&g->rng, 3);
    v->rows = v->rank > 0 ? 1 + (int64_t)t_below(&g->rng, 5) : 1;
    v->cols = v->rank > 1 ? 1 + (int64_t)t_below(&g->rng, 5) : 1;
}

static inline uint32_t rd_new_input(rd_graph *g) {
    static const ms_dtype dtypes[] = {MS_DTYPE_F32, MS_DTYPE_F32, MS_DTYPE_F32,
                                      MS_DTYPE_I32, MS_DTYPE_I64, MS_DTYPE_U8};
    uint32_t index = rd_new(g, RD_INPUT, dtypes[t_below(&g->rng, 6)]);
    rd_value *v = &g->value[index];
    rd_shape_rows(g, v);
    v->on_host = rd_spiced(g, 0.2);
    v->borrowed = rd_spiced(g, 0.2);
    return index;
}

static inline uint32_t rd_new_buffer(rd_graph *g) {
    static const ms_dtype dtypes[] = {MS_DTYPE_F32, MS_DTYPE_F32, MS_DTYPE_I64, MS_DTYPE_I32};
    uint32_t index = rd_new(g, RD_BUFFER, dtypes[t_below(&g->rng, 4)]);
    rd_value *v = &g->value[index];
    if (t_chance(&g->rng, 0.15)) {
        rd_shape_rows(g, v);
    } else {
        rd_shape_small(g, v);
    }
    v->on_host = rd_spiced(g, 0.2);
    v->borrowed = rd_spiced(g, 0.15);
    return index;
}

/* Something to read: now and then new, else what stands already, more often what is late. */
static inline uint32_t rd_pick_input(rd_graph *g) {
    uint32_t candidates[RD_VALUES];
    uint32_t count = 0;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        bool changes = v->is_state && !rd_spiced(g, 0.4);
        if (v->role != RD_PARAM && v->role != RD_SAVED && !changes && !v->is_sealed) {
            candidates[count++] = i;
        }
    }
    if (count == 0 || t_chance(&g->rng, 0.08)) {
        return rd_new_input(g);
    }
    if (rd_spiced(g, 0.08)) {
        return rd_new_buffer(g);
    }
    uint32_t recent = count > 4 && t_chance(&g->rng, 0.75) ? 4 : count;
    return candidates[count - 1 - t_below(&g->rng, recent)];
}

static inline uint32_t rd_pick_param(rd_graph *g) {
    uint32_t candidates[RD_VALUES];
    uint32_t count = 0;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        if (g->value[i].role == RD_PARAM) {
            candidates[count++] = i;
        }
    }
    if (count > 0 && t_chance(&g->rng, 0.25)) {
        g->seen[RD_TIED_PARAM] = 1;
        return candidates[t_below(&g->rng, count)];
    }
    uint32_t index = rd_new(g, RD_PARAM, MS_DTYPE_F32);
    rd_value *v = &g->value[index];
    rd_shape_small(g, v);
    v->frozen = t_chance(&g->rng, 0.12);
    v->borrowed = rd_spiced(g, 0.15);
    v->borrowed_gradient = rd_spiced(g, 0.15);
    v->borrowed_state = rd_spiced(g, 0.1);
    return index;
}

static inline void rd_put(rd_graph *g, rd_layer *l, int group, uint32_t value) {
    assert_true(l->count[group] < RD_SLOTS);
    l->slot[group][l->count[group]++] = value + 1;
    g->value[value].readers += group == RD_GROUP_IN;
}

static inline void rd_maybe_skip_slot(rd_graph *g, rd_layer *l, int group) {
    if (l->count[group] < RD_SLOTS - 1 && rd_spiced(g, 0.12)) {
        l->count[group] += 1;
        g->seen[RD_EMPTY_SLOT] = 1;
    }
}

static inline void rd_add_inputs(rd_graph *g, rd_layer *l, uint32_t count) {
    for (uint32_t i = 0; i < count && l->count[RD_GROUP_IN] < RD_SLOTS; ++i) {
        rd_maybe_skip_slot(g, l, RD_GROUP_IN);
        uint32_t value = rd_pick_input(g);
        if (i > 0 && rd_spiced(g, 0.15)) {
            value = l->slot[RD_GROUP_IN][l->count[RD_GROUP_IN] - 1] == 0
                        ? value
                        : l->slot[RD_GROUP_IN][l->count[RD_GROUP_IN] - 1] - 1u;
        }
        rd_put(g, l, RD_GROUP_IN, value);
    }
}

static inline void rd_add_outputs(rd_graph *g, rd_layer *l, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
        const rd_value *like = rd_at(g, l, RD_GROUP_IN, (int)t_below(&g->rng, RD_SLOTS));
        bool integer = rd_spiced(g, 0.08);
        if (i > 0) {
            rd_maybe_skip_slot(g, l, RD_GROUP_OUT);
        }
        uint32_t out = rd_new(g, RD_ACTIVATION, integer ? MS_DTYPE_I32 : MS_DTYPE_F32);
        if (like != NULL && t_chance(&g->rng, 0.7)) {
            rd_shape_like(&g->value[out], like);
        } else {
            rd_shape_rows(g, &g->value[out]);
        }
        g->value[out].stopped = !integer && rd_spiced(g, 0.05);
        g->value[out].kept = rd_spiced(g, 0.06);
        g->value[out].kept_in_eval = rd_spiced(g, 0.06);
        rd_put(g, l, RD_GROUP_OUT, out);
    }
}

static inline void rd_add_saved(rd_graph *g, rd_layer *l) {
    static const ms_dtype dtypes[] = {MS_DTYPE_F32, MS_DTYPE_F32, MS_DTYPE_I32, MS_DTYPE_U8,
                                      MS_DTYPE_F64};
    for (uint32_t i = t_below(&g->rng, 3); i > 0; --i) {
        rd_maybe_skip_slot(g, l, RD_GROUP_SAVED);
        uint32_t saved = rd_new(g, RD_SAVED, dtypes[t_below(&g->rng, 5)]);
        rd_shape_rows(g, &g->value[saved]);
        rd_put(g, l, RD_GROUP_SAVED, saved);
    }
}

static inline void rd_add_params(rd_graph *g, rd_layer *l, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
        rd_maybe_skip_slot(g, l, RD_GROUP_PARAM);
        rd_put(g, l, RD_GROUP_PARAM, rd_pick_param(g));
    }
}

static inline bool rd_has(const rd_layer *l, int group, uint32_t value) {
    for (int i = 0; i < l->count[group]; ++i) {
        if (l->slot[group][i] == value + 1) {
            return true;
        }
    }
    return false;
}

/* A buffer of its own, or one that another layer changes. What an earlier layer reads must not
   change any more. */
static inline void rd_add_states(rd_graph *g, rd_layer *l) {
    uint32_t count = rd_spiced(g, 0.3) ? 1 + t_below(&g->rng, 2) : 0;
    for (uint32_t i = 0; i < count; ++i) {
        uint32_t state = RD_VALUES;
        for (uint32_t k = 0; k < g->value_count && t_chance(&g->rng, 0.9); ++k) {
            bool fits = g->value[k].role == RD_BUFFER && g->value[k].readers == 0 &&
                        !rd_has(l, RD_GROUP_STATE, k);
            state = fits && t_chance(&g->rng, 0.4) ? k : state;
        }
        if (state == RD_VALUES) {
            state = rd_new_buffer(g);
        }
        rd_maybe_skip_slot(g, l, RD_GROUP_STATE);
        g->seen[RD_STATE_SHARED] |= g->value[state].is_state;
        g->value[state].is_state = true;
        rd_put(g, l, RD_GROUP_STATE, state);
    }
    l->desc.recompute_keeps_state = rd_used(l, RD_GROUP_STATE) != 0 && t_chance(&g->rng, 0.4);
    l->state_in_eval = t_chance(&g->rng, 0.5);
}

static inline void rd_random_reads(rd_graph *g, rd_layer *l) {
    ms_reads *r = &l->desc.backward_reads;
    if (t_chance(&g->rng, 0.12)) {
        return; // all of them
    }
    uint32_t *masks[] = {&r->in, &r->out, &r->saved, &r->param};
    for (int group = 0; group < RD_GROUP_STATE; ++group) {
        uint32_t used = rd_used(l, group);
        double share = group == RD_GROUP_SAVED ? 0.9 : 0.4;
        *masks[group] = rd_maybe_all(g, rd_some(g, used, share), used);
    }
    r->nothing = (r->in | r->out | r->saved | r->param) == 0;
}

/* A recompute of its own, perhaps from fewer operands, or from what forward leaves. */
static inline void rd_random_recompute(rd_graph *g, rd_layer *l) {
    l->has_recompute = l->desc.must_in_place == 0 && rd_spiced(g, 0.25);
    if (!l->has_recompute || t_chance(&g->rng, 0.35)) {
        return;
    }
    ms_reads *r = &l->desc.recompute_reads;
    r->in = rd_some(g, rd_used(l, RD_GROUP_IN), 0.6);
    r->param = rd_some(g, rd_used(l, RD_GROUP_PARAM), 0.6);
    r->out = rd_some(g, rd_used(l, RD_GROUP_OUT), 0.3);
    r->saved = rd_some(g, rd_used(l, RD_GROUP_SAVED), 0.5);
    bool keeps_all = r->out == rd_used(l, RD_GROUP_OUT) && r->saved == rd_used(l, RD_GROUP_SAVED);
    r->out = keeps_all ? 0 : r->out;
    r->nothing = (r->in | r->out | r->saved | r->param) == 0;
}

static inline ms_workspace rd_random_workspace(rd_graph *g, const rd_layer *l) {
    ms_workspace w;
    const rd_value *first = rd_at(g, l, RD_GROUP_OUT, 0);
    memset(&w, 0, sizeof w);
    if (!rd_spiced(g, 0.3)) {
        return w;
    }
    w.bytes = 4u * t_below(&g->rng, 40);
    w.row_bytes = first != NULL && first->rank > 0 ? 4u * t_below(&g->rng, 6) : 0;
    w.contents = (ms_contents)t_below(&g->rng, 3);
    return w;
}

/* The slots of a group that hold F32 values of the shape of `like`. */
static inline uint32_t rd_alike(const rd_graph *g, const rd_layer *l, int group,
                                const rd_value *like) {
    uint32_t mask = 0;
    for (int i = 0; like != NULL && i < l->count[group]; ++i) {
        const rd_value *v = rd_at(g, l, group, i);
        mask |= v != NULL && rd_same_shape(v, like) && rd_is_float(v) ? 1u << i : 0;
    }
    return mask;
}

static inline uint32_t rd_lowest(uint32_t mask) {
    return mask & (~mask + 1u);
}

/* What a layer writes to cannot stay on the host. */
static inline void rd_keep_off_host(rd_graph *g, rd_layer *l) {
    uint32_t written = l->desc.clobbers.in;
    for (int j = 0; j < l->count[RD_GROUP_OUT]; ++j) {
        written |= rd_bit(l->desc.must_in_place, j) ? l->desc.in_place[j] : 0u;
    }
    for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
        const uint32_t value = l->slot[RD_GROUP_IN][i];
        if (rd_bit(written, i) && value != 0) {
            g->value[value - 1].on_host = false;
        }
    }
}

static inline void rd_random_in_place(rd_graph *g, rd_layer *l) {
    uint32_t taken = 0;
    for (int j = 0; j < l->count[RD_GROUP_OUT]; ++j) {
        uint32_t alike = rd_alike(g, l, RD_GROUP_IN, rd_at(g, l, RD_GROUP_OUT, j));
        if ((alike & ~taken) != 0 && rd_spiced(g, 0.15)) {
            l->desc.must_in_place |= 1u << j;
            l->desc.in_place[j] = rd_lowest(alike & ~taken);
            taken |= l->desc.in_place[j];
        } else {
            l->desc.in_place[j] = rd_some(g, alike & ~taken, 0.6);
        }
    }
    for (int j = 0; j < l->count[RD_GROUP_OUT]; ++j) { // what one must have is not for others
        if (!rd_bit(l->desc.must_in_place, j)) {
            l->desc.in_place[j] = l->desc.in_place[j] & ~taken;
        }
    }
    rd_keep_off_host(g, l);
}

static inline void rd_random_grad_in_place(rd_graph *g, rd_layer *l) {
    uint32_t taken = 0;
    for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
        const rd_value *v = rd_at(g, l, RD_GROUP_IN, i);
        if (v == NULL || rd_bit(l->desc.accumulates.in, i)) {
            continue;
        }
        ms_slot_masks *o = &l->desc.grad_in_place[i];
        uint32_t alike = rd_alike(g, l, RD_GROUP_OUT, v);
        bool can_must = rd_is_differentiable(v) && !rd_bit(l->desc.overwrites.in, i);
        if (can_must && (alike & ~taken) != 0 && rd_spiced(g, 0.15)) {
            o->grad_out = rd_lowest(alike & ~taken);
            taken |= o->grad_out;
            l->desc.must_grad_in_place |= 1u << i;
            continue;
        }
        o->grad_out = rd_some(g, alike, 0.5);
        o->out = rd_some(g, alike, 0.3);
        o->in = rd_some(g, rd_alike(g, l, RD_GROUP_IN, v), 0.4);
        o->saved = rd_some(g, rd_alike(g, l, RD_GROUP_SAVED, v), 0.4);
    }
    for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
        if (!rd_bit(l->desc.must_grad_in_place, i)) {
            ms_slot_masks *o = &l->desc.grad_in_place[i];
            o->grad_out = o->grad_out & ~taken;
        }
    }
}

/* How gradients are written: heeding beta, adding, or overwriting. */
static inline void rd_random_styles(rd_graph *g, rd_layer *l) {
    uint32_t in = rd_used(l, RD_GROUP_IN);
    uint32_t param = rd_used(l, RD_GROUP_PARAM);
    double adding = rd_spiced(g, 0.4) ? 0.6 : 0.0;
    double overwriting = rd_spiced(g, 0.4) ? 0.6 : 0.0;
    l->desc.accumulates.in = rd_maybe_all(g, rd_some(g, in, adding), in);
    l->desc.overwrites.in = rd_some(g, in & ~(uint32_t)l->desc.accumulates.in, overwriting);
    l->desc.accumulates.param = rd_maybe_all(g, rd_some(g, param, adding), param);
    l->desc.overwrites.param =
        rd_some(g, param & ~(uint32_t)l->desc.accumulates.param, overwriting);
}

static inline void rd_random_clobbers(rd_graph *g, rd_layer *l) {
    if (rd_spiced(g, 0.25)) {
        ms_slot_masks *c = &l->desc.clobbers;
        c->in = rd_some(g, rd_backward_reads(l, RD_GROUP_IN), 0.4);
        c->out = rd_some(g, rd_backward_reads(l, RD_GROUP_OUT), 0.4);
        c->saved = rd_some(g, rd_backward_reads(l, RD_GROUP_SAVED), 0.5);
        c->grad_out = rd_some(g, rd_used(l, RD_GROUP_OUT), 0.5);
    }
}

static inline void rd_random_backward(rd_graph *g, rd_layer *l) {
    rd_random_reads(g, l);
    rd_random_styles(g, l);
    rd_random_grad_in_place(g, l);
    rd_random_clobbers(g, l);
    rd_keep_off_host(g, l);
    l->desc.backward_workspace = rd_random_workspace(g, l);
}

static inline rd_layer *rd_begin_layer(rd_graph *g) {
    assert_true(g->layer_count < RD_LAYERS);
    rd_layer *l = &g->layer[g->layer_count++];
    memset(l, 0, sizeof *l);
    l->salt = t_below(&g->rng, 1000);
    l->has_bind = rd_spiced(g, 0.2);
    l->dropout = rd_spiced(g, 0.25);
    return l;
}

static inline void rd_add_ordinary(rd_graph *g) {
    rd_layer *l = rd_begin_layer(g);
    rd_add_inputs(g, l, 1 + t_below(&g->rng, 3));
    rd_add_outputs(g, l, t_chance(&g->rng, 0.7) ? 1 : 2 + t_below(&g->rng, 2));
    rd_add_saved(g, l);
    rd_add_params(g, l, t_chance(&g->rng, 0.5) ? 1 + t_below(&g->rng, 2) : 0);
    rd_add_states(g, l);
    l->has_backward = t_chance(&g->rng, 0.93);
    l->desc.no_recompute = rd_spiced(g, 0.08);
    l->desc.flops = rd_spiced(g, 0.3) ? 1e3 * t_unit(&g->rng) : 0.0;
    rd_random_in_place(g, l);
    rd_random_recompute(g, l);
    uint32_t droppable = rd_used(l, RD_GROUP_SAVED) & ~(uint32_t)l->desc.recompute_reads.saved;
    l->desc.optional_saved = rd_spiced(g, 0.5) ? rd_some(g, droppable, 0.7) : 0;
    l->desc.forward_workspace = rd_random_workspace(g, l);
    if (l->has_recompute) {
        l->desc.recompute_workspace = rd_random_workspace(g, l);
        l->desc.recompute_flops = rd_spiced(g, 0.3) ? 100.0 * t_unit(&g->rng) : 0.0;
    }
    if (l->has_backward) {
        rd_random_backward(g, l);
    }
}

/* A layer in front of the loss, with a param that is trained: without any a graph is refused. */
static inline void rd_add_head(rd_graph *g) {
    rd_layer *l = rd_begin_layer(g);
    rd_add_inputs(g, l, 1 + t_below(&g->rng, 3));
    uint32_t param = rd_new(g, RD_PARAM, MS_DTYPE_F32);
    rd_shape_small(g, &g->value[param]);
    rd_put(g, l, RD_GROUP_PARAM, param);
    uint32_t out = rd_new(g, RD_ACTIVATION, MS_DTYPE_F32);
    rd_shape_rows(g, &g->value[out]);
    rd_put(g, l, RD_GROUP_OUT, out);
    rd_add_saved(g, l);
    l->has_backward = true;
    rd_random_in_place(g, l);
    rd_random_backward(g, l);
}

/* The slots whose gradients a loss layer may write in forward. */
static inline uint32_t rd_loss_slots(const rd_graph *g, const rd_layer *l) {
    uint32_t mask = 0;
    for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
        const rd_value *v = rd_at(g, l, RD_GROUP_IN, i);
        mask |= v != NULL && rd_is_differentiable(v) ? 1u << i : 0;
    }
    return mask;
}

/* The loss, or an auxiliary one, which has an effect by the gradients alone that it writes. */
static inline void rd_add_loss(rd_graph *g, bool auxiliary) {
    uint32_t last = g->value_count;
    while (!auxiliary && --last > 0) { // the output of the head
        if (g->value[last].role == RD_ACTIVATION) {
            break;
        }
    }
    rd_layer *l = rd_begin_layer(g);
    if (!auxiliary) {
        rd_put(g, l, RD_GROUP_IN, last);
    }
    rd_add_inputs(g, l, auxiliary ? 1 + t_below(&g->rng, 2) : t_below(&g->rng, 3));
    uint32_t out = rd_new(g, RD_ACTIVATION, MS_DTYPE_F32);
    rd_shape_rows(g, &g->value[out]);
    rd_put(g, l, RD_GROUP_OUT, out);
    rd_add_saved(g, l);
    l->desc.forward_workspace = rd_random_workspace(g, l);
    uint32_t slots = rd_loss_slots(g, l);
    if (auxiliary ? slots != 0 : rd_spiced(g, 0.35)) {
        l->desc.grads_in_forward = rd_some(g, slots, 0.8);
        l->desc.grads_in_forward |= rd_lowest(slots);
        rd_random_styles(g, l);
        uint32_t written = l->desc.grads_in_forward;
        for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
            uint32_t alike = rd_alike(g, l, RD_GROUP_IN, rd_at(g, l, RD_GROUP_IN, i));
            l->desc.grad_in_place[i].in = rd_some(g, alike, rd_bit(written, i) ? 0.5 : 0.0);
        }
        l->desc.accumulates.in = l->desc.accumulates.in & written;
        l->desc.overwrites.in = l->desc.overwrites.in & written;
    } else {
        l->has_backward = !auxiliary;
        rd_random_backward(g, l);
    }
    if (auxiliary) { // nothing differentiates through it
        g->value[out].stopped = t_chance(&g->rng, 0.6);
        g->value[out].is_sealed = !g->value[out].stopped;
    }
    if (!l->has_backward) { // nothing of this may be said of a backward that is not there
        memset(&l->desc.backward_reads, 0, sizeof l->desc.backward_reads);
        memset(&l->desc.backward_workspace, 0, sizeof l->desc.backward_workspace);
    }
    g->loss = out;
}

/* Scratch memory of the trainer's own update: a float for each element. */
static inline uint64_t rd_update_bytes(const ms_shape *shape, void *user) {
    (void)user;
    return ms_shape_count(shape) * sizeof(float);
}

/* What came to updates later, so that graphs stay what they were: scratch memory, steps that are skipped,
   and what changes between steps. */
static inline void rd_vary_updates(rd_graph *g) {
    t_rng rng = t_seed(g->seed ^ 0x76617279);
    ms_optimizer_desc *o = &g->optimizer;
    g->has_update_space = o->kind == MS_OPTIMIZER_CUSTOM && t_chance(&rng, 0.5);
    if (o->kind != MS_OPTIMIZER_NONE && t_chance(&rng, 0.12)) {
        o->skip_above_norm = 0.05f * (float)(1u << t_below(&rng, 8));
    }
    g->varies = t_chance(&rng, 0.3);
    g->seen[RD_UPDATE_WORKSPACE] = g->has_update_space;
    g->seen[RD_SKIPPING] = o->skip_above_norm > 0.0f;
}

/* What is set before the micro-batch of this round: a factor, 0 for none, and whether a param is paused. */
static inline float rd_factor_at(const rd_graph *g, uint64_t round) {
    t_rng rng = t_seed(g->seed ^ round << 20 ^ 0x6661);
    const uint32_t power = t_below(&rng, 6);
    return g->varies ? 0.125f * (float)(1u << power) : 0.0f;
}

static inline bool rd_is_paused(const rd_graph *g, uint32_t value, uint64_t round) {
    t_rng rng = t_seed(g->seed ^ round << 20 ^ (uint64_t)value << 40 ^ 0x7061);
    const rd_value *v = &g->value[value];
    return v->role == RD_PARAM && !v->frozen && g->varies && t_chance(&rng, 0.3);
}

static inline void rd_random_optimizer(rd_graph *g) {
    ms_optimizer_desc *o = &g->optimizer;
    double kind = t_unit(&g->rng);
    o->kind = kind < 0.6   ? (ms_optimizer_kind)(int)(kind / 0.6 * MS_OPTIMIZER_CUSTOM)
              : kind < 0.9 ? MS_OPTIMIZER_CUSTOM
                           : MS_OPTIMIZER_NONE;
    o->learning_rate = 0.02f;
    o->momentum = o->kind == MS_OPTIMIZER_SGD && t_chance(&g->rng, 0.5) ? 0.9f : 0.0f;
    o->weight_decay = t_chance(&g->rng, 0.5) ? 0.1f : 0.0f;
    o->state_count = o->kind == MS_OPTIMIZER_CUSTOM ? t_below(&g->rng, 4) : 0;
    if (o->kind != MS_OPTIMIZER_NONE && t_chance(&g->rng, 0.25)) {
        o->grad_clip_norm = t_chance(&g->rng, 0.7) ? 0.05f : 100.0f;
    }
    g->accumulation = t_chance(&g->rng, 0.25) ? 2 + t_below(&g->rng, 3) : 1;
}

/* Groups of params with other rates, betas, kinds and norms; also beside updates of the trainer's own. */
static inline void rd_random_groups(rd_graph *g) {
    t_rng rng = t_seed(g->seed ^ 0x67726f7570);
    if (g->optimizer.kind == MS_OPTIMIZER_NONE || t_chance(&rng, 0.5)) {
        return;
    }
    g->group_count = 1 + t_below(&rng, 3);
    for (uint32_t k = 0; k < g->group_count; ++k) {
        ms_optimizer_desc *o = &g->group[k];
        o->kind = (ms_optimizer_kind)t_below(&rng, MS_OPTIMIZER_CUSTOM);
        o->learning_rate = 0.01f * (float)(k + 1);
        o->beta1 = t_chance(&rng, 0.5) ? 0.8f : 0.0f;
        o->momentum = t_chance(&rng, 0.5) ? 0.7f : 0.0f;
        o->weight_decay = t_chance(&rng, 0.5) ? 0.05f : 0.0f;
        o->grad_clip_norm = t_chance(&rng, 0.75) ? 0.0f : t_chance(&rng, 0.5) ? 0.03f : FLT_MAX;
    }
    for (uint32_t i = 0; i < g->value_count; ++i) {
        g->value[i].group = (uint8_t)t_below(&rng, g->group_count + 1);
    }
}

/* Groups of matrices whose updates are of them as a whole, and of anything by Adafactor. */
static inline void rd_random_matrices(rd_graph *g) {
    t_rng rng = t_seed(g->seed ^ 0x6d617472);
    if (!t_is_built_in((int)g->optimizer.kind) || t_chance(&rng, 0.6)) {
        return;
    }
    const uint32_t muon = g->group_count + 1, adafactor = g->group_count + 2;
    for (int k = 0; k < 2; ++k) {
        ms_optimizer_desc *o = &g->group[g->group_count++];
        o->kind = k == 0 ? MS_OPTIMIZER_MUON : MS_OPTIMIZER_ADAFACTOR;
        o->learning_rate = 0.01f;
        o->momentum = k == 0 && t_chance(&rng, 0.5) ? 0.8f : 0.0f;
        o->beta2 = k == 1 && t_chance(&rng, 0.5) ? 0.9f : 0.0f;
        o->weight_decay = t_chance(&rng, 0.5) ? 0.05f : 0.0f;
        o->grad_clip_norm = t_chance(&rng, 0.75) ? 0.0f : 0.03f;
    }
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const uint32_t of = t_below(&rng, 4);
        const bool fits = g->value[i].role == RD_PARAM && (of != 1 || g->value[i].rank >= 2);
        g->value[i].group = (uint8_t)(!fits     ? g->value[i].group
                                      : of == 1 ? muon
                                      : of == 2 ? adafactor
                                                : g->value[i].group);
        const bool learns = g->value[i].role == RD_PARAM && !g->value[i].frozen;
        g->seen[RD_MUON] |= learns && g->value[i].group == muon;
        g->seen[RD_ADAFACTOR] |= learns && g->value[i].group == adafactor;
    }
}

static inline const ms_optimizer_desc *rd_optimizer(const rd_graph *g, uint32_t param) {
    const uint32_t group = g->value[param].group;
    return group > 0 ? &g->group[group - 1] : &g->optimizer;
}

static inline uint32_t rd_state_count(const rd_graph *g, uint32_t value) {
    const ms_optimizer_desc o = msi_fill_optimizer(*rd_optimizer(g, value));
    const rd_value *v = &g->value[value];
    const uint32_t factors = v->rank == 2 && v->rows > 1 && v->cols > 1 ? 2 : 1;
    return o.kind == MS_OPTIMIZER_ADAFACTOR ? factors : t_state_count(&o);
}

/* Which of the norms the gradient of a param counts in, and how many there are. */
static inline uint32_t rd_norm_of(const rd_graph *g, uint32_t group) {
    uint32_t norm = 0;
    for (uint32_t k = 0; k < group; ++k) {
        norm += g->group[k].grad_clip_norm > 0.0f;
    }
    return group > 0 && g->group[group - 1].grad_clip_norm > 0.0f ? norm : 0;
}

static inline uint32_t rd_norm_count(const rd_graph *g, float *limits) {
    uint32_t count = 1;
    limits[0] = g->optimizer.grad_clip_norm > 0.0f ? g->optimizer.grad_clip_norm : FLT_MAX;
    for (uint32_t k = 0; k < g->group_count; ++k) {
        if (g->group[k].grad_clip_norm > 0.0f) {
            limits[count++] = g->group[k].grad_clip_norm;
        }
    }
    return count;
}

static inline bool rd_clips(const rd_graph *g) {
    float limits[1 + RD_GROUPS];
    return g->optimizer.grad_clip_norm > 0.0f || g->optimizer.skip_above_norm > 0.0f ||
           rd_norm_count(g, limits) > 1;
}

static inline void rd_freeze_prefix(rd_graph *g) {
    if (!t_chance(&g->rng, 0.15)) {
        return;
    }
    uint32_t values = t_below(&g->rng, g->value_count);
    for (uint32_t i = 0; i < values; ++i) {
        g->value[i].frozen |= g->value[i].role == RD_PARAM;
        g->seen[RD_FROZEN_PREFIX] |= g->value[i].role == RD_PARAM;
    }
}

/* Half of the frozen params have another dtype. These have random numbers of their own. */
static inline void rd_choose_dtypes(rd_graph *g) {
    static const ms_dtype dtypes[] = {MS_DTYPE_U8,  MS_DTYPE_I8,  MS_DTYPE_F16, MS_DTYPE_BF16,
                                      MS_DTYPE_F64, MS_DTYPE_I32, MS_DTYPE_I64};
    t_rng rng = t_seed(g->seed ^ 0x5eed);
    for (uint32_t i = 0; i < g->value_count; ++i) {
        if (g->value[i].frozen && t_chance(&rng, 0.5)) {
            g->value[i].dtype = dtypes[t_below(&rng, sizeof dtypes / sizeof dtypes[0])];
        }
    }
}

static inline void rd_count_layer(rd_graph *g, const rd_layer *l) {
    const ms_layer_desc *d = &l->desc;
    const ms_workspace *spaces[] = {&d->forward_workspace, &d->backward_workspace,
                                    &d->recompute_workspace};
    bool state = rd_used(l, RD_GROUP_STATE) != 0;
    uint8_t *seen = g->seen;
    seen[RD_SEVERAL_OUTPUTS] |= l->count[RD_GROUP_OUT] > 1;
    seen[RD_ACCUMULATES] |= (d->accumulates.in | d->accumulates.param) != 0;
    seen[RD_OVERWRITES] |= (d->overwrites.in | d->overwrites.param) != 0;
    seen[RD_OWN_RECOMPUTE] |= l->has_recompute;
    seen[RD_RECOMPUTE_READS] |= l->has_recompute && rd_reads_are_given(&d->recompute_reads);
    seen[RD_RECOMPUTE_READS_OWN] |= (d->recompute_reads.saved | d->recompute_reads.out) != 0;
    seen[RD_STATE_PROMISED] |= state && d->recompute_keeps_state;
    seen[RD_STATE_SNAPSHOT] |= state && !d->recompute_keeps_state;
    seen[RD_NO_RECOMPUTE] |= d->no_recompute;
    seen[RD_NO_BACKWARD] |= !l->has_backward && d->grads_in_forward == 0;
    seen[RD_CLOBBERS] |=
        (d->clobbers.in | d->clobbers.out | d->clobbers.saved | d->clobbers.grad_out) != 0;
    seen[RD_MUST_IN_PLACE] |= d->must_in_place != 0;
    seen[RD_MUST_GRAD_IN_PLACE] |= d->must_grad_in_place != 0;
    seen[RD_OPTIONAL_SAVED] |= d->optional_saved != 0;
    seen[RD_DROPOUT] |= l->dropout;
    seen[RD_BIND] |= l->has_bind;
    for (int i = 0; i < 3; ++i) {
        bool any = spaces[i]->bytes + spaces[i]->row_bytes > 0;
        seen[RD_WORKSPACE_ANY + (int)spaces[i]->contents] |= any;
        seen[RD_WORKSPACE_ROWS] |= spaces[i]->row_bytes > 0;
    }
    for (int i = 0; i < RD_SLOTS; ++i) {
        const ms_slot_masks *o = &d->grad_in_place[i];
        seen[RD_IN_PLACE] |= d->in_place[i] != 0;
        seen[RD_GRAD_IN_PLACE] |= (o->in | o->out | o->saved | o->grad_out) != 0;
        for (int k = 0; k < i; ++k) {
            bool same = l->slot[RD_GROUP_IN][i] == l->slot[RD_GROUP_IN][k];
            seen[RD_SAME_TENSOR_TWICE] |= same && l->slot[RD_GROUP_IN][i] != 0;
        }
    }
}

static inline void rd_count_value(rd_graph *g, const rd_value *v) {
    uint8_t *seen = g->seen;
    bool integer = v->dtype != MS_DTYPE_F32 && v->dtype != MS_DTYPE_F64;
    seen[RD_FAN_OUT] |= v->role == RD_ACTIVATION && v->readers > 1;
    seen[RD_FROZEN_PARAM] |= v->frozen;
    seen[RD_PARAM_OF_OTHER_DTYPE] |= v->role == RD_PARAM && !rd_is_float(v);
    seen[RD_READ_ONLY_BUFFER] |= v->role == RD_BUFFER && !v->is_state && v->readers > 0;
    seen[RD_KEPT_OUTPUT] |= v->kept;
    seen[RD_EVAL_OUTPUT] |= v->kept_in_eval;
    seen[RD_STATE_READ_ELSEWHERE] |= v->is_state && v->readers > 0;
    seen[RD_INTEGER_INPUT] |= integer && v->role == RD_INPUT;
    seen[RD_INTEGER_OUTPUT] |= integer && v->role == RD_ACTIVATION;
    seen[RD_INTEGER_SAVED] |= integer && v->role == RD_SAVED;
    seen[RD_STOP_GRADIENT] |= v->stopped;
    seen[RD_ON_HOST] |= v->on_host;
    seen[RD_BORROWED_INPUT] |= v->borrowed && v->role == RD_INPUT;
    seen[RD_BORROWED_PARAM] |= v->borrowed && v->role == RD_PARAM;
    seen[RD_BORROWED_BUFFER] |= v->borrowed && v->role == RD_BUFFER;
    seen[RD_BORROWED_GRADIENT] |= v->borrowed_gradient && !v->frozen;
    seen[RD_BORROWED_STATE] |=
        v->borrowed_state && !v->frozen && rd_state_count(g, (uint32_t)(v - g->value)) > 0;
    if (v->role == RD_PARAM && v->group > 0) {
        const ms_optimizer_desc *o = &g->group[v->group - 1];
        seen[RD_GROUPS_OF_PARAMS] = 1;
        seen[RD_OWN_NORM] |= o->grad_clip_norm > 0.0f;
        seen[RD_KINDS_MIXED] |= o->kind != g->optimizer.kind;
    }
}

static inline void rd_count_features(rd_graph *g) {
    const rd_layer *last = &g->layer[g->layer_count - 1];
    const ms_optimizer_desc *o = &g->optimizer;
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        rd_count_layer(g, &g->layer[i]);
        g->seen[RD_AUXILIARY_LOSS] |=
            g->layer[i].desc.grads_in_forward != 0 && i + 1 < g->layer_count;
    }
    for (uint32_t i = 0; i < g->value_count; ++i) {
        rd_count_value(g, &g->value[i]);
    }
    g->seen[RD_LOSS_WRITES_GRADIENTS] |= last->desc.grads_in_forward != 0;
    g->seen[RD_ADAMW + (int)o->kind] = 1; // in the order of ms_optimizer_kind
    g->seen[RD_MICRO_BATCHES] |= g->accumulation > 1;
    g->seen[RD_CLIPPING] |= o->grad_clip_norm > 0.0f;
    g->seen[RD_AXES] |= g->axis_count > 0;
}

/* Wants gradients of values on which the loss depends, each by itself: going back from the loss. Now
   and then no param is trained beside them. */
static inline void rd_want_gradients(rd_graph *g, t_rng *rng) {
    static bool gets[RD_VALUES];
    bool any = false;
    if (!t_chance(rng, 0.35)) {
        return;
    }
    memset(gets, 0, sizeof gets);
    gets[g->loss] = true;
    for (uint32_t k = g->layer_count; k-- > 0;) {
        const rd_layer *l = &g->layer[k];
        bool runs = false;
        for (int i = 0; i < l->count[RD_GROUP_OUT] && l->has_backward; ++i) {
            const rd_value *out = rd_at(g, l, RD_GROUP_OUT, i);
            runs |= out != NULL && !out->stopped && gets[l->slot[RD_GROUP_OUT][i] - 1];
        }
        for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
            rd_value *v =
                l->slot[RD_GROUP_IN][i] == 0 ? NULL : &g->value[l->slot[RD_GROUP_IN][i] - 1];
            const bool given = v != NULL && (runs || rd_bit(l->desc.grads_in_forward, i));
            if (!given || !rd_is_float(v) || v->stopped || v->is_state || v->role == RD_PARAM) {
                continue;
            }
            gets[l->slot[RD_GROUP_IN][i] - 1] |= v->role == RD_ACTIVATION;
            v->wanted |= t_chance(rng, 0.2);
            any |= v->wanted;
            g->seen[RD_WANTED_INPUT] |= v->wanted && v->role != RD_ACTIVATION;
            g->seen[RD_WANTED_ACTIVATION] |= v->wanted && v->role == RD_ACTIVATION;
        }
    }
    if (any && t_chance(rng, 0.1)) {
        g->seen[RD_WANTED_ALONE] = 1;
        for (uint32_t i = 0; i < g->value_count; ++i) {
            g->value[i].frozen |= g->value[i].role == RD_PARAM;
        }
    }
}

static inline rd_graph *rd_generate(uint64_t seed) {
    static const double spices[] = {0.15, 0.5, 1.0, 1.0};
    rd_graph *g = (rd_graph *)calloc(1, sizeof(rd_graph));
    assert_non_null(g);
    g->rng = t_seed(seed);
    g->seed = seed;
    g->spice = spices[t_below(&g->rng, 4)];
    g->axis_count = t_chance(&g->rng, 0.5) ? 1 + t_below(&g->rng, 2) : 0;
    for (uint32_t i = 0; i < RD_AXIS_LIMIT; ++i) {
        g->largest[i] = 1 + (int64_t)t_below(&g->rng, 4);
        g->size[i] = 1 + (int64_t)t_below(&g->rng, (uint32_t)g->largest[i]);
    }
    uint32_t layers = t_chance(&g->rng, 0.7) ? 1 + t_below(&g->rng, 9) : 8 + t_below(&g->rng, 16);
    rd_new_input(g);
    for (uint32_t i = 0; i < layers; ++i) {
        if (i > 0 && rd_spiced(g, 0.04)) {
            rd_add_loss(g, true);
        } else {
            rd_add_ordinary(g);
        }
    }
    rd_freeze_prefix(g);
    rd_add_head(g);
    rd_add_loss(g, false);
    rd_random_optimizer(g);
    rd_random_groups(g);
    t_rng wants = t_seed(seed ^ 0x3a9e);
    rd_want_gradients(g, &wants);
    for (uint32_t i = 0; i < g->axis_count && t_chance(&wants, 0.5); ++i) {
        g->trains[i] =
            g->size[i] + (int64_t)t_below(&wants, (uint32_t)(g->largest[i] - g->size[i]) + 1);
        g->seen[RD_LARGER_EVALS] |= g->trains[i] < g->largest[i];
    }
    rd_choose_dtypes(g);
    rd_random_matrices(g);
    rd_vary_updates(g);
    rd_count_features(g);
    return g;
}

/* Gives most layers dtypes in 16 bits that they accept, with random masks. What is computed in place
   has the dtype of what it lies in. */
static inline void rd_random_dtypes(rd_graph *g, uint64_t seed) {
    t_rng rng = t_seed(seed);
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        rd_layer *l = &g->layer[i];
        ms_layer_dtypes *d = &l->desc.dtypes;
        uint32_t *const masks[] = {&d->f32_in, &d->f32_out, &d->f32_saved, &d->f32_param};
        const bool in_place = (l->desc.must_in_place | l->desc.must_grad_in_place) != 0;
        const bool masked = !in_place && t_chance(&rng, 0.5);
        d->accepts = t_chance(&rng, 0.15)  ? 0
                     : t_chance(&rng, 0.5) ? 1u << MS_DTYPE_BF16
                                           : 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
        for (int group = 0; group < 4; ++group) {
            const uint32_t used = (1u << l->count[group]) - 1u;
            *masks[group] = masked ? (uint32_t)t_next(&rng) & (uint32_t)t_next(&rng) & used : 0;
        }
        const uint32_t used = (1u << l->count[RD_GROUP_PARAM]) - 1u;
        d->half_gradients = (uint32_t)t_next(&rng) & used & ~d->f32_param;
    }
    for (uint32_t i = 0; i < g->value_count; ++i) {
        bool stays = false; // a gradient lies in the place of another one, of the same dtype
        for (uint32_t k = 0; k < g->layer_count; ++k) {
            const rd_layer *l = &g->layer[k];
            stays |= l->desc.must_grad_in_place != 0 &&
                     (rd_has(l, RD_GROUP_IN, i) || rd_has(l, RD_GROUP_OUT, i));
        }
        rd_value *v = &g->value[i];
        v->f32_gradient =
            t_chance(&rng, 0.2) && !stays && v->role == RD_ACTIVATION && rd_is_float(v);
    }
}

/* The dtype in which a call is to see an operand. */
static inline ms_dtype rd_dtype(const rd_layer *l, ms_dtype call, int group, int slot,
                                const rd_value *v, bool is_param_gradient) {
    const ms_layer_dtypes *d = &l->desc.dtypes;
    const uint32_t f32[] = {d->f32_in, d->f32_out, d->f32_saved, d->f32_param, MS_ALL_SLOTS};
    const bool stays = rd_bit(f32[group], slot) || v->on_host || v->dtype != MS_DTYPE_F32 ||
                       (is_param_gradient && !rd_bit(d->half_gradients, slot));
    return stays ? v->dtype : call;
}

// ------------------------------------------------------------------------------------------------
// what runs a graph, and what went wrong

/* Mistakes that a layer can be made to make, so that the tests are known to see them. */
typedef enum rd_fault {
    RD_FAULT_NONE,
    RD_FAULT_REDRAW,  // dropout draws another mask in a recomputation
    RD_FAULT_STATE,   // a layer that promises to keep its state changes it in a recomputation
    RD_FAULT_DESTROY, // backward destroys an input that it did not say it destroys
    RD_FAULT_BETA,    // a gradient is overwritten where it should be added to
    RD_FAULT_SCRATCH, // forward reads its workspace before it has written there
    RD_FAULT_RECOUNT, // recomputing leaves out what is wanted
    RD_FAULT_COUNT
} rd_fault;

typedef struct rd_run rd_run;

typedef struct rd_op {
    rd_run *run;
    const rd_layer *layer;
    uint32_t index;
    uint64_t seed;              // of the last forward
    uint64_t drawn, drawn_step; // its seed once more, which step it was for, and which micro-batch
    uint32_t drawn_micro;
    uint32_t forwards, recomputes, backwards;
    bool own; // the call under way, or the last one, is that of the recompute callback
    bool is_bound;
    ms_phase bound_phase;
} rd_op;

typedef struct rd_stage {
    float value[RD_GROUP_COUNT][RD_SLOTS][RD_ELEMENTS];
    float grad_out[RD_SLOTS][RD_ELEMENTS];
    float result[2 * RD_SLOTS][RD_ELEMENTS];
    uint32_t count[RD_GROUP_COUNT][RD_SLOTS], grad_count[RD_SLOTS]; // 0: no data
} rd_stage;

struct rd_run {
    rd_graph *graph;
    uint8_t *seen; // features
    char *failure; // the first one, in RD_TEXT bytes
    const char *name;
    int64_t size[RD_AXIS_LIMIT];
    uint64_t step;
    uint32_t micro;
    uint32_t last_layer; // that ran
    bool debug;          // callbacks run several times
    rd_fault fault;
    uint64_t calls, fail_at; // of callbacks; the one that fails, 0: none
    rd_op op[RD_LAYERS];
    rd_stage stage;
};

RD_PRINTF(2, 3)
static inline bool rd_fail(const rd_run *run, const char *format, ...) {
    if (run->failure[0] == 0) {
        va_list list;
        int used = snprintf(run->failure, RD_TEXT, "%s, step %u, micro-batch %u: ", run->name,
                            (unsigned)run->step, (unsigned)run->micro);
        va_start(list, format);
        vsnprintf(run->failure + used, RD_TEXT - (size_t)used, format, list);
        va_end(list);
    }
    return false;
}

static inline void rd_run_init(rd_run *run, rd_graph *g, const char *name, char *failure) {
    memset(run, 0, sizeof *run);
    run->graph = g;
    run->seen = g->seen;
    run->failure = failure;
    run->name = name;
    memcpy(run->size, g->size, sizeof run->size);
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        run->op[i].run = run;
        run->op[i].layer = &g->layer[i];
        run->op[i].index = i;
    }
}

static inline uint64_t rd_workspace_bytes(const rd_run *run, const rd_layer *l,
                                          const ms_workspace *w) {
    const rd_value *first = rd_at(run->graph, l, RD_GROUP_OUT, 0);
    uint64_t rows = first == NULL ? 0 : (uint64_t)rd_rows(first, run->size);
    return w->bytes + w->row_bytes * rows;
}

/* own: a recomputation is by the layer's recompute callback. */
static inline const ms_workspace *rd_workspace_of(const rd_layer *l, ms_phase phase, bool own) {
    if (phase == MS_PHASE_BACKWARD) {
        return &l->desc.backward_workspace;
    }
    return phase == MS_PHASE_RECOMPUTE && own ? &l->desc.recompute_workspace
                                              : &l->desc.forward_workspace;
}

// ------------------------------------------------------------------------------------------------
// checks of what a callback is given

static inline const ms_view *rd_views(const ms_call *call, int group) {
    const ms_view *const views[] = {call->in, call->out, call->saved, call->param, call->state};
    return views[group];
}

/* Views from a slot on are zero, up to the last one that there can be. */
static inline bool rd_are_empty(const rd_op *op, const ms_view *views, int from) {
    ms_view empty;
    memset(&empty, 0, sizeof empty);
    for (int i = from; i < MS_LIMIT_IN; ++i) {
        if (views == NULL || views[i].data != NULL || views[i].beta != 0.0f ||
            views[i].dtype != empty.dtype ||
            memcmp(&views[i].shape, &empty.shape, sizeof empty.shape) != 0) {
            return rd_fail(op->run, "layer %u: the view of unused slot %d is not zero",
                           (unsigned)op->index, i);
        }
    }
    return true;
}

/* Shape and dtype of one operand; data that is aligned, or absent as it must be. */
static inline bool rd_check_view(rd_op *op, const ms_view *view, const rd_value *v, ms_dtype dtype,
                                 const char *what, int slot) {
    if (v == NULL) {
        return view->data == NULL || rd_fail(op->run, "layer %u: %s[%d] is empty, but has data",
                                             (unsigned)op->index, what, slot);
    }
    bool same = view->dtype == dtype && view->shape.rank == v->rank &&
                ms_shape_count(&view->shape) == rd_count(v, op->run->size) &&
                (v->rank == 0 || view->shape.dim[0] == rd_rows(v, op->run->size));
    if (!same) {
        return rd_fail(op->run, "layer %u: %s[%d] has a wrong shape or dtype", (unsigned)op->index,
                       what, slot);
    }
    return (uintptr_t)view->data % 64 == 0 ||
           rd_fail(op->run, "layer %u: %s[%d] is not aligned", (unsigned)op->index, what, slot);
}

/* Which operands of a group must have data (1), must have none (0), or may (-1). */
static inline int rd_expects(const rd_op *op, ms_phase phase, int group, int slot) {
    const rd_layer *l = op->layer;
    uint32_t bit = 1u << slot;
    bool written = group == RD_GROUP_OUT || group == RD_GROUP_SAVED;
    if (phase == MS_PHASE_BACKWARD) {
        return (rd_backward_reads(l, group) & bit) != 0;
    }
    if (phase == MS_PHASE_RECOMPUTE && op->own && group != RD_GROUP_STATE) {
        bool read = (rd_recompute_reads(l, group) & bit) != 0;
        return written && !read ? -1 : read;
    }
    return group == RD_GROUP_SAVED && (l->desc.optional_saved & bit) != 0 ? -1 : 1;
}

static inline bool rd_check_group(rd_op *op, const ms_call *call, int group) {
    static const char *const names[] = {"in", "out", "saved", "param", "state"};
    const ms_view *views = rd_views(call, group);
    for (int i = 0; i < op->layer->count[group]; ++i) {
        const rd_value *v = rd_at(op->run->graph, op->layer, group, i);
        ms_dtype dtype =
            v == NULL ? MS_DTYPE_F32 : rd_dtype(op->layer, call->dtype, group, i, v, false);
        if (!rd_check_view(op, &views[i], v, dtype, names[group], i)) {
            return false;
        }
        int expected = v == NULL ? -1 : rd_expects(op, call->phase, group, i);
        bool poison = expected == 0 && op->run->debug; // in debug mode, in place of no data
        if (expected >= 0 && (views[i].data != NULL) != (expected != 0) && !poison) {
            return rd_fail(op->run, "layer %u: %s[%d] %s data in phase %d", (unsigned)op->index,
                           names[group], i, expected != 0 ? "has no" : "has", (int)call->phase);
        }
    }
    return rd_are_empty(op, views, op->layer->count[group]);
}

/* Whether a gradient must be computed in the memory of this grad_out, wanted or not. */
static inline bool rd_is_worked_on(const rd_layer *l, int out) {
    for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
        if (rd_bit(l->desc.must_grad_in_place, i) &&
            rd_bit(l->desc.grad_in_place[i].grad_out, out)) {
            return true;
        }
    }
    return false;
}

static inline bool rd_check_gradient(rd_op *op, const ms_call *call, const ms_view *view,
                                     const rd_value *v, const char *what, int slot) {
    const int group = what[5] == 'o' ? RD_GROUP_OUT : what[5] == 'i' ? RD_GROUP_IN : RD_GROUP_PARAM;
    ms_dtype dtype = v == NULL         ? MS_DTYPE_F32
                     : v->f32_gradient ? MS_DTYPE_F32
                                       : rd_dtype(op->layer, call->dtype, group, slot, v,
                                                  group == RD_GROUP_PARAM);
    if (!rd_check_view(op, view, v, dtype, what, slot)) {
        return false;
    }
    bool worked_on = what[5] == 'o' && rd_is_worked_on(op->layer, slot);
    if (view->data != NULL && !rd_is_differentiable(v) && !worked_on) {
        return rd_fail(op->run, "layer %u: %s[%d]: nobody can want this gradient",
                       (unsigned)op->index, what, slot);
    }
    bool is_output = what[5] == 'o';
    return view->data == NULL || is_output || view->beta == 0.0f || view->beta == 1.0f ||
           rd_fail(op->run, "layer %u: %s[%d] has a beta of %g", (unsigned)op->index, what, slot,
                   (double)view->beta);
}

static inline bool rd_check_gradients(rd_op *op, const ms_call *call) {
    const rd_layer *l = op->layer;
    const rd_graph *g = op->run->graph;
    bool backward = call->phase == MS_PHASE_BACKWARD;
    bool early = call->phase == MS_PHASE_FORWARD && l->desc.grads_in_forward != 0;
    bool fine = rd_are_empty(op, call->grad_out, backward ? l->count[RD_GROUP_OUT] : 0) &&
                rd_are_empty(op, call->grad_param, backward ? l->count[RD_GROUP_PARAM] : 0) &&
                rd_are_empty(op, call->grad_in, backward || early ? l->count[RD_GROUP_IN] : 0);
    for (int i = 0; i < l->count[RD_GROUP_IN] && fine && (backward || early); ++i) {
        fine = rd_check_gradient(op, call, &call->grad_in[i], rd_at(g, l, RD_GROUP_IN, i),
                                 "grad_in", i);
        bool not_its = early && !rd_bit(l->desc.grads_in_forward, i);
        if (fine && not_its && call->grad_in[i].data != NULL) {
            fine = rd_fail(op->run, "layer %u: grad_in[%d] in forward", (unsigned)op->index, i);
        }
    }
    for (int i = 0; i < l->count[RD_GROUP_OUT] && fine && backward; ++i) {
        fine = rd_check_gradient(op, call, &call->grad_out[i], rd_at(g, l, RD_GROUP_OUT, i),
                                 "grad_out", i);
    }
    for (int i = 0; i < l->count[RD_GROUP_PARAM] && fine && backward; ++i) {
        fine = rd_check_gradient(op, call, &call->grad_param[i], rd_at(g, l, RD_GROUP_PARAM, i),
                                 "grad_param", i);
    }
    return fine;
}

/* One operand as a range of memory. */
typedef struct rd_range {
    const char *data;
    uint64_t bytes;
    int group; // RD_GROUP_, then these
    int slot;
    uint32_t value;
} rd_range;

enum { RD_RANGE_GRAD_OUT = RD_GROUP_COUNT, RD_RANGE_GRAD_IN, RD_RANGE_GRAD_PARAM, RD_RANGE_SPACE };
enum { RD_RANGES = 9 * RD_SLOTS };

static inline uint32_t rd_ranges_of(const rd_op *op, const ms_view *views, int group, int kind,
                                    rd_range *ranges) {
    uint32_t count = 0;
    for (int i = 0; i < op->layer->count[group]; ++i) {
        if (views[i].data != NULL) {
            rd_range *r = &ranges[count++];
            r->data = (const char *)views[i].data;
            r->bytes = ms_shape_count(&views[i].shape) * ms_dtype_bytes(views[i].dtype);
            r->group = kind;
            r->slot = i;
            r->value = op->layer->slot[group][i];
        }
    }
    return count;
}

/* Whether a result may lie where another operand does. */
static inline bool rd_may_share(const rd_op *op, const rd_range *a, const rd_range *b) {
    const ms_layer_desc *d = &op->layer->desc;
    if (a->data != b->data) {
        return false;
    }
    bool same_kind = a->group == b->group;
    if (same_kind && a->value == b->value) {
        return true; // several slots of one tensor
    }
    if (a->group == RD_GROUP_OUT && b->group == RD_GROUP_IN) {
        return rd_bit(d->in_place[a->slot], b->slot);
    }
    if (a->group == RD_RANGE_GRAD_IN) {
        const ms_slot_masks *o = &d->grad_in_place[a->slot];
        const uint32_t masks[] = {o->in, o->out, o->saved, 0, 0, o->grad_out, 0, 0, 0};
        return rd_bit(masks[b->group], b->slot);
    }
    return false;
}

static inline bool rd_check_overlap(rd_op *op, const ms_call *call) {
    rd_range ranges[RD_RANGES];
    uint32_t count = 0;
    for (int group = 0; group < RD_GROUP_COUNT; ++group) {
        count += rd_ranges_of(op, rd_views(call, group), group, group, ranges + count);
    }
    count += rd_ranges_of(op, call->grad_out, RD_GROUP_OUT, RD_RANGE_GRAD_OUT, ranges + count);
    count += rd_ranges_of(op, call->grad_in, RD_GROUP_IN, RD_RANGE_GRAD_IN, ranges + count);
    count +=
        rd_ranges_of(op, call->grad_param, RD_GROUP_PARAM, RD_RANGE_GRAD_PARAM, ranges + count);
    if (call->workspace_bytes > 0) {
        rd_range space = {(const char *)call->workspace, call->workspace_bytes, RD_RANGE_SPACE, 0,
                          0};
        ranges[count++] = space;
    }
    for (uint32_t i = 0; i < count; ++i) {
        for (uint32_t k = 0; k < i; ++k) {
            const rd_range *a = &ranges[i], *b = &ranges[k];
            bool apart = a->data + a->bytes <= b->data || b->data + b->bytes <= a->data;
            if (!apart && !rd_may_share(op, a, b) && !rd_may_share(op, b, a)) {
                return rd_fail(op->run, "layer %u, phase %d: group %d[%d] overlaps group %d[%d]",
                               (unsigned)op->index, (int)call->phase, a->group, a->slot, b->group,
                               b->slot);
            }
            if (!apart && (a->group != b->group)) {
                bool gradient = a->group == RD_RANGE_GRAD_IN || b->group == RD_RANGE_GRAD_IN;
                op->run->seen[gradient ? RD_DID_GRAD_IN_PLACE : RD_DID_IN_PLACE] = 1;
            }
        }
    }
    return true;
}

/* What can only be done in place stands in place. */
static inline bool rd_check_must(rd_op *op, const ms_call *call) {
    const ms_layer_desc *d = &op->layer->desc;
    bool backward = call->phase == MS_PHASE_BACKWARD;
    for (int j = 0; j < op->layer->count[RD_GROUP_OUT] && !backward; ++j) {
        bool must = rd_bit(d->must_in_place, j) && call->out[j].data != NULL;
        for (int i = 0; must && i < op->layer->count[RD_GROUP_IN]; ++i) {
            if (rd_bit(d->in_place[j], i) && call->in[i].data != call->out[j].data) {
                return rd_fail(op->run, "layer %u: out[%d] is not in place", (unsigned)op->index,
                               j);
            }
        }
    }
    for (int i = 0; i < op->layer->count[RD_GROUP_IN] && backward; ++i) {
        bool must = rd_bit(d->must_grad_in_place, i) && call->grad_in[i].data != NULL;
        for (int j = 0; must && j < op->layer->count[RD_GROUP_OUT]; ++j) {
            bool here = rd_bit(d->grad_in_place[i].grad_out, j);
            if (here && call->grad_out[j].data != call->grad_in[i].data) {
                return rd_fail(op->run, "layer %u: grad_in[%d] is not in place",
                               (unsigned)op->index, i);
            }
        }
    }
    return true;
}

static inline bool rd_check_workspace(rd_op *op, const ms_call *call) {
    const ms_workspace *w = rd_workspace_of(op->layer, call->phase, op->own);
    const unsigned char *bytes = (const unsigned char *)call->workspace;
    uint64_t expected = rd_workspace_bytes(op->run, op->layer, w);
    if (call->workspace_bytes != expected || (expected > 0 && bytes == NULL) ||
        (uintptr_t)bytes % 64 != 0) {
        return rd_fail(op->run, "layer %u, phase %d: workspace of %llu bytes, not %llu",
                       (unsigned)op->index, (int)call->phase,
                       (unsigned long long)call->workspace_bytes, (unsigned long long)expected);
    }
    for (uint64_t i = 0; i < expected && w->contents != MS_CONTENTS_ANY; ++i) {
        bool finite = (bytes[i | 3] & 0x7f) != 0x7f || (bytes[i | 2] & 0x80) == 0;
        if (w->contents == MS_CONTENTS_ZERO ? bytes[i] != 0 : !finite) {
            return rd_fail(op->run, "layer %u, phase %d: workspace is not as declared",
                           (unsigned)op->index, (int)call->phase);
        }
    }
    return true;
}

/* A seed of its own for each layer, step and micro-batch; the same again for a step that begins
   again. */
static inline bool rd_check_seed(rd_op *op, const ms_call *call) {
    const rd_run *run = op->run;
    bool again = op->drawn_step == run->step + 1 && op->drawn_micro == run->micro;
    bool first = op->drawn_step == 0;
    bool of_neighbour = op->index > 0 && run->op[op->index - 1].drawn == call->seed;
    if ((!first && again != (op->drawn == call->seed)) || of_neighbour) {
        return rd_fail(run, "layer %u: this is the seed of another layer, step or micro-batch",
                       (unsigned)op->index);
    }
    op->drawn = call->seed;
    op->drawn_step = run->step + 1;
    op->drawn_micro = run->micro;
    return true;
}

/* Seed, step and counters, and that bind came first. */
static inline bool rd_check_numbers(rd_op *op, const ms_call *call) {
    rd_run *run = op->run;
    uint32_t micros = run->graph->accumulation;
    bool forward = call->phase == MS_PHASE_FORWARD;
    if (call->phase != MS_PHASE_EVAL &&
        (call->step != run->step || call->micro != run->micro || call->micro_count != micros ||
         call->last_micro != (run->micro + 1 == micros))) {
        return rd_fail(run, "layer %u, phase %d: step %u, micro-batch %u of %u%s",
                       (unsigned)op->index, (int)call->phase, (unsigned)call->step,
                       (unsigned)call->micro, (unsigned)call->micro_count,
                       call->last_micro ? ", the last" : "");
    }
    if (op->layer->has_bind && (!op->is_bound || op->bound_phase != call->phase)) {
        return rd_fail(run, "layer %u, phase %d: bind was not called", (unsigned)op->index,
                       (int)call->phase);
    }
    op->is_bound = false;
    if (forward && !rd_check_seed(op, call)) {
        return false;
    }
    if (forward && !run->debug && op->forwards != 0) {
        return rd_fail(run, "layer %u: forward runs twice", (unsigned)op->index);
    }
    if ((call->phase == MS_PHASE_RECOMPUTE || call->phase == MS_PHASE_BACKWARD) &&
        (op->seed != call->seed || op->forwards == 0)) {
        return rd_fail(run, "layer %u, phase %d: not the seed of its forward", (unsigned)op->index,
                       (int)call->phase);
    }
    if (call->phase == MS_PHASE_RECOMPUTE && op->layer->desc.no_recompute && !op->own) {
        return rd_fail(run, "layer %u is recomputed", (unsigned)op->index);
    }
    if (call->phase == MS_PHASE_BACKWARD && !run->debug && op->backwards != 0) {
        return rd_fail(run, "layer %u: backward runs twice", (unsigned)op->index);
    }
    return true;
}

/* The masks of wanted values are those that have data. */
static inline bool rd_check_wanted(rd_op *op, const ms_call *call) {
    if (call->phase == MS_PHASE_BACKWARD) {
        return true;
    }
    for (int group = RD_GROUP_OUT; group <= RD_GROUP_SAVED; ++group) {
        uint32_t wanted = group == RD_GROUP_OUT ? call->wanted_out : call->wanted_saved;
        for (int i = 0; i < op->layer->count[group]; ++i) {
            bool has_data = rd_views(call, group)[i].data != NULL;
            bool kept = call->phase == MS_PHASE_RECOMPUTE && op->own &&
                        rd_bit(rd_recompute_reads(op->layer, group), i);
            if (!kept && has_data != (rd_bit(wanted, i))) {
                return rd_fail(op->run, "layer %u, phase %d: group %d[%d] %s wanted",
                               (unsigned)op->index, (int)call->phase, group, i,
                               has_data ? "is not" : "is");
            }
        }
    }
    return true;
}

static inline bool rd_check_call(rd_op *op, const ms_call *call) {
    op->run->calls += 1;
    bool fine = op->run->calls != op->run->fail_at && rd_check_numbers(op, call);
    if (call->dtype != MS_DTYPE_F32 && !rd_bit(op->layer->desc.dtypes.accepts, (int)call->dtype)) {
        return rd_fail(op->run, "layer %u does not accept %s", (unsigned)op->index,
                       ms_dtype_name(call->dtype));
    }
    for (int group = 0; group < RD_GROUP_COUNT && fine; ++group) {
        fine = rd_check_group(op, call, group);
    }
    return fine && rd_check_gradients(op, call) && rd_check_wanted(op, call) &&
           rd_check_must(op, call) && rd_check_overlap(op, call) && rd_check_workspace(op, call);
}

// ------------------------------------------------------------------------------------------------
// arithmetic: every result depends on every operand that it may depend on. All operands are copied
// before the first result is written, so that a layer is right in place and out of place.

static RD_NOINLINE uint32_t rd_load(const ms_view *view, float *to) {
    uint32_t count = view->data == NULL ? 0 : (uint32_t)ms_shape_count(&view->shape);
    const void *from = view->data;
    for (uint32_t i = 0; i < count; ++i) {
        switch (view->dtype) {
        case MS_DTYPE_F32:
            to[i] = ((const float *)from)[i];
            break;
        case MS_DTYPE_F64:
            to[i] = (float)((const double *)from)[i];
            break;
        case MS_DTYPE_BF16:
            to[i] = msi_f32_of_bf16(((const uint16_t *)from)[i]);
            break;
        case MS_DTYPE_F16:
            to[i] = msi_f32_of_f16(((const uint16_t *)from)[i]);
            break;
        case MS_DTYPE_I64:
            to[i] = (float)(((const uint64_t *)from)[i] >> 40 & 1023) / 1024.0f;
            break;
        case MS_DTYPE_I32:
            to[i] = (float)(((const uint32_t *)from)[i] & 255) / 256.0f;
            break;
        default:
            to[i] = (float)((const uint8_t *)from)[i] / 256.0f;
        }
    }
    return count;
}

/* Values are between -1 and 1. */
static RD_NOINLINE void rd_store(const ms_view *view, const float *from) {
    uint32_t count = (uint32_t)ms_shape_count(&view->shape);
    for (uint32_t i = 0; i < count; ++i) {
        switch (view->dtype) {
        case MS_DTYPE_F32:
            ((float *)view->data)[i] = from[i];
            break;
        case MS_DTYPE_F64:
            ((double *)view->data)[i] = (double)from[i];
            break;
        case MS_DTYPE_BF16:
            ((uint16_t *)view->data)[i] = msi_bf16_of_f32(from[i]);
            break;
        case MS_DTYPE_F16:
            ((uint16_t *)view->data)[i] = msi_f16_of_f32(from[i]);
            break;
        case MS_DTYPE_I32:
            ((int32_t *)view->data)[i] = (int32_t)(from[i] * 1000.0f);
            break;
        default:
            ((uint8_t *)view->data)[i] = (uint8_t)(128.0f + from[i] * 100.0f);
        }
    }
}

static RD_NOINLINE void rd_mix(float *to, uint32_t count, const float *from, uint32_t from_count,
                               float factor) {
    uint32_t longest = count > from_count ? count : from_count;
    uint32_t t = 0, f = 0;
    for (uint32_t i = 0; i < longest; ++i) {
        to[t] += factor * from[f];
        t = t + 1 == count ? 0 : t + 1;
        f = f + 1 == from_count ? 0 : f + 1;
    }
}

static RD_NOINLINE void rd_squash(float *values, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
        values[i] = values[i] / (1.0f + fabsf(values[i]));
    }
}

/* Between 0.5 and 1.3, of either sign. */
static inline float rd_coefficient(const rd_layer *l, uint32_t result, uint32_t operand) {
    uint32_t mixed = (l->salt + 31u * result + 7u * operand) * 2654435761u >> 16;
    float size = 0.5f + 0.1f * (float)(mixed % 9u);
    return (mixed & 64u) != 0 ? -size : size;
}

static RD_NOINLINE void rd_drop(float *values, uint32_t count, uint64_t seed) {
    for (uint32_t i = 0; i < count; ++i) {
        values[i] *= t_mask(seed, (int64_t)i);
    }
}

static inline void rd_load_group(rd_stage *s, const rd_layer *l, const ms_call *call, int group) {
    const ms_view *views = rd_views(call, group);
    for (int i = 0; i < l->count[group]; ++i) {
        s->count[group][i] = rd_load(&views[i], s->value[group][i]);
    }
}

/* Adds all staged operands of the groups in the mask `groups`, as far as reads allows. */
static inline void rd_gather(rd_stage *s, const rd_layer *l, const ms_reads *reads, bool has_state,
                             uint32_t result, float *to, uint32_t count) {
    uint32_t operand = 0;
    for (int group = 0; group < RD_GROUP_COUNT; ++group) {
        for (int i = 0; i < l->count[group]; ++i, ++operand) {
            bool read = group == RD_GROUP_STATE ? has_state : rd_bit(rd_mask_of(reads, group), i);
            if (read && s->count[group][i] > 0) {
                float factor = rd_coefficient(l, result, operand);
                rd_mix(to, count, s->value[group][i], s->count[group][i], factor);
            }
        }
    }
}

/* One output (result: its slot) or saved tensor (RD_SLOTS + slot). */
static inline void rd_produce(rd_op *op, const ms_call *call, const ms_reads *reads,
                              uint32_t result, const ms_view *view) {
    rd_stage *s = &op->run->stage;
    const rd_layer *l = op->layer;
    float *to = s->result[result];
    uint32_t count = (uint32_t)ms_shape_count(&view->shape);
    for (uint32_t i = 0; i < count; ++i) {
        to[i] = 0.1f * (float)(i % 5u);
    }
    rd_gather(s, l, reads, !l->desc.recompute_keeps_state, result, to, count);
    rd_squash(to, count);
    if (l->dropout && call->phase != MS_PHASE_EVAL && view->dtype == MS_DTYPE_F32) {
        bool redraw = op->run->fault == RD_FAULT_REDRAW && call->phase == MS_PHASE_RECOMPUTE;
        rd_drop(to, count, call->seed + result + (redraw ? 1000u : 0u));
    }
}

/* What values of this layer that can be dropped depend on: all that recompute reads. What recompute
   reads of the layer's own values depends on every input and param. */
static inline ms_reads rd_sources(const rd_layer *l, bool kept) {
    ms_reads r;
    memset(&r, 0, sizeof r);
    bool narrow = l->has_recompute && !kept;
    r.in = narrow ? rd_recompute_reads(l, RD_GROUP_IN) : rd_used(l, RD_GROUP_IN);
    r.param = narrow ? rd_recompute_reads(l, RD_GROUP_PARAM) : rd_used(l, RD_GROUP_PARAM);
    r.out = narrow ? rd_recompute_reads(l, RD_GROUP_OUT) : 0;
    r.saved = narrow ? rd_recompute_reads(l, RD_GROUP_SAVED) : 0;
    return r;
}

/* Outputs and saved tensors: those that recompute reads (kept), or the others. */
static inline void rd_produce_all(rd_op *op, const ms_call *call, bool kept) {
    const rd_layer *l = op->layer;
    rd_stage *s = &op->run->stage;
    ms_reads reads = rd_sources(l, kept);
    for (int pass = 0; pass < 2; ++pass) { // all are computed before one is written
        for (int group = RD_GROUP_OUT; group <= RD_GROUP_SAVED; ++group) {
            uint32_t own = l->has_recompute ? rd_recompute_reads(l, group) : 0;
            for (int i = 0; i < l->count[group]; ++i) {
                const ms_view *view = &rd_views(call, group)[i];
                uint32_t result = (uint32_t)(group == RD_GROUP_OUT ? i : RD_SLOTS + i);
                if (view->data == NULL || (rd_bit(own, i)) != kept) {
                    continue;
                }
                if (pass == 0) {
                    rd_produce(op, call, &reads, result, view);
                } else {
                    rd_store(view, s->result[result]);
                    s->count[group][i] = kept ? rd_load(view, s->value[group][i]) : 0;
                }
            }
        }
    }
}

static inline void rd_advance_state(rd_op *op, const ms_call *call) {
    const rd_layer *l = op->layer;
    const rd_stage *s = &op->run->stage;
    for (int i = 0; i < l->count[RD_GROUP_STATE]; ++i) {
        const ms_view *view = &call->state[i];
        uint32_t count = view->data == NULL ? 0 : (uint32_t)ms_shape_count(&view->shape);
        for (uint32_t e = 0; e < count; ++e) {
            uint32_t from = s->count[RD_GROUP_IN][0];
            float x = from == 0 ? 0.5f : s->value[RD_GROUP_IN][0][e % from];
            if (view->dtype == MS_DTYPE_F32) {
                float *to = (float *)view->data + e;
                *to = 0.5f * *to + 0.25f * x;
            } else if (view->dtype == MS_DTYPE_I64) {
                uint64_t *to = (uint64_t *)view->data + e;
                *to = *to * 6364136223846793005u + 1442695040888963407u;
            } else {
                ((uint32_t *)view->data)[e] += 1;
            }
        }
    }
}

/* Garbage in memory whose value nobody is to use again. */
static inline void rd_destroy(void *data, uint64_t bytes) {
    memset(data, 0xff, (size_t)bytes);
}

static inline uint64_t rd_view_bytes(const ms_view *view) {
    return ms_shape_count(&view->shape) * ms_dtype_bytes(view->dtype);
}

static inline void rd_contribute(rd_op *op, const ms_view *view, const float *from, bool adds,
                                 bool overwrites) {
    float data[RD_ELEMENTS];
    uint32_t count = (uint32_t)ms_shape_count(&view->shape);
    bool add = adds || (!overwrites && view->beta != 0.0f);
    add = add && op->run->fault != RD_FAULT_BETA;
    if (add) {
        rd_load(view, data);
    }
    for (uint32_t i = 0; i < count; ++i) {
        data[i] = add ? data[i] + from[i] : from[i];
    }
    rd_store(view, data);
}

/* A loss layer that writes gradients in forward: factor times something of its inputs. */
static inline void rd_gradients_in_forward(rd_op *op, const ms_call *call) {
    const rd_layer *l = op->layer;
    rd_stage *s = &op->run->stage;
    ms_reads reads = rd_sources(l, false);
    for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
        uint32_t count = s->count[RD_GROUP_IN][i];
        float *to = s->result[i];
        if (!rd_bit(l->desc.grads_in_forward, i) || call->grad_in[i].data == NULL) {
            continue;
        }
        memset(to, 0, count * sizeof *to);
        rd_gather(s, l, &reads, false, 100u + (uint32_t)i, to, count);
        rd_squash(to, count);
        for (uint32_t e = 0; e < count; ++e) {
            to[e] *= call->loss_factor;
        }
        rd_contribute(op, &call->grad_in[i], to, rd_bit(l->desc.accumulates.in, i),
                      rd_bit(l->desc.overwrites.in, i));
    }
}

/* What backward adds to one gradient (target: slot of in, or RD_SLOTS + slot of param). */
static inline void rd_contribution(rd_op *op, const ms_call *call, uint32_t target,
                                   uint32_t count) {
    const rd_layer *l = op->layer;
    rd_stage *s = &op->run->stage;
    float slope[RD_ELEMENTS];
    float *to = s->result[target];
    memset(to, 0, count * sizeof *to);
    for (int j = 0; j < l->count[RD_GROUP_OUT]; ++j) {
        if (s->grad_count[j] > 0) {
            float factor = rd_coefficient(l, 200u + target, (uint32_t)j);
            rd_mix(to, count, s->grad_out[j], s->grad_count[j], factor);
        }
    }
    ms_reads all; // of what was declared, and therefore staged
    memset(&all, 0, sizeof all);
    all.in = all.out = all.saved = all.param = MS_ALL_SLOTS;
    memset(slope, 0, count * sizeof *slope);
    rd_gather(s, l, &all, false, 300u + target, slope, count);
    rd_squash(slope, count);
    for (uint32_t i = 0; i < count; ++i) {
        to[i] *= 1.0f + 0.5f * slope[i];
    }
    if (l->dropout) {
        rd_drop(to, count, call->seed + target);
    }
    rd_squash(to, count);
}

static inline bool rd_is_result(const ms_call *call, const rd_layer *l, const void *data) {
    for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
        if (call->grad_in[i].data == data) {
            return true;
        }
    }
    return false;
}

static inline void rd_clobber(const rd_op *op, const ms_call *call) {
    const rd_layer *l = op->layer;
    const ms_slot_masks *c = &l->desc.clobbers;
    bool fault = op->run->fault == RD_FAULT_DESTROY;
    const uint32_t masks[] = {fault ? MS_ALL_SLOTS : c->in, c->out, c->saved, c->grad_out};
    const ms_view *const views[] = {call->in, call->out, call->saved, call->grad_out};
    const int groups[] = {RD_GROUP_IN, RD_GROUP_OUT, RD_GROUP_SAVED, RD_GROUP_OUT};
    for (int k = 0; k < 4; ++k) {
        for (int i = 0; i < l->count[groups[k]]; ++i) {
            const ms_view *view = &views[k][i];
            if (rd_bit(masks[k], i) && view->data != NULL && !rd_is_result(call, l, view->data)) {
                rd_destroy(view->data, rd_view_bytes(view));
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// callbacks

static inline int rd_bind(const ms_call *call) {
    rd_op *op = (rd_op *)call->user;
    op->is_bound = true;
    op->bound_phase = call->phase;
    return 0;
}

static inline void rd_use_workspace(const rd_op *op, const ms_call *call) {
    rd_stage *s = &op->run->stage;
    if (op->run->fault == RD_FAULT_SCRATCH && call->workspace_bytes >= sizeof(float)) {
        s->value[RD_GROUP_IN][0][0] += *(const float *)call->workspace;
    }
    if (call->workspace_bytes > 0) {
        rd_destroy(call->workspace, call->workspace_bytes);
    }
}

static inline void rd_note_recompute(rd_op *op, const ms_call *call) {
    const rd_layer *l = op->layer;
    uint8_t *seen = op->run->seen;
    bool state = rd_used(l, RD_GROUP_STATE) != 0;
    op->recomputes += 1;
    seen[RD_DID_RECOMPUTE] = 1;
    seen[RD_DID_OWN_RECOMPUTE] |= op->own;
    seen[RD_DID_REPEAT] |= l->has_recompute && !op->own;
    seen[RD_DID_SKIP_STATE] |= state && l->desc.recompute_keeps_state;
    seen[RD_DID_RESTORE_STATE] |= state && !l->desc.recompute_keeps_state;
    uint32_t droppable = rd_used(l, RD_GROUP_OUT) & ~rd_recompute_reads(l, RD_GROUP_OUT);
    seen[RD_DID_PARTIAL_RECOMPUTE] |= op->own && (droppable & ~(uint32_t)call->wanted_out) != 0;
}

static inline int rd_forward(const ms_call *call) {
    rd_op *op = (rd_op *)call->user;
    const rd_layer *l = op->layer;
    rd_stage *s = &op->run->stage;
    op->own = false;
    if (!rd_check_call(op, call)) {
        return RD_CALLBACK_ERROR;
    }
    if (call->phase == MS_PHASE_FORWARD) {
        op->forwards += 1;
        op->seed = call->seed;
    } else if (call->phase == MS_PHASE_RECOMPUTE) {
        rd_note_recompute(op, call);
    }
    memset(s->count, 0, sizeof s->count);
    rd_load_group(s, l, call, RD_GROUP_IN);
    rd_load_group(s, l, call, RD_GROUP_PARAM);
    rd_load_group(s, l, call, RD_GROUP_STATE);
    rd_use_workspace(op, call);
    if (call->phase == MS_PHASE_FORWARD && l->desc.grads_in_forward != 0) {
        rd_gradients_in_forward(op, call);
    }
    rd_produce_all(op, call, true);
    rd_produce_all(op, call, false);
    for (int i = 0; i < l->count[RD_GROUP_SAVED]; ++i) {
        bool optional = rd_bit(l->desc.optional_saved, i);
        op->run->seen[RD_DID_SKIP_OPTIONAL] |= optional && call->saved[i].data == NULL;
    }
    bool keeps = call->phase == MS_PHASE_RECOMPUTE && l->desc.recompute_keeps_state &&
                 op->run->fault != RD_FAULT_STATE;
    if (!keeps && (call->phase != MS_PHASE_EVAL || l->state_in_eval)) {
        rd_advance_state(op, call);
    }
    return 0;
}

static inline int rd_recompute(const ms_call *call) {
    rd_op *op = (rd_op *)call->user;
    const rd_layer *l = op->layer;
    rd_stage *s = &op->run->stage;
    op->own = true;
    if (call->phase != MS_PHASE_RECOMPUTE) {
        rd_fail(op->run, "layer %u: recompute in phase %d", (unsigned)op->index, (int)call->phase);
    }
    if (!rd_check_call(op, call)) {
        return RD_CALLBACK_ERROR;
    }
    rd_note_recompute(op, call);
    memset(s->count, 0, sizeof s->count);
    for (int group = 0; group < RD_GROUP_COUNT; ++group) {
        uint32_t reads = group == RD_GROUP_STATE ? MS_ALL_SLOTS : rd_recompute_reads(l, group);
        for (int i = 0; i < l->count[group]; ++i) {
            if (rd_bit(reads, i)) {
                s->count[group][i] = rd_load(&rd_views(call, group)[i], s->value[group][i]);
            }
        }
    }
    rd_use_workspace(op, call);
    if (op->run->fault == RD_FAULT_RECOUNT) {
        return 0;
    }
    rd_produce_all(op, call, false);
    if (!l->desc.recompute_keeps_state || op->run->fault == RD_FAULT_STATE) {
        rd_advance_state(op, call); // the library puts it back
    }
    return 0;
}

static inline int rd_backward(const ms_call *call) {
    rd_op *op = (rd_op *)call->user;
    const rd_layer *l = op->layer;
    rd_stage *s = &op->run->stage;
    if (!rd_check_call(op, call)) {
        return RD_CALLBACK_ERROR;
    }
    op->backwards += 1;
    memset(s->count, 0, sizeof s->count);
    memset(s->grad_count, 0, sizeof s->grad_count);
    for (int group = 0; group < RD_GROUP_STATE; ++group) {
        uint32_t reads = rd_backward_reads(l, group);
        for (int i = 0; i < l->count[group]; ++i) {
            if (rd_bit(reads, i)) {
                s->count[group][i] = rd_load(&rd_views(call, group)[i], s->value[group][i]);
            }
        }
    }
    for (int j = 0; j < l->count[RD_GROUP_OUT]; ++j) {
        s->grad_count[j] = rd_load(&call->grad_out[j], s->grad_out[j]);
    }
    rd_use_workspace(op, call);
    for (uint32_t t = 0; t < 2 * RD_SLOTS; ++t) {
        bool is_param = t >= RD_SLOTS;
        uint32_t slot = is_param ? t - RD_SLOTS : t;
        const ms_view *view = is_param ? &call->grad_param[slot] : &call->grad_in[slot];
        if (slot < l->count[is_param ? RD_GROUP_PARAM : RD_GROUP_IN] && view->data != NULL) {
            rd_contribution(op, call, t, (uint32_t)ms_shape_count(&view->shape));
        }
    }
    for (int i = 0; i < l->count[RD_GROUP_IN]; ++i) {
        if (call->grad_in[i].data != NULL) {
            rd_contribute(op, &call->grad_in[i], s->result[i], rd_bit(l->desc.accumulates.in, i),
                          rd_bit(l->desc.overwrites.in | l->desc.must_grad_in_place, i));
        }
    }
    for (int i = 0; i < l->count[RD_GROUP_PARAM]; ++i) {
        if (call->grad_param[i].data != NULL) {
            rd_contribute(op, &call->grad_param[i], s->result[RD_SLOTS + i],
                          rd_bit(l->desc.accumulates.param, i),
                          rd_bit(l->desc.overwrites.param, i));
        }
    }
    rd_clobber(op, call);
    return 0;
}

/* The trainer's own update: states that remember, and a gradient that serves as momentum where it
   is borrowed. */
static inline int rd_update(const ms_update_args *args) {
    const rd_graph *g = (const rd_graph *)args->user;
    const bool has_space = args->call != NULL && g->has_update_space;
    float scale = args->gradient_scale == NULL ? 1.0f : *args->gradient_scale;
    float own[RD_ELEMENTS];
    float *steps = has_space ? (float *)args->call->workspace : own;
    if (has_space && (args->call->workspace_bytes < args->count * sizeof(float) ||
                      ms_shape_count(&args->shape) != args->count)) {
        return RD_CALLBACK_ERROR;
    }
    for (uint64_t i = 0; i < args->count; ++i) { // all before the first result
        steps[i] = args->gradient[i] * scale + args->weight_decay * args->value[i];
    }
    for (uint64_t i = 0; i < args->count; ++i) {
        float step = steps[i];
        for (uint32_t k = 0; k < g->optimizer.state_count; ++k) {
            args->state[k][i] = 0.5f * args->state[k][i] + step;
            step = 0.5f * args->state[k][i];
        }
        args->value[i] -= args->learning_rate * step;
        args->gradient[i] *= 0.5f;
    }
    return 0;
}

// ------------------------------------------------------------------------------------------------
// first values

/* The bytes that a value has at first, or, for inputs, in a step. */
static inline void rd_initial(const rd_graph *g, uint32_t index, const int64_t *size,
                              uint64_t round, void *to) {
    const rd_value *v = &g->value[index];
    t_rng rng = t_seed(g->seed * 1000003u + index * 101u + round);
    uint32_t count = rd_count(v, size);
    for (uint32_t i = 0; i < count; ++i) {
        uint64_t bits = t_next(&rng);
        switch (v->dtype) {
        case MS_DTYPE_F32:
            ((float *)to)[i] = 2.0f * (float)(bits >> 40) / 16777216.0f - 1.0f;
            break;
        case MS_DTYPE_F64:
            ((double *)to)[i] = 2.0 * (double)(bits >> 40) / 16777216.0 - 1.0;
            break;
        case MS_DTYPE_F16:
        case MS_DTYPE_BF16: // between -1 and 1 in both
            ((uint16_t *)to)[i] = (uint16_t)(bits >> 48 & 0xbbff);
            break;
        case MS_DTYPE_I64:
            ((uint64_t *)to)[i] = bits;
            break;
        case MS_DTYPE_I32:
            ((uint32_t *)to)[i] = (uint32_t)(bits >> 50);
            break;
        default:
            ((uint8_t *)to)[i] = (uint8_t)(bits >> 60);
        }
    }
}

/* Memory at a multiple of 64 bytes, full of garbage; what t_lend gave stands in front of it. */
static inline void *rd_alloc(uint64_t bytes) {
    enum { ALIGNMENT = 64 };
    char *base = (char *)t_lend((size_t)bytes + ALIGNMENT + sizeof(base));
    assert_non_null(base);
    char *memory = base + sizeof base;
    memory += (ALIGNMENT - (uintptr_t)memory % ALIGNMENT) % ALIGNMENT;
    memcpy(memory - sizeof base, &base, sizeof base);
    memset(memory, 0xff, (size_t)bytes);
    return memory;
}

static inline void rd_free(void *memory) {
    if (memory != NULL) {
        char *base;
        memcpy(&base, (char *)memory - sizeof base, sizeof base);
        t_take_back(base);
    }
}

static inline uint64_t rd_largest_bytes(const rd_graph *g, const rd_value *v) {
    return rd_bytes(v, g->largest);
}

// ------------------------------------------------------------------------------------------------
// a call without a model

typedef struct rd_frame {
    ms_view view[RD_GROUP_COUNT][MS_LIMIT_IN];
    ms_view grad_out[MS_LIMIT_OUT], grad_in[MS_LIMIT_IN], grad_param[MS_LIMIT_PARAM];
    ms_call call;
    bool repeats;                          // a recomputation calls forward, in any case
    bool copied[RD_GROUP_COUNT][RD_SLOTS]; // data are a copy, to be freed
} rd_frame;

static inline ms_view rd_empty_view(const rd_run *run, const rd_value *v) {
    ms_view view;
    memset(&view, 0, sizeof view);
    if (v != NULL) {
        view.dtype = v->dtype;
        view.shape.rank = v->rank;
        view.shape.dim[0] = rd_rows(v, run->size);
        view.shape.dim[1] = v->cols;
    }
    return view;
}

/* Shapes and numbers; data are the caller's to fill in. */
static inline void rd_frame_init(rd_frame *f, rd_run *run, uint32_t layer, ms_phase phase) {
    rd_op *op = &run->op[layer];
    memset(f, 0, sizeof *f);
    for (int group = 0; group < RD_GROUP_COUNT; ++group) {
        for (int i = 0; i < RD_SLOTS; ++i) {
            f->view[group][i] = rd_empty_view(run, rd_at(run->graph, op->layer, group, i));
        }
    }
    const bool backward = phase == MS_PHASE_BACKWARD;
    if (backward) {
        memcpy(f->grad_out, f->view[RD_GROUP_OUT], sizeof f->grad_out);
        memcpy(f->grad_param, f->view[RD_GROUP_PARAM], sizeof f->grad_param);
    }
    if (backward || (phase == MS_PHASE_FORWARD && op->layer->desc.grads_in_forward != 0)) {
        memcpy(f->grad_in, f->view[RD_GROUP_IN], sizeof f->grad_in);
    }
    ms_call *call = &f->call;
    call->user = op;
    call->phase = phase;
    call->in = f->view[RD_GROUP_IN];
    call->out = f->view[RD_GROUP_OUT];
    call->saved = f->view[RD_GROUP_SAVED];
    call->param = f->view[RD_GROUP_PARAM];
    call->state = f->view[RD_GROUP_STATE];
    call->grad_in = f->grad_in;
    call->grad_out = f->grad_out;
    call->grad_param = f->grad_param;
    call->seed = op->seed;
    call->step = run->step;
    call->micro = run->micro;
    call->micro_count = run->graph->accumulation;
    call->last_micro = run->micro + 1 == run->graph->accumulation;
}

static inline uint32_t rd_with_data(const ms_view *views) {
    uint32_t mask = 0;
    for (int i = 0; i < RD_SLOTS; ++i) {
        mask |= views[i].data != NULL ? 1u << i : 0;
    }
    return mask;
}

/* Calls what the phase asks for; false if the callback failed. */
static inline bool rd_frame_call(rd_frame *f) {
    rd_op *op = (rd_op *)f->call.user;
    if (f->call.phase != MS_PHASE_BACKWARD) {
        f->call.wanted_out = rd_with_data(f->call.out);
        f->call.wanted_saved = rd_with_data(f->call.saved);
    }
    if (op->layer->has_bind) {
        rd_bind(&f->call);
    }
    bool own = f->call.phase == MS_PHASE_RECOMPUTE && op->layer->has_recompute && !f->repeats;
    int error = f->call.phase == MS_PHASE_BACKWARD ? rd_backward(&f->call)
                : own                              ? rd_recompute(&f->call)
                                                   : rd_forward(&f->call);
    return error == 0;
}

// ------------------------------------------------------------------------------------------------
// the reference: forward in order, backward in the other order, sums as they come; one allocation
// for each tensor, and nothing of what a plan does

typedef struct rd_reference {
    rd_run run;
    ms_backend cpu; // for updates, which are not what is tested here
    void *data[RD_VALUES];
    float *gradient[RD_VALUES];
    bool has_gradient[RD_VALUES], takes_part[RD_VALUES];
    float *state[RD_VALUES][RD_STATES];
    float loss_factor, learning_rate; // as the model was told
    float gradient_factor; // set, or of a step that ends before its last micro-batch; 0: 1
    float given_factor;    // by rd_reference_write; 0: none
    bool paused[RD_VALUES];
    double norm;
    uint64_t updates[RD_VALUES];
} rd_reference;

static inline rd_reference *rd_reference_create(rd_graph *g, char *failure) {
    rd_reference *r = (rd_reference *)calloc(1, sizeof(rd_reference));
    assert_non_null(r);
    rd_run_init(&r->run, g, "reference", failure);
    r->cpu = ms_backend_cpu();
    r->learning_rate = g->optimizer.learning_rate;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        uint64_t bytes = rd_largest_bytes(g, v);
        r->data[i] = rd_alloc(bytes);
        if (v->role < RD_ACTIVATION) {
            rd_initial(g, i, g->size, 0, r->data[i]);
        }
        if (!rd_is_differentiable(v)) {
            continue;
        }
        r->gradient[i] = (float *)rd_alloc(bytes);
        memset(r->gradient[i], 0, (size_t)bytes);
        for (int k = 0; k < RD_STATES && v->role == RD_PARAM; ++k) {
            r->state[i][k] = (float *)rd_alloc(bytes);
            memset(r->state[i][k], 0, (size_t)bytes);
        }
    }
    return r;
}

static inline void rd_reference_destroy(rd_reference *r) {
    for (uint32_t i = 0; r != NULL && i < r->run.graph->value_count; ++i) {
        rd_free(r->data[i]);
        rd_free(r->gradient[i]);
        for (int k = 0; k < RD_STATES; ++k) {
            rd_free(r->state[i][k]);
        }
    }
    free(r);
}

static inline void *rd_copy_of(const void *data, uint64_t bytes) {
    void *copy = rd_alloc(bytes);
    memcpy(copy, data, (size_t)bytes);
    return copy;
}

/* Gives the frame data for the slots in a mask. */
static inline void rd_reference_give(rd_reference *r, rd_frame *f, const rd_layer *l, int group,
                                     uint32_t mask, bool copies) {
    for (int i = 0; i < l->count[group]; ++i) {
        uint32_t value = l->slot[group][i];
        if (value != 0 && rd_bit(mask, i)) {
            ms_view *view = &f->view[group][i];
            view->data = r->data[value - 1];
            if (copies) {
                view->data = rd_copy_of(view->data, rd_view_bytes(view));
                f->copied[group][i] = true;
            }
        }
    }
}

static inline void rd_reference_space(rd_reference *r, rd_frame *f, const rd_layer *l) {
    const ms_workspace *w = rd_workspace_of(l, f->call.phase, l->has_recompute);
    f->call.workspace_bytes = rd_workspace_bytes(&r->run, l, w);
    if (f->call.workspace_bytes > 0) {
        f->call.workspace = rd_alloc(f->call.workspace_bytes);
        if (w->contents != MS_CONTENTS_ANY) {
            memset(f->call.workspace, 0, (size_t)f->call.workspace_bytes);
        }
    }
}

static inline void rd_frame_free(rd_frame *f) {
    rd_free(f->call.workspace);
    for (int group = 0; group < RD_GROUP_COUNT; ++group) {
        for (int i = 0; i < RD_SLOTS; ++i) {
            if (f->copied[group][i]) {
                rd_free(f->view[group][i].data);
            }
        }
    }
}

/* Edges of one call: those that add up themselves are given the sum, in the order of their slots;
   the others memory of their own, which is added after the call. */
static inline void rd_reference_edges(rd_reference *r, rd_frame *f, const rd_layer *l, int group,
                                      uint32_t mask, float **parts) {
    bool is_param = group == RD_GROUP_PARAM;
    const ms_layer_desc *d = &l->desc;
    uint32_t apart =
        is_param ? d->overwrites.param : (uint32_t)d->overwrites.in | d->must_grad_in_place;
    uint32_t adds = is_param ? d->accumulates.param : d->accumulates.in;
    ms_view *views = is_param ? f->grad_param : f->grad_in;
    for (int i = 0; i < l->count[group]; ++i) {
        uint32_t t = l->slot[group][i] - 1u;
        parts[i] = NULL;
        if (l->slot[group][i] == 0 || !rd_bit(mask, i) || r->gradient[t] == NULL) {
            continue;
        }
        bool must = !is_param && rd_bit(d->must_grad_in_place, i);
        r->takes_part[t] = true;
        if (rd_bit(apart, i)) {
            parts[i] = (float *)rd_alloc(rd_view_bytes(&views[i]));
            views[i].data = parts[i];
        } else {
            if (rd_bit(adds, i) && !r->has_gradient[t]) {
                memset(r->gradient[t], 0, (size_t)rd_view_bytes(&views[i]));
                r->has_gradient[t] = true;
            }
            views[i].data = r->gradient[t];
            views[i].beta = r->has_gradient[t] ? 1.0f : 0.0f;
            r->has_gradient[t] = true;
        }
        for (int j = 0; must && j < l->count[RD_GROUP_OUT]; ++j) {
            if (rd_bit(d->grad_in_place[i].grad_out, j)) {
                memset(parts[i], 0, (size_t)rd_view_bytes(&views[i]));
                if (f->grad_out[j].data != NULL) {
                    memcpy(parts[i], f->grad_out[j].data, (size_t)rd_view_bytes(&views[i]));
                }
                f->grad_out[j].data = parts[i];
            }
        }
    }
}

static inline void rd_reference_add(rd_reference *r, const rd_frame *f, const rd_layer *l,
                                    int group, float **parts) {
    const ms_view *views = group == RD_GROUP_PARAM ? f->grad_param : f->grad_in;
    for (int i = 0; i < l->count[group]; ++i) {
        if (parts[i] != NULL) {
            uint32_t t = l->slot[group][i] - 1u;
            uint32_t count = (uint32_t)ms_shape_count(&views[i].shape);
            for (uint32_t e = 0; e < count; ++e) {
                float sum = r->has_gradient[t] ? r->gradient[t][e] + parts[i][e] : parts[i][e];
                r->gradient[t][e] = sum;
            }
            r->has_gradient[t] = true;
            rd_free(parts[i]);
        }
    }
}

/* What the gradient of the loss is set to. */
static inline float rd_loss_factor(const rd_graph *g, const int64_t *size, float factor) {
    float count = (float)rd_count(&g->value[g->loss], size);
    return factor != 0.0f ? factor : 1.0f / count / (float)g->accumulation;
}

static inline float rd_reference_factor(const rd_reference *r) {
    return rd_loss_factor(r->run.graph, r->run.size, r->loss_factor);
}

static inline bool rd_reference_forward_layer(rd_reference *r, uint32_t layer, ms_phase phase) {
    rd_frame f;
    float *parts[RD_SLOTS];
    const rd_layer *l = &r->run.graph->layer[layer];
    uint32_t early = phase == MS_PHASE_FORWARD ? l->desc.grads_in_forward : 0;
    rd_frame_init(&f, &r->run, layer, phase);
    for (int group = 0; group < RD_GROUP_COUNT; ++group) {
        rd_reference_give(r, &f, l, group, UINT32_MAX, false);
    }
    for (int j = 0; j < l->count[RD_GROUP_OUT]; ++j) {
        for (int i = 0; rd_bit(l->desc.must_in_place, j) && i < RD_SLOTS; ++i) {
            if (rd_bit(l->desc.in_place[j], i)) {
                ms_view *out = &f.view[RD_GROUP_OUT][j], *in = &f.view[RD_GROUP_IN][i];
                memcpy(out->data, in->data, (size_t)rd_view_bytes(in));
                in->data = out->data;
            }
        }
    }
    rd_reference_space(r, &f, l);
    f.call.loss_factor = rd_reference_factor(r);
    rd_reference_edges(r, &f, l, RD_GROUP_IN, early, parts);
    bool fine = rd_frame_call(&f);
    rd_reference_add(r, &f, l, RD_GROUP_IN, parts);
    rd_frame_free(&f);
    return fine;
}

static inline bool rd_reference_forward(rd_reference *r, ms_phase phase) {
    const rd_graph *g = r->run.graph;
    bool fine = true;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        bool lasts = g->value[i].role == RD_PARAM;
        r->has_gradient[i] =
            lasts && (r->run.micro > 0 ? r->has_gradient[i] : g->value[i].borrowed_gradient);
        r->takes_part[i] = lasts && r->run.micro > 0 && r->takes_part[i];
    }
    for (uint32_t i = 0; i < g->layer_count && fine; ++i) {
        r->run.op[i].forwards = r->run.op[i].backwards = 0;
        fine = rd_reference_forward_layer(r, i, phase);
    }
    return fine;
}

static inline bool rd_reference_backward_layer(rd_reference *r, uint32_t layer) {
    rd_frame f;
    float *parts[2][RD_SLOTS];
    void *wanted[RD_SLOTS] = {NULL}; // copies of gradients that backward destroys
    const rd_layer *l = &r->run.graph->layer[layer];
    const ms_slot_masks *c = &l->desc.clobbers;
    bool any = false;
    rd_frame_init(&f, &r->run, layer, MS_PHASE_BACKWARD);
    for (int j = 0; j < l->count[RD_GROUP_OUT]; ++j) {
        uint32_t value = l->slot[RD_GROUP_OUT][j];
        if (value != 0 && r->has_gradient[value - 1]) {
            f.grad_out[j].data = r->gradient[value - 1];
            any = true;
        }
        if (f.grad_out[j].data != NULL && r->run.graph->value[value - 1].wanted &&
            l->has_backward && rd_bit(c->grad_out, j)) {
            f.grad_out[j].data = wanted[j] =
                rd_copy_of(r->gradient[value - 1], rd_view_bytes(&f.grad_out[j]));
        }
    }
    if (!l->has_backward || !any) {
        return true;
    }
    for (int group = 0; group < RD_GROUP_STATE; ++group) {
        bool copies = (c->in | c->out | c->saved) != 0;
        rd_reference_give(r, &f, l, group, rd_backward_reads(l, group), copies);
    }
    rd_reference_space(r, &f, l);
    rd_reference_edges(r, &f, l, RD_GROUP_IN, UINT32_MAX, parts[0]);
    rd_reference_edges(r, &f, l, RD_GROUP_PARAM, UINT32_MAX, parts[1]);
    bool fine = rd_frame_call(&f);
    rd_reference_add(r, &f, l, RD_GROUP_IN, parts[0]);
    rd_reference_add(r, &f, l, RD_GROUP_PARAM, parts[1]);
    rd_frame_free(&f);
    for (int j = 0; j < RD_SLOTS; ++j) {
        rd_free(wanted[j]);
    }
    return fine;
}

static inline bool rd_reference_backward(rd_reference *r) {
    const rd_graph *g = r->run.graph;
    bool fine = true;
    if (r->gradient[g->loss] != NULL && g->layer[g->layer_count - 1].has_backward) {
        uint32_t count = rd_count(&g->value[g->loss], r->run.size);
        for (uint32_t i = 0; i < count; ++i) {
            r->gradient[g->loss][i] = rd_reference_factor(r);
        }
        r->has_gradient[g->loss] = true;
    }
    for (uint32_t i = g->layer_count; i-- > 0 && fine;) {
        fine = rd_reference_backward_layer(r, i);
    }
    return fine;
}

/* The norms of the gradients, and the factors that bring them down to their limits. Whether the step is
   skipped. */
static inline bool rd_reference_clip(rd_reference *r, ms_norm *norms) {
    const rd_graph *g = r->run.graph;
    float limits[1 + RD_GROUPS];
    uint32_t nonfinite = 0;
    if (!rd_clips(g)) {
        return false;
    }
    const uint32_t count = rd_norm_count(g, limits);
    for (uint32_t i = 0; i < g->value_count; ++i) {
        if (g->value[i].role == RD_PARAM && r->takes_part[i] && !r->paused[i]) {
            assert_int_equal(r->cpu.add_squares(r->cpu.user, r->gradient[i], MS_DTYPE_F32,
                                                rd_count(&g->value[i], r->run.size),
                                                &norms[rd_norm_of(g, g->value[i].group)].sum, 1,
                                                &nonfinite),
                             0);
        }
    }
    ms_step_state state;
    memset(&state, 0, sizeof state);
    state.gradient_factor = r->gradient_factor;
    state.skip_above = g->optimizer.skip_above_norm;
    assert_int_equal(r->cpu.clip_scale(r->cpu.user, norms, limits, count, &state, NULL, 0), 0);
    r->norm = state.norm;
    r->run.seen[RD_DID_CLIP] |= norms[0].scale < 1.0f;
    r->run.seen[RD_DID_SKIP_STEP] |= state.halted == (uint32_t)MS_HALT_SKIPPED;
    return state.halted != (uint32_t)MS_HALT_NONE;
}

/* All but the arrays. */
static inline void rd_fill_update(ms_update_args *args, rd_graph *g, uint32_t param,
                                  const int64_t *size, float learning_rate, uint64_t t) {
    const ms_optimizer_desc o = msi_fill_optimizer(*rd_optimizer(g, param));
    args->user = g;
    args->kind = o.kind;
    args->count = rd_count(&g->value[param], size);
    args->learning_rate = g->value[param].group > 0 ? o.learning_rate : learning_rate;
    args->weight_decay = o.weight_decay;
    args->beta1 = o.beta1;
    args->beta2 = o.beta2;
    args->epsilon = o.epsilon;
    args->momentum = o.momentum;
    args->t = t;
}

/* One step of the update of a matrix, in F32. */
static inline void rd_step(const ms_backend *cpu, const ms_update_factors *factors,
                           ms_optimizer_kind kind, float *value, float *gradient,
                           const float *scale, float *state, uint64_t count) {
    const ms_step_state running = {0};
    ms_update_args args;
    memset(&args, 0, sizeof args);
    args.kind = kind;
    args.count = count;
    args.value = value;
    args.gradient = gradient;
    args.gradient_scale = scale;
    args.state[0] = state;
    args.factors = factors;
    args.state_of_step = &running;
    assert_int_equal(cpu->update(cpu->user, &args), 0);
}

/* c = alpha op(a) op(b) + beta c, where a and b have so many rows and cols as they lie in memory. */
static inline void rd_product(const ms_backend *cpu, float alpha, ms_matrix a, ms_matrix b,
                              float beta, ms_matrix c) {
    assert_int_equal(cpu->gemm(cpu->user, alpha, &a, &b, beta, &c), 0);
}

static inline ms_matrix rd_matrix(float *data, uint64_t rows, uint64_t cols, bool transposed) {
    ms_matrix m;
    memset(&m, 0, sizeof m);
    m.data = data;
    m.rows = (int64_t)rows;
    m.cols = m.stride = (int64_t)cols;
    m.dtype = MS_DTYPE_F32;
    m.transposed = transposed;
    m.batch_count = 1;
    return m;
}

static inline double rd_squares(const ms_backend *cpu, const float *data, uint64_t count) {
    double sum = 0.0;
    uint32_t nonfinite = 0;
    assert_int_equal(cpu->add_squares(cpu->user, data, MS_DTYPE_F32, count, &sum, 1, &nonfinite),
                     0);
    return sum;
}

static inline void rd_muon(const ms_backend *cpu, const ms_update_args *a, ms_update_factors f,
                           uint64_t rows, uint64_t cols) {
    float x[RD_ELEMENTS], y[RD_ELEMENTS], square[RD_ELEMENTS], poly[RD_ELEMENTS];
    const bool tall = rows > cols;
    const uint64_t least = tall ? cols : rows;
    rd_step(cpu, &f, MS_UPDATE_MOMENTUM, x, a->gradient, a->gradient_scale,
            a->momentum != 0.0f ? a->state[0] : NULL, a->count);
    const float size = (float)(1.0 / (sqrt(rd_squares(cpu, x, a->count)) + 1e-7));
    for (uint64_t i = 0; i < a->count; ++i) {
        x[i] *= size;
    }
    for (int k = 0; k < 5; ++k) {
        const ms_matrix s = rd_matrix(square, least, least, false);
        const ms_matrix now = rd_matrix(x, rows, cols, false);
        rd_product(cpu, 1.0f, rd_matrix(x, rows, cols, tall), rd_matrix(x, rows, cols, !tall), 0.0f,
                   s);
        memcpy(poly, square, sizeof poly);
        const ms_matrix p = rd_matrix(poly, least, least, false);
        rd_product(cpu, 2.0315f, s, s, -4.7750f, p);
        memcpy(y, x, sizeof y);
        rd_product(cpu, 1.0f, tall ? now : p, tall ? p : now, 3.4445f,
                   rd_matrix(y, rows, cols, false));
        memcpy(x, y, sizeof x);
    }
    f.rate *= (float)(0.2 * sqrt((double)(tall ? rows : cols)));
    rd_step(cpu, &f, MS_UPDATE_APPLY, a->value, x, NULL, NULL, a->count);
}

static inline void rd_adafactor(const ms_backend *cpu, const ms_update_args *a,
                                const ms_update_factors *f, uint64_t rows, uint64_t cols) {
    float x[RD_ELEMENTS], by_row[RD_ELEMENTS], by_col[RD_ELEMENTS], ones[RD_ELEMENTS];
    const bool factored = rows > 1 && cols > 1;
    float mean = 1.0f;
    rd_step(cpu, f, MS_UPDATE_SQUARE, x, a->gradient, a->gradient_scale, NULL, a->count);
    if (factored) {
        const float of_col = 1.0f / (float)cols, of_row = 1.0f / (float)rows;
        const ms_matrix squares = rd_matrix(x, rows, cols, false);
        for (int i = 0; i < RD_ELEMENTS; ++i) {
            ones[i] = 1.0f;
        }
        rd_product(cpu, of_col, squares, rd_matrix(ones, cols, 1, false), 0.0f,
                   rd_matrix(by_row, rows, 1, false));
        rd_product(cpu, of_row, rd_matrix(ones, 1, rows, false), squares, 0.0f,
                   rd_matrix(by_col, 1, cols, false));
        rd_step(cpu, f, MS_UPDATE_BLEND, a->state[0], by_row, NULL, NULL, rows);
        rd_step(cpu, f, MS_UPDATE_BLEND, a->state[1], by_col, NULL, NULL, cols);
        rd_product(cpu, of_row, rd_matrix(a->state[0], 1, rows, false),
                   rd_matrix(ones, rows, 1, false), 0.0f, rd_matrix(&mean, 1, 1, false));
        rd_step(cpu, f, MS_UPDATE_ROOT, by_row, a->state[0], NULL, NULL, rows);
        rd_step(cpu, f, MS_UPDATE_ROOT, by_col, a->state[1], NULL, NULL, cols);
        rd_product(cpu, 1.0f, rd_matrix(by_row, rows, 1, false), rd_matrix(by_col, 1, cols, false),
                   0.0f, squares);
    } else {
        rd_step(cpu, f, MS_UPDATE_BLEND, a->state[0], x, NULL, NULL, a->count);
        rd_step(cpu, f, MS_UPDATE_ROOT, x, a->state[0], NULL, NULL, a->count);
    }
    rd_step(cpu, f, MS_UPDATE_MULTIPLY, x, a->gradient, a->gradient_scale, NULL, a->count);
    const double root = factored ? sqrt((double)mean) : 1.0, count = (double)a->count;
    const double change = root * sqrt(rd_squares(cpu, x, a->count) / count);
    const double size = sqrt(rd_squares(cpu, a->value, a->count) / count);
    const float scale = (float)(root * (size > 1e-3 ? size : 1e-3) / (change > 1.0 ? change : 1.0));
    rd_step(cpu, f, MS_UPDATE_APPLY, a->value, x, &scale, NULL, a->count);
}

/* Any update. */
static inline void rd_run_update(const ms_backend *cpu, const rd_graph *g, uint32_t param,
                                 const ms_update_args *args) {
    const rd_value *v = &g->value[param];
    const uint64_t cols = v->rank == 2 ? (uint64_t)v->cols : args->count, rows = args->count / cols;
    ms_optimizer_desc o = msi_fill_optimizer(*rd_optimizer(g, param));
    o.learning_rate = args->learning_rate;
    ms_update_factors f = msi_factors_at(&o, args->t);
    f.decay = msi_decay_factor(&o, args->weight_decay);
    if (args->kind == MS_OPTIMIZER_MUON) {
        rd_muon(cpu, args, f, rows, cols);
    } else if (args->kind == MS_OPTIMIZER_ADAFACTOR) {
        rd_adafactor(cpu, args, &f, rows, cols);
    } else {
        const bool custom = args->kind == MS_OPTIMIZER_CUSTOM;
        assert_int_equal(custom ? rd_update(args) : t_update(cpu, args), 0);
    }
}

static inline void rd_reference_update(rd_reference *r) {
    rd_graph *g = r->run.graph;
    ms_norm norms[1 + RD_GROUPS];
    memset(norms, 0, sizeof norms);
    const bool skips = rd_reference_clip(r, norms) || g->optimizer.kind == MS_OPTIMIZER_NONE;
    for (uint32_t i = 0; i < g->value_count && !skips; ++i) {
        ms_update_args args;
        if (g->value[i].role != RD_PARAM || r->paused[i]) {
            continue;
        }
        r->updates[i] += 1;
        if (!r->takes_part[i]) {
            continue;
        }
        memset(&args, 0, sizeof args);
        rd_fill_update(&args, g, i, r->run.size, r->learning_rate, r->updates[i]);
        args.value = (float *)r->data[i];
        args.gradient = r->gradient[i];
        args.gradient_scale = rd_clips(g) ? &norms[rd_norm_of(g, g->value[i].group)].scale
                              : r->gradient_factor > 0.0f ? &r->gradient_factor
                                                          : NULL;
        memcpy(args.state, r->state[i], sizeof args.state);
        rd_run_update(&r->cpu, g, i, &args);
    }
}

// ------------------------------------------------------------------------------------------------
// a model with a graph

typedef struct rd_net {
    rd_run run;
    ms_model *model;
    ms_tensor handle[RD_VALUES];
    ms_layer layer[RD_LAYERS];
    bool bare;               // layers have no callbacks: a dry run
    void *memory[RD_VALUES]; // the trainer's own: values, gradients, states
    float *gradient_memory[RD_VALUES];
    float *state_memory[RD_VALUES][RD_STATES];
    uint64_t borrowed_bytes;
} rd_net;

static inline ms_shape rd_shape(const rd_run *run, const rd_value *v, const ms_axis *axes) {
    ms_view view = rd_empty_view(run, v);
    ms_shape shape = v->rank == 0   ? view.shape
                     : v->rank == 1 ? ms_shape1(view.shape.dim[0])
                                    : ms_shape2(view.shape.dim[0], view.shape.dim[1]);
    for (int i = 0; i < RD_AXIS_LIMIT; ++i) {
        if (rd_bit(v->axes, i)) {
            shape = ms_along(shape, 0, axes[i]);
        }
    }
    return shape;
}

static inline void rd_register_values(rd_net *n, const ms_axis *axes) {
    typedef ms_tensor (*register_fn)(ms_model *, const char *, ms_dtype, ms_shape);
    static const register_fn functions[] = {ms_input, ms_param, ms_buffer, ms_activation, ms_saved};
    static const char *const names[] = {"input", "param", "buffer", "value", "saved"};
    const rd_graph *g = n->run.graph;
    char name[32];
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        snprintf(name, sizeof name, "%s%u", names[v->role], (unsigned)i);
        n->handle[i] = functions[v->role](n->model, name, v->dtype, rd_shape(&n->run, v, axes));
        if (v->frozen) {
            ms_set_frozen(n->model, n->handle[i], true);
        }
        if (v->on_host) {
            ms_set_on_host(n->model, n->handle[i]);
        }
        if (v->stopped) {
            ms_stop_gradient(n->model, n->handle[i]);
        }
        if (v->wanted) {
            ms_want_gradient(n->model, n->handle[i]);
        }
        if (v->f32_gradient) {
            ms_set_gradient_dtype(n->model, n->handle[i], MS_DTYPE_F32);
        }
    }
}

static inline void rd_register_layers(rd_net *n) {
    const rd_graph *g = n->run.graph;
    for (uint32_t k = 0; k < g->layer_count; ++k) {
        const rd_layer *l = &g->layer[k];
        ms_layer_desc d = l->desc;
        ms_tensor *slots[] = {d.in, d.out, d.saved, d.param, d.state};
        char name[32];
        for (int group = 0; group < RD_GROUP_COUNT; ++group) {
            for (int i = 0; i < l->count[group]; ++i) {
                uint32_t value = l->slot[group][i];
                slots[group][i].id = value == 0 ? 0 : n->handle[value - 1].id;
            }
        }
        snprintf(name, sizeof name, "layer%u", (unsigned)k);
        d.name = name;
        d.forward = rd_forward;
        d.backward = l->has_backward ? rd_backward : NULL;
        d.recompute = l->has_recompute ? rd_recompute : NULL;
        d.bind = l->has_bind ? rd_bind : NULL;
        d.user = &n->run.op[k];
        if (n->bare) {
            d.forward = d.backward = d.recompute = d.bind = NULL;
            d.no_backward = !l->has_backward;
            memset(&d.recompute_reads, 0, sizeof d.recompute_reads);
            memset(&d.recompute_workspace, 0, sizeof d.recompute_workspace);
            d.recompute_flops = 0.0;
        }
        d = g->move != NULL ? g->move(g->mover, k, &d) : d;
        n->layer[k] = ms_register_layer(n->model, &d);
    }
}

static inline bool rd_lend(rd_net *n, ms_tensor tensor, void *memory, uint64_t bytes) {
    n->borrowed_bytes += bytes;
    return ms_borrow(n->model, tensor, memory) == MS_RESULT_OK ||
           rd_fail(&n->run, "ms_borrow: %s", ms_last_error(n->model));
}

/* Memory for all that is borrowed, holding its first values. */
static inline void rd_lend_all(rd_net *n) {
    const rd_graph *g = n->run.graph;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        const uint32_t states = rd_state_count(g, i);
        uint64_t bytes = rd_largest_bytes(g, v);
        bool trained = v->role == RD_PARAM && !v->frozen;
        if (v->borrowed) {
            n->memory[i] = rd_alloc(bytes);
            rd_initial(g, i, g->size, 0, n->memory[i]);
            rd_lend(n, n->handle[i], n->memory[i], bytes);
        }
        if (v->borrowed_gradient && trained) {
            n->gradient_memory[i] = (float *)rd_alloc(bytes);
            memset(n->gradient_memory[i], 0, (size_t)bytes);
            rd_lend(n, ms_gradient(n->model, n->handle[i]), n->gradient_memory[i], bytes);
        }
        for (uint32_t k = 0; k < states && v->borrowed_state && trained; ++k) {
            n->state_memory[i][k] = (float *)rd_alloc(bytes);
            memset(n->state_memory[i][k], 0, (size_t)bytes);
            rd_lend(n, ms_optimizer_state(n->model, n->handle[i], (int)k), n->state_memory[i][k],
                    bytes);
        }
    }
}

/* The largest size of an axis that steps may have; evals may have larger ones. */
static inline int64_t rd_largest_trained(const rd_graph *g, uint32_t axis) {
    return g->trains[axis] > 0 ? g->trains[axis] : g->largest[axis];
}

/* A model as far as registration. Failures lie in the run. */
static inline rd_net *rd_net_create(rd_graph *g, const ms_config *config, const char *name,
                                    char *failure, bool bare) {
    static const char *const names[] = {"batch", "time"};
    rd_net *n = (rd_net *)calloc(1, sizeof(rd_net));
    ms_axis axes[RD_AXIS_LIMIT];
    ms_config with_steps = *config;
    assert_non_null(n);
    rd_run_init(&n->run, g, name, failure);
    n->run.debug = config->debug;
    n->bare = bare;
    with_steps.accumulation_steps = g->accumulation;
    with_steps.seed = g->seed;
    if (ms_create(&with_steps, &n->model) != MS_RESULT_OK) {
        rd_fail(&n->run, "ms_create: %s", ms_last_error(n->model));
        return n;
    }
    for (uint32_t i = 0; i < g->axis_count; ++i) {
        const int64_t largest = rd_largest_trained(g, i);
        axes[i] = ms_add_axis(n->model, names[i], g->size[i], largest);
        if (largest < g->largest[i]) {
            ms_set_eval_largest(n->model, axes[i], g->largest[i]);
        }
    }
    rd_register_values(n, axes);
    rd_register_layers(n);
    if (!g->has_no_loss) {
        ms_set_loss(n->model, n->handle[g->loss]);
    }
    for (uint32_t i = 0; i < g->value_count; ++i) {
        if (g->value[i].kept) {
            ms_add_output(n->model, n->handle[i]);
        }
        if (g->value[i].kept_in_eval) {
            ms_add_eval_output(n->model, n->handle[i]);
        }
    }
    ms_optimizer_desc optimizer = g->optimizer;
    optimizer.update = optimizer.kind == MS_OPTIMIZER_CUSTOM ? rd_update : NULL;
    optimizer.workspace = optimizer.update != NULL && g->has_update_space ? rd_update_bytes : NULL;
    optimizer.user = g;
    ms_set_optimizer(n->model, &optimizer);
    ms_param_group groups[1 + RD_GROUPS];
    memset(groups, 0, sizeof groups);
    for (uint32_t k = 0; k < g->group_count; ++k) {
        groups[k + 1] = ms_optimizer_group(n->model, &g->group[k]);
    }
    for (uint32_t i = 0; i < g->value_count; ++i) {
        if (g->value[i].role == RD_PARAM && g->value[i].group > 0) {
            ms_set_param_group(n->model, n->handle[i], groups[g->value[i].group]);
        }
    }
    rd_lend_all(n);
    return n;
}

/* Forces what is to lie on the host: values, gradients and optimizer state, each by itself. */
static inline void rd_force_moves(rd_net *n, t_rng *rng) {
    const rd_graph *g = n->run.graph;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        const uint64_t random = t_next(rng);
        const bool kept = v->role == RD_INPUT || v->role == RD_BUFFER;
        if (kept && (v->is_state || v->on_host || (random >> 8 & 3))) {
            continue;
        }
        if ((random & 1) || kept) {
            ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        }
        const bool trainable = v->role == RD_PARAM && rd_is_float(v);
        if ((random & 2) && trainable) {
            ms_set_tensor_technique(n->model, ms_gradient(n->model, n->handle[i]),
                                    MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        }
        if ((random & 4) && trainable && rd_state_count(g, i) > 0) {
            ms_set_tensor_technique(n->model, ms_optimizer_state(n->model, n->handle[i], 0),
                                    MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        }
    }
}

/* Forces what of a param is divided among ranks, and also when some are updated. */
static inline void rd_force_shards(rd_net *n, t_rng *rng, bool early) {
    const rd_graph *g = n->run.graph;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const uint64_t random = t_next(rng);
        if (g->value[i].role != RD_PARAM || !rd_is_float(&g->value[i])) {
            continue;
        }
        const ms_tensor param = n->handle[i];
        const ms_tensor of[] = {param, ms_gradient(n->model, param),
                                rd_state_count(g, i) ? ms_optimizer_state(n->model, param, 0)
                                                     : param};
        ms_set_tensor_technique(n->model, of[random % 3], MS_TECHNIQUE_SHARDING,
                                random % 8 < 6 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT);
        if (early && random / 8 % 4 == 0) {
            ms_set_tensor_technique(n->model, param, MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
        }
    }
}

/* Formats of optimizer state, of what is built in. */
static inline void rd_random_formats(rd_graph *g, t_rng *rng) {
    for (int k = 0; k < 2 && t_is_built_in((int)g->optimizer.kind); ++k) {
        g->optimizer.state_format[k] = (ms_state_format)t_below(rng, 2);
    }
}

/* Forces codes on the state of some params. Which of them have state is known once the model has
   been wrapped; it has to be wrapped again. */
static inline void rd_force_codes(rd_net *n, uint64_t seed) {
    t_rng rng = t_seed(seed);
    for (uint32_t i = 0; i < n->run.graph->value_count; ++i) {
        const uint32_t t = msi_index(&n->model->graph, n->handle[i]);
        const bool coded = t_chance(&rng, 0.5);
        const msi_not_8bit why =
            msi_why_not_8bit(&n->model->optimizers, true, &n->model->graph.tensors.items[t]);
        if (coded && msi_can_be_8bit(why)) {
            ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_OPTIMIZER_8BIT,
                                    MS_SWITCH_ON);
        }
    }
}

/* Forces the dtype of plans on some values that layers accept in it, and forbids it for others, the
   same ones in every net. */
static inline void rd_force_half(rd_net *n, uint64_t seed) {
    t_rng rng = t_seed(seed);
    const ms_dtype asked = n->model->config.mixed_dtype;
    const int dtype = asked == MS_DTYPE_F16 ? (int)MS_DTYPE_F16 : (int)MS_DTYPE_BF16;
    for (uint32_t i = 0; i < n->run.graph->value_count; ++i) {
        const bool half = t_chance(&rng, 0.6);
        if (n->run.graph->value[i].role == RD_PARAM && half) {
            ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_MIXED_PRECISION,
                                    MS_SWITCH_ON);
        }
    }
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        const rd_layer *l = &n->run.graph->layer[i];
        for (int group = RD_GROUP_OUT; group <= RD_GROUP_SAVED; ++group) {
            for (int k = 0; k < l->count[group]; ++k) {
                const uint32_t value = l->slot[group][k];
                const ms_switch force = t_chance(&rng, 0.05)  ? MS_SWITCH_OFF
                                        : t_chance(&rng, 0.8) ? MS_SWITCH_ON
                                                              : MS_SWITCH_DEFAULT;
                if (value != 0 && rd_bit(l->desc.dtypes.accepts, dtype)) {
                    ms_set_tensor_technique(n->model, n->handle[value - 1],
                                            MS_TECHNIQUE_MIXED_PRECISION, force);
                }
            }
        }
    }
}

/* The net of a rank. With a seed, it says what is divided, moved, and updated early. */
static inline rd_net *rd_rank_net(rd_graph *g, const ms_config *config, char *failure, bool halves,
                                  uint64_t seed, bool early) {
    rd_net *n = rd_net_create(g, config, "rank", failure, false);
    t_rng rng = t_seed(seed);
    if (halves) {
        rd_force_half(n, g->seed);
    }
    if (seed > 0) {
        rd_force_shards(n, &rng, early);
    }
    if (seed > 0 && seed % 2 == 0) {
        rd_force_moves(n, &rng);
    }
    return n;
}

static inline void rd_net_destroy(rd_net *n) {
    if (n == NULL) {
        return;
    }
    ms_destroy(n->model);
    for (uint32_t i = 0; i < n->run.graph->value_count; ++i) {
        rd_free(n->memory[i]);
        rd_free(n->gradient_memory[i]);
        for (int k = 0; k < RD_STATES; ++k) {
            rd_free(n->state_memory[i][k]);
        }
    }
    free(n);
}

/* Gives what is borrowed another address. */
static inline bool rd_lend_elsewhere(rd_net *n) {
    const rd_graph *g = n->run.graph;
    bool fine = ms_synchronize(n->model) == MS_RESULT_OK; // work on what is lent may be under way
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        uint64_t bytes = rd_largest_bytes(g, &g->value[i]);
        if (n->memory[i] != NULL) {
            void *moved = rd_copy_of(n->memory[i], bytes);
            fine = rd_lend(n, n->handle[i], moved, 0);
            rd_free(n->memory[i]);
            n->memory[i] = moved;
        }
        if (n->gradient_memory[i] != NULL && fine) {
            float *moved = (float *)rd_copy_of(n->gradient_memory[i], bytes);
            fine = rd_lend(n, ms_gradient(n->model, n->handle[i]), moved, 0);
            rd_free(n->gradient_memory[i]);
            n->gradient_memory[i] = moved;
        }
        for (int k = 0; k < RD_STATES && fine && n->state_memory[i][k] != NULL; ++k) {
            float *moved = (float *)rd_copy_of(n->state_memory[i][k], bytes);
            fine = rd_lend(n, ms_optimizer_state(n->model, n->handle[i], k), moved, 0);
            rd_free(n->state_memory[i][k]);
            n->state_memory[i][k] = moved;
        }
    }
    return fine;
}

/* Sets what changes from step to step. */
static inline bool rd_net_vary(rd_net *n, uint64_t round) {
    rd_graph *g = n->run.graph;
    bool fine = !g->varies || ms_set_gradient_factor(n->model, rd_factor_at(g, round)) == 0;
    for (uint32_t i = 0; i < g->value_count && fine && g->varies; ++i) {
        const bool paused = rd_is_paused(g, i, round);
        fine = g->value[i].role != RD_PARAM ||
               ms_set_paused(n->model, n->handle[i], paused) == MS_RESULT_OK;
        g->seen[RD_PAUSED] |= paused;
    }
    g->seen[RD_GRADIENT_FACTOR] |= g->varies;
    return fine || rd_fail(&n->run, "%s", ms_last_error(n->model));
}

/* Writes inputs, what else needs it after ms_reshape (again), or everything (round 0). */
static inline bool rd_net_write(rd_net *n, uint64_t round, bool again) {
    const rd_graph *g = n->run.graph;
    uint64_t data[RD_ELEMENTS];
    if (round > 0 && !again && !rd_net_vary(n, round)) {
        return false;
    }
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        bool needs = v->role == RD_INPUT || (again && v->role == RD_BUFFER && v->axes != 0) ||
                     (round == 0 && v->role < RD_ACTIVATION);
        if (!needs) {
            continue;
        }
        rd_initial(g, i, n->run.size, round, data);
        if (ms_write(n->model, n->handle[i], data) != MS_RESULT_OK) {
            return rd_fail(&n->run, "ms_write: %s", ms_last_error(n->model));
        }
    }
    return true;
}

static inline void rd_reference_write(rd_reference *r, uint64_t round, bool again) {
    const rd_graph *g = r->run.graph;
    r->gradient_factor = r->given_factor = again ? r->given_factor : rd_factor_at(g, round);
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        r->paused[i] = again ? r->paused[i] : rd_is_paused(g, i, round);
        if (v->role == RD_INPUT || (again && v->role == RD_BUFFER && v->axes != 0)) {
            rd_initial(g, i, r->run.size, round, r->data[i]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// a graph in words

static inline void rd_print_layer(const rd_graph *g, uint32_t index) {
    static const char *const names[] = {" in", " out", " saved", " param", " state"};
    const rd_layer *l = &g->layer[index];
    const ms_layer_desc *d = &l->desc;
    print_error("  layer %u:", (unsigned)index);
    for (int group = 0; group < RD_GROUP_COUNT; ++group) {
        print_error("%s", l->count[group] > 0 ? names[group] : "");
        for (int i = 0; i < l->count[group]; ++i) {
            print_error(" %d", l->slot[group][i] - 1);
        }
    }
    print_error("%s%s%s%s%s%s", l->has_backward ? "" : ", no backward",
                l->has_recompute ? ", recompute" : "", l->dropout ? ", dropout" : "",
                d->recompute_keeps_state ? ", keeps state" : "",
                d->no_recompute ? ", no_recompute" : "", l->has_bind ? ", bind" : "");
    print_error(", reads %x %x %x %x%s, recompute reads %x %x %x %x%s", d->backward_reads.in,
                d->backward_reads.out, d->backward_reads.saved, d->backward_reads.param,
                d->backward_reads.nothing ? " nothing" : "", d->recompute_reads.in,
                d->recompute_reads.out, d->recompute_reads.saved, d->recompute_reads.param,
                d->recompute_reads.nothing ? " nothing" : "");
    print_error(", accumulates %x %x, overwrites %x %x, must %x %x, in forward %x, optional %x, "
                "clobbers %x %x %x %x",
                d->accumulates.in, d->accumulates.param, d->overwrites.in, d->overwrites.param,
                d->must_in_place, d->must_grad_in_place, d->grads_in_forward, d->optional_saved,
                d->clobbers.in, d->clobbers.out, d->clobbers.saved, d->clobbers.grad_out);
    for (int i = 0; i < RD_SLOTS; ++i) {
        const ms_slot_masks *o = &d->grad_in_place[i];
        if (d->in_place[i] != 0) {
            print_error(", out %d over in %x", i, d->in_place[i]);
        }
        if ((o->in | o->out | o->saved | o->grad_out) != 0) {
            print_error(", grad_in %d over %x %x %x %x", i, o->in, o->out, o->saved, o->grad_out);
        }
    }
    print_error("\n");
}

static inline void rd_print(const rd_graph *g) {
    static const char *const roles[] = {"input", "param", "buffer", "activation", "saved"};
    print_error("seed %llu: optimizer %d, %u states, clip %g, %u micro-batches, axes %d of %d, "
                "%d of %d\n",
                (unsigned long long)g->seed, (int)g->optimizer.kind,
                (unsigned)t_state_count(&g->optimizer), (double)g->optimizer.grad_clip_norm,
                (unsigned)g->accumulation, g->axis_count > 0 ? (int)g->size[0] : 0,
                (int)g->largest[0], g->axis_count > 1 ? (int)g->size[1] : 0, (int)g->largest[1]);
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        print_error("  %u: %s %s, rank %d, %d x %d along %x%s%s%s%s%s%s%s%s\n", (unsigned)i,
                    ms_dtype_name(v->dtype), roles[v->role], v->rank, (int)v->rows, (int)v->cols,
                    (unsigned)v->axes, v->frozen ? ", frozen" : "", v->on_host ? ", on host" : "",
                    v->stopped ? ", stopped" : "", v->kept ? ", kept" : "",
                    v->kept_in_eval ? ", kept in eval" : "", v->borrowed ? ", borrowed" : "",
                    v->borrowed_gradient ? ", gradient borrowed" : "",
                    v->borrowed_state ? ", state borrowed" : "");
    }
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        rd_print_layer(g, i);
    }
}

#endif // RANDOM_DAG_H
