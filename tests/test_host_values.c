/*  test_host_values.c - values whose home is the host: what a trainer does with them over the life of a
    model, failures, memory, and budgets for both sides. MEMSCALE_TEST_SEED is the first seed,
    MEMSCALE_TEST_LIVES the number of lives of each kind of model. */
#include "private.h"
#include "toy_layers.h"
#include "virtual.h"

// ------------------------------------------------------------------------------------------------
// the model: two matrices, a scale and a shift that two layers share, and a running state

enum { ROWS = 5, MOST_ROWS = 9, COLS = 6, LAYERS = 11, PARAMS = 4, MOST_FLOATS = MOST_ROWS * COLS };
enum { KEPT = PARAMS * 3 + 1, KEPT_FLOATS = 3 * 2 * (COLS * COLS + COLS) + COLS };

typedef enum device_kind { ON_CPU, ON_CPU_IN_ORDER, ON_VIRTUAL } device_kind;

typedef struct home_case {
    const char *name;
    device_kind device;
    ms_optimizer_kind optimizer;
    float clip;
    uint32_t micro_count, prefetch_depth;
    ms_switch early_update, async_offload, profiling;
    bool debug, shared, borrows;
} home_case;

static const home_case cases[] = {
    {"AdamW", ON_CPU, MS_OPTIMIZER_ADAMW, 0.0f, 1, 0, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT,
     MS_SWITCH_DEFAULT, false, false, false},
    {"accumulation and clipping", ON_VIRTUAL, MS_OPTIMIZER_ADAMW, 0.25f, 2, 0, MS_SWITCH_DEFAULT,
     MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, false, false, false},
    {"Lion", ON_VIRTUAL, MS_OPTIMIZER_LION, 0.25f, 2, 0, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT,
     MS_SWITCH_DEFAULT, false, false, false},
    {"early updates, one copy at a time", ON_VIRTUAL, MS_OPTIMIZER_ADAMW, 0.0f, 1, 1, MS_SWITCH_ON,
     MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, false, false, false},
    {"borrowed homes", ON_VIRTUAL, MS_OPTIMIZER_SGD, 0.25f, 1, 0, MS_SWITCH_DEFAULT,
     MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, false, false, true},
    {"borrowed homes on the CPU", ON_CPU, MS_OPTIMIZER_ADAMW, 0.0f, 2, 2, MS_SWITCH_DEFAULT,
     MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, false, false, true},
    {"shared arena", ON_VIRTUAL, MS_OPTIMIZER_SGD, 0.0f, 1, 0, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT,
     MS_SWITCH_DEFAULT, false, true, false},
    {"own update", ON_CPU, MS_OPTIMIZER_CUSTOM, 0.5f, 2, 0, MS_SWITCH_DEFAULT, MS_SWITCH_OFF,
     MS_SWITCH_DEFAULT, false, false, false},
    {"no update", ON_VIRTUAL, MS_OPTIMIZER_NONE, 0.0f, 2, 0, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT,
     MS_SWITCH_DEFAULT, false, false, false},
    {"copies in order", ON_CPU_IN_ORDER, MS_OPTIMIZER_ADAMW, 0.25f, 1, 0, MS_SWITCH_DEFAULT,
     MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, false, false, false},
    {"measured", ON_CPU, MS_OPTIMIZER_ADAMW, 0.0f, 1, 0, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT,
     MS_SWITCH_ON, false, false, false},
    {"measured, borrowed, accumulated", ON_VIRTUAL, MS_OPTIMIZER_ADAMW, 0.25f, 2, 0,
     MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, MS_SWITCH_ON, false, false, true},
    {"debug", ON_CPU, MS_OPTIMIZER_ADAMW, 0.25f, 2, 0, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT,
     MS_SWITCH_DEFAULT, true, false, false},
    {"debug, borrowed, shared", ON_CPU_IN_ORDER, MS_OPTIMIZER_SGD, 0.0f, 1, 0, MS_SWITCH_ON,
     MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, true, true, true},
};
enum { CASES = sizeof cases / sizeof cases[0] };

typedef struct home_net home_net;

/* A layer that counts its calls, and fails when one is enqueued. */
typedef struct home_layer {
    v_layer late; // first: what v_forward and the others find
    home_net *net;
} home_layer;

/* The CPU backend with its copies under way, of which the n-th call fails. */
typedef struct faulty {
    ms_backend cpu;
    uint64_t fail_at; // the n-th call from now on fails; 0: none
} faulty;

typedef struct faulty_state {
    faulty *of;
    void *state;
    const ms_allocator *host;
} faulty_state;

struct home_net {
    const home_case *how;
    bool is_plain, searches; // for plans beyond what is forced, which takes a hundred times longer
    t_heap heap;
    v_device device;
    faulty cpu;
    ms_config config;
    ms_arena *arena;
    ms_model *model, *companion;
    ms_axis axis;
    int64_t rows;
    ms_tensor x, running, loss, param[PARAMS];
    bool frozen[PARAMS];
    uint32_t micro_count;
    t_op ops[LAYERS];
    home_layer late[LAYERS];
    ms_layer layers[LAYERS];
    uint32_t layer_count;
    t_callbacks callbacks;
    t_chain chain; // another model in the shared arena
    float *lent[3];
    double loss_value;
    bool is_forced; // all is to be on the host, and the present plan is one that has it there
};

// ------------------------------------------------------------------------------------------------
// a backend of the CPU that fails

enum { CALL_ERROR = 21 };

static bool fails_now(faulty *f) {
    return f->fail_at != 0 && --f->fail_at == 0;
}

static int faulty_memory_alloc(void *user, const ms_allocator *host, uint64_t bytes,
                               void **memory) {
    faulty *f = (faulty *)user;
    return fails_now(f) ? CALL_ERROR : f->cpu.memory_alloc(f->cpu.user, host, bytes, memory);
}

static void faulty_memory_release(void *user, const ms_allocator *host, void *memory,
                                  uint64_t bytes) {
    faulty *f = (faulty *)user;
    f->cpu.memory_release(f->cpu.user, host, memory, bytes);
}

static int faulty_host_alloc(void *user, const ms_allocator *host, uint64_t bytes, void **memory) {
    faulty *f = (faulty *)user;
    *memory = fails_now(f) ? NULL : host->alloc(bytes, host->user);
    return *memory == NULL ? MS_BACKEND_OUT_OF_MEMORY : 0;
}

static void faulty_host_release(void *user, const ms_allocator *host, void *memory,
                                uint64_t bytes) {
    (void)user;
    host->release(memory, bytes, host->user);
}

