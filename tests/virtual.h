/*  virtual.h - a device that computes what the CPU does, later: every function of its table only
    queues its work, and the work runs when the host waits, in the adversarial order of
    emulation/streams.h. What lacks a wait comes out wrong. No GPU and no CUDA are imitated here;
    for that see emulation/cuda_runtime.h.

        v_device device;
        v_open(&device, seed);               // seed 0: everything in the order of the calls
        config.backend = v_backend(&device);
        ... ms_create to ms_destroy; layers through v_wrap, whose callbacks then run late too
        v_close(&device);

    Device memory is filled with poison when it is allocated and when it is released. Copies read
    and write host memory when they run, whichever memory it is. The n-th call can be made to fail
    (engine.fail_at), and the n-th operation (late_fail_at), which the host hears of when it waits
    next. Include it after the implementation of memscale.h. */
#ifndef VIRTUAL_H
#define VIRTUAL_H

#include "emulation/streams.h"

enum {
    V_ERROR_MEMORY = 2,
    V_ERROR_CALL = 11,     // engine.fail_at
    V_ERROR_LATE = 12,     // late_fail_at
    V_ERROR_DEADLOCK = 13, // engine.error says more
    V_ERROR_EVENT = 14     // no such event
};

enum { V_ALLOCATIONS = 64, V_READS = 64, V_RUBBISH = 0x7f };

typedef struct v_range {
    uint8_t *start;
    uint64_t bytes;
} v_range;

/* What a copy to the host reads: of the latest ones. */
typedef struct v_read {
    v_range from; // start NULL: it has run
    uint64_t number;
} v_read;

typedef struct v_device {
    streams engine;
    ms_backend cpu;
    v_range memory[V_ALLOCATIONS];
    uint64_t states;        // open ones
    uint64_t operations;    // that have run
    uint64_t late_fail_at;  // the n-th operation from now on is left out; 0: none
    uint64_t waits_of_host; // that found work to wait for
    uint64_t numbered;      // operations that were queued
    v_read reads[V_READS];
    uint64_t overtaken;       // copies to the host, by a later operation that writes what they read
    int late_error;           // for the next wait of the host
    int callback_error;       // the last one that a callback returned when it ran
    bool is_running;          // an operation
    bool lends;               // what stays on the host is the trainer's memory
    bool drops_waits;         // planted mistakes: streams do not wait for each other,
    bool drops_waits_of_host; // nor does the host for events
} v_device;

/* What ms_call.stream and ms_config.stream point to. */
typedef struct v_stream {
    v_device *device;
    int queue;
} v_stream;

typedef struct v_state {
    v_device *device;
    v_stream streams[MS_STREAM_COUNT];
    bool owns_compute;
    int *events;
    uint32_t event_count;
    ms_allocator host;
} v_state;

// ------------------------------------------------------------------------------------------------
// operations

typedef enum v_kind {
    V_COPY,
    V_TELL,
    V_FILL_BYTES,
    V_FILL_F32,
    V_SCALE,
    V_ADD,
    V_CAST,
    V_LOSS,
    V_ADD_SQUARES,
    V_CLIP_SCALE,
    V_UPDATE,
    V_FACTOR,
    V_CAST_VOTE,
    V_COUNT_VOTES,
    V_CALL,
    V_GEMM
} v_kind;

enum { V_TOLD_BYTES = 256 }; // that one operation carries: of an upload, or for a call

typedef struct v_work {
    v_kind kind;
    uint64_t number; // in the order of the calls, from 1
    void *target;
    const void *source;
    uint64_t count;
    uint8_t byte;
    float value;
    double factor;
    ms_dtype to, from;
    ms_norm *norms;
    void (*call)(void *argument);
    float limits[MS_LIMIT_NORMS];
    double *sum;
    uint32_t param, *nonfinite;
    ms_step_state *step;
    ms_update_args update;
    ms_factor_args factors;
    float alpha, beta;
    ms_matrix a, b, c;
    uint8_t told[V_TOLD_BYTES];
} v_work;

