/*  test_undeclared.c - lies planted in random graphs: one layer does what it did not declare, in one of many
    ways. Debug mode must end the step with MS_RESULT_CONTRACT, and name the layer, by number and
    name, and what to do; whatever the graph, the plan and the layer, in F32, BF16 and F16. */
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"

enum { QUICK_GRAPHS = 10, GRAPHS = 200 };

/* The lie, what the text has to say, and the share of the graphs, in per cent, that it must at least
   be told in: in F32, for the last ones in 16 bits. */
#define LIES(X)                                                                                    \
    X(READS_UNDECLARED, "asks whether there is", 17)                                               \
    X(WRITES_INPUT, "changes in[", 40)                                                             \
    X(WRITES_PARAM, "changes param[", 25)                                                          \
    X(WRITES_PARAM_IN_BACKWARD, "changes param[", 5)                                               \
    X(WRITES_GRAD_OUT, "changes grad_out[", 25)                                                    \
    X(WRITES_BEYOND_OUT, "beyond the end of", 50)                                                  \
    X(WRITES_BEYOND_WORKSPACE, "beyond the end of its workspace", 12)                              \
    X(WRITES_WITHOUT_WORKSPACE, "workspace of 0 bytes", 40)                                        \
    X(READS_BEYOND_IN, "reads beyond the end of", 40)                                              \
    X(WRITES_ELSEWHERE, "where it lies between calls", 50)                                         \
    X(READS_ELSEWHERE, "where it lies between calls", 50)                                          \
    X(KEEPS_INPUT, "", 8)                                                                          \
    X(KEEPS_WORKSPACE, "", 1)                                                                      \
    X(KEEPS_PARAM, "it is an operand of this call", 25)                                            \
    X(IN_PLACE, "in_place allows that", 10)                                                        \
    X(GRAD_IN_PLACE, "grad_in_place allows that", 2)                                               \
    X(SETS_SUM, "others contribute to it", 20)                                                     \
    X(MULTIPLIES_SUM, "others contribute to it", 20)                                               \
    X(ADDS, "adds to, multiplies or leaves unwritten", 15)                                         \
    X(LEAVES_GRADIENT, "adds to, multiplies or leaves unwritten", 15)                              \
    X(LEAVES_OUT, "a part that nobody has written", 30)                                            \
    X(COUNTS, "other bits each time", 50)                                                          \
    X(RECOMPUTES_OUT, "in MS_PHASE_RECOMPUTE", 50)                                                 \
    X(RECOMPUTES_SAVED, "in MS_PHASE_RECOMPUTE", 10)                                               \
    X(CHANGES_STATE, "recompute_keeps_state", 8)                                                   \
    X(KEEPS_STATIC, "bits than forward did for|earlier call has left behind", 10)                  \
    X(NEEDS_OPTIONAL, "makes other bits", 3)                                                       \
    X(WANTS_CLEARED, "before it has written there, its workspace", 2)                              \
    X(WRITES_FLOATS, "have 2 bytes in this call", 10)                                              \
    X(READS_FLOATS, "have 2 bytes in this call", 10)                                               \
    X(WRITES_HALF_GRADIENT, "writes elements of 2 bytes", 2)

#define X(name, text, share) name,
typedef enum lie { LIES(X) LIE_COUNT } lie;
#undef X

#define X(name, text, share) {#name, text, share},
static const struct {
    const char *name, *text;
    uint32_t share;
} lies[LIE_COUNT] = {LIES(X)};
#undef X

// ------------------------------------------------------------------------------------------------
// the liar: one layer of a graph, around whose honest callbacks these are wrapped

static struct {
    lie tells;
    uint32_t layer, told;
    const rd_layer *l;
    float *elsewhere;        // a param of another layer, or its own
    ms_view kept;            // as forward had it
    float shared;            // set by the forward of every layer
    int slot, of;            // of IN_PLACE and GRAD_IN_PLACE: the result, and the operand
    float old[2 * RD_SLOTS]; // what gradients began with
    uint8_t bytes[2 * RD_SLOTS][RD_ELEMENTS * sizeof(float)];
    float old_out, operand; // and the first element of that operand
    bool seen[2];           // an optional saved tensor without and with data
} liar;

