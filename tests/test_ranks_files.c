/*  test_ranks_files.c - checkpoints of several ranks, which are threads of this process: a file has the
    same bytes whatever the number of ranks and what is divided among them, and is loaded by any number;
    runs go on from it; and when something fails on one rank, all are told, and the old file stays. On the
    CPU and on a device whose streams run in an adversarial order. MEMSCALE_TEST_DAGS sets how many graphs
    are run, MEMSCALE_TEST_SEED which is the first. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "virtual.h"
#include "late_dag.h"
#include "threads_comm.h"
#include <sys/stat.h>

enum { QUICK_GRAPHS = 30, GRAPHS = 600, MOST_RANKS = 4, ROOM = 1 << 19 };

// ------------------------------------------------------------------------------------------------
// files in memory, as large as they need to be

typedef struct file {
    uint8_t *data;
    size_t bytes, room, writes, reads, fails_at;
} file;

static int file_write(void *user, const void *data, size_t bytes) {
    file *f = (file *)user;
    if (++f->writes == f->fails_at) {
        return 1;
    }
    if (f->bytes + bytes > f->room) {
        f->room = 2 * (f->bytes + bytes);
        f->data = (uint8_t *)realloc(f->data, f->room);
    }
    memcpy(f->data + f->bytes, data, bytes);
    f->bytes += bytes;
    return 0;
}

static int file_read(void *user, uint64_t offset, void *data, size_t bytes) {
    file *f = (file *)user;
    f->reads += 1;
    if (offset > f->bytes || bytes > f->bytes - offset || f->reads == f->fails_at) {
        return 1;
    }
    memcpy(data, f->data + offset, bytes);
    return 0;
}

static void file_begin(file *f) {
    f->bytes = f->writes = f->reads = f->fails_at = 0;
}

static void file_free(file *f) {
    free(f->data);
    memset(f, 0, sizeof *f);
}

static ms_result save_to(ms_model *m, file *f) {
    const ms_sink sink = {file_write, f};
    return ms_save(m, &sink);
}

/* Each rank reads by itself. */
static ms_result load_from(ms_model *m, const file *f, uint64_t fails_at,
                           const ms_load_options *options) {
    file own = *f;
    own.reads = 0;
    own.fails_at = (size_t)fails_at;
    const ms_source source = {file_read, &own, own.bytes};
    return ms_load(m, &source, options);
}

static void assert_same_file(const file *a, const file *b, const char *what, uint64_t seed) {
    size_t at = 0;
    while (at < a->bytes && at < b->bytes && a->data[at] == b->data[at]) {
        ++at;
    }
    if (at < a->bytes || at < b->bytes) {
        fail_msg("seed %llu: files of %llu and %llu bytes differ from byte %llu on: %s",
                 (unsigned long long)seed, (unsigned long long)a->bytes,
                 (unsigned long long)b->bytes, (unsigned long long)at, what);
    }
}

// ------------------------------------------------------------------------------------------------
// random graphs

typedef struct snapshot {
    uint32_t used, count;
    uint32_t end[4096]; // of each item
    unsigned char data[ROOM];
} snapshot;

/* One run of some ranks: from first values or a file, some steps, a file, more steps. */
typedef struct job {
    rd_graph *graph; // of each rank, a copy
    uint32_t ranks, first, before, after;
    uint64_t seed; // of what is forced; 0: nothing is
    bool halves, late;
    const file *from;
    file *to;
    ms_config config;
    snapshot *saved[MOST_RANKS], *ended[MOST_RANKS];
    char failure[MOST_RANKS][RD_TEXT];
    uint64_t extra[MOST_RANKS];
    uint64_t buffers[RD_VALUES][RD_ELEMENTS]; // of rank 0
    tc_world world;
} job;

static bool is_ok(rd_net *n, ms_result result, const char *call) {
    return result == MS_RESULT_OK ||
           rd_fail(&n->run, "%s: %s: %s", call, ms_result_name(result), ms_last_error(n->model));
}

static bool see(snapshot *s, rd_net *n, uint32_t value, ms_tensor tensor) {
    const uint64_t bytes = rd_bytes(&n->run.graph->value[value], n->run.size);
    if (s->used + bytes > ROOM || s->count == 4096) {
        return rd_fail(&n->run, "no room");
    }
    memset(s->data + s->used, 0, (size_t)bytes);
    const ms_result result = ms_read(n->model, tensor, s->data + s->used);
    s->used += (uint32_t)bytes;
    s->end[s->count++] = s->used;
    return result == MS_RESULT_ORDER || is_ok(n, result, "ms_read");
}

static bool see_params(snapshot *s, rd_net *n) {
    const rd_graph *g = n->run.graph;
    bool fine = true;
    s->used = s->count = 0;
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        const rd_value *v = &g->value[i];
        if (v->role != RD_PARAM) {
            continue;
        }
        fine = see(s, n, i, n->handle[i]);
        for (uint32_t k = 0; k < rd_state_count(g, i) && !v->frozen && fine; ++k) {
            fine = see(s, n, i, ms_optimizer_state(n->model, n->handle[i], (int)k));
        }
    }
    return fine;
}

