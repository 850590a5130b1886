/*  test_ranks.c - several ranks train one model: threads of this process, with collectives of the test
    (threads_comm.h). Random graphs and random sharding, mixed with all techniques: replicas are equal,
    sharding changes no bit, and the ranks together compute what one rank does that accumulates over
    their micro-batches. On the CPU, on a device whose streams run in an adversarial order (virtual.h)
    and, compiled for it, on the emulated GPU, by NCCL too. MEMSCALE_TEST_DAGS sets how many graphs are run, MEMSCALE_TEST_SEED which is
    the first. */
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "virtual.h"
#include "left_out.h"
#include "late_dag.h"
#include "threads_comm.h"

enum { QUICK_GRAPHS = 40, GRAPHS = 1000, MOST_RANKS = 4, STEPS = 3, ROOM = 1 << 19 };

// ------------------------------------------------------------------------------------------------
// what a rank has after each step

typedef struct snapshot {
    uint32_t used, count;
    uint32_t end[4096]; // of each item
    uint32_t value[4096];
    const char *what[4096];
    unsigned char data[ROOM];
} snapshot;

static bool see(snapshot *s, rd_net *n, const char *what, uint32_t value, ms_tensor tensor) {
    const rd_value *v = &n->run.graph->value[value];
    const uint64_t bytes = rd_bytes(v, n->run.size);
    assert_true(s->used + bytes <= ROOM && s->count < 4096);
    memset(s->data + s->used, 0, (size_t)bytes);
    const ms_result result = ms_read(n->model, tensor, s->data + s->used);
    if (result != MS_RESULT_OK && result != MS_RESULT_ORDER) {
        return rd_fail(&n->run, "reading %s %u: %s", what, (unsigned)value,
                       ms_last_error(n->model));
    }
    s->what[s->count] = what;
    s->value[s->count] = value;
    s->used += (uint32_t)bytes;
    s->end[s->count++] = s->used;
    return true;
}

static bool see_params(snapshot *s, rd_net *n) {
    const rd_graph *g = n->run.graph;
    bool fine = true;
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        const rd_value *v = &g->value[i];
        if (v->role != RD_PARAM) {
            continue;
        }
        fine = see(s, n, "param", i, n->handle[i]);
        for (uint32_t k = 0; k < rd_state_count(g, i) && !v->frozen && fine; ++k) {
            fine = see(s, n, "state", i, ms_optimizer_state(n->model, n->handle[i], (int)k));
        }
    }
    return fine;
}

// ------------------------------------------------------------------------------------------------
// one graph, trained by some ranks

/* LATE: the virtual device; compiled for it, the emulated GPU, with layers that run late there. */
typedef enum place { ON_CPU, ON_LATE, ON_NCCL } place;

#if defined CUDART_EMULATION
enum { PLACES = ON_NCCL + 1 };
#elif defined T_CUDA
enum { PLACES = ON_CPU + 1 };
#else
enum { PLACES = ON_LATE + 1 };
#endif

typedef struct run {
    place on;
    rd_graph *graph; // of each rank, a copy
    uint32_t ranks, micros, steps;
    uint32_t fewer; // micro-batches that the second step lacks, if it has more
    uint64_t seed;  // of what is forced; 0: nothing is
    bool halves, replans;
    double losses[MOST_RANKS][STEPS];
    snapshot *seen[MOST_RANKS];
    char failure[MOST_RANKS][RD_TEXT];
    uint64_t calls[TC_KIND_COUNT]; // of rank 0
    uint64_t along;                // gradients that rank 0 sums along with others
    tc_world world;
    ms_config config;
    /* ON_LATE: another order; the event that rank 0 leaves out, of how many, and which matter. */
    uint64_t order;
    uint32_t left_out, events;
    bool is_needed[LO_CALLS], is_of_vote[LO_CALLS];
} run;

