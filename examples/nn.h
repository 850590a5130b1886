/*  nn.h - layers for memscale.h, on the CPU and with CUDA: those of transformers, with GPT-2 and
    BERT of any size, and those of convolutional nets.

    A single header for the examples, tests and benchmarks; every function is static. It needs the
    declarations of memscale.h, which it includes, and C99 or C++11. With OpenMP the loops run in
    parallel; all matrix products go through ms_gemm.

        ms_model *model;
        ms_create(&config, &model);
        nn_net *net = nn_create(model);
        nn_transformer_config shape = {0};
        nn_preset("gpt2-124M", &shape);
        shape.batch = 4;
        shape.sequence = 64;
        nn_transformer gpt2 = nn_gpt2(net, &shape);        // registers everything, sets the loss
        ms_wrap(model);
        nn_init(net, 1);                                   // initial values of all params
        ms_write(model, gpt2.tokens, tokens);              // int32 (B, T)
        ms_write(model, gpt2.targets, targets);            // int32 (B, T); below 0: does not count
        ms_step(model, &loss);
        ms_destroy(model);
        nn_destroy(net);

    DEVICES. The layers call kernels through a table, nn_device: nn_cpu() of this header, or nn_cuda()
    where a program is linked with cuda.cu, which nvcc compiles from the end of this header. Then
    config.backend = ms_backend_cuda(0) and nn_create_on(model, nn_cuda()) are all that changes. A
    kernel cannot report a token or target that is outside its table: it makes the values of that
    row NaN, so that the step ends with MS_RESULT_NONFINITE, where the CPU returns NN_ERROR_INDEX.

    LAYERS. A layer function registers the layer and its params and returns its output, so that
    calls chain. Where memscale.h lets a mistake stick, nn.h does too: an impossible size or a
    lack of memory returns the handle 0 and comes back as the error of ms_wrap.

    LETTERS. B batch, T sequence, C channels, V vocabulary, H heads, rows = B * T. All shapes are
    row-major; a weight is (out, in). Images are (B, C, height, width).

    AXES. A dim of an input that lies along an axis (ms_along) stays along it in all that is made of
    it, so that ms_reshape can change the batch of any net and the sequence of a transformer. Make
    axes with nn_axis, and before the layers.

    NUMERICS. float32. On the CPU no sum depends on the number of threads: sums over rows (gradients
    of bias, weight of a normalization, embedding) are parallel over columns, each column in the
    order of its rows. On the GPU no sum depends on the order in which blocks run: there are no
    atomics, and partial sums are added up in a second pass. So both give the same bits again, in
    another run and in a recomputation; they differ from each other by rounding, and masks of dropout
    not at all. A block layer has the arithmetic of the operator layers, so without dropout both
    granularities give the same bits. Dropout stands on the embedding and on the two branches of
    each block; attention probabilities have none. Sums over the images of a batch are in double, with
    CUDA those over chunks of 4096 values.
*/
#ifndef MEMSCALE_NN_H
#define MEMSCALE_NN_H

#include "memscale.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(NN_CUDA_IMPLEMENTATION)
#include <cuda_runtime.h>
#endif

#if defined(__GNUC__)
#define NN_API static __attribute__((unused))
#else
#define NN_API static
#endif

#ifdef __cplusplus
#define NN_EXTERN extern "C"
#else
#define NN_EXTERN extern
#endif

/* On the host and, where nvcc compiles, on the device: the same text for both. */
#if defined(__CUDACC__)
#define NN_HD NN_API __host__ __device__ inline
#else
#define NN_HD NN_API inline
#endif

// ------------------------------------------------------------------------------------------------
// >>nn public

/* The params and buffers of a net with their initial distributions, and the options of its
   layers. */
typedef struct nn_net nn_net;

typedef enum nn_init_kind { NN_INIT_ZEROS, NN_INIT_ONES, NN_INIT_NORMAL } nn_init_kind;

/* A param or buffer as it was registered; deviation is that of NN_INIT_NORMAL. */
typedef struct nn_param_info {
    char name[64]; // such as "h0.qkv.weight", "norm1.mean"
    ms_tensor tensor;
    ms_shape shape;
    nn_init_kind init;
    float deviation;
} nn_param_info;

typedef enum nn_granularity {
    NN_OPERATORS, // every operator is a layer
    NN_BLOCKS     // every transformer block is one layer, its inner values are saved tensors
} nn_granularity;

typedef struct nn_transformer_config {
    int64_t vocabulary;
    int64_t context; // rows of the position table; at least the (largest) sequence
    int64_t layers, heads, channels;
    int64_t batch, sequence;
    /* An axis for ms_reshape, up to this size; 0: none, the size is fixed. The axes stand in the
       order batch, sequence. */
    int64_t largest_batch, largest_sequence;
    float dropout; // 0: no dropout layers are registered
    nn_granularity granularity;
    bool save_scores; // attention probabilities are kept for backward; else computed again
} nn_transformer_config;

typedef struct nn_transformer {
    ms_tensor tokens;   // I32 (B, T)
    ms_tensor segments; // I32 (B, T), 0 or 1; BERT alone
    ms_tensor targets;  // I32 (B, T), below 0: ignored
    ms_tensor logits;   // (B, T, V)
    ms_tensor losses;   // (B, T)
} nn_transformer;

/* What callbacks of this file return beside the results of ms_gemm, and of the CUDA runtime. */
enum { NN_ERROR_INDEX = 1001 /* a token or target is outside its table */ };

/* The kernels of a device, and the scratch memory that they ask for. nn_cuda is there where a
   program is linked with examples/cuda.cu; a program that never names it needs no CUDA. */
typedef struct nn_device nn_device;

NN_API const nn_device *nn_cpu(void);
NN_EXTERN const nn_device *nn_cuda(void);

/* nn_cuda without its kernels, but with the scratch memory that they ask for: for dry runs
   (ms_config.dry_run) of what a GPU would train, on machines without one. */
NN_API const nn_device *nn_cuda_dry(void);

/* Makes a net for model; NULL: no memory. nn_create: on the CPU. The device must be that of the
   model's backend. */
NN_API nn_net *nn_create(ms_model *model);
NN_API nn_net *nn_create_on(ms_model *model, const nn_device *device);

/* Frees the net; call it after ms_destroy, since the layers use its options. NULL is fine. */
NN_API void nn_destroy(nn_net *net);

/* Writes initial values into all params and buffers, the same for the same seed on any number of
   threads. Errors: OUT_OF_MEMORY, and those of ms_write. */
NN_API ms_result nn_init(nn_net *net, uint64_t seed);

/* The params in the order of their registration, and one by name (NULL: there is none). */
NN_API int64_t nn_param_count(const nn_net *net);
NN_API const nn_param_info *nn_param_at(const nn_net *net, int64_t index);
NN_API const nn_param_info *nn_find_param(const nn_net *net, const char *name);

/* The same for buffers. */
NN_API int64_t nn_buffer_count(const nn_net *net);
NN_API const nn_param_info *nn_buffer_at(const nn_net *net, int64_t index);
NN_API const nn_param_info *nn_find_buffer(const nn_net *net, const char *name);

/* ms_add_axis, noted in the net: layers that are registered afterwards have workspace for the
   largest size. */
NN_API ms_axis nn_axis(nn_net *net, const char *name, int64_t size, int64_t largest);

/* ms_param, with the initial distribution noted in the net. A param of rank 1 (bias, weight of a
   normalization) has no weight decay. */
NN_API ms_tensor nn_param(nn_net *net, const char *name, ms_shape shape, nn_init_kind init,
                          float deviation);

/* ms_buffer, F32, with initial values. */
NN_API ms_tensor nn_buffer(nn_net *net, const char *name, ms_shape shape, nn_init_kind init);

/* out (B, T, C) = table[tokens] + positions[t] + segment_table[segments].
   tokens and segments are I32 (B, T); table is (V, C), positions (at least T, C), segment_table
   (any, C). positions, and segments with segment_table, may be the handle 0.
   Devlin et al., "BERT", 2018, figure 2; GPT-2 has no segments. */
NN_API ms_tensor nn_embedding(nn_net *net, const char *name, ms_tensor tokens, ms_tensor table,
                              ms_tensor positions, ms_tensor segments, ms_tensor segment_table);

/* out (..., out_features) = x (..., in) * transpose(weight) + bias, with new params
   "<name>.weight" (out, in), normal(0, deviation), and "<name>.bias" (out), zeros. */
NN_API ms_tensor nn_linear(nn_net *net, const char *name, ms_tensor x, int64_t out_features,
                           float deviation);

/* The same with params that exist, such as the embedding's table (Press and Wolf, "Using the
   Output Embedding to Improve Language Models", 2017). bias may be the handle 0. */
NN_API ms_tensor nn_linear_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                ms_tensor bias);

/* Over the last axis: (x - mean) / sqrt(variance + 1e-5) * weight + bias, with new params
   "<name>.weight", ones, and "<name>.bias", zeros. Saves mean and 1 / sqrt(...) per row.
   Ba et al., "Layer Normalization", 2016, equation 4. nn_layernorm_tied: with params that exist
   and another epsilon (BERT: 1e-12). */
NN_API ms_tensor nn_layernorm(nn_net *net, const char *name, ms_tensor x);
NN_API ms_tensor nn_layernorm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                   ms_tensor bias, float epsilon);

/* Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2. nn_gelu is the tanh form,
   0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), of GPT-2; nn_gelu_erf the exact form,
   x times the normal distribution function at x, of BERT. */
NN_API ms_tensor nn_gelu(nn_net *net, const char *name, ms_tensor x);
NN_API ms_tensor nn_gelu_erf(nn_net *net, const char *name, ms_tensor x);

/* a + b, of one shape. */
NN_API ms_tensor nn_add(nn_net *net, const char *name, ms_tensor a, ms_tensor b);

/* Each element is 0 with this probability, and else divided by 1 - probability; the identity in
   MS_PHASE_EVAL. The mask is drawn from ms_call.seed each time and never stored. Probability 0
   registers nothing and returns x. Srivastava et al., "Dropout", 2014, section 10. */
NN_API ms_tensor nn_dropout(nn_net *net, const char *name, ms_tensor x, float probability);

/* Multi-head self-attention: qkv (B, T, 3C) holds queries, keys and values side by side; out is
   (B, T, C). softmax(Q K^T / sqrt(C / H)) V per head; causal: row t sees the keys 0 ... t.
   save_scores keeps the probabilities (B, H, T, T) for backward; otherwise backward computes them
   again, on the CPU 64 rows at a time, on the GPU some heads at a time. Vaswani et al., "Attention Is All You Need", 2017, equation 1. */
NN_API ms_tensor nn_attention(nn_net *net, const char *name, ms_tensor qkv, int64_t heads,
                              bool causal, bool save_scores);

/* Loss per row, in the shape of targets: log(sum(exp(logits))) - logits[target]. A row whose
   target is below 0 is ignored: loss 0, gradient 0. logits (rows, V), targets I32 (rows). Backward
   may overwrite the logits with their gradient, softmax(logits) - onehot(target). */
NN_API ms_tensor nn_cross_entropy(nn_net *net, const char *name, ms_tensor logits,
                                  ms_tensor targets);

/* max(x, 0). Nair and Hinton, "Rectified Linear Units Improve Restricted Boltzmann Machines",
   2010, section 2. */
NN_API ms_tensor nn_relu(nn_net *net, const char *name, ms_tensor x);

/* sqrt(2 / fan_in): the deviation of weights that read fan_in values and lead to a relu. He et
   al., "Delving Deep into Rectifiers", 2015, equation 10. */
NN_API float nn_kaiming(int64_t fan_in);

/* Images (B, in, height, width) become (B, out, ...): each output is the sum of weight times the
   kernel * kernel square around it in all inputs, plus bias; squares are stride apart, and there
   are `padding` zeros around the image. LeCun et al., "Gradient-Based Learning Applied to Document
   Recognition", 1998, section II; as a matrix product: Chellapilla, Puri and Simard, "High
   Performance Convolutional Neural Networks for Document Processing", 2006, section 3. New params
   "<name>.weight" (out, in * kernel * kernel), normal(0, nn_kaiming), and "<name>.bias" (out),
   zeros. nn_conv2d_tied: with params that exist; bias may be the handle 0. */
NN_API ms_tensor nn_conv2d(nn_net *net, const char *name, ms_tensor x, int64_t out_channels,
                           int64_t kernel, int64_t stride, int64_t padding);
NN_API ms_tensor nn_conv2d_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                ms_tensor bias, int64_t kernel, int64_t stride, int64_t padding);

/* The largest value of each kernel * kernel square of each channel, with the geometry of
   nn_conv2d; padding, of at most kernel / 2, is never the largest. Saves where the value stood, in
   I32. Scherer et al., "Evaluation of Pooling Operations in Convolutional Architectures for Object
   Recognition", 2010, section 3. */
NN_API ms_tensor nn_max_pool(nn_net *net, const char *name, ms_tensor x, int64_t kernel,
                             int64_t stride, int64_t padding);

/* Per channel of images, or of (B, C): (x - mean) / sqrt(variance + 1e-5) * weight + bias, by mean
   and variance of the batch. Each forward also moves the buffers "<name>.mean" and
   "<name>.variance", zeros and ones at first, a tenth of the way to those of the batch, the
   variance times n / (n - 1); ms_eval normalises by them. New params "<name>.weight", ones, and
   "<name>.bias", zeros. Saves mean and 1 / sqrt(...) per channel, from which a recomputation makes
   the output without summing anything. Ioffe and Szegedy, "Batch Normalization", 2015, algorithms
   1 and 2. nn_batch_norm_tied: with params that exist, and statistics of its own. */
NN_API ms_tensor nn_batch_norm(nn_net *net, const char *name, ms_tensor x);
NN_API ms_tensor nn_batch_norm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                    ms_tensor bias);

/* The mean of each channel of images: (B, C). Lin, Chen and Yan, "Network In Network", 2014,
   section 3.2. */
NN_API ms_tensor nn_average_pool(nn_net *net, const char *name, ms_tensor x);

/* (B, ...) as (B, the rest). */
NN_API ms_tensor nn_flatten(nn_net *net, const char *name, ms_tensor x);

/* Sizes of a published model: "gpt2-124M", "gpt2-355M", "gpt2-774M", "gpt2-1558M", "bert-base",
   "bert-large". Sets vocabulary, context, layers, heads and channels alone; false: unknown name. */
NN_API bool nn_preset(const char *name, nn_transformer_config *config);

/* GPT-2: token and position embedding, pre-norm blocks, a last normalization, and a head tied to
   the token table. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019,
   section 2.3: projections into the residual stream start with 0.02 / sqrt(2 * layers). Registers
   inputs, params, layers and losses, and calls ms_set_loss. */
NN_API nn_transformer nn_gpt2(nn_net *net, const nn_transformer_config *config);

/* BERT with its masked-language-model head: token, position and segment embedding, normalization,
   post-norm blocks; dense, gelu, normalization, and a decoder tied to the token table with a bias
   of its own. Devlin et al., "BERT", 2018, sections 3 and A.2. No pooler, no next-sentence head. */
NN_API nn_transformer nn_bert(nn_net *net, const nn_transformer_config *config);

// ------------------------------------------------------------------------------------------------
// >>nn loops

/* NN_PARALLEL: iterations may run on several threads, where work, in elements, is worth waking
   them; each iteration writes its own memory.
   NN_SIMD: iterations are independent, though an output may be the very memory of an input. */
#if defined(_OPENMP)
#define NN_PRAGMA(text) _Pragma(#text)
#define NN_PARALLEL(work) NN_PRAGMA(omp parallel for schedule(static) if ((work) >= NN_WORTH))
#define NN_SIMD NN_PRAGMA(omp simd)
#elif defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define NN_PARALLEL(work)
#define NN_SIMD _Pragma("GCC ivdep")
#else
#define NN_PARALLEL(work)
#define NN_SIMD
#endif

enum {
    NN_WORTH = 16384,   // elements that are worth a second thread
    NN_PRODUCTS = 16,   // multiplications of a matrix product that are as much work as one
    NN_CHUNK = 4096,    // elements that one thread takes at a time
    NN_COLUMNS = 64,    // columns summed together
    NN_LANES = 16,      // partial sums
    NN_QUERIES = 64,    // rows of the attention matrix that are in memory at once
    NN_HEAD_SLOTS = 16, // heads of attention that may run at once
    NN_IMAGE_SLOTS = 4, // images of a convolution that may run at once
    NN_PLACES = 256     // squares of an image that are in memory at once
};

/* Where a gradient goes: data = beta * data + contribution; data NULL: nobody wants it. */
typedef struct nn_target {
    float *data;
    float beta;
} nn_target;

NN_HD int64_t nn_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

NN_API int64_t nn_most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

NN_API nn_target nn_target_of(float *data, float beta) {
    nn_target target;
    target.data = data;
    target.beta = beta;
    return target;
}

NN_API float nn_lanes_sum(const float *lane) {
    float pair[NN_LANES / 2];
    for (int i = 0; i < NN_LANES / 2; i++) {
        pair[i] = lane[i] + lane[i + NN_LANES / 2];
    }
    return ((pair[0] + pair[4]) + (pair[1] + pair[5])) +
           ((pair[2] + pair[6]) + (pair[3] + pair[7]));
}

/* Compilers must not reorder a float sum, so it would be scalar: it is written out in lanes. */
#define NN_SUM(total, i, count, term)                                                              \
    do {                                                                                           \
        float nn_lane[NN_LANES] = {0};                                                             \
        const int64_t nn_whole = (count) - (count) % NN_LANES;                                     \
        for (int64_t nn_base = 0; nn_base < nn_whole; nn_base += NN_LANES) {                       \
            for (int nn_l = 0; nn_l < NN_LANES; nn_l++) {                                          \
                const int64_t i = nn_base + nn_l;                                                  \
                nn_lane[nn_l] += (term);                                                           \
            }                                                                                      \
        }                                                                                          \
        for (int64_t i = nn_whole; i < (count); i++) {                                             \
            nn_lane[i - nn_whole] += (term);                                                       \
        }                                                                                          \
        (total) = nn_lanes_sum(nn_lane);                                                           \
    } while (0)

NN_API float nn_sum(const float *x, int64_t count) {
    float total;
    NN_SUM(total, i, count, x[i]);
    return total;
}

NN_API float nn_dot(const float *a, const float *b, int64_t count) {
    float total;
    NN_SUM(total, i, count, a[i] * b[i]);
    return total;
}

NN_API float nn_max(const float *x, int64_t count) {
    float lane[NN_LANES];
    for (int l = 0; l < NN_LANES; l++) {
        lane[l] = x[0];
    }
    const int64_t whole = count - count % NN_LANES;
    for (int64_t base = 0; base < whole; base += NN_LANES) {
        for (int l = 0; l < NN_LANES; l++) {
            lane[l] = x[base + l] > lane[l] ? x[base + l] : lane[l];
        }
    }
    float most = lane[0];
    for (int l = 1; l < NN_LANES; l++) {
        most = lane[l] > most ? lane[l] : most;
    }
    for (int64_t i = whole; i < count; i++) {
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

// ------------------------------------------------------------------------------------------------
// >>nn functions  of one element; free of branches and calls, so that loops over them vectorise

/* e^x for x clamped to [-87, 88], relative error about 2e-7: x = n ln 2 + r, a polynomial for e^r
   (fitted at Chebyshev nodes), and n put into the exponent. NaN stays NaN. */
NN_HD float nn_exp(float x) {
    const float rounder = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + rounder;
    const float n = shifted - rounder;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.392655075e-3f;
    p = p * r + 8.363472298e-3f;
    p = p * r + 4.166655242e-2f;
    p = p * r + 1.666657478e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    uint32_t shifted_bits;
    memcpy(&shifted_bits, &shifted, sizeof shifted_bits);
    const uint32_t scale_bits = (shifted_bits - 0x4b400000u + 127u) << 23;
    float scale;
    memcpy(&scale, &scale_bits, sizeof scale);
    return p * scale;
}

/* The tanh form is x * s(x), s the logistic function of 2 sqrt(2 / pi) (x + 0.044715 x^3). */
NN_HD float nn_gelu_tanh_share(float x) {
    return 1.0f / (1.0f + nn_exp(-1.59576912f * (x + 0.044715f * x * x * x)));
}

NN_HD float nn_gelu_tanh_value(float x) {
    return x * nn_gelu_tanh_share(x);
}

NN_HD float nn_gelu_tanh_slope(float x) {
    const float s = nn_gelu_tanh_share(x);
    return s + x * s * (1.0f - s) * (1.59576912f + 0.21406445f * x * x);
}

/* The normal distribution function. For a = |x| and t = 1 / (1 + 0.35 a), its value at -a over
   t exp(-a^2 / 2) is smooth on all of 0 < t <= 1: a polynomial fitted at Chebyshev nodes, relative
   error 4e-8. bell is exp(-x^2 / 2). */
NN_HD float nn_normal(float x, float bell) {
    const float a = x < 0.0f ? -x : x;
    const float t = 1.0f / (1.0f + 0.35f * a);
    float p = -2.967952192e-2f;
    p = p * t + 1.465458274e-1f;
    p = p * t - 2.609612346e-1f;
    p = p * t + 1.650509983e-1f;
    p = p * t - 2.704660781e-2f;
    p = p * t + 1.071145907e-1f;
    p = p * t + 1.194449142e-1f;
    p = p * t + 1.399122924e-1f;
    p = p * t + 1.396187097e-1f;
    const float tail = p * t * bell;
    return x < 0.0f ? tail : 1.0f - tail;
}

NN_HD float nn_gelu_erf_value(float x) {
    return x * nn_normal(x, nn_exp(-0.5f * x * x));
}

NN_HD float nn_gelu_erf_slope(float x) {
    const float bell = nn_exp(-0.5f * x * x);
    return nn_normal(x, bell) + x * bell * 0.398942280f;
}

/* Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014: the 64-bit finalizer. */
NN_HD uint64_t nn_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* 32 random bits for a counter under a key: two rounds of multiply and shift, in 32-bit
   arithmetic, which vectors have. */
NN_HD uint32_t nn_random(uint64_t key, uint32_t counter) {
    uint32_t x = counter * 0x9e3779b9u + (uint32_t)key;
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x ^= (uint32_t)(key >> 32);
    x = (x ^ (x >> 15)) * 0x735a2d97u;
    return x ^ (x >> 15);
}

// ------------------------------------------------------------------------------------------------
// >>nn kernels  raw pointers and sizes; count is in elements

NN_API void nn_constant_kernel(float *values, int64_t count, float constant) {
    for (int64_t i = 0; i < count; i++) {
        values[i] = constant;
    }
}

/* y = a + b; y may be a or b. */
NN_API int nn_add_kernel(const ms_call *call, float *y, const float *a, const float *b,
                         int64_t count) {
    (void)call;
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t end = nn_least(begin + NN_CHUNK, count);
        NN_SIMD
        for (int64_t i = begin; i < end; i++) {
            y[i] = a[i] + b[i];
        }
    }
    return 0;
}

/* Passes a gradient on: y = x or y += x; nothing to do where y is x. */
NN_API int nn_pass_kernel(const ms_call *call, nn_target y, const float *x, int64_t count) {
    if (y.data == NULL || (y.data == x && y.beta == 0.0f)) {
        return 0;
    }
    if (y.beta == 0.0f) {
        memcpy(y.data, x, (size_t)count * sizeof *x);
    } else {
        return nn_add_kernel(call, y.data, y.data, x, count);
    }
    return 0;
}

/* Where the random numbers of a layer come from: `step` is in the memory of the device and is read
   when the kernel runs, so that a recorded step draws anew each time it is replayed. */
typedef struct nn_seed {
    uint64_t layer;
    const uint64_t *step;
    int branch; // of a layer with several draws; below 0: the only one
} nn_seed;

/* A dropout on the way; probability 0: none. */
typedef struct nn_drop {
    float probability;
    nn_seed seed;
} nn_drop;

NN_HD uint64_t nn_seed_value(nn_seed seed) {
    const uint64_t value = seed.layer ^ *seed.step;
    return seed.branch < 0 ? value : nn_mix(value + (uint64_t)seed.branch);
}

/* Below this, random bits drop an element. */
NN_HD uint32_t nn_threshold(float probability) {
    return (uint32_t)((double)probability * 4294967296.0);
}

/* The key of the elements of one chunk, which begins with element `begin`. */
NN_HD uint64_t nn_chunk_key(uint64_t seed, int64_t begin) {
    return nn_mix(seed ^ nn_mix((uint64_t)begin));
}

/* y = mask * x / (1 - probability), or y += that; y may be x. */
NN_API int nn_dropout_kernel(const ms_call *call, nn_target y, const float *x, int64_t count,
                             float probability, nn_seed seeds) {
    (void)call;
    if (y.data == NULL) {
        return 0;
    }
    float *out = y.data;
    const bool adds = y.beta != 0.0f;
    const float scale = 1.0f / (1.0f - probability);
    const uint32_t threshold = nn_threshold(probability);
    const uint64_t seed = nn_seed_value(seeds);
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int32_t size = (int32_t)nn_least(NN_CHUNK, count - begin);
        const uint64_t key = nn_chunk_key(seed, begin);
        const float *from = x + begin;
        float *to = out + begin;
        NN_SIMD
        for (int32_t i = 0; i < size; i++) {
            const float kept = nn_random(key, (uint32_t)i) >= threshold ? from[i] * scale : 0.0f;
            to[i] = adds ? to[i] + kept : kept;
        }
    }
    return 0;
}

/* y = gelu(x); y may be x. */
NN_API int nn_gelu_kernel(const ms_call *call, float *y, const float *x, int64_t count,
                          bool erf_form) {
    (void)call;
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t end = nn_least(begin + NN_CHUNK, count);
        if (erf_form) {
            NN_SIMD
            for (int64_t i = begin; i < end; i++) {
                y[i] = nn_gelu_erf_value(x[i]);
            }
        } else {
            NN_SIMD
            for (int64_t i = begin; i < end; i++) {
                y[i] = nn_gelu_tanh_value(x[i]);
            }
        }
    }
    return 0;
}

/* dx = gelu'(x) * dy, or dx += that; dx may be x or dy. */
NN_API int nn_gelu_backward_kernel(const ms_call *call, nn_target dx, const float *dy,
                                   const float *x, int64_t count, bool erf_form) {
    (void)call;
    if (dx.data == NULL) {
        return 0;
    }
    float *out = dx.data;
    const bool adds = dx.beta != 0.0f;
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t end = nn_least(begin + NN_CHUNK, count);
        if (erf_form) {
            NN_SIMD
            for (int64_t i = begin; i < end; i++) {
                const float slope = nn_gelu_erf_slope(x[i]) * dy[i];
                out[i] = adds ? out[i] + slope : slope;
            }
        } else {
            NN_SIMD
            for (int64_t i = begin; i < end; i++) {
                const float slope = nn_gelu_tanh_slope(x[i]) * dy[i];
                out[i] = adds ? out[i] + slope : slope;
            }
        }
    }
    return 0;
}

/* One of the tables that an embedding adds up: row r takes table row index[r], or r % period
   where index is NULL. table NULL: none. */
typedef struct nn_lookup {
    const float *table;
    const int32_t *index;
    int64_t entries, period;
} nn_lookup;

NN_API inline int64_t nn_lookup_entry(const nn_lookup *lookup, int64_t row) {
    return lookup->index != NULL ? (int64_t)lookup->index[row] : row % lookup->period;
}

/* 0, or NN_ERROR_INDEX if one of count indices is not below entries, or below 0 and not
   ignorable. */
NN_API int nn_index_check(const int32_t *index, int64_t count, int64_t entries, bool ignorable) {
    for (int64_t i = 0; i < count; i++) {
        if (index[i] >= entries || (index[i] < 0 && !ignorable)) {
            return NN_ERROR_INDEX;
        }
    }
    return 0;
}

/* y (rows, channels): the sum of the rows that the lookups name, of which the first is a table. */
NN_API int nn_embedding_kernel(const ms_call *call, float *y, const nn_lookup *lookups,
                               int lookup_count, int64_t rows, int64_t channels) {
    (void)call;
    for (int l = 0; l < lookup_count; l++) {
        if (lookups[l].index != NULL &&
            nn_index_check(lookups[l].index, rows, lookups[l].entries, false) != 0) {
            return NN_ERROR_INDEX;
        }
    }
    NN_PARALLEL(rows * channels)
    for (int64_t r = 0; r < rows; r++) {
        float *to = y + r * channels;
        for (int l = 0; l < lookup_count; l++) {
            if (lookups[l].table == NULL) {
                continue;
            }
            const float *from = lookups[l].table + nn_lookup_entry(&lookups[l], r) * channels;
            if (l == 0) {
                memcpy(to, from, (size_t)channels * sizeof *to);
                continue;
            }
            NN_SIMD
            for (int64_t c = 0; c < channels; c++) {
                to[c] += from[c];
            }
        }
    }
    return 0;
}

/* dtable (entries, channels) gets the rows of dy (rows, channels) that took each entry. */
NN_API int nn_embedding_backward_kernel(const ms_call *call, nn_target dtable,
                                        const nn_lookup *lookup, const float *dy, int64_t rows,
                                        int64_t channels, float *work) {
    (void)call;
    (void)work;
    if (dtable.data == NULL) {
        return 0;
    }
    float *out = dtable.data;
    if (dtable.beta == 0.0f) {
        memset(out, 0, (size_t)(lookup->entries * channels) * sizeof *out);
    }
    NN_PARALLEL(rows * channels)
    for (int64_t begin = 0; begin < channels; begin += NN_COLUMNS) {
        const int64_t end = nn_least(begin + NN_COLUMNS, channels);
        for (int64_t r = 0; r < rows; r++) {
            float *to = out + nn_lookup_entry(lookup, r) * channels;
            const float *from = dy + r * channels;
            NN_SIMD
            for (int64_t c = begin; c < end; c++) {
                to[c] += from[c];
            }
        }
    }
    return 0;
}

/* Every row of y (rows, columns) becomes row. */
NN_API void nn_fill_rows_kernel(float *y, const float *row, int64_t rows, int64_t columns) {
    NN_PARALLEL(rows * columns)
    for (int64_t r = 0; r < rows; r++) {
        memcpy(y + r * columns, row, (size_t)columns * sizeof *y);
    }
}

/* target[begin + c] gets sum[c]. */
NN_API void nn_store_columns(nn_target target, int64_t begin, const float *sum, int64_t count) {
    for (int64_t c = 0; c < count; c++) {
        float *to = target.data + begin + c;
        *to = target.beta != 0.0f ? *to + sum[c] : sum[c];
    }
}

/* sums (columns): over the rows of x (rows, columns). */
NN_API void nn_column_sums_kernel(nn_target sums, const float *x, int64_t rows, int64_t columns) {
    if (sums.data == NULL) {
        return;
    }
    NN_PARALLEL(rows * columns)
    for (int64_t begin = 0; begin < columns; begin += NN_COLUMNS) {
        const int64_t width = nn_least(NN_COLUMNS, columns - begin);
        float sum[NN_COLUMNS] = {0};
        for (int64_t r = 0; r < rows; r++) {
            const float *from = x + r * columns + begin;
            NN_SIMD
            for (int64_t c = 0; c < width; c++) {
                sum[c] += from[c];
            }
        }
        nn_store_columns(sums, begin, sum, width);
    }
}

/* A layer normalization of rows of this width; mean and rstd (rows) are what it saves. */
typedef struct nn_norm {
    int64_t rows, width;
    const float *weight, *bias;
    float *mean, *rstd;
    float epsilon;
} nn_norm;

/* x, y (rows, width); y may be x. */
NN_API int nn_layernorm_kernel(const ms_call *call, float *y, const float *x, const nn_norm *n) {
    (void)call;
    const int64_t width = n->width;
    NN_PARALLEL(n->rows * width)
    for (int64_t r = 0; r < n->rows; r++) {
        const float *from = x + r * width;
        float *to = y + r * width;
        const float m = nn_sum(from, width) / (float)width;
        float squares;
        NN_SUM(squares, i, width, (from[i] - m) * (from[i] - m));
        const float s = 1.0f / sqrtf(squares / (float)width + n->epsilon);
        const float *weight = n->weight;
        const float *bias = n->bias;
        NN_SIMD
        for (int64_t i = 0; i < width; i++) {
            to[i] = (from[i] - m) * s * weight[i] + bias[i];
        }
        n->mean[r] = m;
        n->rstd[r] = s;
    }
    return 0;
}

/* Gradients of weight and bias (width each), from x, dy (rows, width). */
NN_API void nn_layernorm_param_kernel(nn_target dweight, nn_target dbias, const float *dy,
                                      const float *x, const nn_norm *n) {
    const int64_t rows = n->rows;
    const int64_t width = n->width;
    const float *mean = n->mean;
    const float *rstd = n->rstd;
    nn_column_sums_kernel(dbias, dy, rows, width);
    if (dweight.data == NULL) {
        return;
    }
    NN_PARALLEL(rows * width)
    for (int64_t begin = 0; begin < width; begin += NN_COLUMNS) {
        const int64_t size = nn_least(NN_COLUMNS, width - begin);
        float sum[NN_COLUMNS] = {0};
        for (int64_t r = 0; r < rows; r++) {
            const float *from = x + r * width + begin;
            const float *slope = dy + r * width + begin;
            NN_SIMD
            for (int64_t c = 0; c < size; c++) {
                sum[c] += slope[c] * ((from[c] - mean[r]) * rstd[r]);
            }
        }
        nn_store_columns(dweight, begin, sum, size);
    }
}

