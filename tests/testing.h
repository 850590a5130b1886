/*  testing.h - what the test programs share: a seeded generator of numbers, an allocator and a
    backend that count and can be made to fail, and small layers that declare exactly what they
    read. Include it behind the implementation of memscale.h. */
#ifndef TESTING_H
#define TESTING_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif
#include <cmocka.h>
#ifdef __cplusplus
}
#endif

/* Threads of OpenMP, where there is any. */
static inline void t_threads(int count) {
#ifdef _OPENMP
    omp_set_num_threads(count);
#else
    (void)count;
#endif
}

// ------------------------------------------------------------------------------------------------
// random numbers

typedef struct t_rng {
    uint64_t state;
} t_rng;

/* splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. */
static inline uint64_t t_next(t_rng *rng) {
    uint64_t z = (rng->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline t_rng t_seed(uint64_t seed) {
    t_rng rng;
    rng.state = seed;
    rng.state = t_next(&rng);
    return rng;
}

static inline uint32_t t_below(t_rng *rng, uint32_t count) {
    return (uint32_t)(t_next(rng) % count);
}

/* Uniform in [0, 1). */
static inline double t_unit(t_rng *rng) {
    return (double)(t_next(rng) >> 11) / 9007199254740992.0;
}

static inline bool t_chance(t_rng *rng, double probability) {
    return t_unit(rng) < probability;
}

static inline void t_fill(t_rng *rng, float *values, uint64_t count, float scale) {
    for (uint64_t i = 0; i < count; ++i) {
        values[i] = scale * (float)(2.0 * t_unit(rng) - 1.0);
    }
}

static inline uint64_t t_environment(const char *name, uint64_t fallback) {
    const char *text = getenv(name);
    return text != NULL && text[0] != 0 ? (uint64_t)strtoull(text, NULL, 10) : fallback;
}

/* How many cases of a sweep are run: `quick` of them by default and in `make test`, or
   MEMSCALE_TEST_SWEEP percent of `full`, if that is more; `make test-rest` sets it. */
static inline uint64_t t_sweep(uint64_t quick, uint64_t full) {
    const uint64_t count = full * t_environment("MEMSCALE_TEST_SWEEP", 0) / 100;
    return count > quick ? count : quick;
}

/* The distance between the cases of a sweep that is run: 1 in a full sweep, which is of all cases,
   and otherwise `quick`. */
static inline uint64_t t_stride(uint64_t quick) {
    return t_environment("MEMSCALE_TEST_SWEEP", 0) < 100 ? quick : 1;
}

// ------------------------------------------------------------------------------------------------
// checks

static inline void t_check(const ms_model *model, ms_result result, ms_result expected,
                           const char *call, const char *file, int line) {
    if (result != expected) {
        print_error("%s: %s, expected %s: %s\n", call, ms_result_name(result),
                    ms_result_name(expected), ms_last_error(model));
        _fail(file, line);
    }
}

#define t_ok(model, call) t_check((model), (call), MS_RESULT_OK, #call, __FILE__, __LINE__)
#define t_error(model, call, expected)                                                             \
    t_check((model), (call), (expected), #call, __FILE__, __LINE__)

/* The result of a step: an asynchronous backend tells what became of it when it is waited for. */
static inline ms_result t_settled(ms_model *model, ms_result result) {
    return result == MS_RESULT_OK ? ms_synchronize(model) : result;
}

/* Device memory as host code sees it, once all work is done: for tests that look at what ms_data
   gives. Memory that a test lends to a model comes from t_lend. */
#ifdef ON_CUDA_H
static inline void t_open_device(bool is_open) {
    if (is_open) {
        assert_int_equal(t_cuda_open(NULL), 0);
    } else {
        t_cuda_shut();
    }
}

static inline void *t_lend(size_t bytes) {
    return t_cuda_lend(bytes);
}

static inline void t_take_back(void *memory) {
    t_cuda_take_back(memory);
}
#else
static inline void t_open_device(bool is_open) {
    (void)is_open;
}

static inline void *t_lend(size_t bytes) {
    return malloc(bytes);
}

static inline void t_take_back(void *memory) {
    free(memory);
}
#endif

static inline void t_text_has(const char *text, const char *part) {
    if (strstr(text, part) == NULL) {
        print_error("\"%s\" does not contain \"%s\"\n", text, part);
        fail();
    }
}

static inline bool t_is_nan(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

static inline void t_report(const ms_model *model, ms_memory_report *report) {
    memset(report, 0, sizeof *report);
    t_ok(model, ms_report(model, report));
}

/* Collects a listing; ends with a zero. */
typedef struct t_text {
    char *data;
    size_t length;
} t_text;

static inline void t_append(const char *text, size_t length, void *user) {
    t_text *to = (t_text *)user;
    char *data = (char *)realloc(to->data, to->length + length + 1);
    assert_non_null(data);
    memcpy(data + to->length, text, length);
    to->data = data;
    to->length += length;
    to->data[to->length] = 0;
}

// ------------------------------------------------------------------------------------------------
// an allocator that counts

typedef struct t_heap {
    uint64_t live_bytes, live_count;
    uint64_t calls;         // of alloc
    uint64_t largest_bytes; // asked for at once
    uint64_t fail_at;       // the call that fails, from 1; 0: none
    bool has_failed;
    uint64_t wrong_releases; // of another size than was asked for
} t_heap;

typedef struct t_block {
    uint64_t bytes, mark;
} t_block;

enum { T_BLOCK_MARK = 0x5ca1ab1e };

static inline void *t_heap_alloc(uint64_t bytes, void *user) {
    t_heap *heap = (t_heap *)user;
    heap->calls += 1;
    if (bytes > heap->largest_bytes) {
        heap->largest_bytes = bytes;
    }
    if (heap->calls == heap->fail_at) {
        heap->has_failed = true;
        return NULL;
    }
    t_block *block = (t_block *)malloc((size_t)bytes + sizeof(t_block));
    assert_non_null(block);
    block->bytes = bytes;
    block->mark = T_BLOCK_MARK;
    heap->live_bytes += bytes;
    heap->live_count += 1;
    memset(block + 1, 0xa5, (size_t)bytes);
    return block + 1;
}

static inline void t_heap_release(void *memory, uint64_t bytes, void *user) {
    t_heap *heap = (t_heap *)user;
    if (memory == NULL) {
        return;
    }
    t_block *block = (t_block *)memory - 1;
    heap->wrong_releases += block->bytes != bytes || block->mark != T_BLOCK_MARK;
    heap->live_bytes -= block->bytes;
    heap->live_count -= 1;
    block->mark = 0;
    free(block);
}

static inline ms_allocator t_heap_allocator(t_heap *heap) {
    ms_allocator allocator;
    allocator.alloc = t_heap_alloc;
    allocator.release = t_heap_release;
    allocator.user = heap;
    return allocator;
}

// ------------------------------------------------------------------------------------------------
// a matrix product with one order of sums

/* A plain triple loop for ms_backend.gemm, for tests that compare anything but the sums of a CBLAS,
   which may depend on shapes and threads. */
static inline int t_gemm(void *user, float alpha, const ms_matrix *a, const ms_matrix *b,
                         float beta, const ms_matrix *c) {
    (void)user;
    const int64_t depth = a->transposed ? a->rows : a->cols;
    const int64_t a_row = a->transposed ? 1 : a->stride;
    const int64_t a_col = a->transposed ? a->stride : 1;
    const int64_t b_row = b->transposed ? 1 : b->stride;
    const int64_t b_col = b->transposed ? b->stride : 1;
    for (int64_t i = 0; i < c->rows; i++) {
        for (int64_t j = 0; j < c->cols; j++) {
            const float *from_a = (const float *)a->data + i * a_row;
            const float *from_b = (const float *)b->data + j * b_col;
            float *to = (float *)c->data + i * c->stride + j;
            float sum = 0.0f;
            for (int64_t k = 0; k < depth; k++) {
                sum += from_a[k * a_col] * from_b[k * b_row];
            }
            *to = beta != 0.0f ? alpha * sum + beta * *to : alpha * sum;
        }
    }
    return 0;
}

/* ms_backend.update for args that have no factors and no state of a step. */
static inline int t_update(const ms_backend *backend, const ms_update_args *args) {
    ms_optimizer_desc o;
    ms_step_state state;
    memset(&o, 0, sizeof o);
    memset(&state, 0, sizeof state);
    o.kind = args->kind;
    o.learning_rate = args->learning_rate;
    o.beta1 = args->beta1;
    o.beta2 = args->beta2;
    o.epsilon = args->epsilon;
    o.momentum = args->momentum;
    ms_update_factors factors = msi_factors_at(&o, args->t);
    const double decay = (double)args->weight_decay;
    factors.decay = args->kind == MS_OPTIMIZER_SGD
                        ? args->weight_decay
                        : (float)(1.0 - (double)args->learning_rate * decay);
    ms_update_args complete = *args;
    complete.factors = &factors;
    complete.state_of_step = &state;
    return backend->update(backend->user, &complete);
}

// ------------------------------------------------------------------------------------------------
// a backend that counts: the CPU's, behind counters

typedef struct t_device {
    ms_backend cpu;
    uint64_t live_bytes, live_count;
    uint64_t allocations, updates;
    uint64_t calls;   // of every function that can fail
    uint64_t fail_at; // the call that fails, from 1; 0: none
    uint64_t wrong_releases;
    uint64_t fail_update_at; // the update that fails, from 1; 0: none
} t_device;

static inline int t_device_fails(t_device *device) {
    device->calls += 1;
    return device->calls == device->fail_at ? 5 : 0;
}

static inline int t_device_memory_alloc(void *user, const ms_allocator *host, uint64_t bytes,
                                        void **memory) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    if (error == 0) {
        error = device->cpu.memory_alloc(device->cpu.user, host, bytes, memory);
    }
    if (error == 0) {
        device->allocations += 1;
        device->live_count += 1;
        device->live_bytes += bytes;
    }
    return error;
}

static inline void t_device_memory_release(void *user, const ms_allocator *host, void *memory,
                                           uint64_t bytes) {
    t_device *device = (t_device *)user;
    device->wrong_releases += device->live_bytes < bytes || device->live_count == 0;
    device->live_bytes -= bytes;
    device->live_count -= 1;
    device->cpu.memory_release(device->cpu.user, host, memory, bytes);
}

static inline int t_device_copy_in(void *user, void *to, const void *from, uint64_t bytes) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.copy_in(device->cpu.user, to, from, bytes);
}

static inline int t_device_copy_out(void *user, void *to, const void *from, uint64_t bytes) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.copy_out(device->cpu.user, to, from, bytes);
}

static inline int t_device_copy(void *user, void *to, const void *from, uint64_t bytes) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.copy(device->cpu.user, to, from, bytes);
}

