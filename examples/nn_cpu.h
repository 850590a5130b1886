/*  nn_cpu.h - the kernels of nn.h on the CPU, and nn_cpu(), the table of them.

    A part of nn.h, which includes it after ">>nn device": it uses what is declared up to there. A
    kernel takes raw pointers and sizes, in elements. It does its work before it returns, in as many
    threads as OpenMP gives it.

        >>nn cpu loops       loops over threads and over vector registers; sums
        >>nn cpu values      pieces of values, in F32
        >>nn cpu kernels     those without matrix products
        >>nn cpu products    those that call ms_gemm: linear, attention, convolution
        >>nn cpu tiles       attention in tiles
        >>nn cpu table       nn_cpu()

    A new kernel goes to the section of its kind, and a row for it to nn_cpu(). */
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
    NN_ROOM = 1024,       // values of a row that are converted at a time
    NN_PRODUCTS = 16,     // multiplications of a matrix product that cost as much as an element
    NN_COLUMNS = 64,      // columns summed together
    NN_LANES = 16,        // partial sums of a row
    NN_QUERIES = 64,      // queries of a band: rows of probabilities that are in memory at once
    NN_HEAD_WORKERS = 16, // heads of attention that may run at once
    NN_IMAGE_WORKERS = 4, // images of a convolution that may run at once
    NN_PATCHES = 256      // patches of an image that are in memory at once, about
};

/* Queries and keys of a tile of attention, and queries, at most, whose gradients have F32 sums in
   scratch memory all at once. Tests, whose sequences are short, set them lower. */
#ifndef NN_TILE_QUERIES
#define NN_TILE_QUERIES 64
#endif
#ifndef NN_TILE_KEYS
#define NN_TILE_KEYS 256
#endif
#ifndef NN_TILE_SUMS
#define NN_TILE_SUMS 1024
#endif

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
// >>nn cpu values  kernels compute in F32, on pieces of what they read and write

/* A loop over a row takes so many values of this dtype at once: all if they are F32, which are used
   where they are, otherwise what a room on the stack holds, float[NN_ROOM], where they are
   converted. */
NN_API int64_t nn_piece(ms_dtype dtype, int64_t count) {
    return dtype == MS_DTYPE_F32 ? nn_most(count, 1) : (int64_t)NN_ROOM;
}

#define NN_EXPAND(name, element)                                                                   \
    NN_API void nn_expand_##name(float *to, const void *from, int64_t count) {                     \
        const uint16_t *values = (const uint16_t *)from;                                           \
        for (int64_t i = 0; i < count; i++) {                                                      \
            to[i] = element(values[i]);                                                            \
        }                                                                                          \
    }
#define NN_ROUND(name, element)                                                                    \
    NN_API void nn_round_##name(void *to, const float *from, int64_t count) {                      \
        uint16_t *values = (uint16_t *)to;                                                         \
        for (int64_t i = 0; i < count; i++) {                                                      \
            values[i] = element(from[i]);                                                          \
        }                                                                                          \
    }
NN_EXPAND(bf16, nn_of_bf16)
NN_EXPAND(f16, nn_of_f16)
NN_ROUND(bf16, nn_bf16_of)
NN_ROUND(f16, nn_f16_of)

/* How values that are not F32 are read and written. */
typedef struct nn_format {
    ms_dtype dtype;
    void (*expand)(float *to, const void *from, int64_t count);
    void (*round)(void *to, const float *from, int64_t count);
} nn_format;

static const nn_format nn_formats[] = {
    {MS_DTYPE_BF16, nn_expand_bf16, nn_round_bf16},
    {MS_DTYPE_F16, nn_expand_f16, nn_round_f16},
};

NN_API const nn_format *nn_format_of(ms_dtype dtype) {
    return &nn_formats[dtype == nn_formats[0].dtype ? 0 : 1];
}

NN_API void nn_expand(float *to, nn_values x, int64_t count) {
    nn_format_of(x.dtype)->expand(to, x.data, count);
}

NN_API void nn_round(nn_values y, const float *from, int64_t count) {
    nn_format_of(y.dtype)->round(y.data, from, count);
}

/* The `count` values from element `first` on. */
NN_API inline const float *nn_read(nn_values x, int64_t first, int64_t count, float *room) {
    const nn_values from = nn_from(x, first);
    if (x.dtype == MS_DTYPE_F32) {
        return (const float *)from.data;
    }
    nn_expand(room, from, count);
    return room;
}

/* Memory for what is going to be stored from element `first` on: the old values, if y.beta is 1. */
NN_API inline float *nn_open(nn_dest y, int64_t first, int64_t count, float *room) {
    const nn_values at = nn_from(nn_values_at(y), first);
    if (y.dtype == MS_DTYPE_F32) {
        return (float *)at.data;
    }
    if (y.beta != 0.0f) {
        nn_expand(room, at, count);
    }
    return room;
}

/* Stores what has been computed in the memory that nn_open gave. */
NN_API inline void nn_close(nn_dest y, int64_t first, int64_t count, const float *room) {
    if (y.dtype != MS_DTYPE_F32) {
        nn_round(nn_from(nn_values_at(y), first), room, count);
    }
}

/* y = x, in 16 bits; y may begin where x does. */
NN_API void nn_round_row(nn_values y, const float *x, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += NN_ROOM) {
        const int64_t size = nn_least(NN_ROOM, count - begin);
        float room[NN_ROOM];
        memcpy(room, x + begin, (size_t)size * sizeof *room);
        nn_round(nn_from(y, begin), room, size);
    }
}

/* y[first + i] = x[i], or += that. x is not in y's memory. */
NN_API void nn_store(nn_dest y, int64_t first, const float *x, int64_t count) {
    const int64_t piece = nn_piece(y.dtype, count);
    const bool adds = y.beta != 0.0f;
    float room[NN_ROOM];
    for (int64_t begin = 0; begin < count; begin += piece) {
        const int64_t size = nn_least(piece, count - begin);
        float *to = nn_open(y, first + begin, size, room);
        const float *from = x + begin;
        for (int64_t i = 0; i < size; i++) {
            to[i] = adds ? to[i] + from[i] : from[i];
        }
        nn_close(y, first + begin, size, to);
    }
}

NN_API float nn_sum_of(nn_values x, int64_t first, int64_t count) {
    const int64_t piece = nn_piece(x.dtype, count);
    float room[NN_ROOM];
    float total = 0.0f;
    for (int64_t begin = 0; begin < count; begin += piece) {
        const int64_t size = nn_least(piece, count - begin);
        total += nn_sum(nn_read(x, first + begin, size, room), size);
    }
    return total;
}

/* The sum of (x - middle)^2. */
NN_API float nn_squares_of(nn_values x, int64_t first, float middle, int64_t count) {
    const int64_t piece = nn_piece(x.dtype, count);
    float room[NN_ROOM];
    float total = 0.0f;
    for (int64_t begin = 0; begin < count; begin += piece) {
        const int64_t size = nn_least(piece, count - begin);
        const float *from = nn_read(x, first + begin, size, room);
        float squares;
        NN_SUM(squares, i, size, (from[i] - middle) * (from[i] - middle));
        total += squares;
    }
    return total;
}

NN_API float nn_max_of(nn_values x, int64_t first, int64_t count) {
    const int64_t piece = nn_piece(x.dtype, count);
    float room[NN_ROOM];
    float most = 0.0f;
    for (int64_t begin = 0; begin < count; begin += piece) {
        const int64_t size = nn_least(piece, count - begin);
        const float own = nn_max(nn_read(x, first + begin, size, room), size);
        most = begin == 0 || own > most ? own : most;
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
NN_API int nn_add_kernel(const ms_call *call, nn_values y, nn_values a, nn_values b,
                         int64_t count) {
    (void)call;
    const nn_dest out = nn_dest_of(y, 0.0f);
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[3][NN_CHUNK];
        const float *left = nn_read(a, begin, size, room[0]);
        const float *right = nn_read(b, begin, size, room[1]);
        float *to = nn_open(out, begin, size, room[2]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            to[i] = left[i] + right[i];
        }
        nn_close(out, begin, size, to);
    }
    return 0;
}

/* y = x or y += x; nothing to do if y is x. */
NN_API int nn_copy_kernel(const ms_call *call, nn_dest y, nn_values x, int64_t count) {
    if (y.data == NULL || (y.data == x.data && y.beta == 0.0f)) {
        return 0;
    }
    if (y.beta == 0.0f) {
        memcpy(y.data, x.data, (size_t)count * nn_value_bytes(x.dtype));
        return 0;
    }
    return nn_add_kernel(call, nn_values_at(y), nn_values_at(y), x, count);
}

/* y = mask * x / (1 - probability), or y += that; y may be x. A tile may begin within a chunk. */
NN_API int nn_dropout_kernel(const ms_call *call, nn_dest y, nn_values x, int64_t count,
                             float probability, nn_seed seeds) {
    (void)call;
    if (y.data == NULL) {
        return 0;
    }
    const bool adds = y.beta != 0.0f;
    const float scale = 1.0f / (1.0f - probability);
    const uint32_t threshold = nn_threshold(probability);
    const uint64_t seed = nn_seed_value(seeds);
    const int64_t before = seeds.first % NN_CHUNK;
    NN_PARALLEL(count)
    for (int64_t chunk = -before; chunk < count; chunk += NN_CHUNK) {
        const int64_t begin = nn_most(chunk, 0);
        const int32_t size = (int32_t)(nn_least(chunk + NN_CHUNK, count) - begin);
        const uint32_t counter = (uint32_t)(begin - chunk);
        const uint64_t key = nn_chunk_key(seed, seeds.first + chunk);
        float room[2][NN_CHUNK];
        const float *from = nn_read(x, begin, size, room[0]);
        float *to = nn_open(y, begin, size, room[1]);
        NN_SIMD
        for (int32_t i = 0; i < size; i++) {
            const bool keeps = nn_random(key, counter + (uint32_t)i) >= threshold;
            const float kept = keeps ? from[i] * scale : 0.0f;
            to[i] = adds ? to[i] + kept : kept;
        }
        nn_close(y, begin, size, to);
    }
    return 0;
}

/* y = gelu(x); y may be x. */
NN_API int nn_gelu_kernel(const ms_call *call, nn_values y, nn_values x, int64_t count,
                          bool erf_form) {
    (void)call;
    const nn_dest out = nn_dest_of(y, 0.0f);
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[2][NN_CHUNK];
        const float *from = nn_read(x, begin, size, room[0]);
        float *to = nn_open(out, begin, size, room[1]);
        if (erf_form) {
            NN_SIMD
            for (int64_t i = 0; i < size; i++) {
                to[i] = nn_gelu_erf_value(from[i]);
            }
        } else {
            NN_SIMD
            for (int64_t i = 0; i < size; i++) {
                to[i] = nn_gelu_tanh_value(from[i]);
            }
        }
        nn_close(out, begin, size, to);
    }
    return 0;
}

/* dx = gelu'(x) * dy, or dx += that; dx may be x or dy. */
NN_API int nn_gelu_backward_kernel(const ms_call *call, nn_dest dx, nn_values dy, nn_values x,
                                   int64_t count, bool erf_form) {
    (void)call;
    if (dx.data == NULL) {
        return 0;
    }
    const bool adds = dx.beta != 0.0f;
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[3][NN_CHUNK];
        const float *above = nn_read(dy, begin, size, room[0]);
        const float *from = nn_read(x, begin, size, room[1]);
        float *to = nn_open(dx, begin, size, room[2]);
        if (erf_form) {
            NN_SIMD
            for (int64_t i = 0; i < size; i++) {
                const float slope = nn_gelu_erf_slope(from[i]) * above[i];
                to[i] = adds ? to[i] + slope : slope;
            }
        } else {
            NN_SIMD
            for (int64_t i = 0; i < size; i++) {
                const float slope = nn_gelu_tanh_slope(from[i]) * above[i];
                to[i] = adds ? to[i] + slope : slope;
            }
        }
        nn_close(dx, begin, size, to);
    }
    return 0;
}

