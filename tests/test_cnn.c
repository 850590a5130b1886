/*  test_cnn.c - the trainer of examples/cnn.c and what its layers share: running statistics against
    a reference in float64 and against recomputation, any number of threads, any batch, and what a
    small net learns. On the CPU, or with T_CUDA on the CUDA device, true or emulated. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"

int cnn_main(int argc, char **argv);
#define main cnn_main
#include "cnn.c"
#undef main
#include "testing.h"
#include "testing_nn.h"
#include "orders.h"

// ------------------------------------------------------------------------------------------------
// running statistics: one batch normalization on an input

enum { R_BATCH = 3, R_CHANNELS = 5, R_PLANE = 24, R_COUNT = R_BATCH * R_CHANNELS * R_PLANE };

typedef struct r_run {
    ms_model *model;
    nn_net *net;
    ms_tensor x, y;
    double mean[R_CHANNELS], variance[R_CHANNELS]; // the reference
    float values[R_COUNT];
} r_run;

static void r_start(r_run *r) {
    ms_config config = t_device_config();
    config.debug = true;
    memset(r, 0, sizeof *r);
    assert_int_equal(ms_create(&config, &r->model), MS_RESULT_OK);
    r->net = nn_create_on(r->model, t_nn_device());
    assert_non_null(r->net);
    r->x = ms_input(r->model, "x", MS_DTYPE_F32, ms_shape4(R_BATCH, R_CHANNELS, 4, 6));
    r->y = nn_batch_norm(r->net, "norm", r->x);
    ms_add_output(r->model, r->y);
    ms_set_loss(r->model, r->y);
    t_ok(r->model, ms_wrap(r->model));
    t_ok(r->model, nn_init(r->net, 1));
    for (int c = 0; c < R_CHANNELS; c++) {
        r->variance[c] = 1.0;
    }
}

static int r_at(int channel, int i) {
    return (i / R_PLANE * R_CHANNELS + channel) * R_PLANE + i % R_PLANE;
}

/* A batch whose channels differ in mean and spread, and what it makes of the statistics. */
static void r_write_batch(r_run *r, uint64_t seed) {
    const int count = R_BATCH * R_PLANE;
    t_rng rng = t_seed(seed);
    t_fill(&rng, r->values, R_COUNT, 1.0f);
    for (int c = 0; c < R_CHANNELS; c++) {
        double mean = 0.0;
        double squares = 0.0;
        for (int i = 0; i < count; i++) {
            float *value = &r->values[r_at(c, i)];
            *value = *value * (float)(c + 1) + 3.0f - (float)c + 0.1f * (float)(seed % 7);
            mean += (double)*value / count;
        }
        for (int i = 0; i < count; i++) {
            const double off = (double)r->values[r_at(c, i)] - mean;
            squares += off * off;
        }
        r->mean[c] = 0.9 * r->mean[c] + 0.1 * mean;
        r->variance[c] = 0.9 * r->variance[c] + 0.1 * squares / (count - 1);
    }
    t_ok(r->model, ms_write(r->model, r->x, r->values));
}

static void r_compare(r_run *r, const char *name, const double *expected) {
    float values[R_CHANNELS];
    const nn_param_info *info = nn_find_buffer(r->net, name);
    assert_non_null(info);
    t_ok(r->model, ms_read(r->model, info->tensor, values));
    for (int c = 0; c < R_CHANNELS; c++) {
        if (!(fabs((double)values[c] - expected[c]) <= 2e-6 * (1.0 + fabs(expected[c])))) {
            print_error("%s[%d] is %.9g, expected %.9g\n", name, c, (double)values[c], expected[c]);
            fail();
        }
    }
}

/* Initial values, several steps, and ms_eval, which normalises by the statistics and leaves them
   alone. */
