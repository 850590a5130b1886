/*  cnn - trains a convolutional net on images that it draws itself, inside a byte budget.

        build/examples/cnn                              ten shapes, half a minute
        build/examples/cnn --budget smallest --check    the same numbers as without a budget
        build/examples/cnn --width 64 --batch 256 --dry

    After the transformers of gpt2.c and bert.c: images, normalization whose statistics are buffers, a
    batch that gets smaller (ms_reshape), and a program that has trainer.h's loop written out.

    An image is one of ten shapes, turned, scaled and moved at random, in noise. Training and test
    set are drawn from different seeds. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#include "options.h"

#include "checkpoint.h"

enum {
    SIZE = 28, // of an image, each way
    PIXELS = SIZE * SIZE,
    CLASSES = 10,
    BLOCKS = 3,
    TRAIN_IMAGES = 8192,
    WARMUP_STEPS = 10
};

typedef struct settings {
    int64_t batch, width, steps, accumulate, test, seed;
    option_budget budget;
    const char *device, *offload;
    option_device place;
    ms_switch offloading;
    float clip, rate; // 0: none
    bool check, dry, debug;
    checkpoint saving;
} settings;

/* A model, and its tensors that are written and read. */
typedef struct classifier {
    ms_model *model;
    nn_net *net;
    ms_tensor images; // (B, 1, height, width)
    ms_tensor labels; // I32 (B)
    ms_tensor logits; // (B, classes)
} classifier;

typedef struct trainer {
    settings options;
    classifier trained, plain; // plain: without a budget, for --check
    float *images;             // one batch
    int32_t *labels;
    float *logits;
    uint64_t random;
    double loss, mean, accuracy; // of the last step; of the last ones; of the test set
} trainer;

// ---- options ------------------------------------------------------------------------------------

enum { OPTION_COUNT_ALL = 14 + CHECKPOINT_OPTION_COUNT };

/* Fills specs with the options; returns how many there are. */
static int list_options(settings *o, option_spec *specs) {
    const option_spec all[OPTION_COUNT_ALL] = {
        {"--budget", "SIZE", OPTION_BUDGET, &o->budget, OPTION_BUDGET_HELP},
        {"--device", "NAME", OPTION_TEXT, &o->device, OPTION_DEVICE_HELP},
        {"--offload", "NAME", OPTION_TEXT, &o->offload, OPTION_OFFLOAD_HELP},
        {"--batch", "N", OPTION_COUNT, &o->batch, "images at a time"},
        {"--accumulate", "N", OPTION_COUNT, &o->accumulate, OPTION_ACCUMULATE_HELP},
        {"--width", "N", OPTION_COUNT, &o->width,
         "channels of the first block; the next have twice and four times as\n"
         "many"},
        {"--steps", "N", OPTION_COUNT, &o->steps, "updates"},
        {"--clip", "X", OPTION_REAL, &o->clip, OPTION_CLIP_HELP},
        {"--rate", "X", OPTION_REAL, &o->rate, OPTION_RATE_HELP},
        {"--test", "N", OPTION_COUNT, &o->test, "images of the test set"},
        {"--seed", "N", OPTION_COUNT, &o->seed, "of initial params and images"},
        CHECKPOINT_OPTIONS(&o->saving),
        {"--check", NULL, OPTION_FLAG, &o->check,
         "also train a second net without a budget, and compare: losses,\n"
         "params and running statistics must be equal bit for bit"},
        {"--dry", NULL, OPTION_FLAG, &o->dry, "plan only: allocate and train nothing"},
        {"--debug", NULL, OPTION_FLAG, &o->debug, OPTION_DEBUG_HELP},
    };
    memcpy(specs, all, sizeof all);
    return OPTION_COUNT_ALL;
}

static int parse_options(settings *o, int argc, char **argv) {
    option_spec specs[OPTION_COUNT_ALL];
    memset(o, 0, sizeof *o);
    o->rate = 0.02f;
    o->budget.name = "half";
    o->device = "cpu";
    o->batch = 64;
    o->accumulate = 1;
    o->width = 12;
    o->steps = 300;
    o->test = 2000;
    o->seed = 1;
    return take_options("[options]\nTrains a convolutional net on images that it draws, inside a "
                        "byte budget.",
                        specs, list_options(o, specs), argc, argv, NULL) != 0 ||
           checkpoint_check(&o->saving) != 0 ||
           choose_offloading(o->offload, &o->offloading) != 0 ||
           choose_device(&o->place, o->device) != 0;
}

// ---- images -------------------------------------------------------------------------------------

