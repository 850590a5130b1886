/*  random_tiles.h - random graphs of layers whose rows are independent, for plans in tiles. All
    numbers are small whole ones, so that every sum is exact: results do not depend on how sums over
    rows are grouped, and a plan in tiles must give the bits of the plain one. A graph (rt_graph) is
    plain data, and is registered with any number of models (rt_net). Include it after
    toy_layers.h. */
#ifndef RANDOM_TILES_H
#define RANDOM_TILES_H

enum {
    RT_LAYERS = 16,
    RT_VALUES = 96,
    RT_IN = 3,
    RT_OUT = 2,
    RT_PARAM = 2,
    RT_ELEMENTS = 1024, // of the largest value
    RT_TABLE_ROWS = 3
};

/* What a value has rows for: (B, T, C) tokens, (B, C) sequences, or a table that all rows read. */
typedef enum rt_shape { RT_TOKENS, RT_SEQUENCES, RT_TABLE, RT_VECTOR } rt_shape;

typedef enum rt_role { RT_INPUT, RT_TRAINED, RT_MADE, RT_KEPT } rt_role;

typedef struct rt_value {
    rt_role role;
    rt_shape shape;
    int64_t cols;
    bool frozen, is_output, is_eval_output;
} rt_value;

/* What the gradient of an output element is mixed with, so that backward reads it. */
typedef struct rt_reads {
    bool in, out, saved, param, dropout;
} rt_reads;

typedef struct rt_layer {
    int axes;           // of tiles: 2 tokens, 1 sequences, 0 none
    uint32_t in[RT_IN]; // values
    uint32_t out[RT_OUT];
    uint32_t saved; // or UINT32_MAX
    uint32_t param[RT_PARAM];
    uint32_t in_count, out_count, param_count;
    int64_t shift[RT_IN]; // of columns, and of tokens where sequences are whole
    float factor[RT_IN];
    uint32_t whole; // mask of inputs of which each tile reads other rows too
    rt_reads reads;
    bool is_loss, has_recompute, tiled; // tiled: forced in the net with tiles
    uint32_t salt;
    ms_layer_desc desc; // without tensors and callbacks
} rt_layer;

typedef struct rt_graph {
    t_rng rng;
    uint64_t seed;
    int64_t batch, tokens; // B, T
    uint32_t value_count, layer_count, micro_count;
    rt_value value[RT_VALUES];
    rt_layer layer[RT_LAYERS];
    ms_optimizer_desc optimizer;
    bool has_axis; // B is along an axis
} rt_graph;

// ------------------------------------------------------------------------------------------------
// the generator

static inline int64_t rt_rows(const rt_graph *g, rt_shape shape) {
    return shape == RT_TOKENS      ? g->batch * g->tokens
           : shape == RT_SEQUENCES ? g->batch
           : shape == RT_TABLE     ? RT_TABLE_ROWS
                                   : 1;
}

static inline int64_t rt_count(const rt_graph *g, uint32_t value) {
    return rt_rows(g, g->value[value].shape) * g->value[value].cols;
}

static inline uint32_t rt_new(rt_graph *g, rt_role role, rt_shape shape) {
    static const int64_t widths[] = {1, 2, 3, 4, 8};
    rt_value *v = &g->value[g->value_count];
    assert_true(g->value_count < RT_VALUES);
    memset(v, 0, sizeof *v);
    v->role = role;
    v->shape = shape;
    v->cols = widths[t_below(&g->rng, 5)];
    return g->value_count++;
}

/* A value to read, mostly a late one; a new input if there is none. */
static inline uint32_t rt_pick(rt_graph *g, bool late) {
    uint32_t all[RT_VALUES], count = 0;
    for (uint32_t v = 0; v < g->value_count; ++v) {
        if (g->value[v].role == RT_INPUT || g->value[v].role == RT_MADE) {
            all[count++] = v;
        }
    }
    if (count == 0 || t_chance(&g->rng, 0.06)) {
        return rt_new(g, RT_INPUT, (rt_shape)t_below(&g->rng, 3));
    }
    const uint32_t recent = late && count > 3 ? 3 : count;
    return all[count - 1 - t_below(&g->rng, recent)];
}

static inline bool rt_same_shape(const rt_value *a, const rt_value *b) {
    return a->shape == b->shape && a->cols == b->cols;
}

