/*  test_ranks_calls.c - several ranks, each a thread, that call what docs/ranks.md lists beside ms_step:
    ms_read of gradients at every point of a step, slices, ms_suspend, ms_reshape, budgets, loans, shared
    arenas, plans in files and so on, with what belongs to params divided by force at each of the four
    levels, on the CPU. All ranks must have the same bits, and those of a run that only steps; or the
    gradients that models of one rank have, added up as docs/ranks.md says. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"
#include "toy_layers.h"
#include "threads_comm.h"

enum { ROWS = 4, X_COLS = 6, COLS = 10, OPS = 7, PARAMS = 4, LARGEST = COLS * COLS };
enum { FLOATS = X_COLS * COLS + COLS * COLS + 2 * COLS, STATES = 2, ALL = (1 + STATES) * FLOATS };
enum { MOST_RANKS = 3, LEVELS = 4, MOST_MICROS = 2, STEPS = 3, TEXT = 600 };

static const uint32_t counts[PARAMS] = {X_COLS * COLS, LARGEST, COLS, COLS};

// ------------------------------------------------------------------------------------------------
// a model: two products by the same square matrix, and params that are too small for all ranks

typedef struct toy {
    ms_model *m;
    t_op ops[OPS];
    ms_axis batch;
    int64_t rows;
    ms_tensor x, param[PARAMS];
} toy;

static ms_result toy_create(toy *n, const ms_config *config, int64_t rows, int64_t largest) {
    const ms_tensor none = {0};
    static const char *const names[PARAMS] = {"first", "square", "scale", "shift"};
    const ms_result result = ms_create(config, &n->m);
    ms_model *m = n->m;
    n->rows = rows;
    n->batch = ms_add_axis(m, "batch", rows, largest);
    n->x = ms_input(m, "x", MS_DTYPE_F32, ms_along(ms_shape2(rows, X_COLS), 0, n->batch));
    for (int i = 0; i < PARAMS; ++i) {
        const ms_shape shape = i < 2 ? ms_shape2(counts[i] / COLS, COLS) : ms_shape1(COLS);
        n->param[i] = ms_param(m, names[i], MS_DTYPE_F32, shape);
    }
    ms_tensor y = t_add_layer(m, &n->ops[0], T_MATMUL, "y0", n->x, n->param[0]);
    y = t_add_layer(m, &n->ops[1], T_SQUASH, "y1", y, none);
    y = t_add_layer(m, &n->ops[2], T_MATMUL, "y2", y, n->param[1]);
    y = t_add_layer(m, &n->ops[3], T_SQUASH, "y3", y, none);
    y = t_add_layer(m, &n->ops[4], T_MATMUL, "y4", y, n->param[1]);
    const ms_tensor z = ms_activation(m, "z", MS_DTYPE_F32, ms_tensor_shape(m, y));
    ms_layer_desc affine = t_layer(&n->ops[5], T_AFFINE, "affine", y, z);
    affine.param[0] = n->param[2];
    affine.param[1] = n->param[3];
    t_register(m, &n->ops[5], &affine);
    t_set_loss(m, &n->ops[6], T_LOSS, z);
    return result;
}

/* The first values of all params, or of a batch: number `number` among those of all ranks. */
static ms_result toy_write_params(const toy *n) {
    float values[LARGEST];
    t_rng rng = t_seed(5);
    ms_result result = MS_RESULT_OK;
    for (int i = 0; i < PARAMS && result == MS_RESULT_OK; ++i) {
        t_fill(&rng, values, counts[i], i < 2 ? 0.7f : 2.0f);
        result = ms_write(n->m, n->param[i], values);
    }
    return result;
}

static ms_result toy_feed(const toy *n, uint32_t number) {
    float x[ROWS * X_COLS];
    t_rng rng = t_seed(100 + number);
    t_fill(&rng, x, (uint64_t)n->rows * X_COLS, 1.0f);
    return ms_write(n->m, n->x, x);
}

/* Params, and then, if `states`, the optimizer's state. */
static ms_result toy_see(const toy *n, float *to, bool states) {
    ms_result result = MS_RESULT_OK;
    for (int k = -1; k < (states ? (int)STATES : 0); ++k) {
        for (int i = 0; i < PARAMS && result == MS_RESULT_OK; to += counts[i++]) {
            const ms_tensor t = k < 0 ? n->param[i] : ms_optimizer_state(n->m, n->param[i], k);
            result = t.id == 0 ? MS_RESULT_OK : ms_read(n->m, t, to);
        }
    }
    return result;
}

