/*  memscale.h - v0.5.0 - train a bigger model on the device memory you already have. MIT licence.

    One header that any C or C++ trainer drops in. The trainer registers its tensors and its layers
    (a forward and a backward callback each) and names a byte budget. memscale.h then owns the
    memory: it chooses what to recompute, plans the address of every value in one arena that fits
    the budget, and runs the training step by calling the trainer back.

        #define MEMSCALE_IMPLEMENTATION            // in exactly one source file
        #include "memscale.h"

        ms_config config = {0};                    // all zero: sensible defaults ({} in C++)
        config.memory_budget_bytes = 300u << 20;   // the arena is never larger than this
        config.log = my_log;                       // your function: errors, warnings, decisions
        ms_model *m;
        ms_create(&config, &m);
        //  ... ms_input, ms_param, ms_activation, ms_register_layer, ms_set_loss ...
        ms_wrap(m);                                // plan, lower, lay out, allocate: once
        ms_write(m, weights, initial_values);
        for (;;) {
            ms_write(m, tokens, batch);
            ms_step(m, &loss);                     // forward, backward, update
        }
        ms_destroy(m);

    Link with -lm. Without MEMSCALE_IMPLEMENTATION the header only declares. For an NVIDIA GPU, set
    config.backend = ms_backend_cuda(0), add one source file for nvcc (CUDA 12 or newer), and link
    with -lcublas -lcudart:

        #define MEMSCALE_CUDA_IMPLEMENTATION
        #include "memscale.h"

  MACROS (define before the include)
    MEMSCALE_IMPLEMENTATION   emit the function bodies; works at a second include too
    MEMSCALE_CUDA_IMPLEMENTATION
                              emit the CUDA backend, in a file for nvcc; alone or with the above
    MEMSCALE_STATIC           make every function except ms_backend_cuda static: one private copy
                              per translation unit
    MEMSCALE_CBLAS            ms_gemm calls cblas_sgemm of <cblas.h>; default: a built-in kernel
    MEMSCALE_API              linkage of the public functions; default: extern, C linkage
    MEMSCALE_ASSERT(x)        checks of the library's own invariants, such as assert(x); default:
                              none, and the object does not import abort
    MEMSCALE_NO_STDIO         neither files nor the printf family: texts are formatted by functions
                              of the library's own, to the same bytes, and /proc is not read, so
                              that free memory on Linux does not count caches as free, nor obey
                              cgroups

  WHAT IT DOES NOT DO
    It is neither a tensor library nor an autograd: the trainer does the arithmetic of its layers.
    It does not allocate during a step, print, abort, read the environment or keep global state.
    It does not change a number: a checkpointed plan gives the same bits as the plain plan.
    In this version it plans recomputation and early updates, and no other technique.

  STEP BY STEP
    1. ms_create             a model from a config; zero fields mean defaults
    2. ms_input ... ms_saved name every tensor, with its dtype and shape
    3. ms_register_layer     in the order of execution: a value's producer before its readers
    4. ms_set_loss           which tensor to minimise; ms_set_optimizer: how
    5. ms_wrap               everything is decided and allocated here
    6. ms_write              initial params once, then one batch per step
    7. ms_step               or ms_forward, ms_backward, ms_update; ms_eval for forward alone
    8. ms_detach             back to the plain plan; ms_destroy frees everything

    Errors of these calls stick: ms_wrap returns the first one, so that a trainer need not check
    each call. ms_last_error has its text, with the numbers and the cure. So it is with ms_create:
    where it fails, it gives a model that carries the error into every call.

  CHAPTERS
    MEMORY MODEL. Everything that a step touches lies in one arena, except memory that the trainer
    lends (ms_borrow), tensors that stay on the host (ms_set_on_host), and the transient values of
    models that share an arena (ms_arena_create). Params, buffers, inputs and optimizer state are
    resident: each keeps one address for the whole plan. All other values are transient: each has an
    address only during its live range, which for an activation goes from its layer to its last
    reader, for a gradient from its first contribution to its last use. Forward and backward see the
    same values, but not always at the same address. So a callback takes its pointers from the
    ms_call that it is given, every time, and keeps none. Where operators read pointers from structs
    of the trainer, the bind callback sets them.

    CONTRACT. A layer declares what its callbacks do; anything else they must not do. It declares
    which values backward reads; which gradients backward can only add to or only overwrite; what
    the layer changes (state), destroys (clobbers) or computes in place. The library does the rest:
    it clears gradients, adds up contributions, copies what others still need, and restores state
    after a recomputation. Where nobody else needs the original there is no copy: the result aliases
    it. ms_config.debug checks all of this during training; start with it on a new trainer.

    PLANS. The plain plan keeps what backward reads, and updates all params after backward. Where
    its arena exceeds the budget, params are updated inside backward, which frees their gradients
    sooner; then activations are dropped in forward and recomputed in backward: once, or, for small
    budgets, in several passes, where deeper passes start from what earlier ones have recomputed.
    The planner drops what keeps the predicted time of a step lowest, and scores every choice by
    building the real program. ms_config.mode and the switches say what it may use; ms_print_plan
    and ms_visit_decisions say what it did use, by which rule, and why not more;
    ms_visit_lifetimes says which values need the memory, and when.

    PROFILES. The time of a layer comes from the first of these sources that has it: what was set by
    ms_set_layer_time; what was measured (ms_config.empirical_profiling) or loaded
    (ms_profile_load); a roofline over the layer's flops and bytes and the speeds of the device.
    These speeds come from ms_set_hardware, else from the profile, else from the backend, else from
    the kind of the device. A plan depends on measurements only if the trainer asks for them. The
    same graph, hardware, config and profile give the same plan, byte for byte; compare
    ms_memory_report.plan_hash. A dry run with ms_set_hardware plans for a device that is not there.

    ACCUMULATION, CLIPPING. Both need all gradients at once, so nothing is updated inside backward.
    With accumulation, the gradients are resident.

    SIZES. Dims along axes (ms_add_axis, ms_along) can change between steps. The arena is allocated
    for the plan of the largest sizes; plans for other sizes fit into it, and are kept. A callback
    reads the sizes from its views; one that it keeps in user goes stale.

    NUMERICS. A recomputation runs the same callback on the same inputs with the same seed, so it
    gives the same bits wherever the callback is deterministic. Gradients are summed in one fixed
    order: first those that loss layers wrote in forward, then those of the layers, last to first.

    COMPILER FLAGS. -Ofast and -ffast-math are allowed: what is finite is decided by bits, so a loss
    or a norm that is not finite still ends the step with MS_RESULT_NONFINITE, and subnormal numbers
    may be flushed to zero. Within one build, the bits of a wrapped step are those of a plain one.
    Builds may differ from each other: -Ofast regroups sums, takes reciprocals, and fuses or
    approximates as it likes. Three things can differ within one build as well. A loop that the
    compiler duplicates for operands that overlap may round otherwise in place than not, and a sum
    otherwise at another alignment; the arena aligns every tensor to 64 bytes. Debug mode reports a
    layer for which that matters: remove its in_place. A function that is inlined where the trainer
    calls it, and where a callback does, may round otherwise in each: keep it in a file of its own,
    or do not let it be inlined. And where a callback only compares what it must not read with 0,
    debug mode may miss it, since NaN, with which it poisons memory, then compares as the compiler
    likes.

    STREAMS. On a CUDA device, all work of a step is enqueued on one stream, the model's own or
    ms_config.stream; two more streams, ordered by events, carry the copies to and from the host.
    Callbacks enqueue on ms_call.stream and wait for nothing; the model's device must be the current
    one, as for any launch. No step waits for the whole device; ms_wrap, ms_detach and ms_destroy
    do. ms_step waits for its loss, while backward still runs, and without a loss pointer for next
    to nothing (see there). The device itself ensures that a step whose loss is not finite updates
    nothing, nor does any step after it. ms_write stages inputs in pinned memory, and waits until
    the previous write of the same input has left that. With ms_config.cuda_graph, the second step
    of each plan is recorded and replayed from then on. Callbacks are then no longer called:
    everything in their ms_call stays as it was, except *step_seed. The learning rate may change.
    The recording is made anew after ms_borrow, ms_set_loss_factor, ms_write to a tensor on the
    host, or growth of a shared arena.

    ERRORS. Every fallible function returns an ms_result. A failing step leaves params and optimizer
    state as they were after the last completed update; buffers that it has changed as state stay
    changed. If the failing step had begun to update, the model is marked failed
    (MS_RESULT_FAILED): write params and optimizer state from your own copy, then call ms_wrap,
    which trusts that you did. The error of a function that returns no result sticks: ms_last_error
    has it, and ms_wrap returns the first such error, every time before the model is wrapped, and
    once afterwards, since the present plan is as good as before. The handle 0 of a failed
    registration may be passed on.

    ALLOCATOR. All host memory comes from ms_config.allocator, device memory and pinned memory from
    ms_config.backend. A step allocates nothing, and after ms_wrap no device memory is allocated,
    except what CUDA itself takes when a kernel is first launched, and for a recording. Host memory
    is allocated after ms_wrap in three cases: ms_reshape makes a plan for sizes that are new to it;
    ms_smallest_budget makes one and frees it; the C library has a file buffer while a backend reads
    /proc/cpuinfo, /proc/meminfo, /proc/self/cgroup, /proc/self/mountinfo, and memory.* of the
    cgroups of the process. ms_hardware_report, ms_verify, ms_find_nonfinite, ms_visit_decisions and
    ms_print_plan (and _full) take memory and give it back. With empirical_profiling, the step that
    plans again allocates as ms_wrap does.

    THREADS. One model is used by one thread at a time; separate models are independent. Callbacks
    run on the thread that called ms_step. Of the functions that take the model, a callback may call
    only ms_gemm, ms_cast, ms_read (not while a step is recorded), ms_data, ms_report and those
    about tensors. Other callbacks (of the functions that visit or print, of ms_config.log and of a
    policy) may call everything except what changes the plan or destroys the model, which is an
    error (ORDER): ms_wrap, ms_detach, ms_reshape, ms_verify, ms_find_nonfinite, ms_smallest_budget,
    registration, the steps, and ms_eval. Compiled with OpenMP, the update and the built-in ms_gemm
    use its threads.

    LIMITS. A layer has up to 32 inputs, outputs, saved tensors, params and state buffers each. Rank
    6; 8 axes; fewer than 2^28 tensors; 2^58 bytes. A handle belongs to one model. The ids of a
    model begin at a number drawn from its address, and a tensor has six of them, so each of two
    models with n tensors refuses the other's handles except with a probability of 3 n / 2^30 (one
    in 350,000 for a thousand tensors). The library's own arithmetic (updates, sums, ms_gemm) is
    float32. An update on a GPU gives the bits of one on a CPU whose compiler may use fused
    multiply-add; products and sums may differ. Debug mode does not see what a callback does outside
    the model's memory, unless its results show it.

    HISTORY. 0.1.0 (2026): registration, budgets by recomputation, CPU backend. 0.2.0 (2026): the
    contract with trainers as they are. 0.3.0 (2026): CUDA. 0.4.0 (2026): modes, rules, profiles,
    simulation, explained plans. 0.5.0 (2026): state in backward, up to 32 operands, lifetimes,
    ms_find_nonfinite, -Ofast, near-linear planning of large graphs.

  TABLE OF CONTENTS (search for the tag)
    public          >>version >>results >>tensors >>backend >>descs >>reports >>functions
    shared by both  >>formats >>shared >>arithmetic
    implementation  >>base >>structs >>names >>log >>text >>memory >>backend cpu >>hardware >>graph
                    >>validate >>profile >>rules >>store >>lower >>schedule >>alias >>layout
                    >>simulate >>score >>greedy >>chain >>exhaustive >>solve >>plan >>policy
                    >>optimizer >>call >>debug >>timing >>execute >>state >>verify >>report >>api
                    >>listing >>trace
    CUDA            >>cuda state >>cuda kernels >>cuda blas >>backend cuda
*/
#ifndef MEMSCALE_H
#define MEMSCALE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// ------------------------------------------------------------------------------------------------
// >>version  and linkage

#define MEMSCALE_VERSION_MAJOR 0
#define MEMSCALE_VERSION_MINOR 5
#define MEMSCALE_VERSION_PATCH 0

#ifdef __cplusplus
#define MEMSCALE_EXTERN extern "C"
#else
#define MEMSCALE_EXTERN extern
#endif
#ifdef MEMSCALE_API
#define MEMSCALE_CUDA_API MEMSCALE_API
#else
#define MEMSCALE_CUDA_API MEMSCALE_EXTERN // even if static: nvcc may compile it in another file
#ifndef MEMSCALE_STATIC
#define MEMSCALE_API MEMSCALE_EXTERN
#elif defined(__GNUC__)
#define MEMSCALE_API static __attribute__((unused))
#else
#define MEMSCALE_API static
#endif
#endif

#if defined(__GNUC__)
#define MEMSCALE_NODISCARD           __attribute__((warn_unused_result))
#define MEMSCALE_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define MEMSCALE_NODISCARD
#define MEMSCALE_PRINTF(text, first)
#endif
#define MEMSCALE_API_CHECKED       MEMSCALE_API MEMSCALE_NODISCARD
#define MEMSCALE_FIRST(first, ...) first, // of a row of a table: the constant of an enum

// ------------------------------------------------------------------------------------------------
// >>results  one name, one text each

#define MEMSCALE_RESULTS(X)                                                                        \
    X(MS_RESULT_OK, "no error")                                                                    \
    X(MS_RESULT_INVALID, "an argument is wrong")                                                   \
    X(MS_RESULT_ORDER, "the call does not fit the state of the model")                             \
    X(MS_RESULT_OUT_OF_MEMORY, "the allocator or the backend has no memory left")                  \
    X(MS_RESULT_BUDGET, "no plan fits the memory budget")                                          \
    X(MS_RESULT_CALLBACK, "a callback returned an error")                                          \
    X(MS_RESULT_NONFINITE, "the loss or the norm of the gradients is not a finite number")         \
    X(MS_RESULT_BACKEND, "the backend reported an error")                                          \
    X(MS_RESULT_FAILED, "an update failed halfway; write params and state again, then wrap")       \
    X(MS_RESULT_DRY_RUN, "the model is a dry run and has no memory")                               \
    X(MS_RESULT_UNSUPPORTED, "not supported by this version, backend or dtype")                    \
    X(MS_RESULT_CONTRACT, "debug mode: a layer does not do what it declared")

typedef enum ms_result { MEMSCALE_RESULTS(MEMSCALE_FIRST) MS_RESULT_COUNT } ms_result;

// ------------------------------------------------------------------------------------------------
// >>tensors  handles, dtypes, shapes, views

typedef struct ms_model ms_model; // opaque

/* Typed handles. An id of 0 is no tensor, no layer, no axis: a zeroed desc has empty slots. Other
   ids have no meaning of their own, and differ from model to model and from run to run. */
typedef struct ms_tensor {
    uint32_t id;
} ms_tensor;

typedef struct ms_layer {
    uint32_t id;
} ms_layer;

/* A dimension that ms_reshape can change, such as the batch. */
typedef struct ms_axis {
    uint32_t id;
} ms_axis;

enum {
    MS_LIMIT_RANK = 6,
    MS_LIMIT_IN = 32, // slots of a layer
    MS_LIMIT_OUT = 32,
    MS_LIMIT_SAVED = 32,
    MS_LIMIT_PARAM = 32,
    MS_LIMIT_STATE = 32,
    MS_LIMIT_OPTIMIZER_STATE = 4, // tensors of optimizer state of one param
    MS_LIMIT_AXES = 8
};

#define MS_ALL_SLOTS 0xffffffffu // in a mask: every slot that the layer uses

/* Name, and bytes of one element. Activations may have any dtype; integer ones have no gradient. */
#define MEMSCALE_DTYPES(X)                                                                         \
    X(MS_DTYPE_F32, "f32", 4)                                                                      \
    X(MS_DTYPE_F64, "f64", 8)                                                                      \
    X(MS_DTYPE_F16, "f16", 2)                                                                      \
    X(MS_DTYPE_BF16, "bf16", 2)                                                                    \
    X(MS_DTYPE_I64, "i64", 8)                                                                      \
    X(MS_DTYPE_I32, "i32", 4)                                                                      \
    X(MS_DTYPE_I16, "i16", 2)                                                                      \
    X(MS_DTYPE_I8, "i8", 1)                                                                        \
    X(MS_DTYPE_U8, "u8", 1)

typedef enum ms_dtype { MEMSCALE_DTYPES(MEMSCALE_FIRST) MS_DTYPE_COUNT } ms_dtype;

/* Row-major extents, the last dim contiguous. Rank 0 is a scalar: one element. ms_along sets axes;
   a shape that is copied from another tensor keeps them. */
typedef struct ms_shape {
    int64_t dim[MS_LIMIT_RANK];
    int32_t rank;
    uint8_t axes[MS_LIMIT_RANK]; // bit i: the dim is a multiple of the size of axis i
    uint32_t axes_of;            // the model of these axes, set by ms_along; 0: any
} ms_shape;

/* A tensor as a callback sees it. data is NULL if the layer has no such operand, if nobody wants
   that gradient or output, or if the layer did not declare that it reads the value (in debug mode
   such a value is poison, and asking whether it is there counts as reading it); shape and dtype are
   valid even then, unless the slot is empty. beta is for gradients: data = beta * data +
   contribution. It is 1 (accumulate) or 0: write every element, and do not multiply, since data is
   not initialized and 0 times NaN is NaN. If one tensor is in several slots, their gradients share
   one memory, to be written slot by slot in rising order; slots in ms_layer_desc.overwrites have
   memory of their own. */
typedef struct ms_view {
    void *data;
    ms_shape shape;
    ms_dtype dtype;
    float beta;
} ms_view;

/* A matrix for ms_gemm: rows by cols as stored, with row starts `stride` elements apart; or a batch
   of batch_count such matrices, `batch_stride` elements apart. */
typedef struct ms_matrix {
    void *data;
    int64_t rows, cols, stride;
    ms_dtype dtype;
    bool transposed;                   // ms_gemm takes the transpose of what is stored
    int64_t batch_count, batch_stride; // both 0: one matrix
} ms_matrix;

typedef enum ms_phase {
    MS_PHASE_FORWARD,
    MS_PHASE_RECOMPUTE, // forward once more, during backward
    MS_PHASE_BACKWARD,
    MS_PHASE_EVAL, // forward, with no backward to follow
    MS_PHASE_COUNT
} ms_phase;

/* What a callback is given, valid only during the call. Every array has a view for each slot up to
   its MS_LIMIT, in every phase; those of slots that the layer does not use are zero. Several
   threads of a callback may call ms_gemm, as long as it does not fail. */
typedef struct ms_call {
    void *user;      // ms_layer_desc.user
    ms_model *model; // for ms_gemm and ms_cast
    ms_phase phase;
    const ms_view *in, *out, *saved, *param;
    const ms_view *state; // in backward only what backward_state names has data
    /* Zeroed views except in backward; grad_in also in the forward, but not the eval, of a layer
       with grads_in_forward. grad_out has data for an output that contributes to the loss; of any
       other, such as probabilities that only a sampler reads, no gradient is made. */
    const ms_view *grad_out, *grad_in, *grad_param;
    void *workspace; // 64-byte aligned; contents as declared in the ms_workspace of the desc
    uint64_t workspace_bytes;
    uint32_t wanted_out, wanted_saved; // outside backward: masks of those to write, with data
    float loss_factor; // what backward begins with: grads_in_forward layers multiply by it
    /* For random numbers: seed differs by layer, step and micro-batch, and is the same when that
       forward is recomputed. It is layer_seed ^ *step_seed. step_seed points to device memory:
       kernels that read it there draw new numbers in every replay of a recording
       (ms_config.cuda_graph), in which the rest of the call does not change. */
    uint64_t seed, layer_seed;
    const uint64_t *step_seed;
    void *stream;  // cudaStream_t: a callback enqueues on it and does not wait; NULL on a CPU
    uint64_t step; // completed updates before this one
    uint32_t micro, micro_count; // number of this micro-batch, from 0; how many make up a step
    bool last_micro;             // micro is the last of them
} ms_call;

/* 0, or the caller's own error number, which ends the step: MS_RESULT_CALLBACK, with the layer and
   the number in its text. */
typedef int (*ms_layer_fn)(const ms_call *call);

// ------------------------------------------------------------------------------------------------
// >>backend  allocator, log, and the table of what runs on the device

/* Both functions or neither (NULL: malloc and free). release receives the size that was passed to
   alloc. */
typedef struct ms_allocator {
    void *(*alloc)(uint64_t bytes, void *user);
    void (*release)(void *memory, uint64_t bytes, void *user);
    void *user;
} ms_allocator;

typedef enum ms_log_level { MS_LOG_ERROR, MS_LOG_WARNING, MS_LOG_INFO, MS_LOG_DEBUG } ms_log_level;

/* tag: debug, error, graph, plan, policy, rules or timing; text: one line without its line end. */
typedef void (*ms_log_fn)(ms_log_level level, const char *tag, const char *text, void *user);

/* Receives the next piece of a text: length bytes, without a NUL at the end. */
typedef void (*ms_text_fn)(const char *text, size_t length, void *user);

typedef enum ms_device_kind {
    MS_DEVICE_CPU,
    MS_DEVICE_DISCRETE,
    MS_DEVICE_INTEGRATED
} ms_device_kind;

/* A device and its host. A field is 0 if the platform does not report it. */
typedef struct ms_hardware {
    char name[64];
    ms_device_kind kind;
    uint32_t processor_count; // multiprocessors of a GPU
    uint64_t total_bytes;
    uint64_t free_bytes; // host_free_bytes, on a CPU and on a GPU that shares the host's memory
    /* Linux: MemTotal and MemAvailable, or less where cgroups of the process allow less; without
       /proc: sysinfo. Windows: GlobalMemoryStatusEx. macOS: hw.memsize, free and inactive pages. */
    uint64_t host_total_bytes, host_free_bytes;
    /* CUDA devices only. The bools say what the hardware supports, by its compute capability; the
       compiler emulates more than that. */
    uint32_t compute_major, compute_minor;
    bool bf16;                                // from 8.0
    bool fp16_tensor;                         // FP16 tensor cores: from 7.0
    bool tf32;                                // from 8.0
    uint32_t driver_version, runtime_version; // 1000 * major + 10 * minor, as in CUDA
    /* Speeds, for predictions: 1e9 bytes per second; 1e12 flops per second in matrix products. */
    double memory_gb_per_s;                      // device memory, reads and writes together
    double to_device_gb_per_s, to_host_gb_per_s; // copies from and to pinned host memory
    double f32_tflops, tf32_tflops, f16_tflops;  // f16: BF16 too
    double launch_us;                            // the shortest time that a callback takes
    bool is_measured;                            // the speeds were measured by ms_hardware_report
} ms_hardware;

typedef enum ms_optimizer_kind {
    MS_OPTIMIZER_ADAMW,
    MS_OPTIMIZER_SGD,
    MS_OPTIMIZER_CUSTOM, // the trainer's own callback
    MS_OPTIMIZER_NONE    // no update: ms_read can read the gradients until the next step
} ms_optimizer_kind;

/* The part of a step's state that lies in device memory: the backend's verdict on the step, and
   what the host uploads for its kernels before it. */
typedef struct ms_step_state {
    double loss;          // sum of the elements of the loss tensor, times the loss factor
    double norm;          // of the gradients, if they are clipped
    uint64_t halted_step; // the step that was halted
    uint32_t halted;      // an ms_halt; if not 0, updates change nothing
    uint32_t reserved;
    uint64_t step, seed; // uploaded: number of the step; *ms_call.step_seed
} ms_step_state;

typedef enum ms_halt {
    MS_HALT_NONE,
    MS_HALT_LOSS, // the loss is not a finite number
    MS_HALT_NORM  // the norm of the gradients is not
} ms_halt;

/* The factors of an update that are the same for all elements, rounded once, bias corrections
   included. AdamW: m = beta1 * m + rest1 * g; v = beta2 * v + rest2 * g * g;
   p = decay * p + rate * m / (scale2 * sqrt(v) + epsilon).
   SGD: v = beta1 * v + g; p = p + rate * (v + decay * p). */
typedef struct ms_update_factors {
    float rate, decay, beta1, beta2, rest1, rest2, scale2, epsilon;
} ms_update_factors;

/* One update of one param, for the backend's kernel or the trainer's own callback. All arrays have
   count floats in device memory. AdamW: state[0] and state[1] are the first and second moments;
   SGD: state[0] is the momentum. The update multiplies the gradient by *gradient_scale (device
   memory; NULL: 1). A custom update does so too, enqueues its work on stream and may overwrite the
   gradient (which nobody reads again, unless it is borrowed); no halted step calls it. */
typedef struct ms_update_args {
    void *user; // ms_optimizer_desc.user
    ms_tensor param;
    ms_optimizer_kind kind;
    uint64_t count;
    float *value, *gradient;
    const float *gradient_scale;
    float *state[MS_LIMIT_OPTIMIZER_STATE];
    float learning_rate, weight_decay;
    float beta1, beta2, epsilon; // AdamW
    float momentum;              // SGD
    uint64_t t;                  // number of this update, from 1; again from 1 if the state is new
    void *stream;                // as ms_call.stream
    /* For the backend's kernel; in device memory. */
    const ms_update_factors *factors;
    const ms_step_state *state_of_step; // if it is halted, change nothing
} ms_update_args;

/* 0, or the caller's own error number, which ends the step with MS_RESULT_CALLBACK. */
typedef int (*ms_update_fn)(const ms_update_args *args);

/* Streams run concurrently; the work on each runs in the order in which it was enqueued. */
typedef enum ms_stream_kind {
    MS_STREAM_COMPUTE, // callbacks, kernels, copies from device to device
    MS_STREAM_TO_DEVICE,
    MS_STREAM_TO_HOST,
    MS_STREAM_COUNT
} ms_stream_kind;

/* What a model wants of the state that a backend opens for it. */
typedef struct ms_open_args {
    const ms_allocator *host; // for host memory that the backend needs; outlives the state
    void *stream;             // ms_config.stream
    uint32_t event_count;     // events that the state needs until prepare asks for more
    bool tf32;                // ms_config.tf32
} ms_open_args;

/* What ms_wrap gives to a backend for its own use, until the next ms_wrap. */
typedef struct ms_prepare_args {
    uint32_t event_count; // the numbers of events are below this
    void *workspace;      // ms_backend.workspace_bytes of device memory, 256-byte aligned
    uint64_t workspace_bytes;
} ms_prepare_args;

/* Everything that touches device memory. Functions return 0 or an error number of the backend's
   own. Device pointers from the library are aligned to at least 64 bytes. Functions that need no
   model receive user; the others receive the state that open has made, or user if there is no open.
   Several states can be open: ms_hardware_report opens its own. Without is_asynchronous, each call
   is done, or ordered before what follows, when it returns. Optional functions may be NULL. */
typedef struct ms_backend {
    uint32_t size; // sizeof(ms_backend); 0: the CPU backend
    const char *name;
    void *user;
    bool device_is_host;  // host code may access device memory, and the device host memory
    bool is_asynchronous; // functions enqueue and return; synchronize to wait_on_host are required
    uint64_t workspace_bytes; // device memory for the backend in each arena; part of the budget

    /* The result is aligned to 64 bytes, or to 256 if workspace_bytes is not 0. */
    int (*memory_alloc)(void *user, const ms_allocator *host, uint64_t bytes, void **device);
    void (*memory_release)(void *user, const ms_allocator *host, void *device, uint64_t bytes);
    /* Pinned memory, for asynchronous copies. Optional: memory of the allocator is used instead. */
    int (*host_alloc)(void *user, const ms_allocator *host, uint64_t bytes, void **memory);
    void (*host_release)(void *user, const ms_allocator *host, void *memory, uint64_t bytes);
    void (*hardware)(void *user, ms_hardware *hardware); // comes zeroed; speeds may stay 0
    const char *(*error_text)(void *user, int error);    // optional; NULL for an unknown number

    int (*open)(void *user, const ms_open_args *args, void **state); // optional, with close
    void (*close)(void *state);                                      // called when all work is done
    int (*prepare)(void *state, const ms_prepare_args *args);        // optional; all or nothing

    /* On the streams MS_STREAM_TO_DEVICE and MS_STREAM_TO_HOST. */
    int (*copy_in)(void *state, void *device, const void *host, uint64_t bytes);
    int (*copy_out)(void *state, void *host, const void *device, uint64_t bytes);
    /* All from here to gemm are on MS_STREAM_COMPUTE. upload copies a few KB from the host, which
       may change them as soon as it returns. Optional: copy_in is used and waited for instead. */
    int (*upload)(void *state, void *device, const void *host, uint64_t bytes);
    int (*copy)(void *state, void *device, const void *source, uint64_t bytes);
    int (*fill_bytes)(void *state, void *device, uint8_t value, uint64_t bytes);
    int (*fill_f32)(void *state, void *device, float value, uint64_t count);
    int (*add_f32)(void *state, void *device, const void *source, uint64_t count); // +=
    int (*cast)(void *state, void *target, ms_dtype to, const void *source, ms_dtype from,
                uint64_t count); // between F32, F16 and BF16, to the nearest, ties to even
    /* Unless step->halted is set: step->loss = factor * sum of the losses; if that is not finite,
       halted = MS_HALT_LOSS and halted_step = step->step. */
    int (*loss)(void *state, const void *losses, uint64_t count, double factor,
                ms_step_state *step);
    /* Clipping: *sum += sum of squares; then *scale = min(1, limit / sqrt(*sum)), step->norm =
       sqrt(*sum), and halted = MS_HALT_NORM as above if that is not finite. */
    int (*add_squares_f32)(void *state, const void *device, uint64_t count, double *sum);
    int (*clip_scale)(void *state, const double *sum, float limit, float *scale,
                      ms_step_state *step);
    int (*update)(void *state, const ms_update_args *args);
    int (*gemm)(void *state, float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                const ms_matrix *c); // already checked; batch counts are at least 1

    /* For asynchronous backends. wait: what is enqueued on the stream from now on runs after the
       last record of the event; if it was never recorded, there is nothing to wait for. */
    int (*synchronize)(void *state); // the host waits for all streams
    int (*record)(void *state, ms_stream_kind stream, uint32_t event);
    int (*wait)(void *state, ms_stream_kind stream, uint32_t event);
    int (*wait_on_host)(void *state, uint32_t event);
    void *(*stream)(void *state); // optional: the handle of MS_STREAM_COMPUTE, for ms_call.stream

    /* Optional, all or none: what is enqueued on MS_STREAM_COMPUTE between begin and end is
       recorded and does not run. check returns an error if something has invalidated the recording.
       end discards it if its second argument is NULL. */
    int (*recording_begin)(void *state);
    int (*recording_check)(void *state);
    int (*recording_end)(void *state, void **recording);
    int (*recording_launch)(void *state, void *recording);
    void (*recording_release)(void *state, void *recording);
} ms_backend;

// ------------------------------------------------------------------------------------------------
// >>descs  zero-initialise, then set what matters

typedef enum ms_switch { MS_SWITCH_DEFAULT, MS_SWITCH_ON, MS_SWITCH_OFF } ms_switch;

/* What a plan can do to a layer or a tensor; see ms_set_layer_technique. This version has the first
   two. Modes, switches and explained plans know the others, but no plan uses them, and ms_wrap
   refuses (UNSUPPORTED) to switch one ON. */
typedef enum ms_technique {
    MS_TECHNIQUE_CHECKPOINTING, // outputs and saved tensors: dropped and recomputed
    MS_TECHNIQUE_EARLY_UPDATE,  // params: updated inside backward
    MS_TECHNIQUE_OFFLOADING,    // copied to host memory and back
    MS_TECHNIQUE_TILING,        // computed in groups of rows
    MS_TECHNIQUE_MIXED_PRECISION,
    MS_TECHNIQUE_OPTIMIZER_8BIT,
    MS_TECHNIQUE_COUNT
} ms_technique;

/* Which techniques a plan may use if their switch is DEFAULT. CONSERVATIVE: checkpointing and early
   updates; BALANCED: also offloading; AGGRESSIVE: all. */
#define MEMSCALE_MODES(X)                                                                          \
    X(MS_MODE_BALANCED, "BALANCED")                                                                \
    X(MS_MODE_CONSERVATIVE, "CONSERVATIVE")                                                        \
    X(MS_MODE_AGGRESSIVE, "AGGRESSIVE")

typedef enum ms_mode { MEMSCALE_MODES(MEMSCALE_FIRST) MS_MODE_COUNT } ms_mode;

/* What a policy chooses from: a mode, and the plan for the budget with all that it allows. */
typedef struct ms_strategy {
    ms_mode mode;
    uint32_t techniques;  // mask of 1 << ms_technique: those that the plan may use
    uint64_t arena_bytes; // of the plan for the budget; if none fits, of the smallest plan
    double step_us;       // predicted time of a step
    bool fits;            // the plan fits the budget
} ms_strategy;

typedef struct ms_policy_args {
    void *user;                  // ms_config.policy_user
    const ms_hardware *hardware; // the device to plan for
    uint64_t budget_bytes, plain_bytes;
    const ms_strategy *strategies;
    uint32_t strategy_count;
} ms_policy_args;

/* Returns the index of the strategy to use; an index out of range keeps ms_config.mode. */
typedef uint32_t (*ms_policy_fn)(const ms_policy_args *args);

/* Memory that several models use in turn; see ms_arena_create. */
typedef struct ms_arena ms_arena;

typedef struct ms_config {
    ms_backend backend;     // ms_backend_cpu(), ms_backend_cuda(), or your own; zero: the CPU
    ms_allocator allocator; // zero: malloc and free
    ms_log_fn log;          // NULL: silent
    void *log_user;
    uint64_t memory_budget_bytes; // of the arena, at most; 0: target_utilization of free memory
    double target_utilization;    // 0 < x <= 1; 0: 0.85
    ms_mode mode;                 // 0: BALANCED
    /* DEFAULT: as the mode says; ON: the plan uses it if the budget requires it; OFF: never, unless
       it is forced for a layer or tensor. */
    ms_switch checkpointing, offloading, tiling, mixed_precision, optimizer_8bit;
    /* Update a param inside backward, as soon as its gradient is complete, so that the gradient can
       be freed. DEFAULT: if the budget requires it, and no sooner than the arena gains from it; ON:
       always, at once; OFF: after backward, unless it is forced. Cannot be ON with clipping,
       accumulation or MS_OPTIMIZER_NONE. */
    ms_switch early_update;
    bool force_optimize; // plan for the smallest arena that the switches allow, not for the budget
    /* ms_wrap first plans for each mode, and the policy picks the mode to use in place of
       ms_config.mode. policy NULL: the built-in one, which picks the fastest plan that fits. */
    bool auto_policy;
    ms_policy_fn policy;
    void *policy_user;
    /* Where times come from; see PROFILES. static_profiling, DEFAULT or ON: what was not measured
       is predicted from the flops and bytes of a layer; OFF: ms_wrap refuses a layer without a
       known time (ms_set_layer_time, ms_profile_load). empirical_profiling, ON: the first step
       after ms_wrap, which is often slower than usual, is not timed; the next warmup_steps steps
       are timed, instruction by instruction. The step after these begins by planning again with the
       medians, as ms_wrap would, but preferably in the existing arena; if that fails, the old plan
       stays and the log says so. The second step of the new plan is timed once more, for
       ms_visit_events and ms_print_trace. Failing steps are not counted, the micro-batches of a
       step form one sample, and timing waits for the device around each instruction. Has no effect
       with debug. */
    ms_switch static_profiling, empirical_profiling;
    uint32_t warmup_steps; // 0: 2; 1000 at most
    /* Plan and report, but allocate no arena; steps return MS_RESULT_DRY_RUN. Layers need no
       callbacks: a framework that runs its own gets the plan from ms_visit_events. A layer without
       any counts as one that has a backward, unless no_backward is set. */
    bool dry_run;
    /* Check that layers do what they declared: each callback runs several times, on copies of its
       operands at addresses that change, with poison in all other memory, and in each of the ways
       that the desc allows; it must give the same bits each time. The error, MS_RESULT_CONTRACT,
       names the layer, the operand and the cure, and before it runs, each layer is logged (tag
       debug, MS_LOG_DEBUG). What ms_read and ms_data give a callback beyond its operands is poison
       too, also where the trainer lends the memory. Slow: copies the whole arena at every call.
       Takes memory beside the arena: on the device two to three times what the largest layer uses,
       on the host four times that layer, a copy of the arena, of tensors on the host and of what
       the trainer lends, and one of all activations. What it cannot see is listed in
       docs/porting.md. */
    bool debug;
    uint64_t seed;               // ms_call.seed is derived from it
    uint32_t accumulation_steps; // micro-batches per step; 0: 1
    ms_arena *arena;             // shared with other models; NULL: the model's own
    /* The trainer's cudaStream_t for all work, as long as the model lives; cudaStreamLegacy for the
       default stream. NULL: a stream of the model's own, not synchronized with the default one. */
    void *stream;
    bool tf32; // ms_gemm may round F32 inputs to TF32, where that is faster
    /* From the third step on, ms_step replays a recording (a CUDA graph) of the second; see
       STREAMS. For callbacks that only enqueue kernels, with the same arguments in every step.
       ms_step then gets its loss at the end of the step. Refused with debug, MS_OPTIMIZER_CUSTOM,
       cudaStreamLegacy, a backend that cannot record, or a step that copies state on the host. */
    bool cuda_graph;
} ms_config;

/* Masks of slots: bit i is slot i, MS_ALL_SLOTS all. A bit past the last used slot is an error. */
typedef struct ms_reads {
    uint32_t in, out, saved, param;
    bool nothing; // reads none of these; if all fields are zero, it may read everything
} ms_reads;

typedef struct ms_slot_masks {
    uint32_t in, out, saved, grad_out;
} ms_slot_masks;

typedef struct ms_edges {
    uint32_t in, param;
} ms_edges;

/* FINITE is for kernels that multiply what they find by a beta of 0. Only ANY costs no time. */
typedef enum ms_contents { MS_CONTENTS_ANY, MS_CONTENTS_FINITE, MS_CONTENTS_ZERO } ms_contents;

/* Scratch memory of one call: bytes + row_bytes * (first dim of the first output, or 1). */
typedef struct ms_workspace {
    uint64_t bytes, row_bytes;
    ms_contents contents; // what the callback finds in it
} ms_workspace;

/* A layer: as small as one operator, as large as a transformer block. Slots may be empty anywhere;
   the callback sees them as zeroed views. */
typedef struct ms_layer_desc {
    const char *name; // copied; NULL: "layer <number>"
    ms_layer_fn forward;
    ms_layer_fn backward; // NULL: no gradient passes through
    /* Recomputes the values of wanted_out and wanted_saved, in MS_PHASE_RECOMPUTE: all of these,
       with the bits of forward, and nothing else. NULL: forward does, and computes everything; what
       is still in memory is written again with the same bits, or goes to scratch memory. With
       no_recompute, what recompute reads of the layer's own values is never dropped; otherwise it
       can be, and then forward brings everything back: the plan chooses what is faster. */
    ms_layer_fn recompute;
    ms_layer_fn bind; // called before each of the above, with the same call; NULL: nothing
    void *user;       // must live as long as the model
    ms_tensor in[MS_LIMIT_IN], out[MS_LIMIT_OUT];
    ms_tensor saved[MS_LIMIT_SAVED]; // written in forward, read only by this layer's backward
    ms_tensor param[MS_LIMIT_PARAM];
    /* Buffers that forward changes, such as running statistics; MS_PHASE_EVAL is given them as they
       are. What a layer reads as an input must not be state of a later layer. */
    ms_tensor state[MS_LIMIT_STATE];
    /* Mask of state that backward reads and changes too, such as what truncated backpropagation
       through time carries from one batch to the next. The rest of state has no data there. */
    uint32_t backward_state;
    ms_reads backward_reads; // which values backward reads; zero: all of them
    /* What recompute reads; zero: every input and param. Not an output in must_in_place. */
    ms_reads recompute_reads;
    /* Gradients that backward can only add to (it finds zeros or earlier contributions), or only
       overwrite (F32 only; the library adds the result to earlier ones). All others follow
       ms_view.beta. */
    ms_edges accumulates, overwrites;
    /* in_place[j]: inputs that out[j] may alias. It does so if nobody reads that input afterwards,
       so forward must be right both ways. */
    uint32_t in_place[MS_LIMIT_OUT];
    /* grad_in_place[i]: operands of backward that grad_in[i] may alias, where its beta is 0.
       Backward must be right both ways. */
    ms_slot_masks grad_in_place[MS_LIMIT_IN];
    /* Outputs and gradients that can only be computed in place. The in_place of such an output
       names exactly one input, the grad_in_place of such a gradient exactly one grad_out, each of
       the size and dtype of the result. The callback finds that operand's value in the memory of
       the result, and both views have the same data. The library first copies what others still
       need. Such a gradient overwrites, and need not be in overwrites. */
    uint32_t must_in_place;      // mask of outputs
    uint32_t must_grad_in_place; // mask of inputs
    /* What backward destroys; copied first if others still need it. Values in it, other than
       grad_out, must be in backward_reads too. Params cannot be clobbered, and forward destroys
       nothing except by in_place and state. */
    ms_slot_masks clobbers;
    /* Inputs whose gradients forward writes, in a layer that computes a loss: it runs once, has no
       backward, and nothing differentiates through its outputs: one that a layer with a backward
       reads needs ms_stop_gradient. */
    uint32_t grads_in_forward;
    uint32_t optional_saved; // no data if nobody is going to read them; the others always have it
    bool no_recompute;       // forward can run only once in a step; a recompute callback may run
    /* The layer does not change its state in MS_PHASE_RECOMPUTE, and its outputs do not depend on
       it. Otherwise the library saves the state before a recomputation and restores it after. */
    bool keeps_state;
    bool no_backward;               // no gradient passes through, on purpose: ms_wrap does not warn
    ms_workspace forward_workspace; // also of eval and of a recomputation by forward
    ms_workspace backward_workspace;
    ms_workspace recompute_workspace; // of the callback recompute
    /* Work of one forward, one backward and one call of recompute, for predicted times. 0: for
       forward 2 per param element and vector of the first output, which has elements / last dim of
       these (1 per output element without params), for backward twice that of forward, for
       recompute 1 per output element. */
    double flops, backward_flops, recompute_flops;
} ms_layer_desc;

/* AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
   SGD: v = momentum * v + g; p = p - rate * (v + decay * p). Clipping: Pascanu, Mikolov and Bengio,
   "On the difficulty of training recurrent neural networks", 2013, algorithm 1. */
typedef struct ms_optimizer_desc {
    float learning_rate; // 0: 0.001; ms_set_learning_rate can set 0 itself
    ms_optimizer_kind kind;
    float beta1, beta2, epsilon; // AdamW; 0: 0.9, 0.999, 1e-8
    float momentum;              // SGD; 0: none, and no state
    float weight_decay;          // of all params, unless ms_set_weight_decay says otherwise
    float grad_clip_norm; // scale all gradients down if their global norm exceeds this; 0: never
    ms_update_fn update;  // MS_OPTIMIZER_CUSTOM
    void *user;           // of update
    uint32_t state_count; // MS_OPTIMIZER_CUSTOM: tensors shaped like the param, initially zero
} ms_optimizer_desc;

// ------------------------------------------------------------------------------------------------
// >>reports

/* Who decided what the plan may use: the rules, by default; the user, by a mode, a switch,
   force_optimize or a forced technique; or the policy of ms_config.auto_policy. */
#define MEMSCALE_DECISION_SOURCES(X)                                                               \
    X(MS_DECISION_SOURCE_RULE, "rule")                                                             \
    X(MS_DECISION_SOURCE_USER_CONFIG, "user_config")                                               \
    X(MS_DECISION_SOURCE_POLICY, "policy")

typedef enum ms_decision_source {
    MEMSCALE_DECISION_SOURCES(MEMSCALE_FIRST) MS_DECISION_SOURCE_COUNT
} ms_decision_source;

/* Where the times of layers come from, by which a step is predicted. Roofline: flops, bytes and the
   speeds of the device. Measured: timed steps, a loaded profile or ms_set_layer_time. */
#define MEMSCALE_TIME_SOURCES(X)                                                                   \
    X(MS_TIME_SOURCE_ROOFLINE, "roofline")                                                         \
    X(MS_TIME_SOURCE_MIXED, "partly measured")                                                     \
    X(MS_TIME_SOURCE_MEASURED, "measured")

typedef enum ms_time_source {
    MEMSCALE_TIME_SOURCES(MEMSCALE_FIRST) MS_TIME_SOURCE_COUNT
} ms_time_source;

/* A rule of the planner. docs/decision-engine.md lists them all. */
typedef struct ms_rule {
    const char *id;        // such as "checkpoint"
    const char *condition; // when it applies
    const char *reason;    // why it decides as it does
} ms_rule;

/* What was decided about one technique for one layer. */
typedef struct ms_decision {
    ms_layer layer;
    uint32_t layer_index; // in the order of registration, from 0
    ms_technique technique;
    bool is_applied;
    const ms_rule *rule;  // the rule that decided
    uint64_t saved_bytes; // not held between forward and backward (gradients: after backward)
    double added_us;      // predicted time that it adds to a step
    /* Of the tensors that it is not applied to: the bytes that would not be held, and the time of
       the layer's recomputation. (If that reads what has been dropped, more comes on top.) */
    uint64_t refused_bytes;
    double refused_us;
    /* Bytes of the layer's outputs and saved tensors that are there from forward to backward,
       whatever the technique. */
    uint64_t kept_bytes;
    /* Where successive blocks of layers are alike (in the decisions and bytes of each layer, in its
       name except for the numbers, and roughly in its times), the layers of the first block stand
       for those of all: how many layers this one stands for, itself included, and the last of them.
       0: a layer of an earlier block stands for this one. */
    uint32_t alike_count;
    ms_layer alike_last;
} ms_decision;

/* decision is valid only during the call. */
typedef void (*ms_decision_fn)(const ms_decision *decision, void *user);

/* Times of one layer, in microseconds; 0: not known. */
typedef struct ms_layer_time {
    double forward_us, backward_us, recompute_us;
} ms_layer_time;

/* What ms_verify found for one tensor: a gradient (ms_gradient) or a buffer that layers change. */
typedef struct ms_difference {
    ms_tensor tensor;
    const char *name; // of the param or buffer
    /* Largest |a - b| and largest |a - b| / max(|a|, |b|) over all elements. Two NaN differ by 0,
       as do 0 and -0; both are infinite where elements differ and not both are finite. */
    double absolute, relative;
    uint64_t count;        // elements
    uint64_t differ_count; // elements whose bits are not equal
} ms_difference;

/* difference is valid only during the call. */
typedef void (*ms_difference_fn)(const ms_difference *difference, void *user);

/* Over all tensors of ms_verify. */
typedef struct ms_verify_report {
    uint32_t tensor_count, differ_count; // compared; of these, not equal bit for bit
    double absolute, relative;           // the largest of all ms_difference
    double plain_loss, wrapped_loss;     // by the plain plan, and by the present one
} ms_verify_report;

/* The first operand of a step that is not finite; see ms_find_nonfinite. */
typedef struct ms_nonfinite {
    ms_layer layer;   // handle 0: all are finite
    ms_tensor tensor; // a value, or a gradient (ms_gradient)
    ms_phase phase;
    bool is_read;            // the layer finds it so, as an input, param or buffer
    bool is_nan;             // the first element; otherwise it is infinite
    uint64_t element, count; // the first element, and how many there are
} ms_nonfinite;

/* What memory is used for. GRADIENT means gradients of params. */
#define MEMSCALE_CATEGORIES(X)                                                                     \
    X(MS_CATEGORY_INPUT, "inputs")                                                                 \
    X(MS_CATEGORY_PARAM, "params")                                                                 \
    X(MS_CATEGORY_BUFFER, "buffers")                                                               \
    X(MS_CATEGORY_OPTIMIZER, "optimizer state")                                                    \
    X(MS_CATEGORY_GRADIENT, "gradients")                                                           \
    X(MS_CATEGORY_ACTIVATION, "activations")                                                       \
    X(MS_CATEGORY_ACTIVATION_GRADIENT, "activation gradients")                                     \
    X(MS_CATEGORY_SAVED, "saved")                                                                  \
    X(MS_CATEGORY_WORKSPACE, "workspace")

typedef enum ms_category { MEMSCALE_CATEGORIES(MEMSCALE_FIRST) MS_CATEGORY_COUNT } ms_category;

/* Sizes are those of the arena: every tensor rounded up to 64 bytes. */
typedef struct ms_memory_report {
    uint64_t budget_bytes;
    uint64_t plain_bytes;       // arena of the plain plan at the present sizes of the axes
    uint64_t arena_bytes;       // arena of this plan: lower_bound_bytes + gap_bytes
    uint64_t lower_bound_bytes; // largest sum of live bytes: no layout can be smaller
    uint64_t gap_bytes;         // lost to the layout, or reserved for larger sizes of the axes
    /* Live bytes at the peak instruction, by category; their sum is lower_bound_bytes. */
    uint64_t peak_bytes[MS_CATEGORY_COUNT];
    uint32_t peak_instruction; // of the program with the larger peak, training or eval
    const char *peak_layer;    // name of the layer that runs there; "" if none does
    /* What each technique takes off the peak of live bytes: the mean of what it takes off without
       the other one, and of what it takes off with it (the value of Shapley, "A value for n-person
       games", 1953), since often neither helps much alone. */
    int64_t freed_bytes[MS_TECHNIQUE_COUNT];
    int64_t layout_freed_bytes; // gap of the plain plan - gap_bytes; below 0: it has grown. All of
                                // these sum up to plain_bytes - arena_bytes
    /* Largest sum, during the step, of activations, activation gradients and saved tensors. It need
       not occur at the peak instruction. */
    uint64_t activation_peak_bytes;
    uint64_t param_count; // elements, not tensors
    uint32_t layer_count, tensor_count, instruction_count;
    uint32_t recompute_count; // recompute instructions in a step
    double recompute_share;   // predicted time of the recomputations / that of a plain step
    /* Predicted times of a step of this plan, of a step of the plain plan, and of the waits for
       copies in this one. With accumulation, a step here is one micro-batch and the update. */
    double step_us, plain_step_us, stall_us;
    ms_time_source time_source; // of these three
    double pressure;            // plain_bytes / budget_bytes
    ms_mode mode;               // in force
    ms_decision_source decision_source;
    uint64_t plan_hash;      // equal if the programs are: the same instructions, the same addresses
    bool early_update;       // at least one param is updated inside backward
    uint64_t borrowed_bytes; // memory of the trainer (ms_borrow), not in the arena
    uint64_t host_bytes;     // tensors that stay on the host, not in the arena
    uint64_t staging_bytes;  // host memory through which inputs and verdicts are copied
    uint64_t step_count;     // completed updates
    /* Duration of the last step of this plan that was timed instruction by instruction; 0: none was
       (see ms_config.empirical_profiling). */
    double measured_step_us;
    const char *backend_name; // ms_backend.name
    const char *device_name;  // the device that the plan is for; valid until the next ms_wrap
} ms_memory_report;

typedef enum ms_program { MS_PROGRAM_TRAIN, MS_PROGRAM_EVAL } ms_program;

/* How long a value is in memory in a program. New fields are added at the end; size says which
   there are. */
typedef struct ms_lifetime {
    uint32_t size;    // sizeof(ms_lifetime)
    ms_tensor tensor; // or a handle of ms_gradient or ms_optimizer_state; 0: scratch memory
    const char *name; // of the tensor, or of the layer that the scratch memory is for
    ms_category category;
    uint64_t bytes;                   // in the arena: rounded up to 64
    uint32_t first, last;             // instructions: it is alive from the first through the last
    ms_layer first_layer, last_layer; // that these run; 0: none
    bool is_resident;                 // it lives between steps
    bool is_outside;                  // borrowed or on the host: not in the arena
    bool is_at_peak;                  // in the arena, and alive at the peak of this program
} ms_lifetime;

/* lifetime is valid only during the call. */
typedef void (*ms_lifetime_fn)(const ms_lifetime *lifetime, void *user);

/* With accumulation, a ZERO of a gradient that is kept between micro-batches (is_new is false) is
   for the first micro-batch only, and what follows the last backward is for the last one only. The
   kinds after DROP are not instructions but what else a step does: they complete its times, and a
   framework that runs the plan itself may ignore them. */
#define MEMSCALE_EVENTS(X)                                                                         \
    X(MS_EVENT_FORWARD, "forward") /* the first four: a callback of event.layer */                 \
    X(MS_EVENT_RECOMPUTE, "recompute")                                                             \
    X(MS_EVENT_BACKWARD, "backward")                                                               \
    X(MS_EVENT_EVAL, "eval")                                                                       \
    X(MS_EVENT_SEED, "seed") /* the gradient of the loss is set to ms_call.loss_factor */          \
    X(MS_EVENT_ZERO, "zero")                                                                       \
    X(MS_EVENT_COPY, "copy") /* target, source; nothing to do if both are at one arena offset */   \
    X(MS_EVENT_COPY_IN, "copy in")   /* target, source: from host memory, on its own stream */     \
    X(MS_EVENT_COPY_OUT, "copy out") /* target, source: to host memory, on its own stream */       \
    X(MS_EVENT_WAIT, "wait")         /* for the copy that has these operands */                    \
    X(MS_EVENT_ADD, "add")           /* target, source */                                          \
    X(MS_EVENT_NORM, "norm")         /* gradient, sum of squares (a double) */                     \
    X(MS_EVENT_CLIP, "clip")     /* the sum gives the scale of all gradients, a float after it */  \
    X(MS_EVENT_UPDATE, "update") /* param, gradient, what CLIP left; from slot 3 on the state */   \
    X(MS_EVENT_DROP, "drop")     /* the live ranges of the operands end */                         \
    X(MS_EVENT_INPUT, "copy in") /* an input, before the first instruction */                      \
    X(MS_EVENT_LOSS, "loss")     /* after forward: the sum of the operand's elements */            \
    X(MS_EVENT_VERDICT, "copy out") /* then: that sum, and whether it is finite */

typedef enum ms_event_kind { MEMSCALE_EVENTS(MEMSCALE_FIRST) MS_EVENT_COUNT } ms_event_kind;

typedef enum ms_operand_kind {
    MS_OPERAND_IN,
    MS_OPERAND_OUT,
    MS_OPERAND_SAVED,
    MS_OPERAND_PARAM,
    MS_OPERAND_STATE,
    MS_OPERAND_GRAD_OUT,
    MS_OPERAND_GRAD_IN,
    MS_OPERAND_GRAD_PARAM,
    MS_OPERAND_WORKSPACE,
    MS_OPERAND_TARGET, // of an event without a layer
    MS_OPERAND_SOURCE,
    MS_OPERAND_COUNT
} ms_operand_kind;

/* One operand of an event. */
typedef struct ms_event_operand {
    ms_tensor tensor; // or a handle of ms_gradient or ms_optimizer_state; 0: scratch memory
    ms_operand_kind kind;
    uint32_t slot;
    uint64_t offset, bytes; // in the arena
    bool is_outside;        // borrowed or on the host: not in the arena, offset is 0
    bool is_written;
    bool is_new;     // its live range begins here: no value yet, or that of the operand it aliases
    bool accumulate; // a gradient with beta 1
} ms_event_operand;

/* One instruction of a program, what can be freed after it, or what else a step does. New fields
   are added at the end; size says which there are. */
typedef struct ms_event {
    uint32_t size;  // sizeof(ms_event)
    uint32_t index; // of the instruction, also in its DROP; UINT32_MAX in the kinds after DROP
    ms_event_kind kind;
    ms_layer layer;   // 0: none
    ms_tensor tensor; // of an event without a layer
    const char *name; // of the layer or the tensor
    const ms_event_operand *operands;
    uint32_t operand_count;
    uint64_t live_bytes;                       // while it runs
    uint64_t live_bytes_of[MS_CATEGORY_COUNT]; // the same by category
    /* Times as simulated, from the start of the step, and as measured in the last timed step (both
       0: none was; see ms_config.empirical_profiling). */
    ms_stream_kind stream;
    double start_us, duration_us;
    double measured_start_us, measured_us;
    bool is_restore;      // a COPY that restores state which a recomputation has changed
    uint32_t layer_index; // in the order of registration, from 0; UINT32_MAX: no layer
    bool by_forward; // a RECOMPUTE that runs forward although the layer has a recompute callback
} ms_event;

/* event is valid only during the call. */
typedef void (*ms_event_fn)(const ms_event *event, void *user);

// ------------------------------------------------------------------------------------------------
// >>functions  in the order of a model's life cycle
//
// Where a comment does not say otherwise:
// Threads: one at a time per model; functions without a model may be called from any thread.
// Stream: work on a device may still be running when a function returns, except that a function
// that returns what the device computes (a loss, the data of ms_read) waits for it.

/* Name ("MS_RESULT_BUDGET") and text ("no plan fits the memory budget") of a result. */
MEMSCALE_API const char *ms_result_name(ms_result result);
MEMSCALE_API const char *ms_result_text(ms_result result);

/* Name ("f32") and size in bytes of one element; "?" and 0 out of range. */
MEMSCALE_API const char *ms_dtype_name(ms_dtype dtype);
MEMSCALE_API uint64_t ms_dtype_bytes(ms_dtype dtype);

/* Shapes of rank 1 to 4, and the number of elements of a shape (0 if a dim is below 1 or the
   product overflows). */
MEMSCALE_API ms_shape ms_shape1(int64_t d0);
MEMSCALE_API ms_shape ms_shape2(int64_t d0, int64_t d1);
MEMSCALE_API ms_shape ms_shape3(int64_t d0, int64_t d1, int64_t d2);
MEMSCALE_API ms_shape ms_shape4(int64_t d0, int64_t d1, int64_t d2, int64_t d3);
MEMSCALE_API uint64_t ms_shape_count(const ms_shape *shape);

/* The shape with its dim number `dim` along an axis: the dim must be a multiple of the axis's size,
   and is scaled with it by ms_reshape. A dim may lie along several axes (rows of batch times
   sequence). Registration refuses a param along an axis, and what a wrong dim or axis gives. */
MEMSCALE_API ms_shape ms_along(ms_shape shape, int dim, ms_axis axis);

/* The backend that runs on the host: its arena comes from the model's allocator. */
MEMSCALE_API ms_backend ms_backend_cpu(void);

/* The backend of a CUDA device, by its number; defined where MEMSCALE_CUDA_IMPLEMENTATION is. If
   there is no such device, ms_create fails. Make it the current device of the thread
   (cudaSetDevice) before ms_create and before every step: callbacks launch on it. */
MEMSCALE_CUDA_API ms_backend ms_backend_cuda(int device);

/* Memory for the transient values of several models, of which only one trains at a time: a
   generator and its critic, a policy and its value function. It is as large as the largest of them
   needs. Each model has its own params, optimizer state, buffers and inputs. A step, forward or
   eval of one model, or an ms_wrap or ms_detach that makes the arena larger, ends whatever another
   had begun: ms_backward and ms_update of that one return ORDER, and its outputs cannot be read.
   Budgets and reports count a model's own memory and its share. backend and allocator may be NULL
   (the CPU; malloc). ms_arena_destroy may be called before the models are destroyed: the memory is
   freed after the last of them. ms_arena_bytes is the present size. Threads: one at a time for all
   models that share the arena; they have the same backend. Errors: INVALID, OUT_OF_MEMORY. */
MEMSCALE_API_CHECKED ms_result ms_arena_create(const ms_backend *backend,
                                               const ms_allocator *allocator, ms_arena **arena);
MEMSCALE_API void ms_arena_destroy(ms_arena *arena);
MEMSCALE_API uint64_t ms_arena_bytes(const ms_arena *arena);

/* Makes a model. config is copied; NULL means all defaults. On error *model is a model that only
   carries its error: ms_last_error has the text, every function that returns an ms_result returns
   that of ms_create, the others do nothing, and ms_destroy frees it. Errors: INVALID (a field out
   of range; half an allocator, in place of which this model uses malloc and free; an arena of
   another backend), BACKEND (no such device); OUT_OF_MEMORY. Only where there is no memory, for a
   model with an error either, *model is NULL. */
MEMSCALE_API_CHECKED ms_result ms_create(const ms_config *config, ms_model **model);

/* Frees everything; NULL is allowed. In a callback of the model it frees nothing, and notes an
   error (ORDER). */
MEMSCALE_API void ms_destroy(ms_model *model);

/* Text of the last error of this model, "" if there was none; valid until the next call that fails.
   Functions of a const model leave no text. For NULL: a text for a model without memory. */
MEMSCALE_API const char *ms_last_error(const ms_model *model);

/* What the backend reports of its device now, with speeds that the first call measures, in a dry
   run too. That takes some 50 ms, and memory and streams of its own (72 MiB on a CPU; on a GPU a
   64th of its memory, at most 256 MiB, and 8 MiB of pinned memory). If these are not available, the
   speeds are those that the backend states, and the next call tries again.
   Stream: waits. Errors: INVALID, ORDER (in a callback), BACKEND. */
MEMSCALE_API_CHECKED ms_result ms_hardware_report(ms_model *model, ms_hardware *report);

/* Built-in devices (GeForce RTX 30, 40 and 50, A100, H100, H200, Jetson Orin and others), with the
   speeds that their makers state, to plan for a device that is not there. ms_hardware_find: the one
   whose name ends with `name`, else the one that contains it, in any case and whatever is between
   letters and digits ("rtx3090", "Orin NX 16GB"); NULL if there is none, or more than one.
   ms_hardware_at: by number; NULL after the last. */
MEMSCALE_API const ms_hardware *ms_hardware_find(const char *name);
MEMSCALE_API const ms_hardware *ms_hardware_at(uint32_t number);

/* ms_set_hardware: plan for this device from the next ms_wrap on (copied): a measured report, a
   built-in device, or your own description. A speed of 0 means the one typical of its kind.
   target_utilization applies to its free memory, else to its total memory, else (both 0) to that of
   the model's own device. Graph, config, profile and this device together determine the plan.
   ms_clear_hardware: for the model's own device again, with the speeds of a loaded profile, or else
   those that its backend states or its kind has; what ms_hardware_report measured is not used.
   Errors: INVALID (NULL, as ms_hardware_find returns it; a speed that is negative, not finite or
   absurd; more free memory than there is): ms_wrap refuses until one of the two is called again. */
MEMSCALE_API void ms_set_hardware(ms_model *model, const ms_hardware *hardware);
MEMSCALE_API void ms_clear_hardware(ms_model *model);

/* ms_stream: the stream on which the model computes (cudaStream_t; NULL on the CPU), to enqueue
   other work after that of a step or before that of the next. ms_synchronize: waits for all streams
   of the model, and returns the error of steps without a loss pointer: NONFINITE (nothing has been
   updated since), BACKEND; or ORDER (in a callback). */
MEMSCALE_API void *ms_stream(const ms_model *model);
MEMSCALE_API_CHECKED ms_result ms_synchronize(ms_model *model);

/* Register a tensor. The name is copied and need not be unique. A failure returns the handle 0 and
   sticks. Errors: INVALID (dtype, shape), UNSUPPORTED (a param that is not F32), ORDER (after
   ms_wrap), OUT_OF_MEMORY.
     input       fed with ms_write, keeps its value until it is written again
     param       trained; F32
     buffer      kept between steps, not trained; an input or the state of layers
     activation  an output of exactly one layer
     saved       written by a layer's forward for its own backward */
MEMSCALE_API ms_tensor ms_input(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape);
MEMSCALE_API ms_tensor ms_param(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape);
MEMSCALE_API ms_tensor ms_buffer(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape);
MEMSCALE_API ms_tensor ms_activation(ms_model *model, const char *name, ms_dtype dtype,
                                     ms_shape shape);
MEMSCALE_API ms_tensor ms_saved(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape);

/* An axis for ms_along and ms_reshape, with its present size and its largest; name is copied. A
   failure returns the handle 0 and sticks. Errors: INVALID (a size below 1, largest below size,
   more than MS_LIMIT_AXES axes), ORDER (after ms_wrap), OUT_OF_MEMORY. */
MEMSCALE_API ms_axis ms_add_axis(ms_model *model, const char *name, int64_t size, int64_t largest);

/* ms_set_on_host: callbacks read and write this input or buffer in host memory.
   ms_stop_gradient: nobody wants the gradient of this activation; none flows to or through it.
   Errors: INVALID, ORDER (after ms_wrap); both stick. */
MEMSCALE_API void ms_set_on_host(ms_model *model, ms_tensor tensor);
MEMSCALE_API void ms_stop_gradient(ms_model *model, ms_tensor tensor);

/* Lends the model the trainer's own memory for a value that is kept between steps: an input, a
   param, a buffer, the optimizer state (ms_optimizer_state) or the gradient (ms_gradient) of a
   param. It is device memory, or host memory for a tensor on the host; it is not in the arena, is
   never filled or moved (what was written before is lost; debug mode poisons it too, and puts it
   back), and must be valid as long as the model. The trainer may change the values between steps;
   ms_read and ms_write work on them. Along axes there must be room for their largest sizes. A
   borrowed gradient is not zeroed either: every step adds to what it holds, even a step that fails,
   and its param is not updated early. After ms_wrap, what is borrowed already can be given another
   address, which ends a step between ms_forward and ms_backward; steps that still run use the old
   one. Errors, which stick until the first ms_wrap succeeds: INVALID, ORDER (not borrowed when
   wrapped; in a callback; between ms_backward and ms_update). */
MEMSCALE_API ms_result ms_borrow(ms_model *model, ms_tensor tensor, void *memory);

/* Adds a layer after those registered so far; desc is copied. What it reads must be an input, a
   buffer, or written by an earlier layer. A failure returns the handle 0 and sticks.
   Errors: INVALID (with the names of layer and tensor), ORDER (after ms_wrap), OUT_OF_MEMORY. */
MEMSCALE_API ms_layer ms_register_layer(ms_model *model, const ms_layer_desc *desc);

/* For code that registers on behalf of a trainer: makes ms_wrap fail with INVALID and this text.
   Sticks, unless an earlier error does. */
MEMSCALE_API void ms_refuse(ms_model *model, const char *reason);

/* The tensor of which training minimises the mean of all elements: F32, written by a layer. It is
   always kept for ms_read. Errors: INVALID, ORDER (after ms_wrap); both stick. */
MEMSCALE_API void ms_set_loss(ms_model *model, ms_tensor loss);

/* From the next step on, minimise and report factor * sum of the loss tensor instead of its mean:
   for rows that do not count, 1 / (number of rows that do). 0: the mean again. With cuda_graph,
   each change needs a new recording. Errors: INVALID (not finite); sticks. */
MEMSCALE_API void ms_set_loss_factor(ms_model *model, float factor);

/* Keep this tensor until the next step, so that ms_read can read it: in ms_step and ms_eval, or in
   ms_eval only. A kept tensor is never overwritten in place.
   Errors: INVALID, ORDER (after ms_wrap); both stick. */
MEMSCALE_API void ms_add_output(ms_model *model, ms_tensor tensor);
MEMSCALE_API void ms_add_eval_output(ms_model *model, ms_tensor tensor);

/* How params are updated; if never called, by AdamW with its defaults.
   Errors: INVALID, ORDER (after ms_wrap); both stick. */
MEMSCALE_API void ms_set_optimizer(ms_model *model, const ms_optimizer_desc *desc);

/* Change a rate between steps, at any time.
   Errors: INVALID (a wrong handle, a value that is not finite); sticks. */
MEMSCALE_API void ms_set_learning_rate(ms_model *model, float learning_rate);
MEMSCALE_API void ms_set_weight_decay(ms_model *model, ms_tensor param, float weight_decay);

/* These take effect at the next ms_wrap. A frozen param has no gradient and no optimizer state: its
   state is dropped, and starts from zero if the param is trained again; borrowed state is not
   touched. With force_optimize, the budget does not matter. Budget 0: a share of free memory;
   micro_count 0: 1. Errors: INVALID (of ms_set_frozen: not a param); sticks. */
MEMSCALE_API void ms_set_frozen(ms_model *model, ms_tensor param, bool frozen);
MEMSCALE_API void ms_set_budget(ms_model *model, uint64_t memory_budget_bytes);
MEMSCALE_API void ms_set_accumulation(ms_model *model, uint32_t micro_count);

/* Forces (ON), forbids (OFF) or leaves to the planner (DEFAULT) a technique for one tensor, or for
   those of a layer: its params, for EARLY_UPDATE and OPTIMIZER_8BIT; its outputs and saved tensors,
   for CHECKPOINTING and TILING; all of these, for OFFLOADING and MIXED_PRECISION. Takes effect at
   the next ms_wrap, which fails with the reason if it is impossible (UNSUPPORTED, if this version
   does not have the technique). What is forced holds in every plan except that of ms_detach, even
   if the technique's switch is OFF. Errors: INVALID; sticks. */
MEMSCALE_API void ms_set_layer_technique(ms_model *model, ms_layer layer, ms_technique technique,
                                         ms_switch force);
MEMSCALE_API void ms_set_tensor_technique(ms_model *model, ms_tensor tensor, ms_technique technique,
                                          ms_switch force);

/* Known times of a layer, at the present sizes of the axes. They override those of a profile or of
   timed steps, which override predicted ones. 0: that time is not known; NULL: none is any more. At
   other sizes they are scaled by the elements of the outputs; a recomputation by forward is assumed
   to take as long as forward. Takes effect at the next ms_wrap. Errors: INVALID (no such layer; a
   time that is negative, not finite or above 1e15); sticks. */
MEMSCALE_API void ms_set_layer_time(ms_model *model, ms_layer layer, const ms_layer_time *time);

/* ms_profile_save writes the times in force as text, with a version, a hash of the graph, and the
   speeds of the device that they are for. Numbers keep all their bits. ms_profile_load reads such a
   text, after all registrations and ms_set_loss, for the next ms_wrap; it replaces all times that
   were measured or loaded before and, unless ms_set_hardware has been called, the speeds that the
   backend states. It loads everything or nothing. The hash ignores names, addresses and the present
   sizes of axes. Errors: INVALID (not a profile, of another version, of another graph, cut off; the
   text says which line), ORDER (saved before ms_wrap). */
MEMSCALE_API_CHECKED ms_result ms_profile_save(const ms_model *model, ms_text_fn write, void *user);
MEMSCALE_API_CHECKED ms_result ms_profile_load(ms_model *model, const char *text, size_t length);

/* The smallest budget that ms_wrap would accept with the present switches (with auto_policy, in any
   mode). Takes as long as the slowest ms_wrap. Errors: as ms_wrap, except BUDGET.
   One byte less is refused. A larger budget never makes the predicted step slower, and a smaller
   one never makes the arena larger. */
MEMSCALE_API_CHECKED ms_result ms_smallest_budget(ms_model *model, uint64_t *bytes);

/* Decides, lowers, lays out and allocates. May be called again between steps or micro-batches,
   after ms_set_budget, ms_set_frozen, ms_set_accumulation, ms_set_layer_technique,
   ms_set_tensor_technique, ms_set_hardware, ms_clear_hardware, ms_set_layer_time or
   ms_profile_load: every value that is kept between steps stays, and so do the micro-batches done
   so far, unless their number changes or a param is trained that was not before. The old and the
   new arena exist side by side for a moment. A failing call leaves the model as it was, unless the
   failure is that of the device in earlier steps that were not waited for. Stream: waits. Errors:
   the first that sticks; INVALID; ORDER (in a callback; between ms_backward and ms_update where
   early updates have begun, here or in a model that shares the arena); UNSUPPORTED (a technique
   that this version does not have is switched ON or forced); BUDGET (the text has the smallest
   budget that would do, the largest size for which this one suffices, and what else helps);
   OUT_OF_MEMORY; BACKEND. */
MEMSCALE_API_CHECKED ms_result ms_wrap(ms_model *model);

/* Back to the plain plan, whatever the budget; values are kept. On error the model stays wrapped as
   it was. Errors: as ms_wrap, except BUDGET. */
MEMSCALE_API_CHECKED ms_result ms_detach(ms_model *model);

/* Sets the sizes of all axes, in the order of ms_add_axis, between steps; the micro-batches of one
   step may differ, and each counts 1/n, whatever its rows. The plan for these sizes is made, or is
   among the last 64 and reused; no device memory is allocated: the arena has room for the largest.
   Params, their state and buffers keep their values; inputs, and buffers along an axis, keep only
   their bytes and must be written anew. Before ms_wrap it only sets the sizes. On error the model
   keeps the old ones. Errors: INVALID (below 1, above the largest), ORDER, OUT_OF_MEMORY. */
MEMSCALE_API_CHECKED ms_result ms_reshape(ms_model *model, const int64_t *sizes);

/* MS_OPTIMIZE(m) { ... } calls ms_wrap before the block and ms_detach after it. If ms_wrap fails,
   the block is skipped (see ms_last_error). A break, goto or return leaves it wrapped. */
#define MS_OPTIMIZE(model) for (int memscale_stage = 0; ms_optimize_next((model), &memscale_stage);)
MEMSCALE_API bool ms_optimize_next(ms_model *model, int *stage);

/* Copy a whole tensor from (ms_write) or to (ms_read) host memory, in its dtype. data may be reused
   at once. ms_write: what is kept between steps (input, param, buffer, optimizer state, borrowed
   gradient), at any time between calls, also before ms_wrap; after ms_forward it ends that step,
   since backward would see other values. Inputs and params have no value, and steps return ORDER,
   until they are written or borrowed, or ms_data has given their address; after ms_reshape the same
   holds for inputs along an axis that has changed. Buffers and optimizer state begin with zeros.
   ms_read: the same (zeros, if it was never written) and accumulated gradients, at any time; also
   every value that is live where the last step stopped: the loss, outputs, and between ms_backward
   and ms_update the gradients. Stream: both wait, except ms_write to an input on the device, which
   is staged in pinned memory. Errors: INVALID, ORDER (not live; ms_write in a callback), DRY_RUN,
   OUT_OF_MEMORY, BACKEND. */
MEMSCALE_API_CHECKED ms_result ms_write(ms_model *model, ms_tensor tensor, const void *data);
MEMSCALE_API_CHECKED ms_result ms_read(ms_model *model, ms_tensor tensor, void *data);

/* The address of a value in device memory (host memory for a tensor on the host); NULL before
   ms_wrap and where ms_read would fail. Use it to fill an input in place or to use params
   elsewhere, by work enqueued on ms_stream or after ms_synchronize. What is kept between steps
   stays there until the next ms_wrap or ms_detach, or the step that plans again
   (ms_config.empirical_profiling); everything else until the next step. */
MEMSCALE_API void *ms_data(ms_model *model, ms_tensor tensor);

/* Handles of the gradient of a param or activation, for ms_read, and of the optimizer state of a
   param, for ms_read and ms_write (AdamW: 0 and 1 are the moments; SGD: 0 is the momentum). Handle
   0 if there cannot be one. Call ms_optimizer_state after ms_set_optimizer. A frozen param has a
   handle, but nothing to read. */
MEMSCALE_API ms_tensor ms_gradient(const ms_model *model, ms_tensor tensor);
MEMSCALE_API ms_tensor ms_optimizer_state(const ms_model *model, ms_tensor param, int index);

/* Present shape, element count and bytes of a tensor; rank -1, 0 and 0 for a wrong handle. */
MEMSCALE_API ms_shape ms_tensor_shape(const ms_model *model, ms_tensor tensor);
MEMSCALE_API uint64_t ms_tensor_count(const ms_model *model, ms_tensor tensor);
MEMSCALE_API uint64_t ms_tensor_bytes(const ms_model *model, ms_tensor tensor);

/* The tensor that a handle of ms_gradient or ms_optimizer_state belongs to; any other handle is
   returned as it is, a wrong one as 0. */
MEMSCALE_API ms_tensor ms_tensor_of(const ms_model *model, ms_tensor tensor);

/* Name of a tensor (for a gradient or optimizer state, that of its tensor) and of a layer; "?" for
   a wrong handle. Valid until the next registration, and after ms_wrap as long as the model. */
MEMSCALE_API const char *ms_tensor_name(const ms_model *model, ms_tensor tensor);
MEMSCALE_API const char *ms_layer_name(const ms_model *model, ms_layer layer);

/* Position of a layer in the order of registration, from 0; UINT32_MAX for a wrong handle. */
MEMSCALE_API uint32_t ms_layer_index(const ms_model *model, ms_layer layer);

/* One training step; *loss (loss may be NULL) is the loss before the update. With
   accumulation_steps = n it is one micro-batch with its own loss, and every n-th call updates;
   minimised is the mean over all of them (with ms_set_loss_factor, the sum of all their rows times
   the factor). A failure also discards the earlier micro-batches of its step, which starts again.
   Stream: waits only for the loss and, if gradients are clipped, for their norm; with NULL for
   neither. A loss that is not finite is then the error of the next ms_step, ms_forward, ms_eval or
   ms_synchronize that finds it. It also waits for the loss before an update by MS_OPTIMIZER_CUSTOM,
   for copies of state on the host, and for another model that has used the shared arena. Errors:
   CALLBACK, NONFINITE, BACKEND, CONTRACT, FAILED, ORDER (not wrapped; else as ms_wrap), UNSUPPORTED
   (a recording, with state on the host that a recomputation changes), DRY_RUN. */
MEMSCALE_API_CHECKED ms_result ms_step(ms_model *model, double *loss);

/* The same in three calls. With a plan that updates early (ms_memory_report.early_update),
   ms_backward updates some params and ms_update completes the step. With accumulation, call
   ms_update only after the last micro-batch. Errors: as ms_step; ORDER if called out of turn. */
MEMSCALE_API_CHECKED ms_result ms_forward(ms_model *model, double *loss);
MEMSCALE_API_CHECKED ms_result ms_backward(ms_model *model);
MEMSCALE_API_CHECKED ms_result ms_update(ms_model *model);

/* Forward alone, in MS_PHASE_EVAL, by a program of its own that keeps nothing for a backward. Ends
   a step that ms_forward has begun. Errors: as ms_step. */
MEMSCALE_API_CHECKED ms_result ms_eval(ms_model *model, double *loss);

/* The global norm of all gradients in the last update, before clipping. Errors: INVALID, ORDER (no
   grad_clip_norm; no update since ms_wrap; another step or an eval has begun since), BACKEND. */
MEMSCALE_API_CHECKED ms_result ms_gradient_norm(ms_model *model, double *norm);

/* In a callback: c = alpha * a * b + beta * c, row-major; with beta 0, c is not read; c cannot be
   transposed. a and b are both F32, F16 or BF16, c is F32 or like them; products are summed in F32.
   If c is a batch, a and b are each a batch of the same size or one matrix for all. Stream:
   ms_call.stream. Return its error from the callback; the text reaches ms_last_error. Errors:
   INVALID (shapes do not match), UNSUPPORTED (dtype), BACKEND. */
MEMSCALE_API_CHECKED ms_result ms_gemm(const ms_call *call, float alpha, ms_matrix a, ms_matrix b,
                                       float beta, ms_matrix c);

/* In a callback: converts the values of one view to the dtype of another of as many elements, to
   the nearest, ties to even; F32, F16 and BF16. Stream: ms_call.stream. Errors: INVALID (counts
   differ, no data), UNSUPPORTED (dtype), BACKEND. */
MEMSCALE_API_CHECKED ms_result ms_cast(const ms_call *call, const ms_view *to, const ms_view *from);

/* A view as a matrix: its last dim is cols, all others together are rows; and the transpose of a
   matrix (no data moves). */
MEMSCALE_API ms_matrix ms_matrix_of(const ms_view *view);
MEMSCALE_API ms_matrix ms_transpose(ms_matrix matrix);

/* Sizes and times of the present plan, and what it is for. Errors: INVALID, ORDER (no plan yet). */
MEMSCALE_API_CHECKED ms_result ms_report(const ms_model *model, ms_memory_report *report);

/* Names of a category ("activation gradients"), a mode ("BALANCED"), a technique ("early update"),
   and of sources ("user_config", "roofline"); "?" out of range. */
MEMSCALE_API const char *ms_category_name(ms_category category);
MEMSCALE_API const char *ms_mode_name(ms_mode mode);
MEMSCALE_API const char *ms_technique_name(ms_technique technique);
MEMSCALE_API const char *ms_decision_source_name(ms_decision_source source);
MEMSCALE_API const char *ms_time_source_name(ms_time_source source);

/* Whether this version has the technique; false out of range. */
MEMSCALE_API bool ms_technique_is_built(ms_technique technique);

/* The rules in the order in which they are tried (the first that holds explains a decision); NULL
   after the last. */
MEMSCALE_API const ms_rule *ms_rule_at(uint32_t number);

/* Calls visit for each layer in the order of registration, and for each technique of ms_technique:
   what was decided, and by which rule. Errors: INVALID, ORDER (no plan yet), OUT_OF_MEMORY (visit
   was not called then). */
MEMSCALE_API_CHECKED ms_result ms_visit_decisions(const ms_model *model, ms_decision_fn visit,
                                                  void *user);

/* Runs forward and backward by the plain plan and by the present plan, both from the present values
   and inputs, with the seed of the next step (with accumulation, one micro-batch) and no update,
   and compares the gradients of all trained params and the buffers that layers change. Afterwards
   visit (may be NULL) receives each of them, in the order of registration. If all bits are equal,
   the plan changes nothing. Memory that a callback is to write holds poison, which also exposes a
   layer that reads what nobody has written; only ms_config.debug finds a mistake that both passes
   make. A loss that is not finite is compared like any other. Borrowed gradients and buffers are
   used where they are: each pass begins with the values that they hold, which are put back bit for
   bit in the end. Even after an error the model is as before: values, readable gradients and
   outputs, counts, recordings. (A backend that fails twice in a row can leave borrowed memory
   changed, and in debug mode garbage in params; the model is then marked failed.) Temporary memory:
   on the device one allocation beside the arena, for the transient values and gradients of the
   plain plan and a copy of changing buffers; on the host a copy of these gradients and buffers, one
   more of buffers that stay there and of what is borrowed, two programs and 1 MiB (in debug mode
   also what that takes).
   Stream: waits. Errors: as ms_step except NONFINITE; OUT_OF_MEMORY; ORDER (not wrapped; a step is
   under way; a setting waits for the next ms_wrap). *report is zeroed then, visit is not called. */
MEMSCALE_API_CHECKED ms_result ms_verify(ms_model *model, ms_difference_fn visit, void *user,
                                         ms_verify_report *report);

/* Runs forward and backward by the present plan, from the present values and inputs, with the seed
   of the next step and no update, and looks after each layer for a NaN or an infinity, by the bits:
   first in what it reads of inputs, params and buffers, then in what it makes. Stops at the first;
   ms_last_error has it as text then, though the result is OK. Call it after MS_RESULT_NONFINITE. In
   debug mode each step does the same: the first is logged as a warning and told by the error. The
   model is as before. Memory: as ms_verify, for one pass, and without a copy of its results.
   Stream and errors: as ms_verify. */
MEMSCALE_API_CHECKED ms_result ms_find_nonfinite(ms_model *model, ms_nonfinite *found);

/* Calls visit for the events of a program, in the order in which they are enqueued. A framework
   that runs the plan itself learns from them what to compute where, and what can be freed
   afterwards. Errors: INVALID, ORDER (no plan yet). */
MEMSCALE_API_CHECKED ms_result ms_visit_events(const ms_model *model, ms_program program,
                                               ms_event_fn visit, void *user);

/* Calls visit for every value that is in memory during a program: those that live between steps,
   and then the others. The bytes of those in the arena that are alive at an instruction add up to
   its ms_event.live_bytes. Errors: INVALID, ORDER (no plan yet). */
MEMSCALE_API_CHECKED ms_result ms_visit_lifetimes(const ms_model *model, ms_program program,
                                                  ms_lifetime_fn visit, void *user);

/* The functions from here on write text, piece by piece, and use only the functions above. Sizes
   that are needed are rounded up, so that a budget that is copied from a text suffices.

   Listings for people. ms_print_plan: sizes; what each technique takes off the peak; the largest
   values at the peak; a line for each layer, or one for all those that are alike
   (ms_decision.alike_count); and the rules that decided. ms_print_plan_full: the same with a line
   for every layer, and one for the lifetime of every value. ms_print_program: a line for each
   instruction with its number, kind, layer or tensor, operands and their addresses, and the live
   bytes while it runs. Errors: INVALID, ORDER (no plan yet), and of the first two OUT_OF_MEMORY
   (the text may then end after the techniques). */
MEMSCALE_API_CHECKED ms_result ms_print_plan(const ms_model *model, ms_text_fn write, void *user);
MEMSCALE_API_CHECKED ms_result ms_print_plan_full(const ms_model *model, ms_text_fn write,
                                                  void *user);
MEMSCALE_API_CHECKED ms_result ms_print_program(const ms_model *model, ms_program program,
                                                ms_text_fn write, void *user);

/* A training step as a Chrome trace in JSON, for ui.perfetto.dev: a process "simulated" and, if
   steps were timed, one "measured", each with a track per stream and counters of live bytes by
   category. A slice is an instruction, with the name of its layer or tensor, or something else that
   a step does: the copies of inputs to the device, the sum of the losses, the copy of the verdict
   to the host. Errors: INVALID, ORDER (no plan yet). */
MEMSCALE_API_CHECKED ms_result ms_print_trace(const ms_model *model, ms_text_fn write, void *user);

/* The numbers of ms_report in the text format of Prometheus. All names begin with memscale_; units
   are bytes and seconds. Errors: INVALID, ORDER (no plan yet). */
MEMSCALE_API_CHECKED ms_result ms_print_metrics(const ms_model *model, ms_text_fn write,
                                                void *user);

#endif // MEMSCALE_H

// ================================================================================================
// what both implementations share

#if defined(MEMSCALE_CUDA_IMPLEMENTATION) && !defined(__CUDACC__)
#error "MEMSCALE_CUDA_IMPLEMENTATION is for nvcc: define it in a .cu file of its own"
#endif

#if (defined(MEMSCALE_IMPLEMENTATION) || defined(MEMSCALE_CUDA_IMPLEMENTATION)) &&                 \
    !defined(MEMSCALE_SHARED_DONE)
#define MEMSCALE_SHARED_DONE

#include <float.h>
#include <math.h>
#include <stdarg.h>
#ifndef MEMSCALE_NO_STDIO
#include <stdio.h>
#endif
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#ifndef NOMINMAX
#define NOMINMAX
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h> // GlobalMemoryStatusEx, QueryPerformanceCounter
#elif defined(__APPLE__)
#include <mach/mach.h>
#include <sys/sysctl.h>
#include <sys/types.h>
#elif defined(__linux__)
#include <sys/sysinfo.h>
#endif

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define MSI_HD static __host__ __device__ __forceinline__
#else
#define MSI_HD static inline
#endif

// ------------------------------------------------------------------------------------------------
// >>formats  16-bit floats by their bits, rounded to the nearest, ties to even

MSI_HD uint32_t msi_bits_of_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

MSI_HD float msi_f32_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

MSI_HD float msi_f32_of_bf16(uint16_t bits16) {
    return msi_f32_of_bits((uint32_t)bits16 << 16);
}

MSI_HD double msi_f64_of_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

MSI_HD uint64_t msi_bits_of_f64(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* What a number is must not be asked by comparisons: compilers that are told of finite numbers only
   (-Ofast, -ffinite-math-only) fold x != x and x - x == 0. They may also conclude from the
   arithmetic that has made x that its bits are those of a finite number, and what is volatile stops
   that. */
MSI_HD bool msi_is_finite(double x) {
    volatile uint64_t bits = msi_bits_of_f64(x);
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

MSI_HD bool msi_is_nan(double x) {
    volatile uint64_t bits = msi_bits_of_f64(x);
    return bits << 1 > 0x7ffull << 53;
}

MSI_HD uint16_t msi_bf16_of_f32(float x) {
    const uint32_t bits = msi_bits_of_f32(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)(bits >> 16 | 0x40u); // a quiet NaN
    }
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Shifts exponent and mantissa to their places and corrects the bias of the exponent. A subnormal
   number gets the exponent of 2^-14, which is then subtracted: exact, and without subnormal floats,
   which -Ofast makes the processor flush to zero. */
MSI_HD float msi_f32_of_f16(uint16_t bits16) {
    const uint32_t sign = (uint32_t)(bits16 & 0x8000u) << 16, rest = bits16 & 0x7fffu;
    if (rest >= 0x7c00u) { // infinity and NaN
        return msi_f32_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    }
    if (rest >= 0x400u) {
        return msi_f32_of_bits(sign | ((rest << 13) + 0x38000000u));
    }
    const float above = msi_f32_of_bits(0x38800000u | rest << 13) - 6.103515625e-5f; // 2^-14
    return msi_f32_of_bits(sign | msi_bits_of_f32(above));
}

MSI_HD uint16_t msi_f16_of_f32(float x) {
    const uint32_t bits = msi_bits_of_f32(x), rest = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 16 & 0x8000u;
    if (rest > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    }
    if (rest >= 0x477ff000u) { // 65520 and above round to infinity
        return (uint16_t)(sign | 0x7c00u);
    }
    if (rest < 0x38800000u) { // subnormal: the last bits of the sum with 0.5 count units of 2^-24
        return (uint16_t)(sign | (msi_bits_of_f32(msi_f32_of_bits(rest) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13);
}

/* Element i of an array of F32, F16 or BF16, as float. */
MSI_HD float msi_load(const void *data, ms_dtype dtype, uint64_t i) {
    return dtype == MS_DTYPE_F32   ? ((const float *)data)[i]
           : dtype == MS_DTYPE_F16 ? msi_f32_of_f16(((const uint16_t *)data)[i])
                                   : msi_f32_of_bf16(((const uint16_t *)data)[i]);
}

MSI_HD void msi_store_as(void *data, ms_dtype dtype, uint64_t i, float x) {
    if (dtype == MS_DTYPE_F32) {
        ((float *)data)[i] = x;
    } else {
        ((uint16_t *)data)[i] = dtype == MS_DTYPE_F16 ? msi_f16_of_f32(x) : msi_bf16_of_f32(x);
    }
}

// ------------------------------------------------------------------------------------------------
// >>shared  allocation, sizes, and the memory of the host

enum { MSI_ALIGNMENT = 64 };

static inline uint64_t msi_align(uint64_t bytes) {
    return (bytes + MSI_ALIGNMENT - 1) & ~(uint64_t)(MSI_ALIGNMENT - 1);
}

static inline void *msi_alloc(const ms_allocator *allocator, uint64_t bytes) {
    if (bytes > SIZE_MAX) {
        return NULL;
    }
    return allocator->alloc ? allocator->alloc(bytes, allocator->user) : malloc((size_t)bytes);
}

static inline void msi_release(const ms_allocator *allocator, void *memory, uint64_t bytes) {
    if (!allocator->release) {
        free(memory);
    } else if (memory) {
        allocator->release(memory, bytes, allocator->user);
    }
}

#ifndef MEMSCALE_NO_STDIO
static inline int msi_vformat(char *text, size_t room, const char *format, va_list args) {
    return vsnprintf(text, room, format, args);
}
#else
/* Text that is being written; what does not fit is counted only. */
typedef struct msi_formatted {
    char *text;
    size_t room, length;
} msi_formatted;

static inline void msi_put(msi_formatted *to, char c, int times) {
    for (int i = 0; i < times; i++, to->length++) {
        if (to->length + 1 < to->room) {
            to->text[to->length] = c;
        }
    }
}

static inline void msi_put_text(msi_formatted *to, const char *from, int length) {
    for (int i = 0; i < length; i++) {
        msi_put(to, from[i], 1);
    }
}

/* Between blanks or zeros up to a width; negative: to the left. */
static inline void msi_put_padded(msi_formatted *to, const char *from, int length, int width,
                                  bool zeros) {
    const int sign = zeros && length > 0 && from[0] == '-';
    msi_put_text(to, from, sign);
    msi_put(to, zeros ? '0' : ' ', width - length);
    msi_put_text(to, from + sign, length - sign);
    msi_put(to, ' ', -width - length);
}

/* The digits of a whole number; returns where they begin, before `end`. */
static inline char *msi_whole_digits(char *end, uint64_t x, uint32_t base) {
    do {
        *--end = "0123456789abcdef"[x % base];
        x /= base;
    } while (x);
    return end;
}

enum { MSI_DECIMAL_WORDS = 90, MSI_DECIMAL_DIGITS = 9 * MSI_DECIMAL_WORDS };

/* All decimal digits of a finite x > 0, which are those of mantissa * 2^e or of mantissa * 5^-e: a
   whole number of words below 1e9, the lowest first. Returns how many digits; *point of them are
   before the point. */
static inline int msi_exact_digits(double x, char *digits, int *point) {
    const uint64_t bits = msi_bits_of_f64(x), fraction = bits & 0xfffffffffffffu;
    const int biased = (int)(bits >> 52 & 0x7ff), e = (biased ? biased : 1) - 1075;
    uint64_t whole = biased ? fraction | (uint64_t)1 << 52 : fraction;
    uint32_t words[MSI_DECIMAL_WORDS];
    int count = 0, length = 0;
    for (; whole; whole /= 1000000000u) {
        words[count++] = (uint32_t)(whole % 1000000000u);
    }
    for (int i = 0; i < (e < 0 ? -e : e); i++) {
        uint64_t carry = 0;
        for (int k = 0; k < count; k++) {
            carry += (uint64_t)words[k] * (e < 0 ? 5u : 2u);
            words[k] = (uint32_t)(carry % 1000000000u);
            carry /= 1000000000u;
        }
        if (carry) {
            words[count++] = (uint32_t)carry;
        }
    }
    for (int k = count; k-- > 0;) {
        char part[9];
        memset(part, '0', sizeof part);
        (void)msi_whole_digits(part + sizeof part, words[k], 10);
        const int zeros = k + 1 == count ? (int)strspn(part, "0") : 0;
        memcpy(digits + length, part + zeros, sizeof part - (size_t)zeros);
        length += 9 - zeros;
    }
    *point = length + (e < 0 ? e : 0);
    return length;
}

/* Rounds to `kept` digits, ties to even; returns how many there are, without zeros at the end. */
static inline int msi_round_digits(char *digits, int length, int kept, int *point) {
    if (kept < length) {
        const int last = kept > 0 ? digits[kept - 1] - '0' : 0;
        int at = kept + 1;
        bool up = kept >= 0 && digits[kept] > '5';
        while (at > 0 && at < length && digits[at] == '0') {
            at++;
        }
        up |= kept >= 0 && digits[kept] == '5' && (at < length || last % 2 == 1);
        length = kept < 0 ? 0 : kept;
        while (up && length > 0 && digits[length - 1] == '9') {
            length--;
        }
        if (up && length > 0) {
            digits[length - 1]++;
        } else if (up) {
            digits[length++] = '1';
            ++*point;
        }
    }
    while (length > 0 && digits[length - 1] == '0') {
        length--;
    }
    return length;
}

static inline void msi_put_digits(msi_formatted *to, const char *digits, int length, int from,
                                  int end) {
    for (int i = from; i < end; i++) {
        msi_put(to, i >= 0 && i < length ? digits[i] : '0', 1);
    }
}

/* As %.*f or %.*g. */
static inline void msi_put_number(msi_formatted *to, double x, char kind, int precision) {
    char digits[MSI_DECIMAL_DIGITS + 1];
    int point = 1, length = 0;
    if (msi_bits_of_f64(x) >> 63 && !msi_is_nan(x)) {
        msi_put(to, '-', 1);
    }
    if (!msi_is_finite(x)) {
        msi_put_text(to, msi_is_nan(x) ? "nan" : "inf", 3);
        return;
    }
    if (msi_bits_of_f64(x) << 1) {
        length = msi_exact_digits(x, digits, &point);
    }
    const int most = precision > 0 ? precision : 1;
    length = msi_round_digits(digits, length, kind == 'f' ? point + precision : most, &point);
    const bool scientific = kind == 'g' && length > 0 && (point < -3 || point > most);
    const int before = scientific ? 1 : point;
    const int after = kind == 'f' ? precision : length > before ? length - before : 0;
    msi_put(to, '0', before <= 0);
    msi_put_digits(to, digits, length, 0, before);
    msi_put(to, '.', after > 0);
    msi_put_digits(to, digits, length, before, before + after);
    if (scientific) {
        const int power = point - 1, size = power < 0 ? -power : power;
        char text[8];
        const char *at = msi_whole_digits(text + sizeof text, (uint64_t)size, 10);
        msi_put(to, 'e', 1);
        msi_put(to, power < 0 ? '-' : '+', 1);
        msi_put(to, '0', size < 10);
        msi_put_text(to, at, (int)(text + sizeof text - at));
    }
}

/* What is between % and the letter. */
typedef struct msi_conversion {
    bool zeros, left;
    int width, precision, longs; // precision -1: none
    char kind;
} msi_conversion;

static inline int msi_whole_in(const char **at) {
    int x = 0;
    for (; **at >= '0' && **at <= '9'; ++*at) {
        x = 10 * x + (**at - '0');
    }
    return x;
}

static inline void msi_put_whole(msi_formatted *to, const msi_conversion *c, uint64_t x,
                                 bool negative) {
    char text[24];
    char *at = msi_whole_digits(text + sizeof text, x, c->kind == 'x' ? 16 : 10);
    if (negative) {
        *--at = '-';
    }
    msi_put_padded(to, at, (int)(text + sizeof text - at), c->left ? -c->width : c->width,
                   c->zeros && !c->left);
}

/* As vsnprintf, for %% c d u x s f g, the flags 0 and -, a width (of d, u, x and s), a precision
   (of s, f and g), l, ll and z. The point is a point in every locale. */
static inline int msi_vformat(char *text, size_t room, const char *format, va_list args) {
    msi_formatted to = {text, room, 0};
    for (const char *at = format; *at; at++) {
        msi_conversion c = {false, false, 0, -1, 0, 0};
        if (*at != '%') {
            msi_put(&to, *at, 1);
            continue;
        }
        for (at++; *at == '0' || *at == '-'; at++) {
            c.zeros |= *at == '0';
            c.left |= *at == '-';
        }
        if (*at == '*') {
            c.width = va_arg(args, int);
            at++;
        } else {
            c.width = msi_whole_in(&at);
        }
        if (*at == '.' && *++at == '*') {
            c.precision = va_arg(args, int);
            at++;
        } else if (at[-1] == '.') {
            c.precision = msi_whole_in(&at);
        }
        for (; *at == 'l' || *at == 'z'; at++) {
            c.longs += *at == 'z' ? (int)(sizeof(size_t) / sizeof(long)) : 1;
        }
        c.kind = *at;
        if (c.width < 0) {
            c.left = true;
            c.width = -c.width;
        }
        if (c.kind == 'd') {
            const int64_t x = c.longs > 1    ? (int64_t)va_arg(args, long long)
                              : c.longs == 1 ? (int64_t)va_arg(args, long)
                                             : (int64_t)va_arg(args, int);
            msi_put_whole(&to, &c, x < 0 ? 0 - (uint64_t)x : (uint64_t)x, x < 0);
        } else if (c.kind == 'u' || c.kind == 'x') {
            const uint64_t x = c.longs > 1    ? (uint64_t)va_arg(args, unsigned long long)
                               : c.longs == 1 ? (uint64_t)va_arg(args, unsigned long)
                                              : (uint64_t)va_arg(args, unsigned);
            msi_put_whole(&to, &c, x, false);
        } else if (c.kind == 's') {
            const char *from = va_arg(args, const char *);
            int length = 0;
            while (length != c.precision && from[length]) {
                length++;
            }
            msi_put_padded(&to, from, length, c.left ? -c.width : c.width, false);
        } else if (c.kind == 'f' || c.kind == 'g') {
            msi_put_number(&to, va_arg(args, double), c.kind, c.precision < 0 ? 6 : c.precision);
        } else {
            msi_put(&to, c.kind == 'c' ? (char)va_arg(args, int) : '%', 1);
        }
    }
    if (room > 0) {
        text[to.length < room ? to.length : room - 1] = 0;
    }
    return (int)to.length;
}
#endif

MEMSCALE_PRINTF(3, 4)
static inline int msi_format(char *text, size_t room, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int length = msi_vformat(text, room, format, args);
    va_end(args);
    return length;
}

/* Value of a line such as "MemTotal:  24 kB" or "model name : x"; NULL if it begins otherwise. */
static inline const char *msi_line_value(const char *line, const char *key) {
    const size_t length = strlen(key);
    return strncmp(line, key, length) == 0 ? line + length + strspn(line + length, " \t:") : NULL;
}

enum { MSI_PATH_BYTES = 4096 };

#ifndef MEMSCALE_NO_STDIO
typedef FILE msi_file;

/* root is "", except in tests, which write a tree of files of their own. NULL: no such file. */
static inline msi_file *msi_open_file(const char *root, const char *directory, const char *name) {
    char path[MSI_PATH_BYTES];
    const int length = msi_format(path, sizeof path, "%s%s/%s", root, directory, name);
    return length > 0 && length < (int)sizeof path ? fopen(path, "r") : NULL;
}

/* Reads the next line, without its end, and drops what does not fit. False at the end of the file,
   which is closed then, so callers read each file to its end; false too for NULL. */
static inline bool msi_read_line(msi_file *file, char *line, int bytes) {
    char rest[256];
    if (!file || !fgets(line, bytes, file)) {
        if (file) {
            fclose(file);
        }
        return false;
    }
    const size_t length = strcspn(line, "\n");
    bool more = line[length] == 0;
    line[length] = 0;
    while (more && fgets(rest, sizeof rest, file)) {
        more = !strchr(rest, '\n');
    }
    return true;
}

#else
typedef struct msi_file {
    bool is_open;
} msi_file;

/* No file is read. */
static inline msi_file *msi_open_file(const char *root, const char *directory, const char *name) {
    (void)root, (void)directory, (void)name;
    return NULL;
}

static inline bool msi_read_line(msi_file *file, char *line, int bytes) {
    (void)file, (void)line, (void)bytes;
    return false;
}
#endif

/* The number in the first line that begins with key and has one, or `otherwise`. */
static inline uint64_t msi_read_key(const char *root, const char *directory, const char *name,
                                    const char *key, uint64_t otherwise) {
    char line[256];
    uint64_t number = otherwise;
    msi_file *file = msi_open_file(root, directory, name);
    while (msi_read_line(file, line, sizeof line)) {
        const char *value = msi_line_value(line, key);
        if (number == otherwise && value && *value >= '0' && *value <= '9') {
            number = strtoull(value, NULL, 10);
        }
    }
    return number;
}

/* The number in a file that has nothing else; UINT64_MAX if it has none, as in "max". */
static inline uint64_t msi_read_number(const char *root, const char *directory, const char *name) {
    return msi_read_key(root, directory, name, "", UINT64_MAX);
}

/* Memory of the host; UINT64_MAX where it is not known. */
typedef struct msi_host {
    const char *root;
    uint64_t total_bytes, free_bytes;
} msi_host;

static inline uint64_t msi_smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Lowers *h to the limits of one cgroup and to what it has left: Linux,
   Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst. Inactive pages of files count
   as free: the kernel reclaims them. Version 1 writes an impossible number for no limit. */
static inline void msi_limit_by_group(msi_host *h, int version, const char *directory) {
    static const struct {
        const char *most, *high, *used, *pages;
    } names[2] = {{"memory.limit_in_bytes", "memory.limit_in_bytes", "memory.usage_in_bytes",
                   "total_inactive_file "},
                  {"memory.max", "memory.high", "memory.current", "inactive_file "}};
    const int v = version - 1;
    const uint64_t limit = msi_smaller(msi_read_number(h->root, directory, names[v].most),
                                       msi_read_number(h->root, directory, names[v].high));
    if (limit >> 60) {
        return;
    }
    const uint64_t used = msi_read_number(h->root, directory, names[v].used);
    const uint64_t pages = msi_read_key(h->root, directory, "memory.stat", names[v].pages, 0);
    const uint64_t held = used == UINT64_MAX ? 0 : used - msi_smaller(used, pages);
    h->total_bytes = msi_smaller(h->total_bytes, limit);
    h->free_bytes = msi_smaller(h->free_bytes, limit - msi_smaller(limit, held));
}

/* Lowers *h to the limits of the cgroup at mount/below and of its ancestors up to the mount. */
static inline void msi_limit_by_groups(msi_host *h, int version, const char *mount,
                                       const char *below) {
    char directory[MSI_PATH_BYTES];
    const size_t base = strlen(mount);
    const int whole = msi_format(directory, sizeof directory, "%s%s", mount, below);
    size_t length = (size_t)whole;
    for (bool more = whole >= 0 && whole < (int)sizeof directory; more;) {
        while (length > base && directory[length - 1] == '/') {
            length--;
        }
        directory[length] = 0;
        msi_limit_by_group(h, version, directory);
        more = length > base;
        while (length > base && directory[length - 1] != '/') {
            length--;
        }
    }
}

/* Cuts the next field off a line of fields that blanks separate; "" after the last. */
static inline char *msi_next_field(char **line) {
    char *field = *line + strspn(*line, " ");
    const size_t length = strcspn(field, " ");
    *line = field + length + (field[length] != 0);
    field[length] = 0;
    return field;
}

/* Whether a word is in a list of `length` characters that commas separate. */
static inline bool msi_lists(const char *list, size_t length, const char *word) {
    const size_t word_length = strlen(word);
    bool found = false;
    for (size_t at = 0, part; at < length && !found; at += part + 1) {
        part = strcspn(list + at, ",");
        part = part < length - at ? part : length - at;
        found = part == word_length && strncmp(list + at, word, part) == 0;
    }
    return found;
}

/* mountinfo writes blanks and the like as a backslash and three octal digits. */
static inline void msi_unescape(char *text) {
    char *to = text;
    for (const char *from = text; *from; from++, to++) {
        *to = *from;
        if (from[0] == '\\' && strspn(from + 1, "01234567") >= 3) {
            *to = (char)((from[1] - '0') * 64 + (from[2] - '0') * 8 + (from[3] - '0'));
            from += 3;
        }
    }
    *to = 0;
}

/* Whether a line of mountinfo (proc_pid_mountinfo(5)) mounts the cgroups of this version. Sets the
   mount point, and *root to the cgroup that is mounted there. */
static inline bool msi_mounts_groups(char *line, int version, char **root, char **point) {
    const char *field = "";
    for (int i = 0; i < 3; i++) {
        (void)msi_next_field(&line);
    }
    *root = msi_next_field(&line);
    *point = msi_next_field(&line);
    do {
        field = msi_next_field(&line);
    } while (field[0] && strcmp(field, "-") != 0);
    const char *type = msi_next_field(&line);
    (void)msi_next_field(&line);
    const char *options = msi_next_field(&line);
    msi_unescape(*root);
    msi_unescape(*point);
    return version == 2
               ? strcmp(type, "cgroup2") == 0
               : strcmp(type, "cgroup") == 0 && msi_lists(options, strlen(options), "memory");
}

/* The path of a cgroup below a mount of the cgroup `root`; "", the mount itself, where that is not
   known, as in some containers. */
static inline const char *msi_below_mount(const char *root, const char *path) {
    const size_t length = strcmp(root, "/") == 0 ? 0 : strlen(root);
    const bool inside =
        strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
    return inside && !strstr(path + length, "/..") ? path + length : "";
}

static inline void msi_limit_by_version(msi_host *h, int version, const char *path) {
    char line[MSI_PATH_BYTES];
    char *root, *point;
    bool found = false;
    msi_file *file = msi_open_file(h->root, "/proc/self", "mountinfo");
    while (msi_read_line(file, line, sizeof line)) {
        if (msi_mounts_groups(line, version, &root, &point)) {
            found = true;
            msi_limit_by_groups(h, version, point, msi_below_mount(root, path));
        }
    }
    if (!found) {
        msi_limit_by_groups(h, version, version == 2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory",
                            msi_below_mount("/", path));
    }
}

/* A line of /proc/self/cgroup is number:controllers:path; version 2 has no controllers. */
static inline void msi_limit_by_cgroups(msi_host *h) {
    char line[MSI_PATH_BYTES];
    msi_file *file = msi_open_file(h->root, "/proc/self", "cgroup");
    while (msi_read_line(file, line, sizeof line)) {
        const char *controllers = strchr(line, ':');
        const char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        const size_t length = path ? (size_t)(path - controllers) - 1 : 0;
        if (path && (length == 0 || msi_lists(controllers + 1, length, "memory"))) {
            msi_limit_by_version(h, length == 0 ? 2 : 1, path + 1);
        }
    }
}

/* What the system says by a call, where it has no /proc. Free memory includes what is reclaimed on
   demand: on macOS inactive pages, on Linux, which does not tell more here, buffers. */
static inline void msi_ask_system(msi_host *h) {
#if defined(_WIN32)
    MEMORYSTATUSEX status;
    status.dwLength = sizeof status;
    if (GlobalMemoryStatusEx(&status)) {
        h->total_bytes = status.ullTotalPhys;
        h->free_bytes = status.ullAvailPhys;
    }
#elif defined(__APPLE__)
    uint64_t total = 0;
    size_t size = sizeof total;
    vm_statistics64_data_t pages;
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    const mach_port_t host = mach_host_self();
    if (sysctlbyname("hw.memsize", &total, &size, NULL, 0) == 0 && total > 0) {
        h->total_bytes = total;
    }
    if (host_statistics64(host, HOST_VM_INFO64, (host_info64_t)&pages, &count) == KERN_SUCCESS) {
        h->free_bytes = ((uint64_t)pages.free_count + pages.inactive_count) * vm_kernel_page_size;
        h->free_bytes = msi_smaller(h->free_bytes, h->total_bytes);
    }
    (void)mach_port_deallocate(mach_task_self(), host);
#elif defined(__linux__)
    struct sysinfo info;
    if (sysinfo(&info) == 0) {
        h->total_bytes = (uint64_t)info.totalram * info.mem_unit;
        h->free_bytes = ((uint64_t)info.freeram + info.bufferram) * info.mem_unit;
    }
#else
    (void)h;
#endif
}

/* MemTotal and MemAvailable, or what the system says without these, or less where cgroups limit the
   process. 0 means unknown, so free memory that is known is at least a page. */
static inline void msi_host_memory(const char *root, uint64_t *total_bytes, uint64_t *free_bytes) {
    const uint64_t page = 4096, none = UINT64_MAX >> 10;
    msi_host h;
    h.root = root;
    h.total_bytes = msi_read_key(root, "/proc", "meminfo", "MemTotal:", none);
    h.free_bytes = msi_read_key(root, "/proc", "meminfo", "MemAvailable:", none);
    h.total_bytes = h.total_bytes >= none ? UINT64_MAX : h.total_bytes << 10;
    h.free_bytes = h.free_bytes >= none ? UINT64_MAX : h.free_bytes << 10;
    if (h.total_bytes == UINT64_MAX && !root[0]) {
        msi_ask_system(&h);
    }
    msi_limit_by_cgroups(&h);
    h.free_bytes = h.free_bytes < page ? page : h.free_bytes;
    *total_bytes = h.total_bytes == UINT64_MAX ? 0 : h.total_bytes;
    *free_bytes = h.free_bytes == UINT64_MAX ? 0 : h.free_bytes;
}

// ------------------------------------------------------------------------------------------------
// >>arithmetic  one element of an update, for host and device, with explicit rounding: compilers
//              differ in when they fuse a multiplication with an addition

/* Fused on devices, and on hosts that have an instruction for it: these give the same bits. */
#if defined(__CUDA_ARCH__)
#define MSI_FMA(a, b, c) __fmaf_rn(a, b, c)
#define MSI_DIVIDE(a, b) __fdiv_rn(a, b)
#define MSI_SQRT(a)      __fsqrt_rn(a)
#else
#if defined(FP_FAST_FMAF)
#define MSI_FMA(a, b, c) fmaf(a, b, c)
#else
#define MSI_FMA(a, b, c) ((a) * (b) + (c))
#endif
#define MSI_DIVIDE(a, b) ((a) / (b))
#define MSI_SQRT(a)      sqrtf(a)
#endif

MSI_HD float msi_adamw_element(const ms_update_factors *f, float value, float gradient, float *m,
                               float *v) {
    *m = MSI_FMA(f->rest1, gradient, f->beta1 * *m);
    *v = MSI_FMA(f->rest2 * gradient, gradient, f->beta2 * *v);
    const float step = MSI_DIVIDE(*m, MSI_FMA(MSI_SQRT(*v), f->scale2, f->epsilon));
    return MSI_FMA(f->rate, step, f->decay * value);
}

MSI_HD float msi_sgd_element(const ms_update_factors *f, float value, float gradient,
                             float *momentum) {
    float v = gradient;
    if (momentum) {
        v = MSI_FMA(f->beta1, *momentum, gradient);
        *momentum = v;
    }
    return MSI_FMA(f->rate, MSI_FMA(f->decay, value, v), value);
}

/* Halts the step if the loss is not finite. The first reason to halt stays. */
MSI_HD void msi_judge_loss(ms_step_state *s, double loss) {
    if (s->halted == (uint32_t)MS_HALT_NONE) {
        s->loss = loss;
        s->halted = (uint32_t)(msi_is_finite(loss) ? MS_HALT_NONE : MS_HALT_LOSS);
        s->halted_step = s->step;
    }
}

/* The same for the norm, from the sum of the squares of all gradients. Returns the factor that
   scales the gradients down to a norm of `limit`. */
MSI_HD float msi_judge_norm(ms_step_state *s, double sum, float limit) {
    const double norm = sqrt(sum);
    if (s->halted == (uint32_t)MS_HALT_NONE) {
        s->norm = norm;
        s->halted = (uint32_t)(msi_is_finite(sum) ? MS_HALT_NONE : MS_HALT_NORM);
        s->halted_step = s->step;
    }
    return norm > (double)limit ? (float)((double)limit / norm) : 1.0f;
}

#endif // MEMSCALE_SHARED_DONE

// ================================================================================================
// implementation

#if defined(MEMSCALE_IMPLEMENTATION) && !defined(MEMSCALE_IMPLEMENTATION_DONE)
#define MEMSCALE_IMPLEMENTATION_DONE

#include <stdarg.h>
#include <time.h>
#if !defined(_WIN32) && !defined(CLOCK_MONOTONIC) && !defined(__linux__)
#include <sys/time.h>
#endif

#ifndef MEMSCALE_ASSERT
#define MEMSCALE_ASSERT(x) ((void)sizeof(x))
#endif

#ifdef MEMSCALE_CBLAS
#include <cblas.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define MSI_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MSI_ASAN 1
#endif
#endif
#ifdef MSI_ASAN
#include <sanitizer/asan_interface.h>
#endif

// ------------------------------------------------------------------------------------------------
// >>base  constants, checked sizes, growing arrays

#ifdef __cplusplus
#define MSI_ZERO_INIT                                                                              \
    {}
#else
#define MSI_ZERO_INIT                                                                              \
    { 0 }
#endif

#define MSI_NONE UINT32_MAX // no tensor, no layer, no live range, no instruction

enum {
    MSI_MAX_TENSORS = (1 << 28) - 2,
    MSI_AXIS_BITS = 4, // an axis is tag << 4 | index + 1
    MSI_ERROR_BYTES = 512,
    MSI_MAX_SLOTS = 32,                 // every MS_LIMIT of slots; one bit each in a mask
    MSI_MAX_VALUES = 5 * MSI_MAX_SLOTS, // in, out, saved, param, state
    MSI_MAX_EDGES = 2 * MSI_MAX_SLOTS,  // in, param
    MSI_MAX_VIEWS = MSI_MAX_VALUES + MSI_MAX_SLOTS + MSI_MAX_EDGES
};

/* False if the product overflows. */
static bool msi_multiply(uint64_t a, uint64_t b, uint64_t *product) {
    *product = a * b;
    return b == 0 || a <= UINT64_MAX / b;
}

/* Sebastiano Vigna's splitmix64, public domain: a good mix of 64 bits. */
static uint64_t msi_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t msi_mix_in(uint64_t hash, uint64_t word) {
    return msi_mix(hash ^ word);
}

/* Strict dialects of C (-std=c99) hide the declaration of a function that every C library of Linux
   has. Where long has 64 bits, so has time_t, and 1 is CLOCK_MONOTONIC. */
#if defined(__linux__) && defined(__LP64__) && !defined(CLOCK_MONOTONIC)
typedef struct msi_timespec {
    time_t tv_sec;
    long tv_nsec;
} msi_timespec;
extern int clock_gettime(int clock, msi_timespec *now);
#define MSI_CLOCK 1
#elif !defined(_WIN32) && defined(CLOCK_MONOTONIC)
typedef struct timespec msi_timespec;
#define MSI_CLOCK CLOCK_MONOTONIC
#endif

/* Microseconds of a clock that is not set back, for differences. Tests give one of their own. */
#ifndef MSI_NOW_US
static inline double msi_now_us(void) {
#if defined(_WIN32)
    LARGE_INTEGER now, per_second;
    return QueryPerformanceFrequency(&per_second) && QueryPerformanceCounter(&now)
               ? 1e6 * (double)now.QuadPart / (double)per_second.QuadPart
               : 0.0;
#elif defined(MSI_CLOCK)
    msi_timespec now;
    return clock_gettime(MSI_CLOCK, &now) == 0
               ? 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec
               : 0.0;
#else // may be set back
    struct timeval now; // from a day in 2023, so that a double resolves fractions of a microsecond
    return gettimeofday(&now, NULL) == 0
               ? 1e6 * (double)(now.tv_sec - 1700000000) + (double)now.tv_usec
               : 0.0;
#endif
}
#endif

static void *msi_alloc_zeroed(const ms_allocator *allocator, uint64_t bytes) {
    void *memory = msi_alloc(allocator, bytes);
    if (memory) {
        memset(memory, 0, (size_t)bytes);
    }
    return memory;
}

/* The items of a growing array with room for `needed` of them, or the same items. */
static void *msi_regrow(const ms_allocator *allocator, void *items, uint32_t *capacity,
                        uint64_t needed, size_t item_bytes) {
    uint64_t grown = (uint64_t)*capacity + *capacity / 2 + 16;
    grown = grown < needed ? needed : grown;
    void *moved =
        needed > *capacity && grown < MSI_NONE ? msi_alloc(allocator, grown * item_bytes) : NULL;
    if (!moved) {
        return items;
    }
    if (items) {
        memcpy(moved, items, *capacity * item_bytes);
        msi_release(allocator, items, *capacity * item_bytes);
    }
    *capacity = (uint32_t)grown;
    return moved;
}

/* Makes a call if there has been no error so far. */
#define MSI_THEN(result, call) ((result) = (result) == MS_RESULT_OK ? (call) : (result))

/* A growing array. MSI_RESERVE is false, and changes nothing, if memory is short. */
#define MSI_LIST(type)                                                                             \
    struct {                                                                                       \
        type *items;                                                                               \
        uint32_t count, capacity;                                                                  \
    }
#define MSI_RESERVE(type, allocator, list, needed)                                                 \
    ((list).items = (type *)msi_regrow(allocator, (list).items, &(list).capacity,                  \
                                       (uint64_t)(needed), sizeof(type)),                          \
     (uint64_t)(needed) <= (list).capacity)
#define MSI_LIST_FREE(type, allocator, list)                                                       \
    msi_release(allocator, (list).items, (uint64_t)(list).capacity * sizeof(type))

// ------------------------------------------------------------------------------------------------
// >>structs  graph, program, plan, model

#define MSI_KINDS(X)                                                                               \
    X(MSI_KIND_INPUT, "input")                                                                     \
    X(MSI_KIND_PARAM, "param")                                                                     \
    X(MSI_KIND_BUFFER, "buffer")                                                                   \
    X(MSI_KIND_ACTIVATION, "activation")                                                           \
    X(MSI_KIND_SAVED, "saved tensor")

#define MSI_X(kind, name) kind,
typedef enum msi_kind { MSI_KINDS(MSI_X) } msi_kind;
#undef MSI_X

/* What a handle or a live range means by its tensor. A handle has a role below RESIDENT_COUNT; the
   values of these roles can be resident. */
typedef enum msi_role {
    MSI_ROLE_VALUE,
    MSI_ROLE_GRADIENT,
    MSI_ROLE_STATE0, // of the optimizer, MS_LIMIT_OPTIMIZER_STATE of them
    MSI_ROLE_RESIDENT_COUNT = MSI_ROLE_STATE0 + MS_LIMIT_OPTIMIZER_STATE,
    MSI_ROLE_CONTRIBUTION = MSI_ROLE_RESIDENT_COUNT, // to a gradient, to be added to it
    MSI_ROLE_SNAPSHOT,                               // a copy of a buffer
    MSI_ROLE_WORKSPACE,                              // of a layer
    MSI_ROLE_NORM                                    // an msi_norm, of no tensor
} msi_role;

typedef struct msi_tensor {
    ms_view view;                  // template of the views: shape and dtype, no data
    uint64_t bytes, largest_bytes; // now, and with every axis at its largest
    uint32_t name;                 // offset in graph.names
    uint32_t producer;             // layer that writes it
    msi_kind kind;
    float weight_decay;     // if has_weight_decay; otherwise the optimizer's
    uint64_t trained_since; // number of completed updates when its optimizer state was made
    bool has_weight_decay, frozen, is_output, is_eval_output, on_host, no_gradient;
    uint8_t technique[MS_TECHNIQUE_COUNT]; // ms_switch
    uint8_t borrowed;                      // mask of the roles whose memory is the trainer's
    bool written;  // its value is the trainer's, at the present sizes of the axes
    bool in_place; // ms_data has given its address away, so it is written without our knowing
    /* analysis of the graph, by ms_wrap */
    bool wants_gradient;
    bool updates_early;    // params: may be updated inside backward
    bool must_stay;        // nothing can bring it back
    bool serves_recompute; // the recompute callback of its layer reads it
    bool leads_to_loss;
    uint32_t last_use;      // the last layer that reads it in forward, or its producer
    uint32_t last_reader;   // the last layer to run backward whose backward reads the value
    uint32_t last_gradient; // the last layer to run backward that contributes to its gradient
    /* Per role: the trainer's memory, or a copy of what was written before ms_wrap. */
    void *memory[MSI_ROLE_RESIDENT_COUNT];
} msi_tensor;

enum { MSI_WORKSPACE_FORWARD, MSI_WORKSPACE_BACKWARD, MSI_WORKSPACE_RECOMPUTE };

/* The values of a layer by group, in the order of graph.operands and of the operands of an
   instruction: the array in ms_layer_desc, and its length. */
#define MSI_GROUPS(X)                                                                              \
    X(MSI_GROUP_IN, in, MS_LIMIT_IN)                                                               \
    X(MSI_GROUP_OUT, out, MS_LIMIT_OUT)                                                            \
    X(MSI_GROUP_SAVED, saved, MS_LIMIT_SAVED)                                                      \
    X(MSI_GROUP_PARAM, param, MS_LIMIT_PARAM)                                                      \
    X(MSI_GROUP_STATE, state, MS_LIMIT_STATE)

/* The groups of the operands of an instruction: those of the values, and then others. */
#define MSI_X(group, field, limit) group,
typedef enum msi_group_kind {
    MSI_GROUPS(MSI_X) MSI_GROUP_COUNT,
    MSI_GROUP_GRAD_OUT = MSI_GROUP_COUNT,
    MSI_GROUP_GRAD_IN,
    MSI_GROUP_GRAD_PARAM,
    MSI_GROUP_WORKSPACE,
    MSI_GROUP_END
} msi_group_kind;
#undef MSI_X

/* What a desc declares by masks of slots, each with the group of these slots, and by flags. The
   masks of in_place and grad_in_place are not among them: a layer has as many as it has slots. */
#define MSI_READ_MASKS(X, f) X(f.in, IN) X(f.out, OUT) X(f.saved, SAVED) X(f.param, PARAM)
#define MSI_EDGE_MASKS(X, f) X(f.in, IN) X(f.param, PARAM)
#define MSI_MASKS(X)                                                                               \
    MSI_READ_MASKS(X, backward_reads)                                                              \
    MSI_READ_MASKS(X, recompute_reads)                                                             \
    MSI_EDGE_MASKS(X, accumulates)                                                                 \
    MSI_EDGE_MASKS(X, overwrites)                                                                  \
    X(clobbers.in, IN)                                                                             \
    X(clobbers.out, OUT)                                                                           \
    X(clobbers.saved, SAVED)                                                                       \
    X(clobbers.grad_out, OUT)                                                                      \
    X(must_in_place, OUT)                                                                          \
    X(must_grad_in_place, IN)                                                                      \
    X(grads_in_forward, IN)                                                                        \
    X(backward_state, STATE)                                                                       \
    X(optional_saved, SAVED)
#define MSI_FLAGS(X)                                                                               \
    X(backward_reads.nothing)                                                                      \
    X(recompute_reads.nothing)                                                                     \
    X(no_recompute)                                                                                \
    X(keeps_state)                                                                                 \
    X(no_backward)

typedef struct msi_layer {
    ms_layer_fn forward, backward, recompute, bind;
    void *user;
    ms_workspace workspace[3];
    /* As declared, and the number of output elements then. */
    double flops, backward_flops, recompute_flops, elements;
    ms_layer_time known;    // by ms_set_layer_time
    ms_layer_time measured; // by timed steps, or from ms_profile_load; 0: not measured
    ms_layer_time time;     // in force, at the present sizes
    double known_elements, measured_elements; // the number of output elements for these times
    uint32_t name;
    uint32_t operand_first; // in graph.operands
    uint32_t mask_first;    // in graph.masks: in_place per out; four of grad_in_place per in
    uint8_t count[MSI_GROUP_COUNT];
    /* As in ms_layer_desc: see MSI_MASKS and MSI_FLAGS. */
    ms_reads backward_reads, recompute_reads;
    ms_edges accumulates, overwrites;
    ms_slot_masks clobbers;
    uint32_t must_in_place, must_grad_in_place, grads_in_forward, optional_saved, backward_state;
    bool no_recompute : 1, keeps_state : 1, no_backward : 1;
    bool differentiable : 1; // gradients pass through it: it has a backward, or no callback at all
    bool has_backward : 1;   // analysis: its backward runs
    bool ends_in_loss : 1;   // analysis: its forward writes gradients
} msi_layer;

typedef struct msi_axis {
    int64_t size, largest;
    uint32_t name;
} msi_axis;

typedef struct msi_graph {
    uint32_t tag; // where the ids of its handles begin
    MSI_LIST(char) names;
    MSI_LIST(msi_tensor) tensors;
    MSI_LIST(msi_layer) layers;
    MSI_LIST(uint32_t) operands; // tensors, MSI_NONE for empty slots
    MSI_LIST(uint32_t) masks;
    msi_axis axes[MS_LIMIT_AXES];
    uint32_t axis_count;
    uint64_t bytes; // of all tensors and workspaces, below 2^58: no sum over a program overflows
    uint32_t loss;
} msi_graph;

/* What determines the time of an instruction: the time of its layer, or the bytes that it moves and
   their speed, which may have been measured. */
typedef enum msi_cost {
    MSI_COST_NONE,
    MSI_COST_FORWARD, // as in ms_layer_time, in the order of its fields
    MSI_COST_BACKWARD,
    MSI_COST_RECOMPUTE,
    MSI_COST_LAYER_END, // from here on: by bytes
    MSI_COST_FILL = MSI_COST_LAYER_END,
    MSI_COST_COPY,
    MSI_COST_ADD,
    MSI_COST_SUM,
    MSI_COST_UPDATE,
    MSI_COST_MEASURED_END, // from here on: by stated speeds, which timed steps do not measure
    MSI_COST_LINK = MSI_COST_MEASURED_END, // between the host and the device
    MSI_COST_COUNT
} msi_cost;

/* The properties of an op: its name; the kind of its events; what determines its time; how often it
   passes over the bytes of its first operand, reads and writes together; the stream that it runs
   on; the phase of the callback that it calls, or COUNT; a mask of the operands that it only reads,
   of an op that calls none. Between a copy on its own stream and the next use of either operand is
   a WAIT. RECOMPUTE calls the recompute callback of a layer or, without one, forward; REPEAT calls
   forward although there is one, since what it reads has been dropped. NOTHING is no event. */
#define MSI_OPS(X)                                                                                 \
    X(FORWARD, "forward", FORWARD, FORWARD, 0, COMPUTE, FORWARD, 0)                                \
    X(RECOMPUTE, "recompute", RECOMPUTE, RECOMPUTE, 0, COMPUTE, RECOMPUTE, 0)                      \
    X(REPEAT, "recompute", RECOMPUTE, FORWARD, 0, COMPUTE, RECOMPUTE, 0)                           \
    X(BACKWARD, "backward", BACKWARD, BACKWARD, 0, COMPUTE, BACKWARD, 0)                           \
    X(EVAL, "eval", EVAL, FORWARD, 0, COMPUTE, EVAL, 0)                                            \
    X(SEED, "seed", SEED, FILL, 1, COMPUTE, COUNT, 0)                                              \
    X(ZERO, "zero", ZERO, FILL, 1, COMPUTE, COUNT, 0)                                              \
    X(COPY, "copy", COPY, COPY, 2, COMPUTE, COUNT, 1 << 1)                                         \
    X(COPY_IN, "copy in", COPY_IN, LINK, 1, TO_DEVICE, COUNT, 1 << 1)                              \
    X(COPY_OUT, "copy out", COPY_OUT, LINK, 1, TO_HOST, COUNT, 1 << 1)                             \
    X(WAIT, "wait", WAIT, NONE, 0, COMPUTE, COUNT, 1 << 1)                                         \
    X(ADD, "add", ADD, ADD, 3, COMPUTE, COUNT, 1 << 1)                                             \
    X(NORM, "norm", NORM, SUM, 1, COMPUTE, COUNT, 1 << 0)                                          \
    X(CLIP, "clip", CLIP, SUM, 0, COMPUTE, COUNT, 0)                                               \
    X(UPDATE, "update", UPDATE, UPDATE, 0, COMPUTE, COUNT, 1 << 1 | 1 << 2)                        \
    X(NOTHING, "nothing", COUNT, NONE, 0, COMPUTE, COUNT, 0)

#define MSI_X(op, name, event, cost, passes, stream, phase, sources) MSI_OP_##op,
typedef enum msi_op { MSI_OPS(MSI_X) MSI_OP_COUNT } msi_op;
#undef MSI_X

#define MSI_X(op, name, event, cost, passes, stream, phase, sources)                               \
    {name,   MS_EVENT_##event, MSI_COST_##cost, passes, MS_STREAM_##stream, MS_PHASE_##phase,      \
     sources},
static const struct {
    const char *name;
    ms_event_kind event;
    msi_cost cost;
    uint8_t passes;
    ms_stream_kind stream;
    ms_phase phase;
    uint8_t sources;
} msi_ops[MSI_OP_COUNT] = {MSI_OPS(MSI_X)};
#undef MSI_X

static bool msi_is_again(msi_op op) {
    return op == MSI_OP_RECOMPUTE || op == MSI_OP_REPEAT;
}

static bool msi_calls_layer(msi_op op) {
    return msi_ops[op].phase != MS_PHASE_COUNT;
}

/* A live range: one value in memory, from the instruction that makes it to the last that uses it.
   Those of residents (params, buffers, inputs, optimizer state) come first, one each. */
typedef struct msi_range {
    uint64_t bytes, offset; // the offset counts from the end of the residents
    uint32_t tensor;        // for workspace: a layer
    uint32_t first, last;
    uint32_t idle_first, idle_last; // the uses around the gap from forward to backward, or none
    uint32_t alias_of;              // the range whose memory this one uses after it
    uint32_t block;
    uint8_t role, category;
    bool aliased;  // another range uses this one's memory from its last instruction on
    bool outlives; // it stays valid after the program, for ms_read
} msi_range;

typedef struct msi_operand {
    uint32_t range;
    bool accumulate; // a gradient that already holds a contribution
} msi_operand;

typedef struct msi_instruction {
    uint32_t target; // layer; for ops that call none the tensor, or 0 if it is of none
    uint32_t operand_first;
    uint16_t operand_count;
    uint8_t op;
    bool restores; // a copy that restores state after a recomputation
} msi_instruction;

/* What clipping computes, in device memory. */
typedef struct msi_norm {
    double sum; // of squares
    float scale;
} msi_norm;

/* A block of memory: that of one live range, or of several that alias one another. */
typedef struct msi_block {
    uint64_t bytes;
    uint64_t offset;
    uint32_t first, last; // live range, both ends included
    uint8_t from_top;     // a hint to place it from the top, as gradients pile up while others end
} msi_block;

typedef struct msi_program {
    MSI_LIST(msi_instruction) instructions;
    MSI_LIST(msi_operand) operands;
    MSI_LIST(msi_range) ranges;
    MSI_LIST(msi_block) blocks;    // offsets count from the end of the residents
    MSI_LIST(uint64_t) live_bytes; // per instruction, without the residents
    MSI_LIST(double) measured;     // start and duration of each, in the last timed step
    bool is_measured;              // there was a timed step
    uint32_t forward_end, backward_end;
    uint32_t loss, norm;         // ranges of the loss, and of the norm or MSI_NONE
    uint32_t peak;               // the instruction with the most live bytes
    uint64_t peak_bytes, height; // live bytes there; bytes that the layout takes
    uint64_t activation_peak_bytes;
    double step_us, stall_us; // simulated: the whole step, and how long computing waits for copies
    double recompute_us;
    uint32_t recompute_count;
    bool out_of_memory;
} msi_program;

/* A value with a fixed address: at the start of the arena, on the host, or the trainer's own. */
typedef struct msi_resident {
    uint64_t bytes, offset;
    void *address;
    uint64_t staging; // of an input on the device: offset of its copy in the staging memory
    uint32_t event;   // recorded when that copy may be written again; MSI_NONE: there is no copy
    uint32_t factors; // of a param that learns: index of its factors in the step's memory
    uint32_t tensor;
    msi_role role;
    bool on_host, borrowed;
} msi_resident;

/* Events of a model; those of staged inputs follow. */
enum {
    MSI_EVENT_COMPUTE, // the end of what was enqueued before a copy
    MSI_EVENT_COPY,    // the end of a copy that the host waits for
    MSI_EVENT_IN,      // the end of the last COPY_IN
    MSI_EVENT_OUT,     // the end of the last COPY_OUT
    MSI_EVENT_VERDICT, // the end of the copy of a verdict to the host
    MSI_EVENT_COUNT
};

/* Device memory that each step has: the state of an eval, then that of a step, MSI_STATE_BYTES
   each, then the factors of the updates, one after the other. */
enum { MSI_STATE_BYTES = 64, MSI_STATES_BYTES = 128 };

/* A recording of a step: of the first micro-batch, one in the middle, the last, or all in one. */
enum { MSI_RECORDING_FIRST = 1, MSI_RECORDING_LAST = 2, MSI_RECORDING_COUNT = 4 };

typedef struct msi_recording {
    void *handle;
    uint64_t made_for; // msi_recording_key when it was made
    bool warm;         // such a step has run once without a recording
} msi_recording;

/* Debug mode: memory beside a store. Callbacks run on the stage, which has two halves and a tail,
   in device memory, and once more on the host for tensors that stay there. */
enum { MSI_PLACE_COUNT = 2 };

typedef struct msi_debug {
    void *stage[MSI_PLACE_COUNT];
    uint64_t half_bytes[MSI_PLACE_COUNT], tail_bytes[MSI_PLACE_COUNT], stage_bytes[MSI_PLACE_COUNT];
    uint8_t *shadow; // a copy of everything that the store has, on the host
    uint8_t *images; // copies of a half
    uint8_t *made;   // what forward has made in this step: the values of the tensors,
    uint64_t *made_at;
    uint8_t *is_made;
    struct msi_trial *trial; // of the callback that is checked
    uint64_t shadow_bytes, image_bytes, images_bytes, made_bytes, trial_bytes;
    uint32_t tensor_count;
    uint32_t turn; // the half that was used last
} msi_debug;

/* Where values are: one for all plans of a wrap. */
typedef struct msi_store {
    MSI_LIST(msi_resident) residents;
    uint32_t *resident_of; // per tensor: index of its value, whose other roles follow; or MSI_NONE
    uint64_t resident_bytes, transient_bytes; // their sum is the arena
    uint64_t reserved_bytes; // the first of resident_bytes: the backend's workspace, the step
    uint64_t host_bytes, borrowed_bytes;
    uint64_t staging_bytes; // after host_bytes: the step, its verdict, inputs
    uint64_t step_bytes;    // of the step's own memory: states and factors
    uint32_t event_count;
    void *memory;     // of the residents; and of the transient values, if that is not shared
    void *transient;  // memory of the transient values; NULL: a shared arena has them
    uint8_t *host;    // tensors on the host, then staging
    uint8_t *step;    // in device memory
    msi_debug *debug; // NULL: the model is not in debug mode
    uint32_t micro_count;
} msi_store;

/* What a plan does with one tensor. A plan is an array of these, one per tensor, and nothing else:
   plans with equal decisions are equal. */
typedef struct msi_tensor_decision {
    /* Of a value. 0: it is kept for backward. n: it is not; the n-th pass of recomputations brings
       it back to stay. Earlier passes may make it on the way to other values, and drop it again. */
    uint32_t pass;
    /* Of a param: the layer after whose backward it is updated; MSI_NONE: it is updated after the
       whole backward; MSI_AT_END: so too, although it could be updated inside backward. */
    uint32_t update_after;
} msi_tensor_decision;

static const uint32_t MSI_AT_END = UINT32_MAX - 1;

typedef struct msi_plan {
    struct msi_plan *next;        // of the plans for other sizes, the last used first
    int64_t sizes[MS_LIMIT_AXES]; // of the axes that it was made for
    msi_tensor_decision *decisions;
    uint64_t budget_bytes, plain_bytes, arena_bytes;
    uint64_t plain_live_bytes; // largest sum of live bytes of the plain plan
    int64_t early_freed_bytes; // by how much updates inside backward lower it, without new drops
    uint64_t drops_live_bytes; // largest sum with all drops and late updates; 0: none
    msi_program train, eval;
    double plain_step_us;
    msi_recording recordings[MSI_RECORDING_COUNT];
} msi_plan;

struct ms_arena {
    ms_backend backend;
    ms_allocator allocator;
    void *memory;
    uint64_t bytes;
    const ms_model *user; // the model whose values it holds
    uint32_t references;
};

typedef enum msi_goal {
    MSI_GOAL_PLAIN,
    MSI_GOAL_BUDGET, // or the smallest, if nothing fits
    MSI_GOAL_TRY,    // the same, but the smallest will not run, and is not laid out
    MSI_GOAL_ANY,    // whether something fits: the plan will not run
    MSI_GOAL_SMALLEST,
    MSI_GOAL_FOLLOW // the decisions of another plan
} msi_goal;

/* What plans may use, and who decided that. */
typedef struct msi_choice {
    ms_mode mode;
    ms_decision_source source;
    uint32_t techniques; // mask
} msi_choice;

/* What the step under way has run: nothing, forward, or the backward of its last micro-batch. */
typedef enum msi_stage { MSI_STAGE_IDLE, MSI_STAGE_FORWARD, MSI_STAGE_BACKWARD } msi_stage;

/* Empirical profiling: what the steps after ms_wrap are for. */
typedef enum msi_warmup {
    MSI_WARMUP_COLD,   // not timed: what is slow only once is no sample
    MSI_WARMUP_SAMPLE, // timed
    MSI_WARMUP_PLAN,   // the model is planned again before this step
    MSI_WARMUP_AGAIN,  // by the new plan, not timed
    MSI_WARMUP_SHOW,   // timed, as the timeline of that plan
    MSI_WARMUP_DONE
} msi_warmup;

/* Series of samples: three of each layer, and one for each way in which the library moves bytes. A
   sample is the time of all that ran in one step, divided by its output elements or its bytes. */
typedef struct msi_timing {
    msi_warmup stage;
    uint32_t wanted, sample_count; // samples
    uint32_t series_count;
    double *us, *amount; // per series, in the step under way
    double *samples;     // per series: `wanted` of them, the first sample_count taken; 0: none
    double begin_us;     // of the step
    double overhead_us;  // of timing an instruction
} msi_timing;

/* What determines the times of instructions: the device to plan for, and what was measured. */
typedef struct msi_costs {
    ms_hardware hardware;                // with speeds that are not known filled in
    bool has_copies;                     // inputs and verdicts are copied on streams of their own
    bool tf32;                           // ms_config.tf32
    double bytes_per_us[MSI_COST_COUNT]; // measured, of the costs by bytes; 0: not measured
    ms_time_source source;               // of the times of the layers
} msi_costs;

/* Where the description of that device comes from. */
typedef struct msi_sources {
    ms_hardware given; // by ms_set_hardware, for the next ms_wrap
    bool is_given;
    const char *given_fault; // why ms_set_hardware refused what came last; NULL: it did not
    ms_hardware profile;     // the speeds in the profile that was loaded
    bool has_profile;
    ms_hardware reported; // the speeds that ms_hardware_report measured
} msi_sources;

/* What the last ms_wrap or ms_detach was asked for, or the one that is planning now. */
typedef struct msi_wrapped {
    msi_plan *largest; // the plan for the largest sizes, which the list of plans has too
    msi_goal goal;
    msi_choice choice;
    bool changed; // something has been set since that takes effect with the next ms_wrap
} msi_wrapped;

/* Where the verdict of the device on the loss and on the norm of the gradients is. */
typedef enum msi_verdict_stage {
    MSI_VERDICT_NONE,      // the host knows the last one
    MSI_VERDICT_ON_DEVICE, // there is one that the host has not asked for
    MSI_VERDICT_COPIED     // its copy to the host is enqueued, and the host has not read it yet
} msi_verdict_stage;

/* The step under way, or an eval, and all that it runs on. */
typedef struct msi_run {
    msi_store *store;
    msi_plan *plan;             // the one in force, at the head of the list
    ms_arena *arena;            // shared with other models; NULL: its own
    msi_timing *timing;         // NULL: nothing is timed
    const msi_program *program; // the one that runs, or ran last
    uint32_t position;          // instructions of it that are done
    uint32_t updates_done;      // of the step that is under way
    uint32_t micro;             // micro-batches of it that are done
    uint64_t step;              // completed updates
    float step_factor;          // of the gradient of the loss, in this step
    msi_stage stage;
    msi_verdict_stage verdict;
    ms_step_state halt; // of a halted step that no function has returned to the trainer yet
    uint64_t epoch;     // changes whenever recordings become invalid
    bool all_written;   // every input and param that layers read
    bool busy;          // inside a callback of a layer, or of an update
    const char *visits; // the function whose callback, which is no layer's, runs; NULL: none does
    bool recording;     // what is enqueued is recorded, and does not run
    bool state_is_old;  // buffers hold the older values that a recomputation needs
    bool failed;        // params may be wrong, or the device unusable: no step until ms_wrap
    ms_nonfinite nonfinite; // debug mode: the first in this step
} msi_run;

/* What callbacks see of the operands of a layer: by group a view for each slot that there can be.
   Views beyond the count of a group are zero. */
typedef struct msi_views {
    ms_view of[MSI_GROUP_WORKSPACE][MSI_MAX_SLOTS];
    uint8_t count[MSI_GROUP_WORKSPACE];
} msi_views;

/* What went wrong last. */
typedef struct msi_errors {
    ms_result broken; // of ms_create: the model only carries this error and its text
    ms_result sticky; // of functions that cannot return theirs: the first that ms_wrap has to
    bool tolerant;    // errors are logged as warnings
    uint32_t count;
    char text[MSI_ERROR_BYTES], sticky_text[MSI_ERROR_BYTES];
} msi_errors;

struct ms_model {
    ms_model *self;   // for msi_enter
    ms_config config; // defaults resolved
    void *device;     // state of the backend, or its user
    ms_optimizer_desc optimizer;
    float loss_factor;
    msi_graph graph;
    msi_costs costs;
    msi_sources sources;
    msi_wrapped wrapped;
    msi_run run;
    msi_views views;
    msi_errors errors;
};

// ------------------------------------------------------------------------------------------------
// >>names  of what is enumerated; shapes and matrices

#define MSI_X(constant, text) text,
static const char *const msi_kind_names[] = {MSI_KINDS(MSI_X)};
static const char *const msi_result_texts[] = {MEMSCALE_RESULTS(MSI_X)};
static const char *const msi_mode_names[] = {MEMSCALE_MODES(MSI_X)};
static const char *const msi_source_names[] = {MEMSCALE_DECISION_SOURCES(MSI_X)};
static const char *const msi_category_names[] = {MEMSCALE_CATEGORIES(MSI_X)};
static const char *const msi_time_source_names[] = {MEMSCALE_TIME_SOURCES(MSI_X)};
#undef MSI_X

#define MSI_X(dtype, name, bytes) name,
static const char *const msi_dtype_names[] = {MEMSCALE_DTYPES(MSI_X)};
#undef MSI_X

#define MSI_X(constant, text) #constant,
static const char *const msi_result_names[] = {MEMSCALE_RESULTS(MSI_X)};
#undef MSI_X

#define MSI_X(group, field, limit) #field,
static const char *const msi_group_names[] = {MSI_GROUPS(MSI_X)};
#undef MSI_X

/* Defines a public function that looks up a value of an enum in one of these tables. */
#define MSI_NAME_FUNCTION(function, type, names)                                                   \
    MEMSCALE_API const char *function(type value) {                                                \
        return (unsigned)value < sizeof names / sizeof *names ? names[value] : "?";                \
    }

MSI_NAME_FUNCTION(ms_result_name, ms_result, msi_result_names)
MSI_NAME_FUNCTION(ms_result_text, ms_result, msi_result_texts)
MSI_NAME_FUNCTION(ms_dtype_name, ms_dtype, msi_dtype_names)
MSI_NAME_FUNCTION(ms_mode_name, ms_mode, msi_mode_names)
MSI_NAME_FUNCTION(ms_decision_source_name, ms_decision_source, msi_source_names)
MSI_NAME_FUNCTION(ms_time_source_name, ms_time_source, msi_time_source_names)
MSI_NAME_FUNCTION(ms_category_name, ms_category, msi_category_names)

MEMSCALE_API uint64_t ms_dtype_bytes(ms_dtype dtype) {
#define MSI_X(dtype, name, bytes) bytes,
    static const uint8_t all[] = {MEMSCALE_DTYPES(MSI_X)};
#undef MSI_X
    return (unsigned)dtype < MS_DTYPE_COUNT ? all[dtype] : 0;
}

/* The name of the op that calls layers in this phase. */
static const char *msi_phase_name(ms_phase phase) {
    for (int op = 0; op < MSI_OP_COUNT && phase != MS_PHASE_COUNT; op++) {
        if (msi_ops[op].phase == phase) {
            return msi_ops[op].name;
        }
    }
    return "?";
}

/* What differs between techniques, in the order of ms_technique: the switch in ms_config; the name;
   the tensors that it can be set on, as a mask of kinds and in words; the modes in which plans may
   use it while its switch is at DEFAULT; and whether this version implements it. */
#define MSI_TECHNIQUES(X)                                                                          \
    X(MS_TECHNIQUE_CHECKPOINTING, checkpointing, "checkpointing", MSI_MADE_KINDS,                  \
      "an activation or a saved tensor: only these are recomputed", MSI_FROM_CONSERVATIVE, true)   \
    X(MS_TECHNIQUE_EARLY_UPDATE, early_update, "early update", MSI_PARAM_KIND,                     \
      "a param: only params are updated", MSI_FROM_CONSERVATIVE, true)                             \
    X(MS_TECHNIQUE_OFFLOADING, offloading, "offloading", MSI_MADE_KINDS | MSI_PARAM_KIND,          \
      "a param, an activation or a saved tensor", MSI_FROM_BALANCED, false)                        \
    X(MS_TECHNIQUE_TILING, tiling, "tiling", MSI_MADE_KINDS, "an activation or a saved tensor",    \
      MSI_FROM_AGGRESSIVE, false)                                                                  \
    X(MS_TECHNIQUE_MIXED_PRECISION, mixed_precision, "mixed precision",                            \
      MSI_MADE_KINDS | MSI_PARAM_KIND, "a param, an activation or a saved tensor",                 \
      MSI_FROM_AGGRESSIVE, false)                                                                  \
    X(MS_TECHNIQUE_OPTIMIZER_8BIT, optimizer_8bit, "8-bit optimizer", MSI_PARAM_KIND,              \
      "a param: only params have optimizer state", MSI_FROM_AGGRESSIVE, false)

enum {
    MSI_MADE_KINDS = 1 << MSI_KIND_ACTIVATION | 1 << MSI_KIND_SAVED,
    MSI_PARAM_KIND = 1 << MSI_KIND_PARAM,
    MSI_FROM_AGGRESSIVE = 1 << MS_MODE_AGGRESSIVE,
    MSI_FROM_BALANCED = MSI_FROM_AGGRESSIVE | 1 << MS_MODE_BALANCED,
    MSI_FROM_CONSERVATIVE = MSI_FROM_BALANCED | 1 << MS_MODE_CONSERVATIVE
};

/* This compiles only if every technique has a row, in the order of ms_technique. */
#define MSI_X(technique, ...) technique##_ROW,
enum { MSI_TECHNIQUES(MSI_X) MSI_TECHNIQUE_ROWS };
#undef MSI_X
#define MSI_X(technique, ...) &&(int)technique == (int)technique##_ROW
typedef char msi_technique_rows_match
    [(int)MSI_TECHNIQUE_ROWS == (int)MS_TECHNIQUE_COUNT MSI_TECHNIQUES(MSI_X) ? 1 : -1];
#undef MSI_X

typedef struct msi_technique {
    const char *name;
    const char *needed; // the tensors that it can be set on, in words
    uint32_t kinds;     // the same as a mask of 1 << msi_kind
    uint32_t modes;     // a mask of 1 << ms_mode
} msi_technique;

static const msi_technique msi_techniques[MS_TECHNIQUE_COUNT] = {
#define MSI_X(technique, field, name, kinds, needed, modes, built) {name, needed, kinds, modes},
    MSI_TECHNIQUES(MSI_X)
#undef MSI_X
};

#define MSI_CHECKPOINTING (1u << MS_TECHNIQUE_CHECKPOINTING)
#define MSI_EARLY_UPDATE  (1u << MS_TECHNIQUE_EARLY_UPDATE)
#define MSI_OFFLOADING    (1u << MS_TECHNIQUE_OFFLOADING)
#define MSI_MIXED         (1u << MS_TECHNIQUE_MIXED_PRECISION)
#define MSI_ANY           ((1u << MS_TECHNIQUE_COUNT) - 1)

/* The techniques that this version implements. */
#define MSI_X(technique, field, name, kinds, needed, modes, built) | (built ? 1 << technique : 0)
enum { MSI_BUILT = 0 MSI_TECHNIQUES(MSI_X) };
#undef MSI_X

static ms_switch msi_switch_of(const ms_config *c, ms_technique technique) {
#define MSI_X(technique, field, name, kinds, needed, modes, built) c->field,
    const ms_switch all[] = {MSI_TECHNIQUES(MSI_X)};
#undef MSI_X
    return all[technique];
}

MEMSCALE_API const char *ms_technique_name(ms_technique technique) {
    return (unsigned)technique < MS_TECHNIQUE_COUNT ? msi_techniques[technique].name : "?";
}

MEMSCALE_API ms_shape ms_shape1(int64_t d0) {
    ms_shape shape = {{d0, 0, 0, 0, 0, 0}, 1, {0, 0, 0, 0, 0, 0}, 0};
    return shape;
}

MEMSCALE_API ms_shape ms_shape2(int64_t d0, int64_t d1) {
    ms_shape shape = {{d0, d1, 0, 0, 0, 0}, 2, {0, 0, 0, 0, 0, 0}, 0};
    return shape;
}

MEMSCALE_API ms_shape ms_shape3(int64_t d0, int64_t d1, int64_t d2) {
    ms_shape shape = {{d0, d1, d2, 0, 0, 0}, 3, {0, 0, 0, 0, 0, 0}, 0};
    return shape;
}

MEMSCALE_API ms_shape ms_shape4(int64_t d0, int64_t d1, int64_t d2, int64_t d3) {
    ms_shape shape = {{d0, d1, d2, d3, 0, 0}, 4, {0, 0, 0, 0, 0, 0}, 0};
    return shape;
}

MEMSCALE_API uint64_t ms_shape_count(const ms_shape *shape) {
    bool good = shape && shape->rank >= 0 && shape->rank <= MS_LIMIT_RANK;
    uint64_t count = 1;
    for (int i = 0; good && i < shape->rank; i++) {
        good = shape->dim[i] > 0 && msi_multiply(count, (uint64_t)shape->dim[i], &count);
    }
    return good ? count : 0;
}

MEMSCALE_API ms_shape ms_along(ms_shape shape, int dim, ms_axis axis) {
    const uint32_t model = axis.id >> MSI_AXIS_BITS;
    const uint32_t index = (axis.id & ((1u << MSI_AXIS_BITS) - 1)) - 1;
    if (dim < 0 || dim >= shape.rank || dim >= MS_LIMIT_RANK || index >= MS_LIMIT_AXES ||
        (shape.axes_of && shape.axes_of != model)) {
        shape.rank = -1;
        return shape;
    }
    shape.axes[dim] = (uint8_t)(shape.axes[dim] | 1u << index);
    shape.axes_of = model;
    return shape;
}

MEMSCALE_API ms_matrix ms_matrix_of(const ms_view *view) {
    ms_matrix matrix;
    memset(&matrix, 0, sizeof matrix);
    const uint64_t count = view ? ms_shape_count(&view->shape) : 0;
    if (count > 0) {
        matrix.data = view->data;
        matrix.dtype = view->dtype;
        matrix.cols = view->shape.rank > 0 ? view->shape.dim[view->shape.rank - 1] : 1;
        matrix.rows = (int64_t)count / matrix.cols;
        matrix.stride = matrix.cols;
    }
    return matrix;
}

MEMSCALE_API ms_matrix ms_transpose(ms_matrix matrix) {
    matrix.transposed = !matrix.transposed;
    return matrix;
}

// ------------------------------------------------------------------------------------------------
// >>log  errors and messages

/* Before and after a function calls back: meanwhile the plan, which it goes through, must stay. The
   model may be const, since only this note changes. Returns what msi_leave takes. */
static const char *msi_enter(const ms_model *m, const char *function) {
    const char *outer = m->run.visits;
    m->self->run.visits = function;
    return outer;
}

static void msi_leave(const ms_model *m, const char *outer) {
    m->self->run.visits = outer;
}

static const char *const msi_log_callback = "ms_config.log";

/* What goes wrong inside the log callback is not logged. */
MEMSCALE_PRINTF(4, 5)
static void msi_log(const ms_model *m, ms_log_level level, const char *tag, const char *format,
                    ...) {
    if (!m->config.log || m->run.visits == msi_log_callback) {
        return;
    }
    char text[MSI_ERROR_BYTES];
    va_list args;
    va_start(args, format);
    msi_vformat(text, sizeof text, format, args);
    va_end(args);
    const char *outer = msi_enter(m, msi_log_callback);
    m->config.log(level, tag, text, m->config.log_user);
    msi_leave(m, outer);
}

MEMSCALE_PRINTF(3, 4)
static ms_result msi_fail(ms_model *m, ms_result result, const char *format, ...) {
    char text[MSI_ERROR_BYTES]; // the arguments may point into m->errors
    va_list args;
    if (m->errors.broken != MS_RESULT_OK) {
        return m->errors.broken;
    }
    va_start(args, format);
    msi_vformat(text, sizeof text, format, args);
    va_end(args);
    memcpy(m->errors.text, text, sizeof text);
    m->errors.count++;
    msi_log(m, m->errors.tolerant ? MS_LOG_WARNING : MS_LOG_ERROR, "error", "%s: %s",
            ms_result_name(result), text);
    memcpy(m->errors.text, text, sizeof text); // the callback may have caused another one
    return result;
}

/* An error in a callback of the model: the function would change or free what its caller uses. */
static ms_result msi_check_called(ms_model *m, const char *function) {
    return m->run.busy
               ? msi_fail(m, MS_RESULT_ORDER,
                          "%s: called from a callback of a layer: call it between steps", function)
           : m->run.visits
               ? msi_fail(m, MS_RESULT_ORDER,
                          "%s: called from the callback of %s, which needs the model as it is: "
                          "call it after that has returned",
                          function, m->run.visits)
               : MS_RESULT_OK;
}

static ms_result msi_fail_memory(ms_model *m, const char *what, uint64_t bytes) {
    return msi_fail(m, MS_RESULT_OUT_OF_MEMORY, "no memory for %s (%llu bytes)", what,
                    (unsigned long long)bytes);
}

/* The error of ms_create that a model carries, if any; and of one that is NULL. */
static ms_result msi_made(const ms_model *m) {
    return m ? m->errors.broken : MS_RESULT_INVALID;
}

/* The result for a wrong argument. */
static ms_result msi_invalid(const ms_model *m) {
    return msi_made(m) != MS_RESULT_OK ? msi_made(m) : MS_RESULT_INVALID;
}

/* A wrong argument of an API function, whose name the text begins with. */
static ms_result msi_fail_argument(ms_model *m, const char *function, const char *what) {
    return m ? msi_fail(m, MS_RESULT_INVALID, "%s: %s", function, what) : MS_RESULT_INVALID;
}

/* Notes the error of a function that cannot return it; the first one stays. Before there is a plan,
   every ms_wrap returns it; afterwards the next one does. */
static void msi_stick(ms_model *m, ms_result result) {
    if (m->errors.sticky == MS_RESULT_OK) {
        m->errors.sticky = result;
        memcpy(m->errors.sticky_text, m->errors.text, sizeof m->errors.text);
    }
}

#define MSI_STICK(m, ...)                                                                          \
    ((m)->errors.sticky == MS_RESULT_OK || (m)->run.plan ? msi_stick(m, msi_fail(m, __VA_ARGS__))  \
                                                         : (void)0)

// ------------------------------------------------------------------------------------------------
// >>text  for the log and the listings: sizes, times and names as text, sums of decisions

typedef struct msi_size_text {
    char text[32];
} msi_size_text;

/* A size in the unit that suits it, rounded up or down to hundredths. */
static msi_size_text msi_round_size(const char *sign, uint64_t bytes, bool up) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    msi_size_text s;
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024.0 && unit < 6; unit++) {
        value /= 1024.0;
    }
    const double exact = value * 100.0; // below 102400, or 1600 EiB
    const double whole = (double)(uint32_t)exact;
    value = unit ? (up && whole < exact ? whole + 1.0 : whole) / 100.0 : value;
    msi_format(s.text, sizeof s.text, unit ? "%s%.2f %s" : "%s%.0f %s", sign, value, units[unit]);
    return s;
}

/* What is needed. Rounded up, so that a budget that is copied from a text suffices. */
static msi_size_text msi_size(uint64_t bytes) {
    return msi_round_size("", bytes, true);
}

/* What there is. Rounded down, so that what is copied from a text does not ask for more. */
static msi_size_text msi_size_down(uint64_t bytes) {
    return msi_round_size("", bytes, false);
}

/* A difference of two sizes. */
static msi_size_text msi_signed_size(int64_t bytes) {
    return bytes < 0 ? msi_round_size("-", 0 - (uint64_t)bytes, true) : msi_size((uint64_t)bytes);
}

static msi_size_text msi_time(double us) {
    static const char *const units[] = {"us", "ms", "s"};
    msi_size_text s;
    int unit = 0;
    for (; us >= 1000.0 && unit < 2; unit++) {
        us /= 1000.0;
    }
    msi_format(s.text, sizeof s.text, "%.*f %s",
               us < 10.0    ? 2
               : us < 100.0 ? 1
                            : 0,
               us, units[unit]);
    return s;
}

/* What was decided about a technique, over all layers. */
typedef struct msi_technique_total {
    uint32_t layers; // the number of layers that it is applied to
    double added_us, refused_us;
    const ms_rule *rule; // of the first layer
    bool differs;        // other layers have other rules
} msi_technique_total;

static void msi_add_decision(msi_technique_total *total, const ms_decision *d) {
    total->layers += d->is_applied;
    total->added_us += d->added_us;
    total->refused_us += d->refused_us;
    total->rule = total->rule ? total->rule : d->rule;
    total->differs |= d->rule != total->rule;
}

typedef struct msi_printer {
    ms_text_fn write;
    void *user;
} msi_printer;

MEMSCALE_PRINTF(2, 3)
static void msi_print(const msi_printer *out, const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    const int length = msi_vformat(text, sizeof text, format, args);
    va_end(args);
    if (length > 0) {
        const size_t full = (size_t)length;
        out->write(text, full < sizeof text ? full : sizeof text - 1, out->user);
    }
}

/* A name of any length, padded to a width. */
static void msi_print_name(const msi_printer *out, const char *name, int width) {
    const int length = (int)strlen(name);
    out->write(name, (size_t)length, out->user);
    msi_print(out, "%*s", length < width ? width - length : 0, "");
}

static bool msi_is_digit(char c) {
    return c >= '0' && c <= '9';
}

/* The length of the digits, or of all else up to the next digit, that a name starts with. */
static size_t msi_name_piece(const char *name) {
    size_t length = 0;
    while (name[length] && msi_is_digit(name[length]) == msi_is_digit(name[0])) {
        length++;
    }
    return length;
}

/* Mixes a name without its numbers into a hash (Fowler, Noll and Vo, FNV-1a). */
static uint64_t msi_mix_name(uint64_t hash, const char *name) {
    for (; *name; name += msi_name_piece(name)) {
        const size_t length = msi_is_digit(*name) ? 1 : msi_name_piece(name);
        for (size_t i = 0; i < length; i++) {
            const uint8_t c = msi_is_digit(*name) ? (uint8_t)'0' : (uint8_t)name[i];
            hash = (hash ^ c) * UINT64_C(0x100000001b3);
        }
    }
    return (hash ^ 0xffu) * UINT64_C(0x100000001b3);
}

/* Prints two names that differ in their numbers alone as one: "h0..11.ln" of "h0.ln" and "h11.ln".
   Returns its length, also without an `out`. */
static size_t msi_print_names(const msi_printer *out, const char *first, const char *last) {
    size_t length = 0;
    while (*first) {
        const size_t a = msi_name_piece(first), b = msi_name_piece(last);
        const bool range = msi_is_digit(*first) && (a != b || memcmp(first, last, a) != 0);
        if (out) {
            out->write(first, a, out->user);
            msi_print(out, "%s", range ? ".." : "");
            out->write(last, range ? b : 0, out->user);
        }
        length += a + (range ? 2 + b : 0);
        first += a;
        last += b;
    }
    return length;
}

/* Bytes of the UTF-8 character that starts here; 0: it is not valid UTF-8 (RFC 3629, section 4). */
static int msi_utf8_length(const uint8_t *s) {
    static const struct {
        uint8_t first, last, low, high; // range of the first byte, range of the second
        int length;
    } forms[] = {
        {0x00, 0x7f, 0, 0, 1},       {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4}};
    for (int i = 0; i < 9; i++) {
        if (s[0] >= forms[i].first && s[0] <= forms[i].last) {
            bool good = forms[i].length == 1 || (s[1] >= forms[i].low && s[1] <= forms[i].high);
            for (int k = 2; k < forms[i].length && good; k++) {
                good = (s[k] & 0xc0) == 0x80;
            }
            return good ? forms[i].length : 0;
        }
    }
    return 0;
}

/* A name in quotes, for JSON or for Prometheus, which has no \u and takes control characters as
   they are. Bytes that are not valid UTF-8 become U+FFFD. */
static void msi_print_quoted(const msi_printer *out, const char *text, bool json) {
    out->write("\"", 1, out->user);
    for (const char *c = text; *c; c++) {
        const int length = msi_utf8_length((const uint8_t *)c);
        if (length == 0) {
            out->write("\xef\xbf\xbd", 3, out->user);
        } else if (*c == '"' || *c == '\\' || *c == '\n') {
            msi_print(out, "\\%c", *c == '\n' ? 'n' : *c);
        } else if (json && length == 1 && ((uint8_t)*c < 0x20 || *c == 0x7f)) {
            msi_print(out, "\\u%04x", (unsigned)(uint8_t)*c);
        } else {
            out->write(c, (size_t)length, out->user);
            c += length - 1;
        }
    }
    out->write("\"", 1, out->user);
}

/* A number >= 0, with a point in every locale; NaN and what is out of range become 0. */
static void msi_print_number(const msi_printer *out, double value, int digits) {
    double scale = 1.0;
    for (int i = 0; i < digits; i++) {
        scale *= 10.0;
    }
    const double scaled = value * scale + 0.5;
    const uint64_t units = scaled >= 0.0 && scaled < 1.8e19 ? (uint64_t)scaled : 0;
    const uint64_t whole = (uint64_t)scale;
    msi_print(out, "%llu.%0*llu", (unsigned long long)(units / whole), digits,
              (unsigned long long)(units % whole));
}

// ------------------------------------------------------------------------------------------------
// >>memory  device memory and the copies of values

static int msi_cpu_memory_alloc(void *user, const ms_allocator *host, uint64_t bytes,
                                void **device) {
    (void)user;
    const uint64_t whole = bytes + 2 * MSI_ALIGNMENT;
    uint8_t *memory = whole > bytes ? (uint8_t *)msi_alloc(host, whole) : NULL;
    *device = NULL;
    if (!memory) {
        return 1;
    }
    const uintptr_t start = (uintptr_t)memory + sizeof(void *);
    uint8_t *aligned = memory + (msi_align((uint64_t)start) - (uintptr_t)memory);
    memcpy(aligned - sizeof(void *), &memory, sizeof(void *)); // for msi_cpu_memory_release
    *device = aligned;
    return 0;
}

static void msi_cpu_memory_release(void *user, const ms_allocator *host, void *device,
                                   uint64_t bytes) {
    (void)user;
    void *memory;
    memcpy(&memory, (uint8_t *)device - sizeof(void *), sizeof(void *));
    msi_release(host, memory, bytes + 2 * MSI_ALIGNMENT);
}

/* Host memory for copies: the backend's, or the allocator's. */
static int msi_backend_host_alloc(const ms_backend *b, const ms_allocator *allocator,
                                  uint64_t bytes, void **memory) {
    return b->host_alloc ? b->host_alloc(b->user, allocator, bytes, memory)
                         : msi_cpu_memory_alloc(NULL, allocator, bytes, memory);
}

static void msi_backend_host_release(const ms_backend *b, const ms_allocator *allocator,
                                     void *memory, uint64_t bytes) {
    if (memory && b->host_release) {
        b->host_release(b->user, allocator, memory, bytes);
    } else if (memory) {
        msi_cpu_memory_release(NULL, allocator, memory, bytes);
    }
}

/* The result for an error number of the backend. */
static ms_result msi_device(ms_model *m, int error, const char *what) {
    const ms_backend *b = &m->config.backend;
    if (error == 0) {
        return MS_RESULT_OK;
    }
    const char *text = b->error_text ? b->error_text(b->user, error) : NULL;
    return msi_fail(m, MS_RESULT_BACKEND, "backend %s: %s failed with error %d%s%s", b->name, what,
                    error, text ? ": " : "", text ? text : "");
}

static ms_result msi_fail_device_memory(ms_model *m, uint64_t bytes, const char *what, int error) {
    const ms_backend *b = &m->config.backend;
    ms_hardware hardware;
    memset(&hardware, 0, sizeof hardware);
    b->hardware(b->user, &hardware);
    return msi_fail(m, MS_RESULT_OUT_OF_MEMORY,
                    "backend %s has no %s for %s (error %d; %s of %s are free): ask for less with "
                    "ms_set_budget, or free what else is on the device",
                    b->name, msi_size(bytes).text, what, error,
                    msi_size_down(hardware.free_bytes).text,
                    msi_size_down(hardware.total_bytes).text);
}

static ms_result msi_device_alloc(ms_model *m, uint64_t bytes, void **memory) {
    const ms_backend *b = &m->config.backend;
    *memory = NULL;
    const int error = bytes > 0 ? b->memory_alloc(b->user, &m->config.allocator, bytes, memory) : 0;
    if (error == 0 && (*memory || bytes == 0)) {
        return MS_RESULT_OK;
    }
    *memory = NULL;
    return msi_fail_device_memory(m, bytes, "the arena", error);
}

static ms_result msi_host_alloc(ms_model *m, uint64_t bytes, uint8_t **memory) {
    void *made = NULL;
    const int error =
        bytes > 0 ? msi_backend_host_alloc(&m->config.backend, &m->config.allocator, bytes, &made)
                  : 0;
    *memory = (uint8_t *)made;
    return error == 0 && (made || bytes == 0)
               ? MS_RESULT_OK
               : msi_fail_memory(m, "tensors on the host and the staging of copies", bytes);
}

static void msi_host_release(ms_model *m, uint8_t *memory, uint64_t bytes) {
    msi_backend_host_release(&m->config.backend, &m->config.allocator, memory, bytes);
}

/* Whether host and device see each other's writes at once, without a copy or a wait. */
static bool msi_is_direct(const ms_model *m) {
    return m->config.backend.device_is_host && !m->config.backend.is_asynchronous;
}

static ms_result msi_synchronize(ms_model *m) {
    const ms_backend *b = &m->config.backend;
    return b->is_asynchronous ? msi_device(m, b->synchronize(m->device), "waiting for the device")
                              : MS_RESULT_OK;
}

/* Issues a copy on its own stream, after what was enqueued to compute before; the event is the end
   of the copy. What is enqueued next runs at the same time. */
static int msi_issue_copy(ms_model *m, ms_stream_kind stream, void *target, const void *source,
                          uint64_t bytes, uint32_t event) {
    const ms_backend *b = &m->config.backend;
    int error = 0;
    if (b->is_asynchronous) {
        error = b->record(m->device, MS_STREAM_COMPUTE, MSI_EVENT_COMPUTE);
        error = error ? error : b->wait(m->device, stream, MSI_EVENT_COMPUTE);
    }
    if (!error) {
        error = stream == MS_STREAM_TO_DEVICE ? b->copy_in(m->device, target, source, bytes)
                                              : b->copy_out(m->device, target, source, bytes);
    }
    return error || !b->is_asynchronous ? error : b->record(m->device, stream, event);
}

/* The source must not change before the event. */
static ms_result msi_issue_copy_in(ms_model *m, void *device, const void *host, uint64_t bytes,
                                   uint32_t event) {
    const int error = msi_issue_copy(m, MS_STREAM_TO_DEVICE, device, host, bytes, event);
    return msi_device(m, error, "copy to the device");
}

/* What is enqueued from now on runs after the last record of an event. */
static ms_result msi_wait_on_device(ms_model *m, uint32_t event) {
    const ms_backend *b = &m->config.backend;
    return b->is_asynchronous
               ? msi_device(m, b->wait(m->device, MS_STREAM_COMPUTE, event), "waiting for a copy")
               : MS_RESULT_OK;
}

/* Copies to the device after what was enqueued before; what is enqueued next waits for the copy. */
static ms_result msi_copy_in(ms_model *m, void *device, const void *host, uint64_t bytes,
                             uint32_t event) {
    const ms_result result = msi_issue_copy_in(m, device, host, bytes, event);
    return result == MS_RESULT_OK ? msi_wait_on_device(m, event) : result;
}

/* The host may read the copy after the event. */
static ms_result msi_copy_out(ms_model *m, void *host, const void *device, uint64_t bytes,
                              uint32_t event) {
    const int error = msi_issue_copy(m, MS_STREAM_TO_HOST, host, device, bytes, event);
    return msi_device(m, error, "copy to the host");
}

static ms_result msi_wait_on_host(ms_model *m, uint32_t event) {
    const ms_backend *b = &m->config.backend;
    return b->is_asynchronous
               ? msi_device(m, b->wait_on_host(m->device, event), "waiting for a copy")
               : MS_RESULT_OK;
}

/* Memory of the transient values. */
static uint8_t *msi_transient(const msi_run *r) {
    return (uint8_t *)(r->arena ? r->arena->memory : r->store->transient);
}

static void *msi_address(const ms_model *m, const msi_program *p, uint32_t range) {
    return range < m->run.store->residents.count
               ? m->run.store->residents.items[range].address
               : msi_transient(&m->run) + p->ranges.items[range].offset;
}

static bool msi_is_on_host(const msi_store *store, uint32_t range) {
    return range < store->residents.count && store->residents.items[range].on_host;
}

/* Copies between any two of host memory and device memory. A copy from device to device is
   enqueued; others are complete on return. */
static ms_result msi_copy(ms_model *m, void *target, bool target_on_host, const void *source,
                          bool source_on_host, uint64_t bytes) {
    const ms_backend *b = &m->config.backend;
    if (!target_on_host && !source_on_host) {
        return msi_device(m, b->copy(m->device, target, source, bytes), "copy");
    }
    if (target_on_host && source_on_host) {
        memcpy(target, source, (size_t)bytes);
        return MS_RESULT_OK;
    }
    ms_result result = target_on_host ? msi_copy_out(m, target, source, bytes, MSI_EVENT_COPY)
                                      : msi_copy_in(m, target, source, bytes, MSI_EVENT_COPY);
    MSI_THEN(result, msi_wait_on_host(m, MSI_EVENT_COPY));
    if (result != MS_RESULT_OK) { // the caller may free its memory: no copy may still use it
        const msi_errors errors = m->errors;
        (void)msi_synchronize(m);
        m->errors = errors;
    }
    return result;
}

static ms_result msi_fill(ms_model *m, void *target, bool on_host, uint8_t value, uint64_t bytes) {
    if (on_host) {
        memset(target, value, (size_t)bytes);
        return MS_RESULT_OK;
    }
    return msi_device(m, m->config.backend.fill_bytes(m->device, target, value, bytes), "fill");
}

static void msi_asan_poison(const void *memory, uint64_t bytes) {
#ifdef MSI_ASAN
    __asan_poison_memory_region(memory, (size_t)bytes);
#else
    (void)memory, (void)bytes;
#endif
}

static void msi_asan_unpoison(const void *memory, uint64_t bytes) {
#ifdef MSI_ASAN
    __asan_unpoison_memory_region(memory, (size_t)bytes);
#else
    (void)memory, (void)bytes;
#endif
}

/* Opens the model's own state of its backend. */
static bool msi_open(ms_model *m) {
    const ms_backend *b = &m->config.backend;
    ms_open_args args;
    memset(&args, 0, sizeof args);
    args.host = &m->config.allocator;
    args.stream = m->config.stream;
    args.event_count = MSI_EVENT_COUNT;
    args.tf32 = m->config.tf32;
    return msi_device(m, b->open(b->user, &args, &m->device), "opening it for ms_create") ==
           MS_RESULT_OK;
}

/* A shared arena without memory, which its maker alone holds. */
static ms_result msi_make_arena(const ms_backend *backend, const ms_allocator *allocator,
                                ms_arena **arena) {
    ms_arena *made = (ms_arena *)msi_alloc_zeroed(allocator, sizeof *made);
    if (made) {
        made->backend = *backend;
        made->allocator = *allocator;
        made->references = 1;
    }
    *arena = made;
    return made ? MS_RESULT_OK : MS_RESULT_OUT_OF_MEMORY;
}

/* Gives up one reference; the last one frees the arena. */
static void msi_arena_leave(ms_arena *arena) {
    if (!arena || --arena->references > 0) {
        return;
    }
    const ms_allocator allocator = arena->allocator;
    if (arena->memory) {
        if (arena->backend.device_is_host) {
            msi_asan_unpoison(arena->memory, arena->bytes);
        }
        arena->backend.memory_release(arena->backend.user, &allocator, arena->memory, arena->bytes);
    }
    msi_release(&allocator, arena, sizeof *arena);
}

// ------------------------------------------------------------------------------------------------
// >>backend cpu  the arena is host memory

#ifdef _OPENMP
#define MSI_PRAGMA(text) _Pragma(#text)
#define MSI_PARALLEL_FOR(by, when) MSI_PRAGMA(omp parallel for schedule(by) if (when))
#else
#define MSI_PARALLEL_FOR(schedule_by, when)
#endif

enum { MSI_GEMM_M = 64, MSI_GEMM_N = 128, MSI_GEMM_K = 64, MSI_TILE_M = 4, MSI_TILE_N = 32 };

static int64_t msi_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Copies and fills go in chunks. Each thread takes one contiguous range of them, as the loops of a
   trainer do, so that it finds in its cache what it is about to write. */
enum { MSI_CHUNK_BYTES = 16384 };

static int msi_cpu_copy(void *user, void *target, const void *source, uint64_t bytes) {
    (void)user;
    const int64_t end = (int64_t)bytes;
    MSI_PARALLEL_FOR(static, end > 4 * MSI_CHUNK_BYTES)
    for (int64_t i = 0; i < end; i += MSI_CHUNK_BYTES) {
        memcpy((uint8_t *)target + i, (const uint8_t *)source + i,
               (size_t)msi_least(end - i, MSI_CHUNK_BYTES));
    }
    return 0;
}

static int msi_cpu_fill_bytes(void *user, void *device, uint8_t value, uint64_t bytes) {
    (void)user;
    const int64_t end = (int64_t)bytes;
    MSI_PARALLEL_FOR(static, end > 4 * MSI_CHUNK_BYTES)
    for (int64_t i = 0; i < end; i += MSI_CHUNK_BYTES) {
        memset((uint8_t *)device + i, value, (size_t)msi_least(end - i, MSI_CHUNK_BYTES));
    }
    return 0;
}

static int msi_cpu_fill_f32(void *user, void *device, float value, uint64_t count) {
    (void)user;
    float *items = (float *)device;
    for (uint64_t i = 0; i < count; i++) {
        items[i] = value;
    }
    return 0;
}

static int msi_cpu_add_f32(void *user, void *device, const void *source, uint64_t count) {
    (void)user;
    float *items = (float *)device;
    const float *more = (const float *)source;
    const int64_t end = (int64_t)count;
    MSI_PARALLEL_FOR(static, end > 16384)
    for (int64_t i = 0; i < end; i++) {
        items[i] += more[i];
    }
    return 0;
}

/* Eight sums side by side: fast, and the same on any number of threads. */
static int msi_cpu_add_squares_f32(void *user, const void *device, uint64_t count, double *sum) {
    (void)user;
    const float *items = (const float *)device;
    double sums[8] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
    for (uint64_t i = 0; i < count / 8 * 8; i += 8) {
        for (int k = 0; k < 8; k++) {
            sums[k] += (double)items[i + (uint64_t)k] * (double)items[i + (uint64_t)k];
        }
    }
    for (uint64_t i = count / 8 * 8; i < count; i++) {
        sums[0] += (double)items[i] * (double)items[i];
    }
    *sum +=
        ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    return 0;
}

static int msi_cpu_clip_scale(void *user, const double *sum, float limit, float *scale,
                              ms_step_state *step) {
    (void)user;
    *scale = msi_judge_norm(step, *sum, limit);
    return 0;
}

static int msi_cpu_loss(void *user, const void *losses, uint64_t count, double factor,
                        ms_step_state *step) {
    (void)user;
    const float *items = (const float *)losses;
    double sum = 0.0;
    for (uint64_t i = 0; i < count; i++) {
        sum += (double)items[i];
    }
    msi_judge_loss(step, factor * sum);
    return 0;
}

static int msi_cpu_cast(void *user, void *target, ms_dtype to, const void *source, ms_dtype from,
                        uint64_t count) {
    (void)user;
    const int64_t end = (int64_t)count;
    MSI_PARALLEL_FOR(static, end > 16384)
    for (int64_t i = 0; i < end; i++) {
        msi_store_as(target, to, (uint64_t)i, msi_load(source, from, (uint64_t)i));
    }
    return 0;
}

static int msi_cpu_update(void *user, const ms_update_args *args) {
    (void)user;
    const bool halted = args->state_of_step->halted != (uint32_t)MS_HALT_NONE;
    const int64_t count = halted ? 0 : (int64_t)args->count;
    float *value = args->value, *state0 = args->state[0], *state1 = args->state[1];
    const float *gradient = args->gradient;
    const float scale = args->gradient_scale ? *args->gradient_scale : 1.0f; // times 1 is exact
    const ms_update_factors f = *args->factors;
    if (args->kind == MS_OPTIMIZER_ADAMW) {
        MSI_PARALLEL_FOR(static, count > 16384)
        for (int64_t i = 0; i < count; i++) {
            value[i] = msi_adamw_element(&f, value[i], scale * gradient[i], &state0[i], &state1[i]);
        }
        return 0;
    }
    MSI_PARALLEL_FOR(static, count > 16384)
    for (int64_t i = 0; i < count; i++) {
        value[i] = msi_sgd_element(&f, value[i], scale * gradient[i], state0 ? &state0[i] : NULL);
    }
    return 0;
}

/* Copies rows [row, row + rows) and cols [col, col + cols) of op(x) for the inner loop, into strips
   of `width` rows (by_row) or cols, each strip contiguous and padded with zeros. */
static void msi_gemm_pack(const ms_matrix *x, bool by_row, int64_t row, int64_t rows, int64_t col,
                          int64_t cols, int64_t width, float *packed) {
    const int64_t row_stride = x->transposed ? 1 : x->stride;
    const int64_t col_stride = x->transposed ? x->stride : 1;
    const int64_t outer = by_row ? rows : cols, depth = by_row ? cols : rows;
    const int64_t outer_stride = by_row ? row_stride : col_stride;
    const int64_t depth_stride = by_row ? col_stride : row_stride;
    const int64_t first = row * row_stride + col * col_stride;
    for (int64_t strip = 0; strip < outer; strip += width) {
        const int64_t used = msi_least(outer - strip, width);
        for (int64_t d = 0; d < depth; d++) {
            const int64_t at = first + strip * outer_stride + d * depth_stride;
            if (x->dtype == MS_DTYPE_F32) {
                const float *data = (const float *)x->data + at;
                for (int64_t i = 0; i < width; i++) {
                    *packed++ = i < used ? data[i * outer_stride] : 0.0f;
                }
                continue;
            }
            for (int64_t i = 0; i < width; i++) {
                *packed++ = i < used
                                ? msi_load(x->data, x->dtype, (uint64_t)(at + i * outer_stride))
                                : 0.0f;
            }
        }
    }
}

/* sums = a strip of MSI_TILE_M rows times a strip of MSI_TILE_N columns. With one array per row,
   gcc and clang both keep all sums in vector registers. */
static void msi_gemm_tile(const float *a, const float *b, int64_t depth,
                          float sums[MSI_TILE_M][MSI_TILE_N]) {
    float t0[MSI_TILE_N], t1[MSI_TILE_N], t2[MSI_TILE_N], t3[MSI_TILE_N];
    for (int j = 0; j < MSI_TILE_N; j++) {
        t0[j] = t1[j] = t2[j] = t3[j] = 0.0f;
    }
    for (int64_t d = 0; d < depth; d++, a += MSI_TILE_M, b += MSI_TILE_N) {
        const float a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
        for (int j = 0; j < MSI_TILE_N; j++) {
            t0[j] = MSI_FMA(a0, b[j], t0[j]);
            t1[j] = MSI_FMA(a1, b[j], t1[j]);
            t2[j] = MSI_FMA(a2, b[j], t2[j]);
            t3[j] = MSI_FMA(a3, b[j], t3[j]);
        }
    }
    memcpy(sums[0], t0, sizeof t0);
    memcpy(sums[1], t1, sizeof t1);
    memcpy(sums[2], t2, sizeof t2);
    memcpy(sums[3], t3, sizeof t3);
}

static void msi_gemm_store(const float sums[MSI_TILE_M][MSI_TILE_N], int64_t rows, int64_t cols,
                           float alpha, float beta, float *c, int64_t stride) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            const float old = beta == 0.0f ? 0.0f : beta * c[i * stride + j];
            c[i * stride + j] = MSI_FMA(alpha, sums[i][j], old);
        }
    }
}

/* One block of c, which is float. It takes MSI_GEMM_K of the depth of a and b at a time, packed, so
   that both parts stay in cache. */
static void msi_gemm_block(float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                           float *c, int64_t stride, int64_t row, int64_t rows, int64_t col,
                           int64_t cols) {
    const int64_t depth = a->transposed ? a->rows : a->cols;
    float packed_a[MSI_GEMM_M * MSI_GEMM_K], packed_b[MSI_GEMM_N * MSI_GEMM_K];
    float sums[MSI_TILE_M][MSI_TILE_N];
    for (int64_t d = 0; d < depth; d += MSI_GEMM_K) {
        const int64_t part = msi_least(depth - d, MSI_GEMM_K);
        msi_gemm_pack(a, true, row, rows, d, part, MSI_TILE_M, packed_a);
        msi_gemm_pack(b, false, d, part, col, cols, MSI_TILE_N, packed_b);
        for (int64_t i = 0; i < rows; i += MSI_TILE_M) {
            for (int64_t j = 0; j < cols; j += MSI_TILE_N) {
                msi_gemm_tile(packed_a + i * part, packed_b + j * part, part, sums);
                msi_gemm_store((const float(*)[MSI_TILE_N])sums, msi_least(rows - i, MSI_TILE_M),
                               msi_least(cols - j, MSI_TILE_N), alpha, d == 0 ? beta : 1.0f,
                               c + i * stride + j, stride);
            }
        }
    }
}

/* The block of c at (row, col). If c has 16 bits, the block is summed in float and rounded once. */
static void msi_gemm_target(float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                            const ms_matrix *c, int64_t row, int64_t col) {
    float block[MSI_GEMM_M * MSI_GEMM_N];
    const int64_t rows = msi_least(c->rows - row, MSI_GEMM_M);
    const int64_t cols = msi_least(c->cols - col, MSI_GEMM_N);
    if (c->dtype == MS_DTYPE_F32) {
        msi_gemm_block(alpha, a, b, beta, (float *)c->data + row * c->stride + col, c->stride, row,
                       rows, col, cols);
        return;
    }
    for (int64_t i = 0; i < rows && beta != 0.0f; i++) {
        for (int64_t j = 0; j < cols; j++) {
            block[i * MSI_GEMM_N + j] =
                msi_load(c->data, c->dtype, (uint64_t)((row + i) * c->stride + col + j));
        }
    }
    msi_gemm_block(alpha, a, b, beta, block, MSI_GEMM_N, row, rows, col, cols);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            msi_store_as(c->data, c->dtype, (uint64_t)((row + i) * c->stride + col + j),
                         block[i * MSI_GEMM_N + j]);
        }
    }
}

/* Matrix number `index` of a batch; a batch of one repeats its matrix. */
static ms_matrix msi_matrix_at(const ms_matrix *x, int64_t index) {
    ms_matrix one = *x;
    const int64_t stride = x->batch_count > 1 ? x->batch_stride : 0;
    one.data = (uint8_t *)x->data + index * stride * (x->dtype == MS_DTYPE_F32 ? 4 : 2);
    return one;
}

static int msi_builtin_gemm(float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                            const ms_matrix *c) {
    const int64_t depth = a->transposed ? a->rows : a->cols;
    const int64_t across = (c->cols + MSI_GEMM_N - 1) / MSI_GEMM_N;
    const int64_t blocks = across * ((c->rows + MSI_GEMM_M - 1) / MSI_GEMM_M);
    (void)depth; // without OpenMP
    MSI_PARALLEL_FOR(dynamic, blocks * c->batch_count > 1 && depth > 8)
    for (int64_t i = 0; i < blocks * c->batch_count; i++) {
        const int64_t index = i / blocks, block = i % blocks;
        const ms_matrix a1 = msi_matrix_at(a, index), b1 = msi_matrix_at(b, index);
        const ms_matrix c1 = msi_matrix_at(c, index);
        msi_gemm_target(alpha, &a1, &b1, beta, &c1, block / across * MSI_GEMM_M,
                        block % across * MSI_GEMM_N);
    }
    return 0;
}

static int msi_cpu_gemm(void *user, float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                        const ms_matrix *c) {
    (void)user;
#ifdef MEMSCALE_CBLAS
    const int64_t k = a->transposed ? a->rows : a->cols, most = INT32_MAX;
    if (a->dtype == MS_DTYPE_F32) {
        if (c->rows > most || c->cols > most || k > most || a->stride > most || b->stride > most ||
            c->stride > most) {
            return 1;
        }
        for (int64_t i = 0; i < c->batch_count; i++) {
            const ms_matrix a1 = msi_matrix_at(a, i), b1 = msi_matrix_at(b, i);
            cblas_sgemm(CblasRowMajor, a->transposed ? CblasTrans : CblasNoTrans,
                        b->transposed ? CblasTrans : CblasNoTrans, (int)c->rows, (int)c->cols,
                        (int)k, alpha, (const float *)a1.data, (int)a->stride,
                        (const float *)b1.data, (int)b->stride, beta,
                        (float *)msi_matrix_at(c, i).data, (int)c->stride);
        }
        return 0;
    }
#endif
    return msi_builtin_gemm(alpha, a, b, beta, c);
}

static void msi_cpu_hardware(void *user, ms_hardware *hardware) {
    (void)user;
    char line[256];
    const char *value;
    msi_format(hardware->name, sizeof hardware->name, "CPU");
    hardware->kind = MS_DEVICE_CPU;
    msi_file *file = msi_open_file("", "/proc", "cpuinfo");
    while (msi_read_line(file, line, sizeof line)) {
        if ((value = msi_line_value(line, "model name")) != NULL) {
            msi_format(hardware->name, sizeof hardware->name, "%.63s", value);
        }
        hardware->processor_count += msi_line_value(line, "processor\t") != NULL;
    }
    msi_host_memory("", &hardware->host_total_bytes, &hardware->host_free_bytes);
    hardware->total_bytes = hardware->host_total_bytes;
    hardware->free_bytes = hardware->host_free_bytes;
}

MEMSCALE_API ms_backend ms_backend_cpu(void) {
    ms_backend b;
    memset(&b, 0, sizeof b);
    b.size = sizeof b;
    b.name = "cpu";
    b.memory_alloc = msi_cpu_memory_alloc;
    b.memory_release = msi_cpu_memory_release;
    b.device_is_host = true;
    b.copy_in = b.copy_out = b.copy = msi_cpu_copy;
    b.fill_bytes = msi_cpu_fill_bytes;
    b.fill_f32 = msi_cpu_fill_f32;
    b.add_f32 = msi_cpu_add_f32;
    b.cast = msi_cpu_cast;
    b.loss = msi_cpu_loss;
    b.add_squares_f32 = msi_cpu_add_squares_f32;
    b.clip_scale = msi_cpu_clip_scale;
    b.update = msi_cpu_update;
    b.gemm = msi_cpu_gemm;
    b.hardware = msi_cpu_hardware;
    return b;
}

// ------------------------------------------------------------------------------------------------
// >>hardware  speeds of a device, how they are measured, and devices that are built in

enum { MSI_SPEED_COUNT = 7 };

/* The speeds of a description, by number. */
static double *msi_speed(ms_hardware *h, int speed) {
    double *const all[MSI_SPEED_COUNT] = {
        &h->memory_gb_per_s, &h->to_device_gb_per_s, &h->to_host_gb_per_s, &h->f32_tflops,
        &h->tf32_tflops,     &h->f16_tflops,         &h->launch_us};
    return all[speed];
}

static const double msi_most_us = 1e15, msi_least_speed = 1e-9, msi_most_speed = 1e15;

/* Within these bounds times can be added up, and bytes be divided by speeds. */
static bool msi_is_time(double us) {
    return msi_is_finite(us) && us >= 0.0 && us <= msi_most_us;
}

static bool msi_is_speed(int speed, double x) {
    return speed == MSI_SPEED_COUNT - 1
               ? msi_is_time(x)
               : msi_is_finite(x) && (x == 0.0 || (x >= msi_least_speed && x <= msi_most_speed));
}

static void msi_take_speeds(ms_hardware *to, const ms_hardware *from) {
    ms_hardware source = *from;
    for (int i = 0; i < MSI_SPEED_COUNT; i++) {
        *msi_speed(to, i) = *msi_speed(&source, i);
    }
    to->is_measured = from->is_measured;
}

/* What ms_hardware_report times. */
typedef enum msi_timed {
    MSI_TIMED_COPY,
    MSI_TIMED_TO_DEVICE,
    MSI_TIMED_TO_HOST,
    MSI_TIMED_LAUNCH,
    MSI_TIMED_PRODUCT
} msi_timed;

/* A copy should not fit in a cache, and the whole should not take long. Copies through pinned
   memory are smaller, because pinning takes long. */
enum {
    MSI_BENCH_HOST_BYTES = 64 << 20, // of device memory that is the host's
    MSI_BENCH_COPY_BYTES = 8 << 20,  // of one copy there, and of one from or to the host
    MSI_BENCH_LEAST_BYTES = 64 << 10,
    MSI_BENCH_LEAST_SIDE = 128, // of a product
    MSI_BENCH_MOST_SIDE = 4096,
    MSI_BENCH_SAMPLES = 5,
    MSI_BENCH_MOST_CALLS = 32, // in a sample
    MSI_BENCH_SAMPLE_US = 400,
    MSI_BENCH_FIGURE_US = 5000, // for all samples of a figure
    MSI_BENCH_WHOLE_US = 50000  // for all figures; once it is over, each gets one call
};

/* A state of the backend for measuring, with memory of its own. */
typedef struct msi_bench {
    const ms_backend *backend;
    const ms_allocator *allocator;
    void *state, *device, *workspace, *host;
    bool is_open; // the state, which may be NULL
    uint64_t device_bytes, host_bytes;
    uint64_t copy_bytes; // of a copy inside device memory
    uint32_t turn;       // number of calls: successive copies use different parts of memory
    double end_us;       // the end of MSI_BENCH_WHOLE_US
    ms_matrix a, b, c;
    int error;
} msi_bench;

static int msi_bench_call(msi_bench *t, msi_timed what) {
    const ms_backend *b = t->backend;
    uint8_t *device = (uint8_t *)t->device;
    const uint64_t target = t->device_bytes / 2;
    const uint64_t offset = t->turn % (target / t->copy_bytes) * t->copy_bytes;
    uint8_t *part = device + t->turn % (t->device_bytes / t->host_bytes) * t->host_bytes;
    t->turn++;
    return what == MSI_TIMED_COPY
               ? b->copy(t->state, device + target + offset, device + offset, t->copy_bytes)
           : what == MSI_TIMED_TO_DEVICE ? b->copy_in(t->state, part, t->host, t->host_bytes)
           : what == MSI_TIMED_TO_HOST   ? b->copy_out(t->state, t->host, part, t->host_bytes)
           : what == MSI_TIMED_LAUNCH    ? b->fill_f32(t->state, device, 1.0f, 16)
                                         : b->gemm(t->state, 1.0f, &t->a, &t->b, 0.0f, &t->c);
}

/* The time of so many calls, until the device has done them. */
static double msi_bench_calls_us(msi_bench *t, msi_timed what, int calls) {
    const double start = msi_now_us();
    for (int i = 0; i < calls && !t->error; i++) {
        t->error = msi_bench_call(t, what);
    }
    if (t->backend->is_asynchronous) {
        const int error = t->backend->synchronize(t->state);
        t->error = t->error ? t->error : error;
    }
    return msi_now_us() - start;
}

/* Median time of a call, over several samples. `one` is what a call took before: it sets the number
   of calls in a sample, and is the result if there is no time left. 0 if nothing is known. */
static double msi_bench_median_us(msi_bench *t, msi_timed what, double one) {
    double samples[MSI_BENCH_SAMPLES], end = msi_now_us() + (double)MSI_BENCH_FIGURE_US;
    int count = 0;
    end = end < t->end_us ? end : t->end_us;
    const double fit = (double)MSI_BENCH_SAMPLE_US / (one > 1.0 ? one : 1.0);
    const int calls = fit < 1.0 ? 1 : (int)msi_smaller((uint64_t)fit, MSI_BENCH_MOST_CALLS);
    while (!t->error && count < MSI_BENCH_SAMPLES && msi_now_us() < end) {
        const double us = msi_bench_calls_us(t, what, calls);
        int at = count++;
        for (; at > 0 && samples[at - 1] > us; at--) {
            samples[at] = samples[at - 1];
        }
        samples[at] = us;
    }
    const double us = count > 0 ? samples[count / 2] / (double)calls : one;
    return t->error || us <= 0.0 ? 0.0 : us;
}

static double msi_bench_us(msi_bench *t, msi_timed what) {
    double one = msi_bench_calls_us(t, what, 1); // includes what a backend sets up at a first call
    one = msi_now_us() < t->end_us ? msi_bench_calls_us(t, what, 1) : one;
    return msi_bench_median_us(t, what, one);
}

/* 1e12 flops a second of a product of square matrices: of the first size tried that takes longer
   than MSI_BENCH_SAMPLE_US, or the last that memory, time and MSI_BENCH_MOST_SIDE allow. */
static double msi_bench_tflops(msi_bench *t, ms_dtype dtype) {
    const uint64_t item = dtype == MS_DTYPE_F32 ? 4 : 2;
    double us = 0.0, side = 0.0;
    for (int64_t n = MSI_BENCH_LEAST_SIDE; n <= MSI_BENCH_MOST_SIDE && !t->error;) {
        const uint64_t bytes = (uint64_t)(n * n) * item;
        if (3 * bytes > t->device_bytes || us > (double)MSI_BENCH_SAMPLE_US ||
            (side > 0.0 && msi_now_us() > t->end_us)) {
            break;
        }
        t->a.rows = t->a.cols = t->a.stride = n;
        t->a.dtype = dtype;
        t->a.batch_count = 1;
        t->b = t->c = t->a;
        t->a.data = t->device;
        t->b.data = (uint8_t *)t->device + bytes;
        t->c.data = (uint8_t *)t->device + 2 * bytes;
        us = msi_bench_calls_us(t, MSI_TIMED_PRODUCT, 1);
        if (us > (double)MSI_BENCH_SAMPLE_US && msi_now_us() < t->end_us) {
            us = msi_bench_calls_us(t, MSI_TIMED_PRODUCT, 1); // without the set-up of a first call
        }
        side = (double)n;
        /* The next product has twice the side, or four times, if that cannot take long. */
        n *= 64.0 * us > (double)MSI_BENCH_FIGURE_US || 4 * n > MSI_BENCH_MOST_SIDE ? 2 : 4;
    }
    us = side > 0.0 ? msi_bench_median_us(t, MSI_TIMED_PRODUCT, us) : 0.0;
    return us > 0.0 ? 2.0 * side * side * side / (us * 1e6) : 0.0;
}

/* Memory for measuring: less on a device that has little memory, or little free. */
static bool msi_bench_alloc(msi_bench *t, const ms_hardware *h) {
    const ms_backend *b = t->backend;
    const uint64_t mega = (uint64_t)1 << 20;
    uint64_t bytes = MSI_BENCH_HOST_BYTES;
    if (!b->device_is_host) {
        bytes = h->total_bytes / 64 < 16 * mega ? 16 * mega : h->total_bytes / 64;
        bytes = msi_smaller(bytes, 256 * mega);
    }
    bytes = h->free_bytes ? msi_smaller(bytes, h->free_bytes / 4) : bytes;
    t->device_bytes = bytes / 256 * 256;
    t->host_bytes = msi_smaller(t->device_bytes, MSI_BENCH_COPY_BYTES);
    t->copy_bytes = b->device_is_host ? msi_smaller(t->device_bytes / 2, MSI_BENCH_COPY_BYTES)
                                      : t->device_bytes / 2;
    return t->device_bytes >= (uint64_t)MSI_BENCH_LEAST_BYTES &&
           b->memory_alloc(b->user, t->allocator, t->device_bytes, &t->device) == 0 && t->device &&
           (!b->workspace_bytes ||
            (b->memory_alloc(b->user, t->allocator, b->workspace_bytes, &t->workspace) == 0 &&
             t->workspace)) &&
           msi_backend_host_alloc(b, t->allocator, t->host_bytes, &t->host) == 0 && t->host;
}

static void msi_bench_release(msi_bench *t) {
    const ms_backend *b = t->backend;
    msi_backend_host_release(b, t->allocator, t->host, t->host_bytes);
    if (t->workspace) {
        b->memory_release(b->user, t->allocator, t->workspace, b->workspace_bytes);
    }
    if (t->device) {
        b->memory_release(b->user, t->allocator, t->device, t->device_bytes);
    }
}

/* Opens a state. False if the backend cannot open another one. */
static bool msi_bench_open(msi_bench *t, bool tf32) {
    const ms_backend *b = t->backend;
    ms_open_args open;
    ms_prepare_args prepare;
    memset(&open, 0, sizeof open);
    memset(&prepare, 0, sizeof prepare);
    open.host = t->allocator;
    open.event_count = prepare.event_count = MSI_EVENT_COUNT;
    open.tf32 = tf32;
    prepare.workspace = t->workspace;
    prepare.workspace_bytes = b->workspace_bytes;
    t->state = b->user;
    t->is_open = !b->open || b->open(b->user, &open, &t->state) == 0;
    return t->is_open && (!b->prepare || b->prepare(t->state, &prepare) == 0);
}

static void msi_bench_close(msi_bench *t) {
    if (t->is_open && t->backend->is_asynchronous) {
        (void)t->backend->synchronize(t->state);
    }
    if (t->is_open && t->backend->close) {
        t->backend->close(t->state);
    }
    t->is_open = false;
}

static void msi_set_speed(double *speed, double amount, double us) {
    *speed = us > 0.0 && amount > 0.0 ? amount / us : *speed;
}

/* All speeds except that of TF32. The pattern 0x3c is a small number in every dtype. */
static void msi_bench_all(msi_bench *t, ms_hardware *h) {
    const double copied = (double)t->copy_bytes * 1e-3, passed = (double)t->host_bytes * 1e-3;
    memset(t->host, 0x3c, (size_t)t->host_bytes);
    t->error = t->backend->fill_bytes(t->state, t->device, 0x3c, t->device_bytes);
    t->end_us = msi_now_us() + (double)MSI_BENCH_WHOLE_US;
    msi_set_speed(&h->launch_us, msi_bench_us(t, MSI_TIMED_LAUNCH), 1.0);
    msi_set_speed(&h->memory_gb_per_s, 2.0 * copied, msi_bench_us(t, MSI_TIMED_COPY));
    msi_set_speed(&h->to_device_gb_per_s, passed, msi_bench_us(t, MSI_TIMED_TO_DEVICE));
    msi_set_speed(&h->to_host_gb_per_s, passed, msi_bench_us(t, MSI_TIMED_TO_HOST));
    msi_set_speed(&h->f32_tflops, msi_bench_tflops(t, MS_DTYPE_F32), 1.0);
    if (!t->error) { // a backend need not have products of F16
        msi_set_speed(&h->f16_tflops, msi_bench_tflops(t, MS_DTYPE_F16), 1.0);
        t->error = t->backend->is_asynchronous ? t->backend->synchronize(t->state) : 0;
    }
}

/* Measures through the functions of the backend alone, with a state of its own, because the model's
   state may be in the middle of a step. If there is no memory for that, *h stays as it is. */
static ms_result msi_measure(ms_model *m, ms_hardware *h) {
    ms_hardware measured = *h;
    msi_bench t;
    memset(&t, 0, sizeof t);
    t.backend = &m->config.backend;
    t.allocator = &m->config.allocator;
    const bool done = msi_bench_alloc(&t, h) && msi_bench_open(&t, false);
    if (done) {
        msi_bench_all(&t, &measured);
    }
    msi_bench_close(&t);
    if (done && !t.error && h->tf32 && msi_bench_open(&t, true)) {
        t.end_us = msi_now_us() + (double)MSI_BENCH_WHOLE_US;
        msi_set_speed(&measured.tf32_tflops, msi_bench_tflops(&t, MS_DTYPE_F32), 1.0);
    }
    msi_bench_close(&t);
    msi_bench_release(&t);
    if (done && !t.error) {
        measured.is_measured = true;
        msi_take_speeds(h, &measured);
    }
    return msi_device(m, t.error, "measuring its speeds");
}

/* The backend's description of its device, with speeds that are measured once. */
static ms_result msi_report_hardware(ms_model *m, ms_hardware *report) {
    m->config.backend.hardware(m->config.backend.user, report);
    if (m->sources.reported.is_measured) {
        msi_take_speeds(report, &m->sources.reported);
        return MS_RESULT_OK;
    }
    ms_result result = m->config.dry_run ? MS_RESULT_OK : msi_synchronize(m);
    MSI_THEN(result, msi_measure(m, report));
    m->sources.reported = *report;
    return result;
}

/* From the next ms_wrap on, plans are for this device; NULL: for the model's own. */
static void msi_use_hardware(ms_model *m, const ms_hardware *hardware) {
    const ms_hardware none = MSI_ZERO_INIT;
    m->sources.given = hardware ? *hardware : none;
    m->sources.is_given = hardware != NULL;
    m->sources.given_fault = NULL;
    m->wrapped.changed = true;
}

/* Devices to plan for without having them. Speeds are those that the maker states, for dense
   products summed in F32; where only a boost clock is stated, F32 is 2 flops per core and clock.
   Copies have the rate of the link in one direction, net of its encoding (PCI Express 3.0 x16
   15.75 GB/s, 4.0 31.5, 5.0 63; half of that for x8), or half the bandwidth of the memory that host
   and device share. Memory is what the name says; a runtime offers a percent or two less.
   Sources, all of NVIDIA:
     GeForce RTX 30: "NVIDIA Ampere GA102 GPU Architecture", V2.1, and the product pages
     GeForce RTX 40: "NVIDIA Ada GPU Architecture", V2.02, appendices, and the product pages
     GeForce RTX 50: "NVIDIA RTX Blackwell GPU Architecture", V1.1, and the product pages
     Laptop GPUs: cores, memory and the highest boost clock of the comparison pages of laptops, for
       RTX 50 the AI TOPS (sparse FP4, 32 times the rate of F32); bandwidth is the width of the bus
       times the data rate of the memory in use, and the link is taken as 4.0 x8, since both depend
       on the laptop. Many run at lower clocks
     V100: "NVIDIA Tesla V100 GPU Architecture" and its data sheet; T4: its data sheet
     A100: "NVIDIA A100 Tensor Core GPU Architecture" and the data sheet
     A10, A30, A40, RTX A4000, A5000, A6000, RTX 6000 Ada, RTX PRO 6000, L4, L40, L40S, H100, H200,
       B200 (DGX B200): their data sheets. Where these state tensor cores with sparsity, it is half
       of that
     Jetson Orin: the data sheets of the modules, which state sparse INT8 for the GPU: FP16 is a
       quarter, TF32 an eighth of that (technical brief "NVIDIA Jetson AGX Orin Series", HMMA and
       IMMA). Nano at 15 W, and at 25 W as Super. What Linux and the firmware leave free is an
       estimate, which the report of the board itself replaces */
/* Name, kind, multiprocessors, GiB, of these free (0: all), compute capability, GB/s of memory and
   of the link, and TFLOP/s of F32, TF32 and F16. The tensor cores of a GeForce do TF32 at the rate
   of F32, and F16 at twice that, from 8.6 on. */
#define MSI_GEFORCE(X, name, processors, gib, major, minor, memory, link, f32)                     \
    X("NVIDIA GeForce RTX " name, DISCRETE, processors, gib, 0, major, minor, memory, link, f32,   \
      f32, 2.0 * (f32))
#define MSI_DEVICES(X)                                                                             \
    MSI_GEFORCE(X, "3050 6GB", 18, 6, 8, 6, 168.0, 15.75, 6.8)                                     \
    MSI_GEFORCE(X, "3050 8GB", 20, 8, 8, 6, 224.0, 15.75, 9.1)                                     \
    MSI_GEFORCE(X, "3060", 28, 12, 8, 6, 360.0, 31.5, 12.7)                                        \
    MSI_GEFORCE(X, "3060 Ti", 38, 8, 8, 6, 448.0, 31.5, 16.2)                                      \
    MSI_GEFORCE(X, "3070", 46, 8, 8, 6, 448.0, 31.5, 20.3)                                         \
    MSI_GEFORCE(X, "3070 Ti", 48, 8, 8, 6, 608.0, 31.5, 21.7)                                      \
    MSI_GEFORCE(X, "3080 10GB", 68, 10, 8, 6, 760.0, 31.5, 29.8)                                   \
    MSI_GEFORCE(X, "3080 12GB", 70, 12, 8, 6, 912.0, 31.5, 30.6)                                   \
    MSI_GEFORCE(X, "3080 Ti", 80, 12, 8, 6, 912.0, 31.5, 34.1)                                     \
    MSI_GEFORCE(X, "3090", 82, 24, 8, 6, 936.0, 31.5, 35.6)                                        \
    MSI_GEFORCE(X, "3090 Ti", 84, 24, 8, 6, 1008.0, 31.5, 40.0)                                    \
    MSI_GEFORCE(X, "3050 Laptop GPU 4GB", 16, 4, 8, 6, 192.0, 15.75, 7.1)                          \
    MSI_GEFORCE(X, "3050 Laptop GPU 6GB", 20, 6, 8, 6, 168.0, 15.75, 7.6)                          \
    MSI_GEFORCE(X, "3050 Ti Laptop GPU", 20, 4, 8, 6, 192.0, 15.75, 8.7)                           \
    MSI_GEFORCE(X, "3060 Laptop GPU", 30, 6, 8, 6, 336.0, 15.75, 13.1)                             \
    MSI_GEFORCE(X, "3070 Laptop GPU", 40, 8, 8, 6, 448.0, 15.75, 16.6)                             \
    MSI_GEFORCE(X, "3070 Ti Laptop GPU", 46, 8, 8, 6, 448.0, 15.75, 17.5)                          \
    MSI_GEFORCE(X, "3080 Laptop GPU 8GB", 48, 8, 8, 6, 448.0, 15.75, 21.0)                         \
    MSI_GEFORCE(X, "3080 Laptop GPU 16GB", 48, 16, 8, 6, 448.0, 15.75, 21.0)                       \
    MSI_GEFORCE(X, "3080 Ti Laptop GPU", 58, 16, 8, 6, 512.0, 15.75, 23.6)                         \
    MSI_GEFORCE(X, "4060", 24, 8, 8, 9, 272.0, 15.75, 15.1)                                        \
    MSI_GEFORCE(X, "4060 Ti 8GB", 34, 8, 8, 9, 288.0, 15.75, 22.1)                                 \
    MSI_GEFORCE(X, "4060 Ti 16GB", 34, 16, 8, 9, 288.0, 15.75, 22.1)                               \
    MSI_GEFORCE(X, "4070", 46, 12, 8, 9, 504.0, 31.5, 29.1)                                        \
    MSI_GEFORCE(X, "4070 SUPER", 56, 12, 8, 9, 504.0, 31.5, 35.5)                                  \
    MSI_GEFORCE(X, "4070 Ti", 60, 12, 8, 9, 504.0, 31.5, 40.1)                                     \
    MSI_GEFORCE(X, "4070 Ti SUPER", 66, 16, 8, 9, 672.0, 31.5, 44.1)                               \
    MSI_GEFORCE(X, "4080", 76, 16, 8, 9, 716.8, 31.5, 48.7)                                        \
    MSI_GEFORCE(X, "4080 SUPER", 80, 16, 8, 9, 736.3, 31.5, 52.2)                                  \
    MSI_GEFORCE(X, "4090", 128, 24, 8, 9, 1008.0, 31.5, 82.6)                                      \
    MSI_GEFORCE(X, "4050 Laptop GPU", 20, 6, 8, 9, 192.0, 15.75, 12.1)                             \
    MSI_GEFORCE(X, "4060 Laptop GPU", 24, 8, 8, 9, 256.0, 15.75, 14.6)                             \
    MSI_GEFORCE(X, "4070 Laptop GPU", 36, 8, 8, 9, 256.0, 15.75, 20.0)                             \
    MSI_GEFORCE(X, "4080 Laptop GPU", 58, 12, 8, 9, 432.0, 15.75, 33.9)                            \
    MSI_GEFORCE(X, "4090 Laptop GPU", 76, 16, 8, 9, 576.0, 15.75, 39.7)                            \
    MSI_GEFORCE(X, "5050", 20, 8, 12, 0, 320.0, 31.5, 13.2)                                        \
    MSI_GEFORCE(X, "5060", 30, 8, 12, 0, 448.0, 31.5, 19.2)                                        \
    MSI_GEFORCE(X, "5060 Ti 8GB", 36, 8, 12, 0, 448.0, 31.5, 23.7)                                 \
    MSI_GEFORCE(X, "5060 Ti 16GB", 36, 16, 12, 0, 448.0, 31.5, 23.7)                               \
    MSI_GEFORCE(X, "5070", 48, 12, 12, 0, 672.0, 63.0, 30.9)                                       \
    MSI_GEFORCE(X, "5070 Ti", 70, 16, 12, 0, 896.0, 63.0, 43.9)                                    \
    MSI_GEFORCE(X, "5080", 84, 16, 12, 0, 960.0, 63.0, 56.3)                                       \
    MSI_GEFORCE(X, "5090", 170, 32, 12, 0, 1792.0, 63.0, 104.8)                                    \
    MSI_GEFORCE(X, "5050 Laptop GPU", 20, 8, 12, 0, 384.0, 15.75, 13.7)                            \
    MSI_GEFORCE(X, "5060 Laptop GPU", 26, 8, 12, 0, 384.0, 15.75, 17.9)                            \
    MSI_GEFORCE(X, "5070 Laptop GPU", 36, 8, 12, 0, 384.0, 15.75, 24.9)                            \
    MSI_GEFORCE(X, "5070 Ti Laptop GPU", 46, 12, 12, 0, 672.0, 15.75, 31.0)                        \
    MSI_GEFORCE(X, "5080 Laptop GPU", 60, 16, 12, 0, 896.0, 15.75, 41.7)                           \
    MSI_GEFORCE(X, "5090 Laptop GPU", 82, 24, 12, 0, 896.0, 15.75, 57.0)                           \
    X("NVIDIA V100 16GB SXM2", DISCRETE, 80, 16, 0, 7, 0, 900.0, 15.75, 15.7, 0.0, 125.0)          \
    X("NVIDIA V100 32GB SXM2", DISCRETE, 80, 32, 0, 7, 0, 900.0, 15.75, 15.7, 0.0, 125.0)          \
    X("NVIDIA V100 16GB PCIe", DISCRETE, 80, 16, 0, 7, 0, 900.0, 15.75, 14.0, 0.0, 112.0)          \
    X("NVIDIA V100 32GB PCIe", DISCRETE, 80, 32, 0, 7, 0, 900.0, 15.75, 14.0, 0.0, 112.0)          \
    X("NVIDIA T4", DISCRETE, 40, 16, 0, 7, 5, 320.0, 15.75, 8.1, 0.0, 65.0)                        \
    X("NVIDIA RTX A4000", DISCRETE, 48, 16, 0, 8, 6, 448.0, 31.5, 19.2, 38.3, 76.7)                \
    X("NVIDIA RTX A5000", DISCRETE, 64, 24, 0, 8, 6, 768.0, 31.5, 27.8, 55.6, 111.1)               \
    X("NVIDIA RTX A6000", DISCRETE, 84, 48, 0, 8, 6, 768.0, 31.5, 38.7, 77.4, 154.8)               \
    X("NVIDIA RTX 6000 Ada", DISCRETE, 142, 48, 0, 8, 9, 960.0, 31.5, 91.1, 182.1, 364.2)          \
    X("NVIDIA RTX PRO 6000", DISCRETE, 188, 96, 0, 12, 0, 1792.0, 63.0, 125.0, 251.9, 503.8)       \
    X("NVIDIA A10", DISCRETE, 72, 24, 0, 8, 6, 600.0, 31.5, 31.2, 62.5, 125.0)                     \
    X("NVIDIA A30", DISCRETE, 56, 24, 0, 8, 0, 933.0, 31.5, 10.3, 82.0, 165.0)                     \
    X("NVIDIA A40", DISCRETE, 84, 48, 0, 8, 6, 696.0, 31.5, 37.4, 74.8, 149.7)                     \
    X("NVIDIA A100 40GB", DISCRETE, 108, 40, 0, 8, 0, 1555.0, 31.5, 19.5, 156.0, 312.0)            \
    X("NVIDIA A100 80GB PCIe", DISCRETE, 108, 80, 0, 8, 0, 1935.0, 31.5, 19.5, 156.0, 312.0)       \
    X("NVIDIA A100 80GB SXM", DISCRETE, 108, 80, 0, 8, 0, 2039.0, 31.5, 19.5, 156.0, 312.0)        \
    X("NVIDIA L4", DISCRETE, 58, 24, 0, 8, 9, 300.0, 31.5, 30.3, 60.0, 121.0)                      \
    X("NVIDIA L40", DISCRETE, 142, 48, 0, 8, 9, 864.0, 31.5, 90.5, 90.5, 181.0)                    \
    X("NVIDIA L40S", DISCRETE, 142, 48, 0, 8, 9, 864.0, 31.5, 91.6, 183.0, 362.0)                  \
    X("NVIDIA H100 80GB PCIe", DISCRETE, 114, 80, 0, 9, 0, 2000.0, 63.0, 51.0, 378.0, 756.5)       \
    X("NVIDIA H100 80GB SXM", DISCRETE, 132, 80, 0, 9, 0, 3350.0, 63.0, 67.0, 494.5, 989.5)        \
    X("NVIDIA H100 94GB NVL", DISCRETE, 132, 94, 0, 9, 0, 3900.0, 63.0, 60.0, 417.5, 835.5)        \
    X("NVIDIA H200", DISCRETE, 132, 141, 0, 9, 0, 4800.0, 63.0, 67.0, 494.5, 989.5)                \
    X("NVIDIA B200", DISCRETE, 148, 180, 0, 10, 0, 8000.0, 63.0, 75.0, 1125.0, 2250.0)             \
    X("Jetson Orin Nano 4GB", INTEGRATED, 4, 4, 3, 8, 7, 34.0, 17.0, 0.64, 2.5, 5.0)               \
    X("Jetson Orin Nano 8GB", INTEGRATED, 8, 8, 6, 8, 7, 68.0, 34.0, 1.28, 5.0, 10.0)              \
    X("Jetson Orin Nano 8GB Super", INTEGRATED, 8, 8, 6, 8, 7, 102.0, 51.0, 2.09, 8.35, 16.7)      \
    X("Jetson Orin NX 8GB", INTEGRATED, 8, 8, 6, 8, 7, 102.4, 51.2, 1.57, 6.25, 12.5)              \
    X("Jetson Orin NX 16GB", INTEGRATED, 8, 16, 14, 8, 7, 102.4, 51.2, 1.88, 7.5, 15.0)            \
    X("Jetson AGX Orin 32GB", INTEGRATED, 14, 32, 29, 8, 7, 204.8, 102.4, 3.33, 13.5, 27.0)        \
    X("Jetson AGX Orin 64GB", INTEGRATED, 16, 64, 60, 8, 7, 204.8, 102.4, 5.3, 21.25, 42.5)

/* The memory of an integrated GPU is the host's; BF16 and TF32 need compute capability 8.0. */
#define MSI_SHARED_GIB(kind, gib)                                                                  \
    (MS_DEVICE_##kind == MS_DEVICE_INTEGRATED ? (uint64_t)(gib) << 30 : 0)
#define MSI_MEMORY(kind, gib, of_these)                                                            \
    (uint64_t)(gib) << 30, MSI_SHARED_GIB(kind, of_these), MSI_SHARED_GIB(kind, gib),              \
        MSI_SHARED_GIB(kind, of_these)
#define MSI_COMPUTE(major, minor)            major, minor, (major) >= 8, true, (major) >= 8, 0, 0
#define MSI_SPEEDS(gb, link, f32, tf32, f16) gb, link, link, f32, tf32, f16, 0.0, false
#define MSI_X(name, kind, processors, gib, of_these, major, minor, memory, link, f32, tf32, f16)   \
    {name,                                                                                         \
     MS_DEVICE_##kind,                                                                             \
     processors,                                                                                   \
     MSI_MEMORY(kind, gib, of_these),                                                              \
     MSI_COMPUTE(major, minor),                                                                    \
     MSI_SPEEDS(memory, link, f32, tf32, f16)},
static const ms_hardware msi_devices[] = {MSI_DEVICES(MSI_X)};
#undef MSI_X

enum { MSI_NAME_BYTES = sizeof(((ms_hardware *)0)->name) };

/* The letters, in lower case, and digits of a name; false if they do not fit. */
static bool msi_squeeze(const char *name, char *squeezed) {
    size_t length = 0;
    for (; *name && length < MSI_NAME_BYTES; name++) {
        const bool is_upper = *name >= 'A' && *name <= 'Z';
        const bool is_lower = *name >= 'a' && *name <= 'z';
        if (is_upper || is_lower || (*name >= '0' && *name <= '9')) {
            squeezed[length++] = is_upper ? (char)(*name - 'A' + 'a') : *name;
        }
    }
    squeezed[length < MSI_NAME_BYTES ? length : MSI_NAME_BYTES - 1] = 0;
    return length < MSI_NAME_BYTES;
}

MEMSCALE_API const ms_hardware *ms_hardware_at(uint32_t number) {
    return number < sizeof msi_devices / sizeof msi_devices[0] ? &msi_devices[number] : NULL;
}

MEMSCALE_API const ms_hardware *ms_hardware_find(const char *name) {
    char wanted[MSI_NAME_BYTES], has[MSI_NAME_BYTES];
    const ms_hardware *device, *found[2] = {NULL, NULL}; // that contains name; that ends with it
    uint32_t count[2] = {0, 0};
    if (!name || !msi_squeeze(name, wanted) || !wanted[0]) {
        return NULL;
    }
    for (uint32_t i = 0; (device = ms_hardware_at(i)) != NULL; i++) {
        const char *at = msi_squeeze(device->name, has) ? strstr(has, wanted) : NULL;
        const size_t before = strlen(has) - strlen(wanted); // of use only if it contains name
        for (int k = 0; at && k < 1 + (strcmp(has + before, wanted) == 0); k++) {
            found[k] = device;
            count[k]++;
        }
    }
    return count[1] == 1 ? found[1] : count[0] == 1 ? found[0] : NULL;
}

// ------------------------------------------------------------------------------------------------
// >>graph  registration, handles, and what follows from the graph alone

static const char *msi_name(const msi_graph *g, uint32_t name) {
    return g->names.items + name;
}

static const char *msi_tensor_name(const msi_graph *g, uint32_t tensor) {
    return msi_name(g, g->tensors.items[tensor].name);
}

static const char *msi_layer_name(const msi_graph *g, uint32_t layer) {
    return msi_name(g, g->layers.items[layer].name);
}

typedef struct msi_label {
    char text[112];
} msi_label;

/* `layer 3 "ln1"`: many layers may have one name. */
static msi_label msi_label_of(uint32_t number, const char *name) {
    msi_label label;
    const int length = msi_format(label.text, sizeof label.text, "layer %u", (unsigned)number);
    if (length > 0 && strcmp(name, label.text) != 0) {
        msi_format(label.text + length, sizeof label.text - (size_t)length, " \"%.80s\"", name);
    }
    return label;
}

static msi_label msi_layer_label(const msi_graph *g, uint32_t layer) {
    return msi_label_of(layer, msi_layer_name(g, layer));
}

static bool msi_add_name(ms_model *m, const char *name, uint32_t *offset) {
    const uint64_t length = strlen(name) + 1;
    if (!MSI_RESERVE(char, &m->config.allocator, m->graph.names, m->graph.names.count + length)) {
        MSI_STICK(m, MS_RESULT_OUT_OF_MEMORY, "no memory for the name \"%s\"", name);
        return false;
    }
    *offset = m->graph.names.count;
    memcpy(m->graph.names.items + *offset, name, (size_t)length);
    m->graph.names.count += (uint32_t)length;
    return true;
}

/* The id of handle number n of a graph, never 0: ids count from the tag, modulo 2^32 - 1. */
static uint32_t msi_id(const msi_graph *g, uint32_t number) {
    return (uint32_t)(((uint64_t)g->tag + number) % UINT32_MAX) + 1;
}

/* The number of the handle that has this id; most likely beyond all that there are if it is another
   graph's; MSI_NONE for 0. */
static uint32_t msi_id_number(const msi_graph *g, uint32_t id) {
    return id ? (uint32_t)(((uint64_t)id - 1 + UINT32_MAX - g->tag) % UINT32_MAX) : MSI_NONE;
}

static ms_tensor msi_handle(const msi_graph *g, uint32_t tensor, msi_role role) {
    ms_tensor handle = {msi_id(g, tensor * (uint32_t)MSI_ROLE_RESIDENT_COUNT + (uint32_t)role)};
    return handle;
}

/* Index of the tensor of a handle; MSI_NONE if there is none. */
static uint32_t msi_index(const msi_graph *g, ms_tensor handle) {
    const uint32_t index = msi_id_number(g, handle.id) / (uint32_t)MSI_ROLE_RESIDENT_COUNT;
    return index < g->tensors.count ? index : MSI_NONE;
}

static msi_role msi_role_of(const msi_graph *g, ms_tensor handle) {
    return (msi_role)(msi_id_number(g, handle.id) % (uint32_t)MSI_ROLE_RESIDENT_COUNT);
}

static ms_layer msi_layer_handle(const msi_graph *g, uint32_t layer) {
    ms_layer handle = {msi_id(g, layer)};
    return handle;
}

/* Index of the layer of a handle; MSI_NONE if there is none. */
static uint32_t msi_layer_index(const msi_graph *g, ms_layer handle) {
    const uint32_t index = msi_id_number(g, handle.id);
    return index < g->layers.count ? index : MSI_NONE;
}

/* The tag in the axes of a graph: not 0, which is that of a shape without axes. */
static uint32_t msi_axes_tag(const msi_graph *g) {
    return g->tag >> MSI_AXIS_BITS | 1;
}

static const char *msi_role_name(msi_role role) {
    static const char *const names[] = {"value of", "gradient of", "optimizer state of"};
    return names[role < MSI_ROLE_STATE0 ? role : MSI_ROLE_STATE0];
}

/* Index of the tensor of a handle of its value; MSI_NONE for its gradient or its state. */
static uint32_t msi_value_index(const msi_graph *g, ms_tensor handle) {
    return msi_role_of(g, handle) == MSI_ROLE_VALUE ? msi_index(g, handle) : MSI_NONE;
}

static bool msi_is_float(ms_dtype dtype) {
    return dtype <= MS_DTYPE_BF16;
}

/* Keeps its value between steps, at a fixed address. */
static bool msi_is_resident(const msi_tensor *t) {
    return t->kind <= MSI_KIND_BUFFER;
}

static bool msi_is_trained(const msi_tensor *t) {
    return t->kind == MSI_KIND_PARAM && !t->frozen;
}

static bool msi_has_gradient(const msi_tensor *t) {
    return msi_is_float(t->view.dtype) &&
           (t->kind == MSI_KIND_PARAM || t->kind == MSI_KIND_ACTIVATION);
}

static uint32_t msi_state_count(const ms_optimizer_desc *o) {
    switch (o->kind) {
    case MS_OPTIMIZER_ADAMW:
        return 2;
    case MS_OPTIMIZER_SGD:
        return o->momentum != 0.0f ? 1 : 0;
    case MS_OPTIMIZER_CUSTOM:
        return o->state_count;
    case MS_OPTIMIZER_NONE:
        break;
    }
    return 0;
}

static bool msi_is_borrowed(const msi_tensor *t, msi_role role) {
    return t->borrowed >> role & 1;
}

/* Whether the model accepts registrations; an error if it does not. */
static bool msi_registering(ms_model *m, const char *what, const char *name) {
    if (m && m->run.plan) {
        MSI_STICK(
            m, MS_RESULT_ORDER,
            "%s \"%s\": the graph is closed since ms_wrap: say that before, or make a new model",
            what, name);
    } else if (m && m->run.visits) {
        MSI_STICK(m, MS_RESULT_ORDER, "%s \"%s\" in the callback of %s: say that before", what,
                  name, m->run.visits);
    }
    return m && !m->run.plan && !m->run.visits && m->errors.broken == MS_RESULT_OK;
}

/* Adds to the bytes of the model; false if they become too many. */
static bool msi_count_bytes(msi_graph *g, uint64_t bytes) {
    const uint64_t limit = (uint64_t)1 << 58;
    const bool good = bytes < limit && g->bytes + bytes < limit;
    g->bytes += good ? bytes : 0;
    return good;
}

/* A shape with the axes at these sizes, or at their largest. */
static ms_shape msi_resized(const msi_graph *g, ms_shape shape, bool largest,
                            const int64_t *sizes) {
    for (int i = 0; i < shape.rank; i++) {
        for (uint32_t a = 0; a < g->axis_count && shape.axes[i]; a++) {
            if (shape.axes[i] >> a & 1) {
                const int64_t size = largest ? g->axes[a].largest : sizes[a];
                const int64_t unit = shape.dim[i] / g->axes[a].size;
                shape.dim[i] = unit <= INT64_MAX / size ? unit * size : INT64_MAX;
            }
        }
    }
    return shape;
}

static bool msi_shape_bytes(const ms_shape *shape, ms_dtype dtype, uint64_t *bytes) {
    return msi_multiply(ms_shape_count(shape), ms_dtype_bytes(dtype), bytes) && *bytes != 0;
}

static ms_tensor msi_add_tensor(ms_model *m, msi_kind kind, const char *name, ms_dtype dtype,
                                const ms_shape *shape) {
    const ms_tensor none = {0};
    msi_graph *g = &m->graph;
    const ms_shape largest = msi_resized(g, *shape, true, NULL);
    msi_tensor t;
    memset(&t, 0, sizeof t);
    t.view.shape = *shape;
    t.view.dtype = dtype;
    t.kind = kind;
    t.producer = MSI_NONE;
    if (!msi_shape_bytes(shape, dtype, &t.bytes) ||
        !msi_shape_bytes(&largest, dtype, &t.largest_bytes) ||
        !msi_count_bytes(g, t.largest_bytes)) {
        MSI_STICK(m, MS_RESULT_INVALID,
                  "%s \"%s\": the bytes of the whole model must be below 2^58",
                  msi_kind_names[kind], name);
        return none;
    }
    if (!msi_add_name(m, name, &t.name)) {
        return none;
    }
    if (g->tensors.count >= MSI_MAX_TENSORS ||
        !MSI_RESERVE(msi_tensor, &m->config.allocator, g->tensors, g->tensors.count + 1)) {
        MSI_STICK(m, MS_RESULT_OUT_OF_MEMORY, "no memory for %s \"%s\"", msi_kind_names[kind],
                  name);
        return none;
    }
    g->tensors.items[g->tensors.count++] = t;
    return msi_handle(g, g->tensors.count - 1, MSI_ROLE_VALUE);
}

static ms_axis msi_add_axis(ms_model *m, const char *name, int64_t size, int64_t largest) {
    msi_graph *g = &m->graph;
    ms_axis axis = {0};
    if (msi_add_name(m, name, &g->axes[g->axis_count].name)) {
        g->axes[g->axis_count].size = size;
        g->axes[g->axis_count].largest = largest;
        axis.id = msi_axes_tag(g) << MSI_AXIS_BITS | ++g->axis_count;
    }
    return axis;
}

static uint32_t msi_group_start(const msi_layer *l, int group) {
    uint32_t start = 0;
    for (int k = 0; k < group; k++) {
        start += l->count[k];
    }
    return start;
}

static const uint32_t *msi_group(const msi_graph *g, const msi_layer *l, int group) {
    return g->operands.items + l->operand_first + msi_group_start(l, group);
}

/* Goes through the operands of a group of a layer, without empty slots:
   for (MSI_EACH(in, g, l, MSI_GROUP_IN)) { ... in.tensor, in.slot ... } */
typedef struct msi_operand_cursor {
    const uint32_t *tensors; // of all slots
    uint32_t count, next;
    uint32_t slot, tensor; // of the present operand
} msi_operand_cursor;

static msi_operand_cursor msi_operands_of(const msi_graph *g, const msi_layer *l, int group) {
    const msi_operand_cursor c = {msi_group(g, l, group), l->count[group], 0, 0, 0};
    return c;
}

static bool msi_next_operand(msi_operand_cursor *c) {
    while (c->next < c->count && c->tensors[c->next] == MSI_NONE) {
        c->next++;
    }
    c->slot = c->next++;
    c->tensor = c->slot < c->count ? c->tensors[c->slot] : MSI_NONE;
    return c->slot < c->count;
}

#define MSI_EACH(operand, g, l, group)                                                             \
    msi_operand_cursor operand = msi_operands_of(g, l, group);                                     \
    msi_next_operand(&operand);

/* The mask of a group in a declaration of reads, or `otherwise` if it declares nothing. */
static uint32_t msi_declared_reads(const ms_reads *r, int group, uint32_t otherwise) {
    const uint32_t masks[MSI_GROUP_COUNT] = {r->in, r->out, r->saved, r->param, otherwise};
    return r->nothing || (r->in | r->out | r->saved | r->param) ? masks[group] : otherwise;
}

/* The mask of the slots of a group that backward reads. */
static uint32_t msi_reads_of(const msi_layer *l, int group) {
    return group == MSI_GROUP_STATE ? l->backward_state
                                    : msi_declared_reads(&l->backward_reads, group, MS_ALL_SLOTS);
}

/* The mask of the slots of a group that forward reads: all, except those of what it makes. */
static uint32_t msi_forward_reads_of(int group) {
    return group == MSI_GROUP_OUT || group == MSI_GROUP_SAVED ? 0 : MS_ALL_SLOTS;
}

/* The mask of the slots of a group that a recomputation reads. */
static uint32_t msi_recompute_reads_of(const msi_layer *l, int group) {
    const uint32_t by_forward = msi_forward_reads_of(group);
    return l->recompute ? msi_declared_reads(&l->recompute_reads, group, by_forward) : by_forward;
}

/* Whether forward can run a second time. */
static bool msi_can_repeat(const msi_layer *l) {
    return !l->no_recompute && l->grads_in_forward == 0;
}

static bool msi_can_recompute(const msi_layer *l) {
    return l->recompute || msi_can_repeat(l);
}

/* The mask of the slots of a group that a forward or a recomputation reads. */
static uint32_t msi_op_reads(const msi_layer *l, msi_op op, int group) {
    return op == MSI_OP_RECOMPUTE ? msi_recompute_reads_of(l, group) : msi_forward_reads_of(group);
}

/* The time of a layer's recomputation. */
static double msi_again_us(const msi_layer *l, msi_op op) {
    return op == MSI_OP_REPEAT ? l->time.forward_us : l->time.recompute_us;
}

static uint32_t msi_lowest_bit(uint32_t mask) {
    uint32_t bit = 0;
    while (bit < 31 && !(mask >> bit & 1)) {
        bit++;
    }
    return bit;
}

/* Appends the slots of one group, which are valid, to the operands, which have room, and marks the
   layer as the producer of what it writes. */
static void msi_add_operands(ms_model *m, uint32_t layer, int group, const ms_tensor *slots,
                             uint32_t count) {
    msi_graph *g = &m->graph;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t t = slots[i].id ? msi_index(&m->graph, slots[i]) : MSI_NONE;
        g->operands.items[g->operands.count++] = t;
        if (t != MSI_NONE && (group == MSI_GROUP_OUT || group == MSI_GROUP_SAVED)) {
            g->tensors.items[t].producer = layer;
        }
    }
}

/* Whether two tensors of the same size keep the same size at all sizes of the axes. */
static bool msi_scales_alike(const msi_graph *g, uint32_t a, uint32_t b) {
    const ms_shape *x = &g->tensors.items[a].view.shape, *y = &g->tensors.items[b].view.shape;
    bool alike = true;
    for (uint32_t axis = 0; axis < g->axis_count; axis++) {
        int balance = 0; // dims along this axis: of x, less those of y
        for (int i = 0; i < x->rank; i++) {
            balance += x->axes[i] >> axis & 1;
        }
        for (int i = 0; i < y->rank; i++) {
            balance -= y->axes[i] >> axis & 1;
        }
        alike &= balance == 0;
    }
    return alike;
}

/* Elements of the outputs of a layer. */
static double msi_output_elements(const msi_graph *g, const msi_layer *l) {
    double elements = 0.0;
    for (MSI_EACH(out, g, l, MSI_GROUP_OUT)) {
        elements += (double)ms_shape_count(&g->tensors.items[out.tensor].view.shape);
    }
    return elements;
}

static bool msi_reserve_layer(ms_model *m, const msi_layer *l) {
    msi_graph *g = &m->graph;
    const ms_allocator *a = &m->config.allocator;
    const uint32_t operands = msi_group_start(l, MSI_GROUP_COUNT);
    const uint32_t masks = l->count[MSI_GROUP_OUT] + 4u * l->count[MSI_GROUP_IN];
    return MSI_RESERVE(msi_layer, a, g->layers, g->layers.count + 1) &&
           MSI_RESERVE(uint32_t, a, g->operands, g->operands.count + operands) &&
           MSI_RESERVE(uint32_t, a, g->masks, g->masks.count + masks);
}

static void msi_add_masks(msi_graph *g, const msi_layer *l, const ms_layer_desc *desc) {
    uint32_t *mask = g->masks.items + g->masks.count;
    for (int i = 0; i < l->count[MSI_GROUP_OUT]; i++) {
        *mask++ = desc->in_place[i];
    }
    for (int i = 0; i < l->count[MSI_GROUP_IN]; i++) {
        *mask++ = desc->grad_in_place[i].in;
        *mask++ = desc->grad_in_place[i].out;
        *mask++ = desc->grad_in_place[i].saved;
        *mask++ = desc->grad_in_place[i].grad_out;
    }
    g->masks.count += l->count[MSI_GROUP_OUT] + 4u * l->count[MSI_GROUP_IN];
}

static uint8_t msi_used_slots(const ms_tensor *slots, int limit) {
    while (limit > 0 && slots[limit - 1].id == 0) {
        limit--;
    }
    return (uint8_t)limit;
}

/* The slots of a group in a desc. */
static const ms_tensor *msi_slots_of(const ms_layer_desc *desc, int group) {
#define MSI_X(group, field, limit) desc->field,
    const ms_tensor *const all[] = {MSI_GROUPS(MSI_X)};
#undef MSI_X
    return all[group];
}

static void msi_count_slots(const ms_layer_desc *desc, uint8_t *count) {
#define MSI_X(group, field, limit) count[group] = msi_used_slots(desc->field, limit);
    MSI_GROUPS(MSI_X)
#undef MSI_X
}

/* MS_ALL_SLOTS becomes the mask of the used slots. */
static void msi_clip_mask(uint32_t *mask, uint32_t slot_count) {
    if (*mask == MS_ALL_SLOTS && slot_count < 32) {
        *mask = ((uint32_t)1 << slot_count) - 1;
    }
}

static void msi_clip_masks(ms_layer_desc *d, const uint8_t *count) {
#define MSI_X(field, group) msi_clip_mask(&d->field, count[MSI_GROUP_##group]);
    MSI_MASKS(MSI_X)
#undef MSI_X
    for (int j = 0; j < count[MSI_GROUP_OUT]; j++) {
        msi_clip_mask(&d->in_place[j], count[MSI_GROUP_IN]);
    }
    for (int i = 0; i < count[MSI_GROUP_IN]; i++) {
        msi_clip_mask(&d->grad_in_place[i].in, count[MSI_GROUP_IN]);
        msi_clip_mask(&d->grad_in_place[i].out, count[MSI_GROUP_OUT]);
        msi_clip_mask(&d->grad_in_place[i].saved, count[MSI_GROUP_SAVED]);
        msi_clip_mask(&d->grad_in_place[i].grad_out, count[MSI_GROUP_OUT]);
    }
}

static msi_layer msi_layer_from(const msi_graph *g, const ms_layer_desc *desc) {
    msi_layer l;
    memset(&l, 0, sizeof l);
    l.forward = desc->forward;
    l.backward = desc->backward;
    l.recompute = desc->recompute;
    l.bind = desc->bind;
    l.user = desc->user;
    l.workspace[MSI_WORKSPACE_FORWARD] = desc->forward_workspace;
    l.workspace[MSI_WORKSPACE_BACKWARD] = desc->backward_workspace;
    l.workspace[MSI_WORKSPACE_RECOMPUTE] =
        desc->recompute ? desc->recompute_workspace : desc->forward_workspace;
    l.flops = desc->flops;
    l.backward_flops = desc->backward_flops;
    l.recompute_flops = desc->recompute_flops;
    l.operand_first = g->operands.count;
    l.mask_first = g->masks.count;
    msi_count_slots(desc, l.count);
#define MSI_X(field, group) l.field = desc->field;
    MSI_MASKS(MSI_X)
#undef MSI_X
#define MSI_X(field) l.field = desc->field;
    MSI_FLAGS(MSI_X)
#undef MSI_X
    const bool declared = msi_recompute_reads_of(&l, MSI_GROUP_IN) != MS_ALL_SLOTS;
    for (uint32_t j = 0; j < MS_LIMIT_OUT && declared; j++) { // an in-place callback reads too
        const uint32_t in_place = l.must_in_place >> j & 1 ? desc->in_place[j] : 0u;
        l.recompute_reads.in |= in_place;
    }
    l.differentiable = desc->backward || (!desc->forward && !desc->no_backward);
    return l;
}

/* Rows of a layer: the first dim of its first output. */
static uint64_t msi_layer_rows(const msi_graph *g, const msi_layer *l, bool largest) {
    msi_operand_cursor out = msi_operands_of(g, l, MSI_GROUP_OUT);
    if (!msi_next_operand(&out)) {
        return 1;
    }
    const ms_shape *shape = &g->tensors.items[out.tensor].view.shape;
    const ms_shape there = largest ? msi_resized(g, *shape, true, NULL) : *shape;
    return there.rank > 0 ? (uint64_t)there.dim[0] : 1;
}

/* The caller has checked the desc. */
static ms_layer msi_add_layer(ms_model *m, const char *name, const ms_layer_desc *desc) {
    const ms_layer none = {0};
    msi_graph *g = &m->graph;
    const uint32_t index = g->layers.count;
    msi_layer l = msi_layer_from(g, desc);
    if (!msi_reserve_layer(m, &l)) {
        MSI_STICK(m, MS_RESULT_OUT_OF_MEMORY, "no memory for %s", msi_label_of(index, name).text);
        return none;
    }
    if (!msi_add_name(m, name, &l.name)) {
        return none;
    }
    for (int group = 0; group < MSI_GROUP_COUNT; group++) {
        msi_add_operands(m, index, group, msi_slots_of(desc, group), l.count[group]);
    }
    for (int i = 0; i < 3; i++) {
        const ms_workspace *w = &l.workspace[i];
        uint64_t bytes;
        if (!msi_multiply(w->row_bytes, msi_layer_rows(g, &l, true), &bytes) ||
            !msi_count_bytes(g, bytes) || !msi_count_bytes(g, w->bytes)) {
            MSI_STICK(m, MS_RESULT_INVALID,
                      "%s: its workspace of %llu bytes and %llu per row brings the whole "
                      "model to 2^58 bytes or more: it is counted in bytes",
                      msi_label_of(index, name).text, (unsigned long long)w->bytes,
                      (unsigned long long)w->row_bytes);
            return none;
        }
    }
    msi_add_masks(g, &l, desc);
    l.elements = msi_output_elements(g, &l);
    g->layers.items[g->layers.count++] = l;
    return msi_layer_handle(g, index);
}

/* Bytes of the workspace of a call. */
static uint64_t msi_workspace_bytes(const msi_graph *g, const msi_layer *l, int which) {
    const ms_workspace *w = &l->workspace[which];
    return w->bytes + (w->row_bytes ? w->row_bytes * msi_layer_rows(g, l, false) : 0);
}

/* Sets the sizes of the axes; NULL: the largest. */
static void msi_set_sizes(msi_graph *g, const int64_t *sizes) {
    for (uint32_t i = 0; i < g->tensors.count && g->axis_count; i++) {
        msi_tensor *t = &g->tensors.items[i];
        t->view.shape = msi_resized(g, t->view.shape, sizes == NULL, sizes);
        t->bytes = ms_shape_count(&t->view.shape) * ms_dtype_bytes(t->view.dtype);
    }
    for (uint32_t a = 0; a < g->axis_count; a++) {
        g->axes[a].size = sizes ? sizes[a] : g->axes[a].largest;
    }
}

static void msi_get_sizes(const msi_graph *g, int64_t *sizes) {
    for (uint32_t a = 0; a < MS_LIMIT_AXES; a++) {
        sizes[a] = a < g->axis_count ? g->axes[a].size : 0;
    }
}

/* Whether an operand of a group, in a slot of this mask, wants a gradient. */
static bool msi_any_wants(const msi_graph *g, const msi_layer *l, int group, uint32_t mask) {
    bool wanted = false;
    for (MSI_EACH(operand, g, l, group)) {
        wanted |= (mask >> operand.slot & 1) && g->tensors.items[operand.tensor].wants_gradient;
    }
    return wanted;
}

/* Marks the tensors of a layer that its own recomputation reads, and those that cannot come back:
   if forward runs only once, these ones, or all where there is no such recomputation. */
static void msi_mark_must_stay(msi_graph *g, const msi_layer *l) {
    for (int group = MSI_GROUP_OUT; group <= MSI_GROUP_SAVED; group++) {
        const uint32_t read = l->recompute ? msi_recompute_reads_of(l, group) : 0;
        for (MSI_EACH(made, g, l, group)) {
            msi_tensor *t = &g->tensors.items[made.tensor];
            t->serves_recompute = read >> made.slot & 1;
            t->must_stay = !msi_can_repeat(l) && (!l->recompute || t->serves_recompute);
        }
    }
}

/* Whether anything reads a value after forward: a backward, or its layer's recompute callback. */
static bool msi_is_read_again(const msi_tensor *t) {
    return t->last_reader != MSI_NONE || t->serves_recompute;
}

/* In the order of forward: which tensors want a gradient. */
static void msi_analyze(msi_graph *g) {
    for (uint32_t i = 0; i < g->tensors.count; i++) {
        msi_tensor *t = &g->tensors.items[i];
        t->wants_gradient = msi_is_trained(t);
        t->updates_early =
            t->wants_gradient && t->technique[MS_TECHNIQUE_EARLY_UPDATE] != MS_SWITCH_OFF;
        t->last_reader = t->last_gradient = MSI_NONE;
        t->last_use = t->producer;
        t->leads_to_loss = i == g->loss;
    }
    for (uint32_t i = 0; i < g->layers.count; i++) {
        msi_layer *l = &g->layers.items[i];
        const bool wanted = msi_any_wants(g, l, MSI_GROUP_IN, MS_ALL_SLOTS) ||
                            msi_any_wants(g, l, MSI_GROUP_PARAM, MS_ALL_SLOTS);
        l->ends_in_loss = msi_any_wants(g, l, MSI_GROUP_IN, l->grads_in_forward);
        for (MSI_EACH(in, g, l, MSI_GROUP_IN)) {
            g->tensors.items[in.tensor].last_use = i;
        }
        for (MSI_EACH(out, g, l, MSI_GROUP_OUT)) {
            msi_tensor *t = &g->tensors.items[out.tensor];
            t->wants_gradient = wanted && l->differentiable && !l->grads_in_forward &&
                                !t->no_gradient && msi_is_float(t->view.dtype);
        }
        msi_mark_must_stay(g, l);
    }
}

/* Marks what the backward of one layer reads, and the gradients that it contributes to. */
static void msi_mark_backward(msi_graph *g, uint32_t layer) {
    const msi_layer *l = &g->layers.items[layer];
    for (int group = 0; group < MSI_GROUP_COUNT; group++) {
        const bool edges = group == MSI_GROUP_IN || group == MSI_GROUP_PARAM;
        const uint32_t in_forward = group == MSI_GROUP_IN ? l->grads_in_forward : 0u;
        const uint32_t reads = l->has_backward ? msi_reads_of(l, group) : 0u;
        const uint32_t gives = l->has_backward && edges ? MS_ALL_SLOTS : in_forward;
        for (MSI_EACH(operand, g, l, group)) {
            msi_tensor *t = &g->tensors.items[operand.tensor];
            if (reads >> operand.slot & 1) {
                t->last_reader = layer;
            }
            if ((gives >> operand.slot & 1) && t->wants_gradient) {
                t->last_gradient = layer;
            }
        }
    }
}

/* From the loss back: a layer runs backward if one of its outputs has a gradient, and its inputs
   lead to the loss if an output does. */
static void msi_analyze_backward(msi_graph *g) {
    for (uint32_t i = g->layers.count; i-- > 0;) {
        msi_layer *l = &g->layers.items[i];
        bool leads = false;
        l->has_backward = false;
        for (MSI_EACH(out, g, l, MSI_GROUP_OUT)) {
            const msi_tensor *t = &g->tensors.items[out.tensor];
            leads |= t->leads_to_loss;
            l->has_backward |=
                t->wants_gradient && (out.tensor == g->loss || t->last_gradient != MSI_NONE);
        }
        for (MSI_EACH(in, g, l, MSI_GROUP_IN)) {
            g->tensors.items[in.tensor].leads_to_loss |= leads;
        }
        if (l->has_backward || l->ends_in_loss) {
            msi_mark_backward(g, i);
        }
        /* A layer without backward could be recomputed after the update, and see new values. */
        for (MSI_EACH(param, g, l, MSI_GROUP_PARAM)) {
            g->tensors.items[param.tensor].updates_early &= l->has_backward;
        }
    }
}

// ------------------------------------------------------------------------------------------------
// >>validate  what a trainer can get wrong, each with its own text

/* Whether a table has every function that it must have, and, of functions that belong together, all
   or none. */
static bool msi_is_complete(const ms_backend *b) {
    const bool needed = b->size == sizeof *b && b->name && b->memory_alloc && b->memory_release &&
                        b->hardware && b->copy_in && b->copy_out && b->copy && b->fill_bytes &&
                        b->fill_f32 && b->add_f32 && b->cast && b->loss && b->add_squares_f32 &&
                        b->clip_scale && b->update && b->gemm;
    const bool streams = b->synchronize && b->record && b->wait && b->wait_on_host;
    const bool recordings = b->recording_check && b->recording_end && b->recording_launch &&
                            b->recording_release && streams;
    return needed && !b->open == !b->close && !b->host_alloc == !b->host_release &&
           (streams || !b->is_asynchronous) && (recordings || !b->recording_begin);
}

/* Whether the shared arena is of the backend that the model is to run on. */
static bool msi_arena_fits(const ms_config *c) {
    return !c->arena ||
           (c->arena->backend.memory_alloc == c->backend.memory_alloc &&
            c->arena->backend.copy == c->backend.copy && c->arena->backend.user == c->backend.user);
}

enum { MSI_MAX_WARMUP = 1000 };

static bool msi_switches_are_valid(const ms_config *c) {
    bool valid = (unsigned)c->static_profiling <= MS_SWITCH_OFF &&
                 (unsigned)c->empirical_profiling <= MS_SWITCH_OFF;
    for (int t = 0; t < MS_TECHNIQUE_COUNT; t++) {
        valid &= (unsigned)msi_switch_of(c, (ms_technique)t) <= MS_SWITCH_OFF;
    }
    return valid;
}

/* What is wrong with a config whose defaults are filled in, and the number that is wrong, or 0;
   NULL: nothing is. */
static const char *msi_config_fault(const ms_config *c, double *number) {
    const struct {
        bool wrong;
        double number;
        const char *text;
    } checks[] = {
        {c->cuda_graph && (!c->backend.recording_begin || !c->backend.is_asynchronous), 0.0,
         "cuda_graph: this backend cannot record: leave it off"},
        {c->cuda_graph && c->debug, 0.0,
         "cuda_graph: debug mode runs callbacks several times: leave one of the two off"},
        {!msi_is_complete(&c->backend), (double)c->backend.size,
         "backend: its size is not sizeof(ms_backend), or a function is missing: begin with a copy "
         "of ms_backend_cpu()"},
        {c->allocator.alloc && !c->allocator.release, 0.0,
         "allocator: release is missing: set both functions, or neither for malloc and free"},
        {!c->allocator.alloc && c->allocator.release, 0.0,
         "allocator: alloc is missing: set both functions, or neither for malloc and free"},
        {!msi_arena_fits(c), 0.0,
         "arena: its backend is not that of the model: give the same one to ms_arena_create"},
        {!(msi_is_finite(c->target_utilization) && c->target_utilization > 0.0 &&
           c->target_utilization <= 1.0),
         c->target_utilization,
         "target_utilization: it must be above 0 and at most 1, or 0 for 0.85"},
        {(unsigned)c->mode >= MS_MODE_COUNT, (double)(int)c->mode,
         "mode: there is no such mode: set one of ms_mode"},
        {!msi_switches_are_valid(c), 0.0,
         "checkpointing, offloading, tiling, mixed_precision, optimizer_8bit, early_update, "
         "static_profiling or empirical_profiling: there is no such switch: set one of ms_switch"},
        {c->warmup_steps > MSI_MAX_WARMUP, (double)c->warmup_steps,
         "warmup_steps: it must be at most 1000"}};
    for (uint32_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        if (checks[i].wrong) {
            *number = checks[i].number;
            return checks[i].text;
        }
    }
    return NULL;
}

/* What is wrong with the description of a device, or NULL. */
static const char *msi_hardware_fault(const ms_hardware *hardware) {
    const ms_hardware none = MSI_ZERO_INIT;
    ms_hardware h = hardware ? *hardware : none;
    if (!hardware) {
        return "the device is NULL, as ms_hardware_find returns it for a name that no built-in "
               "device has, or several; ms_hardware_at lists them, and ms_clear_hardware plans for "
               "the model's own";
    }
    for (int i = 0; i < MSI_SPEED_COUNT; i++) {
        if (!msi_is_speed(i, *msi_speed(&h, i))) {
            return "a speed is negative, not finite, or beyond all machines";
        }
    }
    return (unsigned)h.kind > MS_DEVICE_INTEGRATED         ? "there is no such kind of device"
           : !memchr(h.name, 0, sizeof h.name)             ? "its name is not terminated"
           : h.total_bytes && h.free_bytes > h.total_bytes ? "more memory is free than there is"
           : h.host_total_bytes && h.host_free_bytes > h.host_total_bytes
               ? "more host memory is free than there is"
               : NULL;
}

/* Reports a wrong argument, as an error that sticks; false, so that a check can return it. */
#define MSI_REFUSE(m, ...) (MSI_STICK(m, MS_RESULT_INVALID, __VA_ARGS__), false)
#define MSI_REFUSE_LAYER(m, name, format, ...)                                                     \
    MSI_REFUSE(m, "%s: " format, msi_label_of((m)->graph.layers.count, name).text, __VA_ARGS__)

/* Whether the device that was set last can be planned for. */
static ms_result msi_check_hardware(ms_model *m) {
    const char *fault = m->sources.given_fault;
    return fault ? msi_fail(m, MS_RESULT_INVALID, "ms_set_hardware: %s", fault) : MS_RESULT_OK;
}

/* Whether a value is a number from 0 to below 1. */
static bool msi_is_share(float value) {
    return msi_is_finite((double)value) && value >= 0.0f && value < 1.0f;
}

static bool msi_is_positive_or_zero(double value) {
    return msi_is_finite(value) && value >= 0.0;
}

/* What does not go together in an optimizer, or NULL. */
static const char *msi_optimizer_fault(const ms_optimizer_desc *desc) {
    const bool custom = desc && desc->kind == MS_OPTIMIZER_CUSTOM;
    return !desc                                      ? "desc is NULL"
           : (unsigned)desc->kind > MS_OPTIMIZER_NONE ? "there is no such kind"
           : custom && !desc->update ? "MS_OPTIMIZER_CUSTOM needs an update callback"
           : !custom && desc->update ? "an update callback is for MS_OPTIMIZER_CUSTOM alone"
           : !custom && desc->state_count != 0 ? "state_count is for MS_OPTIMIZER_CUSTOM alone"
           : desc->kind == MS_OPTIMIZER_NONE && desc->grad_clip_norm != 0.0f
               ? "MS_OPTIMIZER_NONE updates nothing, so there is nothing to clip"
               : NULL;
}

static bool msi_check_optimizer(ms_model *m, const ms_optimizer_desc *desc) {
    const char *fault = msi_optimizer_fault(desc);
    if (fault) {
        return MSI_REFUSE(m, "ms_set_optimizer: %s", fault);
    }
    if (desc->state_count > MS_LIMIT_OPTIMIZER_STATE) {
        return MSI_REFUSE(
            m, "ms_set_optimizer: state_count is %u; a param has %d tensors of state at most",
            (unsigned)desc->state_count, MS_LIMIT_OPTIMIZER_STATE);
    }
    return (msi_is_share(desc->beta1) && msi_is_share(desc->beta2) &&
            msi_is_share(desc->momentum) && msi_is_positive_or_zero((double)desc->epsilon) &&
            msi_is_finite((double)desc->learning_rate) &&
            msi_is_finite((double)desc->weight_decay) &&
            msi_is_positive_or_zero((double)desc->grad_clip_norm)) ||
           MSI_REFUSE(m,
                      "ms_set_optimizer: rate %g, decay %g, betas %g %g, momentum %g, epsilon %g, "
                      "clip norm %g: all must be finite, betas and momentum at least 0 and below "
                      "1, epsilon and norm not negative",
                      (double)desc->learning_rate, (double)desc->weight_decay, (double)desc->beta1,
                      (double)desc->beta2, (double)desc->momentum, (double)desc->epsilon,
                      (double)desc->grad_clip_norm);
}

/* Checks a number that a setter received, perhaps for a tensor. */
static bool msi_check_finite(ms_model *m, const char *function, const char *tensor, float value) {
    return m && (msi_is_finite((double)value) ||
                 MSI_REFUSE(m, "%s%s%s%s: %g; it must be a finite number", function,
                            tensor ? " of \"" : "", tensor ? tensor : "", tensor ? "\"" : "",
                            (double)value));
}

static bool msi_check_shape(ms_model *m, msi_kind kind, const char *name, ms_dtype dtype,
                            const ms_shape *shape) {
    const msi_graph *g = &m->graph;
    const char *what = msi_kind_names[kind];
    if (ms_dtype_bytes(dtype) == 0) {
        return MSI_REFUSE(m, "%s \"%s\": there is no dtype %d", what, name, (int)dtype);
    }
    if (kind == MSI_KIND_PARAM && dtype != MS_DTYPE_F32) {
        MSI_STICK(m, MS_RESULT_UNSUPPORTED, "param \"%s\" has dtype %s; params are f32", name,
                  ms_dtype_name(dtype));
        return false;
    }
    if (shape->rank < 0 || shape->rank > MS_LIMIT_RANK) {
        return MSI_REFUSE(
            m, "%s \"%s\": rank %d; it must be 0 to %d (-1 is what a wrong ms_along returns)", what,
            name, (int)shape->rank, MS_LIMIT_RANK);
    }
    for (int i = 0; i < shape->rank; i++) {
        int64_t unit = shape->dim[i];
        if (unit < 1) {
            return MSI_REFUSE(m, "%s \"%s\": dim %d is %lld; dims must be at least 1", what, name,
                              i, (long long)unit);
        }
        if (shape->axes[i] && shape->axes_of && shape->axes_of != msi_axes_tag(g)) {
            return MSI_REFUSE(
                m,
                "%s \"%s\": dim %d lies along an axis of another model; ms_along takes "
                "what ms_add_axis of this model has returned",
                what, name, i);
        }
        for (uint32_t a = 0; a < MS_LIMIT_AXES; a++) {
            if (!(shape->axes[i] >> a & 1)) {
                continue;
            }
            if (a >= g->axis_count) {
                return MSI_REFUSE(
                    m, "%s \"%s\": dim %d lies along axis %u, which this model does not have", what,
                    name, i, (unsigned)a);
            }
            if (kind == MSI_KIND_PARAM || unit % g->axes[a].size != 0) {
                return MSI_REFUSE(m,
                                  "%s \"%s\": dim %d, %lld, lies along axis \"%s\" of size %lld%s",
                                  what, name, i, (long long)shape->dim[i],
                                  msi_name(&m->graph, g->axes[a].name), (long long)g->axes[a].size,
                                  kind == MSI_KIND_PARAM ? "; params have fixed sizes"
                                                         : " and is not a multiple of it");
            }
            unit /= g->axes[a].size;
        }
    }
    return true;
}

static ms_tensor msi_register_tensor(ms_model *m, msi_kind kind, const char *name, ms_dtype dtype,
                                     const ms_shape *shape) {
    const ms_tensor none = {0};
    name = name ? name : "";
    return msi_registering(m, msi_kind_names[kind], name) &&
                   msi_check_shape(m, kind, name, dtype, shape)
               ? msi_add_tensor(m, kind, name, dtype, shape)
               : none;
}

static bool msi_check_axis(ms_model *m, const char *name, int64_t size, int64_t largest) {
    const uint32_t count = m->graph.axis_count;
    return (size >= 1 && largest >= size && count < MS_LIMIT_AXES) ||
           MSI_REFUSE(m,
                      "axis \"%s\": size %lld, largest %lld, %u axes so far: the size must be at "
                      "least 1, the largest no smaller, and there are %d axes at most",
                      name, (long long)size, (long long)largest, (unsigned)count, MS_LIMIT_AXES);
}

/* Checks the sizes that ms_reshape received. */
static ms_result msi_check_sizes(ms_model *m, const int64_t *sizes) {
    const msi_graph *g = &m->graph;
    if (g->axis_count == 0) {
        return msi_fail_argument(m, "ms_reshape", "the model has no axes: see ms_add_axis");
    }
    for (uint32_t a = 0; a < g->axis_count; a++) {
        if (sizes[a] < 1 || sizes[a] > g->axes[a].largest) {
            return msi_fail(m, MS_RESULT_INVALID,
                            "ms_reshape: axis \"%s\" cannot have size %lld: 1 to %lld was declared",
                            msi_name(&m->graph, g->axes[a].name), (long long)sizes[a],
                            (long long)g->axes[a].largest);
        }
    }
    return MS_RESULT_OK;
}

/* Why a tensor cannot be in a slot of this group, or NULL. */
static const char *msi_operand_fault(const msi_graph *g, msi_group_kind group, ms_tensor handle) {
    const uint32_t index = msi_value_index(g, handle);
    if (index == MSI_NONE) {
        return msi_index(g, handle) == MSI_NONE
                   ? "is not a tensor of this model: register it before the layer"
                   : "is its gradient or optimizer state: pass the handle of its value";
    }
    const msi_tensor *t = &g->tensors.items[index];
    const bool written = t->producer != MSI_NONE;
    switch (group) {
    case MSI_GROUP_IN:
        return t->kind == MSI_KIND_PARAM ? "is a param; params belong in `param`"
               : t->kind == MSI_KIND_SAVED
                   ? "is a saved tensor, which only its own layer can read: make it an output"
               : t->kind == MSI_KIND_ACTIVATION && !written
                   ? "is not written by any layer before this one: register that one first"
                   : NULL;
    case MSI_GROUP_PARAM:
        return t->kind == MSI_KIND_PARAM ? NULL
                                         : "is not a param: values that are not trained "
                                           "belong in `in`";
    case MSI_GROUP_STATE:
        return t->kind == MSI_KIND_BUFFER ? NULL : "is not a buffer: ms_buffer makes state";
    case MSI_GROUP_OUT:
        return t->kind != MSI_KIND_ACTIVATION ? "is not an activation: ms_activation makes outputs"
               : written ? "is written by a layer already: an output needs an activation of its "
                           "own, and in_place shares memory"
                         : NULL;
    case MSI_GROUP_SAVED:
        return t->kind != MSI_KIND_SAVED ? "is not a saved tensor: ms_saved makes one"
               : written                 ? "is written by a layer already: make one for each layer"
                                         : NULL;
    case MSI_GROUP_GRAD_OUT: // no desc names these
    case MSI_GROUP_GRAD_IN:
    case MSI_GROUP_GRAD_PARAM:
    case MSI_GROUP_WORKSPACE:
    case MSI_GROUP_END:
        break;
    }
    return NULL;
}

static const char *msi_handle_name(const msi_graph *g, ms_tensor handle) {
    const uint32_t t = msi_index(g, handle);
    return t == MSI_NONE ? "?" : msi_tensor_name(g, t);
}

static const msi_tensor *msi_tensor_at(const ms_model *m, ms_tensor handle) {
    const uint32_t t = msi_index(&m->graph, handle);
    return t == MSI_NONE ? NULL : &m->graph.tensors.items[t];
}

/* The output of a layer that a setter received; MSI_NONE and an error that sticks if it is none. */
static uint32_t msi_activation_index(ms_model *model, const char *function, ms_tensor tensor) {
    if (!msi_registering(model, function, model ? msi_handle_name(&model->graph, tensor) : "")) {
        return MSI_NONE;
    }
    const uint32_t t = msi_value_index(&model->graph, tensor);
    if (t == MSI_NONE || model->graph.tensors.items[t].kind != MSI_KIND_ACTIVATION ||
        model->graph.tensors.items[t].producer == MSI_NONE) {
        MSI_STICK(model, MS_RESULT_INVALID,
                  "%s: tensor \"%s\" is not the output of a layer: register the layer that writes "
                  "it first",
                  function, t == MSI_NONE ? "?" : msi_tensor_name(&model->graph, t));
        return MSI_NONE;
    }
    return t;
}

/* The tensor, of one of two kinds, that a setter received, or NULL and an error that sticks. */
static msi_tensor *msi_tensor_of(ms_model *model, const char *function, ms_tensor tensor,
                                 msi_kind kind, msi_kind other) {
    if (!msi_registering(model, function, model ? msi_handle_name(&model->graph, tensor) : "")) {
        return NULL;
    }
    const uint32_t t = msi_value_index(&model->graph, tensor);
    msi_tensor *found = t == MSI_NONE ? NULL : &model->graph.tensors.items[t];
    if (!found || (found->kind != kind && found->kind != other)) {
        MSI_STICK(model, MS_RESULT_INVALID, "%s: \"%s\" (%s) is not an %s%s%s", function,
                  found ? msi_name(&model->graph, found->name) : "?",
                  found ? msi_kind_names[found->kind] : "not a tensor of this model",
                  msi_kind_names[kind], kind == other ? "" : " or ",
                  kind == other ? "" : msi_kind_names[other]);
        return NULL;
    }
    return found;
}

static msi_tensor *msi_param_of(ms_model *model, const char *function, ms_tensor param) {
    const uint32_t t = model ? msi_value_index(&model->graph, param) : MSI_NONE;
    const bool found = t != MSI_NONE && model->graph.tensors.items[t].kind == MSI_KIND_PARAM;
    if (model && !found) {
        MSI_STICK(model, MS_RESULT_INVALID,
                  "%s: \"%s\" is not a param: pass what ms_param has returned", function,
                  t == MSI_NONE ? "?" : msi_tensor_name(&model->graph, t));
    }
    return found ? &model->graph.tensors.items[t] : NULL;
}

/* The layer that a setter received, or NULL and an error that sticks. */
static msi_layer *msi_layer_of(ms_model *m, const char *function, ms_layer layer) {
    const uint32_t index = m ? msi_layer_index(&m->graph, layer) : MSI_NONE;
    const bool found = m && (index != MSI_NONE ||
                             MSI_REFUSE(m,
                                        "%s: this is no layer of this model; take the handle that "
                                        "ms_register_layer of this model has returned",
                                        function));
    return found ? &m->graph.layers.items[index] : NULL;
}

/* The index of a loss, or MSI_NONE and an error that sticks. */
static uint32_t msi_loss_index(ms_model *m, ms_tensor loss) {
    const uint32_t t = msi_activation_index(m, "ms_set_loss", loss);
    const ms_dtype dtype = t == MSI_NONE ? MS_DTYPE_F32 : m->graph.tensors.items[t].view.dtype;
    return dtype == MS_DTYPE_F32 || MSI_REFUSE(m, "loss \"%s\" has dtype %s; a loss is f32",
                                               msi_tensor_name(&m->graph, t), ms_dtype_name(dtype))
               ? t
               : MSI_NONE;
}

/* Whether there are such a technique and such a switch. */
static bool msi_check_technique(ms_model *m, const char *function, ms_technique technique,
                                ms_switch force) {
    return m && (((unsigned)technique < MS_TECHNIQUE_COUNT && (unsigned)force <= MS_SWITCH_OFF) ||
                 MSI_REFUSE(m, "%s: there is no technique %d or no switch %d", function,
                            (int)technique, (int)force));
}

/* The index of a tensor that a technique can be set on, or MSI_NONE and an error that sticks. */
static uint32_t msi_technique_index(ms_model *m, ms_tensor tensor, ms_technique technique) {
    const uint32_t t = msi_value_index(&m->graph, tensor);
    const bool fits =
        t != MSI_NONE && (msi_techniques[technique].kinds >> m->graph.tensors.items[t].kind & 1);
    return fits || MSI_REFUSE(m, "ms_set_tensor_technique: \"%s\" is not %s",
                              t == MSI_NONE ? "?" : msi_tensor_name(&m->graph, t),
                              msi_techniques[technique].needed)
               ? t
               : MSI_NONE;
}

/* Forces or forbids a technique for those tensors of a layer that it can be set on. */
static void msi_set_on_layer(ms_model *m, const msi_layer *l, ms_technique technique,
                             ms_switch force) {
    msi_graph *g = &m->graph;
    for (int group = MSI_GROUP_OUT; group <= MSI_GROUP_PARAM; group++) {
        for (MSI_EACH(operand, g, l, group)) {
            msi_tensor *t = &g->tensors.items[operand.tensor];
            if (msi_techniques[technique].kinds >> t->kind & 1) {
                t->technique[technique] = (uint8_t)force;
            }
        }
    }
    m->wrapped.changed = true;
}

/* Checks every slot by itself, and that no output, saved tensor or state is named twice. */
static bool msi_check_slots(ms_model *m, const char *name, const ms_layer_desc *d,
                            const uint8_t *count) {
    for (int group = 0; group < MSI_GROUP_COUNT; group++) {
        const ms_tensor *slots = msi_slots_of(d, group);
        const bool single = group != MSI_GROUP_IN && group != MSI_GROUP_PARAM;
        const uint32_t inputs = group == MSI_GROUP_STATE ? count[MSI_GROUP_IN] : 0;
        for (uint32_t i = 0; i < count[group]; i++) {
            const ms_tensor slot = slots[i];
            const char *fault =
                slot.id ? msi_operand_fault(&m->graph, (msi_group_kind)group, slot) : NULL;
            for (uint32_t k = 0; k < i && !fault && single && slot.id; k++) {
                fault = slots[k].id == slot.id ? "is named in two slots: name it once" : NULL;
            }
            for (uint32_t k = 0; k < inputs && !fault && slot.id; k++) {
                fault = d->in[k].id == slot.id
                            ? "is named in `in` too; a layer reads its state through `state`"
                            : NULL;
            }
            if (fault) {
                return MSI_REFUSE_LAYER(m, name, "%s[%u] \"%s\" %s", msi_group_names[group],
                                        (unsigned)i, msi_handle_name(&m->graph, slot), fault);
            }
        }
    }
    return true;
}

static bool msi_check_mask(ms_model *m, const char *name, const char *field, uint32_t mask,
                           uint32_t slot_count) {
    return slot_count >= 32 || mask >> slot_count == 0 ||
           MSI_REFUSE_LAYER(m, name,
                            "%s is 0x%x and names slot %u; the layer uses %u, from 0: bit i is "
                            "slot i, and MS_ALL_SLOTS is all that are used",
                            field, (unsigned)mask,
                            (unsigned)(slot_count + msi_lowest_bit(mask >> slot_count)),
                            (unsigned)slot_count);
}

static bool msi_check_masks(ms_model *m, const char *name, const ms_layer_desc *d,
                            const uint8_t *count) {
    const uint32_t in = count[MSI_GROUP_IN], out = count[MSI_GROUP_OUT];
    const uint32_t saved = count[MSI_GROUP_SAVED];
    bool good = true;
#define MSI_X(field, group)                                                                        \
    good = good && msi_check_mask(m, name, #field, d->field, count[MSI_GROUP_##group]);
    MSI_MASKS(MSI_X)
#undef MSI_X
    for (uint32_t j = 0; j < MS_LIMIT_OUT && good; j++) {
        char field[24];
        msi_format(field, sizeof field, "in_place[%u]", (unsigned)j);
        good = msi_check_mask(m, name, field, d->in_place[j], j < out ? in : 0);
    }
    for (uint32_t i = 0; i < MS_LIMIT_IN && good; i++) {
        const ms_slot_masks *o = &d->grad_in_place[i];
        const bool used = i < in;
        good = msi_check_mask(m, name, "grad_in_place.in", o->in, used ? in : 0) &&
               msi_check_mask(m, name, "grad_in_place.out", o->out, used ? out : 0) &&
               msi_check_mask(m, name, "grad_in_place.saved", o->saved, used ? saved : 0) &&
               msi_check_mask(m, name, "grad_in_place.grad_out", o->grad_out, used ? out : 0);
    }
    return good;
}

/* Checks one result that must be computed in place: its mask names one operand, of its size and
   dtype, in whose memory no other result is computed. */
static bool msi_check_must(ms_model *m, const char *name, const char *field, uint32_t slot,
                           ms_tensor result, uint32_t mask, const ms_tensor *operands,
                           uint32_t *claimed) {
    const uint32_t k = msi_lowest_bit(mask);
    const char *fault =
        mask == 0 ? "names none: set the bit of the operand in whose memory it is computed"
        : (mask & (mask - 1)) != 0 ? "names several: leave the one in whose memory it is computed"
        : (*claimed >> k & 1)
            ? "names an operand that another result is computed in: give each its own"
            : NULL;
    if (fault) {
        return MSI_REFUSE_LAYER(m, name, "\"%s\" must be computed in place, but %s[%u], 0x%x, %s",
                                msi_handle_name(&m->graph, result), field, (unsigned)slot,
                                (unsigned)mask, fault);
    }
    *claimed |= (uint32_t)1 << k;
    const msi_tensor *x = msi_tensor_at(m, result), *y = msi_tensor_at(m, operands[k]);
    return (x && y && x->view.dtype == y->view.dtype && x->bytes == y->bytes &&
            msi_scales_alike(&m->graph, msi_index(&m->graph, result),
                             msi_index(&m->graph, operands[k]))) ||
           MSI_REFUSE_LAYER(
               m, name,
               "\"%s\", %llu bytes of %s, must be computed in the place of \"%s\", %llu bytes of "
               "%s: both must have one dtype, and one size along the same axes",
               msi_handle_name(&m->graph, result), (unsigned long long)(x ? x->bytes : 0),
               x ? ms_dtype_name(x->view.dtype) : "?", msi_handle_name(&m->graph, operands[k]),
               (unsigned long long)(y ? y->bytes : 0), y ? ms_dtype_name(y->view.dtype) : "?");
}

static bool msi_check_in_place(ms_model *m, const char *name, const ms_layer_desc *d) {
    uint32_t claimed = 0, grads_claimed = 0;
    bool good = true;
    for (uint32_t j = 0; j < MS_LIMIT_OUT && good; j++) {
        good = !(d->must_in_place >> j & 1) ||
               msi_check_must(m, name, "in_place", j, d->out[j], d->in_place[j], d->in, &claimed);
    }
    for (uint32_t i = 0; i < MS_LIMIT_IN && good; i++) {
        const ms_slot_masks *o = &d->grad_in_place[i];
        const uint32_t mask = (o->in | o->out | o->saved) != 0 ? 0 : o->grad_out;
        good = !(d->must_grad_in_place >> i & 1) ||
               msi_check_must(m, name, "grad_in_place.grad_out", i, d->in[i], mask, d->out,
                              &grads_claimed);
    }
    return good;
}

/* Gradients that overwrite are added up by the library, which adds f32. */
static bool msi_check_edges(ms_model *m, const char *name, const ms_layer_desc *d) {
    const uint32_t both_in = d->accumulates.in & d->overwrites.in;
    const uint32_t both_param = d->accumulates.param & d->overwrites.param;
    const uint32_t must = d->must_grad_in_place & d->accumulates.in;
    if (both_in | both_param | must) {
        return MSI_REFUSE_LAYER(
            m, name,
            "the gradient of %s[%u] is declared both to accumulate and to overwrite%s: say one of "
            "them, or neither, and follow ms_view.beta",
            both_in | must ? "in" : "param",
            (unsigned)msi_lowest_bit(both_in ? both_in
                                     : must  ? must
                                             : both_param),
            both_in | both_param ? "" : " (in place)");
    }
    const uint32_t overwrites = d->overwrites.in | d->must_grad_in_place;
    for (uint32_t i = 0; i < MS_LIMIT_IN; i++) {
        const uint32_t index = overwrites >> i & 1 ? msi_index(&m->graph, d->in[i]) : MSI_NONE;
        const msi_tensor *t = index == MSI_NONE ? NULL : &m->graph.tensors.items[index];
        if (t && t->kind == MSI_KIND_ACTIVATION && msi_is_float(t->view.dtype) &&
            t->view.dtype != MS_DTYPE_F32) {
            return MSI_REFUSE_LAYER(m, name,
                                    "the gradient of in[%u] \"%s\" is %s; one that is overwritten "
                                    "or computed in place may have to be summed by the library, "
                                    "which sums f32 alone: follow ms_view.beta instead",
                                    (unsigned)i, msi_name(&m->graph, t->name),
                                    ms_dtype_name(t->view.dtype));
        }
    }
    return true;
}

static bool msi_names_slots(const ms_reads *r) {
    return (r->in | r->out | r->saved | r->param) != 0;
}

/* Backward can destroy only what it receives. */
static bool msi_check_clobbers(ms_model *m, const char *name, const ms_layer_desc *d) {
    const ms_reads *r = &d->backward_reads;
    const uint32_t in = d->clobbers.in & ~r->in;
    const uint32_t out = d->clobbers.out & ~r->out;
    const uint32_t saved = d->clobbers.saved & ~r->saved;
    const bool reads_all = !r->nothing && !msi_names_slots(r);
    return reads_all || !(in | out | saved) ||
           MSI_REFUSE_LAYER(m, name,
                            "clobbers names %s[%u], but backward_reads does not, so backward does "
                            "not receive it: name it in both, or in neither",
                            in    ? "in"
                            : out ? "out"
                                  : "saved",
                            (unsigned)msi_lowest_bit(in    ? in
                                                     : out ? out
                                                           : saved));
}

/* What does not go together in the callbacks and promises of a layer, or NULL. */
static const char *msi_callback_fault(const ms_model *m, const ms_layer_desc *d,
                                      const uint8_t *count) {
    const ms_reads *r = &d->backward_reads, *p = &d->recompute_reads;
    const ms_workspace *w = &d->recompute_workspace;
    return count[MSI_GROUP_OUT] == 0 ? "a layer needs an output: set out[0] to an ms_activation"
           : !d->forward && !m->config.dry_run
               ? "a layer needs a forward callback; only in a dry run it may be NULL"
           : !d->forward && (d->backward || d->recompute || d->bind)
               ? "it has callbacks, but no forward: set forward too, or none of them"
           : d->no_backward && d->backward
               ? "no_backward is set, but it has a backward callback: leave one of them out"
           : r->nothing && msi_names_slots(r)
               ? "backward_reads says both \"nothing\" and what it reads: say one of them"
           : p->nothing && msi_names_slots(p)
               ? "recompute_reads says both \"nothing\" and what it reads: say one of them"
           : (p->nothing || msi_names_slots(p)) && !d->recompute
               ? "recompute_reads is given, but no recompute callback: forward reads all it reads"
           : d->grads_in_forward && d->backward
               ? "grads_in_forward and a backward callback: a layer can have one of them"
           : d->grads_in_forward && d->must_grad_in_place
               ? "grads_in_forward and must_grad_in_place: there is no grad_out in forward; "
                 "grad_in_place can name an input"
           : d->recompute && d->grads_in_forward
               ? "it has a recompute callback, but grads_in_forward, and so runs once: "
                 "leave one of them out"
           : d->recompute_reads.out & d->must_in_place
               ? "recompute_reads names an output that must_in_place fills with the input first: "
                 "read the input instead"
           : d->backward_state && !d->backward && d->forward
               ? "backward_state is set, but it has no backward: "
                 "leave one of them out, or add the other"
           : d->keeps_state && count[MSI_GROUP_STATE] == 0
               ? "keeps_state is set, but it has no state: name its buffers in `state`"
           : !d->recompute && (w->bytes || w->row_bytes)
               ? "recompute_workspace is given, but no recompute callback: forward uses its own"
           : (unsigned)d->forward_workspace.contents > MS_CONTENTS_ZERO ||
                   (unsigned)d->backward_workspace.contents > MS_CONTENTS_ZERO ||
                   (unsigned)w->contents > MS_CONTENTS_ZERO
               ? "the contents of a workspace are not one of ms_contents: zero the desc first"
               : NULL;
}

static bool msi_check_layer(ms_model *m, const char *name, const ms_layer_desc *d,
                            const uint8_t *count) {
    const char *fault = msi_callback_fault(m, d, count);
    if (fault) {
        return MSI_REFUSE_LAYER(m, name, "%s", fault);
    }
    if (!msi_is_positive_or_zero(d->flops) || !msi_is_positive_or_zero(d->backward_flops) ||
        !msi_is_positive_or_zero(d->recompute_flops)) {
        return MSI_REFUSE_LAYER(m, name,
                                "flops is %g, backward_flops %g and recompute_flops %g: they must "
                                "be finite numbers, at least 0; 0 lets the library count",
                                d->flops, d->backward_flops, d->recompute_flops);
    }
    return msi_check_masks(m, name, d, count) && msi_check_slots(m, name, d, count) &&
           msi_check_in_place(m, name, d) && msi_check_edges(m, name, d) &&
           msi_check_clobbers(m, name, d);
}

static ms_layer msi_register_layer(ms_model *m, const ms_layer_desc *desc) {
    const ms_layer none = {0};
    char numbered[32];
    msi_format(numbered, sizeof numbered, "layer %u", (unsigned)m->graph.layers.count);
    const char *name = desc->name ? desc->name : numbered;
    ms_layer_desc clipped = *desc;
    uint8_t count[MSI_GROUP_COUNT];
    msi_count_slots(desc, count);
    msi_clip_masks(&clipped, count);
    return msi_check_layer(m, name, &clipped, count) ? msi_add_layer(m, name, &clipped) : none;
}

/* A buffer that one layer reads as an input and a later one changes: backward and recomputation of
   the first would see the changed value. */
static ms_result msi_check_buffers(ms_model *m) {
    msi_graph *g = &m->graph;
    for (uint32_t i = g->layers.count; i-- > 0;) { // last_reader: a later layer that changes it
        const msi_layer *l = &g->layers.items[i];
        for (MSI_EACH(in, g, l, MSI_GROUP_IN)) {
            const msi_tensor *t = &g->tensors.items[in.tensor];
            if (t->kind == MSI_KIND_BUFFER && t->last_reader != MSI_NONE) {
                return msi_fail(
                    m, MS_RESULT_INVALID,
                    "%s: in[%u] \"%s\" is changed as state by the later %s, so backward would see "
                    "another value: make it state of %s too, or copy it",
                    msi_layer_label(g, i).text, (unsigned)in.slot, msi_name(g, t->name),
                    msi_layer_label(g, t->last_reader).text, msi_layer_label(g, i).text);
            }
        }
        for (MSI_EACH(state, g, l, MSI_GROUP_STATE)) {
            g->tensors.items[state.tensor].last_reader = i;
        }
    }
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        g->tensors.items[t].last_reader = MSI_NONE;
    }
    return MS_RESULT_OK;
}

/* A tensor on the host has no memory in the arena in which a result could be computed. */
static ms_result msi_check_on_host(ms_model *m) {
    const msi_graph *g = &m->graph;
    for (uint32_t i = 0; i < g->layers.count; i++) {
        const msi_layer *l = &g->layers.items[i];
        uint32_t changed = l->clobbers.in;
        for (uint32_t j = 0; j < l->count[MSI_GROUP_OUT]; j++) {
            changed |= l->must_in_place >> j & 1 ? g->masks.items[l->mask_first + j] : 0u;
        }
        for (MSI_EACH(in, g, l, MSI_GROUP_IN)) {
            if ((changed >> in.slot & 1) && g->tensors.items[in.tensor].on_host) {
                return msi_fail(m, MS_RESULT_INVALID,
                                "%s: in[%u] \"%s\" stays on the host (ms_set_on_host), but "
                                "must_in_place or clobbers says that it is written to: leave it on "
                                "the device, or give the layer a copy",
                                msi_layer_label(g, i).text, (unsigned)in.slot,
                                msi_tensor_name(g, in.tensor));
            }
        }
    }
    return MS_RESULT_OK;
}

/* Why a tensor cannot be dropped although checkpointing is forced on it, or NULL. */
static const char *msi_drop_fault(const msi_graph *g, uint32_t t) {
    const msi_tensor *tensor = &g->tensors.items[t];
    const msi_layer *l = tensor->producer == MSI_NONE ? NULL : &g->layers.items[tensor->producer];
    return !l                    ? "no layer writes it"
           : tensor->is_output   ? "ms_add_output keeps it"
           : t == g->loss        ? "it is the loss"
           : l->grads_in_forward ? "its layer runs once (grads_in_forward)"
           : !tensor->must_stay  ? NULL
           : l->recompute        ? "its layer has no_recompute, and recompute_reads names it"
                                 : "its layer has no_recompute";
}

/* Why params cannot be updated inside backward, or NULL. */
static const char *msi_early_fault(const ms_model *m) {
    return m->config.accumulation_steps > 1         ? "accumulation_steps is above 1"
           : m->optimizer.grad_clip_norm > 0.0f     ? "grad_clip_norm needs all gradients"
           : m->optimizer.kind == MS_OPTIMIZER_NONE ? "MS_OPTIMIZER_NONE does not update"
                                                    : NULL;
}

/* What the user forces must be possible. */
static ms_result msi_check_forced(ms_model *m) {
    const msi_graph *g = &m->graph;
    const char *early = msi_early_fault(m);
    if (early && m->config.early_update == MS_SWITCH_ON) {
        return msi_fail(m, MS_RESULT_INVALID,
                        "early_update is ON, but %s (accumulation_steps %u, grad_clip_norm %g): "
                        "set it to DEFAULT or OFF",
                        early, (unsigned)m->config.accumulation_steps,
                        (double)m->optimizer.grad_clip_norm);
    }
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const msi_tensor *tensor = &g->tensors.items[t];
        const bool drops = tensor->technique[MS_TECHNIQUE_CHECKPOINTING] == MS_SWITCH_ON;
        const char *fault = drops ? msi_drop_fault(g, t) : NULL;
        if (fault) {
            return msi_fail(
                m, MS_RESULT_INVALID,
                "checkpointing is forced on \"%s\"%s%s, but %s: leave it to the plan",
                msi_tensor_name(g, t), tensor->producer == MSI_NONE ? "" : " of ",
                tensor->producer == MSI_NONE ? "" : msi_layer_label(g, tensor->producer).text,
                fault);
        }
        fault = tensor->technique[MS_TECHNIQUE_EARLY_UPDATE] != MS_SWITCH_ON ? NULL
                : early                                                      ? early
                : tensor->frozen                                             ? "it is frozen"
                : tensor->last_gradient == MSI_NONE          ? "the loss does not depend on it"
                : msi_is_borrowed(tensor, MSI_ROLE_GRADIENT) ? "its gradient is borrowed"
                : !tensor->updates_early                     ? "a layer without a backward reads it"
                                                             : NULL;
        if (fault) {
            return msi_fail(m, MS_RESULT_INVALID,
                            "early update is forced on \"%s\", but %s: leave it to the plan",
                            msi_tensor_name(&m->graph, t), fault);
        }
    }
    return MS_RESULT_OK;
}

static ms_result msi_check_loss(ms_model *m) {
    const msi_graph *g = &m->graph;
    if (g->loss == MSI_NONE) {
        return msi_fail(m, MS_RESULT_INVALID, "no loss: call ms_set_loss with a layer's output");
    }
    bool learns = g->tensors.items[g->loss].wants_gradient;
    for (uint32_t i = 0; i < g->layers.count && !learns; i++) {
        learns = g->layers.items[i].ends_in_loss;
    }
    return learns ? MS_RESULT_OK
                  : msi_fail(
                        m, MS_RESULT_INVALID,
                        "loss \"%s\" depends on no trained param through layers that have a "
                        "backward, without ms_stop_gradient in between: give one of these layers a "
                        "backward, or unfreeze a param",
                        msi_tensor_name(&m->graph, g->loss));
}

/* No backward can run through the outputs of a layer that has already written its gradients in
   forward. */
static ms_result msi_check_ends(ms_model *m) {
    const msi_graph *g = &m->graph;
    for (uint32_t i = 0; i < g->layers.count; i++) {
        const msi_layer *l = &g->layers.items[i];
        for (MSI_EACH(in, g, l, MSI_GROUP_IN)) {
            const msi_tensor *t = &g->tensors.items[in.tensor];
            if (l->has_backward && t->producer != MSI_NONE && !t->no_gradient &&
                g->layers.items[t->producer].ends_in_loss) {
                return msi_fail(m, MS_RESULT_INVALID,
                                "%s reads \"%s\" and has a backward, but %s has written its "
                                "gradients in forward: call ms_stop_gradient on it if it is meant "
                                "as a constant",
                                msi_layer_label(g, i).text, msi_name(g, t->name),
                                msi_layer_label(g, t->producer).text);
            }
        }
    }
    return MS_RESULT_OK;
}

/* Logs what is likely to have been forgotten, though it may be meant. */
static void msi_warn(const ms_model *m) {
    const msi_graph *g = &m->graph;
    for (uint32_t i = 0; i < g->tensors.count; i++) {
        const msi_tensor *t = &g->tensors.items[i];
        if (msi_is_trained(t) && t->last_gradient == MSI_NONE) {
            msi_log(m, MS_LOG_WARNING, "graph", "param \"%s\" gets no gradient from the loss",
                    msi_name(&m->graph, t->name));
        }
    }
    for (uint32_t i = 0; i < g->layers.count; i++) {
        const msi_layer *l = &g->layers.items[i];
        const bool stops = !l->differentiable && !l->no_backward && !l->grads_in_forward &&
                           (msi_any_wants(g, l, MSI_GROUP_IN, MS_ALL_SLOTS) ||
                            msi_any_wants(g, l, MSI_GROUP_PARAM, MS_ALL_SLOTS));
        for (MSI_EACH(out, g, l, MSI_GROUP_OUT)) {
            if (stops && g->tensors.items[out.tensor].leads_to_loss) {
                msi_log(m, MS_LOG_WARNING, "graph",
                        "%s has no backward, so no gradient passes from \"%s\" to what it reads: "
                        "give it one, or set no_backward if that is meant",
                        msi_layer_label(g, i).text, msi_tensor_name(g, out.tensor));
                break;
            }
        }
    }
}

/* Analyses the graph, and checks it as a whole. */
static ms_result msi_check_graph(ms_model *m, msi_goal goal) {
    msi_graph *g = &m->graph;
    if (m->errors.sticky != MS_RESULT_OK && !m->run.plan) {
        return msi_fail(m, m->errors.sticky, "%s", m->errors.sticky_text);
    }
    msi_analyze(g);
    ms_result result = msi_check_buffers(m);
    MSI_THEN(result, msi_check_on_host(m));
    MSI_THEN(result, msi_check_loss(m));
    if (result != MS_RESULT_OK) {
        return result;
    }
    msi_analyze_backward(g);
    for (uint32_t i = 0; i < g->tensors.count; i++) {
        msi_tensor *t = &g->tensors.items[i];
        t->updates_early &= !msi_is_borrowed(t, MSI_ROLE_GRADIENT) && !msi_early_fault(m);
    }
    msi_warn(m);
    result = msi_check_ends(m);
    if (m->config.cuda_graph && m->optimizer.kind == MS_OPTIMIZER_CUSTOM) {
        return msi_fail(
            m, MS_RESULT_INVALID,
            "cuda_graph: the arguments of an update callback differ from step to step, so it "
            "cannot be recorded: leave cuda_graph off, or use a built-in optimizer");
    }
    return result == MS_RESULT_OK && goal != MSI_GOAL_PLAIN ? msi_check_forced(m) : result;
}

// ------------------------------------------------------------------------------------------------
// >>profile  the time that each layer takes: known, measured, or by a roofline

/* Fills in the speeds that a device does not state, or that are out of range, by typical ones of
   its kind. What matters for a plan is the ratio of arithmetic to memory traffic: flops per
   byte. */
static void msi_fill_speeds(ms_hardware *h) {
    static const double of_kind[][MSI_SPEED_COUNT] = {
        // as in msi_speed; TF32 is as fast as F32
        {20.0, 10.0, 10.0, 0.32, 0.0, 0.32, 0.0},  // CPU: a few cores
        {900.0, 20.0, 20.0, 20.0, 0.0, 80.0, 4.0}, // discrete GPU
        {100.0, 20.0, 20.0, 2.0, 0.0, 8.0, 10.0}}; // integrated GPU
    const int kind = (unsigned)h->kind <= MS_DEVICE_INTEGRATED ? (int)h->kind : MS_DEVICE_CPU;
    for (int i = 0; i < MSI_SPEED_COUNT; i++) {
        double *speed = msi_speed(h, i);
        *speed = msi_is_speed(i, *speed) && *speed > 0.0 ? *speed : of_kind[kind][i];
    }
    h->tf32_tflops = h->tf32_tflops > 0.0 ? h->tf32_tflops : h->f32_tflops;
}

/* The device that the next plan is for: the one that was set, or the model's own, with the speeds
   of a loaded profile or those that its backend states. */
static void msi_get_hardware(ms_model *m) {
    ms_hardware *h = &m->costs.hardware;
    *h = m->sources.given;
    if (!m->sources.is_given) {
        memset(h, 0, sizeof *h);
        m->config.backend.hardware(m->config.backend.user, h);
        if (m->sources.has_profile) {
            msi_take_speeds(h, &m->sources.profile);
        }
    }
    msi_fill_speeds(h);
    m->costs.tf32 = m->config.tf32;
    m->costs.has_copies =
        m->config.backend.is_asynchronous || (m->sources.is_given && h->kind != MS_DEVICE_CPU);
}

/* Roofline (Williams, Waterman and Patterson, "Roofline", 2009): what takes longer, arithmetic or
   memory. */
static double msi_roofline_us(const msi_costs *c, double flops, double bytes) {
    const ms_hardware *h = &c->hardware;
    const double tflops = c->tf32 ? h->tf32_tflops : h->f32_tflops;
    const double compute_us = flops / (tflops * 1e6),
                 memory_us = bytes / (h->memory_gb_per_s * 1e3);
    return h->launch_us + (compute_us > memory_us ? compute_us : memory_us);
}

/* 2 flops per param element and vector of the first output, as in a matrix product; without params,
   1 per element of output. */
static double msi_derived_flops(const msi_graph *g, const msi_layer *l) {
    double params = 0.0, rows = 0.0;
    for (MSI_EACH(param, g, l, MSI_GROUP_PARAM)) {
        params += (double)ms_shape_count(&g->tensors.items[param.tensor].view.shape);
    }
    for (MSI_EACH(out, g, l, MSI_GROUP_OUT)) {
        const ms_shape *shape = &g->tensors.items[out.tensor].view.shape;
        rows = (double)ms_shape_count(shape);
        rows /= shape->rank ? (double)shape->dim[shape->rank - 1] : 1.0;
        break;
    }
    return params > 0.0 ? 2.0 * params * rows : msi_output_elements(g, l);
}

/* Bytes of those operands of a group whose slots are in a mask. */
static double msi_group_bytes(const msi_graph *g, const msi_layer *l, int group, uint32_t mask) {
    double bytes = 0.0;
    for (MSI_EACH(operand, g, l, group)) {
        bytes += mask >> operand.slot & 1 ? (double)g->tensors.items[operand.tensor].bytes : 0.0;
    }
    return bytes;
}

static double msi_growth(double elements, double before) {
    return before > 0.0 ? elements / before : 1.0;
}

/* Predicts the times of a layer. Every operand counts once, and so does every gradient. */
static ms_layer_time msi_static_time(const msi_graph *g, const msi_costs *c, const msi_layer *l) {
    const double elements = msi_output_elements(g, l);
    const double grown = msi_growth(elements, l->elements);
    const double flops = l->flops > 0.0 ? l->flops * grown : msi_derived_flops(g, l);
    double forward = 0.0, backward = 0.0, recompute = 0.0;
    for (int group = 0; group < MSI_GROUP_COUNT; group++) {
        const double all = msi_group_bytes(g, l, group, MS_ALL_SLOTS);
        const bool made = group == MSI_GROUP_OUT || group == MSI_GROUP_SAVED;
        forward += all;
        backward += msi_group_bytes(g, l, group, msi_reads_of(l, group));
        backward += group == MSI_GROUP_SAVED || group == MSI_GROUP_STATE ? 0.0 : all;
        recompute += made ? all : msi_group_bytes(g, l, group, msi_recompute_reads_of(l, group));
    }
    ms_layer_time time;
    time.forward_us = msi_roofline_us(c, flops, forward);
    time.backward_us = msi_roofline_us(
        c, l->backward_flops > 0.0 ? l->backward_flops * grown : 2.0 * flops, backward);
    time.recompute_us = time.forward_us;
    if (l->recompute) {
        time.recompute_us = msi_roofline_us(
            c, l->recompute_flops > 0.0 ? l->recompute_flops * grown : elements, recompute);
    }
    return time;
}

/* The first time that there is: known, measured, predicted; limited, so that no sum over a program
   leaves the range of a float. */
static double msi_choose_time(double known, double measured, double predicted) {
    const double us = known > 0.0 ? known : measured > 0.0 ? measured : predicted;
    return us < 1e27 ? us : 1e27;
}

/* Which of the times of forward and backward are known or were measured: mask of a bit for each. */
static uint32_t msi_given_times(const msi_layer *l) {
    const bool forward = l->known.forward_us > 0.0 || l->measured.forward_us > 0.0;
    const bool backward = l->known.backward_us > 0.0 || l->measured.backward_us > 0.0;
    return (uint32_t)forward | (uint32_t)backward << 1;
}

/* The times that a layer needs, as a mask as above. */
static uint32_t msi_needed_times(const msi_layer *l) {
    return 1u | (uint32_t)l->has_backward << 1;
}

static ms_time_source msi_time_source(const msi_graph *g) {
    bool some = false, all = true;
    for (uint32_t i = 0; i < g->layers.count; i++) {
        const uint32_t needed = msi_needed_times(&g->layers.items[i]);
        const uint32_t given = msi_given_times(&g->layers.items[i]) & needed;
        some |= given != 0;
        all &= given == needed;
    }
    return !some ? MS_TIME_SOURCE_ROOFLINE : all ? MS_TIME_SOURCE_MEASURED : MS_TIME_SOURCE_MIXED;
}

/* Finds the times of all layers at the present sizes. Known and measured times grow with the
   output. A recomputation by the forward callback takes as long as forward. */
static void msi_find_times(ms_model *m) {
    const bool predicts = m->config.static_profiling != MS_SWITCH_OFF;
    m->costs.source = msi_time_source(&m->graph);
    for (uint32_t i = 0; i < m->graph.layers.count; i++) {
        msi_layer *l = &m->graph.layers.items[i];
        const double elements = msi_output_elements(&m->graph, l);
        const double a = msi_growth(elements, l->known_elements);
        const double b = msi_growth(elements, l->measured_elements);
        const ms_layer_time *known = &l->known, *measured = &l->measured;
        const ms_layer_time guess = msi_static_time(&m->graph, &m->costs, l);
        ms_layer_time *time = &l->time;
        time->forward_us =
            msi_choose_time(a * known->forward_us, b * measured->forward_us, guess.forward_us);
        time->backward_us =
            msi_choose_time(a * known->backward_us, b * measured->backward_us, guess.backward_us);
        time->recompute_us =
            msi_choose_time(a * known->recompute_us, b * measured->recompute_us,
                            l->recompute && predicts ? guess.recompute_us : time->forward_us);
    }
}

/* Takes the times that steps took, or that a profile states, for so many elements of output. */
static void msi_set_measured(msi_layer *l, const ms_layer_time *time, double elements) {
    l->measured = *time;
    l->measured_elements = elements;
}

/* Without static profiling every layer must have its times. */
static ms_result msi_check_times(ms_model *m) {
    const bool predicts = m->config.static_profiling != MS_SWITCH_OFF;
    for (uint32_t i = 0; !predicts && i < m->graph.layers.count; i++) {
        const msi_layer *l = &m->graph.layers.items[i];
        const uint32_t missing = msi_needed_times(l) & ~msi_given_times(l);
        if (missing) {
            return msi_fail(
                m, MS_RESULT_INVALID,
                "%s: the time of its %s is not known, and static_profiling is OFF: call "
                "ms_set_layer_time or ms_profile_load",
                msi_layer_label(&m->graph, i).text, missing & 1 ? "forward" : "backward");
        }
    }
    return MS_RESULT_OK;
}

// a profile as text: lines of words and numbers, which are the same in every locale

#define MSI_PROFILE "memscale-profile"

enum { MSI_PROFILE_VERSION = 2, MSI_PROFILE_COSTS = MSI_COST_MEASURED_END - MSI_COST_LAYER_END };

static const double msi_most_elements = 1e18;

static size_t msi_digits(const char *text, size_t length) {
    size_t count = 0;
    while (count < length && text[count] >= '0' && text[count] <= '9') {
        count++;
    }
    return count;
}

/* A number such as 12, 0.5 or 1.25e-05; false for anything else. The point is moved to the end,
   since that of strtod depends on the locale. */
static bool msi_parse_number(const char *text, size_t length, double *number) {
    char local[64];
    const size_t whole = msi_digits(text, length);
    size_t at = whole, count = whole;
    int power = 0;
    if (whole == 0 || length > 40) {
        return false;
    }
    memcpy(local, text, whole);
    if (at < length && text[at] == '.') {
        const size_t part = msi_digits(text + at + 1, length - at - 1);
        memcpy(local + count, text + at + 1, part);
        count += part;
        power -= (int)part;
        at += part ? 1 + part : 0;
    }
    if (at < length && text[at] == 'e') {
        const size_t sign = at + 1 < length && (text[at + 1] == '+' || text[at + 1] == '-');
        const size_t part = msi_digits(text + at + 1 + sign, length - at - 1 - sign);
        int size = 0;
        for (size_t i = 0; i < part; i++) {
            size = size < 10000 ? 10 * size + (text[at + 1 + sign + i] - '0') : size;
        }
        power += sign && text[at + 1] == '-' ? -size : size;
        at += part ? 1 + sign + part : 0;
    }
    msi_format(local + count, sizeof local - count, "e%d", power);
    *number = at == length ? strtod(local, NULL) : 0.0;
    return at == length;
}

typedef struct msi_decimal_text {
    char text[48];
} msi_decimal_text;

/* A number as the fewest digits, of 15 and 17, that are read back as the same bits. */
static msi_decimal_text msi_decimal(double x) {
    msi_decimal_text t;
    char raw[48];
    double back = 0.0;
    for (int digits = 15; digits <= 17; digits += 2) {
        size_t count = 0;
        msi_format(raw, sizeof raw, "%.*g", digits, x);
        for (const char *at = raw; *at; at++) {
            const bool plain = (*at >= '0' && *at <= '9') || *at == 'e' || *at == '+' || *at == '-';
            if (plain || count == 0 || t.text[count - 1] != '.') {
                t.text[count++] = plain ? *at : '.';
            }
        }
        t.text[count] = 0;
        if (msi_parse_number(t.text, count, &back) && back == x) {
            break;
        }
    }
    return t;
}

static uint64_t msi_hash_masks(uint64_t hash, const msi_layer *l) {
#define MSI_X(field, group) hash = msi_mix_in(hash, l->field);
    MSI_MASKS(MSI_X)
#undef MSI_X
#define MSI_X(field) hash = msi_mix_in(hash, l->field);
    MSI_FLAGS(MSI_X)
#undef MSI_X
    return msi_mix_in(msi_mix_in(hash, l->differentiable), l->recompute != NULL);
}

static uint64_t msi_hash_layer(uint64_t hash, const msi_graph *g, const msi_layer *l) {
    uint32_t operands = 0;
    for (int group = 0; group < MSI_GROUP_COUNT; group++) {
        operands += l->count[group];
        hash = msi_mix_in(hash, l->count[group]);
    }
    for (uint32_t k = 0; k < operands; k++) {
        hash = msi_mix_in(hash, g->operands.items[l->operand_first + k]);
    }
    const uint32_t masks = l->count[MSI_GROUP_OUT] + 4u * l->count[MSI_GROUP_IN];
    for (uint32_t k = 0; k < masks; k++) {
        hash = msi_mix_in(hash, g->masks.items[l->mask_first + k]);
    }
    for (int i = 0; i < 3; i++) {
        const ms_workspace *w = &l->workspace[i];
        hash = msi_mix_in(msi_mix_in(hash, w->bytes), w->row_bytes);
        hash = msi_mix_in(hash, (uint64_t)w->contents);
    }
    return msi_hash_masks(hash, l);
}

/* A hash of what layers compute from what, without addresses, names and present sizes of axes. */
static uint64_t msi_hash_graph(const msi_graph *g) {
    uint64_t hash = msi_mix_in(g->tensors.count, g->layers.count);
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const msi_tensor *tensor = &g->tensors.items[t];
        const ms_shape shape = msi_resized(g, tensor->view.shape, true, NULL);
        const uint64_t flags = (uint64_t)tensor->on_host << 1 | tensor->no_gradient;
        hash = msi_mix_in(hash,
                          (uint64_t)tensor->kind << 32 | (uint64_t)tensor->view.dtype << 8 | flags);
        hash = msi_mix_in(hash, (uint64_t)shape.rank);
        for (int i = 0; i < shape.rank; i++) {
            hash = msi_mix_in(msi_mix_in(hash, (uint64_t)shape.dim[i]), shape.axes[i]);
        }
    }
    for (uint32_t i = 0; i < g->layers.count; i++) {
        hash = msi_hash_layer(hash, g, &g->layers.items[i]);
    }
    return msi_mix_in(hash, g->loss);
}

/* A profile that is read line by line. After the first fault nothing more is read. */
typedef struct msi_reader {
    ms_model *model;
    ms_result result;
    const char *at, *end;    // of the lines that follow
    const char *line, *stop; // what is left of this line
    uint32_t number;         // of the line, from 1
} msi_reader;

#define MSI_REFUSE_PROFILE(r, ...)                                                                 \
    ((r)->result == MS_RESULT_OK ? (void)((r)->result = msi_fail((r)->model, MS_RESULT_INVALID,    \
                                                                 "ms_profile_load: " __VA_ARGS__)) \
                                 : (void)0)

static bool msi_next_line(msi_reader *r) {
    if (r->at == r->end) {
        return false;
    }
    r->line = r->at;
    while (r->at < r->end && *r->at != '\n') {
        r->at++;
    }
    r->stop = r->at;
    r->at += r->at < r->end;
    r->stop -= r->stop > r->line && r->stop[-1] == '\r';
    r->number++;
    return true;
}

/* Takes the next word of the line, and the blank after it. */
static size_t msi_next_word(msi_reader *r, const char **word) {
    *word = r->line;
    while (r->line < r->stop && *r->line != ' ') {
        r->line++;
    }
    const size_t length = (size_t)(r->line - *word);
    r->line += r->line < r->stop;
    return length;
}

static bool msi_next_word_is(msi_reader *r, const char *expected) {
    const char *word;
    const size_t length = msi_next_word(r, &word);
    return length == strlen(expected) && memcmp(word, expected, length) == 0;
}

/* Goes to the next line, which must begin with this word. */
static void msi_expect_line(msi_reader *r, const char *word) {
    if (r->result == MS_RESULT_OK && !msi_next_line(r)) {
        MSI_REFUSE_PROFILE(r,
                           "the text ends after line %u, where \"%s\" should follow: it is cut off",
                           (unsigned)r->number, word);
    } else if (r->result == MS_RESULT_OK && !msi_next_word_is(r, word)) {
        MSI_REFUSE_PROFILE(r, "line %u does not begin with \"%s\"", (unsigned)r->number, word);
    }
}

/* The next number of the line, at most `most`; 0 after a fault. */
static double msi_next_number(msi_reader *r, const char *what, double most) {
    const char *word;
    double number = 0.0;
    const size_t length = msi_next_word(r, &word);
    if (!msi_parse_number(word, length, &number)) {
        MSI_REFUSE_PROFILE(r, "line %u: \"%.*s\" is not a number, for %s", (unsigned)r->number,
                           (int)(length < 40 ? length : 40), word, what);
    } else if (!(number <= most)) {
        MSI_REFUSE_PROFILE(r, "line %u: %.*s is out of range, for %s", (unsigned)r->number,
                           (int)length, word, what);
    }
    return r->result == MS_RESULT_OK ? number : 0.0;
}

/* Reads the version and the graph. */
static void msi_read_head(msi_reader *r) {
    const char *word;
    char own[20];
    if (!msi_next_line(r) || !msi_next_word_is(r, MSI_PROFILE)) {
        MSI_REFUSE_PROFILE(r, "this is not a profile: its first line is not \"%s %d\"", MSI_PROFILE,
                           (int)MSI_PROFILE_VERSION);
    }
    const double version = msi_next_number(r, "the version", 1e9);
    if (version != (double)MSI_PROFILE_VERSION) {
        MSI_REFUSE_PROFILE(r,
                           "line 1: the profile is of version %.0f, but this library reads version "
                           "%d: save it again",
                           version, (int)MSI_PROFILE_VERSION);
    }
    msi_expect_line(r, "graph");
    const size_t length = msi_next_word(r, &word);
    msi_format(own, sizeof own, "%016llx", (unsigned long long)msi_hash_graph(&r->model->graph));
    if (length != 16 || memcmp(word, own, 16) != 0) {
        MSI_REFUSE_PROFILE(r,
                           "line 2: the profile is of graph %.*s, but this model is graph %s: load "
                           "it after the same registrations, or save one of this model",
                           (int)(length < 16 ? length : 16), word, own);
    }
}

static void msi_read_speeds(msi_reader *r, ms_hardware *h, double *costs) {
    msi_expect_line(r, "device"); // for people
    msi_expect_line(r, "speeds");
    for (int i = 0; i < MSI_SPEED_COUNT; i++) {
        double *speed = msi_speed(h, i);
        *speed = msi_next_number(r, "a speed", msi_most_speed);
        if (!msi_is_speed(i, *speed)) {
            MSI_REFUSE_PROFILE(r, "line %u: a speed is out of range", (unsigned)r->number);
        }
    }
    msi_expect_line(r, "bytes_per_us");
    for (int i = 0; i < MSI_PROFILE_COSTS; i++) {
        costs[i] = msi_next_number(r, "bytes in a microsecond", msi_most_speed);
        costs[i] = costs[i] < msi_least_speed ? 0.0 : costs[i];
    }
}

/* Reads the lines of the layers; takes their times where `keep`. */
static void msi_read_layers(msi_reader *r, bool keep) {
    static const char *const what[] = {"a forward time", "a backward time", "a recompute time",
                                       "elements of output"};
    msi_graph *g = &r->model->graph;
    msi_expect_line(r, "layers");
    const double count = msi_next_number(r, "the number of layers", 1e9);
    if (count != (double)g->layers.count) {
        MSI_REFUSE_PROFILE(r, "line %u: %.0f layers, but this model has %u", (unsigned)r->number,
                           count, (unsigned)g->layers.count);
    }
    for (uint32_t i = 0; i < g->layers.count && r->result == MS_RESULT_OK; i++) {
        double numbers[4];
        if (!msi_next_line(r)) {
            MSI_REFUSE_PROFILE(r, "the text is cut off after line %u: %u of %u layers are missing",
                               (unsigned)r->number, (unsigned)(g->layers.count - i),
                               (unsigned)g->layers.count);
        }
        for (int k = 0; k < 4; k++) {
            numbers[k] = msi_next_number(r, what[k], k < 3 ? msi_most_us : msi_most_elements);
        }
        if (keep && r->result == MS_RESULT_OK) {
            const ms_layer_time time = {numbers[0], numbers[1], numbers[2]};
            msi_set_measured(&g->layers.items[i], &time, numbers[3]);
        }
    }
}

static ms_result msi_read_profile(ms_model *m, const char *text, size_t length, bool keep) {
    ms_hardware speeds;
    double costs[MSI_PROFILE_COSTS];
    msi_reader r = {m, MS_RESULT_OK, text, text + length, text, text, 0};
    memset(&speeds, 0, sizeof speeds);
    msi_read_head(&r);
    msi_read_speeds(&r, &speeds, costs);
    msi_read_layers(&r, keep);
    msi_expect_line(&r, "end");
    if (r.at != r.end) {
        MSI_REFUSE_PROFILE(&r, "there is text after line %u, the end", (unsigned)r.number);
    }
    if (keep && r.result == MS_RESULT_OK) {
        m->sources.profile = speeds;
        m->sources.has_profile = true;
        memcpy(m->costs.bytes_per_us + MSI_COST_LAYER_END, costs, sizeof costs);
    }
    return r.result;
}

static bool msi_check_layer_time(ms_model *m, const msi_layer *l, const ms_layer_time *time) {
    return !time ||
           (msi_is_time(time->forward_us) && msi_is_time(time->backward_us) &&
            msi_is_time(time->recompute_us)) ||
           MSI_REFUSE(
               m,
               "ms_set_layer_time: %s: a time is negative, not finite, or beyond %g: give all in "
               "microseconds, 0 for one that is not known",
               msi_layer_label(&m->graph, (uint32_t)(l - m->graph.layers.items)).text, msi_most_us);
}

/* Sets the known times of a layer, at the present sizes; NULL: they are not known. */
static void msi_set_layer_time(ms_model *m, msi_layer *l, const ms_layer_time *time) {
    const ms_layer_time unknown = {0.0, 0.0, 0.0};
    l->known = time ? *time : unknown;
    l->known_elements = msi_output_elements(&m->graph, l);
    m->wrapped.changed = true;
}

/* All or nothing: the text is read once to find faults, and once more to take what it says. */
static ms_result msi_load_profile(ms_model *m, const char *text, size_t length) {
    ms_result result = msi_read_profile(m, text, length, false);
    m->wrapped.changed |= result == MS_RESULT_OK;
    MSI_THEN(result, msi_read_profile(m, text, length, true));
    return result;
}

/* Prints a name as the end of a line, with a question mark for each control character. */
static void msi_print_line(const msi_printer *out, const char *name) {
    for (const char *at = name; *at;) {
        size_t length = 0;
        while ((unsigned char)at[length] >= ' ' && at[length] != 0x7f) {
            length++;
        }
        out->write(at, length, out->user);
        at += length;
        if (*at) {
            out->write("?", 1, out->user);
            at++;
        }
    }
    out->write("\n", 1, out->user);
}

static void msi_print_profile(const ms_model *m, const msi_printer *out) {
    const msi_graph *g = &m->graph;
    ms_hardware h = m->costs.hardware;
    msi_print(out, "%s %d\ngraph %016llx\ndevice ", MSI_PROFILE, (int)MSI_PROFILE_VERSION,
              (unsigned long long)msi_hash_graph(g));
    msi_print_line(out, h.name);
    msi_print(out, "speeds");
    for (int i = 0; i < MSI_SPEED_COUNT; i++) {
        msi_print(out, " %s", msi_decimal(*msi_speed(&h, i)).text);
    }
    msi_print(out, "\nbytes_per_us");
    for (int i = 0; i < MSI_PROFILE_COSTS; i++) {
        msi_print(out, " %s", msi_decimal(m->costs.bytes_per_us[MSI_COST_LAYER_END + i]).text);
    }
    msi_print(out, "\nlayers %u\n", (unsigned)g->layers.count);
    for (uint32_t i = 0; i < g->layers.count; i++) {
        const msi_layer *l = &g->layers.items[i];
        msi_print(out, "%s %s %s %s ", msi_decimal(l->time.forward_us).text,
                  msi_decimal(l->time.backward_us).text, msi_decimal(l->time.recompute_us).text,
                  msi_decimal(msi_output_elements(g, l)).text);
        msi_print_line(out, msi_layer_name(&m->graph, i));
    }
    msi_print(out, "end\n");
}

// ------------------------------------------------------------------------------------------------
// >>rules  what a mode and the switches allow; why a plan does what it does

/* Whether plans in a mode may use a technique whose switch is at DEFAULT. */
static bool msi_mode_has(ms_mode mode, ms_technique technique) {
    return msi_techniques[technique].modes >> mode & 1;
}

/* The techniques that plans in a mode may use: a mask. */
static uint32_t msi_allowed(const ms_model *m, ms_mode mode) {
    uint32_t mask = 0;
    for (int t = 0; t < MS_TECHNIQUE_COUNT; t++) {
        const ms_switch is = msi_switch_of(&m->config, (ms_technique)t);
        const bool may =
            is == MS_SWITCH_ON || (is == MS_SWITCH_DEFAULT && msi_mode_has(mode, (ms_technique)t));
        mask |= (uint32_t)may << t;
    }
    return mask & MSI_BUILT & ~(msi_early_fault(m) ? MSI_EARLY_UPDATE : 0u);
}

static double msi_pressure(const msi_plan *plan) {
    return (double)plan->plain_bytes / (double)plan->budget_bytes;
}

/* The mode and techniques that the config allows, without a policy. */
static msi_choice msi_config_choice(const ms_model *m) {
    const msi_graph *g = &m->graph;
    msi_choice choice;
    choice.mode = m->config.mode;
    choice.techniques = msi_allowed(m, choice.mode);
    bool said = choice.mode != MS_MODE_BALANCED || m->config.force_optimize;
    for (int k = 0; k < MS_TECHNIQUE_COUNT; k++) {
        said |= msi_switch_of(&m->config, (ms_technique)k) != MS_SWITCH_DEFAULT;
        for (uint32_t t = 0; t < g->tensors.count && !said; t++) {
            said = g->tensors.items[t].technique[k] != MS_SWITCH_DEFAULT;
        }
    }
    choice.source = said ? MS_DECISION_SOURCE_USER_CONFIG : MS_DECISION_SOURCE_RULE;
    return choice;
}

/* An error if the user asks for a technique that this version does not have. */
static ms_result msi_check_built(ms_model *m) {
    const msi_graph *g = &m->graph;
    for (int k = 0; k < MS_TECHNIQUE_COUNT; k++) {
        if (MSI_BUILT >> k & 1) {
            continue;
        }
        const char *name = msi_techniques[k].name;
        if (msi_switch_of(&m->config, (ms_technique)k) == MS_SWITCH_ON) {
            return msi_fail(
                m, MS_RESULT_UNSUPPORTED,
                "%s is switched ON, but this version does not have it: set it to DEFAULT or OFF",
                name);
        }
        for (uint32_t t = 0; t < g->tensors.count; t++) {
            if (g->tensors.items[t].technique[k] == MS_SWITCH_ON) {
                return msi_fail(m, MS_RESULT_UNSUPPORTED,
                                "%s is forced on \"%s\", but this version does not have it: leave "
                                "it to the plan",
                                name, msi_tensor_name(&m->graph, t));
            }
        }
    }
    return MS_RESULT_OK;
}

/* The facts about one technique on one layer, in the plan that is in force. */
enum {
    MSI_FACT_APPLIED = 1 << 0,
    MSI_FACT_FORCED = 1 << 1, // on every tensor that it is applied to
    MSI_FACT_ON = 1 << 2,
    MSI_FACT_SMALLEST = 1 << 3,
    MSI_FACT_FREES = 1 << 4, // bytes
    MSI_FACT_DETACHED = 1 << 5,
    MSI_FACT_FORBIDDEN = 1 << 6,
    MSI_FACT_OFF = 1 << 7,
    MSI_FACT_BEYOND_MODE = 1 << 8,
    MSI_FACT_SHARED_MEMORY = 1 << 9,
    MSI_FACT_NOT_NATIVE = 1 << 10,
    MSI_FACT_NOT_BUILT = 1 << 11,
    MSI_FACT_PLAIN_FITS = 1 << 12,
    /* About the tensor that explains best why the technique is not applied: see
       msi_explains_more. */
    MSI_FACT_UNREAD = 1 << 13,
    MSI_FACT_RUNS_ONCE = 1 << 14,
    MSI_FACT_OUTPUT = 1 << 15,
    MSI_FACT_RECOMPUTE_READS = 1 << 16,
    MSI_FACT_NOT_IDLE = 1 << 17,
    MSI_FACT_NO_GRADIENT = 1 << 18,
    MSI_FACT_ALL_GRADIENTS = 1 << 19,
    MSI_FACT_BORROWED = 1 << 20,
    MSI_FACT_READ_AGAIN = 1 << 21,
    MSI_FACT_SHARED_PARAM = 1 << 22,
    MSI_FACT_LATE = 1 << 23
};

typedef struct msi_rule {
    ms_rule text;
    uint32_t techniques; // that it can explain
    uint32_t facts;      // it explains a decision where all of these hold
} msi_rule;

/* The first rule whose facts hold explains a decision; the last rule always does. */
#define MSI_RULE(techniques, facts, id, condition, reason)                                         \
    { {id, condition, reason}, techniques, facts }

static const msi_rule msi_rules[] = {
    MSI_RULE(MSI_ANY, MSI_FACT_APPLIED | MSI_FACT_FORCED, "forced",
             "it is forced on all that it is applied to",
             "what is forced is part of every plan, whatever the budget"),
    MSI_RULE(MSI_EARLY_UPDATE, MSI_FACT_APPLIED | MSI_FACT_ON, "switched-on", "early_update is ON",
             "ON updates at once, whatever the budget"),
    MSI_RULE(MSI_ANY, MSI_FACT_APPLIED | MSI_FACT_FREES | MSI_FACT_SMALLEST, "smallest",
             "force_optimize is set, and the arena is smaller with it",
             "the smallest arena is asked for, whatever the budget"),
    MSI_RULE(MSI_CHECKPOINTING, MSI_FACT_APPLIED | MSI_FACT_FREES, "checkpoint",
             "without it the arena would exceed the budget",
             "the fastest plan found that meets the budget drops what the layer makes in forward, "
             "and recomputes it in backward"),
    MSI_RULE(MSI_CHECKPOINTING, MSI_FACT_APPLIED, "on-the-way",
             "a recomputation reads what the layer makes, and no backward does",
             "the plan does not keep that, but makes it again on the way to what comes back"),
    MSI_RULE(MSI_EARLY_UPDATE, MSI_FACT_APPLIED, "early-update",
             "without it the arena would exceed the budget",
             "an update inside backward ends the live range of the gradient, at no cost in time"),
    MSI_RULE(MSI_ANY, MSI_FACT_DETACHED, "detached", "the model is detached",
             "the plain plan uses nothing, whatever is forced"),
    MSI_RULE(MSI_ANY, MSI_FACT_FORBIDDEN, "forbidden",
             "it is forbidden for the layer, or for the tensor of it that matters most",
             "what is forbidden is part of no plan"),
    MSI_RULE(MSI_ANY, MSI_FACT_OFF, "off", "its switch is OFF",
             "what is switched off is part of no plan"),
    MSI_RULE(MSI_ANY, MSI_FACT_BEYOND_MODE, "mode",
             "the mode does not have it, and its switch is at DEFAULT",
             "a mode bounds what may be done to a model; a bolder one allows it, and ON allows it "
             "in any"),
    MSI_RULE(MSI_OFFLOADING, MSI_FACT_SHARED_MEMORY, "shared-memory",
             "the device computes in the memory of the host",
             "what is copied out takes as much of the same memory"),
    MSI_RULE(MSI_MIXED, MSI_FACT_NOT_NATIVE, "not-native",
             "the device does not say that it computes in BF16 or FP16",
             "arithmetic that is emulated is slower"),
    MSI_RULE(MSI_ANY, MSI_FACT_NOT_BUILT, "not-built", "this version does not have it",
             "it has its place in modes and switches, and no plan uses it yet"),
    MSI_RULE(MSI_ANY, MSI_FACT_PLAIN_FITS, "smart-skip", "the plain arena is within the budget",
             "nothing has to be done, so nothing is"),
    MSI_RULE(MSI_CHECKPOINTING, MSI_FACT_UNREAD, "unread", "no backward reads what the layer makes",
             "its values end with their last reader in forward, as in the plain plan"),
    MSI_RULE(MSI_CHECKPOINTING, MSI_FACT_RUNS_ONCE, "runs-once",
             "no_recompute is set without a recompute callback, or the layer writes gradients in "
             "forward",
             "a second run would not do what the first one did"),
    MSI_RULE(MSI_CHECKPOINTING, MSI_FACT_OUTPUT, "output",
             "what the layer makes is the loss, or kept by ms_add_output",
             "the trainer may read it after the step"),
    MSI_RULE(MSI_CHECKPOINTING, MSI_FACT_RECOMPUTE_READS, "recompute-reads",
             "no_recompute is set, and recompute_reads of the layer names it",
             "what a layer can only be recomputed from cannot be dropped"),
    MSI_RULE(MSI_CHECKPOINTING, MSI_FACT_NOT_IDLE, "not-idle",
             "no layer runs between its last use in forward and its first in backward",
             "there is no time in which its memory would be free"),
    MSI_RULE(MSI_EARLY_UPDATE, MSI_FACT_NO_GRADIENT, "no-gradient",
             "the layer has no param that learns", "there is nothing to update"),
    MSI_RULE(MSI_EARLY_UPDATE, MSI_FACT_ALL_GRADIENTS, "all-gradients",
             "accumulation, clipping, or an optimizer that leaves updates to the trainer",
             "no gradient may be used up before all of them are complete"),
    MSI_RULE(MSI_EARLY_UPDATE, MSI_FACT_BORROWED, "borrowed", "the gradient is borrowed",
             "its memory is the trainer's, not the arena's"),
    MSI_RULE(MSI_EARLY_UPDATE, MSI_FACT_READ_AGAIN, "read-again",
             "a layer without a backward reads the param",
             "that layer could be recomputed after the update, and would see the new value"),
    MSI_RULE(MSI_EARLY_UPDATE, MSI_FACT_SHARED_PARAM, "shared",
             "an earlier layer uses the param too",
             "backward comes to that layer last, and its line tells what became of the gradient"),
    MSI_RULE(MSI_EARLY_UPDATE, MSI_FACT_LATE, "late",
             "the plan may update inside backward, and its arena is no larger if this update waits",
             "an update right after the backward of its layer can be slow"),
    MSI_RULE(MSI_ANY, MSI_FACT_SMALLEST, "no-gain",
             "force_optimize is set, and the arena would be no smaller with it",
             "it would cost time for nothing"),
    MSI_RULE(MSI_ANY, 0, "fits", "none of the above",
             "the fastest plan found meets the budget without it")};

enum { MSI_RULE_COUNT = sizeof msi_rules / sizeof msi_rules[0] };

/* What a plan does, indexed by layer and by tensor: what the rules are checked against. */
typedef struct msi_review {
    const ms_model *model;
    const msi_plan *plan;
    double *again_us;  // per layer: the time of its recomputations
    uint32_t *forward; // per layer: its instruction in forward
    uint32_t *again;   // per layer: how often it is recomputed
    uint32_t *update;  // per tensor: the instruction that updates it, or MSI_NONE
} msi_review;

static uint64_t msi_review_bytes(const msi_graph *g) {
    return g->layers.count * (uint64_t)(sizeof(double) + 2 * sizeof(uint32_t)) +
           g->tensors.count * (uint64_t)sizeof(uint32_t);
}

static bool msi_review_init(msi_review *r, const ms_model *m, const msi_plan *plan) {
    const msi_graph *g = &m->graph;
    const msi_program *p = &plan->train;
    r->model = m;
    r->plan = plan;
    r->again_us = (double *)msi_alloc_zeroed(&m->config.allocator, msi_review_bytes(g));
    if (!r->again_us) {
        return false;
    }
    r->forward = (uint32_t *)(void *)(r->again_us + g->layers.count);
    r->again = r->forward + g->layers.count;
    r->update = r->again + g->layers.count;
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        r->update[t] = MSI_NONE;
    }
    for (uint32_t now = 0; now < p->instructions.count; now++) {
        const msi_instruction *i = &p->instructions.items[now];
        if (i->op == MSI_OP_FORWARD) {
            r->forward[i->target] = now;
        } else if (msi_is_again((msi_op)i->op)) {
            r->again[i->target]++;
            r->again_us[i->target] += msi_again_us(&g->layers.items[i->target], (msi_op)i->op);
        } else if (i->op == MSI_OP_UPDATE) {
            r->update[i->target] = now;
        }
    }
    return true;
}

static void msi_review_free(msi_review *r) {
    msi_release(&r->model->config.allocator, r->again_us, msi_review_bytes(&r->model->graph));
}

/* Whether a technique is applied to a tensor, at this layer. */
static bool msi_is_applied(const msi_review *r, uint32_t layer, ms_technique technique,
                           uint32_t tensor) {
    const msi_tensor *t = &r->model->graph.tensors.items[tensor];
    return technique == MS_TECHNIQUE_CHECKPOINTING
               ? r->plan->decisions[tensor].pass > 0 && t->last_reader != MSI_NONE
               : technique == MS_TECHNIQUE_EARLY_UPDATE &&
                     r->update[tensor] < r->plan->train.backward_end && t->last_gradient == layer;
}

/* Whether a technique could matter for a tensor that it is not applied to. */
static bool msi_matters(const msi_review *r, uint32_t layer, ms_technique technique,
                        uint32_t tensor) {
    const msi_graph *g = &r->model->graph;
    const msi_tensor *t = &g->tensors.items[tensor];
    return technique == MS_TECHNIQUE_CHECKPOINTING
               ? t->last_reader != MSI_NONE || t->is_output || tensor == g->loss || t->must_stay
               : technique != MS_TECHNIQUE_EARLY_UPDATE ||
                     (msi_is_trained(t) && t->last_gradient == layer);
}

/* The live range in which a value is made in forward, or NULL. */
static const msi_range *msi_forward_range(const msi_review *r, uint32_t tensor) {
    const msi_program *p = &r->plan->train;
    const uint32_t producer = r->model->graph.tensors.items[tensor].producer;
    const msi_instruction *i = &p->instructions.items[r->forward[producer]];
    for (uint32_t k = 0; k < i->operand_count; k++) {
        const uint32_t index = p->operands.items[i->operand_first + k].range;
        const msi_range *range = index == MSI_NONE ? NULL : &p->ranges.items[index];
        if (range && range->tensor == tensor && range->role == MSI_ROLE_VALUE) {
            return range;
        }
    }
    return NULL;
}

/* Whether layers run while a value lies idle between its last use in forward and its first in
   backward. */
static bool msi_lies_idle(const msi_review *r, uint32_t tensor) {
    const msi_program *p = &r->plan->train;
    const msi_range *range = msi_forward_range(r, tensor);
    bool idle = false;
    if (range && range->idle_last != MSI_NONE) {
        for (uint32_t now = range->idle_first + 1; now < range->idle_last && !idle; now++) {
            idle = msi_calls_layer((msi_op)p->instructions.items[now].op);
        }
    }
    return idle;
}

static uint32_t msi_fact(uint32_t fact, bool holds) {
    return holds ? fact : 0;
}

/* The facts about a technique that hold for every layer. */
static uint32_t msi_common_facts(const msi_review *r, ms_technique technique) {
    const ms_model *m = r->model;
    const ms_switch is = msi_switch_of(&m->config, technique);
    const bool plain_fits = m->wrapped.goal == MSI_GOAL_BUDGET && is != MS_SWITCH_ON &&
                            r->plan->plain_bytes <= r->plan->budget_bytes;
    const bool beyond = is == MS_SWITCH_DEFAULT && !msi_mode_has(m->wrapped.choice.mode, technique);
    return msi_fact(MSI_FACT_ON, is == MS_SWITCH_ON) | msi_fact(MSI_FACT_OFF, is == MS_SWITCH_OFF) |
           msi_fact(MSI_FACT_SMALLEST, m->wrapped.goal == MSI_GOAL_SMALLEST) |
           msi_fact(MSI_FACT_DETACHED, m->wrapped.goal == MSI_GOAL_PLAIN) |
           msi_fact(MSI_FACT_BEYOND_MODE, beyond) |
           msi_fact(MSI_FACT_SHARED_MEMORY, m->costs.hardware.kind != MS_DEVICE_DISCRETE) |
           msi_fact(MSI_FACT_NOT_NATIVE,
                    !m->costs.hardware.bf16 && !m->costs.hardware.fp16_tensor) |
           msi_fact(MSI_FACT_NOT_BUILT, !(MSI_BUILT >> technique & 1)) |
           msi_fact(MSI_FACT_PLAIN_FITS, plain_fits);
}

/* The facts about the tensor of a layer that a technique is not applied to; MSI_NONE: there is no
   such tensor. */
static uint32_t msi_checkpointing_facts(const msi_review *r, uint32_t layer, uint32_t tensor) {
    const msi_graph *g = &r->model->graph;
    if (tensor == MSI_NONE || !msi_matters(r, layer, MS_TECHNIQUE_CHECKPOINTING, tensor)) {
        return MSI_FACT_UNREAD;
    }
    const msi_tensor *t = &g->tensors.items[tensor];
    return msi_fact(MSI_FACT_RUNS_ONCE, !msi_can_recompute(&g->layers.items[layer])) |
           msi_fact(MSI_FACT_OUTPUT, t->is_output || tensor == g->loss) |
           msi_fact(MSI_FACT_RECOMPUTE_READS, t->must_stay) |
           msi_fact(MSI_FACT_NOT_IDLE, !msi_lies_idle(r, tensor));
}

static uint32_t msi_early_facts(const msi_review *r, uint32_t layer, uint32_t tensor) {
    const msi_tensor *t = tensor == MSI_NONE ? NULL : &r->model->graph.tensors.items[tensor];
    if (!t || !msi_is_trained(t) || t->last_gradient == MSI_NONE) {
        return MSI_FACT_NO_GRADIENT;
    }
    return msi_fact(MSI_FACT_ALL_GRADIENTS, msi_early_fault(r->model) != NULL) |
           msi_fact(MSI_FACT_BORROWED, msi_is_borrowed(t, MSI_ROLE_GRADIENT)) |
           msi_fact(MSI_FACT_READ_AGAIN, !t->updates_early) |
           msi_fact(MSI_FACT_SHARED_PARAM, t->last_gradient != layer) |
           msi_fact(MSI_FACT_LATE, r->plan->decisions[tensor].update_after != MSI_NONE);
}

static const ms_rule *msi_find_rule(ms_technique technique, uint32_t facts) {
    uint32_t k = 0;
    while (!(msi_rules[k].techniques >> technique & 1) ||
           (msi_rules[k].facts & facts) != msi_rules[k].facts) {
        k++;
    }
    return &msi_rules[k].text;
}

/* Whether tensor `a` explains better than `b` why a technique is not applied: one that matters
   does, then the larger one, then the first. */
static bool msi_explains_more(const msi_review *r, uint32_t layer, ms_technique technique,
                              uint32_t a, uint32_t b) {
    const msi_tensor *tensors = r->model->graph.tensors.items;
    if (b == MSI_NONE) {
        return true;
    }
    const bool first = msi_matters(r, layer, technique, a);
    return first != msi_matters(r, layer, technique, b) ? first
                                                        : tensors[a].bytes > tensors[b].bytes;
}

/* What would not be held if a technique were applied to a tensor that it is not applied to. */
static uint64_t msi_refused_bytes(const msi_review *r, uint32_t layer, ms_technique technique,
                                  uint32_t tensor) {
    const msi_tensor *t = &r->model->graph.tensors.items[tensor];
    const bool frees = technique == MS_TECHNIQUE_CHECKPOINTING ? msi_lies_idle(r, tensor)
                       : technique == MS_TECHNIQUE_EARLY_UPDATE
                           ? msi_is_trained(t) && t->last_gradient == layer &&
                                 !msi_is_borrowed(t, MSI_ROLE_GRADIENT)
                           : false;
    return frees ? msi_align(t->bytes) : 0;
}

/* Adds up the tensors of a layer that a technique is applied to, and the others; returns, of the
   others, the one that explains most. */
static uint32_t msi_gather(const msi_review *r, uint32_t layer, ms_decision *d, uint32_t *facts) {
    const msi_graph *g = &r->model->graph;
    uint32_t left = MSI_NONE;
    bool forced = true;
    for (int group = MSI_GROUP_OUT; group <= MSI_GROUP_PARAM; group++) {
        for (MSI_EACH(operand, g, &g->layers.items[layer], group)) {
            const uint32_t index = operand.tensor;
            const msi_tensor *t = &g->tensors.items[index];
            bool listed = false; // in an earlier slot
            for (uint32_t k = 0; k < operand.slot; k++) {
                listed |= operand.tensors[k] == index;
            }
            if (listed || !(msi_techniques[d->technique].kinds >> t->kind & 1)) {
                continue;
            }
            if (msi_is_applied(r, layer, d->technique, index)) {
                d->saved_bytes += msi_align(t->bytes);
                forced &= t->technique[d->technique] == MS_SWITCH_ON;
                continue;
            }
            d->refused_bytes += msi_refused_bytes(r, layer, d->technique, index);
            left = msi_explains_more(r, layer, d->technique, index, left) ? index : left;
        }
    }
    *facts |= msi_fact(MSI_FACT_APPLIED | MSI_FACT_FREES, d->saved_bytes > 0) |
              msi_fact(MSI_FACT_FORCED, d->saved_bytes > 0 && forced);
    return left;
}

/* Bytes of what a layer makes in forward and that is still there in backward. */
static uint64_t msi_kept_bytes(const msi_review *r, uint32_t layer) {
    const msi_graph *g = &r->model->graph;
    uint64_t kept = 0;
    for (int group = MSI_GROUP_OUT; group <= MSI_GROUP_SAVED; group++) {
        for (MSI_EACH(made, g, &g->layers.items[layer], group)) {
            const msi_range *range = msi_forward_range(r, made.tensor);
            const bool keeps = range && range->last >= r->plan->train.forward_end;
            kept += keeps ? g->tensors.items[made.tensor].bytes : 0;
        }
    }
    return kept;
}

/* What was decided about a technique for a layer: read from the plan, and explained by the first
   rule whose facts hold. */
static ms_decision msi_decision(const msi_review *r, uint32_t layer, ms_technique technique) {
    const msi_graph *g = &r->model->graph;
    uint32_t facts = msi_common_facts(r, technique);
    ms_decision d;
    memset(&d, 0, sizeof d);
    d.layer = msi_layer_handle(g, layer);
    d.layer_index = layer;
    d.technique = technique;
    const uint32_t left = msi_gather(r, layer, &d, &facts);
    switch (technique) {
    case MS_TECHNIQUE_CHECKPOINTING:
        d.added_us = r->again_us[layer];
        d.refused_us = d.refused_bytes > 0 && r->again[layer] == 0
                           ? g->layers.items[layer].time.recompute_us
                           : 0.0;
        facts |= msi_fact(MSI_FACT_APPLIED, r->again[layer] > 0);
        facts |= msi_checkpointing_facts(r, layer, left);
        break;
    case MS_TECHNIQUE_EARLY_UPDATE:
        facts |= msi_early_facts(r, layer, left);
        break;
    case MS_TECHNIQUE_OFFLOADING: // not built
    case MS_TECHNIQUE_TILING:
    case MS_TECHNIQUE_MIXED_PRECISION:
    case MS_TECHNIQUE_OPTIMIZER_8BIT:
    case MS_TECHNIQUE_COUNT:
        break;
    }
    facts |=
        msi_fact(MSI_FACT_FORBIDDEN,
                 left != MSI_NONE && g->tensors.items[left].technique[technique] == MS_SWITCH_OFF);
    d.is_applied = facts & MSI_FACT_APPLIED;
    d.rule = msi_find_rule(technique, facts);
    d.kept_bytes = msi_kept_bytes(r, layer);
    return d;
}

static msi_technique_total msi_technique_total_of(const msi_review *r, ms_technique technique) {
    msi_technique_total total;
    memset(&total, 0, sizeof total);
    for (uint32_t i = 0; i < r->model->graph.layers.count; i++) {
        const ms_decision d = msi_decision(r, i, technique);
        msi_add_decision(&total, &d);
    }
    return total;
}

/* What is compared to find blocks of layers that are alike; and which layers stand for how many. */
typedef struct msi_alike {
    uint64_t key;   // of all that must be equal
    double us;      // added, or what it would add
    uint32_t count; // as ms_decision.alike_count
    uint32_t last;
} msi_alike;

/* Layers of the longest block that is looked for. */
enum { MSI_LONGEST_BLOCK = 256 };

static msi_alike msi_alike_of(const msi_review *r, uint32_t layer) {
    msi_alike row;
    memset(&row, 0, sizeof row);
    row.key = msi_mix_name(0, msi_layer_name(&r->model->graph, layer));
    for (int k = 0; k < MS_TECHNIQUE_COUNT; k++) {
        const ms_decision d = msi_decision(r, layer, (ms_technique)k);
        row.key = msi_mix_name(msi_mix_in(row.key, d.is_applied), d.rule->id);
        row.key = msi_mix_in(msi_mix_in(row.key, d.saved_bytes), d.refused_bytes);
        row.key = msi_mix_in(row.key, d.kept_bytes);
        row.us += d.added_us + d.refused_us;
    }
    return row;
}

static bool msi_is_alike(const msi_alike *a, const msi_alike *b) {
    return a->key == b->key && a->us <= 2.0 * b->us && b->us <= 2.0 * a->us;
}

/* How many blocks of so many layers, from the first of `rows` on, are like the first one. */
static uint32_t msi_count_blocks(const msi_alike *rows, uint32_t count, uint32_t layers) {
    uint32_t end = layers;
    while (end < count && msi_is_alike(&rows[end], &rows[end % layers])) {
        end++;
    }
    return end / layers;
}

/* Finds the blocks, from the first layer on: each time those that cover most layers and, of these,
   the shortest. This takes time in proportion to the layers times MSI_LONGEST_BLOCK: where many
   lengths compare long stretches, the stretches have a short period, and are covered by it. */
static void msi_find_alike(msi_alike *rows, uint32_t count) {
    for (uint32_t at = 0; at < count;) {
        const uint32_t left = count - at;
        uint32_t layers = 1, blocks = 1;
        for (uint32_t k = 1; k <= MSI_LONGEST_BLOCK && k <= left / 2 && blocks * layers < left;
             k++) {
            const uint32_t found = msi_count_blocks(rows + at, left, k);
            if (found > 1 && found * k > blocks * layers) {
                blocks = found;
                layers = k;
            }
        }
        for (uint32_t k = 0; k < layers; k++) {
            rows[at + k].count = blocks;
            rows[at + k].last = at + k + (blocks - 1) * layers;
        }
        at += blocks * layers;
    }
}

// ------------------------------------------------------------------------------------------------
// >>store  which values are resident, and their places: params, state, buffers and inputs

static void msi_debug_free(ms_model *m, msi_debug *d) {
    const ms_allocator *a = &m->config.allocator;
    const ms_backend *b = &m->config.backend;
    if (!d) {
        return;
    }
    if (d->stage[0]) {
        b->memory_release(b->user, a, d->stage[0], d->stage_bytes[0]);
    }
    msi_host_release(m, (uint8_t *)d->stage[1], d->stage_bytes[1]);
    msi_release(a, d->shadow, d->shadow_bytes);
    msi_release(a, d->images, d->images_bytes);
    msi_release(a, d->made, d->made_bytes + 1);
    msi_release(a, d->made_at, d->tensor_count * sizeof(uint64_t));
    msi_release(a, d->is_made, d->tensor_count);
    msi_release(a, d->trial, d->trial_bytes);
    msi_release(a, d, sizeof *d);
}

static void msi_store_free(ms_model *m, msi_store *store) {
    const ms_allocator *a = &m->config.allocator;
    const ms_backend *b = &m->config.backend;
    if (!store) {
        return;
    }
    if (store->memory) {
        const uint64_t bytes = store->resident_bytes + (m->run.arena ? 0 : store->transient_bytes);
        if (b->device_is_host) {
            msi_asan_unpoison(store->memory, bytes);
        }
        b->memory_release(b->user, a, store->memory, bytes);
    }
    msi_host_release(m, store->host, store->host_bytes + store->staging_bytes);
    msi_debug_free(m, store->debug);
    MSI_LIST_FREE(msi_resident, a, store->residents);
    msi_release(a, store->resident_of, m->graph.tensors.count * sizeof(uint32_t));
    msi_release(a, store, sizeof *store);
}

/* Gives a resident its place after those of its kind: in the arena, on the host, or elsewhere. */
static void msi_place_resident(msi_store *store, msi_resident *resident) {
    uint64_t *const room = resident->borrowed  ? &store->borrowed_bytes
                           : resident->on_host ? &store->host_bytes
                                               : &store->resident_bytes;
    resident->offset = *room;
    *room += msi_align(resident->bytes);
}

static msi_resident *msi_add_resident(const ms_model *m, msi_store *store, uint32_t t,
                                      msi_role role) {
    const msi_tensor *tensor = &m->graph.tensors.items[t];
    msi_resident *resident = &store->residents.items[store->residents.count++];
    memset(resident, 0, sizeof *resident);
    resident->tensor = t;
    resident->role = role;
    resident->bytes = tensor->largest_bytes;
    resident->on_host = tensor->on_host;
    resident->borrowed = msi_is_borrowed(tensor, role);
    msi_place_resident(store, resident);
    resident->event = MSI_NONE;
    resident->factors = MSI_NONE;
    if (tensor->kind == MSI_KIND_INPUT && !resident->on_host && m->config.backend.is_asynchronous) {
        resident->event = store->event_count++;
        resident->staging = store->staging_bytes;
        store->staging_bytes += msi_align(resident->bytes);
    }
    return resident;
}

static bool msi_learns(const msi_tensor *t) {
    return msi_is_trained(t) && t->last_gradient != MSI_NONE;
}

/* Reserves what comes before the residents. The arena begins with the workspace of the backend and
   the memory of the step itself; host memory has the latter too, and room for the verdict that is
   copied out. Where the device computes in host memory, the memory of the step is there alone. */
static void msi_reserve(const ms_model *m, msi_store *store) {
    const ms_backend *b = &m->config.backend;
    uint64_t count = 0;
    for (uint32_t t = 0; t < m->graph.tensors.count; t++) {
        count += msi_learns(&m->graph.tensors.items[t]);
    }
    store->step_bytes = MSI_STATES_BYTES + msi_align(count * sizeof(ms_update_factors));
    store->staging_bytes = store->step_bytes;
    store->reserved_bytes = (b->workspace_bytes + 255) & ~(uint64_t)255;
    if (!msi_is_direct(m)) {
        store->staging_bytes += MSI_STATES_BYTES;
        store->reserved_bytes += store->step_bytes;
    }
    store->resident_bytes = store->reserved_bytes;
    store->event_count = MSI_EVENT_COUNT;
}

/* Lists every value that is kept between steps: of a param also the optimizer state, and the
   gradient if that is accumulated or borrowed. */
static bool msi_list_residents(ms_model *m, msi_store *store) {
    const msi_graph *g = &m->graph;
    const uint32_t states = msi_state_count(&m->optimizer);
    uint32_t learning = 0; // params that learn, so far
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const msi_tensor *tensor = &g->tensors.items[t];
        store->resident_of[t] = MSI_NONE;
        if (!msi_is_resident(tensor)) {
            continue;
        }
        if (!MSI_RESERVE(msi_resident, &m->config.allocator, store->residents,
                         store->residents.count + (uint64_t)MSI_ROLE_RESIDENT_COUNT)) {
            return false;
        }
        store->resident_of[t] = store->residents.count;
        msi_resident *value = msi_add_resident(m, store, t, MSI_ROLE_VALUE);
        if (!msi_learns(tensor)) {
            continue;
        }
        value->factors = learning++;
        if (store->micro_count > 1 || msi_is_borrowed(tensor, MSI_ROLE_GRADIENT)) {
            msi_add_resident(m, store, t, MSI_ROLE_GRADIENT);
        }
        for (uint32_t k = 0; k < states; k++) {
            msi_add_resident(m, store, t, (msi_role)(MSI_ROLE_STATE0 + k));
        }
    }
    return true;
}

/* Makes a store that has no memory yet. */
static ms_result msi_make_store(ms_model *m, msi_store **made) {
    const ms_allocator *a = &m->config.allocator;
    const uint64_t bytes = m->graph.tensors.count * (uint64_t)sizeof(uint32_t);
    msi_store *store = (msi_store *)msi_alloc_zeroed(a, sizeof *store);
    *made = store;
    if (store) {
        store->micro_count = m->config.accumulation_steps ? m->config.accumulation_steps : 1;
        store->resident_of = (uint32_t *)msi_alloc_zeroed(a, bytes);
        msi_reserve(m, store);
    }
    if (store && store->resident_of && msi_list_residents(m, store)) {
        return MS_RESULT_OK;
    }
    msi_store_free(m, store);
    *made = NULL;
    return msi_fail_memory(m, "the list of residents", bytes);
}

static const msi_resident *msi_find_resident(const msi_store *store, uint32_t tensor,
                                             msi_role role) {
    const uint32_t first = store ? store->resident_of[tensor] : MSI_NONE;
    for (uint32_t i = first; first != MSI_NONE && i < store->residents.count &&
                             store->residents.items[i].tensor == tensor;
         i++) {
        if (store->residents.items[i].role == role) {
            return &store->residents.items[i];
        }
    }
    return NULL;
}

/* Bytes of device memory that a store takes. */
static uint64_t msi_room_of(const msi_store *store) {
    return store->resident_bytes + store->transient_bytes;
}

// ------------------------------------------------------------------------------------------------
// >>lower  from graph and decisions to a program: instructions with operands, and live ranges

/* One edge from a layer to an operand that gets a gradient from it, in its backward or in the
   forward of a loss layer: where that gradient is written. */
typedef struct msi_edge {
    uint32_t tensor; // MSI_NONE: the layer does not write this gradient
    uint32_t range;  // MSI_NONE: not made yet, or w->gradient[tensor]
    bool overwrites;
    bool separate;   // it is written to memory of its own, and added to the gradient afterwards
    bool accumulate; // beta is 1
} msi_edge;

typedef struct msi_lowering {
    const msi_graph *graph;
    const ms_allocator *allocator;
    const msi_store *store;
    const msi_tensor_decision *decisions;
    const ms_optimizer_desc *optimizer;
    msi_program *program;
    uint32_t *value;     // per tensor: the live range that holds its value now, or MSI_NONE
    uint32_t *gradient;  // per tensor: that of its gradient
    uint32_t *queue;     // params whose gradient is complete, to be updated in this order
    uint32_t *stack;     // of tensors, for recomputation
    uint32_t *missing;   // tensors that a recomputation may need; what they are made of comes first
    uint32_t *pass_only; // tensors that are in memory for the present pass only
    uint32_t *met;       // per tensor: number of the last recomputation that has it in `missing`
    uint32_t *wanted;    // per tensor: number of the last pass that makes it on purpose
    uint32_t *snapshot;  // per operand of the graph: a copy of that state, or MSI_NONE
    uint32_t queue_first, queue_end;
    uint32_t pass_only_count, recomputation;
    uint32_t pass_number; // of the present pass, from 1 on; 0: there was none
    uint32_t depth;       // of the present pass, as in msi_tensor_decision.pass
    bool backward;
    /* Of the next instruction: live ranges, or MSI_UNSET; those of its values, then grad_out. */
    uint32_t slots[MSI_MAX_VALUES + MSI_MAX_SLOTS];
    msi_edge edges[MSI_MAX_EDGES];
    uint32_t edge_count;
} msi_lowering;

static const uint32_t MSI_UNSET = UINT32_MAX - 1; // of msi_lowering.slots

static uint64_t msi_lowering_bytes(const msi_graph *g) {
    return (8ull * g->tensors.count + g->operands.count) * sizeof(uint32_t);
}

static bool msi_lowering_init(msi_lowering *w, const msi_graph *g, const msi_store *store,
                              const ms_optimizer_desc *optimizer, const ms_allocator *allocator) {
    memset(w, 0, sizeof *w);
    w->graph = g;
    w->allocator = allocator;
    w->store = store;
    w->optimizer = optimizer;
    w->value = (uint32_t *)msi_alloc(allocator, msi_lowering_bytes(g));
    uint32_t **const others[] = {&w->gradient,  &w->queue, &w->stack,  &w->missing,
                                 &w->pass_only, &w->met,   &w->wanted, &w->snapshot};
    for (uint32_t k = 0; k < sizeof others / sizeof others[0] && w->value; k++) {
        *others[k] = w->value + (k + 1) * (size_t)g->tensors.count;
    }
    return w->value != NULL;
}

static void msi_lowering_free(msi_lowering *w) {
    msi_release(w->allocator, w->value, msi_lowering_bytes(w->graph));
}

static void msi_program_free(const ms_allocator *a, msi_program *p) {
    MSI_LIST_FREE(msi_instruction, a, p->instructions);
    MSI_LIST_FREE(msi_operand, a, p->operands);
    MSI_LIST_FREE(msi_range, a, p->ranges);
    MSI_LIST_FREE(msi_block, a, p->blocks);
    MSI_LIST_FREE(uint64_t, a, p->live_bytes);
    MSI_LIST_FREE(double, a, p->measured);
    memset(p, 0, sizeof *p);
}

static uint32_t msi_emit(msi_lowering *w, msi_op op, uint32_t target) {
    msi_program *p = w->program;
    if (!MSI_RESERVE(msi_instruction, w->allocator, p->instructions,
                     p->instructions.count + 1ull)) {
        p->out_of_memory = true;
        return 0;
    }
    msi_instruction *i = &p->instructions.items[p->instructions.count];
    i->op = (uint8_t)op;
    i->target = target;
    i->operand_first = p->operands.count;
    i->operand_count = 0;
    i->restores = false;
    return p->instructions.count++;
}

static ms_category msi_category(const msi_graph *g, uint32_t tensor, msi_role role) {
    static const ms_category of_value[] = {MS_CATEGORY_INPUT, MS_CATEGORY_PARAM, MS_CATEGORY_BUFFER,
                                           MS_CATEGORY_ACTIVATION, MS_CATEGORY_SAVED};
    switch (role) {
    case MSI_ROLE_WORKSPACE:
    case MSI_ROLE_NORM:
        return MS_CATEGORY_WORKSPACE;
    case MSI_ROLE_VALUE:
        return of_value[g->tensors.items[tensor].kind];
    case MSI_ROLE_SNAPSHOT:
        return MS_CATEGORY_SAVED;
    case MSI_ROLE_GRADIENT:
    case MSI_ROLE_CONTRIBUTION:
        return g->tensors.items[tensor].kind == MSI_KIND_PARAM ? MS_CATEGORY_GRADIENT
                                                               : MS_CATEGORY_ACTIVATION_GRADIENT;
    case MSI_ROLE_STATE0:
        break; // and those that follow it
    }
    return MS_CATEGORY_OPTIMIZER;
}

static uint32_t msi_new_range(msi_lowering *w, uint32_t target, msi_role role, uint64_t bytes) {
    msi_program *p = w->program;
    if (!MSI_RESERVE(msi_range, w->allocator, p->ranges, p->ranges.count + 1ull)) {
        p->out_of_memory = true;
        return MSI_NONE;
    }
    msi_range *range = &p->ranges.items[p->ranges.count];
    memset(range, 0, sizeof *range);
    range->tensor = target;
    range->role = (uint8_t)role;
    range->category = (uint8_t)msi_category(w->graph, target, role);
    range->bytes = bytes;
    range->first = range->last = p->instructions.count - 1;
    range->idle_first = range->idle_last = MSI_NONE;
    range->alias_of = range->block = MSI_NONE;
    return p->ranges.count++;
}

/* Appends an operand to the last instruction, and extends its live range to there. */
static void msi_use(msi_lowering *w, uint32_t range, bool accumulate) {
    msi_program *p = w->program;
    if (p->out_of_memory ||
        !MSI_RESERVE(msi_operand, w->allocator, p->operands, p->operands.count + 1ull)) {
        p->out_of_memory = true;
        return;
    }
    const uint32_t now = p->instructions.count - 1;
    msi_operand *operand = &p->operands.items[p->operands.count++];
    operand->range = range;
    operand->accumulate = accumulate;
    p->instructions.items[now].operand_count++;
    if (range == MSI_NONE || range < w->store->residents.count) {
        return;
    }
    msi_range *l = &p->ranges.items[range];
    if (w->backward && l->idle_last == MSI_NONE && l->first < p->forward_end) {
        l->idle_first = l->last;
        l->idle_last = now;
    }
    l->last = now;
}

static void msi_use_both(msi_lowering *w, uint32_t target, bool accumulate, uint32_t source) {
    msi_use(w, target, accumulate);
    msi_use(w, source, false);
}

static uint32_t msi_emit_copy(msi_lowering *w, uint32_t target, msi_role role, uint32_t range,
                              uint32_t source) {
    msi_emit(w, MSI_OP_COPY, target);
    if (range == MSI_NONE) {
        range = msi_new_range(w, target, role, w->graph->tensors.items[target].bytes);
    }
    msi_use_both(w, range, false, source);
    return range;
}

static uint32_t msi_emit_zero(msi_lowering *w, uint32_t target, msi_role role, uint64_t bytes) {
    msi_emit(w, MSI_OP_ZERO, target);
    const uint32_t range = msi_new_range(w, target, role, bytes);
    msi_use(w, range, false);
    return range;
}

/* Scratch memory that must be cleared is made before the instruction that it is for. Any other is
   made with the instruction: MSI_UNSET. */
static uint32_t msi_prepare_workspace(msi_lowering *w, uint32_t layer, int which) {
    const msi_layer *l = &w->graph->layers.items[layer];
    const uint64_t bytes = msi_workspace_bytes(w->graph, l, which);
    return bytes == 0 ? MSI_NONE
           : l->workspace[which].contents == MS_CONTENTS_ANY
               ? MSI_UNSET
               : msi_emit_zero(w, layer, MSI_ROLE_WORKSPACE, bytes);
}

static void msi_use_workspace(msi_lowering *w, uint32_t layer, int which, uint32_t range) {
    const msi_layer *l = &w->graph->layers.items[layer];
    const uint64_t bytes = msi_workspace_bytes(w->graph, l, which);
    msi_use(w, range == MSI_UNSET ? msi_new_range(w, layer, MSI_ROLE_WORKSPACE, bytes) : range,
            false);
}

static void msi_start_program(msi_lowering *w, const msi_tensor_decision *decisions,
                              msi_program *p) {
    const msi_store *store = w->store;
    p->instructions.count = p->operands.count = p->ranges.count = 0;
    p->forward_end = p->backward_end = UINT32_MAX;
    p->recompute_count = 0;
    p->norm = MSI_NONE;
    p->out_of_memory = false;
    w->program = p;
    w->decisions = decisions;
    w->queue_first = w->queue_end = 0;
    w->backward = false;
    w->pass_only_count = w->recomputation = w->pass_number = 0;
    for (uint32_t t = 0; t < w->graph->tensors.count; t++) {
        w->value[t] = store->resident_of[t];
        w->gradient[t] = MSI_NONE;
        w->met[t] = w->wanted[t] = 0;
    }
    for (uint32_t i = 0; i < w->graph->operands.count; i++) {
        w->snapshot[i] = MSI_NONE;
    }
    for (uint32_t i = 0; i < store->residents.count; i++) {
        const msi_resident *resident = &store->residents.items[i];
        const uint32_t range = msi_new_range(w, resident->tensor, resident->role, resident->bytes);
        if (range == MSI_NONE) {
            return;
        }
        p->ranges.items[range].first = 0;
        p->ranges.items[range].last = MSI_NONE;
        if (resident->role == MSI_ROLE_GRADIENT &&
            w->graph->tensors.items[resident->tensor].wants_gradient) {
            w->gradient[resident->tensor] = range;
        }
    }
}

/* Lists the edges of a layer: the gradients of the slots in the masks. A gradient to which the
   layer adds is cleared first if it does not exist yet. */
static void msi_list_edges(msi_lowering *w, const msi_layer *l, uint32_t in_mask,
                           uint32_t param_mask) {
    const msi_graph *g = w->graph;
    const uint32_t overwrites = l->overwrites.in | l->must_grad_in_place;
    w->edge_count = 0;
    for (int group = MSI_GROUP_IN; group <= MSI_GROUP_PARAM; group += MSI_GROUP_PARAM) {
        const bool of_in = group == MSI_GROUP_IN;
        const uint32_t mask = of_in ? in_mask : param_mask;
        for (uint32_t slot = 0; slot < l->count[group]; slot++) {
            msi_edge *edge = &w->edges[w->edge_count++];
            const uint32_t t = msi_group(g, l, group)[slot];
            memset(edge, 0, sizeof *edge);
            edge->range = edge->tensor = MSI_NONE;
            if (!(mask >> slot & 1) || t == MSI_NONE || !g->tensors.items[t].wants_gradient) {
                continue;
            }
            edge->tensor = t;
            edge->overwrites = (of_in ? overwrites : l->overwrites.param) >> slot & 1;
            const uint32_t accumulates = of_in ? l->accumulates.in : l->accumulates.param;
            if ((accumulates >> slot & 1) && w->gradient[t] == MSI_NONE) {
                w->gradient[t] = msi_emit_zero(w, t, MSI_ROLE_GRADIENT, g->tensors.items[t].bytes);
            }
        }
    }
}

/* Decides where an edge writes: to the gradient itself, as its first contribution or on top of what
   is there; or, if it overwrites and others contribute too, to memory of its own. */
static void msi_decide_edge(msi_lowering *w, msi_edge *edge) {
    bool first = w->gradient[edge->tensor] == MSI_NONE, mixed = false;
    for (uint32_t k = 0; k < w->edge_count; k++) {
        const msi_edge *other = &w->edges[k];
        if (other->tensor == edge->tensor) {
            mixed |= !other->overwrites;
            first &= other >= edge || other->separate;
        }
    }
    edge->separate = edge->overwrites && (!first || mixed);
    edge->accumulate = !edge->overwrites && !first;
}

/* Copies grad_out to where a gradient is to be computed in place of it; returns the live range of
   the copy. */
static uint32_t msi_copy_grad_out(msi_lowering *w, const msi_layer *l, uint32_t in, msi_edge *edge,
                                  uint32_t *grad_out) {
    const msi_graph *g = w->graph;
    const uint32_t *masks = g->masks.items + l->mask_first + l->count[MSI_GROUP_OUT] + 4 * in;
    const uint32_t out = msi_lowest_bit(masks[3]);
    const uint32_t source = w->gradient[msi_group(g, l, MSI_GROUP_OUT)[out]];
    const msi_role role = edge->separate ? MSI_ROLE_CONTRIBUTION : MSI_ROLE_GRADIENT;
    const uint32_t t = edge->tensor;
    grad_out[out] = source == MSI_NONE ? msi_emit_zero(w, t, role, g->tensors.items[t].bytes)
                                       : msi_emit_copy(w, t, role, MSI_NONE, source);
    return grad_out[out];
}

/* Prepares the edges before their instruction. `grad_out` gets the live ranges in which the layer
   computes in place of the gradients of its outputs. */
static void msi_prepare_edges(msi_lowering *w, const msi_layer *l, uint32_t in_mask,
                              uint32_t param_mask, uint32_t *grad_out) {
    msi_list_edges(w, l, in_mask, param_mask);
    for (uint32_t e = 0; e < w->edge_count; e++) {
        msi_edge *edge = &w->edges[e];
        if (edge->tensor == MSI_NONE) {
            continue;
        }
        msi_decide_edge(w, edge);
        if (e < l->count[MSI_GROUP_IN] && (l->must_grad_in_place >> e & 1)) {
            edge->range = msi_copy_grad_out(w, l, e, edge, grad_out);
            w->gradient[edge->tensor] = edge->separate ? w->gradient[edge->tensor] : edge->range;
        }
    }
}

/* Appends the edges before `end` as operands of their instruction. */
static void msi_use_edges(msi_lowering *w, uint32_t end) {
    for (uint32_t e = 0; e < end; e++) {
        msi_edge *edge = &w->edges[e];
        if (edge->tensor == MSI_NONE) {
            msi_use(w, MSI_NONE, false);
            continue;
        }
        uint32_t *gradient = &w->gradient[edge->tensor];
        if (edge->range == MSI_NONE && (edge->separate || *gradient == MSI_NONE)) {
            edge->range = msi_new_range(w, edge->tensor,
                                        edge->separate ? MSI_ROLE_CONTRIBUTION : MSI_ROLE_GRADIENT,
                                        w->graph->tensors.items[edge->tensor].bytes);
            *gradient = edge->separate ? *gradient : edge->range;
        }
        msi_use(w, edge->range == MSI_NONE ? *gradient : edge->range, edge->accumulate);
    }
}

static void msi_add_contributions(msi_lowering *w) {
    for (uint32_t e = 0; e < w->edge_count; e++) {
        const msi_edge *edge = &w->edges[e];
        if (edge->tensor != MSI_NONE && edge->separate) {
            msi_emit(w, MSI_OP_ADD, edge->tensor);
            msi_use_both(w, w->gradient[edge->tensor], true, edge->range);
        }
    }
}

/* Whether a recomputation before the backward of `reader` is to make a tensor. */
static bool msi_is_needed(const msi_lowering *w, uint32_t t, uint32_t reader) {
    const msi_tensor *tensor = &w->graph->tensors.items[t];
    return tensor->is_output || t == w->graph->loss ||
           (w->pass_number && w->wanted[t] == w->pass_number) ||
           (tensor->last_reader != MSI_NONE && tensor->last_reader <= reader &&
            w->decisions[t].pass <= w->depth);
}

/* The live range to which a forward, eval or recomputation writes a tensor; MSI_NONE where nobody
   needs it. A new one begins with the last instruction. */
static uint32_t msi_output_range(msi_lowering *w, msi_op op, uint32_t t, bool optional,
                                 uint32_t reader) {
    const msi_graph *g = w->graph;
    const msi_tensor *tensor = &g->tensors.items[t];
    const bool again = msi_is_again(op);
    const bool there = w->value[t] != MSI_NONE;
    const bool own = op == MSI_OP_RECOMPUTE && g->layers.items[tensor->producer].recompute;
    if (own && there) { // what was kept: the recompute callback reads it, or leaves it alone
        return tensor->serves_recompute ? w->value[t] : MSI_NONE;
    }
    if (again ? (own || optional) && (there || !msi_is_needed(w, t, reader))
              : optional &&
                    (op == MSI_OP_EVAL || w->decisions[t].pass > 0 || !msi_is_read_again(tensor))) {
        return MSI_NONE;
    }
    if (there && (tensor->is_output || t == g->loss)) {
        return w->value[t];
    }
    /* A recomputation by forward also writes values that are still in memory once more, with the
       same bits. From here on the new ones are read: nothing needs the old ones in between. */
    const uint32_t range = msi_new_range(w, t, MSI_ROLE_VALUE, tensor->bytes);
    if (again && !there && w->decisions[t].pass > w->depth) {
        w->pass_only[w->pass_only_count++] = t;
    }
    w->value[t] = range;
    return range;
}

/* State that a recomputation would change a second time: it is copied before forward. The copy is
   put in place for the recomputation, after which the value that was there in the meantime, set
   aside here, is put back. A copy that no recomputation uses is dropped in the end. */
static void msi_lower_state(msi_lowering *w, msi_op op, const msi_layer *l, uint32_t *aside) {
    const uint32_t *state = msi_group(w->graph, l, MSI_GROUP_STATE);
    uint32_t *snapshot = w->snapshot + (state - w->graph->operands.items);
    const uint32_t count = op == MSI_OP_EVAL || l->keeps_state || !msi_can_recompute(l)
                               ? 0
                               : l->count[MSI_GROUP_STATE];
    for (uint32_t k = 0; k < l->count[MSI_GROUP_STATE]; k++) {
        aside[k] = MSI_NONE;
        if (k < count && state[k] != MSI_NONE) {
            aside[k] = msi_emit_copy(w, state[k], MSI_ROLE_SNAPSHOT, MSI_NONE, w->value[state[k]]);
        }
    }
    for (uint32_t k = 0; k < count; k++) {
        if (msi_is_again(op) && state[k] != MSI_NONE) {
            msi_emit_copy(w, state[k], MSI_ROLE_VALUE, w->value[state[k]], snapshot[k]);
        } else {
            snapshot[k] = aside[k];
        }
    }
}

/* Copies inputs in whose place an output is computed to the memory of the output. The copy costs
   nothing where the output is an alias of the input. */
static void msi_lower_in_place(msi_lowering *w, msi_op op, const msi_layer *l, uint32_t reader) {
    const msi_graph *g = w->graph;
    const uint32_t *in = msi_group(g, l, MSI_GROUP_IN);
    const bool own = op == MSI_OP_RECOMPUTE && l->recompute;
    for (MSI_EACH(out, g, l, MSI_GROUP_OUT)) {
        const uint32_t t = out.tensor;
        if ((l->must_in_place >> out.slot & 1) &&
            (!own || (w->value[t] == MSI_NONE && msi_is_needed(w, t, reader)))) {
            const uint32_t i = msi_lowest_bit(g->masks.items[l->mask_first + out.slot]);
            const uint32_t source = w->value[in[i]];
            msi_emit(w, MSI_OP_COPY, t);
            const uint32_t range = msi_output_range(w, op, t, false, reader);
            msi_use_both(w, range, false, source);
            w->slots[i] = w->slots[msi_group_start(l, MSI_GROUP_OUT) + out.slot] = range;
        }
    }
}

/* Appends the values of a group as operands. */
static void msi_use_values(msi_lowering *w, msi_op op, const msi_layer *l, int group,
                           uint32_t reader) {
    const uint32_t *operands = msi_group(w->graph, l, group);
    const uint32_t start = msi_group_start(l, group);
    const uint32_t reads =
        op == MSI_OP_BACKWARD ? msi_reads_of(l, group) : msi_op_reads(l, op, group);
    const bool written =
        op != MSI_OP_BACKWARD && (group == MSI_GROUP_OUT || group == MSI_GROUP_SAVED);
    for (uint32_t k = 0; k < l->count[group]; k++) {
        uint32_t range = w->slots[start + k];
        if (operands[k] == MSI_NONE) {
            range = MSI_NONE;
        } else if (range == MSI_UNSET && written) {
            const bool optional = group == MSI_GROUP_SAVED && (l->optional_saved >> k & 1);
            range = msi_output_range(w, op, operands[k], optional, reader);
        } else if (range == MSI_UNSET) {
            range = reads >> k & 1 ? w->value[operands[k]] : MSI_NONE;
        }
        msi_use(w, range, false);
    }
}

static void msi_unset_slots(msi_lowering *w, const msi_layer *l) {
    const uint32_t count = msi_group_start(l, MSI_GROUP_COUNT) + l->count[MSI_GROUP_OUT];
    for (uint32_t k = 0; k < count; k++) {
        w->slots[k] = MSI_UNSET;
    }
}

/* Forward, eval or recomputation of a layer whose inputs and params are in memory. */
static void msi_lower_forward(msi_lowering *w, msi_op op, uint32_t layer, uint32_t reader) {
    const msi_layer *l = &w->graph->layers.items[layer];
    const int which = op == MSI_OP_RECOMPUTE ? MSI_WORKSPACE_RECOMPUTE : MSI_WORKSPACE_FORWARD;
    const bool writes_gradients = op == MSI_OP_FORWARD && l->grads_in_forward != 0;
    msi_program *p = w->program;
    uint32_t aside[MS_LIMIT_STATE];
    msi_unset_slots(w, l);
    msi_lower_state(w, op, l, aside);
    msi_lower_in_place(w, op, l, reader);
    if (writes_gradients) {
        msi_prepare_edges(w, l, l->grads_in_forward, 0, NULL);
    }
    const uint32_t workspace = msi_prepare_workspace(w, layer, which);
    msi_emit(w, op, layer);
    for (int group = 0; group < MSI_GROUP_COUNT; group++) {
        msi_use_values(w, op, l, group, reader);
    }
    if (writes_gradients) {
        msi_use_edges(w, l->count[MSI_GROUP_IN]);
    }
    msi_use_workspace(w, layer, which, workspace);
    if (writes_gradients) {
        msi_add_contributions(w);
    }
    for (MSI_EACH(state, w->graph, l, MSI_GROUP_STATE)) {
        const uint32_t t = state.tensor;
        if (msi_is_again(op) && aside[state.slot] != MSI_NONE) {
            msi_emit_copy(w, t, MSI_ROLE_VALUE, w->value[t], aside[state.slot]);
            if (!p->out_of_memory) {
                p->instructions.items[p->instructions.count - 1].restores = true;
            }
        }
    }
}

/* How the values of a layer come back: by its recompute callback, if all is in memory that this
   reads of the layer's own values; by forward, if there is none or something is not. */
static msi_op msi_way_back(const msi_lowering *w, const msi_layer *l) {
    bool there = true;
    for (int group = MSI_GROUP_OUT; l->recompute && group <= MSI_GROUP_SAVED; group++) {
        const uint32_t reads = msi_op_reads(l, MSI_OP_RECOMPUTE, group);
        for (MSI_EACH(made, w->graph, l, group)) {
            there &= !(reads >> made.slot & 1) || w->value[made.tensor] != MSI_NONE;
        }
    }
    return there ? MSI_OP_RECOMPUTE : MSI_OP_REPEAT;
}

/* Lists what is missing to recompute a tensor, back to what is in memory. */
static uint32_t msi_list_missing(msi_lowering *w, uint32_t tensor) {
    const msi_graph *g = w->graph;
    uint32_t depth = 0, listed = 0;
    w->recomputation++;
    w->stack[depth++] = tensor;
    w->met[tensor] = w->recomputation;
    while (depth > 0) {
        const msi_layer *l = &g->layers.items[g->tensors.items[w->stack[depth - 1]].producer];
        const uint32_t reads = msi_op_reads(l, msi_way_back(w, l), MSI_GROUP_IN);
        uint32_t next = MSI_NONE;
        for (MSI_EACH(in, g, l, MSI_GROUP_IN)) {
            if ((reads >> in.slot & 1) && w->value[in.tensor] == MSI_NONE &&
                w->met[in.tensor] != w->recomputation) {
                next = in.tensor;
                break;
            }
        }
        if (next == MSI_NONE) {
            w->missing[listed++] = w->stack[--depth];
        } else {
            w->met[next] = w->recomputation;
            w->stack[depth++] = next;
        }
    }
    return listed;
}

/* One pass: makes those of the first `count` missing tensors that belong to it, and what they are
   made of. */
static void msi_lower_pass(msi_lowering *w, uint32_t count, uint32_t reader) {
    const msi_graph *g = w->graph;
    w->pass_number++;
    for (uint32_t i = count; i-- > 0;) {
        const uint32_t t = w->missing[i];
        if (w->value[t] != MSI_NONE ||
            (w->decisions[t].pass > w->depth && w->wanted[t] != w->pass_number)) {
            continue;
        }
        const msi_layer *l = &g->layers.items[g->tensors.items[t].producer];
        const uint32_t reads = msi_op_reads(l, msi_way_back(w, l), MSI_GROUP_IN);
        w->wanted[t] = w->pass_number;
        for (MSI_EACH(in, g, l, MSI_GROUP_IN)) {
            if ((reads >> in.slot & 1) && w->value[in.tensor] == MSI_NONE) {
                w->wanted[in.tensor] = w->pass_number;
            }
        }
    }
    for (uint32_t i = 0; i < count && !w->program->out_of_memory; i++) {
        const uint32_t t = w->missing[i], layer = g->tensors.items[t].producer;
        if (w->wanted[t] == w->pass_number && w->value[t] == MSI_NONE) {
            msi_lower_forward(w, msi_way_back(w, &g->layers.items[layer]), layer, reader);
            w->program->recompute_count++;
        }
    }
    while (w->pass_only_count > 0) {
        w->value[w->pass_only[--w->pass_only_count]] = MSI_NONE;
    }
}

/* Makes sure that the value of a tensor is in memory, for the backward of layer `reader`: runs its
   producer again, after the producers of what that reads, and so on back to what is in memory. */
static void msi_lower_recompute(msi_lowering *w, uint32_t tensor, uint32_t reader) {
    while (w->value[tensor] == MSI_NONE && !w->program->out_of_memory) {
        const uint32_t count = msi_list_missing(w, tensor);
        w->depth = UINT32_MAX;
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t depth = w->decisions[w->missing[i]].pass;
            w->depth = depth < w->depth ? depth : w->depth;
        }
        msi_lower_pass(w, count, reader);
    }
}

/* Computes the norm of all gradients, for clipping. */
static void msi_lower_norm(msi_lowering *w) {
    const msi_graph *g = w->graph;
    msi_program *p = w->program;
    if (!(w->optimizer->grad_clip_norm > 0.0f)) {
        return;
    }
    p->norm = msi_emit_zero(w, 0, MSI_ROLE_NORM, sizeof(msi_norm));
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        if (msi_learns(&g->tensors.items[t])) {
            msi_emit(w, MSI_OP_NORM, t);
            msi_use_both(w, w->gradient[t], false, p->norm);
        }
    }
    msi_emit(w, MSI_OP_CLIP, 0);
    msi_use(w, p->norm, false);
}

static void msi_lower_update(msi_lowering *w, uint32_t param) {
    const msi_store *store = w->store;
    const uint32_t gradient = w->gradient[param], resident = store->resident_of[param];
    if (gradient == MSI_NONE || w->graph->tensors.items[param].last_gradient == MSI_NONE) {
        return;
    }
    w->gradient[param] = MSI_NONE;
    msi_emit(w, MSI_OP_UPDATE, param);
    msi_use_both(w, resident, false, gradient);
    msi_use(w, w->program->norm, false);
    for (uint32_t i = resident + 1;
         i < store->residents.count && store->residents.items[i].tensor == param; i++) {
        if (store->residents.items[i].role >= MSI_ROLE_STATE0) {
            msi_use(w, i, false);
        }
    }
}

/* The param in a slot of a layer if its gradient is complete after the backward of that layer, and
   if it is not in an earlier slot too; otherwise MSI_NONE. */
static uint32_t msi_completed_param(const msi_graph *g, uint32_t layer, uint32_t slot) {
    const uint32_t *param = msi_group(g, &g->layers.items[layer], MSI_GROUP_PARAM);
    const uint32_t t = param[slot];
    bool completed = t != MSI_NONE && g->tensors.items[t].last_gradient == layer;
    for (uint32_t k = 0; k < slot; k++) {
        completed &= param[k] != t;
    }
    return completed ? t : MSI_NONE;
}

/* Updates inside backward. Params whose last gradient came from this layer queue up, and those at
   the head whose turn it is are updated. */
static void msi_lower_early_updates(msi_lowering *w, uint32_t layer) {
    const msi_tensor_decision *d = w->decisions;
    for (uint32_t k = 0; k < w->graph->layers.items[layer].count[MSI_GROUP_PARAM]; k++) {
        const uint32_t t = msi_completed_param(w->graph, layer, k);
        if (t != MSI_NONE && d[t].update_after != MSI_NONE && w->gradient[t] != MSI_NONE) {
            w->queue[w->queue_end++] = t;
        }
    }
    while (w->queue_first < w->queue_end &&
           d[w->queue[w->queue_first]].update_after != MSI_AT_END &&
           d[w->queue[w->queue_first]].update_after >= layer) {
        msi_lower_update(w, w->queue[w->queue_first++]);
    }
}

/* Params in the order in which their gradients are complete. */
typedef struct msi_param_cursor {
    const msi_graph *graph;
    uint32_t layer, slot; // the next one is at a slot of layer - 1; all later layers are done
} msi_param_cursor;

/* The next param that may be updated inside backward, if its gradient is complete after the
   backward of layer `end`; or MSI_NONE. */
static uint32_t msi_next_early(msi_param_cursor *c, const msi_tensor_decision *d, uint32_t end) {
    const msi_graph *g = c->graph;
    while (c->layer > end) {
        const uint32_t layer = c->layer - 1;
        while (c->slot < g->layers.items[layer].count[MSI_GROUP_PARAM]) {
            const uint32_t t = msi_completed_param(g, layer, c->slot++);
            if (t != MSI_NONE && d[t].update_after != MSI_NONE) {
                return t;
            }
        }
        c->layer--;
        c->slot = 0;
    }
    return MSI_NONE;
}

/* Decides when params are updated: inside backward those that are forced, and if `early` all that
   may be. Updates begin as soon as the gradients that wait for one exceed lag_bytes, in the order
   in which these were complete. */
static void msi_place_updates(const msi_graph *g, msi_tensor_decision *d, bool early,
                              uint64_t lag_bytes) {
    msi_param_cursor head = {g, g->layers.count, 0}, tail = head;
    uint64_t waiting_bytes = 0;
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const msi_tensor *tensor = &g->tensors.items[t];
        const bool forced = tensor->technique[MS_TECHNIQUE_EARLY_UPDATE] == MS_SWITCH_ON;
        d[t].update_after = tensor->updates_early && (early || forced) ? MSI_AT_END : MSI_NONE;
    }
    for (uint32_t i = g->layers.count; i-- > 0;) {
        for (uint32_t t; (t = msi_next_early(&tail, d, i)) != MSI_NONE;) {
            waiting_bytes += g->tensors.items[t].bytes;
        }
        while (waiting_bytes > lag_bytes) {
            const uint32_t t = msi_next_early(&head, d, i);
            waiting_bytes -= g->tensors.items[t].bytes;
            d[t].update_after = i;
        }
    }
}

/* Makes ready for the backward of a layer: dropped values that it reads are recomputed. */
static void msi_lower_before_backward(msi_lowering *w, uint32_t layer) {
    const msi_graph *g = w->graph;
    const msi_layer *l = &g->layers.items[layer];
    for (int group = 0; group < MSI_GROUP_PARAM; group++) {
        for (MSI_EACH(operand, g, l, group)) {
            if (msi_reads_of(l, group) >> operand.slot & 1) {
                msi_lower_recompute(w, operand.tensor, layer);
            }
        }
    }
}

/* Copies the values that backward destroys, because others may still need them. Where this is their
   last use the copy is an alias and costs nothing. */
static void msi_lower_clobbers(msi_lowering *w, const msi_layer *l) {
    const uint32_t masks[] = {l->clobbers.in, l->clobbers.out};
    for (int group = MSI_GROUP_IN; group <= MSI_GROUP_OUT; group++) {
        const uint32_t mask = masks[group] & msi_reads_of(l, group);
        for (MSI_EACH(operand, w->graph, l, group)) {
            if (mask >> operand.slot & 1) {
                w->slots[msi_group_start(l, group) + operand.slot] = msi_emit_copy(
                    w, operand.tensor, MSI_ROLE_VALUE, MSI_NONE, w->value[operand.tensor]);
            }
        }
    }
}

static void msi_lower_backward(msi_lowering *w, uint32_t layer) {
    const msi_graph *g = w->graph;
    const msi_layer *l = &g->layers.items[layer];
    const uint32_t *out = msi_group(g, l, MSI_GROUP_OUT);
    uint32_t *grad_out = w->slots + msi_group_start(l, MSI_GROUP_COUNT);
    msi_lower_before_backward(w, layer);
    msi_unset_slots(w, l);
    msi_lower_clobbers(w, l);
    msi_prepare_edges(w, l, MS_ALL_SLOTS, MS_ALL_SLOTS, grad_out);
    const uint32_t workspace = msi_prepare_workspace(w, layer, MSI_WORKSPACE_BACKWARD);
    msi_emit(w, MSI_OP_BACKWARD, layer);
    for (int group = 0; group < MSI_GROUP_COUNT; group++) {
        msi_use_values(w, MSI_OP_BACKWARD, l, group, MSI_NONE);
    }
    for (uint32_t k = 0; k < l->count[MSI_GROUP_OUT]; k++) {
        msi_use(w,
                out[k] == MSI_NONE         ? MSI_NONE
                : grad_out[k] == MSI_UNSET ? w->gradient[out[k]]
                                           : grad_out[k],
                false);
    }
    msi_use_edges(w, w->edge_count);
    msi_use_workspace(w, layer, MSI_WORKSPACE_BACKWARD, workspace);
    msi_add_contributions(w);
}

/* Extends a live range to the end of the program and beyond; residents stay anyway. */
static void msi_keep_to_end(msi_lowering *w, uint32_t range) {
    msi_program *p = w->program;
    if (!p->out_of_memory && range != MSI_NONE && range >= w->store->residents.count) {
        p->ranges.items[range].last = p->instructions.count - 1;
        p->ranges.items[range].outlives = true;
    }
}

/* Accumulated gradients begin at zero. */
static void msi_lower_first_micro(msi_lowering *w) {
    for (uint32_t i = 0; i < w->store->residents.count; i++) {
        const msi_resident *resident = &w->store->residents.items[i];
        if (resident->role == MSI_ROLE_GRADIENT && !resident->borrowed) {
            msi_emit(w, MSI_OP_ZERO, resident->tensor);
            msi_use(w, i, false);
        }
    }
}

static void msi_lower_all_backward(msi_lowering *w) {
    const msi_graph *g = w->graph;
    w->backward = true;
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        w->value[t] = w->decisions[t].pass > 0 ? MSI_NONE : w->value[t];
    }
    if (g->tensors.items[g->loss].wants_gradient) {
        uint32_t *gradient = &w->gradient[g->loss];
        msi_emit(w, MSI_OP_SEED, g->loss);
        if (*gradient == MSI_NONE) {
            *gradient =
                msi_new_range(w, g->loss, MSI_ROLE_GRADIENT, g->tensors.items[g->loss].bytes);
        }
        msi_use(w, *gradient, false);
    }
    for (uint32_t i = g->layers.count; i-- > 0 && !w->program->out_of_memory;) {
        if (g->layers.items[i].has_backward) {
            msi_lower_backward(w, i);
            msi_lower_early_updates(w, i);
        }
    }
}

/* Updates; or, without an optimizer, gradients that are kept for the trainer. */
static void msi_lower_updates(msi_lowering *w) {
    const msi_graph *g = w->graph;
    for (uint32_t t = 0; t < g->tensors.count && !w->program->out_of_memory; t++) {
        if (!msi_is_trained(&g->tensors.items[t])) {
            continue;
        }
        if (w->optimizer->kind != MS_OPTIMIZER_NONE) {
            msi_lower_update(w, t);
        } else {
            msi_keep_to_end(w, w->gradient[t]);
        }
    }
}

/* Drops the copies of state that no recomputation needed. */
static void msi_drop_unused_copies(const msi_lowering *w) {
    msi_program *p = w->program;
    for (uint32_t now = 0; now < p->forward_end && now < p->instructions.count; now++) {
        msi_instruction *i = &p->instructions.items[now];
        if (i->op == MSI_OP_COPY) {
            msi_range *range = &p->ranges.items[p->operands.items[i->operand_first].range];
            const bool unused = range->role == MSI_ROLE_SNAPSHOT && range->last == now;
            i->op = (uint8_t)(unused ? MSI_OP_NOTHING : MSI_OP_COPY);
            range->bytes = unused ? 0 : range->bytes;
        }
    }
}

/* The training program: forward, at whose end dropped values are forgotten; backward; updates. */
static void msi_lower_train(msi_lowering *w, const msi_tensor_decision *decisions, msi_program *p) {
    const msi_graph *g = w->graph;
    msi_start_program(w, decisions, p);
    msi_lower_first_micro(w);
    for (uint32_t i = 0; i < g->layers.count && !p->out_of_memory; i++) {
        msi_lower_forward(w, MSI_OP_FORWARD, i, MSI_NONE);
    }
    p->forward_end = p->instructions.count;
    msi_lower_all_backward(w);
    p->backward_end = p->instructions.count;
    p->loss = w->value[g->loss];
    msi_lower_norm(w);
    msi_lower_updates(w);
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        if (g->tensors.items[t].is_output || t == g->loss) {
            msi_keep_to_end(w, w->value[t]);
        }
    }
    msi_keep_to_end(w, p->norm);
    if (!p->out_of_memory) {
        msi_drop_unused_copies(w);
    }
}

static void msi_lower_eval(msi_lowering *w, msi_program *p) {
    const msi_graph *g = w->graph;
    msi_start_program(w, NULL, p); // nothing is recomputed
    for (uint32_t i = 0; i < g->layers.count && !p->out_of_memory; i++) {
        msi_lower_forward(w, MSI_OP_EVAL, i, MSI_NONE);
    }
    p->forward_end = p->backward_end = p->instructions.count;
    p->loss = w->value[g->loss];
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        if (g->tensors.items[t].is_output || g->tensors.items[t].is_eval_output || t == g->loss) {
            msi_keep_to_end(w, w->value[t]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// >>schedule  copies between host and device: on streams of their own, and awaited before use

/* A copy that has been issued, but not awaited yet. */
typedef struct msi_pending {
    uint32_t instruction; // in the new list
    uint32_t target, source;
} msi_pending;

enum { MSI_MAX_PENDING = 2 * MS_LIMIT_STATE };

typedef struct msi_scheduling {
    const ms_allocator *allocator;
    const msi_store *store;
    msi_program *program;
    MSI_LIST(msi_instruction) instructions; // the new list
    uint32_t *moved;                        // per instruction of the old one: its new number
    msi_pending pending[MSI_MAX_PENDING];
    uint32_t pending_count;
} msi_scheduling;

/* The op of an instruction; a copy gets that of its direction, by where its ends are. */
static msi_op msi_direction(const msi_store *store, const msi_program *p,
                            const msi_instruction *i) {
    const msi_operand *operands = p->operands.items + i->operand_first;
    return (msi_op)i->op != MSI_OP_COPY               ? (msi_op)i->op
           : msi_is_on_host(store, operands[0].range) ? MSI_OP_COPY_OUT
           : msi_is_on_host(store, operands[1].range) ? MSI_OP_COPY_IN
                                                      : MSI_OP_COPY;
}

/* Whether a program copies from or to the host; most do not. */
static bool msi_crosses_link(const msi_store *store, const msi_program *p) {
    bool crosses = false;
    for (uint32_t now = 0; now < p->instructions.count; now++) {
        const msi_instruction *i = &p->instructions.items[now];
        crosses |= msi_direction(store, p, i) != (msi_op)i->op;
    }
    return crosses;
}

/* Appends to the new list; returns the number there. */
static uint32_t msi_place(msi_scheduling *s, const msi_instruction *i) {
    if (!MSI_RESERVE(msi_instruction, s->allocator, s->instructions,
                     s->instructions.count + 1ull)) {
        s->program->out_of_memory = true;
        return 0;
    }
    s->instructions.items[s->instructions.count] = *i;
    return s->instructions.count++;
}

/* Places a wait for a copy: an instruction with both its ends as operands, which therefore stay
   live until then. */
static void msi_place_wait(msi_scheduling *s, const msi_pending *copy) {
    msi_program *p = s->program;
    msi_instruction wait = s->instructions.items[copy->instruction];
    const msi_operand ends[2] = {{copy->target, false}, {copy->source, false}};
    if (p->out_of_memory ||
        !MSI_RESERVE(msi_operand, s->allocator, p->operands, p->operands.count + 2ull)) {
        p->out_of_memory = true;
        return;
    }
    wait.op = (uint8_t)MSI_OP_WAIT;
    wait.operand_first = p->operands.count;
    wait.restores = false;
    memcpy(p->operands.items + p->operands.count, ends, sizeof ends);
    p->operands.count += 2;
    msi_place(s, &wait);
}

/* Whether an instruction must wait for a copy: if it has either end of the copy as an operand; and,
   since callbacks may hold addresses in host memory, for a copy to the host unless it is a copy
   itself. */
static bool msi_must_await(const msi_scheduling *s, const msi_pending *copy,
                           const msi_instruction *i) {
    const msi_op op = msi_direction(s->store, s->program, i);
    const bool is_copy = op == MSI_OP_COPY || op == MSI_OP_COPY_IN || op == MSI_OP_COPY_OUT;
    bool awaits = s->instructions.items[copy->instruction].op == MSI_OP_COPY_OUT && !is_copy;
    for (uint32_t k = 0; k < i->operand_count; k++) {
        const uint32_t range = s->program->operands.items[i->operand_first + k].range;
        awaits |= range == copy->target || range == copy->source;
    }
    return awaits;
}

/* Places waits for those pending copies that an instruction must wait for; for all of them if it is
   NULL, or if there is no room for one more. */
static void msi_await_copies(msi_scheduling *s, const msi_instruction *i) {
    const bool full = s->pending_count == MSI_MAX_PENDING;
    uint32_t left = 0;
    for (uint32_t k = 0; k < s->pending_count; k++) {
        if (full || !i || msi_must_await(s, &s->pending[k], i)) {
            msi_place_wait(s, &s->pending[k]);
        } else {
            s->pending[left++] = s->pending[k];
        }
    }
    s->pending_count = left;
}

/* Makes the new list, with a wait for each copy, and the new numbers of the old instructions. The
   copies of forward are awaited in forward: each is made for a layer that runs next. */
static void msi_place_all(msi_scheduling *s) {
    msi_program *p = s->program;
    for (uint32_t now = 0; now < p->instructions.count && !p->out_of_memory; now++) {
        msi_instruction i = p->instructions.items[now];
        const msi_op op = msi_direction(s->store, p, &i);
        const bool crosses = op != (msi_op)i.op;
        msi_await_copies(s, &i);
        i.op = (uint8_t)op;
        s->moved[now] = msi_place(s, &i);
        if (crosses && !p->out_of_memory) {
            msi_pending *copy = &s->pending[s->pending_count++];
            copy->instruction = s->moved[now];
            copy->target = p->operands.items[i.operand_first].range;
            copy->source = p->operands.items[i.operand_first + 1].range;
        }
    }
    msi_await_copies(s, NULL);
}

/* Converts live ranges to the numbers of the new list. Both ends of a copy stay live until it is
   awaited. */
static void msi_renumber(msi_scheduling *s) {
    msi_program *p = s->program;
    const uint32_t residents = s->store->residents.count, end = p->instructions.count;
    for (uint32_t k = residents; k < p->ranges.count; k++) {
        msi_range *range = &p->ranges.items[k];
        range->first = s->moved[range->first];
        range->last = s->moved[range->last];
        if (range->idle_last != MSI_NONE) {
            range->idle_first = s->moved[range->idle_first];
            range->idle_last = s->moved[range->idle_last];
        }
    }
    p->backward_end = p->backward_end < end ? s->moved[p->backward_end] : s->instructions.count;
    p->forward_end = p->forward_end < end ? s->moved[p->forward_end] : s->instructions.count;
    for (uint32_t now = 0; now < s->instructions.count; now++) {
        const msi_instruction *i = &s->instructions.items[now];
        for (uint32_t k = 0; i->op == MSI_OP_WAIT && k < i->operand_count; k++) {
            const uint32_t end_of_copy = p->operands.items[i->operand_first + k].range;
            msi_range *range = &p->ranges.items[end_of_copy];
            range->last = end_of_copy >= residents && range->last < now ? now : range->last;
        }
    }
}

/* Places the copies of a program. The order of all other instructions stays as it is. */
static void msi_schedule(const msi_store *store, const ms_allocator *allocator, msi_program *p) {
    msi_scheduling s;
    if (p->out_of_memory || !msi_crosses_link(store, p)) {
        return;
    }
    const uint64_t bytes = p->instructions.count * (uint64_t)sizeof(uint32_t);
    memset(&s, 0, sizeof s);
    s.allocator = allocator;
    s.store = store;
    s.program = p;
    s.moved = (uint32_t *)msi_alloc(allocator, bytes);
    p->out_of_memory = !s.moved;
    if (s.moved) {
        msi_place_all(&s);
    }
    if (!p->out_of_memory) {
        msi_renumber(&s);
        MSI_LIST_FREE(msi_instruction, allocator, p->instructions);
        p->instructions.items = s.instructions.items;
        p->instructions.count = s.instructions.count;
        p->instructions.capacity = s.instructions.capacity;
    } else {
        MSI_LIST_FREE(msi_instruction, allocator, s.instructions);
    }
    msi_release(allocator, s.moved, bytes);
}

// ------------------------------------------------------------------------------------------------
// >>alias  live ranges that go on using the memory of others: copies, and results made in place

/* Whether a value fits into the memory of another: with axes, at all their sizes or at none. */
static bool msi_fits_in(const msi_graph *g, const msi_range *range, const msi_range *old) {
    return g->axis_count == 0
               ? msi_align(range->bytes) == msi_align(old->bytes)
               : range->bytes == old->bytes && msi_scales_alike(g, range->tensor, old->tensor);
}

/* The live range whose memory `range` can go on using: it ends at this instruction, has the same
   size, and every operand that has it is allowed. `allowed` has a flag per operand. */
static uint32_t msi_find_alias(const msi_graph *g, const msi_program *p, uint32_t now,
                               uint32_t range, const uint8_t *allowed) {
    const msi_instruction *i = &p->instructions.items[now];
    const msi_operand *operands = p->operands.items + i->operand_first;
    for (uint32_t k = 0; k < i->operand_count; k++) {
        const uint32_t index = operands[k].range;
        const msi_range *old = index == MSI_NONE ? NULL : &p->ranges.items[index];
        bool usable = allowed[k] && old && old->last == now && !old->aliased && !old->outlives &&
                      old->first != now && msi_fits_in(g, &p->ranges.items[range], old);
        for (uint32_t j = 0; j < i->operand_count && usable; j++) {
            usable = operands[j].range != index || allowed[j];
        }
        if (usable) {
            return index;
        }
    }
    return MSI_NONE;
}

/* Allows operands from `first` on, by a mask that has no bits beyond the slots of the layer. */
static void msi_allow(uint8_t *allowed, uint32_t first, uint32_t mask) {
    for (; mask != 0 && first < MSI_MAX_VIEWS; first++, mask >>= 1) {
        allowed[first] = mask & 1;
    }
}

/* Makes operand k of an instruction an alias of an allowed operand, if its live range begins there
   and it is in one slot only. */
static void msi_try_alias(const msi_graph *g, msi_program *p, uint32_t now, uint32_t k,
                          const uint8_t *allowed) {
    const msi_instruction *i = &p->instructions.items[now];
    const msi_operand *operands = p->operands.items + i->operand_first;
    const uint32_t range = operands[k].range;
    bool single = range != MSI_NONE && p->ranges.items[range].first == now;
    for (uint32_t j = 0; j < i->operand_count && single; j++) {
        single = j == k || operands[j].range != range;
    }
    const uint32_t old = single ? msi_find_alias(g, p, now, range, allowed) : MSI_NONE;
    if (old != MSI_NONE) {
        p->ranges.items[old].aliased = true;
        p->ranges.items[range].alias_of = old;
    }
}

/* Finds all aliases: by copies, and by what the layers allow in their masks. */
static void msi_share_memory(const msi_graph *g, msi_program *p) {
    uint8_t allowed[MSI_MAX_VIEWS + 1]; // one per operand, workspace included
    for (uint32_t now = 0; now < p->instructions.count; now++) {
        const msi_instruction *i = &p->instructions.items[now];
        if (i->op == MSI_OP_COPY) {
            allowed[0] = 0;
            allowed[1] = 1;
            msi_try_alias(g, p, now, 0, allowed);
        }
        if (!msi_calls_layer((msi_op)i->op)) {
            continue;
        }
        const msi_layer *l = &g->layers.items[i->target];
        const uint32_t *mask = g->masks.items + l->mask_first;
        const uint32_t in = l->count[MSI_GROUP_IN], out = l->count[MSI_GROUP_OUT];
        const uint32_t values = msi_group_start(l, MSI_GROUP_COUNT);
        const bool backward = i->op == MSI_OP_BACKWARD;
        for (uint32_t k = 0; k < out && !backward; k++) {
            memset(allowed, 0, i->operand_count);
            msi_allow(allowed, 0, mask[k]);
            if (mask[k]) {
                msi_try_alias(g, p, now, in + k, allowed);
            }
        }
        mask += out;
        const bool writes_gradients =
            backward || (i->op == MSI_OP_FORWARD && l->grads_in_forward != 0);
        for (uint32_t k = 0; k < in && writes_gradients; k++, mask += 4) {
            memset(allowed, 0, i->operand_count);
            msi_allow(allowed, 0, mask[0]);
            if (backward) {
                msi_allow(allowed, in, mask[1]);
                msi_allow(allowed, in + out, mask[2]);
                msi_allow(allowed, values, mask[3]);
            }
            if (mask[0] | mask[1] | mask[2] | mask[3]) {
                msi_try_alias(g, p, now, values + (backward ? out : 0) + k, allowed);
            }
        }
    }
}

/* Makes one block of memory for each chain of aliases; residents have their places already. */
static bool msi_make_blocks(const ms_allocator *a, msi_program *p, uint32_t resident_count) {
    p->blocks.count = 0;
    if (!MSI_RESERVE(msi_block, a, p->blocks, p->ranges.count)) {
        return false;
    }
    for (uint32_t i = resident_count; i < p->ranges.count; i++) {
        msi_range *range = &p->ranges.items[i];
        if (range->alias_of != MSI_NONE) {
            range->block = p->ranges.items[range->alias_of].block;
            p->blocks.items[range->block].last = range->last;
            continue;
        }
        range->block = p->blocks.count++;
        msi_block *block = &p->blocks.items[range->block];
        block->bytes = msi_align(range->bytes);
        block->offset = 0;
        block->first = range->first;
        block->last = range->last;
        block->from_top = range->category == MS_CATEGORY_GRADIENT;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// >>layout  offsets for live ranges (dynamic storage allocation with all requests known)

/* The search has five stages and keeps the best layout. It ends when the effort is spent or the
   layout is small enough. From the peak: first-fit around two stacks, near O(n log n) for what
   training makes. Skylines in several orders (as Sekiyama et al. 2018 pack training memory) cost
   O(n log n) each. First-fit in several orders, the usual greedy method, also fills gaps, at
   O(n^2). Then orders are mended where first-fit fails, and ejection chains press the layout below
   one target after another. */

/* A placed block, with what is needed to compare it with others. */
typedef struct msi_spot {
    uint64_t low, high;
    uint32_t first, last, block, penalty;
} msi_spot;

/* A segment tree of heights over time. A block is placed on the highest point of its range, so to
   set the height of the range is to take the maximum with the new height, and no node has to pass
   a pending value down to its children. */
typedef struct msi_skyline {
    uint64_t *highest; // height that was applied anywhere in the subtree
    uint64_t *applied; // height that was applied to the whole node
    uint32_t leaves;
} msi_skyline;

/* With more blocks than this, a layout is good that is a little above the bound: with many times as
   many, one that is within 1 %. */
enum { MSI_LAYOUT_MANY = 4096 };

/* Two stacks of blocks, one standing on the ground and one hanging from the bound, and what finds a
   gap between them. The trees have a leaf for each block in use. "Before" and "after" are the sides
   of the peak: [0] and [1]. */
typedef struct msi_stacks {
    uint32_t peak;  // the compressed time of most live bytes: all that stand live then
    uint32_t count; // of the blocks that stand: the first ones of the order
    uint64_t bytes; // of these together
    uint64_t *low;  // of each of these, upwards
    uint32_t *reach[2],
        *lack[2];        // trees over these: how far they live; what they lack of UINT32_MAX
    uint32_t hung_at[2]; // a time at which all blocks that hang on this side live
    uint64_t *floor;     // per compressed time: where what hangs begins
    uint64_t *top;       // per compressed time: where what stands ends
    uint32_t *rest;      // tree over starts: when a block of the rest that lives briefly ends, or 0
    uint32_t *hung;      // per block: whether it hangs
    uint32_t leaves;
    uint32_t long_span;     // what lives so long, of the rest, lives long
    msi_spot *stretches[3]; // what hangs before and after, and the rest that lives long; upwards
    uint32_t stretch_count[3];
} msi_stacks;

typedef struct msi_layout_work {
    const msi_block *blocks;
    uint32_t count, used, times; // used: blocks that have bytes
    uint32_t *by_start, *rank;   // the blocks in the order of their starts; per block: its place
    uint32_t *begun;             // per compressed time: how many have started
    uint32_t *first, *last;      // per block: its live range in compressed time
    uint32_t *order, *scratch;   // of the blocks in use; to sort it, and a heap
    uint32_t *penalty;           // per block: how hard it is to place
    uint64_t *key;               // what to sort by, per block or item of the heap
    uint64_t *load;              // per compressed time: live bytes
    uint64_t *offset, *best;     // per block: in the layout at hand, in the best one
    uint64_t *from_peak;         // per block: in the best one from the peak
    /* Of one stage each, so that these four share their memory. */
    uint32_t *starts;           // to compress time; per compressed time: the instruction
    uint32_t *best_order;       // first-fit in several orders: the best one
    uint32_t *ranks;            // to mend an order; per block: its place in it
    uint32_t *waiting;          // from the peak: what may hang; ejection chains: what has no place
    msi_skyline bottom, top;    // also to sort by load; in the memory of the spots
    msi_stacks stacks;          // in the same memory
    msi_spot *by_low, *by_high; // the same spots, sorted either way
    uint32_t spot_count, waiting_count;
    uint64_t bound, enough, height, effort; // the search ends at `enough`, never below the bound
    uint64_t random;
} msi_layout_work;

/* Largest first, except START, which is by rising start. LOAD is the largest sum of live bytes that
   a block is part of. The classes grow in width with the figure, by a constant factor. Ties of
   BYTES_CLASS are ordered by SPAN, of SPAN_CLASS by BYTES, of LOAD by SPAN and then by BYTES. */
typedef enum msi_layout_order {
    MSI_ORDER_LOAD,
    MSI_ORDER_BYTES,
    MSI_ORDER_SPAN,
    MSI_ORDER_START,
    MSI_ORDER_BYTES_CLASS,
    MSI_ORDER_SPAN_CLASS
} msi_layout_order;

static uint64_t msi_larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static uint32_t msi_clamp(uint64_t value, uint32_t least, uint32_t most) {
    return (uint32_t)msi_smaller(msi_larger(value, least), most);
}

/* Stable merge sort of indices by rising key. */
static void msi_sort_indices(uint32_t *index, uint32_t *scratch, uint32_t count,
                             const uint64_t *key) {
    for (uint64_t width = 1; width < count; width *= 2) {
        for (uint64_t begin = 0; begin < count; begin += 2 * width) {
            uint64_t middle = begin + width < count ? begin + width : count;
            uint64_t end = begin + 2 * width < count ? begin + 2 * width : count;
            uint64_t a = begin, b = middle;
            for (uint64_t i = begin; i < end; i++) {
                bool from_a = b == end || (a < middle && key[index[a]] <= key[index[b]]);
                scratch[i] = from_a ? index[a++] : index[b++];
            }
        }
        memcpy(index, scratch, count * sizeof *index);
    }
}

/* Walks from both ends of the range to the root: every node that lies within the range is a child
   of one of these two paths. */
static uint64_t msi_skyline_max(const msi_skyline *s, uint32_t first, uint32_t last) {
    uint32_t left = first + s->leaves, right = last + s->leaves;
    uint64_t height = 0;
    for (uint32_t l = left, r = right + 1; l < r; l /= 2, r /= 2) {
        if (l & 1) {
            height = msi_larger(height, s->highest[l++]);
        }
        if (r & 1) {
            height = msi_larger(height, s->highest[--r]);
        }
    }
    for (; left; left /= 2, right /= 2) {
        height = msi_larger(height, msi_larger(s->applied[left], s->applied[right]));
    }
    return height;
}

static void msi_skyline_raise(const msi_skyline *s, uint32_t first, uint32_t last,
                              uint64_t height) {
    uint32_t left = first + s->leaves, right = last + s->leaves;
    for (uint32_t l = left, r = right + 1; l < r; l = (l + 1) / 2, r /= 2) {
        if (l & 1) {
            s->applied[l] = msi_larger(s->applied[l], height);
            s->highest[l] = msi_larger(s->highest[l], height);
        }
        if (r & 1) {
            s->applied[r - 1] = msi_larger(s->applied[r - 1], height);
            s->highest[r - 1] = msi_larger(s->highest[r - 1], height);
        }
    }
    for (; left; left /= 2, right /= 2) {
        s->highest[left] = msi_larger(s->highest[left], height);
        s->highest[right] = msi_larger(s->highest[right], height);
    }
}

static void msi_skyline_clear(const msi_skyline *s) {
    memset(s->highest, 0, 2 * (size_t)s->leaves * sizeof *s->highest);
    memset(s->applied, 0, 2 * (size_t)s->leaves * sizeof *s->applied);
}

static bool msi_layout_spend(msi_layout_work *w, uint64_t operations) {
    bool enough = w->effort >= operations;
    w->effort = enough ? w->effort - operations : 0;
    return enough;
}

/* Two live ranges that meet share the first instant of one of them: only these instants matter. */
static void msi_layout_compress_time(msi_layout_work *w) {
    for (uint32_t i = 0; i < w->count; i++) {
        w->key[i] = w->blocks[i].first;
        w->penalty[i] = 1;
        if (w->blocks[i].bytes) {
            w->order[w->used++] = i;
        }
    }
    msi_sort_indices(w->order, w->scratch, w->used, w->key);
    for (uint32_t i = 0; i < w->used; i++) {
        uint32_t block = w->order[i];
        if (i == 0 || w->key[w->order[i - 1]] != w->key[block]) {
            w->starts[w->times++] = w->blocks[block].first;
        }
        w->first[block] = w->times - 1;
        w->begun[w->times - 1] = i + 1;
        w->by_start[i] = block;
        w->rank[block] = i;
    }
    for (uint32_t i = 0; i < w->used; i++) {
        uint32_t block = w->order[i], low = w->first[block], high = w->times;
        while (high - low > 1) {
            uint32_t middle = low + (high - low) / 2;
            bool live = w->starts[middle] <= w->blocks[block].last;
            low = live ? middle : low;
            high = live ? high : middle;
        }
        w->last[block] = low;
    }
}

/* Live bytes over time; the largest is the lower bound. */
static void msi_layout_measure_load(msi_layout_work *w) {
    memset(w->load, 0, ((size_t)w->times + 1) * sizeof *w->load);
    for (uint32_t i = 0; i < w->used; i++) {
        uint32_t block = w->order[i];
        w->load[w->first[block]] += w->blocks[block].bytes;
        w->load[w->last[block] + 1] -= w->blocks[block].bytes; // wraps, and sums wrap back
    }
    for (uint32_t t = 0; t < w->times; ++t) {
        w->load[t] += t ? w->load[t - 1] : 0;
        if (w->load[t] > w->bound) {
            w->bound = w->load[t];
            w->stacks.peak = t;
        }
    }
}

/* Four classes from one power of two to the next. */
static uint64_t msi_layout_class(uint64_t size) {
    uint64_t exponent = 0;
    while (size >> exponent >= 8) {
        exponent++;
    }
    return 4 * exponent + (size >> exponent);
}

/* width: of the classes, in quarters of a power of two. */
static uint64_t msi_layout_key(const msi_layout_work *w, uint32_t block, msi_layout_order order,
                               uint64_t width) {
    uint64_t bytes = w->blocks[block].bytes;
    uint64_t span = (uint64_t)w->last[block] - w->first[block] + 1;
    switch (order) {
    case MSI_ORDER_START:
        return (uint64_t)w->first[block] << 32 | (UINT32_MAX - w->last[block]);
    case MSI_ORDER_SPAN:
        return ~span;
    case MSI_ORDER_BYTES:
        return ~bytes;
    case MSI_ORDER_BYTES_CLASS:
        return ~(msi_layout_class(bytes) / width);
    case MSI_ORDER_SPAN_CLASS:
        return ~(msi_layout_class(span) / width);
    case MSI_ORDER_LOAD:
        break;
    }
    return ~msi_skyline_max(&w->bottom, w->first[block], w->last[block]);
}

static void msi_layout_sort_by(msi_layout_work *w, msi_layout_order order, uint64_t width) {
    for (uint32_t i = 0; i < w->used; i++) {
        w->key[w->order[i]] = msi_layout_key(w, w->order[i], order, width);
    }
    msi_sort_indices(w->order, w->scratch, w->used, w->key);
}

static void msi_layout_sort(msi_layout_work *w, msi_layout_order order, uint64_t width) {
    if (order == MSI_ORDER_LOAD || order == MSI_ORDER_SPAN_CLASS) {
        msi_layout_sort_by(w, MSI_ORDER_BYTES, 1);
    }
    if (order == MSI_ORDER_LOAD || order == MSI_ORDER_BYTES_CLASS) {
        msi_layout_sort_by(w, MSI_ORDER_SPAN, 1);
    }
    if (order == MSI_ORDER_LOAD) {
        msi_skyline_clear(&w->bottom);
        for (uint32_t t = 0; t < w->times; ++t) {
            msi_skyline_raise(&w->bottom, t, t, w->load[t]);
        }
    }
    msi_layout_sort_by(w, order, width);
}

static void msi_layout_keep_best(msi_layout_work *w, uint64_t height) {
    if (height < w->height) {
        w->height = height;
        for (uint32_t i = 0; i < w->used; i++) {
            w->best[w->order[i]] = w->offset[w->order[i]];
        }
    }
}

/* Places each block on top of the blocks before it. Blocks from the top have a skyline of their own
   that hangs down, so what grows while the rest shrinks meets the rest in the middle. */
static void msi_layout_place_on_skylines(msi_layout_work *w, bool two_sided) {
    uint64_t height = 0;
    msi_skyline_clear(&w->bottom);
    msi_skyline_clear(&w->top);
    for (uint32_t i = 0; i < w->used; i++) {
        uint32_t block = w->order[i];
        bool top = two_sided && w->blocks[block].from_top;
        const msi_skyline *s = top ? &w->top : &w->bottom;
        w->offset[block] = msi_skyline_max(s, w->first[block], w->last[block]);
        msi_skyline_raise(s, w->first[block], w->last[block],
                          w->offset[block] + w->blocks[block].bytes);
    }
    for (uint32_t t = 0; t < w->times; ++t) {
        height =
            msi_larger(height, msi_skyline_max(&w->bottom, t, t) + msi_skyline_max(&w->top, t, t));
    }
    for (uint32_t i = 0; i < w->used && two_sided; i++) {
        uint32_t block = w->order[i];
        if (w->blocks[block].from_top) {
            w->offset[block] = height - w->offset[block] - w->blocks[block].bytes;
        }
    }
    msi_layout_keep_best(w, height);
}

/* The leaf from `from` on, up to `end`, whose value is `least` or more; `end`: there is none. Each
   node of the tree has the largest value below it. */
static uint32_t msi_tree_next(const uint32_t *tree, uint32_t leaves, uint32_t from, uint32_t end,
                              uint32_t least) {
    uint32_t i = from + leaves;
    if (from >= end) {
        return end;
    }
    while (tree[i] < least) {
        while (i & 1) { // a right child: nothing more below its parent
            i /= 2;
        }
        if (i == 0) {
            return end;
        }
        ++i;
    }
    while (i < leaves) {
        i *= 2;
        i += tree[i] < least;
    }
    return i - leaves < end ? i - leaves : end;
}

static void msi_tree_raise(uint32_t *tree, uint32_t leaves, uint32_t leaf, uint32_t value) {
    for (uint32_t i = leaf + leaves; i > 0 && tree[i] < value; i /= 2) {
        tree[i] = value;
    }
}

static bool msi_layout_lives_at(const msi_layout_work *w, uint32_t block, uint32_t time) {
    return w->first[block] <= time && time <= w->last[block];
}

static uint32_t msi_layout_span(const msi_layout_work *w, uint32_t block) {
    return w->last[block] - w->first[block] + 1;
}

static bool msi_spot_meets(const msi_spot *a, uint32_t first, uint32_t last) {
    return (a->first <= last) & (first <= a->last); // no branch: it would be unpredictable
}

static msi_spot msi_layout_spot(const msi_layout_work *w, uint32_t block, uint64_t low) {
    uint64_t high = low + w->blocks[block].bytes;
    msi_spot spot = {low, high, w->first[block], w->last[block], block, w->penalty[block]};
    return spot;
}

/* Inserts a spot into a list that is sorted by low or by high. Returns its place there. */
static uint32_t msi_spots_insert(msi_spot *spots, uint32_t count, msi_spot spot, bool by_high) {
    uint64_t key = by_high ? spot.high : spot.low;
    uint32_t i = count;
    for (; i > 0 && (by_high ? spots[i - 1].high : spots[i - 1].low) > key; --i) {
        spots[i] = spots[i - 1];
    }
    spots[i] = spot;
    return i;
}

/* How layouts from the peak differ: the shortest span of a block that stands on the ground, whether
   blocks hang from the bound, and the order of the rest. */
typedef struct msi_stacking {
    uint32_t least_span;
    bool hang;
    msi_layout_order rest;
} msi_stacking;

static bool msi_stacks_stands(const msi_layout_work *w, uint32_t block, const msi_stacking *how) {
    return msi_layout_lives_at(w, block, w->stacks.peak) &&
           msi_layout_span(w, block) >= how->least_span;
}

/* What stands lowest: what starts first, as nearly all that does ends last. If others hang, they
   must not meet what stands high and lives long; so there it is what lives farthest to either side
   of the peak, as a share of the time on that side. */
static uint64_t msi_stacks_key(const msi_layout_work *w, uint32_t block, const msi_stacking *how) {
    const uint32_t peak = w->stacks.peak, first = w->first[block], last = w->last[block];
    if (!msi_stacks_stands(w, block, how)) {
        return UINT64_MAX;
    }
    return how->hang ? UINT64_MAX - 1 -
                           msi_larger((uint64_t)(peak - first) * (w->times - peak),
                                      (uint64_t)(last - peak) * (peak + 1))
                     : first;
}

/* Orders the blocks that stand first, upwards, then the rest in an order of its own. */
static void msi_stacks_sort(msi_layout_work *w, const msi_stacking *how) {
    memcpy(w->order, w->by_start, w->used * sizeof *w->order);
    msi_layout_sort(w, how->rest, 1);
    for (uint32_t i = 0; i < w->used; i++) {
        w->key[w->order[i]] = msi_stacks_key(w, w->order[i], how);
    }
    msi_sort_indices(w->order, w->scratch, w->used, w->key);
}

/* Where the blocks that stand end, at each time: on either side of the peak they only become
   fewer. */
static void msi_stacks_measure_top(msi_layout_work *w) {
    const msi_stacks *s = &w->stacks;
    memset(s->top, 0, w->times * sizeof *s->top);
    for (uint32_t k = 0; k < s->count; k++) { // upwards: the highest of those that share a time
        const uint32_t block = w->order[k];
        s->top[w->first[block]] = s->top[w->last[block]] = s->low[k] + w->blocks[block].bytes;
    }
    for (uint32_t t = 1; t < s->peak; t++) {
        s->top[t] = msi_larger(s->top[t], s->top[t - 1]);
    }
    for (uint32_t t = w->times - 1; t > s->peak + 1; t--) {
        s->top[t - 1] = msi_larger(s->top[t - 1], s->top[t]);
    }
}

/* The reach of a block that stands. On one side of the peak, those meet another block whose reach
   is at least its distance. */
static uint32_t msi_stacks_reach(const msi_layout_work *w, uint32_t block, bool after) {
    return after ? w->last[block] + 1 : w->times - w->first[block];
}

static uint32_t msi_stacks_distance(const msi_layout_work *w, uint32_t block, bool after) {
    return after ? w->first[block] + 1 : w->times - w->last[block];
}

/* Stacks the blocks that stand; nothing hangs yet. */
static void msi_stacks_begin(msi_layout_work *w, const msi_stacking *how) {
    enum { LONG_SPAN = 64, LONG_SHARE = 256 };
    msi_stacks *s = &w->stacks;
    uint32_t *const trees[] = {s->reach[0], s->reach[1], s->lack[0], s->lack[1], s->rest, s->hung};
    msi_stacks_sort(w, how);
    for (uint32_t i = 0; i < sizeof trees / sizeof trees[0]; i++) {
        memset(trees[i], 0, 2 * (size_t)s->leaves * sizeof *trees[i]);
    }
    s->bytes = 0;
    s->count = 0;
    s->long_span = w->times / LONG_SHARE > LONG_SPAN ? w->times / LONG_SHARE : (uint32_t)LONG_SPAN;
    memset(s->stretch_count, 0, sizeof s->stretch_count);
    s->stretches[1] = s->stretches[2] = s->stretches[0];
    while (s->count < w->used && msi_stacks_stands(w, w->order[s->count], how)) {
        const uint32_t block = w->order[s->count];
        for (uint32_t side = 0; side < 2; side++) {
            const uint32_t reach = msi_stacks_reach(w, block, side == 1);
            msi_tree_raise(s->reach[side], s->leaves, s->count, reach);
            msi_tree_raise(s->lack[side], s->leaves, s->count, UINT32_MAX - reach);
        }
        w->offset[block] = s->low[s->count++] = s->bytes;
        s->bytes += w->blocks[block].bytes;
    }
    for (uint32_t t = 0; t < w->times; t++) {
        s->floor[t] = w->bound;
    }
    s->hung_at[0] = s->peak;
    s->hung_at[1] = s->peak;
    msi_stacks_measure_top(w);
}

/* Brief blocks meet few others, and so need not hang. */
enum { MSI_HUNG_SPAN = 9 };

/* The time between begin and end at which most of the rest lives, apart from what is brief. The
   floor is scratch memory until it is set. */
static uint32_t msi_stacks_fullest(msi_layout_work *w, uint32_t begin, uint32_t end) {
    uint64_t *change = w->stacks.floor, live = 0, most = 0;
    uint32_t fullest = begin;
    memset(change + begin, 0, (end - begin) * sizeof *change);
    for (uint32_t i = w->stacks.count; i < w->used; i++) {
        const uint32_t block = w->order[i];
        if (w->first[block] >= begin && w->last[block] < end &&
            msi_layout_span(w, block) >= MSI_HUNG_SPAN) {
            change[w->first[block]]++;
            change[w->last[block]]--; // wraps, and sums wrap back
        }
    }
    for (uint32_t t = begin; t < end; t++) {
        live += change[t];
        fullest = live > most ? t : fullest;
        most = msi_larger(most, live);
        change[t] = w->bound;
    }
    return fullest;
}

/* Lists the blocks between begin and end that live at a time and not only briefly, those nearest to
   the peak first. Returns how many. */
static uint32_t msi_stacks_list_hung(msi_layout_work *w, uint32_t begin, uint32_t end,
                                     uint32_t time, bool after) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < w->used; i++) {
        const uint32_t block = w->by_start[i];
        if (w->first[block] >= begin && w->last[block] < end &&
            msi_layout_lives_at(w, block, time) && msi_layout_span(w, block) >= MSI_HUNG_SPAN) {
            w->waiting[count++] = block;
            w->key[block] = w->times - w->last[block];
        }
    }
    if (!after) {
        msi_sort_indices(w->waiting, w->scratch, count, w->key);
    }
    return count;
}

/* Hangs blocks on one side of the peak: those that live when most of the rest does. One that
   would reach into the blocks that stand is left to be placed with the rest. */
static void msi_stacks_hang(msi_layout_work *w, bool after) {
    msi_stacks *s = &w->stacks;
    const uint32_t begin = after ? s->peak + 1 : 0, end = after ? w->times : s->peak;
    const uint32_t time = begin < end ? msi_stacks_fullest(w, begin, end) : begin;
    const uint32_t count = msi_stacks_list_hung(w, begin, end, time, after);
    uint64_t low = w->bound;
    s->hung_at[after] = time;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t block = w->waiting[i], edge = after ? w->first[block] : w->last[block];
        const uint64_t bytes = w->blocks[block].bytes;
        if (low >= bytes && low - bytes >= s->top[edge]) {
            low -= bytes;
            w->offset[block] = s->floor[edge] = low;
            s->hung[block] = 1;
            s->stretch_count[after]++;
        }
    }
    msi_spot *stretch = s->stretches[after] + s->stretch_count[after];
    s->stretches[2] = stretch;
    for (uint32_t i = 0; i < count; i++) { // downwards
        const uint32_t block = w->waiting[i];
        if (s->hung[block]) {
            *--stretch = msi_layout_spot(w, block, w->offset[block]);
        }
    }
    for (uint32_t t = begin + 1; t < end && after; t++) {
        s->floor[t] = msi_smaller(s->floor[t], s->floor[t - 1]);
    }
    for (uint32_t t = end; t-- > 1 && !after;) {
        s->floor[t - 1] = msi_smaller(s->floor[t - 1], s->floor[t]);
    }
}

/* Where the search for a gap is in each list of what may be in the way, all upwards. */
typedef struct msi_gap {
    uint32_t block, met, standing;
    uint32_t stretch[3];
    uint64_t low, bytes, ceiling; // the block goes to `low`, unless something is in the way there
} msi_gap;

/* Passes what hangs on one side, or the rest that lives long. */
static void msi_gap_pass_stretches(msi_layout_work *w, msi_gap *gap, uint32_t list) {
    const msi_spot *stretches = w->stacks.stretches[list];
    const uint32_t count = w->stacks.stretch_count[list], begin = gap->stretch[list];
    const uint32_t first = w->first[gap->block], last = w->last[gap->block];
    uint64_t low = gap->low;
    uint32_t i = begin;
    for (; i < count && stretches[i].low < low + gap->bytes; i++) {
        const bool meets = msi_spot_meets(&stretches[i], first, last);
        low = meets ? msi_larger(low, stretches[i].high) : low;
    }
    gap->stretch[list] = i;
    gap->low = low;
    msi_layout_spend(w, 2 * (uint64_t)(i - begin));
}

/* Passes the blocks that stand: each time, all up to one that does not live so far. */
static void msi_gap_pass_standing(msi_layout_work *w, msi_gap *gap) {
    const msi_stacks *s = &w->stacks;
    const bool after = w->first[gap->block] > s->peak;
    const uint32_t distance = msi_stacks_distance(w, gap->block, after);
    uint32_t k = gap->standing;
    while ((k = msi_tree_next(s->reach[after], s->leaves, k, s->count, distance)) < s->count &&
           s->low[k] < gap->low + gap->bytes) {
        k = msi_tree_next(s->lack[after], s->leaves, k, s->count, UINT32_MAX - distance + 1);
        gap->low = msi_larger(gap->low, k < s->count ? s->low[k] : s->bytes);
        msi_layout_spend(w, 32);
    }
    gap->standing = k;
}

/* Passes a placed block that is in the way, or adds it to the list of what is met further up, with
   its lower end. */
static void msi_gap_meet(msi_layout_work *w, msi_gap *gap, uint32_t block) {
    const uint64_t low = w->offset[block], high = low + w->blocks[block].bytes;
    if (low < gap->low + gap->bytes) {
        gap->low = msi_larger(gap->low, high);
    } else {
        w->key[gap->met] = low;
        w->scratch[gap->met++] = block;
    }
}

/* Lists the rest that lives briefly and meets the block: what was there before it and lives so
   long, and what starts while it lives. */
static void msi_gap_meet_all(msi_layout_work *w, msi_gap *gap) {
    const uint32_t first = w->first[gap->block], last = w->last[gap->block];
    const uint32_t leaves = w->stacks.leaves, before = first > 0 ? w->begun[first - 1] : 0;
    const uint32_t *tree = w->stacks.rest;
    uint32_t i = 0, steps = 0;
    while ((i = msi_tree_next(tree, leaves, i, before, first + 1)) < before) {
        msi_gap_meet(w, gap, w->by_start[i++]);
        steps++;
    }
    for (; i < w->begun[last]; i++) {
        if (tree[i + leaves] != 0) {
            msi_gap_meet(w, gap, w->by_start[i]);
        }
    }
    msi_layout_spend(w, 16 * (uint64_t)steps + 2 * (uint64_t)(i - before));
}

/* Restores the heap of what is met, lowest first, where only its item i may be out of place. */
static void msi_gap_sift(const msi_layout_work *w, const msi_gap *gap, uint32_t i) {
    const uint64_t low = w->key[i];
    const uint32_t block = w->scratch[i];
    for (uint64_t k = 2 * (uint64_t)i + 1; k < gap->met; k = 2 * k + 1) {
        k += k + 1 < gap->met && w->key[k + 1] < w->key[k];
        if (w->key[k] >= low) {
            break;
        }
        w->key[i] = w->key[k];
        w->scratch[i] = w->scratch[k];
        i = (uint32_t)k;
    }
    w->key[i] = low;
    w->scratch[i] = block;
}

/* Passes what is met. */
static void msi_gap_pass_met(msi_layout_work *w, msi_gap *gap) {
    while (gap->met > 0 && w->key[0] < gap->low + gap->bytes) {
        gap->low = msi_larger(gap->low, w->key[0] + w->blocks[w->scratch[0]].bytes);
        gap->met--;
        w->key[0] = w->key[gap->met];
        w->scratch[0] = w->scratch[gap->met];
        msi_gap_sift(w, gap, 0);
        msi_layout_spend(w, 32);
    }
}

/* Passes the stacks and the rest that lives long. */
static void msi_gap_pass(msi_layout_work *w, msi_gap *gap) {
    uint64_t low = UINT64_MAX;
    while (low != gap->low) {
        low = gap->low;
        msi_gap_pass_standing(w, gap);
        for (uint32_t list = 0; list < 3; list++) {
            msi_gap_pass_stretches(w, gap, list);
        }
        if (gap->ceiling < gap->low + gap->bytes) {
            gap->low = msi_larger(gap->low, w->bound);
            gap->ceiling = UINT64_MAX;
        }
    }
}

/* A gap for a block, to begin with. On one side of the peak, what hangs on the other is not in its
   way; and where all that hangs on its way lives at one time, the lowest of that is all to know. */
static msi_gap msi_gap_begin(const msi_layout_work *w, uint32_t block) {
    const msi_stacks *s = &w->stacks;
    const uint32_t first = w->first[block], last = w->last[block];
    const bool after = first > s->peak;
    const uint32_t time = s->hung_at[after];
    msi_gap gap = {block, 0, 0, {0, 0, 0}, 0, w->blocks[block].bytes, UINT64_MAX};
    if (msi_layout_lives_at(w, block, s->peak)) {
        return gap;
    }
    gap.stretch[!after] = s->stretch_count[!after];
    if (after ? first <= time : last >= time) {
        gap.stretch[after] = s->stretch_count[after];
        gap.ceiling = s->floor[after ? (last < time ? last : time) : (first > time ? first : time)];
        gap.ceiling = gap.ceiling < w->bound ? gap.ceiling : UINT64_MAX;
    }
    return gap;
}

/* The lowest gap for a block beside both stacks and the rest that was placed. Whatever begins below
   its upper end raises it, in whichever order. */
static uint64_t msi_stacks_lowest_gap(msi_layout_work *w, uint32_t block) {
    msi_gap gap = msi_gap_begin(w, block);
    uint64_t low = UINT64_MAX;
    msi_gap_pass(w, &gap);
    msi_gap_meet_all(w, &gap);
    for (uint32_t i = gap.met / 2; i-- > 0;) {
        msi_gap_sift(w, &gap, i);
    }
    msi_layout_spend(w, 8 * (uint64_t)gap.met);
    while (low != gap.low) {
        low = gap.low;
        msi_gap_pass_met(w, &gap);
        msi_gap_pass(w, &gap);
    }
    return low;
}

/* Places one of the rest. Few live long, but those meet many: they have a list of their own. What a
   recomputation brings back is most of the rest, and lives longer the larger the graph is, so what
   counts as long is a share of the time. */
static void msi_stacks_put(msi_layout_work *w, uint32_t block, uint64_t low) {
    msi_stacks *s = &w->stacks;
    w->offset[block] = low;
    if (msi_layout_span(w, block) < s->long_span) {
        msi_tree_raise(s->rest, s->leaves, w->rank[block], w->last[block] + 1);
        return;
    }
    const uint32_t i = msi_spots_insert(s->stretches[2], s->stretch_count[2]++,
                                        msi_layout_spot(w, block, low), false);
    msi_layout_spend(w, s->stretch_count[2] - i);
}

/* Training keeps most memory between forward and backward. The blocks that live at the peak stand
   on each other and fill the bound without a gap. On either side they become fewer, and what
   becomes more there, such as gradients, hangs from the bound. The rest, mostly brief, is placed by
   first-fit between the two. Stops after so many operations of its own; returns how many
   are left. */
static uint64_t msi_layout_from_peak(msi_layout_work *w, const msi_stacking *how, uint64_t limit) {
    msi_stacks *s = &w->stacks;
    const uint64_t effort = w->effort;
    uint64_t height = w->bound;
    w->effort = limit;
    msi_stacks_begin(w, how);
    if (how->hang) {
        msi_stacks_hang(w, false);
        s->stretches[1] = s->stretches[2];
        msi_stacks_hang(w, true);
    }
    for (uint32_t i = s->count; i < w->used && height < w->height && w->effort > 0; i++) {
        const uint32_t block = w->order[i];
        if (!s->hung[block]) {
            const uint64_t low = msi_stacks_lowest_gap(w, block);
            height = msi_larger(height, low + w->blocks[block].bytes);
            msi_stacks_put(w, block, low);
        }
    }
    limit = w->effort;
    w->effort = effort;
    if (limit > 0) {
        msi_layout_keep_best(w, height);
    }
    return limit;
}

/* The lowest gap among the spots that holds a block. */
static uint64_t msi_layout_lowest_gap(msi_layout_work *w, uint32_t block) {
    uint64_t low = 0, bytes = w->blocks[block].bytes;
    uint32_t k = 0;
    for (; k < w->spot_count && w->by_low[k].low < low + bytes; k++) {
        bool meets = msi_spot_meets(&w->by_low[k], w->first[block], w->last[block]);
        low = meets ? msi_larger(low, w->by_low[k].high) : low;
    }
    msi_layout_spend(w, (uint64_t)w->spot_count + k + 1);
    return low;
}

static void msi_layout_put(msi_layout_work *w, uint32_t block, uint64_t low) {
    w->offset[block] = low;
    msi_spots_insert(w->by_low, w->spot_count++, msi_layout_spot(w, block, low), false);
}

static void msi_layout_put_in_both(msi_layout_work *w, uint32_t block, uint64_t low) {
    msi_spots_insert(w->by_high, w->spot_count, msi_layout_spot(w, block, low), true);
    msi_layout_put(w, block, low);
}

/* First-fit: places each block into the lowest gap, in the given order. Gives up once the layout
   cannot beat the best one; true if it does. */
static bool msi_layout_first_fit(msi_layout_work *w) {
    uint64_t height = 0;
    w->spot_count = 0;
    for (uint32_t i = 0; i < w->used; i++) {
        uint32_t block = w->order[i];
        uint64_t low = msi_layout_lowest_gap(w, block);
        height = msi_larger(height, low + w->blocks[block].bytes);
        if (height >= w->height || w->effort == 0) {
            return false;
        }
        msi_layout_put(w, block, low);
    }
    msi_layout_keep_best(w, height);
    return true;
}

/* Places blocks as an allocator would: in the order of their starts, each into the lowest gap among
   those that are live then. For long programs in which most live ranges are short. */
static void msi_layout_fit_in_turn(msi_layout_work *w) {
    const uint64_t least = w->effort - w->effort / 4;
    uint64_t height = 0;
    uint32_t i = 0;
    w->spot_count = 0;
    for (; i < w->used && height < w->height && w->effort > least; i++) {
        const uint32_t block = w->order[i];
        uint32_t kept = 0;
        for (uint32_t k = 0; k < w->spot_count; k++) {
            if (w->by_low[k].last >= w->first[block]) {
                w->by_low[kept++] = w->by_low[k];
            }
        }
        msi_layout_spend(w, w->spot_count);
        w->spot_count = kept;
        const uint64_t low = msi_layout_lowest_gap(w, block);
        height = msi_larger(height, low + w->blocks[block].bytes);
        msi_layout_put(w, block, low);
    }
    if (i == w->used) {
        msi_layout_keep_best(w, height);
    }
}

/* The highest gap below the bound that holds a block; false: there is none. */
static bool msi_layout_highest_gap(msi_layout_work *w, uint32_t block, uint64_t *low) {
    const uint64_t bytes = w->blocks[block].bytes;
    uint64_t high = w->bound;
    uint32_t k = w->spot_count;
    for (; k > 0 && high >= bytes && w->by_high[k - 1].high > high - bytes; k--) {
        const msi_spot *spot = &w->by_high[k - 1];
        const bool meets = msi_spot_meets(spot, w->first[block], w->last[block]);
        high = meets && spot->low < high ? spot->low : high;
    }
    msi_layout_spend(w, 2 * (uint64_t)w->spot_count - k + 1);
    *low = high >= bytes ? high - bytes : 0;
    return high >= bytes;
}

/* First-fit from both ends, for programs whose values lie on each other like a stack: blocks with
   short live ranges are placed from above. */
static void msi_layout_fit_both(msi_layout_work *w) {
    uint64_t height = 0, low = 0;
    w->spot_count = 0;
    for (uint32_t i = 0; i < w->used && height < w->height && w->effort > 0; i++) {
        const uint32_t block = w->order[i];
        const bool brief = w->last[block] - w->first[block] < 3;
        if (!brief || !msi_layout_highest_gap(w, block, &low)) {
            low = msi_layout_lowest_gap(w, block);
        }
        height = msi_larger(height, low + w->blocks[block].bytes);
        msi_layout_put_in_both(w, block, low);
    }
    if (w->spot_count == w->used) {
        msi_layout_keep_best(w, height);
    }
}

/* xorshift64*: the same numbers in every run. */
static uint32_t msi_layout_random(msi_layout_work *w, uint32_t below) {
    MEMSCALE_ASSERT(below > 0);
    below += below == 0;
    w->random ^= w->random >> 12;
    w->random ^= w->random << 25;
    w->random ^= w->random >> 27;
    return (uint32_t)(w->random * UINT64_C(0x2545F4914F6CDD1D) >> 32) % below;
}

/* Removes the blocks whose rank in the order is `rank` or higher from the layout. */
static void msi_layout_take_up(msi_layout_work *w, uint32_t rank) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < w->spot_count; i++) {
        if (w->ranks[w->by_low[i].block] < rank) {
            w->by_low[kept++] = w->by_low[i];
        }
    }
    msi_layout_spend(w, (uint64_t)w->spot_count + (w->used - rank));
    w->spot_count = kept;
}

/* Notes a better layout: all blocks have places below the best height. Returns where to go on in
   the order: at the first block that has to come lower. */
static uint32_t msi_layout_note_better(msi_layout_work *w) {
    uint64_t height = 0;
    uint32_t next = 0;
    for (uint32_t i = 0; i < w->spot_count; i++) {
        height = msi_larger(height, w->by_low[i].high);
    }
    msi_layout_keep_best(w, height);
    while (w->offset[w->order[next]] + w->blocks[w->order[next]].bytes < height) {
        next++;
    }
    return next;
}

/* Squeaky wheel optimization (Joslin and Clements 1999): first-fit, where a block that finds no gap
   below the best height moves forward in the order, and the blocks that it overtakes are placed
   again. It moves halfway to the front, or by a random distance, more often a short one. */
static void msi_layout_mend(msi_layout_work *w, uint64_t effort, bool halfway) {
    uint64_t stop = w->effort - msi_smaller(w->effort, effort);
    uint32_t next = 0;
    w->spot_count = 0;
    for (uint32_t i = 0; i < w->used; i++) {
        w->ranks[w->order[i]] = i;
    }
    while (w->effort > stop && w->height > w->enough) {
        uint32_t block = w->order[next];
        uint64_t low = msi_layout_lowest_gap(w, block);
        if (low + w->blocks[block].bytes < w->height) {
            msi_layout_put(w, block, low);
            if (++next == w->used) {
                next = msi_layout_note_better(w);
                msi_layout_take_up(w, next);
            }
            continue;
        }
        uint32_t back =
            halfway ? next - next / 2 : 1 + msi_layout_random(w, 1 + msi_layout_random(w, next));
        uint32_t to = next - back;
        memmove(w->order + to + 1, w->order + to, back * sizeof *w->order);
        w->order[to] = block;
        for (uint32_t i = to; i <= next; i++) {
            w->ranks[w->order[i]] = i;
        }
        next = to;
        msi_layout_take_up(w, next);
    }
}

/* Removes the spots that overlap `spot` or reach beyond the target from one of the two lists, and
   writes their blocks to `waiting`, if that is not NULL. Returns how many spots stay. */
static uint32_t msi_spots_remove(msi_spot *spots, uint32_t count, const msi_spot *spot,
                                 uint64_t target, uint32_t *waiting) {
    uint32_t kept = 0, gone = 0;
    for (uint32_t i = 0; i < count; i++) {
        const msi_spot *s = &spots[i];
        bool hit = msi_spot_meets(s, spot->first, spot->last) & (s->low < spot->high) &
                   (s->high > spot->low);
        if (!(hit | (s->high > target))) {
            spots[kept++] = *s;
        } else if (waiting) {
            waiting[gone++] = s->block;
        }
    }
    return kept;
}

static void msi_layout_eject(msi_layout_work *w, const msi_spot *spot, uint64_t target) {
    uint32_t kept =
        msi_spots_remove(w->by_low, w->spot_count, spot, target, w->waiting + w->waiting_count);
    msi_spots_remove(w->by_high, w->spot_count, spot, target, NULL);
    w->waiting_count += w->spot_count - kept;
    w->spot_count = kept;
}

/* Finds where a block does least harm below the target: on the ground, or on another block. Of the
   free places it is the lowest, of equally bad ones a random one. Harm is the penalty of the blocks
   that overlap it there: of all that begin below its high end, less all that end at or below its
   low end. Both sums only grow as the place moves up. */
static uint64_t msi_layout_least_harm(msi_layout_work *w, uint32_t block, uint64_t target,
                                      uint64_t *least) {
    uint64_t bytes = w->blocks[block].bytes, low = 0, begun = 0, ended = 0, best = 0;
    uint32_t first = w->first[block], last = w->last[block], ties = 0, k = 0, i = 0, next = 0;
    bool candidate = true; // the ground
    *least = UINT64_MAX;
    while (low + bytes <= target) {
        for (; k < w->spot_count && w->by_low[k].low < low + bytes; k++) {
            begun += msi_spot_meets(&w->by_low[k], first, last) * (uint64_t)w->by_low[k].penalty;
        }
        for (; i < w->spot_count && w->by_high[i].high <= low; i++) {
            ended += msi_spot_meets(&w->by_high[i], first, last) * (uint64_t)w->by_high[i].penalty;
        }
        uint64_t harm = begun - ended;
        if (candidate && harm <= *least) {
            ties = harm < *least ? 1 : ties + 1;
            if (msi_layout_random(w, ties) == 0) {
                best = low;
            }
            *least = harm;
        }
        if (*least == 0 || next == w->spot_count) {
            break;
        }
        low = w->by_high[next].high;
        candidate = msi_spot_meets(&w->by_high[next], first, last);
        ++next;
    }
    msi_layout_spend(w, 2 * ((uint64_t)k + i));
    return best;
}

/* Goes back to the best layout, as it was or upside down. */
static void msi_layout_restore(msi_layout_work *w, bool upside_down) {
    for (uint32_t by_high = 0; by_high < 2; ++by_high) {
        msi_spot *spots = by_high ? w->by_high : w->by_low;
        for (uint32_t i = 0; i < w->used; i++) {
            uint32_t block = w->order[i];
            uint64_t low = w->best[block], bytes = w->blocks[block].bytes;
            w->offset[block] = upside_down ? w->height - low - bytes : low;
            w->key[block] = w->offset[block] + (by_high ? bytes : 0);
        }
        msi_sort_indices(w->order, w->scratch, w->used, w->key);
        for (uint32_t i = 0; i < w->used; i++) {
            spots[i] = msi_layout_spot(w, w->order[i], w->offset[w->order[i]]);
        }
    }
    w->spot_count = w->used;
    w->waiting_count = 0;
}

/* Halves the penalties, so that what was hard to place long ago counts less. */
static void msi_layout_forget(msi_layout_work *w) {
    for (uint32_t i = 0; i < w->used; i++) {
        w->penalty[w->order[i]] = (w->penalty[w->order[i]] + 1) / 2;
    }
    for (uint32_t i = 0; i < w->spot_count; i++) {
        w->by_low[i].penalty = w->penalty[w->by_low[i].block];
        w->by_high[i].penalty = w->penalty[w->by_high[i].block];
    }
    msi_layout_spend(w, 4 * (uint64_t)w->used);
}

/* One link of a chain: places a waiting block, and ejects the blocks that it overlaps. */
static void msi_layout_place_waiting(msi_layout_work *w, uint64_t target) {
    uint32_t pick = msi_layout_random(w, w->waiting_count), block = w->waiting[pick];
    uint64_t harm, low = msi_layout_least_harm(w, block, target, &harm);
    w->waiting[pick] = w->waiting[--w->waiting_count];
    w->penalty[block] += harm > 0;
    if (harm) {
        const msi_spot spot = msi_layout_spot(w, block, low);
        msi_layout_eject(w, &spot, target);
    }
    msi_layout_put_in_both(w, block, low);
}

/* Ejection chains (Glover 1996), guided by how often a block found no free place (as in Nagata and
   Braysy 2009): below a target that is less than the best height, each block that sticks out is
   placed where it does least harm, and the blocks that it overlaps are placed again. The penalty
   of blocks that are hard to place grows until all fit. */
static void msi_layout_press(msi_layout_work *w) {
    enum { PATIENCE = 4 };
    const msi_spot nothing = {0, 0, 0, 0, 0, 0};
    uint64_t target = w->height, round = PATIENCE * (uint64_t)w->used, rounds = 0;
    msi_layout_restore(w, false);
    for (uint64_t link = 1; msi_layout_spend(w, 4 * (uint64_t)w->spot_count); ++link) {
        if (w->waiting_count == 0) {
            uint64_t height = w->by_high[w->spot_count - 1].high;
            rounds = height < w->height ? 0 : rounds;
            msi_layout_keep_best(w, height);
            if (w->height <= w->enough) {
                return;
            }
            target = w->height - (w->height - w->bound + 15) / 16;
            msi_layout_eject(w, &nothing, target);
        }
        msi_layout_place_waiting(w, target);
        if (link % round == 0) {
            msi_layout_forget(w);
            if (++rounds % PATIENCE == 0) { // stuck: start again from the best layout, turned over
                msi_layout_restore(w, rounds / PATIENCE % 2 == 1);
            }
        }
    }
}

static bool msi_layout_goes_on(const msi_layout_work *w) {
    return w->height > w->enough && w->effort > 0;
}

/* First-fit in several orders, then two of these orders mended: the best one, and that by load. */
static void msi_layout_fill_gaps(msi_layout_work *w) {
    static const struct {
        msi_layout_order order;
        uint64_t width;
    } orders[] = {{MSI_ORDER_BYTES_CLASS, 4}, {MSI_ORDER_SPAN_CLASS, 4},
                  {MSI_ORDER_BYTES_CLASS, 8}, {MSI_ORDER_SPAN_CLASS, 8},
                  {MSI_ORDER_BYTES_CLASS, 2}, {MSI_ORDER_SPAN_CLASS, 2},
                  {MSI_ORDER_LOAD, 1}};
    memcpy(w->best_order, w->order, w->used * sizeof *w->order);
    if (msi_layout_goes_on(w)) {
        msi_layout_sort(w, MSI_ORDER_START, 1);
        msi_layout_fit_in_turn(w);
    }
    if (msi_layout_goes_on(w)) {
        msi_layout_sort(w, MSI_ORDER_LOAD, 1);
        msi_layout_fit_both(w);
    }
    for (uint32_t i = 0; i < sizeof orders / sizeof orders[0] && msi_layout_goes_on(w); i++) {
        msi_layout_sort(w, orders[i].order, orders[i].width);
        if (msi_layout_first_fit(w)) {
            memcpy(w->best_order, w->order, w->used * sizeof *w->order);
        }
    }
    const uint64_t effort = w->effort, pass = (uint64_t)w->used * w->used; // of first-fit, at most
    memcpy(w->order, w->best_order, w->used * sizeof *w->order);
    msi_layout_mend(w, msi_smaller(effort / 4, 8 * pass), true);
    if (msi_layout_goes_on(w)) {
        msi_layout_sort(w, MSI_ORDER_LOAD, 1);
        msi_layout_mend(w, msi_smaller(effort / 2, 32 * pass), false);
    }
}

/* Skylines, then first-fit, mended orders and ejection chains while there is effort left. */
static void msi_layout_search_orders(msi_layout_work *w) {
    static const struct {
        msi_layout_order order;
        bool two_sided;
    } skylines[] = {{MSI_ORDER_LOAD, true},  {MSI_ORDER_SPAN, true},   {MSI_ORDER_LOAD, false},
                    {MSI_ORDER_SPAN, false}, {MSI_ORDER_BYTES, false}, {MSI_ORDER_START, true}};
    for (uint32_t i = 0; i < sizeof skylines / sizeof skylines[0] && w->height > w->enough; i++) {
        if (!msi_layout_spend(w, 100 * (uint64_t)w->used) && i) {
            return;
        }
        msi_layout_sort(w, skylines[i].order, 1);
        msi_layout_place_on_skylines(w, skylines[i].two_sided);
    }
    msi_layout_fill_gaps(w);
    if (w->height > w->enough) {
        msi_layout_press(w);
    }
}

/* From the peak in several ways, the first of which takes near-linear time for what training makes;
   the others share a limit. Returns whether that will do: of many blocks, a layout that is a little
   above the bound. */
static bool msi_layout_search_from_peak(msi_layout_work *w) {
    static const msi_stacking ways[] = {{0, true, MSI_ORDER_BYTES},
                                        {64, false, MSI_ORDER_BYTES},
                                        {0, false, MSI_ORDER_BYTES},
                                        {0, true, MSI_ORDER_LOAD}};
    const bool many = w->used > MSI_LAYOUT_MANY;
    const uint64_t share = w->used > 16u * MSI_LAYOUT_MANY ? 128 : 1024;
    const uint64_t close = many ? w->bound + w->bound / share : w->bound;
    const uint64_t enough = msi_larger(w->enough, close);
    uint64_t limit = 50000000 + 1000 * (uint64_t)w->used;
    (void)msi_layout_from_peak(w, &ways[0], 20 * limit);
    for (uint32_t i = 1; i < sizeof ways / sizeof ways[0] && w->height > enough; i++) {
        limit = msi_layout_from_peak(w, &ways[i], limit);
    }
    return w->height <= enough || (many && w->height <= w->bound + w->bound / 64);
}

/* The orders are searched as if nothing were known, since what is good to start with does not
   follow from what is good from the peak. */
static void msi_layout_search(msi_layout_work *w) {
    if (w->used == 0 || msi_layout_search_from_peak(w)) {
        return;
    }
    const uint64_t height = w->height;
    for (uint32_t i = 0; i < w->used; i++) {
        w->from_peak[w->order[i]] = w->best[w->order[i]];
    }
    w->height = UINT64_MAX;
    memcpy(w->order, w->by_start, w->used * sizeof *w->order);
    msi_layout_search_orders(w);
    if (w->height > height) {
        w->height = height;
        for (uint32_t i = 0; i < w->used; i++) {
            w->best[w->order[i]] = w->from_peak[w->order[i]];
        }
    }
}

/* Divides the memory of four lists of nodes among the arrays of the stacks. */
static void msi_stacks_bind(msi_stacks *s, uint64_t *memory, uint64_t nodes) {
    uint32_t **trees[] = {&s->reach[0], &s->reach[1], &s->lack[0], &s->lack[1], &s->hung, &s->rest};
    for (uint32_t i = 0; i < sizeof trees / sizeof trees[0]; i++) {
        *trees[i] = (uint32_t *)(void *)memory + i * nodes; // two of these are as large as one list
    }
    s->low = memory + 3 * nodes;
    s->top = s->low + nodes / 2;
    s->leaves = (uint32_t)(nodes / 2);
}

/* Divides memory among the arrays of w, unless it is NULL. Returns the bytes that this takes. Spots
   and stacks share the memory of the skylines, which are at least as large. */
static uint64_t msi_layout_bind(msi_layout_work *w, uint64_t *memory) {
    uint64_t **by_node[] = {&w->bottom.highest, &w->bottom.applied, &w->top.highest,
                            &w->top.applied};
    uint64_t **by_block[] = {&w->key,       &w->offset,       &w->best,
                             &w->from_peak, &w->stacks.floor, &w->load};
    uint32_t **numbers[] = {&w->first,  &w->last, &w->order,    &w->scratch, &w->penalty,
                            &w->starts, &w->rank, &w->by_start, &w->begun};
    const uint64_t count = w->count, number_count = sizeof numbers / sizeof numbers[0];
    uint64_t nodes = 2;
    while (nodes < 2 * count) {
        nodes *= 2;
    }
    const uint64_t lists = 4 * nodes + 6 * count + 1; // load has one more
    const uint64_t words = lists + count * sizeof(msi_spot) / sizeof(uint64_t);
    for (uint32_t i = 0; memory && i < 4; i++) {
        *by_node[i] = memory + i * nodes;
    }
    for (uint32_t i = 0; memory && i < 6; i++) {
        *by_block[i] = memory + 4 * nodes + i * count;
    }
    for (uint32_t i = 0; memory && i < number_count; i++) {
        *numbers[i] = (uint32_t *)(void *)(memory + words) + i * count;
    }
    if (memory) {
        msi_stacks_bind(&w->stacks, memory, nodes);
        w->stacks.stretches[0] = (msi_spot *)(void *)(memory + lists);
        w->by_low = (msi_spot *)(void *)memory;
        w->by_high = w->by_low + count;
        w->best_order = w->ranks = w->waiting = w->starts;
    }
    return words * sizeof(uint64_t) + number_count * count * sizeof(uint32_t);
}

/* Allocates the memory of w, and finds the lower bound. */
static ms_result msi_layout_begin(msi_layout_work *w, const ms_allocator *allocator,
                                  const msi_block *blocks, uint32_t count, uint64_t **memory) {
    memset(w, 0, sizeof *w);
    w->blocks = blocks;
    w->count = count;
    *memory = (uint64_t *)msi_alloc(allocator, msi_layout_bind(w, NULL));
    if (!*memory) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    msi_layout_bind(w, *memory);
    msi_layout_compress_time(w);
    msi_layout_measure_load(w);
    w->height = UINT64_MAX;
    w->random = UINT64_C(0x9E3779B97F4A7C15);
    w->bottom.leaves = 1;
    while (w->bottom.leaves < w->times) {
        w->bottom.leaves *= 2;
    }
    w->top.leaves = w->bottom.leaves;
    return MS_RESULT_OK;
}

/* Gives every block an offset, so that blocks whose live ranges meet do not overlap, and stores the
   height of the whole; the search for a smaller one ends at `enough`. `effort` limits the
   elementary operations, of about a nanosecond each, that follow the layouts from the peak, which
   have a limit of their own. The same input gives the same layout. The sum of all bytes must be
   below 2^64. Errors: OUT_OF_MEMORY. */
static ms_result msi_layout_within(const ms_allocator *allocator, msi_block *blocks, uint32_t count,
                                   uint64_t effort, uint64_t enough, uint64_t *height) {
    msi_layout_work work;
    uint64_t *memory;
    ms_result result = msi_layout_begin(&work, allocator, blocks, count, &memory);
    if (result != MS_RESULT_OK) {
        return result;
    }
    work.effort = effort;
    work.enough = msi_larger(work.bound, enough);
    msi_layout_search(&work);
    *height = work.used ? work.height : 0;
    for (uint32_t i = 0; i < count; i++) {
        blocks[i].offset = blocks[i].bytes ? work.best[i] : 0;
    }
    msi_release(allocator, memory, msi_layout_bind(&work, NULL));
    return MS_RESULT_OK;
}

/* The smallest height that the effort finds. */
static ms_result msi_layout(const ms_allocator *allocator, msi_block *blocks, uint32_t count,
                            uint64_t effort, uint64_t *height) {
    return msi_layout_within(allocator, blocks, count, effort, 0, height);
}

/* For debug mode, tests and benchmarks: the largest sum of live bytes at any instant, and whether
   no two blocks share a byte at an instant. From the ground upwards, no block may begin below the
   skyline of those before it. Errors: OUT_OF_MEMORY. */
static ms_result msi_layout_check(const ms_allocator *allocator, const msi_block *blocks,
                                  uint32_t count, bool *valid, uint64_t *bound) {
    msi_layout_work work;
    uint64_t *memory;
    const ms_result result = msi_layout_begin(&work, allocator, blocks, count, &memory);
    if (result != MS_RESULT_OK) {
        return result;
    }
    *valid = true;
    *bound = work.bound;
    for (uint32_t i = 0; i < work.used; i++) {
        work.key[work.order[i]] = blocks[work.order[i]].offset;
    }
    msi_sort_indices(work.order, work.scratch, work.used, work.key);
    msi_skyline_clear(&work.bottom);
    for (uint32_t i = 0; i < work.used; i++) {
        const uint32_t k = work.order[i], first = work.first[k], last = work.last[k];
        *valid &= msi_skyline_max(&work.bottom, first, last) <= blocks[k].offset;
        msi_skyline_raise(&work.bottom, first, last, blocks[k].offset + blocks[k].bytes);
    }
    msi_release(allocator, memory, msi_layout_bind(&work, NULL));
    return MS_RESULT_OK;
}

// ------------------------------------------------------------------------------------------------
// >>simulate  what a program needs: live bytes at every instruction, and its peak; and time, over
//            the streams of the device

/* The last instruction at which a live range counts: if it is aliased, the one before its last. */
static uint32_t msi_counts_to(const msi_range *range) {
    return range->aliased ? range->last - 1 : range->last;
}

static bool msi_is_activation(ms_category category) {
    return category == MS_CATEGORY_ACTIVATION || category == MS_CATEGORY_ACTIVATION_GRADIENT ||
           category == MS_CATEGORY_SAVED;
}

/* Sums the sizes of the live ranges, of all or of activations only, into live_bytes; returns the
   first instruction with the largest sum. Differences first, then their running sum: unsigned, so
   a difference that wraps is undone by the sum. */
static uint32_t msi_sum_live(msi_program *p, uint32_t resident_count, bool activations_only) {
    uint64_t *live = p->live_bytes.items;
    const uint32_t count = p->instructions.count;
    memset(live, 0, (count + 1) * sizeof *live);
    for (uint32_t i = resident_count; i < p->ranges.count; i++) {
        const msi_range *range = &p->ranges.items[i];
        if (!activations_only || msi_is_activation((ms_category)range->category)) {
            live[range->first] += msi_align(range->bytes);
            live[msi_counts_to(range) + 1] -= msi_align(range->bytes);
        }
    }
    uint32_t peak = 0;
    for (uint32_t i = 1; i < count; i++) {
        live[i] += live[i - 1];
        peak = live[i] > live[peak] ? i : peak;
    }
    return peak;
}

/* Bytes that an instruction of the library itself moves. An update reads the param, its gradient
   and its state, and writes all of these except the gradient. */
static double msi_moved_bytes(const msi_program *p, const msi_instruction *i) {
    const msi_operand *operands = p->operands.items + i->operand_first;
    const double bytes = (double)p->ranges.items[operands[0].range].bytes;
    const uint32_t states = i->op == MSI_OP_UPDATE ? i->operand_count - 3u : 0;
    return bytes * (i->op == MSI_OP_UPDATE ? 3.0 + 2.0 * states : msi_ops[i->op].passes);
}

/* Whether an instruction does nothing, such as a copy whose target aliases its source. */
static bool msi_is_free(const msi_program *p, const msi_instruction *i) {
    return i->op == MSI_OP_NOTHING ||
           (i->op == MSI_OP_COPY &&
            p->ranges.items[p->operands.items[i->operand_first].range].alias_of != MSI_NONE);
}

static double msi_bytes_us(const msi_costs *c, msi_cost cost, double bytes) {
    const double measured = c->bytes_per_us[cost];
    return c->hardware.launch_us +
           bytes / (measured > 0.0 ? measured : c->hardware.memory_gb_per_s * 1e3);
}

static double msi_copy_us(const msi_costs *c, ms_stream_kind stream, uint64_t bytes) {
    const double gb_per_s = stream == MS_STREAM_TO_DEVICE ? c->hardware.to_device_gb_per_s
                                                          : c->hardware.to_host_gb_per_s;
    return c->hardware.launch_us + (double)bytes / (gb_per_s * 1e3);
}

/* A discrete-event simulation of a program. What is enqueued on a stream runs in that order, so
   that each instruction starts when its stream is free and what it waits for is done, and one pass
   over the program finds all starts. */
typedef struct msi_clock {
    const msi_graph *graph;
    const msi_costs *costs;
    const msi_program *program;
    const msi_store *store;
    double free_us[MS_STREAM_COUNT]; // when all that is enqueued there is done
    double stall_us;
} msi_clock;

/* The stream that an op runs on: without copies of its own, a device has one. */
static ms_stream_kind msi_stream_of(const msi_costs *c, msi_op op) {
    return c->has_copies ? msi_ops[op].stream : MS_STREAM_COMPUTE;
}

static double msi_duration_us(const msi_clock *c, const msi_instruction *i) {
    const msi_op op = (msi_op)i->op;
    const msi_cost cost = msi_ops[op].cost;
    const bool layer = msi_calls_layer(op);
    const double bytes = layer ? 0.0 : msi_moved_bytes(c->program, i);
    const ms_layer_time *time = layer ? &c->graph->layers.items[i->target].time : NULL;
    switch (cost) {
    case MSI_COST_NONE:
        return 0.0;
    case MSI_COST_FORWARD:
        return time->forward_us;
    case MSI_COST_BACKWARD:
        return time->backward_us;
    case MSI_COST_RECOMPUTE:
        return time->recompute_us;
    case MSI_COST_LINK:
        return c->costs->has_copies ? msi_copy_us(c->costs, msi_ops[op].stream, (uint64_t)bytes)
                                    : msi_bytes_us(c->costs, MSI_COST_COPY, 2.0 * bytes);
    case MSI_COST_FILL:
    case MSI_COST_COPY:
    case MSI_COST_ADD:
    case MSI_COST_SUM:
    case MSI_COST_UPDATE:
        return msi_is_free(c->program, i) ? 0.0 : msi_bytes_us(c->costs, cost, bytes);
    case MSI_COST_COUNT:
        break;
    }
    return 0.0;
}

/* Rounds to multiples of 2^-24 us, so that sums of up to minutes are exact: two programs with the
   same instructions in another order take the same time to the bit. */
static double msi_round_us(double us) {
    const double ticks = 16777216.0;
    return us < 1e9 ? (double)(uint64_t)(us * ticks + 0.5) / ticks : us;
}

/* Enqueues work that starts no sooner than `ready_us`. Returns its start. */
static double msi_enqueue(msi_clock *c, ms_stream_kind stream, double ready_us, double us) {
    const double free_us = c->free_us[stream];
    const double start_us = ready_us > free_us ? ready_us : free_us;
    c->stall_us += stream == MS_STREAM_COMPUTE ? start_us - free_us : 0.0;
    c->free_us[stream] = start_us + msi_round_us(us);
    return start_us;
}

/* How long the copy of an input takes; 0 for a resident that is not copied in. */
static double msi_staging_us(const msi_graph *g, const msi_costs *c, const msi_resident *resident) {
    const msi_tensor *t = &g->tensors.items[resident->tensor];
    const bool staged =
        c->has_copies && !resident->on_host && !resident->borrowed && t->kind == MSI_KIND_INPUT;
    return staged ? msi_copy_us(c, MS_STREAM_TO_DEVICE, t->bytes) : 0.0;
}

/* The beginning of a step: each input is copied in full and, as msi_write does it, all computing
   waits for these copies. */
static void msi_clock_start(msi_clock *c, const msi_graph *g, const msi_costs *costs,
                            const msi_store *store, const msi_program *p) {
    memset(c, 0, sizeof *c);
    c->graph = g;
    c->costs = costs;
    c->program = p;
    c->store = store;
    for (uint32_t k = 0; k < store->residents.count && costs->has_copies; k++) {
        msi_enqueue(c, MS_STREAM_TO_DEVICE, 0.0,
                    msi_staging_us(g, costs, &store->residents.items[k]));
    }
    msi_enqueue(c, MS_STREAM_COMPUTE, c->free_us[MS_STREAM_TO_DEVICE], 0.0);
}

/* The losses are summed after the last forward, and the verdict is copied out during backward.
   (With clipping a step copies it after CLIP, which is not simulated.) */
static void msi_clock_judge(msi_clock *c) {
    const double bytes = (double)c->program->ranges.items[c->program->loss].bytes;
    msi_enqueue(c, MS_STREAM_COMPUTE, 0.0, msi_bytes_us(c->costs, MSI_COST_SUM, bytes));
    if (c->costs->has_copies) {
        msi_enqueue(c, MS_STREAM_TO_HOST, c->free_us[MS_STREAM_COMPUTE],
                    msi_copy_us(c->costs, MS_STREAM_TO_HOST, MSI_STATES_BYTES));
    }
}

/* When the other streams are ready for an instruction to start: a copy follows what is computed, a
   wait the last copy in its direction. */
static double msi_ready_us(const msi_clock *c, const msi_instruction *i) {
    const uint32_t target = c->program->operands.items[i->operand_first].range;
    if (msi_stream_of(c->costs, (msi_op)i->op) != MS_STREAM_COMPUTE) {
        return c->free_us[MS_STREAM_COMPUTE];
    }
    return i->op != MSI_OP_WAIT               ? 0.0
           : msi_is_on_host(c->store, target) ? c->free_us[MS_STREAM_TO_HOST]
                                              : c->free_us[MS_STREAM_TO_DEVICE];
}

/* Runs the next instruction of the program, which takes `us`. Returns its start. */
static double msi_clock_run(msi_clock *c, uint32_t now, double us) {
    const msi_instruction *i = &c->program->instructions.items[now];
    const ms_stream_kind stream = msi_stream_of(c->costs, (msi_op)i->op);
    const double start_us = msi_enqueue(c, stream, msi_ready_us(c, i), us);
    if (now + 1 == c->program->forward_end) {
        msi_clock_judge(c);
    }
    return start_us;
}

/* Simulates a step: fills in the times of the program. */
static void msi_time_program(const msi_graph *g, const msi_costs *costs, const msi_store *store,
                             msi_program *p) {
    msi_clock c;
    msi_clock_start(&c, g, costs, store, p);
    p->recompute_us = 0.0;
    for (uint32_t now = 0; now < p->instructions.count; now++) {
        const msi_instruction *i = &p->instructions.items[now];
        const double us = msi_duration_us(&c, i);
        msi_clock_run(&c, now, us);
        p->recompute_us += msi_is_again((msi_op)i->op) ? us : 0.0;
    }
    p->step_us = 0.0;
    for (int stream = 0; stream < MS_STREAM_COUNT; stream++) {
        p->step_us = c.free_us[stream] > p->step_us ? c.free_us[stream] : p->step_us;
    }
    p->stall_us = c.stall_us;
}

/* Fills in live bytes and times of a program; without memory for that, sets p->out_of_memory. */
static void msi_simulate(const msi_graph *g, const msi_costs *costs, const msi_store *store,
                         const ms_allocator *allocator, msi_program *p) {
    const uint32_t residents = store->residents.count;
    if (p->out_of_memory ||
        !MSI_RESERVE(uint64_t, allocator, p->live_bytes, p->instructions.count + 1ull)) {
        p->out_of_memory = true;
        return;
    }
    p->live_bytes.count = p->instructions.count;
    p->activation_peak_bytes = p->live_bytes.items[msi_sum_live(p, residents, true)];
    p->peak = msi_sum_live(p, residents, false);
    p->peak_bytes = p->live_bytes.items[p->peak];
    msi_time_program(g, costs, store, p);
}

/* Whether some param is updated inside backward. */
static bool msi_updates_inside(const msi_program *p) {
    for (uint32_t i = p->forward_end; i < p->backward_end; i++) {
        if (p->instructions.items[i].op == MSI_OP_UPDATE) {
            return true;
        }
    }
    return false;
}

// ------------------------------------------------------------------------------------------------
// >>score  bytes and time of the program that decisions lead to: the one way to judge them

/* The first thing for which the planner had no memory. */
typedef struct msi_shortage {
    const char *what; // NULL: there was enough
    uint64_t bytes;
} msi_shortage;

/* Judges decisions by the bytes and the time of the program that they lead to. */
typedef struct msi_scorer {
    const msi_graph *graph;
    const msi_costs *costs;
    const msi_store *store;
    const ms_allocator *allocator;
    bool checks_layouts;     // debug mode
    msi_lowering *lowering;  // its scratch memory
    msi_program *program;    // of the decisions that were scored last
    const msi_program *eval; // the eval program, which is the same for all decisions
    msi_shortage *shortage;  // sticky: once it is set, nothing is scored and nothing fits
} msi_scorer;

typedef struct msi_score {
    uint64_t live_bytes; // largest sum of live bytes in training, residents included
    uint64_t bytes;      // the arena: UINT64_MAX before it is laid out
    double us;           // a step, simulated
} msi_score;

static const uint64_t MSI_NO_BUDGET = UINT64_MAX;

/* Operations for a layout: a number to start with and more for each live range, up to a limit. */
static const uint64_t MSI_LAYOUT_EFFORT = 40u * 1000u * 1000u;
static const uint64_t MSI_LAYOUT_EFFORT_LEAST = 1000u * 1000u;
static const uint64_t MSI_LAYOUT_EFFORT_EACH = 3000;

/* Notes a shortage. False, for callers to return. */
static bool msi_run_short(const msi_scorer *s, const char *what, uint64_t bytes) {
    if (!s->shortage->what) {
        s->shortage->what = what;
        s->shortage->bytes = bytes;
    }
    return false;
}

static bool msi_is_short(const msi_scorer *s) {
    return s->shortage->what != NULL;
}

/* Zeroed memory for a search, or NULL, and the scorer is short. */
static void *msi_scratch(const msi_scorer *s, uint64_t bytes) {
    void *memory = msi_alloc_zeroed(s->allocator, bytes);
    if (!memory) {
        (void)msi_run_short(s, "the solver", bytes);
    }
    return memory;
}

/* MSI_RESERVE for a list of a search: where it is false, the scorer is short. */
#define MSI_SCRATCH_LIST(type, scorer, list, needed)                                               \
    (MSI_RESERVE(type, (scorer)->allocator, list, needed) ||                                       \
     msi_run_short(scorer, "the solver", (uint64_t)(needed) * sizeof(type)))

/* Schedules, aliases and simulates a program that was lowered. */
static void msi_complete(const msi_scorer *s, msi_program *p) {
    msi_schedule(s->store, s->allocator, p);
    if (!p->out_of_memory) {
        msi_share_memory(s->graph, p);
    }
    msi_simulate(s->graph, s->costs, s->store, s->allocator, p);
    if (p->out_of_memory) {
        msi_run_short(s, "the program", p->ranges.count * sizeof(msi_range));
    }
}

/* Debug mode: a layout that overlaps, or whose bound is not what was simulated, is our own bug. */
static bool msi_check_layout(const msi_scorer *s, const msi_program *p) {
    const msi_block *blocks = p->blocks.items;
    const uint32_t count = p->blocks.count;
    bool valid = true;
    uint64_t bound = p->peak_bytes;
    const bool checked =
        msi_layout_check(s->allocator, blocks, count, &valid, &bound) == MS_RESULT_OK;
    MEMSCALE_ASSERT(valid && bound == p->peak_bytes);
    return checked;
}

/* Lays out a program. The layout need not be smaller than an arena of `enough` bytes. */
static void msi_lay_out(const msi_scorer *s, msi_program *p, uint64_t enough) {
    const uint64_t effort = msi_smaller(
        MSI_LAYOUT_EFFORT, MSI_LAYOUT_EFFORT_LEAST + p->ranges.count * MSI_LAYOUT_EFFORT_EACH);
    const uint64_t residents = s->store->resident_bytes;
    enough = enough > residents ? enough - residents : 0;
    if (!msi_is_short(s) && (!msi_make_blocks(s->allocator, p, s->store->residents.count) ||
                             msi_layout_within(s->allocator, p->blocks.items, p->blocks.count,
                                               effort, enough, &p->height) != MS_RESULT_OK ||
                             (s->checks_layouts && !msi_check_layout(s, p)))) {
        msi_run_short(s, "the layout", p->ranges.count * sizeof(msi_block));
    }
}

/* The arena that holds two programs, one at a time. */
static uint64_t msi_arena_of(const msi_store *store, const msi_program *train,
                             const msi_program *eval) {
    return store->resident_bytes + msi_larger(train->height, eval->height);
}

/* Lowers, schedules and simulates, for live bytes and time. This takes less time than a layout. */
static msi_score msi_estimate(const msi_scorer *s, const msi_tensor_decision *decisions) {
    msi_score score = {UINT64_MAX, UINT64_MAX, 1e300};
    if (!msi_is_short(s)) {
        msi_lower_train(s->lowering, decisions, s->program);
        msi_complete(s, s->program);
    }
    if (!msi_is_short(s)) {
        score.live_bytes = s->store->resident_bytes + s->program->peak_bytes;
        score.us = s->program->step_us;
    }
    return score;
}

/* Whether what was estimated last fits a budget. It is laid out if its live bytes do. */
static bool msi_fits(const msi_scorer *s, msi_score *score, uint64_t budget, uint64_t enough) {
    if (score->live_bytes > budget || msi_is_short(s)) {
        return false;
    }
    msi_lay_out(s, s->program, enough);
    score->bytes = msi_is_short(s) ? UINT64_MAX : msi_arena_of(s->store, s->program, s->eval);
    return score->bytes <= budget && !msi_is_short(s);
}

/* Estimates and lays out. */
static msi_score msi_score_of(const msi_scorer *s, const msi_tensor_decision *decisions) {
    msi_score score = msi_estimate(s, decisions);
    (void)msi_fits(s, &score, MSI_NO_BUDGET, 0);
    return score;
}

/* What plans have to meet, and the best one that the searches have found so far.

   A search is a function from a budget to a plan that fits it, or to none, with two properties:
   - a larger budget gets no slower plan;
   - if the plan for a budget fits a smaller one as well, then it is the plan for that one too.
   The second implies that a smaller budget gets no larger arena: it gets the same plan, or one that
   fits where that one does not. The fastest plan of a fixed list that fits, with ties broken by a
   fixed order, has both properties, and so has the best of the plans of several searches. Nothing
   else about plans needs to be known for ms_wrap to keep its promise; the order of tries, and what
   is skipped because it cannot win, make no difference. */
typedef struct msi_search {
    const msi_scorer *scorer;
    uint64_t budget, enough;   // no layout need be smaller than `enough`
    double least_us;           // the time of the plain plan: none counts as faster
    bool any;                  // one plan that fits is enough
    bool early;                // the plans proposed update params inside backward
    msi_tensor_decision *best; // the best plan so far, if one was found
    bool found, fits, best_early;
    msi_score best_score;
} msi_search;

/* Estimates decisions for a search. */
static msi_score msi_search_estimate(const msi_search *s, const msi_tensor_decision *decisions) {
    msi_score score = msi_estimate(s->scorer, decisions);
    score.us = score.us > s->least_us ? score.us : s->least_us;
    return score;
}

/* Whether decisions that were estimated may be the best so far, and so are worth a layout. */
static bool msi_may_be_best(const msi_search *s, const msi_score *score) {
    const uint64_t most = s->fits ? s->budget : msi_larger(s->budget, s->best_score.bytes);
    return !s->found || (score->live_bytes <= most && (!s->fits || score->us <= s->best_score.us));
}

static uint64_t msi_decisions_bytes(const msi_graph *g) {
    return g->tensors.count * (uint64_t)sizeof(msi_tensor_decision);
}

/* Whether decisions come before others: the faster, then the smaller by live bytes, since
   a layout that fits may have ended early. */
static bool msi_is_faster(const msi_score *a, const msi_score *b) {
    return a->us < b->us || (a->us <= b->us && a->live_bytes < b->live_bytes);
}

/* Keeps decisions that were laid out if they are better than the best so far: those that fit come
   first, the faster before the slower; then the others, the smaller before the larger. */
static void msi_propose(msi_search *s, const msi_tensor_decision *decisions,
                        const msi_score *score) {
    const msi_score *best = &s->best_score;
    const bool fits = score->bytes <= s->budget;
    const bool smaller =
        score->bytes < best->bytes || (score->bytes == best->bytes && score->us < best->us);
    if (!msi_is_short(s->scorer) &&
        (!s->found || (fits && !s->fits) ||
         (fits == s->fits && (fits ? msi_is_faster(score, best) : smaller)))) {
        s->found = true;
        s->fits = fits;
        s->best_score = *score;
        s->best_early = s->early;
        memcpy(s->best, decisions, msi_decisions_bytes(s->scorer->graph));
    }
}

/* Decisions on a list, which were estimated. */
typedef struct msi_candidate {
    msi_score score;
    bool done; // they were laid out
} msi_candidate;

/* The candidate to lay out next: of those that may be the best, the fastest or, as long as none
   fits, the smallest, after which few others may. MSI_NONE: there is none. */
static uint32_t msi_next_candidate(const msi_search *s, const msi_candidate *list, uint32_t count) {
    uint32_t best = MSI_NONE;
    for (uint32_t k = 0; k < count && !msi_is_short(s->scorer); k++) {
        const msi_score *a = &list[k].score, *b = &list[best == MSI_NONE ? k : best].score;
        const bool better = s->fits ? msi_is_faster(a, b) : a->live_bytes < b->live_bytes;
        const bool first = best == MSI_NONE || better;
        best = first && !list[k].done && msi_may_be_best(s, a) ? k : best;
    }
    return best;
}

/* Lays out and proposes a candidate that was estimated last. */
static void msi_propose_candidate(msi_search *s, msi_candidate *c,
                                  const msi_tensor_decision *decisions, msi_score score) {
    (void)msi_fits(s->scorer, &score, MSI_NO_BUDGET, s->enough);
    msi_propose(s, decisions, &score);
    c->done = true;
}

/* The values that a layer makes, outputs and then saved tensors:
   for (MSI_EACH_MADE(made, g, layer)) { ... made.tensor ... } */
static msi_operand_cursor msi_made_operands(const msi_graph *g, uint32_t layer) {
    msi_operand_cursor c = msi_operands_of(g, &g->layers.items[layer], MSI_GROUP_OUT);
    c.count += g->layers.items[layer].count[MSI_GROUP_SAVED];
    return c;
}

#define MSI_EACH_MADE(operand, g, layer)                                                           \
    msi_operand_cursor operand = msi_made_operands(g, layer);                                      \
    msi_next_operand(&operand);

/* Whether the plan may drop a value to recompute it. */
static bool msi_is_droppable(const msi_graph *g, uint32_t t) {
    const msi_tensor *tensor = &g->tensors.items[t];
    return !msi_is_resident(tensor) && !tensor->is_output && t != g->loss && !tensor->must_stay &&
           tensor->technique[MS_TECHNIQUE_CHECKPOINTING] != MS_SWITCH_OFF;
}

static bool msi_is_drop_forced(const msi_graph *g, uint32_t t) {
    return g->tensors.items[t].technique[MS_TECHNIQUE_CHECKPOINTING] == MS_SWITCH_ON;
}

/* How the values of a layer come back under these decisions: as msi_way_back has it. */
static msi_op msi_decided_way(const msi_graph *g, const msi_tensor_decision *decisions,
                              uint32_t layer) {
    bool there = true;
    if (!g->layers.items[layer].recompute) {
        return MSI_OP_RECOMPUTE;
    }
    for (MSI_EACH_MADE(made, g, layer)) {
        there &=
            !g->tensors.items[made.tensor].serves_recompute || decisions[made.tensor].pass == 0;
    }
    return there ? MSI_OP_RECOMPUTE : MSI_OP_REPEAT;
}

/* Whether dropping a value is a choice. What nothing reads again, the plain plan drops already. */
static bool msi_is_choice(const msi_graph *g, uint32_t t) {
    return msi_is_read_again(&g->tensors.items[t]) && msi_is_droppable(g, t) &&
           !msi_is_drop_forced(g, t);
}

/* The plain plan drops only what nothing reads again, and updates params last. */
static void msi_decide_plain(const msi_graph *g, msi_tensor_decision *decisions) {
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const bool unread = !msi_is_read_again(&g->tensors.items[t]);
        decisions[t].pass = unread && msi_is_droppable(g, t) ? 1 : 0;
        decisions[t].update_after = MSI_NONE;
    }
}

/* What a search begins with: nothing is dropped by choice, only what is forced. */
static void msi_decide_base(const msi_graph *g, bool early, msi_tensor_decision *decisions) {
    msi_decide_plain(g, decisions);
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        decisions[t].pass |= msi_is_drop_forced(g, t);
    }
    msi_place_updates(g, decisions, early, 0);
}

// ------------------------------------------------------------------------------------------------
// >>greedy  graphs of any shape: drop one value after another, each time the one that frees most
//           for its time

/* The greedy search goes through a list of plans whose order does not depend on the budget. The
   budget only says where to stop: at the first plan that fits. A plan that is faster than one
   before it does not count. The list begins with the plain plan, plus what is forced; next, if that
   is allowed, is the plan that updates params inside backward; each plan after these drops some
   more values than the one before, and has no more live bytes. */

enum {
    MSI_PRICE_LIMIT = 64,
    MSI_BATCH_SHARE = 64, // of the moves are made at once; on very large graphs more, up to
    MSI_BATCH_LEAST = 16, // this share
    MSI_BATCH_LAYERS = 16384,
    MSI_TRY_LIMIT = 128, // for a plan of the list; on large graphs fewer, down to the least
    MSI_TRY_LEAST = 8,
    MSI_LIST_WORK = 1 << 22, // layers that are lowered for the whole list
    MSI_TRIM_TRIES = 8,
    MSI_POLISH_LIMIT = 64,    // values
    MSI_POLISH_LAYERS = 1000, // of a graph
    MSI_CUTS = 80             // into segments: as many as 2^32 layers have
};

/* Finds the time that it costs to run a layer again, under the decisions so far. */
typedef struct msi_pricing {
    const msi_graph *graph;
    const ms_allocator *allocator;
    uint8_t *recomputed; // per layer: whether it runs again in backward
    uint32_t *visited;   // per layer: number of the last query that visited it
    uint32_t *stack;     // of layers
    uint32_t query;
} msi_pricing;

static uint64_t msi_pricing_bytes(const msi_graph *g) {
    return (g->layers.count + (uint64_t)g->tensors.count) * sizeof(uint32_t) + g->layers.count;
}

static bool msi_pricing_init(msi_pricing *c, const msi_scorer *s) {
    memset(c, 0, sizeof *c);
    c->graph = s->graph;
    c->allocator = s->allocator;
    c->visited = (uint32_t *)msi_scratch(s, msi_pricing_bytes(c->graph));
    if (c->visited) {
        c->stack = c->visited + c->graph->layers.count;
        c->recomputed = (uint8_t *)(c->stack + c->graph->tensors.count);
    }
    return c->visited != NULL;
}

static void msi_pricing_free(const msi_pricing *c) {
    if (c->visited) {
        msi_release(c->allocator, c->visited, msi_pricing_bytes(c->graph));
    }
}

static void msi_note_recomputed(msi_pricing *c, const msi_program *p) {
    memset(c->recomputed, 0, c->graph->layers.count);
    for (uint32_t i = 0; i < p->instructions.count; i++) {
        if (msi_is_again((msi_op)p->instructions.items[i].op)) {
            c->recomputed[p->instructions.items[i].target] = 1;
        }
    }
}

/* The time that a step grows by if this value is dropped: that of its layer, and of the layers
   before it whose outputs are neither kept nor recomputed already. Without what the recompute
   callback of the layer reads, forward takes the place of the callback. */
static double msi_price_us(msi_pricing *c, const msi_tensor_decision *decisions, uint32_t tensor) {
    const msi_graph *g = c->graph;
    const uint32_t layer = g->tensors.items[tensor].producer;
    const bool turns = g->tensors.items[tensor].serves_recompute &&
                       msi_decided_way(g, decisions, layer) == MSI_OP_RECOMPUTE;
    uint32_t depth = 0, met = 0;
    double us = turns && c->recomputed[layer] ? -g->layers.items[layer].time.recompute_us : 0.0;
    c->query++;
    c->stack[depth++] = layer;
    while (depth > 0 && met < MSI_PRICE_LIMIT) {
        const uint32_t top = c->stack[--depth];
        const bool turned = turns && top == layer;
        if ((c->recomputed[top] && !turned) || c->visited[top] == c->query) {
            continue;
        }
        c->visited[top] = c->query;
        met++;
        const msi_layer *l = &g->layers.items[top];
        const msi_op way = turned ? MSI_OP_REPEAT : msi_decided_way(g, decisions, top);
        const uint32_t reads = msi_op_reads(l, way, MSI_GROUP_IN);
        us += msi_again_us(l, way);
        for (MSI_EACH(in, g, l, MSI_GROUP_IN)) {
            if ((reads >> in.slot & 1) && decisions[in.tensor].pass > 0 &&
                depth < g->tensors.count) {
                c->stack[depth++] = g->tensors.items[in.tensor].producer;
            }
        }
    }
    return us > 0.0 ? us : 0.0;
}

/* A next step that a search may take: to drop some values together. */
typedef struct msi_move {
    double bytes_per_us;    // bytes that it frees for each microsecond that it costs
    uint64_t segment_bytes; // of the segment that its values would join
    uint32_t key;           // its first tensor
    uint32_t member;        // the first of its values in msi_greedy.members
    uint32_t member_count;
} msi_move;

/* Better: more bytes for the time, then a smaller segment, then registered earlier. */
static bool msi_is_better(const msi_move *a, const msi_move *b) {
    if (a->bytes_per_us != b->bytes_per_us) {
        return a->bytes_per_us > b->bytes_per_us;
    }
    return a->segment_bytes != b->segment_bytes ? a->segment_bytes < b->segment_bytes
                                                : a->key < b->key;
}

/* Heap sort, best first. In place, since qsort may allocate memory past the allocator hooks. */
static void msi_sort_moves(msi_move *items, uint32_t count) {
    for (uint32_t round = count / 2 + count; round-- > 1;) {
        const uint32_t end = round < count ? round : count; // below count: the worst goes there
        uint32_t top = round < count ? 0 : round - count;
        if (round < count) {
            const msi_move worst = items[0];
            items[0] = items[round];
            items[round] = worst;
        }
        for (uint32_t child = 2 * top + 1; child < end; child = 2 * top + 1) {
            if (child + 1 < end && msi_is_better(&items[child], &items[child + 1])) {
                child++;
            }
            if (!msi_is_better(&items[top], &items[child])) {
                break;
            }
            const msi_move parent = items[top];
            items[top] = items[child];
            items[child] = parent;
            top = child;
        }
    }
}

/* A plan of the list: it drops the first drop_count values of `drops`. */
typedef struct msi_prefix {
    uint64_t live_bytes;
    uint32_t drop_count;
    double us;  // of the slowest plan up to this one
    bool early; // params are updated inside backward
    bool counts;
} msi_prefix;

typedef struct msi_greedy {
    msi_search *search;
    const msi_scorer *scorer;
    const msi_graph *graph;
    msi_tensor_decision *decisions; // of the plan at hand
    msi_score score;                // of that plan
    msi_pricing pricing;
    /* A segment is a set of layers that are recomputed together: each reads what another one of
       them brings back. */
    uint32_t *segment;             // per layer: one of the layers of the same segment
    uint64_t *segment_bytes;       // per segment: bytes that it brings back
    uint64_t *started_bytes;       // per tensor: bytes of the last segment that starts from it
    MSI_LIST(uint32_t) drops;      // values, in the order in which they were dropped
    MSI_LIST(msi_prefix) prefixes; // the list of plans
    MSI_LIST(msi_move) moves;      // from the plan at hand
    MSI_LIST(uint32_t) members;    // the values of the moves
    uint32_t batch_share;          // of the moves are made at once
    uint32_t try_limit;            // for a plan of the list
    uint32_t tries_left;           // for all of them
} msi_greedy;

static uint64_t msi_greedy_bytes(const msi_graph *g) {
    return g->tensors.count * (sizeof(uint64_t) + sizeof(msi_tensor_decision)) +
           g->layers.count * (uint64_t)(sizeof(uint64_t) + sizeof(uint32_t));
}

/* Begins with the plain plan. False, and the scorer is short, without memory. */
static bool msi_greedy_init(msi_greedy *w, msi_search *search) {
    const msi_scorer *s = search->scorer;
    const msi_graph *g = s->graph;
    memset(w, 0, sizeof *w);
    const uint32_t layers = 1 + g->layers.count;
    w->search = search;
    w->scorer = s;
    w->tries_left = MSI_LIST_WORK / layers;
    w->try_limit = msi_clamp(MSI_TRY_LIMIT * 1000u / layers, MSI_TRY_LEAST, MSI_TRY_LIMIT);
    w->batch_share = msi_clamp((uint32_t)MSI_BATCH_SHARE * MSI_BATCH_LAYERS / layers,
                               MSI_BATCH_LEAST, MSI_BATCH_SHARE);
    w->graph = g;
    w->started_bytes = (uint64_t *)msi_scratch(s, msi_greedy_bytes(g));
    if (!w->started_bytes) {
        return false;
    }
    w->segment_bytes = w->started_bytes + g->tensors.count;
    w->decisions = (msi_tensor_decision *)(void *)(w->segment_bytes + g->layers.count);
    w->segment = (uint32_t *)(void *)(w->decisions + g->tensors.count);
    msi_decide_plain(g, w->decisions);
    return msi_pricing_init(&w->pricing, s);
}

static void msi_greedy_free(msi_greedy *w) {
    const ms_allocator *a = w->scorer->allocator;
    msi_release(a, w->started_bytes, msi_greedy_bytes(w->graph));
    msi_pricing_free(&w->pricing);
    MSI_LIST_FREE(uint32_t, a, w->drops);
    MSI_LIST_FREE(msi_prefix, a, w->prefixes);
    MSI_LIST_FREE(msi_move, a, w->moves);
    MSI_LIST_FREE(uint32_t, a, w->members);
}

static uint32_t msi_segment_of(msi_greedy *w, uint32_t layer) {
    while (w->segment[layer] != layer) {
        layer = w->segment[layer] = w->segment[w->segment[layer]];
    }
    return layer;
}

/* Joins a layer that runs again to the segments that it reads, and counts what it brings back. */
static void msi_join_segments(msi_greedy *w, uint32_t layer) {
    const msi_graph *g = w->graph;
    for (MSI_EACH(in, g, &g->layers.items[layer], MSI_GROUP_IN)) {
        if (w->decisions[in.tensor].pass > 0) {
            const uint32_t from = msi_segment_of(w, g->tensors.items[in.tensor].producer);
            const uint32_t to = msi_segment_of(w, layer);
            w->segment_bytes[to] += from != to ? w->segment_bytes[from] : 0;
            w->segment[from] = to;
        }
    }
    for (MSI_EACH_MADE(made, g, layer)) {
        const msi_tensor *t = &g->tensors.items[made.tensor];
        if (w->decisions[made.tensor].pass > 0 && t->last_reader != MSI_NONE) {
            w->segment_bytes[msi_segment_of(w, layer)] += t->bytes;
        }
    }
}

/* The values of a segment are all in memory at once, so small segments are better. */
static void msi_find_segments(msi_greedy *w) {
    const msi_graph *g = w->graph;
    for (uint32_t i = 0; i < g->layers.count; i++) {
        w->segment[i] = i;
        w->segment_bytes[i] = 0;
        if (w->pricing.recomputed[i]) {
            msi_join_segments(w, i);
        }
    }
    memset(w->started_bytes, 0, g->tensors.count * sizeof *w->started_bytes);
    for (uint32_t i = 0; i < g->layers.count; i++) {
        for (MSI_EACH(in, g, &g->layers.items[i], MSI_GROUP_IN)) {
            if (w->pricing.recomputed[i] && w->decisions[in.tensor].pass == 0) {
                w->started_bytes[in.tensor] = w->segment_bytes[msi_segment_of(w, i)];
            }
        }
    }
}

/* Bytes of the segment that the outputs of a layer, `tensor` among them, would join. */
static uint64_t msi_joined_bytes(msi_greedy *w, uint32_t tensor) {
    const msi_graph *g = w->graph;
    const uint32_t layer = g->tensors.items[tensor].producer;
    uint64_t bytes = w->started_bytes[tensor];
    if (w->pricing.recomputed[layer]) {
        return bytes + w->segment_bytes[msi_segment_of(w, layer)];
    }
    for (MSI_EACH(in, g, &g->layers.items[layer], MSI_GROUP_IN)) {
        if (w->decisions[in.tensor].pass > 0) {
            bytes += w->segment_bytes[msi_segment_of(w, g->tensors.items[in.tensor].producer)];
        }
    }
    return bytes;
}

/* Adds a move of the last members; the memory is reserved. */
static void msi_add_move(msi_greedy *w, uint32_t member_count) {
    msi_move *move = &w->moves.items[w->moves.count++];
    move->member = w->members.count - member_count;
    move->member_count = member_count;
    move->key = w->members.items[move->member];
    move->bytes_per_us = 0.0;
    for (uint32_t i = 0; i < member_count; i++) {
        const uint32_t t = w->members.items[move->member + i];
        move->bytes_per_us += (double)w->graph->tensors.items[t].bytes;
    }
}

/* Whether a live range is a value that is idle at the peak, between forward and backward. */
static bool msi_is_idle_at_peak(const msi_program *p, const msi_range *range) {
    return range->role == MSI_ROLE_VALUE && range->idle_last != MSI_NONE &&
           range->idle_first < p->peak && range->idle_last > p->peak;
}

/* Adds the last members, saved tensors of a layer, as one move. One alone may be a move already. */
static void msi_add_saved(msi_greedy *w, uint32_t layer, uint32_t count) {
    if (layer != MSI_NONE && (count > 1 || !w->graph->layers.items[layer].recompute)) {
        msi_add_move(w, count);
    }
}

/* The saved tensors of a layer are one move, since they come back together; where the layer can
   bring back one of them alone, each is a move as well. */
static void msi_list_moves(msi_greedy *w) {
    const msi_graph *g = w->graph;
    const msi_program *p = w->scorer->program;
    uint32_t saved_of = MSI_NONE, together = 0; // the layer of the saved tensors met last; how many
    w->moves.count = w->members.count = 0;
    if (!MSI_SCRATCH_LIST(msi_move, w->scorer, w->moves, 2ull * p->ranges.count) ||
        !MSI_SCRATCH_LIST(uint32_t, w->scorer, w->members, p->ranges.count)) {
        return;
    }
    for (uint32_t i = w->scorer->store->residents.count; i < p->ranges.count; i++) {
        const uint32_t tensor = p->ranges.items[i].tensor;
        if (!msi_is_idle_at_peak(p, &p->ranges.items[i]) || !msi_is_droppable(g, tensor)) {
            continue;
        }
        const msi_tensor *t = &g->tensors.items[tensor];
        if (t->kind != MSI_KIND_SAVED || t->producer != saved_of) {
            msi_add_saved(w, saved_of, together);
            saved_of = t->kind == MSI_KIND_SAVED ? t->producer : MSI_NONE;
            together = 0;
        }
        together++;
        w->members.items[w->members.count++] = tensor;
        if (saved_of == MSI_NONE || g->layers.items[saved_of].recompute) {
            msi_add_move(w, 1);
        }
    }
    msi_add_saved(w, saved_of, together);
}

/* Finds the moves from the plan at hand, best first; without memory, none. */
static void msi_find_moves(msi_greedy *w) {
    msi_note_recomputed(&w->pricing, w->scorer->program);
    msi_list_moves(w);
    msi_find_segments(w);
    for (uint32_t i = 0; i < w->moves.count; i++) {
        msi_move *move = &w->moves.items[i];
        double us = 0.0;
        for (uint32_t k = 0; k < move->member_count; k++) { // of one layer: the dearest counts
            const uint32_t t = w->members.items[move->member + k];
            const double price = k > 0 && !w->graph->tensors.items[t].serves_recompute
                                     ? 0.0
                                     : msi_price_us(&w->pricing, w->decisions, t);
            us = price > us ? price : us;
        }
        move->segment_bytes = msi_joined_bytes(w, move->key);
        move->bytes_per_us /= 1e-3 + us;
    }
    msi_sort_moves(w->moves.items, w->moves.count);
}

/* Adds the plan at hand to the list. Returns whether it counts. */
static bool msi_add_prefix(msi_greedy *w) {
    const uint32_t count = w->prefixes.count;
    const double slowest = count > 0 ? w->prefixes.items[count - 1].us : 0.0;
    const bool counts = w->score.us >= slowest;
    const msi_prefix prefix = {w->score.live_bytes, w->drops.count, counts ? w->score.us : slowest,
                               w->search->early, counts};
    if (MSI_SCRATCH_LIST(msi_prefix, w->scorer, w->prefixes, count + 1ull)) {
        w->prefixes.items[w->prefixes.count++] = prefix;
    }
    return counts;
}

/* Drops a value, unless another move of the same batch has dropped it. */
static void msi_drop(msi_greedy *w, uint32_t tensor) {
    if (w->decisions[tensor].pass == 0 &&
        MSI_SCRATCH_LIST(uint32_t, w->scorer, w->drops, w->drops.count + 1ull)) {
        w->decisions[tensor].pass = 1;
        w->drops.items[w->drops.count++] = tensor;
    }
}

/* Drops exactly the first `count` values of the list. Those that are taken back stay in it after
   its end, for a larger count later. */
static void msi_set_drops(msi_greedy *w, uint32_t count) {
    while (w->drops.count > count) {
        w->decisions[w->drops.items[--w->drops.count]].pass = 0;
    }
    while (w->drops.count < count) {
        w->decisions[w->drops.items[w->drops.count++]].pass = 1;
    }
}

/* Makes `count` moves from `first` on, and takes them back unless they lower the peak. */
static bool msi_make_moves(msi_greedy *w, uint32_t first, uint32_t count, uint64_t old_bytes,
                           uint32_t old_peak) {
    const uint32_t old_drops = w->drops.count;
    for (uint32_t i = first; i < first + count; i++) {
        for (uint32_t k = 0; k < w->moves.items[i].member_count; k++) {
            msi_drop(w, w->members.items[w->moves.items[i].member + k]);
        }
    }
    w->score = msi_search_estimate(w->search, w->decisions);
    const bool lower = w->score.live_bytes < old_bytes ||
                       (w->score.live_bytes == old_bytes && w->scorer->program->peak != old_peak);
    if (!lower) {
        msi_set_drops(w, old_drops);
    }
    return lower;
}

/* Goes to the next plan of the list: makes the best moves that lower the peak. On large graphs it
   makes several at a time, and fewer where that does not help, so that the number of tries does not
   grow with the graph. False at the end of the list. */
static bool msi_next_plan(msi_greedy *w) {
    const uint64_t old_bytes = w->score.live_bytes;
    const uint32_t old_peak = w->scorer->program->peak;
    msi_find_moves(w);
    uint32_t batch = 1 + w->moves.count / w->batch_share;
    uint32_t first = 0;
    for (uint32_t tries = 0; tries < w->try_limit && w->tries_left > 0 && first < w->moves.count;
         tries++) {
        w->tries_left--;
        batch = batch < w->moves.count - first ? batch : w->moves.count - first;
        if (msi_make_moves(w, first, batch, old_bytes, old_peak)) {
            return true;
        }
        first += batch == 1;
        batch = batch > 1 ? batch / 2 : 1;
    }
    return false;
}

/* Goes back to a plan of the list, and lays it out. */
static void msi_return_to(msi_greedy *w, const msi_prefix *prefix) {
    w->search->early = prefix->early;
    msi_place_updates(w->graph, w->decisions, prefix->early, 0);
    msi_set_drops(w, prefix->drop_count);
    w->score = msi_search_estimate(w->search, w->decisions);
    (void)msi_fits(w->scorer, &w->score, MSI_NO_BUDGET, 0);
}

/* At the end of the list, goes back to the first plan with the smallest arena. That is the last
   one, unless an earlier one has the same peak, or a layout that wastes less. False: all are larger
   than what other searches have found. */
static bool msi_take_smallest(msi_greedy *w) {
    const msi_search *s = w->search;
    const msi_prefix *list = w->prefixes.items, *best = NULL, *now = NULL;
    uint64_t bytes = s->found ? s->best_score.bytes : UINT64_MAX;
    for (uint32_t k = w->prefixes.count;
         k-- > 0 && list[k].live_bytes <= bytes && !msi_is_short(w->scorer);) {
        if (list[k].counts) {
            now = &list[k];
            msi_return_to(w, now);
            best = w->score.bytes <= bytes ? now : best;
            bytes = msi_smaller(bytes, w->score.bytes);
        }
    }
    if (best && best != now) {
        msi_return_to(w, best);
    }
    return best != NULL;
}

/* Keeps (pass 0) or drops (pass 1) the values of one layer that the list dropped. */
static void msi_set_drops_of(msi_greedy *w, uint32_t layer, uint32_t pass) {
    for (uint32_t i = 0; i < w->drops.count; i++) {
        if (w->graph->tensors.items[w->drops.items[i]].producer == layer) {
            w->decisions[w->drops.items[i]].pass = pass;
        }
    }
}

/* Polishes the plan that fits: takes back, layer by layer, drops of earlier moves that later moves
   have made needless. The arena must stay as it is, and the step must not become faster than that
   of the plan before: so the result stands in the list where that plan stood. */
static void msi_polish(msi_greedy *w, const msi_prefix *before) {
    const msi_score first = w->score;
    msi_score best = first;
    if (w->graph->layers.count > MSI_POLISH_LAYERS || before->drop_count == 0) {
        return;
    }
    for (uint32_t i = 0; i < before->drop_count && i < MSI_POLISH_LIMIT && !msi_is_short(w->scorer);
         i++) {
        if (w->decisions[w->drops.items[i]].pass == 0) {
            continue; // taken back with another value of its layer
        }
        const uint32_t layer = w->graph->tensors.items[w->drops.items[i]].producer;
        msi_set_drops_of(w, layer, 0);
        w->score = msi_search_estimate(w->search, w->decisions);
        if (w->score.us < best.us && w->score.us >= before->us &&
            w->score.live_bytes <= first.live_bytes &&
            msi_fits(w->scorer, &w->score, first.bytes, 0) && w->score.bytes == first.bytes) {
            best = w->score;
        } else {
            msi_set_drops_of(w, layer, 1);
        }
    }
    w->score = best;
}

/* If the last plan of the list dropped several values at once, some of them may be enough: proposes
   the fewest that fit. These plans stand between the last two of the list: none is smaller than the
   last one, or slower, and none faster than the one before. On large graphs only some numbers of
   drops are tried, the same for every budget. */
static void msi_trim_last(msi_greedy *w, const msi_prefix *before, const msi_score *last) {
    const uint32_t end = w->drops.count, begin = before->drop_count, most = MSI_TRIM_TRIES;
    const uint32_t tries = end - begin < most ? end - begin : most;
    double slowest = before->us;
    for (uint32_t k = 1; k < tries && !msi_is_short(w->scorer); k++) {
        msi_set_drops(w, begin + (uint32_t)((uint64_t)k * (end - begin) / tries));
        w->score = msi_search_estimate(w->search, w->decisions);
        const bool counts = w->score.us >= slowest && w->score.us < last->us;
        slowest = counts ? w->score.us : slowest;
        if (counts && msi_fits(w->scorer, &w->score, w->search->budget, 0) &&
            w->score.bytes >= last->bytes) {
            msi_propose(w->search, w->decisions, &w->score);
            return;
        }
    }
}

/* Whether the rest of the list is slower than a plan that fits: none of it is faster than the plan
   before it. */
static bool msi_is_beaten(const msi_greedy *w) {
    const uint32_t count = w->prefixes.count;
    return w->search->fits && count > 0 &&
           w->prefixes.items[count - 1].us > w->search->best_score.us;
}

/* Goes through the list until the budget is met, or to its end, and proposes the plan there. */
static void msi_search_greedy(msi_greedy *w, bool may_drop) {
    bool fits = false;
    if (may_drop && w->search->found) { // by the search of a chain, which leaves less to find
        w->tries_left /= w->graph->layers.count > 4 * MSI_BATCH_LAYERS ? 2 : 1;
        w->score = msi_search_estimate(w->search, w->decisions); // of the next moves
    }
    while (may_drop && !fits && !msi_is_short(w->scorer) && !msi_is_beaten(w) && msi_next_plan(w)) {
        fits = msi_add_prefix(w) && msi_fits(w->scorer, &w->score, w->search->budget, 0);
    }
    if (fits && w->search->any) {
        msi_propose(w->search, w->decisions, &w->score);
    } else if (fits && w->prefixes.count > 1) {
        const msi_prefix *before = &w->prefixes.items[w->prefixes.count - 2];
        msi_polish(w, before);
        msi_propose(w->search, w->decisions, &w->score);
        const msi_score last = w->score;
        msi_trim_last(w, before, &last);
    } else if (!w->search->fits && !msi_is_short(w->scorer) && msi_take_smallest(w)) {
        msi_propose(w->search, w->decisions, &w->score);
    }
}

/* Square-root checkpointing and its kin: cuts the layers into segments, and drops what is used
   within one segment alone. A fixed list of numbers of segments. */
typedef struct msi_segments {
    msi_search *search;
    const msi_graph *graph;
    msi_tensor_decision *decisions;
    msi_candidate list[MSI_CUTS];
    uint32_t segment_count[MSI_CUTS]; // of each plan
    uint32_t count;                   // of plans
} msi_segments;

static msi_score msi_estimate_segments(const msi_segments *c, uint32_t number) {
    const msi_graph *g = c->graph;
    const uint32_t count = c->segment_count[number];
    const uint32_t width = (g->layers.count + count - 1) / count;
    msi_decide_base(g, c->search->early, c->decisions);
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const msi_tensor *tensor = &g->tensors.items[t];
        const bool drops =
            msi_is_choice(g, t) && tensor->producer / width == tensor->last_use / width;
        c->decisions[t].pass = c->decisions[t].pass > 0 || drops;
    }
    return msi_search_estimate(c->search, c->decisions);
}

static void msi_search_segments(msi_search *s) {
    const msi_graph *g = s->scorer->graph;
    const uint64_t bytes = msi_decisions_bytes(g);
    const uint32_t step = g->layers.count > MSI_BATCH_LAYERS ? 1 : 3;
    msi_segments c = MSI_ZERO_INIT;
    c.search = s;
    c.graph = g;
    c.decisions =
        msi_is_short(s->scorer) ? NULL : (msi_tensor_decision *)msi_scratch(s->scorer, bytes);
    if (!c.decisions) {
        return;
    }
    for (uint32_t count = 2; count <= g->layers.count / 2 && c.count < MSI_CUTS;
         count += 1 + count / step) {
        c.segment_count[c.count] = count;
        c.list[c.count].score = msi_estimate_segments(&c, c.count);
        c.count++;
    }
    for (uint32_t k; (k = msi_next_candidate(s, c.list, c.count)) != MSI_NONE;) {
        msi_propose_candidate(s, &c.list[k], c.decisions, msi_estimate_segments(&c, k));
    }
    msi_release(s->scorer->allocator, c.decisions, bytes);
}

// ------------------------------------------------------------------------------------------------
// >>chain  graphs that fall into stages: nested recomputation, by dynamic programming

/* A graph is cut into stages at each layer where at most one of the values that can be dropped
   passes from the layers before to it and those after. On such a chain the best plans follow from
   those of its subchains. This is the dynamic program of Beaumont, Eyraud-Dubois, Herrmann, Joly
   and Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep neural networks
   with limited memory", 2019, with three differences. Memory is not divided into units: each
   subchain has its best plans as a list of Pareto points (bytes, time), without those that are
   close to others. A stage has several options for what it keeps. It may be kept although its input
   is not. */

enum {
    MSI_CHAIN_STAGES = 104,
    MSI_CHAIN_OPTIONS = 8,
    MSI_CHAIN_WAYS = MSI_CHAIN_OPTIONS + 2 * MSI_CHAIN_STAGES,
    MSI_CHAIN_POOL = 1 << 15, // points
    MSI_CHAIN_POOLS = 64,
    MSI_CHAIN_WIDTH = 48,    // points of a subchain, at least
    MSI_CHAIN_WIDEST = 2048, // of a subchain up to the end
    MSI_CHAIN_WORK = 3 * 1000 * 1000,
    MSI_CHAIN_LEAF = 6,   // points
    MSI_CHAIN_UNFIT = 64, // points: more than a bisection meets
    MSI_CHAIN_FEW = 64,   // points that are considered on very large graphs
    MSI_CHAIN_VERY_LARGE = 16384,
    MSI_CHAIN_LARGE = 1000 // layers
};

/* Bytes and time of a stage if it keeps some of its values. Its input is not counted, and
   kept_bytes are without its output. Carried bytes are those of live ranges of no stage. */
typedef struct msi_option {
    uint64_t kept_bytes;     // between its forward and its backward
    uint64_t first_bytes;    // at most during forward, with the carried bytes
    uint64_t pass_bytes;     // at most during a recomputation, without them
    uint64_t backward_bytes; // at most during its backward, with them
    double recompute_us;     // to bring back in backward what it does not keep
    bool holds_input;        // to the end of its backward
} msi_option;

typedef struct msi_chain_stage {
    uint32_t first, end; // layers
    uint32_t input;      // the tensor that passes from the stages before, or MSI_NONE
    uint64_t input_bytes;
    uint64_t droppable_bytes; // of its values that can be dropped
    uint64_t carried_bytes;   // when its backward begins
    double pass_us;           // to make its output again
    double full_us;           // to make its output again, and all that it can keep
    double last_us;           // to make all that it can keep again
    bool reads_output;        // in its backward
    uint32_t option_count;    // the last one keeps nothing
    uint32_t forward, forward_end, backward, backward_end; // instructions
    msi_option options[MSI_CHAIN_OPTIONS];
} msi_chain_stage;

/* How to train a subchain, from its first stage s to its last one t, when its input is there. */
typedef enum msi_way_kind {
    MSI_WAY_KEEP,       // s keeps what an option says, then s + 1 to t; number: the option
    MSI_WAY_CHECKPOINT, // forward from s to k - 1, train k to t, then s to k - 1; number: k
    MSI_WAY_INNER       // forward to k, which is kept though its input is not, k + 1 to t, s to k
} msi_way_kind;

#define MSI_CHAIN_NEVER (UINT64_MAX / 4) // more bytes than any plan takes

typedef struct msi_pareto_point {
    uint64_t bytes;
    float us; // of recomputations
    uint8_t kind, number;
} msi_pareto_point;

typedef struct msi_subchain {
    const msi_pareto_point *points; // bytes rise, time falls; after the last, one that never fits
    uint32_t count;
} msi_subchain;

/* One way to train a subchain: `a`, with a_bytes beside it, then `b`, in `floor` bytes or more. */
typedef struct msi_way {
    uint64_t floor, a_bytes;
    const msi_subchain *a, *b;
    float us;
    uint8_t kind, number;
    uint64_t low, high; // the fewest bytes that it needs; more than `high` make it no faster
    float fastest_us;
} msi_way;

typedef struct msi_chain {
    msi_search *search;
    const msi_scorer *scorer;
    const msi_graph *graph;
    msi_tensor_decision *decisions; // of the plan at hand
    uint32_t count;                 // stages
    uint32_t move_count;
    msi_move *moves;    // values of a stage that are still kept
    uint32_t *stage_of; // per layer
    uint8_t *option_of; // per tensor: the first option that drops it
    uint8_t *leads;     // per layer: its outputs are needed to make the output of its stage
    msi_pricing pricing;
    MSI_LIST(uint32_t) at;                    // per instruction: its stage
    MSI_LIST(uint64_t) bytes;                 // memory of the next two
    uint64_t *own;                            // per instruction: bytes of its stage
    uint64_t *carried;                        // per instruction: bytes of no stage
    msi_pareto_point *pools[MSI_CHAIN_POOLS]; // memory of the points of subchains
    uint32_t pool_count, pool_used;           // pools; points in use in the last one
    /* [0]: all of it is to be done; [1]: forward of t is done, and all of it is kept. */
    msi_subchain *subchains;
    /* The subchain at hand. */
    uint32_t width; // points that it may have
    uint32_t way_count;
    uint64_t low, high;
    double scale; // from bytes to the square of a bucket's number
    float fastest_us;
    msi_pareto_point lowest;
    msi_pareto_point buckets[MSI_CHAIN_WIDEST]; // the best point of a range of bytes
    float reach[MSI_CHAIN_WIDEST];              // the best time of the buckets up to this one
    msi_way ways[MSI_CHAIN_WAYS];
    msi_chain_stage stages[MSI_CHAIN_STAGES];
    msi_candidate unfit[MSI_CHAIN_UNFIT]; // points that were met with too many live bytes
    uint32_t unfit_number[MSI_CHAIN_UNFIT], unfit_count;
} msi_chain;

/* What a way has for a subchain that is missing: it takes neither bytes nor time. */
static const msi_pareto_point msi_no_points[2] = {{0, 0.0f, 0, 0}, {MSI_CHAIN_NEVER, 0.0f, 0, 0}};
static const msi_subchain msi_no_subchain = {msi_no_points, 1};

static msi_subchain *msi_subchain_of(msi_chain *c, bool kept, uint32_t s, uint32_t t) {
    return &c->subchains[((kept ? c->count : 0u) + s) * c->count + t];
}

/* Per layer: the values that can be dropped and pass from earlier layers to it or later ones. */
typedef struct msi_crossings {
    uint64_t *count;
    uint64_t *sum; // of 1 + tensor, which names the tensor where there is one
} msi_crossings;

/* Adds a number to the elements from first to last: differences, to be summed. */
static void msi_add_range(uint64_t *differences, uint64_t first, uint64_t last, uint64_t number) {
    if (first <= last) {
        differences[first] += number;
        differences[last + 1] -= number;
    }
}

static void msi_find_crossings(const msi_crossings *x, const msi_graph *g) {
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const msi_tensor *tensor = &g->tensors.items[t];
        if (tensor->kind == MSI_KIND_ACTIVATION && msi_is_droppable(g, t)) {
            msi_add_range(x->count, tensor->producer + 1ull, tensor->last_use, 1);
            msi_add_range(x->sum, tensor->producer + 1ull, tensor->last_use, t + 1ull);
        }
    }
    for (uint32_t i = 1; i < g->layers.count; i++) {
        x->count[i] += x->count[i - 1];
        x->sum[i] += x->sum[i - 1];
    }
}

/* Bytes of the values of a layer that can be dropped. */
static uint64_t msi_droppable_bytes(const msi_graph *g, uint32_t layer) {
    uint64_t bytes = 0;
    for (MSI_EACH_MADE(made, g, layer)) {
        bytes += msi_is_droppable(g, made.tensor) ? g->tensors.items[made.tensor].bytes : 0;
    }
    return bytes;
}

/* Whether a stage may begin at a layer: at most one value crosses, and it may be kept. */
static bool msi_is_cut(const msi_chain *c, const msi_crossings *x, uint32_t layer) {
    return x->count[layer] == 0 ||
           (x->count[layer] == 1 && !msi_is_drop_forced(c->graph, (uint32_t)x->sum[layer] - 1));
}

/* Cuts the graph where at most one value crosses; if these are too many stages, only where enough
   bytes lie between cuts. */
static void msi_cut_stages(msi_chain *c, const msi_crossings *x) {
    const msi_graph *g = c->graph;
    const uint32_t layers = g->layers.count;
    uint64_t all = 0;
    uint32_t cuts = 1;
    for (uint32_t i = 0; i < layers; i++) {
        all += msi_droppable_bytes(g, i);
        cuts += i > 0 && msi_is_cut(c, x, i);
    }
    const uint64_t least = cuts > MSI_CHAIN_STAGES ? all / (MSI_CHAIN_STAGES - 1) + 1 : 0;
    for (uint32_t i = 0; i < layers; i++) {
        msi_chain_stage *stage = &c->stages[i > 0 ? c->count - 1 : 0];
        if (i == 0 || (msi_is_cut(c, x, i) && stage->droppable_bytes >= least)) {
            stage = &c->stages[c->count++];
            stage->first = i;
            stage->input = i > 0 && x->count[i] ? (uint32_t)x->sum[i] - 1 : MSI_NONE;
            stage->input_bytes =
                stage->input == MSI_NONE ? 0 : msi_align(g->tensors.items[stage->input].bytes);
        }
        stage->droppable_bytes += msi_droppable_bytes(g, i);
        stage->end = i + 1;
        c->stage_of[i] = c->count - 1;
    }
}

/* Finds the stages; without memory, none. */
static void msi_find_stages(msi_chain *c) {
    const uint64_t layers = c->graph->layers.count + 1ull;
    const uint64_t bytes = layers * 2 * sizeof(uint64_t);
    msi_crossings x;
    x.count = (uint64_t *)msi_scratch(c->scorer, bytes);
    if (x.count) {
        x.sum = x.count + layers;
        msi_find_crossings(&x, c->graph);
        msi_cut_stages(c, &x);
        msi_release(c->scorer->allocator, x.count, bytes);
    }
}

/* Whether an option may drop a value that its stage makes: any value except the output. */
static bool msi_is_inner(const msi_chain *c, uint32_t number, uint32_t t) {
    return msi_is_droppable(c->graph, t) &&
           (number + 1 == c->count || c->stages[number + 1].input != t);
}

/* Drops a value of a stage, and with it the saved tensors that come back only together with it. */
static void msi_drop_in_stage(msi_chain *c, uint32_t number, uint32_t tensor, uint32_t option) {
    const msi_graph *g = c->graph;
    const uint32_t layer = g->tensors.items[tensor].producer;
    const msi_layer *l = &g->layers.items[layer];
    const bool together = g->tensors.items[tensor].kind == MSI_KIND_SAVED && !l->recompute;
    c->pricing.recomputed[layer] = 1;
    for (MSI_EACH_MADE(made, g, layer)) {
        const uint32_t t = made.tensor;
        const bool joins = together && made.slot >= l->count[MSI_GROUP_OUT] &&
                           msi_is_inner(c, number, t) && c->decisions[t].pass == 0;
        if (t == tensor || joins) {
            c->decisions[t].pass = 1;
            c->option_of[t] = (uint8_t)option;
        }
    }
}

/* Lists the values of a stage that are still kept, each as a move. */
static void msi_list_kept(msi_chain *c, uint32_t number) {
    const msi_graph *g = c->graph;
    c->move_count = 0;
    for (uint32_t i = c->stages[number].first; i < c->stages[number].end; i++) {
        for (MSI_EACH_MADE(made, g, i)) {
            if (msi_is_inner(c, number, made.tensor) && c->decisions[made.tensor].pass == 0) {
                msi_move *move = &c->moves[c->move_count++];
                memset(move, 0, sizeof *move);
                move->key = made.tensor;
                move->bytes_per_us = (double)g->tensors.items[made.tensor].bytes /
                                     (1e-3 + msi_price_us(&c->pricing, c->decisions, made.tensor));
            }
        }
    }
}

/* Drops `count` more values of a stage: those that free most bytes for their time. */
static void msi_drop_best(msi_chain *c, uint32_t number, uint32_t count, uint32_t option) {
    msi_list_kept(c, number);
    msi_sort_moves(c->moves, c->move_count);
    for (uint32_t k = 0; k < c->move_count && count > 0; k++) {
        if (c->decisions[c->moves[k].key].pass == 0) {
            msi_drop_in_stage(c, number, c->moves[k].key, option);
            count--;
        }
    }
}

/* How many times msi_drop_best can drop a value of a stage. */
static uint32_t msi_count_drops(const msi_chain *c, uint32_t number) {
    uint32_t count = 0;
    for (uint32_t i = c->stages[number].first; i < c->stages[number].end; i++) {
        const msi_layer *l = &c->graph->layers.items[i];
        bool joined = false;
        for (MSI_EACH_MADE(made, c->graph, i)) {
            const bool inner =
                msi_is_inner(c, number, made.tensor) && msi_is_choice(c->graph, made.tensor);
            const bool saved = made.slot >= l->count[MSI_GROUP_OUT];
            count += inner && (!saved || l->recompute || !joined);
            joined |= inner && saved;
        }
    }
    return count;
}

/* Finds the stage of each instruction, and where each stage begins and ends. An instruction before
   that of a layer belongs to this layer; updates and sums belong to the instruction before them. */
static void msi_mark_stages(msi_chain *c, const msi_program *p) {
    const msi_instruction *items = p->instructions.items;
    uint32_t *at = c->at.items;
    uint32_t stage = c->count - 1, i = 0;
    for (i = p->backward_end; i-- > 0;) {
        const bool of_layer = items[i].op == MSI_OP_FORWARD || items[i].op == MSI_OP_BACKWARD;
        stage = of_layer ? c->stage_of[items[i].target] : stage;
        at[i] = stage;
        stage = i == p->forward_end ? c->count - 1 : stage;
    }
    for (i = 1; i < p->backward_end; i++) {
        const bool after = items[i].op == MSI_OP_ADD || items[i].op == MSI_OP_UPDATE;
        at[i] = after && i != p->forward_end ? at[i - 1] : at[i];
    }
    i = 0;
    for (uint32_t k = 0; k < c->count; k++) {
        c->stages[k].forward = i;
        while (i < p->forward_end && at[i] == k) {
            i++;
        }
        c->stages[k].forward_end = i;
    }
    i = p->forward_end;
    for (uint32_t k = c->count; k-- > 0;) {
        c->stages[k].backward = i;
        while (i < p->backward_end && at[i] == k) {
            i++;
        }
        c->stages[k].backward_end = i;
    }
}

/* Adds a live range to an option of its stage: a value that can be dropped, or a workspace. */
static void msi_add_own(msi_chain *c, const msi_range *range, uint32_t home, uint32_t option) {
    const uint64_t bytes = msi_align(range->bytes), first = range->first;
    const uint64_t last = msi_counts_to(range);
    const bool value = range->role == MSI_ROLE_VALUE;
    msi_chain_stage *stage = &c->stages[home];
    if (stage->backward_end > stage->backward) {
        msi_add_range(c->own, msi_larger(first, stage->backward),
                      msi_smaller(last, stage->backward_end - 1ull), bytes);
    }
    if (first >= stage->forward_end) {
        return;
    }
    msi_add_range(c->own, first, msi_smaller(last, stage->forward_end - 1ull), bytes);
    if (value && home + 1 < c->count && stage[1].input == range->tensor) {
        stage[1].options[option].holds_input = range->last >= stage[1].backward;
        stage->reads_output |= option == 0 && range->last >= stage->backward;
    } else if (value && last >= stage->backward) {
        stage->options[option].kept_bytes += bytes;
    }
}

/* Sums the live ranges of the program: the stage's own in its instructions, all others as carried.
   Without memory, the scorer is short. */
static void msi_sum_stages(msi_chain *c, uint32_t option) {
    const msi_graph *g = c->graph;
    const msi_program *p = c->scorer->program;
    const uint32_t count = p->instructions.count;
    if (msi_is_short(c->scorer) || !MSI_SCRATCH_LIST(uint32_t, c->scorer, c->at, count + 2ull) ||
        !MSI_SCRATCH_LIST(uint64_t, c->scorer, c->bytes, 2 * (count + 2ull))) {
        return;
    }
    c->own = c->bytes.items;
    c->carried = c->own + count + 2;
    memset(c->own, 0, 2 * (count + 2ull) * sizeof *c->own);
    msi_mark_stages(c, p);
    for (uint32_t k = 0; k < c->count; k++) {
        c->stages[k].carried_bytes = 0;
    }
    for (uint32_t i = c->scorer->store->residents.count; i < p->ranges.count; i++) {
        const msi_range *range = &p->ranges.items[i];
        if (range->role == MSI_ROLE_WORKSPACE) {
            msi_add_own(c, range, c->stage_of[range->tensor], option);
        } else if (range->role == MSI_ROLE_VALUE && msi_is_droppable(g, range->tensor)) {
            const uint32_t layer = g->tensors.items[range->tensor].producer;
            msi_add_own(c, range, c->stage_of[layer], option);
        } else {
            const uint64_t bytes = msi_align(range->bytes);
            msi_add_range(c->carried, range->first, msi_counts_to(range), bytes);
            if (range->first < p->backward_end &&
                c->stages[c->at.items[range->first]].backward == range->first) {
                c->stages[c->at.items[range->first]].carried_bytes -= bytes; // not there before
            }
        }
    }
    for (uint32_t i = 1; i <= count; i++) {
        c->own[i] += c->own[i - 1];
        c->carried[i] += c->carried[i - 1];
    }
}

/* Fills in one option of all stages, from the program in which all stages have it. */
static void msi_measure_option(msi_chain *c, uint32_t option) {
    const msi_program *p = c->scorer->program;
    msi_sum_stages(c, option);
    for (uint32_t k = 0; k < c->count && !msi_is_short(c->scorer); k++) {
        msi_chain_stage *stage = &c->stages[k];
        msi_option *o = &stage->options[option];
        stage->carried_bytes += c->carried[stage->backward];
        for (uint32_t i = stage->forward; i < stage->forward_end; i++) {
            o->pass_bytes = msi_larger(o->pass_bytes, c->own[i]);
            o->first_bytes = msi_larger(o->first_bytes, c->own[i] + c->carried[i]);
        }
        for (uint32_t i = stage->backward; i < stage->backward_end; i++) {
            const msi_instruction *at = &p->instructions.items[i];
            o->backward_bytes = msi_larger(o->backward_bytes, c->own[i] + c->carried[i]);
            if (msi_is_again((msi_op)at->op)) {
                o->recompute_us +=
                    msi_again_us(&c->graph->layers.items[at->target], (msi_op)at->op);
            }
        }
    }
}

/* Times of a pass over a stage. The program at hand is the one that drops everything. Stages are
   timed from the first on, so marks on layers before this stage do no harm. */
static void msi_time_stage(msi_chain *c, uint32_t number) {
    const msi_graph *g = c->graph;
    msi_chain_stage *stage = &c->stages[number];
    const uint32_t output = number + 1 < c->count ? c->stages[number + 1].input : MSI_NONE;
    if (output != MSI_NONE) {
        c->leads[g->tensors.items[output].producer] = 1;
    }
    for (uint32_t i = stage->end; i-- > stage->first;) {
        const msi_layer *l = &g->layers.items[i];
        const msi_op way = msi_decided_way(g, c->decisions, i);
        const uint32_t reads = msi_op_reads(l, way, MSI_GROUP_IN);
        const double us = msi_again_us(l, way);
        stage->pass_us += c->leads[i] ? us : 0.0;
        stage->full_us += c->leads[i] || c->pricing.recomputed[i] ? us : 0.0;
        for (MSI_EACH(in, g, l, MSI_GROUP_IN)) {
            if (c->leads[i] && (reads >> in.slot & 1) && msi_is_droppable(g, in.tensor)) {
                c->leads[g->tensors.items[in.tensor].producer] = 1;
            }
        }
    }
    stage->last_us = stage->options[stage->option_count - 1].recompute_us;
}

static void msi_assign_output(msi_chain *c, uint32_t k, uint32_t depth) {
    if (k + 1 < c->count && c->stages[k + 1].input != MSI_NONE) {
        c->decisions[c->stages[k + 1].input].pass = depth;
    }
}

/* How many values of a stage an option drops: one more than the option before or, if there are more
   values than options, several more. */
static uint32_t msi_drops_of_option(uint32_t drops, uint32_t option, uint32_t options) {
    const uint32_t one_by_one = option < drops ? option : drops;
    return drops < options ? one_by_one : drops * option / (options - 1);
}

/* Measures each option of all stages. The first drops only values that no backward reads, the last
   all values that do not pass to the next stage. */
static void msi_find_options(msi_chain *c) {
    uint32_t drops[MSI_CHAIN_STAGES], most = 0;
    msi_decide_base(c->graph, c->search->early, c->decisions);
    for (uint32_t t = 0; t < c->graph->tensors.count; t++) {
        c->option_of[t] = c->decisions[t].pass > 0 ? 0 : UINT8_MAX;
    }
    for (uint32_t k = 0; k < c->count; k++) {
        msi_assign_output(c, k, 0);
        drops[k] = msi_count_drops(c, k);
        most = drops[k] > most ? drops[k] : most;
        c->stages[k].option_count = 1;
    }
    const uint32_t limit = MSI_CHAIN_OPTIONS, options = most < limit ? most + 1 : limit;
    for (uint32_t option = 0; option < options && !msi_is_short(c->scorer); option++) {
        for (uint32_t k = 0; k < c->count && option > 0; k++) {
            const uint32_t done = msi_drops_of_option(drops[k], option - 1, options);
            if (done < drops[k]) {
                c->stages[k].option_count = option + 1;
                msi_drop_best(c, k, msi_drops_of_option(drops[k], option, options) - done, option);
            }
        }
        (void)msi_estimate(c->scorer, c->decisions);
        msi_note_recomputed(&c->pricing, c->scorer->program);
        msi_measure_option(c, option);
    }
    for (uint32_t k = 0; k < c->count; k++) {
        msi_time_stage(c, k);
    }
}

/* Offers a way to train the subchain at hand with so many bytes. */
static void msi_offer(msi_chain *c, const msi_way *from, uint64_t bytes, float us) {
    const msi_pareto_point point = {bytes, us, from->kind, from->number};
    const uint32_t number = (uint32_t)sqrt((double)(int64_t)(bytes - c->low) * c->scale);
    msi_pareto_point *bucket = &c->buckets[number < c->width ? number : c->width - 1]; // rounding
    if (us < bucket->us || (us <= bucket->us && bytes < bucket->bytes)) {
        *bucket = point;
    }
    if (bytes == c->low && us < c->lowest.us) {
        c->lowest = point;
    }
}

/* Adds a way to those of the subchain at hand. */
static void msi_add_way(msi_chain *c, const msi_way *way) {
    const msi_pareto_point *a = way->a->points, *b = way->b->points;
    const msi_pareto_point *last_a = a + way->a->count - 1, *last_b = b + way->b->count - 1;
    msi_way *s = &c->ways[c->way_count++];
    *s = *way;
    s->low = msi_larger(s->floor, msi_larger(s->a_bytes + a->bytes, b->bytes));
    s->high = msi_larger(s->low, msi_larger(s->a_bytes + last_a->bytes, last_b->bytes));
    s->fastest_us = s->us + last_a->us + last_b->us;
    c->low = msi_smaller(c->low, s->low);
    if (s->fastest_us < c->fastest_us || (s->fastest_us <= c->fastest_us && s->high < c->high)) {
        c->fastest_us = s->fastest_us;
        c->high = s->high;
    }
}

/* Bytes up to which a way may be faster than the points offered so far: up to the first bucket
   whose reach is as fast as the way ever gets. */
static uint64_t msi_useful_bytes(const msi_chain *c, const msi_way *s) {
    uint32_t first = 0, end = c->width;
    while (first < end) {
        const uint32_t middle = (first + end) / 2;
        const bool reached = c->reach[middle] <= s->fastest_us;
        end = reached ? middle : end;
        first = reached ? first : middle + 1;
    }
    const double bytes = (first + 1.0) * (first + 1.0) / c->scale; // where the bucket ends
    return first == c->width ? c->high : msi_smaller(c->high, c->low + (uint64_t)bytes);
}

/* Offers a way at each number of bytes where it gets faster. */
static void msi_walk_way(msi_chain *c, const msi_way *s) {
    const msi_pareto_point *a = s->a->points, *b = s->b->points;
    const uint64_t useful = msi_useful_bytes(c, s), a_bytes = s->a_bytes;
    uint64_t bytes = s->low;
    if (bytes > useful) {
        return;
    }
    while (a_bytes + a[1].bytes <= bytes) {
        a++;
    }
    while (b[1].bytes <= bytes) {
        b++;
    }
    while (bytes <= useful) {
        msi_offer(c, s, bytes, s->us + a->us + b->us);
        const uint64_t next_a = a_bytes + a[1].bytes, next_b = b[1].bytes;
        bytes = next_a < next_b ? next_a : next_b;
        a += next_a == bytes; // no branch: it would be unpredictable
        b += next_b == bytes;
    }
}

static void msi_walk_ways(msi_chain *c) {
    for (uint32_t k = 0; k < c->way_count; k++) {
        float best = FLT_MAX;
        for (uint32_t i = 0; i < c->width && k % 8 == 0; i++) {
            best = c->buckets[i].us < best ? c->buckets[i].us : best;
            c->reach[i] = best;
        }
        msi_walk_way(c, &c->ways[k]);
    }
}

/* Bytes of a forward of stage k that keeps what an option says: in the first pass if t is the last
   stage of the chain, otherwise in a recomputation before the backward of stage t. */
static uint64_t msi_forward_bytes(const msi_chain *c, uint32_t k, uint32_t option, uint32_t t) {
    const msi_option *o = &c->stages[k].options[option];
    return t + 1 == c->count ? o->first_bytes : o->pass_bytes + c->stages[t].carried_bytes;
}

/* Bytes that stage t holds until its backward, when it keeps all that it can. */
static uint64_t msi_held_bytes(const msi_chain *c, uint32_t t) {
    const msi_chain_stage *stage = &c->stages[t];
    return stage->options[0].kept_bytes + (stage->reads_output ? stage[1].input_bytes : 0);
}

/* Adds the ways in which stage s is kept. */
static void msi_list_keep(msi_chain *c, bool kept, uint32_t s, uint32_t t) {
    const msi_chain_stage *stage = &c->stages[s];
    const bool first = t + 1 == c->count, done = kept && s == t; // its backward is left
    const uint64_t held = kept ? msi_held_bytes(c, t) : 0;
    msi_way from = MSI_ZERO_INIT;
    from.kind = MSI_WAY_KEEP;
    from.a = s < t ? msi_subchain_of(c, kept, s + 1, t) : &msi_no_subchain;
    from.b = &msi_no_subchain;
    for (uint32_t o = 0; o < (done ? 1 : stage->option_count); o++) {
        const msi_option *option = &stage->options[o];
        const uint64_t input = option->holds_input ? stage->input_bytes : 0;
        const uint64_t forward = held + stage->input_bytes + msi_forward_bytes(c, s, o, t);
        from.number = (uint8_t)o;
        from.floor = msi_larger(input + option->backward_bytes, done ? 0 : forward);
        const double again = first || done ? 0.0 : s == t ? stage->last_us : stage->full_us;
        from.us = (float)(done ? 0.0 : option->recompute_us + again);
        from.a_bytes = s < t ? input + option->kept_bytes : 0;
        msi_add_way(c, &from);
    }
}

/* Adds the ways that begin with a pass from s to k - 1 that keeps nothing. */
static void msi_list_passes(msi_chain *c, bool kept, uint32_t s, uint32_t t) {
    const bool first = t + 1 == c->count;
    const uint64_t start = c->stages[s].input_bytes;
    const uint64_t held = start + (kept ? msi_held_bytes(c, t) : 0);
    uint64_t floor = 0;
    double us = 0.0;
    for (uint32_t k = s + 1; k <= t; k++) {
        const msi_chain_stage *before = &c->stages[k - 1], *stage = &c->stages[k];
        const uint64_t input = k - 1 > s ? before->input_bytes : 0;
        const uint64_t pass = msi_forward_bytes(c, k - 1, before->option_count - 1, t);
        floor = msi_larger(floor, held + input + pass);
        us += first ? 0.0 : before->pass_us;
        msi_way from = MSI_ZERO_INIT;
        from.floor = floor;
        from.us = (float)us;
        from.number = (uint8_t)k;
        from.kind = MSI_WAY_CHECKPOINT;
        from.a = msi_subchain_of(c, kept, k, t);
        from.a_bytes = start;
        from.b = msi_subchain_of(c, false, s, k - 1);
        msi_add_way(c, &from);
        if (k < t) {
            const uint64_t forward = held + stage->input_bytes + msi_forward_bytes(c, k, 0, t);
            from.kind = MSI_WAY_INNER;
            from.floor = msi_larger(floor, forward);
            from.us = (float)(us + (first ? 0.0 : stage->full_us));
            from.a = msi_subchain_of(c, kept, k + 1, t);
            from.a_bytes = start + stage->options[0].kept_bytes;
            from.b = msi_subchain_of(c, true, s, k);
            msi_add_way(c, &from);
        }
    }
}

/* Memory for some points in one piece; NULL, and the scorer is short, if there is none. */
static msi_pareto_point *msi_reserve_points(msi_chain *c, uint32_t count) {
    if (c->pool_count == 0 || c->pool_used + count > MSI_CHAIN_POOL) {
        const uint64_t bytes = MSI_CHAIN_POOL * sizeof(msi_pareto_point);
        void *pool =
            c->pool_count < MSI_CHAIN_POOLS ? msi_alloc(c->scorer->allocator, bytes) : NULL;
        if (!pool) {
            (void)msi_run_short(c->scorer, "the solver", bytes);
            return NULL;
        }
        c->pools[c->pool_count++] = (msi_pareto_point *)pool;
        c->pool_used = 0;
    }
    return c->pools[c->pool_count - 1] + c->pool_used;
}

/* Finds the best ways to train stages s to t: those that are faster than all that take less. */
static void msi_fill_subchain(msi_chain *c, bool kept, uint32_t s, uint32_t t, uint32_t width) {
    msi_pareto_point *points = msi_is_short(c->scorer) ? NULL : msi_reserve_points(c, width + 2);
    if (!points) {
        return;
    }
    c->low = c->high = MSI_CHAIN_NEVER - 1;
    c->fastest_us = c->lowest.us = FLT_MAX;
    c->way_count = 0;
    c->width = width;
    msi_list_keep(c, kept, s, t);
    msi_list_passes(c, kept, s, t);
    c->scale = (double)width * (double)width / ((double)(c->high - c->low) + 1.0);
    for (uint32_t i = 0; i < width; i++) {
        c->buckets[i].us = FLT_MAX;
        c->buckets[i].bytes = UINT64_MAX;
    }
    msi_walk_ways(c);
    msi_subchain *subchain = msi_subchain_of(c, kept, s, t);
    subchain->points = points;
    *points = c->lowest;
    for (uint32_t i = 0; i < width; i++) {
        if (c->buckets[i].us < points->us - 1e-6f * points->us) {
            *++points = c->buckets[i];
        }
    }
    memset(++points, 0, sizeof *points);
    points->bytes = MSI_CHAIN_NEVER;
    subchain->count = (uint32_t)(points - subchain->points);
    c->pool_used += subchain->count + 1;
}

/* Subchains up to the end of the chain are few and part of every plan, so they get more points. */
static void msi_fill_subchains(msi_chain *c) {
    const uint32_t n = c->count;
    const uint32_t width =
        msi_clamp(MSI_CHAIN_WORK / (1 + (uint64_t)n * n * n), MSI_CHAIN_WIDTH, 512);
    for (uint32_t length = 1; length <= n; length++) {
        for (uint32_t s = 0; s + length < n; s++) {
            msi_fill_subchain(c, true, s, s + length - 1, width);
            msi_fill_subchain(c, false, s, s + length - 1, width);
        }
        msi_fill_subchain(c, false, n - length, n - 1, MSI_CHAIN_WIDEST);
    }
}

/* Decides what stage k keeps in the pass `depth`. */
static void msi_assign_stage(msi_chain *c, uint32_t k, uint32_t option, uint32_t depth) {
    for (uint32_t i = c->stages[k].first; i < c->stages[k].end; i++) {
        for (MSI_EACH_MADE(made, c->graph, i)) {
            if (msi_is_inner(c, k, made.tensor)) {
                c->decisions[made.tensor].pass = depth + (c->option_of[made.tensor] <= option);
            }
        }
    }
}

/* The points of a subchain have room for what they keep. Should one not, the smallest plan of the
   rest is taken. */
static uint64_t msi_bytes_left(uint64_t bytes, uint64_t kept) {
    MEMSCALE_ASSERT(kept <= bytes);
    return bytes - msi_smaller(bytes, kept);
}

/* Decides as the best plan of a subchain with so many bytes does. */
static void msi_assign_subchain(msi_chain *c, bool kept, uint32_t s, uint32_t t, uint64_t bytes,
                                uint32_t depth) {
    for (;;) {
        const msi_subchain *subchain = msi_subchain_of(c, kept, s, t);
        const msi_pareto_point *point = subchain->points;
        const uint64_t input = c->stages[s].input_bytes;
        for (uint32_t i = 1; i < subchain->count && point[1].bytes <= bytes; i++) {
            point++;
        }
        const uint32_t k = point->kind == MSI_WAY_KEEP ? s : point->number;
        const uint32_t option = point->kind == MSI_WAY_KEEP ? point->number : 0;
        const msi_option *keeps = &c->stages[k].options[option];
        if (point->kind == MSI_WAY_CHECKPOINT) {
            msi_assign_output(c, k - 1, depth);
            msi_assign_subchain(c, false, s, k - 1, bytes, depth + 1);
            bytes = msi_bytes_left(bytes, input);
            s = k;
            continue;
        }
        if (!kept || s != t) {
            msi_assign_stage(c, k, option, depth);
        }
        if (point->kind == MSI_WAY_INNER) {
            msi_assign_subchain(c, true, s, k, bytes, depth + 1);
        }
        if (k == t) {
            return;
        }
        msi_assign_output(c, k, depth);
        bytes = msi_bytes_left(bytes, keeps->kept_bytes);
        if (point->kind == MSI_WAY_INNER || keeps->holds_input) {
            bytes = msi_bytes_left(bytes, input);
        }
        s = k + 1;
    }
}

static const msi_subchain *msi_whole_chain(msi_chain *c) {
    return msi_subchain_of(c, false, 0, c->count - 1);
}

/* Estimates the plan of a point of the whole chain. */
static msi_score msi_estimate_point(msi_chain *c, uint32_t number) {
    const uint64_t bytes = msi_whole_chain(c)->points[number].bytes;
    msi_decide_base(c->graph, c->search->early, c->decisions);
    msi_assign_subchain(c, false, 0, c->count - 1, bytes, 0);
    return msi_search_estimate(c->search, c->decisions);
}

/* Lays out a point that was estimated, if it may fit, and proposes it unless its arena is smaller
   than that of a slower point. Notes a point with too many live bytes. Returns whether it fits. */
static bool msi_try_point(msi_chain *c, uint32_t number, msi_score *score, uint64_t least_bytes) {
    const bool fits = msi_fits(c->scorer, score, c->search->budget, 0);
    if (score->bytes == UINT64_MAX) {
        if (c->unfit_count < MSI_CHAIN_UNFIT) {
            c->unfit_number[c->unfit_count] = number;
            c->unfit[c->unfit_count++].score = *score;
        }
        return false;
    }
    if (score->bytes < least_bytes) {
        return false;
    }
    msi_propose(c->search, c->decisions, score);
    return fits;
}

/* Where no plan fits, lays out the points with too many live bytes, the fewest first: after one of
   these, few others may be the smallest. */
static void msi_try_unfit(msi_chain *c) {
    msi_search *search = c->search;
    for (uint32_t k;
         !search->fits && (k = msi_next_candidate(search, c->unfit, c->unfit_count)) != MSI_NONE;) {
        msi_propose_candidate(search, &c->unfit[k], c->decisions,
                              msi_estimate_point(c, c->unfit_number[k]));
    }
}

/* Finds a point for the budget by bisection: faster points take more bytes. The real program of a
   point takes less than the sum of its subchains, and its layout may waste some bytes, so the order
   is not perfect. A point counts only if it is in order with those that led to it: neither slower
   nor smaller than the one below, nor faster than the one above. Which points these are does not
   depend on the budget, so the points that count are a sorted list, in which to bisect. */
static void msi_search_points(msi_chain *c) {
    const bool few = c->graph->layers.count > MSI_CHAIN_VERY_LARGE;
    const uint32_t count = msi_whole_chain(c)->count, stride = few ? 1 + count / MSI_CHAIN_FEW : 1;
    uint32_t first = 0, end = 1 + (count - 1) / stride;
    uint64_t least_bytes = 0;
    double slowest_us = 1e300, fastest_us = 0.0;
    while (end - first > MSI_CHAIN_LEAF && !msi_is_short(c->scorer)) {
        const uint32_t middle = first + (end - first) / 2;
        msi_score score = msi_estimate_point(c, middle * stride);
        const bool ordered = score.us <= slowest_us && score.us >= fastest_us;
        const bool fits = ordered && msi_try_point(c, middle * stride, &score, least_bytes);
        if (fits) {
            least_bytes = score.bytes;
            slowest_us = score.us;
        }
        if (fits || !ordered || score.bytes < least_bytes) {
            first = middle + 1;
        } else {
            const bool too_slow = c->search->fits && score.us > c->search->best_score.us;
            fastest_us = score.us;
            end = too_slow ? first : middle;
        }
    }
    for (bool fits = false; end > first && !fits && !msi_is_short(c->scorer);) {
        msi_score score = msi_estimate_point(c, --end * stride);
        if (score.us <= slowest_us && score.us >= fastest_us) {
            fastest_us = score.us;
            fits = msi_try_point(c, end * stride, &score, least_bytes);
        }
    }
    msi_try_unfit(c);
}

static uint64_t msi_chain_bytes(const msi_graph *g) {
    return g->tensors.count * (uint64_t)(sizeof(msi_move) + sizeof(msi_tensor_decision) + 1) +
           g->layers.count * (uint64_t)(sizeof(uint32_t) + 1);
}

static uint64_t msi_subchains_bytes(const msi_chain *c) {
    return 2ull * c->count * c->count * sizeof *c->subchains;
}

/* Cuts the graph into stages. False, and the scorer is short, without memory. */
static bool msi_chain_init(msi_chain *c, msi_search *search) {
    const msi_scorer *s = search->scorer;
    const msi_graph *g = s->graph;
    c->search = search;
    c->scorer = s;
    c->graph = g;
    c->moves = (msi_move *)msi_scratch(s, msi_chain_bytes(g));
    if (!c->moves || !msi_pricing_init(&c->pricing, s)) {
        return false;
    }
    c->decisions = (msi_tensor_decision *)(void *)(c->moves + g->tensors.count);
    c->stage_of = (uint32_t *)(void *)(c->decisions + g->tensors.count);
    c->option_of = (uint8_t *)(void *)(c->stage_of + g->layers.count);
    c->leads = c->option_of + g->tensors.count;
    msi_find_stages(c);
    if (!msi_is_short(s)) {
        c->subchains = (msi_subchain *)msi_scratch(s, msi_subchains_bytes(c));
    }
    return !msi_is_short(s);
}

static void msi_chain_free(msi_chain *c) {
    const ms_allocator *a = c->scorer->allocator;
    msi_pricing_free(&c->pricing);
    MSI_LIST_FREE(uint32_t, a, c->at);
    MSI_LIST_FREE(uint64_t, a, c->bytes);
    for (uint32_t i = 0; i < c->pool_count; i++) {
        msi_release(a, c->pools[i], MSI_CHAIN_POOL * sizeof(msi_pareto_point));
    }
    msi_release(a, c->subchains, msi_subchains_bytes(c));
    msi_release(a, c->moves, msi_chain_bytes(c->graph));
    msi_release(a, c, sizeof *c);
}

/* Whether there are stages to choose from. A large graph, for which the search takes long, must not
   have most of its bytes in one stage. */
static bool msi_is_chain(const msi_chain *c) {
    uint64_t all = 0, most = 0;
    for (uint32_t k = 0; k < c->count; k++) {
        all += c->stages[k].droppable_bytes;
        most = msi_larger(most, c->stages[k].droppable_bytes);
    }
    return c->count > 1 && (c->graph->layers.count <= MSI_CHAIN_LARGE || most < all / 2);
}

/* Plans the graph as a chain, if it is one, and proposes the best plans. Returns whether most
   stages are a layer or two, so that hardly anything is left to choose. */
static bool msi_search_chain(msi_search *s) {
    msi_chain *c = (msi_chain *)msi_scratch(s->scorer, sizeof *c);
    bool fine = false;
    if (!c) {
        return false;
    }
    if (msi_chain_init(c, s) && msi_is_chain(c)) {
        fine = 2 * c->count >= c->graph->layers.count;
        msi_find_options(c);
        msi_fill_subchains(c);
        if (!msi_is_short(s->scorer)) {
            msi_search_points(c);
        }
    }
    msi_chain_free(c);
    return fine;
}

// ------------------------------------------------------------------------------------------------
// >>exhaustive  small graphs: every choice of values to drop; larger ones: a local search

/* Each value is a group of its own; if these are too many, the values of each layer are a group. A
   choice is a set of groups that are dropped, all in pass 1. Where trying all of them would take
   too long, a local search tries some, the same for every budget: it keeps those than which no
   other one is both smaller and faster, and goes from these to their neighbours. A peak is often
   held up at several instructions at once, and a drop that helps at one of them shows no effect; so
   the same is done with a smooth measure of the live bytes of all instructions in place of the
   peak. Afterwards all choices that were tried are a list. They are laid out in the order of their
   time or, if none fits, of their size. */
enum {
    MSI_ALL_GROUPS = 128,
    MSI_ALL_WORDS = MSI_ALL_GROUPS / 64,
    MSI_ALL_LAYERS = 128,
    MSI_ALL_WORK = 1 << 15, // layers that are lowered
    MSI_ALL_CHAIN = 32,     // groups of a chain
    MSI_ALL_SEEDS = 8       // random choices at the start of a local search
};

typedef struct msi_groups {
    uint64_t dropped[MSI_ALL_WORDS];
} msi_groups;

typedef struct msi_tried {
    msi_groups groups;
    bool explored; // its neighbours have been tried
} msi_tried;

/* Choices than which none is better in both respects. */
typedef struct msi_front_point {
    double size, us;
    uint32_t choice;
} msi_front_point;

typedef struct msi_front {
    msi_front_point *points; // size rises, time falls
    uint32_t count;
} msi_front;

typedef struct msi_exhaustive {
    msi_search *search;
    const msi_graph *graph;
    uint32_t group_count;
    uint32_t first[MSI_ALL_GROUPS + 1]; // per group: its first value in members
    uint32_t *members;                  // values by group
    uint32_t *group_of;                 // per tensor: its group, or MSI_NONE
    msi_tensor_decision *base;          // nothing is dropped by choice
    msi_tensor_decision *decisions;     // of the choice at hand
    uint32_t limit, count, tries_left;  // choices that may be tried, that were; tries
    uint32_t room;                      // for choices
    msi_tried *tried;
    msi_candidate *list;         // the same choices
    uint32_t *index, index_mask; // a hash table of the choices that were tried, from 1 on
    msi_front by_bytes, by_crowd;
    double crowd_unit; // of bytes
    uint64_t random;
} msi_exhaustive;

static uint32_t msi_random_below(msi_exhaustive *all, uint32_t limit) {
    all->random = msi_mix(all->random + 1);
    return (uint32_t)((all->random >> 32) * limit >> 32);
}

static bool msi_has_group(const msi_groups *s, uint32_t group) {
    return s->dropped[group / 64] >> (group % 64) & 1;
}

static void msi_flip_group(msi_groups *s, uint32_t group) {
    s->dropped[group / 64] ^= (uint64_t)1 << (group % 64);
}

/* Lists the groups; false: there are too many. */
static bool msi_list_groups(msi_exhaustive *all, bool by_layer) {
    const msi_graph *g = all->graph;
    uint32_t member = 0;
    all->group_count = 0;
    memset(all->group_of, 0xff, g->tensors.count * sizeof *all->group_of);
    for (uint32_t i = 0; i < g->layers.count; i++) {
        bool open = false;
        for (MSI_EACH_MADE(made, g, i)) {
            const uint32_t t = made.tensor;
            const bool joins = msi_is_choice(g, t);
            if (joins && (!open || !by_layer)) {
                if (all->group_count == MSI_ALL_GROUPS) {
                    return false;
                }
                all->first[all->group_count++] = member;
            }
            if (joins) {
                all->members[member++] = t;
                all->group_of[t] = all->group_count - 1;
                open = true;
            }
        }
    }
    all->first[all->group_count] = member;
    return all->group_count > 0;
}

static msi_score msi_estimate_groups(msi_exhaustive *all, const msi_groups *groups) {
    memcpy(all->decisions, all->base, msi_decisions_bytes(all->graph));
    for (uint32_t k = 0; k < all->group_count; k++) {
        for (uint32_t i = all->first[k]; msi_has_group(groups, k) && i < all->first[k + 1]; i++) {
            all->decisions[all->members[i]].pass = 1;
        }
    }
    return msi_search_estimate(all->search, all->decisions);
}

/* A smooth measure of the live bytes of the program at hand, close to a power of the peak. */
static double msi_crowd(const msi_exhaustive *all) {
    const msi_program *p = all->search->scorer->program;
    double sum = 0.0;
    for (uint32_t i = 0; i < p->instructions.count; i++) {
        double x = (double)p->live_bytes.items[i] * all->crowd_unit;
        x *= x;
        x *= x;
        x *= x;
        sum += x * x;
    }
    return sum;
}

/* Adds a choice to a front, and removes what it makes needless there. False: it does not belong
   there. */
static bool msi_join_front(msi_front *f, double size, double us, uint32_t choice) {
    uint32_t first = 0, end = f->count;
    while (first < end) {
        const uint32_t middle = (first + end) / 2;
        const bool before = f->points[middle].size <= size;
        first = before ? middle + 1 : first;
        end = before ? end : middle;
    }
    if (first > 0 && f->points[first - 1].us <= us) {
        return false;
    }
    while (first > 0 && f->points[first - 1].size >= size) {
        first--;
    }
    end = first;
    while (end < f->count && f->points[end].us >= us) {
        end++;
    }
    memmove(f->points + first + 1, f->points + end, (f->count - end) * sizeof *f->points);
    f->count = f->count - (end - first) + 1;
    f->points[first].size = size;
    f->points[first].us = us;
    f->points[first].choice = choice;
    return true;
}

/* Where a choice is in the hash table, or may be put. */
static uint32_t *msi_find_tried(const msi_exhaustive *all, const msi_groups *groups) {
    uint64_t hash = 0;
    for (int k = 0; k < MSI_ALL_WORDS; k++) {
        hash = msi_mix_in(hash, groups->dropped[k]);
    }
    uint32_t at = (uint32_t)hash & all->index_mask;
    while (all->index[at] != 0 &&
           memcmp(&all->tried[all->index[at] - 1].groups, groups, sizeof *groups) != 0) {
        at = (at + 1) & all->index_mask;
    }
    return &all->index[at];
}

static bool msi_may_try(const msi_exhaustive *all) {
    return all->count < all->limit && all->tries_left > 0 && !msi_is_short(all->search->scorer);
}

/* Tries a choice, unless it was tried before. */
static void msi_try_groups(msi_exhaustive *all, const msi_groups *groups) {
    uint32_t *at = msi_find_tried(all, groups);
    all->tries_left--;
    if (*at != 0) {
        return;
    }
    const msi_score score = msi_estimate_groups(all, groups);
    all->tried[all->count].groups = *groups; // not explored: the memory is zeroed
    all->list[all->count++].score = score;
    *at = all->count;
    if (!msi_is_short(all->search->scorer)) {
        (void)msi_join_front(&all->by_bytes, (double)score.live_bytes, score.us, all->count - 1);
        (void)msi_join_front(&all->by_crowd, msi_crowd(all), score.us, all->count - 1);
    }
}

/* The groups that may be dropped to lower the peak of the program at hand: those of a value that is
   idle there. */
static msi_groups msi_groups_at_peak(const msi_exhaustive *all) {
    const msi_program *p = all->search->scorer->program;
    msi_groups groups = MSI_ZERO_INIT;
    for (uint32_t i = all->search->scorer->store->residents.count; i < p->ranges.count; i++) {
        const msi_range *range = &p->ranges.items[i];
        const uint32_t group =
            msi_is_idle_at_peak(p, range) ? all->group_of[range->tensor] : MSI_NONE;
        if (group != MSI_NONE && !msi_has_group(&groups, group)) {
            msi_flip_group(&groups, group);
        }
    }
    return groups;
}

/* Tries the neighbours of a choice that may be better: with one group fewer dropped, or one more,
   which must lower the peak if that is what counts. */
static void msi_explore(msi_exhaustive *all, uint32_t choice, bool by_bytes) {
    const msi_groups start = all->tried[choice].groups;
    all->tried[choice].explored = true;
    (void)msi_estimate_groups(all, &start);
    const msi_groups helpful = msi_groups_at_peak(all);
    for (uint32_t k = 0; k < all->group_count && msi_may_try(all); k++) {
        msi_groups groups = start;
        if (!by_bytes || msi_has_group(&start, k) || msi_has_group(&helpful, k)) {
            msi_flip_group(&groups, k);
            msi_try_groups(all, &groups);
        }
    }
}

/* The next choice of a front to explore, from the smallest or from a random one on; or MSI_NONE. */
static uint32_t msi_pick_unexplored(msi_exhaustive *all, const msi_front *f, bool smallest) {
    const uint32_t start = smallest ? 0 : msi_random_below(all, f->count);
    for (uint32_t i = 0; i < f->count; i++) {
        const uint32_t choice = f->points[(start + i) % f->count].choice;
        if (!all->tried[choice].explored) {
            return choice;
        }
    }
    return MSI_NONE;
}

/* Tries a choice of a front with two or three random groups the other way. */
static void msi_try_random(msi_exhaustive *all, const msi_front *f) {
    const uint32_t choice = f->points[msi_random_below(all, f->count)].choice;
    msi_groups groups = all->tried[choice].groups;
    for (uint32_t k = 2 + msi_random_below(all, 2); k > 0; k--) {
        msi_flip_group(&groups, msi_random_below(all, all->group_count));
    }
    msi_try_groups(all, &groups);
}

/* Tries the plans of the greedy list, all of it whatever the budget is. */
static void msi_try_greedy(msi_exhaustive *all) {
    msi_greedy w;
    if (msi_greedy_init(&w, all->search)) {
        memcpy(w.decisions, all->base, msi_decisions_bytes(all->graph));
        w.score = msi_search_estimate(all->search, w.decisions);
        while (msi_may_try(all) && msi_next_plan(&w)) {
            msi_groups groups = MSI_ZERO_INIT;
            for (uint32_t i = 0; i < w.drops.count; i++) {
                const uint32_t group = all->group_of[w.drops.items[i]];
                if (group != MSI_NONE && !msi_has_group(&groups, group)) {
                    msi_flip_group(&groups, group);
                }
            }
            msi_try_groups(all, &groups);
            (void)msi_estimate(all->search->scorer, w.decisions); // of the next moves
        }
    }
    msi_greedy_free(&w);
}

/* The local search: begins with the plain choice, with all dropped, with random ones, and with
   those of the greedy list. It may try half of what an exhaustive search may: with all of that, a
   plan would take a quarter more time, for an arena that is a quarter of a percent smaller. */
static void msi_search_locally(msi_exhaustive *all) {
    all->limit /= 2;
    all->tries_left /= 2;
    msi_try_greedy(all);
    for (uint32_t seed = 0; seed < MSI_ALL_SEEDS && msi_may_try(all); seed++) {
        msi_groups groups = MSI_ZERO_INIT;
        for (uint32_t k = 0; k < all->group_count; k++) {
            if (msi_random_below(all, MSI_ALL_SEEDS - 1) < seed) {
                msi_flip_group(&groups, k);
            }
        }
        msi_try_groups(all, &groups);
    }
    for (uint32_t round = 0; msi_may_try(all); round++) {
        const msi_front *f = round % 2 ? &all->by_crowd : &all->by_bytes;
        const uint32_t choice = msi_pick_unexplored(all, f, round % 4 < 2);
        if (choice != MSI_NONE) {
            msi_explore(all, choice, f == &all->by_bytes);
        } else {
            msi_try_random(all, f);
        }
    }
}

static void msi_try_all(msi_exhaustive *all) {
    for (uint64_t mask = 0; mask < (uint64_t)1 << all->group_count && msi_may_try(all); mask++) {
        msi_groups groups = MSI_ZERO_INIT;
        groups.dropped[0] = mask;
        msi_try_groups(all, &groups);
    }
}

/* Lays out the choices that may be the best. */
static void msi_propose_tried(msi_exhaustive *all) {
    for (uint32_t k; (k = msi_next_candidate(all->search, all->list, all->count)) != MSI_NONE;) {
        msi_propose_candidate(all->search, &all->list[k], all->decisions,
                              msi_estimate_groups(all, &all->tried[k].groups));
    }
}

/* Memory for the choices, in one piece. */
static uint64_t msi_exhaustive_bytes(const msi_exhaustive *all) {
    return all->room *
               (uint64_t)(sizeof(msi_tried) + sizeof(msi_candidate) + 2 * sizeof(msi_front_point)) +
           2 * msi_decisions_bytes(all->graph) +
           (all->index_mask + 1ull + 2ull * all->graph->tensors.count) * sizeof(uint32_t);
}

static bool msi_exhaustive_init(msi_exhaustive *all, msi_search *search) {
    const msi_graph *g = search->scorer->graph;
    const uint32_t work = MSI_ALL_WORK, layers = g->layers.count;
    all->search = search;
    all->graph = g;
    all->limit = all->room = work / (layers < 16 ? 16 : layers);
    all->tries_left = 4 * all->limit; // many are of choices that were tried before
    all->index_mask = 1;
    while (all->index_mask < 2 * all->limit) {
        all->index_mask = 2 * all->index_mask + 1;
    }
    all->tried = (msi_tried *)msi_scratch(search->scorer, msi_exhaustive_bytes(all));
    if (!all->tried) {
        return false;
    }
    all->list = (msi_candidate *)(void *)(all->tried + all->limit);
    all->by_bytes.points = (msi_front_point *)(void *)(all->list + all->limit);
    all->by_crowd.points = all->by_bytes.points + all->limit;
    all->base = (msi_tensor_decision *)(void *)(all->by_crowd.points + all->limit);
    all->decisions = all->base + g->tensors.count;
    all->index = (uint32_t *)(void *)(all->decisions + g->tensors.count);
    all->members = all->index + all->index_mask + 1;
    all->group_of = all->members + g->tensors.count;
    msi_decide_base(g, search->early, all->base);
    (void)msi_estimate(search->scorer, all->base);
    all->crowd_unit = 1.0 / (1.0 + (double)search->scorer->program->peak_bytes);
    return !msi_is_short(search->scorer);
}

/* Tries choices of a graph that is not large, and proposes the best. A longer chain of layers is
   not searched locally: its own search is good enough. */
static void msi_search_exhaustive(msi_search *s, bool is_chain) {
    msi_exhaustive all = MSI_ZERO_INIT;
    if (s->scorer->graph->layers.count > MSI_ALL_LAYERS || msi_is_short(s->scorer)) {
        return;
    }
    if (msi_exhaustive_init(&all, s) &&
        (msi_list_groups(&all, false) || msi_list_groups(&all, true))) {
        if (all.group_count < 32 && 1u << all.group_count <= all.limit) {
            msi_try_all(&all);
        } else if (!is_chain || all.group_count <= MSI_ALL_CHAIN) {
            msi_search_locally(&all);
        }
        msi_propose_tried(&all);
    }
    msi_release(s->scorer->allocator, all.tried, msi_exhaustive_bytes(&all));
}

// ------------------------------------------------------------------------------------------------
// >>solve  from a budget to decisions: the best of all searches

/* What a plan is to be made for. */
typedef struct msi_request {
    msi_goal goal;
    uint64_t budget;
    uint32_t techniques; // mask of those that may be used
    ms_switch early_update;
    const msi_plan *largest; // the plan at the largest sizes, in whose arena this one must fit; for
                             // GOAL_FOLLOW any plan, whose decisions are taken; or NULL
    uint64_t room;           // bytes of that arena
} msi_request;

typedef struct msi_solver {
    const msi_request *request;
    const msi_scorer *scorer;
    msi_plan *plan;
    msi_score score; // of plan->decisions
    bool early;      // plan->decisions update params inside backward
} msi_solver;

/* Takes the offsets of the program at the largest sizes: it has the same live ranges with the same
   aliases, and none of them is smaller. */
static void msi_copy_offsets(msi_program *p, const msi_program *from) {
    MEMSCALE_ASSERT(p->ranges.count == from->ranges.count && p->blocks.count == from->blocks.count);
    for (uint32_t i = 0; i < p->blocks.count; i++) {
        p->blocks.items[i].offset = from->blocks.items[i].offset;
    }
    p->height = from->height;
}

/* Decides as the plan at the largest sizes did, which fits: with its decisions no live range is
   longer or larger than in that plan. If the layout wastes more all the same, the offsets of that
   plan are used. */
static void msi_follow(msi_solver *s) {
    const msi_plan *largest = s->request->largest;
    msi_plan *plan = s->plan;
    memcpy(plan->decisions, largest->decisions, msi_decisions_bytes(s->scorer->graph));
    s->score = msi_score_of(s->scorer, plan->decisions);
    s->early = false; // the updates stay where that plan has them
    plan->drops_live_bytes = 0;
    if (s->score.bytes > s->request->room && !msi_is_short(s->scorer)) {
        msi_copy_offsets(&plan->train, &largest->train);
        msi_copy_offsets(&plan->eval, &largest->eval);
        s->score.bytes = msi_arena_of(s->scorer->store, &plan->train, &plan->eval);
    }
}

/* The largest sum of live bytes, in training or eval, of what was scored. */
static uint64_t msi_live_of(const msi_scorer *s, const msi_score *score) {
    return msi_larger(score->live_bytes, s->store->resident_bytes + s->eval->peak_bytes);
}

/* Places the updates of the plan at hand inside backward. */
static void msi_begin_early(msi_solver *s, msi_greedy *w) {
    const uint64_t live_bytes = msi_live_of(s->scorer, &w->score);
    w->search->early = true;
    msi_place_updates(w->graph, w->decisions, true, 0);
    w->score = msi_search_estimate(w->search, w->decisions);
    s->plan->early_freed_bytes = (int64_t)(live_bytes - msi_live_of(s->scorer, &w->score));
}

/* The first plans of the greedy list. The plain plan is scored first, for its size and time. Then
   forced drops are added, and then, if that is allowed and the budget requires it, updates inside
   backward. The first that fits is proposed. True: it is the one to take. With forced drops the
   search goes on, since a plan that keeps what their recomputation reads may be faster. */
static bool msi_begin_list(msi_solver *s, msi_greedy *w) {
    const msi_request *r = s->request;
    const bool may_be_early = r->techniques & MSI_EARLY_UPDATE;
    const bool always_early = may_be_early && r->early_update == MS_SWITCH_ON;
    w->score = msi_score_of(w->scorer, w->decisions);
    s->plan->plain_bytes = w->score.bytes;
    s->plan->plain_live_bytes = msi_live_of(s->scorer, &w->score);
    s->plan->plain_step_us = w->search->least_us = w->score.us;
    if (r->goal == MSI_GOAL_PLAIN) {
        return true;
    }
    msi_decide_base(w->graph, false, w->decisions);
    const bool forced =
        memcmp(w->decisions, s->plan->decisions, msi_decisions_bytes(w->graph)) != 0;
    if (forced) {
        w->score = msi_search_estimate(w->search, w->decisions);
        (void)msi_fits(w->scorer, &w->score, MSI_NO_BUDGET, 0);
    }
    bool fits = !always_early && msi_add_prefix(w) && w->score.bytes <= w->search->budget;
    if (!fits && may_be_early) {
        msi_begin_early(s, w);
        fits = msi_add_prefix(w) && msi_fits(w->scorer, &w->score, w->search->budget, 0);
    }
    if (fits) {
        msi_propose(w->search, w->decisions, &w->score);
    }
    return fits && !forced;
}

/* Scores the drops of a plan that updates params inside backward without these updates, to tell
   which of both frees how much. */
static void msi_score_drops(msi_solver *s) {
    const msi_graph *g = s->scorer->graph;
    msi_place_updates(g, s->plan->decisions, false, 0);
    const msi_score score = msi_estimate(s->scorer, s->plan->decisions);
    s->plan->drops_live_bytes = msi_live_of(s->scorer, &score);
    msi_place_updates(g, s->plan->decisions, true, 0);
}

/* Whether updates may be delayed again: see msi_relax_updates. The large arena of a large graph, if
   it has gaps, would hardly be met to the byte. */
static bool msi_may_relax(const msi_solver *s) {
    const bool may_be_met = s->scorer->graph->layers.count <= MSI_POLISH_LAYERS ||
                            s->score.bytes == s->score.live_bytes;
    return s->early && s->request->early_update != MS_SWITCH_ON && may_be_met;
}

/* Whether no search has to go on. */
static bool msi_is_found(const msi_search *s) {
    return s->any && s->fits;
}

/* Whether a plan will be executed. */
static bool msi_is_to_run(const msi_request *r, uint64_t arena_bytes) {
    return r->goal != MSI_GOAL_ANY && (r->goal != MSI_GOAL_TRY || arena_bytes <= r->budget);
}

/* Searches on from the first plans: as a chain, greedily, and exhaustively; takes the best plan.
   What is mostly best comes first, since plans that cannot win are not laid out. */
static void msi_search_all(msi_solver *s, msi_greedy *w) {
    const msi_request *r = s->request;
    msi_search *search = w->search;
    const bool may_drop = r->techniques & MSI_CHECKPOINTING, early = search->early;
    const bool is_chain = may_drop && msi_search_chain(search), cut = search->found;
    if (!msi_is_found(search)) {
        msi_search_greedy(w, may_drop);
    }
    search->early = early;
    search->enough = search->budget; // which plans fit is all that matters here
    if (may_drop && !msi_is_found(search) &&
        (!cut || s->scorer->graph->layers.count <= MSI_CHAIN_VERY_LARGE)) {
        msi_search_segments(search);
    }
    if (may_drop && !msi_is_found(search)) {
        msi_search_exhaustive(search, is_chain);
    }
    s->early = search->best_early;
    if (s->early) {
        msi_score_drops(s);
    }
    s->score = search->best_score;
    const bool known = !search->fits || s->score.bytes == s->score.live_bytes; // not ended early
    if (!msi_is_to_run(r, s->score.bytes) || (known && msi_may_relax(s))) {
        /* It was laid out when it was found, and will be when its updates are delayed. */
        s->score = msi_estimate(s->scorer, s->plan->decisions);
        s->score.bytes = search->best_score.bytes;
    } else {
        s->score = msi_score_of(s->scorer, s->plan->decisions);
    }
    MEMSCALE_ASSERT(msi_is_short(s->scorer) || s->score.us <= search->best_score.us);
}

/* Delays updates inside backward as long as the arena does not grow. The weights that the backward
   of a layer has just read lie in the caches of several cores, where writing them is slow: measured
   on two cores, AdamW ran at 15 GB/s right after the layer, and at 90 GB/s some 30 MB of traffic
   later. The predicted time must stay as it is, too: plans were compared by it. */
static void msi_relax_updates(msi_solver *s) {
    static const uint64_t lags[] = {64u << 20, 32u << 20, 16u << 20, 8u << 20, 0};
    const uint64_t arena_bytes = s->score.bytes;
    const double us = s->score.us;
    for (int i = 0; i < (int)(sizeof lags / sizeof lags[0]) && !msi_is_short(s->scorer); i++) {
        msi_place_updates(s->scorer->graph, s->plan->decisions, true, lags[i]);
        s->score = msi_estimate(s->scorer, s->plan->decisions);
        if (msi_fits(s->scorer, &s->score, arena_bytes, 0) && s->score.bytes == arena_bytes &&
            !(s->score.us < us) && !(s->score.us > us)) {
            break;
        }
    }
}

/* Chooses the decisions, and leaves the program lowered and laid out. */
static void msi_choose_plan(msi_solver *s, msi_greedy *w) {
    const msi_request *r = s->request;
    if (msi_begin_list(s, w)) {
        s->score = w->score; // the decisions are in place
        s->early = w->search->early;
    } else {
        msi_search_all(s, w);
    }
    if (r->largest && s->score.bytes > r->room) {
        msi_follow(s);
    }
    if (msi_is_to_run(r, s->score.bytes) && msi_may_relax(s)) {
        msi_relax_updates(s);
    }
}

/* Makes the decisions, the training program and the sizes of a plan that has its eval program. */
static void msi_solve(const msi_scorer *scorer, const msi_request *request, msi_plan *plan) {
    msi_greedy greedy;
    msi_search search = MSI_ZERO_INIT;
    msi_solver s = MSI_ZERO_INIT;
    search.scorer = scorer;
    search.budget = request->goal == MSI_GOAL_SMALLEST ? 0 : request->budget; // 0: no plan fits
    search.any = request->goal == MSI_GOAL_ANY;
    search.best = plan->decisions;
    s.scorer = scorer;
    s.request = request;
    s.plan = plan;
    if (request->goal == MSI_GOAL_FOLLOW) {
        msi_follow(&s);
        plan->arena_bytes = s.score.bytes;
        return;
    }
    msi_decide_plain(scorer->graph, plan->decisions);
    if (msi_greedy_init(&greedy, &search)) {
        msi_choose_plan(&s, &greedy);
    }
    msi_greedy_free(&greedy);
    plan->arena_bytes = s.score.bytes;
}

// ------------------------------------------------------------------------------------------------
// >>plan  the life cycle of plans: for the largest sizes, and for others in the same arena

/* What a technique takes off the peak of live bytes: see ms_memory_report.freed_bytes. */
static int64_t msi_freed_bytes(const msi_store *store, const msi_plan *plan,
                               ms_technique technique) {
    const uint64_t peak = msi_larger(plan->train.peak_bytes, plan->eval.peak_bytes);
    const int64_t freed = (int64_t)(plan->plain_live_bytes - store->resident_bytes - peak);
    const int64_t last = (int64_t)(plan->drops_live_bytes - store->resident_bytes - peak);
    const int64_t early = !msi_updates_inside(&plan->train)  ? 0
                          : plan->train.recompute_count == 0 ? freed // all of it
                          : plan->drops_live_bytes == 0      ? plan->early_freed_bytes
                                                             : (plan->early_freed_bytes + last) / 2;
    return technique == MS_TECHNIQUE_EARLY_UPDATE    ? early
           : technique == MS_TECHNIQUE_CHECKPOINTING ? freed - early
                                                     : 0;
}

static void msi_plan_free(const ms_model *m, msi_plan *plan) {
    const ms_allocator *a = &m->config.allocator;
    if (!plan) {
        return;
    }
    for (int i = 0; i < MSI_RECORDING_COUNT; i++) {
        if (plan->recordings[i].handle) {
            m->config.backend.recording_release(m->device, plan->recordings[i].handle);
        }
    }
    msi_program_free(a, &plan->train);
    msi_program_free(a, &plan->eval);
    msi_release(a, plan->decisions, msi_decisions_bytes(&m->graph));
    msi_release(a, plan, sizeof *plan);
}

static void msi_plans_free(const ms_model *m, msi_plan *plans) {
    while (plans) {
        msi_plan *next = plans->next;
        msi_plan_free(m, plans);
        plans = next;
    }
}

/* The budget in force: as configured, or a share of what the device has left, by ms_set_hardware or
   by its own account, which is then increased by what the model itself holds. */
static uint64_t msi_budget(const ms_model *m) {
    const ms_hardware *given = &m->sources.given;
    double most = (double)(given->free_bytes ? given->free_bytes : given->total_bytes);
    if (m->config.memory_budget_bytes) {
        return m->config.memory_budget_bytes;
    }
    if (!m->sources.is_given || !(most > 0.0)) {
        ms_hardware hardware;
        memset(&hardware, 0, sizeof hardware);
        m->config.backend.hardware(m->config.backend.user, &hardware);
        most = (double)hardware.free_bytes;
        if (m->run.store && m->run.store->memory && most > 0.0) {
            most += (double)m->run.store->resident_bytes + (double)m->run.store->transient_bytes;
        }
    }
    const double share = most * m->config.target_utilization;
    return most > 0.0 && share < 9e18 ? (uint64_t)share : UINT64_MAX;
}

/* A budget of 0 stands for a share of the free memory, which not every platform tells. */
static ms_result msi_check_budget(ms_model *m) {
    return m->config.memory_budget_bytes || msi_budget(m) < UINT64_MAX
               ? MS_RESULT_OK
               : msi_fail(
                     m, MS_RESULT_INVALID,
                     "the budget is 0, a share of the memory that is free, and backend %s does "
                     "not know how much that is here: set ms_config.memory_budget_bytes or "
                     "call ms_set_budget",
                     m->config.backend.name);
}

/* An empty plan, or NULL. */
static msi_plan *msi_new_plan(const ms_model *m) {
    const ms_allocator *a = &m->config.allocator;
    const uint64_t bytes = msi_decisions_bytes(&m->graph);
    msi_plan *plan = (msi_plan *)msi_alloc_zeroed(a, sizeof *plan);
    if (plan) {
        plan->decisions = (msi_tensor_decision *)msi_alloc_zeroed(a, bytes);
    }
    if (plan && !plan->decisions) {
        msi_release(a, plan, sizeof *plan);
        return NULL;
    }
    return plan;
}

/* Lowers and lays out the eval program. It keeps nothing, so it does not depend on decisions. */
static void msi_make_eval(const msi_scorer *s, msi_plan *plan) {
    msi_lower_eval(s->lowering, &plan->eval);
    msi_complete(s, &plan->eval);
    msi_lay_out(s, &plan->eval, 0);
}

/* Gives the live ranges the offsets of their blocks. */
static void msi_resolve(const msi_store *store, msi_program *p) {
    for (uint32_t i = store->residents.count; i < p->ranges.count; i++) {
        p->ranges.items[i].offset = p->blocks.items[p->ranges.items[i].block].offset;
    }
}

/* Prepares a scorer for the decisions of a plan; `lowering` and `shortage` are the caller's, for
   its use. False without memory. */
static bool msi_scorer_init(msi_scorer *s, const ms_model *m, const msi_store *store,
                            msi_plan *plan, msi_lowering *lowering, msi_shortage *shortage) {
    s->graph = &m->graph;
    s->costs = &m->costs;
    s->store = store;
    s->allocator = &m->config.allocator;
    s->checks_layouts = m->config.debug;
    s->lowering = lowering;
    s->program = &plan->train;
    s->eval = &plan->eval;
    s->shortage = shortage;
    shortage->what = NULL;
    return msi_lowering_init(lowering, s->graph, store, &m->optimizer, s->allocator) ||
           msi_run_short(s, "the plan", msi_lowering_bytes(s->graph));
}

/* Solves into an empty plan. Returns what there was no memory for, if anything. */
static msi_shortage msi_fill_plan(ms_model *m, const msi_store *store, msi_plan *plan,
                                  const msi_request *request) {
    msi_shortage shortage;
    msi_lowering lowering;
    msi_scorer s;
    if (!msi_scorer_init(&s, m, store, plan, &lowering, &shortage)) {
        return shortage;
    }
    msi_find_times(m);
    msi_make_eval(&s, plan);
    msi_solve(&s, request, plan);
    msi_lowering_free(&lowering);
    const uint64_t moments = 2ull * plan->train.instructions.count;
    if (m->run.timing && !MSI_RESERVE(double, s.allocator, plan->train.measured, moments)) {
        msi_run_short(&s, "the times of the plan", moments * sizeof(double));
    }
    if (msi_is_to_run(request, plan->arena_bytes) && !msi_is_short(&s)) {
        msi_resolve(store, &plan->train);
        msi_resolve(store, &plan->eval);
    }
    return shortage;
}

/* Makes a new plan for the graph as it is, which has been checked. It must fit into the arena of
   the plan for the largest sizes, if that is not NULL. */
static ms_result msi_make_plan(ms_model *m, const msi_store *store, msi_goal goal, uint64_t budget,
                               const msi_plan *largest, msi_plan **made) {
    const uint64_t room = msi_room_of(store);
    const uint32_t techniques = m->wrapped.choice.techniques;
    const msi_request request = {
        goal, largest ? room : budget, techniques, m->config.early_update, largest, room};
    msi_plan *plan = msi_new_plan(m);
    *made = NULL;
    if (!plan) {
        return msi_fail_memory(m, "the plan", sizeof *plan + msi_decisions_bytes(&m->graph));
    }
    plan->budget_bytes = budget;
    msi_get_sizes(&m->graph, plan->sizes);
    const msi_shortage shortage = msi_fill_plan(m, store, plan, &request);
    if (shortage.what) {
        msi_plan_free(m, plan);
        return msi_fail_memory(m, shortage.what, shortage.bytes);
    }
    *made = plan;
    return MS_RESULT_OK;
}

/* Plans at `sizes` (NULL: the largest). The plan must fit into the arena of `largest`, if that is
   not NULL. */
static ms_result msi_plan_at(ms_model *m, const msi_store *store, msi_goal goal,
                             const int64_t *sizes, const msi_plan *largest, msi_plan **made) {
    int64_t old[MS_LIMIT_AXES];
    msi_get_sizes(&m->graph, old);
    msi_set_sizes(&m->graph, sizes);
    const uint64_t budget = largest ? largest->budget_bytes : msi_budget(m);
    const ms_result result = msi_make_plan(m, store, goal, budget, largest, made);
    msi_set_sizes(&m->graph, old);
    return result;
}

/* Makes a store and the list of plans for the graph, which has been checked: the plan at the
   present sizes, and the plan at the largest sizes after it, if these differ. If no plan fits the
   budget, the smallest is made. */
static ms_result msi_make_plans(ms_model *m, msi_goal goal, msi_store **store, msi_plan **plans) {
    int64_t sizes[MS_LIMIT_AXES];
    bool alone = true; // no other plan follows this one
    msi_get_sizes(&m->graph, sizes);
    for (uint32_t a = 0; a < m->graph.axis_count; a++) {
        alone &= sizes[a] == m->graph.axes[a].largest;
    }
    *plans = NULL;
    ms_result result = msi_make_store(m, store);
    MSI_THEN(result, msi_plan_at(m, *store, alone && goal == MSI_GOAL_BUDGET ? MSI_GOAL_TRY : goal,
                                 NULL, NULL, plans));
    if (result == MS_RESULT_OK) {
        (*store)->transient_bytes = (*plans)->arena_bytes - (*store)->resident_bytes;
    }
    if (result == MS_RESULT_OK && !alone) {
        msi_plan *now;
        result = msi_plan_at(m, *store, goal, sizes, *plans, &now);
        if (now) {
            now->next = *plans;
            *plans = now;
        }
    }
    if (result != MS_RESULT_OK) {
        msi_plans_free(m, *plans);
        msi_store_free(m, *store);
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>policy  which mode to plan for, and what helps where nothing fits

static void msi_plans_and_store_free(ms_model *m, msi_store *store, msi_plan *plans) {
    msi_plans_free(m, plans);
    msi_store_free(m, store);
}

static const msi_plan *msi_plan_at_largest(const msi_plan *plans) {
    return plans->next ? plans->next : plans;
}

/* The smallest arena of plans that may use these techniques. */
static ms_result msi_least_arena(ms_model *m, uint32_t techniques, uint64_t *bytes) {
    const uint32_t old = m->wrapped.choice.techniques;
    msi_store *store;
    msi_plan *plans;
    m->wrapped.choice.techniques = techniques;
    const ms_result result = msi_make_plans(m, MSI_GOAL_SMALLEST, &store, &plans);
    m->wrapped.choice.techniques = old;
    if (result == MS_RESULT_OK) {
        *bytes = msi_room_of(store);
        msi_plans_and_store_free(m, store, plans);
    }
    return result;
}

/* Gives the batch another size: the foremost axis of an input, if there is one. Otherwise the first
   dim of the first input stands for it, and all that is computed from that input is assumed to
   shrink in proportion, wherever its shape holds the batch: alone, as a factor of the first dim, or
   later. The graph has the largest sizes of its axes until msi_resizing_end. */
typedef struct msi_resizing {
    ms_model *model;
    ms_result result;     // sticky
    uint32_t input, axis; // MSI_NONE: there is no axis
    int64_t declared;     // size
    int64_t *follows;     // per tensor: its declared first dim if it shrinks in proportion, else 0
    int64_t sizes[MS_LIMIT_AXES]; // of the axes before
} msi_resizing;

/* The first dim of an input that shrinks with one of this size: it has the same factor. */
static int64_t msi_common_dim(const msi_tensor *t, int64_t size) {
    const int64_t dim =
        t->kind == MSI_KIND_INPUT && t->view.shape.rank > 0 ? t->view.shape.dim[0] : 0;
    return dim > 1 && (dim % size == 0 || size % dim == 0) ? dim : 0;
}

static void msi_mark_followers(msi_resizing *z) {
    const msi_graph *g = &z->model->graph;
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        z->follows[t] = msi_common_dim(&g->tensors.items[t], z->declared);
    }
    for (uint32_t i = 0; i < g->layers.count; i++) {
        bool any = false;
        for (MSI_EACH(in, g, &g->layers.items[i], MSI_GROUP_IN)) {
            any |= z->follows[in.tensor] > 0;
        }
        for (MSI_EACH_MADE(made, g, i)) {
            const ms_shape *shape = &g->tensors.items[made.tensor].view.shape;
            z->follows[made.tensor] = any && shape->rank > 0 ? shape->dim[0] : 0;
        }
    }
}

/* The share size / whole of a count, rounded up. */
static int64_t msi_share(int64_t count, int64_t size, int64_t whole) {
    const double rest = (double)(count % whole) * (double)size / (double)whole;
    const int64_t part = (int64_t)rest;
    return count / whole * size + part + ((double)part < rest);
}

static void msi_resize(msi_resizing *z, int64_t size) {
    msi_graph *g = &z->model->graph;
    if (z->axis != MSI_NONE) {
        g->axes[z->axis].largest = size;
        msi_set_sizes(g, NULL);
    }
    for (uint32_t i = 0; i < g->tensors.count; i++) {
        msi_tensor *t = &g->tensors.items[i];
        if (z->axis == MSI_NONE && z->follows[i]) {
            ms_shape *shape = &t->view.shape;
            shape->dim[0] = z->follows[i];
            const int64_t count = (int64_t)ms_shape_count(shape);
            shape->dim[0] = msi_share(z->follows[i], size, z->declared);
            t->bytes =
                (uint64_t)msi_share(count, size, z->declared) * ms_dtype_bytes(t->view.dtype);
        }
        t->largest_bytes = t->bytes;
    }
}

/* The input that tells the batch, or MSI_NONE: the first that has the foremost axis, otherwise the
   first with a dim. */
static uint32_t msi_find_batch(const msi_graph *g, uint32_t *axis) {
    int foremost = MS_LIMIT_RANK;
    uint32_t found = MSI_NONE;
    *axis = MSI_NONE;
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const ms_shape *shape = &g->tensors.items[t].view.shape;
        if (g->tensors.items[t].kind != MSI_KIND_INPUT || shape->rank == 0) {
            continue;
        }
        found = found == MSI_NONE ? t : found;
        for (int dim = 0; dim < shape->rank && dim < foremost; dim++) {
            if (shape->axes[dim]) {
                found = t;
                foremost = dim;
                *axis = msi_lowest_bit(shape->axes[dim]);
            }
        }
    }
    return found;
}

/* False: there is nothing to resize, or no memory, which z->result says. */
static bool msi_resizing_begin(msi_resizing *z, ms_model *m) {
    msi_graph *g = &m->graph;
    const size_t bytes = g->tensors.count * sizeof *z->follows;
    memset(z, 0, sizeof *z);
    z->input = msi_find_batch(g, &z->axis);
    if (z->input == MSI_NONE) {
        return false;
    }
    z->follows = (int64_t *)msi_alloc_zeroed(&m->config.allocator, bytes);
    if (!z->follows) {
        z->result = msi_fail_memory(m, "a search for a smaller size", bytes);
        return false;
    }
    z->model = m;
    z->declared = z->axis == MSI_NONE ? g->tensors.items[z->input].view.shape.dim[0]
                                      : g->axes[z->axis].largest;
    msi_get_sizes(g, z->sizes);
    msi_set_sizes(g, NULL);
    if (z->axis == MSI_NONE) {
        msi_mark_followers(z);
    }
    return true;
}

/* Gives everything its declared size again. */
static void msi_resizing_end(msi_resizing *z) {
    ms_model *m = z->model;
    msi_resize(z, z->declared);
    msi_set_sizes(&m->graph, z->sizes);
    msi_release(&m->config.allocator, z->follows, m->graph.tensors.count * sizeof *z->follows);
}

/* A plan at a size: with the decisions of another plan, by one lowering and one layout, or, for
   NULL, a plan for the budget. NULL after an error. */
static msi_plan *msi_plan_resized(msi_resizing *z, uint64_t budget, int64_t size,
                                  const msi_plan *decided) {
    const msi_goal goal = decided ? MSI_GOAL_FOLLOW : MSI_GOAL_ANY;
    msi_store *store;
    msi_plan *plan = NULL;
    msi_resize(z, size);
    MSI_THEN(z->result, msi_make_store(z->model, &store));
    if (z->result == MS_RESULT_OK) {
        store->transient_bytes = UINT64_MAX >> 1; // any arena is small enough
        z->result = msi_make_plan(z->model, store, goal, budget, decided, &plan);
        msi_store_free(z->model, store);
    }
    return plan;
}

/* Raises a size that fits the budget (0: nothing is known) as far as it fits with the decisions of
   a plan; `too_large` does not fit. Arenas grow almost linearly with the size, so a few guesses
   along a straight line are enough. */
static int64_t msi_raise_size(msi_resizing *z, const msi_plan *decided, uint64_t budget,
                              int64_t size, int64_t too_large) {
    double low_bytes = 0.0, high_bytes = (double)budget;
    for (int guesses = 0; too_large - size > 1 && z->result == MS_RESULT_OK; guesses++) {
        const double share = ((double)budget - low_bytes) / (high_bytes - low_bytes);
        int64_t guess = size == 0 ? 1 : size + (too_large - size) / 2;
        if (size > 0 && guesses % 3 != 2 && share > 0.0 && share < 1.0) {
            guess = size + (int64_t)(share * (double)(too_large - size));
        }
        guess = guess <= size ? size + 1 : guess >= too_large ? too_large - 1 : guess;
        msi_plan *plan = msi_plan_resized(z, budget, guess, decided);
        if (plan && plan->arena_bytes <= budget) {
            size = guess;
            low_bytes = (double)plan->arena_bytes;
        } else if (plan) {
            too_large = guess;
            high_bytes = (double)plan->arena_bytes;
        }
        msi_plan_free(z->model, plan);
    }
    return size;
}

enum { MSI_RESIZE_TRIES = 24, MSI_RESIZE_LAYERS = 64, MSI_RESIZE_LARGEST = 20000 };

/* The largest size that fits the budget: 0 for none, -1 if it takes too long to find. The decisions
   of the smallest plan carry over to sizes nearby. The solver then plans for the largest size that
   fits with them and, if the graph is not large, for larger ones, of which mostly one is tried. */
static int64_t msi_largest_size(msi_resizing *z, uint64_t budget, const msi_plan *smallest) {
    const uint32_t layers = z->model->graph.layers.count;
    int64_t fits = 0, too_large = z->declared, next = 1;
    if (layers <= MSI_RESIZE_LARGEST) {
        next = msi_raise_size(z, smallest, budget, 0, too_large);
        next = next > 0 ? next : 1;
    }
    for (int tries = 0;
         tries < MSI_RESIZE_TRIES && too_large - fits > 1 && layers <= MSI_RESIZE_LARGEST;
         tries++) {
        msi_plan *plan = msi_plan_resized(z, budget, next, NULL);
        if (!plan) {
            break;
        }
        if (plan->arena_bytes > budget) {
            too_large = next--;
        } else {
            fits = next++;
            tries = layers > MSI_RESIZE_LAYERS ? MSI_RESIZE_TRIES : tries;
        }
        msi_plan_free(z->model, plan);
    }
    return fits > 0 || too_large == 1 ? fits : -1;
}

/* An error text that is being written, and the first error on the way. */
typedef struct msi_text {
    ms_model *model;
    ms_result result; // sticky
    size_t length;
    char text[MSI_ERROR_BYTES];
} msi_text;

MEMSCALE_PRINTF(2, 3)
static void msi_add_text(msi_text *to, const char *format, ...) {
    const size_t room = sizeof to->text - to->length;
    va_list args;
    va_start(args, format);
    const int length = msi_vformat(to->text + to->length, room, format, args);
    va_end(args);
    to->length += length < 0 ? 0 : (size_t)length < room ? (size_t)length : room - 1;
}

/* Adds the smallest arenas of the other modes. */
static void msi_add_modes(msi_text *to, uint64_t least) {
    ms_model *m = to->model;
    bool alike = true;
    for (int mode = 0; mode < MS_MODE_COUNT; mode++) {
        const uint32_t techniques = msi_allowed(m, (ms_mode)mode);
        uint64_t bytes = least;
        if (techniques != m->wrapped.choice.techniques) {
            MSI_THEN(to->result, msi_least_arena(m, techniques, &bytes));
            msi_add_text(to, ", %s in mode %s", msi_size(bytes).text, msi_mode_names[mode]);
            alike = false;
        }
    }
    msi_add_text(to, "%s", alike ? ", the same in every mode" : "");
}

/* Adds the largest size that would fit the budget. */
static void msi_add_size(msi_text *to, const msi_plan *smallest) {
    ms_model *m = to->model;
    msi_resizing z;
    int64_t size = -1;
    if (to->result != MS_RESULT_OK) {
        return;
    }
    if (msi_resizing_begin(&z, m)) {
        size = msi_largest_size(&z, smallest->budget_bytes, smallest);
        msi_resizing_end(&z);
    }
    to->result = z.result;
    if (size < 0) {
        return;
    }
    const bool axis = z.axis != MSI_NONE;
    const char *name = axis ? msi_name(&m->graph, m->graph.axes[z.axis].name)
                            : msi_tensor_name(&m->graph, z.input);
    const char *what = axis ? "axis" : "first dim of input";
    const char *assumed = axis ? "" : ", if all that is computed from it shrinks in proportion";
    if (size > 0) {
        msi_add_text(to, ". This budget has room for %lld in the %s \"%.40s\", now %lld%s",
                     (long long)size, what, name, (long long)z.declared, assumed);
    } else {
        msi_add_text(to, ". Even 1 in the %s \"%.40s\" is too much for this budget%s%s", what, name,
                     axis ? "" : ", even", axis ? "" : assumed + 1);
    }
}

/* Adds what else would help. */
static void msi_add_cures(msi_text *to) {
    ms_model *m = to->model;
    const msi_graph *g = &m->graph;
    const char *early = msi_early_fault(m);
    const uint32_t allowed = m->wrapped.choice.techniques;
    uint32_t added = 0, forbidden = 0;
    for (int k = 0; k < MS_TECHNIQUE_COUNT; k++) {
        const bool off = msi_switch_of(&m->config, (ms_technique)k) == MS_SWITCH_OFF;
        const bool cure = off && !(early && k == MS_TECHNIQUE_EARLY_UPDATE);
        added |= cure ? MSI_BUILT & ~allowed & 1u << k : 0u;
    }
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const uint8_t *is = g->tensors.items[t].technique;
        forbidden += is[MS_TECHNIQUE_CHECKPOINTING] == MS_SWITCH_OFF ||
                     is[MS_TECHNIQUE_EARLY_UPDATE] == MS_SWITCH_OFF;
    }
    if (added) {
        uint64_t bytes = 0;
        MSI_THEN(to->result, msi_least_arena(m, allowed | added, &bytes));
        msi_add_text(to, ". Without OFF for %s%s%s: %s",
                     added & MSI_CHECKPOINTING ? "checkpointing" : "",
                     added == MSI_BUILT ? " and " : "",
                     added & MSI_EARLY_UPDATE ? "early_update" : "", msi_size(bytes).text);
    }
    if (early) {
        msi_add_text(to, ". No early updates, since %s", early);
    }
    if (forbidden) {
        msi_add_text(to, ". %u tensors are forbidden a technique", (unsigned)forbidden);
    }
}

/* The error where no plan fits; `smallest` comes nearest. Leaves the model as it is. */
static ms_result msi_no_fit(ms_model *m, const msi_store *store, const msi_plan *smallest) {
    const uint64_t least = msi_room_of(store);
    msi_text text;
    memset(&text, 0, sizeof text);
    text.model = m;
    msi_add_text(&text,
                 "the budget is %s, the plain plan needs %s, and the smallest feasible budget in "
                 "mode %s is %s (%llu bytes",
                 msi_size_down(smallest->budget_bytes).text, msi_size(smallest->plain_bytes).text,
                 msi_mode_names[m->wrapped.choice.mode], msi_size(least).text,
                 (unsigned long long)least);
    if (store->reserved_bytes) {
        msi_add_text(&text, "; %s of it for the backend: ms_backend.workspace_bytes",
                     msi_size(store->reserved_bytes).text);
    }
    msi_add_text(&text, ")");
    msi_add_modes(&text, least);
    msi_add_size(&text, smallest);
    msi_add_cures(&text);
    MSI_THEN(text.result, msi_fail(m, MS_RESULT_BUDGET, "%s", text.text));
    return text.result;
}

/* The modes from the most careful one on. */
static const ms_mode msi_modes[MS_MODE_COUNT] = {MS_MODE_CONSERVATIVE, MS_MODE_BALANCED,
                                                 MS_MODE_AGGRESSIVE};

/* The plans for a mode. Modes that allow the same techniques share them. */
typedef struct msi_contender {
    msi_store *store;
    msi_plan *plans;
} msi_contender;

/* Frees all contenders except number `spared` and those that share its plans. */
static void msi_contenders_free(ms_model *m, const msi_contender *contenders, uint32_t count,
                                uint32_t spared) {
    for (uint32_t i = 0; i < count; i++) {
        bool shared = spared < count && contenders[i].store == contenders[spared].store;
        for (uint32_t k = 0; k < i; k++) {
            shared |= contenders[k].store == contenders[i].store;
        }
        if (!shared) {
            msi_plans_and_store_free(m, contenders[i].store, contenders[i].plans);
        }
    }
}

/* Plans for each mode with all techniques that it allows. */
static ms_result msi_make_contenders(ms_model *m, msi_goal goal, msi_contender *contenders,
                                     ms_strategy *strategies) {
    for (uint32_t i = 0; i < MS_MODE_COUNT; i++) {
        ms_strategy *s = &strategies[i];
        uint32_t same = 0;
        memset(s, 0, sizeof *s);
        s->mode = msi_modes[i];
        s->techniques = msi_allowed(m, s->mode);
        while (strategies[same].techniques != s->techniques) {
            same++;
        }
        contenders[i] = contenders[same];
        m->wrapped.choice.techniques = s->techniques;
        const ms_result result =
            same < i ? MS_RESULT_OK
                     : msi_make_plans(m, goal, &contenders[i].store, &contenders[i].plans);
        if (result != MS_RESULT_OK) {
            msi_contenders_free(m, contenders, i, MSI_NONE);
            return result;
        }
        s->arena_bytes = msi_room_of(contenders[i].store);
        s->step_us = contenders[i].plans->train.step_us;
        s->fits = s->arena_bytes <= msi_plan_at_largest(contenders[i].plans)->budget_bytes;
    }
    return MS_RESULT_OK;
}

/* The built-in policy: the fastest strategy that fits or, if none does, the smallest; of equal ones
   the most careful. */
static uint32_t msi_fastest(const ms_policy_args *args) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < args->strategy_count; i++) {
        const ms_strategy *a = &args->strategies[i], *b = &args->strategies[best];
        const bool better = a->fits != b->fits ? a->fits
                            : a->fits          ? a->step_us < b->step_us
                                               : a->arena_bytes < b->arena_bytes;
        best = better ? i : best;
    }
    return best;
}

/* Lets the policy choose among the modes. Until then the choice of the config is in force. */
static ms_result msi_ask_policy(ms_model *m, msi_goal goal, msi_store **store, msi_plan **plans) {
    msi_contender contenders[MS_MODE_COUNT];
    ms_strategy strategies[MS_MODE_COUNT];
    const msi_choice config = m->wrapped.choice;
    const ms_result result = msi_make_contenders(m, goal, contenders, strategies);
    if (result != MS_RESULT_OK) {
        return result;
    }
    ms_policy_args args;
    memset(&args, 0, sizeof args);
    args.user = m->config.policy_user;
    args.hardware = &m->costs.hardware;
    args.budget_bytes = msi_plan_at_largest(contenders[0].plans)->budget_bytes;
    args.plain_bytes = msi_plan_at_largest(contenders[0].plans)->plain_bytes;
    args.strategies = strategies;
    args.strategy_count = MS_MODE_COUNT;
    for (uint32_t i = 0; i < MS_MODE_COUNT; i++) {
        msi_log(m, MS_LOG_INFO, "policy",
                "strategy %u, mode %s: arena %s, predicted step %s (%s)%s", (unsigned)i,
                msi_mode_names[strategies[i].mode], msi_size(strategies[i].arena_bytes).text,
                msi_time(strategies[i].step_us).text, msi_time_source_names[m->costs.source],
                strategies[i].fits ? "" : ", does not fit");
    }
    const char *outer = msi_enter(m, "ms_config.policy");
    const uint32_t chosen = m->config.policy ? m->config.policy(&args) : msi_fastest(&args);
    msi_leave(m, outer);
    uint32_t number = chosen;
    m->wrapped.choice = config;
    if (chosen < MS_MODE_COUNT) {
        m->wrapped.choice.mode = strategies[chosen].mode;
        m->wrapped.choice.source = MS_DECISION_SOURCE_POLICY;
        m->wrapped.choice.techniques = strategies[chosen].techniques;
    }
    for (uint32_t i = 0; i < MS_MODE_COUNT; i++) {
        number = strategies[i].mode == m->wrapped.choice.mode ? i : number;
    }
    msi_log(m, MS_LOG_INFO, "policy", "%s policy chose %u: mode %s%s",
            m->config.policy ? "the trainer's" : "the built-in", (unsigned)chosen,
            msi_mode_names[m->wrapped.choice.mode],
            chosen < MS_MODE_COUNT ? "" : ", as configured, since there is no such strategy");
    msi_contenders_free(m, contenders, MS_MODE_COUNT, number);
    *store = contenders[number].store;
    *plans = contenders[number].plans;
    return MS_RESULT_OK;
}

static ms_result msi_check_all(ms_model *m, msi_goal goal) {
    ms_result result = goal == MSI_GOAL_PLAIN ? MS_RESULT_OK : msi_check_hardware(m);
    MSI_THEN(result, msi_check_graph(m, goal));
    MSI_THEN(result, goal == MSI_GOAL_PLAIN ? MS_RESULT_OK : msi_check_built(m));
    MSI_THEN(result, msi_check_times(m));
    MSI_THEN(result, goal == MSI_GOAL_BUDGET ? msi_check_budget(m) : MS_RESULT_OK);
    return result;
}

/* The plan in force stays, with what it was decided by: takes back msi_get_hardware. */
static void msi_stay_with(ms_model *m, const msi_choice *choice, const msi_costs *costs) {
    m->wrapped.choice = *choice;
    m->costs = *costs;
    if (m->run.plan) {
        msi_find_times(m); // at the present sizes
    }
}

/* Checks the graph, then plans for the mode of the config or of the policy. The choice stays in
   force; after a failure it is as before. */
static ms_result msi_decide(ms_model *m, msi_goal goal, msi_store **store, msi_plan **plans) {
    const msi_choice choice = m->wrapped.choice;
    const msi_costs costs = m->costs;
    const bool asks = m->config.auto_policy && goal != MSI_GOAL_PLAIN;
    ms_result result = msi_check_all(m, goal);
    if (result != MS_RESULT_OK) {
        return result;
    }
    msi_get_hardware(m);
    m->wrapped.choice = msi_config_choice(m);
    result = asks ? msi_ask_policy(m, goal, store, plans) : msi_make_plans(m, goal, store, plans);
    if (result == MS_RESULT_OK && goal == MSI_GOAL_BUDGET) {
        const msi_plan *largest = msi_plan_at_largest(*plans);
        if (msi_room_of(*store) > largest->budget_bytes) {
            result = msi_no_fit(m, *store, largest);
            msi_plans_and_store_free(m, *store, *plans);
        }
    }
    if (result != MS_RESULT_OK) {
        msi_stay_with(m, &choice, &costs);
    }
    return result;
}

/* The smallest arena that ms_wrap can reach in the mode of the config or, with a policy, in any. */
static ms_result msi_smallest_of_modes(ms_model *m, uint64_t *bytes) {
    const msi_choice choice = m->wrapped.choice;
    const msi_costs costs = m->costs;
    const bool policy = m->config.auto_policy;
    ms_result result = msi_check_all(m, MSI_GOAL_SMALLEST);
    msi_get_hardware(m);
    *bytes = UINT64_MAX;
    for (int i = 0; i < MS_MODE_COUNT; i++) {
        const uint32_t techniques = msi_allowed(m, msi_modes[i]);
        bool known = !policy && m->config.mode != msi_modes[i];
        for (int k = 0; k < i && policy; k++) {
            known |= msi_allowed(m, msi_modes[k]) == techniques;
        }
        uint64_t least = *bytes;
        MSI_THEN(result, known ? MS_RESULT_OK : msi_least_arena(m, techniques, &least));
        *bytes = msi_smaller(*bytes, least);
    }
    msi_stay_with(m, &choice, &costs);
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>optimizer  state and update of params

static float msi_or(float value, float otherwise) {
    return value != 0.0f ? value : otherwise;
}

static void msi_use_optimizer(ms_model *m, const ms_optimizer_desc *desc) {
    m->optimizer = *desc;
    m->optimizer.learning_rate = msi_or(desc->learning_rate, 0.001f);
    m->optimizer.beta1 = msi_or(desc->beta1, 0.9f);
    m->optimizer.beta2 = msi_or(desc->beta2, 0.999f);
    m->optimizer.epsilon = msi_or(desc->epsilon, 1e-8f);
}

/* The host's copy of the step's own memory; where the device is direct, that memory itself. */
static uint8_t *msi_step_on_host(const ms_model *m) {
    return m->run.store->host + m->run.store->host_bytes;
}

static bool msi_is_eval(const msi_run *r) {
    return r->program == &r->plan->eval;
}

/* Where the states of an eval and of a step are copied out to. */
static uint8_t *msi_verdicts(const ms_model *m) {
    return msi_step_on_host(m) + (msi_is_direct(m) ? 0 : m->run.store->step_bytes);
}

static const ms_step_state *msi_verdict(const ms_model *m, bool eval) {
    return (const ms_step_state *)(const void *)(msi_verdicts(m) + (eval ? 0 : MSI_STATE_BYTES));
}

static ms_step_state *msi_state_on_device(const ms_model *m, bool eval) {
    return (ms_step_state *)(void *)(m->run.store->step + (eval ? 0 : MSI_STATE_BYTES));
}

/* The factors of update number t by AdamW or SGD, without those that depend on the param. */
static ms_update_factors msi_factors_at(const ms_optimizer_desc *o, uint64_t t) {
    ms_update_factors f;
    memset(&f, 0, sizeof f);
    if (o->kind == MS_OPTIMIZER_SGD) {
        f.rate = -o->learning_rate;
        f.beta1 = o->momentum;
        return f;
    }
    f.rate = (float)(-(double)o->learning_rate / (1.0 - pow((double)o->beta1, (double)t)));
    f.beta1 = o->beta1;
    f.beta2 = o->beta2;
    f.rest1 = (float)(1.0 - (double)o->beta1);
    f.rest2 = (float)(1.0 - (double)o->beta2);
    f.scale2 = (float)(1.0 / sqrt(1.0 - pow((double)o->beta2, (double)t)));
    f.epsilon = o->epsilon;
    return f;
}

static float msi_weight_decay(const ms_model *m, const msi_tensor *t) {
    return t->has_weight_decay ? t->weight_decay : m->optimizer.weight_decay;
}

/* Number of the update of a param in this step, from 1. */
static uint64_t msi_update_number(const msi_run *r, const msi_tensor *t) {
    return r->step - t->trained_since + 1;
}

static void msi_fill_factors(ms_model *m) {
    const ms_optimizer_desc *o = &m->optimizer;
    ms_update_factors *to = (ms_update_factors *)(void *)(msi_step_on_host(m) + MSI_STATES_BYTES);
    ms_update_factors f;
    uint64_t number = 0;
    for (uint32_t i = 0; i < m->run.store->residents.count; i++) {
        const msi_resident *resident = &m->run.store->residents.items[i];
        const msi_tensor *t = &m->graph.tensors.items[resident->tensor];
        if (resident->factors == MSI_NONE) {
            continue;
        }
        if (number != msi_update_number(&m->run, t)) {
            number = msi_update_number(&m->run, t);
            f = msi_factors_at(o, number);
        }
        to[resident->factors] = f;
        to[resident->factors].decay =
            o->kind == MS_OPTIMIZER_SGD
                ? msi_weight_decay(m, t)
                : (float)(1.0 - (double)o->learning_rate * (double)msi_weight_decay(m, t));
    }
}

/* Uploads a part of the step's own memory, after what is enqueued. */
static ms_result msi_upload(ms_model *m, uint64_t begin, uint64_t end) {
    const ms_backend *b = &m->config.backend;
    uint8_t *to = m->run.store->step + begin;
    const uint8_t *from = msi_step_on_host(m) + begin;
    if (msi_is_direct(m) || begin == end) {
        return MS_RESULT_OK;
    }
    return b->upload ? msi_device(m, b->upload(m->device, to, from, end - begin), "upload")
                     : msi_copy(m, to, false, from, true, end - begin);
}

/* Uploads what changes from step to step. */
static ms_result msi_upload_step(ms_model *m) {
    ms_step_state *state = (ms_step_state *)(void *)(msi_step_on_host(m) + MSI_STATE_BYTES);
    state->step = m->run.step;
    state->seed = msi_mix(m->config.seed ^ msi_mix(m->run.step + ((uint64_t)m->run.micro << 40)));
    return msi_upload(m, MSI_STATE_BYTES + offsetof(ms_step_state, step), MSI_STATES_BYTES);
}

/* Uploads the factors of all updates of a step, before the first of them. */
static ms_result msi_upload_factors(ms_model *m) {
    if (m->optimizer.kind > MS_OPTIMIZER_SGD) {
        return MS_RESULT_OK;
    }
    msi_fill_factors(m);
    return msi_upload(m, MSI_STATES_BYTES, m->run.store->step_bytes);
}

static uint64_t msi_seed_of_step(const ms_model *m) {
    return ((const ms_step_state *)(const void *)(msi_step_on_host(m) + MSI_STATE_BYTES))->seed;
}

/* Enqueues a copy of the verdict to the host. */
static ms_result msi_copy_verdict(ms_model *m) {
    m->run.verdict = MSI_VERDICT_COPIED;
    return msi_is_direct(m) ? MS_RESULT_OK
                            : msi_copy_out(m, msi_verdicts(m), m->run.store->step, MSI_STATES_BYTES,
                                           MSI_EVENT_VERDICT);
}

/* Enqueues that copy, unless it has been enqueued already. */
static ms_result msi_fetch_verdict(ms_model *m) {
    return m->run.verdict == MSI_VERDICT_ON_DEVICE ? msi_copy_verdict(m) : MS_RESULT_OK;
}

typedef struct msi_nonfinite_text {
    char text[256];
} msi_nonfinite_text;

/* `layer 3 "ln1": its forward callback makes element 5 of "x" nan, and 2 more` */
static msi_nonfinite_text msi_nonfinite_name(const ms_model *m, const ms_nonfinite *n) {
    msi_nonfinite_text t;
    const bool gradient = msi_role_of(&m->graph, n->tensor) == MSI_ROLE_GRADIENT;
    msi_format(t.text, sizeof t.text,
               "%.100s: its %s callback %s element %llu of the %s of \"%.60s\" %s, and %llu more",
               msi_layer_label(&m->graph, msi_layer_index(&m->graph, n->layer)).text,
               msi_phase_name(n->phase), n->is_read ? "finds" : "makes",
               (unsigned long long)n->element, gradient ? "gradient" : "value",
               msi_tensor_name(&m->graph, msi_index(&m->graph, n->tensor)),
               n->is_nan ? "nan" : "infinite", (unsigned long long)(n->count - 1));
    return t;
}

/* An error if a step or an eval was halted. */
static ms_result msi_check_halt(ms_model *m, const ms_step_state *state, uint64_t step) {
    const bool loss = state->halted == (uint32_t)MS_HALT_LOSS, noted = m->run.nonfinite.count > 0;
    return state->halted == (uint32_t)MS_HALT_NONE
               ? MS_RESULT_OK
               : msi_fail(m, MS_RESULT_NONFINITE,
                          "the %s of step %llu is %g: nothing was updated; %s%s",
                          loss ? "loss" : "norm of the gradients", (unsigned long long)step,
                          loss ? state->loss : state->norm,
                          noted ? "the first that is not finite: "
                                : "lower the learning rate or look for bad input; "
                                  "ms_find_nonfinite names the first layer",
                          noted ? msi_nonfinite_name(m, &m->run.nonfinite).text : "");
}

/* Waits for the verdict that was asked for. A step that was halted has updated nothing, nor has any
   after it: the count of steps goes back to it, and what is under way ends. The device is told to
   update again, so nothing of it may go on. */
static ms_result msi_settle_verdict(ms_model *m) {
    const bool copied = m->run.verdict == MSI_VERDICT_COPIED;
    ms_result result = copied ? msi_wait_on_host(m, MSI_EVENT_VERDICT) : MS_RESULT_OK;
    const ms_step_state verdict = *msi_verdict(m, false);
    if (result == MS_RESULT_OK && copied && verdict.halted != (uint32_t)MS_HALT_NONE) {
        result = msi_fill(m, m->run.store->step + MSI_STATE_BYTES, msi_is_direct(m), 0,
                          offsetof(ms_step_state, step));
        m->run.halt = verdict;
        m->run.step = verdict.halted_step;
        m->run.updates_done = 0;
        m->run.micro = 0;
        m->run.stage = MSI_STAGE_IDLE;
    }
    m->run.verdict = result == MS_RESULT_OK ? MSI_VERDICT_NONE : m->run.verdict;
    return result;
}

/* Reports a halt to the trainer, once. */
static ms_result msi_report_halt(ms_model *m) {
    const ms_step_state left = m->run.halt;
    memset(&m->run.halt, 0, sizeof m->run.halt);
    return msi_check_halt(m, &left, left.halted_step);
}

static ms_result msi_act_on_verdict(ms_model *m) {
    const bool eval = m->run.verdict == MSI_VERDICT_COPIED && msi_is_eval(&m->run);
    ms_result result = msi_settle_verdict(m);
    MSI_THEN(result, msi_report_halt(m));
    MSI_THEN(result, eval ? msi_check_halt(m, msi_verdict(m, true), m->run.step) : MS_RESULT_OK);
    return result;
}

static ms_result msi_custom_update(ms_model *m, const ms_update_args *args, const msi_tensor *t) {
    ms_result result = MS_RESULT_OK;
    if (m->config.backend.is_asynchronous && m->run.updates_done == 0) { // it ignores a halt
        result = msi_copy_verdict(m);
        MSI_THEN(result, msi_act_on_verdict(m));
    }
    if (result != MS_RESULT_OK) {
        return result;
    }
    m->run.updates_done++;
    m->run.busy = true;
    const int error = m->optimizer.update(args);
    m->run.busy = false;
    return error == 0 ? MS_RESULT_OK
                      : msi_fail(m, MS_RESULT_CALLBACK,
                                 "param \"%s\": the update callback returned %d; the model has "
                                 "failed: write params and state again, then wrap",
                                 msi_name(&m->graph, t->name), error);
}

static void *msi_stream(const ms_model *m) {
    const ms_backend *b = &m->config.backend;
    return b->stream && m->device ? b->stream(m->device) : NULL;
}

static ms_result msi_run_update(ms_model *m, const msi_program *p, const msi_instruction *i) {
    const ms_backend *b = &m->config.backend;
    const ms_optimizer_desc *o = &m->optimizer;
    const msi_tensor *t = &m->graph.tensors.items[i->target];
    const msi_store *store = m->run.store;
    const msi_resident *resident = &store->residents.items[store->resident_of[i->target]];
    void *operands[3 + MS_LIMIT_OPTIMIZER_STATE] = {NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    for (uint32_t k = 0; k < i->operand_count; k++) { // value, gradient, norm, states
        const uint32_t range = p->operands.items[i->operand_first + k].range;
        operands[k] = range == MSI_NONE ? NULL : msi_address(m, p, range);
    }
    const msi_norm *norm = (const msi_norm *)operands[2];
    ms_update_args args;
    memset(&args, 0, sizeof args);
    args.user = o->user;
    args.param = msi_handle(&m->graph, i->target, MSI_ROLE_VALUE);
    args.kind = o->kind;
    args.count = t->bytes / sizeof(float);
    args.value = (float *)operands[0];
    args.gradient = (float *)operands[1];
    args.gradient_scale = norm ? &norm->scale : NULL;
    memcpy(args.state, operands + 3, sizeof args.state);
    args.learning_rate = o->learning_rate;
    args.weight_decay = msi_weight_decay(m, t);
    args.beta1 = o->beta1;
    args.beta2 = o->beta2;
    args.epsilon = o->epsilon;
    args.momentum = o->momentum;
    args.t = msi_update_number(&m->run, t);
    args.stream = msi_stream(m);
    args.factors = (const ms_update_factors *)(const void *)(store->step + MSI_STATES_BYTES) +
                   resident->factors;
    args.state_of_step = msi_state_on_device(m, false);
    if (o->kind == MS_OPTIMIZER_CUSTOM) {
        return msi_custom_update(m, &args, t);
    }
    const bool first = m->run.updates_done == 0 && !m->run.recording;
    ms_result result = first ? msi_upload_factors(m) : MS_RESULT_OK;
    m->run.updates_done += result == MS_RESULT_OK;
    MSI_THEN(result, msi_device(m, b->update(m->device, &args), "update"));
    return result;
}

static ms_result msi_run_norm(ms_model *m, const msi_program *p, const msi_instruction *i) {
    const uint32_t range = p->operands.items[i->operand_first].range;
    const uint64_t count = p->ranges.items[range].bytes / sizeof(float);
    const int error = m->config.backend.add_squares_f32(m->device, msi_address(m, p, range), count,
                                                        (double *)msi_address(m, p, p->norm));
    return msi_device(m, error, "sum of squares");
}

/* The norm is checked before anything is updated: if it is not finite, nothing is. */
static ms_result msi_run_clip(ms_model *m, const msi_program *p) {
    const ms_backend *b = &m->config.backend;
    msi_norm *norm = (msi_norm *)msi_address(m, p, p->norm);
    const int error = b->clip_scale(m->device, &norm->sum, m->optimizer.grad_clip_norm,
                                    &norm->scale, msi_state_on_device(m, false));
    ms_result result = msi_device(m, error, "clip");
    m->run.verdict = MSI_VERDICT_ON_DEVICE;
    MSI_THEN(result, m->run.recording ? MS_RESULT_OK : msi_copy_verdict(m));
    MSI_THEN(result, b->is_asynchronous ? MS_RESULT_OK : msi_act_on_verdict(m));
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>call  views, and the callbacks of layers

/* Fills the views of a group, whose `count` tensors have these operands, and clears those that an
   earlier call has left beyond them. */
static void msi_fill_views(ms_model *m, const msi_program *p, int group,
                           const msi_operand *operands, const uint32_t *tensors, uint32_t count) {
    ms_view *views = m->views.of[group];
    for (uint32_t k = 0; k < count; k++) {
        if (tensors[k] == MSI_NONE) {
            memset(&views[k], 0, sizeof views[k]);
            continue;
        }
        views[k] = m->graph.tensors.items[tensors[k]].view;
        if (operands[k].range != MSI_NONE) {
            views[k].data = msi_address(m, p, operands[k].range);
            views[k].beta = operands[k].accumulate ? 1.0f : 0.0f;
        }
    }
    for (uint32_t k = count; k < m->views.count[group]; k++) {
        memset(&views[k], 0, sizeof views[k]);
    }
    m->views.count[group] = (uint8_t)count;
}

/* The number of operands of a group that a layer's instruction has. */
static uint32_t msi_operands_in(const msi_layer *l, const msi_instruction *i, int group) {
    const bool backward = i->op == MSI_OP_BACKWARD;
    const bool in_forward = i->op == MSI_OP_FORWARD && l->grads_in_forward != 0;
    return group < MSI_GROUP_COUNT        ? l->count[group]
           : group == MSI_GROUP_WORKSPACE ? 1u
           : group == MSI_GROUP_GRAD_IN   ? (backward || in_forward ? l->count[MSI_GROUP_IN] : 0u)
           : !backward                    ? 0u
           : group == MSI_GROUP_GRAD_OUT  ? l->count[MSI_GROUP_OUT]
                                          : l->count[MSI_GROUP_PARAM];
}

/* The group that operand k of a layer's instruction belongs to, and its slot there. */
static int msi_operand_group(const msi_layer *l, const msi_instruction *i, uint32_t k,
                             uint32_t *slot) {
    int group = 0;
    for (; group < MSI_GROUP_WORKSPACE && k >= msi_operands_in(l, i, group); group++) {
        k -= msi_operands_in(l, i, group);
    }
    *slot = k;
    return group;
}

/* Whether a layer's instruction makes this operand. */
static bool msi_is_made(const msi_layer *l, const msi_instruction *i, int group, uint32_t slot) {
    if (group == MSI_GROUP_OUT || group == MSI_GROUP_SAVED) {
        return i->op != MSI_OP_BACKWARD && !(msi_op_reads(l, (msi_op)i->op, group) >> slot & 1);
    }
    if (group == MSI_GROUP_STATE && i->op == MSI_OP_BACKWARD) {
        return l->backward_state >> slot & 1;
    }
    return group == MSI_GROUP_STATE ? !msi_is_again((msi_op)i->op) || !l->keeps_state
                                    : group == MSI_GROUP_GRAD_IN || group == MSI_GROUP_GRAD_PARAM;
}

/* Whether a layer's instruction may write this operand: it makes or, as declared, clobbers it. */
static bool msi_is_written(const msi_layer *l, const msi_instruction *i, int group, uint32_t slot) {
    const uint32_t clobbers = group == MSI_GROUP_IN         ? l->clobbers.in
                              : group == MSI_GROUP_OUT      ? l->clobbers.out
                              : group == MSI_GROUP_SAVED    ? l->clobbers.saved
                              : group == MSI_GROUP_GRAD_OUT ? l->clobbers.grad_out
                                                            : 0;
    return group == MSI_GROUP_WORKSPACE || (i->op == MSI_OP_BACKWARD && (clobbers >> slot & 1)) ||
           msi_is_made(l, i, group, slot);
}

/* The mask of the operands of a group that are there to be written. */
static uint32_t msi_wanted(const msi_layer *l, const msi_instruction *i,
                           const msi_operand *operands, int group) {
    const msi_operand *first = operands + msi_group_start(l, group);
    const uint32_t read = msi_op_reads(l, (msi_op)i->op, group);
    uint32_t mask = 0;
    for (uint32_t k = 0; k < l->count[group]; k++) {
        mask |= (uint32_t)(first[k].range != MSI_NONE && !(read >> k & 1)) << k;
    }
    return mask;
}

/* The group whose tensors the operands of a group belong to: gradients are those of values. */
static int msi_group_of_values(int group) {
    return group == MSI_GROUP_GRAD_OUT     ? MSI_GROUP_OUT
           : group == MSI_GROUP_GRAD_IN    ? MSI_GROUP_IN
           : group == MSI_GROUP_GRAD_PARAM ? MSI_GROUP_PARAM
                                           : group;
}

/* Fills the views of all groups. Operands have the order of the groups. */
static void msi_fill_all_views(ms_model *m, const msi_program *p, const msi_instruction *i) {
    const msi_layer *l = &m->graph.layers.items[i->target];
    const msi_operand *operands = p->operands.items + i->operand_first;
    for (int group = 0; group < MSI_GROUP_WORKSPACE; group++) {
        const uint32_t count = msi_operands_in(l, i, group);
        msi_fill_views(m, p, group, operands, msi_group(&m->graph, l, msi_group_of_values(group)),
                       count);
        operands += count;
    }
}

/* Fills the call of a layer's callback. */
static void msi_fill_call(ms_model *m, const msi_program *p, const msi_instruction *i,
                          ms_call *call) {
    const msi_layer *l = &m->graph.layers.items[i->target];
    const msi_operand *operands = p->operands.items + i->operand_first;
    msi_fill_all_views(m, p, i);
    memset(call, 0, sizeof *call);
    call->user = l->user;
    call->model = m;
    call->phase = msi_ops[i->op].phase;
    call->in = m->views.of[MSI_GROUP_IN];
    call->out = m->views.of[MSI_GROUP_OUT];
    call->saved = m->views.of[MSI_GROUP_SAVED];
    call->param = m->views.of[MSI_GROUP_PARAM];
    call->state = m->views.of[MSI_GROUP_STATE];
    call->grad_out = m->views.of[MSI_GROUP_GRAD_OUT];
    call->grad_in = m->views.of[MSI_GROUP_GRAD_IN];
    call->grad_param = m->views.of[MSI_GROUP_GRAD_PARAM];
    call->loss_factor = m->run.step_factor;
    call->step = m->run.step;
    call->micro = m->run.micro;
    call->micro_count = m->run.store->micro_count;
    call->last_micro = m->run.micro + 1 == m->run.store->micro_count;
    call->layer_seed = msi_mix(i->target);
    call->seed = call->layer_seed ^ msi_seed_of_step(m);
    call->step_seed = &msi_state_on_device(m, false)->seed;
    call->stream = msi_stream(m);
    if (i->op != MSI_OP_BACKWARD) {
        call->wanted_out = msi_wanted(l, i, operands, MSI_GROUP_OUT);
        call->wanted_saved = msi_wanted(l, i, operands, MSI_GROUP_SAVED);
    }
    const uint32_t scratch = operands[i->operand_count - 1u].range;
    if (scratch != MSI_NONE) {
        call->workspace = msi_address(m, p, scratch);
        call->workspace_bytes = p->ranges.items[scratch].bytes;
    }
}

/* Calls a layer; `own`: its recompute callback, in MS_PHASE_RECOMPUTE, if it has one. */
static ms_result msi_call_layer(ms_model *m, const msi_layer *l, const ms_call *call, bool own) {
    const uint32_t error_count = m->errors.count;
    const ms_layer_fn fn = call->phase == MS_PHASE_BACKWARD                           ? l->backward
                           : call->phase == MS_PHASE_RECOMPUTE && own && l->recompute ? l->recompute
                                                                                      : l->forward;
    m->run.busy = true;
    int error = l->bind ? l->bind(call) : 0;
    const char *what = error ? "bind" : msi_phase_name(call->phase);
    error = error ? error : fn(call);
    m->run.busy = false;
    if (m->run.recording && m->config.backend.recording_check(m->device) != 0) {
        return msi_fail(
            m, MS_RESULT_CALLBACK,
            "%s: its %s callback did something that a CUDA graph cannot record: it may only "
            "enqueue work on ms_call.stream, and wait for nothing; or leave cuda_graph off",
            msi_layer_label(&m->graph, (uint32_t)(l - m->graph.layers.items)).text, what);
    }
    if (error == 0) {
        return MS_RESULT_OK;
    }
    char inner[MSI_ERROR_BYTES / 2] = ""; // the error of ms_gemm, say
    if (m->errors.count != error_count) {
        msi_format(inner, sizeof inner, "%.*s", (int)sizeof inner - 1, m->errors.text);
    }
    return msi_fail(m, MS_RESULT_CALLBACK, "%s: its %s callback returned %d%s%s",
                    msi_layer_label(&m->graph, (uint32_t)(l - m->graph.layers.items)).text, what,
                    error, inner[0] ? ": " : "", inner);
}

/* A matrix, or what is wrong with it, as text. */
typedef struct msi_matrix_text {
    char text[144];
} msi_matrix_text;

/* "64 x 32 transposed, rows 32 apart, 3 of them 2048 apart" */
static msi_matrix_text msi_matrix_name(const ms_matrix *x) {
    msi_matrix_text t;
    const int length =
        msi_format(t.text, sizeof t.text, "%lld x %lld%s, rows %lld apart", (long long)x->rows,
                   (long long)x->cols, x->transposed ? " transposed" : "", (long long)x->stride);
    if (x->batch_count != 1 && length > 0 && (size_t)length < sizeof t.text) {
        msi_format(t.text + length, sizeof t.text - (size_t)length, ", %lld of them %lld apart",
                   (long long)x->batch_count, (long long)x->batch_stride);
    }
    return t;
}

/* What is wrong with one operand of ms_gemm, whose name is a letter; an empty text: nothing. */
static msi_matrix_text msi_matrix_fault(const ms_matrix *x, char name) {
    msi_matrix_text t;
    t.text[0] = 0;
    if (!x->data) {
        msi_format(t.text, sizeof t.text, "%c has no data: %s", name,
                   name == 'c' ? "nobody wants this gradient or output, so leave this product out"
                               : "its slot is empty, or the layer does not declare that it reads "
                                 "this value (backward_reads, recompute_reads)");
    } else if (x->rows < 1 || x->cols < 1) {
        msi_format(t.text, sizeof t.text, "%c has no elements: give it rows and cols of at least 1",
                   name);
    } else if (x->stride < x->cols) {
        msi_format(t.text, sizeof t.text,
                   "%c has a stride below its columns: rows lie at least cols "
                   "elements apart",
                   name);
    }
    return t;
}

/* What does not fit together in a product of valid operands, or NULL. */
static const char *msi_product_fault(const ms_matrix *a, const ms_matrix *b, const ms_matrix *c) {
    const int64_t m = a->transposed ? a->cols : a->rows, k = a->transposed ? a->rows : a->cols;
    const int64_t n = b->transposed ? b->rows : b->cols;
    const ms_matrix *const all[] = {a, b, c};
    for (int i = 0; i < 3; i++) {
        if (all[i]->batch_count < 1 || all[i]->batch_stride < 0 ||
            (i < 2 && all[i]->batch_count > c->batch_count) ||
            (i < 2 && all[i]->batch_count > 1 && all[i]->batch_count < c->batch_count)) {
            return "a and b must be one matrix, or batches of as many as c";
        }
    }
    if (k != (b->transposed ? b->cols : b->rows) || m != c->rows || n != c->cols || c->transposed) {
        return "the shapes do not match";
    }
    if (c->batch_count == 1) {
        return NULL;
    }
    const double extent = (double)(c->rows - 1) * (double)c->stride + (double)c->cols;
    const double row = (double)(c->batch_count - 1) * (double)c->batch_stride + (double)c->cols;
    const bool apart = (double)c->batch_stride >= extent;
    const bool side_by_side = c->batch_stride >= c->cols && row <= (double)c->stride;
    return apart || side_by_side ? NULL : "the matrices of c overlap";
}

static bool msi_is_castable(ms_dtype dtype) {
    return dtype == MS_DTYPE_F32 || dtype == MS_DTYPE_F16 || dtype == MS_DTYPE_BF16;
}

static ms_result msi_gemm(ms_model *m, float alpha, ms_matrix a, ms_matrix b, float beta,
                          ms_matrix c) {
    a.batch_count = a.batch_count ? a.batch_count : 1;
    b.batch_count = b.batch_count ? b.batch_count : 1;
    c.batch_count = c.batch_count ? c.batch_count : 1;
    const ms_matrix *const operands[] = {&a, &b, &c};
    for (int i = 0; i < 3; i++) {
        const msi_matrix_text wrong = msi_matrix_fault(operands[i], "abc"[i]);
        if (wrong.text[0]) {
            return msi_fail(m, MS_RESULT_INVALID, "ms_gemm: %s; it is %s", wrong.text,
                            msi_matrix_name(operands[i]).text);
        }
    }
    const char *fault = msi_product_fault(&a, &b, &c);
    if (fault) {
        return msi_fail(m, MS_RESULT_INVALID, "ms_gemm: %s: a is %s, b is %s, c is %s", fault,
                        msi_matrix_name(&a).text, msi_matrix_name(&b).text,
                        msi_matrix_name(&c).text);
    }
    if (!msi_is_castable(a.dtype) || a.dtype != b.dtype ||
        (c.dtype != a.dtype && c.dtype != MS_DTYPE_F32)) {
        return msi_fail(m, MS_RESULT_UNSUPPORTED,
                        "ms_gemm: %s x %s -> %s; a and b must both be f32, f16 or bf16, and c f32 "
                        "or like them",
                        ms_dtype_name(a.dtype), ms_dtype_name(b.dtype), ms_dtype_name(c.dtype));
    }
    return msi_device(m, m->config.backend.gemm(m->device, alpha, &a, &b, beta, &c), "gemm");
}

static ms_result msi_cast(ms_model *m, const ms_view *to, const ms_view *from) {
    const ms_backend *b = &m->config.backend;
    const uint64_t count = ms_shape_count(&to->shape), given = ms_shape_count(&from->shape);
    if (count == 0 || count != given) {
        return msi_fail(m, MS_RESULT_INVALID,
                        "ms_cast: %llu elements to %llu: both views must have the same number",
                        (unsigned long long)given, (unsigned long long)count);
    }
    if (!msi_is_castable(to->dtype) || !msi_is_castable(from->dtype)) {
        return msi_fail(m, MS_RESULT_UNSUPPORTED, "ms_cast: %s to %s; it takes f32, f16 and bf16",
                        ms_dtype_name(from->dtype), ms_dtype_name(to->dtype));
    }
    return msi_device(m, b->cast(m->device, to->data, to->dtype, from->data, from->dtype, count),
                      "cast");
}

// ------------------------------------------------------------------------------------------------
// >>debug  a layer runs several times, at other addresses and over other poison, with the same bits

/* How it works. All memory of the model is saved to the shadow, a copy on the host, and filled with
   one byte value, the poison. The layer runs on the stage, memory of its own in two halves that
   take turns. There its operands lie apart, each followed by a gap; what a layer did not declare
   is given as poison, not as NULL. Afterwards all that the layer may not write must be as before,
   and what it computes must not depend on the poison, on the half, or on which of the declared
   freedoms it was given. Then the model's memory is restored, with the results of the run in which
   the poison was NaN, so that reads of unwritten bytes show up later on.

   Red zones are checked after the call, and there are no guard pages: red zones work in every
   memory, catch reads as well (the poison in them decides on the result), and leave a program that
   can report what happened. */

/* Small numbers, and NaN. The first poison of what an output is before the call, and of words that
   nobody has written, is found nowhere else: an output that has it afterwards was not written. */
enum { MSI_POISON_OUTPUT = 0x3c, MSI_POISON_FIRST = 0x3d, MSI_POISON_LAST = 0xff };

static const uint64_t MSI_GAP_BYTES = 1024;      // after each operand
static const uint64_t MSI_SLACK_BYTES = 16384;   // after the last one: mostly the workspace
static const uint64_t MSI_TAIL_BYTES = 1u << 20; // after the second half, at most

/* Copies of a half, on the host: as it was set, and as a run has left it. */
typedef enum msi_image {
    MSI_IMAGE_SCENE,
    MSI_IMAGE_FIRST, // the first run, over the first poison
    MSI_IMAGE_LAST,  // the run over the last poison, whose results count
    MSI_IMAGE_NOW,   // any other
    MSI_IMAGE_COUNT
} msi_image;

/* Memory of the model that is saved, filled and restored as a whole. */
typedef struct msi_extent {
    uint8_t *memory;
    bool on_host;
    uint64_t bytes, room; // of the value; of its memory, for the largest sizes
    uint64_t shadow;      // offset of its copy
} msi_extent;

/* An operand on the stage. */
typedef struct msi_staged {
    int group; // an msi_group_kind
    uint32_t slot;
    uint32_t tensor, range; // MSI_NONE: workspace; memory of the stage alone
    uint32_t lies_in;       // the operand in whose memory it lies: mostly itself
    int place;
    uint64_t at, bytes, gap_end; // offsets in a half
    const uint8_t *before;       // its value before the call; NULL: none
    float beta;
    bool is_f32, is_transient;
    bool is_undeclared; // has no data outside debug mode
    bool is_made;       // the layer computes it
    bool is_written;    // or may destroy it
    bool is_cleared;    // workspace that is zero before the call
} msi_staged;

/* Spots of the instruction that is checked, and of a recomputation of its layer. */
typedef enum msi_staged_set { MSI_SET_OWN, MSI_SET_RECOMPUTE, MSI_SET_COUNT } msi_staged_set;

/* What is in the gradients. */
typedef enum msi_sums {
    MSI_SUMS_PLANNED,
    MSI_SUMS_ADDED, // all that can be added to hold a large number, with beta 1
    MSI_SUMS_NEW    // all that can be written hold NaN, with beta 0
} msi_sums;

/* One way to run a layer. */
typedef struct msi_variant {
    msi_staged_set set;
    msi_image into;
    uint32_t reach; // regions below this one hold the last poison, the others the first
    uint32_t round; // n: each result lies in the n-th operand that it may alias; 0: apart
    bool reversed;  // where several results may lie in one operand, the last one does
    msi_sums sums;
    uint32_t omit_out, omit_saved; // masks of results without data
} msi_variant;

/* Regions with poison of their own, by the first index of each kind: of operands, what is not
   declared, what has no value yet, words that nobody has written, the gap; residents where the
   model has them; transient values; and the rest of the stage. */
enum {
    MSI_REGION_UNDECLARED,
    MSI_REGION_NEW,
    MSI_REGION_UNWRITTEN,
    MSI_REGION_GAP,
    MSI_REGION_KINDS
};

typedef struct msi_trial {
    ms_model *model;
    msi_debug *debug;
    const msi_program *program;
    const msi_instruction *instruction;
    const msi_layer *layer;
    msi_staged staged[MSI_SET_COUNT][MSI_MAX_VIEWS + 1];
    uint32_t count[MSI_SET_COUNT];
    msi_variant how; // the run under way
    uint32_t lies_in[MSI_MAX_VIEWS + 1], half;
    ms_phase phase;         // of that run
    msi_op way;             // of a recomputation on trial: RECOMPUTE or REPEAT
    uint32_t outside_reach; // what the model's memory is filled for
    bool has_rivals;        // several results could lie in one operand in that run
    bool is_acting;         // the callback runs
    ms_result result;       // the first error: after it nothing is run or checked
} msi_trial;

// the model's memory

/* Resident i, or after the last of them the transient values. The shadow has the residents in the
   arena first, then those on the host, borrowed ones, and the transient values last. */
static msi_extent msi_extent_at(const ms_model *m, uint32_t i) {
    const msi_store *store = m->run.store;
    const uint64_t bases[] = {0, store->resident_bytes, store->resident_bytes + store->host_bytes};
    const uint64_t end = bases[2] + store->borrowed_bytes, transient = store->transient_bytes;
    const msi_extent rest = {msi_transient(&m->run), false, transient, transient, end};
    if (i >= store->residents.count) {
        return rest;
    }
    const msi_resident *r = &store->residents.items[i];
    const msi_extent extent = {(uint8_t *)r->address, r->on_host, r->bytes, r->bytes,
                               bases[r->borrowed ? 2 : r->on_host] + r->offset};
    return extent;
}

static msi_extent msi_extent_of_range(const ms_model *m, const msi_program *p, uint32_t range) {
    const msi_range *r = &p->ranges.items[range];
    msi_extent extent = msi_extent_at(m, range);
    extent.bytes = r->bytes;
    if (range >= m->run.store->residents.count) {
        extent.memory += r->offset;
        extent.shadow += r->offset;
        extent.room = r->bytes;
    }
    return extent;
}

/* Saves everything that is in memory to the shadow, or restores it. Goes on after an error, so that
   as much as possible is restored. */
static ms_result msi_shadow_all(ms_model *m, bool restore) {
    ms_result result = MS_RESULT_OK;
    for (uint32_t i = 0; i <= m->run.store->residents.count; i++) {
        const msi_extent e = msi_extent_at(m, i);
        uint8_t *copy = m->run.store->debug->shadow + e.shadow;
        const ms_result moved = restore ? msi_copy(m, e.memory, e.on_host, copy, true, e.room)
                                        : msi_copy(m, copy, true, e.memory, e.on_host, e.room);
        MSI_THEN(result, moved);
    }
    return result;
}

static bool msi_is_filled_with(const uint8_t *data, uint64_t bytes, uint8_t value) {
    return bytes == 0 || (data[0] == value && memcmp(data, data + 1, (size_t)bytes - 1) == 0);
}

/* Element i as a number. */
static double msi_number(const void *data, ms_dtype dtype, uint64_t i) {
    return dtype == MS_DTYPE_F64   ? ((const double *)data)[i]
           : dtype == MS_DTYPE_I64 ? (double)((const int64_t *)data)[i]
           : dtype == MS_DTYPE_I32 ? (double)((const int32_t *)data)[i]
           : dtype == MS_DTYPE_I16 ? (double)((const int16_t *)data)[i]
           : dtype == MS_DTYPE_I8  ? (double)((const int8_t *)data)[i]
           : dtype == MS_DTYPE_U8  ? (double)((const uint8_t *)data)[i]
                                   : (double)msi_load(data, dtype, i); // F32, F16, BF16
}

/* Counts what is not finite in a piece of a value, whose first element has this number. Elements
   with all bits set are poison that nobody has written over, if `poisoned`. */
static void msi_scan_piece(ms_nonfinite *n, const uint8_t *data, ms_dtype dtype, uint64_t count,
                           uint64_t first, bool poisoned) {
    const uint64_t size = ms_dtype_bytes(dtype);
    for (uint64_t i = 0; i < count && msi_is_float(dtype); i++) {
        const double x = msi_number(data, dtype, i);
        if (msi_is_finite(x) ||
            (poisoned && msi_is_filled_with(data + i * size, size, MSI_POISON_LAST))) {
            continue;
        }
        n->is_nan = n->count == 0 ? msi_is_nan(x) : n->is_nan;
        n->element = n->count == 0 ? first + i : n->element;
        n->count++;
    }
}

/* Whether memory is still poison. The scene serves as a buffer. */
static bool msi_is_poison(msi_trial *t, const uint8_t *memory, bool on_host, uint64_t bytes,
                          uint8_t poison) {
    const msi_debug *d = t->debug;
    const uint64_t room = d->image_bytes;
    bool filled = true;
    if (on_host || msi_is_direct(t->model)) {
        return msi_is_filled_with(memory, bytes, poison);
    }
    for (uint64_t done = 0; done < bytes && filled && t->result == MS_RESULT_OK; done += room) {
        const uint64_t part = bytes - done < room ? bytes - done : room;
        t->result = msi_copy(t->model, d->images, true, memory + done, false, part);
        filled = t->result != MS_RESULT_OK || msi_is_filled_with(d->images, part, poison);
    }
    return filled;
}

// the stage

static uint8_t *msi_stage_at(const msi_trial *t, int place, uint32_t half) {
    return (uint8_t *)t->debug->stage[place] + half * t->debug->half_bytes[place];
}

static uint8_t *msi_image_at(const msi_trial *t, msi_image image, int place) {
    const msi_debug *d = t->debug;
    return d->images + (uint64_t)image * d->image_bytes + (place ? d->half_bytes[0] : 0);
}

/* The bytes of an operand in an image that was taken of the run under way. */
static uint8_t *msi_bytes_in(const msi_trial *t, msi_image image, const msi_staged *s) {
    const msi_staged *at = &t->staged[t->how.set][t->lies_in[s - t->staged[t->how.set]]];
    return msi_image_at(t, image, at->place) + at->at;
}

/* The same where nothing is an alias of anything. */
static uint8_t *msi_own_bytes_in(const msi_trial *t, msi_image image, const msi_staged *s) {
    const msi_staged *at = &t->staged[MSI_SET_OWN][s->lies_in];
    return msi_image_at(t, image, at->place) + at->at;
}

/* The loop over the operands of a set. */
#define MSI_STAGED(s, t, set)                                                                      \
    const msi_staged *s = (t)->staged[set];                                                        \
    s < (t)->staged[set] + (t)->count[set];                                                        \
    s++

static bool msi_is_output(const msi_staged *s) {
    return s->group == MSI_GROUP_OUT || s->group == MSI_GROUP_SAVED;
}

/* A new operand, in the memory of an earlier one of the same live range. */
static msi_staged *msi_add_staged(msi_trial *t, msi_staged_set set, int group, uint32_t slot,
                                  uint32_t tensor, uint32_t range) {
    const ms_model *m = t->model;
    const uint32_t index = t->count[set]++;
    msi_staged *s = &t->staged[set][index];
    memset(s, 0, sizeof *s);
    s->group = group;
    s->slot = slot;
    s->tensor = tensor;
    s->range = range;
    s->lies_in = index;
    for (uint32_t k = 0; k < index && range != MSI_NONE && s->lies_in == index; k++) {
        s->lies_in = t->staged[set][k].range == range ? k : index;
    }
    const uint32_t residents = m->run.store->residents.count;
    s->is_transient = range == MSI_NONE || range >= residents;
    if (tensor != MSI_NONE) {
        s->place = group < MSI_GROUP_COUNT && m->graph.tensors.items[tensor].on_host;
        s->bytes = m->graph.tensors.items[tensor].bytes;
        s->is_f32 = m->graph.tensors.items[tensor].view.dtype == MS_DTYPE_F32;
    }
    return s;
}

/* The tensor of an operand; MSI_NONE for workspace. */
static uint32_t msi_tensor_in(const msi_graph *g, const msi_layer *l, int group, uint32_t slot) {
    return group == MSI_GROUP_WORKSPACE ? MSI_NONE
                                        : msi_group(g, l, msi_group_of_values(group))[slot];
}

/* Gives each operand its place in a half, one after the other. */
static void msi_place_staged(msi_trial *t, msi_staged_set set) {
    uint64_t end[MSI_PLACE_COUNT] = {MSI_GAP_BYTES, MSI_GAP_BYTES};
    msi_staged *last[MSI_PLACE_COUNT] = {NULL, NULL};
    for (uint32_t k = 0; k < t->count[set]; k++) {
        msi_staged *s = &t->staged[set][k];
        if (s->lies_in == k) {
            s->at = end[s->place];
            end[s->place] += msi_align(s->bytes) + MSI_GAP_BYTES;
            s->gap_end = end[s->place];
            last[s->place] = s;
        }
    }
    for (int place = 0; place < MSI_PLACE_COUNT; place++) {
        if (last[place]) {
            last[place]->gap_end = t->debug->half_bytes[place];
        }
        MEMSCALE_ASSERT(!last[place] || end[place] <= t->debug->half_bytes[place]);
    }
}

/* The operands of an instruction. What a layer did not declare to read is added as poison. */
static void msi_stage_instruction(msi_trial *t, uint32_t now) {
    const ms_model *m = t->model;
    const msi_instruction *i = t->instruction;
    const msi_operand *operands = t->program->operands.items + i->operand_first;
    const bool again = msi_is_again((msi_op)i->op);
    for (uint32_t k = 0; k < i->operand_count; k++) {
        uint32_t slot;
        const int group = msi_operand_group(t->layer, i, k, &slot);
        const uint32_t tensor = msi_tensor_in(&m->graph, t->layer, group, slot);
        const uint32_t range = operands[k].range;
        const bool optional = i->op == MSI_OP_FORWARD && group == MSI_GROUP_SAVED &&
                              tensor != MSI_NONE && (t->layer->optional_saved >> slot & 1);
        const bool given = range != MSI_NONE || group == MSI_GROUP_WORKSPACE || optional;
        const bool value = group == MSI_GROUP_IN || group == MSI_GROUP_PARAM ||
                           group == MSI_GROUP_STATE ||
                           (i->op == MSI_OP_BACKWARD && group < MSI_GROUP_COUNT);
        if (!given && (tensor == MSI_NONE || !value || !(again || i->op == MSI_OP_BACKWARD))) {
            continue;
        }
        msi_staged *s = msi_add_staged(t, MSI_SET_OWN, group, slot, tensor, range);
        s->is_undeclared = !given;
        s->beta = operands[k].accumulate ? 1.0f : 0.0f;
        s->is_made = given && msi_is_made(t->layer, i, group, slot);
        s->is_written = given && msi_is_written(t->layer, i, group, slot);
        if (range != MSI_NONE) {
            const msi_range *r = &t->program->ranges.items[range];
            s->bytes = tensor == MSI_NONE ? r->bytes : s->bytes; // a resident has room for more
            s->before = !s->is_transient || r->first < now
                            ? t->debug->shadow + msi_extent_of_range(m, t->program, range).shadow
                            : NULL;
        }
    }
    msi_place_staged(t, MSI_SET_OWN);
}

/* The value of a tensor that a recomputation would read: what its layer has made in this step, or a
   resident. NULL: there is none. */
static const uint8_t *msi_value_of(const msi_trial *t, uint32_t tensor) {
    const msi_debug *d = t->debug;
    const uint32_t resident = t->model->run.store->resident_of[tensor];
    return resident != MSI_NONE ? d->shadow + msi_extent_at(t->model, resident).shadow
           : d->is_made[tensor] ? d->made + d->made_at[tensor]
                                : NULL;
}

/* Whether an output can only be computed in the place of this input. */
static bool msi_is_worked_in(const msi_graph *g, const msi_layer *l, int group, uint32_t slot) {
    bool is = false;
    for (uint32_t j = 0; j < l->count[MSI_GROUP_OUT] && group == MSI_GROUP_IN; j++) {
        is |= (l->must_in_place >> j & 1) && (g->masks.items[l->mask_first + j] >> slot & 1);
    }
    return is;
}

/* The operands of a recomputation, whether or not the plan has one. False: a value is missing. */
static bool msi_stage_recompute(msi_trial *t) {
    const msi_graph *g = &t->model->graph;
    const msi_layer *l = t->layer;
    const msi_store *store = t->model->run.store;
    bool complete = true;
    t->count[MSI_SET_RECOMPUTE] = 0;
    for (int group = 0; group < MSI_GROUP_COUNT; group++) {
        const bool output = group == MSI_GROUP_OUT || group == MSI_GROUP_SAVED;
        const uint32_t reads = msi_op_reads(l, t->way, group);
        for (MSI_EACH(operand, g, l, group)) {
            const uint32_t resident = store->resident_of[operand.tensor];
            const bool read = reads >> operand.slot & 1;
            const bool apart = !read || msi_is_worked_in(g, l, group, operand.slot);
            msi_staged *s = msi_add_staged( // else one tensor in several slots has one memory
                t, MSI_SET_RECOMPUTE, group, operand.slot, operand.tensor,
                apart                  ? MSI_NONE
                : resident != MSI_NONE ? resident
                                       : store->residents.count + operand.tensor);
            s->is_made = s->is_written =
                output ? !read : group == MSI_GROUP_STATE && !l->keeps_state;
            s->is_undeclared = !output && !read;
            s->before = read ? msi_value_of(t, operand.tensor) : NULL;
            complete &= !read || s->before != NULL;
            if (group == MSI_GROUP_OUT && (l->must_in_place >> operand.slot & 1)) {
                const uint32_t in = msi_lowest_bit(g->masks.items[l->mask_first + operand.slot]);
                for (MSI_STAGED(x, t, MSI_SET_RECOMPUTE)) {
                    s->lies_in =
                        x->group == MSI_GROUP_IN && x->slot == in ? x->lies_in : s->lies_in;
                }
            }
        }
    }
    const bool own = t->way == MSI_OP_RECOMPUTE;
    const int which = own ? MSI_WORKSPACE_RECOMPUTE : MSI_WORKSPACE_FORWARD;
    msi_staged *s =
        msi_add_staged(t, MSI_SET_RECOMPUTE, MSI_GROUP_WORKSPACE, 0, MSI_NONE, MSI_NONE);
    s->bytes = msi_workspace_bytes(g, l, which);
    s->is_cleared = l->workspace[which].contents != MS_CONTENTS_ANY;
    s->is_written = true;
    msi_place_staged(t, MSI_SET_RECOMPUTE);
    return complete;
}

// one run

/* The number of regions, and the first of what is not on the stage or is no operand. */
static uint32_t msi_region_count(const msi_trial *t) {
    const uint32_t staged = t->count[MSI_SET_OWN] * MSI_REGION_KINDS;
    return staged + t->model->run.store->residents.count + 2;
}

static uint8_t msi_poison_of(const msi_trial *t, uint32_t region) {
    return (uint8_t)(region < t->how.reach ? MSI_POISON_LAST : MSI_POISON_FIRST);
}

static uint8_t msi_poison_of_staged(const msi_trial *t, const msi_staged *s, uint32_t kind) {
    const uint32_t index = (uint32_t)(s - t->staged[t->how.set]);
    const uint32_t region = kind * t->count[MSI_SET_OWN] + index;
    const bool output =
        kind == MSI_REGION_UNWRITTEN || (kind == MSI_REGION_NEW && msi_is_output(s));
    return (uint8_t)(t->how.set == MSI_SET_RECOMPUTE || region < t->how.reach ? MSI_POISON_LAST
                     : output                                                 ? MSI_POISON_OUTPUT
                                                                              : MSI_POISON_FIRST);
}

static uint8_t msi_poison_of_rest(const msi_trial *t) {
    return msi_poison_of(t, msi_region_count(t) - 1);
}

/* Whether a word of a value has all bits set, as no layer writes it where numbers are. */
static bool msi_is_unwritten(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word == UINT32_MAX;
}

/* A value that is finite and far from all gradients, so that adding to it changes it but little,
   and its bits as a pattern of four bytes. */
static const float msi_garbage = 1.2676506e30f; // 2^100

static void msi_fill_garbage(uint8_t *data, uint64_t bytes) {
    for (uint64_t i = 0; i + 4 <= bytes; i += 4) {
        memcpy(data + i, &msi_garbage, 4);
    }
}

/* Whether the gradient of an operand can be added to, or, with `anew`, can be written: by what the
   layer declares. */
static bool msi_takes_beta(const msi_trial *t, const msi_staged *s, bool anew) {
    const msi_layer *l = t->layer;
    const bool of_in = s->group == MSI_GROUP_GRAD_IN;
    const uint32_t sets =
        of_in ? (uint32_t)l->overwrites.in | l->must_grad_in_place : l->overwrites.param;
    const uint32_t adds = of_in ? l->accumulates.in : l->accumulates.param;
    return t->instruction->op == MSI_OP_BACKWARD && s->is_f32 &&
           (of_in || s->group == MSI_GROUP_GRAD_PARAM) && !(sets >> s->slot & 1) &&
           !(anew && (adds >> s->slot & 1));
}

/* The beta of a gradient in the run under way. The later slots of one tensor always add to what the
   first has made. */
static float msi_beta_of(const msi_trial *t, const msi_staged *s) {
    const bool first = s->lies_in == (uint32_t)(s - t->staged[MSI_SET_OWN]);
    return t->how.sums == MSI_SUMS_ADDED && msi_takes_beta(t, s, false)         ? 1.0f
           : t->how.sums == MSI_SUMS_NEW && first && msi_takes_beta(t, s, true) ? 0.0f
                                                                                : s->beta;
}

/* The operand that a result may alias in this round, or MSI_NONE. All that lie there must
   be allowed, and none may be taken. */
static uint32_t msi_alias_in_round(const msi_trial *t, const msi_staged *result) {
    const msi_graph *g = &t->model->graph;
    const msi_layer *l = t->layer;
    const uint32_t *mask = g->masks.items + l->mask_first;
    const uint32_t slot = result->slot, index = (uint32_t)(result - t->staged[MSI_SET_OWN]);
    const bool forward = result->group == MSI_GROUP_OUT;
    const uint32_t *grad = mask + l->count[MSI_GROUP_OUT] + 4 * slot;
    const uint32_t allowed[MSI_GROUP_END] = {forward ? mask[slot] : grad[0],
                                             forward ? 0u : grad[1],
                                             forward ? 0u : grad[2],
                                             0,
                                             0,
                                             forward ? 0u : grad[3],
                                             0,
                                             0,
                                             0};
    uint32_t left = t->how.round;
    bool single = !result->before && result->beta == 0.0f;
    for (uint32_t k = 0; k < t->count[MSI_SET_OWN]; k++) {
        single &= (t->staged[MSI_SET_OWN][k].lies_in == index) == (k == index);
    }
    if (!single) {
        return MSI_NONE;
    }
    for (uint32_t k = 0; k < t->count[MSI_SET_OWN]; k++) {
        const msi_staged *s = &t->staged[MSI_SET_OWN][k];
        bool usable = s->lies_in == k && s->before && s->is_transient && s->place == 0 &&
                      s->bytes == result->bytes;
        for (MSI_STAGED(x, t, MSI_SET_OWN)) {
            usable &= x->lies_in != k || (allowed[x->group] >> x->slot & 1);
        }
        left -= usable;
        if (usable && left == 0) {
            return k;
        }
    }
    return MSI_NONE;
}

/* Sets in whose memory the operands lie: false if nothing is an alias in this round. */
static bool msi_arrange(msi_trial *t) {
    const msi_staged *staged = t->staged[t->how.set];
    const uint32_t count = t->count[t->how.set];
    bool any = false;
    t->has_rivals = false;
    for (uint32_t k = 0; k < count; k++) {
        t->lies_in[k] = staged[k].lies_in;
    }
    for (uint32_t i = 0; i < count && t->how.round > 0; i++) {
        const uint32_t k = t->how.reversed ? count - 1 - i : i;
        const bool forward = t->instruction->op != MSI_OP_BACKWARD;
        const bool result = staged[k].group == (forward ? MSI_GROUP_OUT : MSI_GROUP_GRAD_IN);
        const uint32_t target =
            result && staged[k].is_made ? msi_alias_in_round(t, &staged[k]) : MSI_NONE;
        bool taken = target == MSI_NONE;
        for (uint32_t j = 0; j < count && !taken; j++) {
            taken = t->lies_in[j] == target && staged[j].lies_in != target;
            t->has_rivals |= taken;
        }
        t->lies_in[k] = taken ? t->lies_in[k] : target;
        any |= !taken;
    }
    return any;
}

/* Whether an operand has data in the run under way. */
static bool msi_is_given(const msi_trial *t, const msi_staged *s) {
    const uint32_t omitted = s->group == MSI_GROUP_OUT     ? t->how.omit_out
                             : s->group == MSI_GROUP_SAVED ? t->how.omit_saved
                                                           : 0;
    return !(omitted >> s->slot & 1);
}

/* The contents of an operand. Words of a value that no layer has written become poison, so that a
   layer which reads them is found. */
static void msi_set_staged(const msi_trial *t, const msi_staged *s) {
    uint8_t *to = msi_bytes_in(t, MSI_IMAGE_SCENE, s);
    const bool own = t->how.set == MSI_SET_OWN;
    const uint8_t unwritten = msi_poison_of_staged(t, s, MSI_REGION_UNWRITTEN);
    if (own && t->how.sums == MSI_SUMS_ADDED && msi_takes_beta(t, s, false)) {
        msi_fill_garbage(to, s->bytes);
    } else if (own && msi_beta_of(t, s) != s->beta) {
        memset(to, MSI_POISON_LAST, (size_t)s->bytes);
    } else if (s->is_cleared) {
        memset(to, 0, (size_t)s->bytes);
    } else if (!s->before || !msi_is_given(t, s)) {
        const uint32_t kind = s->is_undeclared ? MSI_REGION_UNDECLARED : MSI_REGION_NEW;
        memset(to, msi_poison_of_staged(t, s, kind), (size_t)s->bytes);
    } else {
        memcpy(to, s->before, (size_t)s->bytes);
        for (uint64_t i = 0;
             s->is_f32 && s->is_transient && unwritten != MSI_POISON_LAST && i + 4 <= s->bytes;
             i += 4) {
            if (msi_is_unwritten(to + i)) {
                memset(to + i, unwritten, 4);
            }
        }
    }
}

/* Fills the model's memory with poison, unless that was done for this reach before. */
static void msi_set_outside(msi_trial *t) {
    const uint32_t residents = t->model->run.store->residents.count;
    if (t->outside_reach == t->how.reach) {
        return;
    }
    t->outside_reach = t->how.reach;
    for (uint32_t i = 0; i <= residents; i++) {
        const msi_extent e = msi_extent_at(t->model, i);
        const uint8_t poison = msi_poison_of(t, t->count[MSI_SET_OWN] * MSI_REGION_KINDS + i);
        MSI_THEN(t->result, msi_fill(t->model, e.memory, e.on_host, poison, e.room));
    }
}

/* Sets the stage: the next half as the run needs it, the rest poison. */
static void msi_set_scene(msi_trial *t) {
    const msi_debug *d = t->debug;
    const uint8_t rest = msi_poison_of_rest(t);
    memset(msi_image_at(t, MSI_IMAGE_SCENE, 0), rest, (size_t)d->image_bytes);
    for (MSI_STAGED(s, t, t->how.set)) {
        if (s->lies_in == (uint32_t)(s - t->staged[t->how.set])) {
            uint8_t *end = msi_image_at(t, MSI_IMAGE_SCENE, s->place) + s->at + s->bytes;
            memset(end, msi_poison_of_staged(t, s, MSI_REGION_GAP),
                   (size_t)(s->gap_end - s->at - s->bytes));
        }
    }
    for (MSI_STAGED(s, t, t->how.set)) { // what gets its memory from another sets nothing
        const uint32_t index = (uint32_t)(s - t->staged[t->how.set]);
        if (t->lies_in[index] == index) {
            msi_set_staged(t, s);
        } else if (t->how.round > 0 && s->lies_in == index) { // its own place is empty
            uint8_t *at = msi_image_at(t, MSI_IMAGE_SCENE, s->place) + s->at;
            memset(at, msi_poison_of_staged(t, s, MSI_REGION_GAP), (size_t)s->bytes);
        }
    }
    msi_set_outside(t);
    for (int place = 0; place < MSI_PLACE_COUNT; place++) {
        const uint64_t half = d->half_bytes[place], tail = d->tail_bytes[place];
        if (half > 0) {
            MSI_THEN(t->result, msi_copy(t->model, msi_stage_at(t, place, t->half), place == 1,
                                         msi_image_at(t, MSI_IMAGE_SCENE, place), true, half));
            MSI_THEN(t->result,
                     msi_fill(t->model, msi_stage_at(t, place, !t->half), place == 1, rest, half));
            MSI_THEN(t->result,
                     msi_fill(t->model, msi_stage_at(t, place, 2), place == 1, rest, tail));
        }
    }
}

/* The call of a recomputation, made of that of another instruction of the layer. */
static void msi_turn_into_recompute(msi_trial *t, ms_call *call) {
    msi_views *views = &t->model->views;
    call->phase = MS_PHASE_RECOMPUTE;
    for (int group = 0; group < MSI_GROUP_WORKSPACE; group++) {
        for (uint32_t k = 0; k < views->count[group]; k++) {
            if (group < MSI_GROUP_COUNT) {
                views->of[group][k].data = NULL;
            } else {
                memset(&views->of[group][k], 0, sizeof views->of[group][k]);
            }
        }
    }
    call->workspace = NULL;
    call->workspace_bytes = 0;
}

/* Points a call to the stage. */
static void msi_aim_call(msi_trial *t, ms_call *call) {
    uint32_t wanted[MSI_GROUP_COUNT] = {0, 0, 0, 0, 0};
    for (MSI_STAGED(s, t, t->how.set)) {
        const msi_staged *at = &t->staged[t->how.set][t->lies_in[s - t->staged[t->how.set]]];
        uint8_t *data = msi_stage_at(t, at->place, t->half) + at->at;
        if (s->group == MSI_GROUP_WORKSPACE) {
            call->workspace = data;
            call->workspace_bytes = s->bytes;
            continue;
        }
        ms_view *view = &t->model->views.of[s->group][s->slot];
        view->data = msi_is_given(t, s) ? data : NULL;
        view->beta = t->how.set == MSI_SET_OWN ? msi_beta_of(t, s) : 0.0f;
        if (s->group < MSI_GROUP_COUNT && s->is_made && view->data) {
            wanted[s->group] |= (uint32_t)1 << s->slot;
        }
    }
    call->wanted_out = wanted[MSI_GROUP_OUT];
    call->wanted_saved = wanted[MSI_GROUP_SAVED];
}

/* Copies what the run has left. */
static void msi_take_image(msi_trial *t) {
    for (int place = 0; place < MSI_PLACE_COUNT; place++) {
        if (t->debug->half_bytes[place] > 0) {
            MSI_THEN(t->result, msi_copy(t->model, msi_image_at(t, t->how.into, place), true,
                                         msi_stage_at(t, place, t->half), place == 1,
                                         t->debug->half_bytes[place]));
        }
    }
}

// what is found

typedef struct msi_operand_text {
    char text[160];
} msi_operand_text;

/* `in[0], the value of "x"`; `its workspace of 64 bytes` */
static msi_operand_text msi_staged_name(const msi_trial *t, const msi_staged *s) {
    static const char *const of_gradients[] = {"grad_out", "grad_in", "grad_param"};
    const bool value = s->group < MSI_GROUP_COUNT;
    msi_operand_text name;
    if (s->group == MSI_GROUP_WORKSPACE) {
        msi_format(name.text, sizeof name.text, "its workspace of %llu bytes",
                   (unsigned long long)s->bytes);
    } else {
        msi_format(name.text, sizeof name.text, "%s[%u], the %s of \"%.100s\"",
                   value ? msi_group_names[s->group] : of_gradients[s->group - MSI_GROUP_GRAD_OUT],
                   (unsigned)s->slot, value ? "value" : "gradient",
                   msi_tensor_name(&t->model->graph, s->tensor));
    }
    return name;
}

/* "layer 3 "ln1": its backward callback <what> <where>: <cure>" */
static void msi_fail_contract(msi_trial *t, const char *what, const char *where, const char *cure) {
    ms_model *m = t->model;
    MSI_THEN(t->result, msi_fail(m, MS_RESULT_CONTRACT, "%s: its %s callback %s %s: %s",
                                 msi_layer_label(&m->graph, t->instruction->target).text,
                                 msi_phase_name(t->phase), what, where, cure));
}

static void msi_fail_operand(msi_trial *t, const char *what, const msi_staged *s,
                             const char *cure) {
    msi_fail_contract(t, what, msi_staged_name(t, s).text, cure);
}

/* What to do about an operand that was changed and may not be. */
static const char *msi_change_cure(const msi_trial *t, const msi_staged *s) {
    return s->is_undeclared              ? "it does not receive that: declare it, or leave it alone"
           : s->group == MSI_GROUP_STATE ? "keeps_state promised that a recomputation would not"
           : s->group == MSI_GROUP_PARAM
               ? "params change in updates alone; declare a buffer as state"
           : t->phase == MS_PHASE_BACKWARD
               ? "name it in clobbers, or in the grad_in_place and must_grad_in_place of the "
                 "gradient that is computed there"
           : t->model->graph.tensors.items[s->tensor].kind == MSI_KIND_BUFFER
               ? "name the buffer in state, not in in"
               : "name it in the in_place of the output that is computed there, and that output in "
                 "must_in_place if it cannot be computed elsewhere";
}

static const char *msi_overrun_cure(const msi_staged *s) {
    return s->group != MSI_GROUP_WORKSPACE ? "keep to the bytes of the view"
           : s->bytes == 0                 ? "declare it in the ms_workspace of this callback"
                                           : "declare more in the ms_workspace of this callback";
}

/* All bytes of the half that the layer may not write must be as they were set: first what lies
   between the operands, since who writes beyond one may hit the next too. */
static void msi_check_half(msi_trial *t) {
    bool written[MSI_MAX_VIEWS + 1];
    const msi_staged_set set = t->how.set;
    memset(written, 0, sizeof written);
    for (uint32_t k = 0; k < t->count[set]; k++) {
        written[t->lies_in[k]] |=
            t->staged[set][k].is_written && msi_is_given(t, &t->staged[set][k]);
    }
    for (int gaps = 1; gaps >= 0; gaps--) {
        for (MSI_STAGED(s, t, set)) {
            const uint32_t index = (uint32_t)(s - t->staged[set]);
            const uint64_t first = s->at + (gaps ? s->bytes : 0);
            const uint64_t end = gaps ? s->gap_end : s->at + s->bytes;
            const uint8_t *scene = msi_image_at(t, MSI_IMAGE_SCENE, s->place);
            const uint8_t *now = msi_image_at(t, t->how.into, s->place);
            if (s->lies_in == index && (gaps || !written[index]) && t->result == MS_RESULT_OK &&
                memcmp(scene + first, now + first, (size_t)(end - first)) != 0) {
                msi_fail_operand(t, gaps ? "writes beyond the end of" : "changes", s,
                                 gaps ? msi_overrun_cure(s) : msi_change_cure(t, s));
            }
        }
    }
    for (int place = 0; place < MSI_PLACE_COUNT && t->debug->half_bytes[place] > 0; place++) {
        const uint8_t *now = msi_image_at(t, t->how.into, place);
        if (!msi_is_filled_with(now, MSI_GAP_BYTES, msi_poison_of_rest(t))) {
            msi_fail_contract(t, "writes before the beginning of", "its first operand",
                              "keep to the bytes of the views");
        }
    }
}

/* The rest of the stage, where operands of earlier calls were, must be poison. */
static void msi_check_rest(msi_trial *t) {
    const msi_debug *d = t->debug;
    const uint8_t rest = msi_poison_of_rest(t);
    for (int place = 0; place < MSI_PLACE_COUNT; place++) {
        if (!msi_is_poison(t, msi_stage_at(t, place, !t->half), place == 1, d->half_bytes[place],
                           rest) ||
            !msi_is_poison(t, msi_stage_at(t, place, 2), place == 1, d->tail_bytes[place], rest)) {
            msi_fail_contract(t, "writes to", "memory of an earlier call",
                              "take all pointers from the present call, workspace included, and "
                              "keep none");
        }
    }
}

/* Whether a resident is an operand of the call. */
static bool msi_is_operand(const msi_trial *t, uint32_t resident) {
    bool is = false;
    for (MSI_STAGED(s, t, MSI_SET_OWN)) {
        is |= s->range == resident;
    }
    return is;
}

static msi_operand_text msi_resident_name(const msi_trial *t, uint32_t resident) {
    const msi_store *store = t->model->run.store;
    msi_operand_text name;
    if (resident >= store->residents.count) {
        msi_format(name.text, sizeof name.text, "transient values of the model");
    } else {
        const msi_resident *r = &store->residents.items[resident];
        msi_format(name.text, sizeof name.text, "the %s \"%.80s\", where it lies between calls",
                   msi_role_name(r->role), msi_tensor_name(&t->model->graph, r->tensor));
    }
    return name;
}

/* What to do about a resident that was written or read at its own address. */
static const char *msi_resident_cure(const msi_trial *t, uint32_t resident) {
    return msi_is_operand(t, resident)
               ? "it is an operand of this call: take its pointer from the call, every time; keep "
                 "none, not of borrowed memory either"
               : "it is no operand of this call: name it in the desc, take all pointers from the "
                 "call, and keep none";
}

/* The memory of the model must still be poison. */
static void msi_check_outside(msi_trial *t) {
    for (uint32_t i = 0; i <= t->model->run.store->residents.count; i++) {
        const msi_extent e = msi_extent_at(t->model, i);
        const uint32_t region = t->count[MSI_SET_OWN] * MSI_REGION_KINDS + i;
        if (t->result == MS_RESULT_OK &&
            !msi_is_poison(t, e.memory, e.on_host, e.room, msi_poison_of(t, region))) {
            msi_fail_contract(t, "writes to", msi_resident_name(t, i).text,
                              msi_resident_cure(t, i));
        }
    }
}

/* Runs the callback once, in one way; false if that way does not exist. All but the results must be
   as before. */
static bool msi_act(msi_trial *t, const msi_variant *how) {
    ms_call call;
    t->how = *how;
    if ((!msi_arrange(t) && how->round > 0) || t->result != MS_RESULT_OK) {
        return false;
    }
    t->half = t->debug->turn = !t->debug->turn;
    t->phase =
        how->set == MSI_SET_RECOMPUTE ? MS_PHASE_RECOMPUTE : msi_ops[t->instruction->op].phase;
    msi_set_scene(t);
    msi_fill_call(t->model, t->program, t->instruction, &call);
    if (how->set == MSI_SET_RECOMPUTE) {
        msi_turn_into_recompute(t, &call);
    }
    msi_aim_call(t, &call);
    t->is_acting = true;
    const msi_op op = how->set == MSI_SET_RECOMPUTE ? t->way : (msi_op)t->instruction->op;
    MSI_THEN(t->result, msi_call_layer(t->model, t->layer, &call, op == MSI_OP_RECOMPUTE));
    t->is_acting = false;
    msi_take_image(t);
    if (t->result == MS_RESULT_OK) {
        msi_check_half(t);
        msi_check_rest(t);
    }
    return t->result == MS_RESULT_OK;
}

/* Whether two runs have made other bits of an operand. Bytes of outputs that neither has written do
   not count: those that hold the poison of both. */
static bool msi_results_differ(const msi_staged *s, const uint8_t *a, const uint8_t *b) {
    if (memcmp(a, b, (size_t)s->bytes) == 0) {
        return false;
    }
    for (uint64_t i = 0; i < s->bytes; i++) {
        const bool unwritten =
            msi_is_output(s) && a[i] == MSI_POISON_OUTPUT && b[i] == MSI_POISON_LAST;
        if (a[i] != b[i] && !unwritten) {
            return true;
        }
    }
    return false;
}

/* The first result in which two runs differ, of which nothing was an alias, or NULL. */
static const msi_staged *msi_find_difference(const msi_trial *t, msi_image a, msi_image b) {
    for (MSI_STAGED(s, t, MSI_SET_OWN)) {
        if (s->is_made &&
            msi_results_differ(s, msi_own_bytes_in(t, a, s), msi_own_bytes_in(t, b, s))) {
            return s;
        }
    }
    return NULL;
}

static msi_variant msi_plain_variant(uint32_t reach, msi_image into) {
    msi_variant how;
    memset(&how, 0, sizeof how);
    how.reach = reach;
    how.into = into;
    return how;
}

/* Runs the layer with the poison of this reach, in the half of the last run that counts. Returns
   whether that run made the same bits as `image`. */
static bool msi_is_same_again(msi_trial *t, uint32_t reach, uint32_t half, msi_image image) {
    const msi_variant how = msi_plain_variant(reach, MSI_IMAGE_NOW);
    t->debug->turn = !half;
    return msi_act(t, &how) && !msi_find_difference(t, image, MSI_IMAGE_NOW);
}

/* Says what it is that influences the results. */
static void msi_blame_region(msi_trial *t, const msi_staged *result, uint32_t region) {
    const ms_model *m = t->model;
    const uint32_t count = t->count[MSI_SET_OWN], kind = region / (count ? count : 1);
    const uint32_t outside = count * MSI_REGION_KINDS, residents = m->run.store->residents.count;
    const msi_staged *s = region < outside ? &t->staged[MSI_SET_OWN][region % count] : result;
    char cure[256];
    if (region > outside + residents) {
        msi_fail_contract(t, "reads", "memory of an earlier call, or before its first operand",
                          "take all pointers from the present call, workspace included");
    } else if (region >= outside) {
        msi_fail_contract(t, "reads", msi_resident_name(t, region - outside).text,
                          msi_resident_cure(t, region - outside));
    } else if (kind == MSI_REGION_UNDECLARED) {
        msi_fail_operand(t, "reads, or asks whether there is,", s,
                         t->phase == MS_PHASE_BACKWARD
                             ? (s->group == MSI_GROUP_STATE ? "backward does not receive state: "
                                                              "copy what it needs to a saved tensor"
                                                            : "name it in backward_reads")
                             : "name it in recompute_reads");
    } else if (kind == MSI_REGION_GAP) {
        msi_fail_operand(t, "reads beyond the end of", s, msi_overrun_cure(s));
    } else if (kind == MSI_REGION_UNWRITTEN) {
        const uint32_t maker = m->graph.tensors.items[s->tensor].producer;
        msi_format(cure, sizeof cure,
                   "%s has left it out: let that write every element that is read",
                   maker == MSI_NONE ? "its layer" : msi_layer_label(&m->graph, maker).text);
        msi_fail_operand(t, "reads a part that nobody has written of", s, cure);
    } else if (s->group == MSI_GROUP_WORKSPACE) {
        msi_fail_operand(t, "reads, before it has written there,", s,
                         "set its contents to MS_CONTENTS_ZERO, or clear it in the callback");
    } else if (s->group == MSI_GROUP_GRAD_IN || s->group == MSI_GROUP_GRAD_PARAM) {
        msi_fail_operand(t, "adds to, multiplies or leaves unwritten", s,
                         "its beta is 0: write every element with =, or declare the slot in "
                         "accumulates");
    } else {
        msi_fail_operand(t, "adds to, or reads before it has written there,", s,
                         "write every element with =, or clear it first");
    }
}

/* Finds out why two runs differ, over different poison and in different halves. */
static void msi_explain_difference(msi_trial *t, const msi_staged *result) {
    const uint32_t half = t->half, all = msi_region_count(t);
    uint32_t same = 0, differs = all;
    if (!msi_is_same_again(t, all, half, MSI_IMAGE_LAST)) {
        msi_fail_operand(t, "gives other bits each time for", result,
                         "draw random numbers from ms_call.seed alone, and declare what forward "
                         "changes as state; or set no_recompute");
        return;
    }
    if (!msi_is_same_again(t, 0, half, MSI_IMAGE_FIRST)) {
        msi_fail_operand(
            t, "uses what an earlier call has left behind for", result,
            "take all pointers from the present call, and let forward hand on values to "
            "backward in saved tensors, not in variables that a recomputation or another "
            "layer overwrites");
        return;
    }
    while (differs - same > 1 && t->result == MS_RESULT_OK) {
        const uint32_t middle = same + (differs - same) / 2;
        if (msi_is_same_again(t, middle, half, MSI_IMAGE_FIRST)) {
            same = middle;
        } else {
            differs = middle;
        }
    }
    msi_blame_region(t, result, differs - 1);
}

// the ways to run a layer

/* Whether a recomputation has made other bits of an output than forward in this step. */
static bool msi_is_made_otherwise(const msi_trial *t, const msi_staged *s) {
    const msi_debug *d = t->debug;
    return msi_is_output(s) && s->is_made && msi_is_given(t, s) && d->is_made[s->tensor] &&
           memcmp(d->made + d->made_at[s->tensor], msi_bytes_in(t, MSI_IMAGE_NOW, s),
                  (size_t)s->bytes) != 0;
}

/* Where a recomputation makes other bits: names an operand that it did not declare to read, if with
   the value of that it would have made the right ones. */
static void msi_blame_undeclared(msi_trial *t) {
    const msi_variant how = t->how;
    for (uint32_t k = 0; k < t->count[MSI_SET_RECOMPUTE]; k++) {
        msi_staged *undeclared = &t->staged[MSI_SET_RECOMPUTE][k];
        const uint8_t *value =
            undeclared->is_undeclared ? msi_value_of(t, undeclared->tensor) : NULL;
        undeclared->before = value ? value : undeclared->before;
        if (!value || !msi_act(t, &how)) {
            continue;
        }
        bool same = true;
        for (MSI_STAGED(s, t, MSI_SET_RECOMPUTE)) {
            same &= !msi_is_made_otherwise(t, s);
        }
        undeclared->before = NULL;
        if (same) {
            msi_fail_operand(t, "reads, or asks whether there is,", undeclared,
                             "name it in recompute_reads");
        }
    }
}

/* As a recomputation, of all results or with some omitted, which must make the bits of forward. */
static void msi_try_recompute(msi_trial *t, uint32_t omit_out, uint32_t omit_saved) {
    msi_variant how = msi_plain_variant(msi_region_count(t), MSI_IMAGE_NOW);
    how.set = MSI_SET_RECOMPUTE;
    how.omit_out = omit_out;
    how.omit_saved = omit_saved;
    if (!msi_act(t, &how)) {
        return;
    }
    for (MSI_STAGED(s, t, MSI_SET_RECOMPUTE)) {
        if (msi_is_made_otherwise(t, s)) {
            msi_blame_undeclared(t);
            msi_fail_operand(
                t,
                t->instruction->op == MSI_OP_FORWARD
                    ? "makes other bits in MS_PHASE_RECOMPUTE for"
                    : "makes, run again before backward, other bits than forward did for",
                s,
                "draw random numbers from ms_call.seed alone, declare what forward changes as "
                "state, keep no value in variables that other layers overwrite, and write all "
                "that is wanted; or set no_recompute");
        }
    }
}

/* A recomputation, whether the plan has one or not: both ways, if there is a recompute callback. Of
   this also parts: the first result that it can be asked for, and all others. */
static void msi_try_recomputes(msi_trial *t) {
    uint32_t out = 0, saved = 0;
    t->way = MSI_OP_REPEAT;
    if (t->layer->recompute && msi_can_repeat(t->layer) && msi_stage_recompute(t)) {
        msi_try_recompute(t, 0, 0);
    }
    t->way = MSI_OP_RECOMPUTE;
    if (!msi_can_recompute(t->layer) || !msi_stage_recompute(t)) {
        return;
    }
    msi_try_recompute(t, 0, 0);
    for (MSI_STAGED(s, t, MSI_SET_RECOMPUTE)) {
        out |= (uint32_t)(s->group == MSI_GROUP_OUT && s->is_made) << s->slot;
        saved |= (uint32_t)(s->group == MSI_GROUP_SAVED && s->is_made) << s->slot;
    }
    const uint32_t first_out = out & (~out + 1), first_saved = out ? 0 : saved & (~saved + 1);
    if (t->layer->recompute && (out | saved) && ((out & (out - 1)) | saved)) {
        msi_try_recompute(t, out & ~first_out, saved & ~first_saved);
        msi_try_recompute(t, first_out, first_saved);
    }
}

/* Keeps what forward has made, or compares a recomputation with that. */
static void msi_log_made(msi_trial *t) {
    msi_debug *d = t->debug;
    for (MSI_STAGED(s, t, MSI_SET_OWN)) {
        if (!msi_is_output(s) || !s->is_made || t->result != MS_RESULT_OK) {
            continue;
        }
        const uint8_t *made = msi_own_bytes_in(t, MSI_IMAGE_LAST, s);
        if (t->instruction->op == MSI_OP_FORWARD) {
            memcpy(d->made + d->made_at[s->tensor], made, (size_t)s->bytes);
            d->is_made[s->tensor] = 1;
        } else if (msi_is_again((msi_op)t->instruction->op) && d->is_made[s->tensor] &&
                   memcmp(d->made + d->made_at[s->tensor], made, (size_t)s->bytes) != 0) {
            msi_fail_operand(
                t, "makes other bits than forward did for", s,
                "what it computes from was changed in between: declare it as state, or "
                "set no_recompute");
        }
    }
}

/* A result that differs where it, or another one, lies in the place of an operand. */
static void msi_blame_alias(msi_trial *t, const msi_staged *differs) {
    const msi_staged *staged = t->staged[MSI_SET_OWN], *result = differs;
    uint32_t k = (uint32_t)(differs - staged);
    for (uint32_t i = 0; t->lies_in[k] == staged[k].lies_in && i < t->count[MSI_SET_OWN]; i++) {
        k = t->lies_in[i] != staged[i].lies_in ? i : k;
    }
    char what[256];
    result = &staged[k];
    msi_format(what, sizeof what, "makes other bits for %s, when %s[%u] lies in the place of",
               msi_staged_name(t, differs).text, result->group == MSI_GROUP_OUT ? "out" : "grad_in",
               (unsigned)result->slot);
    msi_fail_operand(
        t, what, &staged[t->lies_in[k]],
        result->group == MSI_GROUP_OUT
            ? "in_place allows that: read all of the input before the output is written, "
              "or take it out of in_place"
            : "grad_in_place allows that: read all of it before the gradient is written, "
              "or take it out of grad_in_place");
}

/* Compares a run with aliases with the one apart. Unwritten bytes of outputs do not count. */
static void msi_compare_alias(msi_trial *t) {
    for (MSI_STAGED(s, t, MSI_SET_OWN)) {
        const uint8_t *apart = msi_own_bytes_in(t, MSI_IMAGE_LAST, s);
        const uint8_t *alias = msi_bytes_in(t, MSI_IMAGE_NOW, s);
        bool differ = false;
        for (uint64_t i = 0; s->is_made && i < s->bytes && !differ; i++) {
            differ = apart[i] != alias[i] && !(msi_is_output(s) && apart[i] == MSI_POISON_LAST);
        }
        if (differ) {
            msi_blame_alias(t, s);
        }
    }
}

/* Results in the place of operands, as the masks allow: as many rounds as there are candidates. */
static void msi_try_aliases(msi_trial *t) {
    msi_variant how = msi_plain_variant(msi_region_count(t), MSI_IMAGE_NOW);
    for (how.round = 1; msi_act(t, &how); how.round++) {
        msi_compare_alias(t);
        how.reversed = true;
        if (t->has_rivals && msi_act(t, &how)) {
            msi_compare_alias(t);
        }
        how.reversed = false;
    }
}

/* Whether a word of a gradient is far from the number that it held, to which the layer should have
   added; or not finite, where it is finite over other contents. */
static bool msi_is_wrong_sum(const msi_trial *t, const uint8_t *now, const uint8_t *planned) {
    float value, before;
    memcpy(&value, now, 4);
    memcpy(&before, planned, 4);
    const bool finite = msi_is_finite((double)value);
    return t->how.sums == MSI_SUMS_ADDED
               ? finite && fabsf(value - msi_garbage) > msi_garbage * 1e-3f
               : !finite && msi_is_finite((double)before);
}

/* Whether a gradient has another beta in the run under way than in the plan. */
static bool msi_is_probed(const msi_trial *t, const msi_staged *s) {
    return t->how.sums == MSI_SUMS_ADDED ? msi_takes_beta(t, s, false)
                                         : msi_beta_of(t, s) != s->beta;
}

/* Runs with gradients that others have contributed to, or that nobody has, where the plan has it
   the other way round. */
static void msi_try_sums(msi_trial *t, msi_sums sums) {
    msi_variant how = msi_plain_variant(msi_region_count(t), MSI_IMAGE_NOW);
    bool any = false;
    how.sums = t->how.sums = sums;
    for (MSI_STAGED(s, t, MSI_SET_OWN)) {
        any |= msi_is_probed(t, s);
    }
    if (!any || !msi_act(t, &how)) {
        return;
    }
    for (MSI_STAGED(s, t, MSI_SET_OWN)) {
        const uint8_t *now = msi_bytes_in(t, MSI_IMAGE_NOW, s);
        const uint8_t *planned = msi_own_bytes_in(t, MSI_IMAGE_LAST, s);
        const bool probed = msi_is_probed(t, s);
        bool wrong = false;
        for (uint64_t i = 0; probed && i + 4 <= s->bytes && !wrong; i += 4) {
            wrong = msi_is_wrong_sum(t, now + i, planned + i);
        }
        if (wrong && sums == MSI_SUMS_ADDED) {
            msi_fail_operand(
                t, "writes over, or multiplies, where others contribute to it,", s,
                "add to what beta 1 says is there (+=; not *= 0 or a beta of 0 first), "
                "or declare the slot in overwrites");
        } else if (wrong) {
            msi_fail_operand(t, "adds to, multiplies or leaves unwritten, where beta is 0,", s,
                             "write every element with =, or declare the slot in accumulates");
        }
    }
}

/* Without the saved tensors that are optional. */
static void msi_try_without_optional(msi_trial *t) {
    msi_variant how = msi_plain_variant(msi_region_count(t), MSI_IMAGE_NOW);
    uint32_t given = 0;
    for (MSI_STAGED(s, t, MSI_SET_OWN)) {
        given |= (uint32_t)(s->group == MSI_GROUP_SAVED && s->is_made) << s->slot;
    }
    how.omit_saved = given & t->layer->optional_saved;
    if (how.omit_saved == 0 || !msi_act(t, &how)) {
        return;
    }
    for (MSI_STAGED(s, t, MSI_SET_OWN)) {
        if (s->is_made && msi_is_given(t, s) &&
            memcmp(msi_own_bytes_in(t, MSI_IMAGE_LAST, s), msi_bytes_in(t, MSI_IMAGE_NOW, s),
                   (size_t)s->bytes) != 0) {
            msi_fail_operand(t, "makes other bits, without its optional saved tensors, for", s,
                             "compute it without them, or leave them out of optional_saved");
        }
    }
}

/* Runs the layer in all the ways that its declarations allow, also in those that the plan has not
   chosen. */
static void msi_run_trials(msi_trial *t) {
    const msi_op op = (msi_op)t->instruction->op;
    const bool once = op == MSI_OP_FORWARD && !msi_can_repeat(t->layer);
    const msi_variant first = msi_plain_variant(0, MSI_IMAGE_FIRST);
    const uint32_t inner = MSI_REGION_GAP * t->count[MSI_SET_OWN]; // += 1 on NaN would not show
    const msi_variant last = msi_plain_variant(once ? inner : msi_region_count(t), MSI_IMAGE_LAST);
    const bool keeps = t->layer->count[MSI_GROUP_STATE] == 0 || t->layer->keeps_state;
    if (!once && msi_act(t, &first)) {
        const uint32_t half = t->half;
        msi_check_outside(t);
        if (op == MSI_OP_BACKWARD && keeps) { // others may have run since forward
            msi_try_recomputes(t);
        }
        t->debug->turn = half; // the other half is next
    }
    if (!msi_act(t, &last)) {
        return;
    }
    const msi_staged *differs =
        once ? NULL : msi_find_difference(t, MSI_IMAGE_FIRST, MSI_IMAGE_LAST);
    if (differs) {
        msi_explain_difference(t, differs);
    }
    msi_log_made(t);
    if (op == MSI_OP_FORWARD) {
        msi_try_recomputes(t);
    }
    if (!once) {
        if (op == MSI_OP_FORWARD) {
            msi_try_without_optional(t);
        }
        msi_try_aliases(t);
        msi_try_sums(t, MSI_SUMS_ADDED);
        msi_try_sums(t, MSI_SUMS_NEW);
    }
    msi_check_outside(t);
}

/* Notes the first result of a step that is not finite, if it is among these. */
static void msi_note_nonfinite(msi_trial *t) {
    ms_model *m = t->model;
    const msi_graph *g = &m->graph;
    for (MSI_STAGED(s, t, MSI_SET_OWN)) {
        if (!s->is_made || m->run.nonfinite.count > 0) {
            continue;
        }
        const ms_dtype dtype = g->tensors.items[s->tensor].view.dtype;
        ms_nonfinite *n = &m->run.nonfinite;
        msi_scan_piece(n, msi_own_bytes_in(t, MSI_IMAGE_LAST, s), dtype,
                       s->bytes / ms_dtype_bytes(dtype), 0, true);
        if (n->count > 0) {
            n->layer = msi_layer_handle(g, t->instruction->target);
            n->tensor = msi_handle(g, s->tensor,
                                   s->group < MSI_GROUP_COUNT ? MSI_ROLE_VALUE : MSI_ROLE_GRADIENT);
            n->phase = msi_ops[t->instruction->op].phase;
            msi_log(m, MS_LOG_WARNING, "debug", "not finite: %s", msi_nonfinite_name(m, n).text);
        }
    }
}

/* Puts the results where the shadow has the operands, and poison where the layer may destroy. */
static void msi_keep_results(msi_trial *t) {
    uint8_t *shadow = t->debug->shadow;
    for (int made = 0; made <= 1; made++) {
        for (MSI_STAGED(s, t, MSI_SET_OWN)) {
            if (s->range == MSI_NONE || !s->is_written || s->is_made != (made == 1)) {
                continue;
            }
            uint8_t *to = shadow + msi_extent_of_range(t->model, t->program, s->range).shadow;
            if (made) {
                memcpy(to, msi_own_bytes_in(t, MSI_IMAGE_LAST, s), (size_t)s->bytes);
            } else {
                memset(to, MSI_POISON_LAST, (size_t)s->bytes);
            }
        }
    }
}

/* The address on the stage of an operand of the callback that runs; NULL: there is none. */
static void *msi_staged_address(const ms_model *m, uint32_t tensor, msi_role role) {
    const msi_debug *d = m->run.store ? m->run.store->debug : NULL;
    const msi_trial *t = d ? d->trial : NULL;
    const msi_staged_set set = t ? t->how.set : MSI_SET_OWN;
    if (!t || !t->is_acting) {
        return NULL;
    }
    for (MSI_STAGED(s, t, set)) {
        const bool value = s->group < MSI_GROUP_COUNT;
        if (s->tensor == tensor && value == (role == MSI_ROLE_VALUE) &&
            (value || role == MSI_ROLE_GRADIENT) && !s->is_undeclared && msi_is_given(t, s)) {
            const msi_staged *at = &t->staged[set][t->lies_in[s - t->staged[set]]];
            return msi_stage_at(t, at->place, t->half) + at->at;
        }
    }
    return NULL;
}

static ms_result msi_debug_layer(ms_model *m, const msi_program *p, uint32_t now) {
    msi_debug *d = m->run.store->debug;
    msi_trial *t = d->trial;
    memset(t, 0, sizeof *t);
    t->model = m;
    t->debug = d;
    t->program = p;
    t->instruction = &p->instructions.items[now];
    t->layer = &m->graph.layers.items[t->instruction->target];
    t->phase = msi_ops[t->instruction->op].phase;
    t->outside_reach = MSI_NONE;
    msi_log(m, MS_LOG_DEBUG, "debug", "%s: %s", // so that even a crash has a name
            msi_layer_label(&m->graph, t->instruction->target).text, msi_phase_name(t->phase));
    t->result = msi_shadow_all(m, false);
    if (t->result != MS_RESULT_OK) {
        return t->result;
    }
    msi_stage_instruction(t, now);
    msi_run_trials(t);
    if (t->result == MS_RESULT_OK) {
        msi_note_nonfinite(t);
        msi_keep_results(t);
    }
    const msi_errors errors = m->errors;
    const ms_result restored = msi_shadow_all(m, true);
    if (restored != MS_RESULT_OK && msi_shadow_all(m, true) != MS_RESULT_OK) {
        m->run.updates_done++; // params are lost: the model has failed
    }
    if (t->result != MS_RESULT_OK) {
        m->errors = errors;
    }
    return t->result == MS_RESULT_OK ? restored : t->result;
}

// memory

/* The bytes of a half that a layer needs, on the device or the host: all that it could be given. */
static uint64_t msi_half_bytes_of(const msi_graph *g, const msi_layer *l, int place) {
    uint64_t bytes = MSI_GAP_BYTES + MSI_SLACK_BYTES, workspace = 0;
    for (int group = 0; group < MSI_GROUP_COUNT; group++) {
        const bool twice =
            group == MSI_GROUP_IN || group == MSI_GROUP_OUT || group == MSI_GROUP_PARAM;
        for (MSI_EACH(operand, g, l, group)) {
            const msi_tensor *x = &g->tensors.items[operand.tensor];
            const uint64_t one = msi_align(x->largest_bytes) + MSI_GAP_BYTES;
            bytes += x->on_host == (place == 1) ? one : 0;
            bytes += twice && place == 0 ? one : 0;
        }
    }
    for (int i = 0; i < 3 && place == 0; i++) {
        const ms_workspace *w = &l->workspace[i];
        const uint64_t all = w->bytes + w->row_bytes * msi_layer_rows(g, l, true);
        workspace = all > workspace ? all : workspace;
    }
    return msi_align(bytes + msi_align(workspace) + MSI_GAP_BYTES);
}

/* Sets the sizes of what debug mode needs beside a store. */
static void msi_size_debug(const ms_model *m, const msi_store *store, msi_debug *d) {
    const msi_graph *g = &m->graph;
    bool on_host = false;
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const msi_tensor *x = &g->tensors.items[t];
        d->made_bytes += msi_is_resident(x) ? 0 : msi_align(x->largest_bytes);
        on_host |= x->on_host;
    }
    for (int place = 0; place < (on_host ? 2 : 1); place++) {
        for (uint32_t i = 0; i < g->layers.count; i++) {
            d->half_bytes[place] =
                msi_larger(d->half_bytes[place], msi_half_bytes_of(g, &g->layers.items[i], place));
        }
        d->tail_bytes[place] =
            d->half_bytes[place] < MSI_TAIL_BYTES ? d->half_bytes[place] : MSI_TAIL_BYTES;
    }
    d->image_bytes = d->half_bytes[0] + d->half_bytes[1];
    d->images_bytes = MSI_IMAGE_COUNT * d->image_bytes;
    d->trial_bytes = sizeof(msi_trial);
    for (int place = 0; place < MSI_PLACE_COUNT; place++) {
        d->stage_bytes[place] = 2 * d->half_bytes[place] + d->tail_bytes[place];
    }
    d->shadow_bytes = store->resident_bytes + store->host_bytes + store->borrowed_bytes +
                      store->transient_bytes + 1;
    d->tensor_count = g->tensors.count;
}

/* Debug mode: the stage, a copy of everything in memory, and what forward makes. */
static ms_result msi_alloc_debug(ms_model *m, msi_store *store) {
    const ms_allocator *a = &m->config.allocator;
    if (!m->config.debug) {
        return MS_RESULT_OK;
    }
    msi_debug *d = store->debug = (msi_debug *)msi_alloc_zeroed(a, sizeof *d);
    if (!d) {
        return msi_fail_memory(m, "debug mode", sizeof *d);
    }
    msi_size_debug(m, store, d);
    d->shadow = (uint8_t *)msi_alloc(a, d->shadow_bytes);
    d->images = (uint8_t *)msi_alloc(a, d->images_bytes);
    d->made = (uint8_t *)msi_alloc(a, d->made_bytes + 1);
    d->made_at = (uint64_t *)msi_alloc(a, d->tensor_count * sizeof(uint64_t));
    d->is_made = (uint8_t *)msi_alloc_zeroed(a, d->tensor_count);
    d->trial = (msi_trial *)msi_alloc_zeroed(a, sizeof(msi_trial));
    if (!d->shadow || !d->images || !d->made || !d->made_at || !d->is_made || !d->trial) {
        return msi_fail_memory(m, "the copies that debug mode keeps: a smaller batch takes less",
                               d->shadow_bytes + d->images_bytes + d->made_bytes);
    }
    uint64_t at = 0;
    for (uint32_t t = 0; t < d->tensor_count; t++) {
        const msi_tensor *x = &m->graph.tensors.items[t];
        d->made_at[t] = at;
        at += msi_is_resident(x) ? 0 : msi_align(x->largest_bytes);
    }
    ms_result result = msi_device_alloc(m, d->stage_bytes[0], &d->stage[0]);
    uint8_t *host = NULL;
    MSI_THEN(result, msi_host_alloc(m, d->stage_bytes[1], &host));
    d->stage[1] = host;
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>timing  empirical profiling: measures the first steps, and learns times from them

static uint64_t msi_timing_bytes(const msi_timing *t) {
    return sizeof *t + (2ull + t->wanted) * t->series_count * sizeof(double);
}

static void msi_timing_free(const ms_allocator *a, msi_timing *t) {
    msi_release(a, t, t ? msi_timing_bytes(t) : 0);
}

/* Allocates the series of samples, once, if the steps of this model are to be timed. */
static ms_result msi_make_timing(ms_model *m) {
    const ms_config *c = &m->config;
    msi_timing t;
    memset(&t, 0, sizeof t);
    t.wanted = c->warmup_steps ? c->warmup_steps : 2;
    t.series_count = 3 * m->graph.layers.count + (MSI_COST_MEASURED_END - MSI_COST_LAYER_END);
    if (m->run.timing && m->run.timing->series_count != t.series_count) { // of a wrap that failed
        msi_timing_free(&c->allocator, m->run.timing);
        m->run.timing = NULL;
    }
    if (m->run.timing || c->empirical_profiling != MS_SWITCH_ON || c->debug || c->dry_run) {
        return MS_RESULT_OK;
    }
    const uint64_t bytes = msi_timing_bytes(&t);
    m->run.timing = (msi_timing *)msi_alloc_zeroed(&c->allocator, bytes);
    if (!m->run.timing) {
        return msi_fail_memory(m, "the times of the first steps", bytes);
    }
    t.us = (double *)(void *)(m->run.timing + 1);
    t.amount = t.us + t.series_count;
    t.samples = t.amount + t.series_count;
    *m->run.timing = t;
    return MS_RESULT_OK;
}

/* Whether the instructions that run now are timed. */
static bool msi_is_timed(const msi_run *r) {
    const msi_timing *t = r->timing;
    return t && (t->stage == MSI_WARMUP_SAMPLE || t->stage == MSI_WARMUP_SHOW) &&
           r->program == &r->plan->train;
}

/* What timing adds on an asynchronous device: the time to enqueue next to nothing and wait. */
static ms_result msi_measure_overhead(ms_model *m) {
    msi_timing *t = m->run.timing;
    ms_result result = msi_synchronize(m);
    t->overhead_us = 0.0;
    for (int i = 0; i < 3 && result == MS_RESULT_OK && m->config.backend.is_asynchronous; i++) {
        const double start_us = msi_now_us();
        result = msi_upload_step(m); // once more
        MSI_THEN(result, msi_synchronize(m));
        const double us = msi_now_us() - start_us;
        t->overhead_us = i == 0 || us < t->overhead_us ? us : t->overhead_us;
    }
    return result;
}

/* At the beginning of a step that is timed, or of one of its micro-batches. */
static ms_result msi_begin_timing(ms_model *m) {
    msi_timing *t = m->run.timing;
    const ms_result result = msi_measure_overhead(m);
    if (m->run.micro == 0) {
        memset(t->us, 0, t->series_count * sizeof *t->us);
        memset(t->amount, 0, t->series_count * sizeof *t->amount);
    }
    m->run.plan->train.is_measured = false;
    t->begin_us = msi_now_us();
    return result;
}

/* Adds the time of an instruction to its series. */
static void msi_add_time(ms_model *m, const msi_program *p, uint32_t now, double us) {
    msi_timing *t = m->run.timing;
    const msi_instruction *i = &p->instructions.items[now];
    const msi_cost cost = msi_ops[i->op].cost;
    const bool of_layer = msi_calls_layer((msi_op)i->op);
    if (cost >= MSI_COST_MEASURED_END || cost == MSI_COST_NONE || msi_is_free(p, i) ||
        (i->op == MSI_OP_ZERO && m->run.micro > 0)) {
        return;
    }
    const double amount = of_layer
                              ? msi_output_elements(&m->graph, &m->graph.layers.items[i->target])
                              : msi_moved_bytes(p, i);
    const uint32_t series = of_layer
                                ? 3 * i->target + (uint32_t)(cost - MSI_COST_FORWARD)
                                : 3 * m->graph.layers.count + (uint32_t)(cost - MSI_COST_LAYER_END);
    t->us[series] += amount > 0.0 ? us : 0.0;
    t->amount[series] += amount;
}

/* Notes the time of an instruction. In a step that is not timed, an asynchronous device runs one
   instruction while the next is enqueued, so of the overhead only the launch counts. */
static void msi_note_time(ms_model *m, uint32_t now, double start_us, double end_us) {
    const msi_timing *t = m->run.timing;
    msi_program *p = &m->run.plan->train;
    double us = end_us - start_us - t->overhead_us;
    us = us > 0.0 ? us : 0.0;
    if (msi_calls_layer((msi_op)p->instructions.items[now].op) &&
        m->config.backend.is_asynchronous) {
        us += m->costs.hardware.launch_us;
    }
    p->measured.items[2 * now] = start_us - t->begin_us;
    p->measured.items[2 * now + 1] = us;
    msi_add_time(m, p, now, us);
}

/* Whether the device has halted the step that is done. Waits for it. */
static ms_result msi_was_halted(ms_model *m, bool *halted) {
    ms_result result = msi_fetch_verdict(m);
    MSI_THEN(result, msi_synchronize(m));
    *halted = m->run.verdict == MSI_VERDICT_COPIED &&
              msi_verdict(m, false)->halted != (uint32_t)MS_HALT_NONE;
    return result;
}

/* Median of the samples of a series, those of 0 left out; 0 if there are none. Sorts them (Shell,
   "A high-speed sorting procedure", 1959). */
static double msi_median(const msi_timing *t, uint32_t series) {
    double *samples = t->samples + (uint64_t)series * t->wanted;
    const uint32_t count = t->sample_count;
    for (uint32_t gap = count / 2; gap > 0; gap /= 2) {
        for (uint32_t i = gap; i < count; i++) {
            const double moved = samples[i];
            uint32_t k = i;
            for (; k >= gap && samples[k - gap] > moved; k -= gap) {
                samples[k] = samples[k - gap];
            }
            samples[k] = moved;
        }
    }
    uint32_t none = 0;
    while (none < count && samples[none] <= 0.0) {
        none++;
    }
    const double *high = samples + none + (count - none) / 2;
    return none == count ? 0.0 : (count - none) % 2 ? *high : 0.5 * (high[-1] + *high);
}

/* The time of a recomputation that was not measured: that of forward; for a callback of its own its
   prediction, corrected by the same factor as that of forward. */
static double msi_infer_recompute_us(const ms_model *m, const msi_layer *l, double forward_us) {
    const ms_layer_time guess = msi_static_time(&m->graph, &m->costs, l);
    return l->recompute && guess.forward_us > 0.0
               ? guess.recompute_us * forward_us / guess.forward_us
               : forward_us;
}

/* From now on plans use the samples. */
static void msi_learn_times(ms_model *m) {
    const msi_timing *t = m->run.timing;
    const uint32_t layers = m->graph.layers.count;
    for (uint32_t i = 0; i < layers; i++) {
        msi_layer *l = &m->graph.layers.items[i];
        const double elements = msi_output_elements(&m->graph, l);
        ms_layer_time time;
        time.forward_us = elements * msi_median(t, 3 * i);
        time.backward_us = elements * msi_median(t, 3 * i + 1);
        time.recompute_us = elements * msi_median(t, 3 * i + 2);
        if (!(time.recompute_us > 0.0)) {
            time.recompute_us = msi_infer_recompute_us(m, l, time.forward_us);
        }
        msi_set_measured(l, &time, elements);
    }
    for (uint32_t cost = MSI_COST_LAYER_END; cost < MSI_COST_MEASURED_END; cost++) {
        const double us = msi_median(t, 3 * layers + (cost - MSI_COST_LAYER_END));
        m->costs.bytes_per_us[cost] = us > 0.0 ? 1.0 / us : m->costs.bytes_per_us[cost];
    }
}

/* The end of a step. `timed` says whether that step was. */
static ms_result msi_end_timing(ms_model *m, bool timed) {
    msi_timing *t = m->run.timing;
    bool halted = false;
    const ms_result result = timed ? msi_was_halted(m, &halted) : MS_RESULT_OK;
    if (result != MS_RESULT_OK || halted) {
        return result;
    }
    m->run.plan->train.is_measured |= timed;
    if (t->stage == MSI_WARMUP_SAMPLE) {
        for (uint32_t k = 0; k < t->series_count; k++) {
            t->samples[(uint64_t)k * t->wanted + t->sample_count] =
                t->amount[k] > 0.0 ? t->us[k] / t->amount[k] : 0.0;
        }
        if (++t->sample_count == t->wanted) {
            msi_learn_times(m);
            t->stage = MSI_WARMUP_PLAN;
        }
    } else if (t->stage != MSI_WARMUP_PLAN && t->stage != MSI_WARMUP_DONE) {
        t->stage = (msi_warmup)((int)t->stage + 1);
    }
    return MS_RESULT_OK;
}

// ------------------------------------------------------------------------------------------------
// >>execute  run a program: no allocation, no lookup by name

/* The factor of the loss in the value that is reported, for a step that begins now. */
static float msi_loss_factor(const ms_model *m) {
    return m->loss_factor != 0.0f
               ? m->loss_factor
               : 1.0f / (float)ms_shape_count(&m->graph.tensors.items[m->graph.loss].view.shape);
}

/* The factor of the loss in its gradient: the mean over all micro-batches is minimised. */
static float msi_gradient_factor(const ms_model *m) {
    return m->loss_factor != 0.0f ? m->loss_factor
                                  : msi_loss_factor(m) / (float)m->run.store->micro_count;
}

static ms_result msi_run_fill(ms_model *m, const msi_program *p, const msi_instruction *i) {
    const uint32_t range = p->operands.items[i->operand_first].range;
    const uint64_t bytes = p->ranges.items[range].bytes;
    void *memory = msi_address(m, p, range);
    if (i->op == MSI_OP_SEED) {
        const int error = m->config.backend.fill_f32(m->device, memory, m->run.step_factor,
                                                     bytes / sizeof(float));
        return msi_device(m, error, "fill");
    }
    const bool later = range < m->run.store->residents.count && m->run.micro > 0;
    return later ? MS_RESULT_OK : msi_fill(m, memory, false, 0, bytes);
}

/* The operands of an instruction that makes its first from its second. */
typedef struct msi_pair {
    uint32_t target_range, source_range;
    void *target;
    const void *source;
    uint64_t bytes;
} msi_pair;

static msi_pair msi_pair_of(const ms_model *m, const msi_program *p, const msi_instruction *i) {
    msi_pair pair;
    pair.target_range = p->operands.items[i->operand_first].range;
    pair.source_range = p->operands.items[i->operand_first + 1u].range;
    pair.target = msi_address(m, p, pair.target_range);
    pair.source = msi_address(m, p, pair.source_range);
    pair.bytes = m->graph.tensors.items[i->target].bytes;
    return pair;
}

static ms_result msi_run_add(ms_model *m, const msi_program *p, const msi_instruction *i) {
    const msi_pair pair = msi_pair_of(m, p, i);
    const int error =
        m->config.backend.add_f32(m->device, pair.target, pair.source, pair.bytes / sizeof(float));
    return msi_device(m, error, "add");
}

/* Copies, unless the target aliases the source; between the host and the device it issues the copy
   only, and a WAIT follows. Notes whether a recomputation has old state in place. */
static ms_result msi_run_copy(ms_model *m, const msi_program *p, const msi_instruction *i) {
    const msi_pair pair = msi_pair_of(m, p, i);
    ms_result result = MS_RESULT_OK;
    m->run.state_is_old |= pair.target_range < m->run.store->residents.count && !i->restores;
    if (i->op == MSI_OP_COPY) {
        result = pair.target == pair.source
                     ? MS_RESULT_OK
                     : msi_copy(m, pair.target, false, pair.source, false, pair.bytes);
    } else if (m->run.recording) {
        result = msi_fail(m, MS_RESULT_UNSUPPORTED,
                          "\"%s\" is copied from or to the host within a step, which a CUDA graph "
                          "cannot record: leave cuda_graph off",
                          msi_tensor_name(&m->graph, i->target));
    } else if (i->op == MSI_OP_COPY_IN) {
        result = msi_issue_copy_in(m, pair.target, pair.source, pair.bytes, MSI_EVENT_IN);
    } else {
        result = msi_copy_out(m, pair.target, pair.source, pair.bytes, MSI_EVENT_OUT);
    }
    if (i->restores && result == MS_RESULT_OK) {
        m->run.state_is_old = i[1].restores; // a backward follows in any case
    }
    return result;
}

/* Waits for a copy, on the device and on the host, since callbacks may use either end. */
static ms_result msi_run_wait(ms_model *m, const msi_program *p, const msi_instruction *i) {
    const msi_pair pair = msi_pair_of(m, p, i);
    const uint32_t event =
        msi_is_on_host(m->run.store, pair.target_range) ? MSI_EVENT_OUT : MSI_EVENT_IN;
    const ms_result result = msi_wait_on_device(m, event);
    return result == MS_RESULT_OK ? msi_wait_on_host(m, event) : result;
}

/* Whether memory without live ranges is poisoned for AddressSanitizer. Not in debug mode, which
   copies all of it. */
static bool msi_watches_memory(const ms_model *m) {
#ifdef MSI_ASAN
    return msi_is_direct(m) && !m->config.debug;
#else
    (void)m;
    return false;
#endif
}

/* For AddressSanitizer: before an instruction unpoisons the live ranges that begin with it, after
   it poisons the blocks that end with it. */
static void msi_mark_operands(ms_model *m, const msi_program *p, uint32_t now, bool after) {
    const msi_instruction *i = &p->instructions.items[now];
    for (uint32_t k = 0; k < i->operand_count; k++) {
        const uint32_t index = p->operands.items[i->operand_first + k].range;
        const msi_range *range = index == MSI_NONE ? NULL : &p->ranges.items[index];
        if (!range || range->block == MSI_NONE) {
            continue;
        }
        const msi_block *block = &p->blocks.items[range->block];
        if (after && block->last == now) {
            msi_asan_poison(msi_address(m, p, index), block->bytes);
        } else if (!after && range->first == now) {
            msi_asan_unpoison(msi_address(m, p, index), range->bytes);
        }
    }
}

static ms_result msi_run_layer(ms_model *m, const msi_program *p, uint32_t now) {
    if (m->config.debug) {
        return msi_debug_layer(m, p, now);
    }
    const msi_instruction *i = &p->instructions.items[now];
    ms_call call;
    msi_fill_call(m, p, i, &call);
    return msi_call_layer(m, &m->graph.layers.items[i->target], &call, i->op == MSI_OP_RECOMPUTE);
}

static ms_result msi_run_instruction(ms_model *m, const msi_program *p, uint32_t now) {
    const msi_instruction *i = &p->instructions.items[now];
    const bool watch = msi_watches_memory(m);
    ms_result result = MS_RESULT_OK;
    if (watch) {
        msi_mark_operands(m, p, now, false);
    }
    switch ((msi_op)i->op) {
    case MSI_OP_FORWARD:
    case MSI_OP_RECOMPUTE:
    case MSI_OP_REPEAT:
    case MSI_OP_BACKWARD:
    case MSI_OP_EVAL:
        result = msi_run_layer(m, p, now);
        break;
    case MSI_OP_SEED:
    case MSI_OP_ZERO:
        result = msi_run_fill(m, p, i);
        break;
    case MSI_OP_COPY:
    case MSI_OP_COPY_IN:
    case MSI_OP_COPY_OUT:
        result = msi_run_copy(m, p, i);
        break;
    case MSI_OP_WAIT:
        result = msi_run_wait(m, p, i);
        break;
    case MSI_OP_ADD:
        result = msi_run_add(m, p, i);
        break;
    case MSI_OP_NORM:
        result = msi_run_norm(m, p, i);
        break;
    case MSI_OP_CLIP:
        result = msi_run_clip(m, p);
        break;
    case MSI_OP_UPDATE:
        result = msi_run_update(m, p, i);
        break;
    case MSI_OP_NOTHING:
    case MSI_OP_COUNT:
        break;
    }
    if (result == MS_RESULT_OK && watch && now + 1 < p->instructions.count) {
        msi_mark_operands(m, p, now, true);
    }
    return result;
}

/* Ends a step that was begun. Micro-batches before this one count, unless all of them are done and
   only the update is missing. */
static void msi_drop_step(msi_run *r) {
    r->micro = r->stage == MSI_STAGE_BACKWARD ? 0 : r->micro;
    r->program = NULL;
    r->updates_done = 0;
    r->stage = MSI_STAGE_IDLE;
}

/* Gives up the step, earlier micro-batches included, or an eval, and waits for what is enqueued.
   If params have been updated already, and not only in a recording, the model has failed. */
static ms_result msi_abandon(ms_model *m, ms_result result) {
    const msi_errors errors = m->errors;
    m->run.failed |= m->run.updates_done > 0 && !m->run.recording;
    m->run.micro = m->run.program == &m->run.plan->eval ? m->run.micro : 0;
    msi_drop_step(&m->run);
    if (!m->run.recording) {
        (void)msi_synchronize(m);
    }
    m->errors = errors;
    return result;
}

static ms_result msi_abandon_on_error(ms_model *m, ms_result result) {
    return result == MS_RESULT_OK ? result : msi_abandon(m, result);
}

/* After a step failed while a recomputation had old state in place: puts the new state back, all of
   which was saved before the first copy to a resident. */
static void msi_restore_state(ms_model *m, const msi_program *p, uint32_t failed) {
    const msi_instruction *i = p->instructions.items;
    const uint32_t count = p->instructions.count;
    const msi_errors errors = m->errors;
    uint32_t next = failed;
    m->run.state_is_old &= !m->run.recording;
    while (m->run.state_is_old && next < count && !i[next].restores) {
        next++;
    }
    for (; m->run.state_is_old && next < count && i[next].restores; next++) {
        (void)msi_run_copy(m, p, &i[next]);
    }
    m->run.state_is_old = false;
    m->errors = errors;
}

/* Makes this model the user of the shared arena, after what another model has enqueued there. */
static ms_result msi_enter_arena(ms_model *m) {
    ms_arena *arena = m->run.arena;
    ms_result result = MS_RESULT_OK;
    if (!arena || arena->user == m) {
        return result;
    }
    if (arena->user && arena->backend.is_asynchronous) {
        const int error = arena->backend.synchronize(arena->user->device);
        result = msi_device(m, error, "waiting for the device");
    }
    arena->user = result == MS_RESULT_OK ? m : arena->user;
    return result;
}

static bool msi_is_last_micro(const msi_run *r) {
    return r->micro + 1 == r->store->micro_count;
}

static ms_result msi_start(ms_model *m, const msi_program *p) {
    msi_drop_step(&m->run);
    ms_result result = msi_enter_arena(m);
    if (result != MS_RESULT_OK) {
        return result;
    }
    m->run.program = p;
    m->run.position = 0;
    m->run.step_factor = msi_gradient_factor(m);
    if (m->run.store->debug) {
        memset(m->run.store->debug->is_made, 0, m->graph.tensors.count);
    }
    memset(&m->run.nonfinite, 0, sizeof m->run.nonfinite);
    if (msi_watches_memory(m)) {
        msi_asan_poison(msi_transient(&m->run), m->run.store->transient_bytes);
    } else if (m->config.backend.device_is_host) { // in case another model has poisoned it
        msi_asan_unpoison(msi_transient(&m->run), m->run.store->transient_bytes);
    }
    result = msi_wait_on_device(m, MSI_EVENT_VERDICT); // before kernels write another one
    MSI_THEN(result, msi_upload_step(m));
    MSI_THEN(result, msi_is_timed(&m->run) ? msi_begin_timing(m) : MS_RESULT_OK);
    return msi_abandon_on_error(m, result);
}

/* Runs the program up to an instruction. Steps that are timed share this loop with the others, so
   that msi_run_instruction is called in one place only, and the compiler can inline it. */
static ms_result msi_run_to(ms_model *m, uint32_t end) {
    const msi_program *p = m->run.program;
    const bool timed = msi_is_timed(&m->run);
    while (m->run.position < end) {
        ms_result result = timed ? msi_synchronize(m) : MS_RESULT_OK;
        const double start_us = timed ? msi_now_us() : 0.0;
        MSI_THEN(result, msi_run_instruction(m, p, m->run.position));
        if (timed && result == MS_RESULT_OK) {
            result = msi_synchronize(m);
            msi_note_time(m, m->run.position, start_us, msi_now_us());
        }
        if (result != MS_RESULT_OK) {
            msi_restore_state(m, p, m->run.position);
            return msi_abandon(m, result);
        }
        m->run.position++;
    }
    return MS_RESULT_OK;
}

/* Runs forward of the program that was started, and sums its loss. */
static ms_result msi_run_forward(ms_model *m) {
    const ms_backend *b = &m->config.backend;
    const msi_program *p = m->run.program;
    ms_step_state *state = msi_state_on_device(m, msi_is_eval(&m->run));
    const ms_result result = msi_run_to(m, p->forward_end);
    if (result != MS_RESULT_OK) {
        return result;
    }
    int error = msi_is_eval(&m->run) ? b->fill_bytes(m->device, state, 0, sizeof *state) : 0;
    if (error == 0) {
        error = b->loss(m->device, msi_address(m, p, p->loss),
                        p->ranges.items[p->loss].bytes / sizeof(float), (double)msi_loss_factor(m),
                        state);
        m->run.verdict = MSI_VERDICT_ON_DEVICE;
    }
    return msi_abandon_on_error(m, msi_device(m, error, "sum of the losses"));
}

/* Gives the step up on an error. If the device fails after all of the step was enqueued, nobody
   knows how much of its update has run, so the model has failed. */
static ms_result msi_doubt(ms_model *m, ms_result result) {
    m->run.failed |= result == MS_RESULT_BACKEND && m->run.program == &m->run.plan->train &&
                     m->run.position == m->run.program->instructions.count;
    return msi_abandon_on_error(m, result);
}

/* Waits for the verdict on what ran, acts on it, and reads the loss. */
static ms_result msi_conclude(ms_model *m, double *loss) {
    const bool eval = msi_is_eval(&m->run);
    ms_result result = msi_fetch_verdict(m);
    MSI_THEN(result, msi_act_on_verdict(m));
    if (loss) {
        *loss = msi_verdict(m, eval)->loss;
    }
    return msi_doubt(m, result);
}

/* Waits for all that is enqueued, and looks at the verdict that a step without a loss has left. */
static ms_result msi_settle_steps(ms_model *m) {
    const bool pending = m->run.verdict != MSI_VERDICT_NONE;
    ms_result result = msi_synchronize(m);
    if (!pending) {
        return result;
    }
    MSI_THEN(result, msi_fetch_verdict(m));
    MSI_THEN(result, msi_settle_verdict(m));
    return msi_doubt(m, result);
}

/* As msi_settle_steps, and reports a step that was halted. */
static ms_result msi_await_steps(ms_model *m) {
    if (m->config.dry_run || !m->run.store) {
        return m->config.dry_run ? MS_RESULT_OK : msi_synchronize(m);
    }
    ms_result result =
        m->run.verdict != MSI_VERDICT_NONE ? msi_conclude(m, NULL) : msi_report_halt(m);
    MSI_THEN(result, msi_settle_steps(m));
    return result;
}

/* Whether a step, an eval, or a change of plan may begin. */
static ms_result msi_check_between_steps(ms_model *m, const char *function) {
    const ms_result result = msi_check_called(m, function);
    if (result != MS_RESULT_OK) {
        return result;
    }
    if (m->run.stage == MSI_STAGE_BACKWARD && m->run.updates_done > 0) {
        return msi_fail(m, MS_RESULT_ORDER,
                        "%s: this plan has updated params in ms_backward; complete the step with "
                        "ms_update first",
                        function);
    }
    const ms_model *other = m->run.arena ? m->run.arena->user : NULL;
    if (other && other != m && other->run.stage == MSI_STAGE_BACKWARD &&
        other->run.updates_done > 0) {
        return msi_fail(
            m, MS_RESULT_ORDER,
            "%s: another model of this arena has updated params in ms_backward; complete "
            "its step with ms_update first",
            function);
    }
    return MS_RESULT_OK;
}

/* The first step needs a value for everything that layers read and that only the trainer has:
   inputs and params. Buffers and optimizer state begin with zeros. */
static ms_result msi_check_written(ms_model *m, const char *function) {
    const msi_graph *g = &m->graph;
    static const int groups[] = {MSI_GROUP_IN, MSI_GROUP_PARAM};
    for (uint32_t i = 0; i < g->layers.count; i++) {
        for (int k = 0; k < 2; k++) {
            for (MSI_EACH(read, g, &g->layers.items[i], groups[k])) {
                const msi_tensor *t = &g->tensors.items[read.tensor];
                const bool needed = t->kind == MSI_KIND_INPUT || t->kind == MSI_KIND_PARAM;
                if (needed && !t->written && !t->in_place && !msi_is_borrowed(t, MSI_ROLE_VALUE)) {
                    return msi_fail(m, MS_RESULT_ORDER,
                                    "%s: %s \"%s\", which %s reads, has no value%s: write it with "
                                    "ms_write before the step, or lend it with ms_borrow",
                                    function, msi_kind_names[t->kind], msi_name(g, t->name),
                                    msi_layer_label(g, i).text,
                                    t->kind == MSI_KIND_INPUT && g->axis_count
                                        ? " at the present sizes of the axes"
                                        : "");
                }
            }
        }
    }
    m->run.all_written = true;
    return MS_RESULT_OK;
}

static ms_result msi_check_ready(ms_model *m, const char *function) {
    if (!m->run.plan) {
        return msi_fail(m, MS_RESULT_ORDER, "%s: call ms_wrap first", function);
    }
    if (m->config.dry_run) {
        return msi_fail(m, MS_RESULT_DRY_RUN, "%s: a dry run plans but does not compute", function);
    }
    if (m->run.halt.halted != (uint32_t)MS_HALT_NONE) {
        return msi_abandon(m, msi_report_halt(m));
    }
    if (m->run.failed) {
        return msi_fail(
            m, MS_RESULT_FAILED,
            "%s: an earlier step was cut short or its device failed; write params and optimizer "
            "state again, then call ms_wrap (a device that goes on failing needs a new process)",
            function);
    }
    return msi_check_between_steps(m, function);
}

/* Whether a program may start from its beginning. */
static ms_result msi_check_start(ms_model *m, const char *function) {
    const ms_result result = msi_check_ready(m, function);
    return result != MS_RESULT_OK || m->run.all_written ? result : msi_check_written(m, function);
}

/* Whether the transient values of this model are still in the arena. */
static bool msi_owns_arena(const ms_model *m) {
    return !m->run.arena || m->run.arena->user == m;
}

/* With accumulation, all micro-batches except the last end here. */
static void msi_note_backward(msi_run *r) {
    const bool last = msi_is_last_micro(r);
    r->position = r->program->backward_end;
    r->micro += !last;
    r->stage = last ? MSI_STAGE_BACKWARD : MSI_STAGE_IDLE;
}

static ms_result msi_finish_backward(ms_model *m) {
    const ms_result result = msi_run_to(m, m->run.program->backward_end);
    if (result == MS_RESULT_OK) {
        msi_note_backward(&m->run);
    }
    return result;
}

static void msi_note_update(msi_run *r) {
    r->position = r->program->instructions.count;
    r->step++;
    r->updates_done = 0;
    r->micro = 0;
    r->stage = MSI_STAGE_IDLE;
}

static ms_result msi_finish_update(ms_model *m) {
    const bool timed = msi_is_timed(&m->run);
    const ms_result result = msi_run_to(m, m->run.program->instructions.count);
    if (result == MS_RESULT_OK) {
        msi_note_update(&m->run);
    }
    return result == MS_RESULT_OK && m->run.timing ? msi_doubt(m, msi_end_timing(m, timed))
                                                   : result;
}

/* Everything that a step enqueues after msi_start. An asynchronous device judges the loss by
   itself; its verdict is copied out while backward runs, unless one on the norm follows. */
static ms_result msi_run_step(ms_model *m) {
    const bool asynchronous = m->config.backend.is_asynchronous;
    const bool clips = m->run.program->norm != MSI_NONE && msi_is_last_micro(&m->run);
    ms_result result = msi_run_forward(m);
    if (result == MS_RESULT_OK && !m->run.recording && !(asynchronous && clips)) {
        result = asynchronous ? msi_copy_verdict(m) : msi_conclude(m, NULL);
        result = result == MS_RESULT_OK || !m->run.program ? result : msi_abandon(m, result);
    }
    MSI_THEN(result, msi_finish_backward(m));
    return result == MS_RESULT_OK && m->run.stage == MSI_STAGE_BACKWARD ? msi_finish_update(m)
                                                                        : result;
}

/* A recording is valid for its plan while this, of an address and the epoch, is unchanged. */
static uint64_t msi_recording_key(const ms_model *m) {
    return msi_mix((uint64_t)(uintptr_t)msi_transient(&m->run)) ^ m->run.epoch;
}

/* Records the step that was started, without running any of it. */
static ms_result msi_record(ms_model *m, msi_recording *g) {
    const ms_backend *b = &m->config.backend;
    if (g->handle) {
        b->recording_release(m->device, g->handle);
        g->handle = NULL;
    }
    ms_result result =
        msi_device(m, b->recording_begin(m->device),
                   "recording on this stream (the default stream cannot be recorded: set another "
                   "config.stream, or none)");
    if (result != MS_RESULT_OK) {
        return msi_abandon(m, result);
    }
    m->run.recording = true;
    result = msi_run_step(m);
    const int error = b->recording_end(m->device, result == MS_RESULT_OK ? &g->handle : NULL);
    MSI_THEN(result, msi_abandon_on_error(m, msi_device(m, error, "the end of a recording")));
    m->run.recording = false;
    g->made_for = msi_recording_key(m);
    return result;
}

/* Runs a step by its recording, which is made here if it is missing. The first step runs without
   one, so that callbacks have done what they do only once. */
static ms_result msi_replay(ms_model *m) {
    const ms_backend *b = &m->config.backend;
    msi_recording *g =
        &m->run.plan->recordings[(m->run.micro == 0 ? MSI_RECORDING_FIRST : 0) |
                                 (msi_is_last_micro(&m->run) ? MSI_RECORDING_LAST : 0)];
    const uint64_t step = m->run.step;
    if (!g->warm || msi_is_timed(&m->run)) {
        const ms_result result = msi_run_step(m);
        g->warm = result == MS_RESULT_OK;
        return result;
    }
    const bool made = g->handle && g->made_for == msi_recording_key(m);
    ms_result result = msi_is_last_micro(&m->run) ? msi_upload_factors(m) : MS_RESULT_OK;
    result = msi_abandon_on_error(m, result);
    MSI_THEN(result, made ? MS_RESULT_OK : msi_record(m, g));
    if (result == MS_RESULT_OK) {
        const int error = b->recording_launch(m->device, g->handle);
        result = msi_abandon_on_error(m, msi_device(m, error, "the launch of a recording"));
    }
    if (result != MS_RESULT_OK) {
        m->run.step = step; // nothing of it has run
        return result;
    }
    m->run.verdict = MSI_VERDICT_ON_DEVICE;
    if (made) {
        msi_note_backward(&m->run);
    }
    if (made && m->run.stage == MSI_STAGE_BACKWARD) {
        msi_note_update(&m->run);
    }
    return msi_doubt(m, msi_copy_verdict(m));
}

/* Runs forward of a program. Waits for an asynchronous device only if the loss is asked for. */
static ms_result msi_forward(ms_model *m, const msi_program *p, double *loss) {
    const bool waits = loss || !m->config.backend.is_asynchronous;
    ms_result result = msi_start(m, p);
    MSI_THEN(result, msi_run_forward(m));
    MSI_THEN(result, waits ? msi_conclude(m, loss) : MS_RESULT_OK);
    if (result == MS_RESULT_OK && p == &m->run.plan->train) {
        m->run.stage = MSI_STAGE_FORWARD;
    }
    return result;
}

static ms_result msi_backward(ms_model *m) {
    const ms_result result = msi_check_ready(m, "ms_backward");
    return result != MS_RESULT_OK ? result
           : m->run.stage != MSI_STAGE_FORWARD
               ? msi_fail(m, MS_RESULT_ORDER,
                          "ms_backward: call ms_forward first (an ms_write after it ends the step)")
           : !msi_owns_arena(m)
               ? msi_fail(m, MS_RESULT_ORDER,
                          "ms_backward: another model has used the shared arena since ms_forward: "
                          "call ms_forward again")
               : msi_finish_backward(m);
}

static ms_result msi_update(ms_model *m) {
    const bool begun = m->run.stage == MSI_STAGE_BACKWARD;
    if (begun && !m->run.busy && !m->run.visits && msi_owns_arena(m)) {
        return msi_finish_update(m);
    }
    const ms_result result = msi_check_ready(m, "ms_update");
    return result != MS_RESULT_OK ? result
           : begun
               ? msi_fail(m, MS_RESULT_ORDER,
                          "ms_update: another model has used the shared arena since ms_backward")
               : msi_fail(m, MS_RESULT_ORDER,
                          "ms_update: call ms_backward first; %u of the %u micro-batches of this "
                          "step are done",
                          (unsigned)m->run.micro, (unsigned)m->run.store->micro_count);
}

static ms_result msi_step(ms_model *m, double *loss) {
    ms_result result = msi_start(m, &m->run.plan->train);
    if (result != MS_RESULT_OK) {
        return result;
    }
    result = m->config.cuda_graph ? msi_replay(m) : msi_run_step(m);
    if (result == MS_RESULT_OK && m->config.backend.is_asynchronous) {
        return loss ? msi_conclude(m, loss) : result;
    }
    if (loss) {
        *loss = msi_verdict(m, false)->loss;
    }
    return result;
}

/* The norm of the last update, while its sum of squares is in memory. */
static ms_result msi_gradient_norm(ms_model *m, double *norm) {
    const msi_program *p = m->run.plan ? &m->run.plan->train : NULL;
    if (!p || p->norm == MSI_NONE || m->run.program != p || !msi_owns_arena(m) ||
        m->run.position < p->instructions.count) {
        return msi_fail(m, MS_RESULT_ORDER,
                        "ms_gradient_norm: there is no norm now; it can be read from an update "
                        "with grad_clip_norm to the next step or eval");
    }
    const msi_norm *at = (const msi_norm *)msi_address(m, p, p->norm);
    double sum;
    const ms_result result = msi_copy(m, &sum, true, &at->sum, false, sizeof sum);
    if (result == MS_RESULT_OK) {
        *norm = sqrt(sum);
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>state  values that outlast a step: written, read, and moved from plan to plan

/* Gives the residents of a new store their values: from the store before it, from what was written
   before there was one, or zeros. Borrowed memory stays as it is. */
static ms_result msi_move_values(ms_model *m, const msi_store *store) {
    ms_result result = MS_RESULT_OK;
    for (uint32_t i = 0; i < store->residents.count && result == MS_RESULT_OK; i++) {
        const msi_resident *to = &store->residents.items[i];
        const msi_resident *old = msi_find_resident(m->run.store, to->tensor, to->role);
        const msi_tensor *t = &m->graph.tensors.items[to->tensor];
        const void *written = t->memory[to->role];
        if (!to->borrowed && old && old->address) {
            result = msi_copy(m, to->address, to->on_host, old->address, old->on_host, to->bytes);
        } else if (!to->borrowed) {
            result = msi_fill(m, to->address, to->on_host, 0, to->bytes);
            MSI_THEN(result, written
                                 ? msi_copy(m, to->address, to->on_host, written, true, t->bytes)
                                 : MS_RESULT_OK);
        }
    }
    return result;
}

static void msi_drop_written(ms_model *m) {
    for (uint32_t t = 0; t < m->graph.tensors.count; t++) {
        msi_tensor *tensor = &m->graph.tensors.items[t];
        for (int role = 0; role < MSI_ROLE_RESIDENT_COUNT; role++) {
            if (!msi_is_borrowed(tensor, (msi_role)role)) {
                msi_release(&m->config.allocator, tensor->memory[role], tensor->largest_bytes);
                tensor->memory[role] = NULL;
            }
        }
    }
}

/* Params with new optimizer state count their updates from now on. Borrowed state is never new. */
static void msi_note_new_state(ms_model *m, const msi_store *store) {
    for (uint32_t t = 0; t < m->graph.tensors.count; t++) {
        const msi_resident *state = msi_find_resident(store, t, MSI_ROLE_STATE0);
        if (state && !state->borrowed && !msi_find_resident(m->run.store, t, MSI_ROLE_STATE0)) {
            m->graph.tensors.items[t].trained_since = m->run.step;
        }
    }
}

/* Makes the shared arena at least this large. What it held is lost. */
static ms_result msi_grow_arena(ms_model *m, uint64_t bytes) {
    ms_arena *arena = m->run.arena;
    if (!arena || arena->bytes >= bytes) {
        return MS_RESULT_OK;
    }
    void *memory;
    const ms_backend *b = &arena->backend;
    const int error = b->memory_alloc(b->user, &arena->allocator, bytes, &memory);
    if (error != 0 || !memory) {
        return msi_fail_device_memory(m, bytes, "the shared arena", error);
    }
    if (arena->user && b->is_asynchronous) {
        (void)b->synchronize(arena->user->device);
    }
    if (arena->memory) {
        if (m->config.backend.device_is_host) {
            msi_asan_unpoison(arena->memory, arena->bytes);
        }
        b->memory_release(b->user, &arena->allocator, arena->memory, arena->bytes);
    }
    arena->memory = memory;
    arena->bytes = bytes;
    arena->user = NULL;
    return MS_RESULT_OK;
}

/* Allocates what a store needs, and gives its residents their addresses. */
static ms_result msi_alloc_store(ms_model *m, msi_store *store) {
    const uint64_t own = m->run.arena ? 0 : store->transient_bytes;
    ms_result result = msi_device_alloc(m, store->resident_bytes + own, &store->memory);
    MSI_THEN(result, msi_host_alloc(m, store->host_bytes + store->staging_bytes, &store->host));
    MSI_THEN(result, msi_alloc_debug(m, store));
    MSI_THEN(result, msi_grow_arena(m, store->transient_bytes));
    if (result != MS_RESULT_OK) {
        return result;
    }
    store->transient = m->run.arena ? NULL : (uint8_t *)store->memory + store->resident_bytes;
    for (uint32_t i = 0; i < store->residents.count; i++) {
        msi_resident *resident = &store->residents.items[i];
        uint8_t *room = resident->on_host ? store->host : (uint8_t *)store->memory;
        resident->address = resident->borrowed
                                ? m->graph.tensors.items[resident->tensor].memory[resident->role]
                                : (void *)(room + resident->offset);
    }
    store->step = msi_is_direct(m)
                      ? store->host + store->host_bytes
                      : (uint8_t *)store->memory + (store->reserved_bytes - store->step_bytes);
    return MS_RESULT_OK;
}

/* Gives the backend its events and its workspace in a store. */
static ms_result msi_prepare(ms_model *m, const msi_store *store) {
    const ms_backend *b = &m->config.backend;
    ms_prepare_args args;
    memset(&args, 0, sizeof args);
    args.event_count = store->event_count;
    args.workspace = b->workspace_bytes ? store->memory : NULL;
    args.workspace_bytes = b->workspace_bytes;
    return b->prepare ? msi_device(m, b->prepare(m->device, &args), "preparing") : MS_RESULT_OK;
}

/* Gives a store memory, and the values that it is to hold. */
static ms_result msi_settle(ms_model *m, msi_store *store) {
    ms_result result = msi_alloc_store(m, store);
    if (result != MS_RESULT_OK) {
        return result;
    }
    result = msi_prepare(m, store);
    MSI_THEN(result, msi_fill(m, store->step, msi_is_direct(m), 0, store->step_bytes));
    MSI_THEN(result, msi_move_values(m, store));
    MSI_THEN(result, msi_synchronize(m));
    if (result == MS_RESULT_OK) {
        memset(store->host + store->host_bytes, 0, (size_t)store->staging_bytes);
        return result;
    }
    const msi_errors errors = m->errors;
    (void)msi_synchronize(m); // the memory is going to be released
    if (m->run.store && !m->config.dry_run && msi_prepare(m, m->run.store) != MS_RESULT_OK) {
        m->run.failed = true;
    }
    m->errors = errors;
    return result;
}

/* Whether a store has all sums of another one, so that finished micro-batches still count. */
static bool msi_sums_alike(const msi_store *old, const msi_store *store) {
    bool alike = old && old->micro_count == store->micro_count;
    for (uint32_t i = 0; i < store->residents.count; i++) {
        const msi_resident *r = &store->residents.items[i];
        alike &= r->role != MSI_ROLE_GRADIENT || msi_find_resident(old, r->tensor, r->role);
    }
    return alike;
}

/* Makes these the plans of the model, for the store that it has now. */
static void msi_put_plans(ms_model *m, msi_plan *plans, msi_goal goal) {
    msi_plans_free(m, m->run.plan);
    msi_drop_step(&m->run);
    m->run.verdict = MSI_VERDICT_NONE;
    m->run.plan = plans;
    m->wrapped.largest = plans->next ? plans->next : plans;
    m->wrapped.goal = goal;
    m->wrapped.changed = false;
    msi_log(m, MS_LOG_INFO, "plan",
            "plain %s, budget %s, arena %s, recomputations: %u, updates %s backward",
            msi_size(plans->plain_bytes).text, msi_size(plans->budget_bytes).text,
            msi_size(msi_room_of(m->run.store)).text, (unsigned)plans->train.recompute_count,
            msi_updates_inside(&plans->train) ? "inside" : "after");
}

/* Replaces the plans of the model. Every value that outlasts a step moves to the new store, or
   stays where it is if the store is the same. */
static ms_result msi_adopt(ms_model *m, msi_store *store, msi_plan *plans, msi_goal goal) {
    msi_store *old = m->run.store;
    if (store == old) {
        msi_put_plans(m, plans, goal);
        return MS_RESULT_OK;
    }
    const ms_result result = m->config.dry_run ? MS_RESULT_OK : msi_settle(m, store);
    if (result != MS_RESULT_OK) {
        msi_plans_and_store_free(m, store, plans);
        return result;
    }
    msi_note_new_state(m, store);
    msi_drop_written(m);
    m->run.store = store;
    msi_put_plans(m, plans, goal);
    m->run.micro = msi_sums_alike(old, store) ? m->run.micro : 0;
    msi_store_free(m, old);
    m->run.failed &= goal == MSI_GOAL_PLAIN; // after ms_wrap values count as written again
    return MS_RESULT_OK;
}

/* Logs what was decided: a line about the plan, one per technique, and one per layer to which a
   technique is applied. */
static void msi_log_decisions(const ms_model *m, const msi_review *r) {
    const msi_plan *plan = m->run.plan;
    msi_log(m, MS_LOG_INFO, "rules",
            "mode %s (%s), pressure %.3f; a step is predicted to take %s, a plain one %s (%s)",
            msi_mode_names[m->wrapped.choice.mode], msi_source_names[m->wrapped.choice.source],
            msi_pressure(plan), msi_time(plan->train.step_us).text,
            msi_time(plan->plain_step_us).text, msi_time_source_names[m->costs.source]);
    for (int technique = 0; technique < MS_TECHNIQUE_COUNT; technique++) {
        const msi_technique_total total = msi_technique_total_of(r, (ms_technique)technique);
        const int64_t freed = msi_freed_bytes(m->run.store, plan, (ms_technique)technique);
        msi_log(m, MS_LOG_INFO, "rules", "%s: %u of %u layers, %s off the peak, %s added%s%s",
                msi_techniques[technique].name, (unsigned)total.layers,
                (unsigned)m->graph.layers.count, msi_signed_size(freed).text,
                msi_time(total.added_us).text, total.differs ? "" : "; rule ",
                total.differs ? "" : total.rule->id);
        for (uint32_t i = 0; i < m->graph.layers.count && total.layers > 0; i++) {
            const ms_decision d = msi_decision(r, i, (ms_technique)technique);
            if (d.is_applied) {
                msi_log(m, MS_LOG_DEBUG, "rules",
                        "%s of layer \"%s\": %s held no longer, %s added; rule %s",
                        msi_techniques[technique].name, msi_layer_name(&m->graph, i),
                        msi_size(d.saved_bytes).text, msi_time(d.added_us).text, d.rule->id);
            }
        }
    }
}

/* As msi_adopt, and logs the reasons. Memory for that is allocated first, so that nothing can fail
   after the change. */
static ms_result msi_adopt_and_log(ms_model *m, msi_store *store, msi_plan *plans, msi_goal goal) {
    msi_review review;
    if (!m->config.log) {
        return msi_adopt(m, store, plans, goal);
    }
    if (!msi_review_init(&review, m, plans)) {
        msi_plans_and_store_free(m, store == m->run.store ? NULL : store, plans);
        return msi_fail_memory(m, "the decisions", msi_review_bytes(&m->graph));
    }
    const ms_result result = msi_adopt(m, store, plans, goal);
    if (result == MS_RESULT_OK) {
        msi_log_decisions(m, &review);
    }
    msi_review_free(&review);
    return result;
}

/* What has been refused since the model was wrapped, by a function that could not return it. */
static ms_result msi_take_refused(ms_model *m) {
    const ms_result refused = m->run.plan ? m->errors.sticky : MS_RESULT_OK;
    if (refused == MS_RESULT_OK) {
        return MS_RESULT_OK;
    }
    m->errors.sticky = MS_RESULT_OK;
    return msi_fail(m, refused, "refused since the last ms_wrap: %s", m->errors.sticky_text);
}

static ms_result msi_replan(ms_model *m, const char *function, msi_goal goal) {
    msi_store *store;
    msi_plan *plans;
    if (!m) {
        return MS_RESULT_INVALID;
    }
    const msi_choice choice = m->wrapped.choice;
    const msi_costs costs = m->costs;
    ms_result result = msi_check_between_steps(m, function);
    MSI_THEN(result, goal == MSI_GOAL_PLAIN ? MS_RESULT_OK : msi_take_refused(m));
    MSI_THEN(result, m->run.store && !m->config.dry_run ? msi_settle_steps(m) : MS_RESULT_OK);
    MSI_THEN(result, msi_make_timing(m));
    MSI_THEN(result, msi_decide(m, goal, &store, &plans));
    MSI_THEN(result, msi_adopt_and_log(m, store, plans, goal));
    if (result != MS_RESULT_OK) {
        msi_stay_with(m, &choice, &costs);
    }
    msi_timing *t = m->run.timing;
    if (result == MS_RESULT_OK && t) { // complete samples stay, others are taken anew
        t->stage = t->sample_count == t->wanted ? MSI_WARMUP_AGAIN : MSI_WARMUP_COLD;
        t->sample_count = t->sample_count == t->wanted ? t->wanted : 0;
    }
    return result;
}

/* Plans for a budget with the measured times: in the same memory if that suffices, else in new. */
static ms_result msi_plan_within(ms_model *m, uint64_t budget) {
    const uint64_t configured = m->config.memory_budget_bytes;
    const msi_choice choice = m->wrapped.choice;
    const msi_costs costs = m->costs;
    const msi_goal goal = m->wrapped.goal;
    msi_store *store;
    msi_plan *plans;
    m->config.memory_budget_bytes = budget;
    ms_result result = msi_decide(m, goal, &store, &plans);
    m->config.memory_budget_bytes = configured;
    if (result == MS_RESULT_OK && msi_room_of(store) <= msi_room_of(m->run.store)) {
        msi_store_free(m, store); // the model's store has the same residents
        store = m->run.store;
    }
    MSI_THEN(result, msi_adopt_and_log(m, store, plans, goal));
    if (result != MS_RESULT_OK) {
        msi_stay_with(m, &choice, &costs);
    }
    return result;
}

/* Predicts the times of the existing plans anew. A plain step is one without recomputation. */
static void msi_time_plans(ms_model *m) {
    int64_t sizes[MS_LIMIT_AXES];
    msi_get_sizes(&m->graph, sizes);
    for (msi_plan *plan = m->run.plan; plan; plan = plan->next) {
        msi_set_sizes(&m->graph, plan->sizes);
        msi_find_times(m);
        msi_time_program(&m->graph, &m->costs, m->run.store, &plan->train);
        msi_time_program(&m->graph, &m->costs, m->run.store, &plan->eval);
        plan->plain_step_us = plan->train.step_us - plan->train.recompute_us;
    }
    msi_set_sizes(&m->graph, sizes);
    msi_find_times(m);
}

/* Plans again after the last sample. Where the device has no room for a second arena, the new plan
   uses the first. If there is no new plan, the old one stays; only an error of the device is an
   error. */
static ms_result msi_plan_again(ms_model *m) {
    m->run.timing->stage = MSI_WARMUP_AGAIN;
    ms_result result = msi_settle_steps(m);
    if (result != MS_RESULT_OK || m->wrapped.changed) { // then the trainer must call ms_wrap
        return result;
    }
    const uint64_t budget = m->wrapped.largest->budget_bytes;
    const msi_errors errors = m->errors;
    m->errors.tolerant = true;
    result = msi_plan_within(m, budget);
    if (result == MS_RESULT_OUT_OF_MEMORY && msi_room_of(m->run.store) < budget) {
        result = msi_plan_within(m, msi_room_of(m->run.store));
    }
    m->errors.tolerant = false;
    if (result != MS_RESULT_OK) {
        msi_log(m, MS_LOG_WARNING, "timing",
                "no plan was made from the measured times, the one before stays: %s",
                m->errors.text);
        msi_time_plans(m);
    }
    m->errors = errors;
    for (msi_plan *plan = m->run.plan; plan; plan = plan->next) {
        plan->budget_bytes = budget;
    }
    return MS_RESULT_OK;
}

/* Checks whether a training step may begin. Plans again first, if the last sample was taken. */
static ms_result msi_begin_step(ms_model *m, const char *function) {
    ms_result result = msi_check_start(m, function);
    if (result == MS_RESULT_OK && m->run.timing && m->run.timing->stage == MSI_WARMUP_PLAN &&
        m->run.micro == 0) {
        result = msi_plan_again(m);
        MSI_THEN(result, msi_check_ready(m, function));
    }
    return result;
}

enum { MSI_MAX_PLANS = 64 };

/* Moves the plan for these sizes to the head of the list; false if there is none. */
static bool msi_find_plan(ms_model *m, const int64_t *sizes) {
    for (msi_plan **at = &m->run.plan; *at; at = &(*at)->next) {
        msi_plan *plan = *at;
        if (memcmp(plan->sizes, sizes, sizeof plan->sizes) == 0) {
            *at = plan->next;
            plan->next = m->run.plan;
            m->run.plan = plan;
            return true;
        }
    }
    return false;
}

/* Puts a plan at the head of the list. Frees the least recently used one if there are too many. */
static void msi_add_plan(ms_model *m, msi_plan *plan) {
    plan->next = m->run.plan;
    m->run.plan = plan;
    int count = 1;
    for (msi_plan *at = plan; at->next; at = at->next) {
        msi_plan *next = at->next;
        if (++count >= MSI_MAX_PLANS && next != m->wrapped.largest) {
            at->next = next->next;
            msi_plan_free(m, next);
            break;
        }
    }
}

/* Inputs along an axis that changes its size must be written again: their elements are others. */
static void msi_forget_inputs(ms_model *m, const int64_t *sizes) {
    msi_graph *g = &m->graph;
    uint32_t changed = 0;
    for (uint32_t a = 0; a < g->axis_count; a++) {
        changed |= (uint32_t)(sizes[a] != g->axes[a].size) << a;
    }
    for (uint32_t i = 0; i < g->tensors.count && changed; i++) {
        msi_tensor *t = &g->tensors.items[i];
        for (int k = 0; k < t->view.shape.rank && t->kind == MSI_KIND_INPUT; k++) {
            t->written &= !(t->view.shape.axes[k] & changed);
        }
    }
    m->run.all_written &= !changed;
}

static ms_result msi_reshape(ms_model *m, const int64_t *sizes) {
    int64_t all[MS_LIMIT_AXES] = {0, 0, 0, 0, 0, 0, 0, 0};
    memcpy(all, sizes, m->graph.axis_count * sizeof *sizes);
    if (m->run.plan && !msi_find_plan(m, all)) {
        msi_plan *plan;
        if (m->wrapped.changed) {
            return msi_fail(m, MS_RESULT_ORDER,
                            "ms_reshape: something was set since ms_wrap that asks for a new plan: "
                            "call ms_wrap first");
        }
        const ms_result result =
            msi_plan_at(m, m->run.store, m->wrapped.goal, all, m->wrapped.largest, &plan);
        if (result != MS_RESULT_OK) {
            msi_find_times(m);
            return result;
        }
        msi_add_plan(m, plan);
    }
    msi_forget_inputs(m, all);
    msi_set_sizes(&m->graph, all);
    if (m->run.plan) {
        msi_find_times(m);
    }
    msi_drop_step(&m->run);
    return MS_RESULT_OK;
}

/* The address of a value that can be read now, or NULL: that of a resident, or of a live range that
   spans the instruction where the program stopped. */
static void *msi_live_address(const ms_model *m, uint32_t tensor, msi_role role) {
    const msi_resident *resident = msi_find_resident(m->run.store, tensor, role);
    const msi_program *p = msi_owns_arena(m) ? m->run.program : NULL;
    void *staged = msi_staged_address(m, tensor, role);
    if (staged) {
        return staged;
    }
    if (resident) {
        return resident->address;
    }
    for (uint32_t i = p ? m->run.store->residents.count : MSI_NONE; p && i < p->ranges.count; i++) {
        const msi_range *range = &p->ranges.items[i];
        if (range->tensor == tensor && range->role == role && range->first < m->run.position &&
            (range->last >= m->run.position || range->outlives)) {
            return msi_address(m, p, i);
        }
    }
    return NULL;
}

/* Notes an error of ms_borrow; before there is a plan it sticks. */
static ms_result msi_refuse_loan(ms_model *m, ms_result result, const char *name,
                                 const char *reason) {
    const ms_result refused = msi_fail(m, result, "ms_borrow: \"%s\" %s", name, reason);
    if (!m->run.plan) {
        msi_stick(m, refused);
    }
    return refused;
}

/* An error if a value cannot be borrowed now. */
static ms_result msi_check_loan(ms_model *m, uint32_t t, msi_role role) {
    const msi_tensor *tensor = &m->graph.tensors.items[t];
    const bool lasts =
        msi_is_resident(tensor) && (role == MSI_ROLE_VALUE || tensor->kind == MSI_KIND_PARAM);
    const char *reason =
        !lasts ? "does not live between steps; inputs, params, buffers, gradients of params and "
                 "optimizer state can be borrowed"
        : m->run.stage == MSI_STAGE_BACKWARD
            ? "is lent between ms_backward and ms_update; complete the step first"
        : m->run.busy ? "is lent in a callback; lend it between steps"
        : m->run.plan && !msi_is_borrowed(tensor, role)
            ? "was not borrowed when the model was wrapped; lend it before ms_wrap"
            : NULL;
    return reason ? msi_refuse_loan(m, lasts ? MS_RESULT_ORDER : MS_RESULT_INVALID,
                                    msi_name(&m->graph, tensor->name), reason)
                  : MS_RESULT_OK;
}

/* From now on a value is in the trainer's memory. */
static void msi_borrow(ms_model *m, uint32_t t, msi_role role, void *memory) {
    msi_tensor *tensor = &m->graph.tensors.items[t];
    if (!msi_is_borrowed(tensor, role)) {
        msi_release(&m->config.allocator, tensor->memory[role], tensor->largest_bytes);
        tensor->borrowed = (uint8_t)(tensor->borrowed | 1u << role);
    }
    m->run.epoch += tensor->memory[role] != memory;
    tensor->memory[role] = memory;
    for (uint32_t i = 0; m->run.store && i < m->run.store->residents.count; i++) {
        msi_resident *resident = &m->run.store->residents.items[i];
        if (resident->tensor == t && resident->role == role && resident->borrowed) {
            resident->address = memory;
        }
    }
    if (m->run.stage == MSI_STAGE_FORWARD) {
        m->run.stage = MSI_STAGE_IDLE; // backward would see another value than forward did
    }
}

/* Checks the arguments of ms_write and ms_read; the index of the tensor, or MSI_NONE. */
static uint32_t msi_transfer_index(ms_model *m, const char *function, ms_tensor tensor,
                                   const void *data) {
    const uint32_t t = m ? msi_index(&m->graph, tensor) : MSI_NONE;
    const bool is_state = t != MSI_NONE && msi_role_of(&m->graph, tensor) >= MSI_ROLE_STATE0;
    if (t != MSI_NONE && data && (!is_state || m->graph.tensors.items[t].kind == MSI_KIND_PARAM)) {
        return t;
    }
    if (m && data && t == MSI_NONE && m->errors.sticky != MS_RESULT_OK) {
        (void)msi_fail(m, MS_RESULT_INVALID, "%s: an earlier registration has failed: %s", function,
                       m->errors.sticky_text);
    } else {
        (void)msi_fail_argument(m, function,
                                data ? "this is no tensor of this model" : "data is NULL");
    }
    return MSI_NONE;
}

/* Writes a resident after what is enqueued: an input by way of its staging memory, once the copy
   before is done; or a tensor on the host, once the device, which may still read it, is idle. */
static ms_result msi_write(ms_model *m, const msi_resident *resident, const void *data,
                           uint64_t bytes) {
    ms_result result = MS_RESULT_OK;
    m->run.epoch += resident->on_host; // a callback may have read it for a recording
    if (resident->event == MSI_NONE) {
        result = resident->on_host ? msi_synchronize(m) : MS_RESULT_OK;
        MSI_THEN(result, msi_copy(m, resident->address, resident->on_host, data, true, bytes));
        return result;
    }
    uint8_t *staging = msi_step_on_host(m) + resident->staging;
    result = msi_wait_on_host(m, resident->event);
    if (result == MS_RESULT_OK) {
        memcpy(staging, data, (size_t)bytes);
        result = msi_copy_in(m, resident->address, staging, bytes, resident->event);
    }
    return result;
}

/* Writes a value before there is a plan: to memory kept until ms_wrap, or to the trainer's. */
static ms_result msi_write_unplanned(ms_model *m, msi_tensor *t, msi_role role, const void *data) {
    void **memory = &t->memory[role];
    const bool on_device = msi_is_borrowed(t, role) && !t->on_host;
    if (!*memory) {
        *memory = msi_alloc_zeroed(&m->config.allocator, t->largest_bytes);
    }
    return *memory ? msi_copy(m, *memory, !on_device, data, true, t->bytes)
                   : msi_fail_memory(m, msi_name(&m->graph, t->name), t->largest_bytes);
}

/* Whether a value can be written and read at any time. */
static bool msi_is_kept(const msi_tensor *t, msi_role role) {
    return msi_is_resident(t) && (role != MSI_ROLE_GRADIENT || msi_is_borrowed(t, role));
}

static ms_result msi_write_tensor(ms_model *m, uint32_t t, msi_role role, const void *data) {
    msi_tensor *target = &m->graph.tensors.items[t];
    const char *name = msi_name(&m->graph, target->name);
    if (!msi_is_kept(target, role)) {
        return msi_fail(m, MS_RESULT_INVALID,
                        "ms_write: the %s \"%s\" does not live between steps; inputs, params, "
                        "buffers and optimizer state do, and what is borrowed",
                        msi_role_name(role), name);
    }
    if (m->config.dry_run) {
        return msi_fail(m, MS_RESULT_DRY_RUN, "ms_write: a dry run has no memory for \"%s\"", name);
    }
    if (m->run.busy) {
        return msi_fail(m, MS_RESULT_ORDER,
                        "ms_write: called from a callback of a layer: call it between steps");
    }
    if (!m->run.plan) {
        const ms_result result = msi_write_unplanned(m, target, role, data);
        target->written |= result == MS_RESULT_OK && role == MSI_ROLE_VALUE;
        return result;
    }
    const msi_resident *resident = msi_find_resident(m->run.store, t, role);
    if (!resident) {
        return msi_fail(m, MS_RESULT_INVALID, "ms_write: \"%s\" has no such state", name);
    }
    if (m->run.stage == MSI_STAGE_FORWARD) {
        m->run.stage = MSI_STAGE_IDLE; // backward would see another value than forward did
    }
    const ms_result result = msi_write(m, resident, data, target->bytes);
    target->written |= result == MS_RESULT_OK && role == MSI_ROLE_VALUE;
    return result;
}

static const char *msi_read_cure(const msi_graph *g, uint32_t t, msi_role role) {
    if (role == MSI_ROLE_GRADIENT) {
        return "it is there from ms_backward to its update (early_update = MS_SWITCH_OFF: to "
               "ms_update; MS_OPTIMIZER_NONE: to the next step)";
    }
    if (role != MSI_ROLE_VALUE) {
        return "a param that is frozen, or that the loss does not depend on, has none";
    }
    return t == g->loss ? "run ms_step, ms_forward or ms_eval first"
           : g->tensors.items[t].kind == MSI_KIND_SAVED
               ? "a saved tensor lives only between forward and backward"
               : "ms_add_output keeps an activation";
}

/* Reads a value before there is a plan: as it was written, or zeros. */
static ms_result msi_read_unplanned(ms_model *m, const msi_tensor *t, msi_role role, void *data) {
    const bool on_device = msi_is_borrowed(t, role) && !t->on_host;
    return t->memory[role] ? msi_copy(m, data, true, t->memory[role], !on_device, t->bytes)
                           : msi_fill(m, data, true, 0, t->bytes);
}

static ms_result msi_read_tensor(ms_model *m, uint32_t t, msi_role role, void *data) {
    const msi_tensor *source = &m->graph.tensors.items[t];
    const char *name = msi_name(&m->graph, source->name);
    if (m->config.dry_run) {
        return msi_fail(m, MS_RESULT_DRY_RUN, "ms_read: a dry run has no memory for \"%s\"", name);
    }
    if (!m->run.plan && msi_is_kept(source, role)) {
        return msi_read_unplanned(m, source, role, data);
    }
    const void *address = m->run.plan ? msi_live_address(m, t, role) : NULL;
    if (!address) {
        return msi_fail(m, MS_RESULT_ORDER, "ms_read: the %s \"%s\" is not in memory now; %s",
                        msi_role_name(role), name, msi_read_cure(&m->graph, t, role));
    }
    const bool on_host = msi_is_resident(source) && source->on_host;
    ms_result result = on_host ? msi_synchronize(m) : MS_RESULT_OK; // a step may still write it
    MSI_THEN(result, msi_copy(m, data, true, address, on_host, source->bytes));
    return result;
}

/* From now on a model without a plan only carries its last error. It has a backend that needs no
   device, and nothing that has to be closed. */
static ms_result msi_break(ms_model *m, ms_result result) {
    m->config.backend = ms_backend_cpu();
    m->device = NULL;
    msi_stick(m, result);
    m->errors.broken = result;
    return result;
}

/* Makes a model that only carries what is wrong with a config. */
static ms_result msi_make_broken(const ms_config *c, const char *fault, double number,
                                 ms_model **model) {
    const ms_allocator none = {NULL, NULL, NULL};
    const ms_allocator allocator = c->allocator.alloc && c->allocator.release ? c->allocator : none;
    ms_model *m = (ms_model *)msi_alloc_zeroed(&allocator, sizeof *m);
    char is[48] = "";
    if (!m) {
        return MS_RESULT_INVALID;
    }
    if (number < 0.0 || number > 0.0) {
        msi_format(is, sizeof is, " (it is %g)", number);
    }
    m->self = m;
    m->config.allocator = allocator;
    m->config.log = c->log;
    m->config.log_user = c->log_user;
    m->graph.loss = MSI_NONE;
    *model = m;
    return msi_break(m, msi_fail(m, MS_RESULT_INVALID, "ms_create: %s%s", fault, is));
}

/* Makes a model from a valid config with its defaults resolved. */
static ms_result msi_make_model(const ms_config *c, ms_model **model) {
    ms_model *m = (ms_model *)msi_alloc_zeroed(&c->allocator, sizeof *m);
    if (!m) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    *model = m;
    m->self = m;
    m->config = *c;
    m->graph.loss = MSI_NONE;
    m->device = c->backend.open ? NULL : c->backend.user;
    if (c->backend.open && !c->dry_run && !msi_open(m)) {
        return msi_break(m, MS_RESULT_BACKEND);
    }
    m->graph.tag = (uint32_t)(msi_mix((uint64_t)(uintptr_t)m) % UINT32_MAX);
    m->run.arena = c->arena;
    if (c->arena) {
        c->arena->references++;
    }
    ms_optimizer_desc defaults;
    memset(&defaults, 0, sizeof defaults);
    msi_use_optimizer(m, &defaults);
    return MS_RESULT_OK;
}

static void msi_free_model(ms_model *m) {
    const ms_allocator allocator = m->config.allocator;
    msi_graph *g = &m->graph;
    ms_arena *arena = m->run.arena;
    if (!m->config.dry_run) {
        (void)msi_synchronize(m);
    }
    if (arena && arena->user == m) {
        arena->user = NULL;
    }
    msi_plans_free(m, m->run.plan);
    msi_store_free(m, m->run.store);
    msi_drop_written(m);
    msi_timing_free(&allocator, m->run.timing);
    MSI_LIST_FREE(char, &allocator, g->names);
    MSI_LIST_FREE(msi_tensor, &allocator, g->tensors);
    MSI_LIST_FREE(msi_layer, &allocator, g->layers);
    MSI_LIST_FREE(uint32_t, &allocator, g->operands);
    MSI_LIST_FREE(uint32_t, &allocator, g->masks);
    if (m->config.backend.close && !m->config.dry_run) {
        m->config.backend.close(m->device);
    }
    msi_release(&allocator, m, sizeof *m);
    msi_arena_leave(arena);
}

// ------------------------------------------------------------------------------------------------
// >>verify  compares a plain pass with one by the present plan, both from the same values

/* Both passes run on a store of their own, with all that they change: transient values, gradients,
   and buffers that layers change. All other values are used where the model has them, and so is
   memory that the trainer lends, whose addresses its callbacks may know: what the passes change
   there is saved before them and put back. Meanwhile the model has this store, plans of its own and
   no shared arena; afterwards it is as it was before. */

enum { MSI_PASS_PLAIN, MSI_PASS_WRAPPED, MSI_PASS_COUNT };

static const uint64_t MSI_PIECE_BYTES = 1u << 20; // compared at a time

typedef struct msi_verification {
    ms_model *model;
    const char *function; // that runs the passes, for texts
    bool compares;        // the results of two passes
    msi_run before;       // of the model, to be put back
    msi_store *store;
    msi_plan *plans[MSI_PASS_COUNT];
    /* Per tensor that is compared its live range: of a param the gradient, of a buffer the value.
       MSI_NONE for the others. */
    uint32_t *range_of;
    uint8_t *results;      // of the plain pass; after them a piece of the other one's
    uint64_t result_bytes; // of one pass
    uint8_t *saved;        // a copy of what the passes change in the trainer's memory
    uint64_t saved_bytes;
    bool is_saved;
    ms_difference *differences;
    uint32_t count;
    double loss[MSI_PASS_COUNT];
} msi_verification;

/* Marks the params that learn and the buffers that layers change, and allocates for the results
   that are compared, and a piece.
   The live ranges of gradients are known only when a pass has been lowered. */
static ms_result msi_choose_compared(msi_verification *v) {
    const ms_model *m = v->model;
    const msi_graph *g = &m->graph;
    const ms_allocator *a = &m->config.allocator;
    v->range_of = (uint32_t *)msi_alloc(a, g->tensors.count * (uint64_t)sizeof(uint32_t));
    for (uint32_t t = 0; v->range_of && t < g->tensors.count; t++) {
        v->range_of[t] = msi_learns(&g->tensors.items[t]) ? m->run.store->resident_of[t] : MSI_NONE;
    }
    for (uint32_t i = 0; v->range_of && i < g->layers.count; i++) {
        for (MSI_EACH(state, g, &g->layers.items[i], MSI_GROUP_STATE)) {
            v->range_of[state.tensor] = m->run.store->resident_of[state.tensor];
        }
    }
    for (uint32_t t = 0; v->range_of && t < g->tensors.count; t++) {
        if (v->range_of[t] != MSI_NONE) {
            v->count += v->compares;
            v->result_bytes += v->compares ? msi_align(g->tensors.items[t].bytes) : 0;
        }
    }
    v->results = (uint8_t *)msi_alloc(a, v->result_bytes + MSI_PIECE_BYTES);
    v->differences =
        (ms_difference *)msi_alloc_zeroed(a, (v->count + 1ull) * sizeof(ms_difference));
    return v->range_of && v->results && v->differences
               ? MS_RESULT_OK
               : msi_fail_memory(v->model, "the results of a pass",
                                 v->result_bytes + MSI_PIECE_BYTES);
}

/* Whether the passes write a resident: a gradient, or a buffer that a layer changes. */
static bool msi_pass_changes(const msi_verification *v, const msi_resident *r) {
    const msi_tensor *tensor = &v->model->graph.tensors.items[r->tensor];
    return r->role == MSI_ROLE_GRADIENT ||
           (tensor->kind == MSI_KIND_BUFFER && v->range_of[r->tensor] != MSI_NONE);
}

/* Makes a store with the same residents as the model's, which lends those that no pass changes.
   What the trainer lends stays where it is. */
static ms_result msi_make_own_store(msi_verification *v) {
    ms_model *m = v->model;
    const ms_result result = msi_make_store(m, &v->store);
    if (result != MS_RESULT_OK) {
        return result;
    }
    msi_store *store = v->store;
    MEMSCALE_ASSERT(store->residents.count == m->run.store->residents.count);
    msi_reserve(m, store);
    store->resident_bytes = store->reserved_bytes = msi_is_direct(m) ? 0 : store->step_bytes;
    store->host_bytes = store->borrowed_bytes = 0;
    for (uint32_t i = 0; i < store->residents.count; i++) {
        msi_resident *resident = &store->residents.items[i];
        resident->borrowed |= !msi_pass_changes(v, resident);
        msi_place_resident(store, resident);
    }
    return result;
}

/* Copies what the passes change in the trainer's memory to v->saved, or from there back. */
static ms_result msi_move_saved(const msi_verification *v, bool back) {
    ms_model *m = v->model;
    const msi_store *store = v->before.store;
    ms_result result = MS_RESULT_OK;
    uint64_t at = 0;
    for (uint32_t i = 0; i < store->residents.count; i++) {
        const msi_resident *r = &store->residents.items[i];
        if (r->borrowed && msi_pass_changes(v, r)) {
            uint8_t *copy = v->saved + at;
            const ms_result moved = back
                                        ? msi_copy(m, r->address, r->on_host, copy, true, r->bytes)
                                        : msi_copy(m, copy, true, r->address, r->on_host, r->bytes);
            MSI_THEN(result, moved); // the others are moved even so
            at += msi_align(r->bytes);
        }
    }
    return result;
}

static ms_result msi_save_borrowed(msi_verification *v) {
    const msi_store *store = v->before.store;
    for (uint32_t i = 0; i < store->residents.count; i++) {
        const msi_resident *r = &store->residents.items[i];
        v->saved_bytes += r->borrowed && msi_pass_changes(v, r) ? msi_align(r->bytes) : 0;
    }
    if (v->saved_bytes == 0) {
        return MS_RESULT_OK;
    }
    v->saved = (uint8_t *)msi_alloc(&v->model->config.allocator, v->saved_bytes);
    if (!v->saved) {
        return msi_fail_memory(
            v->model, "the copy of borrowed gradients and buffers that is put back after a pass",
            v->saved_bytes);
    }
    const ms_result result = msi_move_saved(v, false);
    v->is_saved = result == MS_RESULT_OK;
    return result;
}

/* Plans a pass: forward and backward that drop what the plan drops. Gradients stay, as without an
   optimizer. */
static ms_result msi_make_pass(msi_verification *v, int pass) {
    ms_model *m = v->model;
    const ms_allocator *a = &m->config.allocator;
    msi_plan *plan = v->plans[pass] = msi_new_plan(m);
    ms_optimizer_desc none = m->optimizer;
    msi_lowering w;
    none.kind = MS_OPTIMIZER_NONE;
    none.grad_clip_norm = 0.0f;
    if (!plan || !msi_lowering_init(&w, &m->graph, v->store, &none, a)) {
        return msi_fail_memory(m, "the plan of a pass", msi_lowering_bytes(&m->graph));
    }
    msi_decide_plain(&m->graph, plan->decisions);
    for (uint32_t t = 0; t < m->graph.tensors.count && pass == MSI_PASS_WRAPPED; t++) {
        plan->decisions[t].pass = m->run.plan->decisions[t].pass;
    }
    plan->plain_step_us = m->run.plan->plain_step_us;
    msi_program *p = &plan->train;
    msi_lower_train(&w, plan->decisions, p);
    msi_lowering_free(&w);
    msi_schedule(v->store, a, p);
    if (!p->out_of_memory) {
        msi_share_memory(&m->graph, p);
    }
    if (p->out_of_memory || !msi_make_blocks(a, p, v->store->residents.count) ||
        msi_layout(a, p->blocks.items, p->blocks.count, MSI_LAYOUT_EFFORT, &p->height) !=
            MS_RESULT_OK) {
        return msi_fail_memory(m, "the program of a pass", p->ranges.count * sizeof(msi_range));
    }
    msi_resolve(v->store, p);
    v->store->transient_bytes = msi_larger(v->store->transient_bytes, p->height);
    return MS_RESULT_OK;
}

/* Allocates the store, and replaces the model's with it. */
static ms_result msi_enter_store(msi_verification *v) {
    ms_model *m = v->model;
    msi_store *store = v->store;
    m->run.arena = NULL;
    const ms_result result = msi_alloc_store(m, store);
    if (result == MS_RESULT_OUT_OF_MEMORY && !store->memory) {
        return msi_fail(m, result,
                        "%s: a pass takes %s besides the arena, which backend %s does not have: "
                        "call it with a smaller batch, or free what else is on the device",
                        v->function, msi_size(store->resident_bytes + store->transient_bytes).text,
                        m->config.backend.name);
    }
    if (result != MS_RESULT_OK) {
        return result;
    }
    memset(store->host + store->host_bytes, 0, (size_t)store->staging_bytes);
    for (uint32_t i = 0; i < store->residents.count; i++) {
        msi_resident *r = &store->residents.items[i];
        r->address = r->borrowed ? v->before.store->residents.items[i].address : r->address;
    }
    m->run.store = store;
    return MS_RESULT_OK;
}

/* A pass begins with the model's buffers, and without gradients, except borrowed ones, which are
   never cleared. */
static ms_result msi_reset_store(msi_verification *v) {
    ms_model *m = v->model;
    const msi_store *store = v->store, *from = v->before.store;
    ms_result result = msi_fill(m, store->step, msi_is_direct(m), 0, store->step_bytes);
    MSI_THEN(result, msi_move_saved(v, true));
    for (uint32_t i = 0; i < store->residents.count && result == MS_RESULT_OK; i++) {
        const msi_resident *r = &store->residents.items[i];
        if (r->role == MSI_ROLE_GRADIENT && !r->borrowed) {
            result = msi_fill(m, r->address, r->on_host, 0, r->bytes);
        } else if (!r->borrowed) {
            const void *source = from->residents.items[i].address;
            result = msi_copy(m, r->address, r->on_host, source, r->on_host, r->bytes);
        }
    }
    return result;
}

/* Poisons what the next instruction makes, and its workspace. */
static ms_result msi_poison_new(ms_model *m, uint8_t poison) {
    const msi_program *p = m->run.program;
    const msi_instruction *i = &p->instructions.items[m->run.position];
    ms_result result = MS_RESULT_OK;
    for (uint32_t k = 0; k < i->operand_count && msi_calls_layer((msi_op)i->op); k++) {
        const uint32_t index = p->operands.items[i->operand_first + k].range;
        const msi_range *range = index == MSI_NONE ? NULL : &p->ranges.items[index];
        if (range && index >= m->run.store->residents.count && range->first == m->run.position &&
            range->alias_of == MSI_NONE) {
            if (m->config.backend.device_is_host) {
                msi_asan_unpoison(msi_address(m, p, index), range->bytes);
            }
            MSI_THEN(result, msi_fill(m, msi_address(m, p, index), false, poison, range->bytes));
        }
    }
    return result;
}

/* Fills what is new before each instruction, with another poison in each pass, so that reads of
   uninitialized values make a difference. */
static ms_result msi_run_poisoned(ms_model *m, uint32_t end, uint8_t poison) {
    ms_result result = MS_RESULT_OK;
    while (result == MS_RESULT_OK && m->run.position < end) {
        result = msi_poison_new(m, poison);
        MSI_THEN(result, msi_run_to(m, m->run.position + 1));
    }
    return result;
}

static void msi_raise_to(double *most, double x) {
    *most = msi_is_finite(*most) && (!msi_is_finite(x) || x > *most) ? x : *most;
}

/* Counts two elements with different bits. Two NaN do not differ as numbers, nor do 0 and -0. */
static void msi_note_difference(ms_difference *d, double a, double b) {
    const double infinity = msi_f64_of_bits(0x7ffull << 52);
    const bool finite = msi_is_finite(a) && msi_is_finite(b);
    d->differ_count++;
    if (finite && a != b) {
        const double largest = fabs(a) > fabs(b) ? fabs(a) : fabs(b);
        msi_raise_to(&d->absolute, fabs(a - b));
        msi_raise_to(&d->relative, fabs(a - b) / largest);
    } else if (!finite && !(msi_is_nan(a) && msi_is_nan(b))) {
        d->absolute = d->relative = infinity;
    }
}

static void msi_compare_piece(ms_difference *d, ms_dtype dtype, const uint8_t *a, const uint8_t *b,
                              uint64_t bytes) {
    const uint64_t size = ms_dtype_bytes(dtype);
    if (memcmp(a, b, (size_t)bytes) == 0) {
        return;
    }
    for (uint64_t i = 0; i < bytes / size; i++) {
        if (memcmp(a + i * size, b + i * size, (size_t)size) != 0) {
            msi_note_difference(d, msi_number(a, dtype, i), msi_number(b, dtype, i));
        }
    }
}

/* The result of the pass that has run for one tensor: kept at `result`, or compared with that. */
static ms_result msi_take_result(msi_verification *v, int pass, uint32_t t, uint8_t *result,
                                 ms_difference *d) {
    ms_model *m = v->model;
    const msi_tensor *tensor = &m->graph.tensors.items[t];
    const uint8_t *from = (const uint8_t *)msi_address(m, m->run.program, v->range_of[t]);
    const bool on_host = msi_is_on_host(m->run.store, v->range_of[t]);
    uint8_t *piece = v->results + v->result_bytes;
    if (pass == MSI_PASS_PLAIN) {
        return msi_copy(m, result, true, from, on_host, tensor->bytes);
    }
    d->tensor = msi_handle(&m->graph, t,
                           tensor->kind == MSI_KIND_PARAM ? MSI_ROLE_GRADIENT : MSI_ROLE_VALUE);
    d->name = msi_name(&m->graph, tensor->name);
    d->count = ms_shape_count(&tensor->view.shape);
    for (uint64_t done = 0; done < tensor->bytes; done += MSI_PIECE_BYTES) {
        const uint64_t rest = tensor->bytes - done;
        const uint64_t part = rest < MSI_PIECE_BYTES ? rest : MSI_PIECE_BYTES;
        const ms_result copied = msi_copy(m, piece, true, from + done, on_host, part);
        if (copied != MS_RESULT_OK) {
            return copied;
        }
        msi_compare_piece(d, tensor->view.dtype, result + done, piece, part);
    }
    return MS_RESULT_OK;
}

static ms_result msi_take_results(msi_verification *v, int pass) {
    ms_model *m = v->model;
    const msi_program *p = m->run.program;
    uint8_t *to = v->results;
    ms_result result = MS_RESULT_OK;
    for (uint32_t i = 0; i < p->ranges.count; i++) {
        const msi_range *range = &p->ranges.items[i];
        const bool stays = i < v->store->residents.count || range->outlives;
        if (stays && range->role == MSI_ROLE_GRADIENT && range->category == MS_CATEGORY_GRADIENT) {
            v->range_of[range->tensor] = i;
        }
    }
    for (uint32_t t = 0, k = 0; t < m->graph.tensors.count && result == MS_RESULT_OK; t++) {
        if (v->range_of[t] != MSI_NONE) {
            result = msi_take_result(v, pass, t, to, &v->differences[k++]);
            to += msi_align(m->graph.tensors.items[t].bytes);
        }
    }
    return result;
}

/* Runs forward and backward. A loss that is not finite halts nothing here. */
static ms_result msi_run_pass(msi_verification *v, int pass) {
    ms_model *m = v->model;
    ms_step_state state;
    memset(&state, 0, sizeof state);
    const uint8_t poison = pass == MSI_PASS_PLAIN ? MSI_POISON_FIRST : MSI_POISON_LAST;
    m->run.plan = v->plans[pass];
    ms_result result = msi_reset_store(v);
    const msi_program *p = &m->run.plan->train;
    MSI_THEN(result, msi_start(m, p));
    MSI_THEN(result, msi_run_poisoned(m, p->forward_end, poison));
    MSI_THEN(result, msi_run_forward(m)); // nothing is left of it except the loss
    MSI_THEN(result, msi_run_poisoned(m, p->backward_end, poison));
    MSI_THEN(result, msi_copy(m, &state, true, msi_state_on_device(m, false), msi_is_direct(m),
                              sizeof state));
    v->loss[pass] = state.loss;
    MSI_THEN(result, msi_take_results(v, pass));
    return result;
}

/* Puts back what the model ran before; a copy that fails is tried once more. If the trainer's
   memory could not be restored, or debug mode has lost params, the model has failed. */
static ms_result msi_leave_store(msi_verification *v) {
    ms_model *m = v->model;
    msi_errors errors = m->errors;
    ms_result result = MS_RESULT_OK;
    if (v->is_saved && msi_move_saved(v, true) != MS_RESULT_OK) {
        result = msi_move_saved(v, true);
        errors = result == MS_RESULT_OK ? errors : m->errors;
    }
    v->before.failed |= m->run.failed || result != MS_RESULT_OK;
    if (v->store && v->store->memory) {
        (void)msi_synchronize(m); // the memory is going to be released
    }
    for (int pass = 0; pass < MSI_PASS_COUNT; pass++) {
        msi_plan_free(m, v->plans[pass]);
    }
    msi_store_free(m, v->store);
    m->errors = errors;
    m->run = v->before;
    return result;
}

static ms_result msi_begin_verification(msi_verification *v, ms_model *m, const char *function,
                                        bool compares) {
    memset(v, 0, sizeof *v);
    v->model = m;
    v->function = function;
    v->compares = compares;
    v->before = m->run;
    m->run.timing = NULL; // passes are not steps
    const ms_result result = msi_choose_compared(v);
    return result == MS_RESULT_OK ? msi_make_own_store(v) : result;
}

static void msi_end_verification(msi_verification *v) {
    const ms_allocator *a = &v->model->config.allocator;
    msi_release(a, v->range_of, v->model->graph.tensors.count * sizeof(uint32_t));
    msi_release(a, v->results, v->result_bytes + MSI_PIECE_BYTES);
    msi_release(a, v->saved, v->saved_bytes);
    msi_release(a, v->differences, (v->count + 1ull) * sizeof(ms_difference));
}

/* Looks for what is not finite in an operand. */
static ms_result msi_scan_operand(msi_verification *v, ms_nonfinite *n, uint32_t index) {
    ms_model *m = v->model;
    const msi_range *range = &m->run.program->ranges.items[index];
    const msi_tensor *tensor = &m->graph.tensors.items[range->tensor];
    const ms_dtype dtype = tensor->view.dtype;
    const uint8_t *from = (const uint8_t *)msi_address(m, m->run.program, index);
    const bool on_host = msi_is_on_host(m->run.store, index);
    uint8_t *piece = v->results + v->result_bytes;
    ms_result result = MS_RESULT_OK;
    for (uint64_t done = 0; done < tensor->bytes && result == MS_RESULT_OK;
         done += MSI_PIECE_BYTES) {
        const uint64_t rest = tensor->bytes - done, size = ms_dtype_bytes(dtype);
        const uint64_t part = rest < MSI_PIECE_BYTES ? rest : MSI_PIECE_BYTES;
        result = msi_copy(m, piece, true, from + done, on_host, part);
        if (result == MS_RESULT_OK) {
            msi_scan_piece(n, piece, dtype, part / size, done / size, m->config.debug);
        }
    }
    return result;
}

/* Looks at the operands of a layer's instruction: before it runs at what it reads of residents,
   after it at what it has made. */
static ms_result msi_scan_instruction(msi_verification *v, ms_nonfinite *n, uint32_t now,
                                      bool after) {
    const ms_model *m = v->model;
    const msi_program *p = m->run.program;
    const msi_instruction *i = &p->instructions.items[now];
    const msi_layer *l = &m->graph.layers.items[msi_calls_layer((msi_op)i->op) ? i->target : 0];
    ms_result result = MS_RESULT_OK;
    for (uint32_t k = 0; k < i->operand_count && msi_calls_layer((msi_op)i->op); k++) {
        uint32_t slot;
        const uint32_t range = p->operands.items[i->operand_first + k].range;
        const int group = msi_operand_group(l, i, k, &slot);
        const bool value = group < MSI_GROUP_COUNT;
        if (range == MSI_NONE || group == MSI_GROUP_WORKSPACE || n->count > 0 ||
            result != MS_RESULT_OK ||
            !(after ? msi_is_made(l, i, group, slot)
                    : value && range < m->run.store->residents.count)) {
            continue;
        }
        result = msi_scan_operand(v, n, range);
        n->layer = msi_layer_handle(&m->graph, i->target);
        n->tensor = msi_handle(&m->graph, p->ranges.items[range].tensor,
                               value ? MSI_ROLE_VALUE : MSI_ROLE_GRADIENT);
        n->phase = msi_ops[i->op].phase;
        n->is_read = !after;
    }
    return result;
}

/* Runs forward and backward by the present plan up to the first layer that reads or makes what is
   not finite. The poison is finite. */
static ms_result msi_run_scanned(msi_verification *v, ms_nonfinite *n) {
    ms_model *m = v->model;
    m->run.plan = v->plans[MSI_PASS_WRAPPED];
    const msi_program *p = &m->run.plan->train;
    ms_result result = msi_reset_store(v);
    MSI_THEN(result, msi_start(m, p));
    while (result == MS_RESULT_OK && m->run.position < p->backward_end && n->count == 0) {
        const uint32_t now = m->run.position;
        result = msi_scan_instruction(v, n, now, false);
        if (n->count == 0) {
            MSI_THEN(result, msi_run_poisoned(m, now + 1, MSI_POISON_FIRST));
            MSI_THEN(result, msi_scan_instruction(v, n, now, true));
        }
    }
    if (result != MS_RESULT_OK || n->count == 0) {
        memset(n, 0, sizeof *n);
    }
    return result;
}

static ms_result msi_find_nonfinite(ms_model *m, ms_nonfinite *found) {
    msi_verification v;
    ms_result result = msi_begin_verification(&v, m, "ms_find_nonfinite", false);
    MSI_THEN(result, msi_make_pass(&v, MSI_PASS_WRAPPED));
    MSI_THEN(result, msi_save_borrowed(&v));
    MSI_THEN(result, msi_enter_store(&v));
    MSI_THEN(result, msi_run_scanned(&v, found));
    const ms_result left = msi_leave_store(&v);
    result = left != MS_RESULT_OK ? left : result;
    msi_end_verification(&v);
    if (result == MS_RESULT_OK && found->count > 0) {
        msi_format(m->errors.text, sizeof m->errors.text, "%s", msi_nonfinite_name(m, found).text);
    }
    return result;
}

static void msi_report_differences(const msi_verification *v, ms_difference_fn visit, void *user,
                                   ms_verify_report *report) {
    report->tensor_count = v->count;
    report->plain_loss = v->loss[MSI_PASS_PLAIN];
    report->wrapped_loss = v->loss[MSI_PASS_WRAPPED];
    for (uint32_t k = 0; k < v->count; k++) {
        const ms_difference *d = &v->differences[k];
        report->differ_count += d->differ_count > 0;
        msi_raise_to(&report->absolute, d->absolute);
        msi_raise_to(&report->relative, d->relative);
        if (visit) {
            visit(d, user);
        }
    }
}

static ms_result msi_check_verifiable(ms_model *m, const char *function) {
    const ms_result result = msi_check_start(m, function);
    return result != MS_RESULT_OK ? result
           : m->wrapped.changed
               ? msi_fail(m, MS_RESULT_ORDER,
                          "%s: something was set since ms_wrap that asks for a new plan: call "
                          "ms_wrap first",
                          function)
           : m->run.stage != MSI_STAGE_IDLE
               ? msi_fail(m, MS_RESULT_ORDER,
                          "%s: a step is under way: complete it with ms_backward and ms_update "
                          "first",
                          function)
               : MS_RESULT_OK;
}

static ms_result msi_verify(ms_model *m, ms_difference_fn visit, void *user,
                            ms_verify_report *report) {
    msi_verification v;
    ms_result result = msi_begin_verification(&v, m, "ms_verify", true);
    MSI_THEN(result, msi_make_pass(&v, MSI_PASS_PLAIN));
    MSI_THEN(result, msi_make_pass(&v, MSI_PASS_WRAPPED));
    MSI_THEN(result, msi_save_borrowed(&v));
    MSI_THEN(result, msi_enter_store(&v));
    MSI_THEN(result, msi_run_pass(&v, MSI_PASS_PLAIN));
    MSI_THEN(result, msi_run_pass(&v, MSI_PASS_WRAPPED));
    const ms_result left = msi_leave_store(&v);
    result = left != MS_RESULT_OK ? left : result;
    if (result == MS_RESULT_OK) {
        const char *outer = msi_enter(m, v.function);
        msi_report_differences(&v, visit, user, report);
        msi_leave(m, outer);
    }
    msi_end_verification(&v);
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>report  what users see of a plan: sizes and times, and its programs as events

/* The program whose live bytes decide the size of the arena. */
static const msi_program *msi_widest(const msi_plan *plan) {
    return plan->eval.peak_bytes > plan->train.peak_bytes ? &plan->eval : &plan->train;
}

/* Whether a range is a resident that is not in the arena: on the host, or the trainer's own. */
static bool msi_is_outside(const msi_store *store, uint32_t range) {
    return range < store->residents.count &&
           (store->residents.items[range].borrowed || store->residents.items[range].on_host);
}

static void msi_report_peak(const ms_model *m, ms_memory_report *r) {
    const msi_program *p = msi_widest(m->run.plan);
    const msi_instruction *i = &p->instructions.items[p->peak];
    for (uint32_t k = 0; k < p->ranges.count; k++) {
        const msi_range *range = &p->ranges.items[k];
        if (range->first <= p->peak && p->peak <= msi_counts_to(range) &&
            !msi_is_outside(m->run.store, k)) {
            r->peak_bytes[range->category] += msi_align(range->bytes);
        }
    }
    r->peak_instruction = p->peak;
    r->peak_layer = msi_calls_layer((msi_op)i->op) ? msi_layer_name(&m->graph, i->target) : "";
}

static void msi_report_freed(const ms_model *m, ms_memory_report *r) {
    r->layout_freed_bytes = (int64_t)(r->plain_bytes - r->arena_bytes);
    for (int k = 0; k < MS_TECHNIQUE_COUNT; k++) {
        r->freed_bytes[k] = msi_freed_bytes(m->run.store, m->run.plan, (ms_technique)k);
        r->layout_freed_bytes -= r->freed_bytes[k];
    }
}

static uint64_t msi_hash_program(uint64_t hash, const msi_program *p, uint32_t resident_count) {
    hash = msi_mix_in(hash, p->instructions.count);
    for (uint32_t now = 0; now < p->instructions.count; now++) {
        const msi_instruction *i = &p->instructions.items[now];
        const uint64_t head = (uint64_t)i->op << 16 | i->operand_count;
        hash = msi_mix_in(hash, head << 32 | i->target);
        for (uint32_t k = 0; k < i->operand_count; k++) {
            const msi_operand *operand = &p->operands.items[i->operand_first + k];
            hash = msi_mix_in(hash, (uint64_t)operand->accumulate << 32 | operand->range);
        }
    }
    for (uint32_t k = resident_count; k < p->ranges.count; k++) {
        hash = msi_mix_in(msi_mix_in(hash, p->ranges.items[k].bytes), p->ranges.items[k].offset);
    }
    return hash;
}

/* From indices, sizes and offsets, never from addresses, so that all processes agree. */
static uint64_t msi_hash_plan(const msi_store *store, const msi_plan *plan) {
    uint64_t hash =
        msi_mix_in(store->reserved_bytes, store->resident_bytes + store->transient_bytes);
    for (uint32_t k = 0; k < store->residents.count; k++) {
        const msi_resident *resident = &store->residents.items[k];
        const uint64_t outside = (uint64_t)resident->on_host << 1 | resident->borrowed;
        hash = msi_mix_in(hash, (outside << 8 | (uint64_t)resident->role) << 32 | resident->tensor);
        hash = msi_mix_in(msi_mix_in(hash, resident->bytes), resident->offset);
    }
    hash = msi_hash_program(hash, &plan->train, store->residents.count);
    return msi_hash_program(hash, &plan->eval, store->residents.count);
}

/* How long the last timed step of this program took; 0: no step has been timed. */
static double msi_measured_us(const msi_program *p) {
    if (!p->is_measured) {
        return 0.0;
    }
    const double *last = p->measured.items + 2ull * (p->instructions.count - 1);
    return last[0] + last[1];
}

static void msi_fill_report(const ms_model *m, ms_memory_report *r) {
    const msi_graph *g = &m->graph;
    const msi_plan *plan = m->run.plan;
    memset(r, 0, sizeof *r);
    r->budget_bytes = plan->budget_bytes;
    r->plain_bytes = plan->plain_bytes;
    r->arena_bytes = m->run.store->resident_bytes + m->run.store->transient_bytes;
    r->lower_bound_bytes = m->run.store->resident_bytes + msi_widest(plan)->peak_bytes;
    r->gap_bytes = r->arena_bytes - r->lower_bound_bytes;
    msi_report_peak(m, r);
    r->peak_bytes[MS_CATEGORY_WORKSPACE] += m->run.store->reserved_bytes;
    msi_report_freed(m, r);
    r->activation_peak_bytes = plan->train.activation_peak_bytes;
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        if (g->tensors.items[t].kind == MSI_KIND_PARAM) {
            r->param_count += ms_shape_count(&g->tensors.items[t].view.shape);
        }
    }
    r->layer_count = g->layers.count;
    r->tensor_count = g->tensors.count;
    r->instruction_count = plan->train.instructions.count;
    r->recompute_count = plan->train.recompute_count;
    r->recompute_share = plan->train.recompute_us / plan->plain_step_us;
    r->step_us = plan->train.step_us;
    r->plain_step_us = plan->plain_step_us;
    r->stall_us = plan->train.stall_us;
    r->time_source = m->costs.source;
    r->plan_hash = msi_hash_plan(m->run.store, plan);
    r->pressure = msi_pressure(plan);
    r->mode = m->wrapped.choice.mode;
    r->decision_source = m->wrapped.choice.source;
    r->early_update = msi_updates_inside(&plan->train);
    r->borrowed_bytes = m->run.store->borrowed_bytes;
    r->host_bytes = m->run.store->host_bytes;
    r->staging_bytes = m->run.store->staging_bytes;
    r->step_count = m->run.step;
    r->measured_step_us = msi_measured_us(&plan->train);
    r->backend_name = m->config.backend.name;
    r->device_name = m->costs.hardware.name;
}

/* A walk through a program: what is live at each instruction, and when that runs. */
typedef struct msi_walk {
    const ms_model *model;
    const msi_program *program;
    ms_event_fn visit;
    void *user;
    uint32_t now;
    const msi_instruction *instruction; // the present one, at `now`
    double start_us, duration_us;       // of the instruction
    uint64_t live_bytes_of[MS_CATEGORY_COUNT];
    msi_clock clock;
} msi_walk;

static void msi_walk_start(msi_walk *w, const ms_model *m, const msi_program *p, ms_event_fn visit,
                           void *user) {
    const msi_store *store = m->run.store;
    memset(w, 0, sizeof *w);
    w->model = m;
    w->program = p;
    w->visit = visit;
    w->user = user;
    w->live_bytes_of[MS_CATEGORY_WORKSPACE] = store->reserved_bytes;
    for (uint32_t k = 0; k < store->residents.count; k++) {
        w->live_bytes_of[p->ranges.items[k].category] +=
            msi_is_outside(store, k) ? 0 : msi_align(store->residents.items[k].bytes);
    }
    msi_clock_start(&w->clock, &m->graph, &m->costs, store, p);
}

/* The transient range of operand k of the present instruction. NULL: the operand has none, or an
   operand before it has the same one, so that a caller sees each range once. */
static const msi_range *msi_walk_range(const msi_walk *w, uint32_t k) {
    const msi_operand *operands = w->program->operands.items + w->instruction->operand_first;
    const uint32_t range = operands[k].range;
    bool skipped = range == MSI_NONE || range < w->model->run.store->residents.count;
    for (uint32_t j = 0; j < k && !skipped; j++) {
        skipped = operands[j].range == range;
    }
    return skipped ? NULL : &w->program->ranges.items[range];
}

/* Brings live_bytes_of up to date, before an instruction or after it. A live range is an operand of
   the instruction where it begins and, unless it outlives the program, of the one where it ends.
   One whose memory is aliased there ends before that instruction already. */
static void msi_walk_count(msi_walk *w, bool after) {
    for (uint32_t k = 0; k < w->instruction->operand_count; k++) {
        const msi_range *range = msi_walk_range(w, k);
        if (range && !after && range->first == w->now) {
            w->live_bytes_of[range->category] += msi_align(range->bytes);
        } else if (range && range->last == w->now && !range->outlives && after != range->aliased) {
            w->live_bytes_of[range->category] -= msi_align(range->bytes);
        }
    }
}

/* The role of a live range as handles know it: a contribution is part of a gradient. */
static msi_role msi_public_role(const msi_range *range) {
    return range->role == MSI_ROLE_CONTRIBUTION ? MSI_ROLE_GRADIENT
           : range->role == MSI_ROLE_SNAPSHOT   ? MSI_ROLE_VALUE
                                                : (msi_role)range->role;
}

/* Operand k of the present instruction, as an event has it. */
static ms_event_operand msi_event_operand(const msi_walk *w, uint32_t k) {
    const msi_program *p = w->program;
    const msi_store *store = w->model->run.store;
    const msi_instruction *i = w->instruction;
    const msi_operand *operand = &p->operands.items[i->operand_first + k];
    const msi_range *range = &p->ranges.items[operand->range];
    const bool fixed = operand->range < store->residents.count;
    const msi_role role = msi_public_role(range);
    ms_event_operand o;
    memset(&o, 0, sizeof o);
    if (role < MSI_ROLE_RESIDENT_COUNT) {
        o.tensor = msi_handle(&w->model->graph, range->tensor, role);
    }
    o.bytes = range->bytes;
    o.is_outside = msi_is_outside(store, operand->range);
    o.offset = o.is_outside ? 0
               : fixed      ? store->residents.items[operand->range].offset
                            : store->resident_bytes + range->offset;
    o.is_new = !fixed && range->first == w->now;
    o.accumulate = operand->accumulate;
    if (msi_calls_layer((msi_op)i->op)) {
        const msi_layer *l = &w->model->graph.layers.items[i->target];
        const int group = msi_operand_group(l, i, k, &o.slot);
        o.kind = (ms_operand_kind)group; // both enums have the same order
        o.is_written = msi_is_written(l, i, group, o.slot);
        return o;
    }
    const bool source = msi_ops[i->op].sources >> k & 1;
    o.kind = source ? MS_OPERAND_SOURCE : MS_OPERAND_TARGET;
    o.is_written = !source;
    o.slot = k;
    return o;
}

/* The operands of the present instruction, or only those that are dead after it. Returns their
   count. */
static uint32_t msi_event_operands(const msi_walk *w, bool dead_only, ms_event_operand *operands) {
    const msi_operand *all = w->program->operands.items + w->instruction->operand_first;
    uint32_t count = 0;
    for (uint32_t k = 0; k < w->instruction->operand_count; k++) {
        const msi_range *range = msi_walk_range(w, k);
        if (dead_only ? range && range->last == w->now && !range->aliased && !range->outlives
                      : all[k].range != MSI_NONE) {
            operands[count++] = msi_event_operand(w, k);
        }
    }
    return count;
}

static ms_event msi_event(const msi_walk *w, ms_event_kind kind, const ms_event_operand *operands,
                          uint32_t count) {
    ms_event event;
    memset(&event, 0, sizeof event);
    event.size = sizeof event;
    event.index = kind > MS_EVENT_DROP ? UINT32_MAX : w->now;
    event.layer_index = UINT32_MAX;
    event.kind = kind;
    event.name = "";
    event.operands = operands;
    event.operand_count = count;
    for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
        event.live_bytes += event.live_bytes_of[c] = w->live_bytes_of[c];
    }
    return event;
}

/* The event of the present instruction, or of what is dead after it. */
static void msi_emit_event(const msi_walk *w, ms_event_kind kind) {
    const ms_model *m = w->model;
    const msi_instruction *i = w->instruction;
    const bool drops = kind == MS_EVENT_DROP;
    ms_event_operand operands[MSI_MAX_VIEWS + 1];
    const uint32_t count = msi_event_operands(w, drops, operands);
    if (drops && count == 0) {
        return;
    }
    const bool of_scratch =
        i->op == MSI_OP_CLIP || (i->op == MSI_OP_ZERO && count == 1 && operands[0].tensor.id == 0);
    ms_event event = msi_event(w, kind, operands, count);
    if (msi_calls_layer((msi_op)i->op)) {
        event.layer = msi_layer_handle(&m->graph, i->target);
        event.layer_index = i->target;
        event.name = msi_layer_name(&m->graph, i->target);
    } else if (!of_scratch) {
        event.tensor = msi_handle(&m->graph, i->target, MSI_ROLE_VALUE);
        event.name = msi_tensor_name(&m->graph, i->target);
    }
    event.live_bytes = m->run.store->resident_bytes + w->program->live_bytes.items[w->now];
    event.stream = msi_stream_of(&m->costs, (msi_op)i->op);
    event.start_us = drops ? w->start_us + w->duration_us : w->start_us;
    event.duration_us = drops ? 0.0 : w->duration_us;
    event.is_restore = i->restores && !drops;
    event.by_forward = i->op == MSI_OP_REPEAT && !drops;
    if (w->program->is_measured) {
        const double *measured = w->program->measured.items + 2ull * w->now;
        event.measured_us = drops ? 0.0 : measured[1];
        event.measured_start_us = drops ? measured[0] + measured[1] : measured[0];
    }
    w->visit(&event, w->user);
}

/* What a step does besides its instructions. */
static void msi_emit_besides(const msi_walk *w, ms_event_kind kind, ms_stream_kind stream,
                             double start_us, double us, const ms_event_operand *operand) {
    const ms_tensor t = operand->tensor;
    ms_event event = msi_event(w, kind, operand, 1);
    event.tensor = t;
    event.name = t.id ? msi_tensor_name(&w->model->graph, msi_index(&w->model->graph, t)) : "";
    event.stream = stream;
    event.start_us = start_us;
    event.duration_us = us;
    w->visit(&event, w->user);
}

/* The inputs are copied to the device before the first instruction. */
static void msi_visit_inputs(const msi_walk *w) {
    const ms_model *m = w->model;
    msi_clock c;
    memset(&c, 0, sizeof c);
    for (uint32_t k = 0; k < m->run.store->residents.count; k++) {
        const msi_resident *resident = &m->run.store->residents.items[k];
        const double us = msi_staging_us(&m->graph, &m->costs, resident);
        if (us > 0.0) {
            ms_event_operand input;
            memset(&input, 0, sizeof input);
            input.tensor = msi_handle(&m->graph, resident->tensor, MSI_ROLE_VALUE);
            input.kind = MS_OPERAND_TARGET;
            input.offset = resident->offset;
            input.bytes = w->program->ranges.items[k].bytes;
            input.is_written = true;
            msi_emit_besides(w, MS_EVENT_INPUT, MS_STREAM_TO_DEVICE,
                             msi_enqueue(&c, MS_STREAM_TO_DEVICE, 0.0, us), us, &input);
        }
    }
}

/* After forward the losses are summed; the verdict is copied to the host: see msi_clock_judge. */
static void msi_visit_verdict(const msi_walk *w) {
    const ms_model *m = w->model;
    const msi_range *range = &w->program->ranges.items[w->program->loss];
    const double end_us = w->start_us + w->duration_us;
    ms_event_operand loss, verdict;
    memset(&loss, 0, sizeof loss);
    loss.tensor = msi_handle(&m->graph, range->tensor, MSI_ROLE_VALUE);
    loss.kind = MS_OPERAND_SOURCE;
    loss.offset = m->run.store->resident_bytes + range->offset;
    loss.bytes = range->bytes;
    msi_emit_besides(w, MS_EVENT_LOSS, MS_STREAM_COMPUTE, end_us,
                     w->clock.free_us[MS_STREAM_COMPUTE] - end_us, &loss);
    if (m->costs.has_copies) {
        const double us = msi_copy_us(&m->costs, MS_STREAM_TO_HOST, MSI_STATES_BYTES);
        memset(&verdict, 0, sizeof verdict);
        verdict.kind = MS_OPERAND_TARGET;
        verdict.bytes = MSI_STATES_BYTES;
        verdict.is_outside = verdict.is_written = true;
        msi_emit_besides(w, MS_EVENT_VERDICT, MS_STREAM_TO_HOST,
                         w->clock.free_us[MS_STREAM_TO_HOST] - us, us, &verdict);
    }
}

static void msi_visit(const ms_model *m, const msi_program *p, ms_event_fn visit, void *user) {
    msi_walk w;
    msi_walk_start(&w, m, p, visit, user);
    msi_visit_inputs(&w);
    for (w.now = 0; w.now < p->instructions.count; w.now++) {
        w.instruction = &p->instructions.items[w.now];
        msi_walk_count(&w, false);
        w.duration_us = msi_duration_us(&w.clock, w.instruction);
        w.start_us = msi_clock_run(&w.clock, w.now, w.duration_us);
        if (w.instruction->op != MSI_OP_NOTHING) {
            msi_emit_event(&w, msi_ops[w.instruction->op].event);
            msi_emit_event(&w, MS_EVENT_DROP);
        }
        msi_walk_count(&w, true);
        if (w.now + 1 == p->forward_end) {
            msi_visit_verdict(&w);
        }
    }
}

/* The layer that an instruction runs, or none. */
static ms_layer msi_layer_at(const msi_graph *g, const msi_program *p, uint32_t now) {
    const msi_instruction *i = &p->instructions.items[now];
    const ms_layer none = {0};
    return msi_calls_layer((msi_op)i->op) ? msi_layer_handle(g, i->target) : none;
}

static ms_lifetime msi_lifetime(const msi_graph *g, const msi_program *p, ms_category category,
                                uint64_t bytes, uint32_t first, uint32_t last) {
    ms_lifetime l;
    memset(&l, 0, sizeof l);
    l.size = sizeof l;
    l.name = "";
    l.category = category;
    l.bytes = msi_align(bytes);
    l.first = first;
    l.last = last;
    l.first_layer = msi_layer_at(g, p, first);
    l.last_layer = msi_layer_at(g, p, last);
    return l;
}

static void msi_visit_lifetimes(const ms_model *m, const msi_program *p, ms_lifetime_fn visit,
                                void *user) {
    const uint32_t end = p->instructions.count - 1, residents = m->run.store->residents.count;
    ms_lifetime l =
        msi_lifetime(&m->graph, p, MS_CATEGORY_WORKSPACE, m->run.store->reserved_bytes, 0, end);
    l.is_resident = l.is_at_peak = true;
    if (l.bytes > 0) {
        visit(&l, user);
    }
    for (uint32_t k = 0; k < p->ranges.count; k++) {
        const msi_range *range = &p->ranges.items[k];
        const msi_role role = msi_public_role(range);
        const bool resident = k < residents;
        l = msi_lifetime(&m->graph, p, (ms_category)range->category, range->bytes,
                         resident ? 0 : range->first, resident ? end : msi_counts_to(range));
        if (role < MSI_ROLE_RESIDENT_COUNT) {
            l.tensor = msi_handle(&m->graph, range->tensor, role);
            l.name = msi_tensor_name(&m->graph, range->tensor);
        } else if (role == MSI_ROLE_WORKSPACE) {
            l.name = msi_layer_name(&m->graph, range->tensor);
        }
        l.is_resident = resident;
        l.is_outside = msi_is_outside(m->run.store, k);
        l.is_at_peak = !l.is_outside && l.first <= p->peak && p->peak <= l.last;
        if (l.first <= l.last) { // not aliased at once
            visit(&l, user);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// >>api  public functions: they check their arguments and call what is above

MEMSCALE_API ms_result ms_arena_create(const ms_backend *backend, const ms_allocator *allocator,
                                       ms_arena **arena) {
    const ms_allocator none = {NULL, NULL, NULL}, a = allocator ? *allocator : none;
    const ms_backend b = backend && backend->size ? *backend : ms_backend_cpu();
    if (arena) {
        *arena = NULL;
    }
    return arena && msi_is_complete(&b) && !a.alloc == !a.release ? msi_make_arena(&b, &a, arena)
                                                                  : MS_RESULT_INVALID;
}

MEMSCALE_API void ms_arena_destroy(ms_arena *arena) {
    msi_arena_leave(arena);
}

MEMSCALE_API uint64_t ms_arena_bytes(const ms_arena *arena) {
    return arena ? arena->bytes : 0;
}

MEMSCALE_API ms_result ms_create(const ms_config *config, ms_model **model) {
    ms_config c;
    memset(&c, 0, sizeof c);
    if (!model) {
        return MS_RESULT_INVALID;
    }
    *model = NULL;
    c = config ? *config : c;
    c.backend = c.backend.size ? c.backend : ms_backend_cpu();
    if (msi_is_finite(c.target_utilization) && c.target_utilization == 0.0) {
        c.target_utilization = 0.85;
    }
    double number;
    const char *fault = msi_config_fault(&c, &number);
    return fault ? msi_make_broken(&c, fault, number, model) : msi_make_model(&c, model);
}

MEMSCALE_API void ms_destroy(ms_model *model) {
    if (model && msi_check_called(model, "ms_destroy") == MS_RESULT_OK) {
        msi_free_model(model);
    }
}

MEMSCALE_API const char *ms_last_error(const ms_model *model) {
    return model ? model->errors.text : "there is no model: ms_create had no memory for one";
}

MEMSCALE_API ms_result ms_hardware_report(ms_model *model, ms_hardware *report) {
    if (!model || !report) {
        return msi_fail_argument(model, "ms_hardware_report", "an argument is NULL");
    }
    memset(report, 0, sizeof *report);
    return msi_made(model) != MS_RESULT_OK ? msi_made(model)
           : model->run.busy || model->run.recording
               ? msi_fail(model, MS_RESULT_ORDER, "ms_hardware_report: called from a callback")
               : msi_report_hardware(model, report);
}

MEMSCALE_API void ms_set_hardware(ms_model *model, const ms_hardware *hardware) {
    const char *fault = msi_hardware_fault(hardware);
    if (model && fault) {
        model->sources.given_fault = fault;
        (void)msi_check_hardware(model);
    } else if (model) {
        msi_use_hardware(model, hardware);
    }
}

MEMSCALE_API void ms_clear_hardware(ms_model *model) {
    if (model) {
        msi_use_hardware(model, NULL);
    }
}

MEMSCALE_API void *ms_stream(const ms_model *model) {
    return model ? msi_stream(model) : NULL;
}

MEMSCALE_API ms_result ms_synchronize(ms_model *model) {
    return msi_made(model) != MS_RESULT_OK ? msi_made(model)
           : model->run.busy
               ? msi_fail(model, MS_RESULT_ORDER, "ms_synchronize: called from a callback")
               : msi_await_steps(model);
}

MEMSCALE_API ms_tensor ms_input(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape) {
    return msi_register_tensor(model, MSI_KIND_INPUT, name, dtype, &shape);
}

MEMSCALE_API ms_tensor ms_param(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape) {
    return msi_register_tensor(model, MSI_KIND_PARAM, name, dtype, &shape);
}

MEMSCALE_API ms_tensor ms_buffer(ms_model *model, const char *name, ms_dtype dtype,
                                 ms_shape shape) {
    return msi_register_tensor(model, MSI_KIND_BUFFER, name, dtype, &shape);
}

MEMSCALE_API ms_tensor ms_activation(ms_model *model, const char *name, ms_dtype dtype,
                                     ms_shape shape) {
    return msi_register_tensor(model, MSI_KIND_ACTIVATION, name, dtype, &shape);
}

MEMSCALE_API ms_tensor ms_saved(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape) {
    return msi_register_tensor(model, MSI_KIND_SAVED, name, dtype, &shape);
}

MEMSCALE_API ms_axis ms_add_axis(ms_model *model, const char *name, int64_t size, int64_t largest) {
    const ms_axis none = {0};
    name = name ? name : "";
    return msi_registering(model, "axis", name) && msi_check_axis(model, name, size, largest)
               ? msi_add_axis(model, name, size, largest)
               : none;
}

MEMSCALE_API ms_layer ms_register_layer(ms_model *model, const ms_layer_desc *desc) {
    const ms_layer none = {0};
    const bool open = msi_registering(model, "layer", desc && desc->name ? desc->name : "");
    if (open && !desc) {
        MSI_STICK(model, MS_RESULT_INVALID, "ms_register_layer: desc is NULL");
    }
    return open && desc ? msi_register_layer(model, desc) : none;
}

MEMSCALE_API void ms_refuse(ms_model *model, const char *reason) {
    if (model) {
        MSI_STICK(model, MS_RESULT_INVALID, "%s", reason ? reason : "refused");
    }
}

MEMSCALE_API void ms_set_on_host(ms_model *model, ms_tensor tensor) {
    msi_tensor *t = msi_tensor_of(model, "ms_set_on_host", tensor, MSI_KIND_INPUT, MSI_KIND_BUFFER);
    if (t) {
        t->on_host = true;
    }
}

MEMSCALE_API void ms_stop_gradient(ms_model *model, ms_tensor tensor) {
    msi_tensor *t =
        msi_tensor_of(model, "ms_stop_gradient", tensor, MSI_KIND_ACTIVATION, MSI_KIND_ACTIVATION);
    if (t) {
        t->no_gradient = true;
    }
}

MEMSCALE_API ms_result ms_borrow(ms_model *model, ms_tensor tensor, void *memory) {
    if (!model) {
        return MS_RESULT_INVALID;
    }
    const uint32_t t = msi_index(&model->graph, tensor);
    if (t == MSI_NONE || !memory) {
        return msi_refuse_loan(model, MS_RESULT_INVALID, msi_handle_name(&model->graph, tensor),
                               memory ? "is no tensor of this model" : "cannot use NULL as memory");
    }
    const ms_result result = msi_check_loan(model, t, msi_role_of(&model->graph, tensor));
    if (result == MS_RESULT_OK) {
        msi_borrow(model, t, msi_role_of(&model->graph, tensor), memory);
    }
    return result;
}

MEMSCALE_API void ms_set_loss(ms_model *model, ms_tensor loss) {
    const uint32_t t = msi_loss_index(model, loss);
    if (t != MSI_NONE) {
        model->graph.loss = t;
    }
}

MEMSCALE_API void ms_set_loss_factor(ms_model *model, float factor) {
    if (msi_check_finite(model, "ms_set_loss_factor", NULL, factor)) {
        model->run.epoch += model->loss_factor != factor;
        model->loss_factor = factor;
    }
}

MEMSCALE_API void ms_add_output(ms_model *model, ms_tensor tensor) {
    const uint32_t t = msi_activation_index(model, "ms_add_output", tensor);
    if (t != MSI_NONE) {
        model->graph.tensors.items[t].is_output = true;
    }
}

MEMSCALE_API void ms_add_eval_output(ms_model *model, ms_tensor tensor) {
    const uint32_t t = msi_activation_index(model, "ms_add_eval_output", tensor);
    if (t != MSI_NONE) {
        model->graph.tensors.items[t].is_eval_output = true;
    }
}

MEMSCALE_API void ms_set_optimizer(ms_model *model, const ms_optimizer_desc *desc) {
    if (msi_registering(model, "ms_set_optimizer", "") && msi_check_optimizer(model, desc)) {
        msi_use_optimizer(model, desc);
    }
}

MEMSCALE_API void ms_set_learning_rate(ms_model *model, float learning_rate) {
    if (msi_check_finite(model, "ms_set_learning_rate", NULL, learning_rate)) {
        model->optimizer.learning_rate = learning_rate;
    }
}

MEMSCALE_API void ms_set_weight_decay(ms_model *model, ms_tensor param, float weight_decay) {
    static const char *const function = "ms_set_weight_decay";
    msi_tensor *t = msi_param_of(model, function, param);
    if (t && msi_check_finite(model, function, msi_name(&model->graph, t->name), weight_decay)) {
        t->weight_decay = weight_decay;
        t->has_weight_decay = true;
    }
}

MEMSCALE_API void ms_set_frozen(ms_model *model, ms_tensor param, bool frozen) {
    msi_tensor *t = msi_param_of(model, "ms_set_frozen", param);
    if (t) {
        t->frozen = frozen;
        model->wrapped.changed = true;
    }
}

MEMSCALE_API void ms_set_budget(ms_model *model, uint64_t memory_budget_bytes) {
    if (model) {
        model->config.memory_budget_bytes = memory_budget_bytes;
    }
}

MEMSCALE_API void ms_set_accumulation(ms_model *model, uint32_t micro_count) {
    if (model) {
        model->config.accumulation_steps = micro_count;
        model->wrapped.changed = true;
    }
}

MEMSCALE_API void ms_set_layer_technique(ms_model *model, ms_layer layer, ms_technique technique,
                                         ms_switch force) {
    static const char *const function = "ms_set_layer_technique";
    const msi_layer *l = msi_check_technique(model, function, technique, force)
                             ? msi_layer_of(model, function, layer)
                             : NULL;
    if (l) {
        msi_set_on_layer(model, l, technique, force);
    }
}

MEMSCALE_API void ms_set_tensor_technique(ms_model *model, ms_tensor tensor, ms_technique technique,
                                          ms_switch force) {
    const uint32_t t = msi_check_technique(model, "ms_set_tensor_technique", technique, force)
                           ? msi_technique_index(model, tensor, technique)
                           : MSI_NONE;
    if (t != MSI_NONE) {
        model->graph.tensors.items[t].technique[technique] = (uint8_t)force;
        model->wrapped.changed = true;
    }
}

MEMSCALE_API void ms_set_layer_time(ms_model *model, ms_layer layer, const ms_layer_time *time) {
    msi_layer *l = msi_layer_of(model, "ms_set_layer_time", layer);
    if (l && msi_check_layer_time(model, l, time)) {
        msi_set_layer_time(model, l, time);
    }
}

/* Read-only functions return their errors without a text: the model is const. */
static ms_result msi_check_planned(const ms_model *m, bool has_arguments) {
    return msi_made(m) != MS_RESULT_OK ? msi_made(m)
           : !has_arguments            ? MS_RESULT_INVALID
           : m->run.plan               ? MS_RESULT_OK
                                       : MS_RESULT_ORDER;
}

MEMSCALE_API ms_result ms_profile_save(const ms_model *model, ms_text_fn write, void *user) {
    const msi_printer out = {write, user};
    const ms_result result = msi_check_planned(model, write != NULL);
    if (result == MS_RESULT_OK) {
        const char *outer = msi_enter(model, "ms_profile_save");
        msi_print_profile(model, &out);
        msi_leave(model, outer);
    }
    return result;
}

MEMSCALE_API ms_result ms_profile_load(ms_model *model, const char *text, size_t length) {
    if (!model || (!text && length)) {
        return msi_fail_argument(model, "ms_profile_load", "an argument is NULL");
    }
    return msi_made(model) != MS_RESULT_OK ? msi_made(model)
                                           : msi_load_profile(model, text ? text : "", length);
}

MEMSCALE_API ms_result ms_smallest_budget(ms_model *model, uint64_t *bytes) {
    if (!model || !bytes) {
        return msi_fail_argument(model, "ms_smallest_budget", "an argument is NULL");
    }
    uint64_t least = 0;
    ms_result result = msi_check_between_steps(model, "ms_smallest_budget");
    MSI_THEN(result, msi_smallest_of_modes(model, &least));
    *bytes = result == MS_RESULT_OK ? least : *bytes;
    return result;
}

MEMSCALE_API ms_result ms_wrap(ms_model *model) {
    return msi_replan(model, "ms_wrap",
                      model && model->config.force_optimize ? MSI_GOAL_SMALLEST : MSI_GOAL_BUDGET);
}

MEMSCALE_API ms_result ms_detach(ms_model *model) {
    return msi_replan(model, "ms_detach", MSI_GOAL_PLAIN);
}

MEMSCALE_API ms_result ms_reshape(ms_model *model, const int64_t *sizes) {
    if (!model || !sizes) {
        return msi_fail_argument(model, "ms_reshape", "an argument is NULL");
    }
    ms_result result = msi_check_sizes(model, sizes);
    MSI_THEN(result, msi_check_between_steps(model, "ms_reshape"));
    MSI_THEN(result, msi_reshape(model, sizes));
    return result;
}

MEMSCALE_API bool ms_optimize_next(ms_model *model, int *stage) {
    const int now = stage ? (*stage)++ : 1;
    if (now == 0) {
        return ms_wrap(model) == MS_RESULT_OK;
    }
    if (ms_detach(model) != MS_RESULT_OK && model) {
        msi_log(model, MS_LOG_WARNING, "plan", "ms_detach failed: the model stays wrapped");
    }
    return false;
}

MEMSCALE_API ms_result ms_write(ms_model *model, ms_tensor tensor, const void *data) {
    const uint32_t t = msi_transfer_index(model, "ms_write", tensor, data);
    return t == MSI_NONE ? msi_invalid(model)
                         : msi_write_tensor(model, t, msi_role_of(&model->graph, tensor), data);
}

MEMSCALE_API ms_result ms_read(ms_model *model, ms_tensor tensor, void *data) {
    const uint32_t t = msi_transfer_index(model, "ms_read", tensor, data);
    return t == MSI_NONE ? msi_invalid(model)
                         : msi_read_tensor(model, t, msi_role_of(&model->graph, tensor), data);
}

MEMSCALE_API void *ms_data(ms_model *model, ms_tensor tensor) {
    const uint32_t t = model ? msi_index(&model->graph, tensor) : MSI_NONE;
    if (t == MSI_NONE || !model->run.plan || model->config.dry_run) {
        return NULL;
    }
    const msi_role role = msi_role_of(&model->graph, tensor);
    model->graph.tensors.items[t].in_place |= role == MSI_ROLE_VALUE;
    return msi_live_address(model, t, role);
}

MEMSCALE_API ms_tensor ms_gradient(const ms_model *model, ms_tensor tensor) {
    const uint32_t t = model ? msi_value_index(&model->graph, tensor) : MSI_NONE;
    const ms_tensor none = {0};
    return t != MSI_NONE && msi_has_gradient(&model->graph.tensors.items[t])
               ? msi_handle(&model->graph, t, MSI_ROLE_GRADIENT)
               : none;
}

MEMSCALE_API ms_tensor ms_optimizer_state(const ms_model *model, ms_tensor param, int index) {
    const uint32_t t = model ? msi_value_index(&model->graph, param) : MSI_NONE;
    const ms_tensor none = {0};
    const bool known = t != MSI_NONE && model->graph.tensors.items[t].kind == MSI_KIND_PARAM &&
                       index >= 0 && (uint32_t)index < msi_state_count(&model->optimizer);
    return known ? msi_handle(&model->graph, t, (msi_role)(MSI_ROLE_STATE0 + index)) : none;
}

MEMSCALE_API ms_shape ms_tensor_shape(const ms_model *model, ms_tensor tensor) {
    const uint32_t t = model ? msi_index(&model->graph, tensor) : MSI_NONE;
    const ms_shape wrong = {{0, 0, 0, 0, 0, 0}, -1, {0, 0, 0, 0, 0, 0}, 0};
    return t == MSI_NONE ? wrong : model->graph.tensors.items[t].view.shape;
}

MEMSCALE_API uint64_t ms_tensor_count(const ms_model *model, ms_tensor tensor) {
    const uint32_t t = model ? msi_index(&model->graph, tensor) : MSI_NONE;
    return t == MSI_NONE ? 0 : ms_shape_count(&model->graph.tensors.items[t].view.shape);
}

MEMSCALE_API uint64_t ms_tensor_bytes(const ms_model *model, ms_tensor tensor) {
    const uint32_t t = model ? msi_index(&model->graph, tensor) : MSI_NONE;
    return t == MSI_NONE ? 0 : model->graph.tensors.items[t].bytes;
}

MEMSCALE_API ms_result ms_forward(ms_model *model, double *loss) {
    ms_result result = model ? msi_begin_step(model, "ms_forward") : MS_RESULT_INVALID;
    MSI_THEN(result, msi_forward(model, &model->run.plan->train, loss));
    return result;
}

MEMSCALE_API ms_result ms_backward(ms_model *model) {
    return model ? msi_backward(model) : MS_RESULT_INVALID;
}

MEMSCALE_API ms_result ms_update(ms_model *model) {
    return model ? msi_update(model) : MS_RESULT_INVALID;
}

MEMSCALE_API ms_result ms_step(ms_model *model, double *loss) {
    ms_result result = model ? msi_begin_step(model, "ms_step") : MS_RESULT_INVALID;
    MSI_THEN(result, msi_step(model, loss));
    return result;
}

MEMSCALE_API ms_result ms_eval(ms_model *model, double *loss) {
    ms_result result = model ? msi_check_start(model, "ms_eval") : MS_RESULT_INVALID;
    MSI_THEN(result, msi_forward(model, &model->run.plan->eval, loss));
    return result;
}

MEMSCALE_API ms_result ms_verify(ms_model *model, ms_difference_fn visit, void *user,
                                 ms_verify_report *report) {
    if (!model || !report) {
        return msi_fail_argument(model, "ms_verify", "an argument is NULL");
    }
    memset(report, 0, sizeof *report);
    ms_result result = msi_check_verifiable(model, "ms_verify");
    MSI_THEN(result, msi_await_steps(model));
    MSI_THEN(result, msi_verify(model, visit, user, report));
    return result;
}

MEMSCALE_API ms_result ms_find_nonfinite(ms_model *model, ms_nonfinite *found) {
    if (!model || !found) {
        return msi_fail_argument(model, "ms_find_nonfinite", "an argument is NULL");
    }
    memset(found, 0, sizeof *found);
    ms_result result = msi_check_verifiable(model, "ms_find_nonfinite");
    MSI_THEN(result, msi_await_steps(model));
    MSI_THEN(result, msi_find_nonfinite(model, found));
    return result;
}

MEMSCALE_API ms_result ms_gradient_norm(ms_model *model, double *norm) {
    return model && norm ? msi_gradient_norm(model, norm)
                         : msi_fail_argument(model, "ms_gradient_norm", "an argument is NULL");
}

MEMSCALE_API ms_result ms_gemm(const ms_call *call, float alpha, ms_matrix a, ms_matrix b,
                               float beta, ms_matrix c) {
    return call && call->model ? msi_gemm(call->model, alpha, a, b, beta, c) : MS_RESULT_INVALID;
}

MEMSCALE_API ms_result ms_cast(const ms_call *call, const ms_view *to, const ms_view *from) {
    ms_model *m = call ? call->model : NULL;
    return m && to && from && to->data && from->data
               ? msi_cast(m, to, from)
               : msi_fail_argument(m, "ms_cast", "a view is NULL or has no data");
}

MEMSCALE_API ms_result ms_report(const ms_model *model, ms_memory_report *report) {
    const ms_result result = msi_check_planned(model, report != NULL);
    if (result == MS_RESULT_OK) {
        msi_fill_report(model, report);
    }
    return result;
}

MEMSCALE_API ms_result ms_visit_events(const ms_model *model, ms_program program, ms_event_fn visit,
                                       void *user) {
    const ms_result result =
        msi_check_planned(model, visit && (unsigned)program <= MS_PROGRAM_EVAL);
    if (result == MS_RESULT_OK) {
        const msi_plan *plan = model->run.plan;
        const char *outer = msi_enter(model, "ms_visit_events");
        msi_visit(model, program == MS_PROGRAM_TRAIN ? &plan->train : &plan->eval, visit, user);
        msi_leave(model, outer);
    }
    return result;
}

MEMSCALE_API const ms_rule *ms_rule_at(uint32_t number) {
    return number < MSI_RULE_COUNT ? &msi_rules[number].text : NULL;
}

MEMSCALE_API ms_result ms_visit_lifetimes(const ms_model *model, ms_program program,
                                          ms_lifetime_fn visit, void *user) {
    const ms_result result =
        msi_check_planned(model, visit && (unsigned)program <= MS_PROGRAM_EVAL);
    if (result == MS_RESULT_OK) {
        const msi_plan *plan = model->run.plan;
        const char *outer = msi_enter(model, "ms_visit_lifetimes");
        msi_visit_lifetimes(model, program == MS_PROGRAM_TRAIN ? &plan->train : &plan->eval, visit,
                            user);
        msi_leave(model, outer);
    }
    return result;
}

static void msi_visit_decisions(const msi_review *r, msi_alike *rows, ms_decision_fn visit,
                                void *user) {
    const uint32_t count = r->model->graph.layers.count;
    for (uint32_t i = 0; i < count; i++) {
        rows[i] = msi_alike_of(r, i);
    }
    msi_find_alike(rows, count);
    for (uint32_t i = 0; i < count; i++) {
        for (int k = 0; k < MS_TECHNIQUE_COUNT; k++) {
            ms_decision decision = msi_decision(r, i, (ms_technique)k);
            decision.alike_count = rows[i].count;
            if (rows[i].count > 0) {
                decision.alike_last = msi_layer_handle(&r->model->graph, rows[i].last);
            }
            visit(&decision, user);
        }
    }
}

MEMSCALE_API ms_result ms_visit_decisions(const ms_model *model, ms_decision_fn visit, void *user) {
    msi_review review;
    ms_result result = msi_check_planned(model, visit != NULL);
    MSI_THEN(result, msi_review_init(&review, model, model->run.plan) ? MS_RESULT_OK
                                                                      : MS_RESULT_OUT_OF_MEMORY);
    if (result != MS_RESULT_OK) {
        return result;
    }
    const uint64_t bytes = model->graph.layers.count * (uint64_t)sizeof(msi_alike);
    msi_alike *rows = (msi_alike *)msi_alloc_zeroed(&model->config.allocator, bytes);
    if (rows) {
        const char *outer = msi_enter(model, "ms_visit_decisions");
        msi_visit_decisions(&review, rows, visit, user);
        msi_leave(model, outer);
    }
    msi_release(&model->config.allocator, rows, bytes);
    msi_review_free(&review);
    return rows ? MS_RESULT_OK : MS_RESULT_OUT_OF_MEMORY;
}

MEMSCALE_API ms_tensor ms_tensor_of(const ms_model *model, ms_tensor tensor) {
    const uint32_t t = model ? msi_index(&model->graph, tensor) : MSI_NONE;
    const ms_tensor none = {0};
    return t == MSI_NONE ? none : msi_handle(&model->graph, t, MSI_ROLE_VALUE);
}

MEMSCALE_API const char *ms_tensor_name(const ms_model *model, ms_tensor tensor) {
    const uint32_t t = model ? msi_index(&model->graph, tensor) : MSI_NONE;
    return t == MSI_NONE ? "?" : msi_tensor_name(&model->graph, t);
}

MEMSCALE_API const char *ms_layer_name(const ms_model *model, ms_layer layer) {
    const uint32_t index = model ? msi_layer_index(&model->graph, layer) : MSI_NONE;
    return index == MSI_NONE ? "?" : msi_layer_name(&model->graph, index);
}

MEMSCALE_API uint32_t ms_layer_index(const ms_model *model, ms_layer layer) {
    return model ? msi_layer_index(&model->graph, layer) : UINT32_MAX;
}

MEMSCALE_API bool ms_technique_is_built(ms_technique technique) {
    return (unsigned)technique < MS_TECHNIQUE_COUNT && (MSI_BUILT >> technique & 1);
}

// ------------------------------------------------------------------------------------------------
// >>listing  a plan and a program as text for people, made by public functions only

#define MSI_X(constant, text) text,
static const char *const msi_event_names[] = {MEMSCALE_EVENTS(MSI_X)};
#undef MSI_X

/* Columns of a listing. Spaces are written only before a text, so that no line ends in spaces. */
typedef struct msi_columns {
    const msi_printer *out;
    int missing; // spaces to write before the next text
} msi_columns;

/* Begins a text of this length at the left of its column, or at the right for a negative width. The
   caller then writes that text. An empty one leaves its spaces for the next. */
static void msi_begin_column(msi_columns *c, int width, size_t length) {
    const int taken = length < 1000 ? (int)length : 1000, room = width < 0 ? -width : width;
    const int spaces = taken < room ? room - taken : 0;
    c->missing += width < 0 ? spaces : 0;
    if (length > 0) {
        msi_print(c->out, "%*s", c->missing, "");
        c->missing = 0;
    }
    c->missing += width < 0 ? 0 : spaces;
}

static void msi_print_column(msi_columns *c, int width, const char *text) {
    const size_t length = strlen(text);
    msi_begin_column(c, width, length);
    c->out->write(text, length, c->out->user);
}

/* The names of the first and the last of several things as one: see msi_print_names. */
static void msi_print_name_column(msi_columns *c, int width, const char *prefix, const char *first,
                                  const char *last) {
    msi_begin_column(c, width, strlen(prefix) + msi_print_names(NULL, first, last));
    c->out->write(prefix, strlen(prefix), c->out->user);
    (void)msi_print_names(c->out, first, last);
}

enum { MSI_MOST_RULES = 64 }; // more than there are

typedef struct msi_plan_listing {
    const ms_model *model;
    msi_columns columns;
    bool full; // a line for each layer
    msi_technique_total totals[MS_TECHNIQUE_COUNT];
    bool decided[MSI_MOST_RULES]; // by the number of the rule: whether it has decided something
} msi_plan_listing;

static void msi_add_to_listing(const ms_decision *d, void *user) {
    msi_plan_listing *to = (msi_plan_listing *)user;
    msi_add_decision(&to->totals[d->technique], d);
    for (uint32_t at = 0; at < MSI_MOST_RULES && ms_rule_at(at); at++) {
        to->decided[at] |= d->rule == ms_rule_at(at);
    }
}

static void msi_print_summary(const msi_printer *out, const ms_memory_report *r) {
    msi_print(out, "plain plan %s, budget %s, arena %s", msi_size(r->plain_bytes).text,
              msi_size(r->budget_bytes).text, msi_size(r->arena_bytes).text);
    msi_print(out, ", %s above the lower bound\n", msi_size(r->gap_bytes).text);
    msi_print(out, "mode %s (%s), pressure %.3f; predicted (%s): a step %s, a plain one %s\n",
              ms_mode_name(r->mode), ms_decision_source_name(r->decision_source), r->pressure,
              ms_time_source_name(r->time_source), msi_time(r->step_us).text,
              msi_time(r->plain_step_us).text);
    msi_print(out, "layers: %u, instructions: %u, recomputations: %u (%.1f %% of a step's work), ",
              (unsigned)r->layer_count, (unsigned)r->instruction_count,
              (unsigned)r->recompute_count, 100.0 * r->recompute_share);
    msi_print(out, "updates %s backward\n", r->early_update ? "inside" : "after");
    msi_print(out, "at the peak, instruction %u (", (unsigned)r->peak_instruction);
    msi_print_name(out, r->peak_layer, 0);
    msi_print(out, "):");
    for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
        if (r->peak_bytes[c]) {
            msi_print(out, "  %s %s", ms_category_name((ms_category)c),
                      msi_size(r->peak_bytes[c]).text);
        }
    }
    msi_print(out, "\n");
}

/* A line for each technique, with its rule if that is the same for all layers. */
static void msi_print_techniques(const msi_printer *out, const msi_technique_total *totals,
                                 const ms_memory_report *r) {
    msi_print(out, "\n%-16s %7s %14s %10s  %s\n", "technique", "layers", "off the peak", "added",
              "rule");
    for (int k = 0; k < MS_TECHNIQUE_COUNT; k++) {
        const msi_technique_total *t = &totals[k];
        const bool said = strcmp(t->rule->id, "not-built") == 0;
        msi_print(out, "%-16s %7u %14s %10s  %s%s\n", ms_technique_name((ms_technique)k),
                  (unsigned)t->layers, t->layers ? msi_signed_size(r->freed_bytes[k]).text : "-",
                  t->added_us > 0.0 ? msi_time(t->added_us).text : "-",
                  t->differs ? "by layer" : t->rule->id,
                  ms_technique_is_built((ms_technique)k) || said ? ""
                                                                 : ", not built in this version");
    }
    msi_print(out, "%-16s %7s %14s %10s  gaps, and what is reserved for larger sizes\n", "layout",
              "", msi_signed_size(r->layout_freed_bytes).text, "");
    msi_print(out, "%-16s %7s %14s %10s  plain plan - arena\n", "sum", "",
              msi_signed_size((int64_t)(r->plain_bytes - r->arena_bytes)).text, "");
}

/* Values that are alike: of one size, category and role, their names equal except for numbers. */
typedef struct msi_values {
    uint64_t key; // of what they have in common
    uint64_t bytes;
    uint32_t count;
    ms_lifetime first, last; // the one that was visited first; the one that was visited last
} msi_values;

enum { MSI_MOST_VALUES = 128, MSI_LISTED_VALUES = 8 };

typedef struct msi_peak_listing {
    const ms_model *model;
    bool resident;  // of values that live between steps, or of the others
    uint64_t bytes; // of all these
    uint32_t count;
    struct {
        uint64_t key, bytes;
    } found[MSI_MOST_VALUES];
    uint32_t listed_count;
    msi_values listed[MSI_LISTED_VALUES]; // the largest first
} msi_peak_listing;

/* What is printed before the name of a tensor: nothing for its value, "d." for its gradient, and
   other prefixes for its optimizer state. */
static const char *msi_handle_prefix(const ms_model *model, ms_tensor handle) {
    static const char *const states[MS_LIMIT_OPTIMIZER_STATE] = {"m.", "v.", "s2.", "s3."};
    const ms_tensor t = ms_tensor_of(model, handle);
    for (int k = 0; k < MS_LIMIT_OPTIMIZER_STATE; k++) {
        if (t.id && ms_optimizer_state(model, t, k).id == handle.id) {
            return states[k];
        }
    }
    return handle.id == t.id ? "" : "d.";
}

static const char *msi_value_name(const ms_lifetime *l) {
    return l->tensor.id || *l->name ? l->name : "of the library";
}

static uint64_t msi_value_key(const ms_model *model, const ms_lifetime *l) {
    const uint64_t key = (l->bytes << 4 | (uint64_t)l->category) * UINT64_C(0x9e3779b97f4a7c15);
    return msi_mix_name(msi_mix_name(key, msi_handle_prefix(model, l->tensor)), l->name);
}

/* Adds up what is alike. Where there are more kinds than places, the smallest makes room. */
static void msi_find_values(const ms_lifetime *l, void *user) {
    msi_peak_listing *to = (msi_peak_listing *)user;
    if (!l->is_at_peak || l->is_resident != to->resident) {
        return;
    }
    const uint64_t key = msi_value_key(to->model, l);
    uint32_t at = 0, least = 0;
    for (; at < to->count && to->found[at].key != key; at++) {
        least = to->found[at].bytes < to->found[least].bytes ? at : least;
    }
    to->bytes += l->bytes;
    if (at < to->count) {
        to->found[at].bytes += l->bytes;
        return;
    }
    at = to->count < MSI_MOST_VALUES ? to->count++ : least;
    if (at + 1 == to->count || to->found[at].bytes < l->bytes) {
        to->found[at].key = key;
        to->found[at].bytes = l->bytes;
    }
}

/* Lists the largest kinds, of equal ones the first; their sums are made anew. */
static void msi_choose_values(msi_peak_listing *to) {
    for (; to->listed_count < MSI_LISTED_VALUES && to->listed_count < to->count;
         to->listed_count++) {
        uint32_t most = 0;
        for (uint32_t at = 1; at < to->count; at++) {
            most = to->found[at].bytes > to->found[most].bytes ? at : most;
        }
        if (to->found[most].bytes == 0) {
            return;
        }
        memset(&to->listed[to->listed_count], 0, sizeof to->listed[0]);
        to->listed[to->listed_count].key = to->found[most].key;
        to->found[most].bytes = 0;
    }
}

static void msi_sum_values(const ms_lifetime *l, void *user) {
    msi_peak_listing *to = (msi_peak_listing *)user;
    const bool counts = l->is_at_peak && l->is_resident == to->resident;
    const uint64_t key = counts ? msi_value_key(to->model, l) : 0;
    for (uint32_t k = 0; k < to->listed_count && counts; k++) {
        msi_values *v = &to->listed[k];
        if (v->key == key) {
            v->first = v->count == 0 ? *l : v->first;
            v->last = *l;
            v->bytes += l->bytes;
            v->count++;
        }
    }
}

static void msi_print_moment(msi_columns *c, const ms_model *model, uint32_t instruction,
                             ms_layer layer) {
    char number[16];
    msi_format(number, sizeof number, "%u", (unsigned)instruction);
    msi_print_column(c, -8, number);
    c->missing++;
    msi_print_column(c, 15, layer.id ? ms_layer_name(model, layer) : "");
}

/* The line of a value, or of several that are alike. */
static void msi_print_value(msi_columns *c, const ms_model *model, const msi_values *v) {
    const ms_lifetime *l = &v->first;
    char count[16];
    msi_format(count, sizeof count, "%u", (unsigned)v->count);
    msi_print_column(c, -12, msi_size(v->bytes).text);
    msi_print_column(c, -7, v->count > 1 ? count : "");
    c->missing += 2;
    msi_print_column(c, 22, ms_category_name(l->category));
    msi_print_name_column(c, 24, msi_handle_prefix(model, l->tensor), msi_value_name(l),
                          msi_value_name(&v->last));
    if (l->is_resident) {
        c->missing++;
        msi_print_column(c, 0, l->is_outside ? "always, outside the arena" : "always");
    } else {
        msi_print_moment(c, model, l->first, l->first_layer);
        msi_print_moment(c, model, l->last, l->last_layer);
    }
    c->missing = 0;
    msi_print(c->out, "\n");
}

static void msi_print_values_head(msi_columns *c, const char *title) {
    msi_print(c->out, "\n%s\n       bytes  count  what                  name", title);
    c->missing = 22;
    msi_print_column(c, 22, "alive from");
    msi_print_column(c, 0, "through");
    msi_print(c->out, "\n");
    c->missing = 0;
}

/* The largest values at the peak of a program: of those that live between steps, or of others. */
static ms_result msi_print_largest_of(msi_columns *c, const ms_model *model, ms_program program,
                                      bool resident) {
    msi_peak_listing to;
    char title[128];
    memset(&to, 0, sizeof to);
    to.model = model;
    to.resident = resident;
    ms_result result = ms_visit_lifetimes(model, program, msi_find_values, &to);
    if (to.count == 0) {
        return result;
    }
    msi_choose_values(&to);
    MSI_THEN(result, ms_visit_lifetimes(model, program, msi_sum_values, &to));
    msi_format(title, sizeof title, "the largest of what %s at the peak, in all %s%s",
               resident ? "lives between steps" : "comes and goes", msi_size(to.bytes).text,
               resident ? "" : "; a line has the times of its first");
    msi_print_values_head(c, title);
    for (uint32_t k = 0; k < to.listed_count && result == MS_RESULT_OK; k++) {
        msi_print_value(c, model, &to.listed[k]);
    }
    return result;
}

static void msi_add_peak(const ms_lifetime *l, void *user) {
    *(uint64_t *)user += l->is_at_peak ? l->bytes : 0;
}

/* The largest values at the peak: that of training, unless eval needs more. */
static ms_result msi_print_largest(msi_columns *c, const ms_model *model,
                                   const ms_memory_report *r) {
    uint64_t bytes = 0;
    ms_result result = ms_visit_lifetimes(model, MS_PROGRAM_TRAIN, msi_add_peak, &bytes);
    const ms_program program = bytes == r->lower_bound_bytes ? MS_PROGRAM_TRAIN : MS_PROGRAM_EVAL;
    MSI_THEN(result, msi_print_largest_of(c, model, program, false));
    MSI_THEN(result, msi_print_largest_of(c, model, program, true));
    return result;
}

static void msi_print_lifetime(const ms_lifetime *l, void *user) {
    msi_plan_listing *to = (msi_plan_listing *)user;
    msi_values v;
    memset(&v, 0, sizeof v);
    v.first = v.last = *l;
    v.count = 1;
    v.bytes = l->bytes;
    msi_print_value(&to->columns, to->model, &v);
}

/* Whether the lines of the layers have columns for a technique. */
static bool msi_is_by_layer(const msi_technique_total *total) {
    return total->layers > 0 || total->differs;
}

/* Whether these columns have one for times. */
static bool msi_has_times(const msi_technique_total *total) {
    return total->added_us > 0.0 || total->refused_us > 0.0;
}

static void msi_print_layer_head(msi_plan_listing *to) {
    msi_columns *c = &to->columns;
    msi_print(c->out,
              "\nkept: what the layer holds for backward. +: applied, -: not; then the rule, "
              "the bytes that are not\nheld from forward to backward (gradients: after "
              "backward), and the time added to a step; after a -,\n");
    msi_print(c->out,
              "those that would not be held, and that would be added. These bytes are not all "
              "alive at the peak: what\nthe arena saves is in the table of techniques.\n");
    if (!to->full) {
        msi_print(c->out,
                  "count: the number of layers that a line stands for, in blocks of layers that "
                  "are alike; the number of\nthe layer and its times are those of the first "
                  "block.\n");
    }
    msi_print(c->out, "\nlayer");
    c->missing = 2;
    msi_print_column(c, 24, "name");
    msi_print_column(c, -6, to->full ? "" : "count");
    msi_print_column(c, -12, "kept");
    for (int k = 0; k < MS_TECHNIQUE_COUNT; k++) {
        if (msi_is_by_layer(&to->totals[k])) {
            c->missing += 2;
            msi_print_column(c, 17, ms_technique_name((ms_technique)k));
            c->missing += msi_has_times(&to->totals[k]) ? 21 : 12;
        }
    }
    c->missing = 0;
    msi_print(c->out, "\n");
}

/* The line of a layer, and of those that are like it, made by one call for each technique. */
static void msi_print_decision(const ms_decision *d, void *user) {
    msi_plan_listing *to = (msi_plan_listing *)user;
    const msi_technique_total *total = &to->totals[d->technique];
    const uint64_t bytes = d->is_applied ? d->saved_bytes : d->refused_bytes;
    const double us = d->is_applied ? d->added_us : d->refused_us;
    msi_columns *c = &to->columns;
    if (d->alike_count == 0 && !to->full) {
        return;
    }
    if (d->technique == 0) {
        char count[16];
        msi_format(count, sizeof count, "%u", (unsigned)d->alike_count);
        msi_print(c->out, "%5u", (unsigned)d->layer_index);
        c->missing = 2;
        msi_print_name_column(c, 24, "", ms_layer_name(to->model, d->layer),
                              ms_layer_name(to->model, to->full ? d->layer : d->alike_last));
        msi_print_column(c, -6, !to->full && d->alike_count > 1 ? count : "");
        msi_print_column(c, -12, d->kept_bytes ? msi_size(d->kept_bytes).text : "-");
    }
    if (msi_is_by_layer(total)) {
        msi_print_column(c, -3, d->is_applied ? "+" : "-");
        c->missing++;
        msi_print_column(c, 15, d->rule->id);
        msi_print_column(c, -12, bytes ? msi_size(bytes).text : "");
        if (msi_has_times(total)) {
            msi_print_column(c, -9, us > 0.0 ? msi_time(us).text : "");
        }
    }
    if (d->technique + 1 == MS_TECHNIQUE_COUNT) {
        c->missing = 0;
        msi_print(c->out, "\n");
    }
}

static void msi_print_rules(const msi_plan_listing *to) {
    msi_print(to->columns.out, "\nrules (+: applied, -: not)\n");
    for (uint32_t at = 0; at < MSI_MOST_RULES; at++) {
        if (to->decided[at]) {
            const ms_rule *rule = ms_rule_at(at);
            msi_print(to->columns.out, "%-15s  %s: ", rule->id, rule->condition);
            msi_print(to->columns.out, "%s\n", rule->reason);
        }
    }
}

static ms_result msi_list_plan(const ms_model *model, ms_text_fn write, void *user, bool full) {
    ms_memory_report report;
    msi_plan_listing to;
    ms_result result = write ? ms_report(model, &report) : MS_RESULT_INVALID;
    const msi_printer out = {write, user};
    memset(&to, 0, sizeof to);
    to.model = model;
    to.columns.out = &out;
    to.full = full;
    MSI_THEN(result, ms_visit_decisions(model, msi_add_to_listing, &to));
    if (result != MS_RESULT_OK) {
        return result;
    }
    msi_print_summary(&out, &report);
    msi_print_techniques(&out, to.totals, &report);
    result = msi_print_largest(&to.columns, model, &report);
    if (result == MS_RESULT_OK) {
        msi_print_layer_head(&to);
        result = ms_visit_decisions(model, msi_print_decision, &to);
    }
    if (result == MS_RESULT_OK) {
        msi_print_rules(&to);
    }
    if (result == MS_RESULT_OK && full) {
        msi_print_values_head(&to.columns, "every value of a training step");
        result = ms_visit_lifetimes(model, MS_PROGRAM_TRAIN, msi_print_lifetime, &to);
    }
    return result;
}

MEMSCALE_API ms_result ms_print_plan(const ms_model *model, ms_text_fn write, void *user) {
    return msi_list_plan(model, write, user, false);
}

MEMSCALE_API ms_result ms_print_plan_full(const ms_model *model, ms_text_fn write, void *user) {
    return msi_list_plan(model, write, user, true);
}

typedef struct msi_program_listing {
    const ms_model *model;
    msi_printer out;
} msi_program_listing;

static void msi_print_operand(const msi_program_listing *to, const ms_event_operand *operand) {
    const ms_tensor t = operand->tensor;
    msi_print(&to->out, " %s", t.id ? msi_handle_prefix(to->model, t) : "");
    msi_print_name(&to->out, t.id ? ms_tensor_name(to->model, t) : "workspace", 0);
    if (operand->is_outside) {
        msi_print(&to->out, "%s@outside", operand->accumulate ? "+" : "");
    } else {
        msi_print(&to->out, "%s@0x%llx", operand->accumulate ? "+" : "",
                  (unsigned long long)operand->offset);
    }
}

/* Only instructions get a line. */
static void msi_print_event(const ms_event *event, void *user) {
    const msi_program_listing *to = (const msi_program_listing *)user;
    if (event->kind >= MS_EVENT_DROP) {
        return;
    }
    msi_print(&to->out, "%5u  %-9s  ", (unsigned)event->index, msi_event_names[event->kind]);
    msi_print_name(&to->out, event->name, 12);
    for (int written = 0; written < 2; written++) {
        msi_print(&to->out, written ? " ->" : " ");
        for (uint32_t k = 0; k < event->operand_count; k++) {
            if (event->operands[k].is_written == (written == 1)) {
                msi_print_operand(to, &event->operands[k]);
            }
        }
    }
    msi_print(&to->out, "  | %llu\n", (unsigned long long)event->live_bytes);
}

MEMSCALE_API ms_result ms_print_program(const ms_model *model, ms_program program, ms_text_fn write,
                                        void *user) {
    msi_program_listing to = {model, {write, user}};
    return write ? ms_visit_events(model, program, msi_print_event, &to) : MS_RESULT_INVALID;
}

// ------------------------------------------------------------------------------------------------
// >>trace  a step for Perfetto and a plan for Prometheus, made by public functions only

/* The processes of a trace. */
enum { MSI_TRACE_SIMULATED = 1, MSI_TRACE_MEASURED = 2 };

/* Indexed by ms_stream_kind. */
static const char *const msi_stream_names[] = {"compute", "copies to the device",
                                               "copies to the host"};

typedef struct msi_trace {
    msi_printer out;
    int last_process;                    // MSI_TRACE_MEASURED if a step has been timed
    uint64_t counted[MS_CATEGORY_COUNT]; // live bytes of the last counter
} msi_trace;

/* An event as a slice of the track of its stream. */
static void msi_trace_slice(const msi_printer *out, int process, const ms_event *event) {
    const bool measured = process == MSI_TRACE_MEASURED;
    const char *what = event->is_restore ? "restore" : msi_event_names[event->kind];
    const char *name = event->kind == MS_EVENT_LOSS      ? "sum of the losses"
                       : event->kind == MS_EVENT_VERDICT ? "verdict"
                       : event->name[0]                  ? event->name
                                                         : what;
    msi_print(out, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"cat\":\"%s\",\"ts\":", process,
              (int)event->stream, what);
    msi_print_number(out, measured ? event->measured_start_us : event->start_us, 3);
    msi_print(out, ",\"dur\":");
    msi_print_number(out, measured ? event->measured_us : event->duration_us, 3);
    msi_print(out, ",\"name\":");
    msi_print_quoted(out, name, true);
    msi_print(out, ",\"args\":{\"op\":\"%s\"", what);
    if (event->kind < MS_EVENT_DROP) {
        msi_print(out, ",\"instruction\":%u,\"live_bytes\":%llu}}", (unsigned)event->index,
                  (unsigned long long)event->live_bytes);
    } else {
        msi_print(out, ",\"bytes\":%llu}}", (unsigned long long)event->operands[0].bytes);
    }
}

static void msi_trace_counters(const msi_printer *out, int process, const ms_event *event) {
    msi_print(out, ",\n{\"ph\":\"C\",\"pid\":%d,\"name\":\"live bytes\",\"ts\":", process);
    msi_print_number(out,
                     process == MSI_TRACE_MEASURED ? event->measured_start_us : event->start_us, 3);
    for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
        msi_print(out, "%s\"%s\":%llu", c == 0 ? ",\"args\":{" : ",",
                  ms_category_name((ms_category)c), (unsigned long long)event->live_bytes_of[c]);
    }
    msi_print(out, "}}");
}

/* Names of a process and of its tracks. */
static void msi_trace_process(const msi_printer *out, int process) {
    static const char *const names[] = {"", "simulated", "measured"};
    msi_print(out,
              "%s{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"%s\"}}",
              process == MSI_TRACE_SIMULATED ? "" : ",\n", process, names[process]);
    for (int stream = 0; stream < MS_STREAM_COUNT; stream++) {
        msi_print(out,
                  ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":"
                  "{\"name\":\"%s\"}}",
                  process, stream, msi_stream_names[stream]);
    }
}

/* An event as simulated and, if it is an instruction, as measured. A counter follows where the live
   bytes have changed. */
static void msi_trace_event(const ms_event *event, void *user) {
    msi_trace *to = (msi_trace *)user;
    const bool runs = event->kind < MS_EVENT_DROP;
    const bool counts = runs && memcmp(to->counted, event->live_bytes_of, sizeof to->counted) != 0;
    const int last = event->kind == MS_EVENT_DROP ? 0
                     : runs                       ? to->last_process
                                                  : MSI_TRACE_SIMULATED;
    for (int process = MSI_TRACE_SIMULATED; process <= last; process++) {
        msi_trace_slice(&to->out, process, event);
        if (counts) {
            msi_trace_counters(&to->out, process, event);
        }
    }
    if (counts) {
        memcpy(to->counted, event->live_bytes_of, sizeof to->counted);
    }
}

MEMSCALE_API ms_result ms_print_trace(const ms_model *model, ms_text_fn write, void *user) {
    ms_memory_report report;
    msi_trace to;
    ms_result result = write ? ms_report(model, &report) : MS_RESULT_INVALID;
    if (result != MS_RESULT_OK) {
        return result;
    }
    const msi_printer out = {write, user};
    memset(&to, 0, sizeof to);
    to.out = out;
    to.last_process = report.measured_step_us > 0.0 ? MSI_TRACE_MEASURED : MSI_TRACE_SIMULATED;
    msi_print(&out, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    for (int process = MSI_TRACE_SIMULATED; process <= to.last_process; process++) {
        msi_trace_process(&out, process);
    }
    result = ms_visit_events(model, MS_PROGRAM_TRAIN, msi_trace_event, &to);
    msi_print(&out, "\n]}\n");
    return result;
}

/* How a field of the report becomes a metric. */
typedef enum msi_metric_kind {
    MSI_METRIC_U64,
    MSI_METRIC_U32,
    MSI_METRIC_RATIO,
    MSI_METRIC_US,         // exposed in seconds
    MSI_METRIC_MEASURED,   // likewise, and left out where the field is 0
    MSI_METRIC_CATEGORIES, // a u64 for each category
    MSI_METRIC_TECHNIQUES, // an i64 for each technique
    MSI_METRIC_COUNTER     // a u64
} msi_metric_kind;

typedef struct msi_metric {
    const char *name, *help;
    size_t offset; // in ms_memory_report
    msi_metric_kind kind;
} msi_metric;

#define MSI_METRIC(kind, name, field, help)                                                        \
    { #name, help, offsetof(ms_memory_report, field), MSI_METRIC_##kind }

static const msi_metric msi_metrics[] = {
    MSI_METRIC(U64, budget_bytes, budget_bytes, "The arena is never larger than this."),
    MSI_METRIC(U64, arena_bytes, arena_bytes, "Memory of the model on the device."),
    MSI_METRIC(U64, plain_arena_bytes, plain_bytes, "Arena of the plain plan."),
    MSI_METRIC(U64, lower_bound_bytes, lower_bound_bytes,
               "Largest sum of live bytes: no layout is smaller."),
    MSI_METRIC(U64, gap_bytes, gap_bytes, "Arena less lower bound."),
    MSI_METRIC(CATEGORIES, peak_bytes, peak_bytes, "Live bytes at the peak of a step."),
    MSI_METRIC(TECHNIQUES, freed_bytes, freed_bytes,
               "What each technique takes off the peak of the plain plan."),
    MSI_METRIC(U64, activation_peak_bytes, activation_peak_bytes,
               "Largest sum of activations, their gradients and saved tensors."),
    MSI_METRIC(U64, borrowed_bytes, borrowed_bytes,
               "Memory that the trainer lends, outside the arena."),
    MSI_METRIC(U64, host_bytes, host_bytes, "Tensors that stay on the host."),
    MSI_METRIC(U64, staging_bytes, staging_bytes,
               "Host memory through which inputs and verdicts pass."),
    MSI_METRIC(US, step_predicted_seconds, step_us, "Time of a step, as simulated."),
    MSI_METRIC(US, step_predicted_plain_seconds, plain_step_us,
               "Time of a step of the plain plan, as simulated."),
    MSI_METRIC(US, step_stall_seconds, stall_us,
               "Of a step, how long computing waits for copies, as simulated."),
    MSI_METRIC(RATIO, recompute_ratio, recompute_share,
               "Time of recomputations over that of a plain step, as simulated."),
    MSI_METRIC(RATIO, pressure_ratio, pressure, "Plain arena over budget."),
    MSI_METRIC(U64, parameters, param_count, "Elements of all params."),
    MSI_METRIC(U32, layers, layer_count, "Layers of the graph."),
    MSI_METRIC(U32, tensors, tensor_count, "Tensors of the graph."),
    MSI_METRIC(U32, instructions, instruction_count, "Instructions of a step."),
    MSI_METRIC(U32, recomputations, recompute_count, "Of these, recomputations."),
    MSI_METRIC(MEASURED, step_measured_seconds, measured_step_us,
               "The last step that was timed, instruction by instruction."),
    MSI_METRIC(COUNTER, steps_total, step_count, "Updates that are done."),
};

static void msi_print_metric_head(const msi_printer *out, const char *name, const char *type,
                                  const char *help) {
    msi_print(out, "# HELP memscale_%s %s\n", name, help);
    msi_print(out, "# TYPE memscale_%s %s\n", name, type);
}

/* The number in a field of the report, or in element k of one that is an array. */
static void msi_print_field(const msi_printer *out, msi_metric_kind kind, const void *field,
                            int k) {
    switch (kind) {
    case MSI_METRIC_RATIO:
    case MSI_METRIC_US:
    case MSI_METRIC_MEASURED:
        msi_print_number(out, *(const double *)field * (kind == MSI_METRIC_RATIO ? 1.0 : 1e-6), 9);
        break;
    case MSI_METRIC_U32:
        msi_print(out, "%u", (unsigned)*(const uint32_t *)field);
        break;
    case MSI_METRIC_TECHNIQUES:
        msi_print(out, "%lld", (long long)((const int64_t *)field)[k]);
        break;
    case MSI_METRIC_U64:
    case MSI_METRIC_CATEGORIES:
    case MSI_METRIC_COUNTER:
        msi_print(out, "%llu", (unsigned long long)((const uint64_t *)field)[k]);
        break;
    }
}

static void msi_print_metric(const msi_printer *out, const msi_metric *metric,
                             const ms_memory_report *report) {
    const void *field = (const uint8_t *)report + metric->offset;
    const bool by_category = metric->kind == MSI_METRIC_CATEGORIES;
    const bool by_technique = metric->kind == MSI_METRIC_TECHNIQUES;
    const int count = by_category ? MS_CATEGORY_COUNT : by_technique ? MS_TECHNIQUE_COUNT : 1;
    if (metric->kind == MSI_METRIC_MEASURED && !(*(const double *)field > 0.0)) {
        return;
    }
    msi_print_metric_head(out, metric->name,
                          metric->kind == MSI_METRIC_COUNTER ? "counter" : "gauge", metric->help);
    for (int k = 0; k < count; k++) {
        msi_print(out, "memscale_%s", metric->name);
        if (count > 1) {
            msi_print(out, by_category ? "{category=" : "{technique=");
            msi_print_quoted(out,
                             by_category ? ms_category_name((ms_category)k)
                                         : ms_technique_name((ms_technique)k),
                             false);
            msi_print(out, "}");
        }
        msi_print(out, " ");
        msi_print_field(out, metric->kind, field, k);
        msi_print(out, "\n");
    }
}

/* Texts of the report, as labels of a metric that is always 1. */
static void msi_print_info(const msi_printer *out, const ms_memory_report *r) {
    char version[32], hash[20];
    const char *const labels[][2] = {
        {"version", version},
        {"backend", r->backend_name},
        {"device", r->device_name},
        {"mode", ms_mode_name(r->mode)},
        {"decision_source", ms_decision_source_name(r->decision_source)},
        {"time_source", ms_time_source_name(r->time_source)},
        {"plan_hash", hash}};
    msi_format(version, sizeof version, "%d.%d.%d", MEMSCALE_VERSION_MAJOR, MEMSCALE_VERSION_MINOR,
               MEMSCALE_VERSION_PATCH);
    msi_format(hash, sizeof hash, "%016llx", (unsigned long long)r->plan_hash);
    msi_print_metric_head(out, "info", "gauge",
                          "Version, backend, device, mode and plan, as labels.");
    for (size_t k = 0; k < sizeof labels / sizeof labels[0]; k++) {
        msi_print(out, "%s%s=", k == 0 ? "memscale_info{" : ",", labels[k][0]);
        msi_print_quoted(out, labels[k][1], false);
    }
    msi_print(out, "} 1\n");
}

MEMSCALE_API ms_result ms_print_metrics(const ms_model *model, ms_text_fn write, void *user) {
    ms_memory_report report;
    const ms_result result = write ? ms_report(model, &report) : MS_RESULT_INVALID;
    if (result != MS_RESULT_OK) {
        return result;
    }
    const msi_printer out = {write, user};
    msi_print_info(&out, &report);
    for (size_t k = 0; k < sizeof msi_metrics / sizeof msi_metrics[0]; k++) {
        msi_print_metric(&out, &msi_metrics[k], &report);
    }
    return MS_RESULT_OK;
}

#endif // MEMSCALE_IMPLEMENTATION

// ================================================================================================
// the CUDA backend

#if defined(MEMSCALE_CUDA_IMPLEMENTATION) && !defined(MEMSCALE_CUDA_IMPLEMENTATION_DONE)
#define MEMSCALE_CUDA_IMPLEMENTATION_DONE

#include <cublas_v2.h>

#if CUDART_VERSION < 12000
#error "the CUDA backend of memscale.h needs CUDA 12 or newer"
#endif

// ------------------------------------------------------------------------------------------------
// >>cuda state  one per model: streams, events and a cuBLAS handle; errors and launches

enum {
    MSI_CUDA_THREADS = 256,
    MSI_CUDA_PARTIALS = 1024, // the most partial sums that one sum has
    MSI_CUDA_PARTIALS_BYTES = MSI_CUDA_PARTIALS * 8,
    MSI_CUDA_BLAS_ERROR = 10000 // error numbers of cuBLAS: its status, plus this
};

typedef struct msi_cuda {
    const ms_allocator *host;
    cudaStream_t streams[MS_STREAM_COUNT];
    cublasHandle_t blas;
    cudaEvent_t *events;
    double *partials; // MSI_CUDA_PARTIALS of them
    uint32_t event_count;
    int device;
    bool owns_compute, tf32;
} msi_cuda;

/* The error as a number for the caller, who reports it. It is cleared in the runtime, where the
   next launch of the host program would find it. */
static int msi_cuda_error(cudaError_t error) {
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return (int)error;
}

static int msi_cuda_blas_error(cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) {
        return 0;
    }
    (void)cudaGetLastError();
    return MSI_CUDA_BLAS_ERROR + (int)status;
}

static const char *msi_cuda_error_text(void *user, int error) {
    (void)user;
    return error >= MSI_CUDA_BLAS_ERROR
               ? cublasGetStatusString((cublasStatus_t)(error - MSI_CUDA_BLAS_ERROR))
               : cudaGetErrorString((cudaError_t)error);
}

namespace {

/* Makes a device the current one of this thread until the end of a scope. */
struct msi_cuda_scope {
    int device, before, error;

    explicit msi_cuda_scope(int wanted) : device(wanted), before(wanted), error(0) {
        error = msi_cuda_error(cudaGetDevice(&before));
        if (error == 0 && before != device) {
            error = msi_cuda_error(cudaSetDevice(device));
        }
    }

    ~msi_cuda_scope() {
        if (error == 0 && before != device) {
            (void)msi_cuda_error(cudaSetDevice(before));
        }
    }

  private:
    msi_cuda_scope(const msi_cuda_scope &);
    msi_cuda_scope &operator=(const msi_cuda_scope &);
};

/* Calls the runtime while a device is the current one, and returns the error. */
template <typename Call> static int msi_cuda_on(int device, Call call) {
    const msi_cuda_scope scope(device);
    return scope.error ? scope.error : msi_cuda_error(call());
}

/* The same for a state, which the call receives, on its device. */
template <typename Call> static int msi_cuda_with(const void *state, Call call) {
    const msi_cuda *c = (const msi_cuda *)state;
    return msi_cuda_on(c->device, [&] { return call(c); });
}

} // namespace

static int msi_cuda_device(void *user) {
    return (int)(intptr_t)user;
}

/* Every kernel is launched here. */
template <unsigned threads = MSI_CUDA_THREADS, typename... Parameters, typename... Arguments>
static int msi_cuda_launch(const void *state, uint64_t blocks, void (*kernel)(Parameters...),
                           Arguments... arguments) {
    return msi_cuda_with(state, [&](const msi_cuda *c) {
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3((unsigned)blocks);
        config.blockDim = dim3(threads);
        config.stream = c->streams[MS_STREAM_COMPUTE];
        return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
    });
}

static uint64_t msi_cuda_blocks(uint64_t threads) {
    return (threads + MSI_CUDA_THREADS - 1) / MSI_CUDA_THREADS;
}

// ------------------------------------------------------------------------------------------------
// >>cuda kernels  a thread takes a group of elements by 16-byte accesses, or one element at the
//                 end of an array and where an array is not aligned to 16 bytes

/* How an array is split over threads: the first `groups` of them take a group each, the others one
   element each. */
typedef struct msi_cuda_split {
    uint64_t count, groups, threads;
} msi_cuda_split;

/* bits: the addresses of all arrays, combined by or. */
static msi_cuda_split msi_cuda_split_of(uint64_t count, uint64_t group, uintptr_t bits) {
    msi_cuda_split r;
    r.count = count;
    r.groups = bits % 16 == 0 ? count / group : 0;
    r.threads = r.groups + (count - r.groups * group);
    return r;
}

static __device__ __forceinline__ uint64_t msi_cuda_index() {
    return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __global__ void msi_k_fill_f32(float *x, float value, msi_cuda_split r) {
    const uint64_t i = msi_cuda_index();
    if (i < r.groups) {
        ((float4 *)x)[i] = make_float4(value, value, value, value);
    } else if (i < r.threads) {
        x[i + 3 * r.groups] = value;
    }
}

/* An upload travels as an argument of the kernel. All arguments together take 4 KB at most. */
enum { MSI_CUDA_WORDS = 896 };

typedef struct msi_cuda_words {
    uint32_t word[MSI_CUDA_WORDS];
} msi_cuda_words;

static __global__ void __launch_bounds__(MSI_CUDA_THREADS)
    msi_k_upload(uint32_t *x, msi_cuda_words words, uint32_t count) {
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
        x[i] = words.word[i];
    }
}

static __global__ void msi_k_add_f32(float *x, const float *y, msi_cuda_split r) {
    const uint64_t i = msi_cuda_index();
    if (i < r.groups) {
        const float4 a = ((const float4 *)x)[i], b = ((const float4 *)y)[i];
        ((float4 *)x)[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    } else if (i < r.threads) {
        x[i + 3 * r.groups] += y[i + 3 * r.groups];
    }
}

/* Eight elements of F32, F16 or BF16 at element 8 * i. */
static __device__ __forceinline__ void msi_cuda_load8(float *x, const void *data, ms_dtype dtype,
                                                      uint64_t i) {
    if (dtype == MS_DTYPE_F32) {
        const float4 a = ((const float4 *)data)[2 * i], b = ((const float4 *)data)[2 * i + 1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        return;
    }
    const uint4 packed = ((const uint4 *)data)[i];
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    for (int k = 0; k < 8; k++) {
        const uint16_t bits16 = (uint16_t)(words[k / 2] >> (k % 2 * 16));
        x[k] = dtype == MS_DTYPE_F16 ? msi_f32_of_f16(bits16) : msi_f32_of_bf16(bits16);
    }
}

static __device__ __forceinline__ void msi_cuda_store8(void *data, ms_dtype dtype, uint64_t i,
                                                       const float *x) {
    if (dtype == MS_DTYPE_F32) {
        ((float4 *)data)[2 * i] = make_float4(x[0], x[1], x[2], x[3]);
        ((float4 *)data)[2 * i + 1] = make_float4(x[4], x[5], x[6], x[7]);
        return;
    }
    uint32_t words[4] = {0, 0, 0, 0};
    for (int k = 0; k < 8; k++) {
        const uint16_t bits16 =
            dtype == MS_DTYPE_F16 ? msi_f16_of_f32(x[k]) : msi_bf16_of_f32(x[k]);
        words[k / 2] |= (uint32_t)bits16 << (k % 2 * 16);
    }
    uint4 packed;
    packed.x = words[0], packed.y = words[1], packed.z = words[2], packed.w = words[3];
    ((uint4 *)data)[i] = packed;
}

static __global__ void msi_k_cast(void *target, ms_dtype to, const void *source, ms_dtype from,
                                  msi_cuda_split r) {
    const uint64_t i = msi_cuda_index();
    if (i < r.groups) {
        float x[8];
        msi_cuda_load8(x, source, from, i);
        msi_cuda_store8(target, to, i, x);
    } else if (i < r.threads) {
        msi_store_as(target, to, i + 7 * r.groups, msi_load(source, from, i + 7 * r.groups));
    }
}

/* The sum over all threads of a block, in a fixed order. Only thread 0 may use the result. */
static __device__ __forceinline__ double msi_cuda_block_sum(double *shared, double sum) {
    shared[threadIdx.x] = sum;
    for (unsigned width = MSI_CUDA_THREADS / 2; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) {
            shared[threadIdx.x] += shared[threadIdx.x + width];
        }
    }
    return shared[0];
}

static __device__ __forceinline__ double msi_cuda_square(float x) {
    return (double)x * (double)x;
}

/* partials[b] = the sum of the elements that block b visits, or of their squares. */
static __global__ void __launch_bounds__(MSI_CUDA_THREADS)
    msi_k_sum(const float *x, msi_cuda_split r, bool squares, double *partials) {
    __shared__ double shared[MSI_CUDA_THREADS];
    double sum = 0.0;
    for (uint64_t i = msi_cuda_index(); i < r.threads; i += (uint64_t)gridDim.x * blockDim.x) {
        const uint64_t k = i + 3 * r.groups;
        const float4 a =
            i < r.groups ? ((const float4 *)x)[i] : make_float4(x[k], 0.0f, 0.0f, 0.0f);
        sum += squares ? (msi_cuda_square(a.x) + msi_cuda_square(a.y)) +
                             (msi_cuda_square(a.z) + msi_cuda_square(a.w))
                       : ((double)a.x + (double)a.y) + ((double)a.z + (double)a.w);
    }
    sum = msi_cuda_block_sum(shared, sum);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

/* The sum of all partial sums. Only thread 0 may use the result. */
static __device__ __forceinline__ double
msi_cuda_partials_sum(double *shared, const double *partials, uint32_t count) {
    double mine = 0.0;
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
        mine += partials[i];
    }
    return msi_cuda_block_sum(shared, mine);
}

static __global__ void __launch_bounds__(MSI_CUDA_THREADS)
    msi_k_add_partials(double *sum, const double *partials, uint32_t count) {
    __shared__ double shared[MSI_CUDA_THREADS];
    const double all = msi_cuda_partials_sum(shared, partials, count);
    if (threadIdx.x == 0) {
        *sum += all;
    }
}

static __global__ void __launch_bounds__(MSI_CUDA_THREADS)
    msi_k_loss(const double *partials, uint32_t count, double factor, ms_step_state *step) {
    __shared__ double shared[MSI_CUDA_THREADS];
    const double all = msi_cuda_partials_sum(shared, partials, count);
    if (threadIdx.x == 0) {
        msi_judge_loss(step, factor * all);
    }
}

static __global__ void msi_k_clip(const double *sum, float limit, float *scale,
                                  ms_step_state *step) {
    *scale = msi_judge_norm(step, *sum, limit);
}

static __global__ void __launch_bounds__(MSI_CUDA_THREADS)
    msi_k_adamw(ms_update_args u, msi_cuda_split r) {
    const uint64_t i = msi_cuda_index();
    if (u.state_of_step->halted != (uint32_t)MS_HALT_NONE) {
        return;
    }
    const ms_update_factors f = *u.factors;
    const float s = u.gradient_scale ? *u.gradient_scale : 1.0f;
    if (i < r.groups) {
        const float4 g = ((const float4 *)u.gradient)[i];
        float4 p = ((const float4 *)u.value)[i];
        float4 m = ((const float4 *)u.state[0])[i], v = ((const float4 *)u.state[1])[i];
        p.x = msi_adamw_element(&f, p.x, s * g.x, &m.x, &v.x);
        p.y = msi_adamw_element(&f, p.y, s * g.y, &m.y, &v.y);
        p.z = msi_adamw_element(&f, p.z, s * g.z, &m.z, &v.z);
        p.w = msi_adamw_element(&f, p.w, s * g.w, &m.w, &v.w);
        ((float4 *)u.value)[i] = p;
        ((float4 *)u.state[0])[i] = m;
        ((float4 *)u.state[1])[i] = v;
    } else if (i < r.threads) {
        const uint64_t k = i + 3 * r.groups;
        u.value[k] =
            msi_adamw_element(&f, u.value[k], s * u.gradient[k], &u.state[0][k], &u.state[1][k]);
    }
}

static __global__ void __launch_bounds__(MSI_CUDA_THREADS)
    msi_k_sgd(ms_update_args u, msi_cuda_split r) {
    const uint64_t i = msi_cuda_index();
    if (u.state_of_step->halted != (uint32_t)MS_HALT_NONE) {
        return;
    }
    const ms_update_factors f = *u.factors;
    const float s = u.gradient_scale ? *u.gradient_scale : 1.0f;
    if (i < r.groups) {
        const float4 g = ((const float4 *)u.gradient)[i];
        const bool moves = u.state[0] != NULL;
        float4 p = ((const float4 *)u.value)[i];
        float4 m = moves ? ((const float4 *)u.state[0])[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        p.x = msi_sgd_element(&f, p.x, s * g.x, moves ? &m.x : NULL);
        p.y = msi_sgd_element(&f, p.y, s * g.y, moves ? &m.y : NULL);
        p.z = msi_sgd_element(&f, p.z, s * g.z, moves ? &m.z : NULL);
        p.w = msi_sgd_element(&f, p.w, s * g.w, moves ? &m.w : NULL);
        ((float4 *)u.value)[i] = p;
        if (moves) {
            ((float4 *)u.state[0])[i] = m;
        }
    } else if (i < r.threads) {
        const uint64_t k = i + 3 * r.groups;
        u.value[k] =
            msi_sgd_element(&f, u.value[k], s * u.gradient[k], u.state[0] ? &u.state[0][k] : NULL);
    }
}

// ------------------------------------------------------------------------------------------------
// >>cuda blas  row-major products as column-major products of the transposed matrices

static cudaDataType_t msi_cuda_type(ms_dtype dtype) {
    return dtype == MS_DTYPE_F32 ? CUDA_R_32F : dtype == MS_DTYPE_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

static bool msi_cuda_fits_int(const ms_matrix *x) {
    return x->rows <= INT32_MAX && x->cols <= INT32_MAX && x->stride <= INT32_MAX &&
           x->batch_count <= INT32_MAX;
}

static int msi_cuda_gemm(void *state, float alpha, const ms_matrix *a, const ms_matrix *b,
                         float beta, const ms_matrix *c) {
    const msi_cuda *cuda = (const msi_cuda *)state;
    const msi_cuda_scope scope(cuda->device);
    if (scope.error || !msi_cuda_fits_int(a) || !msi_cuda_fits_int(b) || !msi_cuda_fits_int(c)) {
        return scope.error ? scope.error : MSI_CUDA_BLAS_ERROR + (int)CUBLAS_STATUS_INVALID_VALUE;
    }
    const cublasComputeType_t compute =
        cuda->tf32 && a->dtype == MS_DTYPE_F32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    const cublasOperation_t turn_a = a->transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t turn_b = b->transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cudaDataType_t type = msi_cuda_type(a->dtype), type_c = msi_cuda_type(c->dtype);
    const int m = (int)c->rows, n = (int)c->cols;
    const int k = (int)(a->transposed ? a->rows : a->cols);
    if (c->batch_count == 1) {
        return msi_cuda_blas_error(cublasGemmEx(cuda->blas, turn_b, turn_a, n, m, k, &alpha,
                                                b->data, type, (int)b->stride, a->data, type,
                                                (int)a->stride, &beta, c->data, type_c,
                                                (int)c->stride, compute, CUBLAS_GEMM_DEFAULT));
    }
    return msi_cuda_blas_error(cublasGemmStridedBatchedEx(
        cuda->blas, turn_b, turn_a, n, m, k, &alpha, b->data, type, (int)b->stride,
        b->batch_count > 1 ? b->batch_stride : 0, a->data, type, (int)a->stride,
        a->batch_count > 1 ? a->batch_stride : 0, &beta, c->data, type_c, (int)c->stride,
        c->batch_stride, (int)c->batch_count, compute, CUBLAS_GEMM_DEFAULT));
}

// ------------------------------------------------------------------------------------------------
// >>backend cuda  the functions of the table

static int msi_cuda_memory_alloc(void *user, const ms_allocator *host, uint64_t bytes,
                                 void **device) {
    (void)host;
    return msi_cuda_on(msi_cuda_device(user), [&] { return cudaMalloc(device, (size_t)bytes); });
}

static void msi_cuda_memory_release(void *user, const ms_allocator *host, void *device,
                                    uint64_t bytes) {
    (void)host, (void)bytes;
    const msi_cuda_scope scope(msi_cuda_device(user));
    (void)msi_cuda_error(cudaFree(device));
}

static int msi_cuda_host_alloc(void *user, const ms_allocator *host, uint64_t bytes,
                               void **memory) {
    (void)host;
    return msi_cuda_on(msi_cuda_device(user),
                       [&] { return cudaHostAlloc(memory, (size_t)bytes, cudaHostAllocPortable); });
}

static void msi_cuda_host_release(void *user, const ms_allocator *host, void *memory,
                                  uint64_t bytes) {
    (void)host, (void)bytes;
    const msi_cuda_scope scope(msi_cuda_device(user));
    (void)msi_cuda_error(cudaFreeHost(memory));
}

static double msi_cuda_attribute(int device, cudaDeviceAttr attribute) {
    int value = 0;
    return msi_cuda_error(cudaDeviceGetAttribute(&value, attribute, device)) == 0 ? (double)value
                                                                                  : 0.0;
}

/* The speeds that follow from the clocks. The table has fused multiply-adds per clock and
   multiprocessor, by compute capability: f32 from the CUDA C++ Programming Guide, "Arithmetic
   instructions"; products on tensor cores that are summed in F32 from NVIDIA's white papers (Volta,
   Turing, GA100, GA102, AD102, Hopper) or, for 8.7, 10.0 and 12.0, from the speeds stated for
   Jetson AGX Orin, B200 and RTX PRO 6000. A GeForce has half that rate; before 7.0 there are no
   tensor cores. Memory moves data at both edges of its clock. */
static void msi_cuda_speeds(int device, int multiprocessors, int capability,
                            ms_hardware *hardware) {
    static const struct {
        int capability;
        double f32, tf32, f16;
    } table[] = {
        {50, 128.0, 0.0, 128.0},      {60, 64.0, 0.0, 64.0},     {61, 128.0, 0.0, 128.0},
        {70, 64.0, 0.0, 512.0},       {80, 64.0, 512.0, 1024.0}, {86, 128.0, 256.0, 512.0},
        {87, 128.0, 512.0, 1024.0},   {89, 128.0, 256.0, 512.0}, {90, 128.0, 1024.0, 2048.0},
        {100, 128.0, 2048.0, 4096.0}, {120, 128.0, 256.0, 512.0}};
    size_t row = 0;
    while (row + 1 < sizeof table / sizeof table[0] && table[row + 1].capability <= capability) {
        row++;
    }
    const double clock = msi_cuda_attribute(device, cudaDevAttrClockRate); // in kHz
    const double tflops = 2e-9 * clock * (double)multiprocessors; // of one multiply-add per clock
    const bool geforce = capability >= 70 && strstr(hardware->name, "GeForce");
    const double tensor = geforce ? 0.5 * tflops : tflops;
    hardware->memory_gb_per_s = 2.0 * msi_cuda_attribute(device, cudaDevAttrMemoryClockRate) *
                                msi_cuda_attribute(device, cudaDevAttrGlobalMemoryBusWidth) / 8e6;
    hardware->f32_tflops = tflops * table[row].f32;
    hardware->tf32_tflops = tensor * table[row].tf32;
    hardware->f16_tflops = tensor * table[row].f16;
}

/* A field stays 0 if the runtime does not report it. */
static void msi_cuda_hardware(void *user, ms_hardware *hardware) {
    const msi_cuda_scope scope(msi_cuda_device(user));
    cudaDeviceProp properties;
    size_t free_bytes = 0, total_bytes = 0;
    int driver = 0, runtime = 0;
    hardware->kind = MS_DEVICE_DISCRETE;
    if (scope.error || msi_cuda_error(cudaGetDeviceProperties(&properties, scope.device)) != 0) {
        return;
    }
    msi_format(hardware->name, sizeof hardware->name, "%.63s", properties.name);
    hardware->processor_count = (uint32_t)properties.multiProcessorCount;
    hardware->compute_major = (uint32_t)properties.major;
    hardware->compute_minor = (uint32_t)properties.minor;
    hardware->bf16 = properties.major >= 8;
    hardware->fp16_tensor = properties.major >= 7;
    hardware->tf32 = properties.major >= 8;
    hardware->total_bytes = properties.totalGlobalMem;
    if (msi_cuda_error(cudaMemGetInfo(&free_bytes, &total_bytes)) == 0) {
        hardware->free_bytes = free_bytes;
    }
    msi_host_memory("", &hardware->host_total_bytes, &hardware->host_free_bytes);
    if (properties.integrated) { // its memory is the host's: caches of Linux count as free
        hardware->kind = MS_DEVICE_INTEGRATED;
        hardware->free_bytes = hardware->host_free_bytes;
    }
    msi_cuda_speeds(scope.device, properties.multiProcessorCount,
                    10 * properties.major + properties.minor, hardware);
    hardware->driver_version = msi_cuda_error(cudaDriverGetVersion(&driver)) ? 0 : (uint32_t)driver;
    hardware->runtime_version =
        msi_cuda_error(cudaRuntimeGetVersion(&runtime)) ? 0 : (uint32_t)runtime;
}

static void msi_cuda_close(void *state) {
    msi_cuda *c = (msi_cuda *)state;
    const msi_cuda_scope scope(c->device);
    if (c->blas) {
        (void)msi_cuda_blas_error(cublasDestroy(c->blas));
    }
    for (uint32_t i = 0; i < c->event_count; i++) {
        (void)msi_cuda_error(cudaEventDestroy(c->events[i]));
    }
    msi_release(c->host, c->events, c->event_count * (uint64_t)sizeof *c->events);
    for (int i = c->owns_compute ? 0 : 1; i < MS_STREAM_COUNT; i++) {
        if (c->streams[i]) {
            (void)msi_cuda_error(cudaStreamDestroy(c->streams[i]));
        }
    }
    msi_release(c->host, c, sizeof *c);
}

/* Makes the events that are missing, all or none. */
static int msi_cuda_make_events(msi_cuda *c, uint32_t count) {
    const uint32_t before = c->event_count;
    if (count <= before) {
        return 0;
    }
    cudaEvent_t *events = (cudaEvent_t *)msi_alloc(c->host, count * (uint64_t)sizeof *c->events);
    if (!events) {
        return (int)cudaErrorMemoryAllocation;
    }
    for (uint32_t i = 0; i < before; i++) {
        events[i] = c->events[i];
    }
    for (uint32_t i = before; i < count; i++) {
        const int error =
            msi_cuda_error(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
        if (error) {
            while (i-- > before) {
                (void)msi_cuda_error(cudaEventDestroy(events[i]));
            }
            msi_release(c->host, events, count * (uint64_t)sizeof *c->events);
            return error;
        }
    }
    msi_release(c->host, c->events, before * (uint64_t)sizeof *c->events);
    c->events = events;
    c->event_count = count;
    return 0;
}

static int msi_cuda_open(void *user, const ms_open_args *args, void **state) {
    const msi_cuda_scope scope(msi_cuda_device(user));
    msi_cuda *c = scope.error ? NULL : (msi_cuda *)msi_alloc(args->host, sizeof *c);
    if (!c) {
        return scope.error ? scope.error : (int)cudaErrorMemoryAllocation;
    }
    memset(c, 0, sizeof *c);
    c->host = args->host;
    c->device = scope.device;
    c->tf32 = args->tf32;
    c->streams[MS_STREAM_COMPUTE] = (cudaStream_t)args->stream;
    c->owns_compute = !args->stream;
    int error = 0;
    for (int i = c->owns_compute ? 0 : 1; i < MS_STREAM_COUNT && error == 0; i++) {
        error = msi_cuda_error(cudaStreamCreateWithFlags(&c->streams[i], cudaStreamNonBlocking));
        c->streams[i] = error ? NULL : c->streams[i];
    }
    error = error ? error : msi_cuda_make_events(c, args->event_count);
    if (error) {
        msi_cuda_close(c);
        return error;
    }
    *state = c;
    return 0;
}

/* Makes a handle for the compute stream; 16-bit products are summed in float32 to the end. Setting
   its stream resets its workspace, which msi_cuda_prepare sets after this. */
static int msi_cuda_make_blas(msi_cuda *c) {
    const int math =
        (int)CUBLAS_DEFAULT_MATH | (int)CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    cublasHandle_t blas = NULL;
    int error = msi_cuda_blas_error(cublasCreate(&blas));
    if (error) {
        return error;
    }
    error = msi_cuda_blas_error(cublasSetStream(blas, c->streams[MS_STREAM_COMPUTE]));
    error = error ? error : msi_cuda_blas_error(cublasSetMathMode(blas, (cublasMath_t)math));
    if (error) {
        (void)msi_cuda_blas_error(cublasDestroy(blas));
        return error;
    }
    c->blas = blas;
    return 0;
}

static int msi_cuda_prepare(void *state, const ms_prepare_args *args) {
    msi_cuda *c = (msi_cuda *)state;
    const msi_cuda_scope scope(c->device);
    if (scope.error || args->workspace_bytes < (uint64_t)MSI_CUDA_PARTIALS_BYTES) {
        return scope.error ? scope.error : (int)cudaErrorInvalidValue;
    }
    int error = msi_cuda_make_events(c, args->event_count);
    error = error || c->blas ? error : msi_cuda_make_blas(c);
    if (error == 0) {
        error = msi_cuda_blas_error(
            cublasSetWorkspace(c->blas, (uint8_t *)args->workspace + MSI_CUDA_PARTIALS_BYTES,
                               (size_t)(args->workspace_bytes - MSI_CUDA_PARTIALS_BYTES)));
    }
    c->partials = error ? c->partials : (double *)args->workspace;
    return error;
}

static int msi_cuda_memcpy(void *state, ms_stream_kind stream, void *to, const void *from,
                           uint64_t bytes, cudaMemcpyKind kind) {
    return msi_cuda_with(state, [&](const msi_cuda *c) {
        return cudaMemcpyAsync(to, from, (size_t)bytes, kind, c->streams[stream]);
    });
}

static int msi_cuda_copy_in(void *state, void *device, const void *host, uint64_t bytes) {
    return msi_cuda_memcpy(state, MS_STREAM_TO_DEVICE, device, host, bytes, cudaMemcpyHostToDevice);
}

static int msi_cuda_copy_out(void *state, void *host, const void *device, uint64_t bytes) {
    return msi_cuda_memcpy(state, MS_STREAM_TO_HOST, host, device, bytes, cudaMemcpyDeviceToHost);
}

static int msi_cuda_copy(void *state, void *device, const void *source, uint64_t bytes) {
    return msi_cuda_memcpy(state, MS_STREAM_COMPUTE, device, source, bytes,
                           cudaMemcpyDeviceToDevice);
}

/* bytes: a multiple of 4. */
static int msi_cuda_upload(void *state, void *device, const void *host, uint64_t bytes) {
    int error = 0;
    for (uint64_t done = 0; done < bytes && error == 0; done += sizeof(msi_cuda_words)) {
        const uint64_t rest = bytes - done;
        const uint64_t part = rest < sizeof(msi_cuda_words) ? rest : sizeof(msi_cuda_words);
        msi_cuda_words words;
        memcpy(&words, (const uint8_t *)host + done, (size_t)part);
        error = msi_cuda_launch(state, 1, msi_k_upload, (uint32_t *)((uint8_t *)device + done),
                                words, (uint32_t)(part / 4));
    }
    return error;
}

static int msi_cuda_fill_bytes(void *state, void *device, uint8_t value, uint64_t bytes) {
    return msi_cuda_with(state, [&](const msi_cuda *c) {
        return cudaMemsetAsync(device, value, (size_t)bytes, c->streams[MS_STREAM_COMPUTE]);
    });
}

static int msi_cuda_fill_f32(void *state, void *device, float value, uint64_t count) {
    const msi_cuda_split r = msi_cuda_split_of(count, 4, (uintptr_t)device);
    return msi_cuda_launch(state, msi_cuda_blocks(r.threads), msi_k_fill_f32, (float *)device,
                           value, r);
}

static int msi_cuda_add_f32(void *state, void *device, const void *source, uint64_t count) {
    const msi_cuda_split r = msi_cuda_split_of(count, 4, (uintptr_t)device | (uintptr_t)source);
    return msi_cuda_launch(state, msi_cuda_blocks(r.threads), msi_k_add_f32, (float *)device,
                           (const float *)source, r);
}

static int msi_cuda_cast(void *state, void *target, ms_dtype to, const void *source, ms_dtype from,
                         uint64_t count) {
    const msi_cuda_split r = msi_cuda_split_of(count, 8, (uintptr_t)target | (uintptr_t)source);
    return msi_cuda_launch(state, msi_cuda_blocks(r.threads), msi_k_cast, target, to, source, from,
                           r);
}

/* Writes the partial sums of an array, or of its squares, to c->partials, and their number. */
static int msi_cuda_sum(const msi_cuda *c, const void *device, uint64_t count, bool squares,
                        uint32_t *partial_count) {
    const msi_cuda_split r = msi_cuda_split_of(count, 4, (uintptr_t)device);
    const uint64_t blocks = msi_cuda_blocks(r.threads), most = MSI_CUDA_PARTIALS;
    *partial_count = (uint32_t)(blocks < most ? blocks : most);
    return msi_cuda_launch(c, *partial_count, msi_k_sum, (const float *)device, r, squares,
                           c->partials);
}

static int msi_cuda_loss(void *state, const void *losses, uint64_t count, double factor,
                         ms_step_state *step) {
    const msi_cuda *c = (const msi_cuda *)state;
    uint32_t partial_count;
    const int error = msi_cuda_sum(c, losses, count, false, &partial_count);
    return error ? error
                 : msi_cuda_launch(c, 1, msi_k_loss, c->partials, partial_count, factor, step);
}

static int msi_cuda_add_squares_f32(void *state, const void *device, uint64_t count, double *sum) {
    const msi_cuda *c = (const msi_cuda *)state;
    uint32_t partial_count;
    const int error = msi_cuda_sum(c, device, count, true, &partial_count);
    return error ? error
                 : msi_cuda_launch(c, 1, msi_k_add_partials, sum, c->partials, partial_count);
}

static int msi_cuda_clip_scale(void *state, const double *sum, float limit, float *scale,
                               ms_step_state *step) {
    return msi_cuda_launch<1>(state, 1, msi_k_clip, sum, limit, scale, step);
}

static int msi_cuda_update(void *state, const ms_update_args *args) {
    const msi_cuda_split r =
        msi_cuda_split_of(args->count, 4,
                          (uintptr_t)args->value | (uintptr_t)args->gradient |
                              (uintptr_t)args->state[0] | (uintptr_t)args->state[1]);
    return msi_cuda_launch(state, msi_cuda_blocks(r.threads),
                           args->kind == MS_OPTIMIZER_ADAMW ? msi_k_adamw : msi_k_sgd, *args, r);
}

static int msi_cuda_synchronize(void *state) {
    const msi_cuda *c = (const msi_cuda *)state;
    const msi_cuda_scope scope(c->device);
    int error = scope.error;
    for (int i = 0; i < MS_STREAM_COUNT; i++) {
        const int now = msi_cuda_error(cudaStreamSynchronize(c->streams[i]));
        error = error ? error : now;
    }
    return error;
}

static int msi_cuda_record(void *state, ms_stream_kind stream, uint32_t event) {
    return msi_cuda_with(state, [&](const msi_cuda *c) {
        return cudaEventRecord(c->events[event], c->streams[stream]);
    });
}

static int msi_cuda_wait(void *state, ms_stream_kind stream, uint32_t event) {
    return msi_cuda_with(state, [&](const msi_cuda *c) {
        return cudaStreamWaitEvent(c->streams[stream], c->events[event], 0);
    });
}

static int msi_cuda_wait_on_host(void *state, uint32_t event) {
    return msi_cuda_with(state,
                         [&](const msi_cuda *c) { return cudaEventSynchronize(c->events[event]); });
}

static void *msi_cuda_stream(void *state) {
    return ((const msi_cuda *)state)->streams[MS_STREAM_COMPUTE];
}

/* A call of this thread that cannot be recorded invalidates the recording; other threads may call
   what they like. */
static int msi_cuda_recording_begin(void *state) {
    return msi_cuda_with(state, [&](const msi_cuda *c) {
        return cudaStreamBeginCapture(c->streams[MS_STREAM_COMPUTE],
                                      cudaStreamCaptureModeThreadLocal);
    });
}

static int msi_cuda_recording_check(void *state) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const int error = msi_cuda_with(state, [&](const msi_cuda *c) {
        return cudaStreamIsCapturing(c->streams[MS_STREAM_COMPUTE], &status);
    });
    return error                                     ? error
           : status == cudaStreamCaptureStatusActive ? 0
                                                     : (int)cudaErrorStreamCaptureInvalidated;
}

static int msi_cuda_recording_end(void *state, void **recording) {
    const msi_cuda *c = (const msi_cuda *)state;
    const msi_cuda_scope scope(c->device);
    cudaGraph_t recorded = NULL;
    cudaGraphExec_t exec = NULL;
    int error = msi_cuda_error(cudaStreamEndCapture(c->streams[MS_STREAM_COMPUTE], &recorded));
    if (error == 0 && recording) {
        error = msi_cuda_error(cudaGraphInstantiate(&exec, recorded, 0));
    }
    if (recorded) {
        (void)msi_cuda_error(cudaGraphDestroy(recorded));
    }
    if (error == 0 && recording) {
        *recording = exec;
    }
    return error;
}

static int msi_cuda_recording_launch(void *state, void *recording) {
    return msi_cuda_with(state, [&](const msi_cuda *c) {
        return cudaGraphLaunch((cudaGraphExec_t)recording, c->streams[MS_STREAM_COMPUTE]);
    });
}

static void msi_cuda_recording_release(void *state, void *recording) {
    const msi_cuda *c = (const msi_cuda *)state;
    const msi_cuda_scope scope(c->device);
    (void)msi_cuda_error(cudaStreamSynchronize(c->streams[MS_STREAM_COMPUTE])); // it may be running
    (void)msi_cuda_error(cudaGraphExecDestroy((cudaGraphExec_t)recording));
}

/* The workspace that cuBLAS recommends is 32 MiB from compute capability 9.0 on, otherwise 4 MiB
   (cuBLAS, "Results reproducibility" and cublasSetWorkspace). */
static uint64_t msi_cuda_workspace_bytes(int device) {
    int major = 0;
    (void)msi_cuda_error(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return ((uint64_t)(major >= 9 ? 32 : 4) << 20) + MSI_CUDA_PARTIALS_BYTES;
}

MEMSCALE_CUDA_API ms_backend ms_backend_cuda(int device) {
    ms_backend b;
    memset(&b, 0, sizeof b);
    b.size = sizeof b;
    b.name = "cuda";
    b.user = (void *)(intptr_t)device;
    b.is_asynchronous = true;
    b.workspace_bytes = msi_cuda_workspace_bytes(device);
#define MSI_USE(function) b.function = msi_cuda_##function
    MSI_USE(memory_alloc), MSI_USE(memory_release), MSI_USE(host_alloc), MSI_USE(host_release);
    MSI_USE(hardware), MSI_USE(error_text), MSI_USE(open), MSI_USE(close), MSI_USE(prepare);
    MSI_USE(copy_in), MSI_USE(copy_out), MSI_USE(upload), MSI_USE(copy), MSI_USE(fill_bytes);
    MSI_USE(fill_f32), MSI_USE(add_f32), MSI_USE(cast), MSI_USE(loss);
    MSI_USE(add_squares_f32), MSI_USE(clip_scale), MSI_USE(update), MSI_USE(gemm);
    MSI_USE(synchronize), MSI_USE(record), MSI_USE(wait), MSI_USE(wait_on_host), MSI_USE(stream);
    MSI_USE(recording_begin), MSI_USE(recording_check), MSI_USE(recording_end);
    MSI_USE(recording_launch), MSI_USE(recording_release);
#undef MSI_USE
    return b;
}

#endif // MEMSCALE_CUDA_IMPLEMENTATION

/*
    MIT License

    Copyright (c) 2026 the memscale.h authors

    Permission is hereby granted, free of charge, to any person obtaining a copy
    of this software and associated documentation files (the "Software"), to deal
    in the Software without restriction, including without limitation the rights
    to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
    copies of the Software, and to permit persons to whom the Software is
    furnished to do so, subject to the following conditions:

    The above copyright notice and this permission notice shall be included in all
    copies or substantial portions of the Software.

    THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
    IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
    FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
    AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
    LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
    OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
    SOFTWARE.
*/