/* Gradients from x, dy (rows, width). That of x comes last, for dx may be dy or x. */
NN_API int nn_layernorm_backward_kernel(const ms_call *call, nn_target dx, nn_target dweight,
                                        nn_target dbias, const float *dy, const float *x,
                                        const nn_norm *n, float *work) {
    (void)call;
    (void)work;
    nn_layernorm_param_kernel(dweight, dbias, dy, x, n);
    if (dx.data == NULL) {
        return 0;
    }
    const int64_t width = n->width;
    const float *weight = n->weight;
    float *out = dx.data;
    const bool adds = dx.beta != 0.0f;
    NN_PARALLEL(n->rows * width)
    for (int64_t r = 0; r < n->rows; r++) {
        const float *from = x + r * width;
        const float *slope = dy + r * width;
        float *to = out + r * width;
        const float m = n->mean[r];
        const float s = n->rstd[r];
        const float mean_slope = nn_dot(slope, weight, width) / (float)width;
        float product;
        NN_SUM(product, i, width, slope[i] * weight[i] * ((from[i] - m) * s));
        product /= (float)width;
        NN_SIMD
        for (int64_t i = 0; i < width; i++) {
            const float normal = (from[i] - m) * s;
            const float value = (slope[i] * weight[i] - mean_slope - normal * product) * s;
            to[i] = adds ? to[i] + value : value;
        }
    }
    return 0;
}

/* x (count) becomes exp(x - its maximum); returns the sum. */
NN_API float nn_exp_row(float *x, int64_t count) {
    const float most = nn_max(x, count);
    NN_SIMD
    for (int64_t i = 0; i < count; i++) {
        x[i] = nn_exp(x[i] - most);
    }
    return nn_sum(x, count);
}

/* Sum of exp(x - shift). */
NN_API float nn_exp_sum(const float *x, float shift, int64_t count) {
    float total = 0.0f;
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        float value[NN_CHUNK];
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            value[i] = nn_exp(x[begin + i] - shift);
        }
        total += nn_sum(value, size);
    }
    return total;
}

/* losses (rows), stats (rows, 2): maximum and log of the sum of exp(logits - maximum). */
NN_API int nn_cross_entropy_kernel(const ms_call *call, float *losses, float *stats,
                                   const float *logits, const int32_t *targets, int64_t rows,
                                   int64_t classes) {
    (void)call;
    if (nn_index_check(targets, rows, classes, true) != 0) {
        return NN_ERROR_INDEX;
    }
    NN_PARALLEL(rows * classes)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = logits + r * classes;
        float most = 0.0f;
        float log_sum = 0.0f;
        float loss = 0.0f;
        if (targets[r] >= 0) {
            most = nn_max(row, classes);
            log_sum = logf(nn_exp_sum(row, most, classes));
            loss = log_sum - (row[targets[r]] - most);
        }
        losses[r] = loss;
        stats[2 * r] = most;
        stats[2 * r + 1] = log_sum;
    }
    return 0;
}

/* dlogits (rows, classes) from dlosses (rows); dlogits may be logits. */
NN_API int nn_cross_entropy_backward_kernel(const ms_call *call, nn_target dlogits,
                                            const float *dlosses, const float *stats,
                                            const float *logits, const int32_t *targets,
                                            int64_t rows, int64_t classes) {
    (void)call;
    if (dlogits.data == NULL) {
        return 0;
    }
    float *out = dlogits.data;
    const bool adds = dlogits.beta != 0.0f;
    NN_PARALLEL(rows * classes)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = logits + r * classes;
        float *to = out + r * classes;
        const float slope = dlosses[r];
        const float most = stats[2 * r];
        const float log_sum = stats[2 * r + 1];
        if (targets[r] < 0) {
            if (!adds) {
                memset(to, 0, (size_t)classes * sizeof *to);
            }
            continue;
        }
        NN_SIMD
        for (int64_t i = 0; i < classes; i++) {
            const float value = slope * nn_exp(row[i] - most - log_sum);
            to[i] = adds ? to[i] + value : value;
        }
        to[targets[r]] -= slope;
    }
    return 0;
}

/* y = max(x, 0), and NaN stays NaN; y may be x. */
NN_API int nn_relu_kernel(const ms_call *call, float *y, const float *x, int64_t count) {
    (void)call;
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t end = nn_least(begin + NN_CHUNK, count);
        NN_SIMD
        for (int64_t i = begin; i < end; i++) {
            y[i] = x[i] < 0.0f ? 0.0f : x[i];
        }
    }
    return 0;
}

/* dx = dy where y, the output, is above 0, or dx += that; dx may be y or dy. */
NN_API int nn_relu_backward_kernel(const ms_call *call, nn_target dx, const float *dy,
                                   const float *y, int64_t count) {
    (void)call;
    if (dx.data == NULL) {
        return 0;
    }
    float *out = dx.data;
    const bool adds = dx.beta != 0.0f;
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t end = nn_least(begin + NN_CHUNK, count);
        NN_SIMD
        for (int64_t i = begin; i < end; i++) {
            const float slope = y[i] > 0.0f ? dy[i] : 0.0f;
            out[i] = adds ? out[i] + slope : slope;
        }
    }
    return 0;
}

/* Values (images, channels, plane), plane = height * width. */
typedef struct nn_planes {
    int64_t images, channels, plane;
} nn_planes;

NN_API int64_t nn_planes_count(nn_planes n) {
    return n.images * n.channels * n.plane;
}

/* sums (channels): over images and plane of x. */
NN_API void nn_channel_sums_kernel(nn_target sums, const float *x, nn_planes n) {
    if (sums.data == NULL) {
        return;
    }
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t c = 0; c < n.channels; c++) {
        double total = 0.0;
        for (int64_t b = 0; b < n.images; b++) {
            total += (double)nn_sum(x + (b * n.channels + c) * n.plane, n.plane);
        }
        const float sum = (float)total;
        nn_store_columns(sums, c, &sum, 1);
    }
}

/* means (images, channels) of the planes of x. */
NN_API int nn_average_kernel(const ms_call *call, float *means, const float *x, nn_planes n) {
    (void)call;
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t i = 0; i < n.images * n.channels; i++) {
        means[i] = nn_sum(x + i * n.plane, n.plane) / (float)n.plane;
    }
    return 0;
}

NN_API int nn_average_backward_kernel(const ms_call *call, nn_target dx, const float *dmeans,
                                      nn_planes n) {
    (void)call;
    if (dx.data == NULL) {
        return 0;
    }
    const bool adds = dx.beta != 0.0f;
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t i = 0; i < n.images * n.channels; i++) {
        const float slope = dmeans[i] / (float)n.plane;
        float *to = dx.data + i * n.plane;
        NN_SIMD
        for (int64_t k = 0; k < n.plane; k++) {
            to[k] = adds ? to[k] + slope : slope;
        }
    }
    return 0;
}

/* Where a batch normalization takes mean and variance from. */
typedef enum nn_moments { NN_MOMENTS_OF_BATCH, NN_MOMENTS_RUNNING, NN_MOMENTS_SAVED } nn_moments;

typedef struct nn_batch_norm_values {
    nn_moments moments;
    const float *weight, *bias;
    float *mean, *rstd; // the saved ones; may be NULL unless they are the source
    float *running_mean, *running_variance; // moved where they are not the source and not NULL
    float epsilon, momentum;
} nn_batch_norm_values;

NN_API void nn_channel_moments(const float *x, int64_t channel, nn_planes n, float *mean,
                               float *variance) {
    const double count = (double)(n.images * n.plane);
    double total = 0.0;
    for (int64_t b = 0; b < n.images; b++) {
        total += (double)nn_sum(x + (b * n.channels + channel) * n.plane, n.plane);
    }
    const float m = (float)(total / count);
    total = 0.0;
    for (int64_t b = 0; b < n.images; b++) {
        const float *from = x + (b * n.channels + channel) * n.plane;
        float squares;
        NN_SUM(squares, i, n.plane, (from[i] - m) * (from[i] - m));
        total += (double)squares;
    }
    *mean = m;
    *variance = (float)(total / count);
}

/* The variance of a batch of n values is that of all values times (n - 1) / n, on average. */
NN_HD void nn_move_running(const nn_batch_norm_values *v, int64_t channel, float mean,
                           float variance, int64_t n) {
    const float keep = 1.0f - v->momentum;
    const float unbiased = n > 1 ? variance * ((float)n / (float)(n - 1)) : variance;
    v->running_mean[channel] = keep * v->running_mean[channel] + v->momentum * mean;
    v->running_variance[channel] = keep * v->running_variance[channel] + v->momentum * unbiased;
}

/* Mean and 1 / sqrt(variance + epsilon) of a channel, from where v says. */
NN_API void nn_batch_norm_moments(const nn_batch_norm_values *v, const float *x, int64_t channel,
                                  nn_planes n, float *mean, float *rstd) {
    float variance;
    if (v->moments == NN_MOMENTS_SAVED) {
        *mean = v->mean[channel];
        *rstd = v->rstd[channel];
        return;
    }
    if (v->moments == NN_MOMENTS_RUNNING) {
        *mean = v->running_mean[channel];
        variance = v->running_variance[channel];
    } else {
        nn_channel_moments(x, channel, n, mean, &variance);
        if (v->running_mean != NULL) {
            nn_move_running(v, channel, *mean, variance, n.images * n.plane);
        }
    }
    *rstd = 1.0f / sqrtf(variance + v->epsilon);
    if (v->mean != NULL) {
        v->mean[channel] = *mean;
    }
    if (v->rstd != NULL) {
        v->rstd[channel] = *rstd;
    }
}

/* y may be x. One loop for all sources, so that a recomputation gives the same bits. */
NN_API int nn_batch_norm_kernel(const ms_call *call, float *y, const float *x,
                                const nn_batch_norm_values *v, nn_planes n, float *work) {
    (void)call;
    (void)work;
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t c = 0; c < n.channels; c++) {
        float mean;
        float rstd;
        nn_batch_norm_moments(v, x, c, n, &mean, &rstd);
        const float weight = v->weight[c];
        const float bias = v->bias[c];
        for (int64_t b = 0; b < n.images; b++) {
            const float *from = x + (b * n.channels + c) * n.plane;
            float *to = y + (b * n.channels + c) * n.plane;
            NN_SIMD
            for (int64_t i = 0; i < n.plane; i++) {
                to[i] = (from[i] - mean) * rstd * weight + bias;
            }
        }
    }
    return 0;
}

/* One channel of the gradient of x; slope and product are the channel's gradients of bias and
   weight over the number of its values. */
NN_API void nn_batch_norm_backward_channel(nn_target dx, const float *dy, const float *x,
                                           const nn_batch_norm_values *v, int64_t channel,
                                           nn_planes n, float slope, float product) {
    const bool adds = dx.beta != 0.0f;
    const float mean = v->mean[channel];
    const float rstd = v->rstd[channel];
    const float scale = rstd * v->weight[channel];
    for (int64_t b = 0; b < n.images; b++) {
        const int64_t begin = (b * n.channels + channel) * n.plane;
        const float *from = x + begin;
        const float *above = dy + begin;
        float *to = dx.data + begin;
        NN_SIMD
        for (int64_t i = 0; i < n.plane; i++) {
            const float normal = (from[i] - mean) * rstd;
            const float value = (above[i] - slope - normal * product) * scale;
            to[i] = adds ? to[i] + value : value;
        }
    }
}

/* Gradients from x, dy and the saved mean and rstd; dx may be dy or x. */
NN_API int nn_batch_norm_backward_kernel(const ms_call *call, nn_target dx, nn_target dweight,
                                         nn_target dbias, const float *dy, const float *x,
                                         const nn_batch_norm_values *v, nn_planes n, float *work) {
    (void)call;
    (void)work;
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t c = 0; c < n.channels; c++) {
        const double count = (double)(n.images * n.plane);
        const float mean = v->mean[c];
        const float rstd = v->rstd[c];
        double slopes = 0.0;
        double products = 0.0;
        for (int64_t b = 0; b < n.images; b++) {
            const float *from = x + (b * n.channels + c) * n.plane;
            const float *above = dy + (b * n.channels + c) * n.plane;
            float product;
            NN_SUM(product, i, n.plane, above[i] * ((from[i] - mean) * rstd));
            products += (double)product;
            slopes += (double)nn_sum(above, n.plane);
        }
        const float sums[2] = {(float)slopes, (float)products};
        if (dbias.data != NULL) {
            nn_store_columns(dbias, c, &sums[0], 1);
        }
        if (dweight.data != NULL) {
            nn_store_columns(dweight, c, &sums[1], 1);
        }
        if (dx.data != NULL) {
            nn_batch_norm_backward_channel(dx, dy, x, v, c, n, (float)(slopes / count),
                                           (float)(products / count));
        }
    }
    return 0;
}

/* Squares of kernel * kernel values that slide over images (images, channels, height, width) with
   padding around them. */
typedef struct nn_window {
    int64_t images, channels, height, width;
    int64_t kernel, stride, padding;
    int64_t out_height, out_width; // below 1: the kernel does not fit
} nn_window;

NN_API nn_window nn_window_of(ms_shape x, int64_t kernel, int64_t stride, int64_t padding) {
    nn_window w;
    w.images = x.dim[0];
    w.channels = x.dim[1];
    w.height = x.dim[2];
    w.width = x.dim[3];
    w.kernel = kernel;
    w.stride = stride;
    w.padding = padding;
    const int64_t down = w.height + 2 * padding - kernel;
    const int64_t across = w.width + 2 * padding - kernel;
    w.out_height = down < 0 ? 0 : down / stride + 1;
    w.out_width = across < 0 ? 0 : across / stride + 1;
    return w;
}

/* Squares begin ... end - 1 are those whose element at this offset (from the first pixel, in the
   first square) lies inside an image of this extent; count: how many squares there are. */
typedef struct nn_span {
    int64_t begin, end;
} nn_span;

NN_API nn_span nn_span_of(int64_t offset, int64_t stride, int64_t extent, int64_t count) {
    nn_span span;
    span.end = extent > offset ? nn_least((extent - 1 - offset) / stride + 1, count) : 0;
    span.begin = offset < 0 ? nn_least((stride - 1 - offset) / stride, span.end) : 0;
    return span;
}

/* Rows of squares, begin ... begin + count - 1, out of out_height. */
typedef struct nn_rows_of_squares {
    int64_t begin, count;
} nn_rows_of_squares;

/* One row of columns: element (top, left) of the squares of a row, of which across are inside. */
NN_API void nn_column_row(float *to, const float *from, int64_t left, nn_span across,
                          const nn_window *w) {
    for (int64_t x = 0; x < across.begin; x++) {
        to[x] = 0.0f;
    }
    if (w->stride == 1 && across.begin < across.end) {
        memcpy(to + across.begin, from + across.begin + left,
               (size_t)(across.end - across.begin) * sizeof *to);
    } else {
        for (int64_t x = across.begin; x < across.end; x++) {
            to[x] = from[x * w->stride + left];
        }
    }
    for (int64_t x = across.end; x < w->out_width; x++) {
        to[x] = 0.0f;
    }
}

/* columns (channels * kernel * kernel, rows.count * out_width): row (c, i, j) has the element
   (i, j) of these squares of channel c of one image. */
NN_API void nn_columns_kernel(float *columns, const float *image, nn_rows_of_squares rows,
                              const nn_window *w) {
    const int64_t area = w->kernel * w->kernel;
    for (int64_t row = 0; row < w->channels * area; row++) {
        const int64_t top = row % area / w->kernel - w->padding;
        const int64_t left = row % w->kernel - w->padding;
        const nn_span down = nn_span_of(top, w->stride, w->height, w->out_height);
        const nn_span across = nn_span_of(left, w->stride, w->width, w->out_width);
        for (int64_t i = 0; i < rows.count; i++) {
            const int64_t y = rows.begin + i;
            float *to = columns + (row * rows.count + i) * w->out_width;
            if (y < down.begin || y >= down.end) {
                memset(to, 0, (size_t)w->out_width * sizeof *to);
            } else {
                const int64_t line = row / area * w->height + y * w->stride + top;
                nn_column_row(to, image + line * w->width, left, across, w);
            }
        }
    }
}

/* The way back: every pixel of one image is added its places in columns. */
NN_API void nn_columns_backward_kernel(float *image, const float *columns, nn_rows_of_squares rows,
                                       const nn_window *w) {
    const int64_t area = w->kernel * w->kernel;
    for (int64_t row = 0; row < w->channels * area; row++) {
        const int64_t top = row % area / w->kernel - w->padding;
        const int64_t left = row % w->kernel - w->padding;
        const nn_span down = nn_span_of(top, w->stride, w->height, w->out_height);
        const nn_span across = nn_span_of(left, w->stride, w->width, w->out_width);
        for (int64_t i = 0; i < rows.count; i++) {
            const int64_t y = rows.begin + i;
            if (y < down.begin || y >= down.end) {
                continue;
            }
            const float *from = columns + (row * rows.count + i) * w->out_width;
            float *to = image + (row / area * w->height + y * w->stride + top) * w->width;
            NN_SIMD
            for (int64_t x = across.begin; x < across.end; x++) {
                to[x * w->stride + left] += from[x];
            }
        }
    }
}

/* The place of the largest of the square (y, x) in its plane; of equal ones the first, and of NaN
   and a number NaN. */
NN_HD int64_t nn_largest_place(const float *plane, const nn_window *w, int64_t y, int64_t x) {
    const int64_t top = y * w->stride - w->padding;
    const int64_t left = x * w->stride - w->padding;
    const int64_t bottom = nn_least(top + w->kernel, w->height);
    const int64_t right = nn_least(left + w->kernel, w->width);
    int64_t place = -1;
    float largest = 0.0f;
    for (int64_t i = top < 0 ? 0 : top; i < bottom; i++) {
        for (int64_t k = left < 0 ? 0 : left; k < right; k++) {
            const float value = plane[i * w->width + k];
            if (place < 0 || value > largest || value != value) {
                place = i * w->width + k;
                largest = value;
            }
        }
    }
    return place;
}

/* y (images, channels, out_height, out_width) and the places of its values in the planes of x;
   places may be NULL. */
NN_API int nn_max_pool_kernel(const ms_call *call, float *y, int32_t *places, const float *x,
                              const nn_window *w) {
    (void)call;
    const int64_t plane = w->height * w->width;
    NN_PARALLEL(w->images * w->channels * plane)
    for (int64_t p = 0; p < w->images * w->channels; p++) {
        const float *from = x + p * plane;
        for (int64_t i = 0; i < w->out_height; i++) {
            for (int64_t k = 0; k < w->out_width; k++) {
                const int64_t at = (p * w->out_height + i) * w->out_width + k;
                const int64_t place = nn_largest_place(from, w, i, k);
                y[at] = from[place];
                if (places != NULL) {
                    places[at] = (int32_t)place;
                }
            }
        }
    }
    return 0;
}

NN_API int nn_max_pool_backward_kernel(const ms_call *call, nn_target dx, const float *dy,
                                       const int32_t *places, const nn_window *w) {
    (void)call;
    if (dx.data == NULL) {
        return 0;
    }
    const int64_t plane = w->height * w->width;
    const int64_t out_plane = w->out_height * w->out_width;
    NN_PARALLEL(w->images * w->channels * plane)
    for (int64_t p = 0; p < w->images * w->channels; p++) {
        float *to = dx.data + p * plane;
        if (dx.beta == 0.0f) {
            memset(to, 0, (size_t)plane * sizeof *to);
        }
        for (int64_t i = p * out_plane; i < (p + 1) * out_plane; i++) {
            to[places[i]] += dy[i];
        }
    }
    return 0;
}

// ------------------------------------------------------------------------------------------------
// >>nn products  kernels on top of ms_gemm; they return its result

/* A matrix of floats that ms_gemm only reads or that it writes. */
NN_API ms_matrix nn_matrix(const float *data, int64_t rows, int64_t cols, int64_t stride) {
    ms_matrix matrix;
    memset(&matrix, 0, sizeof matrix);
    matrix.data = (void *)(uintptr_t)data; // ms_matrix knows no const
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.stride = stride;
    matrix.dtype = MS_DTYPE_F32;
    return matrix;
}

/* x is (rows, in), y is (rows, out), weight is (out, in). */
typedef struct nn_linear_size {
    int64_t rows, in, out;
} nn_linear_size;

/* y = x * transpose(weight) + bias; bias may be NULL. */
NN_API int nn_linear_kernel(const ms_call *call, float *y, const float *x, const float *weight,
                            const float *bias, nn_linear_size n) {
    if (bias != NULL) {
        nn_fill_rows_kernel(y, bias, n.rows, n.out);
    }
    return (int)ms_gemm(call, 1.0f, nn_matrix(x, n.rows, n.in, n.in),
                        ms_transpose(nn_matrix(weight, n.out, n.in, n.in)),
                        bias != NULL ? 1.0f : 0.0f, nn_matrix(y, n.rows, n.out, n.out));
}

NN_API int nn_linear_gelu_kernel(const ms_call *call, float *y, float *h, const float *x,
                                 const float *weight, const float *bias, nn_linear_size n,
                                 bool erf_form) {
    const int result = nn_linear_kernel(call, h, x, weight, bias, n);
    return result != 0 ? result : nn_gelu_kernel(call, y, h, n.rows * n.out, erf_form);
}

NN_API int nn_linear_add_kernel(const ms_call *call, float *y, const float *residual,
                                const float *x, const float *weight, const float *bias,
                                nn_linear_size n, const nn_drop *drop) {
    int result = nn_linear_kernel(call, y, x, weight, bias, n);
    if (result == 0 && drop->probability > 0.0f) {
        result = nn_dropout_kernel(call, nn_target_of(y, 0.0f), y, n.rows * n.out,
                                   drop->probability, drop->seed);
    }
    return result != 0 ? result : nn_add_kernel(call, y, residual, y, n.rows * n.out);
}

/* The two products of a linear layer's backward: on every device the same calls. */
NN_API int nn_linear_slopes(const ms_call *call, nn_target dx, nn_target dweight, const float *dy,
                            const float *x, const float *weight, nn_linear_size n) {
    const ms_matrix slope = nn_matrix(dy, n.rows, n.out, n.out);
    int result = 0;
    if (dx.data != NULL) {
        result = (int)ms_gemm(call, 1.0f, slope, nn_matrix(weight, n.out, n.in, n.in), dx.beta,
                              nn_matrix(dx.data, n.rows, n.in, n.in));
    }
    if (result == 0 && dweight.data != NULL) {
        result = (int)ms_gemm(call, 1.0f, ms_transpose(slope), nn_matrix(x, n.rows, n.in, n.in),
                              dweight.beta, nn_matrix(dweight.data, n.out, n.in, n.in));
    }
    return result;
}

/* dx = dy * weight, dweight = transpose(dy) * x, dbias = column sums of dy. */
NN_API int nn_linear_backward_kernel(const ms_call *call, nn_target dx, nn_target dweight,
                                     nn_target dbias, const float *dy, const float *x,
                                     const float *weight, nn_linear_size n, float *work) {
    (void)work;
    const int result = nn_linear_slopes(call, dx, dweight, dy, x, weight, n);
    nn_column_sums_kernel(dbias, dy, n.rows, n.out);
    return result;
}

/* Sizes of an attention; channels are heads * size. */
typedef struct nn_attention_size {
    int64_t batch, sequence, heads, size;
    bool causal;
} nn_attention_size;

/* Heads that run at once, each with a workspace of its own: a number that does not depend on the
   machine, so that the plan does not either. */
NN_API int64_t nn_attention_slots(nn_attention_size n) {
    return nn_least(NN_HEAD_SLOTS, n.batch * n.heads);
}

/* Floats of workspace per slot: a band of probabilities; in backward one of their gradients too,
   and the gradients of keys and values. */
NN_API int64_t nn_attention_slot_floats(nn_attention_size n, bool backward) {
    const int64_t band = nn_least(NN_QUERIES, n.sequence) * n.sequence;
    return backward ? 2 * band + 2 * n.sequence * n.size : band;
}

NN_API int64_t nn_attention_work(nn_attention_size n) {
    return n.batch * n.heads * n.sequence * n.sequence * n.size;
}

/* Floats of workspace. */
NN_API int64_t nn_attention_floats(nn_attention_size n, bool backward) {
    return nn_attention_slots(n) * nn_attention_slot_floats(n, backward);
}

/* One band of one head: queries begin ... begin + rows - 1, and the keys 0 ... keys - 1 that at
   least one of them sees. The offsets are in floats, of the first element of q (k and v lie C and
   2C behind) in qkv, of o in the output, of the band in saved probabilities. */
typedef struct nn_band {
    int64_t begin, rows, keys;
    int64_t q, k, v, o, scores;
    int64_t qkv_stride, o_stride;
} nn_band;

NN_API nn_band nn_band_of(nn_attention_size n, int64_t head, int64_t begin) {
    const int64_t channels = n.heads * n.size;
    const int64_t row = (head / n.heads) * n.sequence;
    const int64_t column = (head % n.heads) * n.size;
    nn_band band;
    band.begin = begin;
    band.rows = nn_least(NN_QUERIES, n.sequence - begin);
    band.keys = n.causal ? begin + band.rows : n.sequence;
    band.qkv_stride = 3 * channels;
    band.o_stride = channels;
    band.q = (row + begin) * band.qkv_stride + column;
    band.k = row * band.qkv_stride + column + channels;
    band.v = band.k + channels;
    band.o = (row + begin) * channels + column;
    band.scores = (head * n.sequence + begin) * n.sequence;
    return band;
}

/* p (rows of the band, sequence) = softmax(q k^T / sqrt(size)), 0 for keys that come later. */
NN_API int nn_scores_kernel(const ms_call *call, float *p, const float *qkv, const nn_band *band,
                            nn_attention_size n) {
    const float scale = 1.0f / sqrtf((float)n.size);
    const int result =
        (int)ms_gemm(call, scale, nn_matrix(qkv + band->q, band->rows, n.size, band->qkv_stride),
                     ms_transpose(nn_matrix(qkv + band->k, band->keys, n.size, band->qkv_stride)),
                     0.0f, nn_matrix(p, band->rows, band->keys, n.sequence));
    for (int64_t r = 0; r < band->rows; r++) {
        float *row = p + r * n.sequence;
        const int64_t seen = n.causal ? band->begin + r + 1 : n.sequence;
        const float share = 1.0f / nn_exp_row(row, seen);
        NN_SIMD
        for (int64_t i = 0; i < seen; i++) {
            row[i] *= share;
        }
        memset(row + seen, 0, (size_t)(band->keys - seen) * sizeof *row);
    }
    return result;
}

/* dp, the gradient of probabilities p, becomes that of q k^T. */
NN_API void nn_scores_backward_kernel(float *dp, const float *p, const nn_band *band,
                                      nn_attention_size n) {
    const float scale = 1.0f / sqrtf((float)n.size);
    for (int64_t r = 0; r < band->rows; r++) {
        const float *row = p + r * n.sequence;
        float *to = dp + r * n.sequence;
        const int64_t seen = n.causal ? band->begin + r + 1 : n.sequence;
        const float mean = nn_dot(row, to, seen);
        NN_SIMD
        for (int64_t i = 0; i < seen; i++) {
            to[i] = row[i] * (to[i] - mean) * scale;
        }
        memset(to + seen, 0, (size_t)(band->keys - seen) * sizeof *to);
    }
}

/* out (B, T, C) from qkv (B, T, 3C). scores (B, H, T, T) keeps the probabilities, or is NULL. */
NN_API int nn_attention_head(const ms_call *call, float *out, float *scores, const float *qkv,
                             float *work, int64_t head, nn_attention_size n) {
    int result = 0;
    for (int64_t begin = 0; begin < n.sequence && result == 0; begin += NN_QUERIES) {
        const nn_band band = nn_band_of(n, head, begin);
        float *p = scores != NULL ? scores + band.scores : work;
        result = nn_scores_kernel(call, p, qkv, &band, n);
        for (int64_t r = 0; scores != NULL && r < band.rows; r++) { // no key of the band's queries
            memset(p + r * n.sequence + band.keys, 0, (size_t)(n.sequence - band.keys) * sizeof *p);
        }
        if (result == 0) {
            result = (int)ms_gemm(call, 1.0f, nn_matrix(p, band.rows, band.keys, n.sequence),
                                  nn_matrix(qkv + band.v, band.keys, n.size, band.qkv_stride), 0.0f,
                                  nn_matrix(out + band.o, band.rows, n.size, band.o_stride));
        }
    }
    return result;
}

NN_API int nn_attention_kernel(const ms_call *call, float *out, float *scores, const float *qkv,
                               float *work, nn_attention_size n) {
    const int64_t slots = nn_attention_slots(n);
    const int64_t floats = nn_attention_slot_floats(n, false);
    int results[NN_HEAD_SLOTS] = {0};
    NN_PARALLEL(nn_attention_work(n))
    for (int64_t slot = 0; slot < slots; slot++) {
        for (int64_t head = slot; head < n.batch * n.heads; head += slots) {
            results[slot] |=
                nn_attention_head(call, out, scores, qkv, work + slot * floats, head, n);
        }
    }
    for (int64_t slot = 1; slot < slots; slot++) {
        results[0] |= results[slot];
    }
    return results[0];
}

/* Gradients of keys and values are gathered in the workspace, and those of a band's queries are
   written when nobody needs these queries any more: so dqkv may be qkv. */
NN_API int nn_attention_backward_band(const ms_call *call, nn_target dqkv, const float *dout,
                                      const float *scores, const float *qkv, float *work,
                                      const nn_band *band, nn_attention_size n) {
    const int64_t size = nn_least(NN_QUERIES, n.sequence) * n.sequence;
    float *dp = work + size;
    float *dk = dp + size;
    float *dv = dk + n.sequence * n.size;
    int result = 0;
    if (scores == NULL) {
        result = nn_scores_kernel(call, work, qkv, band, n);
    }
    const float *p = scores != NULL ? scores + band->scores : work;
    const ms_matrix p_matrix = nn_matrix(p, band->rows, band->keys, n.sequence);
    const ms_matrix dp_matrix = nn_matrix(dp, band->rows, band->keys, n.sequence);
    const ms_matrix dout_matrix = nn_matrix(dout + band->o, band->rows, n.size, band->o_stride);
    result |=
        (int)ms_gemm(call, 1.0f, dout_matrix,
                     ms_transpose(nn_matrix(qkv + band->v, band->keys, n.size, band->qkv_stride)),
                     0.0f, dp_matrix);
    result |= (int)ms_gemm(call, 1.0f, ms_transpose(p_matrix), dout_matrix, 1.0f,
                           nn_matrix(dv, band->keys, n.size, n.size));
    nn_scores_backward_kernel(dp, p, band, n);
    result |= (int)ms_gemm(call, 1.0f, ms_transpose(dp_matrix),
                           nn_matrix(qkv + band->q, band->rows, n.size, band->qkv_stride), 1.0f,
                           nn_matrix(dk, band->keys, n.size, n.size));
    result |= (int)ms_gemm(
        call, 1.0f, dp_matrix, nn_matrix(qkv + band->k, band->keys, n.size, band->qkv_stride),
        dqkv.beta, nn_matrix(dqkv.data + band->q, band->rows, n.size, band->qkv_stride));
    return result;
}

/* Rows of from (rows, size), contiguous, go to rows that are stride apart. */
NN_API void nn_store_rows(nn_target to, const float *from, int64_t rows, int64_t size,
                          int64_t stride) {
    for (int64_t r = 0; r < rows; r++) {
        nn_target row = nn_target_of(to.data + r * stride, to.beta);
        nn_store_columns(row, 0, from + r * size, size);
    }
}

NN_API int nn_attention_backward_head(const ms_call *call, nn_target dqkv, const float *dout,
                                      const float *scores, const float *qkv, float *work,
                                      int64_t head, nn_attention_size n) {
    const nn_band first = nn_band_of(n, head, 0);
    float *dk = work + 2 * nn_least(NN_QUERIES, n.sequence) * n.sequence;
    float *dv = dk + n.sequence * n.size;
    memset(dk, 0, (size_t)(2 * n.sequence * n.size) * sizeof *dk);
    int result = 0;
    for (int64_t begin = 0; begin < n.sequence; begin += NN_QUERIES) {
        const nn_band band = nn_band_of(n, head, begin);
        result |= nn_attention_backward_band(call, dqkv, dout, scores, qkv, work, &band, n);
    }
    nn_store_rows(nn_target_of(dqkv.data + first.k, dqkv.beta), dk, n.sequence, n.size,
                  first.qkv_stride);
    nn_store_rows(nn_target_of(dqkv.data + first.v, dqkv.beta), dv, n.sequence, n.size,
                  first.qkv_stride);
    return result;
}

/* dqkv (B, T, 3C) from dout (B, T, C); scores NULL: the probabilities are computed again. */
NN_API int nn_attention_backward_kernel(const ms_call *call, nn_target dqkv, const float *dout,
                                        const float *scores, const float *qkv, float *work,
                                        nn_attention_size n) {
    if (dqkv.data == NULL) {
        return 0;
    }
    const int64_t slots = nn_attention_slots(n);
    const int64_t floats = nn_attention_slot_floats(n, true);
    int results[NN_HEAD_SLOTS] = {0};
    NN_PARALLEL(nn_attention_work(n))
    for (int64_t slot = 0; slot < slots; slot++) {
        for (int64_t head = slot; head < n.batch * n.heads; head += slots) {
            results[slot] |= nn_attention_backward_head(call, dqkv, dout, scores, qkv,
                                                        work + slot * floats, head, n);
        }
    }
    for (int64_t slot = 1; slot < slots; slot++) {
        results[0] |= results[slot];
    }
    return results[0];
}

/* Such a convolution reads each pixel once, and in order: the image itself is the columns. */
NN_API bool nn_is_pointwise(const nn_window *w) {
    return w->kernel == 1 && w->stride == 1 && w->padding == 0;
}

/* Rows and columns of nn_columns_kernel. */
NN_API int64_t nn_window_depth(const nn_window *w) {
    return w->channels * w->kernel * w->kernel;
}

NN_API int64_t nn_window_places(const nn_window *w) {
    return w->out_height * w->out_width;
}

/* Images that a convolution works on at once, each with a workspace of its own: a number that does
   not depend on the machine, so that neither the plan nor a sum does. */
NN_API int64_t nn_image_slots(const nn_window *w) {
    return nn_least(NN_IMAGE_SLOTS, w->images);
}

