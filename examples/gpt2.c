/*  gpt2 - trains a GPT-2 on the bytes of text files, inside a byte budget, and lets it write.

        build/examples/gpt2                             about a minute, on this repository's own text
        build/examples/gpt2 --budget 40M --steps 500 book.txt
        build/examples/gpt2 --preset 1558M --batch 1 --sequence 512 --dry

    The plan of a model of any size is known before a byte of it is allocated: --dry stops there. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#define OPTIONS_PROGRAM "gpt2"
#include "options.h"

#include <time.h>
#include <unistd.h>

enum { MAX_FILES = 64, MAX_SPACES = 12, SAMPLE_BYTES = 240, BYTE_COUNT = 256, WARMUP_STEPS = 20 };

static const char *const default_files[] = {"memscale.h", "README.md", "docs/getting-started.md",
                                            "docs/internals.md", "examples/nn.h"};

typedef struct settings {
    const char *preset;
    int64_t batch, sequence, steps, seconds, seed;
    uint64_t budget_bytes; // 0: half way between the smallest and the plain arena
    bool dry, plan, help;
    const char *files[MAX_FILES];
    int file_count;
} settings;

typedef struct trainer {
    settings options;
    nn_transformer_config shape;
    ms_model *model;
    nn_net *net;
    nn_transformer gpt2;
    uint8_t *text;
    int64_t text_bytes;
    int spaces;                // at the end of the text
    int32_t *tokens, *targets; // (B, T)
    float *logits;             // (B, T, V), for sampling
    uint64_t random;
} trainer;

// ---- options ------------------------------------------------------------------------------------

static void print_help(void) {
    printf(
        "usage: gpt2 [options] [text file ...]\n\n"
        "  --preset NAME    small (default), 124M, 355M, 774M, 1558M\n"
        "  --batch N        sequences per step (8; presets other than small: 4)\n"
        "  --sequence N     bytes per sequence (64)\n"
        "  --budget SIZE    bytes that training may take, such as 300M or 1.5G (powers of 1024;\n"
        "                   default: half way from the smallest possible to the plain arena)\n"
        "  --steps N        stop after N steps\n"
        "  --seconds N      stop after N seconds (45, unless --steps is given)\n"
        "  --seed N         of weights, batches and sampling (1)\n"
        "  --dry            plan only: allocate and train nothing\n"
        "  --plan           list the plan layer by layer, and its program\n"
        "  --help           this text\n\n"
        "The default text is this repository's own: run it there, or name files.\n");
}

static int parse_value(settings *o, const char *name, const char *text) {
    const struct {
        const char *name;
        int64_t *value;
    } numbers[] = {{"--batch", &o->batch},
                   {"--sequence", &o->sequence},
                   {"--steps", &o->steps},
                   {"--seconds", &o->seconds},
                   {"--seed", &o->seed}};
    const char *value = text ? text : "(nothing)";
    if (strcmp(name, "--preset") == 0) {
        o->preset = value;
        return 0;
    }
    if (strcmp(name, "--budget") == 0) {
        o->budget_bytes = (uint64_t)parse_number(value, true);
        return o->budget_bytes ? 0 : fail("--budget %s: give a size such as 300M or 1.5G", value);
    }
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (strcmp(name, numbers[i].name) == 0) {
            *numbers[i].value = parse_count(name, value, INT32_MAX);
            return *numbers[i].value == 0;
        }
    }
    return fail("unknown option %s; --help lists them", name);
}

static int parse_options(settings *o, int argc, char **argv) {
    memset(o, 0, sizeof *o);
    o->preset = "small";
    o->seed = 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            o->help = true;
        } else if (strcmp(argv[i], "--dry") == 0) {
            o->dry = true;
        } else if (strcmp(argv[i], "--plan") == 0) {
            o->plan = true;
        } else if (argv[i][0] == '-') {
            if (parse_value(o, argv[i], argv[i + 1]) != 0) {
                return 1;
            }
            i++;
        } else if (o->file_count == MAX_FILES) {
            return fail("more than %d text files", MAX_FILES);
        } else {
            o->files[o->file_count++] = argv[i];
        }
    }
    if (o->steps == 0 && o->seconds == 0) {
        o->seconds = 45;
    }
    return 0;
}

static int choose_shape(const settings *o, nn_transformer_config *shape) {
    const bool small = strcmp(o->preset, "small") == 0;
    memset(shape, 0, sizeof *shape);
    if (small) {
        shape->vocabulary = BYTE_COUNT;
        shape->context = 1024;
        shape->layers = 4;
        shape->heads = 4;
        shape->channels = 128;
    } else {
        char name[32];
        snprintf(name, sizeof name, "gpt2-%s", o->preset);
        if (!nn_preset(name, shape)) {
            return fail("--preset %s: there are small, 124M, 355M, 774M and 1558M", o->preset);
        }
    }
    shape->batch = o->batch ? o->batch : small ? 8 : 4;
    shape->sequence = o->sequence ? o->sequence : 64;
    if (shape->sequence > shape->context) {
        return fail("--sequence %lld: the position table of this preset has %lld rows",
                    (long long)shape->sequence, (long long)shape->context);
    }
    return 0;
}

// ---- text ---------------------------------------------------------------------------------------

/* Long runs of spaces, such as the right margin of a macro, are cut: they are easy to learn, and
   would soon be all that it writes. There is room for the byte. */