/* The inputs of the shape of an output. */
static inline uint32_t rt_alike(const rt_graph *g, const rt_layer *l, uint32_t out) {
    uint32_t mask = 0;
    for (uint32_t k = 0; k < l->in_count; ++k) {
        const bool is = rt_same_shape(&g->value[l->in[k]], &g->value[out]);
        mask |= is && g->value[l->in[k]].shape != RT_TABLE ? 1u << k : 0u;
    }
    return mask;
}

static inline uint32_t rt_some(rt_graph *g, uint32_t mask, double chance) {
    uint32_t some = 0;
    for (uint32_t bit = 1; bit <= mask; bit <<= 1) {
        some |= (mask & bit) != 0 && t_chance(&g->rng, chance) ? bit : 0;
    }
    return some;
}

static inline ms_workspace rt_workspace(rt_graph *g) {
    ms_workspace w;
    memset(&w, 0, sizeof w);
    if (t_chance(&g->rng, 0.3)) {
        w.bytes = 4 * t_below(&g->rng, 20);
        w.row_bytes = 4 * t_below(&g->rng, 5);
        w.contents = (ms_contents)t_below(&g->rng, 3);
    }
    return w;
}

/* How gradients are written, and what may or must share memory. */
static inline void rt_declare_edges(rt_graph *g, rt_layer *l) {
    ms_layer_desc *d = &l->desc;
    const uint32_t in = (1u << l->in_count) - 1, param = (1u << l->param_count) - 1;
    d->accumulates.in = rt_some(g, in, 0.2);
    d->overwrites.in = rt_some(g, in & ~d->accumulates.in, 0.3);
    d->accumulates.param = rt_some(g, param, 0.2);
    d->overwrites.param = rt_some(g, param & ~d->accumulates.param, 0.3);
    const uint32_t alike = rt_alike(g, l, l->out[0]);
    bool twice = false;
    for (uint32_t k = 1; k < l->in_count; ++k) {
        twice |= l->in[k] == l->in[0] || l->in[k] == l->in[1 % k];
    }
    if (t_chance(&g->rng, 0.2) && (alike & 1u) && !twice) {
        d->must_in_place = 1;
        d->in_place[0] = 1;
    } else {
        d->in_place[0] = rt_some(g, alike, 0.5);
    }
    if (t_chance(&g->rng, 0.2) && (alike & 1u) && !twice && !l->is_loss &&
        g->value[l->in[0]].role == RT_MADE) {
        d->must_grad_in_place = 1;
        d->grad_in_place[0].grad_out = 1;
        d->accumulates.in &= ~1u;
        d->overwrites.in &= ~1u;
    } else if ((alike & 1u) && !(d->accumulates.in & 1u)) {
        d->grad_in_place[0].grad_out = rt_some(g, 1, 0.5);
        d->grad_in_place[0].in = rt_some(g, 1, 0.3);
        d->grad_in_place[0].out = rt_some(g, 1, 0.3);
    }
}

static inline void rt_declare_reads(rt_graph *g, rt_layer *l) {
    ms_reads *r = &l->desc.backward_reads;
    l->reads.in = t_chance(&g->rng, 0.4);
    l->reads.out = t_chance(&g->rng, 0.3);
    l->reads.saved = l->saved != UINT32_MAX;
    l->reads.param = l->param_count > 0 && t_chance(&g->rng, 0.5);
    l->reads.dropout = t_chance(&g->rng, 0.3);
    r->in = l->reads.in ? 1 : 0;
    r->out = l->reads.out ? 1 : 0;
    r->saved = l->reads.saved ? 1 : 0;
    r->param = l->reads.param ? 1 : 0;
    r->nothing = !(l->reads.in || l->reads.out || l->reads.saved || l->reads.param);
    if (t_chance(&g->rng, 0.2)) {
        l->desc.clobbers.in = g->value[l->in[0]].shape == RT_TABLE ? 0 : r->in;
        l->desc.clobbers.out = rt_some(g, r->out, 0.5);
        l->desc.clobbers.saved = rt_some(g, r->saved, 0.5);
        l->desc.clobbers.grad_out = l->desc.must_grad_in_place ? 0 : rt_some(g, 1, 0.5);
    }
    l->desc.optional_saved = l->reads.saved && t_chance(&g->rng, 0.5) ? 1 : 0;
}

/* Some of the tokens that a layer reads once, each column at most once, so that sums over tiles are
   exact in 16 bits too. Drawn apart from all else. */
