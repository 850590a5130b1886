/*  memscale.h - v0.1.0 - train a bigger model on the device memory you already have. MIT licence.

    One header that any C or C++ trainer drops in. The trainer registers its tensors and its layers
    (a forward and a backward callback each) and names a byte budget. memscale.h then owns the
    memory: it chooses what to recompute, gives every tensor a fixed address in one arena that fits
    the budget, and runs the training step by calling the trainer back.

        #define MEMSCALE_IMPLEMENTATION            // in exactly one source file
        #include "memscale.h"

        ms_config config = {0};                    // all zero: sensible defaults
        config.memory_budget_bytes = 300u << 20;   // the arena is never larger than this
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

    Link with -lm. Without MEMSCALE_IMPLEMENTATION the header only declares.

  MACROS (define before the include)
    MEMSCALE_IMPLEMENTATION   emit the function bodies; works at a second include too
    MEMSCALE_STATIC           make every function static: one private copy per translation unit
    MEMSCALE_CBLAS            ms_gemm calls cblas_sgemm of <cblas.h>; default: a built-in kernel
    MEMSCALE_API              linkage of the public functions; default: extern, C linkage
    MEMSCALE_ASSERT(x)        checks of the library's own invariants; default: assert(x)

  WHAT IT DOES NOT DO
    It is no tensor library and no autograd: the arithmetic of the layers is the trainer's.
    It does not allocate during a step, print, abort, read the environment or keep global state.
    It does not change a number: a checkpointed plan gives the same bits as the plain plan.
    In this version it runs on the CPU, and recomputation is the one technique that it plans.

  STEP BY STEP
    1. ms_create             a model from a config; zero fields mean defaults
    2. ms_input ... ms_saved name every tensor, with dtype and shape
    3. ms_register_layer     in the order of execution: inputs before their readers
    4. ms_set_loss           which tensor is minimised; ms_set_optimizer: how
    5. ms_wrap               everything is decided and allocated here
    6. ms_write              initial weights, then one batch per step
    7. ms_step               or ms_forward, ms_backward, ms_update; ms_eval for forward alone
    8. ms_detach             back to the plain plan; ms_destroy: the end

    Registration errors stick: the first one is what ms_wrap returns, so that a trainer need not
    check each call. ms_last_error has its text, with the numbers and the cure.

  CHAPTERS
    MEMORY MODEL. Everything that a step touches lies in one arena. Params, buffers, inputs and
    optimizer state keep one address for good. All other values have an address only while they
    live: an activation from its layer to its last reader, a gradient from its first contribution
    to its last use. Forward and backward see the same values, though not always at the same
    address, so a callback takes its pointers from the ms_call of that very call and keeps none.

    PLANS. The plain plan keeps what backward reads and updates all params after backward. Where the
    plain arena exceeds the budget, params are updated as soon as their gradient is complete, and
    then activations are dropped in forward and recomputed in backward, those first that free
    the most bytes for the least work. Every choice is scored by building the real program.

    NUMERICS. A recomputation runs the same callback on the same inputs with the same seed, so it
    gives the same bits wherever the callback is deterministic. Gradients are summed in one fixed
    order: that of the layers, last to first.

    ERRORS. Every fallible function returns an ms_result. A failing step leaves params and optimizer
    state as they were after the last completed update; where an update had begun, the model is
    marked failed (MS_RESULT_FAILED) until params are written again and ms_wrap is called.

    ALLOCATOR. All host memory comes from ms_config.allocator, device memory from ms_config.backend.
    Nothing is allocated between ms_wrap and the next ms_wrap or ms_detach.

    THREADS. One model is used by one thread at a time; separate models are independent. Callbacks
    run on the thread that called ms_step. With OpenMP enabled at compile time, the update and the
    built-in ms_gemm use its threads.

    LIMITS. 16 inputs, 8 outputs, 16 saved tensors and 16 params a layer; rank 6; 2^28 tensors.
    Arithmetic of the library's own (updates, ms_gemm) is float32.

    HISTORY. 0.1.0 (2026): registration, budgets by recomputation, CPU backend.

  TABLE OF CONTENTS (search for the tag)
    public          >>version >>results >>tensors >>backend >>descs >>reports >>functions
    implementation  >>base >>arithmetic >>structs >>log >>memory >>backend cpu >>hardware >>graph
                    >>lower >>layout >>simulate >>solve >>execute >>optimizer >>state >>report >>api
*/
#ifndef MEMSCALE_H
#define MEMSCALE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// ------------------------------------------------------------------------------------------------
// >>version  and linkage

