/*  test_threads.c - models in threads of their own: what they compute does not depend on the
    others, and with the thread sanitizer (config=thread) nothing is shared. Then the threads of the
    library: the copy streams of the CPU backend. Threads only return numbers; cmocka's checks,
    which jump, stay on the main one. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <time.h>

/* As the library starts threads: counted, and made to fail from a number on. */
static int threads_started, thread_that_fails = -1;

static int start_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                        void *argument) {
    const int number = threads_started++;
    return thread_that_fails >= 0 && number >= thread_that_fails
               ? 11
               : pthread_create(thread, attributes, run, argument);
}

#include "private.h"
#include "toy_layers.h"

enum { THREADS = 4, STEPS = 12, DEPTH = 12, ROUNDS = 25, LOSSES = 64 };

typedef struct job {
    uint64_t budget; // 0: the plain plan
    uint64_t seed;
    uint32_t rounds; // models, one after the other
    bool debug;
    /* What came of it. */
    ms_result result;
    uint64_t arena_bytes;
    uint32_t recomputed;
    double losses[LOSSES];
    float weights[DEPTH * T_CHAIN_COLS * T_CHAIN_COLS];
} job;

static ms_config job_config(const job *j) {
    ms_config config = t_config();
    config.debug = j->debug;
    if (j->budget != 0) {
        config.memory_budget_bytes = j->budget;
    }
    return config;
}

/* As t_chain_write, without its checks. */
static ms_result fill(t_chain *chain, uint64_t seed) {
    float data[T_CHAIN_INPUT];
    t_rng rng = t_seed(seed);
    t_fill(&rng, data, T_CHAIN_INPUT, 1.0f);
    ms_result result = ms_write(chain->model, chain->x, data);
    for (uint32_t i = 0; i < chain->depth && result == MS_RESULT_OK; ++i) {
        t_fill(&rng, data, T_CHAIN_COLS * T_CHAIN_COLS, 0.6f);
        result = ms_write(chain->model, chain->weight[i], data);
    }
    return result;
}

static ms_result train(job *j, t_chain *chain) {
    ms_memory_report report;
    memset(&report, 0, sizeof report);
    ms_result result = ms_wrap(chain->model);
    if (result == MS_RESULT_OK) {
        result = fill(chain, j->seed);
    }
    for (int i = 0; i < STEPS && result == MS_RESULT_OK; ++i) {
        result = ms_step(chain->model, &j->losses[i]);
    }
    if (result == MS_RESULT_OK) {
        result = ms_eval(chain->model, &j->losses[STEPS]);
    }
    if (result == MS_RESULT_OK) {
        result = ms_report(chain->model, &report);
    }
    j->arena_bytes = report.arena_bytes;
    j->recomputed = report.recompute_count;
    for (uint32_t i = 0; i < chain->depth && result == MS_RESULT_OK; ++i) {
        result =
            ms_read(chain->model, chain->weight[i], j->weights + i * T_CHAIN_COLS * T_CHAIN_COLS);
    }
    return result;
}

static void *run_job(void *argument) {
    job *j = (job *)argument;
    ms_config config = job_config(j);
    t_chain *chain = (t_chain *)malloc(sizeof *chain);
    j->result = chain == NULL ? MS_RESULT_OUT_OF_MEMORY : MS_RESULT_OK;
    for (uint32_t i = 0; i < j->rounds && j->result == MS_RESULT_OK; ++i) {
        j->result = t_chain_create(chain, &config, DEPTH, T_CHAIN_ROWS, T_CHAIN_COLS);
        if (j->result == MS_RESULT_OK) {
            j->result = train(j, chain);
        }
        ms_destroy(chain->model);
    }
    free(chain);
    return NULL;
}

static void run_together(job *jobs, uint32_t count) {
    pthread_t threads[THREADS];
    for (uint32_t i = 0; i < count; ++i) {
        assert_int_equal(pthread_create(&threads[i], NULL, run_job, &jobs[i]), 0);
    }
    for (uint32_t i = 0; i < count; ++i) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
}