static inline uint32_t rt_some_whole(const rt_graph *g, const rt_layer *l) {
    uint32_t whole = 0;
    for (uint32_t k = 1; k < l->in_count; ++k) {
        const rt_value *v = &g->value[l->in[k]];
        t_rng rng = t_seed(g->seed * 1009 + g->layer_count * 11 + k);
        bool may = l->axes == 2 && v->shape == RT_TOKENS && t_chance(&rng, 0.3);
        for (uint32_t i = 0; i < l->in_count; ++i) {
            may = may && (i == k || l->in[i] != l->in[k]);
        }
        for (uint32_t j = 0; j < l->out_count; ++j) {
            may = may && g->value[l->out[j]].cols <= v->cols;
        }
        whole |= may ? 1u << k : 0u;
    }
    return whole;
}

static inline void rt_declare_tile(rt_graph *g, rt_layer *l) {
    ms_layer_tile *t = &l->desc.tile;
    for (uint32_t k = 0; k < l->in_count; ++k) {
        l->desc.dtypes.f32_in |= g->value[l->in[k]].shape == RT_TABLE ? 1u << k : 0u;
    }
    if (l->axes == 0) {
        return;
    }
    t->axes = (uint32_t)l->axes;
    for (uint32_t k = 0; k < l->in_count; ++k) {
        t->whole_in |= g->value[l->in[k]].shape == RT_TABLE ? 1u << k : 0u;
    }
    l->whole = rt_some_whole(g, l);
    t->whole_in |= l->whole;
    l->desc.dtypes.f32_in |= l->salt % 2 ? l->whole : 0;
    for (uint32_t k = 0; k < l->in_count; ++k) {
        t->in_axes[k] = g->value[l->in[k]].shape == RT_SEQUENCES && l->axes == 2 ? 1 : 0;
    }
    t->multiple = l->axes == 2 && t_chance(&g->rng, 0.2) ? g->tokens : 0;
    t->smallest = (int64_t)t_below(&g->rng, 3);
    t->preferred = (int64_t)t_below(&g->rng, 8);
    l->tiled = t_chance(&g->rng, 0.75);
}

/* A layer with random freedoms. trains: it has a param. */
static inline void rt_add_layer(rt_graph *g, bool is_loss, bool trains) {
    rt_layer *l = &g->layer[g->layer_count++];
    memset(l, 0, sizeof *l);
    const double kind = t_unit(&g->rng);
    l->is_loss = is_loss;
    l->axes = kind < 0.65 ? 2 : kind < 0.85 ? 1 : 0;
    l->salt = t_below(&g->rng, 1000);
    l->in_count = 1 + t_below(&g->rng, RT_IN);
    for (uint32_t k = 0; k < l->in_count; ++k) {
        l->in[k] = rt_pick(g, k == 0);
        l->shift[k] = (int64_t)t_below(&g->rng, 3);
        l->factor[k] =
            (float)(1 + (int)t_below(&g->rng, 2)) * (t_chance(&g->rng, 0.5) ? 1.0f : -1.0f);
    }
    l->param_count = is_loss ? 0 : t_below(&g->rng, RT_PARAM + 1);
    l->param_count += trains && l->param_count == 0;
    for (uint32_t k = 0; k < l->param_count; ++k) {
        uint32_t tied = UINT32_MAX;
        for (uint32_t v = 0; v < g->value_count; ++v) {
            const bool other = k == 0 || l->param[0] != v;
            tied = g->value[v].role == RT_TRAINED && other && t_chance(&g->rng, 0.1) ? v : tied;
        }
        l->param[k] = tied != UINT32_MAX ? tied : rt_new(g, RT_TRAINED, RT_VECTOR);
    }
    l->out_count = is_loss ? 1 : 1 + (uint32_t)t_chance(&g->rng, 0.2);
    for (uint32_t k = 0; k < l->out_count; ++k) {
        const bool sequences = l->axes != 2 && t_chance(&g->rng, 0.3);
        const bool table = l->axes == 0 && !is_loss && t_chance(&g->rng, 0.3);
        l->out[k] = rt_new(g, RT_MADE, table ? RT_TABLE : sequences ? RT_SEQUENCES : RT_TOKENS);
        if (k > 0 && l->axes != 0) { // one shape of rows
            g->value[l->out[k]].shape = g->value[l->out[0]].shape;
        }
        g->value[l->out[k]].is_output = t_chance(&g->rng, 0.05);
        g->value[l->out[k]].is_eval_output = t_chance(&g->rng, 0.05);
    }
    l->saved = t_chance(&g->rng, 0.4) ? rt_new(g, RT_KEPT, g->value[l->out[0]].shape) : UINT32_MAX;
    if (l->saved != UINT32_MAX) {
        g->value[l->saved].cols = g->value[l->out[0]].cols;
    }
    rt_declare_edges(g, l);
    rt_declare_reads(g, l);
    rt_declare_tile(g, l);
    l->desc.forward_workspace = rt_workspace(g);
    l->desc.backward_workspace = rt_workspace(g);
    l->has_recompute = !is_loss && !l->desc.must_in_place && t_chance(&g->rng, 0.2);
    if (l->has_recompute && l->saved != UINT32_MAX && l->salt % 2 == 0) { // reads what was kept
        l->desc.recompute_reads.in = l->desc.recompute_reads.param = MS_ALL_SLOTS;
        l->desc.recompute_reads.saved = 1;
    }
    l->desc.no_recompute = !is_loss && !l->has_recompute && t_chance(&g->rng, 0.05);
}

