/*  nn_cuda.h - the kernels of nn.h for CUDA, and nn_cuda(), the table of them.

    A part of nn.h, which includes it: it uses what is declared up to ">>nn device", and nothing of
    nn_cpu.h. All programs get the first section, in C: the sizes of scratch memory, and
    nn_cuda_dry(), the table without kernels. The rest is CUDA C++. It is compiled if
    NN_CUDA_IMPLEMENTATION is defined before nn.h is included, as in cuda.cu.

        >>nn cuda scratch          sizes of scratch memory; nn_cuda_dry()
        >>nn cuda launch           constants, launches, errors
        >>nn cuda types            F32, BF16 and F16 in memory
        >>nn cuda elements         copy, add, dropout, gelu
        >>nn cuda columns          sums over rows
        >>nn cuda linear
        >>nn cuda embedding
        >>nn cuda rows             layer normalization, softmax
        >>nn cuda cross-entropy
        >>nn cuda attention
        >>nn cuda tiles            attention in tiles
        >>nn cuda images           relu, average pooling
        >>nn cuda channels         sums over the channels of images
        >>nn cuda batch norm
        >>nn cuda patches          max pooling, and sums over the patches that cover a pixel
        >>nn cuda convolution
        >>nn cuda table            nn_cuda()

    A new kernel goes to the section of its kind or to a new one before the table, and its row to
    nn_cuda() and, as NULL, to nn_cuda_dry(). */
#ifndef MEMSCALE_NN_CUDA_H
#define MEMSCALE_NN_CUDA_H

#ifndef MEMSCALE_NN_H
#error "include nn.h, which includes nn_cuda.h"
#endif

// ------------------------------------------------------------------------------------------------
// >>nn cuda scratch  sizes alone, which a dry run needs on a machine without a GPU

/* Floats of scratch memory of attention and of convolution, about. Tests, whose sizes are small,
   set it lower. */
#ifndef NN_GROUP_FLOATS
#define NN_GROUP_FLOATS (9 << 20)
#endif

/* Queries of a tile of attention, and its keys: at most 1024. */
#ifndef NN_CUDA_TILE
#define NN_CUDA_TILE 1024
#endif

