/*  test_faults.c - every allocation, every call of the backend and every callback fails once, in
    models whose programs hold every kind of event, except copies of state on the host: each time
    with an error that has a text, no leak, and a model that trains on as if nothing had happened,
    or that is marked failed and can be cured. */
#include "private.h"
#include "toy_layers.h"

// ------------------------------------------------------------------------------------------------
// the model: twelve layers, one for every way in which operands are handed over

enum { LAYERS = 12, ROWS = 12, MOST_ROWS = 16, COLS = 4, COMPANION_DEPTH = 2 };
enum { KEPT = 24, KEPT_FLOATS = 512, BORROWED = 4 };

typedef struct fault_case {
    const char *name;
    ms_optimizer_kind optimizer;
    float clip;
    uint32_t micro_count;
    ms_switch early_update;
    bool tight, debug, shared, borrows;
} fault_case;

static const fault_case fault_cases[] = {
    {"plain", MS_OPTIMIZER_ADAMW, 0.0f, 1, MS_SWITCH_OFF, false, false, false, false},
    {"tight, clipped, accumulated", MS_OPTIMIZER_ADAMW, 0.25f, 2, MS_SWITCH_DEFAULT, true, false,
     false, false},
    {"tight, early", MS_OPTIMIZER_SGD, 0.0f, 1, MS_SWITCH_ON, true, false, false, false},
    {"tight, own update", MS_OPTIMIZER_CUSTOM, 0.5f, 1, MS_SWITCH_OFF, true, false, false, false},
    {"own update, early, borrowed", MS_OPTIMIZER_CUSTOM, 0.0f, 1, MS_SWITCH_ON, true, false, false,
     true},
    {"debug, tight, accumulated", MS_OPTIMIZER_SGD, 0.25f, 2, MS_SWITCH_OFF, true, true, false,
     false},
    {"shared, tight, borrowed", MS_OPTIMIZER_ADAMW, 0.25f, 2, MS_SWITCH_OFF, true, false, true,
     true},
};
enum { FAULT_CASES = sizeof fault_cases / sizeof fault_cases[0] };

typedef struct fault_net {
    const fault_case *how;
    t_heap heap;
    t_device device;
    ms_config config;
    ms_arena *arena;
    ms_model *model;
    ms_axis axis;
    ms_tensor x, running, loss, matrix, scale, shift;
    t_op ops[LAYERS];
    uint32_t layer_count;
    ms_tensor last;
    t_callbacks callbacks;
    double loss_value;
    t_chain companion; // another model in the shared arena
    float *borrowed[BORROWED];
} fault_net;

/* state[0] is a running mean of the gradients, state[1] counts. One that fails has updated half of
   the param. */
static int fault_update(const ms_update_args *args) {
    float scale = args->gradient_scale != NULL ? *args->gradient_scale : 1.0f;
    const int error = t_count_callback(&((fault_net *)args->user)->callbacks);
    for (uint64_t i = 0; i < (error == 0 ? args->count : args->count / 2); ++i) {
        args->state[0][i] = 0.5f * args->state[0][i] + 0.5f * scale * args->gradient[i];
        args->state[1][i] += 1.0f;
        args->value[i] -= args->learning_rate * args->state[0][i];
    }
    return error;
}

static ms_tensor fault_activation(fault_net *net, const char *name) {
    return ms_activation(net->model, name, MS_DTYPE_F32,
                         ms_along(ms_shape2(ROWS, COLS), 0, net->axis));
}

/* The start of a desc; `a` and `b` are the inputs, and the output is new. */
static ms_layer_desc fault_layer(fault_net *net, t_kind kind, const char *name, ms_tensor a,
                                 ms_tensor b) {
    const ms_tensor none = {0};
    t_op *op = &net->ops[net->layer_count];
    op->scalar = 0.75f;
    op->fails = &net->callbacks;
    ms_layer_desc desc =
        t_layer(op, kind, name, a, kind == T_LOSS ? none : fault_activation(net, name));
    desc.in[1] = b;
    desc.bind = t_bind;
    desc.recompute = net->layer_count % 2 == 0 ? t_forward : NULL;
    return desc;
}

static ms_tensor fault_add(fault_net *net, const ms_layer_desc *desc) {
    ms_register_layer(net->model, desc);
    net->layer_count += 1;
    return desc->out[0];
}

