/* The emulation of CUDA (tests/emulation): what it computes, what it refuses, and that it catches the
 * mistakes that it is there to catch. The sources of the project are not in here. */
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include "emulation.h"
#include "streams.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#include <cmocka.h>
}

#define ok(call) assert_string_equal(cudaGetErrorName(call), "cudaSuccess")
#define fails(error, call)                                                                         \
    do {                                                                                           \
        assert_string_equal(cudaGetErrorName(call), #error);                                       \
        assert_string_equal(cudaGetErrorName(cudaGetLastError()), #error);                         \
    } while (0)

static cudaLaunchConfig_t grid(unsigned blocks, unsigned threads, cudaStream_t stream) {
    cudaLaunchConfig_t c = cudaLaunchConfig_t();
    c.gridDim = dim3(blocks);
    c.blockDim = dim3(threads);
    c.stream = stream;
    return c;
}

static cudaStream_t new_stream() {
    cudaStream_t s = nullptr;
    ok(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static cudaEvent_t new_event() {
    cudaEvent_t e = nullptr;
    ok(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    return e;
}

template <typename T> static T *on_device(size_t count) {
    T *p = nullptr;
    ok(cudaMalloc(&p, count * sizeof(T)));
    return p;
}

template <typename T> static T peek(const T *device) {
    T value;
    emulation_peek(&value, device, sizeof(value));
    return value;
}

/* Expects a mistake whose description has both parts. */
static void expect_caught(void (*function)(void *), void *user, const char *part,
                          const char *other) {
    char text[600];
    const bool is_caught = emulation_catch(function, user, text, sizeof(text));
    if (!is_caught || !strstr(text, part) || !strstr(text, other)) {
        fail_msg("expected '%s' and '%s', got '%s'", part, other, text);
    }
    emulation_reset(1);
}

/* ---- the engine of streams ---- */

typedef struct tape {
    int count, at[64];
} tape;

static void write_tape(void *user, void *arguments) {
    tape *const t = static_cast<tape *>(user);
    memcpy(&t->at[t->count++], arguments, sizeof(int));
}

static void put(streams *e, int queue, tape *t, int value) {
    assert_true(streams_enqueue(e, queue, write_tape, t, &value, sizeof(value), 1000));
}

static int place(const tape *t, int value) {
    for (int i = 0; i < t->count; i++) {
        if (t->at[i] == value) {
            return i;
        }
    }
    return -1;
}

static void streams_keep_their_order(void **) {
    for (uint64_t seed = 0; seed < 200; seed++) {
        streams e;
        tape t = {0, {0}};
        streams_open(&e, seed);
        const int a = streams_create(&e), b = streams_create(&e), v = streams_event_create(&e);
        put(&e, a, &t, 10);
        put(&e, a, &t, 11);
        streams_event_record(&e, v, a);
        put(&e, a, &t, 12);
        put(&e, b, &t, 20);
        assert_true(streams_event_wait(&e, b, v));
        put(&e, b, &t, 21);
        put(&e, b, &t, 22);
        assert_int_equal(t.count, 0);
        assert_true(streams_finish_queue(&e, b));
        assert_true(place(&t, 22) >= 0 && place(&t, 21) < place(&t, 22));
        assert_true(place(&t, 11) < place(&t, 21) && place(&t, 10) < place(&t, 11));
        assert_true(streams_finish_all(&e));
        assert_int_equal(t.count, 6);
        assert_true(place(&t, 11) < place(&t, 12));
        assert_int_equal(e.pending, 0);
        if (seed == 0) { /* as queued: what nobody needs comes last */
            assert_true(place(&t, 12) < place(&t, 20));
        }
        streams_close(&e);
    }
}

/* Records anew, waits for what was never recorded, uses places again. */
static void events_are_points(void **) {
    streams e;
    tape t = {0, {0}};
    streams_open(&e, 3);
    const int a = streams_create(&e), v = streams_event_create(&e), w = streams_event_create(&e);
    assert_true(streams_event_is_done(&e, v));
    assert_true(streams_finish_event(&e, v) && streams_event_wait(&e, a, w));
    put(&e, a, &t, 1);
    streams_event_record(&e, v, a);
    put(&e, a, &t, 2);
    streams_event_record(&e, v, a);
    assert_false(streams_event_is_done(&e, v));
    assert_true(streams_finish_event(&e, v));
    assert_int_equal(t.count, 2);
    assert_true(streams_event_is_done(&e, v));
    streams_event_destroy(&e, v);
    assert_int_equal(streams_event_create(&e), v);
    assert_false(e.events[v].is_recorded);
    put(&e, a, &t, 3);
    streams_destroy(&e, a);
    assert_int_not_equal(streams_create(&e), a); /* it still has work */
    assert_true(streams_finish_all(&e));
    assert_int_equal(t.count, 3);
    assert_int_equal(streams_create(&e), a);
    streams_close(&e);
}

static void wait_inside(void *user, void *arguments) {
    (void)arguments;
    assert_false(streams_finish_queue(static_cast<streams *>(user), 0));
}

static void deadlocks_are_named(void **) {
    streams e;
    tape t = {0, {0}};
    streams_open(&e, 1);
    const int a = streams_create(&e), b = streams_create(&e);
    const streams_point never = {b, 1};
    assert_true(streams_wait(&e, a, never, 0));
    put(&e, a, &t, 1);
    assert_false(streams_finish_queue(&e, a));
    assert_string_equal(e.error, "deadlock: queue 0 waits for queue 1, which is empty");
    const streams_point later = {a, 2};
    assert_true(streams_wait(&e, b, later, 0));
    assert_false(streams_finish_queue(&e, a));
    assert_non_null(strstr(e.error, "circle"));
    streams_close(&e);
    streams_open(&e, 1);
    assert_int_equal(streams_create(&e), 0);
    assert_true(streams_enqueue(&e, 0, wait_inside, &e, nullptr, 0, 0));
    assert_true(streams_finish_queue(&e, 0));
    assert_non_null(strstr(e.error, "its own queue"));
    streams_close(&e);
}

static void clocks_follow_waits(void **) {
    streams e;
    tape t = {0, {0}};
    streams_open(&e, 5);
    const int a = streams_create(&e), b = streams_create(&e), v = streams_event_create(&e);
    put(&e, a, &t, 1);
    put(&e, a, &t, 2); /* a: 2000 */
    streams_event_record(&e, v, a);
    put(&e, b, &t, 3); /* b: 1000, then waits until 2000 */
    streams_event_wait(&e, b, v);
    put(&e, b, &t, 4);
    assert_int_equal(e.queues[b].time_ns, 3000);
    assert_true(streams_finish_event(&e, v));
    assert_int_equal(e.time_ns, 2000);
    put(&e, a, &t, 5);
    assert_int_equal(e.queues[a].time_ns, 3000);
    assert_true(streams_finish_all(&e));
    assert_int_equal(e.time_ns, 3000);
    streams_close(&e);
}

/* Very much may be queued; a stream of many is worked off by and by. */
static void queues_are_bounded(void **) {
    streams e;
    uint64_t zero = 0;
    tape t = {0, {0}};
    streams_open(&e, 9);
    const int a = streams_create(&e);
    for (int i = 0; i < 100000; i++) {
        t.count = 0;
        assert_true(streams_enqueue(&e, a, write_tape, &t, &zero, sizeof(zero), 0));
        t.count = 0;
        assert_true(e.pending <= STREAMS_PENDING_LIMIT);
        if (i == STREAMS_PENDING_LIMIT - 1) {
            break;
        }
    }
    streams_close(&e);
}

/* ---- nets: a wait that is missing ---- */

typedef struct hazard {
    cudaStream_t first, second;
    cudaEvent_t event;
    float *a, *b, *c;
    int sync; /* 0: the second stream, 1: the first, 2: all */
    bool has_event;
} hazard;

static __global__ void k_add(float *to, const float *from, float x, int64_t n) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) {
        to[i] = from[i] + x;
    }
}

static __global__ void k_fill(float *to, float x, int64_t n) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) {
        to[i] = x;
    }
}

/* Without the event the second stream reads a too early. */
static void run_hazard(const hazard *h) {
    const cudaLaunchConfig_t one = grid(1, 64, h->first), two = grid(1, 64, h->second);
    ok(cudaLaunchKernelEx(&one, k_fill, h->a, 3.0f, 64));
    if (h->has_event) {
        ok(cudaEventRecord(h->event, h->first));
        ok(cudaStreamWaitEvent(h->second, h->event, 0));
    }
    ok(cudaLaunchKernelEx(&two, k_add, h->b, h->a, 1.0f, 64));
    if (h->sync == 2) {
        ok(cudaDeviceSynchronize());
        return;
    }
    ok(cudaStreamSynchronize(h->sync ? h->first : h->second));
    ok(cudaStreamSynchronize(h->sync ? h->second : h->first));
}

static int count_wrong(bool has_event, int sync) {
    int wrong = 0;
    for (uint64_t seed = 1; seed <= 100; seed++) {
        emulation_reset(seed);
        const hazard h = {new_stream(),         new_stream(), new_event(), on_device<float>(64),
                          on_device<float>(64), nullptr,      sync,        has_event};
        run_hazard(&h);
        wrong += !(peek(&h.b[63]) == 4.0f);
    }
    emulation_reset(1);
    return wrong;
}

static void net_catches_a_missing_event(void **) {
    for (int sync = 0; sync < 3; sync++) {
        const int wrong = count_wrong(false, sync);
        print_message("missing event, waiting for %s: wrong for %d of 100 seeds\n",
                      sync == 0   ? "the reader"
                      : sync == 1 ? "the writer"
                                  : "all",
                      wrong);
        assert_in_range(wrong, 90, 100);
        assert_int_equal(count_wrong(true, sync), 0);
    }
}

/* The other direction: memory is used again before its last reader has read it. */
static void net_catches_an_early_overwrite(void **) {
    for (int has_event = 0; has_event < 2; has_event++) {
        int wrong = 0;
        for (uint64_t seed = 1; seed <= 100; seed++) {
            emulation_reset(seed);
            float *const a = on_device<float>(64), *const b = on_device<float>(64);
            const cudaStream_t s = new_stream(), t = new_stream();
            const cudaEvent_t e = new_event();
            const cudaLaunchConfig_t one = grid(1, 64, s), two = grid(1, 64, t);
            ok(cudaLaunchKernelEx(&one, k_fill, a, 1.0f, 64));
            ok(cudaStreamSynchronize(s));
            ok(cudaLaunchKernelEx(&one, k_add, b, a, 1.0f, 64));
            if (has_event) {
                ok(cudaEventRecord(e, s));
                ok(cudaStreamWaitEvent(t, e, 0));
            }
            ok(cudaLaunchKernelEx(&two, k_fill, a, 7.0f, 64));
            ok(cudaStreamSynchronize(s));
            ok(cudaStreamSynchronize(t));
            wrong += !(peek(&b[5]) == 2.0f);
        }
        assert_in_range(wrong, has_event ? 0 : 90, has_event ? 0 : 100);
    }
    emulation_reset(1);
}

/* Pinned memory is read when the copy runs, not when it is queued; pageable memory at the call. */
static void copies_are_late(void **) {
    int late = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        emulation_reset(seed);
        int *const device = on_device<int>(2);
        int *pinned = nullptr, paged = 5;
        ok(cudaMallocHost(&pinned, sizeof(int)));
        const cudaStream_t s = new_stream();
        *pinned = 5;
        ok(cudaMemcpyAsync(device, pinned, sizeof(int), cudaMemcpyHostToDevice, s));
        ok(cudaMemcpyAsync(device + 1, &paged, sizeof(int), cudaMemcpyHostToDevice, s));
        *pinned = 6;
        paged = 6;
        ok(cudaStreamSynchronize(s));
        assert_int_equal(peek(device + 1), 5);
        late += peek(device) == 6;
        *pinned = 0;
        ok(cudaMemcpyAsync(pinned, device + 1, sizeof(int), cudaMemcpyDeviceToHost, s));
        assert_int_equal(*pinned, 0);
        paged = 0;
        ok(cudaMemcpyAsync(&paged, device + 1, sizeof(int), cudaMemcpyDeviceToHost, s));
        assert_int_equal(paged, 5);
        assert_int_equal(*pinned, 5);
        assert_int_equal(emulation_count().host_waits, 2);
    }
    assert_int_equal(late, 20);
    emulation_reset(1);
}

