/*  test_cuda_trainers.c - whole training runs of small GPT-2s and BERTs on the CUDA backend, true or
    emulated: the same losses as on the CPU, the same bits under every budget, with a graph and
    without waiting; and the trainer of examples/bert.c from end to end on both. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"

int bert_main(int argc, char **argv);
#define main bert_main
#include "bert.c"
#undef main

#include "testing.h"
#include "testing_nn.h"

enum {
    K_STEPS = 6,
    K_BATCH = 2,
    K_SEQUENCE = 11,
    K_ROWS = K_BATCH * K_SEQUENCE,
    K_VOCABULARY = 43
};

// ------------------------------------------------------------------------------------------------
// training runs

/* How to train, and what came of it. */
typedef struct k_run {
    bool is_bert, on_cpu, smallest, graph, tf32, silent; // silent: only the last loss is read
    double losses[K_STEPS];
    float *params; // all of them, in their order
    size_t param_count;
    ms_memory_report report;
} k_run;

static k_run k_way(bool is_bert) {
    k_run r;
    memset(&r, 0, sizeof r);
    r.is_bert = is_bert;
    return r;
}

static nn_transformer_config k_shape(void) {
    nn_transformer_config shape;
    memset(&shape, 0, sizeof shape);
    shape.vocabulary = K_VOCABULARY;
    shape.context = 16;
    shape.layers = 3;
    shape.heads = 3;
    shape.channels = 24;
    shape.batch = K_BATCH;
    shape.sequence = K_SEQUENCE;
    shape.dropout = 0.1f;
    return shape;
}

/* Another batch for each step; a third of the positions are to be guessed, as many in each. */
static void k_write_batch(ms_model *model, const nn_transformer *built, int step) {
    t_rng rng = t_seed((uint64_t)step + 1);
    int32_t tokens[K_ROWS];
    int32_t targets[K_ROWS];
    int32_t segments[K_ROWS];
    for (int i = 0; i < K_ROWS; i++) {
        tokens[i] = (int32_t)t_below(&rng, K_VOCABULARY);
        targets[i] = (i + step) % 3 == 0 ? (int32_t)t_below(&rng, K_VOCABULARY) : -1;
        segments[i] = i % K_SEQUENCE > 4;
    }
    t_ok(model, ms_write(model, built->tokens, tokens));
    t_ok(model, ms_write(model, built->targets, targets));
    if (built->segments.id != 0) {
        t_ok(model, ms_write(model, built->segments, segments));
    }
}

static void k_read_params(k_run *r, ms_model *model, const nn_net *net) {
    size_t at = 0;
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        r->param_count += (size_t)ms_shape_count(&nn_param_at(net, i)->shape);
    }
    r->params = (float *)malloc(r->param_count * sizeof *r->params);
    assert_non_null(r->params);
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        t_ok(model, ms_read(model, nn_param_at(net, i)->tensor, r->params + at));
        at += (size_t)ms_shape_count(&nn_param_at(net, i)->shape);
    }
}

static void k_train(k_run *r) {
    ms_model *model;
    const nn_transformer_config shape = k_shape();
    t_on_cpu = r->on_cpu;
    ms_config config = t_device_config();
    config.seed = 9;
    config.force_optimize = r->smallest;
    config.cuda_graph = r->graph;
    config.tf32 = r->tf32;
    t_ok(NULL, ms_create(&config, &model));
    nn_net *net = nn_create_on(model, t_nn_device());
    assert_non_null(net);
    const nn_transformer built = r->is_bert ? nn_bert(net, &shape) : nn_gpt2(net, &shape);
    t_ok(model, ms_wrap(model));
    t_report(model, &r->report);
    r->report.peak_layer = ""; // belongs to the model
    t_ok(model, nn_init(net, 3));
    ms_set_loss_factor(model, 0.125f);
    for (int step = 0; step < K_STEPS; step++) {
        const bool reads = !r->silent || step + 1 == K_STEPS;
        k_write_batch(model, &built, step);
        ms_set_learning_rate(model, 0.01f / (float)(step + 1));
        t_ok(model, ms_step(model, reads ? &r->losses[step] : NULL));
    }
    t_ok(model, ms_synchronize(model));
    k_read_params(r, model, net);
    ms_destroy(model);
    nn_destroy(net);
    t_on_cpu = false;
}