#define MEMSCALE_VERSION_MAJOR 0
#define MEMSCALE_VERSION_MINOR 1
#define MEMSCALE_VERSION_PATCH 0

#ifndef MEMSCALE_API
#ifdef MEMSCALE_STATIC
#if defined(__GNUC__)
#define MEMSCALE_API static __attribute__((unused))
#else
#define MEMSCALE_API static
#endif
#elif defined(__cplusplus)
#define MEMSCALE_API extern "C"
#else
#define MEMSCALE_API extern
#endif
#endif

#if defined(__GNUC__)
#define MEMSCALE_NODISCARD __attribute__((warn_unused_result))
#define MEMSCALE_PRINTF(format, first) __attribute__((format(printf, format, first)))
#else
#define MEMSCALE_NODISCARD
#define MEMSCALE_PRINTF(format, first)
#endif

// ------------------------------------------------------------------------------------------------
// >>results  one name, one text each

#define MEMSCALE_RESULTS(X)                                                                        \
    X(MS_RESULT_OK, "no error")                                                                    \
    X(MS_RESULT_INVALID, "an argument is wrong")                                                   \
    X(MS_RESULT_ORDER, "the call does not fit the state of the model")                             \
    X(MS_RESULT_OUT_OF_MEMORY, "the allocator or the backend has no memory left")                  \
    X(MS_RESULT_BUDGET, "no plan fits the memory budget")                                          \
    X(MS_RESULT_CALLBACK, "a callback of a layer returned an error")                               \
    X(MS_RESULT_NONFINITE, "the loss is not a finite number")                                      \
    X(MS_RESULT_BACKEND, "the backend reported an error")                                          \
    X(MS_RESULT_FAILED, "an update was cut in two; write the params again and wrap")               \
    X(MS_RESULT_DRY_RUN, "the model is a dry run and has no memory")                               \
    X(MS_RESULT_UNSUPPORTED, "not supported by this backend or dtype")

#define MEMSCALE_X(name, text) name,
typedef enum ms_result { MEMSCALE_RESULTS(MEMSCALE_X) MS_RESULT_COUNT } ms_result;
#undef MEMSCALE_X

// ------------------------------------------------------------------------------------------------
// >>tensors  handles, dtypes, shapes, views

typedef struct ms_model ms_model; // opaque

/* Typed handles. 0 is no tensor, no layer: a zeroed desc has empty slots. */
typedef struct ms_tensor {
    uint32_t id;
} ms_tensor;

typedef struct ms_layer {
    uint32_t id;
} ms_layer;

enum {
    MS_LIMIT_RANK = 6,
    MS_LIMIT_IN = 16,
    MS_LIMIT_OUT = 8,
    MS_LIMIT_SAVED = 16,
    MS_LIMIT_PARAM = 16
};

typedef enum ms_dtype {
    MS_DTYPE_F32,
    MS_DTYPE_F64,
    MS_DTYPE_F16,
    MS_DTYPE_BF16,
    MS_DTYPE_I64,
    MS_DTYPE_I32,
    MS_DTYPE_I16,
    MS_DTYPE_I8,
    MS_DTYPE_U8,
    MS_DTYPE_COUNT
} ms_dtype;

/* Row-major extents, the last one contiguous. Rank 0 is a scalar: one element. */
typedef struct ms_shape {
    int64_t dim[MS_LIMIT_RANK];
    int32_t rank;
} ms_shape;

