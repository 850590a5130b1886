/*  threads_comm.h - an ms_comm whose ranks are threads of one process:

        tc_world world;
        tc_open(&world, 4);
        tc_run(&world, work, argument);     // work(rank, argument) on a thread for each rank, and join
        tc_close(&world);

    `work` gives world.ranks[rank].comm to its model. Each collective is computed by the rank that comes
    last, in the order of the ranks: sums are in F32, x0 + x1 + x2 and so on, and are rounded once to
    16 bits at the end, so they have the same bits in every run. Between group_begin and group_end
    collectives are only noted. What a reduce_scatter in place leaves of the parts of other ranks is
    poison.

    Checked, with a text on stderr and abort(), or with TC_ERROR_DIFFERENT where world.keeps_differences
    is set: all ranks call the same collective with the same count, dtype and root, and memory that is apart or
    shared as ms_comm allows; no rank calls two at once, or one after an error. To be set before tc_run, in world.ranks[r]: the number of a
    collective, from 1, that fails, stalls, or never comes. Checks of cmocka jump, so threads make
    none: they leave their results for the main thread.

    Include it after the implementation of memscale.h, or private.h, and with the functions of POSIX
    (_POSIX_C_SOURCE 200809L). */
#ifndef MEMSCALE_TEST_THREADS_COMM_H
#define MEMSCALE_TEST_THREADS_COMM_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TC_ERRORS(X)                                                                               \
    X(TC_ERROR_INJECTED, "a collective was made to fail")                                          \
    X(TC_ERROR_TIMEOUT, "another rank did not come in time")                                       \
    X(TC_ERROR_ABORTED, "a rank has called abort")                                                 \
    X(TC_ERROR_GONE, "this rank was made to stay away")                                            \
    X(TC_ERROR_DIFFERENT, "the ranks did not call the same collective")                            \
    X(TC_ERROR_MEMORY, "out of memory")

typedef enum tc_error { TC_OK, TC_ERRORS(MEMSCALE_FIRST) TC_ERROR_END } tc_error;

#define TC_COLLECTIVES(X)                                                                          \
    X(TC_ALL_REDUCE, "all_reduce")                                                                 \
    X(TC_REDUCE_SCATTER, "reduce_scatter")                                                         \
    X(TC_ALL_GATHER, "all_gather")                                                                 \
    X(TC_BROADCAST, "broadcast")                                                                   \
    X(TC_BARRIER, "barrier")

typedef enum tc_kind { TC_COLLECTIVES(MEMSCALE_FIRST) TC_KIND_COUNT } tc_kind;

enum { TC_MOST_RANKS = 16, TC_MOST_IN_GROUP = 256 };

typedef struct tc_noted {
    tc_kind kind;
    ms_collective what;
} tc_noted;

struct tc_world;

typedef struct tc_rank {
    struct tc_world *world;
    ms_comm comm;
    /* To be set: the number of a collective of this rank, from 1; 0: none. */
    uint64_t fail_at;  // returns TC_ERROR_INJECTED, and does not take part
    uint64_t stall_at; // takes part stall_s seconds later
    uint64_t gone_at;  // never takes part, and returns when its own time is over, or after an abort
    double stall_s;
    /* Counted. */
    uint64_t calls, calls_of[TC_KIND_COUNT];
    uint64_t bytes_of[TC_KIND_COUNT]; // that this rank sends and receives: the larger of the two
    uint64_t groups, aborts;
    tc_error error; // the first one
    /* Its own. */
    tc_noted now; // what it waits for
    bool waits, in_call, in_group;
    tc_noted group[TC_MOST_IN_GROUP];
    uint32_t group_count;
    void *(*work)(uint32_t rank, void *argument);
    void *argument;
} tc_rank;