/* ---- nets: threads ---- */

/* Reverses each block of 64; without the barrier, reads what is not there. */
static __global__ void k_reverse(float *x, bool has_barrier) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    if (has_barrier) {
        __syncthreads();
    }
    x[blockIdx.x * 64 + threadIdx.x] = tile[63 - threadIdx.x];
}

/* Shifts by one, again and again; without the second barrier, some write before others read. */
static __global__ void k_rotate(int *x, int times, bool has_barrier) {
    __shared__ int ring[64];
    ring[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    for (int i = 0; i < times; i++) {
        const int next = ring[(threadIdx.x + 1) % 64];
        if (has_barrier) {
            __syncthreads();
        }
        ring[threadIdx.x] = next;
        __syncthreads();
    }
    x[threadIdx.x] = ring[threadIdx.x];
}

/* Sums over the block, twice; without the last barrier a warp overwrites what others still read,
 * though all of them exchange values in between. */
static __global__ void k_two_sums(int *x, bool has_barrier) {
    __shared__ int parts[4];
    int total = 0;
    for (int round = 1; round <= 2; round++) {
        int v = round;
        for (int d = 16; d; d /= 2) {
            v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
        }
        if (threadIdx.x % 32 == 0) {
            parts[threadIdx.x / 32] = v;
        }
        __syncthreads();
        total = total * 1000 + parts[0] + parts[1] + parts[2] + parts[3];
        if (has_barrier) {
            __syncthreads();
        }
    }
    x[threadIdx.x] = total;
}

static bool are_summed(bool has_barrier) {
    int host[128], *const x = on_device<int>(128);
    const cudaLaunchConfig_t c = grid(1, 128, nullptr);
    ok(cudaLaunchKernelEx(&c, k_two_sums, x, has_barrier));
    ok(cudaMemcpy(host, x, sizeof(host), cudaMemcpyDeviceToHost));
    for (int i = 0; i < 128; i++) {
        if (host[i] != 128256) {
            return false;
        }
    }
    return true;
}

static bool is_reversed(bool has_barrier) {
    float host[128], *const x = on_device<float>(128);
    for (int i = 0; i < 128; i++) {
        host[i] = static_cast<float>(i);
    }
    emulation_poke(x, host, sizeof(host));
    const cudaLaunchConfig_t c = grid(2, 64, nullptr);
    ok(cudaLaunchKernelEx(&c, k_reverse, x, has_barrier));
    ok(cudaMemcpy(host, x, sizeof(host), cudaMemcpyDeviceToHost));
    for (int i = 0; i < 128; i++) {
        if (!(host[i] == static_cast<float>(i / 64 * 64 + 63 - i % 64))) {
            return false;
        }
    }
    return true;
}

static bool is_rotated(bool has_barrier) {
    int host[64], *const x = on_device<int>(64);
    for (int i = 0; i < 64; i++) {
        host[i] = i;
    }
    emulation_poke(x, host, sizeof(host));
    const cudaLaunchConfig_t c = grid(1, 64, nullptr);
    ok(cudaLaunchKernelEx(&c, k_rotate, x, 5, has_barrier));
    ok(cudaMemcpy(host, x, sizeof(host), cudaMemcpyDeviceToHost));
    for (int i = 0; i < 64; i++) {
        if (host[i] != (i + 5) % 64) {
            return false;
        }
    }
    return true;
}

static void net_catches_a_missing_barrier(void **) {
    int reversed = 0, rotated = 0, summed = 0;
    for (uint64_t seed = 1; seed <= 100; seed++) {
        emulation_reset(seed);
        assert_true(is_reversed(true) && is_rotated(true) && are_summed(true));
        reversed += !is_reversed(false);
        rotated += !is_rotated(false);
        summed += !are_summed(false);
    }
    print_message("missing __syncthreads: wrong for %d, %d and %d of 100 seeds\n", reversed,
                  rotated, summed);
    assert_int_equal(reversed, 100);
    assert_int_equal(rotated, 100);
    assert_in_range(summed, 80, 100);
}

static __global__ void k_some_at_barrier(int how) {
    if (how == 0 && threadIdx.x < 16) {
        __syncthreads();
    }
    if (how == 1) {
        if (threadIdx.x < 16) {
            __syncthreads();
        } else {
            __syncthreads();
        }
    }
    if (how == 2) {
        if (threadIdx.x == 40) {
            return;
        }
        __syncthreads();
    }
    if (how == 3) {
        if (threadIdx.x % 2) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    }
}

static __global__ void k_warp_apart(int how) {
    if (how == 0) {
        __shfl_sync(threadIdx.x < 3 ? 0xFu : 0xFFFFFFFFu, 1, 0);
    } else if (how == 1) {
        __ballot_sync(0xFFFF0000u, 1);
    } else if (how == 2) {
        if (threadIdx.x % 2) {
            __shfl_xor_sync(0xFFFFFFFFu, 1, 1);
        } else {
            __shfl_down_sync(0xFFFFFFFFu, 1, 1);
        }
    } else {
        __shfl_sync(0xFFFFFFFFu, 1, 0, 12);
    }
}

static void launch_some_at_barrier(void *how) {
    const cudaLaunchConfig_t c = grid(1, 64, nullptr);
    cudaLaunchKernelEx(&c, k_some_at_barrier, *static_cast<int *>(how));
    cudaDeviceSynchronize();
}

static void launch_warp_apart(void *how) {
    const cudaLaunchConfig_t c = grid(1, 64, nullptr);
    cudaLaunchKernelEx(&c, k_warp_apart, *static_cast<int *>(how));
    cudaDeviceSynchronize();
}

static void net_catches_threads_apart(void **) {
    static const char *const parts[] = {"has returned", "waits at", "thread (40,0,0) has returned",
                                        "__syncwarp"};
    for (int how = 0; how < 4; how++) {
        expect_caught(launch_some_at_barrier, &how,
                      "kernel k_some_at_barrier: __syncthreads not reached by all threads",
                      parts[how]);
    }
    static const char *const warp_parts[] = {"__shfl_sync not reached", "lane", "_sync not reached",
                                             "width 12"};
    for (int how = 0; how < 4; how++) {
        expect_caught(launch_warp_apart, &how, "kernel k_warp_apart", warp_parts[how]);
    }
}

/* ---- nets: memory ---- */

typedef struct reach {
    float *device, *pinned, *host;
    int how;
} reach;

static __global__ void k_touch(float *x, int64_t at) {
    x[at] = x[at] + 1.0f;
}

static volatile float sink;

static void touch_from_host(void *user) {
    const reach *const r = static_cast<reach *>(user);
    switch (r->how) {
    case 0:
        sink = r->device[3];
        break;
    case 1:
        r->device[100] = 0.0f; /* the last */
        break;
    default:
        cudaFree(r->device);
        sink = r->device[0];
    }
}

static void touch_from_kernel(void *user) {
    const reach *const r = static_cast<reach *>(user);
    float *const nowhere = reinterpret_cast<float *>(static_cast<uintptr_t>(4096));
    float *const where[] = {r->pinned, r->host, r->device, nowhere, r->device};
    const int64_t at[] = {1, 2, 101 + 64, 0, -64 - 1024};
    const cudaLaunchConfig_t c = grid(1, 1, nullptr);
    cudaLaunchKernelEx(&c, k_touch, where[r->how], at[r->how]);
    cudaDeviceSynchronize();
}

static reach new_reach(int how) {
    reach r = {on_device<float>(101), nullptr, nullptr, how};
    ok(cudaMallocHost(&r.pinned, 100));
    r.host = static_cast<float *>(emulation_host_alloc(400));
    r.host[0] = r.pinned[0] = 1.0f;
    return r;
}

static void net_catches_wrong_memory(void **) {
    static const char *const on_host[] = {"offset 12 of an allocation of 404 bytes",
                                          "offset 400 of an allocation of 404 bytes",
                                          "offset 0 of 404 bytes that were freed"};
    static const char *const on_kernel[] = {
        "touched pinned memory", "touched host memory", "after the end of an allocation of 404",
        "which is not device memory", "before an allocation of 404 bytes"};
    for (int how = 0; how < 3; how++) {
        reach r = new_reach(how);
        expect_caught(touch_from_host, &r, "host code touched device memory", on_host[how]);
        emulation_host_release(r.host);
    }
    for (int how = 0; how < 5; how++) {
        reach r = new_reach(how);
        expect_caught(touch_from_kernel, &r, "kernel k_touch, thread (0,0,0) of block (0,0,0)",
                      on_kernel[how]);
        r.host[1] = 2.0f; /* open again */
        emulation_host_release(r.host);
    }
}

static __global__ void k_trap(float *x) {
    if (threadIdx.x == 7) {
        __builtin_trap();
    }
    x[threadIdx.x] = 1.0f;
}

static void launch_trap(void *) {
    float *const x = on_device<float>(64);
    const cudaLaunchConfig_t c = grid(1, 64, nullptr);
    cudaLaunchKernelEx(&c, k_trap, x);
    cudaDeviceSynchronize();
}

/* What compilers put where an address is misaligned, if they are told to. */
static void net_catches_traps(void **) {
    expect_caught(launch_trap, nullptr, "kernel k_trap, thread (7,0,0)", "misaligned");
}

static void write_past_the_end(void *) {
    float *const x = on_device<float>(5);
    const cudaLaunchConfig_t c = grid(1, 1, nullptr);
    cudaMemset(x, 0, 20);
    cudaLaunchKernelEx(&c, k_touch, x, static_cast<int64_t>(7));
    cudaFree(x);
}

static void net_catches_a_small_overrun(void **) {
    expect_caught(write_past_the_end, nullptr, "device memory was written 8 bytes after the end",
                  "20 bytes");
}

static void memory_starts_as_rubbish(void **) {
    uint32_t first = 0;
    bool differs = false;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        emulation_reset(seed);
        uint32_t *const x = on_device<uint32_t>(1000);
        assert_int_not_equal(peek(x), 0);
        assert_int_equal(peek(x), peek(x + 999));
        differs = differs || (first && first != peek(x));
        first = peek(x);
        assert_int_equal(reinterpret_cast<uintptr_t>(x) % 256, 0);
    }
    assert_true(differs);
}