/* A tensor as a callback sees it. data is NULL where the layer has no such operand, where nobody
   wants that gradient, and for values that backward_reads does not list; shape and dtype stand
   even so, unless the slot is empty. beta, for gradients: data = beta * data + contribution,
   with 0 (data holds rubbish, perhaps NaN: overwrite) or 1 (accumulate). */
typedef struct ms_view {
    void *data;
    ms_shape shape;
    ms_dtype dtype;
    float beta;
} ms_view;

/* A matrix for ms_gemm: rows by cols as stored, rows stride elements apart. */
typedef struct ms_matrix {
    void *data;
    int64_t rows, cols, stride;
    ms_dtype dtype;
    bool transposed;
} ms_matrix;

typedef enum ms_phase {
    MS_PHASE_FORWARD,
    MS_PHASE_RECOMPUTE, // forward once more, in the middle of backward
    MS_PHASE_BACKWARD,
    MS_PHASE_EVAL, // forward without a backward to come
    MS_PHASE_COUNT
} ms_phase;

/* What a callback is given. The arrays have as many entries as the layer has slots. All of it is
   valid during the call alone. */
typedef struct ms_call {
    void *user;      // ms_layer_desc.user
    ms_model *model; // for ms_gemm
    ms_phase phase;
    const ms_view *in, *out, *saved, *param;
    const ms_view *grad_out, *grad_in, *grad_param; // in backward; NULL otherwise
    void *workspace;                                // 64-byte aligned scratch, contents undefined
    uint64_t workspace_bytes;
    uint64_t seed; // differs by layer and step; the same for a forward and its recomputation
    uint64_t step; // completed updates before this one
} ms_call;

/* 0, or the caller's own error number, which ends the step. */
typedef int (*ms_layer_fn)(const ms_call *call);

// ------------------------------------------------------------------------------------------------
// >>backend  allocator, log, and the table of what runs on the device

/* Both functions or neither (0: malloc and free). release is given the size that alloc was. */
typedef struct ms_allocator {
    void *(*alloc)(uint64_t bytes, void *user);
    void (*release)(void *memory, uint64_t bytes, void *user);
    void *user;
} ms_allocator;

typedef enum ms_log_level { MS_LOG_ERROR, MS_LOG_WARNING, MS_LOG_INFO, MS_LOG_DEBUG } ms_log_level;

/* tag is the section that speaks, such as "solve"; text has no line end. */
typedef void (*ms_log_fn)(ms_log_level level, const char *tag, const char *text, void *user);

/* Receives a piece of a listing. */
typedef void (*ms_write_fn)(const char *text, size_t length, void *user);

typedef enum ms_device_kind { MS_DEVICE_CPU, MS_DEVICE_DISCRETE, MS_DEVICE_INTEGRATED } ms_device_kind;

/* 0 where the platform does not tell. */
typedef struct ms_hardware {
    char name[64];
    ms_device_kind kind;
    uint32_t processor_count;
    uint64_t total_bytes;
    uint64_t free_bytes; // what a new process can still get without swapping
} ms_hardware;

typedef enum ms_optimizer_kind { MS_OPTIMIZER_ADAMW, MS_OPTIMIZER_SGD } ms_optimizer_kind;

/* One update of one param, as the backend's kernel takes it. value and gradient have count floats;
   state[0] and state[1] are AdamW's first and second moments, state[0] is SGD's momentum. */
typedef struct ms_update_args {
    ms_optimizer_kind kind;
    uint64_t count;
    float *value;
    const float *gradient;
    float *state[2];
    float learning_rate, weight_decay;
    float beta1, beta2, epsilon; // AdamW
    float momentum;              // SGD
    uint64_t t;                  // number of this update, from 1
} ms_update_args;

/* Everything that touches device memory. Functions return 0 or an error number of the backend's
   own. Device pointers are aligned to 64 bytes at least. user is passed through. */
