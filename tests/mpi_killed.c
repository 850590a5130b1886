/*  mpi_killed.c - an MPI job of which rank 1 is killed, or sleeps for twice comm_timeout, while it trains:
    mpirun -n 3 --enable-recovery mpi_killed killed|asleep SECONDS. Each rank that lives says "in time" if
    it has an error within comm_timeout and a second. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#define MEMSCALE_MPI
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

enum { ELEMENTS = 8, STEPS = 200 };

static int forward(const ms_call *call) {
    const float *x = (const float *)call->in[0].data, *w = (const float *)call->param[0].data;
    for (int i = 0; i < ELEMENTS; i++) {
        const float error = x[i] * w[i] - 1.0f;
        ((float *)call->out[0].data)[i] = 0.5f * error * error;
    }
    return 0;
}

static int backward(const ms_call *call) {
    const float *x = (const float *)call->in[0].data, *w = (const float *)call->param[0].data;
    const float *from = (const float *)call->grad_out[0].data;
    for (int i = 0; i < ELEMENTS; i++) {
        ((float *)call->grad_param[0].data)[i] += from[i] * (x[i] * w[i] - 1.0f) * x[i];
    }
    return 0;
}

static ms_model *make_model(const ms_comm *comm, double timeout_s) {
    ms_model *m = NULL;
    ms_config config;
    ms_layer_desc layer;
    ms_optimizer_desc optimizer;
    memset(&config, 0, sizeof config);
    memset(&layer, 0, sizeof layer);
    memset(&optimizer, 0, sizeof optimizer);
    config.memory_budget_bytes = 1 << 20;
    config.comm = *comm;
    config.comm_timeout = timeout_s;
    ms_result result = ms_create(&config, &m);
    const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(ELEMENTS));
    const ms_tensor w = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(ELEMENTS));
    const ms_tensor loss = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(ELEMENTS));
    layer.name = "error";
    layer.forward = forward;
    layer.backward = backward;
    layer.in[0] = x;
    layer.param[0] = w;
    layer.out[0] = loss;
    ms_register_layer(m, &layer);
    ms_set_loss(m, loss);
    optimizer.kind = MS_OPTIMIZER_ADAMW;
    optimizer.learning_rate = 0.01f;
    ms_set_optimizer(m, &optimizer);
    ms_set_tensor_technique(m, w, MS_TECHNIQUE_SHARDING, MS_SWITCH_ON);
    float ones[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++) {
        ones[i] = 0.5f + (float)i;
    }
    result = result == MS_RESULT_OK ? ms_wrap(m) : result;
    result = result == MS_RESULT_OK ? ms_write(m, x, ones) : result;
    result = result == MS_RESULT_OK ? ms_write(m, w, ones) : result;
    if (result != MS_RESULT_OK) {
        fprintf(stderr, "rank %u: %s\n", comm->rank, ms_last_error(m));
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return m;
}

int main(int argc, char **argv) {
    const bool is_killed = argc > 1 && strcmp(argv[1], "killed") == 0;
    const double timeout_s = argc > 2 ? atof(argv[2]) : 2.0;
    int granted = 0;
    ms_comm comm;
    if (MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &granted) != MPI_SUCCESS ||
        ms_comm_mpi(NULL, &comm) != MS_RESULT_OK) {
        fprintf(stderr, "MPI does not start\n");
        return 1;
    }
    ms_model *m = make_model(&comm, timeout_s);
    ms_result result = MS_RESULT_OK;
    double loss = 0.0, begin_s = 0.0;
    int step = 0;
    for (; step < STEPS && result == MS_RESULT_OK; step++) {
        if (step == STEPS / 2 && comm.rank == 1) {
            if (is_killed) {
                (void)kill(getpid(), SIGKILL);
            }
            (void)sleep((unsigned)(2.0 * timeout_s));
        }
        begin_s = MPI_Wtime();
        result = ms_step(m, &loss);
    }
    const double took_s = MPI_Wtime() - begin_s;
    const ms_result then = ms_step(m, &loss);
    const bool ok =
        result == MS_RESULT_RANKS && then == MS_RESULT_RANKS && took_s < timeout_s + 1.0;
    printf("rank %u of %u: step %d ended with %s after %.2f s, %s\n", comm.rank, comm.count, step,
           ms_result_name(result), took_s, ok ? "in time" : ms_last_error(m));
    fflush(NULL);
    _exit(ok ? 0 : 1); // MPI_Finalize would wait for the rank that has gone
}
