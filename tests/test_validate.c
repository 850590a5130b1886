/*  test_validate.c - every misuse has its own error: a result, and a text that names layer and
    tensor, the numbers and the cure. A model that was given something wrong refuses to wrap, and a
    wrapped model that refuses a call computes on as if nothing had been asked.

        TEXTS=1 build/tests/test_validate    prints every text, for people to read */
#include "private.h"
#include "toy_layers.h"

// ------------------------------------------------------------------------------------------------
// the world that is spoiled: six layers, one of them ("spoiled") with every kind of operand

enum { ROWS = 4, COLS = 8, LARGEST_ROWS = 8 };

typedef enum name_of {
    W_NONE,
    W_X,
    W_IDS,
    W_WEIGHT,
    W_P,
    W_Q,
    W_RUNNING,
    W_READ_ONLY,
    W_HIDDEN,
    W_GATED,
    W_WIDE,
    W_INTS,
    W_HALF,
    W_READER,
    W_Y,
    W_Z,
    W_LOSS,
    W_ORPHAN,
    W_S,
    W_T,
    W_FIRST_SAVED,
    W_TENSORS,
    W_FOREIGN = W_TENSORS, // no tensor of this model
    W_GRADIENT,            // handles of the model, but of no value
    W_STATE,
    W_COUNT
} name_of;

typedef enum layer_of { L_FIRST, L_SECOND, L_WIDE, L_READER, L_SPOILED, L_LAST, L_COUNT } layer_of;

typedef struct world world;
typedef ms_result (*act_fn)(world *w);

typedef struct w_op {
    world *of;
    int in, out, saved, param, state; // slots
    bool acts;                        // runs world.inside
} w_op;

struct world {
    ms_config config;
    t_heap heap;
    ms_model *m;
    ms_axis batch;
    ms_tensor t[W_COUNT];
    ms_layer layer[L_COUNT];
    w_op op[L_COUNT];
    ms_layer_desc desc; // of the layer to be spoiled
    uint64_t calls;
    uint32_t failing; // mask of phases in which the layer "first" fails
    act_fn inside;    // called once, by the forward of the layer "spoiled"
    ms_result inside_result;
    const ms_call *call; // while inside runs
};

/* Everything that a layer writes depends on all that it reads, and stays bounded. */
static float w_mix(const ms_call *call, const w_op *op, int64_t i) {
    float sum = 0.25f;
    for (int k = 0; k < op->in; ++k) {
        if (call->in[k].dtype == MS_DTYPE_F32) {
            sum += t_data(&call->in[k])[i % (int64_t)ms_shape_count(&call->in[k].shape)];
        }
    }
    for (int k = 0; k < op->param; ++k) {
        sum += t_data(&call->param[k])[i % (int64_t)ms_shape_count(&call->param[k].shape)];
    }
    return sum / (1.0f + fabsf(sum));
}

static void w_write(const ms_call *call, const w_op *op, const ms_view *view) {
    int64_t count = (int64_t)ms_shape_count(&view->shape);
    for (int64_t i = 0; i < count && view->data != NULL; ++i) {
        if (view->dtype == MS_DTYPE_F32) {
            t_data(view)[i] = w_mix(call, op, i);
        } else if (view->dtype == MS_DTYPE_I32) {
            ((int32_t *)view->data)[i] = (int32_t)i;
        } else {
            ((uint16_t *)view->data)[i] = 0x3c00; // 1 in f16
        }
    }
}

static int w_forward(const ms_call *call) {
    const w_op *op = (const w_op *)call->user;
    world *w = op->of;
    w->calls += 1;
    if (op->acts && w->inside != NULL && call->phase == MS_PHASE_FORWARD) {
        act_fn inside = w->inside;
        w->inside = NULL;
        w->call = call;
        w->inside_result = inside(w);
    }
    if (op == &w->op[L_FIRST] && (w->failing >> call->phase & 1u) != 0) {
        return T_CALLBACK_ERROR;
    }
    for (int k = 0; k < op->out; ++k) {
        w_write(call, op, &call->out[k]);
    }
    for (int k = 0; k < op->saved; ++k) {
        w_write(call, op, &call->saved[k]);
    }
    return 0;
}

static int w_backward(const ms_call *call) {
    const w_op *op = (const w_op *)call->user;
    if (op == &op->of->op[L_FIRST] && (op->of->failing >> MS_PHASE_BACKWARD & 1u) != 0) {
        return T_CALLBACK_ERROR;
    }
    float sum = 0.0f;
    for (int k = 0; k < op->out; ++k) {
        int64_t count = (int64_t)ms_shape_count(&call->grad_out[k].shape);
        for (int64_t i = 0; i < count; ++i) {
            sum += call->grad_out[k].dtype == MS_DTYPE_F32 ? t_grad_out(call, k, i) : 0.0f;
        }
    }
    for (int k = 0; k < op->in + op->param; ++k) {
        const ms_view *g = k < op->in ? &call->grad_in[k] : &call->grad_param[k - op->in];
        for (int64_t i = 0; i < (int64_t)ms_shape_count(&g->shape); ++i) {
            t_contribute(g, i, sum * (float)(i % 3 + 1) * 0.125f);
        }
    }
    return 0;
}

static ms_shape w_shape(const world *w, int64_t cols) {
    return ms_along(ms_shape2(ROWS, cols), 0, w->batch);
}

static void w_tensors(world *w) {
    ms_model *m = w->m;
    w->batch = ms_add_axis(m, "batch", ROWS, LARGEST_ROWS);
    w->t[W_X] = ms_input(m, "x", MS_DTYPE_F32, w_shape(w, COLS));
    w->t[W_IDS] = ms_input(m, "ids", MS_DTYPE_I32, ms_shape1(ROWS));
    w->t[W_WEIGHT] = ms_param(m, "weight", MS_DTYPE_F32, ms_shape1(COLS));
    w->t[W_P] = ms_param(m, "p-scale", MS_DTYPE_F32, ms_shape1(COLS));
    w->t[W_Q] = ms_param(m, "q-scale", MS_DTYPE_F32, ms_shape1(COLS));
    w->t[W_RUNNING] = ms_buffer(m, "running", MS_DTYPE_F32, ms_shape1(COLS));
    w->t[W_READ_ONLY] = ms_buffer(m, "read-only", MS_DTYPE_F32, ms_shape1(COLS));
    static const name_of activations[] = {W_HIDDEN, W_GATED, W_READER, W_Y, W_Z, W_ORPHAN};
    static const char *const names[] = {"hidden", "gated", "reader-out",
                                        "y-out",  "z-out", "orphan"};
    for (int i = 0; i < 6; ++i) {
        w->t[activations[i]] = ms_activation(m, names[i], MS_DTYPE_F32, w_shape(w, COLS));
    }
    w->t[W_WIDE] = ms_activation(m, "wide", MS_DTYPE_F32, w_shape(w, 2 * COLS));
    w->t[W_INTS] = ms_activation(m, "ints", MS_DTYPE_I32, w_shape(w, COLS));
    w->t[W_HALF] = ms_activation(m, "half", MS_DTYPE_F16, w_shape(w, COLS));
    w->t[W_LOSS] = ms_activation(m, "losses", MS_DTYPE_F32, w_shape(w, 1));
    w->t[W_S] = ms_saved(m, "s-saved", MS_DTYPE_F32, w_shape(w, COLS));
    w->t[W_T] = ms_saved(m, "t-saved", MS_DTYPE_F32, w_shape(w, COLS));
    w->t[W_FIRST_SAVED] = ms_saved(m, "first-saved", MS_DTYPE_F32, w_shape(w, COLS));
    w->t[W_FOREIGN].id = 54321;
    w->t[W_GRADIENT] = ms_gradient(m, w->t[W_WEIGHT]);
    w->t[W_STATE] = ms_optimizer_state(m, w->t[W_WEIGHT], 0);
}

static ms_layer_desc w_describe(world *w, layer_of layer, const char *name) {
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    w->op[layer].of = w;
    desc.name = name;
    desc.forward = w_forward;
    desc.backward = w_backward;
    desc.user = &w->op[layer];
    return desc;
}

static void w_register(world *w, layer_of layer, const ms_layer_desc *desc) {
    w_op *op = &w->op[layer];
    op->in = t_used_slots(desc->in, MS_LIMIT_IN);
    op->out = t_used_slots(desc->out, MS_LIMIT_OUT);
    op->saved = t_used_slots(desc->saved, MS_LIMIT_SAVED);
    op->param = t_used_slots(desc->param, MS_LIMIT_PARAM);
    op->state = t_used_slots(desc->state, MS_LIMIT_STATE);
    op->acts = layer == L_SPOILED;
    w->layer[layer] = ms_register_layer(w->m, desc);
}

static void w_layers_before(world *w) {
    ms_layer_desc desc = w_describe(w, L_FIRST, "first");
    desc.in[0] = w->t[W_X];
    desc.param[0] = w->t[W_WEIGHT];
    desc.out[0] = w->t[W_HIDDEN];
    desc.saved[0] = w->t[W_FIRST_SAVED];
    w_register(w, L_FIRST, &desc);
    desc = w_describe(w, L_SECOND, "second");
    desc.in[0] = w->t[W_HIDDEN];
    desc.out[0] = w->t[W_GATED];
    w_register(w, L_SECOND, &desc);
    desc = w_describe(w, L_WIDE, "widen");
    desc.in[0] = w->t[W_HIDDEN];
    desc.out[0] = w->t[W_WIDE];
    desc.out[1] = w->t[W_INTS];
    desc.out[2] = w->t[W_HALF];
    desc.backward = NULL;
    w_register(w, L_WIDE, &desc);
    desc = w_describe(w, L_READER, "reader");
    desc.in[0] = w->t[W_HIDDEN];
    desc.in[1] = w->t[W_READ_ONLY];
    desc.out[0] = w->t[W_READER];
    w_register(w, L_READER, &desc);
    w->desc = w_describe(w, L_SPOILED, "spoiled");
    w->desc.in[0] = w->t[W_GATED];
    w->desc.in[1] = w->t[W_HIDDEN];
    w->desc.out[0] = w->t[W_Y];
    w->desc.out[1] = w->t[W_Z];
    w->desc.saved[0] = w->t[W_S];
    w->desc.saved[1] = w->t[W_T];
    w->desc.param[0] = w->t[W_P];
    w->desc.param[1] = w->t[W_Q];
    w->desc.state[0] = w->t[W_RUNNING];
}

static void w_layers_behind(world *w) {
    w_register(w, L_SPOILED, &w->desc);
    ms_layer_desc desc = w_describe(w, L_LAST, "last");
    desc.in[0] = w->t[W_Y];
    desc.in[1] = w->t[W_Z];
    desc.in[2] = w->t[W_READER];
    desc.out[0] = w->t[W_LOSS];
    w_register(w, L_LAST, &desc);
    ms_set_loss(w->m, w->t[W_LOSS]);
}

/* As far as the layer that a case may spoil. */
static void w_begin(world *w) {
    memset(w, 0, sizeof *w);
    w->config = t_config();
    w->config.allocator = t_heap_allocator(&w->heap);
}

static void w_create(world *w) {
    assert_int_equal(ms_create(&w->config, &w->m), MS_RESULT_OK);
    w_tensors(w);
    w_layers_before(w);
}

static void w_fill(world *w) {
    static const name_of names[] = {W_X, W_WEIGHT, W_P, W_Q};
    float data[LARGEST_ROWS * COLS];
    t_rng rng = t_seed(5);
    for (int i = 0; i < 4; ++i) {
        t_fill(&rng, data, LARGEST_ROWS * COLS, 1.0f);
        t_ok(w->m, ms_write(w->m, w->t[names[i]], data));
    }
}

static void w_end(world *w) {
    ms_destroy(w->m);
    if (w->heap.live_count != 0 || w->heap.wrong_releases != 0) {
        fail_msg("%u blocks of memory are left", (unsigned)w->heap.live_count);
    }
}

/* What a text must contain. A part may be a choice: "a|b". */
typedef const char *parts[4];

static bool has_part(const char *text, const char *part) {
    char choice[96];
    for (;;) {
        size_t length = strcspn(part, "|");
        assert_true(length < sizeof choice);
        memcpy(choice, part, length);
        choice[length] = 0;
        if (strstr(text, choice) != NULL) {
            return true;
        }
        if (part[length] == 0) {
            return false;
        }
        part += length + 1;
    }
}

static uint32_t faults; // of the table that runs: all its rows are tried before it fails

static void complain(const char *what, const char *how, const char *text) {
    print_error("%s: %s: \"%s\"\n", what, how, text);
    faults += 1;
}

static void check_text(const char *what, const char *text, const parts expected) {
    for (int i = 0; i < 4 && expected[i] != NULL; ++i) {
        if (!has_part(text, expected[i])) {
            char how[96];
            snprintf(how, sizeof how, "no \"%s\"", expected[i]);
            complain(what, how, text);
        }
    }
    if (text[0] == 0 || strchr(text, '\n') != NULL || strstr(text, "(null)") != NULL) {
        complain(what, "text is empty or broken", text);
    }
    if (strstr(text, "\"?\"") != NULL || strstr(text, "\"\"") != NULL) {
        complain(what, "what was passed has no name", text);
    }
    if (t_environment("TEXTS", 0) != 0) {
        printf("%-70s | %s\n", what, text);
    }
}

/* ms_wrap refuses, twice, with the same text, and nothing has been computed. */
static void check_refusal(world *w, const char *what, ms_result expected, const char *layer,
                          const parts text) {
    char first[512];
    ms_result result = ms_wrap(w->m);
    if (result != expected) {
        char how[96];
        snprintf(how, sizeof how, "%s, expected %s", ms_result_name(result),
                 ms_result_name(expected));
        complain(what, how, ms_last_error(w->m));
    }
    if (result == MS_RESULT_OK) {
        return;
    }
    snprintf(first, sizeof first, "%s", ms_last_error(w->m));
    check_text(what, first, text);
    if (layer != NULL && strstr(first, layer) == NULL) {
        complain(what, "the layer is not named", first);
    }
    const char *named = layer != NULL ? strstr(first, "layer ") : NULL;
    if (layer != NULL && (named == NULL || named[6] < '0' || named[6] > '9')) {
        complain(what, "the layer has no number", first); // many may have that name
    }
    if (ms_wrap(w->m) != result || strcmp(first, ms_last_error(w->m)) != 0) {
        complain(what, "another error at the second ms_wrap", ms_last_error(w->m));
    }
    if (ms_step(w->m, NULL) == MS_RESULT_OK || w->calls != 0) {
        complain(what, "it computes all the same", first);
    }
}

static void end_of_table(uint32_t *rows) {
    assert_true(*rows > 0);
    if (faults != 0) {
        fail_msg("%u faults in %u rows", (unsigned)faults, (unsigned)*rows);
    }
}

// ------------------------------------------------------------------------------------------------
// fields of a layer's desc: what is set in it, and what the refusal must say

typedef enum patch_kind { P_END, P_BITS, P_TENSOR, P_NUMBER, P_CALLBACK } patch_kind;

typedef struct patch {
    patch_kind kind;
    size_t offset, size;
    uint64_t value; // bits, name_of, number_of, or 1 for a callback and 0 for none
} patch;

typedef enum number_of { N_NAN, N_INFINITE, N_NEGATIVE, N_FIVE } number_of;

#define FIELD_SIZE(member) sizeof(((ms_layer_desc *)0)->member)
#define BITS(member, bits)                                                                         \
    { P_BITS, offsetof(ms_layer_desc, member), FIELD_SIZE(member), (bits) }
#define TENSOR(member, name)                                                                       \
    { P_TENSOR, offsetof(ms_layer_desc, member), 0, (uint64_t)(name) }
#define NUMBER(member, number)                                                                     \
    { P_NUMBER, offsetof(ms_layer_desc, member), 0, (uint64_t)(number) }
#define CALLBACK(member, set)                                                                      \
    { P_CALLBACK, offsetof(ms_layer_desc, member), 0, (set) }

static void apply_patch(const world *w, ms_layer_desc *desc, const patch *p) {
    static const double numbers[] = {NAN, INFINITY, -1.0, 5.0};
    static const ms_layer_fn callbacks[] = {NULL, w_forward};
    unsigned char *field = (unsigned char *)desc + p->offset;
    uint8_t of_8 = (uint8_t)p->value;
    uint16_t of_16 = (uint16_t)p->value;
    uint32_t of_32 = (uint32_t)p->value;
    switch (p->kind) {
    case P_BITS:
        memcpy(field,
               p->size == 1   ? (const void *)&of_8
               : p->size == 2 ? (const void *)&of_16
               : p->size == 4 ? (const void *)&of_32
                              : (const void *)&p->value,
               p->size);
        break;
    case P_TENSOR:
        memcpy(field, &w->t[p->value], sizeof(ms_tensor));
        break;
    case P_NUMBER:
        memcpy(field, &numbers[p->value], sizeof(double));
        break;
    case P_CALLBACK:
        memcpy(field, &callbacks[p->value], sizeof(ms_layer_fn));
        break;
    default:
        break;
    }
}

