// examples/llmc_style.c: the gradients of its plain functions are right, the wrapped program makes
// the same bits as the plain one with every kind of plan, and the adapter is as short as promised.
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "private.h"
#include "testing.h"

int llmc_style_main(int argc, char **argv);
#define main llmc_style_main
#undef fail // the program has one with arguments
#include "../examples/llmc_style.c"
#define fail() _fail(__FILE__, __LINE__)
#undef main

// ------------------------------------------------------------------------------------------------
// gradients of the functions: against central differences of a weighted sum of the outputs; they
// are added to what the gradients held

enum { G_B = 2, G_T = 5, G_C = 12, G_NH = 3, G_OC = 7, G_V = 11 };
enum { G_ROWS = G_B * G_T, G_SIZE = G_ROWS * 3 * G_C, G_SCORES = G_B * G_NH * G_T * G_T };

static float x[G_SIZE], x2[G_SIZE], weight[G_SIZE], bias[G_SIZE], y[G_SIZE];
static float dx[G_SIZE], dx2[G_SIZE], dweight[G_SIZE], dbias[G_SIZE], dy[G_SIZE];
static float before[G_SIZE], kept[2][G_SIZE], scratch[2 * G_SCORES];
static int32_t ids[G_ROWS];

static void encoder_there(void) {
    encoder_forward(y, ids, weight, bias, G_B, G_T, G_C);
}

static void encoder_back(void) {
    encoder_backward(dweight, dbias, dy, ids, G_B, G_T, G_C);
}

static void layernorm_there(void) {
    layernorm_forward(y, kept[0], kept[1], x, weight, bias, G_B, G_T, G_C);
}

static void layernorm_back(void) {
    layernorm_backward(dx, dweight, dbias, dy, x, weight, kept[0], kept[1], G_B, G_T, G_C);
}

static void matmul_there(void) {
    matmul_forward(y, x, weight, bias, G_B, G_T, G_C, G_OC);
}

static void matmul_back(void) {
    matmul_backward(dx, dweight, dbias, dy, x, weight, G_B, G_T, G_C, G_OC);
}

static void head_there(void) {
    matmul_forward(y, x, weight, NULL, G_B, G_T, G_C, G_V);
}

static void head_back(void) {
    matmul_backward(dx, dweight, NULL, dy, x, weight, G_B, G_T, G_C, G_V);
}

static void attention_there(void) {
    attention_forward(y, kept[0], kept[1], x, G_B, G_T, G_C, G_NH);
}

static void attention_back(void) {
    memset(scratch, 0, sizeof scratch);
    attention_backward(dx, scratch, scratch + G_SCORES, dy, x, kept[1], G_B, G_T, G_C, G_NH);
}

static void gelu_there(void) {
    gelu_forward(y, x, G_ROWS * G_C);
}

static void gelu_back(void) {
    gelu_backward(dx, dy, x, G_ROWS * G_C);
}

static void residual_there(void) {
    residual_forward(y, x, x2, G_ROWS * G_C);
}

static void residual_back(void) {
    residual_backward(dx, dx2, dy, G_ROWS * G_C);
}

static void classifier_there(void) {
    classifier_forward(y, kept[0], x, ids, G_B, G_T, G_V);
}

static void classifier_back(void) {
    classifier_backward(dx, dy, kept[0], ids, G_B, G_T, G_V);
}

/* How many elements of each array an operation uses. */
typedef struct operation {
    const char *name;
    void (*there)(void);
    void (*back)(void);
    int x, x2, weight, bias, y;
} operation;

static const operation operations[] = {
    {"encoder", encoder_there, encoder_back, 0, 0, G_V *G_C, G_T *G_C, G_ROWS *G_C},
    {"layernorm", layernorm_there, layernorm_back, G_ROWS *G_C, 0, G_C, G_C, G_ROWS *G_C},
    {"matmul", matmul_there, matmul_back, G_ROWS *G_C, 0, G_OC *G_C, G_OC, G_ROWS *G_OC},
    {"head", head_there, head_back, G_ROWS *G_C, 0, G_V *G_C, 0, G_ROWS *G_V},
    {"attention", attention_there, attention_back, G_ROWS * 3 * G_C, 0, 0, 0, G_ROWS *G_C},
    {"gelu", gelu_there, gelu_back, G_ROWS *G_C, 0, 0, 0, G_ROWS *G_C},
    {"residual", residual_there, residual_back, G_ROWS *G_C, G_ROWS *G_C, 0, 0, G_ROWS *G_C},
    {"classifier", classifier_there, classifier_back, G_ROWS *G_V, 0, 0, 0, G_ROWS}};

