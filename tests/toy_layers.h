/*  toy_layers.h - small layers for tests, and small models of them. Include it after the
    implementation of memscale.h.

    - A layer is a t_op: its kind says what it computes, its options which freedoms it declares
      and takes, or how it fails, and it notes how it was called. t_layer gives its desc, to
      which a test adds what it likes; t_register registers it. t_add_layer and t_set_loss do all
      of that.
    - Values are F32, rows by columns. A layer is right wherever its operands share memory, and
      reads what it declares and nothing else. A test that wants more of a layer has callbacks of
      its own, which call t_forward and t_backward (or t_enter) with a user that begins with a
      t_op.
    - t_chain is a deep perceptron of matmuls and squashes, for plans and budgets.
    - t_net is a graph of scales, sums and squares with small whole numbers, for results that are
      known in closed form.

    On a CUDA device (tests/emulation/on_cuda.h) these layers enqueue their work: options may
    change between steps only once the model has been synchronized. */
#ifndef TOY_LAYERS_H
#define TOY_LAYERS_H

#include "testing.h"

// ------------------------------------------------------------------------------------------------
// layers

/* Gradients need not be true ones: what matters is that they depend on all that is declared. Values
   stay bounded up to T_LOSS, so that no depth of network overflows. */
typedef enum t_kind {
    T_SQUASH,  // y = x / (1 + |x|)                in: x                  reads y
    T_SCALE,   // y = scalar * x                   in: x                  reads nothing
    T_ADD,     // y = (a + b) / 2                  in: a, b               reads nothing
    T_PRODUCT, // y = a c / (1 + |c|)              in: a, b (c: reversed) reads a, b
    T_MATMUL,  // y = x W                          in: x   param: W       reads x, W
    T_AFFINE,  // y = (x p + q) / 2                in: x   param: p, q    reads x, p
    T_SPLIT,   // left, right = columns of x       in: x   out: 2         reads nothing
    T_CONCAT,  // y = columns of a, then b         in: a, b               reads nothing
    T_NORM,    // y = (x - mean) / spread          in: x   saved: 1       reads x, saved
    T_DROPOUT, // y = mask(seed) * x               in: x                  reads nothing
    T_EMBED,   // y = table[ids]                   in: ids param: table   reads ids
    T_GATE,    // y = x * buffer                   in: x, buffer          reads the buffer
    T_STOP,    // y = 1 / (1 + x * x)              in: x                  no backward
    T_LOSS,    // row sums of x * x / 2 + x / 10   in: x                  reads x
    /* Not among the layers of the random graphs of test_plan.c. */
    T_SQUARES, // row sums of x * x / 2            in: x                  reads x
    T_SQUARE,  // y = x * x / 2                    in: x                  reads x
    T_RUNNING, // y = (x + state) / 2              in: x   state: 1       reads nothing
    /* y = c0 a + c1 b + ... + a (p + q + ...) + shift, of any inputs and params. Declares nothing
       about what backward reads, which is a and the params if there are params. */
    T_MIX,
    T_KIND_COUNT
} t_kind;

enum { T_CALLBACK_ERROR = 17, T_MIX_IN = 4 };

/* Callbacks of several layers, counted together. */
typedef struct t_callbacks {
    uint64_t calls;
    uint64_t fail_at; // this call and all that follow fail, from 1; 0: none
} t_callbacks;

typedef struct t_op {
    t_kind kind;
    float scalar;             // of T_SCALE
    float c[T_MIX_IN], shift; // of T_MIX
    /* What it declares beside what its kind does, and keeps to. */
    ms_edges accumulates, overwrites; // gradients to which it only adds, or that it only sets (of
                                      // any kind but T_MATMUL and T_EMBED)
    ms_slot_masks clobbers;           // backward fills these with NaN when it is done
    bool must_in_place;               // out[0] in the place of in[0], grad_in[0] of grad_out[0]
    /* What goes wrong. */
    uint32_t failing;   // mask of phases that return T_CALLBACK_ERROR
    t_callbacks *fails; // NULL: they are not counted
    bool poisons;       // T_MIX: the gradients of its params are NaN
    bool skips_out;     // T_SQUARE: its backward_reads do not name its output
    /* What it has seen. */
    uint32_t calls[MS_PHASE_COUNT];
    uint32_t wanted_out[MS_PHASE_COUNT], wanted_saved[MS_PHASE_COUNT]; // of all calls together
    uint64_t seed;                                                     // of the last forward
    float loss_factor;                                                 // of the last forward
    uint32_t faults;           // operands that were not as it had declared them
    int in_count, param_count; // by t_register
} t_op;

