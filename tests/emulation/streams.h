/* Queues of operations that run in an adversarial order.
 *
 * Nothing runs when it is queued. When the host waits for a point of a queue, operations run in a
 * random order drawn from the seed, which respects two things alone: the order within a queue, and
 * the waits between queues. Mostly the order is the reverse of the one they were queued in, as far
 * as waits allow: whatever lacks a wait then runs too early, and its result is wrong.
 *
 *   streams_open          with a seed; seed 0 runs everything in the order it was queued
 *   streams_create        a queue; streams_enqueue puts a function and a copy of its arguments in
 *   streams_event_record  an event is a point of a queue: all that is in it by now
 *   streams_event_wait    what is queued later runs after that point
 *   streams_enqueue_when  with a condition that others outside fulfil, such as another process
 *   streams_finish_*      the host waits
 *   streams_fails         counts a call that can fail, and says whether it is the chosen one
 *
 * Each queue has a clock too: operations take the time that they are said to cost, waits are
 * respected, and no real time passes. The host's clock moves when it waits.
 *
 * One thread at a time. C99 and C++11.
 */
#ifndef STREAMS_H
#define STREAMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void streams_function(void *user, void *arguments);
typedef bool streams_condition(void *user, void *arguments);

/* The first `position` operations of a queue. Position 0 is always behind us. */
typedef struct streams_point {
    int queue;
    uint64_t position;
} streams_point;

typedef struct streams_operation {
    streams_function *function;  /* NULL: wait for the point */
    streams_condition *is_ready; /* NULL: at once; else what others outside do */
    void *user, *arguments;      /* arguments: a copy, ours */
    streams_point point;
    uint64_t sequence; /* over all queues: the order of the calls */
} streams_operation;

typedef struct streams_queue {
    streams_operation *operations; /* a ring */
    size_t capacity, head;
    uint64_t done, queued; /* operations, since the start; never reset */
    uint64_t needed;       /* in streams_run: up to here somebody waits for it */
    uint64_t rank;         /* in streams_run: who races ahead */
    uint64_t time_ns;      /* when all that is queued will be done */
    bool is_live, is_running;
} streams_queue;

typedef struct streams_event {
    streams_point point;
    uint64_t time_ns;
    bool is_live, is_recorded;
} streams_event;

typedef enum streams_policy {
    STREAMS_IN_ORDER,      /* as queued */
    STREAMS_REVERSE_HEAD,  /* the queue whose next operation was queued last */
    STREAMS_REVERSE_REACH, /* the queue that can come to the operation queued last */
    STREAMS_LAZY,          /* only what is waited for */
    STREAMS_RANDOM,
    STREAMS_RACE, /* queues in an order drawn for each wait */
    STREAMS_POLICY_COUNT
} streams_policy;

typedef struct streams {
    streams_queue *queues;
    streams_event *events;
    int queue_count, event_count;
    uint64_t seed, random, sequence;
    uint64_t time_ns; /* the host's clock */
    uint64_t pending, executed;
    uint64_t calls, fail_at; /* the fail_at-th call from now on fails; 0: none */
    void (*idle)(
        void); /* nothing can run until others outside have done something; NULL: that is an error */
    bool asks; /* such an operation is not waited for */
    bool is_even; /* to be set: all policies are as likely */
    char error[200];
} streams;

enum {
    STREAMS_PENDING_LIMIT = 1 << 16,
    STREAMS_REACH_LIMIT = 64,
    STREAMS_IDLE_LIMIT = 1 << 20 /* calls of idle until that is a deadlock */
};