static double weighted_sum(const operation *op) {
    double sum = 0.0;
    op->there();
    for (int i = 0; i < op->y; i++) {
        sum += (double)dy[i] * (double)y[i];
    }
    return sum;
}

static void check_differences(const operation *op, const char *which, float *values,
                              const float *gradient, int count) {
    for (int i = 0; i < count; i++) {
        const float middle = values[i];
        const float above = middle + 0.01f, below = middle - 0.01f;
        values[i] = above;
        double slope = weighted_sum(op);
        values[i] = below;
        slope = (slope - weighted_sum(op)) / ((double)above - (double)below);
        values[i] = middle;
        const double found = (double)gradient[i] - (double)before[i];
        if (!(fabs(found - slope) < 2e-3 * (1.0 + fabs(slope)))) {
            print_error("%s: gradient %d of %s is %g, but the slope %g\n", op->name, i, which,
                        found, slope);
            fail();
        }
    }
}

static void gradients_of_operations_are_slopes(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        const operation *op = &operations[i];
        t_rng rng = t_seed(i);
        float *const all[] = {x, x2, weight, bias, dy, before};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) {
            t_fill(&rng, all[k], G_SIZE, 1.0f);
        }
        for (int r = 0; r < G_ROWS; r++) {
            ids[r] = (int32_t)t_below(&rng, G_V);
        }
        memcpy(dx, before, sizeof before);
        memcpy(dx2, before, sizeof before);
        memcpy(dweight, before, sizeof before);
        memcpy(dbias, before, sizeof before);
        op->there();
        op->back();
        check_differences(op, "x", x, dx, op->x);
        check_differences(op, "x2", x2, dx2, op->x2);
        check_differences(op, "weight", weight, dweight, op->weight);
        check_differences(op, "bias", bias, dbias, op->bias);
    }
}

// ------------------------------------------------------------------------------------------------
// the plain program

static char text[TEXT_BYTES];
static const gpt2_config odd = {128, 13, 3, 3, 24, 3, 11}; // no power of two but the vocabulary
static const gpt2_config even = {128, 16, 2, 2, 32, 4, 16};

static void create(gpt2 *g, const gpt2_config *config) {
    uint64_t random = 7;
    write_text(text, 1);
    gpt2_create(g, config, 1);
    draw_batch(g, text, &random);
}

/* Slope of the loss along the gradient of these params, and the length of that gradient: equal. */
static double slope_along(gpt2 *g, int64_t first, int64_t last, double *length) {
    const size_t bytes = (size_t)(last - first) * sizeof(float);
    float *middle = (float *)malloc(bytes);
    double slope = 0.0;
    assert_non_null(middle);
    memcpy(middle, g->params_memory + first, bytes);
    *length = 0.0;
    for (int64_t i = first; i < last; i++) {
        *length += (double)g->grads_memory[i] * (double)g->grads_memory[i];
    }
    *length = sqrt(*length);
    for (int side = -1; side <= 1; side += 2) {
        for (int64_t i = first; i < last; i++) {
            const double unit = (double)g->grads_memory[i] / *length;
            g->params_memory[i] = (float)((double)middle[i - first] + 0.01 * side * unit);
        }
        gpt2_forward(g);
        slope += side * g->mean_loss / 0.02;
    }
    memcpy(g->params_memory + first, middle, bytes);
    free(middle);
    return slope;
}