/* Rows of squares whose columns are in memory at once: about NN_PLACES squares. */
NN_API int64_t nn_square_rows(const nn_window *w) {
    const int64_t rows = w->out_width < NN_PLACES ? NN_PLACES / w->out_width : 1;
    return nn_is_pointwise(w) ? w->out_height : nn_least(rows, w->out_height);
}

/* Floats of workspace per slot: columns; in backward a gradient of the weight too. */
NN_API int64_t nn_image_slot_floats(const nn_window *w, int64_t out, bool backward) {
    const int64_t places = nn_is_pointwise(w) ? 0 : nn_square_rows(w) * w->out_width;
    return nn_window_depth(w) * (places + (backward ? out : 0));
}

NN_API int64_t nn_conv2d_floats(const nn_window *w, int64_t out, bool backward) {
    return nn_image_slots(w) * nn_image_slot_floats(w, out, backward);
}

NN_API int64_t nn_conv2d_work(const nn_window *w, int64_t out) {
    return w->images * nn_window_places(w) * nn_window_depth(w) * out / NN_PRODUCTS;
}

NN_API nn_rows_of_squares nn_squares_from(const nn_window *w, int64_t begin) {
    nn_rows_of_squares rows;
    rows.begin = begin;
    rows.count = nn_least(nn_square_rows(w), w->out_height - begin);
    return rows;
}

/* These squares of the planes of one image (depth or out, places). */
NN_API ms_matrix nn_squares(const float *planes, int64_t count, nn_rows_of_squares rows,
                            const nn_window *w) {
    return nn_matrix(planes + rows.begin * w->out_width, count, rows.count * w->out_width,
                     nn_window_places(w));
}

/* The columns of these squares of an image: made in work, or where they stand. */
NN_API ms_matrix nn_columns_of(float *work, const float *image, nn_rows_of_squares rows,
                               const nn_window *w) {
    if (nn_is_pointwise(w)) {
        return nn_squares(image, w->channels, rows, w);
    }
    nn_columns_kernel(work, image, rows, w);
    const int64_t places = rows.count * w->out_width;
    return nn_matrix(work, nn_window_depth(w), places, places);
}

/* One image: y (out, places) from x. */
NN_API int nn_conv2d_image(const ms_call *call, float *y, const float *x, const float *weight,
                           const float *bias, float *work, int64_t out, const nn_window *w) {
    const ms_matrix matrix = nn_matrix(weight, out, nn_window_depth(w), nn_window_depth(w));
    const int64_t places = nn_window_places(w);
    int result = 0;
    for (int64_t o = 0; bias != NULL && o < out; o++) {
        nn_constant_kernel(y + o * places, places, bias[o]);
    }
    for (int64_t begin = 0; begin < w->out_height && result == 0; begin += nn_square_rows(w)) {
        const nn_rows_of_squares rows = nn_squares_from(w, begin);
        result = (int)ms_gemm(call, 1.0f, matrix, nn_columns_of(work, x, rows, w),
                              bias != NULL ? 1.0f : 0.0f, nn_squares(y, out, rows, w));
    }
    return result;
}

/* y (images, out, places) = weight (out, depth) * columns of x + bias; bias may be NULL. */
NN_API int nn_conv2d_kernel(const ms_call *call, float *y, const float *x, const float *weight,
                            const float *bias, int64_t out, const nn_window *w, float *work) {
    const int64_t slots = nn_image_slots(w);
    const int64_t floats = nn_image_slot_floats(w, out, false);
    const int64_t image = w->channels * w->height * w->width;
    int results[NN_IMAGE_SLOTS] = {0};
    NN_PARALLEL(nn_conv2d_work(w, out))
    for (int64_t slot = 0; slot < slots; slot++) {
        for (int64_t b = slot; b < w->images; b += slots) {
            results[slot] |= nn_conv2d_image(call, y + b * out * nn_window_places(w), x + b * image,
                                             weight, bias, work + slot * floats, out, w);
        }
    }
    for (int64_t slot = 1; slot < slots; slot++) {
        results[0] |= results[slot];
    }
    return results[0];
}

/* dweight (out, depth) gets dy * transpose(columns) of one image. */
NN_API int nn_conv2d_weight_image(const ms_call *call, nn_target dweight, const float *dy,
                                  const float *x, float *work, int64_t out, const nn_window *w) {
    const int64_t depth = nn_window_depth(w);
    int result = 0;
    for (int64_t begin = 0; begin < w->out_height && result == 0; begin += nn_square_rows(w)) {
        const nn_rows_of_squares rows = nn_squares_from(w, begin);
        result = (int)ms_gemm(
            call, 1.0f, nn_squares(dy, out, rows, w), ms_transpose(nn_columns_of(work, x, rows, w)),
            begin == 0 ? dweight.beta : 1.0f, nn_matrix(dweight.data, out, depth, depth));
    }
    return result;
}

/* dx gets transpose(weight) * dy of one image, folded back. */
NN_API int nn_conv2d_backward_image(const ms_call *call, nn_target dx, const float *dy,
                                    const float *weight, float *work, int64_t out,
                                    const nn_window *w) {
    const int64_t depth = nn_window_depth(w);
    const ms_matrix turned = ms_transpose(nn_matrix(weight, out, depth, depth));
    int result = 0;
    if (nn_is_pointwise(w)) {
        const nn_rows_of_squares all = nn_squares_from(w, 0);
        return (int)ms_gemm(call, 1.0f, turned, nn_squares(dy, out, all, w), dx.beta,
                            nn_squares(dx.data, depth, all, w));
    }
    if (dx.beta == 0.0f) {
        memset(dx.data, 0, (size_t)(w->channels * w->height * w->width) * sizeof *dx.data);
    }
    for (int64_t begin = 0; begin < w->out_height && result == 0; begin += nn_square_rows(w)) {
        const nn_rows_of_squares rows = nn_squares_from(w, begin);
        const int64_t places = rows.count * w->out_width;
        result = (int)ms_gemm(call, 1.0f, turned, nn_squares(dy, out, rows, w), 0.0f,
                              nn_matrix(work, depth, places, places));
        nn_columns_backward_kernel(dx.data, work, rows, w);
    }
    return result;
}

/* sums (count) gets the slots of parts, each count floats and stride floats from the next. */
NN_API void nn_slot_sums_kernel(nn_target sums, const float *parts, int64_t slots, int64_t stride,
                                int64_t count) {
    float *out = sums.data;
    const bool adds = sums.beta != 0.0f;
    NN_PARALLEL(count * slots)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t end = nn_least(begin + NN_CHUNK, count);
        for (int64_t slot = 0; slot < slots; slot++) {
            const float *part = parts + slot * stride;
            const bool first = slot == 0 && !adds;
            NN_SIMD
            for (int64_t i = begin; i < end; i++) {
                out[i] = first ? part[i] : out[i] + part[i];
            }
        }
    }
}

/* Each slot adds up the gradient of the weight over its own images. An image is read before its
   gradient is written, so dx may be x. */
NN_API int nn_conv2d_backward_kernel(const ms_call *call, nn_target dx, nn_target dweight,
                                     nn_target dbias, const float *dy, const float *x,
                                     const float *weight, int64_t out, const nn_window *w,
                                     float *work) {
    const int64_t slots = nn_image_slots(w);
    const int64_t floats = nn_image_slot_floats(w, out, true);
    const int64_t columns = nn_image_slot_floats(w, out, false);
    const int64_t image = w->channels * w->height * w->width;
    int results[NN_IMAGE_SLOTS] = {0};
    const nn_planes slopes = {w->images, out, nn_window_places(w)};
    nn_channel_sums_kernel(dbias, dy, slopes);
    NN_PARALLEL(nn_conv2d_work(w, out))
    for (int64_t slot = 0; slot < slots; slot++) {
        float *own = work + slot * floats;
        for (int64_t b = slot; b < w->images; b += slots) {
            const float *slope = dy + b * out * nn_window_places(w);
            if (dweight.data != NULL) {
                results[slot] |= nn_conv2d_weight_image(
                    call, nn_target_of(own + columns, b == slot ? 0.0f : 1.0f), slope,
                    x + b * image, own, out, w);
            }
            if (dx.data != NULL) {
                results[slot] |= nn_conv2d_backward_image(
                    call, nn_target_of(dx.data + b * image, dx.beta), slope, weight, own, out, w);
            }
        }
    }
    for (int64_t slot = 1; slot < slots; slot++) {
        results[0] |= results[slot];
    }
    if (dweight.data != NULL) {
        nn_slot_sums_kernel(dweight, work + columns, slots, floats, out * nn_window_depth(w));
    }
    return results[0];
}

// ------------------------------------------------------------------------------------------------
// >>nn scratch  of the kernels for a GPU: sizes alone, which a dry run needs where no GPU is

/* Floats of workspace of attention and of convolution, about; for tests, which have small sizes, to
   set lower. */
#ifndef NN_GROUP_FLOATS
#define NN_GROUP_FLOATS (9 << 20)
#endif

enum {
    NN_THREADS = 256,          // of a block of most kernels
    NN_SUM_FLOATS = 64 * 1024, // of partial sums, about
    NN_TILE = 128,             // rows of a product's tile
    NN_BUSY_TILES = 128,       // tiles that keep a GPU busy
    NN_GROUP_PADDING = 128,    // floats that the alignment of a group of heads may take
    NN_CHANNEL_ITEMS = 16,     // values of a channel that a thread sums
    NN_CHANNEL_CHUNK = NN_CHANNEL_ITEMS * NN_THREADS,
    NN_SEGMENT = 256 // squares, at least, of one of several products
};

NN_API int64_t nn_divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

NN_API int64_t nn_cuda_column_floats(int64_t rows, int64_t columns) {
    return nn_most(columns, nn_least(nn_divide_up(rows, 64) * columns, NN_SUM_FLOATS));
}

NN_API int64_t nn_cuda_layernorm_floats(int64_t rows, int64_t width) {
    return 2 * nn_cuda_column_floats(rows, width);
}

/* Floats of workspace, in backward, for one head in place and for one sequence packed. */
NN_API int64_t nn_cuda_head_floats(nn_attention_size n) {
    return n.sequence * (2 * n.sequence + n.size);
}

NN_API int64_t nn_cuda_sequence_floats(nn_attention_size n) {
    return n.heads * n.sequence * (2 * n.sequence + 4 * n.size);
}

/* What is enough for these sizes and for all smaller ones: in place, and packed for the longest
   sequence that would be. Forward needs three quarters at most. */
NN_API int64_t nn_cuda_attention_floats(nn_attention_size n, bool backward) {
    int64_t floats = nn_most(nn_cuda_head_floats(n),
                             nn_least(NN_GROUP_FLOATS, n.heads * nn_cuda_head_floats(n)));
    int64_t tiles = nn_divide_up(n.sequence, NN_TILE);
    while (tiles > 0 && tiles * tiles * n.heads >= NN_BUSY_TILES) {
        tiles--;
    }
    if (n.batch > 1 && tiles > 0) {
        n.sequence = nn_least(n.sequence, tiles * NN_TILE);
        const int64_t one = nn_cuda_sequence_floats(n);
        floats = nn_most(floats, nn_most(one, nn_least(NN_GROUP_FLOATS, n.batch * one)));
    }
    return (backward ? floats : floats - floats / 4) + NN_GROUP_PADDING;
}

NN_API int64_t nn_cuda_channel_chunks(nn_planes n) {
    return nn_divide_up(n.images * n.plane, NN_CHANNEL_CHUNK);
}

/* Partial sums and products, and two floats more per channel. */
NN_API int64_t nn_cuda_channel_floats(nn_planes n) {
    return n.channels * (2 * nn_cuda_channel_chunks(n) + 2);
}

/* Floats that the columns of a convolution may take, about: enough to keep a GPU busy, but no more
   than the layer reads and writes, of which the columns are many times. */
NN_API int64_t nn_cuda_conv2d_limit(const nn_window *w, int64_t out) {
    const int64_t image = w->channels * w->height * w->width + out * nn_window_places(w);
    const int64_t tiles = nn_divide_up(NN_BUSY_TILES, nn_divide_up(out, NN_TILE));
    return nn_least(NN_GROUP_FLOATS,
                    nn_least(w->images * image, nn_window_depth(w) * NN_TILE * tiles));
}

NN_API int64_t nn_cuda_columns_floats(const nn_window *w, int64_t out) {
    const int64_t depth = nn_window_depth(w);
    return nn_is_pointwise(w)
               ? 0
               : nn_least(w->images * nn_window_places(w) * depth,
                          nn_most(nn_cuda_conv2d_limit(w, out), depth * w->out_width));
}

/* The gradient of a weight sums over all squares of all images. Either each image gives a product,
   of images as they stand; or columns and slopes of many images are copied, so that their squares
   are side by side, and cut into segments, which do not heed images. The first where it needs no
   more memory than the second. */
NN_API bool nn_cuda_sums_images(const nn_window *w, int64_t out) {
    return nn_is_pointwise(w) && out * w->channels <= (out + w->channels) * nn_window_places(w);
}

/* At least nn_segments.squares, of so many squares and of all fewer. */
NN_API int64_t nn_cuda_padded(int64_t squares) {
    return squares + squares / (NN_SEGMENT / 4) + 4;
}

NN_API int64_t nn_cuda_weight_floats(const nn_window *w, int64_t out) {
    const int64_t limit = nn_cuda_conv2d_limit(w, out);
    const int64_t product = out * nn_window_depth(w);
    const int64_t square = 2 * (nn_window_depth(w) + out);
    if (nn_cuda_sums_images(w, out)) {
        return nn_least(w->images * product, nn_most(limit, product));
    }
    return nn_least(square * nn_cuda_padded(w->images * nn_window_places(w)),
                    nn_most(limit, square * nn_cuda_padded(w->out_width)));
}

NN_API int64_t nn_cuda_conv2d_floats(const nn_window *w, int64_t out, bool backward) {
    const int64_t columns = nn_cuda_columns_floats(w, out);
    const nn_planes slopes = {w->images, out, nn_window_places(w)};
    return backward ? nn_most(nn_cuda_channel_floats(slopes),
                              nn_most(columns, nn_cuda_weight_floats(w, out)))
                    : columns;
}

// ------------------------------------------------------------------------------------------------
// >>nn device  the table between callbacks and kernels

/* What the layers are made of. A kernel enqueues its work on call->stream (on the CPU: does it) and
   returns 0 or an error number. Pointers, but for those to structs, are memory of the device.
   work is scratch memory of as many floats as the function of sizes returns; what it asks for never
   shrinks as sizes grow, so that room for the largest size is room for all. */
struct nn_device {
    const char *name;
    bool skips_masked; // attention: the products leave out most of the keys that no query sees
    int64_t (*column_floats)(int64_t rows, int64_t columns);  // embedding and linear, backward
    int64_t (*layernorm_floats)(int64_t rows, int64_t width); // backward
    int64_t (*attention_floats)(nn_attention_size n, bool backward);
    int64_t (*conv2d_floats)(const nn_window *w, int64_t out, bool backward);
    int64_t (*batch_norm_floats)(nn_planes n); // forward and backward
    int (*pass)(const ms_call *call, nn_target y, const float *x, int64_t count);
    int (*add)(const ms_call *call, float *y, const float *a, const float *b, int64_t count);
    int (*dropout)(const ms_call *call, nn_target y, const float *x, int64_t count,
                   float probability, nn_seed seed);
    int (*gelu)(const ms_call *call, float *y, const float *x, int64_t count, bool erf_form);
    int (*gelu_backward)(const ms_call *call, nn_target dx, const float *dy, const float *x,
                         int64_t count, bool erf_form);
    int (*embedding)(const ms_call *call, float *y, const nn_lookup *lookups, int lookup_count,
                     int64_t rows, int64_t channels);
    int (*embedding_backward)(const ms_call *call, nn_target dtable, const nn_lookup *lookup,
                              const float *dy, int64_t rows, int64_t channels, float *work);
    int (*linear)(const ms_call *call, float *y, const float *x, const float *weight,
                  const float *bias, nn_linear_size n);
    /* h = x * transpose(weight) + bias, y = gelu(h) */
    int (*linear_gelu)(const ms_call *call, float *y, float *h, const float *x, const float *weight,
                       const float *bias, nn_linear_size n, bool erf_form);
    /* y = residual + dropout(x * transpose(weight) + bias) */
    int (*linear_add)(const ms_call *call, float *y, const float *residual, const float *x,
                      const float *weight, const float *bias, nn_linear_size n,
                      const nn_drop *drop);
    int (*linear_backward)(const ms_call *call, nn_target dx, nn_target dweight, nn_target dbias,
                           const float *dy, const float *x, const float *weight, nn_linear_size n,
                           float *work);
    int (*layernorm)(const ms_call *call, float *y, const float *x, const nn_norm *n);
    int (*layernorm_backward)(const ms_call *call, nn_target dx, nn_target dweight, nn_target dbias,
                              const float *dy, const float *x, const nn_norm *n, float *work);
    int (*attention)(const ms_call *call, float *out, float *scores, const float *qkv, float *work,
                     nn_attention_size n);
    int (*attention_backward)(const ms_call *call, nn_target dqkv, const float *dout,
                              const float *scores, const float *qkv, float *work,
                              nn_attention_size n);
    int (*cross_entropy)(const ms_call *call, float *losses, float *stats, const float *logits,
                         const int32_t *targets, int64_t rows, int64_t classes);
    int (*cross_entropy_backward)(const ms_call *call, nn_target dlogits, const float *dlosses,
                                  const float *stats, const float *logits, const int32_t *targets,
                                  int64_t rows, int64_t classes);
    int (*relu)(const ms_call *call, float *y, const float *x, int64_t count);
    int (*relu_backward)(const ms_call *call, nn_target dx, const float *dy, const float *y,
                         int64_t count);
    int (*conv2d)(const ms_call *call, float *y, const float *x, const float *weight,
                  const float *bias, int64_t out, const nn_window *w, float *work);
    int (*conv2d_backward)(const ms_call *call, nn_target dx, nn_target dweight, nn_target dbias,
                           const float *dy, const float *x, const float *weight, int64_t out,
                           const nn_window *w, float *work);
    int (*max_pool)(const ms_call *call, float *y, int32_t *places, const float *x,
                    const nn_window *w);
    int (*max_pool_backward)(const ms_call *call, nn_target dx, const float *dy,
                             const int32_t *places, const nn_window *w);
    int (*batch_norm)(const ms_call *call, float *y, const float *x, const nn_batch_norm_values *v,
                      nn_planes n, float *work);
    int (*batch_norm_backward)(const ms_call *call, nn_target dx, nn_target dweight,
                               nn_target dbias, const float *dy, const float *x,
                               const nn_batch_norm_values *v, nn_planes n, float *work);
    int (*average)(const ms_call *call, float *means, const float *x, nn_planes n);
    int (*average_backward)(const ms_call *call, nn_target dx, const float *dmeans, nn_planes n);
};

NN_API int64_t nn_no_floats(int64_t rows, int64_t columns) {
    (void)rows;
    (void)columns;
    return 0;
}

NN_API int64_t nn_no_floats_of_planes(nn_planes n) {
    (void)n;
    return 0;
}

NN_API const nn_device *nn_cpu(void) {
    static const nn_device cpu = {
        "cpu",
        true,
        nn_no_floats,
        nn_no_floats,
        nn_attention_floats,
        nn_conv2d_floats,
        nn_no_floats_of_planes,
        nn_pass_kernel,
        nn_add_kernel,
        nn_dropout_kernel,
        nn_gelu_kernel,
        nn_gelu_backward_kernel,
        nn_embedding_kernel,
        nn_embedding_backward_kernel,
        nn_linear_kernel,
        nn_linear_gelu_kernel,
        nn_linear_add_kernel,
        nn_linear_backward_kernel,
        nn_layernorm_kernel,
        nn_layernorm_backward_kernel,
        nn_attention_kernel,
        nn_attention_backward_kernel,
        nn_cross_entropy_kernel,
        nn_cross_entropy_backward_kernel,
        nn_relu_kernel,
        nn_relu_backward_kernel,
        nn_conv2d_kernel,
        nn_conv2d_backward_kernel,
        nn_max_pool_kernel,
        nn_max_pool_backward_kernel,
        nn_batch_norm_kernel,
        nn_batch_norm_backward_kernel,
        nn_average_kernel,
        nn_average_backward_kernel,
    };
    return &cpu;
}

NN_API const nn_device *nn_cuda_dry(void) {
    static const nn_device cuda = {
        "cuda", false, nn_cuda_column_floats, nn_cuda_layernorm_floats, nn_cuda_attention_floats,
        nn_cuda_conv2d_floats, nn_cuda_channel_floats,
        // clang-format off
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        // clang-format on
    };
    return &cuda;
}

// ------------------------------------------------------------------------------------------------
// >>nn options and net

enum {
    NN_CAUSAL = 1,
    NN_SAVE_SCORES = 2,
    NN_BIAS = 4,
    NN_POSITIONS = 8,
    NN_SEGMENTS = 16,
    NN_ERF = 32,
    NN_POST_NORM = 64
};

/* What a layer cannot see from its views. Layers with equal options share one. */
typedef struct nn_options {
    struct nn_options *next;
    const nn_device *device; // that of the net
    int64_t heads, kernel, stride, padding;
    float dropout, epsilon, momentum;
    uint32_t flags;
} nn_options;

typedef struct nn_table {
    nn_param_info *infos;
    int64_t count, capacity;
} nn_table;

struct nn_net {
    ms_model *model;
    const nn_device *device;
    nn_options *options;
    nn_table params, buffers;
    int64_t axis_size[MS_LIMIT_AXES], axis_largest[MS_LIMIT_AXES]; // 0: not made by nn_axis
};

typedef struct nn_name {
    char text[64];
} nn_name;

NN_API nn_name nn_join(const char *prefix, const char *suffix) {
    nn_name name;
    snprintf(name.text, sizeof name.text, "%.46s.%.16s", prefix, suffix); // long names are cut
    return name;
}

NN_API nn_net *nn_create_on(ms_model *model, const nn_device *device) {
    nn_net *net = (nn_net *)calloc(1, sizeof *net);
    if (net != NULL) {
        net->model = model;
        net->device = device;
    }
    return net;
}

NN_API nn_net *nn_create(ms_model *model) {
    return nn_create_on(model, nn_cpu());
}

NN_API void nn_destroy(nn_net *net) {
    if (net == NULL) {
        return;
    }
    while (net->options != NULL) {
        nn_options *next = net->options->next;
        free(net->options);
        net->options = next;
    }
    free(net->params.infos);
    free(net->buffers.infos);
    free(net);
}

/* An error that sticks in the model; the handle 0, for the caller to return. */
NN_API ms_tensor nn_refuse(nn_net *net, const char *reason) {
    const ms_tensor none = {0};
    ms_refuse(net->model, reason);
    return none;
}

/* Room for one more element; false: no memory. */
NN_API bool nn_reserve(void **array, size_t element_bytes, int64_t count, int64_t *capacity) {
    if (count < *capacity) {
        return true;
    }
    const int64_t wanted = *capacity == 0 ? 64 : 2 * *capacity;
    void *larger = realloc(*array, (size_t)wanted * element_bytes);
    if (larger == NULL) {
        return false;
    }
    *array = larger;
    *capacity = wanted;
    return true;
}

NN_API bool nn_options_equal(const nn_options *a, const nn_options *b) {
    const float of_a[] = {a->dropout, a->epsilon, a->momentum};
    const float of_b[] = {b->dropout, b->epsilon, b->momentum};
    return a->heads == b->heads && a->kernel == b->kernel && a->stride == b->stride &&
           a->padding == b->padding && a->flags == b->flags && memcmp(of_a, of_b, sizeof of_a) == 0;
}

/* Options like these that live as long as the net. */
NN_API nn_options *nn_options_like(nn_net *net, const nn_options *wanted) {
    for (nn_options *o = net->options; o != NULL; o = o->next) {
        if (nn_options_equal(o, wanted)) {
            return o;
        }
    }
    nn_options *made = (nn_options *)calloc(1, sizeof *made);
    if (made == NULL) {
        nn_refuse(net, "nn: no memory for options");
        return NULL;
    }
    *made = *wanted;
    made->device = net->device;
    made->next = net->options;
    net->options = made;
    return made;
}

NN_API nn_options *nn_options_of(nn_net *net, int64_t heads, float dropout, float epsilon,
                                 uint32_t flags) {
    nn_options wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.heads = heads;
    wanted.dropout = dropout;
    wanted.epsilon = epsilon;
    wanted.flags = flags;
    return nn_options_like(net, &wanted);
}

NN_API nn_options *nn_window_options(nn_net *net, int64_t kernel, int64_t stride, int64_t padding,
                                     uint32_t flags) {
    nn_options wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.kernel = kernel;
    wanted.stride = stride;
    wanted.padding = padding;
    wanted.flags = flags;
    return nn_options_like(net, &wanted);
}

NN_API ms_axis nn_axis(nn_net *net, const char *name, int64_t size, int64_t largest) {
    const ms_axis axis = ms_add_axis(net->model, name, size, largest);
    const ms_shape along = ms_along(ms_shape1(size), 0, axis);
    for (int a = 0; a < MS_LIMIT_AXES; a++) {
        if (axis.id != 0 && (along.axes[0] >> a & 1) != 0) {
            net->axis_size[a] = size;
            net->axis_largest[a] = largest;
        }
    }
    return axis;
}

/* A new entry of a table, without its tensor; NULL: no memory. */
NN_API nn_param_info *nn_note(nn_net *net, nn_table *table, const char *name, ms_shape shape,
                              nn_init_kind init, float deviation) {
    void *array = table->infos;
    const bool room = nn_reserve(&array, sizeof *table->infos, table->count, &table->capacity);
    table->infos = (nn_param_info *)array;
    if (!room) {
        nn_refuse(net, "nn: no memory for a param or buffer");
        return NULL;
    }
    nn_param_info *info = &table->infos[table->count++];
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "%s", name);
    info->shape = shape;
    info->init = init;
    info->deviation = deviation;
    return info;
}

NN_API ms_tensor nn_param(nn_net *net, const char *name, ms_shape shape, nn_init_kind init,
                          float deviation) {
    const ms_tensor none = {0};
    nn_param_info *info = nn_note(net, &net->params, name, shape, init, deviation);
    if (info == NULL) {
        return none;
    }
    info->tensor = ms_param(net->model, name, MS_DTYPE_F32, shape);
    if (shape.rank == 1 && info->tensor.id != 0) {
        ms_set_weight_decay(net->model, info->tensor, 0.0f);
    }
    return info->tensor;
}

NN_API ms_tensor nn_buffer(nn_net *net, const char *name, ms_shape shape, nn_init_kind init) {
    const ms_tensor none = {0};
    nn_param_info *info = nn_note(net, &net->buffers, name, shape, init, 0.0f);
    if (info == NULL) {
        return none;
    }
    info->tensor = ms_buffer(net->model, name, MS_DTYPE_F32, shape);
    return info->tensor;
}

NN_API const nn_param_info *nn_table_at(const nn_table *table, int64_t index) {
    return index >= 0 && index < table->count ? &table->infos[index] : NULL;
}

NN_API const nn_param_info *nn_table_find(const nn_table *table, const char *name) {
    for (int64_t i = 0; i < table->count; i++) {
        if (strcmp(table->infos[i].name, name) == 0) {
            return &table->infos[i];
        }
    }
    return NULL;
}

NN_API int64_t nn_param_count(const nn_net *net) {
    return net->params.count;
}

NN_API const nn_param_info *nn_param_at(const nn_net *net, int64_t index) {
    return nn_table_at(&net->params, index);
}

NN_API const nn_param_info *nn_find_param(const nn_net *net, const char *name) {
    return nn_table_find(&net->params, name);
}

NN_API int64_t nn_buffer_count(const nn_net *net) {
    return net->buffers.count;
}

NN_API const nn_param_info *nn_buffer_at(const nn_net *net, int64_t index) {
    return nn_table_at(&net->buffers, index);
}

NN_API const nn_param_info *nn_find_buffer(const nn_net *net, const char *name) {
    return nn_table_find(&net->buffers, name);
}

/* Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958: two a time. */
NN_API void nn_normal_kernel(float *values, int64_t count, float deviation, uint64_t seed) {
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        const uint64_t key = nn_chunk_key(seed, begin);
        float *to = values + begin;
        for (int64_t i = 0; i < size; i += 2) {
            const uint32_t counter = (uint32_t)i;
            const float u = (float)((nn_random(key, counter) >> 8) + 1u) * (1.0f / 16777216.0f);
            const float v = (float)(nn_random(key, counter + 1u) >> 8) * (1.0f / 16777216.0f);
            const float radius = deviation * sqrtf(-2.0f * logf(u));
            to[i] = radius * cosf(6.28318531f * v);
            if (i + 1 < size) {
                to[i + 1] = radius * sinf(6.28318531f * v);
            }
        }
    }
}

NN_API uint64_t nn_table_largest(const nn_table *table) {
    uint64_t largest = 0;
    for (int64_t i = 0; i < table->count; i++) {
        const uint64_t count = ms_shape_count(&table->infos[i].shape);
        largest = count > largest ? count : largest;
    }
    return largest;
}

/* values has room for the largest of the table. */
NN_API ms_result nn_init_table(nn_net *net, const nn_table *table, float *values, uint64_t seed) {
    ms_result result = MS_RESULT_OK;
    for (int64_t i = 0; i < table->count && result == MS_RESULT_OK; i++) {
        const nn_param_info *info = &table->infos[i];
        const int64_t count = (int64_t)ms_shape_count(&info->shape);
        if (info->init == NN_INIT_NORMAL) {
            nn_normal_kernel(values, count, info->deviation, nn_mix(seed ^ nn_mix((uint64_t)i)));
        } else {
            nn_constant_kernel(values, count, info->init == NN_INIT_ONES ? 1.0f : 0.0f);
        }
        result = ms_write(net->model, info->tensor, values);
    }
    return result;
}

NN_API ms_result nn_init(nn_net *net, uint64_t seed) {
    const uint64_t params = nn_table_largest(&net->params);
    const uint64_t buffers = nn_table_largest(&net->buffers);
    const uint64_t largest = params > buffers ? params : buffers;
    if (largest > SIZE_MAX / sizeof(float)) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    float *values = (float *)malloc((size_t)(largest + 1) * sizeof *values);
    if (values == NULL) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    ms_result result = nn_init_table(net, &net->params, values, seed);
    if (result == MS_RESULT_OK) {
        result = nn_init_table(net, &net->buffers, values, nn_mix(seed));
    }
    free(values);
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>nn callbacks  from views to kernels

NN_API float *nn_floats(const ms_view *view) {
    return (float *)view->data;
}

NN_API int32_t *nn_integers(const ms_view *view) {
    return (int32_t *)view->data;
}

NN_API nn_target nn_gradient_of(const ms_view *view) {
    return nn_target_of((float *)view->data, view->beta);
}

NN_API int64_t nn_count(const ms_view *view) {
    return (int64_t)ms_shape_count(&view->shape);
}

NN_API int64_t nn_last(ms_shape shape) {
    return shape.rank > 0 ? shape.dim[shape.rank - 1] : 1;
}

/* All axes but the last. */
NN_API int64_t nn_rows(ms_shape shape) {
    return (int64_t)ms_shape_count(&shape) / nn_last(shape);
}

NN_API const nn_options *nn_options_in(const ms_call *call) {
    return (const nn_options *)call->user;
}

NN_API const nn_device *nn_device_in(const ms_call *call) {
    return nn_options_in(call)->device;
}

/* The error of two calls, where there is one. */
NN_API int nn_first(int a, int b) {
    return a != 0 ? a : b;
}

NN_API nn_seed nn_seed_of(const ms_call *call, int branch) {
    nn_seed seed;
    seed.layer = call->layer_seed;
    seed.step = call->step_seed;
    seed.branch = branch;
    return seed;
}

/* Up to three lookups: tokens, positions, segments; those that the layer lacks have no entries. */
NN_API void nn_lookups_of(const ms_call *call, nn_lookup lookups[3]) {
    const uint32_t flags = nn_options_in(call)->flags;
    const bool used[3] = {true, (flags & NN_POSITIONS) != 0, (flags & NN_SEGMENTS) != 0};
    memset(lookups, 0, 3 * sizeof *lookups);
    for (int i = 0; i < 3; i++) {
        if (used[i]) {
            lookups[i].table = nn_floats(&call->param[i]);
            lookups[i].entries = call->param[i].shape.dim[0];
            lookups[i].period = nn_last(call->in[0].shape);
        }
    }
    lookups[0].index = nn_integers(&call->in[0]);
    lookups[2].index = used[2] ? nn_integers(&call->in[1]) : NULL;
}

NN_API int nn_embedding_forward(const ms_call *call) {
    nn_lookup lookups[3];
    nn_lookups_of(call, lookups);
    return nn_device_in(call)->embedding(call, nn_floats(&call->out[0]), lookups, 3,
                                         nn_count(&call->in[0]), nn_last(call->out[0].shape));
}

NN_API int nn_embedding_backward(const ms_call *call) {
    nn_lookup lookups[3];
    int result = 0;
    nn_lookups_of(call, lookups);
    for (int i = 0; i < 3 && result == 0; i++) {
        if (lookups[i].entries != 0) {
            result = nn_device_in(call)->embedding_backward(
                call, nn_gradient_of(&call->grad_param[i]), &lookups[i],
                nn_floats(&call->grad_out[0]), nn_count(&call->in[0]),
                nn_last(call->grad_out[0].shape), (float *)call->workspace);
        }
    }
    return result;
}

NN_API nn_linear_size nn_linear_size_of(const ms_call *call) {
    nn_linear_size n;
    n.rows = nn_rows(call->in[0].shape);
    n.in = call->param[0].shape.dim[1];
    n.out = call->param[0].shape.dim[0];
    return n;
}

NN_API int nn_linear_forward(const ms_call *call) {
    const bool biased = (nn_options_in(call)->flags & NN_BIAS) != 0;
    return nn_device_in(call)->linear(
        call, nn_floats(&call->out[0]), nn_floats(&call->in[0]), nn_floats(&call->param[0]),
        biased ? nn_floats(&call->param[1]) : NULL, nn_linear_size_of(call));
}

NN_API int nn_linear_backward(const ms_call *call) {
    const bool biased = (nn_options_in(call)->flags & NN_BIAS) != 0;
    return nn_device_in(call)->linear_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]),
        biased ? nn_gradient_of(&call->grad_param[1]) : nn_target_of(NULL, 0.0f),
        nn_floats(&call->grad_out[0]), nn_floats(&call->in[0]), nn_floats(&call->param[0]),
        nn_linear_size_of(call), (float *)call->workspace);
}

