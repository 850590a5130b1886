/*  gpu_device.h - of bench/gpu: what the device and the CUDA backend do without a model:
    copies, kernels, matrix products, the executor. Include bench.h, memscale.h, nn.h, models.h and
    cuda_runtime.h first. */
#ifndef MEMSCALE_BENCH_GPU_DEVICE_H
#define MEMSCALE_BENCH_GPU_DEVICE_H

enum { KERNEL_RUNS = 21, COPY_RUNS = 7, PRODUCT_RUNS = 7 };

static void check_cuda(cudaError_t error) {
    if (error != cudaSuccess) {
        bench_stop(cudaGetErrorString(error));
    }
}

/* The 16 bits that the device computes in: BF16 from compute capability 8.0 on, otherwise F16. */
static ms_dtype half_dtype(void) {
    struct cudaDeviceProp gpu;
    check_cuda(cudaGetDeviceProperties(&gpu, 0));
    return gpu.major >= 8 ? MS_DTYPE_BF16 : MS_DTYPE_F16;
}

/* "bf16" or "f16"; "tf32", which older devices do not have and compute in F32. */
static const char *arithmetic_name(bool half) {
    return half ? ms_dtype_name(half_dtype()) : "tf32";
}

static uint64_t device_free_bytes(void) {
    size_t free_bytes = 0, total_bytes = 0;
    check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

static uint64_t taken_since(uint64_t before) {
    const uint64_t now = device_free_bytes();
    return now < before ? before - now : 0;
}

static double elapsed_ms(cudaEvent_t from, cudaEvent_t to) {
    float ms = 0.0f;
    check_cuda(cudaEventElapsedTime(&ms, from, to));
    return (double)ms;
}

static bench_table begin_table(const settings *s, const char *names) {
    return s->markdown ? bench_markdown_begin(names) : bench_table_begin(s->tsv, names);
}

static void note(settings *s, const char *row, const char *text) {
    const size_t length = strlen(s->notes);
    snprintf(s->notes + length, sizeof s->notes - length, "%s%s: %s\n",
             s->markdown ? "- "
             : s->tsv    ? "# "
                         : "",
             row, text);
}

static void print_notes(settings *s) {
    if (s->notes[0]) {
        printf("%s%s", s->tsv ? "" : "\n", s->notes);
    }
    s->notes[0] = 0;
}

/* Whether a row may still begin. If not, a note says so. */
static bool has_time(settings *s, const char *row) {
    const bool has = s->seconds == 0 || bench_seconds() - s->started < (double)s->seconds;
    if (!has) {
        note(s, row, "left out for want of time");
    }
    return has;
}

static void optional_value(bench_table *table, bool known, double value, int digits) {
    if (known) {
        bench_value(table, value, digits);
    } else {
        bench_cell(table, "-");
    }
}

static void optional_bytes(bench_table *table, bool known, uint64_t bytes) {
    if (known) {
        bench_bytes(table, bytes);
    } else {
        bench_cell(table, "-");
    }
}

/* Steps of two tiny models: the driver loads kernels when they are first used, and that memory
   must not count for the models which follow. */
static void load_kernels(void) {
    static const char *const presets[] = {"gpt2-tiny", "bert-tiny"};
    for (int i = 0; i < 6; i++) { // in F32, with TF32, and in 16 bits
        nn_transformer_config shape;
        ms_config config;
        memset(&config, 0, sizeof config);
        config.backend = ms_backend_cuda(0);
        config.tf32 = i >= 2;
        if (!bench_shape(presets[i % 2], &shape)) {
            bench_stop("no tiny preset");
        }
        shape.batch = 2;
        shape.sequence = 16;
        config.mixed_dtype = half_dtype();
        bench_model m;
        bench_model_begin(&m, &config, nn_cuda());
        nn_force_half(m.net, i >= 4);
        bench_model_build(&m, presets[i % 2], &shape);
        bench_check(m.model, ms_wrap(m.model));
        bench_check(m.model, nn_init(m.net, 1));
        bench_write_batch(&m);
        bench_check(m.model, ms_step(m.model, NULL));
        bench_check(m.model, ms_synchronize(m.model));
        bench_model_destroy(&m);
    }
}

// ---- copies -------------------------------------------------------------------------------------

enum { TO_DEVICE = 1, TO_HOST = 2, WITHIN_DEVICE = 4 };

typedef struct copier {
    void *device[2], *host[2]; // host: pinned
    cudaStream_t stream[2];
    cudaEvent_t begin, other, end;
    size_t bytes;
} copier;

static void open_copier(copier *c, size_t bytes) {
    c->bytes = bytes;
    for (int i = 0; i < 2; i++) {
        check_cuda(cudaMalloc(&c->device[i], bytes));
        check_cuda(cudaHostAlloc(&c->host[i], bytes, cudaHostAllocPortable));
        check_cuda(cudaStreamCreateWithFlags(&c->stream[i], cudaStreamNonBlocking));
        memset(c->host[i], 1, bytes);
        check_cuda(cudaMemset(c->device[i], 1, bytes));
    }
    check_cuda(cudaEventCreate(&c->begin));
    check_cuda(cudaEventCreate(&c->other));
    check_cuda(cudaEventCreate(&c->end));
}

static void close_copier(copier *c) {
    for (int i = 0; i < 2; i++) {
        check_cuda(cudaFree(c->device[i]));
        check_cuda(cudaFreeHost(c->host[i]));
        check_cuda(cudaStreamDestroy(c->stream[i]));
    }
    check_cuda(cudaEventDestroy(c->begin));
    check_cuda(cudaEventDestroy(c->other));
    check_cuda(cudaEventDestroy(c->end));
}

/* Milliseconds from the begin of the first copy to the end of the last. Both streams begin after one
   event, and the end waits for both. */
static double copy_ms(const copier *c, int what) {
    check_cuda(cudaEventRecord(c->begin, c->stream[0]));
    check_cuda(cudaStreamWaitEvent(c->stream[1], c->begin, 0));
    if (what & TO_DEVICE) {
        check_cuda(cudaMemcpyAsync(c->device[0], c->host[0], c->bytes, cudaMemcpyHostToDevice,
                                   c->stream[0]));
    }
    if (what & TO_HOST) {
        check_cuda(cudaMemcpyAsync(c->host[1], c->device[1], c->bytes, cudaMemcpyDeviceToHost,
                                   c->stream[1]));
    }
    if (what & WITHIN_DEVICE) {
        check_cuda(cudaMemcpyAsync(c->device[1], c->device[0], c->bytes, cudaMemcpyDeviceToDevice,
                                   c->stream[0]));
    }
    check_cuda(cudaEventRecord(c->other, c->stream[1]));
    check_cuda(cudaStreamWaitEvent(c->stream[0], c->other, 0));
    check_cuda(cudaEventRecord(c->end, c->stream[0]));
    check_cuda(cudaStreamSynchronize(c->stream[0]));
    return elapsed_ms(c->begin, c->end);
}

static void run_copies(settings *s) {
    static const struct {
        const char *name;
        int what;
        double moved; // bytes read or written on the slower side, per byte of a buffer
    } rows[] = {{"to the device", TO_DEVICE, 1.0},
                {"to the host", TO_HOST, 1.0},
                {"both at once", TO_DEVICE | TO_HOST, 2.0},
                {"within the device, read and written", WITHIN_DEVICE, 2.0}};
    copier c;
    memset(&c, 0, sizeof c);
    open_copier(&c, s->tiny ? (size_t)1 << 16 : (size_t)1 << 28);
    bench_table table = begin_table(s, "copy bytes ms GB/s");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double ms[COPY_RUNS];
        (void)copy_ms(&c, rows[i].what);
        for (int k = 0; k < COPY_RUNS; k++) {
            ms[k] = copy_ms(&c, rows[i].what);
        }
        const double median = bench_median(ms, COPY_RUNS);
        bench_cell(&table, rows[i].name);
        bench_bytes(&table, c.bytes);
        optional_value(&table, median > 0.0, median, 3);
        optional_value(&table, median > 0.0,
                       1e-6 * rows[i].moved * (double)c.bytes / (median > 0.0 ? median : 1.0), 1);
    }
    close_copier(&c);
}

