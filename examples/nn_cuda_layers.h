/*  nn_cuda_layers.h - the kernels of nn.h with CUDA, except those of attention and of images.

        >>nn cuda elements        one by one, and rotary positions
        >>nn cuda columns         sums over rows
        >>nn cuda linear          products, and what is added to them
        >>nn cuda embedding       rows of tables, and their gradients
        >>nn cuda rows            layer normalization, softmax
        >>nn cuda cross-entropy   rows of logits

    A part of nn_cuda.h, which includes it. */
#ifndef MEMSCALE_NN_CUDA_LAYERS_H
#define MEMSCALE_NN_CUDA_LAYERS_H

#ifndef MEMSCALE_NN_CUDA_H
#error "include nn.h, which includes nn_cuda.h"
#endif

// ------------------------------------------------------------------------------------------------
// >>nn cuda elements

/* What a kernel computes for each element i from its operands a and b. A thread calls start with
   the first of its elements, which are all in one chunk. */
struct nn_op {
    __device__ void start(int64_t first) {
        (void)first;
    }
};

struct nn_op_copy : nn_op {
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

/* dropout(a), or a if threshold is 0; plus b, a residual, if adds. The first element of a tile may be
   anywhere in a chunk, so that the elements of a thread can be in two of them. */
struct nn_op_dropout : nn_op {
    nn_seed seed;
    uint64_t key;
    float scale;
    uint32_t threshold;
    bool adds;
    __device__ void start(int64_t i) {
        const int64_t first = seed.first + i;
        key = threshold != 0 ? nn_chunk_key(nn_seed_value(seed), first - first % NN_CHUNK) : 0;
    }
    __device__ float operator()(int64_t i, float a, float b) {
        const uint32_t counter = (uint32_t)((seed.first + i) % NN_CHUNK);
        if (counter == 0) {
            start(i);
        }
        const bool kept = threshold == 0 || nn_random(key, counter) >= threshold;
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

/* out = op(a, b), or out += that; b may be NULL. A thread has the elements of a wide access, each
   of which is read before it is written: out may be a or b. */
template <typename T, typename F>
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_map(F op, T *out, const T *a, const T *b, int64_t count, bool adds, bool aligned) {
    enum { WIDE = nn_type<T>::WIDE };
    const int64_t first = WIDE * ((int64_t)blockIdx.x * NN_THREADS + threadIdx.x);
    if (first >= count) {
        return;
    }
    op.start(first);
    if (aligned && first + WIDE <= count) {
        float x[WIDE];
        float y[WIDE] = {0};
        float old[WIDE] = {0};
        nn_wide<WIDE>::load(x, a + first);
        if (b != NULL) {
            nn_wide<WIDE>::load(y, b + first);
        }
        if (adds) {
            nn_wide<WIDE>::load(old, out + first);
        }
        NN_UNROLL
        for (int k = 0; k < WIDE; k++) {
            x[k] = op(first + k, x[k], y[k]);
            x[k] = adds ? nn_d_sum(old[k], x[k]) : x[k];
        }
        nn_wide<WIDE>::store(out + first, x);
        return;
    }
    for (int64_t i = first; i < count && i < first + WIDE; i++) {
        const float value = op(i, nn_d_float(a[i]), b != NULL ? nn_d_float(b[i]) : 0.0f);
        nn_d_round(out + i, adds ? nn_d_sum(nn_d_float(out[i]), value) : value);
    }
}

template <typename T, typename F>
static int nn_cuda_map_as(const ms_call *call, F op, nn_dest y, nn_values a, nn_values b,
                          int64_t count) {
    const bool aligned = nn_aligned(y.data) && nn_aligned(a.data) && nn_aligned(b.data);
    const int64_t blocks = nn_divide_up(count, (int64_t)nn_type<T>::WIDE * NN_THREADS);
    return nn_launch(call, nn_grid_of(blocks, 1, NN_THREADS), nn_k_map<T, F>, op, y.data, a.data,
                     b.data, count, y.beta != 0.0f, aligned);
}

/* Launches the kernel above, unless y.data is NULL; b.data may be NULL. */
template <typename F>
static int nn_cuda_map(const ms_call *call, F op, nn_dest y, nn_values a, nn_values b,
                       int64_t count) {
    return y.data == NULL ? 0 : NN_AS(y.dtype, nn_cuda_map_as, call, op, y, a, b, count);
}

struct nn_op_gated : nn_op {
    nn_gate kind;
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        return nn_gate_value(kind, a) * b;
    }
};

struct nn_op_scale : nn_op {
    float factor;
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        (void)b;
        return __fmul_rn(a, factor);
    }
};

struct nn_op_softcap : nn_op {
    float cap;
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        (void)b;
        return nn_cap_value(a, cap);
    }
};

/* a is dy, b is y. */
struct nn_op_softcap_backward : nn_op {
    float cap;
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        return __fmul_rn(a, nn_cap_slope(b, cap));
    }
};

static int nn_cuda_copy(const ms_call *call, nn_dest y, nn_values x, int64_t count) {
    if (y.data == x.data && y.beta == 0.0f) {
        return 0;
    }
    return nn_cuda_map(call, nn_op_copy(), y, x, nn_f32(NULL), count);
}

static int nn_cuda_add(const ms_call *call, nn_values y, nn_values a, nn_values b, int64_t count) {
    return nn_cuda_map(call, nn_op_add(), nn_dest_of(y, 0.0f), a, b, count);
}

static int nn_cuda_dropout(const ms_call *call, nn_dest y, nn_values x, int64_t count,
                           float probability, nn_seed seed) {
    return nn_cuda_map(call, nn_op_dropout_of(probability, seed, false), y, x, nn_f32(NULL), count);
}

static int nn_cuda_gelu(const ms_call *call, nn_values y, nn_values x, int64_t count,
                        bool erf_form) {
    nn_op_gelu op;
    op.erf_form = erf_form;
    return nn_cuda_map(call, op, nn_dest_of(y, 0.0f), x, nn_f32(NULL), count);
}

static int nn_cuda_gelu_backward(const ms_call *call, nn_dest dx, nn_values dy, nn_values x,
                                 int64_t count, bool erf_form) {
    nn_op_gelu_backward op;
    op.erf_form = erf_form;
    return nn_cuda_map(call, op, dx, dy, x, count);
}

static int nn_cuda_gated(const ms_call *call, nn_values y, nn_values gate, nn_values up,
                         int64_t count, nn_gate kind) {
    nn_op_gated op;
    op.kind = kind;
    return nn_cuda_map(call, op, nn_dest_of(y, 0.0f), gate, up, count);
}