static cublasStatus_t multiply(cublasHandle_t h, const float *a, const float *b, float *c,
                               cublasComputeType_t compute);

/* What tests with host callbacks ask for. */
static void memory_opens_on_request(void **) {
    float *const x = on_device<float>(64), host[64] = {1.0f};
    const cudaStream_t s = new_stream();
    const cudaLaunchConfig_t c = grid(1, 64, s);
    assert_true(emulation_is_device(x) && !emulation_is_device(host));
    emulation_open(true);
    x[3] = 1.0f;
    ok(cudaLaunchKernelEx(&c, k_add, x, x, 1.0f, 64));
    ok(cudaStreamSynchronize(s));
    assert_true(x[3] == 2.0f);
    float *const y = on_device<float>(64);
    y[0] = 0.0f;
    fails(cudaErrorInvalidValue, cudaMemcpyAsync(x, host, 4, cudaMemcpyDeviceToDevice, s));
    emulation_set_pageable_access(true);
    ok(cudaMemcpyAsync(x, host, 4, cudaMemcpyDeviceToDevice, s));
    ok(cudaMemsetAsync(host + 1, 0, 4, s));
    host[0] = 5.0f;
    ok(cudaStreamSynchronize(s));
    assert_true(x[0] == 5.0f); /* as late as copies on the device */
    cublasHandle_t h = nullptr;
    host[0] = host[1] = 3.0f;
    assert_int_equal(cublasCreate(&h), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(multiply(h, host, host + 1, x, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_SUCCESS);
    emulation_finish();
    assert_true(x[0] == 9.0f);
    assert_int_equal(cublasDestroy(h), CUBLAS_STATUS_SUCCESS);
    emulation_set_pageable_access(false);
    emulation_open(false);
    reach r = {x, nullptr, nullptr, 0};
    expect_caught(touch_from_host, &r, "host code touched device memory", "offset 12");
}

static __global__ void k_deep(int *out, int bytes) {
    volatile char space[700 * 1000];
    for (int i = 0; i < bytes; i += 4096) {
        space[i] = 1;
    }
    *out = space[0];
}

static void single_threads_have_room(void **) {
    int *const x = on_device<int>(1);
    const cudaLaunchConfig_t c = grid(1, 1, nullptr);
    ok(cudaLaunchKernelEx(&c, k_deep, x, 700 * 1000));
    emulation_finish();
    assert_int_equal(peek(x), 1);
}

/* ---- kernels against loops ---- */

static __global__ void k_index(int *out, int nx, int ny) {
    const int x = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int y = static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y);
    const int z = static_cast<int>(blockIdx.z * blockDim.z + threadIdx.z);
    out[(z * ny + y) * nx + x] = x + 100 * y + 10000 * z;
}

static void grids_have_three_dimensions(void **) {
    const int nx = 12, ny = 10, nz = 6;
    int host[12 * 10 * 6], *const x = on_device<int>(12 * 10 * 6);
    cudaLaunchConfig_t c = cudaLaunchConfig_t();
    c.gridDim = dim3(3, 2, 3);
    c.blockDim = dim3(4, 5, 2);
    ok(cudaLaunchKernelEx(&c, k_index, x, nx, ny));
    ok(cudaMemcpy(host, x, sizeof(host), cudaMemcpyDeviceToHost));
    for (int i = 0; i < nx * ny * nz; i++) {
        assert_int_equal(host[i], i % nx + 100 * (i / nx % ny) + 10000 * (i / nx / ny));
    }
}

enum { WARP_RESULTS = 10 };

static __global__ void k_warps(int *out, double *doubles) {
    const int t = static_cast<int>(threadIdx.x), v = t * t + 1;
    int *const r = out + t * WARP_RESULTS;
    r[0] = __shfl_sync(0xFFFFFFFFu, v, 5);
    r[1] = __shfl_up_sync(0xFFFFFFFFu, v, 3u);
    r[2] = __shfl_down_sync(0xFFFFFFFFu, v, 7u);
    r[3] = __shfl_xor_sync(0xFFFFFFFFu, v, 9);
    r[4] = __shfl_down_sync(0xFFFFFFFFu, v, 2u, 8);
    r[5] = __shfl_sync(0xFFFFFFFFu, v, 11, 8);
    r[6] = static_cast<int>(__ballot_sync(0xFFFFFFFFu, t % 3 == 0));
    r[7] = __any_sync(0xFFFFFFFFu, t == 33);
    r[8] = __all_sync(0xFFFFFFFFu, t >= 32);
    if (t % 32 < 16) { /* half a warp, and doubles */
        doubles[t] = __shfl_xor_sync(0x0000FFFFu, t + 0.5, 15);
    } else {
        doubles[t] = __shfl_xor_sync(0xFFFF0000u, t + 0.25, 1);
    }
    __syncwarp();
    r[9] = __popc(__ballot_sync(0xFFFFFFFFu, 1));
}

static void check_lane(const int *r, double d, int t) {
    const int w = t / 32 * 32, l = t % 32;
    const int from[6] = {5,     l < 3 ? l : l - 3,         l + 7 > 31 ? l : l + 7,
                         l ^ 9, l % 8 + 2 > 7 ? l : l + 2, l / 8 * 8 + 3};
    for (int i = 0; i < 6; i++) {
        assert_int_equal(r[i], (w + from[i]) * (w + from[i]) + 1);
    }
    unsigned ballot = 0;
    for (int i = 0; i < 32; i++) {
        ballot |= (w + i) % 3 == 0 ? 1u << i : 0u;
    }
    assert_int_equal(static_cast<unsigned>(r[6]), ballot);
    assert_int_equal(r[7], w == 32);
    assert_int_equal(r[8], w == 32);
    assert_int_equal(r[9], 32);
    assert_true(d == (l < 16 ? (w + (l ^ 15)) + 0.5 : (w + (l ^ 1)) + 0.25));
}

static void warps_exchange_values(void **) {
    for (uint64_t seed = 0; seed < 20; seed++) {
        emulation_reset(seed);
        int host[64 * WARP_RESULTS], *const out = on_device<int>(64 * WARP_RESULTS);
        double doubles[64], *const d = on_device<double>(64);
        const cudaLaunchConfig_t c = grid(1, 64, nullptr);
        ok(cudaLaunchKernelEx(&c, k_warps, out, d));
        ok(cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost));
        ok(cudaMemcpy(doubles, d, sizeof(doubles), cudaMemcpyDeviceToHost));
        for (int t = 0; t < 64; t++) {
            check_lane(host + t * WARP_RESULTS, doubles[t], t);
        }
    }
}

