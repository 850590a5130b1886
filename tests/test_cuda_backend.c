/*  test_cuda_backend.c - training on the CUDA backend: the same numbers as on the CPU, whatever the
    order in which streams run; what waits and what does not; what happens to a step whose loss is
    not a number; the caller's stream. */
#include "testing_cuda.h"

enum { STEPS = 6 };

// ------------------------------------------------------------------------------------------------
// the numbers

typedef struct train_case {
    const char *name;
    cn_how how;
} train_case;

enum { TRAIN_CASES = 12 };

static void make_cases(train_case *cases) {
    static const char *const names[TRAIN_CASES] = {"AdamW",
                                                   "AdamW by cuBLAS",
                                                   "SGD",
                                                   "SGD with momentum, early",
                                                   "clipped",
                                                   "accumulated",
                                                   "own update",
                                                   "loss in forward, clipped",
                                                   "own memory, host",
                                                   "own update, accumulated, clipped",
                                                   "Lion",
                                                   "Lion, accumulated, clipped"};
    memset(cases, 0, TRAIN_CASES * sizeof *cases);
    for (int i = 0; i < TRAIN_CASES; i++) {
        cases[i].name = names[i];
    }
    cases[1].how.by_gemm = true;
    cases[2].how.optimizer = MS_OPTIMIZER_SGD;
    cases[3].how.optimizer = MS_OPTIMIZER_SGD;
    cases[3].how.momentum = 0.9f;
    cases[3].how.early = MS_SWITCH_ON;
    cases[4].how.clip = 0.02f;
    cases[5].how.micro_count = 3;
    cases[6].how.optimizer = MS_OPTIMIZER_CUSTOM;
    cases[7].how.at_once = true;
    cases[7].how.clip = 0.05f;
    cases[8].how.borrows = true;
    cases[8].how.host_scale = true;
    cases[9].how.optimizer = MS_OPTIMIZER_CUSTOM;
    cases[9].how.micro_count = 2;
    cases[9].how.clip = 0.05f;
    cases[10].how.optimizer = MS_OPTIMIZER_LION;
    cases[11].how.optimizer = MS_OPTIMIZER_LION;
    cases[11].how.micro_count = 2;
    cases[11].how.clip = 0.05f;
}

static bool same_values(const cn_values *a, const cn_values *b, double tolerance, const char *name,
                        const char *what, uint64_t seed) {
    const bool same = cn_alike(a, b, tolerance);
    if (!same) {
        for (uint64_t i = 0; i < a->count; i++) {
            if (a->at[i] != b->at[i]) {
                print_error("%s, %s, seed %u: value %u of %u is %.9g, not %.9g\n", name, what,
                            (unsigned)seed, (unsigned)i, (unsigned)a->count, (double)a->at[i],
                            (double)b->at[i]);
                break;
            }
        }
    }
    return same;
}

static void training_gives_the_numbers_of_the_cpu(void **state) {
    (void)state;
    train_case cases[TRAIN_CASES];
    make_cases(cases);
    bool passed = true;
    for (int i = 0; i < TRAIN_CASES; i++) {
        cn_how how = cases[i].how;
        const uint64_t steps = (uint64_t)STEPS * (how.micro_count ? how.micro_count : 1);
        const cn_values expected = cn_trained(&how, steps);
        how.cuda = true;
        for (uint64_t seed = 0; seed < cn_seeds(50); seed++) {
            cn_reset(seed);
            how.smallest = false;
            const cn_values plain = cn_trained(&how, steps);
            how.smallest = true;
            const cn_values least = cn_trained(&how, steps);
            cn_clean();
            passed &=
                same_values(&plain, &expected, cn_tolerance(&how), cases[i].name, "plain", seed);
            passed &= same_values(&least, &plain, 0.0, cases[i].name, "smallest", seed);
        }
    }
    assert_true(passed);
}

// ------------------------------------------------------------------------------------------------
// a model's life: everything between steps, with work in flight

