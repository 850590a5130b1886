/*  estimate - how much memory and time training a model takes on a GPU, before you have one.

        build/examples/estimate --model gpt2-1558M --batch 1 --sequence 512 --gpu "RTX 3090"
        build/examples/estimate --model llama3-8B --batch 4 --sequence 2048 --gpu H200 --json
        build/examples/estimate path/to/config.json --gpu 24GB --clip 1 --accumulate 8
        build/examples/estimate --family gpt2 --layers 48 --channels 2048 --heads 32 --gpu 16G
        build/examples/estimate --model bert-large --batch 16 --sequence 128 --sweep budgets.svg
        build/examples/estimate --model qwen2.5-7B --gpu 4090 --precision bf16-alone --state bf16
            --gradients bf16 --batch 4 --sequence 1024 --tokens 524288

    Every number comes from the library: the model is registered as its trainer would do it, planned
    by a dry run, which does not allocate its memory, and described by ms_report. GPT-2 and BERT are
    the nets of nn.h, which examples/gpt2 and examples/bert train; Llama, Mistral and Qwen2.5 are
    llama_shape.h, which has no kernels. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "llama_shape.h"

#include "options.h"

#include "model_shape.h"
#include "page.h"

#include <unistd.h>

/* What the program returns. */
enum { STATUS_FITS, STATUS_FAILED, STATUS_USAGE, STATUS_NO_FIT };

// ---- options ------------------------------------------------------------------------------------

typedef struct settings {
    const char *model, *family, *gpu, *optimizer, *offload, *sweep, *html, *mode;
    const char *precision, *gradients, *state; // NULL: not said
    int64_t layers, channels, heads, kv_heads, feed_forward, vocabulary, positions;
    int64_t batch, sequence, accumulate, tokens, rank;
    float tflops, tf32_tflops, f16_tflops, bandwidth, link;
    float clip, utilization;
    uint64_t budget_bytes, host_bytes; // 0: a share of the memory; as much as is needed
    bool frozen, plan, full_plan, json, progress, help;
    ms_switch offloading;
    option_words files;
} settings;

enum { ESTIMATE_OPTIONS = 38 };

static void list_options(settings *s, option_spec *specs) {
    const option_spec all[ESTIMATE_OPTIONS] = {
        {"--model", "NAME", OPTION_TEXT, &s->model, "a published model (gpt2-124M); see below"},
        {"--family", "NAME", OPTION_TEXT, &s->family,
         "gpt2, bert or llama: a model of your own, of the sizes below; or what a\n"
         "config.json is to be taken for"},
        {"--layers", "N", OPTION_COUNT, &s->layers, "blocks"},
        {"--channels", "N", OPTION_COUNT, &s->channels, "width of the residual stream"},
        {"--heads", "N", OPTION_COUNT, &s->heads,
         "heads of attention; channels must be a multiple"},
        {"--kv-heads", "N", OPTION_COUNT, &s->kv_heads,
         "llama: heads of keys and values; heads must be a multiple (all)"},
        {"--feed-forward", "N", OPTION_COUNT, &s->feed_forward,
         "llama: width of the feed-forward net (8/3 of the channels, up to a\n"
         "multiple of 256); gpt2 and bert have 4 times the channels"},
        {"--vocabulary", "N", OPTION_COUNT, &s->vocabulary,
         "tokens (gpt2: 50257, bert: 30522, llama: 32000)"},
        {"--positions", "N", OPTION_COUNT, &s->positions,
         "gpt2, bert: rows of the position table (1024, 512)"},
        {"--batch", "N", OPTION_COUNT, &s->batch, "sequences at a time (4)"},
        {"--sequence", "N", OPTION_COUNT, &s->sequence, "tokens per sequence (512)"},
        {"--precision", "NAME", OPTION_TEXT, &s->precision,
         "what layers compute in. f32; tf32: the same bytes, faster products; bf16 or\n"
         "f16, with params in f32 beside; bf16-alone or f16-alone: without. By\n"
         "default f32, and 16 bits where mode AGGRESSIVE gains by them"},
        {"--gradients", "NAME", OPTION_TEXT, &s->gradients,
         "of weights: f32 (default), or the 16 bits of --precision, bf16 or f16"},
        {"--state", "NAME", OPTION_TEXT, &s->state,
         "of the optimizer: f32 or bf16. By default f32, and 8 bits where mode\n"
         "AGGRESSIVE gains by them"},
        {"--optimizer", "NAME", OPTION_TEXT, &s->optimizer,
         "adamw (default), lion, sgd, or momentum: SGD with one moment"},
        {"--clip", "X", OPTION_REAL, &s->clip, OPTION_CLIP_HELP ", for which all exist at once"},
        {"--accumulate", "N", OPTION_COUNT, &s->accumulate,
         "gradients are summed over N batches before each update (1)"},
        {"--tokens", "N", OPTION_COUNT, &s->tokens,
         "the same by the tokens of a step, rounded up to whole batches"},
        {"--frozen", NULL, OPTION_FLAG, &s->frozen,
         "train adapters beside the linear layers of the blocks; all else is frozen"},
        {"--rank", "N", OPTION_COUNT, &s->rank, "of these adapters (8)"},
        {"--gpu", "NAME|SIZE", OPTION_TEXT, &s->gpu,
         "a device by its name (RTX 3090), or bytes such as 24GB, or cpu: this\n"
         "machine"},
        {"--tflops", "X", OPTION_REAL, &s->tflops,
         "its F32 matrix products, 1e12 flops a second, if they are others"},
        {"--tf32-tflops", "X", OPTION_REAL, &s->tf32_tflops, "those in TF32"},
        {"--f16-tflops", "X", OPTION_REAL, &s->f16_tflops, "those in BF16 and F16"},
        {"--bandwidth", "X", OPTION_REAL, &s->bandwidth, "its memory, 1e9 bytes a second"},
        {"--link", "X", OPTION_REAL, &s->link, "copies from and to the host, 1e9 bytes a second"},
        {"--budget", "SIZE", OPTION_BYTES, &s->budget_bytes,
         "what training may take: bytes such as 300M or 1.5G (powers of 1024)"},
        {"--utilization", "X", OPTION_REAL, &s->utilization,
         "without a budget: what training may take of the device's memory (0.85)"},
        {"--offload", "NAME", OPTION_TEXT, &s->offload, OPTION_OFFLOAD_HELP},
        {"--host", "SIZE", OPTION_BYTES, &s->host_bytes,
         "what training may have on the host, such as 32G (as much as it needs)"},
        {"--plan", NULL, OPTION_FLAG, &s->plan,
         "list the advised plan: the largest values at its peak, and what was decided\n"
         "for each layer and why, with equal blocks of layers as one"},
        {"--plan=full", NULL, OPTION_FLAG, &s->full_plan, "list every layer and every value"},
        {"--mode", "NAME", OPTION_TEXT, &s->mode,
         "whose plan that is: conservative, balanced or aggressive (the advised one)"},
        {"--json", NULL, OPTION_FLAG, &s->json, "the numbers for programs, on standard output"},
        {"--sweep", "FILE", OPTION_TEXT, &s->sweep,
         "draw peak and time over budgets, as SVG; takes a while longer"},
        {"--html", "FILE", OPTION_TEXT, &s->html,
         "a page for a browser: the memory of a step over time, what lives there and why,\n"
         "what the streams do, and budgets, for each mode; takes as long"},
        {"--progress", NULL, OPTION_FLAG, &s->progress,
         "say on standard error how many plans are made, also where that is no terminal"},
        {"--help", NULL, OPTION_FLAG, &s->help, "this text"},
    };
    memcpy(specs, all, sizeof all);
}

enum { MOST_DEVICES = 256 };

/* The names of the built-in devices; returns how many there are. */
static int list_devices(const char *names[MOST_DEVICES]) {
    int count = 0;
    for (const ms_hardware *h; count < MOST_DEVICES; names[count++] = h->name) {
        h = ms_hardware_at((uint32_t)count);
        if (!h) {
            break;
        }
    }
    return count;
}

static void print_help(void) {
    settings s;
    option_spec specs[ESTIMATE_OPTIONS];
    const char *models[PUBLISHED_MODELS], *devices[MOST_DEVICES];
    list_options(&s, specs);
    list_models(models);
    print_options("[options] [config.json]", specs, ESTIMATE_OPTIONS);
    printf("\nA config.json as published with weights: of GPT-2, BERT, Llama, Mistral or Qwen2.5.\n"
           "Models (sizes given beside a name or a file replace those of the model):\n");
    print_names(stdout, models, PUBLISHED_MODELS, 0, "");
    printf("\nDevices:\n");
    print_names(stdout, devices, list_devices(devices), 0, "");
    printf("\nThe exit status is %d if the batch fits the budget in some mode, %d if in none, %d\n"
           "after an error, and %d after a mistake in the options.\n",
           STATUS_FITS, STATUS_NO_FIT, STATUS_FAILED, STATUS_USAGE);
}

static const ms_mode modes[] = {MS_MODE_CONSERVATIVE, MS_MODE_BALANCED, MS_MODE_AGGRESSIVE};
enum { MODES = sizeof modes / sizeof modes[0], COLUMNS = MODES + 1 };

/* The number of a mode; MODES: there is none of that name. */
static int find_mode(const char *name) {
    int i = 0;
    while (i < MODES && !has_suffix(name, ms_mode_name(modes[i]))) {
        i++;
    }
    return i;
}

/* Batches of so many sequences that make up a step. */
static int64_t batches_of_step(const settings *o, int64_t batch) {
    const int64_t tokens = batch * o->sequence;
    return o->tokens ? (o->tokens + tokens - 1) / tokens : o->accumulate;
}

// ---- the model ----------------------------------------------------------------------------------

static int start_shape(const settings *o, shape *s) {
    const bool has_file = o->files.count > 0;
    if (o->files.count > 1 || (o->model && (o->family || has_file))) {
        return fail("--model, --family and a file: give one of them, or a file and its family");
    }
    if (has_file) {
        return read_model(o->files.items[0], o->family, s);
    }
    if (o->family) {
        const family kind = find_family(o->family);
        if (kind != FAMILY_COUNT) {
            start_family(s, kind);
        }
        return kind == FAMILY_COUNT;
    }
    return find_model(o->model ? o->model : "gpt2-124M", s);
}

/* Takes a given size; returns whether it differs from that of the model. */
static bool take_size(int64_t given, int64_t *size) {
    const bool differs = given != 0 && given != *size;
    *size = given ? given : *size;
    return differs;
}

/* Larger sizes make no sense, and their products would not fit 64 bits. */
static int check_sizes(const settings *o, const shape *s) {
    const struct {
        const char *name;
        int64_t value, most;
    } sizes[] = {{"--layers", s->layers, 1000},
                 {"--channels", s->channels, 1 << 20},
                 {"--heads", s->heads, 1 << 16},
                 {"--kv-heads", s->kv_heads, 1 << 16},
                 {"--feed-forward", s->feed_forward, 1 << 22},
                 {"--vocabulary", s->vocabulary, 1 << 24},
                 {"--positions", s->positions, 1 << 24},
                 {"--batch", o->batch, 1 << 20},
                 {"--sequence", o->sequence, 1 << 22},
                 {"--accumulate", o->accumulate, 1 << 20},
                 {"--rank", o->rank, 1 << 16}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value > sizes[i].most) {
            return fail("%s %lld: at most %lld", sizes[i].name, (long long)sizes[i].value,
                        (long long)sizes[i].most);
        }
    }
    const long long count = (long long)batches_of_step(o, o->batch);
    return count <= 1 << 20
               ? 0
               : fail("--tokens %lld: %lld batches of %lld tokens, and a step has at most %d",
                      (long long)o->tokens, count, (long long)(o->batch * o->sequence), 1 << 20);
}

