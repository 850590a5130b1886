/*  test_cuda_kernels.c - each function of the CUDA backend's table against the CPU's and against
    float64 loops: all small counts, large ones, addresses that are no multiple of 16, and nothing
    beyond the end; products and casts; what the hardware report says. */
#include "testing_cuda.h"
#include "testing_formats.h"

#include <cublas_v2.h>

// ------------------------------------------------------------------------------------------------
// a state of the backend, and arrays on both sides

enum { WORKSPACE_BYTES = 16384, EVENTS = 4 };

typedef struct bench {
    ms_backend cuda, cpu;
    ms_allocator host;
    void *state, *workspace;
} bench;

static void bench_open(bench *b, uint64_t seed) {
    ms_open_args open_args;
    ms_prepare_args prepare_args;
    cn_reset(seed);
    memset(b, 0, sizeof *b);
    memset(&open_args, 0, sizeof open_args);
    memset(&prepare_args, 0, sizeof prepare_args);
    b->cuda = ms_backend_cuda(0);
    b->cpu = ms_backend_cpu();
    open_args.host = &b->host;
    assert_int_equal(b->cuda.open(b->cuda.user, &open_args, &b->state), 0);
    assert_int_equal(b->cuda.memory_alloc(b->cuda.user, &b->host, WORKSPACE_BYTES, &b->workspace),
                     0);
    prepare_args.event_count = EVENTS;
    prepare_args.workspace = b->workspace;
    prepare_args.workspace_bytes = WORKSPACE_BYTES;
    assert_int_equal(b->cuda.prepare(b->state, &prepare_args), 0);
}

static void bench_wait(bench *b) {
    assert_int_equal(b->cuda.synchronize(b->state), 0);
}

static void bench_close(bench *b) {
    bench_wait(b);
    b->cuda.close(b->state);
    b->cuda.memory_release(b->cuda.user, &b->host, b->workspace, WORKSPACE_BYTES);
    cn_clean();
}