/* A loss that writes the gradients of its inputs in forward. */
static inline void rt_write_in_forward(rt_layer *l) {
    ms_layer_desc *d = &l->desc;
    d->grads_in_forward = (1u << l->in_count) - 1;
    memset(&d->backward_reads, 0, sizeof d->backward_reads);
    memset(&d->clobbers, 0, sizeof d->clobbers);
    memset(&d->backward_workspace, 0, sizeof d->backward_workspace);
    d->grad_in_place[0].grad_out = d->grad_in_place[0].out = 0;
    d->accumulates.param = d->overwrites.param = 0;
    d->optional_saved = 0;
    memset(&l->reads, 0, sizeof l->reads);
}

static inline rt_graph *rt_generate(uint64_t seed) {
    rt_graph *g = (rt_graph *)calloc(1, sizeof *g);
    assert_non_null(g);
    g->rng = t_seed(seed * 977 + 5);
    g->seed = seed;
    g->batch = 1 + (int64_t)t_below(&g->rng, 5);
    g->tokens = 1 + (int64_t)t_below(&g->rng, 6);
    g->micro_count = t_chance(&g->rng, 0.3) ? 2 : 1;
    g->has_axis = t_chance(&g->rng, 0.3);
    rt_new(g, RT_INPUT, RT_TOKENS);
    const uint32_t layers = 1 + t_below(&g->rng, RT_LAYERS - 2);
    for (uint32_t i = 0; i < layers; ++i) {
        rt_add_layer(g, false, i + 1 == layers);
    }
    rt_add_layer(g, true, false);
    rt_layer *loss = &g->layer[g->layer_count - 1];
    const uint32_t last = g->layer[g->layer_count - 2].out[0];
    if (loss->in[0] != last) {
        loss->in[0] = last;
        memset(&loss->desc, 0, sizeof loss->desc);
        memset(&loss->reads, 0, sizeof loss->reads);
        loss->saved = UINT32_MAX;
        loss->desc.backward_reads.nothing = true;
        rt_declare_tile(g, loss);
    }
    if (t_chance(&g->rng, 0.3)) {
        rt_write_in_forward(loss);
    }
    g->optimizer.kind = (ms_optimizer_kind)t_below(&g->rng, MS_OPTIMIZER_CUSTOM);
    g->optimizer.learning_rate = 0.25f;
    g->optimizer.grad_clip_norm = t_chance(&g->rng, 0.2) ? 3.0f : 0.0f;
    return g;
}

// ------------------------------------------------------------------------------------------------
// what layers compute

typedef struct rt_net rt_net;

typedef struct rt_op {
    rt_net *net;
    const rt_layer *layer;
    uint32_t tiles; // calls for a part of the rows
} rt_op;

struct rt_net {
    const rt_graph *graph;
    ms_model *model;
    ms_tensor handle[RT_VALUES];
    ms_layer layer[RT_LAYERS];
    rt_op op[RT_LAYERS];
    ms_axis axis;
    const char *fault; // what a callback found first, or NULL
    uint32_t fault_layer;
    bool debug;
};

/* Small whole numbers. */
static inline float rt_wrap(float x) {
    return x - 16.0f * floorf(x / 16.0f + 0.5f);
}

static inline float rt_load(const ms_view *view, int64_t i) {
    return view->dtype == MS_DTYPE_BF16 ? msi_f32_of_bf16(((const uint16_t *)view->data)[i])
                                        : ((const float *)view->data)[i];
}