/* Gives back what toy_see has read. */
static ms_result toy_put(const toy *n, const float *from) {
    ms_result result = MS_RESULT_OK;
    for (int k = -1; k < (int)STATES; ++k) {
        for (int i = 0; i < PARAMS && result == MS_RESULT_OK; from += counts[i++]) {
            const ms_tensor t = k < 0 ? n->param[i] : ms_optimizer_state(n->m, n->param[i], k);
            result = t.id == 0 ? MS_RESULT_OK : ms_write(n->m, t, from);
        }
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// a run of some ranks, all of which follow a script

enum { MOST_POINTS = 2 + 2 * MOST_MICROS, GRADIENT_STEPS = 2 };

/* A gradient, read at some point of a step. */
typedef struct reading {
    ms_result result;
    bool has_address, is_same; // ms_data: not NULL, and what is there
    float values[LARGEST];
} reading;

struct seat;

typedef struct scene {
    /* To be set. */
    uint32_t ranks, micros, variant;
    int level;      // that is forced
    uint32_t whole; // mask of params for which nothing is forced
    ms_optimizer_kind kind;
    float clip_norm, momentum;
    double timeout_s;
    bool is_lost;    // ranks need not come to the end
    bool keeps_home; // gradients have a home on the host
    void (*alter)(struct seat *s, ms_config *config);
    void (*script)(struct seat *s);
    uint32_t stall_rank;
    uint64_t stall_at;
    /* What ranks have seen. */
    float ended[MOST_RANKS][ALL], before[GRADIENT_STEPS][FLOATS];
    double losses[MOST_RANKS][STEPS];
    reading gradients[MOST_RANKS][GRADIENT_STEPS][MOST_POINTS][PARAMS];
    float of_x[MOST_RANKS][MOST_MICROS][ROWS * X_COLS];
    ms_memory_report report[MOST_RANKS];
    ms_result results[MOST_RANKS][4];
    char texts[MOST_RANKS][4][TEXT];
    double took_s[MOST_RANKS];
    uint64_t calls_from[MOST_RANKS], calls_to[MOST_RANKS], slices[MOST_RANKS], counted;
    uint8_t *file;
    size_t file_bytes;
    char *plan_text;
    char failure[MOST_RANKS][TEXT];
    tc_world world;
} scene;

typedef struct seat {
    scene *of;
    uint32_t rank;
    toy toys[2], *n;
    ms_model *m; // n->m
    t_heap heap;
    double now_us, tick_us;
    ms_result (*pass)(struct seat *s, double *loss); // NULL: ms_step
    uint64_t slice_us;
    bool suspends;
    float lent[3][LARGEST], seen[ALL];
    ms_arena *arena;
} seat;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double tick(void *user) {
    seat *s = (seat *)user;
    return s->now_us += s->tick_us;
}

/* The handle that divides param i by force up to a level. */
static ms_tensor handle_for(const toy *n, int i, int level) {
    return level == 3   ? n->param[i]
           : level == 2 ? ms_gradient(n->m, n->param[i])
                        : ms_optimizer_state(n->m, n->param[i], 0);
}

static ms_config config_of(seat *s) {
    const scene *of = s->of;
    ms_config c = t_config();
    c.comm = of->world.ranks[s->rank].comm;
    c.comm_timeout = of->timeout_s > 0.0 ? of->timeout_s : 20.0;
    c.accumulation_steps = of->micros;
    c.allocator = t_heap_allocator(&s->heap);
    c.sharding = MS_SWITCH_OFF; // nothing but what is forced
    return c;
}

/* A model as far as registration, with what is forced. */
static void seat_create(seat *s, int64_t rows, int64_t largest) {
    scene *of = s->of;
    ms_config c = config_of(s);
    if (of->alter) {
        of->alter(s, &c);
    }
    (void)toy_create(s->n, &c, rows, largest);
    s->m = s->n->m;
    ms_optimizer_desc o = t_optimizer(of->kind, 0.01f);
    o.grad_clip_norm = of->clip_norm;
    o.momentum = of->momentum;
    ms_set_optimizer(s->m, &o);
    for (int i = 0; i < PARAMS; ++i) {
        if (of->level > 0 && (of->whole >> i & 1) == 0) {
            ms_set_tensor_technique(s->m, handle_for(s->n, i, of->level), MS_TECHNIQUE_SHARDING,
                                    MS_SWITCH_ON);
        }
        if (of->keeps_home) {
            ms_set_tensor_technique(s->m, ms_gradient(s->m, s->n->param[i]),
                                    MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        }
    }
}

static bool seat_start(seat *s) {
    seat_create(s, ROWS, ROWS);
    return TC_CHECK_OK(s, ms_wrap(s->m)) && TC_CHECK_OK(s, toy_write_params(s->n));
}

static ms_result seat_feed(seat *s, uint32_t step, uint32_t micro) {
    const scene *of = s->of;
    return toy_feed(s->n, (step * of->micros + micro) * of->ranks + s->rank);
}

static bool seat_step(seat *s, uint32_t step) {
    double loss = 0.0, sum = 0.0;
    bool fine = true;
    for (uint32_t micro = 0; micro < s->of->micros && fine; ++micro) {
        fine = TC_CHECK_OK(s, seat_feed(s, step, micro)) &&
               TC_CHECK_OK(s, s->pass ? s->pass(s, &loss) : ms_step(s->m, &loss));
        sum += loss;
    }
    s->of->losses[s->rank][step] = sum;
    return fine;
}

static void seat_end(seat *s) {
    scene *of = s->of;
    TC_CHECK_OK(s, toy_see(s->n, of->ended[s->rank], true));
    TC_CHECK_OK(s, ms_report(s->m, &of->report[s->rank]));
}

static void *work(uint32_t rank, void *argument) {
    seat *s = (seat *)calloc(1, sizeof *s);
    s->of = (scene *)argument;
    s->rank = rank;
    s->tick_us = 3.0;
    s->n = &s->toys[0];
    s->of->script(s);
    if (s->of->failure[rank][0] || s->of->is_lost) {
        s->of->world.ranks[rank].comm.abort(&s->of->world.ranks[rank]);
    }
    ms_destroy(s->m);
    TC_CHECK(s, s->heap.live_count == 0 && s->heap.wrong_releases == 0);
    free(s);
    return NULL;
}

static scene *scene_new(uint32_t ranks, uint32_t micros, int level, void (*script)(seat *)) {
    scene *of = (scene *)calloc(1, sizeof *of);
    assert_non_null(of);
    of->ranks = ranks;
    of->micros = micros;
    of->level = level;
    of->script = script;
    of->kind = MS_OPTIMIZER_ADAMW;
    return of;
}

static void scene_play(scene *of) {
    memset(of->failure, 0, sizeof of->failure);
    tc_open(&of->world, of->ranks);
    of->world.forks = false;
    of->world.keeps_differences = of->is_lost;
    of->world.ranks[of->stall_rank].stall_at = of->stall_at;
    of->world.ranks[of->stall_rank].stall_s = 0.01;
    assert_true(tc_run(&of->world, work, of));
    for (uint32_t r = 0; r < of->ranks; ++r) {
        if (of->failure[r][0]) {
            fail_msg("rank %u of %u, %u micro-batches, level %d, variant %u: %s", (unsigned)r,
                     (unsigned)of->ranks, (unsigned)of->micros, of->level, (unsigned)of->variant,
                     of->failure[r]);
        }
    }
    tc_close(&of->world);
}

static scene *scene_played(uint32_t ranks, uint32_t micros, int level, void (*script)(seat *)) {
    scene *of = scene_new(ranks, micros, level, script);
    scene_play(of);
    return of;
}

static void scene_free(scene *of) {
    free(of->file);
    free(of->plan_text);
    free(of);
}

/* Whether ranks have the same bits as each other and, unless that is NULL, as another run. */
static void assert_bits(const scene *of, const scene *other, const char *what) {
    for (uint32_t r = 0; r < of->ranks; ++r) {
        const float *expected = other ? other->ended[0] : of->ended[0];
        for (uint32_t i = 0; i < ALL; ++i) {
            if (memcmp(&of->ended[r][i], &expected[i], sizeof(float)) != 0) {
                fail_msg("%s: rank %u of %u, %u micro-batches, level %d, variant %u: element %u "
                         "is %.9g, not %.9g",
                         what, (unsigned)r, (unsigned)of->ranks, (unsigned)of->micros, of->level,
                         (unsigned)of->variant, (unsigned)i, (double)of->ended[r][i],
                         (double)expected[i]);
            }
        }
        if (memcmp(of->losses[r], (other ? other : of)->losses[0], sizeof of->losses[0]) != 0) {
            fail_msg("%s: rank %u of %u, level %d: losses differ", what, (unsigned)r,
                     (unsigned)of->ranks, of->level);
        }
    }
}

/* 2 and 3 ranks, 1 and 2 micro-batches, all levels: `number` from 0. By default tests with several
   variants of each run every third, which has all levels and both numbers. */
#define STRIDE (uint32_t) t_stride(3)
enum { SHAPES = 2 * MOST_MICROS * LEVELS };

static scene *scene_of_shape(uint32_t number, void (*script)(seat *)) {
    return scene_new(2 + number / LEVELS / MOST_MICROS, 1 + number / LEVELS % MOST_MICROS,
                     (int)(number % LEVELS), script);
}

static void play_steps(seat *s) {
    bool fine = seat_start(s);
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        fine = seat_step(s, step);
    }
    seat_end(s);
}

/* A run of the same ranks, micro-batches and level that only steps. */
static scene *plain_like(const scene *like) {
    scene *of = scene_new(like->ranks, like->micros, like->level, play_steps);
    of->whole = like->whole;
    of->kind = like->kind;
    of->momentum = like->momentum;
    of->clip_norm = like->clip_norm;
    scene_play(of);
    return of;
}

static void test_steps(void **state) {
    (void)state;
    for (uint32_t k = 0; k < SHAPES; ++k) {
        scene *of = scene_of_shape(k, play_steps);
        scene_play(of);
        scene *again = plain_like(of);
        assert_bits(of, NULL, "replicas");
        assert_bits(of, again, "run to run");
        scene_free(again);
        again = scene_played(of->ranks, of->micros, of->micros == 1 ? 0 : of->level / 2 * 2,
                             play_steps);
        assert_bits(of, again, "levels that add up in the same order");
        scene_free(again);
        scene_free(of);
    }
}

// ------------------------------------------------------------------------------------------------
// gradients of params

/* What gradients should be, by models of one rank. */
typedef struct sums {
    float own[MOST_RANKS][MOST_MICROS][FLOATS]; // of micro-batches so far, that accumulate
    float one[MOST_RANKS][MOST_MICROS][FLOATS]; // of each
    float of_x[MOST_RANKS][MOST_MICROS][ROWS * X_COLS];
    float first[MOST_MICROS][FLOATS];  // levels 0 and 1: micro-batches are added up first
    float second[MOST_MICROS][FLOATS]; // levels 2 and 3: ranks are
} sums;

/* Gradients of one rank, with the factor that the loss has on each of several. */
static void sums_of_rank(const scene *of, uint32_t rank, uint32_t step, const float *params,
                         bool accumulates, sums *to) {
    ms_config c = t_config();
    toy n;
    memset(&n, 0, sizeof n);
    c.accumulation_steps = accumulates ? of->micros : 1;
    assert_int_equal(toy_create(&n, &c, ROWS, ROWS), MS_RESULT_OK);
    const ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_NONE, 0.0f);
    ms_set_optimizer(n.m, &o);
    ms_want_gradient(n.m, n.x);
    ms_set_loss_factor(n.m, 1.0f / (float)(of->ranks * ROWS) / (float)of->micros);
    t_ok(n.m, ms_wrap(n.m));
    for (uint32_t i = 0, at = 0; i < PARAMS; at += counts[i++]) {
        t_ok(n.m, ms_write(n.m, n.param[i], params + at));
    }
    for (uint32_t micro = 0; micro < of->micros; ++micro) {
        float *gradients = accumulates ? to->own[rank][micro] : to->one[rank][micro];
        t_ok(n.m, toy_feed(&n, (step * of->micros + micro) * of->ranks + rank));
        t_ok(n.m, ms_forward(n.m, NULL));
        t_ok(n.m, ms_backward(n.m));
        for (uint32_t i = 0; i < PARAMS; gradients += counts[i++]) {
            t_ok(n.m, ms_read(n.m, ms_gradient(n.m, n.param[i]), gradients));
        }
        t_ok(n.m, ms_read(n.m, ms_gradient(n.m, n.x), to->of_x[rank][micro]));
    }
    ms_destroy(n.m);
}

static void add_up(const scene *of, uint32_t step, const float *params, sums *to) {
    for (uint32_t r = 0; r < of->ranks; ++r) {
        sums_of_rank(of, r, step, params, true, to);
        sums_of_rank(of, r, step, params, false, to);
    }
    for (uint32_t micro = 0; micro < of->micros; ++micro) {
        for (uint32_t i = 0; i < FLOATS; ++i) {
            float first = to->own[0][micro][i], second = to->one[0][micro][i];
            for (uint32_t r = 1; r < of->ranks; ++r) {
                first += to->own[r][micro][i];
                second += to->one[r][micro][i];
            }
            to->first[micro][i] = first;
            to->second[micro][i] = (micro > 0 ? to->second[micro - 1][i] : 0.0f) + second;
        }
    }
}

/* Points of a step: before it, after each ms_forward and ms_backward, after ms_update. */
static void read_gradients(seat *s, uint32_t step, uint32_t point) {
    for (int i = 0; i < PARAMS; ++i) {
        reading *to = &s->of->gradients[s->rank][step][point][i];
        const ms_tensor gradient = ms_gradient(s->m, s->n->param[i]);
        const void *address = ms_data(s->m, gradient);
        float there[LARGEST];
        if (address) { // before ms_read, which waits
            memcpy(there, address, counts[i] * sizeof(float));
        }
        to->result = ms_read(s->m, gradient, to->values);
        to->has_address = address != NULL;
        to->is_same = !address || memcmp(there, to->values, counts[i] * sizeof(float)) == 0;
    }
}

static void play_gradients(seat *s) {
    scene *of = s->of;
    double norm;
    bool fine = seat_start(s);
    of->calls_from[s->rank] = of->world.ranks[s->rank].calls;
    for (uint32_t step = 0; step < GRADIENT_STEPS && fine; ++step) {
        uint32_t point = 0;
        float params[FLOATS];
        fine = TC_CHECK_OK(s, toy_see(s->n, params, false));
        if (s->rank == 0) {
            memcpy(of->before[step], params, sizeof params);
        }
        read_gradients(s, step, point++);
        for (uint32_t micro = 0; micro < of->micros && fine; ++micro) {
            fine =
                TC_CHECK_OK(s, seat_feed(s, step, micro)) && TC_CHECK_OK(s, ms_forward(s->m, NULL));
            read_gradients(s, step, point++);
            fine = fine && TC_CHECK_OK(s, ms_backward(s->m));
            read_gradients(s, step, point++);
        }
        if (of->clip_norm > 0.0f) {
            TC_CHECK_OK(s, ms_gradient_norm(s->m, &norm));
        }
        fine = fine && TC_CHECK_OK(s, ms_update(s->m));
        read_gradients(s, step, point++);
    }
    of->calls_to[s->rank] = of->world.ranks[s->rank].calls;
    seat_end(s);
}

static const float no_gradient[FLOATS] = {0.0f};

/* What a rank should read at a point, from the first param on; NULL: ORDER. `sum` is of this step, and
   `last` of the one before. */
static const float *expected_at(const scene *of, uint32_t rank, uint32_t step, uint32_t point,
                                const sums *sum, const sums *last) {
    const uint32_t most = 2 * of->micros, done = point / 2; // micro-batches
    const bool before = point == 0, after = point == most + 1, settled = point == most;
    const bool home = of->keeps_home, divided = of->level > 1;
    const float(*of_ranks)[FLOATS] = divided ? sum->second : sum->first;
    const float *earlier = step == 0 ? no_gradient
                           : divided ? last->second[of->micros - 1]
                                     : last->first[of->micros - 1];
    if (of->micros == 1) {
        return settled ? sum->first[0] : NULL;
    }
    if (of->level == 1) {
        return settled ? sum->first[of->micros - 1] : NULL;
    }
    if (before) {
        return earlier;
    }
    if (point == 1) {
        return home ? earlier : no_gradient;
    }
    return settled || after || divided ? of_ranks[done - 1] : sum->own[rank][done - 1];
}

static void check_gradients(const scene *of, const sums *all) {
    for (uint32_t n = 0; n < of->ranks * GRADIENT_STEPS * (2 * of->micros + 2) * PARAMS; ++n) {
        const uint32_t i = n % PARAMS, point = n / PARAMS % (2 * of->micros + 2);
        const uint32_t step = n / PARAMS / (2 * of->micros + 2) % GRADIENT_STEPS;
        const uint32_t r = n / PARAMS / (2 * of->micros + 2) / GRADIENT_STEPS;
        const reading *is = &of->gradients[r][step][point][i];
        const float *expected = expected_at(of, r, step, point, &all[step], all);
        uint32_t first = 0;
        for (uint32_t k = 0; k < i; ++k) {
            first += counts[k];
        }
        uint32_t wrong = 0;
        while (expected && wrong < counts[i] &&
               memcmp(&is->values[wrong], &expected[first + wrong], sizeof(float)) == 0) {
            ++wrong;
        }
        const bool is_read = is->result == MS_RESULT_OK && wrong == counts[i] && is->is_same;
        const bool may_have_address = of->level == 0;
        if (!(expected ? is_read : is->result == MS_RESULT_ORDER) ||
            (is->has_address && (!may_have_address || !expected)) ||
            (!is->has_address && may_have_address && expected)) {
            fail_msg(
                "rank %u of %u, %u micro-batches, level %d%s, stall %llu of rank %u: step %u, "
                "point %u, param %u: %s, expected %s; element %u is %.9g, not %.9g; address %d",
                (unsigned)r, (unsigned)of->ranks, (unsigned)of->micros, of->level,
                of->keeps_home ? " at home" : "", (unsigned long long)of->stall_at,
                (unsigned)of->stall_rank, (unsigned)step, (unsigned)point, (unsigned)i,
                ms_result_name(is->result), expected ? "values" : "ORDER", (unsigned)wrong,
                (double)is->values[wrong % LARGEST],
                expected ? (double)expected[(first + wrong) % FLOATS] : 0.0, is->has_address);
        }
    }
}

static void check_all_gradients(const scene *of) {
    sums *all = (sums *)calloc(GRADIENT_STEPS, sizeof *all);
    assert_non_null(all);
    for (uint32_t step = 0; step < GRADIENT_STEPS; ++step) {
        add_up(of, step, of->before[step], &all[step]);
    }
    assert_bits(of, NULL, "replicas");
    check_gradients(of, all);
    free(all);
}

static void alter_debug(seat *s, ms_config *config) {
    (void)s;
    config->debug = true;
}

static void test_gradients(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 4 * SHAPES; ++k) {
        scene *of = scene_of_shape(k % SHAPES, play_gradients);
        of->keeps_home = k / SHAPES == 1;
        of->alter = k / SHAPES == 3 ? alter_debug : NULL;
        of->clip_norm = k / SHAPES == 2 ? 0.05f : 0.0f;
        scene_play(of);
        check_all_gradients(of);
        scene_free(of);
    }
}

