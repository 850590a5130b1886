/*  testing_cuda.h - what the tests of the CUDA backend share: a network whose layers have kernels of
    their own. A layer is one function of one element, which a kernel runs on the device and a loop on
    the host, so that both give the same bits where both compile to the same arithmetic. Compiled as
    C++, by nvcc or with the emulation. Takes the place of memscale.h and testing.h. */
#ifndef TESTING_CUDA_H
#define TESTING_CUDA_H

#include <cuda_runtime.h>

#include "private.h"
#include "toy_layers.h"

#ifdef CUDART_EMULATION
#include "emulation.h"
enum { CN_IS_EMULATED = 1 };
#define CN_SKIP_ON_GPU()
#else
enum { CN_IS_EMULATED = 0 };
#define CN_SKIP_ON_GPU()                                                                           \
    do {                                                                                           \
        print_message("this check asks the emulation, and a GPU does not tell\n");                 \
        skip();                                                                                    \
    } while (0)
#endif

// ------------------------------------------------------------------------------------------------
// one element of a layer

typedef enum cn_kind {
    CN_EMBED,   // y = table[ids]                 in: ids  param: table  adds to its gradient
    CN_ADD,     // y = (a + b) / 2                in: a, b               overwrites its gradients
    CN_RUNNING, // y = (x + moving mean) / 2      in: x    state: the mean
    CN_DENSE,   // y = x W                        in: x    param: W
    CN_MATMUL,  // the same, by ms_gemm
    CN_NORM,    // y = (x - mean) / spread        in: x    saved: both
    CN_SQUASH,  // y = x / (1 + |x|)              in: x    in place
    CN_DROPOUT, // y = mask * x                   in: x    in place
    CN_SCALE,   // y = s * x, s on the host       in: x, s
    CN_LOSS,    // row sums of x * x / 2 + x / 10 in: x, a factor of its gradient
    CN_LOSS_AT_ONCE // the same; the gradient is written in forward
} cn_kind;

typedef struct cn_work {
    cn_kind kind;
    bool backward;
    int64_t rows, cols, deep; // of the result; cols of in[0], or rows of the table
    int64_t elements;
    const float *in0, *in1, *param, *result, *grad_out;
    const int32_t *ids;
    float *out, *saved, *state, *scratch, *grad0, *grad1, *grad_param;
    float beta0, beta_param, factor;
    uint64_t layer_seed;
    const uint64_t *step_seed;
} cn_work;

MSI_HD void cn_put(float *to, int64_t i, float beta, float value) {
    if (to) {
        to[i] = beta == 0.0f ? value : to[i] + value;
    }
}

MSI_HD float cn_mask(const cn_work *w, int64_t i) {
    uint64_t x = (w->layer_seed ^ *w->step_seed) + (uint64_t)i * 0x632be59bd9b4e019u;
    x = (x ^ (x >> 31)) * 0x94d049bb133111ebu;
    return ((x ^ (x >> 29)) & 3u) == 0 ? 0.0f : 1.25f;
}

MSI_HD void cn_norm_row(const cn_work *w, int64_t r) {
    const int64_t cols = w->cols;
    float *row = w->scratch + r * cols;
    float mean = 0.0f, spread = 1.0f;
    for (int64_t c = 0; c < cols; c++) {
        row[c] = w->in0[r * cols + c];
        mean += row[c] / (float)cols;
    }
    for (int64_t c = 0; c < cols; c++) {
        spread += fabsf(row[c] - mean);
    }
    for (int64_t c = 0; c < cols; c++) {
        w->out[r * cols + c] = (row[c] - mean) / spread;
    }
    w->saved[2 * r] = mean;
    w->saved[2 * r + 1] = spread;
}

MSI_HD void cn_norm_row_back(const cn_work *w, int64_t r) {
    const int64_t cols = w->cols;
    float mean = 0.0f;
    for (int64_t c = 0; c < cols; c++) {
        mean += w->grad_out[r * cols + c] / (float)cols;
    }
    for (int64_t c = 0; c < cols; c++) {
        const int64_t i = r * cols + c;
        const float y = (w->in0[i] - w->saved[2 * r]) / w->saved[2 * r + 1];
        const float slope = (1.0f - 0.25f * y) / w->saved[2 * r + 1];
        cn_put(w->grad0, i, w->beta0, (w->grad_out[i] - mean) * slope);
    }
}