enum { LIFE_LOSSES = 5 };

typedef struct range {
    cn_values values;
    double losses[LIFE_LOSSES];
    float output[CN_MOST_ROWS * CN_COLS];
} range;

static void live_with_sizes(cn_net *net, range *of) {
    ms_model *m = net->model;
    const int64_t more = CN_MOST_ROWS, fewer = 4;
    ms_set_learning_rate(m, 0.05f);
    cn_steps(net, 2, 1);
    net->rows = more;
    t_ok(m, ms_reshape(m, &more));
    cn_steps(net, 3, 2);
    net->rows = fewer;
    t_ok(m, ms_reshape(m, &fewer));
    t_ok(m, cn_feed(net, 5));
    ms_set_loss_factor(m, 0.125f);
    t_ok(m, ms_forward(m, &of->losses[1]));
    t_ok(m, ms_backward(m));
    t_ok(m, ms_update(m));
    ms_set_loss_mean(m);
    net->rows = CN_ROWS;
    t_ok(m, ms_reshape(m, &net->rows));
    cn_steps(net, 6, 1);
}

static void live_with_budgets(cn_net *net, range *of) {
    ms_model *m = net->model;
    uint64_t least = 0;
    t_ok(m, ms_smallest_budget(m, &least));
    ms_set_budget(m, least);
    t_ok(m, cn_step(net, 7, NULL));
    t_ok(m, ms_wrap(m)); // the step may still run
    cn_steps(net, 8, 2);
    ms_set_weight_decay(m, net->param[1], 0.25f);
    t_ok(m, cn_step(net, 10, &of->losses[2]));
    t_ok(m, cn_step(net, 11, NULL));
    t_ok(m, ms_detach(m));
    t_ok(m, cn_step(net, 12, NULL));
    ms_set_frozen(m, net->param[2], true);
    t_ok(m, ms_wrap(m));
    t_ok(m, cn_step(net, 13, &of->losses[3]));
    ms_set_frozen(m, net->param[2], false);
    t_ok(m, ms_wrap(m));
    cn_steps(net, 14, 3);
    t_ok(m, cn_feed(net, 20));
    t_ok(m, ms_eval(m, &of->losses[4]));
    t_ok(m, ms_read(m, net->last, of->output));
}

static void live(const cn_how *how, range *of) {
    cn_net net;
    memset(of, 0, sizeof *of);
    cn_start(&net, how);
    cn_steps(&net, 0, 2);
    t_ok(net.model, cn_feed(&net, 30));
    t_ok(net.model, ms_eval(net.model, NULL));
    t_ok(net.model, cn_feed(&net, 31));
    t_ok(net.model, ms_eval(net.model, &of->losses[0]));
    live_with_sizes(&net, of);
    live_with_budgets(&net, of);
    of->values = cn_get_values(&net);
    cn_destroy(&net);
}

static void a_whole_life_gives_the_numbers_of_the_cpu(void **state) {
    (void)state;
    cn_how how;
    range expected, found;
    bool passed = true;
    memset(&how, 0, sizeof how);
    how.clip = 0.2f;
    how.host_scale = true;
    live(&how, &expected);
    how.cuda = true;
    for (uint64_t seed = 0; seed < cn_seeds(50); seed++) {
        cn_reset(seed);
        live(&how, &found);
        cn_clean();
        passed &=
            same_values(&found.values, &expected.values, cn_tolerance(&how), "life", "all", seed);
        for (int i = 0; i < LIFE_LOSSES; i++) { // the sums have another order
            assert_true(fabs(found.losses[i] - expected.losses[i]) <= 1e-5 * expected.losses[i]);
        }
        for (int i = 0; i < CN_ROWS * CN_COLS; i++) {
            assert_true(fabsf(found.output[i] - expected.output[i]) <= 1e-5f);
        }
    }
    assert_true(passed);
}

// ------------------------------------------------------------------------------------------------
// an arena for two