/* In debug mode callbacks are called several times, and some gradients hold NaN on trial. */
static bool t_debugging;

static inline float *t_data(const ms_view *view) {
    return (float *)view->data;
}

static inline int64_t t_cols(const ms_view *view) {
    return view->shape.rank == 0 ? 1 : view->shape.dim[view->shape.rank - 1];
}

static inline int64_t t_rows(const ms_view *view) {
    return (int64_t)ms_shape_count(&view->shape) / t_cols(view);
}

static inline int64_t t_count(const ms_view *view) {
    return (int64_t)ms_shape_count(&view->shape);
}

/* Adds to element i of a gradient in the style of beta; a gradient that nobody wants is skipped. */
static inline void t_contribute(const ms_view *gradient, int64_t i, float value) {
    float *data = t_data(gradient);
    if (data != NULL) {
        data[i] = gradient->beta == 0.0f ? value : data[i] + value;
    }
}

/* The same for a layer that may have declared that it only adds, or only sets. */
static inline void t_give(t_op *op, const ms_view *gradient, bool adds, bool sets, int64_t i,
                          float value) {
    float *data = t_data(gradient);
    if (data == NULL || !(adds || sets)) {
        t_contribute(gradient, i, value);
        return;
    }
    op->faults += adds && (gradient->beta != 1.0f || (t_is_nan(data[i]) && !t_debugging));
    op->faults += sets && gradient->beta != 0.0f;
    data[i] = adds ? data[i] + value : value;
}

static inline void t_give_in(const ms_call *call, int slot, int64_t i, float value) {
    t_op *op = (t_op *)call->user;
    t_give(op, &call->grad_in[slot], (op->accumulates.in >> slot & 1) != 0,
           (op->overwrites.in >> slot & 1) != 0, i, value);
}

static inline void t_give_param(const ms_call *call, int slot, int64_t i, float value) {
    t_op *op = (t_op *)call->user;
    t_give(op, &call->grad_param[slot], (op->accumulates.param >> slot & 1) != 0,
           (op->overwrites.param >> slot & 1) != 0, i, value);
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
    case T_SQUARE:
        return 0.5f * x * x;
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
    int64_t count = t_count(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        y[i] = t_elementwise(op, call, i, x[i]);
    }
    return 0;
}

static inline int t_unary_backward(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    const float *y = t_data(&call->out[0]);
    int64_t count = t_count(&call->in[0]);
    for (int64_t i = 0; i < count; ++i) {
        float slope = op->kind == T_DROPOUT ? t_mask(call->seed, i) : op->scalar;
        if (op->kind == T_SQUASH) {
            slope = (1.0f - fabsf(y[i])) * (1.0f - fabsf(y[i]));
        }
        t_give_in(call, 0, i, t_grad_out(call, 0, i) * slope);
    }
    return 0;
}

/* Uses its output too, where it declares that: the slope is x + (y - x x / 2). */
static inline int t_square_backward(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    const float *x = t_data(&call->in[0]), *y = t_data(&call->out[0]);
    const int64_t count = t_count(&call->in[0]);
    for (int64_t i = 0; i < count; ++i) {
        const float slope = op->skips_out ? x[i] : x[i] + (y[i] - 0.5f * x[i] * x[i]);
        t_give_in(call, 0, i, slope * t_grad_out(call, 0, i));
    }
    return 0;
}

static inline int t_mix_forward(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    const int64_t cols = t_cols(&call->out[0]), count = t_count(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < op->in_count; ++k) {
            sum += op->c[k] * t_data(&call->in[k])[i];
        }
        for (int k = 0; k < op->param_count; ++k) {
            sum += t_data(&call->in[0])[i] * t_data(&call->param[k])[i % cols];
        }
        t_data(&call->out[0])[i] = sum + op->shift;
    }
    return 0;
}