static void the_gradient_of_the_model_is_its_slope(void **state) {
    (void)state;
    gpt2 g;
    create(&g, &odd);
    t_rng rng = t_seed(3);
    for (int64_t i = 0; i < g.param_count; i++) { // away from the zeros and ones of first values
        g.params_memory[i] += 0.2f * (float)(t_unit(&rng) - 0.5);
    }
    gpt2_forward(&g);
    gpt2_zero_grad(&g);
    gpt2_backward(&g);
    const gpt2_params *d = &g.grads;
    float *const starts[] = {d->wte,
                             d->wpe,
                             d->ln1w,
                             d->ln1b,
                             d->qkvw,
                             d->qkvb,
                             d->attprojw,
                             d->attprojb,
                             d->ln2w,
                             d->ln2b,
                             d->fcw,
                             d->fcb,
                             d->fcprojw,
                             d->fcprojb,
                             d->lnfw,
                             d->lnfb,
                             g.grads_memory + g.param_count};
    for (int k = 0; k < 16; k++) {
        double length;
        const double slope =
            slope_along(&g, starts[k] - g.grads_memory, starts[k + 1] - g.grads_memory, &length);
        if (!(length > 1e-3) || !(fabs(slope - length) < 1e-2 * length + 1e-4)) {
            print_error("param %d: the gradient has length %g, but the loss rises by %g\n", k,
                        length, slope);
            fail();
        }
    }
    gpt2_free(&g);
}

static void the_trainer_learns(void **state) {
    (void)state;
    gpt2 g;
    uint64_t random = 7;
    double first = 0.0;
    create(&g, &even);
    for (int step = 0; step < 80; step++) {
        draw_batch(&g, text, &random);
        gpt2_step(&g);
        first = step == 0 ? g.mean_loss : first;
    }
    assert_true(first > 4.5 && first < 5.2); // log(128) is 4.85
    assert_true(g.mean_loss < 3.0);
    gpt2_free(&g);
}

// ------------------------------------------------------------------------------------------------
// wrapped

enum { STEPS = 5 };

typedef struct trainer {
    gpt2 g;
    ms_model *model;
    uint64_t random;
    double losses[STEPS];
} trainer;

static void start(trainer *t, const gpt2_config *config, const ms_config *options) {
    memset(t, 0, sizeof *t);
    t->random = 7;
    create(&t->g, config);
    if (options) {
        assert_int_equal(ms_create(options, &t->model), MS_RESULT_OK);
        (void)register_gpt2(t->model, &t->g);
        t_ok(t->model, ms_wrap(t->model));
    }
}

static void stop(trainer *t) {
    ms_destroy(t->model);
    gpt2_free(&t->g);
}

static void step_plain(trainer *t) {
    draw_batch(&t->g, text, &t->random);
    gpt2_step(&t->g);
}

static void step_wrapped(trainer *t) {
    draw_batch(&t->g, text, &t->random);
    t_ok(t->model, ms_step(t->model, &t->g.mean_loss));
    t->g.step++;
}

static void train_all(trainer *t) {
    for (int i = 0; i < STEPS; i++) {
        if (t->model) {
            step_wrapped(t);
        } else {
            step_plain(t);
        }
        t->losses[i] = t->g.mean_loss;
    }
}

/* With -ffast-math sums are vectorized by the alignment of their operands, which the trainer's own
   memory and an arena give differently: there, numbers are about equal. */
static void check_floats(const float *a, const float *b, int64_t count) {
#ifdef __FAST_MATH__
    for (int64_t i = 0; i < count; i++) {
        assert_true(fabsf(a[i] - b[i]) <= 1e-2f);
    }
#else
    assert_memory_equal(a, b, (size_t)count * sizeof *a);
#endif
}

static void check_loss(double a, double b) {
#ifdef __FAST_MATH__
    assert_true(fabs(a - b) <= 1e-4 * fabs(a));
#else
    assert_memory_equal(&a, &b, sizeof a);
#endif
}

static void check_same(const trainer *a, const trainer *b) {
    for (int i = 0; i < STEPS; i++) {
        check_loss(a->losses[i], b->losses[i]);
    }
    check_floats(a->g.params_memory, b->g.params_memory, a->g.param_count);
    check_floats(a->g.m_memory, b->g.m_memory, a->g.param_count);
    check_floats(a->g.v_memory, b->g.v_memory, a->g.param_count);
}