static inline int t_device_fill_bytes(void *user, void *to, uint8_t value, uint64_t bytes) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.fill_bytes(device->cpu.user, to, value, bytes);
}

static inline int t_device_fill_f32(void *user, void *to, float value, uint64_t count) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.fill_f32(device->cpu.user, to, value, count);
}

static inline int t_device_add_f32(void *user, void *to, const void *from, uint64_t count) {
    t_device *device = (t_device *)user;
    const int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.add_f32(device->cpu.user, to, from, count);
}

static inline int t_device_add_squares_f32(void *user, const void *from, uint64_t count,
                                           double *sum) {
    t_device *device = (t_device *)user;
    const int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.add_squares_f32(device->cpu.user, from, count, sum);
}

static inline int t_device_clip_scale(void *user, const double *sum, float limit, float *scale,
                                      ms_step_state *step) {
    t_device *device = (t_device *)user;
    const int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.clip_scale(device->cpu.user, sum, limit, scale, step);
}

static inline int t_device_loss(void *user, const void *losses, uint64_t count, double factor,
                                ms_step_state *step) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.loss(device->cpu.user, losses, count, factor, step);
}

static inline int t_device_cast(void *user, void *target, ms_dtype to, const void *source,
                                ms_dtype from, uint64_t count) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.cast(device->cpu.user, target, to, source, from, count);
}