// ---- the executor -------------------------------------------------------------------------------

static int zero_loss(const ms_call *call) {
    return (int)cudaMemsetAsync(call->out[0].data, 0, sizeof(float), (cudaStream_t)call->stream);
}

static void run_executor(settings *s) {
    bench_table table = begin_table(s, "what layers value unit");
    const int64_t longest = s->tiny ? 100 : 1000, forwards = s->tiny ? 1000 : 200000;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.backend = ms_backend_cuda(0);
    for (int64_t layers = longest / 10; layers <= longest; layers *= 10) {
        double values[5];
        for (int k = 0; k < 5; k++) {
            values[k] = bench_instruction(&config, layers, forwards, zero_loss);
        }
        s->instruction_us = bench_median(values, 5);
        bench_cell(&table, "instruction");
        bench_count(&table, (uint64_t)layers);
        bench_value(&table, s->instruction_us, 3);
        bench_cell(&table, "us");
    }
}

// ---- kernels ------------------------------------------------------------------------------------

/* The backend by itself, and memory for its kernels: `pool` has 8 * count floats. */
typedef struct kernels {
    ms_backend backend;
    void *state, *workspace;
    cudaStream_t stream;
    float *pool;
    uint64_t count;
    struct {
        ms_step_state step;
        ms_update_factors factors;
        double sum;
        uint32_t nonfinite;
    } * device; // in device memory
} kernels;

