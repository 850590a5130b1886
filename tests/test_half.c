/*  test_half.c - the layers of nn.h in BF16 and F16: their callbacks, taken from the registration,
    are called with operands in 16 bits, and with the same values in F32 on the CPU, which test_nn.c
    compares with references in float64. The same bits where results may be in place.
    Conversions. */
#include "private.h"

static ms_layer h_register(ms_model *model, const ms_layer_desc *desc);

#define ms_register_layer h_register
#include "nn.h"
#undef ms_register_layer
#include "testing.h"
#include "testing_nn.h"

// ------------------------------------------------------------------------------------------------
// the layer under test

typedef struct h_case h_case;

struct h_case {
    const char *name; // of the layer
    void (*build)(nn_net *net, const h_case *c);
    ms_shape shape; // of the first input
    int64_t d[4];   // what else build takes
    uint32_t flags;
    float scale;     // of the inputs
    int64_t indices; // integers in inputs are below this
    ms_phase phase;  // of the forward
    /* Roundings of inner values, each of the size of the largest: of outputs, and of gradients. In
       all other layers a result differs from that in F32 by its own rounding alone. */
    double inner_out, inner_gradient;
    bool has_products; // the order of their sums differs from that in F32
};

static const char *h_wanted;
static ms_layer_desc h_found;

static ms_layer h_register(ms_model *model, const ms_layer_desc *desc) {
    if (strcmp(desc->name, h_wanted) == 0) {
        h_found = *desc;
    }
    return ms_register_layer(model, desc);
}

static ms_tensor h_input(nn_net *net, ms_dtype dtype, ms_shape shape) {
    return ms_input(net->model, "x", dtype, shape);
}

static ms_tensor h_x(nn_net *net, const h_case *c) {
    return h_input(net, MS_DTYPE_F32, c->shape);
}

static ms_tensor h_param(nn_net *net, ms_shape shape) {
    return nn_param(net, "param", shape, NN_INIT_ZEROS, 0.0f);
}

static void h_embedding(nn_net *net, const h_case *c) {
    const ms_tensor none = {0};
    const int64_t channels = c->d[0];
    const ms_tensor tokens = h_input(net, MS_DTYPE_I32, c->shape);
    const ms_tensor table = h_param(net, ms_shape2(c->indices, channels));
    if (c->flags == 0) {
        nn_embedding(net, c->name, tokens, table, none, none, none);
        return;
    }
    nn_embedding(net, c->name, tokens, table, h_param(net, ms_shape2(c->shape.dim[1], channels)),
                 h_input(net, MS_DTYPE_I32, c->shape),
                 h_param(net, ms_shape2(c->indices, channels)));
}

static void h_linear(nn_net *net, const h_case *c) {
    const ms_tensor none = {0};
    nn_half_gradients(net, c->d[1] != 0);
    nn_linear_tied(net, c->name, h_x(net, c), h_param(net, ms_shape2(c->d[0], nn_last(c->shape))),
                   c->flags != 0 ? h_param(net, ms_shape1(c->d[0])) : none);
}

static void h_layernorm(nn_net *net, const h_case *c) {
    nn_layernorm(net, c->name, h_x(net, c));
}

static void h_gelu(nn_net *net, const h_case *c) {
    nn_gelu_of_form(net, c->name, h_x(net, c), c->flags);
}

static void h_add(nn_net *net, const h_case *c) {
    nn_add(net, c->name, h_x(net, c), h_x(net, c));
}

static void h_dropout(nn_net *net, const h_case *c) {
    nn_dropout(net, c->name, h_x(net, c), 0.25f);
}

static void h_attention(nn_net *net, const h_case *c) {
    nn_attention(net, c->name, h_x(net, c), c->d[0], (c->flags & T_CAUSAL) != 0,
                 (c->flags & T_SAVE_SCORES) != 0);
}

static void h_cross_entropy(nn_net *net, const h_case *c) {
    nn_cross_entropy(net, c->name, h_x(net, c),
                     h_input(net, MS_DTYPE_I32, ms_shape1(c->shape.dim[0])));
}

static void h_gated(nn_net *net, const h_case *c) {
    nn_gated(net, c->name, h_x(net, c), h_x(net, c), (nn_gate)c->flags);
}

static void h_scale(nn_net *net, const h_case *c) {
    nn_scale(net, c->name, h_x(net, c), 1.7f);
}

static void h_softcap(nn_net *net, const h_case *c) {
    nn_softcap(net, c->name, h_x(net, c), 2.0f);
}

static void h_rmsnorm(nn_net *net, const h_case *c) {
    nn_rmsnorm(net, c->name, h_x(net, c), 1e-5f, c->flags != 0);
}