static int faulty_open(void *user, const ms_open_args *args, void **state) {
    faulty *f = (faulty *)user;
    faulty_state *s = (faulty_state *)args->host->alloc(sizeof *s, args->host->user);
    if (s == NULL) {
        return MS_BACKEND_OUT_OF_MEMORY;
    }
    s->of = f;
    s->host = args->host;
    const int error = fails_now(f) ? CALL_ERROR : f->cpu.open(f->cpu.user, args, &s->state);
    if (error != 0) {
        args->host->release(s, sizeof *s, args->host->user);
        return error;
    }
    *state = s;
    return 0;
}

static void faulty_close(void *state) {
    faulty_state *s = (faulty_state *)state;
    s->of->cpu.close(s->state);
    s->host->release(s, sizeof *s, s->host->user);
}

static int faulty_prepare(void *state, const ms_prepare_args *args) {
    faulty_state *s = (faulty_state *)state;
    return fails_now(s->of) ? CALL_ERROR : s->of->cpu.prepare(s->state, args);
}

static int faulty_copy_in(void *state, void *device, const void *host, uint64_t bytes) {
    faulty_state *s = (faulty_state *)state;
    return fails_now(s->of) ? CALL_ERROR : s->of->cpu.copy_in(s->state, device, host, bytes);
}

static int faulty_copy_out(void *state, void *host, const void *device, uint64_t bytes) {
    faulty_state *s = (faulty_state *)state;
    return fails_now(s->of) ? CALL_ERROR : s->of->cpu.copy_out(s->state, host, device, bytes);
}

static int faulty_synchronize(void *state) {
    faulty_state *s = (faulty_state *)state;
    const int error = s->of->cpu.synchronize(s->state);
    return fails_now(s->of) ? CALL_ERROR : error;
}

static int faulty_record(void *state, ms_stream_kind stream, uint32_t event) {
    faulty_state *s = (faulty_state *)state;
    return fails_now(s->of) ? CALL_ERROR : s->of->cpu.record(s->state, stream, event);
}

static int faulty_wait(void *state, ms_stream_kind stream, uint32_t event) {
    faulty_state *s = (faulty_state *)state;
    return fails_now(s->of) ? CALL_ERROR : s->of->cpu.wait(s->state, stream, event);
}

static int faulty_wait_on_host(void *state, uint32_t event) {
    faulty_state *s = (faulty_state *)state;
    return fails_now(s->of) ? CALL_ERROR : s->of->cpu.wait_on_host(s->state, event);
}

/* One that fails has updated half of the part. */
static int faulty_update(void *state, const ms_update_args *args) {
    faulty_state *s = (faulty_state *)state;
    const bool fails = fails_now(s->of);
    ms_update_args part = *args;
    part.count = fails ? args->count / 2 : args->count;
    const int error = s->of->cpu.update(s->state, &part);
    return fails ? CALL_ERROR : error;
}

static const char *faulty_text(void *user, int error) {
    (void)user;
    return error == CALL_ERROR ? "a call was made to fail" : NULL;
}

static void faulty_hardware(void *user, ms_hardware *hardware) {
    faulty *f = (faulty *)user;
    f->cpu.hardware(f->cpu.user, hardware);
}

static ms_backend faulty_backend(faulty *f) {
    ms_backend b = f->cpu = ms_backend_cpu();
    b.query = NULL; // and slices wait
    b.user = f;
    b.memory_alloc = faulty_memory_alloc;
    b.memory_release = faulty_memory_release;
    b.host_alloc = faulty_host_alloc;
    b.host_release = faulty_host_release;
    b.hardware = faulty_hardware;
    b.error_text = faulty_text;
    b.open = faulty_open;
    b.close = faulty_close;
    b.prepare = faulty_prepare;
    b.copy_in = faulty_copy_in;
    b.copy_out = faulty_copy_out;
    b.synchronize = faulty_synchronize;
    b.record = faulty_record;
    b.wait = faulty_wait;
    b.wait_on_host = faulty_wait_on_host;
    b.update = faulty_update;
    return b;
}

// ------------------------------------------------------------------------------------------------
// the model itself

static int count_call(const ms_call *call) {
    t_callbacks *c = &((const home_layer *)call->user)->net->callbacks;
    c->calls += 1;
    return c->fail_at != 0 && c->calls >= c->fail_at ? T_CALLBACK_ERROR : 0;
}

static int late_forward(const ms_call *call) {
    const int error = count_call(call);
    return error != 0 ? error : v_forward(call);
}

static int late_backward(const ms_call *call) {
    const int error = count_call(call);
    return error != 0 ? error : v_backward(call);
}

static int late_recompute(const ms_call *call) {
    const int error = count_call(call);
    return error != 0 ? error : v_recompute(call);
}

/* Layers of the virtual device fail when they are enqueued. */
static ms_layer_desc make_late(home_net *n, uint32_t layer, const ms_layer_desc *desc) {
    ms_layer_desc d = v_wrap(desc, &n->late[layer].late);
    n->late[layer].net = n;
    n->ops[layer].fails = NULL;
    d.forward = late_forward;
    d.backward = d.backward != NULL ? late_backward : NULL;
    d.recompute = d.recompute != NULL ? late_recompute : NULL;
    return d;
}

/* state[0] is a running mean of the gradients, state[1] counts. */
static int own_update(const ms_update_args *args) {
    const float scale = args->gradient_scale != NULL ? *args->gradient_scale : 1.0f;
    for (uint64_t i = 0; i < args->count; ++i) {
        args->state[0][i] = 0.5f * args->state[0][i] + 0.5f * scale * args->gradient[i];
        args->state[1][i] += 1.0f;
        args->value[i] -= args->learning_rate * args->state[0][i];
    }
    return 0;
}

static ms_tensor add_layer(home_net *n, t_kind kind, const char *name, ms_tensor in,
                           const ms_tensor *param) {
    const uint32_t i = n->layer_count++;
    const ms_shape shape = ms_along(ms_shape2(n->rows, COLS), 0, n->axis);
    const ms_tensor out = kind == T_LOSS ? t_losses_of(n->model, in)
                                         : ms_activation(n->model, name, MS_DTYPE_F32, shape);
    ms_layer_desc d = t_layer(&n->ops[i], kind, name, in, out);
    n->ops[i].fails = &n->callbacks;
    for (int k = 0; param != NULL && k < (kind == T_MATMUL ? 1 : 2); ++k) {
        d.param[k] = param[k];
    }
    if (kind == T_NORM) {
        d.saved[0] =
            ms_saved(n->model, "spread", MS_DTYPE_F32, ms_along(ms_shape2(n->rows, 2), 0, n->axis));
        d.forward_workspace.bytes = COLS * sizeof(float);
        d.recompute = t_forward;
        d.recompute_workspace = d.forward_workspace;
        d.backward_workspace.bytes = 2 * COLS * sizeof(float);
    }
    if (kind == T_RUNNING) {
        d.state[0] = n->running;
    }
    if (n->how->device == ON_VIRTUAL) {
        d = make_late(n, i, &d);
    }
    n->layers[i] = ms_register_layer(n->model, &d);
    return out;
}

