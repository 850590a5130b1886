/*  test_darknet_style.c - the example in the shape of darknet: its gradients against differences of
    the loss, and the wrapped trainer against the trainer by itself, bit by bit, under every budget;
    the size of the adapter, and the bytes that it saves. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"

int darknet_style_main(int argc, char **argv);
#define main darknet_style_main
#include "../examples/darknet_style.c"
#undef main
#include "testing.h"

enum { SMALL_BATCH = 4, SMALL_SIZE = 9, SMALL_CLASSES = 3 };

/* Every kind of layer, odd extents, a dropout in place on an output that backward reads, a shortcut
   that is linear, and convolutions with and without batch-norm. */
static const layer_spec small_layers[] = {{CONVOLUTIONAL, 4, 3, 1, true, LEAKY, 0, 0.0f},
                                          {MAXPOOL, 0, 2, 2, false, LINEAR, 0, 0.0f},
                                          {DROPOUT, 0, 0, 0, false, LINEAR, 0, 0.25f},
                                          {CONVOLUTIONAL, 5, 1, 1, true, LEAKY, 0, 0.0f},
                                          {CONVOLUTIONAL, 4, 3, 1, true, LINEAR, 0, 0.0f},
                                          {SHORTCUT, 0, 0, 0, false, LEAKY, 2, 0.0f},
                                          {CONVOLUTIONAL, 4, 3, 1, false, LINEAR, 0, 0.0f},
                                          {SHORTCUT, 0, 0, 0, false, LINEAR, 5, 0.0f},
                                          {CONVOLUTIONAL, 6, 3, 2, false, LEAKY, 0, 0.0f},
                                          {DROPOUT, 0, 0, 0, false, LINEAR, 0, 0.25f},
                                          {CONNECTED, 7, 0, 0, true, LEAKY, 0, 0.0f},
                                          {CONNECTED, SMALL_CLASSES, 0, 0, false, LINEAR, 0, 0.0f},
                                          {SOFTMAX, 0, 0, 0, false, LINEAR, 0, 0.0f}};

enum { SMALL_LAYERS = (int)(sizeof small_layers / sizeof small_layers[0]) };

static void open_small(run *r) {
    open_run(r, small_layers, SMALL_LAYERS, SMALL_BATCH, SMALL_SIZE);
}

/* In small_layers, a shortcut and a 1x1 convolution read the same output, and what the shortcut adds
   to its delta is lost. Here, nobody else reads the input of the 1x1 convolution. */
static void open_unwiped(run *r, int batch) {
    layer_spec specs[SMALL_LAYERS];
    memcpy(specs, small_layers, sizeof specs);
    assert_true(specs[3].size == 1 && specs[5].type == SHORTCUT && specs[5].from == 2);
    specs[3].size = 3, specs[4].size = 1;
    open_run(r, specs, SMALL_LAYERS, batch, SMALL_SIZE);
}

// ------------------------------------------------------------------------------------------------
// the trainer by itself

/* The loss of the batch that is loaded, in float64 after the last connected layer, with the same
   random numbers each time. */
static double loss_of(network *net) {
    const layer *last = &net->layers[net->n - 2];
    double loss = 0.0;
    setstate(initstate(12345, net->random, RANDOM_BYTES));
    net->train = 1;
    forward_network(net);
    for (int b = 0; b < net->batch; ++b) {
        const float *x = last->output + b * net->classes, *truth = net->truth + b * net->classes;
        double sum = 0.0, at_truth = 0.0;
        for (int i = 0; i < net->classes; ++i) {
            sum += exp((double)x[i]);
            at_truth += (double)(x[i] * truth[i]);
        }
        loss += log(sum) - at_truth;
    }
    return loss;
}

/* Updates hold minus the gradient. The distance of the two, over the length of the longer; both
   noise: 0. */
static double gradient_error(network *net, float *values, const float *updates, int count) {
    const double width = 4e-4;
    double error = 0.0, numeric_length = 0.0, length = 0.0;
    for (int i = 0; i < count; ++i) {
        const float value = values[i];
        const float above = value + (float)width, below = value - (float)width;
        values[i] = above;
        double slope = loss_of(net);
        values[i] = below;
        slope = (slope - loss_of(net)) / (double)(above - below);
        values[i] = value;
        error += (slope + (double)updates[i]) * (slope + (double)updates[i]);
        numeric_length += slope * slope;
        length += (double)updates[i] * (double)updates[i];
    }
    const double longer = fmax(numeric_length, length);
    return longer < 1e-5 * count ? 0.0 : sqrt(error / longer);
}

