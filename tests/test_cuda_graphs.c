/*  test_cuda_graphs.c - ms_config.cuda_graph: replays give the bits of the steps that they stand for,
    whatever changes from step to step; what makes a new recording; what cannot be recorded. */
#include "testing_cuda.h"
#include "threads_comm.h"

enum { STEPS = 8 };

// ------------------------------------------------------------------------------------------------
// the same bits

enum { GRAPH_CASES = 10 };

static void make_cases(cn_how *cases) {
    memset(cases, 0, GRAPH_CASES * sizeof *cases);
    for (int i = 0; i < GRAPH_CASES; i++) {
        cases[i].cuda = true;
        cases[i].smallest = i % 2 != 0;
    }
    cases[1].by_gemm = true;
    cases[2].clip = 0.05f;
    cases[2].optimizer = MS_OPTIMIZER_SGD;
    cases[2].momentum = 0.9f;
    cases[3].micro_count = 3;
    cases[3].clip = 0.05f;
    cases[4].at_once = true;
    cases[4].borrows = true;
    cases[5].optimizer = MS_OPTIMIZER_SGD;
    cases[5].early = MS_SWITCH_ON;
    cases[6].micro_count = 2;
    for (int i = 7; i < GRAPH_CASES; i++) {
        cases[i].optimizer = i == 7 ? MS_OPTIMIZER_MUON : MS_OPTIMIZER_ADAFACTOR;
        cases[i].clip = i == 9 ? 0.05f : 0.0f;
    }
}

static uint64_t forwards(const cn_net *net) {
    return net->ops[0].calls[MS_PHASE_FORWARD];
}

/* Runs outside of recordings, and leaves them as they are. Returns the number of forwards. */
static uint64_t verify(const cn_net *net) {
    const uint64_t before = forwards(net);
    ms_verify_report report;
    t_ok(net->model, ms_verify(net->model, NULL, NULL, &report));
    assert_true(report.tensor_count > 0 && report.differ_count == 0);
    return forwards(net) - before;
}

/* Steps with another learning rate and weight decay each, and an eval in between; where they are
   recorded, a verification too. */
static cn_values train(const cn_how *how, double *loss) {
    cn_net net;
    const uint64_t micros = how->micro_count ? how->micro_count : 1;
    uint64_t verified = 0;
    cn_start(&net, how);
    for (uint64_t i = 0; i < STEPS; i++) {
        ms_set_learning_rate(net.model, 0.01f * (float)(i + 1));
        ms_set_weight_decay(net.model, net.param[1], 0.1f * (float)(i % 4));
        cn_steps(&net, i * micros, micros);
        if (i == 5) {
            t_ok(net.model, cn_feed(&net, 70));
            t_ok(net.model, ms_eval(net.model, loss));
        }
        verified += how->graph && !how->comm && i % 4 == 2 ? verify(&net) : 0;
    }
    if (how->graph) { // each kind of micro-batch runs once by itself, and is recorded once
        const uint64_t kinds = micros < 3 ? micros : 3;
        const uint64_t warm = micros == 3 ? 2 * kinds : 2 * micros;
        assert_int_equal(forwards(&net), warm + verified);
    }
    const cn_values values = cn_get_values(&net);
    cn_destroy(&net);
    return values;
}

static void replays_give_the_bits_of_steps(void **state) {
    (void)state;
    cn_how cases[GRAPH_CASES];
    make_cases(cases);
    for (int i = 0; i < GRAPH_CASES; i++) {
        for (uint64_t seed = 0; seed < cn_seeds(20); seed++) {
            cn_how how = cases[i];
            double expected = 0.0, found = 0.0;
            cn_reset(seed);
            const cn_values without = train(&how, &expected);
            how.graph = true;
            const cn_values with = train(&how, &found);
            cn_clean();
            if (!cn_alike(&with, &without, 0.0)) {
                print_error("case %d, seed %u\n", i, (unsigned)seed);
            }
            assert_true(cn_alike(&with, &without, 0.0));
            assert_true(expected == found);
        }
    }
}

#ifdef CUDART_EMULATION

// Ranks are processes: they share their results.
enum { NCCL_RANKS = 3 };

