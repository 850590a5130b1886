/*  robot - a robot arm that learns while it moves, at 200 Hz, in a static block of memory.

        build/examples/robot                     a minute of its time, in a few seconds
        build/examples/robot --state FILE        goes on with what it has learned before
        build/examples/robot --real              ticks are 5 ms apart
        build/examples/robot --save-plan FILE    plans, saves the plan, and ends
        build/examples/robot_board --plan FILE   trains by that plan, in a build without the planner

    The programs before this one train as fast as they can. Here training is the guest of a control
    loop: a step runs in time slices, nothing is taken from the heap, and no thread is started.

    A two-link arm, simulated here, follows a path. Its controller adds what a small network predicts,
    the torque for a wanted acceleration, to a weak proportional-derivative controller; and the network
    learns that from what the arm just did, one time slice of training in each tick, after the torque
    is out. Training takes no more of a tick than its slice and one instruction.

    --state: all that it goes on learning from, params, optimizer state and what the arm has done, is
    loaded from this file, if it exists, and saved there every 5 seconds, so that a power cut (--die:
    the process kills itself) loses no more than that. A file that is damaged, or something else, is
    refused: the arm goes on with what it had, at the start and with --reload, which loads the file
    while the arm moves. Files are read and written by functions of its own, since those of the C
    library take memory from the heap.

    --plan: the plan that another build of this program has saved, such as one on a PC; robot_board is built
    with MEMSCALE_NO_PLANNER and has half of the code. Without a plan, or with one that does not fit, it
    trains by the plain plan. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "options.h"

enum { TICK_US = 5000, SUBSTEPS = 5, SAVE_TICKS = 1000, REPORT_TICKS = 2000 };
enum { INPUTS = 8, HIDDEN = 64, JOINTS = 2, BATCH = 64, SAMPLES = 8192, ENOUGH = 400 };

// ------------------------------------------------------------------------------------------------
// memory: a static block, first fit, free neighbours merged

typedef struct piece {
    struct piece *next; // the free one after it, by address
    uint64_t bytes;     // whole
} piece;

enum { HOST_BYTES = 4 << 20, ARENA_BYTES = 2 << 20, UNIT = 64 };

static union {
    unsigned char bytes[HOST_BYTES];
    double aligned;
    piece first;
} host;
static unsigned char arena[ARENA_BYTES];

typedef struct pool {
    piece *available;
    uint64_t used, most_used;
} pool;

static uint64_t whole_bytes(uint64_t bytes) {
    return (bytes + sizeof(piece) + UNIT - 1) / UNIT * UNIT;
}

static void *pool_alloc(uint64_t bytes, void *user) {
    pool *p = (pool *)user;
    piece **at = &p->available;
    const uint64_t whole = bytes < HOST_BYTES ? whole_bytes(bytes) : UINT64_MAX;
    while (*at && (*at)->bytes < whole) {
        at = &(*at)->next;
    }
    piece *found = *at;
    if (!found) {
        return NULL;
    }
    if (found->bytes > whole) {
        piece *rest = (piece *)(void *)((unsigned char *)found + whole);
        rest->next = found->next;
        rest->bytes = found->bytes - whole;
        *at = rest;
    } else {
        *at = found->next;
    }
    p->used += whole;
    p->most_used = p->used > p->most_used ? p->used : p->most_used;
    return (unsigned char *)found + sizeof(piece);
}

static void pool_release(void *memory, uint64_t bytes, void *user) {
    pool *p = (pool *)user;
    if (!memory) {
        return;
    }
    piece *back = (piece *)(void *)((unsigned char *)memory - sizeof(piece));
    piece *before = NULL, *after = p->available;
    back->bytes = whole_bytes(bytes);
    p->used -= back->bytes;
    while (after && after < back) {
        before = after;
        after = after->next;
    }
    back->next = after;
    if (after && (unsigned char *)back + back->bytes == (unsigned char *)after) {
        back->bytes += after->bytes;
        back->next = after->next;
    }
    if (!before) {
        p->available = back;
    } else if ((unsigned char *)before + before->bytes == (unsigned char *)back) {
        before->bytes += back->bytes;
        before->next = back->next;
    } else {
        before->next = back;
    }
}

// ------------------------------------------------------------------------------------------------
// the arm: Spong, Hutchinson and Vidyasagar, "Robot Modeling and Control", 2006, section 7.4, with
// friction in the joints

typedef struct arm {
    double angle[JOINTS], speed[JOINTS];
} arm;

static void accelerations(const arm *a, const double *torque, double *acceleration) {
    const double m1 = 1.2, m2 = 0.8, l1 = 0.4, c1 = 0.2, c2 = 0.18, i1 = 0.02, i2 = 0.01;
    const double gravity = 9.81, friction = 0.15, cosine = cos(a->angle[1]);
    const double k = m2 * l1 * c2, h = k * sin(a->angle[1]);
    const double m22 = i2 + m2 * c2 * c2, m12 = m22 + k * cosine;
    const double m11 = i1 + i2 + m1 * c1 * c1 + m2 * (l1 * l1 + c2 * c2) + 2.0 * k * cosine;
    const double g2 = m2 * c2 * gravity * cos(a->angle[0] + a->angle[1]);
    const double g1 = (m1 * c1 + m2 * l1) * gravity * cos(a->angle[0]) + g2;
    const double u1 = torque[0] + h * (2.0 * a->speed[0] + a->speed[1]) * a->speed[1] - g1 -
                      friction * a->speed[0];
    const double u2 = torque[1] - h * a->speed[0] * a->speed[0] - g2 - friction * a->speed[1];
    const double determinant = m11 * m22 - m12 * m12;
    acceleration[0] = (m22 * u1 - m12 * u2) / determinant;
    acceleration[1] = (m11 * u2 - m12 * u1) / determinant;
}

static void move(arm *a, const double *torque) {
    const double dt = 1e-6 * (double)TICK_US / (double)SUBSTEPS;
    for (int i = 0; i < SUBSTEPS; i++) {
        double acceleration[JOINTS];
        accelerations(a, torque, acceleration);
        for (int j = 0; j < JOINTS; j++) {
            a->speed[j] += dt * acceleration[j];
            a->angle[j] += dt * a->speed[j];
        }
    }
}

/* The path: angle, speed and acceleration that a joint is to have. */
static void wanted(double t, int joint, double *angle, double *speed, double *acceleration) {
    static const double size[JOINTS] = {0.9, 1.1}, rate[JOINTS] = {2.1, 3.3};
    const double w = rate[joint], x = w * t + joint;
    *angle = size[joint] * sin(x) + 0.3 * sin(0.31 * x);
    *speed = size[joint] * w * cos(x) + 0.3 * 0.31 * w * cos(0.31 * x);
    *acceleration = -size[joint] * w * w * sin(x) - 0.3 * 0.31 * 0.31 * w * w * sin(0.31 * x);
}