typedef struct tc_world {
    pthread_mutex_t lock; // of all below
    pthread_cond_t changed;
    uint32_t count, waiting;
    uint64_t done; // collectives of all
    bool is_aborted;
    bool keeps_aborts;      // to be set: abort ends only what the rank itself waits for
    bool keeps_differences; // to be set: see above
    tc_error outcome;       // of the latest collective
    char difference[200];
    tc_rank ranks[TC_MOST_RANKS];
} tc_world;

static inline const char *tc_kind_name(tc_kind kind) {
    static const char *const names[] = {
#define TC_TEXT(name, text) text,
        TC_COLLECTIVES(TC_TEXT)};
    return names[kind];
}

static inline const char *tc_error_text(void *user, int error) {
    static const char *const texts[] = {TC_ERRORS(TC_TEXT)};
    tc_world *w = ((tc_rank *)user)->world;
    return error == TC_ERROR_DIFFERENT              ? w->difference
           : error > 0 && error < (int)TC_ERROR_END ? texts[error - 1]
                                                    : NULL;
}

/* What must not happen; called with the lock, and with the text in w->difference. */
static inline tc_error tc_misuse(tc_world *w) {
    if (!w->keeps_differences) {
        fprintf(stderr, "threads_comm.h: %s\n", w->difference);
        abort();
    }
    return TC_ERROR_DIFFERENT;
}

// ------------------------------------------------------------------------------------------------
// what a collective computes

static inline float tc_get(const void *data, ms_dtype dtype, uint64_t i) {
    return dtype == MS_DTYPE_F32    ? ((const float *)data)[i]
           : dtype == MS_DTYPE_BF16 ? msi_f32_of_bf16(((const uint16_t *)data)[i])
                                    : msi_f32_of_f16(((const uint16_t *)data)[i]);
}

static inline void tc_put(void *data, ms_dtype dtype, uint64_t i, float x) {
    if (dtype == MS_DTYPE_F32) {
        ((float *)data)[i] = x;
    } else {
        ((uint16_t *)data)[i] = dtype == MS_DTYPE_BF16 ? msi_bf16_of_f32(x) : msi_f16_of_f32(x);
    }
}

static inline void tc_sum(const tc_world *w, void *target, ms_dtype dtype, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
        float sum = tc_get(w->ranks[0].now.what.send, dtype, i);
        for (uint32_t r = 1; r < w->count; ++r) {
            sum += tc_get(w->ranks[r].now.what.send, dtype, i);
        }
        tc_put(target, dtype, i, sum);
    }
}

/* Elements of the result before it is handed out. */
static inline uint64_t tc_elements(const tc_noted *n, uint32_t ranks) {
    const bool all = n->kind == TC_ALL_REDUCE || n->kind == TC_BROADCAST;
    return n->kind == TC_BARRIER ? 0 : n->what.count * (all ? 1u : ranks);
}

/* Whether what a rank sends and receives is apart, or the same memory in the way that ms_comm allows. */
static inline bool tc_may_share(const tc_noted *n, uint32_t rank, uint32_t ranks) {
    const uintptr_t part = (uintptr_t)(n->what.count * ms_dtype_bytes(n->what.dtype));
    const uintptr_t send = (uintptr_t)n->what.send, receive = (uintptr_t)n->what.receive;
    const uintptr_t sent = n->kind == TC_REDUCE_SCATTER ? part * ranks : part;
    const uintptr_t received = n->kind == TC_ALL_GATHER ? part * ranks : part;
    const bool apart = part == 0 || send + sent <= receive || receive + received <= send;
    switch (n->kind) {
    case TC_ALL_REDUCE:
        return apart || send == receive;
    case TC_REDUCE_SCATTER:
        return apart || receive == send + rank * part;
    case TC_ALL_GATHER:
        return apart || send == receive + rank * part;
    case TC_BROADCAST:
        return send == receive;
    default:
        return true;
    }
}

static inline bool tc_takes(const tc_noted *n) {
    const ms_dtype dtype = n->what.dtype;
    const bool adds = n->kind == TC_ALL_REDUCE || n->kind == TC_REDUCE_SCATTER;
    return dtype == MS_DTYPE_F32 || dtype == MS_DTYPE_BF16 || dtype == MS_DTYPE_F16 ||
           n->kind == TC_BARRIER || (dtype == MS_DTYPE_I8 && !adds);
}