MSI_HD void cn_running_column(const cn_work *w, int64_t c) {
    float mean = 0.0f;
    for (int64_t r = 0; r < w->rows; r++) {
        const float x = w->in0[r * w->cols + c];
        mean += x / (float)w->rows;
        w->out[r * w->cols + c] = 0.5f * (x + w->state[c]);
    }
    w->state[c] = 0.75f * w->state[c] + 0.25f * mean;
}

MSI_HD void cn_loss_row(const cn_work *w, int64_t r) {
    float sum = 0.0f;
    for (int64_t i = r * w->deep; i < (r + 1) * w->deep; i++) {
        sum += 0.5f * w->in0[i] * w->in0[i] + 0.1f * w->in0[i];
        cn_put(w->grad0, i, w->beta0, w->factor * (w->in0[i] + 0.1f) * w->in1[0]);
    }
    w->out[r] = sum;
}

MSI_HD void cn_dense(const cn_work *w, int64_t i) {
    float sum = 0.0f;
    for (int64_t k = 0; k < w->deep; k++) {
        sum += w->in0[i / w->cols * w->deep + k] * w->param[k * w->cols + i % w->cols];
    }
    w->out[i] = sum;
}

/* Elements of the gradient of x first, then those of W. */
MSI_HD void cn_dense_back(const cn_work *w, int64_t i) {
    const int64_t before = w->rows * w->deep;
    float sum = 0.0f;
    if (i < before) {
        for (int64_t c = 0; c < w->cols; c++) {
            sum += w->grad_out[i / w->deep * w->cols + c] * w->param[i % w->deep * w->cols + c];
        }
        cn_put(w->grad0, i, w->beta0, sum);
        return;
    }
    const int64_t k = (i - before) / w->cols, c = (i - before) % w->cols;
    for (int64_t r = 0; r < w->rows; r++) {
        sum += w->in0[r * w->deep + k] * w->grad_out[r * w->cols + c];
    }
    cn_put(w->grad_param, i - before, w->beta_param, sum);
}

MSI_HD void cn_embed_back(const cn_work *w, int64_t i) {
    float sum = 0.0f;
    for (int64_t r = 0; r < w->rows; r++) {
        sum += w->ids[r] == (int32_t)(i / w->cols) ? w->grad_out[r * w->cols + i % w->cols] : 0.0f;
    }
    cn_put(w->grad_param, i, 1.0f, sum);
}

MSI_HD void cn_forward_element(const cn_work *w, int64_t i) {
    switch (w->kind) {
    case CN_EMBED:
        w->out[i] = w->param[w->ids[i / w->cols] * w->cols + i % w->cols];
        break;
    case CN_ADD:
        w->out[i] = 0.5f * (w->in0[i] + w->in1[i]);
        break;
    case CN_RUNNING:
        cn_running_column(w, i);
        break;
    case CN_DENSE:
        cn_dense(w, i);
        break;
    case CN_NORM:
        cn_norm_row(w, i);
        break;
    case CN_SQUASH:
        w->out[i] = w->in0[i] / (1.0f + fabsf(w->in0[i]));
        break;
    case CN_DROPOUT:
        w->out[i] = cn_mask(w, i) * w->in0[i];
        break;
    case CN_SCALE:
        w->out[i] = w->factor * w->in0[i];
        break;
    default:
        cn_loss_row(w, i);
        break;
    }
}

MSI_HD void cn_backward_element(const cn_work *w, int64_t i) {
    float slope = 0.5f; // of CN_RUNNING and CN_ADD
    switch (w->kind) {
    case CN_EMBED:
        cn_embed_back(w, i);
        return;
    case CN_DENSE:
        cn_dense_back(w, i);
        return;
    case CN_NORM:
        cn_norm_row_back(w, i);
        return;
    case CN_ADD:
        cn_put(w->grad1, i, 0.0f, slope * w->grad_out[i]);
        break;
    case CN_SQUASH:
        slope = (1.0f - fabsf(w->result[i])) * (1.0f - fabsf(w->result[i]));
        break;
    case CN_DROPOUT:
        slope = cn_mask(w, i);
        break;
    case CN_SCALE:
        slope = w->factor;
        break;
    case CN_LOSS:
        cn_put(w->grad0, i, w->beta0, w->grad_out[i / w->deep] * (w->in0[i] + 0.1f) * w->in1[0]);
        return;
    default:
        break;
    }
    cn_put(w->grad0, i, w->beta0, slope * w->grad_out[i]);
}

