/*  nn_minimal - the smallest trainer on nn.h: a transformer learns to continue sums of digits.

        build/examples/nn_minimal

    minimal.c writes the callbacks of its layers itself; here nn.h brings the layers, registers their
    params and initializes them. What is left is a net of some lines, a budget and a loop. gpt2.c goes
    on from here, with text, options and checkpoints. Link with -lm. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#include "options.h"

enum { BATCH = 32, LENGTH = 16, DIGITS = 10, CHANNELS = 32, HEADS = 2, BLOCKS = 3, STEPS = 200 };

static void check(const ms_model *model, ms_result result) {
    if (result != MS_RESULT_OK) {
        exit(fail("%s", ms_last_error(model)));
    }
}

/* x + attention(x), and to that a feed-forward net; what it adds is small at first. */
static ms_tensor block(nn_net *net, ms_tensor x) {
    ms_tensor y = nn_linear(net, "qkv", nn_layernorm(net, "norm1", x), 3 * CHANNELS, 0.1f);
    y = nn_attention(net, "attention", y, HEADS, true, false);
    x = nn_add(net, "add1", x, nn_linear(net, "proj", y, CHANNELS, 0.02f));
    y = nn_linear(net, "up", nn_layernorm(net, "norm2", x), 4 * CHANNELS, 0.1f);
    return nn_add(net, "add2", x, nn_linear(net, "down", nn_gelu(net, "gelu", y), CHANNELS, 0.02f));
}

/* Two random digits, then the last digit of the sum of the two before: the target of each digit is
   the next one. Below 0 it does not count: nobody can know the second digit. */
static void draw_batch(int32_t *tokens, int32_t *targets) {
    for (int i = 0; i < BATCH * LENGTH; i++) {
        const int at = i % LENGTH;
        tokens[i] = at < 2 ? (int32_t)(rand() / 7 % DIGITS) : targets[i - 1];
        targets[i] = at < 1 ? -1 : (tokens[i] + tokens[i - 1]) % DIGITS;
    }
}

int main(int argc, char **argv) {
    static int32_t ids[2][BATCH * LENGTH]; // tokens and targets
    static ms_config config;               // all zero: the defaults
    const option_spec debug = {"--debug", NULL, OPTION_FLAG, &config.debug, OPTION_DEBUG_HELP};
    if (take_options("[--debug]", &debug, 1, argc, argv, NULL) != 0) {
        return 2;
    }
    const int steps = config.debug ? 2 : STEPS; // those of debug mode take much longer
    config.memory_budget_bytes = 2000000;
    config.log = log_warnings;
    ms_model *model;
    check(NULL, ms_create(&config, &model));
    nn_net *net = nn_create(model);
    const ms_shape shape = ms_shape2(BATCH, LENGTH), table = ms_shape2(DIGITS, CHANNELS);
    const ms_tensor tokens = ms_input(model, "tokens", MS_DTYPE_I32, shape), none = {0};
    const ms_tensor targets = ms_input(model, "targets", MS_DTYPE_I32, shape);
    const ms_tensor digits = nn_param(net, "digits", table, NN_INIT_NORMAL, 0.1f);
    const ms_tensor places =
        nn_param(net, "places", ms_shape2(LENGTH, CHANNELS), NN_INIT_NORMAL, 0.1f);
    ms_tensor x = nn_embedding(net, "embedding", tokens, digits, places, none, none);
    for (int i = 0; i < BLOCKS; i++) {
        x = block(net, x);
    }
    x = nn_linear(net, "head", nn_layernorm(net, "norm", x), DIGITS, 0.02f);
    ms_set_loss(model, nn_cross_entropy(net, "loss", x, targets));
    ms_set_loss_factor(model, 1.0f / (BATCH * (LENGTH - 1))); // the mean of those that count
    check(model, ms_wrap(model));
    check(model, nn_init(net, 1));
    ms_memory_report report;
    check(model, ms_report(model, &report));
    printf("plain arena %.2f MB, budget %.2f MB, arena %.2f MB\n", (double)report.plain_bytes / 1e6,
           (double)report.budget_bytes / 1e6, (double)report.arena_bytes / 1e6);
    for (int step = 0; step <= steps; step++) {
        double loss;
        draw_batch(ids[0], ids[1]);
        check(model, ms_write(model, tokens, ids[0]));
        check(model, ms_write(model, targets, ids[1]));
        check(model, ms_step(model, &loss));
        if (step % 25 == 0 || step == steps) {
            printf("step %3d  loss %.4f\n", step, loss);
        }
    }
    print_debugged(config.debug);
    ms_destroy(model);
    nn_destroy(net);
    return 0;
}