static inline int t_device_update(void *user, const ms_update_args *args) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    device->updates += 1;
    if (error != 0 || device->updates == device->fail_update_at) {
        return 6;
    }
    return device->cpu.update(device->cpu.user, args);
}

static inline int t_device_gemm(void *user, float alpha, const ms_matrix *a, const ms_matrix *b,
                                float beta, const ms_matrix *c) {
    t_device *device = (t_device *)user;
    int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.gemm(device->cpu.user, alpha, a, b, beta, c);
}

static inline void t_device_hardware(void *user, ms_hardware *hardware) {
    t_device *device = (t_device *)user;
    device->cpu.hardware(device->cpu.user, hardware);
}

static inline ms_backend t_device_backend(t_device *device) {
    ms_backend backend = ms_backend_cpu();
    memset(device, 0, sizeof *device);
    device->cpu = backend;
    backend.name = "counting";
    backend.user = device;
    backend.memory_alloc = t_device_memory_alloc;
    backend.memory_release = t_device_memory_release;
    backend.copy_in = t_device_copy_in;
    backend.copy_out = t_device_copy_out;
    backend.copy = t_device_copy;
    backend.fill_bytes = t_device_fill_bytes;
    backend.fill_f32 = t_device_fill_f32;
    backend.add_f32 = t_device_add_f32;
    backend.add_squares_f32 = t_device_add_squares_f32;
    backend.clip_scale = t_device_clip_scale;
    backend.loss = t_device_loss;
    backend.cast = t_device_cast;
    backend.update = t_device_update;
    backend.gemm = t_device_gemm;
    backend.hardware = t_device_hardware;
    return backend;
}

// ------------------------------------------------------------------------------------------------
// layers: rows by columns, F32. Their gradients need not be true ones: what matters is that they
// depend on all that they declare, and that every layer is right where its operands share memory.
// Values stay bounded, so that no depth of network overflows.