typedef struct ranks_run {
    tc_world world;
    cn_how how;
    uint64_t seed;
    double loss[NCCL_RANKS][2]; // without recordings, and with them
    cn_values values[NCCL_RANKS][2];
} ranks_run;

static void *train_rank(uint32_t rank, void *argument) {
    ranks_run *r = (ranks_run *)argument;
    ms_comm comm = r->world.ranks[rank].comm;
    ms_nccl_id id;
    emulation_reset(r->seed * NCCL_RANKS + rank);
    if (ms_nccl_share_id(&comm, &id) != MS_RESULT_OK ||
        ms_comm_nccl(&id, rank, NCCL_RANKS, &comm) != MS_RESULT_OK) {
        return r;
    }
    for (int graph = 0; graph < 2; graph++) {
        cn_how how = r->how;
        how.comm = &comm;
        how.graph = graph != 0;
        r->values[rank][graph] = train(&how, &r->loss[rank][graph]);
    }
    ms_comm_close(&comm);
    cn_clean();
    return NULL;
}

/* Collectives and votes are in the recordings, too. */
static void replays_of_ranks_give_the_bits_of_steps(void **state) {
    (void)state;
    cn_how cases[GRAPH_CASES];
    make_cases(cases);
    for (int i = 0; i < GRAPH_CASES; i++) {
        for (uint64_t seed = 0; seed < cn_seeds(5); seed++) {
            ranks_run *r = (ranks_run *)meeting_shared(sizeof *r);
            assert_non_null(r);
            r->how = cases[i];
            r->how.shards = seed % 2 == 0 && !r->how.borrows;
            r->seed = seed;
            tc_open(&r->world, NCCL_RANKS);
            assert_true(tc_run(&r->world, train_rank, r));
            for (uint32_t k = 0; k < 2 * NCCL_RANKS; k++) {
                assert_true(cn_alike(&r->values[k / 2][k % 2], &r->values[0][0], 0.0));
                assert_true(r->loss[k / 2][k % 2] == r->loss[0][0]);
            }
            tc_close(&r->world);
            munmap(r, sizeof *r);
        }
    }
}

typedef enum trouble { NO_TROUBLE, CANCELS, RETURNS_ERROR, CANNOT_BE_RECORDED, TROUBLES } trouble;

typedef struct troubled_run {
    tc_world world;
    cn_how how;
    uint64_t seed;
    uint64_t at;    // the micro-batch of the trouble, from 1 on
    uint64_t ahead; // steps that are enqueued before a rank waits for them
    uint32_t culprit;
    trouble what;
    bool is_done[NCCL_RANKS], has_changed[NCCL_RANKS];
    uint32_t errors[NCCL_RANKS];
    ms_result last_error[NCCL_RANKS];
    cn_values values[NCCL_RANKS];
} troubled_run;

/* One micro-batch, in which the culprit may have its trouble. */
static ms_result troubled_pass(const troubled_run *r, uint32_t rank, cn_net *net, uint64_t number,
                               bool is_troubled) {
    double loss;
    cn_op *op = &net->ops[r->seed % net->op_count];
    ms_result result = cn_feed(net, number * NCCL_RANKS + rank);
    if (is_troubled && r->what == CANCELS) {
        ms_cancel(net->model);
    } else if (is_troubled) {
        op->sin = r->what == RETURNS_ERROR ? CN_SIN_RETURN : CN_SIN_SYNCHRONIZE;
        op->sin_phase = r->how.early == MS_SWITCH_OFF ? MS_PHASE_BACKWARD : MS_PHASE_FORWARD;
    }
    result = result == MS_RESULT_OK ? ms_step(net->model, r->seed % 2 ? &loss : NULL) : result;
    op->sin = CN_SIN_NONE;
    return result;
}