static bool train(job *j, uint32_t rank, rd_net *n, uint32_t first, uint32_t steps) {
    const rd_graph *g = n->run.graph;
    const uint32_t micros = g->accumulation ? g->accumulation : 1;
    uint64_t data[RD_ELEMENTS];
    bool fine = true;
    for (uint32_t step = first; step < first + steps && fine; ++step) {
        n->run.step = step;
        for (uint32_t micro = 0; micro < micros && fine; ++micro) {
            double loss;
            n->run.micro = micro;
            for (uint32_t i = 0; i < g->layer_count; ++i) {
                n->run.op[i].forwards = n->run.op[i].backwards = n->run.op[i].recomputes = 0;
            }
            fine = rd_net_vary(n, 1 + step);
            for (uint32_t i = 0; i < g->value_count && fine; ++i) {
                if (g->value[i].role == RD_INPUT) {
                    rd_initial(g, i, n->run.size, 1 + (step * micros + micro) * j->ranks + rank,
                               data);
                    fine = is_ok(n, ms_write(n->model, n->handle[i], data), "ms_write");
                }
            }
            fine = fine && is_ok(n, ms_step(n->model, &loss), "ms_step") &&
                   is_ok(n, ms_synchronize(n->model), "ms_synchronize");
        }
    }
    return fine;
}

/* Gives all ranks the buffers of the first, as a load does. */
static bool share_buffers(job *j, uint32_t rank, rd_net *n) {
    const rd_graph *g = n->run.graph;
    double none = 0.0;
    bool fine = true;
    for (int turn = 0; turn < 2; ++turn) {
        for (uint32_t i = 0; i < g->value_count && fine; ++i) {
            if (g->value[i].role == RD_BUFFER && (rank == 0) == (turn == 0)) {
                fine = is_ok(n,
                             turn == 0 ? ms_read(n->model, n->handle[i], j->buffers[i])
                                       : ms_write(n->model, n->handle[i], j->buffers[i]),
                             "a buffer");
            }
        }
        fine = fine && is_ok(n, ms_sum_over_ranks(n->model, &none, 1), "ms_sum_over_ranks");
    }
    return fine;
}

static void *work(uint32_t rank, void *argument) {
    job *j = (job *)argument;
    ms_config config = j->config;
    v_device *device = (v_device *)calloc(1, sizeof *device);
    v_layer *layers = (v_layer *)calloc(RD_LAYERS, sizeof *layers);
    const file *from = j->from;
    if (j->ranks > 1) {
        config.comm = j->world.ranks[rank].comm;
        config.comm_timeout = 20.0;
    }
    j->graph[rank].move = NULL;
    if (j->late) {
        v_open(device, j->graph->seed * MOST_RANKS + rank);
        config.backend = v_backend(device);
        j->graph[rank].move = ld_move;
        j->graph[rank].mover = layers;
    }
    rd_net *n = rd_rank_net(&j->graph[rank], &config, j->failure[rank], j->halves, j->seed, false);
    ms_result result = ms_wrap(n->model);
    if (result == MS_RESULT_INVALID && j->seed) { // what cannot be forced
        rd_net_destroy(n);
        n = rd_rank_net(&j->graph[rank], &config, j->failure[rank], j->halves, 0, false);
        result = ms_wrap(n->model);
    }
    j->extra[rank] = 1000 + rank;
    bool fine =
        is_ok(n, result, "ms_wrap") &&
        is_ok(n, ms_save_extra(n->model, "position", &j->extra[rank], 8), "ms_save_extra") &&
        (from && j->graph->seed % 2 ? true : rd_net_write(n, 0, false));
    if (fine && from) {
        fine = is_ok(n, load_from(n->model, from, 0, NULL), "ms_load") &&
               (j->extra[rank] == 1000 || rd_fail(&n->run, "the extra is not that of rank 0"));
    }
    fine = fine && train(j, rank, n, j->first, j->before);
    fine = fine && (!j->saved[rank] || see_params(j->saved[rank], n));
    if (fine && j->to) {
        const ms_sink none = {NULL, NULL};
        fine = is_ok(
            n, rank == 0 ? save_to(n->model, j->to) : ms_save(n->model, rank % 2 ? NULL : &none),
            "ms_save");
        fine = fine && (j->ranks < 2 || share_buffers(j, rank, n));
    }
    fine = fine && train(j, rank, n, j->first + j->before, j->after);
    fine = fine && (!j->ended[rank] || see_params(j->ended[rank], n));
    if (!fine && config.comm.abort) {
        config.comm.abort(config.comm.user);
    }
    rd_net_destroy(n);
    if (j->late) {
        v_close(device);
    }
    free(layers);
    free(device);
    return NULL;
}

