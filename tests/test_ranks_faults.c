/*  test_ranks_faults.c - several ranks of which one fails: a collective that returns an error, stalls or
    never comes; a callback, a loss that is not a number; ms_cancel; ranks that differ; and processes
    that are killed. What is checked: all ranks end with an error, in time; a step that a rank gives up
    has changed nothing on any, and is run again with the bits that it would have had; or, if updates
    had begun, all have failed. Random graphs and random sharding, on the CPU and on a device whose
    streams run in an adversarial order (virtual.h). MEMSCALE_TEST_DAGS sets how many graphs are run,
    MEMSCALE_TEST_SEED which is the first. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "virtual.h"
#include "late_dag.h"
#include "threads_comm.h"
#include <signal.h>

enum { MOST_RANKS = 4, STEPS = 4, ROOM = 1 << 18, MOST_ITEMS = 2048, MOST_OUTCOMES = 512 };
enum { MOST_TRIES = 40, CANCELS = 10 };

// ------------------------------------------------------------------------------------------------
// what a rank has

typedef struct item {
    ms_tensor tensor;
    uint32_t begin, end;
    bool is_buffer;
} item;

typedef struct snapshot {
    uint32_t used, count;
    item items[MOST_ITEMS];
    unsigned char data[ROOM];
} snapshot;

static ms_result see(snapshot *s, rd_net *n, uint32_t value, ms_tensor tensor, bool is_buffer) {
    const uint32_t bytes = (uint32_t)rd_bytes(&n->run.graph->value[value], n->run.size);
    item *to = &s->items[s->count];
    if (s->used + bytes > ROOM || s->count == MOST_ITEMS) {
        rd_fail(&n->run, "no room");
        return MS_RESULT_OUT_OF_MEMORY;
    }
    memset(s->data + s->used, 0, bytes);
    const ms_result result = ms_read(n->model, tensor, s->data + s->used);
    if (result == MS_RESULT_ORDER) { // there is no such state
        return MS_RESULT_OK;
    }
    to->tensor = tensor;
    to->begin = s->used;
    to->end = s->used += bytes;
    to->is_buffer = is_buffer;
    s->count += 1;
    return result;
}

/* Params, their state, and buffers. */
static ms_result see_all(snapshot *s, rd_net *n) {
    const rd_graph *g = n->run.graph;
    ms_result result = MS_RESULT_OK;
    s->used = s->count = 0;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        if (result == MS_RESULT_OK && (v->role == RD_PARAM || v->role == RD_BUFFER)) {
            result = see(s, n, i, n->handle[i], v->role == RD_BUFFER);
        }
        for (uint32_t k = 0; v->role == RD_PARAM && !v->frozen && k < rd_state_count(g, i); ++k) {
            const ms_tensor state = ms_optimizer_state(n->model, n->handle[i], (int)k);
            result = result == MS_RESULT_OK ? see(s, n, i, state, false) : result;
        }
    }
    return result;
}

static ms_result put_back(const snapshot *s, rd_net *n, bool buffers_only) {
    ms_result result = MS_RESULT_OK;
    for (uint32_t k = 0; k < s->count && result == MS_RESULT_OK; ++k) {
        const item *from = &s->items[k];
        if (from->is_buffer || !buffers_only) {
            result = ms_write(n->model, from->tensor, s->data + from->begin);
        }
    }
    return result;
}

/* The first item that differs, or the count. */
static uint32_t first_other(const snapshot *a, const snapshot *b, bool buffers) {
    uint32_t k = 0;
    while (k < a->count && k < b->count &&
           ((a->items[k].is_buffer && !buffers) ||
            (a->items[k].end == b->items[k].end &&
             memcmp(a->data + a->items[k].begin, b->data + b->items[k].begin,
                    a->items[k].end - a->items[k].begin) == 0))) {
        ++k;
    }
    return k;
}

// ------------------------------------------------------------------------------------------------
// some ranks, one of which fails once

#define FAULTS(X)                                                                                  \
    X(FAULT_NONE, "nothing")                                                                       \
    X(FAULT_CALLBACK, "a callback")                                                                \
    X(FAULT_NAN, "a loss that is not a number")                                                    \
    X(FAULT_CANCEL, "ms_cancel in a callback")                                                     \
    X(FAULT_CANCELS, "ms_cancel by another thread")                                                \
    X(FAULT_CANCEL_AT, "ms_cancel before an instruction")                                          \
    X(FAULT_MEMORY, "no memory")                                                                   \
    X(FAULT_COLLECTIVE, "a collective")                                                            \
    X(FAULT_STALL, "a collective that comes too late")                                             \
    X(FAULT_GONE, "a collective that never comes")

#define FAULTS_NAME(name, text) name,
#define FAULTS_TEXT(name, text) text,
typedef enum fault { FAULTS(FAULTS_NAME) FAULT_COUNT } fault;
static const char *const fault_texts[] = {FAULTS(FAULTS_TEXT)};

typedef struct outcome {
    const char *call;
    ms_result result;
    bool failed; // the model
    uint64_t step;
    double at_s;
    char text[256];
} outcome;

typedef struct faulty_layer {
    struct one_rank *rank;
    uint32_t number;
    ms_layer_fn forward, backward, recompute, bind;
    void *user;
} faulty_layer;

typedef struct one_rank {
    struct job *job;
    uint32_t number;
    rd_graph graph;
    rd_net *net;
    t_heap heap;
    v_device late;
    v_layer late_layers[RD_LAYERS];
    faulty_layer layers[RD_LAYERS];
    t_rng rng, clock_rng, update_rng;
    double clock_us;
    uint64_t calls; // of callbacks, of which some are updates:
    uint64_t updates, some_update;
    uint64_t passes, first_alloc;
    uint64_t places, some_early_end; // where it may cancel, of which one before a step's early end
    const char *failed_in;
    bool has_given_up; // a callback has failed in the call under way
    uint32_t failed_layer;
    outcome outcomes[MOST_OUTCOMES];
    uint32_t outcome_count;
    snapshot before, now;
    double losses[STEPS], evals[STEPS];
    pthread_mutex_t lock; // of is_open
    bool is_open;
    char failure[RD_TEXT];
} one_rank;

typedef struct job {
    uint32_t ranks, steps;
    uint64_t seed;
    bool shards, halves, late, replans;
    fault which;
    uint32_t culprit;
    uint64_t at; // the call that fails
    bool keeps_aborts, on_calling_thread;
    bool slices; // all ranks run all passes in slices, of one instruction if possible
    double timeout_s;
    ms_config config;
    tc_world world;
    one_rank rank[MOST_RANKS];
} job;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_s(double seconds) {
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)(1e9 * (seconds - (double)t.tv_sec));
    nanosleep(&t, NULL);
}

// ------------------------------------------------------------------------------------------------
// layers and updates that fail

static bool fails_now(one_rank *r, const char *in, uint32_t layer) {
    const job *j = r->job;
    r->calls += 1;
    if (r->has_given_up) {
        rd_fail(&r->net->run, "%s is called after an error of %s in the same step", in,
                r->failed_in);
    }
    if (r->number != j->culprit || r->calls != j->at) {
        return false;
    }
    r->failed_in = in;
    r->failed_layer = layer;
    if (j->which == FAULT_CANCEL) {
        ms_cancel(r->net->model);
    }
    r->has_given_up = j->which == FAULT_CALLBACK && !j->config.debug; // whose checks call more
    return j->which == FAULT_CALLBACK;
}

static int call_layer(const ms_call *call, ms_layer_fn function, const char *in) {
    faulty_layer *l = (faulty_layer *)call->user;
    one_rank *r = l->rank;
    ms_call inner = *call;
    inner.user = l->user;
    if (fails_now(r, in, l->number)) {
        return RD_CALLBACK_ERROR;
    }
    const int error = function(&inner);
    const rd_layer *layer = &r->graph.layer[l->number];
    for (int k = 0; k < layer->count[RD_GROUP_OUT] && call->phase == MS_PHASE_FORWARD; ++k) {
        const bool is_loss = layer->slot[RD_GROUP_OUT][k] == r->graph.loss + 1;
        if (is_loss && r->job->which == FAULT_NAN && r->number == r->job->culprit &&
            r->calls >= r->job->at && r->failed_in == NULL && call->out[k].data != NULL) {
            r->failed_in = "loss";
            ((float *)call->out[k].data)[0] = NAN;
        }
    }
    return error;
}

