/*  test_threads.c - models in threads of their own: what they compute does not depend on the
    others, and with the thread sanitizer (config=thread) nothing is shared. Threads only return
    numbers; cmocka's checks, which jump, stay on the main one. */
#define _POSIX_C_SOURCE 200809L
#define MEMSCALE_IMPLEMENTATION
#include "../memscale.h"
#include "toy_layers.h"

#include <pthread.h>

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
        jobs[i].rounds = (uint32_t)t_sweep(ROUNDS / 5, ROUNDS);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_models_in_two_threads), cmocka_unit_test(models_come_and_go),
        cmocka_unit_test(debug_mode_is_private_too), cmocka_unit_test(errors_stay_with_their_model),
        cmocka_unit_test(a_model_is_handed_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