/* The copy is complete before a stream of any kind can touch it. */
static void *device_put(const void *host, size_t bytes) {
    void *device = NULL;
    assert_int_equal(cudaMalloc(&device, bytes), cudaSuccess);
    assert_int_equal(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    return device;
}

static void device_get(void *host, const void *device, size_t bytes) {
    assert_int_equal(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
}

static void device_release(void *device) {
    assert_int_equal(cudaFree(device), cudaSuccess);
}

/* The same bytes on the host and on the device, with some before and after them. */
enum { MARGIN = 64 };

typedef struct pair {
    uint8_t *host, *found;
    uint8_t *device;
    size_t bytes, offset; // of what is worked on
} pair;

static void *on_host(const pair *p) {
    return p->host + MARGIN + p->offset;
}

static void *on_device(const pair *p) {
    return p->device + MARGIN + p->offset;
}

static size_t pair_all(const pair *p) {
    return p->bytes + p->offset + 2 * MARGIN;
}

/* Floats of about `scale`, also in the margins; bytes is a multiple of 2. */
static void pair_make(pair *p, size_t bytes, size_t offset, t_rng *rng, float scale) {
    p->bytes = bytes;
    p->offset = offset;
    p->host = (uint8_t *)malloc(pair_all(p));
    p->found = (uint8_t *)malloc(pair_all(p));
    assert_true(p->host && p->found);
    for (size_t i = 0; i < pair_all(p); i++) {
        p->host[i] = (uint8_t)t_next(rng);
    }
    for (size_t i = 0; i + sizeof(float) <= bytes; i += sizeof(float)) {
        const float x = scale * (float)(2.0 * t_unit(rng) - 1.0);
        memcpy((uint8_t *)on_host(p) + i, &x, sizeof x);
    }
    p->device = (uint8_t *)device_put(p->host, pair_all(p));
}

static bool pair_same(pair *p) {
    device_get(p->found, p->device, pair_all(p));
    return memcmp(p->found, p->host, pair_all(p)) == 0;
}

static void pair_free(pair *p) {
    device_release(p->device);
    free(p->host);
    free(p->found);
}

/* Counts: all small ones, some around blocks and groups, large ones. */
static uint64_t next_count(uint64_t count) {
    static const uint64_t more[] = {127, 255, 256, 257, 1023, 1024, 1027, 4096, 10007, 66000};
    if (count < 70) {
        return count + 1;
    }
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++) {
        if (more[i] > count) {
            return more[i];
        }
    }
    return 0;
}

#define EACH_COUNT(count) for (uint64_t count = 1; (count) != 0; (count) = next_count(count))

// ------------------------------------------------------------------------------------------------
// fills, copies, sums

static void fills_write_all_and_nothing_beside_it(void **state) {
    (void)state;
    bench b;
    t_rng rng = t_seed(1);
    bench_open(&b, 1);
    EACH_COUNT(count) {
        for (size_t offset = 0; offset<16; offset += count> 70 ? 5 : 1) {
            pair p;
            const uint8_t value = (uint8_t)t_next(&rng);
            pair_make(&p, count, offset, &rng, 1.0f);
            assert_int_equal(b.cuda.fill_bytes(b.state, on_device(&p), value, count), 0);
            assert_int_equal(b.cpu.fill_bytes(b.cpu.user, on_host(&p), value, count), 0);
            bench_wait(&b);
            assert_true(pair_same(&p));
            pair_free(&p);
        }
        for (size_t offset = 0; offset < 16; offset += sizeof(float)) {
            pair p;
            const float value = (float)t_unit(&rng);
            pair_make(&p, count * sizeof(float), offset, &rng, 1.0f);
            assert_int_equal(b.cuda.fill_f32(b.state, on_device(&p), value, count), 0);
            assert_int_equal(b.cpu.fill_f32(b.cpu.user, on_host(&p), value, count), 0);
            bench_wait(&b);
            assert_true(pair_same(&p));
            pair_free(&p);
        }
    }
    bench_close(&b);
}

/* Numbers of a dtype in both copies of an array. */
static void put_numbers(pair *p, ms_dtype dtype, uint64_t count, t_rng *rng) {
    for (uint64_t i = 0; i < count; i++) {
        msi_store_as(on_host(p), dtype, i, 4.0f * (float)t_unit(rng));
    }
    device_release(p->device);
    p->device = (uint8_t *)device_put(p->host, pair_all(p));
}

static void sums_match_the_cpu(void **state) {
    (void)state;
    bench b;
    t_rng rng = t_seed(2);
    bench_open(&b, 2);
    EACH_COUNT(count) {
        for (size_t k = 0; k<16; k += count> 70 ? 3 : 1) { // offsets of both
            pair x, y;
            pair_make(&x, count * sizeof(float), k % 4 * sizeof(float), &rng, 2.0f);
            pair_make(&y, count * sizeof(float), k / 4 * sizeof(float), &rng, 3.0f);
            assert_int_equal(b.cuda.add(b.state, on_device(&x), MS_DTYPE_F32, on_device(&y),
                                        MS_DTYPE_F32, count),
                             0);
            assert_int_equal(
                b.cpu.add(b.cpu.user, on_host(&x), MS_DTYPE_F32, on_host(&y), MS_DTYPE_F32, count),
                0);
            bench_wait(&b);
            assert_true(pair_same(&x));
            assert_true(pair_same(&y));
            pair_free(&x);
            pair_free(&y);
        }
    }
    bench_close(&b);
}

/* The same in each pair of dtypes: to the bit, since both sides add in F32 and round once. */
static void sums_in_16_bits_match_the_cpu_to_the_bit(void **state) {
    (void)state;
    static const ms_dtype dtypes[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16};
    bench b;
    t_rng rng = t_seed(22);
    bench_open(&b, 22);
    EACH_COUNT(count) {
        for (int k = 1; k < 9; k++) {
            const ms_dtype to = dtypes[k % 3], from = dtypes[k / 3];
            pair x, y;
            pair_make(&x, count * ms_dtype_bytes(to), count % 3 * 4, &rng, 1.0f);
            pair_make(&y, count * ms_dtype_bytes(from), count % 2 * 4, &rng, 1.0f);
            put_numbers(&x, to, count, &rng);
            put_numbers(&y, from, count, &rng);
            assert_int_equal(b.cuda.add(b.state, on_device(&x), to, on_device(&y), from, count), 0);
            assert_int_equal(b.cpu.add(b.cpu.user, on_host(&x), to, on_host(&y), from, count), 0);
            bench_wait(&b);
            assert_true(pair_same(&x));
            assert_true(pair_same(&y));
            pair_free(&x);
            pair_free(&y);
        }
    }
    bench_close(&b);
}

// ------------------------------------------------------------------------------------------------
// of several ranks

enum { BALLOTS = 5 };

typedef struct ballots {
    ms_step_state state;
    ms_norm norms[MS_LIMIT_NORMS];
    ms_vote votes[BALLOTS];
} ballots;

/* Votes of random states are cast and counted with the bits of the CPU. */
static void votes_are_those_of_the_cpu(void **state) {
    (void)state;
    bench b;
    t_rng rng = t_seed(8);
    bench_open(&b, 8);
    for (uint32_t k = 0; k < 60; k++) {
        const ms_vote_kind kind = (ms_vote_kind)(k % 4);
        const uint32_t norms = k % 3 == 0 ? 0 : 1 + k % MS_LIMIT_NORMS;
        ballots host, found;
        memset(&host, 0, sizeof host);
        memset(&found, 0, sizeof found);
        ballots *device = (ballots *)device_put(&host, sizeof host);
        for (uint32_t r = 0; r < BALLOTS; r++) {
            host.state.loss = (double)t_below(&rng, 1000) / 7.0;
            host.state.step = k;
            host.state.runs = r == 3 && k % 5 == 4 ? 9 : 7;
            host.state.gives_up = t_below(&rng, 12) == 0 ? 5 : 0;
            host.state.halted = t_below(&rng, 8) == 0 ? (uint32_t)MS_HALT_LOSS : 0;
            host.state.nonfinite = t_below(&rng, 3);
            for (uint32_t i = 0; i < MS_LIMIT_NORMS; i++) {
                host.norms[i].sum = (double)t_below(&rng, 1000) / 3.0;
            }
            assert_int_equal(cudaMemcpy(device, &host, offsetof(ballots, votes), cudaMemcpyDefault),
                             cudaSuccess);
            assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
            assert_int_equal(b.cpu.cast_vote(NULL, &host.votes[r], kind, &host.state, &host.state,
                                             host.norms, norms),
                             0);
            assert_int_equal(b.cuda.cast_vote(b.state, &device->votes[r], kind, &device->state,
                                              &device->state, device->norms, norms),
                             0);
            bench_wait(&b);
        }
        assert_int_equal(
            b.cpu.count_votes(NULL, host.votes, BALLOTS, &host.state, host.norms, norms), 0);
        assert_int_equal(b.cuda.count_votes(b.state, device->votes, BALLOTS, &device->state,
                                            device->norms, norms),
                         0);
        bench_wait(&b);
        device_get(&found, device, sizeof found);
        assert_memory_equal(&found, &host, sizeof found);
        device_release(device);
    }
    bench_close(&b);
}

typedef struct note {
    uint32_t *notes, number;
    char rest[100];
} note;

static void take_note(void *argument) {
    const note *n = (const note *)argument;
    n->notes[n->number] += n->number + (n->rest[99] == 'x');
}

/* More calls than are under way at once, each with its own argument, between copies; none is recorded. */
static void calls_get_their_arguments(void **state) {
    (void)state;
    enum { CALLS = 500 };
    for (uint64_t seed = 0; seed < cn_seeds(10); seed++) {
        bench b;
        note n;
        static uint32_t notes[CALLS], copied[CALLS];
        void *pinned = NULL, *recording = NULL;
        bench_open(&b, seed);
        uint32_t *device = (uint32_t *)device_put(notes, sizeof notes);
        assert_int_equal(b.cuda.host_alloc(b.cuda.user, &b.host, sizeof notes, &pinned), 0);
        memset(pinned, 0, sizeof notes);
        memset(&n, 'x', sizeof n);
        n.notes = (uint32_t *)pinned;
        for (n.number = 0; n.number < CALLS; n.number++) {
            assert_int_equal(b.cuda.network_call(b.state, take_note, &n, sizeof n), 0);
        }
        assert_int_equal(b.cuda.network_copy(b.state, device, pinned, sizeof notes), 0);
        memset(&n, 0, sizeof n);
        n.notes = (uint32_t *)pinned;
        assert_int_equal(b.cuda.network_call(b.state, take_note, &n, sizeof n), 0);
        bench_wait(&b);
        device_get(copied, device, sizeof copied);
        for (uint32_t i = 0; i < CALLS; i++) {
            assert_int_equal(copied[i], i + 1);
        }
        assert_int_equal(b.cuda.recording_begin(b.state), 0);
        assert_int_equal(b.cuda.record(b.state, MS_STREAM_COMPUTE, 0), 0);
        assert_int_equal(b.cuda.wait(b.state, MS_STREAM_NETWORK, 0), 0);
        assert_int_equal(b.cuda.network_call(b.state, take_note, &n, sizeof n),
                         cudaErrorStreamCaptureUnsupported);
        assert_int_equal(b.cuda.record(b.state, MS_STREAM_NETWORK, 0), 0);
        assert_int_equal(b.cuda.wait(b.state, MS_STREAM_COMPUTE, 0), 0);
        assert_int_equal(b.cuda.recording_end(b.state, &recording), 0);
        b.cuda.recording_release(b.state, recording);
        b.cuda.host_release(b.cuda.user, &b.host, pinned, sizeof notes);
        device_release(device);
        bench_close(&b);
    }
}

/* The four ways of copying, and what is told; the host's memory changes after the call where it
   may. */
static void copies_copy_all_and_nothing_beside_it(void **state) {
    (void)state;
    bench b;
    t_rng rng = t_seed(3);
    bench_open(&b, 3);
    for (uint64_t count = 1; count < 3000; count += count < 70 ? 1 : 971) {
        const size_t bytes = count * sizeof(float);
        void *pinned = NULL;
        pair x, y;
        assert_int_equal(b.cuda.host_alloc(b.cuda.user, &b.host, 2 * bytes, &pinned), 0);
        pair_make(&x, bytes, 4 * (count % 4), &rng, 1.0f);
        pair_make(&y, bytes, 8, &rng, 1.0f);
        assert_int_equal(b.cuda.copy(b.state, on_device(&x), on_device(&y), bytes), 0);
        bench_wait(&b);
        memcpy(on_host(&x), on_host(&y), bytes);
        assert_true(pair_same(&x));
        t_fill(&rng, (float *)pinned, count, 1.0f);
        memcpy(on_host(&x), pinned, bytes);
        assert_int_equal(b.cuda.copy_in(b.state, on_device(&x), pinned, bytes), 0);
        bench_wait(&b);
        assert_true(pair_same(&x));
        assert_int_equal(b.cuda.copy_out(b.state, (uint8_t *)pinned + bytes, on_device(&y), bytes),
                         0);
        bench_wait(&b);
        assert_memory_equal((uint8_t *)pinned + bytes, on_host(&y), bytes);
        float *told = (float *)malloc(bytes);
        assert_non_null(told);
        t_fill(&rng, told, count, 1.0f);
        memcpy(on_host(&y), told, bytes);
        assert_int_equal(b.cuda.upload(b.state, on_device(&y), told, bytes), 0);
        memset(told, 0x55, bytes);
        bench_wait(&b);
        assert_true(pair_same(&y));
        free(told);
        pair_free(&x);
        pair_free(&y);
        b.cuda.host_release(b.cuda.user, &b.host, pinned, 2 * bytes);
    }
    bench_close(&b);
}

// ------------------------------------------------------------------------------------------------
// casts

/* Bits as the CPU has them, those of NaN included. */
static void check_cast(bench *b, ms_dtype from, ms_dtype to, const uint8_t *inputs, uint64_t count,
                       size_t shift_in, size_t shift_out) {
    t_rng rng = t_seed(count);
    pair in, out;
    pair_make(&in, count * f_bytes(from), shift_in * f_bytes(from), &rng, 1.0f);
    device_release(in.device);
    memcpy(on_host(&in), inputs, in.bytes);
    in.device = (uint8_t *)device_put(in.host, pair_all(&in));
    pair_make(&out, count * f_bytes(to), shift_out * f_bytes(to), &rng, 1.0f);
    assert_int_equal(b->cuda.cast(b->state, on_device(&out), to, on_device(&in), from, count), 0);
    assert_int_equal(b->cpu.cast(b->cpu.user, on_host(&out), to, on_host(&in), from, count), 0);
    bench_wait(b);
    assert_true(pair_same(&out));
    pair_free(&in);
    pair_free(&out);
}

static void casts_match_the_cpu(void **state) {
    (void)state;
    bench b;
    uint8_t *inputs = (uint8_t *)malloc((size_t)F_INPUTS * sizeof(float));
    assert_non_null(inputs);
    bench_open(&b, 4);
    for (int from = 0; from < 3; from++) {
        const uint64_t all = f_inputs(f_dtypes[from], inputs);
        const uint8_t *some = inputs + all / 3 * f_bytes(f_dtypes[from]);
        for (int to = 0; to < 3; to++) {
            check_cast(&b, f_dtypes[from], f_dtypes[to], inputs, all, 0, 0);
            check_cast(&b, f_dtypes[from], f_dtypes[to], some, 10007, 1, 0);
            for (uint64_t count = 1; count <= 70; count++) {
                check_cast(&b, f_dtypes[from], f_dtypes[to], some, count, 0, 0);
                check_cast(&b, f_dtypes[from], f_dtypes[to], some, count, count % 8, count / 9);
            }
        }
    }
    free(inputs);
    bench_close(&b);
}

static void casts_of_a_call_match_float64(void **state) {
    (void)state;
    cn_reset(5);
    const ms_backend cuda = ms_backend_cuda(0);
    const f_memory memory = {device_put, device_get, device_release};
    f_check_casts(&cuda, &memory);
    cn_clean();
}

// ------------------------------------------------------------------------------------------------
// sums of losses and squares, and their verdicts

static ms_step_state *state_on_device(const pair *p) {
    return (ms_step_state *)on_device(p);
}

static ms_step_state state_found(pair *p) {
    ms_step_state s;
    (void)pair_same(p);
    memcpy(&s, p->found + MARGIN + p->offset, sizeof s);
    return s;
}

static void set_state(pair *p, uint32_t halted, uint64_t step) {
    ms_step_state s;
    memset(&s, 0, sizeof s);
    s.loss = -1.0;
    s.norm = -2.0;
    s.halted = halted;
    s.halted_step = 5;
    s.step = step;
    s.seed = 99;
    memcpy(on_host(p), &s, sizeof s);
    device_release(p->device);
    p->device = (uint8_t *)device_put(p->host, pair_all(p));
}

static void check_loss(bench *b, pair *s, uint64_t count, t_rng *rng) {
    pair x;
    double sum = 0.0, size = 0.0;
    set_state(s, MS_HALT_NONE, 7);
    pair_make(&x, count * sizeof(float), count % 4 * sizeof(float), rng, 5.0f);
    for (uint64_t i = 0; i < count; i++) {
        sum += (double)((const float *)on_host(&x))[i];
        size += fabs((double)((const float *)on_host(&x))[i]);
    }
    assert_int_equal(b->cuda.loss(b->state, on_device(&x), count, 0.25, state_on_device(s)), 0);
    bench_wait(b);
    const ms_step_state found = state_found(s);
    assert_true(fabs(found.loss - 0.25 * sum) <= 1e-12 * size);
    assert_true(found.norm == -2.0 && found.halted == (uint32_t)MS_HALT_NONE);
    assert_true(found.step == 7 && found.seed == 99);
    assert_true(pair_same(&x));
    pair_free(&x);
}

static void losses_match_float64(void **state) {
    (void)state;
    bench b;
    pair s;
    t_rng rng = t_seed(6);
    bench_open(&b, 6);
    pair_make(&s, sizeof(ms_step_state), 0, &rng, 1.0f);
    EACH_COUNT(count) {
        check_loss(&b, &s, count, &rng);
    }
    check_loss(&b, &s, 1300000, &rng); // more than one round of all blocks
    check_loss(&b, &s, 300001, &rng);
    pair_free(&s);
    bench_close(&b);
}

/* A bad loss halts, at whatever place it is; what was halted before keeps its first reason. */
static void bad_losses_halt_wherever_they_are(void **state) {
    (void)state;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    bench b;
    pair s, x;
    t_rng rng = t_seed(7);
    bench_open(&b, 7);
    pair_make(&s, sizeof(ms_step_state), 0, &rng, 1.0f);
    for (int i = 0; i < 60; i++) {
        const bool before = i % 2 != 0;
        pair_make(&x, 300 * sizeof(float), 0, &rng, 5.0f);
        ((float *)on_host(&x))[t_below(&rng, 300)] = bad[i % 3];
        device_release(x.device);
        x.device = (uint8_t *)device_put(x.host, pair_all(&x));
        set_state(&s, before ? MS_HALT_NORM : MS_HALT_NONE, 7);
        assert_int_equal(b.cuda.loss(b.state, on_device(&x), 300, 1.0, state_on_device(&s)), 0);
        assert_int_equal(
            b.cpu.loss(b.cpu.user, on_host(&x), 300, 1.0, (ms_step_state *)on_host(&s)), 0);
        bench_wait(&b);
        const ms_step_state found = state_found(&s);
        assert_int_equal(found.halted, before ? MS_HALT_NORM : MS_HALT_LOSS);
        assert_int_equal(found.halted_step, before ? 5 : 7);
        assert_true(before || !msi_is_finite(found.loss));
        assert_true(!before || pair_same(&s));
        pair_free(&x);
    }
    pair_free(&s);
    bench_close(&b);
}

static void check_squares(bench *b, uint64_t count, size_t offset, t_rng *rng) {
    pair x, sum, nonfinite;
    double expected = 1.5, found = 0.0;
    pair_make(&x, count * sizeof(float), offset, rng, 3.0f);
    pair_make(&nonfinite, sizeof(uint32_t), 0, rng, 1.0f);
    pair_make(&sum, sizeof(double), 0, rng, 1.0f);
    memcpy(on_host(&sum), &expected, sizeof expected);
    device_release(sum.device);
    sum.device = (uint8_t *)device_put(sum.host, pair_all(&sum));
    for (uint64_t i = 0; i < count; i++) {
        const double v = (double)((const float *)on_host(&x))[i];
        expected += 2.0 * v * v; // it is added twice
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(b->cuda.add_squares(b->state, on_device(&x), MS_DTYPE_F32, count,
                                             (double *)on_device(&sum), 1,
                                             (uint32_t *)on_device(&nonfinite)),
                         0);
    }
    bench_wait(b);
    assert_true(pair_same(&x));
    device_get(&found, on_device(&sum), sizeof found);
    assert_true(fabs(found - expected) <= 1e-12 * expected);
    memcpy(on_host(&sum), &found, sizeof found);
    assert_true(pair_same(&sum));
    pair_free(&x);
    pair_free(&sum);
    pair_free(&nonfinite);
}

static void sums_of_squares_match_float64(void **state) {
    (void)state;
    bench b;
    t_rng rng = t_seed(8);
    bench_open(&b, 8);
    EACH_COUNT(count) {
        for (size_t offset = 0; offset < 16; offset += 4) {
            check_squares(&b, count, offset, &rng);
        }
    }
    check_squares(&b, 1300003, 0, &rng); // more than one round of all blocks
    check_squares(&b, 300007, 4, &rng);
    bench_close(&b);
}

enum { FACTORS = 300 }; // more than threads of a block

/* With steps that were skipped. */
static void set_scaling(pair *p) {
    ms_step_state *s = (ms_step_state *)on_host(p);
    s->scaling.growth = 2.0f;
    s->scaling.backoff = 0.5f;
    s->scaling.least = 1.0f;
    s->scaling.growth_steps = 100;
    s->loss_scale = 1024.0f;
    s->skipped_steps = 3;
    device_release(p->device);
    p->device = (uint8_t *)device_put(p->host, pair_all(p));
}

/* Of updates 0 (of SGD) to FACTORS - 1. */
static void set_factors(pair *p) {
    ms_update_factors *f = (ms_update_factors *)on_host(p);
    for (uint32_t i = 0; i < FACTORS; i++) {
        f[i].beta1 = 0.9f;
        f[i].beta2 = 0.999f;
        f[i].learning_rate = 1e-3f;
        f[i].number = i;
    }
    device_release(p->device);
    p->device = (uint8_t *)device_put(p->host, pair_all(p));
}

static void factors_of_clipping_match_the_cpu(void **state) {
    (void)state;
    static const double sums[] = {0.0,  1e-300, 1e-30, 0.25, 1.0,     1.0000001,
                                  6.25, 1e30,   1e300, NAN,  INFINITY};
    bench b;
    t_rng rng = t_seed(9);
    bench_open(&b, 9);
    for (size_t i = 0; i < 2 * sizeof sums / sizeof sums[0]; i++) {
        static const float limits[] = {0.5f, FLT_MAX, 2.0f};
        const uint32_t count = 1 + (uint32_t)(i % 3);
        ms_norm norms[3] = {{sums[i / 2], 0.0f}, {1.0, 0.0f}, {16.0, 0.0f}};
        pair s, norm, factors;
        pair_make(&s, sizeof(ms_step_state), 0, &rng, 1.0f);
        set_state(&s, i % 2 ? MS_HALT_LOSS : MS_HALT_NONE, 11);
        if (i % 3 != 0) {
            set_scaling(&s);
        }
        pair_make(&factors, FACTORS * sizeof(ms_update_factors), 0, &rng, 1.0f);
        set_factors(&factors);
        pair_make(&norm, sizeof norms, 0, &rng, 1.0f);
        memcpy(on_host(&norm), norms, sizeof norms);
        device_release(norm.device);
        norm.device = (uint8_t *)device_put(norm.host, pair_all(&norm));
        assert_int_equal(b.cuda.clip_scale(b.state, (ms_norm *)on_device(&norm), limits, count,
                                           state_on_device(&s),
                                           (ms_update_factors *)on_device(&factors), FACTORS),
                         0);
        assert_int_equal(b.cpu.clip_scale(b.cpu.user, (ms_norm *)on_host(&norm), limits, count,
                                          (ms_step_state *)on_host(&s),
                                          (ms_update_factors *)on_host(&factors), FACTORS),
                         0);
        bench_wait(&b);
        const ms_step_state found = state_found(&s), expected = *(ms_step_state *)on_host(&s);
        assert_int_equal(found.halted, expected.halted);
        assert_int_equal(found.halted_step, expected.halted_step);
        assert_true(found.norm == expected.norm || found.norm != found.norm);
        assert_true(sums[i / 2] == sums[i / 2] ? pair_same(&s) : true);
        assert_true(pair_same(&norm));
        assert_true(pair_same(&factors));
        pair_free(&factors);
        pair_free(&s);
        pair_free(&norm);
    }
    bench_close(&b);
}

// ------------------------------------------------------------------------------------------------
// updates

enum { VALUE, GRADIENT, STATE0, STATE1, MASTER, ARRAYS };

typedef struct update_case {
    ms_optimizer_kind kind;
    float momentum;
    bool scaled, halted;
    uint64_t t;
    ms_state_format format[2];
    ms_dtype value, gradient; // not zero: of 16 bits
    bool has_master;
} update_case;

static ms_update_args args_of(const update_case *c, const pair *arrays, bool device) {
    ms_optimizer_desc o = t_optimizer(c->kind, 0.0f);
    ms_update_args args;
    float *at[ARRAYS];
    o.momentum = c->momentum;
    memset(&args, 0, sizeof args);
    for (int i = 0; i < ARRAYS; i++) {
        at[i] = (float *)(device ? on_device(&arrays[i]) : on_host(&arrays[i]));
    }
    args.kind = c->kind;
    args.count = arrays[MASTER].bytes / sizeof(float);
    args.value_dtype = c->value;
    args.gradient_dtype = c->gradient;
    args.master = c->has_master ? at[MASTER] : NULL;
    args.value = at[VALUE];
    args.gradient = at[GRADIENT];
    const uint32_t states = t_state_count(&o);
    args.state[0] = states > 0 ? at[STATE0] : NULL;
    args.state[1] = states > 1 ? at[STATE1] : NULL;
    args.begin = 8192;
    args.seed = 5;
    memcpy(args.state_format, c->format, sizeof c->format);
    return args;
}

/* Factors, scale and state of the step, in one place on each side. */
typedef struct shared_args {
    ms_update_factors factors;
    ms_step_state step;
    float scale;
} shared_args;

static void point_to_shared(const update_case *c, ms_update_args *args, void *at) {
    uint8_t *shared = (uint8_t *)at;
    args->factors = (const ms_update_factors *)(void *)(shared + offsetof(shared_args, factors));
    args->state_of_step = (const ms_step_state *)(void *)(shared + offsetof(shared_args, step));
    args->gradient_scale =
        c->scaled ? (const float *)(void *)(shared + offsetof(shared_args, scale)) : NULL;
}

static void fill_shared(const update_case *c, shared_args *s) {
    ms_optimizer_desc o;
    memset(&o, 0, sizeof o);
    memset(s, 0, sizeof *s);
    o.kind = c->kind;
    o.learning_rate = 0.013f;
    o.beta1 = 0.9f;
    o.beta2 = 0.999f;
    o.epsilon = 1e-8f;
    o.momentum = c->momentum;
    s->factors = msi_factors_at(&o, c->t);
    s->factors.decay = msi_decay_factor(&o, 0.1f);
    s->scale = 0.37f;
    s->step.halted = (uint32_t)(c->halted ? MS_HALT_NORM : MS_HALT_NONE);
    s->step.seed = 17;
}

/* The bits of the CPU where both sides fuse a product with a sum, or neither does. Otherwise codes
   cannot be compared. */
static void check_updated(pair *p, bool is_float) {
#if defined(CUDART_EMULATION) || defined(FP_FAST_FMAF)
    (void)is_float;
    assert_true(pair_same(p));
#else
    (void)pair_same(p);
    if (!is_float) {
        return;
    }
    for (size_t i = 0; i < p->bytes / sizeof(float); i++) {
        const float expected = ((const float *)on_host(p))[i];
        float found;
        memcpy(&found, p->found + MARGIN + p->offset + i * sizeof found, sizeof found);
        assert_true(fabsf(found - expected) <= 1e-5f * (1.0f + fabsf(expected)));
    }
    memcpy(p->host + MARGIN + p->offset, p->found + MARGIN + p->offset, p->bytes);
    assert_true(pair_same(p)); // the margins
#endif
}

/* Puts moments into an array that holds random floats, in a format; the second one is positive. */
static void put_moments(pair *p, const update_case *c, int k, uint64_t count) {
    static float moments[4096];
    float *x = (float *)on_host(p);
    assert_true(count <= 4096 || c->format[k] == MS_STATE_FORMAT_F32);
    for (uint64_t i = 0; i < count; i++) {
        x[i] = k == 1 ? fabsf(x[i]) : x[i];
    }
    if (c->format[k] != MS_STATE_FORMAT_F32) {
        memcpy(moments, x, count * sizeof(float));
        memset(x, 0, p->bytes); // also what pads the codes
        for (uint64_t at = 0; at < count; at += MSI_CODED_BLOCK) {
            msi_store_state(x, msi_format_of_state(c->format[k]), msi_state_is_signed(c->kind, k),
                            at, (int)msi_smaller(count - at, MSI_CODED_BLOCK), count, NULL, 0,
                            moments + at);
        }
    }
    device_release(p->device);
    p->device = (uint8_t *)device_put(p->host, pair_all(p));
}

static void check_update(bench *b, const update_case *c, uint64_t count, const size_t *offsets,
                         t_rng *rng) {
    pair arrays[ARRAYS];
    shared_args shared;
    fill_shared(c, &shared);
    void *told = device_put(&shared, sizeof shared);
    for (int i = 0; i < ARRAYS; i++) { // codes take less than floats, except of a few elements
        const bool coded =
            i >= STATE0 && i < MASTER && c->format[i - STATE0] == MS_STATE_FORMAT_8BIT;
        const uint64_t least = coded ? 72 : 0, bytes = count * sizeof(float);
        pair_make(&arrays[i], bytes > least ? bytes : least, coded ? 0 : offsets[i] * sizeof(float),
                  rng, 1.0f);
    }
    if (c->value != MS_DTYPE_F32) {
        put_numbers(&arrays[VALUE], c->value, count, rng);
    }
    if (c->gradient != MS_DTYPE_F32) {
        put_numbers(&arrays[GRADIENT], c->gradient, count, rng);
    }
    if (c->kind == MS_UPDATE_ROOT) { // of what is positive
        for (uint64_t i = 0; i < count; i++) {
            const float g = fabsf(msi_load(on_host(&arrays[GRADIENT]), c->gradient, i));
            msi_store_as(on_host(&arrays[GRADIENT]), c->gradient, i, g);
        }
        device_release(arrays[GRADIENT].device);
        arrays[GRADIENT].device =
            (uint8_t *)device_put(arrays[GRADIENT].host, pair_all(&arrays[GRADIENT]));
    }
    put_moments(&arrays[STATE0], c, 0, count);
    put_moments(&arrays[STATE1], c, 1, count);
    ms_update_args on_cuda = args_of(c, arrays, true), on_cpu = args_of(c, arrays, false);
    point_to_shared(c, &on_cuda, told);
    point_to_shared(c, &on_cpu, &shared);
    assert_int_equal(b->cuda.update(b->state, &on_cuda), 0);
    if (!c->halted) { // it must leave everything as it is
        assert_int_equal(b->cpu.update(b->cpu.user, &on_cpu), 0);
    }
    bench_wait(b);
    for (int i = 0; i < ARRAYS; i++) {
        const bool is_float = i == VALUE      ? c->value == MS_DTYPE_F32
                              : i == GRADIENT ? c->gradient == MS_DTYPE_F32
                              : i == MASTER   ? c->has_master
                                              : c->format[i - STATE0] == MS_STATE_FORMAT_F32;
        check_updated(&arrays[i], is_float);
        pair_free(&arrays[i]);
    }
    device_release(told);
}

#define UPDATE_KIND(constant, ...) constant,
static const ms_optimizer_kind update_kinds[] = {MSI_UPDATES_WITH_STATE(UPDATE_KIND)
                                                     MSI_STEPS(UPDATE_KIND)};
enum { UPDATE_KINDS = sizeof update_kinds / sizeof update_kinds[0] };

/* State in each format: the blocks of codes end where those of threads do not. */
static void updates_of_every_format_of_state_match_the_cpu(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 7, 8, 255, 256, 257, 1000, 4000, 4095, 4096};
    static const size_t offsets[][ARRAYS] = {
        {0, 0, 0, 0, 0}, {1, 0, 0, 0, 0}, {0, 3, 0, 0, 0}, {0, 0, 1, 1, 0}};
    bench b;
    t_rng rng = t_seed(12);
    bench_open(&b, 12);
    for (int formats = 1; formats < 9; formats++) {
        for (int kind = 0; kind < UPDATE_KINDS; kind++) {
            update_case c = {update_kinds[kind],
                             0.9f,
                             formats % 2 == 0,
                             false,
                             3,
                             {(ms_state_format)(formats % 3), (ms_state_format)(formats / 3)},
                             MS_DTYPE_F32,
                             MS_DTYPE_F32,
                             false};
            for (int k = msi_optimizer_of(c.kind).states; k < 2; k++) {
                c.format[k] = MS_STATE_FORMAT_F32;
            }
            for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
                check_update(&b, &c, counts[i], offsets[i % 4], &rng);
            }
            c.halted = true;
            check_update(&b, &c, 1000, offsets[0], &rng);
        }
    }
    bench_close(&b);
}