NN_API nn_norm nn_norm_of(const ms_call *call) {
    nn_norm n;
    n.rows = nn_rows(call->in[0].shape);
    n.width = nn_last(call->in[0].shape);
    n.weight = nn_floats(&call->param[0]);
    n.bias = nn_floats(&call->param[1]);
    n.mean = nn_floats(&call->saved[0]);
    n.rstd = nn_floats(&call->saved[1]);
    n.epsilon = nn_options_in(call)->epsilon;
    return n;
}

NN_API int nn_layernorm_forward(const ms_call *call) {
    const nn_norm n = nn_norm_of(call);
    return nn_device_in(call)->layernorm(call, nn_floats(&call->out[0]), nn_floats(&call->in[0]),
                                         &n);
}

NN_API int nn_layernorm_backward(const ms_call *call) {
    const nn_norm n = nn_norm_of(call);
    return nn_device_in(call)->layernorm_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]),
        nn_gradient_of(&call->grad_param[1]), nn_floats(&call->grad_out[0]),
        nn_floats(&call->in[0]), &n, (float *)call->workspace);
}

NN_API int nn_gelu_forward(const ms_call *call) {
    return nn_device_in(call)->gelu(call, nn_floats(&call->out[0]), nn_floats(&call->in[0]),
                                    nn_count(&call->in[0]),
                                    (nn_options_in(call)->flags & NN_ERF) != 0);
}

NN_API int nn_gelu_backward(const ms_call *call) {
    return nn_device_in(call)->gelu_backward(call, nn_gradient_of(&call->grad_in[0]),
                                             nn_floats(&call->grad_out[0]), nn_floats(&call->in[0]),
                                             nn_count(&call->in[0]),
                                             (nn_options_in(call)->flags & NN_ERF) != 0);
}

NN_API int nn_add_forward(const ms_call *call) {
    return nn_device_in(call)->add(call, nn_floats(&call->out[0]), nn_floats(&call->in[0]),
                                   nn_floats(&call->in[1]), nn_count(&call->out[0]));
}

NN_API int nn_add_backward(const ms_call *call) {
    int result = 0;
    for (int i = 0; i < 2; i++) {
        result = nn_first(result, nn_device_in(call)->pass(call, nn_gradient_of(&call->grad_in[i]),
                                                           nn_floats(&call->grad_out[0]),
                                                           nn_count(&call->grad_out[0])));
    }
    return result;
}

NN_API int nn_dropout_forward(const ms_call *call) {
    const nn_target out = nn_target_of(nn_floats(&call->out[0]), 0.0f);
    const float *x = nn_floats(&call->in[0]);
    if (call->phase == MS_PHASE_EVAL) {
        return nn_device_in(call)->pass(call, out, x, nn_count(&call->in[0]));
    }
    return nn_device_in(call)->dropout(call, out, x, nn_count(&call->in[0]),
                                       nn_options_in(call)->dropout, nn_seed_of(call, -1));
}

NN_API int nn_dropout_backward(const ms_call *call) {
    return nn_device_in(call)->dropout(call, nn_gradient_of(&call->grad_in[0]),
                                       nn_floats(&call->grad_out[0]), nn_count(&call->grad_out[0]),
                                       nn_options_in(call)->dropout, nn_seed_of(call, -1));
}

NN_API nn_attention_size nn_attention_size_of(ms_shape qkv, int64_t heads, bool causal) {
    nn_attention_size n;
    n.batch = qkv.dim[0];
    n.sequence = qkv.dim[1];
    n.heads = heads;
    n.size = qkv.dim[2] / 3 / heads;
    n.causal = causal;
    return n;
}

NN_API int nn_attention_forward(const ms_call *call) {
    const nn_options *options = nn_options_in(call);
    const bool keeps = (options->flags & NN_SAVE_SCORES) != 0;
    return nn_device_in(call)->attention(
        call, nn_floats(&call->out[0]), keeps ? nn_floats(&call->saved[0]) : NULL,
        nn_floats(&call->in[0]), (float *)call->workspace,
        nn_attention_size_of(call->in[0].shape, options->heads, (options->flags & NN_CAUSAL) != 0));
}

NN_API int nn_attention_backward(const ms_call *call) {
    const nn_options *options = nn_options_in(call);
    const bool keeps = (options->flags & NN_SAVE_SCORES) != 0;
    return nn_device_in(call)->attention_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_floats(&call->grad_out[0]),
        keeps ? nn_floats(&call->saved[0]) : NULL, nn_floats(&call->in[0]),
        (float *)call->workspace,
        nn_attention_size_of(call->in[0].shape, options->heads, (options->flags & NN_CAUSAL) != 0));
}

NN_API int nn_cross_entropy_forward(const ms_call *call) {
    return nn_device_in(call)->cross_entropy(
        call, nn_floats(&call->out[0]), nn_floats(&call->saved[0]), nn_floats(&call->in[0]),
        nn_integers(&call->in[1]), nn_count(&call->in[1]), nn_last(call->in[0].shape));
}

NN_API int nn_cross_entropy_backward(const ms_call *call) {
    return nn_device_in(call)->cross_entropy_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_floats(&call->grad_out[0]),
        nn_floats(&call->saved[0]), nn_floats(&call->in[0]), nn_integers(&call->in[1]),
        nn_count(&call->in[1]), nn_last(call->in[0].shape));
}

NN_API int nn_relu_forward(const ms_call *call) {
    return nn_device_in(call)->relu(call, nn_floats(&call->out[0]), nn_floats(&call->in[0]),
                                    nn_count(&call->in[0]));
}

NN_API int nn_relu_backward(const ms_call *call) {
    return nn_device_in(call)->relu_backward(call, nn_gradient_of(&call->grad_in[0]),
                                             nn_floats(&call->grad_out[0]),
                                             nn_floats(&call->out[0]), nn_count(&call->out[0]));
}

/* (B, C, ...): all dims behind the channels are one plane. */
NN_API nn_planes nn_planes_of(ms_shape shape) {
    nn_planes n;
    n.images = shape.dim[0];
    n.channels = shape.dim[1];
    n.plane = (int64_t)ms_shape_count(&shape) / (n.images * n.channels);
    return n;
}

NN_API nn_window nn_window_in(const ms_call *call) {
    const nn_options *o = nn_options_in(call);
    return nn_window_of(call->in[0].shape, o->kernel, o->stride, o->padding);
}

NN_API int nn_conv2d_forward(const ms_call *call) {
    const bool biased = (nn_options_in(call)->flags & NN_BIAS) != 0;
    const nn_window w = nn_window_in(call);
    return nn_device_in(call)->conv2d(call, nn_floats(&call->out[0]), nn_floats(&call->in[0]),
                                      nn_floats(&call->param[0]),
                                      biased ? nn_floats(&call->param[1]) : NULL,
                                      call->param[0].shape.dim[0], &w, (float *)call->workspace);
}

NN_API int nn_conv2d_backward(const ms_call *call) {
    const bool biased = (nn_options_in(call)->flags & NN_BIAS) != 0;
    const nn_window w = nn_window_in(call);
    return nn_device_in(call)->conv2d_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]),
        biased ? nn_gradient_of(&call->grad_param[1]) : nn_target_of(NULL, 0.0f),
        nn_floats(&call->grad_out[0]), nn_floats(&call->in[0]), nn_floats(&call->param[0]),
        call->param[0].shape.dim[0], &w, (float *)call->workspace);
}

NN_API int nn_max_pool_forward(const ms_call *call) {
    const nn_window w = nn_window_in(call);
    return nn_device_in(call)->max_pool(call, nn_floats(&call->out[0]),
                                        nn_integers(&call->saved[0]), nn_floats(&call->in[0]), &w);
}

NN_API int nn_max_pool_backward(const ms_call *call) {
    const nn_window w = nn_window_in(call);
    return nn_device_in(call)->max_pool_backward(call, nn_gradient_of(&call->grad_in[0]),
                                                 nn_floats(&call->grad_out[0]),
                                                 nn_integers(&call->saved[0]), &w);
}

NN_API nn_batch_norm_values nn_batch_norm_values_of(const ms_call *call, nn_moments moments) {
    nn_batch_norm_values v;
    memset(&v, 0, sizeof v);
    v.moments = moments;
    v.weight = nn_floats(&call->param[0]);
    v.bias = nn_floats(&call->param[1]);
    v.mean = nn_floats(&call->saved[0]);
    v.rstd = nn_floats(&call->saved[1]);
    v.epsilon = nn_options_in(call)->epsilon;
    v.momentum = nn_options_in(call)->momentum;
    if (call->phase == MS_PHASE_FORWARD || call->phase == MS_PHASE_EVAL) {
        v.running_mean = nn_floats(&call->state[0]);
        v.running_variance = nn_floats(&call->state[1]);
    }
    return v;
}

NN_API int nn_batch_norm_forward(const ms_call *call) {
    const nn_batch_norm_values v = nn_batch_norm_values_of(
        call, call->phase == MS_PHASE_EVAL ? NN_MOMENTS_RUNNING : NN_MOMENTS_OF_BATCH);
    return nn_device_in(call)->batch_norm(call, nn_floats(&call->out[0]), nn_floats(&call->in[0]),
                                          &v, nn_planes_of(call->in[0].shape),
                                          (float *)call->workspace);
}

NN_API int nn_batch_norm_recompute(const ms_call *call) {
    const nn_batch_norm_values v = nn_batch_norm_values_of(call, NN_MOMENTS_SAVED);
    return nn_device_in(call)->batch_norm(call, nn_floats(&call->out[0]), nn_floats(&call->in[0]),
                                          &v, nn_planes_of(call->in[0].shape),
                                          (float *)call->workspace);
}

NN_API int nn_batch_norm_backward(const ms_call *call) {
    const nn_batch_norm_values v = nn_batch_norm_values_of(call, NN_MOMENTS_SAVED);
    return nn_device_in(call)->batch_norm_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]),
        nn_gradient_of(&call->grad_param[1]), nn_floats(&call->grad_out[0]),
        nn_floats(&call->in[0]), &v, nn_planes_of(call->in[0].shape), (float *)call->workspace);
}

NN_API int nn_average_pool_forward(const ms_call *call) {
    return nn_device_in(call)->average(call, nn_floats(&call->out[0]), nn_floats(&call->in[0]),
                                       nn_planes_of(call->in[0].shape));
}

NN_API int nn_average_pool_backward(const ms_call *call) {
    return nn_device_in(call)->average_backward(call, nn_gradient_of(&call->grad_in[0]),
                                                nn_floats(&call->grad_out[0]),
                                                nn_planes_of(call->in[0].shape));
}

NN_API int nn_flatten_forward(const ms_call *call) {
    return nn_device_in(call)->pass(call, nn_target_of(nn_floats(&call->out[0]), 0.0f),
                                    nn_floats(&call->in[0]), nn_count(&call->in[0]));
}

NN_API int nn_flatten_backward(const ms_call *call) {
    return nn_device_in(call)->pass(call, nn_gradient_of(&call->grad_in[0]),
                                    nn_floats(&call->grad_out[0]), nn_count(&call->grad_out[0]));
}

// ------------------------------------------------------------------------------------------------
// >>nn layers

NN_API ms_layer_desc nn_desc(const char *name, ms_layer_fn forward, ms_layer_fn backward,
                             nn_options *options) {
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = name;
    desc.forward = forward;
    desc.backward = backward;
    desc.user = options;
    return desc;
}

/* Registers desc, with a new activation of this shape as its only output. */
NN_API ms_tensor nn_register(nn_net *net, ms_layer_desc *desc, ms_shape shape) {
    desc->out[0] = ms_activation(net->model, desc->name, MS_DTYPE_F32, shape);
    if (desc->user != NULL) {
        ms_register_layer(net->model, desc);
    }
    return desc->out[0];
}

/* A workspace of so many floats; the shape is that of the rows of a layer. */
NN_API ms_workspace nn_workspace(int64_t floats) {
    ms_workspace workspace;
    memset(&workspace, 0, sizeof workspace);
    workspace.bytes = (uint64_t)floats * sizeof(float);
    return workspace;
}

NN_API double nn_elements(ms_shape shape) {
    return (double)ms_shape_count(&shape);
}

/* The shape with another last dim, of a size that no axis changes. */
NN_API ms_shape nn_with_last(ms_shape shape, int64_t last) {
    if (shape.rank > 0) {
        shape.dim[shape.rank - 1] = last;
        shape.axes[shape.rank - 1] = 0;
    }
    return shape;
}

/* The axes that the dims begin ... end - 1 lie along. */
NN_API uint8_t nn_axes(ms_shape shape, int32_t begin, int32_t end) {
    unsigned axes = 0;
    for (int32_t i = begin; i < end; i++) {
        axes |= shape.axes[i];
    }
    return (uint8_t)axes;
}

/* (rows, columns) for the rows of a shape, along the axes that these lie along. */
NN_API ms_shape nn_per_row(ms_shape shape, int64_t columns) {
    ms_shape rows = ms_shape2(nn_rows(shape), columns);
    rows.axes[0] = nn_axes(shape, 0, shape.rank - 1);
    return rows;
}

/* Of one size, and of one for every size of the axes. */
NN_API bool nn_counts_match(ms_shape a, ms_shape b) {
    return ms_shape_count(&a) == ms_shape_count(&b) &&
           nn_axes(a, 0, a.rank) == nn_axes(b, 0, b.rank);
}

/* The shape when all its axes have their largest sizes. */
NN_API ms_shape nn_largest(const nn_net *net, ms_shape shape) {
    for (int32_t i = 0; i < shape.rank; i++) {
        for (int a = 0; a < MS_LIMIT_AXES; a++) {
            if ((shape.axes[i] >> a & 1) != 0 && net->axis_size[a] != 0) {
                shape.dim[i] = shape.dim[i] / net->axis_size[a] * net->axis_largest[a];
            }
        }
    }
    return shape;
}

NN_API ms_tensor nn_embedding(nn_net *net, const char *name, ms_tensor tokens, ms_tensor table,
                              ms_tensor positions, ms_tensor segments, ms_tensor segment_table) {
    const ms_shape ids = ms_tensor_shape(net->model, tokens);
    const bool segmented = segments.id != 0 && segment_table.id != 0;
    if (ids.rank != 2) {
        return nn_refuse(net, "nn_embedding: tokens must be (B, T)");
    }
    if (positions.id != 0 &&
        ms_tensor_shape(net->model, positions).dim[0] < nn_largest(net, ids).dim[1]) {
        return nn_refuse(net, "nn_embedding: fewer positions than T");
    }
    const uint32_t flags =
        (positions.id != 0 ? (uint32_t)NN_POSITIONS : 0) | (segmented ? (uint32_t)NN_SEGMENTS : 0);
    ms_layer_desc desc = nn_desc(name, nn_embedding_forward, nn_embedding_backward,
                                 nn_options_of(net, 0, 0.0f, 0.0f, flags));
    desc.in[0] = tokens;
    desc.param[0] = table;
    desc.param[1] = positions;
    desc.backward_reads.in = 1;
    if (segmented) {
        desc.in[1] = segments;
        desc.param[2] = segment_table;
        desc.backward_reads.in = 3;
    }
    ms_shape out = ids;
    out.rank = 3;
    out = nn_with_last(out, nn_last(ms_tensor_shape(net->model, table)));
    desc.backward_workspace =
        nn_workspace(net->device->column_floats(nn_rows(nn_largest(net, out)), nn_last(out)));
    desc.flops = nn_elements(out) * ((positions.id != 0) + (segmented ? 2.0 : 1.0));
    desc.backward_flops = desc.flops;
    return nn_register(net, &desc, out);
}

NN_API ms_tensor nn_linear_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                ms_tensor bias) {
    const ms_shape from = ms_tensor_shape(net->model, x);
    const ms_shape matrix = ms_tensor_shape(net->model, weight);
    if (from.rank < 1 || matrix.rank != 2 || matrix.dim[1] != nn_last(from)) {
        return nn_refuse(net, "nn_linear: the weight does not fit the input");
    }
    const uint32_t flags = bias.id != 0 ? (uint32_t)NN_BIAS : 0;
    ms_layer_desc desc = nn_desc(name, nn_linear_forward, nn_linear_backward,
                                 nn_options_of(net, 0, 0.0f, 0.0f, flags));
    desc.in[0] = x;
    desc.param[0] = weight;
    desc.param[1] = bias;
    desc.backward_reads.in = 1;
    desc.backward_reads.param = 1;
    const ms_shape out = nn_with_last(from, matrix.dim[0]);
    desc.backward_workspace =
        nn_workspace(net->device->column_floats(nn_rows(nn_largest(net, out)), nn_last(out)));
    desc.flops = nn_elements(out) * 2.0 * (double)matrix.dim[1];
    return nn_register(net, &desc, out);
}

/* weight and bias of a linear layer, or of a normalization. */
typedef struct nn_pair {
    ms_tensor weight, bias;
} nn_pair;

NN_API nn_pair nn_linear_params(nn_net *net, const char *name, int64_t in, int64_t out,
                                float deviation) {
    nn_pair pair;
    pair.weight =
        nn_param(net, nn_join(name, "weight").text, ms_shape2(out, in), NN_INIT_NORMAL, deviation);
    pair.bias = nn_param(net, nn_join(name, "bias").text, ms_shape1(out), NN_INIT_ZEROS, 0.0f);
    return pair;
}

NN_API nn_pair nn_layernorm_params(nn_net *net, const char *name, int64_t width) {
    nn_pair pair;
    pair.weight = nn_param(net, nn_join(name, "weight").text, ms_shape1(width), NN_INIT_ONES, 0.0f);
    pair.bias = nn_param(net, nn_join(name, "bias").text, ms_shape1(width), NN_INIT_ZEROS, 0.0f);
    return pair;
}

NN_API ms_tensor nn_linear(nn_net *net, const char *name, ms_tensor x, int64_t out_features,
                           float deviation) {
    const nn_pair pair = nn_linear_params(net, name, nn_last(ms_tensor_shape(net->model, x)),
                                          out_features, deviation);
    return nn_linear_tied(net, name, x, pair.weight, pair.bias);
}

NN_API ms_tensor nn_saved(nn_net *net, const char *name, const char *suffix, ms_shape shape) {
    return ms_saved(net->model, nn_join(name, suffix).text, MS_DTYPE_F32, shape);
}

NN_API ms_tensor nn_layernorm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                   ms_tensor bias, float epsilon) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    if (shape.rank < 1 || nn_last(ms_tensor_shape(net->model, weight)) != nn_last(shape)) {
        return nn_refuse(net, "nn_layernorm: the weight does not fit the input");
    }
    ms_layer_desc desc = nn_desc(name, nn_layernorm_forward, nn_layernorm_backward,
                                 nn_options_of(net, 0, 0.0f, epsilon, 0));
    desc.in[0] = x;
    desc.param[0] = weight;
    desc.param[1] = bias;
    desc.saved[0] = nn_saved(net, name, "mean", nn_per_row(shape, 1));
    desc.saved[1] = nn_saved(net, name, "rstd", nn_per_row(shape, 1));
    desc.backward_reads.in = 1;
    desc.backward_reads.saved = 3;
    desc.backward_reads.param = 1;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.backward_workspace = nn_workspace(
        net->device->layernorm_floats(nn_rows(nn_largest(net, shape)), nn_last(shape)));
    desc.flops = nn_elements(shape) * 8.0;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_layernorm(nn_net *net, const char *name, ms_tensor x) {
    const nn_pair pair = nn_layernorm_params(net, name, nn_last(ms_tensor_shape(net->model, x)));
    return nn_layernorm_tied(net, name, x, pair.weight, pair.bias, 1e-5f);
}

NN_API ms_tensor nn_gelu_of_form(nn_net *net, const char *name, ms_tensor x, uint32_t flags) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    ms_layer_desc desc =
        nn_desc(name, nn_gelu_forward, nn_gelu_backward, nn_options_of(net, 0, 0.0f, 0.0f, flags));
    desc.in[0] = x;
    desc.backward_reads.in = 1;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape) * 20.0;
    desc.backward_flops = nn_elements(shape) * 30.0;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_gelu(nn_net *net, const char *name, ms_tensor x) {
    return nn_gelu_of_form(net, name, x, 0);
}

NN_API ms_tensor nn_gelu_erf(nn_net *net, const char *name, ms_tensor x) {
    return nn_gelu_of_form(net, name, x, NN_ERF);
}

NN_API ms_tensor nn_add(nn_net *net, const char *name, ms_tensor a, ms_tensor b) {
    const ms_shape shape = ms_tensor_shape(net->model, a);
    const ms_shape other = ms_tensor_shape(net->model, b);
    if (!nn_counts_match(shape, other)) {
        return nn_refuse(net, "nn_add: the sizes differ");
    }
    ms_layer_desc desc =
        nn_desc(name, nn_add_forward, nn_add_backward, nn_options_of(net, 0, 0.0f, 0.0f, 0));
    desc.in[0] = a;
    desc.in[1] = b;
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 3;
    desc.grad_in_place[0].grad_out = 1;
    desc.grad_in_place[1].grad_out = 1;
    desc.flops = nn_elements(shape);
    desc.backward_flops = desc.flops;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_dropout(nn_net *net, const char *name, ms_tensor x, float probability) {
    if (probability <= 0.0f) {
        return x;
    }
    if (!(probability < 1.0f)) {
        return nn_refuse(net, "nn_dropout: the probability must be below 1");
    }
    const ms_shape shape = ms_tensor_shape(net->model, x);
    ms_layer_desc desc = nn_desc(name, nn_dropout_forward, nn_dropout_backward,
                                 nn_options_of(net, 0, probability, 0.0f, 0));
    desc.in[0] = x;
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape) * 10.0;
    desc.backward_flops = desc.flops; // the mask is drawn again
    return nn_register(net, &desc, shape);
}

/* The products of an attention, and its softmax: two of each pair of a query and a key; in backward
   four, and one more where the probabilities are computed again. A causal one may take its queries
   in bands of NN_QUERIES, each with the keys up to its last query. */
NN_API double nn_attention_flops(const nn_device *device, nn_attention_size n, bool keeps_scores,
                                 bool backward) {
    const double products = backward ? (keeps_scores ? 4.0 : 5.0) : 2.0;
    const double softmax = backward && keeps_scores ? 5.0 : backward ? 15.0 : 10.0;
    double keys = (double)n.sequence;
    if (n.causal && device->skips_masked && n.sequence > NN_QUERIES) {
        keys = 0.5 * (double)(n.sequence + NN_QUERIES);
    }
    return (double)(n.batch * n.heads * n.sequence) * keys *
           (2.0 * products * (double)n.size + softmax);
}

NN_API ms_tensor nn_attention(nn_net *net, const char *name, ms_tensor qkv, int64_t heads,
                              bool causal, bool save_scores) {
    const ms_shape shape = ms_tensor_shape(net->model, qkv);
    if (shape.rank != 3 || heads < 1 || shape.dim[2] % (3 * heads) != 0) {
        return nn_refuse(net, "nn_attention: qkv must be (B, T, 3 * heads * size)");
    }
    const nn_attention_size n = nn_attention_size_of(shape, heads, causal);
    const nn_attention_size largest = nn_attention_size_of(nn_largest(net, shape), heads, causal);
    const uint32_t flags =
        (causal ? (uint32_t)NN_CAUSAL : 0) | (save_scores ? (uint32_t)NN_SAVE_SCORES : 0);
    ms_layer_desc desc = nn_desc(name, nn_attention_forward, nn_attention_backward,
                                 nn_options_of(net, heads, 0.0f, 0.0f, flags));
    desc.in[0] = qkv;
    desc.backward_reads.in = 1;
    if (save_scores) {
        ms_shape scores = ms_shape4(n.batch, heads, n.sequence, n.sequence);
        scores.axes[0] = shape.axes[0];
        scores.axes[2] = shape.axes[1];
        scores.axes[3] = shape.axes[1];
        desc.saved[0] = nn_saved(net, name, "scores", scores);
        desc.backward_reads.saved = 1;
        desc.optional_saved = 1;
    }
    desc.grad_in_place[0].in = 1;
    desc.forward_workspace = nn_workspace(net->device->attention_floats(largest, false));
    desc.backward_workspace = nn_workspace(net->device->attention_floats(largest, true));
    desc.flops = nn_attention_flops(net->device, n, save_scores, false);
    desc.backward_flops = nn_attention_flops(net->device, n, save_scores, true);
    return nn_register(net, &desc, nn_with_last(shape, heads * n.size));
}

NN_API ms_tensor nn_cross_entropy(nn_net *net, const char *name, ms_tensor logits,
                                  ms_tensor targets) {
    const ms_shape shape = ms_tensor_shape(net->model, logits);
    const ms_shape rows = ms_tensor_shape(net->model, targets);
    if (shape.rank < 1 || !nn_counts_match(nn_per_row(shape, 1), rows)) {
        return nn_refuse(net, "nn_cross_entropy: one target per row of the logits");
    }
    ms_layer_desc desc = nn_desc(name, nn_cross_entropy_forward, nn_cross_entropy_backward,
                                 nn_options_of(net, 0, 0.0f, 0.0f, 0));
    desc.in[0] = logits;
    desc.in[1] = targets;
    desc.saved[0] = nn_saved(net, name, "stats", nn_per_row(shape, 2));
    desc.backward_reads.in = 3;
    desc.backward_reads.saved = 1;
    desc.grad_in_place[0].in = 1;
    desc.flops = nn_elements(shape) * 15.0;
    desc.backward_flops = desc.flops;
    return nn_register(net, &desc, rows);
}

NN_API ms_tensor nn_relu(nn_net *net, const char *name, ms_tensor x) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    ms_layer_desc desc =
        nn_desc(name, nn_relu_forward, nn_relu_backward, nn_options_of(net, 0, 0.0f, 0.0f, 0));
    desc.in[0] = x;
    desc.backward_reads.out = 1;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].out = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape);
    desc.backward_flops = desc.flops;
    return nn_register(net, &desc, shape);
}

NN_API float nn_kaiming(int64_t fan_in) {
    return sqrtf(2.0f / (float)fan_in);
}

/* The shape of images behind a window; false, after an error that sticks, where it does not fit. */
NN_API bool nn_window_shape(nn_net *net, ms_shape x, int64_t channels, int64_t kernel,
                            int64_t stride, int64_t padding, ms_shape *out) {
    if (x.rank != 4 || nn_axes(x, 1, 4) != 0) {
        nn_refuse(net, "nn: images must be (B, C, height, width), and only B along an axis");
        return false;
    }
    if (kernel < 1 || stride < 1 || padding < 0 || kernel > INT32_MAX || padding > INT32_MAX) {
        nn_refuse(net, "nn: kernel and stride must be 1 at least, padding 0");
        return false;
    }
    const nn_window w = nn_window_of(x, kernel, stride, padding);
    if (w.out_height < 1 || w.out_width < 1) {
        nn_refuse(net, "nn: the kernel is larger than the image with its padding");
        return false;
    }
    *out = x;
    out->dim[1] = channels;
    out->dim[2] = w.out_height;
    out->dim[3] = w.out_width;
    return true;
}

NN_API ms_tensor nn_conv2d_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                ms_tensor bias, int64_t kernel, int64_t stride, int64_t padding) {
    const ms_tensor none = {0};
    const ms_shape from = ms_tensor_shape(net->model, x);
    const ms_shape matrix = ms_tensor_shape(net->model, weight);
    ms_shape out;
    if (!nn_window_shape(net, from, matrix.dim[0], kernel, stride, padding, &out)) {
        return none;
    }
    if (matrix.rank != 2 || matrix.dim[1] != from.dim[1] * kernel * kernel) {
        return nn_refuse(net, "nn_conv2d: the weight does not fit the images and the kernel");
    }
    const uint32_t flags = bias.id != 0 ? (uint32_t)NN_BIAS : 0;
    const nn_window w = nn_window_of(nn_largest(net, from), kernel, stride, padding);
    ms_layer_desc desc = nn_desc(name, nn_conv2d_forward, nn_conv2d_backward,
                                 nn_window_options(net, kernel, stride, padding, flags));
    desc.in[0] = x;
    desc.param[0] = weight;
    desc.param[1] = bias;
    desc.backward_reads.in = 1;
    desc.backward_reads.param = 1;
    desc.grad_in_place[0].in = 1;
    desc.forward_workspace = nn_workspace(net->device->conv2d_floats(&w, matrix.dim[0], false));
    desc.backward_workspace = nn_workspace(net->device->conv2d_floats(&w, matrix.dim[0], true));
    desc.flops = nn_elements(out) * 2.0 * (double)matrix.dim[1];
    return nn_register(net, &desc, out);
}

NN_API ms_tensor nn_conv2d(nn_net *net, const char *name, ms_tensor x, int64_t out_channels,
                           int64_t kernel, int64_t stride, int64_t padding) {
    const int64_t depth = ms_tensor_shape(net->model, x).dim[1] * kernel * kernel;
    const nn_pair pair = nn_linear_params(net, name, depth, out_channels, nn_kaiming(depth));
    return nn_conv2d_tied(net, name, x, pair.weight, pair.bias, kernel, stride, padding);
}

NN_API ms_tensor nn_max_pool(nn_net *net, const char *name, ms_tensor x, int64_t kernel,
                             int64_t stride, int64_t padding) {
    const ms_tensor none = {0};
    const ms_shape from = ms_tensor_shape(net->model, x);
    ms_shape out;
    if (!nn_window_shape(net, from, from.dim[1], kernel, stride, padding, &out)) {
        return none;
    }
    if (2 * padding > kernel || from.dim[2] > INT32_MAX / from.dim[3]) {
        return nn_refuse(net, "nn_max_pool: more padding than half the kernel, or large images");
    }
    ms_layer_desc desc = nn_desc(name, nn_max_pool_forward, nn_max_pool_backward,
                                 nn_window_options(net, kernel, stride, padding, 0));
    desc.in[0] = x;
    desc.saved[0] = ms_saved(net->model, nn_join(name, "places").text, MS_DTYPE_I32, out);
    desc.backward_reads.saved = 1;
    desc.optional_saved = 1;
    desc.flops = nn_elements(out) * (double)(kernel * kernel) * 2.0;
    desc.backward_flops = nn_elements(out);
    return nn_register(net, &desc, out);
}

NN_API ms_tensor nn_batch_norm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                    ms_tensor bias) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    if (shape.rank < 2 || shape.axes[1] != 0 ||
        nn_last(ms_tensor_shape(net->model, weight)) != shape.dim[1]) {
        return nn_refuse(net, "nn_batch_norm: x must be (B, C, ...), with C fixed, the weight (C)");
    }
    const ms_shape channels = ms_shape1(shape.dim[1]);
    nn_options wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.epsilon = 1e-5f;
    wanted.momentum = 0.1f;
    ms_layer_desc desc =
        nn_desc(name, nn_batch_norm_forward, nn_batch_norm_backward, nn_options_like(net, &wanted));
    desc.recompute = nn_batch_norm_recompute;
    desc.in[0] = x;
    desc.param[0] = weight;
    desc.param[1] = bias;
    desc.state[0] = nn_buffer(net, nn_join(name, "mean").text, channels, NN_INIT_ZEROS);
    desc.state[1] = nn_buffer(net, nn_join(name, "variance").text, channels, NN_INIT_ONES);
    desc.keeps_state = true;
    desc.saved[0] = nn_saved(net, name, "batch_mean", channels);
    desc.saved[1] = nn_saved(net, name, "batch_rstd", channels);
    desc.optional_saved = 3;
    desc.backward_reads.in = 1;
    desc.backward_reads.saved = 3;
    desc.backward_reads.param = 1;
    desc.recompute_reads.in = 1;
    desc.recompute_reads.saved = 3;
    desc.recompute_reads.param = 3;
    desc.forward_workspace =
        nn_workspace(net->device->batch_norm_floats(nn_planes_of(nn_largest(net, shape))));
    desc.backward_workspace = desc.forward_workspace;
    desc.recompute_workspace = desc.forward_workspace;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape) * 8.0;
    desc.recompute_flops = nn_elements(shape) * 4.0;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_batch_norm(nn_net *net, const char *name, ms_tensor x) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    const nn_pair pair = nn_layernorm_params(net, name, shape.rank < 2 ? 1 : shape.dim[1]);
    return nn_batch_norm_tied(net, name, x, pair.weight, pair.bias);
}

NN_API ms_tensor nn_average_pool(nn_net *net, const char *name, ms_tensor x) {
    ms_shape shape = ms_tensor_shape(net->model, x);
    if (shape.rank != 4) {
        return nn_refuse(net, "nn_average_pool: images must be (B, C, height, width)");
    }
    ms_layer_desc desc = nn_desc(name, nn_average_pool_forward, nn_average_pool_backward,
                                 nn_options_of(net, 0, 0.0f, 0.0f, 0));
    desc.in[0] = x;
    desc.backward_reads.nothing = true;
    desc.flops = nn_elements(shape);
    desc.backward_flops = desc.flops;
    shape.rank = 2;
    shape.axes[2] = 0;
    shape.axes[3] = 0;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_flatten(nn_net *net, const char *name, ms_tensor x) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    if (shape.rank < 2) {
        return nn_refuse(net, "nn_flatten: x must be (B, ...)");
    }
    ms_shape out = ms_shape2(shape.dim[0], (int64_t)ms_shape_count(&shape) / shape.dim[0]);
    out.axes[0] = shape.axes[0];
    out.axes[1] = nn_axes(shape, 1, shape.rank);
    ms_layer_desc desc = nn_desc(name, nn_flatten_forward, nn_flatten_backward,
                                 nn_options_of(net, 0, 0.0f, 0.0f, 0));
    desc.in[0] = x;
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape);
    desc.backward_flops = desc.flops;
    return nn_register(net, &desc, out);
}