/* What is not set is 0. */
static job *job_new(const rd_graph *graph, const ms_config *config, uint32_t ranks, uint64_t seed,
                    bool halves, bool late) {
    job *j = (job *)calloc(1, sizeof *j);
    assert_non_null(j);
    j->graph = (rd_graph *)malloc(ranks * sizeof *j->graph);
    for (uint32_t k = 0; k < ranks; ++k) {
        j->graph[k] = *graph;
    }
    j->ranks = ranks;
    j->seed = seed;
    j->config = *config;
    j->halves = halves;
    j->late = late;
    return j;
}

static void job_run(job *j) {
    uint32_t failures = 0;
    for (uint32_t k = 0; k < j->ranks; ++k) {
        j->saved[k] = (snapshot *)calloc(1, sizeof(snapshot));
        j->ended[k] = (snapshot *)calloc(1, sizeof(snapshot));
    }
    if (j->ranks == 1) {
        work(0, j);
    } else {
        tc_open(&j->world, j->ranks);
        j->world.forks = false;
        assert_true(tc_run(&j->world, work, j));
        tc_close(&j->world);
    }
    for (uint32_t k = 0; k < j->ranks; ++k) {
        if (j->failure[k][0]) {
            print_error("seed %llu: rank %u of %u: %s\n", (unsigned long long)j->graph->seed,
                        (unsigned)k, (unsigned)j->ranks, j->failure[k]);
        }
        failures += j->failure[k][0] != 0;
    }
    assert_int_equal(failures, 0);
}

static void job_free(job *j) {
    for (uint32_t k = 0; k < j->ranks; ++k) {
        free(j->saved[k]);
        free(j->ended[k]);
    }
    free(j->graph);
    free(j);
}

static void assert_same(uint64_t seed, const snapshot *a, const snapshot *b, const char *of) {
    assert_int_equal(a->count, b->count);
    for (uint32_t i = 0, first = 0; i < a->count; first = a->end[i++]) {
        assert_int_equal(a->end[i], b->end[i]);
        if (memcmp(a->data + first, b->data + first, a->end[i] - first) != 0) {
            fail_msg("seed %llu: item %u of %u differs: %s", (unsigned long long)seed, (unsigned)i,
                     (unsigned)a->count, of);
        }
    }
}

/* A fifth of the graphs has values in 16 bits. */
static void random_graph(uint64_t seed) {
    rd_graph *g = ld_make_late(rd_generate(seed), NULL);
    ms_config config = t_config();
    const bool halves = seed % 5 == 2;
    const uint32_t ranks = 2 + (uint32_t)(seed % 3), micros = g->accumulation ? g->accumulation : 1;
    file saved, again;
    memset(&saved, 0, sizeof saved);
    memset(&again, 0, sizeof again);
    for (uint32_t i = 0; i < g->value_count; ++i) {
        rd_value *v = &g->value[i];
        if (v->role == RD_PARAM && v->rank == 2 && v->axes == 0 && seed % 4 != 0) {
            v->cols = RD_ELEMENTS / v->rows - (int64_t)(seed % 3); // all ranks have some of it
        }
    }
    if (halves) {
        rd_random_dtypes(g, seed + 99);
    }
    config.master_weights = seed % 3 == 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    if (halves && t_is_built_in((int)g->optimizer.kind) && seed % 8 == 3) {
        config.mixed_dtype = MS_DTYPE_F16;
        config.early_update = MS_SWITCH_OFF;
        config.loss_scaling.initial = 4096.0f;
    }
    job *whole = job_new(g, &config, ranks, seed + 1, halves, false); // not interrupted
    whole->before = whole->after = 2;
    whole->to = &saved;
    job_run(whole);
    job *on = job_new(g, &config, ranks, seed + 1, halves, seed % 2 == 0);
    on->from = &saved;
    on->first = on->after = 2;
    on->to = &again;
    job_run(on);
    assert_same_file(&saved, &again, "loaded and saved again", seed);
    for (uint32_t r = 0; r < ranks; ++r) {
        assert_same(seed, whole->saved[0], on->saved[r], "what is loaded");
        assert_same(seed, whole->ended[0], on->ended[r], "a run that goes on");
    }
    for (uint32_t other = 1; other <= MOST_RANKS; ++other) {
        job *last = NULL;
        for (uint64_t plan = 0; plan < 2; ++plan) {
            file_begin(&again);
            job *j = job_new(g, &config, other, plan ? seed + 7 : 0, halves, seed % 4 == plan);
            j->from = &saved;
            j->first = 2;
            j->after = 1;
            j->to = &again;
            job_run(j);
            if (!halves) { // or formats are others
                assert_same_file(&saved, &again, "saved by another number of ranks", seed);
            }
            for (uint32_t r = 0; r < other; ++r) {
                assert_same(seed, whole->saved[0], j->saved[r], "loaded by others");
                assert_same(seed, j->ended[0], j->ended[r], "other ranks");
            }
            if (last && micros == 1 && !halves) {
                assert_same(seed, last->ended[0], j->ended[0], "whole params and shards");
            }
            last ? job_free(last) : (void)0;
            last = j;
        }
        job_free(last);
    }
    job_free(whole);
    job_free(on);
    file_free(&saved);
    file_free(&again);
    free(g);
}