/* Two models take turns, and the second has a budget of its own. */
static void take_turns(bool cuda, cn_values *first, cn_values *second) {
    cn_how how;
    cn_net a, b;
    t_heap heap;
    memset(&how, 0, sizeof how);
    memset(&heap, 0, sizeof heap);
    how.cuda = cuda;
    const ms_backend backend = cn_backend(&how);
    const ms_allocator allocator = t_heap_allocator(&heap);
    assert_int_equal(ms_arena_create(&backend, &allocator, &how.arena), MS_RESULT_OK);
    cn_start(&a, &how);
    how.smallest = true;
    how.clip = 0.05f;
    cn_start(&b, &how);
    for (uint64_t i = 0; i < STEPS; i++) {
        cn_steps(&a, 2 * i, 1 + i % 2);
        cn_steps(&b, 3 * i, 1 + i % 3);
    }
    const int64_t rows = CN_MOST_ROWS;
    a.rows = rows;
    t_ok(a.model, ms_reshape(a.model, &rows));
    cn_steps(&a, 50, 2);
    cn_steps(&b, 60, 1);
    *first = cn_get_values(&a);
    *second = cn_get_values(&b);
    cn_destroy(&a);
    cn_destroy(&b);
    ms_arena_destroy(how.arena);
    assert_int_equal(heap.live_count, 0);
}

static void models_take_turns_in_one_arena(void **state) {
    (void)state;
    cn_values first, second, a, b;
    const double tolerance = CN_IS_EMULATED ? 0.0 : 2e-5;
    take_turns(false, &first, &second);
    for (uint64_t seed = 0; seed < cn_seeds(50); seed++) {
        cn_reset(seed);
        take_turns(true, &a, &b);
        cn_clean();
        assert_true(same_values(&a, &first, tolerance, "arena", "first", seed));
        assert_true(same_values(&b, &second, tolerance, "arena", "second", seed));
    }
}

// ------------------------------------------------------------------------------------------------
// what waits, and what is allocated

#ifdef CUDART_EMULATION

/* Steps without a loss wait for nothing, and the loss is one wait. */
static void check_waits(cn_net *net) {
    const uint64_t calls = net->heap.calls;
    emulation_counts before, after;
    for (int i = 0; i < 6; i++) {
        double loss = 0.0;
        t_ok(net->model, cn_feed(net, 40));
        before = emulation_count();
        t_ok(net->model, ms_step(net->model, i % 2 ? &loss : NULL));
        after = emulation_count();
        assert_int_equal(after.host_waits - before.host_waits, i % 2 ? 1 : 0);
        assert_int_equal(after.device_allocations, before.device_allocations);
        assert_int_equal(after.pinned_allocations, before.pinned_allocations);
        assert_int_equal(after.events, before.events);
        assert_int_equal(after.graph_execs, before.graph_execs);
    }
    assert_int_equal(net->heap.calls, calls);
    t_ok(net->model, ms_synchronize(net->model));
}

/* Its clock stands still: the host runs ahead of the device by as many steps as it likes. */
static void check_lead(cn_net *net) {
    const uint64_t start = emulation_time_ns(), waits = emulation_count().host_waits;
    for (int i = 0; i < 20; i++) {
        t_ok(net->model, ms_step(net->model, NULL));
    }
    assert_int_equal(emulation_count().host_waits, waits);
    assert_true(emulation_time_ns() == start);
    t_ok(net->model, ms_synchronize(net->model));
    assert_true(emulation_time_ns() > start);
}

#endif

static void the_host_waits_only_where_it_must(void **state) {
    (void)state;
    CN_SKIP_ON_GPU();
#ifdef CUDART_EMULATION
    cn_net net;
    cn_how how;
    for (int i = 0; i < 8; i++) {
        memset(&how, 0, sizeof how);
        how.cuda = true;
        how.clip = i & 1 ? 0.1f : 0.0f;
        how.graph = (i & 2) != 0;
        how.smallest = (i & 4) != 0;
        cn_reset((uint64_t)i + 1);
        cn_start(&net, &how);
        cn_steps(&net, 0, 3);
        check_waits(&net);
        check_lead(&net);
        cn_destroy(&net);
        cn_clean();
    }
#endif
}

