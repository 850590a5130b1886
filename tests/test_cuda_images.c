/*  test_cuda_images.c - the kernels of nn_cuda.h for convolutional nets, called one by one: against
    those of the CPU, in all the workspace they like and in the least there can be; that they write
    what they should and nothing beside it; the same bits each time. Compiled as C++, by nvcc or with
    the emulation. */
#include <cuda_runtime.h>

#include "private.h"

/* Kernels of its own, whose groups can be made small. */
static int64_t group_floats;
#define NN_GROUP_FLOATS group_floats
#define NN_CUDA_IMPLEMENTATION
#define nn_cuda nn_cuda_in_groups
#include "nn.h"
#include "testing.h"

#ifdef CUDART_EMULATION
#include "emulation.h"
#endif

enum { BUFFERS = 12, MARGIN = 48, CASES = 512 };

static const int64_t all_floats = 9 << 20;

// ------------------------------------------------------------------------------------------------
// a kernel on one device: its buffers, each with margins that nobody may write

typedef struct buffer {
    int64_t count;
    float *memory;   // of the device, with the margins
    float *values;   // what is there afterwards
    bool is_written; // by the kernel, and compared
    bool is_exact;   // no sums: the CPU has the same bits
} buffer;

/* How a kernel is called. */
typedef struct setting {
    float beta;
    int shift; // floats that the buffers are off from an aligned address
    int alias; // which input the output takes the place of; 0: none
    bool has_bias, keeps;
    nn_window window;
    int64_t out;
    nn_planes planes;
    float offset; // of the inputs
} setting;

typedef struct side {
    const nn_device *device;
    ms_call call;
    bool is_cuda;
    buffer buffers[BUFFERS];
    int count;
} side;

static ms_model *start_model(bool is_cuda) {
    ms_config config = t_config();
    ms_model *model = NULL;
    if (is_cuda) {
        config.backend = ms_backend_cuda(0);
    }
    assert_int_equal(ms_create(&config, &model), MS_RESULT_OK);
    nn_net *net = nn_create_on(model, is_cuda ? nn_cuda() : nn_cpu());
    assert_non_null(net);
    const ms_tensor x = ms_input(model, "x", MS_DTYPE_F32, ms_shape2(1, 1));
    ms_set_loss(model, nn_linear(net, "y", x, 1, 1.0f));
    t_ok(model, ms_wrap(model));
    nn_destroy(net); // no step is made
    return model;
}

static void start_side(side *s, ms_model *model, bool is_cuda) {
    memset(s, 0, sizeof *s);
    s->is_cuda = is_cuda;
    s->device = is_cuda ? nn_cuda() : nn_cpu();
    s->call.model = model;
    s->call.stream = is_cuda ? ms_stream(model) : NULL;
}

static float *host_floats(int64_t count) {
    float *values = (float *)malloc((size_t)count * sizeof(float));
    assert_non_null(values);
    return values;
}

static void copy_memory(const side *s, void *to, const void *from, int64_t floats) {
    const size_t bytes = (size_t)floats * sizeof(float);
    if (s->is_cuda) {
        cudaStream_t stream = (cudaStream_t)s->call.stream;
        assert_int_equal(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), cudaSuccess);
        assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    } else {
        memcpy(to, from, bytes);
    }
}

/* A new buffer with these values, which it takes; where the floats begin, on the device. */
static float *add_buffer(side *s, const setting *o, float *values, int64_t count) {
    assert_in_range(s->count, 0, BUFFERS - 1);
    buffer *b = &s->buffers[s->count++];
    const int64_t all = count + 2 * MARGIN;
    float *memory = host_floats(all);
    for (int64_t i = 0; i < all; i++) {
        const int64_t inside = i - MARGIN - o->shift;
        memory[i] = inside < 0 || inside >= count ? -7.25f : values[inside];
    }
    b->count = count;
    b->memory = memory;
    b->values = values;
    if (s->is_cuda) {
        assert_int_equal(cudaMalloc(&b->memory, (size_t)all * sizeof(float)), cudaSuccess);
        copy_memory(s, b->memory, memory, all);
        free(memory);
    }
    return b->memory + MARGIN + o->shift;
}