static int check_shape(const settings *o, const shape *s) {
    if (s->layers == 0 || s->channels == 0 || s->heads == 0) {
        return fail("--family %s: give --layers, --channels and --heads", family_names[s->kind]);
    }
    if (check_sizes(o, s) != 0) {
        return 1;
    }
    if (s->channels % s->heads != 0) {
        return fail("--heads %lld: the %lld channels are not a multiple", (long long)s->heads,
                    (long long)s->channels);
    }
    if (s->heads % s->kv_heads != 0) {
        return fail("--kv-heads %lld: the %lld heads are not a multiple", (long long)s->kv_heads,
                    (long long)s->heads);
    }
    if (s->kind == FAMILY_LLAMA && s->channels / s->heads % 2 != 0) {
        return fail(
            "--heads %lld: a head of %lld channels has no pairs for rotary positions to turn",
            (long long)s->heads, (long long)(s->channels / s->heads));
    }
    if (s->positions && o->sequence > s->positions) {
        return fail("--sequence %lld: the position table of %s has %lld rows; --positions sets "
                    "another number",
                    (long long)o->sequence, s->name, (long long)s->positions);
    }
    return 0;
}

static int choose_shape(settings *o, shape *s) {
    if (start_shape(o, s) != 0) {
        return 1;
    }
    const bool is_llama = s->kind == FAMILY_LLAMA;
    if (!is_llama && (o->kv_heads || o->feed_forward)) {
        return fail(
            "--kv-heads and --feed-forward are for llama: gpt2 and bert of nn.h have as many "
            "heads of keys as of queries, and 4 times the channels");
    }
    if (is_llama && o->positions) {
        return fail("--positions is for gpt2 and bert: llama has no table of positions");
    }
    const int64_t named_channels = s->channels;
    const bool shares_keys = s->kv_heads != s->heads;
    bool differs = take_size(o->layers, &s->layers);
    differs |= take_size(o->channels, &s->channels);
    differs |= take_size(o->heads, &s->heads);
    differs |= take_size(o->vocabulary, &s->vocabulary);
    differs |= take_size(o->positions, &s->positions);
    s->kv_heads = shares_keys ? s->kv_heads : s->heads;
    if (s->channels != named_channels) {
        s->feed_forward = is_llama ? (8 * s->channels / 3 + 255) / 256 * 256 : 4 * s->channels;
    }
    differs |= take_size(o->kv_heads, &s->kv_heads);
    differs |= take_size(o->feed_forward, &s->feed_forward);
    if (differs && !(o->family && o->files.count == 0)) {
        const shape named = *s;
        snprintf(s->name, sizeof s->name, "like %.58s", named.name);
    }
    o->batch = o->batch ? o->batch : 4;
    if (o->sequence == 0) {
        o->sequence = s->positions && s->positions < 512 ? s->positions : 512;
    }
    return check_shape(o, s);
}

// ---- the device ---------------------------------------------------------------------------------

typedef struct destination {
    ms_hardware hardware;
    const nn_device *kernels;
    ms_backend backend;
    uint64_t memory_bytes; // its free bytes, if known
    uint64_t budget_bytes;
    bool is_named;     // it has its own speeds, not those of its kind
    bool is_user_size; // the user gave the budget
} destination;

/* The workspace of ms_backend_cuda in each arena, for cuBLAS and for sums; the larger of its two
   sizes if the compute capability is unknown. */
static uint64_t cuda_workspace_bytes(const ms_hardware *h) {
    const bool is_older = h->compute_major != 0 && h->compute_major < 9;
    return ((uint64_t)(is_older ? 4 : 32) << 20) + 8192;
}

/* The dry run for a GPU uses the CPU's backend in place of that of CUDA. */
static void prepare_target(destination *t) {
    const bool on_cpu = t->hardware.kind == MS_DEVICE_CPU;
    t->kernels = on_cpu ? nn_cpu() : nn_cuda_dry();
    t->backend = ms_backend_cpu();
    if (!on_cpu) {
        t->backend.workspace_bytes = cuda_workspace_bytes(&t->hardware);
        t->backend.device_is_host = false;
    }
}

static int measure_cpu(destination *t) {
    ms_model *model;
    ms_config config;
    memset(&config, 0, sizeof config);
    if (ms_create(&config, &model) != MS_RESULT_OK) {
        const int failed = fail("%s", ms_last_error(model));
        ms_destroy(model);
        return failed;
    }
    const ms_result result = ms_hardware_report(model, &t->hardware);
    const int status = result == MS_RESULT_OK ? 0 : fail("%s", ms_last_error(model));
    ms_destroy(model);
    t->is_named = true;
    return status;
}

/* A number with a unit is a size. One without may be a part of a name, such as 3090. */
static int find_device(destination *t, const char *text) {
    const char *names[MOST_DEVICES];
    const double bytes = parse_number(text, true);
    const bool has_unit = bytes >= 0.0 && isalpha((unsigned char)text[strlen(text) - 1]);
    if (has_suffix(text, "cpu")) {
        return measure_cpu(t);
    }
    if (has_unit || (bytes >= 0.0 && strlen(text) < 3)) {
        t->hardware.kind = MS_DEVICE_DISCRETE;
        t->hardware.total_bytes = (uint64_t)bytes;
        snprintf(t->hardware.name, sizeof t->hardware.name, "a GPU");
        return bytes >= 1048576.0 ? 0
                                  : fail("--gpu %s: give its bytes, from 1M on, such as 24G", text);
    }
    const int found = find_name("--gpu", text, names, list_devices(names),
                                "give bytes such as 24G, or cpu, or one of");
    if (found >= 0) {
        t->hardware = *ms_hardware_at((uint32_t)found);
        t->is_named = true;
    }
    return found < 0;
}

static void take_speed(float given, double *speed) {
    *speed = given > 0.0f ? (double)given : *speed;
}

/* Bytes, or a share of the memory. */
static int choose_budget(const settings *o, destination *t) {
    const double share = round((double)o->utilization * 1e6) / 1e6; // as it was typed
    t->is_user_size = o->budget_bytes > 0;
    t->budget_bytes =
        t->is_user_size ? o->budget_bytes : (uint64_t)((double)t->memory_bytes * share);
    if (!(o->utilization > 0.0f && o->utilization <= 1.0f)) {
        return fail("--utilization %g: above 0 and at most 1", (double)o->utilization);
    }
    return t->budget_bytes <= t->hardware.total_bytes
               ? 0
               : fail("--budget %llu: more than the %llu bytes of %s",
                      (unsigned long long)t->budget_bytes,
                      (unsigned long long)t->hardware.total_bytes, t->hardware.name);
}

static int choose_target(const settings *o, destination *t) {
    memset(t, 0, sizeof *t);
    if (find_device(t, o->gpu ? o->gpu : "RTX 3090") != 0) {
        return 1;
    }
    take_speed(o->tflops, &t->hardware.f32_tflops);
    take_speed(o->tf32_tflops, &t->hardware.tf32_tflops);
    take_speed(o->f16_tflops, &t->hardware.f16_tflops);
    take_speed(o->bandwidth, &t->hardware.memory_gb_per_s);
    take_speed(o->link, &t->hardware.to_device_gb_per_s);
    take_speed(o->link, &t->hardware.to_host_gb_per_s);
    prepare_target(t);
    t->memory_bytes = t->hardware.free_bytes ? t->hardware.free_bytes : t->hardware.total_bytes;
    if (t->memory_bytes > (uint64_t)1 << 57) {
        return fail("--gpu %s: at most %lluG", o->gpu, 1ull << 27);
    }
    return choose_budget(o, t);
}

// ---- the training -------------------------------------------------------------------------------

static const struct {
    const char *name, *title;
    ms_optimizer_kind kind;
    float momentum;
} optimizers[] = {{"adamw", "AdamW", MS_OPTIMIZER_ADAMW, 0.0f},
                  {"lion", "Lion", MS_OPTIMIZER_LION, 0.0f},
                  {"sgd", "SGD", MS_OPTIMIZER_SGD, 0.0f},
                  {"momentum", "SGD with momentum", MS_OPTIMIZER_SGD, 0.9f}};
enum { OPTIMIZERS = sizeof optimizers / sizeof optimizers[0] };

/* The number of the optimizer; OPTIMIZERS: there is none of that name. */
static int optimizer_of(const settings *o) {
    int i = 0;
    while (o->optimizer && i < OPTIMIZERS && !has_suffix(o->optimizer, optimizers[i].name)) {
        i++;
    }
    return i;
}

/* What the layers compute in, and who decides it. */
typedef struct precision {
    const char *name;
    ms_dtype dtype;
    ms_switch mixed;   // ms_config.mixed_precision; ON: forced for each layer
    ms_switch masters; // ms_config.master_weights
    bool tf32;
} precision;

/* The first is that of a run that says nothing. */
static const precision precisions[] = {
    {"f32", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, false},
    {"f32", MS_DTYPE_F32, MS_SWITCH_OFF, MS_SWITCH_DEFAULT, false},
    {"tf32", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, true},
    {"bf16", MS_DTYPE_BF16, MS_SWITCH_ON, MS_SWITCH_DEFAULT, false},
    {"bf16-alone", MS_DTYPE_BF16, MS_SWITCH_ON, MS_SWITCH_OFF, false},
    {"f16", MS_DTYPE_F16, MS_SWITCH_ON, MS_SWITCH_DEFAULT, false},
    {"f16-alone", MS_DTYPE_F16, MS_SWITCH_ON, MS_SWITCH_OFF, false}};
enum { PRECISIONS = sizeof precisions / sizeof precisions[0] };

/* NULL: there is none of that name. */
static const precision *precision_of(const settings *o) {
    for (int i = 1; o->precision && i < PRECISIONS; i++) {
        if (has_suffix(o->precision, precisions[i].name)) {
            return &precisions[i];
        }
    }
    return o->precision ? NULL : &precisions[0];
}

static const char *name_of_dtype(ms_dtype dtype) {
    return dtype == MS_DTYPE_BF16 ? "bf16" : dtype == MS_DTYPE_F16 ? "f16" : "f32";
}

/* Whether gradients of weights are in 16 bits too. */
static bool has_half_gradients(const settings *o) {
    return o->gradients && !has_suffix(o->gradients, "f32");
}

static bool has_half_state(const settings *o) {
    return o->state && has_suffix(o->state, "bf16");
}

static bool has_state(const settings *o) {
    const int i = optimizer_of(o);
    return optimizers[i].kind != MS_OPTIMIZER_SGD || optimizers[i].momentum > 0.0f;
}

static int choose_formats(const settings *o) {
    const precision *p = precision_of(o);
    if (!p) {
        return fail("--precision %s: there are f32, tf32, bf16, f16, bf16-alone and f16-alone",
                    o->precision);
    }
    if (o->gradients && !has_suffix(o->gradients, "f32") &&
        !has_suffix(o->gradients, name_of_dtype(p->dtype))) {
        return p->dtype == MS_DTYPE_F32
                   ? fail("--gradients %s: f32, unless --precision is in 16 bits", o->gradients)
                   : fail("--gradients %s: with --precision %s there are f32 and %s", o->gradients,
                          p->name, name_of_dtype(p->dtype));
    }
    if (o->state && !has_suffix(o->state, "f32") && !has_suffix(o->state, "bf16")) {
        return fail("--state %s: there are f32 and bf16", o->state);
    }
    return o->state && !has_state(o) ? fail("--state: SGD without momentum has none") : 0;
}

static int choose_training(settings *o) {
    if (o->accumulate && o->tokens) {
        return fail("--accumulate and --tokens: give one of them, since the other follows");
    }
    o->accumulate = o->accumulate ? o->accumulate : 1;
    if (o->rank && !o->frozen) {
        return fail("--rank: of the adapters that --frozen trains");
    }
    o->rank = o->frozen && !o->rank ? 8 : o->rank;
    if (o->mode && find_mode(o->mode) == MODES) {
        return fail("--mode %s: there are conservative, balanced and aggressive", o->mode);
    }
    if (optimizer_of(o) == OPTIMIZERS) {
        return fail("--optimizer %s: there are adamw, lion, sgd and momentum", o->optimizer);
    }
    return choose_offloading(o->offload, &o->offloading) != 0 || choose_formats(o) != 0;
}