/* Random numbers of one image: splitmix64 (Steele et al., 2014). */
static double draw_unit(uint64_t *random) {
    *random = nn_mix(*random);
    return (double)(*random >> 11) / 9007199254740992.0;
}

static double draw_between(uint64_t *random, double least, double most) {
    return least + (most - least) * draw_unit(random);
}

static bool in_box(double u, double v, double left, double right, double top, double bottom) {
    return u > left && u < right && v > top && v < bottom;
}

/* Whether a point lies in a shape of about unit radius around the origin. */
static bool in_shape(int label, double u, double v) {
    const double radius = sqrt(u * u + v * v);
    const double side = fabs(u) > fabs(v) ? fabs(u) : fabs(v);
    switch (label) {
    case 0: // disc
        return radius < 0.9;
    case 1: // ring
        return radius > 0.55 && radius < 0.95;
    case 2: // square
        return side < 0.8;
    case 3: // frame
        return side > 0.48 && side < 0.85;
    case 4: // triangle
        return v < 0.5 && v > 1.732 * fabs(u) - 1.0;
    case 5: // plus
        return side < 0.95 && (fabs(u) < 0.22 || fabs(v) < 0.22);
    case 6: // bar
        return fabs(u) < 0.25 && fabs(v) < 1.0;
    case 7: // corner
        return in_box(u, v, -0.7, -0.25, -0.8, 0.8) || in_box(u, v, -0.7, 0.7, 0.35, 0.8);
    case 8: // tee
        return in_box(u, v, -0.22, 0.22, -0.8, 0.8) || in_box(u, v, -0.8, 0.8, -0.8, -0.36);
    default: { // star of five points
        const double turn = (atan2(v, u) / 6.28318530717959 + 1.0) * 5.0;
        return radius < 0.38 + 0.62 * 2.0 * fabs(turn - floor(turn) - 0.5);
    }
    }
}

/* Image number `index` of the set of this seed; returns its class. Four samples per pixel. */
static int32_t draw_image(float *pixels, uint64_t seed, uint64_t index) {
    uint64_t random = nn_mix(seed ^ nn_mix(index));
    const int label = (int)(index % CLASSES);
    const double angle = draw_between(&random, 0.0, 6.28318530717959);
    const double radius = draw_between(&random, 7.0, 11.0);
    const double center_x = 0.5 * (double)SIZE + draw_between(&random, -3.0, 3.0);
    const double center_y = 0.5 * (double)SIZE + draw_between(&random, -3.0, 3.0);
    const double contrast = draw_between(&random, 0.7, 1.3);
    const double ground = draw_between(&random, -0.3, 0.3);
    const double across = cos(angle) / radius;
    const double down = sin(angle) / radius;
    nn_normal_kernel(pixels, PIXELS, 0.25f, random);
    for (int i = 0; i < PIXELS; i++) {
        double covered = 0.0;
        for (int sample = 0; sample < 4; sample++) {
            const double x = i % SIZE + 0.25 + 0.5 * (sample % 2) - center_x;
            const double y = i / SIZE + 0.25 + 0.5 * (sample / 2) - center_y;
            covered += in_shape(label, across * x + down * y, across * y - down * x) ? 0.25 : 0.0;
        }
        pixels[i] += (float)(ground + contrast * covered);
    }
    return label;
}

static uint64_t train_seed(const trainer *t) {
    return nn_mix((uint64_t)t->options.seed);
}

static uint64_t test_seed(const trainer *t) {
    return nn_mix(train_seed(t) + 1);
}

/* Random images of the training set. */
static void draw_batch(trainer *t) {
    for (int64_t b = 0; b < t->options.batch; b++) {
        t->random = nn_mix(t->random);
        t->labels[b] = draw_image(t->images + b * PIXELS, train_seed(t), t->random % TRAIN_IMAGES);
    }
}

/* Images first ... first + count - 1 of the test set. */
static void draw_test_batch(trainer *t, int64_t first, int64_t count) {
    for (int64_t b = 0; b < count; b++) {
        t->labels[b] = draw_image(t->images + b * PIXELS, test_seed(t), (uint64_t)(first + b));
    }
}

// ---- model --------------------------------------------------------------------------------------