/* Another rank is late for one collective after another: what has not come yet is not read. */
static void test_late_gradients(void **state) {
    (void)state;
    for (uint32_t k = 0; k < MOST_MICROS * LEVELS; k += STRIDE) {
        scene *of = scene_of_shape(k, play_gradients);
        of->clip_norm = k % 2 ? 0.0f : 0.05f; // all updates, and what they wait for, come late
        scene_play(of);
        const uint64_t end = of->calls_to[1];
        for (uint64_t at = of->calls_from[1] + 1 + k % 4; at <= end; at += 4) {
            of->stall_rank = 1;
            of->stall_at = at;
            scene_play(of);
            check_all_gradients(of);
        }
        scene_free(of);
    }
}

/* In callbacks of backward, while ranks exchange gradients of later layers. */
static int read_in_backward(const ms_call *call) {
    seat *s = (seat *)(void *)((char *)call->user - offsetof(seat, toys) - offsetof(toy, ops));
    float values[LARGEST];
    ms_call inner = *call;
    inner.user = &s->n->ops[0];
    for (int i = 1; i < PARAMS; ++i) {
        const ms_tensor gradient = ms_gradient(s->m, s->n->param[i]);
        const bool reads = s->of->level == 0 || s->of->level == 1;
        const ms_result result = reads ? ms_read(s->m, gradient, values) : MS_RESULT_ORDER;
        const bool is_own = s->of->micros == 2 && s->of->level == 0 && s->m->run.micro == 0;
        TC_CHECK(s, result == (is_own ? MS_RESULT_OK : MS_RESULT_ORDER));
    }
    return t_backward(&inner);
}