static void gradients_are_slopes(void **state) {
    (void)state;
    run r;
    open_unwiped(&r, SMALL_BATCH);
    load_batch(r.net, 7);
    (void)loss_of(r.net);
    backward_network(r.net);
    assert_true(fabs(loss_of(r.net) - (double)network_cost(r.net)) < 1e-4);
    int checked = 0;
    for (int i = 0; i < r.net->n; ++i) {
        const layer *l = &r.net->layers[i];
        const struct {
            float *values, *updates;
            int count;
        } params[] = {{l->weights, l->weight_updates, l->nweights},
                      {l->biases, l->bias_updates, l->out_c},
                      {l->scales, l->scale_updates, l->out_c}};
        for (int k = 0; k < 3; ++k) {
            if (params[k].values != NULL) {
                const double error =
                    gradient_error(r.net, params[k].values, params[k].updates, params[k].count);
                checked += error > 0.0;
                if (error > 0.02) {
                    print_error("layer %d, param %d: error %g\n", i, k, error);
                    fail();
                }
            }
        }
    }
    assert_int_equal(checked, 18); // 7 weights and biases, 4 scales
    close_run(&r);
}

/* Backward of a 1x1 convolution overwrites the delta of its input, whatever is there; that of any
   other convolution adds to it. */
static void a_1x1_convolution_overwrites_deltas(void **state) {
    (void)state;
    run r, found;
    open_small(&r);
    open_small(&found);
    run *const both[2] = {&r, &found};
    for (int i = 3; i < 5; ++i) { // 3 is 1x1
        for (int k = 0; k < 2; ++k) {
            network net = *both[k]->net;
            load_batch(both[k]->net, 7);
            forward_network(both[k]->net);
            layer *l = &net.layers[i];
            net.input = l[-1].output, net.delta = l[-1].delta;
            fill(l->outputs * l->batch, 1.0f, l->delta);
            fill(l->inputs * l->batch, k == 0 ? 0.0f : 1000.0f, net.delta);
            l->backward(*l, net);
        }
        const layer *input = &r.net->layers[i - 1];
        assert_true(same_floats(input->delta, found.net->layers[i - 1].delta,
                                input->outputs * input->batch) == (i == 3));
    }
    close_run(&r);
    close_run(&found);
}

static void the_trainer_learns(void **state) {
    (void)state;
    enum { STEPS = 400 };
    run r;
    open_unwiped(&r, 16);
    float first = 0.0f, last = 0.0f;
    for (int step = 0; step < STEPS; ++step) {
        load_batch(r.net, (uint64_t)(step * 16));
        r.net->args.learning_rate = rate_at(step, STEPS);
        assert_int_equal(train_step(&r), MS_RESULT_OK);
        first += step < 10 ? network_cost(r.net) : 0.0f;
        last += step >= STEPS - 10 ? network_cost(r.net) : 0.0f;
    }
    assert_true(last < 0.8f * first);
    close_run(&r);
}

// ------------------------------------------------------------------------------------------------
// wrapped

/* Verification must see no difference, and leave nothing behind. */
static void check_verified(run *r) {
    ms_verify_report report;
    memset(&report, 0, sizeof report);
    t_ok(r->model, ms_verify(r->model, NULL, NULL, &report));
    assert_true(report.tensor_count > 0);
    assert_int_equal(report.differ_count, 0);
    assert_true(report.plain_loss == report.wrapped_loss);
}

/* A trainer by itself and a wrapped one take the same steps, with tests between them; the latter is
   verified before each step. */