/* Values and gradients in 16 bits, with a master and without. */
static void updates_in_16_bits_match_the_cpu(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 7, 8, 255, 256, 257, 1000, 4095};
    static const ms_dtype dtypes[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16};
    static const size_t offsets[][ARRAYS] = {
        {0, 0, 0, 0, 0}, {1, 0, 0, 0, 0}, {0, 3, 0, 0, 0}, {0, 0, 0, 0, 1}};
    bench b;
    t_rng rng = t_seed(21);
    bench_open(&b, 21);
    for (int k = 1; k < 9; k++) {
        for (int how = 0; how < 4 * UPDATE_KINDS; how++) {
            const ms_dtype value = dtypes[k % 3];
            const bool alone = how % 2;
            const ms_optimizer_kind kind = update_kinds[how / 4];
            if (how / 2 % 2 == 1 && !msi_optimizer_of(kind).has_momentum) {
                continue;
            }
            update_case c = {kind,
                             how / 2 % 2 == 1 ? 0.9f : 0.0f,
                             true,
                             false,
                             3,
                             {MS_STATE_FORMAT_F32, MS_STATE_FORMAT_F32},
                             value,
                             dtypes[k / 3],
                             value != MS_DTYPE_F32 && !alone};
            for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
                check_update(&b, &c, counts[i], offsets[i % 4], &rng);
            }
        }
    }
    bench_close(&b);
}