static int nn_cuda_scale(const ms_call *call, nn_dest y, nn_values x, int64_t count, float factor) {
    nn_op_scale op;
    op.factor = factor;
    return nn_cuda_map(call, op, y, x, nn_f32(NULL), count);
}

static int nn_cuda_softcap(const ms_call *call, nn_values y, nn_values x, int64_t count,
                           float cap) {
    nn_op_softcap op;
    op.cap = cap;
    return nn_cuda_map(call, op, nn_dest_of(y, 0.0f), x, nn_f32(NULL), count);
}

static int nn_cuda_softcap_backward(const ms_call *call, nn_dest dx, nn_values dy, nn_values y,
                                    int64_t count, float cap) {
    nn_op_softcap_backward op;
    op.cap = cap;
    return nn_cuda_map(call, op, dx, dy, y, count);
}

/* The operands of a gated unit's backward; a gradient whose data is NULL is not wanted. */
typedef struct nn_gated_operands {
    nn_dest dgate, dup;
    nn_values dy, gate, up;
    int64_t count;
    nn_gate kind;
} nn_gated_operands;

template <typename T>
__device__ __forceinline__ void nn_d_add(const nn_dest &to, int64_t i, float value) {
    T *at = (T *)to.data + i;
    nn_d_round(at, to.beta != 0.0f ? nn_d_sum(nn_d_float(*at), value) : value);
}

/* A thread per element, which reads all operands before it writes: gradients may be where these are. */
template <typename T>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_gated_backward(nn_gated_operands o) {
    const int64_t i = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    if (i >= o.count) {
        return;
    }
    const float d = nn_d_float(((const T *)o.dy.data)[i]);
    const float g = nn_d_float(((const T *)o.gate.data)[i]);
    const float u = nn_d_float(((const T *)o.up.data)[i]);
    if (o.dgate.data != NULL) {
        nn_d_add<T>(o.dgate, i, __fmul_rn(d * u, nn_gate_slope(o.kind, g)));
    }
    if (o.dup.data != NULL) {
        nn_d_add<T>(o.dup, i, __fmul_rn(d, nn_gate_value(o.kind, g)));
    }
}

template <typename T>
static int nn_cuda_gated_backward_as(const ms_call *call, const nn_gated_operands &o) {
    return nn_launch(call, nn_grid_of(nn_divide_up(o.count, NN_THREADS), 1, NN_THREADS),
                     nn_k_gated_backward<T>, o);
}

static int nn_cuda_gated_backward(const ms_call *call, nn_dest dgate, nn_dest dup, nn_values dy,
                                  nn_values gate, nn_values up, int64_t count, nn_gate kind) {
    nn_gated_operands o;
    o.dgate = dgate;
    o.dup = dup;
    o.dy = dy;
    o.gate = gate;
    o.up = up;
    o.count = count;
    o.kind = kind;
    return NN_AS(dy.dtype, nn_cuda_gated_backward_as, call, o);
}

/* Some columns of y = those of x, or += these: a thread per element. */
template <typename T>
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_copy_columns(nn_dest y, const T *x, int64_t rows, nn_column_range c) {
    const int64_t i = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    if (i < rows * c.count) {
        const int64_t at = i / c.count * c.stride + c.first + i % c.count;
        nn_d_add<T>(y, at, nn_d_float(x[at]));
    }
}

template <typename T>
static int nn_cuda_copy_columns_as(const ms_call *call, nn_dest y, nn_values x, int64_t rows,
                                   nn_column_range c) {
    return nn_launch(call, nn_grid_of(nn_divide_up(rows * c.count, NN_THREADS), 1, NN_THREADS),
                     nn_k_copy_columns<T>, y, x.data, rows, c);
}

static int nn_cuda_copy_columns(const ms_call *call, nn_dest y, nn_values x, int64_t rows,
                                nn_column_range c) {
    const bool is_there = y.data == NULL || (y.data == x.data && y.beta == 0.0f);
    return is_there ? 0 : NN_AS(y.dtype, nn_cuda_copy_columns_as, call, y, x, rows, c);
}

/* A thread turns one pair of each head of a token, by an angle that it computes once. */
template <typename T>
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_rotary(nn_dest y, const T *x, nn_turns n) {
    const int64_t index = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    const int64_t row = index / n.pairs, pair = index % n.pairs;
    if (row >= n.rows) {
        return;
    }
    const float angle = (float)((n.first + row) % n.period) * n.inverse[pair];
    const float cosine = cosf(angle);
    const float sine = n.back ? -sinf(angle) : sinf(angle);
    const int64_t apart = nn_pair_apart(&n);
    for (int64_t head = 0; head < n.heads; head++) {
        const int64_t at = row * n.columns + head * n.size + nn_pair_place(&n, pair);
        const float a = nn_d_float(x[at]), b = nn_d_float(x[at + apart]);
        nn_d_add<T>(y, at, a * cosine - b * sine);
        nn_d_add<T>(y, at + apart, b * cosine + a * sine);
    }
}

template <typename T>
static int nn_cuda_rotary_as(const ms_call *call, nn_dest y, nn_values x, const nn_turns &n) {
    return nn_launch(call, nn_grid_of(nn_divide_up(n.rows * n.pairs, NN_THREADS), 1, NN_THREADS),
                     nn_k_rotary<T>, y, x.data, n);
}