typedef enum t_kind {
    T_SQUASH,  // y = x / (1 + |x|)             in: x                  reads y
    T_SCALE,   // y = scalar * x                in: x                  reads nothing
    T_ADD,     // y = (a + b) / 2               in: a, b               reads nothing
    T_PRODUCT, // y = a c / (1 + |c|)           in: a, b (c: reversed) reads a, b
    T_MATMUL,  // y = x W                       in: x   param: W       reads x, W
    T_AFFINE,  // y = (x p + q) / 2             in: x   param: p, q    reads x, p
    T_SPLIT,   // left, right = columns of x    in: x   out: 2         reads nothing
    T_CONCAT,  // y = columns of a, then b      in: a, b               reads nothing
    T_NORM,    // y = (x - mean) / spread       in: x   saved: 1       reads x, saved
    T_DROPOUT, // y = mask(seed) * x            in: x                  reads nothing
    T_EMBED,   // y = table[ids]                in: ids param: table   reads ids
    T_GATE,    // y = x * buffer                in: x, buffer          reads the buffer
    T_STOP,    // y = 1 / (1 + x * x)           in: x                  no backward
    T_LOSS,    // row sums of x * x / 2 + x/10  in: x                  reads x
    T_KIND_COUNT
} t_kind;

enum { T_CALLBACK_ERROR = 17 };

typedef struct t_op {
    t_kind kind;
    float scalar;
    uint64_t seed; // of the last forward
    uint32_t calls[MS_PHASE_COUNT];
    uint32_t failing; // mask of phases that return T_CALLBACK_ERROR
} t_op;

static inline float *t_data(const ms_view *view) {
    return (float *)view->data;
}

static inline int64_t t_cols(const ms_view *view) {
    return view->shape.rank == 0 ? 1 : view->shape.dim[view->shape.rank - 1];
}

static inline int64_t t_rows(const ms_view *view) {
    return (int64_t)ms_shape_count(&view->shape) / t_cols(view);
}

/* Adds to element i of a gradient in the style of beta; a gradient that nobody wants is skipped. */
static inline void t_contribute(const ms_view *gradient, int64_t i, float value) {
    float *data = t_data(gradient);
    if (data != NULL) {
        data[i] = gradient->beta == 0.0f ? value : data[i] + value;
    }
}

/* An output without a gradient counts as zero. */
static inline float t_grad_out(const ms_call *call, int slot, int64_t i) {
    const float *data = t_data(&call->grad_out[slot]);
    return data == NULL ? 0.0f : data[i];
}

static inline float t_mask(uint64_t seed, int64_t i) {
    t_rng rng;
    rng.state = seed + (uint64_t)i * 0x632be59bd9b4e019u;
    return (t_next(&rng) & 3u) == 0 ? 0.0f : 1.25f;
}

static inline float t_elementwise(const t_op *op, const ms_call *call, int64_t i, float x) {
    switch (op->kind) {
    case T_SQUASH:
        return x / (1.0f + fabsf(x));
    case T_SCALE:
        return op->scalar * x;
    case T_DROPOUT:
        return t_mask(call->seed, i) * x;
    default:
        return 1.0f / (1.0f + x * x); // T_STOP
    }
}

static inline int t_unary_forward(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    const float *x = t_data(&call->in[0]);
    float *y = t_data(&call->out[0]);
    int64_t count = t_rows(&call->out[0]) * t_cols(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        y[i] = t_elementwise(op, call, i, x[i]);
    }
    return 0;
}

static inline int t_unary_backward(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    const float *y = t_data(&call->out[0]);
    int64_t count = t_rows(&call->in[0]) * t_cols(&call->in[0]);
    for (int64_t i = 0; i < count; ++i) {
        float slope = op->kind == T_DROPOUT ? t_mask(call->seed, i) : op->scalar;
        if (op->kind == T_SQUASH) {
            slope = (1.0f - fabsf(y[i])) * (1.0f - fabsf(y[i]));
        }
        t_contribute(&call->grad_in[0], i, t_grad_out(call, 0, i) * slope);
    }
    return 0;
}

static inline int t_add_forward(const ms_call *call) {
    const float *a = t_data(&call->in[0]);
    const float *b = t_data(&call->in[1]);
    int64_t count = t_rows(&call->out[0]) * t_cols(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        t_data(&call->out[0])[i] = 0.5f * (a[i] + b[i]);
    }
    return 0;
}

static inline int t_add_backward(const ms_call *call) {
    int64_t count = t_rows(&call->out[0]) * t_cols(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        float g = 0.5f * t_grad_out(call, 0, i);
        t_contribute(&call->grad_in[0], i, g);
        t_contribute(&call->grad_in[1], i, g);
    }
    return 0;
}

/* b is read from its end, so the product may stand in place of a, but never of b. */
static inline int t_product_forward(const ms_call *call) {
    const float *a = t_data(&call->in[0]);
    const float *b = t_data(&call->in[1]);
    int64_t count = t_rows(&call->out[0]) * t_cols(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        float of_b = b[count - 1 - i];
        t_data(&call->out[0])[i] = a[i] * of_b / (1.0f + fabsf(of_b));
    }
    return 0;
}