/* Whether all gradients of params must exist at once, so that none is updated inside backward. */
static bool needs_all_gradients(const settings *o) {
    return o->clip > 0.0f || batches_of_step(o, o->batch) > 1 ||
           precision_of(o)->dtype == MS_DTYPE_F16;
}

static void set_optimizer(const settings *o, ms_model *model) {
    ms_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = optimizers[optimizer_of(o)].kind;
    desc.momentum = optimizers[optimizer_of(o)].momentum;
    desc.grad_clip_norm = o->clip;
    desc.state_format[0] = desc.state_format[1] =
        has_half_state(o) ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
    ms_set_optimizer(model, &desc);
}

// ---- plans --------------------------------------------------------------------------------------

/* How many plans are made, for those who wait. */
typedef struct progress {
    bool is_shown;
    int done, most; // most: as far as it is known
    double start_s;
} progress;

typedef struct estimate {
    settings options;
    shape model;
    destination device;
    progress *shown; // NULL: nobody waits
} estimate;

/* Values of one category and size at the peak. */
typedef struct value_group {
    char name[NAME_BYTES]; // of the first
    ms_category category;
    uint64_t bytes, count;
    bool is_resident; // between steps
} value_group;

enum { MOST_GROUPS = 64, SHOWN_GROUPS = 3 };

/* Times as predicted, in a micro-batch. */
typedef struct step_times {
    double recompute_us;
    double block_us; // one forward of all blocks
} step_times;

typedef struct plan {
    ms_memory_report report;
    step_times times;
    bool fits;
    uint64_t largest[MS_CATEGORY_COUNT]; // of each category, each at its own moment
    uint64_t trained_count;              // elements of the params that are not frozen
    value_group groups[MOST_GROUPS];
    int group_count;
    bool applies[MS_TECHNIQUE_COUNT]; // to some layer
    ms_dtype half;                    // of what mixed precision rounds; F32: it rounds nothing
} plan;

static void show_progress(const progress *p) {
    if (p && p->is_shown) {
        fprintf(stderr, "\r%s: %d", options_program, p->done);
        if (p->done < p->most) {
            fprintf(stderr, " of %d", p->most);
        }
        fprintf(stderr, " plans, %.0f s ", seconds_now() - p->start_s);
        fflush(stderr);
    }
}

/* So many more plans are to be made. */
static void expect_plans(const estimate *e, int count) {
    if (e->shown) {
        e->shown->most = e->shown->done + count;
        show_progress(e->shown);
    }
}

static void count_plan(const estimate *e) {
    if (!e->shown) {
        return;
    }
#ifdef _OPENMP
#pragma omp critical
#endif
    {
        e->shown->done++;
        show_progress(e->shown);
    }
}

/* Leaves an empty line for what comes next. */
static void end_progress(const progress *p) {
    if (p && p->is_shown) {
        fprintf(stderr, "\r%60s\r", "");
    }
}

static void register_layers(const estimate *e, int64_t batch, nn_net *net) {
    const shape *s = &e->model;
    const settings *o = &e->options;
    if (s->kind == FAMILY_LLAMA) {
        llama_config c = {s->vocabulary, s->layers,       s->channels, s->heads,
                          s->kv_heads,   s->feed_forward, s->tied,     s->qkv_bias,
                          batch,         o->sequence,     o->rank};
        llama(net, &c);
        return;
    }
    nn_transformer_config c;
    memset(&c, 0, sizeof c);
    c.vocabulary = s->vocabulary;
    c.context = s->positions;
    c.layers = s->layers;
    c.heads = s->heads;
    c.channels = s->channels;
    c.batch = batch;
    c.sequence = o->sequence;
    c.adapter_rank = o->rank;
    (void)(s->kind == FAMILY_BERT ? nn_bert(net, &c) : nn_gpt2(net, &c));
}

/* A model that is not wrapped; on failure prints the reason and returns NULL. */
static ms_model *register_model(const estimate *e, int64_t batch, ms_config *config, nn_net **net) {
    ms_model *model;
    const precision *p = precision_of(&e->options);
    config->backend = e->device.backend;
    config->dry_run = true;
    config->tf32 = p->tf32;
    config->mixed_precision = p->mixed;
    config->mixed_dtype = p->dtype;
    config->master_weights = p->masters;
    config->optimizer_8bit = e->options.state ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config->offloading =
        config->offloading == MS_SWITCH_OFF ? MS_SWITCH_OFF : e->options.offloading;
    config->max_host_bytes = e->options.host_bytes;
    config->accumulation_steps = (uint32_t)batches_of_step(&e->options, batch);
    if (ms_create(config, &model) != MS_RESULT_OK) {
        fail("%s", ms_last_error(model));
        ms_destroy(model);
        return NULL;
    }
    *net = nn_create_on(model, e->device.kernels);
    if (!*net) {
        fail("no memory for a net");
        ms_destroy(model);
        return NULL;
    }
    ms_set_hardware(model, &e->device.hardware);
    nn_force_half(*net, p->mixed == MS_SWITCH_ON);
    nn_half_gradients(*net, has_half_gradients(&e->options));
    register_layers(e, batch, *net);
    set_optimizer(&e->options, model);
    return model;
}

/* All params, or those that nn_freeze leaves. */
static uint64_t count_trained(const estimate *e, const nn_net *net) {
    uint64_t count = 0;
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        const nn_param_info *info = nn_param_at(net, i);
        const bool is_trained = !e->options.frozen || strstr(info->name, nn_adapter_mark);
        count += is_trained ? ms_shape_count(&info->shape) : 0;
    }
    return count;
}

static void keep_times(const ms_event *event, step_times *t) {
    t->recompute_us += event->kind == MS_EVENT_RECOMPUTE ? event->duration_us : 0.0;
    if (event->kind == MS_EVENT_FORWARD && event->name[0] == 'h' &&
        isdigit((unsigned char)event->name[1])) {
        t->block_us += event->duration_us;
    }
}

static void keep_event(const ms_event *event, void *user) {
    plan *p = (plan *)user;
    for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
        if (event->live_bytes_of[c] > p->largest[c]) {
            p->largest[c] = event->live_bytes_of[c];
        }
    }
    if (event->kind != MS_EVENT_DROP) {
        keep_times(event, &p->times);
    }
}

static uint64_t group_bytes(const value_group *g) {
    return g->bytes * g->count;
}

static bool is_of_group(const value_group *g, const ms_lifetime *l) {
    return g->bytes == l->bytes && g->category == l->category && g->is_resident == l->is_resident;
}

/* Counts a value at the peak. If there is no room for another group, a larger one replaces the
   smallest. */
static void keep_value(const ms_lifetime *l, void *user) {
    plan *p = (plan *)user;
    int i = 0, least = 0;
    for (; i < p->group_count && !is_of_group(&p->groups[i], l); i++) {
        least = group_bytes(&p->groups[i]) < group_bytes(&p->groups[least]) ? i : least;
    }
    const bool is_full = i == MOST_GROUPS;
    const bool is_half = l->dtype == MS_DTYPE_BF16 || l->dtype == MS_DTYPE_F16;
    p->half = is_half && l->category != MS_CATEGORY_INPUT ? l->dtype : p->half;
    value_group *g = &p->groups[is_full ? least : i];
    if (!l->is_at_peak || (is_full && l->bytes <= group_bytes(g))) {
        return;
    }
    if (i == p->group_count) {
        p->group_count += !is_full;
        snprintf(g->name, sizeof g->name, "%s", l->name);
        g->category = l->category;
        g->bytes = l->bytes;
        g->count = 0;
        g->is_resident = l->is_resident;
    }
    g->count++;
}

static void keep_decision(const ms_decision *d, void *user) {
    plan *p = (plan *)user;
    p->applies[d->technique] |= d->is_applied;
}

/* What is to be known of a plan; prints the reason and returns 1 if it cannot be had. */
static int look_at_plan(ms_model *model, plan *p) {
    ms_result result = ms_report(model, &p->report);
    p->report.peak_layer = ""; // belongs to the model
    if (result == MS_RESULT_OK) {
        result = ms_visit_events(model, MS_PROGRAM_TRAIN, keep_event, p);
    }
    if (result == MS_RESULT_OK) {
        result = ms_visit_lifetimes(model, MS_PROGRAM_TRAIN, keep_value, p);
    }
    if (result == MS_RESULT_OK) {
        result = ms_visit_decisions(model, keep_decision, p);
    }
    return result == MS_RESULT_OK ? 0 : fail("%s", ms_last_error(model));
}

/* Returns 0, with p->fits false if no plan fits the budget; or prints the reason and returns 1. */
static int make_plan(const estimate *e, int64_t batch, ms_config *config, plan *p) {
    nn_net *net;
    memset(p, 0, sizeof *p);
    ms_model *model = register_model(e, batch, config, &net);
    if (!model) {
        return 1;
    }
    const ms_result result = ms_wrap(model);
    int status = 0;
    p->fits = result == MS_RESULT_OK;
    p->trained_count = count_trained(e, net);
    if (p->fits) {
        status = look_at_plan(model, p);
    } else if (result != MS_RESULT_BUDGET) {
        status = fail("%s", ms_last_error(model));
    }
    ms_destroy(model);
    nn_destroy(net);
    count_plan(e);
    return status;
}

/* As trainers do it: everything is kept, and all params are updated after backward. */
static ms_config plain_config(void) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.checkpointing = MS_SWITCH_OFF;
    config.early_update = config.offloading = MS_SWITCH_OFF;
    config.memory_budget_bytes = (uint64_t)1 << 60;
    return config;
}

static int plan_plain(const estimate *e, int64_t batch, plan *p) {
    ms_config config = plain_config();
    const int status = make_plan(e, batch, &config, p);
    p->fits = p->report.arena_bytes <= e->device.budget_bytes;
    return status;
}

static int plan_smallest_with(const estimate *e, int64_t batch, ms_mode mode, ms_switch early,
                              plan *p) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.mode = mode;
    config.early_update = early;
    config.force_optimize = true;
    config.memory_budget_bytes = (uint64_t)1 << 60;
    const int status = make_plan(e, batch, &config, p);
    p->fits = p->report.arena_bytes <= e->device.budget_bytes;
    return status;
}

static int plan_smallest(const estimate *e, int64_t batch, ms_mode mode, plan *p) {
    return plan_smallest_with(e, batch, mode, MS_SWITCH_DEFAULT, p);
}

static int plan_budget(const estimate *e, int64_t batch, ms_mode mode, uint64_t budget, plan *p) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.mode = mode;
    config.memory_budget_bytes = budget;
    return make_plan(e, batch, &config, p);
}

// ---- advice -------------------------------------------------------------------------------------

typedef struct findings {
    uint32_t techniques[MODES]; // masks of techniques: those that a mode allows
    int same_as[MODES];         // the first mode with the same mask, and so with equal plans
    plan plain;
    plan at_budget[MODES]; // where none fits: the smallest
    plan smallest[MODES];
    plan late;             // the smallest without early updates, where the others have some
    double pressure;       // plain peak over the memory
    int advised;           // of modes
    int rounding;          // of modes: a plan that rounds and is faster; -1: there is none
    bool searched;         // for the largest batch, since this one does not fit
    int64_t largest_batch; // 0: not even one sequence fits
    plan largest;          // its plan, within the budget
    plan single;           // the smallest plan of one sequence
} findings;

/* The largest batch whose smallest plan fits, below one that does not. Peaks grow nearly in
   proportion, so that a line through the ends of the interval leads there in a few plans. */