static void expect_same(const job *together, const job *alone) {
    assert_int_equal(together->result, MS_RESULT_OK);
    assert_int_equal(alone->result, MS_RESULT_OK);
    assert_true(together->arena_bytes == alone->arena_bytes);
    assert_true(together->recomputed == alone->recomputed);
    assert_memory_equal(together->losses, alone->losses, sizeof alone->losses);
    assert_memory_equal(together->weights, alone->weights, sizeof alone->weights);
}

static void check_jobs(const job *jobs, uint32_t count) {
    static job together[THREADS], alone;
    memcpy(together, jobs, count * sizeof *jobs);
    run_together(together, count);
    for (uint32_t i = 0; i < count; ++i) {
        alone = jobs[i];
        run_job(&alone);
        expect_same(&together[i], &alone);
        assert_true(jobs[i].budget == 0 || together[i].arena_bytes <= jobs[i].budget);
    }
}

static uint64_t smallest_arena(void) {
    t_chain chain;
    uint64_t bytes = 0;
    ms_config config = t_config();
    config.dry_run = true;
    assert_int_equal(t_chain_create(&chain, &config, DEPTH, T_CHAIN_ROWS, T_CHAIN_COLS),
                     MS_RESULT_OK);
    t_ok(chain.model, ms_smallest_budget(chain.model, &bytes));
    ms_destroy(chain.model);
    return bytes;
}

// ------------------------------------------------------------------------------------------------

/* Each model keeps to the budget of its own, and trains as it does alone. */
static void two_models_in_two_threads(void **state) {
    (void)state;
    static job jobs[2];
    memset(jobs, 0, sizeof jobs);
    jobs[0].rounds = jobs[1].rounds = 1;
    jobs[0].seed = 1;
    jobs[1].seed = 2;
    jobs[1].budget = smallest_arena();
    check_jobs(jobs, 2);
    run_job(&jobs[0]);
    run_job(&jobs[1]);
    assert_true(jobs[0].recomputed == 0 && jobs[1].recomputed > 0);
    assert_true(jobs[1].arena_bytes < jobs[0].arena_bytes);
}

/* Many models come and go in each thread while others do the same. */
static void models_come_and_go(void **state) {
    (void)state;
    static job jobs[THREADS];
    memset(jobs, 0, sizeof jobs);
    for (uint32_t i = 0; i < THREADS; ++i) {
        jobs[i].rounds = (uint32_t)t_sweep(ROUNDS / 10, ROUNDS);
        jobs[i].seed = i;
        jobs[i].budget = i % 2 == 0 ? 0 : smallest_arena();
    }
    check_jobs(jobs, THREADS);
}

static void debug_mode_is_private_too(void **state) {
    (void)state;
    static job jobs[2];
    memset(jobs, 0, sizeof jobs);
    for (uint32_t i = 0; i < 2; ++i) {
        jobs[i].rounds = 1;
        jobs[i].seed = i;
        jobs[i].debug = true;
        jobs[i].budget = smallest_arena();
    }
    check_jobs(jobs, 2);
}

/* An error of one model is none of another's: its text and its state are its own. */
static void *fail_again_and_again(void *argument) {
    job *j = (job *)argument;
    ms_config config = job_config(j);
    j->result = MS_RESULT_OK;
    for (uint32_t i = 0; i < j->rounds && j->result == MS_RESULT_OK; ++i) {
        t_chain chain;
        j->result = t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS);
        if (j->result != MS_RESULT_OK || ms_wrap(chain.model) != MS_RESULT_BUDGET ||
            ms_last_error(chain.model)[0] == 0 || ms_wrap(NULL) != MS_RESULT_INVALID ||
            ms_last_error(NULL)[0] == 0) {
            j->result = MS_RESULT_INVALID;
        }
        ms_destroy(chain.model);
    }
    return NULL;
}

static void errors_stay_with_their_model(void **state) {
    (void)state;
    static job failing, training, alone;
    pthread_t thread;
    memset(&failing, 0, sizeof failing);
    memset(&training, 0, sizeof training);
    failing.rounds = ROUNDS;
    failing.budget = 1;
    training.rounds = ROUNDS / 5;
    alone = training;
    assert_int_equal(pthread_create(&thread, NULL, fail_again_and_again, &failing), 0);
    run_job(&training);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(failing.result, MS_RESULT_OK);
    run_job(&alone);
    expect_same(&training, &alone);
}