NN_API inline int64_t nn_lookup_entry(const nn_lookup *lookup, int64_t row) {
    return lookup->index != NULL ? (int64_t)lookup->index[row]
                                 : (lookup->first + row) % lookup->period;
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

/* One row of y: the sum of the table rows that the lookups name; the first has a table. */
NN_API void nn_embedding_row(nn_dest y, const nn_lookup *lookups, int lookup_count, int64_t row,
                             int64_t channels) {
    const int64_t piece = nn_piece(y.dtype, channels);
    float room[2][NN_ROOM];
    for (int64_t begin = 0; begin < channels; begin += piece) {
        const int64_t size = nn_least(piece, channels - begin);
        float *to = nn_open(y, row * channels + begin, size, room[0]);
        for (int l = 0; l < lookup_count; l++) {
            if (lookups[l].table.data == NULL) {
                continue;
            }
            const int64_t first = nn_lookup_entry(&lookups[l], row) * channels + begin;
            const float *from = nn_read(lookups[l].table, first, size, room[1]);
            if (l == 0) {
                memcpy(to, from, (size_t)size * sizeof *to);
                continue;
            }
            NN_SIMD
            for (int64_t c = 0; c < size; c++) {
                to[c] += from[c];
            }
        }
        nn_close(y, row * channels + begin, size, to);
    }
}

/* y (rows, channels) */
NN_API int nn_embedding_kernel(const ms_call *call, nn_values y, const nn_lookup *lookups,
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
        nn_embedding_row(nn_dest_of(y, 0.0f), lookups, lookup_count, r, channels);
    }
    return 0;
}

/* Rows of a matrix in blocks. */
NN_API int nn_decode_kernel(const ms_call *call, nn_values y, nn_coded from, const int32_t *index,
                            int64_t first, int64_t rows) {
    (void)call;
    if (index != NULL && nn_index_check(index, rows, from.rows, false) != 0) {
        return NN_ERROR_INDEX;
    }
    const int64_t piece = nn_piece(y.dtype, from.columns); // NN_ROOM is whole blocks
    NN_PARALLEL(rows * from.columns)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = index != NULL ? (int64_t)index[r] : first + r;
        const uint8_t *blocks = from.blocks + row * blocks_row_bytes(from.kind, from.columns);
        const nn_dest to = nn_dest_of(nn_from(y, r * from.columns), 0.0f);
        float room[NN_ROOM];
        for (int64_t begin = 0; begin < from.columns; begin += piece) {
            const int64_t size = nn_least(piece, from.columns - begin);
            float *values = nn_open(to, begin, size, room);
            blocks_decode(from.kind, blocks + blocks_row_bytes(from.kind, begin), size, values);
            nn_close(to, begin, size, values);
        }
    }
    return 0;
}

/* dtable (entries, channels), F32: for each entry the sum of the rows of dy (rows, channels) that
   took it, or += that. */
NN_API int nn_embedding_backward_kernel(const ms_call *call, nn_dest dtable,
                                        const nn_lookup *lookup, nn_values dy, int64_t rows,
                                        int64_t channels, float *work) {
    (void)call;
    (void)work;
    if (dtable.data == NULL) {
        return 0;
    }
    if (dtable.beta == 0.0f) {
        memset(dtable.data, 0, (size_t)(lookup->entries * channels) * nn_value_bytes(dtable.dtype));
    }
    const nn_dest sum = nn_dest_of(nn_values_at(dtable), 1.0f);
    NN_PARALLEL(rows * channels)
    for (int64_t begin = 0; begin < channels; begin += NN_COLUMNS) {
        const int64_t width = nn_least(NN_COLUMNS, channels - begin);
        float room[NN_COLUMNS];
        for (int64_t r = 0; r < rows; r++) {
            const float *from = nn_read(dy, r * channels + begin, width, room);
            nn_store(sum, nn_lookup_entry(lookup, r) * channels + begin, from, width);
        }
    }
    return 0;
}

/* Every row of y (rows, columns) becomes row, rounded. */
NN_API void nn_fill_rows_kernel(nn_values y, const float *row, int64_t rows, int64_t columns) {
    NN_PARALLEL(rows * columns)
    for (int64_t r = 0; r < rows; r++) {
        nn_store(nn_dest_of(y, 0.0f), r * columns, row, columns);
    }
}

/* sums (columns): of each column of x (rows, columns). */
NN_API void nn_column_sums_kernel(nn_dest sums, nn_values x, int64_t rows, int64_t columns) {
    if (sums.data == NULL) {
        return;
    }
    NN_PARALLEL(rows * columns)
    for (int64_t begin = 0; begin < columns; begin += NN_COLUMNS) {
        const int64_t width = nn_least(NN_COLUMNS, columns - begin);
        float room[NN_COLUMNS];
        float sum[NN_COLUMNS] = {0};
        for (int64_t r = 0; r < rows; r++) {
            const float *from = nn_read(x, r * columns + begin, width, room);
            NN_SIMD
            for (int64_t c = 0; c < width; c++) {
                sum[c] += from[c];
            }
        }
        nn_store(sums, begin, sum, width);
    }
}

/* A row of x, y (rows, width). */
NN_API void nn_layernorm_row(nn_dest y, nn_values x, int64_t row, const nn_norm *n) {
    const int64_t width = n->width;
    const int64_t piece = nn_piece(x.dtype, width);
    float room[2][NN_ROOM];
    const float m = nn_sum_of(x, row * width, width) / (float)width;
    const float squares = nn_squares_of(x, row * width, m, width);
    const float s = 1.0f / sqrtf(squares / (float)width + n->epsilon);
    for (int64_t begin = 0; begin < width; begin += piece) {
        const int64_t size = nn_least(piece, width - begin);
        const float *from = nn_read(x, row * width + begin, size, room[0]);
        float *to = nn_open(y, row * width + begin, size, room[1]);
        const float *weight = n->weight + begin;
        const float *bias = n->bias + begin;
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            to[i] = (from[i] - m) * s * weight[i] + bias[i];
        }
        nn_close(y, row * width + begin, size, to);
    }
    n->mean[row] = m;
    n->rstd[row] = s;
}

/* The same without a mean and a bias. */
NN_API void nn_rmsnorm_row(nn_dest y, nn_values x, int64_t row, const nn_norm *n) {
    const int64_t width = n->width, first = nn_row_place(n, row);
    const int64_t piece = nn_piece(x.dtype, width);
    const float one = n->from_one ? 1.0f : 0.0f;
    float room[2][NN_ROOM];
    const float squares = nn_squares_of(x, first, 0.0f, width);
    const float s = 1.0f / sqrtf(squares / (float)width + n->epsilon);
    for (int64_t begin = 0; begin < width; begin += piece) {
        const int64_t size = nn_least(piece, width - begin);
        const float *from = nn_read(x, first + begin, size, room[0]);
        float *to = nn_open(y, first + begin, size, room[1]);
        const float *weight = n->weight + begin;
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            to[i] = from[i] * s * (weight[i] + one);
        }
        nn_close(y, first + begin, size, to);
    }
    n->rstd[row] = s;
}

/* y may be x. */
NN_API int nn_layernorm_kernel(const ms_call *call, nn_values y, nn_values x, const nn_norm *n) {
    (void)call;
    NN_PARALLEL(n->rows * n->width)
    for (int64_t r = 0; r < n->rows; r++) {
        if (n->mean != NULL) {
            nn_layernorm_row(nn_dest_of(y, 0.0f), x, r, n);
        } else {
            nn_rmsnorm_row(nn_dest_of(y, 0.0f), x, r, n);
        }
    }
    return 0;
}

/* Gradients of weight and bias (width each), from x, dy (rows, width). */
NN_API void nn_layernorm_param_kernel(nn_dest dweight, nn_dest dbias, nn_values dy, nn_values x,
                                      const nn_norm *n) {
    const int64_t rows = n->rows;
    const int64_t width = n->width;
    const float *rstd = n->rstd;
    nn_column_sums_kernel(dbias, dy, rows, width);
    if (dweight.data == NULL) {
        return;
    }
    NN_PARALLEL(rows * width)
    for (int64_t begin = 0; begin < width; begin += NN_COLUMNS) {
        const int64_t size = nn_least(NN_COLUMNS, width - begin);
        float room[2][NN_COLUMNS];
        float sum[NN_COLUMNS] = {0};
        for (int64_t r = 0; r < rows; r++) {
            const int64_t first = nn_row_place(n, r) + begin;
            const float mean = n->mean != NULL ? n->mean[r] : 0.0f;
            const float *from = nn_read(x, first, size, room[0]);
            const float *slope = nn_read(dy, first, size, room[1]);
            NN_SIMD
            for (int64_t c = 0; c < size; c++) {
                sum[c] += slope[c] * ((from[c] - mean) * rstd[r]);
            }
        }
        nn_store(dweight, begin, sum, size);
    }
}

/* A row of the gradient of x. */
NN_API void nn_layernorm_backward_row(nn_dest dx, nn_values dy, nn_values x, int64_t row,
                                      const nn_norm *n) {
    const int64_t width = n->width;
    const int64_t piece = nn_piece(x.dtype, width);
    const bool adds = dx.beta != 0.0f;
    const float m = n->mean[row];
    const float s = n->rstd[row];
    float room[3][NN_ROOM];
    float mean_slope = 0.0f;
    float product = 0.0f;
    for (int64_t begin = 0; begin < width; begin += piece) {
        const int64_t size = nn_least(piece, width - begin);
        const float *from = nn_read(x, row * width + begin, size, room[0]);
        const float *slope = nn_read(dy, row * width + begin, size, room[1]);
        const float *weight = n->weight + begin;
        float products;
        NN_SUM(products, i, size, slope[i] * weight[i] * ((from[i] - m) * s));
        mean_slope += nn_dot(slope, weight, size);
        product += products;
    }
    mean_slope /= (float)width;
    product /= (float)width;
    for (int64_t begin = 0; begin < width; begin += piece) {
        const int64_t size = nn_least(piece, width - begin);
        const float *from = nn_read(x, row * width + begin, size, room[0]);
        const float *slope = nn_read(dy, row * width + begin, size, room[1]);
        const float *weight = n->weight + begin;
        float *to = nn_open(dx, row * width + begin, size, room[2]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            const float normal = (from[i] - m) * s;
            const float value = (slope[i] * weight[i] - mean_slope - normal * product) * s;
            to[i] = adds ? to[i] + value : value;
        }
        nn_close(dx, row * width + begin, size, to);
    }
}

/* The same without a mean. */
NN_API void nn_rmsnorm_backward_row(nn_dest dx, nn_values dy, nn_values x, int64_t row,
                                    const nn_norm *n) {
    const int64_t width = n->width, first = nn_row_place(n, row);
    const int64_t piece = nn_piece(x.dtype, width);
    const bool adds = dx.beta != 0.0f;
    const float one = n->from_one ? 1.0f : 0.0f;
    const float s = n->rstd[row];
    float room[3][NN_ROOM];
    float product = 0.0f;
    for (int64_t begin = 0; begin < width; begin += piece) {
        const int64_t size = nn_least(piece, width - begin);
        const float *from = nn_read(x, first + begin, size, room[0]);
        const float *slope = nn_read(dy, first + begin, size, room[1]);
        const float *weight = n->weight + begin;
        float products;
        NN_SUM(products, i, size, slope[i] * (weight[i] + one) * (from[i] * s));
        product += products;
    }
    product /= (float)width;
    for (int64_t begin = 0; begin < width; begin += piece) {
        const int64_t size = nn_least(piece, width - begin);
        const float *from = nn_read(x, first + begin, size, room[0]);
        const float *slope = nn_read(dy, first + begin, size, room[1]);
        const float *weight = n->weight + begin;
        float *to = nn_open(dx, first + begin, size, room[2]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            const float value = (slope[i] * (weight[i] + one) - from[i] * s * product) * s;
            to[i] = adds ? to[i] + value : value;
        }
        nn_close(dx, first + begin, size, to);
    }
}