/* Each buffer has values of its own, the same on both devices. */
static float *add_input(side *s, const setting *o, int64_t count) {
    float *values = host_floats(count);
    t_rng rng = t_seed((uint64_t)s->count + 40);
    t_fill(&rng, values, (uint64_t)count, 1.0f);
    for (int64_t i = 0; i < count; i++) {
        values[i] += o->offset;
    }
    return add_buffer(s, o, values, count);
}

/* What is overwritten is NaN before, so that it cannot be read. */
static float *add_output(side *s, const setting *o, int64_t count, bool adds, bool is_exact) {
    float *data = add_input(s, o, count);
    buffer *b = &s->buffers[s->count - 1];
    b->is_written = true;
    b->is_exact = is_exact;
    for (int64_t i = 0; !adds && i < count; i++) {
        b->values[i] = nanf("");
    }
    copy_memory(s, data, b->values, count);
    return data;
}

static float *add_work(side *s, const setting *o, int64_t floats) {
    setting aligned = *o;
    aligned.shift = 0; // 64 bytes, as memscale.h gives it
    float *data = add_output(s, &aligned, nn_most(floats, 1), false, false);
    s->buffers[s->count - 1].is_written = false;
    return data;
}

static nn_dest add_dest(side *s, const setting *o, int64_t count) {
    return nn_dest_of(nn_f32(add_output(s, o, count, o->beta != 0.0f, false)), o->beta);
}

/* The gradient of a, which may stand in its place. */
static nn_dest add_gradient(side *s, const setting *o, int alias, float *a, int64_t count) {
    if (o->alias == 0 || o->alias != alias) {
        return add_dest(s, o, count);
    }
    for (int i = 0; i < s->count; i++) {
        s->buffers[i].is_written |= s->buffers[i].memory + MARGIN + o->shift == a;
    }
    return nn_dest_of(nn_f32(a), o->beta);
}

/* Fetches what the kernel wrote. */
static void finish_side(side *s) {
    for (int i = 0; i < s->count; i++) {
        buffer *b = &s->buffers[i];
        const int64_t all = b->count + 2 * MARGIN;
        float *memory = host_floats(all);
        copy_memory(s, memory, b->memory, all);
        int64_t outside = 0;
        for (int64_t k = 0; k < all; k++) {
            outside += !(memory[k] < -7.25f) && !(memory[k] > -7.25f) && !t_is_nan(memory[k]);
        }
        const float *begin = memory;
        while (!(*begin < -7.25f) && !(*begin > -7.25f) && !t_is_nan(*begin)) {
            begin++;
        }
        assert_true(outside >= 2 * MARGIN);
        assert_in_range(begin - memory, MARGIN, MARGIN + 3);
        memcpy(b->values, begin, (size_t)b->count * sizeof(float));
        free(memory);
        if (s->is_cuda) {
            assert_int_equal(cudaFree(b->memory), cudaSuccess);
        } else {
            free(b->memory);
        }
    }
}

static void free_side(side *s) {
    for (int i = 0; i < s->count; i++) {
        free(s->buffers[i].values);
    }
    s->count = 0;
}

// ------------------------------------------------------------------------------------------------
// the kernels

typedef int (*kernel_of)(side *s, const setting *o);

static int64_t image_count(const nn_window *w) {
    return w->images * w->channels * w->height * w->width;
}

static int64_t patch_count(const nn_window *w, int64_t channels) {
    return w->images * channels * w->out_height * w->out_width;
}

/* Some values equal, some NaN. */
static float *add_ties(side *s, const setting *o, int64_t count) {
    float *x = add_input(s, o, count);
    float *values = s->buffers[s->count - 1].values;
    for (int64_t i = 0; i < count; i++) {
        values[i] = i % 13 == 5 && i % 4 == 1 ? nanf("") : floorf(values[i] * 3.0f);
    }
    copy_memory(s, x, values, count);
    return x;
}

static int run_relu(side *s, const setting *o) {
    const int64_t count = nn_planes_count(o->planes);
    float *x = add_ties(s, o, count);
    float *y = x;
    if (o->alias == 0) {
        y = add_output(s, o, count, false, true);
    } else {
        s->buffers[0].is_written = true;
        s->buffers[0].is_exact = true;
    }
    return s->device->relu(&s->call, nn_f32(y), nn_f32(x), count);
}