static int search_batch(const estimate *e, findings *f) {
    const ms_mode mode = MS_MODE_AGGRESSIVE;
    const uint64_t budget = e->device.budget_bytes;
    int64_t low = 1, high = e->options.batch;
    plan p;
    f->searched = true;
    f->single = f->smallest[MODES - 1];
    if (high > 1 && plan_smallest(e, 1, mode, &f->single) != 0) {
        return 1;
    }
    if (!f->single.fits) {
        return 0;
    }
    uint64_t low_bytes = f->single.report.arena_bytes;
    uint64_t high_bytes = f->smallest[MODES - 1].report.arena_bytes;
    for (int i = 0; high - low > 1; i++) {
        const double share = (double)(budget - low_bytes) / (double)(high_bytes - low_bytes);
        int64_t guess = i % 3 == 2 ? low + (high - low) / 2
                                   : low + (int64_t)(share * (double)(high - low)) + (i % 3);
        guess = nn_least(nn_most(guess, low + 1), high - 1);
        if (plan_smallest(e, guess, mode, &p) != 0) {
            return 1;
        }
        if (p.fits) {
            low = guess;
            low_bytes = p.report.arena_bytes;
        } else {
            high = guess;
            high_bytes = p.report.arena_bytes;
        }
    }
    f->largest_batch = low;
    return plan_budget(e, low, mode, budget, &f->largest);
}

/* Whether a plan has other bits than the plain one. */
static bool is_rounded(const findings *f, const plan *p) {
    static const ms_technique rounds[] = {MS_TECHNIQUE_TILING, MS_TECHNIQUE_MIXED_PRECISION,
                                          MS_TECHNIQUE_OPTIMIZER_8BIT};
    bool is = false;
    for (int i = 0; i < 3; i++) {
        is |= p->applies[rounds[i]] && !f->plain.applies[rounds[i]];
    }
    return is;
}

/* Of the modes that fit, with or without rounding, the one with the fastest step; of equal ones the
   most careful. -1: none fits. */
static int fastest_mode(const findings *f, bool rounds) {
    int best = -1;
    for (int i = 0; i < MODES; i++) {
        const plan *p = &f->at_budget[i];
        if (p->fits && is_rounded(f, p) == rounds &&
            (best < 0 || p->report.step_us < f->at_budget[best].report.step_us)) {
            best = i;
        }
    }
    return best;
}

/* A mode that keeps the numbers, and one that is faster because it rounds, by more than predictions
   can tell; where only the latter fits, that one. Where none fits, the most careful that has the techniques of the last. */
static int advise(const estimate *e, findings *f) {
    const double memory =
        (double)(e->device.is_user_size ? e->device.budget_bytes : e->device.memory_bytes);
    f->pressure = (double)f->plain.report.arena_bytes / memory;
    f->advised = fastest_mode(f, false);
    f->rounding = fastest_mode(f, true);
    if (f->advised < 0) {
        f->advised = f->rounding;
    } else if (f->rounding >= 0 && f->at_budget[f->rounding].report.step_us >=
                                       0.995 * f->at_budget[f->advised].report.step_us) {
        f->rounding = -1;
    }
    if (f->advised >= 0) {
        return 0;
    }
    f->advised = f->same_as[MODES - 1];
    return search_batch(e, f);
}

/* A policy that chooses nothing, but notes which techniques the modes allow. */
static uint32_t keep_techniques(const ms_policy_args *args) {
    findings *f = (findings *)args->user;
    for (uint32_t k = 0; k < args->strategy_count; k++) {
        for (int i = 0; i < MODES; i++) {
            if (args->strategies[k].mode == modes[i]) {
                f->techniques[i] = args->strategies[k].techniques;
            }
        }
    }
    return UINT32_MAX;
}

/* Plans a small model for that, since it does not depend on the size. */
static int compare_modes(const estimate *e, findings *f) {
    estimate small = *e;
    plan p;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.auto_policy = true;
    config.policy = keep_techniques;
    config.policy_user = f;
    config.memory_budget_bytes = (uint64_t)1 << 60;
    start_family(&small.model, FAMILY_GPT2);
    small.model.layers = small.model.heads = 1;
    small.model.channels = 64;
    small.options.sequence = 64;
    for (int i = 0; i < MODES; i++) {
        f->techniques[i] = UINT32_MAX - (uint32_t)i;
    }
    const int status = make_plan(&small, 1, &config, &p);
    for (int i = 0; i < MODES; i++) {
        f->same_as[i] = 0;
        while (f->techniques[f->same_as[i]] != f->techniques[i]) {
            f->same_as[i]++;
        }
    }
    return status;
}

static int plan_mode(const estimate *e, findings *f, int mode) {
    const int64_t batch = e->options.batch;
    if (plan_smallest(e, batch, modes[mode], &f->smallest[mode]) != 0) {
        return 1;
    }
    f->at_budget[mode] = f->smallest[mode];
    return f->smallest[mode].fits
               ? plan_budget(e, batch, modes[mode], e->device.budget_bytes, &f->at_budget[mode])
               : 0;
}

/* Plans every mode; models of their own share nothing, so that each may have its thread. */
static int plan_modes(const estimate *e, findings *f) {
    int failed = 0, first_count = 0;
    for (int i = 0; i < MODES; i++) {
        first_count += f->same_as[i] == i;
    }
    expect_plans(e, 2 * first_count + 1);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) reduction(+ : failed)
#endif
    for (int i = 0; i < MODES; i++) {
        failed += f->same_as[i] == i && plan_mode(e, f, i) != 0;
    }
    for (int i = 0; i < MODES; i++) {
        f->smallest[i] = f->smallest[f->same_as[i]];
        f->at_budget[i] = f->at_budget[f->same_as[i]];
    }
    return failed != 0;
}

static int find_all(const estimate *e, findings *f) {
    const int64_t batch = e->options.batch;
    memset(f, 0, sizeof *f);
    expect_plans(e, 2 + 2 * MODES + 1);
    if (compare_modes(e, f) != 0 || plan_plain(e, batch, &f->plain) != 0 || plan_modes(e, f) != 0) {
        return 1;
    }
    const plan *last = &f->smallest[MODES - 1];
    if (last->report.early_update &&
        plan_smallest_with(e, batch, modes[MODES - 1], MS_SWITCH_OFF, &f->late) != 0) {
        return 1;
    }
    return advise(e, f);
}

/* The whole step of a plan as a multiple of that of the plain plan with the same batch. */
static double over_plain(const findings *f, const plan *p) {
    return p->report.step_us / f->plain.report.step_us;
}

static bool is_fit(const findings *f) {
    return f->plain.fits || !f->searched;
}

// ---- text ---------------------------------------------------------------------------------------

/* A number of bytes in the unit of the whole table. */
typedef struct unit {
    const char *name;
    double bytes;
    int digits;
} unit;

static unit unit_for(uint64_t largest_bytes) {
    const unit mebi = {"MiB", 1048576.0, 1}, gibi = {"GiB", 1073741824.0, 2};
    return largest_bytes < (uint64_t)4 << 30 ? mebi : gibi;
}

typedef struct size_text {
    char text[32];
} size_text;

/* Rounded up, so that a budget that is typed in again is large enough. */
static size_text show_bytes(uint64_t bytes) {
    const unit u = unit_for(bytes);
    size_text s;
    snprintf(s.text, sizeof s.text, "%.*f %s", u.digits,
             rounded_up((double)bytes / u.bytes, u.digits), u.name);
    return s;
}

static size_text show_time(double us) {
    static const struct {
        const char *name;
        double us;
    } units[] = {{"h", 3.6e9}, {"min", 6e7}, {"s", 1e6}, {"ms", 1e3}};
    const int last = sizeof units / sizeof units[0] - 1;
    size_text s;
    int i = 0;
    while (i < last && us < 2.0 * units[i].us) {
        i++;
    }
    snprintf(s.text, sizeof s.text, "%.*f %s", us < 10.0 * units[i].us ? 2 : 1, us / units[i].us,
             units[i].name);
    return s;
}

/* Names of the categories in the table. */
static const struct {
    const char *name, *key;
    ms_category parts[3];
    int count;
} table_rows[] = {
    {"params", "params_bytes", {MS_CATEGORY_PARAM}, 1},
    {"gradients", "gradients_bytes", {MS_CATEGORY_GRADIENT}, 1},
    {"optimizer state", "optimizer_bytes", {MS_CATEGORY_OPTIMIZER}, 1},
    {"activations",
     "activations_bytes",
     {MS_CATEGORY_ACTIVATION, MS_CATEGORY_ACTIVATION_GRADIENT, MS_CATEGORY_SAVED},
     3},
    {"inputs", "inputs_bytes", {MS_CATEGORY_INPUT, MS_CATEGORY_BUFFER}, 2},
    {"workspace", "workspace_bytes", {MS_CATEGORY_WORKSPACE}, 1},
};
enum { ROWS = sizeof table_rows / sizeof table_rows[0] };

static uint64_t row_bytes(const uint64_t *categories, int row) {
    uint64_t bytes = 0;
    for (int i = 0; i < table_rows[row].count; i++) {
        bytes += categories[table_rows[row].parts[i]];
    }
    return bytes;
}

/* The plans of the columns: plain, and each mode. */
typedef struct plans {
    const plan *of[COLUMNS];
} plans;

static plans columns_of(const findings *f, const plan *of_modes) {
    plans p;
    p.of[0] = &f->plain;
    for (int i = 0; i < MODES; i++) {
        p.of[i + 1] = &of_modes[i];
    }
    return p;
}

static void print_cells(const char *name, char cells[COLUMNS][32]) {
    printf("  %-22s", name);
    for (int c = 0; c < COLUMNS; c++) {
        printf(" %13s", cells[c]);
    }
    printf("\n");
}

/* A row: a category, or after these the gaps of the layout, or the whole, which is rounded up: it
   may be typed in again as a budget. */
static void print_bytes(const char *name, const plans *p, int row, unit u) {
    char cells[COLUMNS][32];
    for (int c = 0; c < COLUMNS; c++) {
        const ms_memory_report *r = &p->of[c]->report;
        const uint64_t bytes = row < ROWS    ? row_bytes(r->peak_bytes, row)
                               : row == ROWS ? r->gap_bytes
                                             : r->arena_bytes;
        const double value = (double)bytes / u.bytes;
        snprintf(cells[c], sizeof cells[c], "%.*f", u.digits,
                 row > ROWS ? rounded_up(value, u.digits) : value);
    }
    print_cells(name, cells);
}

static void print_ratios(const char *name, const plans *p) {
    char cells[COLUMNS][32];
    for (int c = 0; c < COLUMNS; c++) {
        snprintf(cells[c], sizeof cells[c], "%.3f",
                 p->of[c]->report.step_us / p->of[0]->report.step_us);
    }
    print_cells(name, cells);
}

/* The part of a step for which the busier direction of the link copies. */
static double link_share(const ms_memory_report *r) {
    const double us = r->to_device_us > r->to_host_us ? r->to_device_us : r->to_host_us;
    return us / r->last_micro_us;
}

/* What the plans have on the host and copy in a step, for how much of the step the link is busy,
   how much of the time of these copies is hidden, and for how much of a whole step computing waits
   for them: rows that there are only if some plan moves anything. */
static void print_host(const plans *p, unit u) {
    static const char *const names[] = {"on the host", "copied in",     "copied out",
                                        "link busy",   "copies hidden", "waits for copies"};
    bool moves = false;
    for (int c = 0; c < COLUMNS; c++) {
        moves |= p->of[c]->report.host_bytes > 0;
    }
    for (int row = 0; row < 6 && moves; row++) {
        char cells[COLUMNS][32];
        for (int c = 0; c < COLUMNS; c++) {
            const ms_memory_report *r = &p->of[c]->report;
            const double shares[] = {link_share(r), r->hidden_share, r->stall_us / r->step_us};
            const uint64_t bytes[] = {r->host_bytes, r->to_device_bytes, r->to_host_bytes};
            if (row < 3) {
                snprintf(cells[c], sizeof cells[c], "%.*f", u.digits, (double)bytes[row] / u.bytes);
            } else if (r->to_device_bytes + r->to_host_bytes > 0) {
                snprintf(cells[c], sizeof cells[c], "%.1f %%", 100.0 * shares[row - 3]);
            } else {
                snprintf(cells[c], sizeof cells[c], "-");
            }
        }
        print_cells(names[row], cells);
    }
}