/* A model is used by one thread at a time, but not always by the same one. */
typedef struct relay {
    t_chain *chain;
    ms_result result;
    double loss;
} relay;

static void *step_once(void *argument) {
    relay *r = (relay *)argument;
    r->result = ms_step(r->chain->model, &r->loss);
    return NULL;
}

static void a_model_is_handed_on(void **state) {
    (void)state;
    t_chain chain, twin;
    relay r;
    ms_config config = t_config();
    t_chain_start(&chain, &config, 4);
    t_chain_start(&twin, &config, 4);
    r.chain = &chain;
    for (int i = 0; i < STEPS; ++i) {
        pthread_t thread;
        double loss = 0.0;
        assert_int_equal(pthread_create(&thread, NULL, step_once, &r), 0);
        assert_int_equal(pthread_join(thread, NULL), 0);
        t_ok(chain.model, r.result);
        t_ok(twin.model, ms_step(twin.model, &loss));
        assert_memory_equal(&loss, &r.loss, sizeof loss);
    }
    t_chain_same(&chain, &twin);
    ms_destroy(chain.model);
    ms_destroy(twin.model);
}

// ------------------------------------------------------------------------------------------------
// the copy streams of the CPU backend

enum { CELLS = 12, CELL_BYTES = 24576, EVENTS_AT_FIRST = 3, EVENTS = 9, MOST_BURST = 700 };

/* Who last wrote a cell, and who has read it since: jobs of each stream, by their number from 1. */
typedef struct cell {
    uint64_t wrote[MS_STREAM_COUNT], read[MS_STREAM_COUNT];
} cell;

/* A random program of copies, each of which is right only if it runs after those before it that
   touch the same cells. `after` counts the jobs of the other streams that a stream runs after. */
typedef struct streams_run {
    ms_backend b;
    ms_allocator host;
    t_heap heap;
    void *state;
    uint8_t *memory[2], *expected[2]; // cells of the host, and of the device
    cell cells[2][CELLS];
    uint64_t jobs[MS_STREAM_COUNT], after[MS_STREAM_COUNT][MS_STREAM_COUNT];
    ms_stream_kind event_stream[EVENTS];
    uint64_t event_jobs[EVENTS];
    uint32_t event_count;
    uint64_t waits, overlaps;
    t_rng rng;
} streams_run;

static void streams_open(streams_run *r, uint64_t seed) {
    ms_open_args args;
    memset(r, 0, sizeof *r);
    memset(&args, 0, sizeof args);
    r->rng = t_seed(seed);
    r->b = ms_backend_cpu();
    r->host = t_heap_allocator(&r->heap);
    r->event_count = args.event_count = EVENTS_AT_FIRST;
    args.host = &r->host;
    assert_int_equal(r->b.open(r->b.user, &args, &r->state), 0);
    for (int i = 0; i < 2; ++i) {
        r->memory[i] = (uint8_t *)calloc(CELLS, CELL_BYTES);
        r->expected[i] = (uint8_t *)calloc(CELLS, CELL_BYTES);
        assert_true(r->memory[i] != NULL && r->expected[i] != NULL);
    }
}

static void streams_close(streams_run *r) {
    r->b.close(r->state);
    for (int i = 0; i < 2; ++i) {
        assert_memory_equal(r->memory[i], r->expected[i], (size_t)CELLS * CELL_BYTES);
        free(r->memory[i]);
        free(r->expected[i]);
    }
    assert_true(r->heap.live_count == 0 && r->heap.wrong_releases == 0);
}

/* Waits for an event; the host does so by any of three functions. */
static void streams_wait(streams_run *r, ms_stream_kind stream, uint32_t event) {
    const ms_stream_kind of = r->event_stream[event];
    const int how = stream == MS_STREAM_COMPUTE ? (int)t_below(&r->rng, 9) : 1;
    r->waits++;
    if (how == 0) {
        assert_int_equal(r->b.synchronize(r->state), 0);
        memcpy(r->after[stream], r->jobs, sizeof r->jobs);
        return;
    }
    assert_int_equal(
        how % 2 == 0 ? r->b.wait_on_host(r->state, event) : r->b.wait(r->state, stream, event), 0);
    if (r->after[stream][of] < r->event_jobs[event]) {
        r->after[stream][of] = r->event_jobs[event];
    }
}