MSI_HD void cn_element(const cn_work *w, int64_t i) {
    if (w->backward) {
        cn_backward_element(w, i);
    } else {
        cn_forward_element(w, i);
    }
}

static __global__ void cn_k_layer(cn_work w) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < w.elements) {
        cn_element(&w, i);
    }
}

// ------------------------------------------------------------------------------------------------
// the callbacks

/* What a callback does beyond its work, in the steps in which it is asked to. */
typedef enum cn_sin {
    CN_SIN_NONE,
    CN_SIN_RETURN,      // returns T_CALLBACK_ERROR
    CN_SIN_SYNCHRONIZE, // waits for its stream
    CN_SIN_PAGEABLE,    // copies from memory that is not pinned
    CN_SIN_ALLOCATE,    // allocates device memory
    CN_SIN_COUNT
} cn_sin;

typedef struct cn_op {
    cn_kind kind;
    cn_sin sin;
    ms_phase sin_phase;
    uint32_t calls[MS_PHASE_COUNT];
    uint64_t step; // ms_call.step of the last call
} cn_op;

static inline int cn_launch_error(cudaError_t error) {
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return (int)error;
}

static inline int cn_run(const cn_work *work, void *stream) {
    if (!stream) {
        for (int64_t i = 0; i < work->elements; i++) {
            cn_element(work, i);
        }
        return 0;
    }
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(32);
    config.gridDim = dim3((unsigned)((work->elements + 31) / 32));
    config.stream = (cudaStream_t)stream;
    return cn_launch_error(cudaLaunchKernelEx(&config, cn_k_layer, *work));
}

static inline int64_t cn_elements(const cn_work *w) {
    const int64_t all = w->rows * w->cols;
    switch (w->kind) {
    case CN_EMBED:
        return w->backward ? w->deep * w->cols : all;
    case CN_RUNNING:
        return w->backward ? all : w->cols;
    case CN_DENSE:
        return w->backward ? w->rows * w->deep + w->deep * w->cols : all;
    case CN_NORM:
    case CN_LOSS_AT_ONCE:
        return w->rows;
    case CN_LOSS:
        return w->backward ? w->rows * w->deep : w->rows;
    default:
        return all;
    }
}

/* Operands of which slots a layer does not have are views that no layer of this kind looks at. */
static inline cn_work cn_work_of(const ms_call *call) {
    const cn_op *op = (const cn_op *)call->user;
    cn_work w;
    memset(&w, 0, sizeof w);
    w.kind = op->kind;
    w.backward = call->phase == MS_PHASE_BACKWARD;
    const bool has_param = op->kind == CN_EMBED || op->kind == CN_DENSE;
    const bool has_two = op->kind == CN_ADD || op->kind >= CN_SCALE;
    const bool is_loss = op->kind >= CN_LOSS;
    w.rows = is_loss ? t_rows(&call->in[0]) : t_rows(&call->out[0]);
    w.cols = is_loss ? 1 : t_cols(&call->out[0]);
    w.deep = op->kind == CN_EMBED ? call->param[0].shape.dim[0] : t_cols(&call->in[0]);
    w.in0 = t_data(&call->in[0]);
    w.ids = (const int32_t *)call->in[0].data;
    w.in1 = has_two ? t_data(&call->in[1]) : NULL;
    w.param = has_param ? t_data(&call->param[0]) : NULL;
    w.out = t_data(&call->out[0]);
    w.result = w.out;
    w.saved = op->kind == CN_NORM ? t_data(&call->saved[0]) : NULL;
    w.state = op->kind == CN_RUNNING ? t_data(&call->state[0]) : NULL;
    w.scratch = (float *)call->workspace;
    w.grad_out = w.backward ? t_data(&call->grad_out[0]) : NULL;
    w.grad0 = t_data(&call->grad_in[0]);
    w.beta0 = call->grad_in[0].beta;
    w.grad1 = w.backward && op->kind == CN_ADD ? t_data(&call->grad_in[1]) : NULL;
    w.grad_param = w.backward && has_param ? t_data(&call->grad_param[0]) : NULL;
    w.beta_param = w.grad_param ? call->grad_param[0].beta : 0.0f;
    w.factor = op->kind == CN_SCALE ? w.in1[0] : call->loss_factor; // from host memory, here
    w.layer_seed = call->layer_seed;
    w.step_seed = call->step_seed;
    w.elements = cn_elements(&w);
    return w;
}