/* A block that is no whole number of warps, lanes that have returned, barriers in between. */
static __global__ void k_block_sum(float *out, const float *x, int n) {
    __shared__ float parts[32];
    float s = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
        s += x[i];
    }
    for (unsigned d = 16; d; d /= 2) {
        const float other = __shfl_down_sync(0xFFFFFFFFu, s, d);
        s += threadIdx.x + d < blockDim.x ? other : 0.0f;
    }
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = s;
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    const unsigned warps = (blockDim.x + 31) / 32;
    s = threadIdx.x < warps ? parts[threadIdx.x] : 0.0f;
    for (unsigned d = 16; d; d /= 2) {
        s += __shfl_down_sync(0xFFFFFFFFu, s, d);
    }
    if (threadIdx.x == 0) {
        *out = s;
    }
}

/* The last block to arrive adds up what all have left. */
static __global__ void k_grid_sum(unsigned *count, unsigned *parts, unsigned *out) {
    __shared__ unsigned sum, arrived;
    if (threadIdx.x == 0) {
        sum = 0;
    }
    __syncthreads();
    atomicAdd(&sum, blockIdx.x + threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
        __threadfence();
        arrived = atomicAdd(count, 1u);
    }
    __syncthreads();
    if (arrived == gridDim.x - 1 && threadIdx.x == 0) {
        for (unsigned i = 0; i < gridDim.x; i++) {
            *out += parts[i];
        }
    }
}

static void blocks_add_up(void **) {
    static const unsigned sizes[] = {64, 1, 33, 100, 256, 1024};
    for (uint64_t seed = 0; seed < 12; seed++) {
        emulation_reset(seed);
        const int n = 777;
        float host[777], want = 0.0f, got, *const x = on_device<float>(777);
        for (int i = 0; i < n; i++) {
            host[i] = static_cast<float>(i % 10);
            want += host[i];
        }
        ok(cudaMemcpy(x, host, sizeof(host), cudaMemcpyHostToDevice));
        const cudaLaunchConfig_t c = grid(1, sizes[seed % 6] < 32 ? 32 : sizes[seed % 6], nullptr);
        float *const out = on_device<float>(1);
        ok(cudaLaunchKernelEx(&c, k_block_sum, out, x, n));
        ok(cudaMemcpy(&got, out, sizeof(got), cudaMemcpyDeviceToHost));
        assert_true(got == want);
        unsigned *const u = on_device<unsigned>(22), sum = 0;
        ok(cudaMemset(u, 0, 22 * sizeof(unsigned)));
        const cudaLaunchConfig_t g = grid(20, 48, nullptr);
        ok(cudaLaunchKernelEx(&g, k_grid_sum, u, u + 2, u + 1));
        ok(cudaMemcpy(&sum, u + 1, sizeof(sum), cudaMemcpyDeviceToHost));
        assert_int_equal(sum, 48 * (19 * 20 / 2) + 20 * (47 * 48 / 2));
    }
}

static __global__ void k_atomics(int *i, unsigned *u, unsigned long long *l, float *f) {
    const int t = static_cast<int>(threadIdx.x);
    atomicAdd(&i[0], t - 10);
    atomicMax(&i[1], t);
    atomicMin(&i[2], t);
    atomicAdd(l, 1ull << 33);
    atomicAdd(f, 0.5f);
    atomicOr(&u[0], 1u << t % 32);
    atomicMax(&u[1], __float_as_uint(static_cast<float>(t)));
    for (unsigned old = u[2], seen; (seen = atomicCAS(&u[2], old, old + 3)) != old;) {
        old = seen;
    }
    if (atomicExch(&i[3], 1) == 0) {
        atomicAdd(&i[4], 1);
    }
}

static void atomics_count(void **) {
    int i[5];
    unsigned u[3];
    unsigned long long l;
    float f;
    char *const x = on_device<char>(256);
    int *const di = reinterpret_cast<int *>(x);
    unsigned *const du = reinterpret_cast<unsigned *>(x + 64);
    unsigned long long *const dl = reinterpret_cast<unsigned long long *>(x + 128);
    float *const df = reinterpret_cast<float *>(x + 192);
    ok(cudaMemset(x, 0, 256));
    const cudaLaunchConfig_t c = grid(2, 96, nullptr);
    ok(cudaLaunchKernelEx(&c, k_atomics, di, du, dl, df));
    ok(cudaMemcpy(i, di, sizeof(i), cudaMemcpyDeviceToHost));
    ok(cudaMemcpy(u, du, sizeof(u), cudaMemcpyDeviceToHost));
    ok(cudaMemcpy(&l, dl, sizeof(l), cudaMemcpyDeviceToHost));
    ok(cudaMemcpy(&f, df, sizeof(f), cudaMemcpyDeviceToHost));
    assert_int_equal(i[0], 2 * (95 * 96 / 2 - 960));
    assert_int_equal(i[1], 95);
    assert_int_equal(i[2], 0);
    assert_int_equal(i[4], 1);
    assert_int_equal(u[0], 0xFFFFFFFFu);
    assert_int_equal(u[1], __float_as_uint(95.0f));
    assert_int_equal(u[2], 3 * 192);
    assert_true(l == 192ull << 33 && f == 96.0f);
}

/* Values of every kind reach a kernel; conversions are those of a call. */
typedef struct plain {
    float x[3];
    int64_t n;
} plain;

static __global__ void k_values(double *out, plain p, float4 v, const float *f, char c, int64_t n) {
    out[0] = p.x[2] + static_cast<double>(p.n);
    out[1] = v.x + 10 * v.y + 100 * v.z + 1000 * v.w;
    out[2] = f ? 1 : 0;
    out[3] = c;
    out[4] = static_cast<double>(n);
    out[5] = __fadd_rn(__fmul_rn(1.0f + 1.0f / 4096, 1.0f + 1.0f / 4096), -1.0f);
    out[6] = __fmaf_rn(1.0f + 1.0f / 4096, 1.0f + 1.0f / 4096, -1.0f);
    out[7] = rsqrtf(4.0f) + __fsqrt_rn(9.0f) + __fdiv_rn(1.0f, 4.0f) + __expf(0.0f);
    out[8] = __ffs(8) + __popc(7) + __clz(1) + static_cast<double>(__ldg(f));
    out[9] = __uint_as_float(0x40490FDBu);
}

static void kernels_get_values(void **) {
    double host[10], *const out = on_device<double>(10);
    float *const f = on_device<float>(1);
    const plain p = {{1, 2, 3}, INT64_C(1) << 40};
    const cudaLaunchConfig_t c = grid(1, 1, nullptr);
    ok(cudaMemset(f, 0, sizeof(float)));
    ok(cudaLaunchKernelEx(&c, k_values, out, p, make_float4(1, 2, 3, 4), f, 'A', -5));
    ok(cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost));
    assert_true(host[0] == 3.0 + 1099511627776.0);
    assert_true(host[1] == 4321 && host[2] == 1 && host[3] == 'A' && host[4] == -5);
    assert_true(host[5] == 2.0 / 4096); /* 1/4096^2 is rounded away, where it is not fused */
    assert_true(host[6] == 2.0 / 4096 + 1.0 / 16777216);
    assert_true(host[7] == 0.5 + 3 + 0.25 + 1 && host[8] == 4 + 3 + 31);
    assert_true(static_cast<float>(host[9]) == 3.14159274f);
}

/* ---- products ---- */

typedef struct gemm_case {
    int m, n, k, count;
    cublasOperation_t ta, tb;
    cudaDataType in, out;
    float alpha, beta;
    int pad; /* between columns */
    bool shares_b;
} gemm_case;

static float as_float(uint16_t h, cudaDataType type) {
    if (type == CUDA_R_16BF) {
        return __uint_as_float(static_cast<unsigned>(h) << 16);
    }
    const float m = static_cast<float>(h & 1023), sign = h & 0x8000 ? -1.0f : 1.0f;
    const int e = h >> 10 & 31;
    return sign * (e ? ldexpf(1 + m / 1024, e - 15) : ldexpf(m, -24));
}

