/*  threads_comm.h - an ms_comm whose ranks are threads of one process, or forked processes:

        tc_world world;
        tc_open(&world, 4);
        tc_run(&world, work, argument);     // work(rank, argument) on a thread for each rank, and join
        tc_close(&world);

    `work` gives world.ranks[rank].comm to its model, and returns NULL if all is well. What a collective
    computes is in meeting.h: sums have the same bits in every run. Between group_begin and group_end
    collectives are only noted. What a reduce_scatter in place leaves of the parts of other ranks is
    poison.

    Checked, with a text on stderr and abort(), or with TC_ERROR_DIFFERENT where world.keeps_differences
    is set: all ranks call the same collective with the same count, dtype and root, and memory that is
    apart or shared as ms_comm allows; no rank calls two at once, or one after an error. To be set before
    tc_run, in world.ranks[r]: the number of a collective, from 1, that fails, stalls, or never comes.
    Checks of cmocka jump, so ranks make none: they leave their results for the main thread.

    With world.forks each rank is a process. It is set on GPUs, where functions of the host, which wait
    for other ranks, run one at a time; and the memory of an emulated one is opened and closed for a whole
    process: each rank then has an emulation of its own, of the seed rank + 1. Only what lies in memory of
    meeting_shared comes back from there: results, and the world itself if its counts matter.

    Include it after the implementation of memscale.h, or private.h, and with the functions of POSIX
    (_XOPEN_SOURCE 700). */
#ifndef MEMSCALE_TEST_THREADS_COMM_H
#define MEMSCALE_TEST_THREADS_COMM_H

#include <sys/wait.h>

#include "meeting.h"

enum { TC_MOST_RANKS = MEETING_MOST_RANKS, TC_MOST_IN_GROUP = 256 };

typedef struct tc_noted {
    meeting_call call;
    const void *send;
    void *receive;
    double timeout_s;
} tc_noted;

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
    uint64_t bytes_of[TC_KIND_COUNT]; // that this rank sends or receives, whichever is more
    uint64_t groups, aborts;
    tc_error error; // the first one
    /* Its own. */
    bool in_call, in_group;
    tc_noted group[TC_MOST_IN_GROUP];
    uint32_t group_count;
    void *(*work)(uint32_t rank, void *argument);
    void *argument;
} tc_rank;

typedef struct tc_world {
    meeting *at;
    bool forks;             // to be set: see above
    bool keeps_aborts;      // to be set: abort ends only what the rank itself waits for
    bool keeps_differences; // to be set: see above
    uint32_t count;
    tc_rank ranks[TC_MOST_RANKS];
} tc_world;

static inline const char *tc_error_text(void *user, int error) {
    static const char *const texts[] = {MEETING_ERRORS(MEETING_TEXT)};
    const tc_world *w = ((const tc_rank *)user)->world;
    return error == TC_ERROR_DIFFERENT              ? w->at->difference
           : error > 0 && error < (int)TC_ERROR_END ? texts[error - 1]
                                                    : NULL;
}