static int run_relu_backward(side *s, const setting *o) {
    const int64_t count = nn_planes_count(o->planes);
    float *dy = add_input(s, o, count);
    float *y = add_input(s, o, count);
    const nn_dest dx = add_gradient(s, o, o->alias, o->alias == 1 ? dy : y, count);
    return s->device->relu_backward(&s->call, dx, nn_f32(dy), nn_f32(y), count);
}

static int run_conv2d(side *s, const setting *o) {
    const nn_window *w = &o->window;
    float *x = add_input(s, o, image_count(w));
    float *weight = add_input(s, o, o->out * nn_window_depth(w));
    float *bias = add_input(s, o, o->out);
    float *work = add_work(s, o, s->device->conv2d_floats(w, o->out, false));
    float *y = add_output(s, o, patch_count(w, o->out), false, false);
    return s->device->conv2d(&s->call, nn_f32(y), nn_f32(x), nn_f32(weight),
                             o->has_bias ? bias : NULL, o->out, w, work);
}

static int run_conv2d_backward(side *s, const setting *o) {
    const nn_window *w = &o->window;
    float *dy = add_input(s, o, patch_count(w, o->out));
    float *x = add_input(s, o, image_count(w));
    float *weight = add_input(s, o, o->out * nn_window_depth(w));
    float *work = add_work(s, o, s->device->conv2d_floats(w, o->out, true));
    const nn_dest nobody = nn_nowhere();
    const nn_dest dweight = o->keeps ? add_dest(s, o, o->out * nn_window_depth(w)) : nobody;
    const nn_dest dbias = o->has_bias ? add_dest(s, o, o->out) : nobody;
    const nn_dest dx = add_gradient(s, o, 1, x, image_count(w));
    return s->device->conv2d_backward(&s->call, dx, dweight, dbias, nn_f32(dy), nn_f32(x),
                                      nn_f32(weight), o->out, w, work);
}

static int run_max_pool(side *s, const setting *o) {
    const int64_t count = patch_count(&o->window, o->window.channels);
    float *x = add_ties(s, o, image_count(&o->window));
    float *y = add_output(s, o, count, false, true);
    int32_t *places = o->keeps ? (int32_t *)(void *)add_output(s, o, count, false, true) : NULL;
    return s->device->max_pool(&s->call, nn_f32(y), places, nn_f32(x), &o->window);
}

/* The places are those of the CPU. */
static int run_max_pool_backward(side *s, const setting *o) {
    side cpu;
    setting forward = *o;
    const int64_t count = patch_count(&o->window, o->window.channels);
    memset(&cpu, 0, sizeof cpu);
    cpu.device = nn_cpu();
    forward.keeps = true;
    assert_int_equal(run_max_pool(&cpu, &forward), 0);
    finish_side(&cpu);
    float *places = add_buffer(s, o, cpu.buffers[2].values, count);
    cpu.buffers[2].values = NULL;
    free_side(&cpu);
    float *dy = add_input(s, o, count);
    const nn_dest dx = add_dest(s, o, image_count(&o->window));
    return s->device->max_pool_backward(&s->call, dx, nn_f32(dy),
                                        (const int32_t *)(const void *)places, &o->window);
}

/* Positive, as variances are. */
static float *add_positive(side *s, const setting *o, int64_t count) {
    float *x = add_input(s, o, count);
    float *values = s->buffers[s->count - 1].values;
    for (int64_t i = 0; i < count; i++) {
        values[i] = 0.25f + fabsf(values[i]);
    }
    s->buffers[s->count - 1].is_written = true;
    copy_memory(s, x, values, count);
    return x;
}

static int run_norm(side *s, const setting *o, nn_moments moments) {
    const int64_t channels = o->planes.channels;
    nn_batch_norm_values v;
    memset(&v, 0, sizeof v);
    float *x = add_input(s, o, nn_planes_count(o->planes));
    v.weight = add_input(s, o, channels);
    v.bias = add_input(s, o, channels);
    v.moments = moments;
    v.epsilon = 1e-5f;
    v.momentum = 0.1f;
    if (moments != NN_MOMENTS_SAVED) {
        v.running_mean = add_positive(s, o, channels);
        v.running_variance = add_positive(s, o, channels);
    }
    if (moments == NN_MOMENTS_SAVED || o->keeps) {
        v.mean = add_positive(s, o, channels);
        v.rstd = add_positive(s, o, channels);
    }
    float *work = add_work(s, o, s->device->batch_norm_floats(o->planes));
    const nn_dest y = add_gradient(s, o, 1, x, nn_planes_count(o->planes));
    return s->device->batch_norm(&s->call, nn_values_at(y), nn_f32(x), &v, o->planes, work);
}