static double element(const void *x, cudaDataType type, int64_t i) {
    return type == CUDA_R_32F
               ? static_cast<double>(static_cast<const float *>(x)[i])
               : static_cast<double>(as_float(static_cast<const uint16_t *>(x)[i], type));
}

/* Values that each type holds exactly. */
static void set_element(void *x, cudaDataType type, int64_t i, unsigned seed) {
    const int v = static_cast<int>(seed * 2654435761u >> 20 & 63) - 32;
    if (type == CUDA_R_32F) {
        static_cast<float *>(x)[i] = static_cast<float>(v) / 16;
        return;
    }
    const unsigned bits = __float_as_uint(static_cast<float>(v) / 16);
    const unsigned half =
        v == 0 ? 0 : (bits >> 16 & 0x8000) | ((bits - 0x38000000u) >> 13 & 0x7FFF);
    static_cast<uint16_t *>(x)[i] = static_cast<uint16_t>(type == CUDA_R_16BF ? bits >> 16 : half);
}

typedef struct gemm_data {
    char *host, *device;
    int64_t count, leading, step;
    size_t width;
} gemm_data;

static gemm_data new_matrix(cudaDataType type, int rows, int columns, int count, int pad,
                            unsigned seed) {
    gemm_data d;
    d.leading = rows + pad ? rows + pad : 1;
    d.step = count > 1 ? d.leading * columns + 3 : 0;
    d.count = d.step * (count - 1) + d.leading * columns;
    d.width = type == CUDA_R_32F ? 4 : 2;
    const size_t bytes = static_cast<size_t>(d.count) * d.width;
    d.host = static_cast<char *>(malloc(bytes));
    d.device = on_device<char>(bytes);
    for (int64_t i = 0; i < d.count; i++) {
        set_element(d.host, type, i, seed + static_cast<unsigned>(i));
    }
    ok(cudaMemcpy(d.device, d.host, bytes, cudaMemcpyHostToDevice));
    return d;
}

static double reference(const gemm_case *g, const gemm_data *a, const gemm_data *b, int64_t i,
                        int64_t j, int64_t batch) {
    double sum = 0.0;
    for (int64_t p = 0; p < g->k; p++) {
        const int64_t ia = g->ta == CUBLAS_OP_N ? i + p * a->leading : p + i * a->leading;
        const int64_t ib = g->tb == CUBLAS_OP_N ? p + j * b->leading : j + p * b->leading;
        sum += element(a->host, g->in, ia + batch * a->step) *
               element(b->host, g->in, ib + batch * b->step);
    }
    return sum;
}

static void check_products(const gemm_case *g, const gemm_data *a, const gemm_data *b,
                           const gemm_data *c) {
    char *const after = static_cast<char *>(malloc(static_cast<size_t>(c->count) * c->width));
    ok(cudaMemcpy(after, c->device, static_cast<size_t>(c->count) * c->width,
                  cudaMemcpyDeviceToHost));
    const double unit = g->out == CUDA_R_32F ? 1e-5 : g->out == CUDA_R_16F ? 1.0 / 1024 : 1.0 / 128;
    for (int64_t x = 0; x < c->count; x++) {
        const int64_t batch = c->step ? x / c->step : 0, rest = x - batch * c->step;
        const int64_t i = rest % c->leading, j = rest / c->leading;
        const double old = element(c->host, g->out, x), got = element(after, g->out, x);
        if (i >= g->m || j >= g->n) { /* between the columns */
            assert_true(got == old);
            continue;
        }
        const double want = static_cast<double>(g->alpha) * reference(g, a, b, i, j, batch) +
                            static_cast<double>(g->beta) * old;
        assert_true(fabs(got - want) <= unit * (1.0 + fabs(want)));
    }
    free(after);
}

static void run_gemm(cublasHandle_t handle, const gemm_case *g) {
    const bool na = g->ta == CUBLAS_OP_N, nb = g->tb == CUBLAS_OP_N;
    gemm_data a = new_matrix(g->in, na ? g->m : g->k, na ? g->k : g->m, g->count, g->pad, 1);
    gemm_data b = new_matrix(g->in, nb ? g->k : g->n, nb ? g->n : g->k, g->shares_b ? 1 : g->count,
                             g->pad, 5000);
    gemm_data c = new_matrix(g->out, g->m, g->n, g->count, g->pad, 90000);
    const int lda = static_cast<int>(a.leading), ldb = static_cast<int>(b.leading);
    const int ldc = static_cast<int>(c.leading);
    const cublasStatus_t status =
        g->count == 1
            ? cublasGemmEx(handle, g->ta, g->tb, g->m, g->n, g->k, &g->alpha, a.device, g->in, lda,
                           b.device, g->in, ldb, &g->beta, c.device, g->out, ldc,
                           CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT)
            : cublasGemmStridedBatchedEx(handle, g->ta, g->tb, g->m, g->n, g->k, &g->alpha,
                                         a.device, g->in, lda, a.step, b.device, g->in, ldb, b.step,
                                         &g->beta, c.device, g->out, ldc, c.step, g->count,
                                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    assert_string_equal(cublasGetStatusString(status), "success");
    check_products(g, &a, &b, &c);
    gemm_data *const all[] = {&a, &b, &c};
    for (int i = 0; i < 3; i++) {
        free(all[i]->host);
        ok(cudaFree(all[i]->device));
    }
}

static void products_are_right(void **) {
    static const gemm_case cases[] = {
        {1, 1, 1, 1, CUBLAS_OP_N, CUBLAS_OP_N, CUDA_R_32F, CUDA_R_32F, 1, 0, 0, false},
        {17, 13, 9, 1, CUBLAS_OP_N, CUBLAS_OP_N, CUDA_R_32F, CUDA_R_32F, 1, 0, 0, false},
        {8, 6, 32, 1, CUBLAS_OP_T, CUBLAS_OP_N, CUDA_R_32F, CUDA_R_32F, 0.5f, 2, 3, false},
        {20, 7, 5, 4, CUBLAS_OP_N, CUBLAS_OP_T, CUDA_R_32F, CUDA_R_32F, 1, 1, 1, false},
        {31, 33, 40, 3, CUBLAS_OP_T, CUBLAS_OP_T, CUDA_R_32F, CUDA_R_32F, -1, 0, 2, true},
        {19, 18, 17, 2, CUBLAS_OP_N, CUBLAS_OP_N, CUDA_R_16F, CUDA_R_16F, 1, 0, 0, false},
        {19, 18, 17, 2, CUBLAS_OP_T, CUBLAS_OP_N, CUDA_R_16F, CUDA_R_32F, 1, 0.5f, 1, false},
        {9, 24, 12, 2, CUBLAS_OP_N, CUBLAS_OP_T, CUDA_R_16BF, CUDA_R_16BF, 1, 0, 0, false},
        {9, 24, 12, 2, CUBLAS_OP_T, CUBLAS_OP_T, CUDA_R_16BF, CUDA_R_32F, 2, 1, 0, false},
        {5, 5, 0, 1, CUBLAS_OP_N, CUBLAS_OP_N, CUDA_R_32F, CUDA_R_32F, 1, 0.5f, 0, false},
    };
    cublasHandle_t handle = nullptr;
    assert_int_equal(cublasCreate(&handle), CUBLAS_STATUS_SUCCESS);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        run_gemm(handle, &cases[i]);
    }
    assert_int_equal(emulation_count().products, sizeof(cases) / sizeof(cases[0]));
    assert_int_equal(cublasDestroy(handle), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(emulation_count().device_bytes, 0);
}

static cublasStatus_t multiply(cublasHandle_t h, const float *a, const float *b, float *c,
                               cublasComputeType_t compute) {
    const float one = 1.0f, zero = 0.0f;
    return cublasGemmStridedBatchedEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, a, CUDA_R_32F, 1,
                                      0, b, CUDA_R_32F, 1, 0, &zero, c, CUDA_R_32F, 1, 0, 1,
                                      compute, CUBLAS_GEMM_DEFAULT);
}

/* TF32 keeps ten bits; old devices have none. The workspace is scribbled over, C is not read where
 * beta is 0. */
