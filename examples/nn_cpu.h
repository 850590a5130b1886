/*  nn_cpu.h - the kernels of nn.h on the CPU, and nn_cpu(), the table of them.

    A part of nn.h, which includes it after ">>nn device": it uses what is declared up to there. A
    kernel takes raw pointers and sizes, in elements. It does its work before it returns, in as many
    threads as OpenMP gives it.

        >>nn cpu loops       loops over threads and over vector registers; sums
        >>nn cpu kernels     those without matrix products
        >>nn cpu products    those that call ms_gemm: linear, attention, convolution
        >>nn cpu table       nn_cpu()

    A new kernel goes to the second or third section, and a row for it to nn_cpu(). */
#ifndef MEMSCALE_NN_CPU_H
#define MEMSCALE_NN_CPU_H

#ifndef MEMSCALE_NN_H
#error "include nn.h, which includes nn_cpu.h"
#endif

// ------------------------------------------------------------------------------------------------
// >>nn cpu loops

/* NN_PARALLEL: iterations may run on several threads, if the loop's cost, in elements, is worth
   waking them; each iteration writes its own memory.
   NN_SIMD: iterations are independent, although an output may be the same memory as an input. */
#if defined(_OPENMP)
#define NN_PRAGMA(text) _Pragma(#text)
#define NN_PARALLEL(cost) NN_PRAGMA(omp parallel for schedule(static) if ((cost) >= NN_WORTH))
#define NN_SIMD NN_PRAGMA(omp simd)
#elif defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define NN_PARALLEL(cost)
#define NN_SIMD _Pragma("GCC ivdep")
#else
#define NN_PARALLEL(cost)
#define NN_SIMD
#endif

enum {
    NN_WORTH = 16384,     // elements from which on a loop uses several threads
    NN_PRODUCTS = 16,     // multiplications of a matrix product that cost as much as an element
    NN_COLUMNS = 64,      // columns summed together
    NN_LANES = 16,        // partial sums of a row
    NN_QUERIES = 64,      // queries of a band: rows of probabilities that are in memory at once
    NN_HEAD_WORKERS = 16, // heads of attention that may run at once
    NN_IMAGE_WORKERS = 4, // images of a convolution that may run at once
    NN_PATCHES = 256      // patches of an image that are in memory at once, about
};

NN_API float nn_lanes_sum(const float *lane) {
    float pair[NN_LANES / 2];
    for (int i = 0; i < NN_LANES / 2; i++) {
        pair[i] = lane[i] + lane[i + NN_LANES / 2];
    }
    return ((pair[0] + pair[4]) + (pair[1] + pair[5])) +
           ((pair[2] + pair[6]) + (pair[3] + pair[7]));
}

/* total = the sum of term over i = 0 ... count - 1. Compilers may not reorder a float sum, so a
   plain loop would be scalar. This one has NN_LANES sums, which are added up at the end. */
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
// >>nn cpu kernels

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