/* d: heads, heads of keys. */
static void h_head_norm(nn_net *net, const h_case *c) {
    const int64_t size = c->shape.dim[2] / (c->d[0] + 2 * c->d[1]);
    nn_head_norm_desc norm;
    memset(&norm, 0, sizeof norm);
    norm.heads = c->d[0];
    norm.kv_heads = c->d[1];
    norm.queries = h_param(net, ms_shape1(size));
    norm.keys = h_param(net, ms_shape1(size));
    norm.epsilon = 1e-5f;
    nn_head_norm(net, c->name, h_x(net, c), &norm);
}

/* d: heads, size, how much of it is turned. */
static void h_rotary(nn_net *net, const h_case *c) {
    nn_rotary_desc turn;
    memset(&turn, 0, sizeof turn);
    turn.heads = c->d[0];
    turn.size = c->d[1];
    turn.turned = c->d[2];
    turn.adjacent = c->flags != 0;
    nn_rotary(net, c->name, h_x(net, c), &turn);
}

/* d: heads, heads of keys, window, whether there is a cap. */
static void h_grouped(nn_net *net, const h_case *c) {
    nn_heads_desc heads;
    memset(&heads, 0, sizeof heads);
    heads.heads = c->d[0];
    heads.kv_heads = c->d[1];
    heads.window = c->d[2];
    heads.causal = true;
    heads.cap = c->d[3] != 0 ? 2.0f : 0.0f;
    nn_grouped_attention(net, c->name, h_x(net, c), &heads);
}

static void h_relu(nn_net *net, const h_case *c) {
    nn_relu(net, c->name, h_x(net, c));
}

static void h_conv2d(nn_net *net, const h_case *c) {
    const ms_tensor none = {0};
    const int64_t depth = c->shape.dim[1] * c->d[1] * c->d[1];
    nn_conv2d_tied(net, c->name, h_x(net, c), h_param(net, ms_shape2(c->d[0], depth)),
                   c->flags != 0 ? h_param(net, ms_shape1(c->d[0])) : none, c->d[1], c->d[2],
                   c->d[3]);
}

static void h_max_pool(nn_net *net, const h_case *c) {
    nn_max_pool(net, c->name, h_x(net, c), c->d[1], c->d[2], c->d[3]);
}

static void h_batch_norm(nn_net *net, const h_case *c) {
    nn_batch_norm(net, c->name, h_x(net, c));
}

static void h_average_pool(nn_net *net, const h_case *c) {
    nn_average_pool(net, c->name, h_x(net, c));
}

static void h_flatten(nn_net *net, const h_case *c) {
    nn_flatten(net, c->name, h_x(net, c));
}

/* A block within a whole model; d: heads, half gradients. */
static void h_block(nn_net *net, const h_case *c) {
    nn_transformer_config config;
    memset(&config, 0, sizeof config);
    config.vocabulary = 3;
    config.context = c->shape.dim[1];
    config.layers = 1;
    config.heads = c->d[0];
    config.channels = c->shape.dim[2];
    config.batch = c->shape.dim[0];
    config.sequence = c->shape.dim[1];
    config.granularity = NN_BLOCKS;
    config.save_scores = (c->flags & T_SAVE_SCORES) != 0;
    config.dropout = c->d[2] != 0 ? 0.25f : 0.0f;
    nn_half_gradients(net, c->d[1] != 0);
    if ((c->flags & T_POST_NORM) != 0) {
        nn_bert(net, &config);
    } else {
        nn_gpt2(net, &config);
    }
}

// ------------------------------------------------------------------------------------------------
// a call of it

/* A device, with a model for products. */
typedef struct h_device {
    ms_model *model;
    const nn_device *kernels;
} h_device;

enum { H_IN, H_OUT, H_SAVED, H_PARAM, H_STATE, H_GRAD_OUT, H_GRAD_IN, H_GRAD_PARAM, H_KINDS };
enum { H_SLOTS = 32, H_RESULTS = 64 };

static const char *const h_kinds[H_KINDS] = {"in",    "out",      "saved",   "param",
                                             "state", "grad_out", "grad_in", "grad_param"};

/* What a call wrote, as floats. */
typedef struct h_result {
    int kind, slot;
    ms_dtype dtype;
    int64_t count;
    float *values;
} h_result;

/* How a layer is called: operands in `stored`, with values that are rounded to `rounded`. */
typedef struct h_setting {
    const h_device *device;
    ms_dtype stored, rounded;
    float beta;
    int in_place; // 0: nothing is; 1: what can be; 2: gradients preferably where inputs are
} h_setting;

typedef struct h_run {
    const h_case *what;
    h_setting set;
    ms_model *model; // that the layer is registered with; it never runs
    nn_net *net;
    ms_layer_desc desc;
    ms_view views[H_KINDS][H_SLOTS];
    bool borrowed[H_KINDS][H_SLOTS]; // in the place of another
    h_result results[H_RESULTS];
    int count;
} h_run;