// ------------------------------------------------------------------------------------------------
// >>nn block  a whole transformer block as one layer

/* Slots of the params and saved tensors of a block, the same for both orders of normalization.
   Pre-norm: sum1 = x + attend(norm1(x)), out = sum1 + mlp(norm2(sum1)).
   Post-norm: sum1 = x + attend(x), sum2 = norm1(sum1) + mlp(norm1(sum1)), out = norm2(sum2). */
enum {
    NN_P_NORM1 = 0, // weight; the bias is in the next slot
    NN_P_QKV = 2,
    NN_P_PROJ = 4,
    NN_P_NORM2 = 6,
    NN_P_FC = 8,
    NN_P_FCPROJ = 10,
    NN_P_COUNT = 12
};

enum {
    NN_S_NORM1,
    NN_S_MEAN1,
    NN_S_RSTD1,
    NN_S_QKV,
    NN_S_ATTENTION,
    NN_S_SUM1,
    NN_S_MEAN2,
    NN_S_RSTD2,
    NN_S_FCH,
    NN_S_GELU,
    NN_S_SCORES, // with NN_SAVE_SCORES
    NN_S_NORM2,  // pre-norm
    NN_S_SUM2,   // post-norm
    NN_S_COUNT
};

/* A block during one call: its operands under their names. */
typedef struct nn_block {
    const ms_call *call;
    const nn_options *options;
    const nn_device *device;
    int64_t rows, channels, hidden;
    nn_attention_size attention;
    bool erf_form, drops;
    float *saved[NN_S_COUNT];
    const float *param[NN_P_COUNT];
    nn_target grad[NN_P_COUNT];
} nn_block;

NN_API nn_block nn_block_of(const ms_call *call) {
    nn_block block;
    memset(&block, 0, sizeof block);
    const nn_options *options = nn_options_in(call);
    const bool post_norm = (options->flags & NN_POST_NORM) != 0;
    const ms_shape x = call->in[0].shape;
    block.call = call;
    block.options = options;
    block.device = options->device;
    block.rows = nn_rows(x);
    block.channels = nn_last(x);
    block.hidden = call->param[NN_P_FC].shape.dim[0];
    block.attention = nn_attention_size_of(nn_with_last(x, 3 * block.channels), options->heads,
                                           (options->flags & NN_CAUSAL) != 0);
    block.erf_form = (options->flags & NN_ERF) != 0;
    block.drops = options->dropout > 0.0f;
    for (int i = 0; i < NN_S_SCORES; i++) {
        block.saved[i] = nn_floats(&call->saved[i]);
    }
    if ((options->flags & NN_SAVE_SCORES) != 0) {
        block.saved[NN_S_SCORES] = nn_floats(&call->saved[NN_S_SCORES]);
    }
    const int last = post_norm ? NN_S_SUM2 : NN_S_NORM2;
    block.saved[last] = nn_floats(&call->saved[last]);
    for (int i = 0; i < NN_P_COUNT; i++) {
        block.param[i] = nn_floats(&call->param[i]);
        if (call->grad_param != NULL) {
            block.grad[i] = nn_gradient_of(&call->grad_param[i]);
        }
    }
    return block;
}

NN_API nn_linear_size nn_block_size(const nn_block *b, int64_t in, int64_t out) {
    nn_linear_size n;
    n.rows = b->rows;
    n.in = in;
    n.out = out;
    return n;
}

NN_API int nn_block_linear_backward(const nn_block *b, int param, nn_target dx, const float *dy,
                                    const float *x, nn_linear_size n, float *work) {
    return b->device->linear_backward(b->call, dx, b->grad[param], b->grad[param + 1], dy, x,
                                      b->param[param], n, work);
}

NN_API nn_norm nn_block_norm_of(const nn_block *b, int param, int mean) {
    nn_norm n;
    n.rows = b->rows;
    n.width = b->channels;
    n.weight = b->param[param];
    n.bias = b->param[param + 1];
    n.mean = b->saved[mean];
    n.rstd = b->saved[mean + 1];
    n.epsilon = b->options->epsilon;
    return n;
}

NN_API int nn_block_norm(const nn_block *b, int param, int mean, float *y, const float *x) {
    const nn_norm n = nn_block_norm_of(b, param, mean);
    return b->device->layernorm(b->call, y, x, &n);
}

NN_API int nn_block_norm_backward(const nn_block *b, int param, int mean, nn_target dx,
                                  const float *dy, const float *x, float *work) {
    const nn_norm n = nn_block_norm_of(b, param, mean);
    return b->device->layernorm_backward(b->call, dx, b->grad[param], b->grad[param + 1], dy, x, &n,
                                         work);
}

/* Dropout of branch 0 or 1; each draws from a seed of its own. */
NN_API nn_drop nn_block_drop(const nn_block *b, int branch) {
    nn_drop drop;
    drop.probability = b->call->phase != MS_PHASE_EVAL ? b->options->dropout : 0.0f;
    drop.seed = nn_seed_of(b->call, branch);
    return drop;
}

/* The gradient in front of the dropout: that behind it, or masked in a copy. */
NN_API int nn_block_drop_backward(const nn_block *b, int branch, const float **dy, float *copy) {
    if (!b->drops) {
        return 0;
    }
    const int result =
        b->device->dropout(b->call, nn_target_of(copy, 0.0f), *dy, b->rows * b->channels,
                           b->options->dropout, nn_seed_of(b->call, branch));
    *dy = copy;
    return result;
}

/* y = residual + dropout(proj(attention(qkv(x)))) */
NN_API int nn_block_attend(const nn_block *b, float *y, const float *residual, const float *x) {
    const int64_t channels = b->channels;
    int result =
        b->device->linear(b->call, b->saved[NN_S_QKV], x, b->param[NN_P_QKV],
                          b->param[NN_P_QKV + 1], nn_block_size(b, channels, 3 * channels));
    if (result == 0) {
        result =
            b->device->attention(b->call, b->saved[NN_S_ATTENTION], b->saved[NN_S_SCORES],
                                 b->saved[NN_S_QKV], (float *)b->call->workspace, b->attention);
    }
    if (result == 0) {
        const nn_drop drop = nn_block_drop(b, 0);
        result = b->device->linear_add(b->call, y, residual, b->saved[NN_S_ATTENTION],
                                       b->param[NN_P_PROJ], b->param[NN_P_PROJ + 1],
                                       nn_block_size(b, channels, channels), &drop);
    }
    return result;
}

/* y = residual + dropout(fcproj(gelu(fc(x)))) */
NN_API int nn_block_mlp(const nn_block *b, float *y, const float *residual, const float *x) {
    int result = b->device->linear_gelu(b->call, b->saved[NN_S_GELU], b->saved[NN_S_FCH], x,
                                        b->param[NN_P_FC], b->param[NN_P_FC + 1],
                                        nn_block_size(b, b->channels, b->hidden), b->erf_form);
    if (result == 0) {
        const nn_drop drop = nn_block_drop(b, 1);
        result = b->device->linear_add(b->call, y, residual, b->saved[NN_S_GELU],
                                       b->param[NN_P_FCPROJ], b->param[NN_P_FCPROJ + 1],
                                       nn_block_size(b, b->hidden, b->channels), &drop);
    }
    return result;
}

/* Scratch of a block's backward, cut out of its workspace. */
typedef struct nn_block_scratch {
    float *work;     // that of the kernels
    float *wide;     // (rows, hidden), then (rows, 3C)
    float *narrow;   // (rows, C)
    float *residual; // (rows, C): the gradient of the stream that the branches are added to
    float *masked;   // (rows, C), with dropout
} nn_block_scratch;

NN_API int64_t nn_block_wide(int64_t channels, int64_t hidden) {
    return nn_most(hidden, 3 * channels);
}

/* What the kernels ask for in the backward of a block; whole cache lines, so that what follows
   stays aligned. */
NN_API int64_t nn_block_floats(const nn_device *device, nn_attention_size n, int64_t hidden) {
    const int64_t rows = n.batch * n.sequence;
    const int64_t channels = n.heads * n.size;
    const int64_t columns = device->column_floats(rows, nn_block_wide(channels, hidden));
    int64_t floats = device->attention_floats(n, true);
    floats = nn_most(floats, nn_most(columns, device->layernorm_floats(rows, channels)));
    return (floats + 15) / 16 * 16;
}

NN_API nn_block_scratch nn_block_scratch_of(const nn_block *b) {
    nn_block_scratch s;
    s.work = (float *)b->call->workspace;
    s.wide = s.work + nn_block_floats(b->device, b->attention, b->hidden);
    s.narrow = s.wide + b->rows * nn_block_wide(b->channels, b->hidden);
    s.residual = s.narrow + b->rows * b->channels;
    s.masked = s.residual + b->rows * b->channels;
    return s;
}

/* Of this scratch without that of the kernels, for one sequence. */
NN_API uint64_t nn_block_row_bytes(int64_t sequence, int64_t channels, int64_t hidden, bool drops) {
    const int64_t floats = nn_block_wide(channels, hidden) + channels * (drops ? 3 : 2);
    return (uint64_t)(sequence * floats) * sizeof(float);
}

/* dx gets the gradient of x, the input of nn_block_attend, from dy, that of its branch. */
NN_API int nn_block_attend_backward(const nn_block *b, const nn_block_scratch *s, nn_target dx,
                                    const float *dy, const float *x) {
    const int64_t channels = b->channels;
    int result = nn_block_drop_backward(b, 0, &dy, s->masked);
    if (result == 0) {
        result = nn_block_linear_backward(b, NN_P_PROJ, nn_target_of(s->narrow, 0.0f), dy,
                                          b->saved[NN_S_ATTENTION],
                                          nn_block_size(b, channels, channels), s->work);
    }
    if (result == 0) {
        result = b->device->attention_backward(b->call, nn_target_of(s->wide, 0.0f), s->narrow,
                                               b->saved[NN_S_SCORES], b->saved[NN_S_QKV], s->work,
                                               b->attention);
    }
    if (result == 0) {
        result = nn_block_linear_backward(b, NN_P_QKV, dx, s->wide, x,
                                          nn_block_size(b, channels, 3 * channels), s->work);
    }
    return result;
}

/* The same for nn_block_mlp. */
NN_API int nn_block_mlp_backward(const nn_block *b, const nn_block_scratch *s, nn_target dx,
                                 const float *dy, const float *x) {
    const nn_target wide = nn_target_of(s->wide, 0.0f);
    int result = nn_block_drop_backward(b, 1, &dy, s->masked);
    if (result == 0) {
        result = nn_block_linear_backward(b, NN_P_FCPROJ, wide, dy, b->saved[NN_S_GELU],
                                          nn_block_size(b, b->hidden, b->channels), s->work);
    }
    if (result == 0) {
        result = b->device->gelu_backward(b->call, wide, s->wide, b->saved[NN_S_FCH],
                                          b->rows * b->hidden, b->erf_form);
    }
    if (result == 0) {
        result = nn_block_linear_backward(b, NN_P_FC, dx, s->wide, x,
                                          nn_block_size(b, b->channels, b->hidden), s->work);
    }
    return result;
}

NN_API int nn_block_pre_forward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const float *x = nn_floats(&call->in[0]);
    float *norm1 = b.saved[NN_S_NORM1];
    float *sum1 = b.saved[NN_S_SUM1];
    float *norm2 = b.saved[NN_S_NORM2];
    int result = nn_block_norm(&b, NN_P_NORM1, NN_S_MEAN1, norm1, x);
    if (result == 0) {
        result = nn_block_attend(&b, sum1, x, norm1);
    }
    if (result == 0) {
        result = nn_block_norm(&b, NN_P_NORM2, NN_S_MEAN2, norm2, sum1);
    }
    return result != 0 ? result : nn_block_mlp(&b, nn_floats(&call->out[0]), sum1, norm2);
}

NN_API int nn_block_pre_backward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const nn_block_scratch s = nn_block_scratch_of(&b);
    const int64_t count = b.rows * b.channels;
    const float *dout = nn_floats(&call->grad_out[0]);
    const nn_target narrow = nn_target_of(s.narrow, 0.0f);
    const nn_target stream = nn_target_of(s.residual, 1.0f);
    int result = b.device->pass(call, nn_target_of(s.residual, 0.0f), dout, count);
    if (result == 0) {
        result = nn_block_mlp_backward(&b, &s, narrow, dout, b.saved[NN_S_NORM2]);
    }
    if (result == 0) {
        result = nn_block_norm_backward(&b, NN_P_NORM2, NN_S_MEAN2, stream, s.narrow,
                                        b.saved[NN_S_SUM1], s.work);
    }
    if (result == 0) {
        result = nn_block_attend_backward(&b, &s, narrow, s.residual, b.saved[NN_S_NORM1]);
    }
    if (result == 0) {
        result = nn_block_norm_backward(&b, NN_P_NORM1, NN_S_MEAN1, stream, s.narrow,
                                        nn_floats(&call->in[0]), s.work);
    }
    return result != 0 ? result
                       : b.device->pass(call, nn_gradient_of(&call->grad_in[0]), s.residual, count);
}

NN_API int nn_block_post_forward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const float *x = nn_floats(&call->in[0]);
    float *sum1 = b.saved[NN_S_SUM1];
    float *norm1 = b.saved[NN_S_NORM1];
    float *sum2 = b.saved[NN_S_SUM2];
    int result = nn_block_attend(&b, sum1, x, x);
    if (result == 0) {
        result = nn_block_norm(&b, NN_P_NORM1, NN_S_MEAN1, norm1, sum1);
    }
    if (result == 0) {
        result = nn_block_mlp(&b, sum2, norm1, norm1);
    }
    return result != 0 ? result
                       : nn_block_norm(&b, NN_P_NORM2, NN_S_MEAN2, nn_floats(&call->out[0]), sum2);
}

NN_API int nn_block_post_backward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const nn_block_scratch s = nn_block_scratch_of(&b);
    const nn_target set = nn_target_of(s.residual, 0.0f);
    const nn_target stream = nn_target_of(s.residual, 1.0f);
    int result = nn_block_norm_backward(&b, NN_P_NORM2, NN_S_MEAN2, set,
                                        nn_floats(&call->grad_out[0]), b.saved[NN_S_SUM2], s.work);
    if (result == 0) {
        result = nn_block_mlp_backward(&b, &s, stream, s.residual, b.saved[NN_S_NORM1]);
    }
    if (result == 0) {
        result = nn_block_norm_backward(&b, NN_P_NORM1, NN_S_MEAN1, set, s.residual,
                                        b.saved[NN_S_SUM1], s.work);
    }
    if (result == 0) {
        result = nn_block_attend_backward(&b, &s, stream, s.residual, nn_floats(&call->in[0]));
    }
    return result != 0 ? result
                       : b.device->pass(call, nn_gradient_of(&call->grad_in[0]), s.residual,
                                        b.rows * b.channels);
}

// ------------------------------------------------------------------------------------------------
// >>nn models

/* What GPT-2 and BERT differ in within a block. */
typedef struct nn_style {
    bool post_norm, causal, erf_form;
    float epsilon;
    float projection_deviation; // of the projections into the residual stream
} nn_style;

NN_API void nn_block_params(nn_net *net, const char *prefix, const nn_transformer_config *config,
                            const nn_style *style, ms_tensor param[NN_P_COUNT]) {
    const int64_t channels = config->channels;
    const float deviation = style->projection_deviation;
    nn_pair pair[6]; // in the order of the slots
    if (!style->post_norm) {
        pair[0] = nn_layernorm_params(net, nn_join(prefix, "ln1").text, channels);
    }
    pair[1] = nn_linear_params(net, nn_join(prefix, "qkv").text, channels, 3 * channels, 0.02f);
    pair[2] = nn_linear_params(net, nn_join(prefix, "proj").text, channels, channels, deviation);
    pair[style->post_norm ? 0 : 3] =
        nn_layernorm_params(net, nn_join(prefix, style->post_norm ? "ln1" : "ln2").text, channels);
    pair[4] = nn_linear_params(net, nn_join(prefix, "fc").text, channels, 4 * channels, 0.02f);
    pair[5] =
        nn_linear_params(net, nn_join(prefix, "fcproj").text, 4 * channels, channels, deviation);
    if (style->post_norm) {
        pair[3] = nn_layernorm_params(net, nn_join(prefix, "ln2").text, channels);
    }
    for (int i = 0; i < 6; i++) {
        param[2 * i] = pair[i].weight;
        param[2 * i + 1] = pair[i].bias;
    }
}

/* The operators of a block under construction. */
typedef struct nn_builder {
    nn_net *net;
    const char *prefix;
    const nn_transformer_config *config;
    const nn_style *style;
    ms_tensor param[NN_P_COUNT];
} nn_builder;

NN_API ms_tensor nn_build_linear(const nn_builder *b, const char *name, int param, ms_tensor x) {
    return nn_linear_tied(b->net, nn_join(b->prefix, name).text, x, b->param[param],
                          b->param[param + 1]);
}

NN_API ms_tensor nn_build_norm(const nn_builder *b, const char *name, int param, ms_tensor x) {
    return nn_layernorm_tied(b->net, nn_join(b->prefix, name).text, x, b->param[param],
                             b->param[param + 1], b->style->epsilon);
}

NN_API ms_tensor nn_build_attend(const nn_builder *b, ms_tensor x) {
    const ms_tensor qkv = nn_build_linear(b, "qkv", NN_P_QKV, x);
    const ms_tensor attention =
        nn_attention(b->net, nn_join(b->prefix, "attention").text, qkv, b->config->heads,
                     b->style->causal, b->config->save_scores);
    const ms_tensor proj = nn_build_linear(b, "proj", NN_P_PROJ, attention);
    return nn_dropout(b->net, nn_join(b->prefix, "dropout1").text, proj, b->config->dropout);
}

NN_API ms_tensor nn_build_mlp(const nn_builder *b, ms_tensor x) {
    const ms_tensor fch = nn_build_linear(b, "fc", NN_P_FC, x);
    const ms_tensor gelu = nn_gelu_of_form(b->net, nn_join(b->prefix, "gelu").text, fch,
                                           b->style->erf_form ? (uint32_t)NN_ERF : 0);
    const ms_tensor proj = nn_build_linear(b, "fcproj", NN_P_FCPROJ, gelu);
    return nn_dropout(b->net, nn_join(b->prefix, "dropout2").text, proj, b->config->dropout);
}

NN_API ms_tensor nn_build_operators(const nn_builder *b, ms_tensor x) {
    const nn_name add1 = nn_join(b->prefix, "add1");
    const nn_name add2 = nn_join(b->prefix, "add2");
    if (b->style->post_norm) {
        const ms_tensor sum1 = nn_add(b->net, add1.text, x, nn_build_attend(b, x));
        const ms_tensor norm1 = nn_build_norm(b, "ln1", NN_P_NORM1, sum1);
        const ms_tensor sum2 = nn_add(b->net, add2.text, norm1, nn_build_mlp(b, norm1));
        return nn_build_norm(b, "ln2", NN_P_NORM2, sum2);
    }
    const ms_tensor norm1 = nn_build_norm(b, "ln1", NN_P_NORM1, x);
    const ms_tensor sum1 = nn_add(b->net, add1.text, x, nn_build_attend(b, norm1));
    const ms_tensor norm2 = nn_build_norm(b, "ln2", NN_P_NORM2, sum1);
    return nn_add(b->net, add2.text, sum1, nn_build_mlp(b, norm2));
}

/* Name and width (columns per row of the input) of each saved tensor; backward reads all. */
NN_API void nn_build_saved(const nn_builder *b, ms_shape x, ms_layer_desc *desc) {
    const int64_t channels = b->config->channels;
    const struct {
        int slot;
        const char *name;
        int64_t width;
        bool used;
    } rows[] = {
        {NN_S_NORM1, "ln1", channels, true},
        {NN_S_MEAN1, "mean1", 1, true},
        {NN_S_RSTD1, "rstd1", 1, true},
        {NN_S_QKV, "qkv", 3 * channels, true},
        {NN_S_ATTENTION, "attention", channels, true},
        {NN_S_SUM1, "sum1", channels, true},
        {NN_S_MEAN2, "mean2", 1, true},
        {NN_S_RSTD2, "rstd2", 1, true},
        {NN_S_FCH, "fc", 4 * channels, true},
        {NN_S_GELU, "gelu", 4 * channels, true},
        {NN_S_SCORES, "scores", b->config->heads * x.dim[1], b->config->save_scores},
        {NN_S_NORM2, "ln2", channels, !b->style->post_norm},
        {NN_S_SUM2, "sum2", channels, b->style->post_norm},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].used) {
            ms_shape shape = nn_with_last(x, rows[i].width);
            shape.axes[2] = rows[i].slot == NN_S_SCORES ? x.axes[1] : (uint8_t)0;
            desc->saved[rows[i].slot] = nn_saved(b->net, b->prefix, rows[i].name, shape);
            desc->backward_reads.saved =
                (uint16_t)(desc->backward_reads.saved | 1u << rows[i].slot);
        }
    }
}

NN_API ms_tensor nn_build_block(const nn_builder *b, ms_tensor x) {
    const nn_transformer_config *config = b->config;
    const nn_style *style = b->style;
    const ms_shape shape = ms_tensor_shape(b->net->model, x);
    if (shape.rank != 3 || config->heads < 1 || config->channels % config->heads != 0) {
        return nn_refuse(b->net, "nn: channels must be a multiple of heads");
    }
    const ms_shape qkv = nn_with_last(shape, 3 * config->channels);
    const nn_attention_size attention = nn_attention_size_of(qkv, config->heads, style->causal);
    const nn_attention_size largest =
        nn_attention_size_of(nn_largest(b->net, qkv), config->heads, style->causal);
    const uint32_t flags = (style->causal ? (uint32_t)NN_CAUSAL : 0) |
                           (style->post_norm ? (uint32_t)NN_POST_NORM : 0) |
                           (style->erf_form ? (uint32_t)NN_ERF : 0) |
                           (config->save_scores ? (uint32_t)NN_SAVE_SCORES : 0);
    ms_layer_desc desc =
        nn_desc(b->prefix, style->post_norm ? nn_block_post_forward : nn_block_pre_forward,
                style->post_norm ? nn_block_post_backward : nn_block_pre_backward,
                nn_options_of(b->net, config->heads, config->dropout, style->epsilon, flags));
    desc.in[0] = x;
    memcpy(desc.param, b->param, sizeof b->param);
    nn_build_saved(b, shape, &desc);
    desc.backward_reads.in = 1;
    desc.backward_reads.param = 0x555; // weights, no bias
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.optional_saved = config->save_scores ? (uint16_t)(1u << NN_S_SCORES) : (uint16_t)0;
    desc.forward_workspace = nn_workspace(b->net->device->attention_floats(largest, false));
    desc.backward_workspace =
        nn_workspace(nn_block_floats(b->net->device, largest, 4 * config->channels));
    desc.backward_workspace.row_bytes = nn_block_row_bytes(
        largest.sequence, config->channels, 4 * config->channels, config->dropout > 0.0f);
    const double rest = nn_elements(shape) * (24.0 * (double)config->channels + 120.0);
    const bool keeps_scores = config->save_scores;
    desc.flops = rest + nn_attention_flops(b->net->device, attention, keeps_scores, false);
    desc.backward_flops =
        2.0 * rest + nn_attention_flops(b->net->device, attention, keeps_scores, true);
    return nn_register(b->net, &desc, shape);
}

NN_API ms_tensor nn_build_blocks(nn_net *net, const nn_transformer_config *config,
                                 const nn_style *style, ms_tensor x) {
    for (int64_t l = 0; l < config->layers; l++) {
        nn_name prefix;
        snprintf(prefix.text, sizeof prefix.text, "h%lld", (long long)l);
        nn_builder b;
        memset(&b, 0, sizeof b);
        b.net = net;
        b.prefix = prefix.text;
        b.config = config;
        b.style = style;
        nn_block_params(net, prefix.text, config, style, b.param);
        x = config->granularity == NN_BLOCKS ? nn_build_block(&b, x) : nn_build_operators(&b, x);
    }
    return x;
}

NN_API bool nn_preset(const char *name, nn_transformer_config *config) {
    static const struct {
        const char *name;
        int64_t vocabulary, context, layers, heads, channels;
    } presets[] = {
        {"gpt2-124M", 50257, 1024, 12, 12, 768},  {"gpt2-355M", 50257, 1024, 24, 16, 1024},
        {"gpt2-774M", 50257, 1024, 36, 20, 1280}, {"gpt2-1558M", 50257, 1024, 48, 25, 1600},
        {"bert-base", 30522, 512, 12, 12, 768},   {"bert-large", 30522, 512, 24, 16, 1024},
    };
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(presets[i].name, name) == 0) {
            config->vocabulary = presets[i].vocabulary;
            config->context = presets[i].context;
            config->layers = presets[i].layers;
            config->heads = presets[i].heads;
            config->channels = presets[i].channels;
            return true;
        }
    }
    return false;
}

/* (B, T), along the axes that are asked for. */
NN_API ms_shape nn_ids_shape(nn_net *net, const nn_transformer_config *config) {
    ms_shape ids = ms_shape2(config->batch, config->sequence);
    if (config->largest_batch != 0) {
        ids = ms_along(ids, 0, nn_axis(net, "batch", config->batch, config->largest_batch));
    }
    if (config->largest_sequence != 0) {
        const int64_t largest = config->largest_sequence;
        ids = ms_along(ids, 1, nn_axis(net, "sequence", config->sequence, largest));
    }
    return ids;
}

NN_API nn_transformer nn_gpt2(nn_net *net, const nn_transformer_config *config) {
    const ms_shape ids = nn_ids_shape(net, config);
    const ms_tensor none = {0};
    nn_transformer t;
    memset(&t, 0, sizeof t);
    t.tokens = ms_input(net->model, "tokens", MS_DTYPE_I32, ids);
    t.targets = ms_input(net->model, "targets", MS_DTYPE_I32, ids);
    const ms_tensor wte = nn_param(net, "wte", ms_shape2(config->vocabulary, config->channels),
                                   NN_INIT_NORMAL, 0.02f);
    const ms_tensor wpe =
        nn_param(net, "wpe", ms_shape2(config->context, config->channels), NN_INIT_NORMAL, 0.01f);
    nn_style style;
    memset(&style, 0, sizeof style);
    style.causal = true;
    style.epsilon = 1e-5f;
    style.projection_deviation = 0.02f / sqrtf(2.0f * (float)config->layers);
    ms_tensor x = nn_embedding(net, "embedding", t.tokens, wte, wpe, none, none);
    x = nn_dropout(net, "dropout", x, config->dropout);
    x = nn_build_blocks(net, config, &style, x);
    x = nn_layernorm(net, "lnf", x);
    t.logits = nn_linear_tied(net, "head", x, wte, none);
    t.losses = nn_cross_entropy(net, "loss", t.logits, t.targets);
    ms_set_loss(net->model, t.losses);
    return t;
}

NN_API nn_transformer nn_bert(nn_net *net, const nn_transformer_config *config) {
    const ms_shape ids = nn_ids_shape(net, config);
    const int64_t channels = config->channels;
    nn_style style;
    memset(&style, 0, sizeof style);
    style.post_norm = true;
    style.erf_form = true;
    style.epsilon = 1e-12f;
    style.projection_deviation = 0.02f;
    nn_transformer t;
    memset(&t, 0, sizeof t);
    t.tokens = ms_input(net->model, "tokens", MS_DTYPE_I32, ids);
    t.segments = ms_input(net->model, "segments", MS_DTYPE_I32, ids);
    t.targets = ms_input(net->model, "targets", MS_DTYPE_I32, ids);
    const ms_tensor wte =
        nn_param(net, "wte", ms_shape2(config->vocabulary, channels), NN_INIT_NORMAL, 0.02f);
    const ms_tensor wpe =
        nn_param(net, "wpe", ms_shape2(config->context, channels), NN_INIT_NORMAL, 0.02f);
    const ms_tensor wse = nn_param(net, "wse", ms_shape2(2, channels), NN_INIT_NORMAL, 0.02f);
    const nn_pair lne = nn_layernorm_params(net, "lne", channels);
    ms_tensor x = nn_embedding(net, "embedding", t.tokens, wte, wpe, t.segments, wse);
    x = nn_layernorm_tied(net, "lne", x, lne.weight, lne.bias, style.epsilon);
    x = nn_dropout(net, "dropout", x, config->dropout);
    x = nn_build_blocks(net, config, &style, x);
    x = nn_linear(net, "mlm.dense", x, channels, 0.02f);
    x = nn_gelu_erf(net, "mlm.gelu", x);
    const nn_pair ln = nn_layernorm_params(net, "mlm.ln", channels);
    x = nn_layernorm_tied(net, "mlm.ln", x, ln.weight, ln.bias, style.epsilon);
    const ms_tensor bias =
        nn_param(net, "mlm.bias", ms_shape1(config->vocabulary), NN_INIT_ZEROS, 0.0f);
    t.logits = nn_linear_tied(net, "mlm.decoder", x, wte, bias);
    t.losses = nn_cross_entropy(net, "loss", t.logits, t.targets);
    ms_set_loss(net->model, t.losses);
    return t;
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda  the table of the GPU; compiled where NN_CUDA_IMPLEMENTATION is defined (cuda.cu)

#if defined(NN_CUDA_IMPLEMENTATION) && !defined(NN_CUDA_IMPLEMENTED)
#define NN_CUDA_IMPLEMENTED

/* nn_k_...: kernels. nn_d_...: functions that they share. nn_cuda_...: functions of the table; they
   only launch, on call->stream. Sums are taken in an order that depends on sizes and alignment
   alone, so that a recomputation, and another run, give the same bits. */
#if defined(__NVCC__)
#define NN_UNROLL      _Pragma("unroll")
#define NN_UNROLL_FOUR _Pragma("unroll 4")
#else
#define NN_UNROLL
#define NN_UNROLL_FOUR
#endif

/* The mask of a whole warp. */
#define NN_EVERY_LANE 0xffffffffu

enum {
    NN_WARP = 32,
    NN_LONG_THREADS = 512, // of a block that takes a row of logits
    NN_ROW_WARPS = 4,      // rows that a block takes where a warp takes a row
    NN_WIDEST = 64 * 256,  // columns of a row that fit the registers of a block
    NN_SUM_ROWS = 8,       // warps of a block of nn_k_column_sums
    NN_BIAS_ROWS = 4,      // rows that a thread of nn_k_bias takes
    NN_SCATTER_WIDTH = 4,  // columns of a thread of nn_k_scatter
    NN_SCATTER_COLUMNS = NN_SCATTER_WIDTH * NN_THREADS,
    NN_FEW_ENTRIES = 4 // of a table whose gradient is summed entry by entry
};

enum { NN_ERROR_WIDTH = 1002 /* a row has more than NN_WIDEST columns */ };

/* Grid and block of a launch. */
typedef struct nn_grid {
    int64_t x, y;
    int threads;
} nn_grid;

NN_API nn_grid nn_grid_of(int64_t x, int64_t y, int threads) {
    nn_grid grid;
    grid.x = x;
    grid.y = y;
    grid.threads = threads;
    return grid;
}

/* The error of a call of the runtime, after which the host's next call finds none. */
NN_API int nn_cuda_error(cudaError_t error) {
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return (int)error;
}

/* Enqueues a kernel; 0, or the error of the runtime, which is cleared. An empty grid does
   nothing. */
template <typename... P, typename... A>
static int nn_launch(const ms_call *call, nn_grid grid, void (*kernel)(P...), A... args) {
    if (grid.x == 0 || grid.y == 0) {
        return 0;
    }
    cudaLaunchConfig_t config = cudaLaunchConfig_t();
    config.gridDim = dim3((unsigned)grid.x, (unsigned)grid.y);
    config.blockDim = dim3((unsigned)grid.threads);
    config.stream = (cudaStream_t)call->stream;
    return nn_cuda_error(cudaLaunchKernelEx(&config, kernel, (P)args...));
}

/* Whether memory that starts here may be read 16 bytes at a time; NULL may. */
NN_API bool nn_aligned(const void *data) {
    return ((uintptr_t)data & 15) == 0;
}

/* Adding to a gradient is never fused with what made the contribution: the same bits as adding it
   later. */
__device__ __forceinline__ float nn_d_sum(float a, float b) {
    return __fadd_rn(a, b);
}

// ---- element by element

/* What a kernel does to each element, given its operands; start is told the first of a few elements
   of one chunk, and i counts from the chunk's begin. */
struct nn_op {
    __device__ void start(int64_t first) {
        (void)first;
    }
};

struct nn_op_pass : nn_op {
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        (void)b;
        return a;
    }
};

struct nn_op_add : nn_op {
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        return nn_d_sum(a, b);
    }
};

struct nn_op_gelu : nn_op {
    bool erf_form;
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        (void)b;
        return erf_form ? nn_gelu_erf_value(a) : nn_gelu_tanh_value(a);
    }
};

/* a is dy, b is x. */
struct nn_op_gelu_backward : nn_op {
    bool erf_form;
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        return __fmul_rn(erf_form ? nn_gelu_erf_slope(b) : nn_gelu_tanh_slope(b), a);
    }
};

/* dropout(a), or a where nothing is dropped, and b, a residual, added where there is one. */
struct nn_op_dropout : nn_op {
    nn_seed seed;
    uint64_t key;
    float scale;
    uint32_t threshold;
    bool adds;
    __device__ void start(int64_t first) {
        key = threshold != 0 ? nn_chunk_key(nn_seed_value(seed), first - first % NN_CHUNK) : 0;
    }
    __device__ float operator()(int64_t i, float a, float b) const {
        const bool kept = threshold == 0 || nn_random(key, (uint32_t)(i % NN_CHUNK)) >= threshold;
        const float value = kept ? __fmul_rn(a, scale) : 0.0f;
        return adds ? nn_d_sum(b, value) : value;
    }
};