static inline v_work v_begin(v_kind kind, void *target, const void *source, uint64_t count) {
    v_work w;
    memset(&w, 0, sizeof w);
    w.kind = kind;
    w.target = target;
    w.source = source;
    w.count = count;
    return w;
}

static inline int v_compute(const ms_backend *cpu, const v_work *w) {
    void *user = cpu->user;
    switch (w->kind) {
    case V_COPY:
        return cpu->copy(user, w->target, w->source, w->count);
    case V_TELL:
        return cpu->copy(user, w->target, w->told, w->count);
    case V_FILL_BYTES:
        return cpu->fill_bytes(user, w->target, w->byte, w->count);
    case V_FILL_F32:
        return cpu->fill_f32(user, w->target, w->value, w->count);
    case V_SCALE:
        return cpu->scale_f32(user, w->target, (const float *)w->source, w->count);
    case V_ADD:
        return cpu->add(user, w->target, w->to, w->source, w->from, w->count);
    case V_CAST:
        return cpu->cast(user, w->target, w->to, w->source, w->from, w->count);
    case V_LOSS:
        return cpu->loss(user, w->source, w->count, w->factor, w->step);
    case V_ADD_SQUARES:
        return cpu->add_squares(user, w->source, w->from, w->count, w->sum, w->param, w->nonfinite);
    case V_CLIP_SCALE:
        return cpu->clip_scale(user, w->norms, w->limits, w->param, w->step,
                               (ms_update_factors *)w->target, w->count);
    case V_UPDATE:
        return cpu->update(user, &w->update);
    case V_FACTOR:
        return cpu->factor(user, &w->factors);
    case V_CAST_VOTE:
        return cpu->cast_vote(user, (ms_vote *)w->target, (ms_vote_kind)w->byte,
                              (const ms_step_state *)w->source, w->step, w->norms, w->param);
    case V_COUNT_VOTES:
        return cpu->count_votes(user, (const ms_vote *)w->source, (uint32_t)w->count, w->step,
                                w->norms, w->param);
    case V_CALL:
        w->call((void *)(uintptr_t)w->told);
        return 0;
    default:
        return cpu->gemm(user, w->alpha, &w->a, &w->b, w->beta, &w->c);
    }
}

/* Whether the operation that is to run now does. */
static inline bool v_runs(v_device *d) {
    d->operations += 1;
    if (d->late_fail_at == 0 || --d->late_fail_at > 0) {
        return true;
    }
    d->late_error = V_ERROR_LATE;
    return false;
}

/* The bytes that an operation writes, as far as copies to the host read such. */
static inline v_range v_written(const v_work *w) {
    const bool judges = w->kind == V_LOSS || w->kind == V_CLIP_SCALE || w->kind == V_COUNT_VOTES;
    const bool of_floats = w->kind == V_FILL_F32 || w->kind == V_SCALE;
    const bool of_elements = w->kind == V_ADD || w->kind == V_CAST;
    v_range r;
    r.start = (uint8_t *)(judges                     ? (void *)w->step
                          : w->kind == V_ADD_SQUARES ? (void *)w->nonfinite
                                                     : w->target);
    r.bytes = judges                     ? sizeof *w->step
              : w->kind == V_ADD_SQUARES ? sizeof *w->nonfinite
                                         : w->count * (of_floats     ? sizeof(float)
                                                       : of_elements ? ms_dtype_bytes(w->to)
                                                                     : 1);
    return r;
}

/* Counts the copies to the host that this operation, which was queued after them, runs before. An
   order that is seldom harmful, since both take effect at once here, and wrong all the same. */
static inline void v_overtake(v_device *d, const v_work *w) {
    const v_range r = v_written(w);
    for (int i = 0; i < V_READS; ++i) {
        const v_read *read = &d->reads[i];
        const uintptr_t from = (uintptr_t)read->from.start, to = (uintptr_t)r.start;
        d->overtaken += from != 0 && read->number < w->number && to < from + read->from.bytes &&
                        from < to + r.bytes;
    }
}