/* Where a step has several micro-batches, the time of all of them and the update. */
static void print_whole_step(const estimate *e, const plans *p) {
    char cells[COLUMNS][32];
    for (int c = 0; c < COLUMNS; c++) {
        snprintf(cells[c], sizeof cells[c], "%s", show_time(p->of[c]->report.step_us).text);
    }
    if (batches_of_step(&e->options, e->options.batch) > 1) {
        print_cells("whole step", cells);
    }
}

/* The time of the recomputations in a micro-batch, as a multiple of one forward of all blocks. */
static void print_recomputed(const plans *p) {
    char cells[COLUMNS][32];
    for (int c = 0; c < COLUMNS; c++) {
        const step_times *t = &p->of[c]->times;
        snprintf(cells[c], sizeof cells[c], "%.3f", t->recompute_us / t->block_us);
    }
    print_cells("recomputed", cells);
}

static void print_table(const estimate *e, const findings *f) {
    const unit u = unit_for(f->plain.report.arena_bytes);
    const plans p = columns_of(f, f->at_budget), smallest = columns_of(f, f->smallest);
    char cells[COLUMNS][32];
    printf("\n%s, live at the peak  %13s", u.name, "plain");
    for (int i = 0; i < MODES; i++) {
        printf(" %13s", ms_mode_name(modes[i]));
    }
    printf("\n");
    for (int r = 0; r < ROWS; r++) {
        print_bytes(table_rows[r].name, &p, r, u);
    }
    print_bytes("lost to the layout", &p, ROWS, u);
    print_bytes("peak", &p, ROWS + 1, u);
    for (int c = 0; c < COLUMNS; c++) {
        snprintf(cells[c], sizeof cells[c], "%s", p.of[c]->fits ? "yes" : "no");
    }
    print_cells("fits the budget", cells);
    for (int c = 0; c < COLUMNS; c++) {
        snprintf(cells[c], sizeof cells[c], "%s", show_time(p.of[c]->report.step_us).text);
    }
    print_cells("step (roofline)", cells);
    print_whole_step(e, &p);
    print_ratios("step over plain", &p);
    print_recomputed(&p);
    print_host(&p, u);
    print_bytes("smallest peak there is", &smallest, ROWS + 1, u);
    print_ratios("its step over plain", &smallest);
    print_host(&smallest, u);
}

/* Lists the modes that plan as `first` does; returns their number. */
static int print_followers(const findings *f, int first) {
    int count = 0;
    for (int i = first + 1; i < MODES; i++) {
        if (f->same_as[i] == first) {
            printf("%s%s", count++ ? " and " : "", ms_mode_name(modes[i]));
        }
    }
    return count;
}

/* Says why the columns of some modes are equal. */
static void print_same(const findings *f) {
    bool any = false;
    for (int i = 0; i < MODES; i++) {
        const int count = print_followers(f, i);
        if (count > 0) {
            printf(" plan%s as %s does. ", count == 1 ? "s" : "", ms_mode_name(modes[i]));
        }
        any |= count > 0;
    }
    printf("%s", any ? "\n" : "");
}

enum { TEXT_WIDTH = 100, TEXT_INDENT = 10 };

/* A line that is being written: its characters, and spaces that no word has followed yet. */
typedef struct text_line {
    int at, gap;
} text_line;

/* printf, with the words that have no room in the line below its first column of text. No line
   breaks at \1, which is a space. */
static void say(text_line *line, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (const char *c = text; *c;) {
        line->gap += (int)strspn(c, " ");
        c += strspn(c, " ");
        const int length = (int)strcspn(c, " \n");
        if (length > 0) {
            const bool breaks = line->gap > 0 && line->at + line->gap + length > TEXT_WIDTH;
            const int spaces = breaks ? TEXT_INDENT : line->gap;
            printf("%s%*s", breaks ? "\n" : "", spaces, "");
            line->at = (breaks ? 0 : line->at) + spaces + length;
            line->gap = 0;
        }
        for (const char *end = c + length; c < end; c++) {
            putchar(*c == '\1' ? ' ' : *c);
        }
        if (*c == '\n') {
            putchar(*c++);
            line->at = line->gap = 0;
        }
    }
}

static void print_model(text_line *at, const estimate *e, const findings *f) {
    const shape *s = &e->model;
    const uint64_t all = f->plain.report.param_count, trained = f->plain.trained_count;
    say(at, "model     %s: %lld layers, %lld channels, %lld heads", s->name, (long long)s->layers,
        (long long)s->channels, (long long)s->heads);
    if (s->kind == FAMILY_LLAMA) {
        say(at, " (%lld of keys), feed-forward %lld", (long long)s->kv_heads,
            (long long)s->feed_forward);
    }
    say(at, "%s", s->qkv_bias ? ", biases of qkv" : "");
    say(at, ", vocabulary %lld: %.2f M params\n", (long long)s->vocabulary, (double)all / 1e6);
    if (e->options.frozen) {
        say(at,
            "          of these %.2f M are trained: adapters of rank %lld; all others are frozen\n",
            (double)trained / 1e6, (long long)e->options.rank);
    }
}

static void print_training(text_line *at, const settings *o) {
    const long long count = (long long)batches_of_step(o, o->batch);
    say(at, "training  ");
    if (count > 1) {
        say(at, "%lld micro-batches of ", count);
    } else {
        say(at, "batch ");
    }
    say(at, "%lld x %lld tokens", (long long)o->batch, (long long)o->sequence);
    if (o->tokens) {
        say(at, " (%lld a step)", count * (long long)(o->batch * o->sequence));
    }
    say(at, ", %s, %s%s%s\n", precision_of(o)->name, optimizers[optimizer_of(o)].title,
        o->clip > 0.0f ? ", clipped by the norm of all gradients" : "",
        count > 1 ? "; a step below is one of them and the update" : "");
}

/* In which formats numbers are in memory. */
static void print_formats(text_line *at, const settings *o) {
    const precision *p = precision_of(o);
    const char *dtype = name_of_dtype(p->dtype), *state = has_half_state(o) ? "bf16" : "f32";
    const bool chooses = p->mixed == MS_SWITCH_DEFAULT, codes = has_state(o) && !o->state;
    const bool has_masters = p->mixed == MS_SWITCH_ON && p->masters != MS_SWITCH_OFF;
    const char *also = chooses && codes ? "; AGGRESSIVE may round all of these, state to 8 bits"
                       : chooses        ? "; AGGRESSIVE may round the first two to 16 bits"
                       : codes          ? "; AGGRESSIVE may round state to 8 bits"
                                        : "";
    say(at, "          %sparams %s%s, gradients %s",
        o->frozen && has_masters ? "frozen params f32, trained " : "", dtype,
        p->mixed != MS_SWITCH_ON ? ""
        : has_masters            ? " with masters in f32"
                                 : " without masters",
        has_half_gradients(o) ? dtype : "f32");
    if (has_state(o)) {
        say(at, ", optimizer state %s", state);
    }
    say(at, "%s\n", also);
    if (p->mixed == MS_SWITCH_ON) {
        say(at, "          activations %s; f32: biases, norms, statistics, losses%s\n", dtype,
            has_half_gradients(o) ? ", and gradients of these and of token tables" : "");
    }
}

/* What the figures depend on beside the sizes: when params are updated. */
static void print_assumption(text_line *at, const estimate *e, const findings *f) {
    const uint64_t late = f->late.report.arena_bytes;
    if (needs_all_gradients(&e->options)) {
        say(at, "assumes   all gradients are kept until the end of the step, for clipping, "
                "accumulation or f16\n");
    } else if (late != 0) {
        say(at,
            "assumes   no clipping and no accumulation, so that the modes update params inside "
            "backward;\n          with --clip the smallest peak is %s, which %s\n",
            show_bytes(late).text, f->late.fits ? "fits too" : "does not fit");
    } else {
        say(at, "assumes   no clipping and no accumulation\n");
    }
}

static void print_speed(text_line *at, const char *name, double speed, const char *unit_name) {
    if (speed > 0.0) {
        say(at, "%s\1%g\1%s, ", name, speed, unit_name);
    }
}

static void print_device(text_line *at, const destination *t) {
    const ms_hardware *h = &t->hardware;
    say(at, "device    %s, %s", h->name, show_bytes(h->total_bytes).text);
    if (h->free_bytes) {
        say(at, ", of which %s are free", show_bytes(h->free_bytes).text);
    }
    say(at, "\nspeeds    ");
    print_speed(at, "F32", h->f32_tflops, "TFLOP/s");
    print_speed(at, "TF32", h->tf32_tflops, "TFLOP/s");
    print_speed(at, "BF16\1and\1F16", h->f16_tflops, "TFLOP/s");
    print_speed(at, "memory", h->memory_gb_per_s, "GB/s");
    print_speed(at, "link", h->to_device_gb_per_s, "GB/s");
    say(at, "%s\n",
        h->is_measured ? "measured here"
        : t->is_named  ? "as stated; kernels seldom reach them"
                       : "where not given, those of a common discrete GPU");
}

static void print_head(const estimate *e, const findings *f) {
    text_line at = {0, 0};
    printf("memscale.h %d.%d.%d, what training takes: planned by a dry run\n\n",
           MEMSCALE_VERSION_MAJOR, MEMSCALE_VERSION_MINOR, MEMSCALE_VERSION_PATCH);
    print_model(&at, e, f);
    print_training(&at, &e->options);
    print_assumption(&at, e, f);
    print_formats(&at, &e->options);
    print_device(&at, &e->device);
    printf("budget    %s", show_bytes(e->device.budget_bytes).text);
    if (!e->device.is_user_size) {
        printf(", %.0f %% of the memory",
               100.0 * (double)e->device.budget_bytes / (double)e->device.memory_bytes);
    }
    if (e->options.host_bytes) {
        printf("; on the host %s", show_bytes(e->options.host_bytes).text);
    }
    printf("\n");
}

/* What a plan rounds that the plain one does not. */
typedef struct rounding_text {
    char text[96];
} rounding_text;

static rounding_text show_rounding(const findings *f, const plan *p) {
    const struct {
        const char *text;
        ms_technique technique;
    } parts[] = {{p->half == MS_DTYPE_F16 ? "F16" : "BF16", MS_TECHNIQUE_MIXED_PRECISION},
                 {"8 bits (optimizer state)", MS_TECHNIQUE_OPTIMIZER_8BIT},
                 {"sums of another order", MS_TECHNIQUE_TILING}};
    rounding_text r;
    r.text[0] = 0;
    for (int i = 0; i < 3; i++) {
        if (p->applies[parts[i].technique] && !f->plain.applies[parts[i].technique]) {
            const size_t used = strlen(r.text);
            snprintf(r.text + used, sizeof r.text - used, "%s%s", used ? ", " : "", parts[i].text);
        }
    }
    return r;
}

static void print_fit(const char *before, const findings *f, int mode) {
    const plan *p = &f->at_budget[mode];
    printf("          %s: %s fits, in %.3f times the plain step, %s\n", before,
           ms_mode_name(modes[mode]), over_plain(f, p), show_time(p->report.step_us).text);
}

/* The fastest plan that keeps the numbers, and the fastest that rounds, if it is faster. */
static void print_fits(const findings *f) {
    if (f->advised != f->rounding) {
        print_fit("same numbers", f, f->advised);
    } else {
        printf("          same numbers: no mode fits\n");
    }
    if (f->rounding >= 0) {
        print_fit("rounding", f, f->rounding);
        printf("              it rounds to %s\n",
               show_rounding(f, &f->at_budget[f->rounding]).text);
    } else {
        printf("          rounding: no faster\n");
    }
}