static void play_reads_in_callbacks(seat *s) {
    if (seat_start(s)) {
        s->m->graph.layers.items[0].backward = read_in_backward;
        for (uint32_t step = 0; step < STEPS; ++step) {
            seat_step(s, step);
        }
    }
    seat_end(s);
}

static void test_gradients_in_callbacks(void **state) {
    (void)state;
    for (uint32_t k = 0; k < SHAPES; k += STRIDE) {
        scene *of = scene_of_shape(k, play_reads_in_callbacks);
        scene_play(of);
        assert_bits(of, NULL, "replicas");
        scene_free(of);
    }
}

/* Gradients of an input are those of a rank's own batch. */
static void play_wanted(seat *s) {
    scene *of = s->of;
    seat_create(s, ROWS, ROWS);
    ms_want_gradient(s->m, s->n->x);
    bool fine = TC_CHECK_OK(s, ms_wrap(s->m)) && TC_CHECK_OK(s, toy_write_params(s->n));
    fine = fine && TC_CHECK_OK(s, toy_see(s->n, of->ended[s->rank], false));
    for (uint32_t micro = 0; micro < of->micros && fine; ++micro) {
        const ms_tensor gradient = ms_gradient(s->m, s->n->x);
        fine = TC_CHECK_OK(s, seat_feed(s, 0, micro));
        if (of->variant == 0) {
            fine =
                fine && TC_CHECK_OK(s, ms_forward(s->m, NULL)) && TC_CHECK_OK(s, ms_backward(s->m));
        } else {
            fine = fine && TC_CHECK_OK(s, ms_step(s->m, NULL));
        }
        fine = fine && TC_CHECK_OK(s, ms_read(s->m, gradient, of->of_x[s->rank][micro]));
        TC_CHECK(s, !fine || ms_data(s->m, gradient) != NULL);
    }
}

static void test_wanted_gradients(void **state) {
    (void)state;
    sums *all = (sums *)calloc(1, sizeof *all);
    assert_non_null(all);
    for (uint32_t k = 0; k < 2 * SHAPES; k += STRIDE) {
        scene *of = scene_of_shape(k % SHAPES, play_wanted);
        of->variant = k / SHAPES;
        scene_play(of);
        for (uint32_t r = 0; r < of->ranks; ++r) {
            sums_of_rank(of, r, 0, of->ended[0], true, all);
            assert_memory_equal(of->of_x[r], all->of_x[r], of->micros * sizeof of->of_x[r][0]);
        }
        scene_free(of);
    }
    free(all);
}

/* Without an optimizer each rank updates by what it reads, and all alike. */
static void play_own_updates(seat *s) {
    scene *of = s->of;
    bool fine = seat_start(s);
    for (uint32_t step = 0; step < GRADIENT_STEPS && fine; ++step) {
        float params[FLOATS], *at = params;
        fine = TC_CHECK_OK(s, toy_see(s->n, params, false));
        if (s->rank == 0) {
            memcpy(of->before[step], params, sizeof params);
        }
        for (uint32_t micro = 0; micro < of->micros && fine; ++micro) {
            fine = TC_CHECK_OK(s, seat_feed(s, step, micro));
            if (of->variant == 0) {
                fine = fine && TC_CHECK_OK(s, ms_forward(s->m, NULL)) &&
                       TC_CHECK_OK(s, ms_backward(s->m));
            } else {
                fine = fine && TC_CHECK_OK(s, ms_step(s->m, NULL));
            }
        }
        const uint32_t point = 2 * of->micros + (of->variant > 0);
        for (int k = 0; k < 2 && fine; ++k) { // also after ms_update
            fine = k == 0 || of->variant > 0 || TC_CHECK_OK(s, ms_update(s->m));
            read_gradients(s, step, point);
            for (int i = 0; i < PARAMS; ++i) {
                const reading *is = &of->gradients[s->rank][step][point][i];
                fine = fine && TC_CHECK(s, is->result == MS_RESULT_OK && is->is_same);
            }
        }
        for (int i = 0; i < PARAMS && fine; at += counts[i++]) {
            const reading *is = &of->gradients[s->rank][step][point][i];
            for (uint32_t e = 0; e < counts[i]; ++e) {
                at[e] -= 0.1f * is->values[e];
            }
        }
        fine = fine && TC_CHECK_OK(s, toy_put(s->n, params));
    }
    seat_end(s);
}

static void test_own_updates(void **state) {
    (void)state;
    sums *all = (sums *)calloc(1, sizeof *all);
    assert_non_null(all);
    for (uint32_t k = 0; k < 8 * MOST_MICROS; ++k) {
        scene *of = scene_new(2 + k % 2, 1 + k / 2 % 2, 0, play_own_updates);
        of->variant = k / 4 % 2;
        of->keeps_home = k / 8 % 2;
        of->kind = MS_OPTIMIZER_NONE;
        scene_play(of);
        assert_bits(of, NULL, "replicas");
        for (uint32_t step = 0; step < GRADIENT_STEPS; ++step) {
            add_up(of, step, of->before[step], all);
            for (uint32_t n = 0, first = 0; n < PARAMS; first += counts[n++]) {
                const uint32_t point = 2 * of->micros + (of->variant > 0);
                assert_memory_equal(of->gradients[1][step][point][n].values,
                                    &all->first[of->micros - 1][first], counts[n] * sizeof(float));
            }
        }
        scene_free(of);
    }
    free(all);
}

/* Steps that end after one micro-batch of two are those of one. */
static void play_early_ends(seat *s) {
    scene *of = s->of;
    bool fine = seat_start(s);
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        fine = TC_CHECK_OK(s, toy_feed(s->n, step * of->ranks + s->rank)) &&
               TC_CHECK_OK(s, ms_step(s->m, &of->losses[s->rank][step])) &&
               TC_CHECK_OK(s, ms_update(s->m));
        read_gradients(s, 0, 0);
        for (int i = 0; i < PARAMS && fine; ++i) {
            const reading *is = &of->gradients[s->rank][0][0][i];
            const bool waits = of->level == 1;
            TC_CHECK(s, is->result == (waits ? MS_RESULT_ORDER : MS_RESULT_OK) && is->is_same);
        }
    }
    seat_end(s);
}

static void test_early_ends(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 4 * LEVELS; ++k) {
        scene *of = scene_new(2 + k / LEVELS % 2, 2, (int)(k % LEVELS), play_early_ends);
        of->keeps_home = k / LEVELS / 2 > 0;
        scene_play(of);
        scene *plain = scene_played(of->ranks, 1, of->level, play_steps);
        assert_bits(of, plain, "steps that end early");
        for (uint32_t r = 1; r < of->ranks; ++r) {
            for (int i = 0; i < PARAMS; ++i) {
                assert_memory_equal(of->gradients[r][0][0][i].values,
                                    of->gradients[0][0][0][i].values, counts[i] * sizeof(float));
            }
        }
        scene_free(plain);
        scene_free(of);
    }
}

// ------------------------------------------------------------------------------------------------
// slices, and other calls between steps and slices

/* What is refused between slices, without a word to the other ranks; and what can be read. */
static void call_between_slices(seat *s) {
    const scene *of = s->of;
    double one = 1.0;
    float values[LARGEST];
    const int64_t size = ROWS;
    ms_snapshot *snapshot = NULL;
    const bool early = s->m->run.updates_done == 0;
    TC_CHECK(s, ms_sum_over_ranks(s->m, &one, 1) == MS_RESULT_ORDER && one == 1.0);
    for (int i = 0; i < PARAMS; ++i) {
        const ms_tensor param = s->n->param[i], state = ms_optimizer_state(s->m, param, 0);
        const bool reads[] = {early && of->level < 3, early && of->level < 1, false};
        const ms_tensor of_param[] = {param, state, ms_gradient(s->m, param)};
        for (int k = 0; k < 3; ++k) {
            const ms_result result = ms_read(s->m, of_param[k], values);
            TC_CHECK(s, result == (reads[k] ? MS_RESULT_OK : MS_RESULT_ORDER));
            TC_CHECK(s, reads[k] || ms_data(s->m, of_param[k]) == NULL);
        }
        TC_CHECK(s, ms_write(s->m, param, values) == MS_RESULT_ORDER);
    }
    TC_CHECK_OK(s, ms_read(s->m, s->n->x, values));
    TC_CHECK(s, ms_step(s->m, NULL) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_eval(s->m, NULL) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_forward(s->m, NULL) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_backward(s->m) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_update(s->m) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_gradient_norm(s->m, &one) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_wrap(s->m) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_detach(s->m) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_reshape(s->m, &size) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_set_step_count(s->m, 7) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_save_begin(s->m, NULL, &snapshot) == MS_RESULT_ORDER);
    ms_snapshot_free(snapshot);
}