static int run_batch_norm(side *s, const setting *o) {
    return run_norm(s, o, NN_MOMENTS_OF_BATCH);
}

static int run_batch_norm_running(side *s, const setting *o) {
    return run_norm(s, o, NN_MOMENTS_RUNNING);
}

static int run_batch_norm_saved(side *s, const setting *o) {
    return run_norm(s, o, NN_MOMENTS_SAVED);
}

static int run_batch_norm_backward(side *s, const setting *o) {
    const int64_t count = nn_planes_count(o->planes);
    const int64_t channels = o->planes.channels;
    const nn_dest nobody = nn_nowhere();
    nn_batch_norm_values v;
    memset(&v, 0, sizeof v);
    float *dy = add_input(s, o, count);
    float *x = add_input(s, o, count);
    v.moments = NN_MOMENTS_SAVED;
    v.weight = add_input(s, o, channels);
    v.mean = add_positive(s, o, channels);
    v.rstd = add_positive(s, o, channels);
    float *work = add_work(s, o, s->device->batch_norm_floats(o->planes));
    const nn_dest dx = add_gradient(s, o, o->alias, o->alias == 1 ? dy : x, count);
    const nn_dest dweight = o->keeps ? add_dest(s, o, channels) : nobody;
    const nn_dest dbias = o->has_bias ? add_dest(s, o, channels) : nobody;
    return s->device->batch_norm_backward(&s->call, dx, dweight, dbias, nn_f32(dy), nn_f32(x), &v,
                                          o->planes, work);
}

static int run_average(side *s, const setting *o) {
    float *x = add_input(s, o, nn_planes_count(o->planes));
    float *means = add_output(s, o, o->planes.images * o->planes.channels, false, false);
    return s->device->average(&s->call, nn_f32(means), nn_f32(x), o->planes);
}

static int run_average_backward(side *s, const setting *o) {
    float *dmeans = add_input(s, o, o->planes.images * o->planes.channels);
    const nn_dest dx = add_dest(s, o, nn_planes_count(o->planes));
    return s->device->average_backward(&s->call, dx, nn_f32(dmeans), o->planes);
}

// ------------------------------------------------------------------------------------------------
// both devices

/* Hashes of what CUDA wrote, case by case, in the first round; the others must write the same. */
static uint64_t hashes[CASES];
static int case_count, round_number;
static ms_model *models[2];

static uint64_t hash_side(const side *s) {
    uint64_t hash = 0;
    for (int i = 0; i < s->count; i++) {
        const buffer *b = &s->buffers[i];
        for (int64_t k = 0; b->is_written && k < b->count; k++) {
            uint32_t bits;
            memcpy(&bits, &b->values[k], sizeof bits);
            hash = nn_mix(hash ^ bits);
        }
    }
    return hash;
}