/* A running state, a layer that works in place alone, and one that only accumulates. */
static void fault_register_head(fault_net *net) {
    const ms_tensor none = {0};
    ms_layer_desc d = fault_layer(net, T_MATMUL, "matmul", net->x, none);
    d.param[0] = net->matrix;
    const ms_tensor a = fault_add(net, &d);
    d = fault_layer(net, T_RUNNING, "running", a, none);
    d.state[0] = net->running;
    d.overwrites.in = 1;
    const ms_tensor b = fault_add(net, &d);
    d = fault_layer(net, T_SCALE, "scale", b, none);
    d.recompute = NULL; // forward alone can do it in place
    d.must_in_place = 1;
    d.must_grad_in_place = 1;
    const ms_tensor c = fault_add(net, &d);
    d = fault_layer(net, T_PRODUCT, "product", a, c);
    d.accumulates.in = 3;
    const ms_tensor e = fault_add(net, &d);
    d = fault_layer(net, T_ADD, "add", e, b); // b outlives what is scaled in place
    net->last = fault_add(net, &d);
}

/* Tied params with one gradient that is only overwritten, and an input that backward destroys. */
static void fault_register_tail(fault_net *net) {
    const ms_tensor none = {0}, e = net->last;
    ms_layer_desc d = fault_layer(net, T_AFFINE, "affine", e, none);
    d.param[0] = net->scale;
    d.param[1] = net->shift;
    d.overwrites.param = 3;
    ms_tensor last = fault_add(net, &d);
    net->ops[net->layer_count].clobbers.in = 1;
    d = fault_layer(net, T_PRODUCT, "spoiler", e, last);
    last = fault_add(net, &d);
    d = fault_layer(net, T_AFFINE, "tied", last, none);
    d.param[0] = net->scale;
    d.param[1] = net->shift;
    last = fault_add(net, &d);
    d = fault_layer(net, T_NORM, "norm", last, none);
    d.saved[0] =
        ms_saved(net->model, "spread", MS_DTYPE_F32, ms_along(ms_shape2(ROWS, 2), 0, net->axis));
    d.forward_workspace.bytes = COLS * sizeof(float);
    d.recompute_workspace = d.forward_workspace;
    d.backward_workspace.bytes = 2 * COLS * sizeof(float);
    last = fault_add(net, &d);
    d = fault_layer(net, T_SQUASH, "squash", last, none);
    last = fault_add(net, &d);
    d = fault_layer(net, T_DROPOUT, "dropout", last, none);
    last = fault_add(net, &d);
    d = fault_layer(net, T_LOSS, "loss", last, none);
    net->loss = d.out[0] =
        ms_activation(net->model, "losses", MS_DTYPE_F32, ms_along(ms_shape1(ROWS), 0, net->axis));
    fault_add(net, &d);
}

static ms_optimizer_desc fault_optimizer(fault_net *net) {
    ms_optimizer_desc desc = t_optimizer(net->how->optimizer, 0.01f);
    desc.grad_clip_norm = net->how->clip;
    desc.momentum = desc.kind == MS_OPTIMIZER_SGD ? 0.5f : 0.0f;
    if (desc.kind == MS_OPTIMIZER_CUSTOM) {
        desc.update = fault_update;
        desc.user = net;
        desc.state_count = 2;
    }
    return desc;
}

static ms_result first_error(ms_result so_far, ms_result next) {
    return so_far != MS_RESULT_OK ? so_far : next;
}

static ms_result fault_borrow(fault_net *net) {
    const ms_tensor lent[BORROWED] = {net->x, net->matrix, ms_gradient(net->model, net->matrix),
                                      ms_optimizer_state(net->model, net->scale, 0)};
    ms_result result = MS_RESULT_OK;
    for (int i = 0; i < BORROWED && net->how->borrows; ++i) {
        result = first_error(result, ms_borrow(net->model, lent[i], net->borrowed[i]));
    }
    return result;
}

static ms_result fault_register(fault_net *net) {
    ms_model *m = net->model;
    const ms_optimizer_desc optimizer = fault_optimizer(net);
    net->layer_count = 0;
    net->axis = ms_add_axis(m, "rows", ROWS, MOST_ROWS);
    net->x = ms_input(m, "x", MS_DTYPE_F32, ms_along(ms_shape2(ROWS, COLS), 0, net->axis));
    net->matrix = ms_param(m, "matrix", MS_DTYPE_F32, ms_shape2(COLS, COLS));
    net->scale = ms_param(m, "scale", MS_DTYPE_F32, ms_shape1(COLS));
    net->shift = ms_param(m, "shift", MS_DTYPE_F32, ms_shape1(COLS));
    net->running = ms_buffer(m, "running", MS_DTYPE_F32, ms_shape1(COLS));
    fault_register_head(net);
    fault_register_tail(net);
    ms_set_loss(m, net->loss);
    ms_set_optimizer(m, &optimizer);
    return fault_borrow(net);
}