static float get(const ms_view *view, int64_t i) {
    return msi_load(view->data, view->dtype, (uint64_t)i);
}

static void put(const ms_view *view, int64_t i, float x) {
    msi_store_as(view->data, view->dtype, (uint64_t)i, x);
}

static bool is_float(const ms_view *view) {
    return msi_is_castable(view->dtype);
}

/* The first float operand of some with data, of at least `count` elements. */
static const ms_view *pick(const ms_view *views, int slots, uint64_t count) {
    for (int i = 0; i < slots; ++i) {
        if (views[i].data != NULL && is_float(&views[i]) &&
            ms_shape_count(&views[i].shape) >= count) {
            return &views[i];
        }
    }
    return NULL;
}

static const ms_view *pick_out(const ms_call *call) {
    return pick(call->out, liar.l->count[RD_GROUP_OUT], 1);
}

/* Gradient t of the layer: of an input, or from RD_SLOTS on of a param. */
static const ms_view *gradient_at(const ms_call *call, int t) {
    const int slot = t % RD_SLOTS;
    const bool of_in = t < RD_SLOTS;
    const ms_view *view = of_in ? &call->grad_in[slot] : &call->grad_param[slot];
    return slot < liar.l->count[of_in ? RD_GROUP_IN : RD_GROUP_PARAM] && view->data != NULL ? view
                                                                                            : NULL;
}

/* Whether the layer follows beta, or adds, in this gradient. */
static bool takes_sums(int t) {
    const ms_layer_desc *d = &liar.l->desc;
    return t < RD_SLOTS ? !rd_bit(d->overwrites.in | d->must_grad_in_place, t)
                        : !rd_bit(d->overwrites.param, t - RD_SLOTS);
}

/* Adds to the first element, so much that it is not lost where that is large. */
static void add_to(const ms_view *view, float x) {
    if (view != NULL && msi_is_finite((double)get(view, 0))) {
        put(view, 0, get(view, 0) + x * (1.0f + fabsf(get(view, 0))));
        liar.told += 1;
    }
}

/* Adds a number to the first result of a call. */
static void spoil_result(const ms_call *call, float x) {
    const ms_view *out = call->phase == MS_PHASE_BACKWARD ? NULL : pick_out(call);
    for (int t = 0; t < 2 * RD_SLOTS && call->phase == MS_PHASE_BACKWARD && out == NULL; ++t) {
        out = gradient_at(call, t);
    }
    add_to(out, x);
}

static void write_workspace(const ms_call *call, uint64_t at) {
    ((unsigned char *)call->workspace)[at] = 1;
    liar.told += 1;
}

static void lie_before_forward(const ms_call *call) {
    const ms_view *out = pick_out(call);
    const bool forward = call->phase == MS_PHASE_FORWARD;
    liar.old_out = out != NULL ? get(out, 0) : 0.0f;
    if (liar.tells == IN_PLACE && call->in[liar.of].data != NULL) {
        liar.operand = get(&call->in[liar.of], 0);
    }
    if (liar.tells == KEEPS_STATIC && forward) {
        liar.shared = 0.25f;
    }
    if (liar.tells == KEEPS_INPUT && forward) {
        const ms_view *in = pick(call->in, liar.l->count[RD_GROUP_IN], 1);
        const int slot = in == NULL ? 0 : (int)(in - call->in);
        memset(&liar.kept, 0, sizeof liar.kept);
        if (in != NULL && rd_bit(rd_backward_reads(liar.l, RD_GROUP_IN), slot)) {
            liar.kept = *in;
        }
    }
    if (liar.tells == WANTS_CLEARED && forward && call->workspace_bytes >= 4 && out != NULL &&
        liar.l->desc.forward_workspace.contents == MS_CONTENTS_ANY) {
        liar.old_out = ((const float *)call->workspace)[0];
    }
}

/* Adds to the last element of a result what is now first in an operand, in whose place the result
   may lie. */
static void add_of_operand(const ms_view *result, const ms_view *operand) {
    const float of_operand = get(operand, 0);
    const float change = fabsf(liar.operand - get(result, 0));
    liar.told += operand->data == result->data &&
                 (result->dtype == MS_DTYPE_F32 ? change > 0.0f : change > 0.25f);
    put(result, t_count(result) - 1, get(result, t_count(result) - 1) + 0.25f + 0.5f * of_operand);
}