typedef struct spoiler {
    const char *what;
    patch patches[5];
    parts text;
} spoiler;

/* The base world: in {gated, hidden}, out {y-out, z-out}, saved {s-saved, t-saved}, param {p-scale,
   q-scale}, state {running}. */
static const spoiler spoilers[] = {
    // tensors
    {"no forward", {CALLBACK(forward, 0)}, {"forward"}},
    {"no output", {TENSOR(out[0], W_NONE), TENSOR(out[1], W_NONE)}, {"output"}},
    {"a param in `in`", {TENSOR(in[0], W_P)}, {"in[0]", "p-scale"}},
    {"a saved tensor in `in`", {TENSOR(in[1], W_S)}, {"in[1]", "s-saved"}},
    {"a foreign handle in `in`", {TENSOR(in[0], W_FOREIGN)}, {"in[0] is not a tensor"}},
    {"a gradient in `in`",
     {TENSOR(in[0], W_GRADIENT)},
     {"in[0] is the gradient of \"weight\" and not"}},
    {"optimizer state in `in`",
     {TENSOR(in[0], W_STATE)},
     {"in[0] is the optimizer state of \"weight\" and not"}},
    {"an input of which nobody is the producer", {TENSOR(in[0], W_ORPHAN)}, {"in[0]", "orphan"}},
    {"its own output as input", {TENSOR(in[0], W_Y)}, {"in[0]", "y-out"}},
    {"an input in `out`", {TENSOR(out[0], W_X)}, {"out[0]", "\"x\""}},
    {"a param in `out`", {TENSOR(out[1], W_Q)}, {"out[1]", "q-scale"}},
    {"a buffer in `out`", {TENSOR(out[1], W_RUNNING)}, {"out[1]", "running"}},
    {"a saved tensor in `out`", {TENSOR(out[1], W_S)}, {"out[1]", "s-saved"}},
    {"a foreign handle in `out`", {TENSOR(out[0], W_FOREIGN)}, {"out[0] is not a tensor"}},
    {"an output of another layer",
     {TENSOR(out[0], W_GATED)},
     {"out[0]", "gated", "second|already"}},
    {"one output in two slots", {TENSOR(out[1], W_Y)}, {"out[1]", "y-out"}},
    {"an activation in `saved`", {TENSOR(saved[0], W_ORPHAN)}, {"saved[0]", "orphan"}},
    {"saved by another layer", {TENSOR(saved[0], W_FIRST_SAVED)}, {"saved[0]", "first-saved"}},
    {"one saved tensor in two slots", {TENSOR(saved[1], W_S)}, {"saved[1]", "s-saved"}},
    {"a foreign handle in `saved`", {TENSOR(saved[0], W_FOREIGN)}, {"saved[0] is not a tensor"}},
    {"an activation in `param`", {TENSOR(param[0], W_HIDDEN)}, {"param[0]", "hidden"}},
    {"an input in `param`", {TENSOR(param[1], W_X)}, {"param[1]", "\"x\""}},
    {"a foreign handle in `param`", {TENSOR(param[0], W_FOREIGN)}, {"param[0] is not a tensor"}},
    {"an activation in `state`", {TENSOR(state[0], W_HIDDEN)}, {"state[0]", "hidden", "buffer"}},
    {"an input in `state`", {TENSOR(state[0], W_X)}, {"state[0]", "\"x\"", "buffer"}},
    {"a param in `state`", {TENSOR(state[0], W_P)}, {"state[0]", "p-scale", "buffer"}},
    {"a foreign handle in `state`", {TENSOR(state[0], W_FOREIGN)}, {"state[0] is not a tensor"}},
    {"one buffer in two slots of `state`", {TENSOR(state[1], W_RUNNING)}, {"state[1]", "running"}},
    {"a buffer in `in` and in `state`",
     {TENSOR(in[2], W_RUNNING)},
     {"running", "in|reads", "state"}},
    // masks
    {"backward_reads.in", {BITS(backward_reads.in, 4)}, {"backward_reads", "slot"}},
    {"backward_reads.out", {BITS(backward_reads.out, 4)}, {"backward_reads", "slot"}},
    {"backward_reads.saved", {BITS(backward_reads.saved, 0x8000)}, {"backward_reads", "slot"}},
    {"backward_reads.param", {BITS(backward_reads.param, 4)}, {"backward_reads", "slot"}},
    {"reads nothing, and an input",
     {BITS(backward_reads.in, 1), BITS(backward_reads.nothing, 1)},
     {"backward_reads", "nothing"}},
    {"recompute_reads.in",
     {CALLBACK(recompute, 1), BITS(recompute_reads.in, 4)},
     {"recompute_reads", "slot"}},
    {"recompute_reads.out",
     {CALLBACK(recompute, 1), BITS(recompute_reads.out, 4)},
     {"recompute_reads", "slot"}},
    {"recompute_reads.saved",
     {CALLBACK(recompute, 1), BITS(recompute_reads.saved, 4)},
     {"recompute_reads", "slot"}},
    {"recompute_reads.param",
     {CALLBACK(recompute, 1), BITS(recompute_reads.param, 4)},
     {"recompute_reads", "slot"}},
    {"recompute reads nothing, and a param",
     {CALLBACK(recompute, 1), BITS(recompute_reads.param, 1), BITS(recompute_reads.nothing, 1)},
     {"recompute_reads", "nothing"}},
    {"recompute_reads without recompute",
     {BITS(recompute_reads.in, 1)},
     {"recompute_reads", "recompute"}},
    {"recompute_workspace without recompute",
     {BITS(recompute_workspace.bytes, 64)},
     {"recompute_workspace", "recompute"}},
    {"accumulates.in", {BITS(accumulates.in, 4)}, {"accumulates", "slot"}},
    {"accumulates.param", {BITS(accumulates.param, 4)}, {"accumulates", "slot"}},
    {"overwrites.in", {BITS(overwrites.in, 4)}, {"overwrites", "slot"}},
    {"overwrites.param", {BITS(overwrites.param, 4)}, {"overwrites", "slot"}},
    {"one edge both accumulates and overwrites",
     {BITS(accumulates.in, 3), BITS(overwrites.in, 2)},
     {"[1]", "accumulate", "overwrite"}},
    {"one param both accumulates and overwrites",
     {BITS(accumulates.param, 2), BITS(overwrites.param, 2)},
     {"[1]", "accumulate", "overwrite"}},
    {"overwrites the gradient of halves, which the library cannot add up",
     {TENSOR(in[0], W_HALF), BITS(overwrites.in, 1)},
     {"half", "f16", "f32"}},
    {"in_place of an absent output", {BITS(in_place[2], 1)}, {"in_place", "slot"}},
    {"in_place over an absent input", {BITS(in_place[0], 4)}, {"in_place", "slot"}},
    {"grad_in_place of an absent input", {BITS(grad_in_place[2].grad_out, 1)}, {"grad_in_place"}},
    {"grad_in_place.in", {BITS(grad_in_place[0].in, 4)}, {"grad_in_place", "slot"}},
    {"grad_in_place.out", {BITS(grad_in_place[0].out, 4)}, {"grad_in_place", "slot"}},
    {"grad_in_place.saved", {BITS(grad_in_place[1].saved, 4)}, {"grad_in_place", "slot"}},
    {"grad_in_place.grad_out", {BITS(grad_in_place[1].grad_out, 4)}, {"grad_in_place", "slot"}},
    {"clobbers.in", {BITS(clobbers.in, 4)}, {"clobbers", "slot"}},
    {"clobbers.out", {BITS(clobbers.out, 4)}, {"clobbers", "slot"}},
    {"clobbers.saved", {BITS(clobbers.saved, 4)}, {"clobbers", "slot"}},
    {"clobbers.grad_out", {BITS(clobbers.grad_out, 4)}, {"clobbers", "slot"}},
    {"clobbers an input that it does not read",
     {BITS(backward_reads.in, 1), BITS(clobbers.in, 2)},
     {"clobbers", "backward_reads"}},
    {"clobbers an output that it does not read",
     {BITS(backward_reads.out, 1), BITS(clobbers.out, 2)},
     {"clobbers", "backward_reads"}},
    {"clobbers a saved tensor that it does not read",
     {BITS(backward_reads.saved, 2), BITS(clobbers.saved, 1)},
     {"clobbers", "backward_reads"}},
    {"clobbers an input, and reads nothing",
     {BITS(backward_reads.nothing, 1), BITS(clobbers.in, 1)},
     {"clobbers", "backward_reads"}},
    {"optional_saved", {BITS(optional_saved, 4)}, {"optional_saved", "slot"}},
    {"grads_in_forward of an absent input",
     {CALLBACK(backward, 0), BITS(grads_in_forward, 4)},
     {"grads_in_forward", "slot"}},
    {"grads_in_forward and a backward",
     {BITS(grads_in_forward, 1)},
     {"grads_in_forward", "backward"}},
    {"grads_in_forward and a recompute",
     {CALLBACK(backward, 0), CALLBACK(recompute, 1), BITS(grads_in_forward, 1)},
     {"grads_in_forward"}},
    // what can only be computed in place
    {"grads_in_forward, in place of a grad_out",
     {CALLBACK(backward, 0), BITS(grads_in_forward, 1), BITS(must_grad_in_place, 1),
      BITS(grad_in_place[0].grad_out, 1)},
     {"grads_in_forward", "must_grad_in_place"}},
    {"a promise to keep state, and no state",
     {TENSOR(state[0], W_NONE), BITS(recompute_keeps_state, 1)},
     {"recompute_keeps_state", "state"}},
    {"must_in_place of an absent output", {BITS(must_in_place, 4)}, {"must_in_place", "slot"}},
    {"must_in_place without in_place",
     {BITS(must_in_place, 1)},
     {"y-out|z-out", "in_place[0], 0x0, names no operand"}},
    {"must_in_place over one of two",
     {BITS(must_in_place, 2), BITS(in_place[1], 3)},
     {"y-out|z-out", "in_place[1], 0x3, names several operands"}},
    {"must_in_place over another size",
     {TENSOR(in[0], W_WIDE), BITS(must_in_place, 1), BITS(in_place[0], 1)},
     {"place", "y-out", "wide", "size|bytes"}},
    {"must_in_place over another dtype",
     {TENSOR(in[0], W_INTS), BITS(must_in_place, 1), BITS(in_place[0], 1)},
     {"place", "y-out", "ints", "dtype|i32"}},
    {"must_in_place over an absent input",
     {BITS(must_in_place, 1), BITS(in_place[0], 4)},
     {"in_place", "slot"}},
    {"two outputs in place of one input",
     {BITS(must_in_place, 3), BITS(in_place[0], 1), BITS(in_place[1], 1)},
     {"z-out", "in_place", "another|other"}},
    {"must_grad_in_place of an absent input",
     {BITS(must_grad_in_place, 4)},
     {"must_grad_in_place", "slot"}},
    {"must_grad_in_place without grad_in_place",
     {BITS(must_grad_in_place, 1)},
     {"the gradient of \"gated\"", "grad_in_place[0].grad_out, 0x0, names no operand"}},
    {"must_grad_in_place over two",
     {BITS(must_grad_in_place, 1), BITS(grad_in_place[0].grad_out, 3)},
     {"the gradient of \"gated\"", "grad_in_place[0].grad_out, 0x3, names several operands"}},
    {"must_grad_in_place over a grad_out and an input",
     {BITS(must_grad_in_place, 1), BITS(grad_in_place[0].grad_out, 1),
      BITS(grad_in_place[0].in, 1)},
     {"gated", "grad_in_place", "grad_out"}},
    {"must_grad_in_place over a saved tensor",
     {BITS(must_grad_in_place, 1), BITS(grad_in_place[0].saved, 1)},
     {"gated", "grad_in_place", "grad_out"}},
    {"must_grad_in_place over another size",
     {TENSOR(in[0], W_WIDE), BITS(must_grad_in_place, 1), BITS(grad_in_place[0].grad_out, 1)},
     {"place", "wide", "y-out", "size|bytes"}},
    {"two gradients in place of one",
     {BITS(must_grad_in_place, 3), BITS(grad_in_place[0].grad_out, 1),
      BITS(grad_in_place[1].grad_out, 1)},
     {"in_place", "gated|hidden|in[0]|in[1]"}},
    {"a gradient in place of another, that can only be added to",
     {BITS(must_grad_in_place, 1), BITS(grad_in_place[0].grad_out, 1), BITS(accumulates.in, 1)},
     {"in[0]", "accumulate", "in place|in_place"}},
    // numbers
    {"forward workspace too large",
     {BITS(forward_workspace.bytes, (uint64_t)1 << 59)},
     {"workspace"}},
    {"backward workspace too large", {BITS(backward_workspace.bytes, UINT64_MAX)}, {"workspace"}},
    {"rows of workspace too large",
     {BITS(forward_workspace.row_bytes, (uint64_t)1 << 62)},
     {"workspace"}},
    {"a sum of workspace that wraps around",
     {BITS(backward_workspace.bytes, UINT64_MAX - 63), BITS(backward_workspace.row_bytes, 64)},
     {"workspace"}},
    {"recompute workspace too large",
     {CALLBACK(recompute, 1), BITS(recompute_workspace.bytes, (uint64_t)1 << 60)},
     {"workspace"}},
    {"contents of the forward workspace", {BITS(forward_workspace.contents, 3)}, {"contents"}},
    {"contents of the backward workspace", {BITS(backward_workspace.contents, 77)}, {"contents"}},
    {"contents of the recompute workspace",
     {CALLBACK(recompute, 1), BITS(recompute_workspace.contents, 3)},
     {"contents"}},
    {"flops that are no number", {NUMBER(flops, N_NAN)}, {"flops", "nan"}},
    {"flops without an end", {NUMBER(flops, N_INFINITE)}, {"flops", "inf"}},
    {"negative flops", {NUMBER(flops, N_NEGATIVE)}, {"flops", "-1"}},
    {"recompute_flops that are no number",
     {CALLBACK(recompute, 1), NUMBER(recompute_flops, N_NAN)},
     {"recompute_flops"}},
    {"negative recompute_flops",
     {CALLBACK(recompute, 1), NUMBER(recompute_flops, N_NEGATIVE)},
     {"recompute_flops"}},
    {"no_backward and a backward", {BITS(no_backward, 1)}, {"no_backward"}},
};

static void spoiled_descs(void **state) {
    (void)state;
    uint32_t rows = 0;
    faults = 0;
    for (; rows < sizeof spoilers / sizeof spoilers[0]; ++rows) {
        const spoiler *s = &spoilers[rows];
        world w;
        w_begin(&w);
        w_create(&w);
        for (int i = 0; i < 5; ++i) {
            apply_patch(&w, &w.desc, &s->patches[i]);
        }
        w_layers_behind(&w);
        check_refusal(&w, s->what, MS_RESULT_INVALID, "\"spoiled\"", s->text);
        if (w.layer[L_SPOILED].id != 0) {
            complain(s->what, "it has a handle", ms_last_error(w.m));
        }
        w_end(&w);
    }
    end_of_table(&rows);
}

/* What looks like a spoiler and is none. */
static const spoiler honest[] = {
    {"nothing at all", {BITS(no_recompute, 0)}, {NULL}},
    {"all slots",
     {BITS(backward_reads.in, MS_ALL_SLOTS), BITS(backward_reads.param, MS_ALL_SLOTS),
      BITS(accumulates.in, MS_ALL_SLOTS), BITS(overwrites.param, MS_ALL_SLOTS)},
     {NULL}},
    {"all slots of what may be overwritten",
     {BITS(clobbers.in, MS_ALL_SLOTS), BITS(clobbers.grad_out, MS_ALL_SLOTS),
      BITS(optional_saved, MS_ALL_SLOTS), BITS(grad_in_place[1].grad_out, MS_ALL_SLOTS)},
     {NULL}},
    {"an empty slot in front", {TENSOR(in[0], W_NONE), TENSOR(param[0], W_NONE)}, {NULL}},
    {"one tensor in two slots of `in`", {TENSOR(in[0], W_HIDDEN)}, {NULL}},
    {"a name of NULL", {BITS(name, 0)}, {NULL}},
    {"a recompute where forward runs once",
     {CALLBACK(recompute, 1), BITS(no_recompute, 1)},
     {NULL}},
    {"a recompute that reads nothing",
     {CALLBACK(recompute, 1), BITS(recompute_reads.nothing, 1)},
     {NULL}},
    {"flops of recompute", {CALLBACK(recompute, 1), NUMBER(recompute_flops, N_FIVE)}, {NULL}},
    {"two buffers of state", {TENSOR(state[1], W_NONE)}, {NULL}},
    {"must_in_place", {BITS(must_in_place, 3), BITS(in_place[0], 1), BITS(in_place[1], 2)}, {NULL}},
    {"in_place over another size, where it may",
     {TENSOR(in[0], W_WIDE), BITS(in_place[0], 3)},
     {NULL}},
};