enum {
    NN_THREADS = 256,          // threads of a block, in most kernels
    NN_SUM_FLOATS = 64 * 1024, // partial sums in scratch memory, about
    NN_TILE = 128,             // rows of a product's tile
    NN_BUSY_TILES = 128,       // tiles that keep a GPU busy
    NN_GROUP_PADDING = 128,    // floats that the alignment of a group of heads may take
    NN_ROW_PADDING = 8,        // rows of a tile of attention begin at multiples of so many floats
    NN_CHANNEL_ITEMS = 16,     // values of a channel that a thread sums
    NN_CHANNEL_CHUNK = NN_CHANNEL_ITEMS * NN_THREADS,
    NN_SEGMENT = 256,      // patches of a segment, at least, if there are several
    NN_WARP = 32,          // threads
    NN_LONG_THREADS = 512, // threads of a block that works on a row of logits
    NN_ROW_WARPS = 4,      // rows of a block, if each warp works on a row
    NN_WIDEST = 64 * 256,  // columns of the longest row that fits the registers of a block
    NN_SUM_ROWS = 8,       // warps of a block of nn_k_column_sums
    NN_BIAS_ROWS = 4,      // rows of a thread of nn_k_bias
    NN_SCATTER_WIDTH = 4,  // columns of a thread of nn_k_scatter
    NN_SCATTER_COLUMNS = NN_SCATTER_WIDTH * NN_THREADS,
    NN_FEW_ENTRIES = 4 // entries of a table, at most, whose gradient is summed entry by entry
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

/* Floats of scratch memory in backward, of one head in place and of one sequence packed (">>nn cuda
   attention" has what these two are). */
NN_API int64_t nn_cuda_head_floats(nn_attention_size n) {
    return n.sequence * (n.sequence + n.size);
}

NN_API int64_t nn_cuda_sequence_floats(nn_attention_size n) {
    return n.heads * n.sequence * (n.sequence + 4 * n.size);
}

/* Enough for these sizes and for all smaller ones: for the heads in place, and for the longest
   sequence that would be packed. Forward, of which a group has as many heads, needs no more: where
   it does not keep the probabilities in F32, they are a square of their own. */
NN_API int64_t nn_cuda_attention_floats(nn_attention_size n, bool backward) {
    (void)backward;
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
    return floats + NN_GROUP_PADDING;
}

/* Queries and keys of a tile: fewer in tests that have little scratch memory. */
NN_API int64_t nn_cuda_tile_side(nn_attention_size n) {
    int64_t side = NN_CUDA_TILE;
    while (side > 1 && 2 * side * side > NN_GROUP_FLOATS) {
        side /= 2;
    }
    return nn_least(side, n.sequence);
}

/* Floats between the rows of a tile with so many keys. */
NN_API int64_t nn_cuda_tile_stride(int64_t keys) {
    return nn_divide_up(keys, NN_ROW_PADDING) * NN_ROW_PADDING;
}

/* Floats of attention in tiles: of one head in place, and of one sequence packed, which is a single
   tile. Forward: a tile, and the sums, the largest score and the total of its queries. Backward: a
   tile of probabilities and one of their gradients; with several tiles, in 16 bits, also sums of
   the gradients of all queries and of a tile's keys and values. */
NN_API int64_t nn_cuda_tiled_head_floats(nn_attention_size n, bool backward) {
    const int64_t side = nn_cuda_tile_side(n);
    const int64_t tile = side * nn_cuda_tile_stride(side);
    const int64_t sums = n.sequence > side ? (n.sequence + 2 * side) * n.size : 0;
    return backward ? 2 * tile + sums : tile + side * (n.size + 2);
}

/* Keys and values that heads share are copied for each of them, and their gradients are F32 there. */
NN_API int64_t nn_cuda_shared_floats(nn_attention_size n, bool backward) {
    const bool shares = n.kv_heads < n.heads;
    return nn_attention_shared(&n) * (nn_cuda_tiled_head_floats(n, backward) +
                                      (shares ? (backward ? 4 : 2) * n.sequence * n.size : 0));
}

NN_API int64_t nn_cuda_tiled_sequence_floats(nn_attention_size n, bool backward) {
    const int64_t operands = (backward ? 4 : 3) * n.sequence * n.size;
    return n.heads * (nn_cuda_tiled_head_floats(n, backward) + operands);
}

NN_API int64_t nn_cuda_attention_queries(bool keeps_scores) {
    return keeps_scores ? 0 : NN_CUDA_TILE;
}

NN_API int64_t nn_cuda_tiled_attention_floats(nn_attention_size n, bool backward) {
    const int64_t head = nn_cuda_shared_floats(n, backward);
    int64_t floats = nn_most(head, nn_least(NN_GROUP_FLOATS, n.kv_heads * head));
    int64_t tiles = nn_divide_up(n.sequence, NN_TILE);
    while (tiles > 0 && tiles * tiles * n.heads >= NN_BUSY_TILES) {
        tiles--;
    }
    if (n.batch > 1 && tiles > 0) {
        n.sequence = nn_least(nn_cuda_tile_side(n), tiles * NN_TILE);
        const int64_t one = nn_cuda_tiled_sequence_floats(n, backward);
        floats = nn_most(floats, nn_most(one, nn_least(NN_GROUP_FLOATS, n.batch * one)));
    }
    return floats + NN_GROUP_PADDING;
}

NN_API int64_t nn_cuda_channel_chunks(nn_planes n) {
    return nn_divide_up(n.images * n.plane, NN_CHANNEL_CHUNK);
}

/* Partial sums and partial sums of products, and two more floats per channel. */
NN_API int64_t nn_cuda_batch_norm_floats(nn_planes n) {
    return n.channels * (2 * nn_cuda_channel_chunks(n) + 2);
}

/* Floats that the columns of a convolution may take, about: enough to keep a GPU busy, but no more
   than the layer reads and writes. All columns would be many times that. */
NN_API int64_t nn_cuda_conv2d_limit(const nn_window *w, int64_t out) {
    const int64_t image = w->channels * w->height * w->width + out * nn_window_patches(w);
    const int64_t tiles = nn_divide_up(NN_BUSY_TILES, nn_divide_up(out, NN_TILE));
    return nn_least(NN_GROUP_FLOATS,
                    nn_least(w->images * image, nn_window_depth(w) * NN_TILE * tiles));
}

NN_API int64_t nn_cuda_columns_floats(const nn_window *w, int64_t out) {
    const int64_t depth = nn_window_depth(w);
    return nn_is_pointwise(w)
               ? 0
               : nn_least(w->images * nn_window_patches(w) * depth,
                          nn_most(nn_cuda_conv2d_limit(w, out), depth * w->out_width));
}

/* The gradient of a weight is a sum over all patches of all images, in one of two ways. Image by
   image: each gives a product of its planes, which are not copied. Segment by segment: columns and
   gradients of many images are copied side by side and cut into segments of equal length, each of
   which gives a product. True: image by image, which is chosen if it needs no more memory. */
NN_API bool nn_cuda_sums_images(const nn_window *w, int64_t out) {
    return nn_is_pointwise(w) && out * w->channels <= (out + w->channels) * nn_window_patches(w);
}

/* At least nn_segments.patches, for this many patches and for any smaller number. */
NN_API int64_t nn_cuda_padded(int64_t patches) {
    return patches + patches / (NN_SEGMENT / 4) + 4;
}

NN_API int64_t nn_cuda_weight_floats(const nn_window *w, int64_t out) {
    const int64_t limit = nn_cuda_conv2d_limit(w, out);
    const int64_t product = out * nn_window_depth(w);
    const int64_t per_patch = 2 * (nn_window_depth(w) + out);
    if (nn_cuda_sums_images(w, out)) {
        return nn_least(w->images * product, nn_most(limit, product));
    }
    return nn_least(per_patch * nn_cuda_padded(w->images * nn_window_patches(w)),
                    nn_most(limit, per_patch * nn_cuda_padded(w->out_width)));
}

NN_API int64_t nn_cuda_conv2d_floats(const nn_window *w, int64_t out, bool backward) {
    const int64_t columns = nn_cuda_columns_floats(w, out);
    const nn_planes slopes = {w->images, out, nn_window_patches(w)};
    return backward ? nn_most(nn_cuda_batch_norm_floats(slopes),
                              nn_most(columns, nn_cuda_weight_floats(w, out)))
                    : columns;
}

#define NN_CUDA_SIZE(name, operands)  nn_cuda_##name,
#define NN_DRY_KERNEL(name, operands) NULL,

NN_API const nn_device *nn_cuda_dry(void) {
    static const nn_device cuda = {"cuda", NN_WIDEST,
                                   NN_SIZES(NN_CUDA_SIZE) NN_KERNELS(NN_DRY_KERNEL)};
    return &cuda;
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda launch  from here on for nvcc

#if defined(NN_CUDA_IMPLEMENTATION)

/* nn_k_...: kernels. nn_d_...: functions that kernels call. nn_cuda_...: functions of the table,
   and what they call; they only launch, on call->stream. The order of a sum depends on sizes and
   alignment alone, so that a recomputation, and another run, give the same bits. */
#if defined(__NVCC__)
#define NN_UNROLL      _Pragma("unroll")
#define NN_UNROLL_FOUR _Pragma("unroll 4")
#else
#define NN_UNROLL
#define NN_UNROLL_FOUR
#endif

/* The mask of a whole warp. */
#define NN_EVERY_LANE 0xffffffffu

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

/* The error of a call of the CUDA runtime, which is cleared, so that the next call does not report
   it again. */
NN_API int nn_cuda_error(cudaError_t error) {
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return (int)error;
}

/* Enqueues a kernel; returns 0 or the error of the CUDA runtime. An empty grid does nothing. */
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

/* Whether memory that starts here may be read 16 bytes at a time; true for NULL. */
NN_API bool nn_aligned(const void *data) {
    return ((uintptr_t)data & 15) == 0;
}

/* An addition that the compiler never fuses with the multiplication before it: adding to a gradient
   at once gives the same bits as adding later. */
__device__ __forceinline__ float nn_d_sum(float a, float b) {
    return __fadd_rn(a, b);
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda types  what kernels read and write; they compute in float

struct nn_bf16 {
    uint16_t bits;
};

struct nn_f16 {
    uint16_t bits;
};

__device__ __forceinline__ float nn_d_float(float x) {
    return x;
}

__device__ __forceinline__ float nn_d_float(nn_bf16 x) {
    return nn_of_bf16(x.bits);
}

__device__ __forceinline__ float nn_d_float(nn_f16 x) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
    return value;
#else
    return nn_of_f16(x.bits);
#endif
}

__device__ __forceinline__ void nn_d_round(float *to, float x) {
    *to = x;
}

__device__ __forceinline__ void nn_d_round(nn_bf16 *to, float x) {
    to->bits = nn_bf16_of(x);
}

__device__ __forceinline__ void nn_d_round(nn_f16 *to, float x) {
#if defined(__CUDA_ARCH__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
#else
    to->bits = nn_f16_of(x);
#endif
}

/* The float that a value becomes in memory of this type. */
template <typename T> __device__ __forceinline__ float nn_d_rounded(float x) {
    T stored;
    nn_d_round(&stored, x);
    return nn_d_float(stored);
}

/* Elements of a wide access, which is one of 16 bytes. */
template <typename T> struct nn_type {
    enum { WIDE = 16 / sizeof(T) };
};

/* What an access moves at once. */
template <typename T, unsigned COUNT> struct alignas(COUNT * sizeof(T)) nn_pack { T value[COUNT]; };

/* Left to itself, nvcc stores the members of a struct one by one in some kernels. */
template <typename T, unsigned COUNT>
__device__ __forceinline__ void nn_d_store(T *to, const nn_pack<T, COUNT> &pack) {
#if defined(__CUDA_ARCH__)
    if (sizeof pack == sizeof(uint4)) {
        uint4 words;
        memcpy(&words, &pack, sizeof pack);
        __stwb((uint4 *)(void *)to, words);
        return;
    }
    if (sizeof pack == sizeof(uint2)) {
        uint2 words;
        memcpy(&words, &pack, sizeof pack);
        __stwb((uint2 *)(void *)to, words);
        return;
    }
#endif
    *(nn_pack<T, COUNT> *)(void *)to = pack;
}

/* WIDE elements: side by side, at an address that is a multiple of their size or of 16, or one. */
template <unsigned WIDE> struct nn_wide {
    template <typename T> static __device__ __forceinline__ void load(float *to, const T *from) {
        enum { PART = WIDE * sizeof(T) > 16 ? 16 / sizeof(T) : WIDE };
        NN_UNROLL
        for (unsigned i = 0; i < WIDE; i += PART) {
            const nn_pack<T, PART> pack = *(const nn_pack<T, PART> *)(const void *)(from + i);
            NN_UNROLL
            for (unsigned k = 0; k < PART; k++) {
                to[i + k] = nn_d_float(pack.value[k]);
            }
        }
    }
    template <typename T> static __device__ __forceinline__ void store(T *to, const float *from) {
        enum { PART = WIDE * sizeof(T) > 16 ? 16 / sizeof(T) : WIDE };
        NN_UNROLL
        for (unsigned i = 0; i < WIDE; i += PART) {
            nn_pack<T, PART> pack;
            NN_UNROLL
            for (unsigned k = 0; k < PART; k++) {
                nn_d_round(&pack.value[k], from[i + k]);
            }
            nn_d_store(to + i, pack);
        }
    }
};

/* Calls a function template, whose first parameter is the type of values of this dtype. */
#define NN_AS(dtype, function, ...)                                                                \
    ((dtype) == MS_DTYPE_F32    ? function<float>(__VA_ARGS__)                                     \
     : (dtype) == MS_DTYPE_BF16 ? function<nn_bf16>(__VA_ARGS__)                                   \
                                : function<nn_f16>(__VA_ARGS__))

/* Elements of a wide access. */
static int64_t nn_cuda_wide(ms_dtype dtype) {
    return 16 / (int64_t)nn_value_bytes(dtype);
}

/* The place of a dtype in the tables below. */
static int nn_type_index(ms_dtype dtype) {
    return dtype == MS_DTYPE_F32 ? 0 : dtype == MS_DTYPE_BF16 ? 1 : 2;
}

/* Kernels that have shared memory, `count` floats for each element of an access, for every type,
   with narrow and with wide accesses, and the table of them, name[nn_type_index][wide]. A kernel
   calls function<type, width of accesses>(operands, shared). Macros, since in the tests' emulation
   a template cannot have shared memory of its own. */
#define NN_SHARED_KERNEL(name, threads, operands, count, function, type, wide)                     \
    static __global__ void __launch_bounds__(threads) name(operands o) {                           \
        __shared__ float shared[count];                                                            \
        function<type, wide>(o, shared);                                                           \
    }
#define NN_SHARED_KERNELS(name, threads, operands, count, function)                                \
    NN_SHARED_KERNEL(name##_f32_1, threads, operands, count, function, float, 1)                   \
    NN_SHARED_KERNEL(name##_f32_4, threads, operands, count * 4, function, float, 4)               \
    NN_SHARED_KERNEL(name##_bf16_1, threads, operands, count, function, nn_bf16, 1)                \
    NN_SHARED_KERNEL(name##_bf16_8, threads, operands, count * 8, function, nn_bf16, 8)            \
    NN_SHARED_KERNEL(name##_f16_1, threads, operands, count, function, nn_f16, 1)                  \
    NN_SHARED_KERNEL(name##_f16_8, threads, operands, count * 8, function, nn_f16, 8)              \
    static void (*const name[3][2])(operands o) = {{name##_f32_1, name##_f32_4},                   \
                                                   {name##_bf16_1, name##_bf16_8},                 \
                                                   {name##_f16_1, name##_f16_8}};

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
    if (y.data == NULL) {
        return 0;
    }
    int result = NN_AS(y.dtype, nn_cuda_rotary_as, call, y, x, *n);
    nn_column_range rest;
    rest.first = n->heads * n->size;
    rest.count = n->columns - rest.first;
    rest.stride = n->columns;
    result = nn_first(result, nn_cuda_copy_columns(call, y, x, n->rows, rest));
    rest.count = n->size - 2 * n->pairs;
    for (int64_t head = 0; head < n->heads && rest.count > 0; head++) {
        rest.first = head * n->size + 2 * n->pairs;
        result = nn_first(result, nn_cuda_copy_columns(call, y, x, n->rows, rest));
    }
    return result;
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

// ------------------------------------------------------------------------------------------------
// >>nn cuda attention

/* The products are computed for one group of heads after another. The probabilities of a group,
   about NN_GROUP_FLOATS, are in scratch memory at once; they also stay in the cache of a large GPU.
   In place: a group is some heads of one sequence; products read its queries, keys and values in
   qkv.
   Packed: if the heads of one sequence are too small to keep a GPU busy, a group is all heads of
   some sequences; their queries, keys and values are first copied head by head, so that one batched
   product computes them all. Which of the two it is depends on sizes alone.
   Probabilities and their gradients are computed in F32. If qkv has 16 bits, each row is then
   rounded to where it begins in scratch memory, or to where the probabilities are kept. Packed
   gradients are F32 in every call. */
typedef struct nn_groups {
    bool packed;
    int64_t count, size; // groups, and sequences or heads of keys in each but the last
} nn_groups;

/* Whether groups are packed: the products of one sequence's heads have too few tiles. */
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

/* Copies between parts of the rows of tokens, (sequences, sequence), row_stride apart, and the
   matrices of heads, (sequences * heads, sequence, size) for each part. Several matrices can have
   one head of a row in common: back in the row it is their sum. */
typedef struct nn_heads_copy {
    nn_values rows;
    nn_values part[3]; // as many as parts
    int64_t offset[3]; // of the part in a row
    int64_t shared[3]; // matrices that have one head of the row in common
    int64_t sequences, sequence, parts, row_stride;
    int64_t heads, size; // matrices of a sequence
    bool packs;          // from rows to matrices; otherwise back
    bool adds;
} nn_heads_copy;

/* T: of rows; P: of the parts, T or float. */
template <typename T, typename P, unsigned WIDE>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_heads_copy(nn_heads_copy h) {
    const unsigned parts = (unsigned)h.parts; // 32 bits, as blocks are counted
    const unsigned part = blockIdx.x % parts;
    const unsigned token = blockIdx.x / parts;
    const unsigned sequence = token / (unsigned)h.sequence;
    const unsigned time = token % (unsigned)h.sequence;
    T *row = (T *)h.rows.data + token * h.row_stride + h.offset[part];
    const unsigned shared = (unsigned)h.shared[part]; // 32 bits: divided for each element
    const unsigned columns = (unsigned)(h.heads * h.size) / shared;
    const unsigned size = (unsigned)h.size;
    for (unsigned c = threadIdx.x * WIDE; c < columns; c += NN_THREADS * WIDE) {
        const unsigned head = c / size * shared;
        const int64_t matrix_row = ((int64_t)sequence * h.heads + head) * h.sequence + time;
        P *own = (P *)h.part[part].data + matrix_row * h.size + c % size;
        const int64_t apart = h.sequence * h.size; // of matrices
        float value[WIDE];
        float old[WIDE] = {0};
        if (h.packs) {
            nn_wide<WIDE>::load(value, row + c);
            for (unsigned i = 0; i < shared; i++) {
                nn_wide<WIDE>::store(own + i * apart, value);
            }
            continue;
        }
        nn_wide<WIDE>::load(value, own);
        for (unsigned i = 1; i < shared; i++) {
            float other[WIDE];
            nn_wide<WIDE>::load(other, own + i * apart);
            NN_UNROLL
            for (unsigned k = 0; k < WIDE; k++) {
                value[k] += other[k];
            }
        }
        if (h.adds) {
            nn_wide<WIDE>::load(old, row + c);
        }
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            value[k] = h.adds ? nn_d_sum(old[k], value[k]) : value[k];
        }
        nn_wide<WIDE>::store(row + c, value);
    }
}

template <typename T, typename P>
static int nn_cuda_heads_copy_of(const ms_call *call, const nn_heads_copy &h) {
    bool wide = h.size % nn_type<T>::WIDE == 0 && nn_aligned(h.rows.data);
    for (int64_t p = 0; p < h.parts; p++) { // offsets and strides are multiples of the size
        wide = wide && nn_aligned(h.part[p].data);
    }
    return nn_launch(call, nn_grid_of(h.sequences * h.sequence * h.parts, 1, NN_THREADS),
                     wide ? nn_k_heads_copy<T, P, nn_type<T>::WIDE> : nn_k_heads_copy<T, P, 1>, h);
}

template <typename T>
static int nn_cuda_heads_copy_as(const ms_call *call, const nn_heads_copy &h) {
    return h.part[0].dtype == h.rows.dtype ? nn_cuda_heads_copy_of<T, T>(call, h)
                                           : nn_cuda_heads_copy_of<T, float>(call, h);
}

/* Matrices (sequence, size), one per head, head_stride apart; their rows are stride apart. */
typedef struct nn_heads {
    nn_values values;
    int64_t stride, head_stride;
} nn_heads;

/* Probabilities of heads, or their gradients, (heads, sequence, sequence): F32 where they are
   computed; then operands of products. computed NULL: they are not. */
typedef struct nn_square {
    float *computed;
    nn_values rounded; // in F32 the same
    int64_t stride;    // of the rows of rounded
} nn_square;

/* A group, and where its operands are. The products of forward read q, k and v and write o; those
   of backward read q, k, v and o, and write dq, dk and dv: beta times the old values, plus
   gradients. */
typedef struct nn_group {
    const ms_call *call;
    nn_attention_size n;
    bool packed;
    int64_t heads;       // in the group
    int64_t first, head; // the sequence, and the head of it, that it begins with
    int64_t sequences;   // in the group; 1 unless it is packed
    nn_heads q, k, v, o; // o: the output, or in backward its gradient
    nn_heads dq, dk, dv; // backward
    nn_square p, dp;     // dp in backward
    float *spare;        // scratch memory that is not in use yet
} nn_group;

static nn_heads nn_heads_of(nn_values values, int64_t stride, int64_t head_stride) {
    nn_heads heads;
    heads.values = values;
    heads.stride = stride;
    heads.head_stride = head_stride;
    return heads;
}

/* Takes floats of the scratch memory, aligned as it is. */
static float *nn_cuda_take(nn_group *g, int64_t floats) {
    float *taken = g->spare;
    g->spare += nn_divide_up(floats, 16) * 16;
    return taken;
}

/* Scratch memory for a square that is kept nowhere. */
static nn_square nn_cuda_square(nn_group *g, ms_dtype dtype) {
    nn_square s;
    s.computed = nn_cuda_take(g, g->heads * g->n.sequence * g->n.sequence);
    s.rounded = nn_values_in(s.computed, dtype);
    s.stride = dtype == MS_DTYPE_F32 ? g->n.sequence : 2 * g->n.sequence;
    return s;
}

/* A group without its operands. */
static nn_group nn_group_at(const ms_call *call, int64_t index, nn_groups groups, float *work,
                            nn_attention_size n) {
    nn_group g;
    memset(&g, 0, sizeof g);
    const int64_t per_sequence = groups.packed ? 1 : groups.count / n.batch;
    const int64_t begin = index % (groups.packed ? groups.count : per_sequence) * groups.size;
    g.call = call;
    g.n = n;
    g.packed = groups.packed;
    g.spare = work;
    g.first = groups.packed ? begin : index / per_sequence;
    const int64_t shared = nn_attention_shared(&n);
    g.head = groups.packed ? 0 : begin * shared;
    g.sequences = groups.packed ? nn_least(groups.size, n.batch - begin) : 1;
    g.heads =
        groups.packed ? g.sequences * n.heads : nn_least(groups.size, n.kv_heads - begin) * shared;
    return g;
}

/* A group of this dtype with its probabilities. scores.data NULL: they are not kept. */
static nn_group nn_cuda_group(const ms_call *call, int64_t index, nn_groups groups,
                              nn_values scores, ms_dtype dtype, float *work, nn_attention_size n) {
    nn_group g = nn_group_at(call, index, groups, work, n);
    if (scores.data == NULL) {
        g.p = nn_cuda_square(&g, dtype);
        return g;
    }
    g.p.rounded = nn_from(scores, (g.first * n.heads + g.head) * n.sequence * n.sequence);
    g.p.computed = dtype == MS_DTYPE_F32 ? (float *)g.p.rounded.data : NULL;
    g.p.stride = n.sequence;
    return g;
}

/* Sets q, k, v and o to their places in qkv and out. Keys and values that heads share have none that
   products could read for all heads at once. */
static void nn_group_in_place(nn_group *g, nn_values qkv, nn_values out) {
    const nn_attention_size *n = &g->n;
    const int64_t token = g->first * n->sequence, column = g->head * n->size;
    const int64_t stride = nn_attention_columns(n), width = nn_attention_width(n);
    const int64_t shared = column / nn_attention_shared(n);
    const nn_values row = nn_from(qkv, token * stride);
    g->q = nn_heads_of(nn_from(row, column), stride, n->size);
    g->k = nn_heads_of(nn_from(row, nn_attention_keys(n) + shared), stride, n->size);
    g->v = nn_heads_of(nn_from(row, nn_attention_values(n) + shared), stride, n->size);
    g->o = nn_heads_of(nn_from(out, token * width + column), width, n->size);
}

/* Scratch memory for one packed operand; enough for F32, whatever it is. */
static nn_heads nn_group_room(nn_group *g, ms_dtype dtype) {
    const int64_t floats = g->n.sequence * g->n.size;
    const float *room = nn_cuda_take(g, g->heads * floats);
    return nn_heads_of(nn_values_in(room, dtype), g->n.size, floats);
}

/* An F32 gradient in the place of a packed operand. */
static nn_heads nn_heads_f32(nn_heads heads) {
    heads.values.dtype = MS_DTYPE_F32;
    return heads;
}

/* A copy between the group's rows of x, `stride` apart, and matrices of its heads. */
static nn_heads_copy nn_group_copy(const nn_group *g, nn_values x, int64_t stride) {
    nn_heads_copy h;
    memset(&h, 0, sizeof h);
    h.rows = nn_from(x, g->first * g->n.sequence * stride);
    h.sequences = g->sequences;
    h.sequence = g->n.sequence;
    h.row_stride = stride;
    h.heads = g->packed ? g->n.heads : g->heads;
    h.size = g->n.size;
    return h;
}

static void nn_copy_part(nn_heads_copy *h, const nn_heads *part, int64_t offset, int64_t shared) {
    h->part[h->parts] = part->values;
    h->offset[h->parts] = offset;
    h->shared[h->parts] = shared;
    h->parts++;
}

/* Copies queries, keys and values, those that are not NULL, from qkv to packed operands, or back. */
static int nn_group_copy_qkv(const nn_group *g, nn_values qkv, const nn_heads *q, const nn_heads *k,
                             const nn_heads *v, bool packs, float beta) {
    const nn_attention_size *n = &g->n;
    const int64_t shared = nn_attention_shared(n), column = g->head * n->size;
    nn_heads_copy h = nn_group_copy(g, qkv, nn_attention_columns(n));
    h.packs = packs;
    h.adds = beta != 0.0f;
    if (q != NULL) {
        nn_copy_part(&h, q, column, 1);
    }
    if (k != NULL) {
        nn_copy_part(&h, k, nn_attention_keys(n) + column / shared, shared);
        nn_copy_part(&h, v, nn_attention_values(n) + column / shared, shared);
    }
    return NN_AS(h.rows.dtype, nn_cuda_heads_copy_as, g->call, h);
}

/* Copies the output, or its gradient, to a packed operand, or back. */
static int nn_group_copy_out(const nn_group *g, nn_values out, const nn_heads *o, bool packs) {
    nn_heads_copy h = nn_group_copy(g, out, nn_attention_width(&g->n));
    h.packs = packs;
    nn_copy_part(&h, o, g->head * g->n.size, 1);
    return NN_AS(h.rows.dtype, nn_cuda_heads_copy_as, g->call, h);
}

/* The operands of a product. */
static ms_matrix nn_group_matrix(const nn_group *g, nn_heads heads) {
    ms_matrix m = nn_matrix(heads.values, g->n.sequence, g->n.size, heads.stride);
    m.batch_count = g->heads;
    m.batch_stride = heads.head_stride;
    return m;
}

static ms_matrix nn_group_square(const nn_group *g, nn_values values, int64_t stride) {
    ms_matrix m = nn_matrix(values, g->n.sequence, g->n.sequence, stride);
    m.batch_count = g->heads;
    m.batch_stride = g->n.sequence * stride;
    return m;
}

/* The kernel rounds the square, and may read p. */
static nn_rowwise nn_group_rows(const nn_group *g, const nn_square *square, const nn_square *p) {
    nn_norm n;
    memset(&n, 0, sizeof n);
    n.rows = g->heads * g->n.sequence;
    n.width = g->n.sequence;
    nn_rowwise w = nn_rowwise_of(square->rounded, nn_f32(square->computed), nn_f32(NULL), &n);
    w.out_stride = square->stride;
    if (p != NULL) {
        w.b = p->rounded;
        w.b_stride = p->stride;
    }
    w.scale = g->n.scale;
    w.causal = g->n.causal;
    return w;
}

/* p = softmax(q k^T * scale); the product also multiplies by the factor. */
static int nn_group_softmax(const nn_group *g) {
    const nn_rowwise w = nn_group_rows(g, &g->p, NULL);
    const int result = (int)ms_gemm(g->call, w.scale, nn_group_matrix(g, g->q),
                                    ms_transpose(nn_group_matrix(g, g->k)), 0.0f,
                                    nn_group_square(g, nn_f32(g->p.computed), g->n.sequence));
    return result != 0 ? result : nn_cuda_rows<nn_row_softmax>(g->call, w, nn_k_softmax);
}

static int nn_group_forward(nn_group *g, nn_values out, nn_values qkv) {
    int result = 0;
    if (g->p.computed == NULL) { // kept in 16 bits
        g->p.computed = nn_cuda_take(g, g->heads * g->n.sequence * g->n.sequence);
    }
    if (g->packed) {
        g->q = nn_group_room(g, qkv.dtype);
        g->k = nn_group_room(g, qkv.dtype);
        g->v = nn_group_room(g, qkv.dtype);
        g->o = g->q; // no product reads both
        result = nn_group_copy_qkv(g, qkv, &g->q, &g->k, &g->v, true, 0.0f);
    } else {
        nn_group_in_place(g, qkv, out);
    }
    if (result == 0) {
        result = nn_group_softmax(g);
    }
    if (result == 0) {
        result = (int)ms_gemm(g->call, 1.0f, nn_group_square(g, g->p.rounded, g->p.stride),
                              nn_group_matrix(g, g->v), 0.0f, nn_group_matrix(g, g->o));
    }
    return result != 0 || !g->packed ? result : nn_group_copy_out(g, out, &g->o, false);
}

static int nn_cuda_attention(const ms_call *call, nn_values out, nn_values scores, nn_values qkv,
                             float *work, nn_attention_size n) {
    const nn_groups groups = nn_cuda_groups(n);
    int result = 0;
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_cuda_group(call, i, groups, scores, qkv.dtype, work, n);
        result = nn_group_forward(&g, out, qkv);
    }
    return result;
}

/* Scratch memory of the gradients, in place of operands that no later product reads. If the group
   is not packed, the queries are copied first, as dqkv may be qkv: dq is then written over the
   queries, which the product for dk still reads. */
static int nn_group_operands(nn_group *g, nn_dest dqkv, nn_values dout, nn_values qkv) {
    nn_group gradient = *g;
    g->dp = nn_cuda_square(g, qkv.dtype);
    if (!g->packed) {
        nn_group_in_place(&gradient, nn_values_at(dqkv), dout);
        g->dq = gradient.q;
        g->dk = gradient.k;
        g->dv = gradient.v;
        nn_group_in_place(g, qkv, dout);
        g->q = nn_group_room(g, qkv.dtype);
        return nn_group_copy_qkv(g, qkv, &g->q, NULL, NULL, true, 0.0f);
    }
    g->q = nn_group_room(g, qkv.dtype);
    g->k = nn_group_room(g, qkv.dtype);
    g->v = nn_group_room(g, qkv.dtype);
    g->o = nn_group_room(g, qkv.dtype);
    g->dq = nn_heads_f32(g->o);
    g->dk = nn_heads_f32(g->k);
    g->dv = nn_heads_f32(g->v);
    return nn_first(nn_group_copy_qkv(g, qkv, &g->q, &g->k, &g->v, true, 0.0f),
                    nn_group_copy_out(g, dout, &g->o, true));
}

/* dp = do v^T, dv = p^T do, ds from dp, dq = ds k, dk = ds^T q, in this order. */
static int nn_group_backward(nn_group *g, float beta) {
    const ms_matrix p = nn_group_square(g, g->p.rounded, g->p.stride);
    const ms_matrix dp = nn_group_square(g, nn_f32(g->dp.computed), g->n.sequence);
    const ms_matrix ds = nn_group_square(g, g->dp.rounded, g->dp.stride);
    const ms_matrix slope = nn_group_matrix(g, g->o);
    int result =
        (int)ms_gemm(g->call, 1.0f, slope, ms_transpose(nn_group_matrix(g, g->v)), 0.0f, dp);
    if (result == 0) {
        result =
            (int)ms_gemm(g->call, 1.0f, ms_transpose(p), slope, beta, nn_group_matrix(g, g->dv));
    }
    if (result == 0) {
        result = nn_cuda_rows<nn_row_softmax_backward>(g->call, nn_group_rows(g, &g->dp, &g->p),
                                                       nn_k_softmax_backward);
    }
    if (result == 0) {
        result = (int)ms_gemm(g->call, 1.0f, ds, nn_group_matrix(g, g->k), beta,
                              nn_group_matrix(g, g->dq));
    }
    return result != 0 ? result
                       : (int)ms_gemm(g->call, 1.0f, ms_transpose(ds), nn_group_matrix(g, g->q),
                                      beta, nn_group_matrix(g, g->dk));
}

static int nn_cuda_attention_backward(const ms_call *call, nn_dest dqkv, nn_values dout,
                                      nn_values scores, nn_values qkv, float *work,
                                      nn_attention_size n) {
    const nn_groups groups = nn_cuda_groups(n);
    int result = 0;
    if (dqkv.data == NULL) {
        return 0;
    }
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_cuda_group(call, i, groups, scores, qkv.dtype, work, n);
        result = nn_group_operands(&g, dqkv, dout, qkv);
        if (result == 0) {
            result = nn_group_backward(&g, g.packed ? 0.0f : dqkv.beta);
        }
        if (result == 0 && g.packed) {
            result =
                nn_group_copy_qkv(&g, nn_values_at(dqkv), &g.dq, &g.dk, &g.dv, false, dqkv.beta);
        }
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda tiles  attention whose scratch memory does not grow with the square of the sequence

/* Dao et al., "FlashAttention", 2022, algorithms 1 and 4, with tiles so large that each product of
   theirs is one batched product for a group of heads, as above; between these, a kernel has a warp
   for each row of a tile. Groups are packed only if a sequence is a single tile. Tiles of keys that
   none of their queries sees are left out. */
static nn_groups nn_cuda_tiled_groups(nn_attention_size n, bool backward) {
    nn_groups g;
    g.packed = nn_cuda_packs(n) && nn_cuda_tile_side(n) == n.sequence;
    const int64_t all = g.packed ? n.batch : n.kv_heads;
    const int64_t floats =
        g.packed ? nn_cuda_tiled_sequence_floats(n, backward) : nn_cuda_shared_floats(n, backward);
    const int64_t count = nn_divide_up(all, nn_most(1, nn_least(all, NN_GROUP_FLOATS / floats)));
    g.size = nn_divide_up(all, count);
    g.count = nn_divide_up(all, g.size) * (g.packed ? 1 : n.batch);
    return g;
}

/* A tile of each head of a group, and what the kernels between products need of them. A row is a
   query of a head; rows of a tile are stride floats apart. */
typedef struct nn_tile_rows {
    int64_t heads, head;  // in the group, and the first of them among all sequences'
    int64_t heads_of_all; // of a sequence
    int64_t sequence, size;
    int64_t query, queries, key, keys; // from `query` and `key` on
    int64_t stride;
    bool is_first;             // with these queries
    float *p, *ds;             // (heads, queries, keys); ds in backward
    float *sum, *most, *total; // (heads, queries): of size elements, and of one
    float *log_sums;           // (B, H, T); in forward it may be NULL
    nn_values out, dout;       // (B, T, C); dout in backward
    int64_t window;
    float scale, cap;
    bool causal;
} nn_tile_rows;

/* Where a row of the tile is in the output; *sums: and in the logarithms of sums. Numbers of rows
   and heads fit 32 bits, whose division is much faster than that of 64. */
__device__ __forceinline__ int64_t nn_d_tile_place(const nn_tile_rows &w, int64_t row,
                                                   int64_t *sums) {
    const uint32_t queries = (uint32_t)w.queries;
    const uint32_t head = (uint32_t)w.head + (uint32_t)row / queries; // of all sequences
    const uint32_t sequence = head / (uint32_t)w.heads_of_all;
    const int64_t time = w.query + (uint32_t)row % queries;
    *sums = head * w.sequence + time;
    return ((sequence * w.sequence + time) * w.heads_of_all + head % (uint32_t)w.heads_of_all) *
           w.size;
}

/* The keys of the tile that a row sees. */
__device__ __forceinline__ nn_span nn_d_tile_seen(const nn_tile_rows &w, int64_t row) {
    const int64_t end = w.query + (uint32_t)row % (uint32_t)w.queries + 1 - w.key;
    const int64_t begin = w.window > 0 ? end - w.window : 0;
    nn_span seen;
    seen.end = !w.causal || end > w.keys ? w.keys : end < 0 ? 0 : end;
    seen.begin = begin < 0 ? 0 : begin < seen.end ? begin : seen.end;
    return seen;
}

__device__ __forceinline__ bool nn_d_sees(const nn_span &seen, unsigned column) {
    return column >= seen.begin && column < seen.end;
}

__device__ __forceinline__ float nn_d_capped(const nn_tile_rows &w, float score) {
    return w.cap > 0.0f ? nn_cap_value(score, w.cap) : score;
}

/* Scores become exponentials relative to the row's largest score so far, each row rounded to where
   it begins; what has been summed relative to a smaller one is scaled. */
struct nn_row_tile_softmax {
    template <typename T, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<NN_WARP, ITEMS, WIDE> &team,
                                               const nn_tile_rows &w, int64_t row) {
        const nn_span seen = nn_d_tile_seen(w, row);
        const float before = w.is_first ? -FLT_MAX : w.most[row];
        float v[ITEMS];
        float most = before;
        float total = 0.0f;
        team.load(v, w.p + row * w.stride, seen.end);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            v[i] = nn_d_capped(w, v[i]);
            most = nn_d_sees(seen, team.column(i)) ? fmaxf(most, v[i]) : most;
        }
        most = team.most(most);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            v[i] = nn_d_sees(seen, team.column(i)) ? nn_exp(v[i] - most) : 0.0f;
            total += v[i];
        }
        total = team.sum(total);
        team.wait();
        team.store((T *)(void *)(w.p + row * w.stride), v, w.keys, false);
        const float share = nn_exp(before - most);
        if (!w.is_first && most > before) {
            for (int64_t i = team.lane; i < w.size; i += NN_WARP) {
                w.sum[row * w.size + i] *= share;
            }
        }
        if (team.lane == 0) {
            w.total[row] = w.is_first ? total : w.total[row] * share + total;
            w.most[row] = most;
        }
    }
};

/* Divides the sums of a tile's queries, when all keys have gone by. */
struct nn_row_tile_close {
    template <typename T, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<NN_WARP, ITEMS, WIDE> &team,
                                               const nn_tile_rows &w, int64_t row) {
        int64_t sums;
        T *out = (T *)w.out.data + nn_d_tile_place(w, row, &sums);
        const float share = nn_share(w.most[row], w.total[row]);
        for (int64_t i = team.lane; i < w.size; i += NN_WARP) {
            nn_d_round(out + i, w.sum[row * w.size + i] * share);
        }
        if (team.lane == 0 && w.log_sums != NULL) {
            w.log_sums[sums] = nn_log_sum(w.most[row], w.total[row]);
        }
    }
};

/* Scores p become probabilities, and their gradients ds those of q k^T: each probability times what
   its gradient exceeds the sum of out * dout by. Both are rounded to where their rows begin. */
struct nn_row_tile_slopes {
    template <typename T, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<NN_WARP, ITEMS, WIDE> &team,
                                               const nn_tile_rows &w, int64_t row) {
        const nn_span seen = nn_d_tile_seen(w, row);
        int64_t sums;
        const int64_t place = nn_d_tile_place(w, row, &sums);
        const float log_sum = w.log_sums[sums];
        float p[ITEMS];
        float ds[ITEMS];
        float mean = 0.0f;
        for (int64_t i = team.lane; i < w.size; i += NN_WARP) {
            mean += nn_d_float(((const T *)w.out.data)[place + i]) *
                    nn_d_float(((const T *)w.dout.data)[place + i]);
        }
        mean = team.sum(mean);
        team.load(p, w.p + row * w.stride, seen.end);
        team.load(ds, w.ds + row * w.stride, seen.end);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            const bool sees = nn_d_sees(seen, team.column(i));
            const float score = nn_d_capped(w, p[i]);
            p[i] = sees ? nn_exp(score - log_sum) : 0.0f;
            ds[i] = sees ? p[i] * (ds[i] - mean) * w.scale : 0.0f;
            ds[i] *= w.cap > 0.0f ? nn_cap_slope(score, w.cap) : 1.0f;
        }
        team.wait();
        team.store((T *)(void *)(w.p + row * w.stride), p, w.keys, false);
        team.store((T *)(void *)(w.ds + row * w.stride), ds, w.keys, false);
    }
};

template <typename F, typename T, unsigned ITEMS, unsigned WIDE>
static __global__ void __launch_bounds__(NN_ROW_WARPS *NN_WARP) nn_k_tile(nn_tile_rows w) {
    const int64_t row = (int64_t)blockIdx.x * NN_ROW_WARPS + threadIdx.x / NN_WARP;
    nn_team<NN_WARP, ITEMS, WIDE> team;
    team.lane = threadIdx.x % NN_WARP;
    team.shared = NULL;
    if (row < w.heads * w.queries) {
        F::template run<T>(team, w, row);
    }
}

/* Launches the kernel that holds rows of this width in the fewest registers. Rows of tiles are
   aligned and padded, so that all accesses are wide. */
template <typename T, typename F>
static int nn_cuda_tile_as(const ms_call *call, const nn_tile_rows &w, F) {
    enum { WIDE = nn_type<T>::WIDE };
    const nn_grid grid =
        nn_grid_of(nn_divide_up(w.heads * w.queries, NN_ROW_WARPS), 1, NN_ROW_WARPS * NN_WARP);
    return nn_launch(call, grid,
                     w.keys <= 8 * NN_WARP    ? nn_k_tile<F, T, 8, WIDE>
                     : w.keys <= 16 * NN_WARP ? nn_k_tile<F, T, 16, WIDE>
                                              : nn_k_tile<F, T, 32, WIDE>,
                     w);
}

template <typename F> static int nn_cuda_tile_rows(const ms_call *call, const nn_tile_rows &w) {
    return NN_AS(w.out.dtype, nn_cuda_tile_as, call, w, F());
}

/* The first of the keys of the first tile with the queries from `query` on. */
static int64_t nn_group_tile_begin(const nn_group *g, int64_t query) {
    const int64_t side = nn_cuda_tile_side(g->n);
    return nn_first_key(&g->n, query) / side * side;
}

/* A tile of a group, from `query` and `key` on. */
static nn_tile_rows nn_group_tile_at(const nn_group *g, nn_tile_rows w, int64_t query,
                                     int64_t key) {
    const int64_t side = nn_cuda_tile_side(g->n);
    w.query = query;
    w.queries = nn_least(side, g->n.sequence - query);
    w.key = key;
    w.keys = nn_least(side, nn_keys_end(&g->n, query + w.queries - 1) - key);
    w.is_first = key == nn_group_tile_begin(g, query);
    w.stride = nn_cuda_tile_stride(w.keys);
    return w;
}

/* What all tiles of a group have in common. */
static nn_tile_rows nn_tile_rows_of(const nn_group *g, nn_values out, float *log_sums) {
    nn_tile_rows w;
    memset(&w, 0, sizeof w);
    w.heads = g->heads;
    w.head = g->first * g->n.heads + g->head;
    w.heads_of_all = g->n.heads;
    w.sequence = g->n.sequence;
    w.size = g->n.size;
    w.out = out;
    w.log_sums = log_sums;
    w.window = g->n.window;
    w.scale = g->n.scale;
    w.cap = g->n.cap;
    w.causal = g->n.causal;
    return w;
}

/* The rows of operands or gradients from `begin` on. */
static ms_matrix nn_group_part(const nn_group *g, nn_heads heads, int64_t begin, int64_t rows) {
    ms_matrix m =
        nn_matrix(nn_from(heads.values, begin * heads.stride), rows, g->n.size, heads.stride);
    m.batch_count = g->heads;
    m.batch_stride = heads.head_stride;
    return m;
}

/* The tile, as it is computed (F32), or as an operand of products in this dtype. */
static ms_matrix nn_group_tile(const nn_tile_rows *w, const float *tile, ms_dtype dtype) {
    const int64_t stride = dtype == MS_DTYPE_F32 ? w->stride : 2 * w->stride;
    ms_matrix m = nn_matrix(nn_values_in(tile, dtype), w->queries, w->keys, stride);
    m.batch_count = w->heads;
    m.batch_stride = w->queries * stride;
    return m;
}

/* F32 sums (heads, rows, size) of gradients or outputs. */
static nn_heads nn_group_sums(const nn_group *g, const float *sums, int64_t rows) {
    return nn_heads_of(nn_f32(sums), g->n.size, rows * g->n.size);
}

/* p = q k^T * scale */
static int nn_group_scores(const nn_group *g, const nn_tile_rows *w) {
    return (int)ms_gemm(g->call, w->scale, nn_group_part(g, g->q, w->query, w->queries),
                        ms_transpose(nn_group_part(g, g->k, w->key, w->keys)), 0.0f,
                        nn_group_tile(w, w->p, MS_DTYPE_F32));
}

/* The outputs of a tile's queries. */
static int nn_group_tile_forward(const nn_group *g, nn_tile_rows w, int64_t query) {
    const ms_dtype dtype = w.out.dtype;
    int result = 0;
    w = nn_group_tile_at(g, w, query, nn_group_tile_begin(g, query));
    while (w.keys > 0 && result == 0) {
        result = nn_group_scores(g, &w);
        if (result == 0) {
            result = nn_cuda_tile_rows<nn_row_tile_softmax>(g->call, w);
        }
        if (result == 0) {
            result =
                (int)ms_gemm(g->call, 1.0f, nn_group_tile(&w, w.p, dtype),
                             nn_group_part(g, g->v, w.key, w.keys), w.is_first ? 0.0f : 1.0f,
                             nn_group_part(g, nn_group_sums(g, w.sum, w.queries), 0, w.queries));
        }
        w = nn_group_tile_at(g, w, query, w.key + nn_cuda_tile_side(g->n));
    }
    w = nn_group_tile_at(g, w, query, 0);
    return result != 0 ? result : nn_cuda_tile_rows<nn_row_tile_close>(g->call, w);
}

/* Sets q, k and v, and in backward o, to the gradient of the output: in place, or packed. Of a group
   in place, keys and values that heads share are copied. */
static int nn_group_inputs(nn_group *g, nn_values qkv, nn_values out, bool backward) {
    if (!g->packed) {
        nn_group_in_place(g, qkv, out);
        if (g->n.kv_heads == g->n.heads) {
            return 0;
        }
        g->k = nn_group_room(g, qkv.dtype);
        g->v = nn_group_room(g, qkv.dtype);
        return nn_group_copy_qkv(g, qkv, NULL, &g->k, &g->v, true, 0.0f);
    }
    g->q = nn_group_room(g, qkv.dtype);
    g->k = nn_group_room(g, qkv.dtype);
    g->v = nn_group_room(g, qkv.dtype);
    const int result = nn_group_copy_qkv(g, qkv, &g->q, &g->k, &g->v, true, 0.0f);
    if (result != 0 || !backward) {
        return result;
    }
    g->o = nn_group_room(g, qkv.dtype);
    return nn_group_copy_out(g, out, &g->o, true);
}

static int nn_cuda_tiled_attention(const ms_call *call, nn_values out, float *log_sums,
                                   nn_values qkv, float *work, nn_attention_size n) {
    const nn_groups groups = nn_cuda_tiled_groups(n, false);
    const int64_t side = nn_cuda_tile_side(n);
    int result = 0;
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_group_at(call, i, groups, work, n);
        nn_tile_rows w = nn_tile_rows_of(&g, out, log_sums);
        w.p = nn_cuda_take(&g, g.heads * side * nn_cuda_tile_stride(side));
        w.sum = nn_cuda_take(&g, g.heads * side * n.size);
        w.most = nn_cuda_take(&g, g.heads * side);
        w.total = nn_cuda_take(&g, g.heads * side);
        result = nn_group_inputs(&g, qkv, out, false);
        for (int64_t query = 0; query < n.sequence && result == 0; query += side) {
            result = nn_group_tile_forward(&g, w, query);
        }
    }
    return result;
}

/* Where the gradient of one operand adds up while tiles go by: there, or, if `sums` is not NULL, in
   these, F32 in scratch memory, until it is stored there. beta: of the first product. */
typedef struct nn_group_gradient {
    nn_heads there;
    float *sums;
    float beta;
} nn_group_gradient;

/* There is dqkv, or, if the group is packed, the place of operands that no later product reads; for
   keys and values that heads share, F32 in scratch memory. If dqkv has 16 bits and there are several
   tiles, there are sums: of all queries, and of the keys and values of one tile. */
typedef struct nn_group_gradients {
    nn_group_gradient q, k, v;
    float beta; // of dqkv
} nn_group_gradients;

static nn_group_gradients nn_group_gradients_of(nn_group *g, nn_dest dqkv) {
    const int64_t side = nn_cuda_tile_side(g->n);
    const bool shares = g->n.kv_heads < g->n.heads && !g->packed;
    const bool sums = dqkv.dtype != MS_DTYPE_F32 && side < g->n.sequence;
    nn_group gradient = *g;
    nn_group_gradients to;
    memset(&to, 0, sizeof to);
    nn_group_in_place(&gradient, nn_values_at(dqkv), nn_values_at(dqkv));
    to.q.there = g->packed ? nn_heads_f32(g->o) : gradient.q;
    to.k.there = g->packed ? nn_heads_f32(g->k) : gradient.k;
    to.v.there = g->packed ? nn_heads_f32(g->v) : gradient.v;
    to.beta = dqkv.beta;
    to.q.beta = to.k.beta = to.v.beta = g->packed || sums ? 0.0f : dqkv.beta;
    if (sums) {
        to.q.sums = nn_cuda_take(g, g->heads * g->n.sequence * g->n.size);
    }
    if (shares) {
        to.k.there = nn_heads_f32(nn_group_room(g, MS_DTYPE_F32));
        to.v.there = nn_heads_f32(nn_group_room(g, MS_DTYPE_F32));
        to.k.beta = to.v.beta = 0.0f;
    } else if (sums) {
        to.k.sums = nn_cuda_take(g, g->heads * side * g->n.size);
        to.v.sums = nn_cuda_take(g, g->heads * side * g->n.size);
    }
    return to;
}

/* to (rows from `begin` on) = beta * to + sums (heads, rows, size), of a group in place. */
static int nn_group_store(const nn_group *g, nn_heads to, int64_t begin, int64_t rows,
                          const float *sums, float beta) {
    nn_heads_copy h;
    memset(&h, 0, sizeof h);
    const nn_heads from = nn_group_sums(g, sums, rows);
    h.rows = nn_from(to.values, begin * to.stride);
    nn_copy_part(&h, &from, 0, 1);
    h.sequences = 1;
    h.sequence = rows;
    h.row_stride = to.stride;
    h.heads = g->heads;
    h.size = g->n.size;
    h.adds = beta != 0.0f;
    return NN_AS(h.rows.dtype, nn_cuda_heads_copy_as, g->call, h);
}

/* Adds a * b to the rows of a gradient from `begin` on, of which sums begin with row `first` and have
   `all`. is_first: it is the first product that these rows get. */
static int nn_group_add(const nn_group *g, ms_matrix a, ms_matrix b,
                        const nn_group_gradient *gradient, bool is_first, int64_t first,
                        int64_t all, int64_t begin, int64_t rows) {
    const ms_matrix c =
        gradient->sums != NULL
            ? nn_group_part(g, nn_group_sums(g, gradient->sums, all), begin - first, rows)
            : nn_group_part(g, gradient->there, begin, rows);
    return (int)ms_gemm(g->call, 1.0f, a, b, is_first ? gradient->beta : 1.0f, c);
}

/* Adds what a tile gives to gradients: p and ds, then dv, dq, dk, in this order. */
static int nn_group_tile_backward(const nn_group *g, const nn_tile_rows *w,
                                  const nn_group_gradients *to, bool first) {
    const ms_dtype dtype = w->out.dtype;
    const int64_t all = nn_least(nn_cuda_tile_side(g->n), g->n.sequence - w->key);
    const ms_matrix p = nn_group_tile(w, w->p, dtype);
    const ms_matrix ds = nn_group_tile(w, w->ds, dtype);
    const ms_matrix slope = nn_group_part(g, g->o, w->query, w->queries);
    int result = nn_group_scores(g, w);
    if (result == 0) {
        result = (int)ms_gemm(g->call, 1.0f, slope,
                              ms_transpose(nn_group_part(g, g->v, w->key, w->keys)), 0.0f,
                              nn_group_tile(w, w->ds, MS_DTYPE_F32));
    }
    if (result == 0) {
        result = nn_cuda_tile_rows<nn_row_tile_slopes>(g->call, *w);
    }
    if (result == 0) {
        result =
            nn_group_add(g, ms_transpose(p), slope, &to->v, first, w->key, all, w->key, w->keys);
    }
    if (result == 0) {
        result = nn_group_add(g, ds, nn_group_part(g, g->k, w->key, w->keys), &to->q, w->is_first,
                              0, g->n.sequence, w->query, w->queries);
    }
    return result != 0
               ? result
               : nn_group_add(g, ms_transpose(ds), nn_group_part(g, g->q, w->query, w->queries),
                              &to->k, first, w->key, all, w->key, w->keys);
}

/* All tiles with the keys from `key` on. The first one of them has all these keys. */
static int nn_group_backward_keys(const nn_group *g, const nn_tile_rows *all,
                                  const nn_group_gradients *to, int64_t key) {
    const int64_t side = nn_cuda_tile_side(g->n);
    const int64_t keys = nn_least(side, g->n.sequence - key);
    const int64_t begin = g->n.causal ? key : 0;
    const int64_t end = nn_queries_end(&g->n, key + keys - 1);
    int result = 0;
    for (int64_t query = begin; query < end && result == 0; query += side) {
        const nn_tile_rows w = nn_group_tile_at(g, *all, query, key);
        result = nn_group_tile_backward(g, &w, to, query == begin);
    }
    if (result != 0 || to->k.sums == NULL) {
        return result;
    }
    return nn_first(nn_group_store(g, to->k.there, key, keys, to->k.sums, to->beta),
                    nn_group_store(g, to->v.there, key, keys, to->v.sums, to->beta));
}

static int nn_tiled_group_backward(nn_group *g, nn_dest dqkv, nn_tile_rows w, nn_values qkv) {
    const int64_t side = nn_cuda_tile_side(g->n);
    w.p = nn_cuda_take(g, g->heads * side * nn_cuda_tile_stride(side));
    w.ds = nn_cuda_take(g, g->heads * side * nn_cuda_tile_stride(side));
    int result = nn_group_inputs(g, qkv, w.dout, true);
    const nn_group_gradients to = nn_group_gradients_of(g, dqkv);
    for (int64_t key = 0; key < g->n.sequence && result == 0; key += side) {
        result = nn_group_backward_keys(g, &w, &to, key);
    }
    if (result != 0) {
        return result;
    }
    if (g->packed) {
        return nn_group_copy_qkv(g, nn_values_at(dqkv), &to.q.there, &to.k.there, &to.v.there,
                                 false, dqkv.beta);
    }
    if (to.q.sums != NULL) {
        result = nn_group_store(g, to.q.there, 0, g->n.sequence, to.q.sums, to.beta);
    }
    const bool shares = g->n.kv_heads < g->n.heads;
    return result != 0 || !shares ? result
                                  : nn_group_copy_qkv(g, nn_values_at(dqkv), NULL, &to.k.there,
                                                      &to.v.there, false, dqkv.beta);
}

static int nn_cuda_tiled_attention_backward(const ms_call *call, nn_dest dqkv, nn_values dout,
                                            nn_values out, const float *log_sums, nn_values qkv,
                                            float *work, nn_attention_size n) {
    const nn_groups groups = nn_cuda_tiled_groups(n, true);
    float *sums = (float *)(uintptr_t)log_sums; // only read
    int result = 0;
    if (dqkv.data == NULL) {
        return 0;
    }
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_group_at(call, i, groups, work, n);
        nn_tile_rows w = nn_tile_rows_of(&g, out, sums);
        w.dout = dout;
        result = nn_tiled_group_backward(&g, dqkv, w, qkv);
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda images  element by element, averages

struct nn_op_relu : nn_op {
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        (void)b;
        return nn_relu_value(a);
    }
};

/* a is dy, b is y. */
struct nn_op_relu_backward : nn_op {
    __device__ float operator()(int64_t i, float a, float b) const {
        (void)i;
        return b > 0.0f ? a : 0.0f;
    }
};

static int nn_cuda_relu(const ms_call *call, nn_values y, nn_values x, int64_t count) {
    return nn_cuda_map(call, nn_op_relu(), nn_dest_of(y, 0.0f), x, nn_f32(NULL), count);
}

static int nn_cuda_relu_backward(const ms_call *call, nn_dest dx, nn_values dy, nn_values y,
                                 int64_t count) {
    return nn_cuda_map(call, nn_op_relu_backward(), dx, dy, y, count);
}

/* out = op(a, b), or out += that. op.start receives the plane of the elements that come next,
   counted modulo cycle: with cycle = channels it is the channel. a.data and b.data may be NULL. */
typedef struct nn_plane_map {
    nn_values out, a, b; // of one dtype
    int64_t count, plane, cycle;
    bool adds, aligned;
} nn_plane_map;

/* The WIDE elements from element first on, zeros for those at count and beyond. */
template <unsigned WIDE, typename T>
__device__ __forceinline__ void nn_d_load_some(float *to, const T *from, int64_t first,
                                               int64_t count, bool aligned) {
    if (from != NULL && aligned && first + WIDE <= count) {
        nn_wide<WIDE>::load(to, from + first);
        return;
    }
    NN_UNROLL
    for (unsigned k = 0; k < WIDE; k++) {
        to[k] = from != NULL && first + k < count ? nn_d_float(from[first + k]) : 0.0f;
    }
}

template <unsigned WIDE, typename T>
__device__ __forceinline__ void nn_d_store_some(T *to, const float *from, int64_t first,
                                                int64_t count, bool aligned) {
    if (aligned && first + WIDE <= count) {
        nn_wide<WIDE>::store(to + first, from);
        return;
    }
    NN_UNROLL
    for (unsigned k = 0; k < WIDE; k++) {
        if (first + k < count) {
            nn_d_round(to + first + k, from[k]);
        }
    }
}

/* A thread has the elements of a wide access, all of which are read before one is written: out may
   be a or b. */
template <typename T, typename F>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_planes(F op, nn_plane_map m) {
    enum { WIDE = nn_type<T>::WIDE };
    const int64_t first = WIDE * ((int64_t)blockIdx.x * NN_THREADS + threadIdx.x);
    float a[WIDE];
    float b[WIDE];
    float old[WIDE];
    if (first >= m.count) {
        return;
    }
    nn_d_load_some<WIDE>(a, (const T *)m.a.data, first, m.count, m.aligned);
    nn_d_load_some<WIDE>(b, (const T *)m.b.data, first, m.count, m.aligned);
    nn_d_load_some<WIDE>(old, m.adds ? (const T *)m.out.data : NULL, first, m.count, m.aligned);
    int64_t plane = first / m.plane;
    int64_t inside = first - plane * m.plane;
    plane %= m.cycle;
    op.start(plane);
    NN_UNROLL
    for (int k = 0; k < WIDE; k++) {
        if (inside == m.plane) {
            inside = 0;
            plane = plane + 1 == m.cycle ? 0 : plane + 1;
            op.start(plane);
        }
        inside++;
        a[k] = op(a[k], b[k]);
        a[k] = m.adds ? nn_d_sum(old[k], a[k]) : a[k];
    }
    nn_d_store_some<WIDE>((T *)m.out.data, a, first, m.count, m.aligned);
}

template <typename T, typename F>
static int nn_cuda_planes_as(const ms_call *call, F op, const nn_plane_map &m) {
    const int64_t blocks = nn_divide_up(m.count, (int64_t)nn_type<T>::WIDE * NN_THREADS);
    return nn_launch(call, nn_grid_of(blocks, 1, NN_THREADS), nn_k_planes<T, F>, op, m);
}

/* Launches the kernel above, for elements (..., cycle, plane). */
template <typename F>
static int nn_cuda_planes(const ms_call *call, F op, nn_dest out, nn_values a, nn_values b,
                          nn_planes n, int64_t cycle) {
    nn_plane_map m;
    if (out.data == NULL) {
        return 0;
    }
    m.out = nn_values_at(out);
    m.a = a;
    m.b = b;
    m.count = nn_planes_count(n);
    m.plane = n.plane;
    m.cycle = cycle;
    m.adds = out.beta != 0.0f;
    m.aligned = nn_aligned(out.data) && nn_aligned(a.data) && nn_aligned(b.data);
    return NN_AS(out.dtype, nn_cuda_planes_as, call, op, m);
}

/* means (images * channels) of the planes of x; a warp per plane. */
template <typename T, unsigned WIDE>
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_average(T *means, const T *x, int64_t planes, int64_t plane) {
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
        nn_d_round(means + p, total / (float)plane);
    }
}

template <typename T>
static int nn_cuda_average_as(const ms_call *call, nn_values means, nn_values x, nn_planes n) {
    const bool wide = n.plane % nn_type<T>::WIDE == 0 && nn_aligned(x.data);
    const int64_t planes = n.images * n.channels;
    return nn_launch(call, nn_grid_of(nn_divide_up(planes, NN_THREADS / NN_WARP), 1, NN_THREADS),
                     wide ? nn_k_average<T, nn_type<T>::WIDE> : nn_k_average<T, 1>, means.data,
                     x.data, planes, n.plane);
}

static int nn_cuda_average(const ms_call *call, nn_values means, nn_values x, nn_planes n) {
    return NN_AS(x.dtype, nn_cuda_average_as, call, means, x, n);
}

struct nn_op_average_backward {
    nn_values dmeans;
    float plane, slope;
    __device__ void start(int64_t p) {
        slope = nn_get(dmeans, p) / plane;
    }
    __device__ float operator()(float a, float b) const {
        (void)a;
        (void)b;
        return slope;
    }
};

static int nn_cuda_average_backward(const ms_call *call, nn_dest dx, nn_values dmeans,
                                    nn_planes n) {
    nn_op_average_backward op;
    op.dmeans = dmeans;
    op.plane = (float)n.plane;
    op.slope = 0.0f;
    return nn_cuda_planes(call, op, dx, nn_f32(NULL), nn_f32(NULL), n, n.images * n.channels);
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda channels  sums over the channels of images

/* The values of a channel, image after image, are cut into chunks, and a block adds up a chunk.
   x.data NULL: sums of dy. dy.data NULL: sums of x, and of the squares of (x - the chunk's mean).
   Otherwise: sums of dy, and of dy times (x - mean) * rstd. */
typedef struct nn_channel_sums {
    nn_values dy, x; // of one dtype
    const float *mean, *rstd;
    nn_planes n;
    int64_t chunks;
    float *sums, *products; // (channels, chunks)
} nn_channel_sums;

/* v = the thread's NN_CHANNEL_ITEMS floats of this chunk of a channel, zeros after the end. */
template <unsigned WIDE, typename T>
__device__ __forceinline__ void nn_d_channel_load(float *v, const T *x, int64_t channel,
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
        if (at < count) { // then all WIDE are, as count and plane are multiples of WIDE
            nn_wide<WIDE>::load(v + i, x + (image * n.channels + channel) * n.plane +
                                           (at - image * n.plane));
        }
    }
}

/* A chunk is read once and stays in registers. */
template <typename T, unsigned WIDE>
__device__ __forceinline__ void nn_d_channel_moments(const nn_channel_sums &s, float *shared) {
    const int64_t channel = blockIdx.x / s.chunks;
    const int64_t chunk = blockIdx.x % s.chunks;
    const int64_t size =
        nn_d_least(NN_CHANNEL_CHUNK, s.n.images * s.n.plane - chunk * NN_CHANNEL_CHUNK);
    float v[NN_CHANNEL_ITEMS];
    float total = 0.0f;
    float squares = 0.0f;
    nn_d_channel_load<WIDE>(v, (const T *)s.x.data, channel, chunk, s.n);
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

template <typename T, unsigned WIDE>
__device__ __forceinline__ void nn_d_channel_slopes(const nn_channel_sums &s, float *shared) {
    const int64_t channel = blockIdx.x / s.chunks;
    const int64_t chunk = blockIdx.x % s.chunks;
    float slope[NN_CHANNEL_ITEMS];
    float x[NN_CHANNEL_ITEMS] = {0};
    float total = 0.0f;
    float product = 0.0f;
    nn_d_channel_load<WIDE>(slope, (const T *)s.dy.data, channel, chunk, s.n);
    if (s.x.data != NULL) {
        nn_d_channel_load<WIDE>(x, (const T *)s.x.data, channel, chunk, s.n);
    }
    const float mean = s.x.data != NULL ? s.mean[channel] : 0.0f;
    const float rstd = s.x.data != NULL ? s.rstd[channel] : 0.0f;
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

NN_SHARED_KERNELS(nn_k_channel_moments, NN_THREADS, nn_channel_sums, (NN_THREADS / NN_WARP),
                  nn_d_channel_moments)
NN_SHARED_KERNELS(nn_k_channel_slopes, NN_THREADS, nn_channel_sums, (NN_THREADS / NN_WARP),
                  nn_d_channel_slopes)

/* The channel of a warp, in kernels that add up the chunks of a channel per warp. */
__device__ __forceinline__ int64_t nn_d_warp_channel(void) {
    return (int64_t)blockIdx.x * (NN_THREADS / NN_WARP) + threadIdx.x / NN_WARP;
}

/* The sum over a channel's chunks, in double; all threads of the warp get it. */
__device__ __forceinline__ double nn_d_fold_chunks(const float *sums, int64_t channel,
                                                   int64_t chunks) {
    double total = 0.0;
    for (int64_t i = threadIdx.x % NN_WARP; i < chunks; i += NN_WARP) {
        total += (double)sums[channel * chunks + i];
    }
    return nn_d_warp_sum(total);
}

/* dbias and dweight (channels each), F32: the sums and the products; means (2, channels): both,
   divided by the number of values. Each may be NULL. */
static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_channel_fold(nn_channel_sums s, nn_dest dbias, nn_dest dweight, float *means) {
    const int64_t channel = nn_d_warp_channel();
    if (channel >= s.n.channels) {
        return;
    }
    const double count = (double)(s.n.images * s.n.plane);
    const double total = nn_d_fold_chunks(s.sums, channel, s.chunks);
    const double product = s.x.data != NULL ? nn_d_fold_chunks(s.products, channel, s.chunks) : 0.0;
    if (threadIdx.x % NN_WARP != 0) {
        return;
    }
    if (dbias.data != NULL) {
        float *to = (float *)dbias.data + channel;
        *to = nn_d_sum(dbias.beta != 0.0f ? *to : 0.0f, (float)total);
    }
    if (dweight.data != NULL) {
        float *to = (float *)dweight.data + channel;
        *to = nn_d_sum(dweight.beta != 0.0f ? *to : 0.0f, (float)product);
    }
    if (means != NULL) {
        means[channel] = (float)(total / count);
        means[s.n.channels + channel] = (float)(product / count);
    }
}

/* Mean and rstd of each channel, from the running statistics or from its chunks, which also update
   the running statistics. The squares of a chunk are relative to its own mean: Chan, Golub and
   LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979,
   equation 2.1. */
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

/* The first stage. work has nn_cuda_batch_norm_floats; the last two per channel stay unused. */
static int nn_cuda_channel_sums(const ms_call *call, nn_channel_sums *s, float *work) {
    const ms_dtype dtype = s->dy.data != NULL ? s->dy.dtype : s->x.dtype;
    const bool wide =
        s->n.plane % nn_cuda_wide(dtype) == 0 && nn_aligned(s->dy.data) && nn_aligned(s->x.data);
    s->chunks = nn_cuda_channel_chunks(s->n);
    s->sums = work;
    s->products = work + s->n.channels * s->chunks;
    return nn_launch(call, nn_grid_of(s->n.channels * s->chunks, 1, NN_THREADS),
                     (s->dy.data == NULL ? nn_k_channel_moments
                                         : nn_k_channel_slopes)[nn_type_index(dtype)][wide],
                     *s);
}

static nn_grid nn_channel_grid(nn_planes n) {
    return nn_grid_of(nn_divide_up(n.channels, NN_THREADS / NN_WARP), 1, NN_THREADS);
}

/* dbias (channels): the sums of dy over images and planes. */
static int nn_cuda_channel_bias(const ms_call *call, nn_dest dbias, nn_values dy, nn_planes n,
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
                                      nn_nowhere(), means));
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda batch norm

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

/* Forward and a recomputation run the same kernel with the same mean and rstd: the same bits. */
static int nn_cuda_batch_norm(const ms_call *call, nn_values y, nn_values x,
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
        float *mean = work + nn_cuda_batch_norm_floats(n) - 2 * n.channels;
        float *rstd = mean + n.channels;
        op.mean = mean;
        op.rstd = rstd;
        result = nn_first(
            result, nn_launch(call, nn_channel_grid(n), nn_k_channel_norm, s, *v, mean, rstd));
    }
    return nn_first(result,
                    nn_cuda_planes(call, op, nn_dest_of(y, 0.0f), x, nn_f32(NULL), n, n.channels));
}

static int nn_cuda_batch_norm_backward(const ms_call *call, nn_dest dx, nn_dest dweight,
                                       nn_dest dbias, nn_values dy, nn_values x,
                                       const nn_batch_norm_values *v, nn_planes n, float *work) {
    float *means = work + nn_cuda_batch_norm_floats(n) - 2 * n.channels;
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

// ------------------------------------------------------------------------------------------------
// >>nn cuda patches  max pooling, and what gathers the patches of a pixel

static __global__ void __launch_bounds__(NN_THREADS)
    nn_k_max_pool(nn_values y, int32_t *places, nn_values x, nn_window w) {
    const int64_t i = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    if (i >= w.images * w.channels * w.out_height * w.out_width) {
        return;
    }
    const int64_t line = i / w.out_width;
    const int64_t plane = line / w.out_height;
    const nn_values from = nn_from(x, plane * (w.height * w.width));
    const int64_t place =
        nn_largest_place(from, &w, line - plane * w.out_height, i - line * w.out_width);
    nn_set(y, i, nn_get(from, place));
    if (places != NULL) {
        places[i] = (int32_t)place;
    }
}

static int nn_cuda_max_pool(const ms_call *call, nn_values y, int32_t *places, nn_values x,
                            const nn_window *w) {
    const int64_t count = w->images * w->channels * w->out_height * w->out_width;
    return nn_launch(call, nn_grid_of(nn_divide_up(count, NN_THREADS), 1, NN_THREADS),
                     nn_k_max_pool, y, places, x, *w);
}

/* dx (planes, height, width): each pixel adds up values of the patches that cover it, of these rows
   of patches. Only the pixel rows begin ... end - 1 of each plane are written; those before fresh
   are added to, even if adds is false. */
typedef struct nn_gather {
    nn_values dx;
    int64_t planes, begin, end, fresh;
    nn_patch_rows patches;
    nn_window w;
    int64_t kernel_whole, kernel_rest;   // kernel / stride, kernel % stride
    int64_t padding_whole, padding_rest; // the same of padding, which is where pixel 0 is
    bool adds, aligned;
} nn_gather;

/* Which of `count` patches in a row cover the pixel whole * stride + rest, counted from the first
   pixel of the first patch. */
__device__ __forceinline__ nn_span nn_d_covering(int64_t whole, int64_t rest, const nn_gather &g,
                                                 int64_t count) {
    nn_span span;
    span.end = nn_d_least(whole + 1, count);
    span.begin = whole + 1 - g.kernel_whole - (rest < g.kernel_rest ? 1 : 0);
    span.begin = span.begin < 0 ? 0 : span.begin;
    return span;
}

/* Which of the rows of patches g.patches cover the row of pixels y. */
__device__ __forceinline__ nn_span nn_d_covering_row(int64_t y, const nn_gather &g) {
    const int64_t at = y + g.w.padding;
    const int64_t whole = at / g.w.stride;
    nn_span span = nn_d_covering(whole, at - whole * g.w.stride, g, g.w.out_height);
    span.end = nn_d_least(span.end, g.patches.begin + g.patches.count);
    span.begin = span.begin < g.patches.begin ? g.patches.begin : span.begin;
    return span;
}

/* Visits pixels in their order, with the patches that cover each. */
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

    /* Goes to the next pixel; true: it is the first of a plane. */
    __device__ __forceinline__ bool advance(const nn_gather &g) {
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

/* Four pixels per thread. op.start receives the plane of the pixels that come next. */
template <typename T, typename F>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_gather(F op, nn_gather g) {
    const int64_t first = 4 * ((int64_t)blockIdx.x * NN_THREADS + threadIdx.x);
    const int64_t count = g.planes * (g.end - g.begin) * g.w.width;
    const bool wide = g.aligned && first + 4 <= count;
    float sum[4] = {0};
    T *to[4] = {NULL};
    if (first >= count) {
        return;
    }
    nn_walk walk(first, g);
    op.start(walk.plane);
    NN_UNROLL
    for (int k = 0; k < 4; k++) {
        if (first + k < count) {
            to[k] = (T *)g.dx.data + (walk.plane * g.w.height + walk.y) * g.w.width + walk.x;
            sum[k] = op(walk.y, walk.x, walk.down,
                        nn_d_covering(walk.whole, walk.rest, g, g.w.out_width));
            if (g.adds || walk.y < g.fresh) {
                sum[k] = nn_d_sum(nn_d_float(*to[k]), sum[k]);
            }
        }
        if (first + k + 1 < count && walk.advance(g)) {
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
            nn_d_round(to[k], sum[k]);
        }
    }
}

/* For all pixels of all planes, from all patches. */
static nn_gather nn_gather_of(nn_dest dx, int64_t planes, const nn_window *w) {
    nn_gather g;
    memset(&g, 0, sizeof g);
    g.dx = nn_values_at(dx);
    g.planes = planes;
    g.end = w->height;
    g.patches.count = w->out_height;
    g.w = *w;
    g.kernel_whole = w->kernel / w->stride;
    g.kernel_rest = w->kernel % w->stride;
    g.padding_whole = w->padding / w->stride;
    g.padding_rest = w->padding % w->stride;
    g.adds = dx.beta != 0.0f;
    return g;
}

template <typename T, typename F>
static int nn_cuda_gather_as(const ms_call *call, F op, nn_gather g) {
    const int64_t count = g.planes * (g.end - g.begin) * g.w.width;
    g.aligned = g.end - g.begin == g.w.height && nn_aligned(g.dx.data);
    return nn_launch(call, nn_grid_of(nn_divide_up(count, 4 * NN_THREADS), 1, NN_THREADS),
                     nn_k_gather<T, F>, op, g);
}

/* The sum of the gradients of all patches whose largest value is the pixel. */
template <typename T> struct nn_op_max_pool_backward {
    const T *dy;
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
                sum += places[at] == place ? nn_d_float(dy[at]) : 0.0f;
            }
        }
        return sum;
    }
};

template <typename T>
static int nn_cuda_max_pool_backward_as(const ms_call *call, nn_dest dx, nn_values dy,
                                        const int32_t *places, const nn_window *w) {
    nn_op_max_pool_backward<T> op;
    op.dy = (const T *)dy.data;
    op.places = places;
    op.width = w->width;
    op.out_width = w->out_width;
    op.out_plane = w->out_height * w->out_width;
    op.begin = 0;
    return nn_cuda_gather_as<T>(call, op, nn_gather_of(dx, w->images * w->channels, w));
}

static int nn_cuda_max_pool_backward(const ms_call *call, nn_dest dx, nn_values dy,
                                     const int32_t *places, const nn_window *w) {
    return dx.data == NULL ? 0
                           : NN_AS(dx.dtype, nn_cuda_max_pool_backward_as, call, dx, dy, places, w);
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda convolution

/* What is worked on at once in a convolution: some images, or some rows of patches of one. */
typedef struct nn_part {
    int64_t image, images;
    nn_patch_rows rows;
} nn_part;

typedef struct nn_parts {
    int64_t images, rows; // in each but the last
    int64_t bands;        // parts of an image
    int64_t count;        // of all parts
} nn_parts;

/* Parts of at most this many patches, but of at least one row of patches. */
static nn_parts nn_parts_of(const nn_window *w, int64_t patches) {
    nn_parts parts;
    parts.images = nn_most(1, nn_least(w->images, patches / nn_window_patches(w)));
    parts.rows = nn_most(1, nn_least(w->out_height, patches / w->out_width));
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

/* Patches of a part in each of its images. */
static int64_t nn_part_patches(const nn_part *part, const nn_window *w) {
    return part->rows.count * w->out_width;
}

/* The parts for the columns of forward, or for their gradients. */
static nn_parts nn_cuda_column_parts(const nn_window *w, int64_t out) {
    const int64_t patches = nn_cuda_conv2d_limit(w, out) / nn_window_depth(w);
    return nn_parts_of(w, nn_is_pointwise(w) ? w->images * nn_window_patches(w) : patches);
}

/* What nn_k_columns writes: element (i, j) of patch p in channel c of image g of the part goes
   to columns[g * image_stride + ((c * kernel + i) * kernel + j) * row_stride + p]. Threads count
   the patches of all images in one sequence; those after the last patch, up to `patches`, write
   zeros. */
typedef struct nn_columns {
    nn_values columns;
    nn_values x; // the part's first image
    nn_window w;
    nn_part part;
    int64_t patches, image_stride, row_stride;
} nn_columns;

/* A thread copies one patch of one channel; its neighbours in the warp copy the next patches. U: a
   type of the size of the elements, whose 0 has the bits of theirs. */
template <typename U>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_columns(nn_columns n) {
    const int64_t index = (int64_t)blockIdx.x * NN_THREADS + threadIdx.x;
    const int64_t channel = index / n.patches;
    if (channel >= n.w.channels) {
        return;
    }
    const int64_t patch = index - channel * n.patches;
    const int64_t image_patches = n.part.rows.count * n.w.out_width;
    const int64_t image = patch / image_patches;
    const int64_t place = patch - image * image_patches;
    const int64_t line = place / n.w.out_width;
    const int64_t top = (n.part.rows.begin + line) * n.w.stride - n.w.padding;
    const int64_t left = (place - line * n.w.out_width) * n.w.stride - n.w.padding;
    const int64_t plane = (image * n.w.channels + channel) * n.w.height;
    U *to = (U *)n.columns.data + image * n.image_stride +
            channel * n.w.kernel * n.w.kernel * n.row_stride + place;
    for (int64_t y = top; y < top + n.w.kernel; y++) {
        const bool inside = image < n.part.images && y >= 0 && y < n.w.height;
        const int64_t begin = (plane + y) * n.w.width;
        NN_UNROLL_FOUR
        for (int64_t x = left; x < left + n.w.kernel; x++) {
            *to =
                inside && x >= 0 && x < n.w.width ? __ldg((const U *)n.x.data + (begin + x)) : (U)0;
            to += n.row_stride;
        }
    }
}

static int nn_cuda_columns(const ms_call *call, nn_columns n) {
    return nn_launch(call,
                     nn_grid_of(nn_divide_up(n.w.channels * n.patches, NN_THREADS), 1, NN_THREADS),
                     n.x.dtype == MS_DTYPE_F32 ? nn_k_columns<float> : nn_k_columns<uint16_t>, n);
}

static nn_columns nn_columns_in(float *work, nn_values x, const nn_part *part, const nn_window *w) {
    nn_columns n;
    n.columns = nn_values_in(work, x.dtype);
    n.x = nn_from(x, part->image * (w->channels * w->height * w->width));
    n.w = *w;
    n.part = *part;
    n.patches = part->images * nn_part_patches(part, w);
    n.row_stride = nn_part_patches(part, w);
    n.image_stride = nn_window_depth(w) * n.row_stride;
    return n;
}

/* The values at the part's patches, in planes (images, count, patches). */
static ms_matrix nn_part_matrix(nn_values planes, int64_t count, const nn_part *part,
                                const nn_window *w) {
    const int64_t image = count * nn_window_patches(w);
    ms_matrix m = nn_patch_matrix(nn_from(planes, part->image * image), count, part->rows, w);
    m.batch_count = part->images;
    m.batch_stride = image;
    return m;
}

/* The part's columns (images, depth, patches): these, or x if the convolution is pointwise. */
static ms_matrix nn_part_columns(nn_values columns, nn_values x, const nn_part *part,
                                 const nn_window *w) {
    const int64_t depth = nn_window_depth(w);
    const int64_t patches = nn_part_patches(part, w);
    if (nn_is_pointwise(w)) {
        return nn_part_matrix(x, w->channels, part, w);
    }
    ms_matrix m = nn_matrix(columns, depth, patches, patches);
    m.batch_count = part->images;
    m.batch_stride = depth * patches;
    return m;
}

/* a is a product of matrices. */
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

static int nn_cuda_conv2d(const ms_call *call, nn_values y, nn_values x, nn_values weight,
                          const float *bias, int64_t out, const nn_window *w, float *work) {
    const nn_parts parts = nn_cuda_column_parts(w, out);
    const int64_t depth = nn_window_depth(w);
    const nn_planes planes = {w->images, out, nn_window_patches(w)};
    nn_op_channel_bias op;
    int result = 0;
    for (int64_t i = 0; i < parts.count && result == 0; i++) {
        const nn_part part = nn_part_at(&parts, i, w);
        if (!nn_is_pointwise(w)) {
            result = nn_cuda_columns(call, nn_columns_in(work, x, &part, w));
        }
        if (result == 0) {
            result = (int)ms_gemm(call, 1.0f, nn_matrix(weight, out, depth, depth),
                                  nn_part_columns(nn_values_in(work, x.dtype), x, &part, w), 0.0f,
                                  nn_part_matrix(y, out, &part, w));
        }
    }
    if (result != 0 || bias == NULL) {
        return result;
    }
    op.bias = bias;
    op.shift = 0.0f;
    return nn_cuda_planes(call, op, nn_dest_of(y, 0.0f), y, nn_f32(NULL), planes, out);
}

/* The sum of a pixel's copies in the columns (images, depth, patches) of a part. */
struct nn_op_columns_backward {
    const float *columns, *channel;
    int64_t channels, kernel, stride, padding;
    int64_t out_width, row_begin, row_stride, image_stride;
    __device__ void start(int64_t plane) {
        const int64_t image = plane / channels;
        channel = columns + image * image_stride +
                  (plane - image * channels) * kernel * kernel * row_stride;
    }
    __device__ float operator()(int64_t y, int64_t x, nn_span down, nn_span across) const {
        float sum = 0.0f;
        for (int64_t i = down.begin; i < down.end; i++) {
            const int64_t row = (y + padding - i * stride) * kernel + x + padding;
            const float *from = channel + (i - row_begin) * out_width;
            for (int64_t k = across.begin; k < across.end; k++) {
                sum += from[(row - k * stride) * row_stride + k];
            }
        }
        return sum;
    }
};

/* The row of pixels where the patches of row `row` begin, plus `beyond` rows; 0 for row 0. */
static int64_t nn_first_pixel_row(int64_t row, int64_t beyond, const nn_window *w) {
    const int64_t y = row * w->stride - w->padding + beyond;
    return row == 0 ? 0 : nn_least(nn_most(y, 0), w->height);
}

/* dx of a part, from the gradients of its columns, in work. To rows of pixels that two parts cover
   the second part adds; rows that no patch covers belong to the part before them. */
static int nn_cuda_columns_backward(const ms_call *call, nn_dest dx, const float *work,
                                    const nn_part *part, const nn_window *w) {
    const int64_t end = part->rows.begin + part->rows.count;
    const int64_t beyond = nn_most(w->kernel - w->stride, 0);
    const int64_t image = w->channels * w->height * w->width;
    nn_gather g = nn_gather_of(dx, part->images * w->channels, w);
    nn_op_columns_backward op;
    g.dx = nn_from(g.dx, part->image * image);
    g.patches = part->rows;
    g.begin = nn_first_pixel_row(part->rows.begin, 0, w);
    g.fresh = nn_first_pixel_row(part->rows.begin, beyond, w);
    g.end = end == w->out_height ? w->height : nn_first_pixel_row(end, beyond, w);
    op.columns = work;
    op.channel = work;
    op.channels = w->channels;
    op.kernel = w->kernel;
    op.stride = w->stride;
    op.padding = w->padding;
    op.out_width = w->out_width;
    op.row_begin = part->rows.begin;
    op.row_stride = nn_part_patches(part, w);
    op.image_stride = nn_window_depth(w) * op.row_stride;
    return NN_AS(dx.dtype, nn_cuda_gather_as, call, op, g);
}

/* dx: the columns transpose(weight) * dy, added to the pixels they are copies of. */
static int nn_cuda_conv2d_images(const ms_call *call, nn_dest dx, nn_values dy, nn_values weight,
                                 int64_t out, const nn_window *w, float *work) {
    const nn_parts parts = nn_cuda_column_parts(w, out);
    const int64_t depth = nn_window_depth(w);
    const bool direct = nn_is_pointwise(w);
    int result = 0;
    for (int64_t i = 0; i < parts.count && result == 0; i++) {
        const nn_part part = nn_part_at(&parts, i, w);
        result = (int)ms_gemm(call, 1.0f, ms_transpose(nn_matrix(weight, out, depth, depth)),
                              nn_part_matrix(dy, out, &part, w), direct ? dx.beta : 0.0f,
                              nn_part_columns(nn_f32(work), nn_values_at(dx), &part, w));
        if (result == 0 && !direct) {
            result = nn_cuda_columns_backward(call, dx, work, &part, w);
        }
    }
    return result;
}

/* dest, F32: the sum of the products a * b of all a.batch_count pairs. If there are several, the
   products go to partial first. */
static int nn_cuda_sum_of_products(const ms_call *call, nn_dest dest, ms_matrix a, ms_matrix b,
                                   float *partial) {
    const bool single = a.batch_count == 1;
    const int64_t cols = b.transposed ? b.rows : b.cols;
    ms_matrix c = nn_matrix(single ? nn_values_at(dest) : nn_f32(partial), a.rows, cols, cols);
    c.batch_count = a.batch_count;
    c.batch_stride = a.rows * cols;
    const int result = (int)ms_gemm(call, 1.0f, a, b, single ? dest.beta : 0.0f, c);
    if (result != 0 || single) {
        return result;
    }
    return nn_launch(call, nn_grid_of(nn_divide_up(c.batch_stride, NN_THREADS), 1, NN_THREADS),
                     nn_k_fold, (float *)dest.data, (const float *)partial, c.batch_count,
                     c.batch_stride, dest.beta != 0.0f);
}

/* Segments of the patches: enough to keep a GPU busy, but so few that their products take no more
   memory than their operands. */
typedef struct nn_segments {
    int64_t count, size, patches; // size: patches of a segment; patches: count * size
} nn_segments;

static nn_segments nn_segments_of(int64_t patches, int64_t out, int64_t depth) {
    nn_segments s;
    const int64_t tiles = nn_divide_up(out, NN_TILE) * nn_divide_up(depth, NN_TILE);
    s.count = nn_least(NN_BUSY_TILES / tiles, patches / NN_SEGMENT);
    s.count = nn_most(1, nn_least(s.count, patches * (out + depth) / (out * depth)));
    s.size = nn_divide_up(nn_divide_up(patches, s.count), 4) * 4;
    s.count = nn_divide_up(patches, s.size);
    s.patches = s.count * s.size;
    return s;
}

static nn_parts nn_cuda_segment_parts(const nn_window *w, int64_t out) {
    const int64_t most = nn_cuda_conv2d_limit(w, out) / (2 * (nn_window_depth(w) + out)) - 4;
    return nn_parts_of(w, nn_most(0, most - most / (NN_SEGMENT / 4)));
}

/* dweight, image by image (nn_cuda_sums_images). */
static int nn_cuda_weight_of_images(const ms_call *call, nn_dest dweight, nn_values dy, nn_values x,
                                    int64_t out, const nn_window *w, float *work) {
    const int64_t most = nn_cuda_conv2d_limit(w, out) / (out * w->channels);
    const nn_parts parts = nn_parts_of(w, nn_most(1, most) * nn_window_patches(w));
    int result = 0;
    for (int64_t i = 0; i < parts.count && result == 0; i++) {
        const nn_part part = nn_part_at(&parts, i, w);
        result = nn_cuda_sum_of_products(
            call, nn_dest_of(nn_values_at(dweight), i == 0 ? dweight.beta : 1.0f),
            nn_part_matrix(dy, out, &part, w),
            ms_transpose(nn_part_matrix(x, w->channels, &part, w)), work);
    }
    return result;
}

/* Copies the part's patches of x side by side (depth, patches); m is that, cut into segments. */
static int nn_cuda_segments(const ms_call *call, ms_matrix *m, float *work, nn_values x,
                            const nn_part *part, const nn_window *w, nn_segments s) {
    nn_columns n = nn_columns_in(work, x, part, w);
    n.patches = s.patches;
    n.row_stride = s.patches;
    n.image_stride = nn_part_patches(part, w);
    *m = nn_matrix(n.columns, nn_window_depth(w), s.size, s.patches);
    m->batch_count = s.count;
    m->batch_stride = s.size;
    return nn_cuda_columns(call, n);
}

/* dweight, segment by segment. dy is copied likewise, as columns of a 1 * 1 convolution. */
static int nn_cuda_weight_of_segments(const ms_call *call, nn_dest dweight, nn_values dy,
                                      nn_values x, int64_t out, const nn_window *w, float *work) {
    const nn_parts parts = nn_cuda_segment_parts(w, out);
    const int64_t depth = nn_window_depth(w);
    const nn_window slopes =
        nn_window_of(ms_shape4(w->images, out, w->out_height, w->out_width), 1, 1, 0);
    int result = 0;
    for (int64_t i = 0; i < parts.count && result == 0; i++) {
        const nn_part part = nn_part_at(&parts, i, w);
        const nn_segments s = nn_segments_of(part.images * nn_part_patches(&part, w), out, depth);
        float *own = work + depth * s.patches;
        ms_matrix a;
        ms_matrix b;
        result = nn_first(nn_cuda_segments(call, &b, work, x, &part, w, s),
                          nn_cuda_segments(call, &a, own, dy, &part, &slopes, s));
        if (result == 0) {
            result = nn_cuda_sum_of_products(
                call, nn_dest_of(nn_values_at(dweight), i == 0 ? dweight.beta : 1.0f), a,
                ms_transpose(b), own + out * s.patches);
        }
    }
    return result;
}

/* All images are read before the gradient of one is written, so dx may be x. */
static int nn_cuda_conv2d_backward(const ms_call *call, nn_dest dx, nn_dest dweight, nn_dest dbias,
                                   nn_values dy, nn_values x, nn_values weight, int64_t out,
                                   const nn_window *w, float *work) {
    const nn_planes slopes = {w->images, out, nn_window_patches(w)};
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

// ------------------------------------------------------------------------------------------------
// >>nn cuda table

#define NN_CUDA_KERNEL(name, operands) nn_cuda_##name,

const nn_device *nn_cuda(void) {
    static const nn_device cuda = {"cuda", NN_WIDEST,
                                   NN_SIZES(NN_CUDA_SIZE) NN_KERNELS(NN_CUDA_KERNEL)};
    return &cuda;
}

#endif // NN_CUDA_IMPLEMENTATION

#endif // MEMSCALE_NN_CUDA_H