/* The lies about what forward reads. */
static void lie_about_reads(const ms_call *call) {
    const ms_view *in = pick(call->in, liar.l->count[RD_GROUP_IN], 1);
    switch (liar.tells) {
    case READS_BEYOND_IN:
        if (in != NULL) {
            spoil_result(call, get(in, t_count(in)));
        }
        break;
    case READS_FLOATS:
        if (in != NULL && in->dtype != MS_DTYPE_F32) {
            spoil_result(call, t_data(in)[t_count(in) - 1]);
        }
        break;
    case READS_ELSEWHERE:
    case KEEPS_PARAM:
        if (liar.elsewhere != NULL) {
            spoil_result(call, liar.elsewhere[0]);
        }
        break;
    case COUNTS:
        spoil_result(call, 0.25f * (float)(liar.told + 1));
        break;
    case WANTS_CLEARED:
        if (call->phase == MS_PHASE_FORWARD && call->workspace_bytes >= 4 &&
            liar.l->desc.forward_workspace.contents == MS_CONTENTS_ANY) {
            spoil_result(call, liar.old_out);
        }
        break;
    case IN_PLACE: {
        const ms_view *y = &call->out[liar.slot], *x = &call->in[liar.of];
        if (y->data != NULL && x->data != NULL) {
            add_of_operand(y, x);
        }
        break;
    }
    default:
        break;
    }
}

/* The lies about what forward and its recomputation make. */
static void lie_about_results(const ms_call *call) {
    const bool again = call->phase == MS_PHASE_RECOMPUTE;
    const ms_view *saved = pick(call->saved, liar.l->count[RD_GROUP_SAVED], 1);
    const ms_view *out = pick_out(call);
    switch (liar.tells) {
    case LEAVES_OUT:
        if (out == &call->out[0]) {
            put(out, 0, liar.old_out);
            liar.told += 1;
        }
        break;
    case RECOMPUTES_OUT:
        if (again && out != NULL && rd_bit(call->wanted_out, (int)(out - call->out))) {
            add_to(out, 0.5f);
        }
        break;
    case RECOMPUTES_SAVED:
        if (again && saved != NULL && rd_bit(call->wanted_saved, (int)(saved - call->saved))) {
            add_to(saved, 0.5f);
        }
        break;
    case CHANGES_STATE:
        if (again) {
            add_to(pick(call->state, liar.l->count[RD_GROUP_STATE], 1), 1.0f);
        }
        break;
    case KEEPS_STATIC:
        if (out == &call->out[0] && rd_bit(call->wanted_out, 0)) {
            put(out, 0, get(out, 0) + liar.shared);
            liar.told += again && liar.shared != 0.25f;
        }
        break;
    case NEEDS_OPTIONAL: {
        const int slot = (int)msi_lowest_bit(rd_used(liar.l, RD_GROUP_SAVED) &
                                             (uint32_t)liar.l->desc.optional_saved);
        liar.seen[call->saved[slot].data != NULL] |= out != NULL;
        if (out != NULL && call->saved[slot].data == NULL) {
            put(out, 0, get(out, 0) + 0.5f);
        }
        liar.told += liar.seen[0] && liar.seen[1];
        break;
    }
    default:
        break;
    }
}

static void lie_after_forward(const ms_call *call) {
    const ms_view *in = pick(call->in, liar.l->count[RD_GROUP_IN], 1), *out = pick_out(call);
    switch (liar.tells) {
    case WRITES_INPUT:
        add_to(in, 1.0f);
        break;
    case WRITES_PARAM:
        add_to(pick(call->param, liar.l->count[RD_GROUP_PARAM], 1), 1.0f);
        break;
    case WRITES_BEYOND_OUT:
        if (out != NULL) {
            put(out, t_count(out), 3.0f);
            liar.told += 1;
        }
        break;
    case WRITES_FLOATS:
        for (int64_t i = 0; out != NULL && out->dtype != MS_DTYPE_F32 && i < t_count(out); ++i) {
            t_data(out)[i] = 0.5f;
            liar.told += 1;
        }
        break;
    case WRITES_BEYOND_WORKSPACE:
    case WRITES_WITHOUT_WORKSPACE:
        if ((call->workspace_bytes == 0) == (liar.tells == WRITES_WITHOUT_WORKSPACE)) {
            write_workspace(call, call->workspace_bytes);
        }
        break;
    case WRITES_ELSEWHERE:
        if (liar.elsewhere != NULL) {
            liar.elsewhere[0] += 1.0f;
            liar.told += 1;
        }
        break;
    case KEEPS_WORKSPACE:
        if (call->phase == MS_PHASE_FORWARD && call->workspace_bytes >= 4) {
            liar.kept.data = call->workspace;
            liar.kept.dtype = MS_DTYPE_F32;
            put(&liar.kept, 0, 0.5f);
        }
        break;
    default:
        lie_about_reads(call);
        lie_about_results(call);
        break;
    }
}