static int nn_cuda_rotary(const ms_call *call, nn_dest y, nn_values x, const nn_turns *n) {
    return y.data == NULL ? 0 : NN_AS(y.dtype, nn_cuda_rotary_as, call, y, x, *n);
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda columns  sums over rows

__device__ __forceinline__ int64_t nn_d_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Tiles of `width` columns in a row. It has 32 bits, like the number of a block: each thread takes
   the remainder of one by the other, which is much faster than with 64 bits. */
__device__ __forceinline__ unsigned nn_d_tiles(int64_t columns, unsigned width) {
    return (unsigned)((columns + width - 1) / width);
}

/* What nn_k_column_sums adds up: the rows of dy (rows, columns) and, if x is not NULL, also those
   of dy times (x - mean) * rstd. If index is not NULL, only the rows whose index is entry. */
typedef struct nn_sums {
    nn_values dy, x;          // of one dtype
    const float *mean, *rstd; // mean NULL: 0
    const int32_t *index;
    int32_t entry;
    int64_t rows, columns;
    nn_row_groups places;
    int64_t chunk_rows; // rows that a block adds up
    float *partial;     // (chunks, columns), followed by as many for the products
    int64_t chunks;
} nn_sums;

/* The element at which a row begins. */
__device__ __forceinline__ int64_t nn_d_sum_place(const nn_sums &s, int64_t row) {
    const int64_t group = s.places.group;
    return group == 0 ? row * s.columns : row / group * s.places.apart + row % group * s.columns;
}

/* The rows of a chunk are distributed over NN_SUM_ROWS warps, the columns of a tile over lanes. */
template <typename T, unsigned WIDE>
__device__ __forceinline__ void nn_d_column_sums(const nn_sums &s, float *shared) {
    const T *dy = (const T *)s.dy.data;
    const T *x = (const T *)s.x.data;
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
                nn_wide<WIDE>::load(slope, dy + nn_d_sum_place(s, r) + c);
            }
            if (x != NULL) {
                nn_wide<WIDE>::load(value, x + nn_d_sum_place(s, r) + c);
            }
            const float mean = x != NULL && s.mean != NULL ? s.mean[r] : 0.0f;
            const float rstd = x != NULL ? s.rstd[r] : 0.0f;
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
    for (unsigned i = warp; i < 2 * WIDE; i += NN_SUM_ROWS) {
        const unsigned part = i / WIDE; // 0: the warp adds up the sums; 1: the products
        const int64_t column = c + i % WIDE;
        float sum = 0.0f;
        for (unsigned k = 0; k < NN_SUM_ROWS; k++) {
            sum += shared[((k + part * NN_SUM_ROWS) * WIDE + i % WIDE) * NN_WARP + lane];
        }
        if (column < s.columns && (part == 0 || x != NULL)) {
            s.partial[(part * s.chunks + chunk) * s.columns + column] = sum;
        }
    }
}

NN_SHARED_KERNELS(nn_k_column_sums, NN_THREADS, nn_sums, 2 * NN_SUM_ROWS * NN_WARP,
                  nn_d_column_sums)

/* out (columns) = the sums of partial (chunks, columns) over the chunks, or += them. */
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

/* Chunks of rows: enough blocks for a large GPU, but each of at least 64 rows, and no more than
   NN_SUM_FLOATS partial sums. */
NN_API int64_t nn_cuda_chunks(int64_t rows, int64_t columns) {
    const int64_t tiles = nn_divide_up(columns, 4 * NN_WARP);
    return nn_most(1, nn_least(nn_divide_up(rows, 64), NN_SUM_FLOATS / (4 * NN_WARP) / tiles));
}

/* The second stage: adds up the partial sums of all chunks. */
typedef struct nn_fold {
    nn_values out[2]; // sums, products; NULL: they are not needed
    bool adds[2];
    const float *partial;
    int64_t chunks, columns;
} nn_fold;

/* The chunks of 32 columns are distributed over NN_SUM_ROWS warps. */
static __global__ void __launch_bounds__(NN_THREADS) nn_k_fold_sums(nn_fold f) {
    __shared__ float shared[NN_SUM_ROWS * NN_WARP];
    const unsigned tiles = nn_d_tiles(f.columns, NN_WARP);
    const int64_t part = blockIdx.x / tiles;
    const unsigned lane = threadIdx.x % NN_WARP;
    const unsigned warp = threadIdx.x / NN_WARP;
    const int64_t c = (int64_t)(blockIdx.x % tiles) * NN_WARP + lane;
    const float *from = f.partial + part * f.chunks * f.columns + c;
    const nn_values out = f.out[part];
    float sum = 0.0f;
    NN_UNROLL_FOUR
    for (int64_t i = warp; i < f.chunks; i += NN_SUM_ROWS) {
        sum += c < f.columns && out.data != NULL ? from[i * f.columns] : 0.0f;
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (warp > 0 || c >= f.columns || out.data == NULL) {
        return;
    }
    for (unsigned i = 1; i < NN_SUM_ROWS; i++) {
        sum += shared[i * NN_WARP + lane];
    }
    nn_set(out, c, f.adds[part] ? nn_d_sum(nn_get(out, c), sum) : sum);
}

static int nn_cuda_fold(const ms_call *call, nn_dest sums, nn_dest products, const nn_sums *s) {
    nn_fold f;
    f.out[0] = nn_values_at(sums);
    f.out[1] = nn_values_at(products);
    f.adds[0] = sums.beta != 0.0f;
    f.adds[1] = products.beta != 0.0f;
    f.partial = s->partial;
    f.chunks = s->chunks;
    f.columns = s->columns;
    const int64_t tiles = nn_divide_up(s->columns, NN_WARP);
    return nn_launch(call, nn_grid_of(products.data != NULL ? 2 * tiles : tiles, 1, NN_THREADS),
                     nn_k_fold_sums, f);
}

/* sums and products (columns each), rounded once: what s adds up. work has nn_cuda_column_floats,
   or twice that if there are products. */
static int nn_cuda_column_sums(const ms_call *call, nn_dest sums, nn_dest products, nn_sums s,
                               float *work) {
    if (sums.data == NULL && products.data == NULL) {
        return 0;
    }
    const int64_t width = nn_cuda_wide(s.dy.dtype);
    const bool wide = s.columns % width == 0 && nn_aligned(s.dy.data) && nn_aligned(s.x.data);
    const int64_t tiles = nn_divide_up(s.columns, NN_WARP * (wide ? width : 1));
    s.chunk_rows = nn_divide_up(s.rows, nn_cuda_chunks(s.rows, s.columns));
    s.chunks = nn_divide_up(s.rows, s.chunk_rows);
    s.partial = work;
    s.x.data = products.data != NULL ? s.x.data : NULL;
    const int result = nn_launch(call, nn_grid_of(tiles * s.chunks, 1, NN_THREADS),
                                 nn_k_column_sums[nn_type_index(s.dy.dtype)][wide], s);
    return nn_first(result, nn_cuda_fold(call, sums, products, &s));
}

/* The sums of dy, without products. */
static nn_sums nn_sums_of(nn_values dy, int64_t rows, int64_t columns) {
    nn_sums s;
    memset(&s, 0, sizeof s);
    s.dy = dy;
    s.rows = rows;
    s.columns = columns;
    return s;
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda linear

/* x (rows, columns) is a product of matrices: h = x + bias, y = op(h, residual), of h as it is
   rounded in memory. h.data NULL: it is not kept; bias and residual.data may be NULL. y may be x.
   Each thread has WIDE columns and NN_BIAS_ROWS rows. */
typedef struct nn_bias {
    nn_values y, h, x, residual; // of one dtype
    const float *bias;
    int64_t rows, columns;
} nn_bias;

template <typename T, typename F, unsigned WIDE>
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
            nn_wide<WIDE>::load(value[r], (const T *)n.x.data + (begin + r) * n.columns + c);
        }
        if (begin + r < n.rows && n.residual.data != NULL) {
            nn_wide<WIDE>::load(other[r], (const T *)n.residual.data + (begin + r) * n.columns + c);
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
            value[r][k] = nn_d_rounded<T>(nn_d_sum(value[r][k], shift[k]));
        }
        if (n.h.data != NULL) {
            nn_wide<WIDE>::store((T *)n.h.data + i, value[r]);
        }
        op.start(i);
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            value[r][k] = op(i + k, value[r][k], other[r][k]);
        }
        nn_wide<WIDE>::store((T *)n.y.data + i, value[r]);
    }
}