/* Kernels of the library by their names: none more than the program asks for. */
static void no_kernel_is_launched_beyond_the_program(void **state) {
    (void)state;
    CN_SKIP_ON_GPU();
#ifdef CUDART_EMULATION
    cn_net net;
    cn_how how;
    memset(&how, 0, sizeof how);
    how.cuda = true;
    how.clip = 0.1f;
    cn_reset(3);
    cn_start(&net, &how);
    cn_steps(&net, 0, 3);
    emulation_finish();
    static const char *const kernels[] = {"msi_k_adamw",  "msi_k_sum",  "msi_k_add_partials",
                                          "msi_k_loss",   "msi_k_clip", "msi_k_fill_f32",
                                          "msi_k_upload", "cn_k_layer", "msi_k_elements"};
    const uint64_t expected[] = {CN_PARAMS, CN_PARAMS + 1, CN_PARAMS, 1, 1, 1, 2, 2 * net.op_count};
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        const uint64_t launches = emulation_launches(kernels[i]);
        if (i < sizeof expected / sizeof expected[0]) {
            const uint64_t once = strcmp(kernels[i], "msi_k_upload") == 0; // no loss scale
            assert_int_equal(launches, 3 * expected[i] + once);
        }
        sum += launches;
    }
    assert_int_equal(sum, emulation_launches(NULL));
    cn_destroy(&net);
    cn_clean();
#endif
}

// ------------------------------------------------------------------------------------------------
// a step whose loss or norm is no number

typedef enum trouble { TROUBLE_LOSS, TROUBLE_NORM } trouble;

/* Feeds a batch that spoils the loss, or the gradients alone. */
static ms_result feed_trouble(cn_net *net, trouble what, uint64_t number) {
    const float infinite = INFINITY;
    float x[CN_MOST_ROWS * CN_COLS];
    ms_result result = cn_feed(net, number);
    if (result == MS_RESULT_OK && what == TROUBLE_NORM) {
        return ms_write(net->model, net->spoil, &infinite);
    }
    memset(x, 0, sizeof x);
    x[7] = NAN;
    return result == MS_RESULT_OK ? ms_write(net->model, net->x, x) : result;
}

typedef struct trouble_case {
    const char *name;
    cn_how how;
    trouble what;
} trouble_case;

enum { TROUBLES = 8 };

static void make_troubles(trouble_case *cases) {
    static const char *const names[TROUBLES] = {"loss",
                                                "loss, clipped",
                                                "norm",
                                                "loss, accumulated",
                                                "norm, in graphs",
                                                "loss, in graphs, accumulated",
                                                "loss, own update",
                                                "norm, accumulated"};
    memset(cases, 0, TROUBLES * sizeof *cases);
    for (int i = 0; i < TROUBLES; i++) {
        cases[i].name = names[i];
        cases[i].how.cuda = true;
        cases[i].how.stateless = true; // a running mean would keep the NaN
        cases[i].how.smallest = i % 2 != 0;
    }
    cases[1].how.clip = cases[2].how.clip = cases[4].how.clip = cases[7].how.clip = 0.1f;
    cases[2].what = cases[4].what = cases[7].what = TROUBLE_NORM;
    cases[3].how.micro_count = cases[5].how.micro_count = cases[7].how.micro_count = 2;
    cases[4].how.graph = cases[5].how.graph = true;
    cases[6].how.optimizer = MS_OPTIMIZER_CUSTOM;
}

static void run_micros(cn_net *net, uint64_t first, uint64_t steps) {
    const uint64_t micros = net->how.micro_count ? net->how.micro_count : 1;
    for (uint64_t i = first * micros; i < (first + steps) * micros; i++) {
        t_ok(net->model, cn_step(net, i, NULL));
    }
}