typedef struct ms_backend {
    uint32_t size; // sizeof(ms_backend); 0: the CPU backend
    const char *name;
    void *user;
    /* Host memory that the backend needs comes from host. */
    int (*memory_alloc)(void *user, const ms_allocator *host, uint64_t bytes, void **device);
    void (*memory_release)(void *user, const ms_allocator *host, void *device, uint64_t bytes);
    int (*copy_in)(void *user, void *device, const void *host, uint64_t bytes);
    int (*copy_out)(void *user, void *host, const void *device, uint64_t bytes);
    int (*copy)(void *user, void *device, const void *source, uint64_t bytes);
    int (*fill_bytes)(void *user, void *device, uint8_t value, uint64_t bytes);
    int (*fill_f32)(void *user, void *device, float value, uint64_t count);
    int (*sum_f32)(void *user, const void *device, uint64_t count, double *sum); // waits
    int (*update)(void *user, const ms_update_args *args);
    int (*gemm)(void *user, float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                const ms_matrix *c); // shapes and dtypes are checked before
    void (*hardware)(void *user, ms_hardware *hardware);
} ms_backend;

// ------------------------------------------------------------------------------------------------
// >>descs  zero-initialise, then set what matters

typedef enum ms_switch { MS_SWITCH_DEFAULT, MS_SWITCH_ON, MS_SWITCH_OFF } ms_switch;

typedef struct ms_config {
    ms_backend backend;     // ms_backend_cpu(), or your own table; zero: the CPU
    ms_allocator allocator; // zero: malloc and free
    ms_log_fn log;          // NULL: silent
    void *log_user;
    uint64_t memory_budget_bytes; // size of the arena at most; 0: target_utilization of free memory
    double target_utilization;    // 0 < x <= 1; 0: 0.85
    ms_switch checkpointing;      // OFF: never recompute. DEFAULT, ON: where the budget asks for it
    /* Update a param right after its last gradient, inside backward, so that the gradient dies at
       once. DEFAULT: where the budget asks for it; ON: always; OFF: after backward, always. */
    ms_switch early_update;
    bool force_optimize; // the smallest arena that the switches allow, whatever the budget
    bool dry_run;        // plan and report, allocate no arena; steps return MS_RESULT_DRY_RUN
    /* Check while running: all memory that holds no live value is filled with NaN, so that a
       callback that reads what it did not declare cannot pass unseen. Slow. */
    bool debug;
    uint64_t seed; // of ms_call.seed
} ms_config;

/* Masks of slots: bit i stands for slot i. */
typedef struct ms_reads {
    uint16_t in, out, saved, param;
    bool nothing; // reads none of these; all fields zero means that it may read all
} ms_reads;

typedef struct ms_overwrites {
    uint16_t in, out, saved, grad_out;
} ms_overwrites;

/* A layer: as small as one operator, as large as a transformer block. Empty slots are allowed
   anywhere, the callback sees them as views without data. */
typedef struct ms_layer_desc {
    const char *name; // copied; NULL: "layer <number>"
    ms_layer_fn forward;
    ms_layer_fn backward; // NULL: no gradient passes through
    void *user;           // must live as long as the model
    ms_tensor in[MS_LIMIT_IN];
    ms_tensor out[MS_LIMIT_OUT];
    ms_tensor saved[MS_LIMIT_SAVED]; // written in forward, read by this layer's backward alone
    ms_tensor param[MS_LIMIT_PARAM];
    ms_reads backward_reads; // what backward reads of the values; zero: all of them
    /* in_place[j]: out[j] may take over the memory of one of these inputs. It does so where nothing
       reads that input afterwards, so forward must be right both ways. */
    uint16_t in_place[MS_LIMIT_OUT];
    /* grad_in_place[i]: grad_in[i], where its beta is 0, may take over the memory of one of these
       operands of backward. Backward must be right both ways. */
    ms_overwrites grad_in_place[MS_LIMIT_IN];
    uint64_t forward_workspace_bytes;
    uint64_t backward_workspace_bytes;
    double flops; // of one forward, for the price of a recomputation; 0: derived from the tensors
} ms_layer_desc;

/* AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
   SGD: v = momentum * v + g; p = p - rate * (v + decay * p). */