static inline int t_mix_backward(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    const int64_t cols = t_cols(&call->out[0]), count = t_count(&call->out[0]);
    for (int k = 0; k < op->in_count; ++k) {
        for (int64_t i = 0; i < count; ++i) {
            float slope = op->c[k];
            for (int j = 0; j < op->param_count && k == 0; ++j) {
                slope += t_data(&call->param[j])[i % cols];
            }
            t_give_in(call, k, i, slope * t_grad_out(call, 0, i));
        }
    }
    for (int j = 0; j < op->param_count; ++j) {
        for (int64_t c = 0; c < cols; ++c) {
            float sum = op->poisons ? NAN : 0.0f;
            for (int64_t i = c; i < count; i += cols) {
                sum += t_data(&call->in[0])[i] * t_grad_out(call, 0, i);
            }
            t_give_param(call, j, c, sum);
        }
    }
    return 0;
}

static inline int t_add_forward(const ms_call *call) {
    const float *a = t_data(&call->in[0]);
    const float *b = t_data(&call->in[1]);
    int64_t count = t_count(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        t_data(&call->out[0])[i] = 0.5f * (a[i] + b[i]);
    }
    return 0;
}

static inline int t_add_backward(const ms_call *call) {
    int64_t count = t_count(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        float g = 0.5f * t_grad_out(call, 0, i);
        t_give_in(call, 0, i, g);
        t_give_in(call, 1, i, g);
    }
    return 0;
}

/* b is read from its end, so the product may stand in place of a, but never of b. */
static inline int t_product_forward(const ms_call *call) {
    const float *a = t_data(&call->in[0]);
    const float *b = t_data(&call->in[1]);
    int64_t count = t_count(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        float of_b = b[count - 1 - i];
        t_data(&call->out[0])[i] = a[i] * of_b / (1.0f + fabsf(of_b));
    }
    return 0;
}

static inline int t_product_backward(const ms_call *call) {
    const float *a = t_data(&call->in[0]);
    const float *b = t_data(&call->in[1]);
    int64_t count = t_count(&call->out[0]);
    for (int64_t i = 0; i < count; ++i) {
        float of_b = b[count - 1 - i];
        t_give_in(call, 0, i, t_grad_out(call, 0, i) * of_b / (1.0f + fabsf(of_b)));
    }
    for (int64_t i = 0; i < count; ++i) {
        float of_b = 1.0f + fabsf(b[count - 1 - i]);
        float slope = a[i] / (of_b * of_b);
        t_give_in(call, 1, count - 1 - i, t_grad_out(call, 0, i) * slope);
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
            t_give_param(call, slot, c, sum);
        }
    }
    for (int64_t i = 0; i < rows * cols; ++i) {
        t_give_in(call, 0, i, 0.5f * t_grad_out(call, 0, i) * p[i % cols]);
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
        t_give_in(call, 0, i, g);
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
            t_give_in(call, slot, i, t_grad_out(call, 0, from));
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
            t_give_in(call, 0, r * cols + c, (row[c] - mean) * slope);
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
        t_give_in(call, 0, i, t_grad_out(call, 0, i) * gate[i % cols]);
    }
    return 0;
}

/* The state moves a quarter of the way to the means of the columns. */
static inline int t_running_forward(const ms_call *call) {
    float *moving = t_data(&call->state[0]);
    const int64_t cols = t_cols(&call->in[0]), rows = t_rows(&call->in[0]);
    for (int64_t c = 0; c < cols; ++c) {
        float mean = 0.0f;
        for (int64_t r = 0; r < rows; ++r) {
            const float x = t_data(&call->in[0])[r * cols + c];
            mean += x / (float)rows;
            t_data(&call->out[0])[r * cols + c] = 0.5f * (x + moving[c]);
        }
        moving[c] = 0.75f * moving[c] + 0.25f * mean;
    }
    return 0;
}