static void print_advice(const estimate *e, const findings *f) {
    const char *of = e->device.is_user_size ? "the budget" : "the memory";
    if (f->pressure < 100.0) {
        printf("\nadvice    plain takes %.2f of %s: ", f->pressure, of);
    } else {
        printf("\nadvice    plain takes over 100 times %s: ", of);
    }
    if (f->plain.fits) {
        printf("no mode is needed; CONSERVATIVE would give more headroom\n");
        return;
    }
    if (!f->searched) {
        printf("a mode is needed\n");
        print_fits(f);
        return;
    }
    if (f->largest_batch == 0) {
        const ms_memory_report *r = &f->single.report;
        printf("no mode is enough\n"
               "          not even one sequence fits: it takes %s, of which params and optimizer "
               "state are %s\n",
               show_bytes(r->arena_bytes).text,
               show_bytes(row_bytes(r->peak_bytes, 0) + row_bytes(r->peak_bytes, 2)).text);
        return;
    }
    printf("%s, and a smaller batch\n", ms_mode_name(modes[f->advised]));
    const ms_memory_report *r = &f->largest.report;
    printf(
        "          the largest batch that fits is %lld: %s, %s a step, %.3f of its plain step%s\n",
        (long long)f->largest_batch, show_bytes(r->arena_bytes).text, show_time(r->step_us).text,
        r->step_us / r->plain_step_us,
        precision_of(&e->options)->mixed == MS_SWITCH_ON ? " in f32" : "");
}

/* The plan that is advised; where none fits, the smallest. */
static const plan *advised_plan(const findings *f) {
    return f->plain.fits ? &f->plain : &f->at_budget[f->advised];
}

/* The largest groups of those that are resident, or of the others. */
static void print_groups(const plan *p, bool is_resident, const char *title) {
    bool shown[MOST_GROUPS] = {false};
    printf("  %s\n", title);
    for (int k = 0; k < SHOWN_GROUPS; k++) {
        int most = -1;
        for (int i = 0; i < p->group_count; i++) {
            const value_group *g = &p->groups[i];
            const bool is_more = most < 0 || group_bytes(g) > group_bytes(&p->groups[most]);
            most = g->is_resident == is_resident && !shown[i] && is_more ? i : most;
        }
        if (most >= 0) {
            const value_group *g = &p->groups[most];
            shown[most] = true;
            printf("    %12s  %4llu x %-12s %-20s %s%s\n", show_bytes(group_bytes(g)).text,
                   (unsigned long long)g->count, show_bytes(g->bytes).text,
                   ms_category_name(g->category), g->name, g->count > 1 ? ", ..." : "");
        }
    }
}

/* Who needs most. */
static void print_largest(const findings *f) {
    const plan *p = advised_plan(f);
    printf("\nThe largest values at the peak of %s (--plan=full lists all, and when they live):\n",
           p == &f->plain ? "the plain plan"
           : p->fits      ? ms_mode_name(modes[f->advised])
                          : "the smallest plan");
    print_groups(p, true, "between steps too");
    print_groups(p, false, "within a step");
}

static void print_text(const estimate *e, const findings *f) {
    print_head(e, f);
    print_table(e, f);
    printf("\nAt other moments of the plain step there are up to %s of gradients and\n%s of "
           "activations.\n",
           show_bytes(row_bytes(f->plain.largest, 1)).text,
           show_bytes(f->plain.report.activation_peak_bytes).text);
    print_same(f);
    print_largest(f);
    print_advice(e, f);
}

// ---- JSON ---------------------------------------------------------------------------------------

static void json_plan(json *j, const char *key, const findings *f, const plan *p) {
    const ms_memory_report *r = &p->report;
    json_open(j, key, '{');
    json_flag(j, "fits", p->fits);
    json_count(j, "peak_bytes", r->arena_bytes);
    for (int i = 0; i < ROWS; i++) {
        json_count(j, table_rows[i].key, row_bytes(r->peak_bytes, i));
    }
    json_count(j, "layout_gap_bytes", r->gap_bytes);
    json_count(j, "largest_gradients_bytes", row_bytes(p->largest, 1));
    json_count(j, "largest_activations_bytes", r->activation_peak_bytes);
    json_real(j, "step_us", r->step_us);
    json_real(j, "step_over_plain",
              p == &f->largest ? r->step_us / r->plain_step_us : over_plain(f, p));
    json_real(j, "stall_us", r->stall_us);
    json_real(j, "micro_batch_us", p->report.micro_us);
    json_real(j, "last_micro_batch_us", r->last_micro_us);
    json_real(j, "recompute_us", p->times.recompute_us);
    json_real(j, "recompute_over_block_forward", p->times.recompute_us / p->times.block_us);
    json_count(j, "host_bytes", r->host_bytes);
    json_count(j, "to_device_bytes", r->to_device_bytes);
    json_count(j, "to_host_bytes", r->to_host_bytes);
    json_real(j, "link_share", link_share(r));
    json_real(j, "hidden_share", r->hidden_share);
    json_count(j, "recomputed_layers", r->recompute_count);
    json_flag(j, "early_update", r->early_update);
    json_close(j, '}');
}

/* What is alive at the peak, values of one category and size together. */
static void json_groups(json *j, const plan *p) {
    json_open(j, "values_at_peak", '[');
    for (int i = 0; i < p->group_count; i++) {
        const value_group *g = &p->groups[i];
        json_open(j, NULL, '{');
        json_text(j, "first", g->name);
        json_text(j, "category", ms_category_name(g->category));
        json_flag(j, "between_steps", g->is_resident);
        json_count(j, "bytes", g->bytes);
        json_count(j, "count", g->count);
        json_close(j, '}');
    }
    json_close(j, ']');
}

static void json_model(json *j, const estimate *e, const findings *f) {
    const shape *s = &e->model;
    json_open(j, "model", '{');
    json_text(j, "name", s->name);
    json_text(j, "family", family_names[s->kind]);
    json_count(j, "layers", (uint64_t)s->layers);
    json_count(j, "channels", (uint64_t)s->channels);
    json_count(j, "heads", (uint64_t)s->heads);
    json_count(j, "kv_heads", (uint64_t)s->kv_heads);
    json_count(j, "feed_forward", (uint64_t)s->feed_forward);
    json_count(j, "vocabulary", (uint64_t)s->vocabulary);
    json_count(j, "positions", (uint64_t)s->positions);
    json_flag(j, "tied_head", s->tied);
    json_flag(j, "qkv_bias", s->qkv_bias);
    json_count(j, "params", f->plain.report.param_count);
    json_close(j, '}');
}

static void json_training(json *j, const settings *o, uint64_t trained_count) {
    static const char *const switches[] = {"default", "on", "off"};
    const precision *p = precision_of(o);
    const int64_t count = batches_of_step(o, o->batch);
    json_open(j, "training", '{');
    json_count(j, "batch", (uint64_t)o->batch);
    json_count(j, "sequence", (uint64_t)o->sequence);
    json_text(j, "precision", p->name);
    json_text(j, "mixed_precision", switches[p->mixed]);
    json_flag(j, "master_weights", p->mixed == MS_SWITCH_ON && p->masters != MS_SWITCH_OFF);
    json_text(j, "gradients", has_half_gradients(o) ? name_of_dtype(p->dtype) : "f32");
    json_text(j, "optimizer", optimizers[optimizer_of(o)].title);
    json_text(j, "state", !has_state(o) ? "none" : has_half_state(o) ? "bf16" : "f32");
    json_text(j, "state_in_8_bits", switches[o->state ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT]);
    json_flag(j, "clip", o->clip > 0.0f);
    json_count(j, "accumulation_steps", (uint64_t)count);
    json_count(j, "tokens", (uint64_t)(count * o->batch * o->sequence));
    json_count(j, "adapter_rank", (uint64_t)o->rank);
    json_count(j, "trained_params", trained_count);
    json_close(j, '}');
}

static void json_device(json *j, const destination *t, uint64_t host_bytes) {
    static const char *const kinds[] = {"cpu", "discrete", "integrated"};
    json_open(j, "device", '{');
    json_text(j, "name", t->hardware.name);
    json_text(j, "kind", kinds[t->hardware.kind]);
    json_flag(j, "speeds_are_its_own", t->is_named);
    json_real(j, "f32_tflops", t->hardware.f32_tflops);
    json_real(j, "tf32_tflops", t->hardware.tf32_tflops);
    json_real(j, "f16_tflops", t->hardware.f16_tflops);
    json_real(j, "memory_gb_per_s", t->hardware.memory_gb_per_s);
    json_real(j, "link_gb_per_s", t->hardware.to_device_gb_per_s);
    json_count(j, "memory_bytes", t->memory_bytes);
    json_count(j, "budget_bytes", t->budget_bytes);
    if (host_bytes) {
        json_count(j, "max_host_bytes", host_bytes);
    }
    json_close(j, '}');
}

static void json_advice(json *j, const findings *f) {
    json_open(j, "advice", '{');
    json_real(j, "pressure", f->pressure);
    json_text(j, "mode", f->plain.fits ? "none" : ms_mode_name(modes[f->advised]));
    const bool rounds = !f->plain.fits && !f->searched && f->rounding >= 0;
    json_flag(j, "batch_fits", !f->searched);
    json_flag(j, "keeps_numbers", f->plain.fits || !is_rounded(f, advised_plan(f)));
    if (rounds) {
        json_text(j, "rounding_mode", ms_mode_name(modes[f->rounding]));
        json_text(j, "rounds_to", show_rounding(f, &f->at_budget[f->rounding]).text);
    }
    if (f->searched) {
        json_count(j, "largest_batch", (uint64_t)f->largest_batch);
    }
    if (f->largest_batch > 0) {
        json_plan(j, "largest_batch_plan", f, &f->largest);
    }
    json_groups(j, advised_plan(f));
    json_close(j, '}');
}

static void write_json(const estimate *e, const findings *f, FILE *file) {
    json j = {file, 0, false, false};
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", MEMSCALE_VERSION_MAJOR, MEMSCALE_VERSION_MINOR,
             MEMSCALE_VERSION_PATCH);
    json_open(&j, NULL, '{');
    json_text(&j, "memscale", version);
    json_model(&j, e, f);
    json_training(&j, &e->options, f->plain.trained_count);
    json_device(&j, &e->device, e->options.host_bytes);
    json_plan(&j, "plain", f, &f->plain);
    if (f->late.report.arena_bytes != 0) {
        json_plan(&j, "smallest_with_clipping", f, &f->late);
    }
    json_open(&j, "modes", '{');
    for (int i = 0; i < MODES; i++) {
        json_open(&j, ms_mode_name(modes[i]), '{');
        json_plan(&j, "at_budget", f, &f->at_budget[i]);
        json_plan(&j, "smallest", f, &f->smallest[i]);
        json_close(&j, '}');
    }
    json_close(&j, '}');
    json_advice(&j, f);
    json_close(&j, '}');
    fputc('\n', file);
}

// ---- a picture of budgets -----------------------------------------------------------------------

enum { SWEEP_POINTS = 25, SWEEP_WIDTH = 860, SWEEP_HEIGHT = 690 };

/* One mode over budgets, from the smallest that fits to the peak of the plain plan. */
typedef struct sweep {
    ms_mode mode;
    double budget[SWEEP_POINTS], peak[SWEEP_POINTS], ratio[SWEEP_POINTS]; // bytes; over plain
    int count;
} sweep;

/* A budget of a sweep. */
typedef struct sweep_point {
    uint64_t budget, peak;
    double ratio;
    bool is_planned, fits;
} sweep_point;

static int plan_point(const estimate *e, const findings *f, int mode, sweep_point *at) {
    plan p;
    const int status = plan_budget(e, e->options.batch, modes[mode], at->budget, &p);
    at->is_planned = status == 0;
    at->fits = p.fits;
    at->peak = p.report.arena_bytes;
    at->ratio = p.fits ? over_plain(f, &p) : 0.0;
    return status;
}