/* All have come: what they send is read before anything that they receive is written, since these may
   be the same memory. */
static inline tc_error tc_compute(tc_world *w) {
    const tc_noted *first = &w->ranks[0].now;
    const uint64_t elements = tc_elements(first, w->count);
    const size_t element_bytes = ms_dtype_bytes(first->what.dtype);
    const size_t part = (size_t)first->what.count * element_bytes;
    const size_t bytes = (size_t)elements * element_bytes;
    if (bytes == 0) {
        return TC_OK;
    }
    char *result = (char *)malloc(bytes);
    if (result == NULL) {
        return TC_ERROR_MEMORY;
    }
    if (first->kind == TC_BROADCAST) {
        memcpy(result, w->ranks[first->what.root].now.what.send, bytes);
    } else if (first->kind == TC_ALL_GATHER) {
        for (uint32_t r = 0; r < w->count; ++r) {
            memcpy(result + r * part, w->ranks[r].now.what.send, part);
        }
    } else {
        tc_sum(w, result, first->what.dtype, elements);
    }
    for (uint32_t r = 0; r < w->count; ++r) {
        const ms_collective *c = &w->ranks[r].now.what;
        char *receive = (char *)c->receive;
        if (first->kind == TC_REDUCE_SCATTER) {
            if (c->send == receive - r * part) {
                memset(receive - r * part, 0x7f, bytes);
            }
            memcpy(receive, result + r * part, part);
        } else {
            memcpy(receive, result, bytes);
        }
    }
    free(result);
    return TC_OK;
}

// ------------------------------------------------------------------------------------------------
// meeting the others

static inline struct timespec tc_after(double seconds) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    const double nanoseconds = (double)t.tv_nsec + 1e9 * seconds;
    t.tv_sec += (time_t)(nanoseconds / 1e9);
    t.tv_nsec = (long)(nanoseconds - 1e9 * (double)(time_t)(nanoseconds / 1e9));
    return t;
}

/* false: the time is over. No limit where it is 0. */
static inline bool tc_await(tc_world *w, const struct timespec *until, double limit_s) {
    return limit_s <= 0.0 ? pthread_cond_wait(&w->changed, &w->lock) == 0
                          : pthread_cond_timedwait(&w->changed, &w->lock, until) == 0;
}

static inline bool tc_is_same(tc_world *w, const tc_rank *a, const tc_rank *b) {
    const tc_noted *x = &a->now, *y = &b->now;
    const bool same =
        x->kind == y->kind && (x->kind == TC_BARRIER ||
                               (x->what.count == y->what.count && x->what.dtype == y->what.dtype &&
                                (x->kind != TC_BROADCAST || x->what.root == y->what.root)));
    if (!same) {
        snprintf(
            w->difference, sizeof w->difference,
            "call %llu of rank %u is %s of %llu %s from root %u, call %llu of rank %u is %s of "
            "%llu %s from root %u",
            (unsigned long long)a->calls, a->comm.rank, tc_kind_name(x->kind),
            (unsigned long long)x->what.count, ms_dtype_name(x->what.dtype), x->what.root,
            (unsigned long long)b->calls, b->comm.rank, tc_kind_name(y->kind),
            (unsigned long long)y->what.count, ms_dtype_name(y->what.dtype), y->what.root);
    }
    return same;
}

static inline tc_error tc_finish(tc_world *w) {
    tc_error error = TC_OK;
    for (uint32_t r = 1; r < w->count && error == TC_OK; ++r) {
        error = tc_is_same(w, &w->ranks[0], &w->ranks[r]) ? TC_OK : tc_misuse(w);
    }
    error = error == TC_OK ? tc_compute(w) : error;
    for (uint32_t r = 0; r < w->count; ++r) {
        w->ranks[r].waits = false;
    }
    w->waiting = 0;
    w->done += 1;
    w->outcome = error;
    pthread_cond_broadcast(&w->changed);
    return error;
}