/* Steps are run again from the one that has an error. */
static void troubled_train(troubled_run *r, uint32_t rank, cn_net *net) {
    const uint64_t micros = r->how.micro_count ? r->how.micro_count : 1;
    uint64_t step = 0, passes = 0;
    ms_result result = MS_RESULT_OK;
    while (step < STEPS && r->errors[rank] < 4) {
        const uint64_t end = step + r->ahead < STEPS ? step + r->ahead : (uint64_t)STEPS;
        cn_values before, after;
        result = cn_read_values(net, &before);
        for (uint64_t k = step * micros; k < end * micros && result == MS_RESULT_OK; k++) {
            const bool is_troubled =
                rank == r->culprit && r->what != NO_TROUBLE && ++passes == r->at;
            result = troubled_pass(r, rank, net, k, is_troubled);
        }
        result = result == MS_RESULT_OK ? ms_synchronize(net->model) : result;
        if (result != MS_RESULT_OK) {
            r->errors[rank] += 1;
            r->last_error[rank] = result;
            const bool all = net->model->run.step == step;
            if (cn_read_values(net, &after) != MS_RESULT_OK) {
                return;
            }
            r->has_changed[rank] |= all && !cn_alike(&before, &after, 0.0);
        }
        step = net->model->run.step;
    }
    r->is_done[rank] = cn_read_values(net, &r->values[rank]) == MS_RESULT_OK && step == STEPS;
}

static void *run_troubled(uint32_t rank, void *argument) {
    troubled_run *r = (troubled_run *)argument;
    ms_comm comm = r->world.ranks[rank].comm;
    ms_nccl_id id;
    cn_net net;
    cn_how how = r->how;
    emulation_reset(r->seed * NCCL_RANKS + rank);
    if (ms_nccl_share_id(&comm, &id) != MS_RESULT_OK ||
        ms_comm_nccl(&id, rank, NCCL_RANKS, &comm) != MS_RESULT_OK) {
        return r;
    }
    how.comm = &comm;
    cn_start(&net, &how);
    troubled_train(r, rank, &net);
    cn_destroy(&net);
    ms_comm_close(&comm);
    cn_clean();
    return NULL;
}

static troubled_run *troubled(const cn_how *how, uint64_t seed, trouble what) {
    troubled_run *r = (troubled_run *)meeting_shared(sizeof *r);
    const uint64_t micros = how->micro_count ? how->micro_count : 1;
    t_rng rng = t_seed(seed * TROUBLES + (uint64_t)what);
    assert_non_null(r);
    r->how = *how;
    r->seed = seed;
    r->what = what;
    r->culprit = t_below(&rng, NCCL_RANKS);
    r->ahead = 1 + t_below(&rng, 3);
    r->at = 1 + t_below(&rng, (uint32_t)(STEPS * micros));
    if (what == RETURNS_ERROR || what == CANNOT_BE_RECORDED) { // where layers are called
        r->at = 1 + t_below(&rng, (uint32_t)(2 * micros));
    }
    tc_open(&r->world, NCCL_RANKS);
    assert_true(tc_run(&r->world, run_troubled, r));
    return r;
}

static void troubled_free(troubled_run *r) {
    tc_close(&r->world);
    munmap(r, sizeof *r);
}

/* What keeps one rank from launching a recording ends the step on all; then it is run again. */
static void ranks_agree_to_give_up_what_is_recorded(void **state) {
    (void)state;
    cn_how cases[GRAPH_CASES];
    uint32_t errors[TROUBLES] = {0};
    make_cases(cases);
    for (uint64_t k = 0; k < GRAPH_CASES * cn_seeds(10); k++) {
        cn_how how = cases[k % GRAPH_CASES];
        how.stateless = true; // what a step that does not count has done to a buffer stays
        how.shards = k % 3 != 2 && !how.borrows;
        if (k % 3 > 0 && how.early == MS_SWITCH_DEFAULT) { // backward may fail before any update
            how.early = MS_SWITCH_OFF;
        }
        how.graph = k % 8 != 7;
        troubled_run *clean = troubled(&how, k, NO_TROUBLE);
        for (int what = CANCELS; what < TROUBLES; what++) {
            troubled_run *r = troubled(&how, k, (trouble)what);
            errors[what] += r->errors[0];
            for (uint32_t rank = 0; rank < NCCL_RANKS; rank++) {
                const ms_result expected = what == CANCELS      ? MS_RESULT_CANCELLED
                                           : rank == r->culprit ? MS_RESULT_CALLBACK
                                                                : MS_RESULT_RANKS;
                const bool fine = r->is_done[rank] && !r->has_changed[rank] &&
                                  r->errors[rank] == r->errors[0] &&
                                  (what != CANCELS || r->errors[rank] == 1) &&
                                  (!r->errors[rank] || r->last_error[rank] == expected) &&
                                  cn_alike(&r->values[rank], &clean->values[0], 0.0);
                if (!fine) {
                    print_error("case %u, trouble %d in micro-batch %u of rank %u, %u steps ahead: "
                                "rank %u: %s, %u errors, last %s%s\n",
                                (unsigned)k, what, (unsigned)r->at, (unsigned)r->culprit,
                                (unsigned)r->ahead, (unsigned)rank,
                                r->is_done[rank] ? "done" : "not done", (unsigned)r->errors[rank],
                                ms_result_name(r->last_error[rank]),
                                r->has_changed[rank] ? ", changed" : "");
                }
                assert_true(fine);
            }
            troubled_free(r);
        }
        troubled_free(clean);
    }
    assert_true(errors[RETURNS_ERROR] > 0 && errors[CANNOT_BE_RECORDED] > 0);
}