/* Three good steps, a bad one, others after it, and the report. later: how many are enqueued before
   somebody looks; -1: ms_step(&loss) of the bad one is where it shows. */
static void run_trouble(const trouble_case *c, int later, cn_values *before, cn_values *after) {
    cn_net net;
    char text[64];
    double loss = 0.0;
    cn_start(&net, &c->how);
    run_micros(&net, 0, 3);
    *before = cn_get_values(&net);
    const uint64_t micros = c->how.micro_count ? c->how.micro_count : 1;
    ms_result result = feed_trouble(&net, c->what, 90);
    const bool in_time = later < 0 && micros == 1;
    result = result == MS_RESULT_OK ? ms_step(net.model, in_time ? &loss : NULL) : result;
    for (uint64_t i = 0; i < (uint64_t)(later < 0 ? 0 : later) + micros - 1; i++) {
        result = result == MS_RESULT_OK ? cn_step(&net, 91 + i, NULL) : result;
    }
    if (result == MS_RESULT_OK) {
        result = later == 2 ? ms_step(net.model, &loss) : ms_synchronize(net.model);
    }
    assert_int_equal(result, MS_RESULT_NONFINITE);
    snprintf(text, sizeof text, "%s of step 3 is",
             c->what == TROUBLE_LOSS ? "the loss" : "the norm of the gradients");
    t_text_has(ms_last_error(net.model), text);
    t_text_has(ms_last_error(net.model), "nothing was updated");
    t_ok(net.model, ms_synchronize(net.model)); // it was told once
    const cn_values kept = cn_get_values(&net);
    assert_true(same_values(&kept, before, 0.0, c->name, "kept", (uint64_t)(later + 1)));
    run_micros(&net, 3, 3);
    if (!c->how.graph) {                      // a replay calls nobody
        assert_int_equal(net.ops[0].step, 5); // three before, and the third of these
    }
    *after = cn_get_values(&net);
    cn_destroy(&net);
}

static void a_loss_that_is_not_finite_halts_the_step(void **state) {
    (void)state;
    trouble_case cases[TROUBLES];
    make_troubles(cases);
    for (int i = 0; i < TROUBLES; i++) {
        const uint64_t micros = cases[i].how.micro_count ? cases[i].how.micro_count : 1;
        cn_reset(1);
        const cn_values undisturbed = cn_trained(&cases[i].how, 6 * micros);
        for (uint64_t seed = 0; seed < cn_seeds(12); seed++) {
            for (int later = -1; later < 4; later++) {
                cn_values before, after;
                cn_reset(seed);
                run_trouble(&cases[i], later, &before, &after);
                cn_clean();
                assert_true(same_values(&after, &undisturbed, 0.0, cases[i].name, "after", seed));
            }
        }
    }
}

/* An eval tells of its own loss, and does not halt the training. */
static void an_eval_that_is_not_finite_halts_nothing(void **state) {
    (void)state;
    cn_how how;
    cn_net net;
    double loss = 0.0;
    memset(&how, 0, sizeof how);
    how.cuda = true;
    how.stateless = true;
    for (uint64_t seed = 0; seed < cn_seeds(12); seed++) {
        cn_reset(seed);
        const cn_values expected = cn_trained(&how, 4);
        cn_start(&net, &how);
        cn_steps(&net, 0, 2);
        t_ok(net.model, feed_trouble(&net, TROUBLE_LOSS, 90));
        if (seed % 2 != 0) {
            t_error(net.model, ms_eval(net.model, &loss), MS_RESULT_NONFINITE);
        } else {
            t_ok(net.model, ms_eval(net.model, NULL));
            t_error(net.model, ms_synchronize(net.model), MS_RESULT_NONFINITE);
        }
        cn_steps(&net, 2, 2);
        t_ok(net.model, ms_synchronize(net.model));
        const cn_values values = cn_get_values(&net);
        assert_true(same_values(&values, &expected, 0.0, "eval", "training", seed));
        cn_destroy(&net);
        cn_clean();
    }
}