/* Launches the kernel above. */
template <typename T, typename F>
static int nn_cuda_bias_as(const ms_call *call, F op, const nn_bias &n) {
    const bool wide = n.columns % nn_type<T>::WIDE == 0 && nn_aligned(n.y.data) &&
                      nn_aligned(n.h.data) && nn_aligned(n.x.data) && nn_aligned(n.bias) &&
                      nn_aligned(n.residual.data);
    const int64_t tiles = nn_divide_up(n.columns, NN_THREADS * (wide ? nn_type<T>::WIDE : 1));
    const int64_t blocks = tiles * nn_divide_up(n.rows, NN_BIAS_ROWS);
    return nn_launch(call, nn_grid_of(blocks, 1, NN_THREADS),
                     wide ? nn_k_bias<T, F, nn_type<T>::WIDE> : nn_k_bias<T, F, 1>, op, n);
}

template <typename F> static int nn_cuda_bias(const ms_call *call, F op, const nn_bias &n) {
    return NN_AS(n.y.dtype, nn_cuda_bias_as, call, op, n);
}

/* y = x * transpose(weight). */
static int nn_cuda_product(const ms_call *call, nn_values y, nn_values x, nn_values weight,
                           nn_linear_size n) {
    return (int)ms_gemm(call, 1.0f, nn_matrix(x, n.rows, n.in, n.in),
                        ms_transpose(nn_matrix(weight, n.out, n.in, n.in)), 0.0f,
                        nn_matrix(y, n.rows, n.out, n.out));
}

static nn_bias nn_bias_of(nn_values y, nn_values x, const float *bias, nn_linear_size n) {
    nn_bias b;
    memset(&b, 0, sizeof b);
    b.y = y;
    b.x = x;
    b.bias = bias;
    b.rows = n.rows;
    b.columns = n.out;
    return b;
}

/* The bias is added to the product afterwards, as in linear_gelu and linear_add, where the same
   kernel also evaluates gelu or adds the residual: so a block layer gives the same bits. */
static int nn_cuda_linear(const ms_call *call, nn_values y, nn_values x, nn_values weight,
                          const float *bias, nn_linear_size n) {
    const int result = nn_cuda_product(call, y, x, weight, n);
    if (result != 0 || bias == NULL) {
        return result;
    }
    return nn_cuda_bias(call, nn_op_copy(), nn_bias_of(y, y, bias, n));
}

static int nn_cuda_linear_gelu(const ms_call *call, nn_values y, nn_values h, nn_values x,
                               nn_values weight, const float *bias, nn_linear_size n,
                               bool erf_form) {
    nn_op_gelu op;
    nn_bias b = nn_bias_of(y, h, bias, n);
    op.erf_form = erf_form;
    b.h = h;
    const int result = nn_cuda_product(call, h, x, weight, n);
    return result != 0 ? result : nn_cuda_bias(call, op, b);
}

static int nn_cuda_linear_add(const ms_call *call, nn_values y, nn_values residual, nn_values x,
                              nn_values weight, const float *bias, nn_linear_size n,
                              const nn_drop *drop) {
    nn_bias b = nn_bias_of(y, y, bias, n);
    b.residual = residual;
    const int result = nn_cuda_product(call, y, x, weight, n);
    return result != 0
               ? result
               : nn_cuda_bias(call, nn_op_dropout_of(drop->probability, drop->seed, true), b);
}

static int nn_cuda_linear_backward(const ms_call *call, nn_dest dx, nn_dest dweight, nn_dest dbias,
                                   nn_values dy, nn_values x, nn_values weight, nn_linear_size n,
                                   float *work) {
    const int result = nn_linear_products(call, dx, dweight, dy, x, weight, n);
    return nn_first(result, nn_cuda_column_sums(call, dbias, nn_nowhere(),
                                                nn_sums_of(dy, n.rows, n.out), work));
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda embedding

/* The tables that an embedding adds up. */
typedef struct nn_lookups {
    nn_lookup table[3];
    int count;
} nn_lookups;

/* The entry that a row takes; below 0: the table has no such entry. */
__device__ __forceinline__ int64_t nn_d_entry(const nn_lookup &lookup, int64_t row) {
    const int64_t entry =
        lookup.index != NULL ? lookup.index[row] : (lookup.first + row) % lookup.period;
    return entry < lookup.entries ? entry : -1;
}

/* y (rows, channels) = the sum of the tables' rows, NaN if a table has no such entry. Each thread
   has WIDE channels. */
template <typename T, unsigned WIDE>
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_embedding(T *y, nn_lookups lookups, int64_t channels) {
    const unsigned tiles = nn_d_tiles(channels, NN_THREADS * WIDE);
    const int64_t row = blockIdx.x / tiles;
    const int64_t c = ((int64_t)(blockIdx.x % tiles) * NN_THREADS + threadIdx.x) * WIDE;
    float sum[WIDE] = {0};
    if (c >= channels) {
        return;
    }
    for (int l = 0; l < lookups.count; l++) {
        const T *table = (const T *)lookups.table[l].table.data;
        if (table == NULL) {
            continue;
        }
        const int64_t entry = nn_d_entry(lookups.table[l], row);
        float value[WIDE];
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            value[k] = nn_nan();
        }
        if (entry >= 0) {
            nn_wide<WIDE>::load(value, table + entry * channels + c);
        }
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            sum[k] = l == 0 ? value[k] : sum[k] + value[k];
        }
    }
    nn_wide<WIDE>::store(y + row * channels + c, sum);
}

template <typename T>
static int nn_cuda_embedding_as(const ms_call *call, nn_values y, const nn_lookups &lookups,
                                int64_t rows, int64_t channels) {
    bool wide = channels % nn_type<T>::WIDE == 0 && nn_aligned(y.data);
    for (int l = 0; l < lookups.count; l++) {
        wide = wide && nn_aligned(lookups.table[l].table.data);
    }
    const int64_t tiles = nn_divide_up(channels, NN_THREADS * (wide ? nn_type<T>::WIDE : 1));
    return nn_launch(call, nn_grid_of(rows * tiles, 1, NN_THREADS),
                     wide ? nn_k_embedding<T, nn_type<T>::WIDE> : nn_k_embedding<T, 1>, y.data,
                     lookups, channels);
}