#endif

/* Steps that are timed run by themselves: one that is slow for once, two samples, and two by the
   new plan. Then comes the recording. */
static void steps_are_recorded_after_they_are_timed(void **state) {
    (void)state;
    for (int smallest = 0; smallest < 2; smallest++) {
        for (uint32_t micros = 1; micros <= 2; micros++) {
            for (uint64_t seed = 0; seed < cn_seeds(5); seed++) {
                cn_how how;
                cn_net net;
                memset(&how, 0, sizeof how);
                how.cuda = true;
                how.smallest = smallest != 0;
                how.micro_count = micros;
                cn_reset(seed);
                cn_start(&net, &how);
                cn_steps(&net, 0, 9 * micros);
                const cn_values expected = cn_get_values(&net);
                cn_destroy(&net);
                how.graph = how.profiles = true;
                cn_start(&net, &how);
                cn_steps(&net, 0, 9 * micros);
                assert_int_equal(forwards(&net), 6 * micros);
                const cn_values found = cn_get_values(&net);
                assert_true(cn_alike(&found, &expected, 0.0));
                cn_destroy(&net);
                cn_clean();
            }
        }
    }
}

/* Masks of dropout that stood still would show in the losses of one batch and constant params. */
static void replays_draw_new_masks(void **state) {
    (void)state;
    cn_how how;
    cn_net net;
    double losses[STEPS];
    memset(&how, 0, sizeof how);
    how.cuda = how.graph = how.stateless = true;
    cn_reset(1);
    cn_start(&net, &how);
    ms_set_learning_rate(net.model, 0.0f);
    for (uint32_t i = 0; i < net.param_count; i++) {
        ms_set_weight_decay(net.model, net.param[i], 0.0f);
    }
    t_ok(net.model, cn_feed(&net, 0));
    for (int i = 0; i < STEPS; i++) {
        t_ok(net.model, ms_step(net.model, &losses[i]));
        for (int k = 0; k < i; k++) {
            assert_true(losses[i] != losses[k]);
        }
    }
    cn_destroy(&net);
    cn_clean();
}

/* Rates of groups, a factor of the gradients, a param that is paused, and steps above the norm. */
static cn_values train_groups(const cn_how *how, uint32_t *skipped) {
    cn_net net;
    ms_memory_report report;
    const uint64_t micros = how->micro_count ? how->micro_count : 1;
    cn_start(&net, how);
    for (uint64_t i = 0; i < 2 * STEPS; i++) {
        ms_set_group_learning_rate(net.model, net.group[1 + i % 2], 0.004f * (float)(i % 5));
        if (i % 3 == 1) {
            t_ok(net.model, ms_set_gradient_factor(net.model, i % 2 == 0 ? 0.125f : 1e4f));
        }
        if (i == 7 || i == 12) {
            t_ok(net.model, ms_set_paused(net.model, net.param[1], i == 7));
        }
        cn_steps(&net, i * micros, micros);
    }
    t_ok(net.model, ms_synchronize(net.model));
    t_report(net.model, &report);
    *skipped = report.skipped_by_norm;
    assert_int_equal(ms_update_count(net.model, net.param[0]), 2 * STEPS - *skipped);
    const cn_values values = cn_get_values(&net);
    cn_destroy(&net);
    return values;
}