static int run_update(const kernels *k, ms_optimizer_kind kind, ms_state_format format,
                      bool master) {
    ms_update_args args;
    memset(&args, 0, sizeof args);
    args.kind = kind;
    args.count = k->count;
    args.value = k->pool;
    args.gradient = k->pool + k->count;
    args.state[0] = k->pool + 2 * k->count;
    args.state[1] = k->pool + 3 * k->count;
    args.state_format[0] = args.state_format[1] = format;
    args.master = master ? k->pool + 4 * k->count : NULL;
    args.value_dtype = args.gradient_dtype = master ? MS_DTYPE_BF16 : MS_DTYPE_F32;
    args.stream = k->stream;
    args.factors = &k->device->factors;
    args.state_of_step = &k->device->step;
    return k->backend.update(k->state, &args);
}

static int run_adamw(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return run_update(k, MS_OPTIMIZER_ADAMW, MS_STATE_FORMAT_F32, false);
}

/* Values and gradients in BF16, their masters and the state in F32. */
static int run_adamw_master(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return run_update(k, MS_OPTIMIZER_ADAMW, MS_STATE_FORMAT_F32, true);
}

static int run_lion(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return run_update(k, MS_OPTIMIZER_LION, MS_STATE_FORMAT_F32, false);
}

static int run_adamw_bf16(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return run_update(k, MS_OPTIMIZER_ADAMW, MS_STATE_FORMAT_BF16, false);
}

static int run_adamw_8bit(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return run_update(k, MS_OPTIMIZER_ADAMW, MS_STATE_FORMAT_8BIT, false);
}

static int run_fill(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return k->backend.fill_f32(k->state, k->pool, 0.01f, k->count);
}

static int run_add(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return k->backend.add(k->state, k->pool, MS_DTYPE_F32, k->pool + k->count, MS_DTYPE_F32,
                          k->count);
}

static int run_cast(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return k->backend.cast(k->state, k->pool + k->count, MS_DTYPE_BF16, k->pool, MS_DTYPE_F32,
                           k->count);
}