static bool is_ok(rd_net *n, ms_result result, const char *call) {
    return result == MS_RESULT_OK ||
           rd_fail(&n->run, "%s: %s: %s", call, ms_result_name(result), ms_last_error(n->model));
}

/* The inputs of a round, of which each rank and micro-batch has its own. */
static bool feed(rd_net *n, uint64_t round) {
    const rd_graph *g = n->run.graph;
    uint64_t data[RD_ELEMENTS];
    bool fine = true;
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        if (g->value[i].role == RD_INPUT) {
            rd_initial(g, i, n->run.size, round, data);
            fine = is_ok(n, ms_write(n->model, n->handle[i], data), "ms_write");
        }
    }
    return fine;
}

static void begin_pass(rd_net *n, uint32_t micro) {
    n->run.micro = micro;
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        n->run.op[i].forwards = n->run.op[i].backwards = n->run.op[i].recomputes = 0;
    }
}

/* Another plan between two steps: for another budget, or the plain one. */
static bool replan(run *r, rd_net *n, uint32_t step) {
    ms_memory_report report;
    if (!r->replans || step == 0) {
        return true;
    }
    if (step == 2) {
        return is_ok(n, ms_detach(n->model), "ms_detach");
    }
    if (!is_ok(n, ms_report(n->model, &report), "ms_report")) {
        return false;
    }
    for (uint32_t i = 0; i < n->run.graph->value_count; ++i) {
        const rd_value *v = &n->run.graph->value[i];
        if (v->role == RD_PARAM && rd_is_float(v)) {
            const ms_switch force = ((r->seed >> 3) + i) % 2 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
            ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_SHARDING, force);
        }
    }
    const ms_result result = ms_wrap(n->model);
    return result == MS_RESULT_INVALID || is_ok(n, result, "ms_wrap again");
}

static bool train(run *r, uint32_t rank, rd_net *n) {
    bool fine = rd_net_write(n, 0, false);
    for (uint32_t step = 0; step < r->steps && fine; ++step) {
        double loss = 0.0, sum = 0.0;
        const uint32_t micros =
            step == 1 && r->micros > r->fewer ? r->micros - r->fewer : r->micros;
        fine = replan(r, n, step);
        for (uint32_t micro = 0; micro < micros && fine; ++micro) {
            begin_pass(n, micro);
            const uint64_t round = 1 + (step * r->micros + micro) * r->ranks + rank;
            fine = rd_net_vary(n, 1 + step) && feed(n, round) &&
                   is_ok(n, ms_step(n->model, &loss), "ms_step") &&
                   (r->on == ON_CPU || is_ok(n, ms_synchronize(n->model), "ms_synchronize"));
            sum += loss;
        }
        if (micros < r->micros && fine) { // the step ends early
            fine = is_ok(n, ms_update(n->model), "ms_update");
        }
        n->run.step += 1;
        r->losses[rank][step] = sum / micros;
        fine = fine && see_params(r->seen[rank], n);
    }
    return fine;
}

/* Of one rank. */
typedef struct rank_device {
    lo_device device;
    v_layer layers[RD_LAYERS];
} rank_device;

#ifdef CUDART_EMULATION
static void open_device(run *r, uint32_t rank, rank_device *device, ms_config *config) {
    ms_nccl_id id;
    emulation_reset(r->graph->seed * MOST_RANKS + rank);
    if (r->on != ON_CPU) {
        ld_make_later(&r->graph[rank], device->layers);
    }
    if (r->on == ON_NCCL && (ms_nccl_share_id(&config->comm, &id) != MS_RESULT_OK ||
                             ms_comm_nccl(&id, rank, r->ranks, &config->comm) != MS_RESULT_OK)) {
        snprintf(r->failure[rank], RD_TEXT, "%s", config->comm.name);
    }
}

