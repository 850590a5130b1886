/*  comm_checks.h - what every ms_comm has to compute, against loops in float64. All ranks call
    cc_check_all, which returns how many checks failed and says on stderr which. Any rank can work out
    what any other sends, so each checks its own results alone. Half of the numbers are small integers,
    whose sums are exact in every order. Include it after the implementation of memscale.h, or
    private.h. */
#ifndef MEMSCALE_TEST_COMM_CHECKS_H
#define MEMSCALE_TEST_COMM_CHECKS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The memory of a comm that is on_device, and the stream that it enqueues on. */
typedef struct cc_device {
    void *user, *stream;
    void *(*alloc)(void *user, size_t bytes);
    void (*release)(void *user, void *memory);
    bool (*copy)(void *user, void *target, const void *source,
                 size_t bytes); // either way; it waits
    bool (*wait)(void *user);   // for the stream
} cc_device;

typedef enum cc_kind {
    CC_ALL_REDUCE,
    CC_REDUCE_SCATTER,
    CC_ALL_GATHER,
    CC_BROADCAST,
    CC_KIND_COUNT
} cc_kind;

enum { CC_GUARD_BYTES = 64, CC_GUARD = 0x5a };

/* One collective with its memory: a block with a guard at each end. */
typedef struct cc_check {
    const ms_comm *comm;
    const cc_device *device;
    cc_kind kind;
    ms_dtype dtype;
    uint64_t count, seed;
    bool in_place, integers;
    size_t send_bytes, receive_bytes, send_at, receive_at, block_bytes;
    char *block, *host; // what the collective gets, and a copy of it on the host
    const char *wrong;  // the first check that failed
} cc_check;