/* All inputs and params anew. */
static ms_result fault_write(fault_net *net) {
    const ms_tensor targets[] = {net->x, net->matrix, net->scale, net->shift, net->running};
    float data[MOST_ROWS * COLS];
    ms_result result = MS_RESULT_OK;
    t_rng rng = t_seed(7);
    for (size_t i = 0; i < sizeof targets / sizeof targets[0]; ++i) {
        t_fill(&rng, data, MOST_ROWS * COLS, 1.0f);
        result = first_error(result, ms_write(net->model, targets[i], data));
    }
    return result;
}

/* The smallest budget where the plan shall be tight. It takes most of the time of a first plan:
   what comes after the plan uses the one that is known. */
static ms_result fault_budget(fault_net *net, uint64_t *known) {
    ms_result result = MS_RESULT_OK;
    if (!net->how->tight) {
        return result;
    }
    if (*known == 0) {
        result = ms_smallest_budget(net->model, known);
    }
    if (result == MS_RESULT_OK) {
        ms_set_budget(net->model, *known);
    }
    return result;
}

static void fault_net_init(fault_net *net, const fault_case *how) {
    memset(net, 0, sizeof *net);
    net->how = how;
    net->config = t_config();
    net->config.allocator = t_heap_allocator(&net->heap);
    net->config.backend = t_device_backend(&net->device);
    net->config.debug = how->debug;
    net->config.early_update = how->early_update;
    net->config.accumulation_steps = how->micro_count;
    for (int i = 0; i < BORROWED; ++i) {
        net->borrowed[i] = (float *)calloc(KEPT_FLOATS, sizeof(float));
        assert_non_null(net->borrowed[i]);
    }
}

/* Everything from the arena to the first plan. The first failure is what is returned. */
static ms_result fault_net_build(fault_net *net, uint64_t *known) {
    ms_result result = MS_RESULT_OK;
    if (net->how->shared) {
        const ms_allocator allocator = t_heap_allocator(&net->heap);
        result = ms_arena_create(&net->config.backend, &allocator, &net->arena);
        if (result != MS_RESULT_OK) {
            assert_null(net->arena);
            return result;
        }
        net->config.arena = net->arena;
    }
    result = ms_create(&net->config, &net->model);
    if (result != MS_RESULT_OK) {
        return t_not_created(&net->model, result);
    }
    result = fault_register(net);
    result = first_error(result, fault_budget(net, known));
    result = first_error(result, fault_write(net));
    /* Even behind an error: a registration error that sticks is what wrap returns. */
    const ms_result wrapped = ms_wrap(net->model);
    return wrapped != MS_RESULT_OK ? wrapped : result;
}

static void fault_net_start(fault_net *net, const fault_case *how) {
    fault_net_init(net, how);
    static uint64_t known[FAULT_CASES];
    t_ok(net->model, fault_net_build(net, &known[how - fault_cases]));
    if (how->shared) {
        ms_config config = t_config();
        config.backend = net->config.backend;
        config.allocator = net->config.allocator;
        config.arena = net->arena;
        t_chain_start(&net->companion, &config, COMPANION_DEPTH);
    }
}

static void fault_net_end(fault_net *net) {
    ms_arena_destroy(net->arena); // the last model takes the memory with it
    ms_destroy(net->companion.model);
    ms_destroy(net->model);
    for (int i = 0; i < BORROWED; ++i) {
        free(net->borrowed[i]);
    }
    assert_true(net->heap.live_count == 0 && net->heap.live_bytes == 0);
    assert_true(net->heap.wrong_releases == 0);
    assert_true(net->device.live_count == 0 && net->device.live_bytes == 0);
    assert_true(net->device.wrong_releases == 0);
}

// ------------------------------------------------------------------------------------------------
// what lives between steps, to be compared and put back

typedef struct kept {
    ms_tensor tensors[KEPT];
    uint32_t count, buffer_at; // params and state come first
    float values[KEPT_FLOATS];
} kept;