static int faulty_forward(const ms_call *call) {
    return call_layer(call, ((faulty_layer *)call->user)->forward, "forward");
}

static int faulty_backward(const ms_call *call) {
    return call_layer(call, ((faulty_layer *)call->user)->backward, "backward");
}

static int faulty_recompute(const ms_call *call) {
    return call_layer(call, ((faulty_layer *)call->user)->recompute, "recompute");
}

static int faulty_bind(const ms_call *call) {
    return call_layer(call, ((faulty_layer *)call->user)->bind, "bind");
}

static ms_layer_desc make_faulty(void *mover, uint32_t number, const ms_layer_desc *desc) {
    one_rank *r = (one_rank *)mover;
    ms_layer_desc d = r->job->late ? v_wrap(desc, &r->late_layers[number]) : *desc;
    faulty_layer *l = &r->layers[number];
    l->rank = r;
    l->number = number;
    l->forward = d.forward;
    l->backward = d.backward;
    l->recompute = d.recompute;
    l->bind = d.bind;
    l->user = d.user;
    d.forward = faulty_forward;
    d.backward = d.backward != NULL ? faulty_backward : NULL;
    d.recompute = d.recompute != NULL ? faulty_recompute : NULL;
    d.bind = d.bind != NULL ? faulty_bind : NULL;
    d.user = l;
    return d;
}

static int faulty_update(const ms_update_args *args) {
    one_rank *r = (one_rank *)args->user;
    ms_update_args inner = *args;
    inner.user = &r->graph;
    r->updates += 1;
    if (t_chance(&r->update_rng, 1.0 / (double)r->updates)) { // any of them, as likely as others
        r->some_update = r->calls + 1;
    }
    return fails_now(r, "update", UINT32_MAX) ? RD_CALLBACK_ERROR : rd_update(&inner);
}

// ------------------------------------------------------------------------------------------------
// what a rank does: the same on all, except how it runs a step

/* Notes the end of something that all ranks do. */
static ms_result note(one_rank *r, const char *call, ms_result result) {
    const ms_model *m = r->net->model;
    r->has_given_up = false;
    if (r->outcome_count == MOST_OUTCOMES) {
        rd_fail(&r->net->run, "no end of %s", call);
        return MS_RESULT_OUT_OF_MEMORY;
    }
    outcome *o = &r->outcomes[r->outcome_count++];
    o->call = call;
    o->result = result;
    o->failed = m->run.failed;
    o->step = m->run.step;
    o->at_s = now_s();
    snprintf(o->text, sizeof o->text, "%s", ms_last_error(m));
    return result;
}

static double slice_clock(void *user) {
    one_rank *r = (one_rank *)user;
    r->clock_us += (double)t_below(&r->clock_rng, 8);
    return r->clock_us;
}

/* What is divided among ranks, what lies on the host, and when params are updated. */
static void force(one_rank *r, uint64_t seed, bool moves) {
    t_rng rng = t_seed(seed);
    rd_force_shards(r->net, &rng, moves);
    if (moves && seed / 4 % 2 == 0) { // on late devices too
        rd_force_moves(r->net, &rng);
    }
}

static void make(one_rank *r, bool forced) {
    job *j = r->job;
    ms_config config = j->config;
    config.comm = j->world.ranks[r->number].comm;
    config.comm.on_calling_thread = j->on_calling_thread;
    config.comm_timeout = j->timeout_s;
    config.allocator = t_heap_allocator(&r->heap);
    config.clock = slice_clock;
    config.clock_user = r;
    if (j->late) {
        config.backend = v_backend(&r->late);
    }
    r->graph.move = make_faulty;
    r->graph.mover = r;
    r->net = rd_net_create(&r->graph, &config, "rank", r->failure, false);
    if (r->graph.optimizer.kind == MS_OPTIMIZER_CUSTOM) {
        ms_optimizer_desc o = r->graph.optimizer;
        o.update = faulty_update;
        o.workspace = r->graph.has_update_space ? rd_update_bytes : NULL;
        o.user = r;
        ms_set_optimizer(r->net->model, &o);
    }
    if (j->halves) {
        rd_force_half(r->net, r->graph.seed);
    }
    if (forced) {
        force(r, j->seed, true);
    }
}

static ms_result wrap(one_rank *r) {
    make(r, r->job->shards);
    const bool lacks = r->job->which == FAULT_MEMORY && r->number == r->job->culprit;
    r->first_alloc = r->heap.calls;
    r->heap.fail_at = lacks ? r->heap.calls + r->job->at : 0;
    ms_result result = ms_wrap(r->net->model);
    if (result == MS_RESULT_INVALID && r->job->shards &&
        r->job->which != FAULT_MEMORY) { // what cannot be forced
        double one = 1.0;
        if (!r->net->model->ranks.error) {
            rd_net_destroy(r->net);
            make(r, false);
            result = ms_wrap(r->net->model);
        } else { // its own error comes first
            result = ms_sum_over_ranks(r->net->model, &one, 1);
        }
    }
    pthread_mutex_lock(&r->lock);
    r->is_open = true;
    pthread_mutex_unlock(&r->lock);
    return note(r, "ms_wrap", result);
}

/* What changes from step to step, and the inputs of a micro-batch. */
static ms_result feed(one_rank *r, uint32_t step, uint64_t round) {
    rd_net *n = r->net;
    rd_graph *g = &r->graph;
    uint64_t data[RD_ELEMENTS];
    ms_result result =
        g->varies ? ms_set_gradient_factor(n->model, rd_factor_at(g, 1 + step)) : MS_RESULT_OK;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        if (v->role == RD_PARAM && g->varies && result == MS_RESULT_OK) {
            result = ms_set_paused(n->model, n->handle[i], rd_is_paused(g, i, 1 + step));
        } else if (v->role == RD_INPUT && result == MS_RESULT_OK) {
            rd_initial(g, i, n->run.size, round, data);
            result = ms_write(n->model, n->handle[i], data);
        }
    }
    return result;
}

static void begin_pass(rd_net *n, uint32_t step, uint32_t micro) {
    n->run.step = step;
    n->run.micro = micro;
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        n->run.op[i].forwards = n->run.op[i].backwards = n->run.op[i].recomputes = 0;
    }
}

/* The culprit of FAULT_CANCEL_AT cancels here, if it is its turn. */
static bool cancel_at(one_rank *r) {
    const job *j = r->job;
    r->places += 1;
    if (j->which != FAULT_CANCEL_AT || r->number != j->culprit || r->places != j->at) {
        return false;
    }
    r->failed_in = "here";
    r->failed_layer = UINT32_MAX;
    ms_cancel(r->net->model);
    return true;
}

/* A rank that is suspended cannot vote: its step does not end. */
static void slice_suspended(one_rank *r, double *loss) {
    ms_model *m = r->net->model;
    const ms_result suspended = ms_suspend(m, NULL), sliced = ms_step_slice(m, 1, loss);
    const ms_result resumed = ms_resume(m);
    if (suspended != MS_RESULT_OK || sliced != MS_RESULT_ORDER || resumed != MS_RESULT_OK) {
        rd_fail(&r->net->run, "ms_suspend: %s, a slice: %s, ms_resume: %s",
                ms_result_name(suspended), ms_result_name(sliced), ms_result_name(resumed));
    }
}

/* A slice of some microseconds, or of one instruction. */
static ms_result run_slice(one_rank *r, uint32_t *position, double *loss) {
    ms_model *m = r->net->model;
    if (r->job->slices && m->run.position != *position) {
        *position = m->run.position;
        if (cancel_at(r) && r->job->at % 3 == 0) {
            slice_suspended(r, loss);
        }
    }
    return ms_step_slice(m, r->job->slices ? 1 : t_below(&r->rng, 40), loss);
}

/* One micro-batch, at once, in slices, or in three calls. */
static ms_result pass(one_rank *r, bool is_last, double *loss) {
    ms_model *m = r->net->model;
    /* Ranks may call what they like, unless the device runs late: then an error is told at other times. */
    t_rng shared = t_seed(r->job->seed * 1000 + r->passes++);
    t_rng *rng = r->job->late ? &shared : &r->rng;
    const uint32_t how = r->job->slices ? 1 : t_below(rng, 3);
    uint32_t position = UINT32_MAX;
    ms_result result = MS_RESULT_MORE;
    if (how == 0) {
        result = ms_step(m, loss);
    }
    while (how == 1 && result == MS_RESULT_MORE) {
        result = run_slice(r, &position, loss);
    }
    if (how == 2) {
        double norm = 0.0;
        result = ms_forward(m, loss);
        result = result == MS_RESULT_OK ? ms_backward(m) : result;
        if (result == MS_RESULT_OK && is_last && t_chance(rng, 0.3)) {
            result = ms_gradient_norm(m, &norm);
            result = result == MS_RESULT_ORDER ? MS_RESULT_OK : result; // there is none
        }
        result = result == MS_RESULT_OK && is_last ? ms_update(m) : result;
    }
    const ms_result settled = r->job->late ? ms_synchronize(m) : MS_RESULT_OK;
    return result == MS_RESULT_OK ? settled : result;
}