/* A bad step of three calls without a loss, and what the host does before it asks. */
static ms_result bad_step_in_calls(cn_net *net, int what) {
    const int64_t rows = CN_ROWS;
    t_ok(net->model, feed_trouble(net, TROUBLE_LOSS, 90));
    t_ok(net->model, ms_forward(net->model, NULL));
    t_ok(net->model, ms_backward(net->model));
    t_ok(net->model, ms_update(net->model));
    switch (what) {
    case 1:
        return ms_wrap(net->model);
    case 2:
        return ms_detach(net->model);
    case 3:
        return ms_reshape(net->model, &rows);
    case 4:
        return cn_step(net, 91, NULL);
    default:
        return MS_RESULT_OK;
    }
}

/* The report comes from what the host does, or from ms_synchronize after it. */
static void what_is_not_finite_is_told_by_the_next_wait(void **state) {
    (void)state;
    cn_how how;
    cn_net net;
    memset(&how, 0, sizeof how);
    how.cuda = true;
    how.stateless = true;
    cn_reset(1);
    const cn_values expected = cn_trained(&how, 4);
    for (uint64_t seed = 0; seed < cn_seeds(12); seed++) {
        for (int what = 0; what < 5; what++) {
            cn_reset(seed);
            cn_start(&net, &how);
            cn_steps(&net, 0, 2);
            ms_result result = bad_step_in_calls(&net, what);
            result = result == MS_RESULT_OK ? ms_synchronize(net.model) : result;
            if (result != MS_RESULT_NONFINITE) {
                print_error("case %d, seed %u: %s\n", what, (unsigned)seed, ms_result_name(result));
            }
            assert_int_equal(result, MS_RESULT_NONFINITE);
            t_text_has(ms_last_error(net.model), "the loss of step 2 is");
            if (what == 1 || what == 2) { // the plan is the old one, or the new one
                t_ok(net.model, ms_wrap(net.model));
            }
            cn_steps(&net, 2, 2);
            const cn_values values = cn_get_values(&net);
            assert_true(same_values(&values, &expected, 0.0, "calls", "training", seed));
            cn_destroy(&net);
            cn_clean();
        }
    }
}

// ------------------------------------------------------------------------------------------------
// the caller's stream and device

static __global__ void k_fill_input(float *x, int64_t count, float value) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        x[i] = value + 0.01f * (float)i;
    }
}

/* The host program writes the batch by a kernel of its own, and takes a param by a copy, without a
   wait in between. */
static void step_with_host(cn_net *net, cudaStream_t stream, float value, float *copy) {
    const uint64_t count = cn_count(net, net->x);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(2);
    config.blockDim = dim3(32);
    config.stream = stream;
    assert_int_equal(cudaLaunchKernelEx(&config, k_fill_input, (float *)ms_data(net->model, net->x),
                                        (int64_t)count, value),
                     cudaSuccess);
    t_ok(net->model, ms_step(net->model, NULL));
    assert_int_equal(cudaMemcpyAsync(copy, ms_data(net->model, net->param[1]),
                                     CN_COLS * CN_COLS * sizeof(float), cudaMemcpyDeviceToDevice,
                                     stream),
                     cudaSuccess);
}

static void use_stream(cudaStream_t stream, cn_values *values, float *copies) {
    cn_how how;
    cn_net net;
    float *copy = NULL;
    memset(&how, 0, sizeof how);
    how.cuda = true;
    how.stream = stream;
    cn_start(&net, &how);
    assert_int_equal(cudaMalloc((void **)&copy, 4 * CN_COLS * CN_COLS * sizeof(float)),
                     cudaSuccess);
    assert_true(!stream || ms_stream(net.model) == (void *)stream);
    assert_non_null(ms_stream(net.model));
    t_ok(net.model, cn_feed(&net, 0));
    for (int i = 0; i < 4; i++) {
        step_with_host(&net, (cudaStream_t)ms_stream(net.model), 0.1f * (float)i,
                       copy + i * CN_COLS * CN_COLS);
    }
    *values = cn_get_values(&net);
    assert_int_equal(
        cudaMemcpy(copies, copy, 4 * CN_COLS * CN_COLS * sizeof(float), cudaMemcpyDeviceToHost),
        cudaSuccess);
    assert_int_equal(cudaFree(copy), cudaSuccess);
    cn_destroy(&net);
}

