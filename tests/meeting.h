/*  meeting.h - where ranks meet for a collective: a block of memory that threads, forked processes or
    processes that map one file share, and that holds no pointers. A rank arrives with what it sends; the
    one that comes last computes, in the order of the ranks; each takes what it receives; when all have,
    the next collective begins. Sums are in F32, x0 + x1 + x2 and so on, and are rounded once to 16 bits
    at the end, so they have the same bits in every run.

    threads_comm.h makes an ms_comm of it that waits, emulation/nccl.cpp collectives that are enqueued.
    Include it after the implementation of memscale.h, or private.h, with the functions of POSIX
    (_XOPEN_SOURCE 700). */
#ifndef MEMSCALE_TEST_MEETING_H
#define MEMSCALE_TEST_MEETING_H

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MEETING_ERRORS(X)                                                                          \
    X(TC_ERROR_INJECTED, "a collective was made to fail")                                          \
    X(TC_ERROR_TIMEOUT, "another rank did not come in time")                                       \
    X(TC_ERROR_ABORTED, "a rank has called abort")                                                 \
    X(TC_ERROR_GONE, "this rank was made to stay away")                                            \
    X(TC_ERROR_DIFFERENT, "the ranks did not call the same collective")                            \
    X(TC_ERROR_MEMORY, "more bytes than a meeting has room for")

typedef enum tc_error { TC_OK, MEETING_ERRORS(MEMSCALE_FIRST) TC_ERROR_END } tc_error;

#define MEETING_KINDS(X)                                                                           \
    X(TC_ALL_REDUCE, "all_reduce")                                                                 \
    X(TC_REDUCE_SCATTER, "reduce_scatter")                                                         \
    X(TC_ALL_GATHER, "all_gather")                                                                 \
    X(TC_BROADCAST, "broadcast")                                                                   \
    X(TC_BARRIER, "barrier")

typedef enum tc_kind { MEETING_KINDS(MEMSCALE_FIRST) TC_KIND_COUNT } tc_kind;

#define MEETING_TEXT(name, text) text,

enum { MEETING_MOST_RANKS = 16, MEETING_STAGE_BYTES = 32 << 20 };

typedef struct meeting_call {
    tc_kind kind;
    ms_dtype dtype;
    uint32_t root;
    uint64_t count;
} meeting_call;

typedef struct meeting {
    pthread_mutex_t lock; // of all below
    pthread_cond_t changed;
    uint32_t count;    // of ranks
    uint32_t attached; // for who waits until all have come to know of it
    uint32_t arrived, left;
    bool is_ready; // all have arrived, and not all have left
    bool is_aborted;
    bool polls; // to be set where processes are killed: who waits for `changed` must not be
    tc_error outcome;
    meeting_call calls[MEETING_MOST_RANKS];
    uint64_t numbers[MEETING_MOST_RANKS]; // of the calls of each rank, from 1
    bool has_come[MEETING_MOST_RANKS];
    char difference[200];
} meeting;

/* Memory that forked processes share; zero. */
static inline void *meeting_shared(size_t bytes) {
    FILE *file = tmpfile(); // gone with the last one that maps it
    void *memory = MAP_FAILED;
    if (file != NULL && ftruncate(fileno(file), (off_t)bytes) == 0) {
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    }
    if (file != NULL) {
        fclose(file);
    }
    return memory == MAP_FAILED ? NULL : memory;
}

static inline size_t meeting_begin_of_stages(void) {
    return (sizeof(meeting) + 4095) / 4096 * 4096;
}

/* What a meeting of so many ranks takes; pages that nobody touches take nothing. */
static inline size_t meeting_bytes(uint32_t ranks) {
    return meeting_begin_of_stages() + 2 * (size_t)ranks * MEETING_STAGE_BYTES;
}

/* What a rank sends; from number `count` on: the sums. */
static inline char *meeting_stage(meeting *m, uint32_t number) {
    return (char *)m + meeting_begin_of_stages() + (size_t)number * MEETING_STAGE_BYTES;
}

static inline void meeting_open(meeting *m, uint32_t ranks) {
    pthread_mutexattr_t of_lock;
    pthread_condattr_t of_change;
    memset(m, 0, sizeof *m);
    pthread_mutexattr_init(&of_lock);
    pthread_mutexattr_setpshared(&of_lock, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&of_lock, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&m->lock, &of_lock);
    pthread_mutexattr_destroy(&of_lock);
    pthread_condattr_init(&of_change);
    pthread_condattr_setpshared(&of_change, PTHREAD_PROCESS_SHARED);
    pthread_cond_init(&m->changed, &of_change);
    pthread_condattr_destroy(&of_change);
    m->count = ranks;
}

/* A process that is killed leaves what it has to others. */
static inline void meeting_lock(meeting *m) {
    if (pthread_mutex_lock(&m->lock) == EOWNERDEAD) {
        pthread_mutex_consistent(&m->lock);
    }
}

static inline const char *meeting_kind_name(tc_kind kind) {
    static const char *const names[] = {MEETING_KINDS(MEETING_TEXT)};
    return names[kind];
}

// ------------------------------------------------------------------------------------------------
// what a collective computes

static inline float meeting_get(const void *data, ms_dtype dtype, uint64_t i) {
    return dtype == MS_DTYPE_F32    ? ((const float *)data)[i]
           : dtype == MS_DTYPE_BF16 ? msi_f32_of_bf16(((const uint16_t *)data)[i])
                                    : msi_f32_of_f16(((const uint16_t *)data)[i]);
}