static void k_free(k_run *r) {
    free(r->params);
    r->params = NULL;
}

/* Within this part of each other. */
static void k_near(double a, double b, double tolerance) {
    if (!(fabs(a - b) <= tolerance * fabs(b))) {
        print_error("%.9g is not near %.9g\n", a, b);
        fail();
    }
}

/* The learning must show, so that what is compared is not the start alone. */
static void k_moved(const k_run *r) {
    assert_true(fabs(r->losses[0] - r->losses[K_STEPS - 1]) > 0.01 * fabs(r->losses[0]));
}

static void k_same_bits(const k_run *a, const k_run *b) {
    assert_int_equal(a->param_count, b->param_count);
    assert_memory_equal(a->params, b->params, a->param_count * sizeof *a->params);
    assert_memory_equal(&a->losses[K_STEPS - 1], &b->losses[K_STEPS - 1], sizeof(double));
    if (!a->silent && !b->silent) {
        assert_memory_equal(a->losses, b->losses, sizeof a->losses);
    }
}

// ------------------------------------------------------------------------------------------------
// tests

static void losses_are_those_of_the_cpu(void **state) {
    (void)state;
    for (int bert_too = 0; bert_too < 2; bert_too++) {
        k_run cpu = k_way(bert_too != 0);
        k_run cuda = k_way(bert_too != 0);
        cpu.on_cpu = true;
        k_train(&cpu);
        k_train(&cuda);
        for (int step = 0; step < K_STEPS; step++) {
            k_near(cuda.losses[step], cpu.losses[step], 1e-4);
        }
        k_moved(&cuda);
        k_free(&cpu);
        k_free(&cuda);
    }
}

/* Recomputation, early updates, a graph and asynchronous steps change no bit: dropout draws anew in
   each step and alike in its recomputation, and the learning rate and the batches differ by
   step. */
static void no_plan_changes_a_bit(void **state) {
    (void)state;
    for (int bert_too = 0; bert_too < 2; bert_too++) {
        k_run plain = k_way(bert_too != 0);
        k_train(&plain);
        k_moved(&plain);
        assert_int_equal(plain.report.recompute_count, 0);
        for (int way = 1; way < 8; way++) {
            k_run other = k_way(bert_too != 0);
            other.smallest = (way & 1) != 0;
            other.graph = (way & 2) != 0;
            other.silent = (way & 4) != 0;
            k_train(&other);
            k_same_bits(&plain, &other);
            if (other.smallest) {
                assert_true(other.report.recompute_count > 0);
                assert_true(other.report.arena_bytes < plain.report.arena_bytes);
            }
            k_free(&other);
        }
        k_free(&plain);
    }
}

/* TF32 keeps 10 bits of each factor: products change, if the device has it, and not by much. */
static void tf32_changes_losses_a_little(void **state) {
    (void)state;
    ms_hardware hardware;
    ms_backend backend = ms_backend_cuda(0);
    k_run full = k_way(false);
    k_run rounded = k_way(false);
    rounded.tf32 = true;
    memset(&hardware, 0, sizeof hardware);
    backend.hardware(backend.user, &hardware);
    k_train(&full);
    k_train(&rounded);
    for (int step = 0; step < K_STEPS; step++) {
        k_near(rounded.losses[step], full.losses[step], 5e-3);
    }
    const bool alike = memcmp(full.losses, rounded.losses, sizeof full.losses) == 0;
    assert_int_equal(alike, !hardware.tf32);
    k_free(&full);
    k_free(&rounded);
}

// ------------------------------------------------------------------------------------------------
// examples/bert.c