static void updates_match_the_cpu(void **state) {
    (void)state;
    static const struct {
        bool momentum, scaled, halted;
        uint64_t t;
    } how[] = {{false, false, false, 1}, {true, false, false, 2}, {false, true, false, 1000},
               {true, true, false, 2},   {false, true, true, 3},  {true, true, true, 2}};
    static const size_t offsets[][ARRAYS] = {{0, 0, 0, 0, 0}, {1, 1, 1, 1, 1}, {2, 0, 0, 0, 0},
                                             {0, 3, 0, 0, 0}, {0, 0, 1, 0, 0}, {0, 0, 0, 1, 0}};
    const size_t all = sizeof offsets / sizeof offsets[0];
    bench b;
    t_rng rng = t_seed(10);
    bench_open(&b, 10);
    for (size_t i = 0; i < 6 * UPDATE_KINDS; i++) {
        update_case c;
        memset(&c, 0, sizeof c);
        c.kind = update_kinds[i / 6];
        c.momentum = how[i % 6].momentum ? 0.9f : 0.0f;
        c.scaled = how[i % 6].scaled;
        c.halted = how[i % 6].halted;
        c.t = how[i % 6].t;
        if (how[i % 6].momentum && !msi_optimizer_of(c.kind).has_momentum) {
            continue;
        }
        EACH_COUNT(count) {
            const size_t first = count > 70 ? count % all : 0;
            const size_t last = count > 70 ? first + 1 : all;
            for (size_t k = first; k < last; k++) {
                check_update(&b, &c, count, offsets[k], &rng);
            }
        }
    }
    bench_close(&b);
}

