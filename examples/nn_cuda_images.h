/*  nn_cuda_images.h - the layers of convolutional nets with CUDA.

        >>nn cuda images          element by element, averages
        >>nn cuda channels        sums over the channels of images
        >>nn cuda batch norm      over the images of a batch
        >>nn cuda patches         max pooling, and what gathers the patches of a pixel
        >>nn cuda convolution     by products of patches

    A part of nn_cuda.h, which includes it after nn_cuda_layers.h. */
#ifndef MEMSCALE_NN_CUDA_IMAGES_H
#define MEMSCALE_NN_CUDA_IMAGES_H

#ifndef MEMSCALE_NN_CUDA_H
#error "include nn.h, which includes nn_cuda.h"
#endif

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

#endif // MEMSCALE_NN_CUDA_IMAGES_H