static void close_device(run *r, uint32_t rank, rank_device *device, ms_config *config) {
    (void)device;
    if (r->on == ON_NCCL) {
        ms_comm_close(&config->comm);
    }
    const emulation_counts left = emulation_count();
    if (left.device_allocations + left.pinned_allocations + left.streams + left.events > 0) {
        snprintf(r->failure[rank], RD_TEXT, "the device has memory, streams or events left");
    }
}
#else
static void open_device(run *r, uint32_t rank, rank_device *device, ms_config *config) {
    if (r->on == ON_LATE) {
        v_open(&device->device.late, (r->graph->seed + 7919 * r->order) * MOST_RANKS + rank);
        device->device.late.engine.is_even = r->left_out > 0;
        device->device.left_out = rank == 0 ? r->left_out : 0;
        config->backend = lo_backend(&device->device);
        r->graph[rank].move = ld_move;
        r->graph[rank].mover = device->layers;
    }
}

static void close_device(run *r, uint32_t rank, rank_device *device, ms_config *config) {
    v_device *late = &device->device.late;
    (void)config;
    if (r->on == ON_LATE) {
        if (late->engine.pending > 0 || late->overtaken > 0) {
            snprintf(r->failure[rank], RD_TEXT, "work is left, or has overtaken other work");
        }
        if (rank == 0) {
            r->events = device->device.calls;
            memcpy(r->is_needed, device->device.is_needed, sizeof r->is_needed);
            memcpy(r->is_of_vote, device->device.is_of_vote, sizeof r->is_of_vote);
        }
        v_close(late);
    }
}
#endif

static uint64_t summed_along(const msi_program *p) {
    uint64_t along = 0;
    for (uint32_t now = 0; now < p->code.instructions.count; ++now) {
        const msi_instruction *i = &p->code.instructions.items[now];
        along += i->op == MSI_OP_REDUCE ? i->operand_count / 2u - 1 : 0;
    }
    return along;
}

/* A net with a plan, and the hash of that. */
static rd_net *wrap_net(run *r, uint32_t rank, const ms_config *config, uint64_t *hash) {
    ms_memory_report report;
    rd_net *n = rd_rank_net(&r->graph[rank], config, r->failure[rank], r->halves, r->seed, true);
    ms_result result = ms_wrap(n->model);
    if (result == MS_RESULT_INVALID && r->seed) { // what cannot be forced
        rd_net_destroy(n);
        n = rd_rank_net(&r->graph[rank], config, r->failure[rank], r->halves, 0, true);
        result = ms_wrap(n->model);
    }
    const bool fine =
        is_ok(n, result, "ms_wrap") && is_ok(n, ms_report(n->model, &report), "ms_report");
    *hash = fine ? report.plan_hash : 0;
    return n;
}

static void *work(uint32_t rank, void *argument) {
    run *r = (run *)argument;
    ms_config config = r->config;
    rank_device *device = (rank_device *)calloc(1, sizeof *device);
    config.comm = r->world.ranks[rank].comm;
    config.comm_timeout = r->left_out ? 2.0 : 20.0;
    r->graph[rank].move = NULL;
    open_device(r, rank, device, &config);
    uint64_t hash = 0, dry_hash = 0;
    if (rank == 0) { // a dry run, which meets nobody, has the plan of the run
        ms_config dry = config;
        dry.dry_run = true;
        rd_net_destroy(wrap_net(r, rank, &dry, &dry_hash));
    }
    rd_net *n = wrap_net(r, rank, &config, &hash);
    r->seen[rank]->used = r->seen[rank]->count = 0;
    if (hash && rank == 0) {
        r->along = summed_along(&n->model->run.plan->train);
        if (hash != dry_hash) {
            (void)rd_fail(&n->run, "a dry run has another plan");
        }
    }
    if (hash && train(r, rank, n)) {
        ms_memory_report report;
        (void)is_ok(n, ms_report(n->model, &report), "ms_report");
    }
    if (r->failure[rank][0] && config.comm.abort) {
        config.comm.abort(config.comm.user);
    }
    rd_net_destroy(n);
    close_device(r, rank, device, &config);
    free(device);
    return NULL;
}