static void *h_memory(size_t bytes) {
    void *memory = malloc(bytes + 1);
    assert_non_null(memory);
    return memory;
}

static void *h_upload(const h_device *device, const void *values, size_t bytes) {
    const ms_backend *b = &device->model->config.backend;
    void *memory = NULL;
    assert_int_equal(b->memory_alloc(b->user, &device->model->config.allocator, bytes, &memory), 0);
    assert_int_equal(b->copy_in(device->model->device, memory, values, bytes), 0);
    assert_true(b->synchronize == NULL || b->synchronize(device->model->device) == 0);
    return memory;
}

static void h_download(const h_device *device, void *values, const void *memory, size_t bytes) {
    const ms_backend *b = &device->model->config.backend;
    assert_true(b->synchronize == NULL || b->synchronize(device->model->device) == 0);
    assert_int_equal(b->copy_out(device->model->device, values, memory, bytes), 0);
    assert_true(b->synchronize == NULL || b->synchronize(device->model->device) == 0);
}

static void h_release(const h_device *device, void *memory, size_t bytes) {
    const ms_backend *b = &device->model->config.backend;
    b->memory_release(b->user, &device->model->config.allocator, memory, bytes);
}

static size_t h_bytes(const ms_view *view) {
    return (size_t)ms_shape_count(&view->shape) * (size_t)ms_dtype_bytes(view->dtype);
}

static uint32_t h_bit(uint32_t mask, int slot) {
    return mask >> slot & 1;
}

/* Whether the slot keeps F32 in a call in 16 bits. */
static bool h_stays_f32(const ms_layer_desc *d, int kind, int slot) {
    const ms_layer_dtypes *x = &d->dtypes;
    switch (kind) {
    case H_IN:
    case H_GRAD_IN:
        return h_bit(x->f32_in, slot) != 0;
    case H_OUT:
    case H_GRAD_OUT:
        return h_bit(x->f32_out, slot) != 0;
    case H_SAVED:
        return h_bit(x->f32_saved, slot) != 0;
    case H_PARAM:
        return h_bit(x->f32_param, slot) != 0;
    case H_GRAD_PARAM:
        return h_bit(x->half_gradients, slot) == 0;
    default:
        return true;
    }
}

static const ms_tensor *h_tensors(const ms_layer_desc *d, int kind) {
    return kind == H_IN || kind == H_GRAD_IN         ? d->in
           : kind == H_OUT || kind == H_GRAD_OUT     ? d->out
           : kind == H_SAVED                         ? d->saved
           : kind == H_PARAM || kind == H_GRAD_PARAM ? d->param
                                                     : d->state;
}

static bool h_is_written(int kind, float beta) {
    return kind == H_OUT || kind == H_SAVED ||
           ((kind == H_GRAD_IN || kind == H_GRAD_PARAM) && !(beta > 0.0f));
}

static float h_round(ms_dtype dtype, float x) {
    uint16_t bits[2];
    msi_store_as(bits, dtype, 0, x);
    return dtype == MS_DTYPE_F32 ? x : msi_load(bits, dtype, 0);
}

/* The values of an operand before the call; what will be overwritten is NaN. */
static void *h_values(const h_run *run, int kind, int slot, const ms_view *view, bool stays) {
    const uint64_t count = ms_shape_count(&view->shape);
    t_rng rng = t_seed((uint64_t)(kind * H_SLOTS + slot) + 7);
    void *values = h_memory(h_bytes(view));
    for (uint64_t i = 0; i < count; i++) {
        const float x = run->what->scale * (float)(2.0 * t_unit(&rng) - 1.0);
        const float value = kind == H_STATE ? 0.5f + fabsf(x) : x;
        if (view->dtype == MS_DTYPE_I32) {
            const bool ignores = run->desc.backward == nn_cross_entropy_backward && i % 3 == 1;
            const int32_t index = (int32_t)t_below(&rng, (uint32_t)run->what->indices);
            ((int32_t *)values)[i] = ignores ? -1 : index;
        } else if (h_is_written(kind, run->set.beta)) {
            msi_store_as(values, view->dtype, i, nanf(""));
        } else {
            msi_store_as(values, view->dtype, i, stays ? value : h_round(run->set.rounded, value));
        }
    }
    return values;
}