static void add_layers(home_net *n) {
    ms_tensor last = add_layer(n, T_MATMUL, "first", n->x, &n->param[0]);
    last = add_layer(n, T_RUNNING, "running", last, NULL);
    const ms_tensor dropped[] = {last, add_layer(n, T_SQUASH, "squash", last, NULL)};
    for (int i = 0; i < 2 && !n->is_plain && n->how->micro_count > 1; ++i) {
        ms_set_tensor_technique(n->model, dropped[i], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
    }
    last = dropped[1];
    last = add_layer(n, T_AFFINE, "affine", last, &n->param[2]);
    last = add_layer(n, T_DROPOUT, "dropout", last, NULL);
    last = add_layer(n, T_MATMUL, "second", last, &n->param[1]);
    last = add_layer(n, T_NORM, "norm", last, NULL);
    last = add_layer(n, T_AFFINE, "tied", last, &n->param[2]);
    last = add_layer(n, T_SQUASH, "squash again", last, NULL);
    n->loss = add_layer(n, T_LOSS, "loss", last, NULL);
    ms_set_loss(n->model, n->loss);
}

/* All that can be moved. */
static void force_all(home_net *n, ms_switch force) {
    for (uint32_t i = 0; i < n->layer_count; ++i) {
        ms_set_layer_technique(n->model, n->layers[i], MS_TECHNIQUE_OFFLOADING, force);
    }
    n->is_forced = force == MS_SWITCH_ON;
}

/* A param, the gradient of another and the state of a third. */
static ms_tensor lent_tensor(const home_net *n, int i) {
    return i == 0   ? n->param[0]
           : i == 1 ? ms_gradient(n->model, n->param[1])
                    : ms_optimizer_state(n->model, n->param[2], 0);
}

static void lend(home_net *n) {
    for (int i = 0; i < 3 && n->how->borrows; ++i) {
        const ms_tensor tensor = lent_tensor(n, i);
        if (tensor.id != 0) {
            t_ok(n->model, ms_borrow(n->model, tensor, n->lent[i]));
        }
    }
}

static bool buffer_is_on_host; // of the nets that are made next

static void register_model(home_net *n) {
    static const char *const names[PARAMS] = {"first", "second", "scale", "shift"};
    ms_optimizer_desc optimizer = t_optimizer(n->how->optimizer, 0.01f);
    ms_model *m = n->model;
    n->axis = ms_add_axis(m, "rows", n->rows, MOST_ROWS);
    n->x = ms_input(m, "x", MS_DTYPE_F32, ms_along(ms_shape2(n->rows, COLS), 0, n->axis));
    n->running = ms_buffer(m, "running", MS_DTYPE_F32, ms_shape1(COLS));
    if (buffer_is_on_host) {
        ms_set_on_host(m, n->running);
    }
    for (int i = 0; i < PARAMS; ++i) {
        n->param[i] =
            ms_param(m, names[i], MS_DTYPE_F32, i < 2 ? ms_shape2(COLS, COLS) : ms_shape1(COLS));
    }
    add_layers(n);
    optimizer.grad_clip_norm = n->how->clip;
    optimizer.momentum = optimizer.kind == MS_OPTIMIZER_SGD ? 0.5f : 0.0f;
    if (optimizer.kind == MS_OPTIMIZER_CUSTOM) {
        optimizer.update = own_update;
        optimizer.state_count = 2;
    }
    ms_set_optimizer(m, &optimizer);
}

static void write_input(home_net *n, uint64_t seed) {
    float data[MOST_FLOATS];
    t_rng rng = t_seed(seed);
    t_fill(&rng, data, MOST_FLOATS, 1.0f);
    t_ok(n->model, ms_write(n->model, n->x, data));
}

static void write_params(home_net *n, uint64_t seed) {
    float data[MOST_FLOATS];
    t_rng rng = t_seed(seed);
    for (int i = 0; i < PARAMS; ++i) {
        t_fill(&rng, data, MOST_FLOATS, 1.0f);
        t_ok(n->model, ms_write(n->model, n->param[i], data));
    }
}

static ms_backend backend_of(home_net *n) {
    ms_backend backend = n->how->device == ON_VIRTUAL ? v_backend(&n->device)
                         : n->how->device == ON_CPU   ? faulty_backend(&n->cpu)
                                                      : t_backend_without_state();
    n->device.cpu.gemm = t_gemm;
    if (n->how->device != ON_VIRTUAL) {
        backend.gemm = t_gemm;
    }
    return backend;
}

static void config_of(home_net *n) {
    const home_case *how = n->how;
    ms_config *c = &n->config;
    *c = t_config();
    v_open(&n->device, 11);
    c->allocator = t_heap_allocator(&n->heap);
    c->backend = backend_of(n);
    c->accumulation_steps = n->micro_count = how->micro_count;
    c->seed = 5;
    if (n->is_plain) {
        c->offloading = c->checkpointing = c->early_update = MS_SWITCH_OFF;
        return;
    }
    c->offloading = n->searches ? MS_SWITCH_ON : MS_SWITCH_OFF;
    c->checkpointing = n->searches ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    c->debug = how->debug;
    c->prefetch_depth = how->prefetch_depth;
    c->async_offload = how->async_offload;
    c->early_update = how->early_update;
    c->empirical_profiling = how->profiling;
    c->warmup_steps = 1;
}

/* Registered, not wrapped. */
static void net_create(home_net *n, const home_case *how, bool is_plain, bool searches) {
    memset(n, 0, sizeof *n);
    n->how = how;
    n->is_plain = is_plain;
    n->searches = searches;
    n->rows = ROWS;
    config_of(n);
    for (int i = 0; i < 3; ++i) {
        n->lent[i] = (float *)calloc(MOST_FLOATS, sizeof(float));
        assert_non_null(n->lent[i]);
    }
    if (how->shared) {
        t_ok(NULL, ms_arena_create(&n->config.backend, &n->config.allocator, &n->arena));
        n->config.arena = n->arena;
    }
    t_ok(n->model, ms_create(&n->config, &n->model));
    register_model(n);
    if (!is_plain) {
        force_all(n, MS_SWITCH_ON);
    }
    lend(n);
}

static void net_start(home_net *n, const home_case *how, bool is_plain, bool searches) {
    net_create(n, how, is_plain, searches);
    t_ok(n->model, ms_wrap(n->model));
    write_params(n, 3);
    write_input(n, 4);
}

static void net_end(home_net *n) {
    ms_arena_destroy(n->arena);
    ms_destroy(n->model);
    for (int i = 0; i < 3; ++i) {
        free(n->lent[i]);
    }
    assert_int_equal(n->heap.live_count, 0);
    assert_int_equal(n->heap.live_bytes, 0);
    assert_int_equal(n->heap.wrong_releases, 0);
    assert_int_equal(n->device.engine.pending, 0);
    assert_int_equal(n->device.callback_error, 0);
    v_close(&n->device);
}

// ------------------------------------------------------------------------------------------------
// what is kept between steps

typedef struct kept {
    uint32_t count, floats;
    ms_tensor tensor[KEPT];
    float value[KEPT_FLOATS];
} kept;

/* Params first, then their state, then the buffer. */
static void list_kept(const home_net *n, kept *k) {
    memset(k, 0, sizeof *k);
    for (int i = 0; i < PARAMS; ++i) {
        k->tensor[k->count++] = n->param[i];
    }
    for (int i = 0; i < 2 * PARAMS; ++i) {
        const ms_tensor state = ms_optimizer_state(n->model, n->param[i / 2], i % 2);
        if (state.id != 0 && !n->frozen[i / 2]) {
            k->tensor[k->count++] = state;
        }
    }
    k->tensor[k->count++] = n->running;
}

static void read_kept(const home_net *n, kept *k) {
    uint64_t at = 0;
    list_kept(n, k);
    for (uint32_t i = 0; i < k->count; ++i) {
        assert_true(at + ms_tensor_count(n->model, k->tensor[i]) <= KEPT_FLOATS);
        t_ok(n->model, ms_read(n->model, k->tensor[i], k->value + at));
        at += ms_tensor_count(n->model, k->tensor[i]);
    }
    k->floats = (uint32_t)at;
}

static void write_kept(home_net *n, const kept *k) {
    uint64_t at = 0;
    for (uint32_t i = 0; i < k->count; ++i) {
        t_ok(n->model, ms_write(n->model, k->tensor[i], k->value + at));
        at += ms_tensor_count(n->model, k->tensor[i]);
    }
}

/* With or without the buffer, which comes last. */
static bool same_values(const home_net *a, const home_net *b, bool with_buffer) {
    static kept of_a, of_b;
    read_kept(a, &of_a);
    read_kept(b, &of_b);
    const size_t floats = of_a.floats - (with_buffer ? 0u : (size_t)COLS);
    return of_a.count == of_b.count && of_a.floats == of_b.floats &&
           memcmp(of_a.value, of_b.value, floats * sizeof(float)) == 0;
}

static bool same_kept(const home_net *a, const home_net *b) {
    return same_values(a, b, true);
}

static bool same_gradients(const home_net *a, const home_net *b) {
    bool same = true;
    for (int i = 0; i < PARAMS; ++i) {
        float of_a[MOST_FLOATS], of_b[MOST_FLOATS];
        const uint64_t bytes = ms_tensor_bytes(a->model, a->param[i]);
        const ms_result read = ms_read(b->model, ms_gradient(b->model, b->param[i]), of_b);
        if (read == MS_RESULT_ORDER) { // used up by an early update, or frozen
            assert_true(b->how->early_update != MS_SWITCH_OFF || b->frozen[i]);
            continue;
        }
        t_ok(b->model, read);
        t_ok(a->model, ms_read(a->model, ms_gradient(a->model, a->param[i]), of_a));
        same = same && memcmp(of_a, of_b, (size_t)bytes) == 0;
    }
    return same;
}

// ------------------------------------------------------------------------------------------------
// where values are

typedef struct whereabouts {
    const home_net *net;
    uint32_t wrong, on_host;
} whereabouts;

/* All state of a param is where its first part is. */
static bool is_lent(const home_net *n, ms_tensor tensor) {
    const ms_tensor more = ms_optimizer_state(n->model, n->param[2], 1);
    bool is = tensor.id == more.id;
    for (int i = 0; i < 3; ++i) {
        is = is || tensor.id == lent_tensor(n, i).id;
    }
    return is && n->how->borrows;
}

/* Resident values of params: all of them on the host, or none. */
static void look_at(const ms_lifetime *lifetime, void *user) {
    whereabouts *w = (whereabouts *)user;
    const bool of_param = lifetime->category == MS_CATEGORY_PARAM ||
                          lifetime->category == MS_CATEGORY_GRADIENT ||
                          lifetime->category == MS_CATEGORY_OPTIMIZER;
    if (lifetime->is_resident && of_param) {
        w->wrong +=
            lifetime->is_on_host != (w->net->is_forced || is_lent(w->net, lifetime->tensor));
        w->on_host += lifetime->is_on_host;
    }
}

/* What ms_data gives is where the plan has it, and holds what ms_read reads. */
static void expect_data(home_net *n, ms_tensor tensor, const float *lent) {
    float value[MOST_FLOATS];
    t_ok(n->model, ms_read(n->model, tensor, value));
    const void *data = ms_data(n->model, tensor);
    assert_non_null(data);
    assert_memory_equal(data, value, (size_t)ms_tensor_bytes(n->model, tensor));
    assert_true(lent == NULL || data == lent);
    if (n->how->device == ON_VIRTUAL && lent == NULL) {
        assert_int_equal(v_is_on_device(&n->device, data), !n->is_forced);
    }
}

static void expect_homes(home_net *n) {
    whereabouts w = {n, 0, 0};
    ms_memory_report report;
    t_report(n->model, &report);
    t_ok(n->model, ms_visit_lifetimes(n->model, MS_PROGRAM_TRAIN, look_at, &w));
    assert_int_equal(w.wrong, 0);
    assert_int_equal(w.on_host > 0, n->is_forced || n->how->borrows);
    assert_int_equal(report.host_bytes_of[MS_CATEGORY_PARAM] > 0, n->is_forced);
    assert_true(n->is_forced || n->how->borrows || report.to_device_bytes == 0);
    t_ok(n->model, ms_synchronize(n->model));
    for (int i = 0; i < PARAMS; ++i) {
        const ms_tensor state = ms_optimizer_state(n->model, n->param[i], 0);
        const bool lends = n->how->borrows;
        expect_data(n, n->param[i], lends && i == 0 ? n->lent[0] : NULL);
        if (state.id != 0 && !n->frozen[i]) {
            expect_data(n, state, lends && i == 2 ? n->lent[2] : NULL);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// what a trainer does

typedef struct pair {
    home_net *plain, *moved;
    t_rng rng;
    uint64_t round;
} pair;

/* The trainer clears the gradient that it lends, once nothing uses it. */
static void clear_lent(home_net *n) {
    t_ok(n->model, ms_synchronize(n->model));
    memset(n->lent[1], 0, MOST_FLOATS * sizeof(float));
}

static ms_result whole_step(home_net *n) {
    ms_result result = MS_RESULT_OK;
    for (uint32_t i = 0; i < n->micro_count && result == MS_RESULT_OK; ++i) {
        result = ms_step(n->model, &n->loss_value);
    }
    return result;
}

static ms_result up_to_update(home_net *n) {
    ms_result result = MS_RESULT_OK;
    for (uint32_t i = 0; i < n->micro_count && result == MS_RESULT_OK; ++i) {
        result = ms_forward(n->model, &n->loss_value);
        result = result == MS_RESULT_OK ? ms_backward(n->model) : result;
    }
    return result;
}

static void expect_same(const pair *p, const char *after) {
    double a = p->plain->loss_value, b = p->moved->loss_value;
    if (memcmp(&a, &b, sizeof a) != 0 || !same_kept(p->plain, p->moved)) {
        fail_msg("\"%s\": other bits after \"%s\" in round %u (loss %.9g, plain %.9g)",
                 p->moved->how->name, after, (unsigned)p->round, b, a);
    }
}

/* Inputs of the next step. */
static void feed(pair *p) {
    const uint64_t seed = t_next(&p->rng);
    write_input(p->plain, seed);
    write_input(p->moved, seed);
    clear_lent(p->plain);
    clear_lent(p->moved);
}

static void act_step(pair *p) {
    feed(p);
    t_ok(p->plain->model, whole_step(p->plain));
    t_ok(p->moved->model, whole_step(p->moved));
}

static void act_three_calls(pair *p) {
    feed(p);
    t_ok(p->plain->model, up_to_update(p->plain));
    t_ok(p->moved->model, up_to_update(p->moved));
    assert_true(same_gradients(p->plain, p->moved));
    t_ok(p->plain->model, ms_update(p->plain->model));
    t_ok(p->moved->model, ms_update(p->moved->model));
}

static void act_eval(pair *p) {
    feed(p);
    t_ok(p->plain->model, ms_eval(p->plain->model, &p->plain->loss_value));
    t_ok(p->moved->model, ms_eval(p->moved->model, &p->moved->loss_value));
}

/* What one net has, written to both. */
static void load(home_net *n, const kept *saved) {
    kept own = *saved;
    list_kept(n, &own);
    memcpy(own.value, saved->value, sizeof own.value);
    write_kept(n, &own);
}

/* Saves, trains on, and loads. */
static void act_load(pair *p) {
    kept saved;
    read_kept(p->moved, &saved);
    act_step(p);
    expect_same(p, "saving");
    load(p->moved, &saved);
    load(p->plain, &saved);
}

static void act_write_params(pair *p) {
    const uint64_t seed = t_next(&p->rng);
    write_params(p->plain, seed);
    write_params(p->moved, seed);
}

static void act_verify(pair *p) {
    ms_verify_report report = {0};
    t_ok(p->moved->model, ms_verify(p->moved->model, NULL, NULL, &report));
    assert_int_equal(report.differ_count, 0);
    assert_int_equal(report.tensor_count, 1 + PARAMS - p->moved->frozen[1] - p->moved->frozen[3]);
}

static void act_budget(pair *p) {
    ms_memory_report report;
    uint64_t smallest = 0;
    ms_model *m = p->moved->model;
    t_ok(m, ms_smallest_budget(m, &smallest));
    t_report(m, &report);
    const uint64_t most = report.plain_bytes > smallest ? report.plain_bytes : smallest;
    const uint64_t budget = smallest + (most - smallest) * t_below(&p->rng, 4) / 3;
    ms_set_budget(m, budget);
    t_ok(m, ms_wrap(m));
    t_report(m, &report);
    assert_true(report.arena_bytes <= budget);
}

/* A random part is forced, and what is left is forbidden or as the planner likes; then a step, and
   all is forced again. */
static void act_force(pair *p) {
    home_net *n = p->moved;
    ms_set_budget(n->model, (uint64_t)1 << 40);
    for (uint32_t i = 0; i < n->layer_count && !n->how->borrows; ++i) {
        ms_set_layer_technique(n->model, n->layers[i], MS_TECHNIQUE_OFFLOADING,
                               (ms_switch)t_below(&p->rng, 3));
    }
    t_ok(n->model, ms_wrap(n->model));
    expect_same(p, "another force");
    act_step(p);
    expect_same(p, "a step with another force");
    force_all(n, MS_SWITCH_ON);
    t_ok(n->model, ms_wrap(n->model));
}

static void reshape(home_net *n, int64_t rows) {
    n->rows = rows;
    t_ok(n->model, ms_reshape(n->model, &rows));
}

static void act_reshape(pair *p) {
    const int64_t rows = 1 + t_below(&p->rng, MOST_ROWS);
    reshape(p->plain, rows);
    reshape(p->moved, rows);
    act_step(p);
}

static void act_detach(pair *p) {
    ms_model *m = p->moved->model;
    t_ok(m, ms_detach(m));
    p->moved->is_forced = false;
    expect_same(p, "detaching");
    expect_homes(p->moved);
    act_step(p);
    expect_same(p, "a step of the plain plan");
    t_ok(m, ms_wrap(m));
    p->moved->is_forced = true;
}

static void freeze(pair *p, int i, bool frozen) {
    home_net *const nets[] = {p->plain, p->moved};
    for (int k = 0; k < 2; ++k) {
        nets[k]->frozen[i] = frozen;
        ms_set_frozen(nets[k]->model, nets[k]->param[i], frozen);
        t_ok(nets[k]->model, ms_wrap(nets[k]->model));
    }
}

static void act_freeze(pair *p) {
    const int i = t_chance(&p->rng, 0.5) ? 1 : 3;
    freeze(p, i, true);
    act_step(p);
    expect_same(p, "a step with a frozen param");
    expect_homes(p->moved);
    act_verify(p);
    freeze(p, i, false);
}

static void accumulate(pair *p, uint32_t micro_count) {
    home_net *const nets[] = {p->plain, p->moved};
    for (int k = 0; k < 2; ++k) {
        nets[k]->micro_count = micro_count;
        ms_set_accumulation(nets[k]->model, micro_count);
        t_ok(nets[k]->model, ms_wrap(nets[k]->model));
    }
}

static void act_accumulate(pair *p) {
    const home_case *how = p->moved->how;
    if (how->early_update != MS_SWITCH_ON) {
        accumulate(p, 4 - how->micro_count);
        act_step(p);
        expect_same(p, "more micro-batches");
        accumulate(p, how->micro_count);
    }
}

/* What is lent moves, between steps. */
static void act_lend(pair *p) {
    home_net *n = p->moved;
    float *old[3];
    memcpy(old, n->lent, sizeof old);
    t_ok(n->model, ms_synchronize(n->model));
    for (int i = 0; i < 3; ++i) {
        n->lent[i] = (float *)malloc(MOST_FLOATS * sizeof(float));
        assert_non_null(n->lent[i]);
        memcpy(n->lent[i], old[i], MOST_FLOATS * sizeof(float));
    }
    lend(n);
    for (int i = 0; i < 3; ++i) {
        memset(old[i], 0x7f, MOST_FLOATS * sizeof(float)); // nobody reads it again
        free(old[i]);
    }
}

/* A step that is given up after forward, and a micro-batch that is given up by a wrap. */
static void act_give_up(pair *p) {
    home_net *const nets[] = {p->plain, p->moved};
    feed(p);
    for (int k = 0; k < 2; ++k) {
        t_ok(nets[k]->model, ms_forward(nets[k]->model, &nets[k]->loss_value));
        write_params(nets[k], 12 + p->round);
        t_error(nets[k]->model, ms_backward(nets[k]->model), MS_RESULT_ORDER);
    }
}

/* A step whose loss is not finite changes nothing but the buffer. */
static void act_not_finite(pair *p) {
    float data[MOST_FLOATS];
    home_net *const nets[] = {p->plain, p->moved};
    for (int i = 0; i < MOST_FLOATS; ++i) {
        data[i] = 3e38f;
    }
    for (int k = 0; k < 2; ++k) {
        float zeros[COLS] = {0};
        clear_lent(nets[k]);
        t_ok(nets[k]->model, ms_write(nets[k]->model, nets[k]->x, data));
        t_error(nets[k]->model, ms_step(nets[k]->model, &nets[k]->loss_value), MS_RESULT_NONFINITE);
        nets[k]->loss_value = 0.0;
        t_ok(nets[k]->model, ms_write(nets[k]->model, nets[k]->running, zeros));
    }
}

/* Gradients that overflow, mostly, while the loss does not: with clipping the norm ends the step
   before any update. (Debug mode stops at the layer that makes such gradients.) */
static void act_norm_not_finite(pair *p) {
    const home_case *how = p->moved->how;
    float large[COLS];
    ms_result results[2] = {MS_RESULT_OK, MS_RESULT_OK};
    home_net *const nets[] = {p->plain, p->moved};
    for (int i = 0; i < COLS; ++i) {
        large[i] = 1e4f;
    }
    feed(p);
    for (int k = 0; k < 2 && how->clip > 0.0f && !how->debug; ++k) {
        home_net *n = nets[k];
        kept saved, before, after;
        read_kept(n, &saved);
        write_params(n, 3);
        t_ok(n->model, ms_write(n->model, n->param[2], large));
        read_kept(n, &before);
        ms_set_loss_factor(n->model, 3e38f);
        results[k] = whole_step(n);
        assert_true(n->loss_value < 1e300);
        read_kept(n, &after);
        assert_int_equal(memcmp(after.value, before.value, COLS * sizeof(float)) == 0,
                         results[k] == MS_RESULT_NONFINITE);
        load(n, &saved);
        ms_set_loss_mean(n->model);
        n->loss_value = 0.0;
    }
    assert_int_equal(results[0], results[1]);
}

/* The other model of the arena takes its memory in between. */
static void act_other_model(pair *p) {
    home_net *n = p->moved;
    if (n->arena == NULL) {
        return;
    }
    ms_config config = n->config;
    config.debug = false;
    config.offloading = MS_SWITCH_OFF;
    config.early_update = MS_SWITCH_DEFAULT;
    if (n->how->device != ON_VIRTUAL) { // whose layers are to run late
        t_chain_start(&n->chain, &config, 1 + t_below(&p->rng, 4));
        t_ok(n->chain.model, ms_step(n->chain.model, NULL));
        ms_destroy(n->chain.model);
    }
}

typedef struct act {
    const char *name;
    void (*run)(pair *p);
} act;

static const act acts[] = {
    {"step", act_step},
    {"three calls", act_three_calls},
    {"eval", act_eval},
    {"loading", act_load},
    {"writing params", act_write_params},
    {"verifying", act_verify},
    {"another budget", act_budget},
    {"forcing", act_force},
    {"other sizes", act_reshape},
    {"detaching", act_detach},
    {"freezing", act_freeze},
    {"accumulating", act_accumulate},
    {"lending elsewhere", act_lend},
    {"giving up", act_give_up},
    {"a loss that is not finite", act_not_finite},
    {"a norm that is not finite", act_norm_not_finite},
    {"another model", act_other_model},
};
enum { ACTS = sizeof acts / sizeof acts[0] };

// ------------------------------------------------------------------------------------------------
// life cycle

/* So many acts in a random order, each with a step after it. */
static void live(const home_case *how, uint64_t seed, uint32_t count, bool searches) {
    static home_net plain, moved;
    pair p = {&plain, &moved, t_seed(seed), 0};
    uint32_t order[ACTS];
    net_start(&plain, how, true, false);
    net_start(&moved, how, false, searches);
    expect_same(&p, "writing");
    for (uint32_t i = 0; i < ACTS; ++i) {
        const uint32_t k = t_below(&p.rng, i + 1);
        order[i] = order[k];
        order[k] = i;
    }
    for (; p.round < count; ++p.round) {
        const act *a = &acts[order[p.round]];
        a->run(&p);
        expect_same(&p, a->name);
        expect_homes(&moved);
        act_step(&p);
        expect_same(&p, "a step more");
    }
    net_end(&plain);
    net_end(&moved);
}

static void a_life_on_the_host_has_the_bits_of_the_plain_plan(void **state) {
    (void)state;
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t end = first + t_environment("MEMSCALE_TEST_LIVES", t_sweep(1, 5));
    const uint32_t count = (uint32_t)t_sweep(5, ACTS);
    for (uint64_t seed = first; seed < end; ++seed) {
        for (int i = 0; i < CASES; ++i) {
            live(&cases[i], seed, count, (seed + (uint64_t)i) % 4 == 0);
        }
    }
}

/* Steps, evals and halted steps allocate nothing, on either side; nor do copies pile up. */
static void memory_is_flat(void **state) {
    (void)state;
    static home_net n;
    const uint32_t steps = (uint32_t)t_sweep(300, 10000);
    for (int i = 0; i < CASES; ++i) {
        net_start(&n, &cases[i], false, false);
        for (int step = 0; step < 40; ++step) { // among them those that are measured
            t_ok(n.model, whole_step(&n));
        }
        t_ok(n.model, ms_eval(n.model, NULL));
        t_ok(n.model, ms_synchronize(n.model));
        const uint64_t calls = n.heap.calls, bytes = n.heap.live_bytes;
        for (uint32_t step = 0; step < (cases[i].debug ? steps / 10 : steps); ++step) {
            write_input(&n, step);
            clear_lent(&n);
            const ms_result result = whole_step(&n);
            assert_true(result == MS_RESULT_OK || result == MS_RESULT_NONFINITE);
            if (step % 16 == 0) {
                const ms_result of_eval = ms_eval(n.model, NULL);
                assert_true(of_eval == MS_RESULT_OK || of_eval == MS_RESULT_NONFINITE);
            }
        }
        t_ok(n.model, ms_synchronize(n.model));
        assert_int_equal(n.heap.live_bytes, bytes);
        assert_int_equal(n.heap.calls, calls);
        assert_int_equal(n.device.engine.pending, 0);
        net_end(&n);
    }
}

// ------------------------------------------------------------------------------------------------
// failures

/* What may fail in a net alone; the plain one knows of none. A net that has failed is left alone. */
typedef ms_result (*deed_fn)(home_net *n);

static ms_result deed_step(home_net *n) {
    return whole_step(n);
}

static ms_result deed_three_calls(home_net *n) {
    const ms_result result = up_to_update(n);
    return result == MS_RESULT_OK ? ms_update(n->model) : result;
}

static ms_result deed_eval(home_net *n) {
    return ms_eval(n->model, &n->loss_value);
}

static ms_result deed_wrap(home_net *n) {
    ms_clear_hardware(n->model); // so that it plans again
    return ms_wrap(n->model);
}

static ms_result deed_verify(home_net *n) {
    ms_verify_report report;
    const ms_result result = ms_verify(n->model, NULL, NULL, &report);
    assert_true(result != MS_RESULT_OK || report.differ_count == 0);
    return result;
}

/* To the device and back to the host. */
static ms_result deed_detach(home_net *n) {
    const ms_result result = ms_detach(n->model);
    return result == MS_RESULT_OK ? ms_wrap(n->model) : result;
}

static ms_result deed_reshape(home_net *n) {
    const int64_t more = MOST_ROWS, as_before = ROWS;
    ms_clear_hardware(n->model);
    ms_result result = ms_wrap(n->model); // forgets the plans of other sizes
    result = result == MS_RESULT_OK ? ms_reshape(n->model, &more) : result;
    return result == MS_RESULT_OK ? ms_reshape(n->model, &as_before) : result;
}

static ms_result deed_read_and_write(home_net *n) {
    static kept now;
    ms_result result = MS_RESULT_OK;
    list_kept(n, &now);
    for (uint32_t i = 0; i < now.count && result == MS_RESULT_OK; ++i) {
        result = ms_read(n->model, now.tensor[i], now.value);
        result = result == MS_RESULT_OK ? ms_write(n->model, now.tensor[i], now.value) : result;
    }
    return result;
}

typedef struct deed {
    const char *name;
    deed_fn run;
    bool is_step, plans;
} deed;

static const deed deeds[] = {
    {"step", deed_step, true, false},       {"three calls", deed_three_calls, true, false},
    {"eval", deed_eval, false, false},      {"wrap", deed_wrap, false, true},
    {"verify", deed_verify, false, true},   {"detach", deed_detach, false, true},
    {"reshape", deed_reshape, false, true}, {"read and write", deed_read_and_write, false, false},
};
enum { DEEDS = sizeof deeds / sizeof deeds[0] };

typedef enum fault_kind { FAULT_CALL, FAULT_CALLBACK, FAULT_HEAP } fault_kind;

static const char *const fault_names[] = {"call", "callback", "allocation"};

typedef struct fault {
    const home_case *how;
    const deed *what;
    fault_kind kind;
    uint64_t at; // the n-th from now on
    uint32_t cured, completed;
} fault;

/* A failing call of a device is told as what it is, or as a lack of memory. */
static t_failing failing_of(home_net *n, fault_kind kind) {
    uint64_t *of_call = n->how->device == ON_VIRTUAL ? &n->device.engine.fail_at : &n->cpu.fail_at;
    t_failing f =
        kind == FAULT_HEAP ? t_failing_heap(&n->heap)
        : kind == FAULT_CALL
            ? t_failing_of(NULL, of_call, 1u << MS_RESULT_OUT_OF_MEMORY | 1u << MS_RESULT_BACKEND)
            : t_failing_of(&n->callbacks.calls, &n->callbacks.fail_at, 1u << MS_RESULT_CALLBACK);
    f.heap = NULL; // the model lives on
    return f;
}

static void expect(bool holds, const fault *f, const home_net *n, const char *otherwise) {
    if (!holds) {
        fail_msg("\"%s\", \"%s\", %s %u fails: %s; last error: %s", f->how->name, f->what->name,
                 fault_names[f->kind], (unsigned)f->at, otherwise, ms_last_error(n->model));
    }
}

/* The error fits the fault, and its text names it. */
static void expect_text(const fault *f, const home_net *n, ms_result result) {
    const char *text = ms_last_error(n->model);
    expect(result == MS_RESULT_BACKEND    ? strstr(text, "made to fail") != NULL
           : result == MS_RESULT_CALLBACK ? strstr(text, "17") != NULL
                                          : strlen(text) > 20,
           f, n, ms_result_name(result));
}

/* Whether the model has failed. */
static bool has_failed(home_net *n) {
    const int64_t as_before = ROWS;
    t_ok(n->model, ms_reshape(n->model, &as_before)); // wherever it stopped
    write_input(n, 4);
    const ms_result result = ms_forward(n->model, NULL);
    if (result != MS_RESULT_FAILED) {
        t_ok(n->model, result);
    }
    return result == MS_RESULT_FAILED;
}

/* Params and state are as after the last completed update, which may be that of the failing step, or
   the model says that it has failed and is cured by writing them. */
static void expect_recovery(fault *f, pair *p) {
    kept of_plain;
    home_net *n = p->moved;
    if (has_failed(n)) {
        read_kept(p->plain, &of_plain);
        t_error(n->model, ms_step(n->model, NULL), MS_RESULT_FAILED);
        load(n, &of_plain);
        t_error(n->model, ms_eval(n->model, NULL), MS_RESULT_FAILED);
        t_ok(n->model, ms_wrap(n->model));
        f->cured += 1;
    } else if (f->what->is_step && !same_values(p->plain, n, false)) {
        clear_lent(p->plain);
        t_ok(p->plain->model, whole_step(p->plain));
        f->completed += 1;
    }
    expect(same_values(p->plain, n, false), f, n, "params or state have changed");
    read_kept(p->plain, &of_plain);
    load(n, &of_plain); // the buffer
}

/* Of all deeds every so many faults, in one life of the model, after each of which both train on; 0:
   the first, second, fourth, and so on, of a model that searches for its plan. */
static void fail_in_one_life(fault *f, uint64_t stride, uint64_t counts[DEEDS]) {
    static home_net plain, moved;
    pair p = {&plain, &moved, t_seed(7), 0};
    net_start(&plain, f->how, true, false);
    net_start(&moved, f->how, false, stride == 0);
    act_step(&p);
    for (uint64_t d = 0; d < DEEDS; ++d) {
        t_failing each = failing_of(&moved, f->kind);
        f->what = &deeds[d];
        each.errors |= f->what->plans; // MS_RESULT_OK: another plan is found
        each.at = 1 + (stride == 0 ? 0 : p.round % (stride < 4 ? stride : 4));
        uint64_t step = 0;
        while (t_next_failure(&each, step)) {
            step = stride == 0 ? each.at : stride;
            f->at = each.at;
            feed(&p);
            t_arm(&each);
            const ms_result result = f->what->run(&moved);
            counts[d] += t_failed(&each, moved.model, result);
            if (result != MS_RESULT_OK) {
                expect_text(f, &moved, result);
                expect(moved.device.engine.pending == 0, f, &moved, "something is still enqueued");
                expect_recovery(f, &p);
            } else if (f->what->is_step || f->what->run == deed_eval) {
                t_ok(plain.model, f->what->run(&plain));
            }
            act_step(&p);
            expect_same(&p, f->what->name);
        }
        p.round += 1 + counts[d];
    }
    net_end(&plain);
    net_end(&moved);
}

static void fail_everywhere(fault_kind kind, uint64_t stride, uint64_t counts[DEEDS],
                            uint32_t *cured) {
    fault f;
    memset(&f, 0, sizeof f);
    memset(counts, 0, DEEDS * sizeof *counts);
    f.kind = kind;
    for (uint32_t c = 0; c < CASES; ++c) {
        f.how = &cases[c];
        if (!f.how->debug || kind == FAULT_CALLBACK) {
            fail_in_one_life(&f, stride, counts);
        }
        if (kind == FAULT_HEAP && c == 1 && t_stride(2) == 1) {
            fail_in_one_life(&f, 0, counts);
        }
    }
    *cured = f.cured;
}

static void expect_counts(const uint64_t counts[DEEDS], const bool expected[DEEDS]) {
    for (int d = 0; d < DEEDS; ++d) {
        if ((counts[d] > 0) != expected[d]) {
            fail_msg("\"%s\": %u faults", deeds[d].name, (unsigned)counts[d]);
        }
    }
}

static void every_call_of_the_backend_fails_once(void **state) {
    (void)state;
    static const bool expected[DEEDS] = {true, true, true, true, true, true, true, true};
    uint64_t counts[DEEDS];
    uint32_t cured;
    fail_everywhere(FAULT_CALL, t_stride(15), counts, &cured);
    expect_counts(counts, expected);
    assert_true(cured > 0);
}

/* While copies are under way. */
static void every_callback_fails_once(void **state) {
    (void)state;
    static const bool expected[DEEDS] = {true, true, true, false, true, false, false, false};
    uint64_t counts[DEEDS];
    uint32_t cured;
    fail_everywhere(FAULT_CALLBACK, t_stride(7), counts, &cured);
    expect_counts(counts, expected);
    assert_true(cured > 0); // after an early update
}

static void read_running(const home_net *n, float *to) {
    t_ok(n->model, ms_read(n->model, n->running, to));
}

/* Where a recomputation has put an older value into a buffer, or will, a step that fails leaves what
   one of its forward passes has made there. */
static void a_failed_step_leaves_what_forward_made(void **state) {
    (void)state;
    uint32_t failures = 0;
    for (uint32_t c = 0; c < 2 * CASES; ++c) {
        static home_net plain, moved;
        const home_case *how = &cases[c / 2];
        static kept before;
        pair p = {&plain, &moved, t_seed(7), 0};
        float made[3][COLS];
        if (how->micro_count != 2 || how->debug) {
            continue;
        }
        buffer_is_on_host = c % 2 > 0;
        net_start(&plain, how, true, false);
        net_start(&moved, how, false, false);
        act_step(&p);
        feed(&p);
        read_kept(&moved, &before);
        write_input(&plain, 9);
        read_running(&plain, made[0]);
        for (int k = 1; k <= 2; ++k) {
            t_ok(plain.model, ms_step(plain.model, NULL));
            read_running(&plain, made[k]);
        }
        int micro = 0; // whose forward was the last
        for (uint64_t at = 1; at < 1000; ++at) {
            float left[COLS];
            clear_lent(&moved);
            write_input(&moved, 9);
            moved.callbacks.fail_at = moved.callbacks.calls + at;
            if (whole_step(&moved) == MS_RESULT_OK) {
                break;
            }
            moved.callbacks.fail_at = 0;
            read_running(&moved, left);
            while (micro <= 2 && memcmp(left, made[micro], sizeof left) != 0) {
                ++micro;
            }
            if (micro > 2) {
                fail_msg("\"%s\", call %u fails: the buffer has changed", how->name, (unsigned)at);
            }
            if (has_failed(&moved)) {
                load(&moved, &before);
                t_ok(moved.model, ms_wrap(moved.model));
            }
            load(&moved, &before);
            failures += 1;
        }
        net_end(&plain);
        net_end(&moved);
    }
    buffer_is_on_host = false;
    assert_true(failures > 200);
}

/* And steps allocate nothing. */
static void every_allocation_fails_once(void **state) {
    (void)state;
    static const bool expected[DEEDS] = {false, false, false, true, true, true, true, false};
    uint64_t counts[DEEDS];
    uint32_t cured;
    fail_everywhere(FAULT_HEAP, t_stride(30), counts, &cured);
    expect_counts(counts, expected);
    assert_int_equal(cured, 0);
}

/* The device fails in an update after the loss was told: nobody knows how much of it has run. */
static void a_device_that_fails_late_fails_the_model(void **state) {
    (void)state;
    uint32_t late = 0;
    for (uint64_t left = 1; left < 12; ++left) {
        static home_net n;
        net_start(&n, &cases[2], false, false);
        t_ok(n.model, whole_step(&n));
        t_ok(n.model, ms_synchronize(n.model));
        const uint64_t before = n.device.operations;
        t_ok(n.model, whole_step(&n));
        t_ok(n.model, ms_synchronize(n.model));
        n.device.late_fail_at = n.device.operations - before - left;
        const ms_result result = whole_step(&n);
        if (result == MS_RESULT_OK) {
            t_error(n.model, ms_synchronize(n.model), MS_RESULT_BACKEND);
            t_text_has(ms_last_error(n.model), "an operation was made to fail");
            late += 1;
        }
        t_error(n.model, ms_step(n.model, NULL), MS_RESULT_FAILED);
        net_end(&n);
    }
    assert_true(late > 0);
}

int main(void) {
    t_hook.part_bytes = 128; // so that state comes in parts
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_life_on_the_host_has_the_bits_of_the_plain_plan),
        cmocka_unit_test(memory_is_flat),
        cmocka_unit_test(every_call_of_the_backend_fails_once),
        cmocka_unit_test(every_callback_fails_once),
        cmocka_unit_test(a_failed_step_leaves_what_forward_made),
        cmocka_unit_test(every_allocation_fails_once),
        cmocka_unit_test(a_device_that_fails_late_fails_the_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