static void lie_before_backward(const ms_call *call) {
    if (liar.tells == GRAD_IN_PLACE && call->grad_out[liar.of].data != NULL) {
        liar.operand = get(&call->grad_out[liar.of], 0);
    }
    for (int t = 0; t < 2 * RD_SLOTS; ++t) {
        const ms_view *view = gradient_at(call, t);
        liar.old[t] = view != NULL ? get(view, 0) : 0.0f;
        if (view != NULL && liar.tells == WRITES_HALF_GRADIENT) {
            memcpy(liar.bytes[t], view->data, (size_t)rd_view_bytes(view));
        }
        if (view != NULL && takes_sums(t) && view->beta == 1.0f && liar.tells == MULTIPLIES_SUM) {
            for (int64_t i = 0; i < t_count(view); ++i) {
                put(view, i, get(view, i) * 0.0f);
            }
            liar.told += 1;
        }
    }
}

/* The first value that backward is not to read, if there is one. */
static const ms_view *undeclared(const ms_call *call) {
    for (int group = 0; group < RD_GROUP_STATE; ++group) {
        for (int i = 0; i < liar.l->count[group]; ++i) {
            const ms_view *view = &rd_views(call, group)[i];
            if (liar.l->slot[group][i] != 0 && is_float(view) &&
                !rd_bit(rd_backward_reads(liar.l, group), i)) {
                return view;
            }
        }
    }
    return NULL;
}

/* Leaves in a gradient in F32 what a layer does that takes it for one in 16 bits. */
static void write_half(const ms_call *call, const ms_view *view, int t) {
    const bool adds = view->beta != 0.0f;
    memcpy(view->data, liar.bytes[t], (size_t)rd_view_bytes(view));
    for (int64_t i = 0; i < t_count(view); ++i) {
        const float old = adds ? msi_load(view->data, call->dtype, (uint64_t)i) : 0.0f;
        msi_store_as(view->data, call->dtype, (uint64_t)i, old + 0.5f);
    }
    liar.told += 1;
}

static void lie_about_gradients(const ms_call *call) {
    for (int t = 0; t < 2 * RD_SLOTS; ++t) {
        const ms_view *view = gradient_at(call, t);
        if (view == NULL) {
            continue;
        }
        if (liar.tells == SETS_SUM && takes_sums(t)) {
            put(view, 0, 0.5f);
            liar.told += 1;
        }
        if (liar.tells == ADDS && view->beta == 0.0f) {
            put(view, 0, get(view, 0) + liar.old[t]);
            liar.told += 1;
        }
        if (liar.tells == LEAVES_GRADIENT && view->beta == 0.0f) {
            put(view, 0, liar.old[t]);
            liar.told += 1;
        }
        bool first = true; // of the slots of a tensor
        for (int k = 0; k < t; ++k) {
            first &= gradient_at(call, k) == NULL || gradient_at(call, k)->data != view->data;
        }
        if (liar.tells == WRITES_HALF_GRADIENT && call->dtype != MS_DTYPE_F32 &&
            view->dtype == MS_DTYPE_F32 && first) {
            write_half(call, view, t);
        }
    }
}