enum { SLICES_ALONE, SLICES_WITH_CALLS, SLICES_SUSPEND_FIRST, SLICES_SUSPEND_ALL, SLICES_SOME };
enum { SLICE_VARIANTS = SLICES_SOME + 1 };

static ms_result pass_in_slices(seat *s, double *loss) {
    const scene *of = s->of;
    ms_result result = MS_RESULT_MORE;
    if (of->variant == SLICES_SOME && s->rank == 1) {
        return ms_step(s->m, loss);
    }
    while (result == MS_RESULT_MORE) {
        result = ms_step_slice(s->m, s->slice_us, loss);
        s->of->slices[s->rank] += 1;
        if (result != MS_RESULT_MORE) {
            break;
        }
        if (of->variant == SLICES_WITH_CALLS && s->of->slices[s->rank] % (2 + s->rank) == 0) {
            call_between_slices(s);
        }
        if (of->variant == SLICES_SUSPEND_ALL ||
            (of->variant == SLICES_SUSPEND_FIRST && s->rank == 0)) {
            const ms_result suspended = ms_suspend(s->m, NULL);
            TC_CHECK(s,
                     suspended == MS_RESULT_OK && ms_read(s->m, s->n->x, s->lent) != MS_RESULT_OK);
            TC_CHECK_OK(s, ms_resume(s->m));
        }
    }
    return result;
}

static void alter_clock(seat *s, ms_config *config) {
    config->clock = tick;
    config->clock_user = s;
}

static void play_slices(seat *s) {
    s->slice_us = 1 + 9 * s->rank;
    s->pass = pass_in_slices;
    play_steps(s);
}

static void test_slices(void **state) {
    (void)state;
    for (uint32_t k = 0; k < SHAPES; k += STRIDE) {
        scene *plain = scene_of_shape(k, play_steps);
        scene_play(plain);
        for (uint32_t n = 0; n < (plain->ranks == 2 ? SLICE_VARIANTS : 2); ++n) {
            const uint32_t variant = (n + k) % SLICE_VARIANTS;
            scene *of = scene_of_shape(k, play_slices);
            of->variant = variant;
            of->alter = alter_clock;
            scene_play(of);
            assert_bits(of, plain, "slices");
            assert_true(of->slices[0] > 3 * STEPS);
            scene_free(of);
        }
        scene_free(plain);
    }
}

enum { SUSPEND_FIRST, SUSPEND_ALL, SUSPEND_IN_STEPS, SUSPEND_VARIANTS };

static void suspend(seat *s, bool also) {
    if (also) {
        TC_CHECK_OK(s, ms_suspend(s->m, NULL));
        TC_CHECK(s, ms_step(s->m, NULL) == MS_RESULT_ORDER);
        TC_CHECK(s, ms_read(s->m, s->n->param[0], s->lent[0]) == MS_RESULT_ORDER);
        TC_CHECK_OK(s, ms_resume(s->m));
    }
}

static ms_result pass_suspended(seat *s, double *loss) {
    const uint32_t variant = s->of->variant;
    suspend(s, variant == SUSPEND_ALL || s->rank == 0);
    if (variant < SUSPEND_IN_STEPS) {
        return ms_step(s->m, loss);
    }
    ms_result result = ms_forward(s->m, loss);
    suspend(s, s->rank != 1);
    result = result == MS_RESULT_OK ? ms_backward(s->m) : result;
    suspend(s, s->rank == 0);
    return result == MS_RESULT_OK && s->m->run.progress == MSI_PROGRESS_BACKWARD ? ms_update(s->m)
                                                                                 : result;
}

static void play_suspended(seat *s) {
    s->pass = pass_suspended;
    play_steps(s);
}

static void test_suspended(void **state) {
    (void)state;
    for (uint32_t k = 0; k < SHAPES; k += STRIDE) {
        scene *plain = scene_of_shape(k, play_steps);
        scene_play(plain);
        for (uint32_t variant = 0; variant < SUSPEND_VARIANTS; ++variant) {
            scene *of = scene_of_shape(k, play_suspended);
            of->variant = variant;
            scene_play(of);
            assert_bits(of, plain, "suspended");
            scene_free(of);
        }
        scene_free(plain);
    }
}

/* Sizes of steps. By one model that is reshaped, or by a new one for each step, which goes on with the
   params and state of that before it. */
static const int64_t sizes[STEPS] = {2, ROWS, 3};

static void play_reshaped(seat *s) {
    bool fine = seat_start(s);
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        const int64_t *size = &sizes[step], one = 1;
        if (s->of->variant > 0) { // there and back
            fine = TC_CHECK_OK(s, ms_reshape(s->m, &one));
        }
        fine = fine && TC_CHECK_OK(s, ms_reshape(s->m, size));
        s->n->rows = *size;
        fine = fine && seat_step(s, step);
    }
    seat_end(s);
}

static void play_new_sizes(seat *s) {
    bool fine = true;
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        ms_destroy(s->m);
        memset(s->n, 0, sizeof *s->n);
        seat_create(s, sizes[step], sizes[step]);
        fine = TC_CHECK_OK(s, ms_wrap(s->m));
        fine = fine && TC_CHECK_OK(s, step == 0 ? toy_write_params(s->n)
                                                : toy_put(s->n, s->of->ended[s->rank]));
        fine = fine && seat_step(s, step);
        seat_end(s);
    }
}

static void test_reshaped(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 2 * SHAPES; k += STRIDE) {
        scene *of = scene_of_shape(k % SHAPES, play_reshaped);
        scene *fresh = scene_of_shape(k % SHAPES, play_new_sizes);
        of->variant = k / SHAPES;
        of->kind = fresh->kind = MS_OPTIMIZER_SGD; // whose numbers do not depend on the step's
        of->momentum = fresh->momentum = 0.9f;
        scene_play(of);
        scene_play(fresh);
        assert_bits(of, fresh, "sizes");
        scene_free(of);
        scene_free(fresh);
    }
}

/* Each rank has another budget in each step, or one that nothing fits. */
static void play_budgets(seat *s) {
    scene *of = s->of;
    uint64_t least = 0;
    ms_memory_report r;
    bool fine = seat_start(s) && TC_CHECK_OK(s, ms_smallest_budget(s->m, &least));
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        const uint64_t more[STEPS] = {0, 256, 4096};
        const uint64_t own = least + (s->rank == step % of->ranks ? more[step] : 1 << 16);
        if (of->variant > 0) {
            ms_set_budget(s->m, s->rank == of->ranks - 1 ? 100 : 1 << 20);
            TC_CHECK(s, ms_wrap(s->m) == MS_RESULT_BUDGET);
        }
        ms_set_budget(s->m, own);
        fine = TC_CHECK_OK(s, ms_wrap(s->m)) && TC_CHECK_OK(s, ms_report(s->m, &r));
        fine = fine && TC_CHECK(s, r.budget_bytes == least + more[step] && r.arena_bytes <= own);
        fine = fine && seat_step(s, step);
    }
    seat_end(s);
}

static void test_budgets(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 2 * SHAPES; k += STRIDE) {
        scene *of = scene_of_shape(k % SHAPES, play_budgets);
        of->variant = k / SHAPES;
        scene_play(of);
        scene *plain = plain_like(of);
        assert_bits(of, plain, "budgets");
        scene_free(plain);
        scene_free(of);
    }
}

// ------------------------------------------------------------------------------------------------
// memory of the trainer's, and a shared arena

enum { LOAN_VALUE, LOAN_GRADIENT, LOAN_STATE, LOANS };

/* Params 1 and 2 have something borrowed. */
static void play_loans(seat *s) {
    const uint32_t variant = s->of->variant;
    seat_create(s, ROWS, ROWS);
    for (int i = 1; i < 3; ++i) {
        const ms_tensor param = s->n->param[i];
        const ms_tensor lent[LOANS] = {param, ms_gradient(s->m, param),
                                       ms_optimizer_state(s->m, param, 0)};
        TC_CHECK_OK(s, ms_borrow(s->m, lent[variant], s->lent[i]));
    }
    bool fine = TC_CHECK_OK(s, ms_wrap(s->m)) && TC_CHECK_OK(s, toy_write_params(s->n));
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        if (variant == LOAN_GRADIENT) {
            memset(s->lent, 0, sizeof s->lent);
        }
        fine = seat_step(s, step);
    }
    seat_end(s);
    for (int i = 1, at = (int)counts[0]; i < 3; at += (int)counts[i++]) {
        const float *ended = &s->of->ended[s->rank][at + (variant == LOAN_STATE ? FLOATS : 0)];
        TC_CHECK(s, variant == LOAN_GRADIENT ||
                        memcmp(ended, s->lent[i], counts[i] * sizeof(float)) == 0);
    }
}

