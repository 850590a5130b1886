/*  on_cuda.h - runs tests whose callbacks are host code on the CUDA backend: included in front of
    them, by -include. It holds the host half of memscale.h, and turns the functions below it into
    macros, (ms_create)(...) in parentheses being the plain one.

    - A model that names no backend, or the CPU's table, gets that of device 0. Its own workspace
      (what cuBLAS and the sums of squares need) lies outside the arena, so that sizes are those of
      the CPU backend.
    - The callbacks of a layer and of an optimizer run behind what is enqueued on the stream of the
      call, and find device memory open. ms_gemm and ms_cast inside them are waited for.
    - Callbacks that t_cuda_mark names are left alone: they enqueue functions, by t_cuda_enqueue, as
      kernels of one thread, which run as late as the emulation likes.
    - On a real GPU device memory is pinned memory of the host, which both can touch at the same
      address, and nothing is lazy; what tests lend must come from t_cuda_lend. */
#ifndef ON_CUDA_H
#define ON_CUDA_H

#include "private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime.h>
#ifdef CUDART_EMULATION
#include "emulation.h"
#endif

/* cmocka comes later, behind sources that have names of its own. */
static inline void t_cuda_expect(bool holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "on_cuda.h: %s\n", what);
        abort();
    }
}

// ------------------------------------------------------------------------------------------------
// the table

enum { T_CUDA_WORKSPACE = 1 << 20, T_CUDA_STATES = 64 };

/* The workspace of one state of the backend. */
typedef struct t_cuda_state {
    void *state, *workspace;
} t_cuda_state;

static t_cuda_state t_cuda_states[T_CUDA_STATES];

static inline t_cuda_state *t_cuda_find_state(const void *state) {
    for (int i = 0; i < T_CUDA_STATES; ++i) {
        if (t_cuda_states[i].state == state) {
            return &t_cuda_states[i];
        }
    }
    return NULL;
}

static inline int t_cuda_prepare(void *state, const ms_prepare_args *args) {
    t_cuda_state *of = t_cuda_find_state(state);
    ms_prepare_args with = *args;
    of = of == NULL ? t_cuda_find_state(NULL) : of;
    t_cuda_expect(of != NULL, "too many models");
    if (of->state == NULL && cudaMalloc(&of->workspace, T_CUDA_WORKSPACE) != cudaSuccess) {
        return (int)cudaGetLastError();
    }
    of->state = state;
    with.workspace = of->workspace;
    with.workspace_bytes = T_CUDA_WORKSPACE;
    return ms_backend_cuda(0).prepare(state, &with);
}

static inline void t_cuda_close(void *state) {
    t_cuda_state *of = t_cuda_find_state(state);
    ms_backend_cuda(0).close(state);
    if (of != NULL) {
        cudaFree(of->workspace);
        of->state = of->workspace = NULL;
    }
}

#ifndef CUDART_EMULATION
static inline int t_cuda_memory_alloc(void *user, const ms_allocator *host, uint64_t bytes,
                                      void **device) {
    (void)user, (void)host;
    return (int)cudaHostAlloc(device, (size_t)bytes, cudaHostAllocMapped | cudaHostAllocPortable);
}

static inline void t_cuda_memory_release(void *user, const ms_allocator *host, void *device,
                                         uint64_t bytes) {
    (void)user, (void)host, (void)bytes;
    cudaFreeHost(device);
}
#endif

static inline ms_backend t_cuda_backend(void) {
    ms_backend backend = ms_backend_cuda(0);
    backend.workspace_bytes = 0;
    backend.prepare = t_cuda_prepare;
    backend.close = t_cuda_close;
#ifndef CUDART_EMULATION
    backend.memory_alloc = t_cuda_memory_alloc;
    backend.memory_release = t_cuda_memory_release;
#endif
    return backend;
}

/* Whether it is the CPU's: a test that brings a table of its own means that one. */
static inline bool t_cuda_is_plain(const ms_backend *backend) {
    const ms_backend cpu = ms_backend_cpu();
    const size_t first = offsetof(ms_backend, memory_alloc);
    return backend->size == 0 ||
           (backend->size == cpu.size && backend->name == cpu.name && backend->user == cpu.user &&
            memcmp((const char *)backend + first, (const char *)&cpu + first, sizeof cpu - first) ==
                0);
}

static inline ms_result t_cuda_create(const ms_config *config, ms_model **model) {
    ms_config with;
    memset(&with, 0, sizeof with);
    with = config != NULL ? *config : with;
#ifdef CUDART_EMULATION
    emulation_set_pageable_access(true); // for what tests lend
#endif
    if (t_cuda_is_plain(&with.backend)) {
        with.backend = t_cuda_backend();
    }
    return ms_create(&with, model);
}