/* Convolution without bias (the normalization has one), normalization, relu. */
static ms_tensor add_unit(nn_net *net, const char *prefix, int number, ms_tensor x,
                          int64_t channels) {
    const ms_tensor none = {0};
    const int64_t depth = 9 * ms_tensor_shape(net->model, x).dim[1];
    char names[4][32];
    static const char *const kinds[] = {"conv", "norm", "relu"};
    for (int i = 0; i < 3; i++) {
        snprintf(names[i], sizeof names[i], "%s.%s%d", prefix, kinds[i], number);
    }
    snprintf(names[3], sizeof names[3], "%s.conv%d.weight", prefix, number);
    const ms_tensor weight =
        nn_param(net, names[3], ms_shape2(channels, depth), NN_INIT_NORMAL, nn_kaiming(depth));
    x = nn_conv2d_tied(net, names[0], x, weight, none, 3, 1, 1);
    x = nn_batch_norm(net, names[1], x);
    return nn_relu(net, names[2], x);
}

/* Blocks of two convolutions and a pool that halves the image; the mean of each channel, dropout,
   and a linear layer. The batch is an axis, since the last one of the test set may be smaller. */
static void build_net(classifier *c, const settings *o) {
    const ms_axis batch = nn_axis(c->net, "batch", o->batch, o->batch);
    const ms_shape pixels = ms_along(ms_shape4(o->batch, 1, SIZE, SIZE), 0, batch);
    const ms_shape rows = ms_along(ms_shape1(o->batch), 0, batch);
    c->images = ms_input(c->model, "images", MS_DTYPE_F32, pixels);
    c->labels = ms_input(c->model, "labels", MS_DTYPE_I32, rows);
    ms_tensor x = c->images;
    for (int b = 0; b < BLOCKS; b++) {
        char prefix[16];
        char pool[32];
        snprintf(prefix, sizeof prefix, "b%d", b);
        snprintf(pool, sizeof pool, "b%d.pool", b);
        x = add_unit(c->net, prefix, 1, x, o->width << b);
        x = add_unit(c->net, prefix, 2, x, o->width << b);
        x = nn_max_pool(c->net, pool, x, 2, 2, 0);
    }
    x = nn_average_pool(c->net, "mean", x);
    x = nn_dropout(c->net, "dropout", x, 0.1f);
    c->logits = nn_linear(c->net, "head", x, CLASSES, nn_kaiming(o->width << (BLOCKS - 1)));
    ms_set_loss(c->model, nn_cross_entropy(c->net, "loss", c->logits, c->labels));
    ms_add_eval_output(c->model, c->logits);
}

/* Registers a net with memscale.h and plans it; `dry`: without allocating. */
static int make_net(classifier *c, const settings *o, uint64_t budget_bytes, bool dry) {
    ms_config config = {0};
    config.backend = o->place.backend;
    config.memory_budget_bytes = budget_bytes;
    config.dry_run = dry;
    config.offloading = o->offloading;
    config.log = log_warnings;
    config.debug = o->debug;
    config.seed = (uint64_t)o->seed;
    config.accumulation_steps = (uint32_t)o->accumulate;
    if (ms_create(&config, &c->model) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(c->model));
    }
    c->net = nn_create_on(c->model, o->place.kernels);
    if (!c->net) {
        return fail("no memory for a net");
    }
    build_net(c, o);
    ms_optimizer_desc adamw = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
    adamw.weight_decay = 0.01f;
    adamw.grad_clip_norm = o->clip;
    ms_set_optimizer(c->model, &adamw);
    return ms_wrap(c->model) == MS_RESULT_OK ? 0 : fail("%s", ms_last_error(c->model));
}

/* Resumes a run, in which batches and the loss that is shown go on too, or writes initial params.
   What a net without a budget has saved would do as well: plans differ, values do not. */
static int start_net(trainer *t, classifier *c) {
    settings *o = &t->options;
    if (ms_save_extra(c->model, "random", &t->random, sizeof t->random) != MS_RESULT_OK ||
        ms_save_extra(c->model, "loss", &t->mean, sizeof t->mean) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(c->model));
    }
    if (checkpoint_load(&o->saving, c->model) != 0) {
        return 1;
    }
    if (!o->saving.is_resumed && nn_init(c->net, (uint64_t)o->seed) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(c->model));
    }
    return 0;
}

static void free_net(classifier *c) {
    ms_destroy(c->model);
    nn_destroy(c->net);
    c->model = NULL;
    c->net = NULL;
}

/* Plans without memory, to learn the plain and the smallest arena, and turns the name of a budget
   into bytes. */