static bool may_end_early = true;

static run *run_new(const rd_graph *graph, place on, uint32_t ranks, uint32_t micros, uint64_t seed,
                    const ms_config *config, bool halves) {
    run *r = (run *)meeting_shared(sizeof *r);
    assert_non_null(r);
    r->halves = halves;
    r->replans = seed % 3 == 1 && !halves; // a detached plan rounds nothing
    r->graph = (rd_graph *)malloc(ranks * sizeof *r->graph);
    r->on = on;
    r->ranks = ranks;
    r->micros = micros;
    r->steps = STEPS;
    r->fewer = (uint32_t)(graph->seed % 2) * (micros / graph->accumulation); // as many for all
    r->fewer = may_end_early ? r->fewer : 0;
    r->seed = seed;
    r->config = *config;
    for (uint32_t k = 0; k < ranks; ++k) {
        r->graph[k] = *graph;
        r->graph[k].accumulation = micros;
        r->seen[k] = (snapshot *)meeting_shared(sizeof(snapshot));
        assert_non_null(r->seen[k]);
    }
    tc_open(&r->world, ranks);
    return r;
}

/* Whether no rank has failed. */
static bool run_all(run *r) {
    bool fine = tc_run(&r->world, work, r);
    for (uint32_t k = 0; k < r->ranks; ++k) {
        if (r->failure[k][0] && !r->left_out) {
            print_error("seed %llu: rank %u of %u: %s\n", (unsigned long long)r->graph->seed,
                        (unsigned)k, (unsigned)r->ranks, r->failure[k]);
        }
        fine = fine && r->failure[k][0] == 0;
    }
    for (int kind = 0; kind < TC_KIND_COUNT; ++kind) {
        r->calls[kind] = r->world.ranks[0].calls_of[kind];
    }
    tc_close(&r->world);
    return fine;
}

static run *run_ranks(const rd_graph *graph, place on, uint32_t ranks, uint32_t micros,
                      uint64_t seed, const ms_config *config, bool halves) {
    run *r = run_new(graph, on, ranks, micros, seed, config, halves);
    assert_true(run_all(r));
    return r;
}

static void run_free(run *r) {
    for (uint32_t k = 0; k < r->ranks; ++k) {
        munmap(r->seen[k], sizeof(snapshot));
    }
    free(r->graph);
    munmap(r, sizeof *r);
}

static void assert_same(const rd_graph *g, const snapshot *a, const snapshot *b, const char *of) {
    assert_int_equal(a->count, b->count);
    for (uint32_t i = 0, first = 0; i < a->count; first = a->end[i++]) {
        assert_int_equal(a->end[i], b->end[i]);
        if (memcmp(a->data + first, b->data + first, a->end[i] - first) != 0) {
            rd_print(g);
            fail_msg("seed %llu: %s %u (item %u) differs between %s", (unsigned long long)g->seed,
                     a->what[i], (unsigned)a->value[i], (unsigned)i, of);
        }
    }
}

/* A fifth of the graphs has values in 16 bits. */
static rd_graph *graph_for_ranks(uint64_t seed) {
    rd_graph *g = rd_generate(seed);
    for (uint32_t i = 0; i < g->value_count; ++i) {
        rd_value *v = &g->value[i];
        if (v->role == RD_PARAM && v->rank == 2 && v->axes == 0 && seed % 4 != 0) {
            v->cols = RD_ELEMENTS / v->rows - (int64_t)(seed % 3); // all ranks have some of it
        }
    }
    if (seed % 5 == 2) {
        rd_random_dtypes(g, seed + 99);
    }
    return g;
}

/* Whether numbers of ranks can be compared with those of one rank that accumulates: no layer has a
   state, which several ranks have each for itself, and small differences of gradients stay small. */