static inline void meeting_put(void *data, ms_dtype dtype, uint64_t i, float x) {
    if (dtype == MS_DTYPE_F32) {
        ((float *)data)[i] = x;
    } else {
        ((uint16_t *)data)[i] = dtype == MS_DTYPE_BF16 ? msi_bf16_of_f32(x) : msi_f16_of_f32(x);
    }
}

static inline bool meeting_adds(tc_kind kind) {
    return kind == TC_ALL_REDUCE || kind == TC_REDUCE_SCATTER;
}

static inline size_t meeting_part(const meeting_call *c) {
    return c->kind == TC_BARRIER ? 0 : (size_t)(c->count * ms_dtype_bytes(c->dtype));
}

/* Bytes that a rank sends, and that it receives. */
static inline size_t meeting_sent(const meeting *m, const meeting_call *c) {
    return meeting_part(c) * (c->kind == TC_REDUCE_SCATTER ? m->count : 1u);
}

static inline size_t meeting_received(const meeting *m, const meeting_call *c) {
    return meeting_part(c) * (c->kind == TC_ALL_GATHER ? m->count : 1u);
}

static inline void meeting_sum(meeting *m) {
    const meeting_call *c = &m->calls[0];
    const uint64_t count = meeting_sent(m, c) / ms_dtype_bytes(c->dtype);
    void *sums = meeting_stage(m, m->count);
    for (uint64_t i = 0; i < count; ++i) {
        float sum = meeting_get(meeting_stage(m, 0), c->dtype, i);
        for (uint32_t r = 1; r < m->count; ++r) {
            sum += meeting_get(meeting_stage(m, r), c->dtype, i);
        }
        meeting_put(sums, c->dtype, i, sum);
    }
}

static inline bool meeting_is_same(meeting *m, uint32_t a, uint32_t b) {
    const meeting_call *x = &m->calls[a], *y = &m->calls[b];
    const bool same = x->kind == y->kind &&
                      (x->kind == TC_BARRIER ||
                       (x->count == y->count && x->dtype == y->dtype && x->root == y->root));
    if (!same) {
        snprintf(
            m->difference, sizeof m->difference,
            "call %llu of rank %u is %s of %llu %s from root %u, call %llu of rank %u is %s of "
            "%llu %s from root %u",
            (unsigned long long)m->numbers[a], a, meeting_kind_name(x->kind),
            (unsigned long long)x->count, ms_dtype_name(x->dtype), x->root,
            (unsigned long long)m->numbers[b], b, meeting_kind_name(y->kind),
            (unsigned long long)y->count, ms_dtype_name(y->dtype), y->root);
    }
    return same;
}

// ------------------------------------------------------------------------------------------------
// coming and going, with the lock

/* Whether a rank can arrive: all have left the collective before. */
static inline bool meeting_is_free(const meeting *m) {
    return !m->is_ready;
}

/* Of broadcasts alone has a call a root. */
static inline tc_error meeting_arrive(meeting *m, uint32_t rank, const meeting_call *call,
                                      const void *send) {
    meeting_call *c = &m->calls[rank];
    *c = *call;
    c->root = call->kind == TC_BROADCAST ? call->root : 0;
    m->numbers[rank] += 1;
    if (meeting_sent(m, c) > MEETING_STAGE_BYTES || c->root >= m->count) {
        return TC_ERROR_MEMORY;
    }
    if (meeting_sent(m, c) > 0) {
        memcpy(meeting_stage(m, rank), send, meeting_sent(m, c));
    }
    m->has_come[rank] = true;
    m->arrived += 1;
    if (m->arrived == m->count) {
        m->outcome = TC_OK;
        for (uint32_t r = 1; r < m->count && m->outcome == TC_OK; ++r) {
            m->outcome = meeting_is_same(m, 0, r) ? TC_OK : TC_ERROR_DIFFERENT;
        }
        if (m->outcome == TC_OK && meeting_adds(c->kind)) {
            meeting_sum(m);
        }
        m->is_ready = true;
        m->left = 0;
        pthread_cond_broadcast(&m->changed);
    }
    return TC_OK;
}

static inline bool meeting_is_ready(const meeting *m, uint32_t rank) {
    return m->is_ready && m->has_come[rank];
}

/* A rank that has waited for too long takes no part. */
static inline void meeting_withdraw(meeting *m, uint32_t rank) {
    m->arrived -= m->has_come[rank];
    m->has_come[rank] = false;
}

/* What a reduce_scatter in place leaves of the parts of other ranks is poison. */
static inline tc_error meeting_take(meeting *m, uint32_t rank, const void *send, void *receive) {
    const meeting_call *c = &m->calls[rank];
    const size_t part = meeting_part(c), bytes = meeting_received(m, c);
    if (m->outcome == TC_OK && bytes > 0) {
        char *to = (char *)receive;
        if (c->kind == TC_REDUCE_SCATTER && send == to - rank * part) {
            memset(to - rank * part, 0x7f, part * m->count);
        }
        if (c->kind == TC_ALL_GATHER) {
            for (uint32_t r = 0; r < m->count; ++r) {
                memcpy(to + r * part, meeting_stage(m, r), part);
            }
        } else {
            const bool scatters = c->kind == TC_REDUCE_SCATTER;
            memcpy(to,
                   meeting_stage(m, c->kind == TC_BROADCAST ? c->root : m->count) +
                       (scatters ? rank * part : 0),
                   part);
        }
    }
    const tc_error outcome = m->outcome;
    m->has_come[rank] = false;
    m->left += 1;
    if (m->left == m->count) {
        m->is_ready = false;
        m->arrived = 0;
        pthread_cond_broadcast(&m->changed);
    }
    return outcome;
}

#endif // MEMSCALE_TEST_MEETING_H