// ------------------------------------------------------------------------------------------------
// the network: torques from what the arm does. Two hidden layers; y = tanh(x W + b), or x W + b

typedef struct dense {
    bool is_last;
} dense;

static int dense_forward(const ms_call *call) {
    const dense *d = (const dense *)call->user;
    const ms_matrix out = ms_matrix_of(&call->out[0]);
    const ms_result result =
        ms_gemm(call, 1.0f, ms_matrix_of(&call->in[0]), ms_matrix_of(&call->param[0]), 0.0f, out);
    const float *bias = (const float *)call->param[1].data;
    float *y = (float *)out.data;
    for (int64_t i = 0; i < out.rows * out.cols; i++) {
        const float sum = y[i] + bias[i % out.cols];
        y[i] = d->is_last ? sum : tanhf(sum);
    }
    return (int)result;
}

static int dense_backward(const ms_call *call) {
    const dense *d = (const dense *)call->user;
    const ms_view *to_in = &call->grad_in[0], *to_weight = &call->grad_param[0];
    const ms_view *to_bias = &call->grad_param[1];
    const float *y = (const float *)call->out[0].data, *of = (const float *)call->grad_out[0].data;
    ms_matrix product = ms_matrix_of(&call->grad_out[0]);
    float *gradient = (float *)call->workspace, *bias = (float *)to_bias->data;
    product.data = gradient;
    for (int64_t i = 0; i < product.cols; i++) {
        bias[i] = to_bias->beta == 0.0f ? 0.0f : bias[i];
    }
    for (int64_t i = 0; i < product.rows * product.cols; i++) {
        gradient[i] = d->is_last ? of[i] : of[i] * (1.0f - y[i] * y[i]);
        bias[i % product.cols] += gradient[i];
    }
    return ms_gemm(call, 1.0f, ms_transpose(ms_matrix_of(&call->in[0])), product, to_weight->beta,
                   ms_matrix_of(to_weight)) != MS_RESULT_OK ||
           (to_in->data && ms_gemm(call, 1.0f, product, ms_transpose(ms_matrix_of(&call->param[0])),
                                   to_in->beta, ms_matrix_of(to_in)) != MS_RESULT_OK);
}