static inline void rt_store(const ms_view *view, int64_t i, float x) {
    if (view->dtype == MS_DTYPE_BF16) {
        ((uint16_t *)view->data)[i] = msi_bf16_of_f32(x);
    } else {
        ((float *)view->data)[i] = x;
    }
}

static inline void rt_blame(rt_op *op, const char *fault) {
    if (op->net->fault == NULL) {
        op->net->fault = fault;
        op->net->fault_layer = (uint32_t)(op - op->net->op);
    }
}

/* The rows of a value in a call: the first, and how many. */
typedef struct rt_span {
    int64_t begin, count;
} rt_span;

static inline rt_span rt_span_of(const rt_op *op, const ms_call *call, uint32_t value) {
    const rt_graph *g = op->net->graph;
    const rt_value *v = &g->value[value];
    const int64_t rows = rt_rows(g, v->shape);
    const rt_span all = {0, rows};
    bool whole = op->layer->axes == 0 || v->shape == RT_TABLE || v->shape == RT_VECTOR;
    for (uint32_t k = 0; k < op->layer->in_count; ++k) {
        whole |= op->layer->in[k] == value && (op->layer->whole >> k & 1);
    }
    if (whole) {
        return all;
    }
    const int64_t of =
        op->layer->axes == 2 ? rt_rows(g, g->value[op->layer->out[0]].shape) : g->batch;
    const rt_span span = {rows * call->row_begin / of, rows * call->row_count / of};
    return span;
}

static inline void rt_check_view(rt_op *op, const ms_call *call, const ms_view *view,
                                 uint32_t value) {
    const rt_span span = rt_span_of(op, call, value);
    const int64_t count = span.count * op->net->graph->value[value].cols;
    if (view->data != NULL && (int64_t)ms_shape_count(&view->shape) != count) {
        rt_blame(op, "a view has another number of elements");
    }
}

static inline void rt_check_call(rt_op *op, const ms_call *call) {
    const rt_layer *l = op->layer;
    const rt_graph *g = op->net->graph;
    const rt_shape shape = g->value[l->out[0]].shape;
    const int64_t rows = l->axes == 2 || shape == RT_TABLE ? rt_rows(g, shape) : g->batch;
    if (call->row_begin < 0 || call->row_count < 1 || call->row_begin + call->row_count > rows ||
        (l->axes == 0 && call->row_count != rows) ||
        (l->desc.tile.multiple > 1 && (call->row_begin % l->desc.tile.multiple != 0 ||
                                       call->row_count % l->desc.tile.multiple != 0))) {
        rt_blame(op, "rows are out of range");
    }
    op->tiles += call->row_count < rows;
    for (uint32_t k = 0; k < l->in_count; ++k) {
        rt_check_view(op, call, &call->in[k], l->in[k]);
        rt_check_view(op, call, &call->grad_in[k], l->in[k]);
    }
    for (uint32_t k = 0; k < l->out_count; ++k) {
        rt_check_view(op, call, &call->out[k], l->out[k]);
        rt_check_view(op, call, &call->grad_out[k], l->out[k]);
    }
    const ms_workspace *w =
        call->phase == MS_PHASE_BACKWARD ? &l->desc.backward_workspace : &l->desc.forward_workspace;
    if (l->has_recompute && call->phase == MS_PHASE_RECOMPUTE) {
        return;
    }
    if (call->workspace_bytes != w->bytes + w->row_bytes * (uint64_t)call->row_count) {
        rt_blame(op, "the workspace has another size");
    }
    for (uint64_t i = 0; i < call->workspace_bytes / 4; ++i) {
        float *word = (float *)call->workspace + i;
        if (w->contents == MS_CONTENTS_ZERO && (*word > 0.0f || *word < 0.0f || t_is_nan(*word))) {
            rt_blame(op, "the workspace is not zero");
        }
        *word = 1e30f;
    }
}

/* Where an output element reads an input: its index in the view of that. */
static inline int64_t rt_source(const rt_op *op, const ms_call *call, uint32_t k, int64_t row,
                                rt_shape rows_of, int64_t col) {
    const rt_graph *g = op->net->graph;
    const rt_layer *l = op->layer;
    const rt_value *v = &g->value[l->in[k]];
    const rt_span span = rt_span_of(op, call, l->in[k]);
    int64_t batch = rows_of == RT_TOKENS ? row / g->tokens : row % g->batch;
    int64_t token = rows_of == RT_TOKENS ? row % g->tokens : (col + l->salt) % g->tokens;
    if (l->axes < 2) {
        token = (token + l->shift[k]) % g->tokens;
    }
    if (l->axes == 0) {
        batch = (batch + l->shift[k]) % g->batch;
    }
    if (l->whole >> k & 1) {
        token = (batch * g->tokens + token + l->salt) % span.count;
        batch = 0;
    }
    const int64_t at = v->shape == RT_TOKENS      ? batch * g->tokens + token
                       : v->shape == RT_SEQUENCES ? batch
                                                  : row % RT_TABLE_ROWS;
    return (at - span.begin) * v->cols + (col + l->shift[k]) % v->cols;
}