static void lie_after_backward(const ms_call *call) {
    const ms_view *x = liar.tells == READS_UNDECLARED ? undeclared(call) : NULL;
    lie_about_gradients(call);
    switch (liar.tells) {
    case READS_UNDECLARED:
        if (x != NULL) {
            spoil_result(call, 0.5f * get(x, 0));
        }
        break;
    case WRITES_PARAM_IN_BACKWARD:
        for (int i = 0; i < liar.l->count[RD_GROUP_PARAM]; ++i) {
            if (rd_bit(rd_backward_reads(liar.l, RD_GROUP_PARAM), i)) {
                add_to(&call->param[i], 1.0f);
            }
        }
        break;
    case WRITES_GRAD_OUT:
        add_to(pick(call->grad_out, liar.l->count[RD_GROUP_OUT], 1), 1.0f);
        break;
    case WRITES_BEYOND_WORKSPACE:
    case WRITES_WITHOUT_WORKSPACE:
        if ((call->workspace_bytes == 0) == (liar.tells == WRITES_WITHOUT_WORKSPACE)) {
            write_workspace(call, call->workspace_bytes);
        }
        break;
    case KEEPS_INPUT:
    case KEEPS_WORKSPACE:
        if (liar.kept.data != NULL) {
            spoil_result(call, 0.125f + get(&liar.kept, 0));
        }
        break;
    case GRAD_IN_PLACE: {
        const ms_view *y = &call->grad_in[liar.slot], *from = &call->grad_out[liar.of];
        if (y->data != NULL && from->data != NULL && y->beta == 0.0f) {
            add_of_operand(y, from);
        }
        break;
    }
    default:
        break;
    }
}

static int wrapped(const ms_call *call, ms_layer_fn honest) {
    const rd_op *op = (const rd_op *)call->user;
    const bool lies_now = op->index == liar.layer, backward = call->phase == MS_PHASE_BACKWARD;
    if (!lies_now && !backward) {
        liar.shared = 0.75f;
    }
    if (lies_now) {
        (backward ? lie_before_backward : lie_before_forward)(call);
    }
    const int error = honest(call);
    if (lies_now && error == 0) {
        (backward ? lie_after_backward : lie_after_forward)(call);
    }
    return error;
}

static int wrapped_forward(const ms_call *call) {
    return wrapped(call, rd_forward);
}

static int wrapped_recompute(const ms_call *call) {
    return wrapped(call, rd_recompute);
}

static int wrapped_backward(const ms_call *call) {
    return wrapped(call, rd_backward);
}

static ms_layer_desc wrap_layer(void *mover, uint32_t layer, const ms_layer_desc *desc) {
    ms_layer_desc d = *desc;
    (void)mover, (void)layer;
    d.forward = wrapped_forward;
    d.backward = d.backward != NULL ? wrapped_backward : NULL;
    d.recompute = d.recompute != NULL ? wrapped_recompute : NULL;
    return d;
}

// ------------------------------------------------------------------------------------------------
// which layers can tell a lie

/* A result and an operand of its shape that no mask connects yet, and that are in one slot only. */
static bool find_place(const rd_graph *g, rd_layer *l, bool gradient) {
    const uint32_t ins = l->count[RD_GROUP_IN], outs = l->count[RD_GROUP_OUT];
    for (uint32_t i = 0; i < ins; ++i) {
        const rd_value *x = rd_at(g, l, RD_GROUP_IN, (int)i);
        bool single = x != NULL && x->role == RD_ACTIVATION && rd_is_float(x);
        for (uint32_t k = 0; k < ins && single; ++k) {
            single = k == i || l->slot[RD_GROUP_IN][k] != l->slot[RD_GROUP_IN][i];
        }
        for (uint32_t j = 0; j < outs && single; ++j) {
            const rd_value *y = rd_at(g, l, RD_GROUP_OUT, (int)j);
            if (y == NULL || !rd_same_shape(x, y) || rd_count(y, g->size) < 2 || y->stopped) {
                continue;
            }
            if (gradient) {
                l->desc.grad_in_place[i].grad_out |= 1u << j;
            } else {
                l->desc.in_place[j] |= 1u << i;
            }
            liar.slot = (int)(gradient ? i : j);
            liar.of = (int)(gradient ? j : i);
            return true;
        }
    }
    return false;
}