static void streams_record(streams_run *r, ms_stream_kind stream, uint32_t event) {
    assert_int_equal(r->b.record(r->state, stream, event), 0);
    r->event_stream[event] = stream;
    r->event_jobs[event] = r->jobs[stream];
}

/* Orders a stream after a job of another: by an event that is recorded for it, or by one that came
   after the job. */
static void streams_order(streams_run *r, ms_stream_kind stream, ms_stream_kind of,
                          uint64_t number) {
    if (of == stream || of == MS_STREAM_COMPUTE || r->after[stream][of] >= number) {
        return;
    }
    uint32_t event = t_below(&r->rng, r->event_count);
    if (r->event_stream[event] != of || r->event_jobs[event] < number) {
        streams_record(r, of, event);
    }
    streams_wait(r, stream, event);
}

static void streams_touch(streams_run *r, ms_stream_kind stream, int place, uint32_t number,
                          bool writes) {
    cell *c = &r->cells[place][number];
    for (int of = 0; of < MS_STREAM_COUNT; ++of) {
        streams_order(r, stream, (ms_stream_kind)of, c->wrote[of]);
        if (writes) {
            streams_order(r, stream, (ms_stream_kind)of, c->read[of]);
        }
    }
}

/* Looks at a cell once nothing writes it. */
static void streams_look(streams_run *r, int place, uint32_t number) {
    const size_t at = (size_t)number * CELL_BYTES;
    streams_touch(r, MS_STREAM_COMPUTE, place, number, false);
    assert_memory_equal(r->memory[place] + at, r->expected[place] + at, CELL_BYTES);
}

static void streams_copy(streams_run *r, ms_stream_kind stream, uint32_t most_bytes) {
    const int to = stream == MS_STREAM_TO_DEVICE, from = !to;
    const uint32_t target = t_below(&r->rng, CELLS), source = t_below(&r->rng, CELLS);
    const uint32_t bytes = t_below(&r->rng, most_bytes + 1);
    const uint32_t first = t_below(&r->rng, CELL_BYTES - bytes + 1);
    const size_t at = (size_t)target * CELL_BYTES + first;
    const size_t origin = (size_t)source * CELL_BYTES + first;
    streams_touch(r, stream, to, target, true);
    streams_touch(r, stream, from, source, false);
    r->overlaps += r->after[MS_STREAM_COMPUTE][stream] < r->jobs[stream];
    r->jobs[stream]++;
    assert_int_equal(to ? r->b.copy_in(r->state, r->memory[1] + at, r->memory[0] + origin, bytes)
                        : r->b.copy_out(r->state, r->memory[0] + at, r->memory[1] + origin, bytes),
                     0);
    memcpy(r->expected[to] + at, r->expected[from] + origin, bytes);
    r->cells[to][target].wrote[stream] = r->cells[from][source].read[stream] = r->jobs[stream];
}

/* The host looks at a cell, or writes a part of it. */
static void streams_host(streams_run *r, int place) {
    const uint32_t number = t_below(&r->rng, CELLS);
    const size_t at = (size_t)number * CELL_BYTES + t_below(&r->rng, CELL_BYTES / 2);
    streams_look(r, place, number);
    if (t_below(&r->rng, 2) != 0) {
        const int value = (int)t_below(&r->rng, 256);
        streams_touch(r, MS_STREAM_COMPUTE, place, number, true);
        memset(r->memory[place] + at, value, CELL_BYTES / 2);
        memset(r->expected[place] + at, value, CELL_BYTES / 2);
        streams_record(r, MS_STREAM_COMPUTE, 0); // for which nobody waits
    }
}