/* What cannot be seen in the picture: a hundredth of its height. */
static double least_seen(const sweep_point *points) {
    double least = 1.0, most = 1.0;
    for (int i = 0; i < SWEEP_POINTS; i++) {
        least = points[i].fits && points[i].ratio < least ? points[i].ratio : least;
        most = points[i].fits && points[i].ratio > most ? points[i].ratio : most;
    }
    return most - least > 0.2 ? 0.01 * (most - least) : 0.002;
}

/* Whether the plan for a budget can be drawn as lying between those on both sides of it: neither
   peaks nor times go the wrong way, so that it cannot differ from them by more than they do. */
static bool is_drawn_without(const sweep_point *below, const sweep_point *above, double seen) {
    return !below->is_planned || !above->is_planned ||
           (below->fits && above->fits && fabs(below->ratio - above->ratio) < seen);
}

/* Plans the points that are wanted, in several threads. */
static int plan_points(const estimate *e, const findings *f, int mode, sweep_point *points,
                       const bool *is_wanted) {
    int failed = 0, count = 0;
    for (int i = 0; i < SWEEP_POINTS; i++) {
        count += is_wanted[i];
    }
    expect_plans(e, count);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) reduction(+ : failed)
#endif
    for (int i = 0; i < SWEEP_POINTS; i++) {
        failed += is_wanted[i] && plan_point(e, f, mode, &points[i]) != 0;
    }
    return failed != 0;
}

/* Every eighth budget first, then the middles of the intervals in which the time changes. */
static int make_sweep(const estimate *e, const findings *f, int mode, sweep *s) {
    const uint64_t least = f->smallest[mode].report.arena_bytes;
    const uint64_t most = f->plain.report.arena_bytes;
    sweep_point points[SWEEP_POINTS];
    bool is_wanted[SWEEP_POINTS];
    memset(points, 0, sizeof points);
    for (int i = 0; i < SWEEP_POINTS; i++) {
        const double share = (double)i / (double)(SWEEP_POINTS - 1);
        points[i].budget =
            i + 1 == SWEEP_POINTS ? most : least + (uint64_t)(share * (double)(most - least));
    }
    for (int step = 8; step > 0; step /= 2) {
        const double seen = least_seen(points);
        for (int i = 0; i < SWEEP_POINTS; i++) {
            is_wanted[i] = step == 8
                               ? i % 8 == 0
                               : i % (2 * step) == step &&
                                     !is_drawn_without(&points[i - step], &points[i + step], seen);
        }
        if (plan_points(e, f, mode, points, is_wanted) != 0) {
            return 1;
        }
    }
    s->mode = modes[mode];
    s->count = 0;
    for (int i = 0; i < SWEEP_POINTS; i++) {
        if (points[i].is_planned && points[i].fits) {
            s->budget[s->count] = (double)points[i].budget;
            s->peak[s->count] = (double)points[i].peak;
            s->ratio[s->count++] = points[i].ratio;
        }
    }
    return 0;
}

/* A panel of the picture: where it is, and the values at its edges. */
typedef struct panel {
    double left, right, top, bottom;
    double x_low, x_high, y_low, y_high;
} panel;

static double panel_x(const panel *p, double x) {
    return p->left + (x - p->x_low) / (p->x_high - p->x_low) * (p->right - p->left);
}

static double panel_y(const panel *p, double y) {
    return p->bottom - (y - p->y_low) / (p->y_high - p->y_low) * (p->bottom - p->top);
}

/* 1, 2 or 5 times a power of 10, so that a range has some `count` steps. */
static double nice_step(double range, int count) {
    double power = 1.0;
    const double rough = range / (double)count;
    while (power * 10.0 <= rough) {
        power *= 10.0;
    }
    while (power > rough) {
        power /= 10.0;
    }
    return rough <= 2.0 * power ? 2.0 * power : rough <= 5.0 * power ? 5.0 * power : 10.0 * power;
}

static int digits_of(double step) {
    int digits = 0;
    for (; step < 0.999 && digits < 6; step *= 10.0) {
        digits++;
    }
    return digits;
}

/* A text in UTF-8. XML 1.0 has no control characters. */
static void svg_escaped(FILE *file, const char *text) {
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        const bool is_control = *c < 32 || *c == 127;
        if (*c == '<' || *c == '>' || *c == '&' || is_control) {
            fprintf(file, "&#%d;", is_control ? '?' : *c);
        } else {
            fputc(*c, file);
        }
    }
}

static void svg_text(FILE *file, double x, double y, const char *style, const char *text) {
    fprintf(file, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, style);
    svg_escaped(file, text);
    fprintf(file, "</text>\n");
}

static void svg_line(FILE *file, double x1, double y1, double x2, double y2, const char *style) {
    fprintf(file, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2, y2,
            style);
}

/* Ticks of both axes with their numbers, and thin grid lines. */
static void svg_grid(FILE *file, const panel *p) {
    char text[32];
    const double x_step = nice_step(p->x_high - p->x_low, 8);
    const double y_step = nice_step(p->y_high - p->y_low, 8);
    for (double x = ceil(p->x_low / x_step) * x_step; x <= p->x_high + 1e-9; x += x_step) {
        svg_line(file, panel_x(p, x), p->top, panel_x(p, x), p->bottom, "class=\"grid\"");
        snprintf(text, sizeof text, "%.*f", digits_of(x_step), fabs(x) < 1e-9 ? 0.0 : x);
        svg_text(file, panel_x(p, x), p->bottom + 17.0, "class=\"tick\" text-anchor=\"middle\"",
                 text);
    }
    for (double y = ceil(p->y_low / y_step) * y_step; y <= p->y_high + 1e-9; y += y_step) {
        svg_line(file, p->left, panel_y(p, y), p->right, panel_y(p, y), "class=\"grid\"");
        snprintf(text, sizeof text, "%.*f", digits_of(y_step), fabs(y) < 1e-9 ? 0.0 : y);
        svg_text(file, p->left - 8.0, panel_y(p, y) + 4.0, "class=\"tick\" text-anchor=\"end\"",
                 text);
    }
    fprintf(file, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" class=\"frame\"/>\n",
            p->left, p->top, p->right - p->left, p->bottom - p->top);
}

static void svg_axis_name(FILE *file, const panel *p, const char *name) {
    const double y = 0.5 * (p->top + p->bottom);
    fprintf(file,
            "<text transform=\"translate(%.1f %.1f) rotate(-90)\" class=\"name\" "
            "text-anchor=\"middle\">%s</text>\n",
            p->left - 58.0, y, name);
}

static const char *const sweep_colours[MODES] = {"#1f6fb4", "#d9730d", "#2e8b57"};

/* values over budgets, in the colour of the mode; a dot for each plan. A plan is good for every
   budget up to the next dot, so that the curve has steps. */
static void svg_curve(FILE *file, const panel *p, const sweep *s, const double *values,
                      double x_unit, double y_unit) {
    const char *colour = sweep_colours[s->mode];
    fprintf(file, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"2\" d=\"", colour);
    for (int i = 0; i < s->count; i++) {
        fprintf(file, "%s%.1f%s%.1f", i ? "H" : "M", panel_x(p, s->budget[i] / x_unit),
                i ? "V" : " ", panel_y(p, values[i] / y_unit));
    }
    fprintf(file, "\"/>\n");
    for (int i = 0; i < s->count; i++) {
        fprintf(file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.6\" fill=\"%s\"/>\n",
                panel_x(p, s->budget[i] / x_unit), panel_y(p, values[i] / y_unit), colour);
    }
}

/* Budgets below the smallest plan of all. */
static void svg_infeasible(FILE *file, const panel *p, double least) {
    const double right = panel_x(p, least);
    fprintf(file,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"url(#hatch)\"/>\n",
            p->left, p->top, right - p->left, p->bottom - p->top);
    svg_line(file, right, p->top, right, p->bottom, "class=\"edge\"");
}

static void svg_style(FILE *file) {
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 "
            "%d %d\" font-family=\"Helvetica, Arial, sans-serif\">\n",
            SWEEP_WIDTH, SWEEP_HEIGHT, SWEEP_WIDTH, SWEEP_HEIGHT);
    fprintf(file,
            "<style>.title{font-size:17px;font-weight:bold;fill:#222}.name{font-size:13px;"
            "fill:#333}.note{font-size:12px;fill:#444}.tick{font-size:12px;fill:#555}"
            ".grid{stroke:#e4e4e4}.frame{fill:none;stroke:#888}.edge{stroke:#999}"
            ".same{stroke:#999;stroke-dasharray:5 4}.budget{stroke:#b02a37;stroke-dasharray:7 4;"
            "stroke-width:1.5}.halo{paint-order:stroke;stroke:#fff;stroke-width:4px}</style>\n"
            "<defs><pattern id=\"hatch\" width=\"8\" height=\"8\" "
            "patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><rect width=\"8\" "
            "height=\"8\" fill=\"#f6f6f6\"/><line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"8\" "
            "stroke=\"#c9c9c9\" stroke-width=\"2\"/></pattern></defs>\n"
            "<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n",
            SWEEP_WIDTH, SWEEP_HEIGHT);
}

static void svg_head(FILE *file, const estimate *e, const findings *f) {
    char text[256];
    snprintf(text, sizeof text, "%s, batch %lld x %lld tokens, %s, %s", e->model.name,
             (long long)e->options.batch, (long long)e->options.sequence,
             precision_of(&e->options)->name, optimizers[optimizer_of(&e->options)].title);
    svg_text(file, 80.0, 30.0, "class=\"title\"", text);
    snprintf(text, sizeof text, "%.1f M params; predicted for %s, %s; the plain step takes %s",
             (double)f->plain.report.param_count / 1e6, e->device.hardware.name,
             show_bytes(e->device.memory_bytes).text, show_time(f->plain.report.step_us).text);
    svg_text(file, 80.0, 50.0, "class=\"name\"", text);
}

/* The names of the curves, side by side above the panels. */
static void svg_legend(FILE *file, const findings *f, const bool *is_drawn) {
    double x = 80.0;
    for (int i = 0; i < MODES; i++) {
        char text[64] = "";
        for (int k = i; k < MODES && is_drawn[i]; k++) {
            if (k == i || f->same_as[k] == i) {
                const size_t used = strlen(text);
                snprintf(text + used, sizeof text - used, "%s%s", used ? ", " : "",
                         ms_mode_name(modes[k]));
            }
        }
        if (is_drawn[i]) {
            fprintf(file,
                    "<line x1=\"%.1f\" y1=\"68\" x2=\"%.1f\" y2=\"68\" stroke=\"%s\" "
                    "stroke-width=\"3\"/>\n",
                    x, x + 24.0, sweep_colours[modes[i]]);
            svg_text(file, x + 30.0, 72.0, "class=\"name\"", text);
            x += 60.0 + 8.2 * (double)strlen(text);
        }
    }
}

/* The plain plan, named beside the frame. */
static void svg_plain(FILE *file, const panel *p, double x, double y, const char *text) {
    fprintf(file,
            "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"6\" fill=\"#fff\" stroke=\"#222\" "
            "stroke-width=\"2\"/>\n",
            panel_x(p, x), panel_y(p, y));
    svg_text(file, p->right + 12.0, panel_y(p, y) - 2.0, "class=\"note\"", "plain");
    svg_text(file, p->right + 12.0, panel_y(p, y) + 13.0, "class=\"note\"", text);
}

/* Where the device's own budget lies, if that is in the picture; its name is above the frame. */
static void svg_budget(FILE *file, const panel *p, double budget, const char *text) {
    if (budget > p->x_low && budget < p->x_high) {
        const double x = panel_x(p, budget);
        svg_line(file, x, p->top, x, p->bottom, "class=\"budget\"");
        svg_text(file, x, p->top - 6.0, "class=\"note\" text-anchor=\"middle\"", text);
    }
}