static int run_cast_back(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return k->backend.cast(k->state, k->pool + k->count, MS_DTYPE_F32, k->pool, MS_DTYPE_BF16,
                           k->count);
}

static int run_add_bf16(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return k->backend.add(k->state, k->pool, MS_DTYPE_BF16, k->pool + k->count, MS_DTYPE_BF16,
                          k->count);
}

static int run_squares(const kernels *k, uint64_t bytes) {
    (void)bytes;
    return k->backend.add_squares(k->state, k->pool, MS_DTYPE_F32, k->count, &k->device->sum, 1,
                                  &k->device->nonfinite);
}

/* Reads half of the bytes, writes the other half. */
static int run_copy(const kernels *k, uint64_t bytes) {
    return (int)cudaMemcpyAsync((uint8_t *)k->pool + bytes / 2, k->pool, (size_t)(bytes / 2),
                                cudaMemcpyDeviceToDevice, k->stream);
}

/* GB/s, the median of several launches; bytes are those read and written by one. */
static double bandwidth(const kernels *k, int (*run)(const kernels *, uint64_t), uint64_t bytes) {
    cudaEvent_t events[KERNEL_RUNS + 1];
    double ms[KERNEL_RUNS];
    for (int i = 0; i <= KERNEL_RUNS; i++) {
        check_cuda(cudaEventCreate(&events[i]));
    }
    check_cuda((cudaError_t)run(k, bytes));
    check_cuda(cudaEventRecord(events[0], k->stream));
    for (int i = 0; i < KERNEL_RUNS; i++) {
        check_cuda((cudaError_t)run(k, bytes));
        check_cuda(cudaEventRecord(events[i + 1], k->stream));
    }
    check_cuda(cudaStreamSynchronize(k->stream));
    for (int i = 0; i < KERNEL_RUNS; i++) {
        float time = 0.0f;
        check_cuda(cudaEventElapsedTime(&time, events[i], events[i + 1]));
        ms[i] = (double)time;
    }
    for (int i = 0; i <= KERNEL_RUNS; i++) {
        check_cuda(cudaEventDestroy(events[i]));
    }
    const double median = bench_median(ms, KERNEL_RUNS);
    return median > 0.0 ? 1e-6 * (double)bytes / median : 0.0;
}

static void open_kernels(kernels *k, uint64_t count) {
    static const ms_allocator host = {NULL, NULL, NULL, NULL};
    const ms_update_factors factors = {-1e-3f, 0.9999f, 0.9f,  0.999f, 0.1f,
                                       1e-3f,  1.0f,    1e-8f, 0.0f,   0};
    ms_open_args args;
    ms_prepare_args prepare;
    memset(&args, 0, sizeof args);
    memset(&prepare, 0, sizeof prepare);
    args.host = &host;
    k->backend = ms_backend_cuda(0);
    k->count = count;
    check_cuda((cudaError_t)k->backend.open(k->backend.user, &args, &k->state));
    check_cuda(cudaMalloc(&k->workspace, (size_t)k->backend.workspace_bytes));
    check_cuda(cudaMalloc((void **)&k->pool, (size_t)(8 * count) * sizeof *k->pool));
    check_cuda(cudaMalloc((void **)&k->device, sizeof *k->device));
    prepare.workspace = k->workspace;
    prepare.workspace_bytes = k->backend.workspace_bytes;
    check_cuda((cudaError_t)k->backend.prepare(k->state, &prepare));
    k->stream = (cudaStream_t)k->backend.stream(k->state);
    check_cuda(cudaMemset(k->device, 0, sizeof *k->device));
    check_cuda(cudaMemcpy(&k->device->factors, &factors, sizeof factors, cudaMemcpyHostToDevice));
    check_cuda((cudaError_t)k->backend.fill_f32(k->state, k->pool, 0.01f, 8 * count));
}