/* Half the squared error of each row. */
static int error_forward(const ms_call *call) {
    const float *x = (const float *)call->in[0].data, *target = (const float *)call->in[1].data;
    float *loss = (float *)call->out[0].data;
    for (int64_t r = 0; r < call->row_count; r++) {
        loss[r] = 0.0f;
        for (int64_t j = r * JOINTS; j < (r + 1) * JOINTS; j++) {
            loss[r] += 0.5f * (x[j] - target[j]) * (x[j] - target[j]);
        }
    }
    return 0;
}

static int error_backward(const ms_call *call) {
    const float *x = (const float *)call->in[0].data, *target = (const float *)call->in[1].data;
    const float *of = (const float *)call->grad_out[0].data;
    float *to = (float *)call->grad_in[0].data;
    const bool adds = call->grad_in[0].beta != 0.0f;
    for (int64_t j = 0; j < call->row_count * JOINTS; j++) {
        to[j] = (adds ? to[j] : 0.0f) + of[j / JOINTS] * (x[j] - target[j]);
    }
    return 0;
}

enum { LAYERS = 3, PARAMS = 2 * LAYERS };
static const int widths[LAYERS + 1] = {INPUTS, HIDDEN, HIDDEN, JOINTS};

/* What the controller uses while the next step is under way: the params of the last step. */
typedef struct params {
    float weight[LAYERS][HIDDEN * HIDDEN], bias[LAYERS][HIDDEN];
} params;

/* What the learner goes on from, beside the model. */
typedef struct experience {
    float inputs[SAMPLES][INPUTS], torques[SAMPLES][JOINTS]; // a ring of what happened
    uint32_t count, random;
    uint64_t steps, slices;
    double loss;
} experience;

typedef struct learner {
    ms_model *model;
    ms_tensor x, target, param[PARAMS];
    dense layers[LAYERS];
    params now;
    experience past;
    bool in_step;
} learner;

static learner the_learner;
static pool the_pool;

static void stop(const char *text) {
    (void)!write(2, text, strlen(text));
    (void)!write(2, "\n", 1);
    _exit(1);
}

static void check(const ms_model *model, ms_result result) {
    if (result != MS_RESULT_OK) {
        stop(ms_last_error(model));
    }
}