static inline int cn_do_sin(const cn_op *op, const ms_call *call) {
    static float pageable;
    void *memory = NULL;
    const bool backward = call->phase == MS_PHASE_BACKWARD;
    void *data = backward ? call->grad_out[0].data : call->out[0].data;
    cudaStream_t stream = (cudaStream_t)call->stream;
    if (op->sin == CN_SIN_NONE || op->sin_phase != call->phase) {
        return 0;
    }
    switch (op->sin) {
    case CN_SIN_SYNCHRONIZE:
        (void)cn_launch_error(cudaStreamSynchronize(stream));
        return 0;
    case CN_SIN_PAGEABLE:
        (void)cn_launch_error(
            cudaMemcpyAsync(data, &pageable, sizeof pageable, cudaMemcpyHostToDevice, stream));
        return 0;
    case CN_SIN_ALLOCATE:
        if (cn_launch_error(cudaMalloc(&memory, 64)) == 0) {
            (void)cudaFree(memory);
        }
        return 0;
    default:
        return T_CALLBACK_ERROR;
    }
}

static inline int cn_call(const ms_call *call) {
    cn_op *op = (cn_op *)call->user;
    op->calls[call->phase]++;
    op->step = call->step;
    const int error = cn_do_sin(op, call);
    if (error != 0) {
        return error;
    }
    if (op->kind == CN_MATMUL) {
        return call->phase == MS_PHASE_BACKWARD ? t_matmul_backward(call) : t_matmul_forward(call);
    }
    const cn_work work = cn_work_of(call);
    return cn_run(&work, call->stream);
}

typedef struct cn_update {
    uint64_t count;
    float *value, *mean, *steps;
    const float *gradient, *scale;
    float rate;
} cn_update;

MSI_HD void cn_update_element(const cn_update *u, uint64_t i) {
    const float g = u->scale ? *u->scale * u->gradient[i] : u->gradient[i];
    u->mean[i] = 0.5f * u->mean[i] + 0.5f * g;
    u->steps[i] += 1.0f;
    u->value[i] -= u->rate * u->mean[i];
}

static __global__ void cn_k_update(cn_update u) {
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < u.count) {
        cn_update_element(&u, i);
    }
}

/* An update of the trainer's own. */
static inline int cn_custom_update(const ms_update_args *args) {
    cn_update u;
    u.count = args->count;
    u.value = args->value;
    u.mean = args->state[0];
    u.steps = args->state[1];
    u.gradient = args->gradient;
    u.scale = args->gradient_scale;
    u.rate = args->learning_rate;
    for (uint64_t i = 0; !args->stream && i < u.count; i++) {
        cn_update_element(&u, i);
    }
    if (!args->stream) {
        return 0;
    }
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(32);
    config.gridDim = dim3((unsigned)((u.count + 31) / 32));
    config.stream = (cudaStream_t)args->stream;
    return cn_launch_error(cudaLaunchKernelEx(&config, cn_k_update, u));
}

// ------------------------------------------------------------------------------------------------
// the network

enum { CN_ROWS = 6, CN_MOST_ROWS = 9, CN_COLS = 5, CN_WORDS = 7, CN_DEPTH = 2 };
enum { CN_PARAMS = CN_DEPTH + 1, CN_OPS = 8 + 4 * CN_DEPTH };
enum { CN_FLOATS = 3 * (CN_WORDS * CN_COLS + CN_DEPTH * CN_COLS * CN_COLS) + CN_COLS };
enum { CN_SPARE = 3 }; // floats in front of what is borrowed: its addresses are no multiple of 16

typedef struct cn_how {
    bool cuda, smallest, graph;
    bool by_gemm;    // products by ms_gemm
    bool at_once;    // gradients of the loss in forward
    bool host_scale; // a layer that reads an input in host memory
    bool borrows;    // the first param, its gradient's state and its optimizer state
    bool stateless;  // no running mean
    bool tf32, debug;
    bool profiles; // times its first steps
    bool offloads; // what it may
    bool groups;   // the others have an optimizer each; steps with a large norm are skipped
    ms_optimizer_kind optimizer;
    float momentum, clip;
    uint32_t micro_count;
    ms_switch early;
    ms_arena *arena;
    void *stream;
    const ms_backend *backend; // NULL: by `cuda`
    const ms_comm *comm;       // NULL: there is one rank
    bool shards;               // the gradient of each param, of some the value too
} cn_how;