static void running_statistics_match_float64(void **state) {
    (void)state;
    r_run r;
    float weight[R_CHANNELS];
    float bias[R_CHANNELS];
    float y[R_COUNT];
    r_start(&r);
    r_compare(&r, "norm.mean", r.mean);
    r_compare(&r, "norm.variance", r.variance);
    for (uint64_t step = 0; step < 6; step++) {
        r_write_batch(&r, 20 + step);
        t_ok(r.model, ms_step(r.model, NULL));
        r_compare(&r, "norm.mean", r.mean);
        r_compare(&r, "norm.variance", r.variance);
    }
    t_ok(r.model, ms_eval(r.model, NULL));
    t_ok(r.model, ms_read(r.model, r.y, y));
    r_compare(&r, "norm.mean", r.mean);
    r_compare(&r, "norm.variance", r.variance);
    t_ok(r.model, ms_read(r.model, nn_find_param(r.net, "norm.weight")->tensor, weight));
    t_ok(r.model, ms_read(r.model, nn_find_param(r.net, "norm.bias")->tensor, bias));
    for (int i = 0; i < R_COUNT; i++) {
        const int c = i / R_PLANE % R_CHANNELS;
        const double normal = ((double)r.values[i] - r.mean[c]) / sqrt(r.variance[c] + 1e-5);
        const double expected = normal * (double)weight[c] + (double)bias[c];
        assert_true(fabs((double)y[i] - expected) <= 1e-5 * (1.0 + fabs(expected)));
    }
    assert_int_equal(nn_buffer_count(r.net), 2);
    assert_null(nn_buffer_at(r.net, 2));
    ms_destroy(r.model);
    nn_destroy(r.net);
}

// ------------------------------------------------------------------------------------------------
// the trainer's net

/* The options of a small net; arguments as on the command line, separated by spaces. */
static void k_options(settings *o, const char *arguments) {
    char text[256];
    char *argv[32] = {NULL};
    char name[] = "cnn";
    int argc = 1;
    argv[0] = name;
    snprintf(text, sizeof text, "--device %s --batch 6 --width 4 %s", t_nn_device()->name,
             arguments);
    for (char *word = strtok(text, " "); word != NULL; word = strtok(NULL, " ")) {
        assert_in_range(argc, 1, 30);
        argv[argc++] = word;
    }
    assert_int_equal(parse_options(o, argc, argv), 0);
}

static void k_trainer(trainer *t, const char *arguments) {
    memset(t, 0, sizeof *t);
    k_options(&t->options, arguments);
    t->random = 5;
    assert_int_equal(allocate_batch(t), 0);
}

static uint64_t k_smallest(const settings *o) {
    classifier c;
    uint64_t smallest = 0;
    memset(&c, 0, sizeof c);
    assert_int_equal(make_net(&c, o, UINT64_MAX, true), 0);
    t_ok(c.model, ms_smallest_budget(c.model, &smallest));
    free_net(&c);
    return smallest;
}

/* Of normalizations; on a GPU, whose kernels have other scratch memory, of any layer: the smallest
   plan there has no use for these. */
static void k_count_recomputations(const ms_event *event, void *user) {
#ifdef T_CUDA
    const char *const name = "";
#else
    const char *const name = "norm";
#endif
    int *count = (int *)user;
    *count += event->kind == MS_EVENT_RECOMPUTE && strstr(event->name, name) != NULL;
}

/* Several steps with the smallest arena and with all the memory: losses, params and running
   statistics bit for bit, though normalizations were recomputed. */
static void the_smallest_budget_changes_no_bit(void **state) {
    (void)state;
    const char *const arguments[] = {"--check --steps 5", "--check --steps 4 --clip 0.5",
                                     "--check --steps 3 --accumulate 2"};
    int recomputed = 0;
    for (size_t i = 0; i < sizeof arguments / sizeof arguments[0]; i++) {
        trainer t;
        ms_memory_report report;
        k_trainer(&t, arguments[i]);
        assert_int_equal(make_net(&t.trained, &t.options, k_smallest(&t.options), false), 0);
        assert_int_equal(make_net(&t.plain, &t.options, UINT64_MAX, false), 0);
        assert_int_equal(start_net(&t, &t.trained), 0);
        assert_int_equal(start_net(&t, &t.plain), 0);
        t_report(t.trained.model, &report);
        t_ok(t.trained.model, ms_visit_events(t.trained.model, MS_PROGRAM_TRAIN,
                                              k_count_recomputations, &recomputed));
        assert_true(report.arena_bytes < report.plain_bytes);
        for (int64_t step = 0; step < t.options.steps; step++) {
            assert_int_equal(train_step(&t, step), 0);
        }
        assert_int_equal(check_values(&t), 0);
        free_trainer(&t);
    }
    assert_true(recomputed > 0);
}