static inline int t_product_backward(const ms_call *call) {
    const float *a = t_data(&call->in[0]);
    const float *b = t_data(&call->in[1]);
    int64_t count = t_rows(&call->out[0]) * t_cols(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        float of_b = b[count - 1 - i];
        t_contribute(&call->grad_in[0], i, t_grad_out(call, 0, i) * of_b / (1.0f + fabsf(of_b)));
    }
    for (int64_t i = 0; i < count; ++i) {
        float of_b = 1.0f + fabsf(b[count - 1 - i]);
        float slope = a[i] / (of_b * of_b);
        t_contribute(&call->grad_in[1], count - 1 - i, t_grad_out(call, 0, i) * slope);
    }
    return 0;
}

static inline int t_matmul_forward(const ms_call *call) {
    return (int)ms_gemm(call, 1.0f, ms_matrix_of(&call->in[0]), ms_matrix_of(&call->param[0]), 0.0f,
                        ms_matrix_of(&call->out[0]));
}

static inline int t_matmul_backward(const ms_call *call) {
    ms_matrix g = ms_matrix_of(&call->grad_out[0]);
    ms_result result = MS_RESULT_OK;
    if (call->grad_in[0].data != NULL) {
        result = ms_gemm(call, 1.0f, g, ms_transpose(ms_matrix_of(&call->param[0])),
                         call->grad_in[0].beta, ms_matrix_of(&call->grad_in[0]));
    }
    if (result == MS_RESULT_OK && call->grad_param[0].data != NULL) {
        result = ms_gemm(call, 1.0f, ms_transpose(ms_matrix_of(&call->in[0])), g,
                         call->grad_param[0].beta, ms_matrix_of(&call->grad_param[0]));
    }
    return (int)result;
}

static inline int t_affine_forward(const ms_call *call) {
    const float *x = t_data(&call->in[0]);
    const float *p = t_data(&call->param[0]);
    const float *q = t_data(&call->param[1]);
    float *y = t_data(&call->out[0]);
    int64_t cols = t_cols(&call->out[0]);
    int64_t count = t_rows(&call->out[0]) * cols;
    for (int64_t i = 0; i < count; ++i) {
        y[i] = 0.5f * (x[i] * p[i % cols] + q[i % cols]);
    }
    return 0;
}

static inline int t_affine_backward(const ms_call *call) {
    const float *x = t_data(&call->in[0]);
    const float *p = t_data(&call->param[0]);
    int64_t cols = t_cols(&call->in[0]);
    int64_t rows = t_rows(&call->in[0]);
    for (int slot = 0; slot < 2; ++slot) {
        for (int64_t c = 0; c < cols; ++c) {
            float sum = 0.0f;
            for (int64_t i = c; i < rows * cols; i += cols) {
                sum += 0.5f * t_grad_out(call, 0, i) * (slot == 0 ? x[i] : 1.0f);
            }
            t_contribute(&call->grad_param[slot], c, sum);
        }
    }
    for (int64_t i = 0; i < rows * cols; ++i) {
        t_contribute(&call->grad_in[0], i, 0.5f * t_grad_out(call, 0, i) * p[i % cols]);
    }
    return 0;
}

/* Copies between a wide matrix and two narrow ones that lie in it side by side. */
static inline int t_split_forward(const ms_call *call) {
    const float *x = t_data(&call->in[0]);
    int64_t cols = t_cols(&call->in[0]);
    int64_t left = t_cols(&call->out[0]);
    int64_t right = cols - left;
    for (int64_t r = 0; r < t_rows(&call->in[0]); ++r) {
        for (int64_t c = 0; c < cols; ++c) {
            if (c < left) {
                t_data(&call->out[0])[r * left + c] = x[r * cols + c];
            } else {
                t_data(&call->out[1])[r * right + c - left] = x[r * cols + c];
            }
        }
    }
    return 0;
}

static inline int t_split_backward(const ms_call *call) {
    int64_t cols = t_cols(&call->in[0]);
    int64_t left = t_cols(&call->out[0]);
    int64_t right = cols - left;
    for (int64_t i = 0; i < t_rows(&call->in[0]) * cols; ++i) {
        int64_t r = i / cols;
        int64_t c = i % cols;
        float g = c < left ? t_grad_out(call, 0, r * left + c)
                           : t_grad_out(call, 1, r * right + c - left);
        t_contribute(&call->grad_in[0], i, g);
    }
    return 0;
}

static inline int t_concat_forward(const ms_call *call) {
    int64_t cols = t_cols(&call->out[0]);
    int64_t left = t_cols(&call->in[0]);
    int64_t right = cols - left;
    float *y = t_data(&call->out[0]);
    for (int64_t i = 0; i < t_rows(&call->out[0]) * cols; ++i) {
        int64_t r = i / cols;
        int64_t c = i % cols;
        y[i] = c < left ? t_data(&call->in[0])[r * left + c]
                        : t_data(&call->in[1])[r * right + c - left];
    }
    return 0;
}

