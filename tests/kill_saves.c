/*  kill_saves.c - a process that trains and saves checkpoints is killed at random moments. What it
    leaves must load, be no older than the last checkpoint that it reported, and train on with the
    bits of a run that nobody interrupted. For POSIX systems.

    kill_saves [KILLS [FOLDER [SEED]]]: 50, a new folder in /tmp, 1. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "memscale.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 96, COLUMNS = 128, WIDE = ROWS * COLUMNS, NARROW = 100, KEEP = 3, MORE_STEPS = 2 };
enum { LONGEST_US = 6000, MOST_STEPS = 1 << 20 };

static void check(bool condition, const char *what) {
    if (!condition) {
        fprintf(stderr, "kill_saves: %s\n", what);
        exit(2);
    }
}

// ------------------------------------------------------------------------------------------------
// the run: a model, and the position in its data

typedef struct run {
    ms_model *model;
    ms_tensor x, wide, narrow, counter;
    uint64_t position;
    int warnings;
} run;

static int forward(const ms_call *call) {
    const float *x = (const float *)call->in[0].data;
    const float *w = (const float *)call->param[0].data, *b = (const float *)call->param[1].data;
    float *y = (float *)call->out[0].data;
    for (int i = 0; i < ROWS; ++i) {
        float sum = b[i % NARROW];
        for (int k = 0; k < COLUMNS; ++k) {
            sum += w[i * COLUMNS + k] * x[k];
        }
        y[i] = sum * sum;
    }
    if (call->phase == MS_PHASE_FORWARD) {
        *(int32_t *)call->state[0].data += 1;
    }
    return 0;
}

static int backward(const ms_call *call) {
    const float *x = (const float *)call->in[0].data, *g = (const float *)call->grad_out[0].data;
    const float *w = (const float *)call->param[0].data, *b = (const float *)call->param[1].data;
    float *grad_w = (float *)call->grad_param[0].data, *grad_b = (float *)call->grad_param[1].data;
    for (int i = 0; i < NARROW; ++i) {
        grad_b[i] = 0.0f;
    }
    for (int i = 0; i < ROWS; ++i) {
        float sum = b[i % NARROW];
        for (int k = 0; k < COLUMNS; ++k) {
            sum += w[i * COLUMNS + k] * x[k];
        }
        grad_b[i % NARROW] += 2.0f * sum * g[i];
        for (int k = 0; k < COLUMNS; ++k) {
            grad_w[i * COLUMNS + k] = 2.0f * sum * g[i] * x[k];
        }
    }
    return 0;
}

static void hear(ms_log_level level, const char *tag, const char *text, void *user) {
    if (level <= MS_LOG_WARNING) {
        fprintf(stderr, "%s: %s\n", tag, text);
        ((run *)user)->warnings += 1;
    }
}

static void make(run *r) {
    ms_config config;
    ms_layer_desc layer;
    memset(r, 0, sizeof *r);
    memset(&config, 0, sizeof config);
    memset(&layer, 0, sizeof layer);
    config.memory_budget_bytes = 16 << 20;
    config.log = hear;
    config.log_user = r;
    check(ms_create(&config, &r->model) == MS_RESULT_OK, "ms_create");
    ms_model *m = r->model;
    r->x = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(COLUMNS));
    r->wide = ms_param(m, "wide", MS_DTYPE_F32, ms_shape2(ROWS, COLUMNS));
    r->narrow = ms_param(m, "narrow", MS_DTYPE_F32, ms_shape1(NARROW));
    r->counter = ms_buffer(m, "counter", MS_DTYPE_I32, ms_shape1(1));
    layer.forward = forward;
    layer.backward = backward;
    layer.overwrites.param = 3;
    layer.in[0] = r->x;
    layer.param[0] = r->wide;
    layer.param[1] = r->narrow;
    layer.state[0] = r->counter;
    layer.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape1(ROWS));
    ms_register_layer(m, &layer);
    ms_set_loss(m, layer.out[0]);
    ms_optimizer_desc adam = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
    ms_set_optimizer(m, &adam);
    ms_set_tensor_technique(m, r->wide, MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_ON);
    check(ms_save_extra(m, "position", &r->position, sizeof r->position) == MS_RESULT_OK &&
              ms_wrap(m) == MS_RESULT_OK,
          ms_last_error(m));
}

static void begin(run *r) {
    static float wide[WIDE], narrow[NARROW];
    const int32_t counter = 0;
    for (int i = 0; i < WIDE; ++i) {
        wide[i] = 0.02f * (float)(i * 7 % 23 - 11);
    }
    check(ms_write(r->model, r->wide, wide) == MS_RESULT_OK &&
              ms_write(r->model, r->narrow, narrow) == MS_RESULT_OK &&
              ms_write(r->model, r->counter, &counter) == MS_RESULT_OK,
          ms_last_error(r->model));
}

static void train(run *r) {
    float x[COLUMNS];
    for (int i = 0; i < COLUMNS; ++i) {
        x[i] = 0.125f * (float)((r->position * 31 + (uint64_t)i * 17) % 19) - 1.0f;
    }
    check(ms_write(r->model, r->x, x) == MS_RESULT_OK && ms_step(r->model, NULL) == MS_RESULT_OK,
          ms_last_error(r->model));
    r->position += 1;
}

static uint64_t mix(uint64_t hash, const void *data, size_t bytes) {
    const uint8_t *at = (const uint8_t *)data;
    for (size_t i = 0; i < bytes; ++i) {
        hash = (hash ^ at[i]) * 0x100000001b3u;
    }
    return hash;
}

/* Values, state and counts as a number. */
static uint64_t digest(const run *r) {
    static uint8_t data[sizeof(float) * WIDE];
    const ms_tensor all[] = {r->wide,
                             r->narrow,
                             r->counter,
                             ms_optimizer_state(r->model, r->wide, 0),
                             ms_optimizer_state(r->model, r->wide, 1),
                             ms_optimizer_state(r->model, r->narrow, 0),
                             ms_optimizer_state(r->model, r->narrow, 1)};
    const uint64_t counts[] = {r->position, ms_update_count(r->model, r->wide),
                               ms_update_count(r->model, r->narrow)};
    uint64_t hash = mix(0xcbf29ce484222325u, counts, sizeof counts);
    for (size_t k = 0; k < sizeof all / sizeof all[0]; ++k) {
        const uint64_t bytes = ms_tensor_bytes(r->model, all[k]);
        check(bytes > 0 && bytes <= sizeof data && ms_read(r->model, all[k], data) == MS_RESULT_OK,
              ms_last_error(r->model));
        hash = mix(hash, data, (size_t)bytes);
    }
    return hash;
}

