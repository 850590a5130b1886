/*  minimal - the smallest whole program: a deep autoencoder, trained inside a byte budget.

    It needs memscale.h alone: its two layers are written here, a forward and a backward callback for
    each. With --debug, the library checks what these declare. Link with -lm. */
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 512, WIDTH = 64, COUNT = ROWS * WIDTH, LAYERS = 12, STEPS = 300 };

/* out = tanh(in W) */
static int dense_forward(const ms_call *call) {
    ms_matrix in = ms_matrix_of(&call->in[0]), W = ms_matrix_of(&call->param[0]);
    ms_result result = ms_gemm(call, 1.0f, in, W, 0.0f, ms_matrix_of(&call->out[0]));
    float *out = (float *)call->out[0].data;
    for (int i = 0; i < COUNT; ++i) {
        out[i] = tanhf(out[i]);
    }
    return (int)result;
}

/* beta says whether a gradient is overwritten or added to; one without data is not wanted. */
static int dense_backward(const ms_call *call) {
    const ms_view *grad_in = &call->grad_in[0], *grad_W = &call->grad_param[0];
    ms_matrix in = ms_matrix_of(&call->in[0]), W = ms_matrix_of(&call->param[0]), product = in;
    product.data = call->workspace; // the gradient of in W
    float *out = (float *)call->out[0].data, *grad_out = (float *)call->grad_out[0].data;
    for (int i = 0; i < COUNT; ++i) {
        ((float *)product.data)[i] = grad_out[i] * (1.0f - out[i] * out[i]);
    }
    return ms_gemm(call, 1.0f, ms_transpose(in), product, grad_W->beta, ms_matrix_of(grad_W)) ||
           (grad_in->data != NULL &&
            ms_gemm(call, 1.0f, product, ms_transpose(W), grad_in->beta, ms_matrix_of(grad_in)));
}

/* loss = (in - target)^2, element by element; its mean is minimised */
static int loss_forward(const ms_call *call) {
    float *in = (float *)call->in[0].data, *target = (float *)call->in[1].data;
    for (int i = 0; i < COUNT; ++i) {
        ((float *)call->out[0].data)[i] = (in[i] - target[i]) * (in[i] - target[i]);
    }
    return 0;
}

static int loss_backward(const ms_call *call) {
    float *in = (float *)call->in[0].data, *target = (float *)call->in[1].data;
    float *grad_in = (float *)call->grad_in[0].data, *grad_out = (float *)call->grad_out[0].data;
    for (int i = 0; i < COUNT; ++i) {
        float old = call->grad_in[0].beta == 0.0f ? 0.0f : grad_in[i];
        grad_in[i] = old + 2.0f * (in[i] - target[i]) * grad_out[i];
    }
    return 0;
}

static void print_log(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)user;
    if (level <= MS_LOG_WARNING) {
        fprintf(stderr, "%s: %s\n", tag, text);
    }
}

static void check(ms_result result) {
    if (result != MS_RESULT_OK) {
        exit(1); // print_log has said why; ms_last_error(model) has it too
    }
}

int main(int argc, char **argv) {
    static ms_config config; // all zero: the defaults
    config.debug = argc == 2 && strcmp(argv[1], "--debug") == 0;
    if (argc > 1 && !config.debug) {
        const bool help = strcmp(argv[1], "--help") == 0;
        fprintf(help ? stdout : stderr, "usage: %s [--debug]%s%s\n", argv[0], help ? "" : ", not ",
                help ? "" : argv[argc - 1]);
        return help ? 0 : 2;
    }
    const int steps = config.debug ? 3 : STEPS; // those of debug mode take much longer
    static float numbers[COUNT];                // the rows to learn, and the initial weights
    for (int i = 0; i < COUNT; ++i) {
        numbers[i] = 0.4f * (float)rand() / (float)RAND_MAX - 0.2f;
    }
    config.memory_budget_bytes = 2300000;
    config.log = print_log;
    ms_model *model;
    check(ms_create(&config, &model));
    ms_shape shape = ms_shape2(ROWS, WIDTH);
    static ms_layer_desc dense, loss;
    dense.forward = dense_forward, dense.backward = dense_backward;
    dense.backward_workspace.bytes = sizeof numbers;
    dense.out[0] = loss.in[1] = ms_input(model, "rows", MS_DTYPE_F32, shape);
    for (int i = 0; i < LAYERS; ++i) {
        dense.in[0] = dense.out[0];
        dense.param[0] = ms_param(model, "W", MS_DTYPE_F32, ms_shape2(WIDTH, WIDTH));
        dense.out[0] = loss.in[0] = ms_activation(model, "x", MS_DTYPE_F32, shape);
        ms_register_layer(model, &dense);
        check(ms_write(model, dense.param[0], numbers));
    }
    loss.forward = loss_forward, loss.backward = loss_backward;
    loss.out[0] = ms_activation(model, "loss", MS_DTYPE_F32, shape);
    ms_register_layer(model, &loss);
    ms_set_loss(model, loss.out[0]);
    check(ms_wrap(model));
    check(ms_write(model, loss.in[1], numbers));
    ms_memory_report report;
    check(ms_report(model, &report));
    printf("plain arena %.2f MB, budget %.2f MB, arena %.2f MB\n", (double)report.plain_bytes / 1e6,
           (double)report.budget_bytes / 1e6, (double)report.arena_bytes / 1e6);
    double first, last;
    check(ms_step(model, &first));
    for (int step = 1; step < steps; ++step) {
        check(ms_step(model, &last));
    }
    printf("loss %.5f, after %d steps %.5f\n", first, steps, last);
    ms_destroy(model);
}