static int nn_cuda_embedding(const ms_call *call, nn_values y, const nn_lookup *lookups,
                             int lookup_count, int64_t rows, int64_t channels) {
    nn_lookups all;
    memset(&all, 0, sizeof all);
    all.count = lookup_count;
    for (int l = 0; l < lookup_count; l++) {
        all.table[l] = lookups[l];
    }
    return NN_AS(y.dtype, nn_cuda_embedding_as, call, y, all, rows, channels);
}

/* Rows of a matrix in blocks: a thread per block. A row that the matrix does not have becomes NaN. */
template <typename T>
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_decode(T *y, nn_coded from, const int32_t *index, int64_t first, int64_t rows) {
    const int length = blocks_length(from.kind);
    const int64_t in_row = from.columns / length;
    const int64_t i = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    if (i >= rows * in_row) {
        return;
    }
    const int64_t row = index != NULL ? (int64_t)index[i / in_row] : first + i / in_row;
    const bool is_there = row >= 0 && row < from.rows;
    float value[BLOCKS_LONGEST];
    if (is_there) {
        const int64_t block = row * in_row + i % in_row;
        blocks_decode_one(from.kind, from.blocks + block * blocks_bytes(from.kind), value);
    }
    for (int k = 0; k < length; k++) {
        nn_d_round(y + i * length + k, is_there ? value[k] : nn_nan());
    }
}

template <typename T>
static int nn_cuda_decode_as(const ms_call *call, nn_values y, const nn_coded &from,
                             const int32_t *index, int64_t first, int64_t rows) {
    const int64_t count = rows * (from.columns / blocks_length(from.kind));
    return nn_launch(call, nn_grid_of(nn_divide_up(count, NN_THREADS), 1, NN_THREADS),
                     nn_k_decode<T>, y.data, from, index, first, rows);
}

static int nn_cuda_decode(const ms_call *call, nn_values y, nn_coded from, const int32_t *index,
                          int64_t first, int64_t rows) {
    return NN_AS(y.dtype, nn_cuda_decode_as, call, y, from, index, first, rows);
}

/* Adds up the rows of dy that took the same entry of a table. */
typedef struct nn_scatter {
    nn_values out; // (entries, channels)
    nn_values dy;
    const int32_t *index;
    int64_t rows, entries, channels, first, period; // first: as in nn_lookup
    bool adds;
} nn_scatter;

template <typename T>
__device__ __forceinline__ void nn_d_give_as(const nn_scatter &s, int64_t i, float sum) {
    T *to = (T *)s.out.data + i;
    nn_d_round(to, s.adds ? nn_d_sum(nn_d_float(*to), sum) : sum);
}

/* Stores a sum as element i of the table, or adds it. */
__device__ __forceinline__ void nn_d_give(const nn_scatter &s, int64_t i, float sum) {
    if (s.out.dtype == MS_DTYPE_F32) {
        nn_d_give_as<float>(s, i, sum);
    } else if (s.out.dtype == MS_DTYPE_BF16) {
        nn_d_give_as<nn_bf16>(s, i, sum);
    } else {
        nn_d_give_as<nn_f16>(s, i, sum);
    }
}

/* Writes to match, in order, which of the rows first ... first + NN_THREADS - 1 took this token,
   and returns how many did. */
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

/* A block per row and NN_SCATTER_COLUMNS columns. If its row is the first that took its token, the
   block adds up all rows that did, in their order; otherwise the block of that first row does. */
template <typename T>
__device__ __forceinline__ void nn_d_scatter(const nn_scatter &s, int *match, unsigned *votes) {
    const T *dy = (const T *)s.dy.data;
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
                    counts ? nn_d_float(dy[from * s.channels + column]) : 0.0f;
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
            nn_d_give(s, token * s.channels + column, sum[k]);
        }
    }
}

#define NN_SCATTER(name, type)                                                                     \
    static __global__ void __launch_bounds__(NN_THREADS) name(nn_scatter s) {                      \
        __shared__ int match[NN_THREADS];                                                          \
        __shared__ unsigned votes[NN_THREADS / NN_WARP];                                           \
        nn_d_scatter<type>(s, match, votes);                                                       \
    }

NN_SCATTER(nn_k_scatter_f32, float)
NN_SCATTER(nn_k_scatter_bf16, nn_bf16)
NN_SCATTER(nn_k_scatter_f16, nn_f16)

/* By nn_type_index. */
static void (*const nn_k_scatter[3])(nn_scatter s) = {nn_k_scatter_f32, nn_k_scatter_bf16,
                                                      nn_k_scatter_f16};

/* The same for a table without index, where row r takes entry (first + r) % period. A thread per
   element. */
template <typename T>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_scatter_periodic(nn_scatter s) {
    const int64_t i = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    const int64_t entry = i / s.channels;
    const int64_t begin = (entry + s.period - s.first % s.period) % s.period;
    float sum = 0.0f;
    if (i >= s.entries * s.channels || (s.adds && (entry >= s.period || begin >= s.rows))) {
        return;
    }
    for (int64_t r = begin; r < s.rows && entry < s.period; r += s.period) {
        sum += nn_d_float(((const T *)s.dy.data)[r * s.channels + i % s.channels]);
    }
    nn_d_give(s, i, sum);
}

template <typename T> static int nn_cuda_scatter_periodic_as(const ms_call *call, nn_scatter s) {
    const int64_t blocks = nn_divide_up(s.entries * s.channels, NN_THREADS);
    return nn_launch(call, nn_grid_of(blocks, 1, NN_THREADS), nn_k_scatter_periodic<T>, s);
}

/* In a table of few entries many rows take each: they are added up by nn_k_column_sums. */
static int nn_cuda_scatter_few(const ms_call *call, nn_dest dtable, const nn_lookup *lookup,
                               nn_values dy, int64_t rows, int64_t channels, float *work) {
    int result = 0;
    for (int32_t entry = 0; entry < lookup->entries; entry++) {
        nn_sums s = nn_sums_of(dy, rows, channels);
        s.index = lookup->index;
        s.entry = entry;
        const nn_dest row =
            nn_dest_of(nn_from(nn_values_at(dtable), entry * channels), dtable.beta);
        result = nn_first(result, nn_cuda_column_sums(call, row, nn_nowhere(), s, work));
    }
    return result;
}