/* The operand in whose place this one is, if it may be and the setting says so; NULL: none. */
static const ms_view *h_host_of(const h_run *run, int kind, int slot) {
    const ms_layer_desc *d = &run->desc;
    if (run->set.in_place == 0 || (kind == H_GRAD_IN && run->set.beta > 0.0f)) {
        return NULL;
    }
    if (kind == H_OUT && d->in_place[slot] != 0) {
        return &run->views[H_IN][msi_lowest_bit(d->in_place[slot])];
    }
    const ms_slot_masks *m = &d->grad_in_place[slot];
    if (kind != H_GRAD_IN || slot != 0) {
        return NULL;
    }
    if (m->grad_out != 0 && (m->in == 0 || run->set.in_place == 1)) {
        return &run->views[H_GRAD_OUT][msi_lowest_bit(m->grad_out)];
    }
    return m->in != 0 ? &run->views[H_IN][msi_lowest_bit(m->in)] : NULL;
}

static void h_make_view(h_run *run, int kind, int slot) {
    const ms_tensor tensor = h_tensors(&run->desc, kind)[slot];
    ms_view *view = &run->views[kind][slot];
    const ms_view *host = h_host_of(run, kind, slot);
    const bool stays = h_stays_f32(&run->desc, kind, slot);
    if (tensor.id == 0) {
        return;
    }
    view->shape = ms_tensor_shape(run->model, tensor);
    view->dtype = msi_tensor_at(run->model, tensor)->view.dtype;
    if (view->dtype == MS_DTYPE_I32 && kind >= H_GRAD_OUT) {
        return; // no gradient
    }
    if (view->dtype == MS_DTYPE_F32 && !stays) {
        view->dtype = run->set.stored;
    }
    view->beta = kind >= H_GRAD_IN ? run->set.beta : 0.0f;
    if (host != NULL) {
        assert_int_equal(h_bytes(host), h_bytes(view));
        view->data = host->data;
        run->borrowed[kind][slot] = true;
        return;
    }
    void *values = h_values(run, kind, slot, view, stays);
    view->data = h_upload(run->set.device, values, h_bytes(view));
    free(values);
}

/* Keeps what the call left in an operand. */
static void h_keep(h_run *run, int kind, int slot) {
    const ms_view *view = &run->views[kind][slot];
    if (view->data == NULL) {
        return;
    }
    assert_in_range(run->count, 0, H_RESULTS - 1);
    h_result *r = &run->results[run->count++];
    r->kind = kind;
    r->slot = slot;
    r->dtype = view->dtype;
    r->count = (int64_t)ms_shape_count(&view->shape);
    r->values = (float *)h_memory((size_t)r->count * sizeof(float));
    void *bytes = h_memory(h_bytes(view));
    h_download(run->set.device, bytes, view->data, h_bytes(view));
    for (int64_t i = 0; i < r->count; i++) {
        r->values[i] = view->dtype == MS_DTYPE_I32 ? (float)((int32_t *)bytes)[i]
                                                   : msi_load(bytes, view->dtype, (uint64_t)i);
    }
    free(bytes);
}

static void h_keep_all(h_run *run, int kind) {
    for (int slot = 0; slot < H_SLOTS; slot++) {
        h_keep(run, kind, slot);
    }
}

static void h_call(h_run *run, ms_call *call, ms_phase phase, ms_layer_fn callback,
                   const ms_workspace *workspace) {
    const ms_shape out = run->views[H_OUT][0].shape;
    const uint64_t rows =
        (uint64_t)nn_leading(out, run->desc.tile.axes > 0 ? run->desc.tile.axes : 1);
    const size_t bytes = (size_t)(workspace->bytes + workspace->row_bytes * rows);
    uint8_t *noise = (uint8_t *)h_memory(bytes);
    memset(noise, 0xff, bytes);
    call->phase = phase;
    call->workspace_bytes = bytes;
    call->workspace = bytes > 0 ? h_upload(run->set.device, noise, bytes) : NULL;
    assert_int_equal(callback(call), 0);
    h_download(run->set.device, noise, run->views[H_OUT][0].data, 1); // waits
    if (bytes > 0) {
        h_release(run->set.device, call->workspace, bytes);
    }
    free(noise);
}

/* Inputs that an output has taken the place of are there again, for backwards that read them; the
   gradients that go to their places go there too. */
static void h_read_again(h_run *run) {
    const int slot = 0;
    if (!run->borrowed[H_OUT][slot] || h_bit(run->desc.backward_reads.out, slot)) {
        return;
    }
    const int host = (int)msi_lowest_bit(run->desc.in_place[slot]);
    void *const old = run->views[H_IN][host].data;
    run->borrowed[H_OUT][slot] = false;
    h_make_view(run, H_IN, host);
    if (run->views[H_GRAD_IN][host].data == old) {
        run->views[H_GRAD_IN][host].data = run->views[H_IN][host].data;
    }
}