static inline void v_run_work(void *user, void *arguments) {
    v_device *d = (v_device *)user;
    const v_work *w = (const v_work *)arguments;
    v_read *read = &d->reads[w->number % V_READS];
    v_overtake(d, w);
    read->from.start = read->number == w->number ? NULL : read->from.start;
    if (v_runs(d)) {
        const int error = v_compute(&d->cpu, w);
        d->late_error = error != 0 ? error : d->late_error;
    }
}

/* Queued, or done at once where another operation asks for it. */
static inline int v_put(v_state *state, ms_stream_kind stream, const v_work *w) {
    v_device *d = state->device;
    if (d->is_running) {
        return v_compute(&d->cpu, w);
    }
    if (streams_fails(&d->engine)) {
        return V_ERROR_CALL;
    }
    v_work numbered = *w;
    numbered.number = ++d->numbered;
    if (stream == MS_STREAM_TO_HOST) {
        v_read *read = &d->reads[numbered.number % V_READS];
        read->number = numbered.number;
        read->from.start = (uint8_t *)(uintptr_t)w->source;
        read->from.bytes = w->count;
    }
    const bool queued = streams_enqueue(&d->engine, state->streams[stream].queue, v_run_work, d,
                                        &numbered, sizeof numbered, 1000);
    return queued ? 0 : V_ERROR_MEMORY;
}

static inline int v_copy_in(void *state, void *device, const void *host, uint64_t bytes) {
    const v_work w = v_begin(V_COPY, device, host, bytes);
    return v_put((v_state *)state, MS_STREAM_TO_DEVICE, &w);
}

static inline int v_copy_out(void *state, void *host, const void *device, uint64_t bytes) {
    const v_work w = v_begin(V_COPY, host, device, bytes);
    return v_put((v_state *)state, MS_STREAM_TO_HOST, &w);
}

static inline int v_tell(void *state, void *device, const void *host, uint64_t bytes) {
    int error = 0;
    for (uint64_t done = 0; done < bytes && error == 0; done += V_TOLD_BYTES) {
        const uint64_t rest = bytes - done;
        v_work w = v_begin(V_TELL, (uint8_t *)device + done, NULL,
                           rest < V_TOLD_BYTES ? rest : (uint64_t)V_TOLD_BYTES);
        memcpy(w.told, (const uint8_t *)host + done, (size_t)w.count);
        error = v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
    }
    return error;
}

