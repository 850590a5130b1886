/*  darknet_style - a trainer in the shape of darknet, first by itself, then on memscale.h.

        build/examples/darknet_style                    trains, prints losses and test accuracy
        build/examples/darknet_style --wrap             the same inside memory that memscale.h plans
        build/examples/darknet_style --wrap --budget 6M the same inside 6 MiB
        build/examples/darknet_style --compare          both, bit by bit: results, time and memory

    The second port, after llmc_style.c, and the harder one: layers that own their buffers, overwrite
    their operands and carry state from step to step.

    The shape: one `struct layer` per layer that owns all its buffers, function pointers forward,
    backward and update, and a `struct network` with a shared workspace and pointers to what the
    running layer reads (input) and adds its gradient to (delta). Layers overwrite their operands:
    batch-norm and the activation work in place on the output, backward works in place on the delta,
    dropout draws from libc's rand() and changes the output of the layer before it, the product of a
    1x1 convolution wipes the delta of its input, the loss writes its delta in forward, and the
    momentum is kept in the gradients. None of this was written with memscale.h in mind; everything
    that a port needs is one section near the end, the adapter.

    As in darknet, delta is the direction of descent: minus the gradient. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700 // POSIX, and initstate and setstate with it
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "options.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// ---- arithmetic ---------------------------------------------------------------------------------

static void fill(int count, float value, float *x) {
    for (int i = 0; i < count; ++i) {
        x[i] = value;
    }
}

static void copy(int count, const float *x, float *y) {
    for (int i = 0; i < count; ++i) {
        y[i] = x[i];
    }
}

static void axpy(int count, float a, const float *x, float *y) {
    for (int i = 0; i < count; ++i) {
        y[i] += a * x[i];
    }
}

static void scal(int count, float a, float *x) {
    for (int i = 0; i < count; ++i) {
        x[i] *= a;
    }
}

/* c (m, n) += a (m, k) b (k, n) */
static void gemm_nn(int m, int n, int k, const float *a, const float *b, float *c) {
    for (int i = 0; i < m; ++i) {
        for (int p = 0; p < k; ++p) {
            axpy(n, a[i * k + p], b + p * n, c + i * n);
        }
    }
}

/* c (m, n) += a^T b, with a (k, m), b (k, n) */
static void gemm_tn(int m, int n, int k, const float *a, const float *b, float *c) {
    for (int i = 0; i < m; ++i) {
        for (int p = 0; p < k; ++p) {
            axpy(n, a[p * m + i], b + p * n, c + i * n);
        }
    }
}

/* c (m, n) += a b^T, with a (m, k), b (n, k). Sixteen sums side by side, for the vector unit. */
static void gemm_nt(int m, int n, int k, const float *a, const float *b, float *c) {
    enum { LANES = 16 };
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
            const float *x = a + i * k, *y = b + j * k;
            float sums[LANES] = {0}, sum = 0.0f;
            int p = 0;
            for (; p + LANES <= k; p += LANES) {
                for (int lane = 0; lane < LANES; ++lane) {
                    sums[lane] += x[p + lane] * y[p + lane];
                }
            }
            for (; p < k; ++p) {
                sum += x[p] * y[p];
            }
            for (int lane = 0; lane < LANES; ++lane) {
                sum += sums[lane];
            }
            c[i * n + j] += sum;
        }
    }
}

// ---- layers -------------------------------------------------------------------------------------

typedef enum layer_type {
    CONVOLUTIONAL,
    CONNECTED,
    MAXPOOL,
    DROPOUT,
    SHORTCUT,
    SOFTMAX // with the cross-entropy
} layer_type;

typedef enum activation_kind { LINEAR, LEAKY } activation_kind;

typedef struct layer layer;
typedef struct network network;

typedef struct update_args {
    float learning_rate, momentum, decay;
    int batch;
} update_args;

/* A layer has the fields of all types; what its type does not use is 0. */
struct layer {
    layer_type type;
    activation_kind activation;
    void (*forward)(layer l, network net);
    void (*backward)(layer l, network net);
    void (*update)(layer l, update_args args);
    int batch, h, w, c, inputs;       // of one image: the input,
    int out_h, out_w, out_c, outputs; // and the output
    int size, stride, pad;
    int from;          // shortcut: number of the layer that is added
    float probability; // dropout
    int nweights;
    float *weights, *weight_updates, *biases, *bias_updates, *scales, *scale_updates;
    float *rolling_mean, *rolling_variance; // batch-norm, as scales are
    float *mean_delta, *variance_delta;
    float *output, *delta;               // dropout: those of the layer before
    float *x, *x_norm, *mean, *variance; // batch-norm
    int *indexes;                        // max-pool
    float *rand;                         // dropout
    float *loss, *cost;                  // softmax
    size_t activation_bytes, workspace_bytes;
};

/* Passed by value: a pass changes its own copy of these pointers. */
struct network {
    int n, batch;
    layer *layers;
    int h, w, c, classes;
    float *input, *truth; // (batch, inputs), (batch, classes)
    float *delta;         // of input; NULL: not wanted
    float *workspace;     // as large as the layer that needs most
    size_t workspace_bytes;
    int train, index; // index: of the running layer
    char *random;     // memory of rand(), with the sequence of this network
    update_args args;
};