/* Whether a layer that runs several times in debug mode reads the first output. */
static bool is_read(const rd_graph *g, const rd_layer *l) {
    bool read = false;
    for (uint32_t k = 0; k < g->layer_count; ++k) {
        const rd_layer *other = &g->layer[k];
        for (int i = 0; i < other->count[RD_GROUP_IN]; ++i) {
            read |= l->slot[RD_GROUP_OUT][0] != 0 &&
                    other->slot[RD_GROUP_IN][i] == l->slot[RD_GROUP_OUT][0] &&
                    !other->desc.no_recompute && other->desc.grads_in_forward == 0 &&
                    !other->has_recompute; // that may read less
        }
    }
    return read;
}

static bool can_tell(const rd_graph *g, rd_layer *l) {
    const ms_layer_desc *d = &l->desc;
    const bool once = d->no_recompute || d->grads_in_forward != 0;
    if (liar.tells >= LEAVES_OUT && d->recompute_reads.out != 0) {
        return false; // what is made of an output would not be what the lie makes of that
    }
    switch (liar.tells) {
    case WRITES_INPUT:
        return d->must_in_place == 0;
    case WRITES_GRAD_OUT:
        return l->has_backward && d->clobbers.grad_out == 0 && d->must_grad_in_place == 0;
    case IN_PLACE: // what must be in place has claimed its operands
        return !once && d->must_in_place == 0 && !l->has_recompute && find_place(g, l, false);
    case GRAD_IN_PLACE:
        return l->has_backward && d->must_grad_in_place == 0 && d->accumulates.in == 0 &&
               d->clobbers.grad_out == 0 && find_place(g, l, true);
    case LEAVES_OUT:
        return d->must_in_place == 0 && is_read(g, l);
    case CHANGES_STATE:
        return !once && d->recompute_keeps_state;
    case KEEPS_STATIC:
        return !once && l->has_backward &&
               (rd_used(l, RD_GROUP_STATE) == 0 || d->recompute_keeps_state);
    case NEEDS_OPTIONAL:
        return !once && (rd_used(l, RD_GROUP_SAVED) & (uint32_t)d->optional_saved) != 0;
    case READS_BEYOND_IN:
    case READS_FLOATS:
    case READS_ELSEWHERE:
    case KEEPS_PARAM:
    case COUNTS:
    case RECOMPUTES_OUT:
    case RECOMPUTES_SAVED:
    case WANTS_CLEARED:
        return !once;
    default:
        return true;
    }
}

/* Chooses the layer: any that can tell the lie, beginning with a random one. */
static bool choose(rd_graph *g, t_rng *rng) {
    const uint32_t first = t_below(rng, g->layer_count);
    for (uint32_t k = 0; k < g->layer_count; ++k) {
        liar.layer = (first + k) % g->layer_count;
        liar.l = &g->layer[liar.layer];
        if (can_tell(g, &g->layer[liar.layer])) {
            return true;
        }
    }
    return false;
}

/* Where the model has a param: of the layer, or one that is none of its operands. */
static float *param_at(const rd_net *n, bool own) {
    const rd_graph *g = n->run.graph;
    for (uint32_t v = 0; v < g->value_count; ++v) {
        bool is_own = false;
        for (int i = 0; i < liar.l->count[RD_GROUP_PARAM]; ++i) {
            is_own |= liar.l->slot[RD_GROUP_PARAM][i] == v + 1;
        }
        if (g->value[v].role == RD_PARAM && rd_is_float(&g->value[v]) && is_own == own) {
            return (float *)ms_data(n->model, n->handle[v]);
        }
    }
    return NULL;
}

static uint32_t missed;

static void complain(uint64_t seed, ms_dtype dtype, const char *how, const char *text) {
    print_error("%s, graph %u in %s, layer %u: %s: \"%s\"\n", lies[liar.tells].name, (unsigned)seed,
                ms_dtype_name(dtype), (unsigned)liar.layer, how, text);
    missed += 1;
}

/* Whether a text has one of several parts, which '|' separates. */
static bool has_one_of(const char *text, const char *parts) {
    bool has = false;
    for (const char *at = parts; *at != 0 && !has; at += at[strcspn(at, "|")] == '|') {
        char part[96];
        snprintf(part, sizeof part, "%.*s", (int)strcspn(at, "|"), at);
        has = strstr(text, part) != NULL;
        at += strcspn(at, "|");
    }
    return has;
}