static void kept_list(const fault_net *net, kept *k) {
    const ms_tensor params[] = {net->matrix, net->scale, net->shift};
    memset(k, 0, sizeof *k);
    for (size_t i = 0; i < sizeof params / sizeof params[0]; ++i) {
        k->tensors[k->count++] = params[i];
        for (int s = 0; s < MS_LIMIT_OPTIMIZER_STATE; ++s) {
            const ms_tensor moment = ms_optimizer_state(net->model, params[i], s);
            if (moment.id != 0) {
                k->tensors[k->count++] = moment;
            }
        }
    }
    k->buffer_at = k->count;
    k->tensors[k->count++] = net->running;
    assert_true(k->count <= KEPT);
}

static void keep(const fault_net *net, kept *k) {
    uint64_t at = 0;
    kept_list(net, k);
    for (uint32_t i = 0; i < k->count; ++i) {
        const uint64_t count = ms_tensor_count(net->model, k->tensors[i]);
        assert_true(count > 0 && at + count <= KEPT_FLOATS);
        t_ok(net->model, ms_read(net->model, k->tensors[i], k->values + at));
        at += count;
    }
}

/* Of params and optimizer state; buffers may have moved on. */
static bool same_state(const fault_net *net, const kept *a, const kept *b) {
    uint64_t count = 0;
    for (uint32_t i = 0; i < a->buffer_at; ++i) {
        count += ms_tensor_count(net->model, a->tensors[i]);
    }
    return memcmp(a->values, b->values, (size_t)count * sizeof(float)) == 0;
}

/* Writes what was kept, of this net or of one like it, from tensor `from` on, and the inputs. */
static void put_back(fault_net *net, const kept *k, uint32_t from) {
    float x[MOST_ROWS * COLS];
    uint64_t at = 0;
    kept own;
    kept_list(net, &own);
    t_rng rng = t_seed(7);
    t_fill(&rng, x, MOST_ROWS * COLS, 1.0f);
    t_ok(net->model, ms_write(net->model, net->x, x));
    for (uint32_t i = 0; i < k->count; ++i) {
        if (i >= from) {
            t_ok(net->model, ms_write(net->model, own.tensors[i], k->values + at));
        }
        at += ms_tensor_count(net->model, own.tensors[i]);
    }
}

// ------------------------------------------------------------------------------------------------
// acts: what a trainer does, and what may fail in it

typedef ms_result (*act_fn)(fault_net *net);

/* A step with all its micro-batches. The borrowed gradient is the trainer's to zero. */
static ms_result act_step(fault_net *net) {
    ms_result result = MS_RESULT_OK;
    memset(net->borrowed[2], 0, KEPT_FLOATS * sizeof(float));
    for (uint32_t i = 0; i < net->how->micro_count && result == MS_RESULT_OK; ++i) {
        result = ms_step(net->model, &net->loss_value);
    }
    return result;
}

static ms_result act_three_calls(fault_net *net) {
    ms_result result = MS_RESULT_OK;
    memset(net->borrowed[2], 0, KEPT_FLOATS * sizeof(float));
    for (uint32_t i = 0; i < net->how->micro_count && result == MS_RESULT_OK; ++i) {
        result = ms_forward(net->model, &net->loss_value);
        result = result != MS_RESULT_OK ? result : ms_backward(net->model);
    }
    return result != MS_RESULT_OK ? result : ms_update(net->model);
}

static ms_result act_eval(fault_net *net) {
    return ms_eval(net->model, NULL);
}

static ms_result act_wrap_again(fault_net *net) {
    ms_clear_hardware(net->model); // so that it plans again
    return ms_wrap(net->model);
}

static ms_result act_wrap_wide(fault_net *net) {
    ms_set_budget(net->model, (uint64_t)1 << 40);
    return ms_wrap(net->model);
}

static ms_result act_detach(fault_net *net) {
    return ms_detach(net->model);
}

/* Four params or buffers; none differs. */
static ms_result act_verify(fault_net *net) {
    ms_verify_report report;
    const ms_result result = ms_verify(net->model, NULL, NULL, &report);
    assert_true(result != MS_RESULT_OK || (report.tensor_count == 4 && report.differ_count == 0));
    return result;
}

static ms_result act_smallest(fault_net *net) {
    uint64_t bytes = 0;
    return ms_smallest_budget(net->model, &bytes);
}

static ms_result act_reshape(fault_net *net) {
    const int64_t more = MOST_ROWS, fewer = 1, as_before = ROWS;
    ms_result result;
    ms_set_budget(net->model, (uint64_t)1 << 40);
    result = ms_wrap(net->model);
    result = result != MS_RESULT_OK ? result : ms_reshape(net->model, &more);
    result = result != MS_RESULT_OK ? result : ms_reshape(net->model, &fewer);
    return result != MS_RESULT_OK ? result : ms_reshape(net->model, &as_before);
}