/* largest: of the values that are compared, for sums of numbers around 1. */
static void compare(const char *name, int index, const buffer *cpu, const buffer *cuda) {
    double largest = 0.0;
    assert_int_equal(cpu->count, cuda->count);
    if (cpu->is_exact) {
        assert_memory_equal(cuda->values, cpu->values, (size_t)cpu->count * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < cpu->count; i++) {
        largest = fmax(largest, fabs((double)cpu->values[i]));
    }
    for (int64_t i = 0; i < cpu->count; i++) {
        const double off = fabs((double)cuda->values[i] - (double)cpu->values[i]);
        if (!(off <= 5e-6 * largest + 1e-7)) {
            print_error("%s, case %d, buffer %d: [%lld] is %.9g, expected %.9g\n", name, case_count,
                        index, (long long)i, (double)cuda->values[i], (double)cpu->values[i]);
            fail();
        }
    }
}

static void check(const char *name, kernel_of run, const setting *o) {
    side cpu;
    side cuda;
    start_side(&cpu, models[0], false);
    start_side(&cuda, models[1], true);
    assert_int_equal(run(&cpu, o), 0);
    finish_side(&cpu);
    assert_int_equal(run(&cuda, o), 0);
    finish_side(&cuda);
    assert_int_equal(cpu.count, cuda.count);
    for (int i = 0; i < cpu.count; i++) {
        if (cpu.buffers[i].is_written) {
            compare(name, i, &cpu.buffers[i], &cuda.buffers[i]);
        }
    }
    const uint64_t hash = hash_side(&cuda);
    assert_in_range(case_count, 0, CASES - 1);
    if (round_number > 0 && hash != hashes[case_count]) {
        print_error("%s, case %d: other bits than in the first round\n", name, case_count);
        fail();
    }
    hashes[case_count++] = hash;
    free_side(&cpu);
    free_side(&cuda);
}

/* All cases of a test, three times; in the emulation with threads and streams in another order. */
static void in_rounds(void (*cases)(void)) {
    for (round_number = 0; round_number < 3; round_number++) {
        case_count = 0;
        group_floats = all_floats;
#ifdef CUDART_EMULATION
        emulation_reset((uint64_t)round_number);
#endif
        models[0] = start_model(false);
        models[1] = start_model(true);
        cases();
        assert_true(case_count > 0);
        ms_destroy(models[0]);
        ms_destroy(models[1]);
    }
}

// ------------------------------------------------------------------------------------------------
// planes: one and several chunks of a channel, multiples of four and not, one value

static nn_planes planes_of(int64_t images, int64_t channels, int64_t plane) {
    nn_planes n;
    n.images = images;
    n.channels = channels;
    n.plane = plane;
    return n;
}

static const nn_planes some_planes[] = {{2, 3, 30},   {1, 1, 1},  {3, 5, 32},   {2, 2, 2310},
                                        {4, 3, 1056}, {9, 41, 1}, {1, 1, 8200}, {70, 2, 9}};

enum { PLANES = sizeof some_planes / sizeof some_planes[0] };

/* Without and with beta, aligned and not, in the place of no input and of each that is allowed. */
static void check_planes(const char *name, kernel_of run, int aliases, bool adds) {
    for (int i = 0; i < PLANES; i++) {
        for (int k = 0; k < (adds ? 4 : 2) * (1 + aliases); k++) {
            setting o;
            memset(&o, 0, sizeof o);
            o.planes = some_planes[i];
            o.shift = k % 2;
            o.alias = k / 2 % (1 + aliases);
            o.beta = k / 2 / (1 + aliases) != 0 ? 1.0f : 0.0f;
            o.keeps = i % 3 != 1;
            o.has_bias = i % 3 != 2;
            check(name, run, &o);
        }
    }
}

static void elementwise_cases(void) {
    check_planes("relu", run_relu, 1, false);
    check_planes("relu backward", run_relu_backward, 2, true);
    check_planes("average", run_average, 0, false);
    check_planes("average backward", run_average_backward, 0, true);
}

static void elementwise_kernels_match_the_cpu(void **state) {
    (void)state;
    in_rounds(elementwise_cases);
}

static void norm_cases(void) {
    check_planes("batch norm", run_batch_norm, 1, false);
    check_planes("batch norm, running", run_batch_norm_running, 1, false);
    check_planes("batch norm, saved", run_batch_norm_saved, 1, false);
    check_planes("batch norm backward", run_batch_norm_backward, 2, true);
}

static void batch_norms_match_the_cpu(void **state) {
    (void)state;
    in_rounds(norm_cases);
}

/* Values far from zero: mean and variance are those of float64. The bits of a recomputation are
   those of forward. */
static void offset_cases(void) {
    setting o;
    side s;
    memset(&o, 0, sizeof o);
    o.planes = planes_of(3, 2, 3000);
    o.offset = 300.0f;
    o.keeps = true;
    start_side(&s, models[1], true);
    assert_int_equal(run_batch_norm(&s, &o), 0);
    finish_side(&s);
    for (int64_t c = 0; c < o.planes.channels; c++) {
        double mean = 0.0;
        double squares = 0.0;
        const int64_t count = o.planes.images * o.planes.plane;
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t i = 0; i < count; i++) {
                const int64_t at = (i / o.planes.plane * o.planes.channels + c) * o.planes.plane +
                                   i % o.planes.plane;
                const double x = (double)s.buffers[0].values[at];
                mean += pass == 0 ? x / (double)count : 0.0;
                squares += pass == 1 ? (x - mean) * (x - mean) / (double)count : 0.0;
            }
        }
        const double rstd = 1.0 / sqrt(squares + 1e-5);
        assert_true(fabs((double)s.buffers[5].values[c] - mean) <= 1e-7 * mean);
        assert_true(fabs((double)s.buffers[6].values[c] - rstd) <= 1e-6 * rstd);
    }
    hashes[case_count++] = hash_side(&s);
    free_side(&s);
}