static double now_us(void *user) {
    struct timespec now;
    (void)user;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

static float random_unit(learner *l) { // xorshift, Marsaglia, 2003
    uint32_t *random = &l->past.random;
    *random ^= *random << 13;
    *random ^= *random >> 17;
    *random ^= *random << 5;
    return (float)(*random >> 8) / 8388608.0f - 1.0f;
}

static float *param_values(learner *l, int k) {
    return k % 2 ? l->now.bias[k / 2] : l->now.weight[k / 2];
}

static int read_file(void *user, uint64_t offset, void *data, size_t bytes) {
    const int file = *(const int *)user;
    for (size_t done = 0; done < bytes;) {
        const ssize_t some =
            pread(file, (unsigned char *)data + done, bytes - done, (off_t)(offset + done));
        if (some <= 0) {
            return -1;
        }
        done += (size_t)some;
    }
    return 0;
}

static int write_file(void *user, const void *data, size_t bytes) {
    const int file = *(const int *)user;
    for (size_t done = 0; done < bytes;) {
        const ssize_t some = write(file, (const unsigned char *)data + done, bytes - done);
        if (some <= 0) {
            return -1;
        }
        done += (size_t)some;
    }
    return 0;
}

/* Plans: by the plan in a file, if there is one; else with the planner; else as little as is possible. */
static void make_plan(ms_model *m, const char *path) {
    struct stat found;
    int file = path ? open(path, O_RDONLY) : -1;
    ms_result result = MS_RESULT_FILE;
    if (path && (file < 0 || fstat(file, &found) != 0)) {
        printf("plan: %s: %s\n", path, strerror(errno));
    }
    if (file >= 0) {
        ms_source source;
        source.read = read_file;
        source.user = &file;
        source.size = (uint64_t)found.st_size;
        result = ms_plan_load(m, &source);
        (void)close(file);
        result = result == MS_RESULT_OK ? ms_wrap(m) : result;
        printf("plan: %s\n", result == MS_RESULT_OK ? "loaded" : ms_last_error(m));
    }
    if (result != MS_RESULT_OK) {
        result = ms_wrap(m);
    }
    check(m, result == MS_RESULT_UNSUPPORTED ? ms_detach(m) : result); // there is no planner
}

static void learner_create(learner *l, bool debug, const char *plan) {
    ms_config config;
    memset(&config, 0, sizeof config);
    memset(&host.first, 0, sizeof host.first);
    host.first.bytes = HOST_BYTES;
    the_pool.available = &host.first;
    config.allocator.alloc = pool_alloc;
    config.allocator.release = pool_release;
    config.allocator.user = &the_pool;
    config.memory = arena;
    config.memory_bytes = ARENA_BYTES;
    config.clock = now_us;
    config.log = log_warnings;
    config.debug = debug;
    config.offloading = MS_SWITCH_OFF; // no threads
    check(l->model, ms_create(&config, &l->model));
    ms_model *m = l->model;
    l->past.random = 12345;
    l->x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(BATCH, INPUTS));
    l->target = ms_input(m, "torque", MS_DTYPE_F32, ms_shape2(BATCH, JOINTS));
    ms_tensor at = l->x;
    for (int i = 0; i < LAYERS; i++) {
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.name = "dense";
        l->layers[i].is_last = i == LAYERS - 1;
        d.user = &l->layers[i];
        d.forward = dense_forward;
        d.backward = dense_backward;
        d.backward_workspace.row_bytes = (uint64_t)widths[i + 1] * sizeof(float);
        d.in[0] = at;
        d.param[0] = l->param[2 * i] =
            ms_param(m, "weight", MS_DTYPE_F32, ms_shape2(widths[i], widths[i + 1]));
        d.param[1] = l->param[2 * i + 1] =
            ms_param(m, "bias", MS_DTYPE_F32, ms_shape1(widths[i + 1]));
        at = d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(BATCH, widths[i + 1]));
        ms_register_layer(m, &d);
    }
    ms_layer_desc error;
    memset(&error, 0, sizeof error);
    error.name = "error";
    error.forward = error_forward;
    error.backward = error_backward;
    error.in[0] = at;
    error.in[1] = l->target;
    error.out[0] = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(BATCH));
    ms_register_layer(m, &error);
    ms_set_loss(m, error.out[0]);
    ms_optimizer_desc adamw = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
    adamw.learning_rate = 0.003f;
    ms_set_optimizer(m, &adamw);
    make_plan(m, plan);
    check(m, ms_save_extra(m, "experience", &l->past, sizeof l->past));
    for (int i = 0; i < LAYERS; i++) { // the last layer begins with 0: no torque
        for (int k = 0; k < widths[i] * widths[i + 1] && i < LAYERS - 1; k++) {
            l->now.weight[i][k] = 1.7f * random_unit(l) / sqrtf((float)widths[i]);
        }
    }
}