static inline int t_concat_backward(const ms_call *call) {
    int64_t cols = t_cols(&call->out[0]);
    int64_t left = t_cols(&call->in[0]);
    int64_t right = cols - left;
    for (int slot = 0; slot < 2; ++slot) { // slot by slot: both may be the same gradient
        int64_t width = slot == 0 ? left : right;
        for (int64_t i = 0; i < t_rows(&call->out[0]) * width; ++i) {
            int64_t from = (i / width) * cols + i % width + (slot == 0 ? 0 : left);
            t_contribute(&call->grad_in[slot], i, t_grad_out(call, 0, from));
        }
    }
    return 0;
}

/* Uses its workspace for one row, so that a workspace that is too small or shared shows. As a
   recompute callback it makes what is wanted. */
static inline int t_norm_forward(const ms_call *call) {
    float *row = (float *)call->workspace;
    float *out = t_data(&call->out[0]);
    float *saved = t_data(&call->saved[0]);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t r = 0; r < t_rows(&call->in[0]); ++r) {
        float mean = 0.0f;
        float spread = 1.0f;
        memcpy(row, t_data(&call->in[0]) + r * cols, (size_t)cols * sizeof(float));
        for (int64_t c = 0; c < cols; ++c) {
            mean += row[c] / (float)cols;
        }
        for (int64_t c = 0; c < cols; ++c) {
            spread += fabsf(row[c] - mean);
        }
        for (int64_t c = 0; c < cols && out != NULL; ++c) {
            out[r * cols + c] = (row[c] - mean) / spread;
        }
        if (saved != NULL) {
            saved[2 * r] = mean;
            saved[2 * r + 1] = spread;
        }
    }
    return 0;
}

static inline int t_norm_backward(const ms_call *call) {
    float *row = (float *)call->workspace;
    const float *x = t_data(&call->in[0]);
    const float *saved = t_data(&call->saved[0]);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t r = 0; r < t_rows(&call->in[0]); ++r) {
        float mean = 0.0f;
        for (int64_t c = 0; c < cols; ++c) {
            row[c] = t_grad_out(call, 0, r * cols + c);
            row[cols + c] = (x[r * cols + c] - saved[2 * r]) / saved[2 * r + 1];
            mean += row[c] / (float)cols;
        }
        for (int64_t c = 0; c < cols; ++c) {
            float slope = (1.0f - 0.25f * row[cols + c]) / saved[2 * r + 1];
            t_contribute(&call->grad_in[0], r * cols + c, (row[c] - mean) * slope);
        }
    }
    return 0;
}

static inline int t_embed_forward(const ms_call *call) {
    const int32_t *ids = (const int32_t *)call->in[0].data;
    int64_t cols = t_cols(&call->out[0]);
    for (int64_t r = 0; r < t_rows(&call->out[0]); ++r) {
        memcpy(t_data(&call->out[0]) + r * cols, t_data(&call->param[0]) + ids[r] * cols,
               (size_t)cols * sizeof(float));
    }
    return 0;
}

static inline int t_embed_backward(const ms_call *call) {
    const int32_t *ids = (const int32_t *)call->in[0].data;
    float *gradient = t_data(&call->grad_param[0]);
    int64_t cols = t_cols(&call->out[0]);
    if (gradient == NULL) {
        return 0;
    }
    if (call->grad_param[0].beta == 0.0f) {
        memset(gradient, 0, (size_t)ms_shape_count(&call->grad_param[0].shape) * sizeof(float));
    }
    for (int64_t i = 0; i < t_rows(&call->out[0]) * cols; ++i) {
        gradient[ids[i / cols] * cols + i % cols] += t_grad_out(call, 0, i);
    }
    return 0;
}

static inline int t_gate_forward(const ms_call *call) {
    int64_t cols = t_cols(&call->out[0]);
    for (int64_t i = 0; i < t_rows(&call->out[0]) * cols; ++i) {
        t_data(&call->out[0])[i] = t_data(&call->in[0])[i] * t_data(&call->in[1])[i % cols];
    }
    return 0;
}

static inline int t_gate_backward(const ms_call *call) {
    const float *gate = t_data(&call->in[1]);
    int64_t cols = t_cols(&call->out[0]);
    for (int64_t i = 0; i < t_rows(&call->out[0]) * cols; ++i) {
        t_contribute(&call->grad_in[0], i, t_grad_out(call, 0, i) * gate[i % cols]);
    }
    return 0;
}

static inline int t_loss_forward(const ms_call *call) {
    const float *x = t_data(&call->in[0]);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t r = 0; r < t_rows(&call->in[0]); ++r) {
        float sum = 0.0f;
        for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
            sum += 0.5f * x[i] * x[i] + 0.1f * x[i];
        }
        t_data(&call->out[0])[r] = sum;
    }
    return 0;
}