/* Forward, and backward unless the phase is that of an eval. */
static void h_start(h_run *run, const h_case *c, h_setting set) {
    ms_config config = t_config();
    ms_call call;
    const uint64_t seed = 99;
    memset(run, 0, sizeof *run);
    memset(&call, 0, sizeof call);
    run->what = c;
    run->set = set;
    assert_int_equal(ms_create(&config, &run->model), MS_RESULT_OK);
    run->net = nn_create_on(run->model, set.device->kernels);
    assert_non_null(run->net);
    h_wanted = c->name;
    memset(&h_found, 0, sizeof h_found);
    c->build(run->net, c);
    run->desc = h_found;
    assert_non_null(run->desc.forward);
    assert_int_equal(run->desc.dtypes.accepts, 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16);
    for (int kind = 0; kind < H_KINDS; kind++) {
        for (int slot = 0; slot < H_SLOTS; slot++) {
            h_make_view(run, kind, slot);
        }
    }
    call.user = run->desc.user;
    call.model = set.device->model;
    call.stream = ms_stream(set.device->model);
    call.dtype = set.stored;
    call.in = run->views[H_IN];
    call.out = run->views[H_OUT];
    call.saved = run->views[H_SAVED];
    call.param = run->views[H_PARAM];
    call.state = run->views[H_STATE];
    call.grad_out = run->views[H_GRAD_OUT];
    call.grad_in = run->views[H_GRAD_IN];
    call.grad_param = run->views[H_GRAD_PARAM];
    call.layer_seed = 5;
    call.step_seed = (const uint64_t *)h_upload(set.device, &seed, sizeof seed);
    h_call(run, &call, c->phase, run->desc.forward, &run->desc.forward_workspace);
    h_keep_all(run, H_OUT);
    h_keep_all(run, H_STATE);
    if (c->phase == MS_PHASE_FORWARD) {
        h_read_again(run);
        h_call(run, &call, MS_PHASE_BACKWARD, run->desc.backward, &run->desc.backward_workspace);
        h_keep_all(run, H_GRAD_IN);
        h_keep_all(run, H_GRAD_PARAM);
    }
    h_release(set.device, (void *)(uintptr_t)call.step_seed, sizeof seed);
}

static void h_stop(h_run *run) {
    for (int kind = 0; kind < H_KINDS; kind++) {
        for (int slot = 0; slot < H_SLOTS; slot++) {
            ms_view *view = &run->views[kind][slot];
            if (view->data != NULL && !run->borrowed[kind][slot]) {
                h_release(run->set.device, view->data, h_bytes(view));
            }
        }
    }
    for (int i = 0; i < run->count; i++) {
        free(run->results[i].values);
    }
    ms_destroy(run->model);
    nn_destroy(run->net);
}

// ------------------------------------------------------------------------------------------------
// comparisons

/* Unit roundoff: half of the distance between 1 and the next number. */
static double h_roundoff(ms_dtype dtype) {
    return dtype == MS_DTYPE_BF16 ? ldexp(1.0, -8) : dtype == MS_DTYPE_F16 ? ldexp(1.0, -11) : 0.0;
}

/* Half of the distance between the smallest numbers. */
static double h_smallest(ms_dtype dtype) {
    return dtype == MS_DTYPE_F16 ? ldexp(1.0, -25) : 0.0;
}

static void h_differs(const h_run *run, const h_result *r, int64_t i, double expected) {
    print_error("%s in %s, beta %g: %s[%d][%lld] of %lld is %.9g, expected %.9g\n", run->what->name,
                ms_dtype_name(run->set.stored), (double)run->set.beta, h_kinds[r->kind], r->slot,
                (long long)i, (long long)r->count, (double)r->values[i], expected);
    fail();
}

/* Each result, given that in F32: the error that every device may have (test_nn.c), the rounding of
   the result, and inner roundings. */
static void h_compare(const h_run *run, const h_run *reference) {
    assert_int_equal(run->count, reference->count);
    for (int k = 0; k < run->count; k++) {
        const h_result *r = &run->results[k];
        const h_result *wanted = &reference->results[k];
        const double u = h_roundoff(run->set.stored);
        const double inner = r->kind == H_OUT || r->kind == H_STATE ? run->what->inner_out
                                                                    : run->what->inner_gradient;
        double largest = 0.0;
        assert_true(r->kind == wanted->kind && r->slot == wanted->slot);
        assert_int_equal(r->count, wanted->count);
        for (int64_t i = 0; i < r->count; i++) {
            const double size = fabs((double)wanted->values[i]);
            largest = size > largest ? size : largest;
        }
        for (int64_t i = 0; i < r->count; i++) {
            const double expected = (double)wanted->values[i];
            const double error = fabs((double)r->values[i] - expected);
            const double bound = (5e-6 + inner * u) * largest + 1e-7 + h_smallest(r->dtype) +
                                 h_roundoff(r->dtype) * (fabs(expected) + 5e-6 * largest);
            if (!(error <= bound)) {
                h_differs(run, r, i, expected);
            }
        }
    }
}