static void test_loans(void **state) {
    (void)state;
    for (uint32_t k = 0; k < (uint32_t)LOANS * (uint32_t)SHAPES; k += STRIDE) {
        scene *of = scene_of_shape(k % SHAPES, play_loans);
        of->variant = k / SHAPES;
        of->whole = of->variant % 2 == k % 2 ? 6 : 0; // forced or not: it stays whole
        scene_play(of);
        of->whole = 6;
        scene *plain = plain_like(of);
        assert_bits(of, plain, "loans");
        scene_free(plain);
        scene_free(of);
    }
}

static void play_borrowed_gradient(seat *s) {
    scene *of = s->of;
    float *at = of->ended[s->rank];
    seat_create(s, ROWS, ROWS);
    TC_CHECK_OK(s, ms_borrow(s->m, ms_gradient(s->m, s->n->param[1]), s->lent[1]));
    bool fine = TC_CHECK_OK(s, ms_wrap(s->m)) && TC_CHECK_OK(s, toy_write_params(s->n)) &&
                TC_CHECK_OK(s, toy_see(s->n, at, false));
    for (uint32_t micro = 0; micro < of->micros && fine; ++micro) {
        fine = TC_CHECK_OK(s, seat_feed(s, 0, micro)) && TC_CHECK_OK(s, ms_forward(s->m, NULL)) &&
               TC_CHECK_OK(s, ms_backward(s->m));
    }
    TC_CHECK_OK(s, ms_read(s->m, ms_gradient(s->m, s->n->param[1]), s->lent[0]));
    TC_CHECK(s, memcmp(s->lent[0], s->lent[1], sizeof s->lent[0]) == 0);
    memcpy(at + FLOATS, s->lent[1], sizeof s->lent[1]);
}

static void test_borrowed_gradients(void **state) {
    (void)state;
    sums *all = (sums *)calloc(1, sizeof *all);
    assert_non_null(all);
    for (uint32_t k = 0; k < SHAPES; ++k) {
        scene *of = scene_of_shape(k, play_borrowed_gradient);
        scene_play(of);
        add_up(of, 0, of->ended[0], all);
        for (uint32_t r = 0; r < of->ranks; ++r) {
            assert_memory_equal(&of->ended[r][FLOATS], &all->first[of->micros - 1][counts[0]],
                                counts[1] * sizeof(float));
        }
        scene_free(of);
    }
    free(all);
}

static void alter_arena(seat *s, ms_config *config) {
    config->arena = s->arena;
}

static void turn_to(seat *s, int k) {
    s->n = &s->toys[k];
    s->m = s->n->m;
}

/* Two models in turn; a further step of the first one is cut short by that of the second. */
static void play_arena(seat *s) {
    scene *of = s->of;
    ms_allocator allocator = t_heap_allocator(&s->heap);
    TC_CHECK_OK(s, ms_arena_create(NULL, &allocator, &s->arena));
    bool fine = seat_start(s);
    turn_to(s, 1);
    fine = seat_start(s) && fine;
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        turn_to(s, 0);
        fine = seat_step(s, step);
        if (of->variant > 0 && of->micros == 1 && fine) {
            fine = TC_CHECK_OK(s, toy_feed(s->n, 1000 + s->rank)) &&
                   TC_CHECK_OK(s, ms_forward(s->m, NULL)) &&
                   (step == 1 || TC_CHECK_OK(s, ms_backward(s->m)));
        }
        turn_to(s, 1);
        fine = fine && seat_step(s, step);
    }
    turn_to(s, 0);
    TC_CHECK(s, ms_read(s->m, ms_gradient(s->m, s->n->param[0]), s->lent[0]) ==
                    (of->micros == 2 && of->level != 1 ? MS_RESULT_OK : MS_RESULT_ORDER));
    TC_CHECK(s, ms_update(s->m) == MS_RESULT_ORDER);
    TC_CHECK(s, ms_step_slice(s->m, 100, NULL) ==
                    (of->ranks > 1 ? MS_RESULT_UNSUPPORTED : MS_RESULT_MORE));
    TC_CHECK_OK(s, toy_see(s->n, s->seen, true));
    turn_to(s, 1);
    seat_end(s);
    TC_CHECK(s, memcmp(of->ended[s->rank], s->seen, sizeof s->seen) == 0);
    ms_destroy(s->toys[0].m);
    ms_arena_destroy(s->arena);
}

static void test_arena(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 2 * SHAPES; k += STRIDE) {
        scene *of = scene_of_shape(k % SHAPES, play_arena);
        of->variant = k / SHAPES;
        of->alter = alter_arena;
        scene_play(of);
        scene *plain = plain_like(of);
        assert_bits(of, plain, "arena");
        scene_free(plain);
        scene_free(of);
    }
}

// ------------------------------------------------------------------------------------------------
// times, policies, plans in files

/* Clocks and budgets differ, and plans do not. */
static void alter_profiling(seat *s, ms_config *config) {
    s->tick_us = 1.0 + 20.0 * s->rank;
    alter_clock(s, config);
    config->empirical_profiling = MS_SWITCH_ON;
    config->warmup_steps = 1;
    config->mode = MS_MODE_AGGRESSIVE;
    config->mixed_precision = config->optimizer_8bit = MS_SWITCH_OFF;
}

static uint32_t last_strategy(const ms_policy_args *args) {
    seat *s = (seat *)args->user;
    const bool odd = s->of->variant == 2 && s->rank == 1;
    s->of->slices[s->rank] += 1;
    return odd ? 0 : args->strategy_count - 1;
}

static void alter_policy(seat *s, ms_config *config) {
    config->auto_policy = true;
    config->mixed_precision = config->optimizer_8bit = MS_SWITCH_OFF;
    if (s->of->variant > 0) {
        config->policy = last_strategy;
        config->policy_user = s;
    }
}

static void play_long(seat *s) {
    scene *of = s->of;
    bool fine = seat_start(s);
    uint64_t least = 0;
    fine = fine && TC_CHECK_OK(s, ms_smallest_budget(s->m, &least));
    ms_set_budget(s->m, least + 128 + 64 * s->rank);
    fine = fine && TC_CHECK_OK(s, ms_wrap(s->m));
    for (uint32_t step = 0; step < STEPS && fine; ++step) { // warm, timed, planned again
        fine = seat_step(s, step);
    }
    seat_end(s);
    TC_CHECK(s, of->alter != alter_profiling ||
                    of->report[s->rank].time_source == MS_TIME_SOURCE_MEASURED);
}

static void test_profiling(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 3 * SHAPES; k += STRIDE) {
        scene *of = scene_of_shape(k % SHAPES, play_long);
        of->variant = k / SHAPES == 2;
        of->alter = k / SHAPES == 0 ? alter_profiling : alter_policy;
        scene_play(of);
        scene *plain = plain_like(of);
        assert_bits(of, plain, "profiling and policies");
        for (uint32_t r = 0; r < of->ranks; ++r) {
            assert_true(of->report[r].plan_hash == of->report[0].plan_hash);
            assert_true(of->slices[r] == of->slices[0] && (of->slices[r] > 0) == (of->variant > 0));
        }
        scene_free(plain);
        scene_free(of);
    }
}

static void note(seat *s, int at, ms_result result) {
    s->of->results[s->rank][at] = result;
    snprintf(s->of->texts[s->rank][at], TEXT, "%s", ms_last_error(s->m));
}

/* Ranks whose policies choose otherwise. */
static void play_wrap(seat *s) {
    seat_create(s, ROWS, ROWS);
    ms_set_budget(s->m, 1 << 20);
    note(s, 0, ms_wrap(s->m));
}

static void test_policies_differ(void **state) {
    (void)state;
    scene *of = scene_new(3, 1, 0, play_wrap);
    of->variant = 2;
    of->alter = alter_policy;
    scene_play(of);
    for (uint32_t r = 0; r < of->ranks; ++r) {
        assert_int_equal(of->results[r][0], MS_RESULT_RANKS);
    }
    print_message("policies that differ: %s\n", of->texts[0][0]);
    scene_free(of);
}