static void append_byte(trainer *t, uint8_t byte) {
    t->spaces = byte == ' ' ? t->spaces + 1 : 0;
    if (t->spaces <= MAX_SPACES) {
        t->text[t->text_bytes++] = byte;
    }
}

static int append_file(trainer *t, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        return fail("cannot read %s; name text files, or run in the repository's folder", path);
    }
    uint8_t block[4096];
    size_t count;
    int result = 0;
    while (result == 0 && (count = fread(block, 1, sizeof block, file)) > 0) {
        uint8_t *grown = (uint8_t *)realloc(t->text, (size_t)t->text_bytes + count);
        if (!grown) {
            result = fail("no memory for %s", path);
            break;
        }
        t->text = grown;
        for (size_t i = 0; i < count; i++) {
            append_byte(t, block[i]);
        }
    }
    if (result == 0 && ferror(file)) {
        result = fail("cannot read %s", path);
    }
    fclose(file);
    return result;
}

static int read_text(trainer *t) {
    const char *const *files = t->options.file_count ? t->options.files : default_files;
    const int count = t->options.file_count ? t->options.file_count
                                            : (int)(sizeof default_files / sizeof *default_files);
    for (int i = 0; i < count; i++) {
        if (append_file(t, files[i]) != 0) {
            return 1;
        }
    }
    if (t->text_bytes <= t->shape.sequence) {
        return fail("the text has %lld bytes; a sequence of %lld needs at least %lld",
                    (long long)t->text_bytes, (long long)t->shape.sequence,
                    (long long)t->shape.sequence + 1);
    }
    printf("text      %lld bytes from %d file%s\n", (long long)t->text_bytes, count,
           count == 1 ? "" : "s");
    return 0;
}

static uint64_t next_random(trainer *t) {
    t->random ^= t->random << 13;
    t->random ^= t->random >> 7;
    t->random ^= t->random << 17;
    return t->random;
}

/* Random windows of the text; the target of each byte is the one that follows. */
static void draw_batch(trainer *t) {
    for (int64_t b = 0; b < t->shape.batch; b++) {
        const uint64_t starts = (uint64_t)(t->text_bytes - t->shape.sequence);
        const uint8_t *window = t->text + next_random(t) % starts;
        for (int64_t i = 0; i < t->shape.sequence; i++) {
            t->tokens[b * t->shape.sequence + i] = window[i];
            t->targets[b * t->shape.sequence + i] = window[i + 1];
        }
    }
}