/* Plans that move values, from large arenas to the smallest: each wait is needed. */
static void every_wait_of_a_plan_that_moves_values_matters(void **state) {
    (void)state;
    const char *const arguments[] = {"--offload on", "--offload on --clip 0.5",
                                     "--offload on --accumulate 2"};
    o_tally tally = {{0}, {0}};
    for (size_t i = 0; i < sizeof arguments / sizeof arguments[0]; i++) {
        settings o;
        classifier c;
        ms_memory_report report;
        memset(&c, 0, sizeof c);
        k_options(&o, arguments[i]);
        const uint64_t smallest = k_smallest(&o);
        assert_int_equal(make_net(&c, &o, UINT64_MAX, false), 0);
        t_report(c.model, &report);
        for (uint64_t fifths = 0; fifths < 4; fifths++) {
            ms_set_budget(c.model, smallest + (report.plain_bytes - smallest) * fifths / 5);
            t_ok(c.model, ms_wrap(c.model));
            o_expect_ordered(c.model, arguments[i]);
            o_leave_out_each(c.model, &tally);
        }
        free_net(&c);
    }
    o_expect_needed(&tally);
}

static ms_dtype k_dtype = MS_DTYPE_F32; // of values and params

/* A net of the trainer for this batch, on t_gemm; SGD, so that its state can be copied. */
static void k_start(classifier *c, const settings *o, bool debug, bool graph) {
    ms_config config = t_device_config();
    ms_optimizer_desc sgd;
    memset(&sgd, 0, sizeof sgd);
    memset(c, 0, sizeof *c);
    sgd.kind = MS_OPTIMIZER_SGD;
    sgd.learning_rate = 0.1f;
    if (t_on_cpu && k_dtype == MS_DTYPE_F32) {
        config.backend = ms_backend_cpu();
        config.backend.gemm = t_gemm;
    }
    if (k_dtype != MS_DTYPE_F32) {
        config.mixed_dtype = k_dtype;
        config.mixed_precision = MS_SWITCH_ON;
    }
    config.debug = debug;
    config.cuda_graph = graph;
    config.seed = 4;
    assert_int_equal(ms_create(&config, &c->model), MS_RESULT_OK);
    c->net = nn_create_on(c->model, t_nn_device());
    assert_non_null(c->net);
    nn_force_half(c->net, k_dtype != MS_DTYPE_F32);
    build_net(c, o);
    ms_set_optimizer(c->model, &sgd);
    t_ok(c->model, ms_wrap(c->model));
    assert_int_equal(t_is_half(c->model), k_dtype != MS_DTYPE_F32);
    t_ok(c->model, nn_init(c->net, 1));
}

static void k_step(trainer *t, classifier *c) {
    t_ok(c->model, ms_write(c->model, c->images, t->images));
    t_ok(c->model, ms_write(c->model, c->labels, t->labels));
    t_ok(c->model, ms_step(c->model, NULL));
}

static void threads_change_no_bit(void **state) {
    (void)state;
#ifndef _OPENMP
    if (t_on_cpu) {
        skip(); // a GPU has to give the same bits again
    }
#endif
    trainer t;
    k_trainer(&t, "--batch 8");
    for (int threads = 1; threads <= 2; threads++) {
        classifier *c = threads == 1 ? &t.trained : &t.plain;
        t_threads(threads);
        k_start(c, &t.options, false, false);
        t.random = 5;
        for (int step = 0; step < 2; step++) {
            draw_batch(&t);
            k_step(&t, c);
        }
    }
    t_threads(1); // the tests that follow are too small for more
    assert_int_equal(check_values(&t), 0);
    free_trainer(&t);
}

/* Steps replayed from a graph, with the dropout of each, and steps that are enqueued. */
static void a_graph_changes_no_bit(void **state) {
    (void)state;
    trainer t;
    if (t_on_cpu) {
        skip();
    }
    k_trainer(&t, "--batch 3");
    for (int graph = 0; graph < 2; graph++) {
        classifier *c = graph != 0 ? &t.trained : &t.plain;
        k_start(c, &t.options, false, graph != 0);
        t.random = 5;
        for (int step = 0; step < 4; step++) {
            draw_batch(&t);
            k_step(&t, c);
        }
    }
    assert_int_equal(check_values(&t), 0);
    free_trainer(&t);
}