/* With the lock. An outcome stays until all have come again, so none misses it. */
static inline tc_error tc_meet(tc_world *w, tc_rank *rank) {
    const double limit_s = rank->now.what.timeout_s;
    const struct timespec until = tc_after(limit_s);
    const bool is_gone = rank->calls == rank->gone_at;
    rank->waits = !is_gone;
    w->waiting += rank->waits;
    if (w->waiting == w->count) {
        return tc_finish(w);
    }
    while ((rank->waits || is_gone) && !w->is_aborted) {
        if (!tc_await(w, &until, limit_s) && (rank->waits || is_gone)) {
            w->waiting -= rank->waits;
            rank->waits = false;
            return is_gone ? TC_ERROR_GONE : TC_ERROR_TIMEOUT;
        }
    }
    w->waiting -= rank->waits;
    const tc_error error = rank->waits || is_gone ? TC_ERROR_ABORTED : w->outcome;
    rank->waits = false;
    return error;
}

static inline tc_error tc_perform(tc_rank *rank, const tc_noted *noted) {
    tc_world *w = rank->world;
    const uint64_t bytes =
        tc_elements(noted, w->count) * (uint64_t)ms_dtype_bytes(noted->what.dtype);
    pthread_mutex_lock(&w->lock);
    rank->calls += 1;
    rank->calls_of[noted->kind] += 1;
    rank->bytes_of[noted->kind] += bytes;
    rank->now = *noted;
    tc_error error = w->is_aborted ? TC_ERROR_ABORTED : TC_OK;
    error = rank->calls == rank->fail_at ? TC_ERROR_INJECTED : error;
    if (error == TC_OK && rank->calls == rank->stall_at) {
        const struct timespec until = tc_after(rank->stall_s);
        while (!w->is_aborted && pthread_cond_timedwait(&w->changed, &w->lock, &until) == 0) {
        }
    }
    error = error == TC_OK ? tc_meet(w, rank) : error;
    rank->error = rank->error == TC_OK ? error : rank->error;
    pthread_mutex_unlock(&w->lock);
    return error;
}

// ------------------------------------------------------------------------------------------------
// the table

/* Notes that the rank is in a call, or that it should not be. */
static inline tc_error tc_enter(tc_rank *rank, const char *call) {
    tc_world *w = rank->world;
    tc_error error = TC_OK;
    pthread_mutex_lock(&w->lock);
    if (rank->in_call || rank->error != TC_OK) {
        snprintf(w->difference, sizeof w->difference, "rank %u calls %s %s", rank->comm.rank, call,
                 rank->in_call ? "while it is in another call" : "after an error");
        error = tc_misuse(w);
    }
    rank->in_call = true;
    pthread_mutex_unlock(&w->lock);
    return error;
}

static inline int tc_leave(tc_rank *rank, tc_error error) {
    pthread_mutex_lock(&rank->world->lock);
    rank->in_call = false;
    pthread_mutex_unlock(&rank->world->lock);
    return (int)error;
}

static inline int tc_call(void *user, tc_kind kind, const ms_collective *what) {
    tc_rank *rank = (tc_rank *)user;
    tc_noted noted;
    noted.kind = kind;
    noted.what = *what;
    tc_error error = tc_enter(rank, tc_kind_name(kind));
    if (!tc_takes(&noted) || !tc_may_share(&noted, rank->comm.rank, rank->world->count)) {
        snprintf(rank->world->difference, sizeof rank->world->difference,
                 "rank %u calls %s of %llu %s with memory that overlaps, or a dtype that cannot be",
                 rank->comm.rank, tc_kind_name(kind), (unsigned long long)what->count,
                 ms_dtype_name(what->dtype));
        error = tc_misuse(rank->world);
    }
    if (error == TC_OK && rank->in_group && rank->group_count < TC_MOST_IN_GROUP) {
        rank->group[rank->group_count++] = noted;
    } else if (error == TC_OK) {
        error = tc_perform(rank, &noted);
    }
    return tc_leave(rank, error);
}