static inline ms_result t_cuda_arena_create(const ms_backend *backend,
                                            const ms_allocator *allocator, ms_arena **arena) {
    const ms_backend cuda = t_cuda_backend();
    return ms_arena_create(backend == NULL || t_cuda_is_plain(backend) ? &cuda : backend, allocator,
                           arena);
}

// ------------------------------------------------------------------------------------------------
// host code amid device memory

static int t_cuda_depth; // of callbacks that run on the host now

/* Opens device memory to the host, behind all that the stream (NULL: every stream) has to do. */
static inline int t_cuda_open(void *stream) {
#ifdef CUDART_EMULATION
    const cudaError_t error =
        stream != NULL ? cudaStreamSynchronize((cudaStream_t)stream) : cudaDeviceSynchronize();
    emulation_open(true);
#else
    const cudaError_t error = cudaDeviceSynchronize();
    (void)stream;
#endif
    return (int)error;
}

static inline void t_cuda_shut(void) {
#ifdef CUDART_EMULATION
    if (t_cuda_depth == 0) {
        emulation_open(false);
    }
#endif
}

static inline int t_cuda_call_on_host(ms_layer_fn function, const ms_call *call, void *user) {
    ms_call inner = *call;
    inner.user = user;
    if (call->stream == NULL) { // of another backend
        return function(&inner);
    }
    int error = t_cuda_open(call->stream);
    ++t_cuda_depth;
    error = error != 0 ? error : function(&inner);
    --t_cuda_depth;
    t_cuda_shut();
    return error;
}

/* What an API call has enqueued is there when it returns, as on the CPU, if that was in a callback
   which runs on the host, or in a call that a test has made up (without a stream). */
static inline ms_result t_cuda_settled(const ms_call *call, ms_result result) {
    const bool waits = result == MS_RESULT_OK && (t_cuda_depth > 0 || call->stream == NULL);
    if (waits && t_cuda_open(call->stream) != 0) {
        return MS_RESULT_BACKEND;
    }
    t_cuda_shut();
    return result;
}

static inline ms_result t_cuda_gemm(const ms_call *call, float alpha, ms_matrix a, ms_matrix b,
                                    float beta, ms_matrix c) {
    return t_cuda_settled(call, ms_gemm(call, alpha, a, b, beta, c));
}

static inline ms_result t_cuda_cast(const ms_call *call, const ms_view *to, const ms_view *from) {
    return t_cuda_settled(call, ms_cast(call, to, from));
}

// ------------------------------------------------------------------------------------------------
// callbacks as device code

#ifdef CUDART_EMULATION
/* A call that is to run later, with views of its own. */
typedef struct t_cuda_task {
    ms_layer_fn function;
    ms_call call;
    ms_view in[MS_LIMIT_IN], out[MS_LIMIT_OUT], saved[MS_LIMIT_SAVED], param[MS_LIMIT_PARAM];
    ms_view state[MS_LIMIT_STATE], grad_out[MS_LIMIT_OUT], grad_in[MS_LIMIT_IN];
    ms_view grad_param[MS_LIMIT_PARAM];
} t_cuda_task;

static __global__ void t_cuda_kernel(t_cuda_task *task) {
    (void)task->function(&task->call);
    free(task);
}

static inline const ms_view *t_cuda_copy_views(ms_view *to, const ms_view *from, size_t count,
                                               bool *on_device) {
    for (size_t i = 0; from != NULL && i < count; ++i) {
        to[i] = from[i];
        *on_device = *on_device && (from[i].data == NULL || emulation_is_device(from[i].data));
    }
    return from != NULL ? to : NULL;
}

/* Enqueues a function that reads and writes operands on the device and nothing that the host
   changes, and that does not fail. One with operands elsewhere runs at once. */