static int write_file(void *user, const void *data, size_t bytes) {
    scene *of = (scene *)user;
    of->file = (uint8_t *)realloc(of->file, of->file_bytes + bytes);
    memcpy(of->file + of->file_bytes, data, bytes);
    of->file_bytes += bytes;
    return 0;
}

static int read_file(void *user, uint64_t offset, void *data, size_t bytes) {
    const scene *of = (const scene *)user;
    if (offset + bytes > of->file_bytes) {
        return 1;
    }
    memcpy(data, of->file + offset, bytes);
    return 0;
}

static void save_plan(seat *s) {
    const ms_sink sink = {write_file, s->of};
    if (s->rank == 0) {
        TC_CHECK_OK(s, ms_plan_save(s->m, &sink));
    }
}

static ms_result load_plan(seat *s) {
    const ms_source source = {read_file, s->of, s->of->file_bytes};
    return ms_plan_load(s->m, &source);
}

static void alter_tight(seat *s, ms_config *config) {
    config->memory_budget_bytes = 0;
    config->force_optimize = s->of->variant != 3;
}

/* Of a dry run, which asks no other rank. */
static void alter_dry(seat *s, ms_config *config) {
    ms_comm none;
    memset(&none, 0, sizeof none);
    none.size = sizeof none;
    none.count = s->of->counted > 0 ? (uint32_t)s->of->counted : s->of->ranks;
    config->comm = none;
    config->dry_run = true;
    alter_tight(s, config);
}

static void play_planned(seat *s) {
    seat_create(s, ROWS, ROWS);
    if (TC_CHECK_OK(s, ms_wrap(s->m))) {
        TC_CHECK_OK(s, ms_report(s->m, &s->of->report[s->rank]));
        save_plan(s);
    }
}

static void play_loaded(seat *s) {
    seat_create(s, ROWS, ROWS);
    bool fine = TC_CHECK_OK(s, load_plan(s)) && TC_CHECK_OK(s, ms_wrap(s->m)) &&
                TC_CHECK_OK(s, toy_write_params(s->n));
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        fine = seat_step(s, step);
    }
    seat_end(s);
}

/* Loaded on one rank alone, or one of another number of ranks. */
static void play_badly_loaded(seat *s) {
    seat_create(s, ROWS, ROWS);
    note(s, 0, s->of->variant == 3 && s->rank != 1 ? MS_RESULT_OK : load_plan(s));
    note(s, 1, ms_wrap(s->m));
}

static void hand_file(scene *from, scene *to) {
    to->file = from->file;
    to->file_bytes = from->file_bytes;
    from->file = NULL;
    from->file_bytes = 0;
}

static void test_plan_files(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 2 * SHAPES; k += STRIDE) {
        scene *planned = scene_of_shape(k % SHAPES, play_planned);
        const bool dry = k >= SHAPES;
        planned->alter = dry ? alter_dry : alter_tight;
        if (dry) {
            planned->counted = planned->ranks;
            planned->ranks = 1;
        }
        scene_play(planned);
        scene *of = scene_of_shape(k % SHAPES, play_loaded);
        of->alter = alter_tight;
        hand_file(planned, of);
        scene_play(of);
        scene *plain = plain_like(of);
        assert_bits(of, plain, "plans in files");
        for (uint32_t r = 0; r < of->ranks; ++r) {
            assert_true(of->report[r].plan_hash == planned->report[0].plan_hash);
            assert_true(of->report[r].arena_bytes == planned->report[0].arena_bytes);
        }
        for (uint32_t variant = 2; variant < 4; ++variant) {
            scene *bad = scene_of_shape(k % SHAPES, play_badly_loaded);
            bad->variant = variant;
            bad->alter = alter_tight;
            bad->ranks = variant == 3 ? of->ranks : 5 - of->ranks; // 3 for 2
            hand_file(of, bad);
            scene_play(bad);
            for (uint32_t r = 0; r < bad->ranks; ++r) {
                if (variant == 3) {
                    assert_int_equal(bad->results[r][1], MS_RESULT_RANKS);
                    t_text_has(bad->texts[r][1], "plans");
                } else {
                    assert_int_equal(bad->results[r][1], MS_RESULT_INVALID);
                    t_text_has(bad->texts[r][1], "number of ranks");
                }
            }
            hand_file(bad, of);
            scene_free(bad);
        }
        scene_free(plain);
        scene_free(planned);
        scene_free(of);
    }
}

// ------------------------------------------------------------------------------------------------
// what is refused, and what one rank does alone

/* A param whose address was given away stays whole; if only on one rank, that is an error. */
static void play_addresses(seat *s) {
    scene *of = s->of;
    const int level = 3;
    bool fine = seat_start(s);
    if (of->variant == 0 || s->rank == 1) {
        TC_CHECK(s, ms_data(s->m, s->n->param[1]) != NULL);
    }
    for (int i = 0; i < PARAMS; ++i) {
        ms_set_tensor_technique(s->m, handle_for(s->n, i, level), MS_TECHNIQUE_SHARDING,
                                MS_SWITCH_ON);
    }
    note(s, 0, ms_wrap(s->m));
    if (of->variant == 0) {
        TC_CHECK(s, ms_data(s->m, s->n->param[1]) != NULL);
        TC_CHECK(s, (ms_data(s->m, s->n->param[0]) == NULL) == (level == 3));
    }
    for (uint32_t step = 0; step < STEPS && fine && of->variant == 0; ++step) {
        fine = seat_step(s, step);
    }
    seat_end(s);
}

static void test_addresses(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 4; ++k) {
        scene *of = scene_new(2 + k % 2, 1, 0, play_addresses);
        of->variant = k / 2;
        scene_play(of);
        scene *plain = plain_like(of);
        for (uint32_t r = 0; r < of->ranks; ++r) {
            assert_int_equal(of->results[r][0], k < 2 ? MS_RESULT_OK : MS_RESULT_RANKS);
        }
        if (k < 2) {
            assert_bits(of, plain, "addresses");
        } else {
            print_message("addresses that differ: %s\n", of->texts[0][0]);
        }
        scene_free(plain);
        scene_free(of);
    }
}

static void play_refused(seat *s) {
    ms_verify_report report;
    ms_nonfinite found;
    ms_config c = config_of(s);
    ms_model *m = NULL;
    c.cuda_graph = true;
    TC_CHECK(s, ms_create(&c, &m) == MS_RESULT_INVALID && strstr(ms_last_error(m), "cuda_graph"));
    ms_destroy(m);
    c = config_of(s);
    c.comm.count = 0; // as of a comm that could not be made
    c.comm.name = "the reason for that";
    TC_CHECK(s, ms_create(&c, &m) == MS_RESULT_INVALID && strstr(ms_last_error(m), c.comm.name));
    ms_destroy(m);
    c = config_of(s);
    c.comm_timeout = 1e300;
    TC_CHECK(s, ms_create(&c, &m) == MS_RESULT_INVALID && strstr(ms_last_error(m), "comm_timeout"));
    ms_destroy(m);
    bool fine = seat_start(s);
    double numbers[2] = {1.0, 2.0};
    TC_CHECK(s, ms_sum_over_ranks(s->m, numbers, s->rank == 0 ? 2 : 1) == MS_RESULT_RANKS &&
                    strstr(ms_last_error(s->m), "2 on rank 0"));
    TC_CHECK(s, ms_sum_over_ranks(s->m, numbers, 2) == MS_RESULT_OK);
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        fine = TC_CHECK_OK(s, seat_feed(s, step, 0));
        if (step % s->of->ranks == s->rank) { // which asks no other rank
            TC_CHECK(s, ms_verify(s->m, NULL, NULL, &report) == MS_RESULT_UNSUPPORTED);
            TC_CHECK(s, ms_find_nonfinite(s->m, &found) == MS_RESULT_UNSUPPORTED);
        }
        fine = fine && seat_step(s, step);
    }
    seat_end(s);
}

static void test_refused(void **state) {
    (void)state;
    for (uint32_t k = 0; k < SHAPES; k += STRIDE) {
        scene *of = scene_of_shape(k, play_refused);
        scene_play(of);
        scene *plain = plain_like(of);
        assert_bits(of, plain, "refused calls");
        scene_free(plain);
        scene_free(of);
    }
}