static inline int t_loss_backward(const ms_call *call) {
    const float *x = t_data(&call->in[0]);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * cols; ++i) {
        t_contribute(&call->grad_in[0], i, t_grad_out(call, 0, i / cols) * (x[i] + 0.1f));
    }
    return 0;
}

typedef struct t_kind_info {
    const char *name;
    ms_layer_fn forward, backward;
    uint16_t reads_in, reads_out, reads_saved, reads_param;
    uint16_t in_place;                    // of out[0]: mask of inputs
    uint16_t grad_over_out, grad_over_in; // of grad_in[0]: over grad_out[0], over in[0]
} t_kind_info;

static const t_kind_info t_kinds[T_KIND_COUNT] = {
    {"squash", t_unary_forward, t_unary_backward, 0, 1, 0, 0, 1, 1, 0},
    {"scale", t_unary_forward, t_unary_backward, 0, 0, 0, 0, 1, 1, 0},
    {"add", t_add_forward, t_add_backward, 0, 0, 0, 0, 3, 1, 0},
    {"product", t_product_forward, t_product_backward, 3, 0, 0, 0, 1, 0, 0},
    {"matmul", t_matmul_forward, t_matmul_backward, 1, 0, 0, 1, 0, 0, 0},
    {"affine", t_affine_forward, t_affine_backward, 1, 0, 0, 1, 1, 1, 1},
    {"split", t_split_forward, t_split_backward, 0, 0, 0, 0, 0, 0, 0},
    {"concat", t_concat_forward, t_concat_backward, 0, 0, 0, 0, 0, 0, 0},
    {"norm", t_norm_forward, t_norm_backward, 1, 0, 1, 0, 1, 1, 1},
    {"dropout", t_unary_forward, t_unary_backward, 0, 0, 0, 0, 1, 1, 0},
    {"embed", t_embed_forward, t_embed_backward, 1, 0, 0, 0, 0, 0, 0},
    {"gate", t_gate_forward, t_gate_backward, 2, 0, 0, 0, 1, 1, 0},
    {"stop", t_unary_forward, NULL, 0, 0, 0, 0, 1, 0, 0},
    {"loss", t_loss_forward, t_loss_backward, 1, 0, 0, 0, 0, 0, 1},
};

/* On a device these layers enqueue their work, as those of a trainer do. */
static inline int t_run(ms_layer_fn function, const ms_call *call) {
#ifdef ON_CUDA_H
    if (function != t_matmul_forward && function != t_matmul_backward) { // ms_gemm enqueues
        return t_cuda_enqueue(function, call);
    }
#endif
    return function(call);
}

static inline int t_forward(const ms_call *call) {
    t_op *op = (t_op *)call->user;
    op->calls[call->phase] += 1;
    if ((op->failing >> call->phase & 1u) != 0) {
        return T_CALLBACK_ERROR;
    }
    op->seed = call->phase == MS_PHASE_FORWARD ? call->seed : op->seed;
    return t_run(t_kinds[op->kind].forward, call);
}

static inline int t_backward(const ms_call *call) {
    t_op *op = (t_op *)call->user;
    op->calls[call->phase] += 1;
    if ((op->failing >> call->phase & 1u) != 0) {
        return T_CALLBACK_ERROR;
    }
    return t_run(t_kinds[op->kind].backward, call);
}

/* A desc with callbacks and declarations; tensors and workspace are the caller's to fill in. */
static inline ms_layer_desc t_describe(t_op *op) {
    const t_kind_info *kind = &t_kinds[op->kind];
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
#ifdef ON_CUDA_H
    t_cuda_mark(t_forward);
    t_cuda_mark(t_backward);
#endif
    desc.name = kind->name;
    desc.forward = t_forward;
    desc.backward = kind->backward != NULL ? t_backward : NULL;
    desc.user = op;
    desc.backward_reads.in = kind->reads_in;
    desc.backward_reads.out = kind->reads_out;
    desc.backward_reads.saved = kind->reads_saved;
    desc.backward_reads.param = kind->reads_param;
    desc.backward_reads.nothing =
        (kind->reads_in | kind->reads_out | kind->reads_saved | kind->reads_param) == 0;
    desc.in_place[0] = kind->in_place;
    desc.grad_in_place[0].grad_out = kind->grad_over_out;
    desc.grad_in_place[0].in = kind->grad_over_in;
    return desc;
}

// ------------------------------------------------------------------------------------------------
// a small model: squash(x W) again and again, then the loss; the shapes of a deep perceptron

enum { T_CHAIN_LAYERS = 40, T_CHAIN_ROWS = 48, T_CHAIN_COLS = 8 };
enum { T_CHAIN_INPUT = T_CHAIN_ROWS * T_CHAIN_COLS };

