/*  nn_cuda.h - the kernels of nn.h for CUDA, and nn_cuda(), the table of them.

    A part of nn.h, which includes it: it uses what is declared up to ">>nn device", and nothing of
    nn_cpu.h. All programs get the first section, in C: the sizes of scratch memory, and
    nn_cuda_dry(), the table without kernels. The rest is CUDA C++. It is compiled if
    NN_CUDA_IMPLEMENTATION is defined before nn.h is included, as in cuda.cu.

        >>nn cuda scratch   sizes of scratch memory; nn_cuda_dry()
        >>nn cuda launch    constants, launches, errors
        >>nn cuda types     F32, BF16 and F16 in memory
        >>nn cuda table     nn_cuda()

    The kernels are in the files of their families, nn_cuda_layers.h, nn_cuda_attention.h and
    nn_cuda_images.h, which are included before the table: a new one goes to the section of its kind. */
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

#include "nn_cuda_layers.h"

#include "nn_cuda_attention.h"
#include "nn_cuda_images.h"

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