static inline uint64_t cc_mix(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static inline uint64_t cc_bits(const cc_check *c, uint32_t rank, uint64_t i) {
    return cc_mix(cc_mix(c->seed * 64 + rank + 1) + i * UINT64_C(0x9e3779b97f4a7c15));
}

static inline float cc_get(const void *data, ms_dtype dtype, uint64_t i) {
    return dtype == MS_DTYPE_F32    ? ((const float *)data)[i]
           : dtype == MS_DTYPE_BF16 ? msi_f32_of_bf16(((const uint16_t *)data)[i])
           : dtype == MS_DTYPE_F16  ? msi_f32_of_f16(((const uint16_t *)data)[i])
                                    : (float)((const int8_t *)data)[i];
}

static inline void cc_put(void *data, ms_dtype dtype, uint64_t i, float x) {
    if (dtype == MS_DTYPE_F32) {
        ((float *)data)[i] = x;
    } else if (dtype == MS_DTYPE_I8) {
        ((int8_t *)data)[i] = (int8_t)x;
    } else {
        ((uint16_t *)data)[i] = dtype == MS_DTYPE_BF16 ? msi_bf16_of_f32(x) : msi_f16_of_f32(x);
    }
}

/* Element i of what a rank sends, as the dtype holds it. */
static inline double cc_sent(const cc_check *c, uint32_t rank, uint64_t i) {
    const uint64_t bits = cc_bits(c, rank, i);
    if (c->dtype == MS_DTYPE_I8 || c->integers) {
        return (double)(bits % 17) - 8.0;
    }
    float element[1];
    cc_put(element, c->dtype, 0, (float)((double)(bits >> 40) / 8388608.0 - 1.0));
    return (double)cc_get(element, c->dtype, 0);
}

static inline uint64_t cc_send_count(const cc_check *c) {
    return c->kind == CC_REDUCE_SCATTER ? c->count * c->comm->count : c->count;
}

static inline uint64_t cc_receive_count(const cc_check *c) {
    return c->kind == CC_ALL_GATHER ? c->count * c->comm->count : c->count;
}

/* Memory, filled with what this rank sends. */
static inline bool cc_begin(cc_check *c) {
    const size_t element = (size_t)ms_dtype_bytes(c->dtype);
    c->send_bytes = (size_t)cc_send_count(c) * element;
    c->receive_bytes = (size_t)cc_receive_count(c) * element;
    c->in_place = c->in_place || c->kind == CC_BROADCAST;
    const size_t part = c->comm->rank * (size_t)c->count * element;
    c->send_at = CC_GUARD_BYTES;
    c->receive_at = CC_GUARD_BYTES * 2 + (c->send_bytes + 63) / 64 * 64;
    if (c->in_place) {
        c->send_at += c->kind == CC_ALL_GATHER ? part : 0;
        c->receive_at = CC_GUARD_BYTES + (c->kind == CC_REDUCE_SCATTER ? part : 0);
    }
    c->block_bytes = 3 * CC_GUARD_BYTES + c->send_bytes + c->receive_bytes + 64;
    c->host = (char *)malloc(c->block_bytes);
    c->block = c->host;
    if (c->device != NULL) {
        c->block = (char *)c->device->alloc(c->device->user, c->block_bytes);
    }
    if (c->host == NULL || c->block == NULL) {
        return false;
    }
    memset(c->host, CC_GUARD, c->block_bytes);
    for (uint64_t i = 0; i < cc_send_count(c); ++i) {
        cc_put(c->host + c->send_at, c->dtype, i, (float)cc_sent(c, c->comm->rank, i));
    }
    return c->device == NULL || c->device->copy(c->device->user, c->block, c->host, c->block_bytes);
}

static inline ms_collective cc_collective(const cc_check *c) {
    ms_collective args;
    memset(&args, 0, sizeof args);
    args.send = c->block + c->send_at;
    args.receive = c->block + c->receive_at;
    args.count = c->count;
    args.dtype = c->dtype;
    args.root = (uint32_t)(c->seed % c->comm->count);
    args.stream = c->device != NULL ? c->device->stream : NULL;
    args.timeout_s = 60.0;
    return args;
}

static inline int cc_start(const cc_check *c) {
    const ms_comm *comm = c->comm;
    const ms_collective args = cc_collective(c);
    switch (c->kind) {
    case CC_ALL_REDUCE:
        return comm->all_reduce(comm->user, &args);
    case CC_REDUCE_SCATTER:
        return comm->reduce_scatter(comm->user, &args);
    case CC_ALL_GATHER:
        return comm->all_gather(comm->user, &args);
    default:
        return comm->broadcast(comm->user, &args);
    }
}

/* What element i must be, and how far from it rounding in any order can take it. */
static inline double cc_wanted(const cc_check *c, uint64_t i, double *most) {
    const uint32_t ranks = c->comm->count;
    *most = 0.0;
    if (c->kind == CC_BROADCAST) {
        return cc_sent(c, (uint32_t)(c->seed % ranks), i);
    }
    if (c->kind == CC_ALL_GATHER) {
        return cc_sent(c, (uint32_t)(i / c->count), i % c->count);
    }
    const uint64_t at = i + (c->kind == CC_REDUCE_SCATTER ? c->comm->rank * c->count : 0);
    double sum = 0.0, size = 0.0;
    for (uint32_t r = 0; r < ranks; ++r) {
        const double x = cc_sent(c, r, at);
        sum += x;
        size += fabs(x);
    }
    const double unit = c->dtype == MS_DTYPE_F32    ? 1.0 / 16777216.0
                        : c->dtype == MS_DTYPE_BF16 ? 1.0 / 256.0
                                                    : 1.0 / 2048.0;
    *most = c->integers ? 0.0 : 1.1 * unit * size * (double)(ranks - 1) + 1e-7;
    return sum;
}

static inline bool cc_is_guard(const cc_check *c, size_t from, size_t to) {
    bool ok = true;
    for (size_t i = from; i < to; ++i) {
        ok = ok && c->host[i] == CC_GUARD;
    }
    return ok;
}

static inline bool cc_is_sent(const cc_check *c) {
    bool ok = true;
    for (uint64_t i = 0; i < cc_send_count(c) && ok; ++i) {
        const double x = (double)cc_get(c->host + c->send_at, c->dtype, i);
        ok = fabs(x - cc_sent(c, c->comm->rank, i)) <= 0.0;
    }
    return ok;
}

static inline void cc_judge(cc_check *c) {
    if (c->device != NULL && !c->device->copy(c->device->user, c->host, c->block, c->block_bytes)) {
        c->wrong = "a copy to the host fails";
        return;
    }
    for (uint64_t i = 0; i < cc_receive_count(c) && c->wrong == NULL; ++i) {
        double most;
        const double wanted = cc_wanted(c, i, &most);
        const double x = (double)cc_get(c->host + c->receive_at, c->dtype, i);
        c->wrong = fabs(x - wanted) <= most ? NULL : "a number is wrong";
    }
    const size_t begin = c->in_place && c->kind != CC_ALL_GATHER ? c->send_at : c->receive_at;
    const size_t bytes =
        c->send_bytes > c->receive_bytes && c->in_place ? c->send_bytes : c->receive_bytes;
    if (!cc_is_guard(c, begin - CC_GUARD_BYTES, begin) && c->in_place) {
        c->wrong = "what is before the memory has changed";
    } else if (!cc_is_guard(c, begin + bytes, c->block_bytes)) {
        c->wrong = "what is behind the memory has changed";
    } else if (!c->in_place && !cc_is_sent(c)) {
        c->wrong = "what was sent has changed";
    }
}

static inline uint32_t cc_end(cc_check *c, int error) {
    static const char *const kinds[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast"};
    const ms_comm *comm = c->comm;
    if (error != 0) {
        const char *text = comm->error_text != NULL ? comm->error_text(comm->user, error) : NULL;
        c->wrong = text != NULL ? text : "an error without a text";
    } else {
        cc_judge(c);
    }
    if (c->wrong != NULL) {
        fprintf(stderr, "rank %u of %u: %s of %llu %s%s: %s\n", comm->rank, comm->count,
                kinds[c->kind], (unsigned long long)c->count, ms_dtype_name(c->dtype),
                c->in_place ? " in place" : "", c->wrong);
    }
    if (c->device != NULL && c->block != NULL) {
        c->device->release(c->device->user, c->block);
    }
    free(c->host);
    return c->wrong != NULL;
}

static inline cc_check cc_new(const ms_comm *comm, const cc_device *device, cc_kind kind,
                              ms_dtype dtype, uint64_t count, uint64_t seed) {
    cc_check c;
    memset(&c, 0, sizeof c);
    c.comm = comm;
    c.device = device;
    c.kind = kind;
    c.dtype = dtype;
    c.count = count;
    c.seed = seed;
    c.in_place = (seed & 1) != 0;
    c.integers = (seed & 2) != 0;
    return c;
}

static inline bool cc_can(cc_kind kind, ms_dtype dtype) {
    return dtype != MS_DTYPE_I8 || kind == CC_ALL_GATHER || kind == CC_BROADCAST;
}

static const ms_dtype cc_dtypes[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16, MS_DTYPE_I8};

static inline uint32_t cc_check_one(cc_check c) {
    int error = cc_begin(&c) ? cc_start(&c) : -1;
    if (error == 0 && c.device != NULL && !c.device->wait(c.device->user)) {
        error = -1;
    }
    return cc_end(&c, error);
}

/* Several collectives between group_begin and group_end. */
static inline uint32_t cc_check_group(const ms_comm *comm, const cc_device *device, uint64_t seed,
                                      uint32_t members) {
    enum { CC_MEMBERS = 100 };
    cc_check *checks = (cc_check *)calloc(CC_MEMBERS, sizeof(cc_check));
    uint32_t wrong = checks == NULL;
    bool ok = checks != NULL;
    for (uint32_t i = 0; i < members && ok; ++i) {
        const cc_kind kind = (cc_kind)(i % CC_KIND_COUNT);
        checks[i] = cc_new(comm, device, kind, cc_dtypes[i / 4 % 3], 5 + 77 * i % 331, seed + i);
        ok = cc_begin(&checks[i]);
    }
    int error = ok ? comm->group_begin(comm->user) : -1;
    for (uint32_t i = 0; i < members && error == 0; ++i) {
        error = cc_start(&checks[i]);
    }
    error = error == 0 ? comm->group_end(comm->user) : error;
    if (error == 0 && device != NULL && !device->wait(device->user)) {
        error = -1;
    }
    for (uint32_t i = 0; i < members && ok; ++i) {
        wrong += cc_end(&checks[i], error);
    }
    free(checks);
    return wrong;
}

/* NaN and infinity come through a sum, and all ranks have the same bits of one that is rounded. */
static inline uint32_t cc_check_bits(const ms_comm *comm) {
    enum { CC_BITS = 999 };
    uint32_t wrong = 0;
    for (int d = 0; d < 3; ++d) {
        const ms_dtype dtype = cc_dtypes[d];
        const size_t bytes = CC_BITS * (size_t)ms_dtype_bytes(dtype);
        cc_check c = cc_new(comm, NULL, CC_ALL_REDUCE, dtype, CC_BITS, 5);
        char *all = (char *)malloc(bytes * comm->count);
        c.integers = false;
        if (all == NULL || !cc_begin(&c)) {
            return wrong + 1;
        }
        if (comm->rank == comm->count / 2) {
            cc_put(c.block + c.send_at, dtype, 7, INFINITY);
            cc_put(c.block + c.send_at, dtype, 8, NAN);
        }
        int error = cc_start(&c);
        ms_collective gather = cc_collective(&c);
        gather.send = c.block + c.receive_at;
        gather.receive = all;
        gather.dtype = MS_DTYPE_I8;
        gather.count = bytes;
        error = error == 0 ? comm->all_gather(comm->user, &gather) : error;
        bool ok = error == 0 && !msi_is_finite((double)cc_get(all, dtype, 7)) &&
                  !msi_is_nan((double)cc_get(all, dtype, 7)) &&
                  msi_is_nan((double)cc_get(all, dtype, 8));
        for (uint32_t r = 1; r < comm->count && ok; ++r) {
            ok = memcmp(all, all + r * bytes, bytes) == 0;
        }
        if (!ok) {
            fprintf(stderr, "rank %u: the bits of an all_reduce of %s\n", comm->rank,
                    ms_dtype_name(dtype));
        }
        wrong += !ok;
        free(c.host);
        free(all);
    }
    return wrong;
}

static inline uint32_t cc_check_all(const ms_comm *comm, const cc_device *device) {
    static const uint64_t counts[] = {0, 1, 2, 63, 1001, 40003};
    uint32_t wrong = 0;
    uint64_t seed = 0;
    ms_collective barrier;
    memset(&barrier, 0, sizeof barrier);
    barrier.stream = device != NULL ? device->stream : NULL;
    barrier.timeout_s = 60.0;
    for (size_t n = 0; n < sizeof counts / sizeof *counts; ++n) {
        for (int kind = 0; kind < CC_KIND_COUNT; ++kind) {
            for (int d = 0; d < 4; ++d) {
                for (int way = 0; way < 4 && cc_can((cc_kind)kind, cc_dtypes[d]); ++way) {
                    wrong += cc_check_one(
                        cc_new(comm, device, (cc_kind)kind, cc_dtypes[d], counts[n], seed++));
                }
                seed = (seed + 3) / 4 * 4;
            }
        }
        wrong += comm->barrier(comm->user, &barrier) != 0;
    }
    if (comm->group_begin != NULL) {
        wrong += cc_check_group(comm, device, 1000, 0);
        wrong += cc_check_group(comm, device, 1001, 12);
        wrong += cc_check_group(comm, device, 1002, 100);
    }
    return wrong + (device == NULL ? cc_check_bits(comm) : 0);
}

#endif // MEMSCALE_TEST_COMM_CHECKS_H