/* Trains with a plan and compares; the report of that plan. */
static ms_memory_report check_plan(const trainer *plain, const ms_config *options) {
    trainer t;
    ms_memory_report report;
    start(&t, &plain->g.config, options);
    t_report(t.model, &report);
    report.peak_layer = ""; // belongs to the model
    train_all(&t);
    check_same(plain, &t);
    assert_null(t.g.acts_memory);
    assert_null(t.g.grads_memory);
    stop(&t);
    return report;
}

static uint64_t smallest_budget(const gpt2_config *config) {
    trainer t;
    uint64_t bytes = 0;
    ms_config options = t_config();
    options.dry_run = true;
    start(&t, config, &options);
    t_ok(t.model, ms_smallest_budget(t.model, &bytes));
    stop(&t);
    return bytes;
}

static void check_plans(const gpt2_config *config, bool debug) {
    trainer plain;
    ms_config options = t_config();
    start(&plain, config, NULL);
    train_all(&plain);
    options.debug = debug;
    const ms_memory_report wide = check_plan(&plain, &options);
    assert_int_equal(wide.recompute_count, 0);
    assert_int_equal(wide.arena_bytes, wide.plain_bytes);
    const uint64_t block_bytes = 2 * (uint64_t)plain.g.act_count * sizeof(float);
    assert_true(wide.activation_peak_bytes < block_bytes / 2);
    const uint64_t smallest = smallest_budget(config);
    assert_true(smallest < wide.plain_bytes);
    options.memory_budget_bytes = smallest + (wide.plain_bytes - smallest) / 2;
    const ms_memory_report half = check_plan(&plain, &options);
    assert_true(half.arena_bytes <= options.memory_budget_bytes);
    options.memory_budget_bytes = smallest;
    const ms_memory_report tight = check_plan(&plain, &options);
    assert_true(tight.arena_bytes <= smallest);
    assert_true(tight.recompute_count > half.recompute_count);
    assert_true(tight.activation_peak_bytes < half.activation_peak_bytes);
    options.early_update = MS_SWITCH_ON;
    options.memory_budget_bytes = wide.plain_bytes;
    assert_true(check_plan(&plain, &options).early_update);
    stop(&plain);
}

static void every_plan_gives_the_same_bits(void **state) {
    (void)state;
    check_plans(&even, false);
    check_plans(&odd, false);
}

static void debug_mode_passes_the_adapter(void **state) {
    (void)state;
    check_plans(&odd, true);
}

/* A loss that is not finite ends the step and changes nothing, whatever the compiler has been told
   of such numbers. */
static void a_loss_of_nan_changes_nothing(void **state) {
    (void)state;
    trainer t;
    const ms_config options = t_config();
    start(&t, &odd, &options);
    step_wrapped(&t);
    t.g.params_memory[0] = t.g.params_memory[1] =
        msi_f32_of_bits(0x7fc00000); // wte, the LM head too
    const size_t bytes = (size_t)t.g.param_count * sizeof(float);
    float *params = (float *)malloc(bytes);
    assert_non_null(params);
    memcpy(params, t.g.params_memory, bytes);
    draw_batch(&t.g, text, &t.random);
    t_error(t.model, ms_step(t.model, &t.g.mean_loss), MS_RESULT_NONFINITE);
    assert_memory_equal(params, t.g.params_memory, bytes);
    free(params);
    stop(&t);
}

/* Params are the trainer's, so it may step by itself in between, and change plans. */
static void the_trainer_may_step_by_itself_in_between(void **state) {
    (void)state;
    trainer plain, mixed;
    ms_config options = t_config();
    start(&plain, &odd, NULL);
    start(&mixed, &odd, &options);
    train_all(&plain);
    step_wrapped(&mixed);
    step_plain(&mixed);
    ms_set_budget(mixed.model, smallest_budget(&odd));
    t_ok(mixed.model, ms_wrap(mixed.model));
    step_wrapped(&mixed);
    step_plain(&mixed);
    t_ok(mixed.model, ms_detach(mixed.model));
    step_wrapped(&mixed);
    memcpy(mixed.losses, plain.losses, sizeof plain.losses); // those in between were not noted
    check_loss(mixed.g.mean_loss, plain.g.mean_loss);
    check_same(&plain, &mixed);
    stop(&plain);
    stop(&mixed);
}