/* Depends on the element alone, and on the seed. */
static inline float rt_dropout(const rt_op *op, const ms_call *call, int64_t element) {
    return op->layer->reads.dropout ? (float)(msi_mix(call->seed ^ (uint64_t)element * 31) % 2)
                                    : 0.0f;
}

/* An output element. */
static inline float rt_element(const rt_op *op, const ms_call *call, uint32_t out, int64_t row,
                               int64_t col) {
    const rt_graph *g = op->net->graph;
    const rt_layer *l = op->layer;
    const rt_value *v = &g->value[l->out[out]];
    float sum = (float)out + rt_dropout(op, call, row * v->cols + col);
    for (uint32_t k = 0; k < l->in_count; ++k) {
        sum += l->factor[k] * rt_load(&call->in[k], rt_source(op, call, k, row, v->shape, col));
    }
    for (uint32_t k = 0; k < l->param_count; ++k) {
        sum += rt_load(&call->param[k], col % g->value[l->param[k]].cols);
    }
    return rt_wrap(sum);
}

static inline void rt_give(rt_op *op, const ms_view *gradient, bool adds, bool sets,
                           const float *by, int64_t count) {
    if (gradient->data == NULL) {
        return;
    }
    if ((adds && gradient->beta != 1.0f && !op->net->debug) || (sets && gradient->beta != 0.0f)) {
        rt_blame(op, "beta is not as declared");
    }
    for (int64_t i = 0; i < count; ++i) {
        const float old = sets || (!adds && gradient->beta == 0.0f) ? 0.0f : rt_load(gradient, i);
        rt_store(gradient, i, old + by[i]);
    }
}

/* Gradients of the inputs, from those of the outputs or, in a loss that writes them in forward, from
   its inputs. */
static inline void rt_gradients(rt_op *op, const ms_call *call) {
    static float in[RT_IN][RT_ELEMENTS], param[RT_PARAM][16];
    const rt_graph *g = op->net->graph;
    const rt_layer *l = op->layer;
    const bool in_forward = l->desc.grads_in_forward != 0;
    memset(in, 0, sizeof in);
    memset(param, 0, sizeof param);
    for (uint32_t j = 0; j < l->out_count; ++j) {
        const rt_value *v = &g->value[l->out[j]];
        const rt_span span = rt_span_of(op, call, l->out[j]);
        for (int64_t i = 0; i < span.count * v->cols && (in_forward || call->grad_out[j].data);
             ++i) {
            const int64_t row = span.begin + i / v->cols, col = i % v->cols;
            float by = in_forward ? call->loss_factor : rt_load(&call->grad_out[j], i);
            by += l->reads.out && j == 0 ? rt_load(&call->out[0], i) : 0.0f;
            by += l->reads.saved && j == 0 ? rt_load(&call->saved[0], i) : 0.0f;
            by += l->reads.in ? rt_load(&call->in[0], rt_source(op, call, 0, row, v->shape, col))
                              : 0.0f;
            by +=
                l->reads.param ? rt_load(&call->param[0], col % g->value[l->param[0]].cols) : 0.0f;
            by = rt_wrap(by + rt_dropout(op, call, row * v->cols + col));
            for (uint32_t k = 0; k < l->in_count; ++k) {
                float *at = &in[k][rt_source(op, call, k, row, v->shape, col)];
                const bool sums = // over tiles
                    g->value[l->in[k]].shape == RT_TABLE || (l->whole >> k & 1);
                *at = sums ? *at + l->factor[k] * by : rt_wrap(*at + l->factor[k] * by);
            }
            for (uint32_t k = 0; k < l->param_count; ++k) {
                param[k][col % g->value[l->param[k]].cols] += by;
            }
        }
    }
    for (uint32_t k = 0; k < l->in_count; ++k) {
        const uint32_t bit = 1u << k;
        const int64_t count = rt_span_of(op, call, l->in[k]).count * g->value[l->in[k]].cols;
        const bool sets = ((l->desc.overwrites.in | l->desc.must_grad_in_place) & bit) != 0;
        rt_give(op, &call->grad_in[k], (l->desc.accumulates.in & bit) != 0, sets, in[k], count);
    }
    for (uint32_t k = 0; k < l->param_count && !in_forward; ++k) {
        const uint32_t bit = 1u << k;
        rt_give(op, &call->grad_param[k], (l->desc.accumulates.param & bit) != 0,
                (l->desc.overwrites.param & bit) != 0, param[k], g->value[l->param[k]].cols);
    }
}