/* Gradients from x, dy (rows, width). That of x comes last, as dx may be dy or x. */
NN_API int nn_layernorm_backward_kernel(const ms_call *call, nn_dest dx, nn_dest dweight,
                                        nn_dest dbias, nn_values dy, nn_values x, const nn_norm *n,
                                        float *work) {
    (void)call;
    (void)work;
    nn_layernorm_param_kernel(dweight, dbias, dy, x, n);
    if (dx.data == NULL) {
        return 0;
    }
    NN_PARALLEL(n->rows * n->width)
    for (int64_t r = 0; r < n->rows; r++) {
        if (n->mean != NULL) {
            nn_layernorm_backward_row(dx, dy, x, r, n);
        } else {
            nn_rmsnorm_backward_row(dx, dy, x, r, n);
        }
    }
    return 0;
}

/* x (count) becomes exp(x - shift); returns the sum. */
NN_API float nn_exp_row(float *x, float shift, int64_t count) {
    NN_SIMD
    for (int64_t i = 0; i < count; i++) {
        x[i] = nn_exp(x[i] - shift);
    }
    return nn_sum(x, count);
}

/* Sum of exp(x - shift). */
NN_API float nn_exp_sum(nn_values x, int64_t first, float shift, int64_t count) {
    float total = 0.0f;
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        float room[NN_CHUNK];
        float value[NN_CHUNK];
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        const float *from = nn_read(x, first + begin, size, room);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            value[i] = nn_exp(from[i] - shift);
        }
        total += nn_sum(value, size);
    }
    return total;
}

/* losses (rows), stats (rows, 2): maximum and log of the sum of exp(logits - maximum). */
NN_API int nn_cross_entropy_kernel(const ms_call *call, float *losses, float *stats,
                                   nn_values logits, const int32_t *targets, int64_t rows,
                                   int64_t classes) {
    (void)call;
    if (nn_index_check(targets, rows, classes, true) != 0) {
        return NN_ERROR_INDEX;
    }
    NN_PARALLEL(rows * classes)
    for (int64_t r = 0; r < rows; r++) {
        float most = 0.0f;
        float log_sum = 0.0f;
        float loss = 0.0f;
        if (targets[r] >= 0) {
            most = nn_max_of(logits, r * classes, classes);
            log_sum = logf(nn_exp_sum(logits, r * classes, most, classes));
            loss = log_sum - (nn_get(logits, r * classes + targets[r]) - most);
        }
        losses[r] = loss;
        stats[2 * r] = most;
        stats[2 * r + 1] = log_sum;
    }
    return 0;
}

/* A row of dlogits that is not ignored; stats are those of the row. */
NN_API void nn_cross_entropy_backward_row(nn_dest dlogits, float slope, const float *stats,
                                          nn_values logits, int64_t target, int64_t first,
                                          int64_t classes) {
    const int64_t piece = nn_piece(logits.dtype, classes);
    const bool adds = dlogits.beta != 0.0f;
    const float most = stats[0];
    const float log_sum = stats[1];
    float room[2][NN_ROOM];
    for (int64_t begin = 0; begin < classes; begin += piece) {
        const int64_t size = nn_least(piece, classes - begin);
        const float *row = nn_read(logits, first + begin, size, room[0]);
        float *to = nn_open(dlogits, first + begin, size, room[1]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            const float value = slope * nn_exp(row[i] - most - log_sum);
            to[i] = adds ? to[i] + value : value;
        }
        if (target >= begin && target < begin + size) {
            to[target - begin] -= slope;
        }
        nn_close(dlogits, first + begin, size, to);
    }
}

/* dlogits (rows, classes) from dlosses (rows); dlogits may be logits. */
NN_API int nn_cross_entropy_backward_kernel(const ms_call *call, nn_dest dlogits,
                                            const float *dlosses, const float *stats,
                                            nn_values logits, const int32_t *targets, int64_t rows,
                                            int64_t classes) {
    (void)call;
    if (dlogits.data == NULL) {
        return 0;
    }
    NN_PARALLEL(rows * classes)
    for (int64_t r = 0; r < rows; r++) {
        if (targets[r] >= 0) {
            nn_cross_entropy_backward_row(dlogits, dlosses[r], stats + 2 * r, logits, targets[r],
                                          r * classes, classes);
        } else if (dlogits.beta == 0.0f) {
            memset(nn_from(nn_values_at(dlogits), r * classes).data, 0,
                   (size_t)classes * nn_value_bytes(dlogits.dtype));
        }
    }
    return 0;
}

NN_API int nn_copy_columns_kernel(const ms_call *call, nn_dest y, nn_values x, int64_t rows,
                                  nn_column_range c) {
    (void)call;
    if (y.data == NULL || (y.data == x.data && y.beta == 0.0f)) {
        return 0;
    }
    const int64_t piece = nn_piece(x.dtype, c.count);
    NN_PARALLEL(rows * c.count)
    for (int64_t r = 0; r < rows; r++) {
        float room[NN_ROOM];
        for (int64_t begin = 0; begin < c.count; begin += piece) {
            const int64_t size = nn_least(piece, c.count - begin);
            const int64_t first = r * c.stride + c.first + begin;
            nn_store(y, first, nn_read(x, first, size, room), size);
        }
    }
    return 0;
}

/* to = from turned by angles of which cosine and sine are given, or += that; to may be from. */
NN_API void nn_turn_head(float *to, const float *from, const nn_turns *n, const float *cosine,
                         const float *sine, bool adds) {
    const int64_t apart = nn_pair_apart(n);
    NN_SIMD
    for (int64_t i = 0; i < n->pairs; i++) {
        const int64_t at = nn_pair_place(n, i);
        const float a = from[at], b = from[at + apart];
        const float first = a * cosine[i] - b * sine[i];
        const float second = b * cosine[i] + a * sine[i];
        to[at] = adds ? to[at] + first : first;
        to[at + apart] = adds ? to[at + apart] + second : second;
    }
}

NN_API void nn_turn_row(nn_dest y, nn_values x, const nn_turns *n, int64_t row) {
    const float time = (float)((n->first + row) % n->period);
    const int64_t turned = 2 * n->pairs;
    float cosine[NN_PAIRS], sine[NN_PAIRS], room[2][2 * NN_PAIRS];
    for (int64_t i = 0; i < n->pairs; i++) {
        cosine[i] = cosf(time * n->inverse[i]);
        sine[i] = n->back ? -sinf(time * n->inverse[i]) : sinf(time * n->inverse[i]);
    }
    for (int64_t head = 0; head < n->heads; head++) {
        const int64_t first = row * n->columns + head * n->size;
        const float *from = nn_read(x, first, turned, room[0]);
        float *to = nn_open(y, first, turned, room[1]);
        nn_turn_head(to, from, n, cosine, sine, y.beta != 0.0f);
        nn_close(y, first, turned, to);
    }
}

NN_API int nn_rotary_kernel(const ms_call *call, nn_dest y, nn_values x, const nn_turns *n) {
    (void)call;
    if (y.data == NULL) {
        return 0;
    }
    NN_PARALLEL(n->rows * n->columns)
    for (int64_t r = 0; r < n->rows; r++) {
        nn_turn_row(y, x, n, r);
    }
    return 0;
}

NN_API int nn_gated_kernel(const ms_call *call, nn_values y, nn_values gate, nn_values up,
                           int64_t count, nn_gate kind) {
    (void)call;
    const nn_dest out = nn_dest_of(y, 0.0f);
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[3][NN_CHUNK];
        const float *g = nn_read(gate, begin, size, room[0]);
        const float *u = nn_read(up, begin, size, room[1]);
        float *to = nn_open(out, begin, size, room[2]);
        if (kind == NN_GATE_SILU) {
            NN_SIMD
            for (int64_t i = 0; i < size; i++) {
                to[i] = nn_silu_value(g[i]) * u[i];
            }
        } else {
            NN_SIMD
            for (int64_t i = 0; i < size; i++) {
                to[i] = nn_gelu_tanh_value(g[i]) * u[i];
            }
        }
        nn_close(out, begin, size, to);
    }
    return 0;
}

/* A chunk of both gradients. That of what is not wanted is computed too, in a room. */
NN_API void nn_gated_backward_chunk(float *dgate, float *dup, const float *dy, const float *gate,
                                    const float *up, int64_t size, nn_gate kind) {
    if (kind == NN_GATE_SILU) {
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            const float g = gate[i], u = up[i], d = dy[i];
            dgate[i] = d * u * nn_silu_slope(g);
            dup[i] = d * nn_silu_value(g);
        }
    } else {
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            const float g = gate[i], u = up[i], d = dy[i];
            dgate[i] = d * u * nn_gelu_tanh_slope(g);
            dup[i] = d * nn_gelu_tanh_value(g);
        }
    }
}

/* Both gradients are stored after all operands of a chunk have been read. */
NN_API int nn_gated_backward_kernel(const ms_call *call, nn_dest dgate, nn_dest dup, nn_values dy,
                                    nn_values gate, nn_values up, int64_t count, nn_gate kind) {
    (void)call;
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[5][NN_CHUNK];
        const float *d = nn_read(dy, begin, size, room[0]);
        const float *g = nn_read(gate, begin, size, room[1]);
        const float *u = nn_read(up, begin, size, room[2]);
        nn_gated_backward_chunk(room[3], room[4], d, g, u, size, kind);
        if (dgate.data != NULL) {
            nn_store(dgate, begin, room[3], size);
        }
        if (dup.data != NULL) {
            nn_store(dup, begin, room[4], size);
        }
    }
    return 0;
}

/* y = x * factor, or += that; y may be x. */
NN_API int nn_scale_kernel(const ms_call *call, nn_dest y, nn_values x, int64_t count,
                           float factor) {
    (void)call;
    const bool adds = y.beta != 0.0f;
    if (y.data == NULL) {
        return 0;
    }
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[2][NN_CHUNK];
        const float *from = nn_read(x, begin, size, room[0]);
        float *to = nn_open(y, begin, size, room[1]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            const float value = from[i] * factor;
            to[i] = adds ? to[i] + value : value;
        }
        nn_close(y, begin, size, to);
    }
    return 0;
}

NN_API int nn_softcap_kernel(const ms_call *call, nn_values y, nn_values x, int64_t count,
                             float cap) {
    (void)call;
    const nn_dest out = nn_dest_of(y, 0.0f);
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[2][NN_CHUNK];
        const float *from = nn_read(x, begin, size, room[0]);
        float *to = nn_open(out, begin, size, room[1]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            to[i] = nn_cap_value(from[i], cap);
        }
        nn_close(out, begin, size, to);
    }
    return 0;
}