static inline int tc_all_reduce(void *user, const ms_collective *what) {
    return tc_call(user, TC_ALL_REDUCE, what);
}

static inline int tc_reduce_scatter(void *user, const ms_collective *what) {
    return tc_call(user, TC_REDUCE_SCATTER, what);
}

static inline int tc_all_gather(void *user, const ms_collective *what) {
    return tc_call(user, TC_ALL_GATHER, what);
}

static inline int tc_broadcast(void *user, const ms_collective *what) {
    return tc_call(user, TC_BROADCAST, what);
}

static inline int tc_barrier(void *user, const ms_collective *what) {
    return tc_call(user, TC_BARRIER, what);
}

static inline int tc_group_begin(void *user) {
    tc_rank *rank = (tc_rank *)user;
    const tc_error error = tc_enter(rank, "group_begin");
    rank->in_group = true;
    rank->group_count = 0;
    rank->groups += 1;
    return tc_leave(rank, error);
}

static inline int tc_group_end(void *user) {
    tc_rank *rank = (tc_rank *)user;
    tc_error error = tc_enter(rank, "group_end");
    rank->in_group = false;
    for (uint32_t i = 0; i < rank->group_count && error == TC_OK; ++i) {
        error = tc_perform(rank, &rank->group[i]);
    }
    return tc_leave(rank, error);
}

static inline void tc_abort(void *user) {
    tc_rank *rank = (tc_rank *)user;
    tc_world *w = rank->world;
    pthread_mutex_lock(&w->lock);
    rank->aborts += 1;
    rank->error = rank->error == TC_OK ? TC_ERROR_ABORTED : rank->error;
    w->is_aborted = w->is_aborted || !w->keeps_aborts;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

static inline void tc_open(tc_world *w, uint32_t count) {
    memset(w, 0, sizeof *w);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    w->count = count;
    for (uint32_t r = 0; r < count; ++r) {
        ms_comm *comm = &w->ranks[r].comm;
        w->ranks[r].world = w;
        comm->size = (uint32_t)sizeof *comm;
        comm->name = "threads";
        comm->user = &w->ranks[r];
        comm->rank = r;
        comm->count = count;
        comm->all_reduce = tc_all_reduce;
        comm->reduce_scatter = tc_reduce_scatter;
        comm->all_gather = tc_all_gather;
        comm->broadcast = tc_broadcast;
        comm->barrier = tc_barrier;
        comm->group_begin = tc_group_begin;
        comm->group_end = tc_group_end;
        comm->abort = tc_abort;
        comm->error_text = tc_error_text;
    }
}

static inline void tc_close(tc_world *w) {
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
}

static inline void *tc_start(void *user) {
    tc_rank *rank = (tc_rank *)user;
    return rank->work(rank->comm.rank, rank->argument);
}

/* false: a thread could not be started, or did not return NULL. */
static inline bool tc_run(tc_world *w, void *(*work)(uint32_t rank, void *argument),
                          void *argument) {
    pthread_t threads[TC_MOST_RANKS];
    uint32_t started = 0;
    bool ok = true;
    for (; started < w->count && ok; started += ok) {
        w->ranks[started].work = work;
        w->ranks[started].argument = argument;
        ok = pthread_create(&threads[started], NULL, tc_start, &w->ranks[started]) == 0;
    }
    if (!ok) {
        tc_abort(&w->ranks[0]); // those that have started do not wait for the others
    }
    for (uint32_t r = 0; r < started; ++r) {
        void *returned = NULL;
        ok = pthread_join(threads[r], &returned) == 0 && returned == NULL && ok;
    }
    return ok;
}

#endif // MEMSCALE_TEST_THREADS_COMM_H