typedef struct cn_net {
    cn_how how;
    t_heap heap;
    ms_model *model;
    ms_axis axis;
    ms_tensor x, ids, scale, spoil, moving, loss, last;
    ms_tensor param[CN_PARAMS];
    ms_param_group group[CN_PARAMS]; // with how.groups, of all but the first
    cn_op ops[CN_OPS];
    uint32_t op_count, param_count;
    int64_t rows;
    void *lent[3];
} cn_net;

static inline ms_backend cn_backend(const cn_how *how) {
    ms_backend b = how->backend ? *how->backend : how->cuda ? ms_backend_cuda(0) : ms_backend_cpu();
    if (how->cuda && CN_IS_EMULATED) {
        b.workspace_bytes = 16384; // filled anew by each ms_wrap
    }
    return b;
}

static inline ms_config cn_config(cn_net *net, const cn_how *how) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.backend = cn_backend(how);
    config.allocator = t_heap_allocator(&net->heap);
    config.memory_budget_bytes = (uint64_t)1 << 30;
    config.force_optimize = how->smallest;
    config.early_update = how->early;
    config.seed = 77;
    config.accumulation_steps = how->micro_count;
    config.arena = how->arena;
    config.stream = how->stream;
    config.tf32 = how->tf32;
    config.debug = how->debug;
    config.cuda_graph = how->graph;
    if (how->comm) {
        config.comm = *how->comm;
    }
    config.offloading = how->offloads ? MS_SWITCH_ON : MS_SWITCH_OFF;
    config.empirical_profiling = how->profiles ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    return config;
}

static inline ms_tensor cn_activation(cn_net *net, const char *name) {
    return ms_activation(net->model, name, MS_DTYPE_F32,
                         ms_along(ms_shape2(CN_ROWS, CN_COLS), 0, net->axis));
}

static inline ms_layer_desc cn_describe(cn_net *net, cn_kind kind, const char *name, ms_tensor in) {
    cn_op *op = &net->ops[net->op_count++];
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    op->kind = kind;
    desc.name = name;
    desc.forward = cn_call;
    desc.backward = cn_call;
    desc.user = op;
    desc.in[0] = in;
    return desc;
}

/* An elementwise layer of one input, its result in place. */
static inline ms_tensor cn_unary(cn_net *net, cn_kind kind, const char *name, ms_tensor in) {
    ms_layer_desc desc = cn_describe(net, kind, name, in);
    desc.out[0] = cn_activation(net, name);
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.backward_reads.out = kind == CN_SQUASH;
    desc.backward_reads.nothing = kind != CN_SQUASH;
    if (kind == CN_SCALE) {
        desc.in[1] = net->scale;
        desc.backward_reads.in = 2;
        desc.backward_reads.nothing = false;
    }
    if (kind == CN_RUNNING) {
        desc.state[0] = net->moving;
    }
    ms_register_layer(net->model, &desc);
    return desc.out[0];
}

static inline ms_tensor cn_add(cn_net *net, const char *name, ms_tensor a, ms_tensor b) {
    ms_layer_desc desc = cn_describe(net, CN_ADD, name, a);
    desc.in[1] = b;
    desc.out[0] = cn_activation(net, name);
    desc.backward_reads.nothing = true;
    desc.overwrites.in = 3;
    ms_register_layer(net->model, &desc);
    return desc.out[0];
}

static inline ms_tensor cn_dense_layer(cn_net *net, const char *name, ms_tensor in) {
    ms_layer_desc desc = cn_describe(net, net->how.by_gemm ? CN_MATMUL : CN_DENSE, name, in);
    desc.out[0] = cn_activation(net, name);
    desc.param[0] = ms_param(net->model, "weight", MS_DTYPE_F32, ms_shape2(CN_COLS, CN_COLS));
    desc.backward_reads.in = 1;
    desc.backward_reads.param = 1;
    net->param[net->param_count++] = desc.param[0];
    ms_register_layer(net->model, &desc);
    return desc.out[0];
}

static inline ms_tensor cn_norm_layer(cn_net *net, ms_tensor in) {
    ms_layer_desc desc = cn_describe(net, CN_NORM, "norm", in);
    desc.out[0] = cn_activation(net, "normed");
    desc.saved[0] = ms_saved(net->model, "mean and spread", MS_DTYPE_F32,
                             ms_along(ms_shape2(CN_ROWS, 2), 0, net->axis));
    desc.forward_workspace.row_bytes = CN_COLS * sizeof(float);
    desc.backward_reads.in = 1;
    desc.backward_reads.saved = 1;
    ms_register_layer(net->model, &desc);
    return desc.out[0];
}