static void streams_step(streams_run *r) {
    const uint32_t what = t_below(&r->rng, 100);
    const ms_stream_kind stream =
        t_below(&r->rng, 2) != 0 ? MS_STREAM_TO_DEVICE : MS_STREAM_TO_HOST;
    if (what < 60) {
        streams_copy(r, stream, what < 20 ? CELL_BYTES : 256);
    } else if (what < 90) {
        streams_host(r, (int)(what % 2));
    } else if (what < 95) { // more waits than are needed, for events that were not recorded, too
        streams_wait(r, (ms_stream_kind)t_below(&r->rng, MS_STREAM_COUNT),
                     t_below(&r->rng, r->event_count));
    } else if (what < 99) { // events are recorded again
        streams_record(r, stream, t_below(&r->rng, r->event_count));
    } else { // more than the ring holds
        for (uint32_t i = t_below(&r->rng, MOST_BURST); i > 0; --i) {
            streams_copy(r, stream, i % 16 == 0 ? CELL_BYTES : 16);
        }
    }
}

/* Events that are added keep what those before them have recorded. */
static void streams_add_events(streams_run *r) {
    ms_prepare_args args;
    memset(&args, 0, sizeof args);
    args.event_count = r->event_count + 1;
    if (r->event_count == EVENTS) {
        return;
    }
    for (int i = 0; i < 4; ++i) {
        streams_copy(r, MS_STREAM_TO_DEVICE, CELL_BYTES);
    }
    streams_record(r, MS_STREAM_TO_DEVICE, r->event_count - 1);
    r->heap.fail_at = r->heap.calls + 1;
    assert_int_not_equal(r->b.prepare(r->state, &args), 0);
    r->heap.fail_at = 0;
    assert_int_equal(r->b.prepare(r->state, &args), 0);
    streams_wait(r, MS_STREAM_COMPUTE, r->event_count++ - 1);
    for (uint32_t i = 0; i < CELLS; ++i) {
        streams_look(r, 1, i);
    }
}

static void check_streams(uint64_t seed, uint32_t steps, streams_run *sums) {
    streams_run r;
    streams_open(&r, seed);
    for (uint32_t i = 0; i < steps; ++i) {
        streams_step(&r);
        if (i % 16 == 15) {
            streams_add_events(&r);
        }
    }
    sums->waits += r.waits;
    sums->overlaps += r.overlaps;
    streams_close(&r);
}

/* Random copies, with as few waits as the contract needs: each finds what those before it wrote. */
static void copies_keep_their_order(void **state) {
    (void)state;
    streams_run sums;
    const uint64_t rounds = t_sweep(30, 1500);
    memset(&sums, 0, sizeof sums);
    for (uint64_t seed = 0; seed < rounds; ++seed) {
        check_streams(seed, 200, &sums);
    }
    assert_true(sums.waits > 30 * rounds && sums.overlaps > 60 * rounds);
}

/* The same with one thread, which may come late, or with none. */
static void copies_without_threads(void **state) {
    (void)state;
    streams_run sums;
    memset(&sums, 0, sizeof sums);
    for (uint64_t seed = 0; seed < 40; ++seed) {
        threads_started = 0;
        thread_that_fails = (int)(seed % 2);
        check_streams(seed, 100, &sums);
        thread_that_fails = -1;
        assert_true(threads_started > 1);
    }
}

/* A stream is made to wait for a job of the other one that is not enqueued yet. */
static void copies_return_before_they_are_done(void **state) {
    (void)state;
    streams_run r;
    thread_that_fails = -1;
    streams_open(&r, 0);
    msi_cpu *c = (msi_cpu *)r.state;
    assert_int_equal(r.b.copy_out(r.state, r.memory[0], r.memory[1], 1), 0);
    assert_int_equal(r.b.synchronize(r.state), 0);
    assert_int_equal(r.b.record(r.state, MS_STREAM_TO_HOST, 1), 0);
    c->events[1].job_count++;
    assert_int_equal(r.b.wait(r.state, MS_STREAM_TO_DEVICE, 1), 0);
    memset(r.memory[0], 7, CELL_BYTES);
    memset(r.expected[0], 7, CELL_BYTES);
    assert_int_equal(r.b.copy_in(r.state, r.memory[1], r.memory[0], CELL_BYTES), 0);
    assert_memory_equal(r.memory[1], r.expected[1], CELL_BYTES);  // nothing has come yet
    assert_int_equal(r.b.wait(r.state, MS_STREAM_COMPUTE, 2), 0); // was never recorded
    assert_int_equal(r.b.wait_on_host(r.state, 2), 0);
    assert_int_equal(r.b.record(r.state, MS_STREAM_COMPUTE, 2), 0);
    assert_int_equal(r.b.wait(r.state, MS_STREAM_TO_DEVICE, 2), 0);
    assert_int_equal(r.b.copy_out(r.state, r.memory[0] + CELL_BYTES, r.memory[1] + CELL_BYTES, 1),
                     0);
    assert_int_equal(r.b.record(r.state, MS_STREAM_TO_DEVICE, 2), 0);
    assert_int_equal(r.b.wait(r.state, MS_STREAM_COMPUTE, 2), 0);
    memset(r.expected[1], 7, CELL_BYTES);
    assert_memory_equal(r.memory[1], r.expected[1], CELL_BYTES);
    streams_close(&r);
}