static inline int t_cuda_enqueue(ms_layer_fn function, const ms_call *call) {
    if (call->stream == NULL || t_cuda_depth > 0) {
        return function(call);
    }
    t_cuda_task *t = (t_cuda_task *)malloc(sizeof(t_cuda_task));
    bool fits = true;
    t_cuda_expect(t != NULL, "out of memory");
    t->function = function;
    t->call = *call;
    t->call.in = t_cuda_copy_views(t->in, call->in, MS_LIMIT_IN, &fits);
    t->call.out = t_cuda_copy_views(t->out, call->out, MS_LIMIT_OUT, &fits);
    t->call.saved = t_cuda_copy_views(t->saved, call->saved, MS_LIMIT_SAVED, &fits);
    t->call.param = t_cuda_copy_views(t->param, call->param, MS_LIMIT_PARAM, &fits);
    t->call.state = t_cuda_copy_views(t->state, call->state, MS_LIMIT_STATE, &fits);
    t->call.grad_out = t_cuda_copy_views(t->grad_out, call->grad_out, MS_LIMIT_OUT, &fits);
    t->call.grad_in = t_cuda_copy_views(t->grad_in, call->grad_in, MS_LIMIT_IN, &fits);
    t->call.grad_param = t_cuda_copy_views(t->grad_param, call->grad_param, MS_LIMIT_PARAM, &fits);
    if (!fits) {
        free(t);
        return t_cuda_call_on_host(function, call, call->user);
    }
    cudaLaunchConfig_t config = cudaLaunchConfig_t();
    config.gridDim = config.blockDim = dim3(1, 1, 1);
    config.stream = (cudaStream_t)call->stream;
    const cudaError_t error = cudaLaunchKernelEx(&config, t_cuda_kernel, t);
    if (error != cudaSuccess) {
        free(t);
    }
    return (int)error;
}
#else
static inline int t_cuda_enqueue(ms_layer_fn function, const ms_call *call) {
    return t_cuda_call_on_host(function, call, call->user);
}
#endif

// ------------------------------------------------------------------------------------------------
// trampolines

typedef struct t_cuda_layer {
    struct t_cuda_layer *next;
    ms_layer_fn forward, backward, recompute, bind;
    ms_update_fn update;
    void *user;
} t_cuda_layer;

static t_cuda_layer *t_cuda_layers;

enum { T_CUDA_MARKS = 8 };
static ms_layer_fn t_cuda_marks[T_CUDA_MARKS];

/* A callback that enqueues its work, by t_cuda_enqueue or ms_gemm, and needs no trampoline. */
static inline void t_cuda_mark(ms_layer_fn function) {
    int i = 0;
    while (t_cuda_marks[i] != NULL && t_cuda_marks[i] != function) {
        t_cuda_expect(++i < T_CUDA_MARKS, "too many marks");
    }
    t_cuda_marks[i] = function;
}

static inline bool t_cuda_is_marked(ms_layer_fn function) {
    bool is_marked = function == NULL;
    for (int i = 0; i < T_CUDA_MARKS && t_cuda_marks[i] != NULL; ++i) {
        is_marked = is_marked || t_cuda_marks[i] == function;
    }
    return is_marked;
}

static inline void t_cuda_release_layers(void) {
    while (t_cuda_layers != NULL) {
        t_cuda_layer *next = t_cuda_layers->next;
        free(t_cuda_layers);
        t_cuda_layers = next;
    }
}

static inline t_cuda_layer *t_cuda_new_layer(void) {
    t_cuda_layer *layer = (t_cuda_layer *)calloc(1, sizeof(t_cuda_layer));
    t_cuda_expect(layer != NULL, "out of memory");
    if (t_cuda_layers == NULL) {
        atexit(t_cuda_release_layers);
    }
    layer->next = t_cuda_layers;
    t_cuda_layers = layer;
    return layer;
}

static inline int t_cuda_forward(const ms_call *call) {
    const t_cuda_layer *layer = (const t_cuda_layer *)call->user;
    return t_cuda_call_on_host(layer->forward, call, layer->user);
}

static inline int t_cuda_backward(const ms_call *call) {
    const t_cuda_layer *layer = (const t_cuda_layer *)call->user;
    return t_cuda_call_on_host(layer->backward, call, layer->user);
}

static inline int t_cuda_recompute(const ms_call *call) {
    const t_cuda_layer *layer = (const t_cuda_layer *)call->user;
    return t_cuda_call_on_host(layer->recompute, call, layer->user);
}

static inline int t_cuda_bind(const ms_call *call) {
    const t_cuda_layer *layer = (const t_cuda_layer *)call->user;
    return t_cuda_call_on_host(layer->bind, call, layer->user);
}