static int choose_budget(trainer *t, uint64_t *budget_bytes) {
    uint64_t smallest;
    ms_memory_report plain;
    if (make_net(&t->plain, &t->options, UINT64_MAX, true) != 0) {
        return 1;
    }
    if (ms_report(t->plain.model, &plain) != MS_RESULT_OK ||
        ms_smallest_budget(t->plain.model, &smallest) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->plain.model));
    }
    if (choose_bytes(&t->options.budget, t->plain.model, budget_bytes) != 0) {
        return 1;
    }
    free_net(&t->plain);
    printf("model     %u layers, %llu params; batch %lld x %lld of 1 x %d x %d\n",
           (unsigned)plain.layer_count, (unsigned long long)plain.param_count,
           (long long)t->options.accumulate, (long long)t->options.batch, SIZE, SIZE);
    printf("memory    plain %.2f MiB, smallest %.2f MiB, budget %.2f MiB", // and arena, below
           rounded_up(mebibytes(plain.plain_bytes), 2), rounded_up(mebibytes(smallest), 2),
           mebibytes(*budget_bytes));
    return 0;
}

static int print_arena(const classifier *c) {
    ms_memory_report r;
    if (ms_report(c->model, &r) != MS_RESULT_OK) {
        return fail("the model has no plan");
    }
    printf(", arena %.2f MiB: %.0f %% of plain, for %.1f %% more work\n",
           rounded_up(mebibytes(r.arena_bytes), 2),
           100.0 * (double)r.arena_bytes / (double)r.plain_bytes, 100.0 * r.recompute_share);
    return 0;
}

// ---- training -----------------------------------------------------------------------------------

/* Linear warm-up, then a cosine down to zero (Loshchilov and Hutter, "SGDR", 2017, eq. 5). */
static float learning_rate(const settings *o, int64_t step) {
    const double warm = step < WARMUP_STEPS ? (double)(step + 1) / (double)WARMUP_STEPS : 1.0;
    const double done = (double)step / (double)o->steps;
    return (float)((double)o->rate * warm * (0.5 + 0.5 * cos(3.14159265358979 * done)));
}

static int train_batch(const trainer *t, const classifier *c, float rate, double *loss) {
    ms_set_learning_rate(c->model, rate);
    if (ms_write(c->model, c->images, t->images) != MS_RESULT_OK ||
        ms_write(c->model, c->labels, t->labels) != MS_RESULT_OK ||
        ms_step(c->model, loss) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(c->model));
    }
    return 0;
}

/* One update: all of its micro-batches, on one net or on both. */
static int train_step(trainer *t, int64_t step) {
    const float rate = learning_rate(&t->options, step);
    t->loss = 0.0;
    for (int64_t micro = 0; micro < t->options.accumulate; micro++) {
        double loss;
        double plain_loss;
        draw_batch(t);
        if (train_batch(t, &t->trained, rate, &loss) != 0) {
            return 1;
        }
        t->loss += loss / (double)t->options.accumulate;
        if (!t->options.check) {
            continue;
        }
        if (train_batch(t, &t->plain, rate, &plain_loss) != 0) {
            return 1;
        }
        if (memcmp(&loss, &plain_loss, sizeof loss) != 0) {
            return fail("step %lld: loss %.17g, without a budget %.17g", (long long)step + 1, loss,
                        plain_loss);
        }
    }
    return 0;
}

static int train(trainer *t) {
    checkpoint *saving = &t->options.saving;
    const double started = seconds_now();
    const int64_t first = saving->step, steps = t->options.steps;
    for (int64_t step = first; step < steps && !saving->is_stopped; step++) {
        if (train_step(t, step) != 0) {
            return 1;
        }
        t->mean = step == 0 ? t->loss : 0.9 * t->mean + 0.1 * t->loss;
        const int64_t done = step + 1;
        if (done == 1 || done * 10 / steps != step * 10 / steps) {
            printf("step %5lld  loss %.3f  %.0f images/s\n", (long long)done, t->mean,
                   (double)((done - first) * t->options.batch * t->options.accumulate) /
                       (seconds_now() - started));
            fflush(stdout);
        }
        if (checkpoint_step(saving, t->trained.model, done, done == steps) != 0) {
            return 1;
        }
    }
    return 0;
}

static int same_values(trainer *t, const nn_param_info *a, const nn_param_info *b) {
    const size_t count = (size_t)ms_shape_count(&a->shape);
    float *values = (float *)malloc(2 * count * sizeof *values);
    int result = 0;
    if (!values) {
        return fail("no memory for %s", a->name);
    }
    if (ms_read(t->trained.model, a->tensor, values) != MS_RESULT_OK ||
        ms_read(t->plain.model, b->tensor, values + count) != MS_RESULT_OK) {
        result = fail("%s cannot be read", a->name);
    } else if (memcmp(values, values + count, count * sizeof *values) != 0) {
        result = fail("%s differs from that without a budget", a->name);
    }
    free(values);
    return result;
}