static void honest_descs(void **state) {
    (void)state;
    for (uint32_t i = 0; i < sizeof honest / sizeof honest[0]; ++i) {
        world w;
        w_begin(&w);
        w_create(&w);
        for (int k = 0; k < 5; ++k) {
            apply_patch(&w, &w.desc, &honest[i].patches[k]);
        }
        w_layers_behind(&w);
        ms_result result = ms_wrap(w.m);
        if (result != MS_RESULT_OK) {
            fail_msg("%s: %s", honest[i].what, ms_last_error(w.m));
        }
        w_end(&w);
    }
}

// ------------------------------------------------------------------------------------------------
// configs and arenas: no model, and the one text that there is without a model

typedef void (*config_fn)(ms_config *config);

static void bad_utilization(ms_config *c) {
    c->target_utilization = 1.25;
}

static void negative_utilization(ms_config *c) {
    c->target_utilization = -0.1;
}

static void nan_utilization(ms_config *c) {
    c->target_utilization = NAN;
}

static void bad_checkpointing(ms_config *c) {
    c->checkpointing = (ms_switch)3;
}

static void bad_early_update(ms_config *c) {
    c->early_update = (ms_switch)3;
}

static void half_an_allocator(ms_config *c) {
    c->allocator.release = NULL;
}

static void other_half_of_an_allocator(ms_config *c) {
    c->allocator.alloc = NULL;
}

static void old_backend(ms_config *c) {
    c->backend = ms_backend_cpu();
    c->backend.size -= 8;
}

static void backend_without_memory(ms_config *c) {
    c->backend = ms_backend_cpu();
    c->backend.memory_alloc = NULL;
}

static void backend_without_name(ms_config *c) {
    c->backend = ms_backend_cpu();
    c->backend.name = NULL;
}

static void backend_without_add(ms_config *c) {
    c->backend = ms_backend_cpu();
    c->backend.add = NULL;
}

static void backend_without_norm(ms_config *c) {
    c->backend = ms_backend_cpu();
    c->backend.add_squares = NULL;
}

static void backend_without_clip(ms_config *c) {
    c->backend = ms_backend_cpu();
    c->backend.clip_scale = NULL;
}

static void backend_without_update(ms_config *c) {
    c->backend = ms_backend_cpu();
    c->backend.update = NULL;
}

/* Copies are enqueued, and nothing can wait for them: each function is missing once. */
static void streams_without(ms_config *c, int function, bool asynchronous) {
    c->backend = ms_backend_cpu();
    assert_true(c->backend.has_copy_streams);
    c->backend.is_asynchronous = asynchronous;
    c->backend.has_copy_streams = !asynchronous;
    c->backend.synchronize = function == 0 ? NULL : c->backend.synchronize;
    c->backend.record = function == 1 ? NULL : c->backend.record;
    c->backend.wait = function == 2 ? NULL : c->backend.wait;
    c->backend.wait_on_host = function == 3 ? NULL : c->backend.wait_on_host;
}

static int opens_another(void *user, const ms_open_args *args, void **state) {
    (void)args;
    *state = user;
    return 0;
}

static void closes_another(void *state) {
    (void)state;
}

/* One function of the CPU backend that needs its state is left in a table that opens another. */
static void state_of_another(ms_config *c, int function) {
    const ms_backend cpu = ms_backend_cpu();
    c->backend = t_backend_without_state();
    c->backend.open = function % 2 == 0 ? opens_another : NULL;
    c->backend.close = function % 2 == 0 ? closes_another : NULL;
    c->backend.prepare = function / 2 == 0 ? cpu.prepare : NULL;
    c->backend.copy_in = function / 2 == 1 ? cpu.copy_in : cpu.copy;
    c->backend.copy_out = function / 2 == 2 ? cpu.copy_out : cpu.copy;
    c->backend.has_copy_streams = function / 2 == 3;
}

static void expect_bad_backend(world *w, const char *text) {
    w->m = (ms_model *)w;
    assert_int_equal(ms_create(&w->config, &w->m), MS_RESULT_INVALID);
    t_text_has(ms_last_error(w->m), text);
    t_not_created(&w->m, MS_RESULT_INVALID);
    assert_true(w->heap.live_count == 0);
}

static void bad_copy_streams(void **state) {
    (void)state;
    for (int function = 0; function < 8; ++function) {
        world w;
        w_begin(&w);
        streams_without(&w.config, function / 2, function % 2 != 0);
        expect_bad_backend(&w, "a function is missing");
        w_begin(&w);
        state_of_another(&w.config, function);
        expect_bad_backend(&w, "open is not that of ms_backend_cpu()");
    }
    world w;
    w_begin(&w);
    w.config.backend = t_backend_without_state();
    w.config.backend.open = opens_another;
    w.config.backend.close = closes_another;
    assert_int_equal(ms_create(&w.config, &w.m), MS_RESULT_OK);
    ms_destroy(w.m);
}

static void bad_configs(void **state) {
    (void)state;
    static const config_fn all[] = {bad_utilization,
                                    negative_utilization,
                                    nan_utilization,
                                    bad_checkpointing,
                                    bad_early_update,
                                    half_an_allocator,
                                    other_half_of_an_allocator,
                                    old_backend,
                                    backend_without_memory,
                                    backend_without_name,
                                    backend_without_add,
                                    backend_without_norm,
                                    backend_without_clip,
                                    backend_without_update};
    for (uint32_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        world w;
        w_begin(&w);
        all[i](&w.config);
        w.m = (ms_model *)&w;
        if (ms_create(&w.config, &w.m) != MS_RESULT_INVALID) {
            fail_msg("config %u is accepted", (unsigned)i);
        }
        assert_non_null(w.m);
        t_not_created(&w.m, MS_RESULT_INVALID);
        assert_true(w.heap.live_count == 0);
    }
    assert_int_equal(ms_create(NULL, NULL), MS_RESULT_INVALID);
    assert_true(strlen(ms_last_error(NULL)) > 20);
}

static void keep_error(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)tag;
    if (level == MS_LOG_ERROR) {
        snprintf((char *)user, 256, "%s", text);
    }
}

/* A log knows why there is no model. */
static void a_wrong_config_is_explained(void **state) {
    (void)state;
    ms_model *m;
    char text[256] = "";
    ms_config config = t_config();
    config.log = keep_error;
    config.log_user = text;
    config.target_utilization = 1.5;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_INVALID);
    t_text_has(text, "target_utilization");
    t_text_has(ms_last_error(m), "target_utilization");
    t_text_has(ms_last_error(m), "(it is 1.5)");
    ms_destroy(m);
}

static void bad_arenas(void **state) {
    (void)state;
    t_heap heap;
    memset(&heap, 0, sizeof heap);
    ms_allocator allocator = t_heap_allocator(&heap);
    ms_backend backend = ms_backend_cpu();
    ms_arena *arena = (ms_arena *)&heap;
    assert_int_equal(ms_arena_create(NULL, NULL, NULL), MS_RESULT_INVALID);
    backend.size = 8;
    assert_int_equal(ms_arena_create(&backend, &allocator, &arena), MS_RESULT_INVALID);
    assert_null(arena);
    allocator.release = NULL;
    assert_int_equal(ms_arena_create(NULL, &allocator, &arena), MS_RESULT_INVALID);
    assert_null(arena);
    assert_true(ms_arena_bytes(NULL) == 0);
    ms_arena_destroy(NULL);
    allocator = t_heap_allocator(&heap);
    heap.fail_at = heap.calls + 1;
    assert_int_equal(ms_arena_create(NULL, &allocator, &arena), MS_RESULT_OUT_OF_MEMORY);
    assert_null(arena);
    assert_true(heap.live_count == 0);
}

/* An arena of one backend does not fit a model of another. */
static void an_arena_of_another_backend(void **state) {
    (void)state;
    t_device device;
    ms_arena *arena = NULL;
    ms_backend counting = t_device_backend(&device);
    assert_int_equal(ms_arena_create(&counting, NULL, &arena), MS_RESULT_OK);
    world w;
    w_begin(&w);
    w.config.arena = arena;
    ms_result result = ms_create(&w.config, &w.m);
    if (result == MS_RESULT_OK) {
        w_tensors(&w);
        w_layers_before(&w);
        w_layers_behind(&w);
        result = ms_wrap(w.m);
        t_text_has(ms_last_error(w.m), "arena");
    }
    assert_int_equal(result, MS_RESULT_INVALID);
    w_end(&w);
    ms_arena_destroy(arena);
    assert_true(device.live_count == 0);
}

// ------------------------------------------------------------------------------------------------
// everything else that is registered

typedef enum stage { BEFORE_CREATE, BEFORE_LAYERS, BEFORE_WRAP } stage;

typedef struct misuse {
    const char *what;
    stage at;
    act_fn act;
    ms_result expected; // of ms_wrap
    parts text;
} misuse;

static ms_result none_is(ms_tensor tensor) {
    assert_int_equal(tensor.id, 0);
    return MS_RESULT_OK;
}

static ms_result bad_dtype(world *w) {
    return none_is(ms_input(w->m, "odd", MS_DTYPE_COUNT, ms_shape1(4)));
}

static ms_result empty_shape(world *w) {
    return none_is(ms_activation(w->m, "empty", MS_DTYPE_F32, ms_shape2(4, 0)));
}

static ms_result negative_shape(world *w) {
    return none_is(ms_saved(w->m, "minus", MS_DTYPE_F32, ms_shape2(-3, 4)));
}

static ms_result rank_seven(world *w) {
    ms_shape shape = ms_shape1(4);
    shape.rank = 7;
    return none_is(ms_buffer(w->m, "deep", MS_DTYPE_F32, shape));
}

static ms_result rank_negative(world *w) {
    ms_shape shape = ms_shape1(4);
    shape.rank = -1;
    return none_is(ms_buffer(w->m, "hollow", MS_DTYPE_F32, shape));
}

static ms_result huge_tensor(world *w) {
    int64_t side = (int64_t)1 << 30;
    return none_is(ms_input(w->m, "huge", MS_DTYPE_F64, ms_shape3(side, side, 2)));
}

/* Each of them is small enough. */
static ms_result many_huge_tensors(world *w) {
    for (int i = 0; i < 512; ++i) {
        ms_input(w->m, "vast", MS_DTYPE_U8, ms_shape1((int64_t)1 << 55));
    }
    return MS_RESULT_OK;
}

static ms_result integer_param(world *w) {
    return ms_param(w->m, "counts", MS_DTYPE_I32, ms_shape1(4)).id ? MS_RESULT_OK
                                                                   : MS_RESULT_INVALID;
}

static ms_result half_param(world *w) {
    return ms_param(w->m, "half", MS_DTYPE_F16, ms_shape1(4)).id ? MS_RESULT_OK : MS_RESULT_INVALID;
}

static ms_result frozen_half_param(world *w) {
    const ms_tensor half = ms_param(w->m, "half", MS_DTYPE_F16, ms_shape1(4));
    ms_set_frozen(w->m, half, true);
    ms_set_frozen(w->m, half, false);
    return MS_RESULT_OK;
}

static ms_result axis_of_zero(world *w) {
    assert_int_equal(ms_add_axis(w->m, "time", 0, 8).id, 0);
    return MS_RESULT_OK;
}

static ms_result axis_beyond_its_largest(world *w) {
    assert_int_equal(ms_add_axis(w->m, "time", 9, 8).id, 0);
    return MS_RESULT_OK;
}

static ms_result nine_axes(world *w) {
    for (int i = 1; i < MS_LIMIT_AXES; ++i) {
        assert_true(ms_add_axis(w->m, "more", 2, 2).id != 0);
    }
    assert_int_equal(ms_add_axis(w->m, "ninth", 2, 2).id, 0);
    return MS_RESULT_OK;
}

static ms_result axis_that_does_not_divide(world *w) {
    ms_shape shape = ms_along(ms_shape2(6, 8), 0, w->batch);
    return none_is(ms_input(w->m, "uneven", MS_DTYPE_F32, shape));
}

static ms_result axes_that_do_not_divide(world *w) {
    ms_axis time = ms_add_axis(w->m, "time", 6, 6); // 12 is a multiple of each, not of both
    ms_shape shape = ms_along(ms_along(ms_shape2(12, 8), 0, w->batch), 0, time);
    return none_is(ms_input(w->m, "uneven", MS_DTYPE_F32, shape));
}

static ms_result dim_that_is_not_there(world *w) {
    ms_shape shape = ms_along(ms_shape2(4, 8), 2, w->batch);
    return none_is(ms_input(w->m, "flat", MS_DTYPE_F32, shape));
}

static ms_result negative_dim(world *w) {
    ms_shape shape = ms_along(ms_shape2(4, 8), -1, w->batch);
    return none_is(ms_input(w->m, "flat", MS_DTYPE_F32, shape));
}

static ms_result axis_zero(world *w) {
    const ms_axis none = {0};
    ms_shape shape = ms_along(ms_shape2(4, 8), 0, none);
    return none_is(ms_input(w->m, "loose", MS_DTYPE_F32, shape));
}

static ms_result axis_of_another_model(world *w) {
    const ms_axis foreign = {7};
    ms_shape shape = ms_along(ms_shape2(4, 8), 0, foreign);
    return none_is(ms_input(w->m, "loose", MS_DTYPE_F32, shape));
}

static ms_result axis_beyond_all(world *w) {
    const ms_axis foreign = {12345};
    ms_shape shape = ms_along(ms_shape2(4, 8), 1, foreign);
    return none_is(ms_input(w->m, "loose", MS_DTYPE_F32, shape));
}

static ms_result param_along_an_axis(world *w) {
    return none_is(ms_param(w->m, "growing", MS_DTYPE_F32, w_shape(w, COLS)));
}

static ms_result axis_that_grows_too_large(world *w) {
    ms_axis wild = ms_add_axis(w->m, "wild", 1, (int64_t)1 << 60);
    assert_true(wild.id != 0);
    ms_shape shape = ms_along(ms_shape2(16, 8), 0, wild);
    return none_is(ms_input(w->m, "balloon", MS_DTYPE_F32, shape));
}

static ms_result host_activation(world *w) {
    ms_set_on_host(w->m, w->t[W_HIDDEN]);
    return MS_RESULT_OK;
}

static ms_result host_param(world *w) {
    ms_set_on_host(w->m, w->t[W_P]);
    return MS_RESULT_OK;
}

static ms_result host_saved(world *w) {
    ms_set_on_host(w->m, w->t[W_S]);
    return MS_RESULT_OK;
}

static ms_result host_foreign(world *w) {
    ms_set_on_host(w->m, w->t[W_FOREIGN]);
    return MS_RESULT_OK;
}

static ms_result host_gradient(world *w) {
    ms_set_on_host(w->m, w->t[W_GRADIENT]);
    return MS_RESULT_OK;
}

static ms_result stop_param(world *w) {
    ms_stop_gradient(w->m, w->t[W_P]);
    return MS_RESULT_OK;
}

static ms_result stop_input(world *w) {
    ms_stop_gradient(w->m, w->t[W_X]);
    return MS_RESULT_OK;
}

static ms_result stop_nothing(world *w) {
    ms_stop_gradient(w->m, w->t[W_NONE]);
    return MS_RESULT_OK;
}

static ms_result stop_the_loss(world *w) {
    ms_stop_gradient(w->m, w->t[W_LOSS]);
    return MS_RESULT_OK;
}

static float lent[64];

static ms_result borrow(world *w, name_of name, void *memory) {
    ms_result result = ms_borrow(w->m, w->t[name], memory);
    assert_int_equal(result, MS_RESULT_INVALID);
    return result;
}

static ms_result borrow_activation(world *w) {
    return borrow(w, W_HIDDEN, lent);
}

static ms_result borrow_saved(world *w) {
    return borrow(w, W_S, lent);
}

static ms_result borrow_null(world *w) {
    return borrow(w, W_P, NULL);
}