static int nn_cuda_embedding_backward(const ms_call *call, nn_dest dtable, const nn_lookup *lookup,
                                      nn_values dy, int64_t rows, int64_t channels, float *work) {
    nn_scatter s;
    int result = 0;
    if (dtable.data == NULL) {
        return 0;
    }
    if (lookup->index != NULL && lookup->entries <= NN_FEW_ENTRIES) {
        return nn_cuda_scatter_few(call, dtable, lookup, dy, rows, channels, work);
    }
    s.out = nn_values_at(dtable);
    s.dy = dy;
    s.index = lookup->index;
    s.rows = rows;
    s.entries = lookup->entries;
    s.channels = channels;
    s.first = lookup->first;
    s.period = lookup->period;
    s.adds = dtable.beta != 0.0f;
    if (lookup->index == NULL) {
        return NN_AS(dy.dtype, nn_cuda_scatter_periodic_as, call, s);
    }
    if (!s.adds) {
        result = nn_cuda_error(cudaMemsetAsync(
            s.out.data, 0, (size_t)(s.entries * channels) * nn_value_bytes(s.out.dtype),
            (cudaStream_t)call->stream));
    }
    const int64_t blocks = rows * nn_divide_up(channels, NN_SCATTER_COLUMNS);
    return nn_first(result, nn_launch(call, nn_grid_of(blocks, 1, NN_THREADS),
                                      nn_k_scatter[nn_type_index(dy.dtype)], s));
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda rows  layer normalization, softmax

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

/* The sum over a block, of one value per warp; shared has a float per warp. */
__device__ __forceinline__ float nn_d_block_sum(float value, float *shared) {
    float total = 0.0f;
    if (threadIdx.x % NN_WARP == 0) {
        shared[threadIdx.x / NN_WARP] = value;
    }
    __syncthreads();
    for (unsigned i = 0; i < blockDim.x / NN_WARP; i++) {
        total += shared[i];
    }
    __syncthreads(); // shared may be written again
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

/* A team of threads holds a row in registers: ITEMS floats per thread, WIDE of them side by side. A
   team is a warp or, for long rows, a block. */
template <unsigned TEAM, unsigned ITEMS, unsigned WIDE> struct nn_team {
    unsigned lane;
    float *shared; // a float per warp, if the team is a block

    /* The column of an item. */
    __device__ __forceinline__ unsigned column(unsigned item) const {
        return (item / WIDE * TEAM + lane) * WIDE + item % WIDE;
    }

    /* v = the row's first count columns, and zeros for the others. */
    template <typename T>
    __device__ __forceinline__ void load(float *v, const T *row, int64_t count) const {
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

    template <typename T>
    __device__ __forceinline__ void store(T *row, const float *v, int64_t count, bool adds) const {
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

    /* What the team has read, its threads may overwrite from here on. */
    __device__ __forceinline__ void wait() const {
        if (TEAM == NN_WARP) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    }

    /* The sum over the team; all its threads get the same bits. */
    __device__ __forceinline__ float sum(float value) const {
        value = nn_d_warp_sum(value);
        return TEAM == NN_WARP ? value : nn_d_block_sum(value, shared);
    }

    __device__ __forceinline__ float most(float value) const {
        value = nn_d_warp_most(value);
        return TEAM == NN_WARP ? value : nn_d_block_most(value, shared);
    }
};

/* The operands of kernels on rows: a and b are read, out is written; their rows are strides apart.
   n has the numbers of rows and columns, and the operands of a layer normalization. */
typedef struct nn_rowwise {
    nn_values out, a, b; // out and b, if there is one, of one dtype
    int64_t out_stride, a_stride, b_stride;
    nn_norm n;
    float scale;
    bool adds, causal;
} nn_rowwise;

/* Where a row of an operand begins. */
template <typename T>
__device__ __forceinline__ T *nn_d_row(const nn_values &values, int64_t stride, int64_t row) {
    return (T *)values.data + row * stride;
}

/* Where a row that is normalized begins, in an operand whose rows follow each other, or groups of
   rows do. */
template <typename T>
__device__ __forceinline__ T *nn_d_norm_row(const nn_values &values, const nn_norm &n,
                                            int64_t row) {
    return (T *)values.data + nn_row_place(&n, row);
}

/* out = (a - mean) * rstd * weight + bias, or a * rstd * weight; out may be a. */
struct nn_row_layernorm {
    template <typename T, unsigned TEAM, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<TEAM, ITEMS, WIDE> &team,
                                               const nn_rowwise &w, int64_t row) {
        const int64_t width = w.n.width;
        float v[ITEMS];
        float total = 0.0f;
        float squares = 0.0f;
        team.load(v, nn_d_norm_row<T>(w.a, w.n, row), width);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            total += v[i];
        }
        const bool centers = w.n.mean != NULL;
        const float mean = centers ? team.sum(total) / (float)width : 0.0f;
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
                if (centers) {
                    nn_wide<WIDE>::load(bias, w.n.bias + team.column(i));
                }
            }
            NN_UNROLL
            for (unsigned k = 0; k < WIDE; k++) {
                const float by = w.n.from_one ? 1.0f + weight[k] : weight[k];
                v[i + k] = (v[i + k] - mean) * rstd * by + bias[k];
            }
        }
        team.store(nn_d_norm_row<T>(w.out, w.n, row), v, width, false);
        if (team.lane == 0) {
            if (centers) {
                w.n.mean[row] = mean;
            }
            w.n.rstd[row] = rstd;
        }
    }
};

/* a is dy, b is x; out, the gradient of x, may be either. */
struct nn_row_layernorm_backward {
    template <typename T, unsigned TEAM, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<TEAM, ITEMS, WIDE> &team,
                                               const nn_rowwise &w, int64_t row) {
        const int64_t width = w.n.width;
        const bool centers = w.n.mean != NULL;
        const float mean = centers ? w.n.mean[row] : 0.0f;
        const float rstd = w.n.rstd[row];
        float slope[ITEMS];  // dy * weight
        float normal[ITEMS]; // (x - mean) * rstd
        float slopes = 0.0f;
        float products = 0.0f;
        team.load(slope, nn_d_norm_row<T>(w.a, w.n, row), width);
        team.load(normal, nn_d_norm_row<T>(w.b, w.n, row), width);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i += WIDE) {
            float weight[WIDE] = {0};
            if (team.column(i) < width) {
                nn_wide<WIDE>::load(weight, w.n.weight + team.column(i));
            }
            NN_UNROLL
            for (unsigned k = i; k < i + WIDE; k++) {
                slope[k] *= w.n.from_one ? 1.0f + weight[k - i] : weight[k - i];
                normal[k] = (normal[k] - mean) * rstd;
                slopes += slope[k];
                products += slope[k] * normal[k]; // slope is 0 beyond the row
            }
        }
        slopes = centers ? team.sum(slopes) / (float)width : 0.0f;
        products = team.sum(products) / (float)width;
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            slope[i] = __fmul_rn(slope[i] - slopes - normal[i] * products, rstd);
        }
        team.store(nn_d_norm_row<T>(w.out, w.n, row), slope, width, w.adds);
    }
};