static ms_result try_step(one_rank *r, uint32_t step, uint32_t micros) {
    const uint32_t all = r->graph.accumulation;
    ms_result result = MS_RESULT_OK;
    r->losses[step] = 0.0;
    for (uint32_t micro = 0; micro < micros && result == MS_RESULT_OK; ++micro) {
        double loss = 0.0;
        begin_pass(r->net, step, micro);
        result = feed(r, step, 1 + (step * all + micro) * r->job->ranks + r->number);
        result = result == MS_RESULT_OK ? pass(r, micro + 1 == all, &loss) : result;
        r->losses[step] += loss;
    }
    if (result == MS_RESULT_OK && micros < all) {
        (void)cancel_at(r);
        r->some_early_end = r->places;
        result = ms_update(r->net->model);
        const ms_result settled = r->job->late ? ms_synchronize(r->net->model) : MS_RESULT_OK;
        result = result == MS_RESULT_OK ? settled : result;
    }
    return note(r, "a step", result);
}

static ms_result try_eval(one_rank *r, uint32_t step) {
    begin_pass(r->net, step, 0);
    ms_result result = feed(r, step, 1 + step * r->job->ranks + r->number);
    result = result == MS_RESULT_OK ? ms_eval(r->net->model, &r->evals[step]) : result;
    return note(r, "ms_eval", result);
}

static bool ends_by_error(const job *j) {
    return j->which >= FAULT_MEMORY;
}

/* Whether the params are those before; then the buffers are made so. A model that has failed gets all
   of them again. */
static bool recover(one_rank *r, uint64_t step) {
    rd_net *n = r->net;
    ms_result result = MS_RESULT_OK;
    if (n->model->run.failed) {
        double loss;
        result = ms_step(n->model, &loss);
        if (result != MS_RESULT_FAILED) {
            return rd_fail(&n->run, "a step after a failure: %s", ms_result_name(result));
        }
        result = put_back(&r->before, n, false);
        result = result == MS_RESULT_OK ? ms_wrap(n->model) : result;
    } else {
        result = see_all(&r->now, n);
        const uint32_t other = first_other(&r->before, &r->now, false);
        if (result == MS_RESULT_OK && other < r->before.count) {
            return rd_fail(&n->run, "item %u has changed in a step that does not count: %s",
                           (unsigned)other, r->outcomes[r->outcome_count - 1].text);
        }
        result = result == MS_RESULT_OK ? put_back(&r->before, n, true) : result;
    }
    if (result == MS_RESULT_OK && n->model->run.step != step) {
        return rd_fail(&n->run, "the step counts");
    }
    return result == MS_RESULT_OK ||
           rd_fail(&n->run, "recovering: %s: %s", ms_result_name(result), ms_last_error(n->model));
}

/* A step or an eval, again until it succeeds. false: it ends here. */
static bool run_until_done(one_rank *r, uint32_t step, uint32_t micros, bool is_eval) {
    const uint64_t count = r->net->model->run.step;
    ms_result result = see_all(&r->before, r->net);
    if (result != MS_RESULT_OK) {
        note(r, "ms_read", result);
        return !ends_by_error(r->job) && rd_fail(&r->net->run, "%s", ms_last_error(r->net->model));
    }
    for (int k = 0; k < MOST_TRIES; ++k) {
        if (k > 0 && !recover(r, count)) {
            return false;
        }
        result = is_eval ? try_eval(r, step) : try_step(r, step, micros);
        if (result == MS_RESULT_OK || ends_by_error(r->job) || r->failure[0]) {
            return result == MS_RESULT_OK && !r->failure[0];
        }
    }
    return rd_fail(&r->net->run, "no end of tries: %s", ms_last_error(r->net->model));
}

/* Another plan, or the plain one. */
static bool replan(one_rank *r, uint32_t step) {
    rd_net *n = r->net;
    if (!r->job->replans || step == 0) {
        return true;
    }
    if (step == 1) {
        force(r, r->job->seed + 7, false);
    }
    const ms_result result = note(r, step == 2 ? "ms_detach" : "ms_wrap again",
                                  step == 2 ? ms_detach(n->model) : ms_wrap(n->model));
    return result == MS_RESULT_OK || result == MS_RESULT_INVALID || // what cannot be forced
           (!ends_by_error(r->job) && rd_fail(&n->run, "%s", ms_last_error(n->model)));
}

static bool train(one_rank *r) {
    const job *j = r->job;
    bool fine = rd_net_write(r->net, 0, false);
    for (uint32_t step = 0; step < j->steps && fine; ++step) {
        t_rng shared = t_seed(j->seed * 64 + step);
        const uint32_t all = r->graph.accumulation;
        const bool evals = t_chance(&shared, 0.3);
        const bool is_early = j->slices ? step == 1 : t_chance(&shared, 0.3);
        const uint32_t micros = !is_early ? all : j->slices ? 1 : 1 + t_below(&shared, all);
        fine = replan(r, step);
        fine = fine && (!evals || run_until_done(r, step, 0, true));
        fine = fine && run_until_done(r, step, micros, false);
        if (fine && t_chance(&shared, 0.5)) {
            double sum = 1.0;
            const ms_result result =
                note(r, "ms_sum_over_ranks", ms_sum_over_ranks(r->net->model, &sum, 1));
            fine = result == MS_RESULT_OK;
            if ((fine && sum != (double)j->ranks) || (!fine && !ends_by_error(j))) {
                rd_fail(&r->net->run, "ms_sum_over_ranks: %g", sum);
            }
        }
    }
    if (fine && note(r, "ms_read", see_all(&r->now, r->net)) != MS_RESULT_OK && !ends_by_error(j)) {
        rd_fail(&r->net->run, "%s", ms_last_error(r->net->model));
    }
    return fine;
}

/* A model whose ranks have been lost: all that needs them is an error, at once. */
static void use_after(one_rank *r) {
    ms_model *m = r->net->model;
    double x = 1.0;
    const double begin_s = now_s();
    const ms_result results[] = {ms_step(m, &x),
                                 ms_step_slice(m, 100, &x),
                                 ms_forward(m, &x),
                                 ms_backward(m),
                                 ms_update(m),
                                 ms_eval(m, &x),
                                 ms_sum_over_ranks(m, &x, 1),
                                 ms_wrap(m),
                                 ms_step(m, &x),
                                 ms_detach(m),
                                 ms_eval(m, &x)};
    for (size_t k = 0; k < sizeof results / sizeof *results; ++k) {
        const bool is_unwrapped = results[k] == MS_RESULT_ORDER && m->run.plan == NULL;
        const bool is_own = results[k] == MS_RESULT_INVALID && k == 7; // what cannot be forced
        if (results[k] != MS_RESULT_FAILED && results[k] != MS_RESULT_RANKS && !is_unwrapped &&
            !is_own) {
            rd_fail(&r->net->run, "call %u after ranks were lost: %s", (unsigned)k,
                    ms_result_name(results[k]));
        }
    }
    if (now_s() - begin_s > 0.5) {
        rd_fail(&r->net->run, "calls after ranks were lost waited for %.2f s", now_s() - begin_s);
    }
    ms_cancel(m);
}

static void *work(uint32_t number, void *argument) {
    job *j = (job *)argument;
    one_rank *r = &j->rank[number];
    if (j->late) {
        v_open(&r->late, j->seed * MOST_RANKS + number);
    }
    bool fine = wrap(r) == MS_RESULT_OK;
    if (!fine && !ends_by_error(j)) {
        rd_fail(&r->net->run, "ms_wrap: %s", ms_last_error(r->net->model));
    }
    fine = fine && train(r);
    if (ends_by_error(j) && j->which != FAULT_MEMORY && !r->failure[0]) {
        use_after(r);
    }
    if (r->failure[0]) {
        tc_abort(&j->world.ranks[number]);
    }
    pthread_mutex_lock(&r->lock);
    r->is_open = false;
    pthread_mutex_unlock(&r->lock);
    rd_net_destroy(r->net);
    if (j->late) {
        v_close(&r->late);
    }
    return NULL;
}