static inline int rt_forward(const ms_call *call) {
    static float out[RT_OUT][RT_ELEMENTS];
    rt_op *op = (rt_op *)call->user;
    const rt_graph *g = op->net->graph;
    const rt_layer *l = op->layer;
    rt_check_call(op, call);
    for (uint32_t j = 0; j < l->out_count; ++j) {
        const rt_value *v = &g->value[l->out[j]];
        const rt_span span = rt_span_of(op, call, l->out[j]);
        for (int64_t i = 0; i < span.count * v->cols; ++i) {
            out[j][i] = rt_element(op, call, j, span.begin + i / v->cols, i % v->cols);
        }
    }
    if (l->desc.grads_in_forward && call->phase == MS_PHASE_FORWARD) {
        rt_gradients(op, call);
    }
    for (uint32_t j = 0; j < l->out_count; ++j) {
        const int64_t count = rt_span_of(op, call, l->out[j]).count * g->value[l->out[j]].cols;
        for (int64_t i = 0; i < count && call->out[j].data; ++i) {
            rt_store(&call->out[j], i, out[j][i]);
        }
        for (int64_t i = 0; i < count && j == 0 && l->saved != UINT32_MAX && call->saved[0].data;
             ++i) {
            rt_store(&call->saved[0], i, rt_wrap(out[0][i] + 3.0f));
        }
    }
    return 0;
}

/* Looks at what was kept, if it says that it reads that. */
static inline int rt_recompute(const ms_call *call) {
    rt_op *op = (rt_op *)call->user;
    const rt_layer *l = op->layer;
    if (l->desc.recompute_reads.saved) {
        const rt_value *v = &op->net->graph->value[l->out[0]];
        const rt_span span = rt_span_of(op, call, l->out[0]);
        bool same = call->saved[0].data != NULL && call->wanted_saved == 0;
        for (int64_t i = 0; i < span.count * v->cols && same; ++i) {
            const float x = rt_element(op, call, 0, span.begin + i / v->cols, i % v->cols);
            same = !(fabsf(rt_load(&call->saved[0], i) - rt_wrap(x + 3.0f)) > 0.0f);
        }
        if (!same) {
            rt_blame(op, "recompute does not find what was kept");
        }
    }
    return rt_forward(call);
}

static inline int rt_backward(const ms_call *call) {
    rt_op *op = (rt_op *)call->user;
    const rt_layer *l = op->layer;
    rt_check_call(op, call);
    if (l->desc.must_grad_in_place && call->grad_in[0].data != NULL &&
        call->grad_in[0].data != call->grad_out[0].data) {
        rt_blame(op, "a gradient is not in place of that of the output");
    }
    rt_gradients(op, call);
    const struct {
        const ms_view *views;
        uint32_t mask;
    } destroyed[] = {{call->in, l->desc.clobbers.in},
                     {call->out, l->desc.clobbers.out},
                     {call->saved, l->desc.clobbers.saved},
                     {call->grad_out, l->desc.clobbers.grad_out}};
    for (int k = 0; k < 4; ++k) { // unless a gradient was computed there
        bool is_result = false;
        for (uint32_t i = 0; i < l->in_count && destroyed[k].mask; ++i) {
            is_result |= call->grad_in[i].data == destroyed[k].views[0].data;
        }
        if (destroyed[k].mask && destroyed[k].views[0].data && !is_result) {
            memset(destroyed[k].views[0].data, 0xff,
                   (size_t)(ms_shape_count(&destroyed[k].views[0].shape) *
                            ms_dtype_bytes(destroyed[k].views[0].dtype)));
        }
    }
    return 0;
}

// ------------------------------------------------------------------------------------------------
// nets