typedef struct t_chain {
    ms_model *model;
    uint32_t depth;
    int64_t rows, cols;
    ms_tensor x, loss;
    ms_tensor weight[T_CHAIN_LAYERS], hidden[T_CHAIN_LAYERS];
    t_op matmul[T_CHAIN_LAYERS], squash[T_CHAIN_LAYERS], loss_op;
} t_chain;

static inline ms_config t_config(void) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.memory_budget_bytes = (uint64_t)1 << 40;
    return config;
}

static inline void t_chain_register(t_chain *chain) {
    ms_model *m = chain->model;
    char name[32];
    chain->x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(chain->rows, chain->cols));
    ms_tensor last = chain->x;
    for (uint32_t i = 0; i < chain->depth; ++i) {
        snprintf(name, sizeof name, "weight%u", (unsigned)i);
        chain->weight[i] = ms_param(m, name, MS_DTYPE_F32, ms_shape2(chain->cols, chain->cols));
        ms_tensor product =
            ms_activation(m, "product", MS_DTYPE_F32, ms_shape2(chain->rows, chain->cols));
        snprintf(name, sizeof name, "hidden%u", (unsigned)i);
        chain->hidden[i] =
            ms_activation(m, name, MS_DTYPE_F32, ms_shape2(chain->rows, chain->cols));
        chain->matmul[i].kind = T_MATMUL;
        ms_layer_desc desc = t_describe(&chain->matmul[i]);
        snprintf(name, sizeof name, "matmul%u", (unsigned)i);
        desc.name = name;
        desc.in[0] = last;
        desc.param[0] = chain->weight[i];
        desc.out[0] = product;
        ms_register_layer(m, &desc);
        chain->squash[i].kind = T_SQUASH;
        desc = t_describe(&chain->squash[i]);
        snprintf(name, sizeof name, "squash%u", (unsigned)i);
        desc.name = name;
        desc.in[0] = product;
        desc.out[0] = chain->hidden[i];
        ms_register_layer(m, &desc);
        last = chain->hidden[i];
    }
    chain->loss = ms_activation(m, "losses", MS_DTYPE_F32, ms_shape1(chain->rows));
    chain->loss_op.kind = T_LOSS;
    ms_layer_desc desc = t_describe(&chain->loss_op);
    desc.in[0] = last;
    desc.out[0] = chain->loss;
    ms_register_layer(m, &desc);
    ms_set_loss(m, chain->loss);
}

/* The chain as far as registration; model is NULL if even ms_create failed. */
static inline ms_result t_chain_create(t_chain *chain, const ms_config *config, uint32_t depth,
                                       int64_t rows, int64_t cols) {
    memset(chain, 0, sizeof *chain);
    chain->depth = depth;
    chain->rows = rows;
    chain->cols = cols;
    ms_result result = ms_create(config, &chain->model);
    if (result == MS_RESULT_OK) {
        t_chain_register(chain);
    }
    return result;
}

static inline ms_result t_chain_write(t_chain *chain, uint64_t seed) {
    t_rng rng = t_seed(seed);
    uint64_t count = (uint64_t)(chain->cols * chain->cols);
    uint64_t input = (uint64_t)(chain->rows * chain->cols);
    float *data = (float *)malloc((size_t)(count > input ? count : input) * sizeof(float));
    assert_non_null(data);
    t_fill(&rng, data, input, 1.0f);
    ms_result result = ms_write(chain->model, chain->x, data);
    for (uint32_t i = 0; i < chain->depth && result == MS_RESULT_OK; ++i) {
        t_fill(&rng, data, count, 1.7f / sqrtf((float)chain->cols));
        result = ms_write(chain->model, chain->weight[i], data);
    }
    free(data);
    return result;
}

static inline void t_chain_start(t_chain *chain, const ms_config *config, uint32_t depth) {
    assert_int_equal(t_chain_create(chain, config, depth, T_CHAIN_ROWS, T_CHAIN_COLS),
                     MS_RESULT_OK);
    t_ok(chain->model, ms_wrap(chain->model));
    t_ok(chain->model, t_chain_write(chain, 1));
}

/* All weights, in order, for comparison; the caller frees. */
static inline float *t_chain_weights(const t_chain *chain) {
    size_t count = (size_t)(chain->cols * chain->cols);
    float *all = (float *)malloc(count * chain->depth * sizeof(float));
    assert_non_null(all);
    for (uint32_t i = 0; i < chain->depth; ++i) {
        t_ok(chain->model, ms_read(chain->model, chain->weight[i], all + i * count));
    }
    return all;
}

static inline void t_chain_same(const t_chain *a, const t_chain *b) {
    float *of_a = t_chain_weights(a);
    float *of_b = t_chain_weights(b);
    assert_memory_equal(of_a, of_b, (size_t)(a->cols * a->cols) * a->depth * sizeof(float));
    free(of_a);
    free(of_b);
}

#endif // TESTING_H