/* What the steps of updates of matrices are scaled by. */
static void factors_match_the_cpu(void **state) {
    (void)state;
    static const double sums[][2] = {{4.0, 9.0}, {0.0, 0.0}, {1e-20, 1e20}, {1e30, 1e-9}};
    bench b;
    bench_open(&b, 31);
    for (int i = 0; i < 16; i++) {
        struct {
            double sums[2];
            float mean, factor;
        } on_host = {{sums[i / 4][0], sums[i / 4][1]}, 0.25f, 0.0f}, found;
        uint8_t *on_device = (uint8_t *)device_put(&on_host, sizeof on_host);
        ms_factor_args args;
        memset(&args, 0, sizeof args);
        args.kind = i % 2 ? MS_OPTIMIZER_MUON : MS_OPTIMIZER_ADAFACTOR;
        args.count = 100;
        args.sums = on_host.sums;
        args.mean = i / 2 % 2 ? &on_host.mean : NULL;
        args.factor = &on_host.factor;
        assert_int_equal(b.cpu.factor(b.cpu.user, &args), 0);
        args.sums = (const double *)(void *)on_device;
        args.mean = args.mean ? (const float *)(void *)(on_device + sizeof on_host.sums) : NULL;
        args.factor = (float *)(void *)(on_device + sizeof on_host.sums + sizeof(float));
        assert_int_equal(b.cuda.factor(b.state, &args), 0);
        bench_wait(&b);
        device_get(&found, on_device, sizeof found);
        assert_true(found.factor == on_host.factor);
        device_release(on_device);
    }
    bench_close(&b);
}