static void the_streams_of_the_caller_are_used_in_order(void **state) {
    (void)state;
    cn_values expected, values;
    float first[4 * CN_COLS * CN_COLS], copies[4 * CN_COLS * CN_COLS];
    cn_reset(0);
    use_stream(NULL, &expected, first);
    assert_memory_not_equal(first, first + CN_COLS * CN_COLS, CN_COLS * CN_COLS * sizeof(float));
    for (uint64_t seed = 0; seed < cn_seeds(20); seed++) {
        for (int kind = 0; kind < 4; kind++) {
            cudaStream_t stream = NULL;
            cn_reset(seed);
            if (kind == 1 || kind == 2) {
                assert_int_equal(cudaStreamCreateWithFlags(&stream, kind == 1
                                                                        ? cudaStreamNonBlocking
                                                                        : cudaStreamDefault),
                                 cudaSuccess);
            } else if (kind == 3) {
                stream = cudaStreamLegacy;
            }
            use_stream(stream, &values, copies);
            assert_true(same_values(&values, &expected, 0.0, "stream", "kind", seed));
            assert_memory_equal(copies, first, sizeof first);
            if (kind == 1 || kind == 2) { // it is the caller's still
                assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
                assert_int_equal(cudaStreamDestroy(stream), cudaSuccess);
            }
            cn_clean();
        }
    }
}

/* A model on the second device leaves the current one as it was. */
static void the_current_device_stays_current(void **state) {
    (void)state;
    int count = 0, current = -1;
    cn_reset(1);
#ifdef CUDART_EMULATION
    emulation_device two = emulation_get_device();
    two.count = 2;
    emulation_set_device(&two);
#endif
    assert_int_equal(cudaGetDeviceCount(&count), cudaSuccess);
    if (count < 2) {
        print_message("this machine has one device\n");
        skip();
    }
    cn_how how;
    cn_net net;
    memset(&how, 0, sizeof how);
    how.cuda = true;
    how.by_gemm = true;
    how.clip = 0.1f;
    const ms_backend second = ms_backend_cuda(1);
    how.backend = &second;
    cn_start(&net, &how);
    for (uint64_t i = 0; i < 3; i++) {
        t_ok(net.model, cn_step(&net, i, NULL));
        assert_int_equal(cudaGetDevice(&current), cudaSuccess);
        assert_int_equal(current, 0);
    }
    (void)cn_get_values(&net);
    ms_hardware hardware;
    t_ok(net.model, ms_hardware_report(net.model, &hardware));
    cn_destroy(&net);
    assert_int_equal(cudaGetDevice(&current), cudaSuccess);
    assert_int_equal(current, 0);
    cn_clean();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(training_gives_the_numbers_of_the_cpu),
        cmocka_unit_test(a_whole_life_gives_the_numbers_of_the_cpu),
        cmocka_unit_test(models_take_turns_in_one_arena),
        cmocka_unit_test(the_host_waits_only_where_it_must),
        cmocka_unit_test(no_kernel_is_launched_beyond_the_program),
        cmocka_unit_test(a_loss_that_is_not_finite_halts_the_step),
        cmocka_unit_test(an_eval_that_is_not_finite_halts_nothing),
        cmocka_unit_test(what_is_not_finite_is_told_by_the_next_wait),
        cmocka_unit_test(the_streams_of_the_caller_are_used_in_order),
        cmocka_unit_test(the_current_device_stays_current),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