static inline int v_copy(void *state, void *device, const void *source, uint64_t bytes) {
    const v_work w = v_begin(V_COPY, device, source, bytes);
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_fill_bytes(void *state, void *device, uint8_t value, uint64_t bytes) {
    v_work w = v_begin(V_FILL_BYTES, device, NULL, bytes);
    w.byte = value;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_fill_f32(void *state, void *device, float value, uint64_t count) {
    v_work w = v_begin(V_FILL_F32, device, NULL, count);
    w.value = value;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_scale_f32(void *state, void *device, const float *factor, uint64_t count) {
    const v_work w = v_begin(V_SCALE, device, factor, count);
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_add(void *state, void *target, ms_dtype to, const void *source, ms_dtype from,
                        uint64_t count) {
    v_work w = v_begin(V_ADD, target, source, count);
    w.to = to;
    w.from = from;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_cast(void *state, void *target, ms_dtype to, const void *source, ms_dtype from,
                         uint64_t count) {
    v_work w = v_begin(V_CAST, target, source, count);
    w.to = to;
    w.from = from;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_loss(void *state, const void *losses, uint64_t count, double factor,
                         ms_step_state *step) {
    v_work w = v_begin(V_LOSS, NULL, losses, count);
    w.factor = factor;
    w.step = step;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_add_squares(void *state, const void *device, ms_dtype dtype, uint64_t count,
                                double *sum, uint32_t number, uint32_t *nonfinite) {
    v_work w = v_begin(V_ADD_SQUARES, NULL, device, count);
    w.sum = sum;
    w.from = dtype;
    w.param = number;
    w.nonfinite = nonfinite;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_clip_scale(void *state, ms_norm *norms, const float *limits, uint32_t count,
                               ms_step_state *step, ms_update_factors *factors,
                               uint64_t factor_count) {
    v_work w = v_begin(V_CLIP_SCALE, factors, NULL, factor_count);
    w.norms = norms;
    memcpy(w.limits, limits, count * sizeof *limits);
    w.param = count;
    w.step = step;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_update(void *state, const ms_update_args *args) {
    v_work w = v_begin(V_UPDATE, NULL, NULL, 0);
    w.update = *args;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_factor(void *state, const ms_factor_args *args) {
    v_work w = v_begin(V_FACTOR, NULL, NULL, 0);
    w.factors = *args;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_cast_vote(void *state, ms_vote *vote, ms_vote_kind kind,
                              const ms_step_state *step, const ms_step_state *judged,
                              const ms_norm *norms, uint32_t count) {
    v_work w = v_begin(V_CAST_VOTE, vote, step, sizeof *vote);
    w.byte = (uint8_t)kind;
    w.step = (ms_step_state *)(uintptr_t)judged;
    w.norms = (ms_norm *)(uintptr_t)norms;
    w.param = count;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_count_votes(void *state, const ms_vote *votes, uint32_t vote_count,
                                ms_step_state *judged, ms_norm *norms, uint32_t count) {
    v_work w = v_begin(V_COUNT_VOTES, NULL, votes, vote_count);
    w.step = judged;
    w.norms = norms;
    w.param = count;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

static inline int v_network_copy(void *state, void *target, const void *source, uint64_t bytes) {
    const v_work w = v_begin(V_COPY, target, source, bytes);
    return v_put((v_state *)state, MS_STREAM_NETWORK, &w);
}

static inline int v_network_call(void *state, void (*function)(void *argument),
                                 const void *argument, uint32_t bytes) {
    v_work w = v_begin(V_CALL, NULL, NULL, 0);
    w.call = function;
    memcpy(w.told, argument, bytes);
    return v_put((v_state *)state, MS_STREAM_NETWORK, &w);
}

static inline void *v_network_stream(void *state) {
    return &((v_state *)state)->streams[MS_STREAM_NETWORK];
}

static inline int v_gemm(void *state, float alpha, const ms_matrix *a, const ms_matrix *b,
                         float beta, const ms_matrix *c) {
    v_work w = v_begin(V_GEMM, NULL, NULL, 0);
    w.alpha = alpha;
    w.beta = beta;
    w.a = *a;
    w.b = *b;
    w.c = *c;
    return v_put((v_state *)state, MS_STREAM_COMPUTE, &w);
}

// ------------------------------------------------------------------------------------------------
// memory

static inline void v_spoil(const v_range *range) {
    memset(range->start, V_RUBBISH, (size_t)range->bytes);
}

static inline int v_memory_alloc(void *user, const ms_allocator *host, uint64_t bytes,
                                 void **device) {
    v_device *d = (v_device *)user;
    int i = 0;
    while (i < V_ALLOCATIONS && d->memory[i].start != NULL) {
        ++i;
    }
    *device = NULL;
    if (i == V_ALLOCATIONS || streams_fails(&d->engine) ||
        d->cpu.memory_alloc(d->cpu.user, host, bytes, device) != 0) {
        return V_ERROR_MEMORY;
    }
    d->memory[i].start = (uint8_t *)*device;
    d->memory[i].bytes = bytes;
    v_spoil(&d->memory[i]);
    return 0;
}

/* Waits, as cudaFree does. */
static inline void v_memory_release(void *user, const ms_allocator *host, void *device,
                                    uint64_t bytes) {
    v_device *d = (v_device *)user;
    streams_finish_all(&d->engine);
    for (int i = 0; i < V_ALLOCATIONS; ++i) {
        if (d->memory[i].start == device) {
            v_spoil(&d->memory[i]);
            d->memory[i].start = NULL;
        }
    }
    d->cpu.memory_release(d->cpu.user, host, device, bytes);
}

static inline bool v_is_on_device(const v_device *d, const void *pointer) {
    const uintptr_t p = (uintptr_t)pointer;
    for (int i = 0; i < V_ALLOCATIONS; ++i) {
        const uintptr_t start = (uintptr_t)d->memory[i].start;
        if (start != 0 && p >= start && p - start < d->memory[i].bytes) {
            return true;
        }
    }
    return false;
}

static inline void v_hardware(void *user, ms_hardware *hardware) {
    v_device *d = (v_device *)user;
    d->cpu.hardware(d->cpu.user, hardware);
}

static inline const char *v_error_text(void *user, int error) {
    const v_device *d = (const v_device *)user;
    switch (error) {
    case V_ERROR_MEMORY:
        return "out of memory";
    case V_ERROR_CALL:
        return "a call was made to fail";
    case V_ERROR_LATE:
        return "an operation was made to fail";
    case V_ERROR_DEADLOCK:
        return d->engine.error;
    case V_ERROR_EVENT:
        return "no such event";
    default:
        return NULL;
    }
}

// ------------------------------------------------------------------------------------------------
// streams and events

static inline v_stream v_new_stream(v_device *d) {
    v_stream s;
    s.device = d;
    s.queue = streams_create(&d->engine);
    return s;
}

/* All work is done. */
static inline void v_close_state(void *state) {
    v_state *s = (v_state *)state;
    v_device *d = s->device;
    for (uint32_t i = 0; i < s->event_count; ++i) {
        streams_event_destroy(&d->engine, s->events[i]);
    }
    for (int i = s->owns_compute ? 0 : 1; i < MS_STREAM_COUNT; ++i) {
        streams_destroy(&d->engine, s->streams[i].queue);
    }
    const ms_allocator host = s->host;
    if (s->events != NULL) {
        msi_release(&host, s->events, s->event_count * sizeof *s->events);
    }
    d->states -= 1;
    msi_release(&host, s, sizeof *s);
}

/* As many events as are wanted, all or none. */
static inline int v_make_events(v_state *s, uint32_t count) {
    const uint32_t before = s->event_count;
    if (count <= before) {
        return 0;
    }
    int *events = (int *)msi_alloc(&s->host, count * sizeof *events);
    if (events == NULL) {
        return V_ERROR_MEMORY;
    }
    for (uint32_t i = 0; i < count; ++i) {
        events[i] = i < before ? s->events[i] : streams_event_create(&s->device->engine);
    }
    if (s->events != NULL) {
        msi_release(&s->host, s->events, before * sizeof *events);
    }
    s->events = events;
    s->event_count = count;
    return 0;
}

static inline int v_open_state(void *user, const ms_open_args *args, void **state) {
    v_device *d = (v_device *)user;
    v_state *s = streams_fails(&d->engine) ? NULL : (v_state *)msi_alloc(args->host, sizeof *s);
    if (s == NULL) {
        return V_ERROR_MEMORY;
    }
    memset(s, 0, sizeof *s);
    s->device = d;
    s->host = *args->host;
    s->owns_compute = args->stream == NULL;
    for (int i = 0; i < MS_STREAM_COUNT; ++i) {
        s->streams[i] = i == 0 && !s->owns_compute ? *(v_stream *)args->stream : v_new_stream(d);
    }
    d->states += 1;
    if (v_make_events(s, args->event_count) != 0) {
        v_close_state(s);
        return V_ERROR_MEMORY;
    }
    *state = s;
    return 0;
}

static inline int v_prepare(void *state, const ms_prepare_args *args) {
    v_state *s = (v_state *)state;
    return streams_fails(&s->device->engine) ? V_ERROR_CALL : v_make_events(s, args->event_count);
}

/* What operations have left behind, once. */
static inline int v_heard(v_device *d, bool is_done) {
    const int error = is_done ? d->late_error : V_ERROR_DEADLOCK;
    d->late_error = 0;
    return error;
}

static inline int v_synchronize(void *state) {
    v_device *d = ((v_state *)state)->device;
    if (streams_fails(&d->engine)) {
        return V_ERROR_CALL;
    }
    bool is_done = true;
    d->waits_of_host += d->engine.pending > 0;
    for (int i = 0; i < MS_STREAM_COUNT; ++i) {
        is_done = streams_finish_queue(&d->engine, ((v_state *)state)->streams[i].queue) && is_done;
    }
    return v_heard(d, is_done);
}

static inline int v_record(void *state, ms_stream_kind stream, uint32_t event) {
    v_state *s = (v_state *)state;
    if (event >= s->event_count || streams_fails(&s->device->engine)) {
        return event >= s->event_count ? V_ERROR_EVENT : V_ERROR_CALL;
    }
    streams_event_record(&s->device->engine, s->events[event], s->streams[stream].queue);
    return 0;
}

static inline int v_wait(void *state, ms_stream_kind stream, uint32_t event) {
    v_state *s = (v_state *)state;
    streams *e = &s->device->engine;
    if (event >= s->event_count || streams_fails(e)) {
        return event >= s->event_count ? V_ERROR_EVENT : V_ERROR_CALL;
    }
    const bool is_queued =
        s->device->drops_waits || streams_event_wait(e, s->streams[stream].queue, s->events[event]);
    return is_queued ? 0 : V_ERROR_MEMORY;
}

static inline int v_wait_on_host(void *state, uint32_t event) {
    v_state *s = (v_state *)state;
    v_device *d = s->device;
    if (event >= s->event_count || streams_fails(&d->engine)) {
        return event >= s->event_count ? V_ERROR_EVENT : V_ERROR_CALL;
    }
    if (d->drops_waits_of_host) {
        return 0;
    }
    d->waits_of_host += !streams_event_is_done(&d->engine, s->events[event]);
    return v_heard(d, streams_finish_event(&d->engine, s->events[event]));
}

/* As an impatient host is answered: not yet, though the work may be done as soon as it waits. */
static inline int v_query(void *state, uint32_t event, bool *has_come) {
    v_state *s = (v_state *)state;
    v_device *d = s->device;
    if (event >= s->event_count || streams_fails(&d->engine)) {
        return event >= s->event_count ? V_ERROR_EVENT : V_ERROR_CALL;
    }
    const streams_event *of = &d->engine.events[s->events[event]];
    *has_come =
        streams_event_is_done(&d->engine, s->events[event]) || streams_ask(&d->engine, of->point);
    return *has_come ? v_heard(d, true) : 0;
}

static inline void *v_stream_of(void *state) {
    return &((v_state *)state)->streams[MS_STREAM_COMPUTE];
}

// ------------------------------------------------------------------------------------------------
// the device

static inline void v_open(v_device *d, uint64_t seed) {
    memset(d, 0, sizeof *d);
    streams_open(&d->engine, seed);
    d->cpu = ms_backend_cpu();
}

static inline void v_close(v_device *d) {
    streams_close(&d->engine);
}

static inline ms_backend v_backend(v_device *d) {
    ms_backend b;
    memset(&b, 0, sizeof b);
    b.size = sizeof b;
    b.name = "virtual";
    b.user = d;
    b.is_asynchronous = true;
    b.has_state_formats = b.has_update_steps = true;
    b.memory_alloc = v_memory_alloc;
    b.memory_release = v_memory_release;
    b.hardware = v_hardware;
    b.error_text = v_error_text;
    b.open = v_open_state;
    b.close = v_close_state;
    b.prepare = v_prepare;
    b.copy_in = v_copy_in;
    b.copy_out = v_copy_out;
    b.upload = v_tell;
    b.copy = v_copy;
    b.fill_bytes = v_fill_bytes;
    b.fill_f32 = v_fill_f32;
    b.scale_f32 = v_scale_f32;
    b.add = v_add;
    b.cast = v_cast;
    b.loss = v_loss;
    b.add_squares = v_add_squares;
    b.clip_scale = v_clip_scale;
    b.update = v_update;
    b.factor = v_factor;
    b.gemm = v_gemm;
    b.cast_vote = v_cast_vote;
    b.count_votes = v_count_votes;
    b.network_copy = v_network_copy;
    b.network_call = v_network_call;
    b.network_stream = v_network_stream;
    b.synchronize = v_synchronize;
    b.record = v_record;
    b.wait = v_wait;
    b.wait_on_host = v_wait_on_host;
    b.query = v_query;
    b.stream = v_stream_of;
    return b;
}

// ------------------------------------------------------------------------------------------------
// callbacks that run late

/* In the place of a layer's callbacks and its user. */
typedef struct v_layer {
    ms_layer_fn forward, backward, recompute;
    void *user;
} v_layer;

/* A call with views of its own. */
typedef struct v_task {
    ms_layer_fn function;
    ms_call call;
    ms_view in[MS_LIMIT_IN], out[MS_LIMIT_OUT], saved[MS_LIMIT_SAVED], param[MS_LIMIT_PARAM];
    ms_view state[MS_LIMIT_STATE], grad_out[MS_LIMIT_OUT], grad_in[MS_LIMIT_IN];
    ms_view grad_param[MS_LIMIT_PARAM];
} v_task;

static inline void v_run_task(void *user, void *arguments) {
    v_task *t = (v_task *)arguments;
    v_device *d = (v_device *)user;
    ms_call *c = &t->call;
    c->in = t->in; // the task was copied
    c->out = t->out;
    c->saved = t->saved;
    c->param = t->param;
    c->state = t->state;
    c->grad_out = c->grad_out != NULL ? t->grad_out : NULL;
    c->grad_in = c->grad_in != NULL ? t->grad_in : NULL;
    c->grad_param = c->grad_param != NULL ? t->grad_param : NULL;
    if (v_runs(d)) {
        d->is_running = true;
        const int error = t->function(c);
        d->is_running = false;
        d->callback_error = error != 0 ? error : d->callback_error;
    }
}

static inline void v_copy_views(ms_view *to, const ms_view *from, size_t count) {
    if (from != NULL) {
        memcpy(to, from, count * sizeof *to);
    }
}

static inline int v_later(const ms_call *call, ms_layer_fn function) {
    const v_layer *layer = (const v_layer *)call->user;
    const v_stream *stream = (const v_stream *)call->stream;
    v_task *t = (v_task *)calloc(1, sizeof *t);
    if (t == NULL) {
        return V_ERROR_MEMORY;
    }
    t->function = function;
    t->call = *call;
    t->call.user = layer->user;
    v_copy_views(t->in, call->in, MS_LIMIT_IN);
    v_copy_views(t->out, call->out, MS_LIMIT_OUT);
    v_copy_views(t->saved, call->saved, MS_LIMIT_SAVED);
    v_copy_views(t->param, call->param, MS_LIMIT_PARAM);
    v_copy_views(t->state, call->state, MS_LIMIT_STATE);
    v_copy_views(t->grad_out, call->grad_out, MS_LIMIT_OUT);
    v_copy_views(t->grad_in, call->grad_in, MS_LIMIT_IN);
    v_copy_views(t->grad_param, call->grad_param, MS_LIMIT_PARAM);
    const bool queued = streams_enqueue(&stream->device->engine, stream->queue, v_run_task,
                                        stream->device, t, sizeof *t, 5000);
    free(t);
    return queued ? 0 : V_ERROR_MEMORY;
}

static inline int v_forward(const ms_call *call) {
    return v_later(call, ((const v_layer *)call->user)->forward);
}

static inline int v_backward(const ms_call *call) {
    return v_later(call, ((const v_layer *)call->user)->backward);
}

static inline int v_recompute(const ms_call *call) {
    return v_later(call, ((const v_layer *)call->user)->recompute);
}

/* The layer with callbacks that are host code, and touch nothing but their operands, as one for
   this device. `layer` must live as long as the model. */
static inline ms_layer_desc v_wrap(const ms_layer_desc *desc, v_layer *layer) {
    ms_layer_desc d = *desc;
    layer->forward = desc->forward;
    layer->backward = desc->backward;
    layer->recompute = desc->recompute;
    layer->user = desc->user;
    d.forward = v_forward;
    d.backward = desc->backward != NULL ? v_backward : NULL;
    d.recompute = desc->recompute != NULL ? v_recompute : NULL;
    d.user = layer;
    return d;
}

#endif // VIRTUAL_H