typedef struct ms_optimizer_desc {
    ms_optimizer_kind kind;
    float learning_rate; // 0: 0.001; ms_set_learning_rate takes any value, zero too
    float beta1;         // 0: 0.9
    float beta2;         // 0: 0.999
    float epsilon;       // 0: 1e-8
    float momentum;      // SGD; 0: none, and no state
    float weight_decay;  // of the params for which ms_set_weight_decay does not say otherwise
} ms_optimizer_desc;

// ------------------------------------------------------------------------------------------------
// >>reports

typedef enum ms_category {
    MS_CATEGORY_INPUT,
    MS_CATEGORY_PARAM,
    MS_CATEGORY_BUFFER,
    MS_CATEGORY_OPTIMIZER,
    MS_CATEGORY_GRADIENT, // of params
    MS_CATEGORY_ACTIVATION,
    MS_CATEGORY_ACTIVATION_GRADIENT,
    MS_CATEGORY_SAVED,
    MS_CATEGORY_WORKSPACE,
    MS_CATEGORY_COUNT
} ms_category;

/* Sizes are those of the arena: every tensor rounded up to 64 bytes. */
typedef struct ms_memory_report {
    uint64_t budget_bytes;
    uint64_t plain_bytes;       // arena of the plain plan
    uint64_t arena_bytes;       // arena of this plan: the sum of the next two
    uint64_t lower_bound_bytes; // largest sum of live bytes: no layout can be smaller
    uint64_t gap_bytes;         // lost to the layout
    /* Live bytes at the peak instruction, by category. They add up to lower_bound_bytes. */
    uint64_t peak_bytes[MS_CATEGORY_COUNT];
    uint32_t peak_instruction;
    const char *peak_layer; // name of the layer that runs there; "" for an update
    /* Largest sum, over the step, of activations, activation gradients and saved tensors: what
       training needs beside the params. Its moment need not be that of the peak. */
    uint64_t activation_peak_bytes;
    uint64_t param_count; // elements, not tensors
    uint32_t layer_count, tensor_count, instruction_count;
    uint32_t recompute_count; // recompute instructions in a step
    /* Work of the recomputations over that of one plain step (forward once, backward twice its
       price), by the layers' declared or derived flops and bytes: an estimate of the slowdown. */
    double recompute_share;
    bool early_update;
} ms_memory_report;

typedef enum ms_program { MS_PROGRAM_TRAIN, MS_PROGRAM_EVAL } ms_program;

// ------------------------------------------------------------------------------------------------
// >>functions  in the order of a model's life

/* Name ("MS_RESULT_BUDGET") and text ("no plan fits the memory budget") of a result.
   Threads: any. */
MEMSCALE_API const char *ms_result_name(ms_result result);
MEMSCALE_API const char *ms_result_text(ms_result result);

/* Name ("f32") and size in bytes of one element; "?" and 0 for a value out of range. Threads: any. */
MEMSCALE_API const char *ms_dtype_name(ms_dtype dtype);
MEMSCALE_API uint64_t ms_dtype_bytes(ms_dtype dtype);

/* Shapes, and the number of elements of one (0 if a dim is below 1 or the product overflows).
   Threads: any. */
MEMSCALE_API ms_shape ms_shape1(int64_t d0);
MEMSCALE_API ms_shape ms_shape2(int64_t d0, int64_t d1);
MEMSCALE_API ms_shape ms_shape3(int64_t d0, int64_t d1, int64_t d2);
MEMSCALE_API ms_shape ms_shape4(int64_t d0, int64_t d1, int64_t d2, int64_t d3);
MEMSCALE_API uint64_t ms_shape_count(const ms_shape *shape);

/* The backend that runs on the host: its arena comes from the model's allocator. Threads: any. */
MEMSCALE_API ms_backend ms_backend_cpu(void);

/* Makes a model. config may be NULL (all defaults) and is copied. On error *model is NULL.
   Errors: INVALID (a field out of range, half an allocator), OUT_OF_MEMORY. Threads: any. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_create(const ms_config *config, ms_model **model);

/* Frees everything; NULL is fine. Pointers that callbacks were given end here. */
MEMSCALE_API void ms_destroy(ms_model *model);