static inline void cn_loss_layer(cn_net *net, ms_tensor in) {
    const bool at_once = net->how.at_once;
    ms_layer_desc desc = cn_describe(net, at_once ? CN_LOSS_AT_ONCE : CN_LOSS, "loss", in);
    net->loss = ms_activation(net->model, "losses", MS_DTYPE_F32,
                              ms_along(ms_shape1(CN_ROWS), 0, net->axis));
    desc.in[1] = net->spoil;
    desc.out[0] = net->loss;
    desc.backward = at_once ? NULL : cn_call;
    desc.grads_in_forward = at_once;
    desc.backward_reads.in = 3;
    ms_register_layer(net->model, &desc);
    ms_set_loss(net->model, net->loss);
}

static inline void cn_inputs(cn_net *net) {
    ms_model *m = net->model;
    net->axis = ms_add_axis(m, "rows", CN_ROWS, CN_MOST_ROWS);
    net->x = ms_input(m, "x", MS_DTYPE_F32, ms_along(ms_shape2(CN_ROWS, CN_COLS), 0, net->axis));
    net->ids = ms_input(m, "ids", MS_DTYPE_I32, ms_along(ms_shape1(CN_ROWS), 0, net->axis));
    net->spoil = ms_input(m, "spoil", MS_DTYPE_F32, ms_shape1(1));
    if (net->how.host_scale) {
        net->scale = ms_input(m, "scale", MS_DTYPE_F32, ms_shape1(1));
        ms_set_on_host(m, net->scale);
    }
    if (!net->how.stateless) {
        net->moving = ms_buffer(m, "moving", MS_DTYPE_F32, ms_shape1(CN_COLS));
    }
}

static inline void cn_optimizer(cn_net *net) {
    ms_optimizer_desc o;
    memset(&o, 0, sizeof o);
    o.kind = net->how.optimizer;
    o.learning_rate = 0.02f;
    o.weight_decay = 0.01f;
    o.momentum = net->how.momentum;
    o.grad_clip_norm = net->how.clip;
    if (o.kind == MS_OPTIMIZER_CUSTOM) {
        o.update = cn_custom_update;
        o.state_count = 2;
    }
    o.skip_above_norm = net->how.groups ? 5.0f : 0.0f;
    ms_set_optimizer(net->model, &o);
    for (uint32_t i = 1; i < net->param_count && net->how.groups; i++) {
        o.learning_rate = 0.01f * (float)i;
        o.skip_above_norm = 0.0f;
        o.grad_clip_norm = i == 1 ? 0.01f : 0.0f;
        o.beta1 = 0.8f;
        net->group[i] = ms_optimizer_group(net->model, &o);
        ms_set_param_group(net->model, net->param[i], net->group[i]);
    }
}

static inline int cn_state_count(const cn_how *how) {
    ms_optimizer_desc o = t_optimizer(how->optimizer, 0.0f);
    o.momentum = how->momentum;
    o.state_count = 2; // of cn_custom_update
    return (int)t_state_count(&o);
}

/* Memory for the first param and its optimizer state, three floats behind an aligned address. */
static inline ms_result cn_lend(cn_net *net) {
    const size_t bytes = (CN_SPARE + CN_WORDS * CN_COLS) * sizeof(float);
    ms_result result = MS_RESULT_OK;
    for (int i = 0; i <= cn_state_count(&net->how) && result == MS_RESULT_OK; i++) {
        const bool made = net->lent[i] != NULL;
        if (net->how.cuda && !made && cudaMalloc(&net->lent[i], bytes) != cudaSuccess) {
            (void)cudaGetLastError();
            return MS_RESULT_OUT_OF_MEMORY;
        }
        if (net->how.cuda && (cudaMemset(net->lent[i], 0, bytes) != cudaSuccess ||
                              cudaDeviceSynchronize() != cudaSuccess)) {
            (void)cudaGetLastError();
            return MS_RESULT_BACKEND;
        }
        net->lent[i] = net->how.cuda ? net->lent[i] : calloc(1, bytes);
        result =
            ms_borrow(net->model,
                      i == 0 ? net->param[0] : ms_optimizer_state(net->model, net->param[0], i - 1),
                      (float *)net->lent[i] + CN_SPARE);
    }
    return result;
}