/* dx may be dy or y. */
NN_API int nn_softcap_backward_kernel(const ms_call *call, nn_dest dx, nn_values dy, nn_values y,
                                      int64_t count, float cap) {
    (void)call;
    const bool adds = dx.beta != 0.0f;
    if (dx.data == NULL) {
        return 0;
    }
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[3][NN_CHUNK];
        const float *slope = nn_read(dy, begin, size, room[0]);
        const float *out = nn_read(y, begin, size, room[1]);
        float *to = nn_open(dx, begin, size, room[2]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            const float value = slope[i] * nn_cap_slope(out[i], cap);
            to[i] = adds ? to[i] + value : value;
        }
        nn_close(dx, begin, size, to);
    }
    return 0;
}

/* y may be x. */
NN_API int nn_relu_kernel(const ms_call *call, nn_values y, nn_values x, int64_t count) {
    (void)call;
    const nn_dest out = nn_dest_of(y, 0.0f);
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[2][NN_CHUNK];
        const float *from = nn_read(x, begin, size, room[0]);
        float *to = nn_open(out, begin, size, room[1]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            to[i] = nn_relu_value(from[i]);
        }
        nn_close(out, begin, size, to);
    }
    return 0;
}

/* dx = dy where y, the output, is above 0, or dx += that; dx may be y or dy. */
NN_API int nn_relu_backward_kernel(const ms_call *call, nn_dest dx, nn_values dy, nn_values y,
                                   int64_t count) {
    (void)call;
    if (dx.data == NULL) {
        return 0;
    }
    const bool adds = dx.beta != 0.0f;
    NN_PARALLEL(count)
    for (int64_t begin = 0; begin < count; begin += NN_CHUNK) {
        const int64_t size = nn_least(NN_CHUNK, count - begin);
        float room[3][NN_CHUNK];
        const float *above = nn_read(dy, begin, size, room[0]);
        const float *from = nn_read(y, begin, size, room[1]);
        float *to = nn_open(dx, begin, size, room[2]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            const float slope = from[i] > 0.0f ? above[i] : 0.0f;
            to[i] = adds ? to[i] + slope : slope;
        }
        nn_close(dx, begin, size, to);
    }
    return 0;
}

/* sums (channels): over images and plane of x. */
NN_API void nn_channel_sums_kernel(nn_dest sums, nn_values x, nn_planes n) {
    if (sums.data == NULL) {
        return;
    }
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t c = 0; c < n.channels; c++) {
        double total = 0.0;
        for (int64_t b = 0; b < n.images; b++) {
            total += (double)nn_sum_of(x, (b * n.channels + c) * n.plane, n.plane);
        }
        const float sum = (float)total;
        nn_store(sums, c, &sum, 1);
    }
}

/* means (images, channels) of the planes of x. */
NN_API int nn_average_kernel(const ms_call *call, nn_values means, nn_values x, nn_planes n) {
    (void)call;
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t i = 0; i < n.images * n.channels; i++) {
        nn_set(means, i, nn_sum_of(x, i * n.plane, n.plane) / (float)n.plane);
    }
    return 0;
}

NN_API void nn_average_backward_plane(nn_dest dx, float slope, int64_t first, int64_t plane) {
    const int64_t piece = nn_piece(dx.dtype, plane);
    const bool adds = dx.beta != 0.0f;
    float room[NN_ROOM];
    for (int64_t begin = 0; begin < plane; begin += piece) {
        const int64_t size = nn_least(piece, plane - begin);
        float *to = nn_open(dx, first + begin, size, room);
        NN_SIMD
        for (int64_t k = 0; k < size; k++) {
            to[k] = adds ? to[k] + slope : slope;
        }
        nn_close(dx, first + begin, size, to);
    }
}

NN_API int nn_average_backward_kernel(const ms_call *call, nn_dest dx, nn_values dmeans,
                                      nn_planes n) {
    (void)call;
    if (dx.data == NULL) {
        return 0;
    }
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t i = 0; i < n.images * n.channels; i++) {
        nn_average_backward_plane(dx, nn_get(dmeans, i) / (float)n.plane, i * n.plane, n.plane);
    }
    return 0;
}

NN_API void nn_channel_moments(nn_values x, int64_t channel, nn_planes n, float *mean,
                               float *variance) {
    const double count = (double)(n.images * n.plane);
    double total = 0.0;
    for (int64_t b = 0; b < n.images; b++) {
        total += (double)nn_sum_of(x, (b * n.channels + channel) * n.plane, n.plane);
    }
    const float m = (float)(total / count);
    total = 0.0;
    for (int64_t b = 0; b < n.images; b++) {
        total += (double)nn_squares_of(x, (b * n.channels + channel) * n.plane, m, n.plane);
    }
    *mean = m;
    *variance = (float)(total / count);
}

/* Mean and 1 / sqrt(variance + epsilon) of a channel, from where v->moments says. */
NN_API void nn_batch_norm_moments(const nn_batch_norm_values *v, nn_values x, int64_t channel,
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

/* The plane of y that begins with element `first`. */
NN_API void nn_batch_norm_plane(nn_dest y, nn_values x, int64_t first, int64_t plane, float mean,
                                float rstd, float weight, float bias) {
    const int64_t piece = nn_piece(x.dtype, plane);
    float room[2][NN_ROOM];
    for (int64_t begin = 0; begin < plane; begin += piece) {
        const int64_t size = nn_least(piece, plane - begin);
        const float *from = nn_read(x, first + begin, size, room[0]);
        float *to = nn_open(y, first + begin, size, room[1]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            to[i] = (from[i] - mean) * rstd * weight + bias;
        }
        nn_close(y, first + begin, size, to);
    }
}

/* y may be x. The loop is the same for all v->moments, so that a recomputation gives the same
   bits as forward. */
NN_API int nn_batch_norm_kernel(const ms_call *call, nn_values y, nn_values x,
                                const nn_batch_norm_values *v, nn_planes n, float *work) {
    (void)call;
    (void)work;
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t c = 0; c < n.channels; c++) {
        float mean;
        float rstd;
        nn_batch_norm_moments(v, x, c, n, &mean, &rstd);
        for (int64_t b = 0; b < n.images; b++) {
            nn_batch_norm_plane(nn_dest_of(y, 0.0f), x, (b * n.channels + c) * n.plane, n.plane,
                                mean, rstd, v->weight[c], v->bias[c]);
        }
    }
    return 0;
}

/* One plane of a channel: adds to *slopes and *products the sums of dy, and of dy times
   (x - mean) * rstd. */
NN_API void nn_batch_norm_sums(nn_values dy, nn_values x, int64_t first, int64_t plane, float mean,
                               float rstd, double *slopes, double *products) {
    const int64_t piece = nn_piece(x.dtype, plane);
    float room[2][NN_ROOM];
    for (int64_t begin = 0; begin < plane; begin += piece) {
        const int64_t size = nn_least(piece, plane - begin);
        const float *from = nn_read(x, first + begin, size, room[0]);
        const float *above = nn_read(dy, first + begin, size, room[1]);
        float product;
        NN_SUM(product, i, size, above[i] * ((from[i] - mean) * rstd));
        *products += (double)product;
        *slopes += (double)nn_sum(above, size);
    }
}

/* One plane of the gradient of x; slope and product are the channel's gradients of bias and
   weight divided by the number of its values. */
NN_API void nn_batch_norm_backward_plane(nn_dest dx, nn_values dy, nn_values x,
                                         const nn_batch_norm_values *v, int64_t channel,
                                         int64_t first, int64_t plane, float slope, float product) {
    const int64_t piece = nn_piece(x.dtype, plane);
    const bool adds = dx.beta != 0.0f;
    const float mean = v->mean[channel];
    const float rstd = v->rstd[channel];
    const float scale = rstd * v->weight[channel];
    float room[3][NN_ROOM];
    for (int64_t begin = 0; begin < plane; begin += piece) {
        const int64_t size = nn_least(piece, plane - begin);
        const float *from = nn_read(x, first + begin, size, room[0]);
        const float *above = nn_read(dy, first + begin, size, room[1]);
        float *to = nn_open(dx, first + begin, size, room[2]);
        NN_SIMD
        for (int64_t i = 0; i < size; i++) {
            const float normal = (from[i] - mean) * rstd;
            const float value = (above[i] - slope - normal * product) * scale;
            to[i] = adds ? to[i] + value : value;
        }
        nn_close(dx, first + begin, size, to);
    }
}