/* The smallest and the largest of a number over all plans, and one more. */
static void widen(double value, double *least, double *most) {
    *least = value < *least ? value : *least;
    *most = value > *most ? value : *most;
}

static void draw_sweep(const estimate *e, const findings *f, const sweep *sweeps,
                       const bool *is_drawn, FILE *file) {
    const unit u = unit_for(f->plain.report.arena_bytes);
    const double most = (double)f->plain.report.arena_bytes / u.bytes;
    double least = most, largest = most, fastest = 1.0, slowest = 1.0;
    char text[64];
    for (int i = 0; i < MODES; i++) {
        for (int k = 0; k < (is_drawn[i] ? sweeps[i].count : 0); k++) {
            widen(sweeps[i].budget[k] / u.bytes, &least, &largest);
            widen(sweeps[i].ratio[k], &fastest, &slowest);
        }
    }
    const double span = most - least > 0.02 * most ? most - least : 0.1 * most;
    const double left = least > 0.14 * span ? least - 0.14 * span : 0.0;
    panel peak = {80.0, 770.0, 112.0, 360.0, left, most + 0.04 * span, left, most + 0.08 * span};
    panel time = {80.0, 770.0, 406.0, 610.0, left, most + 0.04 * span, 1.0, 1.0};
    const double range = slowest - fastest > 0.02 ? slowest - fastest : 0.02;
    time.y_low = fastest - 0.1 * range;
    time.y_high = fastest + 1.12 * range;
    svg_style(file);
    svg_head(file, e, f);
    svg_legend(file, f, is_drawn);
    svg_grid(file, &peak);
    svg_grid(file, &time);
    svg_infeasible(file, &peak, least);
    svg_infeasible(file, &time, least);
    svg_line(file, peak.left, peak.bottom, peak.right, peak.top, "class=\"same\"");
    snprintf(text, sizeof text, "budget %s", show_bytes(e->device.budget_bytes).text);
    svg_budget(file, &peak, (double)e->device.budget_bytes / u.bytes, text);
    svg_budget(file, &time, (double)e->device.budget_bytes / u.bytes, "");
    for (int i = 0; i < MODES; i++) {
        if (is_drawn[i]) {
            svg_curve(file, &peak, &sweeps[i], sweeps[i].peak, u.bytes, u.bytes);
            svg_curve(file, &time, &sweeps[i], sweeps[i].ratio, u.bytes, 1.0);
        }
    }
    svg_plain(file, &peak, most, most, show_bytes(f->plain.report.arena_bytes).text);
    svg_plain(file, &time, most, 1.0, show_time(f->plain.report.step_us).text);
    snprintf(text, sizeof text, "peak, %s", u.name);
    svg_axis_name(file, &peak, text);
    svg_axis_name(file, &time, "step time over plain");
    snprintf(text, sizeof text, "budget, %s", u.name);
    svg_text(file, 0.5 * (peak.left + peak.right), 650.0, "class=\"name\" text-anchor=\"middle\"",
             text);
    svg_text(file, peak.left, 676.0, "class=\"note\"",
             "hatched: no plan fits; grey dashes: peak = budget; a dot is a plan");
    fprintf(file, "</svg>\n");
}

/* Of the modes that plan differently. */
typedef struct all_sweeps {
    sweep of[MODES];
    bool is_drawn[MODES];
} all_sweeps;

static int make_sweeps(const estimate *e, const findings *f, all_sweeps *all) {
    int status = 0;
    for (int i = 0; i < MODES; i++) {
        all->is_drawn[i] = f->same_as[i] == i;
        status = status == 0 && all->is_drawn[i] ? make_sweep(e, f, i, &all->of[i]) : status;
    }
    return status;
}

/* Ends what was written to a file; returns `status`, or prints what went wrong and returns 1. */
static int close_file(FILE *file, const char *path, int status) {
    const bool failed = ferror(file) != 0;
    return fclose(file) != 0 || failed ? fail("cannot write %s: %s", path, strerror(errno))
                                       : status;
}

static FILE *open_file(const char *path) {
    FILE *file = fopen(path, "wb");
    if (!file) {
        fail("cannot write %s: %s", path, strerror(errno));
    }
    return file;
}

static int write_sweep(const estimate *e, const findings *f, const all_sweeps *all) {
    FILE *file = open_file(e->options.sweep);
    if (!file) {
        return 1;
    }
    draw_sweep(e, f, all->of, all->is_drawn, file);
    return close_file(file, e->options.sweep, 0);
}

// ---- plans that are shown -----------------------------------------------------------------------

static ms_model *wrap_model(const estimate *e, ms_config *config, nn_net **net) {
    ms_model *model = register_model(e, e->options.batch, config, net);
    if (model && ms_wrap(model) != MS_RESULT_OK) {
        fail("%s", ms_last_error(model));
        ms_destroy(model);
        nn_destroy(*net);
        return NULL;
    }
    return model;
}

/* The plan of a mode within the budget; where none fits, the smallest. */
static ms_model *wrap_mode(const estimate *e, const findings *f, int mode, nn_net **net) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.mode = modes[mode];
    config.force_optimize = !f->smallest[mode].fits;
    config.memory_budget_bytes = config.force_optimize ? (uint64_t)1 << 60 : e->device.budget_bytes;
    return wrap_model(e, &config, net);
}

static int shown_mode(const estimate *e, const findings *f) {
    return e->options.mode ? find_mode(e->options.mode) : f->advised;
}

static void write_text(const char *text, size_t length, void *user) {
    fwrite(text, 1, length, (FILE *)user);
}

/* Lists the plan of --mode or of the advised mode. */
static int list_plan(const estimate *e, const findings *f) {
    nn_net *net;
    const int mode = shown_mode(e, f);
    ms_model *model = wrap_mode(e, f, mode, &net);
    if (!model) {
        return 1;
    }
    printf("\nplan      the %s of mode %s\n\n",
           f->smallest[mode].fits ? "fastest found" : "smallest", ms_mode_name(modes[mode]));
    const ms_result result = e->options.full_plan ? ms_print_plan_full(model, write_text, stdout)
                                                  : ms_print_plan(model, write_text, stdout);
    const int status = result == MS_RESULT_OK ? 0 : fail("%s", ms_last_error(model));
    ms_destroy(model);
    nn_destroy(net);
    return status;
}

/* Adds the plan of a mode to a page, or the plain plan (mode -1). */
static int add_to_page(const estimate *e, const findings *f, page *p, int mode) {
    nn_net *net;
    ms_config config = plain_config();
    char note[512];
    const plan *of = mode < 0 ? &f->plain : &f->at_budget[mode];
    ms_model *model = mode < 0 ? wrap_model(e, &config, &net) : wrap_mode(e, f, mode, &net);
    if (!model) {
        return 1;
    }
    snprintf(note, sizeof note, "%s the budget; %.3f times the plain step%s%s",
             of->fits ? "Fits" : "Does not fit", over_plain(f, of),
             is_rounded(f, of) ? "; it rounds to " : "; the same numbers as the plain plan",
             show_rounding(f, of).text);
    page_add_plan(p, mode < 0 ? "plain" : ms_mode_name(modes[mode]), note, model);
    ms_destroy(model);
    nn_destroy(net);
    count_plan(e);
    return 0;
}

/* The modes that plan differently, after the plain plan; returns the number of the one that is
   advised, or -1 after an error. */
static int add_all_to_page(const estimate *e, const findings *f, page *p) {
    int shown = 0, count = 1, status = add_to_page(e, f, p, -1);
    for (int i = 0; i < MODES && status == 0; i++) {
        if (f->same_as[i] == i) {
            status = add_to_page(e, f, p, i);
            shown = i == f->same_as[shown_mode(e, f)] ? count : shown;
            count++;
        }
    }
    return status == 0 ? shown : -1;
}

static int write_page(const estimate *e, const findings *f, const all_sweeps *all) {
    page p;
    page_curve curves[MODES];
    char title[160], subtitle[256];
    int count = 0;
    FILE *file = open_file(e->options.html);
    if (!file) {
        return 1;
    }
    snprintf(title, sizeof title, "%s, batch %lld x %lld tokens, %s, %s", e->model.name,
             (long long)e->options.batch, (long long)e->options.sequence,
             precision_of(&e->options)->name, optimizers[optimizer_of(&e->options)].title);
    snprintf(subtitle, sizeof subtitle,
             "%.1f M params; predicted for %s, %s, by memscale.h %d.%d.%d: no number is measured",
             (double)f->plain.report.param_count / 1e6, e->device.hardware.name,
             show_bytes(e->device.memory_bytes).text, MEMSCALE_VERSION_MAJOR,
             MEMSCALE_VERSION_MINOR, MEMSCALE_VERSION_PATCH);
    page_begin(&p, file, title, subtitle);
    expect_plans(e, COLUMNS);
    const int shown = add_all_to_page(e, f, &p);
    for (int i = 0; i < MODES; i++) {
        const sweep *s = &all->of[i];
        if (all->is_drawn[i]) {
            const page_curve curve = {ms_mode_name(s->mode), s->budget, s->peak, s->ratio,
                                      s->count};
            curves[count++] = curve;
        }
    }
    page_end(&p, shown < 0 ? 0 : shown, e->device.budget_bytes, curves, count);
    end_progress(e->shown);
    return close_file(file, e->options.html,
                      shown < 0                  ? 1
                      : p.result == MS_RESULT_OK ? 0
                                                 : fail("the plans cannot be written"));
}

// ---- main ---------------------------------------------------------------------------------------

/* The pictures, which have the same plans over budgets. */
static int write_files(const estimate *e, const findings *f) {
    all_sweeps all;
    memset(&all, 0, sizeof all);
    const int failed = make_sweeps(e, f, &all);
    end_progress(e->shown);
    return failed || (e->options.sweep && is_fit(f) && write_sweep(e, f, &all) != 0) ||
           (e->options.html && write_page(e, f, &all) != 0);
}

/* Writes what was asked for; returns the exit status. */
static int write_all(const estimate *e, const findings *f) {
    const bool lists = e->options.plan || e->options.full_plan;
    if (e->options.json) {
        write_json(e, f, stdout);
    } else {
        print_text(e, f);
    }
    if (lists && list_plan(e, f) != 0) {
        return STATUS_FAILED;
    }
    if (fflush(stdout) != 0) {
        return fail("cannot write: %s", strerror(errno));
    }
    if ((e->options.html || (e->options.sweep && is_fit(f))) && write_files(e, f) != 0) {
        return STATUS_FAILED;
    }
    return is_fit(f) ? STATUS_FITS : STATUS_NO_FIT;
}

int main(int argc, char **argv) {
    estimate e;
    findings f;
    progress shown;
    option_spec specs[ESTIMATE_OPTIONS];
    memset(&e, 0, sizeof e);
    memset(&shown, 0, sizeof shown);
    e.options.utilization = 0.85f;
    list_options(&e.options, specs);
    if (read_options(specs, ESTIMATE_OPTIONS, argc, argv, &e.options.files) != 0) {
        return STATUS_USAGE;
    }
    if (e.options.help) {
        print_help();
        return STATUS_FITS;
    }
    if (e.options.json && (e.options.plan || e.options.full_plan)) {
        fail("--plan is text: not with --json");
        return STATUS_USAGE;
    }
    if ((e.options.sweep && *e.options.sweep == 0) || (e.options.html && *e.options.html == 0)) {
        fail("--sweep and --html need the name of a file");
        return STATUS_USAGE;
    }
    if (choose_training(&e.options) != 0 || choose_shape(&e.options, &e.model) != 0 ||
        choose_target(&e.options, &e.device) != 0) {
        return STATUS_USAGE;
    }
    e.shown = &shown;
    shown.is_shown = e.options.progress || isatty(STDERR_FILENO);
    shown.start_s = seconds_now();
    const int failed = find_all(&e, &f);
    end_progress(&shown);
    return failed ? STATUS_FAILED : write_all(&e, &f);
}