static inline void cn_layers(cn_net *net) {
    ms_layer_desc desc = cn_describe(net, CN_EMBED, "embed", net->ids);
    desc.out[0] = cn_activation(net, "words");
    desc.param[0] = ms_param(net->model, "table", MS_DTYPE_F32, ms_shape2(CN_WORDS, CN_COLS));
    desc.backward_reads.in = 1;
    desc.accumulates.param = 1;
    net->param[net->param_count++] = desc.param[0];
    ms_register_layer(net->model, &desc);
    ms_tensor last = cn_add(net, "sum", desc.out[0], net->x);
    if (!net->how.stateless) {
        last = cn_unary(net, CN_RUNNING, "running", last);
    }
    for (int i = 0; i < CN_DEPTH; i++) {
        char name[32];
        snprintf(name, sizeof name, "dense%d", i);
        ms_tensor branch = cn_dense_layer(net, name, last);
        branch = cn_norm_layer(net, branch);
        branch = cn_unary(net, CN_SQUASH, "squash", branch);
        branch = cn_unary(net, CN_DROPOUT, "dropout", branch);
        last = i % 2 == 0 ? cn_add(net, "join", last, branch) : branch;
    }
    if (net->how.host_scale) {
        last = cn_unary(net, CN_SCALE, "scale", last);
    }
    net->last = last;
    ms_add_output(net->model, last);
    cn_loss_layer(net, last);
}

static inline uint64_t cn_count(const cn_net *net, ms_tensor tensor) {
    return ms_tensor_count(net->model, tensor);
}

/* A model as far as ms_wrap; net->model is NULL if there is none. */
static inline ms_result cn_create(cn_net *net, const cn_how *how) {
    net->how = *how;
    net->rows = CN_ROWS;
    const ms_config config = cn_config(net, how);
    const ms_result result = ms_create(&config, &net->model);
    if (result != MS_RESULT_OK) {
        return t_not_created(&net->model, result);
    }
    net->op_count = net->param_count = 0;
    cn_inputs(net);
    cn_layers(net);
    cn_optimizer(net);
    for (uint32_t i = 0; i < net->param_count && how->shards; i++) {
        const ms_tensor param = net->param[i];
        const ms_tensor of[] = {ms_gradient(net->model, param), param};
        ms_set_tensor_technique(net->model, of[i % 2], MS_TECHNIQUE_SHARDING, MS_SWITCH_ON);
    }
    return MS_RESULT_OK;
}

static inline ms_result cn_write_params(cn_net *net) {
    t_rng rng = t_seed(5);
    float data[CN_WORDS * CN_COLS];
    ms_result result = MS_RESULT_OK;
    for (uint32_t i = 0; i < net->param_count && result == MS_RESULT_OK; i++) {
        t_fill(&rng, data, cn_count(net, net->param[i]), 0.9f);
        result = ms_write(net->model, net->param[i], data);
    }
    return result;
}

static inline void cn_release_lent(cn_net *net) {
    for (int i = 0; i < 3; i++) {
        if (net->how.cuda && net->lent[i]) {
            (void)cudaFree(net->lent[i]);
        } else {
            free(net->lent[i]);
        }
        net->lent[i] = NULL;
    }
}

static inline void cn_destroy(cn_net *net) {
    ms_destroy(net->model);
    net->model = NULL;
    cn_release_lent(net);
    assert_int_equal(net->heap.live_count, 0);
    assert_int_equal(net->heap.wrong_releases, 0);
}

/* A model that is ready to train. */
static inline void cn_start(cn_net *net, const cn_how *how) {
    memset(net, 0, sizeof *net);
    assert_int_equal(cn_create(net, how), MS_RESULT_OK);
    if (how->borrows) {
        t_ok(net->model, cn_lend(net));
    }
    t_ok(net->model, ms_wrap(net->model));
    t_ok(net->model, cn_write_params(net));
}