/* The results have the same bits, after those of the second have been rounded. */
static void h_compare_bits(const h_run *run, const h_run *reference) {
    assert_int_equal(run->count, reference->count);
    for (int k = 0; k < run->count; k++) {
        const h_result *r = &run->results[k];
        assert_int_equal(r->count, reference->results[k].count);
        for (int64_t i = 0; i < r->count; i++) {
            const float expected = h_round(r->dtype, reference->results[k].values[i]);
            if (msi_bits_of_f32(r->values[i]) != msi_bits_of_f32(expected)) {
                h_differs(run, r, i, (double)expected);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// all layers

static h_device h_cpu, h_tested;

static void h_open(h_device *device, const nn_device *kernels, const ms_config *config) {
    device->kernels = kernels;
    assert_int_equal(ms_create(config, &device->model), MS_RESULT_OK);
    nn_net *net = nn_create_on(device->model, kernels);
    assert_non_null(net);
    h_wanted = "";
    const ms_tensor x = ms_input(device->model, "x", MS_DTYPE_F32, ms_shape2(1, 1));
    ms_set_loss(device->model, nn_linear(net, "y", x, 1, 1.0f));
    t_ok(device->model, ms_wrap(device->model));
    nn_destroy(net); // no step is made
}

static int h_open_all(void **state) {
    (void)state;
    const ms_config cpu = t_config();
    const ms_config tested = t_device_config();
    h_open(&h_cpu, nn_cpu(), &cpu);
    h_open(&h_tested, t_nn_device(), &tested);
    return 0;
}

static int h_close_all(void **state) {
    (void)state;
    ms_destroy(h_cpu.model);
    ms_destroy(h_tested.model);
    return 0;
}

static h_setting h_set(const h_device *device, ms_dtype stored, ms_dtype rounded, float beta,
                       int in_place) {
    h_setting set;
    set.device = device;
    set.stored = stored;
    set.rounded = rounded;
    set.beta = beta;
    set.in_place = in_place;
    return set;
}

/* Sums of the CPU have the same order, if they are those of one piece; -Ofast changes it. */
static bool h_is_exact(const h_case *c) {
#ifdef __FAST_MATH__
    (void)c;
    return false;
#else
    return h_tested.kernels == nn_cpu() && !c->has_products && nn_last(c->shape) <= NN_ROOM;
#endif
}

static void h_check(const h_case *c) {
    const ms_dtype dtypes[] = {MS_DTYPE_BF16, MS_DTYPE_F16};
    for (int i = 0; i < 4; i++) {
        const ms_dtype dtype = dtypes[i / 2];
        const float beta = i % 2 != 0 ? 1.0f : 0.0f;
        h_run run;
        h_run reference;
        h_start(&run, c, h_set(&h_tested, dtype, dtype, beta, 0));
        h_start(&reference, c, h_set(&h_cpu, MS_DTYPE_F32, dtype, beta, 0));
        h_compare(&run, &reference);
        if (h_is_exact(c)) {
            h_compare_bits(&run, &reference);
        }
        h_stop(&reference);
        for (int in_place = 1; in_place < 3 && i % 2 == 0; in_place++) {
            h_run other;
            h_start(&other, c, h_set(&h_tested, dtype, dtype, beta, in_place));
            h_compare_bits(&other, &run);
            h_stop(&other);
        }
        h_stop(&run);
    }
}

static h_case h_make(const char *name, void (*build)(nn_net *net, const h_case *c),
                     ms_shape shape) {
    h_case c;
    memset(&c, 0, sizeof c);
    c.name = name;
    c.build = build;
    c.shape = shape;
    c.scale = 1.0f;
    c.indices = 7;
    c.phase = MS_PHASE_FORWARD;
    return c;
}

static void embeddings_are_near_f32(void **state) {
    (void)state;
    const int64_t channels[] = {72, 67, 4200};
    for (uint32_t i = 0; i < 6; i++) {
        h_case c = h_make("embedding", h_embedding, ms_shape2(2, 5));
        c.d[0] = channels[i / 2];
        c.flags = i % 2;
        h_check(&c);
        c.indices = 3;
        h_check(&c);
    }
}

/* The product is rounded before the bias is added, or the bias before the product is. */
static void linear_layers_are_near_f32(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 8; i++) {
        h_case c = h_make("linear", h_linear, ms_shape3(2, 3, i < 4 ? 16 : 21));
        c.d[0] = i < 4 ? 40 : 13;
        c.d[1] = i / 2 % 2; // half gradients
        c.flags = i % 2;
        c.inner_out = c.flags != 0 ? 1.0 : 0.0;
        c.inner_gradient = T_ROUNDS_PRODUCTS;
        c.has_products = true;
        h_check(&c);
    }
}

static void layernorms_are_near_f32(void **state) {
    (void)state;
    const int64_t widths[] = {7, 13, 64, 264, 520, 1032, 2056, 4104, 4100};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        const h_case c = h_make("norm", h_layernorm, ms_shape2(3, widths[i]));
        h_check(&c);
    }
    const h_case many = h_make("norm", h_layernorm, ms_shape2(70, 6));
    h_check(&many);
}

static void elementwise_layers_are_near_f32(void **state) {
    (void)state;
    const int64_t sizes[] = {131, 4096 + 72};
    for (int i = 0; i < 2; i++) {
        const ms_shape shape = ms_shape2(2, sizes[i]);
        const h_case cases[] = {
            h_make("gelu", h_gelu, shape),       h_make("add", h_add, shape),
            h_make("dropout", h_dropout, shape), h_make("relu", h_relu, shape),
            h_make("scale", h_scale, shape),     h_make("gated", h_gated, shape),
            h_make("flatten", h_flatten, shape)};
        for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
            h_check(&cases[k]);
        }
        h_case c = cases[0];
        c.flags = T_ERF;
        c.scale = 5.0f;
        h_check(&c);
        c = cases[2];
        c.phase = MS_PHASE_EVAL;
        h_check(&c);
        c = h_make("gated", h_gated, shape);
        c.flags = NN_GATE_GELU;
        h_check(&c);
        c = h_make("cap", h_softcap, shape);
        c.inner_gradient = 3.0; // backward reads the output, which is rounded
        c.has_products = true;
        h_check(&c);
    }
}

static void rmsnorms_are_near_f32(void **state) {
    (void)state;
    const int64_t widths[] = {7, 16, 77, 1032};
    for (int i = 0; i < 8; i++) {
        h_case c = h_make("norm", h_rmsnorm, ms_shape2(5, widths[i / 2]));
        c.flags = (uint32_t)i % 2;
        h_check(&c);
    }
    for (int i = 0; i < 2; i++) {
        h_case c = h_make("norm", h_head_norm, ms_shape3(2, 9, 8 * (i == 0 ? 16 : 5)));
        c.d[0] = 4;
        c.d[1] = 2;
        h_check(&c);
    }
}

static void rotary_positions_are_near_f32(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        h_case c = h_make("rotary", h_rotary, ms_shape3(2, 9, 4 * 16 + 8));
        c.d[0] = 4;
        c.d[1] = 16;
        c.d[2] = i / 2 != 0 ? 12 : 0;
        c.flags = i % 2;
        h_check(&c);
    }
}