static void random_graphs(void **state) {
    (void)state;
    const uint32_t count =
        (uint32_t)t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
    for (uint32_t k = 0; k < count; ++k) {
        random_graph(t_environment("MEMSCALE_TEST_SEED", 1) + k);
    }
}

// ------------------------------------------------------------------------------------------------
// scenes: each rank has a chain, and plays the same script

enum { DEPTH = 2, ROWS = 4, RESULTS = 64 };

struct seat;

typedef struct scene {
    uint32_t ranks, victim;
    int64_t cols;
    bool coded, is_blank, keeps_aborts;
    bool lends; // device memory, in which other plans move what outlasts a step
    double timeout_s;
    uint64_t k; // what fails on the victim
    file saved, other;
    char folder[64], path[96];
    void (*script)(struct seat *s);
    ms_result results[MOST_RANKS];
    char failure[MOST_RANKS][RD_TEXT];
    uint64_t made; // calls that could have failed
    pthread_barrier_t barrier;
    tc_world world;
} scene;

typedef struct seat {
    scene *of;
    uint32_t rank;
    t_chain chain;
    ms_model *m;
    t_heap heap;
    uint64_t position;
    void *memory;
} seat;

enum { LENT_BYTES = 4 << 20 };

static bool has_text(const seat *s, const char *text) {
    return strstr(ms_last_error(s->m), text) != NULL;
}

static tc_rank *comm_of(seat *s) {
    return &s->of->world.ranks[s->rank];
}

/* All ranks come to here. */
static void meet(seat *s) {
    double none = 0.0;
    if (s->of->ranks > 1) {
        TC_CHECK_OK(s, ms_sum_over_ranks(s->m, &none, 1));
    }
}

static void seat_open(seat *s, uint32_t accumulation) {
    scene *of = s->of;
    ms_config config = t_config();
    config.allocator = t_heap_allocator(&s->heap);
    config.accumulation_steps = accumulation;
    if (of->lends) {
        s->memory = rd_alloc(LENT_BYTES);
        config.memory = s->memory;
        config.memory_bytes = LENT_BYTES;
    }
    if (of->ranks > 1) {
        config.comm = comm_of(s)->comm;
        config.comm_timeout = of->timeout_s > 0.0 ? of->timeout_s : 20.0;
    }
    (void)t_chain_create(&s->chain, &config, DEPTH, ROWS, of->cols);
    s->m = s->chain.model;
    for (int i = 0; i < DEPTH; ++i) {
        const ms_tensor w = s->chain.weight[i];
        ms_set_tensor_technique(s->m, i % 2 ? ms_optimizer_state(s->m, w, 0) : w,
                                MS_TECHNIQUE_SHARDING, MS_SWITCH_ON);
        if (of->coded) {
            ms_set_tensor_technique(s->m, w, MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_ON);
        }
    }
    s->position = 7 * s->rank;
    TC_CHECK_OK(s, ms_save_extra(s->m, "position", &s->position, sizeof s->position));
    TC_CHECK_OK(s, ms_wrap(s->m));
}

static void seat_step(seat *s) {
    double loss;
    const uint64_t count = (uint64_t)(ROWS * s->of->cols);
    float *x = (float *)malloc(count * sizeof *x);
    t_rng rng = t_seed(s->position * 31 + s->rank);
    t_fill(&rng, x, count, 1.0f);
    TC_CHECK_OK(s, ms_write(s->m, s->chain.x, x));
    TC_CHECK_OK(s, ms_step(s->m, &loss));
    free(x);
    s->position += 1;
}

static void seat_start(seat *s) {
    seat_open(s, 1);
    TC_CHECK_OK(s, t_chain_write(&s->chain, 7));
    seat_step(s);
    seat_step(s);
}

static ms_result seat_save(seat *s, file *f) {
    return s->rank == 0 ? save_to(s->m, f) : ms_save(s->m, NULL);
}

/* Whether what the ranks have would be in this file. */
static bool seat_is(seat *s, const file *f) {
    static file all[MOST_RANKS];
    file *own = &all[s->rank];
    file_begin(own);
    const bool ok = TC_CHECK_OK(s, seat_save(s, own));
    const bool same =
        s->rank > 0 || (own->bytes == f->bytes && memcmp(own->data, f->data, f->bytes) == 0);
    file_free(own);
    return ok && same;
}

static void *scene_work(uint32_t rank, void *argument) {
    seat *s = (seat *)calloc(1, sizeof *s);
    s->of = (scene *)argument;
    s->rank = rank;
    s->of->script(s);
    if (s->of->failure[rank][0] && s->of->ranks > 1) {
        comm_of(s)->comm.abort(comm_of(s));
    }
    ms_destroy(s->m);
    rd_free(s->memory);
    TC_CHECK(s, s->heap.live_count == 0 && s->heap.wrong_releases == 0);
    free(s);
    return NULL;
}