static void close_kernels(kernels *k) {
    check_cuda((cudaError_t)k->backend.synchronize(k->state));
    k->backend.close(k->state);
    check_cuda(cudaFree(k->device));
    check_cuda(cudaFree(k->pool));
    check_cuda(cudaFree(k->workspace));
}

static void run_kernels(settings *s) {
    static const struct {
        const char *name;
        int (*run)(const kernels *, uint64_t);
        uint64_t bytes; // per element, read and written
    } rows[] = {{"adamw", run_adamw, 28},
                {"adamw_bf16", run_adamw_bf16, 20},
                {"adamw_8bit", run_adamw_8bit, 16},
                {"adamw_master", run_adamw_master, 30},
                {"lion", run_lion, 20},
                {"fill_f32", run_fill, 4},
                {"add_f32", run_add, 12},
                {"add_bf16", run_add_bf16, 6},
                {"cast_f32_bf16", run_cast, 6},
                {"cast_bf16_f32", run_cast_back, 6},
                {"sum_of_squares", run_squares, 4}};
    kernels k;
    memset(&k, 0, sizeof k);
    open_kernels(&k, (uint64_t)(s->tiny ? 4096 : s->elements));
    bench_table table = begin_table(s, "kernel elements bytes GB_per_s copy_GB_per_s ratio");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const uint64_t bytes = rows[i].bytes * k.count;
        if (!has_time(s, rows[i].name)) {
            continue;
        }
        const double kernel = bandwidth(&k, rows[i].run, bytes);
        const double copy = bandwidth(&k, run_copy, bytes);
        bench_cell(&table, rows[i].name);
        bench_count(&table, k.count);
        bench_bytes(&table, bytes);
        optional_value(&table, kernel > 0.0, kernel, 1);
        optional_value(&table, copy > 0.0, copy, 1);
        optional_value(&table, kernel > 0.0 && copy > 0.0, kernel / (copy > 0.0 ? copy : 1.0), 3);
    }
    close_kernels(&k);
}

// ---- matrix products ----------------------------------------------------------------------------

/* y (m, n) = x (m, k) w (n, k)^T, so many of them; and its gradients dx = dy w, dw += dy^T x. */
typedef struct product_shape {
    const char *name;
    int64_t rows, inner, cols, count;
} product_shape;

static const product_shape product_shapes[] = {
    {"square", 8192, 8192, 8192, 1},
    {"124M queries, keys, values", 16384, 768, 2304, 1},
    {"124M attention, scores", 1024, 64, 1024, 192},
    {"124M attention, values", 1024, 1024, 64, 192},
    {"124M projection", 16384, 768, 768, 1},
    {"124M feed-forward, up", 16384, 768, 3072, 1},
    {"124M feed-forward, down", 16384, 3072, 768, 1},
    {"124M logits of 50,257", 16384, 768, 50257, 1},
    {"124M logits of 50,304", 16384, 768, 50304, 1},
    {"774M queries, keys, values", 8192, 1280, 3840, 1},
    {"774M attention, scores", 1024, 64, 1024, 160},
    {"774M projection", 8192, 1280, 1280, 1},
    {"774M feed-forward, up", 8192, 1280, 5120, 1},
    {"774M feed-forward, down", 8192, 5120, 1280, 1},
    {"774M logits of 50,257", 8192, 1280, 50257, 1},
};
enum {
    PRODUCT_SHAPES = sizeof product_shapes / sizeof product_shapes[0],
    PRODUCT_FORMS = 3,
    TINY_DIVISOR = 512
};

typedef struct products {
    ms_backend backend;
    void *state, *workspace;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    void *x, *w, *y, *result; // of the largest shape, in F32; only result is written
    int64_t divisor;          // of sizes: tiny runs and small devices
} products;

static int64_t divided(int64_t size, int64_t divisor) {
    return size > divisor ? size / divisor : 1;
}