/* The controller uses the params of the model from now on. */
static void take_params(learner *l) {
    for (int k = 0; k < PARAMS; k++) {
        check(l->model, ms_read(l->model, l->param[k], param_values(l, k)));
    }
}

/* Loads what was saved, between steps. False: there is no file, or it is refused, and model, experience
   and params are as they were. */
static bool load_state(learner *l, const char *path) {
    struct stat found;
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0 || fstat(file, &found) != 0) {
        printf("state: new\n");
        return false;
    }
    ms_source source;
    source.read = read_file;
    source.user = &file;
    source.size = (uint64_t)found.st_size;
    const bool loaded = ms_load(l->model, &source, NULL) == MS_RESULT_OK;
    (void)close(file);
    if (loaded) {
        take_params(l);
        printf("state: loaded\n");
    } else {
        printf("state: refused, %s\n", ms_last_error(l->model));
    }
    return loaded;
}

/* Saves it beside the file, and then puts it in its place: a power cut leaves one of the two. The arm
   goes on moving if there is no room for it. */
static void save_state(learner *l, const char *path) {
    char beside[512];
    const int length = snprintf(beside, sizeof beside, "%s.new", path);
    int file = length < (int)sizeof beside ? open(beside, O_WRONLY | O_CREAT | O_TRUNC, 0644) : -1;
    ms_sink sink;
    sink.write = write_file;
    sink.user = &file;
    const bool is_written = file >= 0 && ms_save(l->model, &sink) == MS_RESULT_OK;
    const bool is_there = is_written && fsync(file) == 0;
    if (file < 0 || close(file) != 0 || !is_there || rename(beside, path) != 0) {
        printf("state: not saved, %s\n",
               file >= 0 && !is_written ? ms_last_error(l->model) : strerror(errno));
    }
}

static void save_plan(ms_model *m, const char *path) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    ms_sink sink;
    sink.write = write_file;
    sink.user = &file;
    check(m, file < 0 ? MS_RESULT_OK : ms_plan_save(m, &sink));
    if (file < 0 || close(file) != 0) {
        stop(strerror(errno));
    }
}

/* Notes what a torque has done. */
static void note_sample(learner *l, const float *inputs, const double *torque) {
    experience *e = &l->past;
    float *to = e->torques[e->count % SAMPLES];
    memcpy(e->inputs[e->count % SAMPLES], inputs, sizeof e->inputs[0]);
    for (int j = 0; j < JOINTS; j++) {
        to[j] = (float)torque[j] / 10.0f;
    }
    e->count++;
}

static void write_batch(learner *l) {
    float x[BATCH][INPUTS], target[BATCH][JOINTS];
    const experience *e = &l->past;
    const uint32_t known = e->count < (uint32_t)SAMPLES ? e->count : (uint32_t)SAMPLES;
    for (int r = 0; r < BATCH; r++) {
        const uint32_t which = (uint32_t)(0.5f * (random_unit(l) + 1.0f) * (float)known) % known;
        memcpy(x[r], e->inputs[which], sizeof x[r]);
        memcpy(target[r], e->torques[which], sizeof target[r]);
    }
    check(l->model, ms_write(l->model, l->x, x));
    check(l->model, ms_write(l->model, l->target, target));
}

/* Trains for so many microseconds; after a whole step the controller has its params. */
static void learn(learner *l, uint64_t microseconds) {
    if (!l->in_step && l->past.count < ENOUGH) {
        return;
    }
    if (!l->in_step) {
        write_batch(l);
        l->in_step = true;
    }
    const ms_result result = ms_step_slice(l->model, microseconds, &l->past.loss);
    l->past.slices++;
    if (result == MS_RESULT_MORE) {
        return;
    }
    check(l->model, result);
    l->in_step = false;
    l->past.steps++;
    take_params(l);
}