// ------------------------------------------------------------------------------------------------
// products

static void products_match_float64(void **state) {
    (void)state;
    const f_memory memory = {device_put, device_get, device_release};
    cn_reset(11);
    ms_backend cuda = ms_backend_cuda(0);
    f_check_products(&cuda, &memory, 1500);
    f_check_refusals(&cuda);
    cn_clean();
}

/* A product whose factors lose bits in TF32: where it was asked for, and there alone. */
static float product_of_thirds(bool tf32) {
    cn_how how;
    cn_net net;
    float third[1024], found[4];
    memset(&how, 0, sizeof how);
    how.cuda = true;
    how.tf32 = tf32;
    cn_start(&net, &how);
    for (int i = 0; i < 1024; i++) {
        third[i] = 1.0f / 3.0f;
    }
    void *a = device_put(third, sizeof third), *c = device_put(third, sizeof found);
    const ms_call call = f_call(net.model);
    ms_matrix x, y;
    memset(&x, 0, sizeof x);
    x.data = a;
    x.rows = 16;
    x.cols = x.stride = 64;
    y = ms_transpose(x);
    ms_matrix z = x;
    void *product = device_put(third, 16 * 16 * sizeof(float));
    z.data = product;
    z.cols = z.stride = 16;
    t_ok(net.model, ms_gemm(&call, 1.0f, x, y, 0.0f, z));
    t_ok(net.model, ms_synchronize(net.model));
    device_get(found, product, sizeof found);
    device_release(a);
    device_release(c);
    device_release(product);
    cn_destroy(&net);
    return found[0];
}