static bool is_comparable(const rd_graph *g) {
    bool fine = g->group_count == 0 && (g->optimizer.kind == MS_OPTIMIZER_SGD ||
                                        g->optimizer.kind == MS_OPTIMIZER_NESTEROV);
    for (uint32_t i = 0; i < g->value_count; ++i) {
        fine = fine && !g->value[i].is_state && !g->value[i].borrowed_gradient;
    }
    return fine;
}

/* Equal up to the rounding of sums in another order. */
static void assert_close(const rd_graph *g, const snapshot *a, const snapshot *b) {
    assert_int_equal(a->count, b->count);
    for (uint32_t i = 0, first = 0; i < a->count; first = a->end[i++]) {
        double most = 0.0, difference = 0.0;
        if (g->value[a->value[i]].dtype != MS_DTYPE_F32) {
            continue;
        }
        for (uint32_t at = first; at < a->end[i]; at += sizeof(float)) {
            float x, y;
            memcpy(&x, a->data + at, sizeof x);
            memcpy(&y, b->data + at, sizeof y);
            most = fmax(most, fabs((double)x));
            difference = fmax(difference, fabs((double)x - (double)y));
        }
        if (!(difference <= 1e-3 * most + 1e-6)) {
            rd_print(g);
            fail_msg("seed %llu: %s %u of ranks is off by %g of %g", (unsigned long long)g->seed,
                     a->what[i], (unsigned)a->value[i], difference, most);
        }
    }
}

static void test_random_graphs(void **state) {
    (void)state;
    const uint32_t count =
        (uint32_t)t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
    uint64_t calls[TC_KIND_COUNT] = {0};
    uint64_t along = 0;    // gradients that NCCL summed along with others
    uint32_t compared = 0; // with one rank
    for (uint32_t k = 0; k < count; ++k) {
        const uint64_t seed = t_environment("MEMSCALE_TEST_SEED", 1) + k;
        rd_graph *g = ld_make_late(graph_for_ranks(seed), NULL);
        ms_config config = t_config();
        const bool halves = seed % 5 == 2;
        config.master_weights = seed % 3 == 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        if (halves && t_is_built_in((int)g->optimizer.kind) && seed % 8 == 3) {
            config.mixed_dtype = MS_DTYPE_F16;
            config.early_update = MS_SWITCH_OFF;
            config.loss_scaling.initial = 4096.0f;
        }
        const uint32_t ranks = 2 + (uint32_t)(seed % 3), micros = g->accumulation;
        run *plain = run_ranks(g, ON_CPU, ranks, micros, 0, &config, halves);
        for (uint32_t r = 1; r < ranks; ++r) {
            assert_same(g, plain->seen[0], plain->seen[r], "ranks");
            assert_memory_equal(plain->losses[0], plain->losses[r], sizeof plain->losses[0]);
        }
        if (!halves && is_comparable(g)) {
            run *alone = run_ranks(g, ON_CPU, 1, ranks * micros, 0, &config, false);
            assert_close(g, plain->seen[0], alone->seen[0]);
            compared++;
            run_free(alone);
        }
        config.force_optimize = seed % 4 == 3;
        config.debug = seed % 7 == 3;
        run *sharded = run_ranks(g, ON_CPU, ranks, micros, seed + 1, &config, halves);
        for (uint32_t r = 1; r < ranks; ++r) {
            assert_same(g, sharded->seen[0], sharded->seen[r], "ranks with shards");
        }
        if (micros == 1) {
            assert_same(g, plain->seen[0], sharded->seen[0], "whole params and shards");
        } else if (!halves && is_comparable(g)) {
            assert_close(g, plain->seen[0], sharded->seen[0]);
        }
        for (int at = ON_LATE; at < PLACES; ++at) {
            run *late = run_ranks(g, (place)at, ranks, micros, seed + 1, &config, halves);
            for (uint32_t r = 0; r < ranks; ++r) {
                assert_same(g, sharded->seen[0], late->seen[r], "streams at once and late");
            }
            along += at > ON_LATE ? late->along : 0;
            run_free(late);
        }
        for (int kind = 0; kind < TC_KIND_COUNT; ++kind) {
            calls[kind] += sharded->calls[kind];
        }
        run_free(plain);
        run_free(sharded);
        free(g);
    }
    assert_true(compared > 0 || count < 40);
    assert_true(along > 0 || PLACES <= ON_LATE + 1 || count < 40);
    print_message("compared with one rank: %u; gradients summed along with others: %llu\n",
                  (unsigned)compared, (unsigned long long)along);
    for (int kind = 0; kind < TC_KIND_COUNT; ++kind) {
        print_message("%s: %llu\n", meeting_kind_name((tc_kind)kind),
                      (unsigned long long)calls[kind]);
    }
}