static void features(const arm *a, const double *acceleration, float *to) {
    for (int j = 0; j < JOINTS; j++) {
        to[j] = (float)sin(a->angle[j]);
        to[JOINTS + j] = (float)cos(a->angle[j]);
        to[2 * JOINTS + j] = (float)a->speed[j] / 4.0f;
        to[3 * JOINTS + j] = (float)acceleration[j] / 12.0f;
    }
}

static void predict(const params *p, const float *inputs, double *torque) {
    float x[HIDDEN], y[HIDDEN];
    memcpy(x, inputs, INPUTS * sizeof(float));
    for (int i = 0; i < LAYERS; i++) {
        for (int c = 0; c < widths[i + 1]; c++) {
            float sum = p->bias[i][c];
            for (int r = 0; r < widths[i]; r++) {
                sum += x[r] * p->weight[i][r * widths[i + 1] + c];
            }
            y[c] = i == LAYERS - 1 ? sum : tanhf(sum);
        }
        memcpy(x, y, sizeof x);
    }
    for (int j = 0; j < JOINTS; j++) {
        torque[j] = 10.0 * (double)x[j];
    }
}

// ------------------------------------------------------------------------------------------------
// ticks

/* One tick of control: chooses the torque, moves the arm, and notes what came of it. Returns the
   square of the error. */
static double control(learner *l, arm *a, double t) {
    double torque[JOINTS], along[JOINTS], error = 0.0;
    float inputs[INPUTS];
    double angle[JOINTS], speed[JOINTS];
    for (int j = 0; j < JOINTS; j++) {
        wanted(t, j, &angle[j], &speed[j], &along[j]);
        error += (angle[j] - a->angle[j]) * (angle[j] - a->angle[j]);
    }
    features(a, along, inputs);
    predict(&l->now, inputs, torque);
    for (int j = 0; j < JOINTS; j++) {
        torque[j] += 12.0 * (angle[j] - a->angle[j]) + 1.2 * (speed[j] - a->speed[j]);
        torque[j] = torque[j] > 20.0 ? 20.0 : torque[j] < -20.0 ? -20.0 : torque[j];
    }
    const arm before = *a;
    move(a, torque);
    for (int j = 0; j < JOINTS; j++) {
        along[j] = (a->speed[j] - before.speed[j]) / (1e-6 * (double)TICK_US);
    }
    features(&before, along, inputs);
    note_sample(l, inputs, torque);
    return error;
}

typedef struct settings {
    float seconds, die, reload;
    int64_t slice_us;
    const char *path, *plan, *save_plan;
    bool real, debug;
} settings;

static settings parse_options(int argc, char **argv) {
    settings o = {60.0f, 0.0f, 0.0f, 2000, NULL, NULL, NULL, false, false};
    const option_spec specs[] = {
        {"--seconds", "S", OPTION_REAL, &o.seconds, "that it moves"},
        {"--slice", "US", OPTION_COUNT, &o.slice_us, "microseconds of training in a tick"},
        {"--state", "FILE", OPTION_TEXT, &o.path,
         "load what it has learned from there, and save it there every 5 s"},
        {"--plan", "FILE", OPTION_TEXT, &o.plan, "train by the plan in this file"},
        {"--save-plan", "FILE", OPTION_TEXT, &o.save_plan, "save the plan to this file, and end"},
        {"--reload", "S", OPTION_REAL, &o.reload,
         "load the file of --state once more after S seconds"},
        {"--die", "S", OPTION_REAL, &o.die, "kill the process after S seconds"},
        {"--real", NULL, OPTION_FLAG, &o.real, "ticks are 5 ms apart"},
#ifndef MEMSCALE_NO_PLANNER // which leaves out debug mode
        {"--debug", NULL, OPTION_FLAG, &o.debug, OPTION_DEBUG_HELP},
#endif
    };
    if (take_options("[options]\nA robot arm at 200 Hz that learns while it moves, without a heap.",
                     specs, OPTIONS_IN(specs), argc, argv, NULL) != 0) {
        exit(2);
    }
    return o;
}