/* What must not happen; the text is in w->at->difference. */
static inline tc_error tc_misuse(const tc_world *w) {
    if (!w->keeps_differences) {
        fprintf(stderr, "threads_comm.h: %s\n", w->at->difference);
        abort();
    }
    return TC_ERROR_DIFFERENT;
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
static inline bool tc_await(meeting *m, const struct timespec *until, double limit_s) {
    if (m->polls) {
        const struct timespec rest = {0, 100000};
        struct timespec now;
        pthread_mutex_unlock(&m->lock);
        nanosleep(&rest, NULL);
        meeting_lock(m);
        clock_gettime(CLOCK_REALTIME, &now);
        return limit_s <= 0.0 || now.tv_sec < until->tv_sec ||
               (now.tv_sec == until->tv_sec && now.tv_nsec < until->tv_nsec);
    }
    return limit_s <= 0.0 ? pthread_cond_wait(&m->changed, &m->lock) == 0
                          : pthread_cond_timedwait(&m->changed, &m->lock, until) == 0;
}

/* With the lock. */
static inline tc_error tc_meet(tc_rank *rank, const tc_noted *n) {
    meeting *m = rank->world->at;
    const uint32_t r = rank->comm.rank;
    const struct timespec until = tc_after(n->timeout_s);
    const bool is_gone = rank->calls == rank->gone_at;
    bool has_arrived = false;
    tc_error error = TC_OK;
    while (error == TC_OK && !m->is_aborted) {
        if (!is_gone && !has_arrived && meeting_is_free(m)) {
            error = meeting_arrive(m, r, &n->call, n->send);
            has_arrived = true;
        } else if (has_arrived && meeting_is_ready(m, r)) {
            error = meeting_take(m, r, n->send, n->receive);
            return error == TC_ERROR_DIFFERENT ? tc_misuse(rank->world) : error;
        } else if (!tc_await(m, &until, n->timeout_s) && !meeting_is_ready(m, r)) {
            error = is_gone ? TC_ERROR_GONE : TC_ERROR_TIMEOUT;
        }
    }
    meeting_withdraw(m, r);
    return error == TC_OK ? TC_ERROR_ABORTED : error;
}

static inline tc_error tc_perform(tc_rank *rank, const tc_noted *n) {
    meeting *m = rank->world->at;
    const size_t sent = meeting_sent(m, &n->call), received = meeting_received(m, &n->call);
    meeting_lock(m);
    rank->calls += 1;
    rank->calls_of[n->call.kind] += 1;
    rank->bytes_of[n->call.kind] += sent > received ? sent : received;
    tc_error error = m->is_aborted ? TC_ERROR_ABORTED : TC_OK;
    error = rank->calls == rank->fail_at ? TC_ERROR_INJECTED : error;
    if (error == TC_OK && rank->calls == rank->stall_at) {
        const struct timespec until = tc_after(rank->stall_s);
        while (!m->is_aborted && tc_await(m, &until, 1.0)) {
        }
    }
    error = error == TC_OK ? tc_meet(rank, n) : error;
    rank->error = rank->error == TC_OK ? error : rank->error;
    pthread_mutex_unlock(&m->lock);
    return error;
}

// ------------------------------------------------------------------------------------------------
// the table

/* Whether what a rank sends and receives is apart, or the same memory in the way that ms_comm allows. */
static inline bool tc_may_share(const tc_rank *rank, const tc_noted *n) {
    const meeting *m = rank->world->at;
    const uintptr_t send = (uintptr_t)n->send, receive = (uintptr_t)n->receive;
    const uintptr_t sent = meeting_sent(m, &n->call), received = meeting_received(m, &n->call);
    const uintptr_t own = rank->comm.rank * (uintptr_t)meeting_part(&n->call);
    const bool apart = sent == 0 || send + sent <= receive || receive + received <= send;
    switch (n->call.kind) {
    case TC_ALL_REDUCE:
        return apart || send == receive;
    case TC_REDUCE_SCATTER:
        return apart || receive == send + own;
    case TC_ALL_GATHER:
        return apart || send == receive + own;
    case TC_BROADCAST:
        return send == receive;
    default:
        return true;
    }
}

static inline bool tc_takes(const tc_noted *n) {
    const ms_dtype dtype = n->call.dtype;
    return dtype == MS_DTYPE_F32 || dtype == MS_DTYPE_BF16 || dtype == MS_DTYPE_F16 ||
           n->call.kind == TC_BARRIER || (dtype == MS_DTYPE_I8 && !meeting_adds(n->call.kind));
}

/* Notes that the rank is in a call, or that it should not be. */
static inline tc_error tc_enter(tc_rank *rank, const char *call) {
    meeting *m = rank->world->at;
    tc_error error = TC_OK;
    meeting_lock(m);
    if (rank->in_call || rank->error != TC_OK) {
        snprintf(m->difference, sizeof m->difference, "rank %u calls %s %s", rank->comm.rank, call,
                 rank->in_call ? "while it is in another call" : "after an error");
        error = tc_misuse(rank->world);
    }
    rank->in_call = true;
    pthread_mutex_unlock(&m->lock);
    return error;
}

static inline int tc_leave(tc_rank *rank, tc_error error) {
    meeting_lock(rank->world->at);
    rank->in_call = false;
    pthread_mutex_unlock(&rank->world->at->lock);
    return (int)error;
}

static inline int tc_call(void *user, tc_kind kind, const ms_collective *what) {
    tc_rank *rank = (tc_rank *)user;
    meeting *m = rank->world->at;
    tc_noted n;
    memset(&n, 0, sizeof n);
    n.call.kind = kind;
    n.call.dtype = what->dtype;
    n.call.root = what->root;
    n.call.count = what->count;
    n.send = what->send;
    n.receive = what->receive;
    n.timeout_s = what->timeout_s;
    tc_error error = tc_enter(rank, meeting_kind_name(kind));
    if (error == TC_OK && (!tc_takes(&n) || !tc_may_share(rank, &n))) {
        snprintf(m->difference, sizeof m->difference,
                 "rank %u calls %s of %llu %s with memory that overlaps, or a dtype that cannot be",
                 rank->comm.rank, meeting_kind_name(kind), (unsigned long long)what->count,
                 ms_dtype_name(what->dtype));
        error = tc_misuse(rank->world);
    }
    if (error == TC_OK && rank->in_group && rank->group_count < TC_MOST_IN_GROUP) {
        rank->group[rank->group_count++] = n;
    } else if (error == TC_OK) {
        error = tc_perform(rank, &n);
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
    meeting *m = rank->world->at;
    meeting_lock(m);
    rank->aborts += 1;
    rank->error = rank->error == TC_OK ? TC_ERROR_ABORTED : rank->error;
    m->is_aborted = m->is_aborted || !rank->world->keeps_aborts;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
}

// ------------------------------------------------------------------------------------------------
// the ranks

static inline void tc_open(tc_world *w, uint32_t count) {
    memset(w, 0, sizeof *w);
    w->at = (meeting *)meeting_shared(meeting_bytes(count));
    if (w->at == NULL || count > TC_MOST_RANKS) {
        fprintf(stderr, "threads_comm.h: no memory for a meeting of %u ranks\n", count);
        abort();
    }
    meeting_open(w->at, count);
    w->count = count;
#ifdef T_CUDA
    w->forks = true;
#endif
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
    munmap(w->at, meeting_bytes(w->count));
    w->at = NULL;
}

static inline void *tc_start(void *user) {
    tc_rank *rank = (tc_rank *)user;
    return rank->work(rank->comm.rank, rank->argument);
}

static inline bool tc_run_threads(tc_world *w) {
    pthread_t threads[TC_MOST_RANKS];
    uint32_t started = 0;
    bool ok = true;
    for (; started < w->count && ok; started += ok) {
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

/* Notes the first of the checks of a rank that fails. A seat has the model `m` of a rank `rank`; what it is
   part of has a text for the failure of each rank. */
static inline bool tc_check(char *failure, size_t room, const ms_model *m, bool holds,
                            const char *what, int line) {
    if (!holds && failure[0] == 0) {
        snprintf(failure, room, "line %d: %s; %s", line, what, ms_last_error(m));
    }
    return holds;
}

#define TC_CHECK(s, holds)                                                                         \
    tc_check((s)->of->failure[(s)->rank], sizeof(s)->of->failure[0], (s)->m, holds, #holds,        \
             __LINE__)
#define TC_CHECK_OK(s, result) TC_CHECK(s, (result) == MS_RESULT_OK)

static inline bool tc_run_processes(tc_world *w) {
    pid_t children[TC_MOST_RANKS];
    bool ok = true;
    fflush(NULL); // or each would write what is buffered
    for (uint32_t r = 0; r < w->count; ++r) {
        children[r] = fork();
        if (children[r] == 0) {
#ifdef CUDART_EMULATION
            emulation_reset(r + 1);
#endif
            const int status = tc_start(&w->ranks[r]) == NULL ? 0 : 1;
            fflush(NULL);
            _exit(status);
        }
    }
    for (uint32_t r = 0; r < w->count; ++r) {
        int status = 1;
        ok = children[r] > 0 && waitpid(children[r], &status, 0) > 0 && status == 0 && ok;
    }
    return ok;
}

/* false: a rank could not be started, ended by a signal, or did not return NULL. */
static inline bool tc_run(tc_world *w, void *(*work)(uint32_t rank, void *argument),
                          void *argument) {
    for (uint32_t r = 0; r < w->count; ++r) {
        w->ranks[r].work = work;
        w->ranks[r].argument = argument;
    }
    return w->forks ? tc_run_processes(w) : tc_run_threads(w);
}

#endif // MEMSCALE_TEST_THREADS_COMM_H