static void *zeroed(size_t bytes) {
    void *memory = calloc(bytes > 0 ? bytes : 1, 1);
    if (memory == NULL) {
        fprintf(stderr, "darknet_style: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return memory;
}

static float *floats(int count) {
    return (float *)zeroed((size_t)count * sizeof(float));
}

/* A buffer for values of one batch; --compare counts these. */
static float *activations(layer *l, int count) {
    l->activation_bytes += (size_t)count * sizeof(float);
    return floats(count);
}

/* xorshift64*: Vigna, "An experimental exploration of Marsaglia's xorshift generators", 2016. */
static uint64_t draw(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 2685821657736338717u;
}

/* Uniform in [low, high). */
static float draw_uniform(uint64_t *state, float low, float high) {
    return low + (high - low) * ((float)(draw(state) >> 40) / 16777216.0f);
}

// Weights and dropout draw from rand(). As several networks are trained here by turns, each has a
// sequence of its own: initstate and setstate choose the memory that rand() draws from. They do so
// in the GNU C library. Others have no such functions, or a rand() that takes no notice of them, so
// a generator with the same interface takes the place of theirs.

enum { RANDOM_BYTES = 128 };

#ifndef __GLIBC__
static uint64_t *own_state;

static char *own_setstate(char *state) {
    char *previous = (char *)own_state;
    own_state = (uint64_t *)(void *)state;
    return previous;
}

static char *own_initstate(unsigned seed, char *state, size_t bytes) {
    char *previous = own_setstate(state);
    memset(state, 0, bytes);
    *own_state = seed * 0x9e3779b97f4a7c15u | 1u;
    return previous;
}

static int own_rand(void) {
    return (int)(draw(own_state) >> 33);
}

#undef RAND_MAX
#define RAND_MAX                      2147483647
#define rand()                        own_rand()
#define setstate(state)               own_setstate(state)
#define initstate(seed, state, bytes) own_initstate(seed, state, bytes)
#endif

/* Uniform in [low, high]. */
static float rand_uniform(float low, float high) {
    return low + (high - low) * ((float)rand() / (float)RAND_MAX);
}

static void activate(layer l) {
    for (int i = 0; l.activation == LEAKY && i < l.outputs * l.batch; ++i) {
        l.output[i] = l.output[i] > 0.0f ? l.output[i] : 0.1f * l.output[i];
    }
}

/* In place on the delta. */
static void activate_backward(layer l) {
    for (int i = 0; l.activation == LEAKY && i < l.outputs * l.batch; ++i) {
        l.delta[i] *= l.output[i] > 0.0f ? 1.0f : 0.1f;
    }
}

// Channels: x is (batch, channels, spatial), with the channels and extents of the layer's output.

static void add_channels(layer l, const float *values, float *x) {
    const int spatial = l.out_h * l.out_w;
    for (int i = 0; i < l.batch * l.out_c; ++i) {
        for (int j = 0; j < spatial; ++j) {
            x[i * spatial + j] += values[i % l.out_c];
        }
    }
}

static void scale_channels(layer l, const float *values, float *x) {
    const int spatial = l.out_h * l.out_w;
    for (int i = 0; i < l.batch * l.out_c; ++i) {
        scal(spatial, values[i % l.out_c], x + i * spatial);
    }
}

/* sums (channels) += x y, summed over batch and space; y NULL: 1; shift: subtracted from y. */
static void sum_channels(layer l, const float *x, const float *y, const float *shift, float *sums) {
    const int spatial = l.out_h * l.out_w;
    for (int i = 0; i < l.batch * l.out_c; ++i) {
        const float *xs = x + i * spatial, *ys = y == NULL ? NULL : y + i * spatial;
        const float less = shift == NULL ? 0.0f : shift[i % l.out_c];
        float sum = 0.0f;
        for (int j = 0; j < spatial; ++j) {
            sum += ys == NULL ? xs[j] : xs[j] * (ys[j] - less);
        }
        sums[i % l.out_c] += sum;
    }
}

// Batch-norm: Ioffe and Szegedy, "Batch normalization", 2015, algorithm 1 and what follows it.

static const float batchnorm_epsilon = 1e-5f, batchnorm_rolling = 0.1f;

/* x_norm = (x - mean) / spread */
static void normalize(layer l, const float *mean, const float *variance) {
    const int spatial = l.out_h * l.out_w;
    for (int i = 0; i < l.batch * l.out_c; ++i) {
        const float shift = mean[i % l.out_c];
        const float spread = sqrtf(variance[i % l.out_c] + batchnorm_epsilon);
        for (int j = i * spatial; j < (i + 1) * spatial; ++j) {
            l.x_norm[j] = (l.x[j] - shift) / spread;
        }
    }
}

static void batchnorm_statistics(layer l) {
    const int spatial = l.out_h * l.out_w, count = l.batch * spatial;
    fill(l.out_c, 0.0f, l.mean);
    sum_channels(l, l.x, NULL, NULL, l.mean);
    scal(l.out_c, 1.0f / (float)count, l.mean);
    for (int c = 0; c < l.out_c; ++c) {
        float total = 0.0f;
        for (int b = 0; b < l.batch; ++b) {
            const float *x = l.x + (b * l.out_c + c) * spatial;
            float sum = 0.0f;
            for (int j = 0; j < spatial; ++j) {
                sum += (x[j] - l.mean[c]) * (x[j] - l.mean[c]);
            }
            total += sum;
        }
        l.variance[c] = total / (float)count;
    }
}

static void forward_batchnorm(layer l, network net) {
    copy(l.outputs * l.batch, l.output, l.x);
    if (net.train) {
        batchnorm_statistics(l);
        scal(l.out_c, 1.0f - batchnorm_rolling, l.rolling_mean);
        axpy(l.out_c, batchnorm_rolling, l.mean, l.rolling_mean);
        scal(l.out_c, 1.0f - batchnorm_rolling, l.rolling_variance);
        axpy(l.out_c, batchnorm_rolling, l.variance, l.rolling_variance);
        normalize(l, l.mean, l.variance);
    } else {
        normalize(l, l.rolling_mean, l.rolling_variance);
    }
}

/* In place on the delta. */
static void backward_batchnorm(layer l) {
    const int spatial = l.out_h * l.out_w, count = l.batch * spatial;
    sum_channels(l, l.delta, l.x_norm, NULL, l.scale_updates);
    scale_channels(l, l.scales, l.delta);
    fill(l.out_c, 0.0f, l.mean_delta);
    sum_channels(l, l.delta, NULL, NULL, l.mean_delta);
    fill(l.out_c, 0.0f, l.variance_delta);
    sum_channels(l, l.delta, l.x, l.mean, l.variance_delta);
    for (int i = 0; i < l.batch * l.out_c; ++i) {
        const int c = i % l.out_c;
        const float spread = sqrtf(l.variance[c] + batchnorm_epsilon);
        const float mean_delta = -l.mean_delta[c] / spread / (float)count;
        const float slope = -l.variance_delta[c] / (spread * spread * spread) / (float)count;
        for (int j = i * spatial; j < (i + 1) * spatial; ++j) {
            l.delta[j] = l.delta[j] / spread + slope * (l.x[j] - l.mean[c]) + mean_delta;
        }
    }
}

/* What convolutional and connected layers do after their product. */
static void scale_and_activate(layer l) {
    if (l.scales != NULL) {
        copy(l.outputs * l.batch, l.x_norm, l.output);
        scale_channels(l, l.scales, l.output);
    }
    add_channels(l, l.biases, l.output);
    activate(l);
}

static void forward_tail(layer l, network net) {
    if (l.scales != NULL) {
        forward_batchnorm(l, net);
    }
    scale_and_activate(l);
}

static void backward_tail(layer l) {
    activate_backward(l);
    sum_channels(l, l.delta, NULL, NULL, l.bias_updates);
    if (l.scales != NULL) {
        backward_batchnorm(l);
    }
}

/* Two callers, this trainer and the adapter: with -ffast-math a compiler may round otherwise in each
   copy that it makes of a function, unless the function is in a file of its own, or is not inlined. */
#if defined(__GNUC__)
#define NOT_INLINED __attribute__((noinline))
#elif defined(_MSC_VER)
#define NOT_INLINED __declspec(noinline)
#else
#define NOT_INLINED
#endif

/* The updates keep the momentum: the next backward adds to what is left in them. */
NOT_INLINED static void sgd(int count, float *values, float *updates, float decay,
                            update_args args) {
    axpy(count, -decay * (float)args.batch, values, updates);
    axpy(count, args.learning_rate / (float)args.batch, updates, values);
    scal(count, args.momentum, updates);
}

static void update_weights(layer l, update_args args) {
    sgd(l.nweights, l.weights, l.weight_updates, args.decay, args);
    sgd(l.out_c, l.biases, l.bias_updates, 0.0f, args);
    if (l.scales != NULL) {
        sgd(l.out_c, l.scales, l.scale_updates, 0.0f, args);
    }
}

/* columns (c size size, out_h out_w) of one image (c, h, w); back: image += columns. */
static void im2col(layer l, float *image, float *columns, bool back) {
    const int spatial = l.out_h * l.out_w;
    for (int row = 0; row < l.c * l.size * l.size; ++row) {
        const int dx = row % l.size - l.pad, dy = row / l.size % l.size - l.pad;
        float *channel = image + row / (l.size * l.size) * l.h * l.w;
        for (int i = 0; i < spatial; ++i) {
            const int y = i / l.out_w * l.stride + dy, x = i % l.out_w * l.stride + dx;
            const bool inside = y >= 0 && y < l.h && x >= 0 && x < l.w;
            if (!back) {
                columns[row * spatial + i] = inside ? channel[y * l.w + x] : 0.0f;
            } else if (inside) {
                channel[y * l.w + x] += columns[row * spatial + i];
            }
        }
    }
}

/* Whether the columns of an image are the image itself. */
static bool is_pointwise(layer l) {
    return l.type == CONVOLUTIONAL && l.size == 1 && l.stride == 1;
}

static const float *columns_of(layer l, network net, int b) {
    float *image = net.input + b * l.inputs;
    if (is_pointwise(l)) {
        return image;
    }
    im2col(l, image, net.workspace, false);
    return net.workspace;
}

static void forward_convolutional(layer l, network net) {
    const int spatial = l.out_h * l.out_w, k = l.size * l.size * l.c;
    fill(l.outputs * l.batch, 0.0f, l.output);
    for (int b = 0; b < l.batch; ++b) {
        const float *columns = columns_of(l, net, b);
        gemm_nn(l.out_c, spatial, k, l.weights, columns, l.output + b * l.outputs);
    }
    forward_tail(l, net);
}

/* As in darknet, a 1x1 convolution writes its product to the delta of its input, and does not add
   it: what a later layer that reads the same input has added there is lost. */
static void backward_convolutional(layer l, network net) {
    const int spatial = l.out_h * l.out_w, k = l.size * l.size * l.c;
    backward_tail(l);
    for (int b = 0; b < l.batch; ++b) {
        const float *delta = l.delta + b * l.outputs;
        gemm_nt(l.out_c, k, spatial, delta, columns_of(l, net, b), l.weight_updates);
        if (net.delta != NULL) {
            float *image = net.delta + b * l.inputs;
            float *product = is_pointwise(l) ? image : net.workspace;
            fill(k * spatial, 0.0f, product);
            gemm_tn(k, spatial, l.out_c, l.weights, delta, product);
            if (product != image) {
                im2col(l, image, product, true);
            }
        }
    }
}

static void forward_connected(layer l, network net) {
    fill(l.outputs * l.batch, 0.0f, l.output);
    gemm_nt(l.batch, l.outputs, l.inputs, net.input, l.weights, l.output);
    forward_tail(l, net);
}

static void backward_connected(layer l, network net) {
    backward_tail(l);
    gemm_tn(l.outputs, l.inputs, l.batch, l.delta, net.input, l.weight_updates);
    if (net.delta != NULL) {
        gemm_nn(l.batch, l.inputs, l.outputs, l.delta, l.weights, net.delta);
    }
}

static void forward_maxpool(layer l, network net) {
    const int spatial = l.out_h * l.out_w;
    for (int i = 0; i < l.outputs * l.batch; ++i) {
        const int y = i % spatial / l.out_w * l.stride, x = i % l.out_w * l.stride;
        const int corner = i / spatial * l.h * l.w + y * l.w + x;
        int best = corner;
        for (int j = 0; j < l.size * l.size; ++j) {
            const int at = corner + j / l.size * l.w + j % l.size;
            const bool inside = y + j / l.size < l.h && x + j % l.size < l.w;
            best = inside && net.input[at] > net.input[best] ? at : best;
        }
        l.indexes[i] = best;
        l.output[i] = net.input[best];
    }
}

static void backward_maxpool(layer l, network net) {
    for (int i = 0; i < l.outputs * l.batch; ++i) {
        net.delta[l.indexes[i]] += l.delta[i];
    }
}

/* In place, on an output in forward and on its delta in backward. */
static void drop(layer l, float *x) {
    for (int i = 0; i < l.outputs * l.batch; ++i) {
        x[i] = l.rand[i] < l.probability ? 0.0f : x[i] / (1.0f - l.probability);
    }
}

static void forward_dropout(layer l, network net) {
    if (net.train) {
        for (int i = 0; i < l.outputs * l.batch; ++i) {
            l.rand[i] = rand_uniform(0.0f, 1.0f);
        }
        drop(l, net.input);
    }
}

static void backward_dropout(layer l, network net) {
    drop(l, net.delta);
}

static void forward_shortcut(layer l, network net) {
    copy(l.outputs * l.batch, net.input, l.output);
    axpy(l.outputs * l.batch, 1.0f, net.layers[l.from].output, l.output);
    activate(l);
}

static void backward_shortcut(layer l, network net) {
    activate_backward(l);
    axpy(l.outputs * l.batch, 1.0f, l.delta, net.delta);
    axpy(l.outputs * l.batch, 1.0f, l.delta, net.layers[l.from].delta);
}

/* Softmax, cross-entropy with the truth, and delta = truth - output. */
static void forward_softmax(layer l, network net) {
    *l.cost = 0.0f;
    for (int b = 0; b < l.batch; ++b) {
        const float *x = net.input + b * l.inputs, *truth = net.truth + b * l.inputs;
        float *output = l.output + b * l.inputs, *loss = l.loss + b * l.inputs;
        float largest = -FLT_MAX, sum = 0.0f;
        for (int i = 0; i < l.inputs; ++i) {
            largest = x[i] > largest ? x[i] : largest;
        }
        for (int i = 0; i < l.inputs; ++i) {
            output[i] = expf(x[i] - largest);
            sum += output[i];
        }
        for (int i = 0; i < l.inputs; ++i) {
            output[i] /= sum;
            loss[i] = truth[i] > 0.0f ? -logf(fmaxf(output[i], FLT_MIN)) : 0.0f;
            *l.cost += loss[i];
        }
        for (int i = 0; net.train && i < l.inputs; ++i) {
            l.delta[b * l.inputs + i] = truth[i] - output[i];
        }
    }
}

static void backward_softmax(layer l, network net) {
    axpy(l.inputs * l.batch, 1.0f, l.delta, net.delta);
}

// ---- the network --------------------------------------------------------------------------------

/* One line of a configuration. */
typedef struct layer_spec {
    layer_type type;
    int filters, size, stride;
    bool normalize;
    activation_kind activation;
    int from;
    float probability;
} layer_spec;

static void make_weights(layer *l, int inputs_per_output) {
    const float scale = sqrtf(6.0f / (float)inputs_per_output);
    l->nweights = inputs_per_output * l->out_c;
    l->weights = floats(l->nweights), l->weight_updates = floats(l->nweights);
    l->biases = floats(l->out_c), l->bias_updates = floats(l->out_c);
    for (int i = 0; i < l->nweights; ++i) {
        l->weights[i] = rand_uniform(-scale, scale);
    }
    l->update = update_weights;
}

static void make_batchnorm(layer *l) {
    l->scales = floats(l->out_c), l->scale_updates = floats(l->out_c);
    l->rolling_mean = floats(l->out_c), l->rolling_variance = floats(l->out_c);
    l->mean_delta = floats(l->out_c), l->variance_delta = floats(l->out_c);
    fill(l->out_c, 1.0f, l->scales);
    l->x = activations(l, l->outputs * l->batch), l->x_norm = activations(l, l->outputs * l->batch);
    l->mean = activations(l, l->out_c), l->variance = activations(l, l->out_c);
}

static void size_layer(layer *l, const layer_spec *spec) {
    l->size = spec->size, l->stride = spec->stride;
    l->out_h = l->h, l->out_w = l->w, l->out_c = l->c;
    if (spec->type == CONVOLUTIONAL) {
        l->pad = spec->size / 2;
        l->out_h = (l->h + 2 * l->pad - l->size) / l->stride + 1;
        l->out_w = (l->w + 2 * l->pad - l->size) / l->stride + 1;
        l->out_c = spec->filters;
    } else if (spec->type == CONNECTED) {
        l->out_h = l->out_w = 1, l->out_c = spec->filters;
    } else if (spec->type == MAXPOOL) {
        l->out_h = (l->h - 1) / l->stride + 1, l->out_w = (l->w - 1) / l->stride + 1;
    }
    l->inputs = l->h * l->w * l->c, l->outputs = l->out_h * l->out_w * l->out_c;
}

/* Fills in the buffers of one type; size and extents are set. */
static void make_layer(layer *l, const layer *previous) {
    static void (*const passes[][2])(layer,
                                     network) = {{forward_convolutional, backward_convolutional},
                                                 {forward_connected, backward_connected},
                                                 {forward_maxpool, backward_maxpool},
                                                 {forward_dropout, backward_dropout},
                                                 {forward_shortcut, backward_shortcut},
                                                 {forward_softmax, backward_softmax}};
    const int count = l->outputs * l->batch, area = l->size * l->size;
    l->forward = passes[l->type][0], l->backward = passes[l->type][1];
    if (l->type == DROPOUT) {
        l->output = previous->output, l->delta = previous->delta;
        l->rand = activations(l, count);
        return;
    }
    l->output = activations(l, count), l->delta = activations(l, count);
    if (l->type == CONVOLUTIONAL) {
        const int columns = is_pointwise(*l) ? 0 : area * l->c * l->out_h * l->out_w;
        make_weights(l, area * l->c);
        l->workspace_bytes = (size_t)columns * sizeof(float);
    } else if (l->type == CONNECTED) {
        make_weights(l, l->inputs);
    } else if (l->type == MAXPOOL) {
        l->indexes = (int *)zeroed((size_t)count * sizeof(int));
        l->activation_bytes += (size_t)count * sizeof(int);
    } else if (l->type == SOFTMAX) {
        l->loss = activations(l, count), l->cost = floats(1);
    }
}

/* A network for images of 3 colours, size by size; the last layer is a softmax. */
static network *make_network(const layer_spec *specs, int n, int batch, int size, unsigned seed) {
    network *net = (network *)zeroed(sizeof *net);
    net->layers = (layer *)zeroed((size_t)n * sizeof(layer));
    net->random = (char *)zeroed(RANDOM_BYTES);
    char *outer = initstate(seed, net->random, RANDOM_BYTES);
    net->n = n, net->batch = net->args.batch = batch, net->train = 1;
    net->args.momentum = 0.9f, net->args.decay = 0.0005f;
    net->h = net->w = size, net->c = 3;
    for (int i = 0; i < n; ++i) {
        layer *l = &net->layers[i], *previous = i > 0 ? l - 1 : NULL;
        l->type = specs[i].type, l->activation = specs[i].activation, l->batch = batch;
        l->from = specs[i].from, l->probability = specs[i].probability;
        l->h = previous ? previous->out_h : size, l->w = previous ? previous->out_w : size;
        l->c = previous ? previous->out_c : net->c;
        size_layer(l, &specs[i]);
        make_layer(l, previous);
        if (specs[i].normalize) {
            make_batchnorm(l);
        }
        net->workspace_bytes =
            l->workspace_bytes > net->workspace_bytes ? l->workspace_bytes : net->workspace_bytes;
    }
    setstate(outer);
    net->classes = net->layers[n - 1].outputs;
    net->input = floats(batch * net->layers[0].inputs), net->truth = floats(batch * net->classes);
    net->workspace = (float *)zeroed(net->workspace_bytes);
    return net;
}

/* To be called once, before layers point to memory that is not the network's. */
static void free_activations(network *net) {
    for (int i = 0; net->workspace != NULL && i < net->n; ++i) {
        layer *l = &net->layers[i];
        if (l->type != DROPOUT) {
            free(l->output), free(l->delta);
        }
        free(l->x), free(l->x_norm), free(l->mean), free(l->variance);
        free(l->indexes), free(l->rand), free(l->loss);
    }
    free(net->workspace);
    net->workspace = NULL;
}

static void free_network(network *net) {
    free_activations(net);
    for (int i = 0; i < net->n; ++i) {
        layer *l = &net->layers[i];
        free(l->weights), free(l->weight_updates), free(l->biases), free(l->bias_updates);
        free(l->scales), free(l->scale_updates), free(l->mean_delta), free(l->variance_delta);
        free(l->rolling_mean), free(l->rolling_variance), free(l->cost);
    }
    free(net->layers), free(net->random), free(net->input), free(net->truth), free(net);
}

static void forward_network(network *netp) {
    network net = *netp;
    char *outer = setstate(net.random);
    for (int i = 0; i < net.n; ++i) {
        layer l = net.layers[net.index = i];
        if (net.train && l.type != DROPOUT) {
            fill(l.outputs * l.batch, 0.0f, l.delta);
        }
        l.forward(l, net);
        net.input = l.output;
    }
    setstate(outer);
}

static void backward_network(network *netp) {
    network net = *netp;
    for (int i = net.n - 1; i >= 0; --i) {
        net.input = i > 0 ? net.layers[i - 1].output : netp->input;
        net.delta = i > 0 ? net.layers[i - 1].delta : NULL;
        net.index = i;
        net.layers[i].backward(net.layers[i], net);
    }
}

static void update_network(network *net) {
    for (int i = 0; i < net->n; ++i) {
        if (net->layers[i].update != NULL) {
            net->layers[i].update(net->layers[i], net->args);
        }
    }
}

/* Sum of the losses of the last batch. */
static float network_cost(const network *net) {
    return *net->layers[net->n - 1].cost;
}

// ==== adapter, begin
// The layers' own functions run unchanged; bind points their struct at memscale.h's memory first.

static float *data_of(const ms_view *views, int i) {
    return views != NULL ? (float *)views[i].data : NULL;
}

/* The layer whose output a shortcut reads: a dropout shares that of the layer before it. */
static int source_of(const network *net, const layer *l) {
    return l->from + (net->layers[l->from + 1].type == DROPOUT);
}

/* Whether backward of the next layer wipes what a shortcut adds to the delta of its source. */
static bool is_wiped(const network *net, const layer *l) {
    return l->type == SHORTCUT && is_pointwise(net->layers[source_of(net, l) + 1]);
}

static int bind_layer(const ms_call *call) {
    network *net = (network *)call->user;
    layer *l = &net->layers[net->index];
    net->train = call->phase != MS_PHASE_EVAL, net->workspace = (float *)call->workspace;
    net->input = data_of(call->in, 0), net->delta = data_of(call->grad_in, 0);
    l->output = data_of(call->out, 0), l->delta = data_of(call->grad_out, 0);
    if (l->scales != NULL) {
        l->x = data_of(call->saved, 0);
        l->mean = data_of(call->saved, 1), l->variance = data_of(call->saved, 2);
        l->x_norm = call->phase == MS_PHASE_BACKWARD ? net->workspace : l->output;
    } else if (l->type == MAXPOOL || l->type == DROPOUT) {
        l->indexes = (int *)call->saved[0].data, l->rand = data_of(call->saved, 0);
    } else if (l->type == SHORTCUT) {
        net->layers[l->from].output = data_of(call->in, 1);
        net->layers[l->from].delta = is_wiped(net, l) ? l->delta : data_of(call->grad_in, 1);
    } else if (l->type == SOFTMAX) { // its delta is that of its input
        net->truth = data_of(call->in, 1), l->loss = data_of(call->out, 1), l->delta = net->delta;
    }
    return 0;
}

/* The layer, and in it what lies in borrowed memory. */
static layer layer_of(const ms_call *call, network *net) {
    *net = *(network *)call->user;
    layer l = net->layers[net->index];
    l.weights = data_of(call->param, 0), l.weight_updates = data_of(call->grad_param, 0);
    l.biases = data_of(call->param, 1), l.bias_updates = data_of(call->grad_param, 1);
    l.scales = data_of(call->param, 2), l.scale_updates = data_of(call->grad_param, 2);
    l.rolling_mean = data_of(call->state, 0), l.rolling_variance = data_of(call->state, 1);
    return l;
}

/* x_norm is made again from x, in the workspace, where im2col overwrites it when it is used up. */
static int run_layer(const ms_call *call) {
    network net;
    const layer l = layer_of(call, &net);
    const bool back = call->phase == MS_PHASE_BACKWARD;
    if (l.scales != NULL && back) {
        normalize(l, l.mean, l.variance);
    }
    char *outer = l.type == DROPOUT && !back ? setstate((char *)call->state[0].data) : NULL;
    (back ? l.backward : l.forward)(l, net);
    (void)(outer != NULL ? setstate(outer) : NULL); // notes in state how far it has come
    return 0;
}

/* The output once more, from what forward saved: without the convolution, or drawing nothing. */
static int remake_layer(const ms_call *call) {
    network net;
    const layer l = layer_of(call, &net);
    if (l.scales != NULL) {
        normalize(l, l.mean, l.variance);
        scale_and_activate(l);
    } else {
        drop(l, net.input);
    }
    return 0;
}

static int update_param(const ms_update_args *a) {
    sgd((int)a->count, a->value, a->gradient, a->weight_decay, *(const update_args *)a->user);
    return 0;
}

static ms_tensor borrow(ms_model *m, ms_tensor tensor, void *memory) {
    const ms_result sticks = ms_borrow(m, tensor, memory);
    (void)sticks; // errors stick until ms_wrap
    return tensor;
}

static ms_tensor add_param(ms_model *m, int count, float *values, float *updates, float decay) {
    const ms_tensor param = ms_param(m, "param", MS_DTYPE_F32, ms_shape1(count));
    ms_set_weight_decay(m, param, decay);
    borrow(m, ms_gradient(m, param), updates); // never zeroed: the momentum stays
    return borrow(m, param, values);
}

static void add_layer(ms_model *m, network *net, ms_tensor *outputs, ms_tensor random) {
    const layer *l = &net->layers[net->index];
    const ms_shape out = ms_shape2(l->batch, l->outputs), channels = ms_shape1(l->out_c);
    const uint64_t x_norm = l->scales != NULL ? ms_shape_count(&out) * sizeof(float) : 0;
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.forward = d.backward = run_layer, d.bind = bind_layer, d.user = net;
    d.in[0] = outputs[net->index], d.surrogate_gradient = is_wiped(net, l);
    d.out[0] = outputs[net->index + 1] = ms_activation(m, "output", MS_DTYPE_F32, out);
    d.forward_workspace.bytes = l->workspace_bytes;
    d.backward_workspace.bytes = x_norm > l->workspace_bytes ? x_norm : l->workspace_bytes;
    d.backward_reads.out = l->activation == LEAKY, d.backward_reads.saved = MS_ALL_SLOTS;
    d.clobbers.grad_out = l->activation == LEAKY || l->scales != NULL || is_wiped(net, l);
    d.accumulates.param = MS_ALL_SLOTS, d.overwrites.in = is_pointwise(*l);
    d.accumulates.in = is_pointwise(*l) ? 0 : MS_ALL_SLOTS;
    if (l->weights != NULL) {
        d.backward_reads.in = d.backward_reads.param = MS_ALL_SLOTS;
        d.param[0] = add_param(m, l->nweights, l->weights, l->weight_updates, net->args.decay);
        d.param[1] = add_param(m, l->out_c, l->biases, l->bias_updates, 0.0f);
    }
    if (l->scales != NULL) {
        d.param[2] = add_param(m, l->out_c, l->scales, l->scale_updates, 0.0f);
        d.saved[0] = ms_saved(m, "x", MS_DTYPE_F32, out);
        d.saved[1] = ms_saved(m, "mean", MS_DTYPE_F32, channels);
        d.saved[2] = ms_saved(m, "variance", MS_DTYPE_F32, channels);
        d.state[0] = borrow(m, ms_buffer(m, "mean", MS_DTYPE_F32, channels), l->rolling_mean);
        d.state[1] = borrow(m, ms_buffer(m, "var", MS_DTYPE_F32, channels), l->rolling_variance);
        d.recompute_reads.saved = d.recompute_reads.param = MS_ALL_SLOTS;
        d.recompute = remake_layer;
    } else if (l->type == MAXPOOL) {
        d.saved[0] = ms_saved(m, "indexes", MS_DTYPE_I32, out);
    } else if (l->type == DROPOUT) { // in place, both ways
        d.in_place[0] = d.must_in_place = d.grad_in_place[0].grad_out = d.must_grad_in_place = 1;
        d.saved[0] = ms_saved(m, "rand", MS_DTYPE_F32, out);
        d.state[0] = random, d.accumulates.in = 0;
        d.recompute = remake_layer, d.recompute_reads.in = d.recompute_reads.saved = 1;
    } else if (l->type == SHORTCUT) {
        d.in[1] = outputs[source_of(net, l) + 1], d.in_place[0] = 1;
    } else if (l->type == SOFTMAX) { // writes its delta in forward: truth - output, of the sum
        d.in[1] = borrow(m, ms_input(m, "truth", MS_DTYPE_F32, out), net->truth), d.backward = NULL;
        d.out[1] = outputs[net->index + 2] = ms_activation(m, "loss", MS_DTYPE_F32, out);
        d.grads_in_forward = d.overwrites.in = d.surrogate_gradient = 1, d.accumulates.in = 0;
    }
    ms_register_layer(m, &d);
}

/* copies: n networks, one for each layer; outputs: n + 2, with the input and the loss. */
static ms_result wrap_network(ms_model *m, network *net, network *copies, ms_tensor *outputs) {
    const ms_shape images = ms_shape2(net->batch, net->layers[0].inputs);
    const ms_tensor random = ms_buffer(m, "random", MS_DTYPE_U8, ms_shape1(RANDOM_BYTES));
    ms_set_on_host(m, borrow(m, random, net->random));
    ms_optimizer_desc own;
    memset(&own, 0, sizeof own);
    own.kind = MS_OPTIMIZER_CUSTOM, own.update = update_param, own.user = &net->args;
    ms_set_optimizer(m, &own);
    ms_set_loss_factor(m, 1.0f); // the sum over the batch; sgd divides by its size
    free_activations(net);
    outputs[0] = borrow(m, ms_input(m, "input", MS_DTYPE_F32, images), net->input);
    for (int i = 0; i < net->n; ++i) {
        copies[i] = *net, copies[i].index = i;
        add_layer(m, &copies[i], outputs, random);
    }
    ms_add_eval_output(m, outputs[net->n]), ms_set_loss(m, outputs[net->n + 1]);
    return ms_wrap(m);
}
// ==== adapter, end

// ---- images -------------------------------------------------------------------------------------

enum { CLASSES = 8, IMAGE_SIZE = 24 };

/* Whether a point, the figure being about the unit circle, belongs to figure number `kind`. */
static bool in_figure(int kind, float x, float y) {
    const float radius = sqrtf(x * x + y * y), wide = fmaxf(fabsf(x), fabsf(y));
    const float thin = fminf(fabsf(x), fabsf(y));
    switch (kind) {
    case 0: // disc
        return radius < 1.0f;
    case 1: // ring
        return radius < 1.0f && radius > 0.6f;
    case 2: // square
        return wide < 0.9f;
    case 3: // frame
        return wide < 0.9f && wide > 0.5f;
    case 4: // plus
        return wide < 1.0f && thin < 0.3f;
    case 5: // cross
        return wide < 0.9f && wide - thin < 0.35f;
    case 6: // horizontal bars
        return wide < 0.9f && fmodf(y + 0.9f, 0.72f) < 0.36f;
    default: // vertical bars
        return wide < 0.9f && fmodf(x + 0.9f, 0.72f) < 0.36f;
    }
}

/* Image number `number`, (3, size, size), between -1 and 1 and noise: a figure of some colour on
   ground of another, somewhere. Returns its class. */
static int draw_image(uint64_t number, int classes, int size, float *pixels) {
    uint64_t random = (number + 1u) * 0x9e3779b97f4a7c15u | 1u;
    (void)draw(&random), (void)draw(&random);
    const int kind = (int)(draw(&random) >> 33) % classes;
    const float radius = draw_uniform(&random, 0.25f, 0.42f) * (float)size;
    const float left = draw_uniform(&random, 0.4f, 0.6f) * (float)size;
    const float top = draw_uniform(&random, 0.4f, 0.6f) * (float)size;
    for (int c = 0; c < 3; ++c) {
        const float ground = draw_uniform(&random, -0.6f, 0.6f);
        const float contrast = draw_uniform(&random, 0.3f, 0.9f);
        const float colour = ground > 0.0f ? ground - contrast : ground + contrast;
        for (int i = 0; i < size * size; ++i) {
            const float x = ((float)(i % size) + 0.5f - left) / radius;
            const float y = ((float)(i / size) + 0.5f - top) / radius;
            *pixels++ =
                (in_figure(kind, x, y) ? colour : ground) + draw_uniform(&random, -0.25f, 0.25f);
        }
    }
    return kind;
}

/* Fills net->input and net->truth with the images from number `first` on. */
static void load_batch(network *net, uint64_t first) {
    const int inputs = net->layers[0].inputs;
    fill(net->batch * net->classes, 0.0f, net->truth);
    for (int b = 0; b < net->batch; ++b) {
        const int kind =
            draw_image(first + (uint64_t)b, net->classes, net->h, net->input + b * inputs);
        net->truth[b * net->classes + kind] = 1.0f;
    }
}

/* The number of images of the batch whose largest output is that of the right class. */
static int count_right(const network *net, const float *outputs) {
    int right = 0;
    for (int b = 0; b < net->batch; ++b) {
        const float *output = outputs + b * net->classes;
        int best = 0;
        for (int i = 1; i < net->classes; ++i) {
            best = output[i] > output[best] ? i : best;
        }
        right += net->truth[b * net->classes + best] > 0.0f;
    }
    return right;
}

// ---- a run: a network by itself, or wrapped -----------------------------------------------------

/* type, filters, size, stride, batch-norm, activation, from, probability */
static const layer_spec default_layers[] = {{CONVOLUTIONAL, 16, 3, 1, true, LEAKY, 0, 0.0f},
                                            {CONVOLUTIONAL, 16, 3, 1, true, LEAKY, 0, 0.0f},
                                            {MAXPOOL, 0, 2, 2, false, LINEAR, 0, 0.0f},
                                            {DROPOUT, 0, 0, 0, false, LINEAR, 0, 0.1f},
                                            {CONVOLUTIONAL, 32, 3, 1, true, LEAKY, 0, 0.0f},
                                            {CONVOLUTIONAL, 16, 1, 1, true, LEAKY, 0, 0.0f},
                                            {CONVOLUTIONAL, 32, 3, 1, true, LINEAR, 0, 0.0f},
                                            {SHORTCUT, 0, 0, 0, false, LEAKY, 4, 0.0f},
                                            {MAXPOOL, 0, 2, 2, false, LINEAR, 0, 0.0f},
                                            {CONVOLUTIONAL, 64, 3, 1, true, LEAKY, 0, 0.0f},
                                            {CONVOLUTIONAL, 32, 1, 1, true, LEAKY, 0, 0.0f},
                                            {CONVOLUTIONAL, 64, 3, 1, true, LINEAR, 0, 0.0f},
                                            {SHORTCUT, 0, 0, 0, false, LEAKY, 9, 0.0f},
                                            {CONVOLUTIONAL, 64, 3, 2, true, LEAKY, 0, 0.0f},
                                            {DROPOUT, 0, 0, 0, false, LINEAR, 0, 0.3f},
                                            {CONNECTED, 64, 0, 0, true, LEAKY, 0, 0.0f},
                                            {CONNECTED, CLASSES, 0, 0, false, LINEAR, 0, 0.0f},
                                            {SOFTMAX, 0, 0, 0, false, LINEAR, 0, 0.0f}};

enum { DEFAULT_LAYERS = (int)(sizeof default_layers / sizeof default_layers[0]) };

typedef struct run {
    network *net;
    ms_model *model; // NULL: the trainer by itself
    network *copies;
    ms_tensor *outputs;
    double seconds; // of all steps
} run;

static void open_run(run *r, const layer_spec *specs, int n, int batch, int size) {
    memset(r, 0, sizeof *r);
    r->net = make_network(specs, n, batch, size, 1);
}

/* Registers the network of a run with memscale.h. */
static ms_result wrap_run(run *r, const ms_config *config) {
    const ms_result result = ms_create(config, &r->model);
    if (result != MS_RESULT_OK) {
        return result;
    }
    r->copies = (network *)zeroed((size_t)r->net->n * sizeof(network));
    r->outputs = (ms_tensor *)zeroed((size_t)(r->net->n + 2) * sizeof(ms_tensor));
    return wrap_network(r->model, r->net, r->copies, r->outputs);
}

static void close_run(run *r) {
    ms_destroy(r->model);
    free_network(r->net);
    free(r->copies), free(r->outputs);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* One step on the present batch. */
static ms_result train_step(run *r) {
    ms_result result = MS_RESULT_OK;
    const double begin = now();
    if (r->model != NULL) {
        result = ms_step(r->model, NULL);
    } else {
        r->net->train = 1;
        forward_network(r->net);
        backward_network(r->net);
        update_network(r->net);
    }
    r->seconds += now() - begin;
    return result;
}

/* Adds to *right how many images of the present batch are classified right. */
static ms_result test_step(run *r, int *right) {
    network *net = r->net;
    if (r->model == NULL) {
        net->train = 0;
        forward_network(net);
        *right += count_right(net, net->layers[net->n - 1].output);
        return MS_RESULT_OK;
    }
    ms_result result = ms_eval(r->model, NULL);
    float *outputs = floats(net->batch * net->classes);
    if (result == MS_RESULT_OK) {
        result = ms_read(r->model, r->outputs[net->n], outputs);
        *right += count_right(net, outputs);
    }
    free(outputs);
    return result;
}

// ---- options ------------------------------------------------------------------------------------

typedef struct options {
    bool wrap, compare, debug;
    int steps, batch;
    option_budget budget;
} options;

enum { MOST_IMAGES = 1024 };

static bool parse_options(options *o, int argc, char **argv) {
    int64_t steps = 0, batch = 32;
    memset(o, 0, sizeof *o);
    const option_spec specs[] = {
        {"--wrap", NULL, OPTION_FLAG, &o->wrap, "train in memory that memscale.h plans"},
        {"--budget", "SIZE", OPTION_BUDGET, &o->budget,
         OPTION_BUDGET_HELP ":\nactivations, their gradients and scratch memory; implies --wrap. "
                            "Without it\nnothing is recomputed"},
        {"--compare", NULL, OPTION_FLAG, &o->compare,
         "compare the trainer by itself with wrapped ones, bit by bit"},
        {"--steps", "N", OPTION_COUNT, &steps, "updates (150; with --compare 20)"},
        {"--batch", "N", OPTION_COUNT, &batch, "images per step"},
        {"--debug", NULL, OPTION_FLAG, &o->debug, OPTION_DEBUG_HELP ";\nimplies --wrap"},
    };
    if (take_options(
            "[options]\nA trainer in the shape of darknet, by itself or run by memscale.h.", specs,
            OPTIONS_IN(specs), argc, argv, NULL) != 0 ||
        check_most("--batch", batch, MOST_IMAGES) != 0) {
        return false;
    }
    o->wrap = o->wrap || o->debug || has_budget(&o->budget);
    o->batch = (int)batch;
    o->steps = steps > 0 ? (int)steps : o->compare ? 20 : 150;
    return true;
}

static int fail_run(const ms_model *model, ms_result result) {
    return fail("%s: %s", ms_result_name(result), ms_last_error(model));
}

// ---- training -----------------------------------------------------------------------------------

/* A short linear rise, then a linear fall to zero. */
static float rate_at(int step, int steps) {
    const float rate = 0.05f * (1.0f - (float)step / (float)steps);
    return step < 10 ? rate * (float)(step + 1) / 10.0f : rate;
}

static ms_result test(run *r, int batches) {
    int right = 0;
    for (int i = 0; i < batches; ++i) {
        load_batch(r->net, ((uint64_t)1 << 40) + (uint64_t)(i * r->net->batch));
        const ms_result result = test_step(r, &right);
        if (result != MS_RESULT_OK) {
            return result;
        }
    }
    printf("%d of %d unseen images are classified right: %.1f %%\n", right, batches * r->net->batch,
           100.0 * right / (batches * r->net->batch));
    return MS_RESULT_OK;
}

static size_t own_bytes(const network *net) {
    size_t bytes = 0;
    for (int i = 0; i < net->n; ++i) {
        bytes += net->layers[i].activation_bytes;
    }
    return bytes;
}

static int train(const options *o) {
    run r;
    open_run(&r, default_layers, DEFAULT_LAYERS, o->batch, IMAGE_SIZE);
    printf("the trainer's own buffers: %.2f MiB of activations and %.2f MiB of workspace\n",
           (double)own_bytes(r.net) / 1048576.0, (double)r.net->workspace_bytes / 1048576.0);
    ms_result result = MS_RESULT_OK;
    if (o->wrap) {
        ms_config config;
        memset(&config, 0, sizeof config);
        config.memory_budget_bytes = o->budget.bytes;
        config.log = log_warnings;
        config.debug = o->debug;
        result = wrap_run(&r, &config);
        result = result == MS_RESULT_OK ? wrap_in(&o->budget, r.model) : result;
        ms_memory_report report;
        if (result == MS_RESULT_OK && ms_report(r.model, &report) == MS_RESULT_OK) {
            printf("wrapped: an arena of %.2f MiB for both; %u recomputations\n",
                   ceil((double)report.arena_bytes / 10485.76) / 100.0, report.recompute_count);
        }
    }
    for (int step = 0; step < o->steps && result == MS_RESULT_OK; ++step) {
        load_batch(r.net, (uint64_t)(step * o->batch));
        r.net->args.learning_rate = rate_at(step, o->steps);
        result = train_step(&r);
        if (step % 10 == 9 || step + 1 == o->steps) {
            printf("step %4d  loss %.4f\n", step + 1,
                   (double)network_cost(r.net) / (double)o->batch);
        }
    }
    result = result == MS_RESULT_OK ? test(&r, 16) : result;
    const int code = result == MS_RESULT_OK ? 0 : fail_run(r.model, result);
    if (code == 0) {
        print_debugged(o->debug);
        printf("%.1f ms a step\n", 1e3 * r.seconds / o->steps);
    }
    close_run(&r);
    return code;
}

// ---- comparing ----------------------------------------------------------------------------------

enum { PLAIN, KEPT, HALF, SMALLEST, RUNS };

static bool same_floats(const float *a, const float *b, int count) {
    return a == NULL || memcmp(a, b, (size_t)count * sizeof(float)) == 0;
}

/* Params, gradients with their momentum, statistics and the generator, bit by bit. */
static bool same_networks(const network *a, const network *b) {
    bool same = memcmp(a->random, b->random, RANDOM_BYTES) == 0;
    for (int i = 0; i < a->n; ++i) {
        const layer *x = &a->layers[i], *y = &b->layers[i];
        same = same && same_floats(x->weights, y->weights, x->nweights) &&
               same_floats(x->weight_updates, y->weight_updates, x->nweights) &&
               same_floats(x->biases, y->biases, x->out_c) &&
               same_floats(x->bias_updates, y->bias_updates, x->out_c) &&
               same_floats(x->scales, y->scales, x->out_c) &&
               same_floats(x->scale_updates, y->scale_updates, x->out_c) &&
               same_floats(x->rolling_mean, y->rolling_mean, x->out_c) &&
               same_floats(x->rolling_variance, y->rolling_variance, x->out_c);
    }
    return same;
}

/* Wraps a run as KEPT (nothing is recomputed), HALF (half way from the smallest arena to that), or
   SMALLEST. */
static ms_result wrap_as(run *r, int kind, bool debug) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.checkpointing = kind == KEPT ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config.log = log_warnings;
    config.debug = debug;
    ms_result result = wrap_run(r, &config);
    uint64_t smallest = 0;
    ms_memory_report report;
    if (kind == KEPT || result != MS_RESULT_OK ||
        (result = ms_report(r->model, &report)) != MS_RESULT_OK ||
        (result = ms_smallest_budget(r->model, &smallest)) != MS_RESULT_OK) {
        return result;
    }
    const uint64_t spread = report.plain_bytes - smallest;
    ms_set_budget(r->model, kind == HALF ? smallest + spread / 2 : smallest);
    return ms_wrap(r->model);
}

static void print_run(const run *r, const run *plain, int kind, bool same, int steps) {
    static const char *const names[RUNS] = {"by itself", "wrapped", "half budget", "smallest"};
    const double own = (double)own_bytes(plain->net);
    const double own_total = own + (double)plain->net->workspace_bytes;
    ms_memory_report report;
    double activation = own, total = own_total;
    unsigned again = 0;
    if (r->model != NULL && ms_report(r->model, &report) == MS_RESULT_OK) {
        activation = (double)report.activation_peak_bytes, total = (double)report.arena_bytes;
        again = report.recompute_count;
    }
    printf("%-12s %11.0f %8.3f %11.0f %8.3f %10u %9.1f  %s\n", names[kind], activation,
           activation / own, total, total / own_total, again, 1e3 * r->seconds / steps,
           kind == PLAIN ? ""
           : same        ? "equal"
                         : "DIFFERENT");
}

static int compare(const options *o) {
    run runs[RUNS];
    bool same[RUNS];
    ms_result result = MS_RESULT_OK;
    int failed = PLAIN, code = 0;
    for (int k = 0; k < RUNS; ++k) {
        same[k] = true;
        open_run(&runs[k], default_layers, DEFAULT_LAYERS, o->batch, IMAGE_SIZE);
        if (k != PLAIN && result == MS_RESULT_OK) {
            failed = k, result = wrap_as(&runs[k], k, o->debug);
        }
    }
    for (int step = 0; step < o->steps && result == MS_RESULT_OK; ++step) {
        for (int k = 0; k < RUNS && result == MS_RESULT_OK; ++k) {
            load_batch(runs[k].net, (uint64_t)(step * o->batch));
            runs[k].net->args.learning_rate = rate_at(step, o->steps);
            failed = k, result = train_step(&runs[k]);
            const float cost = network_cost(runs[k].net), expected = network_cost(runs[PLAIN].net);
            same[k] = same[k] && memcmp(&cost, &expected, sizeof cost) == 0;
        }
    }
    printf("%d steps of %d images; bytes, and their ratio to those of the trainer by itself\n\n"
           "program      activations of plain +workspace of plain recomputed ms a step  losses, "
           "weights\n",
           o->steps, o->batch);
    for (int k = 0; k < RUNS && result == MS_RESULT_OK; ++k) {
        same[k] = same[k] && same_networks(runs[k].net, runs[PLAIN].net);
        print_run(&runs[k], &runs[PLAIN], k, same[k], o->steps);
        code |= !same[k];
    }
    print_debugged(result == MS_RESULT_OK && o->debug);
    code = result == MS_RESULT_OK ? code : fail_run(runs[failed].model, result);
    for (int k = 0; k < RUNS; ++k) {
        close_run(&runs[k]);
    }
    return code;
}

int main(int argc, char **argv) {
    options o;
    if (!parse_options(&o, argc, argv)) {
        return 2;
    }
    return o.compare ? compare(&o) : train(&o);
}