// ------------------------------------------------------------------------------------------------
// the process that is killed: it goes on from the newest checkpoint, and reports each

static void train_for_ever(const char *folder, int reports) {
    const ms_checkpoints places = {folder, KEEP};
    run r;
    bool found = false;
    make(&r);
    check(ms_load_checkpoint(r.model, &places, NULL, &found) == MS_RESULT_OK,
          ms_last_error(r.model));
    if (!found) {
        begin(&r);
    }
    for (;;) {
        check(write(reports, &r.position, sizeof r.position) == (ssize_t)sizeof r.position,
              "a report");
        train(&r);
        check(ms_save_checkpoint(r.model, &places) == MS_RESULT_OK, ms_last_error(r.model));
    }
}

// ------------------------------------------------------------------------------------------------
// the process that kills

static uint64_t *digests; // after each step, of the run that is not interrupted

static uint64_t digest_at(run *straight, uint64_t position) {
    check(position < MOST_STEPS, "too many steps");
    while (straight->position <= position) {
        digests[straight->position] = digest(straight);
        train(straight);
    }
    return digests[position];
}

/* Starts the process, kills it after a while; returns the last step that it reported as saved. */
static uint64_t kill_one(const char *program, const char *folder, uint32_t after_us) {
    int reports[2];
    uint64_t position = 0, last = 0;
    int status = 0;
    char number[16];
    check(pipe(reports) == 0, "pipe");
    snprintf(number, sizeof number, "%d", reports[1]);
    const pid_t child = fork();
    check(child >= 0, "fork");
    if (child == 0) {
        (void)close(reports[0]);
        (void)execl(program, program, "--train", folder, number, (char *)NULL);
        _exit(127);
    }
    (void)close(reports[1]);
    const bool begins = read(reports[0], &last, sizeof last) == (ssize_t)sizeof last;
    const struct timespec wait = {0, (long)after_us * 1000};
    (void)nanosleep(&wait, NULL);
    (void)kill(child, SIGKILL);
    check(waitpid(child, &status, 0) == child && begins, "the process could not begin");
    check(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "the process ended by itself");
    while (read(reports[0], &position, sizeof position) == (ssize_t)sizeof position) {
        last = position;
    }
    (void)close(reports[0]);
    return last;
}