static void norms_far_from_zero_match_float64(void **state) {
    (void)state;
    in_rounds(offset_cases);
}

// ------------------------------------------------------------------------------------------------
// patches

typedef struct geometry {
    int64_t images, channels, height, width, out, kernel, stride, padding;
} geometry;

static nn_window window_of(const geometry *g) {
    return nn_window_of(ms_shape4(g->images, g->channels, g->height, g->width), g->kernel,
                        g->stride, g->padding);
}

static void pool_cases(void) {
    static const geometry some[] = {
        {2, 3, 6, 4, 0, 2, 2, 0}, {2, 2, 7, 5, 0, 3, 2, 1},  {1, 2, 5, 6, 0, 3, 1, 1},
        {2, 1, 7, 7, 0, 2, 3, 0}, {1, 2, 3, 3, 0, 1, 1, 0},  {3, 5, 16, 24, 0, 2, 2, 1},
        {1, 1, 9, 1, 0, 4, 5, 2}, {1, 40, 1, 1, 0, 1, 1, 0}, {2, 3, 13, 17, 0, 5, 3, 2}};
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        for (int k = 0; k < 4; k++) {
            setting o;
            memset(&o, 0, sizeof o);
            o.window = window_of(&some[i]);
            o.shift = k % 2;
            o.keeps = k < 2;
            o.beta = k < 2 ? 0.0f : 1.0f;
            check("max pool", run_max_pool, &o);
            check("max pool backward", run_max_pool_backward, &o);
        }
    }
}

static void max_pools_match_the_cpu(void **state) {
    (void)state;
    in_rounds(pool_cases);
}

/* Overlapping and apart, padding wider than the image, strips; images as they stand, and copied
   side by side. */
static const geometry some_convolutions[] = {
    {2, 3, 6, 5, 4, 3, 1, 1},   {2, 2, 7, 6, 3, 3, 2, 0},   {3, 2, 4, 5, 2, 2, 3, 1},
    {1, 1, 2, 1, 2, 5, 1, 4},   {2, 3, 4, 5, 6, 1, 1, 0},   {3, 20, 2, 3, 30, 1, 1, 0},
    {2, 3, 4, 5, 2, 1, 2, 0},   {5, 2, 9, 16, 3, 3, 1, 1},  {2, 1, 40, 33, 2, 3, 2, 1},
    {3, 2, 20, 30, 3, 3, 1, 1}, {2, 1, 17, 11, 2, 2, 5, 0}, {1, 2, 12, 9, 3, 4, 3, 2},
    {2, 2, 8, 6, 3, 3, 2, 0},   {12, 1, 5, 7, 8, 3, 1, 1}};

enum { CONVOLUTIONS = sizeof some_convolutions / sizeof some_convolutions[0] };

static void convolution_cases(void) {
    const int64_t floats[] = {all_floats, 3000, 1};
    for (int i = 0; i < 3 * CONVOLUTIONS; i++) {
        setting o;
        memset(&o, 0, sizeof o);
        group_floats = floats[i / CONVOLUTIONS];
        o.window = window_of(&some_convolutions[i % CONVOLUTIONS]);
        o.out = some_convolutions[i % CONVOLUTIONS].out;
        for (int k = 0; k < 4; k++) {
            o.shift = k % 2;
            o.beta = k < 2 ? 0.0f : 1.0f;
            o.has_bias = k != 1;
            o.keeps = k != 2;
            o.alias = k == 3 || k == 0;
            check("convolution backward", run_conv2d_backward, &o);
            if (k < 2) {
                check("convolution", run_conv2d, &o);
            }
        }
    }
}

static void convolutions_match_the_cpu_in_any_workspace(void **state) {
    (void)state;
    in_rounds(convolution_cases);
}