/* The inputs of a batch by its number; its host memory is garbage afterwards. */
static inline ms_result cn_feed(cn_net *net, uint64_t number) {
    t_rng rng = t_seed(1000 + number);
    float x[CN_MOST_ROWS * CN_COLS], one = 1.0f, scale = 0.75f + 0.125f * (float)(number % 3);
    int32_t ids[CN_MOST_ROWS];
    t_fill(&rng, x, (uint64_t)net->rows * CN_COLS, 1.0f);
    for (int64_t i = 0; i < net->rows; i++) {
        ids[i] = (int32_t)t_below(&rng, CN_WORDS);
    }
    ms_result result = ms_write(net->model, net->x, x);
    result = result == MS_RESULT_OK ? ms_write(net->model, net->ids, ids) : result;
    result = result == MS_RESULT_OK ? ms_write(net->model, net->spoil, &one) : result;
    if (net->how.host_scale && result == MS_RESULT_OK) {
        result = ms_write(net->model, net->scale, &scale);
    }
    memset(x, 0xff, sizeof x);
    memset(ids, 0x7f, sizeof ids);
    one = scale = NAN;
    return result;
}

static inline ms_result cn_step(cn_net *net, uint64_t number, double *loss) {
    const ms_result result = cn_feed(net, number);
    return result == MS_RESULT_OK ? ms_step(net->model, loss) : result;
}

static inline void cn_steps(cn_net *net, uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; i++) {
        double loss = 0.0;
        t_ok(net->model, cn_step(net, i, i % 3 == 2 ? &loss : NULL));
    }
}

/* All that training changes: params, their state, the running mean. */
typedef struct cn_values {
    float at[CN_FLOATS];
    uint64_t count;
} cn_values;

static inline ms_result cn_read_values(cn_net *net, cn_values *values) {
    ms_result result = MS_RESULT_OK;
    memset(values, 0, sizeof *values);
    for (uint32_t i = 0; i < net->param_count; i++) {
        const uint64_t count = cn_count(net, net->param[i]);
        for (int k = -1; k < cn_state_count(&net->how) && result == MS_RESULT_OK; k++) {
            const ms_tensor t =
                k < 0 ? net->param[i] : ms_optimizer_state(net->model, net->param[i], k);
            result = ms_read(net->model, t, values->at + values->count);
            values->count += count;
        }
    }
    if (!net->how.stateless && result == MS_RESULT_OK) {
        result = ms_read(net->model, net->moving, values->at + values->count);
        values->count += CN_COLS;
    }
    return result;
}

static inline cn_values cn_get_values(cn_net *net) {
    cn_values values;
    t_ok(net->model, cn_read_values(net, &values));
    return values;
}

/* Within a tolerance; 0: the same bits. */
static inline bool cn_alike(const cn_values *a, const cn_values *b, double tolerance) {
    if (a->count != b->count) {
        return false;
    }
    if (tolerance == 0.0) {
        return memcmp(a->at, b->at, (size_t)a->count * sizeof(float)) == 0;
    }
    for (uint64_t i = 0; i < a->count; i++) {
        const double wanted = (double)b->at[i];
        if (!(fabs((double)a->at[i] - wanted) <= tolerance * (1.0 + fabs(wanted)))) {
            return false;
        }
    }
    return true;
}

/* The same arithmetic: the same bits where one compiler has made both halves. */
static inline double cn_tolerance(const cn_how *how) {
    return !CN_IS_EMULATED || how->by_gemm ? 2e-5 : 0.0;
}

// ------------------------------------------------------------------------------------------------
// a clean device before and after

static inline void cn_reset(uint64_t seed) {
#ifdef CUDART_EMULATION
    emulation_reset(seed);
#else
    (void)seed;
#endif
}

/* Nothing is left of a test, and no error that the next launch of the host would find. */
static inline void cn_clean(void) {
    assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
#ifdef CUDART_EMULATION
    const emulation_counts c = emulation_count();
    assert_int_equal(c.device_allocations, 0);
    assert_int_equal(c.pinned_allocations, 0);
    assert_int_equal(c.streams, 0);
    assert_int_equal(c.events, 0);
    assert_int_equal(c.graphs, 0);
    assert_int_equal(c.graph_execs, 0);
    assert_int_equal(c.graphs_cut_off, 0);
    assert_int_equal(c.handles, 0);
#endif
}

/* Seeds of the emulation, `count` in a full sweep; on a GPU one run. */
static inline uint64_t cn_seeds(uint64_t count) {
    return CN_IS_EMULATED ? t_sweep((count + 4) / 5, count) : 1;
}

/* What `steps` steps leave, by the backend and the plan that `how` says. */
static inline cn_values cn_trained(const cn_how *how, uint64_t steps) {
    cn_net net;
    cn_start(&net, how);
    cn_steps(&net, 0, steps);
    const cn_values values = cn_get_values(&net);
    cn_destroy(&net);
    return values;
}

#endif // TESTING_CUDA_H