static void products_have_modes(void **) {
    const float exact = 1.0f + 1.0f / 8192;
    float *const x = on_device<float>(1), *const y = on_device<float>(1);
    char *const space = on_device<char>(512);
    cublasHandle_t h = nullptr;
    assert_int_equal(cublasCreate(&h), CUBLAS_STATUS_SUCCESS);
    ok(cudaMemcpy(x, &exact, sizeof(exact), cudaMemcpyHostToDevice));
    assert_int_equal(cublasSetWorkspace(h, space + 1, 256), CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(cublasSetWorkspace(h, space, 1024), CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(cublasSetWorkspace(h, space, 256), CUBLAS_STATUS_SUCCESS);
    ok(cudaMemset(space, 0, 512));
    for (int old = 0; old < 2; old++) {
        emulation_device d = emulation_get_device();
        d.compute_major = old ? 7 : 9;
        emulation_set_device(&d);
        assert_int_equal(multiply(h, x, x, y, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_SUCCESS);
        emulation_finish();
        assert_true(peek(y) == exact * exact);
        assert_int_equal(cublasSetMathMode(h, CUBLAS_TF32_TENSOR_OP_MATH), CUBLAS_STATUS_SUCCESS);
        assert_int_equal(multiply(h, x, x, y, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_SUCCESS);
        emulation_finish();
        assert_true(peek(y) == (old ? exact * exact : 1.0f));
        assert_int_equal(multiply(h, x, x, y, CUBLAS_COMPUTE_32F_PEDANTIC), CUBLAS_STATUS_SUCCESS);
        emulation_finish();
        assert_true(peek(y) == exact * exact);
        assert_int_equal(cublasSetMathMode(h, CUBLAS_DEFAULT_MATH), CUBLAS_STATUS_SUCCESS);
    }
    assert_int_equal(peek(space) & 255, 0xA7);
    assert_int_equal(peek(space + 256), 0);
    assert_int_equal(emulation_count().device_allocations, 3); /* no workspace of its own */
    assert_int_equal(cublasSetStream(h, nullptr), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(multiply(h, x, x, y, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(emulation_count().device_allocations, 4); /* the stream took the other away */
    assert_int_equal(cublasDestroy(h), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(cublasDestroy(h), CUBLAS_STATUS_NOT_INITIALIZED);
    assert_int_equal(emulation_count().device_allocations, 3);
}

static void products_are_checked(void **) {
    const float one = 1.0f;
    float *const x = on_device<float>(64);
    cublasHandle_t h = nullptr;
    assert_int_equal(cublasCreate(&h), CUBLAS_STATUS_SUCCESS);
    const struct {
        int m, lda, ldc, count;
        long long step;
        cudaDataType type;
        cublasComputeType_t compute;
        cublasStatus_t want;
    } cases[] = {
        {4, 3, 4, 1, 0, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_STATUS_INVALID_VALUE},
        {4, 4, 3, 1, 0, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_STATUS_INVALID_VALUE},
        {-1, 4, 4, 1, 0, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_STATUS_INVALID_VALUE},
        {4, 4, 4, 2, 0, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_STATUS_INVALID_VALUE},
        {4, 4, 4, 1, 0, CUDA_R_32F, CUBLAS_COMPUTE_16F, CUBLAS_STATUS_NOT_SUPPORTED},
        {4, 4, 4, 1, 0, CUDA_R_64F, CUBLAS_COMPUTE_32F, CUBLAS_STATUS_NOT_SUPPORTED},
        {0, 4, 4, 1, 0, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_STATUS_SUCCESS},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const cublasStatus_t got = cublasGemmStridedBatchedEx(
            h, CUBLAS_OP_N, CUBLAS_OP_N, cases[i].m, 4, 4, &one, x, cases[i].type, cases[i].lda,
            cases[i].step, x, cases[i].type, 4, 0, &one, x, cases[i].type, cases[i].ldc,
            cases[i].step, cases[i].count, cases[i].compute, CUBLAS_GEMM_DEFAULT);
        assert_string_equal(cublasGetStatusName(got), cublasGetStatusName(cases[i].want));
    }
    assert_int_equal(cublasDestroy(h), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(multiply(h, x, x, x, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_NOT_INITIALIZED);
}

static void multiply_past_the_end(void *) {
    const float one = 1.0f;
    float *const x = on_device<float>(15);
    cublasHandle_t h = nullptr;
    cublasCreate(&h);
    cublasGemmStridedBatchedEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, x, CUDA_R_32F, 4, 0, x,
                               CUDA_R_32F, 4, 0, &one, x, CUDA_R_32F, 4, 0, 1, CUBLAS_COMPUTE_32F,
                               CUBLAS_GEMM_DEFAULT);
    cudaDeviceSynchronize();
}

static void net_catches_a_product_past_the_end(void **) {
    expect_caught(multiply_past_the_end, nullptr, "cublasGemmStridedBatchedEx: A at", "64 bytes");
}

/* ---- graphs ---- */

/* Two streams: b = a + 1 here, c = 2 there; then a = b + c ... all joined. */
static cudaGraph_t capture(const hazard *h, cudaStreamCaptureMode mode) {
    const cudaLaunchConfig_t one = grid(1, 64, h->first), two = grid(1, 64, h->second);
    cudaGraph_t graph = nullptr;
    enum cudaStreamCaptureStatus status;
    ok(cudaStreamBeginCapture(h->first, mode));
    ok(cudaStreamIsCapturing(h->first, &status));
    assert_int_equal(status, cudaStreamCaptureStatusActive);
    ok(cudaLaunchKernelEx(&one, k_add, h->b, h->a, 1.0f, 64));
    ok(cudaEventRecord(h->event, h->first));
    ok(cudaStreamWaitEvent(h->second, h->event, 0));
    ok(cudaLaunchKernelEx(&two, k_add, h->c, h->b, 2.0f, 64));
    ok(cudaMemsetAsync(h->b, 0, 64 * sizeof(float), h->second));
    ok(cudaEventRecord(h->event, h->second));
    ok(cudaStreamWaitEvent(h->first, h->event, 0));
    ok(cudaMemcpyAsync(h->a, h->c, 64 * sizeof(float), cudaMemcpyDeviceToDevice, h->first));
    ok(cudaStreamEndCapture(h->first, &graph));
    ok(cudaStreamIsCapturing(h->second, &status));
    assert_int_equal(status, cudaStreamCaptureStatusNone);
    return graph;
}

static hazard new_hazard() {
    const hazard h = {new_stream(),         new_stream(),         new_event(), on_device<float>(64),
                      on_device<float>(64), on_device<float>(64), 0,           true};
    ok(cudaMemset(h.a, 0, 64 * sizeof(float)));
    emulation_finish();
    return h;
}

static void graphs_replay(void **) {
    for (uint64_t seed = 0; seed < 30; seed++) {
        emulation_reset(seed);
        const hazard h = new_hazard();
        const cudaGraph_t graph = capture(&h, static_cast<cudaStreamCaptureMode>(seed % 3));
        cudaGraphExec_t exec = nullptr;
        ok(cudaGraphInstantiate(&exec, graph, 0));
        ok(cudaGraphDestroy(graph));
        emulation_finish();
        assert_true(peek(h.a) == 0.0f); /* nothing ran */
        for (int i = 0; i < 4; i++) {   /* launches of one graph follow each other */
            ok(cudaGraphLaunch(exec, i % 2 ? h.first : h.second));
        }
        ok(cudaGraphExecDestroy(exec)); /* they still run */
        assert_int_equal(emulation_launches("k_add"), 0);
        ok(cudaStreamSynchronize(h.first));
        ok(cudaStreamSynchronize(h.second));
        assert_true(peek(h.a + 63) == 12.0f);
        assert_int_equal(emulation_launches("k_add"), 8);
        const emulation_counts n = emulation_count();
        assert_true(n.graphs == 0 && n.graph_execs == 0 && n.graph_launches == 4);
        assert_int_equal(n.graphs_cut_off, 1);
    }
}

/* Work that no path joins to the origin; an event from outside; a graph's event outside. */
static void captures_are_joined(void **) {
    const hazard h = new_hazard();
    const cudaLaunchConfig_t two = grid(1, 64, h.second);
    cudaGraph_t graph = nullptr;
    ok(cudaStreamBeginCapture(h.first, cudaStreamCaptureModeThreadLocal));
    ok(cudaEventRecord(h.event, h.first));
    ok(cudaStreamWaitEvent(h.second, h.event, 0));
    ok(cudaLaunchKernelEx(&two, k_fill, h.a, 1.0f, 64));
    fails(cudaErrorStreamCaptureUnmatched, cudaStreamEndCapture(h.second, &graph));
    fails(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(h.first, &graph));
    ok(cudaStreamBeginCapture(h.first, cudaStreamCaptureModeThreadLocal));
    ok(cudaEventRecord(h.event, h.first));
    ok(cudaStreamWaitEvent(h.second, h.event, 0));
    ok(cudaLaunchKernelEx(&two, k_fill, h.a, 1.0f, 64));
    fails(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(h.first, &graph));
    assert_null(graph);
    fails(cudaErrorCapturedEvent, cudaStreamWaitEvent(h.second, h.event, 0));
    ok(cudaEventRecord(h.event, h.second));
    ok(cudaStreamBeginCapture(h.first, cudaStreamCaptureModeRelaxed));
    fails(cudaErrorStreamCaptureIsolation, cudaStreamWaitEvent(h.first, h.event, 0));
    fails(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(h.first, &graph));
    fails(cudaErrorIllegalState, cudaStreamEndCapture(h.first, &graph));
    ok(cudaDeviceSynchronize());
}

static void do_forbidden(const hazard *h, int which, const char **want) {
    float host[64];
    const char *const names[] = {
        cudaGetErrorName(which == 0 ? cudaStreamSynchronize(h->first) : cudaSuccess),
        cudaGetErrorName(which == 1 ? cudaStreamQuery(h->first) : cudaSuccess),
        cudaGetErrorName(which == 2
                             ? cudaMemcpyAsync(host, h->a, 4, cudaMemcpyDeviceToHost, h->first)
                             : cudaSuccess),
        cudaGetErrorName(which == 3
                             ? cudaMemcpyAsync(h->a, host, 4, cudaMemcpyHostToDevice, h->first)
                             : cudaSuccess),
        cudaGetErrorName(which == 4 ? cudaMemcpy(host, h->a, 4, cudaMemcpyDeviceToHost)
                                    : cudaSuccess),
        cudaGetErrorName(which == 5 ? cudaDeviceSynchronize() : cudaSuccess),
        cudaGetErrorName(which == 6 ? cudaFree(h->c) : cudaSuccess),
        cudaGetErrorName(which == 7 ? cudaEventSynchronize(h->event) : cudaSuccess),
        cudaGetErrorName(which == 8 ? cudaEventQuery(h->event) : cudaSuccess),
    };
    *want = names[which];
}

static void captures_forbid_waiting(void **) {
    for (int which = 0; which < 9; which++) {
        emulation_reset(4);
        const hazard h = new_hazard();
        const char *got = nullptr;
        cudaGraph_t graph = nullptr;
        enum cudaStreamCaptureStatus status;
        ok(cudaStreamBeginCapture(h.first, cudaStreamCaptureModeGlobal));
        ok(cudaEventRecord(h.event, h.first));
        do_forbidden(&h, which, &got);
        assert_string_equal(got, which < 7 ? "cudaErrorStreamCaptureUnsupported"
                                           : "cudaErrorCapturedEvent");
        ok(cudaStreamIsCapturing(h.first, &status));
        assert_int_equal(status, cudaStreamCaptureStatusInvalidated);
        const cudaLaunchConfig_t one = grid(1, 64, h.first);
        fails(cudaErrorStreamCaptureInvalidated, cudaLaunchKernelEx(&one, k_fill, h.a, 1.0f, 64));
        fails(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(h.first, &graph));
        ok(cudaStreamSynchronize(h.first));
        ok(cudaLaunchKernelEx(&one, k_fill, h.a, 1.0f, 64));
        ok(cudaStreamSynchronize(h.first));
        assert_true(peek(h.a) == 1.0f);
    }
}

/* ---- the legacy stream ---- */

static void legacy_stream_keeps_order(void **) {
    for (uint64_t seed = 1; seed <= 50; seed++) {
        emulation_reset(seed);
        float *const a = on_device<float>(64), *const b = on_device<float>(64);
        cudaStream_t s = nullptr;
        ok(cudaStreamCreate(&s));
        const cudaLaunchConfig_t blocking = grid(1, 64, s), old = grid(1, 64, nullptr);
        ok(cudaLaunchKernelEx(&blocking, k_fill, a, 2.0f, 64));
        ok(cudaLaunchKernelEx(&old, k_add, b, a, 1.0f, 64));
        ok(cudaLaunchKernelEx(&blocking, k_add, a, b, 1.0f, 64));
        ok(cudaStreamSynchronize(s));
        assert_true(peek(a) == 4.0f);
    }
}

static void legacy_stream_cannot_wait_for_a_capture(void **) {
    float *const a = on_device<float>(64);
    cudaStream_t s = nullptr;
    cudaGraph_t graph = nullptr;
    ok(cudaStreamCreate(&s));
    ok(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    fails(cudaErrorStreamCaptureImplicit, cudaMemset(a, 0, 4));
    fails(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(s, &graph));
    fails(cudaErrorStreamCaptureUnsupported,
          cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal));
}

/* ---- errors ---- */

static void errors_are_returned_and_kept(void **) {
    float *const x = on_device<float>(64), host[64] = {0};
    const cudaStream_t s = new_stream();
    const cudaEvent_t e = new_event();
    cudaLaunchConfig_t c = grid(0, 64, s);
    fails(cudaErrorInvalidConfiguration, cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64));
    c = grid(1, 1025, s);
    fails(cudaErrorInvalidConfiguration, cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64));
    c = grid(1, 32, s);
    c.gridDim.y = 65536;
    fails(cudaErrorInvalidConfiguration, cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64));
    c = grid(1, 32, s);
    c.blockDim = dim3(32, 16, 3);
    fails(cudaErrorInvalidConfiguration, cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64));
    fails(cudaErrorInvalidValue, cudaMemcpyAsync(x, host, 65 * 4, cudaMemcpyHostToDevice, s));
    fails(cudaErrorInvalidValue, cudaMemcpyAsync(x, host, 4, cudaMemcpyDeviceToHost, s));
    fails(cudaErrorInvalidValue, cudaMemcpyAsync(x + 1, host, 64 * 4, cudaMemcpyDefault, s));
    fails(cudaErrorInvalidValue, cudaMemcpyAsync(x, nullptr, 4, cudaMemcpyHostToDevice, s));
    fails(cudaErrorInvalidValue, cudaMemsetAsync(x + 60, 0, 5 * 4, s));
    fails(cudaErrorInvalidValue, cudaFree(x + 1));
    fails(cudaErrorInvalidValue, cudaFreeHost(x));
    ok(cudaMemcpyAsync(x, nullptr, 0, cudaMemcpyHostToDevice, s));
    ok(cudaFree(nullptr));
    fails(cudaErrorInvalidDevice, cudaSetDevice(1));
    ok(cudaStreamDestroy(s));
    ok(cudaEventDestroy(e));
    fails(cudaErrorInvalidResourceHandle, cudaStreamSynchronize(s));
    fails(cudaErrorInvalidResourceHandle, cudaStreamDestroy(s));
    fails(cudaErrorInvalidResourceHandle, cudaEventRecord(e, nullptr));
    fails(cudaErrorInvalidResourceHandle, cudaEventDestroy(e));
    c = grid(1, 32, s);
    assert_int_equal(cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64), cudaErrorInvalidResourceHandle);
    ok(cudaDeviceSynchronize());
    assert_int_equal(cudaPeekAtLastError(), cudaErrorInvalidResourceHandle); /* until asked for */
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    assert_string_equal(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

static void queries_answer_in_the_end(void **) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        emulation_reset(seed);
        float *const x = on_device<float>(64);
        const cudaStream_t s = new_stream();
        const cudaEvent_t e = new_event();
        const cudaLaunchConfig_t c = grid(1, 64, s);
        ok(cudaEventQuery(e));
        ok(cudaStreamQuery(s));
        ok(cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64));
        ok(cudaEventRecord(e, s));
        int asked = 0;
        while (cudaEventQuery(e) == cudaErrorNotReady) {
            assert_true(asked++ < 1000);
        }
        ok(cudaStreamQuery(s));
        assert_true(peek(x) == 1.0f);
        assert_int_equal(emulation_count().host_waits, 0);
        cudaGetLastError();
    }
}

static void times_are_imagined(void **) {
    float ms = 0.0f, *const x = on_device<float>(1 << 20);
    const cudaStream_t s = new_stream();
    cudaEvent_t a = nullptr, b = nullptr;
    ok(cudaEventCreate(&a));
    ok(cudaEventCreate(&b));
    ok(cudaEventRecord(a, s));
    ok(cudaMemsetAsync(x, 0, 4 << 20, s));
    ok(cudaEventRecord(b, s));
    fails(cudaErrorNotReady, cudaEventElapsedTime(&ms, a, b));
    ok(cudaEventSynchronize(b));
    ok(cudaEventElapsedTime(&ms, a, b));
    assert_true(ms > 0.001f && ms < 1.0f);
    assert_true(emulation_time_ns() > 0);
    fails(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, a, new_event()));
}

/* A step of a program, every call of which fails once: nothing stays behind. */
static cudaError_t small_program(float *result) {
    float *x = nullptr, *pinned = nullptr;
    cudaStream_t s = nullptr;
    cudaEvent_t e = nullptr;
    cudaError_t error = cudaMalloc(&x, 256);
    error = error ? error : cudaMallocHost(&pinned, 256);
    error = error ? error : cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    error = error ? error : cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    const cudaLaunchConfig_t c = grid(1, 64, s);
    error = error ? error : cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64);
    error = error ? error : cudaMemcpyAsync(pinned, x, 256, cudaMemcpyDeviceToHost, s);
    error = error ? error : cudaEventRecord(e, s);
    error = error ? error : cudaEventSynchronize(e);
    *result = error ? 0.0f : pinned[63];
    cudaFree(x);
    cudaFreeHost(pinned);
    if (s) {
        cudaStreamDestroy(s);
    }
    if (e) {
        cudaEventDestroy(e);
    }
    return error;
}

static void every_call_fails_once(void **) {
    float result = 0.0f;
    uint64_t n = 1;
    for (;; n++) {
        emulation_fail(n);
        const cudaError_t error = small_program(&result);
        const emulation_counts left = emulation_count();
        assert_true(left.device_bytes == 0 && left.pinned_bytes == 0 && left.streams == 0 &&
                    left.events == 0);
        if (!emulation_failed()) {
            ok(error);
            break;
        }
        assert_int_equal(error, n <= 2 ? cudaErrorMemoryAllocation : cudaErrorLaunchFailure);
        assert_int_equal(cudaGetLastError(), error);
        if (n == 5) {
            assert_string_equal(emulation_failed(), "cudaLaunchKernelEx");
        }
    }
    assert_int_equal(n, 9);
    assert_true(result == 1.0f);
}

/* A kernel that faults is heard of late, and nothing works from then on. */
static void broken_devices_stay_broken(void **) {
    float *const x = on_device<float>(64);
    const cudaStream_t s = new_stream();
    const cudaLaunchConfig_t c = grid(1, 64, s);
    emulation_break(2);
    ok(cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64));
    ok(cudaLaunchKernelEx(&c, k_fill, x, 2.0f, 64));
    ok(cudaLaunchKernelEx(&c, k_fill, x, 3.0f, 64));
    assert_false(emulation_is_broken());
    fails(cudaErrorIllegalAddress, cudaStreamSynchronize(s));
    assert_true(emulation_is_broken());
    assert_true(peek(x) == 1.0f);
    fails(cudaErrorIllegalAddress, cudaLaunchKernelEx(&c, k_fill, x, 4.0f, 64));
    float *y = x;
    fails(cudaErrorIllegalAddress, cudaMalloc(&y, 16));
    fails(cudaErrorIllegalAddress, cudaFree(x));
    ok(cudaStreamDestroy(s));
    assert_true(emulation_count().device_bytes == 0 && emulation_count().streams == 0);
    emulation_reset(1);
    assert_false(emulation_is_broken());
}