/* Jobs of the trainer's own, last piece first. */
static void run_jobs(void *user, uint32_t count, ms_piece_fn piece, void *argument) {
    seat *s = (seat *)user;
    s->of->slices[s->rank] += 1;
    for (uint32_t i = count; i-- > 0;) {
        piece(argument, i);
    }
}

static void play_jobs(seat *s) {
    enum { WIDE = 256, DEPTH = 2 };
    scene *of = s->of;
    ms_config c = config_of(s);
    static t_chain chains[MOST_RANKS];
    t_chain *chain = &chains[s->rank];
    float *weights = (float *)malloc(DEPTH * WIDE * WIDE * sizeof *weights);
    if (of->variant > 0) {
        c.parallel.run = run_jobs;
        c.parallel.user = s;
    }
    bool fine = TC_CHECK_OK(s, t_chain_create(chain, &c, DEPTH, 8, WIDE));
    s->m = chain->model;
    const ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    ms_set_optimizer(s->m, &o);
    for (int i = 0; i < DEPTH; ++i) {
        const ms_tensor w = chain->weight[i];
        ms_set_tensor_technique(s->m,
                                of->level == 1   ? ms_optimizer_state(s->m, w, 0)
                                : of->level == 2 ? ms_gradient(s->m, w)
                                                 : w,
                                MS_TECHNIQUE_SHARDING,
                                of->level > 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT);
    }
    fine = fine && TC_CHECK_OK(s, ms_wrap(s->m)) && TC_CHECK_OK(s, t_chain_write(chain, 3));
    for (uint32_t step = 0; step < STEPS * of->micros && fine; ++step) {
        fine = TC_CHECK_OK(s, ms_step(s->m, &of->losses[s->rank][step % STEPS]));
    }
    for (int i = 0; i < DEPTH && fine; ++i) {
        fine = TC_CHECK_OK(s, ms_read(s->m, chain->weight[i], weights + i * WIDE * WIDE));
    }
    const uint64_t hash = msi_hash_bytes(0, weights, DEPTH * WIDE * WIDE * sizeof *weights);
    memcpy(of->ended[s->rank], &hash, sizeof hash);
    free(weights);
}

static void test_jobs(void **state) {
    (void)state;
    for (int level = 0; level < LEVELS; ++level) {
        scene *plain = scene_played(2, 1, level, play_jobs);
        scene *of = scene_new(2, 1, level, play_jobs);
        of->variant = 1;
        scene_play(of);
        assert_bits(of, plain, "jobs");
        assert_true(of->slices[0] > 0 && of->slices[1] > 0);
        scene_free(plain);
        scene_free(of);
    }
}

enum { ALONE_BETWEEN, ALONE_AFTER_BACKWARD, ALONE_AFTER_MICRO, ALONE_IN_TURN, ALONE_VARIANTS };

/* Rank 0 calls ms_update, while the others step. */
static void play_update_alone(seat *s) {
    scene *of = s->of;
    bool fine = seat_start(s) && seat_step(s, 0) && TC_CHECK_OK(s, seat_feed(s, 1, 0));
    if (of->variant == ALONE_AFTER_BACKWARD) {
        for (uint32_t micro = 0; micro < of->micros && fine; ++micro) {
            fine = TC_CHECK_OK(s, ms_forward(s->m, NULL)) && TC_CHECK_OK(s, ms_backward(s->m));
        }
    } else if (of->variant == ALONE_AFTER_MICRO) {
        fine = fine && TC_CHECK_OK(s, ms_step(s->m, NULL)) && TC_CHECK_OK(s, seat_feed(s, 1, 1));
    }
    const double begin_s = now_s();
    note(s, 0, s->rank == 0 ? ms_update(s->m) : ms_step(s->m, NULL));
    if (of->variant == ALONE_IN_TURN ? s->rank == 0 : of->variant != ALONE_BETWEEN || s->rank > 0) {
        note(s, 1, ms_step(s->m, NULL));
    }
    of->took_s[s->rank] = now_s() - begin_s;
    if (of->variant == ALONE_BETWEEN && s->rank == 0) { // it never comes
        const struct timespec rest = {0, 600000000};
        nanosleep(&rest, NULL);
    }
}

/* An error on all in time, unless rank 0 goes on to step as the others do. */
static void test_update_alone(void **state) {
    (void)state;
    for (uint32_t k = 0; k < (uint32_t)ALONE_VARIANTS * (uint32_t)SHAPES; k += STRIDE) {
        scene *of = scene_of_shape(k % SHAPES, play_update_alone);
        of->variant = k / SHAPES;
        of->timeout_s = of->variant == ALONE_BETWEEN ? 0.4 : 5.0;
        of->is_lost = of->variant != ALONE_IN_TURN;
        const bool has_none = of->variant == ALONE_AFTER_MICRO && of->micros == 1;
        const bool skips = of->variant == ALONE_BETWEEN && of->ranks + of->micros > 3; // takes time
        for (uint32_t r = 0; r < of->ranks && !has_none && !skips; ++r) {
            if (r == 0) {
                scene_play(of);
            }
            const ms_result *results = of->results[r];
            const bool in_turn = of->variant == ALONE_IN_TURN;
            const bool fits =
                in_turn || of->variant == ALONE_BETWEEN
                    ? results[0] == (r == 0    ? MS_RESULT_ORDER
                                     : in_turn ? MS_RESULT_OK
                                               : MS_RESULT_RANKS)
                    : results[0] == MS_RESULT_RANKS && strstr(of->texts[r][0], "rank") != NULL;
            if (!fits || of->took_s[r] > 2.5) {
                fail_msg("variant %u, %u micro-batches, level %d, rank %u: %s (%s), then %s (%s), "
                         "after %.2f s",
                         (unsigned)of->variant, (unsigned)of->micros, of->level, (unsigned)r,
                         ms_result_name(results[0]), of->texts[r][0], ms_result_name(results[1]),
                         of->texts[r][1], of->took_s[r]);
            }
        }
        scene_free(of);
    }
}

// ------------------------------------------------------------------------------------------------
// a comm of one rank is none

static void append(const char *text, size_t length, void *user) {
    char *data = *(char **)user;
    const size_t old = data ? strlen(data) : 0;
    data = (char *)realloc(data, old + length + 1);
    memcpy(data + old, text, length);
    data[old + length] = 0;
    *(char **)user = data;
}

static void alter_one(seat *s, ms_config *config) {
    static const ms_mode modes[] = {MS_MODE_CONSERVATIVE, MS_MODE_BALANCED, MS_MODE_AGGRESSIVE};
    config->mode = modes[s->of->variant % 3];
    config->sharding = MS_SWITCH_DEFAULT;
    config->force_optimize = s->of->variant / 3 > 0;
    if (s->of->whole > 0) {
        memset(&config->comm, 0, sizeof config->comm);
    }
}

static void play_one(seat *s) {
    double one = 2.0;
    play_steps(s);
    TC_CHECK_OK(s, ms_sum_over_ranks(s->m, &one, 1));
    TC_CHECK(s, one == 2.0);
    TC_CHECK_OK(s, ms_print_plan_full(s->m, append, &s->of->plan_text));
}

static void test_one_rank(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 6 * MOST_MICROS * LEVELS; k += STRIDE) {
        scene *both[2];
        for (uint32_t n = 0; n < 2; ++n) {
            both[n] = scene_new(1, 1 + k / 6 % 2, (int)(k / 12), play_one);
            both[n]->variant = k % 6;
            both[n]->whole = n == 0 ? 0 : 16; // no comm
            both[n]->alter = alter_one;
            scene_play(both[n]);
        }
        assert_bits(both[0], both[1], "one rank");
        assert_true(both[0]->report[0].arena_bytes == both[1]->report[0].arena_bytes);
        assert_true(both[0]->report[0].plan_hash == both[1]->report[0].plan_hash);
        assert_string_equal(both[0]->plan_text, both[1]->plan_text);
        assert_true(both[0]->world.ranks[0].calls == 0);
        scene_free(both[0]);
        scene_free(both[1]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_late_gradients),
        cmocka_unit_test(test_gradients_in_callbacks),
        cmocka_unit_test(test_wanted_gradients),
        cmocka_unit_test(test_own_updates),
        cmocka_unit_test(test_early_ends),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_suspended),
        cmocka_unit_test(test_reshaped),
        cmocka_unit_test(test_budgets),
        cmocka_unit_test(test_loans),
        cmocka_unit_test(test_borrowed_gradients),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_profiling),
        cmocka_unit_test(test_policies_differ),
        cmocka_unit_test(test_plan_files),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_jobs),
        cmocka_unit_test(test_update_alone),
        cmocka_unit_test(test_one_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