static product_shape product_at(const products *p, int index) {
    product_shape shape = product_shapes[index];
    shape.rows = divided(shape.rows, p->divisor);
    if (p->divisor == TINY_DIVISOR) {
        shape.inner = divided(shape.inner, 16);
        shape.cols = divided(shape.cols, p->divisor);
        shape.count = divided(shape.count, 64);
    }
    return shape;
}

/* Numbers of about +-1 in F32 and in each half of it in BF16: how fast a device computes depends on
   the power that it takes, and that on the numbers. */
static void fill_randomly(void *device, size_t bytes) {
    static uint32_t block[1 << 18];
    uint32_t random = 1;
    for (size_t i = 0; i < sizeof block / sizeof block[0]; i++) {
        random = random * 1664525u + 1013904223u; // as in models.h
        block[i] = ((random ^ random >> 16) & 0x80ff80ffu) | 0x3f003f00u;
    }
    for (size_t at = 0; at < bytes; at += sizeof block) {
        const size_t rest = bytes - at;
        check_cuda(cudaMemcpy((uint8_t *)device + at, block,
                              rest < sizeof block ? rest : sizeof block, cudaMemcpyHostToDevice));
    }
}

/* Bytes of x, w, y and result that are enough for every shape. */
static uint64_t product_bytes(const products *p, size_t bytes[4]) {
    memset(bytes, 0, 4 * sizeof *bytes);
    for (int i = 0; i < PRODUCT_SHAPES; i++) {
        const product_shape s = product_at(p, i);
        const int64_t counts[] = {s.rows * s.inner, s.cols * s.inner, s.rows * s.cols};
        for (int k = 0; k < 3; k++) {
            const size_t needed = (size_t)(s.count * counts[k]) * sizeof(float);
            bytes[k] = needed > bytes[k] ? needed : bytes[k];
            bytes[3] = needed > bytes[3] ? needed : bytes[3];
        }
    }
    return bytes[0] + bytes[1] + bytes[2] + bytes[3];
}

static void open_products(products *p, bool tiny) {
    static const ms_allocator host = {NULL, NULL, NULL, NULL};
    size_t bytes[4];
    ms_open_args args;
    ms_prepare_args prepare;
    memset(&args, 0, sizeof args);
    memset(&prepare, 0, sizeof prepare);
    args.host = &host;
    args.tf32 = true;
    p->divisor = tiny ? TINY_DIVISOR : 1;
    while (product_bytes(p, bytes) > device_free_bytes() / 2 && p->divisor < TINY_DIVISOR) {
        p->divisor *= 2;
    }
    void **const buffers[] = {&p->x, &p->w, &p->y, &p->result};
    for (int k = 0; k < 4; k++) {
        check_cuda(cudaMalloc(buffers[k], bytes[k]));
        fill_randomly(*buffers[k], bytes[k]);
    }
    p->backend = ms_backend_cuda(0);
    check_cuda((cudaError_t)p->backend.open(p->backend.user, &args, &p->state));
    check_cuda(cudaMalloc(&p->workspace, (size_t)p->backend.workspace_bytes));
    prepare.workspace = p->workspace;
    prepare.workspace_bytes = p->backend.workspace_bytes;
    check_cuda((cudaError_t)p->backend.prepare(p->state, &prepare));
    p->stream = (cudaStream_t)p->backend.stream(p->state);
    check_cuda(cudaEventCreate(&p->begin));
    check_cuda(cudaEventCreate(&p->end));
}

static void close_products(products *p) {
    check_cuda((cudaError_t)p->backend.synchronize(p->state));
    p->backend.close(p->state);
    check_cuda(cudaEventDestroy(p->begin));
    check_cuda(cudaEventDestroy(p->end));
    check_cuda(cudaFree(p->workspace));
    check_cuda(cudaFree(p->x));
    check_cuda(cudaFree(p->w));
    check_cuda(cudaFree(p->y));
    check_cuda(cudaFree(p->result));
}