/* y = x or y += x; nothing to do if y is x. */
NN_API int nn_copy_kernel(const ms_call *call, nn_dest y, const float *x, int64_t count) {
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

/* y = mask * x / (1 - probability), or y += that; y may be x. */
NN_API int nn_dropout_kernel(const ms_call *call, nn_dest y, const float *x, int64_t count,
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
NN_API int nn_gelu_backward_kernel(const ms_call *call, nn_dest dx, const float *dy, const float *x,
                                   int64_t count, bool erf_form) {
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

NN_API inline int64_t nn_lookup_entry(const nn_lookup *lookup, int64_t row) {
    return lookup->index != NULL ? (int64_t)lookup->index[row] : row % lookup->period;
}

/* NN_ERROR_INDEX if one of the `count` indices is not below entries, or if one is below 0 and this
   does not mean that it is ignored; otherwise 0. */
NN_API int nn_index_check(const int32_t *index, int64_t count, int64_t entries, bool ignorable) {
    for (int64_t i = 0; i < count; i++) {
        if (index[i] >= entries || (index[i] < 0 && !ignorable)) {
            return NN_ERROR_INDEX;
        }
    }
    return 0;
}

/* y (rows, channels): the sum of the table rows that the lookups name; the first has a table. */
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

/* dtable (entries, channels): for each entry the sum of the rows of dy (rows, channels) that took
   it, or += that. */
NN_API int nn_embedding_backward_kernel(const ms_call *call, nn_dest dtable,
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

/* dest[begin + c] = sum[c], or += that. */
NN_API void nn_store_columns(nn_dest dest, int64_t begin, const float *sum, int64_t count) {
    for (int64_t c = 0; c < count; c++) {
        float *to = dest.data + begin + c;
        *to = dest.beta != 0.0f ? *to + sum[c] : sum[c];
    }
}

/* sums (columns): of each column of x (rows, columns). */
NN_API void nn_column_sums_kernel(nn_dest sums, const float *x, int64_t rows, int64_t columns) {
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
NN_API void nn_layernorm_param_kernel(nn_dest dweight, nn_dest dbias, const float *dy,
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

/* Gradients from x, dy (rows, width). That of x comes last, as dx may be dy or x. */
NN_API int nn_layernorm_backward_kernel(const ms_call *call, nn_dest dx, nn_dest dweight,
                                        nn_dest dbias, const float *dy, const float *x,
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
NN_API int nn_cross_entropy_backward_kernel(const ms_call *call, nn_dest dlogits,
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

/* y may be x. */
NN_API int nn_relu_kernel(const ms_call *call, float *y, const float *x, int64_t count) {
    (void)call;
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t end = nn_least(begin + NN_CHUNK, count);
        NN_SIMD
        for (int64_t i = begin; i < end; i++) {
            y[i] = nn_relu_value(x[i]);
        }
    }
    return 0;
}

/* dx = dy where y, the output, is above 0, or dx += that; dx may be y or dy. */
NN_API int nn_relu_backward_kernel(const ms_call *call, nn_dest dx, const float *dy, const float *y,
                                   int64_t count) {
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

/* sums (channels): over images and plane of x. */
NN_API void nn_channel_sums_kernel(nn_dest sums, const float *x, nn_planes n) {
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

NN_API int nn_average_backward_kernel(const ms_call *call, nn_dest dx, const float *dmeans,
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

/* Mean and 1 / sqrt(variance + epsilon) of a channel, from where v->moments says. */
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

/* y may be x. The loop is the same for all v->moments, so that a recomputation gives the same
   bits as forward. */
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
   weight divided by the number of its values. */
NN_API void nn_batch_norm_backward_channel(nn_dest dx, const float *dy, const float *x,
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
NN_API int nn_batch_norm_backward_kernel(const ms_call *call, nn_dest dx, nn_dest dweight,
                                         nn_dest dbias, const float *dy, const float *x,
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

/* The patches of a row of `count` whose element at this offset lies inside an image of this extent;
   offset is from the image's first pixel to that element of the first patch. */
NN_API nn_span nn_span_of(int64_t offset, int64_t stride, int64_t extent, int64_t count) {
    nn_span span;
    span.end = extent > offset ? nn_least((extent - 1 - offset) / stride + 1, count) : 0;
    span.begin = offset < 0 ? nn_least((stride - 1 - offset) / stride, span.end) : 0;
    return span;
}

/* Copies one element of each patch of a row of patches. `from` is the row of pixels that holds it,
   left its pixel in the first patch; only the patches `across` have it inside the image. */
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

/* columns (channels * kernel * kernel, rows.count * out_width) of one image: row (c, i, j) has
   element (i, j) of each of these patches in channel c. */
NN_API void nn_columns_kernel(float *columns, const float *image, nn_patch_rows rows,
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

/* The reverse, for gradients: adds to each pixel of one image all of its copies in columns. */
NN_API void nn_columns_backward_kernel(float *image, const float *columns, nn_patch_rows rows,
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

/* y (images, channels, out_height, out_width), and the places of its values in the planes of x;
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

NN_API int nn_max_pool_backward_kernel(const ms_call *call, nn_dest dx, const float *dy,
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

/* Normally distributed values. Box and Muller, "A Note on the Generation of Random Normal
   Deviates", 1958: two at a time. */
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

// ------------------------------------------------------------------------------------------------
// >>nn cpu products  return the result of ms_gemm

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
        result = nn_dropout_kernel(call, nn_dest_of(y, 0.0f), y, n.rows * n.out, drop->probability,
                                   drop->seed);
    }
    return result != 0 ? result : nn_add_kernel(call, y, residual, y, n.rows * n.out);
}

/* dx = dy * weight, dweight = transpose(dy) * x, dbias = column sums of dy. */
NN_API int nn_linear_backward_kernel(const ms_call *call, nn_dest dx, nn_dest dweight,
                                     nn_dest dbias, const float *dy, const float *x,
                                     const float *weight, nn_linear_size n, float *work) {
    (void)work;
    const int result = nn_linear_products(call, dx, dweight, dy, x, weight, n);
    nn_column_sums_kernel(dbias, dy, n.rows, n.out);
    return result;
}

/* Heads that may run at once, each with scratch memory of its own: a number that does not depend on
   the machine, so that the plan does not either. A worker takes every workers-th head. */
NN_API int64_t nn_attention_workers(nn_attention_size n) {
    return nn_least(NN_HEAD_WORKERS, n.batch * n.heads);
}

/* Floats of scratch memory per worker: a band of probabilities; in backward also the gradients of
   these, and those of keys and values. */
NN_API int64_t nn_attention_worker_floats(nn_attention_size n, bool backward) {
    const int64_t band = nn_least(NN_QUERIES, n.sequence) * n.sequence;
    return backward ? 2 * band + 2 * n.sequence * n.size : band;
}

NN_API int64_t nn_attention_cost(nn_attention_size n) {
    return n.batch * n.heads * n.sequence * n.sequence * n.size;
}

/* Floats of scratch memory. */
NN_API int64_t nn_attention_floats(nn_attention_size n, bool backward) {
    return nn_attention_workers(n) * nn_attention_worker_floats(n, backward);
}

/* A band of a head: queries begin ... begin + rows - 1, and the keys 0 ... keys - 1 that at least
   one of them sees. Offsets, in floats: of the band's queries and of the head's keys and values in
   qkv, of the band in the output and in saved probabilities. */
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

/* p (rows of the band, sequence) = softmax(q k^T / sqrt(size)), 0 for keys after the query. */
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

/* One head of out (B, T, C) from qkv (B, T, 3C). scores (B, H, T, T) keeps the probabilities, except
   for keys after the band, which nothing reads; or is NULL. */
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
    const int64_t workers = nn_attention_workers(n);
    const int64_t floats = nn_attention_worker_floats(n, false);
    int results[NN_HEAD_WORKERS] = {0};
    NN_PARALLEL(nn_attention_cost(n))
    for (int64_t worker = 0; worker < workers; worker++) {
        for (int64_t head = worker; head < n.batch * n.heads; head += workers) {
            results[worker] |=
                nn_attention_head(call, out, scores, qkv, work + worker * floats, head, n);
        }
    }
    for (int64_t worker = 1; worker < workers; worker++) {
        results[0] |= results[worker];
    }
    return results[0];
}

/* Gradients of keys and values are summed in the scratch memory, and those of a band's queries are
   written after the last read of these queries: so dqkv may be qkv. */
NN_API int nn_attention_backward_band(const ms_call *call, nn_dest dqkv, const float *dout,
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

/* Stores the rows of `from` (rows, size) in rows that are `stride` floats apart. */
NN_API void nn_store_rows(nn_dest to, const float *from, int64_t rows, int64_t size,
                          int64_t stride) {
    for (int64_t r = 0; r < rows; r++) {
        nn_dest row = nn_dest_of(to.data + r * stride, to.beta);
        nn_store_columns(row, 0, from + r * size, size);
    }
}

NN_API int nn_attention_backward_head(const ms_call *call, nn_dest dqkv, const float *dout,
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
    nn_store_rows(nn_dest_of(dqkv.data + first.k, dqkv.beta), dk, n.sequence, n.size,
                  first.qkv_stride);
    nn_store_rows(nn_dest_of(dqkv.data + first.v, dqkv.beta), dv, n.sequence, n.size,
                  first.qkv_stride);
    return result;
}

/* dqkv (B, T, 3C) from dout (B, T, C); scores NULL: the probabilities are computed again. */
NN_API int nn_attention_backward_kernel(const ms_call *call, nn_dest dqkv, const float *dout,
                                        const float *scores, const float *qkv, float *work,
                                        nn_attention_size n) {
    if (dqkv.data == NULL) {
        return 0;
    }
    const int64_t workers = nn_attention_workers(n);
    const int64_t floats = nn_attention_worker_floats(n, true);
    int results[NN_HEAD_WORKERS] = {0};
    NN_PARALLEL(nn_attention_cost(n))
    for (int64_t worker = 0; worker < workers; worker++) {
        for (int64_t head = worker; head < n.batch * n.heads; head += workers) {
            results[worker] |= nn_attention_backward_head(call, dqkv, dout, scores, qkv,
                                                          work + worker * floats, head, n);
        }
    }
    for (int64_t worker = 1; worker < workers; worker++) {
        results[0] |= results[worker];
    }
    return results[0];
}

/* Images that a convolution may work on at once, each with scratch memory of its own: a number that
   does not depend on the machine, so that neither the plan nor a sum does. */
NN_API int64_t nn_image_workers(const nn_window *w) {
    return nn_least(NN_IMAGE_WORKERS, w->images);
}

/* Rows of patches whose columns are in memory at once: about NN_PATCHES patches. */
NN_API int64_t nn_patch_rows_at_once(const nn_window *w) {
    const int64_t rows = w->out_width < NN_PATCHES ? NN_PATCHES / w->out_width : 1;
    return nn_is_pointwise(w) ? w->out_height : nn_least(rows, w->out_height);
}

/* Floats of scratch memory per worker: columns; in backward also a gradient of the weight. */
NN_API int64_t nn_image_worker_floats(const nn_window *w, int64_t out, bool backward) {
    const int64_t patches = nn_is_pointwise(w) ? 0 : nn_patch_rows_at_once(w) * w->out_width;
    return nn_window_depth(w) * (patches + (backward ? out : 0));
}

NN_API int64_t nn_conv2d_floats(const nn_window *w, int64_t out, bool backward) {
    return nn_image_workers(w) * nn_image_worker_floats(w, out, backward);
}

NN_API int64_t nn_conv2d_cost(const nn_window *w, int64_t out) {
    return w->images * nn_window_patches(w) * nn_window_depth(w) * out / NN_PRODUCTS;
}

NN_API nn_patch_rows nn_patch_rows_from(const nn_window *w, int64_t begin) {
    nn_patch_rows rows;
    rows.begin = begin;
    rows.count = nn_least(nn_patch_rows_at_once(w), w->out_height - begin);
    return rows;
}

/* The columns of these rows of patches of an image: copied to work, or, if the convolution is
   pointwise, the image itself. */
NN_API ms_matrix nn_columns_of(float *work, const float *image, nn_patch_rows rows,
                               const nn_window *w) {
    if (nn_is_pointwise(w)) {
        return nn_patch_matrix(image, w->channels, rows, w);
    }
    nn_columns_kernel(work, image, rows, w);
    const int64_t patches = rows.count * w->out_width;
    return nn_matrix(work, nn_window_depth(w), patches, patches);
}

/* One image: y (out, patches) from x. */
NN_API int nn_conv2d_image(const ms_call *call, float *y, const float *x, const float *weight,
                           const float *bias, float *work, int64_t out, const nn_window *w) {
    const ms_matrix matrix = nn_matrix(weight, out, nn_window_depth(w), nn_window_depth(w));
    const int64_t patches = nn_window_patches(w);
    int result = 0;
    for (int64_t o = 0; bias != NULL && o < out; o++) {
        nn_constant_kernel(y + o * patches, patches, bias[o]);
    }
    for (int64_t begin = 0; begin < w->out_height && result == 0;
         begin += nn_patch_rows_at_once(w)) {
        const nn_patch_rows rows = nn_patch_rows_from(w, begin);
        result = (int)ms_gemm(call, 1.0f, matrix, nn_columns_of(work, x, rows, w),
                              bias != NULL ? 1.0f : 0.0f, nn_patch_matrix(y, out, rows, w));
    }
    return result;
}

/* y (images, out, patches) = weight (out, depth) * columns of x + bias; bias may be NULL. */
NN_API int nn_conv2d_kernel(const ms_call *call, float *y, const float *x, const float *weight,
                            const float *bias, int64_t out, const nn_window *w, float *work) {
    const int64_t workers = nn_image_workers(w);
    const int64_t floats = nn_image_worker_floats(w, out, false);
    const int64_t image = w->channels * w->height * w->width;
    int results[NN_IMAGE_WORKERS] = {0};
    NN_PARALLEL(nn_conv2d_cost(w, out))
    for (int64_t worker = 0; worker < workers; worker++) {
        for (int64_t b = worker; b < w->images; b += workers) {
            results[worker] |=
                nn_conv2d_image(call, y + b * out * nn_window_patches(w), x + b * image, weight,
                                bias, work + worker * floats, out, w);
        }
    }
    for (int64_t worker = 1; worker < workers; worker++) {
        results[0] |= results[worker];
    }
    return results[0];
}

/* dweight (out, depth): dy * transpose(columns) of one image. */
NN_API int nn_conv2d_weight_image(const ms_call *call, nn_dest dweight, const float *dy,
                                  const float *x, float *work, int64_t out, const nn_window *w) {
    const int64_t depth = nn_window_depth(w);
    int result = 0;
    for (int64_t begin = 0; begin < w->out_height && result == 0;
         begin += nn_patch_rows_at_once(w)) {
        const nn_patch_rows rows = nn_patch_rows_from(w, begin);
        result = (int)ms_gemm(call, 1.0f, nn_patch_matrix(dy, out, rows, w),
                              ms_transpose(nn_columns_of(work, x, rows, w)),
                              begin == 0 ? dweight.beta : 1.0f,
                              nn_matrix(dweight.data, out, depth, depth));
    }
    return result;
}

/* dx of one image: the columns transpose(weight) * dy, added to the pixels they are copies of. */
NN_API int nn_conv2d_backward_image(const ms_call *call, nn_dest dx, const float *dy,
                                    const float *weight, float *work, int64_t out,
                                    const nn_window *w) {
    const int64_t depth = nn_window_depth(w);
    const ms_matrix turned = ms_transpose(nn_matrix(weight, out, depth, depth));
    int result = 0;
    if (nn_is_pointwise(w)) {
        const nn_patch_rows all = nn_patch_rows_from(w, 0);
        return (int)ms_gemm(call, 1.0f, turned, nn_patch_matrix(dy, out, all, w), dx.beta,
                            nn_patch_matrix(dx.data, depth, all, w));
    }
    if (dx.beta == 0.0f) {
        memset(dx.data, 0, (size_t)(w->channels * w->height * w->width) * sizeof *dx.data);
    }
    for (int64_t begin = 0; begin < w->out_height && result == 0;
         begin += nn_patch_rows_at_once(w)) {
        const nn_patch_rows rows = nn_patch_rows_from(w, begin);
        const int64_t patches = rows.count * w->out_width;
        result = (int)ms_gemm(call, 1.0f, turned, nn_patch_matrix(dy, out, rows, w), 0.0f,
                              nn_matrix(work, depth, patches, patches));
        nn_columns_backward_kernel(dx.data, work, rows, w);
    }
    return result;
}

/* sums (count): over the parts of all workers, which are `stride` floats apart. */
NN_API void nn_worker_sums_kernel(nn_dest sums, const float *parts, int64_t workers, int64_t stride,
                                  int64_t count) {
    float *out = sums.data;
    const bool adds = sums.beta != 0.0f;
    NN_PARALLEL(count * workers)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t end = nn_least(begin + NN_CHUNK, count);
        for (int64_t worker = 0; worker < workers; worker++) {
            const float *part = parts + worker * stride;
            const bool first = worker == 0 && !adds;
            NN_SIMD
            for (int64_t i = begin; i < end; i++) {
                out[i] = first ? part[i] : out[i] + part[i];
            }
        }
    }
}

/* Each worker sums the gradient of the weight over its own images. An image is read before its
   gradient is written, so dx may be x. */
NN_API int nn_conv2d_backward_kernel(const ms_call *call, nn_dest dx, nn_dest dweight,
                                     nn_dest dbias, const float *dy, const float *x,
                                     const float *weight, int64_t out, const nn_window *w,
                                     float *work) {
    const int64_t workers = nn_image_workers(w);
    const int64_t floats = nn_image_worker_floats(w, out, true);
    const int64_t columns = nn_image_worker_floats(w, out, false);
    const int64_t image = w->channels * w->height * w->width;
    int results[NN_IMAGE_WORKERS] = {0};
    const nn_planes slopes = {w->images, out, nn_window_patches(w)};
    nn_channel_sums_kernel(dbias, dy, slopes);
    NN_PARALLEL(nn_conv2d_cost(w, out))
    for (int64_t worker = 0; worker < workers; worker++) {
        float *own = work + worker * floats;
        for (int64_t b = worker; b < w->images; b += workers) {
            const float *slope = dy + b * out * nn_window_patches(w);
            if (dweight.data != NULL) {
                results[worker] |= nn_conv2d_weight_image(
                    call, nn_dest_of(own + columns, b == worker ? 0.0f : 1.0f), slope,
                    x + b * image, own, out, w);
            }
            if (dx.data != NULL) {
                results[worker] |= nn_conv2d_backward_image(
                    call, nn_dest_of(dx.data + b * image, dx.beta), slope, weight, own, out, w);
            }
        }
    }
    for (int64_t worker = 1; worker < workers; worker++) {
        results[0] |= results[worker];
    }
    if (dweight.data != NULL) {
        nn_worker_sums_kernel(dweight, work + columns, workers, floats, out * nn_window_depth(w));
    }
    return results[0];
}

// ------------------------------------------------------------------------------------------------
// >>nn cpu table

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
        nn_copy_kernel,
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

#endif // MEMSCALE_NN_CPU_H