static inline int t_running_backward(const ms_call *call) {
    const int64_t count = t_count(&call->in[0]);
    for (int64_t i = 0; i < count; ++i) {
        t_give_in(call, 0, i, 0.5f * t_grad_out(call, 0, i));
    }
    return 0;
}

/* Of x in a row sum: T_LOSS has a slope at zero too. */
static inline float t_loss_tilt(const ms_call *call) {
    return ((const t_op *)call->user)->kind == T_LOSS ? 0.1f : 0.0f;
}

static inline int t_loss_forward(const ms_call *call) {
    const float *x = t_data(&call->in[0]), tilt = t_loss_tilt(call);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t r = 0; r < t_rows(&call->in[0]); ++r) {
        float sum = 0.0f;
        for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
            sum += 0.5f * x[i] * x[i] + tilt * x[i];
        }
        t_data(&call->out[0])[r] = sum;
    }
    return 0;
}

static inline int t_loss_backward(const ms_call *call) {
    const float *x = t_data(&call->in[0]), tilt = t_loss_tilt(call);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * cols; ++i) {
        t_give_in(call, 0, i, t_grad_out(call, 0, i / cols) * (x[i] + tilt));
    }
    return 0;
}

typedef struct t_kind_info {
    const char *name;
    ms_layer_fn forward, backward;
    uint32_t reads_in, reads_out, reads_saved, reads_param;
    uint32_t in_place;                    // of out[0]: mask of inputs
    uint32_t grad_over_out, grad_over_in; // of grad_in[0]: over grad_out[0], over in[0]
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
    {"squares", t_loss_forward, t_loss_backward, 1, 0, 0, 0, 0, 0, 0},
    {"square", t_unary_forward, t_square_backward, 1, 0, 0, 0, 0, 0, 0},
    {"running", t_running_forward, t_running_backward, 0, 0, 0, 0, 0, 0, 0},
    {"mix", t_mix_forward, t_mix_backward, 0, 0, 0, 0, 0, 0, 0},
};

static inline void t_fill_with_nan(const ms_view *views, uint32_t mask) {
    for (int k = 0; mask >> k != 0; ++k) {
        const int64_t count =
            (mask >> k & 1) != 0 && views[k].data != NULL ? t_count(&views[k]) : 0;
        for (int64_t i = 0; i < count; ++i) {
            t_data(&views[k])[i] = NAN;
        }
    }
}

static inline int t_clobber(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    t_fill_with_nan(call->in, op->clobbers.in);
    t_fill_with_nan(call->out, op->clobbers.out);
    t_fill_with_nan(call->saved, op->clobbers.saved);
    t_fill_with_nan(call->grad_out, op->clobbers.grad_out);
    return 0;
}

/* On a device these layers enqueue their work, as those of a trainer do. */
static inline int t_run(ms_layer_fn function, const ms_call *call) {
#ifdef ON_CUDA_H
    if (function != t_matmul_forward && function != t_matmul_backward) { // ms_gemm enqueues
        return t_cuda_enqueue(function, call);
    }
#endif
    return function(call);
}

/* Counts a callback: whether it fails. */
static inline int t_count_callback(t_callbacks *callbacks) {
    callbacks->calls += 1;
    const uint64_t at = callbacks->fail_at;
    return at != 0 && callbacks->calls >= at ? T_CALLBACK_ERROR : 0;
}

/* What all callbacks begin with; also those of a layer whose user begins with a t_op. */
static inline int t_enter(const ms_call *call) {
    t_op *op = (t_op *)call->user;
    op->calls[call->phase] += 1;
    op->wanted_out[call->phase] |= call->wanted_out;
    op->wanted_saved[call->phase] |= call->wanted_saved;
    if (call->phase == MS_PHASE_FORWARD) {
        op->seed = call->seed;
        op->loss_factor = call->loss_factor;
    }
    const int error = op->fails != NULL ? t_count_callback(op->fails) : 0;
    return (op->failing >> call->phase & 1u) != 0 ? T_CALLBACK_ERROR : error;
}

static inline int t_forward(const ms_call *call) {
    t_op *op = (t_op *)call->user;
    const int error = t_enter(call);
    op->faults += op->must_in_place && call->in[0].data != call->out[0].data;
    return error != 0 ? error : t_run(t_kinds[op->kind].forward, call);
}