/* Text of the last error of this model, "" if there was none; valid until the next call that
   fails. For NULL: the text for a model that could not be made. */
MEMSCALE_API const char *ms_last_error(const ms_model *model);

/* What the backend says of its device, now. Errors: INVALID. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_hardware_report(ms_model *model, ms_hardware *report);

/* Name a tensor. The name is copied, and need not be unique. A failure returns the handle 0, and
   sticks. Errors: INVALID (dtype, shape), ORDER (after ms_wrap), OUT_OF_MEMORY.
     input       fed with ms_write, keeps its value until written again
     param       trained; F32
     buffer      lives between steps, not trained; read as an input of layers
     activation  the output of exactly one layer
     saved       written by a layer's forward for its own backward */
MEMSCALE_API ms_tensor ms_input(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape);
MEMSCALE_API ms_tensor ms_param(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape);
MEMSCALE_API ms_tensor ms_buffer(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape);
MEMSCALE_API ms_tensor ms_activation(ms_model *model, const char *name, ms_dtype dtype,
                                     ms_shape shape);
MEMSCALE_API ms_tensor ms_saved(ms_model *model, const char *name, ms_dtype dtype, ms_shape shape);

/* Adds a layer behind those that stand already; desc is copied. What it reads must be an input, a
   buffer, or written by a layer before it. A failure returns the handle 0, and sticks.
   Errors: INVALID (with the names of layer and tensor), ORDER, OUT_OF_MEMORY. */
MEMSCALE_API ms_layer ms_register_layer(ms_model *model, const ms_layer_desc *desc);

/* The tensor that is minimised, by the mean of its elements: F32, written by a layer. Sticks.
   Errors: INVALID, ORDER (after ms_wrap). */
MEMSCALE_API void ms_set_loss(ms_model *model, ms_tensor loss);

/* From the next step on, minimise factor * sum of the loss tensor instead of the mean: for rows
   that do not count, 1 / (number of those that do). 0: the mean again. */
MEMSCALE_API void ms_set_loss_factor(ms_model *model, float factor);

/* Keep this tensor until the next step, in ms_step and in ms_eval or in ms_eval alone, so that
   ms_read can see it. A kept tensor is never overwritten in place. Sticks.
   Errors: INVALID, ORDER (after ms_wrap). */
MEMSCALE_API void ms_set_output(ms_model *model, ms_tensor tensor);
MEMSCALE_API void ms_set_eval_output(ms_model *model, ms_tensor tensor);

/* How params are updated; AdamW with its defaults if never called. Sticks.
   Errors: INVALID, ORDER (after ms_wrap). */
MEMSCALE_API void ms_set_optimizer(ms_model *model, const ms_optimizer_desc *desc);

/* Between steps, at any time. A wrong handle is an INVALID that sticks. */
MEMSCALE_API void ms_set_learning_rate(ms_model *model, float learning_rate);
MEMSCALE_API void ms_set_weight_decay(ms_model *model, ms_tensor param, float weight_decay);

/* Takes effect at the next ms_wrap. A frozen param takes no gradient and no optimizer state (the
   state of a param that is frozen is dropped, and zero if it is ever trained again). */
MEMSCALE_API void ms_set_frozen(ms_model *model, ms_tensor param, bool frozen);
MEMSCALE_API void ms_set_budget(ms_model *model, uint64_t memory_budget_bytes);

/* The smallest budget that ms_wrap would accept with the present switches. Takes as long as the
   longest ms_wrap. Errors: as ms_wrap. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_smallest_budget(ms_model *model, uint64_t *bytes);

/* Decides, lowers, lays out and allocates. May be called again, between steps, after
   ms_set_budget or ms_set_frozen: every value that lives between steps is kept. A failing call
   leaves the model as it was.
   Errors: the first registration error; INVALID; BUDGET (the text has the smallest budget that
   would do); OUT_OF_MEMORY; BACKEND. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_wrap(ms_model *model);

/* Back to the plain plan, budget or not; values are kept. On error the model stays wrapped as it
   was. Errors: as ms_wrap, without BUDGET. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_detach(ms_model *model);

/* MS_OPTIMIZE(m) { ... } wraps before the block and detaches behind it. The block is skipped if
   ms_wrap fails (see ms_last_error). Leaving it by break, goto or return leaves the model wrapped. */