static void copies_in_flight_are_done_on_close(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 20; ++seed) {
        streams_run r;
        streams_open(&r, seed);
        memset(r.memory[0], (int)seed + 1, (size_t)CELLS * CELL_BYTES);
        memset(r.expected[0], (int)seed + 1, (size_t)CELLS * CELL_BYTES);
        for (uint32_t i = 0; i < 5 * CELLS; ++i) {
            streams_copy(&r, i % CELLS == 0 ? MS_STREAM_TO_HOST : MS_STREAM_TO_DEVICE, CELL_BYTES);
        }
        streams_close(&r);
    }
}

static void a_state_that_cannot_be_opened(void **state) {
    (void)state;
    const ms_backend cpu = ms_backend_cpu();
    t_heap heap;
    int error = 1;
    for (uint64_t i = 1; error != 0; ++i) {
        void *opened;
        ms_open_args args;
        memset(&args, 0, sizeof args);
        memset(&heap, 0, sizeof heap);
        const ms_allocator host = t_heap_allocator(&heap);
        args.host = &host;
        args.event_count = EVENTS;
        heap.fail_at = i;
        error = cpu.open(cpu.user, &args, &opened);
        assert_int_equal(error, i == 3 ? 0 : MS_BACKEND_OUT_OF_MEMORY);
        if (error == 0) {
            cpu.close(opened);
        }
        assert_true(heap.live_count == 0 && heap.wrong_releases == 0);
    }
}

/* Without copies of the plan's own, everything is done on the thread of the trainer. */
static void training_starts_no_thread(void **state) {
    (void)state;
    static job one;
    memset(&one, 0, sizeof one);
    one.rounds = 1;
    threads_started = 0;
    for (int i = 0; i < 3; ++i) {
        one.budget = i == 1 ? smallest_arena() : 0;
        one.debug = i == 2;
        run_job(&one);
        assert_int_equal(one.result, MS_RESULT_OK);
    }
    assert_int_equal(threads_started, 0);
}

static int count_forward(const ms_call *call) {
    int64_t *count = (int64_t *)call->state[0].data;
    count[0] += 3; // in a recomputation too: the library puts back what it was
    return t_forward(call);
}

/* State that stays on the host is saved before a recomputation and restored after it: today's only
   copies of a plan between host and device. */
static void host_state_is_copied_by_threads(void **state) {
    (void)state;
    t_net n;
    int64_t count = 40;
    threads_started = 0;
    t_net_begin(&n);
    n.config.force_optimize = true;
    t_net_create(&n);
    ms_tensor p = t_net_param(&n, "p"), y = t_net_activation(&n, "y");
    ms_tensor counter = ms_buffer(n.m, "counter", MS_DTYPE_I64, ms_shape1(1));
    ms_set_on_host(n.m, counter);
    ms_tensor h = t_net_scale(&n, "scale", n.x, 0.0f, p);
    ms_layer_desc desc = t_net_layer(&n, T_SQUARE, "counts", h, y);
    desc.forward = count_forward;
    desc.backward_reads.in = 0; // undeclared: all of them
    desc.state[0] = counter;
    t_net_register(&n, &desc);
    t_net_loss(&n, t_net_pairs(&n, y, p, 4), 0.125f);
    t_net_start(&n);
    t_ok(n.m, ms_write(n.m, counter, &count));
    for (int step = 1; step < 20; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_read(n.m, counter, &count));
        assert_int_equal((int)count, 40 + 3 * step);
    }
    assert_true(n.ops[1].calls[MS_PHASE_RECOMPUTE] > 0);
    assert_int_equal(threads_started, 2);
    t_net_end(&n);
}

