/*  left_out.h - the virtual device with one of its events less: a record or a wait on the stream of the
    network, or a wait for what that stream was given, does nothing. The calls of one state are numbered
    from 1, in every run alike. `is_of_vote` tells those of votes from those of a program; `is_needed` says of each whether it orders anything that would not be in
    this order without it, by what else is waited for. Include it after virtual.h. */
#ifndef LEFT_OUT_H
#define LEFT_OUT_H

enum { LO_EVENTS = 1 << 11, LO_CALLS = 1 << 13, LO_HOST = MS_STREAM_COUNT };

/* How many operations of each stream happen before something. */
typedef struct lo_clock {
    uint64_t of[MS_STREAM_COUNT];
} lo_clock;

typedef struct lo_device {
    v_device late; // the first member
    uint32_t left_out, calls;
    bool is_needed[LO_CALLS], is_of_vote[LO_CALLS];
    lo_clock clocks[MS_STREAM_COUNT + 1]; // of what each stream is given next, and the host does
    lo_clock events[LO_EVENTS];
    uint32_t records[LO_EVENTS]; // the number of the call, if it was on the network
} lo_device;

static inline lo_device *lo_of(void *state) {
    return (lo_device *)(void *)((v_state *)state)->device;
}

/* Returns whether it was ordered already. */
static inline bool lo_join(lo_clock *to, const lo_clock *from) {
    bool was = true;
    for (int s = 0; s < MS_STREAM_COUNT; ++s) {
        was = was && to->of[s] >= from->of[s];
        to->of[s] = to->of[s] > from->of[s] ? to->of[s] : from->of[s];
    }
    return was;
}

static inline uint64_t lo_given(void *state, int stream) {
    const v_state *s = (const v_state *)state;
    return s->device->engine.queues[s->streams[stream].queue].queued;
}

/* The number of a call. */
static inline uint32_t lo_call(lo_device *d) {
    d->calls += d->calls < LO_CALLS - 1;
    return d->calls;
}

static inline int lo_record(void *state, ms_stream_kind stream, uint32_t event) {
    lo_device *d = lo_of(state);
    const uint32_t number = stream == MS_STREAM_NETWORK ? lo_call(d) : 0;
    if (number > 0 && event == MSI_EVENT_NETWORK) { // it has followed what is computed
        d->is_of_vote[number - 1] = d->is_of_vote[number] = true;
    }
    if (number > 0 && number == d->left_out) {
        return 0;
    }
    if (event < LO_EVENTS) {
        d->clocks[stream].of[stream] = lo_given(state, (int)stream);
        d->events[event] = d->clocks[stream];
        d->records[event] = number;
    }
    return v_record(state, stream, event);
}

static inline int lo_wait(void *state, ms_stream_kind stream, uint32_t event) {
    lo_device *d = lo_of(state);
    const uint32_t record = event < LO_EVENTS ? d->records[event] : 0;
    const uint32_t number = stream == MS_STREAM_NETWORK || record > 0 ? lo_call(d) : 0;
    d->is_of_vote[number] = d->is_of_vote[number] || event == MSI_EVENT_NETWORK;
    if (number > 0 && number == d->left_out) {
        return 0;
    }
    if (event < LO_EVENTS) {
        d->clocks[stream].of[stream] = lo_given(state, (int)stream);
        const bool was = lo_join(&d->clocks[stream], &d->events[event]);
        d->is_needed[number] = !was;
        d->is_needed[record] = d->is_needed[record] || !was;
    }
    return v_wait(state, stream, event);
}

static inline void lo_tell_all(lo_device *d) {
    for (int s = 0; s < MS_STREAM_COUNT; ++s) {
        lo_join(&d->clocks[s], &d->clocks[LO_HOST]);
    }
}

static inline int lo_wait_on_host(void *state, uint32_t event) {
    lo_device *d = lo_of(state);
    if (event < LO_EVENTS) {
        const bool was = lo_join(&d->clocks[LO_HOST], &d->events[event]);
        d->is_needed[d->records[event]] = d->is_needed[d->records[event]] || !was;
        lo_tell_all(d);
    }
    return v_wait_on_host(state, event);
}

static inline int lo_synchronize(void *state) {
    lo_device *d = lo_of(state);
    for (int s = 0; s < MS_STREAM_COUNT; ++s) {
        d->clocks[LO_HOST].of[s] = lo_given(state, s);
    }
    lo_tell_all(d);
    return v_synchronize(state);
}

static inline ms_backend lo_backend(lo_device *d) {
    ms_backend b = v_backend(&d->late);
    b.record = lo_record;
    b.wait = lo_wait;
    b.wait_on_host = lo_wait_on_host;
    b.synchronize = lo_synchronize;
    return b;
}

#endif // LEFT_OUT_H