static void what_lives_is_counted(void **) {
    float *const x = on_device<float>(100), *pinned = nullptr;
    cublasHandle_t h = nullptr;
    ok(cudaHostAlloc(&pinned, 300, cudaHostAllocDefault));
    const cudaStream_t s = new_stream();
    const cudaEvent_t e = new_event();
    assert_int_equal(cublasCreate(&h), CUBLAS_STATUS_SUCCESS);
    const cudaLaunchConfig_t c = grid(2, 32, s);
    ok(cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64));
    ok(cudaStreamSynchronize(s));
    emulation_counts n = emulation_count();
    assert_true(n.device_bytes == 400 && n.pinned_bytes == 300 && n.streams == 1 && n.events == 1 &&
                n.handles == 1 && n.launches == 1 && n.host_waits == 1 && n.threads == 64 &&
                n.device_allocations == 1 && n.pinned_allocations == 1);
    assert_true(emulation_launches("k_fill") == 1 && emulation_launches("k_add") == 0 &&
                emulation_launches(nullptr) == 1);
    ok(cudaFree(x));
    ok(cudaFreeHost(pinned));
    ok(cudaStreamDestroy(s));
    ok(cudaEventDestroy(e));
    assert_int_equal(cublasDestroy(h), CUBLAS_STATUS_SUCCESS);
    n = emulation_count();
    assert_true(n.device_bytes == 0 && n.pinned_bytes == 0 && n.streams == 0 && n.events == 0 &&
                n.handles == 0 && n.device_peak_bytes == 400);
}