// ------------------------------------------------------------------------------------------------
// the trainer's job system

enum { WORKERS = 3 };

/* Workers that take the pieces of one call at a time. */
typedef struct pool {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t workers[WORKERS];
    ms_piece_fn piece;
    void *argument;
    uint32_t next, count, done; // pieces
    uint64_t calls, pieces;
    bool ends;
} pool;

/* Does pieces as long as there are any; called with the lock. */
static void pool_work(pool *p) {
    while (p->next < p->count) {
        const uint32_t piece = p->next++;
        (void)pthread_mutex_unlock(&p->lock);
        p->piece(p->argument, piece);
        (void)pthread_mutex_lock(&p->lock);
        p->pieces += 1;
        p->done += 1;
        (void)pthread_cond_broadcast(&p->changed);
    }
}

static void *pool_worker(void *argument) {
    pool *p = (pool *)argument;
    (void)pthread_mutex_lock(&p->lock);
    while (!p->ends) {
        pool_work(p);
        if (!p->ends && p->next >= p->count) {
            (void)pthread_cond_wait(&p->changed, &p->lock);
        }
    }
    (void)pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void pool_run(void *user, uint32_t count, ms_piece_fn piece, void *argument) {
    pool *p = (pool *)user;
    (void)pthread_mutex_lock(&p->lock);
    p->piece = piece;
    p->argument = argument;
    p->next = p->done = 0;
    p->count = count;
    p->calls += 1;
    (void)pthread_cond_broadcast(&p->changed);
    pool_work(p);
    while (p->done < count) {
        (void)pthread_cond_wait(&p->changed, &p->lock);
    }
    p->count = p->next = 0;
    (void)pthread_mutex_unlock(&p->lock);
}

static void pool_open(pool *p) {
    memset(p, 0, sizeof *p);
    assert_int_equal(pthread_mutex_init(&p->lock, NULL), 0);
    assert_int_equal(pthread_cond_init(&p->changed, NULL), 0);
    for (int i = 0; i < WORKERS; ++i) {
        assert_int_equal(pthread_create(&p->workers[i], NULL, pool_worker, p), 0);
    }
}

static void pool_close(pool *p) {
    (void)pthread_mutex_lock(&p->lock);
    p->ends = true;
    (void)pthread_cond_broadcast(&p->changed);
    (void)pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < WORKERS; ++i) {
        assert_int_equal(pthread_join(p->workers[i], NULL), 0);
    }
    (void)pthread_cond_destroy(&p->changed);
    (void)pthread_mutex_destroy(&p->lock);
}

/* Large layers, all on the host, state in 8 bits or not: the bits of a model without a job system,
   and no thread of the library's own. */
static void jobs_change_no_bit(void **state) {
    (void)state;
    enum { WIDE_DEPTH = 3, WIDE_ROWS = 160, WIDE_COLS = 192 };
    for (int coded = 0; coded < 2; ++coded) {
        static pool p;
        static t_chain of[2];
        double losses[2];
        pool_open(&p);
        for (int k = 0; k < 2; ++k) {
            ms_config config = t_config();
            config.offloading = MS_SWITCH_ON;
            config.optimizer_8bit = coded ? MS_SWITCH_ON : MS_SWITCH_OFF;
            config.force_optimize = true;
            if (k == 1) {
                config.parallel.run = pool_run;
                config.parallel.user = &p;
            }
            assert_int_equal(t_chain_create(&of[k], &config, WIDE_DEPTH, WIDE_ROWS, WIDE_COLS),
                             MS_RESULT_OK);
            t_ok(of[k].model, ms_wrap(of[k].model));
            t_ok(of[k].model, t_chain_write(&of[k], 5));
        }
        t_ok(of[0].model, ms_step(of[0].model, &losses[0]));
        const int started = threads_started;
        t_ok(of[1].model, ms_step(of[1].model, &losses[1]));
        assert_int_equal(threads_started, started);
        assert_true(p.calls >= WIDE_DEPTH && p.pieces > 4 * p.calls); // a CBLAS has its own
        for (int step = 0; step < 4; ++step) {
            assert_memory_equal(&losses[0], &losses[1], sizeof losses[0]);
            t_ok(of[0].model, ms_step(of[0].model, &losses[0]));
            t_ok(of[1].model, step % 2 ? ms_step(of[1].model, &losses[1])
                                       : ms_step_slice(of[1].model, UINT64_MAX, &losses[1]));
            t_chain_same(&of[0], &of[1]);
        }
        t_ok(of[1].model, ms_detach(of[1].model));
        t_chain_same(&of[0], &of[1]);
        ms_destroy(of[0].model);
        ms_destroy(of[1].model);
        pool_close(&p);
    }
}