/* The places of the checkpoints, and beside each what was being written there. */
static void place_path(const char *folder, int place, const char *suffix, char *path,
                       size_t bytes) {
    snprintf(path, bytes, "%s/checkpoint-%d.safetensors%s", folder, place, suffix);
}

/* Whether there is a file that was not complete when the process was killed. */
static bool was_writing(const char *folder) {
    bool is = false;
    for (int k = 0; k < KEEP; ++k) {
        char path[512];
        place_path(folder, k, ".tmp", path, sizeof path);
        is = access(path, F_OK) == 0 || is;
    }
    return is;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "--train") == 0) {
        train_for_ever(argv[2], atoi(argv[3]));
    }
    const int kills = argc > 1 ? atoi(argv[1]) : 50;
    char made[] = "/tmp/kill_saves_XXXXXX";
    const char *folder = argc > 2 ? argv[2] : mkdtemp(made);
    uint64_t random = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    const ms_checkpoints places = {folder, KEEP};
    int lost = 0, torn = 0, empty = 0, cut = 0;
    run straight;
    digests = (uint64_t *)calloc(MOST_STEPS, sizeof *digests);
    check(kills > 0 && folder != NULL && digests != NULL, "usage: kill_saves [KILLS [FOLDER]]");
    make(&straight);
    begin(&straight);
    for (int k = 0; k < kills; ++k) {
        run r;
        bool found = false;
        random = random * 6364136223846793005u + 1442695040888963407u;
        const uint64_t reported = kill_one(argv[0], folder, (uint32_t)(random >> 33) % LONGEST_US);
        make(&r);
        const ms_result result = ms_load_checkpoint(r.model, &places, NULL, &found);
        if (result != MS_RESULT_OK || r.warnings > 0) {
            torn += 1;
        } else if (!found) {
            lost += reported > 0;
            empty += 1;
        } else {
            lost += r.position < reported;
            bool same = digest(&r) == digest_at(&straight, r.position);
            for (int i = 0; i < MORE_STEPS && same; ++i) {
                train(&r);
                same = digest(&r) == digest_at(&straight, r.position);
            }
            torn += !same;
        }
        cut += was_writing(folder);
        ms_destroy(r.model);
    }
    printf("%d kills, %d lost, %d torn\n", kills, lost, torn);
    fprintf(stderr, "%d in the middle of a save, %d before the first; %llu steps; in %s\n", cut,
            empty, (unsigned long long)straight.position, folder);
    for (int k = 0; k < KEEP && argc <= 2; ++k) {
        char path[512];
        place_path(folder, k, "", path, sizeof path);
        (void)remove(path);
        place_path(folder, k, ".tmp", path, sizeof path);
        (void)remove(path);
    }
    if (argc <= 2) {
        (void)rmdir(folder);
    }
    ms_destroy(straight.model);
    free(digests);
    return lost + torn > 0 ? 1 : 0;
}