static ms_result borrow_foreign(world *w) {
    return borrow(w, W_FOREIGN, lent);
}

static ms_result borrow_nothing(world *w) {
    return borrow(w, W_NONE, lent);
}

static ms_result borrow_gradient_of_activation(world *w) {
    ms_result result = ms_borrow(w->m, ms_gradient(w->m, w->t[W_HIDDEN]), lent);
    assert_int_equal(result, MS_RESULT_INVALID);
    return result;
}

static ms_result loss_of_none(world *w) {
    ms_set_loss(w->m, w->t[W_NONE]);
    return MS_RESULT_OK;
}

static ms_result loss_of_a_foreigner(world *w) {
    ms_set_loss(w->m, w->t[W_FOREIGN]);
    return MS_RESULT_OK;
}

static ms_result loss_of_integers(world *w) {
    ms_set_loss(w->m, w->t[W_INTS]);
    return MS_RESULT_OK;
}

static ms_result loss_of_an_orphan(world *w) {
    ms_set_loss(w->m, w->t[W_ORPHAN]);
    return MS_RESULT_OK;
}

static ms_result loss_of_a_param(world *w) {
    ms_set_loss(w->m, w->t[W_P]);
    return MS_RESULT_OK;
}

static ms_result loss_without_backward(world *w) {
    ms_set_loss(w->m, w->t[W_WIDE]);
    return MS_RESULT_OK;
}

static ms_result output_of_a_param(world *w) {
    ms_add_output(w->m, w->t[W_P]);
    return MS_RESULT_OK;
}

static ms_result output_of_saved(world *w) {
    ms_add_output(w->m, w->t[W_S]);
    return MS_RESULT_OK;
}

static ms_result output_of_a_gradient(world *w) {
    ms_add_output(w->m, ms_gradient(w->m, w->t[W_HIDDEN]));
    return MS_RESULT_OK;
}

static ms_result eval_output_of_an_input(world *w) {
    ms_add_eval_output(w->m, w->t[W_X]);
    return MS_RESULT_OK;
}

static ms_result eval_output_of_an_orphan(world *w) {
    ms_add_eval_output(w->m, w->t[W_ORPHAN]);
    return MS_RESULT_OK;
}

static ms_result optimize(world *w, const ms_optimizer_desc *desc) {
    ms_set_optimizer(w->m, desc);
    return MS_RESULT_OK;
}

static ms_optimizer_desc optimizer(ms_optimizer_kind kind) {
    ms_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = kind;
    return desc;
}

static int no_update(const ms_update_args *args) {
    (void)args;
    return 0;
}

static ms_result optimizer_of_null(world *w) {
    return optimize(w, NULL);
}

static ms_result optimizer_out_of_range(world *w) {
    int beyond = MS_OPTIMIZER_COUNT;
    ms_optimizer_desc desc = optimizer((ms_optimizer_kind)beyond);
    return optimize(w, &desc);
}

static ms_result beta_of_one(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_ADAMW);
    desc.beta2 = 1.0f;
    return optimize(w, &desc);
}

static ms_result negative_beta(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_ADAMW);
    desc.beta1 = -0.1f;
    return optimize(w, &desc);
}

static ms_result momentum_of_one(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_SGD);
    desc.momentum = 1.0f;
    return optimize(w, &desc);
}

static ms_result another_count(world *w) {
    ms_set_accumulation(w->m, 3);
    return ms_wrap(w->m);
}

static ms_result epsilon_of_zero(world *w) {
    ms_optimizer_desc desc = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
    desc.epsilon = 0.0f;
    return optimize(w, &desc);
}

static ms_result negative_epsilon(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_ADAMW);
    desc.epsilon = -0.5f;
    return optimize(w, &desc);
}

static ms_result rate_that_is_no_number(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_SGD);
    desc.learning_rate = NAN;
    return optimize(w, &desc);
}

static ms_result decay_without_an_end(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_SGD);
    desc.weight_decay = INFINITY;
    return optimize(w, &desc);
}

static ms_result negative_clip(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_SGD);
    desc.grad_clip_norm = -1.0f;
    return optimize(w, &desc);
}

static ms_result clip_that_is_no_number(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_SGD);
    desc.grad_clip_norm = NAN;
    return optimize(w, &desc);
}

static ms_result custom_without_update(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_CUSTOM);
    return optimize(w, &desc);
}

static ms_result custom_with_five_states(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_CUSTOM);
    desc.update = no_update;
    desc.state_count = MS_LIMIT_OPTIMIZER_STATE + 1;
    return optimize(w, &desc);
}

static ms_result update_of_adamw(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_ADAMW);
    desc.update = no_update;
    return optimize(w, &desc);
}

static ms_result states_of_sgd(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_SGD);
    desc.state_count = 2;
    return optimize(w, &desc);
}

static ms_result nan_rate(world *w) {
    ms_set_learning_rate(w->m, NAN);
    return MS_RESULT_INVALID;
}

static ms_result nan_decay(world *w) {
    ms_set_weight_decay(w->m, w->t[W_P], NAN);
    return MS_RESULT_INVALID;
}

static ms_result decay_of_an_activation(world *w) {
    ms_set_weight_decay(w->m, w->t[W_HIDDEN], 0.1f);
    return MS_RESULT_INVALID;
}

static ms_result freeze_an_input(world *w) {
    ms_set_frozen(w->m, w->t[W_X], true);
    return MS_RESULT_INVALID;
}

static ms_result freeze_a_foreigner(world *w) {
    ms_set_frozen(w->m, w->t[W_FOREIGN], true);
    return MS_RESULT_INVALID;
}

static ms_result infinite_factor(world *w) {
    ms_set_loss_factor(w->m, INFINITY);
    return MS_RESULT_INVALID;
}

static ms_result refuse(world *w) {
    ms_refuse(w->m, "the tokenizer has 50257 entries, the model 50304");
    return MS_RESULT_OK;
}

// techniques

static ms_result tensor_technique(world *w, name_of name, ms_technique technique, ms_switch force) {
    ms_set_tensor_technique(w->m, w->t[name], technique, force);
    return MS_RESULT_INVALID;
}

static ms_result layer_technique(world *w, layer_of layer, ms_technique technique) {
    ms_set_layer_technique(w->m, w->layer[layer], technique, MS_SWITCH_ON);
    return MS_RESULT_INVALID;
}

static ms_result technique_out_of_range(world *w) {
    return tensor_technique(w, W_HIDDEN, MS_TECHNIQUE_COUNT, MS_SWITCH_ON);
}

static ms_result switch_out_of_range(world *w) {
    return tensor_technique(w, W_HIDDEN, MS_TECHNIQUE_CHECKPOINTING, (ms_switch)3);
}