static void check_text(uint64_t seed, ms_dtype dtype, const char *text) {
    char label[64];
    snprintf(label, sizeof label, "layer %u \"layer%u\"", (unsigned)liar.layer,
             (unsigned)liar.layer);
    const char *cure = strrchr(text, ':');
    if (strstr(text, label) == NULL) {
        complain(seed, dtype, "the layer is not named", text);
    } else if (!has_one_of(text, lies[liar.tells].text)) {
        complain(seed, dtype, "something else is said", text);
    } else if (cure == NULL || strlen(cure) < 12) {
        complain(seed, dtype, "no cure is named", text);
    }
}

/* Whether the lie was told, in a graph that has values in this dtype. */
static bool try_lie(lie tells, uint64_t seed, ms_dtype dtype) {
    char failure[RD_TEXT] = "";
    t_rng rng = t_seed(seed * 31 + (uint64_t)tells);
    ms_config config = t_config();
    rd_graph *g = rd_generate(seed);
    const bool half = dtype != MS_DTYPE_F32;
    const bool scales = t_is_built_in((int)g->optimizer.kind); // as F16 needs
    memset(&liar, 0, sizeof liar);
    liar.tells = tells;
    config.debug = true;
    config.force_optimize = t_chance(&rng, 0.5);
    config.mixed_dtype = half ? dtype : config.mixed_dtype;
    config.master_weights = half && seed % 3 == 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    if (half) {
        rd_random_dtypes(g, seed + 99);
    }
    if ((dtype == MS_DTYPE_F16 && !scales) || !choose(g, &rng)) {
        free(g);
        return false;
    }
    g->move = wrap_layer;
    rd_net *n = rd_net_create(g, &config, "liar", failure, false);
    if (half) {
        rd_force_half(n, seed);
    }
    t_ok(n->model, ms_wrap(n->model));
    assert_true(rd_net_write(n, 0, false));
    const bool own = tells == KEEPS_PARAM;
    liar.elsewhere =
        own || tells == WRITES_ELSEWHERE || tells == READS_ELSEWHERE ? param_at(n, own) : NULL;
    const ms_result result = ms_step(n->model, NULL);
    const bool told = liar.told > 0;
    if (failure[0] != 0) {
        complain(seed, dtype, "an honest check fails", failure);
    } else if (told && result != MS_RESULT_CONTRACT) {
        complain(seed, dtype, ms_result_name(result), ms_last_error(n->model));
    } else if (result != MS_RESULT_OK) { // whoever is accused must be the liar
        check_text(seed, dtype, ms_last_error(n->model));
    }
    rd_net_destroy(n);
    free(g);
    return told;
}

static void expect_caught(ms_dtype dtype) {
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t count = t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
    const uint64_t only = t_environment("LIE", LIE_COUNT);
    missed = 0;
    for (int k = 0; k < LIE_COUNT; ++k) {
        uint32_t told = 0;
        for (uint64_t seed = first;
             seed < first + count && (only == LIE_COUNT || only == (uint64_t)k); ++seed) {
            told += try_lie((lie)k, seed, dtype);
        }
        if (t_environment("TEXTS", 0) != 0) {
            print_message("%-26s told in %u of %u graphs\n", lies[k].name, (unsigned)told,
                          (unsigned)count);
        }
        const bool of_dtype = (dtype == MS_DTYPE_F32) == (k < WRITES_FLOATS);
        if (count >= 50 && only == LIE_COUNT && of_dtype && told * 100 < lies[k].share * count) {
            print_error("%s is told in %u of %u graphs only\n", lies[k].name, (unsigned)told,
                        (unsigned)count);
            missed += 1;
        }
    }
    assert_int_equal(missed, 0);
}

static void lies_in_random_graphs_are_caught(void **state) {
    (void)state;
    expect_caught(MS_DTYPE_F32);
}

static void lies_in_bf16_are_caught(void **state) {
    (void)state;
    expect_caught(MS_DTYPE_BF16);
}

static void lies_in_f16_are_caught(void **state) {
    (void)state;
    expect_caught(MS_DTYPE_F16);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lies_in_random_graphs_are_caught),
        cmocka_unit_test(lies_in_bf16_are_caught),
        cmocka_unit_test(lies_in_f16_are_caught),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