static void tf32_rounds_factors_where_it_is_native(void **state) {
    (void)state;
    cn_reset(12);
    struct cudaDeviceProp properties;
    assert_int_equal(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    const float exact = product_of_thirds(false), rounded = product_of_thirds(true);
    assert_true(fabsf(exact - 64.0f / 9.0f) < 4e-6f);
    assert_true(fabsf(rounded - 64.0f / 9.0f) < 8e-3f);
    if (properties.major >= 8) {
        assert_true(fabsf(rounded - 64.0f / 9.0f) > 4e-5f);
    }
    cn_clean();
}

/* What cuBLAS counts by int. */
static void products_too_large_for_cublas_are_refused(void **state) {
    (void)state;
    cn_how how;
    cn_net net;
    memset(&how, 0, sizeof how);
    how.cuda = true;
    cn_reset(13);
    cn_start(&net, &how);
    const ms_call call = f_call(net.model);
    ms_matrix a, b, c;
    memset(&a, 0, sizeof a);
    a.data = ms_data(net.model, net.param[0]);
    a.rows = (int64_t)1 << 31;
    a.cols = a.stride = 1;
    b = a;
    b.rows = 1;
    c = a;
    t_error(net.model, ms_gemm(&call, 1.0f, a, b, 0.0f, c), MS_RESULT_BACKEND);
    t_text_has(ms_last_error(net.model), "backend cuda: gemm failed");
    t_text_has(ms_last_error(net.model), cublasGetStatusString(CUBLAS_STATUS_INVALID_VALUE));
    cn_steps(&net, 0, 2);
    cn_destroy(&net);
    cn_clean();
}

// ------------------------------------------------------------------------------------------------
// the hardware report

static ms_hardware report(void) {
    ms_hardware hardware;
    const ms_backend cuda = ms_backend_cuda(0);
    memset(&hardware, 0, sizeof hardware);
    cuda.hardware(cuda.user, &hardware);
    assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
    return hardware;
}

/* As the runtime has it. */
static void the_report_is_what_the_runtime_states(void **state) {
    (void)state;
    cn_reset(14);
    struct cudaDeviceProp properties;
    int driver = 0, runtime = 0;
    assert_int_equal(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    assert_int_equal(cudaDriverGetVersion(&driver), cudaSuccess);
    assert_int_equal(cudaRuntimeGetVersion(&runtime), cudaSuccess);
    const ms_hardware hardware = report();
    assert_memory_equal(hardware.name, properties.name,
                        strlen(properties.name) < 63 ? strlen(properties.name) : 63);
    assert_int_equal(hardware.kind,
                     properties.integrated ? MS_DEVICE_INTEGRATED : MS_DEVICE_DISCRETE);
    assert_int_equal(hardware.processor_count, properties.multiProcessorCount);
    assert_int_equal(hardware.total_bytes, properties.totalGlobalMem);
    assert_true(hardware.free_bytes > 0 && hardware.free_bytes <= hardware.total_bytes);
    assert_int_equal(hardware.compute_major, properties.major);
    assert_int_equal(hardware.compute_minor, properties.minor);
    assert_int_equal(hardware.driver_version, driver);
    assert_int_equal(hardware.runtime_version, runtime);
    uint64_t total = 0, available = 0;
    msi_host_memory("", &total, &available);
    assert_true(hardware.host_total_bytes == total);
    assert_true(hardware.memory_gb_per_s > 0.0 && hardware.f32_tflops > 0.0);
    assert_true(!hardware.is_measured && hardware.launch_us == 0.0);
}

/* By compute capability: what the device has of itself, and the workspace that cuBLAS asks for. */
static void native_formats_follow_the_compute_capability(void **state) {
    (void)state;
    CN_SKIP_ON_GPU();
#ifdef CUDART_EMULATION
    static const int versions[][2] = {{6, 1}, {7, 0}, {7, 5}, {8, 0}, {8, 9}, {9, 0}, {10, 0}};
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        emulation_reset(1);
        emulation_device device = emulation_get_device();
        device.compute_major = versions[i][0];
        device.compute_minor = versions[i][1];
        device.used_bytes = (uint64_t)1 << 30;
        emulation_set_device(&device);
        const ms_hardware hardware = report();
        assert_int_equal(hardware.compute_major, versions[i][0]);
        assert_int_equal(hardware.compute_minor, versions[i][1]);
        assert_int_equal(hardware.fp16_tensor, versions[i][0] >= 7);
        assert_int_equal(hardware.bf16, versions[i][0] >= 8);
        assert_int_equal(hardware.tf32, versions[i][0] >= 8);
        assert_int_equal(hardware.free_bytes, device.memory_bytes - device.used_bytes);
        const uint64_t workspace = ms_backend_cuda(0).workspace_bytes;
        assert_int_equal(workspace >> 20, versions[i][0] >= 9 ? 32 : 4);
    }
#endif
}

#ifdef CUDART_EMULATION
static bool is_near(double a, double b, double tolerance) {
    return fabs(a - b) <= tolerance * b;
}
#endif

/* What clocks, width and multiprocessors of real devices come to is what their maker states of
   them. The tensor cores of the H200 are stated at a lower clock than the rest. */
static void stated_speeds_are_those_of_the_maker(void **state) {
    (void)state;
    CN_SKIP_ON_GPU();
#ifdef CUDART_EMULATION
    static const struct {
        const char *name;
        int clock_mhz, memory_mhz, bus_bits;
        double tensor_tolerance;
    } devices[] = {
        {"RTX 3090", 1695, 9751, 384, 0.01},       {"RTX 4090", 2520, 10501, 384, 0.01},
        {"A100 80GB SXM", 1410, 1593, 5120, 0.01}, {"T4", 1590, 5001, 256, 0.01},
        {"H200", 1980, 3201, 6144, 0.09},          {"H100 80GB SXM", 1980, 2619, 5120, 0.09},
        {"Orin Nano 8GB", 625, 2133, 128, 0.03},   {"AGX Orin 64GB", 1300, 3200, 256, 0.01}};
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        const ms_hardware *stated = ms_hardware_find(devices[i].name);
        emulation_reset(1);
        emulation_device device = emulation_get_device();
        snprintf(device.name, sizeof device.name, "%s", stated->name);
        device.compute_major = (int)stated->compute_major;
        device.compute_minor = (int)stated->compute_minor;
        device.multiprocessors = (int)stated->processor_count;
        device.is_integrated = stated->kind == MS_DEVICE_INTEGRATED;
        device.clock_khz = devices[i].clock_mhz * 1000;
        device.memory_clock_khz = devices[i].memory_mhz * 1000;
        device.memory_bus_bits = devices[i].bus_bits;
        emulation_set_device(&device);
        const ms_hardware h = report();
        const double tolerance = devices[i].tensor_tolerance;
        if (!is_near(h.memory_gb_per_s, stated->memory_gb_per_s, 0.03) ||
            !is_near(h.f32_tflops, stated->f32_tflops, 0.01) ||
            !is_near(h.tf32_tflops, stated->tf32_tflops, tolerance) ||
            !is_near(h.f16_tflops, stated->f16_tflops, tolerance)) {
            print_error("%s: %g GB/s, F32 %g, TF32 %g, F16 %g TFLOPS\n", h.name, h.memory_gb_per_s,
                        h.f32_tflops, h.tf32_tflops, h.f16_tflops);
            fail();
        }
    }
    emulation_device device = emulation_get_device();
    device.compute_major = 6; // without tensor cores
    device.compute_minor = 1;
    emulation_set_device(&device);
    const ms_hardware old = report();
    assert_true(old.f32_tflops > 0.0 && old.f16_tflops == old.f32_tflops);
    assert_true(old.tf32_tflops == 0.0);
    emulation_reset(1);
#endif
}