static void check_equal(run *plain, run *wrapped, int steps) {
    int right[2] = {0, 0};
    for (int step = 0; step < steps; ++step) {
        run *const both[2] = {plain, wrapped};
        for (int k = 0; k < 2; ++k) {
            load_batch(both[k]->net, (uint64_t)(step * plain->net->batch));
            both[k]->net->args.learning_rate = rate_at(step, steps);
            if (k == 1) {
                check_verified(wrapped);
            }
            t_ok(both[k]->model, train_step(both[k]));
        }
        const float cost = network_cost(plain->net), other = network_cost(wrapped->net);
        assert_memory_equal(&cost, &other, sizeof cost);
        assert_true(same_networks(plain->net, wrapped->net));
        for (int k = 0; k < 2 && step % 2 == 1; ++k) {
            load_batch(both[k]->net, 1000000u + (uint64_t)step);
            t_ok(both[k]->model, test_step(both[k], &right[k]));
        }
        const float test_cost = network_cost(plain->net), test_other = network_cost(wrapped->net);
        assert_memory_equal(&test_cost, &test_other, sizeof test_cost);
    }
    assert_int_equal(right[0], right[1]);
}

static void check_kinds(const layer_spec *specs, int n, int batch, int size, int steps,
                        bool debug) {
    uint64_t arena = UINT64_MAX;
    for (int kind = KEPT; kind <= SMALLEST; ++kind) {
        run plain, wrapped;
        open_run(&plain, specs, n, batch, size);
        open_run(&wrapped, specs, n, batch, size);
        t_ok(wrapped.model, wrap_as(&wrapped, kind, debug));
        ms_memory_report report;
        t_report(wrapped.model, &report);
        assert_true((report.recompute_count > 0 || report.to_host_bytes > 0) == (kind != KEPT));
        assert_true(kind == SMALLEST ? report.arena_bytes <= arena : report.arena_bytes < arena);
        arena = report.arena_bytes;
        check_equal(&plain, &wrapped, steps);
        close_run(&plain);
        close_run(&wrapped);
    }
}

static void every_plan_of_a_small_net_gives_the_same_bits(void **state) {
    (void)state;
    check_kinds(small_layers, SMALL_LAYERS, SMALL_BATCH, SMALL_SIZE, 8, false);
}

/* A shortcut to the layer before a dropout: in the plain program both have one memory. */
static void every_plan_of_aliased_layers_gives_the_same_bits(void **state) {
    (void)state;
    layer_spec specs[SMALL_LAYERS];
    memcpy(specs, small_layers, sizeof specs);
    assert_true(specs[2].type == DROPOUT && specs[5].type == SHORTCUT && specs[5].from == 2);
    specs[5].from = 1;
    check_kinds(specs, SMALL_LAYERS, SMALL_BATCH, SMALL_SIZE, 8, false);
}

/* Two shortcuts to the input of a 1x1 convolution, one of them directly before another one. */
static void every_plan_of_wiped_deltas_gives_the_same_bits(void **state) {
    (void)state;
    layer_spec specs[SMALL_LAYERS];
    memcpy(specs, small_layers, sizeof specs);
    specs[4].filters = specs[6].filters = 4, specs[5].from = 2;
    assert_true(specs[7].type == SHORTCUT && specs[3].size == 1);
    specs[7].from = 2, specs[6].size = 1;
    check_kinds(specs, SMALL_LAYERS, SMALL_BATCH, SMALL_SIZE, 8, false);
    check_kinds(specs, SMALL_LAYERS, SMALL_BATCH, SMALL_SIZE, 2, true);
}

static void every_plan_of_the_default_net_gives_the_same_bits(void **state) {
    (void)state;
    check_kinds(default_layers, DEFAULT_LAYERS, 4, IMAGE_SIZE, 4, false);
}