/* A net that is reshaped against one that is made for that batch, from the same values, with the
   checks of debug mode. Dropout draws by the number of the step: each net makes its first. */
static void a_reshaped_net_gives_the_bits_of_a_fresh_one(void **state) {
    (void)state;
    const int64_t sizes[] = {2, 5, 1};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        trainer t;
        settings smaller;
        k_trainer(&t, "--batch 5 --width 2");
        smaller = t.options;
        smaller.batch = sizes[i];
        k_start(&t.trained, &t.options, true, false);
        k_start(&t.plain, &smaller, true, false);
        draw_batch(&t);
        t_ok(t.trained.model, ms_reshape(t.trained.model, &sizes[i]));
        k_step(&t, &t.trained);
        k_step(&t, &t.plain);
        assert_int_equal(check_values(&t), 0);
        t_ok(t.trained.model, ms_reshape(t.trained.model, &t.options.batch));
        k_step(&t, &t.trained);
        free_trainer(&t);
    }
}

/* In 16 bits, debug mode finds nothing to say, and changes no bit. */
static void debug_mode_changes_no_bit_in_16_bits(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        trainer t;
        k_dtype = i == 0 ? MS_DTYPE_BF16 : MS_DTYPE_F16;
        k_trainer(&t, "--batch 3 --width 2");
        k_start(&t.trained, &t.options, true, false);
        k_start(&t.plain, &t.options, false, false);
        for (int step = 0; step < 2; step++) {
            draw_batch(&t);
            k_step(&t, &t.trained);
            k_step(&t, &t.plain);
        }
        assert_int_equal(check_values(&t), 0);
        free_trainer(&t);
    }
    k_dtype = MS_DTYPE_F32;
}

/* Kaiming's deviation; zeros and ones for the running statistics. */
static void initial_values_are_those_of_kaiming(void **state) {
    (void)state;
    trainer t;
    k_trainer(&t, "--width 16");
    k_start(&t.trained, &t.options, false, false);
    const nn_param_info *info = nn_find_param(t.trained.net, "b2.conv2.weight");
    assert_non_null(info);
    const size_t count = (size_t)ms_shape_count(&info->shape);
    assert_int_equal(count, 64 * 64 * 9);
    float *values = (float *)malloc(count * sizeof *values);
    assert_non_null(values);
    double squares = 0.0;
    t_ok(t.trained.model, ms_read(t.trained.model, info->tensor, values));
    for (size_t i = 0; i < count; i++) {
        squares += (double)values[i] * (double)values[i] / (double)count;
    }
    assert_true(fabs(sqrt(squares) / sqrt(2.0 / 576.0) - 1.0) < 0.02);
    assert_int_equal(nn_buffer_count(t.trained.net), 4 * BLOCKS);
    for (int64_t i = 0; i < nn_buffer_count(t.trained.net); i++) {
        const nn_param_info *buffer = nn_buffer_at(t.trained.net, i);
        const float expected = strstr(buffer->name, ".variance") != NULL ? 1.0f : 0.0f;
        t_ok(t.trained.model, ms_read(t.trained.model, buffer->tensor, values));
        assert_true(fabsf(values[0] - expected) < 1e-9f);
    }
    free(values);
    free_trainer(&t);
}

// ------------------------------------------------------------------------------------------------
// the program

/* The same image for the same number, another one for another seed; every class has pixels. */
static void images_depend_on_seed_and_number_alone(void **state) {
    (void)state;
    float a[PIXELS];
    float b[PIXELS];
    for (uint64_t i = 0; i < 2 * CLASSES; i++) {
        assert_int_equal(draw_image(a, 1, i), i % CLASSES);
        assert_int_equal(draw_image(b, 1, i), i % CLASSES);
        assert_memory_equal(a, b, sizeof a);
        assert_int_equal(draw_image(b, 2, i), i % CLASSES);
        assert_true(memcmp(a, b, sizeof a) != 0);
    }
    for (int label = 0; label < CLASSES; label++) {
        int covered = 0;
        for (int i = 0; i < 40 * 40; i++) {
            covered += in_shape(label, (i % 40 - 19.5) / 18.0, (i / 40 - 19.5) / 18.0);
            assert_false(in_shape(label, 1.3, (i / 40 - 19.5) / 10.0));
        }
        assert_in_range(covered, 150, 900);
    }
}