#define MS_OPTIMIZE(model)                                                                         \
    for (int memscale_stage = 0; ms_optimize_next((model), &memscale_stage);)
MEMSCALE_API bool ms_optimize_next(ms_model *model, int *stage);

/* Copies a whole tensor from or to host memory, in its dtype. ms_write: any tensor that lives
   between steps (input, param, buffer, optimizer state), at any time, also before ms_wrap. ms_read:
   these, and every value that is live where the last step stopped: the loss, outputs, and between
   ms_backward and ms_update the gradients. Errors: INVALID, ORDER (not live), DRY_RUN,
   OUT_OF_MEMORY, BACKEND. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_write(ms_model *model, ms_tensor tensor,
                                                   const void *data);
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_read(ms_model *model, ms_tensor tensor, void *data);

/* Handles for ms_read and ms_write: the gradient of a tensor, and the optimizer state of a param
   (AdamW: 0 and 1 are the moments; SGD: 0 is the momentum). Handle 0 if there is no such thing. */
MEMSCALE_API ms_tensor ms_gradient(const ms_model *model, ms_tensor tensor);
MEMSCALE_API ms_tensor ms_optimizer_state(const ms_model *model, ms_tensor param, int index);

/* Number of elements of a tensor, 0 for a wrong handle; bytes: that times the size of its dtype. */
MEMSCALE_API uint64_t ms_tensor_count(const ms_model *model, ms_tensor tensor);
MEMSCALE_API uint64_t ms_tensor_bytes(const ms_model *model, ms_tensor tensor);

/* One training step; *loss (may be NULL) is the loss before the update.
   Errors: CALLBACK, NONFINITE, BACKEND, FAILED, ORDER (not wrapped), DRY_RUN. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_step(ms_model *model, double *loss);

/* The same in three calls. With a plan that updates early (ms_memory_report.early_update),
   ms_backward updates most params and ms_update completes the step.
   Errors: as ms_step; ORDER if called out of turn. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_forward(ms_model *model, double *loss);
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_backward(ms_model *model);
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_update(ms_model *model);

/* Forward alone, in MS_PHASE_EVAL, by a program of its own that keeps nothing for a backward. It
   ends a step that was begun with ms_forward. Errors: as ms_step. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_eval(ms_model *model, double *loss);

/* In a callback: c = alpha * a * b + beta * c, row-major, F32; a beta of 0 does not read c.
   Errors: INVALID (shapes do not match), UNSUPPORTED (dtype), BACKEND. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_gemm(const ms_call *call, float alpha, ms_matrix a,
                                                  ms_matrix b, float beta, ms_matrix c);

/* A view as a matrix: all leading dims are rows, the last is cols; and a matrix the other way
   round (no data moves). Threads: any. */
MEMSCALE_API ms_matrix ms_matrix_of(const ms_view *view);
MEMSCALE_API ms_matrix ms_transpose(ms_matrix matrix);

/* Sizes of the present plan. Errors: INVALID, ORDER (no plan yet). */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_report(const ms_model *model,
                                                    ms_memory_report *report);

/* Name of a category, such as "activation gradients"; "?" out of range. Threads: any. */
MEMSCALE_API const char *ms_category_name(ms_category category);

/* Listings for people: the plan, a line per layer, and a program, a line per instruction with its
   number, op, layer, operands with addresses, and live bytes. Errors: INVALID, ORDER. */
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_print_plan(const ms_model *model, ms_write_fn write,
                                                        void *user);
MEMSCALE_API MEMSCALE_NODISCARD ms_result ms_print_program(const ms_model *model,
                                                           ms_program program, ms_write_fn write,
                                                           void *user);

#endif // MEMSCALE_H