static void sleep_until(double us) {
    double left = us - now_us(NULL);
    struct timespec t;
    if (left > 0.0) {
        t.tv_sec = (time_t)(left * 1e-6);
        t.tv_nsec = (long)((left - 1e6 * (double)t.tv_sec) * 1e3);
        (void)nanosleep(&t, NULL);
    }
}

int main(int argc, char **argv) {
    static char line[256], out[BUFSIZ];
    const settings o = parse_options(argc, argv);
    learner *l = &the_learner;
    arm a = {{0.0, 0.0}, {0.0, 0.0}};
    (void)setvbuf(stdout, out, _IOLBF, sizeof out); // printf takes no memory either
    learner_create(l, o.debug, o.plan);
    if (o.save_plan) {
        save_plan(l->model, o.save_plan);
        ms_destroy(l->model);
        return 0;
    }
    if (!load_state(l, o.path)) {
        for (int k = 0; k < PARAMS; k++) {
            check(l->model, ms_write(l->model, l->param[k], param_values(l, k)));
        }
    }
    for (int j = 0; j < JOINTS; j++) { // it begins on its path
        double acceleration;
        wanted(0.0, j, &a.angle[j], &a.speed[j], &acceleration);
    }
    const int64_t ticks = (int64_t)((double)o.seconds * 1e6 / (double)TICK_US);
    double squares = 0.0, first_error = 0.0, last_error = 0.0, worst_us = 0.0;
    uint32_t late = 0;
    bool reloads = o.reload > 0.0f, saves = false;
    const double begin_us = now_us(NULL);
    for (int64_t tick = 0; tick < ticks; tick++) {
        const double start_us = o.real ? begin_us + (double)(tick * TICK_US) : now_us(NULL);
        const double t = 1e-6 * (double)TICK_US * (double)tick;
        if (o.die > 0.0f && t >= (double)o.die) {
            (void)raise(SIGKILL);
        }
        squares += control(l, &a, t);
        learn(l, (uint64_t)o.slice_us);
        /* Files, between two steps. On a robot: outside of the loop of control. */
        const bool loads_now = reloads && !l->in_step && t >= (double)o.reload;
        saves = saves || (o.path && (tick + 1) % SAVE_TICKS == 0);
        const bool saves_now = saves && !l->in_step;
        if (loads_now) {
            (void)load_state(l, o.path);
            reloads = false;
        }
        if (saves_now) {
            save_state(l, o.path);
            saves = false;
        }
        const double us = now_us(NULL) - start_us;
        worst_us = us > worst_us ? us : worst_us;
        late += us > (double)TICK_US && !loads_now && !saves_now;
        if ((tick + 1) % REPORT_TICKS == 0 || tick + 1 == ticks) {
            const int64_t some = tick % REPORT_TICKS + 1;
            last_error = sqrt(squares / (double)some);
            first_error = tick < REPORT_TICKS ? last_error : first_error;
            squares = 0.0;
            (void)snprintf(line, sizeof line,
                           "%5.1f s: error %.4f rad, %llu steps in %llu slices, loss %.5f",
                           t + 0.005, last_error, (unsigned long long)l->past.steps,
                           (unsigned long long)l->past.slices, l->past.loss);
            puts(line);
        }
        if (o.real) {
            sleep_until(begin_us + (double)((tick + 1) * TICK_US));
        }
    }
    ms_memory_report report;
    check(l->model, ms_report(l->model, &report));
    printf("ticks %lld, late %u, longest %.0f us; error %.4f rad at first, %.4f in the end\n",
           (long long)ticks, (unsigned)late, worst_us, first_error, last_error);
    printf("memory: host %llu of %d bytes, arena %llu of %d, all static memory %llu\n",
           (unsigned long long)the_pool.most_used, HOST_BYTES,
           (unsigned long long)report.arena_bytes, ARENA_BYTES,
           (unsigned long long)(sizeof host + sizeof arena + sizeof the_learner));
    print_debugged(o.debug);
    ms_destroy(l->model);
    return the_pool.used == 0 ? 0 : 1;
}