static void k_expect_options(const char *option, const char *value, bool good) {
    settings o;
    char text[2][32];
    char name[] = "cnn";
    char *argv[4] = {name, text[0], text[1], NULL};
    snprintf(text[0], sizeof text[0], "%s", option);
    snprintf(text[1], sizeof text[1], "%s", value != NULL ? value : "");
    if (value == NULL) {
        argv[2] = NULL;
    }
    assert_int_equal(parse_options(&o, value != NULL ? 3 : 2, argv), good ? 0 : 1);
    assert_true(good || cnn_main(value != NULL ? 3 : 2, argv) == 2);
}

static void wrong_options_are_refused(void **state) {
    (void)state;
    k_expect_options("--budget", "1.5M", true);
    k_expect_options("--budget", "half", true);
    k_expect_options("--budget", "101%", false);
    k_expect_options("--budget", "0%", false);
    k_expect_options("--budget", "most", false);
    k_expect_options("--budget", NULL, false);
    k_expect_options("--steps", "10", true);
    k_expect_options("--steps", "1.5", false);
    k_expect_options("--steps", "0", false);
    k_expect_options("--clip", "0.25", true);
    k_expect_options("--clip", "-1", false);
    k_expect_options("--check", NULL, true);
    k_expect_options("--wings", "2", false);
}

/* Each kind of budget, of a model that is planned. */
static void a_budget_may_be_a_part_of_the_plain_arena(void **state) {
    (void)state;
    settings o;
    classifier c;
    ms_memory_report report;
    uint64_t bytes = 0;
    k_options(&o, "--budget 3M");
    const uint64_t smallest = k_smallest(&o);
    memset(&c, 0, sizeof c);
    assert_int_equal(make_net(&c, &o, UINT64_MAX, true), 0);
    t_report(c.model, &report);
    const uint64_t plain = report.plain_bytes;
    const struct {
        const char *option;
        uint64_t bytes;
    } budgets[] = {{"--budget 3M", 3 << 20},
                   {"--budget plain", plain},
                   {"--budget smallest", smallest},
                   {"--budget half", smallest + (plain - smallest) / 2},
                   {"--budget 50%", plain / 2},
                   {"--budget 12.5%", plain / 8},
                   {"--steps 3", smallest + (plain - smallest) / 2}};
    assert_true(smallest < plain);
    for (size_t i = 0; i < sizeof budgets / sizeof budgets[0]; i++) {
        k_options(&o, budgets[i].option);
        assert_true(has_budget(&o.budget));
        assert_int_equal(choose_bytes(&o.budget, c.model, &bytes), 0);
        assert_true(bytes == budgets[i].bytes);
    }
    free_net(&c);
}

/* A short run from end to end, in the smallest arena: far above the tenth that guessing gives. */
static void a_short_run_learns_in_the_smallest_arena(void **state) {
    (void)state;
    trainer t;
    memset(&t, 0, sizeof t);
    k_options(&t.options, "--batch 16 --width 8 --steps 60 --test 205 --budget smallest");
    assert_int_equal(run(&t), 0);
    assert_true(t.accuracy > 0.35);
    assert_true(t.loss < 2.0);
    free_trainer(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(running_statistics_match_float64),
        cmocka_unit_test(the_smallest_budget_changes_no_bit),
        cmocka_unit_test(every_wait_of_a_plan_that_moves_values_matters),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(a_graph_changes_no_bit),
        cmocka_unit_test(a_reshaped_net_gives_the_bits_of_a_fresh_one),
        cmocka_unit_test(debug_mode_changes_no_bit_in_16_bits),
        cmocka_unit_test(initial_values_are_those_of_kaiming),
        cmocka_unit_test(images_depend_on_seed_and_number_alone),
        cmocka_unit_test(wrong_options_are_refused),
        cmocka_unit_test(a_budget_may_be_a_part_of_the_plain_arena),
        cmocka_unit_test(a_short_run_learns_in_the_smallest_arena),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