/* splitmix64 */
static inline uint64_t streams_random(streams *e) {
    uint64_t z = (e->random += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static inline uint64_t streams_below(streams *e, uint64_t n) {
    return streams_random(e) % n;
}

static inline void streams_open(streams *e, uint64_t seed) {
    memset(e, 0, sizeof(*e));
    e->seed = seed;
    e->random = seed;
}

/* What is queued is dropped. */
static inline void streams_close(streams *e) {
    for (int i = 0; i < e->queue_count; i++) {
        streams_queue *q = &e->queues[i];
        for (uint64_t n = q->done; n < q->queued; n++) {
            free(q->operations[(q->head + (size_t)(n - q->done)) % q->capacity].arguments);
        }
        free(q->operations);
    }
    free(e->queues);
    free(e->events);
    memset(e, 0, sizeof(*e));
}

/* The error that deadlocks and misuse leave. Returns false. */
static inline bool streams_error(streams *e, const char *text, int a, int b) {
    snprintf(e->error, sizeof(e->error), text, a, b);
    return false;
}

/* ---- a call that can fail ---- */

static inline bool streams_fails(streams *e) {
    e->calls++;
    return e->fail_at && --e->fail_at == 0;
}

/* ---- queues ---- */

/* Returns its number, or -1. The place of a queue that is gone is used again once it is empty. */
static inline int streams_create(streams *e) {
    int i = 0;
    while (i < e->queue_count &&
           (e->queues[i].is_live || e->queues[i].done < e->queues[i].queued)) {
        i++;
    }
    if (i == e->queue_count) {
        const size_t bytes = (size_t)(i + 1) * sizeof(streams_queue);
        streams_queue *const grown = (streams_queue *)realloc(e->queues, bytes);
        if (!grown) {
            return -1;
        }
        e->queues = grown;
        memset(&grown[i], 0, sizeof(grown[i]));
        e->queue_count++;
    }
    e->queues[i].is_live = true;
    e->queues[i].time_ns = e->time_ns;
    return i;
}

/* What is queued still runs. */
static inline void streams_destroy(streams *e, int queue) {
    e->queues[queue].is_live = false;
}

static inline bool streams_is_live(const streams *e, int queue) {
    return queue >= 0 && queue < e->queue_count && e->queues[queue].is_live;
}

static inline streams_operation *streams_at(const streams_queue *q, uint64_t n) {
    return &q->operations[(q->head + (size_t)(n - q->done)) % q->capacity];
}

static inline bool streams_grow(streams_queue *q) {
    const size_t capacity = q->capacity ? 2 * q->capacity : 16;
    const size_t used = (size_t)(q->queued - q->done);
    streams_operation *const ring =
        (streams_operation *)malloc(capacity * sizeof(streams_operation));
    if (!ring) {
        return false;
    }
    for (size_t i = 0; i < used; i++) {
        ring[i] = q->operations[(q->head + i) % q->capacity];
    }
    free(q->operations);
    q->operations = ring;
    q->capacity = capacity;
    q->head = 0;
    return true;
}

static inline streams_operation *streams_push(streams *e, int queue) {
    streams_queue *const q = &e->queues[queue];
    if (q->queued - q->done == q->capacity && !streams_grow(q)) {
        return NULL;
    }
    streams_operation *const o =
        &q->operations[(q->head + (size_t)(q->queued - q->done)) % q->capacity];
    memset(o, 0, sizeof(*o));
    o->sequence = ++e->sequence;
    q->queued++;
    e->pending++;
    return o;
}

static inline streams_point streams_mark(const streams *e, int queue) {
    streams_point p;
    p.queue = queue;
    p.position = e->queues[queue].queued;
    return p;
}

static inline bool streams_is_done(const streams *e, streams_point p) {
    return e->queues[p.queue].done >= p.position;
}

/* ---- running ---- */

static inline void streams_run_one(streams *e, int queue) {
    streams_queue *q = &e->queues[queue];
    const streams_operation o = *streams_at(q, q->done);
    if (o.function) {
        q->is_running = true;
        o.function(o.user, o.arguments);
        q = &e->queues[queue];
        q->is_running = false;
        e->executed++;
    }
    free(o.arguments);
    q->head = (q->head + 1) % q->capacity;
    q->done++;
    e->pending--;
}

static inline bool streams_is_blocked(const streams *e, const streams_operation *o) {
    return o->function ? o->is_ready && !o->is_ready(o->user, o->arguments)
                       : !streams_is_done(e, o->point);
}

/* Marks what has to run before `target` is reached. */
static inline void streams_need(streams *e, streams_point target) {
    streams_queue *const t = &e->queues[target.queue];
    uint64_t n = t->needed > t->done ? t->needed : t->done;
    if (target.position <= n) {
        return;
    }
    t->needed = target.position;
    for (const uint64_t end = target.position < t->queued ? target.position : t->queued; n < end;
         n++) {
        const streams_operation *const o = streams_at(t, n);
        if (!o->function && streams_is_blocked(e, o)) {
            streams_need(e, o->point);
        }
    }
}

/* The last operation that a queue can come to without another queue. */
static inline uint64_t streams_reach(const streams *e, const streams_queue *q) {
    uint64_t n = q->done, sequence = 0;
    while (n < q->queued && n - q->done < STREAMS_REACH_LIMIT) {
        const streams_operation *const o = streams_at(q, n++);
        if (streams_is_blocked(e, o)) {
            break;
        }
        sequence = o->sequence;
    }
    return sequence;
}

static inline uint64_t streams_key(streams *e, const streams_queue *q, streams_policy policy) {
    switch (policy) {
    case STREAMS_IN_ORDER:
        return UINT64_MAX - streams_at(q, q->done)->sequence;
    case STREAMS_REVERSE_HEAD:
        return streams_at(q, q->done)->sequence;
    case STREAMS_REVERSE_REACH:
        return streams_reach(e, q);
    case STREAMS_RACE:
        return q->rank;
    default:
        return streams_random(e) >> 1;
    }
}

/* The queue whose next operation runs now, or -1. */
static inline int streams_choose(streams *e, streams_policy policy) {
    int best = -1;
    uint64_t best_key = 0;
    for (int i = 0; i < e->queue_count; i++) {
        const streams_queue *const q = &e->queues[i];
        if (q->done == q->queued || q->is_running ||
            streams_is_blocked(e, streams_at(q, q->done)) ||
            (policy == STREAMS_LAZY && q->done >= q->needed)) {
            continue;
        }
        const uint64_t key = streams_key(e, q, policy);
        if (best < 0 || key > best_key) {
            best = i;
            best_key = key;
        }
    }
    return best;
}

static inline streams_policy streams_draw(streams *e) {
    static const unsigned char percent[2][STREAMS_POLICY_COUNT] = {{0, 50, 44, 2, 2, 2},
                                                                   {0, 20, 20, 20, 20, 20}};
    if (!e->seed) {
        return STREAMS_IN_ORDER;
    }
    int policy = STREAMS_REVERSE_HEAD;
    for (uint64_t x = streams_below(e, 100); x >= percent[e->is_even][policy]; policy++) {
        x -= percent[e->is_even][policy];
    }
    return (streams_policy)policy;
}

static inline bool streams_is_needed(const streams *e) {
    for (int i = 0; i < e->queue_count; i++) {
        if (e->queues[i].done < e->queues[i].needed) {
            return true;
        }
    }
    return false;
}

static inline bool streams_deadlock(streams *e) {
    for (int i = 0; i < e->queue_count; i++) {
        const streams_queue *const q = &e->queues[i];
        if (q->done >= q->needed) {
            continue;
        }
        if (q->is_running) {
            return streams_error(e, "deadlock: an operation of queue %d waits for its own queue", i,
                                 0);
        }
        if (q->done == q->queued) {
            return streams_error(e, "deadlock: queue %d holds nothing more to wait for", i, 0);
        }
        if (streams_at(q, q->done)->function) {
            return streams_error(e, "deadlock: queue %d waits for others outside", i, 0);
        }
        const int on = streams_at(q, q->done)->point.queue;
        if (e->queues[on].done == e->queues[on].queued) {
            return streams_error(e, "deadlock: queue %d waits for queue %d, which is empty", i, on);
        }
    }
    return streams_error(e, "deadlock: the queues wait for each other in a circle", 0, 0);
}

/* Whether a queue can go on as soon as others outside have done something. */
static inline bool streams_is_outside(const streams *e) {
    for (int i = 0; i < e->queue_count; i++) {
        const streams_queue *const q = &e->queues[i];
        if (q->done < q->queued && streams_at(q, q->done)->is_ready) {
            return true;
        }
    }
    return false;
}

/* Runs until all that is needed has run, and sometimes more. */
static inline bool streams_run(streams *e) {
    uint64_t idled = 0;
    const streams_policy policy = streams_draw(e);
    for (int i = 0; i < e->queue_count; i++) {
        e->queues[i].rank = streams_random(e);
    }
    while (streams_is_needed(e)) {
        const bool stray = e->seed && policy != STREAMS_LAZY && streams_below(e, 128) == 0;
        const int queue = streams_choose(e, stray ? STREAMS_RANDOM : policy);
        if (queue < 0 && e->idle && streams_is_outside(e) && idled++ < STREAMS_IDLE_LIMIT) {
            if (e->asks) {
                return true;
            }
            e->idle();
            continue;
        }
        if (queue < 0) {
            return streams_deadlock(e);
        }
        streams_run_one(e, queue);
    }
    for (uint64_t more = e->seed && streams_below(e, 4) == 0 ? streams_below(e, 8) : 0; more;
         more--) {
        const int queue = streams_choose(e, STREAMS_RANDOM);
        if (queue < 0) {
            break;
        }
        streams_run_one(e, queue);
    }
    return true;
}

static inline void streams_need_nothing(streams *e) {
    for (int i = 0; i < e->queue_count; i++) {
        e->queues[i].needed = 0;
    }
}

/* The host waits for a point. false: it never comes; the reason is in e->error. */
static inline bool streams_finish(streams *e, streams_point point) {
    if (streams_is_done(e, point)) {
        return true;
    }
    streams_need_nothing(e);
    streams_need(e, point);
    return streams_run(e);
}

static inline void streams_host_time(streams *e, uint64_t time_ns) {
    e->time_ns = time_ns > e->time_ns ? time_ns : e->time_ns;
}

static inline bool streams_finish_queue(streams *e, int queue) {
    streams_host_time(e, e->queues[queue].time_ns);
    return streams_finish(e, streams_mark(e, queue));
}

static inline bool streams_finish_all(streams *e) {
    streams_need_nothing(e);
    for (int i = 0; i < e->queue_count; i++) {
        streams_host_time(e, e->queues[i].time_ns);
        streams_need(e, streams_mark(e, i));
    }
    return streams_run(e);
}

/* ---- queueing ---- */

/* Copies `size` bytes of arguments. Runs what has piled up when it is very much. */
static inline bool streams_enqueue_when(streams *e, int queue, streams_condition *is_ready,
                                        streams_function *function, void *user,
                                        const void *arguments, size_t size, uint64_t cost_ns) {
    if (e->pending >= STREAMS_PENDING_LIMIT && !streams_finish_all(e)) {
        return false;
    }
    void *copy = NULL;
    if (size && !(copy = malloc(size))) {
        return streams_error(e, "no memory for the arguments of an operation", 0, 0);
    }
    streams_operation *const o = streams_push(e, queue);
    if (!o) {
        free(copy);
        return streams_error(e, "no memory for the operations of queue %d", queue, 0);
    }
    if (size) {
        memcpy(copy, arguments, size);
    }
    o->function = function;
    o->is_ready = is_ready;
    o->user = user;
    o->arguments = copy;
    streams_queue *const q = &e->queues[queue];
    q->time_ns = (q->time_ns > e->time_ns ? q->time_ns : e->time_ns) + cost_ns;
    return true;
}

static inline bool streams_enqueue(streams *e, int queue, streams_function *function, void *user,
                                   const void *arguments, size_t size, uint64_t cost_ns) {
    return streams_enqueue_when(e, queue, NULL, function, user, arguments, size, cost_ns);
}

/* What is put into `queue` from now on runs after `point`, which may lie ahead. */
static inline bool streams_wait(streams *e, int queue, streams_point point, uint64_t time_ns) {
    streams_queue *const q = &e->queues[queue];
    q->time_ns = time_ns > q->time_ns ? time_ns : q->time_ns;
    if (streams_is_done(e, point)) {
        return true;
    }
    streams_operation *const o = streams_push(e, queue);
    if (!o) {
        return streams_error(e, "no memory for the operations of queue %d", queue, 0);
    }
    o->point = point;
    return true;
}

/* ---- events ---- */

static inline int streams_event_create(streams *e) {
    int i = 0;
    while (i < e->event_count && e->events[i].is_live) {
        i++;
    }
    if (i == e->event_count) {
        const size_t bytes = (size_t)(i + 1) * sizeof(streams_event);
        streams_event *const grown = (streams_event *)realloc(e->events, bytes);
        if (!grown) {
            return -1;
        }
        e->events = grown;
        e->event_count++;
    }
    memset(&e->events[i], 0, sizeof(e->events[i]));
    e->events[i].is_live = true;
    return i;
}

static inline void streams_event_destroy(streams *e, int event) {
    e->events[event].is_live = false;
}

/* Takes the place of what was recorded before. */
static inline void streams_event_record(streams *e, int event, int queue) {
    e->events[event].point = streams_mark(e, queue);
    e->events[event].is_recorded = true;
    e->events[event].time_ns = e->queues[queue].time_ns;
}

/* No wait where nothing was recorded. */
static inline bool streams_event_wait(streams *e, int queue, int event) {
    const streams_event *const v = &e->events[event];
    return !v->is_recorded || streams_wait(e, queue, v->point, v->time_ns);
}

static inline bool streams_finish_event(streams *e, int event) {
    if (!e->events[event].is_recorded) {
        return true;
    }
    streams_host_time(e, e->events[event].time_ns);
    return streams_finish(e, e->events[event].point);
}

static inline bool streams_event_is_done(const streams *e, int event) {
    return !e->events[event].is_recorded || streams_is_done(e, e->events[event].point);
}

/* A question costs the host nothing and may be answered with no many times; now and then the work
 * goes on meanwhile, so that who asks in a loop comes to an end. */
static inline bool streams_ask(streams *e, streams_point point) {
    if (!streams_is_done(e, point) && streams_below(e, 3) == 0) {
        e->asks = true;
        streams_finish(e, point);
        e->asks = false;
    }
    return streams_is_done(e, point);
}

#endif