static inline ms_layer t_cuda_register_layer(ms_model *model, const ms_layer_desc *desc) {
    if (desc == NULL || (t_cuda_is_marked(desc->forward) && t_cuda_is_marked(desc->backward) &&
                         t_cuda_is_marked(desc->recompute) && t_cuda_is_marked(desc->bind))) {
        return ms_register_layer(model, desc);
    }
    ms_layer_desc with = *desc;
    t_cuda_layer *layer = t_cuda_new_layer();
    layer->forward = desc->forward;
    layer->backward = desc->backward;
    layer->recompute = desc->recompute;
    layer->bind = desc->bind;
    layer->user = desc->user;
    with.forward = desc->forward != NULL ? t_cuda_forward : NULL;
    with.backward = desc->backward != NULL ? t_cuda_backward : NULL;
    with.recompute = desc->recompute != NULL ? t_cuda_recompute : NULL;
    with.bind = desc->bind != NULL ? t_cuda_bind : NULL;
    with.user = layer;
    return ms_register_layer(model, &with);
}

static inline int t_cuda_update(const ms_update_args *args) {
    const t_cuda_layer *layer = (const t_cuda_layer *)args->user;
    ms_update_args inner = *args;
    inner.user = layer->user;
    if (args->stream == NULL) {
        return layer->update(&inner);
    }
    int error = t_cuda_open(args->stream);
    ++t_cuda_depth;
    error = error != 0 ? error : layer->update(&inner);
    --t_cuda_depth;
    t_cuda_shut();
    return error;
}

/* The desc with an update of the trainer's own, which finds device memory open. */
static inline ms_optimizer_desc t_cuda_optimizer(const ms_optimizer_desc *desc) {
    ms_optimizer_desc with = *desc;
    if (desc->update != NULL) {
        t_cuda_layer *layer = t_cuda_new_layer();
        layer->update = desc->update;
        layer->user = desc->user;
        with.update = t_cuda_update;
        with.user = layer;
    }
    return with;
}

static inline void t_cuda_set_optimizer(ms_model *model, const ms_optimizer_desc *desc) {
    ms_optimizer_desc with;
    if (desc != NULL) {
        with = t_cuda_optimizer(desc);
    }
    ms_set_optimizer(model, desc != NULL ? &with : NULL);
}

static inline ms_param_group t_cuda_optimizer_group(ms_model *model,
                                                    const ms_optimizer_desc *desc) {
    ms_optimizer_desc with;
    if (desc != NULL) {
        with = t_cuda_optimizer(desc);
    }
    return ms_optimizer_group(model, desc != NULL ? &with : NULL);
}

// ------------------------------------------------------------------------------------------------
// what tests lend

/* Memory that host and device can touch. In the emulation any host memory is, as on systems with
   cudaDevAttrPageableMemoryAccess. */
#ifdef CUDART_EMULATION
static inline void *t_cuda_lend(size_t bytes) {
    return malloc(bytes);
}

static inline void t_cuda_take_back(void *memory) {
    free(memory);
}

static inline ms_result t_cuda_borrow(ms_model *model, ms_tensor tensor, void *memory) {
    return ms_borrow(model, tensor, memory);
}
#else
static inline void *t_cuda_lend(size_t bytes) {
    void *memory = NULL;
    const unsigned flags = cudaHostAllocMapped | cudaHostAllocPortable;
    return cudaHostAlloc(&memory, bytes, flags) == cudaSuccess ? memory : NULL;
}

static inline void t_cuda_take_back(void *memory) {
    cudaDeviceSynchronize();
    cudaFreeHost(memory);
}

#ifdef __cplusplus
extern "C"
#endif
    void
    _skip(const char *const file, const int line); // cmocka's

/* Tests that lend what the device cannot touch are skipped. */
static inline ms_result t_cuda_borrow(ms_model *model, ms_tensor tensor, void *memory) {
    struct cudaPointerAttributes of;
    if (memory != NULL &&
        (cudaPointerGetAttributes(&of, memory) != cudaSuccess || of.type != cudaMemoryTypeHost)) {
        cudaGetLastError();
        printf("lends host memory: not on a GPU\n");
        _skip(__FILE__, __LINE__);
    }
    return ms_borrow(model, tensor, memory);
}
#endif

#define ms_create(config, model)              t_cuda_create(config, model)
#define ms_arena_create(backend, host, arena) t_cuda_arena_create(backend, host, arena)
#define ms_register_layer(model, desc)        t_cuda_register_layer(model, desc)
#define ms_set_optimizer(model, desc)         t_cuda_set_optimizer(model, desc)
#define ms_optimizer_group(model, desc)       t_cuda_optimizer_group(model, desc)
#define ms_borrow(model, tensor, memory)      t_cuda_borrow(model, tensor, memory)
#define ms_gemm(call, alpha, a, b, beta, c)   t_cuda_gemm(call, alpha, a, b, beta, c)
#define ms_cast(call, to, from)               t_cuda_cast(call, to, from)

#endif // ON_CUDA_H