/* ---- the device ---- */

static void devices_are_as_told(void **) {
    struct cudaDeviceProp p;
    size_t free_bytes = 0, total = 0;
    int n = 0;
    emulation_device d = emulation_get_device();
    snprintf(d.name, sizeof(d.name), "Old");
    d.compute_major = 7;
    d.compute_minor = 5;
    d.is_integrated = 1;
    d.multiprocessors = 3;
    d.memory_bytes = 64 << 20;
    d.used_bytes = 16 << 20;
    d.driver_version = 12020;
    emulation_set_device(&d);
    ok(cudaGetDeviceProperties(&p, 0));
    assert_string_equal(p.name, "Old");
    assert_true(p.major == 7 && p.minor == 5 && p.integrated && p.multiProcessorCount == 3);
    ok(cudaDeviceGetAttribute(&n, cudaDevAttrComputeCapabilityMinor, 0));
    assert_int_equal(n, 5);
    ok(cudaDriverGetVersion(&n));
    assert_int_equal(n, 12020);
    ok(cudaMemGetInfo(&free_bytes, &total));
    assert_true(total == 64 << 20 && free_bytes == 48 << 20);
    char *const x = on_device<char>(33 << 20);
    ok(cudaMemGetInfo(&free_bytes, &total));
    assert_int_equal(free_bytes, (48 - 34) << 20); /* in units of 2 MiB */
    void *y = &n;
    fails(cudaErrorMemoryAllocation, cudaMalloc(&y, 15 << 20));
    assert_null(y);
    ok(cudaFree(x));
    ok(cudaMemGetInfo(&free_bytes, &total));
    assert_int_equal(free_bytes, 48 << 20);
    d.count = 0;
    emulation_set_device(&d);
    fails(cudaErrorNoDevice, cudaGetDeviceCount(&n));
    assert_int_equal(n, 0);
    fails(cudaErrorNoDevice, cudaMalloc(&y, 16));
}

/* ---- host functions and host threads ---- */

static cudaError_t inside;

static void on_host(void *data) {
    int *const pinned = static_cast<int *>(data);
    inside = cudaDeviceSynchronize();
    *pinned += 1;
}

static void host_functions_take_their_turn(void **) {
    int *pinned = nullptr, *const x = on_device<int>(1);
    const cudaStream_t s = new_stream();
    ok(cudaMallocHost(&pinned, sizeof(int)));
    *pinned = 41;
    ok(cudaLaunchHostFunc(s, on_host, pinned));
    ok(cudaMemcpyAsync(x, pinned, sizeof(int), cudaMemcpyHostToDevice, s));
    assert_int_equal(*pinned, 41);
    ok(cudaStreamSynchronize(s));
    assert_int_equal(peek(x), 42);
    assert_int_equal(inside, cudaErrorNotPermitted);
    cudaGetLastError();
}

static void *use_the_device(void *seen) {
    int *const host = static_cast<int *>(emulation_host_alloc(64 * sizeof(int)));
    float *x = nullptr;
    cudaStream_t s = nullptr;
    cudaMalloc(&x, 64 * sizeof(float));
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    const cudaLaunchConfig_t c = grid(1, 64, s);
    for (int i = 0; i < 200; i++) {
        host[i % 64] = i; /* while the kernels of the other thread may run */
        cudaLaunchKernelEx(&c, k_fill, x, 1.0f, 64);
        *static_cast<int *>(seen) += cudaStreamSynchronize(s) == cudaSuccess;
    }
    cudaFree(x);
    cudaStreamDestroy(s);
    emulation_host_release(host);
    return nullptr;
}

static void threads_share_the_device(void **) {
    pthread_t other;
    int seen[2] = {0, 0};
    assert_int_equal(pthread_create(&other, nullptr, use_the_device, &seen[0]), 0);
    use_the_device(&seen[1]);
    pthread_join(other, nullptr);
    assert_true(seen[0] == 200 && seen[1] == 200);
    assert_int_equal(emulation_count().device_bytes, 0);
}

/* ---- all of them ---- */

static int start_anew(void **) {
    emulation_reset(1);
    emulation_fail(0);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_keep_their_order),
        cmocka_unit_test(events_are_points),
        cmocka_unit_test(deadlocks_are_named),
        cmocka_unit_test(clocks_follow_waits),
        cmocka_unit_test(queues_are_bounded),
        cmocka_unit_test_setup(net_catches_a_missing_event, start_anew),
        cmocka_unit_test_setup(net_catches_an_early_overwrite, start_anew),
        cmocka_unit_test_setup(copies_are_late, start_anew),
        cmocka_unit_test_setup(net_catches_a_missing_barrier, start_anew),
        cmocka_unit_test_setup(net_catches_threads_apart, start_anew),
        cmocka_unit_test_setup(net_catches_wrong_memory, start_anew),
        cmocka_unit_test_setup(net_catches_traps, start_anew),
        cmocka_unit_test_setup(net_catches_a_small_overrun, start_anew),
        cmocka_unit_test_setup(memory_starts_as_rubbish, start_anew),
        cmocka_unit_test_setup(memory_opens_on_request, start_anew),
        cmocka_unit_test_setup(single_threads_have_room, start_anew),
        cmocka_unit_test_setup(grids_have_three_dimensions, start_anew),
        cmocka_unit_test_setup(warps_exchange_values, start_anew),
        cmocka_unit_test_setup(blocks_add_up, start_anew),
        cmocka_unit_test_setup(atomics_count, start_anew),
        cmocka_unit_test_setup(kernels_get_values, start_anew),
        cmocka_unit_test_setup(products_are_right, start_anew),
        cmocka_unit_test_setup(products_have_modes, start_anew),
        cmocka_unit_test_setup(products_are_checked, start_anew),
        cmocka_unit_test_setup(net_catches_a_product_past_the_end, start_anew),
        cmocka_unit_test_setup(graphs_replay, start_anew),
        cmocka_unit_test_setup(captures_are_joined, start_anew),
        cmocka_unit_test_setup(captures_forbid_waiting, start_anew),
        cmocka_unit_test_setup(legacy_stream_keeps_order, start_anew),
        cmocka_unit_test_setup(legacy_stream_cannot_wait_for_a_capture, start_anew),
        cmocka_unit_test_setup(errors_are_returned_and_kept, start_anew),
        cmocka_unit_test_setup(queries_answer_in_the_end, start_anew),
        cmocka_unit_test_setup(times_are_imagined, start_anew),
        cmocka_unit_test_setup(every_call_fails_once, start_anew),
        cmocka_unit_test_setup(broken_devices_stay_broken, start_anew),
        cmocka_unit_test_setup(what_lives_is_counted, start_anew),
        cmocka_unit_test_setup(devices_are_as_told, start_anew),
        cmocka_unit_test_setup(host_functions_take_their_turn, start_anew),
        cmocka_unit_test_setup(threads_share_the_device, start_anew),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