static ms_result checkpoint_an_input(world *w) {
    return tensor_technique(w, W_X, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
}

static ms_result checkpoint_a_param(world *w) {
    return tensor_technique(w, W_P, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
}

static ms_result checkpoint_a_foreigner(world *w) {
    return tensor_technique(w, W_FOREIGN, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
}

static ms_result update_an_activation_early(world *w) {
    return tensor_technique(w, W_HIDDEN, MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
}

static ms_result technique_of_no_layer(world *w) {
    const ms_layer none = {0};
    ms_set_layer_technique(w->m, none, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
    return MS_RESULT_INVALID;
}

static ms_result technique_of_a_foreign_layer(world *w) {
    const ms_layer foreign = {99};
    ms_set_layer_technique(w->m, foreign, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
    return MS_RESULT_INVALID;
}

static ms_result layer_technique_out_of_range(world *w) {
    int below = -1;
    return layer_technique(w, L_FIRST, (ms_technique)below);
}

static ms_result force_the_loss(world *w) {
    return tensor_technique(w, W_LOSS, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
}

static ms_result force_the_layer_of_the_loss(world *w) {
    return layer_technique(w, L_LAST, MS_TECHNIQUE_CHECKPOINTING);
}

static ms_result offload_state(world *w) {
    return tensor_technique(w, W_RUNNING, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
}

static ms_result offload_what_is_on_the_host(world *w) {
    ms_set_on_host(w->m, w->t[W_READ_ONLY]);
    return tensor_technique(w, W_READ_ONLY, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
}

static ms_result force_a_kept_output(world *w) {
    ms_add_output(w->m, w->t[W_GATED]);
    return tensor_technique(w, W_GATED, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
}

static ms_result runs_once(world *w) {
    w->desc.no_recompute = true;
    return MS_RESULT_OK;
}

static ms_result recomputes_from_its_output(world *w) {
    w->desc.recompute = w_forward;
    w->desc.no_recompute = true;
    w->desc.recompute_reads.in = 3;
    w->desc.recompute_reads.saved = 2;
    return MS_RESULT_OK;
}

static ms_result force_what_runs_once(world *w) {
    return layer_technique(w, L_SPOILED, MS_TECHNIQUE_CHECKPOINTING);
}

static ms_result force_what_recompute_reads(world *w) {
    return tensor_technique(w, W_T, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
}

static ms_result force_saved_that_runs_once(world *w) {
    return tensor_technique(w, W_S, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
}

static ms_result early_with_clipping(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_SGD);
    desc.grad_clip_norm = 1.0f;
    ms_set_optimizer(w->m, &desc);
    return tensor_technique(w, W_P, MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
}

static ms_result early_with_accumulation(world *w) {
    ms_set_accumulation(w->m, 4);
    return layer_technique(w, L_SPOILED, MS_TECHNIQUE_EARLY_UPDATE);
}

static ms_result early_without_an_update(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_NONE);
    ms_set_optimizer(w->m, &desc);
    return tensor_technique(w, W_P, MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
}

static ms_result always_early(world *w) {
    w->config.early_update = MS_SWITCH_ON;
    return MS_RESULT_OK;
}

static ms_result always_early_and_accumulating(world *w) {
    w->config.early_update = MS_SWITCH_ON;
    w->config.accumulation_steps = 2;
    return MS_RESULT_OK;
}

static ms_result clip(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_ADAMW);
    desc.grad_clip_norm = 0.5f;
    return optimize(w, &desc);
}

static ms_result accumulate(world *w) {
    ms_set_accumulation(w->m, 3);
    return MS_RESULT_OK;
}

// the graph as a whole

static ms_result second_producer(world *w) {
    ms_layer_desc desc = w_describe(w, L_SECOND, "rival");
    desc.in[0] = w->t[W_HIDDEN];
    desc.out[0] = w->t[W_GATED];
    assert_int_equal(ms_register_layer(w->m, &desc).id, 0);
    return MS_RESULT_OK;
}

static ms_result desc_of_null(world *w) {
    assert_int_equal(ms_register_layer(w->m, NULL).id, 0);
    return MS_RESULT_OK;
}

/* "reader" reads the buffer read-only; a later layer changes it. */
static ms_result buffer_changed_behind_its_reader(world *w) {
    ms_layer_desc desc = w_describe(w, L_SECOND, "changer");
    desc.in[0] = w->t[W_GATED];
    desc.out[0] = w->t[W_ORPHAN];
    desc.state[0] = w->t[W_READ_ONLY];
    ms_register_layer(w->m, &desc);
    return MS_RESULT_OK;
}

/* A layer whose backward destroys an input that stays on the host. */
static ms_result host_tensor_that_is_destroyed(world *w) {
    ms_layer_desc desc = w_describe(w, L_SECOND, "spoiler");
    desc.in[0] = w->t[W_X];
    desc.out[0] = w->t[W_ORPHAN];
    desc.clobbers.in = 1;
    ms_set_on_host(w->m, w->t[W_X]);
    ms_register_layer(w->m, &desc);
    return MS_RESULT_OK;
}

static ms_result reader_behind_the_gradient_in_forward(world *w) {
    w->desc.backward = NULL;
    w->desc.grads_in_forward = 1;
    return MS_RESULT_OK;
}

/* "sideways" has the size of the base world's activations, now and at the most, along another axis;
   it must be computed in the place of gated, or the gradient of gated in the place of its own. */
static void sideways_out(world *w) {
    ms_axis steps = ms_add_axis(w->m, "steps", ROWS, LARGEST_ROWS);
    w->t[W_Y] =
        ms_activation(w->m, "sideways", MS_DTYPE_F32, ms_along(ms_shape2(ROWS, COLS), 0, steps));
    w->desc.out[0] = w->t[W_Y];
}

static ms_result in_place_along_another_axis(world *w) {
    sideways_out(w);
    w->desc.in_place[0] = 1;
    w->desc.must_in_place = 1;
    return MS_RESULT_OK;
}

static ms_result gradient_in_place_along_another_axis(world *w) {
    sideways_out(w);
    w->desc.grad_in_place[0].grad_out = 1;
    w->desc.must_grad_in_place = 1;
    return MS_RESULT_OK;
}

/* Along one axis in one of them, along it twice in the other: equal at this size. */
static ms_result in_place_along_an_axis_twice(world *w) {
    ms_shape shape = ms_along(ms_along(ms_shape2(ROWS, COLS), 0, w->batch), 1, w->batch);
    w->t[W_Y] = ms_activation(w->m, "sideways", MS_DTYPE_F32, shape);
    w->desc.out[0] = w->t[W_Y];
    w->desc.in_place[0] = 1;
    w->desc.must_in_place = 1;
    return MS_RESULT_OK;
}

static ms_result plan_without_callbacks(world *w) {
    w->desc.forward = NULL;
    w->desc.backward = NULL;
    return MS_RESULT_OK;
}

static ms_result no_budget(world *w) {
    w->config.memory_budget_bytes = 1;
    return MS_RESULT_OK;
}

static ms_result want(world *w, name_of tensor) {
    ms_want_gradient(w->m, w->t[tensor]);
    return MS_RESULT_OK;
}

static ms_result want_of_nothing(world *w) {
    return want(w, W_NONE);
}

static ms_result want_of_a_param(world *w) {
    return want(w, W_P);
}

static ms_result want_of_saved(world *w) {
    return want(w, W_S);
}

static ms_result want_of_integers(world *w) {
    return want(w, W_INTS);
}

static ms_result want_of_state(world *w) {
    return want(w, W_RUNNING);
}

static ms_result want_what_leads_nowhere(world *w) {
    return want(w, W_WIDE);
}

static ms_result want_what_is_stopped(world *w) {
    ms_stop_gradient(w->m, w->t[W_GATED]);
    return want(w, W_GATED);
}

static ms_result stop_what_is_wanted(world *w) {
    (void)want(w, W_GATED);
    ms_stop_gradient(w->m, w->t[W_GATED]);
    return MS_RESULT_OK;
}

#define BAD MS_RESULT_INVALID

static const misuse registrations[] = {
    {"dtype", BEFORE_WRAP, bad_dtype, BAD, {"odd", "dtype"}},
    {"a dim of 0", BEFORE_WRAP, empty_shape, BAD, {"empty", "dim"}},
    {"a negative dim", BEFORE_WRAP, negative_shape, BAD, {"minus", "dim"}},
    {"rank 7", BEFORE_WRAP, rank_seven, BAD, {"deep", "rank", "7", "6"}},
    {"rank -1", BEFORE_WRAP, rank_negative, BAD, {"hollow", "rank", "-1"}},
    {"a huge tensor", BEFORE_WRAP, huge_tensor, BAD, {"huge", "2^58"}},
    {"many huge tensors", BEFORE_WRAP, many_huge_tensors, BAD, {"2^58"}},
    {"a param of integers",
     BEFORE_WRAP,
     integer_param,
     MS_RESULT_UNSUPPORTED,
     {"\"counts\" has dtype i32", "ms_set_frozen"}},
    {"a param of halves",
     BEFORE_WRAP,
     half_param,
     MS_RESULT_UNSUPPORTED,
     {"\"half\" has dtype f16", "ms_set_frozen"}},
    {"a param of halves that is to be trained",
     BEFORE_WRAP,
     frozen_half_param,
     MS_RESULT_UNSUPPORTED,
     {"ms_set_frozen: param \"half\" has dtype f16", "f32"}},
    {"an axis of size 0", BEFORE_WRAP, axis_of_zero, BAD, {"time", "0", "8"}},
    {"an axis beyond its largest", BEFORE_WRAP, axis_beyond_its_largest, BAD, {"time", "9", "8"}},
    {"nine axes", BEFORE_WRAP, nine_axes, BAD, {"ninth", "8"}},
    {"an axis that does not divide",
     BEFORE_WRAP,
     axis_that_does_not_divide,
     BAD,
     {"uneven", "batch|axis", "6", "4"}},
    {"axes that do not divide",
     BEFORE_WRAP,
     axes_that_do_not_divide,
     BAD,
     {"uneven", "batch|time|axes|axis", "12"}},
    {"a dim that is not there along an axis",
     BEFORE_WRAP,
     dim_that_is_not_there,
     BAD,
     {"flat", "ms_along|axis"}},
    {"dim -1 along an axis", BEFORE_WRAP, negative_dim, BAD, {"flat", "ms_along|axis"}},
    {"along the axis 0", BEFORE_WRAP, axis_zero, BAD, {"loose", "ms_along|axis"}},
    {"along an axis that is not there",
     BEFORE_WRAP,
     axis_of_another_model,
     BAD,
     {"loose", "axis|ms_along"}},
    {"along an axis out of range", BEFORE_WRAP, axis_beyond_all, BAD, {"loose", "axis|ms_along"}},
    {"a param along an axis", BEFORE_WRAP, param_along_an_axis, BAD, {"growing", "axis"}},
    {"too large at the largest size", BEFORE_WRAP, axis_that_grows_too_large, BAD, {"balloon"}},
    {"an activation on the host",
     BEFORE_WRAP,
     host_activation,
     BAD,
     {"ms_set_on_host", "hidden", "input"}},
    {"a param on the host", BEFORE_WRAP, host_param, BAD, {"ms_set_on_host", "p-scale"}},
    {"a saved tensor on the host", BEFORE_WRAP, host_saved, BAD, {"ms_set_on_host", "s-saved"}},
    {"a foreign handle on the host",
     BEFORE_WRAP,
     host_foreign,
     BAD,
     {"ms_set_on_host: an unknown handle is not an input"}},
    {"a gradient on the host",
     BEFORE_WRAP,
     host_gradient,
     BAD,
     {"ms_set_on_host: the gradient of \"weight\" is not an input"}},
    {"no gradient of a param",
     BEFORE_WRAP,
     stop_param,
     BAD,
     {"ms_stop_gradient", "p-scale", "activation|frozen"}},
    {"no gradient of an input", BEFORE_WRAP, stop_input, BAD, {"ms_stop_gradient", "\"x\""}},
    {"no gradient of nothing",
     BEFORE_WRAP,
     stop_nothing,
     BAD,
     {"ms_stop_gradient: an empty handle (id 0) is not an activation"}},
    {"no gradient of the loss", BEFORE_WRAP, stop_the_loss, BAD, {"losses", "stop|gradient"}},
    {"a borrowed activation", BEFORE_WRAP, borrow_activation, BAD, {"ms_borrow", "hidden"}},
    {"a borrowed saved tensor", BEFORE_WRAP, borrow_saved, BAD, {"ms_borrow", "s-saved"}},
    {"NULL borrowed", BEFORE_WRAP, borrow_null, BAD, {"ms_borrow", "p-scale", "NULL"}},
    {"a foreign handle borrowed",
     BEFORE_WRAP,
     borrow_foreign,
     BAD,
     {"ms_borrow: an unknown handle is not a tensor"}},
    {"nothing borrowed",
     BEFORE_WRAP,
     borrow_nothing,
     BAD,
     {"ms_borrow: an empty handle (id 0) is not a tensor"}},
    {"a borrowed gradient of an activation",
     BEFORE_WRAP,
     borrow_gradient_of_activation,
     BAD,
     {"ms_borrow: the gradient of \"hidden\" does not live between steps"}},
    {"no loss", BEFORE_WRAP, loss_of_none, BAD, {"loss"}},
    {"a foreign handle as loss",
     BEFORE_WRAP,
     loss_of_a_foreigner,
     BAD,
     {"ms_set_loss: an unknown handle is not the output"}},
    {"a loss of integers", BEFORE_WRAP, loss_of_integers, BAD, {"ints", "i32", "f32"}},
    {"a loss that nobody writes", BEFORE_WRAP, loss_of_an_orphan, BAD, {"orphan", "layer"}},
    {"a param as loss", BEFORE_WRAP, loss_of_a_param, BAD, {"p-scale", "layer"}},
    {"a loss behind a layer without backward",
     BEFORE_WRAP,
     loss_without_backward,
     BAD,
     {"wide", "backward|param"}},
    {"a param as output", BEFORE_WRAP, output_of_a_param, BAD, {"ms_add_output", "p-scale"}},
    {"a saved tensor as output", BEFORE_WRAP, output_of_saved, BAD, {"ms_add_output", "s-saved"}},
    {"the gradient of an activation as output",
     BEFORE_WRAP,
     output_of_a_gradient,
     BAD,
     {"ms_add_output: the gradient of \"hidden\" is not the output", "ms_want_gradient"}},
    {"an input as output",
     BEFORE_WRAP,
     eval_output_of_an_input,
     BAD,
     {"ms_add_eval_output", "\"x\""}},
    {"an orphan as output",
     BEFORE_WRAP,
     eval_output_of_an_orphan,
     BAD,
     {"ms_add_eval_output", "orphan"}},
    {"optimizer of NULL", BEFORE_WRAP, optimizer_of_null, BAD, {"ms_set_optimizer", "NULL"}},
    {"optimizer out of range",
     BEFORE_WRAP,
     optimizer_out_of_range,
     BAD,
     {"ms_set_optimizer", "kind"}},
    {"a beta of 1", BEFORE_WRAP, beta_of_one, BAD, {"beta", "1"}},
    {"a negative beta", BEFORE_WRAP, negative_beta, BAD, {"beta", "-0.1"}},
    {"an epsilon of 0", BEFORE_WRAP, epsilon_of_zero, BAD, {"epsilon is 0", "NaN"}},
    {"a momentum of 1", BEFORE_WRAP, momentum_of_one, BAD, {"momentum", "1"}},
    {"a negative epsilon", BEFORE_WRAP, negative_epsilon, BAD, {"epsilon", "-0.5"}},
    {"a rate of NaN", BEFORE_WRAP, rate_that_is_no_number, BAD, {"rate", "nan"}},
    {"an infinite decay", BEFORE_WRAP, decay_without_an_end, BAD, {"decay", "inf"}},
    {"a negative clip", BEFORE_WRAP, negative_clip, BAD, {"clip norm|grad_clip_norm", "-1"}},
    {"a clip of NaN",
     BEFORE_WRAP,
     clip_that_is_no_number,
     BAD,
     {"clip norm|grad_clip_norm", "nan"}},
    {"custom without update", BEFORE_WRAP, custom_without_update, BAD, {"CUSTOM", "update"}},
    {"custom with five states",
     BEFORE_WRAP,
     custom_with_five_states,
     BAD,
     {"state_count", "5", "4"}},
    {"an update of AdamW", BEFORE_WRAP, update_of_adamw, BAD, {"update", "CUSTOM"}},
    {"states of SGD", BEFORE_WRAP, states_of_sgd, BAD, {"state_count", "CUSTOM"}},
    {"a learning rate of NaN", BEFORE_WRAP, nan_rate, BAD, {"ms_set_learning_rate", "nan"}},
    {"a weight decay of NaN", BEFORE_WRAP, nan_decay, BAD, {"p-scale", "nan"}},
    {"decay of an activation", BEFORE_WRAP, decay_of_an_activation, BAD, {"hidden", "param"}},
    {"an input frozen", BEFORE_WRAP, freeze_an_input, BAD, {"\"x\"", "param"}},
    {"a foreign handle frozen",
     BEFORE_WRAP,
     freeze_a_foreigner,
     BAD,
     {"ms_set_frozen: an unknown handle is not a param"}},
    {"an infinite factor", BEFORE_WRAP, infinite_factor, BAD, {"ms_set_loss_factor", "inf"}},
    {"refused by the trainer", BEFORE_WRAP, refuse, BAD, {"50257"}},
    {"no such technique",
     BEFORE_WRAP,
     technique_out_of_range,
     BAD,
     {"ms_set_tensor_technique", "technique"}},
    {"no such switch",
     BEFORE_WRAP,
     switch_out_of_range,
     BAD,
     {"ms_set_tensor_technique", "switch|force"}},
    {"checkpointing of an input", BEFORE_WRAP, checkpoint_an_input, BAD, {"\"x\""}},
    {"checkpointing of a param", BEFORE_WRAP, checkpoint_a_param, BAD, {"p-scale"}},
    {"checkpointing of a foreigner",
     BEFORE_WRAP,
     checkpoint_a_foreigner,
     BAD,
     {"ms_set_tensor_technique: an unknown handle is not an activation"}},
    {"early update of an activation",
     BEFORE_WRAP,
     update_an_activation_early,
     BAD,
     {"hidden", "param"}},
    {"technique of no layer",
     BEFORE_WRAP,
     technique_of_no_layer,
     BAD,
     {"ms_set_layer_technique: an empty handle (id 0) is not a layer"}},
    {"technique of a foreign layer",
     BEFORE_WRAP,
     technique_of_a_foreign_layer,
     BAD,
     {"ms_set_layer_technique: an unknown handle is not a layer"}},
    {"no such technique of a layer",
     BEFORE_WRAP,
     layer_technique_out_of_range,
     BAD,
     {"ms_set_layer_technique", "technique"}},
    {"forced: the loss", BEFORE_WRAP, force_the_loss, BAD, {"losses", "loss"}},
    {"forced: the layer of the loss",
     BEFORE_WRAP,
     force_the_layer_of_the_loss,
     BAD,
     {"losses", "loss"}},
    {"forced: offloading of state",
     BEFORE_WRAP,
     offload_state,
     BAD,
     {"offloading is forced on \"running\"", "a layer changes it as state"}},
    {"forced: offloading of what is on the host",
     BEFORE_WRAP,
     offload_what_is_on_the_host,
     BAD,
     {"offloading is forced on \"read-only\"", "ms_set_on_host"}},
    {"forced: a kept output",
     BEFORE_WRAP,
     force_a_kept_output,
     BAD,
     {"gated", "ms_add_output|kept|output"}},
    {"early update by force, and clipping",
     BEFORE_WRAP,
     early_with_clipping,
     BAD,
     {"p-scale", "clip"}},
    {"early update by force, and accumulation",
     BEFORE_WRAP,
     early_with_accumulation,
     BAD,
     {"p-scale|q-scale|spoiled", "accumulat|micro"}},
    {"early update by force, and no update",
     BEFORE_WRAP,
     early_without_an_update,
     BAD,
     {"p-scale", "MS_OPTIMIZER_NONE|optimizer"}},
    {"always early, and accumulation",
     BEFORE_CREATE,
     always_early_and_accumulating,
     BAD,
     {"early_update", "accumulation", "2"}},
    {"a second producer", BEFORE_WRAP, second_producer, BAD, {"rival", "gated", "second|already"}},
    {"a desc of NULL", BEFORE_WRAP, desc_of_null, BAD, {"desc", "NULL"}},
    {"a tensor on the host is destroyed",
     BEFORE_WRAP,
     host_tensor_that_is_destroyed,
     BAD,
     {"spoiler", "\"x\"", "ms_set_on_host"}},
    {"a buffer is changed behind its reader",
     BEFORE_WRAP,
     buffer_changed_behind_its_reader,
     BAD,
     {"changer", "read-only", "reader"}},
    {"gradients in forward of a layer in the middle",
     BEFORE_LAYERS,
     reader_behind_the_gradient_in_forward,
     BAD,
     {"spoiled", "grads_in_forward|gradients in forward", "last", "y-out|z-out"}},
    {"must_in_place between axes of one size",
     BEFORE_LAYERS,
     in_place_along_another_axis,
     BAD,
     {"\"spoiled\"", "\"gated\"", "\"sideways\"", "axes|axis"}},
    {"must_grad_in_place between axes of one size",
     BEFORE_LAYERS,
     gradient_in_place_along_another_axis,
     BAD,
     {"\"spoiled\"", "\"gated\"", "\"sideways\"", "axes|axis"}},
    {"must_in_place along an axis and along it twice",
     BEFORE_LAYERS,
     in_place_along_an_axis_twice,
     BAD,
     {"\"spoiled\"", "\"gated\"", "\"sideways\"", "axes|axis"}},
    {"no callbacks outside a dry run",
     BEFORE_LAYERS,
     plan_without_callbacks,
     BAD,
     {"spoiled", "forward|callback", "dry_run|dry run|callback"}},
    {"a budget of one byte",
     BEFORE_CREATE,
     no_budget,
     MS_RESULT_BUDGET,
     {"budget", "1", "smallest|needs"}},
    {"no gradient", BEFORE_WRAP, want_of_nothing, BAD, {"ms_want_gradient: an empty handle"}},
    {"the gradient of a param",
     BEFORE_WRAP,
     want_of_a_param,
     BAD,
     {"ms_want_gradient: \"p-scale\" (param) is not an activation or input"}},
    {"the gradient of a saved tensor",
     BEFORE_WRAP,
     want_of_saved,
     BAD,
     {"ms_want_gradient: \"s-saved\"", "saved tensor"}},
    {"the gradient of integers",
     BEFORE_WRAP,
     want_of_integers,
     BAD,
     {"ms_want_gradient of \"ints\"", "integer"}},
    {"the gradient of state",
     BEFORE_WRAP,
     want_of_state,
     BAD,
     {"ms_want_gradient of \"running\"", "state"}},
    {"a gradient that the loss does not have",
     BEFORE_WRAP,
     want_what_leads_nowhere,
     BAD,
     {"ms_want_gradient of \"wide\"", "loss does not depend"}},
    {"a gradient that is stopped",
     BEFORE_WRAP,
     want_what_is_stopped,
     BAD,
     {"ms_want_gradient of \"gated\"", "ms_stop_gradient"}},
    {"a stop of what is wanted",
     BEFORE_WRAP,
     stop_what_is_wanted,
     BAD,
     {"ms_stop_gradient of \"gated\"", "ms_want_gradient"}},
};

/* Shapes of equal size that keep it at all sizes of the axes are those whose product has each axis
   as many times. */
static void shapes_that_grow_alike_do_so_along_every_axis(void **state) {
    (void)state;
    enum { AXES = 3, DIMS = 3 };
    static const uint64_t primes[AXES] = {2, 3, 5};
    uint32_t alike = 0, count = 4000;
    for (uint64_t seed = 0; seed < count; ++seed) {
        t_rng rng = t_seed(seed);
        msi_tensor tensors[2];
        uint64_t grown[2] = {1, 1};
        msi_graph g = MSI_ZERO_INIT;
        memset(tensors, 0, sizeof tensors);
        for (int k = 0; k < 2; ++k) {
            ms_shape *shape = &tensors[k].view.shape;
            shape->rank = (int32_t)t_below(&rng, DIMS + 1);
            for (int i = 0; i < shape->rank; ++i) {
                shape->axes[i] = (uint8_t)(t_chance(&rng, 0.5) ? 0 : t_below(&rng, 1 << AXES));
                for (int axis = 0; axis < AXES; ++axis) {
                    grown[k] *= shape->axes[i] >> axis & 1 ? primes[axis] : 1;
                }
            }
        }
        g.tensors.items = tensors;
        g.tensors.count = 2;
        g.axis_count = AXES;
        assert_int_equal(msi_scales_alike(&g, 0, 1), grown[0] == grown[1]);
        alike += grown[0] == grown[1];
    }
    assert_true(alike > 100 && alike < count / 2);
}

/* An operand that has the rows of a layer, or a multiple of them, grows with each axis as often as
   they do; one that has a part of them may grow less. */
static void what_is_cut_into_tiles_grows_with_the_rows(void **state) {
    (void)state;
    static const struct {
        int64_t rows;
        uint8_t axes; // of the operand; the rows of the layer are along axis 0
        bool can;
    } cases[] = {{12, 1, true},  {24, 1, true},  {6, 1, true},   {5, 1, false},
                 {12, 0, false}, {24, 0, false}, {6, 0, true},   {12, 2, false},
                 {6, 2, false},  {12, 3, false}, {24, 3, false}, {6, 3, false}};
    msi_graph g = MSI_ZERO_INIT;
    g.axis_count = 2;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        ms_shape out = ms_shape2(12, COLS), operand = ms_shape2(cases[i].rows, COLS);
        out.axes[0] = 1;
        operand.axes[0] = cases[i].axes;
        assert_int_equal(msi_can_cut(&g, &operand, 1, &out, 1), cases[i].can);
    }
}

/* The smallest number of rows that is a multiple of tile.multiple, and of which each operand has
   whole rows. */
static void tiles_have_whole_rows_of_all_operands(void **state) {
    (void)state;
    enum { MOST = 12, OWN = 2 };
    for (uint32_t seed = 0; seed < 200; ++seed) {
        t_rng rng = t_seed(seed);
        uint64_t own[OWN], unit = 1;
        ms_layer_desc d;
        ms_model *m;
        assert_int_equal(ms_create(NULL, &m), MS_RESULT_OK);
        memset(&d, 0, sizeof d);
        d.name = "in tiles";
        d.forward = d.backward = t_nothing;
        d.tile.axes = 1;
        do {
            d.tile.multiple = 1 + t_below(&rng, MOST);
        } while (MOST % d.tile.multiple != 0);
        for (int k = 0; k < OWN; ++k) {
            do {
                own[k] = 1 + t_below(&rng, MOST);
            } while (MOST % own[k] != 0);
            const ms_shape shape = ms_shape2((int64_t)own[k], 2);
            if (k == 0) {
                d.in[0] = ms_input(m, "x", MS_DTYPE_F32, shape);
            } else {
                d.saved[0] = ms_saved(m, "s", MS_DTYPE_F32, shape);
            }
        }
        d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(MOST, 2));
        ms_register_layer(m, &d);
        assert_int_equal(m->errors.sticky, MS_RESULT_OK);
        while (unit % (uint64_t)d.tile.multiple != 0 || unit * own[0] % MOST != 0 ||
               unit * own[1] % MOST != 0) {
            unit += 1;
        }
        assert_int_equal(msi_tile_unit(&m->graph, &m->graph.layers.items[0]), unit);
        ms_destroy(m);
    }
}

static void check_registration(const misuse *c, act_fn early, act_fn late) {
    world w;
    w_begin(&w);
    if (c->at == BEFORE_CREATE && c->act != NULL) {
        (void)c->act(&w);
    }
    w_create(&w);
    if (early != NULL) {
        (void)early(&w);
    }
    if (c->at == BEFORE_LAYERS) {
        (void)c->act(&w);
    }
    w_layers_behind(&w);
    if (c->at == BEFORE_WRAP) {
        (void)c->act(&w);
    }
    if (late != NULL) {
        (void)late(&w);
    }
    check_refusal(&w, c->what, c->expected, NULL, c->text);
    w_end(&w);
}

static void spoiled_registrations(void **state) {
    (void)state;
    uint32_t rows = 0;
    faults = 0;
    for (; rows < sizeof registrations / sizeof registrations[0]; ++rows) {
        check_registration(&registrations[rows], NULL, NULL);
    }
    end_of_table(&rows);
}

/* What is refused later does not hide it. */
static void the_first_error_sticks(void **state) {
    (void)state;
    world w;
    w_begin(&w);
    w_create(&w);
    (void)refuse(&w);
    ms_refuse(w.m, "nor that");
    (void)negative_shape(&w);
    (void)loss_of_none(&w);
    t_error(w.m, ms_wrap(w.m), MS_RESULT_INVALID);
    t_text_has(ms_last_error(w.m), "50257");
    w_end(&w);
}

static void a_model_without_layers_is_refused(void **state) {
    (void)state;
    ms_model *m;
    t_ok(NULL, ms_create(NULL, &m));
    t_error(m, ms_wrap(m), MS_RESULT_INVALID);
    ms_destroy(m);
}

/* Each half is fine; both together are not. */
static void what_cannot_be_together(void **state) {
    (void)state;
    static const misuse early_clip = {
        "always early, and clipping", BEFORE_CREATE, always_early, BAD, {"early_update", "clip"}};
    static const misuse early_accumulation = {"always early, and set to accumulate",
                                              BEFORE_CREATE,
                                              always_early,
                                              BAD,
                                              {"early_update", "accumulat|micro", "3"}};
    static const misuse forced_layer = {"forced: a layer that runs once",
                                        BEFORE_LAYERS,
                                        runs_once,
                                        BAD,
                                        {"spoiled", "no_recompute"}};
    static const misuse forced_saved = {"forced: saved by a layer that runs once",
                                        BEFORE_LAYERS,
                                        runs_once,
                                        BAD,
                                        {"s-saved", "spoiled", "no_recompute"}};
    static const misuse forced_read = {"forced: what recompute reads",
                                       BEFORE_LAYERS,
                                       recomputes_from_its_output,
                                       BAD,
                                       {"t-saved", "spoiled", "recompute_reads"}};
    uint32_t rows = 5;
    faults = 0;
    check_registration(&early_clip, NULL, clip);
    check_registration(&early_accumulation, NULL, accumulate);
    check_registration(&forced_layer, NULL, force_what_runs_once);
    check_registration(&forced_saved, NULL, force_saved_that_runs_once);
    check_registration(&forced_read, NULL, force_what_recompute_reads);
    end_of_table(&rows);
}

enum { MOST_HEARD = 8 };

typedef struct heard_errors {
    uint32_t count;
    char text[MOST_HEARD][MSI_ERROR_BYTES + 64];
} heard_errors;

static void hear_errors(ms_log_level level, const char *tag, const char *text, void *user) {
    heard_errors *h = (heard_errors *)user;
    assert_true(level != MS_LOG_ERROR || h->count < MOST_HEARD);
    if (level == MS_LOG_ERROR) {
        assert_string_equal(tag, "error");
        snprintf(h->text[h->count++], sizeof h->text[0], "%s", text);
    }
}

/* An error that sticks is in the log once, when it happens. What returns it later, ms_wrap or a write
   to the handle 0 of a registration that failed, gives its text, but does not log it again. */
static void an_error_is_logged_once(void **state) {
    (void)state;
    for (int wrapped = 0; wrapped < 2; ++wrapped) {
        heard_errors h;
        float value[LARGEST_ROWS * COLS] = {0};
        world w;
        memset(&h, 0, sizeof h);
        w_begin(&w);
        w.config.log = hear_errors;
        w.config.log_user = &h;
        w_create(&w);
        w_layers_behind(&w);
        if (wrapped != 0) {
            t_ok(w.m, ms_wrap(w.m));
        }
        const ms_tensor none = ms_param(w.m, "sunken", MS_DTYPE_F32, ms_shape1(0));
        assert_int_equal(none.id, 0);
        assert_int_equal(h.count, 1);
        t_text_has(h.text[0], "sunken");
        t_error(w.m, ms_write(w.m, none, value), MS_RESULT_INVALID);
        t_text_has(ms_last_error(w.m), "ms_write: an earlier call has failed: param \"sunken\"");
        t_error(w.m, ms_read(w.m, none, value), MS_RESULT_INVALID);
        const ms_result expected = wrapped != 0 ? MS_RESULT_ORDER : MS_RESULT_INVALID;
        for (int k = 0; k < 2; ++k) {
            const ms_result result = ms_wrap(w.m); // afterwards it is returned once
            assert_int_equal(result, wrapped != 0 && k == 1 ? MS_RESULT_OK : expected);
            t_text_has(ms_last_error(w.m), "sunken");
        }
        assert_int_equal(h.count, 1);
        w_end(&w);
    }
}

static void hear_warning(ms_log_level level, const char *tag, const char *text, void *user) {
    uint32_t *warnings = (uint32_t *)user;
    (void)tag;
    *warnings += level == MS_LOG_WARNING && strstr(text, "lonely") != NULL;
}

/* No error: half a model may be trained. But the log says so. */
static void a_param_that_nobody_uses(void **state) {
    (void)state;
    uint32_t warnings = 0;
    world w;
    w_begin(&w);
    w.config.log = hear_warning;
    w.config.log_user = &warnings;
    w_create(&w);
    assert_true(ms_param(w.m, "lonely", MS_DTYPE_F32, ms_shape1(3)).id != 0);
    w_layers_behind(&w);
    t_ok(w.m, ms_wrap(w.m));
    assert_int_equal(warnings, 1);
    w_end(&w);
}

typedef struct heard {
    uint32_t stops, ungraded, unread, others;
} heard;

static void hear_graph(ms_log_level level, const char *tag, const char *text, void *user) {
    heard *h = (heard *)user;
    const bool stops = strstr(text, "\"stop\" has no backward") != NULL;
    const bool ungraded = strstr(text, "\"q\" gets no gradient") != NULL;
    const bool unread = strstr(text, "\"aside\": no layer reads what it writes") != NULL;
    if (level == MS_LOG_WARNING && strcmp(tag, "graph") == 0) {
        h->stops += stops;
        h->ungraded += ungraded;
        h->unread += unread;
        h->others += !stops && !ungraded && !unread;
    }
}

/* x p -> a; a -> b, without a backward; b -> e, which nobody reads; a b -> c; a c -> d; and a loss of
   d and q that writes the gradient of d in forward. */
static void what_follows_from_a_graph(void **state) {
    (void)state;
    enum { X, P, Q, A, B, C, D, E, LOSS, TENSORS };
    static const char *const names[TENSORS] = {"x", "p", "q", "a", "b", "c", "d", "e", "loss"};
    static const struct {
        const char *name;
        int in[2], param, out; // X: none
    } layers[] = {{"first", {X, X}, P, A}, {"stop", {A, X}, X, B},  {"aside", {B, X}, X, E},
                  {"read", {A, B}, X, C},  {"again", {A, C}, X, D}, {"last", {D, X}, Q, LOSS}};
    static const struct {
        int tensor;
        uint32_t last_use, last_reader, last_gradient; // layers
        bool leads_to_loss;
    } expected[] = {{A, 4, 3, 3, true},
                    {B, 3, 3, MSI_NONE, true},
                    {C, 4, 4, 4, true},
                    {D, 5, MSI_NONE, 5, true},
                    {E, 2, MSI_NONE, MSI_NONE, false},
                    {P, MSI_NONE, 0, 0, false},
                    {Q, MSI_NONE, MSI_NONE, MSI_NONE, false}};
    heard h = {0, 0, 0, 0};
    ms_tensor t[TENSORS];
    ms_model *m;
    ms_config config = t_config();
    config.dry_run = true;
    config.log = hear_graph;
    config.log_user = &h;
    t_ok(NULL, ms_create(&config, &m));
    for (int i = 0; i < TENSORS; ++i) {
        t[i] = i == X   ? ms_input(m, names[i], MS_DTYPE_F32, ms_shape1(8))
               : i <= Q ? ms_param(m, names[i], MS_DTYPE_F32, ms_shape1(8))
                        : ms_activation(m, names[i], MS_DTYPE_F32, ms_shape1(8));
    }
    for (size_t i = 0; i < sizeof layers / sizeof layers[0]; ++i) {
        ms_layer_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.name = layers[i].name;
        desc.forward = t_nothing;
        desc.in[0] = t[layers[i].in[0]];
        if (layers[i].in[1] != X) {
            desc.in[1] = t[layers[i].in[1]];
        }
        if (layers[i].param != X) {
            desc.param[0] = t[layers[i].param];
        }
        desc.out[0] = t[layers[i].out];
        desc.no_backward = layers[i].out == E;
        desc.grads_in_forward = layers[i].out == LOSS;
        const bool backward = layers[i].out != B && layers[i].out != E && layers[i].out != LOSS;
        desc.backward = backward ? t_nothing : NULL;
        desc.backward_reads.in = desc.backward_reads.param = backward ? MS_ALL_SLOTS : 0;
        (void)ms_register_layer(m, &desc);
    }
    ms_set_loss(m, t[LOSS]);
    t_ok(m, ms_wrap(m));
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; ++i) {
        const msi_tensor *is =
            &m->graph.tensors.items[msi_value_index(&m->graph, t[expected[i].tensor])];
        if ((expected[i].last_use != MSI_NONE && is->last_use != expected[i].last_use) ||
            is->last_reader != expected[i].last_reader ||
            is->last_gradient != expected[i].last_gradient ||
            is->leads_to_loss != expected[i].leads_to_loss) {
            fail_msg("%s: %u, %u, %u, %d", names[expected[i].tensor], (unsigned)is->last_use,
                     (unsigned)is->last_reader, (unsigned)is->last_gradient, is->leads_to_loss);
        }
    }
    assert_true(h.stops == 1 && h.ungraded == 1 && h.unread == 1 && h.others == 0);
    ms_destroy(m);
}

/* What a dry run may lack is all of a layer's callbacks, not one of them. */
static void half_a_dry_run(void **state) {
    (void)state;
    const parts text = {"spoiled", "forward", NULL, NULL};
    world w;
    faults = 0;
    w_begin(&w);
    w.config.dry_run = true;
    w_create(&w);
    w.desc.forward = NULL;
    w_layers_behind(&w);
    check_refusal(&w, "a backward without a forward", MS_RESULT_INVALID, NULL, text);
    w_end(&w);
    assert_int_equal(faults, 0);
}

/* 0 micro-batches are 1, as in the config. */
static void no_micro_batch_is_one(void **state) {
    (void)state;
    world w;
    float before[COLS], after[COLS];
    w_begin(&w);
    w_create(&w);
    w_layers_behind(&w);
    ms_set_accumulation(w.m, 0);
    t_ok(w.m, ms_wrap(w.m));
    w_fill(&w);
    t_ok(w.m, ms_read(w.m, w.t[W_P], before));
    t_ok(w.m, ms_step(w.m, NULL));
    t_ok(w.m, ms_read(w.m, w.t[W_P], after));
    assert_true(memcmp(before, after, sizeof before) != 0);
    w_end(&w);
}

/* A dry run may lack callbacks; what it cannot do is compute. */
static void dry_runs(void **state) {
    (void)state;
    for (int keeps_backward = 0; keeps_backward < 2; ++keeps_backward) {
        world w;
        float data[64];
        w_begin(&w);
        w.config.dry_run = true;
        w_create(&w);
        w.desc.forward = NULL;
        w.desc.backward = NULL;
        w.desc.no_backward = keeps_backward == 0;
        w_layers_behind(&w);
        t_ok(w.m, ms_wrap(w.m));
        t_error(w.m, ms_step(w.m, NULL), MS_RESULT_DRY_RUN);
        t_error(w.m, ms_eval(w.m, NULL), MS_RESULT_DRY_RUN);
        t_error(w.m, ms_forward(w.m, NULL), MS_RESULT_DRY_RUN);
        t_error(w.m, ms_read(w.m, w.t[W_P], data), MS_RESULT_DRY_RUN);
        memset(data, 0, sizeof data);
        t_error(w.m, ms_write(w.m, w.t[W_P], data), MS_RESULT_DRY_RUN);
        t_text_has(ms_last_error(w.m), "p-scale");
        assert_null(ms_data(w.m, w.t[W_P]));
        w_end(&w);
    }
}

// ------------------------------------------------------------------------------------------------
// calls that are wrong at their time: refused, and the model goes on as if they had not been made

typedef enum moment {
    UNWRAPPED,
    WRAPPED,
    STEPPED,
    FORWARDED,
    BACKWARDED,       // all updates are still to come
    EARLY_BACKWARDED, // some are done
    ACCUMULATING,     // one of two micro-batches is done
    INSIDE            // a callback
} moment;

typedef struct call_case {
    const char *what;
    moment at;
    act_fn act;
    ms_result expected;
    parts text; // none: a function that cannot note one
} call_case;

static float scratch[256];

static ms_result step(world *w) {
    return ms_step(w->m, NULL);
}

static ms_result forward(world *w) {
    return ms_forward(w->m, NULL);
}

static ms_result backward(world *w) {
    return ms_backward(w->m);
}

static ms_result update(world *w) {
    return ms_update(w->m);
}

static ms_result eval(world *w) {
    return ms_eval(w->m, NULL);
}

static ms_result wrap(world *w) {
    return ms_wrap(w->m);
}

static ms_result detach(world *w) {
    return ms_detach(w->m);
}

static ms_result smallest(world *w) {
    uint64_t bytes = 0;
    return ms_smallest_budget(w->m, &bytes);
}

static ms_result smallest_of_null(world *w) {
    return ms_smallest_budget(w->m, NULL);
}

static ms_result hardware_of_null(world *w) {
    return ms_hardware_report(w->m, NULL);
}

static ms_result report(world *w) {
    ms_memory_report r;
    return ms_report(w->m, &r);
}

static ms_result report_to_null(world *w) {
    return ms_report(w->m, NULL);
}

static void ignore_event(const ms_event *event, void *user) {
    (void)event, (void)user;
}

static void ignore_text(const char *text, size_t length, void *user) {
    (void)text, (void)length, (void)user;
}

static ms_result events(world *w) {
    return ms_visit_events(w->m, MS_PROGRAM_TRAIN, ignore_event, NULL);
}

static ms_result events_to_null(world *w) {
    return ms_visit_events(w->m, MS_PROGRAM_TRAIN, NULL, NULL);
}

static ms_result events_of_no_program(world *w) {
    int beyond = MS_PROGRAM_EVAL + 1;
    return ms_visit_events(w->m, (ms_program)beyond, ignore_event, NULL);
}

static ms_result plan_to_null(world *w) {
    return ms_print_plan(w->m, NULL, NULL);
}

static ms_result plan_printed(world *w) {
    return ms_print_plan(w->m, ignore_text, NULL);
}

static ms_result program_to_null(world *w) {
    return ms_print_program(w->m, MS_PROGRAM_EVAL, NULL, NULL);
}

static ms_result no_program_printed(world *w) {
    int below = -1;
    return ms_print_program(w->m, (ms_program)below, ignore_text, NULL);
}

static ms_result reshape_to(world *w, int64_t size) {
    return ms_reshape(w->m, &size);
}

static ms_result reshape(world *w) {
    return reshape_to(w, ROWS + 1);
}

static ms_result reshape_to_zero(world *w) {
    return reshape_to(w, 0);
}

static ms_result reshape_beyond(world *w) {
    return reshape_to(w, LARGEST_ROWS + 1);
}

static ms_result reshape_of_null(world *w) {
    return ms_reshape(w->m, NULL);
}

static ms_result read_of(world *w, ms_tensor tensor) {
    if (ms_data(w->m, tensor) != NULL) {
        complain("ms_data", "an address where ms_read fails", "");
    }
    return ms_read(w->m, tensor, scratch);
}

static ms_result read_activation(world *w) {
    return read_of(w, w->t[W_HIDDEN]);
}

static ms_result read_saved(world *w) {
    return read_of(w, w->t[W_S]);
}

static ms_result read_loss(world *w) {
    return read_of(w, w->t[W_LOSS]);
}

static ms_result read_gradient(world *w) {
    return read_of(w, w->t[W_GRADIENT]);
}

static ms_result read_gradient_of_activation(world *w) {
    return read_of(w, ms_gradient(w->m, w->t[W_HIDDEN]));
}

static ms_result read_foreign(world *w) {
    return read_of(w, w->t[W_FOREIGN]);
}

static ms_result read_none(world *w) {
    return read_of(w, w->t[W_NONE]);
}

static ms_result read_to_null(world *w) {
    return ms_read(w->m, w->t[W_P], NULL);
}

static ms_result write_activation(world *w) {
    return ms_write(w->m, w->t[W_HIDDEN], scratch);
}

static ms_result write_gradient(world *w) {
    return ms_write(w->m, w->t[W_GRADIENT], scratch);
}

static ms_result write_foreign(world *w) {
    return ms_write(w->m, w->t[W_FOREIGN], scratch);
}

static ms_result write_null(world *w) {
    return ms_write(w->m, w->t[W_P], NULL);
}

static ms_result write_input(world *w) {
    return ms_write(w->m, w->t[W_X], scratch);
}

static ms_result norm(world *w) {
    double value = 0.0;
    return ms_gradient_norm(w->m, &value);
}

static ms_result norm_to_null(world *w) {
    return ms_gradient_norm(w->m, NULL);
}

static ms_result late_tensor(world *w) {
    assert_int_equal(ms_input(w->m, "late", MS_DTYPE_F32, ms_shape1(4)).id, 0);
    return MS_RESULT_ORDER;
}

static ms_result late_axis(world *w) {
    assert_int_equal(ms_add_axis(w->m, "late", 1, 1).id, 0);
    return MS_RESULT_ORDER;
}

static ms_result late_layer(world *w) {
    ms_layer_desc desc = w_describe(w, L_SECOND, "late");
    assert_int_equal(ms_register_layer(w->m, &desc).id, 0);
    return MS_RESULT_ORDER;
}

static ms_result late_host(world *w) {
    ms_set_on_host(w->m, w->t[W_X]);
    return MS_RESULT_ORDER;
}

static ms_result late_stop(world *w) {
    ms_stop_gradient(w->m, w->t[W_HIDDEN]);
    return MS_RESULT_ORDER;
}

static ms_result late_loss(world *w) {
    ms_set_loss(w->m, w->t[W_LOSS]);
    return MS_RESULT_ORDER;
}

static ms_result late_output(world *w) {
    ms_add_output(w->m, w->t[W_HIDDEN]);
    return MS_RESULT_ORDER;
}

static ms_result late_eval_output(world *w) {
    ms_add_eval_output(w->m, w->t[W_HIDDEN]);
    return MS_RESULT_ORDER;
}

static ms_result late_optimizer(world *w) {
    ms_optimizer_desc desc = optimizer(MS_OPTIMIZER_SGD);
    ms_set_optimizer(w->m, &desc);
    return MS_RESULT_ORDER;
}

static ms_result borrow_late(world *w) {
    return ms_borrow(w->m, w->t[W_P], lent);
}

static ms_result borrow_again_null(world *w) {
    return ms_borrow(w->m, w->t[W_READ_ONLY], NULL);
}

static ms_result borrow_inside(world *w) {
    return ms_borrow(w->m, w->t[W_READ_ONLY], lent);
}

static ms_result gemm_of_null(world *w) {
    ms_matrix matrix = ms_matrix_of(&w->call->in[0]);
    return ms_gemm(NULL, 1.0f, matrix, matrix, 0.0f, matrix);
}

static ms_result gemm_of_shapes(world *w) {
    ms_matrix a = ms_matrix_of(&w->call->in[0]);
    return ms_gemm(w->call, 1.0f, a, a, 0.0f, ms_matrix_of(&w->call->out[0]));
}

static ms_result gemm_of_integers(world *w) {
    ms_matrix a = ms_matrix_of(&w->call->in[0]);
    ms_matrix b = ms_transpose(a);
    ms_matrix c = ms_matrix_of(&w->call->out[0]);
    c.cols = ROWS;
    a.dtype = MS_DTYPE_I32;
    return ms_gemm(w->call, 1.0f, a, b, 0.0f, c);
}

static ms_result gemm_without_data(world *w) {
    ms_matrix a = ms_matrix_of(&w->call->in[0]);
    ms_matrix c = ms_matrix_of(&w->call->out[0]);
    c.cols = ROWS;
    a.data = NULL;
    return ms_gemm(w->call, 1.0f, a, ms_transpose(a), 0.0f, c);
}

#define ORDER MS_RESULT_ORDER

static const call_case calls[] = {
    // before ms_wrap
    {"step", UNWRAPPED, step, ORDER, {"ms_step|ms_forward", "ms_wrap"}},
    {"forward", UNWRAPPED, forward, ORDER, {"ms_forward", "ms_wrap"}},
    {"backward", UNWRAPPED, backward, ORDER, {"ms_backward", "ms_wrap"}},
    {"update", UNWRAPPED, update, ORDER, {"ms_update", "ms_wrap"}},
    {"eval", UNWRAPPED, eval, ORDER, {"ms_eval", "ms_wrap"}},
    {"norm", UNWRAPPED, norm, ORDER, {"ms_gradient_norm"}},
    {"report", UNWRAPPED, report, ORDER, {NULL}},
    {"events", UNWRAPPED, events, ORDER, {NULL}},
    {"printed plan", UNWRAPPED, plan_printed, ORDER, {NULL}},
    {"read activation", UNWRAPPED, read_activation, ORDER, {"ms_read", "hidden"}},
    // at any time
    {"smallest budget to NULL", WRAPPED, smallest_of_null, BAD, {"ms_smallest_budget", "NULL"}},
    {"hardware to NULL", WRAPPED, hardware_of_null, BAD, {"ms_hardware_report", "NULL"}},
    {"report to NULL", WRAPPED, report_to_null, BAD, {NULL}},
    {"events to NULL", WRAPPED, events_to_null, BAD, {NULL}},
    {"events of no program", WRAPPED, events_of_no_program, BAD, {NULL}},
    {"plan printed to NULL", WRAPPED, plan_to_null, BAD, {NULL}},
    {"program printed to NULL", WRAPPED, program_to_null, BAD, {NULL}},
    {"no program printed", WRAPPED, no_program_printed, BAD, {NULL}},
    {"norm to NULL", WRAPPED, norm_to_null, BAD, {"ms_gradient_norm", "NULL"}},
    {"norm without clipping", WRAPPED, norm, ORDER, {"ms_gradient_norm", "grad_clip_norm"}},
    {"read a foreign handle", WRAPPED, read_foreign, BAD, {"ms_read: an unknown handle is not a"}},
    {"read nothing", WRAPPED, read_none, BAD, {"ms_read"}},
    {"read to NULL", WRAPPED, read_to_null, BAD, {"ms_read", "NULL"}},
    {"write an activation", WRAPPED, write_activation, BAD, {"ms_write", "hidden"}},
    {"write a gradient", WRAPPED, write_gradient, BAD, {"ms_write", "weight"}},
    {"write a foreign handle",
     WRAPPED,
     write_foreign,
     BAD,
     {"ms_write: an unknown handle is not a"}},
    {"write NULL", WRAPPED, write_null, BAD, {"ms_write", "NULL"}},
    {"borrow what was not", WRAPPED, borrow_late, ORDER, {"ms_borrow", "p-scale", "ms_wrap|wrap"}},
    {"borrow NULL", WRAPPED, borrow_again_null, BAD, {"ms_borrow", "read-only", "NULL"}},
    {"borrow an activation", WRAPPED, borrow_activation, BAD, {"ms_borrow", "hidden"}},
    {"learning rate", WRAPPED, nan_rate, BAD, {"ms_set_learning_rate", "nan"}},
    {"weight decay", WRAPPED, nan_decay, BAD, {"p-scale", "nan"}},
    {"weight decay of an activation", WRAPPED, decay_of_an_activation, BAD, {"hidden", "param"}},
    {"frozen input", WRAPPED, freeze_an_input, BAD, {"\"x\"", "param"}},
    {"loss factor", WRAPPED, infinite_factor, BAD, {"ms_set_loss_factor", "inf"}},
    {"technique", WRAPPED, technique_out_of_range, BAD, {"technique"}},
    {"technique of no layer",
     WRAPPED,
     technique_of_no_layer,
     BAD,
     {"ms_set_layer_technique: an empty handle (id 0)"}},
    {"technique of an input", WRAPPED, checkpoint_an_input, BAD, {"\"x\""}},
    // the graph is closed
    {"late tensor", WRAPPED, late_tensor, ORDER, {"late", "ms_wrap"}},
    {"late axis", WRAPPED, late_axis, ORDER, {"late", "ms_wrap"}},
    {"late layer", WRAPPED, late_layer, ORDER, {"late", "ms_wrap"}},
    {"late on_host", WRAPPED, late_host, ORDER, {"ms_set_on_host", "ms_wrap"}},
    {"late stop_gradient", WRAPPED, late_stop, ORDER, {"ms_stop_gradient", "ms_wrap"}},
    {"late loss", WRAPPED, late_loss, ORDER, {"ms_set_loss", "ms_wrap"}},
    {"late output", WRAPPED, late_output, ORDER, {"ms_add_output", "ms_wrap"}},
    {"late eval output", WRAPPED, late_eval_output, ORDER, {"ms_add_eval_output", "ms_wrap"}},
    {"late optimizer", WRAPPED, late_optimizer, ORDER, {"ms_set_optimizer: the graph is closed"}},
    // shapes
    {"reshape to NULL", WRAPPED, reshape_of_null, BAD, {"ms_reshape", "NULL"}},
    {"reshape to 0", WRAPPED, reshape_to_zero, BAD, {"ms_reshape", "batch", "0"}},
    {"reshape beyond", WRAPPED, reshape_beyond, BAD, {"ms_reshape", "batch", "9", "8"}},
    {"reshape beyond, unwrapped", UNWRAPPED, reshape_beyond, BAD, {"batch", "9", "8"}},
    // out of turn
    {"backward first", WRAPPED, backward, ORDER, {"ms_backward", "ms_forward"}},
    {"update first", WRAPPED, update, ORDER, {"ms_update", "ms_backward"}},
    {"read a gradient", WRAPPED, read_gradient, ORDER, {"gradient", "weight", "ms_backward|early"}},
    {"read the loss", WRAPPED, read_loss, ORDER, {"losses"}},
    {"backward after a step", STEPPED, backward, ORDER, {"ms_backward", "ms_forward"}},
    {"update after a step", STEPPED, update, ORDER, {"ms_update", "ms_backward"}},
    {"read an activation", STEPPED, read_activation, ORDER, {"hidden", "ms_add_output"}},
    {"read saved", STEPPED, read_saved, ORDER, {"s-saved"}},
    {"read a gradient after a step", STEPPED, read_gradient, ORDER, {"gradient", "weight"}},
    {"read a gradient of an activation",
     STEPPED,
     read_gradient_of_activation,
     ORDER,
     {"the gradient of \"hidden\" is not in memory now: ms_want_gradient keeps it"}},
    {"update after forward", FORWARDED, update, ORDER, {"ms_update", "ms_backward"}},
    {"backward twice", BACKWARDED, backward, ORDER, {"ms_backward", "ms_forward"}},
    {"step in the middle", EARLY_BACKWARDED, step, ORDER, {"ms_step|ms_forward", "ms_update"}},
    {"forward in the middle", EARLY_BACKWARDED, forward, ORDER, {"ms_forward", "ms_update"}},
    {"eval in the middle", EARLY_BACKWARDED, eval, ORDER, {"ms_eval", "ms_update"}},
    {"wrap in the middle", EARLY_BACKWARDED, wrap, ORDER, {"ms_wrap", "ms_update"}},
    {"detach in the middle", EARLY_BACKWARDED, detach, ORDER, {"ms_detach", "ms_update"}},
    {"reshape in the middle", EARLY_BACKWARDED, reshape, ORDER, {"ms_reshape", "ms_update"}},
    {"smallest budget in the middle",
     EARLY_BACKWARDED,
     smallest,
     ORDER,
     {"ms_smallest_budget", "ms_update"}},
    {"a count that changes", ACCUMULATING, another_count, ORDER, {"ms_update", "1", "2"}},
    // from a callback
    {"step inside", INSIDE, step, ORDER, {"ms_step|ms_forward", "callback"}},
    {"forward inside", INSIDE, forward, ORDER, {"ms_forward", "callback"}},
    {"backward inside", INSIDE, backward, ORDER, {"ms_backward", "callback"}},
    {"update inside", INSIDE, update, ORDER, {"ms_update", "callback"}},
    {"eval inside", INSIDE, eval, ORDER, {"ms_eval", "callback"}},
    {"wrap inside", INSIDE, wrap, ORDER, {"ms_wrap", "callback"}},
    {"detach inside", INSIDE, detach, ORDER, {"ms_detach", "callback"}},
    {"reshape inside", INSIDE, reshape, ORDER, {"ms_reshape", "callback"}},
    {"write inside", INSIDE, write_input, ORDER, {"ms_write", "callback"}},
    {"borrow inside", INSIDE, borrow_inside, ORDER, {"ms_borrow", "callback"}},
    {"smallest budget inside", INSIDE, smallest, ORDER, {"ms_smallest_budget", "callback"}},
    {"gemm without a call", INSIDE, gemm_of_null, BAD, {NULL}},
    {"gemm of shapes", INSIDE, gemm_of_shapes, BAD, {"ms_gemm", "4 x 8"}},
    {"gemm of integers",
     INSIDE,
     gemm_of_integers,
     MS_RESULT_UNSUPPORTED,
     {"ms_gemm", "i32", "f32"}},
    {"gemm without data", INSIDE, gemm_without_data, BAD, {"ms_gemm", "data"}},
};

static float borrowed_memory[COLS];

static void run_create(world *w, moment at) {
    w_begin(w);
    w->config.accumulation_steps = at == ACCUMULATING ? 2 : 1;
    w->config.early_update = at == EARLY_BACKWARDED ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    w_create(w);
    t_ok(w->m, ms_borrow(w->m, w->t[W_READ_ONLY], borrowed_memory));
    w_layers_behind(w);
}

/* Two steps, with the wrong call (or none) at its moment in the first. */
static void run_case(world *w, const call_case *c, bool wrong) {
    ms_result result = c->expected;
    run_create(w, c->at);
    if (wrong && c->at == UNWRAPPED) {
        result = c->act(w);
    }
    if (wrong && c->at == UNWRAPPED && result == c->expected) {
        check_text(c->what, c->text[0] != NULL ? ms_last_error(w->m) : "-", c->text);
        return;
    }
    t_ok(w->m, ms_wrap(w->m));
    w_fill(w);
    if (c->at == ACCUMULATING || c->at == STEPPED) {
        t_ok(w->m, ms_step(w->m, NULL));
    }
    if (c->at >= FORWARDED && c->at <= EARLY_BACKWARDED) {
        t_ok(w->m, ms_forward(w->m, NULL));
    }
    if (c->at == BACKWARDED || c->at == EARLY_BACKWARDED) {
        t_ok(w->m, ms_backward(w->m));
    }
    if (wrong && c->at == INSIDE) {
        w->inside = c->act;
        t_ok(w->m, ms_step(w->m, NULL));
        result = w->inside_result;
    } else if (c->at == INSIDE) {
        t_ok(w->m, ms_step(w->m, NULL));
    } else if (wrong) {
        result = c->act(w);
    }
    if (result != c->expected) {
        complain(c->what, ms_result_name(result), ms_last_error(w->m));
    }
    if (wrong) {
        check_text(c->what, c->text[0] != NULL ? ms_last_error(w->m) : "-", c->text);
    }
    if (c->at == FORWARDED) {
        t_ok(w->m, ms_backward(w->m));
    }
    if (c->at >= FORWARDED && c->at <= EARLY_BACKWARDED) {
        t_ok(w->m, ms_update(w->m));
    }
    for (int i = 0; i < 3; ++i) {
        t_ok(w->m, ms_step(w->m, NULL));
    }
}

static void compare(const char *what, const world *a, const world *b) {
    static const name_of names[] = {W_WEIGHT, W_P, W_Q, W_X};
    for (int i = 0; i < 4; ++i) {
        float of_a[ROWS * COLS], of_b[ROWS * COLS];
        t_ok(a->m, ms_read(a->m, a->t[names[i]], of_a));
        t_ok(b->m, ms_read(b->m, b->t[names[i]], of_b));
        if (memcmp(of_a, of_b, (size_t)ms_tensor_bytes(a->m, a->t[names[i]])) != 0) {
            complain(what, "other numbers after the refusal", "");
        }
    }
}

static void wrong_calls(void **state) {
    (void)state;
    uint32_t rows = 0;
    faults = 0;
    for (; rows < sizeof calls / sizeof calls[0]; ++rows) {
        const call_case *c = &calls[rows];
        world refused, twin;
        run_case(&refused, c, true);
        if (c->at != UNWRAPPED) {
            run_case(&twin, c, false);
            compare(c->what, &refused, &twin);
            w_end(&twin);
        }
        w_end(&refused);
    }
    end_of_table(&rows);
}

/* Errors behind ms_wrap do not stick; those of dims before it do not spoil a wrap either. */
static void reshape_in_the_middle_of_a_step(void **state) {
    (void)state;
    world w;
    int64_t more = ROWS + 1;
    w_begin(&w);
    w_create(&w);
    w_layers_behind(&w);
    t_ok(w.m, ms_wrap(w.m));
    w_fill(&w);
    t_ok(w.m, ms_forward(w.m, NULL));
    ms_result result = ms_reshape(w.m, &more);
    if (result == MS_RESULT_OK) { // then the step is over
        t_error(w.m, ms_backward(w.m), MS_RESULT_ORDER);
        t_text_has(ms_last_error(w.m), "ms_forward");
    } else {
        assert_int_equal(result, MS_RESULT_ORDER);
        t_text_has(ms_last_error(w.m), "ms_reshape");
    }
    w_end(&w);
}

static void foreign_memory(void **state) {
    (void)state;
    world w[2];
    ms_arena *arena = NULL;
    assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
    for (int i = 0; i < 2; ++i) {
        w_begin(&w[i]);
        w[i].config.arena = arena;
        w_create(&w[i]);
        w_layers_behind(&w[i]);
        t_ok(w[i].m, ms_wrap(w[i].m));
        w_fill(&w[i]);
    }
    t_ok(w[0].m, ms_forward(w[0].m, NULL));
    t_ok(w[1].m, ms_step(w[1].m, NULL));
    t_error(w[0].m, ms_backward(w[0].m), MS_RESULT_ORDER);
    t_text_has(ms_last_error(w[0].m), "ms_backward");
    t_text_has(ms_last_error(w[0].m), "arena");
    t_error(w[0].m, ms_read(w[0].m, w[0].t[W_LOSS], scratch), MS_RESULT_ORDER);
    assert_null(ms_data(w[0].m, w[0].t[W_LOSS]));
    t_ok(w[0].m, ms_forward(w[0].m, NULL));
    t_ok(w[0].m, ms_backward(w[0].m));
    t_ok(w[1].m, ms_eval(w[1].m, NULL));
    t_error(w[0].m, ms_update(w[0].m), MS_RESULT_ORDER);
    t_ok(w[0].m, ms_step(w[0].m, NULL));
    compare("shared arena", &w[0], &w[1]);
    w_end(&w[0]);
    ms_arena_destroy(arena);
    t_ok(w[1].m, ms_step(w[1].m, NULL));
    w_end(&w[1]);
}

/* An update cut in two: the model says so until params are written and it is wrapped again. */
static void failed_models(void **state) {
    (void)state;
    world w;
    w_begin(&w);
    w.config.early_update = MS_SWITCH_ON;
    w_create(&w);
    w_layers_behind(&w);
    t_ok(w.m, ms_wrap(w.m));
    w_fill(&w);
    w.failing = 1u << MS_PHASE_FORWARD;
    t_error(w.m, ms_step(w.m, NULL), MS_RESULT_CALLBACK);
    t_text_has(ms_last_error(w.m), "first");
    t_text_has(ms_last_error(w.m), "17");
    t_text_has(ms_last_error(w.m), "forward");
    w.failing = 1u << MS_PHASE_BACKWARD;
    t_error(w.m, ms_step(w.m, NULL), MS_RESULT_CALLBACK);
    t_text_has(ms_last_error(w.m), "first");
    t_text_has(ms_last_error(w.m), "backward");
    w.failing = 0;
    t_error(w.m, ms_step(w.m, NULL), MS_RESULT_FAILED);
    t_text_has(ms_last_error(w.m), "ms_wrap");
    t_error(w.m, ms_eval(w.m, NULL), MS_RESULT_FAILED);
    w_fill(&w);
    t_error(w.m, ms_step(w.m, NULL), MS_RESULT_FAILED);
    t_ok(w.m, ms_detach(w.m));
    t_error(w.m, ms_step(w.m, NULL), MS_RESULT_FAILED);
    t_text_has(ms_last_error(w.m), "ms_wrap");
    t_ok(w.m, ms_wrap(w.m));
    t_ok(w.m, ms_step(w.m, NULL));
    w_end(&w);
}

static void null_arguments(void **state) {
    (void)state;
    ms_model *m = NULL;
    float x = 0.0f;
    ms_tensor none = {0};
    const ms_layer no_layer = {0};
    ms_memory_report report;
    ms_hardware hardware;
    uint64_t bytes = 0;
    double loss = 0.0;
    assert_int_equal(ms_create(NULL, NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_create(NULL, &m), MS_RESULT_OK);
    t_error(m, ms_write(m, none, &x), MS_RESULT_INVALID);
    t_error(m, ms_read(m, none, &x), MS_RESULT_INVALID);
    t_error(m, ms_hardware_report(m, NULL), MS_RESULT_INVALID);
    t_error(m, ms_smallest_budget(m, NULL), MS_RESULT_INVALID);
    t_error(m, ms_report(m, NULL), MS_RESULT_INVALID);
    ms_destroy(m);
    assert_int_equal(ms_wrap(NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_detach(NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_step(NULL, &loss), MS_RESULT_INVALID);
    assert_int_equal(ms_forward(NULL, &loss), MS_RESULT_INVALID);
    assert_int_equal(ms_backward(NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_update(NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_eval(NULL, &loss), MS_RESULT_INVALID);
    assert_int_equal(ms_write(NULL, none, &x), MS_RESULT_INVALID);
    assert_int_equal(ms_read(NULL, none, &x), MS_RESULT_INVALID);
    assert_int_equal(ms_report(NULL, &report), MS_RESULT_INVALID);
    assert_int_equal(ms_hardware_report(NULL, &hardware), MS_RESULT_INVALID);
    assert_int_equal(ms_smallest_budget(NULL, &bytes), MS_RESULT_INVALID);
    assert_int_equal(ms_print_plan(NULL, t_append, NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_print_plan_full(NULL, t_append, NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_print_program(NULL, MS_PROGRAM_TRAIN, t_append, NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_input(NULL, "x", MS_DTYPE_F32, ms_shape1(1)).id, 0);
    assert_int_equal(ms_register_layer(NULL, NULL).id, 0);
    assert_int_equal(ms_gradient(NULL, none).id, 0);
    assert_int_equal(ms_optimizer_state(NULL, none, 0).id, 0);
    assert_true(ms_tensor_count(NULL, none) == 0 && ms_tensor_bytes(NULL, none) == 0);
    assert_int_equal(ms_expect_bytes(NULL, none, 0), MS_RESULT_INVALID);
    assert_int_equal(ms_tensor_of(NULL, none).id, 0);
    assert_string_equal(ms_tensor_name(NULL, none), "?");
    assert_string_equal(ms_layer_name(NULL, no_layer), "?");
    assert_true(strlen(ms_last_error(NULL)) > 0);
    ms_destroy(NULL);
}

/* Functions that take a model take NULL too. */
static void null_models(void **state) {
    (void)state;
    const ms_tensor none = {0};
    const ms_layer no_layer = {0};
    const ms_axis no_axis = {0};
    const int64_t size = 1;
    double value = 0.0;
    assert_int_equal(ms_add_axis(NULL, "a", 1, 1).id, 0);
    assert_int_equal(ms_input(NULL, NULL, MS_DTYPE_F32, ms_shape1(1)).id, 0);
    ms_set_on_host(NULL, none);
    ms_stop_gradient(NULL, none);
    assert_int_equal(ms_borrow(NULL, none, scratch), BAD);
    ms_refuse(NULL, "no");
    ms_set_loss(NULL, none);
    ms_set_loss_factor(NULL, 1.0f);
    ms_add_output(NULL, none);
    ms_add_eval_output(NULL, none);
    ms_set_optimizer(NULL, NULL);
    ms_set_learning_rate(NULL, 1.0f);
    ms_set_weight_decay(NULL, none, 1.0f);
    ms_set_frozen(NULL, none, true);
    ms_set_budget(NULL, 1);
    ms_set_accumulation(NULL, 1);
    ms_set_layer_technique(NULL, no_layer, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
    ms_set_tensor_technique(NULL, none, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
    assert_int_equal(ms_reshape(NULL, &size), BAD);
    assert_null(ms_data(NULL, none));
    assert_int_equal(ms_gradient_norm(NULL, &value), BAD);
    assert_int_equal(ms_visit_events(NULL, MS_PROGRAM_TRAIN, ignore_event, NULL), BAD);
    assert_int_equal(ms_tensor_shape(NULL, none).rank, -1);
    assert_false(ms_optimize_next(NULL, NULL));
    ms_shape shape = ms_along(ms_shape1(4), 0, no_axis);
    assert_int_equal(shape.rank, -1);
    assert_true(ms_shape_count(NULL) == 0);
    assert_int_equal(ms_matrix_of(NULL).rows, 0);
}

// ------------------------------------------------------------------------------------------------
// memory that is lent twice

enum { LENT = 7, LENT_BYTES = T_NET_ROWS * T_NET_COLS * 4, LENT_ROOM = 24 * 64 };

/* A value that the trainer lends memory for, at an offset in one block. */
typedef struct lent_value {
    ms_tensor handle;
    const char *text; // in an error
    size_t bytes, offset;
    bool changes, is_lent;
} lent_value;

static void lend_some(t_net *n, lent_value *v, bool frozen) {
    const size_t param = T_NET_COLS * sizeof(float);
    t_net_begin(n);
    t_net_create(n);
    ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
    sgd.momentum = 0.9f;
    ms_set_optimizer(n->m, &sgd);
    const ms_tensor p = t_net_param(n, "p"), q = t_net_param(n, "q");
    const ms_tensor other = ms_input(n->m, "other", MS_DTYPE_F32, t_net_shape(n));
    const ms_tensor table = ms_buffer(n->m, "table", MS_DTYPE_F32, t_net_shape(n));
    ms_set_frozen(n->m, q, frozen);
    ms_tensor y = t_net_scale(n, "first", n->x, 0.0f, p);
    y = t_net_sum(n, t_net_scale(n, "second", y, 0.0f, q), other);
    t_net_loss(n, t_net_sum(n, y, table), 0.0f);
    const lent_value all[LENT] = {
        {n->x, "value of \"x\"", LENT_BYTES, 0, false, false},
        {other, "value of \"other\"", LENT_BYTES, 0, false, false},
        {table, "value of \"table\"", LENT_BYTES, 0, false, false},
        {p, "value of \"p\"", param, 0, true, false},
        {q, "value of \"q\"", param, 0, !frozen, false},
        {ms_gradient(n->m, p), "gradient of \"p\"", param, 0, true, false},
        {ms_optimizer_state(n->m, p, 0), "optimizer state of \"p\"", param, 0, true, false}};
    memcpy(v, all, sizeof all);
}

static bool is_overlap(const lent_value *a, const lent_value *b) {
    return a != b && a->is_lent && b->is_lent && (a->changes || b->changes) &&
           a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
}

/* OK, or an error that names two values that overlap. */
static void expect_overlaps(const t_net *n, const lent_value *v, ms_result result) {
    bool overlaps = false, named = false;
    for (int i = 0; i < LENT; ++i) {
        for (int k = 0; k < i; ++k) {
            overlaps |= is_overlap(&v[i], &v[k]);
            named |= is_overlap(&v[i], &v[k]) && strstr(ms_last_error(n->m), v[i].text) &&
                     strstr(ms_last_error(n->m), v[k].text);
        }
    }
    assert_int_equal(result, overlaps ? MS_RESULT_INVALID : MS_RESULT_OK);
    assert_int_equal(overlaps, named);
}

/* Memory is lent at random: two values overlap only if training changes neither, when they are wrapped
   and when one is lent other memory after that. */
static void what_is_lent_twice_is_refused(void **state) {
    (void)state;
    t_rng rng = t_seed(41);
    uint8_t *block = (uint8_t *)t_lend(LENT_ROOM + LENT_BYTES);
    int refused = 0, rounds = (int)t_sweep(400, 5000);
    for (int round = 0; round < rounds; ++round) {
        lent_value v[LENT];
        t_net n;
        lend_some(&n, v, t_chance(&rng, 0.5));
        for (int i = 0; i < LENT; ++i) {
            v[i].is_lent = t_chance(&rng, 0.6);
            v[i].offset = 64 * t_below(&rng, LENT_ROOM / 64);
            if (v[i].is_lent) {
                t_ok(n.m, ms_borrow(n.m, v[i].handle, block + v[i].offset));
            }
        }
        ms_result result = ms_wrap(n.m);
        expect_overlaps(&n, v, result);
        refused += result != MS_RESULT_OK;
        for (int again = 0; again < 20 && result == MS_RESULT_OK; ++again) {
            const lent_value before = v[again % LENT];
            lent_value *moved = &v[again % LENT];
            if (moved->is_lent) {
                moved->offset = 64 * t_below(&rng, LENT_ROOM / 64);
                const ms_result answer = ms_borrow(n.m, moved->handle, block + moved->offset);
                expect_overlaps(&n, v, answer);
                *moved = answer == MS_RESULT_OK ? *moved : before;
            }
        }
        t_net_end(&n);
    }
    assert_true(refused > rounds / 10 && refused < rounds - rounds / 10);
    t_take_back(block);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_that_grow_alike_do_so_along_every_axis),
        cmocka_unit_test(what_is_cut_into_tiles_grows_with_the_rows),
        cmocka_unit_test(tiles_have_whole_rows_of_all_operands),
        cmocka_unit_test(spoiled_descs),
        cmocka_unit_test(honest_descs),
        cmocka_unit_test(bad_configs),
        cmocka_unit_test(a_wrong_config_is_explained),
        cmocka_unit_test(bad_copy_streams),
        cmocka_unit_test(bad_arenas),
        cmocka_unit_test(an_arena_of_another_backend),
        cmocka_unit_test(spoiled_registrations),
        cmocka_unit_test(the_first_error_sticks),
        cmocka_unit_test(a_model_without_layers_is_refused),
        cmocka_unit_test(what_cannot_be_together),
        cmocka_unit_test(an_error_is_logged_once),
        cmocka_unit_test(a_param_that_nobody_uses),
        cmocka_unit_test(what_follows_from_a_graph),
        cmocka_unit_test(half_a_dry_run),
        cmocka_unit_test(no_micro_batch_is_one),
        cmocka_unit_test(dry_runs),
        cmocka_unit_test(wrong_calls),
        cmocka_unit_test(reshape_in_the_middle_of_a_step),
        cmocka_unit_test(foreign_memory),
        cmocka_unit_test(failed_models),
        cmocka_unit_test(null_arguments),
        cmocka_unit_test(null_models),
        cmocka_unit_test(what_is_lent_twice_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