static inline int t_backward(const ms_call *call) {
    t_op *op = (t_op *)call->user;
    const ms_slot_masks *c = &op->clobbers;
    int error = t_enter(call);
    op->faults += op->must_in_place && (call->grad_in[0].data != call->grad_out[0].data ||
                                        call->grad_in[0].beta != 0.0f);
    error = error != 0 ? error : t_run(t_kinds[op->kind].backward, call);
    const bool clobbers = (c->in | c->out | c->saved | c->grad_out) != 0;
    return error != 0 || !clobbers ? error : t_run(t_clobber, call);
}

static inline int t_bind(const ms_call *call) {
    const t_op *op = (const t_op *)call->user;
    return op->fails != NULL ? t_count_callback(op->fails) : 0;
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
    desc.backward_reads.nothing = op->kind != T_MIX && (kind->reads_in | kind->reads_out |
                                                        kind->reads_saved | kind->reads_param) == 0;
    desc.in_place[0] = kind->in_place;
    desc.grad_in_place[0].grad_out = kind->grad_over_out;
    desc.grad_in_place[0].in = kind->grad_over_in;
    desc.accumulates = op->accumulates;
    desc.overwrites = op->overwrites;
    desc.clobbers = op->clobbers;
    desc.must_in_place = desc.must_grad_in_place = op->must_in_place;
    return desc;
}

/* The desc of a layer of this kind from one tensor to another. */
static inline ms_layer_desc t_layer(t_op *op, t_kind kind, const char *name, ms_tensor in,
                                    ms_tensor out) {
    op->kind = kind;
    ms_layer_desc desc = t_describe(op);
    desc.name = name;
    desc.in[0] = in;
    desc.out[0] = out;
    return desc;
}

static inline int t_used_slots(const ms_tensor *slots, int limit) {
    while (limit > 0 && slots[limit - 1].id == 0) {
        --limit;
    }
    return limit;
}

/* Registers a layer whose op may be a T_MIX. */
static inline ms_layer t_register(ms_model *m, t_op *op, const ms_layer_desc *desc) {
    op->in_count = t_used_slots(desc->in, MS_LIMIT_IN);
    op->param_count = t_used_slots(desc->param, MS_LIMIT_PARAM);
    const ms_reads *r = &desc->backward_reads;
    op->skips_out = r->nothing || ((r->in | r->saved | r->param) != 0 && (r->out & 1) == 0);
    return ms_register_layer(m, desc);
}

/* Adds a layer with one output, of the width of its input, or for T_MATMUL of the param's. */
static inline ms_tensor t_add_layer(ms_model *m, t_op *op, t_kind kind, const char *name,
                                    ms_tensor in, ms_tensor param) {
    ms_shape shape = ms_tensor_shape(m, in);
    if (kind == T_MATMUL) {
        shape.dim[1] = ms_tensor_shape(m, param).dim[1];
    }
    const ms_tensor out = ms_activation(m, name, MS_DTYPE_F32, shape);
    ms_layer_desc desc = t_layer(op, kind, name, in, out);
    desc.param[0] = param;
    t_register(m, op, &desc);
    return out;
}

/* The losses of the rows of a tensor, not yet written by a layer. */
static inline ms_tensor t_losses_of(ms_model *m, ms_tensor y) {
    const ms_shape shape = ms_tensor_shape(m, y);
    ms_shape rows = ms_shape1(shape.dim[0]);
    rows.axes[0] = shape.axes[0];
    return ms_activation(m, "losses", MS_DTYPE_F32, rows);
}

/* T_LOSS or T_SQUARES, as the loss of the model. */
static inline ms_tensor t_set_loss(ms_model *m, t_op *op, t_kind kind, ms_tensor y) {
    const ms_tensor losses = t_losses_of(m, y);
    const ms_layer_desc desc = t_layer(op, kind, "loss", y, losses);
    ms_register_layer(m, &desc);
    ms_set_loss(m, losses);
    return losses;
}

