/*  nn.h - the layers of transformers for memscale.h, on the CPU: GPT-2 and BERT of any size.

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

    LAYERS. A layer function registers the layer and its params and returns its output, so that
    calls chain. Where memscale.h lets a mistake stick, nn.h does too: an impossible size or a
    lack of memory returns the handle 0 and comes back as the error of ms_wrap.

    LETTERS. B batch, T sequence, C channels, V vocabulary, H heads, rows = B * T. All shapes are
    row-major; a weight is (out, in).

    NUMERICS. float32. No sum depends on the number of threads: sums over rows (gradients of bias,
    weight of a normalization, embedding) are parallel over columns, each column in the order of
    its rows. A block layer runs the same kernels as the operator layers, so without dropout both
    granularities give the same bits. Dropout stands on the embedding and on the two branches of
    each block; attention probabilities have none.
*/
#ifndef MEMSCALE_NN_H
#define MEMSCALE_NN_H

#include "memscale.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define NN_API static __attribute__((unused))
#else
#define NN_API static
#endif

// ------------------------------------------------------------------------------------------------
// >>nn public

/* The params of a net with their initial distributions, and the options of its layers. */
typedef struct nn_net nn_net;

typedef enum nn_init_kind { NN_INIT_ZEROS, NN_INIT_ONES, NN_INIT_NORMAL } nn_init_kind;

