/*  testing.h - what the test programs share: a seeded generator of numbers, checks, and an allocator
    and a backend that count and can be made to fail. Include it after the implementation of
    memscale.h. Layers for tests are in toy_layers.h. */
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

#include "hooks.h"

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
   MEMSCALE_TEST_SWEEP percent of `full`, if that is more; `make test-all` sets it. */
static inline uint64_t t_sweep(uint64_t quick, uint64_t full) {
    const uint64_t count = full * t_environment("MEMSCALE_TEST_SWEEP", 0) / 100;
    return count > quick ? count : quick;
}

/* The size of a case, or a number of steps within it, that longer sweeps of any length do not cut. */
static inline uint64_t t_size(uint64_t quick, uint64_t full) {
    return t_environment("MEMSCALE_TEST_SWEEP", 0) == 0 ? quick : full;
}

/* The distance between the cases of a sweep that is run: `quick` with MEMSCALE_TEST_SWEEP at 0, 1 from
   100 on, a full sweep, which is of all cases. */
static inline uint64_t t_stride(uint64_t quick) {
    const uint64_t percent = t_environment("MEMSCALE_TEST_SWEEP", 0);
    return percent < 100 ? 1 + (quick - 1) * (100 - percent) / 100 : 1;
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

/* Writes zeros to all inputs and params that have no value yet, for tests that need none. */
static inline void t_write_zeros(ms_model *model) {
    for (uint32_t t = 0; t < model->graph.tensors.count; ++t) {
        const ms_tensor handle = msi_handle(&model->graph, t, MSI_ROLE_VALUE);
        const msi_tensor *tensor = &model->graph.tensors.items[t];
        const bool given = tensor->kind == MSI_KIND_INPUT || tensor->kind == MSI_KIND_PARAM;
        if (given && !tensor->written && !msi_is_borrowed(tensor, MSI_ROLE_VALUE)) {
            void *zeros = calloc(1, (size_t)ms_tensor_bytes(model, handle));
            assert_non_null(zeros);
            t_ok(model, ms_write(model, handle, zeros));
            free(zeros);
        }
    }
}

/* Destroys what a failing ms_create has left: a model that carries the error and its text, or, for
   want of memory, nothing. Returns the error. */
static inline ms_result t_not_created(ms_model **model, ms_result result) {
    if (*model != NULL) {
        t_check(*model, ms_step(*model, NULL), result, "ms_step", __FILE__, __LINE__);
        assert_true(ms_last_error(*model)[0] != 0);
    }
    ms_destroy(*model);
    *model = NULL;
    return result;
}

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

/* Whether a product may be rounded to 16 bits before what was there is added, and once more after:
   some kernels of cuBLAS do that. */
#if defined T_CUDA && !defined CUDART_EMULATION
enum { T_ROUNDS_PRODUCTS = 1 };
#else
enum { T_ROUNDS_PRODUCTS = 0 };
#endif

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
    uint64_t most_bytes;    // live at once
    uint64_t calls;         // of alloc and resize
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
    if (heap->live_bytes > heap->most_bytes) {
        heap->most_bytes = heap->live_bytes;
    }
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

/* To another address each time. Both blocks at once do not count: realloc need not have them. */
static inline void *t_heap_resize(void *memory, uint64_t old_bytes, uint64_t bytes, void *user) {
    t_heap *heap = (t_heap *)user;
    heap->live_bytes -= old_bytes;
    void *moved = t_heap_alloc(bytes, user);
    heap->live_bytes += old_bytes;
    if (moved != NULL) {
        memcpy(moved, memory, (size_t)(old_bytes < bytes ? old_bytes : bytes));
        t_heap_release(memory, old_bytes, user);
    }
    return moved;
}

static inline ms_allocator t_heap_allocator(t_heap *heap) {
    ms_allocator allocator;
    memset(&allocator, 0, sizeof allocator);
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

/* Built-in optimizers are the first kinds: a loop over all of them ends where this does not hold. */
static inline bool t_is_built_in(int kind) {
    return msi_optimizer_of((ms_optimizer_kind)kind).is_built_in;
}

/* How many tensors of state a param of an optimizer has. */
static inline uint32_t t_state_count(const ms_optimizer_desc *o) {
    const msi_optimizer row = msi_optimizer_of(o->kind);
    return o->kind == MS_OPTIMIZER_CUSTOM            ? o->state_count
           : row.has_momentum && o->momentum == 0.0f ? 0
                                                     : (uint32_t)row.states;
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
    factors.decay = msi_decay_factor(&o, args->weight_decay);
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
    bool fails_on;    // as do all after it
    uint64_t wrong_releases;
    uint64_t fail_update_at; // the update that fails, from 1; 0: none
} t_device;

static inline int t_device_fails(t_device *device) {
    device->calls += 1;
    const bool fails_on = device->fails_on && device->calls > device->fail_at;
    return device->fail_at != 0 && (device->calls == device->fail_at || fails_on) ? 5 : 0;
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

static inline int t_device_scale_f32(void *user, void *to, const float *factor, uint64_t count) {
    t_device *device = (t_device *)user;
    const int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.scale_f32(device->cpu.user, to, factor, count);
}

static inline int t_device_add(void *user, void *target, ms_dtype to, const void *source,
                               ms_dtype from, uint64_t count) {
    t_device *device = (t_device *)user;
    const int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.add(device->cpu.user, target, to, source, from, count);
}

static inline int t_device_add_squares(void *user, const void *from, ms_dtype dtype, uint64_t count,
                                       double *sum, uint32_t number, uint32_t *nonfinite) {
    t_device *device = (t_device *)user;
    const int error = t_device_fails(device);
    return error != 0 ? error
                      : device->cpu.add_squares(device->cpu.user, from, dtype, count, sum, number,
                                                nonfinite);
}

static inline int t_device_clip_scale(void *user, ms_norm *norms, const float *limits,
                                      uint32_t count, ms_step_state *step,
                                      ms_update_factors *factors, uint64_t factor_count) {
    t_device *device = (t_device *)user;
    const int error = t_device_fails(device);
    return error != 0 ? error
                      : device->cpu.clip_scale(device->cpu.user, norms, limits, count, step,
                                               factors, factor_count);
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

/* An update that fails has updated half of the param: who goes on with it goes wrong. */
static inline int t_device_update(void *user, const ms_update_args *args) {
    t_device *device = (t_device *)user;
    ms_update_args part = *args;
    int error = t_device_fails(device);
    device->updates += 1;
    if (error != 0 || device->updates == device->fail_update_at) {
        part.count /= 2;
        error = 6;
    }
    const int of_cpu = device->cpu.update(device->cpu.user, &part);
    return error != 0 ? error : of_cpu;
}

static inline int t_device_factor(void *user, const ms_factor_args *args) {
    t_device *device = (t_device *)user;
    const int error = t_device_fails(device);
    return error != 0 ? error : device->cpu.factor(device->cpu.user, args);
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

/* The CPU backend without a state: all functions receive user, and copies are done on return. */
static inline ms_backend t_backend_without_state(void) {
    ms_backend backend = ms_backend_cpu();
    backend.open = NULL;
    backend.close = NULL;
    backend.prepare = NULL;
    backend.has_copy_streams = false;
    backend.query = NULL;
    backend.copy_in = backend.copy_out = backend.copy;
    return backend;
}

static inline ms_backend t_device_backend(t_device *device) {
    ms_backend backend = t_backend_without_state();
    memset(device, 0, sizeof *device);
    device->cpu = backend;
    backend.name = "counting";
    backend.user = device;
    backend.memory_alloc = t_device_memory_alloc;
    backend.memory_release = t_device_memory_release;
    backend.memory_resize = NULL;
    backend.copy_in = t_device_copy_in;
    backend.copy_out = t_device_copy_out;
    backend.copy = t_device_copy;
    backend.fill_bytes = t_device_fill_bytes;
    backend.fill_f32 = t_device_fill_f32;
    backend.scale_f32 = t_device_scale_f32;
    backend.add = t_device_add;
    backend.add_squares = t_device_add_squares;
    backend.clip_scale = t_device_clip_scale;
    backend.loss = t_device_loss;
    backend.cast = t_device_cast;
    backend.update = t_device_update;
    backend.factor = t_device_factor;
    backend.gemm = t_device_gemm;
    backend.hardware = t_device_hardware;
    return backend;
}

// ------------------------------------------------------------------------------------------------
// every call fails once

/* A loop in which the n-th allocation, call or callback fails, for n = 1, 2, ..., until there is no
   n-th:

        t_failing f = t_failing_heap(&heap);
        while (t_next_failure(&f, 1)) {
            ... what comes before
            t_arm(&f);
            const ms_result result = ... what fails, if it has an n-th allocation
            const bool failed = t_failed(&f, model, result);
            ... what must hold then, and the end of it
        } */
typedef struct t_failing {
    const uint64_t *calls;    // that were made so far; NULL: fail_at counts down to 0 instead
    uint64_t *fail_at;        // the call that fails
    uint32_t errors;          // a bit for each result that tells of a failure
    ms_result success;        // the result without one
    const t_heap *heap;       // NULL, or what is empty after each round
    const t_device *device;   // the same
    uint64_t at, error_count; // n; rounds that ended in an error
    bool failed;
} t_failing;

static inline t_failing t_failing_of(const uint64_t *calls, uint64_t *fail_at, uint32_t errors) {
    t_failing f;
    memset(&f, 0, sizeof f);
    f.calls = calls;
    f.fail_at = fail_at;
    f.errors = errors;
    f.failed = true;
    return f;
}

static inline t_failing t_failing_heap(t_heap *heap) {
    t_failing f = t_failing_of(&heap->calls, &heap->fail_at, 1u << MS_RESULT_OUT_OF_MEMORY);
    f.heap = heap;
    return f;
}

/* Of a matrix product that fails, the layer that asked for it is told, and passes it on. */
static inline t_failing t_failing_device(t_device *device) {
    t_failing f = t_failing_of(&device->calls, &device->fail_at,
                               1u << MS_RESULT_OUT_OF_MEMORY | 1u << MS_RESULT_BACKEND |
                                   1u << MS_RESULT_CALLBACK);
    f.device = device;
    return f;
}

/* Whether there is another round: not after one in which nothing failed. */
static inline bool t_next_failure(t_failing *f, uint64_t stride) {
    const t_heap *heap = f->heap;
    const t_device *device = f->device;
    if (f->at > 0) {
        assert_true(heap == NULL ||
                    (heap->live_count == 0 && heap->live_bytes == 0 && heap->wrong_releases == 0));
        assert_true(device == NULL || (device->live_count == 0 && device->live_bytes == 0 &&
                                       device->wrong_releases == 0));
    }
    assert_true(f->at < 1000000); // or there is no end to it
    f->at += !f->failed ? 0 : f->at == 0 ? 1 : stride;
    return f->failed;
}

static inline void t_arm(t_failing *f) {
    *f->fail_at = (f->calls != NULL ? *f->calls : 0) + f->at;
}

/* Whether the n-th call has failed. The result has to tell of it, and the model, unless it is NULL,
   has to have a text. */
static inline bool t_failed(t_failing *f, const ms_model *m, ms_result result) {
    const char *text = ms_last_error(m);
    f->failed = f->calls != NULL ? *f->calls >= *f->fail_at : *f->fail_at == 0;
    *f->fail_at = 0;
    const bool is_error = result != f->success;
    const bool fits = f->failed ? (f->errors >> result & 1u) != 0 : !is_error;
    f->error_count += f->failed && is_error;
    if (!fits || (is_error && strlen(text) < 10)) {
        fail_msg("call %u %s: %s, \"%s\"", (unsigned)f->at, f->failed ? "fails" : "is not made",
                 ms_result_name(result), text);
    }
    return f->failed;
}

// ------------------------------------------------------------------------------------------------
// descs

/* Everything at its default, and a budget that is never reached. */
/* On an emulated device plans are those of the CPU, and nothing is offloaded, unless the test is
   about that and defines T_OFFLOADS. */
static inline ms_config t_config(void) {
    ms_config config;
    memset(&config, 0, sizeof config);
#if defined T_CUDA && !defined T_OFFLOADS
    config.offloading = MS_SWITCH_OFF;
#endif
    config.memory_budget_bytes = (uint64_t)1 << 40;
    return config;
}

/* A factor of 0 stands for the mean. */
static inline void t_set_loss_factor(ms_model *m, float factor) {
    if (factor == 0.0f) {
        ms_set_loss_mean(m);
    } else {
        ms_set_loss_factor(m, factor);
    }
}

static inline ms_layer_desc t_new_layer(const char *name, ms_layer_fn forward, ms_layer_fn backward,
                                        void *user) {
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.name = name;
    d.forward = forward;
    d.backward = backward;
    d.user = user;
    return d;
}

static inline ms_optimizer_desc t_optimizer(ms_optimizer_kind kind, float rate) {
    ms_optimizer_desc optimizer;
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.kind = kind;
    optimizer.learning_rate = rate;
    return optimizer;
}

#endif // TESTING_H