static void jobs_are_for_the_cpu_backend(void **state) {
    (void)state;
    t_device device;
    ms_model *m;
    ms_config config = t_config();
    config.parallel.run = pool_run;
    config.backend = t_device_backend(&device);
    assert_int_equal(ms_create(&config, &m), MS_RESULT_INVALID);
    t_text_has(ms_last_error(m), "parallel");
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// cancel, from another thread

enum { CANCELLED_STEPS = 200 };

typedef struct cancelled_job {
    t_chain chain;
    bool in_slices;
    uint32_t cancelled;
    ms_result result;
    volatile long is_done; // by __atomic
} cancelled_job;

/* Steps until so many have counted. */
static void *run_cancelled(void *argument) {
    cancelled_job *j = (cancelled_job *)argument;
    for (uint32_t done = 0; done < CANCELLED_STEPS;) {
        ms_result result = MS_RESULT_MORE;
        while (result == MS_RESULT_MORE) {
            result = j->in_slices ? ms_step_slice(j->chain.model, 20, NULL)
                                  : ms_step(j->chain.model, NULL);
        }
        done += result == MS_RESULT_OK;
        j->cancelled += result == MS_RESULT_CANCELLED;
        if (result != MS_RESULT_OK && result != MS_RESULT_CANCELLED) {
            j->result = result;
            break;
        }
    }
    __atomic_store_n(&j->is_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void steps_are_cancelled_by_another_thread(void **state) {
    (void)state;
    static cancelled_job j;
    static t_chain whole;
    const ms_config config = t_config();
    for (int in_slices = 0; in_slices < 2; ++in_slices) {
        memset(&j, 0, sizeof j);
        j.in_slices = in_slices != 0;
        t_chain_start(&j.chain, &config, DEPTH);
        t_chain_start(&whole, &config, DEPTH);
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, run_cancelled, &j), 0);
        uint32_t calls = 0;
        while (!__atomic_load_n(&j.is_done, __ATOMIC_ACQUIRE)) {
            if (calls < 100) { // then steps come to their end
                ms_cancel(j.chain.model);
                ++calls;
            }
            const struct timespec pause = {0, 20000 + 10000 * (long)(calls % 50)};
            (void)nanosleep(&pause, NULL);
        }
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(j.result, MS_RESULT_OK);
        assert_in_range(j.cancelled, 1, calls);
        for (int i = 0; i < CANCELLED_STEPS; ++i) {
            t_ok(whole.model, ms_step(whole.model, NULL));
        }
        t_chain_same(&j.chain, &whole);
        ms_destroy(j.chain.model);
        ms_destroy(whole.model);
    }
}

int main(void) {
    t_hook.start_thread = start_thread;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_models_in_two_threads),
        cmocka_unit_test(models_come_and_go),
        cmocka_unit_test(debug_mode_is_private_too),
        cmocka_unit_test(errors_stay_with_their_model),
        cmocka_unit_test(a_model_is_handed_on),
        cmocka_unit_test(copies_keep_their_order),
        cmocka_unit_test(copies_without_threads),
        cmocka_unit_test(copies_return_before_they_are_done),
        cmocka_unit_test(copies_in_flight_are_done_on_close),
        cmocka_unit_test(a_state_that_cannot_be_opened),
        cmocka_unit_test(training_starts_no_thread),
        cmocka_unit_test(host_state_is_copied_by_threads),
        cmocka_unit_test(jobs_change_no_bit),
        cmocka_unit_test(jobs_are_for_the_cpu_backend),
        cmocka_unit_test(steps_are_cancelled_by_another_thread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