/* The least workspace leaves one row of patches at a time; of all there may be, several images and
   several segments are taken at once. And what is asked for never shrinks as the batch grows. */
static void workspace_never_shrinks_as_images_grow(void **state) {
    (void)state;
    const nn_window large = window_of(&some_convolutions[9]);
    const nn_window many = window_of(&some_convolutions[CONVOLUTIONS - 1]);
    group_floats = 1;
    assert_int_equal(nn_cuda_column_parts(&large, 3).count, 3 * 20);
    assert_int_equal(nn_cuda_segment_parts(&large, 3).count, 3 * 20);
    group_floats = all_floats;
    assert_int_equal(nn_cuda_column_parts(&large, 3).bands, 2);
    assert_int_equal(nn_cuda_column_parts(&many, 8).images, 12);
    assert_int_equal(nn_cuda_segment_parts(&many, 8).images, 3);
    assert_true(nn_segments_of(1800, 3, 18).count > 1);
    t_rng rng = t_seed(3);
    for (int i = 0; i < 2000; i++) {
        geometry g;
        g.channels = 1 + t_below(&rng, 40);
        g.height = 1 + t_below(&rng, 30);
        g.width = 1 + t_below(&rng, 30);
        g.out = 1 + t_below(&rng, 200);
        g.kernel = 1 + t_below(&rng, 4);
        g.stride = 1 + t_below(&rng, 3);
        g.padding = t_below(&rng, 4);
        group_floats = 1 + t_below(&rng, 1 << (1 + t_below(&rng, 22)));
        int64_t before[3] = {0, 0, 0};
        for (g.images = 1; g.images < 9; g.images++) {
            const nn_window v = window_of(&g);
            if (v.out_height < 1 || v.out_width < 1) {
                break;
            }
            const int64_t now[3] = {nn_cuda_conv2d_floats(&v, g.out, false),
                                    nn_cuda_conv2d_floats(&v, g.out, true),
                                    nn_cuda_batch_norm_floats(planes_of(g.images, g.out, 77))};
            for (int k = 0; k < 3; k++) {
                assert_true(now[k] >= before[k]);
                before[k] = now[k];
            }
        }
    }
}

/* What is asked for is enough for each part. */
static void the_workspace_asked_for_is_enough(void **state) {
    (void)state;
    t_rng rng = t_seed(4);
    for (int i = 0; i < 4000; i++) {
        const geometry g = {1 + t_below(&rng, 20), 1 + t_below(&rng, 40),  1 + t_below(&rng, 30),
                            1 + t_below(&rng, 30), 1 + t_below(&rng, 200), 1 + t_below(&rng, 4),
                            1 + t_below(&rng, 3),  t_below(&rng, 4)};
        const nn_window w = window_of(&g);
        group_floats = 1 + t_below(&rng, 1 << (1 + t_below(&rng, 22)));
        if (w.out_height < 1 || w.out_width < 1 || nn_is_pointwise(&w)) {
            continue;
        }
        const int64_t depth = nn_window_depth(&w);
        const nn_parts columns = nn_cuda_column_parts(&w, g.out);
        const nn_parts parts = nn_cuda_segment_parts(&w, g.out);
        assert_true(columns.images * columns.rows * w.out_width * depth <=
                    nn_cuda_conv2d_floats(&w, g.out, false));
        for (int64_t k = 0; k < parts.count; k++) {
            const nn_part part = nn_part_at(&parts, k, &w);
            const nn_segments s =
                nn_segments_of(part.images * nn_part_patches(&part, &w), g.out, depth);
            const int64_t products = s.count > 1 ? s.count * g.out * depth : 0;
            assert_true(s.patches >= part.images * nn_part_patches(&part, &w));
            assert_true((depth + g.out) * s.patches + products <=
                        nn_cuda_conv2d_floats(&w, g.out, true));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(elementwise_kernels_match_the_cpu),
        cmocka_unit_test(batch_norms_match_the_cpu),
        cmocka_unit_test(norms_far_from_zero_match_float64),
        cmocka_unit_test(max_pools_match_the_cpu),
        cmocka_unit_test(convolutions_match_the_cpu_in_any_workspace),
        cmocka_unit_test(workspace_never_shrinks_as_images_grow),
        cmocka_unit_test(the_workspace_asked_for_is_enough),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