/* Callbacks of models that never run. */
static inline int t_nothing(const ms_call *call) {
    (void)call;
    return 0;
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

static inline void t_chain_register(t_chain *chain) {
    ms_model *m = chain->model;
    const ms_shape shape = ms_shape2(chain->rows, chain->cols);
    char name[32];
    ms_tensor last = chain->x = ms_input(m, "x", MS_DTYPE_F32, shape);
    for (uint32_t i = 0; i < chain->depth; ++i) {
        snprintf(name, sizeof name, "weight%u", (unsigned)i);
        chain->weight[i] = ms_param(m, name, MS_DTYPE_F32, ms_shape2(chain->cols, chain->cols));
        const ms_tensor product = ms_activation(m, "product", MS_DTYPE_F32, shape);
        snprintf(name, sizeof name, "hidden%u", (unsigned)i);
        chain->hidden[i] = ms_activation(m, name, MS_DTYPE_F32, shape);
        snprintf(name, sizeof name, "matmul%u", (unsigned)i);
        ms_layer_desc desc = t_layer(&chain->matmul[i], T_MATMUL, name, last, product);
        desc.param[0] = chain->weight[i];
        ms_register_layer(m, &desc);
        snprintf(name, sizeof name, "squash%u", (unsigned)i);
        desc = t_layer(&chain->squash[i], T_SQUASH, name, product, chain->hidden[i]);
        ms_register_layer(m, &desc);
        last = chain->hidden[i];
    }
    chain->loss = t_set_loss(m, &chain->loss_op, T_LOSS, last);
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

// ------------------------------------------------------------------------------------------------
// a net for numbers in closed form: rows along an axis, small whole numbers, no update unless a
// test asks for one, so that the gradients stay

enum { T_NET_ROWS = 4, T_NET_COLS = 16, T_NET_OPS = 16 };
enum { T_NET_COUNT = T_NET_ROWS * T_NET_COLS, T_NET_MOST = 4 * T_NET_COUNT };

typedef struct t_net {
    ms_config config;
    t_heap heap;
    ms_model *m;
    int64_t rows, largest; // of the axis
    ms_axis batch;
    ms_tensor x, loss;
    t_op ops[T_NET_OPS];        // of the layers, in the order of their registration
    ms_layer layers[T_NET_OPS]; // not of the loss
    int count;
} t_net;

/* What a test may change before t_net_create: config, rows, largest. */
static inline void t_net_begin(t_net *n) {
    memset(n, 0, sizeof *n);
    n->rows = n->largest = T_NET_ROWS;
    n->config = t_config();
    n->config.debug = t_debugging;
    n->config.allocator = t_heap_allocator(&n->heap);
}

static inline void t_net_optimizer(t_net *n, ms_optimizer_kind kind, float rate) {
    const ms_optimizer_desc optimizer = t_optimizer(kind, rate);
    ms_set_optimizer(n->m, &optimizer);
}

static inline ms_shape t_net_shape(const t_net *n) {
    return ms_along(ms_shape2(n->rows, T_NET_COLS), 0, n->batch);
}

static inline void t_net_create(t_net *n) {
    assert_int_equal(ms_create(&n->config, &n->m), MS_RESULT_OK);
    n->batch = ms_add_axis(n->m, "batch", n->rows, n->largest);
    n->x = ms_input(n->m, "x", MS_DTYPE_F32, t_net_shape(n));
    t_net_optimizer(n, MS_OPTIMIZER_NONE, 0.0f);
}

static inline ms_tensor t_net_activation(t_net *n, const char *name) {
    return ms_activation(n->m, name, MS_DTYPE_F32, t_net_shape(n));
}

static inline ms_tensor t_net_saved(t_net *n, const char *name) {
    return ms_saved(n->m, name, MS_DTYPE_F32, t_net_shape(n));
}

static inline ms_tensor t_net_param(t_net *n, const char *name) {
    return ms_param(n->m, name, MS_DTYPE_F32, ms_shape1(T_NET_COLS));
}

/* The op of the next layer: its options come before the desc. */
static inline t_op *t_net_op(t_net *n) {
    assert_true(n->count < T_NET_OPS);
    return &n->ops[n->count];
}

static inline ms_layer_desc t_net_layer(t_net *n, t_kind kind, const char *name, ms_tensor in,
                                        ms_tensor out) {
    return t_layer(t_net_op(n), kind, name, in, out);
}

/* A layer with callbacks of the test's own, which call t_enter; it declares no reads. */
static inline ms_layer_desc t_net_own(t_net *n, ms_layer_fn forward, ms_layer_fn backward,
                                      const char *name, ms_tensor in, ms_tensor out) {
    ms_layer_desc desc = t_net_layer(n, T_MIX, name, in, out);
    desc.forward = forward;
    desc.backward = backward;
    return desc;
}

/* Returns the number of the op. */
static inline int t_net_register(t_net *n, const ms_layer_desc *desc) {
    n->layers[n->count] = t_register(n->m, &n->ops[n->count], desc);
    return n->count++;
}

static inline ms_tensor t_net_like(t_net *n, const char *name, ms_tensor a) {
    return ms_activation(n->m, name, MS_DTYPE_F32, ms_tensor_shape(n->m, a));
}

/* y = c a + a p; p may be none. */
static inline ms_tensor t_net_scale(t_net *n, const char *name, ms_tensor a, float c, ms_tensor p) {
    t_net_op(n)->c[0] = c;
    ms_layer_desc desc = t_net_layer(n, T_MIX, name, a, t_net_like(n, name, a));
    desc.param[0] = p;
    desc.backward_reads.in = p.id != 0;
    desc.backward_reads.param = p.id != 0;
    desc.backward_reads.nothing = p.id == 0;
    t_net_register(n, &desc);
    return desc.out[0];
}

/* y = a + b */
static inline ms_tensor t_net_sum(t_net *n, ms_tensor a, ms_tensor b) {
    t_net_op(n)->c[0] = t_net_op(n)->c[1] = 1.0f;
    ms_layer_desc desc = t_net_layer(n, T_MIX, "sum", a, t_net_like(n, "sum", a));
    desc.in[1] = b;
    desc.backward_reads.nothing = true;
    t_net_register(n, &desc);
    return desc.out[0];
}

/* y = a a / 2: reads a in backward. */
static inline ms_tensor t_net_square(t_net *n, const char *name, ms_tensor a) {
    const ms_layer_desc desc = t_net_layer(n, T_SQUARE, name, a, t_net_like(n, name, a));
    t_net_register(n, &desc);
    return desc.out[0];
}

/* A chain of a scale by p and a square, so many times. */
static inline ms_tensor t_net_pairs(t_net *n, ms_tensor a, ms_tensor p, int count) {
    for (int i = 0; i < count; ++i) {
        a = t_net_square(n, "square", t_net_scale(n, "scale", a, 0.0f, p));
    }
    return a;
}

/* The loss is the sum of y y / 2, times the factor; returns the number of the op. */
static inline int t_net_loss(t_net *n, ms_tensor y, float factor) {
    n->loss = t_set_loss(n->m, t_net_op(n), T_SQUARES, y);
    t_set_loss_factor(n->m, factor);
    return n->count++;
}

static inline float t_x_at(int i) {
    return (float)(i * 7 % 5 - 2);
}

static inline float t_p_at(int i) {
    return (float)(i % 3 - 1);
}

/* Element i is t_x_at(i). */
static inline void t_net_write_x(t_net *n) {
    const size_t count = (size_t)ms_tensor_count(n->m, n->x);
    float *x = (float *)malloc(count * sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < count; ++i) {
        x[i] = t_x_at((int)i);
    }
    t_ok(n->m, ms_write(n->m, n->x, x));
    free(x);
}

/* Element i is t_p_at(i) + shift. */
static inline void t_net_write_param(t_net *n, ms_tensor p, float shift) {
    float data[T_NET_COLS];
    for (int i = 0; i < T_NET_COLS; ++i) {
        data[i] = t_p_at(i) + shift;
    }
    t_ok(n->m, ms_write(n->m, p, data));
}

static inline void t_net_start(t_net *n) {
    t_ok(n->m, ms_wrap(n->m));
    t_write_zeros(n->m);
    t_net_write_x(n);
}

static inline void t_net_end(t_net *n) {
    const ms_result settled = ms_synchronize(n->m); // whatever it is: some tests leave an error
    (void)settled;
    for (int i = 0; i < n->count; ++i) {
        assert_int_equal(n->ops[i].faults, 0);
    }
    ms_destroy(n->m);
    assert_true(n->heap.live_count == 0 && n->heap.wrong_releases == 0);
}

/* The first elements, within a tolerance relative to 1 and to what is expected. */
static inline void t_net_expect_near(const t_net *n, ms_tensor tensor, const double *expected,
                                     int count, double tolerance) {
    float data[T_NET_MOST];
    t_ok(n->m, ms_read(n->m, tensor, data));
    for (int i = 0; i < count; ++i) {
        const double most = tolerance * (1.0 + fabs(expected[i]));
        if (!(fabs((double)data[i] - expected[i]) <= most)) {
            fail_msg("element %d is %.9g, expected %.9g", i, (double)data[i], expected[i]);
        }
    }
}

static inline void t_net_expect(const t_net *n, ms_tensor tensor, const double *expected,
                                int count) {
    t_net_expect_near(n, tensor, expected, count, 0.0);
}

static inline void t_net_same(const t_net *a, ms_tensor of_a, const t_net *b, ms_tensor of_b) {
    float left[T_NET_MOST], right[T_NET_MOST];
    t_ok(a->m, ms_read(a->m, of_a, left));
    t_ok(b->m, ms_read(b->m, of_b, right));
    assert_memory_equal(left, right, (size_t)ms_tensor_bytes(a->m, of_a));
}

/* How often a callback has been called, in debug mode at least. */
static inline void t_expect_calls(uint32_t got, uint32_t expected) {
    if (t_debugging ? got < expected : got != expected) {
        fail_msg("%u calls, expected %u", (unsigned)got, (unsigned)expected);
    }
}

/* What the training program does, counted. */
typedef struct t_tally {
    uint32_t count[MS_EVENT_COUNT];
    uint32_t of_layer[MS_EVENT_COUNT][T_NET_OPS];
    uint32_t moves; // copies between two places
    uint32_t last_backward, first_update, last_update;
    ms_tensor updated; // the first param that is
} t_tally;

static inline void t_count_event(const ms_event *event, void *user) {
    t_tally *t = (t_tally *)user;
    assert_int_equal(event->size, sizeof *event);
    t->count[event->kind] += 1;
    if (event->layer_index < T_NET_OPS) {
        t->of_layer[event->kind][event->layer_index] += 1;
    }
    if (event->kind == MS_EVENT_COPY || event->kind == MS_EVENT_COPY_IN ||
        event->kind == MS_EVENT_COPY_OUT) {
        const ms_event_operand *o = event->operands;
        assert_true(event->operand_count >= 2 && event->operand_count % 2 == 0);
        t->moves += o[0].offset != o[1].offset || o[0].is_outside || o[1].is_outside;
    }
    if (event->kind == MS_EVENT_BACKWARD) {
        t->last_backward = event->index;
    }
    if (event->kind == MS_EVENT_UPDATE) {
        t->updated = t->count[MS_EVENT_UPDATE] == 1 ? event->tensor : t->updated;
        t->first_update = t->count[MS_EVENT_UPDATE] == 1 ? event->index : t->first_update;
        t->last_update = event->index;
    }
}

static inline t_tally t_net_tally(const t_net *n) {
    t_tally t;
    memset(&t, 0, sizeof t);
    t_ok(n->m, ms_visit_events(n->m, MS_PROGRAM_TRAIN, t_count_event, &t));
    return t;
}

static inline int t_debug_on(void **state) {
    (void)state;
    t_debugging = true;
    return 0;
}

static inline int t_debug_off(void **state) {
    (void)state;
    t_debugging = false;
    return 0;
}

/* A test that runs twice, the second time in debug mode. */
#define T_TWICE(test)                                                                              \
    cmocka_unit_test(test), cmocka_unit_test_setup_teardown(test, t_debug_on, t_debug_off)

#endif // TOY_LAYERS_H