// ---- model --------------------------------------------------------------------------------------

/* Registers the model with memscale.h. A dry one plans without allocating. */
static int make_model(trainer *t, uint64_t budget_bytes, bool dry) {
    ms_config config = {0};
    config.memory_budget_bytes = budget_bytes;
    config.dry_run = dry;
    config.seed = (uint64_t)t->options.seed;
    if (ms_create(&config, &t->model) != MS_RESULT_OK) {
        return fail("no memory for a model");
    }
    t->net = nn_create(t->model);
    if (!t->net) {
        return fail("no memory for a net");
    }
    t->gpt2 = nn_gpt2(t->net, &t->shape);
    ms_set_eval_output(t->model, t->gpt2.logits);
    ms_optimizer_desc adamw = {0};
    adamw.beta2 = 0.95f;
    adamw.weight_decay = 0.1f;
    ms_set_optimizer(t->model, &adamw);
    return 0;
}

static void free_model(trainer *t) {
    ms_destroy(t->model);
    nn_destroy(t->net);
    t->model = NULL;
    t->net = NULL;
}

static double mebibytes(uint64_t bytes) {
    return (double)bytes / 1048576.0;
}

static int print_machine(trainer *t) {
    ms_hardware h;
    if (ms_hardware_report(t->model, &h) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    printf("machine   %s, %u processors, %.1f GiB, %.1f GiB free\n", h.name, h.processor_count,
           mebibytes(h.total_bytes) / 1024.0, mebibytes(h.free_bytes) / 1024.0);
    return 0;
}

/* Plans without memory, to learn the smallest and the plain arena, and chooses a budget between
   them if none was given. */
static int choose_budget(trainer *t, uint64_t *budget_bytes) {
    uint64_t smallest;
    ms_memory_report plain;
    if (make_model(t, UINT64_MAX, true) != 0 || ms_wrap(t->model) != MS_RESULT_OK ||
        ms_report(t->model, &plain) != MS_RESULT_OK ||
        ms_smallest_budget(t->model, &smallest) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    *budget_bytes = t->options.budget_bytes;
    if (*budget_bytes == 0) {
        *budget_bytes = smallest + (plain.plain_bytes - smallest) / 2;
    }
    if (print_machine(t) != 0) {
        return 1;
    }
    printf("model     %s: %lld layers, %lld channels, %lld heads, vocabulary %lld: %.2f M params; "
           "batch %lld x %lld\n",
           t->options.preset, (long long)t->shape.layers, (long long)t->shape.channels,
           (long long)t->shape.heads, (long long)t->shape.vocabulary,
           (double)plain.param_count / 1e6, (long long)t->shape.batch,
           (long long)t->shape.sequence);
    printf("plain     %9.1f MiB, what training takes without a plan\n",
           mebibytes(plain.plain_bytes));
    printf("smallest  %9.1f MiB, with all the recomputation that helps\n", mebibytes(smallest));
    free_model(t);
    return 0;
}

static void print_text(const char *text, size_t length, void *user) {
    fwrite(text, 1, length, (FILE *)user);
}

static int print_plan(trainer *t) {
    ms_memory_report r;
    if (ms_report(t->model, &r) != MS_RESULT_OK) {
        return fail("the model has no plan");
    }
    printf("budget    %9.1f MiB%s\n", mebibytes(r.budget_bytes),
           t->options.budget_bytes ? "" : ", half way between (choose with --budget)");
    printf("arena     %9.1f MiB, all that it will ever use: %.0f %% of plain, for %.1f %% more "
           "work\n",
           mebibytes(r.arena_bytes), 100.0 * (double)r.arena_bytes / (double)r.plain_bytes,
           100.0 * r.recompute_share);
    printf("  its peak");
    for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
        if (r.peak_bytes[c] >= r.arena_bytes / 500) {
            printf("  %s %.1f", ms_category_name((ms_category)c), mebibytes(r.peak_bytes[c]));
        }
    }
    printf(" MiB\n");
    if (t->options.plan &&
        (ms_print_plan(t->model, print_text, stdout) != MS_RESULT_OK ||
         ms_print_program(t->model, MS_PROGRAM_TRAIN, print_text, stdout) != MS_RESULT_OK)) {
        return fail("the plan cannot be printed");
    }
    return 0;
}

// ---- training -----------------------------------------------------------------------------------

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct progress {
    int64_t step;
    double started, done; // done: from 0 to 1
    double loss;          // running mean
    bool terminal;
    int printed; // tenths of the run that have a line already
} progress;

static void advance(progress *p, const settings *o) {
    const double by_steps = o->steps ? (double)p->step / (double)o->steps : 0.0;
    const double by_time = o->seconds ? (seconds_now() - p->started) / (double)o->seconds : 0.0;
    p->done = by_steps > by_time ? by_steps : by_time;
    p->done = p->done < 1.0 ? p->done : 1.0;
}

/* On a terminal one line that moves; elsewhere a line for every tenth. */
static void print_progress(const trainer *t, progress *p, uint64_t arena_bytes) {
    char bar[25];
    const int filled = (int)(p->done * 24.0);
    const int tenth = (int)(p->done * 10.0);
    if (!p->terminal && tenth == p->printed && p->step > 1) {
        return;
    }
    p->printed = tenth;
    for (int i = 0; i < 24; i++) {
        bar[i] = i < filled ? '#' : '.';
    }
    bar[24] = 0;
    const double seconds = seconds_now() - p->started;
    printf("%sstep %5lld [%s] loss %.3f  %.0f tokens/s  %.1f MiB%s", p->terminal ? "\r" : "",
           (long long)p->step, bar, p->loss,
           (double)(p->step * t->shape.batch * t->shape.sequence) / seconds, mebibytes(arena_bytes),
           p->terminal && p->done < 1.0 ? "  " : "\n");
    fflush(stdout);
}

/* Linear warm-up, then a cosine down to a tenth (Loshchilov and Hutter, "SGDR", 2017, eq. 5). */
static float learning_rate(const trainer *t, const progress *p) {
    const double top = t->shape.channels < 512 ? 2e-3 : 3e-4;
    const double warm = p->step < WARMUP_STEPS ? (double)(p->step + 1) / (double)WARMUP_STEPS : 1.0;
    return (float)(top * warm * (0.55 + 0.45 * cos(3.14159265358979 * p->done)));
}

static int train(trainer *t) {
    ms_memory_report report;
    progress p;
    memset(&p, 0, sizeof p);
    p.started = seconds_now();
    p.terminal = isatty(STDOUT_FILENO) != 0;
    if (ms_report(t->model, &report) != MS_RESULT_OK) {
        return fail("the model has no plan");
    }
    while (p.done < 1.0) {
        double loss;
        draw_batch(t);
        ms_set_learning_rate(t->model, learning_rate(t, &p));
        if (ms_write(t->model, t->gpt2.tokens, t->tokens) != MS_RESULT_OK ||
            ms_write(t->model, t->gpt2.targets, t->targets) != MS_RESULT_OK ||
            ms_step(t->model, &loss) != MS_RESULT_OK) {
            return fail("%s", ms_last_error(t->model));
        }
        p.step++;
        p.loss = p.step == 1 ? loss : 0.9 * p.loss + 0.1 * loss;
        advance(&p, &t->options);
        print_progress(t, &p, report.arena_bytes);
    }
    return 0;
}

// ---- sampling -----------------------------------------------------------------------------------

/* One byte from softmax(logits / 0.7). */
static int32_t draw_byte(trainer *t, const float *logits) {
    double weights[BYTE_COUNT], sum = 0.0;
    float highest = logits[0];
    for (int i = 1; i < BYTE_COUNT; i++) {
        highest = logits[i] > highest ? logits[i] : highest;
    }
    for (int i = 0; i < BYTE_COUNT; i++) {
        weights[i] = exp((double)(logits[i] - highest) / 0.7);
        sum += weights[i];
    }
    double mark = (double)(next_random(t) >> 11) / 9007199254740992.0 * sum;
    for (int i = 0; i < BYTE_COUNT; i++) {
        mark -= weights[i];
        if (mark < 0.0) {
            return i;
        }
    }
    return BYTE_COUNT - 1;
}

static void print_byte(int32_t byte) {
    putchar(byte == '\n' || (byte >= 32 && byte < 127) ? (int)byte : '?');
    fflush(stdout);
}

/* Lets the model go on from a start, in the first row of the batch. */
static int sample(trainer *t) {
    const int64_t window = t->shape.sequence, vocabulary = t->shape.vocabulary;
    const int64_t rows = t->shape.batch * window;
    int64_t used = 0;
    for (int64_t i = 0; i < rows; i++) {
        t->tokens[i] = '\n';
        t->targets[i] = -1;
    }
    for (const char *c = "static "; *c && used < window; c++) {
        t->tokens[used++] = *c;
    }
    printf("\nwhat it writes after \"static \":\n\nstatic ");
    for (int n = 0; n < SAMPLE_BYTES; n++) {
        if (ms_write(t->model, t->gpt2.tokens, t->tokens) != MS_RESULT_OK ||
            ms_write(t->model, t->gpt2.targets, t->targets) != MS_RESULT_OK ||
            ms_eval(t->model, NULL) != MS_RESULT_OK ||
            ms_read(t->model, t->gpt2.logits, t->logits) != MS_RESULT_OK) {
            return fail("%s", ms_last_error(t->model));
        }
        const int32_t byte = draw_byte(t, t->logits + (used - 1) * vocabulary);
        print_byte(byte);
        if (used == window) {
            memmove(t->tokens, t->tokens + 1, (size_t)(window - 1) * sizeof *t->tokens);
            used--;
        }
        t->tokens[used++] = byte;
    }
    printf("\n");
    return 0;
}

// ---- main ---------------------------------------------------------------------------------------

static int allocate_batch(trainer *t) {
    const size_t rows = (size_t)(t->shape.batch * t->shape.sequence);
    t->tokens = (int32_t *)malloc(rows * sizeof *t->tokens);
    t->targets = (int32_t *)malloc(rows * sizeof *t->targets);
    t->logits = (float *)malloc(rows * (size_t)t->shape.vocabulary * sizeof *t->logits);
    return t->tokens && t->targets && t->logits ? 0 : fail("no memory for a batch");
}

static int run(trainer *t) {
    uint64_t budget_bytes = 0;
    t->random = 0x9e3779b97f4a7c15u ^ (uint64_t)t->options.seed;
    printf("memscale.h %d.%d.%d, GPT-2 on bytes\n\n", MEMSCALE_VERSION_MAJOR,
           MEMSCALE_VERSION_MINOR, MEMSCALE_VERSION_PATCH);
    if (choose_shape(&t->options, &t->shape) != 0 || choose_budget(t, &budget_bytes) != 0 ||
        make_model(t, budget_bytes, t->options.dry) != 0) {
        return 1;
    }
    if (ms_wrap(t->model) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    if (print_plan(t) != 0 || t->options.dry) {
        return t->options.dry ? 0 : 1;
    }
    if (read_text(t) != 0 || allocate_batch(t) != 0) {
        return 1;
    }
    if (nn_init(t->net, (uint64_t)t->options.seed) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    printf("\n");
    return train(t) != 0 || sample(t) != 0;
}

int main(int argc, char **argv) {
    trainer t;
    memset(&t, 0, sizeof t);
    if (parse_options(&t.options, argc, argv) != 0) {
        return 2;
    }
    if (t.options.help) {
        print_help();
        return 0;
    }
    const int result = run(&t);
    free_model(&t);
    free(t.text);
    free(t.tokens);
    free(t.targets);
    free(t.logits);
    return result;
}