/* The thread that cancels. */
static void *cancel(void *argument) {
    job *j = (job *)argument;
    one_rank *r = &j->rank[j->culprit];
    t_rng rng = t_seed(j->seed ^ j->at);
    for (int k = 0; k < CANCELS; ++k) {
        sleep_s(1e-3 * t_unit(&rng));
        pthread_mutex_lock(&r->lock);
        if (r->is_open) {
            ms_cancel(r->net->model);
        }
        pthread_mutex_unlock(&r->lock);
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// one job

static job *make_job(const rd_graph *g, uint64_t seed, bool late, fault which, uint32_t culprit,
                     uint64_t at) {
    job *j = (job *)calloc(1, sizeof *j);
    assert_non_null(j);
    j->ranks = 2 + (uint32_t)(seed % 3);
    j->steps = STEPS;
    j->seed = seed;
    j->late = late;
    j->shards = seed % 8 != 5;
    j->halves = seed % 5 == 2;
    j->replans = seed % 3 == 1 && !j->halves;
    j->which = which;
    j->culprit = culprit < MOST_RANKS ? culprit % j->ranks : culprit;
    j->at = at;
    j->timeout_s = ends_by_error(j) ? 0.2 : 20.0;
    j->config = t_config();
    j->config.master_weights = seed % 3 == 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    if (j->halves && t_is_built_in((int)g->optimizer.kind) && seed % 2 == 0) {
        j->config.mixed_dtype = MS_DTYPE_F16;
        j->config.early_update = MS_SWITCH_OFF;
        j->config.loss_scaling.initial = 4096.0f;
    }
    j->config.force_optimize = seed % 4 == 3;
    j->config.debug = seed % 7 == 3;
    for (uint32_t k = 0; k < j->ranks; ++k) {
        one_rank *r = &j->rank[k];
        r->job = j;
        r->number = k;
        r->graph = *g;
        r->rng = t_seed(seed * MOST_RANKS + k);
        r->clock_rng = t_seed(seed * MOST_RANKS + k + 1);
        r->update_rng = t_seed(seed * MOST_RANKS + k + 2);
        pthread_mutex_init(&r->lock, NULL);
    }
    return j;
}

static void print_outcomes(const job *j) {
    for (uint32_t r = 0; r < j->ranks; ++r) {
        for (uint32_t k = 0; k < j->rank[r].outcome_count; ++k) {
            const outcome *o = &j->rank[r].outcomes[k];
            if (o->result != MS_RESULT_OK) {
                print_error("  rank %u: %u: %s: %s%s, step %llu, at %.3f s: %s\n", r, k, o->call,
                            ms_result_name(o->result), o->failed ? ", failed" : "",
                            (unsigned long long)o->step, o->at_s, o->text);
            }
        }
    }
}

static void run_job(job *j) {
    pthread_t canceller;
    tc_open(&j->world, j->ranks);
    j->world.keeps_aborts = j->keeps_aborts;
    j->world.keeps_differences = true;
    if (ends_by_error(j)) {
        tc_rank *r = &j->world.ranks[j->culprit];
        r->fail_at = j->which == FAULT_COLLECTIVE ? j->at : 0;
        r->stall_at = j->which == FAULT_STALL ? j->at : 0;
        r->gone_at = j->which == FAULT_GONE ? j->at : 0;
        r->stall_s = 2.5 * j->timeout_s;
    }
    if (j->which == FAULT_CANCELS) {
        assert_int_equal(pthread_create(&canceller, NULL, cancel, j), 0);
    }
    const bool ended = tc_run(&j->world, work, j);
    if (j->which == FAULT_CANCELS) {
        pthread_join(canceller, NULL);
    }
    uint32_t failures = !ended;
    for (uint32_t k = 0; k < j->ranks; ++k) {
        const one_rank *r = &j->rank[k];
        if (r->failure[0] || r->heap.live_count > 0 || r->heap.wrong_releases > 0) {
            print_error("seed %llu, %s (call %llu of rank %u), rank %u of %u: %s; %llu blocks of "
                        "memory are left\n",
                        (unsigned long long)j->seed, fault_texts[j->which],
                        (unsigned long long)j->at, j->culprit, k, j->ranks, r->failure,
                        (unsigned long long)r->heap.live_count);
            failures += 1;
        }
    }
    if (failures > 0) {
        print_outcomes(j);
    }
    assert_int_equal(failures, 0);
}

static void free_job(job *j) {
    tc_close(&j->world);
    for (uint32_t k = 0; k < j->ranks; ++k) {
        pthread_mutex_destroy(&j->rank[k].lock);
    }
    free(j);
}

#define WRONG(j, ...)                                                                              \
    do {                                                                                           \
        print_outcomes(j);                                                                         \
        fail_msg(__VA_ARGS__);                                                                     \
    } while (0)

static void check_alike(const job *j) {
    for (uint32_t r = 1; r < j->ranks; ++r) {
        const one_rank *a = &j->rank[0], *b = &j->rank[r];
        for (uint32_t k = 0; k < a->outcome_count || k < b->outcome_count; ++k) {
            const outcome *x = &a->outcomes[k], *y = &b->outcomes[k];
            if (k >= a->outcome_count || k >= b->outcome_count || strcmp(x->call, y->call) != 0 ||
                (x->result == MS_RESULT_OK) != (y->result == MS_RESULT_OK) ||
                x->failed != y->failed || x->step != y->step ||
                (x->result == MS_RESULT_CANCELLED) != (y->result == MS_RESULT_CANCELLED)) {
                WRONG(j,
                      "seed %llu, %s (call %llu of rank %u): ranks 0 and %u differ in outcome %u",
                      (unsigned long long)j->seed, fault_texts[j->which], (unsigned long long)j->at,
                      j->culprit, r, k);
            }
        }
    }
}

/* Errors name who is to blame. */
static void check_texts(const job *j, uint64_t *errors) {
    const one_rank *culprit = &j->rank[j->culprit];
    char by[32], at[32];
    snprintf(by, sizeof by, "rank %u", j->culprit);
    snprintf(at, sizeof at, "layer%u", culprit->failed_layer);
    for (uint32_t r = 0; r < j->ranks; ++r) {
        for (uint32_t k = 0; k < j->rank[r].outcome_count; ++k) {
            const outcome *o = &j->rank[r].outcomes[k];
            const bool is_own = r == j->culprit;
            const bool has_layer =
                culprit->failed_in != NULL && culprit->failed_layer != UINT32_MAX;
            if (o->result == MS_RESULT_OK ||
                (j->which != FAULT_CALLBACK && j->which != FAULT_CANCEL &&
                 j->which != FAULT_CANCEL_AT) ||
                strcmp(o->call, "ms_wrap again") == 0) {
                continue;
            }
            *errors += 1;
            const ms_result expected = j->which != FAULT_CALLBACK ? MS_RESULT_CANCELLED
                                       : is_own                   ? MS_RESULT_CALLBACK
                                                                  : MS_RESULT_RANKS;
            if (o->result != expected || (!is_own && strstr(o->text, by) == NULL) ||
                (j->which == FAULT_CALLBACK && has_layer && strstr(o->text, at) == NULL)) {
                WRONG(j, "seed %llu: rank %u, outcome %u does not name %s, %s (%s)",
                      (unsigned long long)j->seed, r, k, by, at, culprit->failed_in);
            }
        }
    }
}

static void check_bits(const job *j, const job *clean) {
    for (uint32_t r = 0; r < j->ranks; ++r) {
        const snapshot *a = &clean->rank[r].now, *b = &j->rank[r].now;
        const uint32_t other = first_other(a, b, true);
        if (a->count != b->count || other < a->count ||
            memcmp(j->rank[r].losses, clean->rank[r].losses, sizeof clean->rank[r].losses) != 0 ||
            memcmp(j->rank[r].evals, clean->rank[r].evals, sizeof clean->rank[r].evals) != 0) {
            WRONG(j,
                  "seed %llu, %s (call %llu of rank %u, %s): rank %u: item %u of %u, or a loss, "
                  "differs from a run without the fault",
                  (unsigned long long)j->seed, fault_texts[j->which], (unsigned long long)j->at,
                  j->culprit, j->rank[j->culprit].failed_in, r, other, a->count);
        }
    }
}

static rd_graph *graph_of(uint64_t seed, bool late) {
    rd_graph *g = rd_generate(seed);
    if (seed % 5 == 2) {
        rd_random_dtypes(g, seed + 99);
    }
    for (uint32_t i = 0; i < g->value_count; ++i) {
        g->value[i].borrowed_gradient = false; // a step that fails adds to it, too
    }
    return late ? ld_make_late(g, NULL) : g;
}

static uint32_t graphs(uint64_t quick, uint64_t full) {
    return (uint32_t)t_environment("MEMSCALE_TEST_DAGS", t_sweep(quick, full));
}

static void test_steps_given_up(void **state) {
    (void)state;
    const uint32_t count = graphs(12, 1000);
    uint64_t jobs[FAULT_COUNT] = {0}, hits[FAULT_COUNT] = {0}, failed = 0, errors = 0;
    for (uint32_t k = 0; k < count; ++k) {
        const uint64_t seed = t_environment("MEMSCALE_TEST_SEED", 1) + k;
        const bool late = seed % 4 == 1;
        t_rng rng = t_seed(seed + 1234567);
        rd_graph *g = graph_of(seed, late);
        job *clean = make_job(g, seed, late, FAULT_NONE, 0, 0);
        run_job(clean);
        check_alike(clean);
        for (int i = 0; i < 6; ++i) {
            const uint32_t culprit = t_below(&rng, clean->ranks);
            const uint64_t calls = clean->rank[culprit].calls;
            const fault which = i < 3    ? FAULT_CALLBACK
                                : i == 3 ? FAULT_CANCEL
                                : i == 4 ? FAULT_CANCELS
                                : late   ? FAULT_CANCEL
                                         : FAULT_NAN;
            const uint64_t update = i == 0 ? clean->rank[culprit].some_update : 0;
            const uint64_t at = update > 0 ? update : 1 + t_next(&rng) % calls;
            job *j = make_job(g, seed, late, which, culprit, at);
            run_job(j);
            check_alike(j);
            check_texts(j, &errors);
            check_bits(j, clean);
            jobs[which] += 1;
            hits[which] += j->rank[culprit].failed_in != NULL || which == FAULT_CANCELS;
            for (uint32_t o = 0; o < j->rank[0].outcome_count; ++o) {
                failed += j->rank[0].outcomes[o].failed;
            }
            free_job(j);
        }
        free_job(clean);
        free(g);
    }
    for (int f = 0; f < FAULT_COUNT; ++f) {
        if (jobs[f] > 0) {
            print_message("%s: %llu runs, %llu of them hit\n", fault_texts[f],
                          (unsigned long long)jobs[f], (unsigned long long)hits[f]);
        }
    }
    print_message("%llu errors named their cause; %llu times updates had begun, and all failed\n",
                  (unsigned long long)errors, (unsigned long long)failed);
}

/* Who is named where ranks have different things to vote on, of which one is halted already. */
static void test_votes_that_differ(void **state) {
    (void)state;
    ms_vote votes[3];
    ms_step_state judged;
    memset(votes, 0, sizeof votes);
    memset(&judged, 0, sizeof judged);
    for (uint32_t r = 0; r < 3; ++r) {
        votes[r].kind = (uint32_t)MS_VOTE_LOSS;
        votes[r].step = 7 + r / 2; // the last one is ahead
    }
    votes[0].halted = (uint32_t)MS_HALT_RANKS;
    msi_count_votes(votes, 3, &judged, NULL, 0);
    assert_int_equal(judged.halted, MS_HALT_RANKS);
    assert_int_equal(judged.halted_by, 2u << 22);
    votes[1].gives_up = (uint32_t)MS_RESULT_CALLBACK;
    msi_count_votes(votes, 3, &judged, NULL, 0);
    assert_int_equal(judged.halted_by, 1u << 22 | (uint32_t)MS_RESULT_CALLBACK);
    votes[1].gives_up = 0; // it is known who has
    msi_count_votes(votes, 3, &judged, NULL, 0);
    assert_int_equal(judged.halted_by, 1u << 22 | (uint32_t)MS_RESULT_CALLBACK);
}

/* One rank gives a step up before its instructions, also of an update between whose votes no layer is
   called. */
static void test_cancels_at_each_instruction(void **state) {
    (void)state;
    const uint32_t count = graphs(6, 200), most = (uint32_t)t_size(20, 200);
    uint64_t jobs = 0, errors = 0, ends = 0, early_ends = 0;
    for (uint32_t k = 0; k < count; ++k) {
        const uint64_t seed = t_environment("MEMSCALE_TEST_SEED", 1) + k;
        const bool late = k % 2 == 1;
        t_rng rng = t_seed(seed + 24680);
        rd_graph *g = graph_of(seed, late);
        if (k % 4 < 2 && g->optimizer.kind != MS_OPTIMIZER_NONE) {
            g->optimizer.grad_clip_norm = 0.5f;
            g->accumulation = 2;
        }
        job *clean = make_job(g, seed, late, FAULT_NONE, 0, 0);
        clean->slices = true;
        run_job(clean);
        check_alike(clean);
        const one_rank *first = &clean->rank[0];
        const uint64_t stride = 1 + first->places / most;
        const uint64_t begin = 1 + t_next(&rng) % stride, early_end = first->some_early_end;
        early_ends += early_end > 0;
        for (uint64_t i = early_end > 0 ? 0 : begin; i <= first->places; i += i ? stride : begin) {
            const uint64_t at = i ? i : early_end; // which is one of few, and so comes first
            job *j = make_job(g, seed, late, FAULT_CANCEL_AT, t_below(&rng, clean->ranks), at);
            const uint64_t before = errors;
            j->slices = true;
            run_job(j);
            check_alike(j);
            check_texts(j, &errors);
            check_bits(j, clean);
            jobs += 1;
            ends += errors > before;
            free_job(j);
        }
        free_job(clean);
        free(g);
    }
    print_message("%u programs, of which %llu end a step early: %llu times cancelled before an "
                  "instruction, of which %llu ended the step on all ranks\n",
                  count, (unsigned long long)early_ends, (unsigned long long)jobs,
                  (unsigned long long)ends);
    assert_true(2 * ends > jobs);
}

// ------------------------------------------------------------------------------------------------
// collectives that fail

/* What has been measured: the time from an error of a collective on one rank, to that on another. */
static double longest_s;

/* All ranks have an error that says what has failed; the culprit's has the reason. Then all of them fail. */
static void check_lost(const job *j) {
    double first_s = 1e30, last_s = 0.0;
    for (uint32_t r = 0; r < j->ranks; ++r) {
        const one_rank *of = &j->rank[r];
        const outcome *o = of->outcome_count ? &of->outcomes[of->outcome_count - 1] : NULL;
        const tc_error error = j->world.ranks[r].error;
        const char *reason = tc_error_text((void *)(uintptr_t)&j->world.ranks[r], (int)error);
        if (o == NULL || o->result != MS_RESULT_RANKS || error == TC_OK ||
            strstr(o->text, "a collective of comm threads has failed") == NULL ||
            strstr(o->text, reason) == NULL || j->world.ranks[r].aborts != 1) {
            WRONG(
                j,
                "seed %llu, %s (call %llu of rank %u of %u): rank %u has no error of its comm (%s)",
                (unsigned long long)j->seed, fault_texts[j->which], (unsigned long long)j->at,
                j->culprit, j->ranks, r, reason ? reason : "none");
        }
        for (uint32_t k = 0; k + 1 < of->outcome_count; ++k) {
            if (of->outcomes[k].result != MS_RESULT_OK &&
                of->outcomes[k].result != MS_RESULT_INVALID) {
                WRONG(j, "seed %llu: rank %u has gone on", (unsigned long long)j->seed, r);
            }
        }
        first_s = o->at_s < first_s ? o->at_s : first_s;
        last_s = o->at_s > last_s ? o->at_s : last_s;
    }
    longest_s = last_s - first_s > longest_s ? last_s - first_s : longest_s;
    if (last_s - first_s > j->timeout_s + 1.0) {
        WRONG(j, "seed %llu: the last rank has ended %.2f s after the first",
              (unsigned long long)j->seed, last_s - first_s);
    }
}

static bool has_error(const one_rank *r, uint32_t k) {
    return k < r->outcome_count && r->outcomes[k].result != MS_RESULT_OK;
}

/* One rank lacks memory: all have an error in the same function, or none; and nobody waits. */
static void test_memory(void **state) {
    (void)state;
    const uint32_t count = graphs(6, 200), most = (uint32_t)t_size(12, 60);
    uint64_t jobs = 0, errors = 0;
    for (uint32_t k = 0; k < count; ++k) {
        const uint64_t seed = 3 * (t_environment("MEMSCALE_TEST_SEED", 1) + k) + 1; // wrapped again
        t_rng rng = t_seed(seed + 13579);
        rd_graph *g = graph_of(seed, false);
        job *clean = make_job(g, seed, false, FAULT_MEMORY, MOST_RANKS, 0);
        clean->culprit = MOST_RANKS;
        run_job(clean);
        const uint64_t calls = clean->rank[0].heap.calls - clean->rank[0].first_alloc;
        const uint64_t stride = 1 + calls / most;
        for (uint64_t at = 1 + t_next(&rng) % stride; at <= calls; at += stride) {
            job *j = make_job(g, seed, false, FAULT_MEMORY, t_below(&rng, clean->ranks), at);
            run_job(j);
            const uint32_t last = j->rank[j->culprit].outcome_count - 1;
            for (uint32_t r = 0; r < j->ranks; ++r) {
                if (j->rank[r].outcome_count != last + 1 ||
                    !has_error(&j->rank[r], last) != !has_error(&j->rank[j->culprit], last)) {
                    WRONG(j, "seed %llu, allocation %llu of rank %u", (unsigned long long)seed,
                          (unsigned long long)at, j->culprit);
                }
            }
            jobs += 1;
            errors += has_error(&j->rank[j->culprit], last);
            free_job(j);
        }
        free_job(clean);
        free(g);
    }
    print_message("%llu allocations failed on one rank, and %llu times that was an error of all\n",
                  (unsigned long long)jobs, (unsigned long long)errors);
}

static void test_collectives_fail(void **state) {
    (void)state;
    const uint32_t count = graphs(8, 300), most = (uint32_t)t_size(10, 60);
    uint64_t jobs[FAULT_COUNT] = {0}, collectives = 0;
    for (uint32_t k = 0; k < count; ++k) {
        const uint64_t seed = t_environment("MEMSCALE_TEST_SEED", 1) + k;
        const bool late = seed % 4 == 1;
        t_rng rng = t_seed(seed + 7654321);
        rd_graph *g = graph_of(seed, late);
        job *clean = make_job(g, seed, late, FAULT_NONE, 0, 0);
        run_job(clean);
        const uint64_t calls = clean->world.ranks[0].calls;
        const uint64_t stride = 1 + calls * clean->ranks / most;
        collectives += calls;
        for (uint64_t i = t_next(&rng) % stride; i < calls * clean->ranks; i += stride) {
            const uint32_t way = t_below(&rng, 12);
            const fault which = way == 0 ? FAULT_STALL : way == 1 ? FAULT_GONE : FAULT_COLLECTIVE;
            job *j = make_job(g, seed, late, which, (uint32_t)(i / calls), 1 + i % calls);
            j->keeps_aborts = t_chance(&rng, 0.1); // the others wait until their time is over
            j->on_calling_thread = t_chance(&rng, 0.2);
            run_job(j);
            check_lost(j);
            jobs[which] += 1;
            free_job(j);
        }
        free_job(clean);
        free(g);
    }
    print_message("%u programs of %llu collectives on each rank; %llu fail, %llu stall, %llu never "
                  "come; the last rank ends %.2f s after the first at most\n",
                  count, (unsigned long long)collectives,
                  (unsigned long long)jobs[FAULT_COLLECTIVE], (unsigned long long)jobs[FAULT_STALL],
                  (unsigned long long)jobs[FAULT_GONE], longest_s);
}

// ------------------------------------------------------------------------------------------------
// ranks that differ

/* What one rank does otherwise, and a part of the error of all, or NULL: there is none. Those of
   ODD_STEPS and after are wrapped alike. */
#define ODDITIES(X)                                                                                \
    X(ODD_SHAPE, "graph")                                                                          \
    X(ODD_LAYER, "graph")                                                                          \
    X(ODD_NAMES, "name of some tensor")                                                            \
    X(ODD_AXIS, "graph")                                                                           \
    X(ODD_MODE, "mode, or set of switches")                                                        \
    X(ODD_SWITCH, "mode, or set of switches")                                                      \
    X(ODD_SEED, "seed")                                                                            \
    X(ODD_ACCUMULATION, "accumulation_steps")                                                      \
    X(ODD_RATE, "a rate or another number")                                                        \
    X(ODD_BETA, "a rate or another number")                                                        \
    X(ODD_KIND, "optimizer of some param: its kind")                                               \
    X(ODD_CLIP, "clipping")                                                                        \
    X(ODD_LIMIT, "a rate or another number")                                                       \
    X(ODD_FORCED, "forced and forbidden")                                                          \
    X(ODD_SHARDS, "forced and forbidden")                                                          \
    X(ODD_FROZEN, "frozen")                                                                        \
    X(ODD_OUTPUT, "set of outputs")                                                                \
    X(ODD_PRECISION, "precision")                                                                  \
    X(ODD_DEBUG, "way to copy")                                                                    \
    X(ODD_DETACHED, "one plans, another detaches")                                                 \
    X(ODD_BUDGET, NULL)                                                                            \
    X(ODD_DRY_RUN, "a collective of comm")                                                         \
    X(ODD_STEPS, NULL)                                                                             \
    X(ODD_EVAL, "runs something else than rank 0")                                                 \
    X(ODD_SIZE, "runs something else than rank 0")                                                 \
    X(ODD_PAUSED, "runs something else than rank 0")                                               \
    X(ODD_MICRO, "a collective of comm")                                                           \
    X(ODD_DETACHES, "a collective of comm")                                                        \
    X(ODD_STAYS_AWAY, "a collective of comm")                                                      \
    X(ODD_UNWRITTEN, "a collective of comm")

#define ODD_NAME(name, text) name,
#define ODD_TEXT(name, text) #name,
#define ODD_PART(name, text) text,
typedef enum oddity { ODDITIES(ODD_NAME) ODD_COUNT } oddity;
static const char *const odd_names[] = {ODDITIES(ODD_TEXT)};
static const char *const odd_parts[] = {ODDITIES(ODD_PART)};

typedef struct odd_job {
    tc_world world;
    oddity which;
    uint32_t odd; // rank
    ms_result results[MOST_RANKS];
    char texts[MOST_RANKS][400];
    uint64_t arena_bytes[MOST_RANKS], left[MOST_RANKS];
    double took_s[MOST_RANKS];
} odd_job;

typedef struct small_net {
    ms_model *model;
    t_op ops[6];
    ms_axis batch;
    ms_tensor x, first, second;
} small_net;

enum { SMALL_ROWS = 4, SMALL_COLS = 8 };

static void make_small(small_net *n, const ms_config *config, const ms_optimizer_desc *optimizer,
                       oddity odd) {
    const int64_t rows = odd == ODD_AXIS ? SMALL_ROWS / 2 : SMALL_ROWS;
    const int64_t wide = odd == ODD_SHAPE ? 6 : 8;
    const ms_result created = ms_create(config, &n->model); // an error sticks
    ms_model *m = n->model;
    (void)created;
    n->batch = ms_add_axis(m, "batch", rows, rows);
    n->x = ms_input(m, "x", MS_DTYPE_F32, ms_along(ms_shape2(rows, SMALL_COLS), 0, n->batch));
    n->first = ms_param(m, "first", MS_DTYPE_F32, ms_shape2(SMALL_COLS, wide));
    n->second = ms_param(m, "second", MS_DTYPE_F32, ms_shape2(wide, SMALL_COLS));
    ms_buffer(m, odd == ODD_NAMES ? "b" : "a", MS_DTYPE_F32, ms_shape1(4));
    ms_buffer(m, odd == ODD_NAMES ? "a" : "b", MS_DTYPE_F32, ms_shape1(4));
    const ms_tensor none = {0};
    ms_tensor y = t_add_layer(m, &n->ops[0], T_MATMUL, "y0", n->x, n->first);
    y = t_add_layer(m, &n->ops[1], T_SQUASH, "y1", y, none);
    if (odd == ODD_LAYER) {
        y = t_add_layer(m, &n->ops[4], T_SQUASH, "more", y, none);
    }
    y = t_add_layer(m, &n->ops[2], T_MATMUL, "y2", y, n->second);
    t_set_loss(m, &n->ops[3], T_LOSS, y);
    ms_set_optimizer(m, optimizer);
    if (odd == ODD_FORCED) {
        ms_set_tensor_technique(m, n->first, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
    } else if (odd == ODD_SHARDS) {
        ms_set_tensor_technique(m, n->first, MS_TECHNIQUE_SHARDING, MS_SWITCH_ON);
    } else if (odd == ODD_FROZEN) {
        ms_set_frozen(m, n->first, true);
    } else if (odd == ODD_OUTPUT) {
        ms_add_output(m, y);
    }
}

static void odd_config(oddity odd, ms_config *c, ms_optimizer_desc *o) {
    c->mode = odd == ODD_MODE ? MS_MODE_AGGRESSIVE : c->mode;
    c->checkpointing = odd == ODD_SWITCH ? MS_SWITCH_OFF : c->checkpointing;
    c->seed = odd == ODD_SEED ? 5 : c->seed;
    c->accumulation_steps = odd == ODD_ACCUMULATION ? 3 : c->accumulation_steps;
    c->mixed_dtype = odd == ODD_PRECISION ? MS_DTYPE_F16 : c->mixed_dtype;
    c->debug = odd == ODD_DEBUG;
    c->dry_run = odd == ODD_DRY_RUN;
    c->memory_budget_bytes = odd == ODD_BUDGET ? 1 << 20 : c->memory_budget_bytes;
    o->learning_rate = odd == ODD_RATE ? 0.02f : o->learning_rate;
    o->beta2 = odd == ODD_BETA ? 0.9f : o->beta2;
    o->kind = odd == ODD_KIND ? MS_OPTIMIZER_LION : o->kind;
    o->grad_clip_norm = odd == ODD_CLIP ? 0.0f : odd == ODD_LIMIT ? 2.0f : o->grad_clip_norm;
}

/* Two micro-batches; what one rank does instead is an error on all that wait for it. */
static ms_result odd_step(small_net *n, oddity odd) {
    ms_model *m = n->model;
    double loss;
    ms_result result = odd == ODD_EVAL ? ms_eval(m, &loss) : ms_step(m, &loss);
    if (result == MS_RESULT_OK) {
        result = odd == ODD_MICRO      ? ms_update(m)
                 : odd == ODD_DETACHES ? ms_detach(m)
                                       : ms_step(m, &loss);
    }
    return result == MS_RESULT_OK ? ms_step(m, &loss) : result;
}

static void *odd_work(uint32_t own, void *argument) {
    odd_job *j = (odd_job *)argument;
    const oddity odd = own == j->odd ? j->which : ODD_COUNT;
    ms_config c = t_config();
    ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    float x[SMALL_ROWS * SMALL_COLS] = {0.5f};
    small_net n;
    t_heap heap;
    memset(&n, 0, sizeof n);
    memset(&heap, 0, sizeof heap);
    c.comm = j->world.ranks[own].comm;
    c.comm_timeout = 0.5;
    c.allocator = t_heap_allocator(&heap);
    c.accumulation_steps = 2;
    o.grad_clip_norm = 1.0f;
    odd_config(odd, &c, &o);
    make_small(&n, &c, &o, odd);
    const double begin_s = now_s();
    ms_result result = odd == ODD_DETACHED ? ms_detach(n.model) : ms_wrap(n.model);
    ms_memory_report report;
    if (result == MS_RESULT_OK && ms_report(n.model, &report) == MS_RESULT_OK) {
        j->arena_bytes[own] = report.budget_bytes;
    }
    float weights[SMALL_COLS * SMALL_COLS] = {0.25f};
    if (result == MS_RESULT_OK && j->which != ODD_DRY_RUN) {
        result = ms_write(n.model, n.first, weights);
        result = result == MS_RESULT_OK ? ms_write(n.model, n.second, weights) : result;
        if (result == MS_RESULT_OK && odd == ODD_SIZE) {
            const int64_t size = SMALL_ROWS / 2;
            result = ms_reshape(n.model, &size);
        } else if (result == MS_RESULT_OK && odd == ODD_PAUSED) {
            result = ms_set_paused(n.model, n.first, true);
        }
        if (result == MS_RESULT_OK && odd != ODD_UNWRITTEN) {
            result = ms_write(n.model, n.x, x);
        }
    }
    if (result == MS_RESULT_OK && odd != ODD_STAYS_AWAY) {
        result = odd_step(&n, odd);
    }
    j->took_s[own] = now_s() - begin_s;
    j->results[own] = result;
    snprintf(j->texts[own], sizeof j->texts[own], "%s", ms_last_error(n.model));
    ms_destroy(n.model);
    j->left[own] = heap.live_count;
    return NULL;
}

static void test_ranks_differ(void **state) {
    (void)state;
    const uint32_t seeds = (uint32_t)t_sweep(1, 12);
    double longest = 0.0;
    for (uint32_t k = 0; k < seeds * ODD_COUNT; ++k) {
        odd_job *j = (odd_job *)calloc(1, sizeof *j);
        assert_non_null(j);
        j->which = (oddity)(k % ODD_COUNT);
        tc_open(&j->world, 2 + k / ODD_COUNT % 3);
        j->world.keeps_differences = true;
        j->odd = (k + k / ODD_COUNT) % j->world.count;
        const char *part = odd_parts[j->which], *name = odd_names[j->which];
        assert_true(tc_run(&j->world, odd_work, j));
        char by[32];
        snprintf(by, sizeof by, "rank %u", j->odd);
        for (uint32_t r = 0; r < j->world.count; ++r) {
            const bool own = r == j->odd && (j->which == ODD_UNWRITTEN || j->which == ODD_DRY_RUN ||
                                             j->which == ODD_STAYS_AWAY);
            const bool fits =
                part == NULL ? j->results[r] == MS_RESULT_OK
                : own        ? j->results[r] != MS_RESULT_RANKS
                      : j->results[r] == MS_RESULT_RANKS && strstr(j->texts[r], part) != NULL;
            longest = j->took_s[r] > longest ? j->took_s[r] : longest;
            if (!fits || j->left[r] > 0 || j->took_s[r] > 1.5 ||
                (part == NULL && j->arena_bytes[r] != j->arena_bytes[0])) {
                fail_msg("%s on rank %u of %u: rank %u: %s after %.2f s: %s (%llu bytes), %llu "
                         "blocks are left",
                         name, j->odd, j->world.count, r, ms_result_name(j->results[r]),
                         j->took_s[r], j->texts[r], (unsigned long long)j->arena_bytes[r],
                         (unsigned long long)j->left[r]);
            }
        }
        tc_close(&j->world);
        free(j);
    }
    print_message("%u times a rank differed; all had an error within %.2f s\n", seeds * ODD_COUNT,
                  longest);
}

// ------------------------------------------------------------------------------------------------
// processes that are killed

enum {
    KILL_STEPS = 400,
    KILL_AFTER = 3,
    KILL_KEEP = 2,
    SMALL_FLOATS = 2 * SMALL_COLS * SMALL_COLS
};

/* In memory that the processes share. */
typedef struct kill_job {
    tc_world world;
    uint64_t seed;
    char folder[64];
    bool loads;       // the newest checkpoint; else first values
    uint32_t steps;   // at most
    double timeout_s; // of the comm
    uint32_t started, loaded_step;
    ms_result results[MOST_RANKS], then[MOST_RANKS];
    double error_s[MOST_RANKS];
    char texts[MOST_RANKS][300];
    float seen[KILL_STEPS + 1][SMALL_FLOATS]; // by rank 0: params before each step
    float ended[MOST_RANKS][SMALL_FLOATS];
} kill_job;

static ms_result see_small(small_net *n, float *to) {
    const ms_result result = ms_read(n->model, n->first, to);
    return result == MS_RESULT_OK ? ms_read(n->model, n->second, to + SMALL_COLS * SMALL_COLS)
                                  : result;
}

static ms_result kill_step(uint32_t own, small_net *n, uint32_t step) {
    float x[SMALL_ROWS * SMALL_COLS];
    double loss, sum = 1.0;
    ms_result result = MS_RESULT_OK;
    for (uint32_t micro = 0; micro < 2 && result == MS_RESULT_OK; ++micro) {
        t_rng rng = t_seed((step * 2 + micro) * MOST_RANKS + own);
        t_fill(&rng, x, SMALL_ROWS * SMALL_COLS, 1.0f);
        result = ms_write(n->model, n->x, x);
        result = result == MS_RESULT_OK ? ms_step(n->model, &loss) : result;
    }
    if (result == MS_RESULT_OK && step % 5 == 3) {
        result = ms_eval(n->model, &loss);
    } else if (result == MS_RESULT_OK && step % 5 == 1) {
        result = ms_sum_over_ranks(n->model, &sum, 1);
    } else if (result == MS_RESULT_OK && step % 7 == 2) {
        ms_set_tensor_technique(n->model, n->first, MS_TECHNIQUE_SHARDING,
                                step % 2 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT);
        result = ms_wrap(n->model);
    }
    return result;
}

static void *kill_work(uint32_t own, void *argument) {
    kill_job *j = (kill_job *)argument;
    ms_config c = t_config();
    ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    const ms_checkpoints checkpoints = {j->folder, KILL_KEEP};
    small_net n;
    float weights[SMALL_COLS * SMALL_COLS];
    uint32_t step = 0;
    bool found = false;
    (void)alarm(30); // a rank that hangs is killed, and so no error is found
    memset(&n, 0, sizeof n);
    c.comm = j->world.ranks[own].comm;
    c.comm_timeout = j->timeout_s;
    c.accumulation_steps = 2;
    o.grad_clip_norm = 1.0f;
    make_small(&n, &c, &o, j->seed % 2 ? ODD_SHARDS : ODD_COUNT);
    __sync_fetch_and_add(&j->started, 1);
    ms_result result = ms_wrap(n.model);
    if (result == MS_RESULT_OK && j->loads) {
        result = ms_load_checkpoint(n.model, &checkpoints, NULL, &found);
        step = (uint32_t)n.model->run.step;
    }
    for (int k = 0; k < 2 && result == MS_RESULT_OK && !found; ++k) {
        t_rng rng = t_seed((uint64_t)k + 5);
        t_fill(&rng, weights, SMALL_COLS * SMALL_COLS, 0.5f);
        result = ms_write(n.model, k ? n.second : n.first, weights);
    }
    j->loaded_step = found ? step : UINT32_MAX;
    for (uint32_t k = 0; k < j->steps && result == MS_RESULT_OK; ++k, ++step) {
        result = see_small(&n, j->ended[own]);
        if (result == MS_RESULT_OK && own == 0 && step <= KILL_STEPS) {
            memcpy(j->seen[step], j->ended[own], sizeof j->ended[own]);
        }
        if (result == MS_RESULT_OK && step % 2 == 1 && !j->loads) {
            result = ms_save_checkpoint(n.model, &checkpoints);
        }
        result = result == MS_RESULT_OK ? kill_step(own, &n, step) : result;
    }
    result = result == MS_RESULT_OK ? see_small(&n, j->ended[own]) : result;
    j->error_s[own] = now_s();
    j->results[own] = result;
    snprintf(j->texts[own], sizeof j->texts[own], "%s", ms_last_error(n.model));
    j->then[own] = ms_step(n.model, NULL);
    ms_destroy(n.model);
    return NULL;
}

static kill_job *make_kill(uint64_t seed, uint32_t ranks, const char *folder) {
    kill_job *j = (kill_job *)meeting_shared(sizeof *j);
    assert_non_null(j);
    tc_open(&j->world, ranks);
    j->world.forks = true;
    j->world.keeps_differences = true;
    j->world.at->polls = true;
    j->seed = seed;
    j->timeout_s = 20.0;
    snprintf(j->folder, sizeof j->folder, "%s", folder);
    return j;
}

static void free_kill(kill_job *j) {
    tc_close(&j->world);
    munmap(j, sizeof *j);
}

/* The time from the kill to the error of the last of the others. */
static double kill_one(kill_job *j, uint32_t victim, double after_s) {
    pid_t children[MOST_RANKS];
    double last_s = 0.0;
    fflush(NULL);
    for (uint32_t r = 0; r < j->world.count; ++r) {
        children[r] = fork();
        assert_true(children[r] >= 0);
        if (children[r] == 0) {
            kill_work(r, j);
            _exit(0);
        }
    }
    while (__sync_fetch_and_add(&j->started, 0) < j->world.count) {
        sleep_s(1e-4);
    }
    sleep_s(after_s);
    const double kill_s = now_s();
    assert_int_equal(kill(children[victim], SIGKILL), 0);
    for (uint32_t r = 0; r < j->world.count; ++r) {
        int status = 1;
        assert_true(waitpid(children[r], &status, 0) == children[r]);
        if (r != victim && (status != 0 || j->results[r] != MS_RESULT_RANKS ||
                            (j->then[r] != MS_RESULT_RANKS && j->then[r] != MS_RESULT_ORDER) ||
                            strstr(j->texts[r], "rank") == NULL)) {
            fail_msg(
                "seed %llu: rank %u of %u, after rank %u was killed: status %d, %s: %s; then %s",
                (unsigned long long)j->seed, r, j->world.count, victim, status,
                ms_result_name(j->results[r]), j->texts[r], ms_result_name(j->then[r]));
        }
        last_s = r != victim && j->error_s[r] > last_s ? j->error_s[r] : last_s;
    }
    return last_s - kill_s;
}

/* From the newest checkpoint, with one rank less: twice with the same bits, and from params that the run
   of all ranks had. Whether there is one. */
static bool go_on(uint64_t seed, uint32_t ranks, const char *folder, const kill_job *whole) {
    kill_job *runs[2];
    for (int k = 0; k < 2; ++k) {
        runs[k] = make_kill(seed, ranks, folder);
        runs[k]->loads = true;
        runs[k]->steps = KILL_AFTER;
        assert_true(tc_run(&runs[k]->world, kill_work, runs[k]));
        for (uint32_t r = 0; r < ranks; ++r) {
            assert_int_equal(runs[k]->results[r], MS_RESULT_OK);
            assert_memory_equal(runs[k]->ended[r], runs[0]->ended[0], sizeof runs[0]->ended[0]);
        }
    }
    const uint32_t step = runs[0]->loaded_step;
    if (step <= KILL_STEPS) {
        assert_memory_equal(runs[0]->seen[step], whole->seen[step], sizeof whole->seen[0]);
    }
    free_kill(runs[0]);
    free_kill(runs[1]);
    return step <= KILL_STEPS;
}

static void test_killed(void **state) {
    (void)state;
    const uint32_t count = (uint32_t)t_sweep(5, 200);
    double longest = 0.0;
    uint32_t resumed = 0;
    for (uint32_t k = 0; k < count; ++k) {
        const uint64_t seed = t_environment("MEMSCALE_TEST_SEED", 1) + k;
        t_rng rng = t_seed(seed + 424242);
        const uint32_t ranks = 2 + (uint32_t)(seed % 3);
        char folder[] = "/tmp/test_ranks_faults-XXXXXX", path[128];
        assert_non_null(mkdtemp(folder));
        kill_job *j = make_kill(seed, ranks, folder);
        j->steps = UINT32_MAX;
        j->timeout_s = 0.4;
        j->world.keeps_aborts = seed % 4 == 1;
        const double s = kill_one(j, t_below(&rng, ranks), 0.05 * t_unit(&rng));
        longest = s > longest ? s : longest;
        if (s > j->timeout_s + 1.0) {
            fail_msg("seed %llu: %.2f s from the kill to the last error", (unsigned long long)seed,
                     s);
        }
        resumed += go_on(seed, ranks - 1, folder, j);
        free_kill(j);
        for (int file = 0; file < KILL_KEEP; ++file) {
            snprintf(path, sizeof path, "%s/checkpoint-%d.safetensors", folder, file);
            remove(path);
            snprintf(path, sizeof path, "%s/checkpoint-%d.safetensors.tmp", folder, file);
            remove(path);
        }
        assert_int_equal(rmdir(folder), 0);
    }
    print_message("%u ranks were killed; the others had an error %.2f s later at most; %u times "
                  "there was a checkpoint to go on from\n",
                  count, longest, resumed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed), // the first: OpenMP has no threads yet
        cmocka_unit_test(test_steps_given_up),
        cmocka_unit_test(test_collectives_fail),
        cmocka_unit_test(test_votes_that_differ),
        cmocka_unit_test(test_cancels_at_each_instruction),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_ranks_differ),
    };
    return cmocka_run_group_tests_name("ranks_faults", tests, NULL, NULL);
}