/* A device that shares the host's memory has what the host has left. */
static void an_integrated_device_has_what_the_host_has_left(void **state) {
    (void)state;
    CN_SKIP_ON_GPU();
#ifdef CUDART_EMULATION
    emulation_reset(1);
    emulation_device device = emulation_get_device();
    device.is_integrated = 1;
    device.used_bytes = device.memory_bytes;
    emulation_set_device(&device);
    const ms_hardware hardware = report();
    uint64_t total = 0, available = 0;
    msi_host_memory("", &total, &available);
    assert_int_equal(hardware.kind, MS_DEVICE_INTEGRATED);
    assert_true(available > 0);
    assert_true(hardware.free_bytes > available / 2 && hardware.free_bytes < 2 * available);
    device.count = 0;
    emulation_set_device(&device);
    const ms_hardware none = report();
    assert_int_equal(none.total_bytes, 0);
    assert_int_equal(none.compute_major, 0);
    assert_int_equal(none.name[0], 0);
    emulation_reset(1);
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fills_write_all_and_nothing_beside_it),
        cmocka_unit_test(sums_match_the_cpu),
        cmocka_unit_test(sums_in_16_bits_match_the_cpu_to_the_bit),
        cmocka_unit_test(votes_are_those_of_the_cpu),
        cmocka_unit_test(calls_get_their_arguments),
        cmocka_unit_test(copies_copy_all_and_nothing_beside_it),
        cmocka_unit_test(casts_match_the_cpu),
        cmocka_unit_test(casts_of_a_call_match_float64),
        cmocka_unit_test(losses_match_float64),
        cmocka_unit_test(bad_losses_halt_wherever_they_are),
        cmocka_unit_test(sums_of_squares_match_float64),
        cmocka_unit_test(factors_of_clipping_match_the_cpu),
        cmocka_unit_test(updates_match_the_cpu),
        cmocka_unit_test(factors_match_the_cpu),
        cmocka_unit_test(updates_of_every_format_of_state_match_the_cpu),
        cmocka_unit_test(updates_in_16_bits_match_the_cpu),
        cmocka_unit_test(products_match_float64),
        cmocka_unit_test(tf32_rounds_factors_where_it_is_native),
        cmocka_unit_test(products_too_large_for_cublas_are_refused),
        cmocka_unit_test(the_report_is_what_the_runtime_states),
        cmocka_unit_test(native_formats_follow_the_compute_capability),
        cmocka_unit_test(an_integrated_device_has_what_the_host_has_left),
        cmocka_unit_test(stated_speeds_are_those_of_the_maker),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