/* The trap: outputs of dropout, dropped and made again. */
static void recomputed_dropout_gives_the_same_bits(void **state) {
    (void)state;
    run plain, wrapped;
    open_small(&plain);
    open_small(&wrapped);
    ms_config config;
    memset(&config, 0, sizeof config);
    t_ok(wrapped.model, wrap_run(&wrapped, &config));
    for (int i = 0; i < SMALL_LAYERS; ++i) {
        if (small_layers[i].type == DROPOUT) {
            ms_set_tensor_technique(wrapped.model, wrapped.outputs[i + 1],
                                    MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        }
    }
    t_ok(wrapped.model, ms_wrap(wrapped.model));
    ms_memory_report report;
    t_report(wrapped.model, &report);
    assert_true(report.recompute_count >= 2);
    check_equal(&plain, &wrapped, 6);
    close_run(&plain);
    close_run(&wrapped);
}

static void debug_mode_passes_the_adapter(void **state) {
    (void)state;
    check_kinds(small_layers, SMALL_LAYERS, SMALL_BATCH, SMALL_SIZE, 3, true);
}

/* The comparison must be able to fail: one bit of a momentum, one number drawn too many. */
static void the_comparison_sees_one_bit(void **state) {
    (void)state;
    run a, b;
    open_small(&a);
    open_small(&b);
    assert_true(same_networks(a.net, b.net));
    b.net->layers[3].scale_updates[2] = 1e-30f;
    assert_false(same_networks(a.net, b.net));
    b.net->layers[3].scale_updates[2] = 0.0f;
    assert_true(same_networks(a.net, b.net));
    char *outer = setstate(b.net->random);
    (void)rand();
    setstate(outer);
    assert_false(same_networks(a.net, b.net));
    close_run(&a);
    close_run(&b);
}

/* Without recomputation: deltas pass, and x_norm is not kept. */
static void the_plan_saves_activation_bytes(void **state) {
    (void)state;
    run r;
    open_run(&r, default_layers, DEFAULT_LAYERS, 32, IMAGE_SIZE);
    const double own = (double)own_bytes(r.net);
    const double own_total = own + (double)r.net->workspace_bytes;
    t_ok(r.model, wrap_as(&r, KEPT, false));
    ms_memory_report report;
    t_report(r.model, &report);
    print_message("activations: %.3f of the trainer's own, with workspace %.3f\n",
                  (double)report.activation_peak_bytes / own,
                  (double)report.arena_bytes / own_total);
    assert_int_equal(report.recompute_count, 0);
    assert_true((double)report.activation_peak_bytes <= 0.55 * own);
    assert_true((double)report.arena_bytes <= 0.55 * own_total);
    close_run(&r);
}

// ------------------------------------------------------------------------------------------------
// the text of the example

static void the_adapter_is_short(void **state) {
    (void)state;
    FILE *file = fopen("examples/darknet_style.c", "r");
    if (file == NULL) {
        print_message("examples/darknet_style.c is not here: run this from the repository\n");
        skip();
    }
    char line[512];
    int lines = 0, sections = 0, foreign = 0;
    bool inside = false;
    while (fgets(line, (int)sizeof line, file) != NULL) {
        const bool begins = strstr(line, "// ==== adapter, begin") == line;
        inside = inside || begins;
        sections += begins;
        lines += inside;
        foreign += sections == 0 && strstr(line, "ms_") != NULL;
        inside = inside && strstr(line, "// ==== adapter, end") != line;
    }
    fclose(file);
    assert_int_equal(sections, 1);
    assert_false(inside);
    assert_int_equal(foreign, 0); // the trainer in front of it knows nothing of memscale.h
    assert_true(lines > 50);
    assert_true(lines <= 160);
}

static void the_program_compares_and_refuses(void **state) {
    (void)state;
    char name[] = "darknet_style", compare_option[] = "--compare", steps[] = "--steps", two[] = "2";
    char batch[] = "--batch", wrong[] = "--steps=2";
    char *arguments[] = {name, compare_option, steps, two, batch, two};
    assert_int_equal(darknet_style_main(6, arguments), 0);
    char *mistaken[] = {name, wrong};
    assert_int_equal(darknet_style_main(2, mistaken), 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_slopes),
        cmocka_unit_test(a_1x1_convolution_overwrites_deltas),
        cmocka_unit_test(the_trainer_learns),
        cmocka_unit_test(every_plan_of_a_small_net_gives_the_same_bits),
        cmocka_unit_test(every_plan_of_aliased_layers_gives_the_same_bits),
        cmocka_unit_test(every_plan_of_wiped_deltas_gives_the_same_bits),
        cmocka_unit_test(every_plan_of_the_default_net_gives_the_same_bits),
        cmocka_unit_test(recomputed_dropout_gives_the_same_bits),
        cmocka_unit_test(debug_mode_passes_the_adapter),
        cmocka_unit_test(the_comparison_sees_one_bit),
        cmocka_unit_test(the_plan_saves_activation_bytes),
        cmocka_unit_test(the_adapter_is_short),
        cmocka_unit_test(the_program_compares_and_refuses)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