static ms_matrix whole_matrix(void *data, ms_dtype dtype, int64_t rows, int64_t cols, int64_t count,
                              bool transposed) {
    ms_matrix m;
    memset(&m, 0, sizeof m);
    m.data = data;
    m.dtype = dtype;
    m.rows = rows;
    m.cols = m.stride = cols;
    m.batch_count = count;
    m.batch_stride = rows * cols;
    m.transposed = transposed;
    return m;
}

/* The first form is y, the next dx, the last dw, which is added up in F32. */
static int run_product(const products *p, const product_shape *s, ms_dtype dtype, int form) {
    const int64_t m = s->rows, k = s->inner, n = s->cols;
    const ms_matrix x = whole_matrix(p->x, dtype, m, k, s->count, false);
    const ms_matrix w = whole_matrix(p->w, dtype, n, k, s->count, form == 0);
    const ms_matrix dy = whole_matrix(p->y, dtype, m, n, s->count, form == 2);
    const ms_matrix y = whole_matrix(p->result, dtype, m, n, s->count, false);
    const ms_matrix dx = whole_matrix(p->result, dtype, m, k, s->count, false);
    const ms_matrix dw = whole_matrix(p->result, MS_DTYPE_F32, n, k, s->count, false);
    return form == 0   ? p->backend.gemm(p->state, 1.0f, &x, &w, 0.0f, &y)
           : form == 1 ? p->backend.gemm(p->state, 1.0f, &dy, &w, 0.0f, &dx)
                       : p->backend.gemm(p->state, 1.0f, &dy, &x, 1.0f, &dw);
}

static double product_ms(const products *p, const product_shape *s, ms_dtype dtype, int form) {
    double ms[PRODUCT_RUNS];
    check_cuda((cudaError_t)run_product(p, s, dtype, form)); // cuBLAS chooses and loads a kernel
    for (int i = 0; i < PRODUCT_RUNS; i++) {
        check_cuda(cudaEventRecord(p->begin, p->stream));
        check_cuda((cudaError_t)run_product(p, s, dtype, form));
        check_cuda(cudaEventRecord(p->end, p->stream));
        check_cuda(cudaStreamSynchronize(p->stream));
        ms[i] = elapsed_ms(p->begin, p->end);
    }
    return bench_median(ms, PRODUCT_RUNS);
}

static void run_products(settings *s) {
    products p;
    memset(&p, 0, sizeof p);
    open_products(&p, s->tiny);
    bench_table table = begin_table(s, "product arithmetic rows inner cols count ms_of_three "
                                       "y_TFLOP/s dx_TFLOP/s dw_TFLOP/s");
    for (int i = 0; i < 2 * PRODUCT_SHAPES; i++) {
        const product_shape shape = product_at(&p, i % PRODUCT_SHAPES);
        const bool half = i < PRODUCT_SHAPES;
        if (!has_time(s, shape.name)) {
            continue;
        }
        const double flops = 2.0 * (double)shape.rows * (double)shape.inner * (double)shape.cols *
                             (double)shape.count;
        double ms[PRODUCT_FORMS], sum = 0.0;
        for (int form = 0; form < PRODUCT_FORMS; form++) {
            ms[form] = product_ms(&p, &shape, half ? half_dtype() : MS_DTYPE_F32, form);
            sum += ms[form];
        }
        bench_cell(&table, shape.name);
        bench_cell(&table, arithmetic_name(half));
        bench_count(&table, (uint64_t)shape.rows);
        bench_count(&table, (uint64_t)shape.inner);
        bench_count(&table, (uint64_t)shape.cols);
        bench_count(&table, (uint64_t)shape.count);
        optional_value(&table, sum > 0.0, sum, 3);
        for (int form = 0; form < PRODUCT_FORMS; form++) {
            optional_value(&table, ms[form] > 0.0, 1e-9 * flops / (ms[form] > 0.0 ? ms[form] : 1.0),
                           1);
        }
    }
    close_products(&p);
}

#endif // MEMSCALE_BENCH_GPU_DEVICE_H