/* Probabilities, at most 1, are rounded, and so are their gradients. */
static void attention_is_near_f32(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 16; i++) {
        const int64_t size = (i & 8) != 0 ? 8 : 5;
        h_case c =
            h_make("attention", h_attention, ms_shape3(2, (i & 4) != 0 ? 72 : 11, 3 * 2 * size));
        c.d[0] = 2;
        c.flags =
            ((i & 1) != 0 ? (uint32_t)T_CAUSAL : 0) | ((i & 2) != 0 ? (uint32_t)T_SAVE_SCORES : 0);
        c.inner_out = 1.0;
        c.inner_gradient = 2.0;
        c.has_products = true;
        h_check(&c);
    }
}

static void grouped_attention_is_near_f32(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 16; i++) {
        const int64_t size = (i & 8) != 0 ? 8 : 5;
        h_case c = h_make("attention", h_grouped, ms_shape3(2, (i & 4) != 0 ? 72 : 11, 8 * size));
        c.d[0] = 4;
        c.d[1] = 2;
        c.d[2] = (i & 1) != 0 ? 7 : 0;
        c.d[3] = i & 2;
        c.inner_out = 1.0;
        c.inner_gradient = 2.0;
        c.has_products = true;
        h_check(&c);
    }
}

static void cross_entropies_are_near_f32(void **state) {
    (void)state;
    const int64_t classes[] = {11, 24, 4099, 9000};
    for (int i = 0; i < 4; i++) {
        h_case c = h_make("loss", h_cross_entropy, ms_shape2(5, classes[i]));
        c.indices = classes[i];
        c.scale = 4.0f;
        h_check(&c);
    }
}

/* d: out, kernel, stride, padding. The gradient of a pixel is rounded once for each band of patches
   that covers it; on the CPU, of which most of these images have one. */