/* The trainer's memory moves. */
static ms_result act_borrow(fault_net *net) {
    ms_result result = MS_RESULT_OK;
    for (int i = 0; i < BORROWED && net->how->borrows; ++i) {
        float *moved = (float *)malloc(KEPT_FLOATS * sizeof(float));
        assert_non_null(moved);
        memcpy(moved, net->borrowed[i], KEPT_FLOATS * sizeof(float));
        float *old = net->borrowed[i];
        net->borrowed[i] = moved;
        result = first_error(result, fault_borrow(net));
        free(old);
    }
    return result;
}

static ms_result act_write(fault_net *net) {
    kept now;
    float data[KEPT_FLOATS];
    ms_result result = MS_RESULT_OK;
    memset(&now, 0, sizeof now);
    kept_list(net, &now);
    for (uint32_t i = 0; i < now.count; ++i) { // what is there already
        ms_result read = ms_read(net->model, now.tensors[i], data);
        result = first_error(result, read);
        if (read == MS_RESULT_OK) {
            result = first_error(result, ms_write(net->model, now.tensors[i], data));
        }
    }
    return result;
}

static ms_result act_ask(fault_net *net) {
    double norm = 0.0;
    float losses[MOST_ROWS];
    ms_result result = MS_RESULT_OK;
    if (net->how->clip > 0.0f) { // it stands until the next step
        result = ms_gradient_norm(net->model, &norm);
    }
    result = result != MS_RESULT_OK ? result : ms_forward(net->model, NULL);
    return result != MS_RESULT_OK ? result : ms_read(net->model, net->loss, losses);
}

/* A model of its own in the shared arena, wider than the others: the arena grows and all plans
   that point into it are told. */
static ms_result act_another_model(fault_net *net) {
    t_chain other;
    ms_config config = t_config();
    config.backend = net->config.backend;
    config.allocator = net->config.allocator;
    config.arena = net->arena;
    ms_result result = t_chain_create(&other, &config, COMPANION_DEPTH, 2 * T_CHAIN_ROWS, 8);
    if (result == MS_RESULT_OK) {
        result = ms_wrap(other.model);
    }
    ms_destroy(other.model);
    return result;
}

typedef struct act {
    const char *name;
    act_fn run;
    bool is_step; // a completed one moves params
} act;

static const act acts[] = {
    {"step", act_step, true},
    {"forward, backward, update", act_three_calls, true},
    {"eval", act_eval, false},
    {"wrap again", act_wrap_again, false},
    {"wrap with a large budget", act_wrap_wide, false},
    {"detach", act_detach, false},
    {"smallest budget", act_smallest, false},
    {"reshape", act_reshape, false},
    {"borrow", act_borrow, false},
    {"read and write", act_write, false},
    {"ask", act_ask, false},
    {"verify", act_verify, false},
    {"another model", act_another_model, false},
};
enum { ACTS = sizeof acts / sizeof acts[0] };

// ------------------------------------------------------------------------------------------------
// the loop

typedef enum fault_kind { FAULT_HEAP, FAULT_DEVICE, FAULT_CALLBACK, FAULT_KINDS } fault_kind;

/* The n-th call of a kind in this act of this model, from 1. */
typedef struct fault {
    const fault_case *how;
    const act *what;
    fault_kind kind;
    uint64_t at;
} fault;

static void expect(bool holds, const fault *where, const char *otherwise) {
    if (!holds) {
        fail_msg("\"%s\", \"%s\", fault %d at call %u: %s", where->how->name, where->what->name,
                 (int)where->kind, (unsigned)where->at, otherwise);
    }
}

static t_failing failing_of(fault_net *net, fault_kind kind) {
    return kind == FAULT_HEAP     ? t_failing_heap(&net->heap)
           : kind == FAULT_DEVICE ? t_failing_device(&net->device)
                                  : t_failing_of(&net->callbacks.calls, &net->callbacks.fail_at,
                                                 1u << MS_RESULT_CALLBACK);
}

typedef struct expectation {
    kept before, after; // one more step
    double loss;
} expectation;

static void expect_from(const fault_case *how, expectation *e) {
    fault_net twin;
    fault_net_start(&twin, how);
    t_ok(twin.model, act_step(&twin));
    keep(&twin, &e->before);
    put_back(&twin, &e->before, e->before.buffer_at);
    t_ok(twin.model, act_step(&twin));
    keep(&twin, &e->after);
    e->loss = twin.loss_value;
    assert_false(same_state(&twin, &e->before, &e->after));
    fault_net_end(&twin);
}