/* Compares params and running statistics of both nets; losses are compared in each step. */
static int check_values(trainer *t) {
    const nn_net *a = t->trained.net;
    const nn_net *b = t->plain.net;
    for (int64_t i = 0; i < nn_param_count(a); i++) {
        if (same_values(t, nn_param_at(a, i), nn_param_at(b, i)) != 0) {
            return 1;
        }
    }
    for (int64_t i = 0; i < nn_buffer_count(a); i++) {
        if (same_values(t, nn_buffer_at(a, i), nn_buffer_at(b, i)) != 0) {
            return 1;
        }
    }
    printf("check     losses, %lld params and %lld running statistics are those of the plain net, "
           "bit for bit\n",
           (long long)nn_param_count(a), (long long)nn_buffer_count(a));
    return 0;
}

static int64_t count_right(const trainer *t, int64_t count) {
    int64_t right = 0;
    for (int64_t b = 0; b < count; b++) {
        const float *row = t->logits + b * CLASSES;
        int32_t best = 0;
        for (int32_t i = 1; i < CLASSES; i++) {
            best = row[i] > row[best] ? i : best;
        }
        right += best == t->labels[b];
    }
    return right;
}

static int test_batch(trainer *t, int64_t first, int64_t count, int64_t *right) {
    const classifier *c = &t->trained;
    draw_test_batch(t, first, count);
    if ((count < t->options.batch && ms_reshape(c->model, &count) != MS_RESULT_OK) ||
        ms_write(c->model, c->images, t->images) != MS_RESULT_OK ||
        ms_write(c->model, c->labels, t->labels) != MS_RESULT_OK ||
        ms_eval(c->model, NULL) != MS_RESULT_OK ||
        ms_read(c->model, c->logits, t->logits) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(c->model));
    }
    *right += count_right(t, count);
    return 0;
}

/* Prints the share of the test set for which the largest logit is that of the right class. */
static int test(trainer *t) {
    const settings *o = &t->options;
    int64_t right = 0;
    for (int64_t first = 0; first < o->test; first += o->batch) {
        if (test_batch(t, first, nn_least(o->batch, o->test - first), &right) != 0) {
            return 1;
        }
    }
    if (ms_reshape(t->trained.model, &o->batch) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->trained.model));
    }
    t->accuracy = (double)right / (double)o->test;
    printf("test      %.2f %% of %lld images right\n", 100.0 * t->accuracy, (long long)o->test);
    return 0;
}

// ---- main ---------------------------------------------------------------------------------------

static int allocate_batch(trainer *t) {
    const size_t batch = (size_t)t->options.batch;
    t->images = (float *)malloc(batch * PIXELS * sizeof *t->images);
    t->labels = (int32_t *)malloc(batch * sizeof *t->labels);
    t->logits = (float *)malloc(batch * CLASSES * sizeof *t->logits);
    return t->images && t->labels && t->logits ? 0 : fail("no memory for a batch");
}

static int run(trainer *t) {
    uint64_t budget_bytes = 0;
    t->random = nn_mix(test_seed(t));
    printf("memscale.h %d.%d.%d, a convolutional net on drawn shapes\n\n", MEMSCALE_VERSION_MAJOR,
           MEMSCALE_VERSION_MINOR, MEMSCALE_VERSION_PATCH);
    if (choose_budget(t, &budget_bytes) != 0 ||
        make_net(&t->trained, &t->options, budget_bytes, t->options.dry) != 0 ||
        print_arena(&t->trained) != 0) {
        return 1;
    }
    if (t->options.dry) {
        return 0;
    }
    if (allocate_batch(t) != 0 || start_net(t, &t->trained) != 0 ||
        (t->options.check && (make_net(&t->plain, &t->options, UINT64_MAX, false) != 0 ||
                              start_net(t, &t->plain) != 0))) {
        return 1;
    }
    checkpoint_print(&t->options.saving);
    printf("\n");
    if (train(t) != 0 || (!t->options.saving.is_stopped && test(t) != 0)) {
        return 1;
    }
    print_debugged(t->options.debug);
    return t->options.check ? check_values(t) : 0;
}

static void free_trainer(trainer *t) {
    free_net(&t->trained);
    free_net(&t->plain);
    free(t->images);
    free(t->labels);
    free(t->logits);
}

int main(int argc, char **argv) {
    trainer t;
    memset(&t, 0, sizeof t);
    if (parse_options(&t.options, argc, argv) != 0) {
        return 2;
    }
    const int result = run(&t);
    free_trainer(&t);
    return result;
}