static void convolutions_are_near_f32(void **state) {
    (void)state;
    const int64_t d[][6] = {{9, 7, 4, 3, 1, 1},   {9, 7, 4, 1, 1, 0},  {12, 8, 5, 5, 2, 2},
                            {40, 24, 3, 3, 1, 1}, {8, 8, 16, 1, 1, 0}, {20, 260, 2, 3, 1, 1},
                            {8, 9, 2, 2, 3, 0}};
    for (size_t i = 0; i < 2 * sizeof d / sizeof d[0]; i++) {
        const int64_t *own = d[i / 2];
        h_case c = h_make("conv", h_conv2d, ms_shape4(3, 3, own[0], own[1]));
        memcpy(c.d, own + 2, sizeof c.d);
        c.flags = i % 2;
        c.inner_out = c.flags != 0 ? 1.0 : 0.0;
        const int64_t bands = nn_divide_up(own[3], own[4]);
        c.inner_gradient = own[0] > 19 || h_tested.kernels != nn_cpu() ? (double)bands - 1.0 : 0.0;
        c.has_products = true;
        h_check(&c);
    }
}

static void layers_of_images_are_near_f32(void **state) {
    (void)state;
    const ms_shape shapes[] = {ms_shape4(2, 3, 7, 9), ms_shape4(3, 2, 8, 16),
                               ms_shape4(2, 2, 70, 66)};
    for (int i = 0; i < 3; i++) {
        h_case c = h_make("pool", h_max_pool, shapes[i]);
        c.d[1] = 3;
        c.d[2] = 2;
        c.d[3] = 1;
        h_check(&c);
        c = h_make("average", h_average_pool, shapes[i]);
        c.has_products = i == 2; // two pieces
        h_check(&c);
        c = h_make("norm", h_batch_norm, shapes[i]);
        c.has_products = i == 2;
        h_check(&c);
        c.phase = MS_PHASE_EVAL;
        h_check(&c);
    }
    const h_case rows = h_make("norm", h_batch_norm, ms_shape2(9, 5));
    h_check(&rows);
}

/* In a row of layers, values that were rounded differently go on. d: heads, half gradients,
   dropout. */
static void blocks_are_near_f32(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 8; i++) {
        h_case c = h_make("h0", h_block, ms_shape3(2, 13, (i & 4) != 0 ? 16 : 10));
        c.d[0] = 2;
        c.d[1] = i / 2 % 2;
        c.d[2] = i & 4;
        c.flags = ((i & 1) != 0 ? (uint32_t)T_POST_NORM : 0) |
                  ((i & 2) != 0 ? (uint32_t)T_SAVE_SCORES : 0);
        c.scale = 0.5f;
        c.inner_out = 4.0;
        c.inner_gradient = 8.0;
        c.has_products = true;
        h_check(&c);
    }
}

/* Every number in 16 bits, and floats between and beyond them. */
static void conversions_are_those_of_the_library(void **state) {
    (void)state;
    t_rng rng = t_seed(1);
    for (uint32_t i = 0; i < 65536; i++) {
        const uint16_t bits = (uint16_t)i;
        const bool is_f16_nan = (bits & 0x7fffu) > 0x7c00u;
        assert_int_equal(nn_bits_of(nn_of_bf16(bits)), msi_bits_of_f32(msi_f32_of_bf16(bits)));
        assert_int_equal(nn_bits_of(nn_of_f16(bits)), msi_bits_of_f32(msi_f32_of_f16(bits)));
        assert_true(is_f16_nan || nn_f16_of(nn_of_f16(bits)) == bits);
        for (uint32_t k = 0; k < 12; k++) {
            const uint32_t ends[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
            const uint32_t low = k < 6 ? ends[k] : (uint32_t)t_next(&rng) & 0xffffu;
            const float x = msi_f32_of_bits(i << 16 | low);
            const float near = msi_f32_of_bits(nn_bits_of(nn_of_f16(bits)) + low / 8 - 4096);
            assert_int_equal(nn_bf16_of(x), msi_bf16_of_f32(x));
            assert_true(t_is_nan(x) ? t_is_nan(nn_of_f16(nn_f16_of(x)))
                                    : nn_f16_of(x) == msi_f16_of_f32(x));
            assert_true(t_is_nan(near) || nn_f16_of(near) == msi_f16_of_f32(near));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conversions_are_those_of_the_library),
        cmocka_unit_test(embeddings_are_near_f32),
        cmocka_unit_test(linear_layers_are_near_f32),
        cmocka_unit_test(layernorms_are_near_f32),
        cmocka_unit_test(elementwise_layers_are_near_f32),
        cmocka_unit_test(rmsnorms_are_near_f32),
        cmocka_unit_test(rotary_positions_are_near_f32),
        cmocka_unit_test(attention_is_near_f32),
        cmocka_unit_test(grouped_attention_is_near_f32),
        cmocka_unit_test(cross_entropies_are_near_f32),
        cmocka_unit_test(convolutions_are_near_f32),
        cmocka_unit_test(layers_of_images_are_near_f32),
        cmocka_unit_test(blocks_are_near_f32),
    };
    return cmocka_run_group_tests(tests, h_open_all, h_close_all);
}