/* Arguments as on the command line, separated by spaces. */
static int k_parse(trainer *t, char *text) {
    char *argv[24] = {NULL};
    char name[] = "bert";
    int argc = 1;
    argv[0] = name;
    for (char *word = strtok(text, " "); word != NULL; word = strtok(NULL, " ")) {
        assert_in_range(argc, 1, 22);
        argv[argc++] = word;
    }
    memset(t, 0, sizeof *t);
    t->kind = &bert;
    return parse_options(t, argc, argv);
}

/* The last loss of a run of the whole program. */
static double k_bert(const char *arguments) {
    trainer t;
    char text[256];
    snprintf(text, sizeof text, "--preset tiny --batch 2 --sequence 16 --dropout 0.1 --steps 9 %s",
             arguments);
    assert_int_equal(k_parse(&t, text), 0);
    assert_int_equal(run(&t), 0);
    const double loss = t.loss;
    free_trainer(&t);
    return loss;
}

static void the_program_gives_the_losses_of_the_cpu(void **state) {
    (void)state;
    const double cpu = k_bert("--every 4 LICENSE");
    const double cuda = k_bert("--device cuda --every 4 LICENSE");
    const double graph = k_bert("--device cuda --every 4 --graph LICENSE");
    const double budget = k_bert("--device cuda --every 4 --budget 900M LICENSE");
    k_near(cuda, cpu, 1e-4);
    assert_memory_equal(&graph, &cuda, sizeof cuda);
    assert_memory_equal(&budget, &cuda, sizeof cuda);
    k_near(k_bert("--device cuda --random --tf32"), k_bert("--random --every 10"), 1e-2);
}

static void wrong_options_are_refused(void **state) {
    (void)state;
    static const char *const wrong[] = {"--device fpga",     "--device",  "--graph",
                                        "--device cuda 1 -", "--every 0", "--dropout 1"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        trainer t;
        char text[64];
        snprintf(text, sizeof text, "%s", wrong[i]);
        assert_int_equal(k_parse(&t, text), 1);
    }
}

/* Devlin et al., 2018, section 3.1: 15 %, of which 80 % are masked, 10 % random, 10 % kept. */
static void masks_have_the_published_shares(void **state) {
    (void)state;
    enum { LONG = 200, ROUNDS = 1000 };
    trainer t;
    static int32_t window[LONG];
    static int32_t tokens[LONG];
    static int32_t targets[LONG];
    static int chosen_at[LONG];
    int masked = 0;
    int kept = 0;
    memset(&t, 0, sizeof t);
    memset(chosen_at, 0, sizeof chosen_at);
    t.random = 77;
    t.window = window;
    t.shape.sequence = LONG;
    t.shape.vocabulary = BYTE_COUNT + 1;
    for (int round = 0; round < ROUNDS; round++) {
        int chosen = 0;
        for (int i = 0; i < LONG; i++) {
            window[i] = (int32_t)(next_random(&t) % BYTE_COUNT);
        }
        mask_sequence(&t, tokens, targets);
        for (int i = 0; i < LONG; i++) {
            assert_true(targets[i] == -1 ? tokens[i] == window[i] : targets[i] == window[i]);
            assert_in_range(tokens[i], 0, BYTE_COUNT);
            chosen += targets[i] >= 0;
            chosen_at[i] += targets[i] >= 0;
            masked += targets[i] >= 0 && tokens[i] == MASK;
            kept += targets[i] >= 0 && tokens[i] == window[i];
        }
        assert_int_equal(chosen, 30);
    }
    k_near((double)masked, 0.8 * 30.0 * ROUNDS, 0.02);
    k_near((double)kept, (0.1 + 0.1 / BYTE_COUNT) * 30.0 * ROUNDS, 0.1);
    for (int i = 0; i < LONG; i++) { // six standard deviations
        assert_in_range(chosen_at[i], 150 - 68, 150 + 68);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_are_those_of_the_cpu),
        cmocka_unit_test(no_plan_changes_a_bit),
        cmocka_unit_test(tf32_changes_losses_a_little),
        cmocka_unit_test(the_program_gives_the_losses_of_the_cpu),
        cmocka_unit_test(wrong_options_are_refused),
        cmocka_unit_test(masks_have_the_published_shares),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