/* How many columns a row of probabilities (..., T, T) sees. The number of a row in its group fits
   32 bits, whose remainder is much faster than that of 64. */
__device__ __forceinline__ int64_t nn_d_seen(const nn_rowwise &w, int64_t row) {
    return w.causal ? (uint32_t)row % (uint32_t)w.n.width + 1 : w.n.width;
}

/* out = softmax(a) over the columns that the row sees, and 0 for the others, which are not read. a
   is F32. Rows of out may begin where those of a begin: in 16 bits, where threads write what others
   read, all of a team have read before one writes. */
struct nn_row_softmax {
    template <typename T, unsigned TEAM, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<TEAM, ITEMS, WIDE> &team,
                                               const nn_rowwise &w, int64_t row) {
        const int64_t seen = nn_d_seen(w, row);
        float v[ITEMS];
        float most = -FLT_MAX;
        float total = 0.0f;
        team.load(v, nn_d_row<float>(w.a, w.a_stride, row), seen);
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
        if (sizeof(T) != sizeof(float)) {
            team.wait();
        }
        team.store(nn_d_row<T>(w.out, w.out_stride, row), v, w.n.width, false);
    }
};

/* a, F32, is the gradient of probabilities b: out = b * (a - sum(a * b)) * scale; out as above. */
struct nn_row_softmax_backward {
    template <typename T, unsigned TEAM, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<TEAM, ITEMS, WIDE> &team,
                                               const nn_rowwise &w, int64_t row) {
        const int64_t seen = nn_d_seen(w, row);
        float slope[ITEMS];
        float p[ITEMS];
        float total = 0.0f;
        team.load(slope, nn_d_row<float>(w.a, w.a_stride, row), seen);
        team.load(p, nn_d_row<T>(w.b, w.b_stride, row), seen);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            total += slope[i] * p[i];
        }
        total = team.sum(total);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            slope[i] = p[i] * (slope[i] - total) * w.scale;
        }
        if (sizeof(T) != sizeof(float)) {
            team.wait();
        }
        team.store(nn_d_row<T>(w.out, w.out_stride, row), slope, w.n.width, false);
    }
};

template <typename F, typename T, unsigned ITEMS, unsigned WIDE>
static __global__ void __launch_bounds__(NN_ROW_WARPS *NN_WARP) nn_k_rows(nn_rowwise w) {
    const int64_t row = (int64_t)blockIdx.x * NN_ROW_WARPS + threadIdx.x / NN_WARP;
    nn_team<NN_WARP, ITEMS, WIDE> team;
    team.lane = threadIdx.x % NN_WARP;
    team.shared = NULL;
    if (row < w.n.rows) {
        F::template run<T>(team, w, row);
    }
}

/* A block per row. */
template <typename F> struct nn_long {
    template <typename T, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_rowwise &w, float *shared) {
        nn_team<NN_THREADS, NN_WIDEST / NN_THREADS, WIDE> team;
        team.lane = threadIdx.x;
        team.shared = shared;
        F::template run<T>(team, w, (int64_t)blockIdx.x);
    }
};

#define NN_LONG_ROWS(name, operation)                                                              \
    NN_SHARED_KERNELS(name, NN_THREADS, nn_rowwise, (NN_THREADS / NN_WARP), nn_long<operation>::run)

NN_LONG_ROWS(nn_k_layernorm, nn_row_layernorm)
NN_LONG_ROWS(nn_k_layernorm_backward, nn_row_layernorm_backward)
NN_LONG_ROWS(nn_k_softmax, nn_row_softmax)
NN_LONG_ROWS(nn_k_softmax_backward, nn_row_softmax_backward)

typedef void (*nn_rows_kernel)(nn_rowwise w);

/* Launches the kernel that holds rows of this width in the fewest registers. */
template <typename T, typename F>
static int nn_cuda_rows_as(const ms_call *call, const nn_rowwise &w, F,
                           const nn_rows_kernel *long_rows) {
    enum { WIDE = nn_type<T>::WIDE };
    static const nn_rows_kernel kernels[2][4] = {
        {nn_k_rows<F, T, 8, 1>, NULL, nn_k_rows<F, T, 32, 1>, NULL},
        {nn_k_rows<F, T, 8, WIDE>, nn_k_rows<F, T, 16, WIDE>, nn_k_rows<F, T, 32, WIDE>,
         nn_k_rows<F, T, 64, WIDE>},
    };
    const bool wide = w.n.width % WIDE == 0 && nn_aligned(w.out.data) && nn_aligned(w.a.data) &&
                      nn_aligned(w.b.data) && nn_aligned(w.n.weight) && nn_aligned(w.n.bias);
    for (int i = 0; i < 4; i++) {
        if (kernels[wide][i] != NULL && w.n.width <= (8 << i) * NN_WARP) {
            const int64_t blocks = nn_divide_up(w.n.rows, NN_ROW_WARPS);
            return nn_launch(call, nn_grid_of(blocks, 1, NN_ROW_WARPS * NN_WARP), kernels[wide][i],
                             w);
        }
    }
    return nn_launch(call, nn_grid_of(w.n.rows, 1, NN_THREADS), long_rows[wide], w);
}

template <typename F>
static int nn_cuda_rows(const ms_call *call, const nn_rowwise &w,
                        const nn_rows_kernel (&long_rows)[3][2]) {
    const nn_rows_kernel *own = long_rows[nn_type_index(w.out.dtype)];
    return NN_AS(w.out.dtype, nn_cuda_rows_as, call, w, F(), own);
}

/* Operands whose rows follow each other. */
static nn_rowwise nn_rowwise_of(nn_values out, nn_values a, nn_values b, const nn_norm *n) {
    nn_rowwise w;
    memset(&w, 0, sizeof w);
    w.out = out;
    w.a = a;
    w.b = b;
    w.out_stride = n->width;
    w.a_stride = n->width;
    w.b_stride = n->width;
    w.n = *n;
    return w;
}

static int nn_cuda_layernorm(const ms_call *call, nn_values y, nn_values x, const nn_norm *n) {
    return nn_cuda_rows<nn_row_layernorm>(call, nn_rowwise_of(y, x, nn_f32(NULL), n),
                                          nn_k_layernorm);
}