static void scene_play(scene *of, uint32_t ranks, void (*script)(seat *)) {
    of->ranks = ranks;
    of->script = script;
    of->cols = of->cols ? of->cols : 64;
    memset(of->failure, 0, sizeof of->failure);
    tc_open(&of->world, ranks);
    of->world.forks = false;
    of->world.keeps_aborts = of->keeps_aborts;
    pthread_barrier_init(&of->barrier, NULL, ranks);
    assert_true(tc_run(&of->world, scene_work, of));
    pthread_barrier_destroy(&of->barrier);
    tc_close(&of->world);
    for (uint32_t r = 0; r < ranks; ++r) {
        if (of->failure[r][0]) {
            fail_msg("rank %u of %u, victim %u, %llu: %s", (unsigned)r, (unsigned)ranks,
                     (unsigned)of->victim, (unsigned long long)of->k, of->failure[r]);
        }
    }
}

static scene *scene_new(void) {
    scene *of = (scene *)calloc(1, sizeof *of);
    assert_non_null(of);
    snprintf(of->folder, sizeof of->folder, "/tmp/test_ranks_files-%ld", (long)getpid());
    snprintf(of->path, sizeof of->path, "%s/run.safetensors", of->folder);
    mkdir(of->folder, 0700);
    return of;
}

static void scene_free(scene *of) {
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", of->folder);
    assert_int_equal(system(command), 0);
    file_free(&of->saved);
    file_free(&of->other);
    free(of);
}

// ------------------------------------------------------------------------------------------------
// shards of several pieces, and in codes

static void play_save(seat *s) {
    seat_start(s);
    TC_CHECK_OK(s, seat_save(s, &s->of->saved));
}

static void play_load_and_save(seat *s) {
    seat_open(s, 1);
    TC_CHECK_OK(s, load_from(s->m, &s->of->saved, 0, NULL));
    TC_CHECK(s, s->position == 2);
    TC_CHECK(s, seat_is(s, &s->of->saved));
}

/* State in another format, divided as it was. */
static void play_load_and_decode(seat *s) {
    const size_t count = (size_t)(s->of->cols * s->of->cols);
    float *before = (float *)malloc(count * sizeof(float));
    float *after = (float *)malloc(count * sizeof(float));
    play_load_and_save(s);
    for (int i = 0; i < DEPTH; ++i) {
        const ms_tensor w = s->chain.weight[i], state = ms_optimizer_state(s->m, w, i % 2);
        TC_CHECK_OK(s, ms_read(s->m, state, before));
        ms_set_tensor_technique(s->m, w, MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_OFF);
        TC_CHECK_OK(s, ms_wrap(s->m));
        TC_CHECK_OK(s, ms_read(s->m, state, after));
        TC_CHECK(s, memcmp(before, after, count * sizeof(float)) == 0);
    }
    free(before);
    free(after);
}