static void groups_change_while_they_are_replayed(void **state) {
    (void)state;
    for (uint32_t micros = 1; micros <= 3; micros++) {
        for (int clips = 0; clips < 2; clips++) {
            for (uint64_t seed = 0; seed < cn_seeds(10); seed++) {
                cn_how how;
                uint32_t skipped[2] = {0, 0};
                memset(&how, 0, sizeof how);
                how.cuda = how.groups = true;
                how.smallest = seed % 2 != 0;
                how.micro_count = micros;
                how.clip = clips != 0 ? 0.05f : 0.0f;
                cn_reset(seed);
                const cn_values without = train_groups(&how, &skipped[0]);
                how.graph = true;
                const cn_values with = train_groups(&how, &skipped[1]);
                cn_clean();
                assert_true(cn_alike(&with, &without, 0.0));
                if (!(skipped[0] > 0 && skipped[0] < 2 * STEPS && skipped[0] == skipped[1])) {
                    fail_msg("%u and %u of %d steps skipped", (unsigned)skipped[0],
                             (unsigned)skipped[1], 2 * STEPS);
                }
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// what makes a new recording

enum {
    CHANGE_NONE,
    CHANGE_BORROW,
    CHANGE_FACTOR,
    CHANGE_SIZES,
    CHANGE_PLAN,
    CHANGE_DETACH,
    CHANGES
};

static void make_change(cn_net *net, int change, void **more) {
    ms_model *m = net->model;
    const size_t bytes = CN_WORDS * CN_COLS * sizeof(float);
    switch (change) {
    case CHANGE_BORROW: // the values move to another address
        t_ok(m, ms_synchronize(m));
        assert_int_equal(cudaMalloc(more, bytes), cudaSuccess);
        assert_int_equal(
            cudaMemcpy(*more, ms_data(m, net->param[0]), bytes, cudaMemcpyDeviceToDevice),
            cudaSuccess);
        assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
        t_ok(m, ms_borrow(m, net->param[0], *more));
        break;
    case CHANGE_FACTOR:
        ms_set_loss_factor(m, 0.5f);
        break;
    case CHANGE_SIZES:
        net->rows = 4;
        t_ok(m, ms_reshape(m, &net->rows));
        break;
    case CHANGE_PLAN:
        ms_set_frozen(m, net->param[2], true);
        t_ok(m, ms_wrap(m));
        break;
    case CHANGE_DETACH:
        t_ok(m, ms_detach(m));
        break;
    default:
        break;
    }
}

static cn_values change_amid(const cn_how *how, int change) {
    cn_net net;
    void *more = NULL;
    cn_start(&net, how);
    cn_steps(&net, 0, 4);
    const uint64_t calls = forwards(&net);
    make_change(&net, change, &more);
    cn_steps(&net, 4, 4);
    if (how->graph) {
        const bool new_plan = change >= CHANGE_SIZES;
        assert_int_equal(forwards(&net) - calls, change == CHANGE_NONE ? 0 : new_plan ? 2 : 1);
    }
    if (change == CHANGE_SIZES) { // back to sizes that have a recording
        net.rows = CN_ROWS;
        t_ok(net.model, ms_reshape(net.model, &net.rows));
        cn_steps(&net, 8, 2);
        assert_int_equal(forwards(&net), how->graph ? calls + 2 : 10);
    }
    cn_values values;
    memset(&values, 0, sizeof values);
    if (change != CHANGE_PLAN) {
        values = cn_get_values(&net);
    } else { // a frozen param has no state
        t_ok(net.model, ms_read(net.model, net.param[0], values.at));
        t_ok(net.model, ms_read(net.model, net.param[1], values.at + CN_WORDS * CN_COLS));
        values.count = CN_WORDS * CN_COLS + CN_COLS * CN_COLS;
    }
    cn_destroy(&net);
    if (more) {
        assert_int_equal(cudaFree(more), cudaSuccess);
    }
    return values;
}

static void changes_make_a_new_recording(void **state) {
    (void)state;
    for (int change = 0; change < CHANGES; change++) {
        for (uint64_t seed = 0; seed < cn_seeds(10); seed++) {
            cn_how how;
            memset(&how, 0, sizeof how);
            how.cuda = true;
            how.borrows = change == CHANGE_BORROW;
            how.smallest = change == CHANGE_DETACH;
            cn_reset(seed);
            const cn_values expected = change_amid(&how, change);
            how.graph = true;
            const cn_values found = change_amid(&how, change);
            cn_clean();
            if (!cn_alike(&found, &expected, 0.0)) {
                print_error("change %d, seed %u\n", change, (unsigned)seed);
            }
            assert_true(cn_alike(&found, &expected, 0.0));
        }
    }
}

/* The second model makes the shared arena grow, so that the passing values of the first move. */
static void share(bool graph, cn_values *first, cn_values *second) {
    cn_how how;
    cn_net a, b;
    memset(&how, 0, sizeof how);
    how.cuda = true;
    how.graph = graph;
    how.smallest = true;
    const ms_backend backend = cn_backend(&how);
    assert_int_equal(ms_arena_create(&backend, NULL, &how.arena), MS_RESULT_OK);
    cn_start(&a, &how);
    const uint64_t before = ms_arena_bytes(how.arena);
    cn_steps(&a, 0, 4);
    how.smallest = false;
    cn_start(&b, &how);
    assert_true(ms_arena_bytes(how.arena) > before);
    for (uint64_t i = 0; i < 4; i++) {
        cn_steps(&b, 10 * i, 1);
        cn_steps(&a, 4 + i, 1);
    }
    *first = cn_get_values(&a);
    *second = cn_get_values(&b);
    cn_destroy(&a);
    cn_destroy(&b);
    ms_arena_destroy(how.arena);
}

static void an_arena_that_grows_makes_a_new_recording(void **state) {
    (void)state;
    cn_values first, second, a, b;
    for (uint64_t seed = 0; seed < cn_seeds(20); seed++) {
        cn_reset(seed);
        share(false, &first, &second);
        share(true, &a, &b);
        cn_clean();
        assert_true(cn_alike(&a, &first, 0.0));
        assert_true(cn_alike(&b, &second, 0.0));
    }
}

// ------------------------------------------------------------------------------------------------
// what cannot be recorded

static cn_op *op_named(cn_net *net, cn_kind kind) {
    for (uint32_t i = 0; i < net->op_count; i++) {
        if (net->ops[i].kind == kind) {
            return &net->ops[i];
        }
    }
    fail();
    return NULL;
}

static uint64_t layers_run(void) {
#ifdef CUDART_EMULATION
    emulation_finish();
    return emulation_launches("cn_k_layer");
#else
    return 0;
#endif
}

/* A sin while the first, or the last, micro-batch is recorded. */
static void sin_once(cn_sin sin, ms_phase phase, uint32_t micros, bool in_last,
                     const cn_values *expected) {
    cn_how how;
    cn_net net;
    memset(&how, 0, sizeof how);
    how.cuda = how.graph = true;
    how.stateless = true; // what a failed forward does to a running mean stays
    how.micro_count = micros;
    cn_start(&net, &how);
    cn_steps(&net, 0, micros + (in_last ? micros - 1 : 0));
    const cn_values before = cn_get_values(&net);
    cn_op *op = op_named(&net, CN_DENSE);
    op->sin = sin;
    op->sin_phase = phase;
    const uint64_t done = layers_run();
    t_error(net.model, cn_step(&net, 50, NULL), MS_RESULT_CALLBACK);
    t_text_has(ms_last_error(net.model), " \"dense0\": its");
    t_text_has(ms_last_error(net.model), sin == CN_SIN_RETURN ? "returned 17" : "graph");
    assert_int_equal(layers_run(), done);
    assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
    const cn_values kept = cn_get_values(&net);
    assert_true(cn_alike(&kept, &before, 0.0));
    op->sin = CN_SIN_NONE;
    cn_steps(&net, micros, 4 * micros); // the step starts again
    const cn_values after = cn_get_values(&net);
    assert_true(cn_alike(&after, expected, 0.0));
    cn_destroy(&net);
}

static void what_cannot_be_recorded_is_told(void **state) {
    (void)state;
    for (uint32_t micros = 1; micros < 3; micros++) {
        cn_how how;
        memset(&how, 0, sizeof how);
        how.cuda = how.stateless = true;
        how.micro_count = micros;
        cn_reset(0);
        const cn_values expected = cn_trained(&how, 5 * (uint64_t)micros);
        for (uint64_t seed = 0; seed < cn_seeds(6); seed++) {
            for (int sin = CN_SIN_RETURN; sin < CN_SIN_COUNT; sin++) {
#ifndef CUDART_EMULATION
                if (sin == CN_SIN_PAGEABLE) {
                    continue; // recorded by drivers of CUDA 13, refused by older ones
                }
#endif
                for (int in_last = 0; in_last < (int)micros; in_last++) {
                    cn_reset(seed);
                    sin_once((cn_sin)sin, MS_PHASE_FORWARD, micros, in_last != 0, &expected);
                    sin_once((cn_sin)sin, MS_PHASE_BACKWARD, micros, in_last != 0, &expected);
                    cn_clean();
                }
            }
        }
    }
}

typedef struct refusal {
    char text[512];
} refusal;

static void keep_text(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)tag;
    if (level == MS_LOG_ERROR) {
        snprintf(((refusal *)user)->text, sizeof((refusal *)user)->text, "%s", text);
    }
}

static void check_refused(const ms_config *config, const char *part) {
    ms_config logged = *config;
    ms_model *model = NULL;
    refusal heard;
    memset(&heard, 0, sizeof heard);
    logged.log = keep_text;
    logged.log_user = &heard;
    assert_int_equal(ms_create(&logged, &model), MS_RESULT_INVALID);
    t_text_has(ms_last_error(model), part);
    t_not_created(&model, MS_RESULT_INVALID);
    t_text_has(heard.text, part);
}

static void graphs_that_cannot_be_are_refused(void **state) {
    (void)state;
    ms_config config;
    memset(&config, 0, sizeof config);
    cn_reset(1);
    config.cuda_graph = true;
    check_refused(&config, "cuda_graph: this backend cannot record"); // the CPU
    config.backend = ms_backend_cuda(0);
    config.debug = true;
    check_refused(&config, "cuda_graph: debug mode");
    config.debug = false;
    config.backend.recording_begin = NULL;
    config.backend.recording_check = NULL;
    config.backend.recording_end = NULL;
    config.backend.recording_launch = NULL;
    config.backend.recording_release = NULL;
    check_refused(&config, "cuda_graph: this backend cannot record");
    cn_how how;
    cn_net net;
    memset(&how, 0, sizeof how);
    memset(&net, 0, sizeof net);
    how.cuda = how.graph = true;
    how.optimizer = MS_OPTIMIZER_CUSTOM;
    assert_int_equal(cn_create(&net, &how), MS_RESULT_OK);
    t_error(net.model, ms_wrap(net.model), MS_RESULT_INVALID);
    t_text_has(ms_last_error(net.model), "cuda_graph: the arguments of an update callback");
    cn_destroy(&net);
    cn_clean();
}

/* A callback on a stream that cannot be recorded. */
static void the_legacy_stream_cannot_be_recorded(void **state) {
    (void)state;
    cn_how how;
    cn_net net;
    memset(&how, 0, sizeof how);
    how.cuda = how.graph = true;
    how.stream = cudaStreamLegacy;
    cn_reset(1);
    cn_start(&net, &how);
    t_ok(net.model, cn_step(&net, 0, NULL));
    const cn_values before = cn_get_values(&net);
    t_error(net.model, cn_step(&net, 1, NULL), MS_RESULT_BACKEND);
    t_text_has(ms_last_error(net.model), "recording on this stream");
    const cn_values after = cn_get_values(&net);
    assert_true(cn_alike(&after, &before, 0.0));
    cn_destroy(&net);
    cn_clean();
}

int main(void) {
    const struct CMUnitTest tests[] = {
#ifdef CUDART_EMULATION
        cmocka_unit_test(replays_of_ranks_give_the_bits_of_steps),
        cmocka_unit_test(ranks_agree_to_give_up_what_is_recorded),
#endif
        cmocka_unit_test(replays_give_the_bits_of_steps),
        cmocka_unit_test(steps_are_recorded_after_they_are_timed),
        cmocka_unit_test(replays_draw_new_masks),
        cmocka_unit_test(groups_change_while_they_are_replayed),
        cmocka_unit_test(changes_make_a_new_recording),
        cmocka_unit_test(an_arena_that_grows_makes_a_new_recording),
        cmocka_unit_test(what_cannot_be_recorded_is_told),
        cmocka_unit_test(graphs_that_cannot_be_are_refused),
        cmocka_unit_test(the_legacy_stream_cannot_be_recorded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