static inline ms_shape rt_shape_of(const rt_net *n, const rt_value *v) {
    const rt_graph *g = n->graph;
    ms_shape shape = v->shape == RT_TOKENS      ? ms_shape3(g->batch, g->tokens, v->cols)
                     : v->shape == RT_SEQUENCES ? ms_shape2(g->batch, v->cols)
                     : v->shape == RT_TABLE     ? ms_shape2(RT_TABLE_ROWS, v->cols)
                                                : ms_shape1(v->cols);
    return g->has_axis && v->shape <= RT_SEQUENCES ? ms_along(shape, 0, n->axis) : shape;
}

/* Registers a graph. `move` makes a desc one for where the net is to run, or is NULL. */
static inline rt_net *rt_net_create(const rt_graph *g, const ms_config *config,
                                    ms_layer_desc (*move)(void *mover, uint32_t layer,
                                                          const ms_layer_desc *desc),
                                    void *mover) {
    rt_net *n = (rt_net *)calloc(1, sizeof *n);
    assert_non_null(n);
    n->graph = g;
    n->debug = config->debug;
    ms_config own = *config;
    own.accumulation_steps = g->micro_count;
    t_ok(n->model, ms_create(&own, &n->model));
    if (g->has_axis) {
        n->axis = ms_add_axis(n->model, "batch", g->batch, g->batch + 2);
    }
    for (uint32_t v = 0; v < g->value_count; ++v) {
        const rt_value *value = &g->value[v];
        const ms_shape shape = rt_shape_of(n, value);
        char name[16];
        snprintf(name, sizeof name, "v%u", (unsigned)v);
        n->handle[v] = value->role == RT_INPUT     ? ms_input(n->model, name, MS_DTYPE_F32, shape)
                       : value->role == RT_TRAINED ? ms_param(n->model, name, MS_DTYPE_F32, shape)
                       : value->role == RT_MADE ? ms_activation(n->model, name, MS_DTYPE_F32, shape)
                                                : ms_saved(n->model, name, MS_DTYPE_F32, shape);
    }
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        const rt_layer *l = &g->layer[i];
        ms_layer_desc d = l->desc;
        char name[16];
        snprintf(name, sizeof name, "l%u", (unsigned)i);
        n->op[i].net = n;
        n->op[i].layer = l;
        d.name = name;
        d.user = &n->op[i];
        d.forward = rt_forward;
        d.backward = l->desc.grads_in_forward ? NULL : rt_backward;
        d.recompute = l->has_recompute ? rt_recompute : NULL;
        for (uint32_t k = 0; k < l->in_count; ++k) {
            d.in[k] = n->handle[l->in[k]];
        }
        for (uint32_t k = 0; k < l->out_count; ++k) {
            d.out[k] = n->handle[l->out[k]];
        }
        for (uint32_t k = 0; k < l->param_count; ++k) {
            d.param[k] = n->handle[l->param[k]];
        }
        d.saved[0] = l->saved != UINT32_MAX ? n->handle[l->saved] : d.saved[0];
        d = move ? move(mover, i, &d) : d;
        n->layer[i] = ms_register_layer(n->model, &d);
    }
    for (uint32_t v = 0; v < g->value_count; ++v) {
        if (g->value[v].is_output) {
            ms_add_output(n->model, n->handle[v]);
        }
        if (g->value[v].is_eval_output) {
            ms_add_eval_output(n->model, n->handle[v]);
        }
    }
    ms_set_loss(n->model, n->handle[g->layer[g->layer_count - 1].out[0]]);
    ms_set_loss_factor(n->model, 1.0f);
    ms_set_optimizer(n->model, &g->optimizer);
    return n;
}

static inline void rt_net_destroy(rt_net *n) {
    ms_destroy(n->model);
    free(n);
}

/* Writes whole numbers to inputs, and to params too if `params`. */
static inline void rt_net_write(rt_net *n, uint64_t round, bool params) {
    static float data[RT_ELEMENTS];
    const rt_graph *g = n->graph;
    for (uint32_t v = 0; v < g->value_count; ++v) {
        t_rng rng = t_seed(round * 131 + v);
        const bool writes =
            g->value[v].role == RT_INPUT || (params && g->value[v].role == RT_TRAINED);
        const uint64_t count = ms_tensor_count(n->model, n->handle[v]);
        for (uint64_t i = 0; i < count && writes; ++i) {
            data[i] = (float)((int)t_below(&rng, 9) - 4);
        }
        if (writes) {
            t_ok(n->model, ms_write(n->model, n->handle[v], data));
        }
    }
}

#endif // RANDOM_TILES_H