/* Gradients from x, dy and the saved mean and rstd; dx may be dy or x. */
NN_API int nn_batch_norm_backward_kernel(const ms_call *call, nn_dest dx, nn_dest dweight,
                                         nn_dest dbias, nn_values dy, nn_values x,
                                         const nn_batch_norm_values *v, nn_planes n, float *work) {
    (void)call;
    (void)work;
    NN_PARALLEL(nn_planes_count(n))
    for (int64_t c = 0; c < n.channels; c++) {
        const double count = (double)(n.images * n.plane);
        double slopes = 0.0;
        double products = 0.0;
        for (int64_t b = 0; b < n.images; b++) {
            nn_batch_norm_sums(dy, x, (b * n.channels + c) * n.plane, n.plane, v->mean[c],
                               v->rstd[c], &slopes, &products);
        }
        const float sums[2] = {(float)slopes, (float)products};
        if (dbias.data != NULL) {
            nn_store(dbias, c, &sums[0], 1);
        }
        if (dweight.data != NULL) {
            nn_store(dweight, c, &sums[1], 1);
        }
        for (int64_t b = 0; b < n.images && dx.data != NULL; b++) {
            nn_batch_norm_backward_plane(dx, dy, x, v, c, (b * n.channels + c) * n.plane, n.plane,
                                         (float)(slopes / count), (float)(products / count));
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
   left its pixel in the first patch; only the patches `across` have it inside the image. Zeros have
   the same bits in all dtypes. */
NN_API void nn_column_row(nn_values to, nn_values from, int64_t left, nn_span across,
                          const nn_window *w) {
    const size_t bytes = nn_value_bytes(to.dtype);
    const int64_t inside = across.end - across.begin;
    memset(to.data, 0, (size_t)across.begin * bytes);
    if (w->stride == 1 && inside > 0) {
        memcpy(nn_from(to, across.begin).data, nn_from(from, across.begin + left).data,
               (size_t)inside * bytes);
    } else if (to.dtype == MS_DTYPE_F32) {
        for (int64_t x = across.begin; x < across.end; x++) {
            ((float *)to.data)[x] = ((const float *)from.data)[x * w->stride + left];
        }
    } else {
        for (int64_t x = across.begin; x < across.end; x++) {
            ((uint16_t *)to.data)[x] = ((const uint16_t *)from.data)[x * w->stride + left];
        }
    }
    memset(nn_from(to, across.end).data, 0, (size_t)(w->out_width - across.end) * bytes);
}

/* columns (channels * kernel * kernel, rows.count * out_width) of one image: row (c, i, j) has
   element (i, j) of each of these patches in channel c. */
NN_API void nn_columns_kernel(nn_values columns, nn_values image, nn_patch_rows rows,
                              const nn_window *w) {
    const int64_t area = w->kernel * w->kernel;
    for (int64_t row = 0; row < w->channels * area; row++) {
        const int64_t top = row % area / w->kernel - w->padding;
        const int64_t left = row % w->kernel - w->padding;
        const nn_span down = nn_span_of(top, w->stride, w->height, w->out_height);
        const nn_span across = nn_span_of(left, w->stride, w->width, w->out_width);
        for (int64_t i = 0; i < rows.count; i++) {
            const int64_t y = rows.begin + i;
            const nn_values to = nn_from(columns, (row * rows.count + i) * w->out_width);
            if (y < down.begin || y >= down.end) {
                memset(to.data, 0, (size_t)w->out_width * nn_value_bytes(to.dtype));
            } else {
                const int64_t line = row / area * w->height + y * w->stride + top;
                nn_column_row(to, nn_from(image, line * w->width), left, across, w);
            }
        }
    }
}

/* The rows of pixels that these rows of patches cover. */
NN_API nn_span nn_covered_rows(nn_patch_rows rows, const nn_window *w) {
    const int64_t top = rows.begin * w->stride - w->padding;
    nn_span span;
    span.end = nn_most(nn_least(top + (rows.count - 1) * w->stride + w->kernel, w->height), 0);
    span.begin = nn_least(nn_most(top, 0), span.end);
    return span;
}

/* The reverse, for gradients: adds to each pixel of one image all of its copies in columns. Those
   of a channel are added up in room, if the image has 16 bits. */
NN_API void nn_columns_backward_kernel(nn_values image, const float *columns, nn_patch_rows rows,
                                       float *room, const nn_window *w) {
    const int64_t area = w->kernel * w->kernel;
    const nn_dest out = nn_dest_of(image, 1.0f);
    const nn_span covered = nn_covered_rows(rows, w);
    const int64_t count = (covered.end - covered.begin) * w->width;
    float *pixels = NULL;
    for (int64_t row = 0; row < w->channels * area; row++) {
        const int64_t first = (row / area * w->height + covered.begin) * w->width;
        const int64_t top = row % area / w->kernel - w->padding;
        const int64_t left = row % w->kernel - w->padding;
        const nn_span down = nn_span_of(top, w->stride, w->height, w->out_height);
        const nn_span across = nn_span_of(left, w->stride, w->width, w->out_width);
        if (row % area == 0) {
            pixels = nn_open(out, first, count, room);
        }
        for (int64_t i = 0; i < rows.count; i++) {
            const int64_t y = rows.begin + i;
            if (y < down.begin || y >= down.end) {
                continue;
            }
            const float *from = columns + (row * rows.count + i) * w->out_width;
            float *to = pixels + (y * w->stride + top - covered.begin) * w->width;
            NN_SIMD
            for (int64_t x = across.begin; x < across.end; x++) {
                to[x * w->stride + left] += from[x];
            }
        }
        if (row % area == area - 1) {
            nn_close(out, first, count, pixels);
        }
    }
}

/* y (images, channels, out_height, out_width), and the places of its values in the planes of x;
   places may be NULL. */
NN_API int nn_max_pool_kernel(const ms_call *call, nn_values y, int32_t *places, nn_values x,
                              const nn_window *w) {
    (void)call;
    const int64_t plane = w->height * w->width;
    NN_PARALLEL(w->images * w->channels * plane)
    for (int64_t p = 0; p < w->images * w->channels; p++) {
        const nn_values from = nn_from(x, p * plane);
        for (int64_t i = 0; i < w->out_height; i++) {
            for (int64_t k = 0; k < w->out_width; k++) {
                const int64_t at = (p * w->out_height + i) * w->out_width + k;
                const int64_t place = nn_largest_place(from, w, i, k);
                nn_set(y, at, nn_get(from, place));
                if (places != NULL) {
                    places[at] = (int32_t)place;
                }
            }
        }
    }
    return 0;
}

/* One plane: goes through the gradients of its patches for each piece of its pixels. */
NN_API void nn_max_pool_backward_plane(nn_dest dx, nn_values dy, const int32_t *places,
                                       int64_t index, const nn_window *w) {
    const int64_t plane = w->height * w->width;
    const int64_t patches = nn_window_patches(w);
    const int64_t piece = nn_piece(dx.dtype, plane);
    float room[NN_ROOM];
    for (int64_t begin = 0; begin < plane; begin += piece) {
        const int64_t size = nn_least(piece, plane - begin);
        float *to = nn_open(dx, index * plane + begin, size, room);
        if (dx.beta == 0.0f) {
            memset(to, 0, (size_t)size * sizeof *to);
        }
        for (int64_t i = index * patches; i < (index + 1) * patches; i++) {
            if (places[i] >= begin && places[i] < begin + size) {
                to[places[i] - begin] += nn_get(dy, i);
            }
        }
        nn_close(dx, index * plane + begin, size, to);
    }
}

NN_API int nn_max_pool_backward_kernel(const ms_call *call, nn_dest dx, nn_values dy,
                                       const int32_t *places, const nn_window *w) {
    (void)call;
    if (dx.data == NULL) {
        return 0;
    }
    NN_PARALLEL(w->images * w->channels * w->height * w->width)
    for (int64_t p = 0; p < w->images * w->channels; p++) {
        nn_max_pool_backward_plane(dx, dy, places, p, w);
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
NN_API int nn_linear_kernel(const ms_call *call, nn_values y, nn_values x, nn_values weight,
                            const float *bias, nn_linear_size n) {
    if (bias != NULL) {
        nn_fill_rows_kernel(y, bias, n.rows, n.out);
    }
    return (int)ms_gemm(call, 1.0f, nn_matrix(x, n.rows, n.in, n.in),
                        ms_transpose(nn_matrix(weight, n.out, n.in, n.in)),
                        bias != NULL ? 1.0f : 0.0f, nn_matrix(y, n.rows, n.out, n.out));
}

NN_API int nn_linear_gelu_kernel(const ms_call *call, nn_values y, nn_values h, nn_values x,
                                 nn_values weight, const float *bias, nn_linear_size n,
                                 bool erf_form) {
    const int result = nn_linear_kernel(call, h, x, weight, bias, n);
    return result != 0 ? result : nn_gelu_kernel(call, y, h, n.rows * n.out, erf_form);
}

NN_API int nn_linear_add_kernel(const ms_call *call, nn_values y, nn_values residual, nn_values x,
                                nn_values weight, const float *bias, nn_linear_size n,
                                const nn_drop *drop) {
    int result = nn_linear_kernel(call, y, x, weight, bias, n);
    if (result == 0 && drop->probability > 0.0f) {
        result = nn_dropout_kernel(call, nn_dest_of(y, 0.0f), y, n.rows * n.out, drop->probability,
                                   drop->seed);
    }
    return result != 0 ? result : nn_add_kernel(call, y, residual, y, n.rows * n.out);
}

/* dx = dy * weight, dweight = transpose(dy) * x, dbias = column sums of dy. */
NN_API int nn_linear_backward_kernel(const ms_call *call, nn_dest dx, nn_dest dweight,
                                     nn_dest dbias, nn_values dy, nn_values x, nn_values weight,
                                     nn_linear_size n, float *work) {
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

/* Floats of scratch memory per worker: a band of probabilities; in backward that of their
   gradients, and the gradients of keys and values. */
NN_API int64_t nn_attention_worker_floats(nn_attention_size n, bool backward) {
    const int64_t band = nn_least(NN_QUERIES, n.sequence) * n.sequence;
    return backward ? band + 2 * n.sequence * n.size : band;
}

NN_API int64_t nn_attention_cost(nn_attention_size n) {
    return n.batch * n.heads * n.sequence * n.sequence * n.size;
}

/* Floats of scratch memory. */
NN_API int64_t nn_cpu_attention_floats(nn_attention_size n, bool backward) {
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
    const int64_t row = (head / n.heads) * n.sequence;
    const int64_t column = (head % n.heads) * n.size;
    nn_band band;
    band.begin = begin;
    band.rows = nn_least(NN_QUERIES, n.sequence - begin);
    band.keys = n.causal ? begin + band.rows : n.sequence;
    band.qkv_stride = nn_attention_columns(&n);
    band.o_stride = nn_attention_width(&n);
    band.q = (row + begin) * band.qkv_stride + column;
    band.k = row * band.qkv_stride + nn_attention_keys(&n) + column;
    band.v = row * band.qkv_stride + nn_attention_values(&n) + column;
    band.o = (row + begin) * band.o_stride + column;
    band.scores = (head * n.sequence + begin) * n.sequence;
    return band;
}

/* p (rows of the band, sequence) = softmax(q k^T / sqrt(size)), 0 for keys after the query. */
NN_API int nn_scores_kernel(const ms_call *call, float *p, nn_values qkv, const nn_band *band,
                            nn_attention_size n) {
    const int result = (int)ms_gemm(
        call, n.scale, nn_matrix(nn_from(qkv, band->q), band->rows, n.size, band->qkv_stride),
        ms_transpose(nn_matrix(nn_from(qkv, band->k), band->keys, n.size, band->qkv_stride)), 0.0f,
        nn_matrix(nn_f32(p), band->rows, band->keys, n.sequence));
    for (int64_t r = 0; r < band->rows; r++) {
        float *row = p + r * n.sequence;
        const int64_t seen = n.causal ? band->begin + r + 1 : n.sequence;
        const float share = 1.0f / nn_exp_row(row, nn_max(row, seen), seen);
        NN_SIMD
        for (int64_t i = 0; i < seen; i++) {
            row[i] *= share;
        }
        memset(row + seen, 0, (size_t)(band->keys - seen) * sizeof *row);
    }
    return result;
}

/* Rows of floats, `stride` apart, as an operand of products with others of this dtype. If they have
   16 bits, each row is rounded to where it begins. */
NN_API ms_matrix nn_rows_matrix(float *x, ms_dtype dtype, int64_t rows, int64_t cols,
                                int64_t stride) {
    const nn_values to = nn_values_in(x, dtype);
    const int64_t to_stride = dtype == MS_DTYPE_F32 ? stride : 2 * stride;
    for (int64_t r = 0; r < rows && dtype != MS_DTYPE_F32; r++) {
        nn_round_row(nn_from(to, r * to_stride), x + r * stride, cols);
    }
    return nn_matrix(to, rows, cols, to_stride);
}

/* The probabilities of a band, which have been computed in work (rows, sequence), as an operand of
   products with others of this dtype. If they have 16 bits, each row is rounded to its place in
   `kept`, or, if kept.data is NULL, to where it begins. */
NN_API ms_matrix nn_band_matrix(float *work, nn_values kept, ms_dtype dtype, const nn_band *band,
                                nn_attention_size n) {
    if (kept.data == NULL) {
        return nn_rows_matrix(work, dtype, band->rows, band->keys, n.sequence);
    }
    const nn_values to = nn_from(kept, band->scores);
    for (int64_t r = 0; r < band->rows && dtype != MS_DTYPE_F32; r++) {
        nn_round_row(nn_from(to, r * n.sequence), work + r * n.sequence, band->keys);
    }
    return nn_matrix(to, band->rows, band->keys, n.sequence);
}

/* Where the probabilities of a band are computed: where they are kept, if they are kept in F32. */
NN_API float *nn_band_room(float *work, nn_values kept, const nn_band *band) {
    const bool direct = kept.data != NULL && kept.dtype == MS_DTYPE_F32;
    return direct ? (float *)kept.data + band->scores : work;
}

/* dp, the gradient of probabilities p, becomes that of q k^T. */
NN_API void nn_scores_backward_kernel(float *dp, ms_matrix p, const nn_band *band,
                                      nn_attention_size n) {
    const nn_values rows = nn_values_in(p.data, p.dtype);
    float room[NN_ROOM];
    for (int64_t r = 0; r < band->rows; r++) {
        float *to = dp + r * n.sequence;
        const int64_t seen = n.causal ? band->begin + r + 1 : n.sequence;
        const int64_t piece = nn_piece(p.dtype, seen);
        float mean = 0.0f;
        for (int64_t begin = 0; begin < seen; begin += piece) {
            const int64_t size = nn_least(piece, seen - begin);
            mean += nn_dot(nn_read(rows, r * p.stride + begin, size, room), to + begin, size);
        }
        for (int64_t begin = 0; begin < seen; begin += piece) {
            const int64_t size = nn_least(piece, seen - begin);
            const float *row = nn_read(rows, r * p.stride + begin, size, room);
            float *part = to + begin;
            NN_SIMD
            for (int64_t i = 0; i < size; i++) {
                part[i] = row[i] * (part[i] - mean) * n.scale;
            }
        }
        memset(to + seen, 0, (size_t)(band->keys - seen) * sizeof *to);
    }
}

/* One head of out (B, T, C) from qkv (B, T, 3C). scores (B, H, T, T) keeps the probabilities,
   except for keys after the band, which nothing reads; or its data is NULL. */
NN_API int nn_attention_head(const ms_call *call, nn_values out, nn_values scores, nn_values qkv,
                             float *work, int64_t head, nn_attention_size n) {
    int result = 0;
    for (int64_t begin = 0; begin < n.sequence && result == 0; begin += NN_QUERIES) {
        const nn_band band = nn_band_of(n, head, begin);
        float *p = nn_band_room(work, scores, &band);
        result = nn_scores_kernel(call, p, qkv, &band, n);
        if (result == 0) {
            result = (int)ms_gemm(
                call, 1.0f, nn_band_matrix(p, scores, qkv.dtype, &band, n),
                nn_matrix(nn_from(qkv, band.v), band.keys, n.size, band.qkv_stride), 0.0f,
                nn_matrix(nn_from(out, band.o), band.rows, n.size, band.o_stride));
        }
    }
    return result;
}

NN_API int nn_attention_kernel(const ms_call *call, nn_values out, nn_values scores, nn_values qkv,
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
NN_API int nn_attention_backward_band(const ms_call *call, nn_dest dqkv, nn_values dout,
                                      nn_values scores, nn_values qkv, float *work,
                                      const nn_band *band, nn_attention_size n) {
    float *dp = work;
    float *dk = dp + nn_least(NN_QUERIES, n.sequence) * n.sequence;
    float *dv = dk + n.sequence * n.size;
    const ms_matrix p =
        nn_matrix(nn_from(scores, band->scores), band->rows, band->keys, n.sequence);
    const ms_matrix slope = nn_matrix(nn_from(dout, band->o), band->rows, n.size, band->o_stride);
    int result = (int)ms_gemm(
        call, 1.0f, slope,
        ms_transpose(nn_matrix(nn_from(qkv, band->v), band->keys, n.size, band->qkv_stride)), 0.0f,
        nn_matrix(nn_f32(dp), band->rows, band->keys, n.sequence));
    result |= (int)ms_gemm(call, 1.0f, ms_transpose(p), slope, 1.0f,
                           nn_matrix(nn_f32(dv), band->keys, n.size, n.size));
    nn_scores_backward_kernel(dp, p, band, n);
    const ms_matrix ds = nn_rows_matrix(dp, qkv.dtype, band->rows, band->keys, n.sequence);
    result |= (int)ms_gemm(call, 1.0f, ms_transpose(ds),
                           nn_matrix(nn_from(qkv, band->q), band->rows, n.size, band->qkv_stride),
                           1.0f, nn_matrix(nn_f32(dk), band->keys, n.size, n.size));
    result |= (int)ms_gemm(
        call, 1.0f, ds, nn_matrix(nn_from(qkv, band->k), band->keys, n.size, band->qkv_stride),
        dqkv.beta,
        nn_matrix(nn_from(nn_values_at(dqkv), band->q), band->rows, n.size, band->qkv_stride));
    return result;
}

NN_API int nn_attention_backward_head(const ms_call *call, nn_dest dqkv, nn_values dout,
                                      nn_values scores, nn_values qkv, float *work, int64_t head,
                                      nn_attention_size n) {
    const nn_band first = nn_band_of(n, head, 0);
    float *dk = work + nn_least(NN_QUERIES, n.sequence) * n.sequence;
    float *dv = dk + n.sequence * n.size;
    memset(dk, 0, (size_t)(2 * n.sequence * n.size) * sizeof *dk);
    int result = 0;
    for (int64_t begin = 0; begin < n.sequence; begin += NN_QUERIES) {
        const nn_band band = nn_band_of(n, head, begin);
        result |= nn_attention_backward_band(call, dqkv, dout, scores, qkv, work, &band, n);
    }
    for (int64_t r = 0; r < n.sequence; r++) {
        nn_store(dqkv, first.k + r * first.qkv_stride, dk + r * n.size, n.size);
        nn_store(dqkv, first.v + r * first.qkv_stride, dv + r * n.size, n.size);
    }
    return result;
}

/* dqkv (B, T, 3C) from dout (B, T, C) and the probabilities that forward has kept. */
NN_API int nn_attention_backward_kernel(const ms_call *call, nn_dest dqkv, nn_values dout,
                                        nn_values scores, nn_values qkv, float *work,
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

/* Floats of scratch memory per worker: columns. */
NN_API int64_t nn_columns_floats(const nn_window *w) {
    return nn_is_pointwise(w) ? 0 : nn_window_depth(w) * nn_patch_rows_at_once(w) * w->out_width;
}

/* The pixels of a channel that these patches cover, at most. */
NN_API int64_t nn_covered_floats(const nn_window *w) {
    const int64_t rows = (nn_patch_rows_at_once(w) - 1) * w->stride + w->kernel;
    return nn_is_pointwise(w) ? 0 : nn_least(rows, w->height) * w->width;
}

/* In backward also a gradient of the weight, and pixels of a channel. */
NN_API int64_t nn_image_worker_floats(const nn_window *w, int64_t out, bool backward) {
    return nn_columns_floats(w) + (backward ? nn_window_depth(w) * out + nn_covered_floats(w) : 0);
}

NN_API int64_t nn_cpu_conv2d_floats(const nn_window *w, int64_t out, bool backward) {
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
NN_API ms_matrix nn_columns_of(float *work, nn_values image, nn_patch_rows rows,
                               const nn_window *w) {
    if (nn_is_pointwise(w)) {
        return nn_patch_matrix(image, w->channels, rows, w);
    }
    const nn_values columns = nn_values_in(work, image.dtype);
    nn_columns_kernel(columns, image, rows, w);
    const int64_t patches = rows.count * w->out_width;
    return nn_matrix(columns, nn_window_depth(w), patches, patches);
}

/* Values from element `first` on become the constant, rounded. */
NN_API void nn_constant_values(nn_values y, int64_t first, int64_t count, float constant) {
    if (y.dtype == MS_DTYPE_F32) {
        nn_constant_kernel((float *)y.data + first, count, constant);
        return;
    }
    for (int64_t i = first; i < first + count; i++) {
        nn_set(y, i, constant);
    }
}

/* One image: y (out, patches) from x. */
NN_API int nn_conv2d_image(const ms_call *call, nn_values y, nn_values x, nn_values weight,
                           const float *bias, float *work, int64_t out, const nn_window *w) {
    const ms_matrix matrix = nn_matrix(weight, out, nn_window_depth(w), nn_window_depth(w));
    const int64_t patches = nn_window_patches(w);
    int result = 0;
    for (int64_t o = 0; bias != NULL && o < out; o++) {
        nn_constant_values(y, o * patches, patches, bias[o]);
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
NN_API int nn_conv2d_kernel(const ms_call *call, nn_values y, nn_values x, nn_values weight,
                            const float *bias, int64_t out, const nn_window *w, float *work) {
    const int64_t workers = nn_image_workers(w);
    const int64_t floats = nn_image_worker_floats(w, out, false);
    const int64_t image = w->channels * w->height * w->width;
    int results[NN_IMAGE_WORKERS] = {0};
    NN_PARALLEL(nn_conv2d_cost(w, out))
    for (int64_t worker = 0; worker < workers; worker++) {
        for (int64_t b = worker; b < w->images; b += workers) {
            results[worker] |= nn_conv2d_image(call, nn_from(y, b * out * nn_window_patches(w)),
                                               nn_from(x, b * image), weight, bias,
                                               work + worker * floats, out, w);
        }
    }
    for (int64_t worker = 1; worker < workers; worker++) {
        results[0] |= results[worker];
    }
    return results[0];
}

/* dweight (out, depth): dy * transpose(columns) of one image. */
NN_API int nn_conv2d_weight_image(const ms_call *call, nn_dest dweight, nn_values dy, nn_values x,
                                  float *work, int64_t out, const nn_window *w) {
    const int64_t depth = nn_window_depth(w);
    int result = 0;
    for (int64_t begin = 0; begin < w->out_height && result == 0;
         begin += nn_patch_rows_at_once(w)) {
        const nn_patch_rows rows = nn_patch_rows_from(w, begin);
        result = (int)ms_gemm(call, 1.0f, nn_patch_matrix(dy, out, rows, w),
                              ms_transpose(nn_columns_of(work, x, rows, w)),
                              begin == 0 ? dweight.beta : 1.0f,
                              nn_matrix(nn_values_at(dweight), out, depth, depth));
    }
    return result;
}

/* dx of one image: the columns transpose(weight) * dy, added to the pixels they are copies of. */
NN_API int nn_conv2d_backward_image(const ms_call *call, nn_dest dx, nn_values dy, nn_values weight,
                                    float *work, int64_t out, const nn_window *w) {
    const int64_t depth = nn_window_depth(w);
    const ms_matrix turned = ms_transpose(nn_matrix(weight, out, depth, depth));
    int result = 0;
    if (nn_is_pointwise(w)) {
        const nn_patch_rows all = nn_patch_rows_from(w, 0);
        return (int)ms_gemm(call, 1.0f, turned, nn_patch_matrix(dy, out, all, w), dx.beta,
                            nn_patch_matrix(nn_values_at(dx), depth, all, w));
    }
    if (dx.beta == 0.0f) {
        memset(dx.data, 0, (size_t)(w->channels * w->height * w->width) * nn_value_bytes(dx.dtype));
    }
    for (int64_t begin = 0; begin < w->out_height && result == 0;
         begin += nn_patch_rows_at_once(w)) {
        const nn_patch_rows rows = nn_patch_rows_from(w, begin);
        const int64_t patches = rows.count * w->out_width;
        result = (int)ms_gemm(call, 1.0f, turned, nn_patch_matrix(dy, out, rows, w), 0.0f,
                              nn_matrix(nn_f32(work), depth, patches, patches));
        nn_columns_backward_kernel(nn_values_at(dx), work, rows,
                                   work + nn_columns_floats(w) + out * depth, w);
    }
    return result;
}

/* sums (count), F32: over the parts of all workers, which are `stride` floats apart. */
NN_API void nn_worker_sums_kernel(nn_dest sums, const float *parts, int64_t workers, int64_t stride,
                                  int64_t count) {
    float *out = (float *)sums.data;
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
                                     nn_dest dbias, nn_values dy, nn_values x, nn_values weight,
                                     int64_t out, const nn_window *w, float *work) {
    const int64_t workers = nn_image_workers(w);
    const int64_t floats = nn_image_worker_floats(w, out, true);
    const int64_t columns = nn_columns_floats(w);
    const int64_t image = w->channels * w->height * w->width;
    int results[NN_IMAGE_WORKERS] = {0};
    const nn_planes slopes = {w->images, out, nn_window_patches(w)};
    nn_channel_sums_kernel(dbias, dy, slopes);
    NN_PARALLEL(nn_conv2d_cost(w, out))
    for (int64_t worker = 0; worker < workers; worker++) {
        float *own = work + worker * floats;
        for (int64_t b = worker; b < w->images; b += workers) {
            const nn_values slope = nn_from(dy, b * out * nn_window_patches(w));
            if (dweight.data != NULL) {
                results[worker] |= nn_conv2d_weight_image(
                    call, nn_dest_of(nn_f32(own + columns), b == worker ? 0.0f : 1.0f), slope,
                    nn_from(x, b * image), own, out, w);
            }
            if (dx.data != NULL) {
                results[worker] |= nn_conv2d_backward_image(
                    call, nn_dest_of(nn_from(nn_values_at(dx), b * image), dx.beta), slope, weight,
                    own, out, w);
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
// >>nn cpu tiles  attention whose scratch memory does not grow with the sequence

/* Dao et al., "FlashAttention", 2022, algorithms 1 and 4. A tile, the scores of some queries with
   some keys, is in memory at a time. While forward goes through the tiles of a query, it keeps the
   largest score so far, the sum of exponentials relative to it, and the output before it is divided
   by that sum; where a tile has a larger score, both sums are scaled to it. Forward saves the
   logarithm of the sum of exponentials, from which backward computes the probabilities of a tile
   without the other tiles. Tiles of keys that none of their queries sees are left out. */
typedef struct nn_tiled {
    const ms_call *call;
    nn_attention_size n;
    nn_values qkv, out, dout; // dout in backward
    nn_dest dqkv;             // backward
    float *log_sums;          // (B, H, T)
} nn_tiled;

/* Scratch memory of a worker. Forward has no use for the last two lines, backward none for the line
   before them. */
typedef struct nn_tile_room {
    float *sum;          // (queries, size): of outputs, or in backward of dq
    float *p;            // (queries, keys) of a tile
    float *most, *total; // (queries)
    float *ds, *means;   // (queries, keys) of a tile, (queries)
    float *dk, *dv;      // (keys, size)
} nn_tile_room;

/* Queries and keys of a tile, from `query` and `key` on; no keys: no query sees any. Offsets, in
   elements: of them in qkv, and of the queries in the output and in the saved logarithms. */
typedef struct nn_tile {
    int64_t query, queries, key, keys;
    bool is_first; // with these queries
    int64_t q, k, v, o, row;
    int64_t qkv_stride, o_stride, p_stride;
} nn_tile;

/* The first of the keys of the first tile with the queries from `query` on. */
NN_API int64_t nn_tile_begin(nn_attention_size n, int64_t query) {
    return nn_first_key(&n, query) / NN_TILE_KEYS * NN_TILE_KEYS;
}

NN_API nn_tile nn_tile_of(nn_attention_size n, int64_t head, int64_t query, int64_t key) {
    const int64_t token = (head / n.heads) * n.sequence;
    const int64_t column = (head % n.heads) * n.size;
    const int64_t shared = head % n.heads / nn_attention_shared(&n) * n.size; // column of keys
    nn_tile t;
    t.query = query;
    t.queries = nn_least(NN_TILE_QUERIES, n.sequence - query);
    t.key = key;
    t.keys = nn_least(NN_TILE_KEYS, nn_keys_end(&n, query + t.queries - 1) - key);
    t.is_first = key == nn_tile_begin(n, query);
    t.qkv_stride = nn_attention_columns(&n);
    t.o_stride = nn_attention_width(&n);
    t.p_stride = nn_least(NN_TILE_KEYS, n.sequence);
    t.q = (token + query) * t.qkv_stride + column;
    t.k = (token + key) * t.qkv_stride + nn_attention_keys(&n) + shared;
    t.v = (token + key) * t.qkv_stride + nn_attention_values(&n) + shared;
    t.o = (token + query) * t.o_stride + column;
    t.row = head * n.sequence + query;
    return t;
}

/* The keys of the tile that its query r sees. */
NN_API nn_span nn_tile_seen(const nn_tile *t, int64_t r, const nn_attention_size *n) {
    nn_span seen;
    seen.end = nn_most(0, nn_least(t->keys, nn_keys_end(n, t->query + r) - t->key));
    seen.begin = nn_least(seen.end, nn_most(0, nn_first_key(n, t->query + r) - t->key));
    return seen;
}

/* Zeros for the keys of a row that its query does not see. */
NN_API void nn_tile_clear(float *row, nn_span seen, const nn_tile *t) {
    memset(row, 0, (size_t)seen.begin * sizeof *row);
    memset(row + seen.end, 0, (size_t)(t->keys - seen.end) * sizeof *row);
}

/* The rows of sums that are in scratch memory at once: of one tile's queries, or in backward of as
   many as that has room for, of each head that shares keys. */
NN_API int64_t nn_tile_sum_rows(nn_attention_size n, bool backward) {
    return nn_least(n.sequence,
                    backward ? nn_most(NN_TILE_QUERIES, NN_TILE_SUMS) : NN_TILE_QUERIES) *
           (backward ? nn_attention_shared(&n) : 1);
}

NN_API int64_t nn_tiled_worker_floats(nn_attention_size n, bool backward) {
    const int64_t queries = nn_least(NN_TILE_QUERIES, n.sequence);
    const int64_t keys = nn_least(NN_TILE_KEYS, n.sequence);
    const int64_t tiles =
        backward ? 2 * queries * keys + queries + 2 * keys * n.size : queries * keys + 2 * queries;
    return tiles + nn_tile_sum_rows(n, backward) * n.size;
}

NN_API int64_t nn_cpu_attention_queries(bool keeps_scores) {
    return keeps_scores ? (int64_t)NN_QUERIES : (int64_t)NN_TILE_QUERIES;
}

NN_API int64_t nn_cpu_tiled_attention_floats(nn_attention_size n, bool backward) {
    return nn_attention_workers(n) * nn_tiled_worker_floats(n, backward);
}

NN_API nn_tile_room nn_tile_room_of(float *work, nn_attention_size n, bool backward) {
    const int64_t queries = nn_least(NN_TILE_QUERIES, n.sequence);
    const int64_t keys = nn_least(NN_TILE_KEYS, n.sequence);
    nn_tile_room room;
    memset(&room, 0, sizeof room);
    room.sum = work;
    room.p = room.sum + nn_tile_sum_rows(n, backward) * n.size;
    float *rest = room.p + queries * keys;
    if (!backward) {
        room.most = rest;
        room.total = room.most + queries;
        return room;
    }
    room.ds = rest;
    room.means = room.ds + queries * keys;
    room.dk = room.means + queries;
    room.dv = room.dk + keys * n.size;
    return room;
}

/* The tile's queries, keys or values, which begin at this offset of qkv or of its gradient. */
NN_API ms_matrix nn_tile_operand(const nn_tiled *a, const nn_tile *t, nn_values qkv, int64_t offset,
                                 int64_t rows) {
    return nn_matrix(nn_from(qkv, offset), rows, a->n.size, t->qkv_stride);
}

NN_API void nn_cap_row(float *x, float cap, int64_t count) {
    NN_SIMD
    for (int64_t i = 0; i < count; i++) {
        x[i] = nn_cap_value(x[i], cap);
    }
}

/* p = q k^T * scale, with its cap, if it has one */
NN_API int nn_tile_scores(const nn_tiled *a, const nn_tile *t, float *p) {
    const int result =
        (int)ms_gemm(a->call, a->n.scale, nn_tile_operand(a, t, a->qkv, t->q, t->queries),
                     ms_transpose(nn_tile_operand(a, t, a->qkv, t->k, t->keys)), 0.0f,
                     nn_matrix(nn_f32(p), t->queries, t->keys, t->p_stride));
    for (int64_t r = 0; r < t->queries && a->n.cap > 0.0f; r++) {
        nn_cap_row(p + r * t->p_stride, a->n.cap, t->keys);
    }
    return result;
}

/* The sums of a tile's outputs: if these are F32, where they are going to be. */
NN_API ms_matrix nn_tile_sums(const nn_tiled *a, const nn_tile *t, const nn_tile_room *room) {
    return a->out.dtype == MS_DTYPE_F32
               ? nn_matrix(nn_from(a->out, t->o), t->queries, a->n.size, t->o_stride)
               : nn_matrix(nn_f32(room->sum), t->queries, a->n.size, a->n.size);
}

/* x *= factor */
NN_API void nn_scale_row(float *x, float factor, int64_t count) {
    NN_SIMD
    for (int64_t i = 0; i < count; i++) {
        x[i] *= factor;
    }
}

/* Scores of a tile become exponentials relative to the largest score so far. What has been summed
   relative to a smaller one is scaled. */
NN_API void nn_tile_softmax(const nn_tiled *a, const nn_tile *t, const nn_tile_room *room) {
    const ms_matrix sums = nn_tile_sums(a, t, room);
    for (int64_t r = 0; r < t->queries; r++) {
        float *row = room->p + r * t->p_stride;
        const nn_span seen = nn_tile_seen(t, r, &a->n);
        const int64_t count = seen.end - seen.begin;
        const float before = t->is_first ? -FLT_MAX : room->most[r];
        const float own = count > 0 ? nn_max(row + seen.begin, count) : before;
        const float most = own > before ? own : before;
        const float total = nn_exp_row(row + seen.begin, most, count);
        const float share = nn_exp(before - most);
        nn_tile_clear(row, seen, t);
        room->most[r] = most;
        room->total[r] = t->is_first ? total : room->total[r] * share + total;
        if (!t->is_first && most > before) {
            nn_scale_row((float *)sums.data + r * sums.stride, share, a->n.size);
        }
    }
}

/* Divides the sums of a tile's queries, when all keys have gone by. */
NN_API void nn_tile_close(const nn_tiled *a, const nn_tile *t, const nn_tile_room *room) {
    const ms_matrix sums = nn_tile_sums(a, t, room);
    for (int64_t r = 0; r < t->queries; r++) {
        float *sum = (float *)sums.data + r * sums.stride;
        nn_scale_row(sum, nn_share(room->most[r], room->total[r]), a->n.size);
        if (a->out.dtype != MS_DTYPE_F32) {
            nn_round_row(nn_from(a->out, t->o + r * t->o_stride), sum, a->n.size);
        }
        if (a->log_sums != NULL) {
            a->log_sums[t->row + r] = nn_log_sum(room->most[r], room->total[r]);
        }
    }
}

/* The output of the queries of a head. */
NN_API int nn_tiled_head(const nn_tiled *a, const nn_tile_room *room, int64_t head) {
    int result = 0;
    for (int64_t query = 0; query < a->n.sequence && result == 0; query += NN_TILE_QUERIES) {
        nn_tile t = nn_tile_of(a->n, head, query, nn_tile_begin(a->n, query));
        while (t.keys > 0 && result == 0) {
            result = nn_tile_scores(a, &t, room->p);
            nn_tile_softmax(a, &t, room);
            const ms_matrix p =
                nn_rows_matrix(room->p, a->qkv.dtype, t.queries, t.keys, t.p_stride);
            result = nn_first(
                result, (int)ms_gemm(a->call, 1.0f, p, nn_tile_operand(a, &t, a->qkv, t.v, t.keys),
                                     t.is_first ? 0.0f : 1.0f, nn_tile_sums(a, &t, room)));
            t = nn_tile_of(a->n, head, query, t.key + NN_TILE_KEYS);
        }
        nn_tile_close(a, &t, room);
    }
    return result;
}

/* The sum of out times its gradient, for each query of a tile: what the softmax takes from the
   gradients of probabilities. Appendix B.2. */
NN_API void nn_tile_means(const nn_tiled *a, const nn_tile *t, float *means) {
    float room[2][NN_ROOM];
    const int64_t piece = nn_piece(a->out.dtype, a->n.size);
    for (int64_t r = 0; r < t->queries; r++) {
        means[r] = 0.0f;
        for (int64_t begin = 0; begin < a->n.size; begin += piece) {
            const int64_t size = nn_least(piece, a->n.size - begin);
            const int64_t first = t->o + r * t->o_stride + begin;
            means[r] += nn_dot(nn_read(a->out, first, size, room[0]),
                               nn_read(a->dout, first, size, room[1]), size);
        }
    }
}

/* Scores become probabilities, and gradients of probabilities those of products of queries and keys. */
NN_API void nn_tile_slope_row(float *p, float *ds, int64_t count, float log_sum, float mean,
                              const nn_attention_size *n) {
    const float scale = n->scale, cap = n->cap;
    if (cap > 0.0f) {
        NN_SIMD
        for (int64_t i = 0; i < count; i++) {
            ds[i] = (ds[i] - mean) * nn_cap_slope(p[i], cap);
            p[i] = nn_exp(p[i] - log_sum);
            ds[i] = p[i] * ds[i] * scale;
        }
        return;
    }
    NN_SIMD
    for (int64_t i = 0; i < count; i++) {
        p[i] = nn_exp(p[i] - log_sum);
        ds[i] = p[i] * (ds[i] - mean) * scale;
    }
}

/* room->p = the probabilities of a tile, room->ds = the gradients of q k^T. */
NN_API int nn_tile_slopes(const nn_tiled *a, const nn_tile *t, const nn_tile_room *room) {
    const int result =
        nn_first(nn_tile_scores(a, t, room->p),
                 (int)ms_gemm(a->call, 1.0f,
                              nn_matrix(nn_from(a->dout, t->o), t->queries, a->n.size, t->o_stride),
                              ms_transpose(nn_tile_operand(a, t, a->qkv, t->v, t->keys)), 0.0f,
                              nn_matrix(nn_f32(room->ds), t->queries, t->keys, t->p_stride)));
    nn_tile_means(a, t, room->means);
    for (int64_t r = 0; r < t->queries; r++) {
        float *p = room->p + r * t->p_stride;
        float *ds = room->ds + r * t->p_stride;
        const nn_span seen = nn_tile_seen(t, r, &a->n);
        nn_tile_slope_row(p + seen.begin, ds + seen.begin, seen.end - seen.begin,
                          a->log_sums[t->row + r], room->means[r], &a->n);
        nn_tile_clear(p, seen, t);
        nn_tile_clear(ds, seen, t);
    }
    return result;
}

/* Whether gradients of all queries add up while the gradients of keys are computed: in their place,
   or, in 16 bits, in scratch memory, if it has room for all. Otherwise they have a pass of their
   own, which computes the tiles again. */
NN_API bool nn_tiled_in_one_pass(const nn_tiled *a) {
    return a->dqkv.dtype == MS_DTYPE_F32 ||
           a->n.sequence * nn_attention_shared(&a->n) <= nn_tile_sum_rows(a->n, true);
}

/* Adds ds k to the gradients of a tile's queries: in their place, or in sums. */
NN_API int nn_tile_add_queries(const nn_tiled *a, const nn_tile *t, ms_matrix ds, float *sums) {
    const bool direct = a->dqkv.dtype == MS_DTYPE_F32;
    const float beta = direct ? a->dqkv.beta : 0.0f;
    const ms_matrix to = direct ? nn_tile_operand(a, t, nn_values_at(a->dqkv), t->q, t->queries)
                                : nn_matrix(nn_f32(sums), t->queries, a->n.size, a->n.size);
    return (int)ms_gemm(a->call, 1.0f, ds, nn_tile_operand(a, t, a->qkv, t->k, t->keys),
                        t->is_first ? beta : 1.0f, to);
}

/* The sums of the gradients of a head's queries from `query` on, where all are in scratch memory. */
NN_API float *nn_query_sums(const nn_tiled *a, const nn_tile_room *room, int64_t head,
                            int64_t query) {
    const int64_t place = head % nn_attention_shared(&a->n) * a->n.sequence + query;
    return room->sum + place * a->n.size;
}

/* Adds what a tile of a head gives to the gradients of its keys and values, and to those of its
   queries, unless they have a pass of their own. */
NN_API int nn_tile_backward(const nn_tiled *a, const nn_tile *t, const nn_tile_room *room,
                            int64_t head) {
    const int64_t size = a->n.size;
    const ms_dtype dtype = a->qkv.dtype;
    int result = nn_tile_slopes(a, t, room);
    const ms_matrix p = nn_rows_matrix(room->p, dtype, t->queries, t->keys, t->p_stride);
    const ms_matrix ds = nn_rows_matrix(room->ds, dtype, t->queries, t->keys, t->p_stride);
    result |= (int)ms_gemm(a->call, 1.0f, ms_transpose(p),
                           nn_matrix(nn_from(a->dout, t->o), t->queries, size, t->o_stride), 1.0f,
                           nn_matrix(nn_f32(room->dv), t->keys, size, size));
    result |= (int)ms_gemm(a->call, 1.0f, ms_transpose(ds),
                           nn_tile_operand(a, t, a->qkv, t->q, t->queries), 1.0f,
                           nn_matrix(nn_f32(room->dk), t->keys, size, size));
    if (nn_tiled_in_one_pass(a)) {
        result |= nn_tile_add_queries(a, t, ds, nn_query_sums(a, room, head, t->query));
    }
    return result;
}

/* The gradients of keys from `key` on, and of their values: what the heads from `head` on give that
   share them. */
NN_API int nn_tiled_backward_keys(const nn_tiled *a, const nn_tile_room *room, int64_t head,
                                  int64_t key) {
    const int64_t size = a->n.size;
    const int64_t keys = nn_least(NN_TILE_KEYS, a->n.sequence - key);
    const int64_t first = a->n.causal ? key / NN_TILE_QUERIES * NN_TILE_QUERIES : 0;
    const int64_t end = nn_queries_end(&a->n, key + keys - 1);
    int result = 0;
    memset(room->dk, 0, (size_t)(keys * size) * sizeof *room->dk);
    memset(room->dv, 0, (size_t)(keys * size) * sizeof *room->dv);
    for (int64_t h = head; h < head + nn_attention_shared(&a->n); h++) {
        for (int64_t query = first; query < end && result == 0; query += NN_TILE_QUERIES) {
            const nn_tile t = nn_tile_of(a->n, h, query, key);
            result = nn_tile_backward(a, &t, room, h);
        }
    }
    const nn_tile t = nn_tile_of(a->n, head, 0, key);
    for (int64_t r = 0; r < keys; r++) {
        nn_store(a->dqkv, t.k + r * t.qkv_stride, room->dk + r * size, size);
        nn_store(a->dqkv, t.v + r * t.qkv_stride, room->dv + r * size, size);
    }
    return result;
}

/* The sums of the gradients of queries from `query` on become gradients. */
NN_API void nn_tile_store_queries(const nn_tiled *a, const float *sums, int64_t head, int64_t query,
                                  int64_t queries) {
    const nn_tile t = nn_tile_of(a->n, head, query, 0);
    for (int64_t r = 0; r < queries; r++) {
        nn_store(a->dqkv, t.q + r * t.qkv_stride, sums + r * a->n.size, a->n.size);
    }
}

/* The gradients of a tile's queries, in a pass of their own. */
NN_API int nn_tiled_backward_queries(const nn_tiled *a, const nn_tile_room *room, int64_t head,
                                     int64_t query) {
    nn_tile t = nn_tile_of(a->n, head, query, nn_tile_begin(a->n, query));
    int result = 0;
    while (t.keys > 0 && result == 0) {
        result = nn_tile_slopes(a, &t, room);
        const ms_matrix ds = nn_rows_matrix(room->ds, a->qkv.dtype, t.queries, t.keys, t.p_stride);
        result |= nn_tile_add_queries(a, &t, ds, room->sum);
        t = nn_tile_of(a->n, head, query, t.key + NN_TILE_KEYS);
    }
    nn_tile_store_queries(a, room->sum, head, query, t.queries);
    return result;
}

/* The gradients of the queries of a head that have 16 bits, once those of the keys are computed. */
NN_API int nn_tiled_finish_queries(const nn_tiled *a, const nn_tile_room *room, int64_t head) {
    int result = 0;
    if (nn_tiled_in_one_pass(a)) {
        nn_tile_store_queries(a, nn_query_sums(a, room, head, 0), head, 0, a->n.sequence);
        return result;
    }
    for (int64_t query = 0; query < a->n.sequence && result == 0; query += NN_TILE_QUERIES) {
        result = nn_tiled_backward_queries(a, room, head, query);
    }
    return result;
}

/* Of the heads from `head` on that share keys. */
NN_API int nn_tiled_backward_heads(const nn_tiled *a, const nn_tile_room *room, int64_t head) {
    int result = 0;
    for (int64_t key = 0; key < a->n.sequence && result == 0; key += NN_TILE_KEYS) {
        result = nn_tiled_backward_keys(a, room, head, key);
    }
    for (int64_t i = 0; i < nn_attention_shared(&a->n) && a->dqkv.dtype != MS_DTYPE_F32; i++) {
        result = nn_first(result, nn_tiled_finish_queries(a, room, head + i));
    }
    return result;
}

/* Forward or backward of all heads, in parallel. */
NN_API int nn_tiled_heads(const nn_tiled *a, float *work, bool backward) {
    const int64_t shared = backward ? nn_attention_shared(&a->n) : 1; // heads that go together
    const int64_t count = a->n.batch * a->n.heads / shared;
    const int64_t workers = nn_least(NN_HEAD_WORKERS, count);
    const int64_t floats = nn_tiled_worker_floats(a->n, backward);
    int results[NN_HEAD_WORKERS] = {0};
    NN_PARALLEL(nn_attention_cost(a->n))
    for (int64_t worker = 0; worker < workers; worker++) {
        const nn_tile_room room = nn_tile_room_of(work + worker * floats, a->n, backward);
        for (int64_t i = worker; i < count; i += workers) {
            results[worker] |= backward ? nn_tiled_backward_heads(a, &room, i * shared)
                                        : nn_tiled_head(a, &room, i);
        }
    }
    for (int64_t worker = 1; worker < workers; worker++) {
        results[0] |= results[worker];
    }
    return results[0];
}

NN_API int nn_tiled_attention_kernel(const ms_call *call, nn_values out, float *log_sums,
                                     nn_values qkv, float *work, nn_attention_size n) {
    nn_tiled a;
    memset(&a, 0, sizeof a);
    a.call = call;
    a.n = n;
    a.qkv = qkv;
    a.out = out;
    a.log_sums = log_sums;
    return nn_tiled_heads(&a, work, false);
}

NN_API int nn_tiled_attention_backward_kernel(const ms_call *call, nn_dest dqkv, nn_values dout,
                                              nn_values out, const float *log_sums, nn_values qkv,
                                              float *work, nn_attention_size n) {
    nn_tiled a;
    if (dqkv.data == NULL) {
        return 0;
    }
    a.call = call;
    a.n = n;
    a.qkv = qkv;
    a.out = out;
    a.dout = dout;
    a.dqkv = dqkv;
    a.log_sums = (float *)(uintptr_t)log_sums; // only read
    return nn_tiled_heads(&a, work, true);
}

// ------------------------------------------------------------------------------------------------
// >>nn cpu table

/* Sums over columns need no scratch memory. */
NN_API int64_t nn_cpu_column_floats(int64_t rows, int64_t columns) {
    (void)rows;
    (void)columns;
    return 0;
}

NN_API int64_t nn_cpu_layernorm_floats(int64_t rows, int64_t width) {
    return nn_cpu_column_floats(rows, width);
}

NN_API int64_t nn_cpu_batch_norm_floats(nn_planes n) {
    (void)n;
    return 0;
}

#define NN_CPU_SIZE(name, operands)   nn_cpu_##name,
#define NN_CPU_KERNEL(name, operands) nn_##name##_kernel,

NN_API const nn_device *nn_cpu(void) {
    static const nn_device cpu = {"cpu", 0, NN_SIZES(NN_CPU_SIZE) NN_KERNELS(NN_CPU_KERNEL)};
    return &cpu;
}

#endif // MEMSCALE_NN_CPU_H