/* After the fault: the model is marked failed and cured, or has the params and state of before, or
   of a completed step. Then it trains on as the twin did. */
static void check_recovery(fault_net *net, const expectation *e, const fault *where,
                           uint32_t *cured) {
    kept now;
    const int64_t as_before = ROWS;
    if (where->what->run == act_reshape) { // wherever it stopped
        t_ok(net->model, ms_reshape(net->model, &as_before));
    }
    const ms_result result = ms_forward(net->model, NULL);
    if (result == MS_RESULT_FAILED) {
        t_error(net->model, ms_step(net->model, NULL), MS_RESULT_FAILED);
        t_error(net->model, ms_eval(net->model, NULL), MS_RESULT_FAILED);
        put_back(net, &e->before, 0);
        t_error(net->model, ms_step(net->model, NULL), MS_RESULT_FAILED);
        t_ok(net->model, ms_wrap(net->model));
        *cured += 1;
    }
    keep(net, &now);
    if (where->what->is_step && same_state(net, &now, &e->after)) {
        return;
    }
    expect(same_state(net, &now, &e->before), where, "params or state have changed");
    put_back(net, &e->before, e->before.buffer_at);
    t_ok(net->model, act_step(net));
    keep(net, &now);
    expect(same_state(net, &now, &e->after), where, "another step has other results");
    expect(net->loss_value == e->loss, where, "another step has another loss");
    if (net->how->shared) {
        t_ok(net->companion.model, ms_step(net->companion.model, NULL));
    }
}

/* Not even a buffer has changed, nor a gradient that is lent; unless debug mode could not put back
   what it had taken away. */
static void check_untouched(fault_net *net, const expectation *e, const float *lent,
                            const fault *where) {
    kept now;
    keep(net, &now);
    expect(net->model->run.failed || memcmp(now.values, e->before.values, sizeof now.values) == 0,
           where, "a value has changed");
    expect(memcmp(net->borrowed[2], lent, sizeof now.values) == 0, where,
           "the gradient that is lent has changed");
}

static bool is_applicable(const fault_case *how, const act *a) {
    return (a->run != act_another_model || how->shared) && (a->run != act_borrow || how->borrows);
}

/* How far away the call is that fails next: of a full sweep each, otherwise each of the first ones and
   then one in fifteen, or of allocations one in a hundred and one. */
static uint64_t stride_at(fault_kind kind, uint64_t at) {
    const uint64_t stride = kind == FAULT_CALLBACK ? t_stride(15)
                            : kind == FAULT_DEVICE ? t_size(15, t_stride(101))
                                                   : t_stride(101);
    return at > t_size(4, 10) ? stride : 1;
}

/* Returns the number of errors. Debug mode copies all memory around each callback, thousands of calls
   in a row that are all alike: there, at most every 17th after the first ones. */
static uint32_t every_call_fails_once(fault_kind kind, const fault_case *how, const act *a,
                                      const expectation *e, uint32_t *cured) {
    fault where = {how, a, kind, 1};
    const bool verifies = a->run == act_verify, takes_turns = a->run == act_another_model;
    fault_net net;
    t_failing f = failing_of(&net, kind);
    f.errors = takes_turns ? UINT32_MAX - 1 : f.errors;
    f.errors |= verifies; // MS_RESULT_OK: it puts back what is lent at the second try
    while (
        t_next_failure(&f, how->debug && f.at > 20 ? 16 + t_stride(85) : stride_at(kind, f.at))) {
        float lent[KEPT_FLOATS];
        where.at = f.at;
        fault_net_start(&net, how);
        t_ok(net.model, act_step(&net));
        put_back(&net, &e->before, e->before.buffer_at);
        memcpy(lent, net.borrowed[2], sizeof lent);
        t_arm(&f);
        const ms_result result = a->run(&net);
        t_failed(&f, takes_turns ? NULL : net.model, result);
        if (verifies) {
            check_untouched(&net, e, lent, &where);
        }
        check_recovery(&net, e, &where, cured);
        fault_net_end(&net);
    }
    return (uint32_t)f.error_count;
}