static void an_eval_gives_the_loss_of_the_trainer(void **state) {
    (void)state;
    trainer t;
    double loss = 0.0;
    ms_config options = t_config();
    options.memory_budget_bytes = smallest_budget(&odd);
    start(&t, &odd, &options);
    train_all(&t);
    draw_batch(&t.g, text, &t.random);
    t_ok(t.model, ms_eval(t.model, &loss));
    gpt2_forward(&t.g);
    assert_memory_equal(&loss, &t.g.mean_loss, sizeof loss);
    stop(&t);
}

// ------------------------------------------------------------------------------------------------
// the program

static int call_main(const char *arguments) {
    char buffer[128];
    char *argv[16];
    char name[] = "llmc_style";
    int argc = 0;
    snprintf(buffer, sizeof buffer, "%s", arguments);
    argv[argc++] = name;
    for (char *word = strtok(buffer, " "); word && argc < 15; word = strtok(NULL, " ")) {
        argv[argc++] = word;
    }
    argv[argc] = NULL;
    return llmc_style_main(argc, argv);
}

static void the_program_runs_and_refuses(void **state) {
    (void)state;
#ifdef T_CUDA
    skip(); // its sampler takes the address of the probabilities, as programs of the CPU may
#endif
    assert_int_equal(call_main("--size tiny --steps 2"), 0);
    assert_int_equal(call_main("--size tiny --steps 2 --wrap"), 0);
    assert_int_equal(call_main("--size tiny --steps 2 --budget 300K"), 0);
    assert_int_equal(call_main("--size tiny --steps 3 --compare"), 0);
    assert_int_equal(call_main("--size tiny --steps 3 --compare --budget 300K"), 0);
    assert_int_equal(call_main("--size tiny --steps 1 --batch 1 --sequence 32"), 0);
    assert_int_equal(call_main("--size tiny --steps 2 --budget 1K"), 1);
    assert_int_equal(call_main("--size tiny --sequence 33"), 2);
    assert_int_equal(call_main("--size none"), 2);
    assert_int_equal(call_main("--steps 1.5"), 2);
    assert_int_equal(call_main("--budget"), 2);
}

static bool mentions_memscale(const char *line) {
    for (const char *at = strstr(line, "ms_"); at; at = strstr(at + 1, "ms_")) {
        if (at == line || strchr("abcdefghijklmnopqrstuvwxyz_", at[-1]) == NULL) {
            return true;
        }
    }
    return false;
}

/* The adapter has at most 130 lines, and what stands above it does not know memscale.h. */
static void the_adapter_is_short(void **state) {
    (void)state;
    static const char here[] = "tests/test_llmc_style.c", there[] = "examples/llmc_style.c";
    char path[512], line[256];
    const size_t root = strlen(__FILE__) - strlen(here);
    assert_string_equal(&__FILE__[root], here);
    snprintf(path, sizeof path, "%.*s%s", (int)root, __FILE__, there);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    int lines = 0, begins = 0, ends = 0;
    while (fgets(line, sizeof line, file)) {
        begins += strcmp(line, "// ==== adapter, begin\n") == 0;
        lines += begins > ends;
        ends += strcmp(line, "// ==== adapter, end\n") == 0;
        if (begins == 0 && mentions_memscale(line)) {
            print_error("the plain program mentions memscale.h: %s", line);
            fail();
        }
    }
    fclose(file);
    assert_int_equal(begins, 1);
    assert_int_equal(ends, 1);
    assert_in_range(lines, 60, 130);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_operations_are_slopes),
        cmocka_unit_test(the_gradient_of_the_model_is_its_slope),
        cmocka_unit_test(the_trainer_learns),
        cmocka_unit_test(every_plan_gives_the_same_bits),
        cmocka_unit_test(debug_mode_passes_the_adapter),
        cmocka_unit_test(a_loss_of_nan_changes_nothing),
        cmocka_unit_test(the_trainer_may_step_by_itself_in_between),
        cmocka_unit_test(an_eval_gives_the_loss_of_the_trainer),
        cmocka_unit_test(the_program_runs_and_refuses),
        cmocka_unit_test(the_adapter_is_short),
    };
    return cmocka_run_group_tests_name("llmc_style", tests, NULL, NULL);
}