static nn_op_dropout nn_op_dropout_of(float probability, nn_seed seed, bool adds) {
    nn_op_dropout op;
    op.seed = seed;
    op.key = 0;
    op.scale = 1.0f / (1.0f - probability);
    op.threshold = nn_threshold(probability);
    op.adds = adds;
    return op;
}

/* out = op(a, b), or out += that; b may be NULL. Four elements a thread, each of which is read
   before it is written: out may be a or b. */
template <typename F>
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_map(F op, float *out, const float *a, const float *b, int64_t count, bool adds,
             bool aligned) {
    const int64_t first = 4 * ((int64_t)blockIdx.x * NN_THREADS + threadIdx.x);
    if (first >= count) {
        return;
    }
    op.start(first);
    if (aligned && first + 4 <= count) {
        const float4 x = *(const float4 *)(a + first);
        const float4 y = b != NULL ? *(const float4 *)(b + first) : make_float4(0, 0, 0, 0);
        float4 z = make_float4(op(first, x.x, y.x), op(first + 1, x.y, y.y),
                               op(first + 2, x.z, y.z), op(first + 3, x.w, y.w));
        if (adds) {
            const float4 old = *(const float4 *)(out + first);
            z = make_float4(nn_d_sum(old.x, z.x), nn_d_sum(old.y, z.y), nn_d_sum(old.z, z.z),
                            nn_d_sum(old.w, z.w));
        }
        *(float4 *)(out + first) = z;
        return;
    }
    for (int64_t i = first; i < count && i < first + 4; i++) {
        const float value = op(i, a[i], b != NULL ? b[i] : 0.0f);
        out[i] = adds ? nn_d_sum(out[i], value) : value;
    }
}

/* The kernel above; y.data NULL: nobody wants it. */
template <typename F>
static int nn_cuda_map(const ms_call *call, F op, nn_target y, const float *a, const float *b,
                       int64_t count) {
    if (y.data == NULL) {
        return 0;
    }
    const bool aligned = nn_aligned(y.data) && nn_aligned(a) && nn_aligned(b);
    return nn_launch(call, nn_grid_of(nn_divide_up(count, 4 * NN_THREADS), 1, NN_THREADS),
                     nn_k_map<F>, op, y.data, a, b, count, y.beta != 0.0f, aligned);
}

static int nn_cuda_pass(const ms_call *call, nn_target y, const float *x, int64_t count) {
    if (y.data == x && y.beta == 0.0f) {
        return 0;
    }
    return nn_cuda_map(call, nn_op_pass(), y, x, NULL, count);
}

static int nn_cuda_add(const ms_call *call, float *y, const float *a, const float *b,
                       int64_t count) {
    return nn_cuda_map(call, nn_op_add(), nn_target_of(y, 0.0f), a, b, count);
}

static int nn_cuda_dropout(const ms_call *call, nn_target y, const float *x, int64_t count,
                           float probability, nn_seed seed) {
    return nn_cuda_map(call, nn_op_dropout_of(probability, seed, false), y, x, NULL, count);
}

static int nn_cuda_gelu(const ms_call *call, float *y, const float *x, int64_t count,
                        bool erf_form) {
    nn_op_gelu op;
    op.erf_form = erf_form;
    return nn_cuda_map(call, op, nn_target_of(y, 0.0f), x, NULL, count);
}

static int nn_cuda_gelu_backward(const ms_call *call, nn_target dx, const float *dy, const float *x,
                                 int64_t count, bool erf_form) {
    nn_op_gelu_backward op;
    op.erf_form = erf_form;
    return nn_cuda_map(call, op, dx, dy, x, count);
}

// ---- rows and columns

/* So many floats at once: four, at a multiple of 16 bytes, or one. */
template <unsigned WIDE> struct nn_wide {
    static __device__ __forceinline__ void load(float *to, const float *from) {
        to[0] = from[0];
    }
    static __device__ __forceinline__ void store(float *to, const float *from) {
        to[0] = from[0];
    }
};

template <> struct nn_wide<4> {
    static __device__ __forceinline__ void load(float *to, const float *from) {
        const float4 four = *(const float4 *)from;
        to[0] = four.x;
        to[1] = four.y;
        to[2] = four.z;
        to[3] = four.w;
    }
    static __device__ __forceinline__ void store(float *to, const float *from) {
        *(float4 *)to = make_float4(from[0], from[1], from[2], from[3]);
    }
};

__device__ __forceinline__ int64_t nn_d_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Tiles of so many columns in a row. 32 bits, as blocks are counted: the remainder by it, that each
   thread takes, is much faster than one of 64. */
__device__ __forceinline__ unsigned nn_d_tiles(int64_t columns, unsigned width) {
    return (unsigned)((columns + width - 1) / width);
}

/* What nn_k_column_sums adds up: dy (rows, columns), and beside it dy times (x - mean) * rstd where
   x is not NULL; of the rows whose index is entry alone, where index is not NULL. */
typedef struct nn_sums {
    const float *dy, *x, *mean, *rstd;
    const int32_t *index;
    int32_t entry;
    int64_t rows, columns;
    int64_t chunk_rows; // rows that a block adds up
    float *partial;     // (chunks, columns), and behind it the same of the products
    int64_t chunks;
} nn_sums;

/* The rows of a chunk are dealt out to NN_SUM_ROWS warps, the columns of a tile to their lanes. */
template <unsigned WIDE>
__device__ __forceinline__ void nn_d_column_sums(const nn_sums &s, float *shared) {
    const unsigned tiles = nn_d_tiles(s.columns, NN_WARP * WIDE);
    const int64_t chunk = blockIdx.x / tiles;
    const unsigned lane = threadIdx.x % NN_WARP;
    const unsigned warp = threadIdx.x / NN_WARP;
    const int64_t c = ((int64_t)(blockIdx.x % tiles) * NN_WARP + lane) * WIDE;
    const int64_t end = nn_d_least((chunk + 1) * s.chunk_rows, s.rows);
    float total[WIDE] = {0};
    float product[WIDE] = {0};
    if (c < s.columns) {
        NN_UNROLL_FOUR
        for (int64_t r = chunk * s.chunk_rows + warp; r < end; r += NN_SUM_ROWS) {
            const bool counts = s.index == NULL || s.index[r] == s.entry;
            float slope[WIDE] = {0};
            float value[WIDE] = {0};
            if (counts) {
                nn_wide<WIDE>::load(slope, s.dy + r * s.columns + c);
            }
            if (s.x != NULL) {
                nn_wide<WIDE>::load(value, s.x + r * s.columns + c);
            }
            const float mean = s.x != NULL ? s.mean[r] : 0.0f;
            const float rstd = s.x != NULL ? s.rstd[r] : 0.0f;
            NN_UNROLL
            for (unsigned k = 0; k < WIDE; k++) {
                total[k] += slope[k];
                product[k] += slope[k] * ((value[k] - mean) * rstd);
            }
        }
    }
    NN_UNROLL
    for (unsigned k = 0; k < WIDE; k++) {
        shared[(warp * WIDE + k) * NN_WARP + lane] = total[k];
        shared[(warp * WIDE + k + NN_SUM_ROWS * WIDE) * NN_WARP + lane] = product[k];
    }
    __syncthreads();
    if (warp >= 2 * WIDE) {
        return;
    }
    const unsigned part = warp / WIDE; // warps: each one a k of the sums, or of the products
    const int64_t column = c + warp % WIDE;
    float sum = 0.0f;
    for (unsigned i = 0; i < NN_SUM_ROWS; i++) {
        sum += shared[((i + part * NN_SUM_ROWS) * WIDE + warp % WIDE) * NN_WARP + lane];
    }
    if (column < s.columns && (part == 0 || s.x != NULL)) {
        s.partial[(part * s.chunks + chunk) * s.columns + column] = sum;
    }
}

static __global__ void __launch_bounds__(NN_THREADS) nn_k_column_sums_4(nn_sums s) {
    __shared__ float shared[2 * NN_SUM_ROWS * NN_WARP * 4];
    nn_d_column_sums<4>(s, shared);
}

static __global__ void __launch_bounds__(NN_THREADS) nn_k_column_sums_1(nn_sums s) {
    __shared__ float shared[2 * NN_SUM_ROWS * NN_WARP];
    nn_d_column_sums<1>(s, shared);
}

/* out (columns) gets the sum of partial (chunks, columns). */
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_fold(float *out, const float *partial, int64_t chunks, int64_t columns, bool adds) {
    const int64_t c = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    if (c >= columns) {
        return;
    }
    float sum = 0.0f;
    NN_UNROLL_FOUR
    for (int64_t i = 0; i < chunks; i++) {
        sum += partial[i * columns + c];
    }
    out[c] = adds ? nn_d_sum(out[c], sum) : sum;
}

/* Chunks of rows: enough blocks for a large GPU, of 64 rows at least, and not more than
   NN_SUM_FLOATS partial sums. */
NN_API int64_t nn_cuda_chunks(int64_t rows, int64_t columns) {
    const int64_t tiles = nn_divide_up(columns, 4 * NN_WARP);
    return nn_most(1, nn_least(nn_divide_up(rows, 64), NN_SUM_FLOATS / (4 * NN_WARP) / tiles));
}

/* The second stage: the sums and the products get their chunks. */
typedef struct nn_fold {
    float *out[2]; // NULL: nobody wants them
    bool adds[2];
    const float *partial;
    int64_t chunks, columns;
} nn_fold;

/* The chunks of 32 columns are dealt out to NN_SUM_ROWS warps. */
static __global__ void __launch_bounds__(NN_THREADS) nn_k_fold_sums(nn_fold f) {
    __shared__ float shared[NN_SUM_ROWS * NN_WARP];
    const unsigned tiles = nn_d_tiles(f.columns, NN_WARP);
    const int64_t part = blockIdx.x / tiles;
    const unsigned lane = threadIdx.x % NN_WARP;
    const unsigned warp = threadIdx.x / NN_WARP;
    const int64_t c = (int64_t)(blockIdx.x % tiles) * NN_WARP + lane;
    const float *from = f.partial + part * f.chunks * f.columns + c;
    float *out = f.out[part];
    float sum = 0.0f;
    NN_UNROLL_FOUR
    for (int64_t i = warp; i < f.chunks; i += NN_SUM_ROWS) {
        sum += c < f.columns && out != NULL ? from[i * f.columns] : 0.0f;
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (warp > 0 || c >= f.columns || out == NULL) {
        return;
    }
    for (unsigned i = 1; i < NN_SUM_ROWS; i++) {
        sum += shared[i * NN_WARP + lane];
    }
    out[c] = f.adds[part] ? nn_d_sum(out[c], sum) : sum;
}

static int nn_cuda_fold(const ms_call *call, nn_target sums, nn_target products, const nn_sums *s) {
    nn_fold f;
    f.out[0] = sums.data;
    f.out[1] = products.data;
    f.adds[0] = sums.beta != 0.0f;
    f.adds[1] = products.beta != 0.0f;
    f.partial = s->partial;
    f.chunks = s->chunks;
    f.columns = s->columns;
    const int64_t tiles = nn_divide_up(s->columns, NN_WARP);
    return nn_launch(call, nn_grid_of(products.data != NULL ? 2 * tiles : tiles, 1, NN_THREADS),
                     nn_k_fold_sums, f);
}

/* sums and products (columns each) get what s adds up. work: nn_cuda_column_floats, twice that
   where there are products. */
static int nn_cuda_column_sums(const ms_call *call, nn_target sums, nn_target products, nn_sums s,
                               float *work) {
    if (sums.data == NULL && products.data == NULL) {
        return 0;
    }
    const bool wide = s.columns % 4 == 0 && nn_aligned(s.dy) && nn_aligned(s.x);
    const int64_t tiles = nn_divide_up(s.columns, NN_WARP * (wide ? 4 : 1));
    s.chunk_rows = nn_divide_up(s.rows, nn_cuda_chunks(s.rows, s.columns));
    s.chunks = nn_divide_up(s.rows, s.chunk_rows);
    s.partial = work;
    s.x = products.data != NULL ? s.x : NULL;
    const int result = nn_launch(call, nn_grid_of(tiles * s.chunks, 1, NN_THREADS),
                                 wide ? nn_k_column_sums_4 : nn_k_column_sums_1, s);
    return nn_first(result, nn_cuda_fold(call, sums, products, &s));
}

/* Sums of dy alone. */
static nn_sums nn_sums_of(const float *dy, int64_t rows, int64_t columns) {
    nn_sums s;
    memset(&s, 0, sizeof s);
    s.dy = dy;
    s.rows = rows;
    s.columns = columns;
    return s;
}

// ---- linear

/* x (rows, columns) is a product: h = x + bias, y = op(h, residual). h NULL: nobody keeps it; bias
   and residual may be NULL. y may be x. WIDE columns and NN_BIAS_ROWS rows a thread. */
typedef struct nn_bias {
    float *y, *h;
    const float *x, *bias, *residual;
    int64_t rows, columns;
} nn_bias;

template <typename F, unsigned WIDE>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_bias(F op, nn_bias n) {
    const unsigned tiles = nn_d_tiles(n.columns, NN_THREADS * WIDE);
    const int64_t c = ((int64_t)(blockIdx.x % tiles) * NN_THREADS + threadIdx.x) * WIDE;
    const int64_t begin = (int64_t)(blockIdx.x / tiles) * NN_BIAS_ROWS;
    float shift[WIDE] = {0};
    float value[NN_BIAS_ROWS][WIDE];
    float other[NN_BIAS_ROWS][WIDE] = {{0}};
    if (c >= n.columns) {
        return;
    }
    if (n.bias != NULL) {
        nn_wide<WIDE>::load(shift, n.bias + c);
    }
    NN_UNROLL
    for (int r = 0; r < NN_BIAS_ROWS; r++) {
        if (begin + r < n.rows) {
            nn_wide<WIDE>::load(value[r], n.x + (begin + r) * n.columns + c);
        }
        if (begin + r < n.rows && n.residual != NULL) {
            nn_wide<WIDE>::load(other[r], n.residual + (begin + r) * n.columns + c);
        }
    }
    NN_UNROLL
    for (int r = 0; r < NN_BIAS_ROWS; r++) {
        const int64_t i = (begin + r) * n.columns + c;
        if (begin + r >= n.rows) {
            break;
        }
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            value[r][k] = nn_d_sum(value[r][k], shift[k]);
        }
        if (n.h != NULL) {
            nn_wide<WIDE>::store(n.h + i, value[r]);
        }
        op.start(i);
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            value[r][k] = op(i + k, value[r][k], other[r][k]);
        }
        nn_wide<WIDE>::store(n.y + i, value[r]);
    }
}

/* y = op(product + bias, residual), with the product in x. */
template <typename F> static int nn_cuda_bias(const ms_call *call, F op, nn_bias n) {
    const bool wide = n.columns % 4 == 0 && nn_aligned(n.y) && nn_aligned(n.h) && nn_aligned(n.x) &&
                      nn_aligned(n.bias) && nn_aligned(n.residual);
    const int64_t tiles = nn_divide_up(n.columns, NN_THREADS * (wide ? 4 : 1));
    const int64_t blocks = tiles * nn_divide_up(n.rows, NN_BIAS_ROWS);
    return nn_launch(call, nn_grid_of(blocks, 1, NN_THREADS),
                     wide ? nn_k_bias<F, 4> : nn_k_bias<F, 1>, op, n);
}

/* y = x * transpose(weight). */
static int nn_cuda_product(const ms_call *call, float *y, const float *x, const float *weight,
                           nn_linear_size n) {
    return (int)ms_gemm(call, 1.0f, nn_matrix(x, n.rows, n.in, n.in),
                        ms_transpose(nn_matrix(weight, n.out, n.in, n.in)), 0.0f,
                        nn_matrix(y, n.rows, n.out, n.out));
}

static nn_bias nn_bias_of(float *y, float *x, const float *bias, nn_linear_size n) {
    nn_bias b;
    memset(&b, 0, sizeof b);
    b.y = y;
    b.x = x;
    b.bias = bias;
    b.rows = n.rows;
    b.columns = n.out;
    return b;
}

/* The bias is added by a pass over the product, and not put there first, so that the blocks' passes
   can take it along: the same bits, and the same bytes moved. */
static int nn_cuda_linear(const ms_call *call, float *y, const float *x, const float *weight,
                          const float *bias, nn_linear_size n) {
    const int result = nn_cuda_product(call, y, x, weight, n);
    if (result != 0 || bias == NULL) {
        return result;
    }
    return nn_cuda_bias(call, nn_op_pass(), nn_bias_of(y, y, bias, n));
}

static int nn_cuda_linear_gelu(const ms_call *call, float *y, float *h, const float *x,
                               const float *weight, const float *bias, nn_linear_size n,
                               bool erf_form) {
    nn_op_gelu op;
    nn_bias b = nn_bias_of(y, h, bias, n);
    op.erf_form = erf_form;
    b.h = h;
    const int result = nn_cuda_product(call, h, x, weight, n);
    return result != 0 ? result : nn_cuda_bias(call, op, b);
}

static int nn_cuda_linear_add(const ms_call *call, float *y, const float *residual, const float *x,
                              const float *weight, const float *bias, nn_linear_size n,
                              const nn_drop *drop) {
    nn_bias b = nn_bias_of(y, y, bias, n);
    b.residual = residual;
    const int result = nn_cuda_product(call, y, x, weight, n);
    return result != 0
               ? result
               : nn_cuda_bias(call, nn_op_dropout_of(drop->probability, drop->seed, true), b);
}

static int nn_cuda_linear_backward(const ms_call *call, nn_target dx, nn_target dweight,
                                   nn_target dbias, const float *dy, const float *x,
                                   const float *weight, nn_linear_size n, float *work) {
    const int result = nn_linear_slopes(call, dx, dweight, dy, x, weight, n);
    return nn_first(result, nn_cuda_column_sums(call, dbias, nn_target_of(NULL, 0.0f),
                                                nn_sums_of(dy, n.rows, n.out), work));
}

// ---- embedding

/* The tables that an embedding adds up. */
typedef struct nn_lookups {
    nn_lookup table[3];
    int count;
} nn_lookups;

/* The entry of a row; below 0: it is none of the table's. */
__device__ __forceinline__ int64_t nn_d_entry(const nn_lookup &lookup, int64_t row) {
    const int64_t entry = lookup.index != NULL ? lookup.index[row] : row % lookup.period;
    return entry < lookup.entries ? entry : -1;
}

/* y (rows, channels), WIDE channels a thread: the tables' rows added up, NaN where one is none. */
template <unsigned WIDE>
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_embedding(float *y, nn_lookups lookups, int64_t channels) {
    const unsigned tiles = nn_d_tiles(channels, NN_THREADS * WIDE);
    const int64_t row = blockIdx.x / tiles;
    const int64_t c = ((int64_t)(blockIdx.x % tiles) * NN_THREADS + threadIdx.x) * WIDE;
    float sum[WIDE] = {0};
    if (c >= channels) {
        return;
    }
    for (int l = 0; l < lookups.count; l++) {
        if (lookups.table[l].table == NULL) {
            continue;
        }
        const int64_t entry = nn_d_entry(lookups.table[l], row);
        float value[WIDE];
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            value[k] = NAN;
        }
        if (entry >= 0) {
            nn_wide<WIDE>::load(value, lookups.table[l].table + entry * channels + c);
        }
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            sum[k] = l == 0 ? value[k] : sum[k] + value[k];
        }
    }
    nn_wide<WIDE>::store(y + row * channels + c, sum);
}

static int nn_cuda_embedding(const ms_call *call, float *y, const nn_lookup *lookups,
                             int lookup_count, int64_t rows, int64_t channels) {
    nn_lookups all;
    bool wide = channels % 4 == 0 && nn_aligned(y);
    memset(&all, 0, sizeof all);
    all.count = lookup_count;
    for (int l = 0; l < lookup_count; l++) {
        all.table[l] = lookups[l];
        wide = wide && nn_aligned(lookups[l].table);
    }
    const int64_t tiles = nn_divide_up(channels, NN_THREADS * (wide ? 4 : 1));
    return nn_launch(call, nn_grid_of(rows * tiles, 1, NN_THREADS),
                     wide ? nn_k_embedding<4> : nn_k_embedding<1>, y, all, channels);
}

/* The rows of dy that took an entry of a table. */
typedef struct nn_scatter {
    float *out; // (entries, channels)
    const float *dy;
    const int32_t *index;
    int64_t rows, entries, channels, period;
    bool adds;
} nn_scatter;

/* Which of the rows first ... first + NN_THREADS - 1 took this token: their numbers, in order. */
__device__ __forceinline__ int nn_d_matches(int *match, unsigned *votes, const nn_scatter &s,
                                            int64_t first, int32_t token) {
    const int64_t i = first + threadIdx.x;
    const int lane = (int)threadIdx.x % NN_WARP;
    const int warp = (int)threadIdx.x / NN_WARP;
    const bool hit = i < s.rows && s.index[i] == token;
    const unsigned vote = __ballot_sync(NN_EVERY_LANE, hit);
    if (lane == 0) {
        votes[warp] = vote;
    }
    __syncthreads();
    int before = 0;
    int count = 0;
    for (int w = 0; w < NN_THREADS / NN_WARP; w++) {
        before += w < warp ? __popc(votes[w]) : 0;
        count += __popc(votes[w]);
    }
    if (hit) {
        match[before + __popc(vote & ((1u << lane) - 1))] = (int)threadIdx.x;
    }
    __syncthreads();
    return count;
}

/* A block per row and NN_SCATTER_COLUMNS columns. If its row is the first that took its token, it
   adds up all the rows that did, in their order; else another block does. */
static __global__ void __launch_bounds__(NN_THREADS) nn_k_scatter(nn_scatter s) {
    __shared__ int match[NN_THREADS];
    __shared__ unsigned votes[NN_THREADS / NN_WARP];
    const unsigned tiles = nn_d_tiles(s.channels, NN_SCATTER_COLUMNS);
    const int64_t row = blockIdx.x / tiles;
    const int64_t c = (int64_t)(blockIdx.x % tiles) * NN_SCATTER_COLUMNS + threadIdx.x;
    const int32_t token = s.index[row];
    bool found = false;
    float sum[NN_SCATTER_WIDTH] = {0};
    if (token < 0 || token >= s.entries) {
        return;
    }
    for (int64_t first = 0; first < s.rows; first += NN_THREADS) {
        const int count = nn_d_matches(match, votes, s, first, token);
        if (!found && count > 0 && first + match[0] != row) {
            return;
        }
        found = found || count > 0;
        for (int m = 0; m < count; m += 4) {
            float value[4][NN_SCATTER_WIDTH];
            NN_UNROLL
            for (int j = 0; j < 4 * NN_SCATTER_WIDTH; j++) {
                const int64_t column = c + j % NN_SCATTER_WIDTH * NN_THREADS;
                const int64_t from =
                    first + match[m + j / NN_SCATTER_WIDTH < count ? m + j / NN_SCATTER_WIDTH : m];
                const bool counts = m + j / NN_SCATTER_WIDTH < count && column < s.channels;
                value[j / NN_SCATTER_WIDTH][j % NN_SCATTER_WIDTH] =
                    counts ? s.dy[from * s.channels + column] : 0.0f;
            }
            NN_UNROLL
            for (int j = 0; j < 4 * NN_SCATTER_WIDTH; j++) {
                sum[j % NN_SCATTER_WIDTH] += value[j / NN_SCATTER_WIDTH][j % NN_SCATTER_WIDTH];
            }
        }
    }
    NN_UNROLL
    for (int k = 0; k < NN_SCATTER_WIDTH; k++) {
        const int64_t column = c + (int64_t)k * NN_THREADS;
        if (column < s.channels) {
            float *to = s.out + token * s.channels + column;
            *to = s.adds ? nn_d_sum(*to, sum[k]) : sum[k];
        }
    }
}

/* The same for entries that are the row's number modulo period, an element a thread. */
static __global__ void __launch_bounds__(NN_THREADS) nn_k_scatter_periodic(nn_scatter s) {
    const int64_t i = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    float sum = 0.0f;
    if (i >= s.entries * s.channels) {
        return;
    }
    for (int64_t r = i / s.channels; r < s.rows && i / s.channels < s.period; r += s.period) {
        sum += s.dy[r * s.channels + i % s.channels];
    }
    s.out[i] = s.adds ? nn_d_sum(s.out[i], sum) : sum;
}

/* A table of few entries has many rows on each: their sums are those of columns. */
static int nn_cuda_scatter_few(const ms_call *call, nn_target dtable, const nn_lookup *lookup,
                               const float *dy, int64_t rows, int64_t channels, float *work) {
    int result = 0;
    for (int32_t entry = 0; entry < lookup->entries; entry++) {
        nn_sums s = nn_sums_of(dy, rows, channels);
        s.index = lookup->index;
        s.entry = entry;
        const nn_target row = nn_target_of(dtable.data + entry * channels, dtable.beta);
        result =
            nn_first(result, nn_cuda_column_sums(call, row, nn_target_of(NULL, 0.0f), s, work));
    }
    return result;
}

static int nn_cuda_embedding_backward(const ms_call *call, nn_target dtable,
                                      const nn_lookup *lookup, const float *dy, int64_t rows,
                                      int64_t channels, float *work) {
    nn_scatter s;
    int result = 0;
    if (dtable.data == NULL) {
        return 0;
    }
    if (lookup->index != NULL && lookup->entries <= NN_FEW_ENTRIES) {
        return nn_cuda_scatter_few(call, dtable, lookup, dy, rows, channels, work);
    }
    s.out = dtable.data;
    s.dy = dy;
    s.index = lookup->index;
    s.rows = rows;
    s.entries = lookup->entries;
    s.channels = channels;
    s.period = lookup->period;
    s.adds = dtable.beta != 0.0f;
    if (lookup->index == NULL) {
        const int64_t blocks = nn_divide_up(s.entries * channels, NN_THREADS);
        return nn_launch(call, nn_grid_of(blocks, 1, NN_THREADS), nn_k_scatter_periodic, s);
    }
    if (!s.adds) {
        result = nn_cuda_error(cudaMemsetAsync(
            s.out, 0, (size_t)(s.entries * channels) * sizeof(float), (cudaStream_t)call->stream));
    }
    const int64_t blocks = rows * nn_divide_up(channels, NN_SCATTER_COLUMNS);
    return nn_first(result, nn_launch(call, nn_grid_of(blocks, 1, NN_THREADS), nn_k_scatter, s));
}

// ---- rows: layer normalization, softmax

template <typename T> __device__ __forceinline__ T nn_d_warp_sum(T value) {
    NN_UNROLL
    for (int apart = NN_WARP / 2; apart > 0; apart /= 2) {
        value += __shfl_xor_sync(NN_EVERY_LANE, value, apart);
    }
    return value;
}

__device__ __forceinline__ float nn_d_warp_most(float value) {
    NN_UNROLL
    for (int apart = NN_WARP / 2; apart > 0; apart /= 2) {
        value = fmaxf(value, __shfl_xor_sync(NN_EVERY_LANE, value, apart));
    }
    return value;
}

/* Over the warps of a block, each of which gives one value; shared holds a float per warp. */
__device__ __forceinline__ float nn_d_block_sum(float value, float *shared) {
    float total = 0.0f;
    if (threadIdx.x % NN_WARP == 0) {
        shared[threadIdx.x / NN_WARP] = value;
    }
    __syncthreads();
    for (unsigned i = 0; i < blockDim.x / NN_WARP; i++) {
        total += shared[i];
    }
    __syncthreads(); // shared is free again
    return total;
}

__device__ __forceinline__ float nn_d_block_most(float value, float *shared) {
    float most = -FLT_MAX;
    if (threadIdx.x % NN_WARP == 0) {
        shared[threadIdx.x / NN_WARP] = value;
    }
    __syncthreads();
    for (unsigned i = 0; i < blockDim.x / NN_WARP; i++) {
        most = fmaxf(most, shared[i]);
    }
    __syncthreads();
    return most;
}

/* A row is held by a team of threads, ITEMS floats each, WIDE of them side by side; teams are a warp
   or, for long rows, a block. */
template <unsigned TEAM, unsigned ITEMS, unsigned WIDE> struct nn_team {
    unsigned lane;
    float *shared; // of a team that is a block: a float per warp

    /* The column of an item. */
    __device__ __forceinline__ unsigned column(unsigned item) const {
        return (item / WIDE * TEAM + lane) * WIDE + item % WIDE;
    }

    /* v gets the row's first count columns, and outside of them zeros. */
    __device__ __forceinline__ void load(float *v, const float *row, int64_t count) const {
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i += WIDE) {
            if (column(i) < count) {
                nn_wide<WIDE>::load(v + i, row + column(i));
            }
            NN_UNROLL
            for (unsigned k = i; k < i + WIDE; k++) {
                v[k] = column(k) < count ? v[k] : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void store(float *row, const float *v, int64_t count,
                                          bool adds) const {
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i += WIDE) {
            if (column(i) < count) {
                float value[WIDE] = {0};
                if (adds) {
                    nn_wide<WIDE>::load(value, row + column(i));
                }
                NN_UNROLL
                for (unsigned k = 0; k < WIDE; k++) {
                    value[k] = adds ? nn_d_sum(value[k], v[i + k]) : v[i + k];
                }
                nn_wide<WIDE>::store(row + column(i), value);
            }
        }
    }

    /* Over the threads of the team; all of them get the same bits. */
    __device__ __forceinline__ float sum(float value) const {
        value = nn_d_warp_sum(value);
        return TEAM == NN_WARP ? value : nn_d_block_sum(value, shared);
    }

    __device__ __forceinline__ float most(float value) const {
        value = nn_d_warp_most(value);
        return TEAM == NN_WARP ? value : nn_d_block_most(value, shared);
    }
};

/* What the kernels of rows are given: a is read, b too, and out is written; n counts rows and
   columns. */
typedef struct nn_rowwise {
    float *out;
    const float *a, *b;
    nn_norm n;
    float scale;
    bool adds, causal;
} nn_rowwise;

/* out = (a - mean) * rstd * weight + bias; out may be a. */
struct nn_row_layernorm {
    template <unsigned TEAM, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<TEAM, ITEMS, WIDE> &team,
                                               const nn_rowwise &w, int64_t row) {
        const int64_t width = w.n.width;
        float v[ITEMS];
        float total = 0.0f;
        float squares = 0.0f;
        team.load(v, w.a + row * width, width);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            total += v[i];
        }
        const float mean = team.sum(total) / (float)width;
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            const float apart = team.column(i) < width ? v[i] - mean : 0.0f;
            squares += apart * apart;
        }
        const float rstd = 1.0f / sqrtf(team.sum(squares) / (float)width + w.n.epsilon);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i += WIDE) {
            float weight[WIDE] = {0};
            float bias[WIDE] = {0};
            if (team.column(i) < width) {
                nn_wide<WIDE>::load(weight, w.n.weight + team.column(i));
                nn_wide<WIDE>::load(bias, w.n.bias + team.column(i));
            }
            NN_UNROLL
            for (unsigned k = 0; k < WIDE; k++) {
                v[i + k] = (v[i + k] - mean) * rstd * weight[k] + bias[k];
            }
        }
        team.store(w.out + row * width, v, width, false);
        if (team.lane == 0) {
            w.n.mean[row] = mean;
            w.n.rstd[row] = rstd;
        }
    }
};

/* a is dy, b is x; out, the gradient of x, may be either. */
struct nn_row_layernorm_backward {
    template <unsigned TEAM, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<TEAM, ITEMS, WIDE> &team,
                                               const nn_rowwise &w, int64_t row) {
        const int64_t width = w.n.width;
        const float mean = w.n.mean[row];
        const float rstd = w.n.rstd[row];
        float slope[ITEMS];  // dy * weight
        float normal[ITEMS]; // (x - mean) * rstd
        float slopes = 0.0f;
        float products = 0.0f;
        team.load(slope, w.a + row * width, width);
        team.load(normal, w.b + row * width, width);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i += WIDE) {
            float weight[WIDE] = {0};
            if (team.column(i) < width) {
                nn_wide<WIDE>::load(weight, w.n.weight + team.column(i));
            }
            NN_UNROLL
            for (unsigned k = i; k < i + WIDE; k++) {
                slope[k] *= weight[k - i];
                normal[k] = (normal[k] - mean) * rstd;
                slopes += slope[k];
                products += slope[k] * normal[k]; // slope is 0 outside of the row
            }
        }
        slopes = team.sum(slopes) / (float)width;
        products = team.sum(products) / (float)width;
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            slope[i] = __fmul_rn(slope[i] - slopes - normal[i] * products, rstd);
        }
        team.store(w.out + row * width, slope, width, w.adds);
    }
};

/* Scores (..., T, T): of row t the columns that it sees. Rows of a group fit 32 bits, of which a
   remainder is much faster than of 64. */
__device__ __forceinline__ int64_t nn_d_seen(const nn_rowwise &w, int64_t row) {
    return w.causal ? (uint32_t)row % (uint32_t)w.n.width + 1 : w.n.width;
}

/* out = softmax(a) over the columns that are seen, and 0 for those that come later, which are not
   read; out may be a. */
struct nn_row_softmax {
    template <unsigned TEAM, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<TEAM, ITEMS, WIDE> &team,
                                               const nn_rowwise &w, int64_t row) {
        const int64_t seen = nn_d_seen(w, row);
        float v[ITEMS];
        float most = -FLT_MAX;
        float total = 0.0f;
        team.load(v, w.a + row * w.n.width, seen);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            most = team.column(i) < seen ? fmaxf(most, v[i]) : most;
        }
        most = team.most(most);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            v[i] = team.column(i) < seen ? nn_exp(v[i] - most) : 0.0f;
            total += v[i];
        }
        const float share = 1.0f / team.sum(total);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            v[i] *= share;
        }
        team.store(w.out + row * w.n.width, v, w.n.width, false);
    }
};