static int nn_cuda_layernorm_backward(const ms_call *call, nn_dest dx, nn_dest dweight,
                                      nn_dest dbias, nn_values dy, nn_values x, const nn_norm *n,
                                      float *work) {
    nn_sums s = nn_sums_of(dy, n->rows, n->width);
    s.x = x;
    s.mean = n->mean;
    s.rstd = n->rstd;
    s.places = n->places;
    const int result = nn_cuda_column_sums(call, dbias, dweight, s, work);
    if (result != 0 || dx.data == NULL) {
        return result;
    }
    nn_rowwise w = nn_rowwise_of(nn_values_at(dx), dy, x, n);
    w.adds = dx.beta != 0.0f;
    return nn_cuda_rows<nn_row_layernorm_backward>(call, w, nn_k_layernorm_backward);
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda cross-entropy

/* logits (rows, classes), a block per row, read once: each thread keeps the largest of its logits
   and the sum of exponentials relative to it. Milakov and Gimelshein, "Online Normalizer
   Calculation for Softmax", 2018, algorithm 3. Rows may have any alignment: neighbouring threads
   read neighbouring values, and each has four loads in flight. */
typedef struct nn_entropy {
    float *losses, *stats;
    nn_values logits, dlogits;
    const float *dlosses, *saved_stats; // saved_stats: the stats that forward saved
    const int32_t *targets;
    int64_t classes;
    bool adds;
} nn_entropy;

template <typename T, unsigned>
__device__ __forceinline__ void nn_d_cross_entropy(const nn_entropy &e, float *shared) {
    const int64_t row = blockIdx.x;
    const T *x = (const T *)e.logits.data + row * e.classes;
    const int32_t target = e.targets[row];
    float most = -FLT_MAX;
    float total = 0.0f;
    // an ignored row of NaN has the loss NaN, so that a token outside its table shows up here too
    float loss = target < e.classes && !nn_is_nan(nn_d_float(x[0])) ? 0.0f : nn_nan();
    float log_sum = loss;
    if (target >= 0 && target < e.classes) {
        for (int64_t i = threadIdx.x; i < e.classes; i += 4 * NN_LONG_THREADS) {
            float value[4];
            float larger = most;
            NN_UNROLL
            for (int k = 0; k < 4; k++) {
                const int64_t at = i + k * NN_LONG_THREADS;
                value[k] = at < e.classes ? nn_d_float(x[at]) : -FLT_MAX;
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
        loss = log_sum - (nn_d_float(x[target]) - most);
    } else {
        most = loss;
    }
    if (threadIdx.x == 0) {
        e.losses[row] = loss;
        e.stats[2 * row] = most;
        e.stats[2 * row + 1] = log_sum;
    }
}

#define NN_CROSS_ENTROPY(name, type)                                                               \
    NN_SHARED_KERNEL(name, NN_LONG_THREADS, nn_entropy, NN_LONG_THREADS / NN_WARP,                 \
                     nn_d_cross_entropy, type, 1)

NN_CROSS_ENTROPY(nn_k_cross_entropy_f32, float)
NN_CROSS_ENTROPY(nn_k_cross_entropy_bf16, nn_bf16)
NN_CROSS_ENTROPY(nn_k_cross_entropy_f16, nn_f16)

/* By nn_type_index. */
static void (*const nn_k_cross_entropy[3])(nn_entropy e) = {
    nn_k_cross_entropy_f32, nn_k_cross_entropy_bf16, nn_k_cross_entropy_f16};

/* dlogits = dlosses * (softmax(logits) - onehot(target)); dlogits may be logits. */
template <typename T>
static __global__ void __launch_bounds__(NN_LONG_THREADS)
    nn_k_cross_entropy_backward(nn_entropy e) {
    const int64_t row = blockIdx.x;
    const T *x = (const T *)e.logits.data + row * e.classes;
    T *to = (T *)e.dlogits.data + row * e.classes;
    const int32_t target = e.targets[row];
    const float slope = e.dlosses[row];
    const float most = e.saved_stats[2 * row];
    const float log_sum = e.saved_stats[2 * row + 1];
    if (target < 0 && e.adds) {
        return;
    }
    for (int64_t i = threadIdx.x; i < e.classes; i += 4 * NN_LONG_THREADS) {
        float value[4];
        NN_UNROLL
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + k * NN_LONG_THREADS;
            value[k] = at < e.classes && target >= 0 ? nn_d_float(x[at]) : 0.0f;
        }
        NN_UNROLL
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + k * NN_LONG_THREADS;
            const float share = __fmul_rn(slope, nn_exp(value[k] - most - log_sum));
            const float own = target < 0 ? 0.0f : nn_d_sum(share, at == target ? -slope : 0.0f);
            if (at < e.classes) {
                nn_d_round(to + at, e.adds ? nn_d_sum(nn_d_float(to[at]), own) : own);
            }
        }
    }
}

static int nn_cuda_cross_entropy(const ms_call *call, float *losses, float *stats, nn_values logits,
                                 const int32_t *targets, int64_t rows, int64_t classes) {
    nn_entropy e;
    memset(&e, 0, sizeof e);
    e.losses = losses;
    e.stats = stats;
    e.logits = logits;
    e.targets = targets;
    e.classes = classes;
    return nn_launch(call, nn_grid_of(rows, 1, NN_LONG_THREADS),
                     nn_k_cross_entropy[nn_type_index(logits.dtype)], e);
}

template <typename T>
static int nn_cuda_cross_entropy_backward_as(const ms_call *call, const nn_entropy &e,
                                             int64_t rows) {
    return nn_launch(call, nn_grid_of(rows, 1, NN_LONG_THREADS), nn_k_cross_entropy_backward<T>, e);
}

static int nn_cuda_cross_entropy_backward(const ms_call *call, nn_dest dlogits,
                                          const float *dlosses, const float *stats,
                                          nn_values logits, const int32_t *targets, int64_t rows,
                                          int64_t classes) {
    nn_entropy e;
    if (dlogits.data == NULL) {
        return 0;
    }
    memset(&e, 0, sizeof e);
    e.dlogits = nn_values_at(dlogits);
    e.dlosses = dlosses;
    e.saved_stats = stats;
    e.logits = logits;
    e.targets = targets;
    e.classes = classes;
    e.adds = dlogits.beta != 0.0f;
    return NN_AS(logits.dtype, nn_cuda_cross_entropy_backward_as, call, e, rows);
}

#endif // MEMSCALE_NN_CUDA_LAYERS_H
