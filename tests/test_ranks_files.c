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

/* What is divided among ranks, and what lies on the host. */
static void force(rd_net *n, uint64_t seed) {
    t_rng rng = t_seed(seed);
    const rd_graph *g = n->run.graph;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const uint64_t random = t_next(&rng);
        if (g->value[i].role != RD_PARAM || !rd_is_float(&g->value[i])) {
            continue;
        }
        const ms_tensor param = n->handle[i];
        const ms_tensor of[] = {param, ms_gradient(n->model, param),
                                rd_state_count(g, i) ? ms_optimizer_state(n->model, param, 0)
                                                     : param};
        if (random % 8 < 7) {
            ms_set_tensor_technique(n->model, of[random % 3], MS_TECHNIQUE_SHARDING, MS_SWITCH_ON);
        }
    }
    if (seed % 2 == 0) {
        rd_force_moves(n, &rng);
    }
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

static rd_net *make(job *j, uint32_t rank, const ms_config *config, bool forces) {
    rd_net *n = rd_net_create(&j->graph[rank], config, "rank", j->failure[rank], false);
    if (j->halves) {
        rd_force_half(n, j->graph[rank].seed);
    }
    if (forces) {
        force(n, j->seed);
    }
    return n;
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
    rd_net *n = make(j, rank, &config, j->seed > 0);
    ms_result result = ms_wrap(n->model);
    if (result == MS_RESULT_INVALID && j->seed) { // what cannot be forced
        rd_net_destroy(n);
        n = make(j, rank, &config, false);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_graphs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