static void every_act_fails_everywhere(fault_kind kind, uint32_t counts[ACTS], uint32_t *cured) {
    memset(counts, 0, ACTS * sizeof *counts);
    for (size_t i = 0; i < FAULT_CASES; ++i) {
        static expectation e;
        expect_from(&fault_cases[i], &e);
        for (size_t k = 0; k < ACTS; ++k) {
            if (is_applicable(&fault_cases[i], &acts[k])) {
                counts[k] += every_call_fails_once(kind, &fault_cases[i], &acts[k], &e, cured);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// tests

static void count_event(const ms_event *event, void *user) {
    assert_true(event->kind < MS_EVENT_COUNT && event->size == sizeof *event);
    ((uint32_t *)user)[event->kind] += 1;
}

/* Or else the tests below would pass for want of anything to fail. */
static void the_programs_hold_every_kind_of_event(void **state) {
    (void)state;
    uint32_t counts[MS_EVENT_COUNT];
    bool copies = false; // inputs and verdicts, to and from a device
    memset(counts, 0, sizeof counts);
    for (size_t i = 0; i < FAULT_CASES; ++i) {
        fault_net net;
        ms_memory_report report;
        fault_net_start(&net, &fault_cases[i]);
        t_ok(net.model, ms_visit_events(net.model, MS_PROGRAM_TRAIN, count_event, counts));
        t_ok(net.model, ms_visit_events(net.model, MS_PROGRAM_EVAL, count_event, counts));
        t_report(net.model, &report);
        copies |= net.model->config.backend.is_asynchronous;
        assert_true(fault_cases[i].tight || report.recompute_count == 0);
        assert_true(report.early_update == (fault_cases[i].early_update == MS_SWITCH_ON));
        assert_true(fault_cases[i].borrows == (report.borrowed_bytes > 0));
        fault_net_end(&net);
    }
    for (int i = 0; i < MS_EVENT_COUNT; ++i) {
        const bool is_copy = i == MS_EVENT_INPUT || i == MS_EVENT_VERDICT;
        const bool of_host = i >= MS_EVENT_COPY_IN && i <= MS_EVENT_WAIT; // in test_virtual
        const bool is_cast = i == MS_EVENT_CAST;                          // in test_contract
        if ((counts[i] > 0) != (!of_host && !is_cast && (!is_copy || copies))) {
            fail_msg("%u events of kind %d", (unsigned)counts[i], i);
        }
    }
}

/* All cases compute the same first loss: none of them has lost a value on the way. */
static void plans_do_not_change_the_loss(void **state) {
    (void)state;
    double first = 0.0;
    for (size_t i = 0; i < FAULT_CASES; ++i) {
        fault_net net;
        double loss = 0.0;
        fault_net_start(&net, &fault_cases[i]);
        t_ok(net.model, ms_step(net.model, &loss));
        first = i == 0 ? loss : first;
        assert_memory_equal(&loss, &first, sizeof loss);
        fault_net_end(&net);
    }
}

static void building_fails_cleanly(fault_kind kind) {
    for (size_t i = 0; i < FAULT_CASES; ++i) {
        fault_net net;
        t_failing f = failing_of(&net, kind);
        while (t_next_failure(&f, stride_at(kind, f.at))) {
            uint64_t smallest = 0;
            fault_net_init(&net, &fault_cases[i]);
            t_arm(&f);
            const ms_result result = fault_net_build(&net, &smallest);
            const bool failed = t_failed(&f, net.model, result);
            if (net.model != NULL) { // as it was, or with a registration error that sticks
                ms_result again = fault_write(&net);
                again = first_error(again, fault_budget(&net, &smallest));
                again = first_error(again, ms_wrap(net.model));
                if (again != MS_RESULT_OK) {
                    assert_true(failed && kind == FAULT_HEAP);
                    t_error(net.model, ms_wrap(net.model), MS_RESULT_OUT_OF_MEMORY);
                } else {
                    t_ok(net.model, act_step(&net));
                }
            }
            fault_net_end(&net);
        }
        assert_true(f.at > 5);
    }
}

static void every_allocation_of_a_first_plan_fails_once(void **state) {
    (void)state;
    building_fails_cleanly(FAULT_HEAP);
}

static void every_backend_call_of_a_first_plan_fails_once(void **state) {
    (void)state;
    building_fails_cleanly(FAULT_DEVICE);
}

static void every_allocation_fails_once(void **state) {
    (void)state;
    uint32_t counts[ACTS], cured = 0;
    every_act_fails_everywhere(FAULT_HEAP, counts, &cured);
    for (size_t i = 0; i < ACTS; ++i) {
        const act_fn run = acts[i].run;
        const bool plans = run == act_wrap_again || run == act_wrap_wide || run == act_detach ||
                           run == act_smallest || run == act_reshape || run == act_another_model ||
                           run == act_verify;
        if (plans != (counts[i] > 0)) { // and steps allocate nothing
            fail_msg("%s: %u allocations", acts[i].name, (unsigned)counts[i]);
        }
    }
    assert_int_equal(cured, 0);
}

static void every_backend_call_fails_once(void **state) {
    (void)state;
    uint32_t counts[ACTS], cured = 0;
    every_act_fails_everywhere(FAULT_DEVICE, counts, &cured);
    for (size_t i = 0; i < ACTS; ++i) {
        if ((counts[i] == 0) != (acts[i].run == act_borrow || acts[i].run == act_smallest)) {
            fail_msg("%s: %u calls", acts[i].name, (unsigned)counts[i]);
        }
    }
    assert_true(cured > 0);
}

/* Of verification: it is no success, and what it had saved is put back, or the model has failed. */
static void a_device_that_stays_broken_is_told(void **state) {
    (void)state;
    fault_net net;
    t_failing f = t_failing_device(&net.device);
    while (t_next_failure(&f, t_stride(11))) {
        fault_net_start(&net, &fault_cases[4]); // lends a gradient
        t_ok(net.model, act_step(&net));
        t_arm(&f);
        net.device.fails_on = true;
        const ms_result result = act_verify(&net);
        t_failed(&f, net.model, result);
        fault_net_end(&net);
    }
    assert_true(f.at > 50);
}

static void every_callback_fails_once(void **state) {
    (void)state;
    uint32_t counts[ACTS], cured = 0;
    every_act_fails_everywhere(FAULT_CALLBACK, counts, &cured);
    for (size_t i = 0; i < ACTS; ++i) {
        const act_fn run = acts[i].run;
        const bool calls = run == act_step || run == act_three_calls || run == act_eval ||
                           run == act_ask || run == act_verify;
        assert_true(calls == (counts[i] > 0));
    }
    assert_true(cured > 0); // own updates, and backward behind an early update
}

/* ms_wrap for another device fails: then all that is told of the plan is as before. */
static void a_failed_wrap_leaves_the_device(void **state) {
    (void)state;
    fault_net net;
    t_failing f = t_failing_heap(&net.heap);
    while (t_next_failure(&f, 1)) {
        ms_memory_report before, after;
        fault_net_start(&net, &fault_cases[0]);
        t_report(net.model, &before);
        ms_set_hardware(net.model, ms_hardware_find("NVIDIA T4"));
        t_arm(&f);
        const ms_result result = ms_wrap(net.model);
        const bool failed = t_failed(&f, net.model, result);
        t_report(net.model, &after);
        assert_int_equal(strcmp(after.device_name, "NVIDIA T4") == 0, !failed);
        assert_true(!failed || after.step_us == before.step_us);
        fault_net_end(&net);
    }
    assert_true(f.error_count >= 20);
}

/* A failure in the second micro-batch gives up the first: a step starts at micro-batch 0. */
static void a_failing_micro_batch_gives_up_those_before(void **state) {
    (void)state;
    static expectation e;
    const fault_case *how = &fault_cases[1];
    fault_net net;
    kept now;
    expect_from(how, &e);
    fault_net_start(&net, how);
    t_ok(net.model, act_step(&net));
    put_back(&net, &e.before, e.before.buffer_at);
    for (uint64_t failing = 1; failing < 20; failing += 6) {
        t_ok(net.model, ms_step(net.model, NULL));
        net.callbacks.fail_at = net.callbacks.calls + failing;
        t_error(net.model, ms_step(net.model, NULL), MS_RESULT_CALLBACK);
        net.callbacks.fail_at = 0;
        put_back(&net, &e.before, e.before.buffer_at);
    }
    keep(&net, &now);
    assert_true(same_state(&net, &now, &e.before));
    t_ok(net.model, act_step(&net));
    keep(&net, &now);
    assert_true(same_state(&net, &now, &e.after));
    fault_net_end(&net);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_programs_hold_every_kind_of_event),
        cmocka_unit_test(plans_do_not_change_the_loss),
        cmocka_unit_test(every_allocation_of_a_first_plan_fails_once),
        cmocka_unit_test(every_backend_call_of_a_first_plan_fails_once),
        cmocka_unit_test(every_allocation_fails_once),
        cmocka_unit_test(every_backend_call_fails_once),
        cmocka_unit_test(a_device_that_stays_broken_is_told),
        cmocka_unit_test(every_callback_fails_once),
        cmocka_unit_test(a_failed_wrap_leaves_the_device),
        cmocka_unit_test(a_failing_micro_batch_gives_up_those_before),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