/* a is the gradient of probabilities b: out = b * (a - sum(a * b)) * scale; out may be a. */
struct nn_row_softmax_backward {
    template <unsigned TEAM, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<TEAM, ITEMS, WIDE> &team,
                                               const nn_rowwise &w, int64_t row) {
        const int64_t seen = nn_d_seen(w, row);
        float slope[ITEMS];
        float p[ITEMS];
        float total = 0.0f;
        team.load(slope, w.a + row * w.n.width, seen);
        team.load(p, w.b + row * w.n.width, seen);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            total += slope[i] * p[i];
        }
        total = team.sum(total);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            slope[i] = p[i] * (slope[i] - total) * w.scale;
        }
        team.store(w.out + row * w.n.width, slope, w.n.width, false);
    }
};

template <typename F, unsigned ITEMS, unsigned WIDE>
static __global__ void __launch_bounds__(NN_ROW_WARPS *NN_WARP) nn_k_rows(nn_rowwise w) {
    const int64_t row = (int64_t)blockIdx.x * NN_ROW_WARPS + threadIdx.x / NN_WARP;
    nn_team<NN_WARP, ITEMS, WIDE> team;
    team.lane = threadIdx.x % NN_WARP;
    team.shared = NULL;
    if (row < w.n.rows) {
        F::run(team, w, row);
    }
}

/* A block per row; WIDE is 4 or 1. Macros, for a template has no shared memory of its own here. */
#define NN_LONG_ROWS(name, operation, wide)                                                        \
    static __global__ void __launch_bounds__(NN_THREADS) name(nn_rowwise w) {                      \
        __shared__ float shared[NN_THREADS / NN_WARP];                                             \
        nn_team<NN_THREADS, NN_WIDEST / NN_THREADS, wide> team;                                    \
        team.lane = threadIdx.x;                                                                   \
        team.shared = shared;                                                                      \
        operation::run(team, w, (int64_t)blockIdx.x);                                              \
    }

NN_LONG_ROWS(nn_k_layernorm_4, nn_row_layernorm, 4)
NN_LONG_ROWS(nn_k_layernorm_1, nn_row_layernorm, 1)
NN_LONG_ROWS(nn_k_layernorm_backward_4, nn_row_layernorm_backward, 4)
NN_LONG_ROWS(nn_k_layernorm_backward_1, nn_row_layernorm_backward, 1)
NN_LONG_ROWS(nn_k_softmax_4, nn_row_softmax, 4)
NN_LONG_ROWS(nn_k_softmax_1, nn_row_softmax, 1)
NN_LONG_ROWS(nn_k_softmax_backward_4, nn_row_softmax_backward, 4)
NN_LONG_ROWS(nn_k_softmax_backward_1, nn_row_softmax_backward, 1)

typedef void (*nn_rows_kernel)(nn_rowwise w);

/* The kernel for rows of this width: as few registers as hold them. */
template <typename F>
static int nn_cuda_rows(const ms_call *call, nn_rowwise w, nn_rows_kernel long_4,
                        nn_rows_kernel long_1) {
    static const nn_rows_kernel kernels[2][4] = {
        {nn_k_rows<F, 8, 4>, nn_k_rows<F, 16, 4>, nn_k_rows<F, 32, 4>, nn_k_rows<F, 64, 4>},
        {nn_k_rows<F, 8, 1>, NULL, nn_k_rows<F, 32, 1>, NULL},
    };
    const bool narrow = w.n.width % 4 != 0 || !nn_aligned(w.out) || !nn_aligned(w.a) ||
                        !nn_aligned(w.b) || !nn_aligned(w.n.weight) || !nn_aligned(w.n.bias);
    if (w.n.width > NN_WIDEST) {
        return NN_ERROR_WIDTH;
    }
    for (int i = 0; i < 4; i++) {
        if (kernels[narrow][i] != NULL && w.n.width <= (8 << i) * NN_WARP) {
            const int64_t blocks = nn_divide_up(w.n.rows, NN_ROW_WARPS);
            return nn_launch(call, nn_grid_of(blocks, 1, NN_ROW_WARPS * NN_WARP),
                             kernels[narrow][i], w);
        }
    }
    return nn_launch(call, nn_grid_of(w.n.rows, 1, NN_THREADS), narrow ? long_1 : long_4, w);
}

static int nn_cuda_layernorm(const ms_call *call, float *y, const float *x, const nn_norm *n) {
    nn_rowwise w;
    memset(&w, 0, sizeof w);
    w.out = y;
    w.a = x;
    w.n = *n;
    return nn_cuda_rows<nn_row_layernorm>(call, w, nn_k_layernorm_4, nn_k_layernorm_1);
}

static int nn_cuda_layernorm_backward(const ms_call *call, nn_target dx, nn_target dweight,
                                      nn_target dbias, const float *dy, const float *x,
                                      const nn_norm *n, float *work) {
    nn_sums s = nn_sums_of(dy, n->rows, n->width);
    nn_rowwise w;
    s.x = x;
    s.mean = n->mean;
    s.rstd = n->rstd;
    const int result = nn_cuda_column_sums(call, dbias, dweight, s, work);
    if (result != 0 || dx.data == NULL) {
        return result;
    }
    memset(&w, 0, sizeof w);
    w.out = dx.data;
    w.a = dy;
    w.b = x;
    w.n = *n;
    w.adds = dx.beta != 0.0f;
    return nn_cuda_rows<nn_row_layernorm_backward>(call, w, nn_k_layernorm_backward_4,
                                                   nn_k_layernorm_backward_1);
}

// ---- cross-entropy

/* logits (rows, classes), a block per row, one read: each thread keeps the largest of its logits and
   the sum of exponentials relative to it. Milakov and Gimelshein, "Online Normalizer Calculation for
   Softmax", 2018, algorithm 3. Rows of any alignment: neighbours read neighbouring floats, four
   loads in flight. */
typedef struct nn_entropy {
    float *losses, *stats, *dlogits;
    const float *dlosses, *known, *logits; // known: the stats, in backward
    const int32_t *targets;
    int64_t classes;
    bool adds;
} nn_entropy;

static __global__ void __launch_bounds__(NN_LONG_THREADS) nn_k_cross_entropy(nn_entropy e) {
    __shared__ float shared[NN_LONG_THREADS / NN_WARP];
    const int64_t row = blockIdx.x;
    const float *x = e.logits + row * e.classes;
    const int32_t target = e.targets[row];
    float most = -FLT_MAX;
    float total = 0.0f;
    // a NaN in an ignored row too, for gradients would be NaN with it: so a wrong token is told
    float loss = target < e.classes && x[0] == x[0] ? 0.0f : NAN;
    float log_sum = loss;
    if (target >= 0 && target < e.classes) {
        for (int64_t i = threadIdx.x; i < e.classes; i += 4 * NN_LONG_THREADS) {
            float value[4];
            float larger = most;
            NN_UNROLL
            for (int k = 0; k < 4; k++) {
                const int64_t at = i + k * NN_LONG_THREADS;
                value[k] = at < e.classes ? x[at] : -FLT_MAX;
                larger = fmaxf(larger, value[k]);
            }
            total = larger > most ? total * nn_exp(most - larger) : total;
            most = larger;
            NN_UNROLL
            for (int k = 0; k < 4; k++) {
                const bool inside = i + k * NN_LONG_THREADS < e.classes;
                total += inside ? nn_exp(value[k] - most) : 0.0f;
            }
        }
        const float own = most;
        most = nn_d_block_most(nn_d_warp_most(own), shared);
        total = total * nn_exp(own - most);
        total = nn_d_block_sum(nn_d_warp_sum(total), shared);
        log_sum = logf(total);
        loss = log_sum - (x[target] - most);
    } else {
        most = loss;
    }
    if (threadIdx.x == 0) {
        e.losses[row] = loss;
        e.stats[2 * row] = most;
        e.stats[2 * row + 1] = log_sum;
    }
}

/* dlogits = dlosses * (softmax(logits) - onehot(target)); dlogits may be logits. */
static __global__ void __launch_bounds__(NN_LONG_THREADS)
    nn_k_cross_entropy_backward(nn_entropy e) {
    const int64_t row = blockIdx.x;
    const float *x = e.logits + row * e.classes;
    float *to = e.dlogits + row * e.classes;
    const int32_t target = e.targets[row];
    const float slope = e.dlosses[row];
    const float most = e.known[2 * row];
    const float log_sum = e.known[2 * row + 1];
    if (target < 0 && e.adds) {
        return;
    }
    for (int64_t i = threadIdx.x; i < e.classes; i += 4 * NN_LONG_THREADS) {
        float value[4];
        NN_UNROLL
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + k * NN_LONG_THREADS;
            value[k] = at < e.classes && target >= 0 ? x[at] : 0.0f;
        }
        NN_UNROLL
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + k * NN_LONG_THREADS;
            const float share = __fmul_rn(slope, nn_exp(value[k] - most - log_sum));
            const float own = target < 0 ? 0.0f : nn_d_sum(share, at == target ? -slope : 0.0f);
            if (at < e.classes) {
                to[at] = e.adds ? nn_d_sum(to[at], own) : own;
            }
        }
    }
}

static int nn_cuda_cross_entropy(const ms_call *call, float *losses, float *stats,
                                 const float *logits, const int32_t *targets, int64_t rows,
                                 int64_t classes) {
    nn_entropy e;
    memset(&e, 0, sizeof e);
    e.losses = losses;
    e.stats = stats;
    e.logits = logits;
    e.targets = targets;
    e.classes = classes;
    return nn_launch(call, nn_grid_of(rows, 1, NN_LONG_THREADS), nn_k_cross_entropy, e);
}

static int nn_cuda_cross_entropy_backward(const ms_call *call, nn_target dlogits,
                                          const float *dlosses, const float *stats,
                                          const float *logits, const int32_t *targets, int64_t rows,
                                          int64_t classes) {
    nn_entropy e;
    if (dlogits.data == NULL) {
        return 0;
    }
    memset(&e, 0, sizeof e);
    e.dlogits = dlogits.data;
    e.dlosses = dlosses;
    e.known = stats;
    e.logits = logits;
    e.targets = targets;
    e.classes = classes;
    e.adds = dlogits.beta != 0.0f;
    return nn_launch(call, nn_grid_of(rows, 1, NN_LONG_THREADS), nn_k_cross_entropy_backward, e);
}

// ---- attention

/* Heads go through the products in groups, whose probabilities are in the workspace at once: about
   NN_GROUP_FLOATS, which also stay in the cache of a large GPU.
   In place: a group is some heads of one sequence, whose queries, keys and values are read where
   they stand. Packed: where the heads of one sequence are too small to keep a GPU busy, a group is
   all heads of some sequences; their queries, keys and values are copied head by head first, so
   that one batched product takes them all. Which of the two depends on sizes alone. */
typedef struct nn_groups {
    bool packed;
    int64_t count, size; // groups, and heads or sequences in each but the last
} nn_groups;

/* Square tiles of probabilities that a batched product of one sequence's heads deals out. */
NN_API bool nn_cuda_packs(nn_attention_size n) {
    const int64_t tiles = nn_divide_up(n.sequence, NN_TILE);
    return n.batch > 1 && tiles * tiles * n.heads < NN_BUSY_TILES;
}

static nn_groups nn_cuda_groups(nn_attention_size n) {
    nn_groups g;
    g.packed = nn_cuda_packs(n);
    const int64_t all = g.packed ? n.batch : n.heads;
    const int64_t floats = g.packed ? nn_cuda_sequence_floats(n) : nn_cuda_head_floats(n);
    const int64_t count = nn_divide_up(all, nn_most(1, nn_least(all, NN_GROUP_FLOATS / floats)));
    g.size = nn_divide_up(all, count);
    g.count = nn_divide_up(all, g.size) * (g.packed ? 1 : n.batch);
    return g;
}

/* Copies between rows of channels, (count, sequence, parts, heads * size), rows of one token
   row_stride apart, and heads, (heads of all sequences, sequence, size) for each part. */
typedef struct nn_heads_copy {
    float *rows;
    float *part[3]; // as many as parts
    int64_t sequences, sequence, parts, part_stride, row_stride, heads, size;
    bool packs, adds;
} nn_heads_copy;

template <unsigned WIDE>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_heads_copy(nn_heads_copy h) {
    const unsigned parts = (unsigned)h.parts; // 32 bits, as blocks are counted
    const unsigned part = blockIdx.x % parts;
    const unsigned token = blockIdx.x / parts;
    const unsigned sequence = token / (unsigned)h.sequence;
    const unsigned time = token % (unsigned)h.sequence;
    float *row = h.rows + token * h.row_stride + part * h.part_stride;
    const unsigned columns = (unsigned)(h.heads * h.size); // 32 bits: divided for each element
    const unsigned size = (unsigned)h.size;
    for (unsigned c = threadIdx.x * WIDE; c < columns; c += NN_THREADS * WIDE) {
        const unsigned head = c / size;
        const int64_t place = ((int64_t)sequence * h.heads + head) * h.sequence + time;
        float *own = h.part[part] + place * h.size + c % size;
        float value[WIDE];
        nn_wide<WIDE>::load(value, h.packs ? row + c : own);
        if (h.adds) {
            float old[WIDE];
            nn_wide<WIDE>::load(old, h.packs ? own : row + c);
            NN_UNROLL
            for (unsigned k = 0; k < WIDE; k++) {
                value[k] = nn_d_sum(old[k], value[k]);
            }
        }
        nn_wide<WIDE>::store(h.packs ? own : row + c, value);
    }
}

static int nn_cuda_heads_copy(const ms_call *call, nn_heads_copy h) {
    bool wide = h.size % 4 == 0 && nn_aligned(h.rows);
    for (int64_t p = 0; p < h.parts; p++) {
        wide = wide && nn_aligned(h.part[p]);
    }
    return nn_launch(call, nn_grid_of(h.sequences * h.sequence * h.parts, 1, NN_THREADS),
                     wide ? nn_k_heads_copy<4> : nn_k_heads_copy<1>, h);
}

/* Matrices (sequence, size), one per head. */
typedef struct nn_heads {
    float *data;
    int64_t stride, step;
} nn_heads;

/* One group: where its operands are. q, k, v (and, in forward, o) are read and written by the
   products; in backward dq, dk, dv get beta times what is there and the gradients. */
typedef struct nn_group {
    const ms_call *call;
    nn_attention_size n;
    bool packed;
    int64_t heads;       // in the group
    int64_t first, head; // sequence, and head within it, that it begins with
    int64_t sequences;   // packed: how many
    nn_heads q, k, v, o; // o: in backward its gradient
    nn_heads dq, dk, dv; // backward
    float *p, *dp;       // (heads, sequence, sequence); dp in backward
    float *spare;        // behind all these
} nn_group;

static nn_heads nn_heads_of(const float *data, int64_t stride, int64_t step) {
    nn_heads heads;
    heads.data = (float *)(uintptr_t)data; // read only, where it is an input
    heads.stride = stride;
    heads.step = step;
    return heads;
}

/* So many floats of the workspace, aligned as it is. */
static float *nn_cuda_take(nn_group *g, int64_t floats) {
    float *taken = g->spare;
    g->spare += nn_divide_up(floats, 16) * 16;
    return taken;
}

/* A group without its gradients. scores NULL: nobody keeps the probabilities. */
static nn_group nn_cuda_group(const ms_call *call, int64_t index, nn_groups groups, float *scores,
                              float *work, nn_attention_size n) {
    nn_group g;
    memset(&g, 0, sizeof g);
    const int64_t per_sequence = groups.packed ? 1 : groups.count / n.batch;
    const int64_t begin = index % (groups.packed ? groups.count : per_sequence) * groups.size;
    g.call = call;
    g.n = n;
    g.packed = groups.packed;
    g.spare = work;
    g.first = groups.packed ? begin : index / per_sequence;
    g.head = groups.packed ? 0 : begin;
    g.sequences = groups.packed ? nn_least(groups.size, n.batch - begin) : 1;
    g.heads = groups.packed ? g.sequences * n.heads : nn_least(groups.size, n.heads - begin);
    const int64_t square = n.sequence * n.sequence;
    g.p = scores != NULL ? scores + (g.first * n.heads + g.head) * square
                         : nn_cuda_take(&g, g.heads * square);
    return g;
}

/* q, k, v and o where they stand, in rows of 3 * heads * size and of heads * size. */
static void nn_group_in_place(nn_group *g, const float *qkv, const float *out) {
    const int64_t channels = g->n.heads * g->n.size;
    const int64_t token = g->first * g->n.sequence;
    const float *q = qkv + token * 3 * channels + g->head * g->n.size;
    g->q = nn_heads_of(q, 3 * channels, g->n.size);
    g->k = nn_heads_of(q + channels, 3 * channels, g->n.size);
    g->v = nn_heads_of(q + 2 * channels, 3 * channels, g->n.size);
    g->o = nn_heads_of(out + token * channels + g->head * g->n.size, channels, g->n.size);
}

/* Room for one packed operand. */
static nn_heads nn_group_room(nn_group *g) {
    const int64_t floats = g->n.sequence * g->n.size;
    return nn_heads_of(nn_cuda_take(g, g->heads * floats), g->n.size, floats);
}

/* Moves the group's rows of x, (B, T, parts * C), to packed operands, or back. */
static int nn_group_copy(const nn_group *g, const float *x, int64_t parts, const nn_heads *a,
                         const nn_heads *b, const nn_heads *c, bool packs, float beta) {
    const int64_t channels = g->n.heads * g->n.size;
    nn_heads_copy h;
    memset(&h, 0, sizeof h);
    h.rows =
        (float *)(uintptr_t)x + g->first * g->n.sequence * parts * channels + g->head * g->n.size;
    h.part[0] = a->data;
    h.part[1] = b != NULL ? b->data : NULL;
    h.part[2] = c != NULL ? c->data : NULL;
    h.sequences = g->sequences;
    h.sequence = g->n.sequence;
    h.parts = b != NULL ? 3 : 1;
    h.part_stride = channels;
    h.row_stride = parts * channels;
    h.heads = g->packed ? g->n.heads : g->heads;
    h.size = g->n.size;
    h.packs = packs;
    h.adds = beta != 0.0f;
    return nn_cuda_heads_copy(g->call, h);
}

/* The operands of a product. */
static ms_matrix nn_group_matrix(const nn_group *g, nn_heads heads) {
    ms_matrix m = nn_matrix(heads.data, g->n.sequence, g->n.size, heads.stride);
    m.count = g->heads;
    m.step = heads.step;
    return m;
}

static ms_matrix nn_group_square(const nn_group *g, const float *scores) {
    ms_matrix m = nn_matrix(scores, g->n.sequence, g->n.sequence, g->n.sequence);
    m.count = g->heads;
    m.step = g->n.sequence * g->n.sequence;
    return m;
}

static nn_rowwise nn_group_rows(const nn_group *g, float *out, const float *p) {
    nn_rowwise w;
    memset(&w, 0, sizeof w);
    w.out = out;
    w.a = out;
    w.b = p;
    w.n.rows = g->heads * g->n.sequence;
    w.n.width = g->n.sequence;
    w.scale = 1.0f / sqrtf((float)g->n.size);
    w.causal = g->n.causal;
    return w;
}

/* p = softmax(q k^T / sqrt(size)); the product takes the factor along. */
static int nn_group_softmax(const nn_group *g) {
    const nn_rowwise w = nn_group_rows(g, g->p, NULL);
    const int result =
        (int)ms_gemm(g->call, w.scale, nn_group_matrix(g, g->q),
                     ms_transpose(nn_group_matrix(g, g->k)), 0.0f, nn_group_square(g, g->p));
    return result != 0 ? result
                       : nn_cuda_rows<nn_row_softmax>(g->call, w, nn_k_softmax_4, nn_k_softmax_1);
}

static int nn_group_forward(nn_group *g, float *out, const float *qkv) {
    int result = 0;
    if (g->packed) {
        g->q = nn_group_room(g);
        g->k = nn_group_room(g);
        g->v = nn_group_room(g);
        g->o = g->q; // no product reads both
        result = nn_group_copy(g, qkv, 3, &g->q, &g->k, &g->v, true, 0.0f);
    } else {
        nn_group_in_place(g, qkv, out);
    }
    if (result == 0) {
        result = nn_group_softmax(g);
    }
    if (result == 0) {
        result = (int)ms_gemm(g->call, 1.0f, nn_group_square(g, g->p), nn_group_matrix(g, g->v),
                              0.0f, nn_group_matrix(g, g->o));
    }
    return result != 0 || !g->packed ? result
                                     : nn_group_copy(g, out, 1, &g->o, NULL, NULL, false, 0.0f);
}

static int nn_cuda_attention(const ms_call *call, float *out, float *scores, const float *qkv,
                             float *work, nn_attention_size n) {
    const nn_groups groups = nn_cuda_groups(n);
    int result = 0;
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_cuda_group(call, i, groups, scores, work, n);
        result = nn_group_forward(&g, out, qkv);
    }
    return result;
}

/* Gradients take the place of what no product reads any more. In place the queries are copied
   first, for dq may be written where they are and dk reads them: so dqkv may be qkv. */
static int nn_group_operands(nn_group *g, nn_target dqkv, const float *dout, const float *qkv) {
    nn_group gradient = *g;
    g->dp = nn_cuda_take(g, g->heads * g->n.sequence * g->n.sequence);
    if (!g->packed) {
        nn_group_in_place(&gradient, dqkv.data, dout);
        g->dq = gradient.q;
        g->dk = gradient.k;
        g->dv = gradient.v;
        nn_group_in_place(g, qkv, dout);
        g->q = nn_group_room(g);
        return nn_group_copy(g, qkv, 3, &g->q, NULL, NULL, true, 0.0f);
    }
    g->q = nn_group_room(g);
    g->k = nn_group_room(g);
    g->v = nn_group_room(g);
    g->o = nn_group_room(g);
    g->dq = g->o;
    g->dk = g->k;
    g->dv = g->v;
    return nn_first(nn_group_copy(g, qkv, 3, &g->q, &g->k, &g->v, true, 0.0f),
                    nn_group_copy(g, dout, 1, &g->o, NULL, NULL, true, 0.0f));
}

/* dp = do v^T, dv = p^T do, ds from dp, dq = ds k, dk = ds^T q, in this order. */
static int nn_group_backward(nn_group *g, float beta) {
    const ms_matrix p = nn_group_square(g, g->p);
    const ms_matrix dp = nn_group_square(g, g->dp);
    const ms_matrix slope = nn_group_matrix(g, g->o);
    int result =
        (int)ms_gemm(g->call, 1.0f, slope, ms_transpose(nn_group_matrix(g, g->v)), 0.0f, dp);
    if (result == 0) {
        result =
            (int)ms_gemm(g->call, 1.0f, ms_transpose(p), slope, beta, nn_group_matrix(g, g->dv));
    }
    if (result == 0) {
        result =
            nn_cuda_rows<nn_row_softmax_backward>(g->call, nn_group_rows(g, g->dp, g->p),
                                                  nn_k_softmax_backward_4, nn_k_softmax_backward_1);
    }
    if (result == 0) {
        result = (int)ms_gemm(g->call, 1.0f, dp, nn_group_matrix(g, g->k), beta,
                              nn_group_matrix(g, g->dq));
    }
    return result != 0 ? result
                       : (int)ms_gemm(g->call, 1.0f, ms_transpose(dp), nn_group_matrix(g, g->q),
                                      beta, nn_group_matrix(g, g->dk));
}

static int nn_cuda_attention_backward(const ms_call *call, nn_target dqkv, const float *dout,
                                      const float *scores, const float *qkv, float *work,
                                      nn_attention_size n) {
    const nn_groups groups = nn_cuda_groups(n);
    int result = 0;
    if (dqkv.data == NULL) {
        return 0;
    }
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_cuda_group(call, i, groups, (float *)(uintptr_t)scores, work, n);
        result = nn_group_operands(&g, dqkv, dout, qkv);
        if (result == 0 && scores == NULL) {
            result = nn_group_softmax(&g);
        }
        if (result == 0) {
            result = nn_group_backward(&g, g.packed ? 0.0f : dqkv.beta);
        }
        if (result == 0 && g.packed) {
            result = nn_group_copy(&g, dqkv.data, 3, &g.dq, &g.dk, &g.dv, false, dqkv.beta);
        }
    }
    return result;
}

// ---- images: element by element

struct nn_op_relu : nn_op {
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        (void)b;
        return a < 0.0f ? 0.0f : a;
    }
};

/* a is dy, b is y. */
struct nn_op_relu_backward : nn_op {
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        return b > 0.0f ? a : 0.0f;
    }
};

static int nn_cuda_relu(const ms_call *call, float *y, const float *x, int64_t count) {
    return nn_cuda_map(call, nn_op_relu(), nn_target_of(y, 0.0f), x, NULL, count);
}

static int nn_cuda_relu_backward(const ms_call *call, nn_target dx, const float *dy, const float *y,
                                 int64_t count) {
    return nn_cuda_map(call, nn_op_relu_backward(), dx, dy, y, count);
}

/* out = op(a, b), or out += that, where op is told which plane the elements stand in that come
   next, of `cycle` planes, after which it counts anew. a and b may be NULL. */
typedef struct nn_plane_map {
    float *out;
    const float *a, *b;
    int64_t count, plane, cycle;
    bool adds, aligned;
} nn_plane_map;

/* Four floats that begin with element first, or those of them that there are, and else zeros. */
__device__ __forceinline__ void nn_d_load_four(float *to, const float *from, int64_t first,
                                               int64_t count, bool aligned) {
    if (from != NULL && aligned && first + 4 <= count) {
        nn_wide<4>::load(to, from + first);
        return;
    }
    NN_UNROLL
    for (int k = 0; k < 4; k++) {
        to[k] = from != NULL && first + k < count ? from[first + k] : 0.0f;
    }
}

__device__ __forceinline__ void nn_d_store_four(float *to, const float *from, int64_t first,
                                                int64_t count, bool aligned) {
    if (aligned && first + 4 <= count) {
        nn_wide<4>::store(to + first, from);
        return;
    }
    NN_UNROLL
    for (int k = 0; k < 4; k++) {
        if (first + k < count) {
            to[first + k] = from[k];
        }
    }
}

/* Four elements a thread, all of which are read before one is written: out may be a or b. */
template <typename F>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_planes(F op, nn_plane_map m) {
    const int64_t first = 4 * ((int64_t)blockIdx.x * NN_THREADS + threadIdx.x);
    float a[4];
    float b[4];
    float old[4];
    if (first >= m.count) {
        return;
    }
    nn_d_load_four(a, m.a, first, m.count, m.aligned);
    nn_d_load_four(b, m.b, first, m.count, m.aligned);
    nn_d_load_four(old, m.adds ? m.out : NULL, first, m.count, m.aligned);
    int64_t plane = first / m.plane;
    int64_t inside = first - plane * m.plane;
    plane %= m.cycle;
    op.start(plane);
    NN_UNROLL
    for (int k = 0; k < 4; k++) {
        if (inside == m.plane) {
            inside = 0;
            plane = plane + 1 == m.cycle ? 0 : plane + 1;
            op.start(plane);
        }
        inside++;
        a[k] = op(a[k], b[k]);
        a[k] = m.adds ? nn_d_sum(old[k], a[k]) : a[k];
    }
    nn_d_store_four(m.out, a, first, m.count, m.aligned);
}

/* The kernel above, for elements (..., cycle, plane). */
template <typename F>
static int nn_cuda_planes(const ms_call *call, F op, nn_target out, const float *a, const float *b,
                          nn_planes n, int64_t cycle) {
    nn_plane_map m;
    if (out.data == NULL) {
        return 0;
    }
    m.out = out.data;
    m.a = a;
    m.b = b;
    m.count = nn_planes_count(n);
    m.plane = n.plane;
    m.cycle = cycle;
    m.adds = out.beta != 0.0f;
    m.aligned = nn_aligned(out.data) && nn_aligned(a) && nn_aligned(b);
    return nn_launch(call, nn_grid_of(nn_divide_up(m.count, 4 * NN_THREADS), 1, NN_THREADS),
                     nn_k_planes<F>, op, m);
}

/* means (images * channels) of the planes of x; a warp takes a plane. */
template <unsigned WIDE>
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_average(float *means, const float *x, int64_t planes, int64_t plane) {
    const unsigned lane = threadIdx.x % NN_WARP;
    const int64_t p = (int64_t)blockIdx.x * (NN_THREADS / NN_WARP) + threadIdx.x / NN_WARP;
    float sum[WIDE] = {0};
    if (p >= planes) {
        return;
    }
    NN_UNROLL_FOUR
    for (int64_t i = lane * WIDE; i < plane; i += NN_WARP * WIDE) {
        float value[WIDE];
        nn_wide<WIDE>::load(value, x + p * plane + i);
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            sum[k] += value[k];
        }
    }
    NN_UNROLL
    for (unsigned k = 1; k < WIDE; k++) {
        sum[0] += sum[k];
    }
    const float total = nn_d_warp_sum(sum[0]);
    if (lane == 0) {
        means[p] = total / (float)plane;
    }
}

static int nn_cuda_average(const ms_call *call, float *means, const float *x, nn_planes n) {
    const bool wide = n.plane % 4 == 0 && nn_aligned(x);
    const int64_t planes = n.images * n.channels;
    return nn_launch(call, nn_grid_of(nn_divide_up(planes, NN_THREADS / NN_WARP), 1, NN_THREADS),
                     wide ? nn_k_average<4> : nn_k_average<1>, means, x, planes, n.plane);
}

struct nn_op_average_backward {
    const float *dmeans;
    float plane, slope;
    __device__ void start(int64_t p) {
        slope = dmeans[p] / plane;
    }
    __device__ float operator()(float a, float b) const {
        (void)a;
        (void)b;
        return slope;
    }
};

static int nn_cuda_average_backward(const ms_call *call, nn_target dx, const float *dmeans,
                                    nn_planes n) {
    nn_op_average_backward op;
    op.dmeans = dmeans;
    op.plane = (float)n.plane;
    op.slope = 0.0f;
    return nn_cuda_planes(call, op, dx, NULL, NULL, n, n.images * n.channels);
}

// ---- images: sums over a channel

/* The values of a channel, those of one image behind those of another, are dealt out in chunks.
   x NULL: sums of dy. dy NULL: sums of x, and of the squares about the chunk's mean. Else sums of
   dy, and of dy times (x - mean) * rstd. */
typedef struct nn_channel_sums {
    const float *dy, *x, *mean, *rstd;
    nn_planes n;
    int64_t chunks;
    float *sums, *products; // (channels, chunks)
} nn_channel_sums;

/* NN_CHANNEL_ITEMS floats of a thread's own, of this chunk of a channel; zeros behind the end. */
template <unsigned WIDE>
__device__ __forceinline__ void nn_d_channel_load(float *v, const float *x, int64_t channel,
                                                  int64_t chunk, nn_planes n) {
    const int64_t count = n.images * n.plane;
    NN_UNROLL
    for (unsigned i = 0; i < NN_CHANNEL_ITEMS; i += WIDE) {
        const int64_t at = chunk * NN_CHANNEL_CHUNK + i * NN_THREADS + threadIdx.x * WIDE;
        const int64_t image = at / n.plane;
        NN_UNROLL
        for (unsigned k = i; k < i + WIDE; k++) {
            v[k] = 0.0f;
        }
        if (at < count) { // the whole of WIDE then, as count and plane are multiples of it
            nn_wide<WIDE>::load(v + i, x + (image * n.channels + channel) * n.plane +
                                           (at - image * n.plane));
        }
    }
}

/* A chunk is read once and stays in registers. */
template <unsigned WIDE>
__device__ __forceinline__ void nn_d_channel_moments(const nn_channel_sums &s, float *shared) {
    const int64_t channel = blockIdx.x / s.chunks;
    const int64_t chunk = blockIdx.x % s.chunks;
    const int64_t size =
        nn_d_least(NN_CHANNEL_CHUNK, s.n.images * s.n.plane - chunk * NN_CHANNEL_CHUNK);
    float v[NN_CHANNEL_ITEMS];
    float total = 0.0f;
    float squares = 0.0f;
    nn_d_channel_load<WIDE>(v, s.x, channel, chunk, s.n);
    NN_UNROLL
    for (unsigned i = 0; i < NN_CHANNEL_ITEMS; i++) {
        total += v[i];
    }
    total = nn_d_block_sum(nn_d_warp_sum(total), shared);
    const float mean = total / (float)size;
    NN_UNROLL
    for (unsigned i = 0; i < NN_CHANNEL_ITEMS; i++) {
        const unsigned at = i / WIDE * WIDE * NN_THREADS + threadIdx.x * WIDE + i % WIDE;
        const float off = at < size ? v[i] - mean : 0.0f;
        squares += off * off;
    }
    squares = nn_d_block_sum(nn_d_warp_sum(squares), shared);
    if (threadIdx.x == 0) {
        s.sums[blockIdx.x] = total;
        s.products[blockIdx.x] = squares;
    }
}

template <unsigned WIDE>
__device__ __forceinline__ void nn_d_channel_slopes(const nn_channel_sums &s, float *shared) {
    const int64_t channel = blockIdx.x / s.chunks;
    const int64_t chunk = blockIdx.x % s.chunks;
    float slope[NN_CHANNEL_ITEMS];
    float x[NN_CHANNEL_ITEMS] = {0};
    float total = 0.0f;
    float product = 0.0f;
    nn_d_channel_load<WIDE>(slope, s.dy, channel, chunk, s.n);
    if (s.x != NULL) {
        nn_d_channel_load<WIDE>(x, s.x, channel, chunk, s.n);
    }
    const float mean = s.x != NULL ? s.mean[channel] : 0.0f;
    const float rstd = s.x != NULL ? s.rstd[channel] : 0.0f;
    NN_UNROLL
    for (unsigned i = 0; i < NN_CHANNEL_ITEMS; i++) {
        total += slope[i];
        product += slope[i] * ((x[i] - mean) * rstd);
    }
    total = nn_d_block_sum(nn_d_warp_sum(total), shared);
    product = nn_d_block_sum(nn_d_warp_sum(product), shared);
    if (threadIdx.x == 0) {
        s.sums[blockIdx.x] = total;
        s.products[blockIdx.x] = product;
    }
}