#ifndef T_CUDA

// ------------------------------------------------------------------------------------------------
// events that are left out

static bool is_same(const run *a, const run *b) {
    bool is = memcmp(a->losses, b->losses, sizeof a->losses) == 0;
    for (uint32_t k = 0; k < a->ranks && is; ++k) {
        const snapshot *x = a->seen[k], *y = b->seen[k];
        is = x->used == y->used && memcmp(x->data, y->data, x->used) == 0;
    }
    return is;
}

/* Whether some order shows that rank 0, which has a part of every param, leaves an event out. */
static bool shows(const run *whole, uint32_t event) {
    enum { ORDERS = 40 };
    bool is_seen = false;
    for (uint64_t order = 0; order < ORDERS && !is_seen; ++order) {
        run *r = run_new(whole->graph, ON_LATE, whole->ranks, whole->micros, whole->seed,
                         &whole->config, whole->halves);
        r->order = order;
        r->left_out = event;
        r->world.keeps_differences = true;
        is_seen = !run_all(r) || !is_same(r, whole);
        run_free(r);
    }
    return is_seen;
}

/* Of all records and waits on the network's stream, and waits for it, each is left out once: those of
   votes all show, and many of a program do. (Others are for what a later vote orders as well, or for
   memory that holds the same bytes already; every_wait_matters of test_offload.c reasons about all.) */
static void each_event_of_the_network_matters(void **state) {
    (void)state;
    const uint32_t count = (uint32_t)t_environment("MEMSCALE_TEST_DAGS", t_sweep(2, 60));
    uint32_t events[2] = {0, 0}, needed[2] = {0, 0}, shown[2] = {0, 0};
    for (uint32_t k = 0; k < count; ++k) {
        const uint64_t seed = t_environment("MEMSCALE_TEST_SEED", 1) + k;
        rd_graph *g = ld_make_late(rd_generate(seed), NULL);
        ms_config config = t_config();
        may_end_early = false;
        run *whole = run_ranks(g, ON_LATE, 2, g->accumulation, seed + 1, &config, false);
        const bool trains = g->optimizer.kind != MS_OPTIMIZER_NONE;
        for (uint32_t event = 1; event <= whole->events && trains; ++event) {
            const bool of_vote = whole->is_of_vote[event], needs = whole->is_needed[event];
            const bool is_shown = needs && shows(whole, event);
            events[of_vote] += 1;
            needed[of_vote] += needs;
            shown[of_vote] += is_shown;
            if (of_vote && needs && !is_shown) {
                print_message("seed %llu: event %u of %u changes nothing\n",
                              (unsigned long long)seed, (unsigned)event, (unsigned)whole->events);
            }
        }
        run_free(whole);
        free(g);
    }
    for (int of_vote = 0; of_vote < 2; ++of_vote) {
        print_message("%u events of %s; %u order what nothing else does; %u showed when left out\n",
                      (unsigned)events[of_vote], of_vote ? "votes" : "programs",
                      (unsigned)needed[of_vote], (unsigned)shown[of_vote]);
    }
    assert_int_equal(shown[1], needed[1]);
    assert_true(10 * shown[0] >= 3 * needed[0]);
}

#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_graphs),
#ifndef T_CUDA
        cmocka_unit_test(each_event_of_the_network_matters),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