static void pieces_and_codes(void **state) {
    (void)state;
    static const int64_t cols[] = {128, 150, 1500}; // the last: several pieces
    for (uint32_t k = 0; k < 6; ++k) {
        for (uint32_t ranks = 2; ranks <= (k < 4 ? MOST_RANKS : 2); ++ranks) {
            scene *of = scene_new();
            of->coded = k % 2 == 0;
            of->cols = cols[k / 2];
            scene_play(of, ranks, play_save);
            for (uint32_t others = 1; others <= (k < 4 ? MOST_RANKS : 3); ++others) {
                scene_play(of, others, play_load_and_save);
            }
            for (uint32_t lends = 0; lends < 2 && of->coded; ++lends) {
                of->lends = lends > 0 && k < 4;
                scene_play(of, ranks, play_load_and_decode);
            }
            scene_free(of);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// what fails on one rank

static bool file_is(const char *path, const file *f) {
    file own;
    uint8_t block[4096];
    size_t bytes;
    FILE *at = fopen(path, "rb");
    memset(&own, 0, sizeof own);
    while (at && (bytes = fread(block, 1, sizeof block, at)) > 0) {
        (void)file_write(&own, block, bytes);
    }
    if (at) {
        fclose(at);
    }
    const bool same = own.bytes == f->bytes && memcmp(own.data, f->data, f->bytes) == 0;
    file_free(&own);
    return same;
}

static bool is_there(const char *path) {
    return access(path, F_OK) == 0;
}

/* A file is there; what one collective after the other does not do, all ranks are told. */
static void play_failing_collective(seat *s, bool saves) {
    scene *of = s->of;
    if (of->is_blank && !saves) {
        seat_open(s, 1);
    } else {
        seat_start(s);
    }
    if (saves) {
        TC_CHECK_OK(s, seat_save(s, s->rank == 0 ? &of->saved : NULL));
        TC_CHECK_OK(s, ms_save_file(s->m, s->rank == 0 ? of->path : NULL));
        seat_step(s);
        TC_CHECK_OK(s, seat_save(s, s->rank == 0 ? &of->other : NULL));
    }
    pthread_barrier_wait(&of->barrier); // an abort ends what others are still in
    const uint64_t calls = comm_of(s)->calls;
    if (s->rank == of->victim) {
        comm_of(s)->fail_at = calls + of->k;
    }
    const ms_result result =
        saves ? ms_save_file(s->m, of->path) : load_from(s->m, &of->saved, 0, NULL);
    of->results[s->rank] = result;
    if (s->rank == of->victim) {
        of->made = comm_of(s)->calls - calls;
        comm_of(s)->fail_at = 0;
    }
    if (result != MS_RESULT_OK) {
        double loss;
        TC_CHECK(s, result == MS_RESULT_RANKS && has_text(s, "rank"));
        TC_CHECK(s, ms_step(s->m, &loss) != MS_RESULT_OK);
    }
}

static void play_failing_save(seat *s) {
    play_failing_collective(s, true);
}

static void play_failing_load(seat *s) {
    play_failing_collective(s, false);
}

static void each_collective_fails(void **state) {
    (void)state;
    uint32_t told = 0;
    for (uint32_t turn = 0; turn < 3; ++turn) { // save, load into values, load into none
        for (uint32_t victim = 0; victim < 3; ++victim) {
            bool failed = true;
            for (uint64_t k = 1; failed; ++k) {
                scene *of = scene_new();
                char beside[128];
                snprintf(beside, sizeof beside, "%s.tmp", of->path);
                if (turn > 0) {
                    scene_play(of, 2, play_save);
                }
                of->victim = victim;
                of->k = k;
                of->is_blank = turn == 2;
                of->keeps_aborts = k % 4 == 0; // then the others find out by themselves
                of->timeout_s = of->keeps_aborts ? 0.5 : 20.0;
                scene_play(of, 3, turn == 0 ? play_failing_save : play_failing_load);
                failed = of->made >= k;
                told += failed;
                for (uint32_t r = 0; r < 3; ++r) {
                    assert_int_equal(of->results[r] != MS_RESULT_OK, failed);
                }
                if (turn == 0) { // in the last one all is done: which rank has not heard it?
                    const bool is_old = file_is(of->path, &of->saved);
                    assert_true(is_old || file_is(of->path, &of->other));
                    assert_true(is_old == (failed && of->made == k) || k + 3 > of->made);
                    assert_false(is_there(beside));
                }
                scene_free(of);
            }
        }
    }
    print_message("%u collectives failed\n", (unsigned)told);
}

/* The sink of rank 0, or the source of one, fails: all are told, nothing is lost, and they go on. */
static void play_failing_sink(seat *s) {
    scene *of = s->of;
    file own;
    memset(&own, 0, sizeof own);
    seat_start(s);
    TC_CHECK_OK(s, seat_save(s, s->rank == 0 ? &of->saved : NULL));
    ms_result result = MS_RESULT_FILE;
    for (uint64_t k = 1; result != MS_RESULT_OK && of->failure[s->rank][0] == 0; ++k) {
        file_begin(&own);
        own.fails_at = (size_t)k;
        result = seat_save(s, &own);
        TC_CHECK(s, result == MS_RESULT_OK ||
                        result == (s->rank == 0 ? MS_RESULT_FILE : MS_RESULT_RANKS));
        TC_CHECK(s, s->rank == 0 || result == MS_RESULT_OK || has_text(s, "failed on rank 0"));
        TC_CHECK(s, result != MS_RESULT_OK || k > 10);
        if (k % 4 == 0) {
            TC_CHECK(s, seat_is(s, &of->saved));
        }
    }
    TC_CHECK(s, ms_save_file(s->m, "/nowhere/at/all") ==
                    (s->rank == 0 ? MS_RESULT_FILE : MS_RESULT_RANKS));
    TC_CHECK(s, ms_save_file(s->m, of->folder) == // which cannot be replaced by a file
                    (s->rank == 0 ? MS_RESULT_FILE : MS_RESULT_RANKS));
    TC_CHECK(s, ms_save(s->m, NULL) == (s->rank == 0 ? MS_RESULT_INVALID : MS_RESULT_RANKS));
    seat_step(s);
    file_free(&own);
}

static void play_failing_source(seat *s) {
    scene *of = s->of;
    ms_result result = MS_RESULT_FILE;
    const bool is_victim = s->rank == of->victim;
    uint32_t failed = 0;
    seat_open(s, 1);
    for (uint64_t k = 1; result != MS_RESULT_OK && of->failure[s->rank][0] == 0; ++k) {
        double loss;
        result = load_from(s->m, &of->saved, is_victim ? k : 0, NULL);
        TC_CHECK(s, result == MS_RESULT_OK ||
                        result == (is_victim ? MS_RESULT_FILE : MS_RESULT_RANKS));
        TC_CHECK(s, result == MS_RESULT_OK || ms_step(s->m, &loss) == MS_RESULT_ORDER); // no values
    }
    result = MS_RESULT_FILE;
    for (uint64_t k = 1; result != MS_RESULT_OK && of->failure[s->rank][0] == 0; ++k) {
        seat_step(s);
        result = load_from(s->m, &of->saved, is_victim ? k : 0, NULL);
        if (result != MS_RESULT_OK && s->m->run.failed) {
            failed += 1;
            TC_CHECK_OK(s, load_from(s->m, &of->saved, 0, NULL));
        }
    }
    TC_CHECK(s, failed > 3);
    TC_CHECK(s, seat_is(s, &of->saved));
    TC_CHECK(s, ms_load(s->m, NULL, NULL) == MS_RESULT_INVALID);
    TC_CHECK(s, ms_load_file(s->m, of->path, NULL) == MS_RESULT_FILE);
    TC_CHECK_OK(s, ms_save_file(s->m, of->path));
    TC_CHECK(s, ms_load_file(s->m, is_victim ? "/nowhere" : of->path, NULL) ==
                    (is_victim ? MS_RESULT_FILE : MS_RESULT_RANKS));
    TC_CHECK_OK(s, ms_load_file(s->m, of->path, NULL));
    remove(of->path);
}

static void sinks_and_sources_fail(void **state) {
    (void)state;
    scene *of = scene_new();
    scene_play(of, 3, play_failing_sink);
    file_begin(&of->saved);
    scene_play(of, 2, play_save);
    for (of->victim = 0; of->victim < 3; ++of->victim) {
        scene_play(of, 3, play_failing_source);
    }
    scene_free(of);
}

static void play_failing_memory(seat *s, bool saves) {
    scene *of = s->of;
    if (saves) {
        seat_start(s);
    } else {
        seat_open(s, 1);
    }
    const bool is_victim = s->rank == of->victim;
    const uint64_t calls = s->heap.calls;
    s->heap.fail_at = is_victim ? calls + of->k : 0;
    ms_result result = saves ? seat_save(s, &of->other) : load_from(s->m, &of->saved, 0, NULL);
    s->heap.fail_at = 0;
    of->results[s->rank] = result;
    if (is_victim) {
        of->made = s->heap.calls - calls;
    }
    TC_CHECK(s, result == MS_RESULT_OK ||
                    result == (is_victim ? MS_RESULT_OUT_OF_MEMORY : MS_RESULT_RANKS));
    if (result != MS_RESULT_OK) { // nothing is lost
        file_begin(&of->other);
        meet(s);
        TC_CHECK_OK(s, saves ? seat_save(s, &of->other) : load_from(s->m, &of->saved, 0, NULL));
    }
    seat_step(s);
}

static void play_failing_memory_of_save(seat *s) {
    play_failing_memory(s, true);
}

static void play_failing_memory_of_load(seat *s) {
    play_failing_memory(s, false);
}

static void each_allocation_fails(void **state) {
    (void)state;
    scene *of = scene_new();
    scene_play(of, 3, play_save);
    for (uint32_t turn = 0; turn < 6; ++turn) {
        of->victim = turn % 3;
        bool failed = true;
        for (of->k = 1; failed; ++of->k) {
            scene_play(of, 3, turn < 3 ? play_failing_memory_of_save : play_failing_memory_of_load);
            failed = of->made >= of->k;
            for (uint32_t r = 0; r < 3; ++r) {
                assert_int_equal(of->results[r] != MS_RESULT_OK, failed);
            }
        }
        print_message("%s of rank %u: %u allocations failed\n", turn < 3 ? "save" : "load",
                      (unsigned)of->victim, (unsigned)of->k - 2);
        assert_true(of->k > 4);
    }
    scene_free(of);
}

// ------------------------------------------------------------------------------------------------
// folders, snapshots, and what is refused

static uint64_t position_in_newest(seat *s, const ms_checkpoints *folder) {
    bool found = false;
    s->position = 0;
    const ms_result result = ms_load_checkpoint(s->m, folder, NULL, &found);
    return result == MS_RESULT_OK && found ? s->position : 0;
}

static void play_folder(seat *s) {
    scene *of = s->of;
    const ms_checkpoints none = {NULL, 0}, folder = {of->folder, 2};
    const ms_checkpoints *to = s->rank == 0 ? &folder : &none;
    ms_snapshot *shot = NULL;
    char path[2][128];
    bool found = true;
    seat_start(s);
    for (int i = 0; i < 2; ++i) {
        snprintf(path[i], sizeof path[i], "%s/checkpoint-%d.safetensors", of->folder, i);
    }
    TC_CHECK_OK(s, ms_load_checkpoint(s->m, &folder, NULL, &found));
    TC_CHECK(s, !found);
    s->position = 10 + s->rank;
    TC_CHECK_OK(s, ms_save_checkpoint(s->m, to));
    s->position = 20 + s->rank;
    TC_CHECK_OK(s, ms_save_begin(s->m, to, &shot));
    s->position = 30;
    seat_step(s);
    TC_CHECK_OK(s, ms_snapshot_write_file(shot, NULL));
    TC_CHECK_OK(s, s->rank == 0 ? MS_RESULT_OK : ms_snapshot_write(shot, NULL));
    TC_CHECK(s, (shot->bytes > 0) == (s->rank == 0));
    ms_snapshot_free(shot);
    meet(s); // rank 0 has written it
    TC_CHECK(s, position_in_newest(s, &folder) == 20);
    meet(s);
    if (s->rank == 1) {
        TC_CHECK(s, truncate(path[1], 5000) == 0);
    }
    meet(s);
    TC_CHECK(s, position_in_newest(s, &folder) == 10);
    meet(s);
    if (s->rank == 1) {
        TC_CHECK(s, truncate(path[0], 5000) == 0);
    }
    meet(s);
    TC_CHECK(s, ms_load_checkpoint(s->m, &folder, NULL, &found) == MS_RESULT_FILE);
    /* One that has another folder, where there is less. */
    char own[128], copy[400];
    snprintf(own, sizeof own, "%s/own", of->folder);
    snprintf(copy, sizeof copy, "mkdir %s && cp %s %s", own, path[0], own);
    const ms_checkpoints less = {own, 2}, nowhere = {"/nowhere", 2};
    s->position = 40;
    TC_CHECK_OK(s, ms_save_checkpoint(s->m, to));
    s->position = 50;
    TC_CHECK_OK(s, ms_save_checkpoint(s->m, to));
    TC_CHECK(s, s->rank != 1 || system(copy) == 0);
    TC_CHECK(s, position_in_newest(s, s->rank == 1 ? &less : &folder) == 40);
    TC_CHECK(s, ms_load_checkpoint(s->m, s->rank == 1 ? &nowhere : &folder, NULL, &found) ==
                    (s->rank == 1 ? MS_RESULT_FILE : MS_RESULT_RANKS));
    TC_CHECK(s, ms_load_checkpoint(s->m, s->rank == 1 ? &none : &folder, NULL, &found) ==
                    (s->rank == 1 ? MS_RESULT_INVALID : MS_RESULT_RANKS));
    TC_CHECK(s, ms_save_checkpoint(s->m, &none) ==
                    (s->rank == 0 ? MS_RESULT_INVALID : MS_RESULT_RANKS));
    TC_CHECK(s, ms_save_begin(s->m, &none, &shot) ==
                    (s->rank == 0 ? MS_RESULT_INVALID : MS_RESULT_RANKS));
    TC_CHECK(s, shot == NULL);
}

static void folders_and_snapshots(void **state) {
    (void)state;
    scene *of = scene_new();
    scene_play(of, 3, play_folder);
    scene_free(of);
}

static void play_part_of_step(seat *s) {
    seat_open(s, 3);
    TC_CHECK_OK(s, t_chain_write(&s->chain, 7));
    seat_step(s);
    if (s->of->ranks == 1) {
        TC_CHECK_OK(s, seat_save(s, &s->of->saved));
        return;
    }
    TC_CHECK(s, ms_save(s->m, NULL) == (s->rank == 0 ? MS_RESULT_INVALID : MS_RESULT_ORDER) ||
                    s->rank == 0);
    TC_CHECK(s, seat_save(s, &s->of->other) == MS_RESULT_ORDER);
    TC_CHECK(s, has_text(s, "1 of 3 micro-batches") && has_text(s, "save after the last one"));
    seat_step(s);
    seat_step(s);
    TC_CHECK_OK(s, seat_save(s, &s->of->other));
    TC_CHECK(s, load_from(s->m, &s->of->saved, 0, NULL) == MS_RESULT_INVALID);
    TC_CHECK(s, has_text(s, "complete the step with one rank"));
    TC_CHECK(s, seat_is(s, &s->of->other));
}

static void play_other_files(seat *s) {
    ms_load_options options;
    memset(&options, 0, sizeof options);
    seat_open(s, 1);
    TC_CHECK(s, load_from(s->m, s->rank == 1 ? &s->of->other : &s->of->saved, 0, NULL) ==
                    MS_RESULT_RANKS);
    TC_CHECK(s, has_text(s, "rank 1 differs from rank 0; it has another file"));
    options.values_only = s->rank == 0;
    TC_CHECK(s, load_from(s->m, &s->of->saved, 0, &options) == MS_RESULT_RANKS);
    TC_CHECK_OK(s, load_from(s->m, &s->of->saved, 0, NULL));
    TC_CHECK(s, seat_is(s, &s->of->saved));
    options.values_only = true;
    TC_CHECK_OK(s, load_from(s->m, &s->of->other, 0, &options));
    seat_step(s);
}

static void what_is_refused(void **state) {
    (void)state;
    scene *of = scene_new();
    scene_play(of, 1, play_part_of_step);
    scene_play(of, 2, play_part_of_step);
    file_begin(&of->saved);
    scene_play(of, 2, play_save);
    file_begin(&of->other);
    (void)file_write(&of->other, of->saved.data, of->saved.bytes);
    file_begin(&of->saved);
    scene_play(of, 3, play_save); // other rows, so other values
    scene_play(of, 3, play_other_files);
    scene_free(of);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_graphs),         cmocka_unit_test(pieces_and_codes),
        cmocka_unit_test(each_collective_fails), cmocka_unit_test(sinks_and_sources_fail),
        cmocka_unit_test(each_allocation_fails), cmocka_unit_test(folders_and_snapshots),
        cmocka_unit_test(what_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