/* A param as it was registered; deviation is that of NN_INIT_NORMAL. */
typedef struct nn_param_info {
    char name[64]; // such as "h0.qkv.weight"
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
    int64_t context; // rows of the position table; at least sequence
    int64_t layers, heads, channels;
    int64_t batch, sequence;
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

/* What callbacks of this file return beside the results of ms_gemm. */
enum { NN_ERROR_INDEX = 1001 /* a token or target is outside its table */ };

/* Makes a net for model; NULL: no memory. */
NN_API nn_net *nn_create(ms_model *model);

/* Frees the net; call it after ms_destroy, since the layers use its options. NULL is fine. */
NN_API void nn_destroy(nn_net *net);

/* Writes initial values into all params, the same for the same seed on any number of threads.
   Errors: OUT_OF_MEMORY, and those of ms_write. */
NN_API ms_result nn_init(nn_net *net, uint64_t seed);

/* The params in the order of their registration, and one by name (NULL: there is none). */
NN_API int64_t nn_param_count(const nn_net *net);
NN_API const nn_param_info *nn_param_at(const nn_net *net, int64_t index);
NN_API const nn_param_info *nn_find_param(const nn_net *net, const char *name);

/* ms_param, with the initial distribution noted in the net. A param of rank 1 (bias, weight of a
   normalization) has no weight decay. */
NN_API ms_tensor nn_param(nn_net *net, const char *name, ms_shape shape, nn_init_kind init,
                          float deviation);

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
   again, 64 rows at a time. Vaswani et al., "Attention Is All You Need", 2017, equation 1. */
NN_API ms_tensor nn_attention(nn_net *net, const char *name, ms_tensor qkv, int64_t heads,
                              bool causal, bool save_scores);

/* Loss per row, in the shape of targets: log(sum(exp(logits))) - logits[target]. A row whose
   target is below 0 is ignored: loss 0, gradient 0. logits (rows, V), targets I32 (rows). Backward
   may overwrite the logits with their gradient, softmax(logits) - onehot(target). */
NN_API ms_tensor nn_cross_entropy(nn_net *net, const char *name, ms_tensor logits,
                                  ms_tensor targets);

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
#elif defined(__GNUC__) && !defined(__clang__)
#define NN_PARALLEL(work)
#define NN_SIMD _Pragma("GCC ivdep")
#else
#define NN_PARALLEL(work)
#define NN_SIMD
#endif

enum {
    NN_WORTH = 16384,  // elements that are worth a second thread
    NN_CHUNK = 4096,   // elements that one thread takes at a time
    NN_COLUMNS = 64,   // columns summed together
    NN_LANES = 16,     // partial sums
    NN_QUERIES = 64,   // rows of the attention matrix that are in memory at once
    NN_HEAD_SLOTS = 16 // heads of attention that may run at once
};

/* Where a gradient goes: data = beta * data + contribution; data NULL: nobody wants it. */
typedef struct nn_target {
    float *data;
    float beta;
} nn_target;

NN_API int64_t nn_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

NN_API nn_target nn_target_of(float *data, float beta) {
    nn_target target;
    target.data = data;
    target.beta = beta;
    return target;
}

NN_API float nn_lanes_sum(const float *lane) {
    float half[NN_LANES / 2];
    for (int i = 0; i < NN_LANES / 2; i++) {
        half[i] = lane[i] + lane[i + NN_LANES / 2];
    }
    return ((half[0] + half[4]) + (half[1] + half[5])) +
           ((half[2] + half[6]) + (half[3] + half[7]));
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
NN_API inline float nn_exp(float x) {
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
NN_API inline float nn_gelu_tanh_share(float x) {
    return 1.0f / (1.0f + nn_exp(-1.59576912f * (x + 0.044715f * x * x * x)));
}

NN_API inline float nn_gelu_tanh_value(float x) {
    return x * nn_gelu_tanh_share(x);
}

NN_API inline float nn_gelu_tanh_slope(float x) {
    const float s = nn_gelu_tanh_share(x);
    return s + x * s * (1.0f - s) * (1.59576912f + 0.21406445f * x * x);
}

/* The normal distribution function. For a = |x| and t = 1 / (1 + 0.35 a), its value at -a over
   t exp(-a^2 / 2) is smooth on all of 0 < t <= 1: a polynomial fitted at Chebyshev nodes, relative
   error 4e-8. bell is exp(-x^2 / 2). */
NN_API inline float nn_normal(float x, float bell) {
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

NN_API inline float nn_gelu_erf_value(float x) {
    return x * nn_normal(x, nn_exp(-0.5f * x * x));
}

NN_API inline float nn_gelu_erf_slope(float x) {
    const float bell = nn_exp(-0.5f * x * x);
    return nn_normal(x, bell) + x * bell * 0.398942280f;
}

/* Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014: the 64-bit finalizer. */
NN_API inline uint64_t nn_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* 32 random bits for a counter under a key: two rounds of multiply and shift, in 32-bit
   arithmetic, which vectors have. */
NN_API inline uint32_t nn_random(uint64_t key, uint32_t counter) {
    uint32_t x = counter * 0x9e3779b9u + (uint32_t)key;
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x ^= (uint32_t)(key >> 32);
    x = (x ^ (x >> 15)) * 0x735a2d97u;
    return x ^ (x >> 15);
}

// ------------------------------------------------------------------------------------------------
// >>nn kernels  raw pointers and sizes; count is in elements

/* y = a + b; y may be a or b. */
NN_API void nn_add_kernel(float *y, const float *a, const float *b, int64_t count) {
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t end = nn_least(begin + NN_CHUNK, count);
        NN_SIMD
        for (int64_t i = begin; i < end; i++) {
            y[i] = a[i] + b[i];
        }
    }
}

/* Passes a gradient on: y = x or y += x; nothing to do where y is x. */
NN_API void nn_pass_kernel(nn_target y, const float *x, int64_t count) {
    if (y.data == NULL || (y.data == x && y.beta == 0.0f)) {
        return;
    }
    if (y.beta == 0.0f) {
        memcpy(y.data, x, (size_t)count * sizeof *x);
    } else {
        nn_add_kernel(y.data, y.data, x, count);
    }
}

/* y = mask * x / (1 - probability), or y += that; y may be x. */
NN_API void nn_dropout_kernel(nn_target y, const float *x, int64_t count, float probability,
                              uint64_t seed) {
    if (y.data == NULL) {
        return;
    }
    float *out = y.data;
    const bool adds = y.beta != 0.0f;
    const float scale = 1.0f / (1.0f - probability);
    const uint32_t threshold = (uint32_t)((double)probability * 4294967296.0);
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int32_t size = (int32_t)nn_least(NN_CHUNK, count - begin);
        const uint64_t key = nn_mix(seed ^ nn_mix((uint64_t)begin));
        const float *from = x + begin;
        float *to = out + begin;
        NN_SIMD
        for (int32_t i = 0; i < size; i++) {
            const float kept = nn_random(key, (uint32_t)i) >= threshold ? from[i] * scale : 0.0f;
            to[i] = adds ? to[i] + kept : kept;
        }
    }
}

/* y = gelu(x); y may be x. */
NN_API void nn_gelu_kernel(float *y, const float *x, int64_t count, bool erf_form) {
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
}

/* dx = gelu'(x) * dy, or dx += that; dx may be x or dy. */
NN_API void nn_gelu_backward_kernel(nn_target dx, const float *dy, const float *x, int64_t count,
                                    bool erf_form) {
    if (dx.data == NULL) {
        return;
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

/* y (rows, channels): the sum of the rows that the lookups name. */
NN_API void nn_embedding_kernel(float *y, const nn_lookup *lookups, int lookup_count, int64_t rows,
                                int64_t channels) {
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
}

/* dtable (entries, channels) gets the rows of dy (rows, channels) that took each entry. */
NN_API void nn_embedding_backward_kernel(nn_target dtable, const nn_lookup *lookup, const float *dy,
                                         int64_t rows, int64_t channels) {
    if (dtable.data == NULL) {
        return;
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

/* x, y (rows, width); mean, rstd (rows); y may be x. */
NN_API void nn_layernorm_kernel(float *y, float *mean, float *rstd, const float *x,
                                const float *weight, const float *bias, int64_t rows, int64_t width,
                                float epsilon) {
    NN_PARALLEL(rows * width)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * width;
        float *to = y + r * width;
        const float m = nn_sum(from, width) / (float)width;
        float squares;
        NN_SUM(squares, i, width, (from[i] - m) * (from[i] - m));
        const float s = 1.0f / sqrtf(squares / (float)width + epsilon);
        NN_SIMD
        for (int64_t i = 0; i < width; i++) {
            to[i] = (from[i] - m) * s * weight[i] + bias[i];
        }
        mean[r] = m;
        rstd[r] = s;
    }
}

/* Gradients of weight and bias (width each), from x, dy (rows, width). */
NN_API void nn_layernorm_param_kernel(nn_target dweight, nn_target dbias, const float *dy,
                                      const float *x, const float *mean, const float *rstd,
                                      int64_t rows, int64_t width) {
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

/* Gradient of x (rows, width); dx may be dy or x. */
NN_API void nn_layernorm_backward_kernel(nn_target dx, const float *dy, const float *x,
                                         const float *mean, const float *rstd, const float *weight,
                                         int64_t rows, int64_t width) {
    if (dx.data == NULL) {
        return;
    }
    float *out = dx.data;
    const bool adds = dx.beta != 0.0f;
    NN_PARALLEL(rows * width)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * width;
        const float *slope = dy + r * width;
        float *to = out + r * width;
        const float m = mean[r];
        const float s = rstd[r];
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
NN_API void nn_cross_entropy_kernel(float *losses, float *stats, const float *logits,
                                    const int32_t *targets, int64_t rows, int64_t classes) {
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
}

/* dlogits (rows, classes) from dlosses (rows); dlogits may be logits. */
NN_API void nn_cross_entropy_backward_kernel(nn_target dlogits, const float *dlosses,
                                             const float *stats, const float *logits,
                                             const int32_t *targets, int64_t rows,
                                             int64_t classes) {
    if (dlogits.data == NULL) {
        return;
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

/* dx = dy * weight, dweight = transpose(dy) * x, dbias = column sums of dy. */
NN_API int nn_linear_backward_kernel(const ms_call *call, nn_target dx, nn_target dweight,
                                     nn_target dbias, const float *dy, const float *x,
                                     const float *weight, nn_linear_size n) {
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

NN_API uint64_t nn_attention_workspace(nn_attention_size n, bool backward) {
    const int64_t floats = nn_attention_slots(n) * nn_attention_slot_floats(n, backward);
    return (uint64_t)floats * sizeof(float);
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
    int64_t heads;
    float dropout, epsilon;
    uint32_t flags;
} nn_options;

struct nn_net {
    ms_model *model;
    nn_options *options;
    nn_param_info *params;
    int64_t param_count, param_capacity;
};

typedef struct nn_name {
    char text[64];
} nn_name;

NN_API nn_name nn_join(const char *prefix, const char *suffix) {
    nn_name name;
    snprintf(name.text, sizeof name.text, "%.46s.%.16s", prefix, suffix); // long names are cut
    return name;
}

NN_API nn_net *nn_create(ms_model *model) {
    nn_net *net = (nn_net *)calloc(1, sizeof *net);
    if (net != NULL) {
        net->model = model;
    }
    return net;
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
    free(net->params);
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

NN_API nn_options *nn_options_of(nn_net *net, int64_t heads, float dropout, float epsilon,
                                 uint32_t flags) {
    for (nn_options *o = net->options; o != NULL; o = o->next) {
        if (o->heads == heads && o->flags == flags && !(o->dropout < dropout) &&
            !(o->dropout > dropout) && !(o->epsilon < epsilon) && !(o->epsilon > epsilon)) {
            return o;
        }
    }
    nn_options *made = (nn_options *)calloc(1, sizeof *made);
    if (made == NULL) {
        nn_refuse(net, "nn: no memory for options");
        return NULL;
    }
    made->heads = heads;
    made->dropout = dropout;
    made->epsilon = epsilon;
    made->flags = flags;
    made->next = net->options;
    net->options = made;
    return made;
}

NN_API ms_tensor nn_param(nn_net *net, const char *name, ms_shape shape, nn_init_kind init,
                          float deviation) {
    void *array = net->params;
    const bool room =
        nn_reserve(&array, sizeof *net->params, net->param_count, &net->param_capacity);
    net->params = (nn_param_info *)array;
    if (!room) {
        return nn_refuse(net, "nn: no memory for a param");
    }
    nn_param_info *info = &net->params[net->param_count++];
    snprintf(info->name, sizeof info->name, "%s", name);
    info->tensor = ms_param(net->model, name, MS_DTYPE_F32, shape);
    info->shape = shape;
    info->init = init;
    info->deviation = deviation;
    if (shape.rank == 1 && info->tensor.id != 0) {
        ms_set_weight_decay(net->model, info->tensor, 0.0f);
    }
    return info->tensor;
}

NN_API int64_t nn_param_count(const nn_net *net) {
    return net->param_count;
}

NN_API const nn_param_info *nn_param_at(const nn_net *net, int64_t index) {
    return index >= 0 && index < net->param_count ? &net->params[index] : NULL;
}

NN_API const nn_param_info *nn_find_param(const nn_net *net, const char *name) {
    for (int64_t i = 0; i < net->param_count; i++) {
        if (strcmp(net->params[i].name, name) == 0) {
            return &net->params[i];
        }
    }
    return NULL;
}

/* Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958: two a time. */
NN_API void nn_normal_kernel(float *values, int64_t count, float deviation, uint64_t seed) {
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        const uint64_t key = nn_mix(seed ^ nn_mix((uint64_t)begin));
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

NN_API void nn_constant_kernel(float *values, int64_t count, float constant) {
    for (int64_t i = 0; i < count; i++) {
        values[i] = constant;
    }
}

NN_API ms_result nn_init(nn_net *net, uint64_t seed) {
    uint64_t largest = 1;
    for (int64_t i = 0; i < net->param_count; i++) {
        const uint64_t count = ms_shape_count(&net->params[i].shape);
        largest = count > largest ? count : largest;
    }
    if (largest > SIZE_MAX / sizeof(float)) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    float *values = (float *)malloc((size_t)largest * sizeof *values);
    if (values == NULL) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    ms_result result = MS_RESULT_OK;
    for (int64_t i = 0; i < net->param_count && result == MS_RESULT_OK; i++) {
        const nn_param_info *info = &net->params[i];
        const int64_t count = (int64_t)ms_shape_count(&info->shape);
        if (info->init == NN_INIT_NORMAL) {
            nn_normal_kernel(values, count, info->deviation, nn_mix(seed ^ nn_mix((uint64_t)i)));
        } else {
            nn_constant_kernel(values, count, info->init == NN_INIT_ONES ? 1.0f : 0.0f);
        }
        result = ms_write(net->model, info->tensor, values);
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
    const int64_t rows = nn_count(&call->in[0]);
    for (int i = 0; i < 3; i++) {
        if (lookups[i].index != NULL &&
            nn_index_check(lookups[i].index, rows, lookups[i].entries, false) != 0) {
            return NN_ERROR_INDEX;
        }
    }
    nn_embedding_kernel(nn_floats(&call->out[0]), lookups, 3, rows, nn_last(call->out[0].shape));
    return 0;
}

NN_API int nn_embedding_backward(const ms_call *call) {
    nn_lookup lookups[3];
    nn_lookups_of(call, lookups);
    for (int i = 0; i < 3; i++) {
        if (lookups[i].entries != 0) {
            nn_embedding_backward_kernel(nn_gradient_of(&call->grad_param[i]), &lookups[i],
                                         nn_floats(&call->grad_out[0]), nn_count(&call->in[0]),
                                         nn_last(call->grad_out[0].shape));
        }
    }
    return 0;
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
    return nn_linear_kernel(call, nn_floats(&call->out[0]), nn_floats(&call->in[0]),
                            nn_floats(&call->param[0]), biased ? nn_floats(&call->param[1]) : NULL,
                            nn_linear_size_of(call));
}

NN_API int nn_linear_backward(const ms_call *call) {
    const bool biased = (nn_options_in(call)->flags & NN_BIAS) != 0;
    return nn_linear_backward_kernel(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]),
        biased ? nn_gradient_of(&call->grad_param[1]) : nn_target_of(NULL, 0.0f),
        nn_floats(&call->grad_out[0]), nn_floats(&call->in[0]), nn_floats(&call->param[0]),
        nn_linear_size_of(call));
}

NN_API int nn_layernorm_forward(const ms_call *call) {
    nn_layernorm_kernel(
        nn_floats(&call->out[0]), nn_floats(&call->saved[0]), nn_floats(&call->saved[1]),
        nn_floats(&call->in[0]), nn_floats(&call->param[0]), nn_floats(&call->param[1]),
        nn_rows(call->in[0].shape), nn_last(call->in[0].shape), nn_options_in(call)->epsilon);
    return 0;
}

/* The gradient of the input comes last, for it may overwrite what those of the params read. */
NN_API int nn_layernorm_backward(const ms_call *call) {
    const float *dy = nn_floats(&call->grad_out[0]);
    const float *x = nn_floats(&call->in[0]);
    const float *mean = nn_floats(&call->saved[0]);
    const float *rstd = nn_floats(&call->saved[1]);
    const int64_t rows = nn_rows(call->in[0].shape);
    const int64_t width = nn_last(call->in[0].shape);
    nn_layernorm_param_kernel(nn_gradient_of(&call->grad_param[0]),
                              nn_gradient_of(&call->grad_param[1]), dy, x, mean, rstd, rows, width);
    nn_layernorm_backward_kernel(nn_gradient_of(&call->grad_in[0]), dy, x, mean, rstd,
                                 nn_floats(&call->param[0]), rows, width);
    return 0;
}

NN_API int nn_gelu_forward(const ms_call *call) {
    nn_gelu_kernel(nn_floats(&call->out[0]), nn_floats(&call->in[0]), nn_count(&call->in[0]),
                   (nn_options_in(call)->flags & NN_ERF) != 0);
    return 0;
}

NN_API int nn_gelu_backward(const ms_call *call) {
    nn_gelu_backward_kernel(nn_gradient_of(&call->grad_in[0]), nn_floats(&call->grad_out[0]),
                            nn_floats(&call->in[0]), nn_count(&call->in[0]),
                            (nn_options_in(call)->flags & NN_ERF) != 0);
    return 0;
}

NN_API int nn_add_forward(const ms_call *call) {
    nn_add_kernel(nn_floats(&call->out[0]), nn_floats(&call->in[0]), nn_floats(&call->in[1]),
                  nn_count(&call->out[0]));
    return 0;
}

NN_API int nn_add_backward(const ms_call *call) {
    for (int i = 0; i < 2; i++) {
        nn_pass_kernel(nn_gradient_of(&call->grad_in[i]), nn_floats(&call->grad_out[0]),
                       nn_count(&call->grad_out[0]));
    }
    return 0;
}

NN_API int nn_dropout_forward(const ms_call *call) {
    const nn_target out = nn_target_of(nn_floats(&call->out[0]), 0.0f);
    const float *x = nn_floats(&call->in[0]);
    if (call->phase == MS_PHASE_EVAL) {
        nn_pass_kernel(out, x, nn_count(&call->in[0]));
    } else {
        nn_dropout_kernel(out, x, nn_count(&call->in[0]), nn_options_in(call)->dropout, call->seed);
    }
    return 0;
}

NN_API int nn_dropout_backward(const ms_call *call) {
    nn_dropout_kernel(nn_gradient_of(&call->grad_in[0]), nn_floats(&call->grad_out[0]),
                      nn_count(&call->grad_out[0]), nn_options_in(call)->dropout, call->seed);
    return 0;
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
    return nn_attention_kernel(
        call, nn_floats(&call->out[0]), keeps ? nn_floats(&call->saved[0]) : NULL,
        nn_floats(&call->in[0]), (float *)call->workspace,
        nn_attention_size_of(call->in[0].shape, options->heads, (options->flags & NN_CAUSAL) != 0));
}

NN_API int nn_attention_backward(const ms_call *call) {
    const nn_options *options = nn_options_in(call);
    const bool keeps = (options->flags & NN_SAVE_SCORES) != 0;
    return nn_attention_backward_kernel(
        call, nn_gradient_of(&call->grad_in[0]), nn_floats(&call->grad_out[0]),
        keeps ? nn_floats(&call->saved[0]) : NULL, nn_floats(&call->in[0]),
        (float *)call->workspace,
        nn_attention_size_of(call->in[0].shape, options->heads, (options->flags & NN_CAUSAL) != 0));
}

NN_API int nn_cross_entropy_forward(const ms_call *call) {
    const int32_t *targets = nn_integers(&call->in[1]);
    const int64_t rows = nn_count(&call->in[1]);
    const int64_t classes = nn_last(call->in[0].shape);
    if (nn_index_check(targets, rows, classes, true) != 0) {
        return NN_ERROR_INDEX;
    }
    nn_cross_entropy_kernel(nn_floats(&call->out[0]), nn_floats(&call->saved[0]),
                            nn_floats(&call->in[0]), targets, rows, classes);
    return 0;
}

NN_API int nn_cross_entropy_backward(const ms_call *call) {
    nn_cross_entropy_backward_kernel(nn_gradient_of(&call->grad_in[0]),
                                     nn_floats(&call->grad_out[0]), nn_floats(&call->saved[0]),
                                     nn_floats(&call->in[0]), nn_integers(&call->in[1]),
                                     nn_count(&call->in[1]), nn_last(call->in[0].shape));
    return 0;
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

NN_API double nn_elements(ms_shape shape) {
    return (double)ms_shape_count(&shape);
}

/* shape with another last axis. */
NN_API ms_shape nn_with_last(ms_shape shape, int64_t last) {
    if (shape.rank > 0) {
        shape.dim[shape.rank - 1] = last;
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
    if (positions.id != 0 && ms_tensor_shape(net->model, positions).dim[0] < ids.dim[1]) {
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
    const ms_shape out =
        ms_shape3(ids.dim[0], ids.dim[1], nn_last(ms_tensor_shape(net->model, table)));
    desc.flops = nn_elements(out) * 2.0;
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
    desc.saved[0] = nn_saved(net, name, "mean", ms_shape1(nn_rows(shape)));
    desc.saved[1] = nn_saved(net, name, "rstd", ms_shape1(nn_rows(shape)));
    desc.backward_reads.in = 1;
    desc.backward_reads.saved = 3;
    desc.backward_reads.param = 1;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
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
    if (ms_shape_count(&shape) != ms_shape_count(&other)) {
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
    return nn_register(net, &desc, shape);
}

/* The products of an attention, where a causal one skips about half, and its softmax. */
NN_API double nn_attention_flops(nn_attention_size n) {
    const double pairs = (double)(n.batch * n.heads) * (double)n.sequence * (double)n.sequence;
    return pairs * (4.0 * (double)n.size + 10.0) * (n.causal ? 0.5 : 1.0);
}

NN_API ms_tensor nn_attention(nn_net *net, const char *name, ms_tensor qkv, int64_t heads,
                              bool causal, bool save_scores) {
    const ms_shape shape = ms_tensor_shape(net->model, qkv);
    if (shape.rank != 3 || heads < 1 || shape.dim[2] % (3 * heads) != 0) {
        return nn_refuse(net, "nn_attention: qkv must be (B, T, 3 * heads * size)");
    }
    const nn_attention_size n = nn_attention_size_of(shape, heads, causal);
    const uint32_t flags =
        (causal ? (uint32_t)NN_CAUSAL : 0) | (save_scores ? (uint32_t)NN_SAVE_SCORES : 0);
    ms_layer_desc desc = nn_desc(name, nn_attention_forward, nn_attention_backward,
                                 nn_options_of(net, heads, 0.0f, 0.0f, flags));
    desc.in[0] = qkv;
    desc.backward_reads.in = 1;
    if (save_scores) {
        desc.saved[0] =
            nn_saved(net, name, "scores", ms_shape4(n.batch, heads, n.sequence, n.sequence));
        desc.backward_reads.saved = 1;
    }
    desc.grad_in_place[0].in = 1;
    desc.forward_workspace_bytes = nn_attention_workspace(n, false);
    desc.backward_workspace_bytes = nn_attention_workspace(n, true);
    desc.flops = nn_attention_flops(n);
    return nn_register(net, &desc, ms_shape3(n.batch, n.sequence, heads * n.size));
}

NN_API ms_tensor nn_cross_entropy(nn_net *net, const char *name, ms_tensor logits,
                                  ms_tensor targets) {
    const ms_shape shape = ms_tensor_shape(net->model, logits);
    const ms_shape rows = ms_tensor_shape(net->model, targets);
    if (shape.rank < 1 || nn_rows(shape) != (int64_t)ms_shape_count(&rows)) {
        return nn_refuse(net, "nn_cross_entropy: one target per row of the logits");
    }
    ms_layer_desc desc = nn_desc(name, nn_cross_entropy_forward, nn_cross_entropy_backward,
                                 nn_options_of(net, 0, 0.0f, 0.0f, 0));
    desc.in[0] = logits;
    desc.in[1] = targets;
    desc.saved[0] = nn_saved(net, name, "stats", ms_shape2(nn_rows(shape), 2));
    desc.backward_reads.in = 3;
    desc.backward_reads.saved = 1;
    desc.grad_in_place[0].in = 1;
    desc.flops = nn_elements(shape) * 15.0;
    return nn_register(net, &desc, rows);
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

NN_API int nn_block_linear(const nn_block *b, int param, float *y, const float *x, int64_t in,
                           int64_t out) {
    const nn_linear_size n = {b->rows, in, out};
    return nn_linear_kernel(b->call, y, x, b->param[param], b->param[param + 1], n);
}

NN_API int nn_block_linear_backward(const nn_block *b, int param, nn_target dx, const float *dy,
                                    const float *x, int64_t in, int64_t out) {
    const nn_linear_size n = {b->rows, in, out};
    return nn_linear_backward_kernel(b->call, dx, b->grad[param], b->grad[param + 1], dy, x,
                                     b->param[param], n);
}

NN_API void nn_block_norm(const nn_block *b, int param, int mean, float *y, const float *x) {
    nn_layernorm_kernel(y, b->saved[mean], b->saved[mean + 1], x, b->param[param],
                        b->param[param + 1], b->rows, b->channels, b->options->epsilon);
}

NN_API void nn_block_norm_backward(const nn_block *b, int param, int mean, nn_target dx,
                                   const float *dy, const float *x) {
    nn_layernorm_param_kernel(b->grad[param], b->grad[param + 1], dy, x, b->saved[mean],
                              b->saved[mean + 1], b->rows, b->channels);
    nn_layernorm_backward_kernel(dx, dy, x, b->saved[mean], b->saved[mean + 1], b->param[param],
                                 b->rows, b->channels);
}

/* Dropout of branch 0 or 1 in place; each branch draws from a seed of its own. */
NN_API uint64_t nn_block_seed(const nn_block *b, int branch) {
    return nn_mix(b->call->seed + (uint64_t)branch);
}

NN_API void nn_block_dropout(const nn_block *b, int branch, float *y) {
    if (b->drops && b->call->phase != MS_PHASE_EVAL) {
        nn_dropout_kernel(nn_target_of(y, 0.0f), y, b->rows * b->channels, b->options->dropout,
                          nn_block_seed(b, branch));
    }
}

/* The gradient in front of the dropout: that behind it, or masked in a copy. */
NN_API const float *nn_block_dropout_backward(const nn_block *b, int branch, const float *dy,
                                              float *copy) {
    if (!b->drops) {
        return dy;
    }
    nn_dropout_kernel(nn_target_of(copy, 0.0f), dy, b->rows * b->channels, b->options->dropout,
                      nn_block_seed(b, branch));
    return copy;
}

/* y = dropout(proj(attention(qkv(x)))) */
NN_API int nn_block_attend(const nn_block *b, float *y, const float *x) {
    const int64_t channels = b->channels;
    int result = nn_block_linear(b, NN_P_QKV, b->saved[NN_S_QKV], x, channels, 3 * channels);
    if (result == 0) {
        result = nn_attention_kernel(b->call, b->saved[NN_S_ATTENTION], b->saved[NN_S_SCORES],
                                     b->saved[NN_S_QKV], (float *)b->call->workspace, b->attention);
    }
    if (result == 0) {
        result = nn_block_linear(b, NN_P_PROJ, y, b->saved[NN_S_ATTENTION], channels, channels);
    }
    nn_block_dropout(b, 0, y);
    return result;
}

/* y = dropout(fcproj(gelu(fc(x)))) */
NN_API int nn_block_mlp(const nn_block *b, float *y, const float *x) {
    float *fch = b->saved[NN_S_FCH];
    int result = nn_block_linear(b, NN_P_FC, fch, x, b->channels, b->hidden);
    nn_gelu_kernel(b->saved[NN_S_GELU], fch, b->rows * b->hidden, b->erf_form);
    if (result == 0) {
        result = nn_block_linear(b, NN_P_FCPROJ, y, b->saved[NN_S_GELU], b->hidden, b->channels);
    }
    nn_block_dropout(b, 1, y);
    return result;
}

/* Scratch of a block's backward, cut out of its workspace. */
typedef struct nn_block_scratch {
    float *wide;      // (rows, hidden), then (rows, 3C)
    float *narrow;    // (rows, C)
    float *masked;    // (rows, C), with dropout
    float *residual;  // (rows, C): the gradient of the stream that the branches are added to
    float *attention; // nn_attention_workspace
} nn_block_scratch;

NN_API int64_t nn_block_wide(int64_t channels, int64_t hidden) {
    return hidden > 3 * channels ? hidden : 3 * channels;
}

NN_API nn_block_scratch nn_block_scratch_of(const nn_block *b) {
    nn_block_scratch s;
    s.wide = (float *)b->call->workspace;
    s.narrow = s.wide + b->rows * nn_block_wide(b->channels, b->hidden);
    s.residual = s.narrow + b->rows * b->channels;
    s.masked = s.residual + b->rows * b->channels;
    s.attention = s.masked + (b->drops ? b->rows * b->channels : 0);
    return s;
}

NN_API uint64_t nn_block_workspace(int64_t rows, int64_t channels, int64_t hidden, bool drops,
                                   nn_attention_size attention) {
    const int64_t floats = rows * (nn_block_wide(channels, hidden) + channels * (drops ? 3 : 2));
    return (uint64_t)floats * sizeof(float) + nn_attention_workspace(attention, true);
}

/* dx gets the gradient of x, the input of nn_block_attend, from dy, that of its result. */
NN_API int nn_block_attend_backward(const nn_block *b, const nn_block_scratch *s, nn_target dx,
                                    const float *dy, const float *x) {
    const int64_t channels = b->channels;
    const float *dproj = nn_block_dropout_backward(b, 0, dy, s->masked);
    int result = nn_block_linear_backward(b, NN_P_PROJ, nn_target_of(s->narrow, 0.0f), dproj,
                                          b->saved[NN_S_ATTENTION], channels, channels);
    if (result == 0) {
        result = nn_attention_backward_kernel(b->call, nn_target_of(s->wide, 0.0f), s->narrow,
                                              b->saved[NN_S_SCORES], b->saved[NN_S_QKV],
                                              s->attention, b->attention);
    }
    if (result == 0) {
        result = nn_block_linear_backward(b, NN_P_QKV, dx, s->wide, x, channels, 3 * channels);
    }
    return result;
}

/* The same for nn_block_mlp. */
NN_API int nn_block_mlp_backward(const nn_block *b, const nn_block_scratch *s, nn_target dx,
                                 const float *dy, const float *x) {
    const nn_target wide = nn_target_of(s->wide, 0.0f);
    const float *dproj = nn_block_dropout_backward(b, 1, dy, s->masked);
    int result = nn_block_linear_backward(b, NN_P_FCPROJ, wide, dproj, b->saved[NN_S_GELU],
                                          b->hidden, b->channels);
    nn_gelu_backward_kernel(wide, s->wide, b->saved[NN_S_FCH], b->rows * b->hidden, b->erf_form);
    if (result == 0) {
        result = nn_block_linear_backward(b, NN_P_FC, dx, s->wide, x, b->channels, b->hidden);
    }
    return result;
}

NN_API int nn_block_pre_forward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const int64_t count = b.rows * b.channels;
    const float *x = nn_floats(&call->in[0]);
    float *sum1 = b.saved[NN_S_SUM1];
    float *out = nn_floats(&call->out[0]);
    nn_block_norm(&b, NN_P_NORM1, NN_S_MEAN1, b.saved[NN_S_NORM1], x);
    int result = nn_block_attend(&b, sum1, b.saved[NN_S_NORM1]);
    nn_add_kernel(sum1, x, sum1, count);
    nn_block_norm(&b, NN_P_NORM2, NN_S_MEAN2, b.saved[NN_S_NORM2], sum1);
    if (result == 0) {
        result = nn_block_mlp(&b, out, b.saved[NN_S_NORM2]);
    }
    nn_add_kernel(out, sum1, out, count);
    return result;
}

NN_API int nn_block_pre_backward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const nn_block_scratch s = nn_block_scratch_of(&b);
    const int64_t count = b.rows * b.channels;
    const float *dout = nn_floats(&call->grad_out[0]);
    const nn_target narrow = nn_target_of(s.narrow, 0.0f);
    const nn_target stream = nn_target_of(s.residual, 1.0f);
    nn_pass_kernel(nn_target_of(s.residual, 0.0f), dout, count);
    int result = nn_block_mlp_backward(&b, &s, narrow, dout, b.saved[NN_S_NORM2]);
    nn_block_norm_backward(&b, NN_P_NORM2, NN_S_MEAN2, stream, s.narrow, b.saved[NN_S_SUM1]);
    if (result == 0) {
        result = nn_block_attend_backward(&b, &s, narrow, s.residual, b.saved[NN_S_NORM1]);
    }
    nn_block_norm_backward(&b, NN_P_NORM1, NN_S_MEAN1, stream, s.narrow, nn_floats(&call->in[0]));
    nn_pass_kernel(nn_gradient_of(&call->grad_in[0]), s.residual, count);
    return result;
}

NN_API int nn_block_post_forward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const int64_t count = b.rows * b.channels;
    const float *x = nn_floats(&call->in[0]);
    float *sum1 = b.saved[NN_S_SUM1];
    float *norm1 = b.saved[NN_S_NORM1];
    float *sum2 = b.saved[NN_S_SUM2];
    int result = nn_block_attend(&b, sum1, x);
    nn_add_kernel(sum1, x, sum1, count);
    nn_block_norm(&b, NN_P_NORM1, NN_S_MEAN1, norm1, sum1);
    if (result == 0) {
        result = nn_block_mlp(&b, sum2, norm1);
    }
    nn_add_kernel(sum2, norm1, sum2, count);
    nn_block_norm(&b, NN_P_NORM2, NN_S_MEAN2, nn_floats(&call->out[0]), sum2);
    return result;
}

NN_API int nn_block_post_backward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const nn_block_scratch s = nn_block_scratch_of(&b);
    const nn_target set = nn_target_of(s.residual, 0.0f);
    const nn_target stream = nn_target_of(s.residual, 1.0f);
    nn_block_norm_backward(&b, NN_P_NORM2, NN_S_MEAN2, set, nn_floats(&call->grad_out[0]),
                           b.saved[NN_S_SUM2]);
    int result = nn_block_mlp_backward(&b, &s, stream, s.residual, b.saved[NN_S_NORM1]);
    nn_block_norm_backward(&b, NN_P_NORM1, NN_S_MEAN1, set, s.residual, b.saved[NN_S_SUM1]);
    if (result == 0) {
        result = nn_block_attend_backward(&b, &s, stream, s.residual, nn_floats(&call->in[0]));
    }
    nn_pass_kernel(nn_gradient_of(&call->grad_in[0]), s.residual, b.rows * b.channels);
    return result;
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

/* Name and width (columns per row of the block's input) of each saved tensor; backward reads all. */
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
            desc->saved[rows[i].slot] =
                nn_saved(b->net, b->prefix, rows[i].name, nn_with_last(x, rows[i].width));
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
    const nn_attention_size attention = nn_attention_size_of(
        nn_with_last(shape, 3 * config->channels), config->heads, style->causal);
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
    desc.forward_workspace_bytes = nn_attention_workspace(attention, false);
    desc.backward_workspace_bytes = nn_block_workspace(
        nn_rows(shape), config->channels, 4 * config->channels, config->dropout > 0.0f, attention);
    desc.flops = nn_elements(shape) * (24.0 * (double)config->channels + 120.0) +
                 nn_attention_flops(attention);
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

NN_API nn_transformer nn_gpt2(nn_net *net, const nn_transformer_config *config) {
    const ms_shape ids = ms_shape2(config->batch, config->sequence);
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
    const ms_shape ids = ms_shape2(config->batch, config->sequence);
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

#endif // MEMSCALE_NN_H
