/*  nn_minimal - the smallest trainer on nn.h: a transformer learns to continue sums of digits.

        build/examples/nn_minimal

    minimal.c writes the callbacks of its layers itself; here nn.h brings the layers, and nn_models.h a
    whole net of them. What is left is its sizes, a budget and a loop. gpt2.c goes on from here, with
    text, options and checkpoints; cnn.c puts a net together of single layers. Link with -lm. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#include "options.h"

enum { BATCH = 32, LENGTH = 16, DIGITS = 10, STEPS = 400 };

static void check(const ms_model *model, ms_result result) {
    if (result != MS_RESULT_OK) {
        exit(fail("%s", ms_last_error(model)));
    }
}

/* Two random digits, then the last digit of the sum of the two before: the target of each digit is
   the next one. Below 0 it does not count: nobody can know the second digit. */
static void draw_batch(int32_t *tokens, int32_t *targets) {
    for (int i = 0; i < BATCH * LENGTH; i++) {
        const int at = i % LENGTH;
        tokens[i] = at < 2 ? (int32_t)(rand() % DIGITS) : targets[i - 1];
        targets[i] = at < 1 ? -1 : (tokens[i] + tokens[i - 1]) % DIGITS;
    }
}

static void train(ms_config config, int steps) {
    static int32_t tokens[BATCH * LENGTH], targets[BATCH * LENGTH];
    static nn_transformer_config sizes;
    sizes.batch = BATCH;
    sizes.sequence = sizes.context = LENGTH;
    sizes.vocabulary = DIGITS;
    sizes.layers = 2;
    sizes.heads = 2;
    sizes.channels = 48;
    ms_model *model;
    check(NULL, ms_create(&config, &model));
    nn_net *net = nn_create(model);
    const nn_transformer gpt = nn_gpt2(net, &sizes);
    check(model, ms_wrap(model)); // makes the plan, and takes the memory
    check(model, nn_init(net, 1));
    ms_memory_report report;
    check(model, ms_report(model, &report));
    printf("plain arena %.2f MB, arena %.2f MB\n", (double)report.plain_bytes / 1e6,
           (double)report.arena_bytes / 1e6);
    for (int step = 0; step <= steps; step++) {
        double loss;
        draw_batch(tokens, targets);
        check(model, ms_write(model, gpt.tokens, tokens));
        check(model, ms_write(model, gpt.targets, targets));
        check(model, ms_step(model, &loss));
        if (step % 50 == 0 || step == steps) {
            printf("step %3d  loss %.4f\n", step, loss);
        }
    }
    ms_destroy(model);
    nn_destroy(net);
}

int main(int argc, char **argv) {
    static ms_config config;
    const option_spec debug = {"--debug", NULL, OPTION_FLAG, &config.debug, OPTION_DEBUG_HELP};
    if (take_options("[--debug]", &debug, 1, argc, argv, NULL) != 0) {
        return 2;
    }
    config.memory_budget_bytes = 2200000; // all else is zero: the defaults
    config.log = log_warnings;
    train(config, config.debug ? 2 : STEPS); // steps of debug mode take much longer
    print_debugged(config.debug);
    return 0;
}