static __global__ void __launch_bounds__(NN_THREADS) nn_k_channel_moments_4(nn_channel_sums s) {
    __shared__ float shared[NN_THREADS / NN_WARP];
    nn_d_channel_moments<4>(s, shared);
}

static __global__ void __launch_bounds__(NN_THREADS) nn_k_channel_moments_1(nn_channel_sums s) {
    __shared__ float shared[NN_THREADS / NN_WARP];
    nn_d_channel_moments<1>(s, shared);
}

static __global__ void __launch_bounds__(NN_THREADS) nn_k_channel_slopes_4(nn_channel_sums s) {
    __shared__ float shared[NN_THREADS / NN_WARP];
    nn_d_channel_slopes<4>(s, shared);
}

static __global__ void __launch_bounds__(NN_THREADS) nn_k_channel_slopes_1(nn_channel_sums s) {
    __shared__ float shared[NN_THREADS / NN_WARP];
    nn_d_channel_slopes<1>(s, shared);
}

/* The warp's channel, for kernels that fold chunks; the same for all its threads. */
__device__ __forceinline__ int64_t nn_d_warp_channel(void) {
    return (int64_t)blockIdx.x * (NN_THREADS / NN_WARP) + threadIdx.x / NN_WARP;
}

/* In double, the sum of a channel's chunks; all threads of the warp get it. */
__device__ __forceinline__ double nn_d_fold_chunks(const float *sums, int64_t channel,
                                                   int64_t chunks) {
    double total = 0.0;
    for (int64_t i = threadIdx.x % NN_WARP; i < chunks; i += NN_WARP) {
        total += (double)sums[channel * chunks + i];
    }
    return nn_d_warp_sum(total);
}

/* dbias and dweight (channels each) get the sums and products; means (2, channels) gets both over
   the number of values. Each may be NULL. */
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_channel_fold(nn_channel_sums s, nn_target dbias, nn_target dweight, float *means) {
    const int64_t channel = nn_d_warp_channel();
    if (channel >= s.n.channels) {
        return;
    }
    const double count = (double)(s.n.images * s.n.plane);
    const double total = nn_d_fold_chunks(s.sums, channel, s.chunks);
    const double product = s.x != NULL ? nn_d_fold_chunks(s.products, channel, s.chunks) : 0.0;
    if (threadIdx.x % NN_WARP != 0) {
        return;
    }
    if (dbias.data != NULL) {
        const float old = dbias.beta != 0.0f ? dbias.data[channel] : 0.0f;
        dbias.data[channel] = nn_d_sum(old, (float)total);
    }
    if (dweight.data != NULL) {
        const float old = dweight.beta != 0.0f ? dweight.data[channel] : 0.0f;
        dweight.data[channel] = nn_d_sum(old, (float)product);
    }
    if (means != NULL) {
        means[channel] = (float)(total / count);
        means[s.n.channels + channel] = (float)(product / count);
    }
}

/* Mean and rstd of a channel, from its chunks or from the running statistics, which the former
   move. The squares of a chunk are about its own mean: Chan, Golub and LeVeque, "Updating Formulae
   and a Pairwise Algorithm for Computing Sample Variances", 1979, equation 2.1. */
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_channel_norm(nn_channel_sums s, nn_batch_norm_values v, float *mean, float *rstd) {
    const int64_t channel = nn_d_warp_channel();
    const int64_t count = s.n.images * s.n.plane;
    if (channel >= s.n.channels) {
        return;
    }
    float m = 0.0f;
    float variance = 0.0f;
    if (v.moments == NN_MOMENTS_RUNNING) {
        m = v.running_mean[channel];
        variance = v.running_variance[channel];
    } else {
        const double middle = nn_d_fold_chunks(s.sums, channel, s.chunks) / (double)count;
        double squares = 0.0;
        for (int64_t i = threadIdx.x % NN_WARP; i < s.chunks; i += NN_WARP) {
            const double size = (double)nn_d_least(NN_CHANNEL_CHUNK, count - i * NN_CHANNEL_CHUNK);
            const double off = (double)s.sums[channel * s.chunks + i] / size - middle;
            squares += (double)s.products[channel * s.chunks + i] + size * off * off;
        }
        m = (float)middle;
        variance = (float)(nn_d_warp_sum(squares) / (double)count);
    }
    if (threadIdx.x % NN_WARP != 0) {
        return;
    }
    if (v.moments == NN_MOMENTS_OF_BATCH && v.running_mean != NULL) {
        nn_move_running(&v, channel, m, variance, count);
    }
    mean[channel] = m;
    rstd[channel] = 1.0f / sqrtf(variance + v.epsilon);
    if (v.mean != NULL) {
        v.mean[channel] = mean[channel];
    }
    if (v.rstd != NULL) {
        v.rstd[channel] = rstd[channel];
    }
}

/* The first stage. work: nn_cuda_channel_floats, of which the last two per channel stay free. */
static int nn_cuda_channel_sums(const ms_call *call, nn_channel_sums *s, float *work) {
    const bool wide = s->n.plane % 4 == 0 && nn_aligned(s->dy) && nn_aligned(s->x);
    s->chunks = nn_cuda_channel_chunks(s->n);
    s->sums = work;
    s->products = work + s->n.channels * s->chunks;
    const nn_grid grid = nn_grid_of(s->n.channels * s->chunks, 1, NN_THREADS);
    if (s->dy == NULL) {
        return nn_launch(call, grid, wide ? nn_k_channel_moments_4 : nn_k_channel_moments_1, *s);
    }
    return nn_launch(call, grid, wide ? nn_k_channel_slopes_4 : nn_k_channel_slopes_1, *s);
}

static nn_grid nn_channel_grid(nn_planes n) {
    return nn_grid_of(nn_divide_up(n.channels, NN_THREADS / NN_WARP), 1, NN_THREADS);
}

/* dbias (channels): the sums of dy over images and planes. */
static int nn_cuda_channel_bias(const ms_call *call, nn_target dbias, const float *dy, nn_planes n,
                                float *work) {
    nn_channel_sums s;
    float *const means = NULL;
    if (dbias.data == NULL) {
        return 0;
    }
    memset(&s, 0, sizeof s);
    s.dy = dy;
    s.n = n;
    const int result = nn_cuda_channel_sums(call, &s, work);
    return nn_first(result, nn_launch(call, nn_channel_grid(n), nn_k_channel_fold, s, dbias,
                                      nn_target_of(NULL, 0.0f), means));
}

// ---- images: batch normalization

/* a is x. */
struct nn_op_batch_norm {
    const float *mean, *rstd, *weight, *bias;
    float m, r, w, b;
    __device__ void start(int64_t channel) {
        m = mean[channel];
        r = rstd[channel];
        w = weight[channel];
        b = bias[channel];
    }
    __device__ float operator()(float x, float nothing) const {
        (void)nothing;
        return (x - m) * r * w + b;
    }
};

/* means (2, channels): of dy, and of dy times (x - mean) * rstd. */
struct nn_op_batch_norm_backward {
    const float *mean, *rstd, *weight, *means;
    int64_t channels;
    float m, r, scale, slope, product;
    __device__ void start(int64_t channel) {
        m = mean[channel];
        r = rstd[channel];
        scale = r * weight[channel];
        slope = means[channel];
        product = means[channels + channel];
    }
    __device__ float operator()(float dy, float x) const {
        return (dy - slope - (x - m) * r * product) * scale;
    }
};

/* The same kernel and the same mean and rstd in forward and in a recomputation: the same bits. */
static int nn_cuda_batch_norm(const ms_call *call, float *y, const float *x,
                              const nn_batch_norm_values *v, nn_planes n, float *work) {
    nn_op_batch_norm op;
    nn_channel_sums s;
    memset(&op, 0, sizeof op);
    memset(&s, 0, sizeof s);
    s.x = x;
    s.n = n;
    op.weight = v->weight;
    op.bias = v->bias;
    op.mean = v->mean;
    op.rstd = v->rstd;
    int result = v->moments == NN_MOMENTS_OF_BATCH ? nn_cuda_channel_sums(call, &s, work) : 0;
    if (v->moments != NN_MOMENTS_SAVED) {
        float *mean = work + nn_cuda_channel_floats(n) - 2 * n.channels;
        float *rstd = mean + n.channels;
        op.mean = mean;
        op.rstd = rstd;
        result = nn_first(
            result, nn_launch(call, nn_channel_grid(n), nn_k_channel_norm, s, *v, mean, rstd));
    }
    return nn_first(result,
                    nn_cuda_planes(call, op, nn_target_of(y, 0.0f), x, NULL, n, n.channels));
}

static int nn_cuda_batch_norm_backward(const ms_call *call, nn_target dx, nn_target dweight,
                                       nn_target dbias, const float *dy, const float *x,
                                       const nn_batch_norm_values *v, nn_planes n, float *work) {
    float *means = work + nn_cuda_channel_floats(n) - 2 * n.channels;
    nn_op_batch_norm_backward op;
    nn_channel_sums s;
    memset(&op, 0, sizeof op);
    memset(&s, 0, sizeof s);
    op.mean = v->mean;
    op.rstd = v->rstd;
    op.weight = v->weight;
    op.means = means;
    op.channels = n.channels;
    s.dy = dy;
    s.x = x;
    s.mean = v->mean;
    s.rstd = v->rstd;
    s.n = n;
    int result = nn_cuda_channel_sums(call, &s, work);
    result = nn_first(
        result, nn_launch(call, nn_channel_grid(n), nn_k_channel_fold, s, dbias, dweight, means));
    return nn_first(result, nn_cuda_planes(call, op, dx, dy, x, n, n.channels));
}

// ---- images: squares that slide over them

static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_max_pool(float *y, int32_t *places, const float *x, nn_window w) {
    const int64_t i = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    if (i >= w.images * w.channels * w.out_height * w.out_width) {
        return;
    }
    const int64_t line = i / w.out_width;
    const int64_t plane = line / w.out_height;
    const float *from = x + plane * (w.height * w.width);
    const int64_t place =
        nn_largest_place(from, &w, line - plane * w.out_height, i - line * w.out_width);
    y[i] = from[place];
    if (places != NULL) {
        places[i] = (int32_t)place;
    }
}

static int nn_cuda_max_pool(const ms_call *call, float *y, int32_t *places, const float *x,
                            const nn_window *w) {
    const int64_t count = w->images * w->channels * w->out_height * w->out_width;
    return nn_launch(call, nn_grid_of(nn_divide_up(count, NN_THREADS), 1, NN_THREADS),
                     nn_k_max_pool, y, places, x, *w);
}

/* dx (planes, height, width): every pixel gathers from the squares that cover it, of the rows
   `squares`. Visited are the rows begin ... end - 1 of each plane, of which those before fresh are
   added to in any case. */
typedef struct nn_gather {
    float *dx;
    int64_t planes, begin, end, fresh;
    nn_rows_of_squares squares;
    nn_window w;
    int64_t kernel_whole, kernel_rest;   // kernel / stride, kernel % stride
    int64_t padding_whole, padding_rest; // the same of padding: where pixel 0 stands
    bool adds, aligned;
} nn_gather;

/* The squares begin ... end - 1 that cover whole * stride + rest, counted from where the first one
   begins; there are count. */
__device__ __forceinline__ nn_span nn_d_covering(int64_t whole, int64_t rest, const nn_gather &g,
                                                 int64_t count) {
    nn_span span;
    span.end = nn_d_least(whole + 1, count);
    span.begin = whole + 1 - g.kernel_whole - (rest < g.kernel_rest ? 1 : 0);
    span.begin = span.begin < 0 ? 0 : span.begin;
    return span;
}

/* The same for a row of pixels, of the squares at hand. */
__device__ __forceinline__ nn_span nn_d_covering_row(int64_t y, const nn_gather &g) {
    const int64_t at = y + g.w.padding;
    const int64_t whole = at / g.w.stride;
    nn_span span = nn_d_covering(whole, at - whole * g.w.stride, g, g.w.out_height);
    span.end = nn_d_least(span.end, g.squares.begin + g.squares.count);
    span.begin = span.begin < g.squares.begin ? g.squares.begin : span.begin;
    return span;
}

/* A walk over pixels in their order, with the squares that cover each. */
struct nn_walk {
    int64_t plane, y, x, whole, rest; // x + padding is whole * stride + rest
    nn_span down;

    __device__ __forceinline__ nn_walk(int64_t first, const nn_gather &g) {
        const int64_t line = first / g.w.width;
        x = first - line * g.w.width;
        plane = line / (g.end - g.begin);
        y = g.begin + line - plane * (g.end - g.begin);
        whole = (x + g.w.padding) / g.w.stride;
        rest = x + g.w.padding - whole * g.w.stride;
        down = nn_d_covering_row(y, g);
    }

    /* On to the next pixel; true: it is the first of a plane. */
    __device__ __forceinline__ bool step(const nn_gather &g) {
        rest = rest + 1 == g.w.stride ? 0 : rest + 1;
        whole += rest == 0 ? 1 : 0;
        if (++x < g.w.width) {
            return false;
        }
        x = 0;
        whole = g.padding_whole;
        rest = g.padding_rest;
        const bool last = y + 1 == g.end;
        y = last ? g.begin : y + 1;
        plane += last ? 1 : 0;
        down = nn_d_covering_row(y, g);
        return last;
    }
};

/* Four pixels a thread. op is told the plane of the pixels that come next. */
template <typename F>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_gather(F op, nn_gather g) {
    const int64_t first = 4 * ((int64_t)blockIdx.x * NN_THREADS + threadIdx.x);
    const int64_t count = g.planes * (g.end - g.begin) * g.w.width;
    const bool wide = g.aligned && first + 4 <= count;
    float sum[4] = {0};
    float *to[4] = {NULL};
    if (first >= count) {
        return;
    }
    nn_walk walk(first, g);
    op.start(walk.plane);
    NN_UNROLL
    for (int k = 0; k < 4; k++) {
        if (first + k < count) {
            to[k] = g.dx + (walk.plane * g.w.height + walk.y) * g.w.width + walk.x;
            sum[k] = op(walk.y, walk.x, walk.down,
                        nn_d_covering(walk.whole, walk.rest, g, g.w.out_width));
            if (g.adds || walk.y < g.fresh) {
                sum[k] = nn_d_sum(*to[k], sum[k]);
            }
        }
        if (first + k + 1 < count && walk.step(g)) {
            op.start(walk.plane);
        }
    }
    if (wide) {
        nn_wide<4>::store(to[0], sum);
        return;
    }
    NN_UNROLL
    for (int k = 0; k < 4; k++) {
        if (first + k < count) {
            *to[k] = sum[k];
        }
    }
}

/* All pixels of all planes, from all squares. */
static nn_gather nn_gather_of(nn_target dx, int64_t planes, const nn_window *w) {
    nn_gather g;
    memset(&g, 0, sizeof g);
    g.dx = dx.data;
    g.planes = planes;
    g.end = w->height;
    g.squares.count = w->out_height;
    g.w = *w;
    g.kernel_whole = w->kernel / w->stride;
    g.kernel_rest = w->kernel % w->stride;
    g.padding_whole = w->padding / w->stride;
    g.padding_rest = w->padding % w->stride;
    g.adds = dx.beta != 0.0f;
    return g;
}

template <typename F> static int nn_cuda_gather(const ms_call *call, F op, nn_gather g) {
    const int64_t count = g.planes * (g.end - g.begin) * g.w.width;
    g.aligned = g.end - g.begin == g.w.height && nn_aligned(g.dx);
    return nn_launch(call, nn_grid_of(nn_divide_up(count, 4 * NN_THREADS), 1, NN_THREADS),
                     nn_k_gather<F>, op, g);
}

/* The slopes of the squares whose largest value stood in the pixel. */
struct nn_op_max_pool_backward {
    const float *dy;
    const int32_t *places;
    int64_t width, out_width, out_plane, begin;
    __device__ void start(int64_t plane) {
        begin = plane * out_plane;
    }
    __device__ float operator()(int64_t y, int64_t x, nn_span down, nn_span across) const {
        const int32_t place = (int32_t)(y * width + x);
        float sum = 0.0f;
        for (int64_t i = down.begin; i < down.end; i++) {
            for (int64_t k = across.begin; k < across.end; k++) {
                const int64_t at = begin + i * out_width + k;
                sum += places[at] == place ? dy[at] : 0.0f;
            }
        }
        return sum;
    }
};

static int nn_cuda_max_pool_backward(const ms_call *call, nn_target dx, const float *dy,
                                     const int32_t *places, const nn_window *w) {
    nn_op_max_pool_backward op;
    if (dx.data == NULL) {
        return 0;
    }
    op.dy = dy;
    op.places = places;
    op.width = w->width;
    op.out_width = w->out_width;
    op.out_plane = w->out_height * w->out_width;
    op.begin = 0;
    return nn_cuda_gather(call, op, nn_gather_of(dx, w->images * w->channels, w));
}

// ---- images: convolution

/* What is worked on at once: whole images, or some rows of squares of one image. */
typedef struct nn_part {
    int64_t image, images;
    nn_rows_of_squares rows;
} nn_part;

typedef struct nn_parts {
    int64_t images, rows; // in each but the last
    int64_t bands;        // parts of an image
    int64_t count;        // of all parts
} nn_parts;

/* Parts of so many squares at most, or of one row of them. */
static nn_parts nn_parts_of(const nn_window *w, int64_t squares) {
    nn_parts parts;
    parts.images = nn_most(1, nn_least(w->images, squares / nn_window_places(w)));
    parts.rows = nn_most(1, nn_least(w->out_height, squares / w->out_width));
    const int64_t groups = nn_divide_up(w->images, parts.images);
    parts.images = nn_divide_up(w->images, groups);
    parts.rows = nn_divide_up(w->out_height, nn_divide_up(w->out_height, parts.rows));
    parts.bands = nn_divide_up(w->out_height, parts.rows);
    parts.count = nn_divide_up(w->images, parts.images) * parts.bands;
    return parts;
}

static nn_part nn_part_at(const nn_parts *parts, int64_t index, const nn_window *w) {
    nn_part part;
    part.image = index / parts->bands * parts->images;
    part.images = nn_least(parts->images, w->images - part.image);
    part.rows.begin = index % parts->bands * parts->rows;
    part.rows.count = nn_least(parts->rows, w->out_height - part.rows.begin);
    return part;
}

/* Squares of a part, in each of its images. */
static int64_t nn_part_places(const nn_part *part, const nn_window *w) {
    return part->rows.count * w->out_width;
}

/* Columns of forward, or their gradients. */
static nn_parts nn_cuda_column_parts(const nn_window *w, int64_t out) {
    const int64_t squares = nn_cuda_conv2d_limit(w, out) / nn_window_depth(w);
    return nn_parts_of(w, nn_is_pointwise(w) ? w->images * nn_window_places(w) : squares);
}

/* Where nn_k_columns writes: element (i, j) of square p of channel c of the part's image number g
   to columns[g * image_step + ((c * kernel + i) * kernel + j) * row_step + p]. The squares count
   on over the images, and behind the last of them, up to `squares`, are zeros. */
typedef struct nn_columns {
    float *columns;
    const float *x; // the part's first image
    nn_window w;
    nn_part part;
    int64_t squares, image_step, row_step;
} nn_columns;

/* A thread takes one square of one channel; its neighbours in the warp take the next squares. */
static __global__ void __launch_bounds__(NN_THREADS) nn_k_columns(nn_columns n) {
    const int64_t index = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    const int64_t channel = index / n.squares;
    if (channel >= n.w.channels) {
        return;
    }
    const int64_t square = index - channel * n.squares;
    const int64_t places = n.part.rows.count * n.w.out_width;
    const int64_t image = square / places;
    const int64_t place = square - image * places;
    const int64_t line = place / n.w.out_width;
    const int64_t top = (n.part.rows.begin + line) * n.w.stride - n.w.padding;
    const int64_t left = (place - line * n.w.out_width) * n.w.stride - n.w.padding;
    const int64_t plane = (image * n.w.channels + channel) * n.w.height;
    float *to =
        n.columns + image * n.image_step + channel * n.w.kernel * n.w.kernel * n.row_step + place;
    for (int64_t y = top; y < top + n.w.kernel; y++) {
        const bool inside = image < n.part.images && y >= 0 && y < n.w.height;
        const int64_t begin = (plane + y) * n.w.width;
        NN_UNROLL_FOUR
        for (int64_t x = left; x < left + n.w.kernel; x++) {
            *to = inside && x >= 0 && x < n.w.width ? __ldg(n.x + (begin + x)) : 0.0f;
            to += n.row_step;
        }
    }
}

static int nn_cuda_columns(const ms_call *call, nn_columns n) {
    return nn_launch(call,
                     nn_grid_of(nn_divide_up(n.w.channels * n.squares, NN_THREADS), 1, NN_THREADS),
                     nn_k_columns, n);
}

static nn_columns nn_columns_in(float *work, const float *x, const nn_part *part,
                                const nn_window *w) {
    nn_columns n;
    n.columns = work;
    n.x = x + part->image * (w->channels * w->height * w->width);
    n.w = *w;
    n.part = *part;
    n.squares = part->images * nn_part_places(part, w);
    n.row_step = nn_part_places(part, w);
    n.image_step = nn_window_depth(w) * n.row_step;
    return n;
}

/* The part's squares of planes (images, count, places). */
static ms_matrix nn_part_squares(const float *planes, int64_t count, const nn_part *part,
                                 const nn_window *w) {
    const int64_t image = count * nn_window_places(w);
    ms_matrix m = nn_squares(planes + part->image * image, count, part->rows, w);
    m.count = part->images;
    m.step = image;
    return m;
}

/* The part's columns (images, depth, places), made in work or where they stand. */
static ms_matrix nn_part_columns(const float *work, const float *x, const nn_part *part,
                                 const nn_window *w) {
    const int64_t depth = nn_window_depth(w);
    const int64_t places = nn_part_places(part, w);
    if (nn_is_pointwise(w)) {
        return nn_part_squares(x, w->channels, part, w);
    }
    ms_matrix m = nn_matrix(work, depth, places, places);
    m.count = part->images;
    m.step = depth * places;
    return m;
}

/* a is a product. */
struct nn_op_channel_bias {
    const float *bias;
    float shift;
    __device__ void start(int64_t channel) {
        shift = bias[channel];
    }
    __device__ float operator()(float a, float b) const {
        (void)b;
        return nn_d_sum(a, shift);
    }
};

static int nn_cuda_conv2d(const ms_call *call, float *y, const float *x, const float *weight,
                          const float *bias, int64_t out, const nn_window *w, float *work) {
    const nn_parts parts = nn_cuda_column_parts(w, out);
    const int64_t depth = nn_window_depth(w);
    const nn_planes planes = {w->images, out, nn_window_places(w)};
    nn_op_channel_bias op;
    int result = 0;
    for (int64_t i = 0; i < parts.count && result == 0; i++) {
        const nn_part part = nn_part_at(&parts, i, w);
        if (!nn_is_pointwise(w)) {
            result = nn_cuda_columns(call, nn_columns_in(work, x, &part, w));
        }
        if (result == 0) {
            result = (int)ms_gemm(call, 1.0f, nn_matrix(weight, out, depth, depth),
                                  nn_part_columns(work, x, &part, w), 0.0f,
                                  nn_part_squares(y, out, &part, w));
        }
    }
    if (result != 0 || bias == NULL) {
        return result;
    }
    op.bias = bias;
    op.shift = 0.0f;
    return nn_cuda_planes(call, op, nn_target_of(y, 0.0f), y, NULL, planes, out);
}

/* A pixel's places in the columns (images, depth, places) of a part. */
struct nn_op_columns_backward {
    const float *columns, *channel;
    int64_t channels, kernel, stride, padding;
    int64_t out_width, row_begin, row_step, image_step;
    __device__ void start(int64_t plane) {
        const int64_t image = plane / channels;
        channel =
            columns + image * image_step + (plane - image * channels) * kernel * kernel * row_step;
    }
    __device__ float operator()(int64_t y, int64_t x, nn_span down, nn_span across) const {
        float sum = 0.0f;
        for (int64_t i = down.begin; i < down.end; i++) {
            const int64_t row = (y + padding - i * stride) * kernel + x + padding;
            const float *from = channel + (i - row_begin) * out_width;
            for (int64_t k = across.begin; k < across.end; k++) {
                sum += from[(row - k * stride) * row_step + k];
            }
        }
        return sum;
    }
};

/* Where the squares of row `row` begin among the rows of pixels, and `beyond` rows more; 0 for the
   first. */
static int64_t nn_row_behind(int64_t row, int64_t beyond, const nn_window *w) {
    const int64_t y = row * w->stride - w->padding + beyond;
    return row == 0 ? 0 : nn_least(nn_most(y, 0), w->height);
}

/* dx gets the columns' gradients, in work, of a part. Rows of pixels that two parts cover are added
   to by the second; those between the squares belong to the part before them. */
static int nn_cuda_columns_backward(const ms_call *call, nn_target dx, const float *work,
                                    const nn_part *part, const nn_window *w) {
    const int64_t end = part->rows.begin + part->rows.count;
    const int64_t beyond = nn_most(w->kernel - w->stride, 0);
    const int64_t image = w->channels * w->height * w->width;
    nn_gather g = nn_gather_of(dx, part->images * w->channels, w);
    nn_op_columns_backward op;
    g.dx = dx.data + part->image * image;
    g.squares = part->rows;
    g.begin = nn_row_behind(part->rows.begin, 0, w);
    g.fresh = nn_row_behind(part->rows.begin, beyond, w);
    g.end = end == w->out_height ? w->height : nn_row_behind(end, beyond, w);
    op.columns = work;
    op.channel = work;
    op.channels = w->channels;
    op.kernel = w->kernel;
    op.stride = w->stride;
    op.padding = w->padding;
    op.out_width = w->out_width;
    op.row_begin = part->rows.begin;
    op.row_step = nn_part_places(part, w);
    op.image_step = nn_window_depth(w) * op.row_step;
    return nn_cuda_gather(call, op, g);
}

/* dx = transpose(weight) * dy, folded back. */
static int nn_cuda_conv2d_images(const ms_call *call, nn_target dx, const float *dy,
                                 const float *weight, int64_t out, const nn_window *w,
                                 float *work) {
    const nn_parts parts = nn_cuda_column_parts(w, out);
    const int64_t depth = nn_window_depth(w);
    const bool direct = nn_is_pointwise(w);
    int result = 0;
    for (int64_t i = 0; i < parts.count && result == 0; i++) {
        const nn_part part = nn_part_at(&parts, i, w);
        result = (int)ms_gemm(call, 1.0f, ms_transpose(nn_matrix(weight, out, depth, depth)),
                              nn_part_squares(dy, out, &part, w), direct ? dx.beta : 0.0f,
                              nn_part_columns(work, dx.data, &part, w));
        if (result == 0 && !direct) {
            result = nn_cuda_columns_backward(call, dx, work, &part, w);
        }
    }
    return result;
}

/* target gets the sum of the products a * b of all a.count pairs, which go to partial first where
   they are several. */
static int nn_cuda_sum_of_products(const ms_call *call, nn_target target, ms_matrix a, ms_matrix b,
                                   float *partial) {
    const bool single = a.count == 1;
    const int64_t cols = b.transposed ? b.rows : b.cols;
    ms_matrix c = nn_matrix(single ? target.data : partial, a.rows, cols, cols);
    c.count = a.count;
    c.step = a.rows * cols;
    const int result = (int)ms_gemm(call, 1.0f, a, b, single ? target.beta : 0.0f, c);
    if (result != 0 || single) {
        return result;
    }
    return nn_launch(call, nn_grid_of(nn_divide_up(c.step, NN_THREADS), 1, NN_THREADS), nn_k_fold,
                     target.data, (const float *)partial, c.count, c.step, target.beta != 0.0f);
}

/* Segments of so many squares: few enough that their products take no more than what they are made
   from, and enough to keep a GPU busy. */
typedef struct nn_segments {
    int64_t count, size, squares; // squares: count * size
} nn_segments;

static nn_segments nn_segments_of(int64_t squares, int64_t out, int64_t depth) {
    nn_segments s;
    const int64_t tiles = nn_divide_up(out, NN_TILE) * nn_divide_up(depth, NN_TILE);
    s.count = nn_least(NN_BUSY_TILES / tiles, squares / NN_SEGMENT);
    s.count = nn_most(1, nn_least(s.count, squares * (out + depth) / (out * depth)));
    s.size = nn_divide_up(nn_divide_up(squares, s.count), 4) * 4;
    s.count = nn_divide_up(squares, s.size);
    s.squares = s.count * s.size;
    return s;
}

static nn_parts nn_cuda_segment_parts(const nn_window *w, int64_t out) {
    const int64_t most = nn_cuda_conv2d_limit(w, out) / (2 * (nn_window_depth(w) + out)) - 4;
    return nn_parts_of(w, nn_most(0, most - most / (NN_SEGMENT / 4)));
}

/* dweight, image by image. */
static int nn_cuda_weight_of_images(const ms_call *call, nn_target dweight, const float *dy,
                                    const float *x, int64_t out, const nn_window *w, float *work) {
    const int64_t most = nn_cuda_conv2d_limit(w, out) / (out * w->channels);
    const nn_parts parts = nn_parts_of(w, nn_most(1, most) * nn_window_places(w));
    int result = 0;
    for (int64_t i = 0; i < parts.count && result == 0; i++) {
        const nn_part part = nn_part_at(&parts, i, w);
        result =
            nn_cuda_sum_of_products(call, nn_target_of(dweight.data, i == 0 ? dweight.beta : 1.0f),
                                    nn_part_squares(dy, out, &part, w),
                                    ms_transpose(nn_part_squares(x, w->channels, &part, w)), work);
    }
    return result;
}

/* The part's squares of x, side by side (depth, squares), cut into segments. */
static int nn_cuda_segments(const ms_call *call, ms_matrix *m, float *work, const float *x,
                            const nn_part *part, const nn_window *w, nn_segments s) {
    nn_columns n = nn_columns_in(work, x, part, w);
    n.squares = s.squares;
    n.row_step = s.squares;
    n.image_step = nn_part_places(part, w);
    *m = nn_matrix(work, nn_window_depth(w), s.size, s.squares);
    m->count = s.count;
    m->step = s.size;
    return nn_cuda_columns(call, n);
}

/* dweight, segment by segment. The squares of dy are columns too, of a kernel of one. */
static int nn_cuda_weight_of_segments(const ms_call *call, nn_target dweight, const float *dy,
                                      const float *x, int64_t out, const nn_window *w,
                                      float *work) {
    const nn_parts parts = nn_cuda_segment_parts(w, out);
    const int64_t depth = nn_window_depth(w);
    const nn_window slopes =
        nn_window_of(ms_shape4(w->images, out, w->out_height, w->out_width), 1, 1, 0);
    int result = 0;
    for (int64_t i = 0; i < parts.count && result == 0; i++) {
        const nn_part part = nn_part_at(&parts, i, w);
        const nn_segments s = nn_segments_of(part.images * nn_part_places(&part, w), out, depth);
        float *own = work + depth * s.squares;
        ms_matrix a;
        ms_matrix b;
        result = nn_first(nn_cuda_segments(call, &b, work, x, &part, w, s),
                          nn_cuda_segments(call, &a, own, dy, &part, &slopes, s));
        if (result == 0) {
            result = nn_cuda_sum_of_products(
                call, nn_target_of(dweight.data, i == 0 ? dweight.beta : 1.0f), a, ms_transpose(b),
                own + out * s.squares);
        }
    }
    return result;
}

/* All images are read before the gradient of one is written, so dx may be x. */
static int nn_cuda_conv2d_backward(const ms_call *call, nn_target dx, nn_target dweight,
                                   nn_target dbias, const float *dy, const float *x,
                                   const float *weight, int64_t out, const nn_window *w,
                                   float *work) {
    const nn_planes slopes = {w->images, out, nn_window_places(w)};
    int result = nn_cuda_channel_bias(call, dbias, dy, slopes, work);
    if (result == 0 && dweight.data != NULL) {
        result = nn_cuda_sums_images(w, out)
                     ? nn_cuda_weight_of_images(call, dweight, dy, x, out, w, work)
                     : nn_cuda_weight_of_segments(call, dweight, dy, x, out, w, work);
    }
    if (result == 0 && dx.data != NULL) {
        result = nn_cuda_conv2d_images(call, dx, dy, weight, out, w, work);
    }
    return result;
}

const nn_device *nn_cuda(void) {
    static const nn_device cuda = {
        "cuda",
        false,
        nn_cuda_column_floats,
        nn_cuda_layernorm_floats,
        nn_cuda_attention_floats,
        nn_cuda_conv2d_floats,
        nn_cuda_channel_floats,
        nn_cuda_pass,
        nn_cuda_add,
        nn_cuda_dropout,
        nn_cuda_gelu,
        nn_cuda_gelu_backward,
        nn_cuda_embedding,
        nn_cuda_embedding_backward,
        nn_cuda_linear,
        nn_cuda_linear_gelu,
        nn_cuda_linear_add,
        nn_cuda_linear_backward,
        nn_cuda_layernorm,
        nn_cuda_layernorm_backward,
        nn_cuda_attention,
        nn_cuda_attention_backward,
        nn_cuda_cross_entropy,
        nn_cuda_cross_entropy_backward,
        nn_cuda_relu,
        nn_cuda_relu_backward,
        nn_cuda_conv2d,
        nn_cuda_conv2d_backward,
        nn_cuda_max_pool,
        nn_cuda_max_pool_backward,
        nn_cuda_batch_norm,
        nn_cuda_batch_norm_backward,
        nn_cuda_average,
        nn_cuda_average_backward,
    };
    return &cuda;
}

#endif // NN_CUDA_IMPLEMENTATION

#endif // MEMSCALE_NN_H
